/* An OpenCL library that stands in for the real one: it forwards every call, and fails the calls that a test selects.
 *
 * mod.rs compiles and controls it. It needs no OpenCL headers: handles are pointers, and all other types are those of the
 * 64-bit platforms that the tests run on. Environment variables:
 *
 * STAND_IN_REAL: the path of the real library, if it is not libOpenCL.so.1.
 * STAND_IN_CONTROL: the file through which the test process reads counts and requests faults; without it nothing fails.
 * STAND_IN_DISCRETE=1: every device reports that it is a discrete GPU.
 * STAND_IN_WORK_GROUP, STAND_IN_LOCAL_MEMORY: upper limits of the devices' work-group size and local memory.
 * STAND_IN_KERNEL_GROUP: upper limit of the work-group size that devices report for any kernel.
 * STAND_IN_HINTS=1: devices report that queues accept priority and throttle hints. The hints are counted and not forwarded.
 * STAND_IN_LARGEST: upper limit of the largest buffer that devices report, in bytes.
 * STAND_IN_LARGE: how the driver treats larger buffers: `granted`, as NVIDIA's; `refused`, as PoCL's; `intel`, with a flag;
 *     or `qualcomm`, with a property. The flag, the property and Intel's build option are counted and not forwarded.
 * STAND_IN_GRAPHS: how the driver records commands. Not at all unless it is `buffers`, with the real library's command
 *     buffers; `sequential`, the same, but devices report that they run one at a time; or `recordings`, with Qualcomm's
 *     recordings, which are implemented here. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

/* A function's entry in the control file; mod.rs knows the offsets. */
struct slot {
    char name[40];
    uint64_t calls, errors, injected;
    /* Calls number `first` to `first + times - 1` fail, counted from 1. */
    uint64_t first, times;
    /* The error code of failing calls. `late` is 0 if the call itself fails. 1: a command with an event is accepted, and its
     * event fails. 2: a command is accepted, does nothing, and reports success. */
    int32_t code, late;
    /* The delay of commands, in microseconds. */
    uint64_t delay;
};
enum { SLOTS = 96 };
_Static_assert(sizeof(struct slot) == 96, "mod.rs reads entries of this size");

static struct slot *slots, *any, *events, *lenient;
static void *library;

/* The callback of the first context, which is called with every fault, inside the failing call. */
static void (*notify_context)(const char *text, const void *data, size_t bytes, void *user);
static void *notified;

static void remember_callback(void (*notify)(void), void *user) {
    if (!notify_context) notified = user, notify_context = (void (*)(const char *, const void *, size_t, void *))notify;
}

static struct slot *add_slot(const char *name) {
    for (int i = 0; i < SLOTS; i++)
        if (!slots[i].name[0] || !strcmp(slots[i].name, name)) /* another process may have filled the file already */
            return strncpy(slots[i].name, name, sizeof slots->name - 1), &slots[i];
    fprintf(stderr, "stand-in: more than %d functions\n", SLOTS), abort();
}

/* Runs before the constructors of the functions below. */
__attribute__((constructor(101))) static void load(void) {
    const char *real = getenv("STAND_IN_REAL"), *control = getenv("STAND_IN_CONTROL");
    library = dlopen(real ? real : "libOpenCL.so.1", RTLD_NOW | RTLD_LOCAL);
    int file = control ? open(control, O_RDWR | O_CLOEXEC) : -1;
    slots = mmap(NULL, SLOTS * sizeof *slots, PROT_READ | PROT_WRITE, file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED, file, 0);
    if (!library || slots == MAP_FAILED || (control && file < 0))
        fprintf(stderr, "stand-in: no real library or no control file: %s\n", dlerror()), abort();
    any = add_slot("any"), events = add_slot("event"), lenient = add_slot("lenient wait");
    for (const char **hint = (const char *[]){"priority 1", "priority 4", "throttle 1", "throttle 4", "unrestricted size", "large buffer", "wide offsets", NULL}; *hint; hint++) add_slot(*hint);
}

static uint64_t count(uint64_t *counter) { return __atomic_add_fetch(counter, 1, __ATOMIC_SEQ_CST); }

static int is_due(struct slot *s, uint64_t call) {
    uint64_t times = __atomic_load_n(&s->times, __ATOMIC_SEQ_CST);
    return call >= s->first && call - s->first < times;
}

/* Counts a call of the function. Returns the slot that describes how the call fails, or NULL if it does not. */
static struct slot *begin(struct slot *self, int has_event) {
    uint64_t call = count(&self->calls), of_all = count(&any->calls);
    struct slot *fault = is_due(self, call) ? self : is_due(any, of_all) ? any : NULL;
    if (!fault || (fault->late == 1 && !has_event)) return NULL;
    if (notify_context) notify_context("the stand-in fails a call", NULL, 0, notified);
    return count(&self->injected), count(&any->injected), fault;
}

static int end(struct slot *self, int code) {
    if (code) count(&self->errors), count(&any->errors);
    return code;
}

#define REAL(type, name, parameters) ((type(*) parameters)dlsym(library, #name))

/* Makes a user event in the context of the queue. */
static void *user_event(void *queue) {
    void *context = NULL;
    int code = 0;
    REAL(int, clGetCommandQueueInfo, (void *, unsigned, size_t, void *, size_t *))(queue, 0x1090, sizeof context, &context, NULL);
    return REAL(void *, clCreateUserEvent, (void *, int *))(context, &code);
}

static void set_status(void *event, int status) { REAL(int, clSetUserEventStatus, (void *, int))(event, status); }

struct gate {
    void *event;
    uint64_t delay;
};

static void *open_gate(void *argument) {
    struct gate gate = *(struct gate *)argument;
    free(argument);
    struct timespec time = {gate.delay / 1000000, gate.delay % 1000000 * 1000};
    nanosleep(&time, NULL);
    set_status(gate.event, 0);
    REAL(int, clReleaseEvent, (void *))(gate.event);
    return NULL;
}

/* Makes an event that completes after a delay in microseconds. */
static void *gate(void *queue, uint64_t delay) {
    struct gate *gate = malloc(sizeof *gate);
    *gate = (struct gate){user_event(queue), delay};
    void *event = gate->event;
    pthread_t thread;
    pthread_create(&thread, NULL, open_gate, gate), pthread_detach(thread);
    return event;
}

/* Limits a size to the number in an environment variable, if that is set. */
static void limit(size_t *value, const char *variable) {
    const char *most = getenv(variable);
    if (most && *value > strtoul(most, NULL, 10)) *value = strtoul(most, NULL, 10);
}

static void limit_group(unsigned what, void *value) {
    if (what != 0x11B0 /* CL_KERNEL_WORK_GROUP_SIZE */ || !value) return;
    limit(value, "STAND_IN_WORK_GROUP");
    limit(value, "STAND_IN_KERNEL_GROUP");
}

/* Whether STAND_IN_GRAPHS selects this way of recording commands. */
static int keeps(const char *what) {
    const char *kept = getenv("STAND_IN_GRAPHS");
    return kept && !strcmp(kept, what);
}

/* Whether STAND_IN_LARGE selects this driver. */
static int driver_is(const char *name) {
    const char *driver = getenv("STAND_IN_LARGE");
    return driver && !strcmp(driver, name);
}

/* Changes a reported device property as the environment variables request. */
static void disguise(unsigned what, void *value) {
    if (!value) return;
    if (what == 0x1004 /* CL_DEVICE_MAX_WORK_GROUP_SIZE */) limit(value, "STAND_IN_WORK_GROUP");
    if (what == 0x1023 /* CL_DEVICE_LOCAL_MEM_SIZE */) limit(value, "STAND_IN_LOCAL_MEMORY");
    if (what == 0x1010 /* CL_DEVICE_MAX_MEM_ALLOC_SIZE */) limit(value, "STAND_IN_LARGEST");
    if (what == 0x102C /* CL_DEVICE_VENDOR */ && driver_is("intel") && strlen(value) >= 5) strcpy(value, "Intel");
    if (what == 0x1030 /* CL_DEVICE_EXTENSIONS */ && driver_is("qualcomm")) memcpy(value, "cl_qcom_large_buffer ", 21);
    const char *hints = getenv("STAND_IN_HINTS"), *more = "cl_khr_priority_hints cl_khr_throttle_hints ";
    if (what == 0x1030 /* CL_DEVICE_EXTENSIONS */ && hints && !strcmp(hints, "1") && strlen(value) > strlen(more))
        memcpy(value, more, strlen(more)); /* overwrites the first extensions, so that the length does not change */
    if (what == 0x1030 && keeps("recordings")) memcpy(value, "cl_qcom_recordable_queues ", 26);
    if (what == 0x12A9 /* CL_DEVICE_COMMAND_BUFFER_CAPABILITIES_KHR */ && keeps("sequential")) *(uint64_t *)value &= ~UINT64_C(4);
    const char *discrete = getenv("STAND_IN_DISCRETE");
    if (!discrete || strcmp(discrete, "1")) return;
    if (what == 0x1000) *(uint64_t *)value = 4; /* CL_DEVICE_TYPE is CL_DEVICE_TYPE_GPU */
    if (what == 0x1035) *(uint32_t *)value = 0; /* CL_DEVICE_HOST_UNIFIED_MEMORY */
}

/* Declares the slot and the real function's pointer for each function. A function that the real library lacks returns
 * CL_INVALID_OPERATION, as a loader does for a driver of an earlier version. */
#define DECLARE(type, name, parameters)                                                                                \
    static struct slot *slot_##name;                                                                                   \
    static type(*real_##name) parameters;                                                                              \
    __attribute__((constructor(102))) static void add_##name(void) {                                                   \
        slot_##name = add_slot(#name), real_##name = (type(*) parameters)dlsym(library, #name);                        \
    }

/* A function that returns its status. */
#define STATUS(name, parameters, arguments, then)                                                                      \
    DECLARE(int, name, parameters)                                                                                     \
    int name parameters {                                                                                              \
        struct slot *fault = begin(slot_##name, 0);                                                                    \
        int code = fault ? fault->code : real_##name ? real_##name arguments : -59;                                    \
        if (!code) { then; }                                                                                           \
        return end(slot_##name, code);                                                                                 \
    }

/* A function that returns a handle, and its status through its last parameter, `status`. */
#define CREATE(name, parameters, arguments, then)                                                                      \
    DECLARE(void *, name, parameters)                                                                                  \
    void *name parameters {                                                                                            \
        struct slot *fault = begin(slot_##name, 0);                                                                    \
        int code = 0, *out = status;                                                                                   \
        status = &code;                                                                                                \
        void *handle = fault ? (code = fault->code, NULL) : real_##name ? real_##name arguments : (code = -59, NULL);  \
        if (!code) { then; }                                                                                           \
        if (out) *out = code;                                                                                          \
        end(slot_##name, code);                                                                                        \
        return handle;                                                                                                 \
    }

/* A command with a wait list and an event. It may be delayed, or fail after it was accepted. */
#define COMMAND(name, parameters, arguments)                                                                           \
    DECLARE(int, name, (parameters unsigned waits, void *const *list, void **event))                                   \
    int name(parameters unsigned waits, void *const *list, void **event) {                                             \
        struct slot *fault = begin(slot_##name, event != NULL);                                                        \
        uint64_t delay = slot_##name->delay;                                                                           \
        void *held;                                                                                                    \
        int code = 0;                                                                                                  \
        if (fault && fault->late) {                                                                                    \
            if (event) set_status(*event = user_event(queue), fault->late == 1 ? fault->code : 0);                     \
        } else if (fault)                                                                                                \
            code = fault->code;                                                                                        \
        else if (!real_##name)                                                                                         \
            code = -59;                                                                                                \
        else if (delay && !waits)                                                                                      \
            held = gate(queue, delay), code = real_##name(arguments 1, &held, event);                                  \
        else                                                                                                           \
            code = real_##name(arguments waits, list, event);                                                          \
        if (!code && event) count(&events->calls);                                                                     \
        end(slot_##name, fault ? fault->code : code);                                                                  \
        return code;                                                                                                   \
    }

#define P(...) __VA_ARGS__ /* parameters or arguments, each followed by a comma */
#define INFO(name, object)                                                                                             \
    STATUS(name, (void *object, unsigned what, size_t size, void *value, size_t *needed), (object, what, size, value, needed), )
#define RELEASE(name) STATUS(name, (void *object), (object), )

typedef void (*callback)(void);

STATUS(clGetPlatformIDs, (unsigned room, void **platforms, unsigned *n), (room, platforms, n), )
INFO(clGetPlatformInfo, platform)
STATUS(clGetDeviceIDs, (void *platform, uint64_t type, unsigned room, void **devices, unsigned *n), (platform, type, room, devices, n), )
STATUS(clGetDeviceInfo, (void *device, unsigned what, size_t size, void *value, size_t *needed), (device, what, size, value, needed), disguise(what, value))
CREATE(clCreateContext, (const intptr_t *properties, unsigned n, void *const *devices, callback notify, void *user, int *status), (properties, n, devices, notify, user, status), remember_callback(notify, user))
RELEASE(clRetainContext)
RELEASE(clReleaseContext)
RELEASE(clRetainCommandQueue)
INFO(clGetContextInfo, context)
CREATE(clCreateCommandQueue, (void *context, void *device, uint64_t properties, int *status), (context, device, properties, status), )

/* Kernels recorded on a queue that was created for recording. */
struct recording {
    void *queue;
    unsigned n, ended;
    struct {
        void *kernel;
        unsigned dims;
        size_t global[3], local[3];
    } kernels[256];
};
static void *recordable[16];
static struct recording *under_way;

static int is_recordable(void *queue) {
    for (int i = 0; i < 16; i++)
        if (queue && recordable[i] == queue) return 1;
    return 0;
}

/* Creates a queue, and registers it if it is for recording. */
static void *create_recordable(void *context, void *device, uint64_t properties, int *status) {
    uint64_t records = properties & 1 << 30;
    void *queue = REAL(void *, clCreateCommandQueue, (void *, void *, uint64_t, int *))(context, device, properties & ~records, status);
    for (int i = 0; records && i < 16; i++)
        if (!recordable[i]) return recordable[i] = queue;
    return queue;
}
__attribute__((constructor(103))) static void make_recordable(void) { real_clCreateCommandQueue = create_recordable; }

/* Counts a queue that is created with a hint. */
static void count_hint(uint64_t name, uint64_t value) {
    char text[40];
    snprintf(text, sizeof text, "%s %d", name == 0x1096 ? "priority" : "throttle", (int)value);
    count(&add_slot(text)->calls);
}

/* Creates a queue with the properties except the hints. */
static void *create_queue(void *context, void *device, const uint64_t *list, int *status) {
    uint64_t properties = 0;
    for (; list && *list; list += 2) {
        if (*list == 0x1093 /* CL_QUEUE_PROPERTIES */) properties = list[1];
        else count_hint(*list, list[1]);
    }
    return real_clCreateCommandQueue(context, device, properties, status);
}

CREATE(clCreateCommandQueueWithProperties, (void *context, void *device, const uint64_t *list, int *status), (context, device, list, status), )
__attribute__((constructor(103))) static void take_hints(void) { real_clCreateCommandQueueWithProperties = create_queue; }
static void forget(void *queue) {
    for (int i = 0; i < 16; i++)
        if (recordable[i] == queue) recordable[i] = NULL;
}
STATUS(clReleaseCommandQueue, (void *queue), (queue), forget(queue))
INFO(clGetCommandQueueInfo, queue)
CREATE(clCreateBuffer, (void *context, uint64_t flags, size_t bytes, void *host, int *status), (context, flags, bytes, host, status), )
CREATE(clCreateBufferWithProperties, (void *context, const uint64_t *list, uint64_t flags, size_t bytes, void *host, int *status), (context, list, flags, bytes, host, status), )

/* Grants or refuses buffers larger than the reported limit, as the selected driver does. */
static void *create_buffer(void *context, uint64_t flags, size_t bytes, void *host, int *status) {
    const uint64_t unrestricted = 1 << 23;
    size_t largest = SIZE_MAX;
    limit(&largest, "STAND_IN_LARGEST");
    if (flags & unrestricted) {
        if (!driver_is("intel")) return *status = -30, NULL; /* CL_INVALID_VALUE */
        count(&add_slot("unrestricted size")->calls), flags &= ~unrestricted;
    } else if (bytes > largest && !driver_is("granted"))
        return *status = -61, NULL; /* CL_INVALID_BUFFER_SIZE */
    return REAL(void *, clCreateBuffer, (void *, uint64_t, size_t, void *, int *))(context, flags, bytes, host, status);
}

static void *create_large(void *context, const uint64_t *list, uint64_t flags, size_t bytes, void *host, int *status) {
    if (!driver_is("qualcomm") || list[0] != 0x41A6 || list[1] != 1 || list[2]) return *status = -64, NULL; /* CL_INVALID_PROPERTY */
    count(&add_slot("large buffer")->calls);
    return REAL(void *, clCreateBuffer, (void *, uint64_t, size_t, void *, int *))(context, flags, bytes, host, status);
}
__attribute__((constructor(103))) static void make_large(void) { real_clCreateBuffer = create_buffer, real_clCreateBufferWithProperties = create_large; }
RELEASE(clRetainMemObject)
RELEASE(clReleaseMemObject)
INFO(clGetMemObjectInfo, object)
CREATE(clCreateProgramWithSource, (void *context, unsigned n, const char **lines, const size_t *lengths, int *status), (context, n, lines, lengths, status), )
CREATE(clCreateProgramWithBinary, (void *context, unsigned n, void *const *devices, const size_t *lengths, const unsigned char **binaries, int *each, int *status), (context, n, devices, lengths, binaries, each, status), )
STATUS(clBuildProgram, (void *program, unsigned n, void *const *devices, const char *options, callback notify, void *user), (program, n, devices, options, notify, user), )
/* Counts Intel's build option and removes it, because other drivers do not know it. */
static int build_program(void *program, unsigned n, void *const *devices, const char *options, callback notify, void *user) {
    const char *wide = "-cl-intel-greater-than-4GB-buffer-required";
    char kept[4096];
    snprintf(kept, sizeof kept, "%s", options ? options : "");
    char *at = strstr(kept, wide);
    if (at) memset(at, ' ', strlen(wide)), count(&add_slot("wide offsets")->calls);
    return REAL(int, clBuildProgram, (void *, unsigned, void *const *, const char *, callback, void *))(program, n, devices, kept, notify, user);
}
__attribute__((constructor(103))) static void make_build(void) { real_clBuildProgram = build_program; }
RELEASE(clReleaseProgram)
INFO(clGetProgramInfo, program)
STATUS(clGetProgramBuildInfo, (void *program, void *device, unsigned what, size_t size, void *value, size_t *needed), (program, device, what, size, value, needed), )
CREATE(clCreateKernel, (void *program, const char *name, int *status), (program, name, status), )
RELEASE(clReleaseKernel)
STATUS(clSetKernelArg, (void *kernel, unsigned index, size_t size, const void *value), (kernel, index, size, value), )
INFO(clGetKernelInfo, kernel)
STATUS(clGetKernelArgInfo, (void *kernel, unsigned index, unsigned what, size_t size, void *value, size_t *needed), (kernel, index, what, size, value, needed), )
STATUS(clGetKernelWorkGroupInfo, (void *kernel, void *device, unsigned what, size_t size, void *value, size_t *needed), (kernel, device, what, size, value, needed), limit_group(what, value))
/* While `lenient` is on, waits succeed for failed commands as well, as with NVIDIA's driver. */
static int wait_for_events(unsigned n, void *const *list) {
    int code = REAL(int, clWaitForEvents, (unsigned, void *const *))(n, list);
    return code == -14 && __atomic_load_n(&lenient->times, __ATOMIC_SEQ_CST) ? 0 : code;
}
STATUS(clWaitForEvents, (unsigned n, void *const *list), (n, list), )
__attribute__((constructor(103))) static void make_lenient(void) { real_clWaitForEvents = wait_for_events; }
INFO(clGetEventInfo, event)
INFO(clGetEventProfilingInfo, event)
CREATE(clCreateUserEvent, (void *context, int *status), (context, status), count(&events->calls))
STATUS(clSetUserEventStatus, (void *event, int status), (event, status), )
STATUS(clSetEventCallback, (void *event, int type, callback notify, void *user), (event, type, notify, user), )
STATUS(clRetainEvent, (void *event), (event), count(&events->calls))
RELEASE(clReleaseEvent)
RELEASE(clFlush)
RELEASE(clFinish)
COMMAND(clEnqueueReadBuffer, P(void *queue, void *buffer, unsigned blocking, size_t offset, size_t bytes, void *to,), P(queue, buffer, blocking, offset, bytes, to,))
COMMAND(clEnqueueWriteBuffer, P(void *queue, void *buffer, unsigned blocking, size_t offset, size_t bytes, const void *from,), P(queue, buffer, blocking, offset, bytes, from,))
COMMAND(clEnqueueCopyBuffer, P(void *queue, void *from, void *to, size_t from_offset, size_t to_offset, size_t bytes,), P(queue, from, to, from_offset, to_offset, bytes,))
COMMAND(clEnqueueFillBuffer, P(void *queue, void *buffer, const void *pattern, size_t length, size_t offset, size_t bytes,), P(queue, buffer, pattern, length, offset, bytes,))
/* Refuses launches that exceed the reported limits, as a real device does. */
static int launch(void *queue, void *kernel, unsigned dims, const size_t *offset, const size_t *global, const size_t *local, unsigned waits, void *const *list, void **event) {
    size_t group = 1, most = SIZE_MAX;
    if (is_recordable(queue)) {
        if (!under_way || under_way->queue != queue || under_way->n == 256) return -59; /* CL_INVALID_OPERATION */
        unsigned i = under_way->n++;
        under_way->kernels[i].kernel = kernel, under_way->kernels[i].dims = dims;
        memcpy(under_way->kernels[i].global, global, dims * sizeof *global), memcpy(under_way->kernels[i].local, local, dims * sizeof *local);
        return 0;
    }
    for (unsigned d = 0; d < dims; d++) group *= local[d];
    limit(&most, "STAND_IN_WORK_GROUP");
    if (group > most) return -54; /* CL_INVALID_WORK_GROUP_SIZE */
    void *device = NULL;
    uint64_t bytes = 0;
    REAL(int, clGetCommandQueueInfo, (void *, unsigned, size_t, void *, size_t *))(queue, 0x1091, sizeof device, &device, NULL);
    REAL(int, clGetKernelWorkGroupInfo, (void *, void *, unsigned, size_t, void *, size_t *))(kernel, device, 0x11B2, sizeof bytes, &bytes, NULL);
    most = bytes, limit(&most, "STAND_IN_LOCAL_MEMORY");
    if (most < bytes) return -5; /* CL_OUT_OF_RESOURCES */
    return REAL(int, clEnqueueNDRangeKernel, (void *, void *, unsigned, const size_t *, const size_t *, const size_t *, unsigned, void *const *, void **))(
        queue, kernel, dims, offset, global, local, waits, list, event);
}
COMMAND(clEnqueueNDRangeKernel, P(void *queue, void *kernel, unsigned dims, const size_t *offset, const size_t *global, const size_t *local,), P(queue, kernel, dims, offset, global, local,))
__attribute__((constructor(103))) static void make_limited(void) { real_clEnqueueNDRangeKernel = launch; }
COMMAND(clEnqueueMigrateMemObjects, P(void *queue, unsigned n, void *const *objects, uint64_t flags,), P(queue, n, objects, flags,))
COMMAND(clEnqueueUnmapMemObject, P(void *queue, void *buffer, void *mapped,), P(queue, buffer, mapped,))
COMMAND(clEnqueueMarkerWithWaitList, P(void *queue,), P(queue,))
COMMAND(clEnqueueBarrierWithWaitList, P(void *queue,), P(queue,))
STATUS(clEnqueueMarker, (void *queue, void **event), (queue, event), count(&events->calls))
STATUS(clEnqueueWaitForEvents, (void *queue, unsigned n, void *const *list), (queue, n, list), )
CREATE(clEnqueueMapBuffer, (void *queue, void *buffer, unsigned blocking, uint64_t flags, size_t offset, size_t bytes, unsigned waits, void *const *list, void **event, int *status), (queue, buffer, blocking, flags, offset, bytes, waits, list, event, status), if (event) count(&events->calls))

/* The functions of cl_qcom_recordable_queues, with the signatures in its header. */
static void *new_recording(void *queue, int *status) {
    if (!is_recordable(queue)) return *status = -36, NULL; /* CL_INVALID_COMMAND_QUEUE */
    under_way = calloc(1, sizeof *under_way), under_way->queue = queue;
    return *status = 0, under_way;
}

static int end_recording(void *recording) { return ((struct recording *)recording)->ended = 1, under_way = NULL, 0; }

static int release_recording(void *recording) { return free(recording), 0; }

static int enqueue_recording(void *queue, struct recording *recording, size_t arguments, const void *a, size_t offsets, const void *o, size_t globals, const void *g, size_t locals, const void *l, unsigned waits, void *const *list, void **event) {
    if (!recording->ended || arguments + offsets + globals + locals) return -59;
    for (unsigned i = 0; i < recording->n; i++) {
        void **last = i + 1 == recording->n ? event : NULL;
        int code = launch(queue, recording->kernels[i].kernel, recording->kernels[i].dims, NULL, recording->kernels[i].global, recording->kernels[i].local, waits, list, last);
        if (code) return code;
    }
    return 0;
}

CREATE(clNewRecordingQCOM, (void *queue, int *status), (queue, status), )
RELEASE(clEndRecordingQCOM)
RELEASE(clReleaseRecordingQCOM)
COMMAND(clEnqueueRecordingQCOM, P(void *queue, struct recording *recording, size_t n, const void *a, size_t m, const void *o, size_t k, const void *g, size_t j, const void *l,), P(queue, recording, n, a, m, o, k, g, j, l,))
__attribute__((constructor(103))) static void make_recordings(void) {
    real_clNewRecordingQCOM = new_recording, real_clEndRecordingQCOM = end_recording;
    real_clReleaseRecordingQCOM = release_recording, real_clEnqueueRecordingQCOM = enqueue_recording;
}

CREATE(clCreateCommandBufferKHR, (unsigned n, void *const *queues, const uint64_t *properties, int *status), (n, queues, properties, status), )
RELEASE(clFinalizeCommandBufferKHR)
RELEASE(clReleaseCommandBufferKHR)
STATUS(clCommandNDRangeKernelKHR, (void *buffer, void *queue, const uint64_t *properties, void *kernel, unsigned dims, const size_t *offset, const size_t *global, const size_t *local, unsigned n, const unsigned *waits, unsigned *point, void **handle), (buffer, queue, properties, kernel, dims, offset, global, local, n, waits, point, handle), )
#define queue (*queues)
COMMAND(clEnqueueCommandBufferKHR, P(unsigned n, void **queues, void *buffer,), P(n, queues, buffer,))
#undef queue

#define GIVE(name, real)                                                                                               \
    if (!strcmp(asked, #name)) return real_##name = real, (void *)name

/* Returns extension functions only if STAND_IN_GRAPHS selects them. */
void *clGetExtensionFunctionAddressForPlatform(void *platform, const char *asked) {
    int buffers = keeps("buffers") || keeps("sequential");
    void *found = buffers ? REAL(void *, clGetExtensionFunctionAddressForPlatform, (void *, const char *))(platform, asked) : NULL;
    if (!found) return NULL;
    GIVE(clCreateCommandBufferKHR, found);
    GIVE(clFinalizeCommandBufferKHR, found);
    GIVE(clReleaseCommandBufferKHR, found);
    GIVE(clCommandNDRangeKernelKHR, found);
    GIVE(clEnqueueCommandBufferKHR, found);
    return found;
}

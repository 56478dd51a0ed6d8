/* Uses the API as C programs do, on the device whose number is the argument. c.rs runs it under sanitizers. */
#include <claystone.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s (last error: %s)\n", __FILE__, __LINE__, #condition, claystone_last_error());   \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)
#define OK(call) CHECK((call) == CLAYSTONE_STATUS_OK)
#define COUNT(array) (sizeof(array) / sizeof *(array))
#define TENSORS(...) (const ClaystoneTensor *const[]){__VA_ARGS__}
#define ARGUMENTS(...) (const ClaystoneArgument[]){__VA_ARGS__}
#define INT(n) {.tag = CLAYSTONE_TAG_INT, .value.integer = (n)}
#define FLOAT(x) {.tag = CLAYSTONE_TAG_FLOAT, .value.number = (x)}
#define TENSOR(t) {.tag = CLAYSTONE_TAG_TENSOR, .value.tensor = (t)}
#define INTS(...)                                                                                                      \
    {.tag = CLAYSTONE_TAG_INTS,                                                                                        \
     .length = COUNT(((int64_t[]){__VA_ARGS__})),                                                                      \
     .value.integers = (int64_t[]){__VA_ARGS__}}

static int32_t device;

static ClaystoneTensor *tensor_on(int32_t where, int32_t dtype, size_t size, int64_t rows, int64_t columns, const void *data) {
    ClaystoneStorage *storage;
    ClaystoneTensor *tensor;
    size_t nbytes = (size_t)(rows * columns) * size;
    OK(claystone_storage_new(where, nbytes, &storage));
    OK(claystone_tensor_new(storage, dtype, (int64_t[]){rows, columns}, (int64_t[]){columns, 1}, 2, 0, &tensor));
    claystone_storage_release(storage); /* the tensor keeps the storage alive */
    if (data) OK(claystone_tensor_write(tensor, data, nbytes));
    return tensor;
}

static ClaystoneTensor *floats(int64_t rows, int64_t columns, const float *data) {
    return tensor_on(device, CLAYSTONE_DTYPE_F32, sizeof(float), rows, columns, data);
}

static void expect(const ClaystoneTensor *tensor, size_t count, const float *wanted) {
    float values[64];
    OK(claystone_tensor_read(tensor, values, count * sizeof(float)));
    for (size_t i = 0; i < count; i++) {
        if (fabsf(values[i] - wanted[i]) > 1e-5f) fprintf(stderr, "element %zu is %g, not %g\n", i, values[i], wanted[i]);
        CHECK(fabsf(values[i] - wanted[i]) <= 1e-5f);
    }
}

static void devices(void) {
    int32_t count;
    bool available;
    uint64_t memory;
    ClaystoneBytes name;
    OK(claystone_device_count(&count));
    CHECK(device < count);
    OK(claystone_device_is_available(device, &available));
    CHECK(available);
    OK(claystone_device_is_available(count, &available));
    CHECK(!available);
    OK(claystone_device_name(device, &name));
    CHECK(name.length > 0 && strlen((char *)name.data) == name.length);
    printf("%d: %s\n", device, (char *)name.data);
    claystone_bytes_free(&name);
    claystone_bytes_free(&name); /* freeing twice does nothing */
    OK(claystone_device_memory(device, &memory));
    OK(claystone_device_synchronize(device));
    CHECK(claystone_device_synchronize(-2) == CLAYSTONE_STATUS_INVALID);
    CHECK(claystone_device_memory(count, &memory) == CLAYSTONE_STATUS_NO_DEVICE);
}

static void storages_and_views(void) {
    ClaystoneStorage *storage, *again;
    ClaystoneTensor *whole, *turned;
    ClaystoneTensorInfo info;
    size_t nbytes, uses;
    int32_t where;
    int64_t sizes[3], strides[3];
    bool same;
    OK(claystone_storage_new(device, 24, &storage));
    OK(claystone_storage_nbytes(storage, &nbytes));
    OK(claystone_storage_device(storage, &where));
    CHECK(nbytes == 24 && where == device);
    OK(claystone_storage_retain(storage));
    OK(claystone_storage_use_count(storage, &uses));
    CHECK(uses == 2);
    claystone_storage_release(storage);
    OK(claystone_storage_use_count(storage, &uses));
    CHECK(uses == 1);

    OK(claystone_tensor_new(storage, CLAYSTONE_DTYPE_F32, (int64_t[]){2, 3}, (int64_t[]){3, 1}, 2, 0, &whole));
    OK(claystone_tensor_new(storage, CLAYSTONE_DTYPE_F32, (int64_t[]){2, 2}, (int64_t[]){-1, 3}, 2, 2, &turned));
    OK(claystone_tensor_write(whole, (float[]){0, 1, 2, 3, 4, 5}, 24));
    expect(turned, 4, (float[]){2, 5, 1, 4});
    OK(claystone_tensor_write(turned, (float[]){20, 50, 10, 40}, 16));
    expect(whole, 6, (float[]){0, 10, 20, 3, 40, 50});
    OK(claystone_tensor_info(turned, 3, &info, sizes, strides));
    CHECK(info.device == device && info.dtype == CLAYSTONE_DTYPE_F32 && info.rank == 2 && info.numel == 4);
    CHECK(info.offset == 2 && sizes[0] == 2 && sizes[1] == 2 && strides[0] == -1 && strides[1] == 3);
    CHECK(claystone_tensor_info(turned, 1, &info, sizes, NULL) == CLAYSTONE_STATUS_INVALID);

    OK(claystone_tensor_storage(turned, &again));
    OK(claystone_storage_is_same(storage, again, &same));
    CHECK(same);
    claystone_storage_release(again);
    claystone_storage_release(storage);
    expect(turned, 4, (float[]){20, 50, 10, 40}); /* the view keeps the storage alive */
    claystone_tensor_release(whole);
    claystone_tensor_release(turned);

    CHECK(claystone_storage_new(device, (size_t)1 << 60, &storage) == CLAYSTONE_STATUS_OUT_OF_MEMORY);
    CHECK(strstr(claystone_last_error(), "out of memory"));
}

static void operations(void) {
    ClaystoneTensor *x = floats(2, 3, (float[]){1, 2, 3, 4, 5, 6}), *y = floats(2, 3, (float[]){10, 10, 10, 20, 20, 20});
    ClaystoneTensor *bias = floats(1, 3, (float[]){1, 2, 3}), *results[2] = {NULL, NULL}, *flat;
    size_t count;

    OK(claystone_call(&(ClaystoneCall){"add", TENSORS(x, y), 2, NULL, 0}, results, 1, &count));
    CHECK(count == 1);
    expect(results[0], 6, (float[]){11, 12, 13, 24, 25, 26});
    claystone_tensor_release(results[0]);

    /* An omitted tensor; arguments by position, by name, and all in one list. */
    OK(claystone_call(&(ClaystoneCall){"reshape", TENSORS(bias), 1, ARGUMENTS(INTS(3)), 1}, &flat, 1, NULL));
    const ClaystoneArgument sizes = {.name = "normalized_shape", .tag = CLAYSTONE_TAG_INTS, .length = 1, .value.integers = (int64_t[]){3}};
    const ClaystoneArgument named_bias = {.name = "bias", .tag = CLAYSTONE_TAG_TENSOR, .value.tensor = flat};
    const float s = 1.2247357f;
    const float wanted[] = {1 - s, 2, 3 + s, 1 - s, 2, 3 + s};
    ClaystoneCall calls[] = {
        {"layer_norm", TENSORS(x, NULL, flat), 3, ARGUMENTS(INTS(3), FLOAT(1e-5)), 2},
        {"layer_norm", TENSORS(x), 1, ARGUMENTS(sizes, named_bias), 2},
        {"layer_norm", NULL, 0, ARGUMENTS(TENSOR(x), INTS(3), TENSOR(NULL), TENSOR(flat), {.tag = CLAYSTONE_TAG_NONE}), 5},
    };
    for (size_t i = 0; i < COUNT(calls); i++) {
        OK(claystone_call(&calls[i], results, 1, NULL));
        expect(results[0], 6, wanted);
        claystone_tensor_release(results[0]);
    }
    claystone_tensor_release(flat);

    /* Several results with room for one; lists of tensors, dtypes, bools, strings. */
    OK(claystone_call(&(ClaystoneCall){"max_dim", TENSORS(x), 1, ARGUMENTS(INT(1)), 1}, results, 1, &count));
    CHECK(count == 2);
    expect(results[0], 2, (float[]){3, 6});
    claystone_tensor_release(results[0]);
    const ClaystoneArgument list = {.tag = CLAYSTONE_TAG_TENSORS, .length = 2, .value.tensors = TENSORS(x, y)};
    OK(claystone_call(&(ClaystoneCall){"cat", NULL, 0, ARGUMENTS(list, INT(0)), 2}, results, 1, NULL));
    expect(results[0], 12, (float[]){1, 2, 3, 4, 5, 6, 10, 10, 10, 20, 20, 20});
    claystone_tensor_release(results[0]);
    const ClaystoneArgument dtype = {.tag = CLAYSTONE_TAG_DTYPE, .value.integer = CLAYSTONE_DTYPE_I64};
    OK(claystone_call(&(ClaystoneCall){"to_dtype", TENSORS(x), 1, &dtype, 1}, results, 1, NULL));
    int64_t whole[6];
    OK(claystone_tensor_read(results[0], whole, sizeof whole));
    CHECK(whole[0] == 1 && whole[5] == 6);
    claystone_tensor_release(results[0]);
    const ClaystoneArgument on = {.name = "device", .tag = CLAYSTONE_TAG_DEVICE, .value.integer = device};
    OK(claystone_call(&(ClaystoneCall){"ones", NULL, 0, ARGUMENTS(INTS(2, 2), on), 2}, results, 1, NULL));
    expect(results[0], 4, (float[]){1, 1, 1, 1});
    claystone_tensor_release(results[0]);
    const ClaystoneArgument text = {.tag = CLAYSTONE_TAG_TEXT, .value.text = "sum"};
    OK(claystone_call(&(ClaystoneCall){"mse_loss", TENSORS(x, y), 2, &text, 1}, results, 1, NULL));
    expect(results[0], 1, (float[]){81 + 64 + 49 + 256 + 225 + 196});
    claystone_tensor_release(results[0]);

    /* In place, and into existing tensors: written directly, and copied with conversion. */
    OK(claystone_call(&(ClaystoneCall){"add_", TENSORS(x, y), 2, NULL, 0}, NULL, 0, NULL));
    expect(x, 6, (float[]){11, 12, 13, 24, 25, 26});
    OK(claystone_call_out(&(ClaystoneCall){"sub", TENSORS(x, y), 2, NULL, 0}, TENSORS(y), 1));
    expect(y, 6, (float[]){1, 2, 3, 4, 5, 6});
    ClaystoneTensor *sums = tensor_on(device, CLAYSTONE_DTYPE_F16, 2, 1, 3, NULL), *other = floats(3, 2, NULL);
    const ClaystoneArgument keep = {.name = "keepdim", .tag = CLAYSTONE_TAG_BOOL, .value.integer = true};
    OK(claystone_call_out(&(ClaystoneCall){"sum", TENSORS(y), 1, ARGUMENTS(INTS(0), keep), 2}, TENSORS(sums), 1));
    uint16_t halves[3];
    OK(claystone_tensor_read(sums, halves, sizeof halves));
    CHECK(halves[0] == 0x4500 && halves[1] == 0x4700 && halves[2] == 0x4880); /* 5, 7, 9 */
    CHECK(claystone_call_out(&(ClaystoneCall){"add", TENSORS(x, y), 2, NULL, 0}, TENSORS(other), 1) == CLAYSTONE_STATUS_INVALID);
    CHECK(strstr(claystone_last_error(), "[2, 3]") && strstr(claystone_last_error(), "[3, 2]"));
    claystone_tensor_release(sums);
    claystone_tensor_release(other);

    /* Invalid calls are errors with a message. */
    CHECK(claystone_call(&(ClaystoneCall){"no_such", TENSORS(x), 1, NULL, 0}, results, 1, NULL) == CLAYSTONE_STATUS_INVALID);
    CHECK(strstr(claystone_last_error(), "no_such"));
    CHECK(claystone_call(&(ClaystoneCall){"softmax", TENSORS(x), 1, ARGUMENTS(INT(7)), 1}, results, 1, NULL) == CLAYSTONE_STATUS_INDEX);
    ClaystoneBytes signatures;
    OK(claystone_operations(&signatures));
    CHECK(strstr((char *)signatures.data, "\nlayer_norm(input, normalized_shape: sizes, weight?, bias?, eps: float = 1e-5)\n"));
    claystone_bytes_free(&signatures);
    claystone_tensor_release(bias);
    claystone_tensor_release(y);
    claystone_tensor_release(x);
}

static void gradients(void) {
    ClaystoneTensor *x = floats(2, 2, (float[]){1, 2, 3, 4}), *w = floats(2, 2, (float[]){1, 0, 2, 1});
    ClaystoneTensor *grad = floats(2, 2, (float[]){1, 1, 0, 1}), *grads[2];
    ClaystoneCall product = {"matmul", TENSORS(x, w), 2, NULL, 0};
    OK(claystone_call_backward(&product, TENSORS(grad), 1, (uint8_t[]){1, 1}, grads, 2));
    expect(grads[0], 4, (float[]){1, 3, 0, 1}); /* grad @ w.t() */
    expect(grads[1], 4, (float[]){1, 4, 2, 6}); /* x.t() @ grad */
    claystone_tensor_release(grads[0]);
    claystone_tensor_release(grads[1]);
    OK(claystone_call_backward(&product, TENSORS(grad), 1, (uint8_t[]){0, 1}, grads, 2));
    CHECK(grads[0] == NULL);
    claystone_tensor_release(grads[1]);

    /* The gradient of an operand of `add` equals the result's gradient, but is a copy. */
    OK(claystone_call_backward(&(ClaystoneCall){"add", TENSORS(x, w), 2, NULL, 0}, TENSORS(grad), 1, (uint8_t[]){1, 0}, grads, 2));
    OK(claystone_call(&(ClaystoneCall){"zero_", TENSORS(grads[0]), 1, NULL, 0}, NULL, 0, NULL));
    expect(grad, 4, (float[]){1, 1, 0, 1});
    claystone_tensor_release(grads[0]);

    /* Only the second of two results has a gradient, and it does not propagate. */
    ClaystoneTensor *whole = tensor_on(device, CLAYSTONE_DTYPE_I64, 8, 1, 2, NULL);
    const ClaystoneCall largest = {"max_dim", TENSORS(x), 1, ARGUMENTS(INT(1)), 1};
    OK(claystone_call_backward(&largest, TENSORS(NULL, whole), 2, (uint8_t[]){1}, grads, 1));
    CHECK(grads[0] == NULL);
    CHECK(claystone_call_backward(&product, TENSORS(grad, grad), 2, (uint8_t[]){1, 1}, grads, 2) == CLAYSTONE_STATUS_INVALID);
    claystone_tensor_release(whole);
    claystone_tensor_release(grad);
    claystone_tensor_release(w);
    claystone_tensor_release(x);
}

static void copies(void) {
    ClaystoneTensor *x = floats(2, 3, (float[]){1, 2, 3, 4, 5, 6}), *turned;
    ClaystoneTensor *host = tensor_on(CLAYSTONE_CPU, CLAYSTONE_DTYPE_F64, 8, 2, 3, NULL);
    ClaystoneTensor *back = floats(3, 2, NULL);
    double values[6];
    OK(claystone_tensor_copy(host, x)); /* to another device and dtype */
    OK(claystone_tensor_read(host, values, sizeof values));
    CHECK(values[0] == 1 && values[5] == 6);
    OK(claystone_call(&(ClaystoneCall){"t", TENSORS(host), 1, NULL, 0}, &turned, 1, NULL));
    OK(claystone_tensor_copy(back, turned)); /* with other strides */
    expect(back, 6, (float[]){1, 4, 2, 5, 3, 6});
    claystone_tensor_release(turned);
    ClaystoneTensor *row = tensor_on(CLAYSTONE_CPU, CLAYSTONE_DTYPE_F32, 4, 1, 3, (float[]){7, 8, 9});
    OK(claystone_tensor_copy(x, row)); /* broadcast */
    expect(x, 6, (float[]){7, 8, 9, 7, 8, 9});
    CHECK(claystone_tensor_copy(back, row) == CLAYSTONE_STATUS_INVALID);
    ClaystoneTensor *bools = tensor_on(device, CLAYSTONE_DTYPE_BOOL, 1, 1, 2, (uint8_t[]){0, 1});
    CHECK(claystone_tensor_write(bools, (uint8_t[]){0, 2}, 2) == CLAYSTONE_STATUS_INVALID);
    CHECK(claystone_tensor_read(x, values, 23) == CLAYSTONE_STATUS_INVALID);
    claystone_tensor_release(bools);
    claystone_tensor_release(row);
    claystone_tensor_release(back);
    claystone_tensor_release(host);
    claystone_tensor_release(x);
}

#include "pinned.h"

#include "many.h"
#include "recurrent.h"

static void *on_another_thread(void *stream) {
    ClaystoneStream *current;
    int64_t id;
    CHECK(claystone_last_error()[0] == '\0'); /* each thread has its own */
    OK(claystone_stream_current(device, &current));
    OK(claystone_stream_id(current, NULL, &id));
    CHECK(id == 0); /* and its own stream */
    claystone_stream_release(current);
    OK(claystone_stream_synchronize(stream));
    return NULL;
}

static void streams(void) {
    ClaystoneStream *side, *main_stream, *current;
    ClaystoneEvent *event;
    ClaystoneTensor *x = floats(2, 2, (float[]){1, 2, 3, 4}), *y;
    ClaystoneStorage *storage;
    int32_t where;
    int64_t id, side_id;
    bool done;
    OK(claystone_stream_current(device, &main_stream));
    OK(claystone_stream_new(device, &side));
    OK(claystone_stream_id(side, &where, &side_id));
    CHECK(where == device && side_id != 0);
    OK(claystone_stream_wait_stream(side, main_stream));
    OK(claystone_stream_set_current(side));
    OK(claystone_stream_current(device, &current));
    OK(claystone_stream_id(current, NULL, &id));
    CHECK(id == side_id);
    claystone_stream_release(current);
    OK(claystone_call(&(ClaystoneCall){"mul", TENSORS(x, x), 2, NULL, 0}, &y, 1, NULL));
    OK(claystone_tensor_storage(x, &storage));
    OK(claystone_storage_record_stream(storage, side));
    claystone_storage_release(storage);
    claystone_tensor_release(x);
    OK(claystone_stream_record_event(side, &event));
    OK(claystone_stream_set_current(main_stream));
    OK(claystone_stream_wait_event(main_stream, event));
    expect(y, 4, (float[]){1, 4, 9, 16});
    OK(claystone_event_synchronize(event));
    OK(claystone_event_query(event, &done));
    CHECK(done);
    CHECK(claystone_device_synchronize(-7) == CLAYSTONE_STATUS_INVALID && claystone_last_error()[0] != '\0');
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, on_another_thread, side) == 0 && pthread_join(thread, NULL) == 0);
    OK(claystone_stream_query(side, &done));
    CHECK(done);
    OK(claystone_stream_default(device, &current));
    OK(claystone_stream_set_current(current));
    claystone_stream_release(current);
    claystone_tensor_release(y);
    claystone_event_release(event);
    claystone_stream_release(side);
    claystone_stream_release(main_stream);
}

static void times(void) {
    ClaystoneStream *urgent, *other;
    ClaystoneEvent *start, *end, *untimed;
    ClaystoneTensor *x = floats(8, 8, NULL), *y;
    double took, back;
    OK(claystone_stream_with_priority(device, -1, &urgent));
    OK(claystone_stream_with_priority(device, 1, &other));
    claystone_stream_release(other);
    OK(claystone_stream_current(device, &other));
    OK(claystone_stream_record_timed_event(other, &start));
    OK(claystone_call(&(ClaystoneCall){"exp", TENSORS(x), 1, NULL, 0}, &y, 1, NULL));
    OK(claystone_stream_wait_stream(urgent, other));
    OK(claystone_stream_record_timed_event(urgent, &end));
    OK(claystone_event_elapsed_time(start, end, &took));
    OK(claystone_event_elapsed_time(end, start, &back));
    CHECK(took > 0 && took < 60e3 && back == -took);
    OK(claystone_stream_record_event(other, &untimed));
    CHECK(claystone_event_elapsed_time(start, untimed, &took) == CLAYSTONE_STATUS_INVALID);
    claystone_tensor_release(x);
    claystone_tensor_release(y);
    claystone_event_release(start);
    claystone_event_release(end);
    claystone_event_release(untimed);
    claystone_stream_release(urgent);
    claystone_stream_release(other);
}

static void profiles(void) {
    ClaystoneTensor *x = floats(8, 8, NULL);
    ClaystoneProfile *profile, *none;
    ClaystoneProfileEvent event;
    ClaystoneBytes trace;
    size_t count, found = 0;
    CHECK(claystone_profiler_stop(&none) == CLAYSTONE_STATUS_INVALID);
    OK(claystone_profiler_start());
    CHECK(claystone_profiler_start() == CLAYSTONE_STATUS_INVALID && claystone_annotate("x", NULL, x) == CLAYSTONE_STATUS_INVALID);
    OK(claystone_annotate("forward", call_exp, x));
    OK(claystone_profiler_stop(&profile));
    OK(claystone_profile_count(profile, &count));
    for (size_t i = 0; i < count; i++) {
        OK(claystone_profile_event(profile, i, &event));
        CHECK(event.start >= 0 && event.duration >= 0);
        if (event.category == CLAYSTONE_CATEGORY_OPERATION && strcmp(event.name, "exp") == 0) {
            CHECK(strcmp(event.annotation, "forward") == 0);
            found |= 1;
        }
        if (event.category == CLAYSTONE_CATEGORY_KERNEL && event.device == device && event.on_stream && event.launch) found |= 2;
    }
    CHECK(found == (device == CLAYSTONE_CPU ? 1 : 3));
    CHECK(claystone_profile_event(profile, count, &event) == CLAYSTONE_STATUS_INVALID);
    OK(claystone_profile_trace(profile, &trace));
    CHECK(strstr((char *)trace.data, "traceEvents") && strstr((char *)trace.data, "exp"));
    claystone_bytes_free(&trace);
    claystone_profile_release(profile);
    claystone_tensor_release(x);
}

static unsigned long long number(const char *json, const char *name) {
    char key[80];
    snprintf(key, sizeof key, "\"%s\":", name);
    const char *found = strstr(json, key);
    CHECK(found);
    return strtoull(found + strlen(key), NULL, 10);
}

static unsigned long long stat(const char *name) {
    ClaystoneBytes json;
    OK(claystone_memory_stats(device, &json));
    unsigned long long value = number((char *)json.data, name);
    claystone_bytes_free(&json);
    return value;
}

static void memory(void) {
    ClaystoneStorage *storage, *none = NULL;
    ClaystoneBytes snapshot;
    OK(claystone_memory_record_history(device, &(ClaystoneHistory){2, 3, false, false, 1000}));
    CHECK(claystone_memory_record_history(device, &(ClaystoneHistory){3, 3, false, false, 1000}) == CLAYSTONE_STATUS_INVALID);
    OK(claystone_memory_reset_peak(device));
    unsigned long long before = stat("requested_bytes.all.current");
    OK(claystone_memory_set_context("the context"));
    OK(claystone_storage_new(device, 3 << 20, &storage));
    OK(claystone_memory_set_context(NULL));
    CHECK(stat("requested_bytes.all.current") == before + (3 << 20));
    CHECK(stat("allocated_bytes.large_pool.current") >= 3 << 20);
    OK(claystone_memory_snapshot(device, CLAYSTONE_SNAPSHOT_FORMAT_JSON, &snapshot));
    CHECK(strstr((char *)snapshot.data, "3145728") && strstr((char *)snapshot.data, "the context"));
    claystone_bytes_free(&snapshot);
    OK(claystone_memory_snapshot(device, CLAYSTONE_SNAPSHOT_FORMAT_PICKLE, &snapshot));
    CHECK(snapshot.length > 100 && snapshot.data[0] == 0x80); /* a pickle's first opcode */
    claystone_bytes_free(&snapshot);
    CHECK(claystone_memory_snapshot(device, 5, &snapshot) == CLAYSTONE_STATUS_INVALID);
    OK(claystone_memory_record_history(device, &(ClaystoneHistory){0, 0, false, true, 1}));
    claystone_storage_release(storage);
    CHECK(stat("requested_bytes.all.current") == before && stat("requested_bytes.all.peak") == before + (3 << 20));
    OK(claystone_memory_empty_cache(device));

    ClaystonePeakScope *scope;
    ClaystonePeak peak;
    OK(claystone_peak_scope_begin(device, &scope));
    OK(claystone_peak_scope_read(scope, &peak));
    CHECK(peak.requested == before && peak.allocated <= peak.reserved);
    OK(claystone_storage_new(device, 1 << 20, &storage));
    claystone_storage_release(storage);
    OK(claystone_peak_scope_read(scope, &peak));
    CHECK(peak.requested == before + (1 << 20));
    claystone_peak_scope_release(scope);
    claystone_peak_scope_release(NULL);
    CHECK(claystone_peak_scope_begin(1000, &scope) == CLAYSTONE_STATUS_NO_DEVICE);
    CHECK(stat("requested_bytes.all.peak") == before + (3 << 20));

    CHECK(claystone_memory_snapshot_on_oom(device, "memory.txt") == CLAYSTONE_STATUS_INVALID);
    OK(claystone_memory_snapshot_on_oom(device, "/no/such/folder/memory.pickle"));
    OK(claystone_memory_set_fraction(device, 1e-9));
    CHECK(claystone_storage_new(device, 3 << 20, &none) == CLAYSTONE_STATUS_OUT_OF_MEMORY && none == NULL);
    OK(claystone_memory_snapshot_on_oom(device, NULL));
    OK(claystone_memory_record_history(device, &(ClaystoneHistory){0, 0, false, true, 1}));
    OK(claystone_memory_set_fraction(device, 1e-9));
    CHECK(claystone_storage_new(device, 3 << 20, &none) == CLAYSTONE_STATUS_OUT_OF_MEMORY && none == NULL);
    CHECK(stat("num_ooms") >= 1);
    OK(claystone_memory_reset_accumulated(device));
    CHECK(stat("num_ooms") == 0);
    CHECK(claystone_memory_set_fraction(device, 2) == CLAYSTONE_STATUS_INVALID);
    OK(claystone_memory_set_fraction(device, 1));
}

#include "graphs.h"

static void random_numbers(void) {
    ClaystoneGenerator *generator;
    ClaystoneTensor *draws[3], *ones = floats(1, 8, (float[]){1, 1, 1, 1, 1, 1, 1, 1}), *grad;
    float values[3][8];
    uint64_t seed, drawn;
    OK(claystone_generator_new(7, &generator));
    const ClaystoneArgument from = {.tag = CLAYSTONE_TAG_GENERATOR, .value.generator = generator};
    const ClaystoneArgument on = {.name = "device", .tag = CLAYSTONE_TAG_DEVICE, .value.integer = device};
    for (int i = 0; i < 3; i++) {
        if (i == 2) OK(claystone_generator_set_state(generator, 7, 0));
        OK(claystone_call(&(ClaystoneCall){"rand", NULL, 0, ARGUMENTS(INTS(8), from, on), 3}, &draws[i], 1, NULL));
        OK(claystone_tensor_read(draws[i], values[i], sizeof values[i]));
        claystone_tensor_release(draws[i]);
    }
    CHECK(memcmp(values[0], values[1], sizeof values[0]) != 0 && memcmp(values[0], values[2], sizeof values[0]) == 0);
    OK(claystone_generator_state(generator, &seed, &drawn));
    CHECK(seed == 7 && drawn == 1);
    /* Backward draws the same random numbers as forward. */
    ClaystoneCall dropout = {"dropout", TENSORS(ones), 1, ARGUMENTS(FLOAT(0.5), from), 2};
    OK(claystone_call(&dropout, draws, 1, NULL));
    OK(claystone_generator_set_state(generator, 7, 1));
    OK(claystone_call_backward(&dropout, TENSORS(ones), 1, (uint8_t[]){1}, &grad, 1));
    OK(claystone_tensor_read(draws[0], values[0], sizeof values[0]));
    expect(grad, 8, values[0]);
    claystone_tensor_release(grad);
    claystone_tensor_release(draws[0]);
    claystone_tensor_release(ones);
    claystone_generator_release(generator);
    OK(claystone_generator_set_state(NULL, 9, 4));
    OK(claystone_generator_state(NULL, &seed, &drawn));
    CHECK(seed == 9 && drawn == 4);
}

int main(int count, char **arguments) {
    CHECK(count == 2);
    device = (int32_t)atoi(arguments[1]);
    devices();
    storages_and_views();
    operations();
    gradients();
    many();
    recurrent();
    copies();
    pinned();
    enqueued();
    streams();
    times();
    profiles();
    memory();
    pools();
    graphs();
    observers();
    random_numbers();
    other_allocator();
    /* Releasing null does nothing. */
    claystone_storage_release(NULL), claystone_tensor_release(NULL);
    claystone_stream_release(NULL), claystone_event_release(NULL);
    claystone_generator_release(NULL);
    claystone_bytes_free(NULL);
    puts("passed");
    return 0;
}

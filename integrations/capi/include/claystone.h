/* The C API of claystone. cbindgen generates this file from integrations/capi/src: change the source and run
 * UPDATE_HEADER=1 cargo test -p claystone-capi --test header
 *
 * Statuses. A function that can fail returns a ClaystoneStatus. If the status is not CLAYSTONE_STATUS_OK, the function has not
 * written to the destinations of its results, and claystone_last_error() returns a message.
 *
 * Ownership. A handle that a function returns (through a `T **`) belongs to the caller, who passes it to the `_release` function of
 * its type once. A handle that is passed to a function is borrowed for the call; objects made from it keep what they need: a tensor
 * keeps its storage. The same holds for arrays and strings. `const` handles are borrowed too: functions may change a tensor through
 * a `const` handle, as claystone's methods change it through a shared reference.
 *
 * Threads. Any thread may use a handle, and several may use it at a time, except while a thread releases the last handle.
 *
 * Asynchrony. Work on an OpenCL device is enqueued on the thread's current stream of that device. A later call that waits returns
 * the errors that kernels report.
 */

#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// The number of the CPU device, which always exists. OpenCL devices are numbered from 0.
#define CLAYSTONE_CPU -1

// The outcome of a call.
typedef enum {
    // The call succeeded.
    CLAYSTONE_STATUS_OK = 0,
    // An argument is invalid: a shape, dtype, device, name, tag or null pointer.
    CLAYSTONE_STATUS_INVALID = 1,
    // A dimension or an index is out of range.
    CLAYSTONE_STATUS_INDEX = 2,
    // The device is out of memory, even after its cached memory was freed.
    CLAYSTONE_STATUS_OUT_OF_MEMORY = 3,
    // There is no such device.
    CLAYSTONE_STATUS_NO_DEVICE = 4,
    // A call of the OpenCL driver failed, or a kernel does not compile.
    CLAYSTONE_STATUS_DRIVER = 5,
    // The device has faulted; nothing can run on it in this process any more.
    CLAYSTONE_STATUS_DEVICE_LOST = 6,
    // An in-place operation was only partly done: the contents of its destination are invalid and must be written again.
    CLAYSTONE_STATUS_PARTIAL = 7,
    // A gradient cannot be computed.
    CLAYSTONE_STATUS_AUTOGRAD = 8,
    // claystone panicked, which is a bug. The destinations of the call may hold anything.
    CLAYSTONE_STATUS_PANIC = 9,
    // Any other failure.
    CLAYSTONE_STATUS_FAILED = 10,
    // A kernel of this or an earlier operation found an index out of range or a division by zero. Each such error is reported once.
    CLAYSTONE_STATUS_KERNEL = 11,
} ClaystoneStatus;

// The element types. The numbers never change.
typedef enum {
    // 32-bit IEEE float.
    CLAYSTONE_DTYPE_F32 = 0,
    // 16-bit IEEE float.
    CLAYSTONE_DTYPE_F16 = 1,
    // The upper 16 bits of an F32.
    CLAYSTONE_DTYPE_BF16 = 2,
    // 64-bit IEEE float.
    CLAYSTONE_DTYPE_F64 = 3,
    // 64-bit signed integer.
    CLAYSTONE_DTYPE_I64 = 4,
    // 32-bit signed integer.
    CLAYSTONE_DTYPE_I32 = 5,
    // 8-bit unsigned integer.
    CLAYSTONE_DTYPE_U8 = 6,
    // 32-bit unsigned integer.
    CLAYSTONE_DTYPE_U32 = 7,
    // One byte, 0 or 1.
    CLAYSTONE_DTYPE_BOOL = 8,
    // 8-bit signed integer.
    CLAYSTONE_DTYPE_I8 = 9,
    // 16-bit signed integer.
    CLAYSTONE_DTYPE_I16 = 10,
} ClaystoneDtype;

// The type of an argument. It selects the member of ClaystoneValue that is read.
typedef enum {
    // The argument is omitted and its default applies. An omitted tensor is a null TENSOR instead.
    CLAYSTONE_TAG_NONE = 0,
    // `integer`: 0 is false, everything else true.
    CLAYSTONE_TAG_BOOL = 1,
    // `integer`.
    CLAYSTONE_TAG_INT = 2,
    // `number`.
    CLAYSTONE_TAG_FLOAT = 3,
    // `integers`, with `length` entries.
    CLAYSTONE_TAG_INTS = 4,
    // `numbers`, with `length` entries.
    CLAYSTONE_TAG_FLOATS = 5,
    // `text`.
    CLAYSTONE_TAG_TEXT = 6,
    // `integer`: a ClaystoneDtype.
    CLAYSTONE_TAG_DTYPE = 7,
    // `integer`: the number of a device.
    CLAYSTONE_TAG_DEVICE = 8,
    // `tensor`, or null.
    CLAYSTONE_TAG_TENSOR = 9,
    // `tensors`, with `length` entries, none of them null.
    CLAYSTONE_TAG_TENSORS = 10,
    // `generator`, for operations that draw random numbers. It is not a parameter of the operation and takes no name. Null selects
    // the process's default generator.
    CLAYSTONE_TAG_GENERATOR = 11,
} ClaystoneTag;

// The formats of a memory snapshot.
typedef enum {
    // A pickle for PyTorch's memory viewer.
    CLAYSTONE_SNAPSHOT_FORMAT_PICKLE = 0,
    // JSON.
    CLAYSTONE_SNAPSHOT_FORMAT_JSON = 1,
} ClaystoneSnapshotFormat;

// The purpose of a tensor's memory in the report of a dry run.
typedef enum {
    // A parameter of a model.
    CLAYSTONE_ROLE_PARAMETER = 0,
    // A gradient of a parameter.
    CLAYSTONE_ROLE_GRADIENT = 1,
    // A state that an optimiser keeps between steps.
    CLAYSTONE_ROLE_OPTIMIZER_STATE = 2,
    // A result that backward needs.
    CLAYSTONE_ROLE_SAVED = 3,
    // Any other memory: the role of a new tensor.
    CLAYSTONE_ROLE_TEMPORARY = 4,
} ClaystoneRole;

// The kind of an event of a profile.
typedef enum {
    // An operation on the host: its submission to an OpenCL device, or its computation on the CPU device.
    CLAYSTONE_CATEGORY_OPERATION = 0,
    // A driver call that submits a command.
    CLAYSTONE_CATEGORY_LAUNCH = 1,
    // The host waits for a device.
    CLAYSTONE_CATEGORY_WAIT = 2,
    // A kernel on a device.
    CLAYSTONE_CATEGORY_KERNEL = 3,
    // A copy within a device.
    CLAYSTONE_CATEGORY_COPY = 4,
    // A fill on a device.
    CLAYSTONE_CATEGORY_FILL = 5,
    // A copy from a device to the host.
    CLAYSTONE_CATEGORY_READ = 6,
    // A copy from the host to a device.
    CLAYSTONE_CATEGORY_WRITE = 7,
    // Any other event.
    CLAYSTONE_CATEGORY_OTHER = 8,
} ClaystoneCategory;

// The cell of a recurrent layer.
typedef enum {
    // Long short-term memory.
    CLAYSTONE_CELL_LSTM = 0,
    // Gated recurrent unit.
    CLAYSTONE_CELL_GRU = 1,
    // Elman cell with tanh.
    CLAYSTONE_CELL_RNN_TANH = 2,
    // Elman cell with ReLU.
    CLAYSTONE_CELL_RNN_RELU = 3,
} ClaystoneCell;

// A handle on an event: a point in a stream's work.
typedef struct ClaystoneEvent ClaystoneEvent;

// A program of elementwise operations with one or several results.
typedef struct ClaystoneFormula ClaystoneFormula;

// A handle on a random number generator: a seed and the number of draws made from it. One generator serves every device. Functions that
// take a generator use the process's default generator for null.
typedef struct ClaystoneGenerator ClaystoneGenerator;

// A handle on recorded commands of an OpenCL device.
typedef struct ClaystoneGraph ClaystoneGraph;

// Keeps an observer registered.
typedef struct ClaystoneObserver ClaystoneObserver;

// A scope whose most memory in use is measured.
typedef struct ClaystonePeakScope ClaystonePeakScope;

// A handle on a private pool of a device's caching allocator: memory that serves only allocations inside the pool. When all handles and
// all graphs of the pool are released, its memory joins the device's other memory; live blocks stay valid.
typedef struct ClaystonePool ClaystonePool;

// A handle on a finished recording.
typedef struct ClaystoneProfile ClaystoneProfile;

// A recorded forward call, from which gradients are computed.
typedef struct ClaystoneRecording ClaystoneRecording;

// A handle on contiguous bytes on one device. The bytes return to the device's allocator when the last handle and the last tensor on the
// storage are released.
typedef struct ClaystoneStorage ClaystoneStorage;

// A handle on a stream of one device: work submitted to a stream runs in order.
typedef struct ClaystoneStream ClaystoneStream;

// A handle on a tensor: elements of a storage, addressed by shape, strides and offset.
typedef struct ClaystoneTensor ClaystoneTensor;

// Functions that allocate host memory. Any thread may call them, several at a time. No function may be left by an exception or a jump.
typedef struct {
    // Returns `nbytes` bytes at any address; null if there is no memory.
    void *(*allocate)(void *data, size_t nbytes);
    // Frees memory that `allocate` returned for `nbytes` bytes.
    void (*free)(void *data, void *memory, size_t nbytes);
    // Passed to the functions. Valid until the process ends.
    void *data;
} ClaystoneAllocator;

// The value of an argument.
typedef union {
    // For BOOL, INT, DTYPE and DEVICE.
    int64_t integer;
    // For FLOAT.
    double number;
    // For INTS.
    const int64_t *integers;
    // For FLOATS.
    const double *numbers;
    // For TEXT.
    const char *text;
    // For TENSOR.
    const ClaystoneTensor *tensor;
    // For TENSORS.
    const ClaystoneTensor *const *tensors;
    // For GENERATOR.
    const ClaystoneGenerator *generator;
} ClaystoneValue;

// An argument of a call.
typedef struct {
    // The name of the parameter, or null for the next parameter by position. Named arguments come last.
    const char *name;
    // A ClaystoneTag.
    int32_t tag;
    // The number of entries of INTS, FLOATS and TENSORS; not read for other tags.
    size_t length;
    // The value; the tag selects its member.
    ClaystoneValue value;
} ClaystoneArgument;

// An operation and its arguments.
//
// `claystone_operations` lists the signature of each operation. Tensors are assigned to the tensor parameters in order, and other
// arguments to the other parameters in order. A tensor may be passed in `tensors` or among `arguments`; the tensors in `tensors`
// are assigned first. A list of arguments in the order of the signature therefore works unchanged. Parameters omitted at the end
// take their defaults.
typedef struct {
    // The operation's name.
    const char *name;
    // Tensors by position; null for an omitted tensor.
    const ClaystoneTensor *const *tensors;
    // The number of tensors.
    size_t tensor_count;
    // Arguments, which may include tensors.
    const ClaystoneArgument *arguments;
    // The number of arguments.
    size_t argument_count;
} ClaystoneCall;

// Bytes that claystone allocated and the caller owns; `claystone_bytes_free` frees them. A zero byte, which `length` does not count,
// follows them, so that a text is a C string.
typedef struct {
    // The first byte.
    uint8_t *data;
    // The number of bytes.
    size_t length;
} ClaystoneBytes;

// A list of tensors.
typedef struct {
    // Handles, none of them null.
    const ClaystoneTensor *const *tensors;
    // The number of tensors.
    size_t count;
} ClaystoneTensors;

// Hooks on saved tensors. Any thread may call `unpack` and `release`. No hook may be left by an exception or a jump.
typedef struct {
    // Stores a copy of a tensor, for instance on another device, and sets `*packed` to a value from which `unpack` finds the copy. The
    // handle is borrowed.
    ClaystoneStatus (*pack)(void *data, const ClaystoneTensor *tensor, void **packed);
    // Sets `*tensor` to a new handle, which claystone releases, on a tensor of the shape, dtype and device of the packed tensor.
    ClaystoneStatus (*unpack)(void *data, void *packed, ClaystoneTensor **tensor);
    // Frees a packed value. Called once for each value; may be null.
    void (*release)(void *data, void *packed);
    // Passed to the hooks. Valid until all packed values are released.
    void *data;
} ClaystoneSavedTensorsHooks;

// The detail of the history that a device's allocator records.
typedef struct {
    // 0: nothing. 1: the origin of live blocks, which snapshots show. 2: also the latest events.
    int32_t recording;
    // Which entries have a context, the call stack and the names of `claystone_annotate`. 0: none. 1: live blocks. 2: also events that
    // allocate. 3: all events.
    int32_t context;
    // Whether contexts include call stacks.
    bool stacks;
    // Whether to discard the events recorded so far.
    bool clear;
    // The number of latest events to keep, at least 1.
    size_t max_entries;
} ClaystoneHistory;

// An allocation that failed for lack of memory.
typedef struct {
    // The device's number.
    int32_t device;
    // The bytes requested.
    size_t requested;
    // The most bytes of segments that the allocator may hold.
    uint64_t allowed;
    // The bytes of the device's memory that the allocator does not hold.
    uint64_t device_free;
} ClaystoneOutOfMemory;

// The most bytes of a device in use at once within a scope: of blocks, of segments held from the driver, and as requested. The three
// peaks may have been at different times.
typedef struct {
    // The bytes of blocks: requests rounded up.
    uint64_t allocated;
    // The bytes of segments held from the driver.
    uint64_t reserved;
    // The bytes requested.
    uint64_t requested;
} ClaystonePeak;

// The tensors that every optimizer step takes.
typedef struct {
    // The parameters to update.
    ClaystoneTensors parameters;
    // The gradients, one for each parameter.
    ClaystoneTensors gradients;
    // The learning rate as a one-element tensor on the device; null to use the hyperparameters' learning rate.
    const ClaystoneTensor *lr;
    // A one-element tensor by which the gradients are first divided in place; or null.
    const ClaystoneTensor *grad_scale;
    // A one-element tensor; if it is 1, the step changes nothing. Or null.
    const ClaystoneTensor *found_inf;
    // True to ascend the gradient instead of descending it.
    bool maximize;
} ClaystoneStep;

// The state of Adam and AdamW: each list has a tensor for each parameter.
typedef struct {
    // Running means of the gradients.
    ClaystoneTensors exp_avgs;
    // Running means of the squared gradients.
    ClaystoneTensors exp_avg_sqs;
    // Maxima of `exp_avg_sqs` so far; read with `amsgrad` only.
    ClaystoneTensors max_exp_avg_sqs;
    // One-element tensors with the number of this step, counted from 1.
    ClaystoneTensors steps;
} ClaystoneAdamState;

// Hyperparameters of Adam and AdamW.
typedef struct {
    // Learning rate.
    double lr;
    // Decay of the running mean of the gradient.
    double beta1;
    // Decay of the running mean of the squared gradient.
    double beta2;
    // Added to the denominator.
    double eps;
    // Weight decay: applied to the parameters by AdamW, added to the gradient by Adam.
    double weight_decay;
    // Whether to divide by the maximum of the running means so far.
    bool amsgrad;
    // True for AdamW, false for Adam.
    bool decoupled;
} ClaystoneAdam;

// Hyperparameters of stochastic gradient descent.
typedef struct {
    // Learning rate.
    double lr;
    // Factor of the velocity from the previous step; 0 for no momentum.
    double momentum;
    // The fraction of the gradient that is not added to the velocity, from the second step on.
    double dampening;
    // L2 penalty, added to the gradient.
    double weight_decay;
    // Whether to use Nesterov momentum.
    bool nesterov;
    // True in the first step: the contents of the momentum buffers are then not read.
    bool first;
} ClaystoneSgd;

// Hyperparameters of Adagrad.
typedef struct {
    // Learning rate.
    double lr;
    // Decay of the learning rate: step t uses `lr / (1 + (t - 1) * lr_decay)`.
    double lr_decay;
    // L2 penalty, added to the gradient.
    double weight_decay;
    // Added to the denominator.
    double eps;
} ClaystoneAdagrad;

// The memory of a pool.
typedef struct {
    // The number of segments held from the driver.
    uint64_t segments;
    // The bytes of the segments.
    uint64_t reserved_bytes;
    // The number of live blocks.
    uint64_t allocations;
    // The bytes of live blocks, with requests rounded up.
    uint64_t allocated_bytes;
    // The bytes of blocks that are live or that unfinished work uses.
    uint64_t active_bytes;
} ClaystonePoolStats;

// An event of a profile.
typedef struct {
    // A ClaystoneCategory.
    int32_t category;
    // The name of an operation in PyTorch, of a kernel in its program, or of another command in the driver. The profile owns the string.
    const char *name;
    // The number of the device that does the work or that the host works for; CLAYSTONE_CPU if there is none.
    int32_t device;
    // True if the event ran on a stream of an OpenCL device, false if it ran on a host thread.
    bool on_stream;
    // The number of the stream or thread.
    uint32_t lane;
    // Nanoseconds from the start of the profiler to the start of the event.
    int64_t start;
    // The duration in nanoseconds.
    int64_t duration;
    // Bytes read and written, if known; otherwise 0.
    uint64_t bytes;
    // A number that a launch shares with its command on the device; 0 for other events.
    uint64_t launch;
    // The enclosing names of `claystone_annotate`, outermost first, joined by slashes. The profile owns the string.
    const char *annotation;
} ClaystoneProfileEvent;

// Stacked recurrent layers and their inputs: PyTorch's `torch.lstm`, `torch.gru`, `torch.rnn_tanh` and `torch.rnn_relu`, without
// dropout.
typedef struct {
    // A ClaystoneCell.
    int32_t cell;
    // The number of layers.
    size_t num_layers;
    // Whether each layer also processes the sequence backwards.
    bool bidirectional;
    // Whether the layers have biases.
    bool bias;
    // If not 0, the number of features that LSTM's hidden state is projected to.
    size_t proj_size;
    // True if input and output are `[N, L, ..]` instead of `[L, N, ..]`.
    bool batch_first;
    // For packed sequences, whose input is `[rows, ..]`: the number of rows of each step. Otherwise null.
    const int64_t *batch_sizes;
    // The number of steps of packed sequences; otherwise 0.
    size_t batch_size_count;
    // The input.
    const ClaystoneTensor *input;
    // The initial hidden states, `[layers * directions, N, H]`.
    const ClaystoneTensor *hx;
    // The initial cell states of an LSTM; null for other cells.
    const ClaystoneTensor *cx;
    // For each layer and direction: `weight_ih`, `weight_hh`, the two biases if there are any, then `weight_hr` of a projected LSTM.
    ClaystoneTensors parameters;
} ClaystoneRecurrent;

// The properties of a tensor, except its sizes and strides.
typedef struct {
    // The device number.
    int32_t device;
    // A ClaystoneDtype.
    int32_t dtype;
    // The number of dimensions.
    size_t rank;
    // The number of elements.
    size_t numel;
    // The offset of the first element in the storage, in elements.
    size_t offset;
    // The size of the storage in bytes, as requested.
    size_t storage_nbytes;
} ClaystoneTensorInfo;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Enables or disables the caching of a device's freed memory. With `enable` false, every new allocation is one of the driver's, and is
// returned to the driver when it is freed. Statistics are those of the allocator in use; memory that is live keeps its allocator.
ClaystoneStatus claystone_memory_enable_caching(int32_t number,
                                                bool enable);

// Takes the segments of the CPU device from functions of the program from now on. Segments are cached and divided as configured, but do not
// grow in place, because a function allocates a segment as a whole. Memory that is live stays with the earlier allocator. An error for OpenCL devices, whose memory is a `cl_mem` and not an address.
ClaystoneStatus claystone_memory_set_allocator(int32_t number,
                                               const ClaystoneAllocator *functions);

// Runs an operation.
//
// `results` has room for `capacity` handles, which the caller owns; further results are dropped. `result_count` receives the number
// of results of the operation and may be null. The result of a view operation shares its storage with an operand.
ClaystoneStatus claystone_call(const ClaystoneCall *call,
                               ClaystoneTensor **results,
                               size_t capacity,
                               size_t *result_count);

// Runs an operation and writes its results into the existing tensors `out`, like PyTorch's `out=`. Each tensor has the shape of its
// result, which is converted to the tensor's dtype. A null entry discards its result. Elementwise operations whose result dtype
// matches write the tensor directly; results of other operations are copied.
ClaystoneStatus claystone_call_out(const ClaystoneCall *call,
                                   const ClaystoneTensor *const *out,
                                   size_t out_count);

// Computes the gradients of an operation: runs the operation again with recording and propagates the gradients of its results back.
// Elementwise operations and convolutions do not recompute their results for that.
//
// `grad_outputs` has a gradient for each of the first results, of the same shape, dtype and device; null for a result without one.
// `wanted` has a flag for each tensor parameter of the operation, in the order of its signature (for a list at the end: one for each of its
// tensors); a flag other than 0 requests the gradient. `gradients` has room for as many handles, which the caller owns: null for
// gradients that were not requested or do not exist. No gradient shares a storage with an argument. An operation that draws random
// numbers draws them again: pass a generator whose state is the same as before the forward call.
ClaystoneStatus claystone_call_backward(const ClaystoneCall *call,
                                        const ClaystoneTensor *const *grad_outputs,
                                        size_t grad_output_count,
                                        const uint8_t *wanted,
                                        ClaystoneTensor **gradients,
                                        size_t tensor_count);

// The signatures of all operations that `claystone_call` accepts, one per line; `docs/operations.md` explains them. The caller owns the
// string.
ClaystoneStatus claystone_operations(ClaystoneBytes *signatures);

// The number of OpenCL devices. Device numbers start at 0 and do not change while the process lives.
ClaystoneStatus claystone_device_count(int32_t *count);

// The model name of a device. The caller owns the string and frees it with `claystone_bytes_free`.
ClaystoneStatus claystone_device_name(int32_t number, ClaystoneBytes *name);

// The memory of a device in bytes; 0 if unknown.
ClaystoneStatus claystone_device_memory(int32_t number, uint64_t *bytes);

// Gets whether a device exists and has not been lost to a fault. Does not open the device.
ClaystoneStatus claystone_device_is_available(int32_t number, bool *available);

// Makes the next thread that waits receive errors reported by kernels, instead of the thread that launched them: for programs whose
// threads pass work to each other. Call it before the first operation.
void claystone_report_faults_to_any_thread(void);

// Waits until all work submitted to a device so far, on every stream, is complete. Returns errors that kernels reported meanwhile.
ClaystoneStatus claystone_device_synchronize(int32_t number);

// Begins a dry run of all threads and devices. Tensors have no bytes, no kernel runs, and values that are read are zeros. `capacity` is
// the device memory in bytes that the report compares with, 0 for no comparison, or UINT64_MAX for each device's own memory. An error if
// a device has tensors already, or a dry run is in progress.
ClaystoneStatus claystone_dry_run_begin(uint64_t capacity);

// Ends the dry run that claystone_dry_run_begin began, and reports the memory that the program needs: as a JSON object, and as a text
// to print. The caller owns the bytes of both. Tensors that were made meanwhile stay without bytes.
ClaystoneStatus claystone_dry_run_end(ClaystoneBytes *json,
                                      ClaystoneBytes *text);

// Sets the role, a ClaystoneRole, of a tensor's storage in the report of a dry run. Does nothing in other runs. The roles Saved and
// Temporary do not replace the others.
ClaystoneStatus claystone_tensor_set_role(const ClaystoneTensor *tensor,
                                          int32_t role);

// Makes a formula of `input_count` tensors and `scalar_count` numbers from a program: one operation per line (or separated by `;`),
// and at the end `return` with the results. A line is the name of an elementwise operation (`claystone_formula_operations` lists them)
// and its operands: first its tensors, then its scalar arguments. An operand is an input (`x0`), a scalar (`s0`), the result of an
// earlier line (`v0` for the first), or a number. A name with an apostrophe and an index, such as `gelu'0`, is the derivative with
// respect to that operand. The formula `mul x0 s0; relu v0; return v1` computes `relu(x0 * s0)`.
ClaystoneStatus claystone_formula_new(const char *program,
                                      size_t input_count,
                                      size_t scalar_count,
                                      ClaystoneFormula **formula);

// Computes a formula in one launch. Inputs may have any strides and broadcast to the shape of the outputs, which all have one shape
// and different storages; an output may also be an input. Each result is converted to the dtype of its output. The formula computes
// in the widest type of its inputs, or in that of the outputs if all inputs are integers.
ClaystoneStatus claystone_formula_run(const ClaystoneFormula *formula,
                                      ClaystoneTensors inputs,
                                      const double *scalars,
                                      size_t scalar_count,
                                      ClaystoneTensors outputs);

// Releases a formula; null is ignored.
void claystone_formula_release(ClaystoneFormula *formula);

// The operations of formulas, one per line: the name, the number of tensors, the number of scalar arguments, and the accepted dtypes
// (`any`, `float` or `integer`). The caller owns the string.
ClaystoneStatus claystone_formula_operations(ClaystoneBytes *operations);

// Stores the number of launches of this process so far: kernels on OpenCL devices, and operations on the CPU device. Copies, fills,
// reads and writes are not counted.
ClaystoneStatus claystone_launch_count(uint64_t *count);

// Records from now on the kernels, fills and copies that this thread submits to its current stream of the pool's device, instead of
// running them. Allocations come from the pool. Tensors that are made meanwhile have no values before the first replay. Reads, waits,
// writes from the host, events and work on other streams of the device are errors; the capture continues after them. Other threads and
// devices are not affected. Graphs may share a pool if they are replayed one after another in the order of their captures.
//
// An error on the CPU device, which has no queue to record, and while this thread captures already.
ClaystoneStatus claystone_graph_capture_begin(const ClaystonePool *pool);

// Ends this thread's capture and returns the graph, whose memory no other allocation gets before the graph is released.
ClaystoneStatus claystone_graph_capture_end(ClaystoneGraph **graph);

// Ends this thread's capture without a graph. No command has run, and the contents of tensors made meanwhile stay undefined.
ClaystoneStatus claystone_graph_capture_abandon(void);

// Gets whether this thread is capturing a graph of a device.
ClaystoneStatus claystone_graph_is_capturing(int32_t number, bool *capturing);

// Submits the graph's commands to the stream that was current at the capture, and returns without waiting. The commands use the
// memory of the tensors that were used at the capture: to change an input, write to its tensor. Random numbers and optimiser steps
// advance as by calls.
ClaystoneStatus claystone_graph_replay(const ClaystoneGraph *graph);

// Gets the number of commands of a replay: kernels, fills and copies.
ClaystoneStatus claystone_graph_commands(const ClaystoneGraph *graph, size_t *commands);

// Releases a graph after its replays are complete; null is ignored.
void claystone_graph_release(ClaystoneGraph *graph);

// Calls `run(data)`. The hooks store the tensors that `claystone_recurrent` and `claystone_call_backward` save meanwhile for gradients
// (PyTorch's `torch.autograd.graph.saved_tensors_hooks`). The hooks of the innermost scope are used. If a hook fails, the call that
// computes gradients fails with CLAYSTONE_STATUS_AUTOGRAD. `run` must return: leaving it by an exception or a jump is undefined
// behaviour.
ClaystoneStatus claystone_saved_tensors_hooks(const ClaystoneSavedTensorsHooks *hooks,
                                              void (*run)(void*),
                                              void *data);

// Calls `run(data)`. The tensors that `claystone_recurrent` and `claystone_call_backward` save meanwhile wait in host memory, pinned if
// `pin_memory` is true (PyTorch's `torch.autograd.graph.save_on_cpu`). `run` must return, as for `claystone_saved_tensors_hooks`.
ClaystoneStatus claystone_save_on_cpu(bool pin_memory,
                                      void (*run)(void*),
                                      void *data);

// Calls `run(data)`. Meanwhile `claystone_saved_tensors_hooks` and `claystone_save_on_cpu` fail with `reason` as their message. Fails with
// `reason` if hooks are on already (PyTorch's `torch.autograd.graph.disable_saved_tensors_hooks`). `run` must return, as for
// `claystone_saved_tensors_hooks`.
ClaystoneStatus claystone_disable_saved_tensors_hooks(const char *reason,
                                                      void (*run)(void*),
                                                      void *data);

// Frees bytes and sets `data` to null, so that freeing them again does nothing. Null is ignored.
void claystone_bytes_free(ClaystoneBytes *bytes);

// The memory statistics of a device as a JSON object of integers with the names of `torch.cuda.memory_stats`, such as
// "allocated_bytes.all.current".
ClaystoneStatus claystone_memory_stats(int32_t number, ClaystoneBytes *json);

// Resets every peak of a device's statistics to the current value.
ClaystoneStatus claystone_memory_reset_peak(int32_t number);

// Resets the accumulated sums and counts of a device's statistics to zero.
ClaystoneStatus claystone_memory_reset_accumulated(int32_t number);

// Returns all unused memory segments of a device to the driver.
ClaystoneStatus claystone_memory_empty_cache(int32_t number);

// Limits a device's allocator to this fraction, 0 to 1, of the device's memory. Memory already reserved is kept.
ClaystoneStatus claystone_memory_set_fraction(int32_t number, double fraction);

// Starts or stops recording the events of a device's allocator.
ClaystoneStatus claystone_memory_record_history(int32_t number, const ClaystoneHistory *history);

// Checks a text for `CLAYSTONE_ALLOC_CONF`: an error names the key that is unknown, has no meaning or has a value that is not allowed.
ClaystoneStatus claystone_memory_check_config(const char *config);

// Sets the name that encloses the names of all later events of this thread in memory histories. Null or an empty text removes the name.
ClaystoneStatus claystone_memory_set_context(const char *name);

// The statistics of the pinned memory held for a device's transfers as a JSON object of integers with the names of
// `torch.cuda.host_memory_stats`. All zeros for the CPU device and for devices that share the host's memory.
ClaystoneStatus claystone_pinned_memory_stats(int32_t number, ClaystoneBytes *json);

// Sets the peaks of `claystone_pinned_memory_stats` to the current values.
ClaystoneStatus claystone_pinned_memory_reset_peak(int32_t number);

// Sets the sums and counts of `claystone_pinned_memory_stats` to zero.
ClaystoneStatus claystone_pinned_memory_reset_accumulated(int32_t number);

// Returns pinned memory that no transfer uses to the driver.
ClaystoneStatus claystone_pinned_memory_empty_cache(int32_t number);

// Calls `observe(data, failed)` on the allocating thread when an allocation of the device fails for lack of memory, before the error is
// returned, until `claystone_observer_release`. Any thread may call `observe`, which may not be left by an exception or a jump.
ClaystoneStatus claystone_memory_observe_oom(int32_t number,
                                             void (*observe)(void *data, const ClaystoneOutOfMemory *failed),
                                             void *data,
                                             ClaystoneObserver **observer);

// Ends the calls of an observer, without waiting for a call in progress; null is ignored.
void claystone_observer_release(ClaystoneObserver *observer);

// Begins a scope; claystone_peak_scope_release ends it. Of two scopes of a device, the inner must end first. Peaks of outer scopes and
// of claystone_memory_stats are as without the scope.
ClaystoneStatus claystone_peak_scope_begin(int32_t number,
                                           ClaystonePeakScope **scope);

// The peaks since the scope began.
ClaystoneStatus claystone_peak_scope_read(const ClaystonePeakScope *scope, ClaystonePeak *peak);

// Ends a scope; null is none.
void claystone_peak_scope_release(ClaystonePeakScope *scope);

// Saves a snapshot to `path` when an allocation of the device fails for lack of memory, before the error is returned. The name ends in
// .pickle, .pkl or .json. Records the history with call stacks from now on, unless it is recorded already. Replaces an earlier path of
// the device; with null, no snapshots are saved any more.
ClaystoneStatus claystone_memory_snapshot_on_oom(int32_t number,
                                                 const char *path);

// A snapshot of a device's allocator: every block, and the recorded events, in a ClaystoneSnapshotFormat. The caller owns the
// bytes.
ClaystoneStatus claystone_memory_snapshot(int32_t number,
                                          int32_t format,
                                          ClaystoneBytes *snapshot);

// Runs an elementwise operation on many tensors. `lists` has `list_count` operands, each with as many tensors as `out`, which receives
// the results, or with one tensor that applies to all; `numbers` has the scalar arguments. Tensors of one shape share launches. `out`
// may be the first list.
ClaystoneStatus claystone_foreach(const char *name,
                                  const ClaystoneTensors *lists,
                                  size_t list_count,
                                  const double *numbers,
                                  size_t number_count,
                                  ClaystoneTensors out);

// One step of Adam or AdamW. PyTorch's `torch._fused_adam_` and `torch._fused_adamw_`.
ClaystoneStatus claystone_fused_adam(const ClaystoneStep *step,
                                     const ClaystoneAdamState *state,
                                     const ClaystoneAdam *adam);

// One step of stochastic gradient descent. `momentum_buffers` has a tensor for each parameter, or is empty without momentum.
// PyTorch's `torch._fused_sgd_`.
ClaystoneStatus claystone_fused_sgd(const ClaystoneStep *step,
                                    ClaystoneTensors momentum_buffers,
                                    const ClaystoneSgd *sgd);

// One step of Adagrad. `state_sums` are the sums of squared gradients, `steps` one-element tensors with the number of this step,
// counted from 1. PyTorch's `torch._fused_adagrad_`.
ClaystoneStatus claystone_fused_adagrad(const ClaystoneStep *step,
                                        ClaystoneTensors state_sums,
                                        ClaystoneTensors steps,
                                        const ClaystoneAdagrad *adagrad);

// Multiplies gradients by `inv_scale` in place and sets `found_inf` to 1 if an element is infinite or NaN; `inv_scale` and `found_inf`
// have one element. PyTorch's `torch._amp_foreach_non_finite_check_and_unscale_`.
ClaystoneStatus claystone_unscale(ClaystoneTensors gradients,
                                  const ClaystoneTensor *found_inf,
                                  const ClaystoneTensor *inv_scale);

// Makes an empty pool. With `use_on_oom`, allocations outside the pool take its free blocks before they fail. With `no_split`, each
// allocation gets a segment of its own, which is reused whole.
ClaystoneStatus claystone_pool_new(int32_t number,
                                   bool use_on_oom,
                                   bool no_split,
                                   ClaystonePool **pool);

// Releases a handle on a pool; null is ignored.
void claystone_pool_release(ClaystonePool *pool);

// Gets the pool's number: unique among the live pools of the process, never 0.
ClaystoneStatus claystone_pool_id(const ClaystonePool *pool, uint32_t *id);

// Gets the pool's current memory.
ClaystoneStatus claystone_pool_stats(const ClaystonePool *pool, ClaystonePoolStats *stats);

// Returns the pool's unused segments to the driver. Waits for work that still uses freed blocks.
ClaystoneStatus claystone_pool_empty_cache(const ClaystonePool *pool);

// Takes this thread's allocations on the pool's device from the pool until `claystone_pool_end`. Calls nest: the innermost pool of a
// device is used.
ClaystoneStatus claystone_pool_begin(const ClaystonePool *pool);

// Ends the latest `claystone_pool_begin` of this thread with the pool. Pools may end in any order.
ClaystoneStatus claystone_pool_end(const ClaystonePool *pool);

// Starts the profiler, which records the whole process; only one can run at a time. Waits until all devices are idle.
ClaystoneStatus claystone_profiler_start(void);

// Stops the profiler and returns its recording. Waits until all devices are idle. The caller owns the handle.
ClaystoneStatus claystone_profiler_stop(ClaystoneProfile **profile);

// The number of events of a profile.
ClaystoneStatus claystone_profile_count(const ClaystoneProfile *profile, size_t *count);

// Gets an event of a profile by its index; events are sorted by their start.
ClaystoneStatus claystone_profile_event(const ClaystoneProfile *profile, size_t index, ClaystoneProfileEvent *event);

// The profile as a trace for `claystone profile`, Perfetto and `chrome://tracing`. The caller owns the bytes.
ClaystoneStatus claystone_profile_trace(const ClaystoneProfile *profile, ClaystoneBytes *json);

// Calls `run(data)` under a name. Profiles and the memory histories of devices show when it began and ended, and label the work of
// the thread meanwhile with the name. Each distinct name is kept for the life of the process, so use few. `run` must return: leaving
// it by an exception or a jump is undefined behaviour.
ClaystoneStatus claystone_annotate(const char *name,
                                   void (*run)(void*),
                                   void *data);

// Gives a handle on a profile back; null is none.
void claystone_profile_release(ClaystoneProfile *profile);

// Makes a generator with this seed. To make an operation draw from it, pass it as an argument of the call.
ClaystoneStatus claystone_generator_new(uint64_t seed, ClaystoneGenerator **generator);

// Releases a handle on a generator; null is ignored.
void claystone_generator_release(ClaystoneGenerator *generator);

// Sets the seed and the number of draws of a generator; 0 draws restarts its sequence. PyTorch's `manual_seed` and `set_state`.
ClaystoneStatus claystone_generator_set_state(const ClaystoneGenerator *generator_handle,
                                              uint64_t seed,
                                              uint64_t draws);

// Gets the seed of a generator and the number of draws made from it.
ClaystoneStatus claystone_generator_state(const ClaystoneGenerator *generator_handle, uint64_t *seed, uint64_t *draws);

// Runs recurrent layers.
//
// `results` has room for three handles, which the caller owns: the hidden states of the last layer at all steps, the final hidden states of
// all layers, and an LSTM's final cell states (null for other cells). `wanted` has a flag for the input, `hx`, an LSTM's `cx`, and
// each parameter; a flag other than 0 means that its gradient will be requested. `recording` then receives a handle, which the caller
// owns; it is null if `wanted` is null or all 0.
ClaystoneStatus claystone_recurrent(const ClaystoneRecurrent *layers,
                                    const uint8_t *wanted,
                                    ClaystoneTensor **results,
                                    ClaystoneRecording **recording);

// Computes the gradients of a recorded call. May be called any number of times.
//
// `grad_outputs` has a gradient for each of the first results, of the same shape, dtype and device; null for a result without one.
// `gradients` has room for one handle per flag of `wanted`, in that order, which the caller owns: null for gradients that were not
// requested or do not exist. Each gradient has its own storage. The arguments of the recorded call must not have changed.
ClaystoneStatus claystone_recording_backward(const ClaystoneRecording *recording,
                                             const ClaystoneTensor *const *grad_outputs,
                                             size_t grad_output_count,
                                             ClaystoneTensor **gradients,
                                             size_t tensor_count);

// Releases a handle on a recording and the tensors it keeps; null is ignored.
void claystone_recording_release(ClaystoneRecording *recording);

// The message of this thread's latest failed call; empty if none failed. claystone owns the string, which stays valid until the next
// failed call of the thread; do not free it. Successful calls do not change it.
const char *claystone_last_error(void);

// Allocates a storage of `nbytes` bytes with the device's allocator, on the thread's current stream. Its contents are unspecified. The
// caller owns the handle.
ClaystoneStatus claystone_storage_new(int32_t device_number,
                                      size_t nbytes,
                                      ClaystoneStorage **storage);

// Allocates a storage of `nbytes` bytes of host memory on the CPU device, and writes its address to `data`. The memory is pinned for
// fast transfers to and from the given device. The caller may read and write these bytes while the storage lives, except while a call
// or copy uses them. Ordinary memory is used for the CPU device and if no pinned memory is left. Freed bytes are cached and reused
// once the enqueued copies from and to them are complete. The contents are unspecified. The caller owns the handle.
ClaystoneStatus claystone_storage_new_pinned(int32_t device_number,
                                             size_t nbytes,
                                             ClaystoneStorage **storage,
                                             void **data);

// Increments the handle's reference count; the handle must be released once more.
ClaystoneStatus claystone_storage_retain(const ClaystoneStorage *storage);

// Decrements the handle's reference count; null is ignored. Releasing a handle more often than it was returned and retained is
// undefined behaviour.
void claystone_storage_release(ClaystoneStorage *storage);

// The handle's reference count: how often it must still be released. Tensors on the storage do not count.
ClaystoneStatus claystone_storage_use_count(const ClaystoneStorage *storage, size_t *count);

// The size in bytes, as requested.
ClaystoneStatus claystone_storage_nbytes(const ClaystoneStorage *storage, size_t *nbytes);

// The number of the device that holds the bytes.
ClaystoneStatus claystone_storage_device(const ClaystoneStorage *storage, int32_t *device_number);

// Gets whether two handles refer to the same storage. Handles returned by different calls may be different pointers to one storage.
ClaystoneStatus claystone_storage_is_same(const ClaystoneStorage *storage,
                                          const ClaystoneStorage *other,
                                          bool *same);

// Declares that `stream`, which is not the stream the storage was allocated on, uses the bytes. After the release they are not reused
// until the work submitted to `stream` before the release is complete. PyTorch's `record_stream`.
ClaystoneStatus claystone_storage_record_stream(const ClaystoneStorage *storage,
                                                const ClaystoneStream *stream);

// Makes a new stream. Work already submitted still runs after the last handle is released.
ClaystoneStatus claystone_stream_new(int32_t device_number, ClaystoneStream **stream);

// Like `claystone_stream_new`, with a hint for the driver: a priority below 0 is more urgent than that of other streams, above 0 less.
ClaystoneStatus claystone_stream_with_priority(int32_t device_number,
                                               int32_t priority,
                                               ClaystoneStream **stream);

// Gets a handle on a device's default stream, which every thread uses until it sets another one.
ClaystoneStatus claystone_stream_default(int32_t device_number, ClaystoneStream **stream);

// Gets a handle on the stream that this thread currently submits a device's work to.
ClaystoneStatus claystone_stream_current(int32_t device_number, ClaystoneStream **stream);

// Makes a stream this thread's current stream of its device. The thread keeps the stream alive until it sets another one.
ClaystoneStatus claystone_stream_set_current(const ClaystoneStream *stream);

// Releases a handle on a stream; null is ignored.
void claystone_stream_release(ClaystoneStream *stream);

// Gets the device number of a stream and the stream's number on that device: 0 is the default stream. Numbers of destroyed streams are
// reused. Either pointer may be null.
ClaystoneStatus claystone_stream_id(const ClaystoneStream *stream,
                                    int32_t *device_number,
                                    int64_t *id);

// Waits until all work submitted to a stream so far is complete. Returns errors that its kernels reported.
ClaystoneStatus claystone_stream_synchronize(const ClaystoneStream *stream);

// Gets whether all work submitted to a stream is complete. Does not wait.
ClaystoneStatus claystone_stream_query(const ClaystoneStream *stream, bool *done);

// Makes work submitted to `stream` from now on wait for the work submitted to `other` so far. The host waits only if the streams are
// on different devices.
ClaystoneStatus claystone_stream_wait_stream(const ClaystoneStream *stream,
                                             const ClaystoneStream *other);

// Records an event that is complete when all work submitted to a stream so far is complete.
ClaystoneStatus claystone_stream_record_event(const ClaystoneStream *stream, ClaystoneEvent **event);

// Like `claystone_stream_record_event`, but the event also stores its completion time for `claystone_event_elapsed_time`.
ClaystoneStatus claystone_stream_record_timed_event(const ClaystoneStream *stream,
                                                    ClaystoneEvent **event);

// Makes work submitted to `stream` from now on wait for an event. The host waits only if the event is on another device.
ClaystoneStatus claystone_stream_wait_event(const ClaystoneStream *stream,
                                            const ClaystoneEvent *event);

// Gets whether all work before an event is complete. Does not wait.
ClaystoneStatus claystone_event_query(const ClaystoneEvent *event, bool *done);

// Waits until all work before an event is complete.
ClaystoneStatus claystone_event_synchronize(const ClaystoneEvent *event);

// The milliseconds between the completion of two events of one device, by the device's clock; negative if `end` completed first. Waits
// for both events, which `claystone_stream_record_timed_event` must have recorded.
ClaystoneStatus claystone_event_elapsed_time(const ClaystoneEvent *start,
                                             const ClaystoneEvent *end,
                                             double *milliseconds);

// Releases a handle on an event; null is ignored.
void claystone_event_release(ClaystoneEvent *event);

// Makes a tensor over a storage from `rank` sizes, `rank` strides and an offset, all in elements. Strides may be zero or negative if all
// elements are inside the storage. The storage's size must be a multiple of the element size; to view one storage with several
// dtypes, make its size a multiple of 16 bytes. Each byte of a bool tensor must be 0 or 1. The caller owns the handle; the tensor
// keeps the storage alive.
ClaystoneStatus claystone_tensor_new(const ClaystoneStorage *storage,
                                     int32_t dtype_number,
                                     const int64_t *sizes,
                                     const int64_t *strides,
                                     size_t rank,
                                     int64_t offset,
                                     ClaystoneTensor **tensor);

// Releases a handle on a tensor; null is ignored. Releasing a handle twice is undefined behaviour.
void claystone_tensor_release(ClaystoneTensor *tensor);

// Gets the properties, sizes and strides of a tensor. Each of the last three pointers may be null. `sizes` and `strides` have room for
// `capacity` entries; a larger rank is an error, but `info` is still written and contains the rank.
ClaystoneStatus claystone_tensor_info(const ClaystoneTensor *tensor,
                                      size_t capacity,
                                      ClaystoneTensorInfo *info,
                                      int64_t *sizes,
                                      int64_t *strides);

// Gets whether two tensors share a storage.
ClaystoneStatus claystone_tensor_shares_storage(const ClaystoneTensor *tensor,
                                                const ClaystoneTensor *other,
                                                bool *shares);

// Gets a handle on the storage of a tensor. The caller owns the handle.
ClaystoneStatus claystone_tensor_storage(const ClaystoneTensor *tensor, ClaystoneStorage **storage);

// Copies `source` into a tensor of any strides, dtype and device, broadcast to its shape and converted to its dtype, like PyTorch's
// `copy_`. Copies between devices, including the CPU device, wait until the copy is complete.
ClaystoneStatus claystone_tensor_copy(const ClaystoneTensor *tensor,
                                      const ClaystoneTensor *source);

// Like `claystone_tensor_copy`, but returns once the copy is enqueued on the thread's current stream, like PyTorch's
// `non_blocking=True`. That requires one tensor on a device, the other in memory pinned for that device
// (`claystone_storage_new_pinned`), and both contiguous with the same shape and dtype; other copies wait. Do not access the pinned
// bytes before waiting for the stream or for an event recorded on it; the handles may be released at once. The next wait on the
// stream reports a failure.
ClaystoneStatus claystone_tensor_copy_non_blocking(const ClaystoneTensor *tensor,
                                                   const ClaystoneTensor *source);

// Sets the elements of a tensor, in row-major order, from `data`; `nbytes` must be exactly their size in bytes. `data` may be reused
// after the call.
ClaystoneStatus claystone_tensor_write(const ClaystoneTensor *tensor,
                                       const void *data,
                                       size_t nbytes);

// Like `claystone_tensor_write`, but copies `data` and returns once the write is enqueued on the thread's current stream, without
// waiting for earlier work of the stream. Writes of more than 16 MiB, and writes to a non-contiguous tensor, wait. The next wait on
// the stream reports a failure of the device.
ClaystoneStatus claystone_tensor_write_non_blocking(const ClaystoneTensor *tensor,
                                                    const void *data,
                                                    size_t nbytes);

// Copies the elements of a tensor, in row-major order, to `data`; `nbytes` must be exactly their size in bytes. Waits for the device.
// If the call fails, the contents of `data` are unspecified.
ClaystoneStatus claystone_tensor_read(const ClaystoneTensor *tensor,
                                      void *data,
                                      size_t nbytes);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

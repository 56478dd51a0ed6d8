/* The C API of claystone. Made of integrations/capi/src by cbindgen: change that, and run
 * UPDATE_HEADER=1 cargo test -p claystone-capi --test header
 *
 * Statuses. A function that can fail returns a ClaystoneStatus; where it is not CLAYSTONE_STATUS_OK, nothing was written to
 * what its last parameters point to, and claystone_last_error() is a sentence that says what is wrong.
 *
 * Ownership. A handle that a function gives (through a `T **`) is the caller's, who gives it back to the `_release` function of
 * its type, once. A handle that is given to a function is borrowed for the call; what is made of it keeps what it needs: a
 * tensor keeps its storage. The same holds for arrays and texts. `const` handles are borrowed, too: tensors are changed
 * through them, as claystone's methods do.
 *
 * Threads. Handles may be used by any thread, by several at a time. Not so while one of them releases its last handle.
 *
 * Asynchrony. Work on an OpenCL device is enqueued on the thread's current stream of that device. What a kernel finds wrong
 * is the error of a later call that waits.
 */

#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

// The number of the CPU device, which is always there. OpenCL devices have the numbers from 0 on.
#define CLAYSTONE_CPU -1

// How a call ended.
typedef enum {
    // As it should.
    CLAYSTONE_STATUS_OK = 0,
    // An argument makes no sense: shapes, dtypes, devices, names, tags, null.
    CLAYSTONE_STATUS_INVALID = 1,
    // A dimension or an index is out of range.
    CLAYSTONE_STATUS_INDEX = 2,
    // The device, after giving back everything cached, has no room.
    CLAYSTONE_STATUS_OUT_OF_MEMORY = 3,
    // The device is not there.
    CLAYSTONE_STATUS_NO_DEVICE = 4,
    // A call of the OpenCL driver failed, or a kernel does not compile.
    CLAYSTONE_STATUS_DRIVER = 5,
    // The device has faulted; nothing can run on it in this process any more.
    CLAYSTONE_STATUS_DEVICE_LOST = 6,
    // An operation in place was done in part: what it writes to has to be set anew.
    CLAYSTONE_STATUS_PARTIAL = 7,
    // A gradient cannot be computed.
    CLAYSTONE_STATUS_AUTOGRAD = 8,
    // claystone panicked: a bug. What the call was to write to may hold anything.
    CLAYSTONE_STATUS_PANIC = 9,
    // Something else.
    CLAYSTONE_STATUS_FAILED = 10,
    // An index out of range or a division by zero that a kernel found, of this operation or of an earlier one. It is told this once.
    CLAYSTONE_STATUS_KERNEL = 11,
} ClaystoneStatus;

// The element types. The numbers stay what they are.
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
} ClaystoneDtype;

// What an argument is, and so which member of its value is read.
typedef enum {
    // An argument that is left out: its default. A tensor that is left out is a null TENSOR.
    CLAYSTONE_TAG_NONE = 0,
    // `integer`: false where it is 0.
    CLAYSTONE_TAG_BOOL = 1,
    // `integer`.
    CLAYSTONE_TAG_INT = 2,
    // `number`.
    CLAYSTONE_TAG_FLOAT = 3,
    // `integers`, of `length` entries.
    CLAYSTONE_TAG_INTS = 4,
    // `numbers`, of `length` entries.
    CLAYSTONE_TAG_FLOATS = 5,
    // `text`.
    CLAYSTONE_TAG_TEXT = 6,
    // `integer`: a ClaystoneDtype.
    CLAYSTONE_TAG_DTYPE = 7,
    // `integer`: the number of a device.
    CLAYSTONE_TAG_DEVICE = 8,
    // `tensor`, or null.
    CLAYSTONE_TAG_TENSOR = 9,
    // `tensors`, of `length` entries, none of them null.
    CLAYSTONE_TAG_TENSORS = 10,
    // `generator`, for operations that draw random numbers: no parameter of theirs, and it has no name. Null is the process's.
    CLAYSTONE_TAG_GENERATOR = 11,
} ClaystoneTag;

// The forms of a memory snapshot.
typedef enum {
    // A pickle for PyTorch's memory viewer.
    CLAYSTONE_SNAPSHOT_FORMAT_PICKLE = 0,
    // JSON.
    CLAYSTONE_SNAPSHOT_FORMAT_JSON = 1,
} ClaystoneSnapshotFormat;

// What an event of a profile is about.
typedef enum {
    // An operation on the host: while it is submitted to an OpenCL device, or while the CPU device computes it.
    CLAYSTONE_CATEGORY_OPERATION = 0,
    // A call of the driver that submits a command.
    CLAYSTONE_CATEGORY_LAUNCH = 1,
    // The host waits for a device.
    CLAYSTONE_CATEGORY_WAIT = 2,
    // A kernel on a device.
    CLAYSTONE_CATEGORY_KERNEL = 3,
    // Bytes are copied within a device.
    CLAYSTONE_CATEGORY_COPY = 4,
    // Bytes are filled on a device.
    CLAYSTONE_CATEGORY_FILL = 5,
    // Bytes go from a device to the host.
    CLAYSTONE_CATEGORY_READ = 6,
    // Bytes go from the host to a device.
    CLAYSTONE_CATEGORY_WRITE = 7,
    // Anything else.
    CLAYSTONE_CATEGORY_OTHER = 8,
} ClaystoneCategory;

// What a recurrent layer computes in a step.
typedef enum {
    // Long short-term memory.
    CLAYSTONE_CELL_LSTM = 0,
    // The gated recurrent unit.
    CLAYSTONE_CELL_GRU = 1,
    // The hyperbolic tangent of a sum.
    CLAYSTONE_CELL_RNN_TANH = 2,
    // A sum where it is above 0.
    CLAYSTONE_CELL_RNN_RELU = 3,
} ClaystoneCell;

// A handle on a point in a stream's work.
typedef struct ClaystoneEvent ClaystoneEvent;

// A handle on a generator of random numbers: a seed and the number of draws made from it. One serves every device. Where a function
// takes one, null is the process's own.
typedef struct ClaystoneGenerator ClaystoneGenerator;

// A handle on what was recorded.
typedef struct ClaystoneProfile ClaystoneProfile;

// What the gradients of a call are computed from.
typedef struct ClaystoneRecording ClaystoneRecording;

// A handle on a run of bytes on one device. The bytes go back to the device's allocator when the last handle and the last tensor
// on them are released.
typedef struct ClaystoneStorage ClaystoneStorage;

// A handle on a line of work of one device: what is submitted to it runs in order.
typedef struct ClaystoneStream ClaystoneStream;

// A handle on a tensor: elements of a storage by shape, strides and offset.
typedef struct ClaystoneTensor ClaystoneTensor;

// The value of an argument.
typedef union {
    // Of BOOL, INT, DTYPE, DEVICE.
    int64_t integer;
    // Of FLOAT.
    double number;
    // Of INTS.
    const int64_t *integers;
    // Of FLOATS.
    const double *numbers;
    // Of TEXT.
    const char *text;
    // Of TENSOR.
    const ClaystoneTensor *tensor;
    // Of TENSORS.
    const ClaystoneTensor *const *tensors;
    // Of GENERATOR.
    const ClaystoneGenerator *generator;
} ClaystoneValue;

// An argument of a call.
typedef struct {
    // The parameter that it is for; null for the next one by position. Those with names come last.
    const char *name;
    // A ClaystoneTag.
    int32_t tag;
    // How many entries its value has, of INTS, FLOATS and TENSORS; otherwise it is not read.
    size_t length;
    // Its value, of which the tag says which member.
    ClaystoneValue value;
} ClaystoneArgument;

// An operation and what it is called with.
//
// The parameters of an operation are those of its signature, which `claystone_operations` lists. Tensors are for its parameters that
// are tensors, in their order, and other arguments for the others, in theirs: it makes no difference whether tensors are in
// `tensors` or among `arguments`, where they may stand in the order of the signature. Those of `tensors` come first. What is left
// out at the end has its default.
typedef struct {
    // The operation's name.
    const char *name;
    // Tensors by position; null for one that is left out.
    const ClaystoneTensor *const *tensors;
    // How many.
    size_t tensor_count;
    // Arguments, and tensors too.
    const ClaystoneArgument *arguments;
    // How many.
    size_t argument_count;
} ClaystoneCall;

// Bytes that claystone made, which are the caller's: `claystone_bytes_free` frees them. One zero byte that is not counted follows them,
// so that a text is a C string.
typedef struct {
    // The first byte.
    uint8_t *data;
    // How many there are.
    size_t length;
} ClaystoneBytes;

// A list of tensors.
typedef struct {
    // Handles, none of them null.
    const ClaystoneTensor *const *tensors;
    // How many.
    size_t count;
} ClaystoneTensors;

// What a step of an optimiser is made of, whichever it is.
typedef struct {
    // What is updated.
    ClaystoneTensors parameters;
    // As many gradients.
    ClaystoneTensors gradients;
    // The learning rate, of one element, on the device; null where that of the hyperparameters is the one.
    const ClaystoneTensor *lr;
    // What gradients are divided by first, in place, of one element; or null.
    const ClaystoneTensor *grad_scale;
    // One element: where it is 1 nothing is changed. Or null.
    const ClaystoneTensor *found_inf;
    // Whether to go up the gradient instead of down.
    bool maximize;
} ClaystoneStep;

// The state of Adam and AdamW: as many tensors as parameters in each list.
typedef struct {
    // Running means of the gradients.
    ClaystoneTensors exp_avgs;
    // Running means of their squares.
    ClaystoneTensors exp_avg_sqs;
    // The greatest of these so far; read with `amsgrad` only.
    ClaystoneTensors max_exp_avg_sqs;
    // Tensors of one element: the how-manieth step this is, from 1 on.
    ClaystoneTensors steps;
} ClaystoneAdamState;

// Hyperparameters of Adam and AdamW.
typedef struct {
    // Learning rate.
    double lr;
    // Decay of the running mean of the gradient.
    double beta1;
    // Decay of the running mean of its square.
    double beta2;
    // Added to the denominator.
    double eps;
    // Weight decay: of AdamW beside the gradient, otherwise in it.
    double weight_decay;
    // Whether to divide by the greatest running mean so far.
    bool amsgrad;
    // Whether it is AdamW.
    bool decoupled;
} ClaystoneAdam;

// Hyperparameters of stochastic gradient descent.
typedef struct {
    // Learning rate.
    double lr;
    // Factor of the velocity kept from step to step; 0 for none.
    double momentum;
    // The part of the gradient that does not reach the velocity, from the second step on.
    double dampening;
    // L2 penalty, added to the gradient.
    double weight_decay;
    // Nesterov's look-ahead.
    bool nesterov;
    // Whether it is the first step: what the momentum buffers hold is not read.
    bool first;
} ClaystoneSgd;

// Hyperparameters of Adagrad.
typedef struct {
    // Learning rate.
    double lr;
    // How fast the learning rate falls: step t uses `lr / (1 + (t - 1) * lr_decay)`.
    double lr_decay;
    // L2 penalty, added to the gradient.
    double weight_decay;
    // Added to the denominator.
    double eps;
} ClaystoneAdagrad;

// An event of a profile.
typedef struct {
    // A ClaystoneCategory.
    int32_t category;
    // PyTorch's name of an operation, of a kernel its program's, of other commands the driver's: the profile's, as long as that lives.
    const char *name;
    // The number of the device that works, or that the host works for; the CPU device's where there is none.
    int32_t device;
    // Whether it happened on a stream of an OpenCL device, and not on a thread of the host.
    bool on_stream;
    // The number of the stream or of the thread.
    uint32_t lane;
    // Nanoseconds from when the profiler was started to when the event began.
    int64_t start;
    // For how many nanoseconds it ran.
    int64_t duration;
    // Bytes that it reads and writes, where they are known.
    uint64_t bytes;
    // What a launch and its command on the device have in common; 0 for other events.
    uint64_t launch;
    // The names of `claystone_annotate` that it happened under, the outermost first, joined by slashes; as `name`.
    const char *annotation;
} ClaystoneProfileEvent;

// Recurrent layers on top of each other, and what they are given: PyTorch's `torch.lstm`, `torch.gru`, `torch.rnn_tanh` and
// `torch.rnn_relu`, without dropout.
typedef struct {
    // A ClaystoneCell.
    int32_t cell;
    // How many layers.
    size_t num_layers;
    // Whether each layer also goes through the sequence from its end.
    bool bidirectional;
    // Whether there are biases.
    bool bias;
    // Where not 0, LSTM's hidden state is projected to so many features.
    size_t proj_size;
    // Whether input and output are `[N, L, ..]` instead of `[L, N, ..]`.
    bool batch_first;
    // Of packed sequences, whose input is `[rows, ..]`, how many of these rows each step has; null for others.
    const int64_t *batch_sizes;
    // How many steps that are; 0 for others.
    size_t batch_size_count;
    // The input.
    const ClaystoneTensor *input;
    // The hidden states to begin with, `[layers * directions, N, H]`.
    const ClaystoneTensor *hx;
    // LSTM's cell states to begin with; null for others.
    const ClaystoneTensor *cx;
    // Of each layer and each of its directions `weight_ih`, `weight_hh`, then the two biases, then LSTM's `weight_hr`, as far as there
    // are such.
    ClaystoneTensors parameters;
} ClaystoneRecurrent;

// What a tensor is, but for its sizes and strides.
typedef struct {
    // The number of the device.
    int32_t device;
    // A ClaystoneDtype.
    int32_t dtype;
    // How many dimensions.
    size_t rank;
    // How many elements.
    size_t numel;
    // Elements of the storage before the first one.
    size_t offset;
    // The size of the storage in bytes, as asked for.
    size_t storage_nbytes;
} ClaystoneTensorInfo;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

// Runs an operation.
//
// `results` has room for `capacity` handles, which are the caller's; results beyond that are dropped. `result_count` says how many
// the operation gave, and may be null. A result may share its storage with an operand: that of a view does.
ClaystoneStatus claystone_call(const ClaystoneCall *call,
                               ClaystoneTensor **results,
                               size_t capacity,
                               size_t *result_count);

// Runs an operation and writes its results into tensors that are there: those of `out`, of the results' shapes, converted to their
// dtypes. Null is for a result that nobody wants. PyTorch's `out=`. Elementwise operations whose result has the dtype of the tensor
// write it directly; of others the results are copied.
ClaystoneStatus claystone_call_out(const ClaystoneCall *call,
                                   const ClaystoneTensor *const *out,
                                   size_t out_count);

// The gradients of an operation: runs it once more, recorded, and goes back from the gradients of its results. Of elementwise operations
// and convolutions the results are not computed for that.
//
// `grad_outputs` has one gradient for each of the first results, of its shape, dtype and device; null for one that has none. `wanted` has
// a flag for each tensor parameter of the operation, in the order of its signature (for each tensor of a list at its end): not 0
// where its gradient is wanted. `gradients` has room for as many handles, which are the caller's: null where none was wanted or
// none flows. No gradient shares a storage with what was given. An operation that draws random numbers draws them again: give it a
// generator whose state is what it was before.
ClaystoneStatus claystone_call_backward(const ClaystoneCall *call,
                                        const ClaystoneTensor *const *grad_outputs,
                                        size_t grad_output_count,
                                        const uint8_t *wanted,
                                        ClaystoneTensor **gradients,
                                        size_t tensor_count);

// The signatures of all operations, one a line, as `docs/operations.md` explains them: what `claystone_call` can be given. The text
// is the caller's.
ClaystoneStatus claystone_operations(ClaystoneBytes *signatures);

// How many OpenCL devices there are: their numbers are 0 and above, as long as the process lives.
ClaystoneStatus claystone_device_count(int32_t *count);

// The name of a device: its model. The text is the caller's, to be given to `claystone_bytes_free`.
ClaystoneStatus claystone_device_name(int32_t number, ClaystoneBytes *name);

// The memory of a device in bytes; 0 where it could not be found out.
ClaystoneStatus claystone_device_memory(int32_t number, uint64_t *bytes);

// Whether a device is there and has not been lost to a fault. Opens nothing.
ClaystoneStatus claystone_device_is_available(int32_t number, bool *available);

// From now on, whichever thread waits next is told what kernels found wrong, and not the thread that launched them: for programs whose
// threads hand work on. Call it before the first operation.
void claystone_report_faults_to_any_thread(void);

// Waits until everything submitted to a device so far, on every stream, is done. Reports what kernels found wrong meanwhile.
ClaystoneStatus claystone_device_synchronize(int32_t number);

// Frees what a function made, and sets it to none, so that to free it again does nothing. Null is none.
void claystone_bytes_free(ClaystoneBytes *bytes);

// A device's memory statistics as a JSON object of whole numbers under the names of `torch.cuda.memory_stats`, such as
// "allocated_bytes.all.current".
ClaystoneStatus claystone_memory_stats(int32_t number, ClaystoneBytes *json);

// Sets every peak of a device's statistics to the current value.
ClaystoneStatus claystone_memory_reset_peak(int32_t number);

// Sets the sums and counts of a device's statistics to zero.
ClaystoneStatus claystone_memory_reset_accumulated(int32_t number);

// Gives every segment of a device's memory that nothing uses back to the driver.
ClaystoneStatus claystone_memory_empty_cache(int32_t number);

// Lets the allocator of a device hold at most this part, 0 to 1, of its memory. What it holds already it keeps.
ClaystoneStatus claystone_memory_set_fraction(int32_t number, double fraction);

// Begins to record what a device's allocator does, of the `max_entries` latest events, with call stacks where `stacks` says so; with
// `max_entries` 0 it ends, and what was recorded is forgotten.
ClaystoneStatus claystone_memory_record_history(int32_t number,
                                                size_t max_entries,
                                                bool stacks);

// What a device's allocator holds, block by block, and the recorded events, in a form of ClaystoneSnapshotFormat. The bytes are the
// caller's.
ClaystoneStatus claystone_memory_snapshot(int32_t number,
                                          int32_t format,
                                          ClaystoneBytes *snapshot);

// Runs an elementwise operation on many tensors: `lists` has its operands, `list_count` of them, each of as many tensors as `out`, which
// is written, or of one for all; `numbers` has its other arguments. Tensors of one shape share launches. `out` may be the first list.
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

// One step of stochastic gradient descent. `momentum_buffers` has as many tensors as there are parameters, or none without a
// momentum. PyTorch's `torch._fused_sgd_`.
ClaystoneStatus claystone_fused_sgd(const ClaystoneStep *step,
                                    ClaystoneTensors momentum_buffers,
                                    const ClaystoneSgd *sgd);

// One step of Adagrad. `state_sums` are the sums of squared gradients, `steps` tensors of one element: the how-manieth step this
// is, from 1 on. PyTorch's `torch._fused_adagrad_`.
ClaystoneStatus claystone_fused_adagrad(const ClaystoneStep *step,
                                        ClaystoneTensors state_sums,
                                        ClaystoneTensors steps,
                                        const ClaystoneAdagrad *adagrad);

// Multiplies gradients by `inv_scale` in place, and sets `found_inf` to 1 where one of them is infinite or NaN; both are of one
// element. PyTorch's `torch._amp_foreach_non_finite_check_and_unscale_`.
ClaystoneStatus claystone_unscale(ClaystoneTensors gradients,
                                  const ClaystoneTensor *found_inf,
                                  const ClaystoneTensor *inv_scale);

// Begins to record what the process does. Waits for what devices have to do. One profiler at a time sees the whole process.
ClaystoneStatus claystone_profiler_start(void);

// Ends the recording, and gives what was recorded. Waits for what devices have to do. The handle is the caller's.
ClaystoneStatus claystone_profiler_stop(ClaystoneProfile **profile);

// How many events a profile has.
ClaystoneStatus claystone_profile_count(const ClaystoneProfile *profile, size_t *count);

// An event of a profile, by its index in the order in which they began.
ClaystoneStatus claystone_profile_event(const ClaystoneProfile *profile, size_t index, ClaystoneProfileEvent *event);

// A profile as the trace that `claystone profile`, Perfetto and `chrome://tracing` read. The bytes are the caller's.
ClaystoneStatus claystone_profile_trace(const ClaystoneProfile *profile, ClaystoneBytes *json);

// Calls `run` with `data`, under a name: profiles, and the memory histories of devices, show when it began and ended, and what
// the thread did meanwhile carries the name. Each name is remembered for the life of the process: use few. `run` has to return; to
// leave it by an exception or a jump is undefined behaviour.
ClaystoneStatus claystone_annotate(const char *name,
                                   void (*run)(void*),
                                   void *data);

// Gives a handle on a profile back; null is none.
void claystone_profile_release(ClaystoneProfile *profile);

// Makes a generator of this seed. To have an operation draw from it, give it as an argument of the call.
ClaystoneStatus claystone_generator_new(uint64_t seed, ClaystoneGenerator **generator);

// Gives a handle on a generator back; null is none.
void claystone_generator_release(ClaystoneGenerator *generator);

// Sets the seed and the number of draws that a generator goes on from: 0 for a new start. PyTorch's `manual_seed` and `set_state`.
ClaystoneStatus claystone_generator_set_state(const ClaystoneGenerator *generator_handle,
                                              uint64_t seed,
                                              uint64_t draws);

// The seed of a generator and the number of draws made from it.
ClaystoneStatus claystone_generator_state(const ClaystoneGenerator *generator_handle, uint64_t *seed, uint64_t *draws);

// Runs recurrent layers.
//
// `results` has room for three handles, which are the caller's: the hidden states of the last layer at all steps, the hidden states that
// all layers end with, and LSTM's cell states likewise, null for others. `wanted` has a flag for the input, for `hx`, for LSTM's `cx`,
// and for each parameter: not 0 where its gradient will be asked for. Then `recording` is written a handle that is the caller's; null
// where `wanted` is null or all 0.
ClaystoneStatus claystone_recurrent(const ClaystoneRecurrent *layers,
                                    const uint8_t *wanted,
                                    ClaystoneTensor **results,
                                    ClaystoneRecording **recording);

// The gradients of the tensors of a recorded call, as often as one likes.
//
// `grad_outputs` has one gradient for each of the first results, of its shape, dtype and device; null for one that has none.
// `gradients` has room for a handle for each tensor, in the order of the flags that were given, which are the caller's: null where none was
// wanted or none flows. Each has a storage of its own. What the call was given must not have changed.
ClaystoneStatus claystone_recording_backward(const ClaystoneRecording *recording,
                                             const ClaystoneTensor *const *grad_outputs,
                                             size_t grad_output_count,
                                             ClaystoneTensor **gradients,
                                             size_t tensor_count);

// Gives a handle on a recording back, and what it kept. Null is none.
void claystone_recording_release(ClaystoneRecording *recording);

// The sentence of the latest call of this thread that failed; empty where none did. It is claystone's: valid until the next
// failing call of the thread, and nobody's to free. Successful calls leave it as it is.
const char *claystone_last_error(void);

// Makes a storage of `nbytes` bytes by the device's allocator, on the thread's current stream. What it holds is unspecified. The
// handle is the caller's.
ClaystoneStatus claystone_storage_new(int32_t device_number,
                                      size_t nbytes,
                                      ClaystoneStorage **storage);

// Makes a storage of `nbytes` bytes of the host's memory, on the CPU device, that a device transfers to and from at full speed, and says
// where they are: the caller may read and write them there as long as the storage lives, but not while a call or a copy uses them.
// For the CPU device, and where there is none left, it is ordinary memory. Bytes that were freed are kept for the next that are
// asked for, once copies that were enqueued are done with them. What it holds is unspecified. The handle is the caller's.
ClaystoneStatus claystone_storage_new_pinned(int32_t device_number,
                                             size_t nbytes,
                                             ClaystoneStorage **storage,
                                             void **data);

// Makes one more handle on a storage, which is the same pointer: it has to be released once more.
ClaystoneStatus claystone_storage_retain(const ClaystoneStorage *storage);

// Gives one handle on a storage back; null is none. To release a handle more often than it was given and retained is undefined
// behaviour.
void claystone_storage_release(ClaystoneStorage *storage);

// How often the handle would have to be released. Tensors on the storage do not count.
ClaystoneStatus claystone_storage_use_count(const ClaystoneStorage *storage, size_t *count);

// The size in bytes, as asked for.
ClaystoneStatus claystone_storage_nbytes(const ClaystoneStorage *storage, size_t *nbytes);

// The number of the device that the bytes are on.
ClaystoneStatus claystone_storage_device(const ClaystoneStorage *storage, int32_t *device_number);

// Whether two handles are on the same bytes. Handles that were given at different times may be different pointers on one storage.
ClaystoneStatus claystone_storage_is_same(const ClaystoneStorage *storage,
                                          const ClaystoneStorage *other,
                                          bool *same);

// Announces that work on `stream`, not the one the storage was made on, uses its bytes: they are not given to others before what
// was submitted to that stream until the release is done. PyTorch's `record_stream`.
ClaystoneStatus claystone_storage_record_stream(const ClaystoneStorage *storage,
                                                const ClaystoneStream *stream);

// Makes a stream of its own. When its last handle is released, what was submitted still runs.
ClaystoneStatus claystone_stream_new(int32_t device_number, ClaystoneStream **stream);

// `claystone_stream_new` with a hint for the driver: below 0 the stream's work is more urgent than that of others, above 0 less.
ClaystoneStatus claystone_stream_with_priority(int32_t device_number,
                                               int32_t priority,
                                               ClaystoneStream **stream);

// A handle on the stream every device has, which all threads use unless another one is set.
ClaystoneStatus claystone_stream_default(int32_t device_number, ClaystoneStream **stream);

// A handle on the stream that this thread's work on a device goes to.
ClaystoneStatus claystone_stream_current(int32_t device_number, ClaystoneStream **stream);

// Makes a stream the one that this thread's work on its device goes to from now on; the thread keeps it until another is set.
ClaystoneStatus claystone_stream_set_current(const ClaystoneStream *stream);

// Gives a handle on a stream back; null is none.
void claystone_stream_release(ClaystoneStream *stream);

// The number of a stream's device, and which of its streams it is: 0 is the default one. Numbers of streams that are gone are
// given again. Either pointer may be null.
ClaystoneStatus claystone_stream_id(const ClaystoneStream *stream,
                                    int32_t *device_number,
                                    int64_t *id);

// Waits until everything submitted to a stream so far is done. Reports what its kernels found wrong.
ClaystoneStatus claystone_stream_synchronize(const ClaystoneStream *stream);

// Whether everything submitted to a stream is done. Does not wait.
ClaystoneStatus claystone_stream_query(const ClaystoneStream *stream, bool *done);

// Holds back what is submitted to a stream from now on until what was submitted to another so far is done. The host waits only
// where they are of different devices.
ClaystoneStatus claystone_stream_wait_stream(const ClaystoneStream *stream,
                                             const ClaystoneStream *other);

// Makes an event that is done when everything submitted to a stream so far is.
ClaystoneStatus claystone_stream_record_event(const ClaystoneStream *stream, ClaystoneEvent **event);

// `claystone_stream_record_event` with an event that knows when it was done, for `claystone_event_elapsed_time`.
ClaystoneStatus claystone_stream_record_timed_event(const ClaystoneStream *stream, ClaystoneEvent **event);

// Holds back what is submitted to a stream from now on until an event is done. The host waits only where it is another device's.
ClaystoneStatus claystone_stream_wait_event(const ClaystoneStream *stream,
                                            const ClaystoneEvent *event);

// Whether everything before an event is done. Does not wait.
ClaystoneStatus claystone_event_query(const ClaystoneEvent *event, bool *done);

// Waits until everything before an event is done.
ClaystoneStatus claystone_event_synchronize(const ClaystoneEvent *event);

// The milliseconds from when one event was done to when another of the same device was, by the device's clock; below 0 where that
// was earlier. Both are those of `claystone_stream_record_timed_event`, and are waited for.
ClaystoneStatus claystone_event_elapsed_time(const ClaystoneEvent *start,
                                             const ClaystoneEvent *end,
                                             double *milliseconds);

// Gives a handle on an event back; null is none.
void claystone_event_release(ClaystoneEvent *event);

// Makes a tensor over a storage: `rank` sizes, as many strides, and an offset, all in elements. Strides may be zero or negative, as
// long as all elements lie in the storage, which has to be a whole number of elements: one that is to have several dtypes is best
// made of a multiple of 16 bytes. Of bools each byte has to be 0 or 1. The handle is the caller's; the tensor keeps the storage.
ClaystoneStatus claystone_tensor_new(const ClaystoneStorage *storage,
                                     int32_t dtype_number,
                                     const int64_t *sizes,
                                     const int64_t *strides,
                                     size_t rank,
                                     int64_t offset,
                                     ClaystoneTensor **tensor);

// Gives a handle on a tensor back; null is none. To release one twice is undefined behaviour.
void claystone_tensor_release(ClaystoneTensor *tensor);

// What a tensor is, its sizes and its strides. Any of the last pointers may be null. `sizes` and `strides` have room for `capacity`
// entries; where the rank is larger it is an error, and `info` says the rank all the same.
ClaystoneStatus claystone_tensor_info(const ClaystoneTensor *tensor,
                                      size_t capacity,
                                      ClaystoneTensorInfo *info,
                                      int64_t *sizes,
                                      int64_t *strides);

// Whether two tensors are on the same storage.
ClaystoneStatus claystone_tensor_shares_storage(const ClaystoneTensor *tensor,
                                                const ClaystoneTensor *other,
                                                bool *shares);

// A handle on the storage of a tensor, which is the caller's.
ClaystoneStatus claystone_tensor_storage(const ClaystoneTensor *tensor, ClaystoneStorage **storage);

// Copies the elements of `source` into a tensor of any strides, dtype and device: broadcast to its shape and converted to its dtype.
// PyTorch's `copy_`. Between devices it waits, and so does a copy from or to the CPU device.
ClaystoneStatus claystone_tensor_copy(const ClaystoneTensor *tensor,
                                      const ClaystoneTensor *source);

// `claystone_tensor_copy` that returns when it is enqueued on the thread's current stream, where one tensor is on a device, the other
// in memory pinned for it (`claystone_storage_new_pinned`), and both are contiguous and of one shape and dtype: PyTorch's
// `non_blocking=True`. Others wait as before. The program may touch the pinned bytes when the stream, or an event recorded on it, was
// waited for; the handles may be released at once. A failure is told by the stream's next wait.
ClaystoneStatus claystone_tensor_copy_non_blocking(const ClaystoneTensor *tensor,
                                                   const ClaystoneTensor *source);

// Sets the elements of a tensor, in row-major order, to those at `data`: `nbytes` bytes, which have to be just theirs. The host's
// memory may be reused when it returns.
ClaystoneStatus claystone_tensor_write(const ClaystoneTensor *tensor,
                                       const void *data,
                                       size_t nbytes);

// `claystone_tensor_write` that returns when it is enqueued on the thread's current stream, with a copy of the bytes: it does not wait
// for what the stream has to do before. For more than 16 MiB, and into a tensor that is not contiguous, it waits. A failure of
// the device is told by the stream's next wait.
ClaystoneStatus claystone_tensor_write_non_blocking(const ClaystoneTensor *tensor,
                                                    const void *data,
                                                    size_t nbytes);

// Copies the elements of a tensor, in row-major order, to `data`: `nbytes` bytes, which have to be just theirs. Waits for the device.
// Where it fails, the bytes at `data` are unspecified.
ClaystoneStatus claystone_tensor_read(const ClaystoneTensor *tensor,
                                      void *data,
                                      size_t nbytes);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

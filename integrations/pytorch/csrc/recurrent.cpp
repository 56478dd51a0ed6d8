// LSTM, GRU and Elman layers as one claystone call for all steps, with gradients from claystone's autograd graph. Calls that
// claystone refuses run as PyTorch's own composite, step by step.
#include "annotate.h"
#include "evaluate.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>

namespace claystone_torch {
namespace {

using Tensors = std::vector<at::Tensor>;

// The arguments of an operator except its tensors, which are kept in one list: the input, the states, the parameters.
struct Layers final : torch::CustomClassHolder {
    explicit Layers(c10::OperatorHandle op) : op(std::move(op)) {}

    c10::OperatorHandle op;
    ClaystoneCell cell = CLAYSTONE_CELL_LSTM;
    at::Tensor batch_sizes; // of packed sequences, in host memory
    bool bias = false;
    int64_t layers = 0;
    double dropout = 0;
    bool train = false, bidirectional = false, batch_first = false;

    size_t states() const { return cell == CLAYSTONE_CELL_LSTM ? 2 : 1; }
    int64_t directions() const { return bidirectional ? 2 : 1; }

    // The operator's arguments as a stack.
    torch::jit::Stack stack(const Tensors& tensors) const {
        const auto first = tensors.begin() + 1, end_of_states = first + states();
        torch::jit::Stack stack{tensors[0]};
        if (batch_sizes.defined()) {
            stack.emplace_back(batch_sizes);
        }
        stack.push_back(states() == 2 ? c10::IValue(Tensors(first, end_of_states)) : c10::IValue(*first));
        torch::jit::push(stack, Tensors(end_of_states, tensors.end()), bias, layers, dropout, train, bidirectional);
        if (!batch_sizes.defined()) {
            stack.emplace_back(batch_first);
        }
        return stack;
    }
};
using Call = c10::intrusive_ptr<Layers>;

ClaystoneCell cell_of(const std::string& name) {
    return name == "aten::lstm" ? CLAYSTONE_CELL_LSTM
        : name == "aten::gru"   ? CLAYSTONE_CELL_GRU
        : name == "aten::rnn_tanh" ? CLAYSTONE_CELL_RNN_TANH
                                   : CLAYSTONE_CELL_RNN_RELU;
}

std::pair<Call, Tensors> read(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
    auto call = c10::make_intrusive<Layers>(op);
    call->cell = cell_of(op.schema().name());
    auto at = stack.end() - op.schema().arguments().size();
    Tensors tensors{(at++)->toTensor()};
    const bool packed = op.schema().overload_name() == "data";
    if (packed) {
        call->batch_sizes = (at++)->toTensor();
    }
    for (int list = 0; list < 2; list++, at++) {
        const auto given = at->isTensor() ? Tensors{at->toTensor()} : at->toTensorVector();
        if (list == 0 && given.size() != call->states()) {
            throw Refused("there are too few or too many states");
        }
        tensors.insert(tensors.end(), given.begin(), given.end());
    }
    call->bias = (at++)->toBool();
    call->layers = (at++)->toInt();
    call->dropout = (at++)->toDouble();
    call->train = (at++)->toBool();
    call->bidirectional = (at++)->toBool();
    call->batch_first = !packed && at->toBool();
    return {call, tensors};
}

// Refuses calls for PyTorch's composite: invalid arguments, and tensors that are not plain floats of one dtype on one device.
void check_plain(const Layers& call, const Tensors& tensors) {
    constexpr c10::DispatchKeySet wrapped{c10::DispatchKey::Python, c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::FuncTorchBatched};
    for (const at::Tensor& tensor : tensors) {
        if (!is_ours(tensor) || tensor.key_set().has_any(wrapped) || tensor._fw_grad(0).defined() || !tensor.is_floating_point() ||
            !claystone_dtype(tensor.scalar_type()) || tensor.device() != tensors[0].device() || tensor.scalar_type() != tensors[0].scalar_type()) {
            throw Refused("the tensors are not floats of one dtype on one device");
        }
    }
    const bool packed = call.batch_sizes.defined();
    const int64_t parameters = tensors.size() - 1 - call.states();
    if (tensors[0].numel() == 0 || tensors[0].dim() != (packed ? 2 : 3) || tensors[1].dim() != 3 || tensors[call.states()].dim() != 3 ||
        call.layers < 1 || parameters % call.layers != 0 || tensors[1].size(0) != call.layers * call.directions() ||
        (packed && !(call.batch_sizes.is_cpu() && call.batch_sizes.scalar_type() == at::kLong && call.batch_sizes.is_contiguous()))) {
        throw Refused("the shapes do not match");
    }
}

void release_recording(void* recording) { claystone_recording_release(static_cast<ClaystoneRecording*>(recording)); }

// Wraps the recording as the memory of a CPU tensor. Nothing reads that memory.
at::Tensor as_tensor(ClaystoneRecording* recording) {
    c10::DataPtr memory(recording, recording, &release_recording, c10::DeviceType::CPU);
    const c10::Storage storage(c10::Storage::use_byte_size_t(), 1, std::move(memory));
    return at::empty({0}, at::kByte).set_(storage, 0, {1});
}

// Unwraps the recording; null if a saved-tensor hook has replaced the tensor by a copy.
const ClaystoneRecording* recording_of(const at::Tensor& tensor) {
    const auto& memory = tensor.storage().data_ptr();
    return memory.get_deleter() == &release_recording ? static_cast<const ClaystoneRecording*>(memory.get()) : nullptr;
}

// Runs the layers. `recording` receives the recording from which their gradients are computed.
Tensors compute(const Layers& call, at::TensorList tensors, ClaystoneRecording** recording) {
    const c10::DeviceGuard guard(tensors[0].device());
    std::vector<TensorHandle> handles;
    std::vector<const ClaystoneTensor*> parameters;
    std::vector<uint8_t> wanted;
    for (size_t i = 0; i < tensors.size(); i++) {
        handles.push_back(handle(tensors[i]));
        wanted.push_back(tensors[i].requires_grad());
        if (i > call.states()) {
            parameters.push_back(handles.back().get());
        }
    }
    const auto& hidden = tensors[1];
    ClaystoneRecurrent given{};
    given.cell = call.cell;
    given.num_layers = call.layers;
    given.bidirectional = call.bidirectional;
    given.bias = call.bias;
    given.batch_first = call.batch_first;
    given.input = handles[0].get();
    given.hx = handles[1].get();
    if (call.cell == CLAYSTONE_CELL_LSTM) {
        given.cx = handles[2].get();
        given.proj_size = hidden.size(2) == tensors[2].size(2) ? 0 : hidden.size(2);
    }
    if (call.batch_sizes.defined()) {
        given.batch_sizes = call.batch_sizes.const_data_ptr<int64_t>();
        given.batch_size_count = call.batch_sizes.numel();
    }
    given.parameters = {parameters.data(), parameters.size()};
    ClaystoneTensor* results[3];
    with_annotation(call.op.schema().name(), [&] {
        check_call(claystone_recurrent(&given, recording ? wanted.data() : nullptr, results, recording));
    });
    Tensors made;
    for (size_t i = 0; i < 1 + call.states(); i++) {
        made.push_back(wrap(own(results[i])));
    }
    return made;
}

// Computes the gradients with PyTorch's composite, as part of PyTorch's autograd graph.
Tensors recorded_gradients(const Layers& call, const Tensors& tensors, const Tensors& gradients) {
    // Differentiates with respect to views of the tensors: one tensor may be computed from another, and that path belongs to the outer graph.
    Tensors views;
    for (const at::Tensor& tensor : tensors) {
        views.push_back(tensor.requires_grad() ? tensor.view_as(tensor) : tensor);
    }
    auto stack = call.stack(views);
    call.op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, stack);
    Tensors results, given, inputs;
    for (size_t i = 0; i < gradients.size(); i++) {
        if (gradients[i].defined()) {
            results.push_back(stack[i].toTensor());
            given.push_back(gradients[i]);
        }
    }
    std::copy_if(views.begin(), views.end(), std::back_inserter(inputs), [](const at::Tensor& t) { return t.requires_grad(); });
    const auto found = torch::autograd::grad(results, inputs, given, /*retain_graph=*/true, /*create_graph=*/true, /*allow_unused=*/true);
    Tensors all(tensors.size());
    size_t next = 0;
    for (size_t i = 0; i < tensors.size(); i++) {
        if (tensors[i].requires_grad()) {
            all[i] = found[next++];
        }
    }
    return all;
}

struct RecurrentFunction : torch::autograd::Function<RecurrentFunction> {
    static Tensors forward(torch::autograd::AutogradContext* context, at::TensorList tensors, const Call& call) {
        ClaystoneRecording* recording = nullptr;
        const auto results = compute(*call, tensors, &recording);
        // PyTorch frees only saved tensors once backward is done, so the recording is saved as the memory of a tensor.
        Tensors saved = tensors.vec();
        saved.push_back(as_tensor(recording));
        context->save_for_backward(std::move(saved));
        context->saved_data["call"] = c10::IValue::make_capsule(call);
        context->set_materialize_grads(false);
        return results;
    }

    static Tensors backward(torch::autograd::AutogradContext* context, const Tensors& gradients) {
        auto tensors = context->get_saved_variables();
        const at::Tensor last = tensors.back();
        const ClaystoneRecording* recording = recording_of(last);
        tensors.pop_back();
        const auto call = c10::static_intrusive_pointer_cast<Layers>(context->saved_data["call"].toCapsule());
        Tensors found;
        if (at::GradMode::is_enabled()) {
            found = recorded_gradients(*call, tensors, gradients);
        } else if (!recording) {
            const at::AutoGradMode enabled(true);
            for (const at::Tensor& gradient : recorded_gradients(*call, tensors, gradients)) {
                found.push_back(gradient.defined() ? gradient.detach() : gradient);
            }
        } else {
            const c10::DeviceGuard guard(tensors[0].device());
            std::vector<TensorHandle> handles;
            std::vector<const ClaystoneTensor*> given;
            for (const at::Tensor& gradient : gradients) {
                handles.push_back(gradient.defined() ? handle(gradient) : TensorHandle());
                given.push_back(handles.back().get());
            }
            std::vector<ClaystoneTensor*> made(tensors.size());
            with_annotation(call->op.schema().name(), [&] {
                check(claystone_recording_backward(recording, given.data(), given.size(), made.data(), made.size()));
            });
            for (ClaystoneTensor* gradient : made) {
                found.push_back(gradient ? wrap(own(gradient)) : at::Tensor());
            }
        }
        found.emplace_back(); // `call` has no gradient
        return found;
    }
};

Tensors run_layers(const Call& call, const Tensors& tensors) {
    const bool recorded = at::GradMode::is_enabled() && std::any_of(tensors.begin(), tensors.end(), [](const auto& t) { return t.requires_grad(); });
    return recorded ? RecurrentFunction::apply(at::TensorList(tensors), call) : compute(*call, tensors, nullptr);
}

// Runs one layer after another, with PyTorch's dropout between them.
Tensors run_with_dropout(const Call& call, const Tensors& tensors) {
    const size_t states = call->states(), each = (tensors.size() - 1 - states) / call->layers;
    auto layer = c10::make_intrusive<Layers>(*call);
    layer->layers = 1;
    at::Tensor below = tensors[0];
    std::vector<Tensors> last(states);
    for (int64_t l = 0; l < call->layers; l++) {
        Tensors own{l == 0 ? below : at::dropout(below, call->dropout, true)};
        for (size_t s = 0; s < states; s++) {
            own.push_back(tensors[1 + s].narrow(0, l * call->directions(), call->directions()));
        }
        const auto first = tensors.begin() + 1 + states + l * each;
        own.insert(own.end(), first, first + each);
        const auto results = run_layers(layer, own);
        below = results[0];
        for (size_t s = 0; s < states; s++) {
            last[s].push_back(results[1 + s]);
        }
    }
    Tensors results{below};
    for (const Tensors& state : last) {
        results.push_back(at::cat(state, 0));
    }
    return results;
}

void recurrent(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    try {
        if (c10::impl::TorchDispatchModeTLS::any_modes_set(/*skip_infra_modes=*/true)) {
            throw Refused("a dispatch mode, such as the capture of a graph on the CPU, sees the operators of single steps");
        }
        const auto [call, tensors] = read(op, *stack);
        check_plain(*call, tensors);
        const bool drops = call->train && call->dropout > 0 && call->layers > 1;
        const auto results = drops ? run_with_dropout(call, tensors) : run_layers(call, tensors);
        torch::jit::drop(*stack, op.schema().arguments().size());
        stack->insert(stack->end(), results.begin(), results.end());
    } catch (const Refused&) {
        op.callBoxedForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd, *stack);
    }
}

void add_to(torch::Library& library) {
    for (const char* name : {"lstm", "gru", "rnn_tanh", "rnn_relu"}) {
        for (const char* overload : {".input", ".data"}) {
            library.impl((std::string(name) + overload).c_str(), torch::CppFunction::makeFromBoxedFunction<&recurrent>());
        }
    }
}

// These kernels record their own gradients. If autograd is off altogether, as in inference mode, calls arrive at the PrivateUse1 key.
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) {
    add_to(library);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    add_to(library);
}

} // namespace
} // namespace claystone_torch

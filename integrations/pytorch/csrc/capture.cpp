#include "capture.h"
#include "streams.h"

#include <ATen/ops/empty_strided.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstring>

namespace claystone_torch {
namespace {

// Arguments of more bytes than this are copied only if at least as many bytes stay where they are.
constexpr size_t CHEAP_COPY_BYTES = 16 << 20;

// The value of a tensor of the host with one element.
std::array<char, 16> value_of(const at::Tensor& tensor) {
    std::array<char, 16> value{};
    std::memcpy(value.data(), tensor.const_data_ptr(), tensor.itemsize());
    return value;
}

std::atomic<uint64_t> replayed = 0;

} // namespace

uint64_t replay_count() {
    return replayed;
}

Capture::Place::Place(const at::Tensor& tensor)
    : owner(tensor.storage().getWeakStorageImpl()), is_ours(claystone_torch::is_ours(tensor)), sizes(tensor.sizes().vec()),
      strides(tensor.strides().vec()), offset(tensor.storage_offset()) {
    if (!is_ours) {
        value = value_of(tensor);
    }
}

bool Capture::Place::is_same_memory(const at::Tensor& tensor) const {
    if (!claystone_torch::is_ours(tensor)) {
        return !is_ours && value == value_of(tensor);
    }
    return storage == graph_memory(tensor).storage && offset == tensor.storage_offset();
}

bool Capture::Place::is_same_layout(const at::Tensor& tensor) const {
    return tensor.sizes() == sizes && tensor.strides() == strides;
}

bool Capture::takes(const Values& inputs) const {
    const auto is_taken = [](const c10::IValue& input) {
        return input.isTensor() && (is_ours(input.toTensor()) || (input.toTensor().is_cpu() && input.toTensor().numel() == 1));
    };
    return std::all_of(inputs.begin(), inputs.end(), is_taken) &&
        std::all_of(written.begin(), written.end(), [&](size_t i) { return is_ours(inputs[i].toTensor()); });
}

void Capture::remember(const Values& inputs) {
    last.clear();
    for (const auto& input : inputs) {
        last.emplace_back(input.toTensor());
    }
}

bool Capture::fits(const Values& inputs) {
    if (current_stream(stream->device_index()) != *stream) {
        return false;
    }
    const size_t moved_before = moving.size();
    bool is_alike = true;
    for (size_t i = 0; i < inputs.size(); i++) {
        const at::Tensor& tensor = inputs[i].toTensor();
        is_alike = is_alike && last[i].is_same_layout(tensor);
        if (!moving.count(i) && !last[i].is_same_memory(tensor)) {
            moving.insert(i);
        }
    }
    if (moving.size() > moved_before) {
        clear();
        last.clear(); // this call counts as the first
        return false;
    }
    return is_alike;
}

Values Capture::run(Values inputs, const Execute& execute) {
    if (!is_capturing() && takes(inputs)) {
        const std::unique_lock lock(mutex, std::try_to_lock);
        if (lock && graph && fits(inputs)) {
            return replay(inputs);
        }
        if (lock && !graph && captures_left > 0) {
            if (last.empty()) {
                remember(inputs);
            } else if (capture(inputs, execute)) {
                return replay(inputs);
            }
        }
    }
    return execute(std::move(inputs)); // without the lock, because a Python function may call the graph again
}

bool Capture::capture(const Values& inputs, const Execute& execute) {
    captures_left--;
    size_t copied = 0, kept = 0;
    for (size_t i = 0; i < inputs.size(); i++) {
        const at::Tensor& tensor = inputs[i].toTensor();
        if (is_ours(tensor) && last[i].owner != tensor.storage().getWeakStorageImpl() && !graph_memory(tensor).is_captured) {
            moving.insert(i);
        }
        (moving.count(i) ? copied : kept) += tensor.nbytes();
    }
    remember(inputs);
    const auto can_move = [&](size_t i) { return last[i].is_ours && std::count(written.begin(), written.end(), i) == 0; };
    if (copied > std::max(kept, CHEAP_COPY_BYTES) || !std::all_of(moving.begin(), moving.end(), can_move)) {
        return false;
    }
    auto given = inputs;
    buffers.assign(inputs.size(), {});
    for (const size_t i : moving) {
        const at::Tensor& tensor = inputs[i].toTensor();
        buffers[i] = at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options());
        buffers[i].copy_(tensor);
        given[i] = buffers[i];
    }
    stream = current_stream(current_device());
    graph = std::make_unique<Graph>();
    try {
        graph->capture_begin(std::nullopt);
        const auto values = execute(given);
        graph->capture_end();
        for (size_t i = 0; i < given.size(); i++) {
            if (last[i].is_ours && !moving.count(i)) {
                last[i].storage = graph_memory(given[i].toTensor()).storage;
            }
        }
        for (const auto& value : values) {
            results.push_back(described(value, given));
        }
    } catch (const std::exception&) {
        // The graph needs the host between its commands, or there is too little memory for a pool. Nothing has run.
        if (is_capturing()) {
            graph->capture_abandon();
        }
        clear();
        captures_left = 0;
    }
    return graph != nullptr;
}

Capture::Result Capture::described(const c10::IValue& value, const Values& inputs) {
    if (!value.isTensor() || !is_ours(value.toTensor()) || value.toTensor().numel() == 0) {
        // Numbers, tensors of the host that stand for values without readers, and tensors without elements are the same in each replay.
        return Result{Result::Value, value};
    }
    const at::Tensor& tensor = value.toTensor();
    Result result{Result::OfGraph, {}, 0, tensor.scalar_type(), tensor.sizes().vec(), tensor.strides().vec(), tensor.storage_offset()};
    for (size_t i = 0; i < inputs.size(); i++) {
        const at::Tensor& input = inputs[i].toTensor();
        if (tensor.is_same(input)) {
            return Result{Result::Input, {}, i};
        }
        if (is_ours(input) && tensor.is_alias_of(input)) {
            result.kind = Result::OfInput;
            result.index = i;
            result.offset -= input.storage_offset();
            return result;
        }
    }
    const auto user = tensor.storage().getWeakStorageImpl();
    result.index = std::find(users.begin(), users.end(), user) - users.begin();
    if (result.index == users.size()) {
        memory.push_back(graph_memory(tensor));
        users.push_back(user);
    }
    TORCH_CHECK(memory[result.index].is_captured, "a result of the graph has no memory of the graph");
    return result;
}

Values Capture::replay(const Values& inputs) {
    for (size_t i = 0; i < users.size(); i++) {
        if (const auto storage = users[i].lock()) {
            leave_graph(*storage, memory[i]);
        }
    }
    for (const size_t i : moving) {
        buffers[i].copy_(inputs[i].toTensor());
    }
    graph->replay();
    replayed++;
    std::vector<c10::Storage> storages;
    for (size_t i = 0; i < memory.size(); i++) {
        storages.push_back(storage_of_graph(memory[i]));
        users[i] = storages.back().getWeakStorageImpl();
    }
    Values values;
    for (const Result& result : results) {
        switch (result.kind) {
            case Result::Value: values.push_back(result.value); break;
            case Result::Input: values.push_back(inputs[result.index]); break;
            case Result::OfInput:
                values.push_back(tensor_of(
                    inputs[result.index].toTensor().storage(), result.dtype, result.sizes, result.strides,
                    inputs[result.index].toTensor().storage_offset() + result.offset));
                break;
            case Result::OfGraph:
                values.push_back(tensor_of(storages[result.index], result.dtype, result.sizes, result.strides, result.offset));
                break;
        }
    }
    return values;
}

void Capture::clear() {
    graph.reset();
    buffers.clear();
    memory.clear();
    users.clear();
    results.clear();
}

} // namespace claystone_torch

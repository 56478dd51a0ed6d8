// Calls that run on PyTorch's CPU instead.
#include "fallback.h"
#include "copy.h"
#include "storage.h"

#include <ATen/MemoryOverlap.h>
#include <ATen/native/CPUFallback.h>

#include <algorithm>
#include <mutex>

namespace claystone_torch {
namespace {

std::mutex mutex; // guards `counts`
std::map<std::string, Fallback> counts;
std::map<std::string, std::string> host_operators; // reasons by name without overload; written during import only

// Whether the call writes in place into a tensor whose elements share memory, as in `x.expand(3).fill_(1)`.
bool writes_overlapping(const c10::OperatorHandle& handle, const torch::jit::Stack& stack) {
    const auto& arguments = handle.schema().arguments();
    if (arguments.empty() || arguments[0].is_out() || !arguments[0].alias_info() || !arguments[0].alias_info()->isWrite()) {
        return false;
    }
    const auto& written = stack[stack.size() - arguments.size()];
    return written.isTensor() && is_ours(written.toTensor()) && at::has_internal_overlap(written.toTensor()) == at::MemOverlap::Yes;
}

// Calls the CPU kernel with a host tensor whose elements share memory in the same way: the kernel decides whether to raise an error,
// and which write wins.
void call_overlapping(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
    const size_t base = stack->size() - handle.schema().arguments().size();
    const at::Tensor target = (*stack)[base].toTensor();
    for (size_t i = base; i < stack->size(); i++) {
        c10::IValue& argument = (*stack)[i];
        if (argument.isTensor()) {
            argument = to_host(argument.toTensor());
        } else if (argument.isTensorList()) {
            auto tensors = argument.toTensorVector();
            std::transform(tensors.begin(), tensors.end(), tensors.begin(), to_host);
            argument = tensors;
        } else if (argument.isList()) { // a list of optional tensors
            c10::List<std::optional<at::Tensor>> tensors;
            for (const c10::IValue& one : argument.toListRef()) {
                if (!one.isTensor() && !one.isNone()) {
                    break;
                }
                tensors.push_back(one.isNone() ? std::nullopt : std::optional(to_host(one.toTensor())));
            }
            if (!tensors.empty() && tensors.size() == argument.toListRef().size()) {
                argument = tensors;
            }
        }
    }
    const at::Tensor host = (*stack)[base].toTensor();
    handle.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    write_alike(target, host);
    if (!stack->empty() && stack->back().isTensor()) {
        stack->back() = target;
    }
}

} // namespace

std::string name_of(const c10::OperatorHandle& handle) {
    const auto& name = handle.operator_name();
    const std::string short_name = name.name.starts_with("aten::") ? name.name.substr(6) : name.name;
    return name.overload_name.empty() ? short_name : short_name + "." + name.overload_name;
}

void add_host_operators(const std::vector<std::string>& names, const std::string& reason) {
    for (const auto& name : names) {
        host_operators[name] = reason;
    }
}

void fall_back(const c10::OperatorHandle& handle, torch::jit::Stack* stack, const std::string& reason) {
    const std::string name = name_of(handle);
    const auto host = host_operators.find(name.substr(0, name.find('.')));
    bool first;
    {
        std::lock_guard lock(mutex);
        Fallback& fallback = counts[name];
        first = fallback.count++ == 0;
        fallback.reason = host == host_operators.end() ? reason : "it has no row: " + host->second;
    }
    if (first && host == host_operators.end()) {
        TORCH_WARN("claystone: ", name, " runs on the CPU: ", reason);
    }
    if (writes_overlapping(handle, *stack)) {
        return call_overlapping(handle, stack);
    }
    // PyTorch's two convolution operators for other devices are its CPU operators under other names; the backward one also takes bias sizes.
    auto& dispatcher = c10::Dispatcher::singleton();
    if (name == "convolution_overrideable") {
        return at::native::cpu_fallback(dispatcher.findSchemaOrThrow("aten::convolution", ""), stack);
    }
    if (name == "convolution_backward_overrideable") {
        stack->insert(stack->end() - 7, c10::IValue()); // the bias sizes, before the stride
        return at::native::cpu_fallback(dispatcher.findSchemaOrThrow("aten::convolution_backward", ""), stack);
    }
    at::native::cpu_fallback(handle, stack);
}

std::map<std::string, Fallback> fallbacks() {
    std::lock_guard lock(mutex);
    return counts;
}

void reset_fallbacks() {
    std::lock_guard lock(mutex);
    counts.clear();
}

} // namespace claystone_torch

// PyTorch's `_foreach_` operators: one operation on every tensor of a list. Tensors of one shape share launches.
#include "foreach.h"

#include <ATen/ops/empty_like.h>

namespace claystone_torch {
namespace {

// Whether claystone can compute with the tensor: a float tensor of this device that is not a negated view.
bool is_plain(const at::Tensor& tensor) {
    return is_ours(tensor) && tensor.is_floating_point() && claystone_dtype(tensor.scalar_type()) && !tensor.is_neg();
}

bool can_share_launches(const std::vector<std::vector<at::Tensor>>& lists) {
    const auto& first = lists[0];
    if (first.empty() || !is_plain(first[0])) {
        return false;
    }
    for (const auto& list : lists) {
        for (size_t i = 0; i < list.size(); i++) {
            const bool for_all = list.size() == 1 && list[0].numel() == 1;
            const bool alike = list.size() == first.size() && list[i].sizes() == first[i].sizes() && list[i].dtype() == first[0].dtype();
            if (!is_plain(list[i]) || list[i].device() != first[0].device() || !(alike || for_all)) {
                return false;
            }
        }
    }
    return true;
}

Value number_of(const c10::IValue& argument) {
    if (argument.isTensor() || argument.isTensorList()) {
        return {};
    }
    const Value value = value_of(argument);
    const auto* several = value.as<Values>();
    // PyTorch passes one number per tensor; they are usually all equal.
    if (several && !several->empty()) {
        for (const Value& one : *several) {
            if (!one.is_number() || one.number() != several->front().number()) {
                return {};
            }
        }
        return several->front();
    }
    const auto* numbers = value.as<std::vector<double>>();
    if (numbers && !numbers->empty() && std::equal(numbers->begin() + 1, numbers->end(), numbers->begin())) {
        return numbers->front();
    }
    return value;
}

} // namespace

ClaystoneTensors TensorLists::add(const std::vector<at::Tensor>& tensors) {
    auto list = std::make_unique<std::vector<const ClaystoneTensor*>>();
    for (const at::Tensor& tensor : tensors) {
        held.push_back(handle(tensor));
        list->push_back(held.back().get());
    }
    lists.push_back(std::move(list));
    return {lists.back()->data(), lists.back()->size()};
}

Scope scope_of_lists(const std::vector<c10::IValue>& arguments) {
    Scope scope;
    for (const auto& argument : arguments) {
        scope.values.push_back(number_of(argument));
    }
    return scope;
}

std::optional<std::vector<at::Tensor>> foreach(
    const Node& operation, Scope& scope, const std::vector<c10::IValue>& arguments, std::vector<at::Tensor> out) {
    std::vector<std::vector<at::Tensor>> tensors;
    std::vector<double> numbers;
    for (size_t i = 0; i < operation.children.size(); i++) {
        const Node* child = operation.children[i].get();
        if (!(*operation.parameters)[i].is_tensor) {
            const Value value = child ? evaluate(*child, scope) : Value();
            if (!value.is_number()) {
                return std::nullopt;
            }
            numbers.push_back(value.number());
        } else if (child && child->kind == Node::Variable && child->slot < arguments.size()) {
            const auto& argument = arguments[child->slot];
            tensors.push_back(argument.isTensor() ? std::vector{argument.toTensor()} : argument.toTensorVector());
        }
    }
    if (!can_share_launches(tensors)) {
        return std::nullopt;
    }
    if (out.empty()) {
        for (const at::Tensor& tensor : tensors[0]) {
            out.push_back(at::empty_like(tensor));
        }
    } else if (!can_share_launches({tensors[0], out})) {
        return std::nullopt;
    }
    TensorLists lists;
    std::vector<ClaystoneTensors> given;
    for (const auto& list : tensors) {
        given.push_back(lists.add(list));
    }
    check(claystone_foreach(operation.text.c_str(), given.data(), given.size(), numbers.data(), numbers.size(), lists.add(out)));
    return out;
}

} // namespace claystone_torch

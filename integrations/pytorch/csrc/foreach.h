// Operators on lists of tensors, which share launches.
#pragma once

#include "evaluate.h"

#include <ATen/core/Tensor.h>

namespace claystone_torch {

// Converts lists of tensors to the C API's form, and keeps the handles alive.
class TensorLists {
public:
    // The result is valid while this object lives.
    ClaystoneTensors add(const std::vector<at::Tensor>& tensors);

private:
    std::vector<TensorHandle> held;
    std::vector<std::unique_ptr<std::vector<const ClaystoneTensor*>>> lists;
};

// The scope of an operator on lists: its numeric arguments, where a list of equal numbers counts as one number.
Scope scope_of_lists(const std::vector<c10::IValue>& arguments);
// Runs a claystone operation on every tensor of the lists among the arguments. Returns the written tensors: `out`, or new tensors if
// `out` is empty. Returns nothing if the tensors cannot share launches.
std::optional<std::vector<at::Tensor>> foreach(
    const Node& operation, Scope& scope, const std::vector<c10::IValue>& arguments, std::vector<at::Tensor> out);

} // namespace claystone_torch

// Operators on lists of tensors, which share launches.
#pragma once

#include "evaluate.h"

#include <ATen/core/Tensor.h>

namespace claystone_torch {

// A list of tensors as the C API takes it.
class TensorLists {
public:
    // Good as long as this is.
    ClaystoneTensors add(const std::vector<at::Tensor>& tensors);

private:
    std::vector<TensorHandle> held;
    std::vector<std::unique_ptr<std::vector<const ClaystoneTensor*>>> lists;
};

// The scope of an operator whose arguments are lists of tensors: of the arguments that are numbers, and numbers alike.
Scope scope_of_lists(const std::vector<c10::IValue>& arguments);
// Runs an operation of claystone for each tensor of lists that are among the arguments. Gives what was written: `out`, or new
// tensors where that is empty; nothing where the tensors are none that can share launches.
std::optional<std::vector<at::Tensor>> foreach(
    const Node& operation, Scope& scope, const std::vector<c10::IValue>& arguments, std::vector<at::Tensor> out);

} // namespace claystone_torch

// The functions and infix operators that programs can use besides claystone's operations.
#pragma once

#include "evaluate.h"

namespace claystone_torch {

// Returns the function of this name. Throws if there is none.
Function find_function(const std::string& name);
Value infix(const Node& node, Scope& scope);
// Makes a zero-dimensional tensor of a number.
TensorHandle tensor_of(const Value& value, const Scope& scope);
// The indices of a mask's true elements, one row per element; and one column of such a matrix.
TensorHandle nonzero(const TensorHandle& mask);
TensorHandle column(const TensorHandle& matrix, size_t index);
TensorHandle reshaped(const TensorHandle& tensor, const std::vector<int64_t>& sizes);
TensorHandle contiguous(const TensorHandle& tensor);
TensorHandle cloned(const TensorHandle& tensor);
TensorHandle converted(const TensorHandle& tensor, ClaystoneDtype dtype);

} // namespace claystone_torch

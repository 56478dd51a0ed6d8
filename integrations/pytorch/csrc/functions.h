// What programs can say besides operations of claystone.
#pragma once

#include "evaluate.h"

namespace claystone_torch {

// The function of this name. It throws where there is none.
Function find_function(const std::string& name);
Value infix(const Node& node, Scope& scope);
// A tensor without dimensions of a number.
TensorHandle tensor_of(const Value& value, const Scope& scope);
// The positions where a mask is true, a row each, and a column of them.
TensorHandle nonzero(const TensorHandle& mask);
TensorHandle column(const TensorHandle& matrix, size_t index);
TensorHandle reshaped(const TensorHandle& tensor, const std::vector<int64_t>& sizes);
TensorHandle contiguous(const TensorHandle& tensor);
TensorHandle cloned(const TensorHandle& tensor);
TensorHandle converted(const TensorHandle& tensor, ClaystoneDtype dtype);

} // namespace claystone_torch

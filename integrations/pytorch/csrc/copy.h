// Copies between the host and the device.
#pragma once

#include <ATen/core/Tensor.h>

namespace claystone_torch {

// The elements of a tensor in the host's memory.
at::Tensor to_host(const at::Tensor& tensor);
// Sets the elements of `target` to those of `source`, of the same shape, converted to its dtype. At least one is on the device.
void copy(const at::Tensor& source, const at::Tensor& target);

} // namespace claystone_torch

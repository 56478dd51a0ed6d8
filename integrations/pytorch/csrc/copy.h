// Copies between the host and the device.
#pragma once

#include <ATen/core/Tensor.h>

namespace claystone_torch {

// The elements of a tensor in the host's memory.
at::Tensor to_host(const at::Tensor& tensor);
// Sets the bytes from the first element to the last one of a tensor of the device to those of one of the host with the same strides.
void write_alike(const at::Tensor& target, const at::Tensor& host, bool non_blocking = false);
// Sets the elements of `target` to those of `source`, of the same shape, converted to its dtype. At least one is on the device. With
// `non_blocking` copies to the device, and those to pinned memory, return when they are enqueued on the current stream.
void copy(const at::Tensor& source, const at::Tensor& target, bool non_blocking = false);

} // namespace claystone_torch

// Copies between the host and the device.
#pragma once

#include <ATen/core/Tensor.h>

namespace claystone_torch {

// Copies a tensor to host memory; a tensor that is not on the device is returned unchanged.
at::Tensor to_host(const at::Tensor& tensor);
// Overwrites all bytes from a device tensor's first element to its last with those of a host tensor of the same strides.
void write_alike(const at::Tensor& target, const at::Tensor& host, bool non_blocking = false);
// Copies `source` to `target`, which has the same shape, and converts to its dtype. At least one of them is on the device. With
// `non_blocking`, copies to the device and to pinned memory return once they are enqueued on the current stream.
void copy(const at::Tensor& source, const at::Tensor& target, bool non_blocking = false);

} // namespace claystone_torch

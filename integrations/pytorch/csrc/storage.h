// Storages: what stands behind the data pointers that PyTorch sees, and tensors of both sides made of each other.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/ScalarType.h>
#include <c10/util/SmallVector.h>
#include <claystone.h>

#include <memory>
#include <optional>
#include <string>

namespace claystone_torch {

// Throws what PyTorch's users expect of a failure: torch.OutOfMemoryError, IndexError or RuntimeError, with claystone's sentence.
void check(ClaystoneStatus status);

// What the C API gives by address, released at the end.
struct ReleaseTensor {
    void operator()(ClaystoneTensor* tensor) const { claystone_tensor_release(tensor); }
};
struct ReleaseStorage {
    void operator()(ClaystoneStorage* storage) const { claystone_storage_release(storage); }
};
using TensorHandle = std::shared_ptr<ClaystoneTensor>;
using StorageHandle = std::shared_ptr<ClaystoneStorage>;
TensorHandle own(ClaystoneTensor* tensor);

// claystone's number of a device of PyTorch's, and how many there are.
int claystone_device(c10::DeviceIndex index);
c10::DeviceIndex device_count();
c10::DeviceIndex current_device();
// Whether this process was forked off the one that loaded this library. The threads of OpenCL's driver are not in it: nothing may be
// asked of the devices, and tensors that it was born with are not released.
bool is_forked();

std::optional<ClaystoneDtype> claystone_dtype(at::ScalarType dtype);
at::ScalarType torch_dtype(int dtype);

// The allocator that tensors of this device are made by.
c10::Allocator* allocator();

// Whether it is a tensor whose elements claystone holds.
bool is_ours(const at::TensorBase& tensor);

// A handle on the same elements. The dtype has to be one that claystone has.
TensorHandle handle(const at::TensorBase& tensor);
// The bytes of a tensor's storage from `offset` on as a tensor of u8.
TensorHandle bytes(const at::TensorBase& tensor, size_t offset, size_t length);
// Puts the storage of `result` in the place of that of `target`, if the latter is all of its storage and lies as the result does.
bool adopt(const at::TensorBase& target, const TensorHandle& result);

struct Info {
    ClaystoneTensorInfo tensor;
    c10::SmallVector<int64_t, 5> sizes, strides;
    bool is_contiguous() const;
};
Info info(const TensorHandle& tensor);
// A tensor for PyTorch of what claystone computed; with what `info` says of it, where that is known already.
at::Tensor wrap(const TensorHandle& tensor);
at::Tensor wrap(const TensorHandle& tensor, const Info& known);
bool share_storage(const TensorHandle& a, const TensorHandle& b);

std::string take(ClaystoneBytes bytes);

} // namespace claystone_torch

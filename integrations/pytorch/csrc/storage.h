// Storages behind PyTorch's data pointers, and conversions between PyTorch's tensors and claystone's.
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

// Throws the exception that PyTorch users expect: torch.OutOfMemoryError, IndexError or RuntimeError, with claystone's message.
void check(ClaystoneStatus status);

// Owners of the C API's handles.
struct ReleaseTensor {
    void operator()(ClaystoneTensor* tensor) const { claystone_tensor_release(tensor); }
};
struct ReleaseStorage {
    void operator()(ClaystoneStorage* storage) const { claystone_storage_release(storage); }
};
using TensorHandle = std::shared_ptr<ClaystoneTensor>;
using StorageHandle = std::shared_ptr<ClaystoneStorage>;
TensorHandle own(ClaystoneTensor* tensor);

// claystone's number of a PyTorch device, and the number of devices.
int claystone_device(c10::DeviceIndex index);
c10::DeviceIndex device_count();
c10::DeviceIndex current_device();
// Whether this process was forked off the process that loaded this library. The child lacks the threads of OpenCL's driver, so it must
// not use the devices, and tensors inherited from the parent are not released.
bool is_forked();

std::optional<ClaystoneDtype> claystone_dtype(at::ScalarType dtype);
at::ScalarType torch_dtype(int dtype);

// The allocator of this device's tensors.
c10::Allocator* allocator();

// Whether claystone holds the tensor's elements.
bool is_ours(const at::TensorBase& tensor);

// Makes a claystone tensor that shares the tensor's memory. claystone must support the dtype.
TensorHandle handle(const at::TensorBase& tensor);
// Makes a u8 tensor of `length` bytes of a tensor's storage from byte `offset` on.
TensorHandle bytes(const at::TensorBase& tensor, size_t offset, size_t length);
// Replaces the storage of `target` by that of `result`, if `target` covers all of its storage and both are laid out alike. Returns
// whether it did.
bool adopt(const at::TensorBase& target, const TensorHandle& result);

struct Info {
    ClaystoneTensorInfo tensor;
    c10::SmallVector<int64_t, 5> sizes, strides;
    bool is_contiguous() const;
};
Info info(const TensorHandle& tensor);
// Makes a PyTorch tensor of a claystone tensor; the second form takes the tensor's `info` if that is already known.
at::Tensor wrap(const TensorHandle& tensor);
at::Tensor wrap(const TensorHandle& tensor, const Info& known);
at::Tensor tensor_of(c10::Storage storage, at::ScalarType dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset);

// The memory behind a tensor. `is_captured` says that a graph's commands refer to it. The storage is null before its first use.
struct GraphMemory {
    StorageHandle storage;
    int device;
    size_t nbytes;
    bool is_captured;
};
GraphMemory graph_memory(const at::TensorBase& tensor);
// Makes a PyTorch storage of memory that a graph writes.
c10::Storage storage_of_graph(const GraphMemory& memory);
// Moves a PyTorch storage's contents out of the memory that a graph writes, before a replay writes it again.
void leave_graph(const c10::StorageImpl& storage, const GraphMemory& memory);

bool share_storage(const TensorHandle& a, const TensorHandle& b);

std::string take(ClaystoneBytes bytes);

} // namespace claystone_torch

// Copies between the host and the device, and between tensors of the device.
#include "copy.h"
#include "generator.h"
#include "pinned.h"
#include "storage.h"

#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace claystone_torch {
namespace {

// The number of bytes from the start of a tensor's first element to the end of its last.
size_t span(const at::Tensor& tensor) {
    return at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
}

// The pinned memory at an address as a u8 tensor of claystone's CPU device; none if the address is not in pinned memory.
TensorHandle pinned_bytes(const void* address, size_t nbytes) {
    const auto [storage, before] = pinned_storage(address);
    if (!storage) {
        return {};
    }
    ClaystoneTensor* made = nullptr;
    const int64_t size = nbytes, stride = 1;
    check(claystone_tensor_new(storage.get(), CLAYSTONE_DTYPE_U8, &size, &stride, 1, before, &made));
    return own(made);
}

// Copies all bytes from a device tensor's first element to its last to a host tensor of the same strides. With `non_blocking`, a copy
// to pinned memory may return once it is enqueued.
void read(const at::Tensor& tensor, const at::TensorBase& host, bool non_blocking = false) {
    const size_t nbytes = span(tensor);
    if (nbytes == 0) {
        return;
    }
    void* const address = host.mutable_data_ptr();
    const auto source = bytes(tensor, tensor.storage_offset() * tensor.itemsize(), nbytes);
    if (const auto pinned = pinned_bytes(address, nbytes)) {
        check((non_blocking ? claystone_tensor_copy_non_blocking : claystone_tensor_copy)(pinned.get(), source.get()));
    } else {
        check(claystone_tensor_read(source.get(), address, nbytes));
    }
}

// Copies a tensor to host memory and keeps its strides.
at::Tensor read(const at::Tensor& tensor) {
    at::Tensor result(at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), tensor.scalar_type()));
    read(tensor, result);
    return result;
}

// Whether the elements fill the tensor's bytes without gaps and overlaps, so that writing all bytes writes nothing else.
bool is_dense(const at::Tensor& tensor) {
    return tensor.is_non_overlapping_and_dense();
}

// Whether tensors of the same shape have the same dtype and memory layout, so that copying bytes copies the elements.
bool have_same_layout(const at::Tensor& a, const at::Tensor& b) {
    return a.scalar_type() == b.scalar_type() && a.is_conj() == b.is_conj() && a.is_neg() == b.is_neg() && is_dense(a) &&
        ((a.is_contiguous() && b.is_contiguous()) || (is_dense(b) && a.strides() == b.strides()));
}

// Whether claystone can convert one to the other.
bool converts(const at::Tensor& source, const at::Tensor& target) {
    const bool plain = !source.is_neg() && !target.is_neg(); // imaginary parts of complex tensors may be negated views
    return plain && claystone_dtype(source.scalar_type()) && claystone_dtype(target.scalar_type());
}

void copy_on_device(const at::Tensor& source, const at::Tensor& target) {
    if (converts(source, target)) {
        check(claystone_tensor_copy(handle(target).get(), handle(source).get()));
    } else {
        copy(to_host(source), target);
    }
}

// Whether a host tensor is dense and in pinned memory.
bool is_pinned_and_dense(const at::Tensor& host) {
    return host.is_cpu() && is_dense(host) && pinned_storage(host.const_data_ptr()).first;
}

// An empty tensor on a device with another tensor's sizes, strides and dtype.
at::Tensor like(const at::Tensor& tensor, c10::Device device) {
    return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device).pinned_memory(false));
}

} // namespace

at::Tensor to_host(const at::Tensor& tensor) {
    if (!is_ours(tensor)) {
        return tensor;
    }
    auto result = read(tensor);
    result._set_conj(tensor.is_conj());
    result._set_neg(tensor.is_neg());
    return result;
}

void write_alike(const at::Tensor& tensor, const at::Tensor& host, bool non_blocking) {
    const size_t nbytes = span(tensor);
    if (nbytes == 0) {
        return;
    }
    const auto target = bytes(tensor, tensor.storage_offset() * tensor.itemsize(), nbytes);
    if (const auto pinned = pinned_bytes(host.const_data_ptr(), nbytes)) {
        check((non_blocking ? claystone_tensor_copy_non_blocking : claystone_tensor_copy)(target.get(), pinned.get()));
    } else {
        check((non_blocking ? claystone_tensor_write_non_blocking : claystone_tensor_write)(target.get(), host.const_data_ptr(), nbytes));
    }
}

void copy(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
    const c10::OptionalDeviceGuard guard(is_ours(target) ? target.device() : source.device());
    if (target.numel() == 0) {
        return;
    }
    if (is_ours(source) && is_ours(target)) {
        copy_on_device(source, target);
    } else if (is_ours(source) && have_same_layout(source, target)) {
        read(source, target, non_blocking);
    } else if (is_ours(source) && non_blocking && is_pinned_and_dense(target) && converts(source, target)) {
        const auto converted = like(target, source.device());
        copy_on_device(source, converted);
        read(converted, target, non_blocking);
    } else if (is_ours(source)) {
        target.copy_(to_host(source));
    } else if (source.is_cpu() && have_same_layout(source, target)) {
        write_alike(target, source, non_blocking);
    } else if (non_blocking && is_pinned_and_dense(source) && converts(source, target)) {
        const auto there = like(source, target.device());
        write_alike(there, source, non_blocking);
        copy_on_device(there, target);
    } else {
        auto host = is_dense(target)
            ? at::Tensor(at::detail::empty_strided_cpu(target.sizes(), target.strides(), target.scalar_type()))
            : read(target);
        host._set_conj(target.is_conj());
        host._set_neg(target.is_neg());
        host.copy_(source);
        write_alike(target, host, non_blocking);
    }
}

namespace {

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
    at::assert_no_internal_overlap(target);
    // PyTorch broadcasts in copy_, which calls this function.
    copy(source.sizes() == target.sizes() ? source : source.expand_as(target), target, non_blocking);
    return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
    target.resize_(source.sizes());
    copy(source, target);
    return target;
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
    return to_host(tensor).item();
}

// `copy` handles conjugated and negated views itself, since resolving these would also be a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
    library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, library) {
    library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    library.impl("_copy_from", &copy_from);
    library.impl("_copy_from_and_resize", &copy_from_and_resize);
    library.impl("_local_scalar_dense", &local_scalar_dense);
}

} // namespace
} // namespace claystone_torch

// Tensors without computation: empty tensors, views, resizing. Views are PyTorch's own, by sizes and strides.
#include "copy.h"
#include "generator.h"
#include "storage.h"

#include <ATen/EmptyTensor.h>
#include <ATen/native/TensorShape.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace claystone_torch {

void resize_storage(const c10::Storage& storage, size_t nbytes) {
    auto* held = storage.unsafeGetStorageImpl();
    const c10::DeviceGuard guard(held->device());
    const size_t kept = std::min(held->nbytes(), nbytes);
    c10::Storage grown(c10::Storage::use_byte_size_t(), nbytes, allocator()->allocate(nbytes), allocator(), true);
    if (kept > 0) {
        const auto view = [&](const c10::Storage& of) {
            auto tensor = at::detail::make_tensor<c10::TensorImpl>(
                c10::Storage(of), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), caffe2::TypeMeta::Make<uint8_t>());
            tensor.unsafeGetTensorImpl()->set_sizes_contiguous({int64_t(kept)});
            return tensor;
        };
        copy(view(storage), view(grown));
    }
    held->set_data_ptr(grown.set_data_ptr(c10::DataPtr(nullptr, held->device())));
    held->set_nbytes(nbytes);
}

namespace {

const c10::DispatchKeySet KEY(c10::DispatchKey::PrivateUse1);

c10::Device device_or_current(std::optional<c10::Device> device) {
    return device && device->has_index() ? *device : c10::Device(c10::DeviceType::PrivateUse1, current_device());
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
    const c10::DeviceGuard guard(device_or_current(device));
    return at::Tensor(at::detail::empty_generic(size, allocator(), KEY, c10::dtype_or_default(dtype), format));
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>) {
    const c10::DeviceGuard guard(device_or_current(device));
    return at::Tensor(at::detail::empty_strided_generic(size, stride, allocator(), KEY, c10::dtype_or_default(dtype)));
}

// Enlarges the storage to hold these sizes and strides.
void grow(const at::Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride, int64_t offset) {
    const size_t needed = at::detail::computeStorageNbytes(size, stride, tensor.itemsize(), offset);
    if (needed > tensor.storage().nbytes()) {
        resize_storage(tensor.storage(), needed);
    }
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
    auto* tensor = self.unsafeGetTensorImpl();
    if (self.sizes() != size) {
        std::vector<int64_t> strides(size.size(), 1);
        for (size_t i = size.size(); i-- > 1;) {
            strides[i - 1] = strides[i] * std::max<int64_t>(size[i], 1);
        }
        grow(self, size, strides, self.storage_offset());
        tensor->set_sizes_contiguous(size);
    }
    if (format && *format != at::MemoryFormat::Preserve) {
        tensor->empty_tensor_restride(*format);
    }
    return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
    auto* tensor = self.unsafeGetTensorImpl();
    tensor->set_storage_keep_dtype(std::move(source));
    tensor->set_storage_offset(offset);
    std::vector<int64_t> strides = stride.vec();
    if (stride.empty() && !size.empty()) {
        strides.assign(size.size(), 1);
        for (size_t i = size.size(); i-- > 1;) {
            strides[i - 1] = strides[i] * std::max<int64_t>(size[i], 1);
        }
    }
    tensor->set_sizes_and_strides(size, strides);
    grow(self, size, strides, offset);
    return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
    const int64_t numel = source.nbytes() / self.itemsize();
    return set_storage(self, std::move(source), 0, {numel}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
    return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
    return set_storage(
        self, c10::Storage(c10::Storage::use_byte_size_t(), 0, allocator()->allocate(0), allocator(), true), 0, {0}, {});
}

at::Tensor as_strided(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
    return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    library.impl("empty.memory_format", &empty);
    library.impl("empty_strided", &empty_strided);
    library.impl("resize_", &resize_);
    library.impl("as_strided", &as_strided);
    library.impl("view", &at::native::view);
    library.impl("_reshape_alias", &at::native::_reshape_alias);
    library.impl("view_as_real", &at::native::view_as_real);
    library.impl("view_as_complex", &at::native::view_as_complex);
    library.impl("unfold", &at::native::unfold);
    library.impl("set_.source_Storage", &set_whole_storage);
    library.impl("set_.source_Storage_storage_offset", &set_storage);
    library.impl("set_.source_Tensor", &set_tensor);
    library.impl("set_", &set_nothing);
}

} // namespace
} // namespace claystone_torch

// Chooses the kernel of scaled_dot_product_attention: the fused operators for other devices, which have rows, or products and a softmax.
#include "storage.h"

#include <ATen/SDPBackend.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <torch/library.h>

namespace claystone_torch {

static int64_t choose(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask, double dropout, bool,
    std::optional<double>, bool grouped) {
    const auto batch = [](const at::Tensor& t) { return t.sizes().slice(0, t.dim() - 2); };
    const bool fits = query.dim() > 2 && key.dim() == query.dim() && value.dim() == query.dim() && batch(query) == batch(key) &&
        batch(query) == batch(value) && query.scalar_type() == key.scalar_type() && query.scalar_type() == value.scalar_type();
    const bool plain = dropout == 0 && !grouped && !(mask && mask->requires_grad());
    return int64_t(fits && plain ? at::SDPBackend::overrideable : at::SDPBackend::math);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    library.impl("_fused_sdp_choice", &choose);
}

} // namespace claystone_torch

namespace at::native {

REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &claystone_torch::choose)

} // namespace at::native

// Autocast: registers PyTorch's lists of operators that run in the lower precision, in f32, or in their operands' widest dtype.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
    m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
    AT_FORALL_LOWER_PRECISION_FP(LOWER_PRECISION)
    // PyTorch composes these of operators in the list above; here each is one operator.
    LOWER_PRECISION(lstm, input)
    LOWER_PRECISION(lstm, data)
    LOWER_PRECISION(gru, input)
    LOWER_PRECISION(gru, data)
    LOWER_PRECISION(rnn_tanh, input)
    LOWER_PRECISION(rnn_tanh, data)
    LOWER_PRECISION(rnn_relu, input)
    LOWER_PRECISION(rnn_relu, data)
    AT_FORALL_FP32(FP32)
    AT_FORALL_PROMOTE(PROMOTE)
#undef LOWER_PRECISION
#undef FP32
#undef PROMOTE
}

} // namespace

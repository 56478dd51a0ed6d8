//! The vector loops of the CPU backend: matrix products, products with quantised weights, conversions, functions of floats, and transposition. This is the only folder
//! of the backend that may contain `unsafe`.

#[cfg(target_arch = "x86_64")] // only the x86-64 product kernels need buffers
pub(crate) mod buffers;
pub(crate) mod convert;
pub(crate) mod gemm;
pub(crate) mod math;
pub(crate) mod quantized;
pub(crate) mod transpose;

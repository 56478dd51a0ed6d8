//! Matrix products and operations composed of them.

pub(crate) mod distance;
pub(crate) mod einsum;
pub(crate) mod gemm;
pub(crate) mod matmul;
pub(crate) mod products;

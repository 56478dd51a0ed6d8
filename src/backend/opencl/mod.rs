//! OpenCL devices: launches over problems.

pub(crate) mod cross_entropy;
#[cfg(test)]
mod device_tests;
pub(crate) mod gather;
pub(crate) mod gemm;
pub(crate) mod gemm_mma;
pub(crate) mod gemm_panel;
pub(crate) mod gemm_thin;
pub(crate) mod interpolate;
pub(crate) mod kernels;
pub(crate) mod launch_cache;
pub(crate) mod launch_plan;
pub(crate) mod map;
pub(crate) mod nonzero;
pub(crate) mod norm;
pub(crate) mod reduce;
pub(crate) mod scan;
pub(crate) mod scatter;
pub(crate) mod select;
pub(crate) mod sequence;
pub(crate) mod softmax;
pub(crate) mod sort;
pub(crate) mod source;
pub(crate) mod user_kernel;
pub(crate) mod window;

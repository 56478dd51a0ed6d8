//! What crosses from operations to a backend: checked, plain descriptions.

pub(crate) mod attention;
pub(crate) mod conv;
pub(crate) mod cross_entropy;
pub(crate) mod gemm;
pub(crate) mod index;
pub(crate) mod interpolation;
pub(crate) mod lines;
pub(crate) mod map;
pub(crate) mod norm;
pub(crate) mod precision;
pub(crate) mod recording;
pub(crate) mod reduction;
pub(crate) mod scan;
pub(crate) mod select;
pub(crate) mod sequence;
pub(crate) mod softmax;
pub(crate) mod tuning;
pub(crate) mod windows;

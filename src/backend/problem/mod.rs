//! Problems: plain descriptions of work, checked by the operations, that backends compute.

pub(crate) mod attention;
pub(crate) mod cached;
pub(crate) mod conv;
pub(crate) mod cross_entropy;
pub(crate) mod gemm;
pub(crate) mod index;
pub(crate) mod interpolation;
pub(crate) mod lines;
pub(crate) mod map;
pub(crate) mod norm;
pub(crate) mod operand;
pub(crate) mod precision;
pub(crate) mod quantized;
pub(crate) mod recurrence;
pub(crate) mod reduction;
pub(crate) mod scan;
pub(crate) mod select;
pub(crate) mod sequence;
pub(crate) mod softmax;
pub(crate) mod windows;

pub(crate) use self::{
    attention::*, cached::*, conv::*, cross_entropy::*, gemm::*, index::*, interpolation::*, lines::*, map::*, norm::*,
    operand::*, quantized::*, recurrence::*, reduction::*, scan::*, select::*, sequence::*, softmax::*, windows::*,
};
use crate::Tensor;

/// Increments the version counter of a tensor that a kernel has just written, and returns the tensor.
pub(crate) fn mark_written(made: Tensor) -> Tensor {
    made.storage.bump_version();
    made
}

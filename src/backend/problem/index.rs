//! Gather and scatter: elements read and written through indices.

use crate::layout::Layout;
use crate::{Compute, DType, Tensor};

/// A gather or scatter along one dim. Both layouts have the shape of the elements that move.
pub(crate) struct Indexed<'a> {
    pub(crate) op: &'static str,
    /// The source. For a gather, its layout has stride 0 along the indexed dim.
    pub(crate) x: &'a Tensor,
    pub(crate) x_layout: Layout,
    pub(crate) index: &'a Tensor,
    pub(crate) index_layout: Layout,
    /// The size of the indexed dim in the tensor that the indices refer to; `step` is its stride.
    pub(crate) size: usize,
    pub(crate) step: isize,
    /// Whether negative indices count from the end.
    pub(crate) wraps: bool,
}

/// How a scatter combines the old element with the new one (PyTorch's `reduce`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Combine {
    /// Replaces the element; the last write wins.
    Set,
    Add,
    Multiply,
    Max,
    Min,
}

impl Combine {
    /// The OpenCL C function or macro that combines two elements of type `acc`.
    pub(crate) fn cl_name(self, acc: Compute) -> String {
        let (integers, c) = (acc == Compute::I64, acc.cl_name());
        match self {
            Combine::Add if integers => "add_long".into(),
            Combine::Multiply if integers => "mul_long".into(),
            Combine::Add => "PLUS".into(),
            Combine::Multiply => "TIMES".into(),
            Combine::Max => format!("max_{c}"),
            Combine::Min => format!("min_{c}"),
            Combine::Set => unreachable!("elements that are only moved are not computed with"),
        }
    }

    /// True if several elements of `dtype` must be combined in f32 and rounded once.
    pub(crate) fn needs_f32(self, dtype: DType) -> bool {
        matches!(self, Combine::Add | Combine::Multiply) && matches!(dtype, DType::F16 | DType::BF16)
    }
}

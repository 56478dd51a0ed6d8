//! Gather and scatter: elements read and written through indices.

use crate::layout::Layout;
use crate::{DType, Tensor};

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

/// A scatter of `moved.x` into `target`, which is viewed with `layout` and indexed along dim `d`.
pub(crate) struct Scatter<'a> {
    pub(crate) moved: &'a Indexed<'a>,
    pub(crate) combine: Combine,
    pub(crate) target: &'a Tensor,
    pub(crate) layout: &'a Layout,
    pub(crate) d: usize,
}

/// One index of a linear index: adds `index * step` to `out`, or with a `base` overwrites `out` with `base + index * step`.
pub(crate) struct IndexTerm<'a> {
    pub(crate) op: &'static str,
    pub(crate) index: &'a Tensor,
    /// The size of the indexed dim; `step` is its stride.
    pub(crate) size: usize,
    pub(crate) step: isize,
    pub(crate) base: Option<i64>,
    pub(crate) out: &'a Tensor,
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
    /// True if several elements of `dtype` must be combined in f32 and rounded once.
    pub(crate) fn needs_f32(self, dtype: DType) -> bool {
        matches!(self, Combine::Add | Combine::Multiply) && matches!(dtype, DType::F16 | DType::BF16)
    }
}

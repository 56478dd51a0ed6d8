//! Gather and scatter: operations that read or write elements through indices.

use crate::layout::Layout;
use crate::{DType, Tensor};

/// A gather or scatter along one dim. Both layouts have the shape of the elements that are moved.
pub(crate) struct Indexed<'a> {
    pub(crate) op: &'static str,
    /// The source. In a gather, `x_layout` has stride 0 along the indexed dim.
    pub(crate) x: &'a Tensor,
    pub(crate) x_layout: Layout,
    pub(crate) index: &'a Tensor,
    pub(crate) index_layout: Layout,
    /// The size of the dim that the indices refer to (of the source in a gather, of the target in a scatter); `step` is that dim's stride.
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

/// One term of a linear index. With a `base`, writes `base + index * step` to `out`; otherwise adds `index * step` to `out`.
pub(crate) struct IndexTerm<'a> {
    pub(crate) op: &'static str,
    pub(crate) index: &'a Tensor,
    /// The size of the indexed dim; `step` is the dim's stride.
    pub(crate) size: usize,
    pub(crate) step: isize,
    pub(crate) base: Option<i64>,
    pub(crate) out: &'a Tensor,
}

/// How a scatter combines the old element with the new one (PyTorch's `reduce`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Combine {
    /// Replaces the element. If several elements have the same index, the last write wins.
    Set,
    Add,
    Multiply,
    Max,
    Min,
}

impl Combine {
    /// True if several elements of `dtype` must be combined in f32 and rounded only once.
    pub(crate) fn needs_f32(self, dtype: DType) -> bool {
        matches!(self, Combine::Add | Combine::Multiply) && matches!(dtype, DType::F16 | DType::BF16)
    }
}

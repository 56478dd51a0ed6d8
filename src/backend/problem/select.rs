//! Elements selected by their order: top-k, k-th value and medians.

use crate::Tensor;
use crate::layout::shape::Dims;

/// The result of a selection from lines: indices, and the values where the backend computes them as well.
pub(crate) struct Selected {
    pub(crate) values: Option<Tensor>,
    pub(crate) indices: Tensor,
}

impl From<Tensor> for Selected {
    fn from(indices: Tensor) -> Selected {
        Selected { values: None, indices }
    }
}

/// Which element of a line, in ascending order.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Nth {
    /// The element of this rank, from 0.
    Rank(usize),
    /// The median, the lower one of two; NaN if there is any.
    Median,
    /// The median of the elements that are not NaN.
    NanMedian,
}

impl Nth {
    /// The rank in a line of n elements, of which so many are NaN.
    pub(crate) fn rank(self, n: usize, nans: usize) -> usize {
        match self {
            Nth::Rank(rank) => rank,
            Nth::Median if nans > 0 => n - nans,
            Nth::Median => (n - 1) / 2,
            Nth::NanMedian => (n - 1).saturating_sub(nans) / 2,
        }
    }

    /// The arguments `k`, from 1, and `rule` of `kernels/select.cl`.
    pub(crate) fn rule(self) -> (usize, u32) {
        match self {
            Nth::Rank(rank) => (rank + 1, 0),
            Nth::Median => (1, 1),
            Nth::NanMedian => (1, 2),
        }
    }
}

/// The tensor's sizes with `k` in place of that of dim d.
pub(crate) fn with(t: &Tensor, d: usize, k: usize) -> Dims {
    let mut dims = Dims::from_slice(t.shape().dims());
    dims[d] = k;
    dims
}

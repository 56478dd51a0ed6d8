//! Elements chosen by order.

use crate::Tensor;
use crate::layout::shape::Dims;

/// What is chosen from lines: indices, and values where they are found on the way.
pub(crate) struct Chosen {
    pub(crate) values: Option<Tensor>,
    pub(crate) indices: Tensor,
}

impl From<Tensor> for Chosen {
    fn from(indices: Tensor) -> Chosen {
        Chosen { values: None, indices }
    }
}

/// The rank of an element among those of a line, in ascending order.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Nth {
    Rank(usize),
    /// The middle, of two the lower; the first NaN if there is one.
    Median,
    /// The middle of those that are not NaN.
    NanMedian,
}

impl Nth {
    /// In a line of n elements of which so many are NaN.
    pub(crate) fn rank(self, n: usize, nans: usize) -> usize {
        match self {
            Nth::Rank(rank) => rank,
            Nth::Median if nans > 0 => n - nans,
            Nth::Median => (n - 1) / 2,
            Nth::NanMedian => (n - 1).saturating_sub(nans) / 2,
        }
    }

    /// As `kernels/select.cl` has it: a rank, from 1, and which of its rules.
    pub(crate) fn rule(self) -> (usize, u32) {
        match self {
            Nth::Rank(rank) => (rank + 1, 0),
            Nth::Median => (1, 1),
            Nth::NanMedian => (1, 2),
        }
    }
}

/// The tensor's sizes, but `k` along d.
pub(crate) fn with(t: &Tensor, d: usize, k: usize) -> Dims {
    let mut dims = Dims::from_slice(t.shape().dims());
    dims[d] = k;
    dims
}

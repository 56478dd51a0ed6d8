//! Elements selected by their order: top-k, k-th value and medians.

use crate::layout::shape::Dims;
use crate::{DType, Tensor};

/// The result of a selection from lines: indices, and the values where the backend computes them as well.
pub(crate) struct Selected {
    pub(crate) values: Option<Tensor>,
    pub(crate) indices: Tensor,
}

impl Selected {
    /// The values, of a selection that [`empty`](Selected::empty) made.
    pub(crate) fn values(&self) -> &Tensor {
        self.values.as_ref().unwrap_or(&self.indices)
    }
}

impl From<Tensor> for Selected {
    fn from(indices: Tensor) -> Selected {
        Selected { values: None, indices }
    }
}

/// Which element of a line, in ascending order, from 0. NaN is above everything.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Nth<'a> {
    /// The element of this rank.
    Rank(usize),
    /// The element of this rank, or the first NaN if there is any.
    OrNan(usize),
    /// The median of the elements that are not NaN.
    NanMedian,
    /// The elements of these ranks, an i64 for each line; contiguous.
    Ranks(&'a Tensor),
}

impl<'a> Nth<'a> {
    /// The rank in a line of n elements, of which `nans` are NaN. `listed` is the line's number in [`Nth::Ranks`].
    pub(crate) fn rank(self, n: usize, nans: usize, listed: impl FnOnce() -> i64) -> usize {
        match self {
            Nth::OrNan(_) if nans > 0 => n - nans,
            Nth::Rank(rank) | Nth::OrNan(rank) => rank,
            Nth::NanMedian => (n - 1).saturating_sub(nans) / 2,
            Nth::Ranks(_) => listed() as usize,
        }
    }

    pub(crate) fn ranks(self) -> Option<&'a Tensor> {
        if let Nth::Ranks(ranks) = self { Some(ranks) } else { None }
    }

    /// The arguments `k`, from 1, and `rule` of `kernels/select.cl`.
    pub(crate) fn rule(self) -> (usize, u32) {
        match self {
            Nth::Rank(rank) => (rank + 1, 0),
            Nth::OrNan(rank) => (rank + 1, 1),
            Nth::NanMedian => (1, 2),
            Nth::Ranks(_) => (1, 3),
        }
    }
}

/// The range of bits in which keys of a dtype differ, in multiples of four. f16 and bf16 are widened to 32 bits, whose lowest bits only
/// repeat the sign.
pub(crate) fn digits(dtype: DType) -> [usize; 2] {
    match dtype {
        DType::F16 => [12, 32],
        DType::BF16 => [16, 32],
        DType::Bool => [0, 4],
        DType::U8 => [0, 8],
        DType::F64 | DType::I64 => [0, 64],
        _ => [0, 32],
    }
}

/// The tensor's sizes with `k` in place of that of dim d.
pub(crate) fn with(t: &Tensor, d: usize, k: usize) -> Dims {
    let mut dims = Dims::from_slice(t.shape().dims());
    dims[d] = k;
    dims
}

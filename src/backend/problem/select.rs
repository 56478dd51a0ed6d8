//! Sorting, searching in sorted lines, and selection by rank: top-k, k-th value and medians.

use crate::layout::Layout;
use crate::layout::shape::Dims;
use crate::{DType, Tensor};

/// A stable sort along dim `d` of x. `indices` receives the index that each element had before the sort.
pub(crate) struct Sorting<'a> {
    pub(crate) x: &'a Tensor,
    pub(crate) d: usize,
    pub(crate) descending: bool,
    pub(crate) values: &'a Tensor,
    pub(crate) indices: &'a Tensor,
}

/// A search for the index at which each value could be inserted into a sorted line.
pub(crate) struct Search<'a> {
    /// The tensor with the lines, which are sorted along its last dim.
    pub(crate) sorted: &'a Tensor,
    /// The lines, broadcast to the shape of the values. Adjacent elements of a line are `step` elements apart.
    pub(crate) lines: &'a Layout,
    pub(crate) step: isize,
    pub(crate) values: &'a Tensor,
    /// Whether a value is inserted after equal elements, instead of before.
    pub(crate) right: bool,
    /// The result: insertion indices, or if its dtype is bool, whether the line contains the value.
    pub(crate) out: &'a Tensor,
}

/// The first `k` elements along dim `d` of x, in sorted order.
#[derive(Clone, Copy)]
pub(crate) struct TopK<'a> {
    pub(crate) x: &'a Tensor,
    pub(crate) d: usize,
    pub(crate) k: usize,
    pub(crate) descending: bool,
}

/// The element of a given rank of each line along dim `d` of x.
#[derive(Clone, Copy)]
pub(crate) struct RankedElement<'a> {
    pub(crate) x: &'a Tensor,
    pub(crate) d: usize,
    pub(crate) rank: RankQuery<'a>,
}

/// The result of a selection: the indices, and the values if the backend computes them as well.
pub(crate) struct Selected {
    pub(crate) values: Option<Tensor>,
    pub(crate) indices: Tensor,
}

impl Selected {
    /// Returns the values of a selection that [`allocate`](Selected::allocate) made; any other selection may have no values.
    pub(crate) fn values(&self) -> &Tensor {
        self.values.as_ref().unwrap_or(&self.indices)
    }
}

impl From<Tensor> for Selected {
    fn from(indices: Tensor) -> Selected {
        Selected { values: None, indices }
    }
}

/// The rank to select from each line, in ascending order, counted from 0. NaN is greater than every number.
#[derive(Debug, Clone, Copy)]
pub(crate) enum RankQuery<'a> {
    /// The element of this rank.
    Rank(usize),
    /// The element of this rank, or the first NaN if the line contains any NaN.
    OrNan(usize),
    /// The median of the elements that are not NaN.
    NanMedian,
    /// A different rank for each line: a contiguous I64 tensor.
    Ranks(&'a Tensor),
}

impl<'a> RankQuery<'a> {
    /// Returns the rank in a line of n elements, of which `nans` are NaN. For [`RankQuery::Ranks`], `listed` reads the line's rank.
    pub(crate) fn rank(self, n: usize, nans: usize, listed: impl FnOnce() -> i64) -> usize {
        match self {
            RankQuery::OrNan(_) if nans > 0 => n - nans,
            RankQuery::Rank(rank) | RankQuery::OrNan(rank) => rank,
            RankQuery::NanMedian => (n - 1).saturating_sub(nans) / 2,
            RankQuery::Ranks(_) => listed() as usize,
        }
    }

    pub(crate) fn ranks(self) -> Option<&'a Tensor> {
        if let RankQuery::Ranks(ranks) = self { Some(ranks) } else { None }
    }
}

/// Returns the range of bits in which sort keys of a dtype can differ; its ends are multiples of four. Keys of f16 and bf16 are
/// widened to 32 bits, and their lowest bits only repeat the sign.
pub(crate) fn key_bits(dtype: DType) -> [usize; 2] {
    match dtype {
        DType::F16 => [12, 32],
        DType::BF16 => [16, 32],
        DType::Bool => [0, 4],
        DType::U8 | DType::I8 => [0, 8],
        DType::I16 => [0, 16],
        DType::F64 | DType::I64 => [0, 64],
        _ => [0, 32],
    }
}

/// Returns the sizes of `t`, with the size of dim d replaced by `k`.
pub(crate) fn dims_with(t: &Tensor, d: usize, k: usize) -> Dims {
    let mut dims = Dims::from_slice(t.shape().dims());
    dims[d] = k;
    dims
}

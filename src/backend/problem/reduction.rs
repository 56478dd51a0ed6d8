//! Reductions and their plan: kept dims in the outer loops, reduced dims in the inner loops, both collapsed as far as strides allow.

use smallvec::SmallVec;

use crate::expr::Expr;
use crate::layout::collapse::StridedDims;
use crate::tensor::{Dims, Layout, Shape};
use crate::{Compute, Tensor};

/// Dims and the strides of one operand, with the innermost dim last. There is at least one dim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Axes {
    pub(crate) sizes: Dims,
    pub(crate) strides: Dims<isize>,
}

impl Axes {
    fn new(dims: impl Iterator<Item = (usize, isize)>) -> Axes {
        let (shape, strides): (Dims, Dims<isize>) = dims.unzip();
        let strided = StridedDims::new(&Shape::from(&shape[..]), [&strides[..]]);
        let mut axes = Axes { sizes: strided.dims, strides: strided.strides.into_iter().next().unwrap_or_default() };
        if axes.sizes.is_empty() {
            axes.sizes.push(1);
            axes.strides.push(0);
        }
        axes
    }

    pub(crate) fn single(size: usize, stride: isize) -> Axes {
        Axes { sizes: Dims::from_slice(&[size]), strides: Dims::from_slice(&[stride]) }
    }

    pub(crate) fn rank(&self) -> usize {
        self.sizes.len()
    }

    pub(crate) fn count(&self) -> usize {
        self.sizes.iter().product()
    }

    pub(crate) fn inner(&self) -> (usize, isize) {
        (self.sizes[self.rank() - 1], self.strides[self.rank() - 1])
    }

    /// Returns the offset of position `i`, and the number of positions (at most `most`) from `i` on that are in the same innermost dim.
    pub(crate) fn locate(&self, i: usize, most: usize) -> (isize, usize) {
        let (inner, stride) = self.inner();
        let mut rest = i / inner;
        let mut at = (i % inner) as isize * stride;
        for (&n, &s) in self.sizes.iter().zip(&self.strides).rev().skip(1) {
            at += (rest % n) as isize * s;
            rest /= n;
        }
        (at, most.min(inner - i % inner))
    }

    /// True if there is exactly one dim, with this size and stride.
    pub(crate) fn is_single(&self, size: usize, stride: isize) -> bool {
        self.sizes[..] == [size] && self.strides[..] == [stride]
    }

    /// Returns the sizes and then the strides, in the layout of the struct that kernels take.
    pub(crate) fn words(&self) -> SmallVec<[i64; 16]> {
        self.sizes.iter().map(|&n| n as i64).chain(self.strides.iter().map(|&s| s as i64)).collect()
    }
}

/// The plan of a reduction: result `o` combines the elements at `start + kept[o] + reduced[r]` for every r.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReductionPlan {
    pub(crate) start: usize,
    pub(crate) kept: Axes,
    pub(crate) reduced: Axes,
    pub(crate) outs: usize,
    pub(crate) n: usize,
}

impl ReductionPlan {
    /// Plans a reduction of a layout that is not empty. With `in_order`, r is the row-major index over the reduced dims, as argmax needs.
    /// Otherwise the reduced dims are sorted by descending stride, and dims with negative strides are reversed.
    pub(crate) fn new(layout: &Layout, reduced: &[bool], in_order: bool) -> ReductionPlan {
        let dims = || layout.shape.dims().iter().copied().zip(layout.strides.iter().copied()).zip(reduced);
        let kept = Axes::new(dims().filter(|(_, r)| !**r).map(|(d, _)| d));
        let mut inner: Dims<(usize, isize)> = dims().filter(|(_, r)| **r).map(|(d, _)| d).collect();
        let mut start = layout.offset as isize;
        if !in_order {
            for (n, stride) in inner.iter_mut().filter(|d| d.1 < 0) {
                start += (*n as isize - 1) * *stride;
                *stride = -*stride;
            }
            // Broadcast dims (with stride 0) come first, so that the other dims can collapse.
            inner.sort_by_key(|&(_, stride)| std::cmp::Reverse(if stride == 0 { isize::MAX } else { stride }));
        }
        let reduced = Axes::new(inner.into_iter());
        let (outs, n) = (kept.count(), reduced.count());
        ReductionPlan { start: start as usize, kept, reduced, outs, n }
    }

    /// True if the inputs of adjacent results are closer in memory than successive inputs of one result.
    pub(crate) fn by_column(&self) -> bool {
        let ((columns, across), (n, along)) = (self.kept.inner(), self.reduced.inner());
        columns > 1 && n > 1 && across != 0 && across.unsigned_abs() < along.unsigned_abs()
    }
}

/// A checked reduction: the result is allocated, and neither the result nor the reduced dims are empty.
pub(crate) struct Reduction<'a> {
    pub(crate) op: &'static str,
    pub(crate) rule: &'static Rule,
    pub(crate) x: &'a Tensor,
    /// For each dim of x, whether the dim is reduced.
    pub(crate) mask: &'a [bool],
    /// The result, which is contiguous.
    pub(crate) out: &'a Tensor,
    /// The value of scalar 0 in [`Rule::finish`]: the number of elements, or the degrees of freedom.
    pub(crate) number: f64,
}

impl Reduction<'_> {
    pub(crate) fn plan(&self) -> ReductionPlan {
        ReductionPlan::new(&self.x.layout, self.mask, self.rule.combination.is_arg())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(shape: &[usize], strides: &[isize], offset: usize) -> Layout {
        Layout { shape: Shape::from(shape), strides: Dims::from_slice(strides), offset }
    }

    #[test]
    fn a_full_reduction_of_a_transposed_tensor_is_one_run() {
        let plan = ReductionPlan::new(&layout(&[4, 3, 2], &[1, 8, 4], 5), &[true; 3], false);
        assert_eq!((&plan.reduced.sizes[..], &plan.reduced.strides[..]), (&[24][..], &[1][..]));
        assert_eq!((plan.start, plan.outs, plan.n), (5, 1, 24));
        let ordered = ReductionPlan::new(&layout(&[4, 3, 2], &[1, 8, 4], 5), &[true; 3], true);
        assert_eq!(ordered.reduced.sizes[..], [4, 6]);
    }

    #[test]
    fn flipped_dims_are_reduced_forwards() {
        let plan = ReductionPlan::new(&layout(&[3, 4], &[4, -1], 3), &[true, true], false);
        assert_eq!((plan.start, &plan.reduced.sizes[..], &plan.reduced.strides[..]), (0, &[12][..], &[1][..]));
    }

    #[test]
    fn by_column_detects_reductions_over_columns() {
        let shape = layout(&[5, 7], &[7, 1], 0);
        assert!(ReductionPlan::new(&shape, &[true, false], false).by_column());
        assert!(!ReductionPlan::new(&shape, &[false, true], false).by_column());
    }

    #[test]
    fn runs_cover_positions_in_order() {
        let axes = Axes { sizes: Dims::from_slice(&[2, 3]), strides: Dims::from_slice(&[10, -1]) };
        assert_eq!(axes.locate(0, 9), (0, 3));
        assert_eq!(axes.locate(1, 9), (-1, 2));
        assert_eq!(axes.locate(4, 1), (9, 1));
        assert_eq!(axes.words()[..], [2, 3, 10, -1]);
    }
}

/// The operation that combines two elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Combination {
    Add,
    Mul,
    Max,
    Min,
    /// The index of the maximum; the result is an index instead of a combined value.
    ArgMax,
    /// The index of the minimum; the result is an index instead of a combined value.
    ArgMin,
}

impl Combination {
    pub(crate) fn is_arg(self) -> bool {
        matches!(self, Combination::ArgMax | Combination::ArgMin)
    }
}

/// The function that is applied to each element before the elements are combined.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Element {
    Identity,
    /// 1 if the element is nonzero, otherwise 0.
    NonZero,
    Formula(Expr),
}

/// The formula of a reduction: maps each element, combines the elements, and finishes the combined value.
#[derive(Debug, Clone)]
pub(crate) struct Rule {
    pub(crate) combination: Combination,
    pub(crate) element: Element,
    /// An expression of the combined value (input 0) and [`Reduction::number`] (scalar 0). With None, the result is the combined value.
    pub(crate) finish: Option<Expr>,
    /// How a sum is computed again if it leaves the accumulator's range. None for sums that are never computed again.
    pub(crate) rescaled: Option<Rescaled>,
    /// Whether to accumulate in i64, whatever the dtype.
    pub(crate) counts: bool,
}

/// Float sums that are computed again, from elements scaled by a power of two, if the sum overflows or its squares underflow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Rescaled {
    /// A sum divided by the number of elements.
    Mean,
    /// The square root of a sum of squares.
    Norm,
    /// A sum of squares divided by the degrees of freedom.
    Variance,
}

impl Rescaled {
    /// True if elements are squared. In this case small sums may have lost terms to underflow.
    pub(crate) fn squares(self) -> bool {
        self != Rescaled::Mean
    }
}

/// The range in which a sum of unscaled elements is exact enough, and the factors that bring other sums into this range.
pub(crate) struct SafeRange {
    /// The largest sum that is accepted.
    pub(crate) max_sum: f64,
    /// The smallest sum of squares that is accepted.
    pub(crate) min_square_sum: f64,
    /// The factor for the elements if the sum is too large.
    pub(crate) scale_down: f64,
    /// The factor for the elements if the sum of squares is too small.
    pub(crate) scale_up: f64,
}

impl SafeRange {
    /// Returns the range for sums accumulated in `compute`. The square of an element times its factor always stays in the accumulator's range.
    pub(crate) fn for_accumulator(compute: Compute) -> SafeRange {
        let (max_sum, [min_square_sum, scale_down, scale_up]) = match compute {
            Compute::F64 => (f64::MAX, [-900, -600, 700]),
            _ => (f32::MAX.into(), [-76, -80, 90]),
        };
        let power = |exponent: i64| f64::from_bits(((1023 + exponent) as u64) << 52);
        SafeRange {
            max_sum,
            min_square_sum: power(min_square_sum),
            scale_down: power(scale_down),
            scale_up: power(scale_up),
        }
    }

    /// Returns the factor for the elements whose unscaled sum is `sum`: 1 if that sum is accepted. Only sums of squares can be too small.
    pub(crate) fn factor(&self, sum: f64, squares: bool) -> f64 {
        match sum.abs() {
            size if size.is_nan() || size > self.max_sum => self.scale_down,
            size if squares && size < self.min_square_sum => self.scale_up,
            _ => 1.0,
        }
    }
}

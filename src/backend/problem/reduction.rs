//! Reductions, and the loops that compute them: over kept dims and over reduced dims, each collapsed as far as strides allow.

use smallvec::SmallVec;

use crate::expr::Expr;
use crate::layout::collapse::StridedDims;
use crate::tensor::{Dims, Layout, Shape};
use crate::{Compute, Tensor};

/// Dims with the strides of one operand, innermost last; at least one dim.
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

    pub(crate) fn one(size: usize, stride: isize) -> Axes {
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

    /// The offset of position `i`, and how many positions from there on, at most `most`, are in the same innermost row.
    pub(crate) fn run(&self, i: usize, most: usize) -> (isize, usize) {
        let (inner, stride) = self.inner();
        let mut rest = i / inner;
        let mut at = (i % inner) as isize * stride;
        for (&n, &s) in self.sizes.iter().zip(&self.strides).rev().skip(1) {
            at += (rest % n) as isize * s;
            rest /= n;
        }
        (at, most.min(inner - i % inner))
    }

    /// Whether this is a single axis, of this size and stride.
    pub(crate) fn is_one(&self, size: usize, stride: isize) -> bool {
        self.sizes[..] == [size] && self.strides[..] == [stride]
    }

    /// The words of the kernels' struct: sizes, then strides.
    pub(crate) fn words(&self) -> SmallVec<[i64; 16]> {
        self.sizes.iter().map(|&n| n as i64).chain(self.strides.iter().map(|&s| s as i64)).collect()
    }
}

/// The loops of a reduction: result `o` reduces the elements at `start + kept[o] + reduced[r]` for every r.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReductionPlan {
    pub(crate) start: usize,
    pub(crate) kept: Axes,
    pub(crate) reduced: Axes,
    pub(crate) outs: usize,
    pub(crate) n: usize,
}

impl ReductionPlan {
    /// The plan for a layout that is not empty. With `in_order`, r is the row-major index over the reduced dims, as argmax needs.
    /// Otherwise these are reordered by descending stride, and negative strides reversed.
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
            // Broadcast dims come first, so that the dims after them can be collapsed.
            inner.sort_by_key(|&(_, stride)| std::cmp::Reverse(if stride == 0 { isize::MAX } else { stride }));
        }
        let reduced = Axes::new(inner.into_iter());
        let (outs, n) = (kept.count(), reduced.count());
        ReductionPlan { start: start as usize, kept, reduced, outs, n }
    }

    /// Whether the elements of neighbouring results are closer together in memory than those of one result.
    pub(crate) fn by_column(&self) -> bool {
        let ((columns, across), (n, along)) = (self.kept.inner(), self.reduced.inner());
        columns > 1 && n > 1 && across != 0 && across.unsigned_abs() < along.unsigned_abs()
    }
}

/// A checked reduction: the result exists, and neither it nor the reduced part of the input is empty.
pub(crate) struct Reduction<'a> {
    pub(crate) op: &'static str,
    /// The number of the operation's row in the table of reductions.
    pub(crate) id: usize,
    pub(crate) rule: &'a Rule,
    pub(crate) x: &'a Tensor,
    /// For each dim of x, whether it is reduced.
    pub(crate) mask: &'a [bool],
    /// The result, which is contiguous.
    pub(crate) out: &'a Tensor,
    /// Scalar 0 of [`Rule::finish`]: the number of elements, or their degrees of freedom.
    pub(crate) number: f64,
}

impl Reduction<'_> {
    /// The loops that compute it.
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
    fn a_transposed_tensor_summed_whole_is_one_run() {
        let plan = ReductionPlan::new(&layout(&[4, 3, 2], &[1, 8, 4], 5), &[true; 3], false);
        assert_eq!((&plan.reduced.sizes[..], &plan.reduced.strides[..]), (&[24][..], &[1][..]));
        assert_eq!((plan.start, plan.outs, plan.n), (5, 1, 24));
        let ordered = ReductionPlan::new(&layout(&[4, 3, 2], &[1, 8, 4], 5), &[true; 3], true);
        assert_eq!(ordered.reduced.sizes[..], [4, 6]);
    }

    #[test]
    fn flipped_dims_walk_forwards() {
        let plan = ReductionPlan::new(&layout(&[3, 4], &[4, -1], 3), &[true, true], false);
        assert_eq!((plan.start, &plan.reduced.sizes[..], &plan.reduced.strides[..]), (0, &[12][..], &[1][..]));
    }

    #[test]
    fn columns_are_told_from_rows() {
        let shape = layout(&[5, 7], &[7, 1], 0);
        assert!(ReductionPlan::new(&shape, &[true, false], false).by_column());
        assert!(!ReductionPlan::new(&shape, &[false, true], false).by_column());
    }

    #[test]
    fn runs_cover_positions_in_order() {
        let axes = Axes { sizes: Dims::from_slice(&[2, 3]), strides: Dims::from_slice(&[10, -1]) };
        assert_eq!(axes.run(0, 9), (0, 3));
        assert_eq!(axes.run(1, 9), (-1, 2));
        assert_eq!(axes.run(4, 1), (9, 1));
        assert_eq!(axes.words()[..], [2, 3, 10, -1]);
    }
}

/// How elements are combined.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Combination {
    Add,
    Mul,
    Max,
    Min,
    /// The index of the element that Max or Min gives.
    ArgMax,
    ArgMin,
}

impl Combination {
    pub(crate) fn is_arg(self) -> bool {
        matches!(self, Combination::ArgMax | Combination::ArgMin)
    }
}

/// What is applied to each element before it is combined.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Element {
    Itself,
    /// 1 where it is not zero, else 0.
    NonZero,
    Of(Expr),
}

/// The formula of a reduction.
#[derive(Debug, Clone)]
pub(crate) struct Rule {
    pub(crate) combination: Combination,
    pub(crate) element: Element,
    /// An expression over the combined value, input 0, and [`Reduction::number`], scalar 0; None for the value itself.
    pub(crate) finish: Option<Expr>,
    /// How a sum that leaves the accumulator's range is made again.
    pub(crate) rescaled: Option<Rescaled>,
    /// Whether it accumulates in i64 for every dtype.
    pub(crate) counts: bool,
}

/// Sums of floats that are made again, of elements times a power of two, where the plain sum overflows or its squares vanish.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rescaled {
    /// A sum over the number of its elements.
    Mean,
    /// The root of a sum of squares.
    Norm,
    /// A sum of squares over the degrees of freedom.
    Variance,
}

impl Rescaled {
    /// Whether the elements are squared, so that a small sum may have lost some.
    pub(crate) fn squares(self) -> bool {
        self != Rescaled::Mean
    }
}

/// The plain sums of squares that are exact enough, and the factors of elements where a sum is greater or less.
pub(crate) struct SafeRange {
    pub(crate) largest: f64,
    pub(crate) least: f64,
    pub(crate) down: f64,
    pub(crate) up: f64,
}

impl SafeRange {
    /// The range of sums that are accumulated in `compute`. No product of an element and its factor, squared, leaves this range.
    pub(crate) fn of(compute: Compute) -> SafeRange {
        let (largest, [least, down, up]) = match compute {
            Compute::F64 => (f64::MAX, [-900, -600, 700]),
            _ => (f32::MAX.into(), [-76, -80, 90]),
        };
        let power = |exponent: i64| f64::from_bits(((1023 + exponent) as u64) << 52);
        SafeRange { largest, least: power(least), down: power(down), up: power(up) }
    }

    /// The definitions `LARGEST`, `LEAST`, `DOWN` and `UP` of OpenCL C.
    pub(crate) fn defines(compute: Compute) -> String {
        let SafeRange { largest, least, down, up } = SafeRange::of(compute);
        let suffix = if compute == Compute::F64 { "" } else { "f" };
        let each = [("LARGEST", largest), ("LEAST", least), ("DOWN", down), ("UP", up)];
        each.map(|(name, value)| format!("#define {name} {value:e}{suffix}\n")).concat()
    }

    /// The factor of elements whose plain sum is `sum`, 1 where the sum is good. Only sums of `squares` may be too small.
    pub(crate) fn factor(&self, sum: f64, squares: bool) -> f64 {
        match sum.abs() {
            size if size.is_nan() || size > self.largest => self.down,
            size if squares && size < self.least => self.up,
            _ => 1.0,
        }
    }
}

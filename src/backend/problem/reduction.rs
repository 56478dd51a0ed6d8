//! How a reduction walks its tensor: kept and reduced dims apart, each with as few dims as its strides allow.

use smallvec::SmallVec;

use crate::Tensor;
use crate::expr::Expr;
use crate::layout::collapse::StridedDims;
use crate::tensor::{Dims, Layout, Shape};

/// Dims with the strides of one operand, innermost last; never empty.
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

    /// The element offset of position `i` and how many positions, at most `most`, follow evenly from there.
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

    /// As the kernels' structs have them: sizes, then strides.
    pub(crate) fn words(&self) -> SmallVec<[i64; 16]> {
        self.sizes.iter().map(|&n| n as i64).chain(self.strides.iter().map(|&s| s as i64)).collect()
    }
}

/// Result `o` reduces the elements at `start + kept[o] + reduced[r]` for every r.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ReductionPlan {
    pub(crate) start: usize,
    pub(crate) kept: Axes,
    pub(crate) reduced: Axes,
    pub(crate) outs: usize,
    pub(crate) n: usize,
}

impl ReductionPlan {
    /// For a layout that is not empty. `in_order` keeps position r the row-major position among the reduced dims, which
    /// argmax counts by; otherwise they are reordered to walk memory forwards, the smallest steps innermost.
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
            // A broadcast dim repeats everything inside it.
            inner.sort_by_key(|&(_, stride)| std::cmp::Reverse(if stride == 0 { isize::MAX } else { stride }));
        }
        let reduced = Axes::new(inner.into_iter());
        let (outs, n) = (kept.count(), reduced.count());
        ReductionPlan { start: start as usize, kept, reduced, outs, n }
    }

    /// Whether neighbouring results lie closer together in memory than the elements of one result.
    pub(crate) fn by_column(&self) -> bool {
        let ((columns, across), (n, along)) = (self.kept.inner(), self.reduced.inner());
        columns > 1 && n > 1 && across != 0 && across.unsigned_abs() < along.unsigned_abs()
    }
}

/// A reduction, checked: the result exists and has elements, and so does what is reduced.
pub(crate) struct Reduction<'a> {
    pub(crate) op: &'static str,
    /// Tells one row of the table from another.
    pub(crate) id: usize,
    pub(crate) rule: &'a Rule,
    pub(crate) x: &'a Tensor,
    /// For each dim of x, whether it is reduced.
    pub(crate) mask: &'a [bool],
    /// Contiguous.
    pub(crate) out: &'a Tensor,
}

impl Reduction<'_> {
    /// How the tensor is walked.
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

/// How elements come together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Combination {
    Add,
    Mul,
    Max,
    Min,
    /// The position of what Max or Min would choose.
    ArgMax,
    ArgMin,
}

impl Combination {
    pub(crate) fn is_arg(self) -> bool {
        matches!(self, Combination::ArgMax | Combination::ArgMin)
    }
}

/// What becomes of an element before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Element {
    Itself,
    /// 1 where it is not zero, else 0: its kernels are written out.
    Truth,
    Of(Expr),
}

/// What a launch does.
#[derive(Debug, Clone)]
pub(crate) struct Rule {
    pub(crate) combination: Combination,
    pub(crate) element: Element,
    /// Of the result, input 0, and the number of elements, scalar 0; None where it stays as it is.
    pub(crate) finish: Option<Expr>,
    /// Whether it accumulates in i64 whatever the elements are.
    pub(crate) counts: bool,
}

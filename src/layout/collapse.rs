//! Collapses adjacent dimensions into one, because every dimension costs time in strided kernels and tile loops.

use smallvec::SmallVec;

use crate::layout::shape::{Dims, Shape};

/// The dims of a row-major iteration over one shape, with adjacent dims collapsed where possible, and the strides of every operand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StridedDims {
    pub(crate) dims: Dims,
    /// One list of strides for each operand, in elements, as long as `dims`.
    pub(crate) strides: SmallVec<[Dims<isize>; 4]>,
}

impl StridedDims {
    /// Drops dimensions of size 1, and collapses adjacent dimensions wherever the strides of every operand allow it.
    pub(crate) fn new<'a>(shape: &Shape, operands: impl IntoIterator<Item = &'a [isize]>) -> StridedDims {
        let operands: SmallVec<[&[isize]; 6]> = operands.into_iter().collect();
        let mut dims = Dims::new();
        let mut strides: SmallVec<[Dims<isize>; 4]> = SmallVec::from_elem(Dims::new(), operands.len());
        for (d, &size) in shape.dims().iter().enumerate().filter(|(_, size)| **size != 1) {
            let merges =
                operands.iter().zip(&strides).all(|(s, kept)| kept.last().is_some_and(|&k| k == s[d] * size as isize));
            match dims.last_mut() {
                Some(last) if merges => {
                    *last *= size;
                    operands.iter().zip(&mut strides).for_each(|(s, kept)| *kept.last_mut().expect("as dims") = s[d]);
                }
                _ => {
                    dims.push(size);
                    operands.iter().zip(&mut strides).for_each(|(s, kept)| kept.push(s[d]));
                }
            }
        }
        StridedDims { dims, strides }
    }

    /// Returns the iteration with its dims reordered to visit operand `k` in memory order, or `None` if it already does.
    pub(crate) fn reordered_for(&self, k: usize) -> Option<StridedDims> {
        let step = |d: usize| self.strides[k][d].unsigned_abs();
        if (1..self.dims.len()).all(|d| step(d - 1) >= step(d)) {
            return None;
        }
        let mut order: Dims = (0..self.dims.len()).collect();
        order.sort_by_key(|&d| std::cmp::Reverse(step(d)));
        let dims: Dims = order.iter().map(|&d| self.dims[d]).collect();
        let strides: SmallVec<[Dims<isize>; 6]> =
            self.strides.iter().map(|s| order.iter().map(|&d| s[d]).collect()).collect();
        Some(StridedDims::new(&Shape::from(&dims[..]), strides.iter().map(|s| &s[..])))
    }

    /// True if operand `k` is contiguous in iteration order: element `e` of the iteration is element `e` of the operand.
    pub(crate) fn is_contiguous(&self, k: usize) -> bool {
        self.is_contiguous_from(0, k)
    }

    /// True if operand `k` is contiguous, like [`is_contiguous`](Self::is_contiguous), within dim `d` and the dims after it.
    pub(crate) fn is_contiguous_from(&self, d: usize, k: usize) -> bool {
        let mut step = 1;
        self.dims[d..].iter().zip(&self.strides[k][d..]).rev().all(|(&size, &stride)| {
            let next = stride == step;
            step *= size as isize;
            next
        })
    }

    /// Returns the offset of every operand at element `element` of the iteration.
    pub(crate) fn offsets(&self, element: usize) -> SmallVec<[isize; 8]> {
        let mut offsets: SmallVec<[isize; 8]> = SmallVec::from_elem(0, self.strides.len());
        let mut rest = element;
        for (d, &size) in self.dims.iter().enumerate().rev() {
            let i = if d == 0 { rest } else { rest % size };
            rest /= size;
            offsets.iter_mut().zip(&self.strides).for_each(|(offset, strides)| *offset += i as isize * strides[d]);
        }
        offsets
    }

    /// Splits off the last dim, and returns its size and the iteration over the outer dims. Returns `None` unless the size is below
    /// `limit` and below the size of the dim before.
    pub(crate) fn split_short_rows(&self, limit: usize) -> Option<(usize, StridedDims)> {
        let (&n, dims) = self.dims.split_last()?;
        let strides = self.strides.iter().map(|strides| Dims::from_slice(&strides[..dims.len()]));
        let outer = || StridedDims { dims: Dims::from_slice(dims), strides: strides.collect() };
        (n < limit && *dims.last()? > n).then(|| (n, outer()))
    }

    /// Returns the iteration with the last two of at least three dims exchanged, if the last has fewer than `limit` elements and fewer than
    /// the dim before: runs along the last dim become longer. Otherwise returns `None`.
    pub(crate) fn with_longer_rows(&self, limit: usize) -> Option<StridedDims> {
        let [.., _, before, last] = self.dims[..] else { return None };
        let mut exchanged = StridedDims { dims: self.dims.clone(), strides: self.strides.clone() };
        let end = self.dims.len();
        exchanged.dims.swap(end - 2, end - 1);
        exchanged.strides.iter_mut().for_each(|strides| strides.swap(end - 2, end - 1));
        (last < limit && last < before).then_some(exchanged)
    }

    /// Splits elements `first..first + len` into runs along the last dimension, and calls
    /// `f(elements before the run, offset of each operand, length of the run)` for each run.
    pub(crate) fn for_each_run(&self, first: usize, len: usize, mut f: impl FnMut(usize, &[isize], usize)) {
        let Some((&inner, outer)) = self.dims.split_last() else {
            let zeros: SmallVec<[isize; 8]> = SmallVec::from_elem(0, self.strides.len());
            return f(0, &zeros, len);
        };
        let mut index: Dims = SmallVec::from_elem(0, outer.len());
        let mut rest = first / inner;
        for (i, &size) in index.iter_mut().zip(outer).rev() {
            *i = rest % size;
            rest /= size;
        }
        let mut column = first % inner;
        let mut done = 0;
        let mut offsets: SmallVec<[isize; 8]> = SmallVec::from_elem(0, self.strides.len());
        while done < len {
            let run = (inner - column).min(len - done);
            for (offset, s) in offsets.iter_mut().zip(&self.strides) {
                let last = s[outer.len()] * column as isize;
                *offset = s.iter().zip(&index).fold(last, |sum, (&s, &i)| sum + s * i as isize);
            }
            f(done, &offsets, run);
            done += run;
            column = 0;
            for (i, &size) in index.iter_mut().zip(outer).rev() {
                *i += 1;
                if *i < size {
                    break;
                }
                *i = 0;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contiguous_operands_become_one_dimension() {
        let strided = StridedDims::new(&Shape::from([2, 3, 4]), [&[12, 4, 1][..], &[12, 4, 1]]);
        assert_eq!(strided.dims[..], [24]);
        assert!(strided.is_contiguous(0) && strided.is_contiguous(1));
    }

    #[test]
    fn a_broadcast_row_keeps_two_dims() {
        let strided = StridedDims::new(&Shape::from([2, 3, 4]), [&[12, 4, 1][..], &[0, 0, 1]]);
        assert_eq!(strided.dims[..], [6, 4]);
        assert_eq!(strided.strides[1][..], [0, 1]);
        assert!(strided.is_contiguous(0) && !strided.is_contiguous(1));
    }

    #[test]
    fn dims_of_size_one_and_scalars_are_dropped() {
        assert!(StridedDims::new(&Shape::from([1, 1]), [&[7, 9][..]]).dims.is_empty());
        assert_eq!(StridedDims::new(&Shape::from([5, 1, 2]), [&[0, 3, 0][..]]).dims[..], [10]);
    }

    #[test]
    fn iteration_follows_a_transposed_result() {
        let strided = StridedDims::new(&Shape::from([2, 3, 4]), [&[1, 2, 6][..], &[12, 4, 1], &[0, 1, 0]]);
        let ordered = strided.reordered_for(0).unwrap();
        assert_eq!((&ordered.dims[..], &ordered.strides[0][..]), (&[4, 3, 2][..], &[6, 2, 1][..]));
        assert_eq!((&ordered.strides[1][..], &ordered.strides[2][..]), (&[1, 4, 12][..], &[0, 1, 0][..]));
        assert!(strided.reordered_for(1).is_none() && ordered.reordered_for(0).is_none());
        let both = StridedDims::new(&Shape::from([3, 4]), [&[1, 3][..], &[1, 3]]).reordered_for(0).unwrap();
        assert_eq!(both.dims[..], [12], "dims merge once they are in order");
    }

    #[test]
    fn short_rows_are_exchanged_for_longer_ones() {
        let strided = StridedDims::new(&Shape::from([4, 32, 2]), [&[64, 2, 1][..], &[64, 2, -1], &[0, 2, 1]]);
        let longer = strided.with_longer_rows(8).unwrap();
        assert_eq!((&longer.dims[..], &longer.strides[1][..]), (&[4, 2, 32][..], &[64, -1, 2][..]));
        assert!(longer.with_longer_rows(8).is_none(), "the rows are long already");
        assert!(strided.with_longer_rows(2).is_none(), "the rows are not shorter than the limit");
        let two = StridedDims::new(&Shape::from([32, 2]), [&[2, 1][..], &[2, -1]]);
        assert!(two.with_longer_rows(8).is_none(), "rows of all elements could not be split between threads");
    }

    #[test]
    fn runs_visit_every_element_once_from_any_start() {
        let shape = Shape::from([3, 2, 5]);
        let strides = [20isize, -7, 3];
        let strided = StridedDims::new(&shape, [&strides[..]]);
        let mut want = Vec::new();
        for i in 0..3 {
            for j in 0..2 {
                for k in 0..5 {
                    want.push(20 * i - 7 * j + 3 * k);
                }
            }
        }
        for first in 0..30 {
            for len in 0..=30 - first {
                let mut got = vec![isize::MIN; len];
                strided.for_each_run(first, len, |at, offsets, n| {
                    assert_eq!(strided.offsets(first + at)[..], *offsets);
                    (0..n).for_each(|i| got[at + i] = offsets[0] + 3 * i as isize);
                });
                assert_eq!(got, want[first..first + len]);
            }
        }
    }
}

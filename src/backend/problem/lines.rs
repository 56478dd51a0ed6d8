//! The lines of a tensor along one dim, for operations such as scans and sorts, which work on one line at a time.

use crate::Tensor;
use crate::layout::collapse::StridedDims;
use crate::layout::shape::{Dims, Shape};

/// The sizes or strides of all dims but d.
pub(crate) fn without<T: Copy, A: FromIterator<T>>(all: &[T], d: usize) -> A {
    all.iter().enumerate().filter(|(i, _)| *i != d).map(|(_, &x)| x).collect()
}

/// The lines of a tensor along a dim: one for each index of the other dims.
#[derive(Debug)]
pub(crate) struct Lines {
    /// The other dims, with the strides from the first element of one line to that of the next.
    pub(crate) strided: StridedDims,
    pub(crate) count: usize,
    /// The elements of a line, and the stride between them.
    pub(crate) n: usize,
    pub(crate) step: isize,
    /// The product of the sizes after the dim, which is the stride along a line of a contiguous result.
    pub(crate) inner: usize,
}

impl Lines {
    pub(crate) fn new(x: &Tensor, d: usize) -> Lines {
        let (shape, strides): (Shape, Dims<isize>) = (without(x.shape().dims(), d), without(x.strides(), d));
        Lines {
            strided: StridedDims::new(&shape, [&strides[..]]),
            count: shape.numel(),
            n: x.shape().dims()[d],
            step: x.strides()[d],
            inner: x.shape().dims()[d + 1..].iter().product(),
        }
    }

    /// Whether neighbouring lines are closer together in memory than neighbouring elements of one line.
    pub(crate) fn interleaved(&self) -> bool {
        let across = self.strided.strides[0].last().copied().unwrap_or(0).unsigned_abs();
        self.count > 1 && across != 0 && across < self.step.unsigned_abs()
    }

    pub(crate) fn rank(&self) -> usize {
        self.strided.dims.len().max(1)
    }
}

/// The step from one row of a tensor to the next, 0 where it has one, if a row is all dims from `d` on and is contiguous.
pub(crate) fn row_step(t: &Tensor, d: usize) -> Option<isize> {
    let steps = t.shape().dims().iter().zip(t.strides()).enumerate().rev().filter(|(_, (size, _))| **size != 1);
    let mut within = 1;
    // The step, and how far it is to what comes after all rows so far.
    let mut rows: Option<(isize, isize)> = None;
    for (i, (&size, &stride)) in steps {
        let n = size as isize;
        match rows {
            _ if i >= d && stride == within => within *= n,
            None if i < d => rows = Some((stride, stride * n)),
            Some((step, end)) if stride == end => rows = Some((step, end * n)),
            _ => return None,
        }
    }
    Some(rows.map_or(0, |(step, _)| step))
}

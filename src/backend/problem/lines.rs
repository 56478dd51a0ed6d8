//! The lines of a tensor along one dim, for operations that work on one line at a time, such as scans and sorts.

use crate::Tensor;
use crate::layout::collapse::StridedDims;
use crate::layout::shape::{Dims, Shape};

/// Copies `all`, the sizes or strides of all dims, without dim d.
pub(crate) fn without_dim<T: Copy, A: FromIterator<T>>(all: &[T], d: usize) -> A {
    all.iter().enumerate().filter(|(i, _)| *i != d).map(|(_, &x)| x).collect()
}

/// The lines of a tensor along one dim: one line for each index of the other dims.
#[derive(Debug)]
pub(crate) struct Lines {
    /// The other dims, with the strides from line to line.
    pub(crate) strided: StridedDims,
    pub(crate) count: usize,
    /// The number of elements of a line; `step` is the stride between them.
    pub(crate) n: usize,
    pub(crate) step: isize,
    /// The product of the sizes of the dims after the line's dim. In a contiguous result, it is the stride along a line.
    pub(crate) inner: usize,
}

impl Lines {
    pub(crate) fn new(x: &Tensor, d: usize) -> Lines {
        let (shape, strides): (Shape, Dims<isize>) = (without_dim(x.shape().dims(), d), without_dim(x.strides(), d));
        Lines {
            strided: StridedDims::new(&shape, [&strides[..]]),
            count: shape.numel(),
            n: x.shape().dims()[d],
            step: x.strides()[d],
            inner: x.shape().dims()[d + 1..].iter().product(),
        }
    }

    /// True if adjacent lines are closer in memory than adjacent elements of a line.
    pub(crate) fn is_interleaved(&self) -> bool {
        let across = self.strided.strides[0].last().copied().unwrap_or(0).unsigned_abs();
        self.count > 1 && across != 0 && across < self.step.unsigned_abs()
    }

    pub(crate) fn rank(&self) -> usize {
        self.strided.dims.len().max(1)
    }
}

/// Treats all dims from `d` on as one row. Returns the stride between rows, 0 if there is one row, None unless rows are contiguous and evenly
/// spaced.
pub(crate) fn row_stride(t: &Tensor, d: usize) -> Option<isize> {
    let steps = t.shape().dims().iter().zip(t.strides()).enumerate().rev().filter(|(_, (size, _))| **size != 1);
    let mut within = 1;
    // The stride between rows, and the stride that the next outer dim needs for the rows to be evenly spaced.
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

//! Lines of a tensor along one dim, for operations that see a whole line and give one as long: scans and sorts.

use crate::Tensor;
use crate::layout::collapse::StridedDims;
use crate::layout::shape::{Dims, Shape};

/// Sizes or strides of all dims but d.
pub(crate) fn without<T: Copy, A: FromIterator<T>>(all: &[T], d: usize) -> A {
    all.iter().enumerate().filter(|(i, _)| *i != d).map(|(_, &x)| x).collect()
}

/// Where the lines of a tensor along a dim lie.
#[derive(Debug)]
pub(crate) struct Lines {
    /// Where each line starts, from the tensor's first element on.
    pub(crate) strided: StridedDims,
    pub(crate) count: usize,
    /// Elements of a line, and the step from one to the next.
    pub(crate) n: usize,
    pub(crate) step: isize,
    /// Elements after the dim: the step along a line of a result.
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

    /// Whether neighbouring lines lie closer together in memory than the elements of one.
    pub(crate) fn side_by_side(&self) -> bool {
        let across = self.strided.strides[0].last().copied().unwrap_or(0).unsigned_abs();
        self.count > 1 && across != 0 && across < self.step.unsigned_abs()
    }

    pub(crate) fn rank(&self) -> usize {
        self.strided.dims.len().max(1)
    }
}

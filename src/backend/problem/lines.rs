//! Lines of a tensor along one dim, for operations that see a whole line and give one as long: scans and sorts.

use smallvec::SmallVec;

use crate::Tensor;
use crate::layout::collapse::StridedDims;
use crate::layout::shape::{Dims, Shape};

/// Where the lines of a tensor along a dim lie.
#[derive(Debug)]
pub(crate) struct Lines {
    /// Where each line starts, from the tensor's first element on.
    pub(crate) walk: StridedDims,
    pub(crate) count: usize,
    /// Elements of a line, and the step from one to the next.
    pub(crate) n: usize,
    pub(crate) step: isize,
    /// Elements after the dim: the step along a line of a result.
    pub(crate) inner: usize,
}

impl Lines {
    pub(crate) fn new(x: &Tensor, d: usize) -> Lines {
        let dims = || x.shape().dims().iter().zip(x.strides()).enumerate().filter(|(i, _)| *i != d).map(|(_, d)| d);
        let (shape, strides): (Shape, Dims<isize>) = (dims().map(|d| *d.0).collect(), dims().map(|d| *d.1).collect());
        Lines {
            walk: StridedDims::new(&shape, [&strides[..]]),
            count: shape.numel(),
            n: x.shape().dims()[d],
            step: x.strides()[d],
            inner: x.shape().dims()[d + 1..].iter().product(),
        }
    }

    /// Whether neighbouring lines lie closer together in memory than the elements of one.
    pub(crate) fn side_by_side(&self) -> bool {
        let across = self.walk.strides[0].last().copied().unwrap_or(0).unsigned_abs();
        self.count > 1 && across != 0 && across < self.step.unsigned_abs()
    }

    pub(crate) fn rank(&self) -> usize {
        self.walk.dims.len().max(1)
    }

    /// The walk as `kernels/walk.cl` has it: sizes, then strides.
    pub(crate) fn words(&self) -> SmallVec<[i64; 16]> {
        match self.walk.dims.is_empty() {
            true => SmallVec::from_slice(&[1, 0]),
            false => {
                let sizes = self.walk.dims.iter().map(|&n| n as i64);
                sizes.chain(self.walk.strides[0].iter().map(|&s| s as i64)).collect()
            }
        }
    }
}

//! Softmax, log-softmax, logsumexp and their gradients over rows.

use crate::Tensor;
use crate::backend::problem::lines::without;
use crate::layout::collapse::StridedDims;
use crate::layout::shape::{Dims, Shape};

/// The operation on each row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum RowOp {
    Softmax,
    /// Softmax with a [`SoftmaxMask`].
    MaskedSoftmax,
    LogSoftmax,
    LogSumExp,
    /// The gradients, from the result and its gradient.
    SoftmaxGrad,
    LogSoftmaxGrad,
}

/// How a mask applies to the elements of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Mask {
    #[default]
    None,
    /// A bool mask: elements where it is false are left out.
    Keep,
    /// A float mask, which is added to the elements.
    Add,
}

/// The masks of a softmax.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SoftmaxMask {
    pub(crate) kind: Mask,
    /// The number of rows of a matrix under a causal mask, which keeps elements 0 to `first + i` of row i; 0 without one.
    pub(crate) causal: usize,
    pub(crate) first: usize,
}

impl SoftmaxMask {
    /// The number of elements of row r, of n, that the causal mask keeps.
    pub(crate) fn visible(self, r: usize, n: usize) -> usize {
        if self.causal == 0 { n } else { n.min(self.first + r % self.causal + 1) }
    }
}

/// Rows of n elements in three operands, with the strides from row to row in `strided` and those along a row in `steps`.
#[derive(Debug)]
pub(crate) struct SoftmaxRows {
    pub(crate) strided: StridedDims,
    pub(crate) n: usize,
    pub(crate) steps: [isize; 3],
    pub(crate) mask: SoftmaxMask,
}

impl SoftmaxRows {
    /// The rows of `shape` along dim d, of operands with these strides.
    pub(crate) fn new(shape: &Shape, d: usize, operands: [&[isize]; 3]) -> SoftmaxRows {
        let rest: Shape = without(shape.dims(), d);
        let starts = operands.map(|strides| -> Dims<isize> { without(strides, d) });
        let strided = StridedDims::new(&rest, starts.iter().map(|s| &s[..]));
        SoftmaxRows { strided, n: shape.dims()[d], steps: operands.map(|s| s[d]), mask: SoftmaxMask::default() }
    }

    pub(crate) fn count(&self) -> usize {
        self.strided.dims.iter().product()
    }
}

/// An operation on rows along dim `d` of x and z, which have one shape.
pub(crate) struct Softmax<'a> {
    pub(crate) kind: RowOp,
    pub(crate) x: &'a Tensor,
    /// The mask, or the second operand of a gradient; x where there is none.
    pub(crate) z: &'a Tensor,
    pub(crate) out: &'a Tensor,
    pub(crate) d: usize,
    pub(crate) mask: SoftmaxMask,
}

impl Softmax<'_> {
    /// The rows of x, the result and z.
    pub(crate) fn rows(&self) -> SoftmaxRows {
        let operands = [self.x.strides(), self.out.strides(), self.z.strides()];
        SoftmaxRows { mask: self.mask, ..SoftmaxRows::new(self.x.shape(), self.d, operands) }
    }
}

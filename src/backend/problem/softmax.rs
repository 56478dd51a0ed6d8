//! Softmax, log-softmax, logsumexp and their gradients over rows.

use crate::Tensor;
use crate::backend::problem::lines::without_dim;
use crate::layout::collapse::StridedDims;
use crate::layout::shape::{Dims, Shape};

/// The operation that is applied to each row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum RowOp {
    Softmax,
    /// Softmax with a [`SoftmaxMask`].
    MaskedSoftmax,
    LogSoftmax,
    LogSumExp,
    /// The gradient of softmax, computed from the result of softmax and the gradient of that result.
    SoftmaxGrad,
    /// The gradient of log-softmax, computed from the result of log-softmax and the gradient of that result.
    LogSoftmaxGrad,
}

/// How a mask changes the elements of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum MaskKind {
    #[default]
    None,
    /// A bool mask: elements are excluded where the mask is false.
    Keep,
    /// A float mask, which is added to the elements.
    Add,
}

/// The masks of a softmax: the kind of the element mask, and the causal mask.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SoftmaxMask {
    pub(crate) kind: MaskKind,
    /// The number of rows of each causally masked matrix; 0 without a causal mask. Row i of a matrix keeps the elements 0 to `first + i`.
    pub(crate) causal: usize,
    pub(crate) first: usize,
}

impl SoftmaxMask {
    /// Returns the number of elements of row r that the causal mask keeps, of n.
    pub(crate) fn visible_len(self, r: usize, n: usize) -> usize {
        if self.causal == 0 { n } else { n.min(self.first + r % self.causal + 1) }
    }
}

/// Rows of n elements in three operands. `strided` holds the strides between rows, and `steps` the strides along a row.
#[derive(Debug)]
pub(crate) struct SoftmaxRows {
    pub(crate) strided: StridedDims,
    pub(crate) n: usize,
    pub(crate) steps: [isize; 3],
    pub(crate) mask: SoftmaxMask,
}

impl SoftmaxRows {
    /// Returns the rows of `shape` along dim d. `operands` holds the strides of the three operands.
    pub(crate) fn new(shape: &Shape, d: usize, operands: [&[isize]; 3]) -> SoftmaxRows {
        let rest: Shape = without_dim(shape.dims(), d);
        let starts = operands.map(|strides| -> Dims<isize> { without_dim(strides, d) });
        let strided = StridedDims::new(&rest, starts.iter().map(|s| &s[..]));
        SoftmaxRows { strided, n: shape.dims()[d], steps: operands.map(|s| s[d]), mask: SoftmaxMask::default() }
    }

    pub(crate) fn count(&self) -> usize {
        self.strided.dims.iter().product()
    }
}

/// An operation on the rows along dim `d` of x and z, which have the same shape.
pub(crate) struct Softmax<'a> {
    pub(crate) kind: RowOp,
    pub(crate) x: &'a Tensor,
    /// The mask, or the second operand of a gradient. For other operations, x again.
    pub(crate) z: &'a Tensor,
    pub(crate) out: &'a Tensor,
    pub(crate) d: usize,
    pub(crate) mask: SoftmaxMask,
}

impl Softmax<'_> {
    /// Returns the rows of x, of the result and of z, in this order.
    pub(crate) fn rows(&self) -> SoftmaxRows {
        let operands = [self.x.strides(), self.out.strides(), self.z.strides()];
        SoftmaxRows { mask: self.mask, ..SoftmaxRows::new(self.x.shape(), self.d, operands) }
    }
}

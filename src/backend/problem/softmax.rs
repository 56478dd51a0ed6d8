//! Softmax and its kin over rows.

use crate::Tensor;
use crate::backend::problem::lines::without;
use crate::layout::collapse::StridedDims;
use crate::layout::shape::{Dims, Shape};

/// What a row becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum RowOp {
    Softmax,
    /// Of the part of a row that [`SoftmaxMask`] says.
    MaskedSoftmax,
    LogSoftmax,
    LogSumExp,
    /// Of the result and its gradient.
    SoftmaxGrad,
    LogSoftmaxGrad,
}

/// How the third operand masks a row's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Mask {
    #[default]
    None,
    /// Elements where it is false are left out.
    Keep,
    /// It is added to the elements.
    Add,
}

/// The mask of a softmax: which elements of a row take part.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SoftmaxMask {
    pub(crate) kind: Mask,
    /// The rows of a matrix under a causal mask, of which row i sees the elements up to `first + i`; 0 without one.
    pub(crate) causal: usize,
    pub(crate) first: usize,
}

impl SoftmaxMask {
    /// How many of its n elements row r sees.
    pub(crate) fn visible(self, r: usize, n: usize) -> usize {
        if self.causal == 0 { n } else { n.min(self.first + r % self.causal + 1) }
    }
}

/// Rows of n elements: where each starts in up to three operands, and the step along a row in each.
#[derive(Debug)]
pub(crate) struct SoftmaxRows {
    pub(crate) strided: StridedDims,
    pub(crate) n: usize,
    pub(crate) steps: [isize; 3],
    pub(crate) mask: SoftmaxMask,
}

impl SoftmaxRows {
    /// Rows of `shape` along dim d.
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
    /// A second operand; x where there is none.
    pub(crate) z: &'a Tensor,
    pub(crate) out: &'a Tensor,
    pub(crate) d: usize,
    pub(crate) mask: SoftmaxMask,
}

impl Softmax<'_> {
    /// Where the rows of x, the result and z lie.
    pub(crate) fn rows(&self) -> SoftmaxRows {
        let operands = [self.x.strides(), self.out.strides(), self.z.strides()];
        SoftmaxRows { mask: self.mask, ..SoftmaxRows::new(self.x.shape(), self.d, operands) }
    }
}

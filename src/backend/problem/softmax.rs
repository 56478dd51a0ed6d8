//! Softmax and its kin over rows.

use crate::Tensor;
use crate::layout::collapse::Walk;
use crate::layout::shape::{Dims, Shape};

/// What a row becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum RowOp {
    Softmax,
    /// Of the part of a row that [`Sight`] says.
    MaskedSoftmax,
    LogSoftmax,
    LogSumExp,
    /// Of the result and its gradient.
    SoftmaxGrad,
    LogSoftmaxGrad,
}

/// What the third operand says about a row's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Mask {
    #[default]
    None,
    /// Only those where it is true are seen.
    Keep,
    /// It is added to them.
    Add,
}

/// What a softmax sees of its rows.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sight {
    pub(crate) mask: Mask,
    /// Row i of each matrix of so many sees elements up to `first + i`; 0: each sees all.
    pub(crate) causal: usize,
    pub(crate) first: usize,
}

impl Sight {
    /// How many elements row r sees of n.
    pub(crate) fn of(self, r: usize, n: usize) -> usize {
        if self.causal == 0 { n } else { n.min(self.first + r % self.causal + 1) }
    }
}

/// Rows of n elements: where each starts in up to three operands, and the step along a row in each.
#[derive(Debug)]
pub(crate) struct Rows {
    pub(crate) walk: Walk,
    pub(crate) n: usize,
    pub(crate) steps: [isize; 3],
    pub(crate) sight: Sight,
}

impl Rows {
    /// Rows of `shape` along dim d.
    pub(crate) fn new(shape: &Shape, d: usize, operands: [&[isize]; 3]) -> Rows {
        let without =
            |s: &[isize]| -> Dims<isize> { s.iter().enumerate().filter(|(i, _)| *i != d).map(|(_, &s)| s).collect() };
        let rest: Shape = shape.dims().iter().enumerate().filter(|(i, _)| *i != d).map(|(_, &n)| n).collect();
        let starts = operands.map(without);
        let walk = Walk::new(&rest, starts.iter().map(|s| &s[..]));
        Rows { walk, n: shape.dims()[d], steps: operands.map(|s| s[d]), sight: Sight::default() }
    }

    pub(crate) fn count(&self) -> usize {
        self.walk.dims.iter().product()
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
    pub(crate) sight: Sight,
}

impl Softmax<'_> {
    /// Where the rows of x, the result and z lie.
    pub(crate) fn rows(&self) -> Rows {
        let operands = [self.x.strides(), self.out.strides(), self.z.strides()];
        Rows { sight: self.sight, ..Rows::new(self.x.shape(), self.d, operands) }
    }
}

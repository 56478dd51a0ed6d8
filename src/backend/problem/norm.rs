//! Rows brought to mean 0 and variance 1.

use smallvec::SmallVec;

use crate::tensor::view::reshaped;
use crate::{Result, Shape, Tensor};

/// One normalisation, checked: what a kernel reads and writes, all of four dims where it is worked out.
pub(crate) struct Normalisation<'a> {
    pub(crate) x: &'a Tensor,
    pub(crate) y: &'a Tensor,
    /// The forward's input, in backward.
    pub(crate) z: Option<&'a Tensor>,
    pub(crate) weight: Option<&'a Tensor>,
    pub(crate) bias: Option<&'a Tensor>,
    /// The mean of each row, `1 / sqrt(variance + eps)` and the variance, in the compute type: `[3, rows]`, contiguous. Backward reads
    /// the first two.
    pub(crate) statistics: &'a Tensor,
    /// In backward with one weight a row: `[2, rows]`.
    pub(crate) sums: Option<&'a Tensor>,
    /// In backward, with weights for each column, where their gradients are added up on the way: [`cpu::columns`].
    pub(crate) columns: Option<&'a Tensor>,
    pub(crate) eps: f64,
    pub(crate) rms: bool,
    /// The variance over eps is all that is wanted, or its root; not on processors.
    pub(crate) variance: Option<bool>,
}

impl Normalisation<'_> {
    /// All tensors, in the order of the kernel's arguments.
    pub(crate) fn tensors(&self) -> SmallVec<[&Tensor; 7]> {
        let mut all = SmallVec::from_slice(&[self.x, self.y]);
        all.extend(
            [self.z, self.weight, self.bias, Some(self.statistics), self.sums, self.columns].into_iter().flatten(),
        );
        all
    }

    /// The same of x, y, weight and bias as these.
    pub(crate) fn of<'a>(&'a self, (x, y, weight, bias): &'a Views) -> Normalisation<'a> {
        Normalisation { x, y, weight: weight.as_ref(), bias: bias.as_ref(), ..*self }
    }

    pub(crate) fn count(&self) -> usize {
        self.x.shape().dims()[..2].iter().product()
    }

    pub(crate) fn len(&self) -> usize {
        self.x.shape().dims()[2..].iter().product()
    }
}

/// x, y, weight and bias as four dims.
pub(crate) type Views = (Tensor, Tensor, Option<Tensor>, Option<Tensor>);

/// The first parts of a tensor `[parts, rows]`: one number for each row in each (PyTorch's `unbind`).
pub(crate) fn unbind<const PARTS: usize>(op: &'static str, t: &Tensor) -> Result<[Tensor; PARTS]> {
    let part = |k| t.layout.select(op, 0, k as isize).map(|layout| t.with_layout(layout));
    let parts = (0..PARTS).map(part).collect::<Result<Vec<Tensor>>>()?;
    Ok(parts.try_into().unwrap_or_else(|_| unreachable!("as many as were selected")))
}

/// `t` as four dims: of the view where `dims` says so, else repeated.
pub(crate) fn broadcast_view(t: &Tensor, shape: &Shape, dims: [bool; 4]) -> Result<Tensor> {
    let own: Shape = shape.dims().iter().zip(dims).map(|(&n, own)| if own { n } else { 1 }).collect();
    let t = reshaped(t, &own)?;
    Ok(t.with_layout(t.layout.broadcast_to(shape)))
}

/// Mean, variance, weight and bias of each channel.
pub(crate) type Channels<'a> = [Option<&'a Tensor>; 4];

/// What tells one norm from another, for backward: owned.
#[derive(Clone)]
pub(crate) enum View {
    /// The last dims: `[rows, 1, 1, n]`.
    Last(usize),
    /// Groups of channels: `[N, groups, C / groups, rest]`.
    Groups(usize),
    /// Channels of the batch: `[1, C, N, rest]`.
    Batch,
}

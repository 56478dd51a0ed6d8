//! Layer, RMS, group and batch normalisation: rows brought to mean 0 and variance 1.

use smallvec::SmallVec;

use crate::tensor::view::reshape_detached;
use crate::{Result, Shape, Tensor};

/// One checked normalisation, forward or backward. All tensors are viewed as four dims before a kernel runs.
pub(crate) struct Normalisation<'a> {
    pub(crate) x: &'a Tensor,
    pub(crate) y: &'a Tensor,
    /// In backward, the input of the forward pass.
    pub(crate) z: Option<&'a Tensor>,
    pub(crate) weight: Option<&'a Tensor>,
    pub(crate) bias: Option<&'a Tensor>,
    /// The mean, `1 / sqrt(variance + eps)` and variance of each row, in the compute type: `[3, rows]`, contiguous.
    /// Backward reads the first two.
    pub(crate) statistics: &'a Tensor,
    /// In backward with one weight for each row: `[2, rows]`.
    pub(crate) sums: Option<&'a Tensor>,
    /// In backward with a weight for each column: partial sums of the weight's and bias's gradients.
    pub(crate) columns: Option<&'a Tensor>,
    pub(crate) eps: f64,
    pub(crate) rms: bool,
    /// If set, computes only the sum of squared deviations divided by `eps`, or its square root if true. OpenCL only.
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

    /// Replaces x, y, weight and bias by views.
    pub(crate) fn with_views<'a>(&'a self, (x, y, weight, bias): &'a NormViews) -> Normalisation<'a> {
        Normalisation { x, y, weight: weight.as_ref(), bias: bias.as_ref(), ..*self }
    }

    pub(crate) fn count(&self) -> usize {
        self.x.shape().dims()[..2].iter().product()
    }

    pub(crate) fn len(&self) -> usize {
        self.x.shape().dims()[2..].iter().product()
    }
}

/// A forward pass over tensors that need not be viewed as rows yet.
pub(crate) struct NormForward<'a> {
    pub(crate) given: Normalisation<'a>,
    pub(crate) grouping: &'a RowGrouping,
    /// True for each of the four dims that weight and bias have.
    pub(crate) dims: [bool; 4],
    /// Builds the row views.
    pub(crate) views: &'a dyn Fn() -> Result<NormViews>,
}

/// The variance of each row of x, or its square root. The last two of four dims form a row.
pub(crate) struct Variance<'a> {
    pub(crate) x: &'a Tensor,
    /// The result, with one contiguous element for each row.
    pub(crate) out: &'a Tensor,
    /// The degrees of freedom, by which the sum of squared deviations is divided.
    pub(crate) freedom: f64,
    pub(crate) root: bool,
}

/// Four-dim views of x, y, weight and bias.
pub(crate) type NormViews = (Tensor, Tensor, Option<Tensor>, Option<Tensor>);

/// Selects the first `PARTS` indices along dim 0 of a tensor `[parts, rows]` (PyTorch's `unbind`).
pub(crate) fn unbind<const PARTS: usize>(op: &'static str, t: &Tensor) -> Result<[Tensor; PARTS]> {
    let part = |k| t.layout.select(op, 0, k as isize).map(|layout| t.with_layout(layout));
    let parts = (0..PARTS).map(part).collect::<Result<Vec<Tensor>>>()?;
    Ok(parts.try_into().unwrap_or_else(|_| unreachable!("as many as were selected")))
}

/// Views `t` as four dims: dims marked in `dims` have the size of `shape`, the others are broadcast.
pub(crate) fn broadcast_view(t: &Tensor, shape: &Shape, dims: [bool; 4]) -> Result<Tensor> {
    let own: Shape = shape.dims().iter().zip(dims).map(|(&n, own)| if own { n } else { 1 }).collect();
    let t = reshape_detached(t, &own)?;
    Ok(t.with_layout(t.layout.broadcast_to(shape)))
}

/// The mean, variance, weight and bias of each channel.
pub(crate) type Channels<'a> = [Option<&'a Tensor>; 4];

/// How a norm groups elements into rows; stored for backward.
#[derive(Clone)]
pub(crate) enum RowGrouping {
    /// A row is the last dims: `[rows, 1, 1, n]`.
    Last(usize),
    /// A row is a group of channels: `[N, groups, C / groups, rest]`.
    Groups(usize),
    /// A row is one channel of the whole batch: `[1, C, N, rest]`.
    Batch,
}

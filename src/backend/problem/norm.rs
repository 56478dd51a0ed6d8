//! Layer, RMS, group and batch normalisation, which bring each row to mean 0 and variance 1.

use smallvec::SmallVec;

use crate::tensor::view::reshape_detached;
use crate::{Result, Shape, Tensor};

/// A checked normalisation, forward or backward. All tensors are viewed as four dims before a kernel runs.
pub(crate) struct Normalisation<'a> {
    pub(crate) x: &'a Tensor,
    pub(crate) y: &'a Tensor,
    /// The input of the forward pass; `None` in the forward pass.
    pub(crate) z: Option<&'a Tensor>,
    pub(crate) weight: Option<&'a Tensor>,
    pub(crate) bias: Option<&'a Tensor>,
    /// The mean, `1 / sqrt(variance + eps)` and the variance of each row, in the compute type: `[3, rows]`, contiguous. The forward
    /// pass writes all three, the backward pass reads the first two.
    pub(crate) statistics: &'a Tensor,
    /// Row sums for the gradients of weight and bias, in a backward pass with one weight for each row: `[2, rows]`.
    pub(crate) sums: Option<&'a Tensor>,
    /// Partial sums of the gradients of weight and bias, in a backward pass with a weight for each column.
    pub(crate) columns: Option<&'a Tensor>,
    pub(crate) eps: f64,
    pub(crate) rms: bool,
    /// If set, only the sum of squared deviations divided by `eps` is computed, or with true its square root. OpenCL only.
    pub(crate) variance: Option<bool>,
}

impl Normalisation<'_> {
    /// Returns all tensors, in the order of the kernel's arguments.
    pub(crate) fn tensors(&self) -> SmallVec<[&Tensor; 7]> {
        let mut all = SmallVec::from_slice(&[self.x, self.y]);
        all.extend(
            [self.z, self.weight, self.bias, Some(self.statistics), self.sums, self.columns].into_iter().flatten(),
        );
        all
    }

    /// Returns this normalisation with x, y, weight and bias replaced by views.
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

/// A forward pass whose tensors are not viewed as rows yet. If a launch plan is cached, no views are needed.
pub(crate) struct NormForward<'a> {
    pub(crate) given: Normalisation<'a>,
    pub(crate) grouping: &'a RowGrouping,
    /// For each of the four dims, whether weight and bias have that dim.
    pub(crate) dims: [bool; 4],
    /// Creates the views of the tensors as rows.
    pub(crate) views: &'a dyn Fn() -> Result<NormViews>,
}

/// The variance of each row of x, or with `root` its square root. x has four dims, and the last two form a row.
pub(crate) struct Variance<'a> {
    pub(crate) x: &'a Tensor,
    /// The result: contiguous, with one element for each row.
    pub(crate) out: &'a Tensor,
    /// The degrees of freedom. The sum of squared deviations is divided by this number.
    pub(crate) freedom: f64,
    pub(crate) root: bool,
}

/// Views with four dims of x, y, weight and bias.
pub(crate) type NormViews = (Tensor, Tensor, Option<Tensor>, Option<Tensor>);

/// Returns the slices `0..PARTS` along dim 0 of a tensor `[parts, rows]` (PyTorch's `unbind`).
pub(crate) fn unbind<const PARTS: usize>(op: &'static str, t: &Tensor) -> Result<[Tensor; PARTS]> {
    let part = |k| t.layout.select(op, 0, k as isize).map(|layout| t.with_layout(layout));
    let parts = (0..PARTS).map(part).collect::<Result<Vec<Tensor>>>()?;
    Ok(parts.try_into().unwrap_or_else(|_| unreachable!("as many as were selected")))
}

/// Views `t` with four dims. Dims that are marked in `dims` have the size that `shape` has, the other dims are broadcast.
pub(crate) fn broadcast_view(t: &Tensor, shape: &Shape, dims: [bool; 4]) -> Result<Tensor> {
    let own: Shape = shape.dims().iter().zip(dims).map(|(&n, own)| if own { n } else { 1 }).collect();
    let t = reshape_detached(t, &own)?;
    Ok(t.with_layout(t.layout.broadcast_to(shape)))
}

/// The mean, variance, weight and bias of each channel.
pub(crate) type Channels<'a> = [Option<&'a Tensor>; 4];

/// How a norm groups elements into rows. The backward pass uses the same grouping.
#[derive(Clone)]
pub(crate) enum RowGrouping {
    /// A row consists of the last dims: `[rows, 1, 1, n]`.
    Last(usize),
    /// A row is a group of channels of one sample: `[N, groups, C / groups, rest]`.
    Groups(usize),
    /// A row is one channel over the whole batch: `[1, C, N, rest]`.
    Batch,
}

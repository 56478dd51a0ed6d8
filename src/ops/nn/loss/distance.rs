//! Losses that compare vectors.

use crate::ops::dispatch::prelude::*;
use crate::ops::nn::loss::{losses, reduced, same_shape};
use crate::{DType, LossReduction, Result, Tensor, promote_types};

impl Tensor {
    /// `1 - cos` of two vectors whose target is 1, `max(0, cos - margin)` where it is -1 (PyTorch's
    /// `cosine_embedding_loss`, whose default margin is 0): both `[N, D]` and the target `[N]`, or `[D]` and a scalar.
    /// Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::mse_loss`].
    #[track_caller]
    pub fn cosine_embedding_loss(
        &self,
        other: &Tensor,
        target: &Tensor,
        margin: f64,
        reduction: LossReduction,
    ) -> Result<Tensor> {
        replaced!(op = "cosine_embedding_loss", [self, other, target], margin, reduction);
        same_shape(op, &[self, other])?;
        mismatch!(op if self.rank() == 0 || target.shape().dims() != &self.shape().dims()[..self.rank() - 1],
            self, target, "the inputs are [N, D] and the target [N], or [D] and a scalar");
        // The squares of PyTorch's roots, with 1e-12 added to each, would overflow.
        let cosines = || {
            // A norm may be beyond f16 where the cosine is not.
            let is_half = |dtype| matches!(dtype, DType::F16 | DType::BF16);
            let wide = |t: &Tensor| t.to_dtype(if is_half(t.dtype) { DType::F32 } else { t.dtype });
            let root = |t: &Tensor| Tensor::map(&[&t.norm(-1, true)?], |e| e[0].hypot(1e-6));
            let (a, b) = (wide(self)?, wide(other)?);
            let shares = Tensor::map(&[&a, &root(&a)?, &b, &root(&b)?], |e| (&e[0] / &e[1]) * (&e[2] / &e[3]))?;
            let (cosines, dtype) = (shares.sum(-1, false)?, promote_types(self.dtype, other.dtype));
            cosines.to_dtype(if is_half(dtype) { dtype } else { cosines.dtype })
        };
        losses(op, &[&cosines().named(op)?, target], reduction, |e| {
            let (near, far) = (1.0 - &e[0], &e[0] - margin);
            e[1].eq(1.0).select(near, 0.0) + e[1].eq(-1.0).select(far.lt(0.0).select(0.0, far), 0.0)
        })
    }

    /// `max(0, margin + |a - p| - |a - n|)` of an anchor (this tensor), a positive and a negative example (PyTorch's
    /// `triplet_margin_loss`, whose default margin is 1), by the p-norm with 1e-6 added to each difference, over the last dim.
    /// With `swap`, the distance between the two examples counts where it is less than that of the negative.
    /// Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::mse_loss`]; [`Error::Invalid`] for a p that is not above 0.
    #[track_caller]
    pub fn triplet_margin_loss(
        &self,
        positive: &Tensor,
        negative: &Tensor,
        margin: f64,
        p: f64,
        swap: bool,
        reduction: LossReduction,
    ) -> Result<Tensor> {
        replaced!(op = "triplet_margin_loss", [self, positive, negative], margin, p, swap, reduction);
        same_shape(op, &[self, positive, negative])?;
        let far = |a: &Tensor, b: &Tensor| a.pairwise_distance(b, p, 1e-6, false);
        let each = || {
            let (near, mut other) = (far(self, positive)?, far(self, negative)?);
            if swap {
                other = other.minimum(&far(positive, negative)?)?;
            }
            let losses = Tensor::map(&[&near, &other], |e| {
                let loss = &e[0] - &e[1] + margin;
                loss.lt(0.0).select(0.0, loss)
            })?;
            reduced(losses, reduction)
        };
        each().named(op)
    }
}

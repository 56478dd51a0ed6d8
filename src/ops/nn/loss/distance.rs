//! Losses that compare vectors.

use crate::ops::dispatch::prelude::*;
use crate::ops::nn::loss::{losses, read_reduction, reduce_losses, same_shape};
use crate::promote_types;

operations! {
    /// Computes `1 - cos` for pairs of vectors with target 1, and `max(0, cos - margin)` for target -1 (PyTorch's
    /// `cosine_embedding_loss`, with a default margin of 0). Both inputs are `[N, D]` and the target is `[N]`, or both inputs are `[D]`
    /// and the target is a scalar. Differentiable.
    cosine_embedding_loss(input1: x, input2: x, target: x, margin: float = 0, reduction: text @read_reduction = "mean") functional:
        Loss, Floats -> Same, differentiable = |op, self, other, target, margin, reduction| {
        same_shape(op, &[self, other])?;
        mismatch!(op if self.rank() == 0 || target.shape().dims() != &self.shape().dims()[..self.rank() - 1],
            self, target, "the inputs are [N, D] and the target [N], or [D] and a scalar");
        // PyTorch squares the norms, which can overflow, and adds 1e-12 to each square. `hypot` computes the root of such a sum without
        // squares.
        let cosines = || {
            // The norm may overflow f16 even if the cosine does not, so it is computed in f32.
            let is_half = |dtype| matches!(dtype, DType::F16 | DType::BF16);
            let wide = |t: &Tensor| t.to_dtype(if is_half(t.dtype) { DType::F32 } else { t.dtype });
            let root = |t: &Tensor| Tensor::map(&[&t.norm(-1, true)?], |e| e[0].hypot(1e-6));
            let (a, b) = (wide(self)?, wide(other)?);
            let normalised_products =
                Tensor::map(&[&a, &root(&a)?, &b, &root(&b)?], |e| (&e[0] / &e[1]) * (&e[2] / &e[3]))?;
            let (cosines, dtype) = (normalised_products.sum(-1, false)?, promote_types(self.dtype, other.dtype));
            cosines.to_dtype(if is_half(dtype) { dtype } else { cosines.dtype })
        };
        losses(op, &[&cosines().with_op(op)?, target], reduction, |e| {
            let (near, far) = (1.0 - &e[0], &e[0] - margin);
            e[1].eq(1.0).select(near, 0.0) + e[1].eq(-1.0).select(far.lt(0.0).select(0.0, far), 0.0)
        })
    };
    /// Computes `max(0, margin + |a - p| - |a - n|)` of an anchor (this tensor), a positive and a negative example (PyTorch's
    /// `triplet_margin_loss`, with a default margin of 1).
    ///
    /// The distances are p-norms over the last dim, with 1e-6 added to each difference. With `swap`, the distance between the two
    /// examples replaces the distance of the negative example if it is smaller. Differentiable. Fails as [`Tensor::mse_loss`] does, and
    /// with [`Error::Invalid`] unless p is above 0.
    triplet_margin_loss(anchor: x, positive: x, negative: x, margin: float = 1, p: float = 2, swap: bool = false,
        reduction: text @read_reduction = "mean") functional:
        Loss, Floats -> Same, differentiable = |op, self, positive, negative, margin, p, swap, reduction| {
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
            reduce_losses(losses, reduction)
        };
        each().with_op(op)
    };
}

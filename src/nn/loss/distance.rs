//! Losses that compare vectors, and the distances they are made of.

use super::{check_positive, losses, reduced, same_shape};
use crate::{Error, LossReduction, Result, Tensor};

impl Tensor {
    /// `x · y / (max(|x|, eps) max(|y|, eps))` along `dim` (PyTorch's `cosine_similarity`, whose defaults are 1 and 1e-8); the
    /// two broadcast. Differentiable.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let x = Tensor::from_slice(&[3f32, 4.0], [1, 2], Device::Cpu)?;
    /// let y = Tensor::from_slice(&[1f32, 0.0], [1, 2], Device::Cpu)?;
    /// assert!((x.cosine_similarity(&y, 1, 1e-8)?.item::<f32>()? - 0.6).abs() < 1e-6);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::DimOutOfRange`], [`Error::ShapeMismatch`], mismatching dtypes or devices, and
    /// [`Error::UnsupportedDType`] for integers.
    pub fn cosine_similarity(&self, other: &Tensor, dim: isize, eps: f64) -> Result<Tensor> {
        let op = "cosine_similarity";
        let similarity = || {
            let dot = self.mul(other)?.sum(dim, false)?;
            let (a, b) = (self.norm(dim, false)?, other.norm(dim, false)?);
            Tensor::map(&[&dot, &a, &b], |e| &e[0] / (floor(&e[1], eps) * floor(&e[2], eps)))
        };
        similarity().map_err(|e: Error| e.of(op))
    }

    /// The p-norm of `self - other + eps` along the last dim (PyTorch's `pairwise_distance`, whose defaults are 2 and 1e-6); the
    /// two broadcast. Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::cosine_similarity`]; [`Error::Invalid`] for a p that is not above 0.
    pub fn pairwise_distance(&self, other: &Tensor, p: f64, eps: f64, keepdim: bool) -> Result<Tensor> {
        let op = "pairwise_distance";
        check_positive(op, "p", p, false)?;
        self.dtype().check_float(op)?;
        let distance = || p_norm(&Tensor::map(&[self, other], |e| &e[0] - &e[1] + eps)?, p, -1, keepdim);
        distance().map_err(|e| e.of(op))
    }

    /// `1 - cos` of two vectors whose target is 1, `max(0, cos - margin)` where it is -1 (PyTorch's
    /// `cosine_embedding_loss`, whose default margin is 0): both `[N, D]` and the target `[N]`, or `[D]` and a scalar.
    /// Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::mse_loss`].
    pub fn cosine_embedding_loss(
        &self,
        other: &Tensor,
        target: &Tensor,
        margin: f64,
        reduction: LossReduction,
    ) -> Result<Tensor> {
        let op = "cosine_embedding_loss";
        same_shape(op, &[self, other])?;
        if self.rank() == 0 || target.shape().dims() != &self.shape().dims()[..self.rank() - 1] {
            let hint = "the inputs are [N, D] and the target [N], or [D] and a scalar";
            return Err(Error::ShapeMismatch { op, lhs: self.shape().clone(), rhs: target.shape().clone(), hint });
        }
        let sums = || -> Result<[Tensor; 3]> {
            let dot = |a: &Tensor, b: &Tensor| a.mul(b)?.sum(-1, false);
            Ok([dot(self, other)?, dot(self, self)?, dot(other, other)?])
        };
        let [dot, a, b] = sums().map_err(|e| e.of(op))?;
        losses(op, &[&dot, &a, &b, target], reduction, |e| {
            let cos = &e[0] / ((&e[1] + 1e-12) * (&e[2] + 1e-12)).sqrt();
            let (near, far) = (1.0 - &cos, &cos - margin);
            e[3].eq(1.0).select(near, 0.0) + e[3].eq(-1.0).select(far.lt(0.0).select(0.0, far), 0.0)
        })
    }

    /// `max(0, margin + |a - p| - |a - n|)` of an anchor (this tensor), a positive and a negative example (PyTorch's
    /// `triplet_margin_loss`, whose default margin is 1), by the p-norm with 1e-6 added to each difference, over the last dim.
    /// With `swap`, the distance between the two examples counts where it is less than that of the negative.
    /// Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::mse_loss`]; [`Error::Invalid`] for a p that is not above 0.
    pub fn triplet_margin_loss(
        &self,
        positive: &Tensor,
        negative: &Tensor,
        margin: f64,
        p: f64,
        swap: bool,
        reduction: LossReduction,
    ) -> Result<Tensor> {
        let op = "triplet_margin_loss";
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
        each().map_err(|e| e.of(op))
    }
}

fn floor(x: &crate::Expr, least: f64) -> crate::Expr {
    x.lt(least).select(least, x)
}

/// The p-norm along a dim.
pub(in crate::nn) fn p_norm(x: &Tensor, p: f64, dim: isize, keepdim: bool) -> Result<Tensor> {
    if p == 2.0 {
        x.norm(dim, keepdim)
    } else if p == 1.0 {
        x.abs()?.sum(dim, keepdim)
    } else if p == f64::INFINITY {
        x.abs()?.max(dim, keepdim)
    } else {
        x.abs()?.pow_scalar(p)?.sum(dim, keepdim)?.pow_scalar(1.0 / p)
    }
}

//! Vector norms of any order, distances and cosine similarity.

use crate::backend::problem::gemm::Gemm;
use crate::backend::problem::reduction::SafeRange;
use crate::ops::dispatch::prelude::*;
use crate::ops::linalg::products::scaled_product_into;
use crate::ops::reduce::statistics::sum_of_squares;
use crate::ops::reduce::{Mask, ReduceDims, reduced_shape};
use crate::promote_types;

/// The minimum number of points in one of the tensors for which Euclidean distances are computed by a matrix product.
const MATMUL_MIN_POINTS: usize = 26;

operations! {
    /// Returns the norm of order `ord` over `dims`, `sum(|x|^ord)^(1/ord)` (PyTorch's `linalg.vector_norm`). Order 0 counts the nonzero
    /// elements, and infinite orders return the largest or smallest magnitude. Differentiable; the gradient of a norm of 0 is 0. Fails as
    /// [`Tensor::norm`] does, and with [`Error::Invalid`] for an `ord` of NaN, and for an infinite order over no elements.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let t = Tensor::from_slice(&[3f32, -4.0], 2, Device::Cpu)?;
    /// let norm = |ord| t.vector_norm(ord, (), false)?.item::<f32>();
    /// assert_eq!((norm(1.0)?, norm(2.0)?, norm(f64::INFINITY)?), (7.0, 5.0, 4.0));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    vector_norm(input: x, ord: float = 2, dim: dims, keepdim: bool = false) linalg:
        LinearAlgebra, Floats -> Same, differentiable = |op, self, ord, dims, keepdim| {
        cast_first!(autocast_to_f32(&[self])?, |x| x[0].vector_norm(ord, dims, keepdim));
        self.norm_of_order(op, ord, dims, keepdim)
    };
    /// Returns the distances of order `p` between all rows of `[.., m, k]` and all rows of `[.., n, k]`, as `[.., m, n]` (PyTorch's
    /// `cdist`). The leading dims are broadcast. Differentiable; the gradient of a distance of 0 is 0.
    ///
    /// Euclidean distances between many points use one matrix product, which loses digits for points that nearly coincide. Floats.
    /// Fails with [`Error::Invalid`] for a negative `p`.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::from_slice(&[0f32, 0.0, 3.0, 0.0], [2, 2], Device::Cpu)?;
    /// let b = Tensor::from_slice(&[0f32, 4.0], [1, 2], Device::Cpu)?;
    /// assert_eq!(a.cdist(&b, 2.0)?.to_vec::<f32>()?, [4.0, 5.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    cdist(x1: x, x2: x, p: float = 2): LinearAlgebra, Floats -> Same, differentiable = |op, self, other, p| {
        cast_first!(autocast_to_f32(&[self, other])?, |x| x[0].cdist(&x[1], p));
        same_dtype(op, &[self, other])?;
        same_device(op, &[self, other])?;
        self.dtype.check_float(op)?;
        let ([.., m, k], [.., n, l]) = (self.shape().dims(), other.shape().dims()) else {
            return Err(shape_mismatch(op, self, other, "both are [.., points, k]"));
        };
        mismatch!(op if k != l, self, other, "points on both sides must have the same number of coordinates");
        invalid!(op if p.is_nan() || p < 0.0, "p is {p}, it must not be negative");
        if p == 2.0 && *m.max(n) >= MATMUL_MIN_POINTS && *k > 0 {
            return euclidean_distances(self, other);
        }
        let differences = self.unsqueeze(-2)?.sub(&other.unsqueeze(-3)?).with_op(op)?;
        // The maximum over no coordinates would be an error, but the distance is 0, as for p = 1.
        let p = if *k == 0 { 1.0 } else { p };
        differences.norm_of_order(op, p, ReduceDims::from(-1), false)
    };
    /// Returns the distance of order `p` between vectors along the last dim, with `eps` added to each difference (PyTorch's
    /// `pairwise_distance`, with defaults of 2 and 1e-6). Differentiable. Fails as [`Tensor::vector_norm`] does.
    pairwise_distance(x1: x, x2: x, p: float = 2, eps: float = 1e-6, keepdim: bool = false) functional:
        LinearAlgebra, Floats -> Same, differentiable = |op, self, other, p, eps, keepdim| {
        let difference = self.sub(other).with_op(op)?;
        difference.dtype.check_float(op)?;
        difference.add_scalar(eps)?.norm_of_order(op, p, ReduceDims::from(-1), keepdim)
    };
    /// Returns the cosine of the angle between vectors along `dim`: the dot product divided by the product of the norms, where each norm
    /// is clamped to at least `eps` (PyTorch's `cosine_similarity`, with defaults of 1 for `dim` and 1e-8 for `eps`). Differentiable.
    /// Fails as [`Tensor::norm`] does.
    cosine_similarity(x1: x, x2: x, dim: int = 1, eps: float = 1e-8) functional:
        LinearAlgebra, Floats -> Same, differentiable = |op, self, other, dim, eps| {
        cast_first!(autocast_to_f32(&[self, other])?, |x| x[0].cosine_similarity(&x[1], dim, eps));
        let dtype = promote_types(self.dtype, other.dtype);
        dtype.check_float(op)?;
        let compute = dtype.compute().dtype();
        if [self, other].iter().any(|t| t.dtype != compute) {
            let [a, b] = [self, other].map(|t| t.to_dtype(compute));
            return a?.cosine_similarity(&b?, dim, eps)?.to_dtype(dtype);
        }
        let shape = self.shape().broadcast(op, other.shape())?;
        let (a, b) = (self.expand(&shape)?, other.expand(&shape)?);
        // Elements are divided by the norms first, so that products neither overflow nor underflow.
        let norm = |t: &Tensor| t.norm(dim, true).with_op(op)?.clamp_min(eps);
        let cosines = || {
            let normalised_products =
                Tensor::map(&[&a, &norm(&a)?, &b, &norm(&b)?], |e| (&e[0] / &e[1]) * (&e[2] / &e[3]))?;
            normalised_products.sum(dim, false)
        };
        cosines().with_op(op)
    };
}

impl Tensor {
    fn norm_of_order(&self, op: &'static str, ord: f64, dims: ReduceDims, keepdim: bool) -> Result<Tensor> {
        self.dtype.check_float(op)?;
        if ord == 2.0 {
            return self.norm(dims, keepdim).with_op(op);
        }
        invalid!(op if ord.is_nan(), "the order is not a number");
        if matches!(self.dtype, DType::F16 | DType::BF16) {
            return self.to_dtype(DType::F32)?.norm_of_order(op, ord, dims, keepdim)?.to_dtype(self.dtype);
        }
        if ord == 0.0 {
            return self.ne_scalar(0)?.to_dtype(self.dtype)?.sum(dims, keepdim).with_op(op);
        }
        let sizes = self.abs()?;
        if ord == f64::INFINITY {
            return sizes.max(dims, keepdim).with_op(op);
        }
        if ord == f64::NEG_INFINITY {
            return sizes.min(dims, keepdim).with_op(op);
        }
        if ord == 1.0 {
            return sizes.sum(dims, keepdim).with_op(op);
        }
        // Elements are divided by the largest magnitude, or for negative orders by the smallest, so that their powers neither overflow
        // nor underflow.
        let sizes = sizes.detach();
        let scale = match (sizes.numel(), ord > 0.0) {
            (0, _) => Tensor::ones((), self)?,
            (_, true) => sizes.max(dims.clone(), true).with_op(op)?,
            (_, false) => sizes.min(dims.clone(), true).with_op(op)?,
        };
        let divisor = |extreme: &Expr| extreme.eq(0.0).or(extreme.is_finite().eq(0.0)).select(1.0, extreme);
        let powers = Tensor::map(&[&sizes, &scale], |e| (&e[0] / divisor(&e[1])).pow(Expr::constant(ord)))?;
        let powers = powers.sum(dims.clone(), true).with_op(op)?;
        let kept = Tensor::map(&[&powers, &scale], |e| e[0].pow(Expr::constant(1.0 / ord)) * divisor(&e[1]))?;
        let x = Saved::for_inputs(&[self], self);
        let kept = record_gradients_with_result(op, kept, &[self], move |_, grad, norm| {
            Tensor::map(&[x.get(op)?, norm, grad], |e| {
                let (x, norm, grad) = (&e[0], &e[1], &e[2]);
                let derivative = x.sign() * (x.abs() / norm).pow(Expr::constant(ord - 1.0));
                norm.eq(0.0).or(x.eq(0.0)).select(0.0, derivative * grad)
            })
        });
        if keepdim {
            return Ok(kept);
        }
        kept.reshape(reduced_shape(kept.shape(), &dims.mask(op, kept.shape())?, false))
    }
}

/// Computes `sqrt(|x|² + |y|² - 2 x y)` with one product, whose epilogue adds the squares and takes the root. If squares would overflow
/// or underflow, the points are scaled by a power of two.
fn euclidean_distances(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    let op = "cdist";
    let range = SafeRange::for_accumulator(x.dtype.compute());
    // The norm may overflow f16, but its squares are in the range of f32.
    let largest = if x.dtype == DType::F16 { f64::INFINITY } else { range.max_sum.sqrt() / 16.0 };
    let factor = |norm: &Expr| {
        let small = norm.lt(range.min_square_sum.sqrt()).select(range.scale_up, 1.0);
        norm.gt(largest).select(range.scale_down, small)
    };
    // Returns the scaled points, the sum of squares of each point, and the norm of each point.
    let parts = |t: &Tensor| -> Result<[Tensor; 3]> {
        let (t, norm) = (t.detach(), t.detach().norm(-1, true)?);
        let scaled = Tensor::map(&[&t, &norm], |e| &e[0] * factor(&e[1]))?;
        let last_dim: Mask = (1..=t.rank()).map(|d| d == t.rank()).collect();
        let squares = sum_of_squares(op, &scaled.to_dtype(t.dtype.compute().dtype())?, &last_dim, 1.0, false)?;
        Ok([scaled, squares, norm])
    };
    let ([x_scaled, xx, x_norm], [y_scaled, yy, y_norm]) = (parts(x)?, parts(y)?);
    let [y_scaled, yy, y_norm] = [y_scaled, yy, y_norm].map(|t| t.transpose(-1, -2));
    let (y_scaled, yy, y_norm) = (y_scaled?, yy?, y_norm?);
    let (product, [xx_of, yy_of, x_of, y_of]) = (Expr::input(0), [1, 2, 3, 4].map(Expr::input));
    let common = factor(&x_of.max(&y_of));
    let (by_x, by_y) = (&common / factor(&x_of), &common / factor(&y_of));
    let square = xx_of * by_x.square() + yy_of * by_y.square() - product * 2.0 * by_x * by_y;
    let epilogue = [square.max(Expr::constant(0.0)).sqrt() / common];
    let extras = [&xx, &yy, &x_norm, &y_norm];
    let gemm = Gemm { extras: &extras, ..Gemm::plain(op, &x_scaled, &y_scaled, &epilogue, &x.dtype) };
    let out = gemm.compute_one()?;
    let saved = [x, y].map(|t| Saved::for_inputs(&[x, y], t));
    Ok(record_gradients_with_result(op, out, &[x, y], move |i, grad, out| {
        let [x, y] = [saved[0].get(op)?, saved[1].get(op)?];
        let weights = Tensor::map(&[grad, out], |e| e[1].eq(0.0).select(0.0, &e[0] / &e[1]))?;
        // The gradient of a point is the sum of `weights * (x - y)` over the points of the other tensor.
        let (own, other, weights) = match i {
            0 => (x, y, weights),
            _ => (y, x, weights.transpose(-1, -2)?),
        };
        let mine = own.mul(&weights.sum(-1, true)?)?;
        scaled_product_into(op, None, Some((&mine, 1.into())), &weights, other, (-1).into())?.sum_to(own.shape())
    }))
}

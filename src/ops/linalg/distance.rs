//! Norms of any order, and the distances and angles made of them.

use crate::autograd::Saved;
use crate::backend::problem::gemm::Gemm;
use crate::expr::Expr;
use crate::ops::dispatch::autocast::widened;
use crate::ops::dispatch::operation::{Dtypes, Gives, Kind, Operation};
use crate::ops::dispatch::registry::replaced;
use crate::ops::linalg::products::product_in;
use crate::ops::reduce::ReduceDims;
use crate::ops::{recorded_with_result, same_device, same_dtype};
use crate::{DType, Error, Result, Tensor, promote_types};

/// From so many points on a side, Euclidean distances come from one matrix product.
const MANY: usize = 26;

pub(crate) static OPERATIONS: &[Operation] = &[
    Operation::new(
        "vector_norm",
        "linalg.vector_norm",
        Kind::LinearAlgebra,
        Dtypes::Floats,
        Gives::Same,
        (1, 3),
        |a| a.x(0)?.vector_norm(a.float(0)?, a.dims(1)?, a.bool(2)?),
    )
    .differentiable(),
    Operation::new("cdist", "cdist", Kind::LinearAlgebra, Dtypes::Floats, Gives::Same, (2, 1), |a| {
        a.x(0)?.cdist(a.x(1)?, a.float(0)?)
    })
    .differentiable(),
    Operation::new(
        "pairwise_distance",
        "nn.functional.pairwise_distance",
        Kind::LinearAlgebra,
        Dtypes::Floats,
        Gives::Same,
        (2, 3),
        |a| a.x(0)?.pairwise_distance(a.x(1)?, a.float(0)?, a.float(1)?, a.bool(2)?),
    )
    .differentiable(),
    Operation::new(
        "cosine_similarity",
        "nn.functional.cosine_similarity",
        Kind::LinearAlgebra,
        Dtypes::Floats,
        Gives::Same,
        (2, 2),
        |a| a.x(0)?.cosine_similarity(a.x(1)?, a.int(0)?, a.float(1)?),
    )
    .differentiable(),
];

impl Tensor {
    /// The norm of order `ord` over `dims`, `sum(|x|^ord)^(1/ord)` (PyTorch's `linalg.vector_norm`): of order 0 how many are
    /// not 0, of infinite order the greatest or least magnitude. Differentiable; where the norm is 0 the gradient is 0.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let t = Tensor::from_slice(&[3f32, -4.0], 2, Device::Cpu)?;
    /// let norm = |ord| t.vector_norm(ord, (), false)?.item::<f32>();
    /// assert_eq!((norm(1.0)?, norm(2.0)?, norm(f64::INFINITY)?), (7.0, 5.0, 4.0));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Tensor::norm`]; [`Error::Invalid`] for an `ord` of NaN, and the greatest of nothing.
    pub fn vector_norm(&self, ord: f64, dims: impl Into<ReduceDims>, keepdim: bool) -> Result<Tensor> {
        let (op, dims) = ("vector_norm", dims.into());
        replaced!(op, [self], ord, &dims, keepdim);
        if let Some(wide) = widened(&[self])? {
            return wide[0].vector_norm(ord, dims, keepdim);
        }
        self.normed(op, ord, dims, keepdim)
    }

    fn normed(&self, op: &'static str, ord: f64, dims: ReduceDims, keepdim: bool) -> Result<Tensor> {
        self.dtype.check_float(op)?;
        let named = |r: Result<Tensor>| r.map_err(|e| e.of(op));
        if ord == 2.0 {
            return named(self.norm(dims, keepdim));
        }
        if ord.is_nan() {
            return Err(Error::invalid(op, "the order is not a number"));
        }
        if matches!(self.dtype, DType::F16 | DType::BF16) {
            return self.to_dtype(DType::F32)?.normed(op, ord, dims, keepdim)?.to_dtype(self.dtype);
        }
        if ord == 0.0 {
            return named(self.ne_scalar(0)?.to_dtype(self.dtype)?.sum(dims, keepdim));
        }
        let sizes = self.abs()?;
        if ord == f64::INFINITY {
            return named(sizes.max(dims, keepdim));
        }
        if ord == f64::NEG_INFINITY {
            return named(sizes.min(dims, keepdim));
        }
        if ord == 1.0 {
            return named(sizes.sum(dims, keepdim));
        }
        let kept = named(sizes.detach().pow_scalar(ord)?.sum(dims.clone(), true))?.pow_scalar(1.0 / ord)?;
        let x = Saved::new(self);
        let kept = recorded_with_result(op, kept, &[self], move |_, grad, norm| {
            Tensor::map(&[x.get(op)?, norm, grad], |e| {
                let (x, norm, grad) = (&e[0], &e[1], &e[2]);
                let derivative = x.sign() * (x.abs() / norm).pow(Expr::constant(ord - 1.0));
                norm.eq(0.0).or(x.eq(0.0)).select(0.0, derivative * grad)
            })
        });
        if keepdim { Ok(kept) } else { without(op, &kept, &dims, self.rank()) }
    }

    /// Distances of order `p` between all rows of `[.., m, k]` and all of `[.., n, k]`: `[.., m, n]` (PyTorch's `cdist`), the
    /// dims before broadcast. Euclidean ones between many points come from one matrix product, which loses digits where points
    /// nearly coincide. Differentiable; where a distance is 0 the gradient is 0.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::from_slice(&[0f32, 0.0, 3.0, 0.0], [2, 2], Device::Cpu)?;
    /// let b = Tensor::from_slice(&[0f32, 4.0], [1, 2], Device::Cpu)?;
    /// assert_eq!(a.cdist(&b, 2.0)?.to_vec::<f32>()?, [4.0, 5.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::ShapeMismatch`]; [`Error::Invalid`] for a negative `p`; [`Error::UnsupportedDType`] for integers and bool,
    /// [`Error::DTypeMismatch`], [`Error::DeviceMismatch`], [`Error::OutOfMemory`].
    pub fn cdist(&self, other: &Tensor, p: f64) -> Result<Tensor> {
        let op = "cdist";
        replaced!(op, [self, other], p);
        if let Some(wide) = widened(&[self, other])? {
            return wide[0].cdist(&wide[1], p);
        }
        same_dtype(op, &[self, other])?;
        same_device(op, &[self, other])?;
        self.dtype.check_float(op)?;
        let ([.., m, k], [.., n, l]) = (self.shape().dims(), other.shape().dims()) else {
            let hint = "both are [.., points, k]";
            return Err(Error::ShapeMismatch { op, lhs: self.shape().clone(), rhs: other.shape().clone(), hint });
        };
        if k != l {
            let hint = "points have as many coordinates on both sides";
            return Err(Error::ShapeMismatch { op, lhs: self.shape().clone(), rhs: other.shape().clone(), hint });
        }
        if p.is_nan() || p < 0.0 {
            return Err(Error::invalid(op, format!("the order {p} is not one of a distance")));
        }
        if p == 2.0 && *m.max(n) >= MANY && *k > 0 {
            return euclidean(self, other);
        }
        let differences = self.unsqueeze(-2)?.sub(&other.unsqueeze(-3)?).map_err(|e| e.of(op))?;
        // The greatest of no coordinates is 0.
        let p = if *k == 0 { 1.0 } else { p };
        differences.normed(op, p, ReduceDims::from(-1), false)
    }

    /// The distance of order `p` between vectors along the last dim, `eps` being added to each difference (PyTorch's
    /// `pairwise_distance`, with p 2 and eps 1e-6 unless said). Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::vector_norm`]; [`Error::ShapeMismatch`], [`Error::DTypeMismatch`], [`Error::DeviceMismatch`].
    pub fn pairwise_distance(&self, other: &Tensor, p: f64, eps: f64, keepdim: bool) -> Result<Tensor> {
        let op = "pairwise_distance";
        replaced!(op, [self, other], p, eps, keepdim);
        let difference = self.sub(other).map_err(|e| e.of(op))?;
        difference.dtype.check_float(op)?;
        difference.add_scalar(eps)?.normed(op, p, ReduceDims::from(-1), keepdim)
    }

    /// The cosine of the angle between vectors along `dim`: their scalar product by the product of their norms, each at least
    /// `eps` (PyTorch's `cosine_similarity`, with dim 1 and eps 1e-8 unless said). Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::norm`]; [`Error::ShapeMismatch`], [`Error::DeviceMismatch`].
    pub fn cosine_similarity(&self, other: &Tensor, dim: isize, eps: f64) -> Result<Tensor> {
        let op = "cosine_similarity";
        replaced!(op, [self, other], dim, eps);
        if let Some(wide) = widened(&[self, other])? {
            return wide[0].cosine_similarity(&wide[1], dim, eps);
        }
        let dtype = promote_types(self.dtype, other.dtype);
        dtype.check_float(op)?;
        let compute = dtype.compute().dtype();
        if [self, other].iter().any(|t| t.dtype != compute) {
            let [a, b] = [self, other].map(|t| t.to_dtype(compute));
            return a?.cosine_similarity(&b?, dim, eps)?.to_dtype(dtype);
        }
        let shape = self.shape().broadcast(op, other.shape())?;
        let (a, b) = (self.expand(&shape)?, other.expand(&shape)?);
        let norm = |t: &Tensor| t.norm(dim, false).map_err(|e| e.of(op))?.clamp_min(eps);
        a.mul(&b)?.sum(dim, false)?.div(&norm(&a)?.mul(&norm(&b)?)?)
    }
}

/// `kept`, a reduction that kept its dims, without them.
fn without(op: &'static str, kept: &Tensor, dims: &ReduceDims, rank: usize) -> Result<Tensor> {
    let reduced = dims.mask(op, kept.shape())?;
    kept.reshape((0..rank).filter(|&d| !reduced[d]).map(|d| kept.shape().dims()[d]).collect::<crate::Shape>())
}

/// `sqrt(|x|² + |y|² - 2 x y)`: one product, with all but the squares in its epilogue.
fn euclidean(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    let op = "cdist";
    let squares = |t: &Tensor| -> Result<Tensor> {
        let t = t.detach().to_dtype(t.dtype.compute().dtype())?;
        t.mul(&t)?.sum(-1, true)
    };
    let (xx, yy) = (squares(x)?, squares(y)?.transpose(-1, -2)?);
    let across = y.detach().transpose(-1, -2)?;
    let square = Expr::input(1) + Expr::input(2) - Expr::input(0) * 2.0;
    let epilogue = [square.max(Expr::constant(0.0)).sqrt()];
    let gemm = Gemm { extras: &[&xx, &yy], ..Gemm::plain(op, x, &across, &epilogue, &x.dtype) };
    let out = gemm.run_one()?;
    let saved = [x, y].map(Saved::new);
    Ok(recorded_with_result(op, out, &[x, y], move |i, grad, out| {
        let [x, y] = [saved[0].get(op)?, saved[1].get(op)?];
        let weights = Tensor::map(&[grad, out], |e| e[1].eq(0.0).select(0.0, &e[0] / &e[1]))?;
        // The sum of weights * (x - y) over the points of the other side.
        let (own, other, weights) = match i {
            0 => (x, y, weights),
            _ => (y, x, weights.transpose(-1, -2)?),
        };
        let mine = own.mul(&weights.sum(-1, true)?)?;
        product_in(op, None, Some((&mine, 1.into())), &weights, other, (-1).into())?.sum_to(own.shape())
    }))
}

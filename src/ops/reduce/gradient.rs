//! Gradients of reductions. A gradient is the formula that the row states, or one of two rules.

use super::table::{Gradient, ReductionRow, rows};
use super::{Mask, ReduceDims, expand_reduced, reduce, reduced_count, reduced_shape};
use crate::ops::dispatch::prelude::*;
use crate::ops::elementwise::{apply, apply_tracked};

impl ReductionRow {
    /// Applies this reduction, as the method of the same name does. Fails as the method does.
    ///
    /// ```
    /// use claystone::{Device, Tensor, ops::REDUCTIONS};
    /// let sum = REDUCTIONS.iter().find(|row| row.name == "sum").unwrap();
    /// let x = Tensor::from_slice(&[1f32, 2.0], 2, Device::Cpu)?;
    /// assert_eq!(sum.apply(&x, (), false)?.item::<f32>()?, 3.0);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn apply(&'static self, x: &Tensor, dims: impl Into<ReduceDims>, keepdim: bool) -> Result<Tensor> {
        let _caller = Caller::enter();
        self.apply_recorded(x, &dims.into(), keepdim)
    }

    /// Applies this reduction, and records the result if the tensor is tracked.
    pub(crate) fn apply_recorded(&'static self, x: &Tensor, dims: &ReduceDims, keepdim: bool) -> Result<Tensor> {
        if self.can_exceed_elements()
            && let Some(wide) = autocast_to_f32(&[x])?
        {
            return self.apply_recorded(&wide[0], dims, keepdim);
        }
        self.apply_in(self.output(x.dtype)?, x, dims, keepdim)
    }

    /// Applies this reduction like [`apply_recorded`](Self::apply_recorded), with a result of the given dtype and without autocast.
    pub(crate) fn apply_in(
        &'static self,
        dtype: DType,
        x: &Tensor,
        dims: &ReduceDims,
        keepdim: bool,
    ) -> Result<Tensor> {
        let mask = dims.mask(self.name, x.shape())?;
        let tracked = autograd::is_tracked(&[x]) && dtype.is_float();
        // A norm may overflow f16 even if its gradient does not, so the backward pass reads the norm in f32.
        let is_wide = tracked && dtype == DType::F16 && self.name == rows::norm.name;
        let out = reduce(self.name, self, x, &mask, keepdim, if is_wide { DType::F32 } else { dtype }, None)?;
        if !tracked {
            return Ok(out);
        }
        let wide = is_wide.then(|| Saved::new(&out));
        let out = if is_wide { out.to_dtype(dtype)? } else { out };
        let (row, shape, device) = (self, x.shape().clone(), x.device());
        let backward = ReductionBackward { row, shape, mask, keepdim, dtype: x.dtype, device };
        Ok(match self.gradient {
            Gradient::None => out,
            Gradient::Formula(_) => backward.record_formula(x, out, wide),
            Gradient::EvenAmongTies => backward.record_even_among_ties(x, out),
            Gradient::ProductOfOthers => backward.record_product(x, out),
        })
    }
}

/// The data of a reduction that its backward pass needs.
struct ReductionBackward {
    row: &'static ReductionRow,
    shape: Shape,
    mask: Mask,
    keepdim: bool,
    dtype: DType,
    device: Device,
}

impl ReductionBackward {
    fn expand(&self, t: &Tensor) -> Tensor {
        expand_reduced(t, &self.shape, &self.mask, self.keepdim)
    }

    /// Records `out` with a gradient that is a formula. `wide` is the result in a wider dtype; if given, the first derivative reads it
    /// instead of `out`.
    fn record_formula(self, x: &Tensor, out: Tensor, wide: Option<Saved>) -> Tensor {
        let op = self.row.name;
        let derivative = self.row.derivative().expect("it has a formula");
        let of_grad_alone = !derivative.uses_input(0) && !derivative.uses_input(1);
        let saved_x = derivative.uses_input(0).then(|| Saved::new(x));
        let saved_y = derivative.uses_input(1).then(|| Saved::new(&out));
        autograd::record_differentiable(op, out, &[x], move |ctx| {
            let n = reduced_count(&self.shape, &self.mask) as f64;
            if of_grad_alone {
                return Ok(SmallVec::from_iter([Some(self.expand(&self.unexpanded_gradient(n, ctx)?))]));
            }
            let grad = self.expand(&ctx.grad()?);
            // For inputs that the formula does not read, the gradient is passed as a placeholder.
            let x = match &saved_x {
                Some(x) => x.get(op)?.shallow_clone(),
                None => grad.shallow_clone(),
            };
            let y = match (&wide, &saved_y) {
                (Some(wide), _) if !ctx.create_graph() => self.expand(wide.get(op)?),
                (_, Some(y)) => self.expand(&ctx.unpack_result(y)?),
                (_, None) => grad.shallow_clone(),
            };
            let (scalars, derivative) = ([Scalar::Float(n)], self.row.derivative().expect("it has a formula"));
            let params = Params::from_scalars(&scalars);
            let grad = apply_tracked(op, &[&x, &y, &grad], params, derivative, self.dtype, &|i| derivative.diff(i))?;
            Ok(SmallVec::from_iter([Some(grad)]))
        })
    }

    /// Computes a gradient that is the same for all elements of a result, before it is expanded to the shape of the input.
    fn unexpanded_gradient(&self, n: f64, ctx: &autograd::Context) -> Result<Tensor> {
        let Gradient::Formula(formula) = self.row.gradient else { unreachable!("it has a formula") };
        let derivative = |g: &Expr, n: &Expr| formula(g, g, g, n);
        let one = derivative(&Expr::constant(1.0), &Expr::constant(n)).as_const();
        match (ctx.grad_unless_one(), one) {
            (None, Some(factor)) => {
                Tensor::full(reduced_shape(&self.shape, &self.mask, self.keepdim), factor, (self.dtype, self.device))
            }
            (_, Some(1.0)) => ctx.grad(),
            _ => {
                let (grad, scalars) = (ctx.grad()?, [Scalar::Float(n)]);
                let derivative = derivative(&Expr::input(0), &Expr::scalar(0));
                let params = Params::from_scalars(&scalars);
                apply_tracked(self.row.name, &[&grad], params, &derivative, self.dtype, &|i| derivative.diff(i))
            }
        }
    }

    /// Records `out` with a gradient that is divided evenly among the elements that equal the result.
    fn record_even_among_ties(self, x: &Tensor, out: Tensor) -> Tensor {
        let op = self.row.name;
        let (saved, result) = (Saved::new(x), Saved::new(&out));
        autograd::record_differentiable(op, out, &[x], move |ctx| {
            let (x, result) = (saved.get(op)?.detach(), self.expand(&result.get(op)?.detach()));
            let chosen = [Expr::input(0).eq(Expr::input(1))];
            let chosen = apply(op, &[&x, &result], Params::default(), &chosen, &[DType::Bool])?.remove(0);
            let ties = reduce(op, &rows::sum, &chosen, &self.mask, true, DType::I64, None)?;
            let share = Expr::input(0) * Expr::input(1) / Expr::input(2);
            let inputs = [&self.expand(&ctx.grad()?), &chosen, &ties];
            let grad = apply_tracked(op, &inputs, Params::default(), &share, self.dtype, &|i| share.diff(i))?;
            Ok(SmallVec::from_iter([Some(grad)]))
        })
    }

    /// Records the gradient of a product, which is for each element the product of all other elements. Zeros are counted and left out of
    /// the product.
    fn record_product(self, x: &Tensor, out: Tensor) -> Tensor {
        let op = self.row.name;
        let saved = Saved::new(x);
        autograd::record_differentiable(op, out, &[x], move |ctx| {
            let x = saved.get(op)?;
            if ctx.create_graph() {
                return ctx.differentiate_through(&self.product_by_halves(x)?);
            }
            let (x0, one) = (Expr::input(0), Expr::constant(1.0));
            let is_zero = x0.eq(0.0);
            let exprs = [is_zero.select(&one, &x0), is_zero.clone()];
            let made = apply(op, &[x], Params::default(), &exprs, &[self.dtype, DType::Bool])?;
            let product = reduce(op, &rows::prod, &made[0], &self.mask, true, self.dtype, None)?;
            let zeros = reduce(op, &rows::sum, &made[1], &self.mask, true, DType::I64, None)?;
            let others = Expr::input(1) / is_zero.select(&one, &x0);
            let others = Expr::input(2).eq(is_zero).select(others, 0.0);
            let inputs = [x, &product, &zeros, &self.expand(&ctx.grad()?)];
            let grad = apply(op, &inputs, Params::default(), &[others * Expr::input(3)], &[self.dtype])?.remove(0);
            Ok(SmallVec::from_iter([Some(grad)]))
        })
    }

    /// Computes the product again by repeatedly multiplying the first half of the elements by the second half, so that second derivatives
    /// are right if elements are zero.
    fn product_by_halves(&self, x: &Tensor) -> Result<Tensor> {
        let side = |reduced: bool| self.mask.iter().enumerate().filter(move |(_, r)| **r == reduced);
        let order: Vec<isize> = side(false).chain(side(true)).map(|(d, _)| d as isize).collect();
        let mut n = reduced_count(&self.shape, &self.mask);
        let out = reduced_shape(&self.shape, &self.mask, self.keepdim);
        let mut y = x.permute(&order)?.reshape([out.numel(), n])?;
        if n == 0 {
            return Tensor::ones(out, x);
        }
        while n > 1 {
            let half = n / 2;
            let pairs = y.narrow(1, 0, half)?.mul(&y.narrow(1, half, half)?)?;
            y = if n.is_multiple_of(2) { pairs } else { Tensor::cat(&[pairs, y.narrow(1, 2 * half, 1)?], 1)? };
            n -= half;
        }
        y.reshape(&out)
    }
}

//! Matrix products: [`Tensor::matmul`], [`Tensor::linear`] and their gradients.
//!
//! The gradient of a product is a product of transposed views, written directly to the optimiser's flat gradient buffer if there is one.
//! A layer, `f(x wᵀ + b)`, takes one launch. In the backward pass, the product that computes the gradient of `f`'s result also multiplies
//! by the derivative of `f`, and the product for the weight also sums the gradient of the bias: one launch each.

use std::slice;

use smallvec::smallvec;

use crate::autograd::Factor;
use crate::backend::problem::gemm::{EPILOGUES, Gemm};
use crate::expr::program::Program;
use crate::ops::dispatch::prelude::*;
use crate::ops::{elementwise, reduce};

operations! {
    matmul(input: x, other: x): LinearAlgebra, Numbers -> Same, differentiable;
    /// Computes a fully connected layer, `x wᵀ + b` (PyTorch's `linear`). x is `[.., in]`, `weight` `[out, in]`, `bias` `[out]`, and the
    /// result is `[.., out]`. One launch. All tensors have one float dtype.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let x = Tensor::ones(&[5, 3], Device::Cpu)?;
    /// let (w, b) = (Tensor::ones(&[2, 3], Device::Cpu)?, Tensor::ones(&[2], Device::Cpu)?);
    /// assert_eq!(x.linear(&w, Some(&b))?.to_vec::<f32>()?, [4.0; 10]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    linear(input: x, weight: x, bias: x?) functional:
        NeuralNetwork, Numbers -> Same, differentiable = manual |op, self, weight, bias| {
        let tensors: &[&Tensor] = match &bias {
            Some(bias) => &[self, weight, bias],
            None => &[self, weight],
        };
        return_replacement!(op, tensors);
        linear_layer(self, weight, bias, None)
    };
}

impl Tensor {
    /// Returns the matrix product (PyTorch's `matmul`).
    ///
    /// `[.., m, k]` times `[.., k, n]` gives `[.., m, n]`; the leading dims broadcast. A vector on the left is treated as a row, and a
    /// vector on the right as a column; the extra dim is removed from the result. Two vectors give a scalar. One launch, without copies
    /// for any strides.
    ///
    /// Both tensors must have the same dtype; all dtypes are supported. Floats up to f32 are summed in f32, f64 in f64, and integers in
    /// i64, with wrapping. For bf16 on a CPU with AVX512-BF16, elements, products and sums below the smallest normal number (1.2e-38) may
    /// count as zero, as in PyTorch. Fails with [`Error::ShapeMismatch`] if the inner sizes differ, the leading dims do not broadcast, or
    /// an operand is a scalar.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::arange(0, 6, 1, Device::Cpu)?.reshape([2, 3])?;
    /// assert_eq!(a.matmul(&a.t()?)?.to_vec::<f32>()?, [5.0, 14.0, 14.0, 50.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn matmul(&self, rhs: &Tensor) -> Result<Tensor> {
        return_replacement!(op = "matmul", [self, rhs]);
        cast_first!(autocast_inputs(op, &[self, rhs])?, |x| x[0].matmul(&x[1]));
        same_dtype(op, &[self, rhs])?;
        mismatch!(op if self.rank() == 0 || rhs.rank() == 0, self, rhs, "both need at least one dimension");
        let (row, column) = (self.rank() == 1, rhs.rank() == 1);
        let (as_row, as_column) = (row.then(|| insert_dim(self, 0)), column.then(|| insert_dim(rhs, 1)));
        let (a, b) = (as_row.as_ref().unwrap_or(self), as_column.as_ref().unwrap_or(rhs));
        let mut out = plain_product(op, a, b, None).map_err(|error| match error {
            Error::ShapeMismatch { hint, .. } => shape_mismatch(op, self, rhs, hint), // the error names the shapes that the caller passed
            error => error,
        })?;
        if column {
            out = remove_dim(&out, out.rank() - 1);
        }
        if row {
            out = remove_dim(&out, out.rank() - 1 - usize::from(!column));
        }
        if !autograd::is_tracked(&[self, rhs]) {
            return Ok(out);
        }
        let (shape_a, shape_b) = (a.shape().clone(), b.shape().clone());
        let saved_a = rhs.requires_grad().then(|| Saved::new(self));
        let saved_b = self.requires_grad().then(|| Saved::new(rhs));
        Ok(autograd::record_differentiable(op, out, &[self, rhs], move |ctx| {
            let mut grad = ctx.grad()?;
            if row {
                grad = grad.unsqueeze(if column { -1 } else { -2 })?;
            }
            if column {
                grad = grad.unsqueeze(-1)?;
            }
            let mut gradients: Gradients = smallvec![None, None];
            if let Some(b) = saved_b.as_ref().filter(|_| ctx.needs_gradient(0)) {
                let b = if column { b.get(op)?.unsqueeze(1)? } else { b.unpack(op)? };
                let slot = ctx.slot(0).map(|s| if row { insert_dim(&s, 0) } else { s });
                let da = match ctx.create_graph() {
                    true => grad.matmul(&b.transpose(-2, -1)?)?.sum_to(&shape_a)?,
                    false => product_summed_to(op, &grad, &matrix_transpose(&b), &shape_a, slot)?,
                };
                gradients[0] = Some(if row { da.squeeze(0)? } else { da });
            }
            if let Some(a) = saved_a.as_ref().filter(|_| ctx.needs_gradient(1)) {
                let a = if row { a.get(op)?.unsqueeze(0)? } else { a.unpack(op)? };
                let slot = ctx.slot(1).map(|s| if column { insert_dim(&s, 1) } else { s });
                let db = match ctx.create_graph() {
                    true => a.transpose(-2, -1)?.matmul(&grad)?.sum_to(&shape_b)?,
                    false => product_summed_to(op, &matrix_transpose(&a), &grad, &shape_b, slot)?,
                };
                gradients[1] = Some(if column { db.squeeze(1)? } else { db });
            }
            Ok(gradients)
        }))
    }

    /// Computes [`Tensor::linear`] followed by a formula, `f(x wᵀ + b)`, in one launch.
    ///
    /// If a gradient will be computed, the same launch also stores `x wᵀ + b` for the backward pass. For relu, the backward pass needs the
    /// result instead, which must not be changed in place before. Fails as [`Tensor::linear`] does, and with [`Error::Invalid`] if `f`
    /// reads anything except its argument; [`Error::UnsupportedDType`] if `f` needs floats and the tensors are integers.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let x = Tensor::ones(&[1, 3], Device::Cpu)?;
    /// let w = Tensor::linspace(-1.0, 1.5, 6, Device::Cpu)?.reshape([2, 3])?;
    /// assert_eq!(x.linear_map(&w, None, |z| z.relu())?.to_vec::<f32>()?, [0.0, 3.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn linear_map(&self, weight: &Tensor, bias: Option<&Tensor>, f: impl Fn(&Expr) -> Expr) -> Result<Tensor> {
        let _caller = Caller::enter();
        let formula = [f(&Expr::input(0))];
        let plain = Program::shared(&formula);
        invalid!("linear_map" if plain.inputs() > 1 || plain.caller_scalars() > 0 || plain.seeds() > 0,
            "the formula reads more than its argument");
        let needs_float = plain.needs_float() && !self.dtype.is_float();
        unsupported!("linear_map" if needs_float, self.dtype, "floats for this formula");
        linear_layer(self, weight, bias, Some(&f)).with_op("linear_map")
    }
}

/// Computes and records `f(x wᵀ + b)`.
fn linear_layer(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    f: Option<&dyn Fn(&Expr) -> Expr>,
) -> Result<Tensor> {
    let op = "linear";
    let inputs: &[&Tensor] = match &bias {
        Some(bias) => &[x, weight, bias],
        None => &[x, weight],
    };
    cast_first!(autocast_inputs(op, inputs)?, |x| linear_layer(&x[0], &x[1], x.get(2), f));
    let dtype = same_dtype(op, inputs)?;
    mismatch!(op if weight.rank() != 2 || x.shape().dims().last() != weight.shape().dims().last(),
        x, weight, "the input is [.., in] and the weight [out, in]");
    if let Some(b) = bias {
        mismatch!(op if b.shape().dims() != &weight.shape().dims()[..1], x, b, "the bias is [out]");
    }
    let tracked = autograd::is_tracked(inputs);
    let vector = x.rank() == 1;
    let row = vector.then(|| insert_dim(x, 0));
    let rows = row.as_ref().unwrap_or(x);

    let sum = if bias.is_some() { EPILOGUES.biased.clone() } else { EPILOGUES.product.clone() };
    let mut results: SmallVec<[Expr; 2]> = smallvec![f.map_or_else(|| sum.clone(), |f| f(&sum))];
    // The derivative of relu can be computed from its result, which is saved anyway.
    let known = EPILOGUES.relu.iter().find(|known| **known == results[0]);
    let relu = known.is_some();
    if let Some(known) = known {
        results[0] = known.clone(); // an equal formula whose program is already cached
    }
    if tracked && f.is_some() && !relu {
        results.push(sum);
    }
    let (columns, dtypes) = (matrix_transpose(weight), &[dtype, dtype][..results.len()]);
    let g = Gemm { extras: bias.as_slice(), dtypes, ..Gemm::plain(op, rows, &columns, &results, &dtype) };
    if !tracked {
        let out = g.compute_one()?;
        return Ok(if vector { remove_dim(&out, 0) } else { out });
    }
    let mut outs = g.compute_all()?.into_iter().map(|t| if vector { remove_dim(&t, 0) } else { t });
    let (Some(out), before) = (outs.next(), outs.next()) else { unreachable!("a result an expression") };
    let before = if relu { Some(out.detach()) } else { before };
    let shape = rows.shape().clone();
    // x is saved if the weight needs a gradient, or if there is a formula, whose derivative depends on all inputs of the layer.
    let saved_x = (weight.requires_grad() || f.is_some()).then(|| Saved::new(x));
    let saved_w = (x.requires_grad() || f.is_some()).then(|| Saved::new(weight));
    let saved_b = bias.filter(|_| f.is_some()).map(Saved::new);
    if !vector {
        let outs: SmallVec<[&Tensor; 2]> = std::iter::once(&out).chain(before.as_ref().filter(|_| !relu)).collect();
        let flops = 2 * out.numel() * weight.shape().dims()[1];
        autograd::note_recipes(&outs, inputs, flops, || {
            let results = results.clone();
            move |t: &[&Tensor]| {
                let (columns, dtypes) = (matrix_transpose(t[1]), &[dtype, dtype][..results.len()]);
                Gemm { extras: &t[2..], dtypes, ..Gemm::plain(op, t[0], &columns, &results, &dtype) }.compute_all()
            }
        });
    }
    // The incoming gradient times the derivative of `f`, as a formula that reads the gradient and the saved sum.
    let factor = f.zip(before).map(|(f, t)| {
        let product = if relu { EPILOGUES.relu_grad.clone() } else { &EPILOGUES.product * f(&Expr::input(1)).diff(1) };
        Factor { product, tensor: Saved::new(&t) }
    });
    let (weight_shape, biased) = (weight.shape().clone(), bias.is_some());
    Ok(autograd::record_with_factor(op, out, inputs, factor, move |ctx| {
        let mut grad = ctx.grad()?;
        let get = |saved: &Option<Saved>| saved.as_ref().map(|s| s.unpack(op)).transpose();
        if ctx.create_graph() {
            return layer_gradients(ctx, grad, get(&saved_x)?, get(&saved_w)?, get(&saved_b)?, &weight_shape);
        }
        if let Some(factor) = ctx.take_factor() {
            let inputs = [&grad, factor.tensor.get(op)?];
            grad = elementwise::apply_one(op, &inputs, Params::default(), &factor.product, dtype)?;
        }
        if vector {
            grad = insert_dim(&grad, 0);
        }
        let bias_slot = (biased && ctx.needs_gradient(2)).then(|| ctx.slot(2));
        let of_x = |x: &Saved| Ok(if vector { insert_dim(x.get(op)?, 0) } else { x.unpack(op)? });
        let saved_x = saved_x.as_ref().filter(|_| ctx.needs_gradient(1)).map(of_x).transpose()?;
        let saved_w = saved_w.as_ref().filter(|_| ctx.needs_gradient(0)).map(|w| w.get(op)).transpose()?;
        let (weight_grad, bias_grad) = match (saved_x, bias_slot) {
            // The gradients of weight and bias are both sums over the rows of `grad`, so one launch can compute both.
            (Some(x), Some(slot)) if grad.rank() == 2 => {
                let sums = match slot {
                    Some(slot) => slot,
                    None => Tensor::empty_with_shape(&weight_shape.dims()[..1], dtype, grad.device())?,
                };
                let (a, product, out) = (matrix_transpose(&grad), slice::from_ref(&EPILOGUES.product), ctx.slot(1));
                let g = Gemm { sums: Some(&sums), out, ..Gemm::plain(op, &a, &x, product, &dtype) };
                (Some(g.compute_one()?), Some(sums))
            }
            (x, slot) => {
                let rows: Dims<isize> = (0..grad.rank() as isize - 1).collect();
                let sum = slot.map(|slot| reduce::sum_into(op, &grad, &rows[..], false, slot)).transpose()?;
                let of = |x: Tensor| product_summed_to(op, &matrix_transpose(&grad), &x, &weight_shape, ctx.slot(1));
                (x.map(of).transpose()?, sum)
            }
        };
        let x_grad = match saved_w {
            Some(w) if vector => {
                let dx = product_summed_to(op, &grad, w, &shape, ctx.slot(0).map(|s| insert_dim(&s, 0)))?;
                Some(remove_dim(&dx, 0))
            }
            Some(w) => Some(match ctx.take_input_factor(0) {
                None => product_summed_to(op, &grad, w, &shape, ctx.slot(0))?,
                Some(factor) => {
                    let (product, extras) = (slice::from_ref(&factor.product), [factor.tensor.get(op)?]);
                    Gemm { extras: &extras, ..Gemm::plain(op, &grad, w, product, &dtype) }.compute_one()?
                }
            }),
            None => None,
        };
        let mut gradients: Gradients = smallvec![x_grad, weight_grad];
        if biased {
            gradients.push(bias_grad);
        }
        Ok(gradients)
    }))
}

/// Computes the gradients of a layer with recorded operations. `x`, `w` and `b` are given if they are needed.
fn layer_gradients(
    ctx: &mut autograd::Context,
    mut grad: Tensor,
    x: Option<Tensor>,
    w: Option<Tensor>,
    b: Option<Tensor>,
    weight_shape: &Shape,
) -> Result<Gradients> {
    if let (Some(factor), Some(x), Some(w)) = (ctx.take_factor(), &x, &w) {
        let (z, product) = (x.linear(w, b.as_ref())?, &factor.product);
        let params = Params::default();
        grad = elementwise::apply_tracked("linear", &[&grad, &z], params, product, grad.dtype, &|i| product.diff(i))?;
    }
    // Views a vector or a batch as a matrix.
    let matrix = |t: &Tensor| match t.shape().dims() {
        [outer @ .., last] => t.reshape([outer.iter().product(), *last]),
        [] => t.reshape([1, 1]),
    };
    let mut gradients: Gradients = (0..3).map(|_| None).collect();
    if let Some(w) = w.filter(|_| ctx.needs_gradient(0)) {
        gradients[0] = Some(grad.matmul(&w)?);
    }
    if let Some(x) = x.filter(|_| ctx.needs_gradient(1)) {
        gradients[1] = Some(matrix(&grad)?.t()?.matmul(&matrix(&x)?)?);
    }
    match ctx.num_inputs() {
        2 => gradients.truncate(2),
        _ if ctx.needs_gradient(2) => gradients[2] = Some(grad.sum_to(&Shape::from(weight_shape.dims()[0]))?),
        _ => {}
    }
    Ok(gradients)
}

/// Computes the product without an epilogue, and writes it to `out` if possible.
fn plain_product(op: &'static str, a: &Tensor, b: &Tensor, out: Option<Tensor>) -> Result<Tensor> {
    Gemm { out, ..Gemm::plain(op, a, b, slice::from_ref(&EPILOGUES.product), &a.dtype) }.compute_one()
}

/// Computes the gradient of an operand of shape `target`: the product, summed over the batch dims along which the operand was broadcast.
fn product_summed_to(op: &'static str, a: &Tensor, b: &Tensor, target: &Shape, slot: Option<Tensor>) -> Result<Tensor> {
    let batch = Shape::from(&a.shape().dims()[..a.rank() - 2])
        .broadcast(op, &Shape::from(&b.shape().dims()[..b.rank() - 2]))?;
    let kept = &target.dims()[..target.rank() - 2];
    if batch.dims() == kept {
        return plain_product(op, a, b, slot);
    }
    // If the whole batch shares one matrix, the batch dims and the inner dim are summed as one long dim, if the strides allow it.
    if kept.is_empty()
        && let (Some(a), Some(b)) = (merge_batch_rows(&matrix_transpose(a), &batch), merge_batch_rows(b, &batch))
    {
        return plain_product(op, &matrix_transpose(&a), &b, slot);
    }
    let missing = batch.rank() - kept.len();
    let stretched = |d: usize| d < missing || (kept[d - missing] == 1 && batch.dims()[d] != 1);
    let dims: Dims<isize> = (0..batch.rank()).filter(|&d| stretched(d)).map(|d| d as isize).collect();
    let fits = dims.len() == missing; // true if the sum has the target's shape
    let sum = reduce::sum_into(op, &plain_product(op, a, b, None)?, &dims[..], false, slot.filter(|_| fits))?;
    Ok(if fits { sum } else { sum.with_layout(Layout::contiguous(target.clone())) })
}

/// Views `[batch.., r, c]` as one matrix with the rows of all batches; returns `None` if the strides do not allow it.
fn merge_batch_rows(t: &Tensor, batch: &Shape) -> Option<Tensor> {
    let [outer @ .., rows, cols] = t.shape().dims() else { return None };
    let whole = outer == batch.dims();
    whole.then(|| t.layout.reshape(&Shape::from([batch.numel() * rows, *cols])))?.map(|layout| t.with_layout(layout))
}

/// Returns a view with the last two dims swapped, outside the graph.
pub(crate) fn matrix_transpose(t: &Tensor) -> Tensor {
    t.with_layout(t.layout.transpose(t.rank() - 2, t.rank() - 1))
}

/// Inserts a dim of size 1 before `dim`, as a view outside the graph.
fn insert_dim(t: &Tensor, dim: usize) -> Tensor {
    t.with_layout(t.layout.insert(dim))
}

/// Removes a dim of size 1, as a view outside the graph.
fn remove_dim(t: &Tensor, dim: usize) -> Tensor {
    t.with_layout(t.layout.remove(dim))
}

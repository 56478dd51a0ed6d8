//! Convolutions as products of columns.

use std::slice;

use smallvec::SmallVec;

use crate::autograd::{Gradients, Saved};
use crate::backend::problem::conv::Convolution;
use crate::backend::problem::gemm::{BIASED, Gemm, PRODUCT};
use crate::backend::problem::windows::four;
use crate::ops::linalg::matmul::matrix_transpose;
use crate::ops::nn::conv::ConvProblem;
use crate::ops::reduce;
use crate::tensor::Layout;
use crate::tensor::view::reshaped;
use crate::{Result, Shape, Tensor, autograd};

/// The gradients of a convolution, not recorded, as products of columns.
pub(super) struct ByColumns(pub(super) ConvProblem);

impl Convolution for ByColumns {
    fn windows(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        self.0.by_im2col(x, &weight.detach(), bias)
    }

    fn images(&self, y: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        ConvProblem { transposed: true, ..self.0 }.by_im2col(y, &weight.detach(), bias)
    }

    fn weight(&self, x: &Tensor, y: &Tensor, slot: Option<Tensor>) -> Result<Tensor> {
        let ConvProblem { op, windows, groups, .. } = self.0;
        let ([n, c, ..], [_, o, oh, ow]) = (four(x), four(y));
        let (taps, [kh, kw]) = (windows.kernel.iter().product::<usize>(), windows.kernel);
        let columns = windows.im2col(op, &x.detach(), true)?.reshape([groups, c / groups * taps, n * oh * ow])?;
        let grad = y.detach().transpose(0, 1)?.reshape([groups, o / groups, n * oh * ow])?;
        let columns = matrix_transpose(&columns);
        let product = Shape::from([groups, o / groups, c / groups * taps]);
        let out = slot.and_then(|s| Some(s.with_layout(s.layout.reshape(&product)?)));
        let gemm = Gemm { out, ..Gemm::plain(op, &grad, &columns, slice::from_ref(&*PRODUCT), &y.dtype) };
        let made = gemm.run_one()?;
        let shape = Shape::from([o, c / groups, kh, kw]);
        Ok(made.with_layout(Layout { offset: made.layout.offset, ..Layout::contiguous(shape) }))
    }
}

/// `[N, groups, rows, columns]`: for each group its part of the weight times its columns, plus the bias, which is `[groups *
/// rows]`. The weight, `[A, B, KH, KW]`, is `[groups, A / groups, B KH KW]`, or that `transposed`.
pub(super) fn product(
    op: &'static str,
    columns: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    transposed: bool,
) -> Result<Tensor> {
    let groups = columns.shape().dims()[1];
    let [a, b, kh, kw] = four(weight);
    let split = Shape::from([groups, a / groups, b * kh * kw]);
    let matrices = reshaped(weight, &split)?;
    let matrices = if transposed { matrix_transpose(&matrices) } else { matrices };
    let rows = matrices.shape().dims()[1];
    let bias_view = bias.map(|b| reshaped(b, &Shape::from([groups, rows, 1]))).transpose()?;
    let epilogue = if bias.is_some() { &*BIASED } else { &*PRODUCT };
    let g = Gemm::plain(op, &matrices, columns, slice::from_ref(epilogue), &columns.dtype);
    let inputs: SmallVec<[&Tensor; 3]> = [columns, weight].into_iter().chain(bias).collect();
    let out = match autograd::is_tracked(&inputs) && autograd::is_gradients_only() {
        true => Tensor::empty_like_shape(
            [four(columns)[0], groups, rows, four(columns)[3]],
            columns.dtype,
            columns.device(),
        )?,
        false => Gemm { extras: &bias_view.iter().collect::<SmallVec<[&Tensor; 1]>>(), ..g }.run_one()?,
    };
    if !autograd::is_tracked(&inputs) {
        return Ok(out);
    }
    let (saved_x, saved_w) = (weight.requires_grad().then(|| Saved::new(columns)), Saved::new(weight));
    let bias_shape = bias.map(|b| b.shape().clone());
    Ok(autograd::record_twice(op, out, &inputs, move |ctx| {
        let (grad, weight) = (ctx.grad()?, saved_w.get(op)?);
        let mut gradients: Gradients = SmallVec::new();
        gradients.push(ctx.needs(0).then(|| product(op, &grad, weight, None, !transposed)).transpose()?);
        gradients.push(None);
        if let Some(x) = saved_x.as_ref().filter(|_| ctx.needs(1)) {
            let (x, shape) = (x.get(op)?, weight.shape());
            gradients[1] = Some(match ctx.create_graph() {
                true => {
                    let (a, b) = (batch_as_columns(&grad)?, batch_as_columns(x)?);
                    let (a, b) = if transposed { (b, a) } else { (a, b) };
                    a.matmul(&b.transpose(-2, -1)?)?.reshape(shape)?
                }
                false => {
                    let slot = ctx.slot(1).and_then(|s| Some(s.with_layout(s.layout.reshape(&split)?)));
                    let (a, b) = (batch_as_columns(&grad.detach())?, batch_as_columns(&x.detach())?);
                    let (a, b) = if transposed { (b, a) } else { (a, b) };
                    let dtype = grad.dtype;
                    let b = matrix_transpose(&b);
                    let g = Gemm { out: slot, ..Gemm::plain(op, &a, &b, slice::from_ref(&*PRODUCT), &dtype) };
                    let made = g.run_one()?;
                    made.with_layout(Layout { offset: made.layout.offset, ..Layout::contiguous(shape.clone()) })
                }
            });
        }
        if let Some(shape) = &bias_shape {
            gradients.push(match (ctx.needs(2), ctx.create_graph()) {
                (false, _) => None,
                (true, true) => Some(grad.sum([0, 3], false)?.reshape(shape)?),
                (true, false) => {
                    let slot = ctx.slot(2).and_then(|s| {
                        Some(s.with_layout(s.layout.reshape(&Shape::from([groups, grad.shape().dims()[2]]))?))
                    });
                    let sum = reduce::sum_into(op, &grad.detach(), [0, 3], false, slot)?;
                    Some(sum.with_layout(Layout { offset: sum.layout.offset, ..Layout::contiguous(shape.clone()) }))
                }
            });
        }
        Ok(gradients)
    }))
}

/// `[N, groups, rows, columns]` as `[groups, rows, N columns]`: a sum over the batch is then part of a product.
fn batch_as_columns(t: &Tensor) -> Result<Tensor> {
    let [n, groups, rows, columns] = four(t);
    t.permute(&[1, 2, 0, 3])?.reshape([groups, rows, n * columns])
}

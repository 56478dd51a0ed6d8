//! Norms that give their statistics, and gradients that are made of these: for whoever keeps them from forward to backward himself, as
//! PyTorch's autograd does.

use smallvec::SmallVec;

use crate::backend::problem::norm::View;
use crate::ops::dispatch::args::Args;
use crate::ops::dispatch::arguments::Argument;
use crate::ops::dispatch::prelude::*;
use crate::ops::nn::norm::methods::{
    check_channels, check_groups, check_last, elements_of_channels, given, move_running,
};
use crate::ops::nn::norm::{BatchNormOptions, Norm};
use crate::tensor::Layout;
use crate::{DType, Result, Tensor, no_grad};

/// A result with the mean and 1 / sqrt(var + eps) of each row.
type WithStatistics = (Tensor, Tensor, Tensor);

/// A norm with its statistics, of this shape, and the variances.
fn forward(
    op: &'static str,
    x: &Tensor,
    view: View,
    [weight, bias]: [Option<&Tensor>; 2],
    eps: f64,
    shape: &[usize],
) -> Result<(WithStatistics, Tensor)> {
    let (out, statistics) = (view.result(x)?, view.statistics(x)?);
    let (dims, rms) = (view.weighted_of(x), false);
    Norm { op, view: &view, weight, bias, dims, eps, rms }.forward(x, &out, &statistics)?;
    let part = |offset| statistics.with_layout(Layout { offset, ..Layout::contiguous(shape.into()) });
    let rows = statistics.numel() / 3;
    Ok(((out, part(0), part(rows)), part(2 * rows)))
}

/// Whether weights are wider than the input: then all is computed in their dtype.
fn is_mixed(x: &Tensor, weight: Option<&Tensor>, bias: Option<&Tensor>) -> bool {
    x.dtype.size() == 2 && weight.or(bias).is_some_and(|w| w.dtype == DType::F32)
}

/// The statistics as one tensor: a view of them where they lie as forward left them.
fn joined(mean: &Tensor, rstd: &Tensor, shape: [usize; 5], dtype: DType) -> Result<Tensor> {
    let follows = rstd.layout.offset == mean.layout.offset + mean.numel();
    let plain = [mean, rstd].iter().all(|t| t.dtype == dtype && t.is_contiguous());
    if plain && follows && mean.shares_storage(rstd) {
        return Ok(mean.with_layout(Layout { offset: mean.layout.offset, ..Layout::contiguous(shape.into()) }));
    }
    // Of one dim, for of more the result may have its channels last.
    let half = |t: &Tensor| t.to_dtype(dtype)?.reshape([t.numel()]);
    Tensor::cat(&[&half(mean)?, &half(rstd)?], 0)?.reshape(shape)
}

/// The gradients of x, weight and bias where they are wanted. A bias that is not given has the dtype of the weight, or else of x.
fn gradients(
    op: &'static str,
    view: View,
    [grad, x, mean, rstd]: [&Tensor; 4],
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    wanted: [bool; 3],
) -> Result<[Option<Tensor>; 3]> {
    same_device(op, &[grad, x, mean, rstd])?;
    same_dtype(op, &[x, grad])?;
    for t in [mean, rstd] {
        t.dtype.check_float(op)?;
    }
    mismatch!(op if grad.shape() != x.shape(), x, grad, "the gradient has the shape of the input");
    let (compute, shape) = (x.dtype.compute().dtype(), view.shape_of_statistics(x));
    let rows = shape[1] * shape[2];
    let shape = [2, shape[1], shape[2], 1, 1];
    mismatch!(op if mean.numel() != rows || rstd.numel() != rows, mean, rstd, "there is one number for each row");
    let mixed = is_mixed(x, weight, bias);
    for t in weight.into_iter().chain(bias).filter(|t| !mixed || t.dtype != DType::F32) {
        same_device(op, &[x, t])?;
        same_dtype(op, &[x, t])?;
    }
    let channels = || match view {
        View::Last(_) => Ok(None),
        View::Groups(_) | View::Batch => Tensor::empty(x.shape().dims()[1], (x.dtype, x.device())).map(Some),
    };
    let stand_in = if wanted[2] && weight.or(bias).is_none() { channels()? } else { None };
    let bias = bias.or(weight).or(stand_in.as_ref());
    let wide = |t: &Tensor| if mixed { t.to_dtype(compute) } else { Ok(t.shallow_clone()) };
    no_grad(|| {
        let (grad, given) = (wide(grad)?, wide(x)?);
        let statistics = joined(mean, rstd, shape, compute)?;
        let (dims, eps, rms) = (view.weighted_of(x), 0.0, false);
        let norm = Norm { op, view: &view, weight, bias, dims, eps, rms };
        let [to_x, to_weight, to_bias] = norm.backward(&given, &grad, &statistics, wanted)?;
        let to_x = to_x.filter(|_| wanted[0]).map(|t| t.to_dtype(x.dtype)).transpose()?;
        Ok([to_x, to_weight.filter(|_| wanted[1]), to_bias.filter(|_| wanted[2])])
    })
}

/// What a registered implementation made of a call, where there is one: the gradients that are wanted.
fn replaced_gradients(
    op: &'static str,
    tensors: &[Option<&Tensor>],
    wanted: [bool; 3],
    argument: Option<Argument>,
) -> Result<Option<[Option<Tensor>; 3]>> {
    let mask = wanted.map(usize::from);
    let arguments = || argument.into_iter().chain([Argument::from(&mask)]).collect();
    let made = replacement(op, tensors, arguments)?.map(Vec::into_iter);
    Ok(made.map(|mut made| wanted.map(|wanted| if wanted { made.next() } else { None })))
}

impl Tensor {
    /// [`Tensor::layer_norm`], the mean and `1 / sqrt(var + eps)` of each row, whose normalised dims are 1 (PyTorch's
    /// `native_layer_norm`). The latter are f32 at least. Not recorded: [`Tensor::native_layer_norm_backward`] makes the gradients.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let x = Tensor::from_slice(&[1f32, 3.0, 5.0, 9.0], [2, 2], Device::Cpu)?;
    /// let (y, mean, rstd) = x.native_layer_norm(&[2], None, None, 0.0)?;
    /// assert_eq!((mean.to_vec::<f32>()?, rstd.to_vec::<f32>()?), (vec![2.0, 7.0], vec![1.0, 0.5]));
    /// let [to_x, ..] = y.native_layer_norm_backward(&x, &[2], &mean, &rstd, None, None, [true, false, false])?;
    /// assert_eq!(to_x.unwrap().to_vec::<f32>()?, [0.0; 4]); // rows that are normalised do not depend on their scale
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Tensor::layer_norm`].
    #[track_caller]
    pub fn native_layer_norm(
        &self,
        normalized_shape: &[usize],
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
    ) -> Result<WithStatistics> {
        let _caller = Caller::enter();
        let op = "native_layer_norm";
        replaced!(op, [Some(self), weight, bias], normalized_shape, eps);
        no_grad(|| {
            if is_mixed(self, weight, bias) {
                let (out, mean, rstd) =
                    self.to_dtype(DType::F32)?.native_layer_norm(normalized_shape, weight, bias, eps)?;
                return Ok((out.to_dtype(self.dtype)?, mean, rstd));
            }
            check_last(op, self, normalized_shape, &[weight, bias])?;
            let view = View::Last(normalized_shape.iter().product());
            let mut shape = SmallVec::<[usize; 6]>::from_slice(self.shape().dims());
            let kept = shape.len() - normalized_shape.len();
            shape[kept..].fill(1);
            Ok(forward(op, self, view, [weight, bias], eps, &shape)?.0)
        })
    }

    /// The gradients of [`Tensor::native_layer_norm`] in its input, weight and bias from that of its result, which is this tensor, as
    /// far as they are `wanted` (PyTorch's `native_layer_norm_backward`). Not recorded.
    ///
    /// # Errors
    /// As [`Tensor::layer_norm`].
    #[track_caller]
    #[allow(clippy::too_many_arguments)] // PyTorch's
    pub fn native_layer_norm_backward(
        &self,
        input: &Tensor,
        normalized_shape: &[usize],
        mean: &Tensor,
        rstd: &Tensor,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        wanted: [bool; 3],
    ) -> Result<[Option<Tensor>; 3]> {
        let _caller = Caller::enter();
        let op = "native_layer_norm_backward";
        let tensors = [Some(self), Some(input), Some(mean), Some(rstd), weight, bias];
        if let Some(made) = replaced_gradients(op, &tensors, wanted, Some(normalized_shape.into()))? {
            return Ok(made);
        }
        check_last(op, input, normalized_shape, &[])?;
        // Their dtype may be wider than the input's, which `gradients` checks.
        for t in weight.into_iter().chain(bias) {
            same_device(op, &[input, t])?;
            let hint = "weight and bias have the normalised shape";
            mismatch!(op if t.shape().dims() != normalized_shape, input, t, hint);
        }
        let view = View::Last(normalized_shape.iter().product());
        gradients(op, view, [self, input, mean, rstd], weight, bias, wanted)
    }

    /// [`Tensor::batch_norm`] in training, the mean and `1 / sqrt(var + eps)` of each channel (PyTorch's `native_batch_norm`). The latter
    /// are f32 at least. Not recorded: [`Tensor::native_batch_norm_backward`] makes the gradients.
    ///
    /// # Errors
    /// As [`Tensor::batch_norm`].
    #[track_caller]
    pub fn native_batch_norm(&self, options: BatchNormOptions) -> Result<WithStatistics> {
        let _caller = Caller::enter();
        let op = "native_batch_norm";
        let BatchNormOptions { weight, bias, eps, running_mean, running_var, momentum, .. } = options;
        // Running statistics are updated in place, which replacements do not do.
        if running_mean.is_none() && running_var.is_none() {
            replaced!(op, [Some(self), None, None, weight, bias], momentum, eps);
        }
        check_channels(op, self, &[weight, bias, running_mean, running_var])?;
        no_grad(|| {
            if is_mixed(self, weight, bias) {
                let (out, mean, rstd) = self.to_dtype(DType::F32)?.native_batch_norm(options)?;
                return Ok((out.to_dtype(self.dtype)?, mean, rstd));
            }
            same_dtype(op, &given(self, weight, bias))?;
            let n = elements_of_channels(op, self)?;
            let shape = &self.shape().dims()[1..2];
            let (made, var) = forward(op, self, View::Batch, [weight, bias], eps, shape)?;
            move_running(op, options, n, [&made.1, &var])?;
            Ok(made)
        })
    }

    /// The gradients of [`Tensor::native_batch_norm`] in its input, weight and bias from that of its result, which is this tensor, as far
    /// as they are `wanted` (PyTorch's `native_batch_norm_backward`). Not recorded.
    ///
    /// # Errors
    /// As [`Tensor::batch_norm`].
    #[track_caller]
    pub fn native_batch_norm_backward(
        &self,
        input: &Tensor,
        mean: &Tensor,
        rstd: &Tensor,
        weight: Option<&Tensor>,
        wanted: [bool; 3],
    ) -> Result<[Option<Tensor>; 3]> {
        let _caller = Caller::enter();
        let op = "native_batch_norm_backward";
        let tensors = [Some(self), Some(input), Some(mean), Some(rstd), weight];
        if let Some(made) = replaced_gradients(op, &tensors, wanted, None)? {
            return Ok(made);
        }
        check_channels(op, input, &[weight])?;
        gradients(op, View::Batch, [self, input, mean, rstd], weight, None, wanted)
    }

    /// [`Tensor::group_norm`], the mean and `1 / sqrt(var + eps)` of each group, `[N, groups]` (PyTorch's `native_group_norm`). The
    /// latter are f32 at least. Not recorded: [`Tensor::native_group_norm_backward`] makes the gradients.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let x = Tensor::from_slice(&[1f32, 3.0, 5.0, 9.0], [1, 4], Device::Cpu)?;
    /// let (y, mean, rstd) = x.native_group_norm(2, None, None, 0.0)?;
    /// assert_eq!(y.to_vec::<f32>()?, [-1.0, 1.0, -1.0, 1.0]);
    /// assert_eq!((mean.to_vec::<f32>()?, rstd.to_vec::<f32>()?), (vec![2.0, 7.0], vec![1.0, 0.5]));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Tensor::group_norm`].
    #[track_caller]
    pub fn native_group_norm(
        &self,
        groups: usize,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
    ) -> Result<WithStatistics> {
        let _caller = Caller::enter();
        let op = "native_group_norm";
        replaced!(op, [Some(self), weight, bias], groups, eps);
        check_groups(op, self, groups, &[weight, bias])?;
        no_grad(|| {
            if is_mixed(self, weight, bias) {
                let (out, mean, rstd) = self.to_dtype(DType::F32)?.native_group_norm(groups, weight, bias, eps)?;
                return Ok((out.to_dtype(self.dtype)?, mean, rstd));
            }
            same_dtype(op, &given(self, weight, bias))?;
            let shape = [self.shape().dims()[0], groups];
            Ok(forward(op, self, View::Groups(groups), [weight, bias], eps, &shape)?.0)
        })
    }

    /// The gradients of [`Tensor::native_group_norm`] in its input, weight and bias from that of its result, which is this tensor, as far
    /// as they are `wanted` (PyTorch's `native_group_norm_backward`). Not recorded.
    ///
    /// # Errors
    /// As [`Tensor::group_norm`].
    #[track_caller]
    pub fn native_group_norm_backward(
        &self,
        input: &Tensor,
        groups: usize,
        mean: &Tensor,
        rstd: &Tensor,
        weight: Option<&Tensor>,
        wanted: [bool; 3],
    ) -> Result<[Option<Tensor>; 3]> {
        let _caller = Caller::enter();
        let op = "native_group_norm_backward";
        let tensors = [Some(self), Some(input), Some(mean), Some(rstd), weight];
        if let Some(made) = replaced_gradients(op, &tensors, wanted, Some(groups.into()))? {
            return Ok(made);
        }
        check_groups(op, input, groups, &[weight])?;
        gradients(op, View::Groups(groups), [self, input, mean, rstd], weight, None, wanted)
    }
}

/// Three switches as integers.
fn mask(args: &Args, i: usize) -> Result<[bool; 3]> {
    match args.ints(i)?[..] {
        [x, weight, bias] => Ok([x, weight, bias].map(|n| n != 0)),
        _ => args.wrong(i, "three integers, 0 or 1"),
    }
}

operations! {
    native_layer_norm(input: x, normalized_shape: &sizes, weight: x?, bias: x?, eps: float = 1e-5) "native_layer_norm":
        NeuralNetwork, Floats -> Same;
    native_layer_norm_backward(grad_out: x, input: x, normalized_shape: &sizes, mean: x, rstd: x, weight: x?, bias: x?,
        output_mask: ints @mask) "native_layer_norm_backward": NeuralNetwork, Floats -> Same;
    native_batch_norm(input: x, running_mean: x?, running_var: x?, weight: x?, bias: x?, momentum: float = 0.1, eps: float = 1e-5)
        "native_batch_norm": NeuralNetwork, Floats -> Same => |a| {
        let [running_mean, running_var, weight, bias] = [1, 2, 3, 4].map(|i| a.optional(i));
        let (training, momentum, eps) = (true, a.float(0)?, a.float(1)?);
        a.x(0)?.native_batch_norm(BatchNormOptions { running_mean, running_var, weight, bias, training, momentum, eps })
    };
    native_batch_norm_backward(grad_out: x, input: x, mean: x, rstd: x, weight: x?, output_mask: ints @mask)
        "native_batch_norm_backward": NeuralNetwork, Floats -> Same;
    native_group_norm(input: x, group: size, weight: x?, bias: x?, eps: float = 1e-5) "native_group_norm":
        NeuralNetwork, Floats -> Same;
    native_group_norm_backward(grad_out: x, input: x, group: size, mean: x, rstd: x, weight: x?, output_mask: ints @mask)
        "native_group_norm_backward": NeuralNetwork, Floats -> Same;
}

//! Norms that return their statistics, and gradients computed from these statistics, for callers such as PyTorch's autograd that store
//! the statistics between the forward and the backward pass.

use smallvec::SmallVec;

use crate::backend::problem::norm::RowGrouping;
use crate::ops::dispatch::args::Args;
use crate::ops::dispatch::arguments::Argument;
use crate::ops::dispatch::prelude::*;
use crate::ops::nn::norm::methods::{
    channel_numel, check_channels, check_groups, check_last_dims, given_tensors, update_running_statistics,
};
use crate::ops::nn::norm::{BatchNormOptions, Norm};
use crate::tensor::Layout;
use crate::{DType, Result, Tensor, no_grad};

/// The result of a norm, and the mean and `1 / sqrt(var + eps)` of each row.
type WithStatistics = (Tensor, Tensor, Tensor);

/// Computes a norm. Returns the result, the statistics, which have the given shape, and the variances.
fn forward_with_statistics(
    op: &'static str,
    x: &Tensor,
    view: RowGrouping,
    [weight, bias]: [Option<&Tensor>; 2],
    eps: f64,
    shape: &[usize],
) -> Result<(WithStatistics, Tensor)> {
    let (out, statistics) = (view.allocate_result(x)?, view.allocate_statistics(x)?);
    let (dims, rms) = (view.weight_dims_for(x), false);
    Norm { op, view: &view, weight, bias, dims, eps, rms }.forward(x, &out, &statistics)?;
    let part = |offset| statistics.with_layout(Layout { offset, ..Layout::contiguous(shape.into()) });
    let rows = statistics.numel() / 3;
    Ok(((out, part(0), part(rows)), part(2 * rows)))
}

/// True if the weights are f32 and the input is f16 or bf16. All computations are then in f32.
fn has_wider_weights(x: &Tensor, weight: Option<&Tensor>, bias: Option<&Tensor>) -> bool {
    x.dtype.size() == 2 && weight.or(bias).is_some_and(|w| w.dtype == DType::F32)
}

/// Returns mean and rstd (`1 / sqrt(var + eps)`) as one tensor of `shape`: a view if they are adjacent in memory, as after the forward
/// pass, otherwise a copy.
fn join_statistics(mean: &Tensor, rstd: &Tensor, shape: [usize; 5], dtype: DType) -> Result<Tensor> {
    let follows = rstd.layout.offset == mean.layout.offset + mean.numel();
    let plain = [mean, rstd].iter().all(|t| t.dtype == dtype && t.is_contiguous());
    if plain && follows && mean.shares_storage(rstd) {
        return Ok(mean.with_layout(Layout { offset: mean.layout.offset, ..Layout::contiguous(shape.into()) }));
    }
    // Both are reshaped to one dim, because with more dims the result may be channels-last.
    let half = |t: &Tensor| t.to_dtype(dtype)?.reshape([t.numel()]);
    Tensor::cat(&[&half(mean)?, &half(rstd)?], 0)?.reshape(shape)
}

/// Computes the wanted gradients of x, weight and bias. If no bias is given, its gradient has the dtype of the weight, or else of x.
fn gradients(
    op: &'static str,
    view: RowGrouping,
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
    let (compute, shape) = (x.dtype.compute().dtype(), view.statistics_shape(x));
    let rows = shape[1] * shape[2];
    let shape = [2, shape[1], shape[2], 1, 1];
    mismatch!(op if mean.numel() != rows || rstd.numel() != rows, mean, rstd, "there is one number for each row");
    let mixed = has_wider_weights(x, weight, bias);
    for t in weight.into_iter().chain(bias).filter(|t| !mixed || t.dtype != DType::F32) {
        same_device(op, &[x, t])?;
        same_dtype(op, &[x, t])?;
    }
    let channels = || match view {
        RowGrouping::Last(_) => Ok(None),
        RowGrouping::Groups(_) | RowGrouping::Batch => {
            Tensor::empty(x.shape().dims()[1], (x.dtype, x.device())).map(Some)
        }
    };
    let stand_in = if wanted[2] && weight.or(bias).is_none() { channels()? } else { None };
    let bias = bias.or(weight).or(stand_in.as_ref());
    let wide = |t: &Tensor| if mixed { t.to_dtype(compute) } else { Ok(t.shallow_clone()) };
    no_grad(|| {
        let (grad, given) = (wide(grad)?, wide(x)?);
        let statistics = join_statistics(mean, rstd, shape, compute)?;
        let (dims, eps, rms) = (view.weight_dims_for(x), 0.0, false);
        let norm = Norm { op, view: &view, weight, bias, dims, eps, rms };
        let [to_x, to_weight, to_bias] = norm.backward(&given, &grad, &statistics, wanted)?;
        let to_x = to_x.filter(|_| wanted[0]).map(|t| t.to_dtype(x.dtype)).transpose()?;
        Ok([to_x, to_weight.filter(|_| wanted[1]), to_bias.filter(|_| wanted[2])])
    })
}

/// Calls a registered implementation, if any, and assigns its results to the wanted gradients.
fn call_gradient_replacement(
    op: &'static str,
    tensors: &[Option<&Tensor>],
    wanted: [bool; 3],
    argument: Option<Argument>,
) -> Result<Option<[Option<Tensor>; 3]>> {
    let mask = wanted.map(usize::from);
    let arguments = || argument.into_iter().chain([Argument::from(&mask)]).collect();
    let made = call_replacement(op, tensors, arguments)?.map(Vec::into_iter);
    Ok(made.map(|mut made| wanted.map(|wanted| if wanted { made.next() } else { None })))
}

impl Tensor {
    /// Returns the result of [`Tensor::layer_norm`], and the mean and `1 / sqrt(var + eps)` of each row (PyTorch's `native_layer_norm`).
    /// The normalised dims of the statistics have size 1, and their dtype is at least f32. Not recorded for autograd: compute gradients
    /// with [`Tensor::native_layer_norm_backward`].
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
    /// The errors of [`Tensor::layer_norm`].
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
        return_replacement!(op, [Some(self), weight, bias], normalized_shape, eps);
        no_grad(|| {
            if has_wider_weights(self, weight, bias) {
                let (out, mean, rstd) =
                    self.to_dtype(DType::F32)?.native_layer_norm(normalized_shape, weight, bias, eps)?;
                return Ok((out.to_dtype(self.dtype)?, mean, rstd));
            }
            check_last_dims(op, self, normalized_shape, &[weight, bias])?;
            let view = RowGrouping::Last(normalized_shape.iter().product());
            let mut shape = SmallVec::<[usize; 6]>::from_slice(self.shape().dims());
            let kept = shape.len() - normalized_shape.len();
            shape[kept..].fill(1);
            Ok(forward_with_statistics(op, self, view, [weight, bias], eps, &shape)?.0)
        })
    }

    /// Computes the `wanted` gradients of input, weight and bias of [`Tensor::native_layer_norm`] (PyTorch's
    /// `native_layer_norm_backward`). This tensor is the gradient of the result. Not recorded for autograd.
    ///
    /// # Errors
    /// The errors of [`Tensor::layer_norm`].
    #[track_caller]
    #[allow(clippy::too_many_arguments)] // the same arguments as PyTorch's function
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
        if let Some(made) = call_gradient_replacement(op, &tensors, wanted, Some(normalized_shape.into()))? {
            return Ok(made);
        }
        check_last_dims(op, input, normalized_shape, &[])?;
        // Weight and bias may have a wider dtype than the input, which `gradients` checks.
        for t in weight.into_iter().chain(bias) {
            same_device(op, &[input, t])?;
            let hint = "weight and bias have the normalised shape";
            mismatch!(op if t.shape().dims() != normalized_shape, input, t, hint);
        }
        let view = RowGrouping::Last(normalized_shape.iter().product());
        gradients(op, view, [self, input, mean, rstd], weight, bias, wanted)
    }

    /// Returns the result of [`Tensor::batch_norm`] in training, and the mean and `1 / sqrt(var + eps)` of each channel (PyTorch's
    /// `native_batch_norm`). The statistics are at least f32. Not recorded for autograd: compute gradients with
    /// [`Tensor::native_batch_norm_backward`].
    ///
    /// # Errors
    /// The errors of [`Tensor::batch_norm`].
    #[track_caller]
    pub fn native_batch_norm(&self, options: BatchNormOptions) -> Result<WithStatistics> {
        let _caller = Caller::enter();
        let op = "native_batch_norm";
        let BatchNormOptions { weight, bias, eps, running_mean, running_var, momentum, .. } = options;
        // A registered replacement cannot update the running statistics in place, so it is not called if there are any to update.
        if running_mean.is_none() && running_var.is_none() {
            return_replacement!(op, [Some(self), None, None, weight, bias], momentum, eps);
        }
        check_channels(op, self, &[weight, bias, running_mean, running_var])?;
        no_grad(|| {
            if has_wider_weights(self, weight, bias) {
                let (out, mean, rstd) = self.to_dtype(DType::F32)?.native_batch_norm(options)?;
                return Ok((out.to_dtype(self.dtype)?, mean, rstd));
            }
            same_dtype(op, &given_tensors(self, weight, bias))?;
            let n = channel_numel(op, self)?;
            let shape = &self.shape().dims()[1..2];
            let (made, var) = forward_with_statistics(op, self, RowGrouping::Batch, [weight, bias], eps, shape)?;
            update_running_statistics(op, options, n, [&made.1, &var])?;
            Ok(made)
        })
    }

    /// Computes the `wanted` gradients of input, weight and bias of [`Tensor::native_batch_norm`] (PyTorch's
    /// `native_batch_norm_backward`). This tensor is the gradient of the result. Not recorded for autograd.
    ///
    /// # Errors
    /// The errors of [`Tensor::batch_norm`].
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
        if let Some(made) = call_gradient_replacement(op, &tensors, wanted, None)? {
            return Ok(made);
        }
        check_channels(op, input, &[weight])?;
        gradients(op, RowGrouping::Batch, [self, input, mean, rstd], weight, None, wanted)
    }

    /// Returns the result of [`Tensor::group_norm`], and the mean and `1 / sqrt(var + eps)` of each group, `[N, groups]` (PyTorch's
    /// `native_group_norm`). The statistics are at least f32. Not recorded for autograd: compute gradients with
    /// [`Tensor::native_group_norm_backward`].
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
    /// The errors of [`Tensor::group_norm`].
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
        return_replacement!(op, [Some(self), weight, bias], groups, eps);
        check_groups(op, self, groups, &[weight, bias])?;
        no_grad(|| {
            if has_wider_weights(self, weight, bias) {
                let (out, mean, rstd) = self.to_dtype(DType::F32)?.native_group_norm(groups, weight, bias, eps)?;
                return Ok((out.to_dtype(self.dtype)?, mean, rstd));
            }
            same_dtype(op, &given_tensors(self, weight, bias))?;
            let shape = [self.shape().dims()[0], groups];
            Ok(forward_with_statistics(op, self, RowGrouping::Groups(groups), [weight, bias], eps, &shape)?.0)
        })
    }

    /// Computes the `wanted` gradients of input, weight and bias of [`Tensor::native_group_norm`] (PyTorch's
    /// `native_group_norm_backward`). This tensor is the gradient of the result. Not recorded for autograd.
    ///
    /// # Errors
    /// The errors of [`Tensor::group_norm`].
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
        if let Some(made) = call_gradient_replacement(op, &tensors, wanted, Some(groups.into()))? {
            return Ok(made);
        }
        check_groups(op, input, groups, &[weight])?;
        gradients(op, RowGrouping::Groups(groups), [self, input, mean, rstd], weight, None, wanted)
    }
}

/// Reads argument `i` as three flags, which are passed as integers.
fn read_mask(args: &Args, i: usize) -> Result<[bool; 3]> {
    match args.ints(i)?[..] {
        [x, weight, bias] => Ok([x, weight, bias].map(|n| n != 0)),
        _ => args.argument_error(i, "three integers, 0 or 1"),
    }
}

operations! {
    native_layer_norm(input: x, normalized_shape: &sizes, weight: x?, bias: x?, eps: float = 1e-5) "native_layer_norm":
        NeuralNetwork, Floats -> Same;
    native_layer_norm_backward(grad_out: x, input: x, normalized_shape: &sizes, mean: x, rstd: x, weight: x?, bias: x?,
        output_mask: ints @read_mask) "native_layer_norm_backward": NeuralNetwork, Floats -> Same;
    native_batch_norm(input: x, running_mean: x?, running_var: x?, weight: x?, bias: x?, momentum: float = 0.1, eps: float = 1e-5)
        "native_batch_norm": NeuralNetwork, Floats -> Same => |a| {
        let [running_mean, running_var, weight, bias] = [1, 2, 3, 4].map(|i| a.optional_tensor(i));
        let (training, momentum, eps) = (true, a.float(0)?, a.float(1)?);
        a.tensor(0)?.native_batch_norm(BatchNormOptions { running_mean, running_var, weight, bias, training, momentum, eps })
    };
    native_batch_norm_backward(grad_out: x, input: x, mean: x, rstd: x, weight: x?, output_mask: ints @read_mask)
        "native_batch_norm_backward": NeuralNetwork, Floats -> Same;
    native_group_norm(input: x, group: size, weight: x?, bias: x?, eps: float = 1e-5) "native_group_norm":
        NeuralNetwork, Floats -> Same;
    native_group_norm_backward(grad_out: x, input: x, group: size, mean: x, rstd: x, weight: x?, output_mask: ints @read_mask)
        "native_group_norm_backward": NeuralNetwork, Floats -> Same;
}

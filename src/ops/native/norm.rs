//! Norms that return their statistics, and gradients computed from these statistics, for callers such as PyTorch's autograd that store
//! the statistics between the forward and the backward pass.

use crate::backend::problem::norm::RowGrouping;
use crate::ops::dispatch::prelude::*;
use crate::ops::nn::norm::methods::{
    channel_numel, check_channels, check_groups, check_last_dims, given_tensors, update_running_statistics,
};
use crate::ops::nn::norm::{BatchNormOptions, Norm};

/// The result of a norm, and the mean and `1 / sqrt(var + eps)` of each row.
type WithStatistics = (Tensor, Tensor, Tensor);

/// The gradients of x, the weight and the bias, if wanted.
type InputGradients = [Option<Tensor>; 3];

/// Computes a norm. Returns the result in `dtype`, the statistics, which have the given shape, and the variances.
fn forward_with_statistics(
    op: &'static str,
    (x, dtype): (&Tensor, DType),
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
    Ok(((out.to_dtype(dtype)?, part(0), part(rows)), part(2 * rows)))
}

/// True if the weights are f32 and the input is f16 or bf16. All computations are then in f32.
fn has_wider_weights(x: &Tensor, weight: Option<&Tensor>, bias: Option<&Tensor>) -> bool {
    x.dtype.is_half() && weight.or(bias).is_some_and(|w| w.dtype == DType::F32)
}

/// Returns x in the dtype of the computations.
fn widened(x: &Tensor, weight: Option<&Tensor>, bias: Option<&Tensor>) -> Result<Tensor> {
    x.to_dtype(if has_wider_weights(x, weight, bias) { DType::F32 } else { x.dtype })
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

/// Computes the wanted gradients of x, weight and bias, or calls a registered implementation with `tensors` and `argument`.
///
/// `tensors` are the gradient of the result, x, the mean, the rstd, the weight and, for a norm that has one, the bias. If no bias is given,
/// its gradient has the dtype of the weight, or else of x. `check` checks the operands and returns the norm's grouping.
fn gradients(
    op: &'static str,
    tensors: &[Option<&Tensor>],
    argument: Option<Argument>,
    wanted: [bool; 3],
    check: impl FnOnce() -> Result<RowGrouping>,
) -> Result<InputGradients> {
    let arguments = || argument.into_iter().chain([Argument::from(&wanted.map(usize::from))]).collect();
    if let Some(made) = call_replacement(op, tensors, arguments)? {
        let mut made = made.into_iter();
        return Ok(wanted.map(|wanted| if wanted { made.next() } else { None }));
    }
    let view = check()?;
    let &[Some(grad), Some(x), Some(mean), Some(rstd), weight, ref bias @ ..] = tensors else {
        unreachable!("four tensors and a weight")
    };
    let bias = bias.first().copied().flatten();
    same_device(op, &[grad, x, mean, rstd])?;
    same_dtype(op, &[x, grad])?;
    for t in [mean, rstd] {
        t.dtype.check_float(op)?;
    }
    mismatch!(op if grad.shape() != x.shape(), x, grad, "the gradient has the shape of the input");
    let (compute, [_, r1, r2, ..]) = (x.dtype.compute().dtype(), view.statistics_shape(x));
    mismatch!(op if [mean, rstd].iter().any(|t| t.numel() != r1 * r2), mean, rstd, "there is one number for each row");
    let mixed = has_wider_weights(x, weight, bias);
    for t in weight.into_iter().chain(bias).filter(|t| !mixed || t.dtype != DType::F32) {
        same_device(op, &[x, t])?;
        same_dtype(op, &[x, t])?;
    }
    let stand_in = match view {
        RowGrouping::Groups(_) | RowGrouping::Batch if wanted[2] && weight.or(bias).is_none() => {
            Some(Tensor::empty(x.shape().dims()[1], (x.dtype, x.device()))?)
        }
        _ => None,
    };
    no_grad(|| {
        let (grad, given) = (widened(grad, weight, bias)?, widened(x, weight, bias)?);
        let statistics = join_statistics(mean, rstd, [2, r1, r2, 1, 1], compute)?;
        let (dims, eps, rms, bias) = (view.weight_dims_for(x), 0.0, false, bias.or(weight).or(stand_in.as_ref()));
        let norm = Norm { op, view: &view, weight, bias, dims, eps, rms };
        let [to_x, to_weight, to_bias] = norm.backward(&given, &grad, &statistics, wanted)?;
        let to_x = to_x.filter(|_| wanted[0]).map(|t| t.to_dtype(x.dtype)).transpose()?;
        Ok([to_x, to_weight.filter(|_| wanted[1]), to_bias.filter(|_| wanted[2])])
    })
}

impl Tensor {
    /// Returns the result of [`Tensor::batch_norm`] in training, and the mean and `1 / sqrt(var + eps)` of each channel (PyTorch's
    /// `native_batch_norm`). The statistics are at least f32. Not recorded for autograd: compute gradients with
    /// [`Tensor::native_batch_norm_backward`]. Fails as [`Tensor::batch_norm`] does.
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
            let x = widened(self, weight, bias)?;
            same_dtype(op, &given_tensors(&x, [weight, bias]))?;
            let (n, given, shape) = (channel_numel(op, self)?, [weight, bias], &self.shape().dims()[1..2]);
            let (made, var) = forward_with_statistics(op, (&x, self.dtype), RowGrouping::Batch, given, eps, shape)?;
            update_running_statistics(op, options, n, [&made.1, &var])?;
            Ok(made)
        })
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
    /// Returns the result of [`Tensor::layer_norm`], and the mean and `1 / sqrt(var + eps)` of each row (PyTorch's `native_layer_norm`).
    /// The normalised dims of the statistics have size 1, and their dtype is at least f32. Not recorded for autograd: compute gradients
    /// with [`Tensor::native_layer_norm_backward`]. Fails as [`Tensor::layer_norm`] does.
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
    native_layer_norm(input: x, normalized_shape: &sizes, weight: x?, bias: x?, eps: float = 1e-5) "native_layer_norm":
        NeuralNetwork, Floats -> Same = |op, self, normalized_shape, weight, bias, eps| -> WithStatistics {
        no_grad(|| {
            let x = widened(self, weight, bias)?;
            check_last_dims(op, &x, normalized_shape, &[weight, bias])?;
            let view = RowGrouping::Last(normalized_shape.iter().product());
            let mut shape = SmallVec::<[usize; 6]>::from_slice(self.shape().dims());
            let kept = shape.len() - normalized_shape.len();
            shape[kept..].fill(1);
            Ok(forward_with_statistics(op, (&x, self.dtype), view, [weight, bias], eps, &shape)?.0)
        })
    };
    /// Computes the `wanted` gradients of input, weight and bias of [`Tensor::native_layer_norm`] (PyTorch's `native_layer_norm_backward`).
    /// This tensor is the gradient of the result. Not recorded for autograd. Fails as [`Tensor::layer_norm`] does.
    native_layer_norm_backward(grad_out: x, input: x, normalized_shape: &sizes, mean: x, rstd: x, weight: x?, bias: x?,
        output_mask: ints @read_mask) "native_layer_norm_backward":
        NeuralNetwork, Floats -> Same = manual |op, self, input, normalized_shape, mean, rstd, weight, bias, wanted| -> InputGradients {
        let tensors = [Some(self), Some(input), Some(mean), Some(rstd), weight, bias];
        gradients(op, &tensors, Some(normalized_shape.into()), wanted, || {
            check_last_dims(op, input, normalized_shape, &[])?;
            // Weight and bias may have a wider dtype than the input, which `gradients` checks.
            for t in weight.into_iter().chain(bias) {
                same_device(op, &[input, t])?;
                let hint = "weight and bias have the normalised shape";
                mismatch!(op if t.shape().dims() != normalized_shape, input, t, hint);
            }
            Ok(RowGrouping::Last(normalized_shape.iter().product()))
        })
    };
    native_batch_norm(input: x, running_mean: x?, running_var: x?, weight: x?, bias: x?, momentum: float = 0.1, eps: float = 1e-5)
        "native_batch_norm": NeuralNetwork, Floats -> Same => |a| {
        let [running_mean, running_var, weight, bias] = [1, 2, 3, 4].map(|i| a.optional_tensor(i));
        let (training, momentum, eps) = (true, a.float(0)?, a.float(1)?);
        a.tensor(0)?.native_batch_norm(BatchNormOptions { running_mean, running_var, weight, bias, training, momentum, eps })
    };
    /// Computes the `wanted` gradients of input, weight and bias of [`Tensor::native_batch_norm`] (PyTorch's `native_batch_norm_backward`).
    /// This tensor is the gradient of the result. Not recorded for autograd. Fails as [`Tensor::batch_norm`] does.
    native_batch_norm_backward(grad_out: x, input: x, mean: x, rstd: x, weight: x?, output_mask: ints @read_mask)
        "native_batch_norm_backward":
        NeuralNetwork, Floats -> Same = manual |op, self, input, mean, rstd, weight, wanted| -> InputGradients {
        gradients(op, &[Some(self), Some(input), Some(mean), Some(rstd), weight], None, wanted, || {
            check_channels(op, input, &[weight]).map(|()| RowGrouping::Batch)
        })
    };
    /// Returns the result of [`Tensor::group_norm`], and the mean and `1 / sqrt(var + eps)` of each group, `[N, groups]` (PyTorch's
    /// `native_group_norm`). The statistics are at least f32. Not recorded for autograd: compute gradients with
    /// [`Tensor::native_group_norm_backward`]. Fails as [`Tensor::group_norm`] does.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let x = Tensor::from_slice(&[1f32, 3.0, 5.0, 9.0], [1, 4], Device::Cpu)?;
    /// let (y, mean, rstd) = x.native_group_norm(2, None, None, 0.0)?;
    /// assert_eq!(y.to_vec::<f32>()?, [-1.0, 1.0, -1.0, 1.0]);
    /// assert_eq!((mean.to_vec::<f32>()?, rstd.to_vec::<f32>()?), (vec![2.0, 7.0], vec![1.0, 0.5]));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    native_group_norm(input: x, group: size, weight: x?, bias: x?, eps: float = 1e-5) "native_group_norm":
        NeuralNetwork, Floats -> Same = |op, self, groups, weight, bias, eps| -> WithStatistics {
        check_groups(op, self, groups, &[weight, bias])?;
        no_grad(|| {
            let x = widened(self, weight, bias)?;
            same_dtype(op, &given_tensors(&x, [weight, bias]))?;
            let (view, shape) = (RowGrouping::Groups(groups), [self.shape().dims()[0], groups]);
            Ok(forward_with_statistics(op, (&x, self.dtype), view, [weight, bias], eps, &shape)?.0)
        })
    };
    /// Computes the `wanted` gradients of input, weight and bias of [`Tensor::native_group_norm`] (PyTorch's `native_group_norm_backward`).
    /// This tensor is the gradient of the result. Not recorded for autograd. Fails as [`Tensor::group_norm`] does.
    native_group_norm_backward(grad_out: x, input: x, group: size, mean: x, rstd: x, weight: x?, output_mask: ints @read_mask)
        "native_group_norm_backward":
        NeuralNetwork, Floats -> Same = manual |op, self, input, groups, mean, rstd, weight, wanted| -> InputGradients {
        let tensors = [Some(self), Some(input), Some(mean), Some(rstd), weight];
        gradients(op, &tensors, Some(groups.into()), wanted, || {
            check_groups(op, input, groups, &[weight]).map(|()| RowGrouping::Groups(groups))
        })
    };
}

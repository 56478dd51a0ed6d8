//! The norms as methods of `Tensor`: argument checks, and the view of rows that each norm uses.

use crate::backend::problem::norm::{RowGrouping, unbind};
use crate::ops::dispatch::autocast::halves_to_f32;
use crate::ops::dispatch::prelude::*;
use crate::ops::elementwise::record_formula;
use crate::ops::nn::norm::{BatchNormOptions, normalise};
use crate::ops::reduce::table::rows;

/// The weight and the bias, if given.
type Given<'a> = [Option<&'a Tensor>; 2];

/// Returns a list of x and, if given, the weight and the bias.
pub(crate) fn given_tensors<'a>(x: &'a Tensor, others: Given<'a>) -> Dims<&'a Tensor> {
    [x].into_iter().chain(others.into_iter().flatten()).collect()
}

/// Returns the weight and bias in `all`, which holds converted tensors in the order of [`given_tensors`].
fn weight_and_bias<'a>(all: &'a [Tensor], given: Given) -> Given<'a> {
    let mut others = all[1..].iter();
    given.map(|t| t.and_then(|_| others.next()))
}

/// Converts the inputs to f32, and returns the converted inputs and the dtype of the result; `None` if no conversion is needed.
///
/// A conversion is needed under autocast and, as in PyTorch's layers, for f16 or bf16 inputs with an f32 weight or bias, so that only
/// the result is rounded.
fn cast_to_f32(inputs: &[&Tensor]) -> Result<Option<(SmallVec<[Tensor; 3]>, DType)>> {
    let half = inputs[0].dtype;
    let mixed = half.is_half() && inputs[1..].iter().any(|t| t.dtype == DType::F32);
    Ok(match autocast_to_f32(inputs)? {
        Some(wide) => Some((wide, DType::F32)),
        None if mixed => Some((halves_to_f32(inputs)?.unwrap_or_default(), half)),
        None => None,
    })
}

/// Checks that each of the given tensors has one number for each channel of x.
pub(crate) fn check_channels(op: &'static str, x: &Tensor, given: &[Option<&Tensor>]) -> Result<()> {
    x.dtype.check_float(op)?;
    invalid!(op if x.rank() < 2, "the input is [N, C, ..], this one has shape {}", x.shape());
    for t in given.iter().flatten() {
        same_device(op, &[x, t])?;
        mismatch!(op if t.shape().dims() != [x.shape().dims()[1]], x, t, "there is one number for each channel");
    }
    Ok(())
}

/// Checks the given tensors like [`check_channels`], and checks that `groups` divides the number of channels.
pub(crate) fn check_groups(op: &'static str, x: &Tensor, groups: usize, given: &[Option<&Tensor>]) -> Result<()> {
    check_channels(op, x, given)?;
    let channels = x.shape().dims()[1];
    invalid!(op if groups == 0 || !channels.is_multiple_of(groups),
        "{groups} groups do not divide {channels} channels evenly");
    Ok(())
}

pub(crate) fn check_last_dims(op: &'static str, x: &Tensor, shape: &[usize], given: &[Option<&Tensor>]) -> Result<()> {
    x.dtype.check_float(op)?;
    if shape.is_empty() || !x.shape().dims().ends_with(shape) {
        let hint = "the normalised shape is that of the input's last dims";
        return Err(Error::ShapeMismatch { op, lhs: x.shape().clone(), rhs: shape.into(), hint });
    }
    for t in given.iter().flatten() {
        same_device(op, &[x, t])?;
        same_dtype(op, &[x, t])?;
        mismatch!(op if t.shape().dims() != shape, x, t, "weight and bias have the normalised shape");
    }
    Ok(())
}

/// Returns the number of elements of each channel of x.
pub(crate) fn channel_numel(op: &'static str, x: &Tensor) -> Result<usize> {
    let n: usize = x.shape().dims().iter().enumerate().filter(|(d, _)| *d != 1).map(|(_, &n)| n).product();
    invalid!(op if n == 1, "shape {} has one element in each channel, which has no variance", x.shape());
    Ok(n)
}

/// Moves the given running statistics towards the mean and the unbiased variance of channels that have n elements each.
pub(crate) fn update_running_statistics(
    op: &'static str,
    options: BatchNormOptions,
    n: usize,
    [mean, var]: [&Tensor; 2],
) -> Result<()> {
    let BatchNormOptions { running_mean, running_var, momentum, .. } = options;
    let unbiased = n as f64 / (n as f64 - 1.0);
    let scalars = [Scalar::Float(momentum), Scalar::Float(1.0 - momentum), Scalar::Float(momentum * unbiased)];
    let update = || match (running_mean, running_var) {
        (Some(m), Some(v)) => Tensor::map_into(&[m, v, mean, var], &scalars, &[m, v], |x, s| {
            vec![&s[1] * &x[0] + &s[0] * &x[2], &s[1] * &x[1] + &s[2] * &x[3]]
        }),
        (Some(m), None) => Tensor::map_into(&[m, mean], &scalars, &[m], |x, s| vec![&s[1] * &x[0] + &s[0] * &x[1]]),
        (None, Some(v)) => Tensor::map_into(&[v, var], &scalars, &[v], |x, s| vec![&s[1] * &x[0] + &s[2] * &x[1]]),
        (None, None) => Ok(()),
    };
    if n > 0 { no_grad(update).with_op(op) } else { Ok(()) }
}

impl Tensor {
    /// Computes `x / sqrt(mean(x²) + eps) * weight` over the last dims (PyTorch's `rms_norm`). The last dims and the weight have the
    /// normalised shape. Without an eps, the machine epsilon of the dtype is used. Floats, computed at least in f32. Takes as many
    /// launches as [`Tensor::layer_norm`]. Differentiable.
    #[track_caller]
    pub fn rms_norm(&self, normalized_shape: &[usize], weight: Option<&Tensor>, eps: Option<f64>) -> Result<Tensor> {
        let _caller = Caller::enter();
        let op = "rms_norm";
        let inputs = given_tensors(self, [weight, None]);
        cast_first!(autocast_to_f32(&inputs)?, |x| x[0].rms_norm(normalized_shape, x.get(1), eps));
        return_replacement!(op, inputs, normalized_shape, eps);
        check_last_dims(op, self, normalized_shape, &[weight])?;
        let view = RowGrouping::Last(normalized_shape.iter().product());
        let least = match self.dtype {
            DType::F64 => f64::EPSILON,
            DType::F16 => 2f64.powi(-10),
            DType::BF16 => 2f64.powi(-7),
            _ => f32::EPSILON.into(),
        };
        Ok(normalise(op, self, view, [weight, None], eps.unwrap_or(least), true)?.0)
    }

    /// Subtracts from each channel of `[N, C, ..]` its mean, and divides it by its standard deviation (PyTorch's `batch_norm`).
    ///
    /// In training, mean and variance are computed from the batch, and the running statistics move towards the batch's mean and unbiased
    /// variance; this takes one launch more than [`Tensor::layer_norm`]. In evaluation, the running statistics are used. Floats, computed
    /// at least in f32. For f16 or bf16 inputs, all other tensors have the dtype of the input or f32, also under autocast. Keeps the memory
    /// format. Differentiable with respect to x, weight and bias. Fails as [`Tensor::layer_norm`] does, and with [`Error::Invalid`] in
    /// evaluation without running statistics, and in training for channels of one element.
    ///
    /// ```
    /// use claystone::{BatchNormOptions, Device, Tensor};
    /// let x = Tensor::from_slice(&[1f32, 10.0, 3.0, 30.0], [2, 2], Device::Cpu)?;
    /// let y = x.batch_norm(BatchNormOptions { training: true, eps: 0.0, ..Default::default() })?;
    /// assert_eq!(y.to_vec::<f32>()?, [-1.0, -1.0, 1.0, 1.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn batch_norm(&self, options: BatchNormOptions) -> Result<Tensor> {
        let _caller = Caller::enter();
        let op = "batch_norm";
        let BatchNormOptions { running_mean, running_var, weight, bias, training, momentum, eps } = options;
        // For f16 and bf16 inputs, kernels read weight and bias in f32 directly if both are f32.
        let inputs = given_tensors(self, [weight, bias]);
        let mixed = self.dtype.is_half() && inputs[1..].iter().any(|t| t.dtype == DType::F32);
        if mixed && let Some(wide) = halves_to_f32(&inputs[1..])? {
            let mut wide = wide.iter();
            let [weight, bias] = [weight, bias].map(|t| t.and_then(|_| wide.next()));
            return self.batch_norm(BatchNormOptions { weight, bias, ..options });
        }
        // A registered replacement cannot update the running statistics in place, so it is not called if there are any to update.
        if !training || (running_mean.is_none() && running_var.is_none()) {
            return_replacement!(op, [Some(self), running_mean, running_var, weight, bias], training, momentum, eps);
        }
        check_channels(op, self, &[weight, bias, running_mean, running_var])?;
        same_dtype(op, &inputs[usize::from(mixed)..])?;
        let channels = self.shape().dims()[1];
        if training {
            let n = channel_numel(op, self)?;
            let (out, statistics) = normalise(op, self, RowGrouping::Batch, [weight, bias], eps, false)?;
            let [mean, _, var] = unbind(op, &statistics)?;
            update_running_statistics(op, options, n, [&mean.reshape([channels])?, &var.reshape([channels])?])?;
            return Ok(out);
        }
        let (Some(mean), Some(var)) = (running_mean, running_var) else {
            return Err(Error::invalid(op, "evaluation needs the running mean and variance"));
        };
        let shape: Shape = (0..self.rank()).map(|d| if d == 1 { channels } else { 1 }).collect();
        let column = |t: &Tensor| t.reshape(&shape);
        let all: Dims<Tensor> = [mean, var].into_iter().chain(weight).chain(bias).map(column).collect::<Result<_>>()?;
        let inputs: Dims<&Tensor> = std::iter::once(self).chain(&all).collect();
        // The scale of a channel is computed once, not for each of its elements.
        let scale = (Expr::input(2) + eps).rsqrt();
        let scale = if weight.is_some() { scale * Expr::input(3) } else { scale };
        let scaled = (Expr::input(0) - Expr::input(1)) * scale;
        let shifted = if bias.is_some() { scaled + Expr::input(all.len()) } else { scaled };
        let derivative = |i| shifted.diff(i);
        let numbers = [Some(mean), Some(var), weight, bias];
        let alike = mean.dtype == self.dtype && var.dtype == self.dtype;
        match if alike { backend::of_device(self.device()).normalise_channels(self, numbers, eps)? } else { None } {
            Some(out) if autograd::is_tracked(&inputs) => {
                Ok(record_formula(op, out, &inputs, Params::default(), &derivative))
            }
            Some(out) => Ok(out),
            None => apply_formula(op, &inputs, self.dtype, &shifted, derivative),
        }
    }
}

operations! {
    /// Computes `(x - mean) / sqrt(var + eps) * weight + bias` over the last dims (PyTorch's `layer_norm`, with a default eps of 1e-5).
    ///
    /// The last dims, weight and bias have the normalised shape. Floats, computed at least in f32. For f16 or bf16 inputs, weight and
    /// bias have the dtype of the input or f32. One launch; GPUs need two for rows that do not fit in registers. Differentiable with
    /// respect to x, weight and bias.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let x = Tensor::from_slice(&[1f32, 3.0, 5.0, 9.0], [2, 2], Device::Cpu)?;
    /// let y = x.layer_norm(&[2], None, None, 0.0)?;
    /// assert_eq!(y.to_vec::<f32>()?, [-1.0, 1.0, -1.0, 1.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    layer_norm(input: x, normalized_shape: &sizes, weight: x?, bias: x?, eps: float = 1e-5) functional:
        NeuralNetwork, Floats -> Same, differentiable = manual |op, self, normalized_shape, weight, bias, eps| {
        let inputs = given_tensors(self, [weight, bias]);
        if let Some((wide, dtype)) = cast_to_f32(&inputs)? {
            let [weight, bias] = weight_and_bias(&wide, [weight, bias]);
            return wide[0].layer_norm(normalized_shape, weight, bias, eps)?.to_dtype(dtype);
        }
        return_replacement!(op, [Some(self), weight, bias], normalized_shape, eps);
        check_last_dims(op, self, normalized_shape, &[weight, bias])?;
        let view = RowGrouping::Last(normalized_shape.iter().product());
        Ok(normalise(op, self, view, [weight, bias], eps, false)?.0)
    };
    rms_norm(input: x, normalized_shape: &sizes, weight: x?, eps: float?) functional:
        NeuralNetwork, Floats -> Same, differentiable;
    /// Normalises each group of channels of `[N, C, ..]` as [`Tensor::layer_norm`] does, with a weight and a bias for each channel
    /// (PyTorch's `group_norm`, with a default eps of 1e-5). Takes as many launches as `layer_norm`. Differentiable. Fails as
    /// [`Tensor::layer_norm`] does, and with [`Error::Invalid`] if the channels are not divisible by the number of groups.
    group_norm(input: x, num_groups: size, weight: x?, bias: x?, eps: float = 1e-5) functional:
        NeuralNetwork, Floats -> Same, differentiable = manual |op, self, groups, weight, bias, eps| {
        let inputs = given_tensors(self, [weight, bias]);
        if let Some((wide, dtype)) = cast_to_f32(&inputs)? {
            let [weight, bias] = weight_and_bias(&wide, [weight, bias]);
            return wide[0].group_norm(groups, weight, bias, eps)?.to_dtype(dtype);
        }
        return_replacement!(op, [Some(self), weight, bias], groups, eps);
        check_groups(op, self, groups, &[weight, bias])?;
        same_dtype(op, &inputs)?;
        Ok(normalise(op, self, RowGrouping::Groups(groups), [weight, bias], eps, false)?.0)
    };
    /// Normalises each channel of each sample of `[N, C, ..]` as [`Tensor::layer_norm`] does, with a weight and a bias for each channel
    /// (PyTorch's `instance_norm`, with a default eps of 1e-5). Takes as many launches as `layer_norm`. Differentiable.
    instance_norm(input: x, weight: x?, bias: x?, eps: float = 1e-5) functional:
        NeuralNetwork, Floats -> Same, differentiable = |op, self, weight, bias, eps| {
        check_channels(op, self, &[weight, bias])?;
        self.group_norm(self.shape().dims()[1].max(1), weight, bias, eps).with_op(op)
    };
    batch_norm(input: x, running_mean: x?, running_var: x?, weight: x?, bias: x?,
        training: bool = false, momentum: float = 0.1, eps: float = 1e-5) functional:
        NeuralNetwork, Floats -> Same, differentiable => |a| {
        let [running_mean, running_var, weight, bias] = [1, 2, 3, 4].map(|i| a.optional_tensor(i));
        let (training, momentum, eps) = (a.bool(0)?, a.float(1)?, a.float(2)?);
        a.tensor(0)?.batch_norm(BatchNormOptions { running_mean, running_var, weight, bias, training, momentum, eps })
    };
    /// Computes `x / max(|x|, eps)` with the p-norm along `dim` (PyTorch's `normalize`, with defaults of 2, 1 and 1e-12). Floats.
    /// Differentiable. Fails with [`Error::Invalid`] unless p is above 0.
    normalize(input: x, p: float = 2, dim: int = 1, eps: float = 1e-12) functional:
        NeuralNetwork, Floats -> Same, differentiable = manual |op, self, p, dim, eps| {
        self.dtype.check_float(op)?;
        return_replacement!(op, [self], p, dim, eps);
        cast_first!(autocast_to_f32(&[self])?, |x| x[0].normalize(p, dim, eps));
        invalid!(op if p.is_nan() || p <= 0.0, "p is {p}, it must be above 0");
        // The norm may overflow f16 even if the quotients do not, so it is computed in f32.
        let norm = match (self.dtype, p == 2.0) {
            (DType::F16, true) => rows::norm.apply_in(DType::F32, self, &dim.into(), true),
            (DType::F16, false) => self.to_dtype(DType::F32)?.vector_norm(p, dim, true),
            _ => self.vector_norm(p, dim, true),
        };
        let norm = norm.with_op(op)?;
        let quotient = Expr::input(0) / Expr::input(1).lt(eps).select(eps, Expr::input(1));
        apply_formula(op, &[self, &norm], self.dtype, &quotient, |i| quotient.diff(i))
    };
}

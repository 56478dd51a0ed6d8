//! Norms that give their statistics, and gradients that are made of these: for whoever keeps them from forward to backward himself, as
//! PyTorch's autograd does.

use crate::backend::problem::norm::{View, unbind};
use crate::ops::dispatch::args::Args;
use crate::ops::dispatch::arguments::Argument;
use crate::ops::dispatch::prelude::*;
use crate::ops::nn::norm::methods::{check_channels, check_last, in_training};
use crate::ops::nn::norm::{BatchNormOptions, Norm, normalised};
use crate::{DType, Result, Tensor, no_grad};

/// A result with the mean and 1 / sqrt(var + eps) of each row.
type WithStatistics = (Tensor, Tensor, Tensor);

/// The two of these, of this shape, from [`View::statistics`], which are written over.
fn split(op: &'static str, out: Tensor, statistics: &Tensor, shape: &[usize], eps: f64) -> Result<WithStatistics> {
    let [mean, var] = unbind(op, statistics)?;
    Tensor::map_into(&[&var], &[eps.into()], &[&var], |x, s| vec![(&x[0] + &s[0]).rsqrt()])?;
    Ok((out, mean.reshape(shape)?, var.reshape(shape)?))
}

/// The gradients of x, weight and bias where they are wanted, a weight standing in for a bias that is not given.
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
    let compute = x.dtype.compute().dtype();
    let statistics = view.statistics(x)?;
    mismatch!(op if [mean, rstd].iter().any(|t| 2 * t.numel() != statistics.numel()), mean, rstd, "there is one number for each row");
    // Weights may be wider than the input: then all is computed in their dtype.
    let mixed = x.dtype.size() == 2 && weight.or(bias).is_some_and(|w| w.dtype == DType::F32);
    for t in weight.into_iter().chain(bias).filter(|t| !mixed || t.dtype != DType::F32) {
        same_device(op, &[x, t])?;
        same_dtype(op, &[x, t])?;
    }
    let wide = |t: &Tensor| if mixed { t.to_dtype(compute) } else { Ok(t.shallow_clone()) };
    no_grad(|| {
        let (grad, given) = (wide(grad)?, wide(x)?);
        let [to_mean, to_var] = unbind(op, &statistics)?;
        let column = |t: &Tensor| t.to_dtype(compute)?.reshape(to_mean.shape());
        let (mean, rstd) = (column(mean)?, column(rstd)?);
        to_mean.copy_(&mean)?;
        Tensor::map_into(&[&rstd], &[], &[&to_var], |x, _| vec![(&x[0] * &x[0]).recip()])?;
        let dims = view.weighted();
        let norm = Norm { op, view: &view, weight, bias: bias.or(weight), dims, eps: 0.0, rms: false };
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
    normalized_shape: Option<&[usize]>,
) -> Result<Option<[Option<Tensor>; 3]>> {
    let mask = wanted.map(usize::from);
    let arguments = || normalized_shape.map(Argument::from).into_iter().chain([Argument::from(&mask)]).collect();
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
            if weight.or(bias).is_some_and(|w| w.dtype != self.dtype) && self.dtype.size() == 2 {
                let (out, mean, rstd) =
                    self.to_dtype(DType::F32)?.native_layer_norm(normalized_shape, weight, bias, eps)?;
                return Ok((out.to_dtype(self.dtype)?, mean, rstd));
            }
            check_last(op, self, normalized_shape, &[weight, bias])?;
            let view = View::Last(normalized_shape.iter().product());
            let statistics = view.statistics(self)?;
            let out = normalised(op, (self, &statistics), view, weight, bias, eps, false)?;
            let mut shape = self.shape().dims().to_vec();
            let kept = shape.len() - normalized_shape.len();
            shape[kept..].fill(1);
            split(op, out, &statistics, &shape, eps)
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
        if let Some(made) = replaced_gradients(op, &tensors, wanted, Some(normalized_shape))? {
            return Ok(made);
        }
        // Those of a weight and a bias wider than the input have been checked by forward.
        let narrow = |t: Option<&'_ Tensor>| t.filter(|t| t.dtype == input.dtype).map(Tensor::shallow_clone);
        check_last(op, input, normalized_shape, &[narrow(weight).as_ref(), narrow(bias).as_ref()])?;
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
            if weight.or(bias).is_some_and(|w| w.dtype != self.dtype) && self.dtype.size() == 2 {
                let (out, mean, rstd) = self.to_dtype(DType::F32)?.native_batch_norm(options)?;
                return Ok((out.to_dtype(self.dtype)?, mean, rstd));
            }
            same_dtype(op, &[Some(self), weight, bias].into_iter().flatten().collect::<Vec<_>>())?;
            let (out, statistics) = in_training(op, self, options)?;
            split(op, out, &statistics, &self.shape().dims()[1..2], eps)
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
}

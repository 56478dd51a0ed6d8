//! Gradient clipping. Nothing here waits for the device, except `all_finite`.

use super::flat::{is_dense, join_adjacent_views};
use super::rule::check_range;
use crate::internal::for_each_part;
use crate::{DType, Device, Result, Tensor, no_grad};

/// Returns the gradients of `parameters`. Gradients that are adjacent in an optimiser's buffer are returned as one view, to save launches.
pub(super) fn gradient_views<'a>(parameters: impl IntoIterator<Item = &'a Tensor>) -> Result<Vec<Tensor>> {
    join_adjacent_views(parameters.into_iter().filter_map(Tensor::grad), is_dense)
}

/// Computes the `p`-norm of all elements as a scalar tensor. Computes in f64 for f64, otherwise in f32.
fn norm(t: &Tensor, p: f64) -> Result<Tensor> {
    let t = if t.dtype() == DType::F64 { t.shallow_clone() } else { t.to_dtype(DType::F32)? };
    t.vector_norm(p, (), false)
}

/// Scales the gradients of `parameters` down so that their total norm is at most `max_norm`. Returns the norm before scaling, as a
/// scalar tensor (PyTorch's `clip_grad_norm_`). All gradients are treated as one vector. `norm_type` is 2 for the Euclidean norm, or
/// infinity for the largest magnitude. Clipping all parameters of an optimiser takes a few launches and does not wait for the device.
/// If the norm is not finite, gradients become NaN or 0, as in PyTorch.
///
/// ```
/// use claystone::{Device, Tensor, optim::clip_grad_norm_};
/// let w = Tensor::from_slice(&[3f32, 4.0], 2, Device::Cpu)?.requires_grad_(true)?;
/// w.mul(&w)?.sum((), false)?.backward()?; // the gradient is [6, 8]
/// assert_eq!(clip_grad_norm_([&w], 5.0, 2.0)?.item::<f32>()?, 10.0);
/// assert!((w.grad().unwrap().to_vec::<f32>()?[0] - 3.0).abs() < 1e-5);
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// # Errors
/// [`crate::Error::Invalid`] for a `max_norm` below 0 or a `norm_type` that is not above 0; [`crate::Error::DeviceMismatch`]
/// if gradients are on several devices; [`crate::Error::Partial`] if the device fails after some gradients were scaled.
pub fn clip_grad_norm_<'a>(
    parameters: impl IntoIterator<Item = &'a Tensor>,
    max_norm: f64,
    norm_type: f64,
) -> Result<Tensor> {
    let op = "clip_grad_norm_";
    check_range(op, "max_norm", max_norm, 0.0..f64::INFINITY)?;
    let with_gradients: Vec<&Tensor> = parameters.into_iter().collect();
    let total = get_total_norm(with_gradients.iter().filter_map(|p| p.grad()), norm_type).map_err(|e| e.with_op(op))?;
    clip_grads_with_norm_(with_gradients, max_norm, &total).map_err(|e| e.with_op(op))?;
    Ok(total)
}

/// Computes the norm of all tensors joined to one vector, as a scalar tensor (PyTorch's `get_total_norm`). It is the first step of
/// [`clip_grad_norm_`]. Use it, for example, to log the norm or to combine the norms of several processes. Fails with
/// [`crate::Error::Invalid`] for a `norm_type` that is not above 0, and with [`crate::Error::DeviceMismatch`] for tensors on several
/// devices.
///
/// ```
/// use claystone::{Device, Tensor, optim::get_total_norm};
/// let tensors = [Tensor::full(1, 3, Device::Cpu)?, Tensor::full(1, 4, Device::Cpu)?];
/// assert_eq!(get_total_norm(tensors, 2.0)?.item::<f32>()?, 5.0);
/// # Ok::<(), claystone::Error>(())
/// ```
pub fn get_total_norm(tensors: impl IntoIterator<Item = Tensor>, norm_type: f64) -> Result<Tensor> {
    let op = "get_total_norm";
    invalid!(op if norm_type.is_nan() || norm_type <= 0.0, "norm_type is {norm_type}, it must be above 0");
    no_grad(|| {
        let norms =
            join_adjacent_views(tensors, is_dense)?.iter().map(|t| norm(t, norm_type)).collect::<Result<Vec<_>>>()?;
        match &norms[..] {
            [] => Tensor::zeros((), Device::default()),
            [one] => Ok(one.shallow_clone()),
            all => {
                let widest = if all.iter().any(|n| n.dtype() == DType::F64) { DType::F64 } else { DType::F32 };
                let all = all.iter().map(|n| n.to_dtype(widest)).collect::<Result<Vec<_>>>()?;
                norm(&Tensor::stack(&all, 0)?, norm_type)
            }
        }
    })
    .map_err(|e| e.with_op(op))
}

/// Scales the gradients of `parameters` down by the factor that reduces `total_norm` to at most `max_norm` (PyTorch's
/// `clip_grads_with_norm_`). `total_norm` is a scalar tensor on the gradients' device, such as the result of [`get_total_norm`]. Fails as
/// [`clip_grad_norm_`] does.
pub fn clip_grads_with_norm_<'a>(
    parameters: impl IntoIterator<Item = &'a Tensor>,
    max_norm: f64,
    total_norm: &Tensor,
) -> Result<()> {
    let op = "clip_grads_with_norm_";
    check_range(op, "max_norm", max_norm, 0.0..f64::INFINITY)?;
    no_grad(|| {
        for_each_part(op, &gradient_views(parameters)?, |run| {
            Tensor::map_into(&[run, total_norm], &[max_norm.into()], &[run], |x, s| {
                vec![&x[0] * (&s[0] / (&x[1] + 1e-6)).min(1.0)]
            })
        })
    })
    .map_err(|e| e.with_op(op))
}

/// True if all gradients are finite. Waits for the device, and copies only flags to the host.
pub(super) fn all_finite<'a>(parameters: impl IntoIterator<Item = &'a Tensor>) -> Result<bool> {
    no_grad(|| {
        let runs = gradient_views(parameters)?;
        let flags = runs.iter().map(|run| run.isfinite()?.all((), false)).collect::<Result<Vec<Tensor>>>()?;
        flags.iter().try_fold(true, |all, flag| Ok(all & (flag.storage().is_simulated() || flag.item::<bool>()?)))
    })
}

/// Clamps the gradients of `parameters` to `-value..=value` (PyTorch's `clip_grad_value_`). One launch clamps all gradients of an
/// optimiser. Fails with [`crate::Error::Invalid`] for a `value` below 0, and with [`crate::Error::Partial`] as [`clip_grad_norm_`] does.
pub fn clip_grad_value_<'a>(parameters: impl IntoIterator<Item = &'a Tensor>, value: f64) -> Result<()> {
    let op = "clip_grad_value_";
    check_range(op, "value", value, 0.0..f64::INFINITY)?;
    no_grad(|| for_each_part(op, &gradient_views(parameters)?, |run| run.clamp_(-value, value).map(|_| ())))
        .map_err(|e| e.with_op(op))
}

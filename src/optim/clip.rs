//! Gradients kept within bounds, on the device: nothing waits.

use super::flat::{is_dense, joined_views};
use super::rule::check;
use crate::{DType, Device, Result, Tensor, for_each_part, no_grad};

/// The gradients of `parameters` in as few views as can be: neighbours in an optimiser's buffer are one.
pub(super) fn gradients<'a>(parameters: impl IntoIterator<Item = &'a Tensor>) -> Result<Vec<Tensor>> {
    joined_views(parameters.into_iter().filter_map(Tensor::grad), is_dense)
}

/// The norm of all elements, in f32 at least.
fn norm(t: &Tensor, p: f64) -> Result<Tensor> {
    let t = if t.dtype() == DType::F64 { t.shallow_clone() } else { t.to_dtype(DType::F32)? };
    t.vector_norm(p, (), false)
}

/// Scales the gradients of `parameters` down so that their norm, taken over all of them as if they were one vector, is at most
/// `max_norm`; gives the norm before, a scalar (PyTorch's `clip_grad_norm_`). `norm_type` is 2 for the Euclidean norm,
/// infinity for the greatest magnitude. A few launches for all parameters of an optimiser, and no wait: a norm that is not
/// finite makes the gradients what it is in PyTorch, NaN or 0.
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
/// [`crate::Error::Invalid`] for a `max_norm` below 0 or a `norm_type` that is not above 0;
/// [`crate::Error::DeviceMismatch`] where gradients are on several devices; [`crate::Error::Partial`] where the device fails
/// after some of them were scaled.
pub fn clip_grad_norm_<'a>(
    parameters: impl IntoIterator<Item = &'a Tensor>,
    max_norm: f64,
    norm_type: f64,
) -> Result<Tensor> {
    let op = "clip_grad_norm_";
    check(op, "max_norm", max_norm, 0.0..f64::INFINITY)?;
    let with_gradients: Vec<&Tensor> = parameters.into_iter().collect();
    let total = get_total_norm(with_gradients.iter().filter_map(|p| p.grad()), norm_type).map_err(|e| e.of(op))?;
    clip_grads_with_norm_(with_gradients, max_norm, &total).map_err(|e| e.of(op))?;
    Ok(total)
}

/// The norm of tensors as if they were one vector, a scalar (PyTorch's `get_total_norm`): of what
/// [`clip_grad_norm_`] clips by, for who wants it without, or over more than the gradients at hand.
///
/// ```
/// use claystone::{Device, Tensor, optim::get_total_norm};
/// let tensors = [Tensor::full(1, 3, Device::Cpu)?, Tensor::full(1, 4, Device::Cpu)?];
/// assert_eq!(get_total_norm(tensors, 2.0)?.item::<f32>()?, 5.0);
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// # Errors
/// [`crate::Error::Invalid`] for a `norm_type` that is not above 0; [`crate::Error::DeviceMismatch`] for tensors of several
/// devices.
pub fn get_total_norm(tensors: impl IntoIterator<Item = Tensor>, norm_type: f64) -> Result<Tensor> {
    let op = "get_total_norm";
    if norm_type.is_nan() || norm_type <= 0.0 {
        return Err(crate::Error::invalid(op, format!("norm_type is {norm_type}, it must be above 0")));
    }
    no_grad(|| {
        let norms = joined_views(tensors, is_dense)?.iter().map(|t| norm(t, norm_type)).collect::<Result<Vec<_>>>()?;
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
    .map_err(|e| e.of(op))
}

/// Scales the gradients of `parameters` down by what brings `total_norm`, a scalar on their device, to at most `max_norm`
/// (PyTorch's `clip_grads_with_norm_`): the second half of [`clip_grad_norm_`], after [`get_total_norm`].
///
/// # Errors
/// As [`clip_grad_norm_`].
pub fn clip_grads_with_norm_<'a>(
    parameters: impl IntoIterator<Item = &'a Tensor>,
    max_norm: f64,
    total_norm: &Tensor,
) -> Result<()> {
    let op = "clip_grads_with_norm_";
    check(op, "max_norm", max_norm, 0.0..f64::INFINITY)?;
    no_grad(|| {
        for_each_part(op, &gradients(parameters)?, |run| {
            Tensor::map_into(&[run, total_norm], &[max_norm.into()], &[run], |x, s| {
                vec![&x[0] * (&s[0] / (&x[1] + 1e-6)).min(1.0)]
            })
        })
    })
    .map_err(|e| e.of(op))
}

/// Whether all gradients are finite: the one thing that is read from the device.
pub(super) fn all_finite<'a>(parameters: impl IntoIterator<Item = &'a Tensor>) -> Result<bool> {
    no_grad(|| {
        let runs = gradients(parameters)?;
        let flags = runs.iter().map(|run| run.isfinite()?.all((), false)).collect::<Result<Vec<Tensor>>>()?;
        flags.iter().try_fold(true, |all, flag| Ok(all & flag.item::<bool>()?))
    })
}

/// Limits each element of the gradients of `parameters` to `-value..=value` (PyTorch's `clip_grad_value_`). One launch for all
/// parameters of an optimiser.
///
/// # Errors
/// [`crate::Error::Invalid`] for a `value` below 0; [`crate::Error::Partial`] as for [`clip_grad_norm_`].
pub fn clip_grad_value_<'a>(parameters: impl IntoIterator<Item = &'a Tensor>, value: f64) -> Result<()> {
    let op = "clip_grad_value_";
    check(op, "value", value, 0.0..f64::INFINITY)?;
    no_grad(|| for_each_part(op, &gradients(parameters)?, |run| run.clamp_(-value, value).map(|_| ())))
        .map_err(|e| e.of(op))
}

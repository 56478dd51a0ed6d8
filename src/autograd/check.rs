//! Gradient checking by central differences.

use super::{GradOptions, enable_grad, grad_with_options};
use crate::{DType, Error, Result, Tensor, no_grad};

/// Checks the gradient that [`Tensor::backward`] gives for `f` against central differences
/// (`(f(x+h) - f(x-h)) / 2h` with `h` = 1e-6 of the value's scale), element by element (PyTorch's `gradcheck`).
///
/// `inputs` are f64 tensors of any shape, strides and device; `f` must be deterministic and give a one-element tensor.
/// An element passes when both agree to `tolerance`, absolute below 1 and relative above.
///
/// ```
/// use claystone::{DType, Device, Tensor, autograd::gradcheck};
/// let x = Tensor::randn(&[3, 2], (DType::F64, Device::Cpu))?;
/// gradcheck(|x| x[0].tanh()?.sum((), false), &[x], 1e-6)?;
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// # Errors
/// [`Error::Autograd`] naming the first element that differs, and whatever `f` returns.
pub fn gradcheck(f: impl Fn(&[Tensor]) -> Result<Tensor>, inputs: &[Tensor], tolerance: f64) -> Result<()> {
    let op = "gradcheck";
    if let Some(t) = inputs.iter().find(|t| t.dtype() != DType::F64) {
        return Err(Error::UnsupportedDType { op, dtype: t.dtype(), expected: "f64: differences need the digits" });
    }
    let leaves = inputs.iter().map(|t| t.detach().requires_grad_(true)).collect::<Result<Vec<_>>>()?;
    f(&leaves)?.backward()?;
    for (i, input) in inputs.iter().enumerate() {
        let values = input.to_vec::<f64>()?;
        let analytic = match leaves[i].grad() {
            Some(grad) => grad.to_vec::<f64>()?,
            None => vec![0.0; values.len()],
        };
        for k in 0..values.len() {
            let h = 1e-6 * values[k].abs().max(1.0);
            let at = |x: f64| -> Result<f64> {
                let mut moved = values.clone();
                moved[k] = x;
                let mut all: Vec<Tensor> = inputs.iter().map(Tensor::detach).collect();
                all[i] = Tensor::from_slice(&moved, input.shape(), input.device())?;
                no_grad(|| f(&all))?.item::<f64>()
            };
            let numeric = (at(values[k] + h)? - at(values[k] - h)?) / (2.0 * h);
            let error = (numeric - analytic[k]).abs();
            if error.is_nan() || error > tolerance * numeric.abs().max(1.0) {
                let reason = format!(
                    "element {k} of input {i}: backward gives {}, central differences give {numeric}",
                    analytic[k]
                );
                return Err(Error::Autograd { op, reason });
            }
        }
    }
    Ok(())
}

/// Checks gradients of gradients: that the gradient of `f`, recorded with `create_graph` and weighted with fixed numbers,
/// has the gradient that central differences of it give (PyTorch's `gradgradcheck`). As [`gradcheck`] otherwise.
///
/// ```
/// use claystone::{DType, Device, Tensor, autograd::gradgradcheck};
/// let x = Tensor::randn(&[3, 2], (DType::F64, Device::Cpu))?;
/// gradgradcheck(|x| x[0].tanh()?.sum((), false), &[x], 1e-6)?;
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// # Errors
/// As [`gradcheck`]; [`Error::Autograd`] where an operation's backward is not made of differentiable operations.
pub fn gradgradcheck(f: impl Fn(&[Tensor]) -> Result<Tensor>, inputs: &[Tensor], tolerance: f64) -> Result<()> {
    let weighted = |x: &[Tensor]| {
        // Differences come with plain tensors, under no_grad.
        let leaf = |t: &Tensor| if t.requires_grad() { Ok(t.shallow_clone()) } else { t.detach().requires_grad_(true) };
        enable_grad(|| {
            let x = x.iter().map(leaf).collect::<Result<Vec<_>>>()?;
            let options = GradOptions { create_graph: true, allow_unused: true, ..Default::default() };
            let gradients = grad_with_options(&[&f(&x)?], &x.iter().collect::<Vec<_>>(), options)?;
            let mut total = x[0].sum((), false)?.mul_scalar(0)?;
            for gradient in gradients.into_iter().flatten() {
                let n = gradient.numel();
                let weights: Vec<f64> = (0..n).map(|k| 0.5 + ((7 * k + 3) % 11) as f64 / 11.0).collect();
                let weights = Tensor::from_slice(&weights, gradient.shape(), gradient.device())?;
                total = total.add(&gradient.mul(&weights)?.sum((), false)?)?;
            }
            Ok(total)
        })
    };
    gradcheck(weighted, inputs, tolerance).map_err(|e| match e {
        Error::Autograd { op: "gradcheck", reason } => Error::Autograd { op: "gradgradcheck", reason },
        e => e,
    })
}

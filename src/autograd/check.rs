//! Gradient checking by central differences.

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

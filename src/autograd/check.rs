//! Gradient checks by central differences.

use super::{GradOptions, enable_grad, grad_with_options};
use crate::{DType, Error, Result, Tensor, no_grad};

/// Compares the gradients that [`Tensor::backward`] computes for `f` with central differences, element by element
/// (PyTorch's `gradcheck`). The differences are `(f(x+h) - f(x-h)) / 2h`, with `h` = 1e-6 of the value's scale.
///
/// `inputs` are f64 tensors of any shape, strides and device. `f` must be deterministic and return an f64 tensor of any
/// shape. The check runs one forward and one backward pass per element of the result, and two forward passes per
/// element of the inputs. An element passes if both gradients agree to `tolerance`: absolute for gradients below 1,
/// else relative. Fails with [`Error::Autograd`] naming the first element that differs, with
/// [`Error::UnsupportedDType`] for inputs or a result that are not f64, and with the errors of `f`.
///
/// ```
/// use claystone::{DType, Device, Tensor, autograd::gradcheck};
/// let x = Tensor::randn(&[3, 2], (DType::F64, Device::Cpu))?;
/// gradcheck(|x| x[0].softmax(-1), &[x], 1e-6)?;
/// # Ok::<(), claystone::Error>(())
/// ```
pub fn gradcheck(f: impl Fn(&[Tensor]) -> Result<Tensor>, inputs: &[Tensor], tolerance: f64) -> Result<()> {
    let op = "gradcheck";
    let check_dtype = |t: &Tensor| match t.dtype() {
        DType::F64 => Ok(()),
        dtype => Err(Error::UnsupportedDType { op, dtype, expected: "f64: differences need the digits" }),
    };
    inputs.iter().try_for_each(check_dtype)?;
    // `analytic` holds the gradients of all inputs for each element of the result.
    let mut analytic: Vec<Vec<Vec<f64>>> = Vec::new();
    for j in 0.. {
        let leaves = inputs.iter().map(|t| t.detach().requires_grad_(true)).collect::<Result<Vec<_>>>()?;
        let result = f(&leaves)?;
        check_dtype(&result)?;
        let elements = result.numel();
        match elements {
            0 => return Ok(()),
            1 => result.backward()?,
            _ => {
                let chosen: Vec<f64> = (0..elements).map(|k| f64::from(k == j)).collect();
                result.backward_with(&Tensor::from_slice(&chosen, result.shape(), result.device())?)?;
            }
        }
        let gradient = |(leaf, input): (&Tensor, &Tensor)| match leaf.grad() {
            Some(grad) => grad.to_vec::<f64>(),
            None => Ok(vec![0.0; input.numel()]),
        };
        analytic.push(leaves.iter().zip(inputs).map(gradient).collect::<Result<_>>()?);
        if j + 1 >= elements {
            break;
        }
    }
    for (i, input) in inputs.iter().enumerate() {
        let values = input.to_vec::<f64>()?;
        for k in 0..values.len() {
            let h = 1e-6 * values[k].abs().max(1.0);
            let at = |x: f64| -> Result<Vec<f64>> {
                let mut moved = values.clone();
                moved[k] = x;
                let mut all: Vec<Tensor> = inputs.iter().map(Tensor::detach).collect();
                all[i] = Tensor::from_slice(&moved, input.shape(), input.device())?;
                no_grad(|| f(&all))?.to_vec::<f64>()
            };
            let (above, below, elements) = (at(values[k] + h)?, at(values[k] - h)?, analytic.len());
            for (j, gradients) in analytic.iter().enumerate() {
                let (Some(above), Some(below)) = (above.get(j), below.get(j)) else {
                    invalid!(op, "the result's size depends on the values of the inputs");
                };
                let (numeric, analytic) = ((above - below) / (2.0 * h), gradients[i][k]);
                let error = (numeric - analytic).abs();
                let of = || if elements > 1 { format!(" for element {j} of the result") } else { String::new() };
                no_gradient!(op if error.is_nan() || error > tolerance * numeric.abs().max(1.0),
                    "element {k} of input {i}: backward gives {analytic}{}, central differences give {numeric}", of());
            }
        }
    }
    Ok(())
}

/// Returns the weighted sum of the elements. The weights are constants that differ between neighbouring elements.
fn weighted_sum(x: &Tensor) -> Result<Tensor> {
    let weights: Vec<f64> = (0..x.numel()).map(|k| 0.5 + ((7 * k + 3) % 11) as f64 / 11.0).collect();
    x.mul(&Tensor::from_slice(&weights, x.shape(), x.device())?)?.sum((), false)
}

/// Checks gradients of gradients (PyTorch's `gradgradcheck`). Computes the gradient of `f` with `create_graph`, weights
/// its elements with constants, and checks the weighted gradient as [`gradcheck`] does. Fails as [`gradcheck`] does,
/// and with [`Error::Autograd`] if an operation's backward is not made of differentiable operations.
///
/// ```
/// use claystone::{DType, Device, Tensor, autograd::gradgradcheck};
/// let x = Tensor::randn(&[3, 2], (DType::F64, Device::Cpu))?;
/// gradgradcheck(|x| x[0].tanh(), &[x], 1e-6)?;
/// # Ok::<(), claystone::Error>(())
/// ```
pub fn gradgradcheck(f: impl Fn(&[Tensor]) -> Result<Tensor>, inputs: &[Tensor], tolerance: f64) -> Result<()> {
    if inputs.is_empty() {
        return Ok(());
    }
    let weighted = |x: &[Tensor]| {
        // `gradcheck` evaluates central differences with inputs outside the graph, under no_grad. This closure needs leaves.
        let leaf = |t: &Tensor| if t.requires_grad() { Ok(t.shallow_clone()) } else { t.detach().requires_grad_(true) };
        enable_grad(|| {
            let x = x.iter().map(leaf).collect::<Result<Vec<_>>>()?;
            let options = GradOptions { create_graph: true, allow_unused: true, ..Default::default() };
            let result = f(&x)?;
            let result = if result.numel() == 1 { result } else { weighted_sum(&result)? };
            let gradients = grad_with_options(&[&result], &x.iter().collect::<Vec<_>>(), options)?;
            // Makes the result depend on the first input, even if no gradient does.
            let total = x[0].sum((), false)?.mul_scalar(0)?;
            gradients.iter().flatten().try_fold(total, |total, gradient| total.add(&weighted_sum(gradient)?))
        })
    };
    gradcheck(weighted, inputs, tolerance).map_err(|e| match e {
        Error::Autograd { op: "gradcheck", reason } => Error::Autograd { op: "gradgradcheck", reason },
        e => e,
    })
}

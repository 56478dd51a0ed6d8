//! The fully connected layer.

use super::{Activation, Module, init};
use crate::storage::Caller;
use crate::tensor::TensorOptions;
use crate::{Result, Tensor};

/// Computes `activation(x @ weight^T + bias)` in one launch, with weight `[out, in]` and bias `[out]` (PyTorch's `nn.Linear`).
///
/// ```
/// use claystone::{DType, Device, Tensor, nn::{Linear, Module}};
/// let layer = Linear::new(3, 2, (DType::BF16, Device::Cpu))?;
/// let y = layer.forward(&Tensor::ones(&[4, 3], (DType::BF16, Device::Cpu))?)?;
/// assert_eq!((y.shape().dims(), y.dtype()), (&[4, 2][..], DType::BF16));
/// # Ok::<(), claystone::Error>(())
/// ```
pub struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
    pub(super) activation: Option<Activation>,
}

impl Linear {
    /// Creates a layer with a bias, from `inputs` to `outputs` features. Weight and bias are drawn uniformly from ±1/√inputs, as in PyTorch.
    #[track_caller]
    pub fn new(inputs: usize, outputs: usize, options: impl Into<TensorOptions>) -> Result<Linear> {
        let _caller = Caller::enter();
        let options = options.into();
        let uniform = |shape: &[usize]| init::default_parameter(shape, inputs, options);
        Ok(Linear { weight: uniform(&[outputs, inputs])?, bias: Some(uniform(&[outputs])?), activation: None })
    }

    /// Removes the bias.
    pub fn without_bias(self) -> Linear {
        Linear { bias: None, ..self }
    }

    /// Makes the layer apply `activation` to its result, in the same launch.
    pub fn with_activation(self, activation: Activation) -> Linear {
        Linear { activation: Some(activation), ..self }
    }

    /// Returns the weight, `[outputs, inputs]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Returns the bias, `[outputs]`; `None` without a bias.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }
}

impl Module for Linear {
    crate::parts!(weight, bias);

    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self.activation {
            None => x.linear(&self.weight, self.bias.as_ref()),
            Some(activation) => x.linear_map(&self.weight, self.bias.as_ref(), |z| activation.expr(z)),
        }
    }
}

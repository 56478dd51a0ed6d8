//! Layers with quantised weights.

use super::{Activation, Linear, Module};
use crate::quantized::{QuantFormat, QuantizedTensor};
use crate::{DType, Device, Result, Tensor};

/// Computes `activation(x @ weight^T + bias)` like [`Linear`], in one launch, with a quantised weight `[out, in]`.
///
/// The bias is a parameter. The weight is constant: it belongs to neither the parameters nor the state dict, and the layer's own
/// [`to_device`](QuantizedLinear::to_device) moves it, but not [`Module::to_device`] of an enclosing module.
///
/// ```
/// use claystone::nn::{Linear, Module};
/// use claystone::quantized::QuantFormat;
/// use claystone::{Device, Tensor};
/// let layer = Linear::new(64, 8, Device::Cpu)?;
/// let small = layer.quantize(QuantFormat::Q4_0)?;
/// assert_eq!(small.weight().nbytes(), 8 * 2 * 18);
/// assert_eq!(small.forward(&Tensor::ones([2, 64], Device::Cpu)?)?.shape().dims(), [2, 8]);
/// # Ok::<(), claystone::Error>(())
/// ```
pub struct QuantizedLinear {
    weight: QuantizedTensor,
    bias: Option<Tensor>,
    activation: Option<Activation>,
}

impl QuantizedLinear {
    /// Creates a layer of a weight `[out, in]` and a bias `[out]`.
    pub fn new(weight: QuantizedTensor, bias: Option<Tensor>) -> QuantizedLinear {
        QuantizedLinear { weight, bias, activation: None }
    }

    /// Makes the layer apply `activation` to its result, in the same launch.
    pub fn with_activation(self, activation: Activation) -> QuantizedLinear {
        QuantizedLinear { activation: Some(activation), ..self }
    }

    /// Returns the weight, `[out, in]`.
    pub fn weight(&self) -> &QuantizedTensor {
        &self.weight
    }

    /// Returns the bias, `[out]`; `None` without a bias.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// Moves weight and bias to a device. Fails with [`crate::Error::NoDevice`] and [`crate::Error::OutOfMemory`].
    pub fn to_device(&mut self, device: Device) -> Result<()> {
        self.weight = self.weight.to_device(device)?;
        Module::to_device(self, device)
    }
}

impl Module for QuantizedLinear {
    crate::parts!(bias; weight);

    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        match self.activation {
            None => self.weight.linear(x, self.bias.as_ref()),
            Some(activation) => self.weight.linear_map(x, self.bias.as_ref(), |z| activation.expr(z)),
        }
    }
}

/// A lookup table of vectors like [`Embedding`](super::Embedding), with a quantised table `[count, dim]`. Maps integer indices of shape
/// `[..]` to vectors, `[.., dim]`. The table is constant, and moves between devices as the weight of a [`QuantizedLinear`].
///
/// ```
/// use claystone::nn::{Module, QuantizedEmbedding};
/// use claystone::quantized::{QuantFormat, QuantizedTensor};
/// use claystone::{DType, Device, Tensor};
/// let table = QuantizedTensor::quantize(&Tensor::ones([5, 32], Device::Cpu)?, QuantFormat::Q8_0)?;
/// let words = Tensor::from_slice(&[4i64, 0], 2, Device::Cpu)?;
/// let vectors = QuantizedEmbedding::new(table, DType::F16).forward(&words)?;
/// assert_eq!((vectors.shape().dims(), vectors.dtype()), (&[2, 32][..], DType::F16));
/// # Ok::<(), claystone::Error>(())
/// ```
pub struct QuantizedEmbedding {
    table: QuantizedTensor,
    dtype: DType,
}

impl QuantizedEmbedding {
    /// Creates a layer of a table `[count, dim]`, whose result has the given dtype: f32, f16 or bf16.
    pub fn new(table: QuantizedTensor, dtype: DType) -> QuantizedEmbedding {
        QuantizedEmbedding { table, dtype }
    }

    /// Returns the table, `[count, dim]`.
    pub fn table(&self) -> &QuantizedTensor {
        &self.table
    }

    /// Moves the table to a device. Fails with [`crate::Error::NoDevice`] and [`crate::Error::OutOfMemory`].
    pub fn to_device(&mut self, device: Device) -> Result<()> {
        self.table = self.table.to_device(device)?;
        Ok(())
    }
}

impl Module for QuantizedEmbedding {
    crate::parts!(; table);

    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.table.rows(x, self.dtype)
    }
}

impl Linear {
    /// Quantises the weight of a trained layer; see [`QuantizedTensor::quantize`] for formats and errors. The bias is shared with this layer.
    pub fn quantize(&self, format: QuantFormat) -> Result<QuantizedLinear> {
        let weight = QuantizedTensor::quantize(&self.weight().detach(), format)?;
        Ok(QuantizedLinear { weight, bias: self.bias().map(Tensor::shallow_clone), activation: self.activation })
    }
}

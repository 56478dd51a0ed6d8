//! The table of vectors.

use super::{Module, init};
use crate::tensor::TensorOptions;
use crate::{Result, Tensor};

/// A vector for each number (PyTorch's `nn.Embedding`): integers of any shape give `[.., dim]`.
///
/// ```
/// use claystone::{Device, Tensor, nn::{Embedding, Module}};
/// let table = Embedding::new(100, 16, Device::Cpu)?;
/// let words = Tensor::from_slice(&[5i64, 99, 5], 3, Device::Cpu)?;
/// assert_eq!(table.forward(&words)?.shape().dims(), [3, 16]);
/// # Ok::<(), claystone::Error>(())
/// ```
pub struct Embedding {
    weight: Tensor,
}

impl Embedding {
    /// A table of `count` vectors of `dim` numbers from the standard normal distribution.
    ///
    /// # Errors
    /// [`crate::Error::UnsupportedDType`] for dtypes that are no floats; [`crate::Error::OutOfMemory`].
    pub fn new(count: usize, dim: usize, options: impl Into<TensorOptions>) -> Result<Embedding> {
        let weight = Tensor::zeros(&[count, dim], options)?;
        init::normal_(&weight, 0.0, 1.0)?;
        Ok(Embedding { weight: weight.requires_grad_(true)? })
    }

    /// The table, `[count, dim]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }
}

impl Module for Embedding {
    crate::parts!(weight);

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.weight.embedding(x)
    }
}

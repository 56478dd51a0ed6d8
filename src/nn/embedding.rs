//! The embedding layer.

use super::{Module, init};
use crate::storage::Caller;
use crate::tensor::TensorOptions;
use crate::{Result, Tensor};

/// A lookup table of vectors (PyTorch's `nn.Embedding`). Maps integer indices of shape `[..]` to vectors, `[.., dim]`.
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
    padding_idx: Option<usize>,
}

impl Embedding {
    /// Creates a table of `count` vectors of `dim` elements, drawn from the standard normal distribution.
    #[track_caller]
    pub fn new(count: usize, dim: usize, options: impl Into<TensorOptions>) -> Result<Embedding> {
        let _caller = Caller::enter();
        let weight = Tensor::zeros(&[count, dim], options)?;
        init::normal_(&weight, 0.0, 1.0)?;
        Ok(Embedding { weight: weight.requires_grad_(true)?, padding_idx: None })
    }

    /// Sets the vector with index `padding_idx` to 0 and excludes it from training: it gets no gradient (PyTorch's
    /// `padding_idx`). Fails with [`crate::Error::IndexOutOfRange`] if `padding_idx` is not below `count`.
    pub fn with_padding_idx(self, padding_idx: usize) -> Result<Embedding> {
        self.weight.detach().select(0, padding_idx as isize).map_err(|e| e.with_op("Embedding"))?.zero_()?;
        Ok(Embedding { padding_idx: Some(padding_idx), ..self })
    }

    /// Returns the table, `[count, dim]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }
}

impl Module for Embedding {
    crate::parts!(weight);

    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.weight.embedding_with(x, self.padding_idx.map(|i| i as isize))
    }
}

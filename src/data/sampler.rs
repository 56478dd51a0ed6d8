//! Samplers select the items of a pass and their order.

use crate::Result;

/// Selects and orders the items of each pass of a [`DataLoader`](super::DataLoader) (PyTorch's `torch.utils.data.Sampler`). See
/// [`DataLoader::with_sampler`](super::DataLoader::with_sampler).
/// [`distributed::DistributedSampler`](crate::distributed::DistributedSampler) gives each rank its part of the items.
///
/// ```
/// use claystone::data::{DataLoader, DataLoaderConfig, Sampler, TensorDataset};
/// use claystone::{Device, Result, Tensor};
///
/// /// The last items first.
/// struct Backwards(usize);
///
/// impl Sampler for Backwards {
///     fn len(&self) -> usize {
///         self.0
///     }
///     fn indices(&self) -> Result<Vec<usize>> {
///         Ok((0..self.0).rev().collect())
///     }
/// }
///
/// let set = TensorDataset::new(vec![Tensor::arange(0, 3, 1, Device::Cpu)?])?;
/// let loader = DataLoader::new(set, DataLoaderConfig::default())?.with_sampler(Backwards(3))?;
/// let items = loader.iter().map(|batch| batch?[0].item::<f32>()).collect::<Result<Vec<f32>>>()?;
/// assert_eq!(items, [2.0, 1.0, 0.0]);
/// # Ok::<(), claystone::Error>(())
/// ```
pub trait Sampler: Send + Sync {
    /// Returns the number of items in a pass.
    fn len(&self) -> usize;

    /// Returns the indices of the items of a new pass, in order. The loader returns an error in place of the first
    /// batch.
    fn indices(&self) -> Result<Vec<usize>>;

    /// True if a pass has no items.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

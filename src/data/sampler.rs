//! Which items a pass goes through, in which order.

use crate::Result;

/// The order of a [`DataLoader`](super::DataLoader)'s passes (PyTorch's `torch.utils.data.Sampler`):
/// [`DataLoader::with_sampler`](super::DataLoader::with_sampler) takes one.
/// [`distributed::DistributedSampler`](crate::distributed::DistributedSampler) gives each rank its share.
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
    /// How many items a pass has.
    fn len(&self) -> usize;

    /// The items of the pass that begins, in order.
    ///
    /// # Errors
    /// Whatever goes wrong; the loader gives it in the place of its first batch.
    fn indices(&self) -> Result<Vec<usize>>;

    /// Whether a pass has none.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

//! Data sets, and loaders whose worker threads load batches while the device computes.
//!
//! A [`Dataset`] returns the item with a given index. A [`DataLoader`] iterates over a data set in batches, shuffled or not.
//! [`DataLoader::to_device`] copies the batches on a separate stream. The contents of a batch do not depend on the number of
//! workers: each batch is collated in the order of its indices, arrives in order, and draws random numbers from its own
//! generator. Random augmentations are therefore repeatable bit for bit.

mod collate;
mod loader;
mod transfer;
mod workers;

pub use collate::Collate;
pub use loader::{Batches, DataLoader, DataLoaderConfig};
pub use transfer::Transfer;

use crate::{Generator, Result, Tensor, with_generator};

/// A data set whose items are loaded by index (PyTorch's map-style `torch.utils.data.Dataset`). Several workers may load items in parallel.
///
/// ```
/// use claystone::data::{DataLoader, DataLoaderConfig, Dataset};
/// use claystone::{Device, Result, Tensor};
///
/// /// Numbers and whether they are odd.
/// struct Parity;
///
/// impl Dataset for Parity {
///     type Item = (Tensor, i64);
///     fn len(&self) -> usize {
///         10
///     }
///     fn get(&self, index: usize) -> Result<(Tensor, i64)> {
///         Ok((Tensor::full(1, index as f32, Device::Cpu)?, index as i64 % 2))
///     }
/// }
///
/// let loader = DataLoader::new(Parity, DataLoaderConfig { batch_size: 4, num_workers: 2, ..Default::default() })?;
/// let mut sizes = Vec::new();
/// for batch in &loader {
///     let (numbers, labels) = batch?;
///     assert_eq!(labels.numel(), numbers.shape().dims()[0]);
///     sizes.push(numbers.shape().dims().to_vec());
/// }
/// assert_eq!(sizes, [[4, 1], [4, 1], [2, 1]]);
/// # Ok::<(), claystone::Error>(())
/// ```
pub trait Dataset: Send + Sync {
    /// The type of an item, such as a tuple of a tensor and a label. [`Collate`] joins items to batches.
    type Item;

    /// Returns the number of items.
    fn len(&self) -> usize;

    /// Returns the item with this index, which is below [`Dataset::len`]. A [`DataLoader`] returns an error, for
    /// example [`crate::Error::invalid`] with the name of an unreadable file, in place of the batch.
    fn get(&self, index: usize) -> Result<Self::Item>;

    /// True if the data set has no items.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Selects and orders the items of each pass of a [`DataLoader`] (PyTorch's `torch.utils.data.Sampler`). See
/// [`DataLoader::with_sampler`].
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

/// A data set of tensors with equal sizes of dim 0 (PyTorch's `TensorDataset`). An item is a vector with one row of each tensor.
///
/// ```
/// use claystone::data::{Dataset, TensorDataset};
/// use claystone::{Device, Tensor};
/// let set = TensorDataset::new(vec![Tensor::eye(3, Device::Cpu)?, Tensor::zeros([3, 2], Device::Cpu)?])?;
/// assert_eq!(set.len(), 3);
/// assert_eq!(set.get(1)?[0].to_vec::<f32>()?, [0.0, 1.0, 0.0]);
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug)]
pub struct TensorDataset(Vec<Tensor>);

impl TensorDataset {
    /// Creates a data set from these tensors. Fails with [`crate::Error::Invalid`] if there is no tensor, a tensor has no
    /// dims, or the sizes of dim 0 differ.
    pub fn new(tensors: Vec<Tensor>) -> Result<TensorDataset> {
        let op = "TensorDataset::new";
        let rows = |t: &Tensor| t.shape().dims().first().copied();
        let Some(first) = tensors.first() else { invalid!(op, "there are no tensors") };
        invalid!(op if let Some(other) = tensors.iter().find(|t| rows(t).is_none() || rows(t) != rows(first)),
            "the tensors have shapes {} and {}: their sizes of dim 0 must be the same", first.shape(), other.shape());
        Ok(TensorDataset(tensors))
    }
}

impl Dataset for TensorDataset {
    type Item = Vec<Tensor>;

    fn len(&self) -> usize {
        self.0[0].shape().dims()[0]
    }

    fn get(&self, index: usize) -> Result<Vec<Tensor>> {
        self.0.iter().map(|t| t.select(0, index as isize)).collect()
    }
}

/// A selection of the items of another data set (PyTorch's `Subset`); see [`random_split`].
#[derive(Debug)]
pub struct Subset<D> {
    dataset: D,
    indices: Vec<usize>,
}

impl<D: Dataset> Subset<D> {
    /// Creates a data set of the items at these indices, in this order. Fails with [`crate::Error::Invalid`] if an index is
    /// out of range.
    pub fn new(dataset: D, indices: Vec<usize>) -> Result<Subset<D>> {
        invalid!("Subset::new" if let Some(i) = indices.iter().find(|&&i| i >= dataset.len()),
            "index {i} is out of range for a set of {} items", dataset.len());
        Ok(Subset { dataset, indices })
    }
}

impl<D: Dataset> Dataset for Subset<D> {
    type Item = D::Item;

    fn len(&self) -> usize {
        self.indices.len()
    }

    fn get(&self, index: usize) -> Result<D::Item> {
        self.dataset.get(self.indices[index])
    }
}

/// A shared data set, for example one used by the subsets of [`random_split`] or by several loaders.
impl<D: Dataset> Dataset for std::sync::Arc<D> {
    type Item = D::Item;

    fn len(&self) -> usize {
        (**self).len()
    }

    fn get(&self, index: usize) -> Result<D::Item> {
        (**self).get(index)
    }
}

/// Divides a data set randomly into subsets of these lengths (PyTorch's `random_split`). Equal generator states give
/// equal subsets. Fails with [`crate::Error::Invalid`] if the sum of the lengths differs from the length of the data set.
///
/// ```
/// use claystone::data::{Dataset, TensorDataset, random_split};
/// use claystone::{Device, Generator, Tensor};
/// let set = TensorDataset::new(vec![Tensor::eye(10, Device::Cpu)?])?;
/// let parts = random_split(set, &[8, 2], &Generator::new(42))?;
/// assert_eq!([parts[0].len(), parts[1].len()], [8, 2]);
/// # Ok::<(), claystone::Error>(())
/// ```
pub fn random_split<D: Dataset>(
    dataset: D,
    lengths: &[usize],
    generator: &Generator,
) -> Result<Vec<Subset<std::sync::Arc<D>>>> {
    let (sum, len) = (lengths.iter().fold(0usize, |sum, n| sum.saturating_add(*n)), dataset.len());
    invalid!("random_split" if sum != len, "the lengths {lengths:?} add up to {sum}, but the set has {len} items");
    let (order, dataset) = (random_permutation(len, generator)?, std::sync::Arc::new(dataset));
    let mut rest = &order[..];
    let part = |&n: &usize| {
        let (part, others) = rest.split_at(n);
        rest = others;
        Subset::new(dataset.clone(), part.to_vec())
    };
    lengths.iter().map(part).collect()
}

/// Returns a random permutation of the numbers from 0 to `n - 1`.
fn random_permutation(n: usize, generator: &Generator) -> Result<Vec<usize>> {
    let order = with_generator(generator, || Tensor::randperm(n, crate::Device::default()))?;
    Ok(order.to_vec::<i64>()?.into_iter().map(|i| i as usize).collect())
}

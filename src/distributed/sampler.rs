//! A sampler that gives each rank its part of a data set.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::Group;
use crate::data::Sampler;
use crate::{Device, Generator, Result, Tensor, with_generator};

options! {
    /// Options of [`DistributedSampler`], with PyTorch's names and defaults.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct DistributedSamplerConfig {
        /// Whether each epoch has a new random order.
        pub shuffle: bool = true,
        /// The seed of the random orders. Must be equal on all ranks.
        pub seed: u64 = 0,
        /// If the number of items is no multiple of the ranks: whether to drop the remainder. If false, the first items are used again.
        pub drop_last: bool = false,
    }
}

/// Gives each rank an equal part of a data set (PyTorch's `DistributedSampler`): every `group.size()`-th item of the epoch's order, which
/// is the same on all ranks. With n ranks and 1/n of the batch size, each step trains on the same items as with one rank.
///
/// Clones have a common epoch: give one clone to the loader, and call [`set_epoch`](Self::set_epoch) on another.
///
/// ```
/// use claystone::data::{DataLoader, DataLoaderConfig, TensorDataset};
/// use claystone::distributed::{DistributedSampler, Group};
/// use claystone::{Device, Tensor};
/// # let group = &Group::threads(&[Device::Cpu])?[0];
/// let set = TensorDataset::new(vec![Tensor::arange(0, 100, 1, Device::Cpu)?])?;
/// let sampler = DistributedSampler::new(100, group, Default::default());
/// let config = DataLoaderConfig { batch_size: 32 / group.size(), ..Default::default() };
/// let loader = DataLoader::new(set, config)?.with_sampler(sampler.clone())?;
/// for epoch in 0..2 {
///     sampler.set_epoch(epoch);
///     for batch in &loader {
///         assert!(batch?[0].numel() <= 32);
///     }
/// }
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct DistributedSampler {
    /// The number of items in the data set.
    items: usize,
    rank: usize,
    ranks: usize,
    config: DistributedSamplerConfig,
    epoch: Arc<AtomicU64>,
}

impl DistributedSampler {
    /// Creates the sampler of a data set with `items` items. The epoch is 0.
    pub fn new(items: usize, group: &Group, config: DistributedSamplerConfig) -> DistributedSampler {
        DistributedSampler { items, rank: group.rank(), ranks: group.size(), config, epoch: Arc::default() }
    }

    /// Sets the epoch, which determines the order. Must be equal on all ranks. Without this call, every epoch has the same order.
    pub fn set_epoch(&self, epoch: u64) {
        self.epoch.store(epoch, Relaxed);
    }
}

impl Sampler for DistributedSampler {
    fn len(&self) -> usize {
        if self.config.drop_last { self.items / self.ranks } else { self.items.div_ceil(self.ranks) }
    }

    fn indices(&self) -> Result<Vec<usize>> {
        let order: Vec<usize> = if self.config.shuffle {
            let generator = Generator::new(self.config.seed.wrapping_add(self.epoch.load(Relaxed)));
            // The order is drawn on the CPU, so that it is the same on ranks with different devices.
            let order = with_generator(&generator, || Tensor::randperm(self.items, Device::HOST))?;
            order.to_vec::<i64>()?.into_iter().map(|i| i as usize).collect()
        } else {
            (0..self.items).collect()
        };
        Ok(order.iter().copied().cycle().skip(self.rank).step_by(self.ranks).take(self.len()).collect())
    }
}

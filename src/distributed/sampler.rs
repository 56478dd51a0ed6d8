//! Each rank's share of a data set.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::Group;
use crate::data::Sampler;
use crate::{Device, Generator, Result, Tensor, with_generator};

/// How [`DistributedSampler`] works; PyTorch's names and defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DistributedSamplerConfig {
    /// Whether the items are shuffled anew for each epoch.
    pub shuffle: bool,
    /// The seed of the shuffles; the same on all ranks.
    pub seed: u64,
    /// Whether the last items are left out where they are fewer than the ranks; otherwise the first items are repeated.
    pub drop_last: bool,
}

impl Default for DistributedSamplerConfig {
    fn default() -> DistributedSamplerConfig {
        DistributedSamplerConfig { shuffle: true, seed: 0, drop_last: false }
    }
}

/// Gives each rank an equal share of a data set (PyTorch's `DistributedSampler`): every `group.size()`-th item of the epoch's
/// order, which is the same on all ranks. If the batch size is divided by the number of ranks, step i of an epoch trains on the
/// same items for any number of ranks.
///
/// Clones share the epoch: give one to the loader, and call [`set_epoch`](Self::set_epoch) on another.
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
    /// The length of the data set.
    items: usize,
    rank: usize,
    ranks: usize,
    config: DistributedSamplerConfig,
    epoch: Arc<AtomicU64>,
}

impl DistributedSampler {
    /// The sampler of a data set of so many items, at epoch 0.
    pub fn new(items: usize, group: &Group, config: DistributedSamplerConfig) -> DistributedSampler {
        DistributedSampler { items, rank: group.rank(), ranks: group.size(), config, epoch: Arc::default() }
    }

    /// Sets the epoch, from which the next order follows: the same on all ranks. Without it every epoch has the same order.
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
            // Always on the CPU, so that ranks with different devices have the same order.
            let order = with_generator(&generator, || Tensor::randperm(self.items, Device::Cpu))?;
            order.to_vec::<i64>()?.into_iter().map(|i| i as usize).collect()
        } else {
            (0..self.items).collect()
        };
        Ok(order.iter().copied().cycle().skip(self.rank).step_by(self.ranks).take(self.len()).collect())
    }
}

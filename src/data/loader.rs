//! The data loader, which iterates over a data set in batches.

use std::sync::Arc;

use super::transfer::{receive, send};
use super::workers::{MakeFn, Workers, make_catching_panics};
use super::{Collate, Dataset, Sampler, Transfer, random_permutation};
use crate::device::Event;
use crate::{DType, Device, Error, Generator, Result, Seed, Stream, Tensor, with_generator};

options! {
    /// Options of [`DataLoader`], with PyTorch's names and defaults.
    #[derive(Debug, Clone)]
    pub struct DataLoaderConfig {
        /// The number of items per batch.
        pub batch_size: usize = 1,
        /// Whether each pass visits the items in its own random order.
        pub shuffle: bool = false,
        /// Whether to leave out the last batch of a pass if it is smaller than the others.
        pub drop_last: bool = false,
        /// The number of threads that load batches in advance. With 0, the calling thread loads each batch when it is requested.
        pub num_workers: usize = 0,
        /// The number of batches that each worker loads in advance, at least 1.
        pub prefetch_factor: usize = 2,
        /// The generator of the random order and of all random numbers of a pass. By default [`Generator::current`] at the start of the
        /// pass. With `Generator::new(seed)`, every run of the program has the same passes.
        pub generator: Option<Generator> = None,
    }
}

/// Iterates over a [`Dataset`] in batches of type `B` (PyTorch's `torch.utils.data.DataLoader`). Each pass is an iterator. For any
/// number of workers, its batches are the same bit for bit and in the same order, including random augmentations. If the data set
/// panics or fails, the batch is replaced by an error, and the following batches are still loaded.
///
/// ```
/// use claystone::data::{DataLoader, DataLoaderConfig, TensorDataset};
/// use claystone::{DType, Device, Generator, Tensor};
/// let numbers = Tensor::arange(0, 10, 1, (DType::I64, Device::Cpu))?;
/// let config = DataLoaderConfig {
///     batch_size: 4,
///     shuffle: true,
///     drop_last: true,
///     num_workers: 2,
///     generator: Some(Generator::new(1)),
///     ..Default::default()
/// };
/// let loader = DataLoader::new(TensorDataset::new(vec![numbers])?, config)?.to_device(Device::best())?;
/// for epoch in 0..2 {
///     for batch in &loader {
///         assert_eq!(batch?[0].shape().dims(), [4]);
///     }
/// }
/// assert_eq!(loader.len(), 2);
/// # Ok::<(), claystone::Error>(())
/// ```
pub struct DataLoader<B> {
    /// The number of items in the data set.
    items: usize,
    sampler: Option<Arc<dyn Sampler>>,
    load: LoadFn<B>,
    config: DataLoaderConfig,
    device_transfer: Option<Arc<DeviceTransfer<B>>>,
}

/// Loads the batch with the given indices of items.
type LoadFn<B> = Arc<dyn Fn(&[usize]) -> Result<B> + Send + Sync>;

/// The stream and the functions with which batches are copied to a device.
struct DeviceTransfer<B> {
    stream: Stream,
    send: fn(B, &Stream) -> Result<(B, Event)>,
    receive: fn(B, &Event, Device) -> Result<B>,
}

/// A batch and the event that completes once the batch is on its device. `None` if the batch is not copied.
type SentBatch<B> = (B, Option<Event>);

impl<B: Send + 'static> DataLoader<B> {
    /// Creates a loader that joins items to batches with [`Collate`]. Fails with [`Error::Invalid`] if the batch size is 0.
    pub fn new<D>(dataset: D, config: DataLoaderConfig) -> Result<DataLoader<B>>
    where
        D: Dataset + 'static,
        D::Item: Collate<Batch = B>,
    {
        DataLoader::with_collate(dataset, config, D::Item::collate)
    }

    /// Creates a loader that joins items with `collate` (PyTorch's `collate_fn`), for example to pad sequences. Workers call `collate`.
    /// Fails as [`DataLoader::new`] does.
    ///
    /// ```
    /// use claystone::data::{DataLoader, DataLoaderConfig, TensorDataset};
    /// use claystone::{Device, Tensor};
    /// let set = TensorDataset::new(vec![Tensor::eye(4, Device::Cpu)?])?;
    /// let config = DataLoaderConfig { batch_size: 3, ..Default::default() };
    /// let loader = DataLoader::with_collate(set, config, |items: Vec<Vec<Tensor>>| Ok(items.len()))?;
    /// assert_eq!(loader.iter().collect::<claystone::Result<Vec<usize>>>()?, [3, 1]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn with_collate<D: Dataset + 'static>(
        dataset: D,
        config: DataLoaderConfig,
        collate: impl Fn(Vec<D::Item>) -> Result<B> + Send + Sync + 'static,
    ) -> Result<DataLoader<B>> {
        invalid!("DataLoader" if config.batch_size == 0, "batch_size is 0: a batch needs at least one item");
        let items = dataset.len();
        let item = move |&index: &usize| {
            dataset.get(index).map_err(|e| match e {
                Error::Invalid { op, reason } => Error::invalid(op, format!("{reason} (item {index} of the data set)")),
                e => e,
            })
        };
        let load = move |indices: &[usize]| collate(indices.iter().map(&item).collect::<Result<_>>()?);
        Ok(DataLoader { items, sampler: None, load: Arc::new(load), config, device_transfer: None })
    }

    /// Makes each pass visit the items that a sampler selects (PyTorch's `sampler`), instead of all items. Fails with [`Error::Invalid`] if
    /// the loader has `shuffle` set: the sampler already determines the order.
    pub fn with_sampler(mut self, sampler: impl Sampler + 'static) -> Result<DataLoader<B>> {
        invalid!("DataLoader" if self.config.shuffle,
            "the sampler determines the order: let the sampler shuffle instead of the loader");
        self.sampler = Some(Arc::new(sampler));
        Ok(self)
    }

    /// Makes workers copy batches to `device` through pinned memory, on a separate stream, while the device computes (PyTorch's
    /// `pin_memory=True` and `.to(device, non_blocking=True)`). When a batch is taken, the current stream waits for it; the host does not.
    /// Fails as [`Stream::new`] does.
    pub fn to_device(mut self, device: Device) -> Result<DataLoader<B>>
    where
        B: Transfer,
    {
        self.device_transfer = Some(Arc::new(DeviceTransfer { stream: Stream::new(device)?, send, receive }));
        Ok(self)
    }

    /// Begins a pass. The workers start immediately.
    pub fn iter(&self) -> Batches<B> {
        let (source, end) = match self.start_pass() {
            Ok(source) => (source, self.len()),
            Err(e) => (BatchSource::Failed(Some(e)), 1),
        };
        Batches { source, next: 0, end, device_transfer: self.device_transfer.clone() }
    }

    /// Draws the order and the random key of a pass. Starts the workers, if any.
    fn start_pass(&self) -> Result<BatchSource<B>> {
        let (load, device_transfer) = (self.load.clone(), self.device_transfer.clone());
        let DataLoaderConfig { batch_size, num_workers, prefetch_factor, .. } = self.config;
        let generator = self.config.generator.clone().unwrap_or_else(Generator::current);
        let order = self.order(&generator)?;
        let bits = with_generator(&generator, || Tensor::randint(0, 1 << 31, 2, (DType::I64, Device::default())))?;
        let key = bits.to_vec::<i64>()?.iter().fold(0, |key, &bits| key << 31 | bits as u64);
        let make: MakeFn<SentBatch<B>> = Arc::new(move |batch: usize| {
            // Each batch has its own random stream, so that its random numbers do not depend on the worker that loads it.
            let generator = Generator::new(key);
            generator.set_state(Seed { key, stream: (batch as u64) << 32 });
            let from = batch * batch_size;
            let indices = &order[from..order.len().min(from.saturating_add(batch_size))];
            let made = with_generator(&generator, || load(indices))?;
            Ok(match &device_transfer {
                Some(device_transfer) => {
                    (device_transfer.send)(made, &device_transfer.stream).map(|(made, event)| (made, Some(event)))?
                }
                None => (made, None),
            })
        });
        Ok(match num_workers {
            0 => BatchSource::Caller(make),
            n => BatchSource::Workers(Workers::start(n, prefetch_factor, self.len(), &make)?),
        })
    }

    fn order(&self, generator: &Generator) -> Result<Vec<usize>> {
        let Some(sampler) = &self.sampler else {
            return if self.config.shuffle {
                random_permutation(self.items, generator)
            } else {
                Ok((0..self.items).collect())
            };
        };
        let order = sampler.indices()?;
        invalid!("DataLoader" if let Some(i) = order.iter().find(|&&i| i >= self.items),
            "the sampler returned item {i}, but the data set has {}", self.items);
        invalid!("DataLoader" if order.len() != sampler.len(),
            "the sampler returned {} items, but its len() is {}", order.len(), sampler.len());
        Ok(order)
    }
}

impl<B> DataLoader<B> {
    /// Returns the number of batches in a pass.
    pub fn len(&self) -> usize {
        let items = self.sampler.as_ref().map_or(self.items, |sampler| sampler.len());
        if self.config.drop_last { items / self.config.batch_size } else { items.div_ceil(self.config.batch_size) }
    }

    /// True if a pass has no batches.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

impl<B: Send + 'static> IntoIterator for &DataLoader<B> {
    type Item = Result<B>;
    type IntoIter = Batches<B>;

    fn into_iter(self) -> Batches<B> {
        self.iter()
    }
}

/// One pass of a [`DataLoader`], an iterator over batches. If it is dropped, each worker stops after its current batch.
pub struct Batches<B> {
    source: BatchSource<B>,
    next: usize,
    end: usize,
    device_transfer: Option<Arc<DeviceTransfer<B>>>,
}

/// The source of a pass's batches.
enum BatchSource<B> {
    /// The pass could not begin. The error takes the place of the first batch.
    Failed(Option<Error>),
    Caller(MakeFn<SentBatch<B>>),
    Workers(Workers<SentBatch<B>>),
}

impl<B: Send + 'static> Iterator for Batches<B> {
    type Item = Result<B>;

    fn next(&mut self) -> Option<Result<B>> {
        if self.next == self.end {
            return None;
        }
        let sent = match &mut self.source {
            BatchSource::Failed(error) => Err(error.take()?),
            BatchSource::Caller(make) => make_catching_panics(make, self.next),
            BatchSource::Workers(workers) => workers.next(),
        };
        self.next += 1;
        Some(sent.and_then(|(batch, sent)| match (&self.device_transfer, sent) {
            (Some(device_transfer), Some(sent)) => {
                (device_transfer.receive)(batch, &sent, device_transfer.stream.device())
            }
            _ => Ok(batch),
        }))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.end - self.next, Some(self.end - self.next))
    }
}

impl<B: Send + 'static> ExactSizeIterator for Batches<B> {}

//! A data set in batches.

use std::sync::Arc;

use super::transfer::{receive, send};
use super::workers::{Make, Workers, attempt};
use super::{Collate, Dataset, Sampler, Transfer, permutation};
use crate::device::Event;
use crate::{DType, Device, Error, Generator, Result, Seed, Stream, Tensor, with_generator};

/// How a [`DataLoader`] works; PyTorch's names and defaults.
#[derive(Debug, Clone)]
pub struct DataLoaderConfig {
    /// Items a batch.
    pub batch_size: usize,
    /// Whether each pass goes through the items in an order of its own.
    pub shuffle: bool,
    /// Whether a last batch that is smaller is left out.
    pub drop_last: bool,
    /// Threads that make batches ahead; without any the caller makes them.
    pub num_workers: usize,
    /// How many batches each worker makes ahead, at least 1.
    pub prefetch_factor: usize,
    /// What draws the order and the random numbers of a pass; without one it is [`Generator::current`] at its beginning. A
    /// `Generator::new(seed)` gives the same passes in every run.
    pub generator: Option<Generator>,
}

impl Default for DataLoaderConfig {
    fn default() -> DataLoaderConfig {
        DataLoaderConfig {
            batch_size: 1,
            shuffle: false,
            drop_last: false,
            num_workers: 0,
            prefetch_factor: 2,
            generator: None,
        }
    }
}

/// A [`Dataset`] in batches of type `B` (PyTorch's `torch.utils.data.DataLoader`). Each pass is an iterator; what it gives is the
/// same for any number of workers, in order and to the bit, random augmentations included. A panic or an error of the data set is an
/// error in the place of its batch, and the next batches follow.
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
    /// Of the data set.
    items: usize,
    sampler: Option<Arc<dyn Sampler>>,
    load: Load<B>,
    config: DataLoaderConfig,
    route: Option<Arc<Route<B>>>,
}

/// Makes the batch of some indices.
type Load<B> = Arc<dyn Fn(&[usize]) -> Result<B> + Send + Sync>;

/// The way of batches to a device.
struct Route<B> {
    stream: Stream,
    send: fn(B, &Stream) -> Result<(B, Event)>,
    receive: fn(B, &Event, Device) -> Result<B>,
}

/// A batch, and the event after which it is on its device.
type Sent<B> = (B, Option<Event>);

impl<B: Send + 'static> DataLoader<B> {
    /// Batches that [`Collate`] makes.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a batch size of 0.
    pub fn new<D>(dataset: D, config: DataLoaderConfig) -> Result<DataLoader<B>>
    where
        D: Dataset + 'static,
        D::Item: Collate<Batch = B>,
    {
        DataLoader::with_collate(dataset, config, D::Item::collate)
    }

    /// Batches that `collate` makes of their items (PyTorch's `collate_fn`), such as padded sequences; the workers call it.
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
    ///
    /// # Errors
    /// As [`DataLoader::new`].
    pub fn with_collate<D: Dataset + 'static>(
        dataset: D,
        config: DataLoaderConfig,
        collate: impl Fn(Vec<D::Item>) -> Result<B> + Send + Sync + 'static,
    ) -> Result<DataLoader<B>> {
        if config.batch_size == 0 {
            return Err(Error::invalid("DataLoader", "a batch has at least one item: batch_size is 0"));
        }
        let items = dataset.len();
        let item = move |&index: &usize| {
            dataset.get(index).map_err(|e| match e {
                Error::Invalid { op, reason } => Error::invalid(op, format!("{reason} (item {index} of the data set)")),
                e => e,
            })
        };
        let load = move |indices: &[usize]| collate(indices.iter().map(&item).collect::<Result<_>>()?);
        Ok(DataLoader { items, sampler: None, load: Arc::new(load), config, route: None })
    }

    /// With passes through the items that a sampler gives (PyTorch's `sampler`), instead of through all of them.
    ///
    /// # Errors
    /// [`Error::Invalid`] where the loader shuffles too.
    pub fn with_sampler(mut self, sampler: impl Sampler + 'static) -> Result<DataLoader<B>> {
        if self.config.shuffle {
            return Err(Error::invalid(
                "DataLoader",
                "the order is the sampler's: have it shuffle, and the loader not",
            ));
        }
        self.sampler = Some(Arc::new(sampler));
        Ok(self)
    }

    /// With batches brought to `device` by the workers, through pinned memory and on a stream of its own, while the device
    /// computes (`pin_memory=True` and `.to(device, non_blocking=True)` in PyTorch). The stream that is current where a batch is
    /// taken waits for it, and the host does not.
    ///
    /// # Errors
    /// As [`Stream::new`].
    pub fn to_device(mut self, device: Device) -> Result<DataLoader<B>>
    where
        B: Transfer,
    {
        self.route = Some(Arc::new(Route { stream: Stream::new(device)?, send, receive }));
        Ok(self)
    }

    /// Goes through the items once; the first workers begin at once.
    pub fn iter(&self) -> Batches<B> {
        let (source, end) = match self.begin() {
            Ok(source) => (source, self.len()),
            Err(e) => (Source::Failed(Some(e)), 1),
        };
        Batches { source, next: 0, end, route: self.route.clone() }
    }

    fn begin(&self) -> Result<Source<B>> {
        let (load, route) = (self.load.clone(), self.route.clone());
        let DataLoaderConfig { batch_size, num_workers, prefetch_factor, .. } = self.config;
        let generator = self.config.generator.clone().unwrap_or_else(Generator::current);
        let order = self.order(&generator)?;
        let bits = with_generator(&generator, || Tensor::randint(0, 1 << 31, 2, (DType::I64, Device::default())))?;
        let key = bits.to_vec::<i64>()?.iter().fold(0, |key, &bits| key << 31 | bits as u64);
        let make: Make<Sent<B>> = Arc::new(move |batch: usize| {
            // Draws of different batches are in different streams, whoever makes them.
            let generator = Generator::new(key);
            generator.set_state(Seed { key, stream: (batch as u64) << 32 });
            let from = batch * batch_size;
            let indices = &order[from..order.len().min(from.saturating_add(batch_size))];
            let made = with_generator(&generator, || load(indices))?;
            Ok(match &route {
                Some(route) => (route.send)(made, &route.stream).map(|(made, event)| (made, Some(event)))?,
                None => (made, None),
            })
        });
        Ok(match num_workers {
            0 => Source::Caller(make),
            n => Source::Workers(Workers::start(n, prefetch_factor, self.len(), &make)?),
        })
    }

    /// The items of a pass.
    fn order(&self, generator: &Generator) -> Result<Vec<usize>> {
        let Some(sampler) = &self.sampler else {
            return if self.config.shuffle {
                permutation(self.items, generator)
            } else {
                Ok((0..self.items).collect())
            };
        };
        let order = sampler.indices()?;
        let reason = match order.iter().find(|&&i| i >= self.items) {
            Some(i) => format!("the sampler gives item {i}, and the data set has {}", self.items),
            None if order.len() != sampler.len() => {
                format!("the sampler gives {} items, and its len() says {}", order.len(), sampler.len())
            }
            None => return Ok(order),
        };
        Err(Error::invalid("DataLoader", reason))
    }
}

impl<B> DataLoader<B> {
    /// How many batches a pass has.
    pub fn len(&self) -> usize {
        let items = self.sampler.as_ref().map_or(self.items, |sampler| sampler.len());
        match self.config.drop_last {
            true => items / self.config.batch_size,
            false => items.div_ceil(self.config.batch_size),
        }
    }

    /// Whether it has none.
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

/// A pass of a [`DataLoader`]. When it is dropped, its workers end after the batch they are at.
pub struct Batches<B> {
    source: Source<B>,
    next: usize,
    end: usize,
    route: Option<Arc<Route<B>>>,
}

enum Source<B> {
    /// The pass could not begin: the error comes in the place of the first batch.
    Failed(Option<Error>),
    Caller(Make<Sent<B>>),
    Workers(Workers<Sent<B>>),
}

impl<B: Send + 'static> Iterator for Batches<B> {
    type Item = Result<B>;

    fn next(&mut self) -> Option<Result<B>> {
        if self.next == self.end {
            return None;
        }
        let sent = match &mut self.source {
            Source::Failed(error) => Err(error.take()?),
            Source::Caller(make) => attempt(make, self.next),
            Source::Workers(workers) => workers.next(),
        };
        self.next += 1;
        Some(sent.and_then(|(batch, sent)| match (&self.route, sent) {
            (Some(route), Some(sent)) => (route.receive)(batch, &sent, route.stream.device()),
            _ => Ok(batch),
        }))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.end - self.next, Some(self.end - self.next))
    }
}

impl<B: Send + 'static> ExactSizeIterator for Batches<B> {}

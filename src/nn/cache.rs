//! The cache of keys and values of a transformer that decodes.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::ops::{Attention, CacheRows, CacheType, cache_store, cached_attention};
use crate::storage::Caller;
use crate::{DType, Device, Error, Graph, Result, Tensor};

options! {
    /// Options of [`KvCache`].
    #[derive(Debug, Clone, Copy, PartialEq)]
    pub struct KvCacheOptions {
        /// The number of sequences. They have equal lengths.
        pub batch: usize = 1,
        /// How keys and values are stored.
        pub kind: CacheType = CacheType::F16,
        /// The number of rows for which memory is allocated first.
        pub capacity: usize = 256,
        /// The maximum number of rows.
        pub limit: usize = 1 << 20,
        /// The factor of the scores; if `None`, `1 / sqrt(width)`.
        pub scale: Option<f64> = None,
    }
}

/// The keys and values of all layers of a transformer, for decoding.
///
/// The position of the next row is in device memory, so that a step of [`attend`](KvCache::attend) for each layer and
/// [`advance`](KvCache::advance) can be captured as a [`Graph`] and replayed, until [`reserve`](KvCache::reserve) moves the rows.
///
/// ```
/// use claystone::nn::{KvCache, KvCacheOptions};
/// use claystone::{Device, Tensor};
/// let mut cache = KvCache::new([1, 2, 64], KvCacheOptions::default(), Device::Cpu)?;
/// let (q, k) = (Tensor::randn([1, 6, 5, 64], Device::Cpu)?, Tensor::randn([1, 2, 5, 64], Device::Cpu)?);
/// cache.reserve(5)?;
/// assert_eq!(cache.attend(0, &q, &k, &k)?.shape(), q.shape());
/// cache.advance(5)?;
/// assert_eq!((cache.len(), cache.capacity()), (5, 256));
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug)]
pub struct KvCache {
    layers: Vec<[CacheRows; 2]>,
    options: KvCacheOptions,
    position: Tensor,
    counts: Arc<Counts>,
}

/// Numbers that captured graphs share with the cache.
#[derive(Debug)]
struct Counts {
    len: AtomicUsize,
    capacity: AtomicUsize,
    /// How often the cache began to grow.
    growths: AtomicUsize,
}

impl Counts {
    /// Fails if `new` rows do not fit, or if the cache has grown since `growths` was read.
    fn check(&self, new: usize, growths: usize) -> Result<()> {
        let [len, capacity] = [&self.len, &self.capacity].map(|n| n.load(Relaxed));
        invalid!("KvCache::advance" if self.growths.load(Relaxed) != growths, "the cache has grown: capture the graph again");
        invalid!("KvCache::advance" if new > capacity - len, "{new} rows do not fit behind {len} of {capacity} rows");
        Ok(())
    }
}

impl KvCache {
    /// Creates an empty cache for `[layers, heads of keys, width of a head]`. Fails with [`Error::Invalid`] if the capacity is above
    /// the limit, and as [`CacheRows::new`] does.
    #[track_caller]
    pub fn new([layers, heads, width]: [usize; 3], options: KvCacheOptions, device: Device) -> Result<KvCache> {
        let _caller = Caller::enter();
        let KvCacheOptions { batch, kind, capacity, limit, .. } = options;
        invalid!("KvCache::new" if capacity > limit, "a capacity of {capacity} rows is above the limit of {limit}");
        let rows = || CacheRows::new([batch, heads, capacity, width], kind, device);
        let layers = (0..layers).map(|_| Ok([rows()?, rows()?])).collect::<Result<_>>()?;
        let [len, capacity, growths] = [0, capacity, 0].map(AtomicUsize::new);
        let counts = Arc::new(Counts { len, capacity, growths });
        Ok(KvCache { layers, options, position: Tensor::zeros(1, (DType::I64, device))?, counts })
    }

    /// Stores the keys and values of new tokens, `[batch, heads, L, width]`, behind the rows of layer `layer`, and returns the attention
    /// of their queries, `[batch, query heads, L, width]`: query i attends to all rows before the new rows and to the new rows 0 to i.
    /// Fails with [`Error::Invalid`] without room for L rows (see [`reserve`](KvCache::reserve)), and as [`cached_attention`] does.
    #[track_caller]
    pub fn attend(&self, layer: usize, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let _caller = Caller::enter();
        let (op, count, new) = ("KvCache::attend", self.layers.len(), k.shape().dims().get(2).copied().unwrap_or(0));
        invalid!(op if layer >= count, "layer {layer} is not below the {count} layers");
        invalid!(op if new > self.capacity() - self.len(), "{new} rows do not fit behind {} of {} rows: call reserve first",
            self.len(), self.capacity());
        let (cache, scale) = (self.layers[layer].each_ref(), self.options.scale);
        // A prompt attends to its own keys only, with kernels for many queries. A captured step may be replayed at any position.
        if self.is_empty() && new > 1 && !Graph::is_capturing(self.position.device()) {
            cache_store([k, v], cache, &self.position)?;
            let options = Attention { is_causal: true, enable_gqa: true, scale, ..Attention::default() };
            return q.scaled_dot_product_attention(k, v, options);
        }
        cached_attention(q, [k, v], cache, &self.position, scale)
    }

    /// Counts `new` rows that every layer has stored. In a capture, each replay counts `new` rows, and fails with [`Error::Invalid`] if the
    /// rows do not fit or if the cache has grown since the capture.
    pub fn advance(&self, new: usize) -> Result<()> {
        let (counts, growths) = (Arc::clone(&self.counts), self.counts.growths.load(Relaxed));
        if Graph::is_capturing(self.position.device()) {
            let counted = Arc::clone(&counts);
            let count = move || _ = counted.len.fetch_add(new, Relaxed);
            Graph::on_replay(self.position.device(), move || counts.check(new, growths), count)?;
            return self.position.add_scalar_(new as i64).map(drop);
        }
        counts.check(new, growths)?;
        self.position.add_scalar_(new as i64)?;
        counts.len.fetch_add(new, Relaxed);
        Ok(())
    }

    /// Makes room for `new` more rows: doubles the capacity as often as necessary, layer by layer. Returns true if the rows moved; graphs
    /// that use the cache then have to be captured again. Fails with [`Error::Invalid`] above the limit and inside a capture. After an
    /// error, the values of the rows are unchanged.
    #[track_caller]
    pub fn reserve(&mut self, new: usize) -> Result<bool> {
        let _caller = Caller::enter();
        let (len, limit, device) = (self.len(), self.options.limit, self.position.device());
        let needed = len.saturating_add(new);
        invalid!("KvCache::reserve" if needed > limit, "{needed} rows are above the limit of {limit}");
        if needed <= self.capacity() {
            return Ok(false);
        }
        invalid!("KvCache::reserve" if Graph::is_capturing(device), "a cache cannot grow inside a capture");
        let mut capacity = self.capacity().max(1);
        while capacity < needed {
            capacity = capacity.saturating_mul(2).min(limit);
        }
        self.counts.growths.fetch_add(1, Relaxed);
        for layer in self.layers.iter_mut().filter(|layer| layer[0].sizes()[2] < capacity) {
            let grow = |rows: &CacheRows| {
                let [batch, heads, _, width] = rows.sizes();
                let grown = CacheRows::new([batch, heads, capacity, width], rows.kind(), device)?;
                grown.tensor().narrow(2, 0, len)?.copy_(&rows.tensor().narrow(2, 0, len)?)?;
                Ok::<_, Error>(grown)
            };
            *layer = [grow(&layer[0])?, grow(&layer[1])?];
        }
        self.counts.capacity.store(capacity, Relaxed);
        Ok(true)
    }

    /// Keeps the first `len` rows and forgets the others. Fails with [`Error::Invalid`] if there are fewer.
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        invalid!("KvCache::truncate" if len > self.len(), "{len} rows of {}", self.len());
        self.position.fill_(len as i64)?;
        self.counts.len.store(len, Relaxed);
        Ok(())
    }

    /// Returns the number of rows that every layer has stored.
    pub fn len(&self) -> usize {
        self.counts.len.load(Relaxed)
    }

    /// True if no rows are stored.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of rows for which memory is allocated.
    pub fn capacity(&self) -> usize {
        self.counts.capacity.load(Relaxed)
    }

    /// Returns the position of the next row, an i64 tensor `[1]` on the device, which [`advance`](KvCache::advance) changes in place.
    pub fn position(&self) -> &Tensor {
        &self.position
    }

    /// Returns the size of all keys and values, in bytes.
    pub fn nbytes(&self) -> usize {
        self.layers.iter().flatten().map(|rows| rows.tensor().numel() * rows.tensor().dtype().size()).sum()
    }
}

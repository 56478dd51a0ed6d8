//! The pool allocator: reuses whole buffers by size. Based on MNN's `BufferPool`, with limits and stream safety added.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use smallvec::SmallVec;

use super::allocator::Allocator;
use super::block::{Block, next_owner_number};
use super::config::Config;
use super::driver::{Driver, ImageDesc};
use super::history::{HistoryOptions, Snapshot};
use super::images::desc::{OtherMemoryHolder, other_holder};
use super::per_device::PerDevice;
use super::segment::Segment;
use super::stats::DeviceStats;
use super::unsplit::{ReleasedMemory, SegmentLedger, create_segment, segment_size};
use crate::device::{StreamId, lock};
use crate::{Device, Result};

/// The expected lifetime of a buffer, which decides which free buffers may serve a request (MNN's `Backend::StorageType`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum StorageType {
    /// Weights: takes buffers from a pool that serves no other requests (MNN's `STATIC`).
    Static,
    /// Intermediate results: takes the smallest free buffer that is large enough (MNN's `DYNAMIC`).
    #[default]
    Dynamic,
    /// Takes a newly created buffer, for data that is written while other buffers are still in use. Once freed, the
    /// buffer serves dynamic requests (MNN's `DYNAMIC_SEPERATE`).
    DynamicSeparate,
}

/// Keeps freed buffers and reuses them whole: each allocation takes the smallest free buffer that is large enough. Buffers are never split. A program
/// whose sizes vary therefore reserves more than with the caching allocator; a program whose sizes repeat has one buffer for each size in use.
///
/// The policy is that of MNN's OpenCL `BufferPool` with its storage types ([`StorageType`]). In addition:
/// - A free buffer of more than `pool_overfit` times the request is left for larger requests.
/// - If a new buffer would exceed the device's memory or the limit, the pool releases the smallest sufficient unused
///   buffer, then all unused buffers, then waits for the device. It searches again after every step.
/// - A buffer freed on one stream serves another stream after a device-side wait, unless `cross_stream_reuse` is off.
///
/// ```
/// use std::sync::Arc;
/// use claystone::device::StreamId;
/// use claystone::storage::{Allocator, Config, PoolAllocator, Sim, SimOptions, StorageType};
/// let device = Sim::new(SimOptions::default());
/// let pool = PoolAllocator::new(Arc::new(device.clone()), Config::default())?;
/// let block = pool.allocate(6000, StreamId::DEFAULT)?;
/// pool.deallocate(block);
/// let again = pool.allocate(4000, StreamId::DEFAULT)?; // the same 6144 bytes
/// let weights = pool.allocate_kind(4000, StreamId::DEFAULT, StorageType::Static)?;
/// assert_eq!((again.size(), weights.size(), device.live_segments()), (6144, 4096, 2));
/// [again, weights].into_iter().for_each(|block| pool.deallocate(block));
/// # Ok::<(), claystone::Error>(())
/// ```
pub struct PoolAllocator {
    driver: Arc<dyn Driver>,
    number: u32,
    max_overfit: f64,
    cross_stream_reuse: bool,
    /// False for the direct allocator, which releases every buffer at once.
    reuses: bool,
    /// The holder of the device's other memory; `None` to look up the device's images.
    other: Option<Arc<dyn OtherMemoryHolder>>,
    state: Mutex<State>,
}

/// The allocator's state, guarded by the allocator's lock.
struct State {
    ledger: SegmentLedger,
    /// Allocated buffers, by the id of their segment.
    live: HashMap<u64, Buffer>,
    dynamic_buffers: FreeList,
    static_buffers: FreeList,
    /// Number of buffers freed so far, which serves as the age of a free buffer.
    clock: u64,
}

/// One segment, which is allocated and freed as a whole.
struct Buffer {
    segment: Arc<Segment>,
    /// The image's description, if the buffer is an image.
    image: Option<ImageDesc>,
    is_static: bool,
    /// The stream on which the buffer can be reused without a wait if `others` is empty.
    stream: StreamId,
    /// Other streams that used the buffer and that `stream` has not waited for.
    others: Streams,
}

/// Streams that used a buffer; rarely more than two.
type Streams = SmallVec<[StreamId; 2]>;

/// Free buffers by stream, size and age.
#[derive(Default)]
struct FreeList(BTreeMap<StreamId, BTreeMap<(usize, u64), Buffer>>);

struct Request {
    bytes: usize,
    size: usize,
    image: Option<ImageDesc>,
    stream: StreamId,
    kind: StorageType,
}

/// The steps tried, in order, when a new buffer would exceed the device's memory or the limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReleaseStep {
    /// Release the smallest unused buffer that makes enough room.
    ReleaseSmallest,
    /// Release all unused buffers.
    ReleaseAll,
    /// Ask other allocators of the device to release unused memory.
    OtherAllocators,
    /// Wait for all streams, because drivers keep released memory until the work that uses it is done.
    Wait,
}

const RELEASE_STEPS: [ReleaseStep; 6] = [
    ReleaseStep::ReleaseSmallest,
    ReleaseStep::ReleaseAll,
    ReleaseStep::OtherAllocators,
    ReleaseStep::Wait,
    ReleaseStep::ReleaseAll,
    ReleaseStep::OtherAllocators,
];

impl PoolAllocator {
    /// Creates an allocator over `driver`'s memory. Uses the configuration's limits, `pool_overfit` and `cross_stream_reuse`.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the configuration contradicts itself.
    pub fn new(driver: Arc<dyn Driver>, config: Config) -> Result<PoolAllocator> {
        config.check()?;
        let state = State {
            ledger: SegmentLedger::new(&*driver, &config),
            live: HashMap::new(),
            dynamic_buffers: FreeList::default(),
            static_buffers: FreeList::default(),
            clock: 0,
        };
        let Config { pool_overfit: max_overfit, cross_stream_reuse, .. } = config;
        let (number, state) = (next_owner_number(), Mutex::new(state));
        Ok(PoolAllocator { driver, number, max_overfit, cross_stream_reuse, reuses: true, other: None, state })
    }

    /// Creates an allocator that creates every buffer anew and releases it when it is freed.
    pub(super) fn without_reuse(driver: Arc<dyn Driver>, config: Config) -> Result<PoolAllocator> {
        Ok(PoolAllocator { reuses: false, ..PoolAllocator::new(driver, config)? })
    }

    /// Creates a pool of images, whose limits include the bytes of the device's buffers.
    pub(super) fn of_images(
        driver: Arc<dyn Driver>,
        config: Config,
        buffers: Arc<dyn OtherMemoryHolder>,
    ) -> Result<PoolAllocator> {
        Ok(PoolAllocator { other: Some(buffers), ..PoolAllocator::new(driver, config)? })
    }

    /// Returns the holder of the device's memory that is not this pool's.
    fn other_holder(&self) -> Option<Arc<dyn OtherMemoryHolder>> {
        self.other.clone().or_else(|| other_holder(self.driver.device()))
    }

    /// Like [`allocate`](Allocator::allocate), for a given storage type.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory) if memory does not suffice even after all unused memory was released;
    /// errors that the driver reports.
    pub fn allocate_kind(&self, bytes: usize, stream: StreamId, kind: StorageType) -> Result<Block> {
        self.allocate_or_release(&Request {
            bytes,
            size: segment_size(&*self.driver, bytes)?,
            image: None,
            stream,
            kind,
        })
    }

    /// Allocates an image. Reuses a free image of the same format that is at least as wide and as high, choosing the image with the least
    /// excess area, or creates an image. Follows MNN's `ImagePool`, except that formats are compared and that a static image is at most
    /// `pool_overfit` times too large, because static images live long. The returned block can neither be split nor be used as a buffer.
    ///
    /// # Errors
    /// As [`allocate_kind`](Self::allocate_kind).
    pub(crate) fn allocate_image(&self, image: ImageDesc, stream: StreamId, kind: StorageType) -> Result<Block> {
        let bytes = image.bytes();
        segment_size(&*self.driver, bytes)?; // checks only that the device can hold the image; images need no alignment
        self.allocate_or_release(&Request { bytes, size: bytes, image: Some(image), stream, kind })
    }

    /// Returns the number of bytes of segments that the pool holds.
    pub(super) fn reserved(&self) -> u64 {
        lock(&self.state).ledger.stats.reserved()
    }

    /// Returns the maximum number of bytes that the pool may hold.
    pub(super) fn limit(&self) -> u64 {
        lock(&self.state).ledger.limit()
    }

    /// Serves a request, releasing unused memory step by step if memory does not suffice.
    fn allocate_or_release(&self, request: &Request) -> Result<Block> {
        let &Request { bytes, stream, .. } = request;
        let mut why = match self.reuse_or_create(request)? {
            Ok(block) => return Ok(block),
            Err(why) => why,
        };
        let mut unused = ReleasedMemory::default();
        // No release makes room for a request that exceeds the limit by itself.
        let hopeless = request.size as u64 > lock(&self.state).ledger.limit();
        for step in RELEASE_STEPS.into_iter().filter(|_| !hopeless) {
            let gone = match step {
                ReleaseStep::ReleaseSmallest | ReleaseStep::ReleaseAll if !self.reuses => continue,
                ReleaseStep::ReleaseSmallest => lock(&self.state).remove_one(request.size),
                ReleaseStep::ReleaseAll => lock(&self.state).remove_all(),
                ReleaseStep::OtherAllocators => match self.other_holder() {
                    Some(other) if other.make_room()? => Vec::new(),
                    _ => continue,
                },
                ReleaseStep::Wait => {
                    self.driver.synchronize()?;
                    let stats = &mut lock(&self.state).ledger.stats;
                    stats.num_alloc_retries += 1;
                    stats.num_sync_all_streams += 1;
                    Vec::new()
                }
            };
            unused.bytes += gone.iter().map(|buffer| buffer.size() as u64).sum::<u64>();
            unused.largest = gone.iter().map(Buffer::size).fold(unused.largest, usize::max);
            drop(gone); // dropped without the lock, because a driver may wait for work that uses the buffers
            why = match self.reuse_or_create(request)? {
                Ok(block) => return Ok(block),
                Err(why) => why,
            };
        }
        Err(lock(&self.state).ledger.out_of_memory(bytes, stream, &why, unused))
    }

    /// Frees a block and returns its buffer to the driver at once (MNN's `recycle` with `release`).
    pub fn release(&self, block: Block) {
        if let Some((state, buffer)) = self.remove_live_buffer(block) {
            drop(state);
            let address = buffer.segment.address();
            drop(buffer); // not under the lock, and before the statistics change
            let ledger = &mut lock(&self.state).ledger;
            ledger.record_free(address);
            ledger.record_release(address);
        }
    }

    /// Reuses a free buffer or creates one. The inner error says why neither is possible.
    fn reuse_or_create(&self, request: &Request) -> Result<Result<Block, String>> {
        if let Some(block) = self.reuse(request)? {
            return Ok(Ok(block));
        }
        let elsewhere = self.other_holder().map_or(0, |other| other.held());
        if let Some(why) = lock(&self.state).ledger.reserve_room(request.size, elsewhere) {
            return Ok(Err(why));
        }
        let made = create_segment(&*self.driver, request.size, request.image, request.bytes);
        let mut state = lock(&self.state);
        let segment = made.as_ref().ok().and_then(|made| made.as_ref().ok());
        state.ledger.finish_creation(request.size, request.stream, segment.map(|segment| &**segment));
        let segment = match made? {
            Ok(segment) => segment,
            Err(why) => return Ok(Err(why)),
        };
        let is_static = request.kind == StorageType::Static;
        let &Request { image, stream, .. } = request;
        let buffer = Buffer { segment, image, is_static, stream, others: Streams::new() };
        state.allocate_buffer(self.number, buffer, request.bytes).map(Ok)
    }

    /// Reuses a free buffer that fits, and makes the request's stream wait for the streams that used it.
    fn reuse(&self, request: &Request) -> Result<Option<Block>> {
        if request.kind == StorageType::DynamicSeparate || !self.reuses {
            return Ok(None);
        }
        let (block, others) = {
            let mut state = lock(&self.state);
            let most = match request.image {
                // MNN does not bound the excess of an image. Weights live long, so a static image is bounded.
                Some(_) if request.kind != StorageType::Static => usize::MAX,
                _ => ((request.size as f64 * self.max_overfit) as usize).max(request.size), // the conversion saturates
            };
            let list = state.free_list(request.kind == StorageType::Static);
            let Some(mut buffer) = list.take(request, most, self.cross_stream_reuse) else {
                return Ok(None);
            };
            if buffer.stream != request.stream {
                buffer.others.push(buffer.stream);
                buffer.stream = request.stream;
            }
            buffer.others.retain(|stream| *stream != request.stream);
            let others = buffer.others.clone();
            (state.allocate_buffer(self.number, buffer, request.bytes)?, others)
        };
        let wait = |other: &StreamId| self.driver.stream_waits(request.stream, &self.driver.record(*other)?);
        if let Err(error) = others.iter().try_for_each(wait) {
            self.deallocate(block); // keeps the streams that used it, so that its next owner waits for them
            return Err(error);
        }
        if !others.is_empty()
            && let Some(buffer) = lock(&self.state).live.get_mut(&block.segment().id())
        {
            buffer.others.clear();
        }
        Ok(Some(block))
    }

    /// Removes a block's buffer from the live buffers. Returns the buffer and the lock guard, or `None` for a block of another allocator.
    fn remove_live_buffer(&self, block: Block) -> Option<(MutexGuard<'_, State>, Buffer)> {
        if block.is_foreign(self, self.number) {
            return None;
        }
        let id = block.segment().id();
        drop(block); // releases the block's reference to the segment
        let mut state = lock(&self.state);
        let buffer = state.live.remove(&id)?;
        Some((state, buffer))
    }
}

impl fmt::Debug for PoolAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = if self.reuses { "pool" } else { "direct" };
        write!(f, "the {name} allocator of {}", self.driver.device())
    }
}

impl Allocator for PoolAllocator {
    fn device(&self) -> Device {
        self.driver.device()
    }

    fn alignment(&self) -> usize {
        self.driver.alignment()
    }

    fn stats(&self) -> DeviceStats {
        lock(&self.state).ledger.stats.stats()
    }

    fn reset_peak_stats(&self) {
        lock(&self.state).ledger.stats.reset_peak();
    }

    fn reset_accumulated_stats(&self) {
        lock(&self.state).ledger.stats.reset_accumulated();
    }

    fn set_memory_limit(&self, bytes: u64) -> Result<()> {
        lock(&self.state).ledger.set_limit(bytes);
        Ok(())
    }

    fn set_memory_fraction(&self, fraction: f64) -> Result<()> {
        lock(&self.state).ledger.set_fraction(fraction)
    }

    fn snapshot(&self) -> Snapshot {
        let snapshot = lock(&self.state).ledger.begin_snapshot();
        snapshot()
    }

    fn record_memory_history(&self, options: HistoryOptions) -> Result<()> {
        lock(&self.state).ledger.record_memory_history(options)
    }

    fn allocate(&self, bytes: usize, stream: StreamId) -> Result<Block> {
        self.allocate_kind(bytes, stream, StorageType::Dynamic)
    }

    fn deallocate(&self, block: Block) {
        if !self.reuses {
            return self.release(block);
        }
        if let Some((mut state, buffer)) = self.remove_live_buffer(block) {
            state.ledger.record_free(buffer.segment.address());
            state.clock += 1;
            let age = state.clock;
            let list = state.free_list(buffer.is_static);
            list.0.entry(buffer.stream).or_default().insert((buffer.size(), age), buffer);
        }
    }

    fn record_stream(&self, block: &Block, stream: StreamId) {
        if block.owner == self.number
            && let Some(buffer) = lock(&self.state).live.get_mut(&block.segment().id())
            && buffer.stream != stream
            && !buffer.others.contains(&stream)
        {
            buffer.others.push(stream);
        }
    }

    fn empty_cache(&self) -> Result<()> {
        let gone = lock(&self.state).remove_all();
        drop(gone); // not under the lock, because the driver may wait
        Ok(())
    }

    /// Releases the oldest buffers first. Keeps buffers that work may still use, because the driver would wait for that work.
    fn trim(&self, keep: u64) -> Result<u64> {
        let (now, streams) = {
            let state = lock(&self.state);
            if state.ledger.stats.reserved() <= keep {
                return Ok(0);
            }
            (state.clock, state.free_buffers().flat_map(|(_, buffer)| buffer.streams()).collect::<BTreeSet<_>>())
        };
        let mut idle = BTreeSet::new();
        for stream in streams {
            if self.driver.is_idle(stream)? {
                idle.insert(stream);
            }
        }
        let gone = lock(&self.state).remove_oldest(keep, |age, buffer| {
            age <= now && buffer.streams().all(|stream| idle.contains(&stream)) // only buffers that were freed before the streams were queried
        });
        Ok(gone.iter().map(|buffer| buffer.size() as u64).sum())
    }
}

impl State {
    /// Marks a buffer as live, and creates its block.
    fn allocate_buffer(&mut self, owner: u32, buffer: Buffer, requested: usize) -> Result<Block> {
        let size = buffer.size();
        // SAFETY: the buffer is new or comes from a free list, so no live block refers to it.
        let mut block = unsafe { Block::new(&buffer.segment, 0, size, requested) }?;
        block.owner = owner;
        self.ledger.record_allocation(buffer.segment.address(), buffer.stream, requested);
        self.live.insert(buffer.segment.id(), buffer);
        Ok(block)
    }

    /// Returns the free list of static buffers if `is_static`, and of dynamic buffers otherwise.
    fn free_list(&mut self, is_static: bool) -> &mut FreeList {
        if is_static { &mut self.static_buffers } else { &mut self.dynamic_buffers }
    }

    /// Iterates over the free buffers, each with its age.
    fn free_buffers(&self) -> impl Iterator<Item = (u64, &Buffer)> {
        let lists = [&self.static_buffers, &self.dynamic_buffers].into_iter().flat_map(|list| list.0.values());
        lists.flat_map(|list| list.iter().map(|(&(_, age), buffer)| (age, buffer)))
    }

    /// Removes the smallest free buffer of at least `size` bytes.
    fn remove_one(&mut self, size: usize) -> Vec<Buffer> {
        let enough = self.free_buffers().filter(|(_, buffer)| buffer.size() >= size);
        let smallest = enough.min_by_key(|(age, buffer)| (buffer.size(), *age)).map(|(age, _)| age);
        smallest.map_or_else(Vec::new, |age| self.remove(&BTreeSet::from([age])))
    }

    fn remove_all(&mut self) -> Vec<Buffer> {
        let ages = self.free_buffers().map(|(age, _)| age).collect();
        self.remove(&ages)
    }

    /// Removes free buffers for which `may` is true, the oldest first, until at most `keep` bytes are held.
    fn remove_oldest(&mut self, keep: u64, may: impl Fn(u64, &Buffer) -> bool) -> Vec<Buffer> {
        let oldest: BTreeMap<u64, u64> =
            self.free_buffers().filter(|(age, b)| may(*age, b)).map(|(age, b)| (age, b.size() as u64)).collect();
        let mut held = self.ledger.stats.reserved();
        let until = |(age, bytes): (u64, u64)| {
            let surplus = held > keep;
            held -= if surplus { bytes } else { 0 };
            surplus.then_some(age)
        };
        let ages = oldest.into_iter().map_while(until).collect();
        self.remove(&ages)
    }

    /// Removes the free buffers of these ages. The caller must release the lock before dropping the buffers.
    fn remove(&mut self, ages: &BTreeSet<u64>) -> Vec<Buffer> {
        let mut gone = Vec::new();
        for list in [&mut self.static_buffers, &mut self.dynamic_buffers] {
            for list in list.0.values_mut() {
                let keys: Vec<_> = list.keys().filter(|(_, age)| ages.contains(age)).copied().collect();
                gone.extend(keys.iter().filter_map(|key| list.remove(key)));
            }
            list.0.retain(|_, list| !list.is_empty());
        }
        gone.iter().for_each(|buffer| self.ledger.record_release(buffer.segment.address()));
        gone
    }
}

impl FreeList {
    /// Takes the smallest buffer of at most `most` bytes that serves the request. Prefers the request's stream, and
    /// takes other streams' buffers only if `any`. Takes the oldest of several buffers of the same size, as in MNN.
    fn take(&mut self, request: &Request, most: usize, any: bool) -> Option<Buffer> {
        let stream = request.stream;
        let fit = |(&from, list): (&StreamId, &BTreeMap<(usize, u64), Buffer>)| {
            let mut sizes = list.range((request.size, 0)..=(most, u64::MAX));
            let (&key, _) = sizes.find(|(_, buffer)| buffer.serves(request))?;
            (any || from == stream).then_some((from != stream, key, from))
        };
        let (_, key, from) = self.0.iter().filter_map(fit).min()?;
        let list = self.0.get_mut(&from)?;
        let buffer = list.remove(&key);
        if list.is_empty() {
            self.0.remove(&from);
        }
        buffer
    }
}

impl Buffer {
    fn size(&self) -> usize {
        self.segment.bytes()
    }

    /// True if the buffer, which must be large enough, is of the requested kind: a buffer, or an image of the requested format.
    fn serves(&self, request: &Request) -> bool {
        match (&self.image, &request.image) {
            (Some(own), Some(wanted)) => own.serves(wanted),
            (own, wanted) => own.is_none() && wanted.is_none(),
        }
    }

    /// Iterates over the streams whose work may be using the buffer.
    fn streams(&self) -> impl Iterator<Item = StreamId> {
        std::iter::once(self.stream).chain(self.others.iter().copied())
    }
}

/// The image pools of all devices that have used one.
pub(super) static IMAGE_POOLS: PerDevice<Arc<PoolAllocator>> = PerDevice::new();

/// Returns the pool of a device's images, if it was made already.
pub(super) fn existing_image_pool(device: Device) -> Option<Arc<PoolAllocator>> {
    IMAGE_POOLS.get(device)
}

/// Returns an allocator's statistics including the images of its device.
pub(super) fn with_images(allocator: &dyn Allocator) -> DeviceStats {
    match existing_image_pool(allocator.device()) {
        Some(images) if std::ptr::addr_eq(allocator, &*images) => allocator.device().memory_stats().unwrap_or_default(),
        Some(images) => allocator.stats().plus(&images.stats()),
        None => allocator.stats(),
    }
}

#[cfg(test)]
mod tests;

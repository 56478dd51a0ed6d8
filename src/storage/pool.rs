//! The pool allocator: reuses whole buffers by size. Based on MNN's `BufferPool`, with limits and stream safety added.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, Mutex};

use smallvec::SmallVec;

use super::allocator::{Allocator, check_fraction};
use super::block::{Block, next_owner_number};
use super::caching::SizeKind;
use super::config::Config;
use super::counters::Counters;
use super::driver::{Driver, Failure, ImageDesc};
use super::history::{
    BlockInfo, BlockState, Context, History, HistoryOptions, Recording, SegmentInfo, SegmentWithContexts, Snapshot,
    TraceAction, device_number,
};
use super::images::desc::OtherMemory;
use super::per_device;
use super::segment::Segment;
use super::stats::{DeviceStats, Plus};
use crate::device::{StreamId, lock};
use crate::error::Size;
use crate::{Device, Error, Result};

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
    config: Config,
    /// False for the direct allocator, which releases every buffer at once.
    reuses: bool,
    /// The device's other memory; `None` to look up the device's images.
    other: Option<OtherMemory>,
    state: Mutex<State>,
}

/// The addresses of free buffers by size in bytes and age.
type FreeBuffers = BTreeMap<(usize, u64), u64>;

/// The allocator's state, guarded by the allocator's lock.
struct State {
    stats: Counters,
    history: History,
    /// Limits on the total bytes of segments: the limit set in bytes, and the limit set as a fraction of the capacity, in bytes.
    limit_bytes: u64,
    fraction_bytes: u64,
    /// Number of bytes of segments that are being created, which happens without the lock.
    bytes_in_creation: u64,
    /// All buffers, by the address of their segment.
    buffers: BTreeMap<u64, Buffer>,
    /// The free dynamic buffers and the free static buffers, by stream.
    free: [BTreeMap<StreamId, FreeBuffers>; 2],
    /// Number of buffers freed so far, which serves as the age of a free buffer.
    clock: u64,
}

/// One segment, which is allocated and freed as a whole.
struct Buffer {
    /// `None` while the segment is being released.
    segment: Option<Arc<Segment>>,
    size: usize,
    /// The image's description, if the buffer is an image.
    image: Option<ImageDesc>,
    is_static: bool,
    /// The stream and the context of the request for which the segment was created.
    created_for: (StreamId, Context),
    /// The stream on which the buffer can be reused without a wait if `others` is empty.
    stream: StreamId,
    /// Other streams that used the buffer and that `stream` has not waited for.
    others: Streams,
    /// The requested bytes and the context of the allocation that has the buffer; `None` if the buffer is free.
    taken: Option<(usize, Context)>,
}

/// Streams that used a buffer; rarely more than two.
type Streams = SmallVec<[StreamId; 2]>;

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
        PoolAllocator::with_options(driver, config, true, None)
    }

    /// Creates an allocator that releases every buffer when it is freed unless `reuses`. Its limits include the bytes of `other`, or of
    /// the device's images if that is `None`.
    pub(super) fn with_options(
        driver: Arc<dyn Driver>,
        config: Config,
        reuses: bool,
        other: Option<OtherMemory>,
    ) -> Result<PoolAllocator> {
        config.check()?;
        let mut stats = Counters::default();
        stats.max_split_size = config.max_split_size as u64;
        let state = State {
            stats,
            history: History::new(),
            limit_bytes: config.limit(driver.capacity()),
            fraction_bytes: driver.capacity(),
            bytes_in_creation: 0,
            buffers: BTreeMap::new(),
            free: Default::default(),
            clock: 0,
        };
        let (number, state) = (next_owner_number(), Mutex::new(state));
        Ok(PoolAllocator { driver, number, config, reuses, other, state })
    }

    /// Returns the device's memory that is not this pool's.
    fn other_memory(&self) -> Option<&OtherMemory> {
        self.other.as_ref().or_else(|| per_device::get(self.driver.device()))
    }

    /// Like [`allocate`](Allocator::allocate), for a given storage type.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory) if memory does not suffice even after all unused memory was released;
    /// errors that the driver reports.
    pub fn allocate_kind(&self, bytes: usize, stream: StreamId, kind: StorageType) -> Result<Block> {
        let size = self.segment_size(bytes)?;
        self.allocate_or_release(&Request { bytes, size, image: None, stream, kind })
    }

    /// Allocates an image. Reuses a free image of the same format that is at least as wide and as high, choosing the image with the least
    /// excess area, or creates an image. Follows MNN's `ImagePool`, except that formats are compared and that a static image is at most
    /// `pool_overfit` times too large, because static images live long. The returned block can neither be split nor be used as a buffer.
    ///
    /// # Errors
    /// As [`allocate_kind`](Self::allocate_kind).
    pub(crate) fn allocate_image(&self, image: ImageDesc, stream: StreamId, kind: StorageType) -> Result<Block> {
        let bytes = image.bytes();
        self.segment_size(bytes)?; // checks only that the device can hold the image; images need no alignment
        self.allocate_or_release(&Request { bytes, size: bytes, image: Some(image), stream, kind })
    }

    /// Returns the size in bytes of the segment for a request.
    fn segment_size(&self, bytes: usize) -> Result<usize> {
        let size = bytes.max(1).checked_next_multiple_of(self.driver.alignment());
        size.filter(|&size| size as u64 <= self.driver.capacity()).ok_or_else(|| self.too_large(bytes))
    }

    fn too_large(&self, requested: usize) -> Error {
        too_large_error(&*self.driver, requested, self.driver.largest_segment() as u64)
    }

    /// Returns the number of bytes of segments that the pool holds.
    pub(super) fn reserved(&self) -> u64 {
        lock(&self.state).stats.reserved()
    }

    /// Returns the maximum number of bytes that the pool may hold.
    pub(super) fn limit(&self) -> u64 {
        lock(&self.state).limit()
    }

    /// Serves a request, releasing unused memory step by step if memory does not suffice.
    fn allocate_or_release(&self, request: &Request) -> Result<Block> {
        let mut why = match self.reuse_or_create(request)? {
            Ok(block) => return Ok(block),
            Err(why) => why,
        };
        // The total bytes and the largest size of the unused buffers that were released.
        let (mut released, mut largest) = (0, 0);
        // No release makes room for a request that exceeds the limit by itself.
        let hopeless = request.size as u64 > self.limit();
        for step in RELEASE_STEPS.into_iter().filter(|_| !hopeless) {
            let gone = match step {
                ReleaseStep::ReleaseSmallest | ReleaseStep::ReleaseAll if !self.reuses => continue,
                ReleaseStep::ReleaseSmallest => lock(&self.state).remove_one(request.size),
                ReleaseStep::ReleaseAll => lock(&self.state).remove_all(),
                ReleaseStep::OtherAllocators => match self.other_memory() {
                    Some(other) if other.make_room()? => Vec::new(),
                    _ => continue,
                },
                ReleaseStep::Wait => {
                    self.driver.synchronize()?;
                    let stats = &mut lock(&self.state).stats;
                    stats.num_alloc_retries += 1;
                    stats.num_sync_all_streams += 1;
                    Vec::new()
                }
            };
            released += gone.iter().map(|buffer| buffer.size as u64).sum::<u64>();
            largest = gone.iter().map(|buffer| buffer.size).fold(largest, usize::max);
            drop(gone); // dropped without the lock, because a driver may wait for work that uses the buffers
            why = match self.reuse_or_create(request)? {
                Ok(block) => return Ok(block),
                Err(why) => why,
            };
        }
        Err(self.out_of_memory(request, &why, released, largest))
    }

    /// Returns the error for a request that could not be served. `why` is the reason; unused buffers of `released` bytes, the largest
    /// of `largest` bytes, were released and did not suffice.
    fn out_of_memory(&self, request: &Request, why: &str, released: u64, largest: usize) -> Error {
        let (device, capacity) = (self.device(), self.driver.capacity());
        let state = &mut *lock(&self.state);
        state.stats.num_ooms += 1;
        let (allocated, reserved) = (state.stats.allocated_bytes(), state.stats.reserved());
        let free = capacity.saturating_sub(reserved).min(i64::MAX as u64); // snapshot files store the number as an i64
        state.history.record(TraceAction::Oom, free, request.bytes as u64, request.stream.0);
        let (allocated, reserved) = (Size(allocated), Size(reserved));
        let mut detail =
            format!("{allocated:#} are allocated and {reserved:#} reserved of a capacity of {:#}", Size(capacity));
        if state.limit() < capacity {
            detail += &format!(", of which {:#} are allowed", Size(state.limit()));
        }
        if released > 0 {
            let (bytes, largest) = (Size(released), Size(largest as u64));
            detail += &format!("; {bytes:#} in unused buffers, the largest of {largest:#}, were given back");
        }
        Error::OutOfMemory { device, requested: request.bytes, detail: format!("{detail}; {why}") }
    }

    /// Frees a block and returns its buffer to the driver at once (MNN's `recycle` with `release`).
    pub fn release(&self, block: Block) {
        let Some(address) = self.take_back(block) else { return };
        let segment = lock(&self.state).buffers.get_mut(&address).and_then(|buffer| buffer.segment.take());
        drop(segment); // not under the lock, and before the statistics change
        let mut state = lock(&self.state);
        state.record_free(address);
        state.remove_buffer(address);
    }

    /// Reuses a free buffer or creates one. The inner error says why neither is possible.
    fn reuse_or_create(&self, request: &Request) -> Result<Result<Block, String>> {
        if let Some(block) = self.reuse(request)? {
            return Ok(Ok(block));
        }
        let &Request { bytes, size, image, stream, kind } = request;
        let elsewhere = self.other_memory().map_or(0, OtherMemory::held);
        {
            let mut state = lock(&self.state);
            let held = state.stats.reserved() + state.bytes_in_creation;
            if held.saturating_add(elsewhere).saturating_add(size as u64) > state.limit() {
                let others = match elsewhere {
                    0 => String::new(),
                    _ => format!(" beside {:#} in buffers or images that are counted elsewhere", Size(elsewhere)),
                };
                return Ok(Err(format!("there is no room for it{others}")));
            }
            state.bytes_in_creation += size as u64;
        }
        let made = image.map_or_else(|| self.driver.create(size), |image| self.driver.create_image(image));
        let made = made.inspect(|_| tracing::debug!(device = %self.driver.device(), size, "segment made"));
        let mut state = lock(&self.state);
        state.bytes_in_creation -= size as u64;
        let memory = match made {
            Ok(memory) => memory,
            Err(failure) => {
                drop(state);
                return match failure {
                    Failure::TooBig => Err(self.too_large(bytes)),
                    Failure::Other(error) => Err(error),
                    failure => Ok(Err(failure.to_string())),
                };
            }
        };
        let segment = Arc::new(Segment::new(memory, size));
        let address = segment.address();
        state.stats.record_segment_alloc(SizeKind::of_size(size), size);
        let context = state.history.record(TraceAction::SegmentAlloc, address, size as u64, stream.0);
        let (segment, is_static, created_for) = (Some(segment), kind == StorageType::Static, (stream, context));
        let buffer =
            Buffer { segment, size, image, is_static, created_for, stream, others: Streams::new(), taken: None };
        state.buffers.insert(address, buffer);
        state.allocate_buffer(self.number, address, bytes).map(Ok)
    }

    /// Reuses a free buffer that fits, and makes the request's stream wait for the streams that used it.
    fn reuse(&self, request: &Request) -> Result<Option<Block>> {
        if request.kind == StorageType::DynamicSeparate || !self.reuses {
            return Ok(None);
        }
        let (block, address, others) = {
            let mut state = lock(&self.state);
            let most = match request.image {
                // MNN does not bound the excess of an image. Weights live long, so a static image is bounded.
                Some(_) if request.kind != StorageType::Static => usize::MAX,
                _ => ((request.size as f64 * self.config.pool_overfit) as usize).max(request.size), // the conversion saturates
            };
            let Some(address) = state.take_free(request, most, self.config.cross_stream_reuse) else {
                return Ok(None);
            };
            let buffer = state.buffer(address);
            if buffer.stream != request.stream {
                buffer.others.push(buffer.stream);
                buffer.stream = request.stream;
            }
            buffer.others.retain(|stream| *stream != request.stream);
            let others = buffer.others.clone();
            (state.allocate_buffer(self.number, address, request.bytes)?, address, others)
        };
        let wait = |other: &StreamId| self.driver.stream_waits(request.stream, &self.driver.record(*other)?);
        if let Err(error) = others.iter().try_for_each(wait) {
            self.deallocate(block); // keeps the streams that used it, so that its next owner waits for them
            return Err(error);
        }
        if !others.is_empty() {
            lock(&self.state).buffer(address).others.clear();
        }
        Ok(Some(block))
    }

    /// Drops a block, which releases its reference to the segment, and returns the buffer's address. Returns `None` for a block of
    /// another allocator.
    fn take_back(&self, block: Block) -> Option<u64> {
        (!block.is_foreign(self, self.number)).then(|| block.segment().address())
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
        lock(&self.state).stats.stats()
    }

    fn reset_peak_stats(&self) {
        lock(&self.state).stats.reset_peak();
    }

    fn raise_peaks(&self, to: &DeviceStats) {
        lock(&self.state).stats.raise_peaks(to);
    }

    fn reset_accumulated_stats(&self) {
        lock(&self.state).stats.reset_accumulated();
    }

    fn set_memory_limit(&self, bytes: u64) -> Result<()> {
        lock(&self.state).limit_bytes = bytes.min(self.driver.capacity());
        Ok(())
    }

    fn set_memory_fraction(&self, fraction: f64) -> Result<()> {
        lock(&self.state).fraction_bytes = (self.driver.capacity() as f64 * check_fraction(fraction)?) as u64;
        Ok(())
    }

    fn snapshot(&self) -> Snapshot {
        let device = device_number(self.device());
        let (segments, history) = {
            let state = lock(&self.state);
            state.history.record(TraceAction::Snapshot, 0, state.stats.active_bytes(), 0);
            let segments = state.buffers.iter().map(|(&address, buffer)| buffer.info(device, address)).collect();
            (segments, state.history.copy())
        };
        Snapshot::of_device(device, segments, history, &self.config)
    }

    fn record_memory_history(&self, options: HistoryOptions) -> Result<()> {
        // As in PyTorch, stopping the recording deletes the trace, which would lack the events that follow.
        let clear_history = options.clear_history || options.enabled == Recording::Off;
        lock(&self.state).history.record_memory_history(HistoryOptions { clear_history, ..options })
    }

    fn allocate(&self, bytes: usize, stream: StreamId) -> Result<Block> {
        self.allocate_kind(bytes, stream, StorageType::Dynamic)
    }

    fn deallocate(&self, block: Block) {
        if !self.reuses {
            return self.release(block);
        }
        if let Some(address) = self.take_back(block) {
            let state = &mut *lock(&self.state);
            state.record_free(address);
            state.clock += 1;
            let &mut Buffer { size, is_static, stream, .. } = state.buffer(address);
            state.free[usize::from(is_static)].entry(stream).or_default().insert((size, state.clock), address);
        }
    }

    fn record_stream(&self, block: &Block, stream: StreamId) {
        if block.owner == self.number {
            let mut state = lock(&self.state);
            let buffer = state.buffer(block.segment().address());
            if buffer.stream != stream && !buffer.others.contains(&stream) {
                buffer.others.push(stream);
            }
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
            if state.stats.reserved() <= keep {
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
        Ok(gone.iter().map(|buffer| buffer.size as u64).sum())
    }
}

impl State {
    fn limit(&self) -> u64 {
        self.limit_bytes.min(self.fraction_bytes)
    }

    fn buffer(&mut self, address: u64) -> &mut Buffer {
        self.buffers.get_mut(&address).expect("buffers are known while they are allocated or free")
    }

    /// Marks a buffer as allocated, and creates its block.
    fn allocate_buffer(&mut self, owner: u32, address: u64, requested: usize) -> Result<Block> {
        let State { stats, history, buffers, .. } = self;
        let Some(Buffer { segment: Some(segment), size, stream, taken, .. }) = buffers.get_mut(&address) else {
            return Err(Error::invalid("allocate", "the buffer was released"));
        };
        // SAFETY: the buffer is new or comes from a free list, so no live block refers to it.
        let mut block = unsafe { Block::new(segment, 0, *size, requested) }?;
        block.owner = owner;
        stats.record_allocation(SizeKind::of_size(*size), *size, requested);
        *taken = Some((requested, history.record(TraceAction::Alloc, address, requested as u64, stream.0)));
        Ok(block)
    }

    fn record_free(&mut self, address: u64) {
        if let Some(Buffer { size, stream, taken, .. }) = self.buffers.get_mut(&address)
            && let Some((requested, _)) = taken.take()
        {
            self.stats.record_free(SizeKind::of_size(*size), *size, requested);
            self.history.record_free(address, requested as u64, stream.0);
        }
    }

    /// Iterates over the free buffers, each with its age.
    fn free_buffers(&self) -> impl Iterator<Item = (u64, &Buffer)> {
        let lists = self.free.iter().rev().flat_map(BTreeMap::values).flatten();
        lists.map(|(&(_, age), address)| (age, &self.buffers[address]))
    }

    /// Takes the smallest free buffer of at most `most` bytes that serves the request. Prefers the request's stream, and takes other
    /// streams' buffers only if `any`. Takes the oldest of several buffers of the same size, as in MNN. Returns its address.
    fn take_free(&mut self, request: &Request, most: usize, any: bool) -> Option<u64> {
        let State { free, buffers, .. } = self;
        let list = &mut free[usize::from(request.kind == StorageType::Static)];
        let smallest_in_stream = |(&from, list): (&StreamId, &FreeBuffers)| {
            let mut sizes = list.range((request.size, 0)..=(most, u64::MAX));
            let (&key, _) = sizes.find(|(_, address)| buffers[address].serves(request))?;
            (any || from == request.stream).then_some((from != request.stream, key, from))
        };
        let (_, key, from) = list.iter().filter_map(smallest_in_stream).min()?;
        let own = list.get_mut(&from)?;
        let address = own.remove(&key);
        if own.is_empty() {
            list.remove(&from);
        }
        address
    }

    /// Removes the smallest free buffer of at least `size` bytes.
    fn remove_one(&mut self, size: usize) -> Vec<Buffer> {
        let enough = self.free_buffers().filter(|(_, buffer)| buffer.size >= size);
        let smallest = enough.min_by_key(|(age, buffer)| (buffer.size, *age)).map(|(age, _)| age);
        smallest.map_or_else(Vec::new, |age| self.remove(&BTreeSet::from([age])))
    }

    fn remove_all(&mut self) -> Vec<Buffer> {
        let ages = self.free_buffers().map(|(age, _)| age).collect();
        self.remove(&ages)
    }

    /// Removes free buffers for which `may` is true, the oldest first, until at most `keep` bytes are held.
    fn remove_oldest(&mut self, keep: u64, may: impl Fn(u64, &Buffer) -> bool) -> Vec<Buffer> {
        let oldest: BTreeMap<u64, u64> =
            self.free_buffers().filter(|(age, b)| may(*age, b)).map(|(age, b)| (age, b.size as u64)).collect();
        let mut held = self.stats.reserved();
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
        for list in self.free.iter_mut().rev() {
            for list in list.values_mut() {
                let keys: Vec<_> = list.keys().filter(|(_, age)| ages.contains(age)).copied().collect();
                gone.extend(keys.iter().filter_map(|key| list.remove(key)));
            }
            list.retain(|_, list| !list.is_empty());
        }
        gone.into_iter().filter_map(|address| self.remove_buffer(address)).collect()
    }

    /// Removes a buffer, and records that its segment is released.
    fn remove_buffer(&mut self, address: u64) -> Option<Buffer> {
        let buffer = self.buffers.remove(&address)?;
        self.stats.record_segment_free(SizeKind::of_size(buffer.size), buffer.size);
        self.history.record(TraceAction::SegmentFree, address, buffer.size as u64, buffer.created_for.0.0);
        Some(buffer)
    }
}

impl Buffer {
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

    /// Describes the segment, which consists of one block.
    fn info(&self, device: u32, address: u64) -> SegmentWithContexts {
        let size = self.size as u64;
        let (state, requested, context) = match self.taken {
            Some((requested, context)) => (BlockState::ActiveAllocated, requested, context),
            None => (BlockState::Inactive, 0, Context::NONE),
        };
        let (stream, created) = self.created_for;
        let segment = SegmentInfo {
            device,
            stream: stream.0.into(),
            segment_type: SizeKind::of_size(self.size),
            ..SegmentInfo::new(vec![BlockInfo {
                requested_size: requested as u64,
                ..BlockInfo::new(address, size, state)
            }])
        };
        SegmentWithContexts { segment, context: created, contexts: vec![context] }
    }
}

/// Returns the error for a buffer that exceeds the device's memory or that its driver refuses to create. The driver guarantees
/// `promised` bytes.
pub(super) fn too_large_error(driver: &dyn Driver, requested: usize, promised: u64) -> Error {
    let mut detail = format!("the device has {:#}", Size(driver.capacity()));
    if promised < driver.capacity() {
        detail += &format!(", and promises buffers of at most {:#}", Size(promised));
    }
    Error::OutOfMemory { device: driver.device(), requested, detail }
}

/// Returns the pool of a device's images, if it was made already.
pub(super) fn existing_image_pool(device: Device) -> Option<&'static PoolAllocator> {
    per_device::get(device)
}

/// Returns the snapshot of an allocator including the images of its device.
pub(super) fn snapshot_with_images(allocator: &dyn Allocator) -> Snapshot {
    match existing_image_pool(allocator.device()) {
        Some(images) => allocator.snapshot().with_images(images.snapshot()),
        None => allocator.snapshot(),
    }
}

/// Returns an allocator's statistics including the images of its device.
pub(super) fn with_images(allocator: &dyn Allocator) -> DeviceStats {
    match existing_image_pool(allocator.device()) {
        Some(images) if std::ptr::addr_eq(allocator, images) => allocator.device().memory_stats().unwrap_or_default(),
        Some(images) => allocator.stats().plus(&images.stats()),
        None => allocator.stats(),
    }
}

#[cfg(test)]
mod tests;

//! The pool allocator: whole buffers, reused by size. MNN's `BufferPool`, with what that lacks.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};

use smallvec::SmallVec;

use super::allocator::Allocator;
use super::block::{Block, owner_number};
use super::config::Config;
use super::driver::{Driver, ImageDesc};
use super::segment::Segment;
use super::unsplit::{Books, Unused, answer_from_books, make, segment_size};
use crate::Result;
use crate::device::StreamId;
use crate::device::lock;

/// How long a buffer is meant to live, and so which buffers may serve (MNN's `Backend::StorageType`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum StorageType {
    /// Weights: reused from, and given back to, a pool that nothing else draws on (MNN's `STATIC`).
    Static,
    /// Intermediate results: the smallest free buffer that holds them (MNN's `DYNAMIC`).
    #[default]
    Dynamic,
    /// A buffer that nobody had before, for what is filled while others still run. Given back, it serves dynamic
    /// requests (MNN's `DYNAMIC_SEPERATE`).
    DynamicSeparate,
}

/// Keeps buffers that are given back and hands them out again, whole: each allocation is the smallest free buffer that
/// holds it. Nothing is ever split, so a program whose sizes vary holds more than with the caching allocator; one whose
/// sizes repeat has one buffer for each.
///
/// The policy is that of MNN's OpenCL `BufferPool` with its kinds of request ([`StorageType`]), and beyond it:
/// - a free buffer of more than `pool_overfit` times the request is left for larger ones;
/// - when the device or the limit has no room, unused buffers are given back, first the smallest one that suffices, then
///   all, and the device is waited for, with a new search after every step;
/// - a buffer freed on one stream serves another behind a wait on the device, unless `cross_stream_reuse` is off.
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
    overfit: f64,
    cross_stream_reuse: bool,
    state: Mutex<State>,
}

/// What the lock guards.
struct State {
    books: Books,
    /// Buffers handed out, by the number of their segment.
    live: HashMap<u64, Buffer>,
    dynamic: FreeList,
    fixed: FreeList,
    /// Counts buffers given back: their age.
    clock: u64,
}

/// One segment, as it is handed out and given back.
struct Buffer {
    segment: Arc<Segment>,
    /// What it is where it is an image.
    image: Option<ImageDesc>,
    fixed: bool,
    /// The stream whose work may use it without waiting, if nobody else used it.
    stream: StreamId,
    /// Streams that the work of the first has not waited for.
    others: Streams,
}

type Streams = SmallVec<[StreamId; 2]>;

/// Free buffers by stream, size and age.
#[derive(Default)]
struct FreeList(BTreeMap<StreamId, BTreeMap<(usize, u64), Buffer>>);

/// What is asked for.
struct Request {
    bytes: usize,
    size: usize,
    image: Option<ImageDesc>,
    stream: StreamId,
    kind: StorageType,
}

/// What to do when there is no room, one step after another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rung {
    /// Give back the smallest unused buffer that makes enough room.
    GiveBackOne,
    GiveBackAll,
    /// Have unused memory given back that others hold.
    Elsewhere,
    /// Wait for all streams: drivers keep what is given back until the work that uses it is done.
    Wait,
}

const LADDER: [Rung; 6] =
    [Rung::GiveBackOne, Rung::GiveBackAll, Rung::Elsewhere, Rung::Wait, Rung::GiveBackAll, Rung::Elsewhere];

impl PoolAllocator {
    /// An allocator over this driver's memory. Of the configuration, the limits, `pool_overfit` and
    /// `cross_stream_reuse` count.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) where the configuration contradicts itself.
    pub fn new(driver: Arc<dyn Driver>, config: Config) -> Result<PoolAllocator> {
        config.check()?;
        let state = State {
            books: Books::new(&*driver, &config),
            live: HashMap::new(),
            dynamic: FreeList::default(),
            fixed: FreeList::default(),
            clock: 0,
        };
        let Config { pool_overfit: overfit, cross_stream_reuse, .. } = config;
        Ok(PoolAllocator { driver, number: owner_number(), overfit, cross_stream_reuse, state: Mutex::new(state) })
    }

    /// As [`allocate`](Allocator::allocate), of a kind of its own.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory) when all that could be given back has been; whatever the driver reports.
    pub fn allocate_kind(&self, bytes: usize, stream: StreamId, kind: StorageType) -> Result<Block> {
        self.serve(&Request { bytes, size: segment_size(&*self.driver, bytes)?, image: None, stream, kind })
    }

    /// An image: a free one of the format that is at least as wide and as high, of several the one with the least to spare,
    /// else a new one. The rules of MNN's `ImagePool`, which does not compare formats; a static image is also at most
    /// `pool_overfit` times too large, as it stays for long. The block that it is given as cannot be
    /// split, nor used as a buffer.
    ///
    /// # Errors
    /// As [`allocate_kind`](Self::allocate_kind).
    pub(crate) fn allocate_image(&self, image: ImageDesc, stream: StreamId, kind: StorageType) -> Result<Block> {
        let bytes = image.bytes();
        segment_size(&*self.driver, bytes)?; // images are not aligned, but no larger than the device, either
        self.serve(&Request { bytes, size: bytes, image: Some(image), stream, kind })
    }

    /// Bytes that it holds.
    pub(super) fn reserved(&self) -> u64 {
        lock(&self.state).books.stats.reserved()
    }

    /// The most bytes that it may hold.
    pub(super) fn limit(&self) -> u64 {
        lock(&self.state).books.limit()
    }

    fn serve(&self, request: &Request) -> Result<Block> {
        let &Request { bytes, stream, .. } = request;
        let mut why = match self.find(request)? {
            Ok(block) => return Ok(block),
            Err(why) => why,
        };
        let mut unused = Unused::default();
        // What is beyond the limit by itself, nothing given back makes room for.
        let hopeless = request.size as u64 > lock(&self.state).books.limit();
        for rung in LADDER.into_iter().filter(|_| !hopeless) {
            let gone = match rung {
                Rung::GiveBackOne => lock(&self.state).remove_one(request.size),
                Rung::GiveBackAll => lock(&self.state).remove_all(),
                Rung::Elsewhere if self.driver.make_room_elsewhere(request.size)? => Vec::new(),
                Rung::Elsewhere => continue,
                Rung::Wait => {
                    self.driver.synchronize()?;
                    let stats = &mut lock(&self.state).books.stats;
                    stats.num_alloc_retries += 1;
                    stats.num_sync_all_streams += 1;
                    Vec::new()
                }
            };
            unused.bytes += gone.iter().map(|buffer| buffer.size() as u64).sum::<u64>();
            unused.largest = gone.iter().map(Buffer::size).fold(unused.largest, usize::max);
            drop(gone); // outside the lock: a driver may wait for the work that uses them
            why = match self.find(request)? {
                Ok(block) => return Ok(block),
                Err(why) => why,
            };
        }
        Err(lock(&self.state).books.out_of_memory(bytes, stream, &why, unused))
    }

    /// Takes a block back, and its buffer out of the pool: the driver has it at once (MNN's `recycle` with `release`).
    pub fn release(&self, block: Block) {
        let gone = self.take_back(block).map(|(mut state, buffer)| {
            state.books.released(buffer.segment.address());
            buffer
        });
        drop(gone); // outside the lock
    }

    /// A free buffer that fits, else a new one, else why there is none.
    fn find(&self, request: &Request) -> Result<Result<Block, String>> {
        if let Some(block) = self.reuse(request)? {
            return Ok(Ok(block));
        }
        let elsewhere = self.driver.held_elsewhere();
        if let Some(why) = lock(&self.state).books.begin(request.size, elsewhere) {
            return Ok(Err(why));
        }
        let made = make(&*self.driver, request.size, request.image, request.bytes);
        let mut state = lock(&self.state);
        let segment = made.as_ref().ok().and_then(|made| made.as_ref().ok());
        state.books.end(request.size, request.stream, segment.map(|segment| &**segment));
        let segment = match made? {
            Ok(segment) => segment,
            Err(why) => return Ok(Err(why)),
        };
        let fixed = request.kind == StorageType::Static;
        let &Request { image, stream, .. } = request;
        let buffer = Buffer { segment, image, fixed, stream, others: Streams::new() };
        state.hand_out(self.number, buffer, request.bytes).map(Ok)
    }

    /// A free buffer that fits, after putting the request's stream behind those that used it.
    fn reuse(&self, request: &Request) -> Result<Option<Block>> {
        if request.kind == StorageType::DynamicSeparate {
            return Ok(None);
        }
        let (block, others) = {
            let mut state = lock(&self.state);
            let most = match request.image {
                // As MNN does; but weights stay for long, and are not to keep what is much too large.
                Some(_) if request.kind != StorageType::Static => usize::MAX,
                _ => ((request.size as f64 * self.overfit) as usize).max(request.size), // saturates
            };
            let list = state.list(request.kind == StorageType::Static);
            let Some(mut buffer) = list.take(request, most, self.cross_stream_reuse) else {
                return Ok(None);
            };
            if buffer.stream != request.stream {
                buffer.others.push(buffer.stream);
                buffer.stream = request.stream;
            }
            buffer.others.retain(|stream| *stream != request.stream);
            let others = buffer.others.clone();
            (state.hand_out(self.number, buffer, request.bytes)?, others)
        };
        let wait = |other: &StreamId| self.driver.stream_waits(request.stream, &self.driver.record(*other)?);
        if let Err(error) = others.iter().try_for_each(wait) {
            self.deallocate(block); // the next one to get it waits for the same streams
            return Err(error);
        }
        if !others.is_empty()
            && let Some(buffer) = lock(&self.state).live.get_mut(&block.segment().id())
        {
            buffer.others.clear();
        }
        Ok(Some(block))
    }

    /// The buffer of a block of ours, in the books no longer in use.
    fn take_back(&self, block: Block) -> Option<(MutexGuard<'_, State>, Buffer)> {
        if block.is_foreign(self, self.number) {
            return None;
        }
        let id = block.segment().id();
        drop(block); // with its share of the segment
        let mut state = lock(&self.state);
        let buffer = state.live.remove(&id)?;
        state.books.given_back(buffer.segment.address());
        Some((state, buffer))
    }
}

impl fmt::Debug for PoolAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the pool allocator of {}", self.driver.device())
    }
}

impl Allocator for PoolAllocator {
    answer_from_books!(self, lock(&self.state).books);

    fn allocate(&self, bytes: usize, stream: StreamId) -> Result<Block> {
        self.allocate_kind(bytes, stream, StorageType::Dynamic)
    }

    fn deallocate(&self, block: Block) {
        if let Some((mut state, buffer)) = self.take_back(block) {
            state.clock += 1;
            let age = state.clock;
            let list = state.list(buffer.fixed);
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
        drop(gone); // outside the lock
        Ok(())
    }

    /// Oldest first; those that work may still use stay, as drivers would wait for it.
    fn trim(&self, keep: u64) -> Result<u64> {
        let (now, streams) = {
            let state = lock(&self.state);
            if state.books.stats.reserved() <= keep {
                return Ok(0);
            }
            (state.clock, state.free().flat_map(|(_, buffer)| buffer.streams()).collect::<BTreeSet<_>>())
        };
        let mut idle = BTreeSet::new();
        for stream in streams {
            if self.driver.is_idle(stream)? {
                idle.insert(stream);
            }
        }
        let gone = lock(&self.state).remove_oldest(keep, |age, buffer| {
            age <= now && buffer.streams().all(|stream| idle.contains(&stream)) // given back before we asked
        });
        Ok(gone.iter().map(|buffer| buffer.size() as u64).sum())
    }
}

impl State {
    fn hand_out(&mut self, owner: u32, buffer: Buffer, requested: usize) -> Result<Block> {
        let size = buffer.size();
        // SAFETY: the buffer is new or comes from a free list: no live block has it.
        let mut block = unsafe { Block::new(&buffer.segment, 0, size, requested) }?;
        block.owner = owner;
        self.books.taken(buffer.segment.address(), buffer.stream, requested);
        self.live.insert(buffer.segment.id(), buffer);
        Ok(block)
    }

    fn list(&mut self, fixed: bool) -> &mut FreeList {
        if fixed { &mut self.fixed } else { &mut self.dynamic }
    }

    /// Every free buffer, with its age.
    fn free(&self) -> impl Iterator<Item = (u64, &Buffer)> {
        let lists = [&self.fixed, &self.dynamic].into_iter().flat_map(|list| list.0.values());
        lists.flat_map(|list| list.iter().map(|(&(_, age), buffer)| (age, buffer)))
    }

    fn remove_one(&mut self, size: usize) -> Vec<Buffer> {
        let enough = self.free().filter(|(_, buffer)| buffer.size() >= size);
        let smallest = enough.min_by_key(|(age, buffer)| (buffer.size(), *age)).map(|(age, _)| age);
        smallest.map_or_else(Vec::new, |age| self.remove(&BTreeSet::from([age])))
    }

    fn remove_all(&mut self) -> Vec<Buffer> {
        let ages = self.free().map(|(age, _)| age).collect();
        self.remove(&ages)
    }

    /// Free buffers of which `may` is true, oldest first, until at most `keep` bytes are held.
    fn remove_oldest(&mut self, keep: u64, may: impl Fn(u64, &Buffer) -> bool) -> Vec<Buffer> {
        let oldest: BTreeMap<u64, u64> =
            self.free().filter(|(age, b)| may(*age, b)).map(|(age, b)| (age, b.size() as u64)).collect();
        let mut held = self.books.stats.reserved();
        let until = |(age, bytes): (u64, u64)| {
            let surplus = held > keep;
            held -= if surplus { bytes } else { 0 };
            surplus.then_some(age)
        };
        let ages = oldest.into_iter().map_while(until).collect();
        self.remove(&ages)
    }

    /// Takes the free buffers of these ages out. Whoever drops them does so without the lock.
    fn remove(&mut self, ages: &BTreeSet<u64>) -> Vec<Buffer> {
        let mut gone = Vec::new();
        for list in [&mut self.fixed, &mut self.dynamic] {
            for list in list.0.values_mut() {
                let keys: Vec<_> = list.keys().filter(|(_, age)| ages.contains(age)).copied().collect();
                gone.extend(keys.iter().filter_map(|key| list.remove(key)));
            }
            list.0.retain(|_, list| !list.is_empty());
        }
        gone.iter().for_each(|buffer| self.books.released(buffer.segment.address()));
        gone
    }
}

impl FreeList {
    /// The smallest buffer of at most so many bytes that serves and is the stream's, else any stream's; of equals the oldest, as
    /// in MNN.
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

    /// Whether it may be given to this request, which it is large enough for.
    fn serves(&self, request: &Request) -> bool {
        match (&self.image, &request.image) {
            (Some(own), Some(wanted)) => own.serves(wanted),
            (own, wanted) => own.is_none() && wanted.is_none(),
        }
    }

    /// Every stream whose work may be using it.
    fn streams(&self) -> impl Iterator<Item = StreamId> {
        std::iter::once(self.stream).chain(self.others.iter().copied())
    }
}

#[cfg(test)]
mod tests;

//! The trait of allocators, and the handles they give out.

use std::any::Any;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

use super::caching::{FreeMemory, OomObserver, Registration};
use super::history::{HistoryOptions, Snapshot};
use super::registry;
use super::segment::Segment;
use super::stats::DeviceStats;
use crate::device::StreamId;
use crate::{Device, Error, Result};

/// Where a block is now. Readers of `lock` keep it there; who moves it, or writes host bytes, holds it for writing.
#[repr(align(64))] // neighbours are other threads' blocks
pub(crate) struct Slot {
    pub(crate) lock: RwLock<()>,
    segment: AtomicPtr<Segment>,
    offset: AtomicUsize,
    size: AtomicUsize,
    requested: AtomicUsize,
    exported: AtomicBool,
    /// Whether a stream other than its own has used it: freeing must wait for that one too.
    pub(crate) recorded: AtomicBool,
}

impl Slot {
    pub(crate) const fn vacant() -> Slot {
        Slot {
            lock: RwLock::new(()),
            segment: AtomicPtr::new(std::ptr::null_mut()),
            offset: AtomicUsize::new(0),
            size: AtomicUsize::new(0),
            requested: AtomicUsize::new(0),
            exported: AtomicBool::new(false),
            recorded: AtomicBool::new(false),
        }
    }

    /// Points the slot at a new place.
    ///
    /// # Safety
    /// The segment outlives every [`Block`] with this slot. Where such a block is in use already, `lock` is held for
    /// writing and the place has the block's size and contents.
    #[inline]
    pub(crate) unsafe fn set_place(&self, segment: &Arc<Segment>, offset: usize) {
        self.segment.store(Arc::as_ptr(segment).cast_mut(), Relaxed);
        self.offset.store(offset, Relaxed);
    }

    #[inline]
    pub(crate) fn requested(&self) -> usize {
        self.requested.load(Relaxed)
    }

    /// Whether the block may not move, now or ever again.
    pub(crate) fn is_exported(&self) -> bool {
        self.exported.load(Relaxed)
    }

    /// Becomes that of a block that nobody has seen yet.
    #[inline]
    fn begin(&self, size: usize, requested: usize) {
        self.exported.store(false, Relaxed);
        self.recorded.store(false, Relaxed);
        self.size.store(size, Relaxed);
        self.requested.store(requested, Relaxed);
    }

    /// The right to move the block, unless someone is using it at this moment.
    pub(crate) fn try_write(&self) -> Option<RwLockWriteGuard<'_, ()>> {
        match self.lock.try_write() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poison)) => Some(poison.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// A number for an allocator to know its blocks by, as their `owner`.
pub(super) fn owner_number() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    NEXT.fetch_add(1, Relaxed)
}

/// A block handed out by an [`Allocator`]: the right to use its bytes until it is given back with
/// [`Allocator::deallocate`], which takes it by value: it can be given back once and not used after.
///
/// A block dropped without that stays allocated for good.
#[must_use = "a block that is dropped stays allocated: give it back with Allocator::deallocate"]
pub struct Block {
    slot: NonNull<Slot>,
    /// What the slot has as well: giving a block back should not touch that one, which is in no cache by then.
    requested: usize,
    /// The allocator it came from, and the entry in its table with [`KEEPS`] and [`OWN`]: that one's own business.
    pub(crate) owner: u32,
    tagged: u32,
}

/// Of a block's number: whether threads' caches may keep it. It then has the size that its request is rounded up to.
pub(super) const KEEPS: u32 = 1 << 31;
/// Likewise: whether the slot is that of an [`Own`], which is the block's, and not one of an allocator's table.
const OWN: u32 = 1 << 30;
/// What is below the tags: entries a table may have.
pub(super) const MAX_ENTRIES: usize = OWN as usize;

#[repr(C)] // a pointer to the slot is one to all
struct Own {
    slot: Slot,
    holder: Holder,
}

/// What keeps the bytes there.
enum Holder {
    Segment(#[expect(dead_code, reason = "held")] Arc<Segment>),
    Whole(Block),
}

// SAFETY: a block owns its bytes; its slot is atomics and a lock, and lives until the block is given back.
unsafe impl Send for Block {}
// SAFETY: as above: a shared block gives out nothing but what its slot's lock guards.
unsafe impl Sync for Block {}

impl Block {
    /// A block at `offset` in a segment, for allocators of a user's own: `size` bytes are taken, `requested` of them
    /// were asked for. The block keeps the segment alive.
    ///
    /// # Errors
    /// [`Error::Invalid`] where the range is not inside the segment.
    ///
    /// # Safety
    /// The segment's memory has as many bytes as the segment says. No other live block has any of these, and nothing else
    /// writes to them while the block lives.
    pub unsafe fn new(segment: &Arc<Segment>, offset: usize, size: usize, requested: usize) -> Result<Block> {
        if requested > size || offset.checked_add(size).is_none_or(|end| end > segment.bytes()) {
            let all = segment.bytes();
            let range = format!("{requested} of {size} bytes at {offset} are not in a segment of {all}");
            return Err(Error::invalid("Block::new", range));
        }
        let slot = Slot::vacant();
        // SAFETY: the holder keeps the segment as long as the block lives.
        unsafe { slot.set_place(segment, offset) };
        Ok(Block::owning(Own { slot, holder: Holder::Segment(Arc::clone(segment)) }, size, requested))
    }

    fn owning(own: Own, size: usize, requested: usize) -> Block {
        own.slot.begin(size, requested);
        let own = NonNull::from(Box::leak(Box::new(own)));
        Block { slot: own.cast(), requested, owner: u32::MAX, tagged: OWN }
    }

    fn own(&self) -> Option<&Own> {
        // SAFETY: the tag says that the slot is the first field of an Own, which lives as long as the block.
        (self.tagged & OWN != 0).then(|| unsafe { self.slot.cast::<Own>().as_ref() })
    }

    /// A block of `size` bytes of this one, which from now on stays where it is. For allocators that wrap others: the part
    /// holds the whole, and [`into_whole`](Block::into_whole) takes it out again.
    ///
    /// # Errors
    /// [`Error::Invalid`] where the range is not inside; this block then stays allocated.
    pub(super) fn into_part(self, offset: usize, size: usize, requested: usize) -> Result<Block> {
        if requested > size || offset.checked_add(size).is_none_or(|end| end > self.size()) {
            let range = format!("{requested} of {size} bytes at {offset} are not in a block of {}", self.size());
            return Err(Error::invalid("Block::into_part", range));
        }
        self.export();
        let slot = Slot::vacant();
        // The segment outlives the whole, which the part holds.
        slot.segment.store(self.slot().segment.load(Relaxed), Relaxed);
        slot.offset.store(self.offset() + offset, Relaxed);
        Ok(Block::owning(Own { slot, holder: Holder::Whole(self) }, size, requested))
    }

    /// The block of which this is a part.
    pub(super) fn whole(&self) -> Option<&Block> {
        match &self.own()?.holder {
            Holder::Whole(block) => Some(block),
            Holder::Segment(_) => None,
        }
    }

    /// As [`whole`](Block::whole), ending this one.
    pub(super) fn into_whole(self) -> Option<Block> {
        let block = ManuallyDrop::new(self);
        if block.tagged & OWN == 0 {
            return None;
        }
        // SAFETY: as the tag says, this is the Own that `owning` leaked; the block, which would give it back, is gone.
        match unsafe { Box::from_raw(block.slot.cast::<Own>().as_ptr()) }.holder {
            Holder::Whole(whole) => Some(whole),
            Holder::Segment(_) => None,
        }
    }

    /// A block whose slot is in an allocator's table.
    ///
    /// # Safety
    /// The slot, and the segment it points to, live until the block is given back, or for good, and no other block has the
    /// slot.
    #[inline]
    pub(crate) unsafe fn of_table(
        slot: NonNull<Slot>,
        owner: u32,
        tagged: u32,
        size: usize,
        requested: usize,
    ) -> Block {
        // SAFETY: the caller's promise.
        unsafe { slot.as_ref() }.begin(size, requested);
        Block { slot, requested, owner, tagged }
    }

    /// The number of its entry in the table of its allocator.
    #[inline]
    pub(crate) fn id(&self) -> u32 {
        self.tagged & !(KEEPS | OWN)
    }

    /// Whether threads' caches may keep it.
    #[inline]
    pub(super) fn keeps(&self) -> bool {
        self.tagged & KEEPS != 0
    }

    /// Bytes the block takes: the request rounded up.
    pub fn size(&self) -> usize {
        self.slot().size.load(Relaxed)
    }

    /// Bytes that were asked for.
    pub fn requested(&self) -> usize {
        self.requested
    }

    /// Where the block is. It stays there as long as the place is held.
    ///
    /// A thread holds one place of a block at a time: a second one waits behind whoever waits to write to the block, who
    /// waits for the first. Printing a block with `{:?}` takes its place, too.
    #[inline]
    pub fn place(&self) -> Place<'_> {
        let guard = self.slot().lock.read().unwrap_or_else(PoisonError::into_inner);
        Place { segment: self.segment(), offset: self.slot().offset.load(Relaxed), _guard: guard }
    }

    /// Makes the block stay where it is for good: its memory was handed out by address or `cl_mem`.
    pub fn export(&self) {
        self.pin();
    }

    /// As [`export`](Block::export), until [`unpin`](Block::unpin), which has to be told whether the block could move before.
    pub(super) fn pin(&self) -> bool {
        let _still = self.place(); // a move under way is done first
        !self.slot().exported.swap(true, Relaxed)
    }

    /// Ends what [`pin`](Block::pin) began. Under the lock: bytes written without it are written before they move.
    pub(super) fn unpin(&self, could_move: bool) {
        let _still = self.place();
        if could_move {
            self.slot().exported.store(false, Relaxed);
        }
    }

    /// Whether the block is not that of the allocator with this number, which then says so: whoever handed it out still
    /// counts it, and nobody else may touch it.
    #[inline]
    pub(super) fn is_foreign(&self, allocator: &dyn Allocator, number: u32) -> bool {
        let foreign = self.owner != number;
        if foreign {
            self.say_foreign(allocator);
        }
        foreign
    }

    #[cold]
    fn say_foreign(&self, allocator: &dyn Allocator) {
        tracing::error!(?allocator, block = ?self, "a block was given back to an allocator that is not its own");
    }

    /// As [`export`](Block::export); gives the segment, so that parts of the block can be handed out as blocks.
    pub(crate) fn export_segment(&self) -> Arc<Segment> {
        self.export();
        let _held = self.place();
        // The Arc's own pointer: one made of a reference may not reach its count.
        let segment = self.slot().segment.load(Relaxed).cast_const();
        // SAFETY: set_place took the pointer from an Arc, which whoever made the block keeps as long as the block lives;
        // the place is held meanwhile. The new Arc is the one counted here.
        unsafe {
            Arc::increment_strong_count(segment);
            Arc::from_raw(segment)
        }
    }

    #[inline]
    pub(crate) fn slot(&self) -> &Slot {
        // SAFETY: whoever made the block has promised that the slot lives as long.
        unsafe { self.slot.as_ref() }
    }

    #[inline]
    pub(crate) fn slot_ptr(&self) -> NonNull<Slot> {
        self.slot
    }

    /// Valid while the slot's lock is held, or while nothing moves.
    pub(crate) fn segment(&self) -> &Segment {
        // SAFETY: set_place was called before the block was made; its caller promised that the segment outlives it.
        unsafe { &*self.slot().segment.load(Relaxed) }
    }

    /// Valid while the slot's lock is held.
    pub(crate) fn offset(&self) -> usize {
        self.slot().offset.load(Relaxed)
    }
}

impl Drop for Block {
    #[inline]
    fn drop(&mut self) {
        if self.tagged & OWN != 0 {
            // SAFETY: as the tag says, this is the Own that `owning` leaked; nobody else gives it back.
            drop(unsafe { Box::from_raw(self.slot.cast::<Own>().as_ptr()) });
        }
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = self.place();
        write!(f, "{} bytes at segment {} + {}", self.size(), place.segment.id(), place.offset)
    }
}

/// Where a block is, and a hold on it there.
pub struct Place<'a> {
    segment: &'a Segment,
    offset: usize,
    _guard: RwLockReadGuard<'a, ()>,
}

impl Place<'_> {
    /// The segment the block is part of. Once the place is let go, the block may move and its segment go back.
    pub fn segment(&self) -> &Segment {
        self.segment
    }

    /// The block's first byte in it.
    pub fn offset(&self) -> usize {
        self.offset
    }
}

/// Where blocks of tensors begin: kernels find elements of every dtype, and vectors of them, by dividing.
pub(crate) const ALIGNMENT: usize = 512;

/// What the allocator inside says, or else what one that wraps none does: every default of [`Allocator`] is this.
macro_rules! ask_inner {
    ($self:ident.$method:ident($($argument:ident),*), $otherwise:expr) => {
        match $self.inner() {
            Some(inner) => inner.$method($($argument),*),
            None => $otherwise,
        }
    };
}

/// Hands out blocks of one device's memory.
///
/// Three come with the crate: [`CachingAllocator`](super::CachingAllocator), [`PoolAllocator`](super::PoolAllocator) and
/// [`DirectAllocator`](super::DirectAllocator). One of a user's own is put in place with
/// [`set_allocator`](super::set_allocator); one that wraps another, to count or limit or log, needs no unsafe code, and says which
/// one with [`inner`](Allocator::inner): whatever it does not define itself is asked of that.
pub trait Allocator: Any + Send + Sync + fmt::Debug {
    /// The device whose memory it hands out.
    fn device(&self) -> Device;

    /// Blocks begin at multiples of this many bytes, a power of two, at least 512: its driver's.
    fn alignment(&self) -> usize {
        ask_inner!(self.alignment(), ALIGNMENT)
    }

    /// The allocator that it passes requests on to, if it wraps one.
    fn inner(&self) -> Option<&Arc<dyn Allocator>> {
        None
    }

    /// A block of at least `bytes > 0` bytes, rounded up to 16, with unspecified contents, to be used by work on `stream`.
    /// Tensors refuse one that begins elsewhere than at a multiple of 512 bytes.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when all that could be given back has been; whatever the driver reports.
    fn allocate(&self, bytes: usize, stream: StreamId) -> Result<Block>;

    /// Takes a block back. Work on its stream may still be using it: whoever gets it next on that stream comes after.
    fn deallocate(&self, block: Block);

    /// Notes that work on `stream` uses the block as well: when given back it is not reused before that work is done
    /// (`torch.Tensor.record_stream`).
    fn record_stream(&self, block: &Block, stream: StreamId);

    /// What it holds and has done.
    fn stats(&self) -> DeviceStats;
    /// Sets every peak to the current value.
    fn reset_peak_stats(&self);
    /// Sets the sums of increases and decreases and the counts of events to zero.
    fn reset_accumulated_stats(&self);

    /// Gives everything cached and unused back to the driver.
    fn empty_cache(&self) -> Result<()>;

    /// Holds at most this many bytes from now on; what it holds already it keeps.
    ///
    /// # Errors
    /// [`Error::Invalid`] where the allocator cannot.
    fn set_memory_limit(&self, bytes: u64) -> Result<()> {
        let cannot = || Error::invalid("set_memory_limit", format!("{self:?} cannot limit what it holds"));
        ask_inner!(self.set_memory_limit(bytes), Err(cannot()))
    }

    /// Holds at most this part, 0 to 1, of the device's memory from now on, within [`set_memory_limit`]'s bound; what it
    /// holds already it keeps.
    ///
    /// # Errors
    /// [`Error::Invalid`] where the fraction is outside 0 to 1, or the allocator cannot.
    ///
    /// [`set_memory_limit`]: Allocator::set_memory_limit
    fn set_memory_fraction(&self, fraction: f64) -> Result<()> {
        let limit = || {
            if !(0.0..=1.0).contains(&fraction) {
                return Err(Error::invalid("set_memory_fraction", format!("{fraction} is not between 0 and 1")));
            }
            let capacity = registry::driver(self.device())?.capacity();
            self.set_memory_limit((capacity as f64 * fraction) as u64)
        };
        ask_inner!(self.set_memory_fraction(fraction), limit())
    }

    /// Has `free` called when there is no room for an allocation: it may drop what it can spare, and says whether it did
    /// (PyTorch's `FreeMemoryCallback`). The allocator looks for memory again after that. See
    /// [`CachingAllocator::add_free_memory_callback`](super::CachingAllocator::add_free_memory_callback).
    ///
    /// # Errors
    /// [`Error::Invalid`] where neither the allocator nor one inside it calls anybody.
    fn add_free_memory_callback(&self, free: Box<FreeMemory>) -> Result<Registration> {
        let nobody = || Error::invalid("add_free_memory_callback", format!("{self:?} asks nobody for memory"));
        ask_inner!(self.add_free_memory_callback(free), Err(nobody()))
    }

    /// Has `observe` called when an allocation fails for want of memory, before the error is returned (PyTorch's
    /// `attachOutOfMemoryObserver`). See
    /// [`CachingAllocator::add_oom_observer`](super::CachingAllocator::add_oom_observer).
    ///
    /// # Errors
    /// [`Error::Invalid`] where neither the allocator nor one inside it tells anybody.
    fn add_oom_observer(&self, observe: Box<OomObserver>) -> Result<Registration> {
        let nobody = || Error::invalid("add_oom_observer", format!("{self:?} tells nobody that memory ran out"));
        ask_inner!(self.add_oom_observer(observe), Err(nobody()))
    }

    /// How many blocks were found to have been written around, by a debugging allocator that looks
    /// ([`GuardAllocator`](super::GuardAllocator)).
    fn guard_violations(&self) -> u64 {
        ask_inner!(self.guard_violations(), 0)
    }

    /// Gives unused memory back as long as at least `keep` bytes stay held, and says how many bytes went back. Waits for
    /// nothing: memory that streams may still be using stays.
    fn trim(&self, keep: u64) -> Result<u64> {
        ask_inner!(self.trim(keep), Ok(0))
    }

    /// Moves blocks together, copying at most `budget` bytes, and gives back what that frees; says how many bytes went
    /// back.
    fn compact(&self, budget: u64) -> Result<u64> {
        ask_inner!(self.compact(budget), Ok(0))
    }

    /// What it holds at this moment, block by block, and what its history has recorded (PyTorch's
    /// `torch.cuda.memory._snapshot`). One that cannot tell gives an empty one.
    fn snapshot(&self) -> Snapshot {
        ask_inner!(self.snapshot(), Snapshot::default())
    }

    /// Begins or ends recording what happens, for [`snapshot`](Allocator::snapshot) to show (PyTorch's
    /// `torch.cuda.memory._record_memory_history`).
    ///
    /// # Errors
    /// [`Error::Invalid`] where there is no memory for as many entries, or the allocator cannot record.
    fn record_memory_history(&self, options: HistoryOptions) -> Result<()> {
        let cannot = || Error::invalid("record_memory_history", format!("{self:?} does not record"));
        ask_inner!(self.record_memory_history(options), Err(cannot()))
    }
}

#[cfg(test)]
mod tests;

//! Blocks: what allocators hand out.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

use Ordering::Relaxed;

use super::segment::Segment;
use crate::{Error, Result};

/// Counts the closures that read bytes in place without holding the lock that this is in. Who gets the lock for writing
/// leaves the bytes alone unless the count is 0.
#[derive(Debug, Default)]
pub(crate) struct Borrows(AtomicU32);

impl Borrows {
    pub(crate) const fn none() -> Borrows {
        Borrows(AtomicU32::new(0))
    }

    /// To be called under the lock, which orders it before the next writer.
    pub(super) fn begin(&self) {
        self.0.fetch_add(1, Relaxed);
    }

    /// The last use of the bytes happens before a writer sees the count fall.
    pub(super) fn end(&self) {
        self.0.fetch_sub(1, Ordering::Release);
    }

    pub(super) fn any(&self) -> bool {
        self.0.load(Ordering::Acquire) > 0
    }
}

/// Where a block is now. Readers of `lock` keep it there; who moves it, or writes host bytes, holds it for writing.
#[repr(align(64))] // neighbours are other threads' blocks
pub(crate) struct Slot {
    pub(crate) lock: RwLock<Borrows>,
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
            lock: RwLock::new(Borrows::none()),
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
    pub(crate) fn try_write(&self) -> Option<RwLockWriteGuard<'_, Borrows>> {
        let guard = match self.lock.try_write() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poison)) => poison.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        (!guard.any()).then_some(guard)
    }
}

/// A number for an allocator to know its blocks by, as their `owner`.
pub(super) fn owner_number() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    NEXT.fetch_add(1, Relaxed)
}

/// A block handed out by an [`Allocator`](super::Allocator): the right to use its bytes until it is given back with
/// [`Allocator::deallocate`](super::Allocator::deallocate), which takes it by value: it can be given back once and not used after.
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
    pub(super) fn is_foreign(&self, allocator: &dyn fmt::Debug, number: u32) -> bool {
        let foreign = self.owner != number;
        if foreign {
            self.say_foreign(allocator);
        }
        foreign
    }

    #[cold]
    fn say_foreign(&self, allocator: &dyn fmt::Debug) {
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
    _guard: RwLockReadGuard<'a, Borrows>,
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

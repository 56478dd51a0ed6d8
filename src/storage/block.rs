//! Blocks: the byte ranges that allocators hand out.

use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

use Ordering::Relaxed;

pub(crate) use super::driver::ALIGNMENT;
use super::driver::Sim;
use super::segment::Segment;
use crate::device::{StreamId, read};
use crate::{Error, Result};

/// Counts the closures that read host bytes without holding the lock around this counter. A thread that locks for
/// writing must not touch the bytes unless the count is 0.
#[derive(Debug, Default)]
pub(crate) struct ReaderCount(AtomicU32);

impl ReaderCount {
    pub(crate) const fn none() -> ReaderCount {
        ReaderCount(AtomicU32::new(0))
    }

    /// Adds a reader. Call this method while holding the lock, so that the next thread that locks for writing sees the reader.
    pub(super) fn add_reader(&self) {
        self.0.fetch_add(1, Relaxed);
    }

    /// Removes a reader. `Release` makes sure that a writer which sees the lower count runs after the reader's last use of the bytes.
    pub(super) fn remove_reader(&self) {
        self.0.fetch_sub(1, Ordering::Release);
    }

    pub(super) fn has_readers(&self) -> bool {
        self.0.load(Ordering::Acquire) > 0
    }
}

/// The time in which blocks' last uses are measured: the number of requests to allocators that spill, and of uses of saved tensors in
/// recorded steps. 0 before the first of them.
static USE_CLOCK: AtomicU32 = AtomicU32::new(0);

/// Starts the clock of blocks' uses, or advances it. Returns the new time.
pub(crate) fn advance_use_clock() -> u32 {
    USE_CLOCK.fetch_add(1, Relaxed).wrapping_add(1)
}

/// The current location of a block. Hold `lock` for reading to keep the block in place; hold it for writing to move the
/// block or to write host bytes.
#[repr(align(64))] // one cache line for each slot, because the next slot may be another thread's
pub(crate) struct Slot {
    pub(crate) lock: RwLock<ReaderCount>,
    segment: AtomicPtr<Segment>,
    offset: AtomicUsize,
    size: AtomicUsize,
    requested: AtomicUsize,
    exported: AtomicBool,
    /// True if a stream other than the block's own has used the block: freeing must wait for that stream too.
    pub(crate) used_by_other_stream: AtomicBool,
    /// The value of [`USE_CLOCK`] at the last use of the block's location; 0 if the block has not been used since it was handed out.
    last_used: AtomicU32,
}

impl Slot {
    pub(crate) const fn vacant() -> Slot {
        Slot {
            lock: RwLock::new(ReaderCount::none()),
            segment: AtomicPtr::new(std::ptr::null_mut()),
            offset: AtomicUsize::new(0),
            size: AtomicUsize::new(0),
            requested: AtomicUsize::new(0),
            exported: AtomicBool::new(false),
            used_by_other_stream: AtomicBool::new(false),
            last_used: AtomicU32::new(0),
        }
    }

    /// Records that the block is used now, if any allocator spills.
    #[inline(always)]
    pub(super) fn touch(&self) {
        let now = USE_CLOCK.load(Relaxed);
        if now != 0 {
            self.last_used.store(now, Relaxed);
        }
    }

    /// Returns how long ago the block was last used, in requests; `None` if the block has never been used.
    pub(super) fn age(&self) -> Option<u32> {
        let used = Some(self.last_used.load(Relaxed)).filter(|&used| used != 0)?;
        Some(USE_CLOCK.load(Relaxed).wrapping_sub(used))
    }

    /// Stores a new location in the slot.
    ///
    /// # Safety
    /// The segment outlives every [`Block`] with this slot. If such a block is already in use, `lock` is held for
    /// writing and the new location has the block's size and contents.
    #[inline]
    pub(crate) unsafe fn set_location(&self, segment: &Arc<Segment>, offset: usize) {
        self.segment.store(Arc::as_ptr(segment).cast_mut(), Relaxed);
        self.offset.store(offset, Relaxed);
    }

    #[inline]
    pub(crate) fn requested(&self) -> usize {
        self.requested.load(Relaxed)
    }

    /// True if the block must not move any more, because [`Block::export`] was called.
    pub(crate) fn is_exported(&self) -> bool {
        self.exported.load(Relaxed)
    }

    #[inline]
    fn reset(&self, size: usize, requested: usize) {
        self.exported.store(false, Relaxed);
        self.used_by_other_stream.store(false, Relaxed);
        self.last_used.store(0, Relaxed);
        self.size.store(size, Relaxed);
        self.requested.store(requested, Relaxed);
    }

    /// Locks the block for moving, or returns `None` if another thread holds its lock.
    pub(crate) fn try_lock_for_move(&self) -> Option<RwLockWriteGuard<'_, ReaderCount>> {
        let guard = match self.lock.try_write() {
            Ok(guard) => guard,
            Err(TryLockError::Poisoned(poison)) => poison.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        (!guard.has_readers()).then_some(guard)
    }
}

/// Returns a new allocator number, which an allocator stores in its blocks to recognise them (see `Block::owner`).
pub(super) fn next_owner_number() -> u32 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    NEXT.fetch_add(1, Relaxed)
}

/// A block handed out by an [`Allocator`](super::Allocator): the right to use the block's bytes until the block is returned.
///
/// [`Allocator::deallocate`](super::Allocator::deallocate) takes the block by value, so a block is returned once and
/// not used afterwards. A block that is dropped instead stays allocated for the rest of the process.
#[must_use = "a block that is dropped stays allocated: give it back with Allocator::deallocate"]
pub struct Block {
    slot: NonNull<Slot>,
    /// A copy of the slot's requested size: when a block is returned, its slot is often no longer in the processor's cache.
    requested: usize,
    /// The number of the allocator that made the block (see [`next_owner_number`]).
    pub(crate) owner: u32,
    /// The entry in the allocator's table, with the flags [`CACHEABLE_FLAG`] and [`OWN_SLOT_FLAG`].
    entry_and_flags: u32,
}

/// Flag in `Block::entry_and_flags`: thread caches may keep the block. The block's size is then the request rounded up.
pub(super) const CACHEABLE_FLAG: u32 = 1 << 31;
/// Flag in `Block::entry_and_flags`: the slot belongs to an [`OwnedSlot`], not to an allocator's table.
const OWN_SLOT_FLAG: u32 = 1 << 30;
/// Maximum number of entries in an allocator's table: larger entry numbers would overlap with the flags.
pub(super) const MAX_TABLE_ENTRIES: usize = OWN_SLOT_FLAG as usize;

/// A slot together with the owner of the block's bytes, for blocks that are in no allocator's table.
#[repr(C)] // a pointer to the first field is a pointer to the struct
struct OwnedSlot {
    slot: Slot,
    holder: BytesOwner,
}

/// The owner of a block's bytes: the bytes live as long as the owner.
enum BytesOwner {
    Segment(#[expect(dead_code, reason = "held")] Arc<Segment>),
    ParentBlock(Block),
}

// SAFETY: a block owns its bytes. Its slot consists of atomics and a lock, and lives until the block is returned.
unsafe impl Send for Block {}
// SAFETY: as above; a shared reference gives access only to what the slot's lock guards.
unsafe impl Sync for Block {}

impl Block {
    /// Makes a block of `size` bytes at `offset` in a segment, for users' own allocators. `requested` is the size of
    /// the request. The block keeps the segment alive.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the range is not inside the segment.
    ///
    /// # Safety
    /// The segment's memory has at least [`Segment::bytes`] bytes. No other live block overlaps the block, and no other
    /// code writes to the block's bytes while the block lives.
    pub unsafe fn new(segment: &Arc<Segment>, offset: usize, size: usize, requested: usize) -> Result<Block> {
        if requested > size || offset.checked_add(size).is_none_or(|end| end > segment.bytes()) {
            let all = segment.bytes();
            let range = format!("{requested} of {size} bytes at {offset} are not in a segment of {all}");
            return Err(Error::invalid("Block::new", range));
        }
        let slot = Slot::vacant();
        // SAFETY: the field `holder` keeps the segment alive as long as the block lives.
        unsafe { slot.set_location(segment, offset) };
        Ok(Block::with_own_slot(OwnedSlot { slot, holder: BytesOwner::Segment(Arc::clone(segment)) }, size, requested))
    }

    /// Makes a block with a slot of its own, in memory that the block owns.
    fn with_own_slot(own: OwnedSlot, size: usize, requested: usize) -> Block {
        own.slot.reset(size, requested);
        let own = NonNull::from(Box::leak(Box::new(own)));
        Block { slot: own.cast(), requested, owner: u32::MAX, entry_and_flags: OWN_SLOT_FLAG }
    }

    /// Returns the block's own slot and owner; `None` if its slot is in an allocator's table.
    fn own_slot(&self) -> Option<&OwnedSlot> {
        // SAFETY: the flag says that the slot is the first field of an OwnedSlot, which lives as long as the block.
        (self.entry_and_flags & OWN_SLOT_FLAG != 0).then(|| unsafe { self.slot.cast::<OwnedSlot>().as_ref() })
    }

    /// True if the block's slot is in an allocator's table, so that the block may move.
    pub(super) fn is_in_table(&self) -> bool {
        self.entry_and_flags & OWN_SLOT_FLAG == 0
    }

    /// Makes a block from the `size` bytes at `offset` in this block, for allocators that wrap others. The new block
    /// owns this block, which no longer moves; [`into_parent_block`](Block::into_parent_block) gives this block back.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the range is not inside this block; this block then stays allocated.
    pub(super) fn into_part(self, offset: usize, size: usize, requested: usize) -> Result<Block> {
        if requested > size || offset.checked_add(size).is_none_or(|end| end > self.size()) {
            let range = format!("{requested} of {size} bytes at {offset} are not in a block of {}", self.size());
            return Err(Error::invalid("Block::into_part", range));
        }
        self.export();
        let slot = Slot::vacant();
        // The segment outlives the parent block, which the new block owns.
        slot.segment.store(self.slot().segment.load(Relaxed), Relaxed);
        slot.offset.store(self.offset() + offset, Relaxed);
        Ok(Block::with_own_slot(OwnedSlot { slot, holder: BytesOwner::ParentBlock(self) }, size, requested))
    }

    pub(super) fn parent_block(&self) -> Option<&Block> {
        match &self.own_slot()?.holder {
            BytesOwner::ParentBlock(block) => Some(block),
            BytesOwner::Segment(_) => None,
        }
    }

    /// Like [`parent_block`](Block::parent_block), but consumes this block and returns the parent block by value.
    pub(super) fn into_parent_block(self) -> Option<Block> {
        let block = ManuallyDrop::new(self);
        if block.entry_and_flags & OWN_SLOT_FLAG == 0 {
            return None;
        }
        // SAFETY: the flag says that `with_own_slot` leaked this OwnedSlot. ManuallyDrop keeps the block's drop from freeing it too.
        match unsafe { Box::from_raw(block.slot.cast::<OwnedSlot>().as_ptr()) }.holder {
            BytesOwner::ParentBlock(whole) => Some(whole),
            BytesOwner::Segment(_) => None,
        }
    }

    /// Makes a block whose slot is in an allocator's table.
    ///
    /// # Safety
    /// The slot, and the segment it points to, live until the block is returned or the process ends. No other block has the slot.
    #[inline]
    pub(crate) unsafe fn with_table_slot(
        slot: NonNull<Slot>,
        owner: u32,
        entry_and_flags: u32,
        size: usize,
        requested: usize,
    ) -> Block {
        // SAFETY: the caller promises that the slot lives as long as the block.
        unsafe { slot.as_ref() }.reset(size, requested);
        Block { slot, requested, owner, entry_and_flags }
    }

    /// Returns the index of the block's entry in its allocator's table.
    #[inline]
    pub(crate) fn id(&self) -> u32 {
        self.entry_and_flags & !(CACHEABLE_FLAG | OWN_SLOT_FLAG)
    }

    /// True if thread caches may keep the block.
    #[inline]
    pub(super) fn is_cacheable(&self) -> bool {
        self.entry_and_flags & CACHEABLE_FLAG != 0
    }

    /// Returns the number of bytes that the block occupies: the request rounded up.
    pub fn size(&self) -> usize {
        self.slot().size.load(Relaxed)
    }

    /// Returns the number of bytes that were requested.
    pub fn requested(&self) -> usize {
        self.requested
    }

    /// Returns the block's location. The block does not move as long as the returned [`BlockLocation`] lives.
    ///
    /// A thread must hold at most one [`BlockLocation`] of a block: a second one would wait behind a thread that wants to write to the block,
    /// and that thread waits for the first. Printing a block with `{:?}` locks its location, too.
    #[inline]
    pub fn location(&self) -> BlockLocation<'_> {
        let guard = read(&self.slot().lock);
        self.slot().touch();
        BlockLocation { segment: self.segment(), offset: self.slot().offset.load(Relaxed), _guard: guard }
    }

    /// Keeps the block from ever moving again, because its memory was handed out by address or as a `cl_mem`.
    pub fn export(&self) {
        self.pin();
    }

    /// Keeps the block from moving until [`unpin`](Block::unpin). Returns whether the block could move before, for `unpin`.
    pub(super) fn pin(&self) -> bool {
        let _still = self.location(); // wait for a move in progress
        !self.slot().exported.swap(true, Relaxed)
    }

    /// Ends [`pin`](Block::pin). Takes the slot's lock, so that writes made without the lock before are visible to the thread that
    /// moves the block.
    pub(super) fn unpin(&self, could_move: bool) {
        let _still = self.location();
        if could_move {
            self.slot().exported.store(false, Relaxed);
        }
    }

    /// Logs an error and returns true if another allocator made the block. That allocator still counts the block, so this one must
    /// leave the block alone.
    #[inline]
    pub(super) fn is_foreign(&self, allocator: &dyn fmt::Debug, number: u32) -> bool {
        let foreign = self.owner != number;
        if foreign {
            self.log_foreign(allocator);
        }
        foreign
    }

    #[cold]
    fn log_foreign(&self, allocator: &dyn fmt::Debug) {
        tracing::error!(?allocator, block = ?self, "a block was returned to an allocator that did not make it");
    }

    /// Like [`export`](Block::export). Returns the segment, so that parts of the block can be handed out as blocks.
    pub(crate) fn export_segment(&self) -> Arc<Segment> {
        self.export();
        let _held = self.location();
        // Uses the pointer that came from the Arc itself, because a pointer derived from a reference may not access the Arc's count.
        let segment = self.slot().segment.load(Relaxed).cast_const();
        // SAFETY: `set_location` took the pointer from an Arc, which the block's maker keeps as long as the block
        // lives. While `_held` lives, the block does not move. The new Arc takes over the count added here.
        unsafe {
            Arc::increment_strong_count(segment);
            Arc::from_raw(segment)
        }
    }

    #[inline]
    pub(crate) fn slot(&self) -> &Slot {
        // SAFETY: the code that made the block promised that the slot lives as long as the block.
        unsafe { self.slot.as_ref() }
    }

    #[inline]
    pub(crate) fn slot_ptr(&self) -> NonNull<Slot> {
        self.slot
    }

    /// Returns the segment. Valid while the slot's lock is held, or if no block can be moved meanwhile.
    pub(crate) fn segment(&self) -> &Segment {
        // SAFETY: `set_location` was called before the block was made, and the caller of `set_location` promised that the segment
        // outlives the block.
        unsafe { &*self.slot().segment.load(Relaxed) }
    }

    /// Returns the byte offset in the segment. Valid while the slot's lock is held.
    pub(crate) fn offset(&self) -> usize {
        self.slot().offset.load(Relaxed)
    }
}

impl Drop for Block {
    #[inline]
    fn drop(&mut self) {
        if self.entry_and_flags & OWN_SLOT_FLAG != 0 {
            // SAFETY: the flag says that the slot is in the OwnedSlot that `with_own_slot` leaked, and only this drop frees it.
            drop(unsafe { Box::from_raw(self.slot.cast::<OwnedSlot>().as_ptr()) });
        }
    }
}

impl fmt::Debug for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let location = self.location();
        write!(f, "{} bytes at segment {} + {}", self.size(), location.segment.id(), location.offset)
    }
}

/// A block's location: its segment and offset. While the value lives, the block does not move.
pub struct BlockLocation<'a> {
    segment: &'a Segment,
    offset: usize,
    _guard: RwLockReadGuard<'a, ReaderCount>,
}

impl BlockLocation<'_> {
    /// Returns the block's segment. Once this `BlockLocation` is dropped, the block may move, and the segment may be released.
    pub fn segment(&self) -> &Segment {
        self.segment
    }

    /// Returns the byte offset of the block in its segment.
    pub fn offset(&self) -> usize {
        self.offset
    }
}

impl Sim {
    /// Enqueues work that writes this tag to a block's bytes.
    ///
    /// # Errors
    /// If the block does not belong to this device, or if the device commits memory lazily and has no memory left for the block.
    pub fn write_tag(&self, stream: StreamId, block: &Block, tag: u32) -> Result<()> {
        let location = block.location();
        self.write_tag_at(stream, (location.segment().memory(), location.offset()), block.size(), tag)
    }

    /// Enqueues work that checks that a block's bytes have this tag.
    ///
    /// # Errors
    /// The errors of [`write_tag`](Sim::write_tag). Wrong tags are reported in [`violations`](Sim::violations).
    pub fn check_tag(&self, stream: StreamId, block: &Block, tag: u32) -> Result<()> {
        let location = block.location();
        self.check_tag_at(stream, (location.segment().memory(), location.offset()), block.size(), tag)
    }
}

//! Entries of the block table.

/// The entry number that means no block: the first entry of the table, which is always vacant.
pub(super) const NONE: u32 = 0;
/// The number that means no segment, or no pool.
pub(super) const NOWHERE: u32 = u32::MAX;
/// The pool of blocks kept on the host. No request searches this pool.
pub(super) const SPILLED_POOL: u32 = NOWHERE - 1;

/// The unit, in bytes, of the offsets and sizes in entries. With this unit, two entries fit in one cache line.
pub(super) const UNIT: usize = 512;
/// The largest segment, in bytes, that entries can describe: 2 TiB.
pub(super) const MAX_SEGMENT_BYTES: u64 = (u32::MAX as u64) * UNIT as u64;

/// The state of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Use {
    /// Unused, and in the bins of its arena.
    Free,
    /// Allocated, or waiting in a thread cache.
    Live,
    /// Freed, but a stream may still be using it.
    Pending,
    /// Unused, but not in the bins, because its segment is being compacted.
    Frozen,
    /// A hole without memory in a segment that grows in place.
    Unmapped,
    /// A vacant table entry.
    Vacant,
}

/// The table entry of a block: a contiguous range of bytes of one segment.
#[derive(Debug, Clone, Copy)]
#[repr(align(32))]
pub(super) struct Entry {
    pub(super) segment: u32,
    pub(super) prev: u32,
    pub(super) next: u32,
    pub(super) bin_prev: u32,
    pub(super) bin_next: u32,
    /// The block's [`Use`] in the upper 3 bits, and its arena number in the lower 29.
    state: u32,
    start: u32,
    units: u32,
}

/// Number of bits of the arena number in `Entry::state`.
const ARENA_BITS: u32 = 29;
const ARENA_MASK: u32 = (1 << ARENA_BITS) - 1;

impl Entry {
    pub(super) const VACANT: Entry = Entry {
        segment: NOWHERE,
        prev: NONE,
        next: NONE,
        bin_prev: NONE,
        bin_next: NONE,
        state: (Use::Vacant as u32) << ARENA_BITS,
        start: 0,
        units: 0,
    };

    /// Creates the entry of a block that has no neighbours yet.
    pub(super) fn new(segment: u32, arena: u32, usage: Use, offset: usize, size: usize) -> Entry {
        let (start, units) = ((offset / UNIT) as u32, (size / UNIT) as u32);
        Entry { segment, state: (usage as u32) << ARENA_BITS | arena, start, units, ..Entry::VACANT }
    }

    #[inline(always)]
    pub(super) fn arena(&self) -> u32 {
        self.state & ARENA_MASK
    }

    #[inline(always)]
    pub(super) fn set_arena(&mut self, arena: u32) {
        self.state = self.state & !ARENA_MASK | arena;
    }

    pub(super) fn usage(&self) -> Use {
        const USES: [Use; 6] = [Use::Free, Use::Live, Use::Pending, Use::Frozen, Use::Unmapped, Use::Vacant];
        USES[(self.state >> ARENA_BITS) as usize]
    }

    #[inline(always)]
    pub(super) fn set_usage(&mut self, usage: Use) {
        self.state = self.arena() | (usage as u32) << ARENA_BITS;
    }

    /// True if the block is free and belongs to this arena.
    #[inline(always)]
    pub(super) fn is_free_in(&self, arena: u32) -> bool {
        self.state == (Use::Free as u32) << ARENA_BITS | arena
    }

    /// Returns the block's offset in the segment, in bytes.
    #[inline(always)]
    pub(super) fn offset(&self) -> usize {
        self.start as usize * UNIT
    }

    pub(super) fn set_offset(&mut self, offset: usize) {
        self.start = (offset / UNIT) as u32;
    }

    /// Returns the block's size in bytes.
    #[inline(always)]
    pub(super) fn size(&self) -> usize {
        self.units as usize * UNIT
    }

    /// True if the block overlaps these bytes of its segment.
    pub(super) fn overlaps(&self, range: &std::ops::Range<usize>) -> bool {
        self.offset() < range.end && range.start < self.offset() + self.size()
    }

    /// Returns the block's size in [`UNIT`]s.
    #[inline(always)]
    pub(super) fn units(&self) -> u32 {
        self.units
    }

    /// True if the block covers its whole segment.
    #[inline(always)]
    pub(super) fn covers_segment(&self) -> bool {
        self.prev | self.next == NONE
    }
}

/// Splits a block after `size` bytes. The second part becomes entry `rest`: free, but in no bin.
#[inline(always)]
pub(super) fn split_entry(table: &mut [Entry], id: u32, size: usize, rest: u32) {
    let units = (size / UNIT) as u32;
    let first = &mut table[id as usize];
    let mut second = Entry { start: first.start + units, units: first.units - units, prev: id, ..*first };
    second.set_usage(Use::Free);
    (first.next, first.units) = (rest, units);
    table[second.next as usize].prev = rest;
    table[rest as usize] = second;
}

/// Merges a block with the block behind it, whose entry becomes vacant. Returns the next block's size in bytes.
#[inline(always)]
pub(super) fn merge_with_next(table: &mut [Entry], id: u32, gone: u32) -> usize {
    let after = &mut table[gone as usize];
    let (size, units, next) = (after.size(), after.units, after.next);
    after.set_usage(Use::Vacant);
    let block = &mut table[id as usize];
    block.units += units;
    block.next = next;
    table[next as usize].prev = id;
    size
}

#[inline(always)]
pub(super) fn prefetch(table: &[Entry], id: u32) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: every x86-64 processor has the instruction. A prefetch is a hint that cannot fault at any address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(table.as_ptr().wrapping_add(id as usize).cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = (table, id);
}

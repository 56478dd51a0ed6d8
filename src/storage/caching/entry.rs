//! The entries of the table of blocks.

/// No block: the first entry of the table, which is vacant for good.
pub(super) const NONE: u32 = 0;
/// No segment, no pool.
pub(super) const NOWHERE: u32 = u32::MAX;
/// The pool of blocks that are kept on the host: no request searches it.
pub(super) const SPILLED: u32 = NOWHERE - 1;

/// Blocks begin at multiples of this many bytes, and have multiples of it: entries count in it, so that two of them are
/// one line of a cache.
pub(super) const UNIT: usize = 512;
/// No segment that entries can describe is longer: 2 TiB.
pub(super) const LONGEST: u64 = (u32::MAX as u64) * UNIT as u64;

/// What a block is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub(super) enum Use {
    /// Nothing: it is in its arena's bins.
    Free,
    /// Handed out (or waiting in a thread's cache to be handed out again).
    Live,
    /// Given back, but a stream may still be using it.
    Pending,
    /// Nothing, but out of the bins: its segment is being compacted.
    Held,
    /// Nothing, without memory: a hole in a segment that grows in place.
    Unmapped,
    /// Not a block: a vacant place in the table.
    Vacant,
}

/// A block: a run of bytes of one segment.
#[derive(Debug, Clone, Copy)]
#[repr(align(32))]
pub(super) struct Entry {
    pub(super) segment: u32,
    pub(super) prev: u32,
    pub(super) next: u32,
    pub(super) bin_prev: u32,
    pub(super) bin_next: u32,
    /// What it does, above the number of its arena.
    state: u32,
    start: u32,
    units: u32,
}

/// Bits of the number of an arena.
const ARENA_BITS: u32 = 29;
const ARENA: u32 = (1 << ARENA_BITS) - 1;

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

    /// A block that has no neighbours yet.
    pub(super) fn new(segment: u32, arena: u32, usage: Use, offset: usize, size: usize) -> Entry {
        let (start, units) = ((offset / UNIT) as u32, (size / UNIT) as u32);
        Entry { segment, state: (usage as u32) << ARENA_BITS | arena, start, units, ..Entry::VACANT }
    }

    #[inline(always)]
    pub(super) fn arena(&self) -> u32 {
        self.state & ARENA
    }

    #[inline(always)]
    pub(super) fn set_arena(&mut self, arena: u32) {
        self.state = self.state & !ARENA | arena;
    }

    pub(super) fn usage(&self) -> Use {
        const USES: [Use; 6] = [Use::Free, Use::Live, Use::Pending, Use::Held, Use::Unmapped, Use::Vacant];
        USES[(self.state >> ARENA_BITS) as usize]
    }

    #[inline(always)]
    pub(super) fn set_usage(&mut self, usage: Use) {
        self.state = self.arena() | (usage as u32) << ARENA_BITS;
    }

    /// Whether it is free in the bins of this arena.
    #[inline(always)]
    pub(super) fn is_free_in(&self, arena: u32) -> bool {
        self.state == (Use::Free as u32) << ARENA_BITS | arena
    }

    /// Its first byte in the segment.
    #[inline(always)]
    pub(super) fn offset(&self) -> usize {
        self.start as usize * UNIT
    }

    pub(super) fn set_offset(&mut self, offset: usize) {
        self.start = (offset / UNIT) as u32;
    }

    /// Its bytes.
    #[inline(always)]
    pub(super) fn size(&self) -> usize {
        self.units as usize * UNIT
    }

    /// Its size in [`UNIT`]s.
    #[inline(always)]
    pub(super) fn units(&self) -> u32 {
        self.units
    }

    /// Whether the block is all of its segment.
    #[inline(always)]
    pub(super) fn is_whole(&self) -> bool {
        self.prev | self.next == NONE
    }
}

/// Cuts a block after `size` bytes: the second part is `rest`, and free, but in no bin.
#[inline(always)]
pub(super) fn cut(table: &mut [Entry], id: u32, size: usize, rest: u32) {
    let units = (size / UNIT) as u32;
    let first = &mut table[id as usize];
    let mut second = Entry { start: first.start + units, units: first.units - units, prev: id, ..*first };
    second.set_usage(Use::Free);
    (first.next, first.units) = (rest, units);
    table[second.next as usize].prev = rest;
    table[rest as usize] = second;
}

/// Joins a block with the one after it, whose entry is vacant then. Gives that one's size.
#[inline(always)]
pub(super) fn absorb(table: &mut [Entry], id: u32, gone: u32) -> usize {
    let after = &mut table[gone as usize];
    let (size, units, next) = (after.size(), after.units, after.next);
    after.set_usage(Use::Vacant);
    let block = &mut table[id as usize];
    block.units += units;
    block.next = next;
    table[next as usize].prev = id;
    size
}

/// Asks for an entry's line of the cache, before it is needed.
#[inline(always)]
pub(super) fn prefetch(table: &[Entry], id: u32) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: every x86-64 has the instruction; it is a hint, and touches nothing whatever the address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(table.as_ptr().wrapping_add(id as usize).cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = (table, id);
}

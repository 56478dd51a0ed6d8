//! The entries of the table of blocks.

/// No block: the first entry of the table, which is vacant for good.
pub(super) const NONE: u32 = 0;
/// No segment, no arena, no pool.
pub(super) const NOWHERE: u32 = u32::MAX;

/// What a block is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
pub(super) struct Entry {
    pub(super) segment: u32,
    pub(super) arena: u32,
    pub(super) prev: u32,
    pub(super) next: u32,
    pub(super) bin_prev: u32,
    pub(super) bin_next: u32,
    pub(super) offset: usize,
    pub(super) size: usize,
    pub(super) usage: Use,
}

impl Entry {
    pub(super) const VACANT: Entry = Entry {
        segment: NOWHERE,
        arena: NOWHERE,
        prev: NONE,
        next: NONE,
        bin_prev: NONE,
        bin_next: NONE,
        offset: 0,
        size: 0,
        usage: Use::Vacant,
    };

    /// Whether the block is all of its segment.
    pub(super) fn is_whole(&self) -> bool {
        self.prev == NONE && self.next == NONE
    }
}

/// Cuts a block after `size` bytes: the second part is `rest`, and free, but in no bin.
#[inline(always)]
pub(super) fn cut(table: &mut [Entry], id: u32, size: usize, rest: u32) {
    let first = &mut table[id as usize];
    let second = Entry { offset: first.offset + size, size: first.size - size, prev: id, usage: Use::Free, ..*first };
    (first.next, first.size) = (rest, size);
    table[second.next as usize].prev = rest;
    table[rest as usize] = second;
}

/// Joins a block with the one after it, whose entry is vacant then. Gives that one's size.
#[inline(always)]
pub(super) fn absorb(table: &mut [Entry], id: u32, gone: u32) -> usize {
    let after = &mut table[gone as usize];
    let (size, next) = (after.size, after.next);
    after.usage = Use::Vacant;
    let block = &mut table[id as usize];
    block.size += size;
    block.next = next;
    table[next as usize].prev = id;
    size
}

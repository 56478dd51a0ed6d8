//! Free lists by size class, with constant-time search.
//!
//! Two-level segregated fit (Masmano et al., "TLSF", 2004): each power of two is divided into 32 size classes, so a
//! class spans at most 3 % of its size. Two levels of bitmaps mark non-empty classes, and two bit scans find the
//! first non-empty class. The blocks of a class form a doubly linked list through the table of entries.

use std::hint::select_unpredictable;

use super::entry::{Entry, NONE, UNIT};

/// log2 of the number of size classes per power of two.
const CLASSES_PER_LEVEL_LOG2: u32 = 5;
/// Number of size classes per power of two.
const CLASSES_PER_LEVEL: usize = 1 << CLASSES_PER_LEVEL_LOG2;
/// Number of levels, one per power of two from 2^5 units on; level 0 has a class for each smaller size. A multiple of what sizes
/// need, so that indices need no bounds check.
const LEVELS: usize = 32;
/// Total number of size classes.
const CLASSES: usize = LEVELS * CLASSES_PER_LEVEL;

/// The free lists of one arena, for either the blocks that cover a whole segment or the blocks that are part of one.
///
/// Lists end at entry [`NONE`], which is never a real block, so writes to it are harmless. List operations therefore
/// need no branch on whether a neighbour exists, and the processor would mispredict such a branch half of the time.
#[derive(Debug)]
pub(super) struct Bins {
    level_bits: u32,
    /// Bitmap of non-empty classes per level. The last word stays 0, so that a search that finds no level finds no class either.
    class_bits: [u32; LEVELS + 1],
    /// First block of each class. Allocated lazily, because most arenas never have a block.
    heads: Option<Box<[u32; CLASSES]>>,
}

/// Maps a size in units to its class: 32 times the level, plus the position within the level.
#[inline(always)]
fn class(units: u32) -> usize {
    let shift = (units | CLASSES_PER_LEVEL as u32).ilog2() - CLASSES_PER_LEVEL_LOG2;
    (((shift as usize) << CLASSES_PER_LEVEL_LOG2) + (units >> shift) as usize) % CLASSES // `%` changes nothing, but saves bounds checks
}

impl Bins {
    pub(super) fn new() -> Bins {
        Bins { level_bits: 0, class_bits: [0; LEVELS + 1], heads: None }
    }

    #[inline(always)]
    pub(super) fn is_empty(&self) -> bool {
        self.level_bits == 0
    }

    /// Maps a size in bytes to its class.
    #[inline(always)]
    pub(super) fn class_of(size: usize) -> usize {
        class((size / UNIT) as u32)
    }

    /// Adds a free block.
    #[inline(always)]
    pub(super) fn insert(&mut self, table: &mut [Entry], id: u32) {
        let heads = self.heads.get_or_insert_with(empty_lists);
        let entry = &mut table[id as usize];
        let class = class(entry.units());
        let next = std::mem::replace(&mut heads[class], id);
        (entry.bin_prev, entry.bin_next) = (NONE, next);
        table[next as usize].bin_prev = id;
        self.class_bits[class / CLASSES_PER_LEVEL] |= 1 << (class % CLASSES_PER_LEVEL);
        self.level_bits |= 1 << (class / CLASSES_PER_LEVEL);
    }

    /// Removes a block, which must be in these bins.
    #[inline(always)]
    pub(super) fn remove(&mut self, table: &mut [Entry], id: u32) {
        let Some(heads) = &mut self.heads else { return };
        let Entry { bin_prev, bin_next, .. } = table[id as usize];
        let class = class(table[id as usize].units());
        table[bin_next as usize].bin_prev = bin_prev;
        table[bin_prev as usize].bin_next = bin_next;
        let head = &mut heads[class];
        debug_assert_eq!(bin_prev == NONE, *head == id, "a block without a predecessor is its class's first");
        *head = if bin_prev == NONE { bin_next } else { *head };
        let sub = &mut self.class_bits[class / CLASSES_PER_LEVEL];
        *sub &= !(u32::from(*head == NONE) << (class % CLASSES_PER_LEVEL));
        self.level_bits &= !(u32::from(*sub == 0) << (class / CLASSES_PER_LEVEL));
    }

    /// Finds a block of at least `size` bytes in constant time, and returns the block and its class. Checks the first
    /// block of the request's own `class`, then takes the first block of the next non-empty class.
    #[inline(always)]
    pub(super) fn find_good_fit(&self, table: &[Entry], size: usize, class: usize) -> Option<(u32, usize)> {
        let heads = self.heads.as_deref()?;
        let first = heads[class % CLASSES];
        if table[first as usize].size() >= size {
            return Some((first, class));
        }
        let class = self.next_nonempty_class(class)?;
        Some((heads[class % CLASSES], class))
    }

    /// Finds the smallest block of at least `size` bytes, and returns the block and its class. May scan all blocks of a class.
    pub(super) fn find_best_fit(&self, table: &[Entry], size: usize) -> Option<(u32, usize)> {
        let mut class = Bins::class_of(size);
        loop {
            let best = self.class_blocks(table, class).filter(|&id| table[id as usize].size() >= size);
            if let Some(id) = best.min_by_key(|&id| table[id as usize].size()) {
                return Some((id, class));
            }
            class = self.next_nonempty_class(class)?;
        }
    }

    /// Iterates over all blocks in arbitrary order.
    pub(super) fn blocks<'a>(&'a self, table: &'a [Entry]) -> impl Iterator<Item = u32> + 'a {
        let classes = std::iter::successors(self.next_nonempty_class(0), |&class| self.next_nonempty_class(class));
        classes.flat_map(|class| self.class_blocks(table, class))
    }

    /// Returns the size of the largest block in bytes, or 0 if there is none.
    pub(super) fn largest(&self, table: &[Entry]) -> usize {
        if self.is_empty() {
            return 0;
        }
        let level = self.level_bits.ilog2() as usize;
        let class = level * CLASSES_PER_LEVEL + self.class_bits[level].ilog2() as usize;
        self.class_blocks(table, class).map(|id| table[id as usize].size()).max().unwrap_or(0)
    }

    fn class_blocks<'a>(&'a self, table: &'a [Entry], class: usize) -> impl Iterator<Item = u32> + 'a {
        let first = self.heads.as_ref().map(|heads| heads[class % CLASSES]).filter(|&id| id != NONE);
        std::iter::successors(first, |&id| Some(table[id as usize].bin_next).filter(|&next| next != NONE))
    }

    /// Finds the first non-empty class after `class`.
    #[inline(always)]
    fn next_nonempty_class(&self, class: usize) -> Option<usize> {
        let level = class / CLASSES_PER_LEVEL;
        let here = self.class_bits[level % LEVELS] & (!1u32 << (class % CLASSES_PER_LEVEL));
        let above = (self.level_bits & (!1u32 << level)).trailing_zeros() as usize; // equals `LEVELS` if there is none
        let level = select_unpredictable(here != 0, level, above);
        let class_bits = select_unpredictable(here != 0, here, self.class_bits[above]);
        (class_bits != 0).then(|| level * CLASSES_PER_LEVEL + class_bits.trailing_zeros() as usize)
    }
}

#[cold]
fn empty_lists() -> Box<[u32; CLASSES]> {
    Box::new([NONE; CLASSES])
}

#[cfg(test)]
mod tests {
    use super::super::entry::{MAX_SEGMENT_BYTES, Use};
    use super::*;

    #[test]
    fn classes_grow_with_sizes_and_span_at_most_a_32nd() {
        let mut last = class(1);
        let mut first_of_class = 1;
        for units in 2..if cfg!(miri) { 2000 } else { 100_000u32 } {
            let here = class(units);
            assert!(here >= last, "{units}");
            if here != last {
                (last, first_of_class) = (here, units);
            }
            assert!(units - first_of_class <= first_of_class / 32);
        }
        assert!(class(u32::MAX) < CLASSES);
    }

    #[test]
    fn searches_return_fitting_blocks() {
        let entry = |units: usize| Entry::new(0, 0, Use::Free, 0, units * UNIT);
        let mut table: Vec<Entry> = [0, 640, 64, 130, 128, 129, 1 << 20].map(entry).into();
        let mut bins = Bins::new();
        (1..7).for_each(|id| bins.insert(&mut table, id));
        // Sizes 128 to 131 share a class; the quick search checks only the block inserted last into this class, 129.
        for (units, quick, best) in
            [(1, 64, 64), (65, 129, 128), (129, 129, 129), (130, 640, 130), (131, 640, 640), (641, 1 << 20, 1 << 20)]
        {
            let (quickly, _) = bins.find_good_fit(&table, units * UNIT, class(units as u32)).unwrap();
            assert_eq!(table[quickly as usize].units(), quick, "{units}");
            assert_eq!(table[bins.find_best_fit(&table, units * UNIT).unwrap().0 as usize].units(), best, "{units}");
        }
        assert_eq!(bins.find_good_fit(&table, ((1 << 20) + 1) * UNIT, class((1 << 20) + 1)), None);
        assert_eq!(bins.largest(&table), UNIT << 20);
        for id in [4, 1, 6, 2, 5, 3] {
            bins.remove(&mut table, id);
            assert!(bins.blocks(&table).all(|other| other != id));
        }
        assert_eq!(bins.find_best_fit(&table, MAX_SEGMENT_BYTES as usize), None);
        assert!(bins.is_empty() && bins.find_good_fit(&table, UNIT, class(1)).is_none());
    }
}

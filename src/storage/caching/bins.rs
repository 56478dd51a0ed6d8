//! Free blocks by size, found in constant time.
//!
//! A two-level segregated fit (Masmano et al., "TLSF", 2004): every power of two of sizes is divided into 32 classes, so
//! a class spans at most 3 % of its size. Two levels of bits say which classes have blocks; two bit scans find the first
//! that has. Blocks of a class are a doubly linked list through the table of blocks.

use super::heap::{Entry, NONE};

/// Classes a power of two.
const SUB_BITS: u32 = 5;
const SUBS: usize = 1 << SUB_BITS;
/// Powers of two from 2^5 units on, and the exact sizes below.
const LEVELS: usize = 48;

/// The free blocks of one kind.
#[derive(Debug)]
pub(super) struct Bins {
    /// Sizes are counted in units of 2^shift bytes: the alignment of blocks.
    shift: u32,
    levels: u64,
    subs: [u32; LEVELS],
    heads: Box<[u32]>,
}

/// The class of a size in units, as (level, sub).
#[inline]
fn class(units: u64) -> (usize, usize) {
    if units < SUBS as u64 {
        return (0, units as usize);
    }
    let level = units.ilog2() - SUB_BITS;
    (level as usize + 1, (units >> level) as usize & (SUBS - 1))
}

impl Bins {
    /// No blocks; `shift` is the logarithm of the alignment.
    pub(super) fn new(shift: u32) -> Bins {
        Bins { shift, levels: 0, subs: [0; LEVELS], heads: Box::default() }
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.levels == 0
    }

    /// The class of a size in bytes.
    #[inline]
    pub(super) fn class_of(&self, size: usize) -> (usize, usize) {
        class((size >> self.shift) as u64)
    }

    /// Adds a block.
    #[inline]
    pub(super) fn insert(&mut self, table: &mut [Entry], id: u32) {
        if self.heads.is_empty() {
            self.heads = vec![NONE; LEVELS * SUBS].into_boxed_slice(); // most kinds never have a block
        }
        let (level, sub) = class((table[id as usize].size >> self.shift) as u64);
        let head = &mut self.heads[level * SUBS + sub];
        let entry = &mut table[id as usize];
        (entry.bin_prev, entry.bin_next) = (NONE, *head);
        if *head != NONE {
            table[*head as usize].bin_prev = id;
        }
        *head = id;
        self.subs[level] |= 1 << sub;
        self.levels |= 1 << level;
    }

    /// Takes out a block that is in.
    #[inline]
    pub(super) fn remove(&mut self, table: &mut [Entry], id: u32) {
        let Entry { bin_prev, bin_next, size, .. } = table[id as usize];
        if bin_next != NONE {
            table[bin_next as usize].bin_prev = bin_prev;
        }
        if bin_prev != NONE {
            table[bin_prev as usize].bin_next = bin_next;
            return;
        }
        let (level, sub) = class((size >> self.shift) as u64);
        debug_assert_eq!(self.heads[level * SUBS + sub], id, "a block without a predecessor is its class's first");
        self.heads[level * SUBS + sub] = bin_next;
        if bin_next == NONE {
            self.subs[level] &= !(1 << sub);
            if self.subs[level] == 0 {
                self.levels &= !(1 << level);
            }
        }
    }

    /// A block of at least `size` bytes: the first of the request's own class if it is large enough, else the first of
    /// the next class that has any.
    #[inline]
    pub(super) fn find(&self, table: &[Entry], size: usize) -> Option<u32> {
        if self.is_empty() {
            return None;
        }
        let (level, sub) = class((size >> self.shift) as u64);
        self.first_of(table, level, sub, size).or_else(|| {
            let (level, sub) = self.first_after(level, sub)?;
            self.first_of(table, level, sub, size)
        })
    }

    /// The smallest block of at least `size` bytes, however long it takes.
    pub(super) fn find_best(&self, table: &[Entry], size: usize) -> Option<u32> {
        let (mut level, mut sub) = class((size >> self.shift) as u64);
        loop {
            let best = self.class_blocks(table, level, sub).filter(|&id| table[id as usize].size >= size);
            if let Some(id) = best.min_by_key(|&id| table[id as usize].size) {
                return Some(id);
            }
            (level, sub) = self.first_after(level, sub)?;
        }
    }

    /// Every block, in no order that matters.
    pub(super) fn blocks<'a>(&'a self, table: &'a [Entry]) -> impl Iterator<Item = u32> + 'a {
        (0..self.heads.len()).flat_map(|at| self.class_blocks(table, at / SUBS, at % SUBS))
    }

    /// The largest block's size; 0 where there is none.
    pub(super) fn largest(&self, table: &[Entry]) -> usize {
        if self.is_empty() {
            return 0;
        }
        let level = self.levels.ilog2() as usize;
        let sub = self.subs[level].ilog2() as usize;
        self.class_blocks(table, level, sub).map(|id| table[id as usize].size).max().unwrap_or(0)
    }

    fn class_blocks<'a>(&'a self, table: &'a [Entry], level: usize, sub: usize) -> impl Iterator<Item = u32> + 'a {
        let first = self.heads.get(level * SUBS + sub).copied().filter(|&id| id != NONE);
        std::iter::successors(first, |&id| Some(table[id as usize].bin_next).filter(|&next| next != NONE))
    }

    #[inline]
    fn first_of(&self, table: &[Entry], level: usize, sub: usize, size: usize) -> Option<u32> {
        let id = self.heads[level * SUBS + sub];
        table.get(id as usize).is_some_and(|entry| entry.size >= size).then_some(id)
    }

    /// The first class after this one that has blocks.
    #[inline]
    fn first_after(&self, level: usize, sub: usize) -> Option<(usize, usize)> {
        let here = self.subs[level] & (!1u32 << sub);
        if here != 0 {
            return Some((level, here.trailing_zeros() as usize));
        }
        let above = self.levels & (!1u64 << level);
        if above == 0 {
            return None;
        }
        let level = above.trailing_zeros() as usize;
        Some((level, self.subs[level].trailing_zeros() as usize))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_grow_with_sizes_and_span_at_most_a_32nd() {
        let mut last = class(1);
        let mut first_of_class = 1u64;
        for units in 2..if cfg!(miri) { 2000 } else { 100_000u64 } {
            let here = class(units);
            assert!(here >= last, "{units}");
            if here != last {
                (last, first_of_class) = (here, units);
            }
            assert!(units - first_of_class <= first_of_class / 32);
        }
        assert!(class((1 << 51) - 1).0 < LEVELS);
    }

    #[test]
    fn what_fits_is_found() {
        let mut table: Vec<Entry> =
            [640, 64, 130, 128, 129, 1 << 20].map(|size| Entry { size, ..Entry::VACANT }).into();
        let mut bins = Bins::new(0);
        (0..6).for_each(|id| bins.insert(&mut table, id));
        // 128 to 131 are one class, of which the last that came in, 129, is looked at.
        for (size, quick, best) in
            [(1, 64, 64), (65, 129, 128), (129, 129, 129), (130, 640, 130), (131, 640, 640), (641, 1 << 20, 1 << 20)]
        {
            assert_eq!(table[bins.find(&table, size).unwrap() as usize].size, quick, "{size}");
            assert_eq!(table[bins.find_best(&table, size).unwrap() as usize].size, best, "{size}");
        }
        assert_eq!((bins.find(&table, (1 << 20) + 1), bins.largest(&table)), (None, 1 << 20));
        for id in [3, 0, 5, 1, 4, 2] {
            bins.remove(&mut table, id);
            assert!(bins.blocks(&table).all(|other| other != id));
        }
        assert!(bins.is_empty() && bins.find(&table, 1).is_none());
    }
}

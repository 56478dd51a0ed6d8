//! Free blocks by size, found in constant time.
//!
//! A two-level segregated fit (Masmano et al., "TLSF", 2004): every power of two of sizes is divided into 32 classes, so
//! a class spans at most 3 % of its size. Two levels of bits say which classes have blocks; two bit scans find the first
//! that has. Blocks of a class are a doubly linked list through the table of blocks.

use std::hint::select_unpredictable;

use super::entry::{Entry, NONE, UNIT};

/// Classes a power of two.
const SUB_BITS: u32 = 5;
const SUBS: usize = 1 << SUB_BITS;
/// Powers of two from 2^5 units on, and the exact sizes below: more than there are, so that indices need no check.
const LEVELS: usize = 32;
const CLASSES: usize = LEVELS * SUBS;

/// The free blocks of one kind.
///
/// Lists end at [`NONE`], an entry that is nobody's: what is written to it is lost, and no list operation needs to ask
/// whether there is a neighbour. Branches on that would be guessed wrong half of the time.
#[derive(Debug)]
pub(super) struct Bins {
    levels: u32,
    /// The last one stays 0: it is what a search finds that finds no level.
    subs: [u32; LEVELS + 1],
    /// Most kinds never have a block.
    heads: Option<Box<[u32; CLASSES]>>,
}

/// The class of a size in units: 32 times its level and its place there.
#[inline(always)]
fn class(units: u32) -> usize {
    let shift = (units | SUBS as u32).ilog2() - SUB_BITS;
    (((shift as usize) << SUB_BITS) + (units >> shift) as usize) % CLASSES // as it is: now the compiler knows, too
}

impl Bins {
    /// No blocks.
    pub(super) fn new() -> Bins {
        Bins { levels: 0, subs: [0; LEVELS + 1], heads: None }
    }

    #[inline(always)]
    pub(super) fn is_empty(&self) -> bool {
        self.levels == 0
    }

    /// The class of a size in bytes.
    #[inline(always)]
    pub(super) fn class_of(size: usize) -> usize {
        class((size / UNIT) as u32)
    }

    /// Adds a block.
    #[inline(always)]
    pub(super) fn insert(&mut self, table: &mut [Entry], id: u32) {
        let heads = self.heads.get_or_insert_with(no_heads);
        let entry = &mut table[id as usize];
        let class = class(entry.units());
        let next = std::mem::replace(&mut heads[class], id);
        (entry.bin_prev, entry.bin_next) = (NONE, next);
        table[next as usize].bin_prev = id;
        self.subs[class / SUBS] |= 1 << (class % SUBS);
        self.levels |= 1 << (class / SUBS);
    }

    /// Takes out a block that is in.
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
        let sub = &mut self.subs[class / SUBS];
        *sub &= !(u32::from(*head == NONE) << (class % SUBS));
        self.levels &= !(u32::from(*sub == 0) << (class / SUBS));
    }

    /// A block of at least `size` bytes, and its class: the first of the request's own `class` if it is large enough, else
    /// the first of the next class that has any.
    #[inline(always)]
    pub(super) fn find(&self, table: &[Entry], size: usize, class: usize) -> Option<(u32, usize)> {
        let heads = self.heads.as_deref()?;
        let first = heads[class % CLASSES];
        if table[first as usize].size() >= size {
            return Some((first, class));
        }
        let class = self.first_after(class)?;
        Some((heads[class % CLASSES], class))
    }

    /// The smallest block of at least `size` bytes, however long it takes, and its class.
    pub(super) fn find_best(&self, table: &[Entry], size: usize) -> Option<(u32, usize)> {
        let mut class = Bins::class_of(size);
        loop {
            let best = self.class_blocks(table, class).filter(|&id| table[id as usize].size() >= size);
            if let Some(id) = best.min_by_key(|&id| table[id as usize].size()) {
                return Some((id, class));
            }
            class = self.first_after(class)?;
        }
    }

    /// Every block, in no order that matters.
    pub(super) fn blocks<'a>(&'a self, table: &'a [Entry]) -> impl Iterator<Item = u32> + 'a {
        let classes = std::iter::successors(self.first_after(0), |&class| self.first_after(class));
        classes.flat_map(|class| self.class_blocks(table, class))
    }

    /// The largest block's size; 0 where there is none.
    pub(super) fn largest(&self, table: &[Entry]) -> usize {
        if self.is_empty() {
            return 0;
        }
        let level = self.levels.ilog2() as usize;
        let class = level * SUBS + self.subs[level].ilog2() as usize;
        self.class_blocks(table, class).map(|id| table[id as usize].size()).max().unwrap_or(0)
    }

    fn class_blocks<'a>(&'a self, table: &'a [Entry], class: usize) -> impl Iterator<Item = u32> + 'a {
        let first = self.heads.as_ref().map(|heads| heads[class % CLASSES]).filter(|&id| id != NONE);
        std::iter::successors(first, |&id| Some(table[id as usize].bin_next).filter(|&next| next != NONE))
    }

    /// The first class after this one that has blocks.
    #[inline(always)]
    fn first_after(&self, class: usize) -> Option<usize> {
        let level = class / SUBS;
        let here = self.subs[level % LEVELS] & (!1u32 << (class % SUBS));
        let above = (self.levels & (!1u32 << level)).trailing_zeros() as usize; // `LEVELS` where there is none
        let level = select_unpredictable(here != 0, level, above);
        let subs = select_unpredictable(here != 0, here, self.subs[above]);
        (subs != 0).then(|| level * SUBS + subs.trailing_zeros() as usize)
    }
}

#[cold]
fn no_heads() -> Box<[u32; CLASSES]> {
    Box::new([NONE; CLASSES])
}

#[cfg(test)]
mod tests {
    use super::super::entry::{LONGEST, Use};
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
    fn what_fits_is_found() {
        let entry = |units: usize| Entry::new(0, 0, Use::Free, 0, units * UNIT);
        let mut table: Vec<Entry> = [0, 640, 64, 130, 128, 129, 1 << 20].map(entry).into();
        let mut bins = Bins::new();
        (1..7).for_each(|id| bins.insert(&mut table, id));
        // 128 to 131 are one class, of which the last that came in, 129, is looked at.
        for (units, quick, best) in
            [(1, 64, 64), (65, 129, 128), (129, 129, 129), (130, 640, 130), (131, 640, 640), (641, 1 << 20, 1 << 20)]
        {
            let (quickly, _) = bins.find(&table, units * UNIT, class(units as u32)).unwrap();
            assert_eq!(table[quickly as usize].units(), quick, "{units}");
            assert_eq!(table[bins.find_best(&table, units * UNIT).unwrap().0 as usize].units(), best, "{units}");
        }
        assert_eq!(bins.find(&table, ((1 << 20) + 1) * UNIT, class((1 << 20) + 1)), None);
        assert_eq!(bins.largest(&table), UNIT << 20);
        for id in [4, 1, 6, 2, 5, 3] {
            bins.remove(&mut table, id);
            assert!(bins.blocks(&table).all(|other| other != id));
        }
        assert_eq!(bins.find_best(&table, LONGEST as usize), None);
        assert!(bins.is_empty() && bins.find(&table, UNIT, class(1)).is_none());
    }
}

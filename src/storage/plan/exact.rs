//! Backtracking search for offsets within a given capacity.
//!
//! The search places blocks from the bottom up, each resting on offset 0 or on another block, in order of offset and then rank. So each arrangement
//! is generated once (Moffitt's canonical solutions, from MiniMalloc). Three rules prune the tree:
//! - In some section of time, the lowest offset of an unplaced block plus the units still to be placed exceeds the capacity.
//! - A gap below a block could still hold another block.
//! - Time splits into parts that have no unplaced block in common. The parts are searched one after another instead of nested.

use super::search::{Item, disjoint_parts};

/// The blocks, and a table of the pairs of blocks that are alive at the same time.
pub(super) struct OverlapTable<'a> {
    pub items: &'a [Item],
    sections: usize,
    /// A bitmap per block: the other blocks alive at the same time.
    overlaps: Vec<u64>,
    /// `u64` words per bitmap.
    words: usize,
}

impl<'a> OverlapTable<'a> {
    pub fn new(items: &'a [Item]) -> OverlapTable<'a> {
        let words = items.len().div_ceil(64);
        let mut overlaps = vec![0; words * items.len()];
        for (i, a) in items.iter().enumerate() {
            for (j, b) in items.iter().enumerate() {
                if i != j && a.start < b.end && b.start < a.end {
                    overlaps[i * words + j / 64] |= 1 << (j % 64);
                }
            }
        }
        let sections = items.iter().map(|item| item.end).max().unwrap_or(0);
        OverlapTable { items, sections, overlaps, words }
    }
}

/// The outcome of a search.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SearchOutcome {
    Found,
    Impossible,
    OutOfSteps,
}

/// A search in progress.
struct Search<'a> {
    blocks: &'a OverlapTable<'a>,
    capacity: u64,
    /// Each block's priority among blocks that could have the same offset.
    rank: Vec<usize>,
    /// The lowest offset that the placed blocks leave to each unplaced block. For a placed block, the block's offset.
    low: Vec<u64>,
    /// Bitmap of the unplaced blocks.
    unplaced: Vec<u64>,
    /// The number of units of unplaced blocks, for each section.
    remaining: Vec<u64>,
    /// Number of unplaced blocks alive both in a section and in the section before it.
    crossing: Vec<u32>,
    /// Scratch memory: the lowest offset that an unplaced block can have, for each section.
    floor: Vec<u64>,
    /// Former values of `low`, for backtracking.
    trail: Vec<(usize, u64)>,
    steps: &'a mut u64,
}

/// Finds offsets that keep `blocks` within `capacity`, preferring blocks early in `order`. Returns `None` if no such
/// offsets exist or `steps` ran out. Subtracts the number of steps used from `steps`.
pub(super) fn place_within(blocks: &OverlapTable, capacity: u64, order: &[usize], steps: &mut u64) -> Option<Vec<u64>> {
    let count = blocks.items.len();
    let mut rank = vec![0; count];
    for (at, &index) in order.iter().enumerate() {
        rank[index] = at;
    }
    let mut search = Search {
        blocks,
        capacity,
        rank,
        low: vec![0; count],
        unplaced: vec![0; blocks.words],
        remaining: vec![0; blocks.sections],
        crossing: vec![0; blocks.sections],
        floor: vec![0; blocks.sections],
        trail: Vec::new(),
        steps,
    };
    for &index in order {
        search.mark_unplaced(index);
    }
    let end = search.place_parts(order, 0, 0);
    (end == SearchOutcome::Found).then_some(search.low)
}

impl Search<'_> {
    fn mark_unplaced(&mut self, index: usize) {
        let item = &self.blocks.items[index];
        self.unplaced[index / 64] |= 1 << (index % 64);
        self.remaining[item.start..item.end].iter_mut().for_each(|units| *units += item.size);
        self.crossing[item.start + 1..item.end].iter_mut().for_each(|count| *count += 1);
    }

    fn mark_placed(&mut self, index: usize) {
        let item = &self.blocks.items[index];
        self.unplaced[index / 64] &= !(1 << (index % 64));
        self.remaining[item.start..item.end].iter_mut().for_each(|units| *units -= item.size);
        self.crossing[item.start + 1..item.end].iter_mut().for_each(|count| *count -= 1);
    }

    /// Iterates over the unplaced blocks that are alive at the same time as `index`.
    fn unplaced_overlapping(&self, index: usize) -> impl Iterator<Item = usize> + use<'_> {
        let row = &self.blocks.overlaps[index * self.blocks.words..][..self.blocks.words];
        row.iter().zip(&self.unplaced).enumerate().flat_map(|(word, (overlaps, unplaced))| {
            let mut bits = overlaps & unplaced;
            std::iter::from_fn(move || {
                let bit = (bits != 0).then(|| bits.trailing_zeros() as usize)?;
                bits &= bits - 1;
                Some(word * 64 + bit)
            })
        })
    }

    /// Places `blocks`, which are sorted by rank, at pairs (offset, rank) not below (`at`, `rank`). Groups of blocks that are never
    /// alive at the same time are placed independently.
    fn place_parts(&mut self, blocks: &[usize], at: u64, rank: usize) -> SearchOutcome {
        let mut parts = disjoint_parts(self.blocks.items, blocks.iter().copied());
        parts.sort_by_key(Vec::len); // smallest first, because small parts fail fastest
        for done in 0..parts.len() {
            parts[done].sort_unstable_by_key(|&index| self.rank[index]);
            let end = self.place_part(&parts[done], at, rank);
            if end != SearchOutcome::Found {
                parts[..done].iter().flatten().for_each(|&index| self.mark_unplaced(index));
                return end;
            }
        }
        SearchOutcome::Found
    }

    /// Undoes the changes to `low` since `mark`.
    fn restore(&mut self, mark: usize) {
        for (index, low) in self.trail.drain(mark..).rev() {
            self.low[index] = low;
        }
    }

    /// Places the blocks of one part, which are sorted by rank. The next block's (offset, rank) is not below (`at`, `rank`).
    fn place_part(&mut self, part: &[usize], at: u64, rank: usize) -> SearchOutcome {
        if *self.steps == 0 {
            return SearchOutcome::OutOfSteps;
        }
        *self.steps -= 1;
        let Some((mut next, from, to)) = self.candidates(part, at, rank) else { return SearchOutcome::Impossible };
        next.sort_unstable();
        for (low, rank, index) in next {
            let Item { start, end, size } = self.blocks.items[index];
            let mark = self.trail.len();
            self.mark_placed(index);
            let mut raised = Vec::new();
            let mut has_no_overlap = true;
            for other in self.unplaced_overlapping(index) {
                has_no_overlap = false;
                if self.low[other] < low + size {
                    raised.push((other, self.low[other]));
                }
            }
            let fits = raised.iter().all(|&(other, _)| low + size + self.blocks.items[other].size <= self.capacity);
            let mut result = SearchOutcome::Impossible;
            if fits {
                for &(other, _) in &raised {
                    self.low[other] = low + size;
                }
                self.trail.append(&mut raised);
                let rest: Vec<usize> = part.iter().copied().filter(|&other| other != index).collect();
                let disjoint = (start.max(from + 1)..=end.min(to - 1)).any(|section| self.crossing[section] == 0);
                result = match rest.is_empty() {
                    true => SearchOutcome::Found,
                    false if disjoint => self.place_parts(&rest, low, rank),
                    false => self.place_part(&rest, low, rank),
                };
            }
            if result == SearchOutcome::Found {
                return result;
            }
            self.restore(mark);
            self.mark_unplaced(index);
            // A block that overlaps no unplaced block in time did not cause the failure, so no other choice is tried.
            if result == SearchOutcome::OutOfSteps || has_no_overlap {
                return result;
            }
        }
        SearchOutcome::Impossible
    }

    /// Returns the blocks of `part` that may come next, as (offset, rank, block), and the sections that the part
    /// spans. `None` if the part cannot be placed.
    #[allow(clippy::type_complexity)]
    fn candidates(&mut self, part: &[usize], at: u64, rank: usize) -> Option<(Vec<(u64, usize, usize)>, usize, usize)> {
        let items = self.blocks.items;
        let from = part.iter().map(|&index| items[index].start).min()?;
        let to = part.iter().map(|&index| items[index].end).max()?;
        if self.remaining[from..to].iter().any(|units| at + units > self.capacity) {
            return None;
        }
        self.floor[from..to].fill(u64::MAX);
        let mut next = Vec::with_capacity(part.len());
        let mut shelf = u64::MAX;
        for &index in part {
            let item = &items[index];
            let mut low = self.low[index];
            if (low, self.rank[index]) >= (at, rank) {
                next.push((low, self.rank[index], index));
                shelf = shelf.min(low + item.size);
            } else {
                // The block was skipped at its lowest offset, so it must rest on a block that is not placed yet.
                low =
                    self.unplaced_overlapping(index).map(|other| self.low[other].max(at) + items[other].size).min()?;
            }
            if low + item.size > self.capacity {
                return None;
            }
            self.floor[item.start..item.end].iter_mut().for_each(|floor| *floor = (*floor).min(low));
        }
        let full =
            |section| self.remaining[section] > 0 && self.floor[section] + self.remaining[section] > self.capacity;
        if (from..to).any(full) {
            return None;
        }
        // A block at `shelf` or above leaves room for the block that would end at `shelf`, so the block at `shelf` or above need
        // not be tried.
        next.retain(|&(low, ..)| low < shelf);
        Some((next, from, to))
    }
}

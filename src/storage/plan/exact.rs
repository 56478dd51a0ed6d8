//! Backtracking search for offsets within a given capacity.
//!
//! Blocks are placed from the bottom up, each resting on the ground or on another, in the one order that goes by offset
//! and then by rank: so each arrangement is met once (Moffitt's canonical solutions, from MiniMalloc). Three arguments
//! cut the tree: a section whose lowest possible floor plus what is left to place in it exceeds the capacity; a gap
//! left below a block into which another still fits; and time that falls apart into parts sharing no unplaced block,
//! which are then searched one after the other instead of one inside the other.

use super::search::Item;

/// Blocks, and which of them are alive together.
pub(super) struct Blocks<'a> {
    pub items: &'a [Item],
    sections: usize,
    /// A row of bits a block: those alive with it.
    near: Vec<u64>,
    words: usize,
}

impl<'a> Blocks<'a> {
    pub fn new(items: &'a [Item]) -> Blocks<'a> {
        let words = items.len().div_ceil(64);
        let mut near = vec![0; words * items.len()];
        for (i, a) in items.iter().enumerate() {
            for (j, b) in items.iter().enumerate() {
                if i != j && a.start < b.end && b.start < a.end {
                    near[i * words + j / 64] |= 1 << (j % 64);
                }
            }
        }
        let sections = items.iter().map(|item| item.end).max().unwrap_or(0);
        Blocks { items, sections, near, words }
    }
}

/// Why a search went no further.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Found,
    Impossible,
    OutOfSteps,
}

/// A search in progress.
struct Search<'a> {
    blocks: &'a Blocks<'a>,
    capacity: u64,
    /// Each block's place among those that could go to the same offset.
    rank: Vec<usize>,
    /// The lowest offset that the blocks placed so far leave to each; once it is placed, its offset.
    low: Vec<u64>,
    /// Bits: the blocks not placed.
    unplaced: Vec<u64>,
    /// Units not placed, by section.
    remaining: Vec<u64>,
    /// Blocks not placed that are alive both in a section and in the one before.
    crossing: Vec<u32>,
    /// Scratch: the lowest offset of a block not placed, by section.
    floor: Vec<u64>,
    /// What to restore in `low`.
    trail: Vec<(usize, u64)>,
    steps: &'a mut u64,
}

/// Offsets that keep `blocks` below `capacity`, preferring blocks early in `order`; `None` if there are none or `steps`
/// ran out. Leaves in `steps` those not used.
pub(super) fn within(blocks: &Blocks, capacity: u64, order: &[usize], steps: &mut u64) -> Option<Vec<u64>> {
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
        search.lift(index);
    }
    let end = search.parts(order, 0, 0);
    (end == End::Found).then_some(search.low)
}

impl Search<'_> {
    fn lift(&mut self, index: usize) {
        let item = &self.blocks.items[index];
        self.unplaced[index / 64] |= 1 << (index % 64);
        self.remaining[item.start..item.end].iter_mut().for_each(|units| *units += item.size);
        self.crossing[item.start + 1..item.end].iter_mut().for_each(|count| *count += 1);
    }

    fn put(&mut self, index: usize) {
        let item = &self.blocks.items[index];
        self.unplaced[index / 64] &= !(1 << (index % 64));
        self.remaining[item.start..item.end].iter_mut().for_each(|units| *units -= item.size);
        self.crossing[item.start + 1..item.end].iter_mut().for_each(|count| *count -= 1);
    }

    /// The blocks alive with `index` that are not placed.
    fn near(&self, index: usize) -> impl Iterator<Item = usize> + use<'_> {
        let row = &self.blocks.near[index * self.blocks.words..][..self.blocks.words];
        row.iter().zip(&self.unplaced).enumerate().flat_map(|(word, (near, unplaced))| {
            let mut bits = near & unplaced;
            std::iter::from_fn(move || {
                let bit = (bits != 0).then(|| bits.trailing_zeros() as usize)?;
                bits &= bits - 1;
                Some(word * 64 + bit)
            })
        })
    }

    /// Places `blocks` (by rank) at (`at`, `rank`) or after, each run of them that shares no time on its own.
    fn parts(&mut self, blocks: &[usize], at: u64, rank: usize) -> End {
        let items = self.blocks.items;
        let mut by_start = blocks.to_vec();
        by_start.sort_unstable_by_key(|&index| items[index].start);
        let mut end = 0;
        let mut parts: Vec<Vec<usize>> = Vec::new();
        for index in by_start {
            match parts.last_mut() {
                Some(part) if items[index].start < end => part.push(index),
                _ => parts.push(vec![index]),
            }
            end = end.max(items[index].end);
        }
        parts.sort_by_key(Vec::len); // a small one that cannot be placed is found out soonest
        for done in 0..parts.len() {
            parts[done].sort_unstable_by_key(|&index| self.rank[index]);
            let end = self.part(&parts[done], at, rank);
            if end != End::Found {
                parts[..done].iter().flatten().for_each(|&index| self.lift(index));
                return end;
            }
        }
        End::Found
    }

    fn restore(&mut self, mark: usize) {
        for (index, low) in self.trail.drain(mark..).rev() {
            self.low[index] = low;
        }
    }

    /// Places the blocks of one part (by rank), the next of them at (`at`, `rank`) or after.
    fn part(&mut self, part: &[usize], at: u64, rank: usize) -> End {
        if *self.steps == 0 {
            return End::OutOfSteps;
        }
        *self.steps -= 1;
        let Some((mut next, from, to)) = self.candidates(part, at, rank) else { return End::Impossible };
        next.sort_unstable();
        for (low, rank, index) in next {
            let Item { start, end, size } = self.blocks.items[index];
            let mark = self.trail.len();
            self.put(index);
            let mut raised = Vec::new();
            let mut alone = true;
            for other in self.near(index) {
                alone = false;
                if self.low[other] < low + size {
                    raised.push((other, self.low[other]));
                }
            }
            let fits = raised.iter().all(|&(other, _)| low + size + self.blocks.items[other].size <= self.capacity);
            let mut result = End::Impossible;
            if fits {
                for &(other, _) in &raised {
                    self.low[other] = low + size;
                }
                self.trail.append(&mut raised);
                let rest: Vec<usize> = part.iter().copied().filter(|&other| other != index).collect();
                let disjoint = (start.max(from + 1)..=end.min(to - 1)).any(|section| self.crossing[section] == 0);
                result = match rest.is_empty() {
                    true => End::Found,
                    false if disjoint => self.parts(&rest, low, rank),
                    false => self.part(&rest, low, rank),
                };
            }
            if result == End::Found {
                return result;
            }
            self.restore(mark);
            self.lift(index);
            // A block that touches none of the rest is not why they do not fit.
            if result == End::OutOfSteps || alone {
                return result;
            }
        }
        End::Impossible
    }

    /// The blocks of `part` that may come next, as (offset, rank, block), and the sections the part spans; `None` if it
    /// cannot be placed.
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
                // Passed over at its lowest offset: it must come to rest on one that is yet to be placed.
                low = self.near(index).map(|other| self.low[other].max(at) + items[other].size).min()?;
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
        // At `shelf` or above, the block that would end there still fits below: no need to look.
        next.retain(|&(low, ..)| low < shelf);
        Some((next, from, to))
    }
}

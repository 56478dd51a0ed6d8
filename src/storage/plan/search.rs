//! The offline search: offsets for blocks whose lifetimes are known, in an arena as small as it can make it.

use std::cmp::Reverse;
use std::time::{Duration, Instant};

use super::greedy::best_fit;

/// When a block lives and how large it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lifetime {
    /// The number of the event that made the block.
    pub start: u64,
    /// The number of the event that freed it: it is alive in `start..end`. A block that ends no later than it starts
    /// counts as alive at `start`.
    pub end: u64,
    /// Its size in bytes. The sizes of all blocks together must fit a `u64`.
    pub bytes: u64,
}

/// Where blocks go: what [`place`] found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The offset of each block in bytes, in the order of the lifetimes given; multiples of the alignment.
    pub offsets: Vec<u64>,
    /// The bytes that hold all blocks: the largest end of one, its size rounded up to the alignment.
    pub arena: u64,
    /// The peak of live bytes, sizes rounded up to the alignment: no arena can be smaller.
    pub lower_bound: u64,
}

/// A block in the search's own terms.
#[derive(Clone, Debug)]
pub(super) struct Item {
    /// The sections of time it is alive in, `start..end`.
    pub start: usize,
    pub end: usize,
    /// Its size in units of the alignment.
    pub size: u64,
}

/// Finds offsets, multiples of `alignment` bytes, such that blocks alive at the same time never overlap, in as small an
/// arena as it can within `budget`.
///
/// ```
/// use claystone::storage::plan::{Lifetime, place};
/// use std::time::Duration;
/// let blocks = [
///     Lifetime { start: 0, end: 2, bytes: 1024 },
///     Lifetime { start: 1, end: 3, bytes: 512 },
///     Lifetime { start: 2, end: 4, bytes: 1024 }, // the first is gone: its bytes again
/// ];
/// let plan = place(&blocks, 512, Duration::from_secs(1));
/// assert_eq!(plan.arena, 1536);
/// assert_eq!(plan.offsets, [0, 1024, 0]);
/// ```
pub fn place(lifetimes: &[Lifetime], alignment: u64, budget: Duration) -> Placement {
    let clock = Instant::now();
    let unit = alignment.max(1);
    let items = sections(lifetimes, unit);
    let lower_bound = live(&items).into_iter().max().unwrap_or(0);
    let mut best: Option<(u64, Vec<u64>)> = None;
    for order in orders(&items) {
        let offsets = best_fit(&items, &order);
        let arena = arena(&items, &offsets);
        if best.as_ref().is_none_or(|(smallest, _)| arena < *smallest) {
            best = Some((arena, offsets));
        }
        if best.as_ref().is_some_and(|(arena, _)| *arena == lower_bound) || clock.elapsed() >= budget {
            break;
        }
    }
    let (arena, offsets) = best.unwrap_or_default();
    Placement {
        offsets: offsets.into_iter().map(|offset| offset * unit).collect(),
        arena: arena * unit,
        lower_bound: lower_bound * unit,
    }
}

/// The same blocks with time cut into sections: a new one begins where a block starts after another has ended. The
/// largest set of blocks alive at once is alive in one of them.
fn sections(lifetimes: &[Lifetime], unit: u64) -> Vec<Item> {
    let mut items: Vec<Item> =
        lifetimes.iter().map(|block| Item { start: 0, end: 0, size: block.bytes.div_ceil(unit) }).collect();
    let mut events: Vec<(u64, bool, usize)> = Vec::with_capacity(2 * items.len()); // time, whether it starts, block
    for (index, block) in lifetimes.iter().enumerate() {
        let start = block.start.min(u64::MAX - 1);
        events.push((start, true, index));
        events.push((block.end.max(start + 1), false, index));
    }
    events.sort_unstable();
    let (mut section, mut ended) = (0, false);
    for (_, starts, index) in events {
        if starts {
            section += usize::from(ended);
            items[index].start = section;
        } else {
            items[index].end = section + 1;
        }
        ended = !starts;
    }
    items
}

/// The units alive in each section.
fn live(items: &[Item]) -> Vec<u64> {
    let sections = items.iter().map(|item| item.end).max().unwrap_or(0);
    let mut change = vec![0i128; sections + 1];
    for item in items {
        change[item.start] += i128::from(item.size);
        change[item.end] -= i128::from(item.size);
    }
    let mut sum = 0;
    change[..sections]
        .iter()
        .map(|change| {
            sum += change;
            sum as u64
        })
        .collect()
}

fn arena(items: &[Item], offsets: &[u64]) -> u64 {
    items.iter().zip(offsets).map(|(item, offset)| offset + item.size).max().unwrap_or(0)
}

/// Orders worth a pass: largest first, largest area first, longest first, by start.
fn orders(items: &[Item]) -> [Vec<usize>; 4] {
    let length = |item: &Item| (item.end - item.start) as u64;
    let sorted = |key: &dyn Fn(&Item) -> (u64, u64)| {
        let mut order: Vec<usize> = (0..items.len()).collect();
        order.sort_by_key(|&index| Reverse(key(&items[index])));
        order
    };
    [
        sorted(&|item| (item.size, length(item))),
        sorted(&|item| (item.size.saturating_mul(length(item)), item.size)),
        sorted(&|item| (length(item), item.size)),
        sorted(&|item| (u64::MAX - item.start as u64, item.size)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Every pair checked, which shares nothing with how the search keeps blocks apart.
    fn check(lifetimes: &[Lifetime], alignment: u64, plan: &Placement) {
        assert_eq!(plan.offsets.len(), lifetimes.len());
        let alive = |block: &Lifetime| block.start..block.end.max(block.start + 1);
        let end = |index: usize| plan.offsets[index] + lifetimes[index].bytes.next_multiple_of(alignment);
        for (a, x) in lifetimes.iter().enumerate() {
            assert_eq!(plan.offsets[a] % alignment, 0);
            assert!(end(a) <= plan.arena);
            for (b, y) in lifetimes.iter().enumerate().skip(a + 1) {
                let together = alive(x).start < alive(y).end && alive(y).start < alive(x).end;
                let apart = end(a) <= plan.offsets[b] || end(b) <= plan.offsets[a];
                assert!(!together || apart, "{a}: {x:?} and {b}: {y:?} overlap");
            }
        }
        let peak = lifetimes.iter().map(|at| {
            let then = lifetimes.iter().filter(|block| alive(block).contains(&at.start));
            then.map(|block| block.bytes.next_multiple_of(alignment)).sum()
        });
        assert_eq!(plan.lower_bound, peak.max().unwrap_or(0));
        assert!(plan.arena >= plan.lower_bound);
        assert_eq!(plan.arena, (0..lifetimes.len()).map(end).max().unwrap_or(0));
    }

    fn lifetimes(most: usize) -> impl Strategy<Value = Vec<Lifetime>> {
        let one = (0u64..60, 0u64..30, 0u64..5000);
        let one = one.prop_map(|(start, length, bytes)| Lifetime { start, end: start + length, bytes });
        prop::collection::vec(one, 0..most)
    }

    proptest! {
        #[test]
        fn blocks_alive_together_are_apart(blocks in lifetimes(80), alignment in prop::sample::select(vec![1, 16, 512])) {
            check(&blocks, alignment, &place(&blocks, alignment, Duration::from_millis(20)));
        }
    }
}

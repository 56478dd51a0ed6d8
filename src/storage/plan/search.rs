//! The offline search: offsets for blocks whose lifetimes are known, in an arena as small as it can make it.

use std::time::{Duration, Instant};

use rayon::prelude::*;

use super::exact::{Blocks, within};
use super::greedy::best_fit;
use super::orders::{self, Random, Ranking};

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
/// It stops early once the arena is the peak of live bytes, or after a fixed number of steps, which is what ends it with
/// a budget of a second: the plan is then the same every time. A budget of zero is one greedy pass.
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
    let live = live(&items);
    let lower_bound = live.iter().copied().max().unwrap_or(0);
    let mut offsets = vec![0; items.len()];
    let mut goal = lower_bound;
    for part in parts(&items) {
        let mut inside: Vec<Item> = part.iter().map(|&index| items[index].clone()).collect();
        let from = inside.iter().map(|item| item.start).min().unwrap_or(0);
        for item in &mut inside {
            item.start -= from;
            item.end -= from;
        }
        let found = best(&inside, &live[from..], goal, &|| budget.saturating_sub(clock.elapsed()));
        goal = goal.max(arena(&inside, &found));
        for (&index, offset) in part.iter().zip(found) {
            offsets[index] = offset;
        }
    }
    Placement {
        offsets: offsets.iter().map(|offset| offset * unit).collect(),
        arena: arena(&items, &offsets) * unit,
        lower_bound: lower_bound * unit,
    }
}

/// The most blocks of one part that are searched for: the tables of the search grow with the square, and with so many
/// one pass already takes long.
const MOST_SEARCHED: usize = 2000;
/// Steps of backtracking for one part: under half a second with some 200 blocks. What ends a search when time does not.
const STEPS: u64 = 250_000;
/// Steps of the shortest tries. Their cost is heavy-tailed: many short tries find more than a few long ones.
const STEPS_A_TRY: u64 = 1500;
/// Fewer blocks are searched for on one thread: there is not enough to do for several.
const FEW: usize = 64;
/// Capacities tried, in eighths of the way from the goal to the best so far: all of it first, then from easy to hard.
const EIGHTHS: [u64; 5] = [0, 6, 4, 2, 1];

/// The best offsets found for `items` in the time that is `left`; those whose arena is at most `goal` are good enough.
/// As many orders as there are threads are tried at once, and what comes of them is looked at in turn: the result is that of
/// one after another.
fn best(items: &[Item], live: &[u64], goal: u64, left: &dyn Fn() -> Duration) -> Vec<u64> {
    let mut best = (u64::MAX, Vec::new());
    let threads = rayon::current_num_threads();
    let orders = orders::greedy(items);
    let (first, others) = orders.split_at(1);
    for orders in [first].into_iter().chain(others.chunks(threads)) {
        let before = left();
        for offsets in each(items, orders, |order| best_fit(items, order)) {
            let arena = arena(items, &offsets);
            if arena < best.0 && best.0 > goal {
                best = (arena, offsets);
            }
        }
        // The next passes take as long as this one did.
        let after = left();
        if best.0 <= goal || after <= before - after {
            return best.1;
        }
    }
    if items.len() > MOST_SEARCHED {
        return best.1;
    }
    let blocks = Blocks::new(items);
    let ranking = Ranking::new(items, live);
    let mut random = Random::new();
    let mut steps = STEPS;
    for round in 0u32.. {
        let noise = if round == 0 { 0.0 } else { 0.1 * f64::from(1 + round % 3) };
        // 1, 2, 1, 4, 1, 2, 1, 8, ... times the shortest: in Luby's manner.
        let most = STEPS_A_TRY << (round + 1).trailing_zeros();
        for eighths in EIGHTHS {
            let orders = Ranking::ORDERS.map(|by| ranking.order(by, noise, &mut random));
            let mut orders = &orders[..];
            while !orders.is_empty() {
                if steps == 0 || best.0 <= goal || left().is_zero() {
                    return best.1;
                }
                let capacity = goal + (best.0 - goal) / 8 * eighths + (best.0 - goal) % 8 * eighths / 8;
                let allowed = most.min(steps);
                let tried = each(items, &orders[..threads.min(orders.len())], |order| {
                    let mut unused = allowed;
                    (within(&blocks, capacity, order, &mut unused), unused)
                });
                for (found, unused) in tried {
                    if allowed != most.min(steps) {
                        break; // alone it would have had fewer
                    }
                    orders = &orders[1..];
                    // A search that never came to its first step counts as one, so that the loop ends.
                    steps = steps.saturating_sub((allowed - unused).max(1));
                    if let Some(offsets) = found {
                        best = (arena(items, &offsets), offsets);
                        break; // those after it are tried again, with the capacity that is now to be beaten
                    }
                }
            }
        }
    }
    best.1
}

/// What `f` makes of each order, on several threads if there are many blocks.
fn each<R: Send>(items: &[Item], orders: &[Vec<usize>], f: impl Fn(&Vec<usize>) -> R + Sync + Send) -> Vec<R> {
    match items.len() < FEW {
        true => orders.iter().map(f).collect(),
        false => orders.par_iter().map(f).collect(),
    }
}

/// The blocks in groups that share no section with each other, by time.
fn parts(items: &[Item]) -> Vec<Vec<usize>> {
    let mut by_start: Vec<usize> = (0..items.len()).filter(|&index| items[index].size > 0).collect();
    by_start.sort_by_key(|&index| items[index].start);
    let mut parts: Vec<Vec<usize>> = Vec::new();
    let mut end = 0;
    for index in by_start {
        match parts.last_mut() {
            Some(part) if items[index].start < end => part.push(index),
            _ => parts.push(vec![index]),
        }
        end = end.max(items[index].end);
    }
    parts
}

/// The same blocks with time cut into sections: a new one begins where a block starts after another has ended. The
/// largest set of blocks alive at once is alive in one of them.
fn sections(lifetimes: &[Lifetime], unit: u64) -> Vec<Item> {
    let mut items: Vec<Item> =
        lifetimes.iter().map(|block| Item { start: 0, end: 0, size: block.bytes.div_ceil(unit) }).collect();
    let mut events: Vec<(u128, bool, usize)> = Vec::with_capacity(2 * items.len()); // time, whether it starts, block
    for (index, block) in lifetimes.iter().enumerate() {
        let start = u128::from(block.start);
        events.push((start, true, index));
        events.push((u128::from(block.end).max(start + 1), false, index));
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

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

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
                let overlap_in_time = alive(x).start < alive(y).end && alive(y).start < alive(x).end;
                let disjoint = end(a) <= plan.offsets[b] || end(b) <= plan.offsets[a];
                assert!(!overlap_in_time || disjoint, "{a}: {x:?} and {b}: {y:?} overlap");
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
        fn blocks_alive_together_are_apart(blocks in lifetimes(if cfg!(miri) { 20 } else { 80 }), alignment in prop::sample::select(vec![1, 16, 512])) {
            check(&blocks, alignment, &place(&blocks, alignment, Duration::from_millis(20)));
        }
    }

    /// A recorded trace: `a ID BYTES` and `f ID` lines. What is not freed lives to the end.
    fn trace(name: &str) -> Vec<Lifetime> {
        let path = format!("{}/tests/data/traces/{name}.trace", env!("CARGO_MANIFEST_DIR"));
        let text = std::fs::read_to_string(path).unwrap();
        let mut blocks: Vec<Lifetime> = Vec::new();
        let mut by_id = HashMap::new();
        for (time, line) in (0..).zip(text.lines()) {
            match line.split(' ').collect::<Vec<_>>()[..] {
                ["a", id, bytes] => {
                    by_id.insert(id, blocks.len());
                    blocks.push(Lifetime { start: time, end: u64::MAX, bytes: bytes.parse().unwrap() });
                }
                ["f", id] => blocks[by_id.remove(id).unwrap()].end = time,
                _ => panic!("{name}: {line}"),
            }
        }
        blocks
    }

    fn utilisation(name: &str, alignment: u64) -> f64 {
        let blocks = trace(name);
        let plan = place(&blocks, alignment, Duration::from_secs(600)); // steps end it
        check(&blocks, alignment, &plan);
        plan.lower_bound as f64 / plan.arena as f64
    }

    #[test]
    #[cfg_attr(miri, ignore = "reads files, with hours of arithmetic on them in safe code")]
    fn recorded_networks_need_no_more_than_their_peak() {
        assert_eq!(utilisation("mnn_1", 1), 1.0);
        assert_eq!(utilisation("mnn_2", 512), 1.0);
    }

    #[test]
    #[cfg_attr(miri, ignore = "as above")]
    fn hard_traces_are_packed_to_nine_tenths() {
        let each = ["A", "B", "C", "D", "E", "F"].map(|name| utilisation(&format!("minimalloc_{name}"), 512));
        assert!(each.iter().sum::<f64>() / 6.0 >= 0.9, "{each:?}");
    }

    /// The smallest arena there is, over every assignment of offsets up to `most`: where `most` is the arena of some
    /// placement, no better one is left out.
    fn exhaustive(blocks: &[Lifetime], offsets: &mut Vec<u64>, most: u64) -> u64 {
        let at = offsets.len();
        if at == blocks.len() {
            return blocks.iter().zip(offsets).map(|(block, offset)| *offset + block.bytes).max().unwrap_or(0);
        }
        let mut smallest = u64::MAX;
        for offset in 0..=most {
            let free = (0..at).all(|other| {
                let (a, b) = (blocks[at], blocks[other]);
                let overlap_in_time = a.start < b.end && b.start < a.end;
                !overlap_in_time || offset + a.bytes <= offsets[other] || offsets[other] + b.bytes <= offset
            });
            if free {
                offsets.push(offset);
                smallest = smallest.min(exhaustive(blocks, offsets, most));
                offsets.pop();
            }
        }
        smallest
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 1 } else { 64 }))]
        #[test]
        fn small_cases_are_optimal(blocks in prop::collection::vec((0u64..6, 1u64..4, 1u64..4), 1..if cfg!(miri) { 4 } else { 6 })) {
            optimal(&blocks);
        }
    }

    fn optimal(blocks: &[(u64, u64, u64)]) {
        let one = |&(start, length, bytes): &(u64, u64, u64)| Lifetime { start, end: start + length, bytes };
        let blocks: Vec<Lifetime> = blocks.iter().map(one).collect();
        let plan = place(&blocks, 1, Duration::from_secs(600));
        check(&blocks, 1, &plan);
        assert_eq!(plan.arena, exhaustive(&blocks, &mut Vec::new(), plan.arena), "{blocks:?}");
    }

    #[test]
    #[cfg_attr(miri, ignore = "minutes of arithmetic in safe code")]
    fn all_alive_at_once_fill_the_arena() {
        optimal(&[(1, 2, 1), (2, 1, 3), (0, 3, 3), (1, 2, 3), (1, 2, 3)]);
    }

    #[test]
    fn nothing_and_extremes() {
        let none = place(&[], 0, Duration::ZERO);
        assert_eq!(none, Placement { offsets: vec![], arena: 0, lower_bound: 0 });
        let ends = [(u64::MAX, u64::MAX, 8), (0, u64::MAX, 4), (5, 2, 0)];
        let blocks = ends.map(|(start, end, bytes)| Lifetime { start, end, bytes });
        assert_eq!(place(&blocks, 4, Duration::ZERO).arena, 8);
    }
}

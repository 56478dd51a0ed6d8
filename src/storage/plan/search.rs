//! Offline placement: searches offsets for blocks with known lifetimes, in as small an arena as possible.

use std::cmp::Reverse;
use std::time::{Duration, Instant};

use rayon::prelude::*;

use super::exact::{OverlapTable, place_within};

/// The lifetime and size of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lifetime {
    /// The number of the event that allocated the block.
    pub start: u64,
    /// The number of the event that freed the block. The block is alive in `start..end`. A block whose end is not after
    /// its start counts as alive at `start`.
    pub end: u64,
    /// The block's size in bytes. The sizes of all blocks together must fit a `u64`.
    pub bytes: u64,
}

/// The offsets of blocks, as found by [`place`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The offset of each block in bytes, in the order of the given lifetimes. Each offset is a multiple of the alignment.
    pub offsets: Vec<u64>,
    /// The arena's size in bytes: the highest end of a block, where block sizes are rounded up to the alignment.
    pub arena: u64,
    /// The peak of live bytes, with sizes rounded up to the alignment. No arena can be smaller.
    pub lower_bound: u64,
}

/// A block in the search's units.
#[derive(Clone, Debug)]
pub(super) struct Item {
    /// The sections of time in which the block is alive, `start..end`.
    pub start: usize,
    pub end: usize,
    /// The size in units of the alignment.
    pub size: u64,
}

/// Finds offsets, in multiples of `alignment` bytes, such that blocks alive at the same time never overlap. Minimises the arena within `budget`.
///
/// The search stops early if the arena equals the peak of live bytes, or after a fixed number of steps. With a budget of a second
/// the step limit comes first, so the result is the same every time. With a budget of zero, only one greedy pass runs.
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
    let items = divide_into_sections(lifetimes, unit);
    let live = live_units(&items);
    let lower_bound = live.iter().copied().max().unwrap_or(0);
    let mut offsets = vec![0; items.len()];
    let mut goal = lower_bound;
    for part in disjoint_parts(&items, (0..items.len()).filter(|&index| items[index].size > 0)) {
        let mut inside: Vec<Item> = part.iter().map(|&index| items[index].clone()).collect();
        let from = inside.iter().map(|item| item.start).min().unwrap_or(0);
        for item in &mut inside {
            item.start -= from;
            item.end -= from;
        }
        let found = search_offsets(&inside, &live[from..], goal, &|| budget.saturating_sub(clock.elapsed()));
        goal = goal.max(arena_units(&inside, &found));
        for (&index, offset) in part.iter().zip(found) {
            offsets[index] = offset;
        }
    }
    Placement {
        offsets: offsets.iter().map(|offset| offset * unit).collect(),
        arena: arena_units(&items, &offsets) * unit,
        lower_bound: lower_bound * unit,
    }
}

/// Parts with more blocks get only the greedy passes, because the search's tables grow with the square of the number of blocks.
const MAX_SEARCHED_BLOCKS: usize = 2000;
/// Maximum number of backtracking steps for one part, even if time is left. With about 200 blocks they take under half a second.
const MAX_STEPS: u64 = 250_000;
/// Backtracking steps of the shortest try. Most solutions are found early in a try or not at all, and many short tries therefore
/// find more than a few long tries.
const MIN_STEPS_PER_TRY: u64 = 1500;
/// Parts with fewer blocks are searched on one thread, because there is too little work for several.
const MIN_PARALLEL_BLOCKS: usize = 64;
/// Capacities to try, in eighths of the distance from the goal to the best arena so far: the goal itself first, then larger
/// capacities, from the easiest to the hardest.
const CAPACITY_EIGHTHS: [u64; 5] = [0, 6, 4, 2, 1];

/// Returns the best offsets for `items` found before `left`, which returns the time left, reaches zero. Stops at an arena of at most `goal`. Each
/// thread tries another order at the same time, but the results are evaluated in sequence, so the result is the same as on one thread.
fn search_offsets(items: &[Item], live: &[u64], goal: u64, left: &dyn Fn() -> Duration) -> Vec<u64> {
    let mut best = (u64::MAX, Vec::new());
    let threads = rayon::current_num_threads();
    let orders = greedy_orders(items);
    let (first, others) = orders.split_at(1);
    for orders in [first].into_iter().chain(others.chunks(threads)) {
        let before = left();
        for offsets in map_orders(items, orders, |order| best_fit(items, order)) {
            let arena = arena_units(items, &offsets);
            if arena < best.0 && best.0 > goal {
                best = (arena, offsets);
            }
        }
        // Stops if the time left is shorter than the last pass took.
        let after = left();
        if best.0 <= goal || after <= before - after {
            return best.1;
        }
    }
    if items.len() > MAX_SEARCHED_BLOCKS {
        return best.1;
    }
    let blocks = OverlapTable::new(items);
    let ranking = Ranking::new(items, live);
    let mut random = Random::new();
    let mut steps = MAX_STEPS;
    for round in 0u32.. {
        let noise = if round == 0 { 0.0 } else { 0.1 * f64::from(1 + round % 3) };
        // The steps allowed are `MIN_STEPS_PER_TRY` times 1, 2, 1, 4, 1, 2, 1, 8, ..., similar to Luby's restart sequence.
        let most = MIN_STEPS_PER_TRY << (round + 1).trailing_zeros();
        for eighths in CAPACITY_EIGHTHS {
            let orders = Ranking::ORDERS.map(|by| ranking.order(by, noise, &mut random));
            let mut orders = &orders[..];
            while !orders.is_empty() {
                if steps == 0 || best.0 <= goal || left().is_zero() {
                    return best.1;
                }
                let capacity = goal + (best.0 - goal) / 8 * eighths + (best.0 - goal) % 8 * eighths / 8;
                let allowed = most.min(steps);
                let tried = map_orders(items, &orders[..threads.min(orders.len())], |order| {
                    let mut unused = allowed;
                    (place_within(&blocks, capacity, order, &mut unused), unused)
                });
                for (found, unused) in tried {
                    if allowed != most.min(steps) {
                        break; // a sequential search would have had fewer steps left for this try
                    }
                    orders = &orders[1..];
                    // A search that runs no step counts as one step, so that the loop ends.
                    steps = steps.saturating_sub((allowed - unused).max(1));
                    if let Some(offsets) = found {
                        best = (arena_units(items, &offsets), offsets);
                        break; // the orders after this one are tried again, with a smaller capacity
                    }
                }
            }
        }
    }
    best.1
}

/// Applies `f` to each order, on several threads if there are many blocks.
fn map_orders<R: Send>(items: &[Item], orders: &[Vec<usize>], f: impl Fn(&Vec<usize>) -> R + Sync + Send) -> Vec<R> {
    match items.len() < MIN_PARALLEL_BLOCKS {
        true => orders.iter().map(f).collect(),
        false => orders.par_iter().map(f).collect(),
    }
}

/// A block with an assigned offset.
#[derive(Clone, Copy)]
struct PlacedBlock {
    offset: u64,
    top: u64,
    start: usize,
    end: usize,
}

/// Assigns offsets to `items` in the order `order`. Each item goes into the smallest sufficient gap between the blocks
/// that are alive at the same time, or above those blocks.
fn best_fit(items: &[Item], order: &[usize]) -> Vec<u64> {
    let mut offsets = vec![0; items.len()];
    let mut placed: Vec<PlacedBlock> = Vec::with_capacity(items.len()); // sorted by offset
    for &index in order {
        let item = &items[index];
        let mut best: Option<(u64, u64)> = None; // (size of the gap, offset)
        let mut top = 0;
        for other in placed.iter().filter(|other| other.start < item.end && item.start < other.end) {
            let gap = other.offset.saturating_sub(top);
            if gap >= item.size && best.is_none_or(|(smallest, _)| gap < smallest) {
                best = Some((gap, top));
            }
            top = top.max(other.top);
        }
        let offset = best.map_or(top, |(_, offset)| offset);
        offsets[index] = offset;
        let at = placed.partition_point(|other| other.offset <= offset);
        placed.insert(at, PlacedBlock { offset, top: offset + item.size, start: item.start, end: item.end });
    }
    offsets
}

/// Returns the orders for the greedy passes: largest first, largest area (size times lifetime) first, longest-lived first, and by start.
fn greedy_orders(items: &[Item]) -> [Vec<usize>; 4] {
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

/// Ranks blocks for the backtracking search by three keys: lifetime, area (size times lifetime), and the peak of live
/// bytes during the lifetime. Some instances are solved only in one of the three orders, or only with noise.
struct Ranking(Vec<[f64; 3]>);

impl Ranking {
    /// The lexicographic orders of the three keys.
    const ORDERS: [[usize; 3]; 3] = [[0, 1, 2], [2, 1, 0], [2, 0, 1]];

    /// Computes the keys. `live` gives the units alive in each section.
    fn new(items: &[Item], live: &[u64]) -> Ranking {
        let key = |item: &Item| {
            let length = (item.end - item.start) as f64;
            let most = live[item.start..item.end].iter().copied().max().unwrap_or(0);
            [length, length * item.size as f64, most as f64]
        };
        Ranking(items.iter().map(key).collect())
    }

    /// Returns the blocks in descending order of their keys. Each block's keys are scaled by a random factor of 1 ± `noise`.
    fn order(&self, by: [usize; 3], noise: f64, random: &mut Random) -> Vec<usize> {
        let noisy = |key: &[f64; 3]| {
            let off = noise * random.next();
            // The peaks of blocks alive at the same time differ little, so less noise suffices to change their order.
            let keys = [key[0] * (1.0 + off), key[1] * (1.0 + off), key[2] * (1.0 + 0.3 * off)];
            by.map(|which| keys[which])
        };
        let keys: Vec<[f64; 3]> = self.0.iter().map(noisy).collect();
        let mut order: Vec<usize> = (0..keys.len()).collect();
        order.sort_by(|&a, &b| {
            let pairs = keys[b].iter().zip(&keys[a]);
            pairs.map(|(b, a)| b.total_cmp(a)).find(|order| order.is_ne()).unwrap_or(a.cmp(&b))
        });
        order
    }
}

/// Marsaglia's xorshift generator with a fixed seed, so that plans are reproducible.
struct Random(u64);

impl Random {
    fn new() -> Random {
        Random(0x9E37_79B9_7F4A_7C15)
    }

    /// Returns a random number in -1..1.
    fn next(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1u64 << 52) as f64 - 1.0
    }
}

/// Groups blocks into parts that have no section of time in common.
pub(super) fn disjoint_parts(items: &[Item], blocks: impl Iterator<Item = usize>) -> Vec<Vec<usize>> {
    let mut by_start: Vec<usize> = blocks.collect();
    by_start.sort_unstable_by_key(|&index| (items[index].start, index));
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

/// Divides time into sections, and expresses the lifetimes in sections. A new section begins where a block starts
/// after another has ended. For every moment there is a section in which all blocks alive at that moment are alive.
fn divide_into_sections(lifetimes: &[Lifetime], unit: u64) -> Vec<Item> {
    let mut items: Vec<Item> =
        lifetimes.iter().map(|block| Item { start: 0, end: 0, size: block.bytes.div_ceil(unit) }).collect();
    let mut events: Vec<(u128, bool, usize)> = Vec::with_capacity(2 * items.len()); // (time, whether the block starts, block)
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

/// Computes the number of units alive in each section.
fn live_units(items: &[Item]) -> Vec<u64> {
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

/// Returns the arena's size in units: the highest end of a block.
fn arena_units(items: &[Item], offsets: &[u64]) -> u64 {
    items.iter().zip(offsets).map(|(item, offset)| offset + item.size).max().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use proptest::prelude::*;

    /// Checks every pair of blocks, independently of how the search separates blocks.
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
        fn blocks_alive_at_the_same_time_do_not_overlap(blocks in lifetimes(if cfg!(miri) { 20 } else { 80 }), alignment in prop::sample::select(vec![1, 16, 512])) {
            check(&blocks, alignment, &place(&blocks, alignment, Duration::from_millis(20)));
        }
    }

    /// Reads a recorded trace of `a ID BYTES` and `f ID` lines. Blocks that are not freed live to the end.
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
        let plan = place(&blocks, alignment, Duration::from_secs(600)); // the step limit ends the search
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

    /// Returns the smallest arena over all assignments of offsets up to `most`. If `most` is the arena of some
    /// placement, no better placement is missed.
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
    fn empty_and_extreme_inputs_are_placed() {
        let none = place(&[], 0, Duration::ZERO);
        assert_eq!(none, Placement { offsets: vec![], arena: 0, lower_bound: 0 });
        let ends = [(u64::MAX, u64::MAX, 8), (0, u64::MAX, 4), (5, 2, 0)];
        let blocks = ends.map(|(start, end, bytes)| Lifetime { start, end, bytes });
        assert_eq!(place(&blocks, 4, Duration::ZERO).arena, 8);
    }
}

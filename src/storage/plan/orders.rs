//! The orders in which the searches place blocks.

use std::cmp::Reverse;

use super::search::Item;

/// Orders for the greedy pass: largest first, largest area (size times lifetime) first, longest-lived first, and by start.
pub(super) fn greedy_orders(items: &[Item]) -> [Vec<usize>; 4] {
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
pub(super) struct Ranking(Vec<[f64; 3]>);

impl Ranking {
    /// The lexicographic orders of the three keys.
    pub const ORDERS: [[usize; 3]; 3] = [[0, 1, 2], [2, 1, 0], [2, 0, 1]];

    /// Computes the keys. `live` gives the units alive in each section.
    pub fn new(items: &[Item], live: &[u64]) -> Ranking {
        let key = |item: &Item| {
            let length = (item.end - item.start) as f64;
            let most = live[item.start..item.end].iter().copied().max().unwrap_or(0);
            [length, length * item.size as f64, most as f64]
        };
        Ranking(items.iter().map(key).collect())
    }

    /// Returns the blocks in descending order of their keys. Each block's keys are scaled by a random factor of 1 ± `noise`.
    pub fn order(&self, by: [usize; 3], noise: f64, random: &mut Random) -> Vec<usize> {
        let noisy = |key: &[f64; 3]| {
            let off = noise * random.next();
            // The peaks of blocks alive at the same time differ little, so less noise shuffles them as much.
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
pub(super) struct Random(u64);

impl Random {
    pub fn new() -> Random {
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

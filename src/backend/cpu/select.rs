//! Selection by rank on the CPU (top-k, k-th value, median), without sorting whole lines.

use crate::backend::cpu::convert::load_tile;
use crate::backend::cpu::dispatch::for_compute;
use crate::backend::cpu::lines::{Line, PIECE_LEN};
use crate::backend::cpu::sort::{SortElement, compared_in};
use crate::backend::cpu::vectorised::vectorised;
use crate::backend::problem::lines::Lines;
use crate::backend::problem::select::{RankQuery, Selected, dims_with, key_bits};
use crate::device::cpu::{parallel, threads};
use crate::storage::with_host;
use crate::{DType, Result, Tensor};

/// The number of elements in a job of the thread pool.
const JOB_ELEMENTS: usize = 1 << 11;
/// The minimum number of keys to collect before all but the first `k` are dropped; twice `k` if that is more.
const MIN_KEPT: usize = 32;
/// The minimum length of a line for which radix selection is used, which does not move keys.
const MIN_RADIX_LEN: usize = 1 << 13;
/// The number of bits in a digit of radix selection.
const DIGIT_BITS: usize = 11;
/// The number of elements that are compared with the current limit at a time. The results are the bits of a u32.
const COMPARED_LEN: usize = 32;

/// The keys of the elements scanned so far that are among the first `k` in sorted order.
struct FirstK<C: SortElement> {
    k: usize,
    descending: bool,
    kept: Vec<C::Key>,
    /// The greatest key that can still be among the first `k`; `None` if any key can.
    limit: Option<C::Key>,
}

impl<C: SortElement> FirstK<C> {
    fn new(k: usize, descending: bool) -> FirstK<C> {
        FirstK { k, descending, kept: Vec::with_capacity(MIN_KEPT.max(2 * k)), limit: None }
    }

    /// Scans elements of a line, the first of which has index `first`. All preceding elements of the line must already have been scanned.
    fn scan(&mut self, elements: &[C], first: usize) {
        if self.limit.is_none() {
            let some = &elements[..elements.len().min(PIECE_LEN)];
            self.limit = match self.k {
                1..=8 => estimate_limit::<C, 16>(some, self.k, self.descending),
                9..=32 => estimate_limit::<C, 64>(some, self.k, self.descending),
                _ => None,
            };
        }
        scan_blocks(self, elements, first);
    }

    #[inline(always)]
    /// Keeps `key` unless it is greater than the limit.
    fn keep_within_limit(&mut self, key: C::Key) {
        if self.limit.is_some_and(|limit| key > limit) {
            return;
        }
        self.kept.push(key);
        if self.kept.len() >= MIN_KEPT.max(2 * self.k) {
            self.truncate_to_k();
            self.limit = self.kept.iter().max().copied();
        }
    }

    /// Drops all keys except the first `k`.
    fn truncate_to_k(&mut self) {
        if self.kept.len() > self.k {
            self.kept.select_nth_unstable(self.k - 1);
            self.kept.truncate(self.k);
        }
    }

    /// Writes the indices of the first `k` elements in sorted order.
    fn write(&mut self, to: &mut [i64]) {
        self.truncate_to_k();
        self.kept.sort_unstable();
        to.iter_mut().zip(&self.kept).for_each(|(to, &key)| *to = C::index(key) as i64);
    }
}

vectorised! {
    /// The inner loop of [`FirstK::scan`]: compares blocks of elements with the limit, and computes keys only for elements within the
    /// limit.
    fn scan_blocks<'a, C: SortElement>(_simd: S, first: &'a mut FirstK<C>, elements: &'a [C], at: usize) {
        let (blocks, rest) = elements.as_chunks::<COMPARED_LEN>();
        for (b, block) in blocks.iter().enumerate() {
            let mut bits = match first.limit {
                // Comparisons are written so that NaN passes. Once there are k keys, a later element that equals the limit comes after
                // the limit.
                Some(limit) => {
                    let (limit, full) = (C::value(limit, first.descending), first.kept.len() >= first.k);
                    match first.descending {
                        true => bits_where(block, |v| !((v < limit) | ((v == limit) & full))),
                        false => bits_where(block, |v| !((v > limit) | ((v == limit) & full))),
                    }
                }
                None => u32::MAX,
            };
            while bits != 0 {
                let i = bits.trailing_zeros() as usize;
                bits &= bits - 1;
                first.keep_within_limit(block[i].key(at + b * COMPARED_LEN + i, first.descending));
            }
        }
        for (v, i) in rest.iter().zip(at + blocks.len() * COMPARED_LEN..) {
            first.keep_within_limit(v.key(i, first.descending));
        }
    }
}

#[inline(always)]
/// Returns a u32 whose bit i is set if `is` is true for element i of the block.
fn bits_where<C: SortElement>(block: &[C; COMPARED_LEN], is: impl Fn(C) -> bool) -> u32 {
    block.iter().enumerate().fold(0, |bits, (i, v)| bits | u32::from(is(*v)) << i)
}

vectorised! {
    /// Returns, for each column, the element that comes first in sorted order, or `start` if all elements come after `start`.
    fn best_of_rows<'a, C: SortElement; const LANES: usize>(
        _simd: S, rows: &'a [[C; LANES]], start: C, descending: bool
    ) -> [C; LANES] {
        let mut best = [start; LANES];
        for row in rows {
            match descending {
                true => best.iter_mut().zip(row).for_each(|(b, v)| *b = if *v > *b { *v } else { *b }),
                false => best.iter_mut().zip(row).for_each(|(b, v)| *b = if *v < *b { *v } else { *b }),
            }
        }
        best
    }
}

/// Estimates a limit such that at least `k` elements, and few more, have keys up to the limit. Divides the elements into `LANES` lanes
/// (more than `k`), takes from each lane the element that comes first in sorted order, and returns the `k`-th of these elements.
fn estimate_limit<C: SortElement, const LANES: usize>(elements: &[C], k: usize, descending: bool) -> Option<C::Key> {
    let (rows, _) = elements.as_chunks::<LANES>();
    if rows.len() < 2 {
        return None;
    }
    let none = C::from_f64(if descending { f64::NEG_INFINITY } else { f64::INFINITY });
    let best = best_of_rows(rows, none, descending);
    let mut keys = best.map(|v| v.last_key(descending));
    // A lane that holds only NaN keeps the start value, which need not be the key of any element.
    Some(*keys.select_nth_unstable(k - 1).1).filter(|&key| key != none.last_key(descending))
}

/// Returns the indices of the first `k` elements of each line in sorted order.
pub(crate) fn topk(x: &Tensor, d: usize, k: usize, descending: bool) -> Result<Selected> {
    let compute = compared_in(x, x.shape().dims()[d]);
    select_indices(x, d, k, |out| for_compute!(compute, C => topk_as::<C>(x, d, k, descending, out)))
}

/// Returns, for each line, the index of the element with the rank that `nth` asks for.
pub(crate) fn kth(x: &Tensor, d: usize, nth: RankQuery<'_>) -> Result<Selected> {
    select_indices(x, d, 1, |out| for_compute!(x.dtype.compute(), C => kth_as::<C>(x, d, nth, out)))
}

/// Allocates the tensor of indices, and calls `choose` to fill it unless it is empty.
fn select_indices(x: &Tensor, d: usize, k: usize, choose: impl FnOnce(&Tensor) -> Result<()>) -> Result<Selected> {
    let out = Tensor::empty_with_shape(dims_with(x, d, k), DType::I64, x.device())?;
    if out.numel() > 0 {
        choose(&out)?;
    }
    Ok(out.into())
}

fn topk_as<C: SortElement>(x: &Tensor, d: usize, k: usize, descending: bool, out: &Tensor) -> Result<()> {
    let lines = Lines::new(x, d);
    // If lines are interleaved in the result, the indices of each line are first collected in contiguous memory.
    let contiguous_indices =
        Tensor::empty_with_shape(if lines.inner > 1 { out.numel() } else { 0 }, DType::I64, x.device())?;
    with_host(&[&x.storage], &[&out.storage, &contiguous_indices.storage], |reads, writes| {
        let [out, contiguous_indices] = writes else { unreachable!("two are written") };
        let out: &mut [i64] = &mut bytemuck::cast_slice_mut(out)[..lines.count * k];
        let contiguous_indices: &mut [i64] =
            &mut bytemuck::cast_slice_mut(contiguous_indices)[..if lines.inner > 1 { lines.count * k } else { 0 }];
        let scan = |kept: &mut FirstK<C>, buffer: &mut Vec<C>, line: usize, from: usize, to: usize| {
            let start = x.layout.offset as isize + lines.strided.offsets(line)[0];
            if lines.step == 1 && x.dtype == C::COMPUTE.dtype() {
                let all: &[C] = bytemuck::cast_slice(reads[0]);
                return kept.scan(&all[start as usize..][from..to], from);
            }
            buffer.resize(PIECE_LEN.min(to - from), C::from_i32(0));
            for first in (from..to).step_by(PIECE_LEN) {
                let piece = &mut buffer[..PIECE_LEN.min(to - first)];
                load_tile(x.dtype, reads[0], (start + first as isize * lines.step) as usize, lines.step, piece);
                kept.scan(piece, first);
            }
        };
        let threads = threads();
        if lines.count < threads && lines.n >= threads * PIECE_LEN && k <= PIECE_LEN {
            // Each thread selects from a part of the line; then the selected elements of all parts are merged.
            for (line, to) in out.chunks_mut(k).enumerate() {
                let parts = parallel::map(threads, 1, |i| {
                    let mut kept = FirstK::<C>::new(k, descending);
                    let end = |i: usize| lines.n / threads * i + (lines.n % threads) * i / threads;
                    scan(&mut kept, &mut Vec::new(), line, end(i), end(i + 1));
                    kept.kept
                });
                FirstK::<C> { kept: parts.concat(), ..FirstK::new(k, descending) }.write(to);
            }
            return;
        }
        let found: &mut [i64] = if lines.inner > 1 { &mut *contiguous_indices } else { &mut *out };
        let group = JOB_ELEMENTS.div_ceil(lines.n);
        let part = |job: usize, found: &mut [i64]| {
            let (mut kept, mut buffer) = (FirstK::<C>::new(k, descending), Vec::new());
            for (i, to) in found.chunks_mut(k).enumerate() {
                (kept.limit, _) = (None, kept.kept.clear());
                scan(&mut kept, &mut buffer, job * group + i, 0, lines.n);
                kept.write(to);
            }
        };
        match lines.count <= group {
            true => part(0, found),
            false => parallel::for_each_chunk(found, group * k, part),
        }
        for (line, found) in contiguous_indices.chunks(k).enumerate() {
            let to = line / lines.inner * lines.inner * k + line % lines.inner;
            out[to..].iter_mut().step_by(lines.inner).zip(found).for_each(|(to, &index)| *to = index);
        }
    })
}

fn kth_as<C: SortElement>(x: &Tensor, d: usize, nth: RankQuery<'_>, out: &Tensor) -> Result<()> {
    let lines = Lines::new(x, d);
    let ranks = nth.ranks().unwrap_or(x);
    with_host(&[&x.storage, &ranks.storage], &[&out.storage], |reads, writes| {
        let out: &mut [i64] = &mut bytemuck::cast_slice_mut(&mut *writes[0])[..lines.count];
        let listed = |line: usize| bytemuck::cast_slice::<u8, i64>(reads[1])[ranks.layout.offset + line];
        let line_of = |line: usize| Line {
            dtype: x.dtype,
            bytes: reads[0],
            start: x.layout.offset as isize + lines.strided.offsets(line)[0],
            step: lines.step,
            n: lines.n,
        };
        if lines.n > MIN_RADIX_LEN {
            let slices = if lines.count >= threads() { 1 } else { 4 * threads() }.max(lines.n >> 31);
            let find =
                |line: usize| line_of(line).radix_select::<C>(slices, |nans| nth.rank(lines.n, nans, || listed(line)));
            return match slices {
                1 => parallel::for_each(out, |line, to| *to = find(line)),
                _ => out.iter_mut().enumerate().for_each(|(line, to)| *to = find(line)),
            };
        }
        let group = JOB_ELEMENTS.div_ceil(lines.n);
        let part = |job: usize, out: &mut [i64]| {
            let (mut line, mut keys) = (vec![C::from_i32(0); lines.n], Vec::with_capacity(lines.n));
            for (i, to) in out.iter_mut().enumerate() {
                let number = job * group + i;
                let Line { start, step, .. } = line_of(number);
                load_tile(x.dtype, reads[0], start as usize, step, &mut line);
                let nans = line.iter().filter(|v| v.partial_cmp(v).is_none()).count();
                keys.clear();
                keys.extend(line.iter().enumerate().map(|(i, v)| v.key(i, false)));
                let rank = nth.rank(lines.n, nans, || listed(number));
                *to = C::index(*keys.select_nth_unstable(rank).1) as i64;
            }
        };
        match lines.count <= group {
            true => part(0, out),
            false => parallel::for_each_chunk(out, group, part),
        }
    })
}

impl Line<'_> {
    /// Returns the index of the element with rank `which(number of NaN)`, by radix selection: for each digit of the keys, counts the
    /// elements of every slice of the line by the value of the digit.
    fn radix_select<C: SortElement>(&self, slices: usize, which: impl Fn(usize) -> usize) -> i64 {
        let end = |slice: usize| self.n / slices * slice + self.n % slices * slice / slices;
        let [low, mut high] = key_bits(self.dtype);
        let lowest = C::lowest(self.dtype);
        let mut digit = Digit { lowest, found: None, low, high };
        let (mut need, mut at) = (0, 0);
        while high > low {
            digit = Digit { low: low.max(high.saturating_sub(DIGIT_BITS)), high, ..digit };
            let counts = parallel::map(slices, 1, |slice| {
                let mut counts = DigitCounts { bins: [[0; 1 << DIGIT_BITS]; 2], nans: 0 };
                self.for_each_piece::<C>(end(slice), end(slice + 1), |elements, _| {
                    count::<C>(elements, digit, &mut counts);
                    false
                });
                counts
            });
            let sum = |bin: usize| counts.iter().map(|c| c.total(bin)).sum::<usize>();
            if digit.found.is_none() {
                need = which(counts.iter().map(|c| c.nans).sum());
            }
            let mut bin = 0;
            while need >= sum(bin) {
                need -= sum(bin);
                bin += 1;
            }
            digit.found = Some(digit.found.unwrap_or(0) << (high - digit.low) | bin as u64);
            high = digit.low;
            // After the last digit, `need` is a rank among equal elements: slices are skipped until the slice that contains the element.
            if high == low {
                at = 0;
                while need >= counts[at].total(bin) {
                    need -= counts[at].total(bin);
                    at += 1;
                }
            }
        }
        let mut index = 0;
        self.for_each_piece::<C>(end(at), end(at + 1), |elements, first| {
            let key = |v: &C| Some(v.order(lowest) >> low) == digit.found;
            let found = elements.iter().enumerate().filter(|(_, v)| key(v)).nth(need);
            need -= if found.is_none() { elements.iter().filter(|v| key(v)).count() } else { 0 };
            index = found.map_or(0, |(i, _)| first + i) as i64;
            found.is_some()
        });
        index
    }
}

/// One digit of the keys: bits `low` to `high`. Only elements whose higher digits equal `found` are counted.
#[derive(Clone, Copy)]
struct Digit {
    lowest: u64,
    found: Option<u64>,
    low: usize,
    high: usize,
}

/// Two histograms of digits, used in turn: adjacent elements often have the same digit, and two increments of the same count would wait
/// for each other.
struct DigitCounts {
    bins: [[u32; 1 << DIGIT_BITS]; 2],
    nans: usize,
}

impl DigitCounts {
    fn total(&self, bin: usize) -> usize {
        (self.bins[0][bin] + self.bins[1][bin]) as usize
    }
}

vectorised! {
    /// Adds elements to the histogram of a digit.
    fn count<'a, C: SortElement>(_simd: S, elements: &'a [C], digit: Digit, counts: &'a mut DigitCounts) {
        let Digit { lowest, found, low, high } = digit;
        let of = |v: C| (v.order(lowest) >> low) as usize & ((1 << (high - low)) - 1);
        let Some(found) = found else {
            counts.nans += elements.iter().filter(|v| v.partial_cmp(v).is_none()).count();
            let (pairs, rest) = elements.as_chunks::<2>();
            for pair in pairs {
                counts.bins[0][of(pair[0])] += 1;
                counts.bins[1][of(pair[1])] += 1;
            }
            return rest.iter().for_each(|v| counts.bins[0][of(*v)] += 1);
        };
        let (blocks, rest) = elements.as_chunks::<COMPARED_LEN>();
        for block in blocks {
            let mut bits = bits_where(block, |v| v.order(lowest) >> high == found);
            while bits != 0 {
                let i = bits.trailing_zeros() as usize;
                bits &= bits - 1;
                counts.bins[i & 1][of(block[i])] += 1;
            }
        }
        for v in rest.iter().filter(|v| v.order(lowest) >> high == found) {
            counts.bins[0][of(*v)] += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares selection with a full sort, for lines of every kind, with ties, infinities and NaN.
    fn checked<C: SortElement>(of: impl Fn(f64) -> C) {
        let mut state = 1u64;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % below
        };
        for n in [1usize, 7, 31, 32, 33, 64, 100, 127, 128, 129, 768, 5000, 40_000] {
            for kind in 0..7 {
                let line: Vec<C> = (0..n)
                    .map(|i| {
                        of(match (kind, random(8)) {
                            (0, _) => random(1 << 20) as f64 - 500_000.0,
                            (1, _) => random(5) as f64,
                            (2, _) => i as f64,
                            (3, _) => -(i as f64),
                            (4, 0) => f64::NAN,
                            (4, 1) | (5, _) => f64::NEG_INFINITY,
                            (4, 2) => f64::INFINITY,
                            (4, _) => random(100) as f64 - 50.0,
                            (6, 0..7) => f64::NAN,
                            _ => -0.0 * random(2) as f64,
                        })
                    })
                    .collect();
                for k in [1, 2, 8, 9, 20, 32, 33, 70, 500].into_iter().filter(|&k| k <= n) {
                    for (descending, pieces) in [(true, n), (false, n), (true, n.div_ceil(3))] {
                        let mut keys: Vec<C::Key> =
                            line.iter().enumerate().map(|(i, v)| v.key(i, descending)).collect();
                        keys.sort_unstable();
                        let right: Vec<i64> = keys[..k].iter().map(|&key| C::index(key) as i64).collect();
                        let mut first = FirstK::<C>::new(k, descending);
                        line.chunks(pieces).enumerate().for_each(|(i, piece)| first.scan(piece, i * pieces));
                        let mut got = vec![0; k];
                        first.write(&mut got);
                        assert_eq!(got, right, "{k} of {n}, {kind} {descending} {pieces}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_first_k_match_a_full_sort() {
        checked(|x| x as f32);
        checked(|x| x);
        checked(|x| x as i64);
    }
}

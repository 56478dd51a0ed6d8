//! Sorting, binary search, and selection by rank (top-k, k-th value, median) on the CPU. Elements are sorted by keys that include the index, with the standard library's sort; one-byte
//! elements are counted instead. Selection does not sort whole lines. Lines are partitioned among threads.

use std::ops::Range;

use crate::backend::cpu::convert::{load_tile, read_or_convert};
use crate::backend::cpu::dispatch::{for_compute, for_size, vectorised};
use crate::backend::cpu::lines::for_each_line;
use crate::backend::cpu::scalar::{Number, is_nan};
use crate::backend::problem::lines::Lines;
use crate::backend::problem::select::{RankedElement, Search, Selected, Sorting, TopK, dims_with, key_bits};
use crate::device::cpu::{parallel, threads};
use crate::layout::collapse::StridedDims;
use crate::storage::with_host;
use crate::{Compute, DType, Result, Tensor};

/// The maximum length of a line whose keys are sorted in a temporary buffer. Longer lines are sorted in the memory of their results.
const MAX_KEYED_LINE_LEN: usize = 1 << 16;
/// The maximum length of a line that is converted as a whole before it is searched.
const MAX_CONVERTED_LEN: usize = 1 << 16;
/// The number of values that are searched for side by side.
const SEARCHES_AT_ONCE: usize = 16;
/// The number of values that a job of the thread pool searches for.
const VALUES_PER_JOB: usize = 1 << 10;
/// The number of elements of a long line that are read at a time.
const PIECE_LEN: usize = 1 << 14;
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

/// Element types with sort keys.
trait SortElement: Number {
    /// An unsigned number that orders like the elements, and orders equal elements by index. -0 equals 0, and NaN is above all other
    /// elements. Descending order reverses the order of the elements, but not that of the indices.
    type Key: Ord + Copy + Send + Sync;

    /// Returns the key of the element at `index`.
    fn key(self, index: usize, descending: bool) -> Self::Key;
    /// Returns the greatest key that an element equal to `self` can have.
    fn last_key(self, descending: bool) -> Self::Key;
    /// Returns the index that `key` includes.
    fn index(key: Self::Key) -> usize;
    /// Returns an unsigned number that orders like the elements, minus [`lowest`](SortElement::lowest). Equal elements have equal
    /// numbers.
    fn order(self, lowest: u64) -> u64;
    /// The least `order` of the elements of a dtype, which is subtracted so that orders start at 0.
    fn lowest(dtype: DType) -> u64 {
        match dtype {
            DType::I32 => (1 << 63) - (1 << 31),
            DType::I16 => (1 << 63) - (1 << 15),
            DType::I8 => (1 << 63) - (1 << 7),
            DType::U32 | DType::U8 | DType::Bool => 1 << 63,
            _ => 0,
        }
    }
    /// Returns an element whose key is `key`.
    fn value(key: Self::Key, descending: bool) -> Self;
}

macro_rules! ordered {
    ($t:ident, $key:ident, $bits:ident, $to_bits:expr, $from_bits:expr) => {
        impl SortElement for $t {
            type Key = $key;

            #[inline(always)]
            fn key(self, index: usize, descending: bool) -> $key {
                let bits: $bits = $to_bits(self);
                $key::from(if descending { !bits } else { bits }) << $bits::BITS | index as $key
            }
            #[inline(always)]
            fn last_key(self, descending: bool) -> $key {
                self.key($bits::MAX as usize, descending)
            }
            #[inline(always)]
            fn order(self, lowest: u64) -> u64 {
                let bits: $bits = $to_bits(self);
                u64::from(bits).wrapping_sub(lowest)
            }
            #[inline(always)]
            fn index(key: $key) -> usize {
                key as $bits as usize
            }
            #[inline(always)]
            fn value(key: $key, descending: bool) -> $t {
                let bits = (key >> $bits::BITS) as $bits;
                $from_bits(if descending { !bits } else { bits })
            }
        }
    };
}

macro_rules! ordered_float {
    ($t:ident, $key:ident, $bits:ident) => {
        ordered!(
            $t,
            $key,
            $bits,
            |v: $t| match (v + 0.0).to_bits() {
                _ if v.is_nan() => $bits::MAX,
                bits if bits >> ($bits::BITS - 1) == 1 => !bits,
                bits => bits | 1 << ($bits::BITS - 1),
            },
            |bits: $bits| $t::from_bits(match bits >> ($bits::BITS - 1) {
                0 => !bits,
                _ => bits & ($bits::MAX >> 1),
            })
        );
    };
}

ordered_float!(f32, u64, u32);
ordered_float!(f64, u128, u64);
ordered!(i64, u128, u64, |v: i64| v as u64 ^ 1 << 63, |bits: u64| (bits ^ 1 << 63) as i64);

pub(crate) fn run_sort(s: &Sorting) -> Result<()> {
    match s.x.shape().dims()[s.d] > MAX_KEYED_LINE_LEN {
        true => for_compute!(s.x.dtype.compute(), C => sort_long_lines::<C>(s)),
        false => for_compute!(s.x.dtype.compute(), C => sort_short_lines::<C>(s)),
    }
}

/// Sorts long lines. The keys are stored in the memory of the indices or, if they do not fit there, in a temporary tensor, so that the
/// allocator accounts for all temporary memory.
fn sort_long_lines<C: SortElement>(s: &Sorting) -> Result<()> {
    let &Sorting { x, d, descending, values, indices } = s;
    let lines = Lines::new(x, d);
    let (n, size, inner) = (lines.n, x.dtype.size(), lines.inner);
    // A key of 32 bits and an index of 32 bits are packed into one 64-bit number.
    let packed = key_bits(x.dtype)[1] <= 32 && u32::try_from(n).is_ok();
    let groups = if inner == 1 { lines.count.min(threads()) } else { 1 };
    let per_group = lines.count.div_ceil(groups);
    let groups = lines.count.div_ceil(per_group);
    let make = |numel: usize, dtype| Tensor::empty_with_shape(numel, dtype, x.device());
    let keys = make(groups * if packed { 1 } else { 2 * n }, DType::I64)?;
    // If the result's lines are interleaved, a sorted line needs memory of its own.
    let beside = if inner == 1 { 0 } else { n };
    let (line_values, line_indices) = (make(beside, x.dtype)?, make(beside, DType::I64)?);
    let storages = [values, indices, &keys, &line_values, &line_indices].map(|t| &t.storage);
    with_host(&[&x.storage], &storages, |reads, writes| {
        let sort = |line: usize, values: &mut [u8], indices: &mut [u8], keys: &mut [u8]| {
            let line = Line::new(x, reads[0], &lines, line);
            let indices: &mut [i64] = bytemuck::cast_slice_mut(indices);
            let flip = if descending { u64::MAX >> (64 - key_bits(x.dtype)[1]) } else { 0 };
            line.sort::<C>(flip, packed, indices, bytemuck::cast_slice_mut(keys));
            line.gather(indices, values);
        };
        let [values, indices, keys, line_values, line_indices] = writes else { unreachable!("five are written") };
        let (of_values, of_indices, of_keys) = (n * size, n * 8, keys.len() / groups / 8 * 8);
        let (values, indices) = (&mut values[..lines.count * of_values], &mut indices[..lines.count * of_indices]);
        if inner == 1 {
            let sizes = [per_group * of_values, per_group * of_indices, of_keys];
            let keys = &mut keys[..groups * of_keys];
            return parallel::for_each_chunks(&mut [values, indices, keys], &sizes, |group, parts| {
                let [values, indices, keys] = parts else { unreachable!("three are cut") };
                let lines = values.chunks_mut(of_values).zip(indices.chunks_mut(of_indices));
                lines.enumerate().for_each(|(i, (values, indices))| sort(group * per_group + i, values, indices, keys));
            });
        }
        let (line_values, line_indices) = (&mut line_values[..of_values], &mut line_indices[..of_indices]);
        for line in 0..lines.count {
            sort(line, line_values, line_indices, keys);
            let at = line / inner * inner * n + line % inner;
            for (out, from, size) in [(&mut *values, &*line_values, size), (&mut *indices, &*line_indices, 8)] {
                let to = out[at * size..].chunks_mut(inner * size).zip(from.chunks_exact(size));
                to.for_each(|(to, from)| to[..size].copy_from_slice(from));
            }
        }
    })
}

/// One line of a tensor, given by the bytes of the tensor's storage.
#[derive(Clone, Copy)]
struct Line<'a> {
    dtype: DType,
    bytes: &'a [u8],
    start: isize,
    step: isize,
    n: usize,
}

impl<'a> Line<'a> {
    fn new(x: &Tensor, bytes: &'a [u8], lines: &Lines, line: usize) -> Line<'a> {
        let start = x.layout.offset as isize + lines.strided.offsets(line)[0];
        Line { dtype: x.dtype, bytes, start, step: lines.step, n: lines.n }
    }

    /// Calls `f(piece, index of its first element)` for consecutive pieces of the given elements, until `f` returns true.
    fn for_each_piece<C: Number>(
        &self,
        elements: Range<usize>,
        buffer: &mut Vec<C>,
        mut f: impl FnMut(&[C], usize) -> bool,
    ) {
        for first in elements.clone().step_by(PIECE_LEN) {
            let (n, at) = (PIECE_LEN.min(elements.end - first), (self.start + first as isize * self.step) as usize);
            if f(read_or_convert((self.dtype, self.bytes), at, self.step, n, buffer), first) {
                return;
            }
        }
    }

    /// Computes the indices of the elements in sorted order. Keys are compared after an exclusive or with `flip`.
    fn sort<C: SortElement>(&self, flip: u64, packed: bool, indices: &mut [i64], keys: &mut [i64]) {
        let lowest = C::lowest(self.dtype);
        let each = |f: &mut dyn FnMut(u64, usize)| {
            self.for_each_piece::<C>(0..self.n, &mut Vec::new(), |elements, first| {
                elements.iter().enumerate().for_each(|(i, v)| f(v.order(lowest) ^ flip, first + i));
                false
            });
        };
        if self.dtype.size() == 1 {
            // For each value, the sorted position of the next element that has this value.
            let mut next = [0usize; 257];
            each(&mut |key, _| next[key as usize + 1] += 1);
            (1..next.len()).for_each(|v| next[v] += next[v - 1]);
            return each(&mut |key, i| {
                indices[next[key as usize]] = i as i64;
                next[key as usize] += 1;
            });
        }
        if packed {
            let keys: &mut [u64] = bytemuck::cast_slice_mut(indices);
            each(&mut |key, i| keys[i] = key << 32 | i as u64);
            keys.sort_unstable();
            return keys.iter_mut().for_each(|key| *key &= u64::from(u32::MAX));
        }
        let (pairs, _) = bytemuck::cast_slice_mut::<i64, u64>(keys).as_chunks_mut::<2>();
        each(&mut |key, i| pairs[i] = [key, i as u64]);
        pairs.sort_unstable();
        indices.iter_mut().zip(pairs).for_each(|(index, pair)| *index = pair[1] as i64);
    }

    /// Copies the elements at `indices` to `to`.
    fn gather(&self, indices: &[i64], to: &mut [u8]) {
        fn elements<T: bytemuck::Pod>(line: &Line<'_>, indices: &[i64], to: &mut [u8]) {
            let from: &[T] = bytemuck::cast_slice(line.bytes);
            let to: &mut [T] = bytemuck::cast_slice_mut(to);
            for (to, &i) in to.iter_mut().zip(indices) {
                *to = from[(line.start + i as isize * line.step) as usize];
            }
        }
        for_size!(self.dtype.size(), T => elements::<T>(self, indices, to))
    }

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
                self.for_each_piece::<C>(end(slice)..end(slice + 1), &mut Vec::new(), |elements, _| {
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
        self.for_each_piece::<C>(end(at)..end(at + 1), &mut Vec::new(), |elements, first| {
            let key = |v: &C| Some(v.order(lowest) >> low) == digit.found;
            let found = elements.iter().enumerate().filter(|(_, v)| key(v)).nth(need);
            need -= if found.is_none() { elements.iter().filter(|v| key(v)).count() } else { 0 };
            index = found.map_or(0, |(i, _)| first + i) as i64;
            found.is_some()
        });
        index
    }
}

fn sort_short_lines<C: SortElement>(s: &Sorting) -> Result<()> {
    for_each_line::<C>(s.x, s.d, s.values, Some(s.indices), |line, values, indices| {
        let mut keys: Vec<C::Key> = line.iter().enumerate().map(|(i, &v)| v.key(i, s.descending)).collect();
        // The index in each key makes all keys different, so the sort is stable.
        keys.sort_unstable();
        for ((value, index), key) in values.iter_mut().zip(indices).zip(keys) {
            let i = C::index(key);
            (*value, *index) = (line[i], i as i64);
        }
    })
}

pub(crate) fn searchsorted(s: &Search) -> Result<()> {
    for_compute!(s.sorted.dtype.compute(), C => searchsorted_as::<C>(s))
}

fn searchsorted_as<C: Number>(s: &Search) -> Result<()> {
    let &Search { sorted: x, lines, step, values: v, right, out } = s;
    let n = x.shape().dims().last().copied().unwrap_or(1);
    let strided = StridedDims::new(v.shape(), [&lines.strides[..], v.strides()]);
    let finds = out.dtype == DType::Bool;
    with_host(&[&x.storage, &v.storage], &[&out.storage], |reads, writes| {
        let one = |t: &Tensor, bytes: &[u8], at: isize| {
            let mut element = [C::from_i32(0)];
            load_tile(t.dtype, bytes, (t.layout.offset as isize + at) as usize, 0, &mut element);
            element[0]
        };
        // If all values search the same line, the line is read in place or converted only once.
        let single = lines.strides.iter().all(|&stride| stride == 0) && (1..u32::MAX as usize).contains(&n);
        let in_place = step == 1 && x.dtype == C::COMPUTE.dtype();
        let mut converted = Vec::new();
        let line = match single && (in_place || n <= MAX_CONVERTED_LEN) {
            true => read_or_convert((x.dtype, reads[0]), x.layout.offset, step, n, &mut converted),
            false => &[],
        };
        let find = |p: usize, value: C| {
            let start = strided.offsets(p)[0];
            let (mut low, mut high) = (0, n);
            while low < high {
                let between = low + (high - low) / 2;
                let element = one(x, reads[0], start + between as isize * step);
                let beyond = if right { element > value } else { element >= value };
                if beyond { high = between } else { low = between + 1 }
            }
            low
        };
        let size = out.dtype.size();
        let rows = v.is_contiguous();
        parallel::for_each_chunk(&mut writes[0][..out.numel() * size], VALUES_PER_JOB * size, |job, out| {
            let (mut values, mut found) = ([C::from_i32(0); VALUES_PER_JOB], [0u32; VALUES_PER_JOB]);
            let (first, count) = (job * VALUES_PER_JOB, out.len() / size);
            let (values, found) = (&mut values[..count], &mut found[..count]);
            match rows {
                true => load_tile(v.dtype, reads[1], v.layout.offset + first, 1, values),
                false => {
                    values.iter_mut().zip(first..).for_each(|(to, p)| *to = one(v, reads[1], strided.offsets(p)[1]))
                }
            }
            if !line.is_empty() {
                search_line::<C>(line, values, right, found);
            }
            let position = |i: usize| if line.is_empty() { find(first + i, values[i]) } else { found[i] as usize };
            match finds {
                true if line.is_empty() => out.iter_mut().enumerate().for_each(|(i, out)| {
                    let (at, row) = (position(i), strided.offsets(first + i)[0]);
                    *out = u8::from(at < n && one(x, reads[0], row + at as isize * step) == values[i]);
                }),
                true => out.iter_mut().zip(&*values).zip(&*found).for_each(|((out, value), &at)| {
                    *out = u8::from(line.get(at as usize).is_some_and(|element| element == value));
                }),
                false => {
                    let out: &mut [i64] = bytemuck::cast_slice_mut(out);
                    out.iter_mut().enumerate().for_each(|(i, out)| *out = position(i) as i64);
                }
            }
        });
    })
}

vectorised! {
    /// For each value, counts the elements of a sorted line that come before the value. All searches take the same number of steps, so
    /// that several run side by side.
    fn search_line<'a, C: Number>(_simd: S, line: &'a [C], values: &'a [C], right: bool, found: &'a mut [u32]) {
        match right {
            true => search_steps(line, values, found, |element, value| element > value),
            false => search_steps(line, values, found, |element, value| element >= value),
        }
    }
}

/// For each value, counts the elements of a sorted line for which `after` is false. A NaN value is before every element, as in PyTorch.
#[inline(always)]
fn search_steps<C: Number>(line: &[C], values: &[C], found: &mut [u32], after: impl Fn(C, C) -> bool) {
    for (values, found) in values.chunks(SEARCHES_AT_ONCE).zip(found.chunks_mut(SEARCHES_AT_ONCE)) {
        found.fill(0);
        let mut left = line.len();
        while left > 1 {
            let half = left / 2;
            for (at, value) in found.iter_mut().zip(values) {
                *at += if after(line[*at as usize + half - 1], *value) { 0 } else { half as u32 };
            }
            left -= half;
        }
        for (at, value) in found.iter_mut().zip(values) {
            *at += u32::from(!after(line[*at as usize], *value));
        }
    }
}

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
pub(crate) fn topk(t: &TopK) -> Result<Selected> {
    // f32 lines too long for a 32-bit index in the key are compared as f64.
    let compute = match t.x.dtype.compute() {
        Compute::F32 if u32::try_from(t.x.shape().dims()[t.d]).is_err() => Compute::F64,
        compute => compute,
    };
    select_indices(t.x, t.d, t.k, |out| for_compute!(compute, C => topk_as::<C>(t, out)))
}

/// Returns, for each line, the index of the element with the rank that the problem asks for.
pub(crate) fn kth(r: &RankedElement) -> Result<Selected> {
    select_indices(r.x, r.d, 1, |out| for_compute!(r.x.dtype.compute(), C => kth_as::<C>(r, out)))
}

/// Allocates the tensor of indices, and calls `choose` to fill it unless it is empty.
fn select_indices(x: &Tensor, d: usize, k: usize, choose: impl FnOnce(&Tensor) -> Result<()>) -> Result<Selected> {
    let out = Tensor::empty_with_shape(dims_with(x, d, k), DType::I64, x.device())?;
    if out.numel() > 0 {
        choose(&out)?;
    }
    Ok(out.into())
}

fn topk_as<C: SortElement>(t: &TopK, out: &Tensor) -> Result<()> {
    let (&TopK { x, k, descending, .. }, lines) = (t, Lines::new(t.x, t.d));
    // If lines are interleaved in the result, the indices of each line are first collected in contiguous memory.
    let contiguous_indices =
        Tensor::empty_with_shape(if lines.inner > 1 { out.numel() } else { 0 }, DType::I64, x.device())?;
    with_host(&[&x.storage], &[&out.storage, &contiguous_indices.storage], |reads, writes| {
        let [out, contiguous_indices] = writes else { unreachable!("two are written") };
        let out: &mut [i64] = &mut bytemuck::cast_slice_mut(out)[..lines.count * k];
        let contiguous_indices: &mut [i64] =
            &mut bytemuck::cast_slice_mut(contiguous_indices)[..if lines.inner > 1 { lines.count * k } else { 0 }];
        let scan = |kept: &mut FirstK<C>, buffer: &mut Vec<C>, line: usize, elements: Range<usize>| {
            Line::new(x, reads[0], &lines, line).for_each_piece::<C>(elements, buffer, |piece, first| {
                kept.scan(piece, first);
                false
            });
        };
        let threads = threads();
        if lines.count < threads && lines.n >= threads * PIECE_LEN && k <= PIECE_LEN {
            // Each thread selects from a part of the line; then the selected elements of all parts are merged.
            for (line, to) in out.chunks_mut(k).enumerate() {
                let parts = parallel::map(threads, 1, |i| {
                    let mut kept = FirstK::<C>::new(k, descending);
                    let end = |i: usize| lines.n / threads * i + (lines.n % threads) * i / threads;
                    scan(&mut kept, &mut Vec::new(), line, end(i)..end(i + 1));
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
                scan(&mut kept, &mut buffer, job * group + i, 0..lines.n);
                kept.write(to);
            }
        };
        parallel::for_each_chunk(found, group * k, part);
        for (line, found) in contiguous_indices.chunks(k).enumerate() {
            let to = line / lines.inner * lines.inner * k + line % lines.inner;
            out[to..].iter_mut().step_by(lines.inner).zip(found).for_each(|(to, &index)| *to = index);
        }
    })
}

fn kth_as<C: SortElement>(r: &RankedElement, out: &Tensor) -> Result<()> {
    let (&RankedElement { x, rank: nth, .. }, lines) = (r, Lines::new(r.x, r.d));
    let ranks = nth.ranks().unwrap_or(x);
    with_host(&[&x.storage, &ranks.storage], &[&out.storage], |reads, writes| {
        let out: &mut [i64] = &mut bytemuck::cast_slice_mut(&mut *writes[0])[..lines.count];
        let listed = |line: usize| bytemuck::cast_slice::<u8, i64>(reads[1])[ranks.layout.offset + line];
        let line_of = |line: usize| Line::new(x, reads[0], &lines, line);
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
                let nans = line.iter().filter(|v| is_nan(**v)).count();
                keys.clear();
                keys.extend(line.iter().enumerate().map(|(i, v)| v.key(i, false)));
                let rank = nth.rank(lines.n, nans, || listed(number));
                *to = C::index(*keys.select_nth_unstable(rank).1) as i64;
            }
        };
        parallel::for_each_chunk(out, group, part);
    })
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
            counts.nans += elements.iter().filter(|v| is_nan(**v)).count();
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

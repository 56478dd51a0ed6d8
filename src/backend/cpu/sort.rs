//! Sorting and binary search on the CPU. Elements are sorted by keys that include the index, with the standard library's sort; one-byte
//! elements are counted instead. Lines are partitioned among threads.

use crate::backend::cpu::convert::{load_tile, read_or_convert};
use crate::backend::cpu::dispatch::{for_compute, for_size};
use crate::backend::cpu::lines::{Line, for_each_line};
use crate::backend::cpu::scalar::Number;
use crate::backend::cpu::vectorised::vectorised;
use crate::backend::problem::lines::Lines;
use crate::backend::problem::select::key_bits;
use crate::device::cpu::{parallel, threads};
use crate::layout::collapse::StridedDims;
use crate::storage::with_host;
use crate::tensor::Layout;
use crate::{Compute, DType, Result, Tensor};

/// The maximum length of a line whose keys are sorted in a temporary buffer. Longer lines are sorted in the memory of their results.
const MAX_KEYED_LINE_LEN: usize = 1 << 16;
/// The maximum length of a line that is converted as a whole before it is searched.
const MAX_CONVERTED_LEN: usize = 1 << 16;
/// The number of values that are searched for side by side.
const SEARCHES_AT_ONCE: usize = 16;
/// The number of values that a job of the thread pool searches for.
const VALUES_PER_JOB: usize = 1 << 10;

/// Element types with sort keys.
pub(crate) trait SortElement: Number {
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

/// Returns the type in which a tensor's elements are compared. f32 lines too long for a 32-bit index in the key are compared as f64.
pub(crate) fn compared_in(x: &Tensor, n: usize) -> Compute {
    match x.dtype.compute() {
        Compute::F32 if u32::try_from(n).is_err() => Compute::F64,
        compute => compute,
    }
}

pub(crate) fn run_sort(x: &Tensor, d: usize, descending: bool, values: &Tensor, indices: &Tensor) -> Result<()> {
    let n = x.shape().dims()[d];
    if n > MAX_KEYED_LINE_LEN {
        return for_compute!(x.dtype.compute(), C => sort_long_lines::<C>(x, d, descending, values, indices));
    }
    for_compute!(x.dtype.compute(), C => sort_short_lines::<C>(x, d, descending, values, indices))
}

/// Sorts long lines. The keys are stored in the memory of the indices or, if they do not fit there, in a temporary tensor, so that the
/// allocator accounts for all temporary memory.
fn sort_long_lines<C: SortElement>(
    x: &Tensor,
    d: usize,
    descending: bool,
    values: &Tensor,
    indices: &Tensor,
) -> Result<()> {
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
            let start = x.layout.offset as isize + lines.strided.offsets(line)[0];
            let line = Line { dtype: x.dtype, bytes: reads[0], start, step: lines.step, n };
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

impl Line<'_> {
    /// Computes the indices of the elements in sorted order. Keys are compared after an exclusive or with `flip`.
    fn sort<C: SortElement>(&self, flip: u64, packed: bool, indices: &mut [i64], keys: &mut [i64]) {
        let lowest = C::lowest(self.dtype);
        let each = |f: &mut dyn FnMut(u64, usize)| {
            self.for_each_piece::<C>(0, self.n, |elements, first| {
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
}

fn sort_short_lines<C: SortElement>(
    x: &Tensor,
    d: usize,
    descending: bool,
    values: &Tensor,
    indices: &Tensor,
) -> Result<()> {
    for_each_line::<C>(x, d, values, Some(indices), |line, values, indices| {
        let mut keys: Vec<C::Key> = line.iter().enumerate().map(|(i, &v)| v.key(i, descending)).collect();
        // The index in each key makes all keys different, so the sort is stable.
        keys.sort_unstable();
        for ((value, index), key) in values.iter_mut().zip(indices).zip(keys) {
            let i = C::index(key);
            (*value, *index) = (line[i], i as i64);
        }
    })
}

pub(crate) fn searchsorted(
    x: &Tensor,
    lines: &Layout,
    step: isize,
    v: &Tensor,
    right: bool,
    out: &Tensor,
) -> Result<()> {
    for_compute!(x.dtype.compute(), C => searchsorted_as::<C>(x, lines, step, v, right, out))
}

fn searchsorted_as<C: Number>(
    x: &Tensor,
    lines: &Layout,
    step: isize,
    v: &Tensor,
    right: bool,
    out: &Tensor,
) -> Result<()> {
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
            let values = &mut values[..count];
            match rows {
                true => load_tile(v.dtype, reads[1], v.layout.offset + first, 1, values),
                false => {
                    values.iter_mut().zip(first..).for_each(|(to, p)| *to = one(v, reads[1], strided.offsets(p)[1]))
                }
            }
            if line.is_empty() {
                for (i, (value, out)) in values.iter().zip(out.chunks_exact_mut(size)).enumerate() {
                    let at = find(first + i, *value);
                    match finds {
                        true => {
                            let start = strided.offsets(first + i)[0];
                            out[0] = u8::from(at < n && one(x, reads[0], start + at as isize * step) == *value);
                        }
                        false => out.copy_from_slice(&(at as i64).to_ne_bytes()),
                    }
                }
                return;
            }
            let found = &mut found[..count];
            search_line::<C>(line, values, right, found);
            match finds {
                true => {
                    let is_in =
                        |(value, &at): (&C, &u32)| line.get(at as usize).is_some_and(|element| element == value);
                    out.iter_mut().zip(values.iter().zip(&*found)).for_each(|(out, pair)| *out = u8::from(is_in(pair)));
                }
                false => {
                    let out: &mut [i64] = bytemuck::cast_slice_mut(out);
                    out.iter_mut().zip(found).for_each(|(out, at)| *out = i64::from(*at));
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

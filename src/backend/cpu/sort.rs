//! Sorting on the CPU: std's sort of keys with their indices, or counts of elements of a byte; lines are partitioned among threads.

use crate::backend::cpu::convert::{load_tile, read};
use crate::backend::cpu::lines::{Line, each};
use crate::backend::cpu::scalar::Number;
use crate::backend::cpu::vectorised::vectorised;
use crate::backend::problem::lines::Lines;
use crate::backend::problem::select::digits;
use crate::device::cpu::{parallel, threads};
use crate::layout::collapse::StridedDims;
use crate::storage::with_host;
use crate::tensor::Layout;
use crate::{Compute, DType, Result, Tensor};

/// Longer lines are sorted in the memory of their results.
const LONG: usize = 1 << 16;
/// The longest line that is converted before it is searched.
const CONVERTED: usize = 1 << 16;
/// Values that are searched for side by side.
const SIDE: usize = 16;
/// Values that a job of the pool searches for.
const JOB: usize = 1 << 10;

/// Elements whose order keys give.
pub(crate) trait Ordered: Number {
    /// An unsigned number that orders as the elements do, equal ones by their indices: -0 and 0 are equal, NaN is above
    /// everything. Of a descending order the elements are the other way round, not the indices.
    type Key: Ord + Copy + Send + Sync;

    fn key(self, index: usize, descending: bool) -> Self::Key;
    /// The last of the keys of elements that equal this one.
    fn last_key(self, descending: bool) -> Self::Key;
    fn index(key: Self::Key) -> usize;
    /// An unsigned number that orders as the elements do, less [`lowest`](Ordered::lowest); equal elements have the same.
    fn order(self, lowest: u64) -> u64;
    /// The least order of a dtype's elements, which is subtracted so that orders begin with 0.
    fn lowest(dtype: DType) -> u64 {
        match dtype {
            DType::I32 => (1 << 63) - (1 << 31),
            DType::U32 | DType::U8 | DType::Bool => 1 << 63,
            _ => 0,
        }
    }
    /// An element that has this key.
    fn value(key: Self::Key, descending: bool) -> Self;
}

macro_rules! ordered {
    ($t:ident, $key:ident, $bits:ident, $to_bits:expr, $from_bits:expr) => {
        impl Ordered for $t {
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

/// The type to compare a tensor's elements in: floats that a key of their own could not number are taken as f64.
pub(crate) fn compared_in(x: &Tensor, n: usize) -> Compute {
    match x.dtype.compute() {
        Compute::F32 if u32::try_from(n).is_err() => Compute::F64,
        compute => compute,
    }
}

pub(crate) fn run(x: &Tensor, d: usize, descending: bool, values: &Tensor, indices: &Tensor) -> Result<()> {
    let n = x.shape().dims()[d];
    if n > LONG {
        return match x.dtype.compute() {
            Compute::F32 => long_lines::<f32>(x, d, descending, values, indices),
            Compute::F64 => long_lines::<f64>(x, d, descending, values, indices),
            Compute::I64 => long_lines::<i64>(x, d, descending, values, indices),
        };
    }
    match x.dtype.compute() {
        Compute::F32 => run_as::<f32>(x, d, descending, values, indices),
        Compute::F64 => run_as::<f64>(x, d, descending, values, indices),
        Compute::I64 => run_as::<i64>(x, d, descending, values, indices),
    }
}

/// Sorts lines whose keys are in the memory of their indices, or where they do not fit in this in a tensor, so that the allocator counts
/// all temporaries.
fn long_lines<C: Ordered>(x: &Tensor, d: usize, descending: bool, values: &Tensor, indices: &Tensor) -> Result<()> {
    let lines = Lines::new(x, d);
    let (n, size, inner) = (lines.n, x.dtype.size(), lines.inner);
    // Keys of 32 bits and indices of 32 bits are sorted as one number.
    let packed = digits(x.dtype)[1] <= 32 && u32::try_from(n).is_ok();
    let groups = if inner == 1 { lines.count.min(threads()) } else { 1 };
    let per_group = lines.count.div_ceil(groups);
    let groups = lines.count.div_ceil(per_group);
    let make = |numel: usize, dtype| Tensor::empty_like_shape(numel, dtype, x.device());
    let keys = make(groups * if packed { 1 } else { 2 * n }, DType::I64)?;
    // One sorted line, where lines are interleaved in the result.
    let beside = if inner == 1 { 0 } else { n };
    let (line_values, line_indices) = (make(beside, x.dtype)?, make(beside, DType::I64)?);
    let storages = [values, indices, &keys, &line_values, &line_indices].map(|t| &t.storage);
    with_host(&[&x.storage], &storages, |reads, writes| {
        let sort = |line: usize, values: &mut [u8], indices: &mut [u8], keys: &mut [u8]| {
            let start = x.layout.offset as isize + lines.strided.offsets(line)[0];
            let line = Line { dtype: x.dtype, bytes: reads[0], start, step: lines.step, n };
            let indices: &mut [i64] = bytemuck::cast_slice_mut(indices);
            let flip = if descending { u64::MAX >> (64 - digits(x.dtype)[1]) } else { 0 };
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
    /// The indices of the elements in order, of keys whose bits `flip` are the other way round.
    fn sort<C: Ordered>(&self, flip: u64, packed: bool, indices: &mut [i64], keys: &mut [i64]) {
        let lowest = C::lowest(self.dtype);
        let each = |f: &mut dyn FnMut(u64, usize)| {
            self.pieces::<C>(0, self.n, |elements, first| {
                elements.iter().enumerate().for_each(|(i, v)| f(v.order(lowest) ^ flip, first + i));
                false
            });
        };
        if self.dtype.size() == 1 {
            // Where the next element of each value goes.
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

    /// The elements of these indices.
    fn gather(&self, indices: &[i64], to: &mut [u8]) {
        fn elements<T: bytemuck::Pod>(line: &Line<'_>, indices: &[i64], to: &mut [u8]) {
            let from: &[T] = bytemuck::cast_slice(line.bytes);
            let to: &mut [T] = bytemuck::cast_slice_mut(to);
            for (to, &i) in to.iter_mut().zip(indices) {
                *to = from[(line.start + i as isize * line.step) as usize];
            }
        }
        match self.dtype.size() {
            1 => elements::<u8>(self, indices, to),
            2 => elements::<u16>(self, indices, to),
            4 => elements::<u32>(self, indices, to),
            _ => elements::<u64>(self, indices, to),
        }
    }
}

fn run_as<C: Ordered>(x: &Tensor, d: usize, descending: bool, values: &Tensor, indices: &Tensor) -> Result<()> {
    each::<C>(x, d, values, Some(indices), |line, values, indices| {
        let mut keys: Vec<C::Key> = line.iter().enumerate().map(|(i, &v)| v.key(i, descending)).collect();
        // The indices make equal keys different: this is stable.
        keys.sort_unstable();
        for ((value, index), key) in values.iter_mut().zip(indices).zip(keys) {
            let i = C::index(key);
            (*value, *index) = (line[i], i as i64);
        }
    })
}

pub(crate) fn search(x: &Tensor, lines: &Layout, step: isize, v: &Tensor, right: bool, out: &Tensor) -> Result<()> {
    match x.dtype.compute() {
        Compute::F32 => search_as::<f32>(x, lines, step, v, right, out),
        Compute::F64 => search_as::<f64>(x, lines, step, v, right, out),
        Compute::I64 => search_as::<i64>(x, lines, step, v, right, out),
    }
}

fn search_as<C: Number>(x: &Tensor, lines: &Layout, step: isize, v: &Tensor, right: bool, out: &Tensor) -> Result<()> {
    let n = x.shape().dims().last().copied().unwrap_or(1);
    let strided = StridedDims::new(v.shape(), [&lines.strides[..], v.strides()]);
    let finds = out.dtype == DType::Bool;
    with_host(&[&x.storage, &v.storage], &[&out.storage], |reads, writes| {
        let one = |t: &Tensor, bytes: &[u8], at: isize| {
            let mut element = [C::from_i32(0)];
            load_tile(t.dtype, bytes, (t.layout.offset as isize + at) as usize, 0, &mut element);
            element[0]
        };
        // One line for all values is read where it is, or converted once.
        let single = lines.strides.iter().all(|&stride| stride == 0) && (1..u32::MAX as usize).contains(&n);
        let in_place = step == 1 && x.dtype == C::COMPUTE.dtype();
        let mut converted = Vec::new();
        let line = match single && (in_place || n <= CONVERTED) {
            true => read((x.dtype, reads[0]), x.layout.offset, step, n, &mut converted),
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
        parallel::for_each_chunk(&mut writes[0][..out.numel() * size], JOB * size, |job, out| {
            let (mut values, mut found) = ([C::from_i32(0); JOB], [0u32; JOB]);
            let (first, count) = (job * JOB, out.len() / size);
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
    /// How many elements of a sorted line come before each value. All searches take the same steps, so that several go on at a time.
    fn search_line<'a, C: Number>(_simd: S, line: &'a [C], values: &'a [C], right: bool, found: &'a mut [u32]) {
        match right {
            true => search_steps(line, values, found, |element, value| element > value),
            false => search_steps(line, values, found, |element, value| element >= value),
        }
    }
}

/// Counts the elements of a sorted line that are not `after` each value: NaN counts as before everything, as in PyTorch.
#[inline(always)]
fn search_steps<C: Number>(line: &[C], values: &[C], found: &mut [u32], after: impl Fn(C, C) -> bool) {
    for (values, found) in values.chunks(SIDE).zip(found.chunks_mut(SIDE)) {
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

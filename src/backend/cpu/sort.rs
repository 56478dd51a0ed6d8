//! Sorting on the CPU: std's sort of keys with their indices; lines are partitioned among threads.

use crate::backend::cpu::convert::load_tile;
use crate::backend::cpu::lines::each;
use crate::backend::cpu::scalar::Number;
use crate::device::cpu::parallel;
use crate::layout::collapse::StridedDims;
use crate::storage::with_host;
use crate::tensor::Layout;
use crate::{Compute, Result, Tensor};

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
    match compared_in(x, x.shape().dims()[d]) {
        Compute::F32 => run_as::<f32>(x, d, descending, values, indices),
        Compute::F64 => run_as::<f64>(x, d, descending, values, indices),
        Compute::I64 => run_as::<i64>(x, d, descending, values, indices),
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
    with_host(&[&x.storage, &v.storage], &[&out.storage], |reads, writes| {
        let one = |t: &Tensor, bytes: &[u8], at: isize| {
            let mut element = [C::from_i32(0)];
            load_tile(t.dtype, bytes, (t.layout.offset as isize + at) as usize, 0, &mut element);
            element[0]
        };
        let find = |p: usize| {
            let at = strided.offsets(p);
            let value = one(v, reads[1], at[1]);
            let (mut low, mut high) = (0, n);
            while low < high {
                let between = low + (high - low) / 2;
                let element = one(x, reads[0], at[0] + between as isize * step);
                let beyond = if right { element > value } else { element >= value };
                if beyond { high = between } else { low = between + 1 }
            }
            low as i64
        };
        let out: &mut [i64] = &mut bytemuck::cast_slice_mut(&mut *writes[0])[..out.numel()];
        parallel::for_each_chunk(out, JOB, |i, out| {
            out.iter_mut().enumerate().for_each(|(k, o)| *o = find(i * JOB + k));
        });
    })
}

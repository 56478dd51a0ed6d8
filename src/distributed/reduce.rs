//! Elementwise reductions over ranks. They combine values in the order of the ranks, so that all ranks get the same bits.

use bytemuck::Zeroable;
use half::{bf16, f16};

use crate::backend::cpu::kernels::convert;
use crate::device::cpu::parallel;
use crate::{DType, Error, Result};

/// How a collective combines the values of an element from all ranks (PyTorch's `ReduceOp`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// The sum. f16 and bf16 are added in f32 and rounded once. Integers wrap around.
    Sum,
    /// The sum divided by the number of ranks (PyTorch's `AVG`). Floats only.
    Mean,
    /// The largest value; NaN if any value is NaN.
    Max,
    /// The smallest value; NaN if any value is NaN.
    Min,
}

/// The number of elements that are reduced at a time. Their accumulators stay in the L1 cache.
const TILE_ELEMENTS: usize = 512;

/// The number of bytes that a thread reduces as one task.
const CHUNK_BYTES: usize = 1 << 17;

/// An element type and the type in which it is accumulated.
trait Accumulate: bytemuck::Pod + Send + Sync {
    type Acc: Copy + Zeroable;
    /// Returns `from` in the accumulator type: `from` itself, or a conversion stored in `buffer`, which has the same length.
    fn widen<'a>(from: &'a [Self], buffer: &'a mut [Self::Acc]) -> &'a [Self::Acc];
    /// Rounds the accumulated values to the element type.
    fn narrow(from: &[Self::Acc], to: &mut [Self]);
    fn sum(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn max(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn min(a: Self::Acc, b: Self::Acc) -> Self::Acc;
    fn divide(v: Self::Acc, n: usize) -> Self::Acc;
}

macro_rules! floats {
    ($($t:ty, $wide:ty, $widen:expr, $narrow:expr;)*) => { $(
        impl Accumulate for $t {
            type Acc = $wide;
            fn widen<'a>(from: &'a [$t], buffer: &'a mut [$wide]) -> &'a [$wide] { $widen(from, buffer) }
            fn narrow(from: &[$wide], to: &mut [$t]) { $narrow(from, to) }
            fn sum(a: $wide, b: $wide) -> $wide { a + b }
            fn max(a: $wide, b: $wide) -> $wide { if a >= b || a.is_nan() { a } else { b } }
            fn min(a: $wide, b: $wide) -> $wide { if a <= b || a.is_nan() { a } else { b } }
            fn divide(v: $wide, n: usize) -> $wide { v / n as $wide }
        }
    )* };
}

macro_rules! integers {
    ($($t:ty),*) => { $(
        impl Accumulate for $t {
            type Acc = $t;
            fn widen<'a>(from: &'a [$t], _: &'a mut [$t]) -> &'a [$t] { from }
            fn narrow(from: &[$t], to: &mut [$t]) { to.copy_from_slice(from) }
            fn sum(a: $t, b: $t) -> $t { a.wrapping_add(b) }
            fn max(a: $t, b: $t) -> $t { Ord::max(a, b) }
            fn min(a: $t, b: $t) -> $t { Ord::min(a, b) }
            fn divide(v: $t, n: usize) -> $t { v / n as $t }
        }
    )* };
}

fn identity<'a, T>(from: &'a [T], _: &'a mut [T]) -> &'a [T] {
    from
}

fn widen_f16<'a>(from: &'a [f16], buffer: &'a mut [f32]) -> &'a [f32] {
    convert::widen(from, buffer);
    buffer
}

fn widen_bf16<'a>(from: &'a [bf16], buffer: &'a mut [f32]) -> &'a [f32] {
    buffer.iter_mut().zip(from).for_each(|(wide, v)| *wide = f32::from_bits(u32::from(v.to_bits()) << 16));
    buffer
}

fn narrow_bf16(from: &[f32], to: &mut [bf16]) {
    to.iter_mut().zip(from).for_each(|(to, &v)| *to = bf16::from_bits(convert::bf16_bits(v)));
}

floats! {
    f32, f32, identity, |from, to: &mut [f32]| to.copy_from_slice(from);
    f64, f64, identity, |from, to: &mut [f64]| to.copy_from_slice(from);
    f16, f32, widen_f16, convert::narrow;
    bf16, f32, widen_bf16, narrow_bf16;
}
integers!(i64, i32, i16, i8, u32, u8);

impl ReduceOp {
    /// Returns [`Error::UnsupportedDType`] unless the reduction is defined for this dtype.
    pub(super) fn check(self, op: &'static str, dtype: DType) -> Result<()> {
        let expected = match self {
            ReduceOp::Mean if !dtype.is_float() => "floats for the mean: use the sum",
            ReduceOp::Sum if dtype == DType::Bool => {
                "numbers: for bools use the maximum, which tells whether any is true"
            }
            _ => return Ok(()),
        };
        Err(Error::UnsupportedDType { op, dtype, expected })
    }

    /// Reduces equally long slices of `dtype` into `own`: the lower ranks' values (`before`), this rank's (`own`) and the higher ranks' (`after`).
    pub(super) fn reduce(self, dtype: DType, before: &[&[u8]], own: &mut [u8], after: &[&[u8]]) {
        match dtype {
            DType::F32 => self.reduce_as::<f32>(before, own, after),
            DType::F64 => self.reduce_as::<f64>(before, own, after),
            DType::F16 => self.reduce_as::<f16>(before, own, after),
            DType::BF16 => self.reduce_as::<bf16>(before, own, after),
            DType::I64 => self.reduce_as::<i64>(before, own, after),
            DType::I32 => self.reduce_as::<i32>(before, own, after),
            DType::U32 => self.reduce_as::<u32>(before, own, after),
            DType::I16 => self.reduce_as::<i16>(before, own, after),
            DType::I8 => self.reduce_as::<i8>(before, own, after),
            DType::U8 | DType::Bool => self.reduce_as::<u8>(before, own, after),
        }
    }

    fn reduce_as<T: Accumulate>(self, before: &[&[u8]], own: &mut [u8], after: &[&[u8]]) {
        let n = before.len() + 1 + after.len();
        match self {
            ReduceOp::Sum => reduce_ranks::<T>(before, own, after, T::sum, |v| v),
            ReduceOp::Mean => reduce_ranks::<T>(before, own, after, T::sum, |v| T::divide(v, n)),
            ReduceOp::Max => reduce_ranks::<T>(before, own, after, T::max, |v| v),
            ReduceOp::Min => reduce_ranks::<T>(before, own, after, T::min, |v| v),
        }
    }
}

/// Combines the ranks' elements with `step`, in the order of the ranks. Applies `last` to each result and writes it to `own`.
fn reduce_ranks<T: Accumulate>(
    before: &[&[u8]],
    own: &mut [u8],
    after: &[&[u8]],
    step: impl Fn(T::Acc, T::Acc) -> T::Acc + Sync,
    last: impl Fn(T::Acc) -> T::Acc + Sync,
) {
    let [before, after] =
        [before, after].map(|ranks| -> Vec<&[T]> { ranks.iter().map(|&bytes| bytemuck::cast_slice(bytes)).collect() });
    let own: &mut [T] = bytemuck::cast_slice_mut(own);
    let chunk = CHUNK_BYTES / size_of::<T>();
    parallel::for_each_chunk(own, chunk, |i, own| {
        for (j, own) in own.chunks_mut(TILE_ELEMENTS).enumerate() {
            let at = i * chunk + j * TILE_ELEMENTS;
            let (mut sums, mut buffer) = ([T::Acc::zeroed(); TILE_ELEMENTS], [T::Acc::zeroed(); TILE_ELEMENTS]);
            let (sums, buffer) = (&mut sums[..own.len()], &mut buffer[..own.len()]);
            let mut first = true;
            let mut add = |values: &[T]| {
                let values = T::widen(values, buffer);
                match std::mem::take(&mut first) {
                    true => sums.copy_from_slice(values),
                    false => sums.iter_mut().zip(values).for_each(|(sum, &v)| *sum = step(*sum, v)),
                }
            };
            before.iter().for_each(|rank| add(&rank[at..][..own.len()]));
            add(own);
            after.iter().for_each(|rank| add(&rank[at..][..own.len()]));
            sums.iter_mut().for_each(|sum| *sum = last(*sum));
            T::narrow(sums, own);
        }
    });
}

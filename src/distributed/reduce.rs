//! Reductions of what the ranks have, element by element, in the order of the ranks: every rank has the same bits.

use bytemuck::Zeroable;
use half::{bf16, f16};

use crate::device::cpu::{convert, parallel};
use crate::{DType, Error, Result};

/// What becomes of the ranks' values of an element (PyTorch's `ReduceOp`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReduceOp {
    /// Their sum: halves add up in f32 and are rounded once, integers wrap around.
    Sum,
    /// Their sum divided by their number; floats only.
    Mean,
    /// The largest; NaN where any is.
    Max,
    /// The smallest; NaN where any is.
    Min,
}

/// Elements that are reduced at a time, in the first-level cache.
const TILE: usize = 512;

/// Bytes that a thread reduces at a time.
const CHUNK: usize = 1 << 17;

/// A type of elements and the one that it is reduced in.
trait Reduced: bytemuck::Pod + Send + Sync {
    type In: Copy + Zeroable;
    /// `from` in that type: itself, or in `room`, which has its length.
    fn widen<'a>(from: &'a [Self], room: &'a mut [Self::In]) -> &'a [Self::In];
    fn narrow(from: &[Self::In], to: &mut [Self]);
    fn sum(a: Self::In, b: Self::In) -> Self::In;
    fn max(a: Self::In, b: Self::In) -> Self::In;
    fn min(a: Self::In, b: Self::In) -> Self::In;
    /// v / n
    fn divided(v: Self::In, n: usize) -> Self::In;
}

macro_rules! floats {
    ($($t:ty, $wide:ty, $widen:expr, $narrow:expr;)*) => { $(
        impl Reduced for $t {
            type In = $wide;
            fn widen<'a>(from: &'a [$t], room: &'a mut [$wide]) -> &'a [$wide] { $widen(from, room) }
            fn narrow(from: &[$wide], to: &mut [$t]) { $narrow(from, to) }
            fn sum(a: $wide, b: $wide) -> $wide { a + b }
            fn max(a: $wide, b: $wide) -> $wide { if a >= b || a.is_nan() { a } else { b } }
            fn min(a: $wide, b: $wide) -> $wide { if a <= b || a.is_nan() { a } else { b } }
            fn divided(v: $wide, n: usize) -> $wide { v / n as $wide }
        }
    )* };
}

macro_rules! integers {
    ($($t:ty),*) => { $(
        impl Reduced for $t {
            type In = $t;
            fn widen<'a>(from: &'a [$t], _: &'a mut [$t]) -> &'a [$t] { from }
            fn narrow(from: &[$t], to: &mut [$t]) { to.copy_from_slice(from) }
            fn sum(a: $t, b: $t) -> $t { a.wrapping_add(b) }
            fn max(a: $t, b: $t) -> $t { Ord::max(a, b) }
            fn min(a: $t, b: $t) -> $t { Ord::min(a, b) }
            fn divided(v: $t, n: usize) -> $t { v / n as $t }
        }
    )* };
}

fn same<'a, T>(from: &'a [T], _: &'a mut [T]) -> &'a [T] {
    from
}

fn widen_f16<'a>(from: &'a [f16], room: &'a mut [f32]) -> &'a [f32] {
    convert::widen(from, room);
    room
}

fn widen_bf16<'a>(from: &'a [bf16], room: &'a mut [f32]) -> &'a [f32] {
    room.iter_mut().zip(from).for_each(|(wide, v)| *wide = f32::from_bits(u32::from(v.to_bits()) << 16));
    room
}

fn narrow_bf16(from: &[f32], to: &mut [bf16]) {
    to.iter_mut().zip(from).for_each(|(to, &v)| *to = bf16::from_bits(convert::bf16_bits(v)));
}

floats! {
    f32, f32, same, |from, to: &mut [f32]| to.copy_from_slice(from);
    f64, f64, same, |from, to: &mut [f64]| to.copy_from_slice(from);
    f16, f32, widen_f16, convert::narrow;
    bf16, f32, widen_bf16, narrow_bf16;
}
integers!(i64, i32, u32, u8);

impl ReduceOp {
    /// Whether elements of this dtype have it.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`]
    pub(super) fn check(self, op: &'static str, dtype: DType) -> Result<()> {
        let expected = match self {
            ReduceOp::Mean if !dtype.is_float() => "floats for the mean: take the sum",
            ReduceOp::Sum if dtype == DType::Bool => "numbers: the maximum of bools says whether any is true",
            _ => return Ok(()),
        };
        Err(Error::UnsupportedDType { op, dtype, expected })
    }

    /// Makes of `own` what becomes of the ranks' bytes, which are as many and elements of this dtype: those of the ranks before
    /// this one, its own, and those of the ranks after it.
    pub(super) fn reduce(self, dtype: DType, before: &[&[u8]], own: &mut [u8], after: &[&[u8]]) {
        match dtype {
            DType::F32 => self.reduce_as::<f32>(before, own, after),
            DType::F64 => self.reduce_as::<f64>(before, own, after),
            DType::F16 => self.reduce_as::<f16>(before, own, after),
            DType::BF16 => self.reduce_as::<bf16>(before, own, after),
            DType::I64 => self.reduce_as::<i64>(before, own, after),
            DType::I32 => self.reduce_as::<i32>(before, own, after),
            DType::U32 => self.reduce_as::<u32>(before, own, after),
            DType::U8 | DType::Bool => self.reduce_as::<u8>(before, own, after),
        }
    }

    fn reduce_as<T: Reduced>(self, before: &[&[u8]], own: &mut [u8], after: &[&[u8]]) {
        let n = before.len() + 1 + after.len();
        match self {
            ReduceOp::Sum => fold::<T>(before, own, after, T::sum, |v| v),
            ReduceOp::Mean => fold::<T>(before, own, after, T::sum, |v| T::divided(v, n)),
            ReduceOp::Max => fold::<T>(before, own, after, T::max, |v| v),
            ReduceOp::Min => fold::<T>(before, own, after, T::min, |v| v),
        }
    }
}

fn fold<T: Reduced>(
    before: &[&[u8]],
    own: &mut [u8],
    after: &[&[u8]],
    step: impl Fn(T::In, T::In) -> T::In + Sync,
    last: impl Fn(T::In) -> T::In + Sync,
) {
    let [before, after] =
        [before, after].map(|ranks| -> Vec<&[T]> { ranks.iter().map(|&bytes| bytemuck::cast_slice(bytes)).collect() });
    let own: &mut [T] = bytemuck::cast_slice_mut(own);
    let chunk = CHUNK / size_of::<T>();
    parallel::for_each_chunk(own, chunk, |i, own| {
        for (j, own) in own.chunks_mut(TILE).enumerate() {
            let at = i * chunk + j * TILE;
            let (mut sums, mut room) = ([T::In::zeroed(); TILE], [T::In::zeroed(); TILE]);
            let (sums, room) = (&mut sums[..own.len()], &mut room[..own.len()]);
            let mut first = true;
            let mut add = |values: &[T]| {
                let values = T::widen(values, room);
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

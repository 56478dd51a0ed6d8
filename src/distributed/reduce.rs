//! Reductions of what the ranks have, element by element, in the order of the ranks: every rank has the same bits.

use bytemuck::Zeroable;
use half::{bf16, f16};

use crate::device::cpu::parallel;
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

/// Tiles that a thread reduces at a time.
const TILES: usize = 32;

/// A type of elements and the one that it is reduced in.
trait Reduced: bytemuck::Pod + Send + Sync {
    type In: Copy + Zeroable;
    fn widen(self) -> Self::In;
    fn narrow(v: Self::In) -> Self;
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
            fn widen(self) -> $wide { $widen(self) }
            fn narrow(v: $wide) -> $t { $narrow(v) }
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
            fn widen(self) -> $t { self }
            fn narrow(v: $t) -> $t { v }
            fn sum(a: $t, b: $t) -> $t { a.wrapping_add(b) }
            fn max(a: $t, b: $t) -> $t { Ord::max(a, b) }
            fn min(a: $t, b: $t) -> $t { Ord::min(a, b) }
            fn divided(v: $t, n: usize) -> $t { v / n as $t }
        }
    )* };
}

floats! {
    f32, f32, std::convert::identity, std::convert::identity;
    f64, f64, std::convert::identity, std::convert::identity;
    f16, f32, f16::to_f32, f16::from_f32;
    bf16, f32, bf16::to_f32, bf16::from_f32;
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

    /// Writes to `out` what becomes of the ranks' bytes, which are as many and elements of this dtype.
    pub(super) fn reduce(self, dtype: DType, ranks: &[&[u8]], out: &mut [u8]) {
        match dtype {
            DType::F32 => self.reduce_as::<f32>(ranks, out),
            DType::F64 => self.reduce_as::<f64>(ranks, out),
            DType::F16 => self.reduce_as::<f16>(ranks, out),
            DType::BF16 => self.reduce_as::<bf16>(ranks, out),
            DType::I64 => self.reduce_as::<i64>(ranks, out),
            DType::I32 => self.reduce_as::<i32>(ranks, out),
            DType::U32 => self.reduce_as::<u32>(ranks, out),
            DType::U8 | DType::Bool => self.reduce_as::<u8>(ranks, out),
        }
    }

    fn reduce_as<T: Reduced>(self, ranks: &[&[u8]], out: &mut [u8]) {
        let n = ranks.len();
        match self {
            ReduceOp::Sum => fold::<T>(ranks, out, T::sum, |v| v),
            ReduceOp::Mean => fold::<T>(ranks, out, T::sum, |v| T::divided(v, n)),
            ReduceOp::Max => fold::<T>(ranks, out, T::max, |v| v),
            ReduceOp::Min => fold::<T>(ranks, out, T::min, |v| v),
        }
    }
}

fn fold<T: Reduced>(
    ranks: &[&[u8]],
    out: &mut [u8],
    step: impl Fn(T::In, T::In) -> T::In + Sync,
    last: impl Fn(T::In) -> T::In + Sync,
) {
    let ranks: Vec<&[T]> = ranks.iter().map(|bytes| bytemuck::cast_slice(bytes)).collect();
    let out: &mut [T] = bytemuck::cast_slice_mut(out);
    parallel::for_each_chunk(out, TILES * TILE, |i, out| {
        for (j, out) in out.chunks_mut(TILE).enumerate() {
            let mut sums = [T::In::zeroed(); TILE];
            let sums = &mut sums[..out.len()];
            for (k, rank) in ranks.iter().enumerate() {
                let values = &rank[(i * TILES + j) * TILE..][..out.len()];
                match k {
                    0 => sums.iter_mut().zip(values).for_each(|(sum, v)| *sum = v.widen()),
                    _ => sums.iter_mut().zip(values).for_each(|(sum, v)| *sum = step(*sum, v.widen())),
                }
            }
            out.iter_mut().zip(sums).for_each(|(out, sum)| *out = T::narrow(last(*sum)));
        }
    });
}

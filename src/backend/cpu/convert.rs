//! Conversion between stored elements and the types that formulas are evaluated in.
//!
//! The rules are those of Rust's `as`: floats to integers saturate and truncate, NaN gives 0, integers wrap. Every number except 0 is
//! `true`. f16 and bf16 convert through f32 and round to nearest even. `kernels/prelude.cl` implements the same rules.

use bytemuck::Pod;
use half::f16;

use crate::backend::cpu::dispatch::{Function, function, vectorised};
use crate::backend::cpu::kernels::convert::{bf16_bits, narrow, narrow_bf16, truncate, widen};
use crate::backend::cpu::scalar::Number;
use crate::{Compute, DType};

/// The number of f16 elements converted at a time if the elements are strided, or are not computed in f32.
const F16_CHUNK_LEN: usize = 64;

/// Fills `out` with elements of `bytes`, beginning at element `start` and `stride` elements apart.
pub(crate) fn load_tile<C: Number>(dtype: DType, bytes: &[u8], start: usize, stride: isize, out: &mut [C]) {
    macro_rules! load {
        ($T:ty, $x:ident => $e:expr) => {{
            function!(F, $x: $T => $e);
            load::<$T, C, F>(bytes, start, stride, out)
        }};
    }
    match dtype {
        DType::F32 => load!(f32, x => C::from_f32(x)),
        DType::F16 => load_f16(bytes, start, stride, out),
        DType::BF16 => load!(u16, x => C::from_f32(f32::from_bits(u32::from(x) << 16))),
        DType::F64 => load!(f64, x => C::from_f64(x)),
        DType::I64 => load!(i64, x => C::from_i64(x)),
        DType::I32 => load!(i32, x => C::from_i32(x)),
        DType::I16 => load!(i16, x => C::from_i32(i32::from(x))),
        DType::I8 => load!(i8, x => C::from_i32(i32::from(x))),
        DType::U8 => load!(u8, x => C::from_i32(i32::from(x))),
        DType::U32 => load!(u32, x => C::from_i64(i64::from(x))),
        DType::Bool => load!(u8, x => C::from_bool(x != 0)),
    }
}

/// Returns `n` elements: in place if they are contiguous and need no conversion, otherwise converted into `buffer`.
#[inline]
pub(crate) fn read_or_convert<'b, C: Number>(
    (dtype, bytes): (DType, &'b [u8]),
    start: usize,
    stride: isize,
    n: usize,
    buffer: &'b mut Vec<C>,
) -> &'b [C] {
    if stride == 1 && dtype == C::COMPUTE.dtype() {
        return &bytemuck::cast_slice(bytes)[start..][..n];
    }
    buffer.resize(n, C::from_i32(0));
    load_tile(dtype, bytes, start, stride, buffer);
    buffer
}

/// Writes `values` to elements of `bytes`, beginning at element `start` and `stride` elements apart.
pub(crate) fn store_tile<C: Number>(dtype: DType, values: &[C], bytes: &mut [u8], start: usize, stride: isize) {
    macro_rules! store {
        ($T:ty, $x:ident => $e:expr) => {{
            function!(F: $T, $x: C => $e);
            store::<$T, C, F>(values, bytes, start, stride)
        }};
    }
    match dtype {
        DType::F32 => store!(f32, x => x.to_f32()),
        DType::F16 => store_f16(values, bytes, start, stride),
        DType::BF16 if stride == 1 && C::COMPUTE == Compute::F32 => {
            let to = &mut bytemuck::cast_slice_mut(bytes)[start..start + values.len()];
            narrow_bf16(bytemuck::cast_slice(values), to);
        }
        DType::BF16 => store!(u16, x => bf16_bits(x.to_f32())),
        DType::F64 => store!(f64, x => x.to_f64()),
        DType::I64 if stride == 1 && C::COMPUTE == Compute::F32 => {
            let to = &mut bytemuck::cast_slice_mut(bytes)[start..start + values.len()];
            truncate(bytemuck::cast_slice(values), to);
        }
        DType::I64 => store!(i64, x => x.to_i64()),
        DType::I32 => store!(i32, x => x.to_i32()),
        DType::I16 => store!(i16, x => x.to_i16()),
        DType::I8 => store!(i8, x => x.to_i8()),
        DType::U8 => store!(u8, x => x.to_u8()),
        DType::U32 => store!(u32, x => x.to_u32()),
        DType::Bool => store!(u8, x => u8::from(x.is_true())),
    }
}

vectorised! {
    /// Writes the function's result for each element of `from` to `to`.
    fn convert_each<'a, A: Copy, B: Copy, F: Function<A, B>>(_simd: S, from: &'a [A], to: &'a mut [B]) {
        to.iter_mut().zip(from).for_each(|(to, &x)| *to = F::call(x));
    }
}

fn load<T: Pod, C: Copy, F: Function<T, C>>(bytes: &[u8], start: usize, stride: isize, out: &mut [C]) {
    let src: &[T] = bytemuck::cast_slice(bytes);
    if stride == 1 {
        let from = &src[start..start + out.len()];
        convert_each::<T, C, F>(from, out);
    } else {
        let mut i = start;
        for o in out {
            *o = F::call(src[i]);
            i = i.wrapping_add_signed(stride); // wrapping, because the step after the last element may leave the slice
        }
    }
}

fn store<T: Pod, C: Copy, F: Function<C, T>>(values: &[C], bytes: &mut [u8], start: usize, stride: isize) {
    let dst: &mut [T] = bytemuck::cast_slice_mut(bytes);
    if stride == 1 {
        let to = &mut dst[start..start + values.len()];
        convert_each::<C, T, F>(values, to);
    } else {
        let mut i = start;
        for &x in values {
            dst[i] = F::call(x);
            i = i.wrapping_add_signed(stride);
        }
    }
}

fn load_f16<C: Number>(bytes: &[u8], start: usize, stride: isize, out: &mut [C]) {
    let src: &[f16] = bytemuck::cast_slice(bytes);
    if stride == 1 && C::COMPUTE == Compute::F32 {
        let from = &src[start..start + out.len()];
        return widen(from, bytemuck::cast_slice_mut(out));
    }
    let (mut gathered, mut singles) = ([f16::ZERO; F16_CHUNK_LEN], [0.0f32; F16_CHUNK_LEN]);
    let mut i = start;
    for out in out.chunks_mut(F16_CHUNK_LEN) {
        let n = out.len();
        for half in &mut gathered[..n] {
            *half = src[i];
            i = i.wrapping_add_signed(stride);
        }
        widen(&gathered[..n], &mut singles[..n]);
        out.iter_mut().zip(&singles).for_each(|(o, &x)| *o = C::from_f32(x));
    }
}

fn store_f16<C: Number>(values: &[C], bytes: &mut [u8], start: usize, stride: isize) {
    let dst: &mut [f16] = bytemuck::cast_slice_mut(bytes);
    if stride == 1 && C::COMPUTE == Compute::F32 {
        let to = &mut dst[start..start + values.len()];
        return narrow(bytemuck::cast_slice(values), to);
    }
    let (mut rounded, mut singles) = ([f16::ZERO; F16_CHUNK_LEN], [0.0f32; F16_CHUNK_LEN]);
    let mut i = start;
    for values in values.chunks(F16_CHUNK_LEN) {
        let n = values.len();
        singles.iter_mut().zip(values).for_each(|(o, &x)| *o = x.to_f32());
        narrow(&singles[..n], &mut rounded[..n]);
        for &half in &rounded[..n] {
            dst[i] = half;
            i = i.wrapping_add_signed(stride);
        }
    }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    /// Returns numbers at the limits of dtypes, where conversions saturate, wrap or round.
    fn edges() -> Vec<f64> {
        let mut v = vec![0.0, -0.0, 0.4, -0.6, 0.5, 1.5, 2.5, 255.0, 256.0, -1.0, 300.7, 65504.0, 65520.0, 1e-8, 6e-5];
        v.extend([
            f64::NAN,
            f64::INFINITY,
            f64::NEG_INFINITY,
            1e300,
            -1e300,
            2147483648.0,
            -2147483649.0,
            4294967296.0,
        ]);
        v.extend([9.3e18, -9.3e18, 1.00390625, 1.01171875, 3.3895e38]);
        v
    }

    #[test]
    fn every_dtype_follows_the_rules_of_as() {
        for v in edges() {
            let x = v as f32;
            macro_rules! check {
                ($($d:ident $t:ty: $from32:expr, $from64:expr, $from_int:expr;)*) => { $( {
                    let mut bytes = vec![0u64; 4];
                    let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut bytes);
                    let mut got = |store: &dyn Fn(&mut [u8])| {
                        store(bytes);
                        bytemuck::cast_slice::<u8, $t>(bytes)[1]
                    };
                    let same = |a: $t, b: $t| assert!(a == b || (a != a && b != b), "{} {v}: {a} {b}", DType::$d);
                    same(got(&|b| store_tile(DType::$d, &[x], b, 1, 1)), $from32(x));
                    same(got(&|b| store_tile(DType::$d, &[v], b, 1, 1)), $from64(v));
                    same(got(&|b| store_tile(DType::$d, &[v as i64], b, 1, 1)), $from_int(v as i64));
                } )* };
            }
            check! {
                F32 f32: |x| x, |v| v as f32, |i| i as f32;
                F16 f16: f16::from_f32, |v| f16::from_f32(v as f32), |i| f16::from_f32(i as f32);
                BF16 bf16: bf16::from_f32, |v| bf16::from_f32(v as f32), |i| bf16::from_f32(i as f32);
                F64 f64: |x| x as f64, |v| v, |i| i as f64;
                I64 i64: |x| x as i64, |v| v as i64, |i| i;
                I32 i32: |x| x as i32, |v| v as i32, |i| i as i32;
                I16 i16: |x| x as i16, |v| v as i16, |i| i as i16;
                I8 i8: |x| x as i8, |v| v as i8, |i| i as i8;
                U8 u8: |x| x as u8, |v| v as u8, |i| i as u8;
                U32 u32: |x| x as u32, |v| v as u32, |i| i as u32;
                Bool u8: |x| (x != 0.0) as u8, |v| (v != 0.0) as u8, |i| (i != 0) as u8;
            }
        }
    }

    #[test]
    fn strides_offsets_and_lengths_for_every_dtype() {
        for dtype in DType::ALL {
            let room = 400;
            let mut storage = vec![0u64; room];
            let bytes: &mut [u8] = &mut bytemuck::cast_slice_mut(&mut storage)[..room * dtype.size()];
            let small = |i: usize| if dtype == DType::Bool { (i % 2) as f32 } else { (i % 100) as f32 };
            let all: Vec<f32> = (0..room).map(small).collect();
            store_tile(dtype, &all, bytes, 0, 1);
            for (start, stride) in [(0, 1), (3, 1), (5, 3), (399, -1), (399, -2), (7, 0)] {
                for len in [0, 1, 63, 64, 65, 129] {
                    let expected: Vec<f32> =
                        (0..len).map(|i| small((start as isize + stride * i as isize) as usize)).collect();
                    let mut got = vec![-1.0; len];
                    load_tile(dtype, bytes, start, stride, &mut got);
                    assert_eq!(got, expected, "{dtype} {start} {stride} {len}");
                    let mut wide = vec![-1i64; len];
                    load_tile(dtype, bytes, start, stride, &mut wide);
                    assert!(wide.iter().zip(&expected).all(|(&a, &b)| a as f32 == b));
                    if stride != 0 {
                        store_tile(dtype, &got, bytes, start, stride); // storing the same values again must change nothing
                    }
                }
            }
            let mut again = vec![0.0; room];
            load_tile(dtype, bytes, 0, 1, &mut again);
            assert_eq!(again, all);
        }
    }
}

//! Elements in storage to and from the types they are computed in.
//!
//! The rules are Rust's `as`: floats to integers saturate and truncate, NaN gives 0; integers wrap; anything that is not
//! 0 is `true`. f16 and bf16 round to nearest even and are reached through f32. `kernels/prelude.cl` does the same.

use half::f16;
use half::slice::HalfFloatSliceExt;
use pulp::{Arch, Simd, WithSimd};

use super::lane::Lane;
use crate::DType;

/// f16 elements converted at a time, in the processor's instructions where it has them.
const CHUNK: usize = 64;

/// Reads `out.len()` elements, the first at `start`, each next one `stride` elements on.
pub(crate) fn load_tile<C: Lane>(dtype: DType, bytes: &[u8], start: usize, stride: isize, out: &mut [C]) {
    match dtype {
        DType::F32 => load(bytes, start, stride, out, C::from_f32),
        DType::F16 => load_f16(bytes, start, stride, out),
        DType::BF16 => load(bytes, start, stride, out, |x: u16| C::from_f32(f32::from_bits(u32::from(x) << 16))),
        DType::F64 => load(bytes, start, stride, out, C::from_f64),
        DType::I64 => load(bytes, start, stride, out, C::from_i64),
        DType::I32 => load(bytes, start, stride, out, C::from_i32),
        DType::U8 => load(bytes, start, stride, out, |x: u8| C::from_i32(i32::from(x))),
        DType::U32 => load(bytes, start, stride, out, |x: u32| C::from_i64(i64::from(x))),
        DType::Bool => load(bytes, start, stride, out, |x: u8| C::truth(x != 0)),
    }
}

/// Writes `values`, the first at `start`, each next one `stride` elements on.
pub(crate) fn store_tile<C: Lane>(dtype: DType, values: &[C], bytes: &mut [u8], start: usize, stride: isize) {
    match dtype {
        DType::F32 => store(values, bytes, start, stride, C::to_f32),
        DType::F16 => store_f16(values, bytes, start, stride),
        DType::BF16 if stride == 1 => {
            let out = &mut bytemuck::cast_slice_mut(bytes)[start..start + values.len()];
            Arch::new().dispatch(RoundToBf16 { values, out });
        }
        DType::BF16 => store(values, bytes, start, stride, |x| bf16_bits(x.to_f32())),
        DType::F64 => store(values, bytes, start, stride, C::to_f64),
        DType::I64 => store(values, bytes, start, stride, C::to_i64),
        DType::I32 => store(values, bytes, start, stride, C::to_i32),
        DType::U8 => store(values, bytes, start, stride, C::to_u8),
        DType::U32 => store(values, bytes, start, stride, C::to_u32),
        DType::Bool => store(values, bytes, start, stride, |x| u8::from(x.is_true())),
    }
}

fn load<T: bytemuck::Pod, C>(bytes: &[u8], start: usize, stride: isize, out: &mut [C], f: impl Fn(T) -> C) {
    let src: &[T] = bytemuck::cast_slice(bytes);
    if stride == 1 {
        let src = &src[start..start + out.len()];
        out.iter_mut().zip(src).for_each(|(o, &x)| *o = f(x));
    } else {
        let mut i = start;
        for o in out {
            *o = f(src[i]);
            i = i.wrapping_add_signed(stride); // the step after the last may leave the range
        }
    }
}

fn store<T: bytemuck::Pod, C: Copy>(values: &[C], bytes: &mut [u8], start: usize, stride: isize, f: impl Fn(C) -> T) {
    let dst: &mut [T] = bytemuck::cast_slice_mut(bytes);
    if stride == 1 {
        let dst = &mut dst[start..start + values.len()];
        dst.iter_mut().zip(values).for_each(|(d, &x)| *d = f(x));
    } else {
        let mut i = start;
        for &x in values {
            dst[i] = f(x);
            i = i.wrapping_add_signed(stride);
        }
    }
}

fn load_f16<C: Lane>(bytes: &[u8], start: usize, stride: isize, out: &mut [C]) {
    let (mut halves, mut singles) = ([f16::ZERO; CHUNK], [0.0f32; CHUNK]);
    let mut i = start;
    for out in out.chunks_mut(CHUNK) {
        let n = out.len();
        load(bytes, i, stride, &mut halves[..n], |x: f16| x);
        halves[..n].convert_to_f32_slice(&mut singles[..n]);
        out.iter_mut().zip(&singles).for_each(|(o, &x)| *o = C::from_f32(x));
        i = i.wrapping_add_signed(stride * n as isize);
    }
}

fn store_f16<C: Lane>(values: &[C], bytes: &mut [u8], start: usize, stride: isize) {
    let (mut halves, mut singles) = ([f16::ZERO; CHUNK], [0.0f32; CHUNK]);
    let mut i = start;
    for values in values.chunks(CHUNK) {
        let n = values.len();
        singles.iter_mut().zip(values).for_each(|(o, &x)| *o = x.to_f32());
        halves[..n].convert_from_f32_slice(&singles[..n]);
        store(&halves[..n], bytes, i, stride, |x| x);
        i = i.wrapping_add_signed(stride * n as isize);
    }
}

/// Compiled for the processor's vectors.
struct RoundToBf16<'a, C> {
    values: &'a [C],
    out: &'a mut [u16],
}

impl<C: Lane> WithSimd for RoundToBf16<'_, C> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        self.out.iter_mut().zip(self.values).for_each(|(o, x)| *o = bf16_bits(x.to_f32()));
    }
}

/// As `bf16::from_f32`, without its branch.
#[inline(always)]
fn bf16_bits(x: f32) -> u16 {
    let u = x.to_bits();
    let rounded = (u.wrapping_add(0x7FFF + ((u >> 16) & 1)) >> 16) as u16;
    if x.is_nan() { (u >> 16) as u16 | 0x40 } else { rounded }
}

#[cfg(test)]
mod tests {
    use half::bf16;

    use super::*;

    /// Numbers at every edge of the conversions.
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
                        store_tile(dtype, &got, bytes, start, stride); // the same again changes nothing
                    }
                }
            }
            let mut again = vec![0.0; room];
            load_tile(dtype, bytes, 0, 1, &mut again);
            assert_eq!(again, all);
        }
    }
}

//! Conversions of slices by vector instructions that the compiler does not generate, and functions of two f16 or bf16 operands that are
//! computed in f32 without a temporary array.

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::DType;
use crate::backend::cpu::dispatch::{Function, vectorised};

/// Defines a conversion of slices of equal length, in vectors of 16 or 8 elements if the processor supports them. The remaining elements
/// are converted one by one.
macro_rules! conversion {
    ($(#[$doc:meta])* $name:ident($A:ty => $B:ty), $by_16:ident, $by_8:ident, |$from:ident, $to:ident| $rest:expr) => {
        $(#[$doc])*
        pub(crate) fn $name($from: &[$A], $to: &mut [$B]) {
            assert_eq!($from.len(), $to.len());
            #[cfg(target_arch = "x86_64")]
            if crate::device::cpu::has_avx512() {
                let ((from, $from), (to, $to)) = ($from.as_chunks(), $to.as_chunks_mut());
                // SAFETY: `has_avx512` detected AVX-512F, which implies F16C and AVX.
                unsafe { x86::$by_16(from, to) };
                return $rest;
            } else if is_x86_feature_detected!("f16c") && is_x86_feature_detected!("avx") {
                let ((from, $from), (to, $to)) = ($from.as_chunks(), $to.as_chunks_mut());
                // SAFETY: the condition above detected F16C and AVX.
                unsafe { x86::$by_8(from, to) };
                return $rest;
            }
            $rest
        }
    };
}

conversion! {
    /// Converts f16 to f32, exactly.
    widen(f16 => f32), widen_16, widen_8, |from, to| from.convert_to_f32_slice(to)
}
conversion! {
    /// Converts f32 to f16, rounded to nearest even.
    narrow(f32 => f16), narrow_16, narrow_8, |from, to| to.convert_from_f32_slice(from)
}

/// Converts f32 to i64, rounded towards zero. Values out of range become the nearest i64, NaN becomes 0.
pub(crate) fn truncate(from: &[f32], to: &mut [i64]) {
    assert_eq!(from.len(), to.len());
    #[cfg_attr(not(target_arch = "x86_64"), allow(unused_mut))]
    let (mut rest, mut last) = (from, to);
    #[cfg(target_arch = "x86_64")]
    if crate::device::cpu::has_avx512() && is_x86_feature_detected!("avx512dq") && is_x86_feature_detected!("avx512vl")
    {
        let ((from, from_rest), (to, to_rest)) = (rest.as_chunks(), last.as_chunks_mut());
        // SAFETY: the conditions above detected AVX-512F, AVX-512DQ and AVX-512VL.
        unsafe { x86::truncate(from, to) };
        (rest, last) = (from_rest, to_rest);
    }
    last.iter_mut().zip(rest).for_each(|(to, &x)| *to = x as i64);
}

/// Returns the bits of `bf16::from_f32(x)`, without a branch.
#[inline(always)]
pub(crate) fn bf16_bits(x: f32) -> u16 {
    let u = x.to_bits();
    let rounded = (u.wrapping_add(0x7FFF + ((u >> 16) & 1)) >> 16) as u16;
    if x.is_nan() { (u >> 16) as u16 | 0x40 } else { rounded }
}

/// Converts f32 to the bits of bf16, rounded to nearest even.
pub(crate) fn narrow_bf16(from: &[f32], to: &mut [u16]) {
    assert_eq!(from.len(), to.len());
    #[cfg(target_arch = "x86_64")]
    if !crate::device::cpu::has_avx512() && is_x86_feature_detected!("avx2") {
        let ((from, from_rest), (to, to_rest)) = (from.as_chunks(), to.as_chunks_mut());
        // SAFETY: the condition above detected AVX2.
        unsafe { x86::narrow_bf16_8(from, to) };
        return bf16_each(from_rest, to_rest);
    }
    bf16_each(from, to);
}

vectorised! {
    fn bf16_each<'a>(_simd: S, from: &'a [f32], to: &'a mut [u16]) {
        to.iter_mut().zip(from).for_each(|(to, &x)| *to = bf16_bits(x));
    }
}

/// An operand: f16 or bf16 elements given by their bits, or one number.
#[derive(Debug, Clone, Copy)]
pub(crate) enum HalfOperand<'a> {
    /// One element per result.
    Each(&'a [u16]),
    /// The same number for all results.
    One(f32),
}

/// Which of the two operands have one element per result; `number` replaces an operand that does not.
trait Form {
    fn call<F: Function<(f32, f32), f32>>(x: f32, y: f32, number: f32) -> f32;
}

macro_rules! forms {
    ($($(#[$doc:meta])* $name:ident: $x:ident, $y:ident, $number:ident => $args:expr;)*) => { $(
        $(#[$doc])*
        struct $name;
        impl Form for $name {
            #[inline(always)]
            fn call<F: Function<(f32, f32), f32>>($x: f32, $y: f32, $number: f32) -> f32 {
                F::call($args)
            }
        }
    )* };
}

forms! {
    Both: x, y, _number => (x, y);
    Left: x, _y, number => (x, number);
    Right: _x, y, number => (number, y);
}

/// Applies the function elementwise to operands of f16 or bf16.
pub(crate) fn map_halves<F: Function<(f32, f32), f32>>(dtype: DType, a: HalfOperand, b: HalfOperand, to: &mut [u16]) {
    macro_rules! map {
        ($form:ident, $round:expr) => {
            match (a, b) {
                (HalfOperand::Each(a), HalfOperand::Each(b)) => $form::<F, Both>(a, b, 0.0, to),
                (HalfOperand::Each(a), HalfOperand::One(y)) => $form::<F, Left>(a, a, y, to),
                (HalfOperand::One(x), HalfOperand::Each(b)) => $form::<F, Right>(b, b, x, to),
                (HalfOperand::One(x), HalfOperand::One(y)) => to.fill($round(F::call((x, y)))),
            }
        };
    }
    match dtype {
        DType::F16 => map!(map_f16_form, |y: f32| f16::from_f32(y).to_bits()),
        _ => map!(map_bf16_form, bf16_bits),
    }
}

vectorised! {
    fn map_bf16_form<'a, F: Function<(f32, f32), f32>, P: Form>(
        _simd: S, a: &'a [u16], b: &'a [u16], number: f32, to: &'a mut [u16]
    ) {
        assert!(a.len() == to.len() && b.len() == to.len());
        for ((to, &a), &b) in to.iter_mut().zip(a).zip(b) {
            let [a, b] = [a, b].map(|x| f32::from_bits(u32::from(x) << 16));
            *to = bf16_bits(P::call::<F>(a, b, number));
        }
    }
}

fn map_f16_form<F: Function<(f32, f32), f32>, P: Form>(a: &[u16], b: &[u16], number: f32, to: &mut [u16]) {
    assert!(a.len() == to.len() && b.len() == to.len());
    #[cfg(target_arch = "x86_64")]
    if crate::device::cpu::has_avx512() {
        let ((a, a_rest), (b, b_rest), (to, to_rest)) = (a.as_chunks(), b.as_chunks(), to.as_chunks_mut());
        // SAFETY: `has_avx512` detected AVX-512F, which implies F16C and AVX.
        unsafe { x86::map_16::<F, P>(a, b, number, to) };
        return map_f16_scalar::<F, P>(a_rest, b_rest, number, to_rest);
    } else if is_x86_feature_detected!("f16c") && is_x86_feature_detected!("avx") {
        let ((a, a_rest), (b, b_rest), (to, to_rest)) = (a.as_chunks(), b.as_chunks(), to.as_chunks_mut());
        // SAFETY: the condition above detected F16C and AVX.
        unsafe { x86::map_8::<F, P>(a, b, number, to) };
        return map_f16_scalar::<F, P>(a_rest, b_rest, number, to_rest);
    }
    map_f16_scalar::<F, P>(a, b, number, to);
}

/// Computes one element at a time.
fn map_f16_scalar<F: Function<(f32, f32), f32>, P: Form>(a: &[u16], b: &[u16], number: f32, to: &mut [u16]) {
    for ((to, &a), &b) in to.iter_mut().zip(a).zip(b) {
        let wide = |bits: u16| f16::from_bits(bits).to_f32();
        *to = f16::from_f32(P::call::<F>(wide(a), wide(b), number)).to_bits();
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::mem::transmute;

    use half::f16;

    use super::{Form, Function};

    /// Defines a function that converts a vector at a time. Neither slice has to be aligned to vectors.
    macro_rules! by_vectors {
        ($name:ident, $feature:literal, [$A:ty] -> [$B:ty; $n:literal], $load:ident, $store:ident, $convert:expr) => {
            #[target_feature(enable = $feature)]
            pub(super) fn $name(from: &[[$A; $n]], to: &mut [[$B; $n]]) {
                for (from, to) in from.iter().zip(to) {
                    // SAFETY: each array has as many bytes as its vector.
                    unsafe { $store(to.as_mut_ptr().cast(), $convert($load(from.as_ptr().cast()))) };
                }
            }
        };
    }

    const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT;

    by_vectors!(widen_16, "avx512f", [f16] -> [f32; 16], _mm256_loadu_si256, _mm512_storeu_ps, _mm512_cvtph_ps);
    by_vectors!(widen_8, "avx,f16c", [f16] -> [f32; 8], _mm_loadu_si128, _mm256_storeu_ps, _mm256_cvtph_ps);
    by_vectors!(narrow_16, "avx512f", [f32] -> [f16; 16], _mm512_loadu_ps, _mm256_storeu_si256, _mm512_cvtps_ph::<NEAREST>);
    by_vectors!(narrow_8, "avx,f16c", [f32] -> [f16; 8], _mm256_loadu_ps, _mm_storeu_si128, _mm256_cvtps_ph::<NEAREST>);

    by_vectors!(narrow_bf16_8, "avx2", [f32] -> [u16; 8], _mm256_loadu_ps, _mm_storeu_si128, bf16_bits_8);

    /// Returns the bits of bf16, as `bf16_bits` does.
    #[target_feature(enable = "avx2")]
    fn bf16_bits_8(x: __m256) -> __m128i {
        let bits = _mm256_castps_si256(x);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF)));
        let quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x40_0000));
        let is_nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
        let high = _mm256_srli_epi32::<16>(_mm256_blendv_epi8(rounded, quiet, is_nan));
        _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256::<1>(high))
    }

    /// Converts vectors of 8 elements. The conversion instruction already gives i64::MIN for values below the range.
    #[target_feature(enable = "avx512f,avx512dq,avx512vl")]
    pub(super) fn truncate(from: &[[f32; 8]], to: &mut [[i64; 8]]) {
        let (limit, most) = (_mm256_set1_ps(-(i64::MIN as f32)), _mm512_set1_epi64(i64::MAX));
        for (from, to) in from.iter().zip(to) {
            // SAFETY: the array has as many bytes as the vector, which need not be aligned.
            let x = unsafe { _mm256_loadu_ps(from.as_ptr()) };
            let whole = _mm512_maskz_cvttps_epi64(_mm256_cmp_ps_mask::<_CMP_ORD_Q>(x, x), x);
            let whole = _mm512_mask_mov_epi64(whole, _mm256_cmp_ps_mask::<_CMP_GE_OQ>(x, limit), most);
            // SAFETY: the array has as many bytes as the vector, which need not be aligned.
            unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), whole) };
        }
    }

    /// Defines a function that computes a vector at a time. No slice has to be aligned to vectors.
    macro_rules! map_by_vectors {
        ($($name:ident, $feature:literal, $Vector:ident: $n:literal, $load:ident $widen:ident $narrow:ident $store:ident;)*) => { $(
            #[target_feature(enable = $feature)]
            pub(super) fn $name<F: Function<(f32, f32), f32>, P: Form>(
                a: &[[u16; $n]],
                b: &[[u16; $n]],
                number: f32,
                to: &mut [[u16; $n]],
            ) {
                let wide = |side: &[u16; $n]| {
                    // SAFETY: the load reads the bytes of one vector, for which any bits are valid; the vector has the layout of the
                    // array.
                    unsafe { transmute::<$Vector, [f32; $n]>($widen($load(side.as_ptr().cast()))) }
                };
                for ((to, a), b) in to.iter_mut().zip(a).zip(b) {
                    let (x, y) = (wide(a), wide(b));
                    let made: [f32; $n] = std::array::from_fn(|i| P::call::<F>(x[i], y[i], number));
                    // SAFETY: the store writes the bytes of one vector; the array has the layout of the vector.
                    unsafe { $store(to.as_mut_ptr().cast(), $narrow::<NEAREST>(transmute::<[f32; $n], $Vector>(made))) };
                }
            }
        )* };
    }

    map_by_vectors! {
        map_16, "avx512f", __m512: 16, _mm256_loadu_si256 _mm512_cvtph_ps _mm512_cvtps_ph _mm256_storeu_si256;
        map_8, "avx,f16c", __m256: 8, _mm_loadu_si128 _mm256_cvtph_ps _mm256_cvtps_ph _mm_storeu_si128;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_convert_exactly_at_any_length() {
        let all: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
        let mut wide = vec![0.0; all.len()];
        widen(&all, &mut wide);
        for (half, &single) in all.iter().zip(&wide) {
            let want = half.to_f32();
            assert!(single == want || (single.is_nan() && want.is_nan()), "{half:?}: {single}");
        }
        // The samples include values halfway between two adjacent halves, which round to even.
        let singles: Vec<f32> =
            wide.iter().flat_map(|&x| [-1i32, 0, 1, 0xFFF, 0x1000, 0x1001].map(|d| beside(x, d))).collect();
        for n in [0, 1, 7, 8, 9, 63, 64, 65, singles.len()] {
            let mut halves = vec![f16::ONE; n];
            narrow(&singles[..n], &mut halves);
            for (&x, half) in singles.iter().zip(&halves) {
                let want = f16::from_f32(x);
                assert!(half.to_bits() == want.to_bits() || (half.is_nan() && want.is_nan()), "{x}: {half}");
            }
        }
    }

    fn beside(x: f32, steps: i32) -> f32 {
        f32::from_bits(x.to_bits().wrapping_add_signed(steps))
    }

    #[test]
    fn floats_round_to_bf16_at_any_length() {
        let ties =
            (0..=u16::MAX).flat_map(|high| [0, 1, 0x7FFF, 0x8000, 0x8001].map(|low| u32::from(high) << 16 | low));
        let all: Vec<f32> = ties.map(f32::from_bits).collect();
        for n in [0, 1, 7, 8, 9, 17, all.len()] {
            let mut halves = vec![1; n];
            narrow_bf16(&all[..n], &mut halves);
            assert!(all.iter().zip(&halves).all(|(&x, &bits)| half::bf16::from_f32(x).to_bits() == bits), "{n}");
        }
    }

    #[test]
    fn floats_truncate_to_integers_at_any_length() {
        let edges = [0.0, -0.5, 0.99, -1.99, 1e9, 9.2233715e18, 9.223372e18, -9.223372e18, -9.2233735e18, 1e30, -1e30];
        let more = [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MIN_POSITIVE, 16777217.0];
        let bits = (0..=u32::MAX).step_by(65_521).map(f32::from_bits);
        let all: Vec<f32> = edges.into_iter().chain(more).chain(bits).collect();
        for n in [0, 1, 7, 8, 9, 17, all.len()] {
            let mut whole = vec![7; n];
            truncate(&all[..n], &mut whole);
            assert!(all.iter().zip(&whole).all(|(&x, &i)| x as i64 == i), "{n}");
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn both_vector_lengths_agree() {
        let all: Vec<f16> = (0..=u16::MAX).map(f16::from_bits).collect();
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("f16c") {
            let (mut a, mut b) = (vec![0.0f32; all.len()], vec![0.0f32; all.len()]);
            let (mut c, mut d) = (vec![f16::ONE; all.len()], vec![f16::ONE; all.len()]);
            // SAFETY: the condition above detected AVX-512F and F16C; AVX-512F implies AVX.
            unsafe {
                x86::widen_16(all.as_chunks().0, a.as_chunks_mut().0);
                x86::widen_8(all.as_chunks().0, b.as_chunks_mut().0);
                x86::narrow_16(a.as_chunks().0, c.as_chunks_mut().0);
                x86::narrow_8(a.as_chunks().0, d.as_chunks_mut().0);
            }
            assert!(a.iter().zip(&b).all(|(a, b)| a.to_bits() == b.to_bits()));
            assert!(c.iter().zip(&d).all(|(c, d)| c.to_bits() == d.to_bits()));
        }
    }
}

#[cfg(test)]
mod tests_of_functions {
    use half::bf16;

    use super::*;

    struct Less;
    impl Function<(f32, f32), f32> for Less {
        fn call((x, y): (f32, f32)) -> f32 {
            x - y * 0.75
        }
    }

    /// Returns all 16-bit patterns, in an order that depends on `seed`.
    fn halves(seed: usize) -> Vec<u16> {
        (0..1 << 16).map(|i| (i * 40_503 + seed) as u16).collect()
    }

    fn same(got: u16, want: u16, is_nan: impl Fn(u16) -> bool) -> bool {
        got == want || (is_nan(got) && is_nan(want))
    }

    #[test]
    fn functions_of_two_operands_at_any_length() {
        let (a, b) = (halves(1), halves(7_777));
        let number = 1.0 / 3.0; // not exact in f16
        for n in [0, 1, 7, 8, 15, 16, 17, 40, a.len()] {
            let sides = |form| match form {
                0 => (HalfOperand::Each(&a[..n]), HalfOperand::Each(&b[..n])),
                1 => (HalfOperand::Each(&a[..n]), HalfOperand::One(number)),
                2 => (HalfOperand::One(number), HalfOperand::Each(&b[..n])),
                _ => (HalfOperand::One(number), HalfOperand::One(2.5)),
            };
            for form in 0..4 {
                let (left, right) = sides(form);
                let at = |side, i: usize, wide: fn(u16) -> f32| match side {
                    HalfOperand::Each(s) => wide(s[i]),
                    HalfOperand::One(x) => x,
                };
                let mut to = vec![7; n];
                map_halves::<Less>(DType::F16, left, right, &mut to);
                let wide = |bits| f16::from_bits(bits).to_f32();
                for (i, &got) in to.iter().enumerate() {
                    let want = f16::from_f32(Less::call((at(left, i, wide), at(right, i, wide)))).to_bits();
                    assert!(same(got, want, |x| f16::from_bits(x).is_nan()), "{form} {i}: {got:x} {want:x}");
                }
                map_halves::<Less>(DType::BF16, left, right, &mut to);
                let wide = |bits| bf16::from_bits(bits).to_f32();
                for (i, &got) in to.iter().enumerate() {
                    let want = bf16::from_f32(Less::call((at(left, i, wide), at(right, i, wide)))).to_bits();
                    assert!(same(got, want, |x| bf16::from_bits(x).is_nan()), "{form} {i}: {got:x} {want:x}");
                }
            }
        }
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn both_vector_lengths_agree() {
        if is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("f16c") {
            let (a, b) = (halves(1), halves(7_777));
            let (mut x, mut y) = (vec![0; a.len()], vec![1; a.len()]);
            // SAFETY: the condition above detected AVX-512F and F16C; AVX-512F implies AVX.
            unsafe {
                x86::map_16::<Less, Both>(a.as_chunks().0, b.as_chunks().0, 0.0, x.as_chunks_mut().0);
                x86::map_8::<Less, Both>(a.as_chunks().0, b.as_chunks().0, 0.0, y.as_chunks_mut().0);
            }
            assert!(x.iter().zip(&y).all(|(&x, &y)| same(x, y, |x| f16::from_bits(x).is_nan())));
        }
    }
}

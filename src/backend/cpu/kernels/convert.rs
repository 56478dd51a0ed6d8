//! Conversions of slices by vector instructions that the compiler does not generate.

use half::f16;
use half::slice::HalfFloatSliceExt;

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
                // SAFETY: the processor has the instructions.
                unsafe { x86::$by_16(from, to) };
                return $rest;
            } else if is_x86_feature_detected!("f16c") && is_x86_feature_detected!("avx") {
                let ((from, $from), (to, $to)) = ($from.as_chunks(), $to.as_chunks_mut());
                // SAFETY: the processor has the instructions.
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
        // SAFETY: the processor has the instructions.
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

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use half::f16;

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
            // SAFETY: the processor has the instructions.
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

//! Vectors of 32 integers: one of 512 bits, or two of 256 bits.
//!
//! The functions of this file are inlined into [`multiply_512`] and [`multiply_256`], which enable the instructions.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{Activations, BLOCK, Dot, Part, multiply_in};
use crate::device::cpu::parallel::SharedPtr;
use crate::dtype::quant::blocks::{Lanes, Unpack};

/// Defines the kernel with vectors of type `$V`.
macro_rules! kernel {
    ($name:ident $V:ident $feature:literal) => {
        /// # Safety
        /// The requirements of [`multiply_rows`](super::multiply_rows); the processor has the instructions.
        #[target_feature(enable = $feature)]
        pub(super) unsafe fn $name<U: Unpack>(
            x: &Activations,
            part: &Part<U>,
            rows: Range<usize>,
            out: &SharedPtr<f32>,
            n: usize,
        ) {
            // SAFETY: the caller guarantees the requirements.
            unsafe { multiply_in::<$V, U>(x, part, rows, out, n) };
        }
    };
}

kernel!(multiply_512 V512 "avx512f,avx512bw,f16c");
kernel!(multiply_256 V256 "avx2,fma,f16c");

/// One vector of 32 integers.
#[derive(Clone, Copy)]
struct V512(__m512i);

/// Two vectors of 16 integers.
#[derive(Clone, Copy)]
struct V256(__m256i, __m256i);

/// Defines functions that are one expression of instructions.
macro_rules! inlined {
    ($($(#[$doc:meta])* fn $name:ident($($arg:ident $(: $t:ty)?),*) -> $made:ty = $e:expr;)*) => { $(
        $(#[$doc])*
        #[inline(always)]
        #[allow(unused_unsafe, reason = "some functions call only functions of this macro")]
        fn $name($($arg $(: $t)?),*) -> $made {
            // SAFETY: only `multiply_512` and `multiply_256` call these functions, and enable the instructions. A slice is cut to the
            // length of a load before its pointer is taken.
            unsafe { $e }
        }
    )* };
}

inlined! {
    fn half_to_f32(bytes: [u8; 2]) -> f32 =
        _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(u16::from_le_bytes(bytes).into())));
    fn halves_to_f32(bytes: [u8; 4]) -> [f32; 2] = {
        let both = _mm_cvtph_ps(_mm_cvtsi32_si128(i32::from_le_bytes(bytes)));
        [_mm_cvtss_f32(both), _mm_cvtss_f32(_mm_movehdup_ps(both))]
    };
    /// Returns the first of two products, and adds both to `sums`.
    fn add_two(a: [f32; 2], b: &[f32; 2], sums: __m128) -> (f32, __m128) = {
        let b = _mm_castsi128_ps(_mm_loadl_epi64(b.as_ptr().cast()));
        let products = _mm_mul_ps(_mm_setr_ps(a[0], a[1], 0.0, 0.0), b);
        (_mm_cvtss_f32(products), _mm_add_ps(sums, products))
    };
    fn two(sums: __m128) -> [f32; 2] = [_mm_cvtss_f32(sums), _mm_cvtss_f32(_mm_movehdup_ps(sums))];
    /// Loads 32 bytes.
    fn load(bytes: &[u8]) -> __m256i = _mm256_loadu_si256(bytes[..32].as_ptr().cast());
    /// Extracts bits from each byte. The bits of a neighbour, which a shift of 16 bits moves into a byte, are not in the mask.
    fn byte_bits(bytes: &[u8], shift: usize, mask: u8) -> __m256i = _mm256_and_si256(
        _mm256_srl_epi16(load(bytes), _mm_cvtsi32_si128(shift as i32)),
        _mm256_set1_epi8(mask as i8),
    );
    /// Extracts 32 integers of four bits from 16 bytes, as bytes.
    fn byte_nibbles(bytes: &[u8]) -> __m256i = {
        let both = _mm_loadu_si128(bytes[..16].as_ptr().cast());
        _mm256_and_si256(_mm256_set_m128i(_mm_srli_epi16::<4>(both), both), _mm256_set1_epi8(15))
    };
    fn widen(bytes: __m256i) -> V256 = V256(
        _mm256_cvtepu8_epi16(_mm256_castsi256_si128(bytes)),
        _mm256_cvtepu8_epi16(_mm256_extracti128_si256::<1>(bytes)),
    );
    /// Expands 16 bits to the integers 0 and 1.
    fn flags(bits: u32) -> __m256i = {
        let each = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, -32768);
        let set = _mm256_cmpeq_epi16(_mm256_and_si256(_mm256_set1_epi16(bits as i16), each), each);
        _mm256_srli_epi16::<15>(set)
    };
}

impl Lanes for V512 {
    inlined! {
        fn half(bytes: [u8; 2]) -> f32 = half_to_f32(bytes);
        fn halves(bytes: [u8; 4]) -> [f32; 2] = halves_to_f32(bytes);
        fn signed(bytes: &[u8]) -> Self = V512(_mm512_cvtepi8_epi16(load(bytes)));
        fn bits(bytes: &[u8], shift: usize, mask: u8) -> Self = V512(_mm512_cvtepu8_epi16(byte_bits(bytes, shift, mask)));
        fn nibbles(bytes: &[u8]) -> Self = V512(_mm512_cvtepu8_epi16(byte_nibbles(bytes)));
        fn flags(bits: u32) -> Self = V512(_mm512_maskz_set1_epi16(bits, 1));
        fn add_shifted(self, other: Self, shift: u32) -> Self =
            V512(_mm512_add_epi16(self.0, _mm512_sll_epi16(other.0, _mm_cvtsi32_si128(shift as i32))));
        fn plus(self, n: i16) -> Self = V512(_mm512_add_epi16(self.0, _mm512_set1_epi16(n)));
    }
}

impl Dot for V512 {
    type Sums = __m512;
    type Offsets = __m128;
    inlined! {
        fn no_offsets() -> __m128 = _mm_setzero_ps();
        fn add_offsets(a: [f32; 2], b: &[f32; 2], sums: __m128) -> (f32, __m128) = add_two(a, b, sums);
        fn offsets(sums: __m128) -> [f32; 2] = two(sums);
        fn zero() -> __m512 = _mm512_setzero_ps();
        fn add_products(self, x: &[i16; BLOCK], scale: [f32; 2], halves: bool, sums: __m512) -> __m512 = {
            let products = _mm512_madd_epi16(self.0, _mm512_loadu_si512(x.as_ptr().cast()));
            let low = _mm512_set1_ps(scale[0]);
            let scale = if halves { _mm512_mask_blend_ps(0xff00, low, _mm512_set1_ps(scale[1])) } else { low };
            _mm512_fmadd_ps(_mm512_cvtepi32_ps(products), scale, sums)
        };
        fn total(sums: __m512) -> f32 = _mm512_reduce_add_ps(sums);
    }
}

impl Lanes for V256 {
    inlined! {
        fn half(bytes: [u8; 2]) -> f32 = half_to_f32(bytes);
        fn halves(bytes: [u8; 4]) -> [f32; 2] = halves_to_f32(bytes);
        fn signed(bytes: &[u8]) -> Self = {
            let bytes = load(bytes);
            let (low, high) = (_mm256_castsi256_si128(bytes), _mm256_extracti128_si256::<1>(bytes));
            V256(_mm256_cvtepi8_epi16(low), _mm256_cvtepi8_epi16(high))
        };
        fn bits(bytes: &[u8], shift: usize, mask: u8) -> Self = widen(byte_bits(bytes, shift, mask));
        fn nibbles(bytes: &[u8]) -> Self = widen(byte_nibbles(bytes));
        fn flags(bits: u32) -> Self = V256(flags(bits), flags(bits >> 16));
        fn add_shifted(self, other: Self, shift: u32) -> Self = {
            let shift = _mm_cvtsi32_si128(shift as i32);
            let add = |a, b| _mm256_add_epi16(a, _mm256_sll_epi16(b, shift));
            V256(add(self.0, other.0), add(self.1, other.1))
        };
        fn plus(self, n: i16) -> Self = {
            let n = _mm256_set1_epi16(n);
            V256(_mm256_add_epi16(self.0, n), _mm256_add_epi16(self.1, n))
        };
    }
}

impl Dot for V256 {
    type Sums = __m256;
    type Offsets = __m128;
    inlined! {
        fn no_offsets() -> __m128 = _mm_setzero_ps();
        fn add_offsets(a: [f32; 2], b: &[f32; 2], sums: __m128) -> (f32, __m128) = add_two(a, b, sums);
        fn offsets(sums: __m128) -> [f32; 2] = two(sums);
        fn zero() -> __m256 = _mm256_setzero_ps();
        fn add_products(self, x: &[i16; BLOCK], scale: [f32; 2], halves: bool, sums: __m256) -> __m256 = {
            let at = x.as_ptr().cast::<__m256i>();
            let low = _mm256_madd_epi16(self.0, _mm256_loadu_si256(at));
            let high = _mm256_madd_epi16(self.1, _mm256_loadu_si256(at.add(1)));
            let add = |products, scale, sums| _mm256_fmadd_ps(_mm256_cvtepi32_ps(products), _mm256_set1_ps(scale), sums);
            match halves {
                true => add(high, scale[1], add(low, scale[0], sums)),
                false => add(_mm256_add_epi32(low, high), scale[0], sums),
            }
        };
        fn total(sums: __m256) -> f32 = {
            let half = _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps::<1>(sums));
            let pair = _mm_add_ps(half, _mm_movehl_ps(half, half));
            _mm_cvtss_f32(_mm_add_ss(pair, _mm_shuffle_ps::<1>(pair, pair)))
        };
    }
}

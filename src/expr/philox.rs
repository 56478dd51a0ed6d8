//! Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
//!
//! The random number of an element depends only on the seed and the element's index, so any number of threads on any device produces the
//! same tensor. Element `e` takes word `e % 4` of the block with counter `e / 4` in the seed's stream.
//!
//! Normal numbers come in pairs, from two words, by the Box-Muller transform in f32. The transform uses only integer operations,
//! additions, subtractions and multiplications, which every device rounds correctly, unlike division, square roots and library functions.
//! The results are therefore bit-identical on every device; `kernels/prelude.cl` repeats the computation step by step.

use std::marker::PhantomData;

use pulp::{Arch, Simd, WithSimd};

use crate::expr::polynomials::{cos_small, log_near_one, sin_small};

/// A source of random numbers: `key` is the user's seed, and `stream` counts the draws made with that seed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Seed {
    /// The user's seed.
    pub key: u64,
    /// The index of the draw made with this seed.
    pub stream: u64,
}

/// The number of rounds, the multipliers and the Weyl constants of Philox4x32-10.
const ROUNDS: usize = 10;
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// The number of blocks computed side by side, in the lanes of vector registers.
const BLOCKS_AT_ONCE: usize = 32;

/// Computes the four words of one block from its counter and key.
#[inline(always)]
fn block([mut x0, mut x1, mut x2, mut x3]: [u32; 4], [mut k0, mut k1]: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let a = u64::from(MULTIPLIERS[0]) * u64::from(x0);
        let b = u64::from(MULTIPLIERS[1]) * u64::from(x2);
        (x0, x1, x2, x3) = ((b >> 32) as u32 ^ x1 ^ k0, b as u32, (a >> 32) as u32 ^ x3 ^ k1, a as u32);
        k0 = k0.wrapping_add(WEYL[0]);
        k1 = k1.wrapping_add(WEYL[1]);
    }
    [x0, x1, x2, x3]
}

/// A conversion from the four words of a block to the random numbers of four elements.
pub(crate) trait Draw {
    type Number: Copy + Default;
    fn draw(words: [u32; 4]) -> [Self::Number; 4];
}

/// Raw bits.
pub(crate) struct Bits;
/// Uniform numbers in [0, 1), multiples of 2⁻²⁴.
pub(crate) struct Uniform;
/// Standard normal numbers.
pub(crate) struct Normal;

impl Draw for Bits {
    type Number = u32;

    #[inline(always)]
    fn draw(words: [u32; 4]) -> [u32; 4] {
        words
    }
}

impl Draw for Uniform {
    type Number = f32;

    #[inline(always)]
    fn draw(words: [u32; 4]) -> [f32; 4] {
        words.map(|bits| (bits >> 8) as f32 * (1.0 / 16_777_216.0))
    }
}

impl Draw for Normal {
    type Number = f32;

    #[inline(always)]
    fn draw([a, b, c, d]: [u32; 4]) -> [f32; 4] {
        let ([x, y], [z, w]) = (normal_pair(a, b), normal_pair(c, d));
        [x, y, z, w]
    }
}

impl Seed {
    /// Fills `out` with the numbers of elements `first`, `first + 1`, ...
    pub(crate) fn fill<D: Draw, C>(self, first: u64, out: &mut [C], convert: impl Fn(D::Number) -> C) {
        Arch::new().dispatch(Fill::<C, D, _> { seed: self, first, out, convert, draw: PhantomData });
    }
}

/// The arguments of [`Seed::fill`], for dispatch to the best vector instructions.
struct Fill<'a, C, D, F> {
    seed: Seed,
    first: u64,
    out: &'a mut [C],
    convert: F,
    draw: PhantomData<D>,
}

impl<C, D: Draw, F: Fn(D::Number) -> C> WithSimd for Fill<'_, C, D, F> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let (key, stream) = (words(self.seed.key), words(self.seed.stream));
        let (mut out, group) = (self.out, 4 * BLOCKS_AT_ONCE as u64);
        let mut start = self.first / group * BLOCKS_AT_ONCE as u64; // a multiple of BLOCKS_AT_ONCE, so that `low | i` needs no carry
        let mut skip = (self.first % group) as usize;
        while !out.is_empty() {
            let [low, high] = words(start);
            let mut lanes = [[D::Number::default(); BLOCKS_AT_ONCE]; 4];
            let [x, y, z, w] = &mut lanes;
            for i in 0..BLOCKS_AT_ONCE {
                [x[i], y[i], z[i], w[i]] = D::draw(block([low | i as u32, high, stream[0], stream[1]], key));
            }
            let n = (4 * BLOCKS_AT_ONCE - skip).min(out.len());
            let (now, rest) = out.split_at_mut(n);
            if n == 4 * BLOCKS_AT_ONCE {
                for (i, four) in now.chunks_exact_mut(4).enumerate() {
                    (0..4).for_each(|k| four[k] = (self.convert)(lanes[k][i]));
                }
            } else {
                now.iter_mut().zip(skip..).for_each(|(o, e)| *o = (self.convert)(lanes[e % 4][e / 4]));
            }
            (out, skip, start) = (rest, 0, start.wrapping_add(BLOCKS_AT_ONCE as u64));
        }
    }
}

#[inline(always)]
fn words(x: u64) -> [u32; 2] {
    [x as u32, (x >> 32) as u32]
}

/// Returns two independent normal numbers from two words. Every operation is correctly rounded, and no multiply-add is fused.
#[inline(always)]
fn normal_pair(a: u32, b: u32) -> [f32; 2] {
    // t = -2 ln(u), u = n / 2^24 in (0, 1]: n = m * 2^e with m in [0.75, 1.5)
    let n = ((a >> 8) + 1) as f32;
    let bits = n.to_bits().wrapping_sub(0x3F40_0000);
    let e = (bits >> 23) as f32;
    let z = f32::from_bits((bits & 0x007F_FFFF).wrapping_add(0x3F40_0000)) - 1.0;
    let t = -2.0 * (log_near_one(z) + (e - 24.0) * std::f32::consts::LN_2);

    // r = sqrt(t) = t * rsqrt(t): an estimate from the exponent, then Newton's method
    let mut y = f32::from_bits(0x5F37_59DFu32.wrapping_sub(t.to_bits() >> 1));
    let half = 0.5 * t;
    for _ in 0..3 {
        y = y * (1.5 - half * y * y);
    }
    let r = t * y;

    // the angle 2 pi n / 2^24: the nearest quarter turn, plus a remainder in [-pi/4, pi/4]
    let n = b >> 8;
    let quarter = (n + 0x0020_0000) >> 22;
    let left = n.wrapping_sub(quarter << 22) as i32 as f32;
    let x = left * (std::f32::consts::FRAC_PI_2 / 4_194_304.0);
    let (s, c) = (sin_small(x), cos_small(x));
    let (c, s) = if quarter & 1 == 0 { (c, s) } else { (s, c) };
    let c = if (quarter + 1) & 2 == 0 { c } else { -c };
    let s = if quarter & 2 == 0 { s } else { -s };
    [r * c, r * s]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers() {
        // the reference implementation's vectors for philox4x32, 10 rounds
        let all = u32::MAX;
        assert_eq!(block([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(block([all; 4], [all; 2]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            block([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn every_range_of_a_stream_has_the_same_numbers() {
        let seed = Seed { key: 0x0123_4567_89ab_cdef, stream: 7 << 33 };
        let mut all = vec![0; 200];
        seed.fill::<Bits, _>(0, &mut all, |b| b);
        for first in 0..70 {
            for len in [0, 1, 2, 3, 4, 5, 31, 32, 33, 100] {
                let mut part = vec![0; len];
                seed.fill::<Bits, _>(first as u64, &mut part, |b| b);
                assert_eq!(part, all[first..first + len], "{first} {len}");
            }
        }
        let mut far = [0; 8]; // this index needs the counter's upper word
        seed.fill::<Bits, _>(1 << 40, &mut far, |b| b);
        assert_eq!(far[..4], block([0, 1 << 6, 0, 14], [0x89ab_cdef, 0x0123_4567]));
    }

    #[test]
    fn normals_follow_their_formula_and_distribution() {
        let seed = Seed { key: 42, stream: 0 };
        let n = 400_000;
        let (mut bits, mut x) = (vec![0; n], vec![0.0; n]);
        seed.fill::<Bits, _>(0, &mut bits, |b| b);
        seed.fill::<Normal, _>(0, &mut x, |x| x);
        for (b, x) in bits.chunks(2).zip(x.chunks(2)) {
            let u = ((b[0] >> 8) + 1) as f64 / 16_777_216.0;
            let angle = std::f64::consts::TAU * f64::from(b[1] >> 8) / 16_777_216.0;
            let r = (-2.0 * u.ln()).sqrt();
            for (x, y) in x.iter().zip([r * angle.cos(), r * angle.sin()]) {
                assert!((f64::from(*x) - y).abs() <= 1e-6 * r.max(0.1), "{x} {y}");
            }
        }
        let moment = |p: i32| x.iter().map(|&x| f64::from(x).powi(p)).sum::<f64>() / n as f64;
        assert!(moment(1).abs() < 0.01 && (moment(2) - 1.0).abs() < 0.01);
        assert!(moment(3).abs() < 0.03 && (moment(4) - 3.0).abs() < 0.06);
    }

    #[test]
    fn extreme_words_give_finite_normals() {
        for a in [0, 255, 256, u32::MAX, u32::MAX - 255, 0x7fff_ffff, 0x8000_0000] {
            for b in [0, 0x1fff_ff00, 0x2000_0000, 0x6000_0000, 0xdfff_ffff, 0xe000_0000, u32::MAX] {
                assert!(normal_pair(a, b).iter().all(|x| x.abs() < 6.0), "{a} {b}");
            }
        }
    }
}

//! f32 functions that the compiler can vectorise.
//!
//! The standard library's `exp`, `tanh` and so on are calls for single elements, so a loop over them does not vectorise. These
//! functions have no branches (only selections) and no calls: each is a range reduction and a polynomial, whose coefficients are
//! fitted for the least maximum relative error and rounded to f32. Except for [`exp_and_sum`], they use only + - * / sqrt and bit
//! operations, never a fused multiply-add, so the results are the same on every processor.
//!
//! The error against f64, in units in the last place, is below 1 for `exp`, `log`, `log1p` and `pow`, below 2 for `log2`, `log10`,
//! `expm1`, `sin`, `cos`, `tanh`, `erf` and `atan`, and below 3 for `sigmoid` and, above -86, `silu`. The tests assert this over every
//! exponent, including subnormal numbers. [`Exp64`] is for f64. NaN, infinities and signed zeros follow C99.

#![allow(clippy::excessive_precision)] // nine digits name an f32 exactly; clippy would cut some to eight

use std::f32::consts::{LOG2_E, PI};

use pulp::Simd;

use crate::expr::polynomials::{cos_small, log_near_one, log_tail, poly, sin_small};

/// A constant that rounds an f32 of magnitude below 2²² to an integer, by adding and subtracting the constant. The low bits of the sum
/// hold the integer plus 254, which is twice the exponent bias.
const ROUND: f32 = 12_582_912.0 + 254.0; // 1.5 * 2^23
/// The high part of ln 2, with 16 bits, so that the product with an exponent is exact.
const LN2_HI: f32 = 0.693_145_75;
/// The low part of ln 2: ln 2 minus `LN2_HI`.
const LN2_LO: f32 = 1.428_606_8e-6;

/// Clamps x to the bounds; NaN stays NaN.
#[inline(always)]
fn clamp_keeping_nan(x: f32, low: f32, high: f32) -> f32 {
    let x = if x < low { low } else { x };
    if x > high { high } else { x }
}

/// Splits x = n ln 2 + r with |r| <= ln 2 / 2. Returns the bits of n + [`ROUND`], and r.
#[inline(always)]
fn reduce_exp(x: f32) -> (u32, f32) {
    let t = x * LOG2_E + ROUND;
    let n = t - ROUND;
    (t.to_bits(), (x - n * LN2_HI) - n * LN2_LO)
}

/// Returns `e^x - 1`.
#[inline(always)]
pub(crate) fn expm1(x: f32) -> f32 {
    const C: [f32; 6] = [0.5, 0.166_666_657, 0.041_666_485_4, 0.008_333_541_45, 0.001_393_322_83, 0.000_197_669_942];
    let (n, r) = reduce_exp(clamp_keeping_nan(x, -18.0, 89.0));
    let n = n.wrapping_sub(ROUND.to_bits()) as i32;
    let p = r * r * poly(r, C) + r; // e^r - 1
    // 2^n p + (2^n - 1), computed at half scale to avoid overflow
    let scale = f32::from_bits((n.wrapping_add(126) as u32) << 23);
    let y = (scale * p + (scale - 0.5)) * 2.0;
    if x.abs() < 1e-7 { x } else { y } // keeps -0 and subnormals
}

/// Splits x = 2^e (1 + z) with 1 + z in [3/4, 3/2), for positive finite x. Returns e and z.
#[inline(always)]
fn split_exponent(x: f32) -> (f32, f32) {
    let subnormal = x < f32::MIN_POSITIVE;
    let scaled = if subnormal { x * 8_388_608.0 } else { x };
    let bits = (scaled.to_bits() as i32).wrapping_sub(0x3F40_0000);
    let e = (bits >> 23) as f32 - if subnormal { 23.0 } else { 0.0 };
    (e, f32::from_bits((bits & 0x007F_FFFF).wrapping_add(0x3F40_0000) as u32) - 1.0)
}

/// Returns `log(x) + correction` for positive finite x. Callers handle infinity, zero and negative x.
#[inline(always)]
fn log_plus(x: f32, correction: f32) -> f32 {
    let (e, z) = split_exponent(x);
    e * LN2_HI + (z + (log_tail(z) - 0.5 * z * z + (e * LN2_LO + correction)))
}

/// Returns the logarithm `y` for positive finite x, and the special values for other x: -inf at 0, NaN below 0, infinity at infinity.
#[inline(always)]
fn with_log_special_values(x: f32, y: f32) -> f32 {
    let y = if x == 0.0 { f32::NEG_INFINITY } else { y };
    let y = if x < 0.0 { f32::NAN } else { y };
    if x < f32::INFINITY { y } else { x } // NaN and infinity
}

/// Returns the natural logarithm: -inf at 0, NaN below 0.
#[inline(always)]
pub(crate) fn log(x: f32) -> f32 {
    with_log_special_values(x, log_plus(x, 0.0))
}

/// Returns the logarithm to base 2, exact for powers of 2.
#[inline(always)]
pub(crate) fn log2(x: f32) -> f32 {
    let (e, z) = split_exponent(x);
    with_log_special_values(x, (f64::from(e) + f64::from(log_near_one(z)) * std::f64::consts::LOG2_E) as f32)
}

/// Returns the logarithm to base 10, exact for powers of 10: computed in f64, the error of `log_near_one` is below half a unit of the
/// sum.
#[inline(always)]
pub(crate) fn log10(x: f32) -> f32 {
    use std::f64::consts::{LOG10_2, LOG10_E};
    let (e, z) = split_exponent(x);
    with_log_special_values(x, (f64::from(e) * LOG10_2 + f64::from(log_near_one(z)) * LOG10_E) as f32)
}

/// Returns `log(1 + x)`: -inf at -1, NaN below -1.
#[inline(always)]
pub(crate) fn log1p(x: f32) -> f32 {
    let u = 1.0 + x;
    let lost = if x > 1.0 { 1.0 - (u - x) } else { x - (u - 1.0) }; // the rounding error of the addition
    let y = log_plus(u, lost / u);
    let y = if x.abs() < 1e-7 { x } else { y }; // keeps -0 and subnormals
    let y = if x == -1.0 { f32::NEG_INFINITY } else { y };
    let y = if x < -1.0 { f32::NAN } else { y };
    if x < f32::INFINITY { y } else { x }
}

/// Maximum magnitude of an argument of [`sin`] and [`cos`]. Larger arguments need the f64 functions, because the range reduction needs
/// more digits of pi.
pub(crate) const TRIG_LIMIT: f32 = 1e6;

/// Splits x = q pi/2 + r with |r| <= pi/4, in f64 so that r is exact enough. Returns the sine and cosine of r, and q.
#[inline(always)]
fn sin_cos(x: f32) -> (f32, f32, i32) {
    const ROUND: f64 = 6_755_399_441_055_744.0; // 1.5 * 2^52
    const HALF_PI_HI: f64 = 1.570_796_326_734_125_6; // 33 bits: products with up to 2^20 are exact
    const HALF_PI_LO: f64 = 6.077_100_506_506_192e-11;
    let wide = f64::from(x);
    let t = wide * std::f64::consts::FRAC_2_PI + ROUND;
    let n = t - ROUND;
    let r = ((wide - n * HALF_PI_HI) - n * HALF_PI_LO) as f32;
    (sin_small(r), cos_small(r), t.to_bits() as i32)
}

/// Returns the sine of x in radians, |x| <= [`TRIG_LIMIT`].
#[inline(always)]
pub(crate) fn sin(x: f32) -> f32 {
    let (s, c, q) = sin_cos(x);
    let y = if q & 1 == 0 { s } else { c };
    let y = f32::from_bits(y.to_bits() ^ ((q as u32 & 2) << 30));
    if x == 0.0 { x } else { y } // keeps -0
}

/// Returns the cosine of x in radians, |x| <= [`TRIG_LIMIT`].
#[inline(always)]
pub(crate) fn cos(x: f32) -> f32 {
    let (s, c, q) = sin_cos(x);
    let y = if q & 1 == 0 { c } else { s };
    f32::from_bits(y.to_bits() ^ ((q.wrapping_add(1) as u32 & 2) << 30))
}

#[inline(always)]
pub(crate) fn atan(x: f32) -> f32 {
    const C: [f32; 9] = [
        -0.333_332_986,
        0.199_985_31,
        -0.142_640_471,
        0.109_511_115,
        -0.084_001_541_1,
        0.057_898_681_6,
        -0.031_116_915_9,
        0.010_880_827_9,
        -0.001_785_859,
    ];
    const HALF_PI_LO: f32 = -4.371_139e-8; // pi/2 - FRAC_PI_2
    let a = x.abs();
    let steep = a > 1.0;
    let t = if steep { 1.0 / a } else { a };
    let z = t * t;
    let y = t * z * poly(z, C) + t;
    let y = if steep { PI / 2.0 - (y - HALF_PI_LO) } else { y };
    y.copysign(x)
}

/// Returns a^b, computed in f64.
#[inline(always)]
pub(crate) fn pow(a: f32, b: f32) -> f32 {
    const ROUND: f64 = 6_755_399_441_055_744.0; // 1.5 * 2^52
    let magnitude = a.abs();
    // log2: magnitude = 2^e m, m in [0.75, 1.5); log(m) = 2 atanh(s), s = (m - 1) / (m + 1)
    let bits = f64::from(magnitude).to_bits().wrapping_sub(0x3FE8_0000_0000_0000);
    let e = f64::from((bits >> 32) as i32 >> 20);
    let m = f64::from_bits((bits & 0x000F_FFFF_FFFF_FFFF).wrapping_add(0x3FE8_0000_0000_0000));
    let s = (m - 1.0) / (m + 1.0);
    let series = poly(s * s, [1.0, 1.0 / 3.0, 1.0 / 5.0, 1.0 / 7.0, 1.0 / 9.0, 1.0 / 11.0, 1.0 / 13.0, 1.0 / 15.0]);
    let log2 = e + 2.0 * std::f64::consts::LOG2_E * s * series;
    let log2 = if magnitude == 0.0 { f64::NEG_INFINITY } else { log2 };
    let log2 = if magnitude < f32::INFINITY { log2 } else { f64::from(magnitude) };

    // exp2 of t = b log2(a)
    let t = f64::from(b) * log2;
    let t = if t < -200.0 { -200.0 } else { t };
    let t = if t > 200.0 { 200.0 } else { t };
    let shifted = t + ROUND;
    let r = (t - (shifted - ROUND)) * std::f64::consts::LN_2;
    let scale = f64::from_bits((shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(1023)) << 52);
    #[rustfmt::skip]
    let e_r = poly(r, [1.0, 1.0, 1.0 / 2.0, 1.0 / 6.0, 1.0 / 24.0, 1.0 / 120.0, 1.0 / 720.0, 1.0 / 5040.0,
        1.0 / 40320.0, 1.0 / 362880.0]);
    let y = (e_r * scale) as f32;

    // the special cases of C99's `pow`
    let integer = b.trunc() == b;
    let odd = integer && (b * 0.5).trunc() * 2.0 != b;
    let y = if a.is_sign_negative() && odd { -y } else { y };
    let y = if a < 0.0 && !integer && magnitude < f32::INFINITY { f32::NAN } else { y };
    let one = a == 1.0 || b == 0.0 || (magnitude == 1.0 && b.abs() == f32::INFINITY);
    if one { 1.0 } else { y }
}

/// The exponential function, and functions based on it. Each function has two stages, and a loop applies the first stage to many elements
/// before the second. The operations on one element depend on each other, and a processor's out-of-order window holds a fixed number of
/// operations: with half as many operations per iteration, the window covers twice as many elements. Polynomials are evaluated in pairs of
/// terms for the same reason.
pub(crate) trait TwoStage {
    /// The type of argument and result: f32 or f64.
    type T: Copy + Default;
    /// An unsigned integer of the same size as `T`; its low bits hold the exponent of the power of two.
    type N: Copy + Default;

    /// The first stage: splits the exponent; returns an integer power of two and the remaining exponent.
    fn begin(x: Self::T) -> (Self::N, Self::T);
    /// The second stage: returns the function of x from the result of [`begin`](TwoStage::begin) for x.
    fn end(x: Self::T, begun: (Self::N, Self::T)) -> Self::T;

    /// Returns the function of x.
    #[inline(always)]
    fn eval(x: Self::T) -> Self::T {
        Self::end(x, Self::begin(x))
    }
}

/// Defines a function by its type, the integer type of the same size, and its two stages.
macro_rules! two_stage {
    ($(#[$doc:meta])* $name:ident: $T:ty, $N:ty; |$x:ident| $begin:expr, |$of:pat_param, $begun:pat_param| $end:expr) => {
        $(#[$doc])*
        pub(crate) struct $name;

        impl TwoStage for $name {
            type T = $T;
            type N = $N;

            #[inline(always)]
            fn begin($x: $T) -> ($N, $T) {
                $begin
            }

            #[inline(always)]
            fn end($of: $T, $begun: ($N, $T)) -> $T {
                $end
            }
        }
    };
}

/// The number of elements that pass the first stage before the second: the intermediate results stay in the L1 cache.
const STAGE_LEN: usize = 128;

/// The results of the first stage, aligned so that no vector crosses a cache line.
#[repr(align(64))]
struct FirstStage<H: TwoStage> {
    ns: [H::N; STAGE_LEN],
    rs: [H::T; STAGE_LEN],
}

impl<H: TwoStage> FirstStage<H> {
    #[inline(always)]
    fn new() -> FirstStage<H> {
        FirstStage { ns: [H::N::default(); STAGE_LEN], rs: [H::T::default(); STAGE_LEN] }
    }

    /// Computes the first stage of `map(x)` for each element x of `from`.
    #[inline(always)]
    fn begin(&mut self, from: &[H::T], map: impl Fn(H::T) -> H::T) {
        for ((n, r), x) in self.ns.iter_mut().zip(&mut self.rs).zip(from) {
            (*n, *r) = H::begin(map(*x));
        }
    }

    #[inline(always)]
    fn stages(&self) -> impl Iterator<Item = (H::N, H::T)> {
        self.ns.iter().zip(&self.rs).map(|(n, r)| (*n, *r))
    }
}

/// Writes the function of `map(x)` for each element x of `from` into `to`.
#[inline(always)]
pub(crate) fn map_into<H: TwoStage>(to: &mut [H::T], from: &[H::T], map: impl Fn(H::T) -> H::T) {
    let mut begun = FirstStage::<H>::new();
    for (to, from) in to.chunks_mut(STAGE_LEN).zip(from.chunks(STAGE_LEN)) {
        begun.begin(from, &map);
        to.iter_mut().zip(from).zip(begun.stages()).for_each(|((y, x), half)| *y = H::end(map(*x), half));
    }
}

/// Replaces each element x by the function of `map(x)`.
#[inline(always)]
pub(crate) fn map_in_place<H: TwoStage>(elements: &mut [H::T], map: impl Fn(H::T) -> H::T) {
    let mut begun = FirstStage::<H>::new();
    for part in elements.chunks_mut(STAGE_LEN) {
        begun.begin(part, &map);
        part.iter_mut().zip(begun.stages()).for_each(|(x, half)| *x = H::end(map(*x), half));
    }
}

/// Returns `e^x` from the result of [`reduce_exp`] for x.
#[inline(always)]
fn exp_end((n, r): (u32, f32)) -> f32 {
    // 2^n as a product of two powers, because one power could be out of range at both ends; their exponents add up to n + 254
    let half = n >> 1 << 23;
    exp_reduced(r) * f32::from_bits(half) * f32::from_bits((n << 23).wrapping_sub(half))
}

/// The coefficients of r² and higher powers in `e^r`.
const EXP_REDUCED: [f32; 5] = [0.499_999_94, 0.166_665_167, 0.041_668_281, 0.008_369_249_29, 0.001_382_077_93];

/// Returns `e^r`, for |r| <= ln 2 / 2.
#[inline(always)]
fn exp_reduced(r: f32) -> f32 {
    const C: [f32; 5] = EXP_REDUCED;
    let z = r * r;
    let p = (C[0] + C[1] * r) + z * ((C[2] + C[3] * r) + z * C[4]);
    z * p + r + 1.0
}

/// Replaces each element x by `e^(x - base)`, and returns the sum of the results. Unless an element is NaN, `base` must be at least every
/// element. A result below 2^-126 is 0. The caller must be compiled for the instructions of `S`.
#[inline(always)]
pub(crate) fn exp_and_sum<S: Simd>(simd: S, elements: &mut [f32], base: f32) -> f32 {
    const LEAST: f32 = -87.336_54; // ln 2^-126
    let splat = |x: f32| simd.splat_f32s(x);
    let (base_lanes, least, round, one) = (splat(base), splat(LEAST), splat(ONE), splat(1.0));
    let (log2_e, high, low) = (splat(LOG2_E), splat(LN2_HI), splat(LN2_LO));
    let c = EXP_REDUCED.map(splat);
    let (vectors, rest) = S::as_mut_simd_f32s(elements);
    let mut sums = [splat(0.0); 4];
    for chunk in vectors.chunks_mut(4) {
        for (element, sum) in chunk.iter_mut().zip(&mut sums) {
            let x = simd.sub_f32s(*element, base_lanes);
            let t = simd.mul_add_e_f32s(x, log2_e, round);
            let n = simd.sub_f32s(t, round);
            let r = simd.negate_mul_add_e_f32s(n, low, simd.negate_mul_add_e_f32s(n, high, x));
            let z = simd.mul_f32s(r, r);
            let last = simd.mul_add_e_f32s(z, c[4], simd.mul_add_e_f32s(r, c[3], c[2]));
            let p = simd.mul_add_e_f32s(z, last, simd.mul_add_e_f32s(r, c[1], c[0]));
            let y = simd.add_f32s(simd.mul_add_e_f32s(z, p, r), one);
            let scale = simd.wrapping_dyn_shl_u32s(simd.transmute_u32s_f32s(t), simd.splat_u32s(23));
            let y = simd.mul_f32s(y, simd.transmute_f32s_u32s(scale));
            *element = simd.select_f32s(simd.less_than_f32s(x, least), splat(0.0), y);
            *sum = simd.add_f32s(*sum, *element);
        }
    }
    let [a, b, c, d] = sums;
    let total = simd.reduce_sum_f32s(simd.add_f32s(simd.add_f32s(a, b), simd.add_f32s(c, d)));
    rest.iter_mut().fold(total, |total, x| {
        *x = if *x - base < LEAST { 0.0 } else { Exp::eval(*x - base) };
        total + *x
    })
}

two_stage! {
    /// `e^x`
    Exp: f32, u32;
    |x| reduce_exp(clamp_keeping_nan(x, -105.0, 89.0)),
    |_, begun| exp_end(begun)
}

two_stage! {
    /// `e^x` in f64, with an error below one unit in the last place.
    Exp64: f64, u64;
    |x| {
        const ROUND: f64 = 6_755_399_441_055_744.0 + 2046.0; // 1.5 * 2^52, plus twice the exponent bias
        const LN2_HI: f64 = 0.693_147_180_559_663; // 42 bits
        const LN2_LO: f64 = 2.823_529_056_303_157_7e-13;
        let x = if x < -746.0 { -746.0 } else { x };
        let x = if x > 710.0 { 710.0 } else { x };
        let t = x * std::f64::consts::LOG2_E + ROUND;
        let n = t - ROUND;
        (t.to_bits(), (x - n * LN2_HI) - n * LN2_LO)
    },
    |_, (n, r)| {
        const C: [f64; 10] = [
            0.500_000_000_000_000_1,
            0.166_666_666_666_666_69,
            0.041_666_666_666_624_13,
            0.008_333_333_333_330_062,
            0.001_388_888_891_721_371_7,
            0.000_198_412_698_630_536_18,
            2.480_152_129_595_459e-5,
            2.755_726_845_999_723e-6,
            2.762_008_844_530_822_4e-7,
            2.510_038_549_543_224_8e-8,
        ];
        let z = r * r;
        let low = (C[0] + C[1] * r) + z * (C[2] + C[3] * r);
        let high = ((C[4] + C[5] * r) + z * (C[6] + C[7] * r)) + z * z * (C[8] + C[9] * r);
        let p = low + z * z * high;
        let half = n >> 1 << 52;
        (z * p + r + 1.0) * f64::from_bits(half) * f64::from_bits((n << 52).wrapping_sub(half))
    }
}

/// The constant that, like [`ROUND`], rounds to an integer when added; it adds 127, the biased exponent of 1.
const ONE: f32 = 12_582_912.0 + 127.0;
/// The constant that, like [`ROUND`], rounds to an integer when added; it adds 126, the biased exponent of 1/2.
const HALF: f32 = 12_582_912.0 + 126.0;

/// Splits q, an exponent of two from -125 to 127, into the nearest integer and the remainder. The returned bits hold the integer plus
/// `scale`.
#[inline(always)]
fn split_exponent_of_two(q: f32, scale: f32) -> (u32, f32) {
    let t = q + scale;
    (t.to_bits(), q - (t - scale))
}

/// Returns 2^q times the power of two in `scale`, from the result of [`split_exponent_of_two`] for q.
#[inline(always)]
fn exp2_end((n, r): (u32, f32)) -> f32 {
    const C: [f32; 5] = [0.693_147_004, 0.240_222_469, 0.055_507_104_8, 0.009_671_291_34, 0.001_326_977_28];
    let z = r * r;
    let p = (C[0] + C[1] * r) + z * ((C[2] + C[3] * r) + z * C[4]);
    (r * p + 1.0) * f32::from_bits(n << 23)
}

two_stage! {
    /// The hyperbolic tangent.
    Tanh: f32, u32;
    |x| {
        let a = 2.0 * clamp_keeping_nan(x.abs(), 0.0, 10.0); // tanh(10) is 1 in f32
        let t = a * std::f32::consts::LOG2_E + ONE;
        let n = t - ONE;
        (t.to_bits(), (a - n * LN2_HI) - n * LN2_LO)
    },
    |x, (n, r)| {
        const C: [f32; 5] = [-0.333_332_807, 0.133_314_103, -0.053_737_118_8, 0.020_630_667, -0.005_695_544_18];
        let a = x.abs();
        let z = x * x;
        let small = a * z * poly(z, C) + a;
        let large = 1.0 - 2.0 / (exp_reduced(r) * f32::from_bits(n << 23) + 1.0);
        (if a < 0.625 { small } else { large }).copysign(x)
    }
}

/// The first stage of `e^-|x|`, which cannot overflow and keeps full relative accuracy for small results.
#[inline(always)]
fn begin_decay(x: f32) -> (u32, f32) {
    let x = -x.abs();
    reduce_exp(if x < -105.0 { -105.0 } else { x })
}

two_stage! {
    /// The logistic function `1 / (1 + e^-x)`.
    Sigmoid: f32, u32;
    |x| begin_decay(x),
    |x, begun| {
        let e = exp_end(begun);
        (if x < 0.0 { e } else { 1.0 }) / (1.0 + e)
    }
}

two_stage! {
    /// x times its logistic function.
    Silu: f32, u32;
    |x| begin_decay(x),
    |x, begun| {
        let e = exp_end(begun);
        (if x < 0.0 { x * e } else { x }) / (1.0 + e)
    }
}

two_stage! {
    /// Approximates [`Gelu`]: x times the logistic function of `2 sqrt(2 / pi) (x + 0.044715 x^3)`, which is the form with tanh.
    GeluTanh: f32, u32;
    |x| {
        // The first coefficient is 2 sqrt(2 / pi); the second is the first times 0.044715.
        begin_decay(x * (1.595_769_12 + 0.071_354_816_3 * (x * x)))
    },
    |x, begun| Silu::end(x, begun)
}

two_stage! {
    /// The error function.
    Erf: f32, u32;
    |x| {
        // log2(1 - erf(a)) for a in [0.7, 4]
        const C: [f32; 7] = [
            -4.177_087_7e-6,
            -1.628_109_57,
            -0.917_092_383,
            -0.151_947_021,
            0.033_082_984_4,
            -0.004_657_684_83,
            0.000_311_150_128,
        ];
        let a = x.abs();
        let a = if a > 4.0 { 4.0 } else { a };
        let z = a * a;
        split_exponent_of_two((C[0] + C[1] * a) + z * ((C[2] + C[3] * a) + z * ((C[4] + C[5] * a) + z * C[6])), ONE)
    },
    |x, begun| {
        const C: [f32; 5] = [0.128_379_121, -0.376_121_998, 0.112_768_181, -0.026_469_536_1, 0.004_277_518_95];
        let large = (1.0 - exp2_end(begun)).copysign(x);
        if x.abs() < 0.7 { x * poly(x * x, C) + x } else { large }
    }
}

two_stage! {
    /// x times the cumulative function of the normal distribution.
    Gelu: f32, u32;
    |x| {
        // log2 of twice the cumulative function of -a, for a in [0, 5.6]
        const C: [f32; 9] = [
            -1.151_105_05,
            -0.459_210_962,
            -0.052_480_850_4,
            0.007_024_739_4,
            -8.575_939_14e-5,
            -0.000_223_752_853,
            5.466_945e-5,
            -6.041_247_62e-6,
            2.683_994_47e-7,
        ];
        let a = x.abs();
        let z = a * a;
        let low = C[0] * a + z * (C[1] + C[2] * a);
        let high = (C[3] + C[4] * a) + z * ((C[5] + C[6] * a) + z * (C[7] + C[8] * a));
        split_exponent_of_two(low + z * z * high, HALF)
    },
    |x, begun| {
        let below = exp2_end(begun);
        let below = if x.abs() > 5.6 { 0.0 } else { below }; // beyond 5.6, `below` is less than half a unit in the last place of 1
        x * if x < 0.0 { below } else { 1.0 - below }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::dispatch::vectorised;

    /// Returns the difference between `got` and the correct value, in units in the last place of the f32 nearest to the correct value.
    pub(super) fn ulps(got: f32, right: f64) -> f64 {
        let nearest = right as f32;
        if got.is_nan() || nearest.is_nan() {
            return if got.is_nan() && nearest.is_nan() { 0.0 } else { f64::INFINITY };
        }
        if got.is_infinite() || nearest.is_infinite() {
            // A result that overflowed to infinity by rounding is one unit away from the largest finite number.
            let bits = |x: f32| i64::from(x.to_bits());
            return if got == nearest { 0.0 } else { (bits(got) - bits(nearest)).abs() as f64 };
        }
        let exponent = (f64::from(nearest.abs().max(f32::MIN_POSITIVE)).to_bits() >> 52) as i32 - 1023;
        (f64::from(got) - right).abs() / 2f64.powi(exponent - 23)
    }

    /// Returns special values, and bit patterns of every exponent and sign.
    pub(super) fn samples() -> impl Iterator<Item = f32> {
        let special = [0.0, -0.0, 1.0, -1.0, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX, f32::MIN_POSITIVE];
        special.into_iter().chain((0..u32::MAX / 4001).map(|i| f32::from_bits(i * 4001)))
    }

    pub(super) fn dense(low: f32, high: f32) -> impl Iterator<Item = f32> {
        (0..=400_000).map(move |i| low + (high - low) * (i as f32 / 400_000.0))
    }

    pub(super) fn check(name: &str, f: fn(f32) -> f32, right: fn(f64) -> f64, bound: f64, low: f32, high: f32) {
        let mut worst = (0.0, 0.0);
        for x in samples().chain(dense(low, high)) {
            let (got, expected) = (f(x), right(f64::from(x)));
            let error = ulps(got, expected);
            if error > worst.0 {
                worst = (error, x);
            }
            if got == 0.0 && expected == 0.0 {
                assert_eq!(got.is_sign_negative(), expected.is_sign_negative(), "{name}({x})");
            }
        }
        println!("{name}: {:.2} ulp at {:e}", worst.0, worst.1);
        assert!(worst.0 <= bound, "{name}: {} ulp at {:e}", worst.0, worst.1);
    }

    #[test]
    fn functions_are_within_their_stated_errors() {
        check("exp", Exp::eval, f64::exp, 1.0, -104.0, 89.0);
        check("expm1", expm1, f64::exp_m1, 2.0, -2.0, 2.0);
        check("log", log, f64::ln, 1.0, 0.5, 2.0);
        check("log2", log2, f64::log2, 2.0, 0.5, 2.0);
        check("log10", log10, f64::log10, 2.0, 0.5, 2.0);
        check("log1p", log1p, f64::ln_1p, 1.0, -0.9, 2.0);
        check("tanh", Tanh::eval, f64::tanh, 2.0, -2.0, 2.0);
        check("erf", Erf::eval, libm::erf, 2.0, -4.5, 4.5);
        check("atan", atan, f64::atan, 2.0, -4.0, 4.0);
        check("sigmoid", Sigmoid::eval, |x| 1.0 / (1.0 + (-x).exp()), 3.0, -20.0, 20.0);
    }

    vectorised! {
        fn exponentials_of<'a>(simd: S, elements: &'a mut [f32], base: f32) -> f32 {
            exp_and_sum(simd, elements, base)
        }
    }

    #[test]
    fn exponentials_and_their_sum_are_within_their_stated_errors() {
        for (n, base) in [(0, 0.0), (1, 3.0), (7, 0.5), (33, -8.0), (1037, 40.0), (100_003, 0.0)] {
            let from: Vec<f32> = (0..n).map(|i| base - 90.0 * (i as f32 / n as f32)).collect();
            let mut got = from.clone();
            let sum = exponentials_of(&mut got, base);
            let mut total = 0.0;
            for (x, got) in from.iter().zip(&got) {
                let right = f64::from(x - base).exp();
                total += right;
                assert!(
                    ulps(*got, right) <= 1.0 || (*got == 0.0 && right < 2f64.powi(-125)),
                    "e^({x} - {base}): {got}"
                );
            }
            assert!((f64::from(sum) - total).abs() <= 1e-5 * total, "{n} elements: {sum}, not {total}");
        }
        let special = [f32::NEG_INFINITY, f32::NAN, 0.0, f32::MIN, -1e-40, f32::INFINITY];
        for (base, right) in [(0.0, [0.0, f32::NAN, 1.0, 0.0, 1.0]), (f32::INFINITY, [0.0, f32::NAN, 0.0, 0.0, 0.0])] {
            let mut got = special.repeat(5);
            let sum = exponentials_of(&mut got, base);
            assert!(sum.is_nan());
            for (i, got) in got.iter().enumerate().filter(|(i, _)| i % 6 < 5) {
                assert!(*got == right[i % 6] || (got.is_nan() && right[i % 6].is_nan()), "element {i}: {got}");
            }
        }
    }

    #[test]
    fn logarithms_of_powers_are_exact() {
        assert!((-149..=127).all(|k| log2(2f64.powi(k) as f32) == k as f32));
        assert!((-5..=10).all(|k| log10(10f64.powi(k) as f32) == k as f32));
    }

    #[test]
    fn sin_and_cos_are_accurate_up_to_the_limit() {
        let within = |f: fn(f32) -> f32, x: f32| if x.abs() <= TRIG_LIMIT { f(x) } else { f32::NAN };
        for (name, f, right) in [("sin", sin as fn(f32) -> f32, f64::sin as fn(f64) -> f64), ("cos", cos, f64::cos)] {
            let mut worst: (f64, f32) = (0.0, 0.0);
            let multiples = (0..600_000).map(|i| i as f32 * std::f32::consts::FRAC_PI_2);
            for x in samples().chain(dense(-10.0, 10.0)).chain(multiples).filter(|x| x.abs() <= TRIG_LIMIT) {
                let error = ulps(within(f, x), right(f64::from(x)));
                worst = if error > worst.0 { (error, x) } else { worst };
            }
            println!("{name}: {:.2} ulp at {:e}", worst.0, worst.1);
            assert!(worst.0 <= 2.0, "{name}: {} ulp at {:e}", worst.0, worst.1);
        }
        assert!(sin(f32::NAN).is_nan() && cos(f32::NAN).is_nan());
        assert!(sin(-0.0).is_sign_negative());
    }

    #[test]
    fn powers_are_within_one_unit() {
        let mut worst: (f64, f32, f32) = (0.0, 0.0, 0.0);
        let specials = [0.0, 0.5, 1.0, 2.0, 3.0, 1e9, 16_777_217.0, f32::INFINITY, f32::MAX, 1e-40];
        let signed: Vec<f32> = specials.iter().flat_map(|&x| [x, -x]).chain([f32::NAN]).collect();
        let special = signed.iter().flat_map(|&a| signed.iter().map(move |&b| (a, b)));
        let patterns = |k: u32| (0..400u32).map(move |i| f32::from_bits(i.wrapping_mul(10_737_419).wrapping_add(k)));
        let wild = patterns(1).flat_map(|a| patterns(77).map(move |b| (a, b)));
        let tame = (1..1000).flat_map(|i| (-200..200).map(move |j| (i as f32 * 0.01, j as f32 * 0.11)));
        for (a, b) in special.chain(wild).chain(tame) {
            let right = f64::from(a).powf(f64::from(b));
            let error = ulps(pow(a, b), right);
            worst = if error > worst.0 { (error, a, b) } else { worst };
            if right == 0.0 {
                assert_eq!(pow(a, b).is_sign_negative(), right.is_sign_negative(), "pow({a}, {b})");
            }
        }
        println!("pow: {:.2} ulp at {:e}, {:e}", worst.0, worst.1, worst.2);
        assert!(worst.0 <= 1.0, "pow: {worst:?}");
    }
}

#[cfg(test)]
mod tests_of_exponentials {
    use super::tests::{check, dense, samples, ulps};
    use super::*;

    #[test]
    fn slices_match_single_elements() {
        let x: Vec<f32> = samples().step_by(97).collect();
        let twice = |x: f32| 2.0 * x;
        fn both<H: TwoStage<T = f32>>(x: &[f32], map: impl Fn(f32) -> f32) {
            for n in [0, 1, 7, STAGE_LEN - 1, STAGE_LEN, STAGE_LEN + 1, x.len()] {
                let mut y = vec![7.0; n];
                map_into::<H>(&mut y, &x[..n], &map);
                let mut z = x[..n].to_vec();
                map_in_place::<H>(&mut z, &map);
                let right = |i: usize| f64::from(H::eval(map(x[i])));
                assert!((0..n).all(|i| ulps(y[i], right(i)) == 0.0 && ulps(z[i], right(i)) == 0.0), "{n}");
            }
        }
        both::<Exp>(&x, twice);
        both::<Tanh>(&x, twice);
        both::<Sigmoid>(&x, twice);
        both::<Silu>(&x, twice);
        both::<Erf>(&x, twice);
        both::<Gelu>(&x, twice);
        both::<GeluTanh>(&x, twice);
    }

    #[test]
    fn f64_exponentials_are_within_one_unit() {
        let special = [0.0, -0.0, f64::MIN_POSITIVE, 710.0, -746.0, 1e300, -1e300, f64::INFINITY, f64::NEG_INFINITY];
        let patterns = (0..200_000u64).map(|i| f64::from_bits(i.wrapping_mul(0x9E37_79B9_7F4A_7C15)));
        let x: Vec<f64> = (0..=1_500_000).map(|i| f64::from(i) * 1e-3 - 750.0).chain(special).chain(patterns).collect();
        let mut y = vec![0.0; x.len()];
        map_into::<Exp64>(&mut y, &x, |x| x);
        let off = |(x, &y): (&f64, &f64)| match x.exp() {
            right if right.is_nan() => u64::from(!y.is_nan()) * 99,
            right => y.to_bits().abs_diff(right.to_bits()),
        };
        // The standard library's result may itself have an error of half a unit in the last place, so one unit of difference is allowed.
        assert!(x.iter().zip(&y).map(off).max() <= Some(1));
        assert_eq!((Exp64::eval(0.0), Exp64::eval(-0.0)), (1.0, 1.0));
    }

    #[test]
    fn gelu_and_silu_are_within_their_bounds() {
        let logistic = |x: f64| x / (1.0 + (-x).exp());
        // Where the exponential is subnormal, its error can be as large as its value, and x multiplies the error.
        let (from, above) = (-86.0, |x: f32| if x < -86.0 { 0.0 } else { Silu::eval(x) });
        check("silu", above, |x| if x < -86.0 { 0.0 } else { x / (1.0 + (-x).exp()) }, 3.0, -20.0, 20.0);
        assert!(dense(-120.0, from).all(|x| (f64::from(Silu::eval(x)) - logistic(f64::from(x))).abs() < 1e-42));
        assert!(Silu::eval(f32::NEG_INFINITY).is_nan());

        for x in samples().chain(dense(-12.0, 12.0)) {
            let wide = f64::from(x);
            let twice = 8f64.sqrt() / std::f64::consts::PI.sqrt() * (wide + 0.044715 * wide.powi(3));
            let (y, right) = (f64::from(GeluTanh::eval(x)), logistic(twice) / twice * wide);
            match x {
                x if x.is_nan() || x == f32::NEG_INFINITY => assert!(y.is_nan()),
                x if x == 0.0 || x > 1e6 => assert_eq!(y, wide * if x == 0.0 { 0.5 } else { 1.0 }),
                x if x < -1e6 => assert!(y == 0.0),
                // The tolerance covers the rounding error of the exponent.
                _ => assert!((y - right).abs() <= (1e-6 + 3e-7 * twice.abs()) * right.abs() + 1e-44, "{y} for {x:e}"),
            }
        }

        let below = |x: f32| 0.5 * libm::erfc(-f64::from(x) / 2f64.sqrt());
        for x in samples().chain(dense(-8.0, 8.0)) {
            let (y, right) = (Gelu::eval(x), f64::from(x) * below(x));
            let error = (f64::from(y) - right).abs();
            match x {
                x if x.is_nan() || x == f32::NEG_INFINITY => assert!(y.is_nan()),
                x if x >= 0.0 => assert!(ulps(y, right) <= 3.0, "{y} for {x:e}, not {right}"),
                x if x >= -5.6 => assert!(error <= 1e-4 * right.abs() + 1e-45, "{y} for {x:e}, not {right}"),
                // For these x, `1 + erf` rounds to 0, so the result is -0.
                _ => assert!(y == 0.0 && y.is_sign_negative() && right > -7e-8),
            }
        }
        assert!(Gelu::eval(-0.0).is_sign_negative());
    }
}

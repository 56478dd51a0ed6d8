//! The exponential function, and functions based on it.
//!
//! Each function has two stages, and a loop applies the first stage to many elements before the second. The operations on one element
//! depend on each other, and a processor's out-of-order window holds a fixed number of operations: with half as many operations per
//! iteration, the window covers twice as many elements. Polynomials are evaluated in pairs of terms for the same reason.

use super::{LN2_HI, LN2_LO, clamp_keeping_nan, reduce_exp};
use crate::expr::polynomials::poly;

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

/// Returns `e^r`, for |r| <= ln 2 / 2.
#[inline(always)]
fn exp_reduced(r: f32) -> f32 {
    const C: [f32; 5] = [0.499_999_94, 0.166_665_167, 0.041_668_281, 0.008_369_249_29, 0.001_382_077_93];
    let z = r * r;
    let p = (C[0] + C[1] * r) + z * ((C[2] + C[3] * r) + z * C[4]);
    z * p + r + 1.0
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

/// The constant that, like [`ROUND`](super::ROUND), rounds to an integer when added; it adds 127, the biased exponent of 1.
const ONE: f32 = 12_582_912.0 + 127.0;
/// The constant that, like [`ROUND`](super::ROUND), rounds to an integer when added; it adds 126, the biased exponent of 1/2.
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
    use super::super::tests::{check, dense, samples, ulps};
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

//! Polynomials for the logarithm, sine and cosine of f32 near zero, used by the random numbers and by the CPU's functions.

#![allow(clippy::excessive_precision)] // nine digits name an f32 exactly; clippy would cut some to eight

use std::ops::{Add, Mul};

/// Evaluates the polynomial `c[0] + x (c[1] + x (c[2] + ...))`.
#[inline(always)]
pub(crate) fn poly<T: Copy + Add<Output = T> + Mul<Output = T>, const N: usize>(x: T, c: [T; N]) -> T {
    let mut sum = c[N - 1];
    for i in (0..N - 1).rev() {
        sum = sum * x + c[i];
    }
    sum
}

/// Returns `log(1 + z) - z + z² / 2` for z in [-1/4, 1/2].
#[inline(always)]
pub(crate) fn log_tail(z: f32) -> f32 {
    const C: [f32; 9] = [
        0.333_333_403,
        -0.250_001_639,
        0.199_995_786,
        -0.166_553_155,
        0.142_768_025,
        -0.127_284_288,
        0.116_970_204,
        -0.091_063_424_9,
        0.037_603_411_3,
    ];
    z * z * z * poly(z, C)
}

/// Returns `log(1 + z)` for z in [-1/4, 1/2].
#[inline(always)]
pub(crate) fn log_near_one(z: f32) -> f32 {
    z + (log_tail(z) - 0.5 * z * z)
}

/// Returns `sin(x)` for |x| <= pi/4.
#[inline(always)]
pub(crate) fn sin_small(x: f32) -> f32 {
    let z = x * x;
    x * z * poly(z, [-0.166_666_552, 0.008_332_187_31, -0.000_195_179_091]) + x
}

/// Returns `cos(x)` for |x| <= pi/4.
#[inline(always)]
pub(crate) fn cos_small(x: f32) -> f32 {
    let z = x * x;
    z * z * poly(z, [0.041_666_645_6, -0.001_388_730_95, 2.443_233_64e-5]) - 0.5 * z + 1.0
}

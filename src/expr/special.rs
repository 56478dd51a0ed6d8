//! Methods of [`Expr`] for special functions.

use std::f64::consts::{FRAC_1_SQRT_2, LOG2_E, PI};

use crate::expr::Expr;
use crate::expr::formulas::formulas;

/// Returns the nested series `1 + f(1) (1 + f(2) (1 + ... (1 + f(n))))`.
fn nested_series(n: usize, f: impl Fn(f64) -> Expr) -> Expr {
    (1..=n).rev().fold(Expr::constant(1.0), |sum, k| f(k as f64) * sum + 1.0)
}

/// Returns a modified Bessel function of |x|: a series in `x² / 4` up to |x| = 20, and a series in `1 / 8x` above. In the second series,
/// each term is the previous term times `step(k) / k`.
fn bessel(x: &Expr, near: impl Fn(&Expr) -> Expr, step: impl Fn(f64) -> f64) -> Expr {
    let x = x.abs();
    let far = x.lt(20.0).select(20.0, &x);
    let tail = nested_series(20, |k| (far.recip() * 0.125) * (step(k) / k));
    let beyond = far.exp() * (&far * (2.0 * PI)).rsqrt() * tail;
    let close = x.lt(20.0).select(&x, 0.0);
    x.lt(20.0).select(near(&(close.square() * 0.25)), x.is_nan().select(&x, beyond))
}

formulas! {
    /// Special functions.
    impl Expr:
    /// The logarithmic derivative of the gamma function. -inf at 0, NaN at the other poles.
    pub digamma(y) = {
        // Below 1/2, the reflection formula is used; otherwise the asymptotic series at x + 10.
        let low = y.lt(0.5);
        let x = low.select(1.0 - y, y);
        let z = &x + 10.0;
        let r = z.recip().square();
        let bernoulli = [1.0 / 12.0, 1.0 / 120.0, 1.0 / 252.0, 1.0 / 240.0, 1.0 / 132.0, 691.0 / 32760.0];
        let tail = bernoulli.iter().rev().fold(Expr::constant(0.0), |sum, &c| &r * (c - sum));
        let steps = (1..10).fold(x.recip(), |sum, k| sum + (&x + f64::from(k)).recip());
        let above = z.log() - 0.5 * z.recip() - tail - steps;
        let pole = y.lt(0.0) * y.floor().eq(y);
        pole.select(f64::NAN, low.select(&above - PI / (y * PI).tan(), &above))
    };
    /// The inverse of the error function.
    pub erfinv(of) = {
        // Winitzki's approximation has three digits; each of Halley's steps triples them.
        const A: f64 = 0.147;
        let y = of.abs();
        let log = ((1.0 - &y) * (1.0 + &y)).log();
        let half = &log * 0.5 + 2.0 / (PI * A);
        let scaled = -&log / A;
        let mut x = (&scaled / ((half.square() + &scaled).sqrt() + &half)).sqrt();
        for _ in 0..2 {
            // This is erf(x) - y. For y above 1/2 it is computed from erfc, because the difference would lose digits by cancellation.
            let miss = y.gt(0.5).select((1.0 - &y) - x.erfc(), x.erf() - &y);
            let step = miss * x.square().exp() * (PI.sqrt() / 2.0);
            x = &x - &step / (1.0 + &x * &step);
        }
        // Near 0, where the square root has no derivative, the result is computed by the series of erfinv.
        let near = of * (PI.sqrt() / 2.0) * (1.0 + of.square() * (PI / 12.0));
        let far = y.eq(1.0).select(of * f64::INFINITY, of.lt(0.0).select(-1.0, 1.0) * x);
        y.lt(1e-4).select(near, far)
    };
    /// The modified Bessel function of the first kind of order 0.
    pub i0(x) = {
        // The series of (x / 2)^2k / k!² is used for small x, and a series in 1 / x for large x.
        let series = |t: &Expr| nested_series(36, |k| t / (k * k));
        bessel(x, series, |k| (2.0 * k - 1.0).powi(2))
    };
    /// The modified Bessel function of the first kind of order 1.
    pub i1(x) = {
        let series = |t: &Expr| nested_series(36, |k| t / (k * (k + 1.0)));
        // The factor x / 2 gives the series the sign of x, and has a derivative at 0.
        let value = bessel(x, |t| x * 0.5 * series(t), |k| (2.0 * k - 1.0).powi(2) - 4.0);
        x.le(-20.0).select(-&value, value)
    };
    /// `sin(pi x) / (pi x)`, 1 at 0.
    pub sinc(x) = {
        let angle = x * PI;
        x.eq(0.0).select(1.0, angle.sin() / &angle)
    };
    /// The derivative of [`sinc`](Expr::sinc). Near 0, where the terms of the quotient rule cancel, it is computed by a series.
    pub(crate) sinc_derivative(x) = {
        let z = (x * PI).square();
        let series = ((&z / 45360.0 - 1.0 / 840.0) * &z + 1.0 / 30.0) * &z - 1.0 / 3.0;
        let near = series * (x * (PI * PI));
        x.abs().lt(0.02).select(near, ((x * PI).cos() - x.sinc()) / x)
    };
    /// `log(x / (1 - x))`.
    pub logit(x) = (x / (1.0 - x)).log();
    /// The cumulative distribution function of the standard normal distribution.
    pub ndtr(x) = (x * -FRAC_1_SQRT_2).erfc() * 0.5;
    /// `log2(2^x + 2^other)` without overflow.
    pub logaddexp2(x, other) = {
        // This is not written with |x - other|, for the reason given in `logaddexp`.
        let (below, greater) = (x.lt(other), x.max(other));
        let apart = below.select(x - other, other - x);
        greater.is_inf().select(&greater, below.select(other, x) + apart.exp2().log1p() * LOG2_E)
    };
    /// The greater operand, or the operand that is not NaN.
    pub fmax(x, other) = x.ge(other).or(other.is_nan()).select(x, other);
    /// The lesser operand, or the operand that is not NaN.
    pub fmin(x, other) = x.le(other).or(other.is_nan()).select(x, other);
    /// x, with NaN and the infinities replaced.
    pub nan_to_num(x, nan, posinf, neginf) = {
        // This is written without `is_finite`, so that it also works for integers: x - x is 0 only for finite x.
        let beyond = x.gt(0.0).select(posinf, neginf);
        (x - x).eq(0.0).select(x, x.is_nan().select(nan, beyond))
    };
    /// 1 where x and `other` are equal or differ by at most `atol + |rtol * other|`, else 0. Two NaNs count as close if `equal_nan` is
    /// not 0.
    pub is_close(x, other, rtol, atol, equal_nan) = {
        let error = (x - other).abs();
        let allowed = atol + (rtol * other).abs();
        let near = error.is_finite() * error.le(allowed);
        let both_nan = x.is_nan() * other.is_nan() * equal_nan.ne(0.0);
        x.eq(other).or(near).or(both_nan)
    };
    /// The least common multiple of integers; never negative, and 0 if either operand is 0.
    pub(crate) lcm(x, other) = {
        let divisor = x.gcd(other);
        (x / divisor.eq(0.0).select(1.0, &divisor) * other).abs()
    };
}

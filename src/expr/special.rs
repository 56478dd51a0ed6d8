//! Methods of [`Expr`] for special functions, and for the bits of integers.

use std::f64::consts::{FRAC_1_SQRT_2, LOG2_E, PI};

use crate::expr::{Binary, Expr};

/// Returns the nested series `1 + f(1) (1 + f(2) (1 + ... (1 + f(n))))`.
fn nested_series(n: usize, f: impl Fn(f64) -> Expr) -> Expr {
    (1..=n).rev().fold(Expr::constant(1.0), |sum, k| f(k as f64) * sum + 1.0)
}

/// Special functions.
impl Expr {
    /// The logarithmic derivative of the gamma function. -inf at 0, NaN at the other poles.
    pub fn digamma(&self) -> Expr {
        // Below 1/2, the reflection formula is used; otherwise the asymptotic series at x + 10.
        let low = self.lt(0.5);
        let x = low.select(1.0 - self, self);
        let z = &x + 10.0;
        let r = z.recip().square();
        let bernoulli = [1.0 / 12.0, 1.0 / 120.0, 1.0 / 252.0, 1.0 / 240.0, 1.0 / 132.0, 691.0 / 32760.0];
        let tail = bernoulli.iter().rev().fold(Expr::constant(0.0), |sum, &c| &r * (c - sum));
        let steps = (1..10).fold(x.recip(), |sum, k| sum + (&x + f64::from(k)).recip());
        let above = z.log() - 0.5 * z.recip() - tail - steps;
        let pole = self.lt(0.0) * self.floor().eq(self);
        pole.select(f64::NAN, low.select(&above - PI / (self * PI).tan(), &above))
    }

    /// The inverse of the error function.
    pub fn erfinv(&self) -> Expr {
        // Winitzki's approximation has three digits; each of Halley's steps triples them.
        const A: f64 = 0.147;
        let y = self.abs();
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
        let near = self * (PI.sqrt() / 2.0) * (1.0 + self.square() * (PI / 12.0));
        let far = y.eq(1.0).select(self * f64::INFINITY, self.lt(0.0).select(-1.0, 1.0) * x);
        y.lt(1e-4).select(near, far)
    }

    /// The modified Bessel function of the first kind of order 0.
    pub fn i0(&self) -> Expr {
        // The series of (x / 2)^2k / k!² is used for small x, and a series in 1 / x for large x.
        let series = |t: &Expr| nested_series(36, |k| t / (k * k));
        self.bessel(series, |k| (2.0 * k - 1.0).powi(2))
    }

    /// The modified Bessel function of the first kind of order 1.
    pub fn i1(&self) -> Expr {
        let series = |t: &Expr| nested_series(36, |k| t / (k * (k + 1.0)));
        // The factor x / 2 gives the series the sign of x, and has a derivative at 0.
        let value = self.bessel(|t| self * 0.5 * series(t), |k| (2.0 * k - 1.0).powi(2) - 4.0);
        self.le(-20.0).select(-&value, value)
    }

    /// Returns a modified Bessel function of |x|: a series in `x² / 4` up to |x| = 20, and a series in `1 / 8x` above. In the second
    /// series, each term is the previous term times `step(k) / k`.
    fn bessel(&self, near: impl Fn(&Expr) -> Expr, step: impl Fn(f64) -> f64) -> Expr {
        let x = self.abs();
        let far = x.lt(20.0).select(20.0, &x);
        let tail = nested_series(20, |k| (far.recip() * 0.125) * (step(k) / k));
        let beyond = far.exp() * (&far * (2.0 * PI)).rsqrt() * tail;
        let close = x.lt(20.0).select(&x, 0.0);
        x.lt(20.0).select(near(&(close.square() * 0.25)), x.is_nan().select(&x, beyond))
    }

    /// `sin(pi x) / (pi x)`, 1 at 0.
    pub fn sinc(&self) -> Expr {
        let angle = self * PI;
        self.eq(0.0).select(1.0, angle.sin() / &angle)
    }

    /// The derivative of [`sinc`](Expr::sinc). Near 0, where the terms of the quotient rule cancel, it is computed by a series.
    pub(crate) fn sinc_derivative(&self) -> Expr {
        let z = (self * PI).square();
        let series = ((&z / 45360.0 - 1.0 / 840.0) * &z + 1.0 / 30.0) * &z - 1.0 / 3.0;
        let near = series * (self * (PI * PI));
        self.abs().lt(0.02).select(near, ((self * PI).cos() - self.sinc()) / self)
    }

    /// `log(x / (1 - x))`.
    pub fn logit(&self) -> Expr {
        (self / (1.0 - self)).log()
    }

    /// The cumulative distribution function of the standard normal distribution.
    pub fn ndtr(&self) -> Expr {
        (self * -FRAC_1_SQRT_2).erfc() * 0.5
    }

    /// `log2(2^x + 2^other)` without overflow.
    pub fn logaddexp2(&self, other: impl Into<Expr>) -> Expr {
        let other = other.into();
        // This is not written with |self - other|, for the reason given in `logaddexp`.
        let (below, greater) = (self.lt(&other), self.max(&other));
        let apart = below.select(self - &other, &other - self);
        greater.is_inf().select(&greater, below.select(&other, self) + apart.exp2().log1p() * LOG2_E)
    }

    /// The greater operand, or the operand that is not NaN.
    pub fn fmax(&self, other: impl Into<Expr>) -> Expr {
        let other = other.into();
        self.ge(&other).or(other.is_nan()).select(self, &other)
    }

    /// The lesser operand, or the operand that is not NaN.
    pub fn fmin(&self, other: impl Into<Expr>) -> Expr {
        let other = other.into();
        self.le(&other).or(other.is_nan()).select(self, &other)
    }

    /// x, with NaN and the infinities replaced.
    #[allow(clippy::eq_op)] // x - x is 0 only for finite x
    pub fn nan_to_num(&self, nan: impl Into<Expr>, posinf: impl Into<Expr>, neginf: impl Into<Expr>) -> Expr {
        // This is written without `is_finite`, so that it also works for integers.
        let beyond = self.gt(0.0).select(posinf, neginf);
        (self - self).eq(0.0).select(self, self.is_nan().select(nan, beyond))
    }

    /// 1 where x and `other` are equal or differ by at most `atol + |rtol * other|`, else 0. Two NaNs count as close if `equal_nan` is
    /// not 0.
    pub fn is_close(
        &self,
        other: impl Into<Expr>,
        rtol: impl Into<Expr>,
        atol: impl Into<Expr>,
        equal_nan: impl Into<Expr>,
    ) -> Expr {
        let other = other.into();
        let error = (self - &other).abs();
        let allowed = atol.into() + (rtol.into() * &other).abs();
        let near = error.is_finite() * error.le(allowed);
        let both_nan = self.is_nan() * other.is_nan() * equal_nan.into().ne(0.0);
        self.eq(other).or(near).or(both_nan)
    }
}

macro_rules! primitives {
    ($($(#[$doc:meta])* $name:ident => $op:ident;)*) => { $(
        $(#[$doc])*
        pub(crate) fn $name(&self, other: impl Into<Expr>) -> Expr {
            Expr::binary(Binary::$op, self.clone(), other.into())
        }
    )* };
}

/// Functions of integers. They are crate-private, because they are not defined for floats.
impl Expr {
    primitives! {
        bit_and => And;
        bit_or => Or;
        bit_xor => Xor;
        /// `x * 2^other`; 0 for a shift outside 0..64.
        shift_left => Shl;
        /// `x / 2^other` rounded down; -1 or 0, by the sign of x, for a shift outside 0..64.
        shift_right => Shr;
        /// The greatest common divisor; never negative.
        gcd => Gcd;
    }

    /// The least common multiple; never negative, and 0 if either operand is 0.
    pub(crate) fn lcm(&self, other: impl Into<Expr>) -> Expr {
        let other = other.into();
        let divisor = self.gcd(&other);
        (self / divisor.eq(0.0).select(1.0, &divisor) * other).abs()
    }
}

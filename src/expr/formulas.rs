//! The methods of [`Expr`]: one for each primitive, and formulas composed of primitives.
//!
//! Composite formulas are written so that the symbolic derivative is finite wherever the function's derivative is, and equals PyTorch's
//! derivative at kinks: `relu'(0) = 0`, and `clamp'` is 1 on the bounds.

use std::f64::consts::{FRAC_1_SQRT_2, PI};

use crate::expr::{Binary, Expr, GELU_CUBE, SQRT_2_OVER_PI, Unary};

macro_rules! unary {
    ($($(#[$doc:meta])* $name:ident => $op:ident;)*) => {
        /// Primitives of one operand.
        impl Expr { $(
            $(#[$doc])*
            pub fn $name(&self) -> Expr {
                Expr::unary(Unary::$op, self.clone())
            }
        )* }
    };
}

macro_rules! binary {
    ($($(#[$doc:meta])* $name:ident => $op:ident;)*) => {
        /// Primitives of two operands.
        #[allow(clippy::should_implement_trait)] // the operators themselves implement the traits
        impl Expr { $(
            $(#[$doc])*
            pub fn $name(&self, other: impl Into<Expr>) -> Expr {
                Expr::binary(Binary::$op, self.clone(), other.into())
            }
        )* }
    };
}

unary! {
    /// `|x|`; its derivative at 0 is 0.
    abs => Abs;
    /// The greatest integer that is at most x.
    floor => Floor;
    /// The least integer that is at least x.
    ceil => Ceil;
    /// The nearest integer, ties to even.
    round => Round;
    /// The integer part of x.
    trunc => Trunc;
    /// The square root.
    sqrt => Sqrt;
    /// e to the power of x.
    exp => Exp;
    /// The natural logarithm.
    log => Log;
    /// The logarithm to base 2.
    log2 => Log2;
    /// The logarithm to base 10.
    log10 => Log10;
    /// `exp(x) - 1`, accurate near 0.
    expm1 => Expm1;
    /// `log(1 + x)`, accurate near 0.
    log1p => Log1p;
    /// The sine, x in radians.
    sin => Sin;
    /// The cosine, x in radians.
    cos => Cos;
    /// The hyperbolic tangent.
    tanh => Tanh;
    /// The error function.
    erf => Erf;
    /// `1 - erf(x)`, accurate where the result is small.
    erfc => Erfc;
    /// The logarithm of |gamma(x)|.
    lgamma => Lgamma;
    /// The arc tangent, in radians.
    atan => Atan;
    /// The logistic function `1 / (1 + exp(-x))`.
    sigmoid => Sigmoid;
}

binary! {
    /// x to the power of `other`. Integers are computed by repeated squaring, with wrapping; a negative power is 0 unless x is 1 or -1.
    pow => Pow;
    /// The greater operand; NaN if either operand is NaN. If the operands are equal, each operand gets half of the gradient.
    max => Max;
    /// The lesser operand; NaN if either operand is NaN. If the operands are equal, each operand gets half of the gradient.
    min => Min;
    /// 1 where x is less than `other`, else 0.
    lt => Lt;
    /// 1 where x is less than or equal to `other`, else 0.
    le => Le;
    /// 1 where x equals `other`, else 0. (The operator `==` compares two formulas by structure.)
    eq => Eq;
    /// x with the sign of `other`.
    copysign => Copysign;
}

/// Comparisons and logic. The results are 1 and 0; every number except 0 is true.
#[allow(clippy::should_implement_trait)] // they build formulas
impl Expr {
    /// 1 where x is greater than `other`, else 0.
    pub fn gt(&self, other: impl Into<Expr>) -> Expr {
        other.into().lt(self)
    }

    /// 1 where x is greater than or equal to `other`, else 0.
    pub fn ge(&self, other: impl Into<Expr>) -> Expr {
        other.into().le(self)
    }

    /// 1 where x does not equal `other`, else 0. NaN equals nothing.
    pub fn ne(&self, other: impl Into<Expr>) -> Expr {
        1.0 - self.eq(other)
    }

    /// 1 where x is 0, else 0.
    pub fn not(&self) -> Expr {
        self.eq(0.0)
    }

    /// 1 where both operands are true, else 0.
    pub fn and(&self, other: impl Into<Expr>) -> Expr {
        self.ne(0.0) * other.into().ne(0.0)
    }

    /// 1 where either operand is true, else 0.
    pub fn or(&self, other: impl Into<Expr>) -> Expr {
        self.ne(0.0).max(other.into().ne(0.0))
    }

    /// 1 where exactly one operand is true, else 0.
    pub fn xor(&self, other: impl Into<Expr>) -> Expr {
        self.not().ne(other.into().not())
    }

    /// 1 where x is NaN, else 0.
    pub fn is_nan(&self) -> Expr {
        self.ne(self)
    }

    /// 1 where x is infinite, else 0.
    pub fn is_inf(&self) -> Expr {
        self.abs().eq(f64::INFINITY)
    }

    /// 1 where x is neither infinite nor NaN, else 0.
    pub fn is_finite(&self) -> Expr {
        self.abs().lt(f64::INFINITY)
    }
}

/// Arithmetic and powers.
impl Expr {
    /// -1, 0 or 1; 0 for NaN.
    pub fn sign(&self) -> Expr {
        self.gt(0.0) - self.lt(0.0)
    }

    /// `x * x`.
    pub fn square(&self) -> Expr {
        self * self
    }

    /// `1 / x`.
    pub fn recip(&self) -> Expr {
        1.0 / self
    }

    /// `1 / sqrt(x)`.
    pub fn rsqrt(&self) -> Expr {
        self.sqrt().recip()
    }

    /// The fractional part of x, with the sign of x.
    pub fn frac(&self) -> Expr {
        self - self.trunc()
    }

    /// The remainder with the sign of the divisor (Python's `%`).
    pub fn remainder(&self, other: impl Into<Expr>) -> Expr {
        let b = other.into();
        let r = self % &b;
        r.has_wrong_sign(&b).select(&r + &b, &r)
    }

    /// The quotient rounded down (Python's `//`). The result is exact, whereas rounding the float quotient down could give the wrong
    /// integer.
    pub fn floor_divide(&self, other: impl Into<Expr>) -> Expr {
        let b = other.into();
        let r = self % &b;
        let exact = ((self - &r) / &b - r.has_wrong_sign(&b)).round();
        b.eq(0.0).select(self / &b, exact).floor()
    }

    /// 1 where the remainder `self` is nonzero and its sign differs from the sign of `divisor`, else 0.
    fn has_wrong_sign(&self, divisor: &Expr) -> Expr {
        self.ne(0.0) * self.lt(0.0).ne(divisor.lt(0.0))
    }

    /// x limited to `low..=high`; `high` if the bounds are reversed. The derivative is 1 on both bounds.
    pub fn clamp(&self, low: impl Into<Expr>, high: impl Into<Expr>) -> Expr {
        let (low, high) = (low.into(), high.into());
        let raised = self.lt(&low).select(&low, self);
        high.lt(&raised).select(&high, &raised)
    }

    /// `x + weight * (end - x)`, exact at both ends.
    pub fn lerp(&self, end: impl Into<Expr>, weight: impl Into<Expr>) -> Expr {
        let (end, w) = (end.into(), weight.into());
        let d = &end - self;
        w.lt(0.5).select(self + &w * &d, &end - (1.0 - &w) * &d)
    }

    /// `sqrt(x² + other²)` without intermediate overflow.
    pub fn hypot(&self, other: impl Into<Expr>) -> Expr {
        let (a, b) = (self.abs(), other.into().abs());
        let (big, small) = (a.max(&b), a.min(&b));
        let root = &big * (1.0 + (&small / &big).square()).sqrt();
        // An infinite operand makes the result infinite, even if the other operand is NaN.
        let endless = a.eq(f64::INFINITY).or(b.eq(f64::INFINITY));
        endless.select(f64::INFINITY, big.eq(0.0).select(&big, root))
    }
}

/// Exponentials, logarithms and trigonometry.
impl Expr {
    /// 2 to the power of x.
    pub fn exp2(&self) -> Expr {
        Expr::constant(2.0).pow(self)
    }

    /// The tangent.
    pub fn tan(&self) -> Expr {
        self.sin() / self.cos()
    }

    /// The arc sine.
    pub fn asin(&self) -> Expr {
        (self * ((1.0 - self) * (1.0 + self)).rsqrt()).atan()
    }

    /// The arc cosine.
    pub fn acos(&self) -> Expr {
        ((1.0 - self) / (1.0 + self)).sqrt().atan() * 2.0
    }

    /// The angle of the point (`x`, self), in radians.
    pub fn atan2(&self, x: impl Into<Expr>) -> Expr {
        let x = x.into();
        let (origin, endless) = (self.eq(0.0) * x.eq(0.0), self.is_inf() * x.is_inf());
        // If `x` is -0, it is replaced by 0, so that the quotient's sign is the sign of the angle.
        let quotient = endless.select(self.sign() * x.sign(), self / x.eq(0.0).select(0.0, &x));
        let angle = origin.select(0.0, quotient).atan();
        let left = x.lt(0.0) + origin * Expr::constant(1.0).copysign(&x).lt(0.0);
        left.select(&angle + Expr::constant(PI).copysign(self), &angle)
    }

    /// `log(exp(x) + exp(other))` without overflow.
    pub fn logaddexp(&self, other: impl Into<Expr>) -> Expr {
        let other = other.into();
        let (below, greater) = (self.lt(&other), self.max(&other));
        // This is not written with |self - other|, which has no second derivative where the operands are equal.
        let apart = below.select(self - &other, &other - self);
        greater.is_inf().select(&greater, below.select(&other, self) + apart.exp().log1p())
    }

    /// The hyperbolic sine.
    pub fn sinh(&self) -> Expr {
        // exp(x) overflows where exp(x) / 2 is still finite, so the exponential of half the argument is squared.
        let half = (self.abs() * 0.5).exp();
        let large = self.lt(0.0).select(-0.5, 0.5) * &half * &half;
        self.abs().gt(20.0).select(large, (self.expm1() - (-self).expm1()) * 0.5)
    }

    /// The hyperbolic cosine.
    pub fn cosh(&self) -> Expr {
        let half = (self.abs() * 0.5).exp();
        let large = 0.5 * &half * &half;
        self.abs().gt(20.0).select(large, (self.exp() + (-self).exp()) * 0.5)
    }

    /// The inverse hyperbolic sine.
    pub fn asinh(&self) -> Expr {
        let a = self.abs();
        let inverse = a.recip();
        let tail = &a / (&inverse + (1.0 + inverse.square()).sqrt());
        self.lt(0.0).select(-1.0, 1.0) * (&a + tail).log1p()
    }

    /// The inverse hyperbolic cosine.
    pub fn acosh(&self) -> Expr {
        let d = self - 1.0;
        (&d + d.sqrt() * (self + 1.0).sqrt()).log1p()
    }

    /// The inverse hyperbolic tangent.
    pub fn atanh(&self) -> Expr {
        (2.0 * self / (1.0 - self)).log1p() * 0.5
    }
}

/// Activations.
impl Expr {
    /// `max(x, 0)`; the derivative at 0 is 0.
    pub fn relu(&self) -> Expr {
        self.le(0.0).select(0.0, self)
    }

    /// x where x is positive, else `slope * x`.
    pub fn leaky_relu(&self, slope: impl Into<Expr>) -> Expr {
        self.gt(0.0).select(self, self * slope.into())
    }

    /// x where x is positive, else `alpha * (exp(x) - 1)`.
    pub fn elu(&self, alpha: impl Into<Expr>) -> Expr {
        self.gt(0.0).select(self, alpha.into() * self.expm1())
    }

    /// [`elu`](Expr::elu) with the constants that preserve mean and variance (Klambauer et al., 2017).
    pub fn selu(&self) -> Expr {
        1.0507009873554805 * self.elu(1.6732632423543772)
    }

    /// x limited to `low..=high`. Unlike for [`clamp`](Expr::clamp), the derivative is 0 on both bounds.
    pub fn hardtanh(&self, low: impl Into<Expr>, high: impl Into<Expr>) -> Expr {
        let (low, high) = (low.into(), high.into());
        self.le(&low).select(&low, high.le(self).select(&high, self))
    }

    /// x times the cumulative distribution function of the standard normal distribution, computed with `erf`.
    pub fn gelu(&self) -> Expr {
        0.5 * self * (1.0 + (self * FRAC_1_SQRT_2).erf())
    }

    /// The approximation of [`gelu`](Expr::gelu) with `tanh`.
    pub fn gelu_tanh(&self) -> Expr {
        let inner = SQRT_2_OVER_PI * (self + GELU_CUBE * self.square() * self);
        0.5 * self * (1.0 + inner.tanh())
    }

    /// `x * sigmoid(x)`.
    pub fn silu(&self) -> Expr {
        self * self.sigmoid()
    }

    /// `log(1 + exp(x))`; for x above 20, x itself, which is equal in f32.
    pub fn softplus(&self) -> Expr {
        self.gt(20.0).select(self, self.exp().log1p())
    }

    /// `log(sigmoid(x))` without overflow.
    pub fn logsigmoid(&self) -> Expr {
        // This is not written with |x|, which has no second derivative at 0.
        let below = self.lt(0.0);
        below.select(self, 0.0) - below.select(self, -self).exp().log1p()
    }
}

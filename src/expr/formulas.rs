//! The methods of [`Expr`]: one for each primitive, and formulas composed of primitives.
//!
//! Composite formulas are written so that the symbolic derivative is finite wherever the function's derivative is, and equals PyTorch's
//! derivative at kinks: `relu'(0) = 0`, and `clamp'` is 1 on the bounds.

use std::f64::consts::{FRAC_1_SQRT_2, PI};

use crate::expr::{Binary, Expr, GELU_CUBE, Leaf, SQRT_2_OVER_PI, Unary};

macro_rules! leaves {
    ($($(#[$doc:meta])* $name:ident => $leaf:ident;)*) => {
        /// Leaves.
        impl Expr { $(
            $(#[$doc])*
            pub fn $name(i: usize) -> Expr {
                Expr::leaf(Leaf::$leaf(i))
            }
        )* }
    };
}

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
    ($(#[$group:meta])+ $vis:vis impl Expr: $($(#[$doc:meta])* $name:ident => $op:ident;)*) => {
        $(#[$group])+
        #[allow(clippy::should_implement_trait)] // the operators themselves implement the traits
        impl Expr { $(
            $(#[$doc])*
            $vis fn $name(&self, other: impl Into<Expr>) -> Expr {
                Expr::binary(Binary::$op, self.clone(), other.into())
            }
        )* }
    };
}

leaves! {
    /// The current element of the `i`-th operand.
    input => Input;
    /// The `i`-th scalar argument, which is passed when the formula runs, so that another value (such as a learning rate) needs no new
    /// kernel.
    scalar => Scalar;
    /// A random number in [0, 1), a multiple of 2⁻²⁴, determined by the `i`-th seed and the element's index. The number is the same on
    /// every device, and in f32 and f64.
    uniform => Uniform;
    /// A standard normal random number, determined by the `i`-th seed and the element's index. It is computed in f32, and is the same on
    /// every device, and in f32 and f64.
    normal => Normal;
    /// A number in 0..2³² with 32 random bits, determined by the `i`-th seed and the element's index. It is rounded if the formula is
    /// evaluated in f32.
    bits => Bits;
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
    /// Primitives of two operands.
    pub impl Expr:
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

binary! {
    /// Primitives of integers. They are crate-private, because they are not defined for floats.
    pub(crate) impl Expr:
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

/// Defines methods of [`Expr`] by formulas of `x`, the expression on which the method is called, and of further operands.
macro_rules! formulas {
    ($(#[$group:meta])+ impl Expr:
        $($(#[$doc:meta])+ $vis:vis $name:ident($x:ident $(, $operand:ident)*) = $formula:expr;)*) => {
        $(#[$group])+
        #[allow(clippy::should_implement_trait, clippy::eq_op)] // the methods build formulas
        impl Expr { $(
            $(#[$doc])+
            $vis fn $name(&self $(, $operand: impl Into<Expr>)*) -> Expr {
                let $x = self;
                $(let $operand: &Expr = &$operand.into();)*
                $formula
            }
        )* }
    };
}

pub(crate) use formulas;

formulas! {
    /// Comparisons and logic. The results are 1 and 0; every number except 0 is true.
    impl Expr:
    /// 1 where x is greater than `other`, else 0.
    pub gt(x, other) = other.lt(x);
    /// 1 where x is greater than or equal to `other`, else 0.
    pub ge(x, other) = other.le(x);
    /// 1 where x does not equal `other`, else 0. NaN equals nothing.
    pub ne(x, other) = 1.0 - x.eq(other);
    /// 1 where x is 0, else 0.
    pub not(x) = x.eq(0.0);
    /// 1 where both operands are true, else 0.
    pub and(x, other) = x.ne(0.0) * other.ne(0.0);
    /// 1 where either operand is true, else 0.
    pub or(x, other) = x.ne(0.0).max(other.ne(0.0));
    /// 1 where exactly one operand is true, else 0.
    pub xor(x, other) = x.not().ne(other.not());
    /// 1 where x is NaN, else 0.
    pub is_nan(x) = x.ne(x);
    /// 1 where x is infinite, else 0.
    pub is_inf(x) = x.abs().eq(f64::INFINITY);
    /// 1 where x is neither infinite nor NaN, else 0.
    pub is_finite(x) = x.abs().lt(f64::INFINITY);
}

formulas! {
    /// Arithmetic and powers.
    impl Expr:
    /// -1, 0 or 1; 0 for NaN.
    pub sign(x) = x.gt(0.0) - x.lt(0.0);
    /// `x * x`.
    pub square(x) = x * x;
    /// `1 / x`.
    pub recip(x) = 1.0 / x;
    /// `1 / sqrt(x)`.
    pub rsqrt(x) = x.sqrt().recip();
    /// The fractional part of x, with the sign of x.
    pub frac(x) = x - x.trunc();
    /// The remainder with the sign of the divisor (Python's `%`).
    pub remainder(x, other) = {
        let r = x % other;
        r.has_wrong_sign(other).select(&r + other, &r)
    };
    /// The quotient rounded down (Python's `//`). The result is exact, whereas rounding the float quotient down could give the wrong
    /// integer.
    pub floor_divide(x, other) = {
        let r = x % other;
        let exact = ((x - &r) / other - r.has_wrong_sign(other)).round();
        other.eq(0.0).select(x / other, exact).floor()
    };
    /// 1 where the remainder x is nonzero and its sign differs from the sign of `divisor`, else 0.
    has_wrong_sign(x, divisor) = x.ne(0.0) * x.lt(0.0).ne(divisor.lt(0.0));
    /// x limited to `low..=high`; `high` if the bounds are reversed. The derivative is 1 on both bounds.
    pub clamp(x, low, high) = {
        let raised = x.lt(low).select(low, x);
        high.lt(&raised).select(high, &raised)
    };
    /// `x + weight * (end - x)`, exact at both ends.
    pub lerp(x, end, weight) = {
        let d = end - x;
        weight.lt(0.5).select(x + weight * &d, end - (1.0 - weight) * &d)
    };
    /// `sqrt(x² + other²)` without intermediate overflow.
    pub hypot(x, other) = {
        let (a, b) = (x.abs(), other.abs());
        let (big, small) = (a.max(&b), a.min(&b));
        let root = &big * (1.0 + (&small / &big).square()).sqrt();
        // An infinite operand makes the result infinite, even if the other operand is NaN.
        let endless = a.eq(f64::INFINITY).or(b.eq(f64::INFINITY));
        endless.select(f64::INFINITY, big.eq(0.0).select(&big, root))
    };
}

formulas! {
    /// Exponentials, logarithms and trigonometry.
    impl Expr:
    /// 2 to the power of x.
    pub exp2(x) = Expr::constant(2.0).pow(x);
    /// The tangent.
    pub tan(x) = x.sin() / x.cos();
    /// The arc sine.
    pub asin(x) = (x * ((1.0 - x) * (1.0 + x)).rsqrt()).atan();
    /// The arc cosine.
    pub acos(x) = ((1.0 - x) / (1.0 + x)).sqrt().atan() * 2.0;
    /// The angle of the point (`x`, self), in radians.
    pub atan2(y, x) = {
        let (origin, endless) = (y.eq(0.0) * x.eq(0.0), y.is_inf() * x.is_inf());
        // If `x` is -0, it is replaced by 0, so that the quotient's sign is the sign of the angle.
        let quotient = endless.select(y.sign() * x.sign(), y / x.eq(0.0).select(0.0, x));
        let angle = origin.select(0.0, quotient).atan();
        let left = x.lt(0.0) + origin * Expr::constant(1.0).copysign(x).lt(0.0);
        left.select(&angle + Expr::constant(PI).copysign(y), &angle)
    };
    /// `log(exp(x) + exp(other))` without overflow.
    pub logaddexp(x, other) = {
        let (below, greater) = (x.lt(other), x.max(other));
        // This is not written with |x - other|, which has no second derivative where the operands are equal.
        let apart = below.select(x - other, other - x);
        greater.is_inf().select(&greater, below.select(other, x) + apart.exp().log1p())
    };
    /// The hyperbolic sine.
    pub sinh(x) = {
        // exp(x) overflows where exp(x) / 2 is still finite, so the exponential of half the argument is squared.
        let half = (x.abs() * 0.5).exp();
        let large = x.lt(0.0).select(-0.5, 0.5) * &half * &half;
        x.abs().gt(20.0).select(large, (x.expm1() - (-x).expm1()) * 0.5)
    };
    /// The hyperbolic cosine.
    pub cosh(x) = {
        let half = (x.abs() * 0.5).exp();
        let large = 0.5 * &half * &half;
        x.abs().gt(20.0).select(large, (x.exp() + (-x).exp()) * 0.5)
    };
    /// The inverse hyperbolic sine.
    pub asinh(x) = {
        let a = x.abs();
        let inverse = a.recip();
        let tail = &a / (&inverse + (1.0 + inverse.square()).sqrt());
        x.lt(0.0).select(-1.0, 1.0) * (&a + tail).log1p()
    };
    /// The inverse hyperbolic cosine.
    pub acosh(x) = {
        let d = x - 1.0;
        (&d + d.sqrt() * (x + 1.0).sqrt()).log1p()
    };
    /// The inverse hyperbolic tangent.
    pub atanh(x) = (2.0 * x / (1.0 - x)).log1p() * 0.5;
}

formulas! {
    /// Activations.
    impl Expr:
    /// `max(x, 0)`; the derivative at 0 is 0.
    pub relu(x) = x.le(0.0).select(0.0, x);
    /// x where x is positive, else `slope * x`.
    pub leaky_relu(x, slope) = x.gt(0.0).select(x, x * slope);
    /// x where x is positive, else `alpha * (exp(x) - 1)`.
    pub elu(x, alpha) = x.gt(0.0).select(x, alpha * x.expm1());
    /// [`elu`](Expr::elu) with the constants that preserve mean and variance (Klambauer et al., 2017).
    pub selu(x) = 1.0507009873554805 * x.elu(1.6732632423543772);
    /// x limited to `low..=high`. Unlike for [`clamp`](Expr::clamp), the derivative is 0 on both bounds.
    pub hardtanh(x, low, high) = x.le(low).select(low, high.le(x).select(high, x));
    /// x times the cumulative distribution function of the standard normal distribution, computed with `erf`.
    pub gelu(x) = 0.5 * x * (1.0 + (x * FRAC_1_SQRT_2).erf());
    /// The approximation of [`gelu`](Expr::gelu) with `tanh`.
    pub gelu_tanh(x) = {
        let inner = SQRT_2_OVER_PI * (x + GELU_CUBE * x.square() * x);
        0.5 * x * (1.0 + inner.tanh())
    };
    /// `x * sigmoid(x)`.
    pub silu(x) = x * x.sigmoid();
    /// `log(1 + exp(x))`; for x above 20, x itself, which is equal in f32.
    pub softplus(x) = x.gt(20.0).select(x, x.exp().log1p());
    /// `log(sigmoid(x))` without overflow.
    pub logsigmoid(x) = {
        // This is not written with |x|, which has no second derivative at 0.
        let below = x.lt(0.0);
        below.select(x, 0.0) - below.select(x, -x).exp().log1p()
    };
}

//! The three types in which the CPU evaluates formulas, and every primitive on one element of these types.

use std::f64::consts::{FRAC_1_SQRT_2, PI};

use crate::backend::cpu::kernels::math::{self, TwoStage};
use crate::expr::primitives::{gcd, shl, shr};
use crate::expr::{Binary, Unary};
use crate::{Compute, Scalar};

/// Functions that have vectorised implementations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum VectorFunction {
    Exp,
    Tanh,
    Sigmoid,
    Erf,
    Gelu,
    GeluTanh,
    Silu,
}

/// A type that formulas are evaluated in: f32, f64, or i64 for integers, which wrap. Default implementations return the operand: float functions
/// are never called on integers ([`needs_float`](crate::expr::program::Program::needs_float)), nor bit functions on floats.
#[rustfmt::skip]
pub(crate) trait Number: bytemuck::Pod + PartialOrd + Send + Sync + std::fmt::Debug {
    const COMPUTE: Compute;

    fn from_f32(x: f32) -> Self;
    fn from_f64(x: f64) -> Self;
    fn from_i32(x: i32) -> Self;
    fn from_i64(x: i64) -> Self;
    fn from_u32(x: u32) -> Self;
    fn from_scalar(x: Scalar) -> Self;
    fn to_f32(self) -> f32;
    fn to_f64(self) -> f64;
    fn to_i64(self) -> i64;
    fn to_i32(self) -> i32;
    fn to_i16(self) -> i16;
    fn to_i8(self) -> i8;
    fn to_u32(self) -> u32;
    fn to_u8(self) -> u8;
    fn is_true(self) -> bool;
    fn from_bool(b: bool) -> Self;

    fn neg(self) -> Self;
    fn abs(self) -> Self;
    fn add(self, b: Self) -> Self;
    fn sub(self, b: Self) -> Self;
    fn mul(self, b: Self) -> Self;
    fn div(self, b: Self) -> Self;
    fn rem(self, b: Self) -> Self;
    fn pow(self, b: Self) -> Self;
    fn max(self, b: Self) -> Self;
    fn min(self, b: Self) -> Self;

    fn floor(self) -> Self { self }
    fn ceil(self) -> Self { self }
    fn round(self) -> Self { self }
    fn trunc(self) -> Self { self }
    fn sqrt(self) -> Self { self }
    fn exp(self) -> Self { self }
    /// Writes [`exp`](Number::exp) of `map(x)` to `to`, for each element x of `from`.
    #[inline(always)]
    fn exp_each(to: &mut [Self], from: &[Self], map: impl Fn(Self) -> Self) {
        to.iter_mut().zip(from).for_each(|(y, x)| *y = map(*x).exp());
    }
    /// Replaces each element x by [`exp`](Number::exp) of `map(x)`.
    #[inline(always)]
    fn exp_in_place(elements: &mut [Self], map: impl Fn(Self) -> Self) {
        elements.iter_mut().for_each(|x| *x = map(*x).exp());
    }
    /// Writes the function of each element of `from` to `to`.
    #[inline(always)]
    fn apply_function(_: VectorFunction, to: &mut [Self], from: &[Self]) { to.copy_from_slice(from); }
    fn log(self) -> Self { self }
    fn log2(self) -> Self { self }
    fn log10(self) -> Self { self }
    fn expm1(self) -> Self { self }
    fn log1p(self) -> Self { self }
    fn sin(self) -> Self { self }
    fn cos(self) -> Self { self }
    /// True if `self` is too large for the vectorised `sin` and `cos`.
    fn is_huge_angle(self) -> bool { false }
    fn erfc(self) -> Self { self }
    fn lgamma(self) -> Self { self }
    fn atan(self) -> Self { self }
    fn copysign(self, _: Self) -> Self { self }

    fn and(self, _: Self) -> Self { self }
    fn or(self, _: Self) -> Self { self }
    fn xor(self, _: Self) -> Self { self }
    fn shl(self, _: Self) -> Self { self }
    fn shr(self, _: Self) -> Self { self }
    fn gcd(self, _: Self) -> Self { self }
}

macro_rules! methods {
    ($($name:ident($self:ident $(, $arg:ident)?) -> $ret:ty = $e:expr;)*) => { $(
        #[inline(always)]
        fn $name($self $(, $arg: Self)?) -> $ret { $e }
    )* };
    ($($name:ident($x:ident: $t:ty) -> $ret:ty = $e:expr;)*) => { $(
        #[inline(always)]
        fn $name($x: $t) -> $ret { $e }
    )* };
}

macro_rules! conversions {
    ($t:ident, $compute:ident, $scalar:ident) => {
        const COMPUTE: Compute = Compute::$compute;

        methods! {
            from_f32(x: f32) -> Self = x as $t;
            from_f64(x: f64) -> Self = x as $t;
            from_i32(x: i32) -> Self = x as $t;
            from_u32(x: u32) -> Self = x as $t;
            from_i64(x: i64) -> Self = x as $t;
            from_scalar(x: Scalar) -> Self = x.$scalar() as $t;
            from_bool(b: bool) -> Self = if b { 1 as $t } else { 0 as $t };
        }
        methods! {
            to_f32(self) -> f32 = self as f32;
            to_f64(self) -> f64 = self as f64;
            to_i64(self) -> i64 = self as i64;
            to_i32(self) -> i32 = self as i32;
            to_i16(self) -> i16 = self as i16;
            to_i8(self) -> i8 = self as i8;
            to_u32(self) -> u32 = self as u32;
            to_u8(self) -> u8 = self as u8;
            is_true(self) -> bool = self != (0 as $t);
        }
    };
}

macro_rules! float_arithmetic {
    ($t:ident) => {
        methods! {
            neg(self) -> Self = -self;
            abs(self) -> Self = $t::abs(self);
            add(self, b) -> Self = self + b;
            sub(self, b) -> Self = self - b;
            mul(self, b) -> Self = self * b;
            div(self, b) -> Self = self / b;
            rem(self, b) -> Self = self % b;
            // A comparison with NaN is false, so these selections return `b` if `b` is NaN. `self + b` is NaN too; with `self` in its
            // place, updates in place would become masked stores, which take six times as long on AMD's processors.
            max(self, b) -> Self = if self.is_nan() { self + b } else if self > b { self } else { b };
            min(self, b) -> Self = if self.is_nan() { self + b } else if self < b { self } else { b };
            floor(self) -> Self = $t::floor(self);
            ceil(self) -> Self = $t::ceil(self);
            round(self) -> Self = $t::round_ties_even(self);
            trunc(self) -> Self = $t::trunc(self);
            sqrt(self) -> Self = $t::sqrt(self);
            copysign(self, b) -> Self = $t::copysign(self, b);
        }
    };
}

#[rustfmt::skip]
impl Number for f32 {
    conversions!(f32, F32, to_f64);
    float_arithmetic!(f32);
    #[inline(always)]
    fn exp_each(to: &mut [f32], from: &[f32], map: impl Fn(f32) -> f32) { math::map_into::<math::Exp>(to, from, map); }
    #[inline(always)]
    fn exp_in_place(elements: &mut [f32], map: impl Fn(f32) -> f32) { math::map_in_place::<math::Exp>(elements, map); }
    #[inline(always)]
    fn apply_function(function: VectorFunction, to: &mut [f32], from: &[f32]) {
        match function {
            VectorFunction::Exp => math::map_into::<math::Exp>(to, from, |x| x),
            VectorFunction::Tanh => math::map_into::<math::Tanh>(to, from, |x| x),
            VectorFunction::Sigmoid => math::map_into::<math::Sigmoid>(to, from, |x| x),
            VectorFunction::Erf => math::map_into::<math::Erf>(to, from, |x| x),
            VectorFunction::Gelu => math::map_into::<math::Gelu>(to, from, |x| x),
            VectorFunction::GeluTanh => math::map_into::<math::GeluTanh>(to, from, |x| x),
            VectorFunction::Silu => math::map_into::<math::Silu>(to, from, |x| x),
        }
    }
    methods! {
        exp(self) -> f32 = math::Exp::eval(self);
        log(self) -> f32 = math::log(self);
        log2(self) -> f32 = math::log2(self);
        log10(self) -> f32 = math::log10(self);
        expm1(self) -> f32 = math::expm1(self);
        log1p(self) -> f32 = math::log1p(self);
        sin(self) -> f32 = math::sin(self);
        cos(self) -> f32 = math::cos(self);
        is_huge_angle(self) -> bool = f32::abs(self) > math::TRIG_LIMIT;
        erfc(self) -> f32 = libm::erfc(f64::from(self)) as f32;
        lgamma(self) -> f32 = libm::lgamma(f64::from(self)) as f32;
        atan(self) -> f32 = math::atan(self);
        pow(self, b) -> f32 = math::pow(self, b);
    }
}

#[rustfmt::skip]
impl Number for f64 {
    conversions!(f64, F64, to_f64);
    float_arithmetic!(f64);
    #[inline(always)]
    fn exp_each(to: &mut [f64], from: &[f64], map: impl Fn(f64) -> f64) { math::map_into::<math::Exp64>(to, from, map); }
    #[inline(always)]
    fn exp_in_place(elements: &mut [f64], map: impl Fn(f64) -> f64) { math::map_in_place::<math::Exp64>(elements, map); }
    #[inline(always)]
    fn apply_function(function: VectorFunction, to: &mut [f64], from: &[f64]) {
        let gelu = |x: f64| 0.5 * x * (1.0 + Unary::Erf.eval(x * FRAC_1_SQRT_2));
        let gelu_tanh = |x: f64| 0.5 * x * (1.0 + Unary::Tanh.eval((2.0 / PI).sqrt() * (x + 0.044715 * (x * x) * x)));
        let mut each = |one: &dyn Fn(f64) -> f64| to.iter_mut().zip(from).for_each(|(to, &x)| *to = one(x));
        match function {
            VectorFunction::Exp => math::map_into::<math::Exp64>(to, from, |x| x),
            VectorFunction::Tanh => each(&|x| Unary::Tanh.eval(x)),
            VectorFunction::Sigmoid => each(&|x| Unary::Sigmoid.eval(x)),
            VectorFunction::Erf => each(&|x| Unary::Erf.eval(x)),
            VectorFunction::Gelu => each(&gelu),
            VectorFunction::GeluTanh => each(&gelu_tanh),
            VectorFunction::Silu => each(&|x| x * Unary::Sigmoid.eval(x)),
        }
    }
    methods! {
        exp(self) -> f64 = math::Exp64::eval(self);
        log(self) -> f64 = Unary::Log.eval(self);
        log2(self) -> f64 = Unary::Log2.eval(self);
        log10(self) -> f64 = Unary::Log10.eval(self);
        expm1(self) -> f64 = Unary::Expm1.eval(self);
        log1p(self) -> f64 = Unary::Log1p.eval(self);
        sin(self) -> f64 = Unary::Sin.eval(self);
        cos(self) -> f64 = Unary::Cos.eval(self);
        erfc(self) -> f64 = Unary::Erfc.eval(self);
        lgamma(self) -> f64 = Unary::Lgamma.eval(self);
        atan(self) -> f64 = Unary::Atan.eval(self);
        pow(self, b) -> f64 = Binary::Pow.eval(self, b);
    }
}

#[rustfmt::skip]
impl Number for i64 {
    conversions!(i64, I64, to_i64);
    methods! {
        neg(self) -> i64 = self.wrapping_neg();
        abs(self) -> i64 = self.wrapping_abs();
        add(self, b) -> i64 = self.wrapping_add(b);
        sub(self, b) -> i64 = self.wrapping_sub(b);
        mul(self, b) -> i64 = self.wrapping_mul(b);
        div(self, b) -> i64 = if b == 0 { 0 } else { self.wrapping_div(b) };
        rem(self, b) -> i64 = if b == 0 { 0 } else { self.wrapping_rem(b) };
        max(self, b) -> i64 = Ord::max(self, b);
        min(self, b) -> i64 = Ord::min(self, b);
        pow(self, b) -> i64 = integer_power(self, b);
        and(self, b) -> i64 = self & b;
        or(self, b) -> i64 = self | b;
        xor(self, b) -> i64 = self ^ b;
        shl(self, b) -> i64 = shl(self, b);
        shr(self, b) -> i64 = shr(self, b);
        gcd(self, b) -> i64 = gcd(self, b);
    }
}

/// True if `v` is NaN.
#[inline(always)]
pub(crate) fn is_nan<C: Number>(v: C) -> bool {
    v.partial_cmp(&v).is_none()
}

/// Repeated squaring, with wrapping. A negative power is the truncated quotient: 0 unless the base is 1 or -1.
fn integer_power(mut base: i64, exponent: i64) -> i64 {
    if exponent < 0 {
        return match base {
            1 => 1,
            -1 => 1 - 2 * (exponent & 1),
            _ => 0,
        };
    }
    let (mut power, mut e) = (1i64, exponent);
    while e > 0 {
        if e & 1 == 1 {
            power = power.wrapping_mul(base);
        }
        base = base.wrapping_mul(base);
        e >>= 1;
    }
    power
}

//! The closed set of primitives from which formulas are built, and the function that each computes, in f64.

use std::f64::consts::FRAC_1_SQRT_2;
use std::hash::{Hash, Hasher};

/// The operation of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Op {
    Leaf(Leaf),
    Unary(Unary),
    Binary(Binary),
    /// `args[0] != 0 ? args[1] : args[2]`
    Select,
}

/// A node without operands: the source of a value.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Leaf {
    Input(usize),
    Scalar(usize),
    Const(f64),
    Uniform(usize),
    Normal(usize),
    Bits(usize),
    /// A number that a program receives as an argument, in place of a constant of its formulas; never NaN.
    Number {
        index: usize,
        whole: bool,
    },
}

impl Leaf {
    /// For a leaf that draws a random number, returns the kind of number and the index of the seed; otherwise `None`.
    pub(crate) fn draws(self) -> Option<(&'static str, usize)> {
        match self {
            Leaf::Uniform(i) => Some(("uniform", i)),
            Leaf::Normal(i) => Some(("normal", i)),
            Leaf::Bits(i) => Some(("bits", i)),
            _ => None,
        }
    }

    /// Returns a pair that identifies the leaf, for hashing and equality. Constants differ if their bits differ, except that all NaNs are
    /// equal.
    pub(crate) fn key(self) -> (u8, u64) {
        match self {
            Leaf::Input(i) => (0, i as u64),
            Leaf::Scalar(i) => (1, i as u64),
            Leaf::Const(c) if c.is_nan() => (2, f64::NAN.to_bits()),
            Leaf::Const(c) => (2, c.to_bits()),
            Leaf::Uniform(i) => (3, i as u64),
            Leaf::Normal(i) => (4, i as u64),
            Leaf::Bits(i) => (5, i as u64),
            Leaf::Number { index, whole } => (9, (index as u64) << 1 | u64::from(whole)),
        }
    }
}

impl PartialEq for Leaf {
    fn eq(&self, other: &Leaf) -> bool {
        self.key() == other.key()
    }
}
impl Eq for Leaf {}
impl Hash for Leaf {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.key().hash(state);
    }
}

/// The factor `sqrt(2 / pi)` in [`Expr::gelu_tanh`].
pub(crate) const SQRT_2_OVER_PI: f64 = 0.797_884_560_802_865_4;
/// The coefficient of x³ in [`Expr::gelu_tanh`].
pub(crate) const GELU_CUBE: f64 = 0.044715;

/// Constants that stay in a program's code, because simplifications, small powers and fused functions are recognised by them.
const INLINE_CONSTANTS: [f64; 12] =
    [0.0, 1.0, -1.0, 2.0, -2.0, 3.0, -3.0, 0.5, -0.5, FRAC_1_SQRT_2, SQRT_2_OVER_PI, GELU_CUBE];

/// True if the constant is passed to programs as an argument; false if it is part of a program's code.
pub(crate) fn is_argument(c: f64) -> bool {
    c.is_finite() && !INLINE_CONSTANTS.contains(&c)
}

/// True if the constant is an integer that i64 represents.
pub(crate) fn is_integer(c: f64) -> bool {
    c.trunc() == c && c.abs() <= 9e15
}

/// Defines primitives: an enum with one variant for each, and the function that each computes, in f64.
macro_rules! primitives {
    ($(#[$doc:meta])+ $name:ident($($x:ident),+): $($(#[$note:meta])* $op:ident $value:expr;)*) => {
        $(#[$doc])+
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub(crate) enum $name {
            $($(#[$note])* $op,)*
        }

        impl $name {
            /// Computes the primitive in f64, for constant folding.
            pub(crate) fn eval(self, $($x: f64),+) -> f64 {
                match self {
                    $($name::$op => $value,)*
                }
            }
        }
    };
}

primitives! {
    /// Primitives with one operand.
    Unary(x):
    Neg -x;
    Abs x.abs();
    Floor x.floor();
    Ceil x.ceil();
    Round x.round_ties_even();
    Trunc x.trunc();
    Sqrt x.sqrt();
    Exp x.exp();
    Log x.ln();
    Log2 x.log2();
    Log10 x.log10();
    Expm1 x.exp_m1();
    Log1p x.ln_1p();
    Sin x.sin();
    Cos x.cos();
    Tanh x.tanh();
    Erf libm::erf(x);
    Erfc libm::erfc(x);
    Lgamma libm::lgamma(x);
    Atan x.atan();
    Sigmoid 1.0 / (1.0 + (-x).exp());
}

primitives! {
    /// Primitives with two operands.
    Binary(a, b):
    Add a + b;
    Sub a - b;
    Mul a * b;
    Div a / b;
    /// Truncated remainder: the result has the sign of the dividend (C's `fmod` and `%`).
    Rem a % b;
    Pow a.powf(b);
    Max if a.is_nan() || a > b { a } else { b };
    Min if a.is_nan() || a < b { a } else { b };
    Lt (a < b) as u8 as f64;
    Le (a <= b) as u8 as f64;
    Eq (a == b) as u8 as f64;
    Copysign a.copysign(b);
    /// Defined only for integers, like all the following primitives.
    And (a as i64 & b as i64) as f64;
    Or (a as i64 | b as i64) as f64;
    Xor (a as i64 ^ b as i64) as f64;
    /// Shift left; 0 for a shift outside 0..64.
    Shl shl(a as i64, b as i64) as f64;
    /// Arithmetic shift right; for a shift outside 0..64: -1 if the operand is negative, else 0.
    Shr shr(a as i64, b as i64) as f64;
    /// The greatest common divisor; never negative, and 0 for two zeros.
    Gcd gcd(a as i64, b as i64) as f64;
}

impl Unary {
    /// True if integer operands must be converted to floats first.
    pub(crate) fn needs_float(self) -> bool {
        use Unary::*;
        !matches!(self, Neg | Abs | Floor | Ceil | Round | Trunc)
    }
}

impl Binary {
    /// True if integer division by zero is an error for this primitive.
    pub(crate) fn divides(self) -> bool {
        matches!(self, Binary::Div | Binary::Rem)
    }

    /// True if the primitive works on the bits of integers.
    pub(crate) fn needs_integers(self) -> bool {
        use Binary::*;
        matches!(self, And | Or | Xor | Shl | Shr | Gcd)
    }
}

/// Shifts left; returns 0 for a shift outside 0..64.
#[inline(always)]
pub(crate) fn shl(a: i64, b: i64) -> i64 {
    if (0..64).contains(&b) { a << b } else { 0 }
}

/// Shifts right arithmetically; for a shift outside 0..64, returns -1 if `a` is negative, else 0.
#[inline(always)]
pub(crate) fn shr(a: i64, b: i64) -> i64 {
    a >> if (0..64).contains(&b) { b } else { 63 }
}

/// Returns the greatest common divisor, by Euclid's algorithm.
pub(crate) fn gcd(a: i64, b: i64) -> i64 {
    let (mut a, mut b) = (a.unsigned_abs(), b.unsigned_abs());
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a as i64
}

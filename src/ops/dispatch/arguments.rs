//! The arguments of a call by name that are not tensors, and the kinds that parameters are of.

use std::fmt;

use crate::layout::dims::ReduceDims;
use crate::{DType, Device, Scalar};

/// An argument that is no tensor.
///
/// ```
/// use claystone::ops::Argument;
/// assert_eq!(Argument::from(2), Argument::Int(2));
/// assert_eq!(Argument::from(&[0, -1][..]), Argument::Ints(vec![0, -1]));
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Argument {
    /// Left out: the default.
    None,
    /// A whole number: a dim, a size, a count.
    Int(i64),
    /// A number.
    Float(f64),
    /// A switch.
    Bool(bool),
    /// Dims or sizes.
    Ints(Vec<i64>),
    /// Several numbers.
    Floats(Vec<f64>),
    /// A mode, an equation.
    Text(String),
    /// A dtype.
    DType(DType),
    /// A device.
    Device(Device),
}

/// As signatures show it.
impl fmt::Display for Argument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Argument::None => f.write_str("None"),
            Argument::Int(x) => write!(f, "{x}"),
            Argument::Float(x) => write!(f, "{x:?}"),
            Argument::Bool(x) => write!(f, "{x}"),
            Argument::Ints(x) => write!(f, "{x:?}"),
            Argument::Floats(x) => write!(f, "{x:?}"),
            Argument::Text(x) => write!(f, "{x:?}"),
            Argument::DType(x) => write!(f, "{x}"),
            Argument::Device(x) => write!(f, "{x}"),
        }
    }
}

macro_rules! from {
    ($($t:ty, $x:ident => $e:expr;)*) => {
        $(impl From<$t> for Argument {
            fn from($x: $t) -> Argument {
                $e
            }
        })*
    };
}

from! {
    i64, x => Argument::Int(x);
    i32, x => Argument::Int(x.into());
    isize, x => Argument::Int(x as i64);
    usize, x => Argument::Int(x as i64);
    f64, x => Argument::Float(x);
    bool, x => Argument::Bool(x);
    &str, x => Argument::Text(x.into());
    DType, x => Argument::DType(x);
    Device, x => Argument::Device(x);
    &[i32], x => Argument::Ints(x.iter().map(|&i| i.into()).collect());
    &[isize], x => Argument::Ints(x.iter().map(|&i| i as i64).collect());
    &[usize], x => Argument::Ints(x.iter().map(|&i| i as i64).collect());
    &[f64], x => Argument::Floats(x.to_vec());
    &ReduceDims, x => match x.given() {
        Some(dims) => Argument::from(dims),
        None => Argument::None,
    };
    Scalar, x => match x {
        Scalar::Int(i) => Argument::Int(i),
        Scalar::Float(f) => Argument::Float(f),
    };
}

impl<const N: usize> From<&[i32; N]> for Argument {
    fn from(x: &[i32; N]) -> Argument {
        Argument::from(&x[..])
    }
}

impl<const N: usize> From<&[usize; N]> for Argument {
    fn from(x: &[usize; N]) -> Argument {
        Argument::from(&x[..])
    }
}

impl<T: Into<Argument>> From<Option<T>> for Argument {
    fn from(x: Option<T>) -> Argument {
        x.map_or(Argument::None, Into::into)
    }
}

macro_rules! kinds {
    ($($(#[$doc:meta])+ $kind:ident $name:ident, $wanted:literal;)*) => {
        /// What a parameter of an operation takes.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum ParameterKind {
            $($(#[$doc])+ $kind,)*
        }

        /// By the words of rows.
        #[allow(non_upper_case_globals)]
        impl ParameterKind {
            $(pub(crate) const $name: ParameterKind = ParameterKind::$kind;)*

            /// Every kind.
            pub(crate) const ALL: &[ParameterKind] = &[$(ParameterKind::$kind),*];

            /// The word for it in signatures.
            pub fn name(self) -> &'static str {
                match self {
                    $(ParameterKind::$kind => stringify!($name),)*
                }
            }

            /// What it is, in words.
            pub(crate) fn wanted(self) -> &'static str {
                match self {
                    $(ParameterKind::$kind => $wanted,)*
                }
            }
        }
    };
}

kinds! {
    /// A tensor.
    Tensor tensor, "a tensor";
    /// Any number of tensors.
    Tensors tensors, "a list of tensors";
    /// A dim or any whole number.
    Int int, "an integer";
    /// A size or a count.
    Size size, "an integer that is not negative";
    /// A number.
    Float float, "a number";
    /// A number that stays an integer if it is one.
    Scalar scalar, "a number, whole or not";
    /// A switch.
    Bool bool, "true or false";
    /// Dims, or sizes of which one may be -1; one integer is a list of one.
    Ints ints, "a list of integers";
    /// Sizes; one integer is a list of one, and where windows move the size in every direction.
    Sizes sizes, "a list of integers that are not negative";
    /// Dims to reduce, all where there are none.
    Dims dims, "a list of dims, all where it is left out";
    /// A [`Padding`](crate::ops::Padding).
    Padding padding, "a padding: one size, one or two (before and behind) for each dim, 'same' or 'valid'";
    /// A mode, an equation.
    Text text, "a text";
    /// A dtype.
    DType dtype, "a dtype";
    /// A device.
    Device device, "a device";
}

//! Arguments other than tensors for operations called by name, and the kinds of parameters.

use std::fmt;

use crate::layout::dims::ReduceDims;
use crate::layout::shape::impl_from;
use crate::{DType, Device, Scalar};

/// An argument of an operation that is not a tensor.
///
/// ```
/// use claystone::ops::Argument;
/// assert_eq!(Argument::from(2), Argument::Int(2));
/// assert_eq!(Argument::from(&[0, -1][..]), Argument::Ints(vec![0, -1]));
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Argument {
    /// No value: the parameter has its default.
    None,
    /// An integer, such as a dim, a size or a count.
    Int(i64),
    /// A floating-point number.
    Float(f64),
    /// A boolean flag.
    Bool(bool),
    /// A list of integers, such as dims or sizes.
    Ints(Vec<i64>),
    /// A list of floating-point numbers.
    Floats(Vec<f64>),
    /// A string, such as a mode or an einsum equation.
    Text(String),
    /// A dtype.
    DType(DType),
    /// A device.
    Device(Device),
}

/// Formats the argument as in a [`Signature`](crate::ops::Signature).
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

impl_from! { Argument:
    [] i64, x => Argument::Int(x);
    [] i32, x => Argument::Int(x.into());
    [] isize, x => Argument::Int(x as i64);
    [] usize, x => Argument::Int(x as i64);
    [] f64, x => Argument::Float(x);
    [] bool, x => Argument::Bool(x);
    [] &str, x => Argument::Text(x.into());
    [] DType, x => Argument::DType(x);
    [] Device, x => Argument::Device(x);
    [] &[i32], x => Argument::Ints(x.iter().map(|&i| i.into()).collect());
    [] &[isize], x => Argument::Ints(x.iter().map(|&i| i as i64).collect());
    [] &[usize], x => Argument::Ints(x.iter().map(|&i| i as i64).collect());
    [const N: usize] &[i32; N], x => Argument::from(&x[..]);
    [const N: usize] &[usize; N], x => Argument::from(&x[..]);
    [] &[f64], x => Argument::Floats(x.to_vec());
    [] &ReduceDims, x => x.given().map_or(Argument::None, Argument::from);
    [] Scalar, x => match x {
        Scalar::Int(i) => Argument::Int(i),
        Scalar::Float(f) => Argument::Float(f),
    };
    [T: Into<Argument>] Option<T>, x => x.map_or(Argument::None, Into::into);
}

macro_rules! parameter_kinds {
    ($($(#[$doc:meta])+ $kind:ident $name:ident, $wanted:literal;)*) => {
        /// The kind of value that a parameter of an operation accepts.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum ParameterKind {
            $($(#[$doc])+ $kind,)*
        }

        /// Lowercase aliases of the variants, which the entries of `operations!` use.
        #[allow(non_upper_case_globals)]
        impl ParameterKind {
            $(pub(crate) const $name: ParameterKind = ParameterKind::$kind;)*

            pub(crate) const ALL: &[ParameterKind] = &[$(ParameterKind::$kind),*];

            /// Returns the name of this kind in signatures.
            pub fn name(self) -> &'static str {
                match self {
                    $(ParameterKind::$kind => stringify!($name),)*
                }
            }

            /// Returns a description of this kind for error messages and documentation.
            pub(crate) fn description(self) -> &'static str {
                match self {
                    $(ParameterKind::$kind => $wanted,)*
                }
            }
        }
    };
}

parameter_kinds! {
    /// A tensor.
    Tensor tensor, "a tensor";
    /// A list of tensors of any length.
    Tensors tensors, "a list of tensors";
    /// A dim or any other integer.
    Int int, "an integer";
    /// A non-negative integer, such as a size or a count.
    Size size, "a non-negative integer";
    /// A number, which is converted to a floating-point number.
    Float float, "a number";
    /// A number. An integer keeps its integer type.
    Scalar scalar, "an integer or a floating-point number";
    /// A boolean flag.
    Bool bool, "true or false";
    /// A list of dims, or of sizes where one may be -1. A single integer counts as a list of one.
    Ints ints, "a list of integers";
    /// A list of sizes. A single integer counts as a list of one; for windows, it is the size along every spatial dim.
    Sizes sizes, "a list of non-negative integers";
    /// The dims to reduce. If left out, all dims are reduced.
    Dims dims, "a list of dims; all dims if left out";
    /// A [`Padding`](crate::ops::Padding).
    Padding padding, "a padding: one size, one or two (before and after) for each dim, 'same' or 'valid'";
    /// A string, such as a mode or an einsum equation.
    Text text, "a string";
    /// A dtype.
    DType dtype, "a dtype";
    /// A device.
    Device device, "a device";
}

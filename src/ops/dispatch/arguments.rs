//! The arguments of a call by name that are not tensors.

use crate::layout::dims::ReduceDims;
use crate::{DType, Device, Error, Result, Scalar, Tensor, TensorOptions};

/// An argument that is no tensor, in the order of the method's parameters.
///
/// ```
/// use claystone::ops::Argument;
/// assert_eq!(Argument::from(2), Argument::Int(2));
/// assert_eq!(Argument::from(&[0, -1][..]), Argument::Ints(vec![0, -1]));
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Argument {
    /// Left out: the default; of dims, all.
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

/// What a call by name brings: tensors, then arguments.
pub(crate) struct Args<'a> {
    op: &'static str,
    tensors: &'a [&'a Tensor],
    arguments: &'a [Argument],
}

impl<'a> Args<'a> {
    pub(crate) fn new(op: &'static str, tensors: &'a [&'a Tensor], arguments: &'a [Argument]) -> Args<'a> {
        Args { op, tensors, arguments }
    }

    fn argument(&self, i: usize) -> &'a Argument {
        self.arguments.get(i).unwrap_or(&Argument::None)
    }

    /// The error of argument `i` that is not what is `wanted`.
    pub(crate) fn wrong<T>(&self, i: usize, wanted: &str) -> Result<T> {
        let reason = match self.argument(i) {
            Argument::None => format!("argument {i}, {wanted}, is missing"),
            other => format!("argument {i} is {other:?} and should be {wanted}"),
        };
        Err(Error::invalid(self.op, reason))
    }

    /// The operation that is called.
    pub(crate) fn name(&self) -> &'static str {
        self.op
    }

    /// Tensor `i`.
    pub(crate) fn x(&self, i: usize) -> Result<&'a Tensor> {
        self.tensors.get(i).copied().ok_or_else(|| {
            let reason = format!("it was called with {} tensors and takes more", self.tensors.len());
            Error::invalid(self.op, reason)
        })
    }

    /// Tensor `i` where it was given.
    pub(crate) fn optional(&self, i: usize) -> Option<&'a Tensor> {
        self.tensors.get(i).copied()
    }

    /// All tensors.
    pub(crate) fn xs(&self) -> &'a [&'a Tensor] {
        self.tensors
    }

    /// Whether argument `i` is there.
    pub(crate) fn given(&self, i: usize) -> bool {
        *self.argument(i) != Argument::None
    }

    /// All arguments as numbers.
    pub(crate) fn scalars(&self) -> Result<Vec<Scalar>> {
        (0..self.arguments.len()).map(|i| self.scalar(i)).collect()
    }

    /// Sizes; one integer is a list of one.
    pub(crate) fn sizes(&self, i: usize) -> Result<Vec<usize>> {
        let sizes = self.ints(i)?.into_iter().map(usize::try_from).collect::<Result<_, _>>();
        sizes.or_else(|_| self.wrong(i, "a list of integers that are not negative"))
    }

    /// Sizes, one a direction; `default` where they are left out.
    pub(crate) fn array<const D: usize>(&self, i: usize, default: [usize; D]) -> Result<[usize; D]> {
        if !self.given(i) {
            return Ok(default);
        }
        <[usize; D]>::try_from(self.sizes(i)?).or_else(|_| self.wrong(i, "one size for each direction"))
    }

    /// Dims to reduce; all where there is none.
    pub(crate) fn dims(&self, i: usize) -> Result<ReduceDims> {
        if self.given(i) { Ok(ReduceDims::from(&self.ints(i)?[..])) } else { Ok(ReduceDims::from(())) }
    }

    /// A dtype, and after it a device.
    pub(crate) fn options(&self, i: usize) -> Result<TensorOptions> {
        Ok((self.dtype(i)?, self.device(i + 1)?).into())
    }
}

/// Methods of [`Args`] that read argument `i`: what they give, what the error says that it should be, and what it may be.
macro_rules! readers {
    ($($(#[$doc:meta])+ $name:ident -> $t:ty, $wanted:literal: $($pattern:pat $(if $condition:expr)? => $value:expr),+;)*) => {
        impl<'a> Args<'a> { $(
            $(#[$doc])+
            pub(crate) fn $name(&self, i: usize) -> Result<$t> {
                match self.argument(i) {
                    $($pattern $(if $condition)? => Ok($value),)+
                    _ => self.wrong(i, $wanted),
                }
            }
        )* }
    };
}

readers! {
    /// A dim or any whole number.
    int -> isize, "an integer": Argument::Int(x) => *x as isize;
    /// A size or a count.
    size -> usize, "an integer that is not negative": Argument::Int(x) if *x >= 0 => *x as usize;
    /// A number.
    float -> f64, "a number": Argument::Int(x) => *x as f64, Argument::Float(x) => *x;
    /// A number that stays an integer if it is one.
    scalar -> Scalar, "a number": Argument::Int(x) => Scalar::Int(*x), Argument::Float(x) => Scalar::Float(*x);
    /// Dims; one integer is a list of one.
    ints -> Vec<isize>, "a list of integers":
        Argument::Ints(x) => x.iter().map(|&d| d as isize).collect(), Argument::Int(x) => vec![*x as isize];
    /// A switch; off where it is left out.
    bool -> bool, "true or false": Argument::Bool(x) => *x, Argument::None => false;
    /// A mode, an equation.
    text -> &'a str, "a text": Argument::Text(x) => x;
    /// A dtype.
    dtype -> DType, "a dtype": Argument::DType(x) => *x;
    /// A device.
    device -> Device, "a device": Argument::Device(x) => *x;
}

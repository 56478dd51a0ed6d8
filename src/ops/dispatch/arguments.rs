//! What an operation is called with besides tensors, where it is called by name.

use crate::layout::dims::ReduceDims;
use crate::{DType, Device, Error, Result, Scalar, Tensor};

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

#[allow(dead_code)] // for every family to come
impl<'a> Args<'a> {
    pub(crate) fn new(op: &'static str, tensors: &'a [&'a Tensor], arguments: &'a [Argument]) -> Args<'a> {
        Args { op, tensors, arguments }
    }

    fn argument(&self, i: usize) -> &'a Argument {
        self.arguments.get(i).unwrap_or(&Argument::None)
    }

    fn wrong<T>(&self, i: usize, wanted: &str) -> Result<T> {
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

    /// All tensors.
    pub(crate) fn xs(&self) -> &'a [&'a Tensor] {
        self.tensors
    }

    /// Whether argument `i` is there.
    pub(crate) fn given(&self, i: usize) -> bool {
        *self.argument(i) != Argument::None
    }

    /// A dim or any whole number.
    pub(crate) fn int(&self, i: usize) -> Result<isize> {
        match self.argument(i) {
            Argument::Int(x) => Ok(*x as isize),
            _ => self.wrong(i, "an integer"),
        }
    }

    /// A size or a count.
    pub(crate) fn size(&self, i: usize) -> Result<usize> {
        match self.argument(i) {
            Argument::Int(x) if *x >= 0 => Ok(*x as usize),
            _ => self.wrong(i, "an integer that is not negative"),
        }
    }

    /// A number.
    pub(crate) fn float(&self, i: usize) -> Result<f64> {
        match self.argument(i) {
            Argument::Int(x) => Ok(*x as f64),
            Argument::Float(x) => Ok(*x),
            _ => self.wrong(i, "a number"),
        }
    }

    /// A number that stays an integer if it is one.
    pub(crate) fn scalar(&self, i: usize) -> Result<Scalar> {
        match self.argument(i) {
            Argument::Int(x) => Ok(Scalar::Int(*x)),
            Argument::Float(x) => Ok(Scalar::Float(*x)),
            _ => self.wrong(i, "a number"),
        }
    }

    /// All arguments as numbers.
    pub(crate) fn scalars(&self) -> Result<Vec<Scalar>> {
        (0..self.arguments.len()).map(|i| self.scalar(i)).collect()
    }

    /// Dims; one integer is a list of one.
    pub(crate) fn ints(&self, i: usize) -> Result<Vec<isize>> {
        match self.argument(i) {
            Argument::Ints(x) => Ok(x.iter().map(|&d| d as isize).collect()),
            Argument::Int(x) => Ok(vec![*x as isize]),
            _ => self.wrong(i, "a list of integers"),
        }
    }

    /// Sizes; one integer is a list of one.
    pub(crate) fn sizes(&self, i: usize) -> Result<Vec<usize>> {
        let ints = self.ints(i)?;
        match ints.iter().all(|&d| d >= 0) {
            true => Ok(ints.iter().map(|&d| d as usize).collect()),
            false => self.wrong(i, "a list of integers that are not negative"),
        }
    }

    /// Sizes, one a direction; `default` where they are left out.
    pub(crate) fn array<const D: usize>(&self, i: usize, default: [usize; D]) -> Result<[usize; D]> {
        if !self.given(i) {
            return Ok(default);
        }
        <[usize; D]>::try_from(self.sizes(i)?).or_else(|_| self.wrong(i, "one size for each direction"))
    }

    /// Several numbers.
    pub(crate) fn floats(&self, i: usize) -> Result<Vec<f64>> {
        match self.argument(i) {
            Argument::Floats(x) => Ok(x.clone()),
            Argument::Ints(x) => Ok(x.iter().map(|&d| d as f64).collect()),
            _ => self.wrong(i, "a list of numbers"),
        }
    }

    /// Dims to reduce; all where there is none.
    pub(crate) fn dims(&self, i: usize) -> Result<ReduceDims> {
        if self.given(i) { Ok(ReduceDims::from(&self.ints(i)?[..])) } else { Ok(ReduceDims::from(())) }
    }

    /// A switch; off where it is left out.
    pub(crate) fn bool(&self, i: usize) -> Result<bool> {
        match self.argument(i) {
            Argument::Bool(x) => Ok(*x),
            Argument::None => Ok(false),
            _ => self.wrong(i, "true or false"),
        }
    }

    /// A mode, an equation.
    pub(crate) fn text(&self, i: usize) -> Result<&'a str> {
        match self.argument(i) {
            Argument::Text(x) => Ok(x),
            _ => self.wrong(i, "a text"),
        }
    }

    /// A dtype.
    pub(crate) fn dtype(&self, i: usize) -> Result<DType> {
        match self.argument(i) {
            Argument::DType(x) => Ok(*x),
            _ => self.wrong(i, "a dtype"),
        }
    }

    /// A device.
    pub(crate) fn device(&self, i: usize) -> Result<Device> {
        match self.argument(i) {
            Argument::Device(x) => Ok(*x),
            _ => self.wrong(i, "a device"),
        }
    }
}

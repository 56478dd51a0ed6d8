//! How the arguments of a call by name are read.

use crate::layout::dims::ReduceDims;
use crate::ops::dispatch::arguments::{Argument, ParameterKind};
use crate::ops::dispatch::parameters::Signature;
use crate::{DType, Device, Result, Scalar, Tensor, TensorOptions, get_default_dtype};

/// What a method is called with by name: a tensor or `None` for each parameter that is one, and all arguments, those that were left
/// out being their defaults.
pub(crate) struct Args<'a> {
    signature: Signature<'a>,
    tensors: &'a [Option<&'a Tensor>],
    arguments: &'a [Argument],
}

impl<'a> Args<'a> {
    pub(crate) fn new(
        signature: Signature<'a>,
        tensors: &'a [Option<&'a Tensor>],
        arguments: &'a [Argument],
    ) -> Args<'a> {
        Args { signature, tensors, arguments }
    }

    fn argument(&self, i: usize) -> &'a Argument {
        self.arguments.get(i).unwrap_or(&Argument::None)
    }

    /// The error of argument `i` that is not what is `wanted`.
    pub(crate) fn wrong<T>(&self, i: usize, wanted: &str) -> Result<T> {
        let name = self.signature.arguments().nth(i).map_or("an argument", |p| p.name);
        Err(self.signature.misfit(format!("{name} is {} and should be {wanted}", self.argument(i))))
    }

    /// The operation that is called.
    pub(crate) fn name(&self) -> &'static str {
        self.signature.name
    }

    /// Tensor `i`.
    pub(crate) fn x(&self, i: usize) -> Result<&'a Tensor> {
        self.optional(i).ok_or_else(|| self.signature.misfit(format!("it has no tensor {i}")))
    }

    /// Tensor `i` where it was given.
    pub(crate) fn optional(&self, i: usize) -> Option<&'a Tensor> {
        self.tensors.get(i).copied().flatten()
    }

    /// All tensors.
    pub(crate) fn xs(&self) -> Vec<&'a Tensor> {
        self.tensors.iter().copied().flatten().collect()
    }

    /// Argument `i` as `read` reads it, where it is there.
    pub(crate) fn maybe<T>(&self, i: usize, read: impl Fn(&Self, usize) -> Result<T>) -> Result<Option<T>> {
        if *self.argument(i) == Argument::None { Ok(None) } else { read(self, i).map(Some) }
    }

    /// All arguments as numbers.
    pub(crate) fn scalars(&self) -> Result<Vec<Scalar>> {
        (0..self.arguments.len()).map(|i| self.scalar(i)).collect()
    }

    /// Sizes; one integer is a list of one.
    pub(crate) fn sizes(&self, i: usize) -> Result<Vec<usize>> {
        let sizes = self.ints(i)?.into_iter().map(usize::try_from).collect::<Result<_, _>>();
        sizes.or_else(|_| self.wrong(i, ParameterKind::Sizes.wanted()))
    }

    /// Sizes, one a direction; one integer is the size in each.
    pub(crate) fn array<const D: usize>(&self, i: usize) -> Result<[usize; D]> {
        match (self.argument(i), self.sizes(i)?) {
            (Argument::Int(_), size) => Ok([size[0]; D]),
            (_, sizes) => sizes.try_into().or_else(|_| self.wrong(i, "one size, or one for each direction")),
        }
    }

    /// Dims to reduce; all where there is none.
    pub(crate) fn dims(&self, i: usize) -> Result<ReduceDims> {
        Ok(self.maybe(i, Args::ints)?.map_or(ReduceDims::from(()), |dims| ReduceDims::from(&dims[..])))
    }

    /// A dtype, the default one where it is left out, and after it a device.
    pub(crate) fn options(&self, i: usize) -> Result<TensorOptions> {
        Ok((self.maybe(i, Args::dtype)?.unwrap_or_else(get_default_dtype), self.device(i + 1)?).into())
    }
}

/// Methods of [`Args`] that read argument `i`, each named as the kind: what they give, and of what.
macro_rules! readers {
    ($($name:ident -> $t:ty: $($pattern:pat $(if $condition:expr)? => $value:expr),+;)*) => {
        impl<'a> Args<'a> { $(
            pub(crate) fn $name(&self, i: usize) -> Result<$t> {
                match self.argument(i) {
                    $($pattern $(if $condition)? => Ok($value),)+
                    _ => self.wrong(i, ParameterKind::$name.wanted()),
                }
            }
        )* }
    };
}

readers! {
    int -> isize: Argument::Int(x) => *x as isize;
    size -> usize: Argument::Int(x) if *x >= 0 => *x as usize;
    float -> f64: Argument::Int(x) => *x as f64, Argument::Float(x) => *x;
    scalar -> Scalar:
        Argument::Int(x) => Scalar::Int(*x), Argument::Float(x) => Scalar::Float(*x), Argument::Bool(x) => Scalar::Int((*x).into());
    ints -> Vec<isize>:
        Argument::Ints(x) => x.iter().map(|&d| d as isize).collect(), Argument::Int(x) => vec![*x as isize];
    bool -> bool: Argument::Bool(x) => *x;
    text -> &'a str: Argument::Text(x) => x;
    dtype -> DType: Argument::DType(x) => *x;
    device -> Device: Argument::Device(x) => *x;
}

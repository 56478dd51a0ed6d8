//! Reads the arguments of an operation that is called by name.

use smallvec::SmallVec;

use crate::layout::dims::ReduceDims;
use crate::ops::dispatch::arguments::{Argument, ParameterKind};
use crate::ops::dispatch::parameters::{Signature, Slots};
use crate::{DType, Device, Result, Scalar, Tensor, TensorOptions, get_default_dtype};

/// The tensors and arguments of a call by name, with defaults filled in. An optional tensor that was left out is `None`.
pub(crate) struct Args<'a> {
    pub(super) signature: Signature<'a>,
    pub(super) tensors: Slots<'a>,
    pub(super) arguments: SmallVec<[Argument; 8]>,
}

impl<'a> Args<'a> {
    fn argument(&self, i: usize) -> &Argument {
        self.arguments.get(i).unwrap_or(&Argument::None)
    }

    /// Returns an error that says that argument `i` is invalid; `wanted` describes the valid values.
    pub(crate) fn argument_error<T>(&self, i: usize, wanted: &str) -> Result<T> {
        let name = self.signature.arguments().nth(i).map_or("an argument", |p| p.name);
        Err(self.signature.call_error(format!("{name} is {} and should be {wanted}", self.argument(i))))
    }

    pub(crate) fn name(&self) -> &'static str {
        self.signature.name
    }

    pub(crate) fn tensor(&self, i: usize) -> Result<&'a Tensor> {
        self.optional_tensor(i).ok_or_else(|| self.signature.call_error(format!("tensor {i} is missing")))
    }

    /// Returns tensor `i`, or `None` if the caller left the tensor out.
    pub(crate) fn optional_tensor(&self, i: usize) -> Option<&'a Tensor> {
        self.tensors.get(i).copied().flatten()
    }

    pub(crate) fn given_tensors(&self) -> Vec<&'a Tensor> {
        self.tensors.iter().copied().flatten().collect()
    }

    /// Reads argument `i` with `read`, or returns `None` if the caller left the argument out.
    pub(crate) fn read_optional<T>(&self, i: usize, read: impl Fn(&Self, usize) -> Result<T>) -> Result<Option<T>> {
        if *self.argument(i) == Argument::None { Ok(None) } else { read(self, i).map(Some) }
    }

    pub(crate) fn scalars(&self) -> Result<Vec<Scalar>> {
        (0..self.arguments.len()).map(|i| self.scalar(i)).collect()
    }

    /// Reads a list of sizes. A single integer counts as a list of one.
    pub(crate) fn sizes(&self, i: usize) -> Result<Vec<usize>> {
        let sizes = self.ints(i)?.into_iter().map(usize::try_from).collect::<Result<_, _>>();
        sizes.or_else(|_| self.argument_error(i, ParameterKind::Sizes.description()))
    }

    /// Reads one size for each of `D` spatial dims. A single integer is the size of all of these dims.
    pub(crate) fn spatial_sizes<const D: usize>(&self, i: usize) -> Result<[usize; D]> {
        match (self.argument(i), self.sizes(i)?) {
            (Argument::Int(_), size) => Ok([size[0]; D]),
            (_, sizes) => sizes.try_into().or_else(|_| self.argument_error(i, "one size, or one for each direction")),
        }
    }

    /// Reads the dims to reduce. If the argument is left out, all dims are reduced.
    pub(crate) fn dims(&self, i: usize) -> Result<ReduceDims> {
        Ok(self.read_optional(i, Args::ints)?.map_or(ReduceDims::from(()), |dims| ReduceDims::from(&dims[..])))
    }

    /// Reads a dtype from argument `i` (the default dtype if left out) and a device from argument `i + 1`.
    pub(crate) fn tensor_options(&self, i: usize) -> Result<TensorOptions> {
        Ok((self.read_optional(i, Args::dtype)?.unwrap_or_else(get_default_dtype), self.device(i + 1)?).into())
    }
}

/// Generates the methods of [`Args`] that read one argument. Each method has the name of its parameter kind.
macro_rules! argument_readers {
    ($($name:ident -> $t:ty: $($pattern:pat $(if $condition:expr)? => $value:expr),+;)*) => {
        impl Args<'_> { $(
            pub(crate) fn $name(&self, i: usize) -> Result<$t> {
                match self.argument(i) {
                    $($pattern $(if $condition)? => Ok($value),)+
                    _ => self.argument_error(i, ParameterKind::$name.description()),
                }
            }
        )* }
    };
}

argument_readers! {
    int -> isize: Argument::Int(x) => *x as isize;
    size -> usize: Argument::Int(x) if *x >= 0 => *x as usize;
    float -> f64: Argument::Int(x) => *x as f64, Argument::Float(x) => *x;
    scalar -> Scalar:
        Argument::Int(x) => Scalar::Int(*x), Argument::Float(x) => Scalar::Float(*x), Argument::Bool(x) => Scalar::Int((*x).into());
    ints -> Vec<isize>:
        Argument::Ints(x) => x.iter().map(|&d| d as isize).collect(), Argument::Int(x) => vec![*x as isize];
    bool -> bool: Argument::Bool(x) => *x;
    text -> &str: Argument::Text(x) => x;
    dtype -> DType: Argument::DType(x) => *x;
    device -> Device: Argument::Device(x) => *x;
}

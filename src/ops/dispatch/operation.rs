//! The description of an operation: names, dtypes, parameters, and the conversion of a call by name into a method call.

use crate::expr::table::Row;
use crate::ops::dispatch::args::Args;
use crate::ops::dispatch::arguments::Argument;
use crate::ops::dispatch::parameters::{Parameter, Signature};
use crate::ops::elementwise::pointwise::ALIASES;
use crate::{DType, Result, Tensor};

macro_rules! operation_kinds {
    ($($(#[$doc:meta])+ $kind:ident $title:literal,)*) => {
        /// The category of an operation.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Kind {
            $($(#[$doc])+ $kind,)*
        }

        impl Kind {
            /// All kinds, each with its title in the documentation.
            pub(crate) const ALL: &[(Kind, &'static str)] = &[$((Kind::$kind, $title)),*];
        }
    };
}

operation_kinds! {
    /// Creates a tensor from sizes and values.
    Creation "Creation",
    /// Creates or fills a tensor with random numbers.
    Random "Random numbers",
    /// Returns a view, which shares the storage of the input.
    View "Views",
    /// Concatenates, stacks or repeats tensors.
    Joining "Joining",
    /// Copies or converts tensors.
    Copying "Copies",
    /// Reads or writes elements by index.
    Indexing "Indexing",
    /// Applies one formula to each element.
    Elementwise "Elementwise",
    /// Writes the result into the first tensor.
    InPlace "In place",
    /// Reduces many elements to fewer.
    Reduction "Reductions",
    /// Computes each element from the elements before it, as a cumulative sum does.
    Scan "Scans",
    /// Sorts, selects or searches elements by order.
    Sorting "Sorting",
    /// Computes matrix products and related operations.
    LinearAlgebra "Linear algebra",
    /// Computes a layer of a neural network.
    NeuralNetwork "Neural networks",
    /// Computes a loss function.
    Loss "Losses",
}

/// The dtypes that an operation accepts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Dtypes {
    /// All dtypes.
    All,
    /// All dtypes except bool.
    Numbers,
    /// f32, f16, bf16 and f64.
    Floats,
    /// i64, i32, i16, i8, u32, u8 and bool.
    Integers,
    /// i64, i32, i16, i8, u32 and u8.
    IntegersOnly,
}

impl Dtypes {
    /// True if `dtype` is in this set.
    pub fn contains(self, dtype: DType) -> bool {
        match self {
            Dtypes::All => true,
            Dtypes::Numbers => dtype != DType::Bool,
            Dtypes::Floats => dtype.is_float(),
            Dtypes::Integers => !dtype.is_float(),
            Dtypes::IntegersOnly => !dtype.is_float() && dtype != DType::Bool,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Dtypes::All => "all",
            Dtypes::Numbers => "all but bool",
            Dtypes::Floats => "floats",
            Dtypes::Integers => "integers, bool",
            Dtypes::IntegersOnly => "integers",
        }
    }
}

/// The dtype of an operation's first result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ResultDType {
    /// The dtype of the first tensor; for an operation that creates a tensor, the requested dtype.
    Same,
    /// `Bool`.
    Bool,
    /// `I64`.
    I64,
    /// Floats keep their dtype; integers and bool become `I64`.
    Sum,
    /// Floats keep their dtype; integers and bool become `F32`.
    Float,
    /// The requested dtype.
    Asked,
}

impl ResultDType {
    /// Returns the dtype of the result. `dtype` is the dtype of the operands or the requested dtype.
    pub fn resolve(self, dtype: DType) -> DType {
        match self {
            ResultDType::Same | ResultDType::Asked => dtype,
            ResultDType::Bool => DType::Bool,
            ResultDType::I64 => DType::I64,
            ResultDType::Sum if !dtype.is_float() => DType::I64,
            ResultDType::Float if !dtype.is_float() => DType::F32,
            ResultDType::Sum | ResultDType::Float => dtype,
        }
    }
}

/// The code that a call by name executes.
#[derive(Clone, Copy)]
pub(crate) enum CallTarget {
    /// A method of `Tensor`.
    Method(fn(&Args) -> Result<Vec<Tensor>>),
    /// A row of the elementwise table.
    Row(&'static Row),
    /// The in-place method of a row.
    RowInPlace(&'static Row),
}

/// One public operation.
#[derive(Clone)]
#[non_exhaustive]
pub struct Operation {
    /// The method's name.
    pub name: &'static str,
    /// The name of the operation in PyTorch.
    pub torch: &'static str,
    /// The category of the operation.
    pub kind: Kind,
    /// The dtypes that the operation accepts.
    pub takes: Dtypes,
    /// The dtype of the first result.
    pub gives: ResultDType,
    pub(crate) parameters: Vec<Parameter>,
    pub(crate) differentiable: bool,
    pub(crate) call: CallTarget,
}

impl std::fmt::Debug for Operation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (PyTorch: {})", self.name, self.torch)
    }
}

impl Operation {
    /// Returns the name and the parameters of the operation.
    pub fn signature(&self) -> Signature<'_> {
        Signature { name: self.name, parameters: &self.parameters }
    }

    /// True if gradients flow through the operation.
    pub fn is_differentiable(&self) -> bool {
        match self.call {
            CallTarget::Row(row) => row.derivatives().iter().any(|d| d.as_const() != Some(0.0)),
            _ => self.differentiable,
        }
    }

    /// Returns the row of the elementwise table that defines the operation, if any.
    pub fn row(&self) -> Option<&'static Row> {
        match self.call {
            CallTarget::Row(row) | CallTarget::RowInPlace(row) => Some(row),
            _ => None,
        }
    }

    /// True if [`register`](crate::ops::register) can replace the operation.
    ///
    /// Views, copies, aliases, in-place forms, and operations that create or randomly fill tensors cannot be replaced.
    pub fn is_replaceable(&self) -> bool {
        let alias = ALIASES.iter().any(|(alias, _)| *alias == self.name);
        !alias && !matches!(self.kind, Kind::Creation | Kind::Random | Kind::View | Kind::Copying | Kind::InPlace)
    }

    /// Calls the method with the given tensors and arguments, after filling in defaults.
    pub(crate) fn call_method(&self, tensors: &[Option<&Tensor>], arguments: &[Argument]) -> Result<Vec<Tensor>> {
        let args = self.signature().args(tensors, arguments)?;
        match self.call {
            CallTarget::Method(call) => call(&args),
            CallTarget::Row(row) => Ok(vec![row.apply(&args.given_tensors(), &args.scalars()?)?]),
            CallTarget::RowInPlace(row) => {
                row.apply_(&args.given_tensors(), &args.scalars()?)?;
                Ok(vec![args.tensor(0)?.shallow_clone()])
            }
        }
    }

    /// Computes the operation directly into `out`. Returns false, without computing, if the result would have to be copied to `out`.
    pub(crate) fn call_method_into(
        &self,
        tensors: &[Option<&Tensor>],
        arguments: &[Argument],
        out: &Tensor,
    ) -> Result<bool> {
        let CallTarget::Row(row) = self.call else { return Ok(false) };
        let args = self.signature().args(tensors, arguments)?;
        row.apply_into(&args.given_tensors(), &args.scalars()?, out)
    }
}

/// Generates the function `operations()` of a family, which returns the family's entries of the catalogue. An entry describes a method of
/// `Tensor` and its in-place form:
///
/// ```text
/// method / method_ (parameters, self first) "PyTorch's name": kind, accepted dtypes -> result dtype, differentiable;
/// ```
///
/// - Parameters have PyTorch's names. `input: x` is a tensor, `bias: x?` an optional tensor, and `tensors: xs` a list of tensors.
/// - An argument is followed by the method of [`Args`] that reads the value, and by its default: `dim: int = -1`.
///   `&sizes` passes the value by reference, and `int?` passes an `Option`. `text @f` converts the value with `f(args, i)`.
///   `options` is a dtype and a device.
/// - PyTorch's name may be left out if it equals the method's name. `functional` means `nn.functional.method`, and `linalg` likewise.
/// - A method whose parameters differ from the listed parameters is called by the closure after `=>`: `=> |args| ..`.
/// - An entry may define the method, with its documentation before the entry: `= |op, self, other, dim| { .. }`. The names after `self` are
///   the names of the other parameters in Rust, and the kinds of the parameters determine their types. `op` is the method's name. A
///   registered replacement is called instead of the block. The result is a tensor unless stated: `|op, self| -> (Tensor, Tensor) { .. }`.
///   With `= manual |op, self| ..`, the block itself calls a replacement, for instance after autocast.
macro_rules! operations {
    ($(
        $(#[doc = $doc:literal])*
        $name:ident $(/ $in_place:ident)? ($($takes:tt)*) $($module:ident)? $($torch:literal)?:
        $kind:ident, $dtypes:ident -> $gives:ident $(, $gradient:ident)?
        $(= $($mode:ident)? |$op:ident, $this:ident $(, $arg:ident)*| $(-> $out:ty)? $body:block)? $(=> $call:expr)?;
    )*) => {
        impl $crate::Tensor {
            $(operations! { @method [$($doc)*] $name [$([$($mode)?] $op $this $body [$($out)?] [$($arg)*])?] $($takes)* })*
        }

        pub(crate) fn operations() -> Vec<$crate::ops::dispatch::operation::Operation> {
            use $crate::ops::dispatch::args::Args;
            use $crate::ops::dispatch::arguments::ParameterKind;
            use $crate::ops::dispatch::operation::{CallTarget, Dtypes, ResultDType, Kind, Operation, operations};
            use $crate::ops::dispatch::parameters::Parameter;
            [$(operations!(
                @row $name [$($in_place)?] ($($takes)*) [$($module)? $($torch)?] $kind [$dtypes $gives] [$($gradient)?] [$($call)?]
            )),*].concat()
        }
    };

    (@row $name:ident [] $takes:tt $torch:tt $kind:ident $dtypes:tt $gradient:tt $call:tt) => {
        vec![operations!(@entry $name $takes (operations!(@torch $name $torch)) $kind $dtypes $gradient $call)]
    };
    (@row $name:ident [$in_place:ident] $takes:tt $torch:tt $kind:ident $dtypes:tt $gradient:tt $call:tt) => {
        vec![
            operations!(@entry $name $takes (operations!(@torch $name $torch)) $kind $dtypes $gradient $call),
            operations!(@entry $in_place $takes (concat!(operations!(@torch $name $torch), "_")) InPlace $dtypes [] $call),
        ]
    };
    (@entry $name:ident ($($takes:tt)*) ($torch:expr) $kind:ident [$dtypes:ident $gives:ident] $gradient:tt $call:tt) => {{
        let (parameters, call) = operations!(@next $name args $call {0 1 2 3 4 5} {0 1 2 3 4 5 6} [] [] $($takes)*);
        Operation {
            name: stringify!($name),
            torch: $torch,
            kind: Kind::$kind,
            takes: Dtypes::$dtypes,
            gives: ResultDType::$gives,
            parameters,
            differentiable: operations!(@gradient $gradient),
            call: CallTarget::Method(call),
        }
    }};

    (@torch $name:ident []) => { stringify!($name) };
    (@torch $name:ident [$torch:literal]) => { $torch };
    (@torch $name:ident [functional]) => { concat!("nn.functional.", stringify!($name)) };
    (@torch $name:ident [linalg]) => { concat!("linalg.", stringify!($name)) };

    (@gradient []) => { false };
    (@gradient [None]) => { false };
    (@gradient [$gradient:ident]) => { true };

    // Defines the method. Parses the parameters one by one, with the names in the first brackets. The other brackets collect the method's
    // parameters, the conversions at its beginning, and the tensors and arguments that a replacement receives.
    (@method $doc:tt $name:ident [] $($takes:tt)*) => {};
    (@method $doc:tt $name:ident [$mode:tt $op:ident $this:ident $body:block $out:tt $args:tt]
        $input:ident: x $(, $($rest:tt)*)?) => {
        operations! { @define [$doc $name $mode $op $this $body $out] $args [] [] [Some($this),] [] $($($rest)*)? }
    };
    (@define $m:tt [$n:ident $($ns:ident)*] [$($s:tt)*] $let:tt [$($t:tt)*] $a:tt $p:ident: x? $(, $($rest:tt)*)?) => {
        operations! { @define $m [$($ns)*] [$($s)* $n: Option<&$crate::Tensor>,] $let [$($t)* $n,] $a $($($rest)*)? }
    };
    (@define $m:tt [$n:ident $($ns:ident)*] [$($s:tt)*] $let:tt [$($t:tt)*] $a:tt $p:ident: x $(, $($rest:tt)*)?) => {
        operations! { @define $m [$($ns)*] [$($s)* $n: &$crate::Tensor,] $let [$($t)* Some($n),] $a $($($rest)*)? }
    };
    (@define $m:tt [$n:ident $($ns:ident)*] [$($s:tt)*] $let:tt $t:tt [$($a:tt)*]
        $p:ident: &$kind:ident $(= $default:expr)? $(, $($rest:tt)*)?) => {
        operations! { @define $m [$($ns)*] [$($s)* $n: &[operations!(@type $kind)],] $let $t [$($a)* $n,] $($($rest)*)? }
    };
    (@define $m:tt [$n:ident $($ns:ident)*] [$($s:tt)*] [$($let:tt)*] $t:tt [$($a:tt)*]
        $p:ident: dims $(, $($rest:tt)*)?) => {
        operations! { @define $m [$($ns)*] [$($s)* $n: impl Into<$crate::ReduceDims>,]
            [$($let)* let $n: $crate::ReduceDims = $n.into();] $t [$($a)* &$n,] $($($rest)*)? }
    };
    (@define $m:tt [$n:ident $($ns:ident)*] [$($s:tt)*] [$($let:tt)*] $t:tt [$($a:tt)*]
        $p:ident: scalar $(= $default:expr)? $(, $($rest:tt)*)?) => {
        operations! { @define $m [$($ns)*] [$($s)* $n: impl Into<$crate::Scalar>,]
            [$($let)* let $n: $crate::Scalar = $n.into();] $t [$($a)* $n,] $($($rest)*)? }
    };
    (@define $m:tt [$n:ident $($ns:ident)*] [$($s:tt)*] [$($let:tt)*] $t:tt [$($a:tt)*]
        $p:ident: $kind:ident? $(, $($rest:tt)*)?) => {
        operations! { @define $m [$($ns)*] [$($s)* $n: impl Into<Option<operations!(@type $kind)>>,]
            [$($let)* let $n: Option<operations!(@type $kind)> = $n.into();] $t [$($a)* $n,] $($($rest)*)? }
    };
    (@define $m:tt [$n:ident $($ns:ident)*] [$($s:tt)*] $let:tt $t:tt [$($a:tt)*]
        $p:ident: $kind:ident $(@$read:ident)? $(= $default:expr)? $(, $($rest:tt)*)?) => {
        operations! { @define $m [$($ns)*] [$($s)* $n: operations!(@type $kind $($read)?),] $let $t [$($a)* $n,] $($($rest)*)? }
    };
    (@define [[$($doc:literal)*] $name:ident $mode:tt $op:ident $this:ident $body:block [$($out:ty)?]] []
        [$($s:tt)*] [$($let:tt)*] $t:tt [$($a:tt)*]) => {
        $(#[doc = $doc])*
        #[track_caller]
        #[allow(clippy::too_many_arguments)] // PyTorch's functions have as many
        pub fn $name(&$this, $($s)*) -> $crate::Result<operations!(@type result $($out)?)> {
            $($let)*
            operations!(@begin $mode $op $name $t $($a)*);
            $body
        }
    };
    (@begin [] $op:ident $name:ident $t:tt $($a:tt)*) => {
        $crate::ops::dispatch::registry::return_replacement!($op = stringify!($name), $t, $($a)*);
    };
    (@begin [manual] $op:ident $name:ident $t:tt $($a:tt)*) => {
        let ($op, _caller): (&'static str, _) = (stringify!($name), $crate::storage::Caller::enter());
    };
    (@type result) => { $crate::Tensor };
    (@type result $t:ty) => { $t };
    (@type int) => { isize };
    (@type ints) => { isize };
    (@type size) => { usize };
    (@type sizes) => { usize };
    (@type float) => { f64 };
    (@type bool) => { bool };
    (@type ints read_mask) => { [bool; 3] };
    (@type text read_reduction) => { $crate::LossReduction };
    (@type text read_scatter_reduction) => { $crate::ops::ScatterReduce };

    // Parses the parameters one by one. The first numbers in braces are the positions of the next tensor and the next argument.
    // The brackets collect the parameters and the method's arguments.
    (@next $name:ident $a:ident [] $ts:tt $ns:tt [$($parameters:tt)*] [$($given:tt)*]) => {
        (vec![$($parameters)*], |$a: &Args| {
            Ok($crate::ops::dispatch::results::IntoResults::into_results($crate::Tensor::$name($($given)*)?))
        })
    };
    (@next $name:ident $a:ident [$call:expr] $ts:tt $ns:tt [$($parameters:tt)*] $given:tt) => {
        (vec![$($parameters)*], |args: &Args| {
            let call: fn(&Args) -> $crate::Result<_> = $call;
            Ok($crate::ops::dispatch::results::IntoResults::into_results(call(args)?))
        })
    };
    (@next $name:ident $a:ident $call:tt {$t:tt $($ts:tt)*} $ns:tt [$($ps:tt)*] [$($given:tt)*] $p:ident: x? $(, $($rest:tt)*)?) => {
        operations!(@next $name $a $call {$($ts)*} $ns
            [$($ps)* operations!(@parameter $p tensor = None),] [$($given)* $a.optional_tensor($t),] $($($rest)*)?)
    };
    (@next $name:ident $a:ident $call:tt {$t:tt $($ts:tt)*} $ns:tt [$($ps:tt)*] [$($given:tt)*] $p:ident: x $(, $($rest:tt)*)?) => {
        operations!(@next $name $a $call {$($ts)*} $ns
            [$($ps)* operations!(@parameter $p tensor),] [$($given)* $a.tensor($t)?,] $($($rest)*)?)
    };
    (@next $name:ident $a:ident $call:tt $ts:tt $ns:tt [$($ps:tt)*] [$($given:tt)*] $p:ident: xs $(, $($rest:tt)*)?) => {
        operations!(@next $name $a $call $ts $ns
            [$($ps)* operations!(@parameter $p tensors),] [$($given)* &$a.given_tensors(),] $($($rest)*)?)
    };
    (@next $name:ident $a:ident $call:tt $ts:tt {$n:tt $next:tt $($ns:tt)*} [$($ps:tt)*] [$($given:tt)*] options) => {
        operations!(@next $name $a $call $ts {$($ns)*}
            [$($ps)* operations!(@parameter dtype dtype = None), operations!(@parameter device device = $crate::Device::HOST),]
            [$($given)* $a.tensor_options($n)?,])
    };
    (@next $name:ident $a:ident $call:tt $ts:tt {$n:tt $($ns:tt)*} [$($ps:tt)*] [$($given:tt)*]
        $p:ident: dims $(, $($rest:tt)*)?) => {
        operations!(@next $name $a $call $ts {$($ns)*}
            [$($ps)* operations!(@parameter $p dims = None),] [$($given)* $a.dims($n)?,] $($($rest)*)?)
    };
    (@next $name:ident $a:ident $call:tt $ts:tt {$n:tt $($ns:tt)*} [$($ps:tt)*] [$($given:tt)*] $p:ident: device) => {
        operations!(@next $name $a $call $ts {$($ns)*}
            [$($ps)* operations!(@parameter $p device = $crate::Device::HOST),] [$($given)* $a.device($n)?,])
    };
    (@next $name:ident $a:ident $call:tt $ts:tt {$n:tt $($ns:tt)*} [$($ps:tt)*] [$($given:tt)*]
        $p:ident: &$read:ident $(= $default:expr)? $(, $($rest:tt)*)?) => {
        operations!(@next $name $a $call $ts {$($ns)*}
            [$($ps)* operations!(@parameter $p $read $(= $default)?),] [$($given)* &$a.$read($n)?,] $($($rest)*)?)
    };
    (@next $name:ident $a:ident $call:tt $ts:tt {$n:tt $($ns:tt)*} [$($ps:tt)*] [$($given:tt)*]
        $p:ident: $kind:ident @$read:ident $(= $default:expr)? $(, $($rest:tt)*)?) => {
        operations!(@next $name $a $call $ts {$($ns)*}
            [$($ps)* operations!(@parameter $p $kind $(= $default)?),] [$($given)* $read($a, $n)?,] $($($rest)*)?)
    };
    (@next $name:ident $a:ident $call:tt $ts:tt {$n:tt $($ns:tt)*} [$($ps:tt)*] [$($given:tt)*]
        $p:ident: $read:ident? $(, $($rest:tt)*)?) => {
        operations!(@next $name $a $call $ts {$($ns)*}
            [$($ps)* operations!(@parameter $p $read = None),] [$($given)* $a.read_optional($n, Args::$read)?,] $($($rest)*)?)
    };
    (@next $name:ident $a:ident $call:tt $ts:tt {$n:tt $($ns:tt)*} [$($ps:tt)*] [$($given:tt)*]
        $p:ident: $read:ident $(= $default:expr)? $(, $($rest:tt)*)?) => {
        operations!(@next $name $a $call $ts {$($ns)*}
            [$($ps)* operations!(@parameter $p $read $(= $default)?),] [$($given)* $a.$read($n)?,] $($($rest)*)?)
    };

    (@parameter $p:ident $kind:ident) => { Parameter::new(stringify!($p), ParameterKind::$kind, None) };
    (@parameter $p:ident $kind:ident = None) => {
        Parameter::new(stringify!($p), ParameterKind::$kind, Some($crate::ops::Argument::None))
    };
    (@parameter $p:ident $kind:ident = $default:expr) => {
        Parameter::new(stringify!($p), ParameterKind::$kind, Some($crate::ops::Argument::from($default)))
    };
}

pub(crate) use operations;

//! The description of an operation: names, dtypes, parameters, and how a call by name makes the method's.

use crate::expr::table::Row;
use crate::ops::dispatch::args::Args;
use crate::ops::dispatch::arguments::Argument;
use crate::ops::dispatch::parameters::{Parameter, Signature};
use crate::{DType, Result, Tensor};

macro_rules! kinds {
    ($($(#[$doc:meta])+ $kind:ident $title:literal,)*) => {
        /// What an operation is about.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum Kind {
            $($(#[$doc])+ $kind,)*
        }

        impl Kind {
            /// Every kind, with its title in the documentation.
            pub(crate) const ALL: &[(Kind, &'static str)] = &[$((Kind::$kind, $title)),*];
        }
    };
}

kinds! {
    /// Makes a tensor of nothing.
    Creation "Creation",
    /// Makes or fills a tensor with random numbers.
    Random "Random numbers",
    /// Shares the storage.
    View "Views",
    /// Puts tensors together, or one several times.
    Joining "Joining",
    /// Copies and conversions.
    Copying "Copies",
    /// Reads or writes by index.
    Indexing "Indexing",
    /// One formula on each element.
    Elementwise "Elementwise",
    /// Writes into its first tensor.
    InPlace "In place",
    /// Fewer elements of many.
    Reduction "Reductions",
    /// Each element of those before it.
    Scan "Scans",
    /// By order.
    Sorting "Sorting",
    /// Products of matrices.
    LinearAlgebra "Linear algebra",
    /// Layers.
    NeuralNetwork "Neural networks",
    /// Losses.
    Loss "Losses",
}

/// The dtypes that an operation takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Dtypes {
    /// Every one.
    All,
    /// All but bool.
    Numbers,
    /// f32, f16, bf16, f64.
    Floats,
    /// i64, i32, u8, u32 and bool.
    Integers,
    /// i64, i32, u8, u32.
    IntegersOnly,
}

impl Dtypes {
    /// Whether `dtype` is one of them.
    pub fn contain(self, dtype: DType) -> bool {
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
pub enum Gives {
    /// The first tensor's; of what makes a tensor, the one asked for.
    Same,
    /// `Bool`.
    Bool,
    /// `I64`.
    I64,
    /// Floats as they are, integers and bool as `I64`.
    Sum,
    /// Floats as they are, integers and bool as `F32`.
    Float,
    /// The one asked for.
    Asked,
}

impl Gives {
    /// The dtype of the result for operands of `dtype`, or where `dtype` is what is asked for.
    pub fn of(self, dtype: DType) -> DType {
        match self {
            Gives::Same | Gives::Asked => dtype,
            Gives::Bool => DType::Bool,
            Gives::I64 => DType::I64,
            Gives::Sum if !dtype.is_float() => DType::I64,
            Gives::Float if !dtype.is_float() => DType::F32,
            Gives::Sum | Gives::Float => dtype,
        }
    }
}

/// How an operation is called by name.
#[derive(Clone, Copy)]
pub(crate) enum Call {
    /// The method.
    Method(fn(&Args) -> Result<Vec<Tensor>>),
    /// A row of the elementwise table.
    Row(&'static Row),
    /// The in-place form of a row.
    RowInPlace(&'static Row),
}

/// One public operation.
#[derive(Clone)]
#[non_exhaustive]
pub struct Operation {
    /// The method's name.
    pub name: &'static str,
    /// PyTorch's name of it.
    pub torch: &'static str,
    /// What it is about.
    pub kind: Kind,
    /// The dtypes it takes.
    pub takes: Dtypes,
    /// The dtype of its first result.
    pub gives: Gives,
    pub(crate) parameters: Vec<Parameter>,
    pub(crate) differentiable: bool,
    pub(crate) call: Call,
}

impl std::fmt::Debug for Operation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (PyTorch: {})", self.name, self.torch)
    }
}

impl Operation {
    /// How it is called by name.
    pub fn signature(&self) -> Signature<'_> {
        Signature { name: self.name, parameters: &self.parameters }
    }

    /// Whether gradients flow through it.
    pub fn is_differentiable(&self) -> bool {
        match self.call {
            Call::Row(row) => row.derivatives().iter().any(|d| d.as_const() != Some(0.0)),
            _ => self.differentiable,
        }
    }

    /// Its row in the table of elementwise operations, where it has one.
    pub fn row(&self) -> Option<&'static Row> {
        match self.call {
            Call::Row(row) | Call::RowInPlace(row) => Some(row),
            _ => None,
        }
    }

    /// Whether [`register`](crate::ops::register) can replace it: what computes can be, what only names elements or another
    /// operation cannot.
    pub fn is_replaceable(&self) -> bool {
        let own = self.row().is_none_or(|row| row.name == self.name);
        own && !matches!(self.kind, Kind::Creation | Kind::Random | Kind::View | Kind::Copying | Kind::InPlace)
    }

    /// The method of this name.
    pub(crate) fn run(&self, tensors: &[Option<&Tensor>], arguments: &[Argument]) -> Result<Vec<Tensor>> {
        let (tensors, arguments) = self.signature().complete(tensors, arguments)?;
        let args = Args::new(self.signature(), &tensors, &arguments);
        match self.call {
            Call::Method(call) => call(&args),
            Call::Row(row) => Ok(vec![row.apply(&args.xs(), &args.scalars()?)?]),
            Call::RowInPlace(row) => {
                row.apply_(&args.xs(), &args.scalars()?)?;
                Ok(vec![args.x(0)?.shallow_clone()])
            }
        }
    }

    /// [`run`](Self::run) into a tensor that is there; false where that is not possible without a copy, and nothing was done.
    pub(crate) fn run_into(&self, tensors: &[Option<&Tensor>], arguments: &[Argument], out: &Tensor) -> Result<bool> {
        let Call::Row(row) = self.call else { return Ok(false) };
        let (tensors, arguments) = self.signature().complete(tensors, arguments)?;
        let args = Args::new(self.signature(), &tensors, &arguments);
        row.apply_into(&args.xs(), &args.scalars()?, out)
    }
}

/// Makes a family's part of the catalogue, `operations()`. A row is a method of `Tensor`, and its in-place form where it has one:
///
/// ```text
/// method / method_ (what it takes, self first) "PyTorch's name": kind, dtypes it takes -> dtype it gives, differentiable;
/// ```
///
/// - What it takes, by PyTorch's names: a tensor is `input: x`, one that may be left out `bias: x?`, any number of them
///   `tensors: xs`. An argument has the name of the method of [`Args`] that reads it, and a default where there is one:
///   `dim: int = -1`. It is `&sizes` where the method borrows it, `int?` for an `Option`, and `text @f` where `f(args, i)` makes more
///   of it. `options` are a dtype and a device.
/// - PyTorch's name is left out where it is the method's; `functional` stands for `nn.functional.method`, `linalg` likewise.
/// - Where the method is not called with these in this order, the call follows: `=> |args| ..`.
macro_rules! operations {
    ($(
        $name:ident $(/ $in_place:ident)? ($($takes:tt)*) $($module:ident)? $($torch:literal)?:
        $kind:ident, $dtypes:ident -> $gives:ident $(, $gradient:ident)? $(=> $call:expr)?;
    )*) => {
        pub(crate) fn operations() -> Vec<$crate::ops::dispatch::operation::Operation> {
            use $crate::ops::dispatch::args::Args;
            use $crate::ops::dispatch::arguments::ParameterKind;
            use $crate::ops::dispatch::operation::{Call, Dtypes, Gives, Kind, Operation, operations};
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
            gives: Gives::$gives,
            parameters,
            differentiable: operations!(@gradient $gradient),
            call: Call::Method(call),
        }
    }};

    (@torch $name:ident []) => { stringify!($name) };
    (@torch $name:ident [$torch:literal]) => { $torch };
    (@torch $name:ident [functional]) => { concat!("nn.functional.", stringify!($name)) };
    (@torch $name:ident [linalg]) => { concat!("linalg.", stringify!($name)) };

    (@gradient []) => { false };
    (@gradient [None]) => { false };
    (@gradient [$gradient:ident]) => { true };

    // What it takes, one after another: the numbers of the next tensor and of the next argument are the first in braces, the
    // parameters and what the method is called with are in brackets.
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
            [$($ps)* operations!(@parameter $p tensor = None),] [$($given)* $a.optional($t),] $($($rest)*)?)
    };
    (@next $name:ident $a:ident $call:tt {$t:tt $($ts:tt)*} $ns:tt [$($ps:tt)*] [$($given:tt)*] $p:ident: x $(, $($rest:tt)*)?) => {
        operations!(@next $name $a $call {$($ts)*} $ns
            [$($ps)* operations!(@parameter $p tensor),] [$($given)* $a.x($t)?,] $($($rest)*)?)
    };
    (@next $name:ident $a:ident $call:tt $ts:tt $ns:tt [$($ps:tt)*] [$($given:tt)*] $p:ident: xs $(, $($rest:tt)*)?) => {
        operations!(@next $name $a $call $ts $ns
            [$($ps)* operations!(@parameter $p tensors),] [$($given)* &$a.xs(),] $($($rest)*)?)
    };
    (@next $name:ident $a:ident $call:tt $ts:tt {$n:tt $next:tt $($ns:tt)*} [$($ps:tt)*] [$($given:tt)*] options) => {
        operations!(@next $name $a $call $ts {$($ns)*}
            [$($ps)* operations!(@parameter dtype dtype = None), operations!(@parameter device device = $crate::Device::Cpu),]
            [$($given)* $a.options($n)?,])
    };
    (@next $name:ident $a:ident $call:tt $ts:tt {$n:tt $($ns:tt)*} [$($ps:tt)*] [$($given:tt)*]
        $p:ident: dims $(, $($rest:tt)*)?) => {
        operations!(@next $name $a $call $ts {$($ns)*}
            [$($ps)* operations!(@parameter $p dims = None),] [$($given)* $a.dims($n)?,] $($($rest)*)?)
    };
    (@next $name:ident $a:ident $call:tt $ts:tt {$n:tt $($ns:tt)*} [$($ps:tt)*] [$($given:tt)*] $p:ident: device) => {
        operations!(@next $name $a $call $ts {$($ns)*}
            [$($ps)* operations!(@parameter $p device = $crate::Device::Cpu),] [$($given)* $a.device($n)?,])
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
            [$($ps)* operations!(@parameter $p $read = None),] [$($given)* $a.maybe($n, Args::$read)?,] $($($rest)*)?)
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

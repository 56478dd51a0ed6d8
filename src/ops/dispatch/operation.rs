//! What is said of an operation: its names, its dtypes, how many tensors it takes and how it is called by name.

use crate::expr::table::Row;
use crate::ops::dispatch::arguments::{Args, Argument};
use crate::{DType, Error, Result, Tensor};

/// What an operation is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Kind {
    /// Makes a tensor of nothing.
    Creation,
    /// Makes or fills a tensor with random numbers.
    Random,
    /// Shares the storage.
    View,
    /// Puts tensors together, or one several times.
    Joining,
    /// Copies and conversions.
    Copying,
    /// Reads or writes by index.
    Indexing,
    /// One formula on each element.
    Elementwise,
    /// Writes into its first tensor.
    InPlace,
    /// Fewer elements of many.
    Reduction,
    /// Each element of those before it.
    Scan,
    /// By order.
    Sorting,
    /// Products of matrices.
    LinearAlgebra,
    /// Layers.
    NeuralNetwork,
    /// Losses.
    Loss,
}

impl Kind {
    pub(crate) const ALL: [(Kind, &'static str); 14] = [
        (Kind::Creation, "Creation"),
        (Kind::Random, "Random numbers"),
        (Kind::View, "Views"),
        (Kind::Joining, "Joining"),
        (Kind::Copying, "Copies"),
        (Kind::Indexing, "Indexing"),
        (Kind::Elementwise, "Elementwise"),
        (Kind::InPlace, "In place"),
        (Kind::Reduction, "Reductions"),
        (Kind::Scan, "Scans"),
        (Kind::Sorting, "Sorting"),
        (Kind::LinearAlgebra, "Linear algebra"),
        (Kind::NeuralNetwork, "Neural networks"),
        (Kind::Loss, "Losses"),
    ];
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

/// How many tensors and how many other arguments a call takes at most.
pub(crate) type Arity = (usize, usize);

/// As many tensors as one likes.
pub(crate) const ANY: usize = usize::MAX;

/// How an operation is run.
#[derive(Clone, Copy)]
pub(crate) enum Call {
    One(fn(&Args) -> Result<Tensor>),
    Several(fn(&Args) -> Result<Vec<Tensor>>),
    Row(&'static Row),
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
    /// How many tensors a call takes at most; `usize::MAX` where it takes any number.
    pub max_tensors: usize,
    /// How many other arguments a call takes at most.
    pub max_arguments: usize,
    pub(crate) differentiable: bool,
    pub(crate) call: Call,
}

impl std::fmt::Debug for Operation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} (PyTorch: {})", self.name, self.torch)
    }
}

impl Operation {
    /// An operation with one result; `most` is how many tensors and how many other arguments it takes at most.
    pub(crate) const fn new(
        name: &'static str,
        torch: &'static str,
        kind: Kind,
        takes: Dtypes,
        gives: Gives,
        most: Arity,
        call: fn(&Args) -> Result<Tensor>,
    ) -> Operation {
        Operation::with(name, torch, kind, (takes, gives), most, Call::One(call))
    }

    /// [`Operation::new`] with several results.
    pub(crate) const fn several(
        name: &'static str,
        torch: &'static str,
        kind: Kind,
        takes: Dtypes,
        gives: Gives,
        most: Arity,
        call: fn(&Args) -> Result<Vec<Tensor>>,
    ) -> Operation {
        Operation::with(name, torch, kind, (takes, gives), most, Call::Several(call))
    }

    pub(crate) const fn with(
        name: &'static str,
        torch: &'static str,
        kind: Kind,
        (takes, gives): (Dtypes, Gives),
        (max_tensors, max_arguments): Arity,
        call: Call,
    ) -> Operation {
        Operation { name, torch, kind, takes, gives, max_tensors, max_arguments, differentiable: false, call }
    }

    /// The same, with a gradient for every float tensor it takes.
    pub(crate) const fn differentiable(mut self) -> Operation {
        self.differentiable = true;
        self
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
    pub(crate) fn run(&self, tensors: &[&Tensor], arguments: &[Argument]) -> Result<Vec<Tensor>> {
        for (given, most, what) in [
            (tensors.len(), self.max_tensors, "tensors"),
            (arguments.len(), self.max_arguments, "arguments besides tensors"),
        ] {
            if given > most {
                return Err(Error::invalid(
                    self.name,
                    format!("it takes at most {most} {what} and was called with {given}"),
                ));
            }
        }
        let args = Args::new(self.name, tensors, arguments);
        match self.call {
            Call::One(call) => Ok(vec![call(&args)?]),
            Call::Several(call) => call(&args),
            Call::Row(row) => {
                (0..row.arity).try_for_each(|i| args.x(i).map(|_| ()))?;
                Ok(vec![row.apply(tensors, &args.scalars()?)?])
            }
            Call::RowInPlace(row) => {
                (0..row.arity).try_for_each(|i| args.x(i).map(|_| ()))?;
                row.apply_(tensors, &args.scalars()?)?;
                Ok(vec![args.x(0)?.shallow_clone()])
            }
        }
    }
}

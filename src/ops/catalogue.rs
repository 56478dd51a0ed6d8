//! The catalogue: every public operation once, with what it takes and gives.
//!
//! From an entry come the line in `docs/operations.md`, the call by name ([`call`](super::call)), what a replacement for a
//! device is checked against ([`register`](super::register)) and the tests that have to exist. Elementwise rows are
//! entries by being in their table; every other family lists its own beside its code, and [`FAMILIES`] names the lists.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::OnceLock;

use crate::expr::table::{Accepts, Output, ROWS, Row};
use crate::ops::dispatch::arguments::{Args, Argument};
use crate::{DType, Error, Result, Tensor};

/// The lists of all families, in the order of the documentation.
const FAMILIES: &[&[Operation]] = &[
    crate::tensor::OPERATIONS,
    crate::ops::random::distributions::OPERATIONS,
    crate::ops::elementwise::copy::OPERATIONS,
    crate::ops::elementwise::pointwise::OPERATIONS,
    crate::ops::nn::softmax::OPERATIONS,
    super::reduce::table::OPERATIONS,
    super::reduce::statistics::OPERATIONS,
    crate::ops::reduce::scan::OPERATIONS,
    super::sort::OPERATIONS,
    crate::ops::sort::select::OPERATIONS,
    crate::ops::index::nonzero::OPERATIONS,
    crate::ops::index::gather::OPERATIONS,
    crate::ops::index::gather::WRITES,
    crate::ops::index::gather::REDUCTIONS,
    crate::ops::index::gather::SEVERAL,
    crate::ops::linalg::matmul::OPERATIONS,
    crate::ops::linalg::products::OPERATIONS,
    crate::ops::linalg::einsum::OPERATIONS,
    crate::ops::linalg::distance::OPERATIONS,
    crate::ops::nn::attention::OPERATIONS,
    crate::ops::nn::conv::OPERATIONS,
    crate::ops::nn::pool::OPERATIONS,
    crate::ops::nn::norm::OPERATIONS,
    crate::ops::nn::interpolate::OPERATIONS,
    crate::ops::nn::loss::OPERATIONS,
];

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
    const ALL: [(Kind, &'static str); 14] = [
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

    fn name(self) -> &'static str {
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
enum Call {
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
    differentiable: bool,
    call: Call,
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

    const fn with(
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

    /// Whether [`register`](super::register) can replace it: what computes can be, what only names elements or another
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

/// PyTorch's name in a row's documentation: what stands between the first backquotes after "PyTorch:".
fn torch_name(row: &Row) -> &'static str {
    let named = row.doc.split_once("PyTorch:").map_or("", |(_, rest)| rest);
    named.split('`').nth(1).unwrap_or("")
}

fn of_row(row: &'static Row) -> impl Iterator<Item = Operation> {
    let gives = match (row.output, row.accepts) {
        (Output::Bool, _) => Gives::Bool,
        (Output::Same, Accepts::Float) => Gives::Float,
        (Output::Same, Accepts::Any | Accepts::Integer) => Gives::Same,
    };
    let takes = if row.accepts == Accepts::Integer { Dtypes::Integers } else { Dtypes::All };
    let torch = torch_name(row);
    let most = (row.arity, row.samples.len());
    let entry = |name, kind, call| Operation::with(name, torch, kind, (takes, gives), most, call);
    let in_place = row.in_place.map(|name| entry(name, Kind::InPlace, Call::RowInPlace(row)));
    std::iter::once(entry(row.name, Kind::Elementwise, Call::Row(row))).chain(in_place)
}

/// Every public operation.
///
/// ```
/// use claystone::ops::{operations, Kind};
/// let relu = operations().iter().find(|op| op.name == "relu").unwrap();
/// assert!(relu.kind == Kind::Elementwise && relu.is_differentiable());
/// ```
pub fn operations() -> &'static [Operation] {
    static ALL: OnceLock<Vec<Operation>> = OnceLock::new();
    ALL.get_or_init(|| {
        let mut all: Vec<Operation> = FAMILIES.iter().flat_map(|family| family.iter().cloned()).collect();
        all.extend(ROWS.iter().copied().flat_map(of_row));
        for &(name, row) in crate::ops::elementwise::pointwise::ALIASES {
            let same = all.iter().find(|op| op.name == row).expect("aliases name rows");
            all.push(Operation { name, torch: name, ..same.clone() });
        }
        all.sort_by_key(|op| op.kind);
        all
    })
}

/// The operation of this name.
pub(crate) fn find(name: &str) -> Option<&'static Operation> {
    static BY_NAME: OnceLock<HashMap<&'static str, &'static Operation>> = OnceLock::new();
    BY_NAME.get_or_init(|| operations().iter().map(|op| (op.name, op)).collect()).get(name).copied()
}

/// The tables of `docs/operations.md`, in Markdown: what `claystone operations` prints.
pub fn operations_markdown() -> String {
    let mut page = String::from(
        "# Operations\n\n\
         Every public operation, on the CPU and on every OpenCL device (f64 where the device has it), through any strides.\n\
         The tables are made from the code by `claystone operations`, and every line is run by a test on both.\n\
         Floats are f32, f16, bf16 and f64; integers are i64, i32, u8 and u32.\n",
    );
    for (kind, title) in Kind::ALL {
        let mut of_kind = operations().iter().filter(|op| op.kind == kind).peekable();
        if of_kind.peek().is_none() {
            continue;
        }
        _ = write!(
            page,
            "\n## {title}\n\n| operation | PyTorch | dtypes | devices | gradient |\n|---|---|---|---|---|\n"
        );
        for op in of_kind {
            let gradient = if op.is_differentiable() { "yes" } else { "no" };
            _ = writeln!(page, "| `{}` | `{}` | {} | cpu, opencl | {gradient} |", op.name, op.torch, op.takes.name());
        }
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_say_pytorchs() {
        let mut seen = HashMap::new();
        for op in operations() {
            assert!(seen.insert(op.name, ()).is_none(), "{} twice", op.name);
            assert!(!op.torch.is_empty(), "{} has no name of PyTorch's", op.name);
            assert_eq!(op.name.ends_with('_'), op.kind == Kind::InPlace, "{} in place?", op.name);
            assert_eq!(find(op.name).map(|found| found.kind), Some(op.kind));
        }
        assert_eq!(Kind::ALL.iter().filter(|(k, _)| Kind::ALL.iter().filter(|(o, _)| o == k).count() != 1).count(), 0);
    }
}

//! The catalogue: every public operation once, with its arguments and its results.
//!
//! An entry gives the line in `docs/operations.md`, the call by name ([`call`](super::call)), what a replacement is checked
//! against ([`register`](super::register)), and the tests that must exist. Elementwise rows are entries because they are in their
//! table. Every other family lists its own beside its code, and [`FAMILIES`] names those lists.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::OnceLock;

use crate::error::Excerpt;
use crate::expr::table::{Accepts, Output, ROWS, Row};
use crate::ops::dispatch::arguments::Argument;
use crate::ops::dispatch::checks::invalid;
use crate::ops::dispatch::operation::{Call, Dtypes, Gives, Kind, Operation};
use crate::ops::dispatch::registry::{self, Backend, Implementation, Registration};
use crate::ops::{elementwise, index, linalg, nn, random, reduce, shape, sort};
use crate::{Error, Result, Tensor};

/// The lists of all families, in the order of the documentation.
const FAMILIES: &[&[&[Operation]]] = &[
    shape::operations::OPERATIONS,
    random::distributions::OPERATIONS,
    elementwise::copy::OPERATIONS,
    elementwise::pointwise::OPERATIONS,
    nn::softmax::OPERATIONS,
    reduce::table::OPERATIONS,
    reduce::statistics::OPERATIONS,
    reduce::scan::OPERATIONS,
    sort::OPERATIONS,
    sort::select::OPERATIONS,
    index::nonzero::OPERATIONS,
    index::gather::OPERATIONS,
    index::scatter::OPERATIONS,
    index::scatter_reduce::OPERATIONS,
    index::advanced::OPERATIONS,
    linalg::matmul::OPERATIONS,
    linalg::products::OPERATIONS,
    linalg::einsum::OPERATIONS,
    linalg::distance::OPERATIONS,
    nn::attention::OPERATIONS,
    nn::conv::options::OPERATIONS,
    nn::pool::OPERATIONS,
    nn::norm::methods::OPERATIONS,
    nn::interpolate::OPERATIONS,
    nn::loss::OPERATIONS,
];

/// PyTorch's name in a row's documentation: the text between the first backquotes after "PyTorch:".
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
    let (max_tensors, max_arguments) = (row.arity, row.samples.len());
    let entry = |name, kind, call| Operation {
        name,
        torch,
        kind,
        takes,
        gives,
        max_tensors,
        max_arguments,
        differentiable: false,
        call,
    };
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
        let mut all: Vec<Operation> = FAMILIES.iter().copied().flatten().copied().flatten().cloned().collect();
        all.extend(ROWS.iter().copied().flat_map(of_row));
        for &(name, row) in elementwise::pointwise::ALIASES {
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

/// Adds an operation of your own under `name`, or replaces one that is built in, for all devices of a backend.
/// (PyTorch: `torch.library.impl`.)
///
/// ```
/// use claystone::ops::{self, Backend, Implementation};
/// use claystone::{Device, Tensor};
/// let swish = Implementation::new(|x, _| Ok(vec![x[0].mul(&x[0].sigmoid()?)?]));
/// let _kept = ops::register("my_swish", Backend::Cpu, swish)?;
/// let x = Tensor::zeros(&[2], Device::Cpu)?;
/// assert_eq!(ops::call("my_swish", &[&x], &[])?[0].to_vec::<f32>()?, [0.0, 0.0]);
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`] where `name` already has an implementation of that backend, and for built-in operations that
/// compute nothing: views and what makes tensors.
pub fn register(name: &'static str, backend: Backend, implementation: Implementation) -> Result<Registration> {
    let built_in = find(name);
    invalid!("register" if built_in.is_some_and(|op| !op.is_replaceable()),
        "{name} only names or makes elements, or is another's name: it cannot be replaced");
    registry::insert(name, backend, implementation, built_in)
}

/// The operation `name` on tensors and arguments (those of the method, in its order): one that is built in
/// ([`operations`](crate::ops::operations) lists them) or one that was [`register`]ed.
///
/// ```
/// use claystone::{Device, Tensor, ops};
/// let x = Tensor::ones(&[2, 3], Device::Cpu)?;
/// let y = ops::call("add_scalar", &[&x], &[2.0.into()])?.remove(0);
/// assert_eq!(y.to_vec::<f32>()?, [3.0; 6]);
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// # Errors
/// Those of the operation; [`Error::Invalid`] for a name that nobody knows on that device, and for arguments that do not
/// fit.
pub fn call(name: &str, tensors: &[&Tensor], arguments: &[Argument]) -> Result<Vec<Tensor>> {
    if let Some(operation) = find(name) {
        return operation.run(tensors, arguments);
    }
    let Some(first) = tensors.first() else {
        return Err(Error::invalid(
            "call",
            format!("there is no built-in operation {name}, and no tensor names a device"),
        ));
    };
    let backend = Backend::from(first.device());
    match registry::registered(name, backend) {
        Some(name) => registry::replacement(name, tensors, || arguments.to_vec())?.ok_or_else(|| {
            Error::invalid("call", format!("{name} calls itself, and nothing is built in under that name"))
        }),
        None => Err(Error::invalid(
            "call",
            format!("there is no operation {} for {backend:?}: see operations()", Excerpt(name)),
        )),
    }
}

/// The tables of `docs/operations.md`, in Markdown: what `claystone operations` prints.
pub fn operations_markdown() -> String {
    let mut page = String::from(
        "# Operations\n\n\
         Every public operation, on the CPU and on every OpenCL device (f64 where the device has it), through any strides.\n\
         The tables are made from the code by `claystone operations`, and every line is run by a test on both.\n\
         Floats are f32, f16, bf16 and f64; integers are i64, i32, u8 and u32.\n",
    );
    for &(kind, title) in Kind::ALL {
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

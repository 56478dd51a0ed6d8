//! The catalogue: every public operation once, with its arguments and its results.
//!
//! An entry gives the line in `docs/operations.md`, the call by name ([`call`](super::call)), what a replacement is checked
//! against ([`register`](super::register)), and the tests that must exist. Elementwise rows are entries because they are in their
//! table. Every other family lists its own beside its code, and [`FAMILIES`] names those lists.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::OnceLock;

use smallvec::SmallVec;

use crate::autograd::{check_unrecorded, gradients_only};
use crate::error::Excerpt;
use crate::expr::table::{Accepts, Output, ROWS, Row};
use crate::ops::dispatch::arguments::{Argument, ParameterKind};
use crate::ops::dispatch::checks::{invalid, mismatch};
use crate::ops::dispatch::operation::{Call, Dtypes, Gives, Kind, Operation};
use crate::ops::dispatch::parameters::{Parameter, Signature, Slots, Value};
use crate::ops::dispatch::recorded::Recorded;
use crate::ops::dispatch::registry::{self, Backend, Implementation, Registration};
use crate::ops::elementwise::derivative_of_result;
use crate::ops::{elementwise, index, linalg, nn, random, reduce, shape, sort};
use crate::storage::Caller;
use crate::{Error, Result, Tensor, can_cast, no_grad};

/// The lists of all families, in the order of the documentation.
const FAMILIES: &[fn() -> Vec<Operation>] = &[
    shape::operations::operations,
    random::distributions::operations,
    elementwise::copy::operations,
    elementwise::pointwise::operations,
    nn::softmax::operations,
    reduce::table::operations,
    reduce::statistics::operations,
    reduce::scan::operations,
    sort::operations,
    sort::select::operations,
    index::nonzero::operations,
    index::gather::operations,
    index::scatter::operations,
    index::scatter_reduce::operations,
    index::advanced::operations,
    linalg::matmul::operations,
    linalg::products::operations,
    linalg::einsum::operations,
    linalg::distance::operations,
    nn::attention::operations,
    nn::conv::options::operations,
    nn::pool::operations,
    nn::norm::methods::operations,
    nn::norm::native::operations,
    nn::recurrent::operations,
    nn::interpolate::operations,
    nn::loss::operations,
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
    let tensor = |name: &&'static str| Parameter::new(name, ParameterKind::Tensor, None);
    // Whole numbers are integers, which leave the dtype of integers as it is.
    let number = |x: f64| if x.fract() == 0.0 { Argument::Int(x as i64) } else { Argument::Float(x) };
    let scalar = |(name, default): &(&'static str, Option<f64>)| {
        Parameter::new(name, ParameterKind::Scalar, default.map(number))
    };
    let parameters: Vec<Parameter> = row.operands.iter().map(tensor).chain(row.scalars.iter().map(scalar)).collect();
    let entry = move |name, kind, call| Operation {
        name,
        torch,
        kind,
        takes,
        gives,
        parameters: parameters.clone(),
        differentiable: false,
        call,
    };
    std::iter::once(entry(row.name, Kind::Elementwise, Call::Row(row)))
        .chain(row.in_place.map(|name| entry(name, Kind::InPlace, Call::RowInPlace(row))))
}

/// Every public operation.
///
/// ```
/// use claystone::ops::{operations, Kind};
/// let relu = operations().iter().find(|op| op.name == "relu").unwrap();
/// assert!(relu.kind == Kind::Elementwise && relu.is_differentiable());
/// ```
#[doc = include_str!("../../docs/operations.md")]
pub fn operations() -> &'static [Operation] {
    static ALL: OnceLock<Vec<Operation>> = OnceLock::new();
    ALL.get_or_init(|| {
        let mut all: Vec<Operation> = FAMILIES.iter().flat_map(|family| family()).collect();
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

/// How the built-in operation of this name is called: what it takes, of which kinds, and the defaults. [`operations`] has the names.
pub fn signature(name: &str) -> Option<Signature<'static>> {
    find(name).map(Operation::signature)
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

/// The operation `name` on tensors and arguments by position, in the order of its [`signature`]: one that is built in
/// ([`operations`] lists them) or one that was [`register`]ed. `None` stands for a tensor that is left out, [`Argument::None`] for an
/// argument; at the end both are just left out. What is left out has its default. `call::<&Tensor>` is for no tensors at all.
///
/// ```
/// use claystone::{Device, Tensor, ops};
/// let x = Tensor::ones(&[2, 3], Device::Cpu)?;
/// let y = ops::call("add_scalar", &[&x], &[2.0.into()])?.remove(0);
/// assert_eq!(y.to_vec::<f32>()?, [3.0; 6]);
/// let bias = Tensor::full(3, 0.5, Device::Cpu)?;
/// let y = ops::call("layer_norm", &[Some(&x), None, Some(&bias)], &[3.into()])?.remove(0);
/// assert_eq!(y.to_vec::<f32>()?, [0.5; 6]);
/// let zeros = ops::call::<&Tensor>("zeros", &[], &[(&[2, 3]).into()])?.remove(0);
/// assert!(zeros.equal(&x.zeros_like()?)?);
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// # Errors
/// Those of the operation; [`Error::Invalid`] for a name that nobody knows on that device, and, with the signature, for what
/// does not fit it.
#[track_caller]
pub fn call<'a, T: Copy + Into<Option<&'a Tensor>>>(
    name: &str,
    tensors: &[T],
    arguments: &[Argument],
) -> Result<Vec<Tensor>> {
    let _caller = Caller::enter();
    let tensors: Slots = tensors.iter().map(|&t| t.into()).collect();
    if let Some(operation) = find(name) {
        return operation.run(&tensors, arguments);
    }
    let Some(first) = tensors.iter().flatten().next() else {
        return Err(Error::invalid(
            "call",
            format!("there is no built-in operation {}, and no tensor names a device", Excerpt(name)),
        ));
    };
    let backend = Backend::from(first.device());
    match registry::registered(name, backend) {
        Some(name) => registry::replacement(name, &tensors, || arguments.to_vec())?.ok_or_else(|| {
            let reason =
                "calls itself, or has to do without a tensor before others, and nothing is built in under that name";
            Error::invalid("call", format!("{name} {reason}"))
        }),
        None => Err(Error::invalid(
            "call",
            format!("there is no operation {} for {backend:?}: see operations()", Excerpt(name)),
        )),
    }
}

/// [`call`] whose results are written into tensors that are there (PyTorch's `out=`), of their shapes and converted to their dtypes;
/// `None` stands for a result that nobody wants, and so does what is left out at the end. An elementwise operation computes its
/// result in place where the dtype is its own; the results of others are copied. Gradients do not flow through it.
///
/// ```
/// use claystone::{Device, Tensor, ops};
/// let (x, out) = (Tensor::ones([2, 3], Device::Cpu)?, Tensor::zeros([3, 2], Device::Cpu)?);
/// ops::call_into("add_scalar", &[&x], &[2.0.into()], &[&out.t()?])?;
/// assert_eq!(out.to_vec::<f32>()?, [3.0; 6]);
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// # Errors
/// Those of [`call`]; [`Error::ShapeMismatch`] for a tensor of another shape than the result's, [`Error::Invalid`] for one whose dtype
/// the result's cannot be converted to ([`can_cast`](crate::can_cast)) and for more tensors than there are results;
/// [`Error::Autograd`] for one that is part of the graph. Where there are several, those before the one at fault are written.
#[track_caller]
pub fn call_into<'a, 'o, T, O>(name: &str, tensors: &[T], arguments: &[Argument], out: &[O]) -> Result<()>
where
    T: Copy + Into<Option<&'a Tensor>>,
    O: Copy + Into<Option<&'o Tensor>>,
{
    let _caller = Caller::enter();
    let op = "call_into";
    let out: Slots = out.iter().map(|&t| t.into()).collect();
    let inputs: Slots = tensors.iter().map(|&t| t.into()).collect();
    let given: SmallVec<[&Tensor; 6]> = inputs.iter().copied().flatten().collect();
    out.iter().flatten().try_for_each(|t| check_unrecorded(op, t, &given))?;
    if let [Some(out)] = out[..]
        && let Some(operation) = find(name)
        && operation.run_into(&inputs, arguments, out)?
    {
        return Ok(());
    }
    let results = no_grad(|| call(name, &inputs, arguments))?;
    invalid!(op if results.len() < out.len(), "{} tensors for the {} results of {}", out.len(), results.len(), Excerpt(name));
    for (result, out) in results.iter().zip(&out) {
        let Some(out) = out else { continue };
        mismatch!(op if out.shape() != result.shape(), out, result, "the tensor written to has the shape of the result");
        invalid!(op if !can_cast(result.dtype(), out.dtype()), "{} gives {}, which is not written into {}",
            Excerpt(name), result.dtype(), out.dtype());
        out.copy_(result)?;
    }
    Ok(())
}

/// [`call`] with parameters by name, as Python has them: leading tensors by position, then whatever else there is to say, tensors
/// too. What is left out has its default.
///
/// ```
/// use claystone::{Device, Tensor, ops};
/// let (x, bias) = (Tensor::ones(&[2, 3], Device::Cpu)?, Tensor::full(3, 0.5, Device::Cpu)?);
/// let y = ops::call_named("layer_norm", &[&x], &[("normalized_shape", 3.into()), ("bias", (&bias).into())])?.remove(0);
/// assert_eq!(y.to_vec::<f32>()?, [0.5; 6]);
/// let error = ops::call_named("softmax", &[&x], &[("axis", 1.into())]).unwrap_err();
/// assert_eq!(error.to_string(), "softmax: it has no parameter axis: softmax(input, dim: int)");
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// # Errors
/// As [`call`]; [`Error::Invalid`] for a name that the operation does not have and one that is given twice, and for operations
/// that were registered under a name of their own, whose parameters have none.
#[track_caller]
pub fn call_named(name: &str, tensors: &[&Tensor], named: &[(&str, Value)]) -> Result<Vec<Tensor>> {
    let _caller = Caller::enter();
    match find(name) {
        Some(operation) => {
            let tensors: Slots = tensors.iter().map(|&t| Some(t)).collect();
            let (tensors, arguments) = operation.signature().by_position(&tensors, &[], named)?;
            operation.run(&tensors, &arguments)
        }
        None => {
            invalid!("call_named" if !named.is_empty(), "{} is no built-in operation, its parameters have no names", Excerpt(name));
            call(name, tensors, &[])
        }
    }
}

/// Convolutions, whose gradients are made of what they are given.
const CONVOLUTIONS: [&str; 6] =
    ["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"];

/// The gradients of [`call`], from those of its first results: for each tensor, of which those are computed that are `wanted`. The
/// operation runs once more for that, unless it is elementwise or a convolution, whose gradients do not depend on the result. Each
/// gradient has a storage of its own. An operation that draws random numbers draws them again.
///
/// ```
/// use claystone::{Device, Tensor, ops};
/// let x = Tensor::full(2, 3.0, Device::Cpu)?;
/// let grad = Tensor::ones(2, Device::Cpu)?;
/// let found = ops::gradients("mul", &[Some(&x), Some(&x)], &[], &[Some(&grad)], &[true, false])?;
/// assert_eq!(found[0].as_ref().unwrap().to_vec::<f32>()?, [3.0, 3.0]);
/// assert!(found[1].is_none());
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// # Errors
/// Those of [`call`] and of [`grad`](crate::autograd::grad); [`Error::Invalid`](crate::Error::Invalid) for more gradients than results.
pub fn gradients(
    name: &str,
    tensors: &[Option<&Tensor>],
    arguments: &[Argument],
    grad_outputs: &[Option<&Tensor>],
    wanted: &[bool],
) -> Result<Vec<Option<Tensor>>> {
    let recorded = Recorded::new(tensors, wanted, |inputs| {
        let run = || call(name, inputs, arguments);
        if is_of_operands(name, inputs) { gradients_only(run) } else { run() }
    })?;
    let mut gradients = recorded.pass("gradients", grad_outputs, false)?;
    gradients.resize_with(wanted.len(), || None);
    Ok(gradients)
}

/// Whether the gradients of an operation are those of a formula of its operands, which are taken as they are.
fn is_of_operands(name: &str, tensors: &[Option<&Tensor>]) -> bool {
    let Some(operation) = find(name) else { return false };
    let mut dtypes = tensors.iter().flatten().map(|t| t.dtype());
    let first = dtypes.next();
    let alike = dtypes.all(|dtype| Some(dtype) == first);
    match operation.call {
        Call::Row(row) => alike && derivative_of_result(row).is_none(),
        _ => alike && CONVOLUTIONS.contains(&name),
    }
}

/// The tables of `docs/operations.md`, in Markdown: what `claystone operations` prints.
pub fn operations_markdown() -> String {
    let mut page = String::from(
        "# Operations\n\n\
         Every public operation, on the CPU and on every OpenCL device (f64 where the device has it), through any strides.\n\
         The tables are made from the code by `claystone operations`, and every line is run by a test on both.\n\
         Floats are f32, f16, bf16 and f64; integers are i64, i32, u8 and u32.\n\n\
         `ops::call` takes tensors and arguments in the order of the signature, `ops::call_named` by their names. A tensor is its\n\
         name alone, `bias?` may be left out, `*tensors` are any number of them, after all others by position. An argument has\n\
         a kind and, where it may be left out, a default; after a kind a `?` says that the operation chooses it:\n\n",
    );
    for kind in ParameterKind::ALL.iter().filter(|k| !matches!(k, ParameterKind::Tensor | ParameterKind::Tensors)) {
        _ = writeln!(page, "- `{}`: {}", kind.name(), kind.wanted());
    }
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
            _ = writeln!(
                page,
                "| `{}` | `{}` | {} | cpu, opencl | {gradient} |",
                op.signature(),
                op.torch,
                op.takes.name()
            );
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

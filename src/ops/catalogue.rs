//! The catalogue: a list of every public operation, with its parameters and its result dtype.
//!
//! From an entry follow the row in `docs/operations.md` and the call by name ([`call`](super::call)). Replacements
//! ([`register`](super::register)) are checked against the entry, and tests require a case for it. Rows of the elementwise table become
//! entries automatically. Every other family has a list of entries in its own module, and [`FAMILIES`] names these lists.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::OnceLock;

use crate::autograd::{check_unrecorded, gradients_only};
use crate::can_cast;
use crate::error::Excerpt;
use crate::expr::table::{Accepts, Output, ROWS, Row};
use crate::ops::dispatch::arguments::ParameterKind;
use crate::ops::dispatch::operation::{CallTarget, Dtypes, Kind, Operation, ResultDType};
use crate::ops::dispatch::parameters::{Parameter, Signature, Slots, Value};
use crate::ops::dispatch::prelude::*;
use crate::ops::dispatch::registry::{self, Backend, Implementation, Registration};
use crate::ops::elementwise::derivative_of_result;
use crate::ops::native::recorded::Recorded;
use crate::ops::{elementwise, index, linalg, native, nn, random, reduce, shape, sort};

/// The entry lists of all families, in the order of the documentation.
const FAMILIES: &[fn() -> Vec<Operation>] = &[
    shape::operations::operations,
    shape::join::operations,
    index::assign::operations,
    shape::triangle::operations,
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
    native::norm::operations,
    native::lstm::operations,
    nn::interpolate::operations,
    nn::loss::pointwise::operations,
    nn::loss::distance::operations,
    nn::loss::labels::operations,
];

fn row_operations(row: &'static Row) -> impl Iterator<Item = Operation> {
    let gives = match (row.output, row.accepts) {
        (Output::Bool, _) => ResultDType::Bool,
        (Output::Same, Accepts::Float) => ResultDType::Float,
        (Output::Same, Accepts::Any | Accepts::Integer) => ResultDType::Same,
    };
    let takes = if row.accepts == Accepts::Integer { Dtypes::Integers } else { Dtypes::All };
    // The text between the first backquotes after "PyTorch:" in the row's documentation.
    let torch = row.doc.split_once("PyTorch:").and_then(|(_, rest)| rest.split('`').nth(1)).unwrap_or("");
    let tensor = |name: &&'static str| Parameter::new(name, ParameterKind::Tensor, None);
    // A default without a fraction is an integer, so that integer tensors keep their dtype.
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
    std::iter::once(entry(row.name, Kind::Elementwise, CallTarget::Row(row)))
        .chain(row.in_place.map(|name| entry(name, Kind::InPlace, CallTarget::RowInPlace(row))))
}

/// Returns all public operations.
///
/// ```
/// use claystone::ops::{operations, Kind};
/// let relu = operations().iter().find(|op| op.name == "relu").unwrap();
/// assert!(relu.kind == Kind::Elementwise && relu.is_differentiable());
/// ```
#[doc = include_str!("../../docs/operations.md")]
pub fn operations() -> &'static [Operation] {
    &catalogue().all
}

/// All operations, and the index of each by its name.
struct Catalogue {
    all: Vec<Operation>,
    by_name: HashMap<&'static str, usize>,
}

fn catalogue() -> &'static Catalogue {
    static CATALOGUE: OnceLock<Catalogue> = OnceLock::new();
    CATALOGUE.get_or_init(|| {
        let mut all: Vec<Operation> = FAMILIES.iter().flat_map(|family| family()).collect();
        all.extend(ROWS.iter().copied().flat_map(row_operations));
        for &(name, of) in elementwise::pointwise::ALIASES {
            let same = all.iter().find(|op| op.name == of).expect("aliases name operations");
            all.push(Operation { name, torch: name, ..same.clone() });
        }
        all.sort_by_key(|op| op.kind);
        Catalogue { by_name: all.iter().enumerate().map(|(i, op)| (op.name, i)).collect(), all }
    })
}

pub(crate) fn find_operation(name: &str) -> Option<&'static Operation> {
    let Catalogue { all, by_name } = catalogue();
    by_name.get(name).map(|&i| &all[i])
}

/// Returns the parameters of the built-in operation named `name`, with kinds and defaults. [`operations`] lists all names.
pub fn signature(name: &str) -> Option<Signature<'static>> {
    find_operation(name).map(Operation::signature)
}

/// Adds an operation under a new name, or replaces a built-in operation, for all devices of a backend (PyTorch's `torch.library.impl`).
/// Fails with [`Error::Invalid`] if `name` already has an implementation for that backend, and for built-in operations that cannot be
/// replaced ([`Operation::is_replaceable`]).
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
pub fn register(name: &'static str, backend: Backend, implementation: Implementation) -> Result<Registration> {
    let built_in = find_operation(name);
    invalid!("register" if built_in.is_some_and(|op| !op.is_replaceable()),
        "{name} cannot be replaced: it is a view, creates or fills a tensor, or is an alias");
    registry::add_implementation(name, backend, implementation, built_in)
}

/// Calls the operation `name`, built in or registered with [`register`], with tensors and arguments by position, in the order of
/// its [`signature`]. [`operations`] lists the built-in operations.
///
/// `None` leaves out a tensor, and [`Argument::None`] leaves out an argument; trailing tensors and arguments may also be omitted. A
/// parameter that is left out has its default. An operation without tensors is called as `call::<&Tensor>`.
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
/// Returns the errors of the operation. Also returns [`Error::Invalid`] for a name that is unknown on the device, and for parameters that
/// do not match the signature; the message then contains the signature.
#[track_caller]
pub fn call<'a, T: Copy + Into<Option<&'a Tensor>>>(
    name: &str,
    tensors: &[T],
    arguments: &[Argument],
) -> Result<Vec<Tensor>> {
    let _caller = Caller::enter();
    let tensors: Slots = tensors.iter().map(|&t| t.into()).collect();
    if let Some(operation) = find_operation(name) {
        return operation.call_method(&tensors, arguments);
    }
    let Some(first) = tensors.iter().flatten().next() else {
        fail!("call", "there is no built-in operation {}, and no tensor names a device", Excerpt(name));
    };
    let backend = Backend::from(first.device());
    match registry::registered_name(name, backend) {
        Some(name) => registry::call_replacement(name, &tensors, || arguments.to_vec())?.ok_or_else(|| {
            let reason =
                "calls itself, or lacks a tensor before one that is given, and there is no built-in operation to run instead";
            Error::invalid("call", format!("{name} {reason}"))
        }),
        None => fail!("call", "there is no operation {} for {backend:?}: see operations()", Excerpt(name)),
    }
}

/// Calls an operation like [`call`], but writes the results into existing tensors (PyTorch's `out=`).
///
/// Each tensor must have the shape of its result, and the result is converted to the dtype of the tensor. `None` skips a result;
/// trailing results may also be omitted. An elementwise operation computes directly into a tensor of the result's dtype. All other
/// results are copied. Gradients do not flow through this function.
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
/// Returns the errors of [`call`]; [`Error::ShapeMismatch`] for a tensor whose shape differs from the result's; [`Error::Invalid`] if the
/// result cannot be converted to the dtype of the tensor ([`can_cast`](crate::can_cast)), and for more tensors than results;
/// [`Error::Autograd`] for a tensor that is part of the graph. If one tensor causes an error, the tensors before it may already have been
/// written.
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
        && let Some(operation) = find_operation(name)
        && operation.call_method_into(&inputs, arguments, out)?
    {
        return Ok(());
    }
    let results = no_grad(|| call(name, &inputs, arguments))?;
    invalid!(op if results.len() < out.len(), "{} tensors were given for the {} results of {}", out.len(), results.len(), Excerpt(name));
    for (result, out) in results.iter().zip(&out) {
        let Some(out) = out else { continue };
        mismatch!(op if out.shape() != result.shape(), out, result, "the tensor written to has the shape of the result");
        invalid!(op if !can_cast(result.dtype(), out.dtype()), "{} returns {}, which cannot be converted to {}",
            Excerpt(name), result.dtype(), out.dtype());
        out.copy_(result)?;
    }
    Ok(())
}

/// Calls an operation like [`call`], with named parameters as in Python: the first tensors are given by position, all other parameters by
/// name. A parameter that is left out has its default. Fails as [`call`] does, and with [`Error::Invalid`] for an unknown parameter, for a
/// parameter that is given twice, and for named parameters of an operation that is not built in.
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
#[track_caller]
pub fn call_named(name: &str, tensors: &[&Tensor], named: &[(&str, Value)]) -> Result<Vec<Tensor>> {
    let _caller = Caller::enter();
    match find_operation(name) {
        Some(operation) => {
            let tensors: Slots = tensors.iter().map(|&t| Some(t)).collect();
            let (tensors, arguments) = operation.signature().by_position(&tensors, &[], named)?;
            operation.call_method(&tensors, &arguments)
        }
        None => {
            invalid!("call_named" if !named.is_empty(), "{} is not a built-in operation, so its parameters have no names", Excerpt(name));
            call(name, tensors, &[])
        }
    }
}

/// The names of the convolutions, whose gradients depend only on their operands.
const CONVOLUTIONS: [&str; 6] =
    ["conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"];

/// Computes the gradients of a [`call`] from the gradients of its first results. Entry `i` is the gradient of tensor `i`, or `None` if
/// `wanted[i]` is false.
///
/// Runs the operation again, except for elementwise operations and convolutions, whose gradients do not depend on the result. A random
/// operation then draws new numbers. No gradient shares storage with another tensor.
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
/// The errors of [`call`] and [`grad`](crate::autograd::grad); [`Error::Invalid`] for more gradients than results.
pub fn gradients(
    name: &str,
    tensors: &[Option<&Tensor>],
    arguments: &[Argument],
    grad_outputs: &[Option<&Tensor>],
    wanted: &[bool],
) -> Result<Vec<Option<Tensor>>> {
    let recorded = Recorded::new(tensors, wanted, |inputs| {
        let run = || call(name, inputs, arguments);
        if gradient_needs_only_operands(name, inputs) { gradients_only(run) } else { run() }
    })?;
    let mut gradients = recorded.backward_pass("gradients", grad_outputs, false)?;
    gradients.resize_with(wanted.len(), || None);
    Ok(gradients)
}

/// True if the gradients are formulas of the operands alone, and the operands need no conversion.
fn gradient_needs_only_operands(name: &str, tensors: &[Option<&Tensor>]) -> bool {
    let Some(operation) = find_operation(name) else { return false };
    let mut dtypes = tensors.iter().flatten().map(|t| t.dtype());
    let first = dtypes.next();
    let alike = dtypes.all(|dtype| Some(dtype) == first);
    match operation.call {
        CallTarget::Row(row) => alike && derivative_of_result(row).is_none(),
        _ => alike && CONVOLUTIONS.contains(&name),
    }
}

/// Returns the tables of `docs/operations.md` in Markdown, which `claystone operations` prints.
pub fn operations_markdown() -> String {
    let mut page = String::from(
        "# Operations\n\n\
         All public operations. Each runs on the CPU and on every OpenCL device, for tensors of any strides (f64 if the device supports it).\n\
         `claystone operations` generates these tables from the code, and a test runs every row on both kinds of device.\n\
         Floats are f32, f16, bf16 and f64; integers are i64, i32, i16, i8, u32 and u8.\n\n\
         `ops::call` takes tensors and arguments in the order of the signature, and `ops::call_named` by name. In a signature, a\n\
         tensor is shown as its name; `bias?` is optional, and `*tensors` is a list that comes after all other tensors. An argument has\n\
         a kind and, if it is optional, a default; a `?` after the kind means that the operation chooses the default:\n\n",
    );
    for kind in ParameterKind::ALL.iter().filter(|k| !matches!(k, ParameterKind::Tensor | ParameterKind::Tensors)) {
        _ = writeln!(page, "- `{}`: {}", kind.name(), kind.description());
    }
    for &(kind, title) in Kind::ALL {
        _ = write!(
            page,
            "\n## {title}\n\n| operation | PyTorch | dtypes | devices | gradient |\n|---|---|---|---|---|\n"
        );
        for op in operations().iter().filter(|op| op.kind == kind) {
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
    fn names_are_unique_and_pytorch_names_present() {
        let mut seen = HashMap::new();
        for op in operations() {
            assert!(seen.insert(op.name, ()).is_none(), "{} twice", op.name);
            assert!(!op.torch.is_empty(), "{} has no name of PyTorch's", op.name);
            assert_eq!(op.name.ends_with('_'), op.kind == Kind::InPlace, "{} in place?", op.name);
            assert_eq!(find_operation(op.name).map(|found| found.kind), Some(op.kind));
        }
        assert_eq!(Kind::ALL.iter().filter(|(k, _)| Kind::ALL.iter().filter(|(o, _)| o == k).count() != 1).count(), 0);
    }
}

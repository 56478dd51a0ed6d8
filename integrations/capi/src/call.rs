//! Operations by name, and their gradients.

use std::ffi::c_char;
use std::mem::MaybeUninit;

use claystone::device::reported_faults;
use claystone::ops::{self, Argument, Value};
use claystone::{Generator, Tensor, with_generator};

use crate::device::device;
use crate::memory::ClaystoneBytes;
use crate::pointers::{array, borrow, handle, optional, output, outputs, text};
use crate::random::ClaystoneGenerator;
use crate::status::{ClaystoneStatus, Fault, guard};
use crate::tensor::{ClaystoneTensor, dtype};

/// The type of an argument. It selects the member of ClaystoneValue that is read.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaystoneTag {
    /// The argument is omitted and its default applies. An omitted tensor is a null TENSOR instead.
    None = 0,
    /// `integer`: 0 is false, everything else true.
    Bool = 1,
    /// `integer`.
    Int = 2,
    /// `number`.
    Float = 3,
    /// `integers`, with `length` entries.
    Ints = 4,
    /// `numbers`, with `length` entries.
    Floats = 5,
    /// `text`.
    Text = 6,
    /// `integer`: a ClaystoneDtype.
    Dtype = 7,
    /// `integer`: the number of a device.
    Device = 8,
    /// `tensor`, or null.
    Tensor = 9,
    /// `tensors`, with `length` entries, none of them null.
    Tensors = 10,
    /// `generator`, for operations that draw random numbers. It is not a parameter of the operation and takes no name. Null selects
    /// the process's default generator.
    Generator = 11,
}

/// The value of an argument.
#[repr(C)]
#[derive(Clone, Copy)]
pub union ClaystoneValue {
    /// For BOOL, INT, DTYPE and DEVICE.
    pub integer: i64,
    /// For FLOAT.
    pub number: f64,
    /// For INTS.
    pub integers: *const i64,
    /// For FLOATS.
    pub numbers: *const f64,
    /// For TEXT.
    pub text: *const c_char,
    /// For TENSOR.
    pub tensor: *const ClaystoneTensor,
    /// For TENSORS.
    pub tensors: *const *const ClaystoneTensor,
    /// For GENERATOR.
    pub generator: *const ClaystoneGenerator,
}

/// An argument of a call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ClaystoneArgument {
    /// The name of the parameter, or null for the next parameter by position. Named arguments come last.
    pub name: *const c_char,
    /// A ClaystoneTag.
    pub tag: i32,
    /// The number of entries of INTS, FLOATS and TENSORS; not read for other tags.
    pub length: usize,
    /// The value; the tag selects its member.
    pub value: ClaystoneValue,
}

/// An operation and its arguments.
///
/// `claystone_operations` lists the signature of each operation. Tensors are assigned to the tensor parameters in order, and other
/// arguments to the other parameters in order. A tensor may be passed in `tensors` or among `arguments`; the tensors in `tensors`
/// are assigned first. A list of arguments in the order of the signature therefore works unchanged. Parameters omitted at the end
/// take their defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ClaystoneCall {
    /// The operation's name.
    pub name: *const c_char,
    /// Tensors by position; null for an omitted tensor.
    pub tensors: *const *const ClaystoneTensor,
    /// The number of tensors.
    pub tensor_count: usize,
    /// Arguments, which may include tensors.
    pub arguments: *const ClaystoneArgument,
    /// The number of arguments.
    pub argument_count: usize,
}

/// A call whose arguments are all by position, in the form that `ops::call` takes.
struct Call<'a> {
    name: &'a str,
    tensors: Vec<Option<&'a Tensor>>,
    arguments: Vec<Argument>,
    generator: Option<&'a Generator>,
}

impl Call<'_> {
    /// Calls `f` so that it draws its random numbers from the call's generator, if there is one.
    fn with_own_generator<R>(&self, f: impl FnOnce() -> R) -> R {
        match self.generator {
            Some(generator) => with_generator(generator, f),
            None => f(),
        }
    }
}

/// An argument decoded from its tag and value.
enum Decoded<'a> {
    Argument(Argument),
    Tensor(Option<&'a Tensor>),
    Tensors(Vec<&'a Tensor>),
    Generator(Option<&'a Generator>),
}

/// Decodes an argument by its tag.
///
/// # Safety
/// The member that the tag selects is set; pointers in it are null or valid as the crate's documentation requires.
unsafe fn decode<'a>(argument: &'a ClaystoneArgument) -> Result<Decoded<'a>, Fault> {
    const TAGS: [ClaystoneTag; 12] = [
        ClaystoneTag::None,
        ClaystoneTag::Bool,
        ClaystoneTag::Int,
        ClaystoneTag::Float,
        ClaystoneTag::Ints,
        ClaystoneTag::Floats,
        ClaystoneTag::Text,
        ClaystoneTag::Dtype,
        ClaystoneTag::Device,
        ClaystoneTag::Tensor,
        ClaystoneTag::Tensors,
        ClaystoneTag::Generator,
    ];
    let ClaystoneArgument { tag, length, value, .. } = argument;
    let Some(known) = TAGS.into_iter().find(|known| *known as i32 == *tag) else {
        return Err(Fault::Argument(format!("{tag} is no ClaystoneTag")));
    };
    // SAFETY: the caller promises that the member that the tag selects is set and valid.
    unsafe {
        Ok(Decoded::Argument(match known {
            ClaystoneTag::None => Argument::None,
            ClaystoneTag::Bool => Argument::Bool(value.integer != 0),
            ClaystoneTag::Int => Argument::Int(value.integer),
            ClaystoneTag::Float => Argument::Float(value.number),
            ClaystoneTag::Ints => Argument::Ints(array(value.integers, *length, "integers")?.to_vec()),
            ClaystoneTag::Floats => Argument::Floats(array(value.numbers, *length, "numbers")?.to_vec()),
            ClaystoneTag::Text => Argument::Text(text(value.text, "text")?.to_owned()),
            ClaystoneTag::Dtype => Argument::DType(dtype(value.integer)?),
            ClaystoneTag::Device => {
                // A number outside the range of i32 is not a device either; i32::MIN makes `device` report the error.
                Argument::Device(device(i32::try_from(value.integer).unwrap_or(i32::MIN))?)
            }
            ClaystoneTag::Tensor => return Ok(Decoded::Tensor(value.tensor.as_ref().map(|t| &t.0))),
            ClaystoneTag::Tensors => {
                let tensors = array(value.tensors, *length, "tensors")?;
                let tensors = tensors.iter().map(|&t| Ok(&borrow(t, "a tensor of a list")?.0));
                return Ok(Decoded::Tensors(tensors.collect::<Result<_, Fault>>()?));
            }
            ClaystoneTag::Generator => return Ok(Decoded::Generator(value.generator.as_ref().map(|g| &g.0))),
        }))
    }
}

impl Decoded<'_> {
    /// Converts to the value that `Signature::by_position` takes for a named argument.
    fn value(&self) -> Value<'_> {
        match self {
            Decoded::Argument(argument) => Value::Argument(argument.clone()),
            Decoded::Tensor(tensor) => (*tensor).into(),
            Decoded::Tensors(list) => Value::Tensors(list),
            Decoded::Generator(_) => Value::Argument(Argument::None),
        }
    }
}

/// Converts a C call to a call by position and passes it to `run`.
///
/// # Safety
/// Pointers are null or valid as the crate's documentation requires.
unsafe fn with_call<R>(call: *const ClaystoneCall, run: impl FnOnce(Call) -> Result<R, Fault>) -> Result<R, Fault> {
    // SAFETY: the caller upholds this function's contract.
    let (name, handles, given) = unsafe {
        let call = borrow(call, "call")?;
        let handles = array(call.tensors, call.tensor_count, "tensors")?;
        (text(call.name, "name")?, handles, array(call.arguments, call.argument_count, "arguments")?)
    };
    // SAFETY: the caller promises that each entry is null or a live handle.
    let mut tensors: Vec<_> = handles.iter().map(|&t| unsafe { t.as_ref() }.map(|t| &t.0)).collect();
    let (mut arguments, mut generator, mut named) = (Vec::new(), None, Vec::new());
    for argument in given {
        // SAFETY: the caller upholds this function's contract.
        let (key, value) = unsafe {
            let key = if argument.name.is_null() { None } else { Some(text(argument.name, "an argument's name")?) };
            (key, decode(argument)?)
        };
        match (key, value) {
            (None, Decoded::Generator(given)) => generator = given,
            (Some(key), Decoded::Generator(_)) => {
                return Err(Fault::Argument(format!("a generator argument takes no name, but has the name {key}")));
            }
            (Some(key), value) => named.push((key, value)),
            (None, _) if !named.is_empty() => {
                return Err(Fault::Argument("an argument by position comes after one with a name".into()));
            }
            (None, Decoded::Argument(argument)) => arguments.push(argument),
            (None, Decoded::Tensor(tensor)) => tensors.push(tensor),
            (None, Decoded::Tensors(list)) => tensors.extend(list.into_iter().map(Some)),
        }
    }
    if !named.is_empty() {
        let Some(signature) = ops::signature(name) else {
            return Err(Fault::Argument(format!("{name:?} is not a built-in operation: its parameters have no names")));
        };
        let values: Vec<(&str, Value)> = named.iter().map(|(key, value)| (*key, value.value())).collect();
        let (tensors, arguments) = signature.by_position(&tensors, &arguments, &values)?;
        return tag_kernel_faults(|| run(Call { name, tensors, arguments, generator }));
    }
    tag_kernel_faults(|| run(Call { name, tensors, arguments, generator }))
}

/// Marks errors that kernels reported as [`Fault::Kernel`], because they may come from an earlier operation instead of this call.
fn tag_kernel_faults<R>(run: impl FnOnce() -> Result<R, Fault>) -> Result<R, Fault> {
    let before = reported_faults();
    run().map_err(|fault| match fault {
        Fault::Claystone(error) if reported_faults() != before => Fault::Kernel(error),
        fault => fault,
    })
}

/// Writes a new handle, owned by the caller, for each result; null for `None`.
pub(crate) fn write_results(
    results: impl IntoIterator<Item = Option<Tensor>>,
    outputs: &mut [MaybeUninit<*mut ClaystoneTensor>],
) {
    for (output, result) in outputs.iter_mut().zip(results) {
        output.write(result.map_or(std::ptr::null_mut(), |tensor| handle(ClaystoneTensor(tensor))));
    }
}

/// Runs an operation.
///
/// `results` has room for `capacity` handles, which the caller owns; further results are dropped. `result_count` receives the number
/// of results of the operation and may be null. The result of a view operation shares its storage with an operand.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_call(
    call: *const ClaystoneCall,
    results: *mut *mut ClaystoneTensor,
    capacity: usize,
    result_count: *mut usize,
) -> ClaystoneStatus {
    guard("claystone_call", || {
        // SAFETY: the caller promises pointers that are valid for writing.
        let (outputs, count) = unsafe { (outputs(results, capacity, "results")?, optional(result_count)) };
        let run = |call: Call| Ok(call.with_own_generator(|| ops::call(call.name, &call.tensors, &call.arguments))?);
        // SAFETY: the caller promises that the pointers in the call are null or valid.
        let made = unsafe { with_call(call, run)? };
        count.map(|output| output.write(made.len()));
        write_results(made.into_iter().map(Some), outputs);
        Ok(())
    })
}

/// Runs an operation and writes its results into the existing tensors `out`, like PyTorch's `out=`. Each tensor has the shape of its
/// result, which is converted to the tensor's dtype. A null entry discards its result. Elementwise operations whose result dtype
/// matches write the tensor directly; results of other operations are copied.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_call_out(
    call: *const ClaystoneCall,
    out: *const *const ClaystoneTensor,
    out_count: usize,
) -> ClaystoneStatus {
    guard("claystone_call_out", || {
        // SAFETY: the caller promises an array whose entries are null or live handles.
        let out: Vec<Option<&Tensor>> = unsafe {
            let out = array(out, out_count, "out")?;
            out.iter().map(|&t| t.as_ref().map(|t| &t.0)).collect()
        };
        let run = |call: Call| {
            Ok(call.with_own_generator(|| ops::call_into(call.name, &call.tensors, &call.arguments, &out))?)
        };
        // SAFETY: the caller promises that the pointers in the call are null or valid.
        unsafe { with_call(call, run) }
    })
}

/// Computes the gradients of an operation: runs the operation again with recording and propagates the gradients of its results back.
/// Elementwise operations and convolutions do not recompute their results for that.
///
/// `grad_outputs` has a gradient for each of the first results, of the same shape, dtype and device; null for a result without one.
/// `wanted` has a flag for each tensor parameter of the operation, in the order of its signature (for a list at the end: one for each of its
/// tensors); a flag other than 0 requests the gradient. `gradients` has room for as many handles, which the caller owns: null for
/// gradients that were not requested or do not exist. No gradient shares a storage with an argument. An operation that draws random
/// numbers draws them again: pass a generator whose state is the same as before the forward call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_call_backward(
    call: *const ClaystoneCall,
    grad_outputs: *const *const ClaystoneTensor,
    grad_output_count: usize,
    wanted: *const u8,
    gradients: *mut *mut ClaystoneTensor,
    tensor_count: usize,
) -> ClaystoneStatus {
    guard("claystone_call_backward", || {
        // SAFETY: the caller promises arrays; each entry of `grad_outputs` is null or a live handle.
        let (grad_outputs, wanted, outputs) = unsafe {
            let handles = array(grad_outputs, grad_output_count, "grad_outputs")?;
            let grad_outputs: Vec<Option<&Tensor>> = handles.iter().map(|&t| t.as_ref().map(|t| &t.0)).collect();
            (grad_outputs, array(wanted, tensor_count, "wanted")?, outputs(gradients, tensor_count, "gradients")?)
        };
        let wanted: Vec<bool> = wanted.iter().map(|&flag| flag != 0).collect();
        let run = |call: Call| {
            Ok(call.with_own_generator(|| {
                ops::gradients(call.name, &call.tensors, &call.arguments, &grad_outputs, &wanted)
            })?)
        };
        // SAFETY: the caller promises that the pointers in the call are null or valid.
        write_results(unsafe { with_call(call, run)? }, outputs);
        Ok(())
    })
}

/// The signatures of all operations that `claystone_call` accepts, one per line; `docs/operations.md` explains them. The caller owns the
/// string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_operations(signatures: *mut ClaystoneBytes) -> ClaystoneStatus {
    guard("claystone_operations", || {
        // SAFETY: the caller promises a pointer that is null or valid for writing.
        let output = unsafe { output(signatures, "signatures")? };
        let lines: Vec<String> = ops::operations().iter().map(|op| op.signature().to_string()).collect();
        output.write(ClaystoneBytes::new((lines.join("\n") + "\n").into_bytes()));
        Ok(())
    })
}

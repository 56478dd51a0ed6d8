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

/// What an argument is, and so which member of its value is read.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaystoneTag {
    /// An argument that is left out: its default. A tensor that is left out is a null TENSOR.
    None = 0,
    /// `integer`: false where it is 0.
    Bool = 1,
    /// `integer`.
    Int = 2,
    /// `number`.
    Float = 3,
    /// `integers`, of `length` entries.
    Ints = 4,
    /// `numbers`, of `length` entries.
    Floats = 5,
    /// `text`.
    Text = 6,
    /// `integer`: a ClaystoneDtype.
    Dtype = 7,
    /// `integer`: the number of a device.
    Device = 8,
    /// `tensor`, or null.
    Tensor = 9,
    /// `tensors`, of `length` entries, none of them null.
    Tensors = 10,
    /// `generator`, for operations that draw random numbers: no parameter of theirs, and it has no name. Null is the process's.
    Generator = 11,
}

/// The value of an argument.
#[repr(C)]
#[derive(Clone, Copy)]
pub union ClaystoneValue {
    /// Of BOOL, INT, DTYPE, DEVICE.
    pub integer: i64,
    /// Of FLOAT.
    pub number: f64,
    /// Of INTS.
    pub integers: *const i64,
    /// Of FLOATS.
    pub numbers: *const f64,
    /// Of TEXT.
    pub text: *const c_char,
    /// Of TENSOR.
    pub tensor: *const ClaystoneTensor,
    /// Of TENSORS.
    pub tensors: *const *const ClaystoneTensor,
    /// Of GENERATOR.
    pub generator: *const ClaystoneGenerator,
}

/// An argument of a call.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ClaystoneArgument {
    /// The parameter that it is for; null for the next one by position. Those with names come last.
    pub name: *const c_char,
    /// A ClaystoneTag.
    pub tag: i32,
    /// How many entries its value has, of INTS, FLOATS and TENSORS; otherwise it is not read.
    pub length: usize,
    /// Its value, of which the tag says which member.
    pub value: ClaystoneValue,
}

/// An operation and what it is called with.
///
/// The parameters of an operation are those of its signature, which `claystone_operations` lists. Tensors are for its parameters that
/// are tensors, in their order, and other arguments for the others, in theirs: it makes no difference whether tensors are in
/// `tensors` or among `arguments`, where they may stand in the order of the signature. Those of `tensors` come first. What is left
/// out at the end has its default.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ClaystoneCall {
    /// The operation's name.
    pub name: *const c_char,
    /// Tensors by position; null for one that is left out.
    pub tensors: *const *const ClaystoneTensor,
    /// How many.
    pub tensor_count: usize,
    /// Arguments, and tensors too.
    pub arguments: *const ClaystoneArgument,
    /// How many.
    pub argument_count: usize,
}

/// A call by position: what `ops::call` takes.
struct Call<'a> {
    name: &'a str,
    tensors: Vec<Option<&'a Tensor>>,
    arguments: Vec<Argument>,
    generator: Option<&'a Generator>,
}

impl Call<'_> {
    /// Runs `f`, whose random numbers are the generator's.
    fn drawing<R>(&self, f: impl FnOnce() -> R) -> R {
        match self.generator {
            Some(generator) => with_generator(generator, f),
            None => f(),
        }
    }
}

/// What an argument is, once it was read.
enum Read<'a> {
    Argument(Argument),
    Tensor(Option<&'a Tensor>),
    Tensors(Vec<&'a Tensor>),
    Generator(Option<&'a Generator>),
}

/// An argument by its tag.
///
/// # Safety
/// The member that the tag names was set; pointers in it are null, or good as the crate's documentation says.
unsafe fn read<'a>(argument: &'a ClaystoneArgument) -> Result<Read<'a>, Fault> {
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
    // SAFETY: the caller's promise, of the member that each tag names.
    unsafe {
        Ok(Read::Argument(match known {
            ClaystoneTag::None => Argument::None,
            ClaystoneTag::Bool => Argument::Bool(value.integer != 0),
            ClaystoneTag::Int => Argument::Int(value.integer),
            ClaystoneTag::Float => Argument::Float(value.number),
            ClaystoneTag::Ints => Argument::Ints(array(value.integers, *length, "integers")?.to_vec()),
            ClaystoneTag::Floats => Argument::Floats(array(value.numbers, *length, "numbers")?.to_vec()),
            ClaystoneTag::Text => Argument::Text(text(value.text, "text")?.to_owned()),
            ClaystoneTag::Dtype => Argument::DType(dtype(value.integer)?),
            ClaystoneTag::Device => {
                // What is no i32 is no device, either.
                Argument::Device(device(i32::try_from(value.integer).unwrap_or(i32::MIN))?)
            }
            ClaystoneTag::Tensor => return Ok(Read::Tensor(value.tensor.as_ref().map(|t| &t.0))),
            ClaystoneTag::Tensors => {
                let tensors = array(value.tensors, *length, "tensors")?;
                let tensors = tensors.iter().map(|&t| Ok(&borrow(t, "a tensor of a list")?.0));
                return Ok(Read::Tensors(tensors.collect::<Result<_, Fault>>()?));
            }
            ClaystoneTag::Generator => return Ok(Read::Generator(value.generator.as_ref().map(|g| &g.0))),
        }))
    }
}

impl Read<'_> {
    /// What `ops` takes by name.
    fn value(&self) -> Value<'_> {
        match self {
            Read::Argument(argument) => Value::Argument(argument.clone()),
            Read::Tensor(tensor) => (*tensor).into(),
            Read::Tensors(list) => Value::Tensors(list),
            Read::Generator(_) => Value::Argument(Argument::None),
        }
    }
}

/// Calls `run` with the call by position that this is.
///
/// # Safety
/// Pointers are null, or good as the crate's documentation says.
unsafe fn with_call<R>(call: *const ClaystoneCall, run: impl FnOnce(Call) -> Result<R, Fault>) -> Result<R, Fault> {
    // SAFETY: the caller's promise.
    let (name, handles, given) = unsafe {
        let call = borrow(call, "call")?;
        let handles = array(call.tensors, call.tensor_count, "tensors")?;
        (text(call.name, "name")?, handles, array(call.arguments, call.argument_count, "arguments")?)
    };
    // SAFETY: each is null or a handle that lives.
    let mut tensors: Vec<_> = handles.iter().map(|&t| unsafe { t.as_ref() }.map(|t| &t.0)).collect();
    let (mut arguments, mut generator, mut named) = (Vec::new(), None, Vec::new());
    for argument in given {
        // SAFETY: the caller's promise.
        let (key, value) = unsafe {
            let key = if argument.name.is_null() { None } else { Some(text(argument.name, "an argument's name")?) };
            (key, read(argument)?)
        };
        match (key, value) {
            (None, Read::Generator(given)) => generator = given,
            (Some(key), Read::Generator(_)) => {
                return Err(Fault::Argument(format!("the generator has the name {key}: it takes none")));
            }
            (Some(key), value) => named.push((key, value)),
            (None, _) if !named.is_empty() => {
                return Err(Fault::Argument("an argument by position comes after one with a name".into()));
            }
            (None, Read::Argument(argument)) => arguments.push(argument),
            (None, Read::Tensor(tensor)) => tensors.push(tensor),
            (None, Read::Tensors(list)) => tensors.extend(list.into_iter().map(Some)),
        }
    }
    if !named.is_empty() {
        let Some(signature) = ops::signature(name) else {
            return Err(Fault::Argument(format!("{name:?} is no built-in operation, its parameters have no names")));
        };
        let values: Vec<(&str, Value)> = named.iter().map(|(key, value)| (*key, value.value())).collect();
        let (tensors, arguments) = signature.by_position(&tensors, &arguments, &values)?;
        return told_apart(|| run(Call { name, tensors, arguments, generator }));
    }
    told_apart(|| run(Call { name, tensors, arguments, generator }))
}

/// Errors of what kernels found are not the arguments' fault: an earlier operation's may be among them.
fn told_apart<R>(run: impl FnOnce() -> Result<R, Fault>) -> Result<R, Fault> {
    let before = reported_faults();
    run().map_err(|fault| match fault {
        Fault::Claystone(error) if reported_faults() != before => Fault::Kernel(error),
        fault => fault,
    })
}

/// Handles for results, which are the caller's.
pub(crate) fn give(
    results: impl IntoIterator<Item = Option<Tensor>>,
    outputs: &mut [MaybeUninit<*mut ClaystoneTensor>],
) {
    for (output, result) in outputs.iter_mut().zip(results) {
        output.write(result.map_or(std::ptr::null_mut(), |tensor| handle(ClaystoneTensor(tensor))));
    }
}

/// Runs an operation.
///
/// `results` has room for `capacity` handles, which are the caller's; results beyond that are dropped. `result_count` says how many
/// the operation gave, and may be null. A result may share its storage with an operand: that of a view does.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_call(
    call: *const ClaystoneCall,
    results: *mut *mut ClaystoneTensor,
    capacity: usize,
    result_count: *mut usize,
) -> ClaystoneStatus {
    guard("claystone_call", || {
        // SAFETY: pointers that are good for writing, says the caller.
        let (outputs, count) = unsafe { (outputs(results, capacity, "results")?, optional(result_count)) };
        let run = |call: Call| Ok(call.drawing(|| ops::call(call.name, &call.tensors, &call.arguments))?);
        // SAFETY: what the call points to is good, says the caller.
        let made = unsafe { with_call(call, run)? };
        count.map(|output| output.write(made.len()));
        give(made.into_iter().map(Some), outputs);
        Ok(())
    })
}

/// Runs an operation and writes its results into tensors that are there: those of `out`, of the results' shapes, converted to their
/// dtypes. Null is for a result that nobody wants. PyTorch's `out=`. Elementwise operations whose result has the dtype of the tensor
/// write it directly; of others the results are copied.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_call_out(
    call: *const ClaystoneCall,
    out: *const *const ClaystoneTensor,
    out_count: usize,
) -> ClaystoneStatus {
    guard("claystone_call_out", || {
        // SAFETY: an array, says the caller, whose entries are null or handles that live.
        let out: Vec<Option<&Tensor>> = unsafe {
            let out = array(out, out_count, "out")?;
            out.iter().map(|&t| t.as_ref().map(|t| &t.0)).collect()
        };
        let run = |call: Call| Ok(call.drawing(|| ops::call_into(call.name, &call.tensors, &call.arguments, &out))?);
        // SAFETY: what the call points to is good, says the caller.
        unsafe { with_call(call, run) }
    })
}

/// The gradients of an operation: runs it once more, recorded, and goes back from the gradients of its results. Of elementwise operations
/// and convolutions the results are not computed for that.
///
/// `grad_outputs` has one gradient for each of the first results, of its shape, dtype and device; null for one that has none. `wanted` has
/// a flag for each tensor parameter of the operation, in the order of its signature (for each tensor of a list at its end): not 0
/// where its gradient is wanted. `gradients` has room for as many handles, which are the caller's: null where none was wanted or
/// none flows. No gradient shares a storage with what was given. An operation that draws random numbers draws them again: give it a
/// generator whose state is what it was before.
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
        // SAFETY: arrays, says the caller, of which the entries of `grad_outputs` are null or handles that live.
        let (grad_outputs, wanted, outputs) = unsafe {
            let handles = array(grad_outputs, grad_output_count, "grad_outputs")?;
            let grad_outputs: Vec<Option<&Tensor>> = handles.iter().map(|&t| t.as_ref().map(|t| &t.0)).collect();
            (grad_outputs, array(wanted, tensor_count, "wanted")?, outputs(gradients, tensor_count, "gradients")?)
        };
        let wanted: Vec<bool> = wanted.iter().map(|&flag| flag != 0).collect();
        let run = |call: Call| {
            Ok(call.drawing(|| ops::gradients(call.name, &call.tensors, &call.arguments, &grad_outputs, &wanted))?)
        };
        // SAFETY: what the call points to is good, says the caller.
        give(unsafe { with_call(call, run)? }, outputs);
        Ok(())
    })
}

/// The signatures of all operations, one a line, as `docs/operations.md` explains them: what `claystone_call` can be given. The text
/// is the caller's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_operations(signatures: *mut ClaystoneBytes) -> ClaystoneStatus {
    guard("claystone_operations", || {
        // SAFETY: good for writing, says the caller.
        let output = unsafe { output(signatures, "signatures")? };
        let lines: Vec<String> = ops::operations().iter().map(|op| op.signature().to_string()).collect();
        output.write(ClaystoneBytes::new((lines.join("\n") + "\n").into_bytes()));
        Ok(())
    })
}

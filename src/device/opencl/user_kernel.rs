//! Users' kernels in OpenCL C. Tensors are known to this module only through [`KernelTensor`].

use std::collections::HashMap;
use std::fmt::{self, Write};
use std::sync::{Arc, Mutex};

use opencl3::kernel as cl;

use super::description::text;
use super::driver::{ClKernel, info, value};
use super::errors::ClError;
use super::program::build_with;
use super::{Arg, ClDevice, open_device};
use crate::device::Device;
use crate::device::lru::Lru;
use crate::sync::lock;
use crate::{DType, Error, Result};

/// A user-defined kernel in OpenCL C, run on tensors, as PyTorch's `torch.cuda._compile_kernel`.
///
/// A tensor is passed as a `__global` pointer to its first element. Views need no special treatment, but a kernel for arbitrary
/// strides must take the strides as numbers. OpenCL C has no type for bf16, so its bits are a `ushort`; a bool is a `uchar`.
/// The kernel is compiled when it first runs on a device, and cached on disk with the crate's own kernels (see
/// [`device`](crate::device)). Programs of dropped kernels are released, except the last few. `HAS_F64` is
/// defined if the device has doubles, `IS_CPU` on processors.
///
/// ```
/// use claystone::{Device, Kernel, Tensor};
/// # let Some(device) = Device::all().into_iter().find(|&d| d != Device::Cpu) else { return Ok(()) };
/// const SOURCE: &str = "
///     __kernel void saxpy(float a, __global const float *x, __global float *y, uint n) {
///         size_t i = get_global_id(0);
///         if (i < n) y[i] += a * x[i];
///     }";
/// let saxpy = Kernel::from_source("saxpy", SOURCE, "")?;
/// let (x, y) = (Tensor::arange(0, 100, 1, device)?, Tensor::ones(100, device)?);
/// let call = saxpy.call().scalar(2f32).arg(&x).out(&y).scalar(100u32).global(&[128]).local(&[32]);
/// // SAFETY: the kernel reads and writes 100 elements at most of either, and `y` is an `out`.
/// unsafe { call.launch()? };
/// assert_eq!(y.to_vec::<f32>()?[99], 199.0);
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// Autograd does not record the kernel: use a [`CustomOp`](crate::autograd::CustomOp) to define a backward pass.
pub struct Kernel {
    name: &'static str,
    source: String,
    options: String,
    signatures: Mutex<HashMap<Device, Arc<KernelSignature>>>,
    /// The compiled kernels that call the user's kernel, by device and argument types.
    compiled: Mutex<CompiledKernels>,
}

/// Compiled kernels by device, [wide offsets](ClDevice::has_wide_offsets), and argument types.
type CompiledKernels = Lru<(Device, bool, Vec<ArgumentKind>), Arc<ClKernel>>;

/// The maximum number of compiled kernels of one source, over devices and argument types.
const MAX_COMPILED: usize = 64;

struct KernelSignature {
    count: usize,
    /// `None` if the driver does not report the parameters.
    parameters: Option<Vec<Parameter>>,
    /// The size in the kernel's attribute `reqd_work_group_size`; zeros if the kernel does not have the attribute.
    group: [usize; 3],
}

#[derive(Debug)]
struct Parameter {
    name: String,
    /// The type as written in the source: `float4*`, `uint`.
    type_name: String,
    /// `CL_KERNEL_ARG_ADDRESS_GLOBAL`, for example. Values, rather than pointers, are private.
    space: u32,
    /// True if the parameter points to const data.
    constant: bool,
}

/// The type that an argument has in the generated kernel.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum ArgumentKind {
    Tensor,
    Local,
    Scalar(&'static str),
}

impl Kernel {
    /// Creates the kernel `name` in `source`, with more options for the compiler ("-cl-fast-relaxed-math -DN=4"). Nothing is
    /// compiled yet.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a name that is not an identifier in C.
    pub fn from_source(name: &'static str, source: impl Into<String>, options: &str) -> Result<Kernel> {
        let letter = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let is_wrong = name.is_empty() || !name.chars().all(letter) || name.starts_with(|c: char| c.is_ascii_digit());
        invalid!("Kernel::from_source" if is_wrong, "\"{name}\" is not a valid kernel name");
        let compiled = Mutex::new(Lru::new(MAX_COMPILED));
        Ok(Kernel { name, source: source.into(), options: options.into(), signatures: Mutex::default(), compiled })
    }

    /// Returns the kernel's name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Starts a call, to which arguments are added in the kernel's order.
    pub fn call(&self) -> KernelCall<'_> {
        KernelCall { kernel: self, arguments: Vec::new(), global: Vec::new(), local: None }
    }

    /// Returns the user's options, plus the option that keeps the parameters' types.
    fn build_options(&self) -> String {
        format!("{} -cl-kernel-arg-info", self.options)
    }

    /// Returns the kernel's signature on the device; compiles the user's source if necessary.
    fn entry(&self, device: &'static ClDevice) -> Result<Arc<KernelSignature>> {
        if let Some(entry) = lock(&self.signatures).get(&device.device()) {
            return Ok(entry.clone());
        }
        let kernel = build_with(device, self.name, &self.source, &self.build_options(), self.name)?;
        let what = cl::CL_KERNEL_COMPILE_WORK_GROUP_SIZE;
        let required = value!(clGetKernelWorkGroupInfo(kernel.raw, device.id(), what) as [usize; 3]);
        let entry = Arc::new(KernelSignature {
            count: kernel.arg_count(),
            parameters: parameters(&kernel),
            group: required.unwrap_or_default(),
        });
        Ok(lock(&self.signatures).entry(device.device()).or_insert(entry).clone())
    }

    /// Returns the generated kernel, which adds each tensor's offset to the buffer's pointer and calls the user's kernel.
    fn compiled(
        &self,
        device: &'static ClDevice,
        entry: &KernelSignature,
        kinds: Vec<ArgumentKind>,
    ) -> Result<Arc<ClKernel>> {
        let key = (device.device(), device.has_wide_offsets(), kinds);
        if let Some(kernel) = lock(&self.compiled).get(&key) {
            return Ok(kernel.clone());
        }
        let text = |(i, kind): (usize, &ArgumentKind)| match kind {
            ArgumentKind::Tensor => {
                (format!("__global uchar *a{i}, ulong o{i}"), format!("(__global void *)(a{i} + o{i})"))
            }
            ArgumentKind::Local => (format!("__local uchar *a{i}"), format!("(__local void *)a{i}")),
            ArgumentKind::Scalar(t) => (format!("{t} a{i}"), format!("a{i}")),
        };
        let (parameters, arguments): (Vec<_>, Vec<_>) = key.2.iter().enumerate().map(text).unzip();
        let mut source = self.source.clone();
        let (name, parameters, arguments) = (self.name, parameters.join(", "), arguments.join(", "));
        let [x, y, z] = entry.group;
        let group = match x {
            0 => String::new(),
            _ => format!("__attribute__((reqd_work_group_size({x}, {y}, {z})))\n"),
        };
        let _ = write!(source, "\n{group}__kernel void claystone_call({parameters}) {{ {name}({arguments}); }}\n");
        let kernel = Arc::new(build_with(device, self.name, &source, &self.build_options(), "claystone_call")?);
        let mut compiled = lock(&self.compiled);
        let (kernel, evicted) = compiled.get_or_insert(key, || kernel);
        let kernel = Arc::clone(kernel);
        drop(compiled);
        drop(evicted);
        Ok(kernel)
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "kernel {}", self.name)
    }
}

/// A number as a kernel argument, with its type in OpenCL C: `i32` is `int`, `u64` is `ulong`.
pub trait KernelScalar: sealed::Sealed + bytemuck::NoUninit {
    /// The type's name in OpenCL C.
    const TYPE: &'static str;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! scalars {
    ($($t:ty = $name:literal),*) => { $(
        impl sealed::Sealed for $t {}

        impl KernelScalar for $t {
            const TYPE: &'static str = $name;
        }
    )* };
}

scalars!(i8 = "char", u8 = "uchar", i16 = "short", u16 = "ushort", i32 = "int", u32 = "uint");
scalars!(i64 = "long", u64 = "ulong", f32 = "float", f64 = "double");

/// The properties of a tensor that a kernel needs.
pub(crate) trait KernelTensor {
    fn device(&self) -> Device;
    fn dtype(&self) -> DType;
    /// Returns a number that is unique to the storage.
    fn storage_address(&self) -> usize;
    /// Returns an error if the tensor is empty, or if it is to be `written` and must not be.
    fn check(&self, op: &'static str, written: bool) -> Result<()>;
    /// Returns the tensor's buffer, which does not move while the view lives.
    fn view(&self) -> Result<Box<dyn KernelBuffer + '_>>;
    fn written(&self);
}

/// A tensor's buffer, and the offset of the first element in bytes.
pub(crate) trait KernelBuffer {
    fn buffer(&self) -> Arg<'_>;
    fn first_byte(&self) -> u64;
}

pub(crate) enum Argument<'a> {
    Tensor { tensor: &'a dyn KernelTensor, written: bool },
    Scalar { kind: &'static str, bytes: [u8; 8], size: usize },
    Local(usize),
}

/// The arguments and sizes of a call of a [`Kernel`].
#[must_use = "nothing runs before launch()"]
pub struct KernelCall<'a> {
    kernel: &'a Kernel,
    arguments: Vec<Argument<'a>>,
    global: Vec<usize>,
    local: Option<Vec<usize>>,
}

impl<'a> KernelCall<'a> {
    /// Adds a number, whose type must be the kernel's: `2u32` for a `uint`.
    pub fn scalar<T: KernelScalar>(self, value: T) -> Self {
        let (mut bytes, size) = ([0; 8], size_of::<T>());
        bytes[..size].copy_from_slice(bytemuck::bytes_of(&value));
        self.with_argument(Argument::Scalar { kind: T::TYPE, bytes, size })
    }

    /// Adds `bytes` bytes of local memory, for a `__local` pointer.
    pub fn local_memory(self, bytes: usize) -> Self {
        self.with_argument(Argument::Local(bytes))
    }

    pub(crate) fn with_argument(mut self, argument: Argument<'a>) -> Self {
        self.arguments.push(argument);
        self
    }

    /// Sets the number of work-items in each of one to three dimensions.
    pub fn global(mut self, sizes: &[usize]) -> Self {
        self.global = sizes.to_vec();
        self
    }

    /// Sets the work-group size in each dimension, of which the global sizes must be multiples. The default is groups of up to 64
    /// work-items along the first dimension.
    pub fn local(mut self, sizes: &[usize]) -> Self {
        self.local = Some(sizes.to_vec());
        self
    }

    /// Submits the kernel to the current stream of the device, after all earlier work, and returns.
    ///
    /// # Errors
    /// [`Error::Build`] with the compiler's log. [`Error::Invalid`] for a wrong number of arguments, an argument of a wrong type (if
    /// the driver reports the types), sizes that do not match or are too large; if there is no tensor, or a tensor is on the CPU
    /// or empty, or an `out` is also another argument.
    /// [`Error::DeviceMismatch`]; [`Error::Autograd`] for an `out` that is part of a graph, outside
    /// [`no_grad`](crate::no_grad).
    ///
    /// # Safety
    /// The kernel's accesses are not checked. The kernel must access only elements of the given tensors and its local memory, write
    /// only to tensors given as `out`, and terminate: otherwise it may change memory of other tensors, or crash the device. Its
    /// work-items must not race with each other.
    pub unsafe fn launch(self) -> Result<()> {
        let name = self.kernel.name;
        let tensors = self.arguments.iter().filter_map(|a| match a {
            Argument::Tensor { tensor, written } => Some((*tensor, *written)),
            _ => None,
        });
        let tensors: Vec<(&dyn KernelTensor, bool)> = tensors.collect();
        let Some((first, _)) = tensors.first() else {
            return Err(Error::invalid(name, "a kernel runs on the device of its tensors, and no tensor is given"));
        };
        for (i, (tensor, written)) in tensors.iter().enumerate() {
            if tensor.device() != first.device() {
                return Err(Error::DeviceMismatch { op: name, lhs: first.device(), rhs: tensor.device() });
            }
            invalid!(name if tensor.device().is_cpu(),
                "kernels run on OpenCL devices and this tensor is on the CPU: bring it over with .to_device()");
            tensor.check(name, *written)?;
            let shared = |(j, (t, _)): (usize, &(&dyn KernelTensor, bool))| {
                j != i && t.storage_address() == tensor.storage_address()
            };
            invalid!(name if *written && tensors.iter().enumerate().any(shared),
                "an `out` shares its storage with another argument");
        }
        let device = open_device(first.device())?;
        let entry = self.kernel.entry(device)?;
        self.check_arguments(&entry)?;
        let local = self.group(&entry)?;
        let kernel = self.kernel.compiled(device, &entry, self.arguments.iter().map(Argument::kind).collect())?;
        // Views come last, because a tensor with a view cannot be moved to make room.
        let views = tensors.iter().map(|(t, _)| t.view()).collect::<Result<Vec<_>>>()?;
        let mut views = views.iter();
        let mut args = Vec::with_capacity(self.arguments.len() + tensors.len());
        for argument in &self.arguments {
            match argument {
                Argument::Tensor { .. } => {
                    let Some(view) = views.next() else { unreachable!("a view a tensor") };
                    args.extend([view.buffer(), Arg::U64(view.first_byte())]);
                }
                Argument::Scalar { bytes, size, .. } => args.push(Arg::Bytes(&bytes[..*size])),
                Argument::Local(bytes) => args.push(Arg::Local(*bytes)),
            }
        }
        device.launch(&kernel, &args, &self.global, &local)?;
        tensors.iter().filter(|(_, written)| *written).for_each(|(t, _)| t.written());
        Ok(())
    }

    /// Checks the number of arguments, and their types if the driver reports the parameters.
    fn check_arguments(&self, entry: &KernelSignature) -> Result<()> {
        let name = self.kernel.name;
        let given = self.arguments.len();
        invalid!(name if given != entry.count, "the kernel takes {} arguments, {given} are given", entry.count);
        for (i, (argument, parameter)) in self.arguments.iter().zip(entry.parameters.iter().flatten()).enumerate() {
            if let Some(given) = argument.describe_mismatch(parameter) {
                let (t, p) = (&parameter.type_name, &parameter.name);
                let space = match parameter.space {
                    cl::CL_KERNEL_ARG_ADDRESS_GLOBAL => "__global ",
                    cl::CL_KERNEL_ARG_ADDRESS_LOCAL => "__local ",
                    cl::CL_KERNEL_ARG_ADDRESS_CONSTANT => "__constant ",
                    _ => "",
                };
                let constant = if parameter.constant { "const " } else { "" };
                let reason = format!("argument {i} of the kernel is `{space}{constant}{t} {p}`, {given} is given");
                return Err(Error::invalid(name, reason));
            }
        }
        Ok(())
    }

    /// Returns the work-group size, after checking the sizes.
    fn group(&self, entry: &KernelSignature) -> Result<Vec<usize>> {
        let (name, global) = (self.kernel.name, &self.global);
        invalid!(name if !(1..=3).contains(&global.len()), "global sizes are one to three numbers, not {global:?}");
        let required = &entry.group[..global.len()];
        let fixed = entry.group[0] > 0;
        let local = match &self.local {
            Some(local) => local.clone(),
            None if fixed => required.to_vec(),
            None => {
                let most = if global[0] == 0 { 1 } else { 1 << global[0].trailing_zeros().min(6) };
                [most, 1, 1][..global.len()].to_vec()
            }
        };
        let divides = |(g, l): (&usize, &usize)| *l > 0 && g.is_multiple_of(*l);
        invalid!(name if local.len() != global.len() || !global.iter().zip(&local).all(divides),
            "{global:?} work-items are not whole groups of {local:?}: round them up and let the kernel check its bounds");
        invalid!(name if fixed && local != required, "the kernel requires groups of {required:?}, not {local:?}");
        Ok(local)
    }
}

impl Argument<'_> {
    fn kind(&self) -> ArgumentKind {
        match self {
            Argument::Tensor { .. } => ArgumentKind::Tensor,
            Argument::Local(_) => ArgumentKind::Local,
            Argument::Scalar { kind, .. } => ArgumentKind::Scalar(kind),
        }
    }

    /// Returns a description of the argument if the parameter has another type.
    fn describe_mismatch(&self, parameter: &Parameter) -> Option<String> {
        let pointer = parameter.type_name.strip_suffix('*').map(str::trim_end);
        let fits = match self {
            Argument::Tensor { tensor, written } => {
                parameter.space == cl::CL_KERNEL_ARG_ADDRESS_GLOBAL
                    && !(*written && parameter.constant)
                    && pointer.is_some_and(|t| pointer_matches(t, tensor.dtype()))
            }
            Argument::Local(_) => parameter.space == cl::CL_KERNEL_ARG_ADDRESS_LOCAL && pointer.is_some(),
            // Only the compiler knows a typedef of the source.
            Argument::Scalar { kind, .. } => {
                !(cl::CL_KERNEL_ARG_ADDRESS_GLOBAL..=cl::CL_KERNEL_ARG_ADDRESS_CONSTANT).contains(&parameter.space)
                    && pointer.is_none()
                    && (parameter.type_name == *kind || c_type_size(&parameter.type_name).is_none())
            }
        };
        let given = || match self {
            Argument::Tensor { tensor, written } => {
                format!("{} tensor of {}", if *written { "an `out`" } else { "a" }, tensor.dtype())
            }
            Argument::Local(_) => "local memory".to_owned(),
            Argument::Scalar { kind, .. } => format!("a number of type {kind}"),
        };
        (!fits).then(given)
    }
}

/// True if a pointer to `t` may refer to elements of this dtype. Pointers to vectors or to typedefs of the source always may.
fn pointer_matches(t: &str, dtype: DType) -> bool {
    let Some((size, float)) = c_type_size(t.trim_end_matches(|c: char| c.is_ascii_digit())) else { return true };
    let bits = matches!(dtype, DType::F16 | DType::BF16); // the device may lack half, and OpenCL C has no bfloat16
    size == dtype.size() && (float == dtype.is_float() || (bits && !float))
}

/// Returns the size of a type of OpenCL C in bytes, and whether it is a float.
fn c_type_size(t: &str) -> Option<(usize, bool)> {
    Some(match t {
        "char" | "uchar" | "unsigned char" | "bool" => (1, false),
        "short" | "ushort" | "unsigned short" => (2, false),
        "int" | "uint" | "unsigned int" => (4, false),
        "long" | "ulong" | "unsigned long" => (8, false),
        "half" => (2, true),
        "float" => (4, true),
        "double" => (8, true),
        _ => return None,
    })
}

/// Returns the kernel's parameters, if the driver reports them: the program must be built with `-cl-kernel-arg-info`, and a
/// driver may lose the parameters of programs built from binaries.
fn parameters(kernel: &ClKernel) -> Option<Vec<Parameter>> {
    let raw = kernel.raw;
    let parameter = |i| {
        let space = value!(clGetKernelArgInfo(raw, i, cl::CL_KERNEL_ARG_ADDRESS_QUALIFIER) as u32)?;
        let qualifiers = value!(clGetKernelArgInfo(raw, i, cl::CL_KERNEL_ARG_TYPE_QUALIFIER) as u64)?;
        let constant = qualifiers & u64::from(cl::CL_KERNEL_ARG_TYPE_CONST) != 0;
        let name = text(&info!(clGetKernelArgInfo(raw, i, cl::CL_KERNEL_ARG_NAME))?);
        let type_name = text(&info!(clGetKernelArgInfo(raw, i, cl::CL_KERNEL_ARG_TYPE_NAME))?);
        Ok::<_, ClError>(Parameter { name, type_name, space, constant })
    };
    (0..kernel.arg_count() as u32).map(|i| parameter(i).ok()).collect()
}

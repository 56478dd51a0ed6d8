//! A cache of compiled kernels. A kernel is built at its first use, and shared by all later launches.

use std::any::TypeId;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, LazyLock, RwLock};

use smallvec::SmallVec;

use crate::backend::opencl::geometry::{define_if, index_type, vector_defines};
use crate::device::lru::Lru;
use crate::device::opencl::{self, Arg, ClDevice, ClKernel, Fault};
use crate::expr::Expr;
use crate::storage::ClBlockLocation;
use crate::sync;
use crate::{Compute, DType, Device, Result, Scalar, Tensor};

/// The configuration for which a kernel is compiled. It is part of the kernel's cache key, and its definitions precede the template.
pub(crate) trait KernelConfig: Hash + Copy + 'static {
    /// Appends the macro definitions for the template.
    fn write_defines(&self, out: &mut String);

    /// Returns the macro definitions, followed by `parts`.
    fn source(&self, parts: &[&str]) -> String {
        let mut source = String::new();
        self.write_defines(&mut source);
        source + &parts.concat()
    }

    /// Returns the kernel function `entry` of the template whose source is `parts`. `name` identifies the template in the cache.
    fn kernel(&self, cl: &'static ClDevice, name: &'static str, entry: &str, parts: &[&str]) -> Result<Arc<ClKernel>> {
        get_or_build_kernel(cl, KernelKey::new(name, self, &[]), entry, || self.source(parts))
    }
}

/// Makes a [`KernelConfig`] from the macro names of a template and their values. The type of a value decides how its macro is defined (see [`Define`]).
macro_rules! kernel_config {
    () => { () };
    ($name:literal => $value:expr $(, $names:literal => $values:expr)* $(,)?) => {
        ($crate::backend::opencl::kernels::Macro($name, $value), kernel_config!($($names => $values),*))
    };
}
pub(crate) use kernel_config;

/// A macro of a template: its name and its value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Macro<T>(pub(crate) &'static str, pub(crate) T);

impl<T: Hash> Hash for Macro<T> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.1.hash(state); // the name is not hashed: all configurations of a template have the same macro names
    }
}

impl KernelConfig for () {
    fn write_defines(&self, _: &mut String) {}
}

impl<T: Define + Hash + Copy + 'static, R: KernelConfig> KernelConfig for (Macro<T>, R) {
    fn write_defines(&self, out: &mut String) {
        self.0.1.define(self.0.0, out);
        self.1.write_defines(out);
    }
}

/// A value that is passed to a template as one or more macros.
pub(crate) trait Define {
    /// Appends the definition of the macro (or macros) for this value, named `name`.
    fn define(&self, name: &str, out: &mut String);
}

/// A configuration that is part of another configuration. Its macros keep their own names.
impl<C: KernelConfig> Define for C {
    fn define(&self, _: &str, out: &mut String) {
        self.write_defines(out);
    }
}

/// `None` defines no macro.
impl<T: Define> Define for Option<T> {
    fn define(&self, name: &str, out: &mut String) {
        self.iter().for_each(|value| value.define(name, out));
    }
}

/// Implements [`Define`] for a type by an expression that formats the value and the macro's name.
macro_rules! define_as {
    ($($t:ty: |$value:ident, $name:ident| $text:expr;)*) => { $(
        impl Define for $t {
            fn define(&self, $name: &str, out: &mut String) {
                let $value = self;
                out.push_str(&$text);
            }
        }
    )* };
}

define_as! {
    usize: |n, name| format!("#define {name} {n}\n");
    DType: |dtype, name| format!("#define {name} {dtype}\n");
    // Also defines `{name}_NAME`, which prelude functions use to name the accumulator.
    Compute: |acc, name| format!("#define {name} {}\n#define {name}_NAME {acc:?}\n", acc.cl_name());
    bool: |on, name| define_if(*on, name);
    // With an empty name, defines the text itself as a macro. Defines nothing if both are empty.
    &'static str: |text, name| match name {
        "" => define_if(!text.is_empty(), text),
        _ => format!("#define {name} {text}\n"),
    };
    Bit: |on, name| format!("#define {name} {}\n", u8::from(on.0));
    Vectors: |vectors, _name| vector_defines(vectors.0, vectors.1);
}

/// A macro with the value 0 or 1. A plain bool instead defines its macro only if true.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Bit(pub(crate) bool);

/// The element type, and the number of elements of a vector load. Defines VEC and WIDE_T.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Vectors(pub(crate) DType, pub(crate) usize);

/// Returns the types of a kernel: of its elements (A), its accumulators (ACC) and its indices (IDX).
pub(crate) fn element_types(dtype: DType, wide: bool) -> impl KernelConfig {
    kernel_config! { "A" => dtype, "ACC" => dtype.compute(), "IDX" => index_type(wide) }
}

/// A value that is passed as an argument at launch. Its hash is empty, so that one kernel serves all values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AtLaunch<T>(pub(crate) T);

impl<T> Hash for AtLaunch<T> {
    fn hash<H: Hasher>(&self, _: &mut H) {}
}

/// The cache key of a kernel: its template, the type and the values of its configuration, and the expressions in its source.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct KernelKey {
    template: &'static str,
    config: TypeId,
    values: SmallVec<[u64; 24]>,
    exprs: SmallVec<[Expr; 2]>,
}

impl KernelKey {
    pub(crate) fn new<C: Hash + 'static>(template: &'static str, config: &C, exprs: &[Expr]) -> KernelKey {
        let (values, exprs) = (hashed_values(config), SmallVec::from(exprs));
        KernelKey { template, config: TypeId::of::<C>(), values, exprs }
    }
}

/// Returns the values that the derived `Hash` of `value` writes. Within one type, these values identify `value`.
pub(crate) fn hashed_values(value: &impl Hash) -> SmallVec<[u64; 24]> {
    struct Values(SmallVec<[u64; 24]>);
    impl Hasher for Values {
        fn write(&mut self, bytes: &[u8]) {
            self.0.extend(bytes.chunks(8).map(|part| part.iter().fold(0, |word, &byte| word << 8 | u64::from(byte))));
        }

        fn write_u8(&mut self, value: u8) {
            self.0.push(value.into());
        }

        fn write_usize(&mut self, value: usize) {
            self.0.push(value as u64);
        }

        fn finish(&self) -> u64 {
            unreachable!("only the values are wanted")
        }
    }
    let mut values = Values(SmallVec::new());
    value.hash(&mut values);
    values.0
}

/// Prepends the prelude that all kernels share to `source`: fault codes, storage types, loads and stores, random bits.
pub(crate) fn with_prelude(source: &str) -> String {
    let codes = [("INDEX", Fault::Index), ("DIVISION", Fault::DivisionByZero), ("LABEL", Fault::Label)]
        .map(|(name, fault)| format!("#define FAULT_{name} {}\n", fault as i32));
    [&codes.concat(), include_str!("../../../kernels/prelude.cl"), "\n", source].concat()
}

/// The maximum number of cached kernels, over all devices.
const MAX_KERNELS: usize = 4096;

/// Maps a device, whether the kernel is built with [wide offsets](ClDevice::has_wide_offsets), and a key to the kernel.
type KernelCache = Lru<(Device, bool, KernelKey), Arc<ClKernel>>;
static KERNEL_CACHE: LazyLock<RwLock<KernelCache>> = LazyLock::new(|| RwLock::new(Lru::new(MAX_KERNELS)));

/// Returns a number that identifies the static at `of`: its distance from another static. Unlike an address, it is the same in every run.
pub(crate) fn static_id<T>(of: *const T) -> u64 {
    of.addr().wrapping_sub((&raw const KERNEL_CACHE).addr()) as u64
}

/// Returns the kernel of `key`, from the cache or built from `source`, which excludes the prelude. `entry` is the name of the kernel function.
pub(crate) fn get_or_build_kernel(
    device: &'static ClDevice,
    key: KernelKey,
    entry: &str,
    source: impl FnOnce() -> String,
) -> Result<Arc<ClKernel>> {
    let key = (device.device(), device.has_wide_offsets(), key);
    if let Some(kernel) = sync::read(&KERNEL_CACHE).get(&key) {
        return Ok(kernel.clone());
    }
    // The cache is not locked during the build, which takes up to a second. If two threads build the same kernel, the first result is kept.
    let built = device.build(key.2.template, &with_prelude(&source()), entry)?;
    let mut kernels = sync::write(&KERNEL_CACHE);
    let (kernel, evicted) = kernels.get_or_insert(key, || Arc::new(built));
    let kernel = Arc::clone(kernel);
    drop(kernels);
    drop(evicted); // dropped after the cache is unlocked, because releasing a kernel calls the driver
    Ok(kernel)
}

/// A tensor's buffer and offset, to be passed to a kernel. The memory does not move while the view exists, and the arguments of a
/// launch borrow from the view until they are enqueued.
pub(crate) struct BufferView<'a> {
    pub(crate) location: ClBlockLocation<'a>,
    /// The tensor's offset in its buffer, in elements.
    pub(crate) element_offset: usize,
}

/// Makes the arguments of a launch: for each view before the semicolon its buffer and offset, then the values after the semicolon.
macro_rules! args {
    ($($view:expr),*; $($value:expr),* $(,)?) => {
        [$($view.buffer(), $view.offset(),)* $($crate::device::opencl::Arg::from($value),)*]
    };
}
pub(crate) use args;

macro_rules! arg_from {
    ($($t:ty: $variant:ident as $to:ty;)*) => { $(
        impl From<$t> for Arg<'_> {
            fn from(value: $t) -> Self {
                Arg::$variant(value as $to)
            }
        }
    )* };
}

arg_from! {
    bool: U32 as u32;
    u32: U32 as u32;
    usize: U64 as u64;
    u64: U64 as u64;
    isize: I64 as i64;
    i64: I64 as i64;
}

/// Converts a scalar to a kernel argument of the compute type.
pub(crate) fn scalar_arg<'a>(compute: Compute, s: Scalar) -> Arg<'a> {
    match compute {
        Compute::F32 => Arg::F32(s.to_f64() as f32),
        Compute::F64 => Arg::F64(s.to_f64()),
        Compute::I64 => Arg::I64(s.to_i64()),
    }
}

/// Passes the words as one struct.
impl<'a, T: bytemuck::NoUninit> From<&'a [T]> for Arg<'a> {
    fn from(words: &'a [T]) -> Self {
        Arg::Bytes(bytemuck::cast_slice(words))
    }
}

impl BufferView<'_> {
    pub(crate) fn buffer(&self) -> Arg<'_> {
        Arg::Buffer(self.location.buffer())
    }

    pub(crate) fn first_element(&self) -> usize {
        self.element_offset
    }

    /// Returns [`first_element`](Self::first_element) as an argument.
    pub(crate) fn offset(&self) -> Arg<'_> {
        Arg::U64(self.first_element() as u64)
    }
}

impl Tensor {
    /// Returns the OpenCL device on which this tensor is stored, and on which launches over the tensor run.
    pub(crate) fn cl_device(&self) -> Result<&'static ClDevice> {
        opencl::open_device(self.device())
    }

    /// Returns a view of this tensor's buffer, which does not move while the view exists. Call this after all allocations of an
    /// operation, because an allocation may move memory.
    #[inline(always)] // every launch calls it several times, and returning the view through memory stalls on store forwarding
    pub(crate) fn device_view(&self) -> Result<BufferView<'_>> {
        let location = self.storage.cl()?;
        let start = location.offset() / self.dtype.size();
        Ok(BufferView { location, element_offset: start + self.layout.offset })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set_capacity(capacity: usize) -> usize {
        sync::write(&KERNEL_CACHE).set_capacity(capacity)
    }

    #[test]
    fn the_kernel_cache_is_bounded() -> Result<()> {
        for device in (0..opencl::count()).map(Device::OpenCL) {
            let (few, x) = (8, Tensor::from_slice(&[1f32, 2.0], 2, device)?);
            let nth = |e: &Expr, n: usize| {
                (0..6).fold(e.clone(), |r, bit| if n >> bit & 1 == 1 { r + e } else { r.abs() - e })
            };
            let before = set_capacity(few);
            let mut most = 0;
            for n in (0..24).chain(0..24) {
                let got = Tensor::map(&[&x], |e| nth(&e[0], n))?.to_vec::<f32>()?;
                let right = |x: f32| (0..6).fold(x, |r, bit| if n >> bit & 1 == 1 { r + x } else { r.abs() - x });
                assert_eq!(got, [right(1.0), right(2.0)], "{n} on {device}");
                let kernels = sync::read(&KERNEL_CACHE);
                most = most.max(kernels.iter().filter(|((of, ..), _)| *of == device).count());
            }
            set_capacity(before);
            assert!(most <= few, "{most} kernels on {device}");
        }
        Ok(())
    }
}

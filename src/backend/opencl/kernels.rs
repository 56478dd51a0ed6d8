//! A cache of compiled kernels. A kernel is built at its first use.

use std::sync::{Arc, LazyLock, RwLock};

use smallvec::SmallVec;

use crate::device::lru::Lru;
use crate::device::opencl::{self, Arg, ClDevice, ClKernel, Fault};
use crate::expr::Expr;
use crate::storage::ClBlockLocation;
use crate::sync;
use crate::{Device, Result, Tensor};

/// The cache key of a kernel: its template, and the numbers and expressions that determine its source.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct KernelKey {
    pub(crate) template: &'static str,
    pub(crate) params: SmallVec<[u64; 8]>,
    pub(crate) exprs: SmallVec<[Expr; 2]>,
}

impl KernelKey {
    /// Returns the key of a kernel without expressions.
    pub(crate) fn new(template: &'static str, params: &[u64]) -> KernelKey {
        KernelKey { template, params: SmallVec::from_slice(params), exprs: SmallVec::new() }
    }
}

/// Prepends the prelude of all kernels to `source`: fault codes, storage types, loads and stores, random bits.
pub(crate) fn with_prelude(source: &str) -> String {
    let codes = [("INDEX", Fault::Index), ("DIVISION", Fault::DivisionByZero), ("LABEL", Fault::Label)]
        .map(|(name, fault)| format!("#define FAULT_{name} {}\n", fault as i32));
    [&codes.concat(), include_str!("../../../kernels/prelude.cl"), "\n", source].concat()
}

/// The maximum number of cached kernels, for all devices together.
const MAX_KERNELS: usize = 4096;

/// Kernels by device, by whether they are built with [wide offsets](ClDevice::has_wide_offsets), and by key.
type KernelCache = Lru<(Device, bool, KernelKey), Arc<ClKernel>>;
static KERNEL_CACHE: LazyLock<RwLock<KernelCache>> = LazyLock::new(|| RwLock::new(Lru::new(MAX_KERNELS)));

/// Returns the kernel of `key`, from the cache or built from `source` (without the prelude). `entry` is the kernel function's name.
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
    // Built without the lock, because a build takes up to a second. If two threads build the same kernel, the first result is kept.
    let built = device.build(key.2.template, &with_prelude(&source()), entry)?;
    let mut kernels = sync::write(&KERNEL_CACHE);
    let (kernel, evicted) = kernels.get_or_insert(key, || Arc::new(built));
    let kernel = Arc::clone(kernel);
    drop(kernels);
    drop(evicted); // dropped without the lock, because this calls the driver
    Ok(kernel)
}

/// A tensor's buffer and offset as kernel arguments. The memory does not move while the view lives, and the arguments of a launch
/// borrow from the view until they are enqueued.
pub(crate) struct BufferView<'a> {
    pub(crate) location: ClBlockLocation<'a>,
    /// The tensor's offset in its buffer, in elements.
    pub(crate) element_offset: usize,
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
    /// Returns the OpenCL device of this tensor, on which launches over the tensor run.
    pub(crate) fn cl_device(&self) -> Result<&'static ClDevice> {
        opencl::open_device(self.device())
    }

    /// Returns this tensor's buffer, which does not move while the view lives. Call this after all allocations, because an allocation
    /// may have to move memory.
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

//! The cache of compiled kernels, which are built at first use.

use std::sync::{Arc, LazyLock, PoisonError, RwLock};

use smallvec::SmallVec;

use crate::device::lru::Lru;
use crate::device::opencl::{self, Arg, ClDevice, ClKernel, Fault};
use crate::expr::Expr;
use crate::storage::ClPlace;
use crate::{Device, Result, Tensor};

/// The key of a kernel in the cache: its template, and the numbers and expressions from which its source is made.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct KernelKey {
    pub(crate) template: &'static str,
    pub(crate) params: SmallVec<[u64; 8]>,
    pub(crate) exprs: SmallVec<[Expr; 2]>,
}

impl KernelKey {
    /// The key of a kernel without expressions.
    pub(crate) fn new(template: &'static str, params: &[u64]) -> KernelKey {
        KernelKey { template, params: SmallVec::from_slice(params), exprs: SmallVec::new() }
    }
}

/// `source` after the prelude of every kernel: fault codes, storage types, loads and stores, random bits.
pub(crate) fn with_prelude(source: &str) -> String {
    let codes = [("INDEX", Fault::Index), ("DIVISION", Fault::DivisionByZero), ("LABEL", Fault::Label)]
        .map(|(name, fault)| format!("#define FAULT_{name} {}\n", fault as i32));
    [&codes.concat(), include_str!("../../../kernels/prelude.cl"), "\n", source].concat()
}

/// The most kernels kept, of all devices.
const MAX_KERNELS: usize = 4096;

/// By device, whether with [wide offsets](ClDevice::has_wide_offsets), and launch.
type Kernels = Lru<(Device, bool, KernelKey), Arc<ClKernel>>;
static KERNELS: LazyLock<RwLock<Kernels>> = LazyLock::new(|| RwLock::new(Lru::new(MAX_KERNELS)));

/// The kernel of this key, from the cache or built from `source` (without the prelude); `entry` is its name there.
pub(crate) fn kernel(
    device: &'static ClDevice,
    key: KernelKey,
    entry: &str,
    source: impl FnOnce() -> String,
) -> Result<Arc<ClKernel>> {
    let key = (device.device(), device.has_wide_offsets(), key);
    if let Some(kernel) = KERNELS.read().unwrap_or_else(PoisonError::into_inner).get(&key) {
        return Ok(kernel.clone());
    }
    // Built without the lock, because a build takes up to a second. If two threads build the same kernel, one of the results is kept.
    let built = device.build(key.2.template, &with_prelude(&source()), entry)?;
    let mut kernels = KERNELS.write().unwrap_or_else(PoisonError::into_inner);
    let (kernel, evicted) = kernels.get_or_insert(key, || Arc::new(built));
    let kernel = Arc::clone(kernel);
    drop(kernels);
    drop(evicted); // asks the driver to release them
    Ok(kernel)
}

/// A tensor's buffer and offset, as arguments of a kernel. The memory is not moved while the view lives, and the arguments of a launch
/// borrow from it until they are enqueued.
pub(crate) struct BufferView<'a> {
    pub(crate) place: ClPlace<'a>,
    /// The offset of the tensor in its buffer, in elements.
    pub(crate) first: usize,
}

impl BufferView<'_> {
    pub(crate) fn buffer(&self) -> Arg<'_> {
        Arg::Buffer(self.place.buffer())
    }

    /// The offset of the tensor in its buffer, in elements.
    pub(crate) fn first_element(&self) -> usize {
        self.first
    }

    /// [`first_element`](Self::first_element) as an argument.
    pub(crate) fn offset(&self) -> Arg<'_> {
        Arg::U64(self.first_element() as u64)
    }
}

impl Tensor {
    /// The device that launches over this tensor run on, which is an OpenCL device.
    pub(crate) fn cl_device(&self) -> Result<&'static ClDevice> {
        opencl::open_device(self.device())
    }

    /// The buffer of this tensor, which is not moved while the view lives. Call this after all allocations, for which memory may have
    /// to be moved.
    #[inline(always)] // every launch calls it several times, and returning the view through memory stalls on store forwarding
    pub(crate) fn device_view(&self) -> Result<BufferView<'_>> {
        let place = self.storage.cl()?;
        let start = place.offset() / self.dtype.size();
        Ok(BufferView { place, first: start + self.layout.offset })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set_capacity(capacity: usize) -> usize {
        KERNELS.write().unwrap_or_else(PoisonError::into_inner).set_capacity(capacity)
    }

    #[test]
    fn formulas_without_end_are_evicted() -> Result<()> {
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
                let kernels = KERNELS.read().unwrap_or_else(PoisonError::into_inner);
                most = most.max(kernels.iter().filter(|((of, ..), _)| *of == device).count());
            }
            set_capacity(before);
            assert!(most <= few, "{most} kernels on {device}");
        }
        Ok(())
    }
}

//! The cache of compiled kernels, which are built at first use.

use std::sync::{Arc, LazyLock, PoisonError, RwLock};

use smallvec::SmallVec;

use crate::device::opencl::{self, Arg, ClDevice, ClKernel, Fault};
use crate::expr::Expr;
use crate::expr::key_map::KeyMap;
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

/// The kernel of this key, from the cache or built from `source` (without the prelude); `entry` is its name there.
pub(crate) fn kernel(
    device: &'static ClDevice,
    key: KernelKey,
    entry: &str,
    source: impl FnOnce() -> String,
) -> Result<Arc<ClKernel>> {
    type Cache = RwLock<KeyMap<(Device, bool, KernelKey), Arc<ClKernel>>>;
    static CACHE: LazyLock<Cache> = LazyLock::new(Cache::default);
    let key = (device.device(), device.has_wide_offsets(), key);
    if let Some(kernel) = CACHE.read().unwrap_or_else(PoisonError::into_inner).get(&key) {
        return Ok(kernel.clone());
    }
    // Built without the lock, because a build takes up to a second. If two threads build the same kernel, one of the results is kept.
    let built = device.build(key.2.template, &with_prelude(&source()), entry)?;
    let mut cache = CACHE.write().unwrap_or_else(PoisonError::into_inner);
    Ok(cache.entry(key).or_insert_with(|| Arc::new(built)).clone())
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

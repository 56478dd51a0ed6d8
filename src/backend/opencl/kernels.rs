//! Compiled kernels by what they compute: built at first use, found by a hash lookup ever after.

use std::sync::{Arc, LazyLock, PoisonError, RwLock};

use smallvec::SmallVec;

use crate::device::opencl::{self, Arg, ClDevice, ClKernel, Fault};
use crate::expr::Expr;
use crate::expr::key_map::KeyMap;
use crate::storage::ClPlace;
use crate::{Device, Result, Tensor};

/// What tells one kernel of a device from another: the template, the numbers that fill it in, the expressions inside.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct KernelKey {
    pub(crate) template: &'static str,
    pub(crate) params: SmallVec<[u64; 8]>,
    pub(crate) exprs: SmallVec<[Expr; 2]>,
}

impl KernelKey {
    /// Of a template without formulas.
    pub(crate) fn new(template: &'static str, params: &[u64]) -> KernelKey {
        KernelKey { template, params: SmallVec::from_slice(params), exprs: SmallVec::new() }
    }
}

/// `source` after what is common to every kernel: fault codes, storage types, loads and stores, random bits.
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
    type Cache = RwLock<KeyMap<(Device, KernelKey), Arc<ClKernel>>>;
    static CACHE: LazyLock<Cache> = LazyLock::new(Cache::default);
    let key = (device.device(), key);
    if let Some(kernel) = CACHE.read().unwrap_or_else(PoisonError::into_inner).get(&key) {
        return Ok(kernel.clone());
    }
    // Built outside the lock: a build takes up to a second. Two threads may build the same kernel; one of them is kept.
    let built = device.build(key.1.template, &with_prelude(&source()), entry)?;
    let mut cache = CACHE.write().unwrap_or_else(PoisonError::into_inner);
    Ok(cache.entry(key).or_insert_with(|| Arc::new(built)).clone())
}

/// A tensor's buffer and offset, as arguments of a kernel. The memory is not moved while the view lives; the arguments of a
/// launch borrow from it, so it lives until they are enqueued.
pub(crate) struct BufferView<'a> {
    pub(crate) place: ClPlace<'a>,
    /// Elements from the buffer's start to the tensor's first.
    pub(crate) first: usize,
}

impl BufferView<'_> {
    /// The buffer.
    pub(crate) fn buffer(&self) -> Arg<'_> {
        Arg::Buffer(self.place.buffer())
    }

    /// Elements from the buffer's start to the tensor's first.
    pub(crate) fn first_element(&self) -> usize {
        self.first
    }

    /// The same as an argument.
    pub(crate) fn offset(&self) -> Arg<'_> {
        Arg::U64(self.first_element() as u64)
    }
}

impl Tensor {
    /// The open device that launches of this tensor go to. For OpenCL only: the CPU's have been sent elsewhere.
    pub(crate) fn cl_device(&self) -> Result<&'static ClDevice> {
        opencl::open_device(self.device())
    }

    /// The buffer of this tensor, which does not move while the view lives. Call this last: memory that is viewed cannot be
    /// moved to make room for an allocation.
    #[inline(always)] // every launch calls it several times; a copy in vectors of what was stored in words would wait for the stores
    pub(crate) fn device_view(&self) -> Result<BufferView<'_>> {
        let place = self.storage.cl()?;
        let start = place.offset() / self.dtype.size();
        Ok(BufferView { place, first: start + self.layout.offset })
    }
}

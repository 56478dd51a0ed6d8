//! Storages, which are handles on allocations, and the memory behind an allocation.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::c_void;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock, RwLock};

use super::allocator::{Allocator, find_allocator};
use super::block::{ALIGNMENT, Block, ReaderCount};
use super::caching::CachingAllocator;
use super::driver::MemoryKind;
use super::driver::host::HostMemory;
use super::driver::opencl::OpenCl;
use super::driver::staging::{self, PinnedBytes};
use super::history::Caller;
use super::import::ImportedBuffers;
use super::pool::{PoolAllocator, StorageType, with_images};
use super::registry::{self, DeviceEntry};
use super::sidecar::{self, SideCar};
use super::{captured, scope};
use crate::device::{Stream, StreamId, capture, dry, profiler};
use crate::{Device, Element, Error, Result};

/// A reference-counted handle on bytes of one device. Cloning makes another handle on the same bytes.
///
/// ```
/// use claystone::{Device, Tensor};
/// let a = Tensor::zeros(&[3, 4], Device::Cpu)?;
/// assert_eq!(a.storage().nbytes(), 48);
/// assert!(a.t()?.storage().ptr_eq(a.storage()));
/// # Ok::<(), claystone::Error>(())
/// ```
pub struct Storage(pub(super) ManuallyDrop<Arc<Allocation>>);

impl Clone for Storage {
    fn clone(&self) -> Storage {
        Storage(ManuallyDrop::new(Arc::clone(&self.0)))
    }
}

impl Drop for Storage {
    /// Dropping the last handle returns the block to its allocator. The `Arc` itself is kept for this thread's next
    /// storage, so that creating a result needs no heap allocation.
    fn drop(&mut self) {
        // SAFETY: `self.0` is taken once, here, and not used again.
        let shared = unsafe { ManuallyDrop::take(&mut self.0) };
        let Some(mut shared) = sidecar::release_handle(shared) else { return };
        if let Some(allocation) = get_mut_if_unique(&mut shared) {
            allocation.backing = Backing::Empty;
            allocation.sidecar.clear();
            let _ = SPARE_ALLOCATIONS.try_with(|spare| {
                let mut spare = spare.borrow_mut();
                if spare.len() < MAX_SPARE_ALLOCATIONS {
                    spare.push(shared);
                }
            });
        }
    }
}

/// Like [`Arc::get_mut`], without the lock that `get_mut` takes because of [`Weak`](std::sync::Weak) handles.
#[inline]
pub(super) fn get_mut_if_unique(shared: &mut Arc<Allocation>) -> Option<&mut Allocation> {
    if Arc::strong_count(shared) != 1 {
        return None;
    }
    fence(Ordering::Acquire); // makes visible what other threads did before they dropped their handles
    // SAFETY: the crate makes no weak handles, so `shared` is the only handle, and `shared` is borrowed exclusively.
    Some(unsafe { &mut *Arc::as_ptr(shared).cast_mut() })
}

/// Returns an allocation without bytes, for [`Storage::new`] to fill in.
#[cold]
#[inline(never)]
fn empty_allocation() -> Arc<Allocation> {
    let (version, sidecar) = (AtomicU64::new(0), SideCar::default());
    Arc::new(Allocation { device: Device::Cpu, size: 0, version, sidecar, backing: Backing::Empty })
}

/// Maximum number of unused `Arc`s that a thread keeps for its next storages.
const MAX_SPARE_ALLOCATIONS: usize = 64;

thread_local! {
    /// `Arc`s of dropped storages, reused by this thread's next storages.
    static SPARE_ALLOCATIONS: RefCell<Vec<Arc<Allocation>>> = const { RefCell::new(Vec::new()) };
}

impl Storage {
    /// Returns the device that holds the bytes.
    pub fn device(&self) -> Device {
        self.0.device()
    }

    /// Returns the requested size in bytes.
    pub fn nbytes(&self) -> usize {
        self.0.nbytes()
    }

    /// True if `self` and `other` are handles on the same allocation.
    pub fn ptr_eq(&self, other: &Storage) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Returns the allocation that owns the bytes.
    pub fn allocation(&self) -> &Allocation {
        &self.0
    }

    /// Records that work on `stream` uses the bytes (`torch.Tensor.record_stream`). After the storage is dropped, its
    /// bytes are not reused before all work that was submitted to `stream` until the drop has finished.
    ///
    /// Call this method for every stream that uses the storage, except the stream it was made on. The call is not
    /// needed if the storage is kept until its own stream has waited for `stream`.
    ///
    /// The call does not order streams: `stream` itself has to [wait](Stream::wait_stream) for the work that fills the
    /// storage. On the CPU the call does nothing, because work there is done when an operation returns.
    ///
    /// # Errors
    /// [`Error::DeviceMismatch`] for a stream of another device.
    pub fn record_stream(&self, stream: &Stream) -> Result<()> {
        if stream.device() != self.device() {
            return Err(Error::DeviceMismatch { op: "record_stream", lhs: self.device(), rhs: stream.device() });
        }
        if let Backing::OpenCl(_, lease) = &self.0.backing {
            lease.allocator().record_stream(&lease.block, stream.id());
        }
        Ok(())
    }

    /// Returns the `cl_mem` that holds the bytes, and the offset of the first byte, for use by other code. From now on the storage never moves.
    ///
    /// The `cl_mem` is not retained for the caller: keep the storage alive as long as commands of other code use the
    /// bytes. The `cl_mem` may be larger than the storage; the rest belongs to other storages. `CL_MEM_CONTEXT` gives
    /// its context.
    ///
    /// Queues of other code are not ordered with streams of this crate, unless the queues were
    /// [adopted](Device::adopt). Call [`Stream::synchronize`] before other code uses the bytes, and `clFinish` on the
    /// other code's queue before this crate uses the bytes again.
    ///
    /// # Errors
    /// [`Error::Invalid`] on the CPU and for zero bytes: such a storage has no `cl_mem`.
    pub fn export_cl(&self) -> Result<(*mut c_void, usize)> {
        self.check_not_simulated("export_cl")?;
        let location = self.cl()?;
        if let Some(block) = self.0.block() {
            block.export();
        }
        Ok((location.buffer().mem(), location.offset()))
    }

    /// Allocates `bytes` bytes. They are filled with the configured byte; without one, their contents are unspecified.
    pub(crate) fn alloc(device: Device, bytes: usize) -> Result<Storage> {
        Storage::alloc_filled(device, bytes, StorageType::Dynamic, |current| current.fill)
    }

    /// Allocates `bytes` bytes for long-lived data such as weights. A [`PoolAllocator`] takes them from its pool of
    /// [static](StorageType::Static) buffers, which serves no other requests; other allocators allocate as for any storage. The
    /// contents are unspecified.
    ///
    /// ```
    /// use claystone::storage::Storage;
    /// use claystone::{DType, Device, Tensor};
    /// let packed = Storage::alloc_static(Device::best(), 4096 * 4096 / 2)?; // weights of four bits
    /// assert_eq!(packed.nbytes(), 8 << 20);
    /// Tensor::from_storage(packed, [4096, 2048], DType::U8)?.fill_(0)?;
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::NoDevice`] if the device does not exist, and [`Error::OutOfMemory`].
    #[track_caller]
    pub fn alloc_static(device: Device, bytes: usize) -> Result<Storage> {
        let _caller = Caller::enter();
        Storage::alloc_filled(device, bytes, StorageType::Static, |current| current.fill)
    }

    pub(crate) fn alloc_zeroed(device: Device, bytes: usize) -> Result<Storage> {
        Storage::alloc_filled(device, bytes, StorageType::Dynamic, |_| Some(0))
    }

    #[inline]
    fn alloc_filled(
        device: Device,
        bytes: usize,
        kind: StorageType,
        fill: impl FnOnce(&DeviceEntry) -> Option<u8>,
    ) -> Result<Storage> {
        if bytes == 0 {
            return Ok(Storage::new(device, 0, Backing::Empty));
        }
        let current = registry::device_entry(device)?;
        let lease = Lease::new(device, bytes, current, kind)?;
        let backing = match current.opened {
            None => Backing::Host(lease),
            Some(opened) => Backing::OpenCl(opened, lease),
        };
        let storage = Storage::new(device, bytes, backing);
        if let Some(byte) = fill(current) {
            storage.fill(0, bytes, &[byte])?;
        }
        Ok(storage)
    }

    /// Makes a storage on the CPU device of the first `bytes` bytes of `memory`. No allocator counts them.
    pub(super) fn from_host_bytes(bytes: usize, memory: HostBytes) -> Storage {
        let adopted = || Backing::Adopted(Box::new(Adopted { lock: RwLock::new(ReaderCount::none()), memory }));
        Storage::new(Device::Cpu, bytes, if bytes == 0 { Backing::Empty } else { adopted() })
    }

    /// Makes a storage on the CPU device that takes over the vector without a copy. No allocator counts its bytes.
    pub(crate) fn adopt<T: Element>(v: Vec<T>) -> Storage {
        Storage::from_host_bytes(size_of_val(v.as_slice()), HostBytes::Owned(HostMemory::from_vec(v)))
    }

    /// Makes a storage on the CPU device with unspecified contents, pinned for transfers to and from `device`. Returns
    /// `None` if `device` is the CPU, for zero bytes, and if no pinned memory is left.
    pub(crate) fn pinned(device: Device, bytes: usize) -> Result<Option<Storage>> {
        let storage = |memory| Storage::from_host_bytes(bytes, HostBytes::Pinned(memory));
        Ok(staging::alloc_pinned(device, bytes)?.map(storage))
    }

    pub(crate) fn is_pinned(&self, device: Device) -> bool {
        self.0.pinned().is_some_and(|pinned| pinned.is_for(device))
    }

    #[inline(always)] // without inlining, the struct is stored in words and then loaded as vectors, which stalls the processor
    pub(super) fn new(device: Device, size: usize, backing: Backing) -> Storage {
        let spare = SPARE_ALLOCATIONS.try_with(|spare| spare.borrow_mut().pop()).ok().flatten();
        let mut shared = spare.unwrap_or_else(empty_allocation);
        let allocation = get_mut_if_unique(&mut shared).expect("the handle is unique");
        (allocation.device, allocation.size, allocation.version) = (device, size, AtomicU64::new(0));
        // The old backing is `Empty`, so it need not be dropped.
        std::mem::forget(std::mem::replace(&mut allocation.backing, backing));
        Storage(ManuallyDrop::new(shared))
    }

    /// True if the first byte's address is a multiple of `to`. Always true on devices, where allocators guarantee it.
    pub(crate) fn is_aligned(&self, to: usize) -> bool {
        match &self.0.backing {
            Backing::Adopted(adopted) => adopted.memory.start().addr().get().is_multiple_of(to),
            _ => ALIGNMENT.is_multiple_of(to), // without the lock, a block may be moving
        }
    }

    /// True if no other handle on the allocation exists, so that changing the bytes affects no other tensor.
    pub fn is_unique(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }

    /// Returns how often the contents have been changed in place (PyTorch's `_version`), which autograd checks. All views of the
    /// storage share this count.
    ///
    /// ```
    /// let x = claystone::Tensor::ones(4, claystone::Device::Cpu)?;
    /// let before = x.storage().version();
    /// x.narrow(0, 0, 2)?.mul_scalar_(3)?;
    /// assert!(x.storage().version() > before);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn version(&self) -> u64 {
        self.0.version.load(Ordering::Acquire)
    }

    /// During a graph capture, counts the first filling of a new storage as a change. Otherwise does nothing.
    pub(crate) fn mark_filled(&self) {
        if capture::is_capturing(self.device()) {
            self.bump_version();
        }
    }

    /// Increments the version counter. Every in-place operation calls this; transfers do not.
    pub(crate) fn bump_version(&self) {
        self.0.version.fetch_add(1, Ordering::AcqRel);
        if capture::is_capturing(self.device()) {
            captured::note_change(self);
        }
    }
}

// Locks that a panic poisoned are taken nevertheless: bytes have no invariants that a panic could break.
impl std::panic::UnwindSafe for Storage {}
impl std::panic::RefUnwindSafe for Storage {}

impl fmt::Debug for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self.0, f)
    }
}

/// A range of bytes on a device. Dropping it returns its block to the device's allocator.
pub struct Allocation {
    device: Device,
    size: usize,
    pub(super) version: AtomicU64,
    pub(super) sidecar: SideCar,
    pub(super) backing: Backing,
}

/// The kind of memory that holds an allocation's bytes.
pub(super) enum Backing {
    /// The allocation has zero bytes.
    Empty,
    Uninit(OnceLock<Box<str>>), // no memory yet: a parameter whose values will be loaded, with its name if known
    Host(Lease),
    /// Host memory that came with a vector, is pinned, or belongs to other code.
    Adopted(Box<Adopted>), // boxed: rare, and its size would make every other variant larger to move
    OpenCl(OpenCl, Lease),
}

/// Host bytes that no allocator handed out. The lock is held while slices of the bytes exist.
pub(super) struct Adopted {
    lock: RwLock<ReaderCount>,
    memory: HostBytes,
}

/// The owner of an [`Adopted`] storage's bytes.
pub(super) enum HostBytes {
    Owned(HostMemory),
    Pinned(PinnedBytes),
}

impl HostBytes {
    fn start(&self) -> NonNull<u8> {
        match self {
            HostBytes::Owned(memory) => memory.start(),
            HostBytes::Pinned(memory) => memory.start(),
        }
    }
}

impl Allocation {
    /// Returns the device that holds the bytes.
    pub fn device(&self) -> Device {
        self.device
    }

    /// Returns the requested size in bytes.
    pub fn nbytes(&self) -> usize {
        self.size
    }

    /// Returns the id of the segment that contains the block. Returns `None` for an empty allocation and for memory
    /// taken over from the host. Compaction may change the id.
    pub fn segment(&self) -> Option<u64> {
        self.block().map(|block| block.location().segment().id())
    }

    /// Returns the block's offset in its segment, in bytes; 0 if there is no segment. Compaction may change the offset.
    pub fn offset(&self) -> usize {
        self.block().map_or(0, |block| block.location().offset())
    }

    /// Returns the block. Returns `None` for an empty allocation and for memory taken over from the host.
    pub fn block(&self) -> Option<&Block> {
        match &self.backing {
            Backing::Empty | Backing::Uninit(_) | Backing::Adopted(_) => None,
            Backing::Host(lease) | Backing::OpenCl(_, lease) => Some(&lease.block),
        }
    }

    /// True if other code may change the bytes without the crate noticing, because the buffer was exported to or imported from other code.
    pub(super) fn is_shared_outside(&self) -> bool {
        match &self.backing {
            Backing::Empty | Backing::Uninit(_) | Backing::Host(_) => false,
            Backing::Adopted(_) => true,
            Backing::OpenCl(_, lease) => {
                lease.block.slot().is_exported() || (lease.allocator() as &dyn Any).is::<ImportedBuffers>()
            }
        }
    }

    /// Returns the pinned memory, or `None` if the bytes are not pinned. Before accessing the bytes, hold
    /// [`host_lock`](Self::host_lock) and call [`wait_and_check`](PinnedBytes::wait_and_check), which waits for enqueued transfers.
    pub(super) fn pinned(&self) -> Option<&PinnedBytes> {
        match &self.backing {
            Backing::Adopted(adopted) => match &adopted.memory {
                HostBytes::Pinned(pinned) => Some(pinned),
                HostBytes::Owned(_) => None,
            },
            _ => None,
        }
    }

    /// Returns the lock that is held while slices of the bytes exist. Returns `None` if the storage is empty or in device memory.
    pub(super) fn host_lock(&self) -> Option<&RwLock<ReaderCount>> {
        match &self.backing {
            Backing::Host(lease) => Some(&lease.block.slot().lock),
            Backing::Adopted(adopted) => Some(&adopted.lock),
            Backing::Empty | Backing::Uninit(_) | Backing::OpenCl(..) => None,
        }
    }

    /// Like [`host_lock`](Self::host_lock), but returns `None` for pinned memory, whose bytes may be accessed only after
    /// [`PinnedBytes::wait_and_check`].
    pub(super) fn unpinned_lock(&self) -> Option<&RwLock<ReaderCount>> {
        self.host_lock().filter(|_| self.pinned().is_none())
    }

    /// Returns the address and the number of bytes in host memory; if none are, an aligned address and 0. Valid while
    /// the host lock is held, the block is pinned, or the lock's reader count is above 0.
    pub(super) fn host_range(&self) -> (NonNull<u8>, usize) {
        let no_bytes = (NonNull::<Aligned>::dangling().cast(), 0);
        match &self.backing {
            Backing::Host(lease) => match &lease.block.segment().memory().0 {
                MemoryKind::Host(m) => {
                    lease.block.slot().touch();
                    // SAFETY: allocators make only blocks that are inside their segment.
                    (unsafe { m.start().add(lease.block.offset()) }, self.size)
                }
                _ => no_bytes, // the bytes moved to the host copy of an allocator that spills
            },
            Backing::Adopted(adopted) => (adopted.memory.start(), self.size),
            Backing::Empty | Backing::Uninit(_) | Backing::OpenCl(..) => no_bytes,
        }
    }
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes on {}", self.size, self.device)?;
        let Some(location) = self.block().map(Block::location) else { return Ok(()) };
        write!(f, " at segment {} + {}", location.segment().id(), location.offset())
    }
}

/// A type aligned enough that its dangling pointer can be the start of an empty slice of any element type.
#[repr(align(512))]
struct Aligned;

/// A block that is returned to its allocator on drop.
pub(super) struct Lease {
    pub(super) block: ManuallyDrop<Block>,
    pub(super) owner: AllocatorRef,
}

/// The allocator that handed out a block: the device's own allocator, or the allocator in scope when the block was allocated.
pub(super) enum AllocatorRef {
    Device(&'static dyn Allocator),
    Scope(Arc<dyn Allocator>),
}

impl AllocatorRef {
    fn allocator(&self) -> &dyn Allocator {
        match self {
            AllocatorRef::Device(allocator) => *allocator,
            AllocatorRef::Scope(allocator) => &**allocator,
        }
    }
}

impl Lease {
    #[inline(always)]
    fn new(device: Device, bytes: usize, current: &'static DeviceEntry, kind: StorageType) -> Result<Lease> {
        let (owner, is_built_in) = match scope::allocator(device) {
            Some(allocator) => (AllocatorRef::Scope(allocator), false),
            None => (AllocatorRef::Device(&*current.allocator), current.is_built_in),
        };
        let allocator = owner.allocator();
        let stream = scope::home_stream(device);
        let block = match kind {
            StorageType::Static => allocate_static(allocator, bytes, stream)?,
            _ => allocator.allocate(bytes, stream)?,
        };
        // A user's allocator is not trusted: its block is checked, because a wrong block would make later reads and writes unsound.
        if !is_built_in && !satisfies_request(&block, device, bytes) {
            return Err(reject_block(allocator, block, device, bytes));
        }
        // Only the caching allocator that made a block can bring it back from the host.
        if !is_built_in && block.is_in_table() && find_allocator::<CachingAllocator>(allocator).is_none() {
            block.export();
        }
        if profiler::is_on() {
            report_change_to_profiler(allocator, block.size() as i64);
        }
        Ok(Lease { block: ManuallyDrop::new(block), owner })
    }

    pub(super) fn allocator(&self) -> &dyn Allocator {
        self.owner.allocator()
    }

    /// True if the block's bytes are spilled to the host until the device has memory for them.
    pub(super) fn is_spilled(&self) -> bool {
        matches!(self.block.location().segment().memory().0, MemoryKind::Spilled(_))
    }
}

/// Allocates from the static buffers of a pool. Other allocators have none and allocate as usual.
#[cold]
fn allocate_static(allocator: &dyn Allocator, bytes: usize, stream: StreamId) -> Result<Block> {
    match (allocator as &dyn Any).downcast_ref::<PoolAllocator>() {
        Some(pool) => pool.allocate_kind(bytes, stream, StorageType::Static),
        None => allocator.allocate(bytes, stream),
    }
}

#[cold]
fn report_change_to_profiler(allocator: &dyn Allocator, bytes: i64) {
    if (allocator as &dyn Any).is::<ImportedBuffers>() {
        return; // imported memory was never counted
    }
    let device = allocator.device();
    profiler::record_memory(device, bytes, || {
        let stats = with_images(allocator);
        [stats.allocated_bytes.current, stats.reserved_bytes.current]
    });
}

/// Gives a block that does not satisfy its request back to the allocator, and returns the error to report.
#[cold]
fn reject_block(allocator: &dyn Allocator, block: Block, device: Device, bytes: usize) -> Error {
    let reason = format!("{allocator:?} gave {block:?} for {bytes} bytes on {device}");
    allocator.deallocate(block);
    Error::invalid("allocate", reason)
}

/// True if the block satisfies a request for `bytes` bytes on this device. The block's size must be at least `bytes` rounded up to
/// a multiple of 16, because kernels write the last 16 bytes whole.
fn satisfies_request(block: &Block, device: Device, bytes: usize) -> bool {
    let location = block.location();
    block.requested() >= bytes
        && block.size() >= bytes.next_multiple_of(16)
        && location.offset().is_multiple_of(ALIGNMENT)
        && match (device, &location.segment().memory().0) {
            (Device::Cpu, MemoryKind::Host(_)) | (Device::OpenCL(_), MemoryKind::OpenCl(_)) => true,
            (_, MemoryKind::Sim(_)) => dry::is_on(),
            _ => false,
        }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // SAFETY: `self.block` is taken once, here, and not used again.
        let block = unsafe { ManuallyDrop::take(&mut self.block) };
        let size = block.size() as i64;
        self.allocator().deallocate(block);
        if profiler::is_on() {
            report_change_to_profiler(self.allocator(), -size);
        }
    }
}

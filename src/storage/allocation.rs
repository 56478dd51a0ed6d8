//! Handles on runs of bytes, and what holds the bytes.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::c_void;
use std::fmt;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::sync::{Arc, OnceLock, RwLock};

use super::allocator::Allocator;
use super::attachment::{self, Attachment};
use super::block::{ALIGNMENT, Block, Borrows};
use super::derived::Derived;
use super::driver::MemoryKind;
use super::driver::host::HostMemory;
use super::driver::opencl::OpenCl;
use super::driver::staging::{self, PinnedBytes};
use super::import::{Foreign, Imported};
use super::registry::{self, Current};
use super::{captured, image_pool, scope};
use crate::device::{Stream, capture, profiler};
use crate::{Device, Element, Error, Result};

/// A handle on bytes of one device. Cloning makes another handle on the same bytes.
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
    /// The last handle gives the block back, and keeps the `Arc`'s own memory for this thread's next storage: a launch
    /// asks the heap for nothing.
    fn drop(&mut self) {
        // SAFETY: taken once, here, and not used again.
        let shared = unsafe { ManuallyDrop::take(&mut self.0) };
        let Some(mut shared) = attachment::released(shared) else { return };
        if let Some(allocation) = alone(&mut shared) {
            allocation.backing = Backing::Empty;
            allocation.derived.clear();
            allocation.attachment.clear();
            let _ = SPARE.try_with(|spare| {
                let mut spare = spare.borrow_mut();
                if spare.len() < SPARES {
                    spare.push(shared);
                }
            });
        }
    }
}

/// [`Arc::get_mut`] for what has no [`Weak`](std::sync::Weak) handles, at the price of a load: it would lock, twice a storage.
#[inline]
pub(super) fn alone(shared: &mut Arc<Allocation>) -> Option<&mut Allocation> {
    if Arc::strong_count(shared) != 1 {
        return None;
    }
    fence(Ordering::Acquire); // after all that others did with handles that are gone
    // SAFETY: nobody makes weak handles, so this is the only handle, and it is borrowed exclusively.
    Some(unsafe { &mut *Arc::as_ptr(shared).cast_mut() })
}

/// A place for a storage.
#[cold]
#[inline(never)]
fn nothing() -> Arc<Allocation> {
    let (version, derived, attachment) = (AtomicU64::new(0), Derived::default(), Attachment::default());
    Arc::new(Allocation { device: Device::Cpu, size: 0, version, derived, attachment, backing: Backing::Empty })
}

/// What a thread keeps of storages that are gone, at most.
const SPARES: usize = 64;

thread_local! {
    static SPARE: RefCell<Vec<Arc<Allocation>>> = const { RefCell::new(Vec::new()) };
}

impl Storage {
    /// The device the bytes are on.
    pub fn device(&self) -> Device {
        self.0.device()
    }

    /// The size in bytes, as asked for.
    pub fn nbytes(&self) -> usize {
        self.0.nbytes()
    }

    /// Whether both are handles on the same allocation.
    pub fn ptr_eq(&self, other: &Storage) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// The allocation that owns the bytes.
    pub fn allocation(&self) -> &Allocation {
        &self.0
    }

    /// Announces that work on `stream` uses the bytes: once given back they are not reused before what was submitted to
    /// it until then is done. Needed for a stream other than the one the storage was made on, unless the storage is kept
    /// until its own stream has waited for that one. `torch.Tensor.record_stream`.
    ///
    /// It orders nothing: the stream has to [wait](Stream::wait_stream) for what fills the storage. On the CPU, where work
    /// is done when the call returns, there is nothing to announce.
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

    /// The `cl_mem` the bytes are in, and the byte in it where they begin, for work enqueued by other code. From now on
    /// the storage never moves.
    ///
    /// The `cl_mem` is not retained for the caller: it is valid while the storage lives, and so long must it live as
    /// anything enqueued elsewhere uses the bytes. It may be larger than the storage; the rest is other storages'. It
    /// belongs to the context that `CL_MEM_CONTEXT` names. Queues of other code that were not [adopted](Device::adopt) are not
    /// ordered with anything: [`Stream::synchronize`] before they use the bytes, and their `clFinish` before the next use here.
    ///
    /// # Errors
    /// [`Error::Invalid`] where there is no such buffer: on the CPU, and for zero bytes.
    pub fn export_cl(&self) -> Result<(*mut c_void, usize)> {
        let place = self.cl()?;
        if let Some(block) = self.0.block() {
            block.export();
        }
        Ok((place.buffer().mem(), place.offset()))
    }

    /// Allocates `bytes` bytes, initialised to what the configuration says, or to anything.
    pub(crate) fn alloc(device: Device, bytes: usize) -> Result<Storage> {
        if bytes == 0 {
            return Ok(Storage::new(device, 0, Backing::Empty));
        }
        let current = registry::current(device)?;
        let storage = Storage::raw(device, bytes, current)?;
        if let Some(byte) = current.fill {
            storage.fill(0, bytes, &[byte])?;
        }
        Ok(storage)
    }

    /// `bytes` zero bytes.
    pub(crate) fn alloc_zeroed(device: Device, bytes: usize) -> Result<Storage> {
        if bytes == 0 {
            return Ok(Storage::new(device, 0, Backing::Empty));
        }
        let storage = Storage::raw(device, bytes, registry::current(device)?)?;
        storage.fill(0, bytes, &[0])?;
        Ok(storage)
    }

    #[inline]
    fn raw(device: Device, bytes: usize, current: &'static Current) -> Result<Storage> {
        let lease = Lease::new(device, bytes, current)?;
        let backing = match current.opened {
            None => Backing::Host(lease),
            Some(opened) => Backing::OpenCl(opened, lease),
        };
        Ok(Storage::new(device, bytes, backing))
    }

    /// A storage on the CPU device that owns the vector's elements where they are. The allocator does not count it.
    pub(crate) fn adopt<T: Element>(v: Vec<T>) -> Storage {
        let bytes = size_of_val(v.as_slice());
        let backing = match bytes {
            0 => Backing::Empty,
            _ => Backing::Adopted(Adopted::new(Bytes::Vector(HostMemory::from_vec(v)))),
        };
        Storage::new(Device::Cpu, bytes, backing)
    }

    /// A storage on the CPU device with unspecified contents, pinned for transfers to and from `device`; `None` for
    /// the CPU device, for no bytes, and where none is left.
    pub(crate) fn pinned(device: Device, bytes: usize) -> Result<Option<Storage>> {
        let backing = |memory| Backing::Adopted(Adopted::new(Bytes::Pinned(memory)));
        Ok(staging::pin(device, bytes)?.map(|memory| Storage::new(Device::Cpu, bytes, backing(memory))))
    }

    /// Whether it is memory of the host pinned for this device's transfers.
    pub(crate) fn is_pinned(&self, device: Device) -> bool {
        self.0.pinned().is_some_and(|pinned| pinned.is_for(device))
    }

    #[inline(always)] // what is moved in words and read in vectors waits for the stores
    pub(super) fn new(device: Device, size: usize, backing: Backing) -> Storage {
        let spare = SPARE.try_with(|spare| spare.borrow_mut().pop()).ok().flatten();
        let mut shared = spare.unwrap_or_else(nothing);
        let place = alone(&mut shared).expect("nobody else has a handle");
        (place.device, place.size, place.version) = (device, size, AtomicU64::new(0));
        // Nothing is there that would be dropped.
        std::mem::forget(std::mem::replace(&mut place.backing, backing));
        Storage(ManuallyDrop::new(shared))
    }

    /// Whether its first byte is at a multiple of so many; true on devices, where allocators see to that.
    pub(crate) fn is_aligned(&self, to: usize) -> bool {
        self.0.host_range().0.addr().get().is_multiple_of(to)
    }

    /// Whether this is the only handle, so that nobody would notice a change.
    pub fn is_unique(&self) -> bool {
        Arc::strong_count(&self.0) == 1
    }

    /// How often the contents have been changed in place, shared by all views (PyTorch's `_version`): autograd compares it.
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

    /// To be called when a storage that nobody has seen yet has its first contents: a capture alone has to know.
    pub(crate) fn filled(&self) {
        if capture::is_capturing(self.device()) {
            self.bump_version();
        }
    }

    /// To be called by every in-place operation. Transfers do not call it.
    pub(crate) fn bump_version(&self) {
        self.0.version.fetch_add(1, Ordering::AcqRel);
        if capture::is_capturing(self.device()) {
            captured::changed(self);
        }
    }
}

// Locks that a panic has poisoned are taken all the same: bytes are never half a value.
impl std::panic::UnwindSafe for Storage {}
impl std::panic::RefUnwindSafe for Storage {}

impl fmt::Debug for Storage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self.0, f)
    }
}

/// A run of bytes on a device. Dropping it gives its block back to the device's allocator.
pub struct Allocation {
    device: Device,
    size: usize,
    pub(super) version: AtomicU64,
    pub(super) derived: Derived,
    pub(super) attachment: Attachment,
    pub(super) backing: Backing,
}

/// The memory that holds an allocation's bytes.
pub(super) enum Backing {
    /// There are no bytes.
    Empty,
    Uninit(OnceLock<Box<str>>), // no memory; the name of the parameter that is to be loaded, if known
    Host(Lease),
    /// Host memory that came with a vector, is pinned, or is somebody else's.
    Adopted(Box<Adopted>), // rare, and so large that all others would be moved at the length of it
    OpenCl(OpenCl, Lease),
}

/// Bytes taken over from the host. The lock is held while slices of them exist.
pub(super) struct Adopted {
    lock: RwLock<Borrows>,
    memory: Bytes,
}

impl Adopted {
    pub(super) fn new(memory: Bytes) -> Box<Adopted> {
        Box::new(Adopted { lock: RwLock::new(Borrows::none()), memory })
    }
}

pub(super) enum Bytes {
    Vector(HostMemory),
    Pinned(PinnedBytes),
    Foreign(Foreign),
}

impl Bytes {
    fn start(&self) -> NonNull<u8> {
        match self {
            Bytes::Vector(memory) => memory.start(),
            Bytes::Pinned(memory) => memory.start(),
            Bytes::Foreign(memory) => memory.start(),
        }
    }
}

impl Allocation {
    /// The device the bytes are on.
    pub fn device(&self) -> Device {
        self.device
    }

    /// The size in bytes, as asked for.
    pub fn nbytes(&self) -> usize {
        self.size
    }

    /// The number of the segment the block lies in; `None` for an empty allocation and for one that was taken over from
    /// the host. Compaction may change it.
    pub fn segment(&self) -> Option<u64> {
        self.block().map(|block| block.place().segment().id())
    }

    /// Where in the segment the block begins, in bytes; 0 where there is no segment. Compaction may change it.
    pub fn offset(&self) -> usize {
        self.block().map_or(0, |block| block.place().offset())
    }

    /// The block; `None` for an empty allocation and for one that was taken over from the host.
    pub fn block(&self) -> Option<&Block> {
        match &self.backing {
            Backing::Empty | Backing::Uninit(_) | Backing::Adopted(_) => None,
            Backing::Host(lease) | Backing::OpenCl(_, lease) => Some(&lease.block),
        }
    }

    /// Whether other code may change the bytes without being seen: it was given the buffer, or made it.
    pub(super) fn is_shared_outside(&self) -> bool {
        match &self.backing {
            Backing::Empty | Backing::Uninit(_) | Backing::Host(_) => false,
            Backing::Adopted(_) => true,
            Backing::OpenCl(_, lease) => {
                lease.block.slot().is_exported() || (lease.allocator() as &dyn Any).is::<Imported>()
            }
        }
    }

    /// The pinned memory that it is in. It is to be [checked](PinnedBytes::check) under the lock.
    pub(super) fn pinned(&self) -> Option<&PinnedBytes> {
        match &self.backing {
            Backing::Adopted(adopted) => match &adopted.memory {
                Bytes::Pinned(pinned) => Some(pinned),
                Bytes::Vector(_) | Bytes::Foreign(_) => None,
            },
            _ => None,
        }
    }

    /// What is locked while slices of the bytes exist; `None` where there are none in host memory.
    pub(super) fn host_lock(&self) -> Option<&RwLock<Borrows>> {
        match &self.backing {
            Backing::Host(lease) => Some(&lease.block.slot().lock),
            Backing::Adopted(adopted) => Some(&adopted.lock),
            Backing::Empty | Backing::Uninit(_) | Backing::OpenCl(..) => None,
        }
    }

    /// [`host_lock`](Self::host_lock), but of no pinned memory, which is to be checked under it.
    pub(super) fn unpinned_lock(&self) -> Option<&RwLock<Borrows>> {
        self.host_lock().filter(|_| self.pinned().is_none())
    }

    /// The first byte and the number of bytes in host memory; no bytes, aligned all the same, elsewhere. Valid as long
    /// as the host lock is held, or the block pinned, or the lock's count above 0.
    pub(super) fn host_range(&self) -> (NonNull<u8>, usize) {
        let nowhere = (NonNull::<Aligned>::dangling().cast(), 0);
        match &self.backing {
            Backing::Host(lease) => match &lease.block.segment().memory().0 {
                // SAFETY: an allocator's blocks lie inside their segment.
                MemoryKind::Host(m) => (unsafe { m.start().add(lease.block.offset()) }, self.size),
                _ => nowhere, // set_allocator lets no other driver's allocator in
            },
            Backing::Adopted(adopted) => (adopted.memory.start(), self.size),
            Backing::Empty | Backing::Uninit(_) | Backing::OpenCl(..) => nowhere,
        }
    }
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes on {}", self.size, self.device)?;
        let Some(place) = self.block().map(Block::place) else { return Ok(()) };
        write!(f, " at segment {} + {}", place.segment().id(), place.offset())
    }
}

/// Makes empty slices as aligned as any others: casting them to elements must not fail.
#[repr(align(512))]
struct Aligned;

/// A block that goes back to its allocator on drop.
pub(super) struct Lease {
    pub(super) block: ManuallyDrop<Block>,
    pub(super) owner: Owner,
}

/// The allocator a block is from: its device's own, or one that was in force where it was made.
pub(super) enum Owner {
    Device(&'static dyn Allocator),
    Scope(Arc<dyn Allocator>),
}

impl Owner {
    fn allocator(&self) -> &dyn Allocator {
        match self {
            Owner::Device(allocator) => *allocator,
            Owner::Scope(allocator) => &**allocator,
        }
    }
}

impl Lease {
    #[inline(always)]
    fn new(device: Device, bytes: usize, current: &'static Current) -> Result<Lease> {
        let (owner, is_own) = match scope::allocator(device) {
            Some(allocator) => (Owner::Scope(allocator), false),
            None => (Owner::Device(&*current.allocator), current.is_own),
        };
        let allocator = owner.allocator();
        let block = allocator.allocate(bytes, scope::home_stream(device))?;
        // A user's own allocator is not trusted with this: the bytes are about to be read and written.
        if !is_own && !fits(&block, device, bytes) {
            return Err(refused(allocator, block, device, bytes));
        }
        if profiler::is_on() {
            record_change(allocator, block.size() as i64);
        }
        Ok(Lease { block: ManuallyDrop::new(block), owner })
    }

    /// The allocator that the block is from.
    pub(super) fn allocator(&self) -> &dyn Allocator {
        self.owner.allocator()
    }

    /// Whether the block is kept on the host until its device has memory.
    pub(super) fn is_spilled(&self) -> bool {
        matches!(self.block.place().segment().memory().0, MemoryKind::Spilled(_))
    }
}

/// Tells the profiler that so many bytes more are allocated, or fewer.
#[cold]
fn record_change(allocator: &dyn Allocator, bytes: i64) {
    if (allocator as &dyn Any).is::<Imported>() {
        return; // not counted when it came, either
    }
    let device = allocator.device();
    profiler::memory(device, bytes, || {
        let stats = image_pool::with_images(allocator);
        [stats.allocated_bytes.current, stats.reserved_bytes.current]
    });
}

/// Gives back a block that is not what was asked for.
#[cold]
fn refused(allocator: &dyn Allocator, block: Block, device: Device, bytes: usize) -> Error {
    let reason = format!("{allocator:?} gave {block:?} for {bytes} bytes on {device}");
    allocator.deallocate(block);
    Error::invalid("allocate", reason)
}

/// Whether a block is one for so many bytes on this device. Kernels write up to the last sixteen bytes whole.
fn fits(block: &Block, device: Device, bytes: usize) -> bool {
    let place = block.place();
    block.requested() >= bytes
        && block.size() >= bytes.next_multiple_of(16)
        && place.offset().is_multiple_of(ALIGNMENT)
        && matches!(
            (device, &place.segment().memory().0),
            (Device::Cpu, MemoryKind::Host(_)) | (Device::OpenCL(_), MemoryKind::OpenCl(_))
        )
}

impl Drop for Lease {
    fn drop(&mut self) {
        // SAFETY: taken once, here, and not used again.
        let block = unsafe { ManuallyDrop::take(&mut self.block) };
        let size = block.size() as i64;
        self.allocator().deallocate(block);
        if profiler::is_on() {
            record_change(self.allocator(), -size);
        }
    }
}

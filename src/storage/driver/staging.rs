//! Large transfers between the host and a device with its own memory.
//!
//! From ordinary memory, a driver transfers at a third of the bus's speed or less, because one thread copies to the
//! driver's own pinned memory. In this module all threads of the CPU's thread team copy to or from a few pinned slices,
//! while the device transfers other slices. As with a plain transfer, the call returns when all bytes have arrived.
//!
//! On a CPU device there is nothing to transfer: all threads copy directly from or to the mapped buffer.

mod enqueued;
#[cfg(test)]
mod tests;
mod transfer;

use std::mem::{self, ManuallyDrop};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytemuck::{AnyBitPattern, NoUninit};
use enqueued::EnqueuedTransfer;
pub(in crate::storage) use enqueued::start_write;
use transfer::{StartPtr, Transfer, copy_raw};

use super::host::Host;
use super::pinned::{Budget, Pinned, PinnedPool, PinnedSource};
use super::{Driver, Failure};
use crate::device::cpu::bulk::copy;
use crate::device::cpu::streaming::Streaming;
use crate::device::opencl::{self, ClAt, ClDevice, ClEvent, HostMemory, MapRegion, MappedBuffer};
use crate::device::{DeviceKind, StreamId};
use crate::storage::config::{Config, Spill};
use crate::storage::per_device;
use crate::sync::lock;
use crate::{Device, Error, Result};

/// The sizes by which a transfer is split: the pinned slices, used in turn, and the pieces that single threads copy.
#[derive(Debug, Clone, Copy)]
struct StagingSizes {
    /// Size in bytes of the pinned blocks that contain the slices.
    block: usize,
    slice: usize,
    slices: usize,
    /// Number of bytes that a thread copies at a time.
    piece: usize,
}

impl StagingSizes {
    /// Adapts the sizes to `total` bytes. A small transfer uses slices of half its size, and pieces small enough that all threads get some.
    fn for_transfer(self, total: usize) -> StagingSizes {
        match total < SMALL_TRANSFER_BYTES {
            true => StagingSizes { slice: (total / 2).clamp(1, self.block), piece: SMALL_PIECE_BYTES, ..self },
            false => self,
        }
    }
}

/// Sizes for transfers to the device, which need little pinned memory.
const UPLOAD_SIZES: StagingSizes = StagingSizes { block: 2 << 20, slice: 2 << 20, slices: 4, piece: 512 << 10 };
/// Sizes for transfers to the host, where the device needs more slices to stay busy.
const DOWNLOAD_SIZES: StagingSizes = StagingSizes { block: 4 << 20, slice: 4 << 20, slices: 6, piece: 256 << 10 };
/// The smallest transfer, in bytes, that is split. For smaller transfers the driver's own transfer is as fast.
const MIN_STAGED_BYTES: usize = 1 << 20;
/// Transfers of fewer bytes use slices of half their size.
const SMALL_TRANSFER_BYTES: usize = 4 << 20;
/// Number of bytes that a thread copies at a time in transfers below [`SMALL_TRANSFER_BYTES`].
const SMALL_PIECE_BYTES: usize = 64 << 10;
/// The smallest copy, in bytes, from or to a CPU device's buffer that is divided among all threads.
const MIN_MAPPED_BYTES: usize = 4 << 20;
/// At most the machine's memory divided by this number may be pinned.
const PINNED_MEMORY_DIVISOR: u64 = 8;
/// Like [`PINNED_MEMORY_DIVISOR`], if the configuration of the environment moves idle blocks to pinned memory.
const SPILL_MEMORY_DIVISOR: u64 = 2;
/// The maximum of pinned memory, in bytes, if the size of the machine's memory is unknown.
const DEFAULT_PINNED_BYTES: u64 = 1 << 30;
/// Interval at which the background thread polls (`pinned_use_background_threads`), as in PyTorch.
const POLL_INTERVAL: Duration = Duration::from_micros(100);

pub(in crate::storage) struct PinnedDevice(&'static ClDevice);

impl PinnedSource for PinnedDevice {
    type Memory = MappedBuffer;
    /// The events of all transfers that use a block of pinned memory.
    type Event = Vec<Arc<ClEvent>>;

    fn create(&self, bytes: usize) -> Result<MappedBuffer, Failure> {
        self.0.create_pinned(bytes).map_err(|e| Failure::Other(self.0.error(e)))
    }

    fn is_done(&self, events: &Self::Event) -> bool {
        // If the driver cannot tell, or the device is lost, the transfer may still be running.
        !self.0.is_lost() && events.iter().all(|event| event.is_over().unwrap_or(false))
    }

    fn is_lost(&self) -> bool {
        self.0.is_lost()
    }
}

pub(in crate::storage) type DevicePinnedPool = PinnedPool<PinnedDevice>;

/// Returns a device's pool, created on first use and never destroyed.
fn pool(device: &'static ClDevice) -> &'static DevicePinnedPool {
    if let Some(pool) = per_device::get(device.device()) {
        return pool;
    }
    /// The limit of pinned memory for all devices together. The lock is held while a pool is made.
    static BUDGET: Mutex<Option<Arc<Budget>>> = Mutex::new(None);
    let mut budget = lock(&BUDGET);
    per_device::get(device.device()).unwrap_or_else(|| {
        let config = Config::from_env_once().cloned().unwrap_or_default(); // errors of the configuration are reported when the allocator is made
        let divisor = if config.spill == Spill::Host { SPILL_MEMORY_DIVISOR } else { PINNED_MEMORY_DIVISOR };
        let budget = budget.get_or_insert_with(|| {
            let memory = Host::new(&Config::default()).capacity();
            let part = if memory == u64::MAX { DEFAULT_PINNED_BYTES } else { memory / divisor };
            Budget::new(usize::try_from(part).unwrap_or(usize::MAX))
        });
        let made = PinnedPool::new(PinnedDevice(device), config.pinned_reserve_segment_size, Arc::clone(budget))
            .with_max_cached_bytes(config.pinned_max_cached_size);
        let pool: &'static DevicePinnedPool = per_device::get_or_insert(device.device(), made);
        if config.pinned_use_background_threads {
            let poll = move || {
                loop {
                    std::thread::sleep(POLL_INTERVAL);
                    pool.free_finished();
                }
            };
            // If the background thread cannot start, finished blocks are freed at the next request instead.
            let _ = std::thread::Builder::new().name("claystone-pinned".into()).spawn(poll);
        }
        pool
    })
}

/// Reads bytes of a buffer to the host, waits until they have arrived, and reports faults that this thread's kernels
/// found. `pinned` is the pinned memory that contains `dst`, if any.
pub(in crate::storage) fn read(
    device: &'static ClDevice,
    src: ClAt<'_>,
    dst: &mut [u8],
    pinned: Option<&PinnedBytes>,
) -> Result<()> {
    let pinned = pinned.filter(|_| !is_mapped(device, dst.len()));
    match pinned.and_then(|pinned| pinned.lend(device, dst.as_mut_ptr(), dst.len(), true)) {
        Some(lent) => device.read_into(src, lent).map(drop),
        None => try_read_staged(device, src, dst).unwrap_or_else(|| device.read(src, dst)),
    }
}

/// Like [`read`], into a vector that the device may write to directly.
pub(in crate::storage) fn read_into<T: AnyBitPattern + NoUninit>(
    device: &'static ClDevice,
    src: ClAt<'_>,
    mut dst: Vec<T>,
) -> Result<Vec<T>> {
    match try_read_staged(device, src, bytemuck::cast_slice_mut(&mut dst)) {
        Some(read) => read.map(|()| dst),
        None => device.read_into(src, dst),
    }
}

/// Reads through a mapping or pinned slices, so that no command refers to `dst`. Returns `None` if the driver's own transfer is faster.
fn try_read_staged(device: &'static ClDevice, src: ClAt<'_>, dst: &mut [u8]) -> Option<Result<()>> {
    if is_mapped(device, dst.len()) {
        return Some(read_mapped(device, src, dst, true));
    }
    let ring = is_staged(device, dst.len())
        .then(|| Ring::new(pool(device), device, DOWNLOAD_SIZES.for_transfer(dst.len()), dst.len()));
    ring.flatten().map(|ring| ring.read(src, dst))
}

/// Writes bytes from the host to a buffer and waits until they have arrived. `pinned` is as in [`read`].
pub(in crate::storage) fn write(
    device: &'static ClDevice,
    src: &[u8],
    dst: ClAt<'_>,
    pinned: Option<&PinnedBytes>,
) -> Result<()> {
    if is_mapped(device, src.len()) {
        return write_mapped(device, src, dst, true);
    }
    if let Some(lent) = pinned.and_then(|pinned| pinned.lend(device, src.as_ptr().cast_mut(), src.len(), false)) {
        return device.write_from(lent, dst).map(drop);
    }
    let ring = is_staged(device, src.len())
        .then(|| Ring::new(pool(device), device, UPLOAD_SIZES.for_transfer(src.len()), src.len()));
    match ring.flatten() {
        Some(ring) => ring.write(src, dst),
        None => device.write(src, dst),
    }
}

/// Reads from a mapped buffer. With `reports_faults`, reports faults that this thread's kernels found.
fn read_mapped(device: &ClDevice, src: ClAt<'_>, dst: &mut [u8], reports_faults: bool) -> Result<()> {
    let (n, to) = (dst.len(), dst.as_mut_ptr());
    let region = MapRegion { at: src, overwrite: false, reports_faults };
    // SAFETY: `n` bytes are mapped at `from`, and nothing runs on the device meanwhile; `dst` is borrowed exclusively.
    device.with_mapped(region, n, |from| unsafe { copy_raw(from, to, n, copy) })
}

/// Writes to a mapped buffer, and reports faults like [`read_mapped`].
fn write_mapped(device: &ClDevice, src: &[u8], dst: ClAt<'_>, reports_faults: bool) -> Result<()> {
    let (n, from) = (src.len(), src.as_ptr());
    let region = MapRegion { at: dst, overwrite: true, reports_faults };
    // SAFETY: `n` bytes are mapped at `to`, and nothing runs on the device meanwhile; `src` is borrowed.
    device.with_mapped(region, n, |to| unsafe { copy_raw(from, to, n, copy) })
}

/// Reads a block that an allocator moves, and waits. Faults of kernels are left to the program's next read.
pub(super) fn read_block(device: &ClDevice, src: ClAt<'_>, dst: &mut [u8]) -> Result<()> {
    match is_mapped(device, dst.len()) {
        true => read_mapped(device, src, dst, false),
        false => device.read_without_faults(src, dst),
    }
}

/// Writes a block that an allocator moves, and waits. Reports no faults of kernels.
pub(super) fn write_block(device: &ClDevice, src: &[u8], dst: ClAt<'_>) -> Result<()> {
    match is_mapped(device, src.len()) {
        true => write_mapped(device, src, dst, false),
        false => device.write(src, dst),
    }
}

/// True if a transfer is split; otherwise the driver's own transfer is faster.
fn is_staged(device: &ClDevice, bytes: usize) -> bool {
    let info = device.info();
    bytes >= MIN_STAGED_BYTES && !info.unified_memory && info.kind != DeviceKind::Cpu
}

/// True if the device's memory is host memory, and the transfer is large enough for several threads.
fn is_mapped(device: &ClDevice, bytes: usize) -> bool {
    bytes >= MIN_MAPPED_BYTES && device.info().kind == DeviceKind::Cpu
}

/// Pinned host memory that holds a tensor's elements.
pub(crate) struct PinnedBytes {
    /// The pinned block, which is taken out only when the value is dropped.
    block: ManuallyDrop<Pinned<'static, PinnedDevice>>,
    opened: &'static ClDevice,
    /// The enqueued transfers whose end the host has not waited for.
    enqueued_transfers: Mutex<Vec<EnqueuedTransfer>>,
    /// The number of other transfers that read the bytes, and the number that write them. A transfer whose end is unknown stays counted.
    readers: AtomicUsize,
    writers: AtomicUsize,
}

/// Bytes of a [`PinnedBytes`] that a transfer uses in place. The code that makes the value has borrowed the bytes,
/// under the lock of the bytes' tensor. If the value is forgotten, the bytes stay blocked for all other code.
struct LentBytes<'a> {
    start: *mut u8,
    bytes: usize,
    transfer_count: &'a AtomicUsize,
}

// SAFETY: the bytes are borrowed, exclusively if they are written. After the borrow ends, no other code can access the bytes until
// this value is dropped, because `PinnedBytes::wait_and_check` fails. Once the device is lost, a `PinnedBytes` is never released.
unsafe impl HostMemory for LentBytes<'_> {
    fn range(&mut self) -> (*mut u8, usize) {
        (self.start, self.bytes)
    }
}

impl Drop for LentBytes<'_> {
    fn drop(&mut self) {
        self.transfer_count.fetch_sub(1, Release);
    }
}

impl PinnedBytes {
    fn new(pool: &'static DevicePinnedPool, opened: &'static ClDevice, bytes: usize) -> Option<PinnedBytes> {
        let block = ManuallyDrop::new(pool.alloc(bytes)?);
        let [readers, writers] = [const { AtomicUsize::new(0) }; 2];
        Some(PinnedBytes { block, opened, enqueued_transfers: Mutex::default(), readers, writers })
    }

    /// Returns the address of the first byte. The contents are initially unspecified, but initialised.
    pub(in crate::storage) fn start(&self) -> NonNull<u8> {
        block_start(&self.block)
    }

    pub(in crate::storage) fn is_for(&self, device: Device) -> bool {
        self.opened.device() == device
    }

    /// Lends some of the bytes to a transfer of this device, for reading, or for writing if `written`. Returns `None`
    /// if the bytes are pinned for another device.
    fn lend(&self, device: &ClDevice, start: *mut u8, bytes: usize, written: bool) -> Option<LentBytes<'_>> {
        if !self.is_for(device.device()) {
            return None;
        }
        let offset = start.addr().wrapping_sub(self.start().addr().get());
        assert!(offset <= self.block.bytes() && bytes <= self.block.bytes() - offset, "bytes of other memory");
        let transfer_count = if written { &self.writers } else { &self.readers };
        transfer_count.fetch_add(1, Relaxed);
        Some(LentBytes { start, bytes, transfer_count })
    }

    /// Waits for enqueued transfers before the bytes are read, or written if `written`. Call this method while holding
    /// the tensor's lock. Returns an error if the device is lost and one of its transfers may still be using the bytes.
    pub(in crate::storage) fn wait_and_check(&self, written: bool) -> Result<()> {
        self.wait_for_enqueued(written)?;
        // Transfers in progress hold the tensor's lock too, exclusively if they write, so a count above 0 means a transfer whose end is unknown.
        if self.writers.load(Acquire) == 0 && (!written || self.readers.load(Acquire) == 0) {
            return Ok(());
        }
        let cause = "an unfinished transfer of the lost device may still be using this pinned memory".into();
        Err(Error::DeviceLost { device: self.opened.device(), cause })
    }
}

impl Drop for PinnedBytes {
    fn drop(&mut self) {
        // Transfers of a lost device may be using the memory for ever.
        if !self.opened.is_lost() {
            let enqueued_transfers = self.enqueued_transfers.get_mut().unwrap_or_else(PoisonError::into_inner);
            let events: Vec<_> = enqueued_transfers.drain(..).map(|transfer| transfer.event).collect();
            // SAFETY: `self.block` is taken once, here, and not used again.
            let block = unsafe { ManuallyDrop::take(&mut self.block) };
            if !events.is_empty() {
                block.release_after(events);
            }
        }
    }
}

/// Allocates pinned memory for a device's transfers. Returns `None` for the CPU device, for zero bytes, and if no pinned memory is left.
pub(in crate::storage) fn alloc_pinned(device: Device, bytes: usize) -> Result<Option<PinnedBytes>> {
    let Device::OpenCL(index) = device else { return Ok(None) };
    let opened = opencl::open(index)?;
    opened.check_lost()?; // unfinished transfers may still use the memory in its pool
    Ok((bytes > 0).then(|| PinnedBytes::new(pool(opened), opened, bytes)).flatten())
}

fn block_start(block: &Pinned<'static, PinnedDevice>) -> NonNull<u8> {
    let (memory, offset) = block.memory();
    debug_assert!(offset + block.bytes() <= memory.bytes());
    // SAFETY: the pool makes only blocks that are inside their memory.
    unsafe { memory.start().add(offset) }
}

/// The pinned slices of one transfer, used in turn.
struct Ring {
    device: &'static ClDevice,
    slices: Vec<SharedSlice>,
    sizes: StagingSizes,
}

impl Ring {
    /// Allocates slices for a transfer of `total` bytes. Returns `None` if there is too little pinned memory to be faster than the
    /// driver's own transfer.
    fn new(
        pool: &'static DevicePinnedPool,
        device: &'static ClDevice,
        sizes: StagingSizes,
        total: usize,
    ) -> Option<Ring> {
        let wanted = total.div_ceil(sizes.slice).min(sizes.slices);
        let stream = device.current_stream(); // read on this thread, because the team's threads have other current streams
        let slice = |block| SharedSlice::new(StagingSlice { device, stream, block: Some(block), event: None });
        let slices: Vec<SharedSlice> = (0..wanted).map_while(|_| pool.alloc(sizes.block)).map(slice).collect();
        (slices.len() >= wanted.min(2)).then_some(Ring { device, slices, sizes })
    }

    fn read(self, src: ClAt<'_>, dst: &mut [u8]) -> Result<()> {
        let (transfer, to) = (Transfer::new(&self, dst.len()), StartPtr(dst.as_mut_ptr()));
        let (count, slots) = (transfer.chunks.len(), self.slices.len());
        let begin = |chunk: usize| {
            let range = transfer.chunks[chunk].range.clone();
            self.slice(chunk).read((src.0, src.1 + range.start), range.len())?;
            transfer.chunks[chunk].begun.store(true, Release);
            Ok(())
        };
        (0..slots.min(count)).try_for_each(begin)?;
        transfer.copy_pieces(
            |chunk| transfer.await_begun(chunk) && transfer.keep_error(self.slice(chunk).wait()),
            |from, piece| {
                // SAFETY: the piece is inside `dst`, which no other code touches, and no other thread has the piece.
                // The slice's transfer is done, and the next one begins when all pieces of the chunk are copied.
                unsafe { copy_raw(from, to.at(piece.start), piece.len(), |to, from| to.copy_from_slice(from)) }
            },
            |chunk| chunk + slots >= count || transfer.keep_error(begin(chunk + slots)),
        )?;
        self.device.report_faults() // reports faults that this thread's kernels found
    }

    fn write(self, src: &[u8], dst: ClAt<'_>) -> Result<()> {
        let (transfer, slots) = (Transfer::new(&self, src.len()), self.slices.len());
        transfer.copy_pieces(
            |chunk| match chunk.checked_sub(slots) {
                None => true,
                Some(before) => transfer.await_begun(before) && transfer.keep_error(self.slice(chunk).wait()),
            },
            |to, piece| {
                // SAFETY: the piece is inside `src`. No other thread has these bytes of the slice, nor does a transfer:
                // the previous one is done, and the next one begins when all pieces of the chunk are copied.
                unsafe {
                    // The copy bypasses the processor's cache, because the host does not read the bytes again and the device can
                    // read them sooner.
                    copy_raw(src.as_ptr().add(piece.start), to, piece.len(), |to, from| {
                        Streaming::new().copy(to, from)
                    });
                }
            },
            |chunk| {
                let range = &transfer.chunks[chunk].range;
                let begun = self.slice(chunk).write((dst.0, dst.1 + range.start), range.len());
                transfer.chunks[chunk].begun.store(true, Release);
                transfer.keep_error(begun)
            },
        )?;
        (0..slots).try_for_each(|slot| self.slice(slot).wait())
    }

    /// Locks the slice that a chunk goes through.
    fn slice(&self, chunk: usize) -> MutexGuard<'_, StagingSlice> {
        lock(&self.slices[chunk % self.slices.len()].slice)
    }
}

/// A staging slice that threads lock in turn. `start` is the address of its first byte, readable without the lock.
struct SharedSlice {
    start: StartPtr,
    slice: Mutex<StagingSlice>,
}

impl SharedSlice {
    fn new(slice: StagingSlice) -> SharedSlice {
        SharedSlice { start: StartPtr(slice.range(0).as_ptr()), slice: Mutex::new(slice) }
    }
}

/// A pinned block and the transfer that uses it.
struct StagingSlice {
    device: &'static ClDevice,
    stream: StreamId,
    /// The pinned block, which is taken out only when the slice is dropped.
    block: Option<Pinned<'static, PinnedDevice>>,
    event: Option<ClEvent>,
}

impl StagingSlice {
    fn range(&self, n: usize) -> NonNull<u8> {
        let block = self.block.as_ref().expect("taken only on drop");
        assert!(n <= block.bytes(), "a slice of {} bytes has no {n}", block.bytes());
        block_start(block)
    }

    fn wait(&mut self) -> Result<()> {
        if let Some(event) = &self.event {
            self.device.wait(event)?;
        }
        self.event = None;
        Ok(())
    }

    fn read(&mut self, src: ClAt<'_>, n: usize) -> Result<()> {
        self.wait()?;
        // SAFETY: the range is `n` bytes of this block, which no transfer uses. No code accesses the bytes before
        // `wait` has found the event done; on drop the pool gets the block together with the event.
        self.event = Some(unsafe { self.device.start_read(self.stream, src, self.range(n), n) }?);
        Ok(())
    }

    fn write(&mut self, dst: ClAt<'_>, n: usize) -> Result<()> {
        self.wait()?;
        // SAFETY: the range is `n` bytes of this block, which no other transfer uses until `wait` has found the event done.
        self.event = Some(unsafe { self.device.start_write(self.stream, self.range(n), dst, n) }?);
        Ok(())
    }
}

impl Drop for StagingSlice {
    fn drop(&mut self) {
        match (self.block.take(), self.event.take()) {
            (Some(block), Some(event)) => block.release_after(vec![Arc::new(event)]), // an error ended the transfer early
            // On a lost device, a transfer whose event is unknown may still use the block, so the block is leaked.
            (Some(block), None) if self.device.is_lost() => mem::forget(block),
            _ => {}
        }
    }
}

//! Large transfers between the host and a device with memory of its own.
//!
//! From ordinary memory a driver transfers at a third of the bus's speed or less, since it copies to pinned memory of
//! its own with one thread. Here all threads of the CPU's team copy, past their caches, into a few pinned slices, while
//! the device transfers what is in others. What the caller sees is the same: the call returns when everything is where
//! it should be. On a processor there is nothing to transfer: all threads copy from or to the buffer where it lies.

mod enqueued;
#[cfg(test)]
mod tests;
mod transfer;

use std::mem::{self, ManuallyDrop};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering::Acquire, Ordering::Relaxed, Ordering::Release};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use bytemuck::{AnyBitPattern, NoUninit};
use enqueued::Flight;
pub(in crate::storage) use enqueued::start_write;
use transfer::{Start, Transfer, bytes};

use super::host::Host;
use super::pinned::{Budget, Pinned, PinnedPool, PinnedSource};
use super::{Driver, Failure};
use crate::device::cpu::bulk::copy;
use crate::device::cpu::streaming::Streaming;
use crate::device::lock;
use crate::device::opencl::{self, ClAt, ClDevice, ClEvent, ClPinned, HostMemory, Mapped};
use crate::device::{DeviceKind, StreamId};
use crate::storage::config::Config;
use crate::{Device, Error, Result};

/// How a transfer is cut up: pinned slices of so many bytes, used in turn, and what one thread copies at a time.
#[derive(Debug, Clone, Copy)]
struct Cut {
    /// Bytes of the pinned blocks that slices lie in.
    block: usize,
    slice: usize,
    slices: usize,
    piece: usize,
}

impl Cut {
    /// The same for a transfer of so many bytes: a small one goes in halves, and in pieces of which all threads get some.
    fn of(self, total: usize) -> Cut {
        match total < SMALL {
            true => Cut { slice: (total / 2).clamp(1, self.block), piece: SMALL_PIECE, ..self },
            false => self,
        }
    }
}

/// To the device, through few pinned bytes, and to the host, where the device needs more to go on with.
const UP: Cut = Cut { block: 2 << 20, slice: 2 << 20, slices: 4, piece: 512 << 10 };
const DOWN: Cut = Cut { block: 4 << 20, slice: 4 << 20, slices: 6, piece: 256 << 10 };
/// The least transfer that is cut up: below, the driver's own way is as fast. And what is small.
const STAGED: usize = 1 << 20;
const SMALL: usize = 4 << 20;
const SMALL_PIECE: usize = 64 << 10;
/// The least copy from or to a buffer of a processor that all threads share.
const MAPPED: usize = 4 << 20;
/// The part of the machine's memory that may be pinned, and how much where that is not known.
const PINNED_PART: u64 = 8;
const PINNED_UNKNOWN: u64 = 1 << 30;
/// How often the background thread asks (`pinned_use_background_threads`), as in PyTorch.
const POLL: Duration = Duration::from_micros(100);

/// A device as a source of pinned memory.
pub(in crate::storage) struct Source(&'static ClDevice);

impl PinnedSource for Source {
    type Memory = ClPinned;
    /// Of all transfers that use the memory.
    type Event = Vec<Arc<ClEvent>>;

    fn create(&self, bytes: usize) -> Result<ClPinned, Failure> {
        self.0.create_pinned(bytes).map_err(|e| Failure::Other(self.0.error(e)))
    }

    fn is_done(&self, events: &Self::Event) -> bool {
        // Where the driver does not say, and on a lost device, nobody knows.
        !self.0.is_lost() && events.iter().all(|event| event.is_over().unwrap_or(false))
    }

    fn is_lost(&self) -> bool {
        self.0.is_lost()
    }
}

pub(in crate::storage) type Pool = PinnedPool<Source>;

static POOLS: RwLock<Vec<(Device, &'static Pool)>> = RwLock::new(Vec::new());

/// The pool of a device, if anything was staged for it yet.
pub(in crate::storage) fn existing_pool(device: Device) -> Option<&'static Pool> {
    let pools = POOLS.read().unwrap_or_else(PoisonError::into_inner);
    pools.iter().find(|(of, _)| *of == device).map(|(_, pool)| *pool)
}

/// The pool of a device, made on first use, never taken down.
fn pool(device: &'static ClDevice) -> &'static Pool {
    if let Some(pool) = existing_pool(device.device()) {
        return pool;
    }
    static MAKING: Mutex<()> = Mutex::new(());
    let _one_at_a_time = lock(&MAKING);
    existing_pool(device.device()).unwrap_or_else(|| {
        let config = Config::of_process().cloned().unwrap_or_default(); // a mistake in it is told when the allocator is made
        let made = PinnedPool::new(Source(device), config.pinned_reserve_segment_size, Arc::clone(budget()));
        let pool: &'static Pool = Box::leak(Box::new(made));
        POOLS.write().unwrap_or_else(PoisonError::into_inner).push((device.device(), pool));
        if config.pinned_use_background_threads {
            let poll = move || {
                loop {
                    std::thread::sleep(POLL);
                    pool.poll();
                }
            };
            // Without the thread blocks are found free when the next one is asked for.
            let _ = std::thread::Builder::new().name("claystone-pinned".into()).spawn(poll);
        }
        pool
    })
}

/// What all devices together may pin.
fn budget() -> &'static Arc<Budget> {
    static BUDGET: OnceLock<Arc<Budget>> = OnceLock::new();
    BUDGET.get_or_init(|| {
        let memory = Host::new(&Config::default()).capacity();
        let part = if memory == u64::MAX { PINNED_UNKNOWN } else { memory / PINNED_PART };
        Budget::new(usize::try_from(part).unwrap_or(usize::MAX))
    })
}

/// Reads bytes of a buffer to the host, waits for them and reports what a kernel of this thread found wrong. `pinned` is
/// what `dst` lies in, if that is pinned memory.
pub(in crate::storage) fn read(
    device: &'static ClDevice,
    src: ClAt<'_>,
    dst: &mut [u8],
    pinned: Option<&PinnedBytes>,
) -> Result<()> {
    let pinned = pinned.filter(|_| !is_mapped(device, dst.len()));
    match pinned.and_then(|pinned| pinned.lend(device, dst.as_mut_ptr(), dst.len(), true)) {
        Some(lent) => device.read_into(src, lent).map(drop),
        None => read_apart(device, src, dst).unwrap_or_else(|| device.read(src, dst)),
    }
}

/// [`read`] into a vector, which the device may write to.
pub(in crate::storage) fn read_into<T: AnyBitPattern + NoUninit>(
    device: &'static ClDevice,
    src: ClAt<'_>,
    mut dst: Vec<T>,
) -> Result<Vec<T>> {
    match read_apart(device, src, bytemuck::cast_slice_mut(&mut dst)) {
        Some(read) => read.map(|()| dst),
        None => device.read_into(src, dst),
    }
}

/// Reads by maps or through pinned slices, so that no command gets to know of `dst`; `None` where that is not the way.
fn read_apart(device: &'static ClDevice, src: ClAt<'_>, dst: &mut [u8]) -> Option<Result<()>> {
    if is_mapped(device, dst.len()) {
        let (n, to) = (dst.len(), dst.as_mut_ptr());
        let region = Mapped { at: src, overwrite: false };
        // SAFETY: n bytes are mapped there, and nothing runs on the device meanwhile; `dst` is borrowed alone.
        return Some(device.with_mapped(region, n, |from| unsafe { bytes(from, to, n, copy) }));
    }
    let ring = is_staged(device, dst.len()).then(|| Ring::new(pool(device), device, DOWN.of(dst.len()), dst.len()));
    ring.flatten().map(|ring| ring.read(src, dst))
}

/// Writes bytes from the host to a buffer and waits until they are there. `pinned` is as in [`read`].
pub(in crate::storage) fn write(
    device: &'static ClDevice,
    src: &[u8],
    dst: ClAt<'_>,
    pinned: Option<&PinnedBytes>,
) -> Result<()> {
    if is_mapped(device, src.len()) {
        let (n, from) = (src.len(), src.as_ptr());
        let region = Mapped { at: dst, overwrite: true };
        // SAFETY: n bytes are mapped there, and nothing runs on the device meanwhile; `src` is borrowed.
        return device.with_mapped(region, n, |to| unsafe { bytes(from, to, n, copy) });
    }
    if let Some(lent) = pinned.and_then(|pinned| pinned.lend(device, src.as_ptr().cast_mut(), src.len(), false)) {
        return device.write_from(lent, dst).map(drop);
    }
    let ring = is_staged(device, src.len()).then(|| Ring::new(pool(device), device, UP.of(src.len()), src.len()));
    match ring.flatten() {
        Some(ring) => ring.write(src, dst),
        None => device.write(src, dst),
    }
}

/// Whether a transfer is cut up, or the driver's own way is better.
fn is_staged(device: &ClDevice, bytes: usize) -> bool {
    let info = device.info();
    bytes >= STAGED && !info.unified_memory && info.kind != DeviceKind::Cpu
}

/// Whether the device's memory is the host's, and a transfer large enough for several threads.
fn is_mapped(device: &ClDevice, bytes: usize) -> bool {
    bytes >= MAPPED && device.info().kind == DeviceKind::Cpu
}

/// Pinned host memory for a tensor's elements.
pub(in crate::storage) struct PinnedBytes {
    /// Until dropped.
    block: ManuallyDrop<Pinned<'static, Source>>,
    opened: &'static ClDevice,
    /// Transfers that were enqueued and not waited for.
    flights: Mutex<Vec<Flight>>,
    /// Other transfers that read the bytes, and those that write them: under way, or never known to be over.
    readers: AtomicUsize,
    writers: AtomicUsize,
}

/// Bytes of a [`PinnedBytes`] that a transfer uses where they are. Whoever has one made has borrowed them, under the lock of
/// their tensor. One that is forgotten keeps everybody else out.
struct Lent<'a> {
    start: *mut u8,
    bytes: usize,
    users: &'a AtomicUsize,
}

// SAFETY: the bytes are borrowed, exclusively where they are written, and after that nobody gets at them until this is
// dropped: `PinnedBytes::check`. Once the device is lost a `PinnedBytes` is never given back.
unsafe impl HostMemory for Lent<'_> {
    fn range(&mut self) -> (*mut u8, usize) {
        (self.start, self.bytes)
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        self.users.fetch_sub(1, Release);
    }
}

impl PinnedBytes {
    fn new(pool: &'static Pool, opened: &'static ClDevice, bytes: usize) -> Option<PinnedBytes> {
        let block = ManuallyDrop::new(pool.alloc(bytes)?);
        let [readers, writers] = [const { AtomicUsize::new(0) }; 2];
        Some(PinnedBytes { block, opened, flights: Mutex::default(), readers, writers })
    }

    /// The first byte. What the bytes are at first is unspecified, but they are initialised.
    pub(in crate::storage) fn start(&self) -> NonNull<u8> {
        start_of(&self.block)
    }

    /// Whether they are pinned for this device's transfers.
    pub(in crate::storage) fn is_for(&self, device: Device) -> bool {
        self.opened.device() == device
    }

    /// Some of the bytes for a transfer of this device, which writes them or only reads them; `None` where they are another's.
    fn lend(&self, device: &ClDevice, start: *mut u8, bytes: usize, written: bool) -> Option<Lent<'_>> {
        if !self.is_for(device.device()) {
            return None;
        }
        let offset = start.addr().wrapping_sub(self.start().addr().get());
        assert!(offset <= self.block.bytes() && bytes <= self.block.bytes() - offset, "bytes of other memory");
        let users = if written { &self.writers } else { &self.readers };
        users.fetch_add(1, Relaxed);
        Some(Lent { start, bytes, users })
    }

    /// Under the tensor's lock, before the bytes are read, or `written` as well: waits for transfers that were enqueued, and is an
    /// error where one of the lost device may still be using them.
    pub(in crate::storage) fn check(&self, written: bool) -> Result<()> {
        self.settle(written)?;
        // Transfers that are under way hold the lock as well: those that write the bytes exclusively.
        if self.writers.load(Acquire) == 0 && (!written || self.readers.load(Acquire) == 0) {
            return Ok(());
        }
        let cause = "a transfer that nobody knows the end of may still be using this pinned memory".into();
        Err(Error::DeviceLost { device: self.opened.device(), cause })
    }
}

impl Drop for PinnedBytes {
    fn drop(&mut self) {
        // Transfers of a lost device may be using it for good.
        if !self.opened.is_lost() {
            let flights = self.flights.get_mut().unwrap_or_else(PoisonError::into_inner);
            let events: Vec<_> = flights.drain(..).map(|flight| flight.event).collect();
            // SAFETY: taken once, here, and not used again.
            let block = unsafe { ManuallyDrop::take(&mut self.block) };
            if !events.is_empty() {
                block.release_after(events);
            }
        }
    }
}

/// Pinned memory for a device's transfers; `None` for the CPU device, for no bytes, and where there is none left.
pub(in crate::storage) fn pin(device: Device, bytes: usize) -> Result<Option<PinnedBytes>> {
    let Device::OpenCL(index) = device else { return Ok(None) };
    let opened = opencl::open(index)?;
    opened.check_lost()?; // its pool may hold what unfinished transfers use
    Ok((bytes > 0).then(|| PinnedBytes::new(pool(opened), opened, bytes)).flatten())
}

/// Where a block begins.
fn start_of(block: &Pinned<'static, Source>) -> NonNull<u8> {
    let (memory, offset) = block.memory();
    debug_assert!(offset + block.bytes() <= memory.bytes());
    // SAFETY: the pool's blocks lie inside their memory.
    unsafe { memory.start().add(offset) }
}

/// The pinned slices of one transfer, used in turn.
struct Ring {
    device: &'static ClDevice,
    slices: Vec<Shared>,
    cut: Cut,
}

impl Ring {
    /// Slices for a transfer of `total` bytes; `None` where there is not enough pinned memory to be worth it.
    fn new(pool: &'static Pool, device: &'static ClDevice, cut: Cut, total: usize) -> Option<Ring> {
        let wanted = total.div_ceil(cut.slice).min(cut.slices);
        let stream = device.current_stream(); // this thread's: the pool's have none
        let slice = |block| Shared::new(Slice { device, stream, block: Some(block), event: None });
        let slices: Vec<Shared> = (0..wanted).map_while(|_| pool.alloc(cut.block)).map(slice).collect();
        (slices.len() >= wanted.min(2)).then_some(Ring { device, slices, cut })
    }

    fn read(self, src: ClAt<'_>, dst: &mut [u8]) -> Result<()> {
        let (transfer, to) = (Transfer::new(&self, dst.len()), Start(dst.as_mut_ptr()));
        let (count, slots) = (transfer.chunks.len(), self.slices.len());
        let begin = |chunk: usize| {
            let range = transfer.chunks[chunk].range.clone();
            self.slice(chunk).read((src.0, src.1 + range.start), range.len())?;
            transfer.chunks[chunk].begun.store(true, Release);
            Ok(())
        };
        (0..slots.min(count)).try_for_each(begin)?;
        transfer.run(
            |chunk| transfer.await_begun(chunk) && transfer.note(self.slice(chunk).wait()),
            |from, piece| {
                // SAFETY: the piece is inside `dst`, which nobody else touches, and no other thread has it; the slice's
                // transfer is done, and the next one begins when all of its pieces are through.
                unsafe { bytes(from, to.at(piece.start), piece.len(), |to, from| to.copy_from_slice(from)) }
            },
            |chunk| chunk + slots >= count || transfer.note(begin(chunk + slots)),
        )?;
        self.device.report_faults() // this thread's
    }

    fn write(self, src: &[u8], dst: ClAt<'_>) -> Result<()> {
        let (transfer, slots) = (Transfer::new(&self, src.len()), self.slices.len());
        transfer.run(
            |chunk| match chunk.checked_sub(slots) {
                None => true,
                Some(before) => transfer.await_begun(before) && transfer.note(self.slice(chunk).wait()),
            },
            |to, piece| {
                // SAFETY: the piece is inside `src`, and of the slice no other thread has these bytes, nor a transfer:
                // the one before is done, and the next one begins when all of its pieces are through.
                unsafe {
                    // Past the cache, from which nobody will read them again: the device has them sooner.
                    bytes(src.as_ptr().add(piece.start), to, piece.len(), |to, from| Streaming::new().copy(to, from));
                }
            },
            |chunk| {
                let range = &transfer.chunks[chunk].range;
                let begun = self.slice(chunk).write((dst.0, dst.1 + range.start), range.len());
                transfer.chunks[chunk].begun.store(true, Release);
                transfer.note(begun)
            },
        )?;
        (0..slots).try_for_each(|slot| self.slice(slot).wait())
    }

    /// The slice that a chunk goes through.
    fn slice(&self, chunk: usize) -> MutexGuard<'_, Slice> {
        lock(&self.slices[chunk % self.slices.len()].slice)
    }
}

/// A slice that threads use in turn, and where it begins.
struct Shared {
    start: Start,
    slice: Mutex<Slice>,
}

impl Shared {
    fn new(slice: Slice) -> Shared {
        Shared { start: Start(slice.range(0).as_ptr()), slice: Mutex::new(slice) }
    }
}

/// A pinned block and the transfer that uses it.
struct Slice {
    device: &'static ClDevice,
    stream: StreamId,
    /// Until dropped.
    block: Option<Pinned<'static, Source>>,
    event: Option<ClEvent>,
}

impl Slice {
    fn range(&self, n: usize) -> NonNull<u8> {
        let block = self.block.as_ref().expect("taken only on drop");
        assert!(n <= block.bytes(), "a slice of {} bytes has no {n}", block.bytes());
        start_of(block)
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
        // SAFETY: `n` bytes of this block, used by no transfer; nothing touches them before `wait` has seen the event
        // done, and on drop the pool gets the block with the event.
        self.event = Some(unsafe { self.device.start_read(self.stream, src, self.range(n), n) }?);
        Ok(())
    }

    fn write(&mut self, dst: ClAt<'_>, n: usize) -> Result<()> {
        self.wait()?;
        // SAFETY: as in `read`.
        self.event = Some(unsafe { self.device.start_write(self.stream, self.range(n), dst, n) }?);
        Ok(())
    }
}

impl Drop for Slice {
    fn drop(&mut self) {
        match (self.block.take(), self.event.take()) {
            (Some(block), Some(event)) => block.release_after(vec![Arc::new(event)]), // an error left it behind
            // A transfer that nobody has an event of may be using it.
            (Some(block), None) if self.device.is_lost() => mem::forget(block),
            _ => {}
        }
    }
}

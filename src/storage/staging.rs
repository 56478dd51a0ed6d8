//! Large transfers between the host and a device with memory of its own.
//!
//! From ordinary memory a driver transfers at a third of the bus's speed or less, since it copies to pinned memory of
//! its own with one thread. Here all threads of the CPU's pool copy, a slice at a time, into one of a few pinned
//! slices, while the device transfers the slices before it. What the caller sees is the same: the call returns when
//! everything is where it should be.

#[cfg(test)]
mod tests;

use std::ptr::NonNull;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use rayon::prelude::*;

use super::driver::Failure;
use super::driver::host::Host;
use super::pinned::{Budget, Pinned, PinnedPool, PinnedSource, PinnedStats};
use super::{Config, Driver, registry};
use crate::device::opencl::{self, ClBuffer, ClDevice, ClEvent, ClPinned};
use crate::device::{DeviceKind, StreamId, cpu};
use crate::{Device, Result};

/// Slices of a transfer: as many as keep the device busy while one is filled and one is emptied.
const RING: usize = 6;
/// Slice sizes, by the least transfer that uses them. Below the first the driver's own way is as fast. There are few so
/// that transfers of all sizes share the same pinned blocks.
const SLICES: [(usize, usize); 2] = [(32 << 20, 4 << 20), (4 << 20, 1 << 20)];
/// What one thread copies at a time.
const PIECE: usize = 128 << 10;
/// The part of the machine's memory that may be pinned, and how much where that is not known.
const PINNED_PART: u64 = 8;
const PINNED_UNKNOWN: u64 = 1 << 30;
/// How often the background thread asks (`pinned_use_background_threads`), as in PyTorch.
const POLL: Duration = Duration::from_micros(100);

/// A device as a source of pinned memory.
struct Source(&'static ClDevice);

impl PinnedSource for Source {
    type Memory = ClPinned;
    type Event = ClEvent;

    fn create(&self, bytes: usize) -> Result<ClPinned, Failure> {
        self.0.create_pinned(bytes).map_err(|e| Failure::Other(self.0.error(e)))
    }

    fn is_done(&self, event: &ClEvent) -> bool {
        event.is_done()
    }
}

type Pool = PinnedPool<Source>;

static POOLS: RwLock<Vec<(Device, &'static Pool)>> = RwLock::new(Vec::new());

/// The pool of a device, if anything was staged for it yet.
fn existing_pool(device: Device) -> Option<&'static Pool> {
    let pools = POOLS.read().unwrap_or_else(PoisonError::into_inner);
    pools.iter().find(|(of, _)| *of == device).map(|(_, pool)| *pool)
}

/// The pool of a device, made on first use, never taken down.
fn pool(device: &'static ClDevice) -> &'static Pool {
    if let Some(pool) = existing_pool(device.device()) {
        return pool;
    }
    static MAKING: std::sync::Mutex<()> = std::sync::Mutex::new(());
    let _one_at_a_time = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
    existing_pool(device.device()).unwrap_or_else(|| {
        let config = registry::config().cloned().unwrap_or_default(); // a mistake in it is told when the allocator is made
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

/// Reads bytes of a buffer to the host, waits for them and reports what a kernel of this thread found wrong.
pub(super) fn read(device: &'static ClDevice, src: &ClBuffer, off: usize, dst: &mut [u8]) -> Result<()> {
    match slice_size(device, dst.len()).and_then(|slice| Ring::new(pool(device), device, slice, dst.len())) {
        Some(ring) => ring.read(src, off, dst),
        None => device.read(src, off, dst),
    }
}

/// Writes bytes from the host to a buffer and waits until they are there.
pub(super) fn write(device: &'static ClDevice, src: &[u8], dst: &ClBuffer, off: usize) -> Result<()> {
    match slice_size(device, src.len()).and_then(|slice| Ring::new(pool(device), device, slice, src.len())) {
        Some(ring) => ring.write(src, dst, off),
        None => device.write(src, dst, off),
    }
}

/// How to cut a transfer; `None` where the driver's own way is better.
fn slice_size(device: &ClDevice, bytes: usize) -> Option<usize> {
    let info = device.info();
    let (_, slice) = SLICES.iter().find(|(least, _)| bytes >= *least)?;
    (!info.unified_memory && info.kind != DeviceKind::Cpu).then_some(*slice)
}

/// The pinned slices of one transfer, used in turn.
struct Ring {
    device: &'static ClDevice,
    slices: Vec<Slice>,
    bytes: usize,
}

impl Ring {
    /// Slices of `bytes` for a transfer of `total`; `None` where there is not enough pinned memory to be worth it.
    fn new(pool: &'static Pool, device: &'static ClDevice, bytes: usize, total: usize) -> Option<Ring> {
        let wanted = total.div_ceil(bytes).min(RING);
        let stream = device.current_stream(); // this thread's: the pool's have none
        let slice = |block| Slice { device, stream, block: Some(block), event: None };
        let slices: Vec<Slice> = (0..wanted).map_while(|_| pool.alloc(bytes)).map(slice).collect();
        (slices.len() >= wanted.min(2)).then_some(Ring { device, slices, bytes })
    }

    // Both work inside the pool: there a slice is shared out faster than from outside.

    fn read(self, src: &ClBuffer, off: usize, dst: &mut [u8]) -> Result<()> {
        let device = self.device;
        cpu::run(|| self.read_slices(src, off, dst))?;
        device.report_faults() // this thread's
    }

    fn write(self, src: &[u8], dst: &ClBuffer, off: usize) -> Result<()> {
        cpu::run(|| self.write_slices(src, dst, off))
    }

    fn read_slices(mut self, src: &ClBuffer, off: usize, dst: &mut [u8]) -> Result<()> {
        let (slices, total) = (self.slices.len(), dst.len());
        let bytes = self.bytes;
        let start = |slice: &mut Slice, chunk: usize| match chunk * bytes {
            at if at < total => slice.read(src, off + at, bytes.min(total - at)),
            _ => Ok(()),
        };
        self.slices.iter_mut().enumerate().try_for_each(|(chunk, slice)| start(slice, chunk))?;
        for (chunk, part) in dst.chunks_mut(bytes).enumerate() {
            let slice = &mut self.slices[chunk % slices];
            copy(part, slice.bytes(part.len())?);
            start(slice, chunk + slices)?;
        }
        Ok(())
    }

    fn write_slices(mut self, src: &[u8], dst: &ClBuffer, off: usize) -> Result<()> {
        let slices = self.slices.len();
        for (chunk, part) in src.chunks(self.bytes).enumerate() {
            let slice = &mut self.slices[chunk % slices];
            copy(slice.bytes(part.len())?, part);
            slice.write(dst, off + chunk * self.bytes, part.len())?;
        }
        self.slices.iter_mut().try_for_each(Slice::wait)
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
        let (memory, offset) = block.memory();
        debug_assert!(offset + block.bytes() <= memory.bytes());
        // SAFETY: the pool's blocks lie inside their memory.
        unsafe { memory.start().add(offset) }
    }

    fn wait(&mut self) -> Result<()> {
        if let Some(event) = &self.event {
            self.device.wait(event)?;
        }
        self.event = None;
        Ok(())
    }

    /// The first `n` bytes, when the transfer that uses them is done.
    fn bytes(&mut self, n: usize) -> Result<&mut [u8]> {
        self.wait()?;
        // SAFETY: `n` initialised bytes that are this block's alone, used by no transfer, since the only one is done.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.range(n).as_ptr(), n) })
    }

    fn read(&mut self, src: &ClBuffer, off: usize, n: usize) -> Result<()> {
        self.wait()?;
        // SAFETY: as in `bytes`; nothing touches them before `wait` has seen the event done, and on drop the pool gets
        // the block with the event.
        self.event = Some(unsafe { self.device.start_read(self.stream, src, off, self.range(n), n) }?);
        Ok(())
    }

    fn write(&mut self, dst: &ClBuffer, off: usize, n: usize) -> Result<()> {
        self.wait()?;
        // SAFETY: as in `read`.
        self.event = Some(unsafe { self.device.start_write(self.stream, self.range(n), dst, off, n) }?);
        Ok(())
    }
}

impl Drop for Slice {
    fn drop(&mut self) {
        if let (Some(block), Some(event)) = (self.block.take(), self.event.take()) {
            block.release_after(event); // an error left it behind
        }
    }
}

/// Copies between slices of one length with all threads of the pool.
fn copy(dst: &mut [u8], src: &[u8]) {
    if dst.len() <= PIECE {
        return dst.copy_from_slice(src);
    }
    cpu::run(|| dst.par_chunks_mut(PIECE).zip(src.par_chunks(PIECE)).for_each(|(d, s)| d.copy_from_slice(s)));
}

/// Pinned host memory: what large transfers to and from a device with memory of its own go through.
impl Device {
    /// The pinned memory held for this device's transfers (`torch.cuda.host_memory_stats`): all zeros for the CPU, and
    /// for devices that share the host's memory, which need none.
    ///
    /// ```
    /// use claystone::Device;
    /// let pinned = Device::best().pinned_memory_stats()?;
    /// assert!(pinned.active_bytes.current <= pinned.allocated_bytes.current);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::NoDevice`](crate::Error::NoDevice) where the device is not there; likewise below.
    pub fn pinned_memory_stats(&self) -> Result<PinnedStats> {
        Ok(self.pinned_pool()?.map(Pool::stats).unwrap_or_default())
    }

    /// Sets the peaks to the current values (`torch.cuda.reset_peak_host_memory_stats`).
    pub fn reset_peak_pinned_memory_stats(&self) -> Result<()> {
        self.pinned_pool()?.inspect(|pool| pool.reset_peak_stats());
        Ok(())
    }

    /// Sets the sums and counts to zero (`torch.cuda.reset_accumulated_host_memory_stats`).
    pub fn reset_accumulated_pinned_memory_stats(&self) -> Result<()> {
        self.pinned_pool()?.inspect(|pool| pool.reset_accumulated_stats());
        Ok(())
    }

    /// Gives the pinned memory that no transfer uses back to the driver, except the reserve of
    /// `pinned_reserve_segment_size_mb`.
    pub fn empty_pinned_cache(&self) -> Result<()> {
        self.pinned_pool()?.inspect(|pool| pool.empty_cache());
        Ok(())
    }

    fn pinned_pool(&self) -> Result<Option<&'static Pool>> {
        if let Device::OpenCL(index) = *self {
            opencl::info(index)?;
        }
        Ok(existing_pool(*self))
    }
}

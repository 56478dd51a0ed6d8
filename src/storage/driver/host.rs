//! Host memory: the CPU device's segments, and vectors taken over from their owners.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::mem::ManuallyDrop;
use std::ptr::NonNull;

use super::{At, Driver, Failure, Marker, MarkerKind, Memory, MemoryKind};
use crate::device::StreamId;
use crate::{Device, Element, Error, Result};

/// What segments are aligned to.
const ALIGNMENT: usize = 512;

/// An owned run of initialised host memory.
#[derive(Debug)]
pub(crate) struct HostMemory {
    /// Where the allocation begins and how it was made.
    base: NonNull<u8>,
    layout: Layout,
    /// Where the usable, aligned bytes begin, and how many there are.
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it owns its bytes as a `Box<[u8]>` does and gives out no reference to them itself.
unsafe impl Send for HostMemory {}
// SAFETY: as above; whoever makes references from `start()` says under which lock.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Zeroed memory aligned to [`ALIGNMENT`]; `None` where there is none.
    pub(crate) fn zeroed(bytes: usize) -> Option<HostMemory> {
        // Ordinary alignment with slack: such requests come zeroed from the system, page by page as they are touched.
        let layout = Layout::from_size_align(bytes.checked_add(ALIGNMENT)?, 16).ok()?;
        // SAFETY: the layout's size is at least ALIGNMENT, so not zero.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        let slack = base.addr().get().next_multiple_of(ALIGNMENT) - base.addr().get();
        // SAFETY: slack < ALIGNMENT, so `start` and the `bytes` after it lie inside the allocation.
        let start = unsafe { base.add(slack) };
        Some(HostMemory { base, layout, start, bytes })
    }

    /// Takes over the elements of a vector, where they are.
    pub(crate) fn from_vec<T: Element>(v: Vec<T>) -> HostMemory {
        let bytes = size_of_val(v.as_slice());
        let mut v = ManuallyDrop::new(v);
        let layout = Layout::array::<T>(v.capacity()).expect("a vector's layout is valid");
        // SAFETY: a vector's pointer is never null. The vector is forgotten, its elements are Copy (nothing to drop),
        // and its memory came from the global allocator with exactly this layout: `drop` may return it.
        let base = unsafe { NonNull::new_unchecked(v.as_mut_ptr().cast::<u8>()) };
        HostMemory { base, layout, start: base, bytes }
    }

    /// The first usable byte. Memory stays where it is until dropped.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        if self.layout.size() > 0 {
            // SAFETY: allocated with this layout by the global allocator, and owned.
            unsafe { dealloc(self.base.as_ptr(), self.layout) }
        }
    }
}

/// The CPU device's driver.
#[derive(Debug)]
pub(crate) struct Host {
    capacity: u64,
}

impl Host {
    /// As much memory as the machine (or the container it runs in) has: Linux promises more than it has and kills
    /// who believes it, so segments beyond that are refused.
    pub(crate) fn new() -> Host {
        Host { capacity: physical_memory().unwrap_or(u64::MAX) }
    }
}

impl Driver for Host {
    fn device(&self) -> Device {
        Device::Cpu
    }

    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn largest_segment(&self) -> usize {
        isize::MAX as usize - ALIGNMENT
    }

    fn create(&self, bytes: usize) -> Result<Memory, Failure> {
        HostMemory::zeroed(bytes).map(|m| Memory(MemoryKind::Host(m))).ok_or(Failure::HostMemory)
    }

    fn commit(&self, _: &Memory) -> Result<(), Failure> {
        Ok(()) // pages come at first touch; `capacity` is what keeps the promise
    }

    fn synchronize(&self) -> Result<()> {
        Ok(()) // work on the host is done when its call returns
    }

    fn record(&self, _: StreamId) -> Result<Marker> {
        Ok(Marker(MarkerKind::Done))
    }

    fn is_done(&self, _: &Marker) -> bool {
        true
    }

    fn wait(&self, _: &Marker) -> Result<()> {
        Ok(())
    }

    fn stream_waits(&self, _: StreamId, _: &Marker) -> Result<()> {
        Ok(())
    }

    fn copy(&self, _: StreamId, from: At<'_>, to: At<'_>, bytes: usize) -> Result<()> {
        let (from, to) = (bytes_at(from, bytes)?, bytes_at(to, bytes)?);
        // SAFETY: both ranges are inside their memory (checked); the allocator, which alone calls this, owns them and
        // holds the locks of the blocks they belong to.
        unsafe { std::ptr::copy(from.as_ptr(), to.as_ptr(), bytes) }
        Ok(())
    }

    fn read(&self, from: At<'_>, to: &mut [u8]) -> Result<()> {
        let from = bytes_at(from, to.len())?;
        // SAFETY: as in `copy`.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_mut_ptr(), to.len()) }
        Ok(())
    }

    fn write(&self, from: &[u8], to: At<'_>) -> Result<()> {
        let to = bytes_at(to, from.len())?;
        // SAFETY: as in `copy`.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), from.len()) }
        Ok(())
    }
}

/// The first of `bytes` bytes of host memory.
fn bytes_at((memory, offset): At<'_>, bytes: usize) -> Result<NonNull<u8>> {
    match &memory.0 {
        MemoryKind::Host(m) if offset.checked_add(bytes).is_some_and(|end| end <= m.bytes) => {
            // SAFETY: inside the memory.
            Ok(unsafe { m.start.add(offset) })
        }
        _ => Err(Error::invalid("copy", format!("{bytes} bytes at {offset} are not in this host memory"))),
    }
}

/// Bytes of physical memory, or of the control group's limit where that is less.
#[cfg(target_os = "linux")]
fn physical_memory() -> Option<u64> {
    let number = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let total = line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)?;
    let limit = number("/sys/fs/cgroup/memory.max").or_else(|| number("/sys/fs/cgroup/memory/memory.limit_in_bytes"));
    Some(limit.map_or(total, |limit| limit.min(total)))
}

#[cfg(not(target_os = "linux"))]
fn physical_memory() -> Option<u64> {
    None
}

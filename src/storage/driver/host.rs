//! Host memory: the CPU device's segments, and vectors taken over from their owners.
//!
//! Small segments come from the global allocator. On Linux large segments are mapped from the kernel, in huge pages if
//! possible. Linux can also reserve addresses, whose memory is committed and released page by page. On machines with
//! several NUMA nodes a mapped segment prefers memory of the requesting thread's node, through the system call that
//! libnuma uses.

#[cfg_attr(not(all(target_os = "linux", not(miri))), path = "host/no_map.rs")]
mod map;
#[cfg(test)]
mod tests;

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::slice;

use super::{ALIGNMENT, At, Driver, Failure, Memory, MemoryKind};
use crate::device::cpu::bulk;
use crate::device::{StreamId, profiler};
use crate::storage::config::Config;
use crate::{Device, Element, Error, Result};
use map::{HUGE_PAGE_BYTES, Mapping};

/// An owned range of host memory. All bytes are committed, except in reserved memory. Committed bytes are initialised.
#[derive(Debug)]
pub(crate) struct HostMemory {
    origin: Origin,
    /// The address of the first usable byte. Segments are aligned to [`ALIGNMENT`].
    start: NonNull<u8>,
    bytes: usize,
    /// True if profiles record the release, as they do for memory of the CPU device's drivers but not for other code's memory.
    is_recorded: bool,
}

/// The origin of host memory, which decides how the memory is released.
#[derive(Debug)]
enum Origin {
    /// The global allocator: the start and the layout of the allocation.
    Heap(NonNull<u8>, Layout),
    Mapped(Mapping),
    /// The owner of other code's memory. The memory is valid as long as the owner lives.
    Custom(Box<dyn Any + Send + Sync>),
}

// SAFETY: the value owns its bytes as a `Box<[u8]>` does and gives out no references to them.
unsafe impl Send for HostMemory {}
// SAFETY: as above; code that makes references from `start()` names the lock that protects the bytes.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Allocates zeroed memory aligned to [`ALIGNMENT`]. `None` if there is not enough memory.
    pub(crate) fn zeroed(bytes: usize) -> Option<HostMemory> {
        // Ordinary alignment plus slack: for such allocations the system provides zeroed pages when they are first accessed.
        let layout = Layout::from_size_align(bytes.checked_add(ALIGNMENT)?, 16).ok()?;
        // SAFETY: the layout's size is at least ALIGNMENT, so not zero.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        let slack = base.addr().get().next_multiple_of(ALIGNMENT) - base.addr().get();
        // SAFETY: slack < ALIGNMENT, so `start` and the `bytes` bytes after it are inside the allocation.
        let start = unsafe { base.add(slack) };
        Some(HostMemory { origin: Origin::Heap(base, layout), start, bytes, is_recorded: true })
    }

    fn mapped(mapping: Mapping, bytes: usize) -> HostMemory {
        HostMemory { start: mapping.start(), origin: Origin::Mapped(mapping), bytes, is_recorded: true }
    }

    /// # Safety
    /// The bytes are initialised, valid and used by no other code as long as `owner` lives.
    pub(in crate::storage) unsafe fn owned_by(
        start: NonNull<u8>,
        bytes: usize,
        owner: Box<dyn Any + Send + Sync>,
        is_recorded: bool,
    ) -> HostMemory {
        HostMemory { origin: Origin::Custom(owner), start, bytes, is_recorded }
    }

    pub(super) fn owner(&self) -> Option<&(dyn Any + Send + Sync)> {
        match &self.origin {
            Origin::Custom(owner) => Some(&**owner),
            Origin::Heap(..) | Origin::Mapped(_) => None,
        }
    }

    /// Takes over the elements of a vector without copying.
    pub(crate) fn from_vec<T: Element>(v: Vec<T>) -> HostMemory {
        let bytes = size_of_val(v.as_slice());
        let mut v = ManuallyDrop::new(v);
        let layout = Layout::array::<T>(v.capacity()).expect("a vector's layout is valid");
        // SAFETY: a vector's pointer is never null. The vector is forgotten, its elements are Copy (nothing to drop),
        // and its memory came from the global allocator with exactly this layout: `drop` may return it.
        let base = unsafe { NonNull::new_unchecked(v.as_mut_ptr().cast::<u8>()) };
        HostMemory { origin: Origin::Heap(base, layout), start: base, bytes, is_recorded: true }
    }

    /// Returns the first usable byte, whose address does not change until drop.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        let _recorded =
            self.is_recorded.then(|| profiler::segment_span("release host memory", Some(Device::Cpu), self.bytes));
        if let Origin::Heap(base, layout) = self.origin
            && layout.size() > 0
        {
            // SAFETY: the global allocator allocated this memory with this layout, and `self` owns the memory.
            unsafe { dealloc(base.as_ptr(), layout) }
        }
    }
}

/// The CPU device's driver.
#[derive(Debug)]
pub(crate) struct Host {
    capacity: u64,
    numa_local: bool,
}

impl Host {
    /// Creates the driver. Its capacity is the memory of the machine, or of its container. Larger requests are refused,
    /// because Linux would grant them and later kill the process that uses the memory.
    pub(crate) fn new(config: &Config) -> Host {
        Host { capacity: physical_memory().unwrap_or(u64::MAX), numa_local: config.numa_local && map::several_nodes() }
    }
}

// SAFETY: segments come from the global allocator or a mapping, have the requested size, and are used by no other code.
unsafe impl Driver for Host {
    fn device(&self) -> Device {
        Device::Cpu
    }

    fn capacity(&self) -> u64 {
        self.capacity
    }

    fn largest_segment(&self) -> usize {
        isize::MAX as usize - ALIGNMENT
    }

    /// Linux allocates pages when they are first accessed. The check against `capacity` ensures that enough pages exist.
    fn create(&self, bytes: usize) -> Result<Memory, Failure> {
        let _recorded = profiler::segment_span("allocate host memory", Some(Device::Cpu), bytes);
        let mapped = if bytes >= HUGE_PAGE_BYTES { Mapping::committed(bytes, self.numa_local) } else { None };
        let memory = match mapped {
            Some(mapping) => Some(HostMemory::mapped(mapping, bytes)),
            None => HostMemory::zeroed(bytes),
        };
        memory.map(|m| Memory(MemoryKind::Host(m))).ok_or(Failure::HostMemory)
    }

    fn page(&self) -> usize {
        map::page_bytes()
    }

    fn reserve(&self, bytes: usize) -> Option<Memory> {
        let mapping = Mapping::reserved(bytes, self.numa_local)?;
        Some(Memory(MemoryKind::Host(HostMemory::mapped(mapping, bytes))))
    }

    fn extend(&self, memory: &Memory, from: usize, to: usize) -> Result<(), Failure> {
        match &memory.0 {
            MemoryKind::Host(HostMemory { origin: Origin::Mapped(mapping), bytes, .. })
                if from <= to && to <= *bytes =>
            {
                let _recorded = profiler::segment_span("commit host memory", Some(Device::Cpu), to - from);
                if mapping.extend(from, to) { Ok(()) } else { Err(Failure::HostMemory) }
            }
            _ => Err(Failure::Other(Error::invalid("extend", format!("{from}..{to} are not in reserved host memory")))),
        }
    }

    unsafe fn shrink(&self, memory: &Memory, from: usize, to: usize) {
        if let MemoryKind::Host(HostMemory { origin: Origin::Mapped(mapping), .. }) = &memory.0 {
            let _recorded = profiler::segment_span("give back host memory", Some(Device::Cpu), to.saturating_sub(from));
            mapping.shrink(from, to);
        }
    }

    unsafe fn copy(&self, _: StreamId, from: At<'_>, to: At<'_>, bytes: usize) -> Result<()> {
        let (from, to) = (bytes_at(from, bytes)?, bytes_at(to, bytes)?);
        // SAFETY: both ranges are inside their memory and committed (checked), and no other code conflicts with the
        // copy, as `Driver::copy` requires.
        unsafe { std::ptr::copy(from.as_ptr(), to.as_ptr(), bytes) }
        Ok(())
    }

    unsafe fn relocate(&self, moves: &[(At<'_>, At<'_>, usize)]) -> Result<bool> {
        let place = |&(from, to, bytes): &(_, _, usize)| Ok((bytes_at(from, bytes)?, bytes_at(to, bytes)?));
        let places = moves.iter().map(place).collect::<Result<Vec<_>>>()?;
        for ((start, target), &((memory, offset), _, bytes)) in places.into_iter().zip(moves) {
            let mut there = offset; // memory before this offset is released, except pages that also contain other bytes
            for at in (0..bytes).step_by(HUGE_PAGE_BYTES) {
                let n = HUGE_PAGE_BYTES.min(bytes - at);
                let end = offset + at + n;
                // SAFETY: the bytes are inside both ranges, which are committed (checked; only bytes that were copied
                // are released below), and no other code conflicts with the copy, as `Driver::relocate` requires.
                unsafe { std::ptr::copy(start.as_ptr().add(at), target.as_ptr().add(at), n) }
                // SAFETY: no code needs the bytes that were just copied.
                unsafe { self.shrink(memory, there, end) }
                there = end - end.checked_rem(self.page()).unwrap_or(0).min(n);
            }
        }
        Ok(true)
    }

    unsafe fn read(&self, from: At<'_>, to: &mut [u8]) -> Result<()> {
        let from = bytes_at(from, to.len())?;
        // SAFETY: the range is inside committed memory, and no other code writes to it, as `Driver::read` requires.
        bulk::copy(to, unsafe { slice::from_raw_parts(from.as_ptr(), to.len()) });
        Ok(())
    }

    unsafe fn write(&self, from: &[u8], to: At<'_>) -> Result<()> {
        let to = bytes_at(to, from.len())?;
        // SAFETY: the range is inside committed memory, and no other code accesses it, as `Driver::write` requires.
        bulk::copy(unsafe { slice::from_raw_parts_mut(to.as_ptr(), from.len()) }, from);
        Ok(())
    }
}

/// Checks that `bytes` bytes of host memory from `offset` on are committed, and returns their address.
fn bytes_at((memory, offset): At<'_>, bytes: usize) -> Result<NonNull<u8>> {
    let is_committed = |origin: &Origin, end| match origin {
        Origin::Heap(..) | Origin::Custom(_) => true,
        Origin::Mapped(mapping) => mapping.is_committed(offset, end),
    };
    match (&memory.0, offset.checked_add(bytes)) {
        (MemoryKind::Host(m), Some(end)) if end <= m.bytes && is_committed(&m.origin, end) => {
            // SAFETY: the address is inside the memory, as checked above.
            Ok(unsafe { m.start.add(offset) })
        }
        _ => Err(Error::invalid("copy", format!("{bytes} bytes at {offset} are not in this host memory"))),
    }
}

/// Returns the size of physical memory in bytes, or the control group's limit if that is lower.
#[cfg(not(miri))]
fn physical_memory() -> Option<u64> {
    let number = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let total = crate::device::system::total_memory()?;
    let limit = number("/sys/fs/cgroup/memory.max").or_else(|| number("/sys/fs/cgroup/memory/memory.limit_in_bytes"));
    Some(limit.map_or(total, |limit| limit.min(total)))
}

#[cfg(miri)]
fn physical_memory() -> Option<u64> {
    None
}

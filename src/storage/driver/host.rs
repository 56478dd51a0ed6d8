//! Host memory: the CPU device's segments, and vectors taken over from their owners.
//!
//! Small segments come from the global allocator. On Linux large ones are mapped from the kernel, in huge pages where it
//! has them; and addresses can be reserved that get memory page by page and give it back so. On machines with several
//! NUMA nodes a mapped segment prefers the memory of the node whose thread asked for it, through the system call that
//! libnuma would make.

#[cfg_attr(not(all(target_os = "linux", not(miri))), path = "host/no_map.rs")]
mod map;
#[cfg(test)]
mod tests;

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;

use super::{At, Driver, Failure, Memory, MemoryKind};
use crate::device::{StreamId, profiler};
use crate::storage::config::Config;
use crate::{Device, Element, Error, Result};
use map::{HUGE, Mapping};

/// What segments are aligned to.
const ALIGNMENT: usize = 512;

/// An owned run of host memory, initialised wherever it is committed: all of it, unless it was reserved.
#[derive(Debug)]
pub(crate) struct HostMemory {
    origin: Origin,
    /// Where the usable, aligned bytes begin, and how many there are.
    start: NonNull<u8>,
    bytes: usize,
}

#[derive(Debug)]
enum Origin {
    /// The global allocator: where the allocation begins and how it was made.
    Heap(NonNull<u8>, Layout),
    Mapped(Mapping),
    /// Of another driver, valid while this lives.
    Custom(Box<dyn Any + Send + Sync>),
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
        Some(HostMemory { origin: Origin::Heap(base, layout), start, bytes })
    }

    fn mapped(mapping: Mapping, bytes: usize) -> HostMemory {
        HostMemory { start: mapping.start(), origin: Origin::Mapped(mapping), bytes }
    }

    /// # Safety
    /// The bytes are initialised, valid and nobody else's as long as `owner` lives.
    pub(super) unsafe fn owned_by(start: NonNull<u8>, bytes: usize, owner: Box<dyn Any + Send + Sync>) -> HostMemory {
        HostMemory { origin: Origin::Custom(owner), start, bytes }
    }

    /// What keeps memory of another driver.
    pub(super) fn owner(&self) -> Option<&(dyn Any + Send + Sync)> {
        match &self.origin {
            Origin::Custom(owner) => Some(&**owner),
            Origin::Heap(..) | Origin::Mapped(_) => None,
        }
    }

    /// Takes over the elements of a vector, where they are.
    pub(crate) fn from_vec<T: Element>(v: Vec<T>) -> HostMemory {
        let bytes = size_of_val(v.as_slice());
        let mut v = ManuallyDrop::new(v);
        let layout = Layout::array::<T>(v.capacity()).expect("a vector's layout is valid");
        // SAFETY: a vector's pointer is never null. The vector is forgotten, its elements are Copy (nothing to drop),
        // and its memory came from the global allocator with exactly this layout: `drop` may return it.
        let base = unsafe { NonNull::new_unchecked(v.as_mut_ptr().cast::<u8>()) };
        HostMemory { origin: Origin::Heap(base, layout), start: base, bytes }
    }

    fn is_committed(&self, from: usize, to: usize) -> bool {
        match &self.origin {
            Origin::Heap(..) | Origin::Custom(_) => true,
            Origin::Mapped(mapping) => mapping.is_committed(from, to),
        }
    }

    /// The first usable byte. Memory stays where it is until dropped.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        let _recorded = profiler::segment("release host memory", Some(Device::Cpu), self.bytes);
        if let Origin::Heap(base, layout) = self.origin
            && layout.size() > 0
        {
            // SAFETY: allocated with this layout by the global allocator, and owned.
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
    /// As much memory as the machine (or the container it runs in) has: Linux promises more than it has and kills
    /// who believes it, so segments beyond that are refused.
    pub(crate) fn new(config: &Config) -> Host {
        Host { capacity: physical_memory().unwrap_or(u64::MAX), numa_local: config.numa_local }
    }
}

// SAFETY: segments are of the global allocator or mapped, of the size asked for and nobody else's.
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

    fn create(&self, bytes: usize) -> Result<Memory, Failure> {
        let _recorded = profiler::segment("allocate host memory", Some(Device::Cpu), bytes);
        let mapped = if bytes >= HUGE { Mapping::committed(bytes, self.numa_local) } else { None };
        let memory = match mapped {
            Some(mapping) => Some(HostMemory::mapped(mapping, bytes)),
            None => HostMemory::zeroed(bytes),
        };
        memory.map(|m| Memory(MemoryKind::Host(m))).ok_or(Failure::HostMemory)
    }

    fn commit(&self, memory: Memory) -> Result<Memory, Failure> {
        Ok(memory) // pages come at first touch; `capacity` is what keeps the promise
    }

    fn page(&self) -> usize {
        map::page()
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
                let _recorded = profiler::segment("commit host memory", Some(Device::Cpu), to - from);
                if mapping.extend(from, to) { Ok(()) } else { Err(Failure::HostMemory) }
            }
            _ => Err(Failure::Other(Error::invalid("extend", format!("{from}..{to} are not in reserved host memory")))),
        }
    }

    unsafe fn shrink(&self, memory: &Memory, from: usize, to: usize) {
        if let MemoryKind::Host(HostMemory { origin: Origin::Mapped(mapping), .. }) = &memory.0 {
            let _recorded = profiler::segment("give back host memory", Some(Device::Cpu), to.saturating_sub(from));
            mapping.shrink(from, to);
        }
    }

    unsafe fn copy(&self, _: StreamId, from: At<'_>, to: At<'_>, bytes: usize) -> Result<()> {
        let (from, to) = (bytes_at(from, bytes)?, bytes_at(to, bytes)?);
        // SAFETY: both ranges are inside their memory and committed (checked), and the caller's as `Driver::copy` says.
        unsafe { std::ptr::copy(from.as_ptr(), to.as_ptr(), bytes) }
        Ok(())
    }

    fn relocates(&self) -> bool {
        true
    }

    unsafe fn relocate(&self, moves: &[(At<'_>, At<'_>, usize)]) -> Result<()> {
        let place = |&(from, to, bytes): &(_, _, usize)| Ok((bytes_at(from, bytes)?, bytes_at(to, bytes)?));
        let places = moves.iter().map(place).collect::<Result<Vec<_>>>()?;
        for ((start, target), &((memory, offset), _, bytes)) in places.into_iter().zip(moves) {
            let mut there = offset; // up to where the memory is gone, but for what shares a page with what is not
            for at in (0..bytes).step_by(HUGE) {
                let n = HUGE.min(bytes - at);
                let end = offset + at + n;
                // SAFETY: inside both ranges, which are committed (checked; what is given back below was copied before),
                // and the caller's as `Driver::relocate` says.
                unsafe { std::ptr::copy(start.as_ptr().add(at), target.as_ptr().add(at), n) }
                // SAFETY: nobody needs what was just copied.
                unsafe { self.shrink(memory, there, end) }
                there = end - end.checked_rem(self.page()).unwrap_or(0).min(n);
            }
        }
        Ok(())
    }

    unsafe fn read(&self, from: At<'_>, to: &mut [u8]) -> Result<()> {
        let from = bytes_at(from, to.len())?;
        // SAFETY: as in `copy`.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_mut_ptr(), to.len()) }
        Ok(())
    }

    unsafe fn write(&self, from: &[u8], to: At<'_>) -> Result<()> {
        let to = bytes_at(to, from.len())?;
        // SAFETY: as in `copy`.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_ptr(), from.len()) }
        Ok(())
    }
}

/// The first of `bytes` bytes of host memory.
fn bytes_at((memory, offset): At<'_>, bytes: usize) -> Result<NonNull<u8>> {
    match (&memory.0, offset.checked_add(bytes)) {
        (MemoryKind::Host(m), Some(end)) if end <= m.bytes && m.is_committed(offset, end) => {
            // SAFETY: inside the memory.
            Ok(unsafe { m.start.add(offset) })
        }
        _ => Err(Error::invalid("copy", format!("{bytes} bytes at {offset} are not in this host memory"))),
    }
}

/// Bytes of physical memory, or of the control group's limit where that is less.
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

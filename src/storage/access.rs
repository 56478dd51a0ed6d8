//! Access to a storage's bytes: host slices under their locks, and transfers between any two storages.

use std::ops::Range;
use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};

use bytemuck::{AnyBitPattern, NoUninit};
use smallvec::SmallVec;

use super::absent::{self, Uncalled};
use super::allocation::{Allocation, Backing, Storage};
use super::block::ReaderCount;
use super::driver::MemoryKind;
use super::driver::opencl::ClBlockLocation;
use super::driver::staging::{self, PinnedBytes};
use super::{captured, host_borrow};
use crate::device::cpu::bulk::{copy, fill, to_vec};
use crate::device::cpu::huge_pages::advise_huge;
use crate::device::profiler::{self, RecordKind, Span};
use crate::device::{capture, read, write};
use crate::{Device, Error, Result};

/// Size limit, in bytes, of the host buffer that copies between two devices go through.
const MAX_STAGING_BYTES: usize = 16 << 20;

/// Error text for reading a storage during graph capture.
const READ_DURING_CAPTURE: &str = "no values are computed yet that could be read";

/// Error text for writing host values to a storage during graph capture.
const WRITE_DURING_CAPTURE: &str =
    "host values would be written once, not by each replay: make the tensor outside the capture";

/// A lock that is held while slices of an allocation exist, or while a transfer of its bytes is enqueued.
enum HeldLock<'a> {
    Read(#[expect(dead_code, reason = "held")] RwLockReadGuard<'a, ReaderCount>),
    Write(#[expect(dead_code, reason = "held")] RwLockWriteGuard<'a, ReaderCount>),
}

/// Locks an allocation's bytes for writing. Fails while a closure of [`Storage::with_elements`] reads the bytes.
#[inline]
fn lock_for_writing(lock: &RwLock<ReaderCount>) -> Result<RwLockWriteGuard<'_, ReaderCount>> {
    let guard = write(lock);
    match guard.has_readers() {
        false => Ok(guard),
        true => Err(host_borrow::write_during_read_error()),
    }
}

/// Calls `f` with the bytes of storages on the CPU device, in the given order: `reads` as shared slices, `writes` as exclusive slices.
///
/// Locks each allocation once, in address order, so that concurrent calls cannot deadlock; `f` must not lock storages. Empty storages are not locked.
/// A storage may appear several times in `reads`. Returns [`Error::Invalid`] if a storage is in both lists, or twice in `writes`.
///
/// In a dry run `f` is not called if any of the storages is simulated, unless all are small and their values are known.
pub(crate) fn with_host<R: Uncalled>(
    reads: &[&Storage],
    writes: &[&Storage],
    f: impl FnOnce(&[&[u8]], &mut [&mut [u8]]) -> R,
) -> Result<R> {
    // The allocations are pushed one by one, because `extend` and `collect` are not inlined, which slows small operations down.
    let mut order: SmallVec<[(&Allocation, bool); 8]> = SmallVec::new();
    reads.iter().for_each(|s| order.push((s.allocation(), false)));
    writes.iter().for_each(|s| order.push((s.allocation(), true)));
    order.sort_unstable_by_key(|&(allocation, _)| std::ptr::from_ref(allocation).addr());

    let mut guards: SmallVec<[HeldLock; 8]> = SmallVec::new();
    let mut last: Option<(&Allocation, bool)> = None;
    for &(allocation, write) in &order {
        let Some(lock) = allocation.host_lock() else {
            if matches!(allocation.backing, Backing::Empty) {
                continue;
            }
            allocation.check_memory()?;
            return Err(Error::invalid("with_host", format!("storage is on {}", allocation.device())));
        };
        if let Some((_, last_write)) = last.filter(|(last, _)| std::ptr::eq(*last, allocation)) {
            if write || last_write {
                return Err(Error::invalid("with_host", "a storage to be written is also read or written elsewhere"));
            }
            continue;
        }
        last = Some((allocation, write));
        // Allocators only try to lock blocks, so the locks of lower addresses may be held while a block is brought back.
        guards.push(allocation.lock_present(|| match write {
            true => Ok(HeldLock::Write(lock_for_writing(lock)?)),
            false => Ok(HeldLock::Read(read(lock))),
        })?);
        if let Some(pinned) = allocation.pinned() {
            pinned.wait_and_check(write)?;
        }
    }

    let mut read: SmallVec<[&[u8]; 8]> = SmallVec::new();
    let mut any_absent = false;
    for s in reads {
        let (start, size) = s.allocation().host_range();
        any_absent |= size != s.nbytes();
        // SAFETY: `start` points to `size` initialised bytes, which live as long as the borrowed storage. No other allocation
        // contains any of these bytes, and this allocation's lock is held for reading until after the slice's last use in `f`.
        read.push(unsafe { std::slice::from_raw_parts(start.as_ptr(), size) });
    }
    let mut write: SmallVec<[&mut [u8]; 4]> = SmallVec::new();
    for s in writes {
        let (start, size) = s.allocation().host_range();
        any_absent |= size != s.nbytes();
        // SAFETY: as above, but the lock is held for writing. The loop above returns an error if another slice belongs
        // to this allocation. (Empty slices alias nothing.)
        write.push(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), size) });
    }
    let result = match any_absent {
        false => Ok(f(&read, &mut write)),
        true => absent::run_on_absent(reads, writes, f),
    };
    drop(guards);
    result
}

/// Like [`with_host`], for `N` storages to read and one to write. Faster, because no lists are built.
#[inline]
pub(crate) fn with_host_few<const N: usize, R: Uncalled>(
    reads: [&Storage; N],
    write: &Storage,
    f: impl FnOnce([&[u8]; N], &mut [u8]) -> R,
) -> Result<R> {
    const { assert!(N == 1 || N == 2) };
    let addr = |s: &Storage| std::ptr::from_ref(s.allocation()).addr();
    let (from, to) = (reads.map(addr), addr(write));
    let locks = reads.map(|s| s.allocation().unpinned_lock());
    let (false, false, Some(lock)) =
        (from.contains(&to), locks.iter().any(Option::is_none), write.allocation().unpinned_lock())
    else {
        return with_host(&reads, &[write], |reads, writes| f(std::array::from_fn(|i| reads[i]), writes[0]));
    };
    let mut order: [usize; N] = std::array::from_fn(|i| i);
    if from[0] > from[N - 1] {
        order.reverse();
    }
    let mut reading: [Option<RwLockReadGuard<ReaderCount>>; N] = [const { None }; N];
    let mut lock_reads = |before: bool| {
        for (k, &i) in order.iter().enumerate().filter(|&(_, &i)| (from[i] < to) == before) {
            let again = k > 0 && from[order[0]] == from[i];
            reading[i] = locks[i].filter(|_| !again).map(read);
        }
    };
    lock_reads(true);
    let writing = lock_for_writing(lock)?;
    lock_reads(false);
    // SAFETY: as in `with_host`. The storage to write is none of the storages to read.
    let slices = reads.map(|s| unsafe {
        let (start, size) = s.allocation().host_range();
        std::slice::from_raw_parts(start.as_ptr(), size)
    });
    let (start, size) = write.allocation().host_range();
    let result = match size == 0 || slices.iter().any(|slice| slice.is_empty()) {
        // SAFETY: as for the slices above, but with the lock held for writing.
        false => Ok(f(slices, unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), size) })),
        true => {
            drop((reading, writing)); // some bytes are absent
            return with_host(&reads, &[write], |reads, writes| f(std::array::from_fn(|i| reads[i]), writes[0]));
        }
    };
    drop((reading, writing));
    result
}

/// Records in the profiler work on `bytes` bytes of the CPU device, until the returned span is dropped.
#[inline]
fn cpu_span(kind: RecordKind, name: &'static str, bytes: usize) -> Option<Span> {
    profiler::span(kind, name, Device::Cpu, 0, bytes)
}

impl Storage {
    /// Returns the location of the bytes in OpenCL memory, for commands. Fails for empty storages: callers enqueue no command for them.
    #[inline(always)] // called at every launch, see `Tensor::device_view`
    pub(crate) fn cl(&self) -> Result<ClBlockLocation<'_>> {
        if let Backing::OpenCl(driver, lease) = &self.allocation().backing {
            if capture::is_capturing(self.device()) {
                self.allocation().export_present()?;
                captured::note_use(self, lease);
            }
            if let Some(location) = driver.location(&lease.block) {
                return Ok(location);
            }
        }
        self.restore_spilled_or_fail()
    }

    /// The slow path of [`cl`](Self::cl): copies spilled bytes back to the device, or returns an error that says why there is no buffer.
    #[cold]
    fn restore_spilled_or_fail(&self) -> Result<ClBlockLocation<'_>> {
        if let Backing::OpenCl(driver, lease) = &self.allocation().backing {
            for _ in 0..absent::MAX_TRIES {
                self.allocation().bring_back()?;
                if let Some(location) = driver.location(&lease.block) {
                    return Ok(location);
                }
                if !lease.is_spilled() {
                    break;
                }
            }
            if let Some(location) = driver.simulated_location(&lease.block)? {
                return Ok(location);
            }
            if lease.is_spilled() {
                return Err(self.allocation().moved_again_error());
            }
        }
        self.allocation().check_memory()?;
        Err(Error::invalid(
            "storage",
            format!("{self:?} are not in an OpenCL buffer: for an image call Image::export_cl"),
        ))
    }

    /// Copies bytes `offset..offset + dst.len()` to the host. Waits for the device.
    pub(crate) fn read(&self, offset: usize, dst: &mut [u8]) -> Result<()> {
        self.read_with_pinned(offset, dst, None)
    }

    /// Like [`read`](Self::read), where `dst` may be part of the pinned memory `pinned`.
    fn read_with_pinned(&self, offset: usize, dst: &mut [u8], pinned: Option<&PinnedBytes>) -> Result<()> {
        let range = self.checked_range("read", offset, dst.len())?;
        if dst.is_empty() {
            return Ok(());
        }
        if self.is_simulated() {
            self.read_simulated(range, dst);
            return Ok(());
        }
        if self.device() == Device::Cpu {
            let _recorded = cpu_span(RecordKind::Read, "read", dst.len());
            return with_host(&[self], &[], |r, _| copy(dst, &r[0][range]));
        }
        if self.read_spilled(range, dst)? {
            return Ok(());
        }
        let from = self.location_to_read()?;
        staging::read(from.device, from.at(offset), dst, pinned)
    }

    /// Reads `count` elements, starting at byte `offset`, a multiple of the element size. Waits for the device.
    pub(crate) fn read_vec<T: AnyBitPattern + NoUninit + Send + Sync>(
        &self,
        offset: usize,
        count: usize,
    ) -> Result<Vec<T>> {
        if self.device() == Device::Cpu && count > 0 && !self.is_simulated() {
            let range = self.checked_range("read", offset, count * size_of::<T>())?;
            let _recorded = cpu_span(RecordKind::Read, "read", range.len());
            return with_host(&[self], &[], |r, _| to_vec(bytemuck::cast_slice(&r[0][range])));
        }
        let mut values: Vec<T> = bytemuck::zeroed_vec(count); // for a large vector, the system maps zero pages and writes nothing
        advise_huge(&mut values);
        let range = self.checked_range("read", offset, count * size_of::<T>())?;
        if count > 0 && self.is_simulated() {
            self.read_simulated(range, bytemuck::cast_slice_mut(&mut values));
            return Ok(values);
        }
        if count == 0 || self.read_spilled(range, bytemuck::cast_slice_mut(&mut values))? {
            return Ok(values);
        }
        let from = self.location_to_read()?;
        staging::read_into(from.device, from.at(offset), values)
    }

    /// If the bytes are spilled to the host, copies `range` of them to `dst`, reports device faults as every read does, and returns
    /// true. Otherwise returns false.
    fn read_spilled(&self, range: Range<usize>, dst: &mut [u8]) -> Result<bool> {
        let Backing::OpenCl(driver, lease) = &self.allocation().backing else { return Ok(false) };
        if !lease.is_spilled() {
            return Ok(false);
        }
        capture::refuse_while_capturing(self.device(), "read", READ_DURING_CAPTURE)?;
        driver.device.report_faults()?;
        let location = lease.block.location();
        let MemoryKind::Spilled(bytes) = &location.segment().memory().0 else { return Ok(false) };
        bytes.read(location.offset() + range.start, dst).map(|()| true)
    }

    /// Returns the location of the bytes in OpenCL memory, for a read to the host.
    fn location_to_read(&self) -> Result<ClBlockLocation<'_>> {
        capture::refuse_while_capturing(self.device(), "read", READ_DURING_CAPTURE)?;
        self.cl()
    }

    /// Copies `src` from the host to bytes `offset..offset + src.len()`. The caller may reuse `src` when the call returns.
    pub(crate) fn write(&self, offset: usize, src: &[u8]) -> Result<()> {
        self.write_with_pinned(offset, src, None)
    }

    /// Like [`write`](Self::write), where `src` may be part of the pinned memory `pinned`.
    fn write_with_pinned(&self, offset: usize, src: &[u8], pinned: Option<&PinnedBytes>) -> Result<()> {
        let range = self.checked_range("write", offset, src.len())?;
        if src.is_empty() {
            return Ok(());
        }
        if self.is_simulated() {
            self.write_simulated(range, Some(src));
            return Ok(());
        }
        if self.device() == Device::Cpu {
            let _recorded = cpu_span(RecordKind::Write, "write", src.len());
            return with_host(&[], &[self], |_, w| copy(&mut w[0][range], src));
        }
        capture::refuse_while_capturing(self.device(), "write", WRITE_DURING_CAPTURE)?;
        let to = self.cl()?;
        let written = staging::write(to.device, src, to.at(offset), pinned);
        self.0.sidecar.invalidate();
        written
    }

    /// Copies `bytes` bytes of `src` from `src_offset` to `offset`; if `src` is this storage, the ranges may overlap. A copy within
    /// one device waits until it is done only if `blocking`; a copy between devices goes through the host and always waits.
    pub(crate) fn copy_from(
        &self,
        offset: usize,
        src: &Storage,
        src_offset: usize,
        bytes: usize,
        blocking: bool,
    ) -> Result<()> {
        let (to, from) = (self.checked_range("copy", offset, bytes)?, src.checked_range("copy", src_offset, bytes)?);
        if bytes == 0 {
            return Ok(());
        }
        if self.is_simulated() || src.is_simulated() {
            self.copy_simulated(to, src, from);
            return Ok(());
        }
        let on_cpu = (self.device(), src.device()) == (Device::Cpu, Device::Cpu);
        let _recorded = on_cpu.then(|| cpu_span(RecordKind::Copy, "copy", bytes));
        match (self.device(), src.device()) {
            (Device::Cpu, Device::Cpu) if self.ptr_eq(src) => {
                with_host(&[], &[self], |_, w| w[0].copy_within(from, offset))
            }
            (Device::Cpu, Device::Cpu) => with_host_few([src], self, |[r], w| copy(&mut w[to], &r[from])),
            (Device::Cpu, _) => {
                with_host(&[], &[self], |_, w| src.read_with_pinned(src_offset, &mut w[0][to], self.0.pinned()))?
            }
            (_, Device::Cpu) => {
                with_host(&[src], &[], |r, _| self.write_with_pinned(offset, &r[0][from], src.0.pinned()))?
            }
            (here, there) if here == there => {
                let (to, from) = (self.cl()?, src.cl()?);
                let copied = to.device.copy(from.at(src_offset), to.at(offset), bytes, blocking);
                self.0.sidecar.invalidate();
                copied
            }
            _ => {
                let mut staging = vec![0; bytes.min(MAX_STAGING_BYTES)];
                (0..bytes).step_by(MAX_STAGING_BYTES).try_for_each(|at| {
                    let part = &mut staging[..MAX_STAGING_BYTES.min(bytes - at)];
                    src.read(src_offset + at, part)?;
                    self.write(offset + at, part)
                })
            }
        }
    }

    /// Enqueues the copy of [`copy_from`](Self::copy_from) on the current stream, between a device and host memory pinned for
    /// that device, and returns without waiting. Returns false, and copies nothing, for other pairs of storages and for 0 bytes.
    pub(crate) fn start_copy_from(
        &self,
        offset: usize,
        src: &Storage,
        src_offset: usize,
        bytes: usize,
    ) -> Result<bool> {
        self.checked_range("copy", offset, bytes).and(src.checked_range("copy", src_offset, bytes))?;
        let written = self.device() == Device::Cpu;
        let ((host, at), (there, from)) = match written {
            true => ((self, offset), (src, src_offset)),
            false => ((src, src_offset), (self, offset)),
        };
        let pinned =
            host.0.pinned().filter(|pinned| bytes > 0 && pinned.is_for(there.device()) && !there.is_simulated());
        let (Some(pinned), Some(lock)) = (pinned, host.0.host_lock()) else { return Ok(false) };
        match written {
            true => capture::refuse_while_capturing(there.device(), "read", READ_DURING_CAPTURE)?,
            false => capture::refuse_while_capturing(there.device(), "write", WRITE_DURING_CAPTURE)?,
        }
        let location = there.cl()?;
        let _locked = match written {
            true => HeldLock::Write(lock_for_writing(lock)?),
            false => HeldLock::Read(read(lock)),
        };
        // SAFETY: the address is inside the storage's bytes, as checked above.
        let start = unsafe { host.0.host_range().0.add(at) };
        let begun = pinned.enqueue(start, bytes, location.at(from), written);
        self.0.sidecar.invalidate();
        begun.map(|()| true)
    }

    /// Like [`write`](Self::write), but copies `src` and returns when the write is enqueued on the current stream.
    /// Returns false, with nothing done, if the bytes have to be written synchronously.
    pub(crate) fn start_write(&self, offset: usize, src: &[u8]) -> Result<bool> {
        self.checked_range("write", offset, src.len())?;
        if self.device() == Device::Cpu || src.is_empty() || self.is_simulated() {
            return Ok(false);
        }
        capture::refuse_while_capturing(self.device(), "write", WRITE_DURING_CAPTURE)?;
        let to = self.cl()?;
        let begun = staging::start_write(to.device, src, to.at(offset));
        self.0.sidecar.invalidate();
        begun
    }

    /// Repeats `pattern`, of 1, 2, 4, 8 or 16 bytes, over `bytes` bytes from `offset`. `offset` and `bytes` are multiples of the
    /// pattern's length.
    pub(crate) fn fill(&self, offset: usize, bytes: usize, pattern: &[u8]) -> Result<()> {
        let range = self.checked_range("fill", offset, bytes)?;
        let n = pattern.len();
        if !matches!(n, 1 | 2 | 4 | 8 | 16) || !offset.is_multiple_of(n) || !bytes.is_multiple_of(n) {
            return Err(Error::invalid("fill", format!("cannot repeat {n} bytes over {bytes} bytes at {offset}")));
        }
        if bytes == 0 {
            return Ok(());
        }
        if self.is_simulated() {
            self.write_simulated(range, Some(pattern));
            return Ok(());
        }
        if self.device() == Device::Cpu {
            let _recorded = cpu_span(RecordKind::Fill, "fill", bytes);
            return with_host(&[], &[self], |_, w| fill(&mut w[0][range], pattern));
        }
        let to = self.cl()?;
        // The padding at the block's end belongs to this storage. It is filled too, so that the driver can use wide stores.
        let to_the_end = offset.is_multiple_of(16) && range.end == self.nbytes();
        let bytes = if to_the_end { bytes.next_multiple_of(16) } else { bytes };
        let filled = to.device.fill(to.at(offset), bytes, pattern);
        self.0.sidecar.invalidate();
        filled
    }

    pub(super) fn checked_range(&self, op: &'static str, offset: usize, bytes: usize) -> Result<Range<usize>> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.nbytes() => Ok(offset..end),
            _ => {
                Err(Error::invalid(op, format!("{bytes} bytes at {offset} are not in a storage of {}", self.nbytes())))
            }
        }
    }
}

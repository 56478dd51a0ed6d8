//! Getting at the bytes: host slices under their locks, and transfers between any two storages.

use std::ops::Range;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use bytemuck::{AnyBitPattern, NoUninit};
use smallvec::SmallVec;

use super::allocation::{Allocation, Backing, Storage};
use super::block::Borrows;
use super::caching::caching_inside;
use super::driver::MemoryKind;
use super::driver::opencl::ClPlace;
use super::driver::staging::{self, PinnedBytes};
use super::{captured, host_borrow};
use crate::device::capture;
use crate::device::cpu::bulk::{copy, fill, to_vec};
use crate::device::cpu::huge_pages::advise_huge;
use crate::device::profiler::{self, Kind, Span};
use crate::{Device, Error, Result};

/// Copies between devices go through a host buffer of at most this size.
const STAGING: usize = 16 << 20;

/// Why nothing is read while a graph is captured.
const NOT_COMPUTED: &str = "no values are computed yet that could be read";

/// Why nothing is written meanwhile.
const HOST_VALUES: &str = "values of the host would be there once: make the tensor outside";

/// Held while slices of an allocation exist, or a transfer of its bytes is enqueued.
enum Guard<'a> {
    Read(#[expect(dead_code, reason = "held")] RwLockReadGuard<'a, Borrows>),
    Write(#[expect(dead_code, reason = "held")] RwLockWriteGuard<'a, Borrows>),
}

/// The lock of bytes that are to be written; an error while a closure of [`Storage::with_elements`] reads them.
#[inline]
fn exclusive(lock: &RwLock<Borrows>) -> Result<RwLockWriteGuard<'_, Borrows>> {
    let guard = lock.write().unwrap_or_else(PoisonError::into_inner);
    match guard.any() {
        false => Ok(guard),
        true => Err(host_borrow::refused()),
    }
}

/// Calls `f` with the bytes of storages on the CPU device: `reads` shared, `writes` exclusive, in the order given.
///
/// Locks each allocation once, in the order of their addresses, so calls never deadlock each other; `f` must not lock
/// storages itself. The slices are exactly the storages' bytes. A storage may be read through several handles, but
/// [`Error::Invalid`] where one is in both lists or twice in `writes`. Empty storages are never locked.
pub(crate) fn with_host<R>(
    reads: &[&Storage],
    writes: &[&Storage],
    f: impl FnOnce(&[&[u8]], &mut [&mut [u8]]) -> R,
) -> Result<R> {
    // Pushed one by one: `extend` and `collect` are calls, and small operations are made of such.
    let mut order: SmallVec<[(&Allocation, bool); 8]> = SmallVec::new();
    reads.iter().for_each(|s| order.push((s.allocation(), false)));
    writes.iter().for_each(|s| order.push((s.allocation(), true)));
    order.sort_unstable_by_key(|&(allocation, _)| std::ptr::from_ref(allocation).addr());

    let mut guards: SmallVec<[Guard; 8]> = SmallVec::new();
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
        guards.push(match write {
            true => Guard::Write(exclusive(lock)?),
            false => Guard::Read(lock.read().unwrap_or_else(PoisonError::into_inner)),
        });
        if let Some(pinned) = allocation.pinned() {
            pinned.check(write)?;
        }
    }

    let mut read: SmallVec<[&[u8]; 8]> = SmallVec::new();
    for s in reads {
        let (start, size) = s.allocation().host_range();
        // SAFETY: `size` initialised bytes that live as long as the borrowed storage; no other allocation has any
        // of them, and this one's lock is held, for reading, until after the slice's last use in `f`.
        read.push(unsafe { std::slice::from_raw_parts(start.as_ptr(), size) });
    }
    let mut write: SmallVec<[&mut [u8]; 4]> = SmallVec::new();
    for s in writes {
        let (start, size) = s.allocation().host_range();
        // SAFETY: as above, with the lock held for writing; and no other slice made here is of this allocation,
        // or the loop above had returned an error. (Empty slices alias nothing.)
        write.push(unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), size) });
    }
    let result = f(&read, &mut write);
    drop(guards);
    Ok(result)
}

/// [`with_host`] for one or two storages to read and one to write, without lists.
#[inline]
pub(crate) fn with_few<const N: usize, R>(
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
    let mut reading: [Option<RwLockReadGuard<Borrows>>; N] = [const { None }; N];
    let mut read = |before: bool| {
        for (k, &i) in order.iter().enumerate().filter(|&(_, &i)| (from[i] < to) == before) {
            let again = k > 0 && from[order[0]] == from[i];
            reading[i] = locks[i].filter(|_| !again).map(|lock| lock.read().unwrap_or_else(PoisonError::into_inner));
        }
    };
    read(true);
    let writing = exclusive(lock)?;
    read(false);
    // SAFETY: as in `with_host`; what is written is not among what is read.
    let slices = reads.map(|s| unsafe {
        let (start, size) = s.allocation().host_range();
        std::slice::from_raw_parts(start.as_ptr(), size)
    });
    let (start, size) = write.allocation().host_range();
    // SAFETY: as above.
    let result = f(slices, unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), size) });
    drop((reading, writing));
    Ok(result)
}

/// Records what is done with bytes of the CPU device, until the value is dropped.
#[inline]
fn on_cpu(kind: Kind, name: &'static str, bytes: usize) -> Option<Span> {
    profiler::span(kind, name, Device::Cpu, 0, bytes)
}

impl Storage {
    /// The buffer and the offset to enqueue work on. Empty storages have none, nor need it: callers launch nothing.
    #[inline(always)] // part of every launch, see `Tensor::device_view`
    pub(crate) fn cl(&self) -> Result<ClPlace<'_>> {
        if let Backing::OpenCl(driver, lease) = &self.allocation().backing {
            if capture::is_capturing(self.device()) {
                captured::used(self, lease);
            }
            if let Some(place) = driver.place(&lease.block) {
                return Ok(place);
            }
        }
        self.not_cl()
    }

    /// Brings what is kept on the host back first.
    #[cold]
    fn not_cl(&self) -> Result<ClPlace<'_>> {
        if let Backing::OpenCl(_, lease) = &self.allocation().backing
            && lease.is_spilled()
            && let Some(allocator) = caching_inside(lease.allocator())
        {
            allocator.restore(&lease.block)?;
            return self.cl();
        }
        self.check_memory()?;
        Err(Error::invalid(
            "storage",
            format!("{self:?} are not in a buffer: those of an image are read by Image::export_cl"),
        ))
    }

    /// Copies bytes `offset..offset + dst.len()` to the host. Waits for the device.
    pub(crate) fn read(&self, offset: usize, dst: &mut [u8]) -> Result<()> {
        self.read_to(offset, dst, None)
    }

    /// [`read`](Self::read) to what is of this pinned memory, if any.
    fn read_to(&self, offset: usize, dst: &mut [u8], pinned: Option<&PinnedBytes>) -> Result<()> {
        let range = self.range("read", offset, dst.len())?;
        if dst.is_empty() {
            return Ok(());
        }
        if self.device() == Device::Cpu {
            let _recorded = on_cpu(Kind::Read, "read", dst.len());
            return with_host(&[self], &[], |r, _| copy(dst, &r[0][range]));
        }
        if self.read_spilled(range, dst)? {
            return Ok(());
        }
        let from = self.readable()?;
        staging::read(from.device, from.at(offset), dst, pinned)
    }

    /// The `count` elements from byte `offset` on, a multiple of their size. Waits for the device.
    pub(crate) fn read_vec<T: AnyBitPattern + NoUninit + Send + Sync>(
        &self,
        offset: usize,
        count: usize,
    ) -> Result<Vec<T>> {
        if self.device() == Device::Cpu && count > 0 {
            let range = self.range("read", offset, count * size_of::<T>())?;
            let _recorded = on_cpu(Kind::Read, "read", range.len());
            return with_host(&[self], &[], |r, _| to_vec(bytemuck::cast_slice(&r[0][range])));
        }
        let mut values: Vec<T> = bytemuck::zeroed_vec(count); // a large one comes untouched, as zeros of the system's
        advise_huge(&mut values);
        let range = self.range("read", offset, count * size_of::<T>())?;
        if count == 0 || self.read_spilled(range, bytemuck::cast_slice_mut(&mut values))? {
            return Ok(values);
        }
        let from = self.readable()?;
        staging::read_into(from.device, from.at(offset), values)
    }

    /// Copies bytes that are kept on the host, and reports faults as every read does; false where they are not there.
    fn read_spilled(&self, range: Range<usize>, dst: &mut [u8]) -> Result<bool> {
        let Backing::OpenCl(driver, lease) = &self.allocation().backing else { return Ok(false) };
        if !lease.is_spilled() {
            return Ok(false);
        }
        capture::refuse(self.device(), "read", NOT_COMPUTED)?;
        driver.device.report_faults()?;
        let place = lease.block.place();
        let MemoryKind::Spilled(bytes) = &place.segment().memory().0 else { return Ok(false) };
        copy(dst, &bytes[place.offset()..][range]);
        Ok(true)
    }

    /// Where the bytes are in OpenCL memory, for reading them to the host.
    fn readable(&self) -> Result<ClPlace<'_>> {
        capture::refuse(self.device(), "read", NOT_COMPUTED)?;
        self.cl()
    }

    /// Copies `src` from the host to bytes `offset..offset + src.len()`. `src` may be reused when it returns.
    pub(crate) fn write(&self, offset: usize, src: &[u8]) -> Result<()> {
        self.write_from(offset, src, None)
    }

    /// [`write`](Self::write) from what is of this pinned memory, if any.
    fn write_from(&self, offset: usize, src: &[u8], pinned: Option<&PinnedBytes>) -> Result<()> {
        let range = self.range("write", offset, src.len())?;
        if src.is_empty() {
            return Ok(());
        }
        if self.device() == Device::Cpu {
            let _recorded = on_cpu(Kind::Write, "write", src.len());
            return with_host(&[], &[self], |_, w| copy(&mut w[0][range], src));
        }
        capture::refuse(self.device(), "write", HOST_VALUES)?;
        let to = self.cl()?;
        let written = staging::write(to.device, src, to.at(offset), pinned);
        self.0.derived.forget();
        written
    }

    /// Copies `bytes` bytes of `src` (which may be this storage, and may overlap) from `src_offset` to `offset`: on one
    /// device directly, waiting only if `blocking`; between devices through the host, always waiting.
    pub(crate) fn copy_from(
        &self,
        offset: usize,
        src: &Storage,
        src_offset: usize,
        bytes: usize,
        blocking: bool,
    ) -> Result<()> {
        let (to, from) = (self.range("copy", offset, bytes)?, src.range("copy", src_offset, bytes)?);
        if bytes == 0 {
            return Ok(());
        }
        let on_cpu = (self.device(), src.device()) == (Device::Cpu, Device::Cpu);
        let _recorded = on_cpu.then(|| self::on_cpu(Kind::Copy, "copy", bytes));
        match (self.device(), src.device()) {
            (Device::Cpu, Device::Cpu) if self.ptr_eq(src) => {
                with_host(&[], &[self], |_, w| w[0].copy_within(from, offset))
            }
            (Device::Cpu, Device::Cpu) => with_few([src], self, |[r], w| copy(&mut w[to], &r[from])),
            (Device::Cpu, _) => {
                with_host(&[], &[self], |_, w| src.read_to(src_offset, &mut w[0][to], self.0.pinned()))?
            }
            (_, Device::Cpu) => with_host(&[src], &[], |r, _| self.write_from(offset, &r[0][from], src.0.pinned()))?,
            (here, there) if here == there => {
                let (to, from) = (self.cl()?, src.cl()?);
                let copied = to.device.copy(from.at(src_offset), to.at(offset), bytes, blocking);
                self.0.derived.forget();
                copied
            }
            _ => {
                let mut staging = vec![0; bytes.min(STAGING)];
                (0..bytes).step_by(STAGING).try_for_each(|at| {
                    let part = &mut staging[..STAGING.min(bytes - at)];
                    src.read(src_offset + at, part)?;
                    self.write(offset + at, part)
                })
            }
        }
    }

    /// [`copy_from`](Self::copy_from) between a device and memory of the host that is pinned for it, which returns when it is
    /// enqueued on the current stream; false, with nothing done, for any other two storages.
    pub(crate) fn start_copy_from(
        &self,
        offset: usize,
        src: &Storage,
        src_offset: usize,
        bytes: usize,
    ) -> Result<bool> {
        self.range("copy", offset, bytes).and(src.range("copy", src_offset, bytes))?;
        let written = self.device() == Device::Cpu;
        let ((host, at), (there, from)) = match written {
            true => ((self, offset), (src, src_offset)),
            false => ((src, src_offset), (self, offset)),
        };
        let pinned = host.0.pinned().filter(|pinned| bytes > 0 && pinned.is_for(there.device()));
        let (Some(pinned), Some(lock)) = (pinned, host.0.host_lock()) else { return Ok(false) };
        match written {
            true => capture::refuse(there.device(), "read", NOT_COMPUTED)?,
            false => capture::refuse(there.device(), "write", HOST_VALUES)?,
        }
        let place = there.cl()?;
        let _locked = match written {
            true => Guard::Write(exclusive(lock)?),
            false => Guard::Read(lock.read().unwrap_or_else(PoisonError::into_inner)),
        };
        // SAFETY: inside the storage's bytes, as was checked above.
        let start = unsafe { host.0.host_range().0.add(at) };
        let begun = pinned.enqueue(start, bytes, place.at(from), written);
        self.0.derived.forget();
        begun.map(|()| true)
    }

    /// [`write`](Self::write) that returns when it is enqueued on the current stream, with a copy of `src`; false, with nothing done,
    /// where that is not the way.
    pub(crate) fn start_write(&self, offset: usize, src: &[u8]) -> Result<bool> {
        self.range("write", offset, src.len())?;
        if self.device() == Device::Cpu || src.is_empty() {
            return Ok(false);
        }
        capture::refuse(self.device(), "write", HOST_VALUES)?;
        let to = self.cl()?;
        let begun = staging::start_write(to.device, src, to.at(offset));
        self.0.derived.forget();
        begun
    }

    /// Repeats `pattern`, of 1, 2, 4, 8 or 16 bytes, over bytes `offset..offset + bytes`, both multiples of its length.
    pub(crate) fn fill(&self, offset: usize, bytes: usize, pattern: &[u8]) -> Result<()> {
        let range = self.range("fill", offset, bytes)?;
        let n = pattern.len();
        if !matches!(n, 1 | 2 | 4 | 8 | 16) || !offset.is_multiple_of(n) || !bytes.is_multiple_of(n) {
            return Err(Error::invalid("fill", format!("cannot repeat {n} bytes over {bytes} bytes at {offset}")));
        }
        if bytes == 0 {
            return Ok(());
        }
        if self.device() == Device::Cpu {
            let _recorded = on_cpu(Kind::Fill, "fill", bytes);
            return with_host(&[], &[self], |_, w| fill(&mut w[0][range], pattern));
        }
        let to = self.cl()?;
        // The block's padding is ours: filling it as well keeps to the wide stores of the driver.
        let to_the_end = offset.is_multiple_of(16) && range.end == self.nbytes();
        let bytes = if to_the_end { bytes.next_multiple_of(16) } else { bytes };
        let filled = to.device.fill(to.at(offset), bytes, pattern);
        self.0.derived.forget();
        filled
    }

    pub(super) fn range(&self, op: &'static str, offset: usize, bytes: usize) -> Result<Range<usize>> {
        match offset.checked_add(bytes) {
            Some(end) if end <= self.nbytes() => Ok(offset..end),
            _ => {
                Err(Error::invalid(op, format!("{bytes} bytes at {offset} are not in a storage of {}", self.nbytes())))
            }
        }
    }
}

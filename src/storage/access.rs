//! Getting at the bytes: host slices under their locks, and transfers between any two storages.

use std::sync::{PoisonError, RwLockReadGuard, RwLockWriteGuard};

use smallvec::SmallVec;

use super::{Allocation, Home, Storage};
use crate::{Device, Error, Result};

/// Held while slices of an allocation exist.
enum Guard<'a> {
    Read(#[expect(dead_code, reason = "held")] RwLockReadGuard<'a, ()>),
    Write(#[expect(dead_code, reason = "held")] RwLockWriteGuard<'a, ()>),
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
    let mut order: SmallVec<[(&Allocation, bool); 8]> = SmallVec::new();
    order.extend(reads.iter().map(|s| (s.allocation(), false)));
    order.extend(writes.iter().map(|s| (s.allocation(), true)));
    order.sort_unstable_by_key(|&(allocation, _)| std::ptr::from_ref(allocation).addr());

    let mut guards: SmallVec<[Guard; 8]> = SmallVec::new();
    let mut last: Option<(&Allocation, bool)> = None;
    for &(allocation, write) in &order {
        let lock = match &allocation.home {
            Home::Host(home) => &home.lock,
            Home::Empty => continue,
            #[allow(unreachable_patterns)]
            _ => return Err(Error::invalid("with_host", format!("storage is on {}", allocation.device()))),
        };
        if let Some((_, last_write)) = last.filter(|(last, _)| std::ptr::eq(*last, allocation)) {
            if write || last_write {
                return Err(Error::invalid("with_host", "a storage to be written is also read or written elsewhere"));
            }
            continue;
        }
        last = Some((allocation, write));
        guards.push(match write {
            true => Guard::Write(lock.write().unwrap_or_else(PoisonError::into_inner)),
            false => Guard::Read(lock.read().unwrap_or_else(PoisonError::into_inner)),
        });
    }

    let read: SmallVec<[&[u8]; 8]> = (reads.iter())
        .map(|s| {
            let (start, size) = s.allocation().host_range();
            // SAFETY: `size` initialised bytes that live as long as the borrowed storage; no other allocation has any
            // of them, and this one's lock is held, for reading, until after the slice's last use in `f`.
            unsafe { std::slice::from_raw_parts(start.as_ptr(), size) }
        })
        .collect();
    let mut write: SmallVec<[&mut [u8]; 4]> = (writes.iter())
        .map(|s| {
            let (start, size) = s.allocation().host_range();
            // SAFETY: as above, with the lock held for writing; and no other slice made here is of this allocation,
            // or the loop above had returned an error. (Empty slices alias nothing.)
            unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), size) }
        })
        .collect();
    let result = f(&read, &mut write);
    drop(guards);
    Ok(result)
}

impl Storage {
    /// Copies bytes `offset..offset + dst.len()` to the host. Waits for the device.
    pub(crate) fn read(&self, offset: usize, dst: &mut [u8]) -> Result<()> {
        self.check("read", offset, dst.len())?;
        if dst.is_empty() {
            return Ok(());
        }
        match self.device() {
            Device::Cpu => with_host(&[self], &[], |r, _| dst.copy_from_slice(&r[0][offset..offset + dst.len()])),
            Device::OpenCL(_) => Err(Error::invalid("storage", "OpenCL transfers come with the OpenCL driver")),
        }
    }

    /// Copies `src` from the host to bytes `offset..offset + src.len()`. `src` may be reused when it returns.
    pub(crate) fn write(&self, offset: usize, src: &[u8]) -> Result<()> {
        self.check("write", offset, src.len())?;
        if src.is_empty() {
            return Ok(());
        }
        match self.device() {
            Device::Cpu => with_host(&[], &[self], |_, w| w[0][offset..offset + src.len()].copy_from_slice(src)),
            Device::OpenCL(_) => Err(Error::invalid("storage", "OpenCL transfers come with the OpenCL driver")),
        }
    }

    /// Copies `bytes` bytes of `src` (which may be this storage, and may overlap) from `src_offset` to `offset`: on one
    /// device directly, waiting only if `blocking`; between devices through the host.
    pub(crate) fn copy_from(
        &self,
        offset: usize,
        src: &Storage,
        src_offset: usize,
        bytes: usize,
        _blocking: bool,
    ) -> Result<()> {
        self.check("copy", offset, bytes)?;
        src.check("copy", src_offset, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        let (to, from) = (offset..offset + bytes, src_offset..src_offset + bytes);
        match (self.device(), src.device()) {
            (Device::Cpu, Device::Cpu) if self.ptr_eq(src) => {
                with_host(&[], &[self], |_, w| w[0].copy_within(from, offset))
            }
            (Device::Cpu, Device::Cpu) => with_host(&[src], &[self], |r, w| w[0][to].copy_from_slice(&r[0][from])),
            _ => Err(Error::invalid("storage", "OpenCL transfers come with the OpenCL driver")),
        }
    }

    /// Repeats `pattern` over bytes `offset..offset + bytes`. Its length divides `bytes`.
    pub(crate) fn fill(&self, offset: usize, bytes: usize, pattern: &[u8]) -> Result<()> {
        self.check("fill", offset, bytes)?;
        if pattern.is_empty() || !bytes.is_multiple_of(pattern.len()) {
            return Err(Error::invalid("fill", format!("{bytes} bytes are no multiple of {}", pattern.len())));
        }
        if bytes == 0 {
            return Ok(());
        }
        match self.device() {
            Device::Cpu => with_host(&[], &[self], |_, w| repeat(&mut w[0][offset..offset + bytes], pattern)),
            Device::OpenCL(_) => Err(Error::invalid("storage", "OpenCL transfers come with the OpenCL driver")),
        }
    }

    fn check(&self, op: &'static str, offset: usize, bytes: usize) -> Result<()> {
        if offset.checked_add(bytes).is_some_and(|end| end <= self.nbytes()) {
            return Ok(());
        }
        Err(Error::invalid(op, format!("{bytes} bytes from byte {offset} are not in a storage of {}", self.nbytes())))
    }
}

/// Fills by doubling what is filled already, at the speed of memcpy.
fn repeat(dst: &mut [u8], pattern: &[u8]) {
    if pattern.iter().all(|&b| b == pattern[0]) {
        return dst.fill(pattern[0]);
    }
    let mut done = pattern.len();
    dst[..done].copy_from_slice(pattern);
    while done < dst.len() {
        let more = done.min(dst.len() - done);
        dst.copy_within(..more, done);
        done += more;
    }
}

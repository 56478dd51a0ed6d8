//! Moving bytes: to and from the host, and within the device. Ranges beyond their buffers are errors.

use std::ptr;

use opencl3::memory::{CL_MAP_READ, CL_MAP_WRITE_INVALIDATE_REGION};
use opencl3::types::cl_event;

use super::driver::{ClAt, ClKernel, call, create};
use super::errors::ClError;
use super::fault::{Readings, Slot};
use super::host_memory::{BOUNCE, Bounce, HostMemory};
use super::queue::Queue;
use super::{Arg, ClDevice};
use crate::device::capture::is_capturing;
use crate::device::cpu::copy::copy as copy_bytes;
use crate::device::profiler::{self, Kind};
use crate::device::{DeviceKind, StreamId};
use crate::error::for_each_part;
use crate::{Error, Result};

/// Which kernel of `kernels/memory.cl`.
const FILL: usize = 0;
const COPY: usize = 1;
/// GPUs fill this much and more by a kernel of our own: NVIDIA's driver writes at three quarters of the memory's speed.
const FILL_BY_KERNEL: usize = 128 << 10;
/// Fills in one command stay below this: NVIDIA's driver has hung at 2 GiB.
const FILL_CHUNK: usize = 1 << 30;
/// The temporary of an overlapping copy is at most this large.
const OVERLAP_CHUNK: usize = 16 << 20;

/// What [`ClDevice::with_mapped`] maps.
pub(crate) struct Mapped<'a> {
    pub(crate) at: ClAt<'a>,
    pub(crate) overwrite: bool,
}

impl ClDevice {
    /// Copies bytes from one buffer to another, or within one, also where the two ranges overlap.
    /// Returns when it is submitted, or with `blocking` when it is done.
    ///
    /// # Errors
    /// A range beyond its buffer; when blocking, also what a kernel of this thread recorded as a fault.
    pub(crate) fn copy(&self, src: ClAt<'_>, dst: ClAt<'_>, bytes: usize, blocking: bool) -> Result<()> {
        in_range("copy", src, bytes).and(in_range("copy", dst, bytes))?;
        let (stream, recording) = (self.current_stream(), is_capturing(self.device()));
        let disjoint = src.0.mem() != dst.0.mem() || src.1.abs_diff(dst.1) >= bytes;
        if bytes > 0 && disjoint && blocking && !recording {
            return self.submit_and_report(stream, &[self.slot()], (), |q, (), event| {
                q.unmap_rest()?;
                copy(q, src, dst, bytes, event)
            });
        }
        // On GPUs a kernel starts sooner than the driver's copy, and is as fast; who waits has the driver's.
        if bytes > 0 && disjoint && !blocking && self.copied_by_kernel(src, dst, bytes)? {
            return Ok(());
        }
        match (recording, disjoint) {
            (true, _) if bytes == 0 => Ok(()),
            (true, true) => self.record_copy(src, dst, bytes),
            (true, false) => Err(Error::invalid("copy", "a graph has no copies between overlapping bytes")),
            (false, _) => {
                self.copy_on(stream, src, dst, bytes)?;
                if blocking { self.wait_and_report(stream, &[self.slot()]) } else { Ok(()) }
            }
        }
    }

    /// [`copy`](Self::copy) on a given stream, returning when it is submitted.
    pub(crate) fn copy_on(&self, stream: StreamId, src: ClAt<'_>, dst: ClAt<'_>, bytes: usize) -> Result<()> {
        self.check_lost()?;
        in_range("copy", src, bytes)?;
        in_range("copy", dst, bytes)?;
        let same = src.0.mem() == dst.0.mem();
        if bytes == 0 || same && src.1 == dst.1 {
            return Ok(());
        }
        if same && src.1.abs_diff(dst.1) < bytes {
            return self.copy_overlapping(stream, src, dst.1, bytes);
        }
        let copied = self.lock(stream).and_then(|mut q| copy(&mut q, src, dst, bytes, ptr::null_mut()));
        copied.map_err(|e| self.error(self.settle(e)))
    }

    /// In pieces, in the order in which none overwrites what a later one reads. A piece is as long as the ranges are
    /// apart; where that is short it goes through a temporary buffer.
    fn copy_overlapping(&self, stream: StreamId, (buffer, src): ClAt<'_>, dst: usize, bytes: usize) -> Result<()> {
        let distance = src.abs_diff(dst);
        let direct = distance >= OVERLAP_CHUNK || bytes / distance <= 2;
        let piece = if direct { distance } else { bytes.min(OVERLAP_CHUNK) };
        let temporary = if direct { None } else { Some(self.create_buffer(piece).map_err(|e| self.error(e))?) };
        let mut done = 0;
        let copied: Result<(), ClError> = {
            let mut queue = self.lock(stream).map_err(|e| self.error(self.settle(e)))?;
            (0..bytes).step_by(piece).try_for_each(|from| {
                let n = piece.min(bytes - from);
                // Moving up: start from the end.
                let at = if dst > src { bytes - from - n } else { from };
                match &temporary {
                    None => copy(&mut queue, (buffer, src + at), (buffer, dst + at), n, ptr::null_mut())?,
                    Some(t) => {
                        copy(&mut queue, (buffer, src + at), (t, 0), n, ptr::null_mut())?;
                        copy(&mut queue, (t, 0), (buffer, dst + at), n, ptr::null_mut())?;
                    }
                }
                done += n;
                Ok(())
            })
        };
        copied.map_err(|e| self.midway("copy", done, e))
    }

    /// The error of a command that the driver refused after others had done `done` bytes of the operation.
    fn midway(&self, op: &'static str, done: usize, e: ClError) -> Error {
        let error = self.error(self.settle(e));
        if done > 0 { error.in_part(op) } else { error }
    }

    /// Fills memory of the host with bytes of a buffer, and gives it back when they are there.
    ///
    /// # Errors
    /// A range beyond the buffer, and what a kernel of this thread recorded as a fault.
    pub(crate) fn read_into<M: HostMemory>(&self, src: ClAt<'_>, dst: M) -> Result<M> {
        self.read_on(self.current_stream(), &[self.slot()], src, dst)
    }

    fn read_on<M: HostMemory>(
        &self,
        stream: StreamId,
        slots: &[&'static Slot],
        src: ClAt<'_>,
        mut dst: M,
    ) -> Result<M> {
        self.check_lost()?;
        let (_, bytes) = dst.range();
        in_range("read", src, bytes)?;
        if bytes == 0 {
            return Ok(dst);
        }
        self.submit_and_report(stream, slots, dst, |q, dst, event| {
            let to = dst.range().0.cast();
            q.unmap_rest()?;
            q.command((Kind::Read, "clEnqueueReadBuffer", bytes), event, |q, event| {
                call!(clEnqueueReadBuffer(q, src.0.mem(), 0, src.1, bytes, to, 0, ptr::null(), event))
            })
        })
    }

    /// Reads bytes to memory that the caller lends and waits for them.
    pub(crate) fn read(&self, src: ClAt<'_>, dst: &mut [u8]) -> Result<()> {
        self.read_bounced(self.current_stream(), &[self.slot()], src, dst)
    }

    /// [`read`](Self::read) on the default stream, telling no fault.
    pub(crate) fn read_quietly(&self, src: ClAt<'_>, dst: &mut [u8]) -> Result<()> {
        self.read_bounced(StreamId::DEFAULT, &[], src, dst)
    }

    fn read_bounced(&self, stream: StreamId, slots: &[&'static Slot], src: ClAt<'_>, dst: &mut [u8]) -> Result<()> {
        in_range("read", src, dst.len())?;
        dst.chunks_mut(BOUNCE).enumerate().try_for_each(|(i, part)| {
            let from = (src.0, src.1 + i * BOUNCE);
            let mut read = self.read_on(stream, slots, from, Bounce::new(part.len())?)?;
            copy_bytes(part, read.bytes());
            Ok(())
        })
    }

    /// Writes bytes from the host, and gives their memory back when they are there.
    pub(crate) fn write_from<M: HostMemory>(&self, mut src: M, dst: ClAt<'_>) -> Result<M> {
        self.check_lost()?;
        let (_, bytes) = src.range();
        in_range("write", dst, bytes)?;
        if bytes == 0 {
            return Ok(src);
        }
        self.submit_and_wait(self.current_stream(), src, |q, src, event| {
            let from = src.range().0.cast_const().cast();
            q.unmap_rest()?;
            q.command((Kind::Write, "clEnqueueWriteBuffer", bytes), event, |q, event| {
                call!(clEnqueueWriteBuffer(q, dst.0.mem(), 0, dst.1, bytes, from, 0, ptr::null(), event))
            })
        })
        .map_err(|e| self.error(e))
    }

    /// Writes bytes from memory that the caller lends, and returns when they are there.
    pub(crate) fn write(&self, src: &[u8], dst: ClAt<'_>) -> Result<()> {
        in_range("write", dst, src.len())?;
        src.chunks(BOUNCE).enumerate().try_for_each(|(i, part)| {
            let mut copy = Bounce::new(part.len())?;
            copy_bytes(copy.bytes(), part);
            self.write_from(copy, (dst.0, dst.1 + i * BOUNCE)).map(drop)
        })
    }

    /// Calls `f` with the address of so many bytes of a buffer, to read them or to overwrite all of them, while nothing runs
    /// on the device and nobody submits anything to it. For devices whose memory is the host's.
    ///
    /// # Errors
    /// A range beyond its buffer, and what a kernel of this thread recorded as a fault.
    pub(crate) fn with_mapped(&self, region: Mapped<'_>, bytes: usize, f: impl FnOnce(*mut u8)) -> Result<()> {
        self.check_lost()?;
        in_range("map", region.at, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        let none = ptr::null_mut();
        let (mem, off) = (region.at.0.mem(), region.at.1);
        let flags = if region.overwrite { CL_MAP_WRITE_INVALIDATE_REGION } else { CL_MAP_READ };
        let kind = if region.overwrite { Kind::Write } else { Kind::Read };
        let _mapped = profiler::span(kind, profiler::MAPPED, self.device(), self.current_stream().0, bytes);
        let readings = self.while_idle(self.current_stream(), Readings::default(), |q, readings| {
            readings.enqueue(q, &[self.slot()], false)?;
            let start = create!(clEnqueueMapBuffer(q.raw, mem, 1, flags, off, bytes, 0, ptr::null(), none))?;
            f(start.cast());
            q.unmap(region.at.0, start)
        });
        let readings = readings.map_err(|e| self.error(e))?;
        self.take_failed(self.current_stream())?;
        self.report(readings)
    }

    /// Repeats a pattern of 1, 2, 4, 8 or 16 bytes. `off` and `bytes` are multiples of its length.
    ///
    /// # Errors
    /// A range beyond the buffer, or one that is no multiple of the pattern.
    pub(crate) fn fill(&self, (dst, off): ClAt<'_>, bytes: usize, pattern: &[u8]) -> Result<()> {
        self.check_lost()?;
        in_range("fill", (dst, off), bytes)?;
        let n = pattern.len();
        if !matches!(n, 1 | 2 | 4 | 8 | 16) || !off.is_multiple_of(n) || !bytes.is_multiple_of(n) {
            return Err(Error::invalid("fill", format!("cannot repeat {n} bytes over {bytes} bytes at {off}")));
        }
        if bytes == 0 {
            return Ok(());
        }
        let mut wide = [0u8; 16];
        wide.chunks_exact_mut(n).for_each(|c| c.copy_from_slice(pattern));
        // Drivers that fill pattern by pattern are faster with a long one.
        let n = if off.is_multiple_of(16) && bytes.is_multiple_of(16) { 16 } else { n };
        if n == 16
            && bytes >= FILL_BY_KERNEL
            && let Some(kernel) = self.memory_kernel(FILL)
        {
            let count = bytes / 16;
            let (first, pattern) = (Arg::U64((off / 16) as u64), Arg::Bytes(&wide));
            let args = [Arg::Buffer(dst), first, pattern, Arg::U64(count as u64)];
            return self.launch_uncounted(kernel, &args, &[count], &[kernel.max_work_group().min(256)]);
        }
        if is_capturing(self.device()) {
            return (0..bytes)
                .step_by(FILL_CHUNK)
                .try_for_each(|at| self.record_fill((dst, off + at), FILL_CHUNK.min(bytes - at), wide, n));
        }
        let mut done = 0;
        let filled: Result<(), ClError> = {
            let mut queue = self.lock(self.current_stream()).map_err(|e| self.error(self.settle(e)))?;
            (0..bytes).step_by(FILL_CHUNK).try_for_each(|start| {
                let (at, len) = (off + start, FILL_CHUNK.min(bytes - start));
                queue.fill(dst.mem(), &wide[..n], at, len)?;
                done += len;
                Ok(())
            })
        };
        match filled {
            // An OpenCL 1.1 driver cannot fill.
            Err(e) if e.is_missing() => {
                let block = pattern.repeat((1usize << 20).min(bytes) / pattern.len());
                for_each_part("fill", (0..bytes).step_by(block.len()), |at| {
                    self.write(&block[..block.len().min(bytes - at)], (dst, off + at))
                })
            }
            other => other.map_err(|e| self.midway("fill", done, e)),
        }
    }
}

impl ClDevice {
    /// `fill` or `copy` of `kernels/memory.cl`; none for processors, and where they do not build.
    fn memory_kernel(&self, which: usize) -> Option<&ClKernel> {
        if self.info().kind == DeviceKind::Cpu {
            return None;
        }
        let source = include_str!("../../../kernels/memory.cl");
        let build = || match self.build("memory", source, ["fill", "copy"][which]) {
            Ok(kernel) => Some(Some(kernel)),
            Err(Error::Build { .. }) => Some(None),
            Err(_) => None,
        };
        self.memory_kernels[which + 2 * usize::from(self.has_wide_offsets())].get(build)?.as_ref()
    }

    /// A copy by kernel between ranges that do not overlap, on the current stream; false where there is none for it.
    fn copied_by_kernel(&self, src: ClAt<'_>, dst: ClAt<'_>, bytes: usize) -> Result<bool> {
        if !src.1.is_multiple_of(16) || !dst.1.is_multiple_of(16) {
            return Ok(false);
        }
        let Some(kernel) = self.memory_kernel(COPY) else { return Ok(false) };
        let (from, to) = (Arg::U64((src.1 / 16) as u64), Arg::U64((dst.1 / 16) as u64));
        let args = [Arg::Buffer(src.0), from, Arg::Buffer(dst.0), to, Arg::U64(bytes as u64)];
        self.launch_uncounted(kernel, &args, &[bytes.div_ceil(16)], &[kernel.max_work_group().min(256)])?;
        Ok(true)
    }
}

fn copy(q: &mut Queue, src: ClAt<'_>, dst: ClAt<'_>, n: usize, event: *mut cl_event) -> Result<(), ClError> {
    q.copy((src.0.mem(), src.1), (dst.0.mem(), dst.1), n, event)
}

/// The caller's mistake, found before the driver sees it.
pub(super) fn in_range(op: &'static str, (buffer, off): ClAt<'_>, bytes: usize) -> Result<()> {
    if off.checked_add(bytes).is_some_and(|end| end <= buffer.bytes()) {
        return Ok(());
    }
    Err(Error::invalid(op, format!("{bytes} bytes at {off} are beyond a buffer of {} bytes", buffer.bytes())))
}

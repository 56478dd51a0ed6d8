//! The commands of a device: kernels, and copies of bytes between host and device and within the device.

use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use opencl3::memory::{CL_MAP_READ, CL_MAP_WRITE_INVALIDATE_REGION};
use opencl3::types::cl_event;

use super::ClDevice;
use super::capture::{self, Command};
use super::driver::{ClAt, ClEvent, ClKernel, call, create};
use super::errors::ClError;
use super::fault::FaultSlot;
use super::host_memory::{BOUNCE_BYTES, BounceBuffer, HostMemory};
use super::launch::{Arg, enqueue_kernel, records_faults, set_arg};
use super::queue::{EARLIER_LAUNCH, Queue};
use super::queues::LockedQueue;
use super::tuning::{
    Level, MAX_TUNED_GROUP_ITEMS, PARAMETERS, SizeClass, Subject, TuningParameter, group_candidates,
    prepare_with_trials,
};
use crate::device::capture::is_capturing;
use crate::device::cpu::copy::copy as copy_bytes;
use crate::device::dry;
use crate::device::profiler::{self, RecordKind};
use crate::device::stream_id::StreamId;
use crate::device::{DeviceKind, count_launch};
use crate::error::for_each_part;
use crate::{Error, Result};

/// The index in [`ClDevice::memory_kernels`] of each kernel of `kernels/memory.cl`.
const FILL_KERNEL: usize = 0;
const COPY_KERNEL: usize = 1;
/// The minimum size of a fill by kernel on GPUs, in bytes: NVIDIA's fill command reaches three quarters of the memory's bandwidth.
const FILL_KERNEL_MIN_BYTES: usize = 128 << 10;
/// The maximum number of bytes of a fill command: NVIDIA's driver has hung at 2 GiB.
const MAX_FILL_BYTES: usize = 1 << 30;
/// The maximum size of the temporary buffer of an overlapping copy, in bytes.
const MAX_OVERLAP_BYTES: usize = 16 << 20;

/// The error for a driver that accepts a command and returns no event.
const NO_EVENT: ClError = ClError::new("clEnqueueReadBuffer", -58);

/// A range of a buffer that [`ClDevice::with_mapped`] maps, either to overwrite all of it or to read it.
pub(crate) struct MapRegion<'a> {
    pub(crate) at: ClAt<'a>,
    pub(crate) overwrite: bool,
    /// Whether to report errors of this thread's kernels and earlier commands.
    pub(crate) reports_faults: bool,
}

impl ClDevice {
    /// Submits a kernel to this thread's current stream, and returns. `global`, the number of work-items, is rounded up to whole groups
    /// of `local`; the kernel checks bounds. If `global` contains a zero, no kernel runs or is counted.
    ///
    /// # Errors
    /// A wrong number of arguments, a group larger than the kernel's maximum, and the driver's errors. After an error the
    /// kernel does not run.
    pub(crate) fn launch(&self, kernel: &ClKernel, args: &[Arg<'_>], global: &[usize], local: &[usize]) -> Result<()> {
        self.launch_uncounted(kernel, args, global, local)?;
        if !global.contains(&0) && !capture::count_launch(self.device()) {
            count_launch();
        }
        Ok(())
    }

    /// Launches like [`launch`](Self::launch), for kernels that do not count as launches.
    pub(crate) fn launch_uncounted(
        &self,
        kernel: &ClKernel,
        args: &[Arg<'_>],
        global: &[usize],
        local: &[usize],
    ) -> Result<()> {
        self.check_lost()?;
        let (dims, name) = (global.len(), kernel.name());
        invalid!(name if dims == 0 || dims > 3 || dims != local.len() || local.contains(&0),
            "cannot launch over {global:?} in groups of {local:?}");
        // With fewer arguments, the kernel would run with arguments of the last launch.
        invalid!(name if args.len() != kernel.arg_count(),
            "the kernel takes {} arguments, not {}", kernel.arg_count(), args.len());
        invalid!(name if local.iter().product::<usize>() > kernel.max_work_group(),
            "groups of {local:?} exceed the kernel's {} work-items", kernel.max_work_group());
        let is_dry = |arg: &Arg| matches!(arg, Arg::Buffer(buffer) if buffer.is_dry());
        if global.contains(&0) || dry::is_on() && args.iter().any(is_dry) {
            return Ok(());
        }
        let mut whole = [1usize; 3];
        for d in 0..dims {
            let rounded = global[d].checked_next_multiple_of(local[d]);
            whole[d] = rounded.ok_or_else(|| Error::invalid(name, format!("{global:?} work-items are too many")))?;
        }
        if is_capturing(self.device()) {
            return capture::record_kernel(self, kernel, args, &whole[..dims], local);
        }
        let slot = records_faults(args).then(|| self.slot());
        slot.map_or(Ok(()), |slot| self.clear(slot))?;
        let stream = self.current_stream();
        let behind = {
            let mut queue = self.lock(stream).map_err(|e| self.failed(e))?;
            let set = args.iter().enumerate().try_for_each(|(i, arg)| set_arg(kernel, i as u32, arg));
            let launched = set.and_then(|()| enqueue_kernel(&mut queue, kernel, &whole[..dims], local));
            if let Some(slot) = slot {
                slot.note_pending(stream);
            }
            launched
        };
        self.wait_for_checkpoint(stream, behind.map_err(|e| self.failed(e))?);
        Ok(())
    }

    /// Waits for `behind`, the earlier launch that [`enqueue_kernel`] returns if the queue is too long. If that launch failed, or the
    /// driver does not report its status, the next wait on the stream returns the error. The launch just submitted runs in any case.
    pub(super) fn wait_for_checkpoint(&self, stream: StreamId, behind: Option<ClEvent>) {
        let _waiting = behind.as_ref().and_then(|_| self.waiting("clWaitForEvents", stream));
        if let Some(Err(e)) = behind.map(|event| event.wait_for_success()) {
            self.queues.lock().all[stream.index()].note_failed(EARLIER_LAUNCH, Some(e.code));
        }
    }

    /// Copies bytes from one buffer to another, or within a buffer; the ranges may overlap. Returns when the copy is submitted, or with
    /// `blocking` when the copy is done.
    ///
    /// # Errors
    /// A range beyond its buffer; with `blocking`, also a fault recorded by a kernel of this thread.
    pub(crate) fn copy(&self, src: ClAt<'_>, dst: ClAt<'_>, bytes: usize, blocking: bool) -> Result<()> {
        check_range("copy", src, bytes).and(check_range("copy", dst, bytes))?;
        let (stream, recording) = (self.current_stream(), is_capturing(self.device()));
        let disjoint = src.0.mem() != dst.0.mem() || src.1.abs_diff(dst.1) >= bytes;
        if bytes > 0 && disjoint && blocking && !recording {
            return self.submit_and_report(stream, &[self.slot()], (), |q, (), event| {
                q.unmap_rest()?;
                copy(q, src, dst, bytes, event)
            });
        }
        // On GPUs a kernel starts sooner than the driver's copy and is as fast, but blocking copies use the driver's command.
        if bytes > 0 && disjoint && !blocking && self.copy_by_kernel(src, dst, bytes)? {
            return Ok(());
        }
        match (recording, disjoint) {
            (true, _) if bytes == 0 => Ok(()),
            (true, true) => {
                let (from, to) = ((src.0.mem(), src.1), (dst.0.mem(), dst.1));
                capture::record_command(self, |_| Ok(Command::Copy { from, to, bytes }))
            }
            (true, false) => Err(Error::invalid("copy", "a graph cannot contain copies between overlapping ranges")),
            (false, _) => {
                self.copy_on(stream, src, dst, bytes)?;
                if blocking { self.wait_and_report(stream, &[self.slot()]) } else { Ok(()) }
            }
        }
    }

    /// Copies like [`copy`](Self::copy) on a given stream; returns when the copy is submitted.
    pub(crate) fn copy_on(&self, stream: StreamId, src: ClAt<'_>, dst: ClAt<'_>, bytes: usize) -> Result<()> {
        self.check_lost()?;
        check_range("copy", src, bytes).and(check_range("copy", dst, bytes))?;
        let same = src.0.mem() == dst.0.mem();
        if bytes == 0 || same && src.1 == dst.1 {
            return Ok(());
        }
        if same && src.1.abs_diff(dst.1) < bytes {
            return self.copy_overlapping(stream, src, dst.1, bytes);
        }
        let copied = self.lock(stream).and_then(|mut q| copy(&mut q, src, dst, bytes, ptr::null_mut()));
        copied.map_err(|e| self.failed(e))
    }

    /// Copies overlapping ranges in pieces, ordered so that no piece overwrites bytes that a later piece reads. A piece is as long as
    /// the distance of the ranges; if the distance is short, larger pieces pass through a temporary buffer.
    fn copy_overlapping(&self, stream: StreamId, (buffer, src): ClAt<'_>, dst: usize, bytes: usize) -> Result<()> {
        let distance = src.abs_diff(dst);
        let direct = distance >= MAX_OVERLAP_BYTES || bytes / distance <= 2;
        let piece = if direct { distance } else { bytes.min(MAX_OVERLAP_BYTES) };
        let temporary = if direct { None } else { Some(self.create_buffer(piece).map_err(|e| self.error(e))?) };
        let mut done = 0;
        let copied: Result<(), ClError> = {
            let mut queue = self.lock(stream).map_err(|e| self.failed(e))?;
            (0..bytes).step_by(piece).try_for_each(|from| {
                let n = piece.min(bytes - from);
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
        copied.map_err(|e| self.partial_error("copy", done, e))
    }

    /// Converts the error of a refused command; [`Error::Partial`] if earlier commands have done `done` > 0 bytes of the operation.
    fn partial_error(&self, op: &'static str, done: usize, e: ClError) -> Error {
        let error = self.failed(e);
        if done > 0 { error.into_partial(op) } else { error }
    }

    /// Reads bytes of a buffer into host memory, waits, and returns the memory.
    ///
    /// # Errors
    /// A range beyond the buffer; a fault recorded by a kernel of this thread.
    pub(crate) fn read_into<M: HostMemory>(&self, src: ClAt<'_>, dst: M) -> Result<M> {
        self.read_on(self.current_stream(), &[self.slot()], src, dst)
    }

    /// Reads on a stream into host memory, waits, and reports the faults recorded in `slots`.
    fn read_on<M: HostMemory>(
        &self,
        stream: StreamId,
        slots: &[&'static FaultSlot],
        src: ClAt<'_>,
        mut dst: M,
    ) -> Result<M> {
        self.check_lost()?;
        let (_, bytes) = dst.range();
        check_range("read", src, bytes)?;
        if bytes == 0 {
            return Ok(dst);
        }
        self.submit_and_report(stream, slots, dst, |q, dst, event| {
            let to = dst.range().0.cast();
            q.unmap_rest()?;
            q.command((RecordKind::Read, "clEnqueueReadBuffer", bytes), event, |q, event| {
                call!(clEnqueueReadBuffer(q, src.0.mem(), 0, src.1, bytes, to, 0, ptr::null(), event))
            })
        })
    }

    /// Reads bytes into borrowed memory, and waits.
    pub(crate) fn read(&self, src: ClAt<'_>, dst: &mut [u8]) -> Result<()> {
        self.read_bounced(self.current_stream(), &[self.slot()], src, dst)
    }

    /// Reads like [`read`](Self::read) on the default stream without reporting faults.
    pub(crate) fn read_without_faults(&self, src: ClAt<'_>, dst: &mut [u8]) -> Result<()> {
        self.read_bounced(StreamId::DEFAULT, &[], src, dst)
    }

    fn read_bounced(
        &self,
        stream: StreamId,
        slots: &[&'static FaultSlot],
        src: ClAt<'_>,
        dst: &mut [u8],
    ) -> Result<()> {
        check_range("read", src, dst.len())?;
        dst.chunks_mut(BOUNCE_BYTES).enumerate().try_for_each(|(i, part)| {
            let from = (src.0, src.1 + i * BOUNCE_BYTES);
            let mut read = self.read_on(stream, slots, from, BounceBuffer::new(part.len())?)?;
            copy_bytes(part, read.bytes());
            Ok(())
        })
    }

    /// Writes bytes from host memory to a buffer, waits, and returns the memory.
    pub(crate) fn write_from<M: HostMemory>(&self, mut src: M, dst: ClAt<'_>) -> Result<M> {
        self.check_lost()?;
        let (_, bytes) = src.range();
        check_range("write", dst, bytes)?;
        if bytes == 0 {
            return Ok(src);
        }
        self.submit_and_wait(self.current_stream(), src, |q, src, event| {
            let from = src.range().0.cast_const().cast();
            q.unmap_rest()?;
            q.command((RecordKind::Write, "clEnqueueWriteBuffer", bytes), event, |q, event| {
                call!(clEnqueueWriteBuffer(q, dst.0.mem(), 0, dst.1, bytes, from, 0, ptr::null(), event))
            })
        })
        .map_err(|e| self.error(e))
    }

    /// Writes bytes from borrowed memory, and waits.
    pub(crate) fn write(&self, src: &[u8], dst: ClAt<'_>) -> Result<()> {
        check_range("write", dst, src.len())?;
        src.chunks(BOUNCE_BYTES).enumerate().try_for_each(|(i, part)| {
            let mut copy = BounceBuffer::new(part.len())?;
            copy_bytes(copy.bytes(), part);
            self.write_from(copy, (dst.0, dst.1 + i * BOUNCE_BYTES)).map(drop)
        })
    }

    /// Maps `bytes` bytes of a buffer and calls `f` with their address, to read or to overwrite all of them. Meanwhile the device is
    /// idle, and no thread can submit to it. For devices that share the host's memory.
    ///
    /// # Errors
    /// A range beyond its buffer; a fault recorded by a kernel of this thread.
    pub(crate) fn with_mapped(&self, region: MapRegion<'_>, bytes: usize, f: impl FnOnce(*mut u8)) -> Result<()> {
        self.check_lost()?;
        check_range("map", region.at, bytes)?;
        if bytes == 0 {
            return Ok(());
        }
        let none = ptr::null_mut();
        let (mem, off) = (region.at.0.mem(), region.at.1);
        let flags = if region.overwrite { CL_MAP_WRITE_INVALIDATE_REGION } else { CL_MAP_READ };
        let kind = if region.overwrite { RecordKind::Write } else { RecordKind::Read };
        let _mapped = profiler::span(kind, profiler::MAPPED, self.device(), self.current_stream().0, bytes);
        let slots = &[self.slot()][..usize::from(region.reports_faults)];
        let readings = self.while_idle(self.current_stream(), Vec::new(), |q, readings| {
            q.read_faults(readings, slots, false)?;
            let start = create!(clEnqueueMapBuffer(q.raw, mem, 1, flags, off, bytes, 0, ptr::null(), none))?;
            f(start.cast());
            q.unmap(region.at.0, start)
        });
        let readings = readings.map_err(|e| self.error(e))?;
        if region.reports_faults {
            self.take_failed(self.current_stream())?;
        }
        self.report(readings)
    }

    /// Fills bytes with a repeated pattern of 1, 2, 4, 8 or 16 bytes. `off` and `bytes` are multiples of the pattern's length.
    ///
    /// # Errors
    /// A range beyond the buffer, or a range that is not a multiple of the pattern.
    pub(crate) fn fill(&self, (dst, off): ClAt<'_>, bytes: usize, pattern: &[u8]) -> Result<()> {
        self.check_lost()?;
        check_range("fill", (dst, off), bytes)?;
        let n = pattern.len();
        invalid!("fill" if !matches!(n, 1 | 2 | 4 | 8 | 16) || !off.is_multiple_of(n) || !bytes.is_multiple_of(n),
            "cannot fill {bytes} bytes at offset {off} with a pattern of {n} bytes");
        if bytes == 0 {
            return Ok(());
        }
        let mut wide = [0u8; 16];
        wide.chunks_exact_mut(n).for_each(|c| c.copy_from_slice(pattern));
        // Drivers that write one pattern at a time are faster with a long pattern.
        let n = if off.is_multiple_of(16) && bytes.is_multiple_of(16) { 16 } else { n };
        if n == 16
            && bytes >= FILL_KERNEL_MIN_BYTES
            && let Some(kernel) = self.memory_kernel(FILL_KERNEL)
        {
            let count = bytes / 16;
            let (first, pattern) = (Arg::U64((off / 16) as u64), Arg::Bytes(&wide));
            let args = [Arg::Buffer(dst), first, pattern, Arg::U64(count as u64)];
            return self.launch_uncounted(kernel, &args, &[count], &[kernel.max_work_group().min(256)]);
        }
        if is_capturing(self.device()) {
            return (0..bytes).step_by(MAX_FILL_BYTES).try_for_each(|at| {
                let (to, offset, bytes) = (dst.mem(), off + at, MAX_FILL_BYTES.min(bytes - at));
                capture::record_command(self, |_| Ok(Command::Fill { to, offset, bytes, pattern: wide, length: n }))
            });
        }
        let mut done = 0;
        let filled: Result<(), ClError> = {
            let mut queue = self.lock(self.current_stream()).map_err(|e| self.failed(e))?;
            (0..bytes).step_by(MAX_FILL_BYTES).try_for_each(|start| {
                let (at, len) = (off + start, MAX_FILL_BYTES.min(bytes - start));
                queue.fill(dst.mem(), &wide[..n], at, len)?;
                done += len;
                Ok(())
            })
        };
        match filled {
            // An OpenCL 1.1 driver has no fill command, so the host writes the pattern.
            Err(e) if e.is_missing() => {
                let block = pattern.repeat((1usize << 20).min(bytes) / pattern.len());
                for_each_part("fill", (0..bytes).step_by(block.len()), |at| {
                    self.write(&block[..block.len().min(bytes - at)], (dst, off + at))
                })
            }
            other => other.map_err(|e| self.partial_error("fill", done, e)),
        }
    }

    /// Starts to read `bytes` bytes of a buffer to the host on a stream. The read is complete when the event is done. Faults of
    /// kernels are not reported: call [`report_faults`](Self::report_faults).
    ///
    /// # Safety
    /// Until the event is done, `to..to + bytes` stays valid for writes and no other code accesses it.
    pub(crate) unsafe fn start_read(
        &self,
        stream: StreamId,
        src: ClAt<'_>,
        to: NonNull<u8>,
        bytes: usize,
    ) -> Result<ClEvent> {
        check_range("read", src, bytes)?;
        let to = to.as_ptr().cast();
        self.submit_async(stream, |q, event| {
            q.command((RecordKind::Read, "clEnqueueReadBuffer", bytes), event, |q, event| {
                call!(clEnqueueReadBuffer(q, src.0.mem(), 0, src.1, bytes, to, 0, ptr::null(), event))
            })
        })
    }

    /// Starts to write `bytes` bytes from the host to a buffer on a stream. The host may change its bytes when the event is done.
    ///
    /// # Safety
    /// Until the event is done, `from..from + bytes` stays valid for reads and no code writes to it.
    pub(crate) unsafe fn start_write(
        &self,
        stream: StreamId,
        from: NonNull<u8>,
        dst: ClAt<'_>,
        bytes: usize,
    ) -> Result<ClEvent> {
        check_range("write", dst, bytes)?;
        let from = from.as_ptr().cast_const().cast();
        self.submit_async(stream, |q, event| {
            q.command((RecordKind::Write, "clEnqueueWriteBuffer", bytes), event, |q, event| {
                call!(clEnqueueWriteBuffer(q, dst.0.mem(), 0, dst.1, bytes, from, 0, ptr::null(), event))
            })
        })
    }

    /// Makes the next wait for the stream report the transfer if it failed, because no caller waits for the transfer's event.
    pub(crate) fn report_at_next_wait(&self, stream: StreamId, call: &'static str, transfer: &Arc<ClEvent>) {
        let mut queue = self.lock_for_waits(stream);
        queue.collect_transfers();
        queue.transfers.push_back((call, Arc::clone(transfer)));
    }

    /// Submits the command that `submit` enqueues, and returns its event. After an error, no command uses the caller's memory any
    /// more, or the device is lost.
    fn submit_async(
        &self,
        stream: StreamId,
        submit: impl FnOnce(&mut LockedQueue<'_>, *mut cl_event) -> Result<(), ClError>,
    ) -> Result<ClEvent> {
        self.check_lost()?;
        let mut raw = ptr::null_mut();
        let (submitted, event) = {
            let mut queue = self.lock(stream).map_err(|e| self.failed(e))?;
            let submitted = submit(&mut queue, &mut raw);
            let event = (!raw.is_null()).then(|| ClEvent(raw));
            let submitted = match submitted {
                Ok(()) if event.is_none() => queue.wait_until_over(None, NO_EVENT).and(Err(NO_EVENT)),
                // If the flush fails, the command stays on the queue, and the result is the outcome of the command.
                Ok(()) => queue.flush().or_else(|e| queue.wait_until_over(event.as_ref(), e)),
                Err(refused) => queue.wait_until_over(None, refused).and(Err(refused)),
            };
            (submitted, event)
        };
        submitted.and(event.ok_or(NO_EVENT)).map_err(|e| self.failed(e))
    }

    /// Returns `fill` or `copy` of `kernels/memory.cl`; `None` on processors, and if the kernels do not build.
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

    /// Copies between disjoint ranges with a kernel on the current stream; returns false if no kernel can copy these ranges.
    fn copy_by_kernel(&self, src: ClAt<'_>, dst: ClAt<'_>, bytes: usize) -> Result<bool> {
        if !src.1.is_multiple_of(16) || !dst.1.is_multiple_of(16) {
            return Ok(false);
        }
        let Some(kernel) = self.memory_kernel(COPY_KERNEL) else { return Ok(false) };
        let (from, to) = (Arg::U64((src.1 / 16) as u64), Arg::U64((dst.1 / 16) as u64));
        let args = [Arg::Buffer(src.0), from, Arg::Buffer(dst.0), to, Arg::U64(bytes as u64)];
        self.launch_uncounted(kernel, &args, &[bytes.div_ceil(16)], &[kernel.max_work_group().min(256)])?;
        Ok(true)
    }
}

/// Launches with tuned values, and with choices on trial.
impl ClDevice {
    /// Returns the device's value of a parameter.
    pub(crate) fn tuned(&self, knob: TuningParameter) -> usize {
        self.tuning().values[knob as usize].load(Relaxed)
    }

    /// Returns the value of a parameter for this size class: the choice for the class, or else the device's value.
    pub(crate) fn tuned_for(&self, knob: TuningParameter, class: SizeClass) -> usize {
        let default = self.tuned(knob);
        self.choice(Subject::TuningParameter(knob as usize), class, default, |level| {
            let choices = PARAMETERS[knob as usize].choices;
            let at = choices.iter().position(|&choice| choice == default).unwrap_or(0);
            match level {
                Level::Fast => choices[at.saturating_sub(1)..choices.len().min(at + 2)].to_vec(),
                _ => choices.to_vec(),
            }
        })
    }

    /// Returns the work-group size for a launch over `items` work-items: the choice for the size class, or else `default`. For kernels
    /// that run in groups of any size and check bounds.
    pub(crate) fn group_for(&self, kernel: &ClKernel, items: usize, default: usize) -> usize {
        let most = kernel.max_work_group().min(MAX_TUNED_GROUP_ITEMS);
        if kernel.has_fixed_group || default > most {
            return default;
        }
        let most_useful = most.min(items.next_power_of_two());
        let candidates =
            |level| group_candidates(level, default).into_iter().filter(|&group| group <= most_useful).collect();
        self.choice(Subject::Group(kernel.id), SizeClass::from_sizes([items]), default, candidates).min(most)
    }

    /// Returns the value of a choice for the launch that this thread prepares.
    fn choice(
        &self,
        subject: Subject,
        class: SizeClass,
        default: usize,
        candidates: impl FnOnce(Level) -> Vec<usize>,
    ) -> usize {
        // A recorded launch does not run, and so cannot be timed.
        let may_try = || !is_capturing(self.device());
        self.tuning().choices.choice((subject, class), default, may_try, candidates)
    }

    /// Prepares a launch and runs it, timed between idle streams if a choice is on trial. A launch that fails with a candidate, for
    /// example because the kernel needs too many resources, is repeated with the default. Returns the prepared launch, and whether
    /// it may be cached for similar launches.
    ///
    /// # Errors
    /// The errors of the launch with the default, or a lost device.
    pub(crate) fn launch_on_trial<P>(
        &self,
        prepare: impl Fn() -> Result<P>,
        launch: impl Fn(&P) -> Result<()>,
    ) -> Result<(P, bool)> {
        let (prepared, trial) = prepare_with_trials(&prepare);
        let run = |prepared: Result<P>| prepared.and_then(|prepared| launch(&prepared).map(|()| prepared));
        let Some(timed) = trial.filter(|trial| trial.is_timed) else {
            return Ok((run(prepared)?, trial.is_none()));
        };
        let stream = self.current_stream();
        self.drain_stream(stream)?;
        let from = Instant::now();
        let launched = run(prepared);
        let done =
            launched.as_ref().map_or(Ok(()), |_| self.drain_stream(stream).and_then(|()| self.take_failed(stream)));
        let micros = if launched.is_ok() && done.is_ok() { from.elapsed().as_secs_f64() * 1e6 } else { f64::INFINITY };
        if !dry::is_running() && self.tuning().choices.record_time(timed, micros) {
            self.tuning().store_new_choices();
        }
        done?;
        Ok((launched.or_else(|_| run(prepare()))?, false))
    }
}

fn copy(q: &mut Queue, src: ClAt<'_>, dst: ClAt<'_>, n: usize, event: *mut cl_event) -> Result<(), ClError> {
    q.copy((src.0.mem(), src.1), (dst.0.mem(), dst.1), n, event)
}

/// Returns an error if the range is not inside the buffer, before the driver is called.
pub(super) fn check_range(op: &'static str, (buffer, off): ClAt<'_>, bytes: usize) -> Result<()> {
    invalid!(op if off.checked_add(bytes).is_none_or(|end| end > buffer.bytes()),
        "{bytes} bytes at {off} are beyond a buffer of {} bytes", buffer.bytes());
    Ok(())
}

//! Errors found by kernels: an index out of range, an integer division by zero.
//!
//! A kernel cannot return an error, and a check after every launch would make each launch wait. So a kernel records its
//! first fault in four words of device memory. If such a kernel was launched, a thread that waits for the device also reads
//! the words, behind that kernel on any stream. Every thread has its own words, so one thread's bad index never fails
//! another thread's read, unless [`report_faults_to_any_thread`] was called.
//!
//! A fault is reported once. If the read of the words fails, the next read reports the fault ([`Reading`]). Reported words
//! are reset to zero before the next kernel uses them ([`FaultSlot::clear`]).

use std::cell::{Cell, RefCell, UnsafeCell};
use std::sync::atomic::{
    AtomicBool, AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};
use std::sync::{Mutex, MutexGuard};
use std::{mem, ptr};

use opencl3::memory::CL_MEM_READ_WRITE;
use opencl3::types::cl_context;

use super::driver::ClBuffer;
use super::errors::{ClError, FAILED_LATE};
use crate::Error;
use crate::device::stream_id::StreamId;
use crate::sync::lock;

/// The code in word 0 of the fault buffer. Kernels name the codes `FAULT_INDEX`, `FAULT_DIVISION` and `FAULT_LABEL`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub(crate) enum Fault {
    /// An index beyond its dimension.
    Index = 1,
    /// An integer divided by zero.
    DivisionByZero = 2,
    /// A class label beyond the number of classes.
    Label = 3,
}

/// The fault words: code, index (low and high word), size of the dimension.
pub(super) type FaultWords = [i32; 4];

/// The words without a fault. Static, because commands may read the words at any time.
pub(super) const NO_FAULT: &FaultWords = &[0; 4];

/// The first word of a read that has not arrived; no fault has this code. If a read fails after the driver accepted it, this value
/// is the only sign of the failure.
const UNREAD: i32 = -1;

/// The state that all devices' faults share.
struct Shared {
    /// True if all threads use the shared slots.
    any_thread: AtomicBool,
    /// The names of the operations whose kernels record an index, in order of their first launch.
    index_operations: Mutex<Vec<&'static str>>,
}

static SHARED: Shared = Shared { any_thread: AtomicBool::new(false), index_operations: Mutex::new(Vec::new()) };

/// Returns the code that a kernel records for an index out of range: [`Fault::Index`], and the operation's number in the bits above.
pub(crate) fn index_fault(op: &'static str) -> u32 {
    let mut names = lock(&SHARED.index_operations);
    let place = names.iter().position(|&name| name == op).unwrap_or_else(|| {
        names.push(op);
        names.len() - 1
    });
    Fault::Index as u32 | (place as u32) << 8
}

/// The words in which the kernels of one thread record a fault.
pub(super) struct FaultSlot {
    pub(super) buffer: ClBuffer,
    pending: Mutex<Pending>,
    /// True if there are words to read, or a read is in progress. Every wait checks this flag.
    is_pending: AtomicBool,
    /// True if the words must be reset to zero before use: they are new, or their fault was reported.
    stale: AtomicBool,
    clearing: Mutex<()>,
    /// The number of reads that have begun.
    begun: AtomicU64,
    /// The number of the last read that found no fault.
    clean: AtomicU64,
    /// The number of reads that found a fault.
    found: AtomicU64,
}

#[derive(Default)]
struct Pending {
    /// The streams on which a kernel that may record a fault was launched since the last read of the words.
    writers: Vec<StreamId>,
    /// True while a thread reads the words. Other threads then do not read.
    reading: bool,
}

/// A read of a slot's words. If the words were not examined, the drop leaves them to the next read. A command writes the words
/// until the read is over, so a `Reading` must not move before.
pub(super) struct Reading {
    pub(super) slot: &'static FaultSlot,
    pub(super) words: FaultWords,
    /// The streams that were pending when the read began.
    pub(super) writers: Vec<StreamId>,
    was_examined: bool,
    number: u64,
}

/// The progress of the reads of a thread's slot: see `ClDevice::fault_reads`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FaultReads {
    pub(crate) slot: u64,
    /// The number of reads that have begun.
    pub(crate) begun: u64,
    /// The number of the last read that found no fault.
    pub(crate) clean: u64,
    /// The number of reads that found a fault.
    pub(crate) found: u64,
}

impl Reading {
    /// Returns the fault in the words, if any. The fault is then reported, and the words must be reset.
    ///
    /// # Errors
    /// The words have not arrived.
    pub(super) fn examine(&mut self) -> Result<Option<Error>, ClError> {
        if self.words[0] == UNREAD {
            return Err(ClError::new("clEnqueueReadBuffer", FAILED_LATE));
        }
        self.was_examined = true;
        let fault = decode(self.words);
        if fault.is_some() {
            self.slot.found.fetch_add(1, AcqRel);
            self.slot.stale.store(true, Release);
            _ = OWN_FAULTS.try_with(|own| own.reported.set(own.reported.get() + 1));
        } else {
            self.slot.clean.fetch_max(self.number, AcqRel);
        }
        Ok(fault)
    }

    /// True if the words hold no fault. A fault is left to the next read, which reports it.
    pub(super) fn is_clean(&mut self) -> bool {
        self.was_examined = decode(self.words).is_none();
        self.was_examined
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        let mut pending = self.slot.pending();
        pending.reading = false;
        if !self.was_examined {
            self.writers.iter().for_each(|&stream| pending.add(stream));
        }
        self.slot.is_pending.store(!pending.writers.is_empty(), Release);
    }
}

impl Pending {
    /// Adds a stream unless the list contains it.
    fn add(&mut self, stream: StreamId) {
        if !self.writers.contains(&stream) {
            self.writers.push(stream);
        }
    }
}

/// The slots of ended threads, for reuse.
type IdleSlots = Mutex<Vec<&'static FaultSlot>>;

/// The number of idle slots at which a thread reads and reuses an idle slot instead of making a slot.
pub(super) const MAX_UNREAD_SLOTS: usize = 16;

pub(super) struct FaultSlots {
    /// The slot of threads that cannot have their own slot.
    pub(super) shared: &'static FaultSlot,
    idle: &'static IdleSlots,
    /// The destination of reads whose result is not used. Never released.
    pub(super) discard_memory: &'static UnsafeCell<FaultWords>,
}

/// A thread's ownership of a slot. The end of the thread drops this value, which makes the slot idle.
struct OwnedSlot {
    idle: &'static IdleSlots,
    slot: &'static FaultSlot,
}

impl Drop for OwnedSlot {
    fn drop(&mut self) {
        lock(self.idle).push(self.slot);
    }
}

/// A thread's slots, one per device, and the number of faults reported by the thread's calls.
struct OwnFaults {
    slots: RefCell<Vec<OwnedSlot>>,
    reported: Cell<u64>,
}

thread_local! {
    static OWN_FAULTS: OwnFaults = const { OwnFaults { slots: RefCell::new(Vec::new()), reported: Cell::new(0) } };
}

/// Returns the number of kernel faults (an index out of range, an integer division by zero) that were errors of this thread's
/// calls. If the number grew during a call that failed, the error may belong to an operation launched before that call; a
/// fault is reported only once.
///
/// ```
/// use claystone::{Device, Tensor, device::reported_faults};
/// let before = reported_faults();
/// let x = Tensor::zeros(3, Device::Cpu)?;
/// assert!(x.select(0, 7).is_err()); // found by the host
/// assert_eq!(reported_faults(), before);
/// # Ok::<(), claystone::Error>(())
/// ```
pub fn reported_faults() -> u64 {
    OWN_FAULTS.try_with(|own| own.reported.get()).unwrap_or(0)
}

/// Makes kernel faults errors of whichever thread waits next, instead of the thread that launched the kernel. For programs whose
/// threads hand work on, such as PyTorch, which runs backward passes on another thread. Call this before the first operation.
///
/// ```no_run
/// claystone::device::report_faults_to_any_thread();
/// ```
pub fn report_faults_to_any_thread() {
    SHARED.any_thread.store(true, Release);
}

impl FaultSlots {
    pub(super) fn new(context: cl_context) -> Result<FaultSlots, ClError> {
        Ok(FaultSlots {
            shared: FaultSlot::new(context)?,
            idle: Box::leak(Box::default()),
            discard_memory: Box::leak(Box::default()),
        })
    }

    /// Returns the slot of this thread; the shared slot if the thread has none.
    pub(super) fn current(&self) -> &'static FaultSlot {
        if SHARED.any_thread.load(Relaxed) {
            return self.shared;
        }
        let find =
            |own: &OwnFaults| own.slots.borrow().iter().find(|own| ptr::eq(own.idle, self.idle)).map(|own| own.slot);
        OWN_FAULTS.try_with(find).ok().flatten().unwrap_or(self.shared)
    }

    /// True if this thread, whose slot is `current`, may own a slot and has none.
    pub(super) fn needs_slot(&self, current: &FaultSlot) -> bool {
        ptr::eq(current, self.shared) && !SHARED.any_thread.load(Relaxed)
    }

    /// Makes a slot this thread's own. A thread that ends gets the shared slot.
    pub(super) fn own(&self, slot: &'static FaultSlot) -> &'static FaultSlot {
        let mine = OwnedSlot { idle: self.idle, slot };
        OWN_FAULTS.try_with(|own| own.slots.borrow_mut().push(mine)).map_or(self.shared, |()| slot)
    }

    pub(super) fn idle(&self) -> MutexGuard<'_, Vec<&'static FaultSlot>> {
        lock(self.idle)
    }

    /// Takes an idle slot without unread launches. A slot with unread launches may hold a fault that its thread never read.
    pub(super) fn take_clean(&self) -> Option<&'static FaultSlot> {
        let mut idle = self.idle();
        idle.iter().position(|slot| !slot.is_pending()).map(|at| idle.swap_remove(at))
    }

    /// If many slots are idle, takes a slot whose streams are finished, or else the oldest slot, which has the least to wait for.
    pub(super) fn take_unread(&self, is_finished: impl Fn(StreamId) -> bool) -> Option<&'static FaultSlot> {
        let mut idle = self.idle();
        let is_over = |slot: &FaultSlot| slot.pending().writers.iter().all(|&stream| is_finished(stream));
        (idle.len() >= MAX_UNREAD_SLOTS).then(|| {
            let at = idle.iter().position(|slot| is_over(slot)).unwrap_or(0);
            idle.remove(at)
        })
    }
}

impl FaultSlot {
    pub(super) fn new(context: cl_context) -> Result<&'static FaultSlot, ClError> {
        let buffer = ClBuffer::create(context, CL_MEM_READ_WRITE, size_of::<FaultWords>())?;
        Ok(Box::leak(Box::new(FaultSlot {
            buffer,
            pending: Mutex::default(),
            is_pending: AtomicBool::new(false),
            stale: AtomicBool::new(true),
            clearing: Mutex::default(),
            begun: AtomicU64::new(0),
            clean: AtomicU64::new(0),
            found: AtomicU64::new(0),
        })))
    }

    fn pending(&self) -> MutexGuard<'_, Pending> {
        lock(&self.pending)
    }

    /// Returns the progress of the reads of this slot.
    pub(super) fn reads(&self) -> FaultReads {
        let [begun, clean, found] = [&self.begun, &self.clean, &self.found].map(|count| count.load(Acquire));
        FaultReads { slot: ptr::from_ref(self).addr() as u64, begun, clean, found }
    }

    /// Calls `reset`, which sets the words to zero, if the words must be reset.
    pub(super) fn clear<E>(&self, reset: impl FnOnce() -> Result<(), E>) -> Result<(), E> {
        if !self.stale.load(Acquire) {
            return Ok(());
        }
        let _one_at_a_time = lock(&self.clearing);
        if self.stale.load(Acquire) {
            reset()?;
            self.stale.store(false, Release);
        }
        Ok(())
    }

    pub(super) fn is_pending(&self) -> bool {
        self.is_pending.load(Acquire)
    }

    /// Records the launch of a kernel that may record a fault. Call under the queues' lock.
    pub(super) fn note_pending(&self, stream: StreamId) {
        let mut pending = self.pending();
        pending.add(stream);
        self.is_pending.store(true, Release);
    }

    /// Starts a read if there is something to read and no other thread is reading. Call under the queues' lock.
    pub(super) fn begin_reading(&'static self) -> Option<Reading> {
        if !self.is_pending() {
            return None;
        }
        let mut pending = self.pending();
        if pending.reading || pending.writers.is_empty() {
            return None;
        }
        pending.reading = true;
        let number = self.begun.fetch_add(1, AcqRel) + 1;
        Some(Reading {
            slot: self,
            words: [UNREAD; 4],
            writers: mem::take(&mut pending.writers),
            was_examined: false,
            number,
        })
    }

    /// True if there may be words to read once this stream's work is done.
    pub(super) fn is_pending_on(&self, stream: StreamId) -> bool {
        self.is_pending() && self.pending().writers.contains(&stream)
    }

    /// True if the words can be read once this stream's work is done, without waiting for other streams.
    pub(super) fn is_pending_on_no_other(&self, stream: StreamId) -> bool {
        self.pending().writers.iter().all(|&other| other == stream)
    }
}

fn decode(words: FaultWords) -> Option<Error> {
    let index = i64::from(words[2]) << 32 | i64::from(words[1] as u32);
    let size = words[3] as u32 as usize;
    let out_of_range = |op| Error::IndexOutOfRange { op, index, size };
    match words[0] {
        0 => None,
        code if code == Fault::DivisionByZero as i32 => Some(Error::DivisionByZero { op: "div" }),
        code if code == Fault::Label as i32 => Some(out_of_range("cross_entropy")),
        code => {
            Some(out_of_range(lock(&SHARED.index_operations).get((code >> 8) as usize).copied().unwrap_or("gather")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fault_words_decode_to_errors() {
        assert!(decode([0, 5, 5, 5]).is_none());
        assert!(matches!(decode([1, -3, -1, 10]), Some(Error::IndexOutOfRange { index: -3, size: 10, .. })));
        let wide = decode([Fault::Index as i32, 7, 1, -1]);
        assert!(matches!(wide, Some(Error::IndexOutOfRange { index: 0x1_0000_0007, size: 0xffff_ffff, .. })));
        assert!(matches!(decode([2, 0, 0, 0]), Some(Error::DivisionByZero { .. })));
        let label = decode([Fault::Label as i32, 12, 0, 10]);
        assert!(matches!(label, Some(Error::IndexOutOfRange { op: "cross_entropy", index: 12, size: 10 })));
        for op in ["take", "scatter", "take"] {
            let named = decode([index_fault(op) as i32, 4, 0, 3]);
            assert!(matches!(named, Some(Error::IndexOutOfRange { op: name, index: 4, size: 3 }) if name == op));
        }
    }
}

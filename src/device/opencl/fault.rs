//! Errors that kernels find: a bad index, an integer division by zero.
//!
//! A kernel cannot return an error, and asking after every launch would make each one wait. So a kernel records the
//! first fault in four words of device memory, and whoever waits for the device anyway reads them too, if a kernel that
//! has them was launched, on whichever stream: the read is ordered behind it. Every thread has words of its own: one
//! thread's bad index never fails another's read, unless [`report_faults_to_any_thread`] asks for it.
//!
//! A fault is reported once. If the read of the words fails, the next read reports it ([`Reading`]). Words that were reported
//! are set to zero before another kernel gets them ([`ClDevice::clear`]).

use std::cell::{Cell, RefCell, UnsafeCell};
use std::ffi::c_void;
use std::sync::atomic::{
    AtomicBool, AtomicU64, Ordering::AcqRel, Ordering::Acquire, Ordering::Relaxed, Ordering::Release,
};
use std::sync::{Mutex, MutexGuard};
use std::{mem, ptr};

use opencl3::types::cl_context;

use super::context::create_buffer;
use super::driver::call;
use super::errors::FAILED_LATE;
use super::queues::{Locked, SERVICE};
use super::{Arg, ClBuffer, ClDevice, ClError};
use crate::device::StreamId;
use crate::device::lock;
use crate::{Error, Result};

/// What word 0 of the fault buffer says. Kernels know the codes as `FAULT_INDEX`, `FAULT_DIVISION` and `FAULT_LABEL`.
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

/// Code, index (low and high word), size of the dimension.
pub(super) type Words = [i32; 4];

/// What words are without a fault. Never released, so that any command may read them.
pub(super) static ZEROS: Words = [0; 4];

/// What the first word is until a read has reached it: no fault has this code. A read that fails after it was accepted leaves
/// it there, and nothing else tells of it.
const UNREAD: i32 = -1;

/// The operations whose kernels record an index, in the order in which they were first launched.
fn named() -> MutexGuard<'static, Vec<&'static str>> {
    static NAMES: Mutex<Vec<&'static str>> = Mutex::new(Vec::new());
    lock(&NAMES)
}

/// What a kernel records for an index beyond its dimension: [`Fault::Index`], and above it which operation it was.
pub(crate) fn index_fault(op: &'static str) -> u32 {
    let mut names = named();
    let place = names.iter().position(|&name| name == op).unwrap_or_else(|| {
        names.push(op);
        names.len() - 1
    });
    Fault::Index as u32 | (place as u32) << 8
}

/// The words in which the kernels that one thread launches record a fault.
pub(super) struct Slot {
    buffer: ClBuffer,
    pending: Mutex<Pending>,
    /// Whether there is anything to read, or being read: every wait asks.
    is_pending: AtomicBool,
    /// Whether the words have to be set to zero before use: they are new, or their fault was reported.
    stale: AtomicBool,
    /// Held while they are cleared.
    clearing: Mutex<()>,
    /// How many reads have begun, the last of them that found no fault, and how many found one.
    begun: AtomicU64,
    clean: AtomicU64,
    found: AtomicU64,
}

/// What is to be read of a slot.
#[derive(Default)]
struct Pending {
    /// The streams on which a kernel that may record a fault was launched since the words were last read.
    writers: Vec<StreamId>,
    /// Somebody reads them: nobody else does meanwhile.
    reading: bool,
}

/// Words of a slot being read. Unless they were told of, dropping it leaves them to the next read.
struct Reading {
    slot: &'static Slot,
    words: Words,
    /// The streams they were pending on.
    writers: Vec<StreamId>,
    told: bool,
    /// How many of the slot's had begun with this one.
    number: u64,
}

/// How far the reads of a thread's slot have got: see [`ClDevice::fault_reads`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct FaultReads {
    /// Tells the slot from others.
    pub(crate) slot: u64,
    pub(crate) begun: u64,
    /// The last one that found no fault.
    pub(crate) clean: u64,
    /// How many found one.
    pub(crate) found: u64,
}

impl Drop for Reading {
    fn drop(&mut self) {
        let mut pending = self.slot.pending();
        pending.reading = false;
        if !self.told {
            self.writers.iter().for_each(|&stream| pending.add(stream));
        }
        self.slot.is_pending.store(!pending.writers.is_empty(), Release);
    }
}

impl Pending {
    fn add(&mut self, stream: StreamId) {
        if !self.writers.contains(&stream) {
            self.writers.push(stream);
        }
    }
}

/// Words of several slots being read: memory that the reads own until they are over.
#[derive(Default)]
pub(super) struct Readings(Vec<Reading>);

impl Readings {
    /// Enqueues a read of the words of each slot that has any to read, behind all kernels that may write them; or waits
    /// for it.
    pub(super) fn enqueue(
        &mut self,
        queue: &mut Locked<'_>,
        slots: &[&'static Slot],
        blocking: bool,
    ) -> Result<(), ClError> {
        self.0.extend(slots.iter().filter_map(|slot| slot.begin_reading()));
        // From here on they stay where they are.
        for reading in &mut self.0 {
            queue.after(&reading.writers)?;
            let (mem, to, none) = (reading.slot.buffer.mem(), reading.words.as_mut_ptr().cast(), ptr::null_mut());
            let bytes = size_of::<Words>();
            call!(clEnqueueReadBuffer(queue.raw, mem, blocking.into(), 0, bytes, to, 0, ptr::null(), none))?;
        }
        Ok(())
    }
}

type Idle = Mutex<Vec<&'static Slot>>;

/// Slots of ended threads that nobody has read. From so many on one is read before another is made.
const MOST_UNREAD: usize = 16;

/// The slots of one device.
pub(super) struct Slots {
    /// For a thread that cannot have its own.
    shared: &'static Slot,
    /// Slots whose threads have ended.
    idle: &'static Idle,
    /// Where a read goes whose result is not used.
    unread: &'static UnsafeCell<Words>,
}

/// A thread's hold on a slot; its end makes the slot idle.
struct Mine {
    idle: &'static Idle,
    slot: &'static Slot,
}

impl Drop for Mine {
    fn drop(&mut self) {
        lock(self.idle).push(self.slot);
    }
}

thread_local! {
    static MINE: RefCell<Vec<Mine>> = const { RefCell::new(Vec::new()) };
    static REPORTED: Cell<u64> = const { Cell::new(0) };
}

/// Whether all threads use the shared slots.
static ANY_THREAD: AtomicBool = AtomicBool::new(false);

/// How many faults that kernels found (an index out of range, an integer division by zero) were errors of this thread's calls.
/// An error during which the count has grown may be of an operation that was launched before the call, and is reported this once.
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
    REPORTED.get()
}

/// From now on, whichever thread waits next is told what kernels found wrong, and not the thread that launched them: for programs whose
/// threads hand work on, as PyTorch's, which runs backward passes on a thread of its own. Call it before the first operation.
///
/// ```no_run
/// claystone::device::report_faults_to_any_thread();
/// ```
pub fn report_faults_to_any_thread() {
    ANY_THREAD.store(true, Release);
}

impl Slots {
    pub(super) fn new(context: cl_context) -> Result<Slots, ClError> {
        Ok(Slots { shared: Slot::new(context)?, idle: Box::leak(Box::default()), unread: Box::leak(Box::default()) })
    }

    /// The slot this thread has, or the shared one.
    fn current(&self) -> &'static Slot {
        if ANY_THREAD.load(Relaxed) {
            return self.shared;
        }
        let find =
            |mine: &RefCell<Vec<Mine>>| mine.borrow().iter().find(|m| ptr::eq(m.idle, self.idle)).map(|m| m.slot);
        MINE.try_with(find).ok().flatten().unwrap_or(self.shared)
    }

    /// The slot this thread has, or an idle one, or a new one. Not under the queues' lock.
    fn claim(&self, device: &ClDevice) -> &'static Slot {
        let current = self.current();
        if !ptr::eq(current, self.shared) || ANY_THREAD.load(Relaxed) {
            return current;
        }
        let read = || (0..MOST_UNREAD).find_map(|_| self.read_one(device)); // some hold faults, and are passed over
        let unused = self.clean().or_else(read).or_else(|| Slot::new(device.context).ok());
        let Some(slot) = unused else { return current };
        let mine = Mine { idle: self.idle, slot };
        MINE.try_with(|all| all.borrow_mut().push(mine)).map_or(current, |()| slot)
    }

    fn idle(&self) -> MutexGuard<'_, Vec<&'static Slot>> {
        lock(self.idle)
    }

    /// An idle slot, but none with what may be a fault that its thread never asked about.
    fn clean(&self) -> Option<&'static Slot> {
        let mut idle = self.idle();
        idle.iter().position(|slot| !slot.is_pending()).map(|at| idle.swap_remove(at))
    }

    /// Where many threads have ended without asking: one of their slots, read and found to be without a fault.
    fn read_one(&self, device: &ClDevice) -> Option<&'static Slot> {
        let slot = {
            let mut idle = self.idle();
            if idle.len() < MOST_UNREAD {
                return None;
            }
            let is_over = |slot: &Slot| slot.pending().writers.iter().all(|&s| device.queues.is_finished(s));
            let at = idle.iter().position(|slot| is_over(slot)).unwrap_or(0); // the oldest has the least to wait for
            idle.remove(at)
        };
        let mut read = device.submit_and_wait(SERVICE, Readings::default(), |q, readings, event| {
            readings.enqueue(q, &[slot], false)?;
            q.marker(event)
        });
        let is_clean = match read.as_mut().map(|readings| &mut readings.0[..]) {
            Ok([reading]) => {
                reading.told = decode(reading.words).is_none();
                reading.told
            }
            _ => false,
        };
        drop(read); // a fault is left to the next finish
        if !is_clean {
            self.idle().push(slot);
        }
        is_clean.then_some(slot)
    }

    pub(super) fn shared(&self) -> &'static Slot {
        self.shared
    }

    /// Room for words that nobody looks at, and that is never released.
    pub(super) fn unread(&self) -> *mut c_void {
        self.unread.get().cast()
    }
}

impl Slot {
    fn new(context: cl_context) -> Result<&'static Slot, ClError> {
        let buffer = create_buffer(context, size_of::<Words>())?;
        Ok(Box::leak(Box::new(Slot {
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

    pub(super) fn buffer(&self) -> &ClBuffer {
        &self.buffer
    }

    fn pending(&self) -> MutexGuard<'_, Pending> {
        lock(&self.pending)
    }

    /// Whether there may be something to read.
    pub(super) fn is_pending(&self) -> bool {
        self.is_pending.load(Acquire)
    }

    /// Notes, under the queues' lock, that one was launched.
    pub(super) fn note_pending(&self, stream: StreamId) {
        let mut pending = self.pending();
        pending.add(stream);
        self.is_pending.store(true, Release);
    }

    /// Under the queues' lock: takes what there is to read, unless somebody else is reading.
    fn begin_reading(&'static self) -> Option<Reading> {
        if !self.is_pending() {
            return None;
        }
        let mut pending = self.pending();
        if pending.reading || pending.writers.is_empty() {
            return None;
        }
        pending.reading = true;
        let number = self.begun.fetch_add(1, AcqRel) + 1;
        Some(Reading { slot: self, words: [UNREAD; 4], writers: mem::take(&mut pending.writers), told: false, number })
    }

    /// Whether there may be something to read once this stream is done.
    pub(super) fn is_pending_on(&self, stream: StreamId) -> bool {
        self.is_pending() && self.pending().writers.contains(&stream)
    }

    /// Whether no other stream has to be done before there is all to read.
    pub(super) fn is_pending_on_no_other(&self, stream: StreamId) -> bool {
        self.pending().writers.iter().all(|&other| other == stream)
    }
}

/// The error that the words record, if any.
fn decode(words: Words) -> Option<Error> {
    let index = i64::from(words[2]) << 32 | i64::from(words[1] as u32);
    let size = words[3] as u32 as usize;
    let out_of_range = |op| Error::IndexOutOfRange { op, index, size };
    match words[0] {
        0 => None,
        code if code == Fault::DivisionByZero as i32 => Some(Error::DivisionByZero { op: "div" }),
        code if code == Fault::Label as i32 => Some(out_of_range("cross_entropy")),
        code => Some(out_of_range(named().get((code >> 8) as usize).copied().unwrap_or("gather"))),
    }
}

impl ClDevice {
    /// Four words `{code, index low, index high, size}` of device memory, this thread's own, all zero until a kernel
    /// that is given this argument records a [`Fault`]: the first one wins, by `atomic_cmpxchg` on word 0. It comes back
    /// as the error of this thread's next read, blocking copy or finish, and the words are zero again. If the thread
    /// ends before, the next finish on any thread reports it.
    pub(crate) fn faults(&self) -> Arg<'_> {
        Arg::Faults(&self.faults.claim(self).buffer)
    }

    /// [`faults`](Self::faults) for a kernel that is known to find none: nobody has to read them for its sake.
    pub(crate) fn no_faults(&self) -> Arg<'_> {
        Arg::Buffer(&self.faults.claim(self).buffer)
    }

    /// Reports what a kernel of this thread found wrong; waits only if one that could was launched.
    pub(crate) fn report_faults(&self) -> Result<()> {
        let (slot, stream) = (self.slot(), self.current_stream());
        if slot.is_pending() { self.wait_and_report(stream, &[slot]) } else { self.take_failed(stream) }
    }

    /// How far the reads of this thread's faults have got. A kernel that was launched when so many had begun recorded nothing if a
    /// later one found no fault, and none found one meanwhile.
    pub(crate) fn fault_reads(&self) -> FaultReads {
        let slot = self.faults.claim(self);
        let load = |count: &AtomicU64| count.load(Acquire);
        FaultReads {
            slot: ptr::from_ref(slot).addr() as u64,
            begun: load(&slot.begun),
            clean: load(&slot.clean),
            found: load(&slot.found),
        }
    }

    /// The slot to read when this thread waits.
    pub(super) fn slot(&self) -> &'static Slot {
        self.faults.current()
    }

    /// This thread's slot and those that ended threads left with something to read.
    pub(super) fn slots_to_finish(&self) -> Vec<&'static Slot> {
        self.faults.idle().iter().copied().filter(|s| s.is_pending()).chain([self.slot()]).collect()
    }

    /// Tells the first fault among what was read, and leaves those of other slots to the next read, as well as words that the
    /// read has not reached.
    pub(super) fn report(&self, readings: Readings) -> Result<()> {
        for mut reading in readings.0 {
            if reading.words[0] == UNREAD {
                return Err(self.error(self.settle(ClError::new("clEnqueueReadBuffer", FAILED_LATE))));
            }
            reading.told = true;
            if let Some(fault) = decode(reading.words) {
                reading.slot.found.fetch_add(1, AcqRel);
                reading.slot.stale.store(true, Release);
                // Where this fails it is tried again before the next kernel that could record a fault.
                let _ = self.clear(reading.slot);
                REPORTED.set(REPORTED.get() + 1);
                return Err(fault);
            }
            reading.slot.clean.fetch_max(reading.number, AcqRel);
        }
        Ok(())
    }

    /// Sets a slot's words to zero where they are not: before a kernel gets them.
    pub(super) fn clear(&self, slot: &Slot) -> Result<()> {
        if !slot.stale.load(Acquire) {
            return Ok(());
        }
        let _one_at_a_time = lock(&slot.clearing);
        if !slot.stale.load(Acquire) {
            return Ok(());
        }
        let (mem, from, bytes) = (slot.buffer.mem(), ZEROS.as_ptr().cast(), size_of::<Words>());
        self.submit_and_wait(self.current_stream(), (), |q, (), event| {
            call!(clEnqueueWriteBuffer(q.raw, mem, 0, 0, bytes, from, 0, ptr::null(), event))
        })
        .map_err(|e| self.error(e))?;
        slot.stale.store(false, Release);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_become_errors() {
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

//! The recorder behind [`crate::profiler`]: what the program does while it is profiled, in a ring of bounded length.
//!
//! It is here, below the profiler itself, because queues, allocators and operations all record into it. While it is off,
//! recording costs one relaxed load.

use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use smallvec::SmallVec;

use super::lock;
use crate::{DType, Device};

static ON: AtomicBool = AtomicBool::new(false);

/// Whether something is being profiled.
#[inline(always)]
pub(crate) fn is_on() -> bool {
    ON.load(Relaxed)
}

/// What a record is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    /// An operation, while the host submits it, or on the CPU device while it runs.
    Operation,
    /// The gradient of an operation, on the host.
    Backward,
    /// A span that [`annotate`](crate::storage::annotate) names.
    Annotation,
    Kernel,
    Copy,
    Fill,
    Read,
    Write,
    /// The host waits for a device.
    Wait,
    /// The driver makes or releases a segment.
    Segment,
    /// A program is compiled.
    Compile,
    /// A program is loaded from the cache.
    Load,
    /// So many bytes more are allocated, or fewer.
    Allocated(i64),
    /// So many bytes are reserved from now on.
    Reserved(u64),
}

/// What an operation computes: what its record and those of its launches tell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Operation {
    pub name: &'static str,
    pub device: Device,
    /// Of its operands.
    pub shapes: SmallVec<[SmallVec<[usize; 4]>; 4]>,
    pub dtype: Option<DType>,
    /// Read and written, counting elements that broadcasting repeats once.
    pub bytes: u64,
    /// 0 where the number is not known.
    pub flops: u64,
}

/// Something that happened. Times are in nanoseconds.
#[derive(Debug, Clone)]
pub(crate) struct Record {
    pub kind: Kind,
    pub name: Cow<'static, str>,
    pub device: Option<Device>,
    /// The number of the stream, 0 for the default one.
    pub stream: u32,
    pub thread: u32,
    /// The annotation in force, as storage numbers them.
    pub annotation: u32,
    /// When the host began and ended, by [`now`].
    pub host: [u64; 2],
    /// When a command was queued, submitted, started and ended, by the device's clock.
    pub device_times: Option<[u64; 4]>,
    pub bytes: u64,
    /// The operation that it is part of.
    pub operation: Option<Arc<Operation>>,
}

#[derive(Default)]
struct Ring {
    records: VecDeque<Record>,
    capacity: usize,
    dropped: u64,
    threads: Vec<(u32, String)>,
    memory: Vec<Memory>,
}

/// A device's memory in a recording.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Memory {
    pub device: Device,
    /// Bytes allocated and reserved before the first record about memory.
    pub before: [u64; 2],
    /// [`SEGMENT_CHANGES`] when the allocator was last asked how much is reserved.
    changes: u32,
}

static RING: Mutex<Option<Ring>> = Mutex::new(None);

/// What was recorded.
#[derive(Default)]
pub(crate) struct Recorded {
    pub records: Vec<Record>,
    /// Older ones that did not fit.
    pub dropped: u64,
    /// Numbers and names of the threads that recorded.
    pub threads: Vec<(u32, String)>,
    pub memory: Vec<Memory>,
}

/// Begins recording up to `capacity` records; false where it has begun already.
pub(crate) fn begin(capacity: usize) -> bool {
    let mut ring = lock(&RING);
    if ring.is_some() {
        return false;
    }
    *ring = Some(Ring { capacity: capacity.max(1), ..Ring::default() });
    GENERATION.fetch_add(1, SeqCst);
    ON.store(true, SeqCst);
    true
}

/// Records nothing more, except what [`push`] is still given until [`take`].
pub(crate) fn pause() {
    ON.store(false, SeqCst);
}

/// Ends recording and gives what was recorded.
pub(crate) fn take() -> Recorded {
    pause();
    let Some(ring) = lock(&RING).take() else { return Recorded::default() };
    Recorded { records: ring.records.into(), dropped: ring.dropped, threads: ring.threads, memory: ring.memory }
}

/// Nanoseconds since the first call.
pub(crate) fn now() -> u64 {
    static FIRST: OnceLock<Instant> = OnceLock::new();
    FIRST.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

/// Grows with every recording, so that threads introduce themselves to each.
static GENERATION: AtomicU32 = AtomicU32::new(0);

thread_local! {
    static THREAD: Cell<(u32, u32)> = const { Cell::new((0, 0)) };
    static ANNOTATION: Cell<u32> = const { Cell::new(0) };
    static UNRECORDED: Cell<bool> = const { Cell::new(false) };
    static OPERATION: RefCell<Option<Arc<Operation>>> = const { RefCell::new(None) };
}

/// The thread of records that are not kept.
const NOBODY: u32 = u32::MAX;

/// Runs `f`, of which nothing is recorded on this thread.
pub(crate) fn unrecorded<R>(f: impl FnOnce() -> R) -> R {
    let outer = UNRECORDED.replace(true);
    let result = f();
    UNRECORDED.set(outer);
    result
}

/// This thread's number, and its name if the recording does not know it yet.
fn thread() -> (u32, Option<String>) {
    if UNRECORDED.try_with(Cell::get).unwrap_or(false) {
        return (NOBODY, None);
    }
    static NEXT: AtomicU32 = AtomicU32::new(1);
    let generation = GENERATION.load(Relaxed);
    let (known, number) = THREAD.try_with(Cell::get).unwrap_or((generation, 0));
    if known == generation {
        return (number, None);
    }
    let number = if number == 0 { NEXT.fetch_add(1, Relaxed) } else { number };
    let _ = THREAD.try_with(|thread| thread.set((generation, number)));
    let name = std::thread::current().name().map_or_else(|| format!("thread {number}"), str::to_owned);
    (number, Some(name))
}

impl Record {
    /// A record of this thread, which begins now and has not ended.
    pub(crate) fn begin(kind: Kind, name: impl Into<Cow<'static, str>>, device: impl Into<Option<Device>>) -> Record {
        let (thread, introduction) = thread();
        if let Some(name) = introduction
            && let Some(ring) = &mut *lock(&RING)
        {
            ring.threads.push((thread, name));
        }
        Record {
            kind,
            name: name.into(),
            device: device.into(),
            stream: 0,
            thread,
            annotation: ANNOTATION.try_with(Cell::get).unwrap_or(0),
            host: [now(), 0],
            device_times: None,
            bytes: 0,
            operation: OPERATION.try_with(|operation| operation.borrow().clone()).ok().flatten(),
        }
    }

    pub(crate) fn on_stream(mut self, stream: u32) -> Record {
        self.stream = stream;
        self
    }

    pub(crate) fn with_bytes(mut self, bytes: usize) -> Record {
        self.bytes = bytes as u64;
        self
    }

    /// It has ended on the host now.
    pub(crate) fn ended(mut self) -> Record {
        self.host[1] = now();
        self
    }
}

/// Keeps a record. The oldest makes place for it where the ring is full.
pub(crate) fn push(record: Record) {
    if record.thread == NOBODY {
        return;
    }
    if let Some(ring) = &mut *lock(&RING) {
        if ring.records.len() == ring.capacity {
            ring.records.pop_front();
            ring.dropped += 1;
        }
        ring.records.push_back(record);
    }
}

/// Records what takes from this call until the value is dropped. Nothing while nothing is profiled.
#[inline]
pub(crate) fn span(
    kind: Kind,
    name: &'static str,
    device: impl Into<Option<Device>>,
    stream: u32,
    bytes: usize,
) -> Option<Span> {
    is_on().then(|| Span::new(Record::begin(kind, name, device).on_stream(stream).with_bytes(bytes)))
}

/// A record that ends when this is dropped.
pub(crate) struct Span(Option<Record>);

impl Span {
    pub(crate) fn new(record: Record) -> Span {
        Span(Some(record))
    }
}

impl Span {
    /// Records nothing: it was something else.
    pub(crate) fn forget(mut self) {
        self.0 = None;
    }
}

impl Drop for Span {
    fn drop(&mut self) {
        if let Some(record) = self.0.take() {
            push(record.ended());
        }
    }
}

/// An operation in progress on this thread: records made meanwhile belong to it.
pub(crate) struct InOperation {
    outer: Option<Arc<Operation>>,
    span: Span,
}

/// Records an operation until the value is dropped. Nothing while nothing is profiled.
#[inline(always)]
pub(crate) fn operation(describe: impl FnOnce() -> Operation) -> Option<InOperation> {
    if is_on() { Some(in_operation(describe())) } else { None }
}

#[cold]
fn in_operation(operation: Operation) -> InOperation {
    let operation = Arc::new(operation);
    let mut record = Record::begin(Kind::Operation, operation.name, operation.device);
    (record.bytes, record.operation) = (operation.bytes, Some(Arc::clone(&operation)));
    let outer = OPERATION.try_with(|current| current.replace(Some(operation))).ok().flatten();
    InOperation { outer, span: Span::new(record) }
}

impl InOperation {
    /// Records nothing: the operation was declined.
    pub(crate) fn forget(mut self) {
        self.span.0 = None;
    }
}

impl Drop for InOperation {
    fn drop(&mut self) {
        let outer = self.outer.take();
        let _ = OPERATION.try_with(|current| *current.borrow_mut() = outer);
    }
}

/// How often a driver has made or released a segment.
static SEGMENT_CHANGES: AtomicU32 = AtomicU32::new(0);

/// Records a call that makes, changes or releases a segment, until the value is dropped. Nothing while nothing is profiled.
#[inline]
pub(crate) fn segment(name: &'static str, device: Option<Device>, bytes: usize) -> Option<Span> {
    if !is_on() {
        return None;
    }
    SEGMENT_CHANGES.fetch_add(1, Relaxed);
    span(Kind::Segment, name, device, 0, bytes)
}

/// Records that so many bytes more are allocated on a device, or fewer. `now` asks the allocator what is allocated and
/// reserved since: the first time, and when there are other segments.
#[cold]
pub(crate) fn memory(device: Device, change: i64, now: impl FnOnce() -> [u64; 2]) {
    let changes = SEGMENT_CHANGES.load(Relaxed);
    let known = |ring: &Ring| ring.memory.iter().position(|memory| memory.device == device);
    let fresh =
        lock(&RING).as_ref().is_none_or(|ring| known(ring).is_some_and(|at| ring.memory[at].changes == changes));
    push(Record::begin(Kind::Allocated(change), "", device).ended());
    if fresh {
        return;
    }
    let [allocated, reserved] = now(); // under locks of the allocator
    if let Some(ring) = &mut *lock(&RING) {
        match known(ring) {
            Some(at) => ring.memory[at].changes = changes,
            None => {
                let before = [allocated.saturating_add_signed(-change), reserved];
                ring.memory.push(Memory { device, before, changes });
            }
        }
    }
    push(Record::begin(Kind::Reserved(reserved), "", device).ended());
}

/// Tells annotations' names by their numbers.
static NAMES: OnceLock<fn(u32) -> String> = OnceLock::new();

/// Makes the annotation of this number the one in force on this thread, and gives the one before. `name_of` tells names of
/// numbers; it is the same function in every call.
pub(crate) fn set_annotation(number: u32, name_of: fn(u32) -> String) -> u32 {
    NAMES.get_or_init(|| name_of);
    ANNOTATION.try_with(|current| current.replace(number)).unwrap_or(0)
}

/// The name of an annotation; empty for none.
pub(crate) fn annotation_name(number: u32) -> String {
    match NAMES.get() {
        Some(name_of) if number != 0 => name_of(number),
        _ => String::new(),
    }
}

/// Has `f` called when the process exits, after the devices' last commands.
pub(crate) fn at_exit(f: extern "C" fn()) {
    // SAFETY: a function of the type that C wants, which does not unwind: a panic in an `extern "C"` function aborts.
    unsafe { libc::atexit(f) };
}

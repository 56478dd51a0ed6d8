//! The recorder behind [`crate::profiler`]: records events of the program into a bounded ring.
//!
//! The recorder is below the profiler in the module order because queues, allocators and operations all record into it.
//! While profiling is off, recording costs one relaxed load.

mod ring;

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use smallvec::SmallVec;

use crate::sync::lock;
use crate::{DType, Device};
use ring::{MemoryBefore, MemoryRecord};
pub(crate) use ring::{MemoryChange, Ring};

/// The recorder of the process.
struct Recorder {
    is_on: AtomicBool,
    /// The current recording; `None` while nothing is recorded.
    ring: Mutex<Option<Ring>>,
    /// The number of recordings so far. A thread registers its name once per recording.
    generation: AtomicU32,
    /// The number of threads and of executions that have got a number.
    threads: AtomicU32,
    executions: AtomicU32,
    /// The number of segments that drivers have made, changed or released.
    segment_changes: AtomicU32,
    /// The time of the first call of [`now`].
    first: OnceLock<Instant>,
    /// Returns the names of an annotation by its number, the innermost first.
    names_of: OnceLock<NamesOf>,
}

type NamesOf = fn(u32) -> Vec<String>;

static RECORDER: Recorder = Recorder {
    is_on: AtomicBool::new(false),
    ring: Mutex::new(None),
    generation: AtomicU32::new(0),
    threads: AtomicU32::new(0),
    executions: AtomicU32::new(0),
    segment_changes: AtomicU32::new(0),
    first: OnceLock::new(),
    names_of: OnceLock::new(),
};

#[inline(always)]
pub(crate) fn is_on() -> bool {
    RECORDER.is_on.load(Relaxed)
}

/// Defines [`RecordKind`] from rows of a kind and its name in a trace.
macro_rules! record_kinds {
    ($($(#[$doc:meta])* $kind:ident $name:literal,)*) => {
        /// The kind of an [`Event`](crate::profiler::Event), its category in a trace.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        pub enum RecordKind {
            $($(#[$doc])* $kind,)*
        }

        impl RecordKind {
            /// The kinds with their names in a trace.
            pub(crate) const NAMES: [(RecordKind, &str); [$($name),*].len()] = [$((RecordKind::$kind, $name)),*];
        }
    };
}

record_kinds! {
    /// An operation on the host: its submission to an OpenCL device, or its computation by the CPU device.
    Operation "operation",
    /// The computation of an operation's gradient, on the host.
    Backward "backward",
    /// A span named by [`annotate`](crate::storage::annotate).
    Annotation "annotation",
    /// A driver call that submits a command.
    Launch "launch",
    /// The host waits for a device.
    Wait "wait",
    /// The first use of a device: the driver creates a context and a queue.
    Open "open",
    /// The driver allocates or releases memory.
    Segment "segment",
    /// The compilation of a program.
    Compile "compile",
    /// The load of a compiled program from the cache.
    Load "load",
    /// A kernel that runs on a device.
    Kernel "kernel",
    /// A copy within a device.
    Copy "copy",
    /// A fill on a device.
    Fill "fill",
    /// A transfer from a device to the host.
    Read "read",
    /// A transfer from the host to a device.
    Write "write",
    /// Any other category in a trace of another program.
    Other "other",
}

impl RecordKind {
    /// Returns the name that a trace uses for this kind.
    pub fn name(self) -> &'static str {
        RecordKind::NAMES[self as usize].1
    }

    /// True for work on a device; false for work on the host.
    pub fn is_command(self) -> bool {
        use RecordKind::{Copy, Fill, Kernel, Read, Write};
        matches!(self, Kernel | Copy | Fill | Read | Write)
    }
}

/// The description of an operation, for its record and for the records of its launches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Operation {
    pub name: &'static str,
    pub device: Device,
    /// The shapes of the operands.
    pub shapes: SmallVec<[SmallVec<[usize; 4]>; 4]>,
    pub dtype: Option<DType>,
    /// Bytes read and written; elements repeated by broadcasting count once.
    pub bytes: u64,
    /// Floating-point operations; 0 if unknown.
    pub flops: u64,
}

/// The record name of transfers through mapped memory.
pub(crate) const MAPPED: &str = "clEnqueueMapBuffer";

/// An event. Times are in nanoseconds.
#[derive(Debug, Clone)]
pub(crate) struct Record {
    pub kind: RecordKind,
    /// The event's name; empty for an annotation, whose name is the innermost name of `annotation`.
    pub name: &'static str,
    pub device: Option<Device>,
    /// The number of the stream; 0 is the default stream.
    pub stream: u32,
    pub thread: u32,
    /// The number of the current annotation. A span of [`annotate`](crate::storage::annotate) has its own number.
    pub annotation: u32,
    /// The times of [`now`] at which the host began and ended.
    pub host: [u64; 2],
    /// The times at which a command was queued, submitted, started and ended, by the device's clock.
    pub device_times: Option<Box<[u64; 4]>>,
    pub bytes: u64,
    /// The operation to which the event belongs.
    pub operation: Option<Execution>,
}

#[derive(Debug, Clone)]
pub(crate) struct Execution {
    /// A number that identifies the execution.
    pub number: u32,
    pub operation: Arc<Operation>,
}

/// Starts to record, keeping the latest `capacity` records; false if a recording is running already.
pub(crate) fn begin(capacity: usize) -> bool {
    let mut ring = lock(&RECORDER.ring);
    if ring.is_some() {
        return false;
    }
    *ring = Some(Ring { capacity: capacity.max(1), began: now(), ..Ring::default() });
    RECORDER.generation.fetch_add(1, SeqCst);
    RECORDER.is_on.store(true, SeqCst);
    true
}

/// Discards the records made so far and returns the current time, at which the recording restarts.
pub(crate) fn restart() -> u64 {
    let began = now();
    if let Some(ring) = &mut *lock(&RECORDER.ring) {
        ring.records.clear();
        while !ring.memory.is_empty() {
            ring.forget_oldest_memory();
        }
        (ring.dropped, ring.began) = (0, began);
    }
    began
}

/// Stops recording. Records passed to [`push`] are still kept until [`take`].
pub(crate) fn pause() {
    RECORDER.is_on.store(false, SeqCst);
}

/// Ends the recording and returns the records.
pub(crate) fn take() -> Ring {
    pause();
    lock(&RECORDER.ring).take().unwrap_or_default()
}

/// Returns the nanoseconds since the first call.
pub(crate) fn now() -> u64 {
    RECORDER.first.get_or_init(Instant::now).elapsed().as_nanos() as u64
}

/// The recorder's state of a thread.
struct Thread {
    /// The generation of the recording that knows this thread's name.
    generation: Cell<u32>,
    /// The thread's number; 0 before its first record.
    number: Cell<u32>,
    /// The number of the current annotation.
    annotation: Cell<u32>,
    is_unrecorded: Cell<bool>,
    /// True if this thread has called a driver for a segment since it last recorded a change of memory.
    changed_segments: Cell<bool>,
}

thread_local! {
    static THREAD: Thread = const {
        Thread {
            generation: Cell::new(0),
            number: Cell::new(0),
            annotation: Cell::new(0),
            is_unrecorded: Cell::new(false),
            changed_segments: Cell::new(false),
        }
    };
    static OPERATION: RefCell<Option<Execution>> = const { RefCell::new(None) };
}

/// The thread number of records that are discarded.
const UNRECORDED_THREAD: u32 = u32::MAX;

/// Runs `f` without recording on this thread.
pub(crate) fn without_recording<R>(f: impl FnOnce() -> R) -> R {
    let outer = THREAD.with(|thread| thread.is_unrecorded.replace(true));
    let result = f();
    THREAD.with(|thread| thread.is_unrecorded.set(outer));
    result
}

/// Returns this thread's number, and the thread's name if the current recording does not have it yet.
fn thread() -> (u32, Option<String>) {
    let generation = RECORDER.generation.load(Relaxed);
    THREAD.with(|thread| {
        if thread.is_unrecorded.get() {
            return (UNRECORDED_THREAD, None);
        }
        if thread.generation.replace(generation) == generation {
            return (thread.number.get(), None);
        }
        if thread.number.get() == 0 {
            thread.number.set(RECORDER.threads.fetch_add(1, Relaxed) + 1);
        }
        let number = thread.number.get();
        let name = std::thread::current().name().map_or_else(|| format!("thread {number}"), str::to_owned);
        (number, Some(name))
    })
}

impl Record {
    /// Creates a record by this thread that starts now and has no end yet.
    pub(crate) fn begin(
        kind: RecordKind,
        name: &'static str,
        device: impl Into<Option<Device>>,
        stream: u32,
        bytes: u64,
    ) -> Record {
        let (thread, introduction) = thread();
        if let Some(name) = introduction
            && let Some(ring) = &mut *lock(&RECORDER.ring)
        {
            ring.threads.push((thread, name));
        }
        Record {
            kind,
            name,
            device: device.into(),
            stream,
            thread,
            annotation: annotation(),
            host: [now(), 0],
            device_times: None,
            bytes,
            operation: OPERATION.try_with(|operation| operation.borrow().clone()).ok().flatten(),
        }
    }

    pub(crate) fn ended(mut self) -> Record {
        self.host[1] = now();
        self
    }
}

/// Adds a record. If the ring is full, the oldest record is dropped.
pub(crate) fn push(record: Record) {
    if record.thread == UNRECORDED_THREAD {
        return;
    }
    if let Some(ring) = &mut *lock(&RECORDER.ring) {
        ring.push(record);
    }
}

/// Records an event from this call until the returned value is dropped; `None` if not profiling.
#[inline]
pub(crate) fn span(
    kind: RecordKind,
    name: &'static str,
    device: impl Into<Option<Device>>,
    stream: u32,
    bytes: usize,
) -> Option<Span> {
    is_on().then(|| Span(Some(Record::begin(kind, name, device, stream, bytes as u64))))
}

/// A record of an event that ends when this value is dropped.
pub(crate) struct Span(Option<Record>);

impl Span {
    /// Discards the record, because another event happened instead.
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

/// An operation in progress on this thread: new records belong to the operation.
pub(crate) struct OperationSpan {
    outer: Option<Execution>,
    span: Span,
}

/// Records an operation until the returned value is dropped; `None` if not profiling.
#[inline(always)]
pub(crate) fn operation(describe: impl FnOnce() -> Operation) -> Option<OperationSpan> {
    is_on().then(|| start_operation(describe()))
}

#[cold]
fn start_operation(operation: Operation) -> OperationSpan {
    let mut record = Record::begin(RecordKind::Operation, operation.name, operation.device, 0, operation.bytes);
    let operation = match &mut *lock(&RECORDER.ring) {
        Some(ring) => ring.share(operation),
        None => Arc::new(operation), // the recording has just ended
    };
    let execution = Execution { number: RECORDER.executions.fetch_add(1, Relaxed), operation };
    record.operation = Some(execution.clone());
    let outer = OPERATION.try_with(|current| current.replace(Some(execution))).ok().flatten();
    OperationSpan { outer, span: Span(Some(record)) }
}

impl OperationSpan {
    /// Discards the record, because the backend declined the operation.
    pub(crate) fn forget(mut self) {
        self.span.0 = None;
    }
}

impl Drop for OperationSpan {
    fn drop(&mut self) {
        let outer = self.outer.take();
        let _ = OPERATION.try_with(|current| *current.borrow_mut() = outer);
    }
}

/// Records a driver call that makes, changes or releases a segment, until the returned value is dropped; `None` if not profiling.
#[inline]
pub(crate) fn segment_span(name: &'static str, device: Option<Device>, bytes: usize) -> Option<Span> {
    if !is_on() {
        return None;
    }
    RECORDER.segment_changes.fetch_add(1, Relaxed);
    THREAD.with(|thread| thread.changed_segments.set(true));
    span(RecordKind::Segment, name, device, 0, bytes)
}

/// Records that the bytes allocated on a device grew by `bytes`, which may be negative. `now` returns the allocator's allocated and
/// reserved bytes; it is called for the device's first record, and after a change of segments.
#[cold]
pub(crate) fn record_memory(device: Device, bytes: i64, now: impl FnOnce() -> [u64; 2]) {
    if THREAD.with(|thread| thread.is_unrecorded.get()) {
        return;
    }
    let changes = RECORDER.segment_changes.load(Relaxed);
    let own = THREAD.with(|thread| thread.changed_segments.replace(false));
    match &mut *lock(&RECORDER.ring) {
        Some(ring) => {
            ring.push_memory(MemoryRecord { time: self::now(), device, change: MemoryChange::Allocated(bytes) });
            if !own && ring.devices.iter().any(|known| known.device == device && known.changes == changes) {
                return;
            }
        }
        None => return,
    }
    let [allocated, reserved] = now(); // outside the ring's lock, because this takes the allocator's locks
    if let Some(ring) = &mut *lock(&RECORDER.ring) {
        match ring.devices.iter_mut().find(|known| known.device == device) {
            Some(known) => known.changes = changes,
            None => {
                let allocated = allocated.saturating_add_signed(-ring.growth(device));
                ring.devices.push(MemoryBefore { device, allocated, reserved, changes });
            }
        }
        ring.push_memory(MemoryRecord { time: self::now(), device, change: MemoryChange::Reserved(reserved) });
    }
}

/// Makes this number the thread's current annotation, and returns the previous number. `names_of` must be the same function in
/// every call.
pub(crate) fn set_annotation(number: u32, names_of: NamesOf) -> u32 {
    RECORDER.names_of.get_or_init(|| names_of);
    THREAD.with(|thread| thread.annotation.replace(number))
}

/// Returns the number of this thread's current annotation; 0 for none.
pub(crate) fn annotation() -> u32 {
    THREAD.with(|thread| thread.annotation.get())
}

/// Returns the names of an annotation, the innermost first; empty for number 0.
pub(crate) fn annotation_names(number: u32) -> Vec<String> {
    match RECORDER.names_of.get() {
        Some(names_of) if number != 0 => names_of(number),
        _ => Vec::new(),
    }
}

/// Registers `f` to run when the process exits, after the devices' last commands.
pub(crate) fn at_exit(f: extern "C" fn()) {
    // SAFETY: `f` has the type that `atexit` expects and does not unwind: a panic in an `extern "C"` function aborts.
    unsafe { libc::atexit(f) };
}

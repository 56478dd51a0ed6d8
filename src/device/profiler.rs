//! The recorder behind [`crate::profiler`]: what the program does while it is profiled, in a ring of bounded length.
//!
//! It is here, below the profiler itself, because queues, allocators and operations all record into it. While it is off,
//! recording costs one relaxed load.

mod ring;

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed, Ordering::SeqCst};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use smallvec::SmallVec;

use super::lock;
use crate::{DType, Device};
use ring::Ring;
pub(crate) use ring::{MemoryBefore, MemoryChange, MemoryRecord};

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
    /// A span that [`annotate`](crate::storage::annotate) names, with the number of the annotation.
    Annotation(u32),
    Kernel,
    Copy,
    Fill,
    Read,
    Write,
    /// The host waits for a device.
    Wait,
    /// A device is opened: its context and its first queue are created.
    Open,
    /// The driver makes or releases a segment.
    Segment,
    /// A program is compiled.
    Compile,
    /// A program is loaded from the cache.
    Load,
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

/// The name of transfers through memory that is mapped.
pub(crate) const MAPPED: &str = "clEnqueueMapBuffer";

/// Something that happened. Times are in nanoseconds.
#[derive(Debug, Clone)]
pub(crate) struct Record {
    pub kind: Kind,
    /// Empty for annotations, whose numbers tell theirs.
    pub name: &'static str,
    pub device: Option<Device>,
    /// The number of the stream, 0 for the default one.
    pub stream: u32,
    pub thread: u32,
    /// The annotation in force, as storage numbers them.
    pub annotation: u32,
    /// When the host began and ended, by [`now`].
    pub host: [u64; 2],
    /// When a command was queued, submitted, started and ended, by the device's clock.
    pub device_times: Option<Box<[u64; 4]>>,
    pub bytes: u64,
    /// The operation that it is part of.
    pub operation: Option<Execution>,
}

/// An operation while it is executed.
#[derive(Debug, Clone)]
pub(crate) struct Execution {
    /// Tells executions apart.
    pub number: u32,
    pub of: Arc<Operation>,
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
    pub memory: Vec<MemoryRecord>,
    pub devices: Vec<MemoryBefore>,
}

/// Begins recording up to `capacity` records; false where it has begun already.
pub(crate) fn begin(capacity: usize) -> bool {
    let mut ring = lock(&RING);
    if ring.is_some() {
        return false;
    }
    *ring = Some(Ring { capacity: capacity.max(1), began: now(), ..Ring::default() });
    GENERATION.fetch_add(1, SeqCst);
    ON.store(true, SeqCst);
    true
}

/// Forgets what was recorded until now, the time that it gives.
pub(crate) fn begin_again() -> u64 {
    let began = now();
    if let Some(ring) = &mut *lock(&RING) {
        ring.records.clear();
        while !ring.memory.is_empty() {
            ring.forget_oldest_memory();
        }
        (ring.dropped, ring.began) = (0, began);
    }
    began
}

/// Records nothing more, except what [`push`] is still given until [`take`].
pub(crate) fn pause() {
    ON.store(false, SeqCst);
}

/// Ends recording and gives what was recorded.
pub(crate) fn take() -> Recorded {
    pause();
    let Some(ring) = lock(&RING).take() else { return Recorded::default() };
    Recorded {
        records: ring.records.into(),
        dropped: ring.dropped,
        threads: ring.threads,
        memory: ring.memory.into(),
        devices: ring.devices,
    }
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
    /// Whether this thread has called a driver for a segment since it last recorded a change of memory.
    static CHANGED_SEGMENTS: Cell<bool> = const { Cell::new(false) };
    static OPERATION: RefCell<Option<Execution>> = const { RefCell::new(None) };
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

fn is_unrecorded() -> bool {
    UNRECORDED.try_with(Cell::get).unwrap_or(false)
}

/// This thread's number, and its name if the recording does not know it yet.
fn thread() -> (u32, Option<String>) {
    if is_unrecorded() {
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
    pub(crate) fn begin(kind: Kind, name: &'static str, device: impl Into<Option<Device>>) -> Record {
        let (thread, introduction) = thread();
        if let Some(name) = introduction
            && let Some(ring) = &mut *lock(&RING)
        {
            ring.threads.push((thread, name));
        }
        Record {
            kind,
            name,
            device: device.into(),
            stream: 0,
            thread,
            annotation: annotation(),
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
        ring.push(record);
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
    outer: Option<Execution>,
    span: Span,
}

/// Records an operation until the value is dropped. Nothing while nothing is profiled.
#[inline(always)]
pub(crate) fn operation(describe: impl FnOnce() -> Operation) -> Option<InOperation> {
    if is_on() { Some(in_operation(describe())) } else { None }
}

#[cold]
fn in_operation(operation: Operation) -> InOperation {
    static EXECUTIONS: AtomicU32 = AtomicU32::new(0);
    let mut record = Record::begin(Kind::Operation, operation.name, operation.device);
    record.bytes = operation.bytes;
    let of = match &mut *lock(&RING) {
        Some(ring) => ring.share(operation),
        None => Arc::new(operation), // the recording has just ended
    };
    let execution = Execution { number: EXECUTIONS.fetch_add(1, Relaxed), of };
    record.operation = Some(execution.clone());
    let outer = OPERATION.try_with(|current| current.replace(Some(execution))).ok().flatten();
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
    let _ = CHANGED_SEGMENTS.try_with(|changed| changed.set(true));
    span(Kind::Segment, name, device, 0, bytes)
}

/// Records that so many bytes more are allocated on a device, or fewer. `now` asks the allocator what is allocated and
/// reserved since: the first time, and when there are other segments.
#[cold]
pub(crate) fn memory(device: Device, bytes: i64, now: impl FnOnce() -> [u64; 2]) {
    if is_unrecorded() {
        return;
    }
    let changes = SEGMENT_CHANGES.load(Relaxed);
    let own = CHANGED_SEGMENTS.try_with(|changed| changed.replace(false)).unwrap_or(false);
    match &mut *lock(&RING) {
        Some(ring) => {
            ring.push_memory(MemoryRecord { time: self::now(), device, change: MemoryChange::Allocated(bytes) });
            if !own && ring.devices.iter().any(|known| known.device == device && known.changes == changes) {
                return;
            }
        }
        None => return,
    }
    let [allocated, reserved] = now(); // under locks of the allocator
    if let Some(ring) = &mut *lock(&RING) {
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

/// Tells the names of an annotation by its number, the innermost first.
type NamesOf = fn(u32) -> Vec<String>;

static NAMES: OnceLock<NamesOf> = OnceLock::new();

/// Makes the annotation of this number the one in force on this thread, and gives the one before. `names_of` is the same
/// function in every call.
pub(crate) fn set_annotation(number: u32, names_of: NamesOf) -> u32 {
    NAMES.get_or_init(|| names_of);
    ANNOTATION.try_with(|current| current.replace(number)).unwrap_or(0)
}

/// The number of the annotation in force on this thread, 0 for none.
pub(crate) fn annotation() -> u32 {
    ANNOTATION.try_with(Cell::get).unwrap_or(0)
}

/// The names of an annotation, the innermost first; none for 0.
pub(crate) fn annotation_names(number: u32) -> Vec<String> {
    match NAMES.get() {
        Some(names_of) if number != 0 => names_of(number),
        _ => Vec::new(),
    }
}

/// Has `f` called when the process exits, after the devices' last commands.
pub(crate) fn at_exit(f: extern "C" fn()) {
    // SAFETY: a function of the type that C wants, which does not unwind: a panic in an `extern "C"` function aborts.
    unsafe { libc::atexit(f) };
}

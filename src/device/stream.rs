//! Streams: lines of work on one device, each in order, none ordered behind another unless told.
//!
//! Every thread submits to its current stream, the device's default one unless inside [`with_stream`]. Two streams may
//! overlap; [`Stream::wait_stream`] and [`Stream::wait_event`] put the work of one behind that of another without the
//! host waiting. The names and rules are those of `torch.cuda.Stream` and `torch.cuda.Event`.

use std::cell::RefCell;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::capture;
use super::hints::{Priority, StreamHints};
use super::opencl::{self, ClDevice, ClEvent};
use crate::device::lock;
use crate::{Device, Error, Result};

/// Streams of one device at a time.
pub(super) const MAX_STREAMS: usize = 1024;

/// Names a stream of one device: what a block of memory remembers of the stream it belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct StreamId(pub(crate) u32);

impl StreamId {
    /// The stream every device has.
    pub const DEFAULT: StreamId = StreamId(0);

    /// The stream of this number, for memory whose streams are a [`Driver`](crate::storage::Driver)'s of your own.
    pub fn new(index: u32) -> StreamId {
        StreamId(index)
    }

    /// A small number: 0 for the default stream. Numbers of streams that are gone are given again.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Hands out ids: those given back first, the latest foremost, so that memory cached for one is used again soon.
#[derive(Debug)]
pub(super) struct Ids {
    next: u32,
    idle: Vec<(StreamId, StreamHints)>,
}

impl Ids {
    /// Ids from `first` on.
    pub(super) const fn from(first: u32) -> Ids {
        Ids { next: first, idle: Vec::new() }
    }

    /// An id nobody has, of a stream with these hints. One that nobody ever had is given to `make` first.
    pub(super) fn take(&mut self, hints: StreamHints, make: impl FnOnce(StreamId) -> Result<()>) -> Result<StreamId> {
        let fits = |(_, of): &(StreamId, StreamHints)| *of == hints;
        // Where there can be no more streams, one with other hints is better than none.
        let any = (self.next as usize >= MAX_STREAMS).then(|| self.idle.len().checked_sub(1)).flatten();
        if let Some(at) = self.idle.iter().rposition(fits).or(any) {
            return Ok(self.idle.remove(at).0);
        }
        let id = StreamId(self.next);
        if id.index() >= MAX_STREAMS {
            let reason = format!("a device has at most {MAX_STREAMS} streams at a time: drop some, or share them");
            return Err(Error::invalid("Stream::new", reason));
        }
        make(id)?;
        self.next += 1;
        Ok(id)
    }

    pub(super) fn give_back(&mut self, id: StreamId, hints: StreamHints) {
        self.idle.push((id, hints));
    }
}

/// The ids of the CPU's streams.
static CPU: Mutex<Ids> = Mutex::new(Ids::from(1));

/// A line of work on a device: what is submitted to it runs in order. PyTorch's `torch.cuda.Stream`.
///
/// A handle: clones are the same stream. When the last one is dropped, what was submitted still runs; the queue behind
/// it then serves the next [`Stream::new`].
///
/// **Memory.** A tensor belongs to the stream on which it was made. Before another stream uses it, that one must wait
/// for the first ([`wait_stream`](Stream::wait_stream)); and as the tensor's memory is given to the next tensor of the
/// first stream as soon as it is dropped, the use on the second has to be announced
/// ([`Tensor::record_stream`](crate::Tensor::record_stream)), unless the tensor is kept until the first stream has in turn waited for the second.
///
/// On the CPU work is done when the call returns: streams are names, always idle.
///
/// ```
/// use claystone::{Device, Stream, Tensor, with_stream};
/// let device = Device::best();
/// let x = Tensor::full(&[1000], 2.0, device)?; // on the default stream
/// let side = Stream::new(device)?;
/// side.wait_stream(&Stream::current(device)?)?; // x is made before it is used
/// let y = with_stream(&side, || x.mul(&x))?;
/// Stream::current(device)?.wait_stream(&side)?; // y is made before it is used
/// assert_eq!(y.to_vec::<f32>()?, [4.0; 1000]);
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Stream(Arc<Inner>);

#[derive(Debug, PartialEq, Eq, Hash)]
struct Inner {
    device: Device,
    id: StreamId,
    hints: StreamHints,
}

impl Drop for Inner {
    fn drop(&mut self) {
        match self.device {
            _ if self.id == StreamId::DEFAULT => {}
            Device::Cpu => lock(&CPU).give_back(self.id, StreamHints::default()),
            Device::OpenCL(i) => _ = opencl::opened(i).map(|device| device.give_stream_back(self.id)),
        }
    }
}

impl Stream {
    /// A stream of its own: nobody else submits to it, and nothing orders it with others.
    ///
    /// # Errors
    /// [`Error::NoDevice`] if the device is not there, [`Error::Invalid`] if it has 1,024 streams already, and what the
    /// driver refuses.
    pub fn new(device: Device) -> Result<Stream> {
        Stream::with_hints(device, StreamHints::default())
    }

    /// [`new`](Self::new) with a priority, PyTorch's `torch.cuda.Stream(priority=...)`. A hint, as in
    /// [`with_hints`](Self::with_hints).
    ///
    /// ```
    /// use claystone::device::Priority;
    /// use claystone::{Device, Stream, Tensor, with_stream};
    /// let background = Stream::with_priority(Device::best(), Priority::Low)?;
    /// let x = with_stream(&background, || Tensor::ones(4, background.device())?.exp())?;
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`new`](Self::new).
    pub fn with_priority(device: Device, priority: Priority) -> Result<Stream> {
        Stream::with_hints(device, StreamHints { priority, ..StreamHints::default() })
    }

    /// [`new`](Self::new) with hints for the driver: OpenCL's `cl_khr_priority_hints` and `cl_khr_throttle_hints`. A hint that
    /// the driver does not take is ignored, which a `tracing` message at level `TRACE` says.
    ///
    /// # Errors
    /// Those of [`new`](Self::new).
    pub fn with_hints(device: Device, hints: StreamHints) -> Result<Stream> {
        let id = match device {
            Device::Cpu => lock(&CPU).take(StreamHints::default(), |_| Ok(()))?,
            Device::OpenCL(i) => opencl::open(i)?.take_stream(hints)?,
        };
        Ok(Stream(Arc::new(Inner { device, id, hints })))
    }

    /// The stream every device has, which all threads use unless told otherwise.
    /// PyTorch's `torch.cuda.default_stream`.
    ///
    /// # Errors
    /// [`Error::NoDevice`] if the device is not there.
    pub fn default_stream(device: Device) -> Result<Stream> {
        device.info()?;
        Ok(Stream(Arc::new(Inner { device, id: StreamId::DEFAULT, hints: StreamHints::default() })))
    }

    /// The stream to which this thread's work on the device goes: that of the innermost [`with_stream`], else the
    /// default one. PyTorch's `torch.cuda.current_stream`.
    ///
    /// # Errors
    /// [`Error::NoDevice`] if the device is not there.
    pub fn current(device: Device) -> Result<Stream> {
        let mine = CURRENT.try_with(|stack| find(&stack.borrow(), device).cloned()).ok().flatten();
        mine.map_or_else(|| Stream::default_stream(device), Ok)
    }

    /// The device.
    pub fn device(&self) -> Device {
        self.0.device
    }

    /// Which of the device's streams it is.
    pub fn id(&self) -> StreamId {
        self.0.id
    }

    /// What it was made with.
    pub fn hints(&self) -> StreamHints {
        self.0.hints
    }

    /// Waits until everything submitted to the stream so far is done.
    ///
    /// # Errors
    /// What a kernel that this thread submitted to the stream found wrong with its operands (an index out of range, an
    /// integer division by zero), [`Error::DeviceLost`] after a fault.
    pub fn synchronize(&self) -> Result<()> {
        self.cl()?.map_or(Ok(()), |cl| cl.finish_stream(self.id()))
    }

    /// Whether everything submitted to the stream is done. Does not wait. PyTorch's `query`, CUDA's `cudaStreamQuery`.
    ///
    /// # Errors
    /// [`Error::DeviceLost`] after a fault.
    pub fn is_idle(&self) -> Result<bool> {
        self.cl()?.map_or(Ok(true), |cl| cl.is_idle(self.id()))
    }

    /// An event that is done when everything submitted to the stream so far is.
    ///
    /// # Errors
    /// What the driver refuses, [`Error::DeviceLost`] after a fault.
    pub fn record_event(&self) -> Result<Event> {
        capture::refuse(self.device(), "record_event", BETWEEN)?;
        let event = self.cl()?.map(|cl| cl.record(self.id())).transpose()?.map(Arc::new);
        Ok(Event { device: self.device(), event, timed: None })
    }

    /// [`record_event`](Self::record_event) with an event that knows when it was done: PyTorch's
    /// `torch.cuda.Event(enable_timing=True)`. [`Event::elapsed_time`] is for two of these.
    ///
    /// # Errors
    /// Those of [`record_event`](Self::record_event).
    pub fn record_timed_event(&self) -> Result<Event> {
        capture::refuse(self.device(), "record_timed_event", BETWEEN)?;
        let event = self.cl()?.map(|cl| cl.record_timed(self.id())).transpose()?.map(Arc::new);
        Ok(Event { device: self.device(), event, timed: Some(Instant::now()) })
    }

    /// Holds back everything submitted to the stream from now on until the event is done. The host does not wait,
    /// unless the event is another device's: these share no events.
    ///
    /// # Errors
    /// What the driver refuses, [`Error::DeviceLost`] after a fault.
    pub fn wait_event(&self, event: &Event) -> Result<()> {
        capture::refuse(self.device(), "wait_event", BETWEEN)?;
        match (self.cl()?, &event.event) {
            (Some(cl), Some(there)) if self.device() == event.device => cl.stream_waits(self.id(), there),
            _ => event.synchronize(),
        }
    }

    /// Holds back everything submitted to the stream from now on until what was submitted to `other` so far is done.
    /// The host does not wait, unless `other` is another device's.
    ///
    /// # Errors
    /// What the driver refuses, [`Error::DeviceLost`] after a fault.
    pub fn wait_stream(&self, other: &Stream) -> Result<()> {
        if self == other { Ok(()) } else { self.wait_event(&other.record_event()?) }
    }

    fn cl(&self) -> Result<Option<&'static ClDevice>> {
        cl(self.device())
    }
}

/// Why a graph has no events.
const BETWEEN: &str = "a graph is one line of work on one stream";

/// The open device; none for the CPU.
fn cl(device: Device) -> Result<Option<&'static ClDevice>> {
    match device {
        Device::Cpu => Ok(None),
        Device::OpenCL(i) => opencl::open(i).map(Some),
    }
}

/// A point in a stream's work. PyTorch's `torch.cuda.Event`.
#[derive(Debug, Clone)]
pub struct Event {
    device: Device,
    /// None on the CPU, where everything is done already.
    event: Option<Arc<ClEvent>>,
    /// When it was recorded, if its time is wanted: on the CPU that is when it was done.
    timed: Option<Instant>,
}

impl Event {
    /// Whether everything before the event is done. Does not wait. PyTorch's `query`.
    ///
    /// # Errors
    /// A command that failed, [`Error::DeviceLost`] after a fault.
    pub fn is_done(&self) -> Result<bool> {
        self.ask(true, ClDevice::query)
    }

    /// Waits until everything before the event is done.
    ///
    /// # Errors
    /// A command that failed, [`Error::DeviceLost`] after a fault.
    pub fn synchronize(&self) -> Result<()> {
        self.ask((), ClDevice::wait)
    }

    /// The milliseconds from this event to `end`, by the device's clock; both are waited for. PyTorch's `elapsed_time`.
    ///
    /// ```
    /// use claystone::{Device, Stream, Tensor};
    /// let stream = Stream::current(Device::best())?;
    /// let start = stream.record_timed_event()?;
    /// Tensor::ones(&[100, 100], stream.device())?.exp()?;
    /// let end = stream.record_timed_event()?;
    /// assert!(start.elapsed_time(&end)? >= 0.0);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] for events of two devices, or without a time ([`Stream::record_timed_event`] makes those with); a
    /// command that failed, [`Error::DeviceLost`] after a fault.
    pub fn elapsed_time(&self, end: &Event) -> Result<f64> {
        let op = "elapsed_time";
        if self.device != end.device {
            let reason = format!("the events are of {} and {}, whose clocks differ", self.device, end.device);
            return Err(Error::invalid(op, reason));
        }
        let (Some(from), Some(to)) = (self.timed, end.timed) else {
            return Err(Error::invalid(op, "both events have to be those of record_timed_event"));
        };
        self.synchronize()?;
        end.synchronize()?;
        Ok(match (cl(self.device)?, &self.event, &end.event) {
            (Some(cl), Some(start), Some(end)) => {
                (i128::from(cl.done_at(end)?) - i128::from(cl.done_at(start)?)) as f64 / 1e6
            }
            _ => {
                (to.saturating_duration_since(from).as_secs_f64() - from.saturating_duration_since(to).as_secs_f64())
                    * 1e3
            }
        })
    }

    fn ask<R>(&self, done: R, ask: impl FnOnce(&ClDevice, &ClEvent) -> Result<R>) -> Result<R> {
        match (cl(self.device)?, &self.event) {
            (Some(cl), Some(event)) => ask(cl, event),
            _ => Ok(done),
        }
    }
}

thread_local! {
    /// The streams that this thread has set, and above them those of the [`with_stream`]s that it is in.
    static CURRENT: RefCell<Vec<Stream>> = const { RefCell::new(Vec::new()) };
}

/// The innermost of the device.
fn find(stack: &[Stream], device: Device) -> Option<&Stream> {
    stack.iter().rev().find(|stream| stream.device() == device)
}

/// The id of the stream to which this thread's work on the device goes. A few ns: every allocation asks.
pub(crate) fn current_id(device: Device) -> StreamId {
    let mine = CURRENT.try_with(|stack| find(&stack.borrow(), device).map(Stream::id)).ok().flatten();
    mine.unwrap_or(StreamId::DEFAULT)
}

/// Runs `f` with `stream` as this thread's current stream of its device; other devices keep theirs. Afterwards, also
/// after a panic, it is the stream that it was before. Waits for nothing. PyTorch's `torch.cuda.stream`.
///
/// ```
/// use claystone::{Device, Stream, with_stream};
/// let stream = Stream::new(Device::Cpu)?;
/// with_stream(&stream, || assert_eq!(Stream::current(Device::Cpu).unwrap(), stream));
/// assert_ne!(Stream::current(Device::Cpu)?, stream);
/// # Ok::<(), claystone::Error>(())
/// ```
pub fn with_stream<R>(stream: &Stream, f: impl FnOnce() -> R) -> R {
    struct Restore;
    impl Drop for Restore {
        fn drop(&mut self) {
            // The handle is dropped when the stack is no longer borrowed.
            let _last = CURRENT.try_with(|stack| stack.borrow_mut().pop());
        }
    }
    // A thread that is ending has no streams of its own any more.
    let entered = CURRENT.try_with(|stack| stack.borrow_mut().push(stream.clone()));
    let _restore = entered.is_ok().then_some(Restore);
    f()
}

/// Makes `stream` this thread's current stream of its device, until another is set or the [`with_stream`] that it is called
/// in ends. For callers whose scopes are not Rust's. Waits for nothing. PyTorch's `torch.cuda.set_stream`.
///
/// ```
/// use claystone::{Device, Stream, device::set_stream};
/// let stream = Stream::new(Device::Cpu)?;
/// set_stream(&stream);
/// assert_eq!(Stream::current(Device::Cpu)?, stream);
/// set_stream(&Stream::default_stream(Device::Cpu)?);
/// # Ok::<(), claystone::Error>(())
/// ```
pub fn set_stream(stream: &Stream) {
    // What was set before is dropped when the stack is no longer borrowed. A thread that is ending has no streams any more.
    let _before = CURRENT.try_with(|stack| {
        let mut stack = stack.borrow_mut();
        match stack.iter_mut().rev().find(|set| set.device() == stream.device()) {
            Some(set) => Some(std::mem::replace(set, stream.clone())),
            // Below the streams of all `with_stream`s, which take theirs from the top.
            None => {
                stack.insert(0, stream.clone());
                None
            }
        }
    });
}

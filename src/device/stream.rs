//! Streams: in-order queues of work on one device. Streams are unordered with each other unless one waits for another.
//!
//! Every thread submits to its current stream: the device's default stream, or the stream of the innermost
//! [`with_stream`]. Two streams may overlap; [`Stream::wait_stream`] and [`Stream::wait_event`] order the work of one stream
//! behind the work of another without a wait on the host. Names and rules are those of `torch.cuda.Stream` and `torch.cuda.Event`.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use super::capture;
use super::hints::{Priority, StreamHints};
use super::opencl::{self, ClDevice, ClEvent};
use super::stream_id::{CURRENT_STREAMS, CurrentStream, StreamId, StreamIds, with_current};
use crate::sync::{OnDrop, lock};
use crate::{Device, Error, Result};

static CPU_STREAM_IDS: Mutex<StreamIds> = Mutex::new(StreamIds::from(1));

/// A queue of work on a device: submitted work runs in order. PyTorch's `torch.cuda.Stream`.
///
/// A handle: clones refer to the same stream. When the last clone is dropped, submitted work still runs, and the next
/// [`Stream::new`] reuses the queue.
///
/// **Memory.** A tensor belongs to the stream on which it was made. Before another stream uses the tensor, that stream must
/// wait for the owning stream ([`wait_stream`](Stream::wait_stream)). When the tensor is dropped, its memory is reused at once
/// for the next tensor of the owning stream. So either keep the tensor until the owning stream has waited for the other
/// stream, or announce the use with [`Tensor::record_stream`](crate::Tensor::record_stream).
///
/// On the CPU, work is done when the call returns: streams are only names, and always idle.
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

/// The shared state of a [`Stream`]'s clones; its drop releases the id.
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
            Device::Cpu => lock(&CPU_STREAM_IDS).release(self.id, StreamHints::default()),
            Device::OpenCL(i) => _ = opencl::opened(i).map(|device| device.release_stream(self.id)),
        }
    }
}

impl Stream {
    /// Creates a stream that no other handle submits to and that is not ordered with other streams.
    ///
    /// # Errors
    /// [`Error::NoDevice`] if there is no such device, [`Error::Invalid`] if the device has 1,024 streams already, and the
    /// driver's errors.
    pub fn new(device: Device) -> Result<Stream> {
        Stream::with_hints(device, StreamHints::default())
    }

    /// Creates a stream with a priority, as PyTorch's `torch.cuda.Stream(priority=...)`. The priority is a hint, as in
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
    /// The errors of [`new`](Self::new).
    pub fn with_priority(device: Device, priority: Priority) -> Result<Stream> {
        Stream::with_hints(device, StreamHints { priority, ..StreamHints::default() })
    }

    /// Creates a stream with hints for the driver: OpenCL's `cl_khr_priority_hints` and `cl_khr_throttle_hints`. A hint that
    /// the driver does not accept is ignored, with a `tracing` message at level `TRACE`.
    ///
    /// # Errors
    /// The errors of [`new`](Self::new).
    pub fn with_hints(device: Device, hints: StreamHints) -> Result<Stream> {
        let id = match device {
            Device::Cpu => lock(&CPU_STREAM_IDS).acquire(StreamHints::default(), |_| Ok(()))?,
            Device::OpenCL(i) => opencl::open(i)?.acquire_stream(hints)?,
        };
        Ok(Stream(Arc::new(Inner { device, id, hints })))
    }

    /// Returns the device's default stream, which a thread uses unless it has set another stream. PyTorch's
    /// `torch.cuda.default_stream`.
    ///
    /// # Errors
    /// [`Error::NoDevice`] if there is no such device.
    pub fn default_stream(device: Device) -> Result<Stream> {
        device.info()?;
        Ok(Stream(Arc::new(Inner { device, id: StreamId::DEFAULT, hints: StreamHints::default() })))
    }

    /// Returns the stream to which this thread submits work for the device: the stream of the innermost [`with_stream`], else
    /// the default stream. PyTorch's `torch.cuda.current_stream`.
    ///
    /// # Errors
    /// [`Error::NoDevice`] if there is no such device.
    pub fn current(device: Device) -> Result<Stream> {
        let mine = with_current(device, |current| Arc::clone(&current.handle).downcast().ok()).flatten();
        mine.map_or_else(|| Stream::default_stream(device), |inner| Ok(Stream(inner)))
    }

    /// Returns the stream's device.
    pub fn device(&self) -> Device {
        self.0.device
    }

    /// Returns the stream's number on its device.
    pub fn id(&self) -> StreamId {
        self.0.id
    }

    /// Returns the hints with which the stream was created.
    pub fn hints(&self) -> StreamHints {
        self.0.hints
    }

    /// Waits until all work submitted to the stream so far is done.
    ///
    /// # Errors
    /// Invalid operands that a kernel of this thread on this stream found (an index out of range, an integer division by zero),
    /// [`Error::DeviceLost`] after a fault.
    pub fn synchronize(&self) -> Result<()> {
        open_cl(self.device())?.map_or(Ok(()), |cl| cl.finish_stream(self.id()))
    }

    /// True if all work submitted to the stream is done. Does not wait. PyTorch's `query`, CUDA's `cudaStreamQuery`.
    ///
    /// # Errors
    /// [`Error::DeviceLost`] after a fault.
    pub fn is_idle(&self) -> Result<bool> {
        open_cl(self.device())?.map_or(Ok(true), |cl| cl.is_idle(self.id()))
    }

    /// Records an event that is done when all work submitted to the stream so far is done.
    ///
    /// # Errors
    /// The driver's errors, [`Error::DeviceLost`] after a fault.
    pub fn record_event(&self) -> Result<Event> {
        capture::refuse_while_capturing(self.device(), "record_event", NO_EVENTS_REASON)?;
        let event = open_cl(self.device())?.map(|cl| cl.record(self.id())).transpose()?.map(Arc::new);
        Ok(Event { device: self.device(), event, timed: None })
    }

    /// Records an event with its time of completion, as PyTorch's `torch.cuda.Event(enable_timing=True)`.
    /// [`Event::elapsed_time`] takes two of these events.
    ///
    /// # Errors
    /// The errors of [`record_event`](Self::record_event).
    pub fn record_timed_event(&self) -> Result<Event> {
        capture::refuse_while_capturing(self.device(), "record_timed_event", NO_EVENTS_REASON)?;
        let event = open_cl(self.device())?.map(|cl| cl.record_timed(self.id())).transpose()?.map(Arc::new);
        Ok(Event { device: self.device(), event, timed: Some(Instant::now()) })
    }

    /// Makes work submitted to the stream from now on wait for the event. The host does not wait, unless the event belongs to
    /// another device: devices share no events.
    ///
    /// # Errors
    /// The driver's errors, [`Error::DeviceLost`] after a fault.
    pub fn wait_event(&self, event: &Event) -> Result<()> {
        capture::refuse_while_capturing(self.device(), "wait_event", NO_EVENTS_REASON)?;
        match (open_cl(self.device())?, &event.event) {
            (Some(cl), Some(there)) if self.device() == event.device => cl.stream_waits(self.id(), there),
            _ => event.synchronize(),
        }
    }

    /// Makes work submitted to the stream from now on wait for the work submitted to `other` so far.
    /// The host does not wait, unless `other` belongs to another device.
    ///
    /// # Errors
    /// The driver's errors, [`Error::DeviceLost`] after a fault.
    pub fn wait_stream(&self, other: &Stream) -> Result<()> {
        if self == other { Ok(()) } else { self.wait_event(&other.record_event()?) }
    }

    fn as_current(&self) -> CurrentStream {
        let handle: Arc<Inner> = Arc::clone(&self.0);
        CurrentStream { device: self.device(), id: self.id(), handle }
    }
}

const NO_EVENTS_REASON: &str = "a graph records the commands of one stream";

/// Opens the device; `None` for the CPU.
fn open_cl(device: Device) -> Result<Option<&'static ClDevice>> {
    match device {
        Device::Cpu => Ok(None),
        Device::OpenCL(i) => opencl::open(i).map(Some),
    }
}

/// A point in a stream's work. PyTorch's `torch.cuda.Event`.
#[derive(Debug, Clone)]
pub struct Event {
    device: Device,
    /// None on the CPU, where the work is done already.
    event: Option<Arc<ClEvent>>,
    /// For timed events, the host's time at recording: on the CPU, the time of completion.
    timed: Option<Instant>,
}

impl Event {
    /// True if all work before the event is done. Does not wait. PyTorch's `query`.
    ///
    /// # Errors
    /// A command that failed, [`Error::DeviceLost`] after a fault.
    pub fn is_done(&self) -> Result<bool> {
        self.query_event(true, ClDevice::query)
    }

    /// Waits until all work before the event is done.
    ///
    /// # Errors
    /// A command that failed, [`Error::DeviceLost`] after a fault.
    pub fn synchronize(&self) -> Result<()> {
        self.query_event((), ClDevice::wait)
    }

    /// Waits for both events and returns the milliseconds from this event to `end`, by the device's clock. PyTorch's
    /// `elapsed_time`.
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
    /// [`Error::Invalid`] for events of two devices, or for events without times ([`Stream::record_timed_event`] records the
    /// time); a command that failed, [`Error::DeviceLost`] after a fault.
    pub fn elapsed_time(&self, end: &Event) -> Result<f64> {
        let op = "elapsed_time";
        invalid!(op if self.device != end.device,
            "the events are of {} and {}, whose clocks differ", self.device, end.device);
        let (Some(from), Some(to)) = (self.timed, end.timed) else {
            return Err(Error::invalid(op, "both events must be made by record_timed_event"));
        };
        self.synchronize()?;
        end.synchronize()?;
        Ok(match (open_cl(self.device)?, &self.event, &end.event) {
            (Some(cl), Some(start), Some(end)) => {
                (i128::from(cl.done_at(end)?) - i128::from(cl.done_at(start)?)) as f64 / 1e6
            }
            _ => {
                (to.saturating_duration_since(from).as_secs_f64() - from.saturating_duration_since(to).as_secs_f64())
                    * 1e3
            }
        })
    }

    /// Calls `ask` with the open device and the event; returns `done` on the CPU.
    fn query_event<R>(&self, done: R, ask: impl FnOnce(&ClDevice, &ClEvent) -> Result<R>) -> Result<R> {
        match (open_cl(self.device)?, &self.event) {
            (Some(cl), Some(event)) => ask(cl, event),
            _ => Ok(done),
        }
    }
}

/// Runs `f` with `stream` as this thread's current stream of its device. Current streams of other devices stay unchanged.
/// The previous stream is restored afterwards, also after a panic. Does not wait. PyTorch's `torch.cuda.stream`.
///
/// ```
/// use claystone::{Device, Stream, with_stream};
/// let stream = Stream::new(Device::Cpu)?;
/// with_stream(&stream, || assert_eq!(Stream::current(Device::Cpu).unwrap(), stream));
/// assert_ne!(Stream::current(Device::Cpu)?, stream);
/// # Ok::<(), claystone::Error>(())
/// ```
pub fn with_stream<R>(stream: &Stream, f: impl FnOnce() -> R) -> R {
    // While a thread ends, the stack is gone.
    let entered = CURRENT_STREAMS.try_with(|stack| stack.borrow_mut().push(stream.as_current()));
    // The pop happens after `f`, and the popped stream is dropped after the borrow of the stack has ended.
    let pop = || _ = CURRENT_STREAMS.try_with(|stack| stack.borrow_mut().pop());
    let _restore = entered.is_ok().then(|| OnDrop(pop));
    f()
}

/// Makes `stream` this thread's current stream of its device, until the next call or the end of the enclosing [`with_stream`]. For
/// callers without Rust's scopes, such as bindings of other languages. Does not wait. PyTorch's `torch.cuda.set_stream`.
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
    // The previous stream is dropped after the borrow of the stack has ended. While a thread ends, the stack is gone.
    let _before = CURRENT_STREAMS.try_with(|stack| {
        let mut stack = stack.borrow_mut();
        match stack.iter_mut().rev().find(|set| set.device == stream.device()) {
            Some(set) => Some(std::mem::replace(set, stream.as_current())),
            // Insert below the streams of all enclosing `with_stream`s, because each of these pops the top of the stack.
            None => {
                stack.insert(0, stream.as_current());
                None
            }
        }
    });
}

//! Graph capture and replay: records the commands of a training step once, and submits them again without the host's cost per operation.

mod fuse;

use std::fmt;
use std::sync::Mutex;

use crate::device::capture::{self, ReplayHook, ReplayMode};
use crate::device::lock;
use crate::device::opencl::capture::Recorder;
use crate::device::opencl::capture::replay::Replayer;
use crate::storage::{Allocator, CaptureClaim, CapturedMemory, MemPool, MemPoolOptions, MemoryCapture};
use crate::{Device, Error, Result, Stream, with_stream};
use fuse::FormulaRecorder;

/// Commands of an OpenCL device that are recorded once and replayed many times (PyTorch's `torch.cuda.CUDAGraph`).
///
/// [`Graph::capture`] runs a closure and records the kernels, fills and copies that the closure submits, without running them.
/// Tensors made by the closure have undefined contents until the first [`Graph::replay`].
///
/// A replay submits the recorded commands again. Every kernel has its own object with its arguments set, so the host only enqueues
/// kernels, or one command buffer that holds all of them ([`ReplayMode`]). A replay computes on the tensors that the closure used:
/// to change an input, change its contents (`copy_`).
///
/// ```
/// use claystone::{Device, Graph, Tensor};
/// # let Some(device) = Device::all().into_iter().find(|&d| d != Device::Cpu) else { return Ok(()) };
/// let x = Tensor::zeros(3, device)?;
/// let (graph, y) = Graph::capture(device, || x.add_scalar(1)?.mul_scalar(2))?;
/// for value in [0, 1, 2] {
///     x.fill_(value)?;
///     graph.replay()?;
///     assert_eq!(y.to_vec::<f32>()?, [2.0 * (value as f32 + 1.0); 3]);
/// }
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// A whole training step can be captured: `zero_grad`, forward, `backward`, [`clip_grad_norm_`](crate::optim::clip_grad_norm_)
/// and the step of any optimiser of [`optim`](crate::optim). Values that change from step to step also change from replay to
/// replay, and the results have the same bits as calls of the closure:
///
/// - **Optimisers** count a replay as a step. Each replay sends its step's bias corrections and the optimiser's current learning
///   rate to the device. Set the learning rate between replays, directly or with a [`Scheduler`](crate::optim::Scheduler)
///   (PyTorch's `capturable=True`, with its learning rate in a tensor).
/// - **Random numbers**: each replay draws the numbers that a call would draw from the [`Generator`](crate::Generator), and advances
///   the generator as a call would. Calls and replays may alternate. Every generator that was current during the capture is covered.
/// - Other numbers of the host keep their values from the capture, unless [`on_replay`](Self::on_replay) updates them.
///   [`GradScaler`](crate::optim::GradScaler) reads the gradients, which cannot be captured. Use bf16, which needs no scaler.
///
/// **Fewer launches.** A chain of elementwise operations becomes one launch. An operation is fused into the operation that reads its
/// result if four conditions hold. Nothing else uses that result, inside the graph or afterwards through a handle. Both operations
/// have the same shape. The operands have not changed in between. Both compute in the dtype of the result: f32, f64 or i64. Fusion
/// therefore keeps the bits of separate calls. An elementwise operation whose result is never used is removed.
///
/// **Memory.** Allocations inside a capture come from a pool of the graph, or from a pool shared with [other graphs](Self::capture_in).
/// While the graph lives, the pool's memory goes to no other user, even if the tensor was dropped inside the capture. Tensors
/// from outside are kept alive and do not move. Dropping the graph waits for its replays and returns the memory to the allocator.
///
/// **Order.** Replays go to the stream that was current at the capture, behind everything submitted to that stream before.
///
/// If a kernel finds an invalid operand (such as a label out of range), the thread that captured the graph gets the error when it waits.
pub struct Graph {
    /// Dropped first: the drop waits for replays that are still running, because their memory is about to be reused.
    replayer: Replayer,
    memory: CapturedMemory,
    hooks: Vec<ReplayHook>,
    /// Locked during a replay that has hooks, so that the commands read the values that the hooks of the same replay wrote.
    replay_lock: Mutex<()>,
    /// Keeps the stream from being reused by another [`Stream::new`].
    stream: Stream,
}

impl Graph {
    /// Runs `f`, and records the commands that this thread submits to the device's current stream instead of running them. Returns
    /// the graph and the result of `f`, usually tensors that replays fill. Work of other threads and on other devices runs normally.
    ///
    /// # Errors
    /// Errors of `f`. [`Error::Invalid`] for a device that is not an OpenCL device or whose allocator is not the caching allocator,
    /// for a capture inside a capture, and for work that cannot be captured: reads to the host, waits, writes from the host, work on
    /// other streams, and events. After an error no command has run and the graph's memory is free again. Changes that `f` made on
    /// the host, such as cleared gradients, remain.
    pub fn capture<R>(device: Device, f: impl FnOnce() -> Result<R>) -> Result<(Graph, R)> {
        let pool = MemPool::of_device(device, MemPoolOptions::default())?; // this may open the device, so it comes before the recording
        Graph::capture_in(&pool, f)
    }

    /// Captures like [`capture`](Self::capture), with memory from a pool that several graphs share (PyTorch's `torch.cuda.graph(g,
    /// pool=...)`). Memory that one graph allocated and released during its capture is reused by the next, so that the graphs of a pool
    /// need little more memory than the largest of them.
    ///
    /// Replay the graphs one after another, in the order of their captures. A result is valid until an earlier graph of the pool is
    /// replayed again, because that graph may use the same memory for temporary tensors: read or copy the result before. Results
    /// of earlier graphs that the capture uses are kept, like all tensors from outside.
    ///
    /// ```
    /// use claystone::{Device, Graph, Tensor};
    /// let Some(device) = Device::all().into_iter().find(|&device| device != Device::Cpu) else { return Ok(()) };
    /// let x = Tensor::ones(1 << 20, device)?;
    /// let (first, y) = Graph::capture(device, || x.add_scalar(1.0)?.mul_scalar(2.0)?.sum((), false))?;
    /// let reserved = first.pool().stats().reserved_bytes;
    /// let (second, z) = Graph::capture_in(first.pool(), || x.add_scalar(2.0)?.mul_scalar(3.0)?.sum((), false))?;
    /// assert_eq!(second.pool().stats().reserved_bytes, reserved);
    /// first.replay()?;
    /// second.replay()?;
    /// assert_eq!([y.item::<f32>()?, z.item::<f32>()?], [4.0 * 1048576.0, 9.0 * 1048576.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// Errors of [`capture`](Self::capture). [`Error::Invalid`] if the pool has memory of another stream, which no replay would wait
    /// for, if the pool lends its memory to other allocations (`use_on_oom`), or while another thread captures into the pool.
    pub fn capture_in<R>(pool: &MemPool, f: impl FnOnce() -> Result<R>) -> Result<(Graph, R)> {
        let capture = GraphCapture::begin(pool)?;
        let result = f()?;
        Ok((capture.end(), result))
    }

    /// Submits all recorded commands in order, and returns without waiting for them.
    ///
    /// # Errors
    /// [`Error::Invalid`] inside a capture, or if parameters that the graph updates in one launch have since had different numbers of optimiser
    /// steps (capture again). An error of a hook of [`on_replay`](Self::on_replay), errors of the driver, and [`Error::DeviceLost`].
    /// [`Error::Partial`] if the driver refuses a command after earlier commands were submitted: set the tensors that the graph writes to a
    /// known state. After any other error nothing was submitted.
    pub fn replay(&self) -> Result<()> {
        let device = self.device();
        let reason = "a capture cannot contain the replay of another graph";
        capture::refuse_while_capturing(device, "Graph::replay", reason)?;
        let _guard = (!self.hooks.is_empty()).then(|| lock(&self.replay_lock));
        if !self.hooks.is_empty() {
            with_stream(&self.stream, || self.hooks.iter().try_for_each(|hook| (hook.before)()))?;
        }
        let replayed = self.replayer.replay();
        if matches!(replayed, Ok(()) | Err(Error::Partial { .. })) {
            self.memory.count_replay();
            self.hooks.iter().for_each(|hook| (hook.after)());
        }
        replayed
    }

    /// Runs `f`, with allocations from the device's allocator instead of the captured graph's pool. The pool gives the same memory to
    /// several tensors, so a replay would overwrite them. Use this for tensors that a hook of [`on_replay`](Self::on_replay) writes
    /// to. Outside of captures this function only runs `f`.
    ///
    /// ```
    /// use claystone::{Device, Graph, Tensor};
    /// let rate = Graph::outside(|| Tensor::zeros((), Device::Cpu))?;
    /// assert_eq!(rate.item::<f32>()?, 0.0);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn outside<R>(f: impl FnOnce() -> R) -> R {
        CapturedMemory::run_outside_pool(f)
    }

    /// Adds hooks to the graph that this thread is capturing on the device. Each replay calls `before` ahead of its commands, on the graph's stream,
    /// and `after` once they are submitted. Use hooks for values that the host computes for each step: `before` passes these values on with `fill_`
    /// or [`Tensor::map_into`](crate::Tensor::map_into), to tensors that the commands read and that were made before the capture or with
    /// [`outside`](Self::outside). Do not write values from the host in `before`: such a write waits for the previous replay.
    ///
    /// ```
    /// use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
    /// use claystone::{Device, Graph, Tensor};
    /// static STEP: AtomicU32 = AtomicU32::new(0);
    /// let Some(device) = Device::all().into_iter().find(|&device| device != Device::Cpu) else { return Ok(()) };
    /// let (x, step) = (Tensor::ones(3, device)?, Tensor::zeros((), device)?);
    /// let (graph, y) = Graph::capture(device, || {
    ///     let told = step.shallow_clone();
    ///     let tell = move || told.fill_(STEP.load(Relaxed)).map(drop);
    ///     Graph::on_replay(device, tell, || _ = STEP.fetch_add(1, Relaxed))?;
    ///     x.add(&step)
    /// })?;
    /// for step in 0..3 {
    ///     graph.replay()?;
    ///     assert_eq!(y.to_vec::<f32>()?, [1.0 + step as f32; 3]);
    /// }
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] if this thread is not capturing a graph of the device. An error of `before` is returned by
    /// [`replay`](Self::replay), which then submits nothing.
    pub fn on_replay(
        device: Device,
        before: impl Fn() -> Result<()> + Send + Sync + 'static,
        after: impl Fn() + Send + Sync + 'static,
    ) -> Result<()> {
        if !Graph::is_capturing(device) {
            let reason = format!("this thread is not capturing a graph of {device}");
            return Err(Error::invalid("Graph::on_replay", reason));
        }
        capture::on_replay(Box::new(before), Box::new(after));
        Ok(())
    }

    /// Returns how [`replay`](Self::replay) submits the commands: in command buffers that the driver keeps if the device supports them, otherwise
    /// from the host. If the driver rejects the command buffers, the mode is [`ReplayMode::Host`] from the first replay on. While a profile is
    /// recorded every replay uses `Host`, because profiles time single commands.
    ///
    /// ```
    /// use claystone::device::ReplayMode;
    /// use claystone::{Device, Graph, Tensor};
    /// let Some(device) = Device::all().into_iter().find(|&device| device != Device::Cpu) else { return Ok(()) };
    /// let x = Tensor::ones(3, device)?;
    /// let (mut graph, ()) = Graph::capture(device, || x.add_scalar_(1).map(drop))?;
    /// graph.replay()?;
    /// graph.set_replay_mode(ReplayMode::Host)?; // to compare
    /// graph.replay()?;
    /// assert_eq!(graph.replay_mode(), ReplayMode::Host);
    /// assert_eq!(x.to_vec::<f32>()?, [3.0; 3]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn replay_mode(&self) -> ReplayMode {
        self.replayer.mode()
    }

    /// Changes how [`replay`](Self::replay) submits the commands.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the device does not support `mode`, or if `mode` does not support one of the graph's commands.
    pub fn set_replay_mode(&mut self, mode: ReplayMode) -> Result<()> {
        self.replayer.set_mode(mode)
    }

    /// True if this thread is capturing a graph of the device (PyTorch's `torch.cuda.is_current_stream_capturing`).
    pub fn is_capturing(device: Device) -> bool {
        capture::is_capturing(device)
    }

    /// Returns a number that identifies this thread's current capture, or `None` if this thread captures no graph of the device (like the id of
    /// CUDA's `cudaStreamGetCaptureInfo`). Captures of two threads may have the same number.
    pub fn capture_id(device: Device) -> Option<u64> {
        Graph::is_capturing(device).then(capture::capture_id)
    }

    /// Returns the device of the captured stream.
    pub fn device(&self) -> Device {
        self.stream.device()
    }

    /// Returns the stream to which replays are submitted.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Returns the number of commands that a replay submits: kernels, fills and copies.
    pub fn commands(&self) -> usize {
        self.replayer.len()
    }

    /// Returns the graph's memory pool, which other graphs can [share](Self::capture_in) (PyTorch's `CUDAGraph.pool`). Replays
    /// overwrite memory that is allocated from the pool outside of captures.
    pub fn pool(&self) -> &MemPool {
        self.memory.pool()
    }

    /// Returns the bytes of device memory that the pool has reserved, including memory for other graphs that share the pool.
    pub fn reserved_bytes(&self) -> u64 {
        self.pool().stats().reserved_bytes
    }
}

/// A capture in progress on this thread, for programs whose calls do not fit into a closure (PyTorch's `CUDAGraph.capture_begin`).
/// Dropping the value abandons the capture like an error of [`Graph::capture`]'s closure.
///
/// ```
/// use claystone::storage::{MemPool, MemPoolOptions};
/// use claystone::{Device, GraphCapture, Tensor};
/// let Some(device) = Device::all().into_iter().find(|&device| device != Device::Cpu) else { return Ok(()) };
/// let x = Tensor::ones(3, device)?;
/// let capture = GraphCapture::begin(&MemPool::of_device(device, MemPoolOptions::default())?)?;
/// let y = x.add_scalar(1)?;
/// let graph = capture.end();
/// graph.replay()?;
/// assert_eq!(y.to_vec::<f32>()?, [2.0; 3]);
/// # Ok::<(), claystone::Error>(())
/// ```
#[must_use = "dropping it abandons the capture"]
pub struct GraphCapture {
    memory: MemoryCapture,
    formulas: FormulaRecorder,
    recorder: Recorder,
    _claim: CaptureClaim,
    stream: Stream,
}

impl GraphCapture {
    /// Records from now on the commands that this thread submits to the current stream of the pool's device, with memory from the pool.
    ///
    /// # Errors
    /// [`Error::Invalid`] as for [`Graph::capture_in`].
    pub fn begin(pool: &MemPool) -> Result<GraphCapture> {
        let device = pool.allocator().device();
        let stream = Stream::current(device)?;
        let fail = |reason: String| Err(Error::invalid("Graph::capture_in", reason));
        if let Some(other) = pool.other_stream(stream.id()) {
            let (other, own) = (other.index(), stream.id().index());
            return fail(format!("the pool has memory of stream {other}: capture on that stream, not on {own}"));
        }
        if pool.has_use_on_oom() {
            return fail("the pool lends its free memory to other allocations: make it without use_on_oom".into());
        }
        let Some(claim) = pool.claim_capture() else {
            return fail("a capture into the pool is in progress: capture one graph at a time".into());
        };
        let reason = "the CPU runs work immediately and has no queue to record: call the closure directly";
        let recorder = Recorder::start(device.opencl("Graph::capture", reason)?)?;
        let formulas = FormulaRecorder::start();
        Ok(GraphCapture { memory: CapturedMemory::capture(pool), formulas, recorder, _claim: claim, stream })
    }

    /// Ends the capture and returns the graph of the recorded commands.
    pub fn end(self) -> Graph {
        let GraphCapture { memory, formulas, recorder, _claim, stream } = self;
        let mut memory = memory.finish();
        let hooks = capture::take_hooks();
        let changes = formulas.changes(&recorder, &std::mem::take(&mut memory.uses));
        let replayer = Replayer::new(recorder.finish().with_changes(changes));
        Graph { replayer, memory, hooks, replay_lock: Mutex::new(()), stream }
    }
}

impl fmt::Debug for GraphCapture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "capture of a graph on {}", self.stream.device())
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "graph of {} commands on {}", self.commands(), self.device())
    }
}

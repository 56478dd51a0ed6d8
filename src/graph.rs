//! Work recorded once and replayed: a training step without what it costs the host.

use std::fmt;
use std::sync::Mutex;

use crate::backend::problem::recording::Recording;
use crate::device::capture::{self, ReplayHook, ReplayMode};
use crate::device::lock;
use crate::storage::{Allocator, Captured, MemPool, MemPoolOptions};
use crate::{Device, Error, Result, Stream, backend, with_stream};

/// Work of an OpenCL device, recorded to be submitted again and again (PyTorch's `torch.cuda.CUDAGraph`).
///
/// [`Graph::capture`] runs a closure once and writes down the kernels, fills and copies it would have submitted, without
/// running any of them: until the first [`Graph::replay`] the tensors made inside hold nothing in particular. A replay
/// submits all of it with everything decided: kernels have objects of their own whose arguments are set, so that the host
/// only enqueues, or enqueues a command buffer that has them all ([`ReplayMode`]). It computes what the closure would compute, on the tensors it used: change their contents (`copy_`) for
/// other inputs.
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
/// A whole training step is captured likewise: `zero_grad`, forward, `backward`,
/// [`clip_grad_norm_`](crate::optim::clip_grad_norm_) and the step of any optimiser of [`optim`](crate::optim). What changes from
/// step to step changes from replay to replay, to the same bits as if the closure were called again:
///
/// - **Optimisers** count a replay as a step, and each replay brings the numbers of its step to the device: bias corrections, and
///   the learning rate that the optimiser has then. Set it between replays, directly or by a
///   [`Scheduler`](crate::optim::Scheduler) (PyTorch's `capturable=True`, and its learning rate in a tensor).
/// - **Random numbers**: each replay draws from the [`Generator`](crate::Generator) what a call would draw, and advances it as a call
///   would, so calls and replays may alternate. This holds for every generator that was current during the capture.
/// - Other numbers of the host are what they were at the capture, unless [`on_replay`](Self::on_replay) brings them.
///   [`GradScaler`](crate::optim::GradScaler) reads the gradients, which cannot be captured: bf16 does without.
///
/// **Fewer launches.** A chain of elementwise operations becomes one launch. An operation is joined into the one that reads its
/// result if nothing else uses that result (inside the graph, or afterwards through a handle), if both have the same shape, if its
/// operands have not changed by then, and if both compute in the dtype of the result: f32, f64 or i64. So the bits are those of
/// calls. An elementwise operation whose result nobody uses is left out.
///
/// **Memory.** What is allocated inside comes from a pool of the graph's own, or of [several](Self::capture_in): as long as the graph lives nobody else is
/// given it, also what was dropped inside. Tensors from outside are kept alive and do not move. When the graph is dropped,
/// it waits for its replays, and the memory becomes the allocator's.
///
/// **Order.** Replays go to the stream that was current at the capture, behind everything submitted there before.
///
/// What a kernel finds wrong with its operands (a label out of range) is told to the thread that captured, when it waits.
pub struct Graph {
    /// Keeps the stream from being given to others.
    stream: Stream,
    recording: Box<dyn Recording>,
    memory: Captured,
    hooks: Vec<ReplayHook>,
    /// Held by a replay that has hooks, whose commands are to see what these did.
    replaying: Mutex<()>,
}

impl Graph {
    /// Runs `f` and records what this thread submits to the device's current stream inside, without running it. Gives
    /// what `f` gives, usually tensors that replays fill. Work on other devices, and of other threads, is done as ever.
    ///
    /// # Errors
    /// Those of `f`. [`Error::Invalid`] for a device that is no OpenCL device, or whose allocator is not the caching one;
    /// inside another capture; and from what cannot be captured: reading values and waiting, writing values from the host,
    /// work on other streams, and events. After an error nothing has run, and the graph's memory is free again; what `f`
    /// itself did on the host (forgetting gradients, say) stays done.
    pub fn capture<R>(device: Device, f: impl FnOnce() -> Result<R>) -> Result<(Graph, R)> {
        let pool = MemPool::of_device(device, MemPoolOptions::default())?; // may be the device's first use, so not recorded
        Graph::capture_in(&pool, f)
    }

    /// [`capture`](Self::capture) with memory of a pool that other graphs have as well, PyTorch's `torch.cuda.graph(g,
    /// pool=...)`: what one graph allocated and dropped inside serves the next, so that graphs of a pool need little more than
    /// the largest of them.
    ///
    /// Replay them one after another, in the order in which they were captured. A result is good until an earlier graph of the
    /// pool is replayed again, for it may lie where that one has something of its own for a while: read or copy it before. What the
    /// capture uses of earlier graphs' results is kept, as everything from outside.
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
    /// Those of [`capture`](Self::capture); [`Error::Invalid`] where the pool has memory of another stream, which no replay
    /// would wait for, where it lends its memory to others (`use_on_oom`), and while another thread captures into it.
    pub fn capture_in<R>(pool: &MemPool, f: impl FnOnce() -> Result<R>) -> Result<(Graph, R)> {
        let device = pool.allocator().device();
        let stream = Stream::current(device)?;
        let fail = |reason: String| Err(Error::invalid("Graph::capture_in", reason));
        if let Some(other) = pool.other_stream(stream.id()) {
            let (other, own) = (other.index(), stream.id().index());
            return fail(format!("the pool has memory of stream {other}: capture on that stream, not on {own}"));
        }
        if pool.lends() {
            return fail("the pool's free memory may be given to others: make it without use_on_oom".into());
        }
        let Some(_capturing) = pool.begin_capture() else {
            return fail("another graph is being captured into the pool: one after another".into());
        };
        let recorder = backend::of(device).record(device)?;
        let (mut memory, result) = Captured::during(pool.clone(), f)?;
        let (uses, hooks) = (memory.take_uses(), capture::take_hooks());
        Ok((Graph { stream, recording: recorder.finish(uses), memory, hooks, replaying: Mutex::new(()) }, result))
    }

    /// Submits everything recorded, in order. Returns when it is submitted.
    ///
    /// # Errors
    /// [`Error::Invalid`] inside a capture, or if parameters that the graph updates in one launch have since had different numbers of
    /// optimiser steps (capture again); an error of a hook of [`on_replay`](Self::on_replay); what the driver refuses, and
    /// [`Error::DeviceLost`]. [`Error::Partial`] where the driver refuses one command after others were submitted: what the graph
    /// writes to has to be set anew. After any other error nothing was submitted.
    pub fn replay(&self) -> Result<()> {
        let device = self.device();
        capture::refuse(device, "Graph::replay", "graphs are not made of graphs")?;
        let _alone = (!self.hooks.is_empty()).then(|| lock(&self.replaying));
        if !self.hooks.is_empty() {
            with_stream(&self.stream, || self.hooks.iter().try_for_each(|hook| (hook.before)()))?;
        }
        let replayed = self.recording.replay();
        if matches!(replayed, Ok(()) | Err(Error::Partial { .. })) {
            self.memory.replayed();
            self.hooks.iter().for_each(|hook| (hook.after)());
        }
        replayed
    }

    /// Runs `f` so that what it allocates during a capture comes from the device's allocator and not from the graph's pool. The pool gives
    /// the same memory to one tensor after another, so a replay would overwrite it. Use this for tensors that a hook of
    /// [`on_replay`](Self::on_replay) writes to. Outside of captures it only runs `f`.
    ///
    /// ```
    /// use claystone::{Device, Graph, Tensor};
    /// let rate = Graph::outside(|| Tensor::zeros((), Device::Cpu))?;
    /// assert_eq!(rate.item::<f32>()?, 0.0);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn outside<R>(f: impl FnOnce() -> R) -> R {
        Captured::outside(f)
    }

    /// For the graph that this thread is capturing on the device: each replay calls `before` ahead of its commands, on the graph's stream,
    /// and `after` once they are submitted. Use it for values that the host computes for each step. `before` passes them on with `fill_`
    /// or [`Tensor::map_into`](crate::Tensor::map_into) on tensors that the commands read, made before the capture or with
    /// [`outside`](Self::outside). Do not write values from the host there: that waits for the previous replay.
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
    /// [`Error::Invalid`] where this thread captures no graph of the device. An error of `before` is returned by
    /// [`replay`](Self::replay), which then submits nothing.
    pub fn on_replay(
        device: Device,
        before: impl Fn() -> Result<()> + Send + Sync + 'static,
        after: impl Fn() + Send + Sync + 'static,
    ) -> Result<()> {
        if !Graph::is_capturing(device) {
            return Err(Error::invalid("Graph::on_replay", format!("no graph of {device} is captured by this thread")));
        }
        capture::on_replay(Box::new(before), Box::new(after));
        Ok(())
    }

    /// How [`replay`](Self::replay) submits the commands: in command buffers that the driver keeps where the device has
    /// them, from the host otherwise. What the driver does not keep after all is [`ReplayMode::Host`] from the first replay
    /// on, and so is every replay while something is profiled, whose times are those of single commands.
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
        self.recording.mode()
    }

    /// Has [`replay`](Self::replay) submit the commands in another way from now on.
    ///
    /// # Errors
    /// [`Error::Invalid`] where the device does not have that, or the graph has commands that it does not take.
    pub fn set_replay_mode(&mut self, mode: ReplayMode) -> Result<()> {
        self.recording.set_mode(mode)
    }

    /// Whether this thread is capturing a graph of the device (PyTorch's `torch.cuda.is_current_stream_capturing`).
    pub fn is_capturing(device: Device) -> bool {
        capture::is_capturing(device)
    }

    /// A number that differs between the captures of this thread; `None` where this thread captures no graph of the device (as the id
    /// of CUDA's `cudaStreamGetCaptureInfo`). Captures of two threads may have the same number.
    pub fn capture_id(device: Device) -> Option<u64> {
        Graph::is_capturing(device).then(capture::number)
    }

    /// The device.
    pub fn device(&self) -> Device {
        self.stream.device()
    }

    /// The stream that replays go to.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// How many commands a replay submits: kernels, fills and copies.
    pub fn commands(&self) -> usize {
        self.recording.len()
    }

    /// The pool that its memory is of, for other graphs to [share](Self::capture_in): PyTorch's `CUDAGraph.pool`. What is
    /// allocated from it outside of captures is overwritten by replays.
    pub fn pool(&self) -> &MemPool {
        self.memory.pool()
    }

    /// Bytes of device memory that its pool has: the graph's own, unless others share it.
    pub fn reserved_bytes(&self) -> u64 {
        self.pool().stats().reserved_bytes
    }
}

impl Drop for Graph {
    /// Waits for replays under way: their memory is about to be others'.
    fn drop(&mut self) {
        self.recording.drain(self.stream.id());
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "graph of {} commands on {}", self.commands(), self.device())
    }
}

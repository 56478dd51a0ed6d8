//! Replay of recordings: the host submits each command, or the driver submits prepared parts of the recording.

use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock};

use opencl3::types::cl_event;

use super::command_buffer::{CommandBuffer, CommandBuffers};
use super::recordable_queue::{QueueRecording, RecordableQueues};
use super::{Command, Recording};
use crate::device::capture::ReplayMode;
use crate::device::opencl::driver::call;
use crate::device::opencl::errors::ClError;
use crate::device::opencl::launch::{enqueue_kernel, flush_if_due, is_checkpoint};
use crate::device::opencl::queue::{EARLIER_LAUNCH, Queue};
use crate::device::opencl::{ClDevice, ClEvent};
use crate::device::{self, lock, log};
use crate::{Error, Result};

/// The maximum number of commands in a part, so that the queue's length stays bounded as for single commands.
const MAX_PART_COMMANDS: usize = 256;

/// How recorded commands are submitted.
#[derive(Clone, Copy)]
enum ReplayStrategy {
    /// The host enqueues every command.
    Host,
    /// The host enqueues command buffers.
    Buffers(CommandBuffers),
    /// The host enqueues recordings of a recordable queue.
    Queues(RecordableQueues),
}

pub(crate) struct Replayer {
    replay_strategy: ReplayStrategy,
    /// Made by the first replay; empty if the host enqueues every command. Dropped before the kernels in `recording`, which the
    /// driver may use as long as the parts exist.
    parts: OnceLock<Vec<Part>>,
    refused: AtomicBool,
    recording: Recording,
}

/// Consecutive commands that the driver has prepared.
struct Part {
    commands: Range<usize>,
    launches: u32,
    prepared: PreparedCommands,
    /// True if the part may be enqueued again before an earlier replay of the part is over.
    may_be_pending: bool,
    /// The event of the last replay, if the next replay must wait for it.
    last: Mutex<Option<ClEvent>>,
}

/// A driver object with the commands of a part.
enum PreparedCommands {
    Buffer(CommandBuffer),
    Recording(QueueRecording),
}

impl PreparedCommands {
    fn enqueue(&self, queue: &Queue, event: *mut cl_event) -> Result<(), ClError> {
        match self {
            PreparedCommands::Buffer(buffer) => buffer.enqueue(queue.raw, event),
            PreparedCommands::Recording(recording) => recording.enqueue(queue.raw, event),
        }
    }
}

/// A replay in progress, under the queues' lock.
struct Submission<'a> {
    queue: &'a mut Queue,
    /// An earlier launch, to wait for before many more launches are submitted.
    behind: Option<ClEvent>,
    /// True if a command was submitted, or may have been.
    begun: bool,
}

impl Submission<'_> {
    /// Records a submission. To bound the queue, a replay of thousands of launches waits here for earlier launches.
    fn note_submitted(&mut self, launch: Option<ClEvent>) {
        self.begun = true;
        if let Some(launch) = launch
            && let Some(Err(e)) = self.behind.replace(launch).map(|earlier| earlier.wait_for_success())
        {
            self.queue.note_failed(EARLIER_LAUNCH, Some(e.code));
        }
    }

    fn commands(&mut self, commands: &[Command]) -> Result<(), ClError> {
        commands.iter().try_for_each(|command| {
            let launch = match command {
                Command::Kernel { kernel, dims, global, local } => {
                    enqueue_kernel(self.queue, kernel, &global[..*dims], &local[..*dims])?
                }
                Command::Fill { to, offset, bytes, pattern, length } => {
                    self.queue.fill(*to, &pattern[..*length], *offset, *bytes).map(|()| None)?
                }
                Command::Copy { from, to, bytes } => {
                    self.queue.copy(*from, *to, *bytes, ptr::null_mut()).map(|()| None)?
                }
            };
            self.note_submitted(launch);
            Ok(())
        })
    }

    /// Enqueues a part. Returns false if the driver refuses the part, for now or for good, and has enqueued nothing.
    fn part(&mut self, part: &Part, refused: &AtomicBool) -> Result<bool, ClError> {
        let once = !part.may_be_pending;
        let mut last = lock(&part.last);
        if last.as_ref().is_some_and(|last| !last.is_over().unwrap_or(false)) {
            return Ok(false);
        }
        let checkpoint = is_checkpoint(self.queue, part.launches);
        let mut raw = ptr::null_mut();
        // Always passes an event pointer: PoCL 3.0 writes an event even if the pointer is null.
        if let Err(e) = part.prepared.enqueue(self.queue, &raw mut raw) {
            self.queue.since_checkpoint -= part.launches;
            // Nothing was enqueued if the command buffer is pending (-59) or invalid (-1138), the queue is of another kind (-1140),
            // or the function is missing.
            if !(e.is_missing() || matches!(e.code, -1138 | -1140)) {
                self.begun = true; // a driver that enqueues the commands one by one may have enqueued some of them
                return Err(e);
            }
            if !once && !refused.swap(true, Relaxed) {
                log_host_replay(e);
            }
            return Ok(false);
        }
        let mut event = (!raw.is_null()).then(|| ClEvent(raw));
        if once && event.is_some() {
            *last = event.take();
            if checkpoint && call!(clRetainEvent(raw)).is_ok() {
                event = Some(ClEvent(raw));
            }
        }
        let launch = flush_if_due(self.queue, part.launches, event.filter(|_| checkpoint));
        self.note_submitted(launch);
        Ok(true)
    }
}

fn log_host_replay(e: ClError) {
    log::emit(move || {
        tracing::debug!(
            call = e.call,
            code = e.code,
            "a graph is replayed by the host: the driver refuses its commands"
        );
    });
}

impl ReplayStrategy {
    /// Returns the strategy for a mode; `None` if the device does not support the mode, or its driver fails to answer.
    fn for_device(device: &ClDevice, mode: ReplayMode) -> Option<ReplayStrategy> {
        match mode {
            ReplayMode::Host => Some(ReplayStrategy::Host),
            ReplayMode::CommandBuffer => CommandBuffers::for_device(device).ok()?.map(ReplayStrategy::Buffers),
            ReplayMode::RecordableQueue => RecordableQueues::for_device(device).ok()?.map(ReplayStrategy::Queues),
        }
    }

    /// Makes the driver prepare the commands in parts, for queues like `queue`. No parts if the host enqueues every command.
    fn prepare(&self, device: &ClDevice, queue: &Queue, commands: &[Command]) -> Result<Vec<Part>, ClError> {
        let most = match self {
            ReplayStrategy::Host => return Ok(Vec::new()),
            ReplayStrategy::Buffers(_) => MAX_PART_COMMANDS,
            ReplayStrategy::Queues(queues) => MAX_PART_COMMANDS.min(queues.max_kernels),
        };
        let part = |(i, commands): (usize, &[Command])| {
            let prepared = match self {
                ReplayStrategy::Host => return Ok(None),
                ReplayStrategy::Buffers(buffers) => PreparedCommands::Buffer(buffers.record(queue.raw, commands)?),
                ReplayStrategy::Queues(queues) => PreparedCommands::Recording(queues.record(device, commands)?),
            };
            let launches = commands.iter().filter(|command| command.is_kernel()).count() as u32;
            let range = i * most..i * most + commands.len();
            let may_be_pending = !matches!(self, ReplayStrategy::Buffers(buffers) if !buffers.may_be_pending);
            Ok(Some(Part { commands: range, launches, prepared, may_be_pending, last: Mutex::default() }))
        };
        commands.chunks(most).enumerate().map(part).filter_map(Result::transpose).collect()
    }
}

impl Replayer {
    /// Creates a replayer with the mode in `CLAYSTONE_GRAPH_REPLAY`, default command buffers, if the device supports the mode.
    pub(crate) fn new(recording: Recording) -> Replayer {
        let wanted = ReplayMode::from_environment().unwrap_or(ReplayMode::CommandBuffer);
        let replay_strategy = ReplayStrategy::for_device(recording.device, wanted).unwrap_or(ReplayStrategy::Host);
        Replayer { replay_strategy, parts: OnceLock::new(), refused: AtomicBool::new(false), recording }
    }

    pub(crate) fn len(&self) -> usize {
        self.recording.commands.len()
    }

    /// Returns the replay mode, as far as it is known before the next replay.
    pub(crate) fn mode(&self) -> ReplayMode {
        match self.replay_strategy {
            _ if self.refused.load(Relaxed) || self.parts.get().is_some_and(Vec::is_empty) => ReplayMode::Host,
            ReplayStrategy::Host => ReplayMode::Host,
            ReplayStrategy::Buffers(_) => ReplayMode::CommandBuffer,
            ReplayStrategy::Queues(_) => ReplayMode::RecordableQueue,
        }
    }

    /// Sets the replay mode.
    pub(crate) fn set_mode(&mut self, mode: ReplayMode) -> Result<()> {
        let device = self.recording.device;
        let op = "Graph::set_replay_mode";
        let replay_strategy = ReplayStrategy::for_device(device, mode).ok_or_else(|| {
            Error::invalid(op, format!("{} does not support the replay mode {mode}", device.device()))
        })?;
        let transfers = self.recording.commands.iter().filter(|command| !command.is_kernel()).count();
        invalid!(op if mode == ReplayMode::RecordableQueue && transfers > 0,
            "the graph has {transfers} copies and fills, which a {mode} does not record");
        if self.parts.get().is_some_and(|parts| !parts.is_empty()) {
            device.drain_stream(self.recording.stream)?; // parts must not be released while they run
        }
        (self.replay_strategy, self.parts, self.refused) = (replay_strategy, OnceLock::new(), AtomicBool::new(false));
        Ok(())
    }

    /// Returns the driver's parts, made at the first call; no parts while profiling, because times are measured for single
    /// commands. Call under the queues' lock.
    fn parts(&self, queue: &Queue) -> &[Part] {
        if queue.profiled.is_some() || self.refused.load(Relaxed) {
            return &[];
        }
        self.parts.get_or_init(|| {
            let Recording { device, commands, .. } = &self.recording;
            self.replay_strategy.prepare(device, queue, commands).unwrap_or_else(|e| {
                log_host_replay(e);
                Vec::new()
            })
        })
    }

    /// Submits the recording to its stream, and returns. To bound the queue, a replay of thousands of launches submits the last launches
    /// only when the first have run.
    pub(crate) fn replay(&self) -> Result<()> {
        let Recording { device, stream, commands, launches, faults } = &self.recording;
        device.check_lost()?;
        faults.map_or(Ok(()), |slot| device.clear(slot))?;
        let _messages = log::defer();
        let (submitted, behind, begun) = {
            let mut queue = device.lock(*stream).map_err(|e| device.error(device.detect_loss(e)))?;
            let parts = self.parts(&queue);
            let mut submission = Submission { queue: &mut queue, behind: None, begun: false };
            let submitted = match parts {
                [] => submission.commands(commands),
                parts => parts.iter().try_for_each(|part| match submission.part(part, &self.refused)? {
                    true => Ok(()),
                    false => submission.commands(&commands[part.commands.clone()]),
                }),
            };
            let Submission { behind, begun, .. } = submission;
            (0..*launches).for_each(|_| device::count_launch());
            if let Some(slot) = faults {
                slot.note_pending(*stream);
            }
            (submitted, behind, begun)
        };
        device.wait_for_checkpoint(*stream, behind);
        submitted.map_err(|e| {
            let error = device.error(device.detect_loss(e));
            if begun { error.into_partial("Graph::replay") } else { error }
        })
    }
}

impl Drop for Replayer {
    /// Waits for all replays, unless the device is lost: a lost device runs nothing.
    fn drop(&mut self) {
        let _ = self.recording.device.drain_stream(self.recording.stream);
    }
}

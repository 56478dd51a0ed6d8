//! Submitting what was recorded: command by command, or in parts that the driver keeps ready.

use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, OnceLock};

use opencl3::types::cl_event;

use super::capture::{Command, Recording};
use super::command_buffer::{CommandBuffer, CommandBuffers};
use super::driver::call;
use super::errors::ClError;
use super::launch::{enqueue_kernel, is_checkpoint, launched};
use super::queue::Queue;
use super::recordable_queue::{QueueRecording, RecordableQueues};
use super::retry::Probed;
use super::{ClDevice, ClEvent};
use crate::device::capture::ReplayMode;
use crate::device::{self, lock, log};
use crate::{Error, Result};

/// Commands of a part at most, so that the queue's length stays bounded as it is for single commands.
const PART: usize = 256;

/// What a device's driver can keep recorded commands in, once that is known.
#[derive(Default)]
pub(super) struct Keepers {
    buffers: Probed<Option<CommandBuffers>>,
    queues: Probed<Option<RecordableQueues>>,
}

/// How a recording is replayed.
pub(super) struct Replay {
    mode: ReplayMode,
    /// Made by the first replay; empty where the host enqueues every command.
    parts: OnceLock<Vec<Part>>,
    /// The driver has refused to enqueue a part.
    refused: AtomicBool,
}

/// Consecutive commands that the driver keeps.
struct Part {
    commands: Range<usize>,
    launches: u32,
    kept: Kept,
    /// The last time it was enqueued, where that has to be over before the next.
    last: Mutex<Option<ClEvent>>,
}

enum Kept {
    Buffer(CommandBuffer),
    Recording(QueueRecording),
}

impl Kept {
    fn enqueue(&self, queue: &Queue, event: *mut cl_event) -> Result<(), ClError> {
        match self {
            Kept::Buffer(buffer) => buffer.enqueue(queue.raw, event),
            Kept::Recording(recording) => recording.enqueue(queue.raw, event),
        }
    }

    fn may_be_pending(&self) -> bool {
        match self {
            Kept::Buffer(buffer) => buffer.may_be_pending(),
            Kept::Recording(_) => true,
        }
    }
}

impl Replay {
    pub(super) fn new(mode: ReplayMode) -> Replay {
        Replay { mode, parts: OnceLock::new(), refused: AtomicBool::new(false) }
    }

    /// Who submits the commands, as far as that is known.
    pub(super) fn mode(&self) -> ReplayMode {
        let by_host = self.refused.load(Relaxed) || self.parts.get().is_some_and(Vec::is_empty);
        if by_host { ReplayMode::Host } else { self.mode }
    }
}

/// A replay under way, under the queues' lock.
struct Submission<'a> {
    queue: &'a mut Queue,
    /// A launch to wait for because the queue is too long.
    behind: Option<ClEvent>,
    /// Whether something was submitted, or may have been.
    begun: bool,
}

impl Submission<'_> {
    /// Notes what was submitted. Of thousands of launches the last are submitted when the first have run.
    fn done(&mut self, launch: Option<ClEvent>) {
        self.begun = true;
        if let Some(launch) = launch
            && let Some(Err(e)) = self.behind.replace(launch).map(|earlier| earlier.wait_for_success())
        {
            self.queue.failed.get_or_insert(e.code);
        }
    }

    /// Enqueues commands one by one.
    fn commands(&mut self, commands: &[Command]) -> Result<(), ClError> {
        commands.iter().try_for_each(|command| {
            let launch = match command {
                Command::Kernel { kernel, dims, global, local } => {
                    enqueue_kernel(self.queue, kernel, &global[..*dims], &local[..*dims])?
                }
                Command::Fill { to, offset, bytes, pattern, length } => {
                    self.queue.fill(*to, &pattern[..*length], *offset, *bytes).map(|()| None)?
                }
                Command::Copy { from, to, from_offset, to_offset, bytes } => {
                    let (from, to) = ((*from, *from_offset), (*to, *to_offset));
                    self.queue.copy(from, to, *bytes, ptr::null_mut()).map(|()| None)?
                }
            };
            self.done(launch);
            Ok(())
        })
    }

    /// Enqueues a part; false where the driver does not take it, now or ever, and has done nothing.
    fn part(&mut self, part: &Part, replay: &Replay) -> Result<bool, ClError> {
        let once = !part.kept.may_be_pending();
        let mut last = lock(&part.last);
        if last.as_ref().is_some_and(|last| !last.is_over().unwrap_or(false)) {
            return Ok(false);
        }
        let checkpoint = is_checkpoint(self.queue, part.launches);
        let mut raw = ptr::null_mut();
        let to = if checkpoint || once { &raw mut raw } else { ptr::null_mut() };
        if let Err(e) = part.kept.enqueue(self.queue, to) {
            self.queue.since_checkpoint -= part.launches;
            if !is_refusal(&e) {
                self.begun = true; // drivers that enqueue the commands one by one may have come halfway
                return Err(e);
            }
            if !once && !replay.refused.swap(true, Relaxed) {
                by_host(e);
            }
            return Ok(false);
        }
        if once && !raw.is_null() {
            *last = Some(ClEvent(raw));
            if !checkpoint || call!(clRetainEvent(raw)).is_err() {
                raw = ptr::null_mut();
            }
        }
        let launch = launched(self.queue, part.launches, (!raw.is_null()).then(|| ClEvent(raw)));
        self.done(launch);
        Ok(true)
    }
}

/// Codes that say that nothing was enqueued: the command buffer is pending (-59) or not valid any more (-1138), the queue is
/// of another kind (-1140), or there is no such function.
fn is_refusal(e: &ClError) -> bool {
    e.is_missing() || matches!(e.code, -1138 | -1140)
}

fn by_host(e: ClError) {
    log::emit(move || {
        tracing::debug!(call = e.call, code = e.code, "a graph is replayed by the host: the driver does not keep it");
    });
}

impl ClDevice {
    /// Whether graphs can be replayed like this, as far as the driver tells.
    pub(crate) fn has_replay_mode(&self, mode: ReplayMode) -> bool {
        match mode {
            ReplayMode::Host => true,
            ReplayMode::CommandBuffer => self.command_buffers().is_some(),
            ReplayMode::RecordableQueue => self.recordable_queues().is_some(),
        }
    }

    fn command_buffers(&self) -> Option<&CommandBuffers> {
        self.keepers.buffers.get(|| CommandBuffers::of(self).ok())?.as_ref()
    }

    fn recordable_queues(&self) -> Option<&RecordableQueues> {
        self.keepers.queues.get(|| RecordableQueues::of(self).ok())?.as_ref()
    }

    /// How graphs are replayed unless they are told: as `CLAYSTONE_GRAPH_REPLAY` says, where the device can.
    pub(super) fn usual_replay_mode(&self) -> ReplayMode {
        let wanted = ReplayMode::from_environment().unwrap_or(ReplayMode::CommandBuffer);
        if self.has_replay_mode(wanted) { wanted } else { ReplayMode::Host }
    }

    /// Has the driver keep the commands.
    fn keep(&self, recording: &Recording, queue: &Queue) -> Result<Vec<Part>, ClError> {
        type Keep<'a> = Box<dyn Fn(&[Command]) -> Result<Kept, ClError> + 'a>;
        let (most, keep): (usize, Keep) = match recording.replay.mode {
            ReplayMode::Host => return Ok(Vec::new()),
            ReplayMode::CommandBuffer => {
                let Some(buffers) = self.command_buffers() else { return Ok(Vec::new()) };
                (PART, Box::new(|commands| buffers.record(queue.raw, commands).map(Kept::Buffer)))
            }
            ReplayMode::RecordableQueue => {
                let Some(queues) = self.recordable_queues() else { return Ok(Vec::new()) };
                (PART.min(queues.most), Box::new(|commands| queues.record(self, commands).map(Kept::Recording)))
            }
        };
        let mut parts = Vec::new();
        for (i, commands) in recording.commands.chunks(most).enumerate() {
            let launches = commands.iter().filter(|command| command.is_kernel()).count() as u32;
            let commands_of = i * most..i * most + commands.len();
            let last = Mutex::default();
            parts.push(Part { commands: commands_of, launches, kept: keep(commands)?, last });
        }
        Ok(parts)
    }

    /// What the driver keeps of a recording, made at the first call; nothing while something is profiled, as times are those of
    /// single commands. Under the queues' lock.
    fn parts<'a>(&self, recording: &'a Recording, queue: &Queue) -> &'a [Part] {
        let replay = &recording.replay;
        if queue.profiled.is_some() || replay.refused.load(Relaxed) {
            return &[];
        }
        replay.parts.get_or_init(|| {
            self.keep(recording, queue).unwrap_or_else(|e| {
                by_host(e);
                Vec::new()
            })
        })
    }

    /// Submits what was recorded, to the stream it was recorded on. Returns when it is submitted. Of thousands of launches
    /// the last are submitted when the first have run: the queue stays short.
    ///
    /// # Errors
    /// What the driver refuses, as [`Error::Partial`] where other commands were submitted before or may have been, or a lost
    /// device.
    pub(crate) fn replay(&self, recording: &Recording) -> Result<()> {
        self.check_lost()?;
        recording.faults.map_or(Ok(()), |slot| self.clear(slot))?;
        let _messages = log::defer();
        let (submitted, behind, begun) = {
            let mut queue = self.lock(recording.stream).map_err(|e| self.error(self.settle(e)))?;
            let parts = self.parts(recording, &queue);
            let mut submission = Submission { queue: &mut queue, behind: None, begun: false };
            let submitted = match parts {
                [] => submission.commands(&recording.commands),
                parts => parts.iter().try_for_each(|part| match submission.part(part, &recording.replay)? {
                    true => Ok(()),
                    false => submission.commands(&recording.commands[part.commands.clone()]),
                }),
            };
            let Submission { behind, begun, .. } = submission;
            (0..recording.launches).for_each(|_| device::count_launch());
            if let Some(slot) = recording.faults {
                slot.note_pending(recording.stream);
            }
            (submitted, behind, begun)
        };
        self.hold_back(recording.stream, behind);
        submitted.map_err(|e| {
            let error: Error = self.error(self.settle(e));
            if begun { error.in_part("Graph::replay") } else { error }
        })
    }
}

impl Recording {
    /// Has it replayed in another way.
    ///
    /// # Errors
    /// [`Error::Invalid`] where the device does not have it, or the recording has commands that it does not take.
    pub(crate) fn set_replay_mode(&mut self, device: &ClDevice, mode: ReplayMode) -> Result<()> {
        let invalid = |reason: String| Err(Error::invalid("Graph::set_replay_mode", reason));
        if !device.has_replay_mode(mode) {
            return invalid(format!("{} has no such extension: {mode}", device.device()));
        }
        let transfers = self.commands.iter().filter(|command| !command.is_kernel()).count();
        if mode == ReplayMode::RecordableQueue && transfers > 0 {
            return invalid(format!("the graph has {transfers} copies and fills, which {mode} does not record"));
        }
        self.replay = Replay::new(mode);
        Ok(())
    }

    /// Who submits the commands, as far as that is known.
    pub(crate) fn replay_mode(&self) -> ReplayMode {
        self.replay.mode()
    }
}

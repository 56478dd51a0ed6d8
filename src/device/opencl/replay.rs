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
use super::queue::{LAUNCH, Queue};
use super::recordable_queue::{QueueRecording, RecordableQueues};
use super::{ClDevice, ClEvent};
use crate::device::capture::ReplayMode;
use crate::device::{self, lock, log};
use crate::{Error, Result};

/// Commands of a part at most, so that the queue's length stays bounded as it is for single commands.
const PART: usize = 256;

/// What a driver keeps recorded commands in.
#[derive(Clone, Copy)]
enum Keeper {
    /// None: the host enqueues every command.
    Host,
    Buffers(CommandBuffers),
    Queues(RecordableQueues),
}

/// A recording and how it is replayed.
pub(crate) struct Replayer {
    keeper: Keeper,
    /// Made by the first replay; empty where the host enqueues every command. Dropped before the kernels and their arguments,
    /// which the driver may use as long as it keeps commands.
    parts: OnceLock<Vec<Part>>,
    /// The driver has refused to enqueue a part.
    refused: AtomicBool,
    recording: Recording,
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
            self.queue.note_failed(LAUNCH, Some(e.code));
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
    fn part(&mut self, part: &Part, refused: &AtomicBool) -> Result<bool, ClError> {
        let once = !part.kept.may_be_pending();
        let mut last = lock(&part.last);
        if last.as_ref().is_some_and(|last| !last.is_over().unwrap_or(false)) {
            return Ok(false);
        }
        let checkpoint = is_checkpoint(self.queue, part.launches);
        let mut raw = ptr::null_mut();
        // An event whether it is needed or not: PoCL 3.0 uses it without asking whether there is one.
        if let Err(e) = part.kept.enqueue(self.queue, &raw mut raw) {
            self.queue.since_checkpoint -= part.launches;
            if !is_refusal(&e) {
                self.begun = true; // drivers that enqueue the commands one by one may have come halfway
                return Err(e);
            }
            if !once && !refused.swap(true, Relaxed) {
                by_host(e);
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
        let launch = launched(self.queue, part.launches, event.filter(|_| checkpoint));
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

impl Keeper {
    /// What a device has for this mode; none where it lacks it or does not tell.
    fn of(device: &ClDevice, mode: ReplayMode) -> Option<Keeper> {
        match mode {
            ReplayMode::Host => Some(Keeper::Host),
            ReplayMode::CommandBuffer => CommandBuffers::of(device).ok()?.map(Keeper::Buffers),
            ReplayMode::RecordableQueue => RecordableQueues::of(device).ok()?.map(Keeper::Queues),
        }
    }

    /// Has the driver keep commands, for queues like this one.
    fn keep(&self, device: &ClDevice, queue: &Queue, commands: &[Command]) -> Result<Vec<Part>, ClError> {
        let most = match self {
            Keeper::Host => return Ok(Vec::new()),
            Keeper::Buffers(_) => PART,
            Keeper::Queues(queues) => PART.min(queues.most),
        };
        let part = |(i, commands): (usize, &[Command])| {
            let kept = match self {
                Keeper::Host => return Ok(None),
                Keeper::Buffers(buffers) => Kept::Buffer(buffers.record(queue.raw, commands)?),
                Keeper::Queues(queues) => Kept::Recording(queues.record(device, commands)?),
            };
            let launches = commands.iter().filter(|command| command.is_kernel()).count() as u32;
            let range = i * most..i * most + commands.len();
            Ok(Some(Part { commands: range, launches, kept, last: Mutex::default() }))
        };
        commands.chunks(most).enumerate().map(part).filter_map(Result::transpose).collect()
    }
}

impl Replayer {
    /// Replayed as `CLAYSTONE_GRAPH_REPLAY` says, where the device can.
    pub(crate) fn new(device: &ClDevice, recording: Recording) -> Replayer {
        let wanted = ReplayMode::from_environment().unwrap_or(ReplayMode::CommandBuffer);
        let keeper = Keeper::of(device, wanted).unwrap_or(Keeper::Host);
        Replayer { keeper, parts: OnceLock::new(), refused: AtomicBool::new(false), recording }
    }

    /// How many commands.
    pub(crate) fn len(&self) -> usize {
        self.recording.commands.len()
    }

    /// How it is replayed, as far as that is known.
    pub(crate) fn mode(&self) -> ReplayMode {
        match self.keeper {
            _ if self.refused.load(Relaxed) || self.parts.get().is_some_and(Vec::is_empty) => ReplayMode::Host,
            Keeper::Host => ReplayMode::Host,
            Keeper::Buffers(_) => ReplayMode::CommandBuffer,
            Keeper::Queues(_) => ReplayMode::RecordableQueue,
        }
    }

    /// Has it replayed in another way.
    ///
    /// # Errors
    /// [`Error::Invalid`] where the device does not have it, or the recording has commands that it does not take.
    pub(crate) fn set_mode(&mut self, device: &ClDevice, mode: ReplayMode) -> Result<()> {
        let invalid = |reason: String| Err(Error::invalid("Graph::set_replay_mode", reason));
        let Some(keeper) = Keeper::of(device, mode) else {
            return invalid(format!("{} does not have what {mode} needs", device.device()));
        };
        let transfers = self.recording.commands.iter().filter(|command| !command.is_kernel()).count();
        if mode == ReplayMode::RecordableQueue && transfers > 0 {
            return invalid(format!("the graph has {transfers} copies and fills, which a {mode} does not record"));
        }
        if self.parts.get().is_some_and(|parts| !parts.is_empty()) {
            device.drain_stream(self.recording.stream)?; // what is released is not to be under way
        }
        (self.keeper, self.parts, self.refused) = (keeper, OnceLock::new(), AtomicBool::new(false));
        Ok(())
    }

    /// What the driver keeps, made at the first call; nothing while something is profiled, as times are those of single
    /// commands. Under the queues' lock.
    fn parts(&self, device: &ClDevice, queue: &Queue) -> &[Part] {
        if queue.profiled.is_some() || self.refused.load(Relaxed) {
            return &[];
        }
        self.parts.get_or_init(|| {
            self.keeper.keep(device, queue, &self.recording.commands).unwrap_or_else(|e| {
                by_host(e);
                Vec::new()
            })
        })
    }

    /// Submits what was recorded, to the stream it was recorded on. Returns when it is submitted. Of thousands of launches
    /// the last are submitted when the first have run: the queue stays short.
    ///
    /// # Errors
    /// What the driver refuses, as [`Error::Partial`] where commands were submitted before or may have been, or a lost
    /// device.
    pub(crate) fn replay(&self, device: &ClDevice) -> Result<()> {
        let Recording { stream, commands, launches, faults } = &self.recording;
        device.check_lost()?;
        faults.map_or(Ok(()), |slot| device.clear(slot))?;
        let _messages = log::defer();
        let (submitted, behind, begun) = {
            let mut queue = device.lock(*stream).map_err(|e| device.error(device.settle(e)))?;
            let parts = self.parts(device, &queue);
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
        device.hold_back(*stream, behind);
        submitted.map_err(|e| {
            let error = device.error(device.settle(e));
            if begun { error.in_part("Graph::replay") } else { error }
        })
    }
}

//! Which device a thread captures a graph of, whose work is then recorded instead of submitted.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

use super::Device;
use crate::{Error, Result};

/// How the commands of a [`Graph`](crate::Graph) get to the device when it is replayed. The results are the same.
///
/// `CLAYSTONE_GRAPH_REPLAY` chooses one for all graphs by its name; [`Graph::set_replay_mode`](crate::Graph::set_replay_mode)
/// for one graph.
///
/// ```
/// use claystone::device::ReplayMode;
/// assert_eq!("host".parse(), Ok(ReplayMode::Host));
/// assert_eq!(ReplayMode::CommandBuffer.to_string(), "command_buffer");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReplayMode {
    /// The host enqueues every command, a kernel with arguments that were set at the capture.
    Host,
    /// The driver has the commands ready in command buffers (`cl_khr_command_buffer`), which the host enqueues: the usual
    /// way where the device has the extension in a version that is known here (0.9.0 to 0.9.8).
    CommandBuffer,
    /// The driver has them ready in recordings of Qualcomm's extension `cl_qcom_recordable_queues`. Only where it is asked
    /// for, as drivers are known that crash with it, and only for graphs that have kernels and no copies or fills. It was
    /// never run on such a device.
    RecordableQueue,
}

impl ReplayMode {
    const NAMES: [(&str, ReplayMode); 3] = [
        ("host", ReplayMode::Host),
        ("command_buffer", ReplayMode::CommandBuffer),
        ("recordable_queue", ReplayMode::RecordableQueue),
    ];

    /// What `CLAYSTONE_GRAPH_REPLAY` asks for, read once.
    pub(crate) fn from_environment() -> Option<ReplayMode> {
        static ASKED: OnceLock<Option<ReplayMode>> = OnceLock::new();
        *ASKED.get_or_init(|| {
            let asked = std::env::var("CLAYSTONE_GRAPH_REPLAY").ok().filter(|name| !name.is_empty())?;
            let mode = asked.parse();
            if let Err(reason) = &mode {
                tracing::warn!(reason, "CLAYSTONE_GRAPH_REPLAY is ignored");
            }
            mode.ok()
        })
    }
}

impl fmt::Display for ReplayMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = ReplayMode::NAMES.iter().find(|(_, mode)| mode == self).map_or("", |(name, _)| name);
        f.pad(name)
    }
}

impl FromStr for ReplayMode {
    type Err = String;

    /// # Errors
    /// A sentence with the names that there are.
    fn from_str(name: &str) -> Result<ReplayMode, String> {
        let found = ReplayMode::NAMES.iter().find(|(known, _)| *known == name).map(|&(_, mode)| mode);
        found.ok_or_else(|| format!("'{name}' is neither host nor command_buffer nor recordable_queue"))
    }
}

/// What each replay does on the host: before its commands, and after they were submitted.
pub(crate) struct ReplayHook {
    pub(crate) before: Box<dyn Fn() -> Result<()> + Send + Sync>,
    pub(crate) after: Box<dyn Fn() + Send + Sync>,
}

thread_local! {
    static CAPTURING: Cell<Option<Device>> = const { Cell::new(None) };
    /// How many captures this thread has begun.
    static NUMBER: Cell<u64> = const { Cell::new(0) };
    /// How many commands the capture under way has recorded.
    static COMMANDS: Cell<usize> = const { Cell::new(0) };
    /// Those of the capture under way.
    static HOOKS: RefCell<Vec<ReplayHook>> = const { RefCell::new(Vec::new()) };
}

/// Whether this thread captures a graph of the device.
#[inline]
pub(crate) fn is_capturing(device: Device) -> bool {
    CAPTURING.get() == Some(device)
}

/// Has this thread capture what it submits to the device.
///
/// # Errors
/// [`Error::Invalid`] where it captures a graph already.
pub(super) fn begin(device: Device) -> Result<()> {
    if CAPTURING.get().is_some() {
        return Err(Error::invalid("Graph::capture", "this thread is capturing a graph already"));
    }
    CAPTURING.set(Some(device));
    NUMBER.set(NUMBER.get() + 1);
    COMMANDS.set(0);
    Ok(())
}

/// Counts a command that was recorded.
pub(super) fn count_command() {
    COMMANDS.set(COMMANDS.get() + 1);
}

/// How many commands the capture of this thread has recorded so far.
pub(crate) fn commands() -> usize {
    COMMANDS.get()
}

/// What tells the captures of this thread apart; from 1 on.
pub(crate) fn number() -> u64 {
    NUMBER.get()
}

/// Has the replays of the graph that this thread captures do this.
pub(crate) fn on_replay(before: Box<dyn Fn() -> Result<()> + Send + Sync>, after: Box<dyn Fn() + Send + Sync>) {
    HOOKS.with_borrow_mut(|hooks| hooks.push(ReplayHook { before, after }));
}

/// What [`on_replay`] was given in the capture under way.
pub(crate) fn take_hooks() -> Vec<ReplayHook> {
    HOOKS.take()
}

/// Ends what [`begin`] began.
pub(super) fn end() {
    drop(take_hooks()); // of a capture that failed, which they can ask
    CAPTURING.set(None);
}

/// An error for what cannot be part of a graph.
///
/// # Errors
/// [`Error::Invalid`] while this thread captures one of the device.
#[inline]
pub(crate) fn refuse(device: Device, op: &'static str, why: &str) -> Result<()> {
    match is_capturing(device) {
        true => Err(Error::invalid(op, format!("not while a graph is captured: {why}"))),
        false => Ok(()),
    }
}

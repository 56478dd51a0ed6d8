//! The launches of the current thread: their number, and the device whose commands a graph records instead of submitting them.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use super::Device;
use crate::Result;

/// How a replay submits the commands of a [`Graph`](crate::Graph). All modes give the same results.
///
/// `CLAYSTONE_GRAPH_REPLAY` selects a mode by name for all graphs,
/// [`Graph::set_replay_mode`](crate::Graph::set_replay_mode) for one graph.
///
/// ```
/// use claystone::device::ReplayMode;
/// assert_eq!("host".parse(), Ok(ReplayMode::Host));
/// assert_eq!(ReplayMode::CommandBuffer.to_string(), "command_buffer");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ReplayMode {
    /// The host enqueues every command; kernel arguments were set at the capture.
    Host,
    /// The host enqueues command buffers (`cl_khr_command_buffer`) that the driver has prepared. The default if the device
    /// has the extension in a supported version (0.9.0 to 0.9.8).
    CommandBuffer,
    /// The host enqueues recordings of Qualcomm's extension `cl_qcom_recordable_queues`. Used only on request, because some
    /// drivers crash with the extension, and only for graphs without copies and fills. This mode has never been run on a
    /// device that has the extension.
    RecordableQueue,
}

impl ReplayMode {
    /// The modes with their names.
    const NAMES: [(&str, ReplayMode); 3] = [
        ("host", ReplayMode::Host),
        ("command_buffer", ReplayMode::CommandBuffer),
        ("recordable_queue", ReplayMode::RecordableQueue),
    ];

    /// Returns the mode in `CLAYSTONE_GRAPH_REPLAY`, which is read once.
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
    /// A sentence that lists the names of the modes.
    fn from_str(name: &str) -> Result<ReplayMode, String> {
        let found = ReplayMode::NAMES.iter().find(|(known, _)| *known == name).map(|&(_, mode)| mode);
        found.ok_or_else(|| format!("'{name}' is neither host nor command_buffer nor recordable_queue"))
    }
}

/// Callbacks that each replay runs on the host: `before` the commands are submitted, and `after`.
pub(crate) struct ReplayHook {
    pub(crate) before: Box<dyn Fn() -> Result<()> + Send + Sync>,
    pub(crate) after: Box<dyn Fn() + Send + Sync>,
}

/// The launches of a thread, and the capture that records them.
#[derive(Clone, Copy)]
struct Launches {
    /// The number of launches that [`count_launches`] counts.
    count: u64,
    /// The device whose commands this thread captures.
    device: Option<Device>,
    /// The number of captures that this thread has begun.
    captures: u64,
    /// The number of commands that the current capture has recorded.
    commands: usize,
}

thread_local! {
    static LAUNCHES: Cell<Launches> =
        const { Cell::new(Launches { count: 0, device: None, captures: 0, commands: 0 }) };
    static HOOKS: RefCell<Vec<ReplayHook>> = const { RefCell::new(Vec::new()) };
}

/// The number of launches of all threads.
static TOTAL_LAUNCHES: AtomicU64 = AtomicU64::new(0);

/// Adds 1 to the counters of [`count_launches`] and [`total_launches`]: at every kernel launch, and at every operation on the CPU.
pub(crate) fn count_launch() {
    TOTAL_LAUNCHES.fetch_add(1, Ordering::Relaxed);
    LAUNCHES.set(Launches { count: LAUNCHES.get().count + 1, ..LAUNCHES.get() });
}

/// Runs `f` and returns its result with the number of launches by this thread while `f` ran: kernels on OpenCL devices, and
/// operations on the CPU. Copies, fills, reads and writes are not counted. For tests of fusion.
///
/// ```
/// let (sum, launches) = claystone::device::count_launches(|| 1 + 1);
/// assert_eq!((sum, launches), (2, 0));
/// ```
pub fn count_launches<R>(f: impl FnOnce() -> R) -> (R, u64) {
    let before = LAUNCHES.get().count;
    (f(), LAUNCHES.get().count - before)
}

/// Returns the number of launches of all threads since the process began, counted like [`count_launches`].
///
/// ```
/// use claystone::{Device, Tensor, device::total_launches};
/// let before = total_launches();
/// Tensor::ones(3, Device::Cpu)?.exp()?;
/// assert!(total_launches() > before);
/// # Ok::<(), claystone::Error>(())
/// ```
pub fn total_launches() -> u64 {
    TOTAL_LAUNCHES.load(Ordering::Relaxed)
}

#[inline]
pub(crate) fn is_capturing(device: Device) -> bool {
    LAUNCHES.get().device == Some(device)
}

/// Starts to capture the commands that this thread submits to the device.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) if this thread already captures a graph.
pub(super) fn begin(device: Device) -> Result<()> {
    let before = LAUNCHES.get();
    invalid!("Graph::capture" if before.device.is_some(), "this thread is capturing a graph already");
    LAUNCHES.set(Launches { device: Some(device), captures: before.captures + 1, commands: 0, ..before });
    Ok(())
}

pub(super) fn count_command() {
    LAUNCHES.set(Launches { commands: LAUNCHES.get().commands + 1, ..LAUNCHES.get() });
}

/// Returns the number of commands that this thread's capture has recorded so far.
pub(crate) fn command_count() -> usize {
    LAUNCHES.get().commands
}

/// Returns a number, from 1 on, that identifies the capture among this thread's captures.
pub(crate) fn capture_id() -> u64 {
    LAUNCHES.get().captures
}

/// Registers callbacks with the graph that this thread captures; each replay runs them.
pub(crate) fn on_replay(before: Box<dyn Fn() -> Result<()> + Send + Sync>, after: Box<dyn Fn() + Send + Sync>) {
    HOOKS.with_borrow_mut(|hooks| hooks.push(ReplayHook { before, after }));
}

/// Takes the hooks that [`on_replay`] registered during the current capture.
pub(crate) fn take_hooks() -> Vec<ReplayHook> {
    HOOKS.take()
}

/// Ends the capture that [`begin`] started.
pub(super) fn end() {
    drop(take_hooks()); // hooks of a failed capture; a hook's destructor may call `is_capturing`
    LAUNCHES.set(Launches { device: None, ..LAUNCHES.get() });
}

/// Refuses an operation that cannot be part of a graph.
///
/// # Errors
/// [`Error::Invalid`](crate::Error::Invalid) while this thread captures a graph of the device.
#[inline]
pub(crate) fn refuse_while_capturing(device: Device, op: &'static str, why: &str) -> Result<()> {
    invalid!(op if is_capturing(device), "not while a graph is captured: {why}");
    Ok(())
}

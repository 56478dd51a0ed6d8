//! An allocator's state at one moment, in the schema of PyTorch's `torch.cuda.memory._snapshot()`.
//!
//! Every integer is written as an i64: PyTorch's viewer supports few of pickle's instructions, and no integers of more than 8 bytes.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::{Setting, pickle};
use crate::{Device, Error, Result};

/// The segments and blocks of one or more allocators, and their recorded events.
///
/// ```
/// use claystone::storage::{BlockInfo, BlockState, SegmentInfo, Snapshot};
/// let used = BlockInfo::new(2 << 20, 1 << 20, BlockState::ActiveAllocated);
/// let free = BlockInfo::new(3 << 20, 1 << 20, BlockState::Inactive);
/// let snapshot = Snapshot::new(vec![SegmentInfo::new(vec![used, free])], vec![]);
/// snapshot.check()?;
/// assert_eq!(snapshot.fragmentation().all.utilisation(), 0.5);
/// assert_eq!(Snapshot::from_pickle(&snapshot.to_pickle()?)?, snapshot);
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[non_exhaustive]
pub struct Snapshot {
    /// All segments. The segments of each device are sorted by address.
    pub segments: Vec<SegmentInfo>,
    /// The events recorded on each device, oldest first. The index is the device's number.
    #[serde(default)]
    pub device_traces: Vec<Vec<TraceEntry>>,
    /// The configuration: a map from each key's name to its value.
    #[serde(default)]
    pub allocator_settings: BTreeMap<String, Setting>,
    /// Starts and ends of the spans given to [`annotate`](super::annotate).
    #[serde(default)]
    pub external_annotations: Vec<Annotation>,
    /// Segments of host memory, as in PyTorch 2.15. Their device is -1 in files, and `u32::MAX` here.
    #[serde(default)]
    pub host_segments: Vec<SegmentInfo>,
    /// The events recorded on pinned host memory, oldest first.
    #[serde(default)]
    pub host_traces: Vec<TraceEntry>,
}

impl Snapshot {
    /// Returns a snapshot of segments and events, without settings and annotations.
    pub fn new(segments: Vec<SegmentInfo>, device_traces: Vec<Vec<TraceEntry>>) -> Snapshot {
        Snapshot { segments, device_traces, ..Snapshot::default() }
    }
}

#[inline]
pub(in crate::storage) fn device_number(device: Device) -> u32 {
    match device {
        Device::Cpu => 0,
        Device::OpenCL(index) => u32::try_from(index).map_or(u32::MAX, |index| index.saturating_add(1)),
    }
}

/// A range of memory that the driver created in one call.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[non_exhaustive]
pub struct SegmentInfo {
    /// The device's number: the index into [`Snapshot::device_traces`].
    #[serde(deserialize_with = "int::deserialize")]
    pub device: u32,
    /// The address of the first byte. An artificial address if the device's memory has no addresses. Segments of a device never overlap.
    #[serde(deserialize_with = "int::deserialize")]
    pub address: u64,
    /// The size in bytes.
    #[serde(deserialize_with = "int::deserialize")]
    pub total_size: u64,
    /// The stream that the segment was allocated on.
    #[serde(deserialize_with = "int::deserialize")]
    pub stream: u64,
    /// Whether the segment serves small or large requests.
    #[serde(default)]
    pub segment_type: SegmentType,
    /// The id of the private pool: (0, 0) for none, (1, 0) for images, (2, 0) for blocks that were spilled to the host. These are not
    /// in the device's memory.
    #[serde(default)]
    pub segment_pool_id: (i64, i64),
    /// Whether the segment is part of a reservation, and grows and shrinks by pages.
    #[serde(default)]
    pub is_expandable: bool,
    /// The call stack that allocated the segment.
    #[serde(default, deserialize_with = "pickle::deserialize_frames")]
    pub frames: Arc<[Frame]>,
    /// The segment's blocks; each begins where the previous one ends.
    pub blocks: Vec<BlockInfo>,
}

impl SegmentInfo {
    /// Returns a segment of device 0 and stream 0 that consists of these blocks, in the pool of large requests, with no call stack.
    pub fn new(blocks: Vec<BlockInfo>) -> SegmentInfo {
        SegmentInfo {
            device: 0,
            address: blocks.first().map_or(0, |block| block.address),
            total_size: blocks.iter().map(|block| block.size).sum(),
            stream: 0,
            segment_type: SegmentType::Large,
            segment_pool_id: (0, 0),
            is_expandable: false,
            frames: [].into(),
            blocks,
        }
    }

    /// Returns the number of bytes of the blocks in use.
    pub fn allocated_size(&self) -> u64 {
        self.sum(|b| b.state == BlockState::ActiveAllocated, |b| b.size)
    }

    /// Returns the number of bytes of the blocks that are in use, or wait until another stream no longer uses them.
    pub fn active_size(&self) -> u64 {
        self.sum(|b| b.state != BlockState::Inactive, |b| b.size)
    }

    /// Returns the number of requested bytes of the blocks in [`active_size`](SegmentInfo::active_size).
    pub fn requested_size(&self) -> u64 {
        self.sum(|b| b.state != BlockState::Inactive, |b| b.requested_size)
    }

    fn sum(&self, which: impl Fn(&&BlockInfo) -> bool, size: impl Fn(&BlockInfo) -> u64) -> u64 {
        self.blocks.iter().filter(which).map(size).fold(0, u64::saturating_add)
    }

    fn value(&self) -> PyValue<'_> {
        PyValue::dict([
            ("device", if self.device == u32::MAX { PyValue::of(&-1) } else { PyValue::Int(self.device.into()) }),
            ("address", PyValue::Int(self.address)),
            ("total_size", PyValue::Int(self.total_size)),
            ("stream", PyValue::Int(self.stream)),
            ("segment_type", PyValue::Text(self.segment_type.name())),
            ("segment_pool_id", PyValue::Pair(self.segment_pool_id)),
            ("is_expandable", PyValue::Bool(self.is_expandable)),
            ("allocated_size", PyValue::Int(self.allocated_size())),
            ("active_size", PyValue::Int(self.active_size())),
            ("requested_size", PyValue::Int(self.requested_size())),
            ("frames", PyValue::Frames(&self.frames)),
            ("blocks", PyValue::List(self.blocks.iter().map(BlockInfo::value).collect())),
        ])
    }
}

/// Whether a segment serves small or large requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SegmentType {
    /// The segment serves requests of up to 1 MiB.
    Small,
    /// The segment serves requests of more than 1 MiB, or has a type that this version does not know.
    #[default]
    #[serde(other)]
    Large,
}

impl SegmentType {
    pub(super) fn name(self) -> &'static str {
        match self {
            SegmentType::Small => "small",
            SegmentType::Large => "large",
        }
    }
}

/// A block: a range of bytes of a segment.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[non_exhaustive]
pub struct BlockInfo {
    /// The address of the first byte.
    #[serde(default, with = "int")] // missing in files from before PyTorch 2.1; added when such a file is loaded
    pub address: u64,
    /// The size in bytes.
    #[serde(with = "int")]
    pub size: u64,
    /// The requested size in bytes; meaningless for a free block.
    #[serde(with = "int")]
    pub requested_size: u64,
    /// Whether the block is in use.
    pub state: BlockState,
    /// The call stack that allocated the block.
    #[serde(default, deserialize_with = "pickle::deserialize_frames")]
    pub frames: Arc<[Frame]>,
}

impl BlockInfo {
    /// Returns a block whose requested size is its size, with no call stack.
    pub fn new(address: u64, size: u64, state: BlockState) -> BlockInfo {
        BlockInfo { address, size, requested_size: size, state, frames: [].into() }
    }

    fn value(&self) -> PyValue<'_> {
        let state = match self.state {
            BlockState::ActiveAllocated => "active_allocated",
            BlockState::ActivePendingFree => "active_pending_free",
            BlockState::Inactive => "inactive",
        };
        PyValue::dict([
            ("address", PyValue::Int(self.address)),
            ("size", PyValue::Int(self.size)),
            ("requested_size", PyValue::Int(self.requested_size)),
            ("state", PyValue::Text(state)),
            ("frames", PyValue::Frames(&self.frames)),
        ])
    }
}

/// The state of a block: in use or not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BlockState {
    /// In use.
    ActiveAllocated,
    /// Freed, but another stream may still use the block.
    #[serde(alias = "active_awaiting_free")]
    ActivePendingFree,
    /// Free, or in a state that this version does not know.
    #[serde(other)]
    Inactive,
}

/// An event of the trace.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(from = "TraceEntryFields")]
#[non_exhaustive]
pub struct TraceEntry {
    /// The kind of event.
    pub action: TraceAction,
    /// The address of the block or segment; 0 for a snapshot. For an [`Oom`](TraceAction::Oom), the number of bytes that were free
    /// on the device.
    pub addr: u64,
    /// A number of bytes: for blocks and an [`Oom`](TraceAction::Oom) the requested bytes, for segments the size, and for a
    /// snapshot the bytes in use.
    pub size: u64,
    /// The stream of the block or segment.
    pub stream: u64,
    /// The time in microseconds since 1970.
    pub time_us: u64,
    /// The call stack, the innermost frame first.
    pub frames: Arc<[Frame]>,
    /// The names given to [`with_context`](super::with_context), joined by slashes; empty if none.
    pub compile_context: String,
}

impl TraceEntry {
    /// Returns an event on stream 0 at time 0, with no call stack.
    pub fn new(action: TraceAction, addr: u64, size: u64) -> TraceEntry {
        TraceEntry { action, addr, size, stream: 0, time_us: 0, frames: [].into(), compile_context: String::new() }
    }
}

/// PyTorch's text for a missing compile context.
pub(super) const NO_CONTEXT: &str = "N/A";

/// The fields of a trace entry in a file. An entry has an address or, if memory ran out, the number of free bytes instead.
#[derive(Deserialize)]
struct TraceEntryFields {
    action: TraceAction,
    #[serde(default, with = "int")]
    addr: u64,
    #[serde(default, with = "int")]
    device_free: u64,
    #[serde(default, with = "int")]
    size: u64,
    #[serde(default, with = "int")]
    stream: u64,
    #[serde(default, with = "int")]
    time_us: u64,
    #[serde(default, deserialize_with = "pickle::deserialize_frames")]
    frames: Arc<[Frame]>,
    #[serde(default)]
    compile_context: Option<String>,
}

impl From<TraceEntryFields> for TraceEntry {
    fn from(f: TraceEntryFields) -> TraceEntry {
        TraceEntry {
            action: f.action,
            addr: if f.action == TraceAction::Oom { f.device_free } else { f.addr },
            size: f.size,
            stream: f.stream,
            time_us: f.time_us,
            frames: f.frames,
            compile_context: f.compile_context.filter(|c| c != NO_CONTEXT).unwrap_or_default(),
        }
    }
}

impl TraceEntry {
    fn value(&self) -> PyValue<'_> {
        let addr = if self.action == TraceAction::Oom { "device_free" } else { "addr" };
        let context = if self.compile_context.is_empty() { NO_CONTEXT } else { &self.compile_context };
        PyValue::dict([
            ("action", PyValue::of(&self.action)),
            (addr, PyValue::Int(self.addr)),
            ("size", PyValue::Int(self.size)),
            ("stream", PyValue::Int(self.stream)),
            ("time_us", PyValue::Int(self.time_us)),
            ("frames", PyValue::Frames(&self.frames)),
            ("compile_context", PyValue::Text(context)),
        ])
    }
}

/// The kind of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum TraceAction {
    /// A block was handed out.
    Alloc,
    /// A block was returned. Another stream may still use the block.
    FreeRequested,
    /// A returned block became free.
    FreeCompleted,
    /// The driver created a segment.
    SegmentAlloc,
    /// A segment was released to the driver.
    SegmentFree,
    /// Pages of a reservation were committed.
    SegmentMap,
    /// Pages of a reservation were decommitted.
    SegmentUnmap,
    /// A snapshot was taken.
    Snapshot,
    /// An allocation failed for lack of memory.
    Oom,
    /// An event that this version does not know, such as PyTorch's `annotate`.
    #[serde(other)]
    Other,
}

/// A frame of a call stack: a location in a program.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Frame {
    /// The source file; empty if unknown, and for a name given to [`with_context`](super::with_context).
    pub filename: String,
    /// The line; 0 if there is no file.
    #[serde(with = "int")]
    pub line: u32,
    /// The function's name, or the name given to `with_context`.
    pub name: String,
}

/// The start or the end of a span.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Annotation {
    /// The span's name.
    pub name: String,
    /// Whether the span starts or ends.
    pub stage: Stage,
    /// The device's number.
    #[serde(with = "int")]
    pub device: u32,
    /// The time in microseconds since 1970.
    #[serde(with = "int")]
    pub time_us: u64,
}

/// One of the two ends of a span.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Stage {
    /// The start.
    Start,
    /// The end.
    End,
}

impl Snapshot {
    /// Returns the snapshot as a Python pickle, protocol 3, for PyTorch's memory viewer.
    ///
    /// # Errors
    /// If a number does not fit in an i64.
    pub fn to_pickle(&self) -> Result<Vec<u8>> {
        pickle::write(&self.value()).map_err(|e| unwritable_error(&e))
    }

    /// Returns the snapshot as JSON, which newer versions of the viewer open too.
    ///
    /// # Errors
    /// If a number does not fit in an i64.
    pub fn to_json(&self) -> Result<String> {
        serde_json::to_string(self).map_err(|e| unwritable_error(&e))
    }

    /// Reads a pickle written by [`to_pickle`](Snapshot::to_pickle) or PyTorch, ignoring fields that claystone does not have.
    ///
    /// # Errors
    /// If the bytes are not a pickle of a snapshot, or use shared values so often that they would take far more memory than the file.
    pub fn from_pickle(bytes: &[u8]) -> Result<Snapshot> {
        pickle::read(bytes).map(Snapshot::complete).map_err(|e| unreadable_error("pickle", &e))
    }

    /// Reads JSON written by [`to_json`](Snapshot::to_json), or a PyTorch snapshot dumped as JSON.
    ///
    /// # Errors
    /// If the text is not the JSON of a snapshot.
    pub fn from_json(text: &str) -> Result<Snapshot> {
        serde_json::from_str(text).map(Snapshot::complete).map_err(|e| unreadable_error("JSON", &e))
    }

    /// Checks that the name of a file has an ending that [`save`](Snapshot::save) accepts.
    pub(in crate::storage) fn check_name(op: &'static str, path: &Path) -> Result<()> {
        Format::from_path(op, path).map(drop)
    }

    /// Writes a file: a pickle if its name ends in `.pickle` or `.pkl`, JSON if in `.json`.
    ///
    /// # Errors
    /// If the name has another ending or the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let bytes = match Format::from_path("save", path)? {
            Format::Pickle => self.to_pickle()?,
            Format::Json => self.to_json()?.into_bytes(),
        };
        crate::file::replace(path, &bytes).map_err(|e| Error::invalid("save", format!("{}: {e}", path.display())))
    }

    /// Reads a file as [`load`](Snapshot::load) does, but keeps only a part of the traces of a pickle: the allocations and frees of blocks
    /// in use at the end or at the peak of each trace. A history of 10 GB takes less than 1 GiB of memory.
    ///
    /// The results of [`live_blocks`](Snapshot::live_blocks), [`live_memory`](Snapshot::live_memory) and
    /// [`peak_memory`](Snapshot::peak_memory) are the same. `allocator_settings["trace_events_read"]` lists the number of events that
    /// each device's trace has in the file.
    ///
    /// ```
    /// use claystone::{Device, storage::Snapshot};
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = folder.path().join("memory.pickle");
    /// let snapshot = Device::Cpu.memory_snapshot()?;
    /// snapshot.save(&path)?;
    /// assert_eq!(Snapshot::load_in_use(&path)?.live_memory(), snapshot.live_memory());
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`load`](Snapshot::load), and for a pipe.
    pub fn load_in_use(path: impl AsRef<Path>) -> Result<Snapshot> {
        let path = path.as_ref();
        match Format::from_path("load_in_use", path)? {
            Format::Json => Snapshot::load(path),
            Format::Pickle => pickle::read_file(path)
                .map(Snapshot::complete)
                .map_err(|e| Error::invalid("load_in_use", format!("{}: {e}", path.display()))),
        }
    }

    /// Reads a file written by [`save`](Snapshot::save) or PyTorch's `_dump_snapshot`, in the format that the ending of its name selects.
    ///
    /// # Errors
    /// If the name has another ending, or the file cannot be read, is not a snapshot, or is a pipe with more than 64 MiB.
    pub fn load(path: impl AsRef<Path>) -> Result<Snapshot> {
        let path = path.as_ref();
        let unread = |e: &dyn std::fmt::Display| Error::invalid("load", format!("{}: {e}", path.display()));
        let format = Format::from_path("load", path)?;
        let bytes = crate::file::read(path).map_err(|e| unread(&e))?;
        match format {
            Format::Pickle => Snapshot::from_pickle(&bytes),
            Format::Json => Snapshot::from_json(std::str::from_utf8(&bytes).map_err(|e| unread(&e))?),
        }
    }

    fn value(&self) -> PyValue<'_> {
        let traces = self.device_traces.iter();
        let traces = traces.map(|trace| PyValue::List(trace.iter().map(TraceEntry::value).collect()));
        let mut entries = vec![
            ("segments", PyValue::List(self.segments.iter().map(SegmentInfo::value).collect())),
            ("device_traces", PyValue::List(traces.collect())),
            ("allocator_settings", PyValue::of(&self.allocator_settings)),
            ("external_annotations", PyValue::of(&self.external_annotations)),
        ];
        if !self.host_segments.is_empty() || !self.host_traces.is_empty() {
            let segments = self.host_segments.iter().map(SegmentInfo::value).collect();
            let trace = self.host_traces.iter().map(TraceEntry::value).collect();
            entries.extend([("host_segments", PyValue::List(segments)), ("host_traces", PyValue::List(trace))]);
        }
        PyValue::Dict(entries)
    }

    /// Iterates over the frames of all segments, blocks and events.
    pub(super) fn frames_mut(&mut self) -> impl Iterator<Item = &mut Arc<[Frame]>> {
        let segments = self.segments.iter_mut().chain(&mut self.host_segments);
        let segments =
            segments.flat_map(|s| std::iter::once(&mut s.frames).chain(s.blocks.iter_mut().map(|b| &mut b.frames)));
        let entries = self.device_traces.iter_mut().flatten().chain(&mut self.host_traces);
        segments.chain(entries.map(|entry| &mut entry.frames))
    }

    /// Computes the addresses of blocks, which files of old PyTorch versions do not have.
    fn complete(mut self) -> Snapshot {
        for segment in &mut self.segments {
            if segment.address != 0 && segment.blocks.iter().all(|b| b.address == 0) {
                let mut address = segment.address;
                for block in &mut segment.blocks {
                    block.address = address;
                    address = address.saturating_add(block.size);
                }
            }
        }
        self
    }
}

/// The setting with the number of events that each trace has in the file, if a part of them was kept.
pub(super) const EVENTS_READ: &str = "trace_events_read";

/// The format of a snapshot file.
enum Format {
    Pickle,
    Json,
}

impl Format {
    fn from_path(op: &'static str, path: &Path) -> Result<Format> {
        match path.extension().and_then(|e| e.to_str()) {
            Some("pickle" | "pkl") => Ok(Format::Pickle),
            Some("json") => Ok(Format::Json),
            _ => Err(Error::invalid(op, format!("{} must end in .pickle, .pkl or .json", path.display()))),
        }
    }
}

fn unwritable_error(e: &dyn std::fmt::Display) -> Error {
    Error::invalid("snapshot", format!("it cannot be written: {e}"))
}

fn unreadable_error(what: &str, e: &dyn std::fmt::Display) -> Error {
    Error::invalid("snapshot", format!("this is not the {what} of a snapshot: {e}"))
}

/// A value that is written as a pickle or as JSON.
pub(super) enum PyValue<'a> {
    Bool(bool),
    Int(u64),
    Text(&'a str),
    /// A pair of numbers, which is a tuple in a pickle and a list in JSON.
    Pair((i64, i64)),
    /// Frames, which a pickle contains only once.
    Frames(&'a Arc<[Frame]>),
    List(Vec<PyValue<'a>>),
    Dict(Vec<(&'static str, PyValue<'a>)>),
    /// Any other data; an error if JSON cannot represent the data.
    Other(Result<serde_json::Value, String>),
}

impl<'a> PyValue<'a> {
    fn dict<const N: usize>(entries: [(&'static str, PyValue<'a>); N]) -> PyValue<'a> {
        PyValue::Dict(entries.into())
    }

    fn of(value: &impl Serialize) -> PyValue<'a> {
        PyValue::Other(serde_json::to_value(value).map_err(|e| e.to_string()))
    }
}

impl Serialize for PyValue<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            PyValue::Bool(is) => is.serialize(serializer),
            PyValue::Int(int) => int::serialize(int, serializer),
            PyValue::Text(text) => text.serialize(serializer),
            PyValue::Pair(pair) => pair.serialize(serializer),
            PyValue::Frames(frames) => serializer.collect_seq(frames.iter()),
            PyValue::List(items) => serializer.collect_seq(items),
            PyValue::Dict(entries) => serializer.collect_map(entries.iter().map(|(key, value)| (key, value))),
            PyValue::Other(value) => value.as_ref().map_err(serde::ser::Error::custom)?.serialize(serializer),
        }
    }
}

/// Implements `Serialize` for parts of a snapshot, in the form they have inside a snapshot.
macro_rules! serialize_as_value {
    ($($part:ident)*) => { $(
        impl Serialize for $part {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                self.value().serialize(serializer)
            }
        }
    )* };
}

serialize_as_value! { Snapshot SegmentInfo BlockInfo TraceEntry }

/// Reads and writes unsigned integers as i64. Integers of 2^63 and more, which other writers may use, are read as well.
mod int {
    use super::*;

    pub fn serialize<T: Copy + Into<u64>, S: Serializer>(value: &T, serializer: S) -> Result<S::Ok, S::Error> {
        let value: u64 = (*value).into();
        let value = i64::try_from(value)
            .map_err(|_| serde::ser::Error::custom(format_args!("{value} does not fit in 63 bits")))?;
        serializer.serialize_i64(value)
    }

    pub fn deserialize<'de, T: TryFrom<i128>, D: Deserializer<'de>>(deserializer: D) -> Result<T, D::Error> {
        let value = i128::deserialize(deserializer)?;
        // Negative numbers are in two's complement, with 64 bits or, as the device -1, with 32.
        let wrapped = |bits: u32| T::try_from(value + if value < 0 { 1 << bits } else { 0 });
        wrapped(64).or(wrapped(32)).map_err(|_| serde::de::Error::custom(format_args!("{value} is out of range")))
    }
}

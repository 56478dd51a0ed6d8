//! Live memory by call site, by context, by age, and block by block.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use serde::{Serialize, Serializer};

use super::snapshot::{BlockInfo, BlockState, Frame, Snapshot, TraceAction};
use crate::error::Size;

/// The blocks in use that were allocated at one call site: at a line of a function or, if no line is known, under a
/// name given to [`with_context`](super::with_context).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct LiveMemory {
    /// The stack that allocated most of the bytes. All stacks of the site have the same innermost frame, which is the
    /// first. Empty for blocks without a context, such as those allocated before recording began.
    #[serde(serialize_with = "serialize_frames")]
    pub frames: Arc<[Frame]>,
    /// The number of requested bytes of the blocks.
    pub bytes: u64,
    /// The number of blocks that were allocated at the call site.
    pub blocks: u64,
}

fn serialize_frames<S: Serializer>(frames: &[Frame], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(frames)
}

/// A block in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveBlock {
    /// The device's number: the index into [`Snapshot::device_traces`].
    pub device: u32,
    /// The address of the first byte.
    pub address: u64,
    /// The requested size in bytes.
    pub bytes: u64,
    /// The stack that allocated the block, the innermost frame first, with the names given to [`with_context`](super::with_context).
    pub frames: Arc<[Frame]>,
    /// The names given to [`with_context`](super::with_context), joined by slashes, and the time from the allocation to
    /// the last entry of the device's trace. `None` if the trace does not contain the allocation.
    pub traced: Option<(String, Duration)>,
}

impl Snapshot {
    /// Returns the blocks in use, the largest first, with the age and the names that the trace gives.
    ///
    /// ```
    /// use claystone::storage::{HistoryOptions, with_context};
    /// use claystone::{Device, Tensor};
    /// let device = Device::Cpu;
    /// device.record_memory_history(HistoryOptions::default())?;
    /// let cache = with_context("cache", || Tensor::zeros(&[1 << 20], device))?; // 4 MiB
    /// let blocks = device.memory_snapshot()?.live_blocks();
    /// let (context, _age) = blocks[0].traced.as_ref().expect("it was allocated while the history was recorded");
    /// assert_eq!((context.as_str(), blocks[0].bytes), ("cache", 4 << 20));
    /// # drop(cache);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn live_blocks(&self) -> Vec<LiveBlock> {
        let mut allocated = HashMap::new();
        for (device, trace) in self.device_traces.iter().enumerate() {
            let now = trace.last().map_or(0, |entry| entry.time_us);
            for entry in trace {
                let block = (device as u64, entry.addr);
                match entry.action {
                    TraceAction::Alloc => {
                        let age = Duration::from_micros(now.saturating_sub(entry.time_us));
                        allocated.insert(block, (&entry.compile_context, age));
                    }
                    TraceAction::FreeCompleted => _ = allocated.remove(&block),
                    _ => {}
                }
            }
        }
        let mut blocks: Vec<LiveBlock> = self
            .blocks_in_use()
            .map(|(device, block)| LiveBlock {
                device,
                address: block.address,
                bytes: block.requested_size,
                frames: Arc::clone(&block.frames),
                traced: allocated
                    .get(&(device.into(), block.address))
                    .map(|(context, age)| (context.to_string(), *age)),
            })
            .collect();
        blocks.sort_by_key(|block| (Reverse(block.bytes), block.device, block.address));
        blocks
    }

    /// Writes tables of the blocks in use by context and by age, if the trace gives contexts and ages, and of the largest blocks.
    pub(super) fn fmt_live_blocks(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let blocks = self.live_blocks();
        let traced = |block: &LiveBlock| block.traced.is_some();
        if blocks.iter().any(|b| b.traced.as_ref().is_some_and(|(context, _)| !context.is_empty())) {
            fmt_groups(f, "context", &blocks, |block| match &block.traced {
                Some((context, _)) if context.is_empty() => (0, "no context".into()),
                Some((context, _)) => (0, context.clone()),
                None => (0, UNTRACED_LABEL.into()),
            })?;
        }
        if blocks.iter().any(traced) {
            fmt_groups(f, "age", &blocks, |block| match &block.traced {
                Some((_, age)) => match AGE_GROUPS.iter().position(|(_, end)| age.as_secs() < *end) {
                    Some(i) => (i, format!("under {}", AGE_GROUPS[i].0)),
                    None => (AGE_GROUPS.len(), "older".into()),
                },
                None => (AGE_GROUPS.len() + 1, UNTRACED_LABEL.into()),
            })?;
        }
        if blocks.iter().any(|block| traced(block) || !block.frames.is_empty()) {
            writeln!(f, "the largest blocks in use:\n{:>11} {:>8}", "bytes", "age")?;
            for block in blocks.iter().take(MAX_LISTED_BLOCKS) {
                let age =
                    block.traced.as_ref().map_or("unknown".into(), |(_, age)| format!("{:.1} s", age.as_secs_f64()));
                let site = block.frames.first().map_or("unknown".into(), Frame::to_string);
                write!(f, "{:>11} {age:>8}  {site}", format_size(block.bytes))?;
                match &block.traced {
                    Some((context, _)) if !context.is_empty() => writeln!(f, ", in {context}")?,
                    _ => writeln!(f)?,
                }
            }
        }
        Ok(())
    }

    /// Returns the blocks in use grouped by the innermost frame that allocated them, groups with the most bytes first,
    /// which makes leaks visible. Without [`stacks`](super::HistoryOptions::stacks) that frame is only the source line.
    ///
    /// ```
    /// use claystone::storage::HistoryOptions;
    /// use claystone::{Device, Tensor};
    /// let device = Device::Cpu;
    /// device.record_memory_history(HistoryOptions::default())?;
    /// let leaked = Tensor::zeros(&[1 << 20], device)?; // 4 MiB
    /// let live = device.memory_snapshot()?.live_memory();
    /// assert!(live.iter().any(|site| site.bytes >= 4 << 20 && site.frames[0].name.ends_with("main")));
    /// # drop(leaked);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn live_memory(&self) -> Vec<LiveMemory> {
        group_by_call_site(self.blocks_in_use().map(|(_, block)| (&block.frames, block.requested_size)))
    }

    /// Returns the blocks in use that were not yet in use in an `earlier` snapshot of the same process, grouped as
    /// [`live_memory`](Snapshot::live_memory) does. What grows from one step to the next is a leak.
    ///
    /// A block that was freed and allocated again at the same address counts as new if the trace contains the allocation.
    ///
    /// ```
    /// use claystone::storage::HistoryOptions;
    /// use claystone::{Device, Tensor};
    /// let device = Device::Cpu;
    /// device.record_memory_history(HistoryOptions::default())?;
    /// let weights = Tensor::zeros(1000, device)?;
    /// let before = device.memory_snapshot()?;
    /// let leaked = Tensor::zeros(&[1 << 20], device)?; // 4 MiB
    /// let new = device.memory_snapshot()?.live_since(&before);
    /// assert_eq!((new.len(), new[0].bytes), (1, 4 << 20));
    /// # drop((weights, leaked));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn live_since(&self, earlier: &Snapshot) -> Vec<LiveMemory> {
        let key = |(device, block): (u32, &BlockInfo)| (device, block.address, block.size, Arc::clone(&block.frames));
        let mut known: HashSet<_> = earlier.blocks_in_use().map(key).collect();
        for (device, (trace, before)) in (0u32..).zip(self.device_traces.iter().zip(&earlier.device_traces)) {
            let end = before.last().map_or(0, |entry| entry.time_us);
            let new = trace.iter().filter(|entry| entry.action == TraceAction::Alloc && entry.time_us > end);
            let new: HashSet<u64> = new.map(|entry| entry.addr).collect();
            known.retain(|block| block.0 != device || !new.contains(&block.1));
        }
        let new = self.blocks_in_use().filter(|block| !known.contains(&key(*block)));
        group_by_call_site(new.map(|(_, block)| (&block.frames, block.requested_size)))
    }

    /// Iterates over the blocks in use, each with its device's number.
    fn blocks_in_use(&self) -> impl Iterator<Item = (u32, &BlockInfo)> {
        let blocks = self.segments.iter().flat_map(|s| s.blocks.iter().map(move |block| (s.device, block)));
        blocks.filter(|(_, block)| block.state != BlockState::Inactive)
    }
}

/// Groups blocks by the innermost frame that allocated them, groups with the most bytes first. Each block is given by its stack and
/// its size in bytes.
pub(in crate::storage) fn group_by_call_site<'a>(
    blocks: impl Iterator<Item = (&'a Arc<[Frame]>, u64)>,
) -> Vec<LiveMemory> {
    let mut stacks: HashMap<&Arc<[Frame]>, (u64, u64)> = HashMap::new();
    for (frames, size) in blocks {
        let (bytes, blocks) = stacks.entry(frames).or_default();
        (*bytes, *blocks) = (bytes.saturating_add(size), *blocks + 1);
    }
    let mut stacks: Vec<_> = stacks.into_iter().collect();
    stacks.sort_by_key(|(frames, (bytes, _))| (Reverse(*bytes), *frames));
    let mut sites: Vec<LiveMemory> = Vec::new();
    let mut known: HashMap<Option<&Frame>, usize> = HashMap::new();
    for (frames, (bytes, blocks)) in stacks {
        let at = *known.entry(frames.first()).or_insert(sites.len());
        match sites.get_mut(at) {
            Some(site) => {
                site.bytes = site.bytes.saturating_add(bytes);
                site.blocks += blocks;
            }
            None => sites.push(LiveMemory { frames: Arc::clone(frames), bytes, blocks }),
        }
    }
    sites.sort_by_key(|site| Reverse(site.bytes));
    sites
}

/// Writes a table of call sites, if any frames are known, with `head` in front of its heading.
pub(in crate::storage) fn fmt_sites(f: &mut fmt::Formatter<'_>, head: &str, sites: &[LiveMemory]) -> fmt::Result {
    if sites.iter().all(|site| site.frames.is_empty()) {
        return Ok(());
    }
    // Without recorded stacks, frames have a file and a line but no function name.
    let is_line = |frame: &Frame| frame.name.is_empty();
    let by = match sites.iter().any(|site| site.frames.first().is_some_and(is_line)) {
        true => "source line",
        false => "where it was allocated",
    };
    let rows = sites.iter().map(|LiveMemory { frames, bytes, blocks }| {
        let site = frames.first().map_or("unknown".into(), Frame::to_string);
        let callers: String =
            frames.iter().skip(1).take(MAX_LISTED_CALLERS).map(|frame| format!(" < {frame}")).collect();
        let callers = if callers.is_empty() { callers } else { format!("\n{:>20} {callers}", "") };
        (*bytes, *blocks, site + &callers)
    });
    fmt_table(f, format_args!("{head}in use, by {by}"), rows, " call sites")
}

/// Writes a table of bytes, numbers of blocks and names, of which the first rows are written and the rest is counted.
fn fmt_table(
    f: &mut fmt::Formatter<'_>,
    heading: fmt::Arguments<'_>,
    mut rows: impl ExactSizeIterator<Item = (u64, u64, String)>,
    what: &str,
) -> fmt::Result {
    writeln!(f, "{heading}:\n{:>11} {:>8}", "bytes", "blocks")?;
    for (bytes, blocks, name) in rows.by_ref().take(MAX_LISTED_SITES) {
        writeln!(f, "{:>11} {blocks:>8}  {name}", format_size(bytes))?;
    }
    if rows.len() > 0 { writeln!(f, "and {}{what} with less", rows.len()) } else { Ok(()) }
}

/// Writes a table of groups of blocks with their bytes, sorted by rank and then by bytes, the most first. `key` returns a group's
/// rank and name.
fn fmt_groups(
    f: &mut fmt::Formatter<'_>,
    what: &str,
    blocks: &[LiveBlock],
    key: impl Fn(&LiveBlock) -> (usize, String),
) -> fmt::Result {
    let mut groups: HashMap<(usize, String), (u64, u64)> = HashMap::new();
    for block in blocks {
        let (bytes, count) = groups.entry(key(block)).or_default();
        (*bytes, *count) = (bytes.saturating_add(block.bytes), *count + 1);
    }
    let mut groups: Vec<_> = groups.into_iter().collect();
    groups.sort_by(|((a, x), (b, _)), ((c, y), (d, _))| (a, Reverse(b), x).cmp(&(c, Reverse(d), y)));
    let rows = groups.into_iter().map(|((_, name), (bytes, count))| (bytes, count, name));
    fmt_table(f, format_args!("in use, by {what}"), rows, "")
}

pub(super) fn format_size(bytes: u64) -> String {
    if bytes < 1024 { format!("{bytes} B") } else { Size(bytes).to_string() }
}

/// The group name of blocks whose allocation is not in the trace.
const UNTRACED_LABEL: &str = "not in the history";

/// The age groups: name, and end in seconds.
const AGE_GROUPS: [(&str, u64); 4] = [("1 second", 1), ("10 seconds", 10), ("1 minute", 60), ("10 minutes", 600)];

const MAX_LISTED_BLOCKS: usize = 10;

const MAX_LISTED_SITES: usize = 16;
/// The number of callers to print per call site.
const MAX_LISTED_CALLERS: usize = 3;

/// Prints `function (file:line)`, leaving out unknown parts.
impl fmt::Display for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.name.as_str(), self.filename.as_str(), self.line) {
            (name, "", _) => f.write_str(name),
            ("", file, line) => write!(f, "{file}:{line}"),
            (name, file, 0) => write!(f, "{name} ({file})"),
            (name, file, line) => write!(f, "{name} ({file}:{line})"),
        }
    }
}

//! Live memory by the call sites that allocated it.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::fmt::{self, Write as _};
use std::sync::Arc;

use super::snapshot::{BlockState, Frame, Snapshot};
use super::summary::size;

/// The blocks in use that were allocated at one place in the program: at a line of a function, or, where no stacks were
/// recorded, under a name given to [`with_context`](super::with_context).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LiveMemory {
    /// The stack that most of the bytes have; the innermost frame, the first, is that of all. Empty for blocks of which
    /// nothing is known: allocated before recording began, or without a context.
    pub frames: Arc<[Frame]>,
    /// What was asked for, in bytes.
    pub bytes: u64,
    /// The number of blocks.
    pub blocks: u64,
}

impl Snapshot {
    /// Blocks in use, grouped by the innermost frame of where they were allocated, the most bytes first: what leaks stands
    /// out.
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
        let mut stacks: HashMap<&Arc<[Frame]>, (u64, u64)> = HashMap::new();
        for block in self.segments.iter().flat_map(|s| &s.blocks).filter(|b| b.state != BlockState::Inactive) {
            let (bytes, blocks) = stacks.entry(&block.frames).or_default();
            (*bytes, *blocks) = (bytes.saturating_add(block.requested_size), *blocks + 1);
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

    /// Writes the table of [`live_memory`](Snapshot::live_memory), if something is known of it.
    pub(super) fn fmt_live_memory(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sites = self.live_memory();
        if sites.iter().all(|site| site.frames.is_empty()) {
            return Ok(());
        }
        writeln!(f, "in use, by where it was allocated:\n{:>11} {:>8}", "bytes", "blocks")?;
        for LiveMemory { frames, bytes, blocks } in sites.iter().take(SITES) {
            let site = frames.first().map_or("unknown".into(), Frame::to_string);
            writeln!(f, "{:>11} {blocks:>8}  {site}", size(*bytes))?;
            let callers = frames.iter().skip(1).take(CALLERS).fold(String::new(), |mut text, frame| {
                _ = write!(text, " < {frame}"); // writing to a string cannot fail
                text
            });
            if !callers.is_empty() {
                writeln!(f, "{:>20} {callers}", "")?;
            }
        }
        if sites.len() > SITES {
            writeln!(f, "and {} call sites with less", sites.len() - SITES)?;
        }
        Ok(())
    }
}

/// How many call sites the table shows, and how many callers of each.
const SITES: usize = 16;
const CALLERS: usize = 3;

/// `function (file:line)`, as far as they are known.
impl fmt::Display for Frame {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        match (self.filename.as_str(), self.line) {
            ("", _) => Ok(()),
            (file, 0) => write!(f, " ({file})"),
            (file, line) => write!(f, " ({file}:{line})"),
        }
    }
}

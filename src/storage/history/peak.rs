//! Memory in use at the peak of a recorded history, by call site.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::live::{LiveMemory, fmt_sites, format_size, group_by_call_site};
use super::snapshot::{BlockState, Frame, Snapshot, TraceAction, TraceEntry};

/// The most bytes in use at once while a device's history was recorded, and the call sites that allocated them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeakMemory {
    /// The device's number: the index into [`Snapshot::device_traces`].
    pub device: u32,
    /// The number of requested bytes of the blocks in use at the peak.
    pub bytes: u64,
    /// The time from the peak to the last entry of the device's trace.
    pub ago: Duration,
    /// The blocks in use at the peak by call site, the most bytes first, in the form of
    /// [`live_memory`](Snapshot::live_memory). Blocks allocated before the history begins and freed after the peak have
    /// no frames.
    pub sites: Vec<LiveMemory>,
}

impl Snapshot {
    /// Returns the peak of each device whose history was recorded: the memory that a program must reduce to need less.
    ///
    /// ```
    /// use claystone::storage::HistoryOptions;
    /// use claystone::{Device, Tensor};
    /// let device = Device::Cpu;
    /// device.record_memory_history(HistoryOptions::default())?;
    /// drop(Tensor::zeros(&[2 << 20], device)?); // 8 MiB, at the peak and no more
    /// let peaks = device.memory_snapshot()?.peak_memory();
    /// assert!(peaks[0].bytes >= 8 << 20 && peaks[0].sites.iter().any(|site| site.bytes >= 8 << 20));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn peak_memory(&self) -> Vec<PeakMemory> {
        let traces = (0u32..).zip(&self.device_traces).filter(|(_, trace)| !trace.is_empty());
        traces.map(|(device, trace)| self.peak_of(device, trace)).collect()
    }

    /// Computes the peak of one device by replaying its trace.
    fn peak_of(&self, device: u32, trace: &[TraceEntry]) -> PeakMemory {
        // `before` holds blocks allocated before the trace begins and freed in it; earlier blocks still in use at the trace's end
        // are added below.
        let (mut held, mut before) = (HashMap::new(), Vec::new());
        let (mut change, mut most, mut peak) = (0i128, 0i128, 0);
        for (i, entry) in trace.iter().enumerate() {
            match entry.action {
                TraceAction::Alloc => {
                    change += i128::from(entry.size);
                    held.insert(entry.addr, entry.size);
                }
                TraceAction::FreeCompleted => {
                    let freed = held.remove(&entry.addr).unwrap_or_else(|| {
                        before.push((i, entry.size));
                        entry.size
                    });
                    change -= i128::from(freed);
                }
                _ => {}
            }
            if change > most {
                (most, peak) = (change, i + 1);
            }
        }
        let mut at_peak: HashMap<u64, (&Arc<[Frame]>, u64)> = HashMap::new();
        for entry in &trace[..peak] {
            match entry.action {
                TraceAction::Alloc => _ = at_peak.insert(entry.addr, (&entry.frames, entry.size)),
                TraceAction::FreeCompleted => _ = at_peak.remove(&entry.addr),
                _ => {}
            }
        }
        let segments = self.segments.iter().filter(|segment| segment.device == device);
        let blocks = segments.flat_map(|segment| &segment.blocks);
        let untraced = blocks.filter(|b| b.state != BlockState::Inactive && !held.contains_key(&b.address));
        let unknown: Arc<[Frame]> = Arc::default();
        let freed_later = before.iter().filter(|(i, _)| *i >= peak).map(|&(_, bytes)| (&unknown, bytes));
        let untraced = untraced.map(|block| (&block.frames, block.requested_size));
        let sites = group_by_call_site(at_peak.into_values().chain(untraced).chain(freed_later));
        let bytes = sites.iter().fold(0, |sum: u64, site| sum.saturating_add(site.bytes));
        let time = |entry: Option<&TraceEntry>| entry.map_or(0, |entry| entry.time_us);
        let ago = time(trace.last()).saturating_sub(time(trace.get(peak.saturating_sub(1))));
        PeakMemory { device, bytes, ago: Duration::from_micros(ago), sites }
    }

    /// Writes the table of [`peak_memory`](Snapshot::peak_memory), if any frames are known.
    pub(super) fn fmt_peak_memory(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for PeakMemory { device, bytes, ago, sites } in self.peak_memory() {
            let head = format!(
                "at the peak of device {device}'s history, {:.1} s before its end, {} ",
                ago.as_secs_f64(),
                format_size(bytes)
            );
            fmt_sites(f, &head, &sites)?;
        }
        Ok(())
    }
}

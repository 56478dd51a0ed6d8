//! The result of a dry run: how much memory the program needs, and for what.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use serde::{Serialize, Serializer};
use serde_json::json;

use super::super::history::{Frame, HistoryOptions, LiveMemory, Snapshot, fmt_sites};
use super::record::{EventRecorder, Role};
use super::replay::{frame_of_site, min_capacity};
use crate::device::lock;
use crate::error::Size;
use crate::{Device, Result};

/// The memory that a program needs, estimated by a [dry run](super::dry_run()). `Display` prints a report.
#[derive(Debug, Clone, Default, Serialize)]
#[non_exhaustive]
pub struct Estimate {
    /// The devices that the program used, in the order of their first use.
    pub devices: Vec<DeviceEstimate>,
    /// The values that the program read or that sizes depended on, and that a dry run does not compute.
    pub assumed: Vec<Assumption>,
}

/// The memory that a program needs on one device, in bytes.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct DeviceEstimate {
    /// The device for which kernels were planned.
    #[serde(serialize_with = "as_text")]
    pub device: Device,
    /// The peak of the blocks that the program held: `allocated_bytes.peak` of a real run's statistics.
    pub peak_allocated: u64,
    /// The peak of the segments that the allocator held: `reserved_bytes.peak` of a real run's statistics.
    pub peak_reserved: u64,
    /// The peak of the bytes that the program requested.
    pub peak_requested: u64,
    /// The smallest device memory with which the recorded requests are served, to within 0.1 % of the requested peak.
    pub smallest_device: u64,
    /// The memory that the program would have: the given capacity, or a lower limit of the program or of `CLAYSTONE_ALLOC_CONF`.
    pub capacity: Option<u64>,
    /// Whether the recorded requests are served with that memory.
    pub fits: Option<bool>,
    /// The line of the first request that is not served with that memory; `None` if all are, or if the line is unknown.
    pub failed_at: Option<Frame>,
    /// The blocks at the peak of allocated bytes by source line, the most bytes first. Sizes are those of blocks.
    pub sites: Vec<LiveMemory>,
    /// The bytes of blocks at the peak of allocated bytes, by role. Their sum is `peak_allocated` if only one thread allocates.
    #[serde(serialize_with = "as_map")]
    pub roles: [(Role, u64); 5],
    #[serde(skip)]
    recorder: Arc<EventRecorder>,
}

/// A value that a dry run does not compute.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Assumption {
    /// The operation that needed the value: `item`, `to_vec`, `nonzero`, ...
    pub what: &'static str,
    /// The program's line; `None` if unknown.
    pub site: Option<Frame>,
    /// How often the value was needed.
    pub count: u64,
    /// True if the largest possible number was assumed, false if zeros were.
    pub largest: bool,
}

/// The maximum number of events that a snapshot contains: the latest.
const MAX_SNAPSHOT_ENTRIES: usize = 1 << 20;

impl DeviceEstimate {
    fn new(recorder: Arc<EventRecorder>, compares: bool) -> Result<DeviceEstimate> {
        let [peak_allocated, peak_reserved, peak_requested] = recorder.peaks();
        let capacity = compares.then(|| recorder.limit.load(Relaxed));
        let recorded = lock(&recorder.recorded);
        let failure = |capacity| recorded.replay(&*recorder.allocator(Some(capacity))?, || {});
        let smallest = min_capacity(peak_requested, peak_reserved, |capacity| Ok(failure(capacity)?.is_none()))?;
        let failed = capacity.map(failure).transpose()?;
        let (sites, roles) = recorded.at_peak();
        drop(recorded);
        Ok(DeviceEstimate {
            device: recorder.device,
            peak_allocated,
            peak_reserved,
            peak_requested,
            smallest_device: smallest.unwrap_or(u64::MAX),
            capacity,
            fits: failed.map(|failed| failed.is_none()),
            failed_at: failed.flatten().and_then(frame_of_site),
            sites,
            roles,
            recorder,
        })
    }

    /// Returns the memory after the last event, and the history of the latest 2^20 events, for [`Snapshot::save`] and viewers. The
    /// requests are replayed without thread caches, so addresses differ from a real run's.
    ///
    /// # Errors
    /// If the host has no memory for the history.
    pub fn snapshot(&self) -> Result<Snapshot> {
        let (allocator, mut snapshot) = (self.recorder.allocator(None)?, Snapshot::default());
        let recorded = lock(&self.recorder.recorded);
        let entries = (3 * recorded.events.len() + 1000).min(MAX_SNAPSHOT_ENTRIES);
        allocator.record_memory_history(HistoryOptions::default().stacks(false).max_entries(entries))?;
        recorded.replay(&*allocator, || snapshot = allocator.snapshot())?;
        Ok(snapshot)
    }
}

impl Estimate {
    /// Adds a device. `compares` says whether to replay the requests with the memory that the program would have.
    pub(super) fn push(&mut self, recorder: &Arc<EventRecorder>, compares: bool) -> Result<()> {
        self.devices.push(DeviceEstimate::new(Arc::clone(recorder), compares)?);
        for (&(what, site), &(count, largest)) in &lock(&recorder.recorded).assumed {
            self.assumed.push(Assumption { what, site: frame_of_site(site), count, largest });
        }
        Ok(())
    }

    /// Returns the estimate as a JSON object, with the names of the fields. `roles` is an object with the bytes of each role.
    pub fn to_json(&self) -> String {
        json!(self).to_string()
    }
}

fn as_text<S: Serializer>(value: &impl fmt::Display, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}

fn as_map<S: Serializer>(roles: &[(Role, u64)], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map(roles.iter().copied())
}

impl fmt::Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.devices.iter().try_for_each(|device| fmt::Display::fmt(device, f))?;
        for (i, Assumption { what, site, count, largest }) in self.assumed.iter().enumerate() {
            if i == 0 {
                writeln!(f, "values that a dry run does not compute:\n{:>11} {:>8}", "times", "assumed")?;
            }
            let site = site.as_ref().map_or("an unknown line".into(), Frame::to_string);
            writeln!(f, "{count:>11} {:>8}  {what} at {site}", if *largest { "largest" } else { "zeros" })?;
        }
        Ok(())
    }
}

impl fmt::Display for DeviceEstimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [allocated, reserved] = [self.peak_allocated, self.peak_reserved].map(Size);
        writeln!(f, "dry run on {}: peak {allocated:#} allocated, {reserved:#} reserved", self.device)?;
        writeln!(f, "the smallest device has {:#}", Size(self.smallest_device))?;
        match (self.capacity.map(Size), self.fits, &self.failed_at) {
            (Some(capacity), Some(true), _) => writeln!(f, "it fits in {capacity:#}")?,
            (Some(capacity), _, Some(site)) => writeln!(f, "it does not fit in {capacity:#}, which ends at {site}")?,
            (Some(capacity), ..) => writeln!(f, "it does not fit in {capacity:#}")?,
            _ => {}
        }
        writeln!(f, "at the peak, by role:\n{:>11}", "bytes")?;
        for (role, bytes) in self.roles {
            writeln!(f, "{:>11}  {role:?}", Size(bytes).to_string())?;
        }
        fmt_sites(f, "at the peak, ", &self.sites)
    }
}

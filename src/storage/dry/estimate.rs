//! The result of a dry run: how much memory the program needs, and for what.

use std::fmt;
use std::sync::Arc;

use serde_json::{Value, json};

use super::super::history::{Frame, HistoryOptions, LiveMemory, Snapshot, fmt_sites};
use super::Simulation;
use super::record::{Recorded, Role};
use super::replay::{frames_of_site, min_capacity, replay, replay_events};
use crate::error::Size;
use crate::{Device, Result};

/// The memory that a program needs, estimated by a [dry run](super::dry_run()). `Display` prints a report.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Estimate {
    /// The devices that the program used, in the order of their first use.
    pub devices: Vec<DeviceEstimate>,
    /// The values that the program read or that sizes depended on, and that a dry run does not compute.
    pub assumed: Vec<Assumption>,
}

/// The memory that a program needs on one device, in bytes.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DeviceEstimate {
    /// The device for which kernels were planned.
    pub device: Device,
    /// The device's name.
    pub name: String,
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
    /// The bytes of blocks at the peak of allocated bytes, by role. Their sum is `peak_allocated`, unless threads allocate at the
    /// same time.
    pub roles: [(Role, u64); 5],
    source: Arc<Source>,
}

/// A value that a dry run does not compute.
#[derive(Debug, Clone, PartialEq, Eq)]
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

/// The recorded requests, and the device on which they can be replayed.
struct Source {
    simulation: Simulation,
    recorded: Recorded,
}

impl fmt::Debug for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} events", self.recorded.events.len())
    }
}

/// The maximum number of events that a snapshot contains: the latest.
const MAX_SNAPSHOT_ENTRIES: usize = 1 << 20;

impl DeviceEstimate {
    pub(super) fn new(
        simulation: Simulation,
        recorded: Recorded,
        [peak_allocated, peak_reserved, peak_requested]: [u64; 3],
        capacity: Option<u64>,
    ) -> Result<DeviceEstimate> {
        let failure = |capacity| replay(&recorded, &*simulation.allocator(Some(capacity))?);
        let smallest = min_capacity(peak_requested, peak_reserved, |capacity| Ok(failure(capacity)?.is_none()))?;
        let failed = capacity.map(failure).transpose()?;
        let (sites, roles) = recorded.at_peak();
        Ok(DeviceEstimate {
            device: simulation.device,
            name: simulation.name.clone(),
            peak_allocated,
            peak_reserved,
            peak_requested,
            smallest_device: smallest.unwrap_or(u64::MAX),
            capacity,
            fits: failed.map(|failed| failed.is_none()),
            failed_at: failed.flatten().and_then(|site| frames_of_site(site).pop()),
            sites,
            roles,
            source: Arc::new(Source { simulation, recorded }),
        })
    }

    /// Returns the memory after the last event, and the history of the latest 2^20 events, for [`Snapshot::save`] and viewers. The
    /// requests are replayed without thread caches, so addresses differ from a real run's.
    ///
    /// # Errors
    /// If the host has no memory for the history.
    pub fn snapshot(&self) -> Result<Snapshot> {
        let Source { simulation, recorded } = &*self.source;
        let allocator = simulation.allocator(None)?;
        let entries = (3 * recorded.events.len() + 1000).min(MAX_SNAPSHOT_ENTRIES);
        allocator.record_memory_history(HistoryOptions::default().stacks(false).max_entries(entries))?;
        let mut live = Default::default();
        replay_events(recorded, &*allocator, &mut live)?;
        let snapshot = allocator.snapshot();
        live.into_values().for_each(|block| allocator.deallocate(block));
        Ok(snapshot)
    }

    fn to_json(&self) -> Value {
        let roles = self.roles.iter().map(|(role, bytes)| (role.name().to_owned(), json!(bytes)));
        let site = |site: &LiveMemory| json!({ "site": site.frames.first().map(Frame::to_string), "bytes": site.bytes, "blocks": site.blocks });
        json!({
            "device": self.device.to_string(),
            "name": self.name,
            "peak_allocated": self.peak_allocated,
            "peak_reserved": self.peak_reserved,
            "peak_requested": self.peak_requested,
            "smallest_device": self.smallest_device,
            "capacity": self.capacity,
            "fits": self.fits,
            "failed_at": self.failed_at.as_ref().map(Frame::to_string),
            "roles": roles.collect::<serde_json::Map<_, _>>(),
            "sites": self.sites.iter().map(site).collect::<Vec<_>>(),
        })
    }
}

impl Estimate {
    /// Adds a device, and what it assumed.
    pub(super) fn push(&mut self, device: DeviceEstimate) {
        for (&(what, site), &(count, largest)) in &device.source.recorded.assumed {
            let site = frames_of_site(site).pop();
            self.assumed.push(Assumption { what, site, count, largest });
        }
        self.devices.push(device);
    }

    /// Returns the estimate as a JSON object, with the names of the fields. Lines are `file:line`.
    pub fn to_json(&self) -> String {
        let assumed = |a: &Assumption| json!({ "what": a.what, "site": a.site.as_ref().map(Frame::to_string), "count": a.count, "largest": a.largest });
        let devices: Vec<Value> = self.devices.iter().map(DeviceEstimate::to_json).collect();
        json!({ "devices": devices, "assumed": self.assumed.iter().map(assumed).collect::<Vec<_>>() }).to_string()
    }
}

impl fmt::Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for device in &self.devices {
            write!(f, "{device}")?;
        }
        if !self.assumed.is_empty() {
            writeln!(f, "values that a dry run does not compute:\n{:>11} {:>8}", "times", "assumed")?;
        }
        for Assumption { what, site, count, largest } in &self.assumed {
            let site = site.as_ref().map_or("an unknown line".into(), Frame::to_string);
            writeln!(f, "{count:>11} {:>8}  {what} at {site}", if *largest { "largest" } else { "zeros" })?;
        }
        Ok(())
    }
}

impl fmt::Display for DeviceEstimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "dry run on {} ({}), no memory was used", self.device, self.name.trim())?;
        let rows = [
            ("peak allocated", self.peak_allocated),
            ("peak reserved", self.peak_reserved),
            ("peak requested", self.peak_requested),
            ("smallest device", self.smallest_device),
        ];
        for (name, bytes) in rows {
            writeln!(f, "{name:>16}  {:#}", Size(bytes))?;
        }
        if let (Some(capacity), Some(fits)) = (self.capacity, self.fits) {
            let verb = if fits { "fits" } else { "does not fit" };
            write!(f, "{verb} in {:#}", Size(capacity))?;
            match &self.failed_at {
                Some(site) => writeln!(f, ": memory runs out at {site}")?,
                None => writeln!(f)?,
            }
        }
        writeln!(f, "at the peak, by role:\n{:>11} {:>8}", "bytes", "share")?;
        for (role, bytes) in self.roles {
            let share = 100.0 * bytes as f64 / self.peak_allocated.max(1) as f64;
            writeln!(f, "{:>11} {share:>6.1} %  {}", Size(bytes).to_string(), role.name().replace('_', " "))?;
        }
        fmt_sites(f, "at the peak, ", &self.sites)
    }
}

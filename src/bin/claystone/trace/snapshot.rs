//! Memory snapshots with history, as PyTorch's `torch.cuda.memory._snapshot()` pickles them and claystone writes them.
//!
//! A snapshot has the last events of each device and the segments as they are at the end. Blocks that were live before
//! the first event are not among the events: they are those that are freed without having been allocated, and those
//! that are live in the segments without an event. They are allocated first.

use std::collections::HashSet;

use serde::Deserialize;

use super::{Builder, Fault, Trace};

/// The first byte of a pickle of protocol 2 or later.
pub(super) const PICKLE: u8 = 0x80;

#[derive(Deserialize)]
struct Snapshot {
    #[serde(default)]
    segments: Vec<Segment>,
    /// A list of events for each device.
    #[serde(default)]
    device_traces: Vec<Vec<Entry>>,
}

#[derive(Deserialize)]
struct Segment {
    #[serde(default)]
    device: usize,
    address: u64,
    #[serde(default)]
    stream: i64,
    blocks: Vec<Block>,
}

#[derive(Deserialize)]
struct Block {
    size: usize,
    /// Absent in snapshots of older versions, as is the address.
    requested_size: Option<usize>,
    address: Option<u64>,
    state: String,
}

#[derive(Deserialize)]
struct Entry {
    action: String,
    /// Absent where the action is `oom`.
    #[serde(default)]
    addr: u64,
    #[serde(default)]
    size: usize,
    #[serde(default)]
    stream: i64,
}

pub(super) fn read_pickle(bytes: &[u8], name: &str) -> Result<Vec<Trace>, Fault> {
    // Objects of classes that only Python knows are no part of what is read.
    let options = serde_pickle::DeOptions::new().decode_strings().replace_unresolved_globals();
    let snapshot = serde_pickle::from_slice(bytes, options);
    let snapshot: Snapshot = snapshot.map_err(|error| format!("not a pickled memory snapshot: {error}"))?;
    snapshot.traces(name)
}

pub(super) fn read_json(text: &str, name: &str) -> Result<Vec<Trace>, Fault> {
    let snapshot: Snapshot = serde_json::from_str(text)
        .map_err(|error| Fault::at(error.line(), format!("not a memory snapshot in JSON: {error}")))?;
    snapshot.traces(name)
}

impl Snapshot {
    /// One trace a device with events, or where none has any, with live blocks.
    fn traces(&self, name: &str) -> Result<Vec<Trace>, Fault> {
        let mut devices: Vec<usize> = (0..self.device_traces.len()).collect();
        devices.retain(|&device| !self.device_traces[device].is_empty());
        if devices.is_empty() {
            devices = self.segments.iter().map(|segment| segment.device).collect();
            devices.sort_unstable();
            devices.dedup();
        }
        if devices.is_empty() {
            return Err(Fault::from("the snapshot has neither events nor segments".to_owned()));
        }
        let one = devices.len() == 1;
        let name = |device| if one { name.to_owned() } else { format!("{name} (device {device})") };
        devices.iter().map(|&device| self.trace(device, &name(device))).collect()
    }

    fn trace(&self, device: usize, name: &str) -> Result<Trace, Fault> {
        let events = self.device_traces.get(device).map_or(&[][..], Vec::as_slice);
        let steps = steps(events);
        let mut trace = Builder::default();
        for before in self.alive_before(device, &steps) {
            trace.allocate(before.address, before.bytes, &before.stream.to_string(), Hex(before.address))?;
        }
        for step in steps {
            let place = |what| Fault::from(format!("device_traces[{device}][{}]: {what}", step.index));
            let Of { address, bytes, stream } = step.of;
            match step.frees {
                false => trace.allocate(address, bytes, &stream.to_string(), Hex(address)).map_err(place)?,
                true => trace.free(address, Hex(address)).map_err(place)?,
            }
        }
        Ok(trace.finish(name)?)
    }

    /// The blocks that were live before the first step, each once.
    fn alive_before(&self, device: usize, steps: &[Step]) -> Vec<Of> {
        let (mut allocated, mut before) = (HashSet::new(), Vec::new());
        // Addresses whose first step has been seen: only that one can tell of the time before.
        let mut met = HashSet::new();
        for step in steps {
            if step.frees {
                if met.insert(step.of.address) {
                    before.push(step.of);
                }
                allocated.remove(&step.of.address);
            } else {
                met.insert(step.of.address);
                allocated.insert(step.of.address);
            }
        }
        for segment in self.segments.iter().filter(|segment| segment.device == device) {
            let mut next = segment.address;
            for block in &segment.blocks {
                let address = block.address.unwrap_or(next);
                next = address.saturating_add(block.size as u64);
                if block.state == "active_allocated" && !allocated.contains(&address) && met.insert(address) {
                    let bytes = block.requested_size.unwrap_or(block.size);
                    before.push(Of { address, bytes, stream: segment.stream });
                }
            }
        }
        before
    }
}

/// What the program did, leaving out what the allocator did.
struct Step {
    /// In the list of events.
    index: usize,
    frees: bool,
    of: Of,
}

#[derive(Clone, Copy)]
struct Of {
    address: u64,
    bytes: usize,
    stream: i64,
}

/// A block is freed when its owner asks (`free_requested`). The completion that follows, at once or when other streams
/// are done, is a step only where the request is not in the list and the block was live in it.
fn steps(events: &[Entry]) -> Vec<Step> {
    let mut requested = HashSet::new();
    let mut steps = Vec::new();
    for (index, entry) in events.iter().enumerate() {
        let frees = match entry.action.as_str() {
            "alloc" => false,
            "free_requested" => true,
            "free_completed" if !requested.remove(&entry.addr) => true,
            _ => continue,
        };
        if entry.action == "free_requested" {
            requested.insert(entry.addr);
        }
        let of = Of { address: entry.addr, bytes: entry.size, stream: entry.stream };
        steps.push(Step { index, frees, of });
    }
    steps
}

/// An address as errors show it.
struct Hex(u64);

impl std::fmt::Display for Hex {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "block {:#x}", self.0)
    }
}

//! Memory snapshots with history, as PyTorch's `torch.cuda.memory._snapshot()` and claystone's `Snapshot` have them.
//!
//! A snapshot has the last events of each device and the segments as they are at the end. Blocks that were live before
//! the first event are not allocated by any: they are those that are freed without, and those that are live in the
//! segments without. They are allocated first.

use std::collections::{HashMap, HashSet};

use claystone::storage::{BlockState, SegmentInfo, Snapshot, TraceAction, TraceEntry};

use super::{Builder, Fault, Hex, Trace};

/// One trace a device with events, or where none has any, with live blocks.
pub(super) fn read(snapshot: &Snapshot, name: &str) -> Result<Vec<Trace>, Fault> {
    let mut devices: Vec<u32> =
        (0..).zip(&snapshot.device_traces).filter(|(_, t)| !t.is_empty()).map(|(d, _)| d).collect();
    if devices.is_empty() {
        devices = snapshot.segments.iter().map(|segment| segment.device).collect();
        devices.sort_unstable();
        devices.dedup();
    }
    if devices.is_empty() {
        return Err(Fault::from("the snapshot has neither events nor segments".to_owned()));
    }
    let mut segments: HashMap<u32, Vec<&SegmentInfo>> = HashMap::new();
    for segment in &snapshot.segments {
        segments.entry(segment.device).or_default().push(segment);
    }
    let segments = |device| segments.get(&device).map_or(&[][..], Vec::as_slice);
    let one = devices.len() == 1;
    let name = |device| if one { name.to_owned() } else { format!("{name} (device {device})") };
    devices.iter().map(|&device| trace(snapshot, segments(device), device, name(device))).collect()
}

fn trace(snapshot: &Snapshot, segments: &[&SegmentInfo], device: u32, name: String) -> Result<Trace, Fault> {
    let steps = steps(snapshot.device_traces.get(device as usize).map_or(&[][..], Vec::as_slice));
    let mut trace = Builder::default();
    for Of { address, bytes, stream } in alive_before(segments, &steps) {
        trace.allocate(address, bytes, stream, Hex(address))?;
    }
    for Step { index, frees, of: Of { address, bytes, stream } } in steps {
        let done = match frees {
            false => trace.allocate(address, bytes, stream, Hex(address)),
            true => trace.free(address, Hex(address)),
        };
        done.map_err(|what| Fault::from(format!("device_traces[{device}][{index}]: {what}")))?;
    }
    Ok(trace.finish(&name)?)
}

/// The blocks that were live before the first step, each once.
fn alive_before(segments: &[&SegmentInfo], steps: &[Step]) -> Vec<Of> {
    let mut before = Vec::new();
    let mut met = HashSet::new(); // only the first step of an address can tell of the time before
    for step in steps {
        if met.insert(step.of.address) && step.frees {
            before.push(step.of);
        }
    }
    for segment in segments {
        for block in segment.blocks.iter().filter(|block| block.state == BlockState::ActiveAllocated) {
            if met.insert(block.address) {
                before.push(Of { address: block.address, bytes: block.requested_size, stream: segment.stream });
            }
        }
    }
    before
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
    bytes: u64,
    stream: u64,
}

/// A block is freed when its owner asks (`free_requested`). The completion that follows, at once or when other streams
/// are done, is a step only where the request came before the first event.
fn steps(events: &[TraceEntry]) -> Vec<Step> {
    let mut requested = HashSet::new();
    let mut steps = Vec::new();
    for (index, entry) in events.iter().enumerate() {
        let frees = match entry.action {
            TraceAction::Alloc => false,
            TraceAction::FreeRequested => {
                requested.insert(entry.addr);
                true
            }
            TraceAction::FreeCompleted if !requested.remove(&entry.addr) => true,
            _ => continue,
        };
        steps.push(Step { index, frees, of: Of { address: entry.addr, bytes: entry.size, stream: entry.stream } });
    }
    steps
}

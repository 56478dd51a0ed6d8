//! Memory snapshots with history, in the format of PyTorch's `torch.cuda.memory._snapshot()` and claystone's `Snapshot`.
//!
//! A snapshot has each device's latest events, and its segments at the time of the snapshot. A block that was live before the first
//! event has no allocation event, but an event that frees it, or an entry in a segment. The trace begins by allocating such blocks.

use std::collections::{HashMap, HashSet};

use claystone::storage::{BlockState, SegmentInfo, Snapshot, TraceAction, TraceEntry};

use super::{BlockAddress, Builder, Trace, TraceError};

/// Returns one trace for each device with events, or, if there are no events, for each device with segments.
pub(super) fn read(snapshot: &Snapshot, name: &str) -> Result<Vec<Trace>, TraceError> {
    let mut devices: Vec<u32> =
        (0..).zip(&snapshot.device_traces).filter(|(_, t)| !t.is_empty()).map(|(d, _)| d).collect();
    if devices.is_empty() {
        devices = snapshot.segments.iter().map(|segment| segment.device).collect();
        devices.sort_unstable();
        devices.dedup();
    }
    if devices.is_empty() {
        return Err(TraceError::from("the snapshot has neither events nor segments".to_owned()));
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

/// Converts the history of one device; blocks that are older than the history are allocated first.
fn trace(snapshot: &Snapshot, segments: &[&SegmentInfo], device: u32, name: String) -> Result<Trace, TraceError> {
    let steps = request_steps(snapshot.device_traces.get(device as usize).map_or(&[][..], Vec::as_slice));
    let mut trace = Builder::default();
    for BlockRequest { address, bytes, stream } in live_before_history(segments, &steps) {
        trace.allocate(address, bytes, stream, BlockAddress(address))?;
    }
    for Step { index, frees, request: BlockRequest { address, bytes, stream } } in steps {
        let done = match frees {
            false => trace.allocate(address, bytes, stream, BlockAddress(address)),
            true => trace.free(address, BlockAddress(address)),
        };
        done.map_err(|what| TraceError::from(format!("device_traces[{device}][{index}]: {what}")))?;
    }
    Ok(trace.finish(&name)?)
}

/// Returns the blocks that were live before the first step, each once.
fn live_before_history(segments: &[&SegmentInfo], steps: &[Step]) -> Vec<BlockRequest> {
    let mut before = Vec::new();
    let mut seen = HashSet::new(); // after an address's first step, the block there is not older than the history
    for step in steps {
        if seen.insert(step.request.address) && step.frees {
            before.push(step.request);
        }
    }
    for segment in segments {
        for block in segment.blocks.iter().filter(|block| block.state == BlockState::ActiveAllocated) {
            if seen.insert(block.address) {
                before.push(BlockRequest {
                    address: block.address,
                    bytes: block.requested_size,
                    stream: segment.stream,
                });
            }
        }
    }
    before
}

/// A request of the program, as opposed to an action of the allocator.
struct Step {
    index: usize,
    frees: bool,
    request: BlockRequest,
}

/// The block that a request allocates or frees.
#[derive(Clone, Copy)]
struct BlockRequest {
    address: u64,
    bytes: u64,
    stream: u64,
}

/// Extracts the requests. A block is freed when its owner asks (`free_requested`). The later `free_completed` event, after other
/// streams are done, only counts if the request came before the first event.
fn request_steps(events: &[TraceEntry]) -> Vec<Step> {
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
        steps.push(Step {
            index,
            frees,
            request: BlockRequest { address: entry.addr, bytes: entry.size, stream: entry.stream },
        });
    }
    steps
}

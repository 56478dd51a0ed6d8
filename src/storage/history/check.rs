//! A consistency check of snapshots, for the assumptions of PyTorch's viewers.

use std::collections::BTreeMap;

use super::snapshot::{BlockInfo, BlockState, SegmentInfo, Snapshot, TraceAction, TraceEntry};
use crate::{Error, Result};

/// The largest address: JavaScript's numbers are exact up to this integer.
const MAX_ADDRESS: u64 = 1 << 53;

impl Snapshot {
    /// Checks every assumption of PyTorch's viewers. Blocks tile their segments, segments do not overlap, and JavaScript can
    /// represent the addresses. Undoing the trace from its last entry to its first, as the viewer does, must find every block and
    /// segment that an entry refers to. A trace that lost its first entries is consistent too.
    ///
    /// # Errors
    /// A sentence that describes the first inconsistency.
    pub fn check(&self) -> Result<()> {
        self.find_fault().map_err(|reason| Error::invalid("snapshot", reason))
    }

    fn find_fault(&self) -> Result<(), String> {
        let mut devices: BTreeMap<u32, Memory> = BTreeMap::new();
        for segment in &self.segments {
            check_blocks(segment)?;
            devices.entry(segment.device).or_default().add(segment)?;
        }
        for (device, trace) in (0..).zip(&self.device_traces) {
            let memory = devices.entry(device).or_default();
            for (index, entry) in trace.iter().enumerate().rev() {
                memory.undo(entry).map_err(|fault| {
                    let TraceEntry { action, addr, size, .. } = entry;
                    format!("device {device}, entry {index} ({action:?} of {size} bytes at {addr:#x}): {fault}")
                })?;
            }
        }
        Ok(())
    }
}

fn check_blocks(segment: &SegmentInfo) -> Result<(), String> {
    let SegmentInfo { address: start, total_size, .. } = *segment;
    let fault = |what: String| Err(format!("segment at {start:#x} of {total_size} bytes: {what}"));
    if total_size == 0 {
        return fault("it is empty".into());
    }
    if start.checked_add(total_size).is_none_or(|end| end > MAX_ADDRESS) {
        return fault("it ends past 2^53, where JavaScript's numbers are not exact".into());
    }
    let mut end = start;
    for (index, &BlockInfo { address, size, requested_size, state, .. }) in segment.blocks.iter().enumerate() {
        if address != end {
            return fault(format!("block {index} begins at {address:#x} and not where the one before ends, {end:#x}"));
        }
        if size == 0 {
            return fault(format!("block {index} is empty"));
        }
        if state != BlockState::Inactive && requested_size > size {
            return fault(format!("block {index} has {size} bytes, fewer than the {requested_size} requested"));
        }
        end = end.saturating_add(size);
    }
    if end != start + total_size {
        return fault(format!("its blocks end at {end:#x}, not at {:#x}", start + total_size));
    }
    Ok(())
}

/// The live segments and blocks of a device at one moment, by address.
#[derive(Default)]
struct Memory {
    segments: BTreeMap<u64, Segment>,
    blocks: BTreeMap<u64, Block>,
}

/// A live segment, or a run of adjacent committed pages of a reservation.
#[derive(Clone, Copy)]
struct Segment {
    size: u64,
    stream: u64,
}

struct Block {
    /// The number of bytes the block is known to cover: only the requested bytes if the block is known from a free in the trace.
    size: u64,
    requested: u64,
    pending: bool,
}

impl Memory {
    fn add(&mut self, segment: &SegmentInfo) -> Result<(), String> {
        let SegmentInfo { address, total_size: size, stream, .. } = *segment;
        self.add_segment(address, Segment { size, stream }).map_err(|e| format!("segment at {address:#x}: {e}"))?;
        for block in segment.blocks.iter().filter(|b| b.state != BlockState::Inactive) {
            let pending = block.state == BlockState::ActivePendingFree;
            self.blocks.insert(block.address, Block { size: block.size, requested: block.requested_size, pending });
        }
        Ok(())
    }

    /// Changes the state after `entry` into the state before `entry`.
    fn undo(&mut self, entry: &TraceEntry) -> Result<(), String> {
        let TraceEntry { addr, size, stream, .. } = *entry;
        if !matches!(entry.action, TraceAction::Snapshot | TraceAction::Oom | TraceAction::Other)
            && (size == 0 || addr.checked_add(size).is_none_or(|end| end > MAX_ADDRESS))
        {
            return Err("it is empty, or ends past 2^53".into());
        }
        match entry.action {
            TraceAction::Alloc => match self.blocks.remove(&addr) {
                None => Err("no such block is live after it".into()),
                Some(Block { pending: true, .. }) => {
                    Err("the block is pending at the end, but no later entry frees it".into())
                }
                Some(block) => same_size(block.requested, size),
            },
            TraceAction::FreeRequested => match self.blocks.get_mut(&addr) {
                None => Err("the block is neither pending at the end nor freed after it".into()),
                Some(Block { pending: false, .. }) => Err("the block is in use after it".into()),
                Some(block) => {
                    block.pending = false;
                    same_size(block.requested, size)
                }
            },
            TraceAction::FreeCompleted => self.add_block(addr, Block { size, requested: size, pending: true }),
            TraceAction::SegmentAlloc => match self.segments.remove(&addr) {
                None => Err("no such segment is live after it".into()),
                Some(segment) => same_size(segment.size, size).and_then(|()| self.no_block_in(addr, size)),
            },
            TraceAction::SegmentFree => self.add_segment(addr, Segment { size, stream }),
            TraceAction::SegmentMap => self.take_pages(addr, size),
            TraceAction::SegmentUnmap => self.add_segment(addr, Segment { size, stream }).map(|()| self.merge(addr)),
            TraceAction::Snapshot | TraceAction::Oom | TraceAction::Other => Ok(()),
        }
    }

    fn add_block(&mut self, start: u64, block: Block) -> Result<(), String> {
        self.no_block_in(start, block.size)?;
        match self.segment_around(start, block.size) {
            None => Err("no segment is live around the block".into()),
            Some(_) => {
                self.blocks.insert(start, block);
                Ok(())
            }
        }
    }

    fn add_segment(&mut self, start: u64, segment: Segment) -> Result<(), String> {
        if let Some((other, _)) = last_before(&self.segments, start + segment.size).filter(|(s, g)| s + g.size > start)
        {
            return Err(format!("it overlaps the segment at {other:#x}"));
        }
        self.segments.insert(start, segment);
        Ok(())
    }

    /// Joins the pages at `start` to adjacent pages of the same stream.
    fn merge(&mut self, start: u64) {
        let Segment { mut size, stream } = self.segments[&start];
        if let Some(next) = self.segments.get(&(start + size)).copied().filter(|n| n.stream == stream) {
            self.segments.remove(&(start + size));
            size += next.size;
        }
        self.segments.insert(start, Segment { size, stream });
        let before = self.segments.range_mut(..start).next_back();
        if let Some((_, previous)) = before.filter(|(s, g)| **s + g.size == start && g.stream == stream) {
            previous.size += size;
            self.segments.remove(&start);
        }
    }

    /// Removes pages from the segment that contains them, which may leave two segments.
    fn take_pages(&mut self, start: u64, size: u64) -> Result<(), String> {
        let (first, around) = self.segment_around(start, size).ok_or("no segment is live around the pages after it")?;
        self.segments.remove(&first);
        let mut rest = |from: u64, to: u64| {
            if from < to {
                self.segments.insert(from, Segment { size: to - from, ..around });
            }
        };
        rest(first, start);
        rest(start + size, first + around.size);
        self.no_block_in(start, size)
    }

    fn segment_around(&self, start: u64, size: u64) -> Option<(u64, Segment)> {
        last_before(&self.segments, start + 1).filter(|(s, g)| start + size <= s + g.size).map(|(s, g)| (s, *g))
    }

    fn no_block_in(&self, start: u64, size: u64) -> Result<(), String> {
        match last_before(&self.blocks, start + size).filter(|(s, b)| s + b.size > start) {
            Some((block, _)) => Err(format!("the block at {block:#x} is live there")),
            None => Ok(()),
        }
    }
}

fn same_size(is: u64, said: u64) -> Result<(), String> {
    if is == said { Ok(()) } else { Err(format!("it has {is} bytes")) }
}

/// Returns the entry with the largest key below `bound`.
fn last_before<T>(map: &BTreeMap<u64, T>, bound: u64) -> Option<(u64, &T)> {
    map.range(..bound).next_back().map(|(&start, value)| (start, value))
}

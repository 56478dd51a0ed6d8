//! A snapshot in figures and in text.

use std::collections::BTreeMap;
use std::fmt;

use super::snapshot::{BlockState, SegmentInfo, SegmentType, Snapshot};
use crate::error::Size;

/// How badly a snapshot's free memory is cut up: of all segments, and of those of each type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fragmentation {
    /// Of all segments.
    pub all: FreeSpace,
    /// Of the segments for requests of up to 1 MiB.
    pub small_pool: FreeSpace,
    /// Of the other segments.
    pub large_pool: FreeSpace,
}

/// The free memory of some segments. In bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FreeSpace {
    /// The sizes of the segments.
    pub reserved: u64,
    /// What was asked for, of the blocks in use and those waiting for a stream.
    pub requested: u64,
    /// The sizes of the free blocks.
    pub total_free: u64,
    /// The size of the largest free block.
    pub largest_free: u64,
}

impl FreeSpace {
    /// External fragmentation: 1 - largest_free / total_free. 0 when all that is free is one block, or nothing is.
    pub fn index(&self) -> f64 {
        if self.total_free == 0 { 0.0 } else { 1.0 - self.largest_free as f64 / self.total_free as f64 }
    }

    /// requested / reserved; 1 when nothing is reserved.
    pub fn utilisation(&self) -> f64 {
        if self.reserved == 0 { 1.0 } else { self.requested as f64 / self.reserved as f64 }
    }

    fn add(&mut self, segment: &SegmentInfo) {
        self.reserved = self.reserved.saturating_add(segment.total_size);
        self.requested = self.requested.saturating_add(segment.requested_size());
        for block in segment.blocks.iter().filter(|b| b.state == BlockState::Inactive) {
            self.total_free = self.total_free.saturating_add(block.size);
            self.largest_free = self.largest_free.max(block.size);
        }
    }
}

impl Snapshot {
    /// How badly the free memory is cut up.
    pub fn fragmentation(&self) -> Fragmentation {
        let mut sums = Fragmentation::default();
        for segment in &self.segments {
            sums.all.add(segment);
            match segment.segment_type {
                SegmentType::Small => sums.small_pool.add(segment),
                SegmentType::Large => sums.large_pool.add(segment),
            }
        }
        sums
    }
}

/// How many segments the summary draws, and in how many characters.
const DRAWN: usize = 16;
const WIDTH: u64 = 64;

/// A table with a line for each pool and stream, a map of the largest segments, `#` in use, `+` partly, `.` free, and what
/// is in use by where it was allocated.
impl fmt::Display for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut pools: BTreeMap<_, (usize, FreeSpace)> = BTreeMap::new();
        for s in &self.segments {
            let (count, sums) = pools.entry((s.device, s.segment_pool_id, s.segment_type, s.stream)).or_default();
            *count += 1;
            sums.add(s);
        }
        writeln!(
            f,
            "{:>6} {:>7} {:>6} {:>6} {:>8} {:>11} {:>11} {:>11} {:>11} {:>6} {:>6}",
            "device", "pool", "type", "stream", "segments", "reserved", "requested", "free", "largest", "used", "frag"
        )?;
        let row = |f: &mut fmt::Formatter<'_>, names: [String; 4], count: usize, sums: &FreeSpace| {
            let [device, pool, kind, stream] = names;
            write!(f, "{device:>6} {pool:>7} {kind:>6} {stream:>6} {count:>8}")?;
            for bytes in [sums.reserved, sums.requested, sums.total_free, sums.largest_free] {
                write!(f, " {:>11}", size(bytes))?;
            }
            writeln!(f, " {:>5.1}% {:>5.1}%", 100.0 * sums.utilisation(), 100.0 * sums.index())
        };
        for ((device, pool, kind, stream), (count, sums)) in &pools {
            let names = [device.to_string(), format!("{}.{}", pool.0, pool.1), word(*kind).into(), stream.to_string()];
            row(f, names, *count, sums)?;
        }
        let all = ["all".into(), String::new(), String::new(), String::new()];
        row(f, all, self.segments.len(), &self.fragmentation().all)?;

        let mut largest: Vec<&SegmentInfo> = self.segments.iter().collect();
        largest.sort_by_key(|s| (std::cmp::Reverse((s.total_size, s.active_size())), s.device, s.address));
        for s in largest.iter().take(DRAWN) {
            writeln!(
                f,
                "[{}] {} at {:#x} on device {}, {} in use",
                map(s),
                size(s.total_size),
                s.address,
                s.device,
                size(s.active_size())
            )?;
        }
        if largest.len() > DRAWN {
            writeln!(f, "and {} smaller segments", largest.len() - DRAWN)?;
        }
        self.fmt_live_memory(f)?;
        self.fmt_live_blocks(f)?;
        self.fmt_peak_memory(f)?;
        for (device, trace) in self.device_traces.iter().enumerate().filter(|(_, t)| !t.is_empty()) {
            writeln!(f, "{} events recorded on device {device}", trace.len())?;
        }
        Ok(())
    }
}

fn word(kind: SegmentType) -> &'static str {
    match kind {
        SegmentType::Small => "small",
        SegmentType::Large => "large",
    }
}

/// The segment as a row of characters, each for an equal share of its bytes.
fn map(segment: &SegmentInfo) -> String {
    let cells = WIDTH.min(segment.total_size);
    // In u128: bytes times cells of a made-up segment may pass 2^64.
    let bound = |cell: u64| (segment.total_size as u128 * cell as u128 / cells as u128) as u64;
    let mut used = vec![0; cells as usize];
    for block in segment.blocks.iter().filter(|b| b.state != BlockState::Inactive) {
        let start = block.address.saturating_sub(segment.address);
        let end = start.saturating_add(block.size);
        for (cell, used) in (0..).zip(&mut used) {
            *used = u64::saturating_add(*used, end.min(bound(cell + 1)).saturating_sub(start.max(bound(cell))));
        }
    }
    let draw = |(cell, used): (u64, &u64)| match *used {
        0 => '.',
        used if used == bound(cell + 1) - bound(cell) => '#',
        _ => '+',
    };
    (0..).zip(&used).map(draw).collect()
}

/// A size, with a short unit.
pub(super) fn size(bytes: u64) -> String {
    if bytes < 1024 { format!("{bytes} B") } else { Size(bytes).to_string() }
}

//! The fragmentation of a snapshot, and its printed form.

use std::collections::BTreeMap;
use std::fmt;

use super::live::{fmt_sites, format_size};
use super::setting::Setting;
use super::snapshot::{BlockState, EVENTS_READ, SegmentInfo, SegmentType, Snapshot};

/// Fragmentation of a snapshot's free memory, for all segments and for the segments of each type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fragmentation {
    /// All segments.
    pub all: FreeSpace,
    /// Segments for requests of up to 1 MiB.
    pub small_pool: FreeSpace,
    /// Segments for requests of more than 1 MiB.
    pub large_pool: FreeSpace,
}

/// The free memory of a set of segments, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FreeSpace {
    /// The total size of the segments.
    pub reserved: u64,
    /// The requested sizes of the blocks in use, and of freed blocks that a stream may still use.
    pub requested: u64,
    /// The total size of the free blocks.
    pub total_free: u64,
    /// The size of the largest free block.
    pub largest_free: u64,
}

impl FreeSpace {
    /// Returns the external fragmentation: 1 - largest_free / total_free. 0 if the free memory is one block, or none is free.
    pub fn index(&self) -> f64 {
        if self.total_free == 0 { 0.0 } else { 1.0 - self.largest_free as f64 / self.total_free as f64 }
    }

    /// Returns requested / reserved; 1 if nothing is reserved.
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
    /// Returns the fragmentation of the free memory.
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

/// Maximum number of segments that are drawn as a map.
const MAX_DRAWN_SEGMENTS: usize = 16;
/// Number of characters in the map of a segment.
const MAP_WIDTH_CHARS: u64 = 64;

/// Prints a table with a line per pool and stream, a map of the largest segments (`#` in use, `+` partly in use, `.`
/// free), and the memory in use by call site.
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
                write!(f, " {:>11}", format_size(bytes))?;
            }
            writeln!(f, " {:>5.1}% {:>5.1}%", 100.0 * sums.utilisation(), 100.0 * sums.index())
        };
        for ((device, pool, kind, stream), (count, sums)) in &pools {
            let names = [device.to_string(), format!("{}.{}", pool.0, pool.1), kind.name().into(), stream.to_string()];
            row(f, names, *count, sums)?;
        }
        let all = ["all".into(), String::new(), String::new(), String::new()];
        row(f, all, self.segments.len(), &self.fragmentation().all)?;

        let mut largest: Vec<&SegmentInfo> = self.segments.iter().collect();
        largest.sort_by_key(|s| (std::cmp::Reverse((s.total_size, s.active_size())), s.device, s.address));
        for s in largest.iter().take(MAX_DRAWN_SEGMENTS) {
            writeln!(
                f,
                "[{}] {} at {:#x} on device {}, {} in use",
                draw_segment(s),
                format_size(s.total_size),
                s.address,
                s.device,
                format_size(s.active_size())
            )?;
        }
        if largest.len() > MAX_DRAWN_SEGMENTS {
            writeln!(f, "and {} smaller segments", largest.len() - MAX_DRAWN_SEGMENTS)?;
        }
        fmt_sites(f, "", &self.live_memory())?;
        self.fmt_live_blocks(f)?;
        self.fmt_peak_memory(f)?;
        let read = match self.allocator_settings.get(EVENTS_READ) {
            Some(Setting::List(read)) => Some(read),
            _ => None,
        };
        for (device, trace) in self.device_traces.iter().enumerate().filter(|(_, t)| !t.is_empty()) {
            match read.map(|read| read.get(device)) {
                Some(Some(Setting::Int(events))) => {
                    writeln!(f, "{} of {events} events of device {device} kept", trace.len().saturating_sub(2))?
                }
                _ => writeln!(f, "{} events recorded on device {device}", trace.len())?,
            }
        }
        Ok(())
    }
}

/// Draws the segment as a row of characters, each for an equal part of its bytes.
fn draw_segment(segment: &SegmentInfo) -> String {
    let cells = MAP_WIDTH_CHARS.min(segment.total_size);
    // Computed in u128, because the size in a damaged file times the number of cells may exceed 2^64.
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

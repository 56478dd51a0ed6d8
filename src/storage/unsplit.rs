//! Records of the segments of an allocator that never splits a segment, and the creation of such segments.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::allocator::check_fraction;
use super::caching::SizeKind;
use super::config::Config;
use super::counters::Counters;
use super::driver::{Driver, Failure, ImageDesc};
use super::history::{
    BlockInfo, BlockState, Context, History, HistoryOptions, Recording, SegmentInfo, SegmentType, SegmentWithContexts,
    Snapshot, TraceAction, device_number,
};
use super::segment::Segment;
use crate::device::StreamId;
use crate::error::Size;
use crate::{Device, Error, Result};

/// The segments, the statistics and the limits of an allocator, guarded by the allocator's lock.
pub(super) struct SegmentLedger {
    device: Device,
    capacity: u64,
    pub(super) stats: Counters,
    /// Limits on the total bytes of segments: the limit set in bytes, and the limit set as a fraction of the capacity, in bytes.
    limit_bytes: u64,
    fraction_bytes: u64,
    /// Number of bytes of segments that are being created, which happens without the lock.
    bytes_in_creation: u64,
    config: Config,
    history: History,
    segments: BTreeMap<u64, LedgerSegment>,
}

/// A segment as snapshots report it: one block.
struct LedgerSegment {
    size: usize,
    stream: StreamId,
    context: Context,
    /// The requested bytes, the stream and the context of the allocation that has the segment; `None` if the segment is unused.
    taken: Option<(usize, StreamId, Context)>,
}

impl SegmentLedger {
    pub(super) fn new(driver: &dyn Driver, config: &Config) -> SegmentLedger {
        let (device, capacity) = (driver.device(), driver.capacity());
        let mut stats = Counters::default();
        stats.max_split_size = config.max_split_size as u64;
        SegmentLedger {
            device,
            capacity,
            stats,
            limit_bytes: config.limit(capacity),
            fraction_bytes: capacity,
            bytes_in_creation: 0,
            config: config.clone(),
            history: History::new(),
            segments: BTreeMap::new(),
        }
    }

    pub(super) fn limit(&self) -> u64 {
        self.limit_bytes.min(self.fraction_bytes)
    }

    pub(super) fn set_limit(&mut self, bytes: u64) {
        self.limit_bytes = bytes.min(self.capacity);
    }

    pub(super) fn set_fraction(&mut self, fraction: f64) -> Result<()> {
        self.fraction_bytes = (self.capacity as f64 * check_fraction(fraction)?) as u64;
        Ok(())
    }

    /// Counts the bytes of a new segment towards the limit, given that other pools hold `elsewhere` bytes. Returns the reason if
    /// the limit would be exceeded.
    pub(super) fn reserve_room(&mut self, size: usize, elsewhere: u64) -> Option<String> {
        let held = self.stats.reserved() + self.bytes_in_creation;
        if held.saturating_add(elsewhere).saturating_add(size as u64) > self.limit() {
            let others = if elsewhere > 0 {
                format!(" beside {:#} in buffers or images that are counted elsewhere", Size(elsewhere))
            } else {
                String::new()
            };
            return Some(format!("there is no room for it{others}"));
        }
        self.bytes_in_creation += size as u64;
        None
    }

    /// Records that the segment was created for `stream`, or that creating it failed.
    pub(super) fn finish_creation(&mut self, size: usize, stream: StreamId, made: Option<&Segment>) {
        self.bytes_in_creation -= size as u64;
        if let Some(segment) = made {
            self.stats.record_segment_alloc(SizeKind::of_size(size), size);
            let context = self.history.record(TraceAction::SegmentAlloc, segment.address(), size as u64, stream.0);
            let shown = LedgerSegment { size, stream, context, taken: None };
            self.segments.insert(segment.address(), shown);
        }
    }

    pub(super) fn record_release(&mut self, address: u64) {
        if let Some(LedgerSegment { size, stream, .. }) = self.segments.remove(&address) {
            self.stats.record_segment_free(SizeKind::of_size(size), size);
            self.history.record(TraceAction::SegmentFree, address, size as u64, stream.0);
        }
    }

    pub(super) fn record_allocation(&mut self, address: u64, stream: StreamId, requested: usize) {
        if let Some(LedgerSegment { size, taken, .. }) = self.segments.get_mut(&address) {
            self.stats.record_allocation(SizeKind::of_size(*size), *size, requested);
            let context = self.history.record(TraceAction::Alloc, address, requested as u64, stream.0);
            *taken = Some((requested, stream, context));
        }
    }

    pub(super) fn record_free(&mut self, address: u64) {
        if let Some(LedgerSegment { size, taken, .. }) = self.segments.get_mut(&address)
            && let Some((requested, stream, _)) = taken.take()
        {
            self.stats.record_free(SizeKind::of_size(*size), *size, requested);
            self.history.record_free(address, requested as u64, stream.0);
        }
    }

    pub(super) fn record_memory_history(&mut self, options: HistoryOptions) -> Result<()> {
        // As in PyTorch, stopping the recording deletes the trace, which would lack the events that follow.
        let clear_history = options.clear_history || options.enabled == Recording::Off;
        self.history.record_memory_history(HistoryOptions { clear_history, ..options })
    }

    /// Copies the data for a snapshot under the lock, and returns a function that makes the snapshot when the lock is released.
    pub(super) fn begin_snapshot(&self) -> impl FnOnce() -> Snapshot + use<> {
        self.history.record(TraceAction::Snapshot, 0, self.stats.active_bytes(), 0);
        let device = device_number(self.device);
        let segments = self.segments.iter().map(|(&address, shown)| shown.info(device, address)).collect();
        let (recorded, config) = (self.history.copy(), self.config.clone());
        move || Snapshot::of_device(device, segments, recorded, &config)
    }

    /// Returns the error for a request that could not be served. `why` is the reason; `unused` is the memory whose release did not suffice.
    pub(super) fn out_of_memory(
        &mut self,
        requested: usize,
        stream: StreamId,
        why: &str,
        unused: ReleasedMemory,
    ) -> Error {
        self.stats.num_ooms += 1;
        let (allocated, reserved) = (self.stats.allocated_bytes(), self.stats.reserved());
        let free = self.capacity.saturating_sub(reserved).min(i64::MAX as u64); // snapshot files store the number as an i64
        self.history.record(TraceAction::Oom, free, requested as u64, stream.0);
        let capacity = self.capacity;
        let mut detail = format!(
            "{:#} are allocated and {:#} reserved of a capacity of {:#}",
            Size(allocated),
            Size(reserved),
            Size(capacity)
        );
        if self.limit() < capacity {
            detail += &format!(", of which {:#} are allowed", Size(self.limit()));
        }
        if unused.bytes > 0 {
            let (bytes, largest) = (Size(unused.bytes), Size(unused.largest as u64));
            detail += &format!("; {bytes:#} in unused buffers, the largest of {largest:#}, were given back");
        }
        Error::OutOfMemory { device: self.device, requested, detail: format!("{detail}; {why}") }
    }
}

impl LedgerSegment {
    fn info(&self, device: u32, address: u64) -> SegmentWithContexts {
        let size = self.size as u64;
        let (state, requested, context) = match self.taken {
            Some((requested, _, context)) => (BlockState::ActiveAllocated, requested, context),
            None => (BlockState::Inactive, 0, Context::NONE),
        };
        let segment = SegmentInfo {
            device,
            address,
            total_size: size,
            stream: self.stream.0.into(),
            segment_type: match SizeKind::of_size(self.size) {
                SizeKind::Small => SegmentType::Small,
                SizeKind::Large => SegmentType::Large,
            },
            segment_pool_id: (0, 0),
            is_expandable: false,
            frames: [].into(),
            blocks: vec![BlockInfo { address, size, requested_size: requested as u64, state, frames: [].into() }],
        };
        SegmentWithContexts { segment, context: self.context, contexts: vec![context] }
    }
}

/// Unused segments that were released: their total bytes, and the bytes of the largest.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ReleasedMemory {
    pub(super) bytes: u64,
    pub(super) largest: usize,
}

pub(super) fn segment_size(driver: &dyn Driver, bytes: usize) -> Result<usize> {
    let size = bytes.max(1).checked_next_multiple_of(driver.alignment());
    size.filter(|&size| size as u64 <= driver.capacity())
        .ok_or_else(|| too_large_error(driver, bytes, driver.largest_segment() as u64))
}

/// Returns the error for a buffer that exceeds the device's memory or that its driver refuses to create. The driver guarantees
/// `promised` bytes.
pub(super) fn too_large_error(driver: &dyn Driver, requested: usize, promised: u64) -> Error {
    let mut detail = format!("the device has {:#}", Size(driver.capacity()));
    if promised < driver.capacity() {
        detail += &format!(", and promises buffers of at most {:#}", Size(promised));
    }
    Error::OutOfMemory { device: driver.device(), requested, detail }
}

/// Creates a segment: a buffer, or `image`. Returns `Ok(Err)` with the name of the exhausted resource if memory ran out. Never call
/// this function under a lock.
pub(super) fn create_segment(
    driver: &dyn Driver,
    size: usize,
    image: Option<ImageDesc>,
    requested: usize,
) -> Result<Result<Arc<Segment>, String>> {
    let made = image.map_or_else(|| driver.create(size), |image| driver.create_image(image));
    match made {
        Ok(memory) => {
            tracing::debug!(device = %driver.device(), size, "segment made");
            Ok(Ok(Arc::new(Segment::new(memory, size))))
        }
        Err(Failure::TooBig) => Err(too_large_error(driver, requested, driver.largest_segment() as u64)),
        Err(Failure::Other(error)) => Err(error),
        Err(failure) => Ok(Err(failure.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{
        BlockState, Config, HistoryOptions, SegmentInfo, Sim, SimOptions, TraceAction, build_allocator,
    };
    use crate::device::StreamId;
    use std::sync::Arc;

    #[test]
    fn snapshots_agree_with_statistics() {
        for backend in ["direct", "pool"] {
            let sim = Sim::new(SimOptions { capacity: 64 << 20, ..SimOptions::default() });
            let config: Config = format!("backend:{backend}").parse().unwrap();
            let allocator = build_allocator(Arc::new(sim), config).unwrap();
            allocator.record_memory_history(HistoryOptions { max_entries: 50, ..HistoryOptions::default() }).unwrap();
            let mut live = Vec::new();
            for n in 1..if cfg!(miri) { 25 } else { 200 } {
                let bytes = n * 7919 % 100_000 + 1;
                live.push(allocator.allocate(bytes, StreamId(n as u32 % 2)).unwrap());
                if n % 3 > 0 {
                    allocator.deallocate(live.swap_remove(n * 31 % live.len()));
                }
                let (snapshot, s) = (allocator.snapshot(), allocator.stats());
                snapshot.check().unwrap();
                let sum = |f: fn(&SegmentInfo) -> u64| snapshot.segments.iter().map(f).sum::<u64>();
                assert_eq!(sum(|g| g.total_size), s.reserved_bytes.current, "{backend}");
                assert_eq!(sum(SegmentInfo::allocated_size), s.allocated_bytes.current, "{backend}");
                assert_eq!(sum(SegmentInfo::requested_size), s.requested_bytes.current, "{backend}");
            }
            assert!(allocator.allocate(48 << 20, StreamId::DEFAULT).is_ok_and(|b| b.size() == 48 << 20), "{backend}");
            assert!(allocator.allocate(48 << 20, StreamId::DEFAULT).is_err());
            let snapshot = allocator.snapshot();
            let trace = snapshot.device_traces.last().unwrap();
            assert_eq!(trace.iter().filter(|e| e.action == TraceAction::Oom).count(), 1, "{backend}");
            live.into_iter().for_each(|block| allocator.deallocate(block));
            allocator.empty_cache().unwrap();
            let snapshot = allocator.snapshot();
            snapshot.check().unwrap();
            let blocks: Vec<_> = snapshot.segments.iter().flat_map(|g| &g.blocks).collect();
            assert!(matches!(blocks[..], [b] if b.state == BlockState::ActiveAllocated), "{backend}: {blocks:?}");
        }
    }
}

//! What the two allocators that never split a segment share: their accounts, and how segments are made.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::allocator::valid_fraction;
use super::caching::Kind;
use super::config::Config;
use super::counters::Counters;
use super::driver::{Driver, Failure, ImageDesc};
use super::history::{
    BlockInfo, BlockState, Context, History, HistoryOptions, Recorded, Recording, SegmentInfo, SegmentType, Snapshot,
    TraceAction, WithContexts, device_number,
};
use super::segment::Segment;
use crate::device::StreamId;
use crate::error::Size;
use crate::{Device, Error, Result};

/// The methods of an allocator that its books answer.
macro_rules! answer_from_books {
    ($self:ident, $books:expr) => {
        fn device(&$self) -> crate::Device {
            $self.driver.device()
        }
        fn alignment(&$self) -> usize {
            $self.driver.alignment()
        }
        fn stats(&$self) -> crate::storage::DeviceStats {
            $books.stats.stats()
        }
        fn reset_peak_stats(&$self) {
            $books.stats.reset_peak();
        }
        fn reset_accumulated_stats(&$self) {
            $books.stats.reset_accumulated();
        }
        fn set_memory_limit(&$self, bytes: u64) -> crate::Result<()> {
            $books.set_limit(bytes);
            Ok(())
        }
        fn set_memory_fraction(&$self, fraction: f64) -> crate::Result<()> {
            $books.set_fraction(fraction)
        }
        fn snapshot(&$self) -> crate::storage::Snapshot {
            let copy = $books.copy(); // the lock is held no longer
            crate::storage::unsplit::snapshot(copy)
        }
        fn record_memory_history(&$self, options: crate::storage::HistoryOptions) -> crate::Result<()> {
            $books.record_memory_history(options)
        }
    };
}
pub(super) use answer_from_books;

/// What is held and has been done, and the limit of it. Lives under the allocator's lock.
pub(super) struct Books {
    device: Device,
    capacity: u64,
    pub(super) stats: Counters,
    /// The most bytes of segments to hold, as a number and as a part of the capacity.
    most: u64,
    part: u64,
    /// Bytes of segments being made outside the lock.
    making: u64,
    config: Config,
    history: History,
    /// Segments by their address.
    segments: BTreeMap<u64, Shown>,
}

/// A segment as snapshots show it: one block.
struct Shown {
    size: usize,
    stream: StreamId,
    context: Context,
    /// While it is handed out: for how many bytes, to which stream, and where in the program.
    taken: Option<(usize, StreamId, Context)>,
}

impl Books {
    pub(super) fn new(driver: &dyn Driver, config: &Config) -> Books {
        let (device, capacity) = (driver.device(), driver.capacity());
        let mut stats = Counters::default();
        stats.max_split_size = config.max_split_size as u64;
        Books {
            device,
            capacity,
            stats,
            most: config.limit(capacity),
            part: capacity,
            making: 0,
            config: config.clone(),
            history: History::new(),
            segments: BTreeMap::new(),
        }
    }

    /// The most bytes of segments to hold.
    pub(super) fn limit(&self) -> u64 {
        self.most.min(self.part)
    }

    pub(super) fn set_limit(&mut self, bytes: u64) {
        self.most = bytes.min(self.capacity);
    }

    pub(super) fn set_fraction(&mut self, fraction: f64) -> Result<()> {
        self.part = (self.capacity as f64 * valid_fraction(fraction)?) as u64;
        Ok(())
    }

    /// Makes room under the limit for a segment about to be made while so many bytes are held elsewhere; says so if there is none.
    pub(super) fn begin(&mut self, size: usize, elsewhere: u64) -> Option<String> {
        let held = self.stats.reserved() + self.making;
        if held.saturating_add(elsewhere).saturating_add(size as u64) > self.limit() {
            let others = if elsewhere > 0 {
                format!(" beside {:#} in buffers or images that are counted elsewhere", Size(elsewhere))
            } else {
                String::new()
            };
            return Some(format!("there is no room for it{others}"));
        }
        self.making += size as u64;
        None
    }

    /// The segment was made for `stream`, or was not.
    pub(super) fn end(&mut self, size: usize, stream: StreamId, made: Option<&Segment>) {
        self.making -= size as u64;
        if let Some(segment) = made {
            self.stats.segment_made(Kind::of(size), size);
            let context = self.history.record(TraceAction::SegmentAlloc, segment.address(), size as u64, stream.0);
            let shown = Shown { size, stream, context, taken: None };
            self.segments.insert(segment.address(), shown);
        }
    }

    /// The segment at an address goes back to the driver.
    pub(super) fn released(&mut self, address: u64) {
        if let Some(Shown { size, stream, .. }) = self.segments.remove(&address) {
            self.stats.segment_released(Kind::of(size), size);
            self.history.record(TraceAction::SegmentFree, address, size as u64, stream.0);
        }
    }

    /// The segment at an address is handed out to `stream`.
    pub(super) fn taken(&mut self, address: u64, stream: StreamId, requested: usize) {
        if let Some(Shown { size, taken, .. }) = self.segments.get_mut(&address) {
            self.stats.taken(Kind::of(*size), *size, requested);
            let context = self.history.record(TraceAction::Alloc, address, requested as u64, stream.0);
            *taken = Some((requested, stream, context));
        }
    }

    /// The segment at an address is given back.
    pub(super) fn given_back(&mut self, address: u64) {
        if let Some(Shown { size, taken, .. }) = self.segments.get_mut(&address)
            && let Some((requested, stream, _)) = taken.take()
        {
            self.stats.given_back(Kind::of(*size), *size, requested);
            self.history.record_free(address, requested as u64, stream.0);
        }
    }

    pub(super) fn record_memory_history(&mut self, options: HistoryOptions) -> Result<()> {
        // As in PyTorch the end of recording is the end of the trace: what follows would be missing from it.
        let clear_history = options.clear_history || options.enabled == Recording::Off;
        self.history.record_memory_history(HistoryOptions { clear_history, ..options })
    }

    /// What a snapshot of this moment is made of: see [`snapshot`].
    pub(super) fn copy(&self) -> (u32, Vec<WithContexts>, Recorded, Config) {
        self.history.record(TraceAction::Snapshot, 0, self.stats.active_bytes(), 0);
        let device = device_number(self.device);
        let segments = self.segments.iter().map(|(&address, shown)| shown.info(device, address)).collect();
        (device, segments, self.history.copy(), self.config.clone())
    }

    /// The error for a request that nothing could serve; `why` is what was missing, `unused` what has been given back to
    /// no avail.
    pub(super) fn out_of_memory(&mut self, requested: usize, stream: StreamId, why: &str, unused: Unused) -> Error {
        self.stats.num_ooms += 1;
        let (allocated, reserved) = (self.stats.allocated_bytes(), self.stats.reserved());
        let free = self.capacity.saturating_sub(reserved).min(i64::MAX as u64); // as files have it
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

impl Shown {
    fn info(&self, device: u32, address: u64) -> WithContexts {
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
            segment_type: match Kind::of(self.size) {
                Kind::Small => SegmentType::Small,
                Kind::Large => SegmentType::Large,
            },
            segment_pool_id: (0, 0),
            is_expandable: false,
            frames: [].into(),
            blocks: vec![BlockInfo { address, size, requested_size: requested as u64, state, frames: [].into() }],
        };
        WithContexts { segment, context: self.context, contexts: vec![context] }
    }
}

/// The snapshot of what [`Books::copy`] gave, made without the lock.
pub(super) fn snapshot((device, segments, recorded, config): (u32, Vec<WithContexts>, Recorded, Config)) -> Snapshot {
    Snapshot::of_device(device, segments, recorded, &config)
}

/// Unused segments: their bytes, and those of the largest.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Unused {
    pub(super) bytes: u64,
    pub(super) largest: usize,
}

/// Bytes of the segment for a request.
pub(super) fn segment_size(driver: &dyn Driver, bytes: usize) -> Result<usize> {
    let size = bytes.max(1).checked_next_multiple_of(driver.alignment());
    size.filter(|&size| size as u64 <= driver.capacity())
        .ok_or_else(|| too_large(driver, bytes, driver.largest_segment() as u64))
}

/// The error for a buffer that the device cannot hold or its driver does not make: it promises buffers of `promised` bytes.
pub(super) fn too_large(driver: &dyn Driver, requested: usize, promised: u64) -> Error {
    let mut detail = format!("the device has {:#}", Size(driver.capacity()));
    if promised < driver.capacity() {
        detail += &format!(", and promises buffers of at most {:#}", Size(promised));
    }
    Error::OutOfMemory { device: driver.device(), requested, detail }
}

/// A segment made and committed, a buffer or an `image`, or what ran out. Never under a lock.
pub(super) fn make(
    driver: &dyn Driver,
    size: usize,
    image: Option<ImageDesc>,
    requested: usize,
) -> Result<Result<Arc<Segment>, String>> {
    let made = image.map_or_else(|| driver.create(size), |image| driver.create_image(image));
    match made.and_then(|memory| driver.commit(memory)) {
        Ok(memory) => {
            tracing::debug!(device = %driver.device(), size, "segment made");
            Ok(Ok(Arc::new(Segment::new(memory, size))))
        }
        Err(Failure::TooBig) => Err(too_large(driver, requested, driver.largest_segment() as u64)),
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
    fn snapshots_show_what_is_held_and_how_it_came() {
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

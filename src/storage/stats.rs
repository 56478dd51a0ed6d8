//! What an allocator holds and has done: PyTorch's counters under PyTorch's names.

use std::fmt;
use std::ops::Deref;

use super::caching::{FreeMemory, OomObserver, Registration};
use super::history::{HistoryOptions, Snapshot};
use super::registry;
use crate::{Device, Result};

/// A quantity over time.
///
/// `current` is always what is there now, `peak` the greatest it was since [`Device::reset_peak_stats`], and
/// `allocated - freed` equals `current` until [`Device::reset_accumulated_stats`] sets both to zero.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Stat {
    /// Now.
    pub current: u64,
    /// The greatest `current` since the last reset.
    pub peak: u64,
    /// The sum of all increases.
    pub allocated: u64,
    /// The sum of all decreases.
    pub freed: u64,
}

impl Stat {
    #[inline]
    pub(super) fn increase(&mut self, by: u64) {
        self.current += by;
        self.allocated += by;
        self.peak = self.peak.max(self.current);
    }

    #[inline]
    pub(super) fn decrease(&mut self, by: u64) {
        self.current -= by;
        self.freed += by;
    }

    #[inline]
    pub(super) fn change(&mut self, by: i64) {
        if by >= 0 { self.increase(by.unsigned_abs()) } else { self.decrease(by.unsigned_abs()) }
    }
}

/// The counters of one pool, or of both together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PoolStats {
    /// Allocations held by the user.
    pub allocation: Stat,
    /// Segments held from the driver.
    pub segment: Stat,
    /// Blocks in use, by the user or by work not yet done.
    pub active: Stat,
    /// Free blocks that are parts of segments in use: they cannot be given back to the driver.
    pub inactive_split: Stat,
    /// Bytes of blocks held by the user: requests rounded up.
    pub allocated_bytes: Stat,
    /// Bytes of segments held from the driver.
    pub reserved_bytes: Stat,
    /// Bytes of active blocks.
    pub active_bytes: Stat,
    /// Bytes of inactive split blocks.
    pub inactive_split_bytes: Stat,
    /// Bytes the user asked for.
    pub requested_bytes: Stat,
}

/// A device's memory statistics, as [`Device::memory_stats`] gives them.
///
/// Dereferences to the sums over both pools: `stats.allocated_bytes.current`. Always
/// `requested_bytes <= allocated_bytes <= active_bytes <= reserved_bytes`.
///
/// ```
/// use claystone::Device;
/// let stats = Device::Cpu.memory_stats()?;
/// assert!(stats.allocated_bytes.current <= stats.reserved_bytes.current);
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceStats {
    /// Both pools together, with peaks of the sums.
    pub total: PoolStats,
    /// Requests of up to 1 MiB.
    pub small_pool: PoolStats,
    /// Larger requests.
    pub large_pool: PoolStats,
    /// Times the driver ran out and the allocator gave back what it had cached and tried again.
    pub num_alloc_retries: u64,
    /// Times that did not help: [`Error::OutOfMemory`](crate::Error::OutOfMemory) was returned.
    pub num_ooms: u64,
    /// Times the allocator waited for all streams because memory ran out.
    pub num_sync_all_streams: u64,
    /// Segments made by the driver, and extensions of those that grow in place.
    pub num_device_alloc: u64,
    /// Segments given back to the driver, and ends of those that grow in place.
    pub num_device_free: u64,
    /// Blocks from this size on are never split (`max_split_size_mb`), in bytes.
    pub max_split_size: u64,
    /// Allocations of at least `max_split_size`.
    pub oversize_allocations: Stat,
    /// Segments of at least `max_split_size`.
    pub oversize_segments: Stat,
}

impl Deref for DeviceStats {
    type Target = PoolStats;

    fn deref(&self) -> &PoolStats {
        &self.total
    }
}

/// What a change did to the free parts of split segments.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Split {
    pub(super) blocks: i64,
    pub(super) bytes: i64,
}

impl fmt::Display for DeviceStats {
    /// Current and peak of what matters most, a line each.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{:<16} {:>15} {:>15}", "", "current", "peak")?;
        for (name, stat) in [
            ("allocations", self.allocation),
            ("requested bytes", self.requested_bytes),
            ("allocated bytes", self.allocated_bytes),
            ("segments", self.segment),
            ("reserved bytes", self.reserved_bytes),
        ] {
            writeln!(f, "{name:<16} {:>15} {:>15}", stat.current, stat.peak)?;
        }
        let (made, freed) = (self.num_device_alloc, self.num_device_free);
        let (retries, ooms) = (self.num_alloc_retries, self.num_ooms);
        write!(f, "driver: {made} segments made, {freed} given back; {retries} retries, {ooms} out of memory")
    }
}

/// Memory: what the device's caching allocator holds, and what it is told.
impl Device {
    /// What the allocator of this device holds and has done (`torch.cuda.memory_stats`).
    ///
    /// # Errors
    /// [`Error::NoDevice`](crate::Error::NoDevice) where the device is not there; likewise below.
    pub fn memory_stats(&self) -> Result<DeviceStats> {
        Ok(registry::of(*self)?.stats())
    }

    /// Sets every peak to the current value (`torch.cuda.reset_peak_memory_stats`).
    pub fn reset_peak_stats(&self) -> Result<()> {
        registry::of(*self)?.reset_peak_stats();
        Ok(())
    }

    /// Sets the sums of increases and decreases and the counts of events to zero
    /// (`torch.cuda.reset_accumulated_memory_stats`).
    pub fn reset_accumulated_stats(&self) -> Result<()> {
        registry::of(*self)?.reset_accumulated_stats();
        Ok(())
    }

    /// How many blocks were found to have been written around, where `guard_bytes` has them looked at; 0 elsewhere.
    pub fn guard_violations(&self) -> Result<u64> {
        Ok(registry::of(*self)?.guard_violations())
    }

    /// Gives every segment that nothing uses back to the driver (`torch.cuda.empty_cache`).
    pub fn empty_cache(&self) -> Result<()> {
        registry::of(*self)?.empty_cache()
    }

    /// What the device's allocator holds at this moment, block by block, and the events recorded since
    /// [`record_memory_history`](Device::record_memory_history) (`torch.cuda.memory._snapshot`).
    ///
    /// Saved as a pickle it opens in PyTorch's memory viewer (`pytorch.org/memory_viz`, or `python _memory_viz.py`);
    /// [`Snapshot::fragmentation`] says in numbers how much is free, and in what pieces. The CPU is device 0, OpenCL's
    /// device `i` is `i + 1`.
    ///
    /// ```
    /// use claystone::storage::{HistoryOptions, annotate, with_context};
    /// use claystone::{Device, Tensor};
    /// let device = Device::Cpu;
    /// device.record_memory_history(HistoryOptions::default())?;
    /// let x = annotate("setup", || with_context("input", || Tensor::ones(&[64, 64], device)))?;
    /// let snapshot = device.memory_snapshot()?;
    /// snapshot.save(std::env::temp_dir().join("claystone-doc.pickle"))?;
    /// let names = snapshot.segments.iter().flat_map(|s| &s.blocks).flat_map(|b| b.frames.iter()).map(|f| f.name.as_str());
    /// assert!(names.into_iter().any(|name| name == "input"));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::NoDevice`](crate::Error::NoDevice) where the device is not there.
    pub fn memory_snapshot(&self) -> Result<Snapshot> {
        Ok(registry::of(*self)?.snapshot())
    }

    /// Begins or ends recording what the device's allocator does (`torch.cuda.memory._record_memory_history`). Ending it
    /// forgets what was recorded: take the snapshot first. While it is on, an allocation takes a little longer.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) where there is no memory for as many entries, or the allocator cannot record.
    pub fn record_memory_history(&self, options: HistoryOptions) -> Result<()> {
        registry::of(*self)?.record_memory_history(options)
    }

    /// Gives unused memory back to the driver as long as at least `keep` bytes stay held; says how many bytes went back.
    /// Waits for nothing: while the device works, nothing is given back.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// drop(Tensor::zeros([1000, 1000], Device::Cpu)?);
    /// Device::Cpu.trim(0)?;
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn trim(&self, keep: u64) -> Result<u64> {
        registry::of(*self)?.trim(keep)
    }

    /// Moves blocks together and gives back the memory that frees; says how many bytes went back.
    ///
    /// # Errors
    /// What the driver reports while copying.
    pub fn compact(&self) -> Result<u64> {
        registry::of(*self)?.compact(u64::MAX)
    }

    /// Has `free` called when the device, or the limit, has no room for an allocation, until what it returns is dropped: it
    /// may drop what it can spare, and says whether it did (PyTorch's `FreeMemoryCallback`). Then the allocation is tried
    /// again.
    ///
    /// It is called by the thread that allocates, with no lock of the allocator held, and may allocate itself.
    ///
    /// ```
    /// use std::sync::Mutex;
    /// use claystone::{Device, Tensor};
    /// static SPARE: Mutex<Option<Tensor>> = Mutex::new(None);
    /// let device = Device::Cpu;
    /// device.set_memory_limit(8 << 20)?;
    /// *SPARE.lock().unwrap() = Some(Tensor::zeros(&[5 << 20], (claystone::DType::U8, device))?);
    /// let _kept = device.add_free_memory_callback(Box::new(|| SPARE.lock().unwrap().take().is_some()))?;
    /// let x = Tensor::zeros(&[6 << 20], (claystone::DType::U8, device))?; // in place of the spare one
    /// assert!(SPARE.lock().unwrap().is_none());
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) where the device's allocator calls nobody: those that are not caching.
    pub fn add_free_memory_callback(&self, free: Box<FreeMemory>) -> Result<Registration> {
        registry::of(*self)?.add_free_memory_callback(free)
    }

    /// Has `observe` called when an allocation fails for want of memory, before the error is returned, until what it
    /// returns is dropped (PyTorch's `attachOutOfMemoryObserver`).
    ///
    /// It is called by the thread that allocates, with no lock of the allocator held: it may ask for statistics, take a
    /// snapshot, or allocate.
    ///
    /// ```
    /// use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
    /// use claystone::{Device, Tensor};
    /// static MISSING: AtomicUsize = AtomicUsize::new(0);
    /// let device = Device::Cpu;
    /// device.set_memory_limit(1 << 20)?;
    /// let _kept = device.add_oom_observer(Box::new(|event| MISSING.store(event.requested, Relaxed)))?;
    /// assert!(Tensor::zeros(&[1 << 20], device).is_err());
    /// assert_eq!(MISSING.load(Relaxed), 4 << 20);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) where the device's allocator tells nobody: those that are not caching.
    pub fn add_oom_observer(&self, observe: Box<OomObserver>) -> Result<Registration> {
        registry::of(*self)?.add_oom_observer(observe)
    }

    /// Lets the allocator hold at most this part, 0 to 1, of the device's memory
    /// (`torch.cuda.set_per_process_memory_fraction`). What it holds already it keeps.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for a fraction outside 0 to 1.
    pub fn set_memory_fraction(&self, fraction: f64) -> Result<()> {
        registry::of(*self)?.set_memory_fraction(fraction)
    }

    /// Lets the allocator hold at most this many bytes, whatever the fraction allows. Of what it holds already, unused
    /// memory goes back with the next allocation.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) where the device's allocator cannot limit itself.
    pub fn set_memory_limit(&self, bytes: u64) -> Result<()> {
        registry::of(*self)?.set_memory_limit(bytes)
    }
}

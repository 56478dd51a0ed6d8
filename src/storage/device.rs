//! The memory of a [`Device`]: statistics, limits, snapshots.

use std::path::PathBuf;

use super::allocator::{Allocator, find_allocator};
use super::caching::CachingAllocator;
use super::driver::pinned::PinnedStats;
use super::driver::staging::DevicePinnedPool;
use super::guard::guard_violations;
use super::history::{HistoryOptions, Snapshot};
use super::hooks::{FreeMemory, OomObserver, Registration};
use super::images::pool as image_pool;
use super::pool::{PoolAllocator, existing_image_pool, snapshot_with_images, with_images};
use super::snapshot_on_oom;
use super::stats::DeviceStats;
use super::{per_device, registry};
use crate::{Device, Error, Result};

/// Statistics and settings of the device's memory allocator.
impl Device {
    /// Returns the statistics of the device's allocator (`torch.cuda.memory_stats`), including those of its images.
    /// Each peak is the sum of the allocator's peak and the images' peak.
    ///
    /// # Errors
    /// [`Error::NoDevice`](crate::Error::NoDevice) if the device does not exist; the same holds for the methods below.
    pub fn memory_stats(&self) -> Result<DeviceStats> {
        Ok(with_images(&**registry::device_allocator(*self)?))
    }

    /// Returns the part of [`memory_stats`](Self::memory_stats) that belongs to images; all zeros for a device without images.
    pub fn image_memory_stats(&self) -> Result<DeviceStats> {
        self.cached_info()?;
        Ok(existing_image_pool(*self).map(|images| images.stats()).unwrap_or_default())
    }

    /// Sets the peak of every statistic to the current value (`torch.cuda.reset_peak_memory_stats`).
    pub fn reset_peak_stats(&self) -> Result<()> {
        registry::device_allocator(*self)?.reset_peak_stats();
        existing_image_pool(*self).inspect(|images| images.reset_peak_stats());
        Ok(())
    }

    /// Sets the sums of increases and decreases and the counts of events to zero (`torch.cuda.reset_accumulated_memory_stats`).
    pub fn reset_accumulated_stats(&self) -> Result<()> {
        registry::device_allocator(*self)?.reset_accumulated_stats();
        existing_image_pool(*self).inspect(|images| images.reset_accumulated_stats());
        Ok(())
    }

    /// Returns the number of blocks whose guard bytes were found overwritten; 0 if `guard_bytes` is off.
    pub fn guard_violations(&self) -> Result<u64> {
        Ok(guard_violations(&**registry::device_allocator(*self)?))
    }

    /// Returns every unused segment and image to the driver (`torch.cuda.empty_cache`).
    pub fn empty_cache(&self) -> Result<()> {
        image_pool::empty_cache(*self)?;
        registry::device_allocator(*self)?.empty_cache()
    }

    /// Returns the current state of the device's allocator, block by block, and the events recorded since
    /// [`record_memory_history`](Device::record_memory_history) (`torch.cuda.memory._snapshot`).
    ///
    /// Saved as a pickle, the snapshot opens in PyTorch's memory viewer (`pytorch.org/memory_viz`, or `python
    /// _memory_viz.py`). [`Snapshot::fragmentation`] says how much memory is free and in which pieces, and
    /// [`Snapshot::live_memory`] which lines of the program allocated the memory in use. The CPU is device 0; OpenCL's
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
    /// [`Error::NoDevice`](crate::Error::NoDevice) if the device does not exist.
    pub fn memory_snapshot(&self) -> Result<Snapshot> {
        Ok(snapshot_with_images(&**registry::device_allocator(*self)?))
    }

    /// Starts or stops recording the allocator's actions (`torch.cuda.memory._record_memory_history`). Stopping deletes
    /// the recorded events, so take the snapshot first.
    ///
    /// While recording, an allocation and its release take about a microsecond longer, or half of that without
    /// [`stacks`](HistoryOptions::stacks). In both cases, and without debug information, each allocation is attributed
    /// to the program's line that called a method of this crate.
    ///
    /// ```
    /// use claystone::storage::HistoryOptions;
    /// use claystone::{Device, Tensor};
    /// let device = Device::Cpu;
    /// device.record_memory_history(HistoryOptions::default().stacks(false))?;
    /// let x = Tensor::zeros(&[1 << 20], device)?; // 4 MiB
    /// let snapshot = device.memory_snapshot()?;
    /// println!("{snapshot}"); // among others: in use, by source line
    /// assert!(snapshot.live_memory()[0].bytes >= 4 << 20);
    /// # drop(x);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the host has no memory for the requested number of entries, or if
    /// the allocator cannot record.
    pub fn record_memory_history(&self, options: HistoryOptions) -> Result<()> {
        registry::device_allocator(*self)?.record_memory_history(options)?;
        self.image_pool()?.map_or(Ok(()), |images| images.record_memory_history(options))
    }

    /// Returns unused memory to the driver while the allocator still holds at least `keep` bytes. Returns the number of
    /// bytes released. Does not wait: while the device is busy, nothing is released.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// drop(Tensor::zeros([1000, 1000], Device::Cpu)?);
    /// Device::Cpu.trim(0)?;
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn trim(&self, keep: u64) -> Result<u64> {
        let images = existing_image_pool(*self);
        let held = |stats: DeviceStats| stats.reserved_bytes.current;
        let from_images = images.map_or(Ok(0), |images| {
            images.trim(keep.saturating_sub(held(registry::device_allocator(*self)?.stats())))
        })?;
        Ok(from_images
            + registry::device_allocator(*self)?.trim(keep.saturating_sub(held(self.image_memory_stats()?)))?)
    }

    /// Moves blocks together and releases the memory that becomes free. Returns the number of bytes released.
    ///
    /// # Errors
    /// Errors that the driver reports while copying.
    pub fn compact(&self) -> Result<u64> {
        registry::device_allocator(*self)?.compact(u64::MAX)
    }

    /// Registers a callback for allocations that would exceed the device's memory or the limit (PyTorch's
    /// `FreeMemoryCallback`). The callback stays registered until the returned value is dropped.
    ///
    /// `free` may drop memory that the program can spare, and returns true if it did. Then the allocation is tried
    /// again. The allocating thread calls `free`, with no lock of the allocator held; `free` may allocate.
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
    /// [`Error::Invalid`](crate::Error::Invalid) if the device's allocator supports no callbacks: only caching
    /// allocators do.
    pub fn add_free_memory_callback(&self, free: Box<FreeMemory>) -> Result<Registration> {
        Ok(self.caching_allocator("add_free_memory_callback")?.add_free_memory_callback(free))
    }

    /// Registers an observer of allocations that fail for lack of memory (PyTorch's `attachOutOfMemoryObserver`). The
    /// observer is called before the error is returned, until the returned value is dropped.
    ///
    /// The allocating thread calls `observe` with no lock of the allocator held; `observe` may read statistics, take a snapshot, or
    /// allocate.
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
    /// [`Error::Invalid`](crate::Error::Invalid) if the device's allocator supports no observers: only caching
    /// allocators do.
    pub fn add_oom_observer(&self, observe: Box<OomObserver>) -> Result<Registration> {
        Ok(self.caching_allocator("add_oom_observer")?.add_oom_observer(observe))
    }

    /// Saves a snapshot of the device's memory when an allocation fails for lack of memory, before the error is returned. A later
    /// failure replaces the file. Ends when the returned value is dropped.
    ///
    /// Records the memory history from now on, with call stacks, unless the history is recorded already. The file is a pickle if
    /// `path` ends in `.pickle` or `.pkl`, JSON if in `.json`. A snapshot that cannot be saved is an event of `tracing`, and the error
    /// stays as it is. `CLAYSTONE_SNAPSHOT_ON_OOM=memory.pickle` does the same for every device and the whole program.
    ///
    /// ```
    /// use claystone::storage::{Snapshot, TraceAction};
    /// use claystone::{Device, Tensor};
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let path = folder.path().join("memory.pickle");
    /// let device = Device::Cpu;
    /// let _kept = device.snapshot_on_oom(&path)?;
    /// device.set_memory_limit(1 << 20)?;
    /// assert!(Tensor::zeros(&[1 << 20], device).is_err());
    /// let snapshot = Snapshot::load(&path)?;
    /// assert!(snapshot.device_traces[0].iter().any(|entry| entry.action == TraceAction::Oom));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the path has another ending, or the device's allocator is not a caching one.
    pub fn snapshot_on_oom(&self, path: impl Into<PathBuf>) -> Result<Registration> {
        snapshot_on_oom::register(registry::device_allocator(*self)?, path.into())
    }

    /// Returns the caching allocator of the device, which may be wrapped in other allocators.
    fn caching_allocator(&self, op: &'static str) -> Result<&'static CachingAllocator> {
        let allocator = registry::device_allocator(*self)?;
        find_allocator(&**allocator).ok_or_else(|| Error::invalid(op, format!("{allocator:?} calls no callbacks")))
    }

    /// Limits the allocator to this fraction, 0 to 1, of the device's memory
    /// (`torch.cuda.set_per_process_memory_fraction`). Memory that the allocator already holds is kept.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) for a fraction outside 0 to 1.
    pub fn set_memory_fraction(&self, fraction: f64) -> Result<()> {
        registry::device_allocator(*self)?.set_memory_fraction(fraction)?;
        self.image_pool()?.map_or(Ok(()), |images| images.set_memory_fraction(fraction))
    }

    /// Limits the allocator to this many bytes, in addition to the fraction. If the allocator already holds more,
    /// unused memory is released at the next allocation.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) if the device's allocator supports no limit.
    pub fn set_memory_limit(&self, bytes: u64) -> Result<()> {
        registry::device_allocator(*self)?.set_memory_limit(bytes)?;
        self.image_pool()?.map_or(Ok(()), |images| images.set_memory_limit(bytes))
    }

    /// Returns the pool of images, or `None` if the device does not support images. Creates the pool if needed, so that limits and
    /// recording apply to it from its first use.
    fn image_pool(&self) -> Result<Option<&'static PoolAllocator>> {
        image_pool::pool(*self)
    }
}

/// Pinned host memory, which large transfers to and from a device with its own memory go through.
impl Device {
    /// Returns the statistics of the pinned memory held for this device's transfers (`torch.cuda.host_memory_stats`).
    /// All zeros for the CPU, and for devices that share the host's memory, which need no pinned memory.
    ///
    /// ```
    /// use claystone::Device;
    /// let pinned = Device::best().pinned_memory_stats()?;
    /// assert!(pinned.active_bytes.current <= pinned.allocated_bytes.current);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::NoDevice`](crate::Error::NoDevice) if the device does not exist; the same holds for the methods below.
    pub fn pinned_memory_stats(&self) -> Result<PinnedStats> {
        Ok(self.pinned_pool()?.map(DevicePinnedPool::stats).unwrap_or_default())
    }

    /// Sets the peaks to the current values (`torch.cuda.reset_peak_host_memory_stats`).
    pub fn reset_peak_pinned_memory_stats(&self) -> Result<()> {
        self.pinned_pool()?.inspect(|pool| pool.reset_peak_stats());
        Ok(())
    }

    /// Sets sums and counts to zero (`torch.cuda.reset_accumulated_host_memory_stats`).
    pub fn reset_accumulated_pinned_memory_stats(&self) -> Result<()> {
        self.pinned_pool()?.inspect(|pool| pool.reset_accumulated_stats());
        Ok(())
    }

    /// Releases to the driver the pinned memory that no transfer uses, except the reserve set by `pinned_reserve_segment_size_mb`.
    pub fn empty_pinned_cache(&self) -> Result<()> {
        self.pinned_pool()?.inspect(|pool| pool.empty_cache());
        Ok(())
    }

    fn pinned_pool(&self) -> Result<Option<&'static DevicePinnedPool>> {
        self.cached_info()?;
        Ok(per_device::get(*self))
    }
}

//! The memory of a [`Device`]: statistics, limits, snapshots.

use std::sync::Arc;

use super::allocator::Allocator;
use super::driver::pinned::PinnedStats;
use super::driver::staging::{self, Pool};
use super::history::{HistoryOptions, Snapshot};
use super::hooks::{FreeMemory, OomObserver, Registration};
use super::image_pool;
use super::pool::PoolAllocator;
use super::registry;
use super::stats::DeviceStats;
use crate::{Device, Result};

/// Memory: what the device's caching allocator holds, and what it is told.
impl Device {
    /// What the allocator of this device holds and has done (`torch.cuda.memory_stats`), with its images; peaks are the sum of
    /// both's.
    ///
    /// # Errors
    /// [`Error::NoDevice`](crate::Error::NoDevice) where the device is not there; likewise below.
    pub fn memory_stats(&self) -> Result<DeviceStats> {
        Ok(image_pool::with_images(&**registry::of(*self)?))
    }

    /// What of [`memory_stats`](Self::memory_stats) is images; all zeros for a device that has none.
    pub fn image_memory_stats(&self) -> Result<DeviceStats> {
        self.known()?;
        Ok(self.images().map(|images| images.stats()).unwrap_or_default())
    }

    fn images(&self) -> Option<Arc<PoolAllocator>> {
        image_pool::existing_pool(*self)
    }

    /// Sets every peak to the current value (`torch.cuda.reset_peak_memory_stats`).
    pub fn reset_peak_stats(&self) -> Result<()> {
        registry::of(*self)?.reset_peak_stats();
        self.images().inspect(|images| images.reset_peak_stats());
        Ok(())
    }

    /// Sets the sums of increases and decreases and the counts of events to zero
    /// (`torch.cuda.reset_accumulated_memory_stats`).
    pub fn reset_accumulated_stats(&self) -> Result<()> {
        registry::of(*self)?.reset_accumulated_stats();
        self.images().inspect(|images| images.reset_accumulated_stats());
        Ok(())
    }

    /// How many blocks were found to have been written around, where `guard_bytes` has them looked at; 0 elsewhere.
    pub fn guard_violations(&self) -> Result<u64> {
        Ok(registry::of(*self)?.guard_violations())
    }

    /// Gives every segment and image that nothing uses back to the driver (`torch.cuda.empty_cache`).
    pub fn empty_cache(&self) -> Result<()> {
        image_pool::empty_cache(*self)?;
        registry::of(*self)?.empty_cache()
    }

    /// What the device's allocator holds at this moment, block by block, and the events recorded since
    /// [`record_memory_history`](Device::record_memory_history) (`torch.cuda.memory._snapshot`).
    ///
    /// Saved as a pickle it opens in PyTorch's memory viewer (`pytorch.org/memory_viz`, or `python _memory_viz.py`);
    /// [`Snapshot::fragmentation`] says in numbers how much is free, and in what pieces, [`Snapshot::live_memory`] which lines
    /// of the program allocated what is in use. The CPU is device 0, OpenCL's
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
        let snapshot = registry::of(*self)?.snapshot();
        Ok(match self.images() {
            Some(images) => snapshot.with_images(images.snapshot()),
            None => snapshot,
        })
    }

    /// Begins or ends recording what the device's allocator does (`torch.cuda.memory._record_memory_history`). Ending it
    /// forgets what was recorded: take the snapshot first. While it is on, an allocation and its release take about a
    /// microsecond longer, or half of that without [`stacks`](HistoryOptions::stacks). Either way each allocation says which line of the
    /// program made it, without debug information: the line that called a method of this crate.
    ///
    /// ```
    /// use claystone::storage::HistoryOptions;
    /// use claystone::{Device, Tensor};
    /// let device = Device::Cpu;
    /// device.record_memory_history(HistoryOptions { stacks: false, ..Default::default() })?;
    /// let x = Tensor::zeros(&[1 << 20], device)?; // 4 MiB
    /// let snapshot = device.memory_snapshot()?;
    /// println!("{snapshot}"); // among others: in use, by source line
    /// assert!(snapshot.live_memory()[0].bytes >= 4 << 20);
    /// # drop(x);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) where there is no memory for as many entries, or the allocator cannot record.
    pub fn record_memory_history(&self, options: HistoryOptions) -> Result<()> {
        registry::of(*self)?.record_memory_history(options)?;
        self.image_pool()?.map_or(Ok(()), |images| images.record_memory_history(options))
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
        let images = self.images();
        let held = |stats: DeviceStats| stats.reserved_bytes.current;
        let of_images =
            images.map_or(Ok(0), |images| images.trim(keep.saturating_sub(held(registry::of(*self)?.stats()))))?;
        Ok(of_images + registry::of(*self)?.trim(keep.saturating_sub(held(self.image_memory_stats()?)))?)
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
        registry::of(*self)?.set_memory_fraction(fraction)?;
        self.image_pool()?.map_or(Ok(()), |images| images.set_memory_fraction(fraction))
    }

    /// Lets the allocator hold at most this many bytes, whatever the fraction allows. Of what it holds already, unused
    /// memory goes back with the next allocation.
    ///
    /// # Errors
    /// [`Error::Invalid`](crate::Error::Invalid) where the device's allocator cannot limit itself.
    pub fn set_memory_limit(&self, bytes: u64) -> Result<()> {
        registry::of(*self)?.set_memory_limit(bytes)?;
        self.image_pool()?.map_or(Ok(()), |images| images.set_memory_limit(bytes))
    }

    /// The pool of images, made now where the device has images: limits and recording hold for it whenever it is first used.
    fn image_pool(&self) -> Result<Option<Arc<PoolAllocator>>> {
        image_pool::pool(*self)
    }
}

/// Pinned host memory: what large transfers to and from a device with memory of its own go through.
impl Device {
    /// The pinned memory held for this device's transfers (`torch.cuda.host_memory_stats`): all zeros for the CPU, and
    /// for devices that share the host's memory, which need none.
    ///
    /// ```
    /// use claystone::Device;
    /// let pinned = Device::best().pinned_memory_stats()?;
    /// assert!(pinned.active_bytes.current <= pinned.allocated_bytes.current);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::NoDevice`](crate::Error::NoDevice) where the device is not there; likewise below.
    pub fn pinned_memory_stats(&self) -> Result<PinnedStats> {
        Ok(self.pinned_pool()?.map(Pool::stats).unwrap_or_default())
    }

    /// Sets the peaks to the current values (`torch.cuda.reset_peak_host_memory_stats`).
    pub fn reset_peak_pinned_memory_stats(&self) -> Result<()> {
        self.pinned_pool()?.inspect(|pool| pool.reset_peak_stats());
        Ok(())
    }

    /// Sets the sums and counts to zero (`torch.cuda.reset_accumulated_host_memory_stats`).
    pub fn reset_accumulated_pinned_memory_stats(&self) -> Result<()> {
        self.pinned_pool()?.inspect(|pool| pool.reset_accumulated_stats());
        Ok(())
    }

    /// Gives the pinned memory that no transfer uses back to the driver, except the reserve of
    /// `pinned_reserve_segment_size_mb`.
    pub fn empty_pinned_cache(&self) -> Result<()> {
        self.pinned_pool()?.inspect(|pool| pool.empty_cache());
        Ok(())
    }

    fn pinned_pool(&self) -> Result<Option<&'static Pool>> {
        self.known()?;
        Ok(staging::existing_pool(*self))
    }
}

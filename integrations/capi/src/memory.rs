//! Device memory: statistics, limits and snapshots.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_void};
use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};

use claystone::storage::{
    Config, ContextLevel, DeviceStats, HistoryOptions, OutOfMemoryEvent, PeakScope, PoolStats, Recording, Registration,
    ScopePeak, Stat, set_context,
};

use crate::device::{device, number as device_number};
use crate::pointers::{borrow, handle, output, release, text};
use crate::status::{ClaystoneStatus, Fault, guard};

/// Bytes that claystone allocated and the caller owns; `claystone_bytes_free` frees them. A zero byte, which `length` does not count,
/// follows them, so that a text is a C string.
#[repr(C)]
#[derive(Debug)]
pub struct ClaystoneBytes {
    /// The first byte.
    pub data: *mut u8,
    /// The number of bytes.
    pub length: usize,
}

impl ClaystoneBytes {
    pub(crate) fn new(mut bytes: Vec<u8>) -> ClaystoneBytes {
        let length = bytes.len();
        bytes.push(0);
        ClaystoneBytes { data: Box::into_raw(bytes.into_boxed_slice()).cast(), length }
    }
}

/// Frees bytes and sets `data` to null, so that freeing them again does nothing. Null is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_bytes_free(bytes: *mut ClaystoneBytes) {
    // SAFETY: the caller promises a pointer that is null, or valid for reading and writing.
    let Some(bytes) = (unsafe { bytes.as_mut() }) else { return };
    let ClaystoneBytes { data, length } =
        std::mem::replace(bytes, ClaystoneBytes { data: std::ptr::null_mut(), length: 0 });
    if !data.is_null() {
        // SAFETY: the caller promises that `ClaystoneBytes::new` made both fields, from a box of `length` bytes and a zero byte.
        drop(unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(data, length + 1)) });
    }
}

/// The formats of a memory snapshot.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaystoneSnapshotFormat {
    /// A pickle for PyTorch's memory viewer.
    Pickle = 0,
    /// JSON.
    Json = 1,
}

/// The memory statistics of a device as a JSON object of integers with the names of `torch.cuda.memory_stats`, such as
/// "allocated_bytes.all.current".
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_memory_stats(number: i32, json: *mut ClaystoneBytes) -> ClaystoneStatus {
    guard("claystone_memory_stats", || {
        // SAFETY: the caller promises a pointer that is null or valid for writing.
        let json = unsafe { output(json, "json")? };
        json.write(ClaystoneBytes::new(stats_json(&device(number)?.memory_stats()?).into_bytes()));
        Ok(())
    })
}

/// A JSON object of integers.
#[derive(Default)]
struct Numbers(String);

impl Numbers {
    fn number(&mut self, name: &str, value: u64) {
        let before = if self.0.is_empty() { "{" } else { "," };
        _ = write!(self.0, "{before}\"{name}\":{value}");
    }

    fn stat(&mut self, name: &str, stat: Stat) {
        self.number(&format!("{name}.current"), stat.current);
        self.number(&format!("{name}.peak"), stat.peak);
        self.number(&format!("{name}.allocated"), stat.allocated);
        self.number(&format!("{name}.freed"), stat.freed);
    }

    fn json(self) -> String {
        self.0 + "}"
    }
}

fn stats_json(stats: &DeviceStats) -> String {
    let mut numbers = Numbers::default();
    let pools: [(&str, &PoolStats); 3] =
        [("all", &stats.total), ("small_pool", &stats.small_pool), ("large_pool", &stats.large_pool)];
    for (pool, stats) in pools {
        numbers.stat(&format!("allocation.{pool}"), stats.allocation);
        numbers.stat(&format!("segment.{pool}"), stats.segment);
        numbers.stat(&format!("active.{pool}"), stats.active);
        numbers.stat(&format!("inactive_split.{pool}"), stats.inactive_split);
        numbers.stat(&format!("allocated_bytes.{pool}"), stats.allocated_bytes);
        numbers.stat(&format!("reserved_bytes.{pool}"), stats.reserved_bytes);
        numbers.stat(&format!("active_bytes.{pool}"), stats.active_bytes);
        numbers.stat(&format!("inactive_split_bytes.{pool}"), stats.inactive_split_bytes);
        numbers.stat(&format!("requested_bytes.{pool}"), stats.requested_bytes);
    }
    numbers.stat("oversize_allocations", stats.oversize_allocations);
    numbers.stat("oversize_segments", stats.oversize_segments);
    numbers.stat("spilled_bytes.all", stats.spilled_bytes);
    numbers.number("num_spills", stats.num_spills);
    numbers.number("num_returns", stats.num_returns);
    numbers.number("num_alloc_retries", stats.num_alloc_retries);
    numbers.number("num_ooms", stats.num_ooms);
    numbers.number("num_sync_all_streams", stats.num_sync_all_streams);
    numbers.number("num_device_alloc", stats.num_device_alloc);
    numbers.number("num_device_free", stats.num_device_free);
    numbers.number("max_split_size", stats.max_split_size);
    numbers.json()
}

/// Resets every peak of a device's statistics to the current value.
#[unsafe(no_mangle)]
pub extern "C" fn claystone_memory_reset_peak(number: i32) -> ClaystoneStatus {
    guard("claystone_memory_reset_peak", || Ok(device(number)?.reset_peak_stats()?))
}

/// Resets the accumulated sums and counts of a device's statistics to zero.
#[unsafe(no_mangle)]
pub extern "C" fn claystone_memory_reset_accumulated(number: i32) -> ClaystoneStatus {
    guard("claystone_memory_reset_accumulated", || Ok(device(number)?.reset_accumulated_stats()?))
}

/// Returns all unused memory segments of a device to the driver.
#[unsafe(no_mangle)]
pub extern "C" fn claystone_memory_empty_cache(number: i32) -> ClaystoneStatus {
    guard("claystone_memory_empty_cache", || Ok(device(number)?.empty_cache()?))
}

/// Limits a device's allocator to this fraction, 0 to 1, of the device's memory. Memory already reserved is kept.
#[unsafe(no_mangle)]
pub extern "C" fn claystone_memory_set_fraction(number: i32, fraction: f64) -> ClaystoneStatus {
    guard("claystone_memory_set_fraction", || Ok(device(number)?.set_memory_fraction(fraction)?))
}

/// The detail of the history that a device's allocator records.
#[repr(C)]
#[derive(Debug)]
pub struct ClaystoneHistory {
    /// 0: nothing. 1: the origin of live blocks, which snapshots show. 2: also the latest events.
    pub recording: i32,
    /// Which entries have a context, the call stack and the names of `claystone_annotate`. 0: none. 1: live blocks. 2: also events that
    /// allocate. 3: all events.
    pub context: i32,
    /// Whether contexts include call stacks.
    pub stacks: bool,
    /// Whether to discard the events recorded so far.
    pub clear: bool,
    /// The number of latest events to keep, at least 1.
    pub max_entries: usize,
}

/// Starts or stops recording the events of a device's allocator.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_memory_record_history(
    number: i32,
    history: *const ClaystoneHistory,
) -> ClaystoneStatus {
    guard("claystone_memory_record_history", || {
        // SAFETY: the caller promises a pointer that is null or valid for reading.
        let history = unsafe { borrow(history, "history")? };
        let recordings = [Recording::Off, Recording::State, Recording::All];
        let contexts = [ContextLevel::Never, ContextLevel::State, ContextLevel::Alloc, ContextLevel::All];
        let number_of = |what: &str, number: i32| Fault::Argument(format!("{what} cannot be {number}"));
        let at = |number: i32| usize::try_from(number).unwrap_or(usize::MAX);
        let options = HistoryOptions::default()
            .enabled(*recordings.get(at(history.recording)).ok_or_else(|| number_of("recording", history.recording))?)
            .context(*contexts.get(at(history.context)).ok_or_else(|| number_of("context", history.context))?)
            .stacks(history.stacks)
            .max_entries(history.max_entries)
            .clear_history(history.clear);
        Ok(device(number)?.record_memory_history(options)?)
    })
}

/// Checks a text for `CLAYSTONE_ALLOC_CONF`: an error names the key that is unknown, has no meaning or has a value that is not allowed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_memory_check_config(config: *const c_char) -> ClaystoneStatus {
    guard("claystone_memory_check_config", || {
        // SAFETY: the caller promises a string or null.
        unsafe { text(config, "config")? }.parse::<Config>()?;
        Ok(())
    })
}

/// Sets the name that encloses the names of all later events of this thread in memory histories. Null or an empty text removes the name.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_memory_set_context(name: *const c_char) -> ClaystoneStatus {
    guard("claystone_memory_set_context", || {
        // SAFETY: the caller promises a string or null.
        set_context(if name.is_null() { "" } else { unsafe { text(name, "name")? } });
        Ok(())
    })
}

/// The statistics of the pinned memory held for a device's transfers as a JSON object of integers with the names of
/// `torch.cuda.host_memory_stats`. All zeros for the CPU device and for devices that share the host's memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_pinned_memory_stats(number: i32, json: *mut ClaystoneBytes) -> ClaystoneStatus {
    guard("claystone_pinned_memory_stats", || {
        // SAFETY: the caller promises a pointer that is null or valid for writing.
        let json = unsafe { output(json, "json")? };
        let stats = device(number)?.pinned_memory_stats()?;
        let mut numbers = Numbers::default();
        numbers.stat("active_requests", stats.active_requests);
        numbers.stat("active_bytes", stats.active_bytes);
        numbers.stat("allocations", stats.allocations);
        numbers.stat("allocated_bytes", stats.allocated_bytes);
        for (name, time) in [("host_alloc_time", stats.host_alloc_time), ("host_free_time", stats.host_free_time)] {
            for (part, value) in
                [("total", time.total), ("max", time.max), ("min", time.min), ("count", time.count), ("avg", time.avg)]
            {
                numbers.number(&format!("{name}.{part}"), value);
            }
        }
        numbers.number("num_host_alloc", stats.num_host_alloc);
        numbers.number("num_host_free", stats.num_host_free);
        json.write(ClaystoneBytes::new(numbers.json().into_bytes()));
        Ok(())
    })
}

/// Sets the peaks of `claystone_pinned_memory_stats` to the current values.
#[unsafe(no_mangle)]
pub extern "C" fn claystone_pinned_memory_reset_peak(number: i32) -> ClaystoneStatus {
    guard("claystone_pinned_memory_reset_peak", || Ok(device(number)?.reset_peak_pinned_memory_stats()?))
}

/// Sets the sums and counts of `claystone_pinned_memory_stats` to zero.
#[unsafe(no_mangle)]
pub extern "C" fn claystone_pinned_memory_reset_accumulated(number: i32) -> ClaystoneStatus {
    guard("claystone_pinned_memory_reset_accumulated", || Ok(device(number)?.reset_accumulated_pinned_memory_stats()?))
}

/// Returns pinned memory that no transfer uses to the driver.
#[unsafe(no_mangle)]
pub extern "C" fn claystone_pinned_memory_empty_cache(number: i32) -> ClaystoneStatus {
    guard("claystone_pinned_memory_empty_cache", || Ok(device(number)?.empty_pinned_cache()?))
}

/// An allocation that failed for lack of memory.
#[repr(C)]
#[derive(Debug)]
pub struct ClaystoneOutOfMemory {
    /// The device's number.
    pub device: i32,
    /// The bytes requested.
    pub requested: usize,
    /// The most bytes of segments that the allocator may hold.
    pub allowed: u64,
    /// The bytes of the device's memory that the allocator does not hold.
    pub device_free: u64,
}

/// A function that is called for failed allocations, and its data.
struct Observer {
    observe: unsafe extern "C" fn(data: *mut c_void, failed: *const ClaystoneOutOfMemory),
    data: *mut c_void,
}

// SAFETY: the C program promises that any thread may call the function with its data, several at a time.
unsafe impl Send for Observer {}
// SAFETY: as above.
unsafe impl Sync for Observer {}

impl Observer {
    fn call(&self, event: &OutOfMemoryEvent) {
        let failed = ClaystoneOutOfMemory {
            device: device_number(event.device),
            requested: event.requested,
            allowed: event.allowed,
            device_free: event.device_free,
        };
        // SAFETY: the C program promises a function that may be called with its data.
        unsafe { (self.observe)(self.data, &failed) }
    }
}

/// Keeps an observer registered.
pub struct ClaystoneObserver(#[expect(dead_code, reason = "held")] Registration);

/// Calls `observe(data, failed)` on the allocating thread when an allocation of the device fails for lack of memory, before the error is
/// returned, until `claystone_observer_release`. Any thread may call `observe`, which may not be left by an exception or a jump.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_memory_observe_oom(
    number: i32,
    observe: Option<unsafe extern "C" fn(data: *mut c_void, failed: *const ClaystoneOutOfMemory)>,
    data: *mut c_void,
    observer: *mut *mut ClaystoneObserver,
) -> ClaystoneStatus {
    guard("claystone_memory_observe_oom", || {
        // SAFETY: the caller promises a pointer that is null or valid for writing.
        let observer = unsafe { output(observer, "observer")? };
        let function = Observer { observe: observe.ok_or_else(|| Fault::Argument("observe is null".into()))?, data };
        let registration = device(number)?.add_oom_observer(Box::new(move |event| function.call(event)))?;
        observer.write(handle(ClaystoneObserver(registration)));
        Ok(())
    })
}

/// Ends the calls of an observer, without waiting for a call in progress; null is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_observer_release(observer: *mut ClaystoneObserver) {
    // SAFETY: the caller promises an unreleased handle.
    unsafe { release("claystone_observer_release", observer) }
}

/// A scope whose most memory in use is measured.
pub struct ClaystonePeakScope(PeakScope);

/// The most bytes of a device in use at once within a scope: of blocks, of segments held from the driver, and as requested. The three
/// peaks may have been at different times.
#[repr(C)]
#[derive(Debug)]
pub struct ClaystonePeak {
    /// The bytes of blocks: requests rounded up.
    pub allocated: u64,
    /// The bytes of segments held from the driver.
    pub reserved: u64,
    /// The bytes requested.
    pub requested: u64,
}

/// Begins a scope; claystone_peak_scope_release ends it. Of two scopes of a device, the inner must end first. Peaks of outer scopes and
/// of claystone_memory_stats are as without the scope.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_peak_scope_begin(
    number: i32,
    scope: *mut *mut ClaystonePeakScope,
) -> ClaystoneStatus {
    guard("claystone_peak_scope_begin", || {
        // SAFETY: the caller promises a pointer that is null or valid for writing.
        let scope = unsafe { output(scope, "scope")? };
        scope.write(handle(ClaystonePeakScope(PeakScope::begin(device(number)?)?)));
        Ok(())
    })
}

/// The peaks since the scope began.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_peak_scope_read(
    scope: *const ClaystonePeakScope,
    peak: *mut ClaystonePeak,
) -> ClaystoneStatus {
    guard("claystone_peak_scope_read", || {
        // SAFETY: the caller promises a handle or null, and a pointer that is null or valid for writing.
        let (scope, output) = unsafe { (borrow(scope, "scope")?, output(peak, "peak")?) };
        let ScopePeak { allocated, reserved, requested, .. } = scope.0.peak()?;
        output.write(ClaystonePeak { allocated, reserved, requested });
        Ok(())
    })
}

/// Ends a scope; null is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_peak_scope_release(scope: *mut ClaystonePeakScope) {
    // SAFETY: the caller promises an unreleased handle.
    unsafe { release("claystone_peak_scope_release", scope) }
}

/// The devices whose failed allocations save a snapshot.
static ON_OOM: Mutex<BTreeMap<i32, Registration>> = Mutex::new(BTreeMap::new());

/// Saves a snapshot to `path` when an allocation of the device fails for lack of memory, before the error is returned. The name ends in
/// .pickle, .pkl or .json. Records the history with call stacks from now on, unless it is recorded already. Replaces an earlier path of
/// the device; with null, no snapshots are saved any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_memory_snapshot_on_oom(number: i32, path: *const c_char) -> ClaystoneStatus {
    guard("claystone_memory_snapshot_on_oom", || {
        let device = device(number)?;
        let registration = match path.is_null() {
            true => None,
            // SAFETY: the caller promises a string.
            false => Some(device.snapshot_on_oom(unsafe { text(path, "path")? })?),
        };
        let mut devices = ON_OOM.lock().unwrap_or_else(PoisonError::into_inner);
        devices.remove(&number);
        devices.extend(registration.map(|registration| (number, registration)));
        Ok(())
    })
}

/// A snapshot of a device's allocator: every block, and the recorded events, in a ClaystoneSnapshotFormat. The caller owns the
/// bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_memory_snapshot(
    number: i32,
    format: i32,
    snapshot: *mut ClaystoneBytes,
) -> ClaystoneStatus {
    guard("claystone_memory_snapshot", || {
        // SAFETY: the caller promises a pointer that is null or valid for writing.
        let output = unsafe { output(snapshot, "snapshot")? };
        let snapshot = device(number)?.memory_snapshot()?;
        output.write(ClaystoneBytes::new(match format {
            f if f == ClaystoneSnapshotFormat::Pickle as i32 => snapshot.to_pickle()?,
            f if f == ClaystoneSnapshotFormat::Json as i32 => snapshot.to_json()?.into_bytes(),
            other => return Err(Fault::Argument(format!("{other} is no ClaystoneSnapshotFormat"))),
        }));
        Ok(())
    })
}

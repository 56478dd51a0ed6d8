//! Device memory: statistics, limits and snapshots.

use std::collections::BTreeMap;
use std::ffi::c_char;
use std::fmt::Write as _;
use std::sync::{Mutex, PoisonError};

use claystone::storage::{DeviceStats, HistoryOptions, PeakScope, PoolStats, Recording, Registration, ScopePeak, Stat};

use crate::device::device;
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

fn stats_json(stats: &DeviceStats) -> String {
    let mut json = String::from("{");
    let mut number = |name: &str, value: u64| {
        let comma = if json.len() > 1 { "," } else { "" };
        _ = write!(json, "{comma}\"{name}\":{value}");
    };
    let mut stat = |name: &str, stat: Stat| {
        number(&format!("{name}.current"), stat.current);
        number(&format!("{name}.peak"), stat.peak);
        number(&format!("{name}.allocated"), stat.allocated);
        number(&format!("{name}.freed"), stat.freed);
    };
    let pools: [(&str, &PoolStats); 3] =
        [("all", &stats.total), ("small_pool", &stats.small_pool), ("large_pool", &stats.large_pool)];
    for (pool, stats) in pools {
        stat(&format!("allocation.{pool}"), stats.allocation);
        stat(&format!("segment.{pool}"), stats.segment);
        stat(&format!("active.{pool}"), stats.active);
        stat(&format!("inactive_split.{pool}"), stats.inactive_split);
        stat(&format!("allocated_bytes.{pool}"), stats.allocated_bytes);
        stat(&format!("reserved_bytes.{pool}"), stats.reserved_bytes);
        stat(&format!("active_bytes.{pool}"), stats.active_bytes);
        stat(&format!("inactive_split_bytes.{pool}"), stats.inactive_split_bytes);
        stat(&format!("requested_bytes.{pool}"), stats.requested_bytes);
    }
    stat("oversize_allocations", stats.oversize_allocations);
    stat("oversize_segments", stats.oversize_segments);
    stat("spilled_bytes.all", stats.spilled_bytes);
    number("num_spills", stats.num_spills);
    number("num_returns", stats.num_returns);
    number("num_alloc_retries", stats.num_alloc_retries);
    number("num_ooms", stats.num_ooms);
    number("num_sync_all_streams", stats.num_sync_all_streams);
    number("num_device_alloc", stats.num_device_alloc);
    number("num_device_free", stats.num_device_free);
    number("max_split_size", stats.max_split_size);
    json.push('}');
    json
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

/// Starts to record the `max_entries` latest events of a device's allocator, with call stacks if `stacks` is true. With `max_entries` 0
/// it stops recording and discards the recorded events.
#[unsafe(no_mangle)]
pub extern "C" fn claystone_memory_record_history(number: i32, max_entries: usize, stacks: bool) -> ClaystoneStatus {
    guard("claystone_memory_record_history", || {
        let options = match max_entries {
            0 => HistoryOptions::default().enabled(Recording::Off).clear_history(true),
            _ => HistoryOptions::default().max_entries(max_entries).stacks(stacks),
        };
        Ok(device(number)?.record_memory_history(options)?)
    })
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

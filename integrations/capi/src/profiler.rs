//! The profiler: which operations, driver calls and kernels ran when.

use std::ffi::{CString, c_char, c_void};
use std::sync::{Mutex, PoisonError};

use claystone::profiler::{Category, Event, Lane, Profile, Profiler, ProfilerOptions};
use claystone::storage::annotate;

use crate::device::{CLAYSTONE_CPU, number};
use crate::memory::ClaystoneBytes;
use crate::pointers::{borrow, handle, output, release, text};
use crate::status::{ClaystoneStatus, Fault, guard};

/// The running profiler, if any.
static RUNNING: Mutex<Option<Profiler>> = Mutex::new(None);

/// A handle on a finished recording.
pub struct ClaystoneProfile {
    profile: Profile,
    /// The name and the annotation of each event, as C strings.
    names: Vec<[CString; 2]>,
}

/// The kind of an event of a profile.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaystoneCategory {
    /// An operation on the host: its submission to an OpenCL device, or its computation on the CPU device.
    Operation = 0,
    /// A driver call that submits a command.
    Launch = 1,
    /// The host waits for a device.
    Wait = 2,
    /// A kernel on a device.
    Kernel = 3,
    /// A copy within a device.
    Copy = 4,
    /// A fill on a device.
    Fill = 5,
    /// A copy from a device to the host.
    Read = 6,
    /// A copy from the host to a device.
    Write = 7,
    /// Any other event.
    Other = 8,
}

/// An event of a profile.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ClaystoneProfileEvent {
    /// A ClaystoneCategory.
    pub category: i32,
    /// The name of an operation in PyTorch, of a kernel in its program, or of another command in the driver. The profile owns the string.
    pub name: *const c_char,
    /// The number of the device that does the work or that the host works for; CLAYSTONE_CPU if there is none.
    pub device: i32,
    /// True if the event ran on a stream of an OpenCL device, false if it ran on a host thread.
    pub on_stream: bool,
    /// The number of the stream or thread.
    pub lane: u32,
    /// Nanoseconds from the start of the profiler to the start of the event.
    pub start: i64,
    /// The duration in nanoseconds.
    pub duration: i64,
    /// Bytes read and written, if known; otherwise 0.
    pub bytes: u64,
    /// A number that a launch shares with its command on the device; 0 for other events.
    pub launch: u64,
    /// The enclosing names of `claystone_annotate`, outermost first, joined by slashes. The profile owns the string.
    pub annotation: *const c_char,
}

/// Starts the profiler, which records the whole process; only one can run at a time. Waits until all devices are idle.
#[unsafe(no_mangle)]
pub extern "C" fn claystone_profiler_start() -> ClaystoneStatus {
    guard("claystone_profiler_start", || {
        let mut running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        if running.is_some() {
            return Err(Fault::Argument("the profiler is already running".into()));
        }
        *running = Some(Profiler::start_with(ProfilerOptions::default().copy_rate(false))?);
        Ok(())
    })
}

/// Stops the profiler and returns its recording. Waits until all devices are idle. The caller owns the handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_profiler_stop(profile: *mut *mut ClaystoneProfile) -> ClaystoneStatus {
    guard("claystone_profiler_stop", || {
        // SAFETY: the caller promises a pointer that is null or valid for writing.
        let output = unsafe { output(profile, "profile")? };
        let running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner).take();
        let profile = running.ok_or_else(|| Fault::Argument("the profiler is not running".into()))?.stop();
        let text = |text: &str| CString::new(text.replace('\0', "\\0")).unwrap_or_default();
        let names = |event: &Event| [&event.name, &event.annotation].map(|name| text(name));
        let names = profile.events().iter().map(names).collect();
        output.write(handle(ClaystoneProfile { profile, names }));
        Ok(())
    })
}

/// The number of events of a profile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_profile_count(
    profile: *const ClaystoneProfile,
    count: *mut usize,
) -> ClaystoneStatus {
    guard("claystone_profile_count", || {
        // SAFETY: the caller promises a live handle, and a pointer that is valid for writing.
        let (profile, count) = unsafe { (borrow(profile, "profile")?, output(count, "count")?) };
        count.write(profile.names.len());
        Ok(())
    })
}

/// Gets an event of a profile by its index; events are sorted by their start.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_profile_event(
    profile: *const ClaystoneProfile,
    index: usize,
    event: *mut ClaystoneProfileEvent,
) -> ClaystoneStatus {
    guard("claystone_profile_event", || {
        // SAFETY: the caller promises a live handle, and a pointer that is valid for writing.
        let (profile, output) = unsafe { (borrow(profile, "profile")?, output(event, "event")?) };
        let (Some(event), Some([name, annotation])) = (profile.profile.events().get(index), profile.names.get(index))
        else {
            return Err(Fault::Argument(format!("there is no event {index}, only {}", profile.names.len())));
        };
        let (on_stream, lane) = match event.lane {
            Lane::Thread(thread) => (false, thread),
            Lane::Stream(_, stream) => (true, stream),
        };
        let nanoseconds = |us: f64| (us * 1e3).round() as i64;
        output.write(ClaystoneProfileEvent {
            category: category(event.category) as i32,
            name: name.as_ptr(),
            device: event.device.map_or(CLAYSTONE_CPU, number),
            on_stream,
            lane,
            start: nanoseconds(event.start_us),
            duration: nanoseconds(event.duration_us),
            bytes: event.bytes,
            launch: event.launch,
            annotation: annotation.as_ptr(),
        });
        Ok(())
    })
}

fn category(category: Category) -> ClaystoneCategory {
    match category {
        Category::Operation => ClaystoneCategory::Operation,
        Category::Launch => ClaystoneCategory::Launch,
        Category::Wait => ClaystoneCategory::Wait,
        Category::Kernel => ClaystoneCategory::Kernel,
        Category::Copy => ClaystoneCategory::Copy,
        Category::Fill => ClaystoneCategory::Fill,
        Category::Read => ClaystoneCategory::Read,
        Category::Write => ClaystoneCategory::Write,
        _ => ClaystoneCategory::Other,
    }
}

/// The profile as a trace for `claystone profile`, Perfetto and `chrome://tracing`. The caller owns the bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_profile_trace(
    profile: *const ClaystoneProfile,
    json: *mut ClaystoneBytes,
) -> ClaystoneStatus {
    guard("claystone_profile_trace", || {
        // SAFETY: the caller promises a live handle, and a pointer that is valid for writing.
        let (profile, json) = unsafe { (borrow(profile, "profile")?, output(json, "json")?) };
        let mut bytes = Vec::new();
        profile.profile.write(&mut bytes).map_err(|e| Fault::Argument(e.to_string()))?;
        json.write(ClaystoneBytes::new(bytes));
        Ok(())
    })
}

/// Calls `run(data)` under a name. Profiles and the memory histories of devices show when it began and ended, and label the work of
/// the thread meanwhile with the name. Each distinct name is kept for the life of the process, so use few. `run` must return: leaving
/// it by an exception or a jump is undefined behaviour.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_annotate(
    name: *const c_char,
    run: Option<unsafe extern "C" fn(*mut c_void)>,
    data: *mut c_void,
) -> ClaystoneStatus {
    guard("claystone_annotate", || {
        let run = run.ok_or_else(|| Fault::Argument("run is null".into()))?;
        // SAFETY: the caller promises a string.
        let name = unsafe { text(name, "name")? };
        // SAFETY: the caller promises a function that may be called with this data.
        annotate(name, || unsafe { run(data) });
        Ok(())
    })
}

/// Gives a handle on a profile back; null is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_profile_release(profile: *mut ClaystoneProfile) {
    // SAFETY: the caller promises an unreleased handle.
    unsafe { release("claystone_profile_release", profile) }
}

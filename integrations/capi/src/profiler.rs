//! What the process did, and when.

use std::ffi::{CString, c_char, c_void};
use std::sync::{Mutex, PoisonError};

use claystone::profiler::{Category, Event, Lane, Profile, Profiler, ProfilerOptions};
use claystone::storage::annotate;

use crate::device::{CLAYSTONE_CPU, number};
use crate::memory::ClaystoneBytes;
use crate::pointers::{borrow, handle, output, release, text};
use crate::status::{ClaystoneStatus, Fault, guard};

/// The profiler that records, if one does.
static RUNNING: Mutex<Option<Profiler>> = Mutex::new(None);

/// A handle on what was recorded.
pub struct ClaystoneProfile {
    profile: Profile,
    /// The names of its events and their annotations, as C strings.
    names: Vec<[CString; 2]>,
}

/// What an event of a profile is about.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ClaystoneCategory {
    /// An operation on the host: while it is submitted to an OpenCL device, or while the CPU device computes it.
    Operation = 0,
    /// A call of the driver that submits a command.
    Launch = 1,
    /// The host waits for a device.
    Wait = 2,
    /// A kernel on a device.
    Kernel = 3,
    /// Bytes are copied within a device.
    Copy = 4,
    /// Bytes are filled on a device.
    Fill = 5,
    /// Bytes go from a device to the host.
    Read = 6,
    /// Bytes go from the host to a device.
    Write = 7,
    /// Anything else.
    Other = 8,
}

/// An event of a profile.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ClaystoneProfileEvent {
    /// A ClaystoneCategory.
    pub category: i32,
    /// PyTorch's name of an operation, of a kernel its program's, of other commands the driver's: the profile's, as long as that lives.
    pub name: *const c_char,
    /// The number of the device that works, or that the host works for; the CPU device's where there is none.
    pub device: i32,
    /// Whether it happened on a stream of an OpenCL device, and not on a thread of the host.
    pub on_stream: bool,
    /// The number of the stream or of the thread.
    pub lane: u32,
    /// Nanoseconds from when the profiler was started to when the event began.
    pub start: i64,
    /// For how many nanoseconds it ran.
    pub duration: i64,
    /// Bytes that it reads and writes, where they are known.
    pub bytes: u64,
    /// What a launch and its command on the device have in common; 0 for other events.
    pub launch: u64,
    /// The names of `claystone_annotate` that it happened under, the outermost first, joined by slashes; as `name`.
    pub annotation: *const c_char,
}

/// Begins to record what the process does. Waits for what devices have to do. One profiler at a time sees the whole process.
#[unsafe(no_mangle)]
pub extern "C" fn claystone_profiler_start() -> ClaystoneStatus {
    guard("claystone_profiler_start", || {
        let mut running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner);
        if running.is_some() {
            return Err(Fault::Argument("it records already".into()));
        }
        *running = Some(Profiler::start_with(ProfilerOptions { copy_rate: false, ..Default::default() })?);
        Ok(())
    })
}

/// Ends the recording, and gives what was recorded. Waits for what devices have to do. The handle is the caller's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_profiler_stop(profile: *mut *mut ClaystoneProfile) -> ClaystoneStatus {
    guard("claystone_profiler_stop", || {
        // SAFETY: good for writing, says the caller.
        let output = unsafe { output(profile, "profile")? };
        let running = RUNNING.lock().unwrap_or_else(PoisonError::into_inner).take();
        let profile = running.ok_or_else(|| Fault::Argument("nothing is recorded".into()))?.stop();
        let text = |text: &str| CString::new(text.replace('\0', "\\0")).unwrap_or_default();
        let names = |event: &Event| [&event.name, &event.annotation].map(|name| text(name));
        let names = profile.events().iter().map(names).collect();
        output.write(handle(ClaystoneProfile { profile, names }));
        Ok(())
    })
}

/// How many events a profile has.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_profile_count(
    profile: *const ClaystoneProfile,
    count: *mut usize,
) -> ClaystoneStatus {
    guard("claystone_profile_count", || {
        // SAFETY: a handle that lives, and a pointer that is good for writing, says the caller.
        let (profile, count) = unsafe { (borrow(profile, "profile")?, output(count, "count")?) };
        count.write(profile.names.len());
        Ok(())
    })
}

/// An event of a profile, by its index in the order in which they began.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_profile_event(
    profile: *const ClaystoneProfile,
    index: usize,
    event: *mut ClaystoneProfileEvent,
) -> ClaystoneStatus {
    guard("claystone_profile_event", || {
        // SAFETY: a handle that lives, and a pointer that is good for writing, says the caller.
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

/// A profile as the trace that `claystone profile`, Perfetto and `chrome://tracing` read. The bytes are the caller's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_profile_trace(
    profile: *const ClaystoneProfile,
    json: *mut ClaystoneBytes,
) -> ClaystoneStatus {
    guard("claystone_profile_trace", || {
        // SAFETY: a handle that lives, and a pointer that is good for writing, says the caller.
        let (profile, json) = unsafe { (borrow(profile, "profile")?, output(json, "json")?) };
        let mut bytes = Vec::new();
        profile.profile.write(&mut bytes).map_err(|e| Fault::Argument(e.to_string()))?;
        json.write(ClaystoneBytes::new(bytes));
        Ok(())
    })
}

/// Calls `run` with `data`, under a name: profiles, and the memory histories of devices, show when it began and ended, and what
/// the thread did meanwhile carries the name. Each name is remembered for the life of the process: use few. `run` has to return; to
/// leave it by an exception or a jump is undefined behaviour.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_annotate(
    name: *const c_char,
    run: Option<unsafe extern "C" fn(*mut c_void)>,
    data: *mut c_void,
) -> ClaystoneStatus {
    guard("claystone_annotate", || {
        let run = run.ok_or_else(|| Fault::Argument("run is null".into()))?;
        // SAFETY: a text, says the caller.
        let name = unsafe { text(name, "name")? };
        // SAFETY: a function that may be called with this data, says the caller.
        annotate(name, || unsafe { run(data) });
        Ok(())
    })
}

/// Gives a handle on a profile back; null is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_profile_release(profile: *mut ClaystoneProfile) {
    // SAFETY: a handle that was not released, says the caller.
    unsafe { release("claystone_profile_release", profile) }
}

//! `CLAYSTONE_PROFILE=trace.json`: a profile of the whole of any program.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::{env, process};

use super::{build, copy_rate};
use crate::Device;
use crate::device::profiler as recorder;
use crate::device::set_profiling;

/// Where the profile goes, when it began, and the process that it is of.
struct Wanted {
    file: PathBuf,
    began: u64,
    process: u32,
}

static WANTED: OnceLock<Option<Wanted>> = OnceLock::new();

/// Begins the profile that the environment asks for, if it has not begun; whether it asks for one. To be called before a
/// device is opened.
pub(crate) fn begin() -> bool {
    let wanted = WANTED.get_or_init(|| {
        let file = PathBuf::from(env::var_os("CLAYSTONE_PROFILE").filter(|file| !file.is_empty())?);
        if !recorder::begin(super::ProfilerOptions::default().max_events) {
            tracing::warn!("CLAYSTONE_PROFILE is ignored: the program profiles itself");
            return None;
        }
        recorder::at_exit(write);
        if let Err(error) = set_profiling() {
            tracing::warn!(%error, "commands of devices that are open already are not timed");
        }
        Some(Wanted { file, began: recorder::now(), process: process::id() })
    });
    wanted.is_some()
}

/// To be called when a device is about to have its first memory.
pub(crate) fn first_use(device: Device) {
    if begin() {
        recorder::unrecorded(|| copy_rate::measure(device)); // at the exit no driver may be called
    }
}

/// Writes the profile, after the devices' last commands.
extern "C" fn write() {
    // A forked child exits with what its parent recorded.
    let Some(Some(wanted)) = WANTED.get().filter(|w| w.as_ref().is_some_and(|w| w.process == process::id())) else {
        return;
    };
    recorder::pause();
    let _ = set_profiling(); // records the last commands, unless the devices' own handler has before
    let mut profile = build::profile(recorder::take(), wanted.began, recorder::now());
    for device in &mut profile.devices {
        device.copy_bytes_per_s = copy_rate::known(device.device);
    }
    if let Err(error) = profile.save(&wanted.file) {
        eprintln!("claystone: CLAYSTONE_PROFILE was not written: {error}");
    }
}

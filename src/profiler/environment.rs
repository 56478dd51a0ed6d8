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

/// To be called when a device is about to have its first memory: begins the profile that the environment asks for.
pub(crate) fn first_use(device: Device) {
    let wanted = WANTED.get_or_init(|| {
        let file = PathBuf::from(env::var_os("CLAYSTONE_PROFILE").filter(|file| !file.is_empty())?);
        if !recorder::begin(super::ProfilerOptions::default().max_events) {
            tracing::warn!("CLAYSTONE_PROFILE is ignored: the program profiles itself");
            return None;
        }
        recorder::at_exit(write);
        Some(Wanted { file, began: recorder::now(), process: process::id() })
    });
    if wanted.is_some() {
        if let Err(error) = set_profiling(true) {
            tracing::warn!(%error, "a device's commands are not timed");
        }
        recorder::unrecorded(|| copy_rate::measure(device)); // at the exit no driver may be called
    }
}

/// Writes the profile, after the devices' last commands.
extern "C" fn write() {
    // A forked child exits with what its parent recorded.
    let Some(Some(wanted)) = WANTED.get().filter(|w| w.as_ref().is_some_and(|w| w.process == process::id())) else {
        return;
    };
    let _ = set_profiling(false); // records the last commands, unless the devices' own handler has before
    let mut profile = build::profile(recorder::take(), wanted.began, recorder::now());
    for device in &mut profile.devices {
        device.copy_bytes_per_s = copy_rate::known(device.device);
    }
    if let Err(error) = profile.save(&wanted.file) {
        eprintln!("claystone: CLAYSTONE_PROFILE was not written: {error}");
    }
}

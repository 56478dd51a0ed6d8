//! Profiles a whole program: `CLAYSTONE_PROFILE=trace.json`.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::{env, process};

use super::{build, measure_rate, measured_rate};
use crate::Device;
use crate::device::profiler as recorder;
use crate::device::set_profiling;

/// The profile of the whole program: its file, its start, and the process that writes it.
struct EnvironmentProfile {
    file: PathBuf,
    began: u64,
    process: u32,
}

static ENVIRONMENT_PROFILE: OnceLock<Option<EnvironmentProfile>> = OnceLock::new();

/// Begins the profile that `CLAYSTONE_PROFILE` requests, unless it has begun. Returns true if the variable requests a profile. Call
/// before a device is opened.
pub(crate) fn begin_from_environment() -> bool {
    let wanted = ENVIRONMENT_PROFILE.get_or_init(|| {
        let file = PathBuf::from(env::var_os("CLAYSTONE_PROFILE").filter(|file| !file.is_empty())?);
        if !recorder::begin(super::ProfilerOptions::default().max_events) {
            tracing::warn!("CLAYSTONE_PROFILE is ignored, because the program records a profile itself");
            return None;
        }
        recorder::at_exit(write_profile);
        if let Err(error) = set_profiling() {
            tracing::warn!(%error, "commands of devices that were opened earlier are not timed");
        }
        Some(EnvironmentProfile { file, began: recorder::now(), process: process::id() })
    });
    wanted.is_some()
}

/// Measures the device's copy rate for the profile. Called before the device's first memory is allocated.
pub(crate) fn measure_at_first_use(device: Device) {
    if begin_from_environment() {
        recorder::without_recording(|| measure_rate(device)); // now, because no driver may be called at exit
    }
}

/// Writes the profile after the devices' last commands.
extern "C" fn write_profile() {
    // A forked child must not write the records of its parent.
    let Some(Some(wanted)) =
        ENVIRONMENT_PROFILE.get().filter(|w| w.as_ref().is_some_and(|w| w.process == process::id()))
    else {
        return;
    };
    recorder::pause();
    let _ = set_profiling(); // records the last commands, unless the devices' exit handler has already done so
    let mut profile = build::build_profile(recorder::take(), wanted.began, recorder::now());
    for device in &mut profile.devices {
        device.copy_bytes_per_s = measured_rate(device.device);
    }
    if let Err(error) = profile.save(&wanted.file) {
        eprintln!("claystone: CLAYSTONE_PROFILE was not written: {error}");
    }
}

//! Devices must have the same numbers in every process, even if calls fail during discovery.

use std::time::Duration;

use claystone::Device;

use crate::stand_in::{self, ALWAYS, Faults, Kind};

const TEST: &str = "numbers::failures_during_discovery_do_not_change_device_numbers";

/// Returns the device names in order, in a child process where calls of the function `name` fail from call `nth` on.
fn device_names(choice: &str, name: &str, nth: u64) -> String {
    // The device with more compute units is the second on its platform, but must get the first number.
    let nth = nth.to_string();
    let variables =
        [("POCL_DEVICES", "basic pthread"), ("CLAYSTONE_DEVICES", choice), ("NUMBERS", &nth), ("CALL", name)];
    let ended = stand_in::run(TEST, Kind::Real, &variables, Duration::from_secs(60));
    let line = ended.text.lines().find_map(|line| line.split_once("the devices: "));
    line.unwrap_or_else(|| panic!("{:?}: {}", ended.status, ended.text)).1.to_owned()
}

#[test]
fn failures_during_discovery_do_not_change_device_numbers() {
    if let Some(faults) = Faults::here() {
        let nth = std::env::var("NUMBERS").unwrap().parse().unwrap();
        if nth > 0 {
            faults.fail(&std::env::var("CALL").unwrap(), nth, ALWAYS, -5);
            let _ = Device::all();
            faults.clear();
        }
        let names: Vec<String> = Device::all().iter().map(|d| d.info().unwrap().name).collect();
        println!("the devices: {}", names.join(", "));
        return;
    }
    for choice in ["", "0:0,0:1", "0:1", "pthread"] {
        let right = device_names(choice, "clGetDeviceInfo", 0);
        for nth in [1, 3, 9, 13, 15, 31] {
            assert_eq!(device_names(choice, "clGetDeviceInfo", nth), right, "{choice}, from call {nth} on");
        }
        assert_eq!(device_names(choice, "clGetDeviceIDs", 1), right, "{choice}");
    }
}

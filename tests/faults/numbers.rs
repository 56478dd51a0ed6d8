//! Devices have the same numbers in every process, whatever fails while they are given out.

use std::time::Duration;

use claystone::Device;

use crate::stand_in::{self, ALWAYS, Faults, Kind};

const TEST: &str = "numbers::devices_have_their_numbers_whatever_fails_first";

/// The names of the devices in order, found after calls of a function failed from the `nth` on.
fn names(choice: &str, name: &str, nth: u64) -> String {
    // The one with more compute units comes second on its platform and is the first device.
    let nth = nth.to_string();
    let variables =
        [("POCL_DEVICES", "basic pthread"), ("CLAYSTONE_DEVICES", choice), ("NUMBERS", &nth), ("CALL", name)];
    let ended = stand_in::run(TEST, Kind::Real, &variables, Duration::from_secs(60));
    let line = ended.text.lines().find_map(|line| line.split_once("the devices: "));
    line.unwrap_or_else(|| panic!("{:?}: {}", ended.status, ended.text)).1.to_owned()
}

#[test]
fn devices_have_their_numbers_whatever_fails_first() {
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
        let right = names(choice, "clGetDeviceInfo", 0);
        for nth in [1, 3, 9, 13, 15, 31] {
            assert_eq!(names(choice, "clGetDeviceInfo", nth), right, "{choice}, from call {nth} on");
        }
        assert_eq!(names(choice, "clGetDeviceIDs", 1), right, "{choice}");
    }
}

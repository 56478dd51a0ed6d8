//! Tests of recovery from transient failures, with a library that replaces libOpenCL and fails calls on demand.

#[path = "../../../../tests/stand_in/mod.rs"]
mod stand_in;

use stand_in::{ALWAYS, Faults, Kind};

use crate::device::opencl::discovery::{self, Entry};
use crate::device::opencl::{ClBuffer, ClDevice, open};
use crate::{Device, Error};

const CODES: [i32; 8] = [-4, -5, -6, -11, -14, -36, -58, -61];

fn install(test: &str) -> Option<Faults> {
    Faults::install(&format!("device::opencl::tests::recovery::{test}"), Kind::Real)
}

/// Returns the index, `platform:index` and name of each device.
fn listed(devices: &[Entry]) -> Vec<(usize, (usize, usize), String)> {
    let name = |i, entry: &Entry| entry.found(Device::OpenCL(i)).unwrap().info.name.clone();
    devices.iter().enumerate().map(|(i, entry)| (i, entry.platform_index(), name(i, entry))).collect()
}

fn discovered() -> Vec<(usize, (usize, usize), String)> {
    listed(&discovery::discover("").unwrap_or_else(|e| panic!("{}", e.name())).devices)
}

/// Returns the call and the code that an error names.
fn told<T>(result: crate::Result<T>) -> (&'static str, &'static str) {
    match result {
        Err(Error::OpenCl { call, code, .. }) => (call, code),
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("it succeeds"),
    }
}

#[test]
fn discovery_survives_any_call_that_fails_twice() {
    let Some(faults) = install("discovery_survives_any_call_that_fails_twice") else { return };
    discovered();
    let before = faults.calls("any");
    let devices = discovered();
    let calls = faults.calls("any") - before;
    assert!(!devices.is_empty() && calls > 30, "{calls} calls, {devices:?}");
    for code in CODES {
        for (nth, times) in (1..=calls).flat_map(|nth| [(nth, 1), (nth, 2)]) {
            let injected = faults.injected("any");
            faults.fail("any", nth, times, code);
            assert_eq!(discovered(), devices, "call {nth} failed {times} times with {code}");
            assert!(faults.injected("any") > injected);
        }
    }
}

#[test]
fn a_device_that_does_not_answer_keeps_its_index() {
    let Some(faults) = install("a_device_that_does_not_answer_keeps_its_index") else { return };
    let devices = discovered();
    let before = faults.calls("clGetDeviceInfo");
    discovered();
    let calls = faults.calls("clGetDeviceInfo") - before;
    let (mut refused, mut undescribed) = (0, 0);
    for nth in 1..=calls {
        faults.fail("clGetDeviceInfo", nth, 4, -5);
        match discovery::discover("") {
            // The failed query is needed to order the devices, so discovery must fail.
            Err(e) => {
                assert_eq!((e.call, e.name()), ("clGetDeviceInfo", "CL_OUT_OF_RESOURCES"));
                refused += 1;
            }
            Ok(discovery::Discovery { devices: found, .. }) => {
                let places: Vec<_> = found.iter().map(Entry::platform_index).collect();
                assert_eq!(places, devices.iter().map(|d| d.1).collect::<Vec<_>>());
                let silent: Vec<usize> = (0..found.len()).filter(|&i| !found[i].is_described()).collect();
                let &[i] = &silent[..] else { panic!("call {nth}: {silent:?} are not described") };
                faults.fail("clGetDeviceInfo", 1, ALWAYS, -6);
                let error = found[i].found(Device::OpenCL(i)).err().unwrap();
                assert!(error.to_string().contains("clinfo"), "{error}");
                assert_eq!(told::<()>(Err(error)), ("clGetDeviceInfo", "CL_OUT_OF_HOST_MEMORY"));
                faults.clear();
                assert_eq!(listed(&found), devices, "it is asked again");
                undescribed += 1;
            }
        }
        faults.clear();
        assert_eq!(discovered(), devices, "after call {nth}");
    }
    assert!(refused > 0 && undescribed > 0, "{refused} discoveries refused, {undescribed} devices not described");
}

#[test]
fn a_driver_that_fails_to_list_devices_is_asked_again_at_the_next_use() {
    let Some(faults) = install("a_driver_that_fails_to_list_devices_is_asked_again_at_the_next_use") else { return };
    let first = Device::OpenCL(0);
    for call in ["clGetPlatformIDs", "clGetDeviceIDs"] {
        for code in [-4, -5, -6] {
            faults.fail(call, 1, ALWAYS, code);
            assert_eq!(Device::best(), first, "not silently the CPU");
            assert_eq!(Device::all(), [Device::Cpu]);
            let error = first.info().unwrap_err();
            assert!(!error.to_string().contains("install") && error.to_string().contains("next use"), "{error}");
            assert_eq!(told::<()>(Err(error)).0, call);
        }
        faults.clear();
    }
    assert_eq!(Device::best(), first);
    assert!(first.is_available() && Device::all().len() > 1);
    // The indices must stay the same, whatever calls fail from now on.
    faults.fail("any", 1, ALWAYS, -5);
    assert!(Device::all().len() > 1 && first.info().is_ok());
}

#[test]
fn a_device_opens_despite_failed_calls_and_leaks_nothing() {
    let test = "a_device_opens_despite_failed_calls_and_leaks_nothing";
    let Some(faults) = install(test) else { return };
    let found = discovery::description(0).unwrap();
    let before = faults.calls("any");
    let device = ClDevice::open(0, found).unwrap();
    let calls = faults.calls("any") - before;
    drop(device);
    let live = || {
        let succeeded = |name| (faults.calls(name) - faults.errors(name)) as i64;
        [("clCreateContext", "clReleaseContext"), ("clCreateCommandQueue", "clReleaseCommandQueue")]
            .map(|(create, release)| succeeded(create) - succeeded(release))
    };
    assert_eq!(live(), [0, 0]);
    for (code, nth) in CODES.into_iter().flat_map(|code| (1..=calls).map(move |nth| (code, nth))) {
        for times in [1, 2] {
            faults.fail("any", nth, times, code);
            let opened = ClDevice::open(0, found).unwrap_or_else(|e| panic!("call {nth}, {times} times {code}: {e}"));
            assert!(!opened.is_lost());
            faults.clear();
            drop(opened);
        }
    }
    let leaked = live(); // a failed call may have been a release, which leaks an object
    for (name, nth) in
        [("clCreateContext", 1), ("clCreateCommandQueue", 1), ("clCreateCommandQueue", 2), ("clCreateBuffer", 1)]
    {
        let before = faults.calls("clCreateContext");
        // The first attempt must fail at its call number `nth`, and later attempts at their first such call.
        faults.fail(name, nth, ALWAYS, -6);
        assert_eq!(told(ClDevice::open(0, found)), (name, "CL_OUT_OF_HOST_MEMORY"));
        assert_eq!(faults.calls("clCreateContext") - before, 4, "attempts");
        assert_eq!(live(), leaked, "after {name} failed");
        faults.clear();
        drop(ClDevice::open(0, found).unwrap());
    }
}

#[test]
fn two_failures_in_a_row_do_not_lose_the_device() {
    let Some(faults) = install("two_failures_in_a_row_do_not_lose_the_device") else { return };
    let device = open(0).unwrap();
    let buffer: &'static ClBuffer = Box::leak(Box::new(device.create_buffer(64).unwrap()));
    // Leaked host memory, because failed calls may leave commands that still use it.
    let (ones, read): (&[u8], &mut [u8]) = (Box::leak(Box::new([1; 64])), Box::leak(Box::new([0; 64])));
    let mut work = || {
        device.write(ones, (buffer, 0))?;
        device.fill((buffer, 0), 64, &[2])?;
        device.finish()?;
        device.read((buffer, 0), read)?;
        device.create_buffer(64).map(drop).map_err(|e| device.error(e))
    };
    work().unwrap();
    let before = faults.calls("any");
    work().unwrap();
    let calls = faults.calls("any") - before;
    for (code, nth) in CODES.into_iter().flat_map(|code| (1..=calls).map(move |nth| (code, nth))) {
        for times in [1, 2] {
            faults.fail("any", nth, times, code);
            let _ = work();
            faults.clear();
            assert!(!device.is_lost(), "call {nth} failed {times} times with {code}");
            work().unwrap_or_else(|e| panic!("after call {nth} failed {times} times with {code}: {e}"));
        }
    }
    // If every read fails but mapping works, the device must not count as lost.
    for code in [-5, -14, -36] {
        faults.fail("clEnqueueReadBuffer", 1, ALWAYS, code);
        assert!(matches!(work(), Err(Error::OpenCl { .. })), "{code}");
        faults.clear();
        work().unwrap();
    }
    faults.fail("any", 1, ALWAYS, -36);
    assert!(matches!(work(), Err(Error::DeviceLost { .. })));
    faults.clear();
    assert!(device.is_lost() && matches!(work(), Err(Error::DeviceLost { .. })), "that is for good");
}

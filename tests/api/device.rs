//! Devices: names, selection, and missing devices. Tests that depend on environment variables run the test binary again with only
//! the test `devices_can_be_listed`.

use std::process::Command;

use claystone::{Device, Error};

/// Runs `devices_can_be_listed` in a new process with the given environment variables, and returns its output.
fn listed_with(vars: &[(&str, &str)]) -> String {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["device::devices_can_be_listed", "--exact", "--nocapture"])
        .env_remove("CLAYSTONE_DEVICES")
        .envs(vars.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    text
}

/// Returns the rest of each line of the child process's output that contains `what`.
fn error_message<'a>(output: &'a str, what: &str) -> Vec<&'a str> {
    output.lines().filter_map(|l| l.split_once(what).map(|(_, rest)| rest.trim())).collect()
}

fn names() -> Vec<String> {
    Device::all().iter().filter(|d| **d != Device::Cpu).map(|d| d.info().unwrap().name).collect()
}

/// Prints lines that the other tests parse. Passes in every environment.
#[test]
fn devices_can_be_listed() {
    println!("\nall= {:?}", Device::all());
    println!("best= {}", Device::best());
    names().iter().for_each(|n| println!("name= {n}"));
    let first = Device::OpenCL(0);
    println!("available= {}", first.is_available());
    for error in [first.info().err(), first.synchronize().err()].into_iter().flatten() {
        println!("error= {error}");
    }
    assert_eq!(first.is_available(), Device::best() == first);
    assert_eq!(first.is_available(), first.info().is_ok());
}

#[test]
fn device_names_can_be_parsed() {
    for device in Device::all() {
        assert_eq!(device.to_string().parse::<Device>().unwrap(), device);
    }
    let error = "cuda:0".parse::<Device>().unwrap_err().to_string();
    assert!(error.contains("'cuda:0'") && error.contains("opencl:0"), "{error}");
}

#[test]
fn every_listed_device_is_available() {
    let all = Device::all();
    assert_eq!(all.last(), Some(&Device::Cpu));
    assert_eq!(Device::best(), all[0]);
    for device in all {
        assert!(device.is_available());
        let info = device.info().unwrap();
        assert!(!info.name.is_empty() && info.compute_units > 0 && info.memory > 0 && info.base_alignment > 0);
        assert!(info.to_string().starts_with(&info.name));
        device.synchronize().unwrap();
    }
}

#[test]
fn out_of_range_indices_report_the_number_of_devices() {
    let n = Device::all().len() - 1;
    let beyond = Device::OpenCL(n + 5);
    assert!(!beyond.is_available());
    for error in [beyond.info().unwrap_err(), beyond.synchronize().unwrap_err()] {
        assert!(matches!(&error, Error::NoDevice { device, .. } if *device == beyond));
        let text = error.to_string();
        match n {
            0 => assert!(text.contains("pocl-opencl-icd"), "{text}"),
            1 => assert!(text.contains("one OpenCL device"), "{text}"),
            n => assert!(text.contains(&format!("{n} OpenCL devices")), "{text}"),
        }
    }
}

#[test]
fn a_missing_opencl_library_is_not_an_error() {
    // The loader tries the path in OPENCL_DYLIB_PATH, then the usual library names, of which development packages install the second. Here
    // the first file does not exist and the others are no libraries.
    let broken = tempfile::tempdir().unwrap();
    for name in ["libOpenCL.so.1", "libOpenCL.so"] {
        std::fs::write(broken.path().join(name), "not a library").unwrap();
    }
    let dir = broken.path().to_str().unwrap();
    let text = listed_with(&[("OPENCL_DYLIB_PATH", "/nonexistent"), ("LD_LIBRARY_PATH", dir)]);
    assert_eq!(error_message(&text, "best="), ["cpu"], "{text}");
    assert_eq!(error_message(&text, "all="), ["[Cpu]"]);
    assert_eq!(error_message(&text, "available="), ["false"]);
    let errors = error_message(&text, "error=");
    assert_eq!(errors.len(), 2);
    for part in ["opencl:0", "libOpenCL.so.1", "/nonexistent", "pocl-opencl-icd ocl-icd-libopencl1"] {
        assert!(errors[0].contains(part), "{}", errors[0]);
    }
}

#[test]
fn a_loader_without_drivers_is_not_an_error() {
    let usual = listed_with(&[]);
    if error_message(&usual, "name=").is_empty() {
        return; // the loader may be missing too, which the test above covers
    }
    let empty = tempfile::tempdir().unwrap();
    let text = listed_with(&[("OCL_ICD_VENDORS", empty.path().to_str().unwrap())]);
    let unmoved = error_message(&text, "name=") == error_message(&usual, "name=");
    if unmoved && error_message(&usual, "name=").iter().any(|n| n.contains("NVIDIA")) {
        return; // NVIDIA's images have a loader that ignores OCL_ICD_VENDORS; every other loader must respect it
    }
    assert_eq!(error_message(&text, "all="), ["[Cpu]"], "{text}");
    let errors = error_message(&text, "error=");
    assert!(errors[0].contains("/etc/OpenCL/vendors") && errors[0].contains("pocl-opencl-icd"), "{}", errors[0]);
}

#[test]
fn environment_variable_selects_and_orders_devices() {
    let unset = listed_with(&[]);
    let here: Vec<String> = error_message(&unset, "name=").into_iter().map(String::from).collect();
    let with = |choice: &str| listed_with(&[("CLAYSTONE_DEVICES", choice)]);
    let none = with("no such device");
    assert_eq!(error_message(&none, "all="), ["[Cpu]"], "{none}");
    let Some(last) = here.last() else { return };
    assert!(error_message(&none, "error=")[0].contains("CLAYSTONE_DEVICES=no such device"), "{none}");
    assert_eq!(error_message(&with(""), "name="), here, "empty is unset");
    // Selects all devices in reverse order.
    let reversed: Vec<&str> = here.iter().rev().map(String::as_str).collect();
    let text = with(&reversed.join(","));
    assert_eq!(error_message(&text, "name=")[0], last, "{text}");
    assert_eq!(error_message(&text, "name=").len(), here.len(), "{text}");
    assert_eq!(error_message(&with("0:0"), "name=").len(), 1);
}

/// With the feature `serde`, types that can be parsed from text are serialised as this text.
#[test]
fn names_are_serialised_as_text() {
    use claystone::DType;
    use claystone::storage::Config;
    fn there_and_back<T>(value: &T, text: &str)
    where
        T: serde::Serialize + for<'de> serde::Deserialize<'de> + PartialEq + std::fmt::Debug,
    {
        let json = serde_json::to_string(value).unwrap();
        assert_eq!(json, format!("\"{text}\""));
        assert_eq!(&serde_json::from_str::<T>(&json).unwrap(), value);
        assert_eq!(&serde_json::from_reader::<_, T>(json.as_bytes()).unwrap(), value, "of text that is not borrowed");
    }
    DType::ALL.iter().for_each(|dtype| there_and_back(dtype, dtype.name()));
    [Device::Cpu, Device::OpenCL(3)].iter().for_each(|device| there_and_back(device, &device.to_string()));
    let config: Config = "max_split_size_mb:128,expandable_segments:True".parse().unwrap();
    there_and_back(&config, "max_split_size_mb:128,expandable_segments:True");
    there_and_back(&Config::default(), "");
    let error = serde_json::from_str::<Device>("\"gpu\"").unwrap_err().to_string();
    assert!(error.contains("opencl:0"), "{error}");
    assert!(serde_json::from_str::<DType>("3").is_err() && serde_json::from_str::<Config>("\"x:1\"").is_err());
}

//! Devices by name, choice and absence. What depends on the process's environment runs in a process of its own: the
//! test binary again, with only `devices_can_be_listed`.

use std::process::Command;

use claystone::{Device, Error};

/// Runs `devices_can_be_listed` in a new process with these variables, and gives what it printed.
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

/// What a child printed after each `what`.
fn said<'a>(output: &'a str, what: &str) -> Vec<&'a str> {
    output.lines().filter_map(|l| l.split_once(what).map(|(_, rest)| rest.trim())).collect()
}

fn names() -> Vec<String> {
    Device::all().iter().filter(|d| **d != Device::Cpu).map(|d| d.info().unwrap().name).collect()
}

/// Prints what the other tests look for; holds in every environment.
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
fn names_go_there_and_back() {
    for device in Device::all() {
        assert_eq!(device.to_string().parse::<Device>().unwrap(), device);
    }
    let error = "cuda:0".parse::<Device>().unwrap_err().to_string();
    assert!(error.contains("'cuda:0'") && error.contains("opencl:0"), "{error}");
}

#[test]
fn every_listed_device_is_there_and_describes_itself() {
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
fn an_index_beyond_the_last_says_how_many_there_are() {
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
fn no_opencl_library_is_a_normal_state() {
    // After OPENCL_DYLIB_PATH the usual name is tried: a file in the way that is no library.
    let broken = tempfile::tempdir().unwrap();
    std::fs::write(broken.path().join("libOpenCL.so.1"), "not a library").unwrap();
    let dir = broken.path().to_str().unwrap();
    let text = listed_with(&[("OPENCL_DYLIB_PATH", "/nonexistent"), ("LD_LIBRARY_PATH", dir)]);
    assert_eq!(said(&text, "best="), ["cpu"], "{text}");
    assert_eq!(said(&text, "all="), ["[Cpu]"]);
    assert_eq!(said(&text, "available="), ["false"]);
    let errors = said(&text, "error=");
    assert_eq!(errors.len(), 2);
    for part in ["opencl:0", "libOpenCL.so.1", "/nonexistent", "pocl-opencl-icd ocl-icd-libopencl1"] {
        assert!(errors[0].contains(part), "{}", errors[0]);
    }
}

#[test]
fn a_loader_without_drivers_is_a_normal_state() {
    let usual = listed_with(&[]);
    if said(&usual, "name=").is_empty() {
        return; // perhaps no loader either: the test above
    }
    let empty = tempfile::tempdir().unwrap();
    let text = listed_with(&[("OCL_ICD_VENDORS", empty.path().to_str().unwrap())]);
    let unmoved = said(&text, "name=") == said(&usual, "name=");
    if unmoved && said(&usual, "name=").iter().any(|n| n.contains("NVIDIA")) {
        return; // NVIDIA's images have a loader that does not take its drivers from there; any other has to
    }
    assert_eq!(said(&text, "all="), ["[Cpu]"], "{text}");
    let errors = said(&text, "error=");
    assert!(errors[0].contains("/etc/OpenCL/vendors") && errors[0].contains("pocl-opencl-icd"), "{}", errors[0]);
}

#[test]
fn the_environment_chooses_and_orders() {
    let unset = listed_with(&[]);
    let here: Vec<String> = said(&unset, "name=").into_iter().map(String::from).collect();
    let with = |choice: &str| listed_with(&[("CLAYSTONE_DEVICES", choice)]);
    let none = with("no such device");
    assert_eq!(said(&none, "all="), ["[Cpu]"], "{none}");
    let Some(last) = here.last() else { return };
    assert!(said(&none, "error=")[0].contains("CLAYSTONE_DEVICES=no such device"), "{none}");
    assert_eq!(said(&with(""), "name="), here, "empty is unset");
    // The last device first, then all the others.
    let reversed: Vec<&str> = here.iter().rev().map(String::as_str).collect();
    let text = with(&reversed.join(","));
    assert_eq!(said(&text, "name=")[0], last, "{text}");
    assert_eq!(said(&text, "name=").len(), here.len(), "{text}");
    assert_eq!(said(&with("0:0"), "name=").len(), 1);
}

/// With the feature `serde`, what has a text is that text in files.
#[test]
fn names_are_text_to_serde() {
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

//! `claystone info`: the report to attach to a bug report.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;

use claystone::Device;
use serde_json::Value;

use crate::stand_in::{ALWAYS, Faults, Kind};

/// Runs the program. Returns whether it succeeded, and its report.
fn info(variables: &[(&str, &str)]) -> (bool, Value) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_claystone"));
    command.args(["info", "--json"]).env_remove("CLAYSTONE_ALLOC_CONF").envs(variables.iter().copied());
    let output = command.output().unwrap();
    let report = serde_json::from_slice(&output.stdout);
    (output.status.success(), report.unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&output.stderr))))
}

/// Collects the keys of an object and of nested objects in the guide's notation. Fields of device properties are not collected.
fn keys(value: &Value, path: &str, depth: usize, into: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) if depth > 0 => {
            for (name, value) in fields {
                let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
                keys(value, &path, depth - 1, into);
            }
        }
        Value::Array(items) if items.first().is_some_and(Value::is_object) => {
            items.iter().for_each(|item| keys(item, &format!("{path}[]"), depth, into));
        }
        _ => _ = into.insert(path.to_owned()),
    }
}

/// Returns the keys in the guide's table.
fn documented() -> BTreeSet<String> {
    let guide = include_str!("../../../docs/guide/reporting-bugs.md");
    let rows = guide.lines().skip_while(|line| !line.starts_with("| key of the report |")).skip(2);
    let rows = rows.take_while(|line| line.starts_with("| `"));
    let keys = rows.flat_map(|row| row.split('|').nth(1).unwrap_or_default().split('`').skip(1).step_by(2));
    keys.map(str::to_owned).collect()
}

#[test]
fn report_has_the_documented_keys() {
    let (good, report) = info(&[]);
    assert!(good, "{report:#}");
    let mut found = BTreeSet::new();
    keys(&report, "", 3, &mut found);
    // Without OpenCL devices, `opencl.platforms` may be empty, so its keys are not compared.
    let counts = |key: &String| Device::all().len() > 1 || !key.starts_with("opencl.platforms");
    found.retain(counts);
    assert_eq!(found, documented().into_iter().filter(counts).collect());
    let devices = report["devices"].as_array().unwrap();
    let names: Vec<_> = devices.iter().map(|device| device["device"].as_str().unwrap().to_owned()).collect();
    assert_eq!(names, Device::all().iter().map(Device::to_string).collect::<Vec<_>>());
    for device in devices {
        assert!(device["error"].is_null() && device["info"]["name"].is_string(), "{device:#}");
        let outcomes = device["self_test"].as_array().unwrap();
        assert!(outcomes.len() >= 5 && outcomes.iter().all(|outcome| outcome["passed"] == true), "{device:#}");
    }
}

#[test]
fn configuration_names_its_sources() {
    let set = [("CLAYSTONE_DEVICES", "none"), ("CLAYSTONE_ALLOC_CONF", "decay_ms:10000, zero_fill:True")];
    let (good, report) = info(&[&set[..], &[("CLAYSTONE_CASHE_DIR", "off")]].concat());
    assert!(good, "{report:#}");
    assert_eq!(report["devices"].as_array().unwrap().len(), 1, "the CPU");
    assert!(report["opencl"]["error"].as_str().unwrap().contains("CLAYSTONE_DEVICES=none"), "{report:#}");
    let keys = report["configuration"]["allocator"].as_array().unwrap();
    let given: Vec<_> = keys.iter().filter(|key| key["source"] == "environment").collect();
    let given: Vec<_> =
        given.iter().map(|key| (key["key"].as_str().unwrap(), key["value"].as_str().unwrap())).collect();
    assert_eq!(given, [("decay_ms", "10000"), ("zero_fill", "True")], "one has its default");
    let variables = report["configuration"]["environment"].as_array().unwrap();
    let variable = |name: &str| variables.iter().find(|variable| variable["name"] == name).unwrap();
    assert_eq!(variable("CLAYSTONE_DEVICES")["source"], "environment");
    assert_eq!(variable("CLAYSTONE_NO_CACHING")["value"], Value::Null);
    assert_eq!(variable("CLAYSTONE_CASHE_DIR")["known"], false, "a slip");

    let (good, report) = info(&[("CLAYSTONE_DEVICES", "none"), ("CLAYSTONE_ALLOC_CONF", "decay:1")]);
    assert!(!good && report["configuration"]["error"].as_str().unwrap().contains("unknown key 'decay'"), "{report:#}");
    let first = &report["devices"][0]["self_test"][0];
    assert!(first["error"].as_str().unwrap().contains("unknown key"), "{report:#}");
}

/// The report must contain every environment variable that the source of the crate or of the program names.
#[test]
fn report_contains_every_environment_variable() {
    let (_, report) = info(&[("CLAYSTONE_DEVICES", "none")]);
    let variables = report["configuration"]["environment"].as_array().unwrap();
    let mut folders =
        ["/src", "/../src"].map(|folder| PathBuf::from(env!("CARGO_MANIFEST_DIR").to_owned() + folder)).to_vec();
    let mut read = BTreeSet::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let text = String::from_utf8_lossy(&std::fs::read(&path).unwrap()).into_owned();
            for call in ["var(\"", "var_os(\"", "variable(\"", "read(\""] {
                let names = text.split(call).skip(1).filter_map(|rest| rest.split('"').next());
                read.extend(names.filter(|name| name.starts_with("CLAYSTONE_")).map(str::to_owned));
            }
        }
    }
    let tests = ["CLAYSTONE_REQUIRE_OPENCL", "CLAYSTONE_MUTATIONS", "CLAYSTONE_TEST_OPERATIONS"];
    assert!(read.len() >= 7, "{read:?}");
    for name in read.iter().filter(|name| !tests.contains(&name.as_str())) {
        assert!(variables.iter().any(|variable| variable["name"] == name.as_str()), "{name}");
    }
}

#[test]
fn broken_drivers_still_give_a_report() {
    let Some(faults) = Faults::install("info::broken_drivers_still_give_a_report", Kind::Real) else { return };
    let uncached = [("CLAYSTONE_CACHE_DIR", "off")];
    faults.fail("clGetPlatformIDs", 1, ALWAYS, -6);
    let (good, report) = info(&uncached);
    assert!(!good, "{report:#}");
    assert!(report["opencl"]["error"].as_str().unwrap().contains("CL_OUT_OF_HOST_MEMORY"), "{report:#}");
    let cpu = report["devices"].as_array().unwrap().last().unwrap();
    assert!(cpu["device"] == "cpu" && cpu["self_test"][3]["passed"] == true, "{report:#}");

    faults.clear();
    faults.fail("clBuildProgram", 1, ALWAYS, -5);
    let (good, report) = info(&uncached);
    let first = &report["devices"][0];
    assert!(!good && first["device"] == "opencl:0" && first["error"].is_null(), "{report:#}");
    let elementwise = &first["self_test"][1];
    assert_eq!((&elementwise["name"], &elementwise["passed"]), (&"elementwise".into(), &false.into()), "{report:#}");
    assert!(elementwise["error"].as_str().unwrap().contains("CL_OUT_OF_RESOURCES"), "{report:#}");
}

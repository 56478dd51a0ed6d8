//! Profiles saved as files in Chrome's trace format.

use std::collections::HashMap;

use claystone::Device;
use claystone::profiler::{Category, Event, Lane, Profile, profile};
use claystone::storage::annotate;
use serde_json::Value;

use crate::common::devices;
use crate::{serial_guard, train};

/// Records a profile with events of each kind on every device.
fn recorded() -> Profile {
    let _guard = serial_guard();
    let all = || devices().into_iter().for_each(|device| _ = annotate("training", || train(device, 2).unwrap()));
    profile(all).unwrap().1
}

#[test]
fn written_profiles_can_be_read() {
    let written = recorded();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("trace.json");
    written.save(&file).unwrap();
    let read = Profile::load(&file).unwrap();
    assert_eq!(read.devices(), written.devices());
    assert_eq!(read.threads(), written.threads());
    assert_eq!(read.memory().len(), written.memory().len());
    assert_eq!(read.events().len(), written.events().len());
    for (read, written) in read.events().iter().zip(written.events()) {
        let times = |e: &Event| [e.start_us, e.duration_us];
        let near = |(a, b): (f64, f64)| (a - b).abs() <= 1e-9 * b.abs();
        assert!(times(read).into_iter().zip(times(written)).all(near));
        let rest = |e: &Event| {
            let mut rest = e.clone();
            (rest.start_us, rest.duration_us, rest.queued_us) = (0.0, 0.0, None);
            rest
        };
        assert_eq!(rest(read), rest(written));
        assert_eq!(read.queued_us.is_some(), written.queued_us.is_some());
    }
    let table = |profile: &Profile| profile.key_averages().to_string();
    assert_eq!(table(&read), table(&written));
}

/// Checks the rules that Perfetto requires of traces.
#[test]
fn profiles_follow_chromes_format() {
    let mut bytes = Vec::new();
    recorded().write(&mut bytes).unwrap();
    let trace: Value = serde_json::from_slice(&bytes).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    let mut slices: Vec<(&Value, u64, u64)> = Vec::new();
    let (mut starts, mut ends) = (HashMap::new(), HashMap::new());
    let mut counters = 0;
    for event in events {
        let number = |key: &str| event[key].as_u64().unwrap_or_else(|| panic!("{key} of {event}"));
        match event["ph"].as_str().unwrap() {
            "M" => assert!(event["args"]["name"].is_string()),
            "X" => {
                assert!(event["ts"].is_number() && event["dur"].as_f64().unwrap() >= 0.0, "{event}");
                slices.push((event, number("pid"), number("tid")));
            }
            "s" => assert!(starts.insert(number("id"), event).is_none()),
            "f" => {
                assert_eq!(event["bp"], "e");
                assert!(ends.insert(number("id"), event).is_none());
            }
            "C" => {
                counters += 1;
                assert!(event["args"]["allocated"].is_u64() && event["args"]["reserved"].is_u64());
            }
            other => panic!("{other}"),
        }
    }
    assert!(counters > 0);
    // Every arrow must have two ends, and each end must be within a slice of its track.
    assert_eq!(starts.len(), ends.len());
    assert_eq!(starts.is_empty(), devices().iter().all(|&d| d == Device::Cpu));
    for (id, start) in starts {
        for end in [start, ends[&id]] {
            let at = end["ts"].as_f64().unwrap();
            let encloses = |&&(slice, pid, tid): &&(&Value, u64, u64)| {
                let from = slice["ts"].as_f64().unwrap();
                let inside = at >= from && at <= from + slice["dur"].as_f64().unwrap();
                inside && pid == end["pid"].as_u64().unwrap() && tid == end["tid"].as_u64().unwrap()
            };
            assert!(slices.iter().find(encloses).is_some(), "{end} is in no slice");
        }
    }
}

/// Traces of PyTorch's profiler have other categories, ids that are text, and arguments that are lists. They must be readable too.
#[test]
fn traces_of_other_programs_can_be_read() {
    let trace = r#"{"schemaVersion": 1, "deviceProperties": [{"id": 0}], "traceEvents": [
      {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 77, "tid": 77, "ts": 5.5, "dur": 10.0, "args": {"Input Dims": [[2, 2], []]}},
      {"ph": "X", "cat": "kernel", "name": "sgemm", "pid": 0, "tid": 7, "ts": 9.0, "dur": 4.0, "args": {"device": 0, "stream": 7, "grid": [1, 1, 1]}},
      {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD", "pid": 0, "tid": 7, "ts": 20, "dur": 1, "args": {"bytes": 64}},
      {"ph": "i", "name": "mark", "pid": "Traces", "tid": "Trace", "ts": 1, "s": "g"},
      {"ph": "X", "cat": "Trace", "name": "whole", "pid": "Spans", "tid": "PyTorch", "ts": 0, "dur": 30},
      {"ph": "X", "name": "no duration", "ts": 3}, 17, null, "text"
    ]}"#;
    let profile = Profile::from_bytes(trace.as_bytes()).unwrap();
    let named = |name: &str| profile.events().iter().find(|e| &*e.name == name).unwrap();
    assert_eq!(profile.events().len(), 4);
    assert_eq!(named("aten::mm").category, Category::Operation);
    assert!(matches!(named("sgemm").lane, Lane::Stream(Device::OpenCL(0), 7)));
    assert_eq!((named("Memcpy HtoD").category, named("Memcpy HtoD").bytes), (Category::Copy, 64));
    assert_eq!(named("whole").category, Category::Other);
    assert!(profile.key_averages().to_string().contains("aten::mm"));
    // A plain list of events is also a valid trace.
    let list = r#"[{"ph": "X", "name": "a", "ts": 1, "dur": 2}]"#;
    assert_eq!(Profile::from_bytes(list.as_bytes()).unwrap().duration_us(), 2.0);
}

#[test]
fn files_other_than_traces_are_errors() {
    for bytes in ["", "{}", "3", "[1, 2", "{\"traceEvents\": 3}", "\"text\"", "{\"traceEvents\": []} more"] {
        let error = Profile::from_bytes(bytes.as_bytes()).unwrap_err().to_string();
        assert!(error.contains("not a trace in Chrome's format"), "{bytes}: {error}");
    }
    let missing = Profile::load("/no/such/trace.json").unwrap_err().to_string();
    assert!(missing.contains("/no/such/trace.json"), "{missing}");
}

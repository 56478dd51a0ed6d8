//! `claystone estimate`, with this test program as the program to estimate.

use std::process::{Command, Output};

use claystone::storage::Snapshot;
use claystone::{Device, Tensor};

/// The body of the estimated program. Without `CLAYSTONE_DRY_RUN` it does nothing.
#[test]
fn estimated_program() {
    if std::env::var_os("CLAYSTONE_DRY_RUN").is_some() {
        Tensor::zeros(1, Device::Cpu).unwrap(); // lines are recorded after the first tensor
        let x = Tensor::zeros([1 << 14, 1 << 20], Device::Cpu).unwrap(); // 64 GiB
        assert_eq!(x.sum((), false).unwrap().item::<f32>().unwrap(), 0.0);
    }
}

fn estimate(options: &[&str], program: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_claystone"));
    command.arg("estimate").args(options).arg("--").arg(std::env::current_exe().unwrap()).args(["--exact", program]);
    command.env("CLAYSTONE_DEVICES", "none").output().unwrap()
}

#[test]
fn estimate_reports_the_memory_of_a_program() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("memory.pickle");
    let options = ["--capacity", "24GiB", "--json", "--snapshot", file.to_str().unwrap()];
    let made = estimate(&options, "estimate::estimated_program");
    let said = String::from_utf8_lossy(&made.stderr);
    assert!(made.status.success() && said.contains("does not fit in 24.00 GiB"), "{said}");
    let report: serde_json::Value = serde_json::from_slice(&made.stdout).unwrap();
    let cpu = &report["devices"][0];
    assert!(cpu["peak_allocated"].as_u64().unwrap() >= 64 << 30 && cpu["fits"] == false, "{report}");
    assert!(cpu["failed_at"]["filename"].as_str().unwrap().contains("estimate.rs"), "{report}");
    assert!(report["assumed"].as_array().unwrap().iter().any(|assumed| assumed["what"] == "item"), "{report}");
    assert!(Snapshot::load(file).unwrap().peak_memory()[0].bytes >= 64 << 30);
}

#[test]
fn programs_that_make_no_tensor_and_missing_programs_are_errors() {
    let made = estimate(&[], "no::such::test");
    assert!(!made.status.success() && String::from_utf8_lossy(&made.stderr).contains("made no tensor"));
    let missing = Command::new(env!("CARGO_BIN_EXE_claystone")).args(["estimate", "--", "/no/such/program"]).output();
    assert!(!missing.unwrap().status.success());
}

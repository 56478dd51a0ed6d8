//! Runs the command `claystone tune` as a user would.

use std::path::Path;
use std::process::Command;

use claystone::Device;
use sha2::{Digest, Sha256};

use crate::common;

/// Runs the command with the cache in the given folder, and returns stdout and stderr.
#[track_caller]
fn tune(folder: &Path, kernels: &str, args: &[&str]) -> (String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_claystone"));
    command.arg("tune").args(args).env("CLAYSTONE_CACHE_DIR", folder).env("CLAYSTONE_KERNELS", kernels);
    let done = command.output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    let (out, err) = (text(&done.stdout), text(&done.stderr));
    assert!(done.status.success(), "{args:?}: {out}{err}");
    (out, err)
}

fn has_opencl() -> bool {
    common::devices().iter().any(|&device| device != Device::Cpu)
}

/// Every choice must give the CPU's results, with the device's own kernels and with GPU kernels that use a fence.
#[test]
fn every_choice_gives_the_cpus_results() {
    let folder = tempfile::tempdir().unwrap();
    for kernels in ["", "gpu+fence"].into_iter().filter(|_| has_opencl()) {
        let (out, _) = tune(folder.path(), kernels, &["--check"]);
        assert!(out.contains("every choice"), "{out}");
    }
}

/// Later processes must use the stored choices, unless the file is damaged.
#[test]
fn stored_choices_are_used() {
    if !has_opencl() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let shown = || tune(folder.path(), "", &["--show"]).0;
    let defaults = shown();
    assert!(defaults.contains("map_group 256: ") && !defaults.contains("default"), "{defaults}");
    let stored = || std::fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().path());
    let tuning = || stored().find(|path| path.extension().is_some_and(|e| e == "tuning"));
    assert_eq!(tuning(), None);

    let (message, _) = tune(folder.path(), "", &[]);
    let file = tuning().unwrap();
    assert!(message.contains(&format!("saved to {}", file.display())), "{message}");
    // Every choice was timed, and a later process uses the selected values.
    let (measured, values): (Vec<&str>, Vec<&str>) = message.lines().partition(|line| line.starts_with(' '));
    assert!(measured.len() >= 2 * (values.len() - 1) && measured.iter().all(|line| line.contains(" us")), "{message}");
    assert_eq!(shown().lines().collect::<Vec<_>>(), values[..values.len() - 1], "{message}");

    // A changed choice is used if the file's checksum matches. A file starts with 16 bytes of format name and a checksum of 32
    // bytes, which covers the file's name and text.
    let sealed = std::fs::read(&file).unwrap();
    let (head, text) = (&sealed[..16], String::from_utf8(sealed[48..].to_vec()).unwrap());
    let seal = |text: &str| {
        let name = file.file_name().unwrap().as_encoded_bytes();
        let sum = Sha256::new().chain_update(name).chain_update([0]).chain_update(text).finalize();
        [head, &sum[..], text.as_bytes()].concat()
    };
    assert!(seal(&text) == sealed);
    let line = text.lines().find(|line| line.starts_with("map_group ")).unwrap();
    let other = text.replace(line, "map_group 64");
    std::fs::write(&file, seal(&other)).unwrap();
    assert!(shown().contains("map_group 64 (default 256): "), "{}", shown());
    let third = if line == "map_group 128" { "map_group 512" } else { "map_group 128" };
    let unsealed = [head, &sealed[16..48], text.replace(line, third).as_bytes()].concat();
    let broken = [text.replace(line, "map_group 65"), text[..text.len() / 2].to_owned(), String::new()];
    for broken in broken.iter().map(|text| seal(text)).chain([unsealed, other.into_bytes(), Vec::new()]) {
        std::fs::write(&file, broken).unwrap();
        assert_eq!(shown(), defaults);
    }
}

#[test]
fn the_cpu_has_nothing_to_tune() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_claystone"));
    let done = command.args(["tune", "--device", "cpu"]).output().unwrap();
    let err = String::from_utf8(done.stderr).unwrap();
    assert!(!done.status.success() && err.contains("name an OpenCL device"), "{err}");
}

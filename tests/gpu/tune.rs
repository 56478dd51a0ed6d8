//! `claystone tune`, run as a user runs it.

use std::path::Path;
use std::process::Command;

use claystone::ops::{Backend, Implementation, register};
use claystone::{Device, tune as tuning};
use sha2::{Digest, Sha256};

use crate::common;

/// What the program prints, with programs and tuning in a folder of their own.
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

/// Around the edges that it makes, against the CPU: with the device's own kernels, and with those of GPUs whose groups share work.
#[test]
fn every_choice_gives_the_right_results() {
    let folder = tempfile::tempdir().unwrap();
    for kernels in ["", "gpu+fence"].into_iter().filter(|_| has_opencl()) {
        let (out, _) = tune(folder.path(), kernels, &["--check"]);
        assert!(out.contains("every choice"), "{out}");
    }
}

/// What is stored is what a later process has, unless the file is damaged.
#[test]
fn what_is_stored_is_used() {
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

    let (told, _) = tune(folder.path(), "", &[]);
    let file = tuning().unwrap();
    assert!(told.contains(&format!("kept in {}", file.display())), "{told}");
    // Every choice was timed, and a later process has what was chosen.
    let (measured, values): (Vec<&str>, Vec<&str>) = told.lines().partition(|line| line.starts_with(' '));
    assert!(measured.len() >= 2 * (values.len() - 1) && measured.iter().all(|line| line.contains(" us")), "{told}");
    assert_eq!(shown().lines().collect::<Vec<_>>(), values[..values.len() - 1], "{told}");

    // Another choice in the file is another choice in use, if it is sealed: behind a name and a checksum of 32 bytes, which
    // is of the file's name as well.
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

/// A choice that gives wrong results is not left in force. In a process of its own: others use the operation that it replaces.
#[test]
fn what_fails_changes_nothing() {
    if !common::alone("tune::what_fails_changes_nothing") {
        return;
    }
    for device in common::devices().into_iter().filter(|&device| device != Device::Cpu) {
        let values = || tuning::parameters(device).unwrap().iter().map(|p| p.value).collect::<Vec<_>>();
        let before = values();
        let wrong = Implementation::new(|x, _| Ok(vec![x[0].sub(x[1])?]));
        let _wrong = register("add", Backend::OpenCL, wrong).unwrap();
        let error = tuning::tune(device, |_| {}).unwrap_err().to_string();
        assert!(error.contains("nothing is kept"), "{error}");
        assert_eq!(values(), before);
    }
}

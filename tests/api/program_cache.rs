//! The cache of compiled kernels that processes share, with damaged or replaced files.
#![cfg(unix)]

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use claystone::profiler::Category;
use claystone::{Device, Kernel, Tensor};

use crate::common;

const CHILD: &str = "CLAYSTONE_TEST_NUMBERS";

/// Runs a kernel that writes the number `n`, and returns the written number. All these kernels have source texts of the same
/// length.
fn number(n: u32, device: Device) -> f32 {
    let source = format!("__kernel void number(__global float *x) {{ x[get_global_id(0)] = {n}; }}");
    let kernel = Kernel::from_source("number", source, "").unwrap();
    let x = Tensor::zeros([4], device).unwrap();
    // SAFETY: each of four work-items writes one element of `x`, which is declared as an output.
    unsafe { kernel.call().out(&x).global(&[4]).launch() }.unwrap();
    x.to_vec::<f32>().unwrap()[3]
}

/// For each of `numbers`, runs the kernel in a child process on the first OpenCL device, with the cache that `variables` select. The
/// child must compute the right numbers within two minutes.
#[track_caller]
fn run(numbers: &str, variables: &[(&str, &Path)], directory: &Path) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["program_cache::runs_numbers_in_the_child", "--exact", "--nocapture"])
        .current_dir(directory)
        .env(CHILD, numbers);
    for name in ["CLAYSTONE_CACHE_DIR", "CLAYSTONE_CACHE_MAXSIZE", "XDG_CACHE_HOME"] {
        command.env_remove(name);
    }
    let mut child =
        command.envs(variables.iter().copied()).stdout(Stdio::null()).stderr(Stdio::inherit()).spawn().unwrap();
    let begin = Instant::now();
    let status = loop {
        match child.try_wait().unwrap() {
            Some(status) => break status,
            None if begin.elapsed() > Duration::from_secs(120) => {
                child.kill().unwrap();
                panic!("{numbers}: the process waits for something");
            }
            None => thread::sleep(Duration::from_millis(20)),
        }
    };
    assert!(status.success(), "{numbers}: a number is wrong: {status}");
}

/// The child process of [`run`]. Does nothing in other processes.
#[test]
fn runs_numbers_in_the_child() {
    let (Ok(numbers), Some(device)) = (std::env::var(CHILD), opencl()) else { return };
    for n in numbers.split(',').map(|n| n.parse().unwrap()) {
        assert_eq!(number(n, device), n as f32);
    }
}

fn opencl() -> Option<Device> {
    common::devices().into_iter().find(|&device| device != Device::Cpu)
}

/// Returns the files of a folder, ordered by modification time; empty if the folder does not exist.
fn files(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort_by_key(|path| fs::symlink_metadata(path).unwrap().modified().unwrap());
    files
}

#[test]
fn damaged_cache_files_do_not_change_results() {
    if opencl().is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let run = |numbers| run(numbers, &[("CLAYSTONE_CACHE_DIR", dir.path())], dir.path());
    // Uses one process for each number: with drivers that are slow to return binaries (PoCL), a process stores only its first two
    // programs.
    run("1");
    let first = files(dir.path());
    run("2");
    let second: Vec<_> = files(dir.path()).into_iter().filter(|file| !first.contains(file)).collect();
    assert_eq!((first.len(), second.len()), (2, 2), "what the user wrote, and what is launched");
    let contents = |files: &[PathBuf]| -> Vec<Vec<u8>> { files.iter().map(|file| fs::read(file).unwrap()).collect() };
    let (one, two) = (contents(&first), contents(&second));
    let put = |files: &[PathBuf], contents: &[Vec<u8>]| {
        files.iter().zip(contents).for_each(|(file, contents)| fs::write(file, contents).unwrap());
    };

    // Exchanges the cache files of two kernels, so that each file has the wrong contents for its name.
    put(&first, &two);
    put(&second, &one);
    run("1,2");
    // Replaces cache files by named pipes that nothing writes to, and by symbolic links to valid files.
    put(&second, &two);
    let aside = tempfile::tempdir().unwrap();
    for (file, contents) in first.iter().zip(&one) {
        let _ = fs::remove_file(file);
        assert!(Command::new("mkfifo").arg(file).status().unwrap().success());
        let _ = fs::write(aside.path().join(file.file_name().unwrap()), contents);
    }
    for file in &second {
        let _ = fs::rename(file, aside.path().join("target"));
        symlink(aside.path().join("target"), file).unwrap();
    }
    run("1,2");
}

#[test]
fn folders_writable_by_others_are_not_used() {
    if opencl().is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let run = |numbers| run(numbers, &[("CLAYSTONE_CACHE_DIR", dir.path())], dir.path());
    fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o777)).unwrap();
    run("3");
    assert!(files(dir.path()).is_empty());
    fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o700)).unwrap();
    // Only root can change the owner, so other users skip this check.
    if chown(dir.path(), Some(12_345), None).is_ok() {
        run("3");
        assert!(files(dir.path()).is_empty());
    }
}

/// Relative paths in XDG_CACHE_HOME are ignored, as the XDG specification says.
#[test]
fn relative_folders_are_ignored() {
    if opencl().is_none() {
        return;
    }
    let (home, work) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let pocl = home.path().join("pocl");
    let variables = [("XDG_CACHE_HOME", Path::new("relative")), ("HOME", home.path()), ("POCL_CACHE_DIR", &pocl)];
    run("4", &variables, work.path());
    assert!(!work.path().join("relative/claystone").exists());
    assert_eq!(files(&home.path().join(".cache/claystone")).len(), 2);
}

#[test]
fn cache_size_is_bounded_and_recent_files_are_kept() {
    if opencl().is_none() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path().join("cache");
    run("5", &[("CLAYSTONE_CACHE_DIR", &folder)], dir.path());
    let size = |file: &PathBuf| fs::metadata(file).unwrap().len();
    let one = files(&folder).iter().map(size).sum::<u64>();
    let bound = (3 * one + one / 2).to_string();
    let run = |numbers| {
        run(numbers, &[("CLAYSTONE_CACHE_DIR", &folder), ("CLAYSTONE_CACHE_MAXSIZE", Path::new(&bound))], dir.path())
    };
    let fifth = files(&folder);
    for numbers in ["6", "7", "5", "8", "9"] {
        run(numbers);
        assert!(files(&folder).iter().map(size).sum::<u64>() <= bound.parse().unwrap());
    }
    let left = files(&folder);
    assert!(fifth.iter().all(|file| left.contains(file)), "used again since");
    assert!((3..=6).contains(&left.len()), "{left:?}");
}

const EXPORTED: &str = "CLAYSTONE_TEST_EXPORTED";

/// The child process of [`exported_caches_avoid_compilation_in_other_processes`]. Does nothing in other processes.
#[test]
fn imports_a_cache_in_the_child() {
    let (Ok(file), Some(device)) = (std::env::var(EXPORTED), opencl()) else { return };
    let programs = device.import_cache(file).unwrap();
    let (_, profile) = claystone::profiler::profile(|| {
        assert_eq!(number(41, device), 41.0);
        assert_eq!(Tensor::ones(3, device).unwrap().exp().unwrap().to_vec::<f32>().unwrap(), [1f32.exp(); 3]);
    })
    .unwrap();
    let count = |category| profile.events().iter().filter(|event| event.category == category).count();
    assert_eq!(count(Category::Compile), 0, "{programs} programs");
    assert!(count(Category::Load) >= 2);
}

#[test]
fn exported_caches_avoid_compilation_in_other_processes() {
    let Some(device) = opencl() else { return };
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kernels.cache");
    assert_eq!(number(41, device), 41.0);
    Tensor::ones(3, device).unwrap().exp().unwrap().to_vec::<f32>().unwrap();
    let programs = device.export_cache(&file).unwrap();
    assert!(programs >= 2);
    assert_eq!(device.import_cache(&file).unwrap(), programs);
    let mut importer = Command::new(std::env::current_exe().unwrap());
    importer
        .args(["program_cache::imports_a_cache_in_the_child", "--exact"])
        .env(EXPORTED, &file)
        .env("CLAYSTONE_CACHE_DIR", "off");
    let output = importer.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));

    let whole = fs::read(&file).unwrap();
    let told = |bytes: &[u8]| {
        fs::write(&file, bytes).unwrap();
        device.import_cache(&file).unwrap_err().to_string()
    };
    let mut damaged = whole.clone();
    damaged[whole.len() / 2] ^= 1;
    assert!(told(&damaged).contains("damaged: export it again"));
    assert!(told(&whole[..whole.len() - 1]).contains("damaged"));
    assert!(told(b"notes").contains("not a file that export_cache wrote"));
    fs::remove_file(&file).unwrap();
    assert!(device.import_cache(&file).is_err());
    assert!(device.export_cache(folder.path()).is_err());
    assert!(Device::Cpu.export_cache(&file).unwrap_err().to_string().contains("no compiled programs"));
}

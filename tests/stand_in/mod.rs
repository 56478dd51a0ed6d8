//! An OpenCL library that is loaded in place of the real library. It forwards and counts every call, and makes those calls fail that a
//! test selects. Its source is `opencl.c`; the first test that needs the library compiles it with `cc`.
//!
//! A process loads OpenCL only once, so a test with this library runs in its own process:
//!
//! ```ignore
//! mod stand_in;
//! use stand_in::{ALWAYS, Faults, Kind};
//!
//! #[test]
//! fn a_failed_finish_is_told() {
//!     let Some(faults) = Faults::install("a_failed_finish_is_told", Kind::DiscreteGpu) else { return };
//!     let t = Tensor::ones([4], Device::OpenCL(0)).unwrap();
//!     faults.fail("clFinish", 1, 1, -6);          // its next call fails
//!     faults.fail("clFlush", 2, 3, -5);           // its second, third and fourth calls from now fail
//!     faults.fail("any", 10, ALWAYS, -36);        // all calls from the tenth on fail
//!     faults.fail_command("clEnqueueReadBuffer", 1, 1, -14); // accepted, but its event ends with -14
//!     faults.delay("clEnqueueReadBuffer", 50_000); // every read reaches host memory 50 ms later
//!     assert!(t.to_vec::<f32>().is_err());
//!     faults.clear();
//!     assert_eq!(faults.injected("clFinish"), 1);
//!     assert_eq!(faults.live_buffers(), 3);
//! }
//! ```
//!
//! Calls are counted, and fail, in the order in which they reach the library, whichever thread makes them. A failing call
//! is not forwarded. The test process and the library communicate through a file that the library has mapped, so no
//! `unsafe` is needed here.
#![allow(dead_code)] // each test program uses only a part of this module

use std::collections::hash_map::DefaultHasher;
use std::fs::{File, OpenOptions};
use std::hash::{Hash, Hasher};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::thread;
use std::time::{Duration, Instant};

use tempfile::NamedTempFile;

const SOURCE: &str = include_str!("opencl.c");

/// The size in bytes and the number of the `struct slot`s of `opencl.c`, and the offsets of the fields.
const SLOT: u64 = 96;
const SLOTS: u64 = 96;
const NAME: usize = 40;
const CALLS: u64 = 40;
const ERRORS: u64 = 48;
const INJECTED: u64 = 56;
const FIRST: u64 = 64;
const TIMES: u64 = 72;
const CODE_AND_LATE: u64 = 80;
const DELAY: u64 = 88;

/// Passed as `times`, makes all calls from then on fail.
pub const ALWAYS: u64 = u64::MAX;

/// The device type that devices report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The real type of each device.
    Real,
    /// A discrete GPU, whose memory is separate from the host's.
    DiscreteGpu,
}

/// Controls the stand-in library that this process has loaded.
pub struct Faults {
    file: File,
    /// The names of the driver functions, in the order of their slots.
    names: Vec<String>,
}

/// Returns the path of the library. Compiles it once for all test programs.
fn library() -> PathBuf {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    let build = || {
        let mut hash = DefaultHasher::new();
        SOURCE.hash(&mut hash);
        let folder = std::env::current_exe().unwrap().parent().unwrap().to_owned();
        let path = folder.join(format!("stand_in-{:016x}.so", hash.finish()));
        if !path.exists() {
            let folder = tempfile::tempdir_in(folder).unwrap();
            let (source, object) = (folder.path().join("opencl.c"), folder.path().join("opencl.so"));
            std::fs::write(&source, SOURCE).unwrap();
            let mut cc = Command::new("cc");
            cc.args(["-std=gnu11", "-shared", "-fPIC", "-O1", "-o"])
                .args([&object, &source])
                .args(["-ldl", "-lpthread"]);
            let output = cc.output().expect("cc, the C compiler, runs");
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            std::fs::rename(object, &path).unwrap(); // the rename is atomic, in case another process compiles the library at the same time
        }
        path
    };
    PATH.get_or_init(build).clone()
}

/// The result of a child process that [`run`] started.
pub struct ChildResult {
    /// The exit status. None if the process exceeded the time limit and was killed.
    pub status: Option<std::process::ExitStatus>,
    /// The process's output.
    pub text: String,
}

/// Runs one test of this program in a child process that loads the library. Kills the child after the time `limit`.
pub fn run(test: &str, kind: Kind, variables: &[(&str, &str)], limit: Duration) -> ChildResult {
    let control = NamedTempFile::new().unwrap();
    control.as_file().set_len(SLOT * SLOTS).unwrap();
    let text = NamedTempFile::new().unwrap(); // output goes to a file, because a full pipe would block the child
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args([test, "--exact", "--nocapture"])
        .env("OPENCL_DYLIB_PATH", library())
        .env("STAND_IN_CONTROL", control.path());
    command.env("STAND_IN_DISCRETE", if kind == Kind::DiscreteGpu { "1" } else { "0" });
    command.env_remove("CLAYSTONE_ALLOC_CONF").envs(variables.iter().copied()).stdin(Stdio::null());
    let both = text.reopen().unwrap();
    command.stdout(both.try_clone().unwrap()).stderr(both);
    let mut child = command.spawn().unwrap();
    let begin = Instant::now();
    let status = loop {
        match child.try_wait().unwrap() {
            None if begin.elapsed() > limit => {
                child.kill().unwrap();
                child.wait().unwrap();
                break None;
            }
            None => thread::sleep(Duration::from_millis(2)),
            status => break status,
        }
    };
    ChildResult { status, text: String::from_utf8_lossy(&std::fs::read(text.path()).unwrap()).into_owned() }
}

impl Faults {
    /// Runs the test with this name in a child process that loads the library. Returns `Some` in the child. In the parent, waits for the
    /// child, panics if the test failed, and returns `None`.
    #[track_caller]
    pub fn install(test: &str, kind: Kind) -> Option<Faults> {
        let here = Faults::here();
        if here.is_none() {
            let ended = run(test, kind, &[], Duration::from_secs(300));
            let passed = ended.status.is_some_and(|s| s.success()) && ended.text.contains("1 passed");
            assert!(passed, "{:?} (none: killed after five minutes): {}", ended.status, ended.text);
        }
        here
    }

    /// Returns the control of the library in a child process that [`run`] started, and None in other processes. Loads the library.
    pub fn here() -> Option<Faults> {
        let path = std::env::var_os("STAND_IN_CONTROL")?;
        cl3::load_library().as_ref().expect("the library that stands in loads");
        let file = OpenOptions::new().read(true).write(true).open(path).unwrap();
        let name = |slot: u64| {
            let mut name = [0; NAME];
            file.read_exact_at(&mut name, slot * SLOT).unwrap();
            String::from_utf8_lossy(&name).trim_end_matches('\0').to_owned()
        };
        let names: Vec<String> = (0..SLOTS).map(name).take_while(|name| !name.is_empty()).collect();
        assert_eq!(names[0], "any", "OPENCL_DYLIB_PATH names another library");
        Some(Faults { file, names })
    }

    /// Returns the names of the library's functions.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.names.iter().map(String::as_str).filter(|name| name.starts_with("cl"))
    }

    #[track_caller]
    fn slot(&self, name: &str) -> u64 {
        self.names.iter().position(|n| n == name).unwrap_or_else(|| panic!("there is no {name}")) as u64 * SLOT
    }

    fn get(&self, at: u64) -> u64 {
        let mut bytes = [0; 8];
        self.file.read_exact_at(&mut bytes, at).unwrap();
        u64::from_ne_bytes(bytes)
    }

    fn set(&self, at: u64, value: u64) {
        self.file.write_all_at(&value.to_ne_bytes(), at).unwrap();
    }

    #[track_caller]
    fn arm(&self, name: &str, nth: u64, times: u64, code: i32, late: i32) {
        assert!(nth > 0 && code < 0, "the next call is the first, and codes are negative");
        let slot = self.slot(name);
        self.set(slot + TIMES, 0);
        let mut words = [0; 8];
        words[..4].copy_from_slice(&code.to_ne_bytes());
        words[4..].copy_from_slice(&late.to_ne_bytes());
        self.file.write_all_at(&words, slot + CODE_AND_LATE).unwrap();
        self.set(slot + FIRST, self.calls(name) + nth);
        self.set(slot + TIMES, times);
    }

    /// Makes `times` calls of a function (or of `any` function) fail with `code`, beginning with the `nth` call from now; 1 is the next call.
    /// Replaces earlier requests for the same function.
    #[track_caller]
    pub fn fail(&self, name: &str, nth: u64, times: u64, code: i32) {
        self.arm(name, nth, times, code, 0);
    }

    /// Like [`fail`](Self::fail), but the calls succeed. Their commands do nothing and end with the error `code`. Applies only to commands
    /// with an event, because the failure of other commands could not be observed.
    #[track_caller]
    pub fn fail_command(&self, name: &str, nth: u64, times: u64, code: i32) {
        self.arm(name, nth, times, code, 1);
    }

    /// Like [`fail`](Self::fail), but the calls succeed, and their commands do nothing and report success, also through their events.
    #[track_caller]
    pub fn drop_command(&self, name: &str, nth: u64, times: u64) {
        self.arm(name, nth, times, -1, 2);
    }

    /// Makes waits for events succeed even if the commands have failed, as NVIDIA's driver does.
    pub fn make_waits_succeed(&self) {
        self.set(self.slot("lenient wait") + TIMES, 1);
    }

    /// Delays each command of a function by this many microseconds. Later commands on the same queue are delayed with it.
    /// 0 ends the delay.
    #[track_caller]
    pub fn delay(&self, name: &str, microseconds: u64) {
        self.set(self.slot(name) + DELAY, microseconds);
    }

    /// Removes all faults and delays. Counts are kept.
    pub fn clear(&self) {
        for slot in (0..self.names.len() as u64).map(|i| i * SLOT) {
            self.set(slot + TIMES, 0);
            self.set(slot + DELAY, 0);
        }
    }

    /// Returns the number of calls of a function (or of `any` function), including failed calls.
    #[track_caller]
    pub fn calls(&self, name: &str) -> u64 {
        self.get(self.slot(name) + CALLS)
    }

    /// Returns the number of calls of a function (or of `any` function) that a test made fail, including failed commands.
    #[track_caller]
    pub fn injected(&self, name: &str) -> u64 {
        self.get(self.slot(name) + INJECTED)
    }

    /// Returns the number of calls of a function (or of `any` function) that failed for any reason, including commands that failed later.
    #[track_caller]
    pub fn errors(&self, name: &str) -> u64 {
        self.get(self.slot(name) + ERRORS)
    }

    /// Returns the number of successful calls of `create` minus the number of all calls of `release`, failed or not.
    fn live(&self, create: &str, release: &str) -> i64 {
        self.succeeded(create) - self.calls(release) as i64
    }

    fn succeeded(&self, name: &str) -> i64 {
        (self.calls(name) - self.errors(name)) as i64
    }

    /// Returns the number of buffer handles that are not released yet.
    pub fn live_buffers(&self) -> i64 {
        self.live("clCreateBuffer", "clReleaseMemObject")
            + self.succeeded("clCreateBufferWithProperties")
            + self.succeeded("clRetainMemObject")
    }

    /// Returns the number of command buffers and recordings that are not released yet.
    pub fn live_recordings(&self) -> i64 {
        self.live("clCreateCommandBufferKHR", "clReleaseCommandBufferKHR")
            + self.live("clNewRecordingQCOM", "clReleaseRecordingQCOM")
    }

    /// Returns the number of events that are not released yet.
    pub fn live_events(&self) -> i64 {
        self.live("event", "clReleaseEvent")
    }

    /// Returns the number of mapped ranges that are not unmapped yet.
    pub fn live_mappings(&self) -> i64 {
        self.succeeded("clEnqueueMapBuffer") - self.succeeded("clEnqueueUnmapMemObject")
    }
}

//! An OpenCL library that stands in for the real one: it forwards every call, counts it, and fails those that a test
//! chooses. `opencl.c` is the library; it is compiled with `cc` when the first test asks for it.
//!
//! OpenCL is loaded once a process, so such a test runs in a process of its own:
//!
//! ```ignore
//! mod stand_in;
//! use stand_in::{ALWAYS, Faults, Kind};
//!
//! #[test]
//! fn a_failed_finish_is_told() {
//!     let Some(faults) = Faults::install("a_failed_finish_is_told", Kind::DiscreteGpu) else { return };
//!     let t = Tensor::ones([4], Device::OpenCL(0)).unwrap();
//!     faults.fail("clFinish", 1, 1, -6);          // the next call of it
//!     faults.fail("clFlush", 2, 3, -5);           // its second, third and fourth call from now
//!     faults.fail("any", 10, ALWAYS, -36);        // from the tenth call of anything on
//!     faults.fail_command("clEnqueueReadBuffer", 1, 1, -14); // accepted, and its event ends with -14
//!     faults.delay("clEnqueueReadBuffer", 50_000); // every read reaches host memory 50 ms late
//!     assert!(t.to_vec::<f32>().is_err());
//!     faults.clear();
//!     assert_eq!(faults.injected("clFinish"), 1);
//!     assert_eq!(faults.live_buffers(), 3);
//! }
//! ```
//!
//! Calls are counted, and fail, in the order in which they reach the library, whatever thread they come from. A call
//! that fails is not forwarded. The test process and the library share a file that the library has mapped, so that no
//! `unsafe` is needed here.
#![allow(dead_code)] // each test program uses a part

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

/// `struct slot` of `opencl.c`: its size, how many there are, and where its fields are.
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

/// So many times: from then on.
pub const ALWAYS: u64 = u64::MAX;

/// What the devices say they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// What they are.
    Real,
    /// Discrete GPUs, whose memory is not the host's.
    DiscreteGpu,
}

/// The control of the library that this process has loaded.
pub struct Faults {
    file: File,
    /// In the order of their entries.
    names: Vec<String>,
}

/// Compiles the library, once for all test programs.
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
            std::fs::rename(object, &path).unwrap(); // whole, whoever else compiles it
        }
        path
    };
    PATH.get_or_init(build).clone()
}

/// How a process that [`run`] started ended.
pub struct Ended {
    /// None where it took too long and was killed.
    pub status: Option<std::process::ExitStatus>,
    /// What it printed.
    pub text: String,
}

/// Runs one test of this program again, in a process that loads the library. One that is not over after `limit` is killed.
pub fn run(test: &str, kind: Kind, variables: &[(&str, &str)], limit: Duration) -> Ended {
    let control = NamedTempFile::new().unwrap();
    control.as_file().set_len(SLOT * SLOTS).unwrap();
    let text = NamedTempFile::new().unwrap(); // a pipe that nobody empties would hold it up
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
    Ended { status, text: String::from_utf8_lossy(&std::fs::read(text.path()).unwrap()).into_owned() }
}

impl Faults {
    /// Gives a test of this name a process of its own that loads the library: `Some` in that process. The process that calls
    /// it runs that one, panics if it failed, and gets `None`.
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

    /// The control of the library in a process that [`run`] started, which it loads; none in others.
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

    /// The functions of the library.
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

    /// Has `times` calls of a function (or of `any`) fail with a code, from the `nth` from now on; the next is the first.
    /// What was asked of the function before is forgotten.
    #[track_caller]
    pub fn fail(&self, name: &str, nth: u64, times: u64, code: i32) {
        self.arm(name, nth, times, code, 0);
    }

    /// [`fail`](Self::fail), but the calls succeed and the commands that they enqueue end with the code, doing nothing.
    /// Only of commands that an event is asked of: nobody can tell about others.
    #[track_caller]
    pub fn fail_command(&self, name: &str, nth: u64, times: u64, code: i32) {
        self.arm(name, nth, times, code, 1);
    }

    /// [`fail`](Self::fail), but the commands are accepted and do nothing, and nobody is told, not even their events.
    #[track_caller]
    pub fn drop_command(&self, name: &str, nth: u64, times: u64) {
        self.arm(name, nth, times, -1, 2);
    }

    /// Has waits for events succeed for commands that failed as well, as NVIDIA's driver does.
    pub fn waits_succeed(&self) {
        self.set(self.slot("lenient wait") + TIMES, 1);
    }

    /// Holds each command of a function back for so many microseconds after it was enqueued, and what follows it on its
    /// queue with it. 0 for no longer.
    #[track_caller]
    pub fn delay(&self, name: &str, microseconds: u64) {
        self.set(self.slot(name) + DELAY, microseconds);
    }

    /// Forgets all faults and delays. Counts stay.
    pub fn clear(&self) {
        for slot in (0..self.names.len() as u64).map(|i| i * SLOT) {
            self.set(slot + TIMES, 0);
            self.set(slot + DELAY, 0);
        }
    }

    /// How often a function (or `any`) was called, failures included.
    #[track_caller]
    pub fn calls(&self, name: &str) -> u64 {
        self.get(self.slot(name) + CALLS)
    }

    /// How many calls of a function (or `any`) failed because the test wanted it, failed commands included.
    #[track_caller]
    pub fn injected(&self, name: &str) -> u64 {
        self.get(self.slot(name) + INJECTED)
    }

    /// How many calls of a function (or `any`) gave an error, or failed after they were accepted, whoever wanted it.
    #[track_caller]
    pub fn errors(&self, name: &str) -> u64 {
        self.get(self.slot(name) + ERRORS)
    }

    /// What a function created, less what was given back with another: whether the driver agreed or not.
    fn live(&self, create: &str, release: &str) -> i64 {
        self.succeeded(create) - self.calls(release) as i64
    }

    fn succeeded(&self, name: &str) -> i64 {
        (self.calls(name) - self.errors(name)) as i64
    }

    /// Handles of buffers, less those released.
    pub fn live_buffers(&self) -> i64 {
        self.live("clCreateBuffer", "clReleaseMemObject")
            + self.succeeded("clCreateBufferWithProperties")
            + self.succeeded("clRetainMemObject")
    }

    /// Command buffers and recordings, less those released.
    pub fn live_recordings(&self) -> i64 {
        self.live("clCreateCommandBufferKHR", "clReleaseCommandBufferKHR")
            + self.live("clNewRecordingQCOM", "clReleaseRecordingQCOM")
    }

    /// Events that were asked for, less those released.
    pub fn live_events(&self) -> i64 {
        self.live("event", "clReleaseEvent")
    }

    /// Ranges of buffers that were mapped, less those unmapped.
    pub fn live_mappings(&self) -> i64 {
        self.succeeded("clEnqueueMapBuffer") - self.succeeded("clEnqueueUnmapMemObject")
    }
}

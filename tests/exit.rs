//! The end of the process while devices, and threads that use them, are at work.

mod common;

use std::process::{Child, Command, Stdio, exit};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use claystone::{Device, Result, Stream, Tensor, with_stream};
use tempfile::TempDir;

/// What a process does before it ends, by name.
type End = (&'static str, fn(Device));

const ENDS: [End; 4] = [
    ("work is queued", |device| queue(device, 20).unwrap()),
    ("exit is called", |device| {
        queue(device, 1).unwrap();
        exit(0)
    }),
    ("a thread goes on", |device| {
        thread::spawn(move || while queue(device, 5).is_ok() {});
        thread::sleep(Duration::from_millis(50));
    }),
    ("children are forked", |device| {
        queue(device, 1).unwrap();
        (0..100).for_each(|_| registers_in_a_child());
    }),
];

/// A child that is forked while exit handlers are registered, on account of the driver, can register one.
fn registers_in_a_child() {
    // SAFETY: the child calls C functions only, which do not unwind, and ends without a destructor.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: the same; where the handler cannot be registered, the alarm ends the child.
        unsafe {
            libc::alarm(10);
            libc::_exit(libc::atexit(linger))
        };
    }
    let mut status = 0;
    // SAFETY: the place for the status lives.
    assert_eq!((unsafe { libc::waitpid(child, &mut status, 0) }, status), (child, 0));
}

/// Work of several kernels on three streams, for which nobody waits.
fn queue(device: Device, operations: usize) -> Result<()> {
    let x = Tensor::ones([100, 100], device)?;
    for _ in 0..3 {
        let work = || (0..operations).try_fold(x.shallow_clone(), |y, _| y.matmul(&x)?.softmax(1)?.exp());
        with_stream(&Stream::new(device)?, work)?;
    }
    Ok(())
}

/// Registered before there is a driver, and so called after the driver's own handlers: if the driver still compiles
/// then, it crashes.
extern "C" fn linger() {
    thread::sleep(Duration::from_millis(1500));
}

/// How long after a thread has begun to use a device, which nobody has used before, the process ends: in milliseconds.
const MOMENTS: [u64; 16] = [0, 1, 2, 4, 8, 15, 25, 40, 60, 100, 200, 350, 600, 1000, 1500, 2500];
/// The status that it ends with then.
const STATUS: i32 = 7;

/// This program again, told how it ends. Whatever runs there is compiled first.
fn start(end: String) -> (Child, TempDir) {
    let cache = tempfile::tempdir().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.env("CLAYSTONE_EXIT", end).env("CLAYSTONE_CACHE_DIR", "off");
    child.env("POCL_CACHE_DIR", cache.path()).env("XDG_CACHE_HOME", cache.path());
    (child.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap(), cache)
}

fn ends_with(status: i32, what: &str, children: [(Child, TempDir); 2]) {
    for (child, _cache) in children {
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(status), "{what}: {output:?}");
    }
}

fn a_process_ends_well_whatever_is_under_way() {
    for device in common::devices() {
        for (index, (name, _)) in ENDS.iter().enumerate() {
            ends_with(0, &format!("{name} on {device}"), [(); 2].map(|()| start(format!("whatever {index} {device}"))));
        }
    }
}

/// At some of these moments the driver is being loaded, at most it compiles for the first time: a program, or for the
/// launch of a kernel. PoCL registers exit handlers while it does either. One process is ended by its main thread while
/// another thread uses the device, the other by another thread while the main thread uses it.
fn a_process_ends_well_while_it_compiles_for_the_first_time() {
    for device in common::devices() {
        for delay in MOMENTS {
            let children = ["main", "another"].map(|thread| start(format!("{thread} {delay} {device}")));
            ends_with(STATUS, &format!("after {delay} ms on {device}"), children);
        }
    }
}

fn end(how: &str) {
    let [what, number, device] = how.split(' ').collect::<Vec<_>>()[..] else { panic!("{how}") };
    let (number, device): (u64, Device) = (number.parse().unwrap(), device.parse().unwrap());
    if what == "main" {
        let worker = thread::spawn(move || while queue(device, 5).is_ok() {});
        thread::sleep(Duration::from_millis(number));
        assert!(!worker.is_finished(), "the device works until the end");
        exit(STATUS);
    }
    if what == "another" {
        let ends = Arc::new(AtomicBool::new(false));
        let ending = ends.clone();
        thread::spawn(move || {
            thread::sleep(Duration::from_millis(number));
            ending.store(true, Ordering::Relaxed);
            exit(STATUS)
        });
        while queue(device, 5).is_ok() {}
        assert!(ends.load(Ordering::Relaxed), "the device works until the end");
        loop {
            thread::park();
        }
    }
    // SAFETY: a C function, which does not unwind.
    assert_eq!(unsafe { libc::atexit(linger) }, 0);
    assert_eq!(Tensor::ones([4], device).unwrap().sum((), false).unwrap().item::<f32>().unwrap(), 4.0);
    ENDS[number as usize].1(device)
}

/// Without a harness, which runs tests in threads of their own: this is about the main thread's end.
fn main() {
    if let Ok(how) = std::env::var("CLAYSTONE_EXIT") {
        return end(&how);
    }
    a_process_ends_well_whatever_is_under_way();
    a_process_ends_well_while_it_compiles_for_the_first_time();
    println!("every process ended well");
}

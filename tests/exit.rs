//! Ends processes while devices, and threads that use devices, are working. The processes must exit without a crash or hang.

mod common;

use std::process::{Child, Command, Stdio, exit};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use claystone::{Device, Result, Stream, Tensor, with_stream};
use tempfile::TempDir;

/// The name of an ending, and the last actions of a process before it exits.
type Ending = (&'static str, fn(Device));

const ENDINGS: [Ending; 4] = [
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

/// Checks that a forked child can register an exit handler while the driver in the parent registers its own handler.
fn registers_in_a_child() {
    // SAFETY: the child calls only C functions, which do not unwind, and exits without running destructors.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: as above. If registering the handler blocks, the alarm ends the child.
        unsafe {
            libc::alarm(10);
            libc::_exit(libc::atexit(linger))
        };
    }
    let mut status = 0;
    // SAFETY: `status` outlives the call.
    assert_eq!((unsafe { libc::waitpid(child, &mut status, 0) }, status), (child, 0));
}

/// Enqueues kernels on each of three streams without waiting for them.
fn queue(device: Device, operations: usize) -> Result<()> {
    let x = Tensor::ones([100, 100], device)?;
    for _ in 0..3 {
        let work = || (0..operations).try_fold(x.shallow_clone(), |y, _| y.matmul(&x)?.softmax(1)?.exp());
        with_stream(&Stream::new(device)?, work)?;
    }
    Ok(())
}

/// An exit handler that is registered before the driver is loaded, and so runs after the driver's handlers. If the driver is still
/// compiling during this handler, the process crashes.
extern "C" fn linger() {
    thread::sleep(Duration::from_millis(1500));
}

/// The milliseconds between a thread's first use of a device and the end of the process.
const MOMENTS_MS: [u64; 16] = [0, 1, 2, 4, 8, 15, 25, 40, 60, 100, 200, 350, 600, 1000, 1500, 2500];
/// The exit status with which the processes end.
const STATUS: i32 = 7;

/// Starts this program again with the given ending. Its caches are empty, so every kernel is compiled.
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

fn process_ends_cleanly_while_work_is_pending() {
    for device in common::devices() {
        for (index, (name, _)) in ENDINGS.iter().enumerate() {
            ends_with(0, &format!("{name} on {device}"), [(); 2].map(|()| start(format!("whatever {index} {device}"))));
        }
    }
}

/// Ends processes while the driver is being loaded, or while it compiles a program or the code of a launch for the first time. PoCL
/// registers exit handlers during both. In the first process the main thread exits while another thread uses the device; in the second
/// process the roles are swapped. The exiting thread has listed the devices before.
fn process_ends_cleanly_during_first_compilation() {
    for device in common::devices() {
        for delay in MOMENTS_MS {
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
        Device::all();
        thread::sleep(Duration::from_millis(number));
        assert!(!worker.is_finished(), "the device works until the end");
        exit(STATUS);
    }
    if what == "another" {
        let ends = Arc::new(AtomicBool::new(false));
        let ending = ends.clone();
        thread::spawn(move || {
            Device::all();
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
    ENDINGS[number as usize].1(device)
}

/// This test runs without a test harness: a harness runs tests in other threads, but here the main thread has to exit.
fn main() {
    if let Ok(how) = std::env::var("CLAYSTONE_EXIT") {
        return end(&how);
    }
    process_ends_cleanly_while_work_is_pending();
    process_ends_cleanly_during_first_compilation();
    println!("every process ended well");
}

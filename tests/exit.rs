//! The end of the process while devices, and threads that use them, are at work.

mod common;

use std::process::{Command, Stdio, exit};
use std::thread;
use std::time::Duration;

use claystone::{Device, Result, Stream, Tensor, with_stream};

/// What a process does before it ends, by name.
type End = (&'static str, fn(Device));

const ENDS: [End; 3] = [
    ("work is queued", |device| queue(device, 20).unwrap()),
    ("exit is called", |device| {
        queue(device, 1).unwrap();
        exit(0)
    }),
    ("a thread goes on", |device| {
        thread::spawn(move || while queue(device, 5).is_ok() {});
        thread::sleep(Duration::from_millis(50));
    }),
];

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

#[test]
fn a_process_ends_well_whatever_is_under_way() {
    if let Ok(end) = std::env::var("CLAYSTONE_EXIT") {
        // SAFETY: a C function, which does not unwind.
        assert_eq!(unsafe { libc::atexit(linger) }, 0);
        let (index, device) = end.split_once(' ').unwrap();
        let device: Device = device.parse().unwrap();
        assert_eq!(Tensor::ones([4], device).unwrap().sum((), false).unwrap().item::<f32>().unwrap(), 4.0);
        return ENDS[index.parse::<usize>().unwrap()].1(device);
    }
    for device in common::devices() {
        for (index, (name, _)) in ENDS.iter().enumerate() {
            let children = [(); 2].map(|()| {
                let cache = tempfile::tempdir().unwrap(); // whatever runs is compiled first
                let mut child = Command::new(std::env::current_exe().unwrap());
                child.args(["a_process_ends_well_whatever_is_under_way", "--exact"]);
                child.env("CLAYSTONE_EXIT", format!("{index} {device}"));
                child.env("CLAYSTONE_CACHE_DIR", "off").env("POCL_CACHE_DIR", cache.path());
                (child.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap(), cache)
            });
            for (child, _cache) in children {
                let output = child.wait_with_output().unwrap();
                assert!(output.status.success(), "{name} on {device}: {output:?}");
            }
        }
    }
}

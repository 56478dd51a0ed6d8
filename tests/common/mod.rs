//! Helpers for the integration tests.
#![allow(dead_code)] // each test program uses only some of the helpers

pub mod gguf;
pub mod gpus;
pub mod quantized;

use std::sync::{Mutex, MutexGuard, PoisonError};

use claystone::{DType, Device, Tensor};
use ndarray::{ArrayD, Axis, IxDyn};

/// Returns all devices. Panics if CLAYSTONE_REQUIRE_OPENCL is set, as it is by scripts/test, and there is no OpenCL device.
///
/// The test command makes PoCL show the same processor twice. Tests of values need only one device of each kind, but both PoCL
/// devices share their compiled kernels, so testing both costs little.
#[track_caller]
pub fn devices() -> Vec<Device> {
    let all = Device::all();
    let promised = std::env::var_os("CLAYSTONE_REQUIRE_OPENCL").is_some();
    assert!(all.len() > 1 || !promised, "CLAYSTONE_REQUIRE_OPENCL is set and there is no OpenCL device");
    all
}

/// Returns every OpenCL device.
#[track_caller]
pub fn opencl() -> impl Iterator<Item = Device> {
    devices().into_iter().filter(|&device| device != Device::Cpu)
}

/// Returns an f32 tensor of numbers between `-scale / 2` and `scale / 2` in a scrambled order.
pub fn scattered(shape: &[usize], scale: f32, device: Device) -> Tensor {
    let n: usize = shape.iter().product();
    let values: Vec<f32> = (0..n).map(|i| ((i * 37 + 11) % 101) as f32 / 101.0 * scale - scale / 2.0).collect();
    Tensor::from_slice(&values, shape, device).unwrap()
}

/// Calls `f` once for every device.
#[track_caller]
pub fn each_device(f: impl Fn(Device)) {
    for device in devices() {
        println!("on {device}"); // shown when the test fails
        f(device);
    }
}

/// Returns an f32 tensor with the elements 0, 1, 2, ...
pub fn iota(shape: &[usize], device: Device) -> Tensor {
    let n: usize = shape.iter().product();
    Tensor::arange(0, n as i64, 1, device).unwrap().reshape(shape).unwrap()
}

/// Returns the elements of an f32 tensor in row-major order.
pub fn vec(t: &Tensor) -> Vec<f32> {
    t.to_vec().unwrap()
}

/// Returns the elements as an array of f64.
pub fn f64s(t: &Tensor) -> ArrayD<f64> {
    t.to_device(Device::Cpu).unwrap().to_dtype(DType::F64).unwrap().to_ndarray().unwrap()
}

/// Converts the elements to f64 on the host and returns them in row-major order.
pub fn values(t: &Tensor) -> Vec<f64> {
    t.to_device(Device::Cpu).unwrap().to_dtype(DType::F64).unwrap().to_vec().unwrap()
}

/// Returns the batched matrix product in f64, computed by a naive loop. Operands have two or more dims; leading dims broadcast.
pub fn reference(a: &ArrayD<f64>, b: &ArrayD<f64>) -> ArrayD<f64> {
    let (x, y) = (a.shape(), b.shape());
    let (m, k, n) = (x[x.len() - 2], x[x.len() - 1], y[y.len() - 1]);
    let rank = x.len().max(y.len());
    let at = |s: &[usize], i: usize| if i + s.len() < rank { 1 } else { s[i + s.len() - rank] };
    let batch: Vec<usize> = (0..rank - 2).map(|i| if at(x, i) == 1 { at(y, i) } else { at(x, i) }).collect();
    let stretch = |t: &ArrayD<f64>, last: [usize; 2]| {
        let dims: Vec<usize> = batch.iter().copied().chain(last).collect();
        t.broadcast(IxDyn(&dims)).unwrap().to_owned()
    };
    let (a, b) = (stretch(a, [m, k]), stretch(b, [k, n]));
    let shape: Vec<usize> = batch.iter().copied().chain([m, n]).collect();
    ArrayD::from_shape_fn(IxDyn(&shape), |index| {
        let (i, j) = (index[rank - 2], index[rank - 1]);
        let (mut a, mut b) = (a.view(), b.view());
        for d in 0..rank - 2 {
            a.index_axis_inplace(Axis(0), index[d]);
            b.index_axis_inplace(Axis(0), index[d]);
        }
        (0..k).map(|l| a[[i, l]] * b[[l, j]]).sum()
    })
}

/// Serialises tests that depend on process-wide state such as a device's statistics. Empties the allocators' caches first: memory
/// that earlier tests left there could return to the driver at any time and change the statistics.
pub fn serial_guard() -> MutexGuard<'static, ()> {
    static SERIAL_LOCK: Mutex<()> = Mutex::new(());
    let turn = SERIAL_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    Device::all().into_iter().for_each(|device| device.empty_cache().unwrap());
    turn
}

/// Runs a test of process-wide state in a child process. `test` is the test's name with its module path. Returns true in the child
/// process. In the parent process, returns false after the test passed in the child.
#[track_caller]
pub fn in_own_process(test: &str) -> bool {
    in_child_with(test, "CLAYSTONE_ALONE", "1")
}

/// Like [`in_own_process`], with an environment variable set in the child. Returns true at once if this process already has the variable.
#[track_caller]
pub fn in_child_with(test: &str, variable: &str, value: &str) -> bool {
    if std::env::var(variable).is_ok_and(|v| v == value) {
        return true;
    }
    let mut command = std::process::Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture"]).env(variable, value).env_remove("CLAYSTONE_ALLOC_CONF");
    let output = command.output().unwrap();
    let text = [&output.stdout[..], &output.stderr].map(String::from_utf8_lossy).concat();
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    print!("{text}"); // shown with --nocapture
    false
}

/// Returns numbers between -1 and 1, multiplied by 2 to the power of `scale(row, column)`.
pub fn scaled(rows: usize, cols: usize, seed: u64, scale: impl Fn(usize, usize) -> i32) -> ArrayD<f32> {
    let mut state = seed;
    ArrayD::from_shape_fn(IxDyn(&[rows, cols]), |at| {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * (scale(at[0], at[1]) as f32).exp2()
    })
}

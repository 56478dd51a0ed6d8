//! What the integration tests share.
#![allow(dead_code)] // each test program uses a part

use claystone::{Device, Tensor};

/// Runs `f` on every device that is there.
#[track_caller]
pub fn each_device(f: impl Fn(Device)) {
    for device in Device::all() {
        println!("on {device}"); // shown when the test fails
        f(device);
    }
}

/// 0, 1, 2, ... in f32.
pub fn iota(shape: &[usize], device: Device) -> Tensor {
    let n: usize = shape.iter().product();
    Tensor::arange(0, n as i64, 1, device).unwrap().reshape(shape).unwrap()
}

/// The elements of an f32 tensor.
pub fn vec(t: &Tensor) -> Vec<f32> {
    t.to_vec().unwrap()
}

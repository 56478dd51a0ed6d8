//! Helpers for tests of GPU kernels. Without a GPU, a test restarts itself in a child process with CLAYSTONE_KERNELS set, in which an
//! OpenCL CPU device runs the GPU kernels.

use claystone::device::DeviceKind;
use claystone::{DType, Device, Tensor};

use super::{devices, in_child_with};

/// In the child process of `test`, returns the first OpenCL device, which runs GPU kernels. In the parent process, returns no
/// device.
pub fn gpus(test: &str) -> Vec<Device> {
    gpus_with("gpu", test)
}

/// Like [`gpus`], for kernels whose last work-group reads the other work-groups' results. GPUs without the memory fence that such
/// kernels need use other kernels.
pub fn fenced_gpus(test: &str) -> Vec<Device> {
    gpus_with("gpu+fence", test)
}

fn gpus_with(kernels: &str, test: &str) -> Vec<Device> {
    match in_child_with(test, "CLAYSTONE_KERNELS", kernels) {
        true => devices().into_iter().filter(|&d| d != Device::Cpu).take(1).collect(),
        false => Vec::new(),
    }
}

/// In the parent process, returns the CPU and the best device, which use their own kernels. In the child process, returns the OpenCL
/// device with GPU kernels.
pub fn gpus_and_processors(test: &str) -> Vec<Device> {
    match gpus(test) {
        none if none.is_empty() => devices().into_iter().filter(|&d| d == Device::Cpu || d == Device::best()).collect(),
        stand_in => stand_in,
    }
}

/// Whether the device is a real GPU. On a CPU device that runs GPU kernels, some kernels take seconds.
pub fn is_gpu(device: Device) -> bool {
    matches!(device.info().unwrap().kind, DeviceKind::DiscreteGpu | DeviceKind::IntegratedGpu)
}

/// Returns all cases on a GPU, and every `n`-th case on a CPU device, where GPU kernels are slow.
pub fn thinned_cases<T: Copy>(all: &[T], n: usize, device: Device) -> Vec<T> {
    all.iter().copied().step_by(if is_gpu(device) { 1 } else { n }).collect()
}

/// Returns the values as a tensor of the given shape and dtype on `device`.
pub fn upload(values: &[f64], shape: &[usize], dtype: DType, device: Device) -> Tensor {
    // Converts to the dtype on the host, so that the tested device does not compute its own inputs.
    let host = Tensor::from_slice(values, [values.len()], Device::Cpu).unwrap().to_dtype(dtype).unwrap();
    host.to_device(device).unwrap().reshape(shape).unwrap()
}

/// Asserts that each element is within `tolerance * (1 + |want|)`; NaN equals NaN.
#[track_caller]
pub fn assert_same(got: &[f64], want: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let same = g == w || g.is_nan() && w.is_nan() || (g - w).abs() <= tolerance * (1.0 + w.abs());
        assert!(same, "{what}: element {i} of {} is {g}, not {w}", want.len());
    }
}

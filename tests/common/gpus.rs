//! What the tests of GPUs' kernels share. Where no GPU is, an OpenCL processor runs them, in a process of its own that is told to.

use claystone::device::DeviceKind;
use claystone::{DType, Device, Tensor};

use super::{again_with, devices};

/// An OpenCL device that runs the kernels of GPUs, in a process of its own; none in the test's first one.
pub fn gpus(test: &str) -> Vec<Device> {
    gpus_with("gpu", test)
}

/// The same for kernels whose last work-group finds what the others have written; GPUs without a fence have others.
pub fn fenced_gpus(test: &str) -> Vec<Device> {
    gpus_with("gpu+fence", test)
}

fn gpus_with(kernels: &str, test: &str) -> Vec<Device> {
    match again_with(test, "CLAYSTONE_KERNELS", kernels) {
        true => devices().into_iter().filter(|&d| d != Device::Cpu).take(1).collect(),
        false => Vec::new(),
    }
}

/// The CPU and the best device with their own kernels, and an OpenCL processor with those of GPUs.
pub fn everywhere(test: &str) -> Vec<Device> {
    match gpus(test) {
        none if none.is_empty() => devices().into_iter().filter(|&d| d == Device::Cpu || d == Device::best()).collect(),
        stand_in => stand_in,
    }
}

/// Whether it is a GPU, and not a processor that stands in for one, which takes seconds for some kernels.
pub fn is_gpu(device: Device) -> bool {
    matches!(device.info().unwrap().kind, DeviceKind::DiscreteGpu | DeviceKind::IntegratedGpu)
}

/// All of the cases on a GPU, every `n`-th on a processor that stands in for one.
pub fn cases<T: Copy>(all: &[T], n: usize, device: Device) -> Vec<T> {
    all.iter().copied().step_by(if is_gpu(device) { 1 } else { n }).collect()
}

/// The numbers as the dtype stores them.
pub fn upload(values: &[f64], shape: &[usize], dtype: DType, device: Device) -> Tensor {
    // Converted on the host: what is tested does not make its own inputs.
    let host = Tensor::from_slice(values, [values.len()], Device::Cpu).unwrap().to_dtype(dtype).unwrap();
    host.to_device(device).unwrap().reshape(shape).unwrap()
}

/// Each within `tolerance` of the larger of it and 1; one NaN is as another.
#[track_caller]
pub fn assert_same(got: &[f64], want: &[f64], tolerance: f64, what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        let same = g == w || g.is_nan() && w.is_nan() || (g - w).abs() <= tolerance * (1.0 + w.abs());
        assert!(same, "{what}: element {i} of {} is {g}, not {w}", want.len());
    }
}

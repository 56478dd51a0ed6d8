//! The profiler records the whole process. So its tests run in a separate program, one at a time.

#[path = "../common/mod.rs"]
mod common;

mod averages;
mod files;
mod recording;

use std::sync::{Mutex, MutexGuard, PoisonError};

use claystone::nn::{Activation, Linear, Module, Sequential};
use claystone::optim::{AdamW, AdamWConfig, Optimizer};
use claystone::{Device, Result, Tensor, manual_seed};

/// Locks the profiler for a test, so that tests run one at a time.
fn serial_guard() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Trains a small network for `steps` steps and returns the last loss.
fn train(device: Device, steps: usize) -> Result<f32> {
    manual_seed(7);
    let mut net = Sequential::new()
        .push(Linear::new(64, 32, device)?.with_activation(Activation::Relu))
        .push(Linear::new(32, 10, device)?);
    let mut adam = AdamW::new(net.parameters_mut(), AdamWConfig::default())?;
    let x = Tensor::rand([16, 64], device)?;
    let labels = Tensor::arange(0, 16, 1, device)?.to_dtype(claystone::DType::I64)?.remainder_scalar(10)?;
    let mut last = 0.0;
    for _ in 0..steps {
        let loss = net.forward(&x)?.cross_entropy(&labels)?;
        loss.backward()?;
        adam.step()?;
        adam.zero_grad();
        last = loss.item::<f32>()?;
    }
    Ok(last)
}

//! Measures how fast devices copy within their memory, for comparison with the rates of kernels.

use std::sync::Mutex;

use crate::Device;
use crate::device::lock;

/// Measured rates, in bytes read and written a second.
static RATES: Mutex<Vec<(Device, f64)>> = Mutex::new(Vec::new());

pub(super) fn measured_rate(device: Device) -> Option<f64> {
    lock(&RATES).iter().find(|(of, _)| *of == device).map(|&(_, rate)| rate)
}

/// Measures the rate. Returns `None` if there is not enough memory or the driver refuses.
pub(super) fn measure_rate(device: Device) -> Option<f64> {
    let rate = device.copy_rate()?;
    lock(&RATES).push((device, rate));
    Some(rate)
}

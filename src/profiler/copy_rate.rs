//! How fast devices copy within their memory: what the rates of kernels are compared with.

use std::sync::Mutex;

use crate::Device;
use crate::device::lock;

/// Measured rates, in bytes read and written a second.
static RATES: Mutex<Vec<(Device, f64)>> = Mutex::new(Vec::new());

/// The rate, if it was measured before.
pub(super) fn known(device: Device) -> Option<f64> {
    lock(&RATES).iter().find(|(of, _)| *of == device).map(|&(_, rate)| rate)
}

/// Measures the rate; None where there is no memory for it, or the driver refuses.
pub(super) fn measure(device: Device) -> Option<f64> {
    let rate = device.copy_rate()?;
    lock(&RATES).push((device, rate));
    Some(rate)
}

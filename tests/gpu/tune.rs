//! Tuning that fails.

use claystone::ops::{Backend, Implementation, register};
use claystone::{Device, tune as tuning};

use crate::common;

/// If a kernel gives wrong results, tuning keeps the old values. The test replaces an operation, so it runs in its own process.
#[test]
fn failed_tuning_changes_nothing() {
    if !common::in_own_process("tune::failed_tuning_changes_nothing") {
        return;
    }
    for device in common::devices().into_iter().filter(|&device| device != Device::Cpu) {
        let values = || tuning::parameters(device).unwrap().iter().map(|p| p.value).collect::<Vec<_>>();
        let before = values();
        let wrong = Implementation::new(|x, _| Ok(vec![x[0].sub(x[1])?]));
        let _wrong = register("add", Backend::OpenCL, wrong).unwrap();
        let error = tuning::tune(device, |_| {}).unwrap_err().to_string();
        assert!(error.contains("nothing is saved"), "{error}");
        assert_eq!(values(), before);
    }
}

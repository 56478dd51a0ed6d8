//! Non-blocking copies on a slow or failing driver must return after the enqueue.

use std::time::{Duration, Instant};

use claystone::{Device, Error, Tensor};

use crate::driver::{
    DEVICE, SMALL_ELEMENTS, assert_device_lost, fail_all_waits, on_device, ramp, wait_for_delayed_commands,
};
use crate::stand_in::{Faults, Kind};

fn pinned(value: f32) -> Tensor {
    let pinned = Tensor::full(SMALL_ELEMENTS, value, Device::Cpu).unwrap().pin_memory(DEVICE).unwrap();
    assert!(pinned.is_pinned(DEVICE));
    pinned
}

/// Checks that a call returns within 200 ms. The tests delay commands for longer than that.
fn assert_returns_at_once<T>(f: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = f();
    assert!(start.elapsed() < Duration::from_millis(200), "it waited {:?}", start.elapsed());
    result
}

fn check_non_blocking_copies_return_before_they_end(test: &str, kind: Kind) {
    let Some(faults) = Faults::install(test, kind) else { return };
    let (x, y) = (on_device(&ramp(SMALL_ELEMENTS)), on_device(&[0.0; SMALL_ELEMENTS]));
    let (ones, back) = (pinned(1.0), pinned(-1.0));
    DEVICE.synchronize().unwrap();
    ["clEnqueueReadBuffer", "clEnqueueWriteBuffer"].iter().for_each(|name| faults.delay(name, 300_000));

    // A read of the destination must wait for the copy.
    assert_returns_at_once(|| back.copy_non_blocking_(&x)).unwrap();
    assert_eq!(back.to_vec::<f32>().unwrap(), ramp(SMALL_ELEMENTS));
    // A write to the source must wait for the copy too. A read of the source need not.
    assert_returns_at_once(|| y.copy_non_blocking_(&ones)).unwrap();
    assert_eq!(assert_returns_at_once(|| ones.to_vec::<f32>()).unwrap(), [1.0; SMALL_ELEMENTS]);
    ones.zero_().unwrap();
    assert_eq!(y.to_vec::<f32>().unwrap(), [1.0; SMALL_ELEMENTS]);
    // Pageable host memory is copied within the call, so it can be changed afterwards.
    let bytes = |value: f32| value.to_ne_bytes().repeat(SMALL_ELEMENTS);
    assert_returns_at_once(|| y.write_bytes_non_blocking_(&bytes(3.0))).unwrap();
    assert_eq!(y.to_vec::<f32>().unwrap(), [3.0; SMALL_ELEMENTS]);

    // Pinned memory that is dropped must not be reused before the copy is done.
    faults.delay("clEnqueueWriteBuffer", 0);
    assert_returns_at_once(|| back.copy_non_blocking_(&x)).unwrap();
    drop(back);
    let others: Vec<Tensor> = (0..20).map(|_| pinned(7.0)).collect();
    wait_for_delayed_commands();
    assert!(
        others.iter().all(|other| other.to_vec::<f32>().unwrap() == [7.0; SMALL_ELEMENTS]),
        "a late copy changed it"
    );
}

#[test]
fn non_blocking_copies_return_before_they_end_on_processors() {
    check_non_blocking_copies_return_before_they_end(
        "non_blocking::non_blocking_copies_return_before_they_end_on_processors",
        Kind::Real,
    );
}

#[test]
fn non_blocking_copies_return_before_they_end_on_discrete_gpus() {
    check_non_blocking_copies_return_before_they_end(
        "non_blocking::non_blocking_copies_return_before_they_end_on_discrete_gpus",
        Kind::DiscreteGpu,
    );
}

#[test]
fn failed_copies_are_reported_by_the_next_wait() {
    let test = "non_blocking::failed_copies_are_reported_by_the_next_wait";
    let Some(faults) = Faults::install(test, Kind::Real) else { return };
    let (x, ones, back) = (on_device(&ramp(SMALL_ELEMENTS)), pinned(1.0), pinned(-1.0));
    DEVICE.synchronize().unwrap();
    faults.fail_command("clEnqueueWriteBuffer", 1, 1, -14);
    x.copy_non_blocking_(&ones).unwrap();
    let error = DEVICE.synchronize().unwrap_err();
    assert!(error.to_string().contains("an earlier clEnqueueWriteBuffer"), "{error}");
    DEVICE.synchronize().unwrap();
    faults.fail_command("clEnqueueReadBuffer", 1, 1, -14);
    back.copy_non_blocking_(&x).unwrap();
    let error = DEVICE.synchronize().unwrap_err();
    assert!(error.to_string().contains("an earlier clEnqueueReadBuffer"), "{error}");
    faults.fail_command("clEnqueueWriteBuffer", 1, 1, -14);
    x.write_bytes_non_blocking_(&[0; 4 * SMALL_ELEMENTS]).unwrap();
    assert!(DEVICE.synchronize().is_err());
    // If the driver refuses the call, the call returns the error and no copy is pending.
    faults.fail("clEnqueueReadBuffer", 1, 1, -36);
    assert!(back.copy_non_blocking_(&x).is_err());
    back.copy_non_blocking_(&x).unwrap();
    assert_eq!(back.to_vec::<f32>().unwrap(), x.to_vec::<f32>().unwrap());
}

/// Checks that pinned memory stays locked if the end of a copy cannot be observed. Waits fail from before the enqueue if `before` is
/// true, otherwise from after the enqueue.
fn check_pinned_memory_is_locked_after_device_loss(test: &str, before: bool) {
    let Some(faults) = Faults::install(test, Kind::DiscreteGpu) else { return };
    let (x, back) = (on_device(&ramp(SMALL_ELEMENTS)), pinned(-1.0));
    DEVICE.synchronize().unwrap();
    match before {
        true => {
            fail_all_waits(&faults);
            assert_device_lost(back.copy_non_blocking_(&x));
        }
        false => {
            faults.delay("clEnqueueReadBuffer", 300_000);
            back.copy_non_blocking_(&x).unwrap();
            fail_all_waits(&faults);
            assert_device_lost(x.to_vec::<f32>());
        }
    }
    let is_kept = |error: Error| assert!(matches!(error, Error::DeviceLost { device: DEVICE, .. }), "{error}");
    is_kept(back.to_vec::<f32>().unwrap_err());
    is_kept(back.zero_().unwrap_err());
    is_kept(back.into_host::<f32>().err().unwrap());
    wait_for_delayed_commands(); // the delayed read still writes to the memory until then
}

#[test]
fn pinned_memory_is_locked_if_the_device_is_lost_at_the_enqueue() {
    check_pinned_memory_is_locked_after_device_loss(
        "non_blocking::pinned_memory_is_locked_if_the_device_is_lost_at_the_enqueue",
        true,
    );
}

#[test]
fn pinned_memory_is_locked_if_the_device_is_lost_during_a_copy() {
    check_pinned_memory_is_locked_after_device_loss(
        "non_blocking::pinned_memory_is_locked_if_the_device_is_lost_during_a_copy",
        false,
    );
}

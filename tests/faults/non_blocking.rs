//! Copies that return when they are enqueued, on a driver that is late or fails.

use std::time::{Duration, Instant};

use claystone::{Device, Error, Tensor};

use crate::driver::{DEVICE, SMALL, is_lost_and_says_why, nothing_is_known, on_device, outwait, ramp};
use crate::stand_in::{Faults, Kind};

fn pinned(value: f32) -> Tensor {
    let pinned = Tensor::full(SMALL, value, Device::Cpu).unwrap().pin_memory(DEVICE).unwrap();
    assert!(pinned.is_pinned(DEVICE));
    pinned
}

/// What holds commands back holds them far longer than a call takes.
fn returns_at_once<T>(f: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let result = f();
    assert!(start.elapsed() < Duration::from_millis(200), "it waited {:?}", start.elapsed());
    result
}

fn late_copies(test: &str, kind: Kind) {
    let Some(faults) = Faults::install(test, kind) else { return };
    let (x, y) = (on_device(&ramp(SMALL)), on_device(&[0.0; SMALL]));
    let (ones, back) = (pinned(1.0), pinned(-1.0));
    DEVICE.synchronize().unwrap();
    ["clEnqueueReadBuffer", "clEnqueueWriteBuffer"].iter().for_each(|name| faults.delay(name, 300_000));

    // Whoever reads what is written late waits for it.
    returns_at_once(|| back.copy_non_blocking_(&x)).unwrap();
    assert_eq!(back.to_vec::<f32>().unwrap(), ramp(SMALL));
    // Whoever writes what is read late, too; whoever reads it does not.
    returns_at_once(|| y.copy_non_blocking_(&ones)).unwrap();
    assert_eq!(returns_at_once(|| ones.to_vec::<f32>()).unwrap(), [1.0; SMALL]);
    ones.zero_().unwrap();
    assert_eq!(y.to_vec::<f32>().unwrap(), [1.0; SMALL]);
    // Ordinary memory is copied at once.
    let bytes = |value: f32| value.to_ne_bytes().repeat(SMALL);
    returns_at_once(|| y.write_bytes_non_blocking_(&bytes(3.0))).unwrap();
    assert_eq!(y.to_vec::<f32>().unwrap(), [3.0; SMALL]);

    // Pinned memory that was dropped is not for others before the copy is done.
    faults.delay("clEnqueueWriteBuffer", 0);
    returns_at_once(|| back.copy_non_blocking_(&x)).unwrap();
    drop(back);
    let others: Vec<Tensor> = (0..20).map(|_| pinned(7.0)).collect();
    outwait();
    assert!(others.iter().all(|other| other.to_vec::<f32>().unwrap() == [7.0; SMALL]), "a late copy changed it");
}

#[test]
fn late_copies_on_a_processor() {
    late_copies("non_blocking::late_copies_on_a_processor", Kind::Real);
}

#[test]
fn late_copies_on_a_discrete_gpu() {
    late_copies("non_blocking::late_copies_on_a_discrete_gpu", Kind::DiscreteGpu);
}

#[test]
fn the_next_wait_reports_a_copy_that_failed() {
    let test = "non_blocking::the_next_wait_reports_a_copy_that_failed";
    let Some(faults) = Faults::install(test, Kind::Real) else { return };
    let (x, ones, back) = (on_device(&ramp(SMALL)), pinned(1.0), pinned(-1.0));
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
    x.write_bytes_non_blocking_(&[0; 4 * SMALL]).unwrap();
    assert!(DEVICE.synchronize().is_err());
    // A call that is refused says so itself, and nothing is under way.
    faults.fail("clEnqueueReadBuffer", 1, 1, -36);
    assert!(back.copy_non_blocking_(&x).is_err());
    back.copy_non_blocking_(&x).unwrap();
    assert_eq!(back.to_vec::<f32>().unwrap(), x.to_vec::<f32>().unwrap());
}

/// Where nobody knows whether a copy is done, its memory is nobody's any more: `before` it is enqueued or after that.
fn memory_of_a_lost_device(test: &str, before: bool) {
    let Some(faults) = Faults::install(test, Kind::DiscreteGpu) else { return };
    let (x, back) = (on_device(&ramp(SMALL)), pinned(-1.0));
    DEVICE.synchronize().unwrap();
    match before {
        true => {
            nothing_is_known(&faults);
            is_lost_and_says_why(back.copy_non_blocking_(&x));
        }
        false => {
            faults.delay("clEnqueueReadBuffer", 300_000);
            back.copy_non_blocking_(&x).unwrap();
            nothing_is_known(&faults);
            is_lost_and_says_why(x.to_vec::<f32>());
        }
    }
    let is_kept = |error: Error| assert!(matches!(error, Error::DeviceLost { device: DEVICE, .. }), "{error}");
    is_kept(back.to_vec::<f32>().unwrap_err());
    is_kept(back.zero_().unwrap_err());
    is_kept(back.into_host::<f32>().err().unwrap());
    outwait(); // the memory is still there to be written to
}

#[test]
fn memory_of_a_device_that_is_lost_while_a_copy_is_enqueued() {
    memory_of_a_lost_device("non_blocking::memory_of_a_device_that_is_lost_while_a_copy_is_enqueued", true);
}

#[test]
fn memory_of_a_device_that_is_lost_while_a_copy_is_under_way() {
    memory_of_a_lost_device("non_blocking::memory_of_a_device_that_is_lost_while_a_copy_is_under_way", false);
}

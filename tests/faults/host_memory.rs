//! The host memory of a transfer must be kept as long as the driver may use it.

use claystone::{Device, Error, Stream, Tensor, with_stream};

use crate::driver::{
    DEVICE, SMALL_ELEMENTS, STAGED_ELEMENTS, assert_device_lost, fail_all_waits, on_device, ramp,
    wait_for_delayed_commands,
};
use crate::stand_in::{ALWAYS, Faults, Kind};

/// Checks that the vector of a failed read is not freed while the driver may still write to it.
fn check_vectors_of_failed_reads_are_kept(test: &str, kind: Kind, n: usize) {
    let Some(faults) = Faults::install(test, kind) else { return };
    let t = on_device(&ramp(n));
    assert_eq!(t.to_vec::<f32>().unwrap(), ramp(n));
    fail_all_waits(&faults);
    assert_device_lost(t.to_vec::<f32>());
    assert_new_vectors_do_not_change(n);
    assert_device_lost(t.to_vec::<f32>());
}

/// Allocates many vectors of `n` elements and checks that the driver does not write to them.
#[track_caller]
fn assert_new_vectors_do_not_change(n: usize) {
    let others: Vec<Vec<u8>> = (0..300_000 / n + 20).map(|_| vec![0xab; n * size_of::<f32>()]).collect();
    wait_for_delayed_commands();
    assert!(others.iter().flatten().all(|&byte| byte == 0xab), "the driver wrote to somebody else's memory");
}

#[test]
fn vectors_of_failed_reads_are_kept_on_processors() {
    check_vectors_of_failed_reads_are_kept(
        "host_memory::vectors_of_failed_reads_are_kept_on_processors",
        Kind::Real,
        SMALL_ELEMENTS,
    );
}

#[test]
fn vectors_of_failed_reads_are_kept_on_discrete_gpus() {
    check_vectors_of_failed_reads_are_kept(
        "host_memory::vectors_of_failed_reads_are_kept_on_discrete_gpus",
        Kind::DiscreteGpu,
        SMALL_ELEMENTS,
    );
}

#[test]
fn vectors_of_failed_staged_reads_are_kept() {
    check_vectors_of_failed_reads_are_kept(
        "host_memory::vectors_of_failed_staged_reads_are_kept",
        Kind::DiscreteGpu,
        STAGED_ELEMENTS,
    );
}

/// If a marker fails, the commands before it may still be running, so their host memory must be kept.
#[test]
fn vectors_are_kept_if_only_a_marker_could_tell_the_end() {
    let Some(faults) =
        Faults::install("host_memory::vectors_are_kept_if_only_a_marker_could_tell_the_end", Kind::DiscreteGpu)
    else {
        return;
    };
    let t = on_device(&ramp(SMALL_ELEMENTS));
    assert_eq!(t.to_vec::<f32>().unwrap(), ramp(SMALL_ELEMENTS));
    faults.delay("clEnqueueReadBuffer", 300_000);
    faults.fail("clFinish", 1, ALWAYS, -6);
    faults.fail_command("clEnqueueMarkerWithWaitList", 1, ALWAYS, -14);
    assert_device_lost(t.to_vec::<f32>());
    assert!(faults.injected("clEnqueueMarkerWithWaitList") > 0);
    assert_new_vectors_do_not_change(SMALL_ELEMENTS);
}

/// A block must not be reused while another stream's command may use it, even if the marker after that command failed.
#[test]
fn blocks_are_kept_if_their_marker_failed() {
    let Some(faults) = Faults::install("host_memory::blocks_are_kept_if_their_marker_failed", Kind::Real) else {
        return;
    };
    let (side, one) = (Stream::new(DEVICE).unwrap(), on_device(&[1.0]));
    let t = on_device(&ramp(SMALL_ELEMENTS));
    with_stream(&side, || t.add_(&one).map(drop)).unwrap();
    DEVICE.synchronize().unwrap();
    faults.delay("clEnqueueNDRangeKernel", 300_000);
    with_stream(&side, || t.add_(&one).map(drop)).unwrap();
    faults.delay("clEnqueueNDRangeKernel", 0);
    t.record_stream(&side).unwrap();
    faults.fail_command("clEnqueueMarkerWithWaitList", 1, 1, -14);
    drop(t);
    let others: Vec<Tensor> = (0..20).map(|_| on_device(&[7.0; SMALL_ELEMENTS])).collect();
    assert_eq!(faults.injected("clEnqueueMarkerWithWaitList"), 1);
    wait_for_delayed_commands();
    assert!(
        others.iter().all(|other| other.to_vec::<f32>().unwrap() == [7.0; SMALL_ELEMENTS]),
        "a late command changed it"
    );
}

/// Checks that a failed transfer from or to pinned memory keeps the memory, even if the tensor is dropped after the error.
fn check_pinned_memory_is_kept(test: &str, to_device: bool) {
    let Some(faults) = Faults::install(test, Kind::DiscreteGpu) else { return };
    let pinned = Tensor::full(STAGED_ELEMENTS, -1, Device::Cpu).unwrap().pin_memory(DEVICE).unwrap();
    let t = on_device(&ramp(STAGED_ELEMENTS));
    let values = ramp(2 * STAGED_ELEMENTS);
    let transfer = |pinned: &Tensor| if to_device { t.copy_(pinned).map(drop) } else { pinned.copy_(&t).map(drop) };
    transfer(&pinned).unwrap();
    fail_all_waits(&faults);
    assert_device_lost(transfer(&pinned));
    drop(pinned);
    assert_new_vectors_do_not_change(STAGED_ELEMENTS);
    assert_eq!(values, ramp(2 * STAGED_ELEMENTS));
    assert_device_lost(t.to_vec::<f32>());
}

#[test]
fn pinned_memory_is_kept_while_the_device_writes() {
    check_pinned_memory_is_kept("host_memory::pinned_memory_is_kept_while_the_device_writes", false);
}

#[test]
fn pinned_memory_is_kept_while_the_device_reads() {
    check_pinned_memory_is_kept("host_memory::pinned_memory_is_kept_while_the_device_reads", true);
}

/// A pinned staging slice must be reused only after its transfer has finished, even though the failed call did not wait for the transfer.
#[test]
fn staging_slices_are_not_reused_before_their_transfer_ends() {
    let test = "host_memory::staging_slices_are_not_reused_before_their_transfer_ends";
    let Some(faults) = Faults::install(test, Kind::DiscreteGpu) else { return };
    let all = |value: f32| vec![value; STAGED_ELEMENTS];
    let (t, host) = (on_device(&all(1.0)), Tensor::full(STAGED_ELEMENTS, 3, Device::Cpu).unwrap());
    assert_eq!(t.to_vec::<f32>().unwrap(), all(1.0));
    let late_and_unknown = |name| {
        faults.delay(name, 300_000);
        ["clWaitForEvents", "clGetEventInfo"].iter().for_each(|wait| faults.fail(wait, 1, ALWAYS, -6));
    };
    late_and_unknown("clEnqueueReadBuffer");
    t.to_vec::<f32>().unwrap_err();
    faults.clear();
    // These writes follow the reads in the queue. The reads may still be writing to staging slices.
    assert_eq!(on_device(&all(2.0)).to_vec::<f32>().unwrap(), all(2.0));
    assert_eq!(t.to_vec::<f32>().unwrap(), all(1.0));

    late_and_unknown("clEnqueueWriteBuffer");
    assert!(matches!(t.copy_(&host), Err(Error::Partial { .. })));
    faults.clear();
    // These values must not overwrite staging slices from which the delayed writes may still be reading.
    assert_eq!(on_device(&all(4.0)).to_vec::<f32>().unwrap(), all(4.0));
    assert!(t.to_vec::<f32>().unwrap().iter().all(|&x| x == 1.0 || x == 3.0), "what somebody else has written");
    assert!(DEVICE.is_available());
}

/// Checks that memory of the caller is not written after the call returned an error.
fn check_lent_memory_is_not_written_late(test: &str, kind: Kind, n: usize) {
    let Some(faults) = Faults::install(test, kind) else { return };
    let (t, here) = (on_device(&ramp(n)), Tensor::full(n, -1, Device::Cpu).unwrap());
    fail_all_waits(&faults);
    assert_device_lost(here.copy_(&t));
    wait_for_delayed_commands();
    assert_eq!(here.to_vec::<f32>().unwrap(), vec![-1.0; n]);
}

#[test]
fn lent_memory_is_not_written_late_by_processors() {
    check_lent_memory_is_not_written_late(
        "host_memory::lent_memory_is_not_written_late_by_processors",
        Kind::Real,
        SMALL_ELEMENTS,
    );
}

#[test]
fn lent_memory_is_not_written_late_by_discrete_gpus() {
    check_lent_memory_is_not_written_late(
        "host_memory::lent_memory_is_not_written_late_by_discrete_gpus",
        Kind::DiscreteGpu,
        SMALL_ELEMENTS,
    );
}

#[test]
fn lent_memory_is_not_written_late_by_staged_transfers() {
    check_lent_memory_is_not_written_late(
        "host_memory::lent_memory_is_not_written_late_by_staged_transfers",
        Kind::DiscreteGpu,
        STAGED_ELEMENTS,
    );
}

/// Checks that memory of the caller is not read after the call returned an error, because the caller may free it.
fn check_lent_memory_is_not_read_late(test: &str, kind: Kind, n: usize) {
    let Some(faults) = Faults::install(test, kind) else { return };
    let t = on_device(&ramp(n));
    fail_all_waits(&faults);
    assert_device_lost(Tensor::from_slice(&ramp(n), n, DEVICE)); // the vector is dropped here
    assert_device_lost(t.to_vec::<f32>());
    assert_new_vectors_do_not_change(n);
}

#[test]
fn lent_memory_is_not_read_late_by_processors() {
    check_lent_memory_is_not_read_late(
        "host_memory::lent_memory_is_not_read_late_by_processors",
        Kind::Real,
        SMALL_ELEMENTS,
    );
}

#[test]
fn lent_memory_is_not_read_late_by_discrete_gpus() {
    check_lent_memory_is_not_read_late(
        "host_memory::lent_memory_is_not_read_late_by_discrete_gpus",
        Kind::DiscreteGpu,
        SMALL_ELEMENTS,
    );
}

#[test]
fn lent_memory_is_not_read_late_by_staged_transfers() {
    check_lent_memory_is_not_read_late(
        "host_memory::lent_memory_is_not_read_late_by_staged_transfers",
        Kind::DiscreteGpu,
        STAGED_ELEMENTS,
    );
}

/// While the device may still write to a pinned tensor, every use of the tensor must be an error.
#[test]
fn pinned_tensors_are_unusable_while_the_device_may_write() {
    let test = "host_memory::pinned_tensors_are_unusable_while_the_device_may_write";
    let Some(faults) = Faults::install(test, Kind::DiscreteGpu) else { return };
    let (t, other) = (on_device(&ramp(SMALL_ELEMENTS)), Tensor::zeros(SMALL_ELEMENTS, Device::Cpu).unwrap());
    let pinned = Tensor::full(SMALL_ELEMENTS, -1, Device::Cpu).unwrap().pin_memory(DEVICE).unwrap();
    assert!(pinned.is_pinned(DEVICE));
    pinned.copy_(&t).unwrap();
    assert_eq!(pinned.to_vec::<f32>().unwrap(), ramp(SMALL_ELEMENTS));
    fail_all_waits(&faults);
    assert_device_lost(pinned.copy_(&t));
    let is_kept = |error: Error| assert!(matches!(error, Error::DeviceLost { device: DEVICE, .. }), "{error}");
    is_kept(pinned.to_vec::<f32>().unwrap_err());
    is_kept(pinned.add(&other).unwrap_err());
    is_kept(other.copy_(&pinned).unwrap_err());
    is_kept(pinned.zero_().unwrap_err());
    is_kept(pinned.into_host::<f32>().err().unwrap());
}

/// While the device may still read a pinned tensor, every change of the tensor must be an error.
#[test]
fn pinned_tensors_are_unchangeable_while_the_device_may_read() {
    let Some(faults) =
        Faults::install("host_memory::pinned_tensors_are_unchangeable_while_the_device_may_read", Kind::DiscreteGpu)
    else {
        return;
    };
    let pinned = Tensor::full(SMALL_ELEMENTS, 2, Device::Cpu).unwrap().pin_memory(DEVICE).unwrap();
    assert_eq!(pinned.to_device(DEVICE).unwrap().to_vec::<f32>().unwrap(), [2.0; SMALL_ELEMENTS]);
    fail_all_waits(&faults);
    assert_device_lost(pinned.to_device(DEVICE));
    assert!(matches!(pinned.zero_(), Err(Error::DeviceLost { device: DEVICE, .. })));
    assert_eq!(pinned.to_vec::<f32>().unwrap(), [2.0; SMALL_ELEMENTS], "nobody writes to it");
    assert!(matches!(pinned.into_host::<f32>(), Err(Error::DeviceLost { device: DEVICE, .. })));
}

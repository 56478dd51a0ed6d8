//! Memory of the host that a transfer uses is kept for as long as the driver may use it.

use claystone::{Device, Error, Stream, Tensor, with_stream};

use crate::driver::{DEVICE, SMALL, STAGED, is_lost_and_says_why, nothing_is_known, on_device, outwait, ramp};
use crate::stand_in::{ALWAYS, Faults, Kind};

/// The vector of a failed read must not become somebody else's while the driver may still write to it.
fn a_vector_is_kept(test: &str, kind: Kind, n: usize) {
    let Some(faults) = Faults::install(test, kind) else { return };
    let t = on_device(&ramp(n));
    assert_eq!(t.to_vec::<f32>().unwrap(), ramp(n));
    nothing_is_known(&faults);
    is_lost_and_says_why(t.to_vec::<f32>());
    nobody_elses_memory_changes(n);
    is_lost_and_says_why(t.to_vec::<f32>());
}

/// Takes memory of the size of that many elements, which the driver must not write to.
#[track_caller]
fn nobody_elses_memory_changes(n: usize) {
    let others: Vec<Vec<u8>> = (0..300_000 / n + 20).map(|_| vec![0xab; n * size_of::<f32>()]).collect();
    outwait();
    assert!(others.iter().flatten().all(|&byte| byte == 0xab), "the driver wrote to somebody else's memory");
}

#[test]
fn a_vector_is_kept_on_a_processor() {
    a_vector_is_kept("host_memory::a_vector_is_kept_on_a_processor", Kind::Real, SMALL);
}

#[test]
fn a_vector_is_kept_on_a_discrete_gpu() {
    a_vector_is_kept("host_memory::a_vector_is_kept_on_a_discrete_gpu", Kind::DiscreteGpu, SMALL);
}

#[test]
fn a_vector_is_kept_by_a_staged_transfer() {
    a_vector_is_kept("host_memory::a_vector_is_kept_by_a_staged_transfer", Kind::DiscreteGpu, STAGED);
}

/// A marker that fails does not say that the commands before it are over.
#[test]
fn a_vector_is_kept_where_only_a_marker_tells() {
    let Some(faults) = Faults::install("host_memory::a_vector_is_kept_where_only_a_marker_tells", Kind::DiscreteGpu)
    else {
        return;
    };
    let t = on_device(&ramp(SMALL));
    assert_eq!(t.to_vec::<f32>().unwrap(), ramp(SMALL));
    faults.delay("clEnqueueReadBuffer", 300_000);
    faults.fail("clFinish", 1, ALWAYS, -6);
    faults.fail_command("clEnqueueMarkerWithWaitList", 1, ALWAYS, -14);
    is_lost_and_says_why(t.to_vec::<f32>());
    assert!(faults.injected("clEnqueueMarkerWithWaitList") > 0);
    nobody_elses_memory_changes(SMALL);
}

/// Nor may a block be used again that a command of another stream uses, since the marker behind that command failed.
#[test]
fn a_block_is_kept_whose_marker_failed() {
    let Some(faults) = Faults::install("host_memory::a_block_is_kept_whose_marker_failed", Kind::Real) else { return };
    let (side, one) = (Stream::new(DEVICE).unwrap(), on_device(&[1.0]));
    let t = on_device(&ramp(SMALL));
    with_stream(&side, || t.add_(&one).map(drop)).unwrap();
    DEVICE.synchronize().unwrap();
    faults.delay("clEnqueueNDRangeKernel", 300_000);
    with_stream(&side, || t.add_(&one).map(drop)).unwrap();
    faults.delay("clEnqueueNDRangeKernel", 0);
    t.record_stream(&side).unwrap();
    faults.fail_command("clEnqueueMarkerWithWaitList", 1, 1, -14);
    drop(t);
    let others: Vec<Tensor> = (0..20).map(|_| on_device(&[7.0; SMALL])).collect();
    assert_eq!(faults.injected("clEnqueueMarkerWithWaitList"), 1);
    outwait();
    assert!(others.iter().all(|other| other.to_vec::<f32>().unwrap() == [7.0; SMALL]), "a late command changed it");
}

/// A pinned tensor is read and written where it lies, and may be dropped after the error.
fn a_pinned_tensor_is_kept(test: &str, to_device: bool) {
    let Some(faults) = Faults::install(test, Kind::DiscreteGpu) else { return };
    let pinned = Tensor::full(STAGED, -1, Device::Cpu).unwrap().pin_memory(DEVICE).unwrap();
    let t = on_device(&ramp(STAGED));
    let values = ramp(2 * STAGED);
    let transfer = |pinned: &Tensor| if to_device { t.copy_(pinned).map(drop) } else { pinned.copy_(&t).map(drop) };
    transfer(&pinned).unwrap();
    nothing_is_known(&faults);
    is_lost_and_says_why(transfer(&pinned));
    drop(pinned);
    nobody_elses_memory_changes(STAGED);
    assert_eq!(values, ramp(2 * STAGED));
    is_lost_and_says_why(t.to_vec::<f32>());
}

#[test]
fn a_pinned_tensor_is_kept_that_the_device_writes() {
    a_pinned_tensor_is_kept("host_memory::a_pinned_tensor_is_kept_that_the_device_writes", false);
}

#[test]
fn a_pinned_tensor_is_kept_that_the_device_reads() {
    a_pinned_tensor_is_kept("host_memory::a_pinned_tensor_is_kept_that_the_device_reads", true);
}

/// Pinned slices are not used again before it is known that their transfer is over, which the error did not wait for.
#[test]
fn slices_of_a_failed_transfer_are_not_used_again_too_early() {
    let test = "host_memory::slices_of_a_failed_transfer_are_not_used_again_too_early";
    let Some(faults) = Faults::install(test, Kind::DiscreteGpu) else { return };
    let all = |value: f32| vec![value; STAGED];
    let (t, host) = (on_device(&all(1.0)), Tensor::full(STAGED, 3, Device::Cpu).unwrap());
    assert_eq!(t.to_vec::<f32>().unwrap(), all(1.0));
    let late_and_unknown = |name| {
        faults.delay(name, 300_000);
        ["clWaitForEvents", "clGetEventInfo"].iter().for_each(|wait| faults.fail(wait, 1, ALWAYS, -6));
    };
    late_and_unknown("clEnqueueReadBuffer");
    t.to_vec::<f32>().unwrap_err();
    faults.clear();
    // Written to the device behind the reads, which may still be writing to slices.
    assert_eq!(on_device(&all(2.0)).to_vec::<f32>().unwrap(), all(2.0));
    assert_eq!(t.to_vec::<f32>().unwrap(), all(1.0));

    late_and_unknown("clEnqueueWriteBuffer");
    assert!(matches!(t.copy_(&host), Err(Error::Partial { .. })));
    faults.clear();
    // Copied to slices while the writes may still be reading theirs.
    assert_eq!(on_device(&all(4.0)).to_vec::<f32>().unwrap(), all(4.0));
    assert!(t.to_vec::<f32>().unwrap().iter().all(|&x| x == 1.0 || x == 3.0), "what somebody else has written");
    assert!(DEVICE.is_available());
}

/// Nor is memory that the caller has only lent written to after the error.
fn lent_memory_is_left_alone(test: &str, kind: Kind, n: usize) {
    let Some(faults) = Faults::install(test, kind) else { return };
    let (t, here) = (on_device(&ramp(n)), Tensor::full(n, -1, Device::Cpu).unwrap());
    nothing_is_known(&faults);
    is_lost_and_says_why(here.copy_(&t));
    outwait();
    assert_eq!(here.to_vec::<f32>().unwrap(), vec![-1.0; n]);
}

#[test]
fn lent_memory_is_left_alone_by_a_processor() {
    lent_memory_is_left_alone("host_memory::lent_memory_is_left_alone_by_a_processor", Kind::Real, SMALL);
}

#[test]
fn lent_memory_is_left_alone_by_a_discrete_gpu() {
    lent_memory_is_left_alone("host_memory::lent_memory_is_left_alone_by_a_discrete_gpu", Kind::DiscreteGpu, SMALL);
}

#[test]
fn lent_memory_is_left_alone_by_a_staged_transfer() {
    lent_memory_is_left_alone("host_memory::lent_memory_is_left_alone_by_a_staged_transfer", Kind::DiscreteGpu, STAGED);
}

/// Nor is lent memory read after the error: its owner may release it.
fn lent_memory_is_not_read_late(test: &str, kind: Kind, n: usize) {
    let Some(faults) = Faults::install(test, kind) else { return };
    let t = on_device(&ramp(n));
    nothing_is_known(&faults);
    is_lost_and_says_why(Tensor::from_slice(&ramp(n), n, DEVICE)); // the vector is gone
    is_lost_and_says_why(t.to_vec::<f32>());
    nobody_elses_memory_changes(n);
}

#[test]
fn lent_memory_is_not_read_late_by_a_processor() {
    lent_memory_is_not_read_late("host_memory::lent_memory_is_not_read_late_by_a_processor", Kind::Real, SMALL);
}

#[test]
fn lent_memory_is_not_read_late_by_a_discrete_gpu() {
    lent_memory_is_not_read_late(
        "host_memory::lent_memory_is_not_read_late_by_a_discrete_gpu",
        Kind::DiscreteGpu,
        SMALL,
    );
}

#[test]
fn lent_memory_is_not_read_late_by_a_staged_transfer() {
    lent_memory_is_not_read_late(
        "host_memory::lent_memory_is_not_read_late_by_a_staged_transfer",
        Kind::DiscreteGpu,
        STAGED,
    );
}

/// A pinned tensor is not for anybody any more while the device may still write to it.
#[test]
fn a_pinned_tensor_that_is_written_late_is_kept_from_everybody() {
    let test = "host_memory::a_pinned_tensor_that_is_written_late_is_kept_from_everybody";
    let Some(faults) = Faults::install(test, Kind::DiscreteGpu) else { return };
    let (t, other) = (on_device(&ramp(SMALL)), Tensor::zeros(SMALL, Device::Cpu).unwrap());
    let pinned = Tensor::full(SMALL, -1, Device::Cpu).unwrap().pin_memory(DEVICE).unwrap();
    assert!(pinned.is_pinned(DEVICE));
    pinned.copy_(&t).unwrap();
    assert_eq!(pinned.to_vec::<f32>().unwrap(), ramp(SMALL));
    nothing_is_known(&faults);
    is_lost_and_says_why(pinned.copy_(&t));
    let is_kept = |error: Error| assert!(matches!(error, Error::DeviceLost { device: DEVICE, .. }), "{error}");
    is_kept(pinned.to_vec::<f32>().unwrap_err());
    is_kept(pinned.add(&other).unwrap_err());
    is_kept(other.copy_(&pinned).unwrap_err());
    is_kept(pinned.zero_().unwrap_err());
    is_kept(pinned.into_host::<f32>().err().unwrap());
}

/// Nor is it changed while the device may still read it.
#[test]
fn a_pinned_tensor_that_is_read_late_is_not_changed() {
    let Some(faults) =
        Faults::install("host_memory::a_pinned_tensor_that_is_read_late_is_not_changed", Kind::DiscreteGpu)
    else {
        return;
    };
    let pinned = Tensor::full(SMALL, 2, Device::Cpu).unwrap().pin_memory(DEVICE).unwrap();
    assert_eq!(pinned.to_device(DEVICE).unwrap().to_vec::<f32>().unwrap(), [2.0; SMALL]);
    nothing_is_known(&faults);
    is_lost_and_says_why(pinned.to_device(DEVICE));
    assert!(matches!(pinned.zero_(), Err(Error::DeviceLost { device: DEVICE, .. })));
    assert_eq!(pinned.to_vec::<f32>().unwrap(), [2.0; SMALL], "nobody writes to it");
    assert!(matches!(pinned.into_host::<f32>(), Err(Error::DeviceLost { device: DEVICE, .. })));
}

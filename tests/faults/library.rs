//! The stand-in library `opencl.c` must forward and count all calls, and fail only the requested calls.

use claystone::device::DeviceKind;
use claystone::{Device, Error, Tensor};

use crate::stand_in::{ALWAYS, Faults, Kind};

const DEVICE: Device = Device::OpenCL(0);

/// Returns the name of the call and the code in an OpenCL error.
fn opencl_error<T: std::fmt::Debug>(result: claystone::Result<T>) -> (&'static str, &'static str) {
    match result {
        Err(Error::OpenCl { call, code, .. }) => (call, code),
        other => panic!("{other:?}"),
    }
}

#[test]
fn calls_are_forwarded_counted_and_failed_on_request() {
    let Some(faults) = Faults::install("library::calls_are_forwarded_counted_and_failed_on_request", Kind::Real) else {
        return;
    };
    assert_eq!(DEVICE.info().unwrap().kind, DeviceKind::Cpu);
    let t = Tensor::from_slice(&[1.0f32, 2.0, 3.0], [3], DEVICE).unwrap();
    assert_eq!(t.add_scalar(1).unwrap().to_vec::<f32>().unwrap(), [2.0, 3.0, 4.0]);
    assert!(faults.calls("clEnqueueNDRangeKernel") >= 1);
    let of_each: u64 = faults.names().map(|name| faults.calls(name)).sum();
    assert_eq!((of_each, faults.injected("any")), (faults.calls("any"), 0));

    let reads = faults.calls("clEnqueueReadBuffer");
    faults.fail("clEnqueueReadBuffer", 2, 2, -4);
    for of in [None, Some("CL_MEM_OBJECT_ALLOCATION_FAILURE"), Some("CL_MEM_OBJECT_ALLOCATION_FAILURE"), None] {
        match of {
            Some(code) => assert_eq!(opencl_error(t.to_vec::<f32>()), ("clEnqueueReadBuffer", code)),
            None => assert_eq!(t.to_vec::<f32>().unwrap(), [1.0, 2.0, 3.0]),
        }
    }
    assert_eq!(faults.calls("clEnqueueReadBuffer"), reads + 4);
    assert_eq!(["clEnqueueReadBuffer", "any", "clFlush"].map(|name| faults.injected(name)), [2, 2, 0]);

    faults.fail("clEnqueueReadBuffer", 1, ALWAYS, -11);
    (0..5).for_each(|_| assert_eq!(opencl_error(t.to_vec::<f32>()).1, "CL_BUILD_PROGRAM_FAILURE"));
    faults.clear();
    faults.fail("any", 1, 1, -6);
    assert_eq!(opencl_error(t.to_vec::<f32>()).1, "CL_OUT_OF_HOST_MEMORY");
    assert_eq!(t.to_vec::<f32>().unwrap(), [1.0, 2.0, 3.0]);
}

#[test]
fn commands_fail_late_or_are_delayed_on_request() {
    let Some(faults) = Faults::install("library::commands_fail_late_or_are_delayed_on_request", Kind::Real) else {
        return;
    };
    let t = Tensor::from_slice(&[1.0f32, 2.0, 3.0], [3], DEVICE).unwrap();
    t.to_vec::<f32>().unwrap();
    let (events, buffers) = (faults.live_events(), faults.live_buffers());
    faults.fail_command("clEnqueueReadBuffer", 1, 1, -4);
    assert_eq!(opencl_error(t.to_vec::<f32>()).1, "CL_MEM_OBJECT_ALLOCATION_FAILURE");
    assert_eq!((faults.injected("any"), faults.errors("clEnqueueReadBuffer")), (1, 1));
    assert_eq!(t.to_vec::<f32>().unwrap(), [1.0, 2.0, 3.0]);

    faults.delay("clEnqueueReadBuffer", 20_000);
    let begin = std::time::Instant::now();
    assert_eq!(t.to_vec::<f32>().unwrap(), [1.0, 2.0, 3.0]);
    assert!(begin.elapsed().as_micros() >= 20_000, "the read was not held back");
    assert_eq!((faults.live_events(), faults.live_buffers()), (events, buffers));
}

#[test]
fn devices_can_claim_to_be_discrete_gpus() {
    let Some(faults) = Faults::install("library::devices_can_claim_to_be_discrete_gpus", Kind::DiscreteGpu) else {
        return;
    };
    let info = DEVICE.info().unwrap();
    assert_eq!((info.kind, info.unified_memory), (DeviceKind::DiscreteGpu, false));
    let t = Tensor::from_slice(&[1.0f32, 2.0, 3.0], [3], DEVICE).unwrap();
    assert_eq!(t.add_scalar(1).unwrap().to_vec::<f32>().unwrap(), [2.0, 3.0, 4.0]);
    assert!(faults.calls("clFinish") > 0, "a discrete GPU's queue is finished, not waited for by event");
}

//! Buffers larger than the size that a driver promises. They must be requested as the driver requires; if it refuses, that is the result.

use std::time::Duration;

use claystone::{DType, Device, Error, Kernel, Result, Tensor};

use crate::stand_in::{self, Faults, Kind};

const DEVICE: Device = Device::OpenCL(0);
/// The largest buffer size in bytes that the driver promises.
const PROMISED_BYTES: &str = "4194304";
/// The size in bytes of a tensor larger than the promised size.
const LARGE_BYTES: usize = 10 << 20;

/// Runs `test` in a child process with the given driver. Returns `None` in the parent.
fn with_driver(test: &str, kind: Kind, driver: &str) -> Option<Faults> {
    let here = Faults::here();
    if here.is_none() {
        let variables = [("STAND_IN_LARGEST", PROMISED_BYTES), ("STAND_IN_LARGE", driver)];
        let ended = stand_in::run(test, kind, &variables, Duration::from_secs(300));
        assert!(ended.status.is_some_and(|status| status.success()), "{}", ended.text);
    }
    here
}

/// Computes on all elements of a large tensor, and on its last elements.
fn compute_on_large_tensor() -> Result<()> {
    let x = Tensor::zeros(LARGE_BYTES, (DType::U8, DEVICE))?;
    x.narrow(0, LARGE_BYTES - 5, 5)?.fill_(3)?;
    let y = x.add_scalar(1)?;
    assert_eq!(y.narrow(0, LARGE_BYTES - 7, 7)?.to_vec::<u8>()?, [1, 1, 4, 4, 4, 4, 4]);
    assert_eq!(y.to_dtype(DType::I32)?.sum((), false)?.item::<i64>()?, LARGE_BYTES as i64 + 15);
    Ok(())
}

#[test]
fn drivers_may_grant_more_than_promised() {
    let test = "large_buffers::drivers_may_grant_more_than_promised";
    let Some(faults) = with_driver(test, Kind::DiscreteGpu, "granted") else { return };
    assert_eq!(DEVICE.info().unwrap().largest_buffer, 4 << 20);
    compute_on_large_tensor().unwrap();
    assert_eq!(["unrestricted size", "large buffer", "wide offsets"].map(|what| faults.calls(what)), [0; 3]);
}

#[test]
fn refused_large_buffers_are_errors() {
    for kind in [Kind::Real, Kind::DiscreteGpu] {
        let test = "large_buffers::refused_large_buffers_are_errors";
        let Some(faults) = with_driver(test, kind, "refused") else { continue };
        let kept = Tensor::ones(100, DEVICE).unwrap();
        match Tensor::zeros(LARGE_BYTES, (DType::U8, DEVICE)) {
            Err(error @ Error::OutOfMemory { requested: LARGE_BYTES, .. }) => {
                let error = error.to_string();
                assert!(error.contains("promises buffers of at most 4.00 MiB (4194304 bytes)"), "{error}");
            }
            other => panic!("{other:?}"),
        }
        // Small tensors are allocated in buffers of the promised size, however many tensors there are.
        let small: Vec<Tensor> = (0..12).map(|i| Tensor::full(1 << 18, i, DEVICE).unwrap()).collect();
        assert_eq!(small[11].to_vec::<f32>().unwrap()[99], 11.0);
        assert_eq!(kept.to_vec::<f32>().unwrap(), [1.0; 100]);
        assert_eq!(faults.calls("unrestricted size"), 0);
    }
}

#[test]
fn intels_flag_is_passed_and_programs_are_rebuilt_for_it() {
    let test = "large_buffers::intels_flag_is_passed_and_programs_are_rebuilt_for_it";
    let Some(faults) = with_driver(test, Kind::DiscreteGpu, "intel") else { return };
    let source = "__kernel void twice(__global float *x) { x[get_global_id(0)] *= 2.0f; }";
    let twice = Kernel::from_source("twice", source, "").unwrap();
    let run = |x: &Tensor| {
        let call = twice.call().out(x).global(&[x.numel()]);
        // SAFETY: each work-item changes one element, and `x` has as many elements as work-items.
        unsafe { call.launch() }.unwrap();
    };
    // Programs built before the first large buffer must be built again for it.
    let x = Tensor::ones(4, DEVICE).unwrap();
    run(&x);
    assert_eq!(x.add_scalar(1).unwrap().to_vec::<f32>().unwrap(), [3.0; 4]);
    assert_eq!((faults.calls("unrestricted size"), faults.calls("wide offsets")), (0, 0));
    compute_on_large_tensor().unwrap();
    assert!(faults.calls("unrestricted size") > 0);
    let (built, wide) = (faults.calls("clBuildProgram"), faults.calls("wide offsets"));
    assert!(wide > 0);
    run(&x);
    assert_eq!(x.add_scalar(1).unwrap().to_vec::<f32>().unwrap(), [5.0; 4]);
    let again = faults.calls("clBuildProgram") - built;
    assert_eq!((again > 0, faults.calls("wide offsets") - wide), (true, again), "all with 64-bit offsets");
}

#[test]
fn buffers_are_requested_without_an_unknown_flag_of_intel() {
    // Mesa's driver for Intel's GPUs, for example, rejects the flag.
    let test = "large_buffers::buffers_are_requested_without_an_unknown_flag_of_intel";
    let Some(faults) = with_driver(test, Kind::DiscreteGpu, "intel") else { return };
    Tensor::ones(4, DEVICE).unwrap().to_vec::<f32>().unwrap();
    faults.fail("clCreateBuffer", 1, 1, -30);
    assert!(matches!(Tensor::zeros(LARGE_BYTES, (DType::U8, DEVICE)), Err(Error::OutOfMemory { .. })));
    compute_on_large_tensor().unwrap();
}

#[test]
fn qualcomms_property_is_passed() {
    let test = "large_buffers::qualcomms_property_is_passed";
    let Some(faults) = with_driver(test, Kind::DiscreteGpu, "qualcomm") else { return };
    let x = Tensor::ones(4, DEVICE).unwrap();
    assert_eq!((x.to_vec::<f32>().unwrap(), faults.calls("large buffer")), (vec![1.0; 4], 0));
    compute_on_large_tensor().unwrap();
    assert!(faults.calls("large buffer") > 0);
    assert_eq!((faults.calls("unrestricted size"), faults.calls("wide offsets")), (0, 0));
}

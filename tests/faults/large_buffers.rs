//! Buffers larger than a driver promises: it is asked as it wants to be, and its answer counts.

use std::time::Duration;

use claystone::{DType, Device, Error, Kernel, Result, Tensor};

use crate::stand_in::{self, Faults, Kind};

const DEVICE: Device = Device::OpenCL(0);
/// Bytes that devices promise here, and of a tensor that has more.
const PROMISED: &str = "4194304";
const LARGE: usize = 10 << 20;

/// Runs a test of this name with a driver of this kind. `None` in the process that runs it.
fn with_driver(test: &str, kind: Kind, driver: &str) -> Option<Faults> {
    let here = Faults::here();
    if here.is_none() {
        let variables = [("STAND_IN_LARGEST", PROMISED), ("STAND_IN_LARGE", driver)];
        let ended = stand_in::run(test, kind, &variables, Duration::from_secs(300));
        assert!(ended.status.is_some_and(|status| status.success()), "{}", ended.text);
    }
    here
}

/// Computes over all of a large tensor, and at its end.
fn works() -> Result<()> {
    let x = Tensor::zeros(LARGE, (DType::U8, DEVICE))?;
    x.narrow(0, LARGE - 5, 5)?.fill_(3)?;
    let y = x.add_scalar(1)?;
    assert_eq!(y.narrow(0, LARGE - 7, 7)?.to_vec::<u8>()?, [1, 1, 4, 4, 4, 4, 4]);
    assert_eq!(y.to_dtype(DType::I32)?.sum((), false)?.item::<i64>()?, LARGE as i64 + 15);
    Ok(())
}

#[test]
fn a_driver_that_grants_more_is_believed() {
    let test = "large_buffers::a_driver_that_grants_more_is_believed";
    let Some(faults) = with_driver(test, Kind::DiscreteGpu, "granted") else { return };
    assert_eq!(DEVICE.info().unwrap().largest_buffer, 4 << 20);
    works().unwrap();
    assert_eq!(["unrestricted size", "large buffer", "wide offsets"].map(|what| faults.calls(what)), [0; 3]);
}

#[test]
fn a_driver_that_refuses_is_believed() {
    for kind in [Kind::Real, Kind::DiscreteGpu] {
        let test = "large_buffers::a_driver_that_refuses_is_believed";
        let Some(faults) = with_driver(test, kind, "refused") else { continue };
        let kept = Tensor::ones(100, DEVICE).unwrap();
        match Tensor::zeros(LARGE, (DType::U8, DEVICE)) {
            Err(error @ Error::OutOfMemory { requested: LARGE, .. }) => {
                let error = error.to_string();
                assert!(error.contains("promises buffers of at most 4.00 MiB (4194304 bytes)"), "{error}");
            }
            other => panic!("{other:?}"),
        }
        // Small tensors share buffers that the device promises, however many there are.
        let small: Vec<Tensor> = (0..12).map(|i| Tensor::full(1 << 18, i, DEVICE).unwrap()).collect();
        assert_eq!(small[11].to_vec::<f32>().unwrap()[99], 11.0);
        assert_eq!(kept.to_vec::<f32>().unwrap(), [1.0; 100]);
        assert_eq!(faults.calls("unrestricted size"), 0);
    }
}

#[test]
fn intels_flag_is_given_and_programs_are_built_for_it() {
    let test = "large_buffers::intels_flag_is_given_and_programs_are_built_for_it";
    let Some(faults) = with_driver(test, Kind::DiscreteGpu, "intel") else { return };
    let source = "__kernel void twice(__global float *x) { x[get_global_id(0)] *= 2.0f; }";
    let twice = Kernel::from_source("twice", source, "").unwrap();
    let run = |x: &Tensor| {
        let call = twice.call().out(x).global(&[x.numel()]);
        // SAFETY: each work-item changes an element of its own, which `x` has.
        unsafe { call.launch() }.unwrap();
    };
    // Programs that were built before a large buffer existed are built again for it.
    let x = Tensor::ones(4, DEVICE).unwrap();
    run(&x);
    assert_eq!(x.add_scalar(1).unwrap().to_vec::<f32>().unwrap(), [3.0; 4]);
    assert_eq!((faults.calls("unrestricted size"), faults.calls("wide offsets")), (0, 0));
    works().unwrap();
    assert!(faults.calls("unrestricted size") > 0);
    let (built, wide) = (faults.calls("clBuildProgram"), faults.calls("wide offsets"));
    assert!(wide > 0);
    run(&x);
    assert_eq!(x.add_scalar(1).unwrap().to_vec::<f32>().unwrap(), [5.0; 4]);
    let again = faults.calls("clBuildProgram") - built;
    assert_eq!((again > 0, faults.calls("wide offsets") - wide), (true, again), "all with 64-bit offsets");
}

#[test]
fn a_driver_that_does_not_know_intels_flag_is_asked_without() {
    // Mesa's driver for Intel's GPUs, say.
    let test = "large_buffers::a_driver_that_does_not_know_intels_flag_is_asked_without";
    let Some(faults) = with_driver(test, Kind::DiscreteGpu, "intel") else { return };
    Tensor::ones(4, DEVICE).unwrap().to_vec::<f32>().unwrap();
    faults.fail("clCreateBuffer", 1, 1, -30);
    assert!(matches!(Tensor::zeros(LARGE, (DType::U8, DEVICE)), Err(Error::OutOfMemory { .. })));
    works().unwrap();
}

#[test]
fn qualcomms_property_is_given() {
    let test = "large_buffers::qualcomms_property_is_given";
    let Some(faults) = with_driver(test, Kind::DiscreteGpu, "qualcomm") else { return };
    let x = Tensor::ones(4, DEVICE).unwrap();
    assert_eq!((x.to_vec::<f32>().unwrap(), faults.calls("large buffer")), (vec![1.0; 4], 0));
    works().unwrap();
    assert!(faults.calls("large buffer") > 0);
    assert_eq!((faults.calls("unrestricted size"), faults.calls("wide offsets")), (0, 0));
}

//! Checks that a clone on an OpenCL device is one blocking `clEnqueueCopyBuffer`.

use std::time::{Duration, Instant};

use claystone::{Device, Tensor};

use crate::stand_in::{Faults, Kind};

const MIB: usize = 1 << 20;

/// Checks that a clone of contiguous elements of any size issues one `clEnqueueCopyBuffer` and no other command that moves
/// bytes. The copy is complete when the call returns.
fn check_clones_are_one_blocking_copy(test: &str, kind: Kind) {
    let Some(faults) = Faults::install(test, kind) else { return };
    let device = Device::OpenCL(0);
    let commands: Vec<&str> =
        faults.names().filter(|name| name.starts_with("clEnqueue") && !name.contains("Marker")).collect();
    for bytes in [4, 4096, 4 * MIB - 4, 4 * MIB, 4 * MIB + 4, 20 * MIB] {
        let x = Tensor::arange(0, (bytes / 4 + 3) as i64, 1, device).unwrap();
        let view = x.narrow(0, 3, bytes / 4).unwrap();
        for clone in [|t: &Tensor| t.clone(), |t: &Tensor| t.try_clone().unwrap()] {
            drop(clone(&view)); // leaves a cached block, from which the clone below is allocated
            device.synchronize().unwrap();
            let before: Vec<u64> = commands.iter().map(|name| faults.calls(name)).collect();
            let copy = clone(&view);
            for (name, before) in commands.iter().zip(before) {
                let wanted = u64::from(*name == "clEnqueueCopyBuffer");
                assert_eq!(faults.calls(name) - before, wanted, "{name} in a clone of {bytes} bytes");
            }
            assert!(!copy.shares_storage(&x));
            assert_eq!(copy.to_vec::<f32>().unwrap(), view.to_vec::<f32>().unwrap(), "{bytes} bytes");
        }
    }
    // A clone waits until its copy, which is delayed here, is done.
    let (x, held_back) = (Tensor::ones([MIB], device).unwrap(), Duration::from_millis(30));
    faults.delay("clEnqueueCopyBuffer", held_back.as_micros() as u64);
    let begin = Instant::now();
    drop(x.clone());
    assert!(begin.elapsed() >= held_back, "a clone returns before it is done");
}

#[test]
fn clones_are_one_blocking_copy_on_processors() {
    check_clones_are_one_blocking_copy("clones::clones_are_one_blocking_copy_on_processors", Kind::Real);
}

#[test]
fn clones_are_one_blocking_copy_on_discrete_gpus() {
    check_clones_are_one_blocking_copy("clones::clones_are_one_blocking_copy_on_discrete_gpus", Kind::DiscreteGpu);
}

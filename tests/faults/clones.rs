//! A clone on an OpenCL device is one blocking `clEnqueueCopyBuffer`.

use std::time::{Duration, Instant};

use claystone::{Device, Tensor};

use crate::stand_in::{Faults, Kind};

const MIB: usize = 1 << 20;

/// A clone of contiguous elements, of whatever size, is one `clEnqueueCopyBuffer` that is done when the call returns, and no
/// other command that moves bytes.
fn a_clone_is_one_copy(test: &str, kind: Kind) {
    let Some(faults) = Faults::install(test, kind) else { return };
    let device = Device::OpenCL(0);
    let commands: Vec<&str> =
        faults.names().filter(|name| name.starts_with("clEnqueue") && !name.contains("Marker")).collect();
    for bytes in [4, 4096, 4 * MIB - 4, 4 * MIB, 4 * MIB + 4, 20 * MIB] {
        let x = Tensor::arange(0, (bytes / 4 + 3) as i64, 1, device).unwrap();
        let view = x.narrow(0, 3, bytes / 4).unwrap();
        for clone in [|t: &Tensor| t.clone(), |t: &Tensor| t.try_clone().unwrap()] {
            drop(clone(&view)); // its memory is there for the next one
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
    // Nothing tells that it is done but a wait.
    let (x, held_back) = (Tensor::ones([MIB], device).unwrap(), Duration::from_millis(30));
    faults.delay("clEnqueueCopyBuffer", held_back.as_micros() as u64);
    let begin = Instant::now();
    drop(x.clone());
    assert!(begin.elapsed() >= held_back, "a clone returns before it is done");
}

#[test]
fn a_clone_is_one_copy_on_a_processor() {
    a_clone_is_one_copy("clones::a_clone_is_one_copy_on_a_processor", Kind::Real);
}

#[test]
fn a_clone_is_one_copy_on_a_discrete_gpu() {
    a_clone_is_one_copy("clones::a_clone_is_one_copy_on_a_discrete_gpu", Kind::DiscreteGpu);
}

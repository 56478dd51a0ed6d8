//! Spilling on a real driver whose calls fail: every tensor must keep its values, and the device must not be lost.

use claystone::{DType, Device, Tensor, storage};

use crate::stand_in::{Faults, Kind};

const DEVICE: Device = Device::OpenCL(0);
const MIB: usize = 1 << 20;

/// Makes a tensor of `mib` MiB whose bytes all have this value.
fn filled(mib: usize, value: usize) -> claystone::Result<Tensor> {
    let t = Tensor::empty([mib * MIB], (DType::U8, DEVICE))?;
    t.fill_(value as i64)?;
    Ok(t)
}

#[track_caller]
fn check(live: &[Tensor], what: &str) {
    for (t, value) in live.iter().zip(1..) {
        let values = t.to_vec::<u8>().unwrap_or_else(|error| panic!("{what}: {error}"));
        assert!(values.iter().all(|x| usize::from(*x) == value), "{what}: values of {value} have changed");
    }
}

#[test]
fn failed_calls_while_tensors_move_to_the_host_and_back_change_no_value() {
    let name = "spill::failed_calls_while_tensors_move_to_the_host_and_back_change_no_value";
    let Some(faults) = Faults::install(name, Kind::Real) else { return };
    let (mut spills, mut returns, mut failed) = (0, 0, 0);
    for spill in ["host", "disk"] {
        for (times, code) in [(1, -5), (2, -6), (5, -4)] {
            for nth in 1.. {
                DEVICE.empty_cache().unwrap();
                let config = format!("spill:{spill},memory_limit_mb:12").parse().unwrap();
                let allocator = storage::build_allocator(storage::driver(DEVICE).unwrap(), config).unwrap();
                storage::set_allocator(DEVICE, allocator).unwrap();
                let live: Vec<Tensor> = (1..=4).map(|value| filled(3, value).unwrap()).collect();
                DEVICE.synchronize().unwrap();
                faults.fail("any", nth, times, code);
                let injected = faults.injected("any");
                let large = filled(6, 9).map(drop); // two tensors move out
                let changed: Vec<bool> = live.iter().map(|t| t.add_scalar(0).map(drop).is_err()).collect(); // they return
                let reached = faults.injected("any") > injected;
                faults.clear();
                let what = format!("spill:{spill}, {times} times {code} from call {nth} on: {large:?}, {changed:?}");
                check(&live, &what);
                failed += usize::from(large.is_err());
                filled(6, 9).map(drop).expect(&what);
                live.iter().for_each(|t| t.add_scalar(0).map(drop).expect(&what));
                check(&live, &what);
                let stats = DEVICE.memory_stats().unwrap();
                (spills, returns) = (spills + stats.num_spills, returns + stats.num_returns);
                drop(live);
                DEVICE.empty_cache().unwrap();
                let left = DEVICE.memory_stats().unwrap();
                assert_eq!((left.spilled_bytes.current, left.reserved_bytes.current), (0, 0), "{what}");
                if !reached {
                    break;
                }
            }
        }
    }
    assert!(spills > 100 && returns > 100 && failed > 10, "{spills} {returns} {failed}");
}

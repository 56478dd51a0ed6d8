//! Compaction on a real driver whose calls fail: every tensor must keep its values, and the device must not be lost.

use claystone::{DType, Device, Error, Tensor, storage};

use crate::stand_in::{ALWAYS, Faults, Kind};

const DEVICE: Device = Device::OpenCL(0);
const MIB: usize = 1 << 20;

/// Allocates one tensor per entry, with as many MiB as the entry says, under a memory limit that they fill exactly. Tensors of `Ok`
/// entries are returned, with each byte set to their number. Tensors of `Err` entries are dropped and leave gaps.
fn fill(blocks: &[Result<usize, usize>]) -> Vec<(Tensor, usize)> {
    let all: Vec<Tensor> = blocks.iter().map(|mib| empty(mib.unwrap_or_else(|free| free)).unwrap()).collect();
    let numbered = all.into_iter().zip(1..).zip(blocks);
    let live: Vec<_> = numbered.filter(|(_, mib)| mib.is_ok()).map(|(block, _)| block).collect();
    live.iter().for_each(|(t, value)| t.fill_(*value as i64).map(drop).unwrap());
    DEVICE.synchronize().unwrap();
    live
}

fn empty(mib: usize) -> claystone::Result<Tensor> {
    Tensor::empty([mib * MIB], (DType::U8, DEVICE))
}

#[track_caller]
fn check(live: &[(Tensor, usize)], what: &str) {
    for (t, value) in live {
        let values = t.to_vec::<u8>().unwrap_or_else(|error| panic!("{what}: {error}"));
        assert!(values.iter().all(|x| usize::from(*x) == *value), "{what}: values of {value} have changed");
    }
}

/// Returns layouts of blocks, each with the MiB to request afterwards. In one segment, blocks slide. In two full segments, blocks move
/// through the host.
fn layouts() -> [(Vec<Result<usize, usize>>, usize); 2] {
    let slides = [Err(2), Ok(5), Err(2), Ok(2), Ok(2), Err(2), Ok(3), Err(2)];
    let apart = [Ok(4), Err(4), Ok(8), Err(4), Ok(4), Err(4), Ok(8), Err(4)];
    [(slides.to_vec(), 7), (apart.to_vec(), 14)]
}

/// Installs an allocator with segments of 20 MiB and a memory limit that exactly fits these blocks.
fn begin(blocks: &[Result<usize, usize>]) {
    DEVICE.empty_cache().unwrap();
    let mib: usize = blocks.iter().map(|mib| mib.unwrap_or_else(|free| free)).sum();
    let config = format!("segments:pytorch,memory_limit_mb:{mib}").parse().unwrap();
    let allocator = storage::build_allocator(storage::driver(DEVICE).unwrap(), config).unwrap();
    storage::set_allocator(DEVICE, allocator).unwrap();
}

#[test]
fn failed_calls_during_compaction_change_no_value() {
    let Some(faults) = Faults::install("compaction::failed_calls_during_compaction_change_no_value", Kind::Real) else {
        return;
    };
    let mut moved = 0;
    for (blocks, request) in layouts() {
        for (times, code) in [(1, -5), (2, -6), (5, -4)] {
            for nth in 1.. {
                begin(&blocks);
                let live = fill(&blocks);
                let calls = ["clEnqueueCopyBuffer", "clEnqueueReadBuffer", "clEnqueueMapBuffer"];
                let copies = || calls.into_iter().map(|call| faults.calls(call)).sum::<u64>();
                let before = copies();
                faults.fail("any", nth, times, code);
                let injected = faults.injected("any");
                let large = empty(request);
                let reached = faults.injected("any") > injected;
                faults.clear();
                moved += copies() - before;
                let what = format!("{times} times {code} from call {nth} on: {large:?}");
                check(&live, &what);
                drop(large);
                empty(request).expect(&what);
                check(&live, &what);
                if !reached {
                    break;
                }
            }
        }
    }
    assert!(moved > 100, "only {moved} copies");
}

#[test]
fn tensors_evicted_to_the_host_are_readable_and_return() {
    let name = "compaction::tensors_evicted_to_the_host_are_readable_and_return";
    let Some(faults) = Faults::install(name, Kind::Real) else { return };
    let (blocks, request) = &layouts()[1];
    begin(blocks);
    let live = fill(blocks);
    faults.fail("clCreateBuffer", 1, ALWAYS, -4);
    let error = empty(*request).unwrap_err().to_string();
    assert!(error.contains("kept on the host"), "{error}");
    check(&live, "no memory");
    let results = || live.iter().map(|(t, _)| t.add_scalar_(0).map(drop)).collect::<Vec<_>>();
    let results_without = results();
    let is_oom = |result: &claystone::Result<()>| matches!(result, Err(Error::OutOfMemory { .. }));
    assert!(results_without.iter().any(is_oom), "{results_without:?}");
    assert!(results_without.iter().all(|result| result.is_ok() || is_oom(result)), "{results_without:?}");
    check(&live, "still none");
    faults.clear();
    results().into_iter().for_each(|result| result.unwrap());
    check(&live, "memory");
    let large = empty(*request).unwrap();
    drop((large, live));
    DEVICE.empty_cache().unwrap();
    assert_eq!(DEVICE.memory_stats().unwrap().reserved_bytes.current, 0);
}

//! The fault words of index kernels must be read once per index tensor and kernel, and again after any change of the indices.

use std::thread;

use claystone::{DType, Error, Result, Tensor};

use crate::driver::{DEVICE, on_device};
use crate::stand_in::{Faults, Kind};

fn index(values: &[i64]) -> Tensor {
    Tensor::from_slice(values, values.len(), DEVICE).unwrap()
}

/// Returns the number of driver reads that are caused by a call and by the wait for its result.
fn count_reads(faults: &Faults, call: impl FnOnce() -> Result<Tensor>) -> u64 {
    let before = faults.calls("clEnqueueReadBuffer");
    call().unwrap();
    DEVICE.synchronize().unwrap();
    faults.calls("clEnqueueReadBuffer") - before
}

#[track_caller]
fn assert_reports_index(result: Result<Tensor>, bad: i64) {
    let error = result.and_then(|_| DEVICE.synchronize()).unwrap_err();
    assert!(matches!(error, Error::IndexOutOfRange { index, .. } if index == bad), "{error}");
}

fn check_fault_words_are_read_once_per_index(test: &str, kind: Kind) {
    let sliced = matches!(kind, Kind::DiscreteGpu); // large transfers to the device are cut into slices
    let Some(faults) = Faults::install(test, kind) else { return };
    let x = on_device(&(0..12).map(|i| i as f32).collect::<Vec<_>>()).reshape([4, 3]).unwrap();
    let rows = index(&[3, 0, 2, 2]);
    let each = rows.unsqueeze(1).unwrap().expand([4, 3]).unwrap();
    let calls: [&dyn Fn() -> Result<Tensor>; 6] = [
        &|| x.index_select(0, &rows),
        &|| x.gather(0, &each),
        &|| x.index_add(0, &rows, &x),
        &|| x.scatter_add(0, &each, &x),
        &|| x.cross_entropy(&rows.clamp(0, 2)?),
        &|| rows.one_hot(5),
    ];
    for (k, call) in calls.iter().enumerate() {
        assert_eq!(count_reads(&faults, call), 1, "call {k}");
        // The labels are a new tensor in each call, so their faults must be read in each call.
        assert_eq!(count_reads(&faults, call), u64::from(k == 4), "call {k} again");
    }
    let labels = index(&[0, 2, 1, 1]);
    let loss = || x.cross_entropy(&labels);
    assert_eq!((count_reads(&faults, loss), count_reads(&faults, loss)), (1, 0));

    let select = || x.index_select(0, &rows);
    assert_eq!(
        (count_reads(&faults, select), count_reads(&faults, select)),
        (1, 0),
        "another kernel's check of it was the last"
    );
    let part = rows.narrow(0, 1, 2).unwrap();
    assert_eq!(count_reads(&faults, || x.index_select(0, &part)), 1, "other elements");
    assert_eq!(count_reads(&faults, || x.narrow(0, 1, 3)?.index_select(0, &part)), 1, "a smaller dim");
    // If there is no wait between two kernels, their faults are read together.
    let other = index(&[1, 1]);
    assert_eq!(count_reads(&faults, || x.index_select(0, &other).and_then(|_| x.index_select(0, &other))), 1);
    assert_eq!(count_reads(&faults, || x.index_select(0, &other)), 0);
    // Each thread has its own fault words, so another thread must read its own.
    let elsewhere = thread::scope(|s| s.spawn(|| count_reads(&faults, || x.index_select(0, &other))).join().unwrap());
    assert_eq!(elsewhere, 1);

    // A change may make valid indices invalid. Invalid indices must be reported every time.
    assert_eq!((count_reads(&faults, select), count_reads(&faults, select)), (1, 0));
    rows.select(0, 1).unwrap().fill_(7).unwrap();
    (0..3).for_each(|_| assert_reports_index(select(), 7));
    rows.copy_(&index(&[0, 1, 2, 3])).unwrap();
    assert_eq!((count_reads(&faults, select), count_reads(&faults, select)), (1, 0));
    let bytes: Vec<u8> = [0i64, 9, 1, 1].iter().flat_map(|n| n.to_ne_bytes()).collect();
    rows.write_bytes_(&bytes).unwrap();
    assert_reports_index(select(), 9);
    // A fault of one index tensor may hide a fault of another. So after a fault, every index tensor must be checked again.
    rows.copy_(&index(&[0, 1, 2, 3])).unwrap();
    assert_eq!((count_reads(&faults, select), count_reads(&faults, select)), (1, 0));
    assert_reports_index(x.index_select(0, &index(&[5])), 5);
    assert_eq!((count_reads(&faults, select), count_reads(&faults, select)), (1, 0));
    // The same bytes have other values in another dtype, so they must be checked again.
    let pairs = Tensor::from_slice(&[1i32, 1, 9, 9], 4, DEVICE).unwrap();
    let first = pairs.narrow(0, 0, 2).unwrap();
    assert_eq!((count_reads(&faults, || first.one_hot(5)), count_reads(&faults, || first.one_hot(5))), (1, 0));
    assert_reports_index(pairs.view_dtype(DType::I64).unwrap().one_hot(5), 1 + (1 << 32));
    // A failed write may have changed some of the indices, so they must be checked again.
    let many = index(&vec![0; 1 << 19]);
    let select_many = || x.index_select(0, &many);
    assert_eq!((count_reads(&faults, select_many), count_reads(&faults, select_many)), (1, 0));
    let bytes: Vec<u8> = (0..1 << 19).flat_map(|_| 9i64.to_ne_bytes()).collect();
    let version = many.storage().version();
    let (call, nth) = if sliced { ("clEnqueueWriteBuffer", 2) } else { ("clEnqueueMapBuffer", 1) };
    faults.fail(call, nth, 1, -5);
    let error = many.write_bytes_(&bytes).unwrap_err();
    if sliced {
        assert!(matches!(error, Error::Partial { .. }), "{error}");
        assert!(many.storage().version() > version);
        assert_reports_index(select_many(), 9);
    } else {
        assert_eq!(count_reads(&faults, select_many), 1);
    }
    // Code outside the crate may change an exported buffer, so its indices must be checked in each call.
    rows.storage().export_cl().unwrap();
    assert_eq!((count_reads(&faults, select), count_reads(&faults, select)), (1, 1));
}

#[test]
fn fault_words_are_read_once_per_index_on_processors() {
    check_fault_words_are_read_once_per_index("indices::fault_words_are_read_once_per_index_on_processors", Kind::Real);
}

#[test]
fn fault_words_are_read_once_per_index_on_discrete_gpus() {
    check_fault_words_are_read_once_per_index(
        "indices::fault_words_are_read_once_per_index_on_discrete_gpus",
        Kind::DiscreteGpu,
    );
}

//! What kernels recorded of indices is read once for each index and kernel, and again once anything is changed.

use std::thread;

use claystone::{DType, Error, Result, Tensor};

use crate::driver::{DEVICE, on_device};
use crate::stand_in::{Faults, Kind};

fn index(values: &[i64]) -> Tensor {
    Tensor::from_slice(values, values.len(), DEVICE).unwrap()
}

/// Reads that the driver was asked for by a call and the wait for it.
fn reads(faults: &Faults, call: impl FnOnce() -> Result<Tensor>) -> u64 {
    let before = faults.calls("clEnqueueReadBuffer");
    call().unwrap();
    DEVICE.synchronize().unwrap();
    faults.calls("clEnqueueReadBuffer") - before
}

#[track_caller]
fn tells(result: Result<Tensor>, bad: i64) {
    let error = result.and_then(|_| DEVICE.synchronize()).unwrap_err();
    assert!(matches!(error, Error::IndexOutOfRange { index, .. } if index == bad), "{error}");
}

fn indices_are_asked_about_once(test: &str, kind: Kind) {
    let sliced = matches!(kind, Kind::DiscreteGpu); // large transfers to it
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
        assert_eq!(reads(&faults, call), 1, "call {k}");
        // Labels are new each time.
        assert_eq!(reads(&faults, call), u64::from(k == 4), "call {k} again");
    }
    let labels = index(&[0, 2, 1, 1]);
    let loss = || x.cross_entropy(&labels);
    assert_eq!((reads(&faults, loss), reads(&faults, loss)), (1, 0));

    let select = || x.index_select(0, &rows);
    assert_eq!((reads(&faults, select), reads(&faults, select)), (1, 0), "another kernel's check of it was the last");
    let part = rows.narrow(0, 1, 2).unwrap();
    assert_eq!(reads(&faults, || x.index_select(0, &part)), 1, "other elements");
    assert_eq!(reads(&faults, || x.narrow(0, 1, 3)?.index_select(0, &part)), 1, "a smaller dim");
    // Two kernels before anybody waits are read of together.
    let other = index(&[1, 1]);
    assert_eq!(reads(&faults, || x.index_select(0, &other).and_then(|_| x.index_select(0, &other))), 1);
    assert_eq!(reads(&faults, || x.index_select(0, &other)), 0);
    // Another thread's words are others.
    let elsewhere = thread::scope(|s| s.spawn(|| reads(&faults, || x.index_select(0, &other))).join().unwrap());
    assert_eq!(elsewhere, 1);

    // What was in range may not be after a change, and what is not in range is told every time.
    assert_eq!((reads(&faults, select), reads(&faults, select)), (1, 0));
    rows.select(0, 1).unwrap().fill_(7).unwrap();
    (0..3).for_each(|_| tells(select(), 7));
    rows.copy_(&index(&[0, 1, 2, 3])).unwrap();
    assert_eq!((reads(&faults, select), reads(&faults, select)), (1, 0));
    let bytes: Vec<u8> = [0i64, 9, 1, 1].iter().flat_map(|n| n.to_ne_bytes()).collect();
    rows.write_bytes_(&bytes).unwrap();
    tells(select(), 9);
    // A fault of another index may hide a second one: all are asked about again.
    rows.copy_(&index(&[0, 1, 2, 3])).unwrap();
    assert_eq!((reads(&faults, select), reads(&faults, select)), (1, 0));
    tells(x.index_select(0, &index(&[5])), 5);
    assert_eq!((reads(&faults, select), reads(&faults, select)), (1, 0));
    // The same bytes are other numbers in another dtype.
    let pairs = Tensor::from_slice(&[1i32, 1, 9, 9], 4, DEVICE).unwrap();
    let first = pairs.narrow(0, 0, 2).unwrap();
    assert_eq!((reads(&faults, || first.one_hot(5)), reads(&faults, || first.one_hot(5))), (1, 0));
    tells(pairs.view_dtype(DType::I64).unwrap().one_hot(5), 1 + (1 << 32));
    // A write that fails may have changed a part.
    let many = index(&vec![0; 1 << 19]);
    let select_many = || x.index_select(0, &many);
    assert_eq!((reads(&faults, select_many), reads(&faults, select_many)), (1, 0));
    let bytes: Vec<u8> = (0..1 << 19).flat_map(|_| 9i64.to_ne_bytes()).collect();
    let version = many.storage().version();
    let (call, nth) = if sliced { ("clEnqueueWriteBuffer", 2) } else { ("clEnqueueMapBuffer", 1) };
    faults.fail(call, nth, 1, -5);
    let error = many.write_bytes_(&bytes).unwrap_err();
    if sliced {
        assert!(matches!(error, Error::Partial { .. }), "{error}");
        assert!(many.storage().version() > version);
        tells(select_many(), 9);
    } else {
        assert_eq!(reads(&faults, select_many), 1);
    }
    // Other code may change what was handed out.
    rows.storage().export_cl().unwrap();
    assert_eq!((reads(&faults, select), reads(&faults, select)), (1, 1));
}

#[test]
fn indices_are_asked_about_once_on_a_processor() {
    indices_are_asked_about_once("indices::indices_are_asked_about_once_on_a_processor", Kind::Real);
}

#[test]
fn indices_are_asked_about_once_on_a_discrete_gpu() {
    indices_are_asked_about_once("indices::indices_are_asked_about_once_on_a_discrete_gpu", Kind::DiscreteGpu);
}

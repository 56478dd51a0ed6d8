//! Reductions to few results by the kernels of GPUs, which cut them in slices that work-groups of their own add up: the last group of a
//! result combines them, or a second launch. Where no GPU is, OpenCL processors run them: each test starts itself again with
//! `CLAYSTONE_KERNELS=gpu`, and where the last group does with `gpu+fence`.

use claystone::device::count_launches;
use claystone::{DType, Device, Tensor};

use crate::common::gpus::{assert_same, fenced_gpus, gpus, is_gpu, upload};
use crate::common::values;

/// Whole numbers whose sums f32 stores exactly, and a greatest one in a late place.
fn numbers(n: usize, seed: usize) -> Vec<f64> {
    (0..n).map(|i| if i == n / 3 * 2 { 9.0 } else { ((i * 7919 + i / 5 + seed) % 13) as f64 - 6.0 }).collect()
}

/// Sums, greatest elements and their places, rows by rows and columns by columns, again and again: counters begin at zero each time.
fn few_results(device: Device, launches: u64) {
    for (rows, n) in [(1, 300_007), (3, 100_000), (2, 65_537), (1, 40_960)] {
        let xs = numbers(rows * n, rows);
        let sums: Vec<f64> = xs.chunks(n).map(|row| row.iter().sum()).collect();
        let greatest: Vec<f64> = xs.chunks(n).map(|row| row.iter().copied().fold(f64::MIN, f64::max)).collect();
        let places: Vec<f64> =
            xs.chunks(n).zip(&greatest).map(|(row, m)| row.iter().position(|x| x == m).unwrap() as f64).collect();
        let x = upload(&xs, &[rows, n], DType::F32, device);
        let turned = x.t().unwrap().contiguous().unwrap();
        for (x, dim) in [(&x, 1), (&turned, 0), (&x, 1)] {
            let what = format!("{rows} x {n} along {dim}");
            let (sum, counted) = count_launches(|| x.sum(dim, false).unwrap());
            assert_same(&values(&sum), &sums, 0.0, &what);
            // A GPU has a fence or has none, whatever is asked of a processor.
            let right = if is_gpu(device) { (1..=2).contains(&counted) } else { counted == launches };
            assert!(right, "{counted} launches for {what}");
            assert_same(&values(&x.max(dim, false).unwrap()), &greatest, 0.0, &what);
            assert_same(&values(&x.argmax(dim, false).unwrap()), &places, 0.0, &what);
        }
    }
    let mut xs = vec![1f32; 200_000];
    xs[150_000] = f32::NAN;
    let x = Tensor::from_slice(&xs, 200_000, device).unwrap();
    assert!(values(&x.sum((), false).unwrap())[0].is_nan() && values(&x.max(0, false).unwrap())[0].is_nan());
    assert_eq!(values(&x.argmax(0, false).unwrap()), [150_000.0]);
}

#[test]
fn few_results_in_two_launches() {
    gpus("reductions::few_results_in_two_launches").into_iter().for_each(|device| few_results(device, 2));
}

#[test]
fn few_results_by_the_last_group() {
    fenced_gpus("reductions::few_results_by_the_last_group").into_iter().for_each(|device| few_results(device, 1));
}

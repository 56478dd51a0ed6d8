//! Tests GPU kernels for reductions with few results, which split the input into slices for several work-groups. Either a second
//! launch or the last work-group of a result combines the slices. Without a GPU, an OpenCL CPU device runs the kernels: each test
//! restarts itself with `CLAYSTONE_KERNELS=gpu`, or with `gpu+fence` if the last work-group combines the slices.

use claystone::device::count_launches;
use claystone::{DType, Device, Tensor};

use crate::common::gpus::{assert_same, fenced_gpus, gpus, is_gpu, upload};
use crate::common::values;

/// Returns whole numbers whose sums are exact in f32, with a single maximum at two thirds of the length.
fn numbers(n: usize, seed: usize) -> Vec<f64> {
    (0..n).map(|i| if i == n / 3 * 2 { 9.0 } else { ((i * 7919 + i / 5 + seed) % 13) as f64 - 6.0 }).collect()
}

/// Checks sums, maxima and argmax of rows and columns. Repeated calls show that the kernel resets the work-groups' counters.
fn check_few_results(device: Device, launches: u64) {
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
            // Whether a GPU uses a fence depends on the GPU, so one or two launches are right. The environment variable has an
            // effect only on CPU devices.
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
fn two_launches_give_exact_sums_and_maxima() {
    gpus("reductions::two_launches_give_exact_sums_and_maxima")
        .into_iter()
        .for_each(|device| check_few_results(device, 2));
}

#[test]
fn last_groups_give_exact_sums_and_maxima() {
    fenced_gpus("reductions::last_groups_give_exact_sums_and_maxima")
        .into_iter()
        .for_each(|device| check_few_results(device, 1));
}

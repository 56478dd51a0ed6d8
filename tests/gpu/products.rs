//! Tests GPU kernels for matrix products with few rows or columns against sums in f64. Sizes are around the edges of vectors, lanes
//! and slices; operands have offsets, strides and batches. Without a GPU, an OpenCL CPU device runs the kernels: each test restarts
//! itself with `CLAYSTONE_KERNELS=gpu`, or with `gpu+fence` for kernels in which work-groups split columns.

use claystone::device::count_launches;
use claystone::{DType, Device, Tensor, set_float32_matmul_precision};

use crate::common::gpus::{assert_same, fenced_gpus, gpus, upload};
use crate::common::{in_own_process, values};

/// Returns whole numbers from -3 to 3 (for u8 from 0 to 6). Sums of products are exact unless they are rounded to a 16-bit float.
fn numbers(n: usize, seed: usize, dtype: DType) -> Vec<f64> {
    let least = if matches!(dtype, DType::U8) { 0.0 } else { -3.0 };
    (0..n).map(|i| ((i * 7919 + i / 7 + seed) % 7) as f64 + least).collect()
}

fn stored(v: f64, dtype: DType) -> f64 {
    match dtype {
        DType::U8 => f64::from(v as i64 as u8),
        DType::I8 => f64::from(v as i64 as i8),
        _ => values(&upload(&[v], &[1], dtype, Device::Cpu))[0],
    }
}

/// Checks `batch` products [m, k] x [k, n]. Both operands start at element `at` of their storage. In memory, the second has a gap
/// of `pad` elements after each row (if `transposed`, each column).
fn check(device: Device, dtype: DType, [batch, m, n, k]: [usize; 4], transposed: bool, [at, pad]: [usize; 2]) {
    let what = format!("{batch} of {m} x {k} x {n} of {dtype} at {at}, {pad} longer, transposed: {transposed}");
    let (lines, length) = if transposed { (n, k) } else { (k, n) };
    let (xs, ys) = (numbers(batch * m * k + at, 1, dtype), numbers(batch * lines * (length + pad) + at, 4, dtype));
    let up = |v: &[f64], shape: &[usize]| {
        let all = upload(v, &[v.len()], dtype, device);
        all.narrow(0, at, v.len() - at).unwrap().reshape(shape).unwrap()
    };
    let a = up(&xs, &[batch, m, k]);
    let b = up(&ys, &[batch, lines, length + pad]).narrow(2, 0, length).unwrap();
    let b = if transposed { b.transpose(1, 2).unwrap() } else { b };
    let mut want = Vec::with_capacity(batch * m * n);
    for (z, i, j) in (0..batch * m * n).map(|e| (e / (m * n), e / n % m, e % n)) {
        let at_b = |p: usize| at + (z * lines + if transposed { j } else { p }) * (length + pad);
        let sum: f64 =
            (0..k).map(|p| xs[at + (z * m + i) * k + p] * ys[at_b(p) + if transposed { p } else { j }]).sum();
        want.push(stored(sum, dtype));
    }
    // A product takes at most one launch, also if it is empty.
    let (y, launches) = count_launches(|| a.matmul(&b).unwrap());
    assert_same(&values(&y), &want, 0.0, &what);
    assert!(launches <= 1, "{launches} launches for {what}");
    // The transposed product b^T a^T has few columns instead of few rows.
    let y = b.transpose(1, 2).unwrap().matmul(&a.transpose(1, 2).unwrap()).unwrap();
    assert_same(&values(&y.transpose(1, 2).unwrap()), &want, 0.0, &format!("{what}, turned round"));
}

fn check_few_rows(device: Device) {
    let sizes = [
        [1, 1, 1, 1],
        [1, 1, 5, 0],
        [1, 2, 127, 9],
        [1, 3, 128, 65],
        [1, 5, 129, 63],
        [1, 1, 256, 511],
        [1, 1, 252, 512],
        [1, 2, 260, 513],
        [1, 1, 8, 4099],
        [1, 7, 100, 1031],
        [1, 8, 20, 70],
        [1, 1, 1, 20_011],
        [1, 1, 3, 16_384],
        [3, 1, 64, 2048],
        [7, 2, 12, 40],
    ];
    for (size, transposed) in sizes.into_iter().flat_map(|size| [(size, false), (size, true)]) {
        for offsets in [[0, 0], [1, 0], [8, 8], [0, 3]] {
            check(device, DType::F32, size, transposed, offsets);
        }
    }
    for dtype in [DType::F16, DType::BF16, DType::F64, DType::I64, DType::I16, DType::I8, DType::U8] {
        for transposed in [false, true] {
            check(device, dtype, [1, 1, 256, 1031], transposed, [0, 0]);
            check(device, dtype, [1, 6, 72, 2056], transposed, [8, 16]);
            check(device, dtype, [2, 2, 33, 700], transposed, [1, 0]);
        }
    }
}

#[test]
fn products_with_few_rows_are_exact() {
    gpus("products::products_with_few_rows_are_exact").into_iter().for_each(check_few_rows);
}

#[test]
fn products_with_groups_that_split_columns_are_exact() {
    for device in fenced_gpus("products::products_with_groups_that_split_columns_are_exact") {
        check_few_rows(device);
        // Repeated calls show that the kernel resets the work-groups' counters. For n = 33 the last tile is partly empty.
        for n in [128, 33] {
            let (x, y) = (numbers(4096, 2, DType::F32), numbers(4096 * n, 3, DType::F32));
            let want: Vec<f64> = (0..n).map(|j| (0..4096).map(|p| x[p] * y[p * n + j]).sum()).collect();
            let (x, y) = (upload(&x, &[1, 4096], DType::F32, device), upload(&y, &[4096, n], DType::F32, device));
            for _ in 0..200 {
                assert_same(&values(&x.matmul(&y).unwrap()), &want, 0.0, "again");
            }
        }
    }
}

/// TF32 products in all layouts, at sizes around the edges of tiles. Products of small whole numbers are exact, and others nearly
/// exact. NaN and infinity affect only the rows and columns that contain them.
#[test]
fn tf32_products_are_nearly_exact() {
    if !in_own_process("products::tf32_products_are_nearly_exact") {
        return;
    }
    set_float32_matmul_precision("medium").unwrap();
    let device = Device::best();
    let sizes =
        [[64, 64, 32], [65, 63, 33], [128, 256, 96], [129, 257, 100], [300, 72, 1000], [40, 520, 2052], [1, 1, 40]];
    let made = |rows: usize, cols: usize, along: bool, v: &dyn Fn(usize, usize) -> f64| {
        let (lines, length) = if along { (rows, cols) } else { (cols, rows) };
        let of = |line, e| if along { v(line, e) } else { v(e, line) };
        // Each line is followed by a gap of four elements.
        let all: Vec<f64> = (0..lines * (length + 4)).map(|i| of(i / (length + 4), i % (length + 4))).collect();
        let t = upload(&all, &[lines, length + 4], DType::F32, device).narrow(1, 0, length).unwrap();
        if along { t } else { t.t().unwrap() }
    };
    for ([m, n, k], along) in
        sizes.iter().flat_map(|&size| (0..4).map(move |along| (size, [along & 1 > 0, along & 2 > 0])))
    {
        let what = format!("{m} x {n} x {k}, along k: {along:?}");
        let whole = |i: usize, j: usize| ((i * 7919 + j * 104_729 + i * j) % 7) as f64 - 3.0;
        let third = |i: usize, j: usize| whole(i, j) / 3.0;
        let product = |f: &dyn Fn(usize, usize) -> f64| {
            let (a, b) = (made(m, k, along[0], f), made(k, n, !along[1], f));
            let want: Vec<f64> = (0..m * n).map(|e| (0..k).map(|p| f(e / n, p) * f(p, e % n)).sum()).collect();
            (values(&a.matmul(&b).unwrap()), want)
        };
        let (got, want) = product(&whole);
        assert_same(&got, &want, 0.0, &what);
        let (got, want) = product(&third);
        let most = (k as f64) / 512.0;
        assert!(got.iter().zip(&want).all(|(g, w)| (g - w).abs() <= most), "{what}: not nearly as exact as TF32");
        let odd = |i: usize, j: usize| match (i, j) {
            (0, 1) => f64::INFINITY,
            (3, 5) => f64::NAN,
            _ => 1.0,
        };
        let (got, want) = product(&odd);
        assert_same(&got, &want, 0.0, &format!("{what}, not finite"));
    }
}

/// NaN and infinity affect only their columns, in whichever slice of k they are.
#[test]
fn infinities_and_nan_stay_in_their_columns() {
    for device in fenced_gpus("products::infinities_and_nan_stay_in_their_columns") {
        let (k, n) = (2048, 64);
        let mut y = vec![1f64; k * n];
        y[5 * n + 1] = f64::NAN;
        y[2047 * n + 2] = f64::INFINITY;
        (y[3], y[1500 * n + 3]) = (f64::INFINITY, f64::NEG_INFINITY);
        let mut want = vec![k as f64; n];
        (want[1], want[2], want[3]) = (f64::NAN, f64::INFINITY, f64::NAN);
        for dtype in [DType::F32, DType::BF16] {
            let (x, b) = (
                Tensor::full([1, k], 1.0, device).unwrap().to_dtype(dtype).unwrap(),
                upload(&y, &[k, n], dtype, device),
            );
            assert_same(&values(&x.matmul(&b).unwrap()), &want, 0.0, "across k");
            let turned = b.t().unwrap().contiguous().unwrap();
            assert_same(&values(&x.matmul(&turned.t().unwrap()).unwrap()), &want, 0.0, "along k");
        }
    }
}

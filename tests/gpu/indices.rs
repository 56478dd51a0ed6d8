//! Tests GPU kernels that read and write through indices against plain loops. Sizes are around the edges of rows, index lists and
//! tiles. Without a GPU, an OpenCL CPU device runs the kernels: each test restarts itself with `CLAYSTONE_KERNELS=gpu`.

use claystone::ops::ScatterReduce;
use claystone::{DType, Device, Error, Tensor};

use crate::common;
use crate::common::values;

fn device_with_gpu_kernels(test: &str) -> Option<Device> {
    let there = common::in_child_with(test, "CLAYSTONE_KERNELS", "gpu");
    common::devices().into_iter().find(|&d| there && d != Device::Cpu)
}

/// Returns numbers that the dtype represents exactly, including NaN and infinity for floats.
fn numbers(n: usize, seed: usize, dtype: DType) -> Vec<f64> {
    (0..n)
        .map(|i| match (i * 7 + seed) * 31 % 61 {
            5 if dtype.is_float() => f64::NAN,
            6 if dtype.is_float() => f64::INFINITY,
            x if dtype == DType::Bool => (x % 2) as f64,
            x => (x % 9) as f64,
        })
        .collect()
}

/// Returns numbers whose sum depends on the order of addition.
fn fractions(n: usize, seed: usize) -> Vec<f64> {
    (0..n).map(|i| f64::from(((i + seed) * 131 % 1013) as f32 * 0.37 - 150.1)).collect()
}

/// Returns a matrix that begins `skip` elements after the start of its memory and has a gap of `skip` elements between rows.
fn matrix(xs: &[f64], [rows, columns]: [usize; 2], skip: usize, dtype: DType, device: Device) -> Tensor {
    let padded: Vec<f64> =
        xs.chunks(columns).flat_map(|row| vec![0.0; skip].into_iter().chain(row.iter().copied())).collect();
    let host = Tensor::from_slice(&padded, [rows, columns + skip], Device::Cpu).unwrap().to_dtype(dtype).unwrap();
    host.to_device(device).unwrap().narrow(1, skip, columns).unwrap()
}

#[track_caller]
fn assert_same(got: &[f64], want: &[f64], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    let other = got.iter().zip(want).position(|(g, w)| g != w && !(g.is_nan() && w.is_nan()));
    assert!(
        other.is_none(),
        "{what}: element {} is {} and not {}",
        other.unwrap(),
        got[other.unwrap()],
        want[other.unwrap()]
    );
}

/// Returns indices below `size`. With `crowded`, half of the indices are 0 or 1.
fn index_values(n: usize, size: usize, crowded: bool) -> Vec<i64> {
    let one = |i: usize| if crowded && i.is_multiple_of(2) { i / 2 % 2 % size } else { i * 7919 % 10007 * 31 % size };
    (0..n).map(|i| one(i) as i64).collect()
}

fn index(places: &[i64], shape: &[usize], dtype: DType, device: Device) -> Tensor {
    Tensor::from_slice(places, shape, Device::Cpu).unwrap().to_dtype(dtype).unwrap().to_device(device).unwrap()
}

/// Returns the expected result of a scatter: for each source element in order, the target `x` becomes `meet(x, element)`.
fn scattered_reference(
    x: &[f64],
    [_, columns]: [usize; 2],
    source: &[f64],
    [_, wide]: [usize; 2],
    to: impl Fn(usize, usize) -> [usize; 2],
    meet: impl Fn(f64, f64) -> f64,
) -> Vec<f64> {
    let mut all = x.to_vec();
    for (i, &v) in source.iter().enumerate() {
        let [r, c] = to(i / wide, i % wide);
        let old = &mut all[r * columns + c];
        *old = meet(*old, v);
    }
    all
}

fn added(a: f64, b: f64) -> f64 {
    f64::from(a as f32 + b as f32)
}

#[test]
fn rows_and_elements_are_read_exactly() {
    let Some(device) = device_with_gpu_kernels("indices::rows_and_elements_are_read_exactly") else { return };
    for (dtype, of) in
        [(DType::F32, DType::I64), (DType::F16, DType::I32), (DType::F64, DType::U8), (DType::Bool, DType::I64)]
    {
        for (rows, columns, n) in
            [(5, 1, 3), (7, 4, 9), (3, 6, 257), (9, 8, 33), (40, 64, 31), (2, 257, 5), (11, 512, 6)]
        {
            for skip in [0, 1, 4, 16] {
                let what = format!("{n} of {rows} x {columns} of {dtype} from {skip}");
                let xs = numbers(rows * columns, 3, dtype);
                let x = matrix(&xs, [rows, columns], skip, dtype, device);
                let (down, along) = (index_values(n, rows, false), index_values(n, columns, false));
                let got = x.index_select(0, &index(&down, &[n], of, device)).unwrap();
                let want: Vec<f64> =
                    (0..n * columns).map(|i| xs[down[i / columns] as usize * columns + i % columns]).collect();
                assert_same(&values(&got), &want, &format!("rows, {what}"));
                if columns <= 256 || of != DType::U8 {
                    let got = x.index_select(1, &index(&along, &[n], of, device)).unwrap();
                    let want: Vec<f64> = (0..rows * n).map(|i| xs[i / n * columns + along[i % n] as usize]).collect();
                    assert_same(&values(&got), &want, &format!("columns, {what}"));
                    let each = index_values(rows * n, columns, true);
                    let got = x.gather(1, &index(&each, &[rows, n], of, device)).unwrap();
                    let want: Vec<f64> = (0..rows * n).map(|i| xs[i / n * columns + each[i] as usize]).collect();
                    assert_same(&values(&got), &want, &format!("elements of rows, {what}"));
                }
                let each = index_values(n * columns, rows, true);
                let got = x.gather(0, &index(&each, &[n, columns], of, device)).unwrap();
                let want: Vec<f64> = (0..n * columns).map(|i| xs[each[i] as usize * columns + i % columns]).collect();
                assert_same(&values(&got), &want, &format!("elements of columns, {what}"));
            }
        }
    }
}

#[test]
fn rows_are_added_in_order() {
    let Some(device) = device_with_gpu_kernels("indices::rows_are_added_in_order") else { return };
    // Some of the kernel's index lists become full and some stay empty. Rows are read by elements or by vectors, and are shorter or
    // longer than a work-group.
    let shapes = [
        (3, 8, 5),
        (30, 5, 200),
        (1, 12, 5000),
        (2, 40, 2560),
        (700, 16, 2049),
        (5000, 9, 300),
        (33, 1030, 70),
        (2, 5000, 40),
    ];
    for (rows, columns, n) in shapes {
        for (skip, crowded) in [(0, false), (0, true), (4, true), (1, false)] {
            let what = format!("{n} of {rows} x {columns} from {skip}");
            let (xs, from) = (fractions(rows * columns, 1), fractions(n * columns, 5));
            let x = matrix(&xs, [rows, columns], skip, DType::F32, device);
            let source = matrix(&from, [n, columns], skip, DType::F32, device);
            let to = index_values(n, rows, crowded);
            let i = index(&to, &[n], DType::I64, device);
            let (of, shape) = ([rows, columns], [n, columns]);
            let place = |j: usize, c: usize| [to[j] as usize, c];
            let want = scattered_reference(&xs, of, &from, shape, place, added);
            assert_same(&values(&x.index_add(0, &i, &source).unwrap()), &want, &what);
            let turned = x.t().unwrap().index_add(1, &i, &source.t().unwrap()).unwrap();
            assert_same(&values(&turned.t().unwrap()), &want, &what);
            let want = scattered_reference(&xs, of, &from, shape, place, |_, new| new);
            assert_same(&values(&x.index_copy(0, &i, &source).unwrap()), &want, &what);
            x.index_add_(0, &i, &source).unwrap();
            let want = scattered_reference(&xs, of, &from, shape, place, added);
            assert_same(&values(&x), &want, &what);
        }
    }
}

#[test]
fn elements_are_added_in_order() {
    let Some(device) = device_with_gpu_kernels("indices::elements_are_added_in_order") else { return };
    // Sizes around one block of indices and around the longest rows that fit into local memory, and matrices with few columns.
    let shapes =
        [(3, 5, 1023), (2, 4095, 1025), (1, 4096, 1024), (2, 4097, 2100), (1, 60_000, 3000), (9, 17, 40), (1, 3, 4000)];
    for (rows, columns, n) in shapes {
        for (skip, crowded) in [(0, false), (1, true)] {
            let what = format!("{n} a row, {rows} x {columns} from {skip}");
            let (xs, from) = (fractions(rows * columns, 1), fractions(rows * n, 5));
            let x = matrix(&xs, [rows, columns], skip, DType::F32, device);
            let source = matrix(&from, [rows, n], skip, DType::F32, device);
            let to = index_values(rows * n, columns, crowded);
            let i = index(&to, &[rows, n], DType::I64, device);
            let place = |r: usize, j: usize| [r, to[r * n + j] as usize];
            let want = scattered_reference(&xs, [rows, columns], &from, [rows, n], place, added);
            assert_same(&values(&x.scatter_add(1, &i, &source).unwrap()), &want, &what);
            // Repeats the check along dimension 0, where adjacent elements belong to different columns.
            let deep = |t: &Tensor| t.t().unwrap().contiguous().unwrap();
            let got = deep(&x).scatter_add(0, &deep(&i), &deep(&source)).unwrap();
            assert_same(&values(&got.t().unwrap()), &want, &what);
            let want = scattered_reference(&xs, [rows, columns], &from, [rows, n], place, |_, new| new);
            assert_same(&values(&x.scatter(1, &i, &source).unwrap()), &want, &what);
        }
    }
}

/// Two index tensors are combined into one linear index over the flattened rows. Few rows are addressed, so the tiled kernel is
/// used.
#[test]
fn rows_of_two_indices_are_added_in_order() {
    let Some(device) = device_with_gpu_kernels("indices::rows_of_two_indices_are_added_in_order") else { return };
    let (blocks, rows, columns, n) = (40, 500, 9, 3000);
    let (xs, from) = (fractions(blocks * rows * columns, 1), fractions(n * columns, 5));
    let x = matrix(&xs, [blocks * rows, columns], 0, DType::F32, device).reshape([blocks, rows, columns]).unwrap();
    let source = matrix(&from, [n, columns], 0, DType::F32, device);
    let (block, row) = (index_values(n, blocks, true), index_values(n, rows, true));
    let [i, j] = [&block, &row].map(|p| index(p, &[n], DType::I64, device));
    let got = x.index_put(&[Some(&i), Some(&j)], &source, true).unwrap();
    let place = |k: usize, c: usize| [block[k] as usize * rows + row[k] as usize, c];
    let want = scattered_reference(&xs, [blocks * rows, columns], &from, [n, columns], place, added);
    assert_same(&values(&got), &want, "rows of two indices");
}

#[test]
fn every_dtype_is_written_exactly() {
    let Some(device) = device_with_gpu_kernels("indices::every_dtype_is_written_exactly") else { return };
    use DType::*;
    let (rows, columns, n) = (6, 24, 50);
    let nan_max = |a: f64, b: f64| if a.is_nan() || b.is_nan() { f64::NAN } else { a.max(b) };
    let floats = [(F32, U32), (F64, I16), (F16, I32), (BF16, I8)];
    let others = [(I64, U8), (I32, I64), (I16, I64), (I8, I64), (U8, I64), (U32, I64), (Bool, I64)];
    for (dtype, of) in floats.into_iter().chain(others) {
        let (xs, from) = (numbers(rows * columns, 2, dtype), numbers(n * columns, 9, dtype));
        let x = matrix(&xs, [rows, columns], 0, dtype, device);
        let source = matrix(&from, [n, columns], 0, dtype, device);
        let (line, each) = (index_values(n, rows, true), index_values(n * columns, rows, false));
        let (i, e) = (index(&line, &[n], of, device), index(&each, &[n, columns], of, device));
        let (shape, wide) = ([rows, columns], [n, columns]);
        let by_line = |j: usize, c: usize| [line[j] as usize, c];
        let by_each = |j: usize, c: usize| [each[j * columns + c] as usize, c];
        let same =
            |got: Tensor, want: Vec<f64>, what: &str| assert_same(&values(&got), &want, &format!("{what} {dtype}"));
        same(
            x.index_copy(0, &i, &source).unwrap(),
            scattered_reference(&xs, shape, &from, wide, by_line, |_, new| new),
            "copy",
        );
        same(
            x.scatter(0, &e, &source).unwrap(),
            scattered_reference(&xs, shape, &from, wide, by_each, |_, new| new),
            "scatter",
        );
        if dtype == Bool {
            continue;
        }
        let sums = scattered_reference(&xs, shape, &from, wide, by_line, |a, b| a + b);
        same(x.index_add(0, &i, &source).unwrap(), sums, "index_add");
        let sums = scattered_reference(&xs, shape, &from, wide, by_each, |a, b| a + b);
        same(x.scatter_add(0, &e, &source).unwrap(), sums, "scatter_add");
        let most = x.scatter_reduce(0, &e, &source, ScatterReduce::Amax, true).unwrap();
        same(most, scattered_reference(&xs, shape, &from, wide, by_each, nan_max), "amax");
    }
}

#[test]
fn indices_out_of_range_are_named() {
    let Some(device) = device_with_gpu_kernels("indices::indices_out_of_range_are_named") else { return };
    let (rows, columns, n) = (20, 16, 3000);
    for bad in [rows as i64, -1, i64::MIN, i64::MAX] {
        let mut to = index_values(n, rows, false);
        to[2600] = bad;
        let i = index(&to, &[n], DType::I64, device);
        let each = i.reshape([n, 1]).unwrap().expand([n, columns]).unwrap().contiguous().unwrap();
        let x = matrix(&numbers(rows * columns, 1, DType::I32), [rows, columns], 0, DType::F32, device);
        let source = matrix(&numbers(n * columns, 1, DType::I32), [n, columns], 0, DType::F32, device);
        let tall = x.t().unwrap();
        let (across, out_of) = (each.t().unwrap(), source.t().unwrap());
        let calls: [&dyn Fn() -> claystone::Result<Tensor>; 6] = [
            &|| x.index_select(0, &i),
            &|| tall.index_select(1, &i),
            &|| x.gather(0, &each),
            &|| x.index_add(0, &i, &source),
            &|| x.scatter_add(0, &each, &source),
            &|| tall.scatter_add(1, &across, &out_of),
        ];
        for (k, call) in calls.iter().enumerate() {
            let error = call().and_then(|t| t.to_vec::<f32>()).map(drop).expect_err(&format!("call {k}, {bad}"));
            assert!(matches!(error, Error::IndexOutOfRange { index, size: 20, .. } if index == bad), "{k}: {error}");
        }
        // Negative indices count from the end in operations that allow negative indices.
        let ends = x.index_fill(0, &index(&[-1, -20], &[2], DType::I64, device), 99.0).unwrap();
        let got = values(&ends);
        assert!(got[..columns].iter().chain(&got[19 * columns..]).all(|&v| v == 99.0));
    }
}

//! Tests GPU kernels for nonzero, sort, top-k, k-th element, median and maxima against std's sort. Sizes are around the edges of
//! tiles; views have offsets and strides. Without a GPU, an OpenCL CPU device runs the GPU kernels: each test restarts itself with
//! `CLAYSTONE_KERNELS=gpu`. The CPU devices' own nonzero kernels are tested as well.

use std::cmp::Ordering;

use claystone::{DType, Device, Tensor};

use crate::common;
use crate::common::gpus::{gpus, is_gpu, upload};
use crate::common::values;

/// Returns numbers rounded to the dtype, with many ties and, for floats, zeros of both signs, infinities and (with `nans`) NaN.
fn numbers(n: usize, seed: usize, dtype: DType, nans: bool) -> Vec<f64> {
    let mut state = seed as u64 * 0x9e37_79b9 + 1;
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            let x = (state >> 33) as i64;
            match (x % 101, dtype) {
                (_, DType::Bool) => (x % 2) as f64,
                (0, t) if t.is_float() && nans => f64::NAN,
                (1, t) if t.is_float() => f64::INFINITY,
                (2, t) if t.is_float() => f64::NEG_INFINITY,
                (3, t) if t.is_float() => -0.0,
                (4..20, _) => 0.0,
                (_, DType::U8 | DType::U32) => (x % 256) as f64,
                (_, DType::I64) => (x % 100_000 * 4_000_037 - 200_000_000_000) as f64,
                (_, DType::I32) => (x % 70_000 * 60_000 - 2_100_000_000).clamp(-2_147_483_648, 2_147_483_647) as f64,
                (_, DType::I16) => (x % 65_536 - 32_768) as f64,
                (_, DType::I8) => (x % 256 - 128) as f64,
                // f16 and bf16 represent these numbers exactly, and many are equal.
                _ => (x % 255 - 127) as f64 / 16.0,
            }
        })
        .collect()
}

/// Compares in a total order in which NaN is greater than all numbers.
fn compare_nan_greatest(a: f64, b: f64) -> Ordering {
    a.is_nan().cmp(&b.is_nan()).then(a.partial_cmp(&b).unwrap_or(Ordering::Equal))
}

fn sorted(line: &[f64], descending: bool) -> Vec<usize> {
    let mut places: Vec<usize> = (0..line.len()).collect();
    places.sort_by(|&i, &j| {
        if descending { compare_nan_greatest(line[j], line[i]) } else { compare_nan_greatest(line[i], line[j]) }
    });
    places
}

#[track_caller]
fn assert_selected(got: (Tensor, Tensor), lines: &[Vec<f64>], places: impl Fn(&[f64]) -> Vec<usize>, what: &str) {
    let places: Vec<Vec<usize>> = lines.iter().map(|line| places(line)).collect();
    let found: Vec<f64> = places.iter().flatten().map(|&p| p as f64).collect();
    assert_eq!(values(&got.1), found, "{what}");
    let read: Vec<u64> =
        lines.iter().zip(&places).flat_map(|(line, p)| p.iter().map(|&p| bits(line[p])).collect::<Vec<_>>()).collect();
    assert_eq!(values(&got.0).into_iter().map(bits).collect::<Vec<_>>(), read, "{what}");
}

/// Returns the bits of a number; every NaN gives the same bits.
fn bits(v: f64) -> u64 {
    if v.is_nan() { f64::NAN.to_bits() } else { v.to_bits() }
}

/// Splits a contiguous tensor into the lines of its last dimension.
fn lines(all: &[f64], n: usize) -> Vec<Vec<f64>> {
    all.chunks(n).map(<[f64]>::to_vec).collect()
}

/// Line lengths around the maximum that a single work-group sorts, for sorting by comparison, by digits and by bytes.
#[test]
fn sorts_match_std() {
    for device in gpus("choice::sorts_match_std") {
        for dtype in DType::ALL {
            let sizes = [
                (2, 33_001),
                (1, 8191),
                (3, 1025),
                (2, 4096),
                (2, 4097),
                (2, 2047),
                (2, 1024),
                (5, 2048),
                (4, 7),
                (1, 16_385),
            ];
            let all = is_gpu(device) || dtype == DType::F32;
            let some = if all { 0..sizes.len() } else { dtype as usize % 2..dtype as usize % 2 + 1 };
            for &(rows, n) in &sizes[some] {
                let host = values(&upload(&numbers(rows * n, n, dtype, true), &[rows * n], dtype, Device::Cpu));
                let t = upload(&host, &[rows, n], dtype, device);
                for descending in [false, true].into_iter().take(if all { 2 } else { 1 }) {
                    let what = format!("{dtype} [{rows}, {n}], {descending}");
                    assert_selected(
                        t.sort(1, descending).unwrap(),
                        &lines(&host, n),
                        |line| sorted(line, descending),
                        &what,
                    );
                }
            }
        }
        // Sorts a reversed view with an offset along dimension 1; the elements of a line are not adjacent in memory.
        let host = numbers(2 * 1500 * 3, 5, DType::F32, true);
        let t = upload(&host, &[2, 1500, 3], DType::F32, device).narrow(0, 1, 1).unwrap().flip([1]).unwrap();
        let (top, at) = t.sort(1, false).unwrap();
        let last = |t: &Tensor| t.transpose(1, 2).unwrap().contiguous().unwrap();
        let line = |c: usize| (0..1500).rev().map(|i| host[(1500 + i) * 3 + c]).collect::<Vec<_>>();
        assert_selected((last(&top), last(&at)), &[line(0), line(1), line(2)], |line| sorted(line, false), "columns");
    }
}

#[test]
fn top_k_and_medians_match_std() {
    for device in gpus("choice::top_k_and_medians_match_std") {
        let gpu = is_gpu(device);
        for dtype in DType::ALL {
            // The longest lines do not fit into a work-item's registers and are processed in tiles.
            let sizes = [(3, 257), (1, 9001), (3, 64), (2, 4097), (2, 65), (2, 1000), (2, 4096)];
            let some = if gpu || dtype == DType::F32 { sizes.len() } else { 1 };
            for (rows, n) in sizes.into_iter().take(some) {
                let host: Vec<f64> =
                    values(&upload(&numbers(rows * n, n, dtype, n % 2 > 0), &[rows * n], dtype, Device::Cpu));
                let t = upload(&host, &[rows, n], dtype, device);
                let of = lines(&host, n);
                for k in [1, 7, 64, 300, 512].into_iter().filter(|&k| k <= n && (gpu || matches!(k, 7 | 300))) {
                    for largest in [true, false] {
                        let what = format!("the first {k} of {rows} x {n} {dtype}, {largest}");
                        assert_selected(
                            t.topk(k, 1, largest).unwrap(),
                            &of,
                            |line| sorted(line, largest)[..k].to_vec(),
                            &what,
                        );
                    }
                    let nth = |line: &[f64]| vec![sorted(line, false)[n - k]];
                    assert_selected(
                        t.kthvalue(n - k + 1, 1, false).unwrap(),
                        &of,
                        nth,
                        &format!("the {k}-th from the end of {n} {dtype}"),
                    );
                }
                let nans = |line: &[f64]| line.iter().filter(|v| v.is_nan()).count();
                let middle = |line: &[f64]| {
                    let nans = nans(line);
                    vec![sorted(line, false)[if nans > 0 { n - nans } else { (n - 1) / 2 }]]
                };
                assert_selected(t.median(1, false).unwrap(), &of, middle, &format!("the median of {n} {dtype}"));
                let middle = |line: &[f64]| vec![sorted(line, false)[(n - 1).saturating_sub(nans(line)) / 2]];
                assert_selected(
                    t.nanmedian(1, false).unwrap(),
                    &of,
                    middle,
                    &format!("the median but for NaN of {n} {dtype}"),
                );
            }
        }
        // Lines are interleaved and reversed in memory, and the view has an offset.
        let host = numbers(90 * 80 * 3, 5, DType::F32, true);
        let t = upload(&host, &[90, 80, 3], DType::F32, device);
        let turned = t.narrow(0, 7, 70).unwrap().flip(0).unwrap();
        let of: Vec<Vec<f64>> = (0..240).map(|j| (7..77).rev().map(|i| host[i * 240 + j]).collect()).collect();
        let (top, at) = turned.topk(5, 0, true).unwrap();
        let last = |t: &Tensor| t.permute(&[1, 2, 0]).unwrap();
        assert_selected((last(&top), last(&at)), &of, |line| sorted(line, true)[..5].to_vec(), "turned");
        let (top, at) = turned.median(0, true).unwrap();
        let middle = |line: &[f64]| {
            vec![
                sorted(line, false)[match line.iter().filter(|v| v.is_nan()).count() {
                    0 => 34,
                    nans => 70 - nans,
                }],
            ]
        };
        assert_selected((last(&top), last(&at)), &of, middle, "turned");
    }
}

#[test]
fn top_k_of_ordered_lines_matches_std() {
    for device in gpus("choice::top_k_of_ordered_lines_matches_std") {
        let n = 40_000;
        for (what, host) in [
            ("rising", (0..n).map(f64::from).collect::<Vec<_>>()),
            ("falling", (0..n).rev().map(f64::from).collect()),
            ("equal", vec![2.5; n as usize]),
            ("NaN", vec![f64::NAN; n as usize]),
            ("two", (0..n).map(|i| f64::from(i % 1000 / 999)).collect()),
        ] {
            let t = upload(&host, &[n as usize], DType::F32, device);
            for largest in [true, false] {
                for k in [1, 8, 300].into_iter().skip(usize::from(!is_gpu(device))) {
                    let first = |line: &[f64]| sorted(line, largest)[..k].to_vec();
                    assert_selected(
                        t.topk(k, 0, largest).unwrap(),
                        std::slice::from_ref(&host),
                        first,
                        &format!("{what}, {k}, {largest}"),
                    );
                }
            }
            let nans = host.iter().filter(|v| v.is_nan()).count();
            let middle = if nans > 0 { 0 } else { (n as usize - 1) / 2 };
            assert_selected(
                t.median(0, false).unwrap(),
                std::slice::from_ref(&host),
                |line| vec![sorted(line, false)[middle]],
                what,
            );
        }
    }
}

/// Kernels split long lines into slices, and work-groups count the digits of each slice.
#[test]
fn selections_from_long_lines_match_std() {
    for device in gpus("choice::selections_from_long_lines_match_std") {
        let dtypes = [DType::F32, DType::F16, DType::U8, DType::I64];
        for dtype in dtypes.into_iter().take(if is_gpu(device) { 4 } else { 2 }) {
            for (rows, n) in [(1, 70_001), (3, 65_600)] {
                let host = numbers(rows * n, 11, dtype, n % 2 > 0);
                let t = upload(&host, &[rows, n], dtype, device);
                let of = lines(&values(&t), n);
                for k in [1, n / 3, n] {
                    let nth = |line: &[f64]| vec![sorted(line, false)[k - 1]];
                    assert_selected(
                        t.kthvalue(k, 1, false).unwrap(),
                        &of,
                        nth,
                        &format!("element {k} of {rows} x {n} {dtype}"),
                    );
                }
                for largest in [true, false] {
                    let first = |line: &[f64]| sorted(line, largest)[..5000].to_vec();
                    assert_selected(
                        t.topk(5000, 1, largest).unwrap(),
                        &of,
                        first,
                        &format!("5000 of {rows} x {n} {dtype}"),
                    );
                }
            }
        }
    }
}

#[test]
fn gradients_reach_the_selected_elements() {
    for device in gpus("choice::gradients_reach_the_selected_elements") {
        let host = numbers(200, 9, DType::F32, false);
        let t = upload(&host, &[2, 100], DType::F32, device).requires_grad_(true).unwrap();
        let (top, _) = t.topk(3, 1, true).unwrap();
        let (middle, _) = t.median(1, true).unwrap();
        top.sum((), false).unwrap().add(&middle.sum((), false).unwrap()).unwrap().backward().unwrap();
        let want: Vec<f64> = lines(&host, 100)
            .iter()
            .flat_map(|line| {
                let mut want = vec![0.0; 100];
                sorted(line, true)[..3].iter().chain([&sorted(line, false)[49]]).for_each(|&p| want[p] += 1.0);
                want
            })
            .collect();
        assert_eq!(values(&t.grad().unwrap()), want);
    }
}

#[test]
fn maxima_and_minima_of_rows_match_std() {
    for device in gpus("choice::maxima_and_minima_of_rows_match_std") {
        let all = [DType::F32, DType::F16, DType::I8, DType::I64, DType::I32, DType::F64, DType::I16];
        for dtype in all.into_iter().take(if is_gpu(device) { 7 } else { 4 }) {
            for (rows, n) in [(3, 16), (5, 48), (2, 272), (2, 4112), (1, 70_000)] {
                for nans in [false, true] {
                    let host = values(&upload(&numbers(rows * n, n, dtype, nans), &[rows * n], dtype, Device::Cpu));
                    let t = upload(&host, &[rows, n], dtype, device);
                    let of = lines(&host, n);
                    let best = |line: &[f64], largest: bool| {
                        let nan = line.iter().position(|v| v.is_nan());
                        vec![nan.unwrap_or_else(|| sorted(line, largest)[0])]
                    };
                    let what = format!("{rows} x {n} {dtype}");
                    assert_selected(t.max_dim(1, false).unwrap(), &of, |line| best(line, true), &what);
                    assert_selected(t.min_dim(1, false).unwrap(), &of, |line| best(line, false), &what);
                }
            }
        }
    }
}

/// Checks nonzero and masked_select of tensors and their transposes, with all, some or no elements selected.
fn check_nonzero(device: Device) {
    let shapes: [&[usize]; 8] =
        [&[1], &[4095], &[4096], &[70_001], &[300, 41], &[3, 50, 70], &[2, 3, 4, 5], &[20_000, 2]];
    for (i, shape) in shapes.into_iter().enumerate() {
        for dtype in [DType::Bool, DType::F32, DType::U8, DType::I64, DType::F16] {
            if dtype == DType::F16 && i > 1 {
                continue;
            }
            let numel = shape.iter().product();
            let host = values(&upload(&numbers(numel, numel, dtype, true), &[numel], dtype, Device::Cpu));
            let t = upload(&host, shape, dtype, Device::Cpu);
            let all = Tensor::ones(shape, (dtype, Device::Cpu)).unwrap();
            let none = all.zeros_like().unwrap();
            for (host, turn) in [(&t, false), (&t, true), (&all, false), (&none, false)] {
                let here = host.to_device(device).unwrap();
                let (host, here) = match turn && shape.len() > 1 {
                    true => (host.transpose(0, 1).unwrap(), here.transpose(0, 1).unwrap()),
                    false => (host.shallow_clone(), here),
                };
                let elements = values(&host.contiguous().unwrap());
                let dims = host.shape().dims().to_vec();
                let (mut rows, mut picked) = (Vec::new(), Vec::new());
                for (i, &v) in elements.iter().enumerate().filter(|(_, v)| **v != 0.0) {
                    let mut left = i;
                    let mut row: Vec<i64> = dims.iter().rev().map(|&n| ((left % n) as i64, left /= n).0).collect();
                    row.reverse();
                    rows.extend(row);
                    picked.push(bits(v));
                }
                let found = here.nonzero().unwrap();
                assert_eq!(found.shape().dims(), [rows.len() / dims.len(), dims.len()]);
                assert_eq!(found.to_vec::<i64>().unwrap(), rows, "{dims:?} {dtype}");
                let got = here.masked_select(&here.ne_scalar(0).unwrap()).unwrap();
                assert_eq!(values(&got).into_iter().map(bits).collect::<Vec<_>>(), picked, "{dims:?} {dtype}");
            }
        }
    }
    // Tensor and mask are both broadcast, and both are views with an offset.
    let x = Tensor::arange(0, 900, 1, device).unwrap().narrow(0, 9, 300).unwrap().reshape([300, 1]).unwrap();
    let mask = Tensor::from_slice(&[false, true, true, false, true], 5, device).unwrap().narrow(0, 1, 4).unwrap();
    let want: Vec<f32> = (9..309).flat_map(|i| [i as f32; 3]).collect();
    assert_eq!(x.masked_select(&mask).unwrap().to_vec::<f32>().unwrap(), want);
    let scalar = Tensor::from_slice(&[2f32], 1, device).unwrap().squeeze(0).unwrap();
    assert_eq!(scalar.nonzero().unwrap().shape().dims(), [1, 0]);
    let t = x.detach().requires_grad_(true).unwrap();
    t.masked_select(&mask).unwrap().sum((), false).unwrap().backward().unwrap();
    assert_eq!(values(&t.grad().unwrap()), vec![3.0; 300]);
}

#[test]
fn nonzero_is_correct_with_gpu_kernels() {
    gpus("choice::nonzero_is_correct_with_gpu_kernels").into_iter().for_each(check_nonzero);
}

#[test]
fn nonzero_is_correct_with_processor_kernels() {
    common::devices().into_iter().filter(|&d| d != Device::Cpu).take(1).for_each(check_nonzero);
}

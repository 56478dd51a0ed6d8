//! Tests GPU kernels of products with quantised weights against sums in f64 of the dequantised weights, at sizes around the edges of blocks,
//! lanes, stages and parts. Without a GPU, each test restarts itself as in `products.rs`.

use claystone::device::count_launches;
use claystone::quantized::{QuantFormat, QuantizedTensor};
use claystone::{DType, Device, Tensor};

use crate::common::gpus::{assert_same, fenced_gpus, gpus, thinned_cases, upload};
use crate::common::quantized::{FORMATS, random_weight};
use crate::common::{scattered, values};

/// Checks the product of `m` rows with a weight `[n, k]`, and its launches.
fn check(device: Device, format: QuantFormat, [m, n, k]: [usize; 3], dtype: DType) {
    let what = format!("{m} x {k} x {n}, {format}, {dtype} on {device}");
    let w = random_weight(format, n, k, device);
    let x = upload(&values(&scattered(&[m, k], 4.0, Device::Cpu)), &[m, k], dtype, device);
    let (y, launches) = count_launches(|| w.matmul(&x).unwrap());
    assert_eq!(launches, 1, "{what}");
    let unit = match dtype {
        DType::F32 => 0.0,
        DType::F16 => 2f64.powi(-11),
        _ => 2f64.powi(-8),
    };
    // The elements come from the CPU device, whose bits are those of the package gguf.
    let elements = w.to_device(Device::Cpu).unwrap().dequantize(DType::F32).unwrap();
    let (got, x, elements) = (values(&y), values(&x), values(&elements));
    for (i, j) in (0..m * n).map(|e| (e / n, e % n)) {
        let terms = || x[i * k..][..k].iter().zip(&elements[j * k..][..k]).map(|(x, w)| x * w);
        let (want, sizes): (f64, f64) = (terms().sum(), terms().map(f64::abs).sum());
        let off = (got[i * n + j] - want).abs();
        assert!(
            off <= (k + 2) as f64 * 2f64.powi(-24) * sizes + unit * want.abs(),
            "{what}: row {i}, column {j}: {off}"
        );
    }
}

/// The formats and sizes of each format with blocks of `block` elements.
fn check_sizes(device: Device) {
    for format in FORMATS.map(|name| name.parse::<QuantFormat>().unwrap()) {
        let block = format.block_len(256);
        let sizes = [[1, 7, block], [3, 65, 3 * block], [8, 33, 9 * block]];
        thinned_cases(&sizes, 2, device).into_iter().for_each(|size| check(device, format, size, DType::F32));
    }
    let four_bits = [[1, 1, 32], [2, 63, 64], [1, 1030, 160], [7, 257, 96], [5, 16, 2080], [1, 64, 1056], [8, 9, 4128]];
    four_bits.into_iter().for_each(|size| check(device, QuantFormat::Q4_0, size, DType::F32));
    for dtype in [DType::F16, DType::BF16] {
        check(device, QuantFormat::Q4K, [2, 70, 768], dtype);
        check(device, QuantFormat::Q8_0, [1, 70, 288], dtype);
    }
}

#[test]
fn quantized_products_are_within_their_bound() {
    gpus("quantized::quantized_products_are_within_their_bound").into_iter().for_each(check_sizes);
}

#[test]
fn quantized_products_that_split_k_are_within_their_bound() {
    for device in fenced_gpus("quantized::quantized_products_that_split_k_are_within_their_bound") {
        let cases =
            [(QuantFormat::Q4_0, [1, 9, 8192]), (QuantFormat::Q6K, [1, 8, 10_240]), (QuantFormat::Q8_0, [3, 5, 8224])];
        // Repeated calls show that the kernel resets the work-groups' counters.
        for (format, size) in [cases, cases].concat() {
            check(device, format, size, DType::F32);
        }
    }
}

/// A weight at an odd byte of its storage, as a view of some rows, with an epilogue, and joined with a weight of another format.
#[test]
fn quantized_views_and_joined_weights() {
    for device in gpus("quantized::quantized_views_and_joined_weights") {
        let near = |got: &Tensor, want: &Tensor| {
            assert_same(&values(got), &values(want), 1e-3, "a view");
        };
        let x = scattered(&[3, 256], 1.0, device);
        for format in [QuantFormat::Q4_0, QuantFormat::Q5K] {
            let w = random_weight(format, 12, 256, device);
            let planes = QuantizedTensor::arrange(&w.to_bytes().unwrap(), 256, format, device).unwrap().into_owned();
            let shifted = [&[0; 7][..], &planes].concat();
            let memory = Tensor::from_slice(&shifted, shifted.len(), device).unwrap();
            let odd = QuantizedTensor::from_storage(memory.storage().clone(), 7, [12, 256], format).unwrap();
            let elements = w.dequantize(DType::F32).unwrap();
            assert_eq!(values(&odd.dequantize(DType::F32).unwrap()), values(&elements));
            let want = x.linear(&elements, None).unwrap();
            near(&odd.matmul(&x).unwrap(), &want);
            near(&odd.narrow_rows(3, 7).unwrap().matmul(&x).unwrap(), &want.narrow(1, 3, 7).unwrap());
            let other = random_weight(QuantFormat::Q8_0, 5, 256, device);
            let joined = QuantizedTensor::join_rows(&[&w, &other]).unwrap();
            let bias = scattered(&[17], 1.0, device);
            let (y, launches) = count_launches(|| joined.linear_map(&x, Some(&bias), |z| z.silu()).unwrap());
            assert_eq!(launches, 2, "one launch for each format");
            let elements = Tensor::cat(&[&elements, &other.dequantize(DType::F32).unwrap()], 0).unwrap();
            near(&y, &x.linear(&elements, Some(&bias)).unwrap().silu().unwrap());
        }
    }
}

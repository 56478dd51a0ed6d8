//! Tests depthwise convolutions and their gradients against the CPU device, which other tests compare with the definition.

use claystone::{ConvOptions, DType, Device, MemoryFormat, Result};

use crate::common::gpus::{assert_same, gpus_and_processors, upload};
use crate::common::values;

struct Case {
    /// Number of images, channels per image, and output channels for each input channel.
    sizes: [usize; 3],
    image: [usize; 2],
    kernel: [usize; 2],
    stride: [usize; 2],
    padding: [usize; 2],
    dilation: [usize; 2],
}

const CASES: [Case; 7] = [
    Case { sizes: [2, 3, 1], image: [7, 9], kernel: [3, 3], stride: [1, 1], padding: [1, 1], dilation: [1, 1] },
    Case { sizes: [1, 5, 2], image: [13, 16], kernel: [3, 3], stride: [2, 2], padding: [1, 1], dilation: [1, 1] },
    Case { sizes: [3, 2, 1], image: [12, 17], kernel: [5, 4], stride: [1, 3], padding: [2, 0], dilation: [2, 1] },
    Case { sizes: [2, 2, 3], image: [1, 65], kernel: [1, 4], stride: [1, 1], padding: [0, 3], dilation: [1, 2] },
    Case { sizes: [1, 2, 1], image: [9, 40], kernel: [1, 7], stride: [1, 1], padding: [0, 24], dilation: [1, 8] },
    Case { sizes: [2, 2, 1], image: [1, 1], kernel: [3, 3], stride: [3, 3], padding: [4, 4], dilation: [2, 2] },
    Case { sizes: [67, 2, 1], image: [31, 33], kernel: [3, 3], stride: [1, 1], padding: [1, 1], dilation: [1, 1] },
];

/// Returns small numbers whose sums are exact in f32. With `special`, some numbers are infinite or NaN.
fn numbers(n: usize, seed: usize, special: bool) -> Vec<f64> {
    let number = |i: usize| match (i * 7919 + seed * 31) % 211 {
        0 if special => f64::INFINITY,
        1 if special => f64::NAN,
        k => (k % 17) as f64 / 4.0 - 2.0,
    };
    (0..n).map(number).collect()
}

/// Returns the result and the gradients of images, weight and bias.
fn made(case: &Case, dtype: DType, special: bool, device: Device) -> Result<Vec<Vec<f64>>> {
    let Case { sizes: [n, c, multiplier], image: [h, w], kernel: [kh, kw], stride, padding, dilation } = *case;
    let put = |shape: &[usize], seed: usize| {
        let t = upload(&numbers(shape.iter().product(), seed, special), shape, dtype, device);
        t.requires_grad_(true)
    };
    // Images are a mirrored view of every second row, which has an offset, a step and a negative stride.
    let whole = put(&[n, c, 2 * h, w], 1)?;
    let x = whole.slice(2, 1, None, 2)?.flip([3])?;
    let (weight, bias) = (put(&[c * multiplier, 1, kh, kw], 2)?, put(&[c * multiplier], 3)?);
    let y = x.conv2d(&weight, Some(&bias), ConvOptions { stride, padding: padding.into(), dilation, groups: c })?;
    let grad = upload(&numbers(y.numel(), 4, special), y.shape().dims(), dtype, device);
    y.backward_with(&grad)?;
    let grads = [&whole, &weight, &bias].map(|t| values(&t.grad().unwrap()));
    Ok(std::iter::once(values(&y.detach())).chain(grads).collect())
}

/// Rows of 16-bit floats that kernels load eight or four elements at a time, plus the elements before and after; and rows that do
/// not allow this.
const HALF_ROW_CASES: [Case; 6] = [
    Case { sizes: [2, 3, 1], image: [9, 24], kernel: [3, 3], stride: [1, 1], padding: [1, 1], dilation: [1, 1] },
    Case { sizes: [2, 3, 2], image: [6, 12], kernel: [3, 3], stride: [1, 1], padding: [1, 1], dilation: [1, 1] },
    Case { sizes: [2, 2, 1], image: [8, 32], kernel: [3, 3], stride: [2, 2], padding: [1, 1], dilation: [1, 1] },
    Case { sizes: [1, 2, 1], image: [7, 16], kernel: [5, 5], stride: [1, 1], padding: [2, 2], dilation: [1, 1] },
    Case { sizes: [1, 2, 1], image: [5, 16], kernel: [1, 4], stride: [1, 1], padding: [0, 9], dilation: [1, 6] },
    Case { sizes: [1, 2, 1], image: [5, 14], kernel: [3, 3], stride: [1, 1], padding: [1, 1], dilation: [1, 1] },
];

#[test]
fn rows_of_halves_match_the_cpu() {
    for device in gpus_and_processors("depthwise::rows_of_halves_match_the_cpu") {
        for (i, case) in HALF_ROW_CASES.iter().enumerate() {
            let made = |dtype: DType, device: Device| -> Vec<Vec<f64>> {
                let Case { sizes: [n, c, multiplier], image: [h, w], kernel: [kh, kw], stride, padding, dilation } =
                    *case;
                let put = |shape: &[usize], seed: usize| {
                    let t = upload(&numbers(shape.iter().product(), seed, false), shape, DType::BF16, Device::Cpu);
                    t.to_dtype(dtype).unwrap().to_device(device).unwrap()
                };
                let leaf = |shape: &[usize], seed: usize| put(shape, seed).requires_grad_(true).unwrap();
                let (x, weight) = (leaf(&[n, c, h, w], 1), leaf(&[c * multiplier, 1, kh, kw], 2));
                let options = ConvOptions { stride, padding: padding.into(), dilation, groups: c };
                let y = x.conv2d(&weight, None, options).unwrap();
                y.backward_with(&put(y.shape().dims(), 4)).unwrap();
                vec![values(&y.detach()), values(&x.grad().unwrap()), values(&weight.grad().unwrap())]
            };
            let want = made(DType::F64, Device::Cpu);
            for (dtype, tolerance) in [(DType::F16, 2e-3), (DType::BF16, 1e-2)] {
                let got = made(dtype, device);
                for (what, (got, want)) in ["y", "x", "weight"].into_iter().zip(got.iter().zip(&want)) {
                    assert_same(got, want, tolerance, &format!("{what} of case {i}, {dtype}, {device:?}"));
                }
            }
        }
    }
}

/// Channels-last images and gradients give channels-last results that equal the results of row-major images. Kernels load 16 bytes of channels at
/// once, and read the taps in reversed order for the gradient of images with strides of 1.
#[test]
fn channels_last_convolutions_match_row_major_ones() {
    let plain = ConvOptions::default();
    let cases = [
        ([3, 3], DType::F32, ConvOptions { padding: 1.into(), groups: 16, ..plain }),
        ([3, 3], DType::F16, ConvOptions { padding: 1.into(), groups: 24, stride: [2, 2], ..plain }),
        ([2, 5], DType::BF16, ConvOptions { padding: 2.into(), groups: 40, dilation: [2, 1], ..plain }),
        ([3, 3], DType::F16, ConvOptions { groups: 12, ..plain }), // pixels are not aligned to 16 bytes
    ];
    let made = |i: usize, format: MemoryFormat, device: Device| -> Result<Vec<Vec<f64>>> {
        let (kernel, dtype, options) = cases[i];
        let put = |shape: &[usize], seed: usize| {
            let t = upload(&numbers(shape.iter().product(), seed, false), shape, dtype, device);
            t.to_memory_format(format)?.requires_grad_(true)
        };
        let channels = options.groups;
        let (x, weight) = (put(&[2, channels, 9, 13], 1)?, put(&[channels, 1, kernel[0], kernel[1]], 2)?);
        let bias = upload(&numbers(channels, 3, false), &[channels], dtype, device);
        let y = x.conv2d(&weight, Some(&bias), options)?;
        let gradient = put(y.shape().dims(), 4)?;
        y.backward_with(&gradient.detach())?;
        let results = [y.detach(), x.grad().unwrap(), weight.grad().unwrap()];
        // The CPU device returns row-major results; other devices keep the channels-last format.
        assert!(
            device == Device::Cpu || results[..2].iter().all(|t| t.is_contiguous_in(format)),
            "{format} on {device}"
        );
        Ok(results.iter().map(values).collect())
    };
    for device in gpus_and_processors("depthwise::channels_last_convolutions_match_row_major_ones") {
        for (i, (_, dtype, _)) in cases.iter().enumerate() {
            let tolerance = if *dtype == DType::F32 { 1e-5 } else { 2e-2 };
            let want = made(i, MemoryFormat::Contiguous, Device::Cpu).unwrap();
            for format in [MemoryFormat::Contiguous, MemoryFormat::ChannelsLast] {
                for (got, want) in made(i, format, device).unwrap().iter().zip(&want) {
                    assert_same(got, want, tolerance, &format!("case {i}, {format} on {device}"));
                }
            }
        }
    }
}

#[test]
fn depthwise_convolutions_match_the_cpu() {
    for device in gpus_and_processors("depthwise::depthwise_convolutions_match_the_cpu") {
        for (i, case) in CASES.iter().enumerate() {
            for (dtype, special, tolerance) in
                [(DType::F32, false, 1e-5), (DType::F32, true, 1e-5), (DType::BF16, false, 2e-2)]
            {
                if dtype == DType::BF16 && i != 1 {
                    continue;
                }
                let (got, want) =
                    (made(case, dtype, special, device).unwrap(), made(case, dtype, special, Device::Cpu).unwrap());
                for (what, (got, want)) in ["y", "x", "weight", "bias"].into_iter().zip(got.iter().zip(&want)) {
                    assert_same(got, want, tolerance, &format!("{what} of case {i}, {dtype}, {special}, {device:?}"));
                }
            }
        }
    }
}

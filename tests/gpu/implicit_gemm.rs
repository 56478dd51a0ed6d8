//! Tests convolutions that tensor cores compute without an im2col matrix, and their gradients, against the CPU device, which other
//! tests compare with the definition.

use claystone::{ConvOptions, ConvTransposeOptions, DType, Device, MemoryFormat, Result, set_float32_matmul_precision};

use crate::common::gpus::{assert_same, gpus_and_processors, is_gpu, thinned_cases, upload};
use crate::common::{in_own_process, values};

#[derive(Clone, Copy)]
struct Case {
    n: usize,
    groups: usize,
    /// Numbers of input and output channels per group.
    channels: [usize; 2],
    image: [usize; 2],
    kernel: [usize; 2],
    stride: [usize; 2],
    padding: [usize; 2],
    dilation: [usize; 2],
}

const fn case(n: usize, channels: [usize; 2], image: [usize; 2], kernel: [usize; 2]) -> Case {
    Case { n, groups: 1, channels, image, kernel, stride: [1; 2], padding: [0; 2], dilation: [1; 2] }
}

impl Case {
    const fn with_geometry(self, stride: [usize; 2], padding: [usize; 2], dilation: [usize; 2]) -> Case {
        Case { stride, padding, dilation, ..self }
    }

    const fn groups(self, groups: usize) -> Case {
        Case { groups, ..self }
    }

    /// Returns the result and the gradients of images, weight and bias. With `last`, the images are channels-last, and on GPUs also
    /// the weight and the result's gradient. Without it, the images are views of every second row with reversed columns.
    fn made(&self, dtype: DType, last: bool, transposed: bool, device: Device) -> Result<Vec<Vec<f64>>> {
        let Case { n, groups, channels: [inner, outer], image: [h, w], kernel: [kh, kw], stride, padding, dilation } =
            *self;
        // Small whole numbers, whose sums are exact.
        let put = |shape: &[usize], seed: usize| {
            let number = |i: usize| ((i * 7919 + i * i * 31 + seed) % 5) as f64 - 2.0;
            let numbers: Vec<f64> = (0..shape.iter().product()).map(number).collect();
            upload(&numbers, shape, dtype, device).requires_grad_(true)
        };
        // Some GPU kernels that read channels-last weights and gradients take an OpenCL CPU device too long to compile, so only
        // GPUs use them.
        let format = if last && is_gpu(device) { MemoryFormat::ChannelsLast } else { MemoryFormat::Contiguous };
        let (c, o) = (groups * inner, groups * outer);
        let (given, made) = if transposed { (o, c) } else { (c, o) };
        let whole = if last { put(&[n, h, w, given], 1)? } else { put(&[n, given, 2 * h, w], 1)? };
        let x = if last { whole.permute(&[0, 3, 1, 2])? } else { whole.slice(2, 1, None, 2)?.flip([3])? };
        let (weights, bias) = (put(&[o, inner, kh, kw], 2)?, put(&[made], 3)?);
        let weight = weights.to_memory_format(format)?;
        let y = match transposed {
            false => {
                x.conv2d(&weight, Some(&bias), ConvOptions { stride, padding: padding.into(), dilation, groups })?
            }
            true => {
                let output_padding = [0; 2];
                let options =
                    ConvTransposeOptions { stride, padding: padding.into(), output_padding, dilation, groups };
                x.conv_transpose2d(&weight, Some(&bias), options)?
            }
        };
        // With tensor cores, the result has the memory format of the images; otherwise it is row-major.
        assert!(y.is_contiguous() || last && y.is_contiguous_in(MemoryFormat::ChannelsLast));
        y.backward_with(&put(y.shape().dims(), 4)?.detach().to_memory_format(format)?)?;
        let grads = [&whole, &weights, &bias].map(|t| values(&t.grad().unwrap()));
        Ok(std::iter::once(values(&y.detach())).chain(grads).collect())
    }
}

const CASES: [Case; 28] = [
    case(2, [16, 24], [7, 9], [3, 3]).with_geometry([1, 1], [1, 1], [1, 1]),
    case(2, [64, 64], [8, 16], [3, 3]).with_geometry([1, 1], [1, 1], [1, 1]),
    case(1, [40, 136], [16, 16], [3, 3]).with_geometry([1, 1], [1, 1], [1, 1]),
    case(1, [72, 264], [10, 10], [3, 3]).with_geometry([1, 1], [1, 1], [1, 1]),
    case(2, [9, 10], [11, 6], [3, 2]).with_geometry([1, 1], [1, 0], [1, 2]),
    case(2, [20, 32], [13, 10], [3, 3]).with_geometry([2, 1], [1, 1], [2, 1]),
    case(2, [3, 64], [33, 31], [7, 7]).with_geometry([2, 2], [3, 3], [1, 1]),
    case(3, [20, 12], [5, 6], [3, 3]).with_geometry([1, 1], [1, 1], [1, 1]).groups(2),
    case(2, [32, 64], [8, 8], [3, 3]).with_geometry([2, 2], [1, 1], [1, 1]).groups(3),
    case(2, [64, 72], [7, 7], [1, 1]), // rows too unaligned for asynchronous copies
    case(2, [64, 72], [8, 8], [1, 1]),
    case(2, [64, 32], [9, 9], [1, 1]).with_geometry([2, 2], [0, 0], [1, 1]),
    case(1, [72, 16], [9, 9], [3, 3]).with_geometry([1, 1], [4, 4], [1, 1]), // padding larger than the kernel
    case(1, [256, 64], [3, 3], [3, 3]).with_geometry([1, 1], [1, 1], [1, 1]), // few output tiles, so that work-groups split the depth
    case(2, [64, 40], [9, 8], [3, 3]).with_geometry([2, 2], [1, 1], [1, 1]),
    case(2, [24, 72], [11, 13], [4, 5]).with_geometry([2, 2], [1, 2], [1, 1]).groups(2),
    case(2, [16, 160], [10, 12], [3, 4]).with_geometry([1, 2], [3, 0], [2, 3]),
    case(9, [8, 8], [1, 65], [1, 4]).with_geometry([1, 1], [0, 3], [1, 1]),
    case(2, [64, 64], [16, 10], [3, 3]).with_geometry([2, 1], [1, 1], [1, 1]), // row strides that are not multiples of a vector
    case(2, [24, 64], [10, 12], [3, 3]).with_geometry([1, 1], [1, 1], [1, 1]), // forward and backward read the weight without conversion
    case(2, [24, 64], [9, 8], [1, 1]).with_geometry([2, 2], [0, 0], [1, 1]),   // pixels that no window contains
    case(2, [64, 64], [9, 12], [3, 3]).with_geometry([2, 2], [1, 1], [1, 1]).groups(2),
    case(1, [16, 32], [4, 40], [1, 20]).with_geometry([1, 1], [0, 9], [1, 1]), // more kernel columns than bits in a padding mask
    case(2, [124, 64], [12, 12], [1, 1]).with_geometry([2, 2], [0, 0], [1, 1]), // channels padded with zeros to a full tile
    case(2, [252, 128], [12, 12], [1, 1]).with_geometry([2, 2], [0, 0], [1, 1]),
    case(2, [2, 40], [13, 22], [5, 7]).with_geometry([1, 4], [2, 1], [1, 1]), // each kernel row is treated as one tap
    case(2, [3, 96], [20, 20], [4, 4]).with_geometry([4, 4], [0, 0], [1, 1]),
    case(2, [3, 72], [14, 13], [3, 3]).with_geometry([1, 1], [1, 1], [1, 1]), // the image gradient is computed in blocks
];

/// Checks each case with each (dtype, channels-last, transposed) of `kinds` against the CPU device.
fn check(device: Device, kinds: &[(DType, bool, bool)]) {
    for (i, case) in thinned_cases(&CASES, 7, device).iter().enumerate() {
        for &(dtype, last, transposed) in kinds {
            let got = case.made(dtype, last, transposed, device).unwrap();
            let exact = case.made(DType::F32, last, transposed, Device::Cpu).unwrap();
            // In bf16 without tensor cores, gradients are summed from im2col columns and rounded more than once.
            let tolerance = if dtype == DType::BF16 && !is_gpu(device) { 1.0 / 128.0 } else { 1e-6 };
            for (what, (got, exact)) in ["y", "x", "weight", "bias"].into_iter().zip(got.iter().zip(&exact)) {
                let want = values(&upload(exact, &[exact.len()], dtype, Device::Cpu));
                let what = format!("{what} of case {i}, {dtype}, {last}, {transposed}, {device:?}");
                assert_same(got, &want, tolerance, &what);
            }
        }
    }
}

#[test]
fn convolutions_match_the_cpu() {
    for device in gpus_and_processors("implicit_gemm::convolutions_match_the_cpu") {
        let halves = [(DType::F16, false, false), (DType::F16, true, true), (DType::BF16, true, false)];
        check(device, &[&halves[..], &[(DType::F32, false, false), (DType::F32, true, true)]].concat());
    }
}

/// In TF32, which represents the small numbers of these cases exactly, results must equal the CPU's.
#[test]
fn tf32_convolutions_match_the_cpu() {
    if in_own_process("implicit_gemm::tf32_convolutions_match_the_cpu") {
        set_float32_matmul_precision("medium").unwrap();
        let layouts = [(false, false), (false, true), (true, false), (true, true)];
        check(Device::best(), &layouts.map(|(last, transposed)| (DType::F32, last, transposed)));
    }
}

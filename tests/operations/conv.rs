//! Convolutions, unfold and fold, compared with loops over their definitions.

use claystone::device::count_launches;
use claystone::storage::{MemoryMode, with_memory_mode};
use claystone::ops::Argument;
use claystone::{ConvOptions, ConvTransposeOptions, Device, Padding, Tensor};
use ndarray::{Array, Array4, ArrayD, Dimension, IxDyn};

use crate::common::each_device;
use crate::harness::{Case, case};

/// Stride, padding, dilation and groups of a 2-D convolution. Arrays hold one entry per dim: rows, then columns.
#[derive(Clone, Copy)]
struct ConvParams {
    stride: [usize; 2],
    /// Padding before and after, for each dim.
    padding: [[usize; 2]; 2],
    dilation: [usize; 2],
    groups: usize,
}

const PLAIN: ConvParams = ConvParams { stride: [1; 2], padding: [[0; 2]; 2], dilation: [1; 2], groups: 1 };

fn moves(stride: [usize; 2], padding: [usize; 2], dilation: [usize; 2], groups: usize) -> ConvParams {
    ConvParams { stride, padding: padding.map(|p| [p, p]), dilation, groups }
}

/// Calls `f` for each kernel tap that is inside the image: image row and column, tap row and column, output row and column.
fn for_each_product(image: [usize; 2], kernel: [usize; 2], grid: [usize; 2], m: ConvParams, mut f: impl FnMut([usize; 6])) {
    for oh in 0..grid[0] {
        for ow in 0..grid[1] {
            for kh in 0..kernel[0] {
                for kw in 0..kernel[1] {
                    let h = (oh * m.stride[0] + kh * m.dilation[0]).checked_sub(m.padding[0][0]);
                    let w = (ow * m.stride[1] + kw * m.dilation[1]).checked_sub(m.padding[1][0]);
                    if let (Some(h), Some(w)) = (h, w)
                        && h < image[0]
                        && w < image[1]
                    {
                        f([h, w, kh, kw, oh, ow]);
                    }
                }
            }
        }
    }
}

fn grid(image: [usize; 2], kernel: [usize; 2], m: ConvParams) -> [usize; 2] {
    [0, 1].map(|d| {
        let padded = image[d] + m.padding[d][0] + m.padding[d][1];
        (padded - m.dilation[d] * (kernel[d] - 1) - 1) / m.stride[d] + 1
    })
}

/// Adds the missing dims of size 1: the rows of 1-D inputs, and the batch.
pub fn to_4d(x: &ArrayD<f64>, directions: usize) -> Array4<f64> {
    let mut shape = x.shape().to_vec();
    if directions == 1 {
        shape.insert(shape.len() - 1, 1);
    }
    while shape.len() < 4 {
        shape.insert(0, 1);
    }
    x.clone().into_shape_with_order(IxDyn(&shape)).unwrap().into_dimensionality().unwrap()
}

/// Removes the dims that [`to_4d`] added to `x` from a result.
pub fn remove_added_dims(out: Array<f64, impl Dimension>, x: &ArrayD<f64>, directions: usize) -> ArrayD<f64> {
    let mut shape = out.shape().to_vec();
    if directions == 1 {
        shape.remove(2);
    }
    if x.ndim() == directions + 1 {
        shape.remove(0);
    }
    out.into_shape_with_order(IxDyn(&shape)).unwrap()
}

fn dims(x: &Array4<f64>) -> [usize; 4] {
    x.dim().into()
}

fn conv(t: &[ArrayD<f64>], directions: usize, m: ConvParams) -> ArrayD<f64> {
    let (x, w) = (to_4d(&t[0], directions), to_4d(&t[1], directions));
    let ([n, _, h, wide], [o, per_group, kh, kw]) = (dims(&x), dims(&w));
    let [oh, ow] = grid([h, wide], [kh, kw], m);
    let mut out = Array4::zeros([n, o, oh, ow]);
    for i in 0..n {
        for j in 0..o {
            let group = j / (o / m.groups).max(1);
            for c in 0..per_group {
                for_each_product([h, wide], [kh, kw], [oh, ow], m, |[h, v, kh, kw, oh, ow]| {
                    out[[i, j, oh, ow]] += x[[i, group * per_group + c, h, v]] * w[[j, c, kh, kw]];
                });
            }
            if let Some(bias) = t.get(2) {
                out.slice_mut(ndarray::s![i, j, .., ..]).mapv_inplace(|v: f64| v + bias[[j]]);
            }
        }
    }
    remove_added_dims(out, &t[0], directions)
}

fn conv_transpose(t: &[ArrayD<f64>], directions: usize, m: ConvParams, behind: [usize; 2]) -> ArrayD<f64> {
    let (x, w) = (to_4d(&t[0], directions), to_4d(&t[1], directions));
    let ([n, c, h, wide], [_, per_group, kh, kw]) = (dims(&x), dims(&w));
    let image = [0, 1].map(|d| {
        ([h, wide][d] - 1) * m.stride[d] + m.dilation[d] * ([kh, kw][d] - 1) + behind[d] + 1 - 2 * m.padding[d][0]
    });
    let o = per_group * m.groups;
    let mut out = Array4::zeros([n, o, image[0], image[1]]);
    for i in 0..n {
        for j in 0..c {
            let group = j / (c / m.groups).max(1);
            for k in 0..per_group {
                for_each_product(image, [kh, kw], [h, wide], m, |[row, column, kh, kw, h, v]| {
                    out[[i, group * per_group + k, row, column]] += x[[i, j, h, v]] * w[[j, k, kh, kw]];
                });
            }
        }
        for k in 0..o {
            if let Some(bias) = t.get(2) {
                out.slice_mut(ndarray::s![i, k, .., ..]).mapv_inplace(|v: f64| v + bias[[k]]);
            }
        }
    }
    remove_added_dims(out, &t[0], directions)
}

fn unfold(x: &ArrayD<f64>, kernel: [usize; 2], m: ConvParams) -> ArrayD<f64> {
    let images = to_4d(x, 2);
    let [n, c, h, w] = dims(&images);
    let g = grid([h, w], kernel, m);
    let taps = kernel[0] * kernel[1];
    let mut out = ArrayD::zeros(IxDyn(&[n, c * taps, g[0] * g[1]]));
    for i in 0..n {
        for j in 0..c {
            for_each_product([h, w], kernel, g, m, |[h, v, kh, kw, oh, ow]| {
                out[[i, j * taps + kh * kernel[1] + kw, oh * g[1] + ow]] = images[[i, j, h, v]];
            });
        }
    }
    if x.ndim() == 3 { out.index_axis_move(ndarray::Axis(0), 0) } else { out }
}

fn fold(x: &ArrayD<f64>, image: [usize; 2], kernel: [usize; 2], m: ConvParams) -> ArrayD<f64> {
    let columns = if x.ndim() == 2 { x.clone().insert_axis(ndarray::Axis(0)) } else { x.clone() };
    let (taps, g) = (kernel[0] * kernel[1], grid(image, kernel, m));
    let (n, c) = (columns.shape()[0], columns.shape()[1] / taps);
    let mut out = ArrayD::zeros(IxDyn(&[n, c, image[0], image[1]]));
    for i in 0..n {
        for j in 0..c {
            for_each_product(image, kernel, g, m, |[h, v, kh, kw, oh, ow]| {
                out[[i, j, h, v]] += columns[[i, j * taps + kh * kernel[1] + kw, oh * g[1] + ow]];
            });
        }
    }
    if x.ndim() == 2 { out.index_axis_move(ndarray::Axis(0), 0) } else { out }
}

/// Tolerance factor for sums of many products: rounding errors are relative to the largest partial sum, not to the result.
const PRODUCTS: f64 = 10.0;

fn conv2d(x: &[usize], w: &[usize], bias: bool, m: ConvParams) -> Case {
    let made = case("conv2d").input(x).input(w).tolerance(PRODUCTS);
    let made = if bias { made.input(&w[..1]) } else { made };
    let padding = m.padding.map(|p| p[0]);
    let made = made.arg(&m.stride).arg(&padding).arg(&m.dilation).arg(m.groups);
    made.with_reference(move |x| vec![conv(x, 2, m)])
}

fn conv1d(x: &[usize], w: &[usize], bias: bool, m: ConvParams) -> Case {
    let made = case("conv1d").input(x).input(w).tolerance(PRODUCTS);
    let made = if bias { made.input(&w[..1]) } else { made };
    let made = made.arg(m.stride[1]).arg(m.padding[1][0]).arg(m.dilation[1]).arg(m.groups);
    made.with_reference(move |x| vec![conv(x, 1, m)])
}

fn conv_transpose2d(x: &[usize], w: &[usize], bias: bool, m: ConvParams, behind: [usize; 2]) -> Case {
    let made = case("conv_transpose2d").input(x).input(w).tolerance(PRODUCTS);
    let made = if bias { made.input(&[w[1] * m.groups]) } else { made };
    let padding = m.padding.map(|p| p[0]);
    let made = made.arg(&m.stride).arg(&padding).arg(&behind).arg(m.groups).arg(&m.dilation);
    made.with_reference(move |x| vec![conv_transpose(x, 2, m, behind)])
}

pub fn cases() -> Vec<Case> {
    let wide = moves([2, 1], [1, 2], [1, 2], 1);
    let mut cases = vec![
        conv2d(&[2, 3, 5, 6], &[4, 3, 3, 2], true, PLAIN),
        conv2d(&[2, 2, 6, 7], &[3, 2, 3, 3], false, wide),
        conv2d(&[1, 4, 4, 5], &[6, 2, 3, 3], true, moves([1, 1], [1, 1], [1, 1], 2)),
        conv2d(&[2, 3, 5, 4], &[6, 1, 2, 2], true, moves([2, 2], [1, 0], [1, 1], 3)),
        conv2d(&[2, 5, 4, 3], &[3, 5, 1, 1], true, PLAIN),
        conv2d(&[2, 4, 3, 3], &[4, 2, 1, 1], true, moves([1, 1], [0, 0], [1, 1], 2)),
        conv2d(&[2, 3, 5, 5], &[2, 3, 1, 1], false, moves([2, 2], [0, 0], [1, 1], 1)),
        conv2d(&[2, 2, 3, 3], &[2, 2, 1, 1], true, moves([1, 1], [1, 1], [1, 1], 1)),
        conv2d(&[3, 5, 5], &[2, 3, 3, 3], true, PLAIN),
        conv2d(&[1, 1, 1, 1], &[1, 1, 1, 1], true, PLAIN),
        conv2d(&[0, 3, 5, 5], &[2, 3, 3, 3], true, PLAIN),
        conv2d(&[2, 0, 4, 4], &[3, 0, 2, 2], true, PLAIN),
        conv2d(&[2, 3, 4, 4], &[0, 3, 2, 2], false, PLAIN),
        conv2d(&[2, 1, 2, 2], &[2, 1, 3, 3], true, moves([3, 3], [2, 2], [1, 1], 1)),
        // Matrix sizes at the edges of tiles: 63, 64, 65 or a prime number of columns or products.
        conv2d(&[3, 8, 17, 19], &[16, 8, 3, 3], true, moves([1, 1], [1, 1], [1, 1], 1)),
        conv2d(&[1, 3, 9, 11], &[65, 3, 3, 3], true, PLAIN),
        conv2d(&[1, 7, 10, 10], &[64, 7, 3, 3], false, PLAIN),
        conv2d(&[1, 64, 5, 15], &[5, 64, 1, 1], true, PLAIN),
        conv1d(&[2, 3, 9], &[4, 3, 4], true, moves([1, 2], [0, 1], [1, 2], 1)),
        conv1d(&[4, 11], &[4, 2, 3], true, moves([1, 1], [0, 0], [1, 1], 2)),
        conv1d(&[2, 3, 5], &[4, 3, 1], true, PLAIN),
        conv1d(&[0, 3, 9], &[4, 3, 4], true, PLAIN),
        conv1d(&[3, 6, 131], &[10, 6, 5], true, moves([1, 1], [0, 2], [1, 1], 1)),
        // The number of groups equals the number of input channels.
        conv2d(&[2, 3, 6, 5], &[3, 1, 3, 3], true, moves([1, 1], [1, 1], [1, 1], 3)),
        conv2d(&[2, 6, 9], &[4, 1, 3, 2], false, moves([1, 1], [1, 2], [1, 2], 2)),
        conv2d(&[0, 3, 5, 5], &[3, 1, 3, 3], true, moves([1, 1], [0, 0], [1, 1], 3)),
        conv1d(&[2, 3, 9], &[3, 1, 4], true, moves([1, 1], [0, 3], [1, 1], 3)),
        conv1d(&[4, 11], &[8, 1, 3], true, moves([1, 2], [0, 1], [1, 2], 4)),
        conv_transpose2d(&[2, 3, 4, 4], &[3, 1, 3, 3], true, moves([2, 2], [1, 1], [1, 1], 3), [1, 1]),
        conv_transpose2d(&[2, 3, 3, 4], &[3, 2, 2, 3], true, PLAIN, [0, 0]),
        conv_transpose2d(&[2, 2, 3, 3], &[2, 3, 3, 3], true, moves([2, 3], [1, 1], [1, 1], 1), [1, 2]),
        conv_transpose2d(&[1, 4, 3, 2], &[4, 2, 3, 2], true, moves([2, 1], [1, 0], [2, 1], 2), [0, 0]),
        conv_transpose2d(&[3, 4, 4], &[3, 2, 2, 2], false, moves([2, 2], [0, 0], [1, 1], 1), [0, 0]),
        conv_transpose2d(&[0, 3, 3, 3], &[3, 2, 2, 2], true, PLAIN, [0, 0]),
        conv_transpose2d(&[2, 16, 7, 9], &[16, 8, 4, 4], true, moves([2, 2], [1, 1], [1, 1], 1), [0, 0]),
    ];
    for (x, w, m, behind) in [
        (&[2, 3, 5][..], [3, 2, 4], moves([1, 2], [0, 1], [1, 1], 1), 1),
        (&[4, 5], [4, 1, 3], moves([1, 1], [0, 0], [1, 2], 2), 0),
        (&[3, 5], [3, 1, 4], moves([1, 2], [0, 1], [1, 1], 3), 1),
        (&[0, 3, 5], [3, 2, 4], PLAIN, 0),
    ] {
        let made = case("conv_transpose1d").input(x).input(&w).input(&[w[1] * m.groups]).tolerance(PRODUCTS);
        let made = made.arg(m.stride[1]).arg(m.padding[1][0]).arg(behind).arg(m.groups).arg(m.dilation[1]);
        cases.push(made.with_reference(move |x| vec![conv_transpose(x, 1, m, [0, behind])]));
    }
    // Padding "same": with an even kernel, the end has one more element of padding than the start.
    for (w, dilation, padding) in [([2, 2, 4, 3], [1, 1], [[1, 2], [1, 1]]), ([2, 2, 2, 2], [2, 3], [[1, 1], [1, 2]])] {
        let m = ConvParams { padding, dilation, ..PLAIN };
        let made = case("conv2d").input(&[2, 2, 5, 6]).input(&w).tolerance(PRODUCTS);
        let made = made.arg(&[1, 1]).arg("same").arg(&dilation).arg(1);
        cases.push(made.with_reference(move |x| vec![conv(x, 2, m)]));
    }
    let valid = case("conv2d").input(&[1, 2, 4, 4]).input(&[2, 2, 3, 3]).tolerance(PRODUCTS);
    cases.push(valid.arg(Argument::None).arg("valid").with_reference(|x| vec![conv(x, 2, PLAIN)]));
    for (x, kernel, m) in [
        (&[2, 3, 5, 6][..], [2, 3], PLAIN),
        (&[2, 6, 7], [3, 2], wide),
        (&[1, 1, 1, 1], [1, 1], PLAIN),
        (&[0, 3, 4, 4], [2, 2], PLAIN),
        (&[2, 0, 4, 4], [2, 2], PLAIN),
        (&[2, 1, 0, 3], [2, 2], moves([1, 1], [1, 1], [1, 1], 1)),
        (&[3, 5, 33, 31], [3, 3], moves([2, 2], [1, 1], [1, 1], 1)),
    ] {
        let pads = m.padding.map(|p| p[0]);
        let made = case("unfold2d").input(x).arg(&kernel).arg(&m.dilation).arg(&pads).arg(&m.stride);
        cases.push(made.with_reference(move |x| vec![unfold(&x[0], kernel, m)]));
    }
    for (n, image, kernel, m) in [
        (Some(2), [5, 6], [2, 3], PLAIN),
        (None, [6, 7], [3, 2], wide),
        (Some(0), [4, 4], [2, 2], PLAIN),
        (Some(3), [17, 19], [3, 3], moves([1, 1], [1, 1], [1, 1], 1)),
    ] {
        let (g, pads) = (grid(image, kernel, m), m.padding.map(|p| p[0]));
        let shape: Vec<usize> = n.into_iter().chain([2 * kernel[0] * kernel[1], g[0] * g[1]]).collect();
        let made = case("fold").input(&shape).arg(&image).arg(&kernel).arg(&m.dilation).arg(&pads).arg(&m.stride);
        cases.push(made.with_reference(move |x| vec![fold(&x[0], image, kernel, m)]));
    }
    cases
}

/// Whether the CPU supports the instructions that kernels for convolutions in one launch need.
pub fn has_single_launch_kernels() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("f16c")
        && is_x86_feature_detected!("fma");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

#[test]
fn convolutions_are_contiguous_and_take_few_launches() {
    each_device(|device| {
        let bias = Tensor::ones(4, device).unwrap();
        for (batch, kernel, most) in [(1, 3, 2), (2, 3, 3), (2, 1, 1)] {
            let x = Tensor::ones(&[batch, 3, 8, 8], device).unwrap();
            let w = Tensor::ones(&[4, 3, kernel, kernel], device).unwrap();
            // Runs with buffers, because convolutions that read image objects always take one launch.
            let run = || {
                let convolve = || x.conv2d(&w, Some(&bias), ConvOptions::default());
                with_memory_mode(MemoryMode::Buffer, convolve).unwrap()
            };
            run();
            let (y, launches) = count_launches(run);
            let most = if device == Device::Cpu && has_single_launch_kernels() { 1 } else { most };
            assert_eq!(launches, most, "kernel {kernel} on {device}");
            assert!(y.is_contiguous() && y.view([batch as isize, -1]).is_ok());
            assert!(x.conv2d(&w, None, ConvOptions { groups: 1, stride: [2, 2], ..Default::default() }).unwrap().is_contiguous());
            assert_eq!(y.i((0, 0, 0, 0)).unwrap().item::<f32>().unwrap(), (3 * kernel * kernel + 1) as f32);
        }
    });
}

#[test]
fn errors_of_convolutions_name_the_mismatch() {
    let zeros = |shape: &[usize]| Tensor::zeros(shape, Device::Cpu).unwrap();
    let says = |text: &str, made: claystone::Result<Tensor>| {
        let message = made.unwrap_err().to_string();
        assert!(message.contains(text), "{message}");
    };
    let (x, w) = (zeros(&[1, 3, 4, 4]), zeros(&[2, 3, 3, 3]));
    let conv = |x: &Tensor, w: &Tensor, b: Option<&Tensor>, o: ConvOptions<2>| x.conv2d(w, b, o);
    let plain = ConvOptions::default();
    says("[O, C / groups, ..]", conv(&x, &zeros(&[2, 2, 3, 3]), None, plain));
    says("one number for each channel", conv(&x, &w, Some(&zeros(&[3])), plain));
    says("does not fit", conv(&x, &zeros(&[2, 3, 5, 5]), None, plain));
    says("above 0", conv(&x, &w, None, ConvOptions { stride: [0, 1], ..plain }));
    says("strides of 1", conv(&x, &w, None, ConvOptions { stride: [2, 2], padding: Padding::Same, ..plain }));
    says("evenly", conv(&x, &zeros(&[2, 1, 3, 3]), None, ConvOptions { groups: 3, ..plain }));
    says("shape", conv(&zeros(&[4, 4]), &w, None, plain));
    let ints = x.to_dtype(claystone::DType::I64).unwrap();
    says("floats", conv(&ints, &w, None, plain));
    let behind = ConvTransposeOptions { output_padding: [1, 0], ..ConvTransposeOptions::default() };
    says("output_padding", x.conv_transpose2d(&zeros(&[3, 2, 2, 2]), None, behind));
}

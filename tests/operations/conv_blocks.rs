//! Convolutions of sizes that are cut into blocks, and their gradients, against those of f64, which are made of columns and products
//! and which `conv` and the table check by their definitions.

use claystone::autograd::{GradOptions, grad_with_options};
use claystone::device::count_launches;
use claystone::{ConvOptions, ConvTransposeOptions, DType, Device, Result, Tensor};

use crate::common::values;
use crate::conv::at_once;

/// A convolution, or a transposed one of the same weight, of which `image` is then the result.
#[derive(Clone, Copy, Debug)]
struct Size {
    n: usize,
    groups: usize,
    /// Channels of an image and of windows in each group.
    inner: usize,
    outer: usize,
    image: [usize; 2],
    kernel: [usize; 2],
    stride: [usize; 2],
    padding: [usize; 2],
    dilation: [usize; 2],
}

const fn size(n: usize, [inner, outer]: [usize; 2], image: [usize; 2], kernel: [usize; 2]) -> Size {
    let (stride, dilation) = ([1; 2], [1; 2]);
    Size { n, groups: 1, inner, outer, image, kernel, stride, padding: [0; 2], dilation }
}

impl Size {
    const fn moves(self, stride: [usize; 2], padding: [usize; 2], dilation: [usize; 2]) -> Size {
        Size { stride, padding, dilation, ..self }
    }

    const fn groups(self, groups: usize) -> Size {
        Size { groups, ..self }
    }

    fn grid(&self) -> [usize; 2] {
        [0, 1].map(|d| {
            let window = self.dilation[d] * (self.kernel[d] - 1) + 1;
            (self.image[d] + 2 * self.padding[d] - window) / self.stride[d] + 1
        })
    }

    /// Of images, windows, the weight.
    fn shapes(&self) -> [[usize; 4]; 3] {
        let ([h, w], [oh, ow], [kh, kw]) = (self.image, self.grid(), self.kernel);
        let (c, o) = (self.groups * self.inner, self.groups * self.outer);
        [[self.n, c, h, w], [self.n, o, oh, ow], [o, self.inner, kh, kw]]
    }

    fn run(&self, x: &Tensor, weight: &Tensor, bias: &Tensor, turned: bool) -> Result<Tensor> {
        let Size { stride, padding, dilation, groups, .. } = *self;
        if !turned {
            let options = ConvOptions { stride, padding: padding.into(), dilation, groups };
            return x.conv2d(weight, Some(bias), options);
        }
        let reach = [0, 1].map(|d| (self.grid()[d] - 1) * stride[d] + dilation[d] * (self.kernel[d] - 1) + 1);
        let output_padding = [0, 1].map(|d| self.image[d] + 2 * padding[d] - reach[d]);
        let options = ConvTransposeOptions { stride, padding, output_padding, dilation, groups };
        x.conv_transpose2d(weight, Some(bias), options)
    }
}

/// Around tiles and vectors of every kernel, blocks of channels, parts of images and several of them.
const SIZES: &[Size] = &[
    size(2, [3, 5], [9, 11], [3, 3]).moves([1, 1], [1, 1], [1, 1]),
    size(1, [1, 1], [5, 7], [2, 3]),
    size(3, [13, 12], [28, 28], [3, 3]).moves([1, 1], [1, 1], [1, 1]),
    size(2, [5, 11], [13, 17], [3, 3]).moves([1, 1], [2, 0], [2, 3]),
    size(2, [4, 33], [16, 16], [5, 5]).moves([1, 1], [2, 2], [1, 1]),
    size(2, [7, 31], [15, 32], [1, 3]).moves([1, 1], [0, 1], [1, 1]),
    size(2, [6, 17], [31, 9], [3, 1]).moves([1, 1], [1, 0], [1, 1]),
    size(2, [3, 24], [33, 31], [3, 3]).moves([2, 2], [1, 1], [1, 1]),
    size(1, [3, 13], [40, 37], [7, 7]).moves([2, 3], [3, 3], [1, 1]),
    size(2, [3, 4], [23, 29], [2, 2]).moves([5, 4], [0, 1], [1, 1]), // gaps between windows
    size(2, [3, 4], [2, 3], [5, 4]).moves([1, 1], [4, 3], [1, 1]),   // windows larger than the image
    size(1, [2, 3], [1, 1], [3, 3]).moves([3, 3], [4, 4], [2, 2]),   // windows of padding alone
    size(2, [3, 4], [4, 4], [3, 3]).moves([1, 1], [6, 6], [1, 1]),
    size(1, [4, 6], [12, 12], [3, 3]).moves([1, 1], [9, 9], [9, 9]), // taps farther apart than rows
    size(2, [17, 16], [9, 10], [3, 3]).moves([1, 2], [1, 1], [2, 1]).groups(3),
    size(3, [1, 3], [14, 14], [3, 3]).moves([1, 1], [1, 1], [1, 1]).groups(4),
    size(1, [24, 33], [6, 6], [3, 3]).moves([1, 1], [1, 1], [1, 1]).groups(2),
    size(67, [5, 9], [3, 3], [3, 3]).moves([1, 1], [1, 1], [1, 1]), // several images a job, the last one fewer
    size(67, [20, 13], [3, 4], [3, 3]).moves([1, 1], [1, 1], [1, 1]).groups(2),
    size(37, [6, 5], [7, 7], [3, 3]).moves([2, 2], [1, 1], [1, 1]),
    size(1, [3, 7], [64, 65], [3, 3]).moves([1, 1], [1, 1], [1, 1]), // parts of an image
    size(1, [2, 3], [1, 1031], [1, 5]).moves([1, 1], [0, 2], [1, 1]), // of a row
    size(1, [2, 3], [1, 1031], [1, 5]).moves([1, 3], [0, 2], [1, 2]),
    size(5, [2, 3], [1, 40], [1, 4]).moves([1, 2], [0, 0], [1, 1]),
    size(1, [90, 4], [28, 28], [3, 3]).moves([1, 1], [1, 1], [1, 1]), // channels that do not fit into the cache
    size(1, [61, 130], [12, 12], [5, 5]).moves([1, 1], [2, 2], [1, 1]),
    size(1, [2, 40], [61, 60], [5, 5]).moves([1, 1], [2, 2], [1, 1]), // nor windows
    size(1, [3, 2], [1, 9001], [1, 9]).moves([1, 1], [0, 4], [1, 1]),
];

/// Numbers of a dtype, the same in f64.
fn made(shape: &[usize], seed: usize, dtype: DType) -> Tensor {
    let n: usize = shape.iter().product();
    let numbers: Vec<f32> = (0..n).map(|i| ((i * 7919 + seed * 104_729) % 1009) as f32 / 1009.0 - 0.5).collect();
    Tensor::from_slice(&numbers, shape, Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

/// The same elements, laid out otherwise: with the dims in another order, some of more, backwards, or each several times.
fn laid_out(t: &Tensor, how: usize) -> Tensor {
    let dims = t.shape().dims().to_vec();
    match how {
        1 => t.permute(&[3, 1, 0, 2]).unwrap().contiguous().unwrap().permute(&[2, 1, 3, 0]).unwrap(),
        2 => {
            let wide = Tensor::zeros(&[dims[0], dims[1] + 2, dims[2] + 1, 2 * dims[3] + 1], t).unwrap();
            let inner = wide.narrow(1, 1, dims[1]).unwrap().narrow(2, 1, dims[2]).unwrap();
            let inner = inner.slice(3, 1, 2 * dims[3] as isize + 1, 2).unwrap();
            inner.copy_(t).unwrap();
            inner
        }
        3 => t.narrow(1, 0, 1).unwrap().expand(&dims[..]).unwrap(),
        _ => t.shallow_clone(),
    }
}

/// The result and the gradients of what it is made of.
fn all(size: &Size, inputs: &[Tensor; 3], grad: &Tensor, turned: bool, dtype: DType) -> Vec<Vec<f64>> {
    let leaves = inputs.each_ref().map(|t| {
        // A leaf keeps its layout, but not in another dtype.
        let t = if t.dtype() == dtype { t.shallow_clone() } else { t.to_dtype(dtype).unwrap() };
        t.requires_grad_(true).unwrap()
    });
    let y = size.run(&leaves[0], &leaves[1], &leaves[2], turned).unwrap();
    assert!(y.is_contiguous());
    y.backward_with(&grad.to_dtype(dtype).unwrap()).unwrap();
    let gradients = leaves.iter().map(|leaf| values(&leaf.grad().unwrap()));
    [values(&y)].into_iter().chain(gradients).collect()
}

fn compare(size: &Size, how: usize, dtype: DType, turned: bool) {
    let [images, windows, weight] = size.shapes();
    let (from, to) = if turned { (windows, images) } else { (images, windows) };
    let inputs =
        [laid_out(&made(&from, 1, dtype), how), laid_out(&made(&weight, 2, dtype), how % 3), made(&to[1..2], 3, dtype)];
    let grad = laid_out(&made(&to, 4, dtype), how);
    let got = all(size, &inputs, &grad, turned, dtype);
    let want = all(size, &inputs, &grad, turned, DType::F64);
    let rounding = match dtype {
        DType::F32 => 1e-5,
        DType::F16 => 1e-3,
        _ => 8e-3,
    };
    for (part, (got, want)) in ["result", "image", "weight", "bias"].iter().zip(got.iter().zip(&want)) {
        assert_eq!(got.len(), want.len());
        // Of the largest: sums of many products are as exact as those.
        let scale = want.iter().fold(1.0, |max: f64, x| max.max(x.abs()));
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            let off = (got - want).abs();
            assert!(off <= rounding * scale, "{part} of {size:?}, {how}, {dtype}, {turned}: {i} is {got}, not {want}");
        }
    }
}

#[test]
fn convolutions_in_blocks_are_those_of_f64() {
    for size in SIZES {
        for turned in [false, true] {
            (0..4).for_each(|how| compare(size, how, DType::F32, turned));
            [DType::F16, DType::BF16].into_iter().for_each(|dtype| compare(size, 0, dtype, turned));
        }
    }
    for size in &SIZES[..12] {
        (1..4).for_each(|how| compare(size, how, DType::F16, how == 2));
    }
}

/// What is no number, or not finite, goes where the windows that see it go: zeros of the padding are multiplied, too.
#[test]
fn special_values_of_convolutions() {
    let size = size(2, [3, 13], [9, 20], [3, 3]).moves([1, 1], [1, 1], [1, 1]);
    for (turned, place) in [false, true].into_iter().flat_map(|t| [0, 1, 2, 3].map(|p| (t, p))) {
        let [images, windows, weight] = size.shapes();
        let (from, to) = if turned { (windows, images) } else { (images, windows) };
        let mut inputs = [made(&from, 1, DType::F32), made(&weight, 2, DType::F32), made(&to[1..2], 3, DType::F32)];
        let mut grad = made(&to, 4, DType::F32);
        let with = |t: &Tensor, numbers: &[(usize, f32)]| {
            let mut elements = t.to_vec::<f32>().unwrap();
            numbers.iter().for_each(|&(at, number)| elements[at] = number);
            Tensor::from_slice(&elements, t.shape(), Device::Cpu).unwrap()
        };
        let special = [(0, f32::INFINITY), (101, f32::NAN), (17, f32::NEG_INFINITY)];
        match place {
            0 => inputs[0] = with(&inputs[0], &special),
            1 => inputs[1] = with(&inputs[1], &special),
            2 => inputs[2] = with(&inputs[2], &special[..1]),
            _ => grad = with(&grad, &special),
        }
        let got = all(&size, &inputs, &grad, turned, DType::F32);
        let want = all(&size, &inputs, &grad, turned, DType::F64);
        for (part, (got, want)) in got.iter().zip(&want).enumerate() {
            for (i, (got, want)) in got.iter().zip(want).enumerate() {
                let same = (got.is_nan() && want.is_nan()) || got == want || (got - want).abs() < 1e-4;
                assert!(same, "part {part}, {turned}, special {place}: {i} is {got}, not {want}");
            }
        }
    }
}

/// The gradient of a gradient is that of f64, whichever of the inputs have one.
#[test]
fn second_gradients_of_convolutions() {
    let size = size(2, [3, 4], [6, 7], [3, 3]).moves([2, 1], [1, 1], [1, 1]);
    let [images, windows, weight] = size.shapes();
    for (turned, wanted) in
        [false, true].into_iter().flat_map(|t| [[true, true], [true, false], [false, true]].map(|w| (t, w)))
    {
        let (from, to) = if turned { (windows, images) } else { (images, windows) };
        let twice = |dtype: DType| {
            let leaf = |shape: &[usize], seed, wanted| {
                made(shape, seed, DType::F32).to_dtype(dtype).unwrap().requires_grad_(wanted).unwrap()
            };
            let inputs = [leaf(&from, 1, wanted[0]), leaf(&weight, 2, wanted[1]), leaf(&to[1..2], 3, true)];
            let y = size.run(&inputs[0], &inputs[1], &inputs[2], turned).unwrap();
            let loss = y.mul(&y).unwrap().mul(&y).unwrap().sum((), false).unwrap();
            let leaves: Vec<&Tensor> = inputs.iter().filter(|t| t.requires_grad()).collect();
            let options = GradOptions { create_graph: true, ..GradOptions::default() };
            let first: Vec<Tensor> =
                grad_with_options(&[&loss], &leaves, options).unwrap().into_iter().flatten().collect();
            let squares = first.iter().map(|g| g.mul(g).unwrap().sum((), false).unwrap());
            let sum = squares.reduce(|a, b| a.add(&b).unwrap()).unwrap();
            sum.backward().unwrap();
            let second = leaves.iter().map(|t| values(&t.grad().unwrap()));
            first.iter().map(values).chain(second).collect::<Vec<_>>()
        };
        for (part, (got, want)) in twice(DType::F32).iter().zip(&twice(DType::F64)).enumerate() {
            let scale = want.iter().fold(1.0, |max: f64, x| max.max(x.abs()));
            for (i, (got, want)) in got.iter().zip(want).enumerate() {
                assert!((got - want).abs() <= 1e-5 * scale, "{part}, {turned}, {wanted:?}: {i} is {got}, not {want}");
            }
        }
    }
}

/// One launch each for the result and for every gradient, and the same bits every time.
#[test]
fn convolutions_are_launched_once_and_repeat() {
    let size = size(64, [5, 13], [19, 23], [3, 3]).moves([1, 1], [1, 1], [1, 1]);
    let [images, windows, weight] = size.shapes();
    for turned in [false, true] {
        let (from, to) = if turned { (windows, images) } else { (images, windows) };
        let leaf = |shape: &[usize], seed| made(shape, seed, DType::F32).requires_grad_(true).unwrap();
        let inputs = [leaf(&from, 1), leaf(&weight, 2), leaf(&to[1..2], 3)];
        let grad = made(&to, 4, DType::F32);
        let mut first: Option<Vec<Vec<f32>>> = None;
        for _ in 0..5 {
            let (y, launches) = count_launches(|| size.run(&inputs[0], &inputs[1], &inputs[2], turned).unwrap());
            assert!(launches == 1 || !at_once());
            let ((), launches) = count_launches(|| y.backward_with(&grad).unwrap());
            assert!(launches == 3 || !at_once());
            let gradients = inputs.iter().map(|t| t.grad().unwrap().to_vec::<f32>().unwrap());
            let made: Vec<Vec<f32>> = [y.to_vec::<f32>().unwrap()].into_iter().chain(gradients).collect();
            inputs.iter().for_each(Tensor::zero_grad);
            assert!(first.get_or_insert_with(|| made.clone()) == &made);
        }
    }
}

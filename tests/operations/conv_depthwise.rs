//! Convolutions whose groups have a channel or a few, and their gradients, against loops over their definition.

use claystone::autograd::gradgradcheck;
use claystone::device::count_launches;
use claystone::{ConvOptions, ConvTransposeOptions, DType, Device, Result, Tensor};

use crate::common::values;

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

const fn size(n: usize, groups: usize, image: [usize; 2], kernel: [usize; 2]) -> Size {
    let (stride, dilation) = ([1; 2], [1; 2]);
    Size { n, groups, inner: 1, outer: 1, image, kernel, stride, padding: [0; 2], dilation }
}

impl Size {
    const fn moves(self, stride: [usize; 2], padding: [usize; 2], dilation: [usize; 2]) -> Size {
        Size { stride, padding, dilation, ..self }
    }

    const fn of(self, inner: usize, outer: usize) -> Size {
        Size { inner, outer, ..self }
    }

    fn grid(&self) -> [usize; 2] {
        [0, 1].map(|d| {
            let window = self.dilation[d] * (self.kernel[d] - 1) + 1;
            (self.image[d] + 2 * self.padding[d] - window) / self.stride[d] + 1
        })
    }

    /// Of the input, the weight, the bias and the result.
    fn shapes(&self, turned: bool) -> [Vec<usize>; 4] {
        let ([h, w], [oh, ow], [kh, kw]) = (self.image, self.grid(), self.kernel);
        let (c, o) = (self.groups * self.inner, self.groups * self.outer);
        let (image, windows) = (vec![self.n, c, h, w], vec![self.n, o, oh, ow]);
        let (x, y) = if turned { (windows, image) } else { (image, windows) };
        let bias = vec![y[1]];
        [x, vec![o, self.inner, kh, kw], bias, y]
    }

    fn run(&self, [x, weight, bias]: [&Tensor; 3], turned: bool) -> Result<Tensor> {
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

    /// Of every tap of every window of every pair of channels, the places in images, windows and the weight; in images None
    /// in the padding.
    fn meetings(&self, mut f: impl FnMut(Option<usize>, usize, usize)) {
        let ([h, w], [oh, ow], [kh, kw]) = (self.image, self.grid(), self.kernel);
        let (c, o) = (self.groups * self.inner, self.groups * self.outer);
        for at in 0..self.n * o * self.inner * oh * ow * kh * kw {
            let (left, right) = (at / kw % ow, at % kw);
            let (top, down) = (at / kw / ow / kh % oh, at / kw / ow % kh);
            let rest = at / kw / ow / kh / oh;
            let (inner, outer, n) = (rest % self.inner, rest / self.inner % o, rest / self.inner / o);
            let row = (top * self.stride[0] + down * self.dilation[0]).checked_sub(self.padding[0]);
            let column = (left * self.stride[1] + right * self.dilation[1]).checked_sub(self.padding[1]);
            let channel = n * c + outer / self.outer * self.inner + inner;
            let inside = row.zip(column).filter(|&(row, column)| row < h && column < w);
            let image = inside.map(|(row, column)| (channel * h + row) * w + column);
            f(image, ((n * o + outer) * oh + top) * ow + left, ((outer * self.inner + inner) * kh + down) * kw + right);
        }
    }

    /// The result and the gradients of what it is made of. Zeros of the padding are multiplied where images are read.
    fn definition(&self, inputs: &[Tensor; 3], grad: &Tensor, turned: bool) -> [Vec<f64>; 4] {
        let ([x, weight, bias], grad) = (inputs.each_ref().map(values), values(grad));
        let plane = grad.len() / grad_channels(self, turned);
        let channel = |i: usize| i / plane.max(1) % bias.len().max(1);
        let mut y: Vec<f64> = (0..grad.len()).map(|i| bias[channel(i)]).collect();
        let (mut dx, mut dw, mut db) = (vec![0.0; x.len()], vec![0.0; weight.len()], vec![0.0; bias.len()]);
        grad.iter().enumerate().for_each(|(i, g)| db[channel(i)] += g);
        self.meetings(|image, window, tap| match (image, turned) {
            (image, false) => {
                let seen = image.map_or(0.0, |at| x[at]);
                y[window] += seen * weight[tap];
                dw[tap] += seen * grad[window];
                image.into_iter().for_each(|at| dx[at] += grad[window] * weight[tap]);
            }
            (image, true) => {
                let seen = image.map_or(0.0, |at| grad[at]);
                dx[window] += seen * weight[tap];
                dw[tap] += seen * x[window];
                image.into_iter().for_each(|at| y[at] += x[window] * weight[tap]);
            }
        });
        [y, dx, dw, db]
    }
}

/// Channels of all images of the result.
fn grad_channels(size: &Size, turned: bool) -> usize {
    (size.n * size.groups * if turned { size.inner } else { size.outer }).max(1)
}

/// Around vectors, blocks of them and of channels, parts of planes and of rows.
const SIZES: &[Size] = &[
    size(1, 2, [1, 1], [1, 1]),
    size(2, 3, [1, 1], [3, 3]).moves([3, 3], [4, 4], [2, 2]), // windows of padding alone
    size(2, 3, [7, 7], [3, 3]).moves([1, 1], [1, 1], [1, 1]),
    size(1, 5, [8, 15], [3, 3]).moves([1, 1], [1, 1], [1, 1]),
    size(2, 2, [13, 16], [3, 3]).moves([1, 1], [1, 1], [1, 1]),
    size(1, 3, [16, 17], [5, 4]).moves([1, 1], [2, 2], [1, 1]),
    size(1, 2, [31, 33], [3, 3]).moves([1, 1], [0, 1], [1, 1]),
    size(3, 2, [28, 28], [3, 3]).moves([1, 1], [1, 1], [1, 1]),
    size(1, 3, [12, 13], [3, 3]).moves([1, 1], [2, 3], [2, 3]),
    size(1, 2, [9, 40], [1, 7]).moves([1, 1], [0, 3], [1, 1]),
    size(1, 2, [40, 9], [7, 1]).moves([1, 1], [3, 0], [1, 1]),
    size(2, 3, [2, 3], [5, 4]).moves([1, 1], [4, 3], [1, 1]), // windows larger than the image
    size(2, 3, [28, 29], [3, 3]).moves([2, 2], [1, 1], [1, 1]),
    size(1, 3, [17, 38], [3, 3]).moves([2, 2], [0, 0], [1, 1]),
    size(1, 2, [15, 20], [2, 2]).moves([2, 2], [0, 0], [1, 1]),
    size(1, 2, [15, 20], [1, 1]).moves([2, 2], [0, 0], [1, 1]), // a phase that nothing reads
    size(1, 2, [15, 20], [3, 3]).moves([2, 2], [1, 1], [2, 2]),
    size(1, 2, [23, 29], [2, 2]).moves([5, 4], [0, 1], [1, 1]), // gaps between windows
    size(1, 2, [19, 22], [4, 3]).moves([3, 1], [2, 1], [2, 3]),
    size(2, 3, [10, 11], [3, 3]).moves([1, 1], [1, 1], [1, 1]).of(1, 2),
    size(1, 2, [9, 18], [3, 2]).moves([2, 1], [1, 1], [1, 2]).of(1, 7),
    size(2, 2, [10, 11], [3, 3]).moves([1, 1], [1, 1], [1, 1]).of(3, 1),
    size(1, 3, [14, 14], [3, 3]).moves([1, 1], [1, 1], [1, 1]).of(4, 4),
    size(2, 2, [6, 19], [3, 3]).moves([1, 2], [1, 1], [1, 1]).of(5, 6),
    size(1, 2, [12, 12], [3, 3]).moves([1, 1], [1, 1], [1, 1]).of(8, 8),
    size(67, 2, [3, 4], [3, 3]).moves([1, 1], [1, 1], [1, 1]),
    size(3, 41, [21, 23], [3, 3]).moves([1, 1], [1, 1], [1, 1]), // several jobs
    size(1, 1, [151, 157], [3, 3]).moves([1, 1], [1, 1], [1, 1]), // parts of a plane, and jobs
    size(1, 2, [203, 97], [3, 3]).moves([2, 2], [1, 1], [1, 1]),
    size(2, 2, [1, 20011], [1, 4]).moves([1, 1], [0, 3], [1, 1]), // of a row
    size(1, 2, [2, 40009], [2, 3]).moves([1, 2], [1, 0], [1, 2]),
    size(0, 2, [5, 5], [3, 3]),
];

/// Numbers of a dtype.
fn made(shape: &[usize], seed: usize, dtype: DType) -> Tensor {
    let n: usize = shape.iter().product();
    let numbers: Vec<f32> = (0..n).map(|i| ((i * 7919 + seed * 104_729) % 1009) as f32 / 1009.0 - 0.5).collect();
    Tensor::from_slice(&numbers, shape, Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

/// The same elements, with the dims in another order, or some of more.
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
        // Rows that lie in one piece, but not beside each other.
        3 => {
            let wide = Tensor::zeros(&[dims[0], dims[1], dims[2], dims[3] + 3], t).unwrap();
            let inner = wide.narrow(3, 2, dims[3]).unwrap();
            inner.copy_(t).unwrap();
            inner
        }
        _ => t.shallow_clone(),
    }
}

/// The result and the gradients.
fn all(size: &Size, inputs: &[Tensor; 3], grad: &Tensor, turned: bool) -> [Vec<f64>; 4] {
    let leaves = inputs.each_ref().map(|t| t.detach().requires_grad_(true).unwrap());
    let y = size.run(leaves.each_ref(), turned).unwrap();
    assert!(y.is_contiguous());
    y.backward_with(grad).unwrap();
    let [dx, dw, db] = leaves.map(|leaf| values(&leaf.grad().unwrap()));
    [values(&y), dx, dw, db]
}

fn compare(size: &Size, how: usize, dtype: DType, turned: bool) {
    let [x, weight, bias, y] = size.shapes(turned);
    let inputs = [laid_out(&made(&x, 1, dtype), how), laid_out(&made(&weight, 2, dtype), how), made(&bias, 3, dtype)];
    let grad = laid_out(&made(&y, 4, dtype), how);
    let (got, want) = (all(size, &inputs, &grad, turned), size.definition(&inputs, &grad, turned));
    let rounding = match dtype {
        DType::F64 => 1e-13,
        DType::F32 => 1e-5,
        DType::F16 => 1e-3,
        _ => 8e-3,
    };
    for (part, (got, want)) in ["result", "input", "weight", "bias"].iter().zip(got.iter().zip(&want)) {
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
fn depthwise_convolutions_are_those_of_their_definition() {
    for size in SIZES {
        for turned in [false, true] {
            [DType::F32, DType::F64, DType::F16, DType::BF16].into_iter().for_each(|d| compare(size, 0, d, turned));
            (1..4).for_each(|how| compare(size, how, DType::F32, turned));
        }
    }
    for size in &SIZES[..25] {
        (1..4).for_each(|how| compare(size, how, if how == 2 { DType::BF16 } else { DType::F64 }, how == 3));
    }
}

/// What is no number, or not finite, goes where the windows that see it go and nowhere else.
#[test]
fn special_values_of_depthwise_convolutions() {
    let plain = size(2, 3, [9, 20], [3, 3]).moves([1, 1], [1, 1], [1, 1]);
    let sizes = [plain, plain.of(2, 4), size(2, 3, [13, 20], [3, 3]).moves([2, 2], [1, 1], [1, 1]).of(1, 2)];
    for (size, turned, place) in
        sizes.iter().flat_map(|size| [false, true].into_iter().flat_map(move |t| [0, 1, 2, 3].map(|p| (size, t, p))))
    {
        let [x, weight, bias, y] = size.shapes(turned);
        let (mut inputs, mut grad) = (
            [made(&x, 1, DType::F32), made(&weight, 2, DType::F32), made(&bias, 3, DType::F32)],
            made(&y, 4, DType::F32),
        );
        let with = |t: &Tensor, numbers: &[(usize, f32)]| {
            let mut elements = t.to_vec::<f32>().unwrap();
            numbers.iter().for_each(|&(at, number)| elements[at] = number);
            Tensor::from_slice(&elements, t.shape(), Device::Cpu).unwrap()
        };
        let special = [(0, f32::INFINITY), (11, f32::NEG_INFINITY), (17, f32::NAN)];
        match place {
            0 => inputs[0] = with(&inputs[0], &special),
            1 => inputs[1] = with(&inputs[1], &special),
            2 => inputs[2] = with(&inputs[2], &special[..1]),
            _ => grad = with(&grad, &special),
        }
        let (got, want) = (all(size, &inputs, &grad, turned), size.definition(&inputs, &grad, turned));
        for (part, (got, want)) in got.iter().zip(&want).enumerate() {
            for (i, (got, want)) in got.iter().zip(want).enumerate() {
                let same = (got.is_nan() && want.is_nan()) || got == want || (got - want).abs() < 1e-4;
                assert!(same, "part {part} of {size:?}, {turned}, special {place}: {i} is {got}, not {want}");
            }
        }
    }
}

#[test]
fn gradients_of_depthwise_convolutions_have_gradients() {
    for (size, turned) in [
        (size(2, 2, [4, 5], [3, 3]).moves([1, 1], [1, 1], [1, 1]), false),
        (size(1, 2, [5, 5], [3, 2]).moves([2, 1], [1, 0], [1, 2]).of(1, 2), false),
        (size(1, 2, [5, 6], [3, 3]).moves([2, 2], [1, 1], [1, 1]), true),
    ] {
        let [x, weight, bias, _] = size.shapes(turned);
        let inputs = [made(&x, 1, DType::F64), made(&weight, 2, DType::F64), made(&bias, 3, DType::F64)];
        let squares = |t: &[Tensor]| size.run([&t[0], &t[1], &t[2]], turned)?.square()?.sum((), false);
        gradgradcheck(squares, &inputs, 1e-6).unwrap_or_else(|e| panic!("{size:?}: {e}"));
    }
}

/// One launch each for the result and for every gradient, and the same bits every time.
#[test]
fn depthwise_convolutions_are_launched_once_and_repeat() {
    let size = size(5, 20, [19, 23], [3, 3]).moves([1, 1], [1, 1], [1, 1]);
    for turned in [false, true] {
        let [x, weight, bias, y] = size.shapes(turned);
        let inputs = [x, weight, bias].map(|shape| made(&shape, 1, DType::F32).requires_grad_(true).unwrap());
        let grad = made(&y, 4, DType::F32);
        let mut first: Option<Vec<Vec<f32>>> = None;
        for _ in 0..5 {
            let (y, launches) = count_launches(|| size.run(inputs.each_ref(), turned).unwrap());
            assert_eq!(launches, 1);
            let ((), launches) = count_launches(|| y.backward_with(&grad).unwrap());
            assert_eq!(launches, 3);
            let gradients = inputs.iter().map(|t| t.grad().unwrap().to_vec::<f32>().unwrap());
            let made: Vec<Vec<f32>> = [y.to_vec::<f32>().unwrap()].into_iter().chain(gradients).collect();
            inputs.iter().for_each(Tensor::zero_grad);
            assert!(first.get_or_insert_with(|| made.clone()) == &made);
        }
    }
}

/// Their sizes are within bounds, and the elements of a plane more than there are numbers.
#[test]
fn a_plane_beyond_any_memory_is_an_error() {
    let ones = |shape: &[usize]| Tensor::ones(shape, Device::Cpu).unwrap();
    let far = ConvTransposeOptions { stride: [1 << 29; 2], padding: [1, 1], ..ConvTransposeOptions::default() };
    assert!(ones(&[1, 1, 9, 9]).conv_transpose2d(&ones(&[1, 1, 2, 2]), None, far).is_err());
}

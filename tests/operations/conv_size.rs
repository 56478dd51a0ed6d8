//! Convolutions of many sizes and their gradients, compared with loops over the definition. `conv_blocks` and `conv_depthwise` use
//! these checks.

use claystone::device::count_launches;
use claystone::{ConvOptions, ConvTransposeOptions, DType, Device, Result, Tensor};

use crate::common::values;

/// A convolution. Tests also use it as a transposed convolution (`turned`) with the same weight, whose result has the size `image`.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    n: usize,
    groups: usize,
    /// Number of input channels of each group; `outer` is the number of output channels.
    inner: usize,
    outer: usize,
    image: [usize; 2],
    kernel: [usize; 2],
    stride: [usize; 2],
    padding: [usize; 2],
    dilation: [usize; 2],
}

/// Returns a convolution with one group, stride 1, no padding and dilation 1.
pub const fn size(n: usize, [inner, outer]: [usize; 2], image: [usize; 2], kernel: [usize; 2]) -> Size {
    let (stride, dilation) = ([1; 2], [1; 2]);
    Size { n, groups: 1, inner, outer, image, kernel, stride, padding: [0; 2], dilation }
}

impl Size {
    pub const fn with_geometry(self, stride: [usize; 2], padding: [usize; 2], dilation: [usize; 2]) -> Size {
        Size { stride, padding, dilation, ..self }
    }

    pub const fn groups(self, groups: usize) -> Size {
        Size { groups, ..self }
    }

    /// Sets the numbers of input and output channels of each group.
    pub const fn of(self, inner: usize, outer: usize) -> Size {
        Size { inner, outer, ..self }
    }

    fn grid(&self) -> [usize; 2] {
        [0, 1].map(|d| {
            let window = self.dilation[d] * (self.kernel[d] - 1) + 1;
            (self.image[d] + 2 * self.padding[d] - window) / self.stride[d] + 1
        })
    }

    /// Returns the shapes of the input, weight, bias and result.
    pub fn shapes(&self, turned: bool) -> [Vec<usize>; 4] {
        let ([h, w], [oh, ow], [kh, kw]) = (self.image, self.grid(), self.kernel);
        let (c, o) = (self.groups * self.inner, self.groups * self.outer);
        let (image, windows) = (vec![self.n, c, h, w], vec![self.n, o, oh, ow]);
        let (x, y) = if turned { (windows, image) } else { (image, windows) };
        let bias = vec![y[1]];
        [x, vec![o, self.inner, kh, kw], bias, y]
    }

    pub fn run(&self, [x, weight, bias]: [&Tensor; 3], turned: bool) -> Result<Tensor> {
        let Size { stride, padding, dilation, groups, .. } = *self;
        if !turned {
            let options = ConvOptions { stride, padding: padding.into(), dilation, groups };
            return x.conv2d(weight, Some(bias), options);
        }
        let reach = [0, 1].map(|d| (self.grid()[d] - 1) * stride[d] + dilation[d] * (self.kernel[d] - 1) + 1);
        let output_padding = [0, 1].map(|d| self.image[d] + 2 * padding[d] - reach[d]);
        let options = ConvTransposeOptions { stride, padding: padding.into(), output_padding, dilation, groups };
        x.conv_transpose2d(weight, Some(bias), options)
    }

    /// Calls `f` with the indices into the images, windows and weight, for every kernel tap of every window and channel pair. The image index
    /// is `None` in the padding.
    fn for_each_product(&self, mut f: impl FnMut(Option<usize>, usize, usize)) {
        let ([h, w], [oh, ow], [kh, kw]) = (self.image, self.grid(), self.kernel);
        let (c, o) = (self.groups * self.inner, self.groups * self.outer);
        let seen = |d: usize, window: usize, tap: usize| {
            (window * self.stride[d] + tap * self.dilation[d]).checked_sub(self.padding[d]).filter(|&i| i < [h, w][d])
        };
        for (rest, inner) in pairs([self.n * o, self.inner]) {
            let (n, outer) = (rest / o, rest % o);
            let channel = n * c + outer / self.outer * self.inner + inner;
            for (top, down) in pairs([oh, kh]) {
                let row = seen(0, top, down);
                for (left, right) in pairs([ow, kw]) {
                    let image = row.zip(seen(1, left, right)).map(|(row, column)| (channel * h + row) * w + column);
                    let window = ((n * o + outer) * oh + top) * ow + left;
                    f(image, window, ((outer * self.inner + inner) * kh + down) * kw + right);
                }
            }
        }
    }

    /// Returns the result and the gradients of the inputs by definition. Padding zeros are multiplied too, because 0 times infinity
    /// is NaN.
    fn definition(&self, inputs: &[Tensor; 3], grad: &Tensor, turned: bool) -> [Vec<f64>; 4] {
        let ([x, weight, bias], grad) = (inputs.each_ref().map(values), values(grad));
        let plane = grad.len() / grad_channels(self, turned);
        let channel = |i: usize| i / plane.max(1) % bias.len().max(1);
        let mut y: Vec<f64> = (0..grad.len()).map(|i| bias[channel(i)]).collect();
        let (mut dx, mut dw, mut db) = (vec![0.0; x.len()], vec![0.0; weight.len()], vec![0.0; bias.len()]);
        grad.iter().enumerate().for_each(|(i, g)| db[channel(i)] += g);
        self.for_each_product(|image, window, tap| match (image, turned) {
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

/// Returns all pairs of indices below two sizes, in row-major order.
fn pairs([rows, columns]: [usize; 2]) -> impl Iterator<Item = (usize, usize)> {
    (0..rows).flat_map(move |row| (0..columns).map(move |column| (row, column)))
}

/// Returns the number of channels in all images of the result.
fn grad_channels(size: &Size, turned: bool) -> usize {
    (size.n * size.groups * if turned { size.inner } else { size.outer }).max(1)
}

/// Returns a tensor of pseudo-random numbers, rounded to `dtype`.
pub fn pseudo_random(shape: &[usize], seed: usize, dtype: DType) -> Tensor {
    let n: usize = shape.iter().product();
    let numbers: Vec<f32> = (0..n).map(|i| ((i * 7919 + seed * 104_729) % 1009) as f32 / 1009.0 - 0.5).collect();
    Tensor::from_slice(&numbers, shape, Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

/// Returns the tensor in the memory layout `how`: 1 with dims in another order, 2 and 3 with gaps, 4 with expanded channels, 0
/// unchanged.
fn with_layout(t: &Tensor, how: usize) -> Tensor {
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
        // Rows are contiguous, with gaps between the rows.
        3 => {
            let wide = Tensor::zeros(&[dims[0], dims[1], dims[2], dims[3] + 3], t).unwrap();
            let inner = wide.narrow(3, 2, dims[3]).unwrap();
            inner.copy_(t).unwrap();
            inner
        }
        4 => t.narrow(1, 0, 1).unwrap().expand(&dims[..]).unwrap(),
        _ => t.shallow_clone(),
    }
}

/// Returns the result and the gradients as claystone computes them.
fn all(size: &Size, inputs: &[Tensor; 3], grad: &Tensor, turned: bool) -> [Vec<f64>; 4] {
    let leaves = inputs.each_ref().map(|t| t.detach().requires_grad_(true).unwrap());
    let y = size.run(leaves.each_ref(), turned).unwrap();
    assert!(y.is_contiguous());
    y.backward_with(grad).unwrap();
    let [dx, dw, db] = leaves.map(|leaf| values(&leaf.grad().unwrap()));
    [values(&y), dx, dw, db]
}

/// Compares the result and the gradients with the definition, for operands in the memory layout `how` (see [`with_layout`]).
pub fn compare(size: &Size, how: usize, dtype: DType, turned: bool) {
    let [x, weight, bias, y] = size.shapes(turned);
    let weight = with_layout(&pseudo_random(&weight, 2, dtype), if how == 4 { 0 } else { how });
    let inputs = [with_layout(&pseudo_random(&x, 1, dtype), how), weight, pseudo_random(&bias, 3, dtype)];
    let grad = with_layout(&pseudo_random(&y, 4, dtype), how);
    let (got, want) = (all(size, &inputs, &grad, turned), size.definition(&inputs, &grad, turned));
    let rounding = match dtype {
        DType::F64 => 1e-13,
        DType::F32 => 1e-5,
        DType::F16 => 1e-3,
        _ => 8e-3,
    };
    for (part, (got, want)) in ["result", "input", "weight", "bias"].iter().zip(got.iter().zip(&want)) {
        assert_eq!(got.len(), want.len());
        // Errors are relative to the largest value, because the rounding error of a sum is relative to its largest products.
        let scale = want.iter().fold(1.0, |max: f64, x| max.max(x.abs()));
        for (i, (got, want)) in got.iter().zip(want).enumerate() {
            let off = (got - want).abs();
            assert!(off <= rounding * scale, "{part} of {size:?}, {how}, {dtype}, {turned}: {i} is {got}, not {want}");
        }
    }
}

/// For each of input, weight, bias and gradient, puts infinities and NaN into that tensor and compares results with the definition.
pub fn compare_special(size: &Size, dtype: DType, turned: bool) {
    for place in 0..4 {
        let [x, weight, bias, y] = size.shapes(turned);
        let mut tensors =
            [(x, 1), (weight, 2), (bias, 3), (y, 4)].map(|(shape, seed)| pseudo_random(&shape, seed, DType::F32));
        let mut elements = tensors[place].to_vec::<f32>().unwrap();
        for (at, number) in [(0, f32::INFINITY), (11, f32::NEG_INFINITY), (17, f32::NAN)] {
            if let Some(element) = elements.get_mut(at) {
                *element = number;
            }
        }
        tensors[place] = Tensor::from_slice(&elements, tensors[place].shape(), Device::Cpu).unwrap();
        let tensors = tensors.map(|t| t.to_dtype(dtype).unwrap());
        let [x, weight, bias, grad] = tensors;
        let inputs = [x, weight, bias];
        let (got, want) = (all(size, &inputs, &grad, turned), size.definition(&inputs, &grad, turned));
        for (part, (got, want)) in got.iter().zip(&want).enumerate() {
            for (i, (got, want)) in got.iter().zip(want).enumerate() {
                let rounding = if dtype == DType::BF16 { want.abs() / 256.0 } else { 0.0 };
                let same = (got.is_nan() && want.is_nan()) || got == want || (got - want).abs() < 1e-4 + rounding;
                assert!(same, "part {part} of {size:?}, {turned}, special {place}: {i} is {got}, not {want}");
            }
        }
    }
}

/// Checks that repeated runs give the same bits. With `at_once`, also checks that the result takes one launch and each gradient
/// takes one.
pub fn repeats(size: &Size, at_once: bool) {
    for turned in [false, true] {
        let [x, weight, bias, y] = size.shapes(turned);
        let inputs = [x, weight, bias].map(|shape| pseudo_random(&shape, 1, DType::F32).requires_grad_(true).unwrap());
        let grad = pseudo_random(&y, 4, DType::F32);
        let mut first: Option<Vec<Vec<f32>>> = None;
        for _ in 0..5 {
            let (y, launches) = count_launches(|| size.run(inputs.each_ref(), turned).unwrap());
            assert!(launches == 1 || !at_once, "{launches} launches");
            let ((), launches) = count_launches(|| y.backward_with(&grad).unwrap());
            assert!(launches == 3 || !at_once, "{launches} launches");
            let gradients = inputs.iter().map(|t| t.grad().unwrap().to_vec::<f32>().unwrap());
            let made: Vec<Vec<f32>> = [y.to_vec::<f32>().unwrap()].into_iter().chain(gradients).collect();
            inputs.iter().for_each(Tensor::zero_grad);
            assert!(first.get_or_insert_with(|| made.clone()) == &made);
        }
    }
}

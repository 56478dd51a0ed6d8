//! 3-D convolutions and pools, compared with loops over their definitions, which are written for any number of dims.

use claystone::ops::Argument;
use claystone::{AvgPoolOptions, ConvOptions, ConvTransposeOptions, DType, Device, MaxPoolOptions, Tensor};
use ndarray::{ArrayD, Axis, Dimension, IxDyn};

use crate::common::{each_device, f64s};
use crate::harness::{Case, case};

/// Stride, padding (before and after), dilation and groups, with `D` spatial dims.
#[derive(Clone, Copy)]
pub struct ConvParams<const D: usize> {
    pub stride: [usize; D],
    pub padding: [(usize, usize); D],
    pub dilation: [usize; D],
    pub groups: usize,
}

pub fn plain<const D: usize>() -> ConvParams<D> {
    ConvParams { stride: [1; D], padding: [(0, 0); D], dilation: [1; D], groups: 1 }
}

fn moves(stride: [usize; 3], padding: [usize; 3], dilation: [usize; 3], groups: usize) -> ConvParams<3> {
    ConvParams { stride, padding: padding.map(|n| (n, n)), dilation, groups }
}

fn last<const D: usize>(dims: &[usize]) -> [usize; D] {
    dims[dims.len() - D..].try_into().unwrap()
}

/// Adds a batch dim if there is none.
fn batched<const D: usize>(x: &ArrayD<f64>) -> ArrayD<f64> {
    if x.ndim() == D + 2 { x.clone() } else { x.clone().insert_axis(Axis(0)) }
}

fn remove_added_dims<const D: usize>(out: ArrayD<f64>, x: &ArrayD<f64>) -> ArrayD<f64> {
    if x.ndim() == D + 2 { out } else { out.index_axis_move(Axis(0), 0) }
}

fn indices(dims: &[usize]) -> impl Iterator<Item = Vec<usize>> {
    ndarray::indices(IxDyn(dims)).into_iter().map(|i| i.as_array_view().to_vec())
}

impl<const D: usize> ConvParams<D> {
    /// Returns the number of windows in each dim. With `ceil`, the last window may extend beyond the padding if it starts within
    /// the image.
    pub fn grid(&self, image: [usize; D], kernel: [usize; D], ceil: bool) -> [usize; D] {
        std::array::from_fn(|d| {
            let (before, behind) = self.padding[d];
            let room = (image[d] + before + behind) as isize - (self.dilation[d] * (kernel[d] - 1) + 1) as isize;
            let whole = room.div_euclid(self.stride[d] as isize) + 1;
            let rest = room.rem_euclid(self.stride[d] as isize) > 0;
            let starts_inside = whole * (self.stride[d] as isize) < (image[d] + before) as isize;
            (whole + isize::from(ceil && rest && starts_inside)) as usize
        })
    }

    /// Returns the index in the image of tap `k` of window `o`; `None` in the padding.
    fn place(&self, image: [usize; D], o: &[usize], k: &[usize]) -> Option<Vec<usize>> {
        let along = |d: usize| (o[d] * self.stride[d] + k[d] * self.dilation[d]).checked_sub(self.padding[d].0);
        (0..D).map(|d| along(d).filter(|&i| i < image[d])).collect()
    }

    /// Calls `f` for every product of a convolution, with the indices into the images, the weight `[outer, inner, kernel]` and the
    /// windows.
    pub fn products(
        &self,
        n: usize,
        image: [usize; D],
        weight: &[usize],
        grid: [usize; D],
        mut f: impl FnMut(&[usize], &[usize], &[usize]),
    ) {
        let meetings: Vec<_> = indices(&grid)
            .flat_map(|o| indices(&weight[2..]).map(move |k| (o.clone(), k)))
            .filter_map(|(o, k)| self.place(image, &o, &k).map(|i| (i, k, o)))
            .collect();
        let outer = (weight[0] / self.groups).max(1);
        for index in indices(&[n, weight[0], weight[1]]) {
            let [n, j, c] = index[..] else { unreachable!("three dims") };
            for (i, k, o) in &meetings {
                let at = |a: usize, b: usize, rest: &[usize]| [&[a, b], rest].concat();
                f(&at(n, j / outer * weight[1] + c, i), &at(j, c, k), &at(n, j, o));
            }
        }
    }
}

fn add_bias(out: &mut ArrayD<f64>, bias: Option<&ArrayD<f64>>) {
    if let Some(bias) = bias {
        out.axis_iter_mut(Axis(1)).zip(bias).for_each(|(mut channel, b)| channel += *b);
    }
}

pub fn conv<const D: usize>(t: &[ArrayD<f64>], m: ConvParams<D>) -> ArrayD<f64> {
    let (x, w) = (batched::<D>(&t[0]), &t[1]);
    let image = last(x.shape());
    let grid = m.grid(image, last(w.shape()), false);
    let mut out = ArrayD::zeros([&[x.shape()[0], w.shape()[0]], &grid[..]].concat());
    m.products(x.shape()[0], image, w.shape(), grid, |i, k, o| out[o] += x[i] * w[k]);
    add_bias(&mut out, t.get(2));
    remove_added_dims::<D>(out, &t[0])
}

pub fn conv_transpose<const D: usize>(t: &[ArrayD<f64>], m: ConvParams<D>, added: [usize; D]) -> ArrayD<f64> {
    let (x, w) = (batched::<D>(&t[0]), &t[1]);
    let (grid, kernel): ([usize; D], [usize; D]) = (last(x.shape()), last(w.shape()));
    let image = std::array::from_fn(|d| {
        let reach = (grid[d] - 1) * m.stride[d] + m.dilation[d] * (kernel[d] - 1) + 1 + added[d];
        reach - m.padding[d].0 - m.padding[d].1
    });
    let mut out = ArrayD::zeros([&[x.shape()[0], w.shape()[1] * m.groups], &image[..]].concat());
    m.products(x.shape()[0], image, w.shape(), grid, |i, k, o| out[i] += x[o] * w[k]);
    add_bias(&mut out, t.get(2));
    remove_added_dims::<D>(out, &t[0])
}

/// Applies `f` to each window: to its elements as pairs of index in the image and value, and to the window's size including
/// padding.
fn windows<const D: usize>(
    given: &ArrayD<f64>,
    grid: [usize; D],
    elements: impl Fn(&[usize]) -> (Vec<Vec<usize>>, usize),
    f: impl Fn(&[(usize, f64)], usize) -> f64,
) -> ArrayD<f64> {
    let x = batched::<D>(given);
    let image: [usize; D] = last(x.shape());
    let out = ArrayD::from_shape_fn([&x.shape()[..2], &grid].concat(), |index| {
        let (places, size) = elements(&index.as_array_view().to_vec()[2..]);
        let value = |i: &Vec<usize>| {
            let flat = i.iter().zip(image).fold(0, |flat, (i, size)| flat * size + i);
            (flat, x[&[&[index[0], index[1]], &i[..]].concat()[..]])
        };
        f(&places.iter().map(value).collect::<Vec<_>>(), size)
    });
    remove_added_dims::<D>(out, given)
}

fn greatest(e: &[(usize, f64)]) -> (usize, f64) {
    e.iter().copied().reduce(|a, b| if b.1 > a.1 || b.1.is_nan() { b } else { a }).unwrap()
}

pub fn mean(e: &[(usize, f64)], by: f64) -> f64 {
    e.iter().map(|(_, v)| v).sum::<f64>() / by
}

/// Computes a pool with windows of one size.
pub fn pool<const D: usize>(
    x: &ArrayD<f64>,
    kernel: [usize; D],
    m: ConvParams<D>,
    ceil: bool,
    f: impl Fn(&[(usize, f64)], usize) -> f64,
) -> ArrayD<f64> {
    let image: [usize; D] = last(x.shape());
    let elements = |o: &[usize]| {
        let size = (0..D).map(|d| {
            let (start, padded) = (o[d] * m.stride[d], image[d] + m.padding[d].0 + m.padding[d].1);
            (start + kernel[d]).min(padded) - start
        });
        (indices(&kernel).filter_map(|k| m.place(image, o, &k)).collect(), size.product())
    };
    windows(x, m.grid(image, kernel, ceil), elements, f)
}

fn adaptive(x: &ArrayD<f64>, grid: [usize; 3], f: impl Fn(&[(usize, f64)], usize) -> f64) -> ArrayD<f64> {
    let image: [usize; 3] = last(x.shape());
    let elements = |o: &[usize]| {
        let from = |d: usize, o: usize| o * image[d] / grid[d];
        let size: [usize; 3] = std::array::from_fn(|d| ((o[d] + 1) * image[d]).div_ceil(grid[d]) - from(d, o[d]));
        let places = indices(&size).map(|k| (0..3).map(|d| from(d, o[d]) + k[d]).collect()).collect();
        (places, size.iter().product())
    };
    windows(x, grid, elements, f)
}

pub fn max_pool<const D: usize>(x: &ArrayD<f64>, kernel: [usize; D], m: ConvParams<D>, ceil: bool) -> Vec<ArrayD<f64>> {
    let value = pool(x, kernel, m, ceil, |e, _| greatest(e).1);
    vec![value, pool(x, kernel, m, ceil, |e, _| greatest(e).0 as f64)]
}

/// Tolerance factor for sums of many products: rounding errors are relative to the largest partial sum, not to the result.
pub const PRODUCTS: f64 = 10.0;

fn conv3d(x: &[usize], w: &[usize], bias: bool, m: ConvParams<3>) -> Case {
    let made = case("conv3d").input(x).input(w).tolerance(PRODUCTS);
    let made = if bias { made.input(&w[..1]) } else { made };
    let made = made.arg(&m.stride).arg(&m.padding.map(|p| p.0)).arg(&m.dilation).arg(m.groups);
    made.with_reference(move |x| vec![conv(x, m)])
}

fn conv_transpose3d(x: &[usize], w: &[usize], bias: bool, m: ConvParams<3>, added: [usize; 3]) -> Case {
    let made = case("conv_transpose3d").input(x).input(w).tolerance(PRODUCTS);
    let made = if bias { made.input(&[w[1] * m.groups]) } else { made };
    let made = made.arg(&m.stride).arg(&m.padding.map(|p| p.0)).arg(&added).arg(m.groups).arg(&m.dilation);
    made.with_reference(move |x| vec![conv_transpose(x, m, added)])
}

pub fn cases() -> Vec<Case> {
    let one = [1; 3];
    let mut cases = vec![
        conv3d(&[1, 2, 3, 4, 3], &[2, 2, 2, 2, 2], true, plain()),
        conv3d(&[2, 2, 4, 5, 3], &[3, 2, 2, 2, 2], false, moves([2, 1, 2], [1, 0, 1], [2, 3, 1], 1)),
        conv3d(&[1, 4, 3, 3, 4], &[4, 2, 2, 2, 3], true, moves(one, one, one, 2)),
        conv3d(&[2, 3, 3, 3, 3], &[6, 1, 2, 2, 2], true, moves([1, 2, 1], [0, 1, 1], one, 3)),
        conv3d(&[2, 3, 2, 3, 2], &[4, 3, 1, 1, 1], true, plain()),
        conv3d(&[2, 3, 3, 3, 2], &[2, 3, 1, 1, 1], false, moves([2, 2, 1], [0; 3], one, 1)),
        conv3d(&[1, 2, 3, 4, 4], &[2, 2, 1, 3, 3], true, moves(one, [0, 1, 1], one, 1)),
        conv3d(&[2, 4, 3, 4], &[3, 2, 3, 1, 2], true, plain()),
        conv3d(&[1; 5], &[1; 5], true, plain()),
        conv3d(&[0, 2, 3, 3, 3], &[2, 2, 2, 2, 2], true, plain()),
        conv3d(&[2, 0, 3, 3, 3], &[2, 0, 2, 2, 2], true, plain()),
        conv3d(&[2, 2, 3, 3, 3], &[0, 2, 2, 2, 2], false, plain()),
        conv3d(&[2, 1, 2, 1, 2], &[2, 1, 3, 3, 3], true, moves([3; 3], [2; 3], one, 1)),
        conv3d(&[2, 7, 5, 6, 9], &[9, 7, 3, 3, 3], true, moves(one, one, one, 1)),
        conv_transpose3d(&[1, 2, 2, 3, 2], &[2, 2, 2, 2, 3], true, plain(), [0; 3]),
        conv_transpose3d(&[2, 2, 2, 3, 3], &[2, 3, 3, 2, 2], true, moves([2, 1, 3], [1, 0, 1], [1, 2, 1], 1), [1, 1, 2]),
        conv_transpose3d(&[1, 4, 2, 2, 3], &[4, 2, 2, 3, 1], true, moves([1, 2, 1], [0, 1, 0], [3, 1, 1], 2), [0; 3]),
        conv_transpose3d(&[2, 3, 2, 3, 2], &[3, 1, 3, 3, 2], false, moves([2, 2, 1], one, one, 3), [1, 1, 0]),
        conv_transpose3d(&[3, 2, 2, 2], &[3, 2, 2, 2, 2], false, moves([2; 3], [0; 3], one, 1), [0; 3]),
        conv_transpose3d(&[0, 3, 2, 2, 2], &[3, 2, 2, 2, 2], true, plain(), [0; 3]),
        conv_transpose3d(&[2, 8, 3, 4, 5], &[8, 6, 4, 4, 4], true, moves([2; 3], one, one, 1), [0; 3]),
    ];
    let same = ConvParams { padding: [(0, 1), (1, 1), (1, 2)], ..plain() };
    let made = case("conv3d").input(&[1, 2, 3, 4, 5]).input(&[2, 2, 2, 3, 4]).tolerance(PRODUCTS);
    cases.push(made.arg(Argument::None).arg("same").with_reference(move |x| vec![conv(x, same)]));
    for (x, kernel, m, ceil) in [
        (&[2, 2, 4, 4, 6][..], [2, 2, 2], moves([2, 2, 2], [0; 3], one, 1), false),
        (&[1, 2, 3, 5, 4], [2, 3, 2], moves([1, 2, 2], [1, 1, 0], one, 1), false),
        (&[2, 5, 3, 4], [3, 2, 2], moves([2, 2, 3], [1, 0, 1], one, 1), true),
        (&[1, 1, 6, 5, 7], [2, 2, 3], moves([1, 2, 1], [0, 1, 1], [3, 2, 1], 1), false),
        (&[1, 1, 3, 2, 2], [2, 3, 1], moves([2, 2, 1], [0; 3], one, 1), true),
        (&[1; 5], one, plain(), false),
        (&[0, 2, 2, 2, 2], [2, 2, 2], plain(), false),
        (&[2, 0, 2, 2, 2], [1, 2, 2], plain(), false),
        (&[3, 5, 9, 11, 13], [3, 3, 3], moves([2, 2, 2], one, one, 1), false),
    ] {
        let padding = m.padding.map(|p| p.0);
        for (name, count) in [("max_pool3d", 1), ("max_pool3d_with_indices", 2)] {
            let made = case(name).distinct(x).arg(&kernel).arg(&m.stride).arg(&padding).arg(&m.dilation).arg(ceil);
            cases.push(made.with_reference(move |x| max_pool(&x[0], kernel, m, ceil).into_iter().take(count).collect()));
        }
        for (include, divisor) in [(true, None), (false, None), (true, Some(3usize))] {
            if m.dilation == one {
                let made = case("avg_pool3d").input(x).arg(&kernel).arg(&m.stride).arg(&padding).arg(ceil);
                let by = move |e: &[(usize, f64)], size: usize| divisor.unwrap_or(if include { size } else { e.len() });
                let f = move |x: &[ArrayD<f64>]| pool(&x[0], kernel, m, ceil, |e, size| mean(e, by(e, size) as f64));
                cases.push(made.arg(include).arg(divisor).with_reference(move |x| vec![f(x)]));
            }
        }
    }
    for (x, size) in [
        (&[2, 3, 3, 5, 7][..], [2, 2, 3]),
        (&[1, 2, 4, 4, 6], [2, 2, 2]),
        (&[3, 5, 6, 2], [1, 1, 1]),
        (&[1, 2, 2, 3, 4], [3, 5, 2]),
        (&[0, 2, 4, 4, 4], [2, 2, 2]),
        (&[2, 3, 2, 4, 4], [0, 2, 2]),
        (&[2, 3, 4, 4, 4], [2, 0, 2]),
    ] {
        let made = case("adaptive_avg_pool3d").input(x).arg(&size);
        cases.push(made.with_reference(move |x| vec![adaptive(&x[0], size, |e, n| mean(e, n as f64))]));
        let made = case("adaptive_max_pool3d").distinct(x).arg(&size);
        cases.push(made.with_reference(move |x| vec![adaptive(&x[0], size, |e, _| greatest(e).1)]));
        let made = case("adaptive_max_pool3d_with_indices").distinct(x).arg(&size);
        cases.push(made.with_reference(move |x| {
            let of = |f: fn(&[(usize, f64)], usize) -> f64| adaptive(&x[0], size, f);
            vec![of(|e, _| greatest(e).1), of(|e, _| greatest(e).0 as f64)]
        }));
    }
    cases
}

/// The maximum of a window is its last NaN, otherwise the first of its greatest elements, also across slices. It is -infinity only
/// if all elements are.
#[test]
fn max_pool3d_of_special_values() {
    each_device(|device| {
        let (nan, low) = (f32::NAN, f32::NEG_INFINITY);
        let x = [nan, 9.0, nan, 7.0, 1.0, 5.0, 5.0, 5.0, low, low, low, low];
        let x = Tensor::from_slice(&x, [3, 2, 2, 1], device).unwrap();
        let (y, at) = x.max_pool3d_with_indices([2, 2, 1], MaxPoolOptions::default()).unwrap();
        let y = y.to_vec::<f32>().unwrap();
        assert!(y[0].is_nan() && y[1..] == [5.0, low], "{y:?} on {device}");
        assert_eq!(at.to_vec::<i64>().unwrap(), [2, 1, 0]);
    });
}

/// Sums of a window that f16 cannot represent, and means in bf16 that would be wrong if the sum were rounded before the division.
#[test]
fn means_of_sixteen_bit_floats_round_once() {
    each_device(|device| {
        let pool = |values: [f32; 4], dtype: DType| {
            let x = Tensor::from_slice(&values, [1, 2, 1, 2], device).unwrap();
            let options = AvgPoolOptions { divisor_override: Some(2), ..AvgPoolOptions::default() };
            f64s(&x.to_dtype(dtype).unwrap().avg_pool3d([2, 1, 2], options).unwrap())
        };
        assert_eq!(pool([60000.0, 60000.0, -60000.0, 1024.0], DType::F16).sum(), 30512.0);
        // bf16 rounds 1 + 1/256 down, so a sum that is rounded to bf16 first would give a wrong mean.
        assert_eq!(pool([1.0, 1.0 / 256.0, 1.0, 2.0 / 256.0], DType::BF16).sum(), 1.0078125);
    });
}

#[test]
fn errors_of_3d_operations_name_the_mismatch() {
    let zeros = |shape: &[usize]| Tensor::zeros(shape, Device::Cpu).unwrap();
    let says = |text: &str, made: claystone::Result<Tensor>| {
        let message = made.unwrap_err().to_string();
        assert!(message.contains(text), "{message}");
    };
    let (x, w) = (zeros(&[1, 2, 3, 3, 3]), zeros(&[2, 2, 2, 2, 2]));
    says("[O, C / groups, ..]", x.conv3d(&zeros(&[2, 3, 2, 2, 2]), None, ConvOptions::default()));
    says("does not fit", x.conv3d(&zeros(&[2, 2, 4, 1, 1]), None, ConvOptions::default()));
    says("above 0", x.conv3d(&w, None, ConvOptions { stride: [0, 1, 1], ..ConvOptions::default() }));
    says("before its kernel dims", zeros(&[3, 3, 3]).conv3d(&w, None, ConvOptions::default()));
    says("output_padding", x.conv_transpose3d(&w, None, ConvTransposeOptions { output_padding: [1, 0, 0], ..Default::default() }));
    says("[N, C, D, H, W]", zeros(&[3, 3, 3]).max_pool3d([1; 3], MaxPoolOptions::default()));
    says("half", x.max_pool3d([1, 2, 2], MaxPoolOptions { padding: [(0, 0), (0, 2), (0, 0)].into(), ..MaxPoolOptions::default() }));
    says("empty", zeros(&[1, 3, 2, 0, 4]).adaptive_avg_pool3d([1; 3]));
}

//! Pooling, compared with loops over its definition.

use claystone::autograd::gradcheck;
use claystone::{AvgPoolOptions, DType, Device, MaxPoolOptions, Tensor};
use ndarray::{Array4, ArrayD};

use crate::common::{each_device, f64s};
use crate::conv::{remove_added_dims, to_4d};
use crate::harness::{Case, case};

/// Parameters of a 2-D pool. `ceil` allows windows that extend beyond the padding at the end.
#[derive(Clone, Copy)]
struct Pool {
    kernel: [usize; 2],
    stride: [usize; 2],
    padding: [usize; 2],
    dilation: [usize; 2],
    ceil: bool,
}

fn pool(kernel: [usize; 2], stride: [usize; 2], padding: [usize; 2], dilation: [usize; 2], ceil: bool) -> Pool {
    Pool { kernel, stride, padding, dilation, ceil }
}

impl Pool {
    /// Returns the start and end of each window in dim `d`. Positions before the image are negative; positions after it are at
    /// least `size`.
    fn windows(&self, d: usize, size: usize) -> Vec<(isize, isize)> {
        let reach = self.dilation[d] * (self.kernel[d] - 1) + 1;
        let last = size + 2 * self.padding[d];
        let mut out = Vec::new();
        for from in (0..last).step_by(self.stride[d]) {
            let fits = from + reach <= last;
            // A window that extends beyond the padding must start before the padding at the end.
            if fits || (self.ceil && from < size + self.padding[d] && out.last().is_none_or(|&(_, e)| e < last as isize)) {
                out.push((from as isize, (from + reach) as isize));
            }
        }
        out.into_iter().map(|(a, b)| (a - self.padding[d] as isize, b - self.padding[d] as isize)).collect()
    }
}

/// Applies `f` to the elements of each window, given as pairs of index in the image and value.
fn each_window(
    x: &ArrayD<f64>,
    directions: usize,
    windows: [&[Vec<usize>]; 2],
    f: impl Fn(&[(usize, f64)]) -> f64,
) -> ArrayD<f64> {
    let images = to_4d(x, directions);
    let (n, c, wide) = (images.shape()[0], images.shape()[1], images.shape()[3]);
    let shape = [n, c, windows[0].len(), windows[1].len()];
    let out = Array4::from_shape_fn(shape, |(i, j, row, column)| {
        let rows = windows[0][row].iter();
        let elements: Vec<(usize, f64)> = rows
            .flat_map(|&h| windows[1][column].iter().map(move |&w| (h, w)))
            .map(|(h, w)| (h * wide + w, images[[i, j, h, w]]))
            .collect();
        f(&elements)
    });
    remove_added_dims(out, x, directions)
}

fn taps(p: Pool, d: usize, size: usize) -> Vec<Vec<usize>> {
    let window = |(a, b): (isize, isize)| {
        let inside = (a..b).step_by(p.dilation[d]).filter(|&i| (0..size as isize).contains(&i));
        inside.map(|i| i as usize).collect()
    };
    p.windows(d, size).into_iter().map(window).collect()
}

fn sizes(x: &ArrayD<f64>, directions: usize) -> [usize; 2] {
    let shape = x.shape();
    [if directions == 1 { 1 } else { shape[shape.len() - 2] }, shape[shape.len() - 1]]
}

fn greatest(e: &[(usize, f64)]) -> (usize, f64) {
    e.iter().copied().reduce(|a, b| if b.1 > a.1 || b.1.is_nan() { b } else { a }).unwrap()
}

fn max_pool(x: &ArrayD<f64>, directions: usize, p: Pool) -> Vec<ArrayD<f64>> {
    let [h, w] = sizes(x, directions);
    let (rows, columns) = (taps(p, 0, h), taps(p, 1, w));
    let of = |f: fn(&[(usize, f64)]) -> f64| each_window(x, directions, [&rows, &columns], f);
    vec![of(|e| greatest(e).1), of(|e| greatest(e).0 as f64)]
}

fn avg_pool(x: &ArrayD<f64>, directions: usize, p: Pool, include: bool, divisor: Option<f64>) -> ArrayD<f64> {
    let [h, w] = sizes(x, directions);
    let (rows, columns) = (taps(p, 0, h), taps(p, 1, w));
    let sums = each_window(x, directions, [&rows, &columns], |e| e.iter().map(|(_, v)| v).sum());
    // The extent of each window, including the padding but not positions beyond the padding.
    let reach = |d: usize, size: usize| -> Vec<f64> {
        let end = (size + p.padding[d]) as isize;
        p.windows(d, size).iter().map(|&(a, b)| (b.min(end) - a) as f64).collect()
    };
    let (high, wide) = (reach(0, h), reach(1, w));
    let images = to_4d(&sums, directions);
    let out = Array4::from_shape_fn(images.raw_dim(), |(i, j, row, column)| {
        let inside = (rows[row].len() * columns[column].len()) as f64;
        let all = if include { high[row] * wide[column] } else { inside };
        images[[i, j, row, column]] / divisor.unwrap_or(all)
    });
    remove_added_dims(out, x, directions)
}

fn parts(size: usize, count: usize) -> Vec<Vec<usize>> {
    (0..count).map(|o| (o * size / count..((o + 1) * size).div_ceil(count)).collect()).collect()
}

fn adaptive_max(x: &ArrayD<f64>, directions: usize, size: [usize; 2]) -> Vec<ArrayD<f64>> {
    let of = |f: fn(&[(usize, f64)]) -> f64| adaptive(x, directions, size, f);
    vec![of(|e| greatest(e).1), of(|e| greatest(e).0 as f64)]
}

fn adaptive(x: &ArrayD<f64>, directions: usize, size: [usize; 2], f: fn(&[(usize, f64)]) -> f64) -> ArrayD<f64> {
    let [h, w] = sizes(x, directions);
    each_window(x, directions, [&parts(h, size[0]), &parts(w, size[1])], f)
}

fn mean(e: &[(usize, f64)]) -> f64 {
    e.iter().map(|(_, v)| v).sum::<f64>() / e.len() as f64
}

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let one = [1; 2];
    for (x, p) in [
        (&[2, 3, 4, 6][..], pool([2, 2], [2, 2], [0, 0], one, false)),
        (&[2, 3, 5, 6], pool([3, 2], [2, 1], [1, 1], one, false)),
        (&[1, 2, 5, 7], pool([2, 3], [2, 2], [1, 1], one, true)),
        (&[2, 7, 8], pool([2, 3], [1, 2], [0, 1], [2, 2], false)),
        (&[1, 1, 1, 1], pool(one, one, [0, 0], one, false)),
        (&[1, 2, 3, 2], pool([2, 3], [2, 2], [0, 0], one, true)),
        (&[0, 2, 4, 4], pool([2, 2], [2, 2], [0, 0], one, false)),
        (&[2, 0, 4, 4], pool([2, 2], [2, 2], [0, 0], one, false)),
        (&[3, 5, 33, 31], pool([3, 3], [2, 2], [1, 1], one, false)),
        (&[2, 2, 7, 15], pool([2, 2], [2, 2], [1, 1], one, true)),
        (&[1, 2, 6, 9], pool([3, 3], [1, 1], [1, 1], one, false)),
        (&[1, 2, 8, 9], pool([2, 4], [3, 3], [1, 2], one, true)),
        (&[1, 2, 3, 2], pool([1, 2], [1, 2], [0, 0], one, false)),
        (&[1, 2, 9, 8], pool([2, 2], [2, 2], [1, 1], [3, 2], false)),
    ] {
        for name in ["max_pool2d", "max_pool2d_with_indices"] {
            let made = case(name).distinct(x).arg(&p.kernel).arg(&p.stride).arg(&p.padding).arg(&p.dilation).arg(p.ceil);
            let count = if name == "max_pool2d" { 1 } else { 2 };
            cases.push(made.with_reference(move |x| max_pool(&x[0], 2, p).into_iter().take(count).collect()));
        }
        if p.dilation == one {
            for (include, divisor) in [(true, None), (false, None), (true, Some(3usize))] {
                let made = case("avg_pool2d").input(x).arg(&p.kernel).arg(&p.stride).arg(&p.padding).arg(p.ceil);
                let made = made.arg(include).arg(divisor);
                let divisor = divisor.map(|n| n as f64);
                cases.push(made.with_reference(move |x| vec![avg_pool(&x[0], 2, p, include, divisor)]));
            }
        }
    }
    // A window that covers the image may have its maximum anywhere.
    for x in [[2, 3, 4, 5], [1, 1, 1, 1], [0, 2, 3, 3]] {
        let windows = [x[0], x[1], 1, 1];
        let made = case("max_pool2d_backward").input(&windows).input(&x).index(&windows, x[2] * x[3]).arg(&x[2..]);
        cases.push(made.with_reference(move |given| {
            let mut grad = ArrayD::zeros(x.to_vec());
            for (plane, (&g, &at)) in given[0].iter().zip(&given[2]).enumerate() {
                let at = at as usize;
                grad[[plane / x[1], plane % x[1], at / x[3], at % x[3]].as_slice()] = g;
            }
            vec![grad]
        }));
    }
    // The stride defaults to the window's size.
    let beside = pool([2, 3], [2, 3], [0, 0], one, false);
    let made = case("max_pool2d").distinct(&[1, 2, 4, 7]).arg(&[2, 3]);
    cases.push(made.with_reference(move |x| max_pool(&x[0], 2, beside).into_iter().take(1).collect()));
    for (x, p) in [
        (&[2, 3, 9][..], pool([1, 3], [1, 2], [0, 1], one, true)),
        (&[3, 8], pool([1, 2], [1, 2], [0, 0], [1, 3], false)),
        (&[0, 3, 9], pool([1, 3], [1, 3], [0, 0], one, false)),
    ] {
        for name in ["max_pool1d", "max_pool1d_with_indices"] {
            let made = case(name).distinct(x).arg(p.kernel[1]).arg(p.stride[1]).arg(p.padding[1]).arg(p.dilation[1]);
            let count = if name == "max_pool1d" { 1 } else { 2 };
            cases.push(made.arg(p.ceil).with_reference(move |x| max_pool(&x[0], 1, p).into_iter().take(count).collect()));
        }
        if p.dilation == one {
            let made = case("avg_pool1d").input(x).arg(p.kernel[1]).arg(p.stride[1]).arg(p.padding[1]).arg(p.ceil);
            cases.push(made.arg(false).with_reference(move |x| vec![avg_pool(&x[0], 1, p, false, None)]));
        }
    }
    for (x, size) in [
        (&[2, 3, 5, 7][..], [2, 3]),
        (&[2, 3, 4, 6], [2, 2]),
        (&[3, 5, 6], [1, 1]),
        (&[1, 2, 3, 4], [5, 6]),
        (&[0, 2, 4, 4], [2, 2]),
        (&[2, 3, 4, 4], [0, 2]),
        (&[2, 3, 17, 13], [7, 7]),
    ] {
        let made = case("adaptive_avg_pool2d").input(x).arg(&size);
        cases.push(made.with_reference(move |x| vec![adaptive(&x[0], 2, size, mean)]));
        let made = case("adaptive_max_pool2d").distinct(x).arg(&size);
        cases.push(made.with_reference(move |x| vec![adaptive(&x[0], 2, size, |e| greatest(e).1)]));
        let made = case("adaptive_max_pool2d_with_indices").distinct(x).arg(&size);
        cases.push(made.with_reference(move |x| adaptive_max(&x[0], 2, size)));
    }
    for (x, size) in [(&[2, 3, 7][..], 3), (&[3, 8], 1), (&[0, 2, 5], 2)] {
        let made = case("adaptive_avg_pool1d").input(x).arg(size);
        cases.push(made.with_reference(move |x| vec![adaptive(&x[0], 1, [1, size], mean)]));
        let made = case("adaptive_max_pool1d").distinct(x).arg(size);
        cases.push(made.with_reference(move |x| vec![adaptive(&x[0], 1, [1, size], |e| greatest(e).1)]));
        let made = case("adaptive_max_pool1d_with_indices").distinct(x).arg(size);
        cases.push(made.with_reference(move |x| adaptive_max(&x[0], 1, [1, size])));
    }
    cases
}

/// The maximum of a window is its last NaN, otherwise the first of its greatest elements. The result is -infinity only if all
/// elements are.
#[test]
fn max_pools_of_special_values() {
    each_device(|device| {
        let (nan, low) = (f32::NAN, f32::NEG_INFINITY);
        let x = [1.0, nan, nan, 7.0, 5.0, 5.0, 5.0, 2.0, low, low, low, low];
        let x = Tensor::from_slice(&x, [1, 12], device).unwrap();
        let (y, at) = x.max_pool1d_with_indices(4, MaxPoolOptions::default()).unwrap();
        let y = y.to_vec::<f32>().unwrap();
        assert!(y[0].is_nan() && y[1..] == [5.0, low], "{y:?} on {device}");
        assert_eq!(at.to_vec::<i64>().unwrap(), [2, 4, 8]);
    });
}

/// More planes than one job of a thread processes, in each memory layout, with infinities and NaN.
#[test]
fn pools_of_many_planes() {
    let (n, c, h, w) = (37, 3, 27, 29);
    let mut values: Vec<f32> = (0..n * c * h * w).map(|i| (i * 7919 % 1009) as f32 / 1009.0 - 0.5).collect();
    values[5000] = f32::INFINITY;
    values[70_000] = f32::NAN;
    values[80_000..80_200].fill(f32::NEG_INFINITY);
    let x = Tensor::from_slice(&values, [n, c, h, w], Device::Cpu).unwrap();
    let turned = x.transpose(2, 3).unwrap().contiguous().unwrap().transpose(2, 3).unwrap();
    let within = Tensor::cat(&[&x, &x], 3).unwrap().narrow(3, w, w).unwrap();
    let (mut means, mut greatest) = (Vec::new(), Vec::new());
    for plane in values.chunks(h * w) {
        for (i, j) in (0..h / 2).flat_map(|i| (0..w / 2).map(move |j| (2 * i, 2 * j))) {
            let to_4d = [0, 1, w, w + 1].map(|k| plane[i * w + j + k]);
            means.push(to_4d.iter().sum::<f32>() / 4.0);
            greatest.push(to_4d.iter().fold(f32::NEG_INFINITY, |a, &b| if b > a || b.is_nan() { b } else { a }));
        }
    }
    let same = |got: &Tensor, want: &[f32]| {
        let got = got.to_vec::<f32>().unwrap();
        assert!(got.len() == want.len() && got.iter().zip(want).all(|(a, b)| a == b || (a.is_nan() && b.is_nan())));
    };
    for x in [&x, &turned, &within] {
        let x = x.detach().requires_grad_(true).unwrap();
        let y = x.avg_pool2d([2, 2], AvgPoolOptions::default()).unwrap();
        same(&y, &means);
        y.sum((), false).unwrap().backward().unwrap();
        let slopes = x.grad().unwrap().to_vec::<f32>().unwrap();
        let inside = |i: usize| i / w % h < h - 1 && i % w < w - 1;
        assert!(slopes.iter().enumerate().all(|(i, &g)| g == if inside(i) { 0.25 } else { 0.0 }));
        let (y, at) = x.max_pool2d_with_indices([2, 2], MaxPoolOptions::default()).unwrap();
        same(&y, &greatest);
        let flat = x.detach().reshape([n * c, h * w]).unwrap();
        same(&flat.gather(1, &at.reshape([n * c, (h / 2) * (w / 2)]).unwrap()).unwrap(), &greatest);
    }
}

/// If overlapping windows have the same maximum element, its gradients add up.
#[test]
fn gradients_of_overlapping_windows_add_up() {
    each_device(|device| {
        let x = Tensor::from_slice(&[0f32, 9.0, 1.0, 2.0], [1, 4], device).unwrap().requires_grad_(true).unwrap();
        let options = MaxPoolOptions { stride: Some([1]), ..MaxPoolOptions::default() };
        x.max_pool1d(2, options).unwrap().sum((), false).unwrap().backward().unwrap();
        assert_eq!(x.grad().unwrap().to_vec::<f32>().unwrap(), [0.0, 2.0, 0.0, 1.0]);
        if device != Device::Cpu && !device.info().unwrap().fp64 {
            return;
        }
        // Second derivatives are correct too. The gradient of a mean is linear.
        let x = Tensor::linspace(-1.0, 1.0, 24, (DType::F64, device)).unwrap().reshape([1, 2, 3, 4]).unwrap();
        let options = AvgPoolOptions { stride: Some([1, 1]), padding: 1.into(), ..AvgPoolOptions::default() };
        let f = |x: &[Tensor]| x[0].avg_pool2d([2, 3], options)?.square()?.sum((), false);
        gradcheck(f, std::slice::from_ref(&x), 1e-6).unwrap();
        claystone::autograd::gradgradcheck(f, &[x], 1e-5).unwrap();
    });
}

/// The gradient from stored indices is that of autograd, for overlapping windows, in both memory formats, from strided gradients.
#[test]
fn gradients_from_indices() {
    each_device(|device| {
        let options = MaxPoolOptions { stride: Some([2, 1]), padding: [1, 0].into(), ..MaxPoolOptions::default() };
        let x = Tensor::rand(&[2, 3, 7, 5], device).unwrap();
        let last = x.to_memory_format(claystone::MemoryFormat::ChannelsLast).unwrap();
        for x in [x.shallow_clone(), last, x.transpose(2, 3).unwrap(), x.select(0, 1).unwrap()] {
            let x = x.detach().requires_grad_(true).unwrap();
            let (y, at) = x.max_pool2d_with_indices([3, 2], options).unwrap();
            let wide = Tensor::rand(y.shape().dims().iter().map(|&n| 2 * n).collect::<Vec<_>>(), device).unwrap();
            let grad = (0..y.rank()).fold(wide, |t, d| t.slice(d as isize, 1, None, 2).unwrap());
            y.mul(&grad).unwrap().sum((), false).unwrap().backward().unwrap();
            let made = grad.max_pool2d_backward(&x.detach(), &at, [3, 2], options).unwrap();
            assert_eq!(f64s(&made), f64s(&x.grad().unwrap()));
            let message = grad.max_pool2d_backward(&x, &at, [3, 3], options).unwrap_err().to_string();
            assert!(message.contains("max_pool2d_backward") && message.contains("the maxima have the shape"), "{message}");
        }
    });
}

#[test]
fn errors_of_pools_name_the_mismatch() {
    let x = Tensor::zeros(&[1, 3, 4, 4], Device::Cpu).unwrap();
    let says = |text: &str, made: claystone::Result<Tensor>| {
        let message = made.unwrap_err().to_string();
        assert!(message.contains(text), "{message}");
    };
    says("does not fit", x.max_pool2d([5, 5], MaxPoolOptions::default()));
    says("half", x.max_pool2d([2, 2], MaxPoolOptions { padding: [2, 0].into(), ..MaxPoolOptions::default() }));
    says("above 0", x.avg_pool2d([2, 2], AvgPoolOptions { stride: Some([0, 1]), ..AvgPoolOptions::default() }));
    says("divisor", x.avg_pool2d([2, 2], AvgPoolOptions { divisor_override: Some(0), ..AvgPoolOptions::default() }));
    says("[N, C, L]", x.max_pool1d(2, MaxPoolOptions::default()));
    let empty = Tensor::zeros(&[1, 3, 0, 4], Device::Cpu).unwrap();
    says("empty", empty.adaptive_avg_pool2d([1, 1]));
    let ints = Tensor::zeros(&[1, 2, 2], (DType::I64, Device::Cpu)).unwrap();
    says("floats", ints.avg_pool2d([2, 2], AvgPoolOptions::default()));
    let max = ints.max_pool2d([2, 2], MaxPoolOptions::default()).unwrap();
    assert_eq!(f64s(&max).sum(), 0.0);
}

/// Planes that are pooled in sections: a long row and a tall image, in dtypes that kernels read directly and in dtypes that are
/// converted first.
#[test]
fn pools_of_large_planes() {
    each_device(|device| {
        let shapes = [
            ([1, 300_001], pool([1, 5], [1, 2], [0, 2], [1, 2], false)),
            ([701, 503], pool([3, 2], [2, 1], [1, 1], [2, 1], false)),
        ];
        for ([h, w], p) in shapes {
            let x: Vec<f64> = (0..2 * h * w).map(|i| ((i * 7919) % 251) as f64).collect();
            let (rows, columns) = (p.windows(0, h), p.windows(1, w));
            let taps = |(from, to): (isize, isize), d: usize, size: usize| {
                (from..to).step_by(p.dilation[d]).filter(move |&i| i >= 0 && i < size as isize)
            };
            let (mut best, mut places, mut sums) = (Vec::new(), Vec::new(), Vec::new());
            for plane in x.chunks(h * w) {
                for (&row, &column) in rows.iter().flat_map(|row| columns.iter().map(move |column| (row, column))) {
                    let all = taps(row, 0, h).flat_map(|i| taps(column, 1, w).map(move |j| i as usize * w + j as usize));
                    let first = all.clone().next().unwrap();
                    let greatest = all.fold(first, |best, at| if plane[at] > plane[best] { at } else { best });
                    best.push(plane[greatest]);
                    places.push(greatest as f64);
                }
                for i in 0..h / 2 + usize::from(h == 1) {
                    let high = if h == 1 { 1 } else { 2 };
                    for j in 0..w / 2 {
                        let to_4d = (0..high).flat_map(|k| [(high * i + k) * w + 2 * j, (high * i + k) * w + 2 * j + 1]);
                        sums.push(to_4d.map(|at| plane[at]).sum::<f64>() / (2 * high) as f64);
                    }
                }
            }
            for dtype in [DType::F32, DType::U8, DType::F16] {
                let wide: Vec<f32> = x.iter().map(|&x| x as f32).collect();
                let x = Tensor::from_slice(&wide, [1, 2, h, w], device).unwrap().to_dtype(dtype).unwrap();
                let strided = x.transpose(2, 3).unwrap().contiguous().unwrap().transpose(2, 3).unwrap();
                let options = MaxPoolOptions {
                    stride: Some(p.stride),
                    padding: p.padding.into(),
                    dilation: p.dilation,
                    ceil_mode: false,
                };
                for x in [&x, &strided] {
                    let (y, at) = x.max_pool2d_with_indices(p.kernel, options).unwrap();
                    assert!(f64s(&y).iter().eq(&best), "{h} x {w} in {dtype} on {device}");
                    assert!(f64s(&at).iter().eq(&places), "indices of {h} x {w} in {dtype} on {device}");
                    if dtype.is_float() {
                        let kernel = [2.min(h), 2];
                        let y = x.avg_pool2d(kernel, AvgPoolOptions::default()).unwrap();
                        let close = f64s(&y).iter().zip(&sums).all(|(a, b)| (a - b).abs() <= 0.13);
                        assert!(close, "means of {h} x {w} in {dtype} on {device}");
                        // Adaptive pooling to half of an even width equals pooling with windows of two elements.
                        let parts = x.narrow(3, 0, w - 1).unwrap().adaptive_avg_pool2d([h, w / 2]).unwrap();
                        let pairs = x.narrow(3, 0, w - 1).unwrap().avg_pool2d([1, 2], AvgPoolOptions::default());
                        assert_eq!(f64s(&parts), f64s(&pairs.unwrap()), "adaptive, {h} x {w} in {dtype} on {device}");
                        let parts = x.narrow(3, 0, w - 1).unwrap().adaptive_max_pool2d([h, w / 2]).unwrap();
                        let pairs = x.narrow(3, 0, w - 1).unwrap().max_pool2d([1, 2], MaxPoolOptions::default());
                        assert_eq!(f64s(&parts), f64s(&pairs.unwrap()), "adaptive, {h} x {w} in {dtype} on {device}");
                    }
                }
            }
        }
    });
}

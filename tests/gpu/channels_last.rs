//! Tests batch norm and max pooling of channels-last tensors against formulas in f64. Sizes are around the sizes of vectors,
//! channel blocks and row slices; views have offsets and gaps between rows.

use claystone::autograd::{GradOptions, grad_with_options};
use claystone::device::count_launches;
use claystone::ops::{AvgPoolOptions, MaxPoolOptions};
use claystone::{BatchNormOptions, DType, Device, MemoryFormat, Tensor};

use crate::common::gpus::{assert_same, gpus, gpus_and_processors, thinned_cases, upload};
use crate::common::values;
use crate::rows::{assert_norm, pseudo_random, reference_norm, tolerance};

/// Layout of a matrix in memory: the matrix starts at element `at` and has a gap of `gap` elements after each row.
#[derive(Clone, Copy)]
struct Rows {
    rows: usize,
    channels: usize,
    at: usize,
    gap: usize,
}

impl Rows {
    fn put(&self, numbers: &[f64], dtype: DType, device: Device) -> Tensor {
        let Rows { rows, channels, at, gap } = *self;
        let pitch = channels + gap;
        // NaN in the gaps between rows would make every sum that wrongly includes a gap NaN.
        let mut whole = vec![f64::NAN; at + rows * pitch];
        for (i, number) in numbers.iter().enumerate() {
            whole[at + i / channels * pitch + i % channels] = *number;
        }
        let whole = upload(&whole, &[whole.len()], dtype, device);
        let rows = whole.narrow(0, at, rows * pitch).unwrap().reshape([rows, pitch]).unwrap();
        rows.narrow(1, 0, channels).unwrap()
    }

    /// Splits row-major numbers into one vector for each channel.
    fn split_by_channel(&self, numbers: &[f64]) -> Vec<Vec<f64>> {
        (0..self.channels).map(|c| numbers.iter().skip(c).step_by(self.channels).copied().collect()).collect()
    }

    /// Joins vectors of one channel each into row-major numbers.
    fn join_by_row(&self, channels: &[Vec<f64>]) -> Vec<f64> {
        (0..self.rows).flat_map(|r| channels.iter().map(move |channel| channel[r])).collect()
    }
}

fn rows(rows: usize, channels: usize) -> Rows {
    Rows { rows, channels, at: 0, gap: 0 }
}

fn training<'a>(weight: Option<&'a Tensor>, bias: Option<&'a Tensor>) -> BatchNormOptions<'a> {
    BatchNormOptions { weight, bias, training: true, ..Default::default() }
}

#[test]
fn batch_norm_of_one_or_many_slices_matches_formulas() {
    // Row counts around the rows per work-item and per work-group. The kernels split the longest shapes into slices, even with only
    // two compute units.
    let shapes = [
        rows(2, 2),
        rows(9, 8),
        rows(129, 5),
        Rows { at: 8, gap: 16, ..rows(130, 24) },
        Rows { at: 3, gap: 1, ..rows(517, 9) },
        rows(1025, 64),
        rows(513, 65),
        Rows { at: 16, gap: 8, ..rows(4099, 32) },
        rows(300, 136),
        Rows { gap: 2, ..rows(9001, 6) },
        rows(20_011, 16),
    ];
    let dtypes = [DType::F32, DType::BF16, DType::F64, DType::F16];
    for device in gpus_and_processors("channels_last::batch_norm_of_one_or_many_slices_matches_formulas") {
        let all: Vec<_> =
            shapes.iter().enumerate().flat_map(|(i, &s)| (0..4).map(move |k| (s, dtypes[(i + k) % 4]))).collect();
        for (shape, dtype) in thinned_cases(&all, 4, device) {
            let Rows { rows, channels, .. } = shape;
            let (xs, gs) = pseudo_random(rows * channels, 3.0);
            let (ws, bs) = pseudo_random(channels, 0.5);
            let (x, g) = (shape.put(&xs, dtype, device), shape.put(&gs, dtype, device));
            let (xs, gs) = (values(&x), values(&g)); // the values as rounded to the dtype
            // Batch norm of 16-bit inputs uses f32 weights.
            let of_weights = if dtype == DType::F64 { dtype } else { DType::F32 };
            let [w, b] = [&ws, &bs].map(|numbers| upload(numbers, &[channels], of_weights, device));
            let ([ys, dxs], [dw, db]) = reference_norm(
                &shape.split_by_channel(&xs),
                &shape.split_by_channel(&gs),
                [&ws, &bs],
                |r, _| r,
                (1e-5, false),
            );
            let want = [&shape.join_by_row(&ys)[..], &shape.join_by_row(&dxs), &dw, &db];
            let what = format!("{rows} x {channels} of {dtype}, strides {:?}", x.strides());
            assert_norm([&x, &w, &b, &g], want, tolerance(dtype), &what, |x, w, b| {
                let (y, launches) = count_launches(|| x.batch_norm(training(Some(w), Some(b))).unwrap());
                assert!(launches <= if rows <= 8 { 1 } else { 2 }, "{launches} launches of {what}");
                let again = values(&x.detach().batch_norm(training(Some(w), Some(b))).unwrap().detach());
                let other = values(&y.detach()).iter().zip(&again).position(|(a, b)| a.to_bits() != b.to_bits());
                assert_eq!(other, None, "{what} on {device}: an element that differs in a second run");
                y
            });
        }
    }
}

/// Native batch norm returns the reciprocal standard deviations that its backward needs. Results and gradients of channels-last
/// rows equal those of the same batch in channels-first layout, which other kernels compute.
#[test]
fn native_batch_norm_matches_the_channels_first_layout() {
    for device in gpus("channels_last::native_batch_norm_matches_the_channels_first_layout") {
        for shape in [rows(7, 9), rows(4099, 24)] {
            let (xs, gs) = pseudo_random(shape.rows * shape.channels, 3.0);
            let (ws, bs) = pseudo_random(shape.channels, 0.5);
            let [w, b] = [&ws, &bs].map(|numbers| upload(numbers, &[shape.channels], DType::F32, device));
            let [x, g] = [&xs, &gs].map(|numbers| shape.put(numbers, DType::F32, device));
            let run = |x: &Tensor, g: &Tensor| {
                let (made, launches) = count_launches(|| x.native_batch_norm(training(Some(&w), Some(&b))).unwrap());
                let (y, mean, rstd) = made;
                let made =
                    count_launches(|| g.native_batch_norm_backward(x, &mean, &rstd, Some(&w), [true; 3]).unwrap());
                let ([dx, dw, db], backward) = made;
                let most = if shape.rows <= 8 { 1 } else { 2 };
                assert!(launches <= most && backward <= most, "{launches} and {backward} launches");
                [Some(y), Some(mean), Some(rstd), dx, dw, db].map(|t| values(&t.unwrap()))
            };
            // Shape [1, C, rows], in which the numbers of a channel are contiguous.
            let apart = |t: &Tensor| t.t().unwrap().contiguous().unwrap().unsqueeze(0).unwrap();
            let (made, mut other) = (run(&x, &g), run(&apart(&x), &apart(&g)));
            for k in [0, 3] {
                other[k] =
                    (0..xs.len()).map(|i| other[k][i % shape.channels * shape.rows + i / shape.channels]).collect();
            }
            for (k, (a, b)) in made.iter().zip(&other).enumerate() {
                let most = b.iter().fold(1.0, |m: f64, v| m.max(v.abs()));
                let near = a.len() == b.len() && a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-5 * most);
                assert!(near, "result {k} of {} x {} on {device}", shape.rows, shape.channels);
            }
        }
    }
}

/// Batch norm of numbers far from 0 is as precise as f32 allows. NaN and infinity affect only their own channel.
#[test]
fn batch_norm_of_numbers_far_from_0_is_precise() {
    for device in gpus("channels_last::batch_norm_of_numbers_far_from_0_is_precise") {
        let shape = rows(2085, 12);
        let (mut xs, gs) = pseudo_random(shape.rows * shape.channels, 1000.0);
        xs[17 * shape.channels + 3] = f64::NAN;
        xs[2000 * shape.channels + 8] = f64::INFINITY;
        // In one channel the first row is far from the others; in another channel all rows are equal.
        xs[5] = -3e5;
        xs.iter_mut().skip(6).step_by(shape.channels).for_each(|x| *x = 1.0 / 3.0);
        let none = vec![0.0; shape.channels];
        let ones = vec![1.0; shape.channels];
        let (x, g) = (shape.put(&xs, DType::F32, device), shape.put(&gs, DType::F32, device));
        let (w, b) = (upload(&ones, &[12], DType::F32, device), upload(&none, &[12], DType::F32, device));
        let xs = values(&x); // the values as rounded to f32
        let ([ys, dxs], [dw, db]) = reference_norm(
            &shape.split_by_channel(&xs),
            &shape.split_by_channel(&gs),
            [&ones, &none],
            |r, _| r,
            (1e-5, false),
        );
        assert!(ys[3].iter().chain(&ys[8]).all(|y| y.is_nan()) && ys[5].iter().all(|y| y.is_finite()));
        let want = [&shape.join_by_row(&ys)[..], &shape.join_by_row(&dxs), &dw, &db];
        // One ulp of numbers near 1000 is 6e-5 standard deviations, so the tolerance is larger than usual.
        assert_norm([&x, &w, &b, &g], want, 2e-4, "numbers far from 0", |x, w, b| {
            x.batch_norm(training(Some(w), Some(b))).unwrap()
        });
    }
}

/// Image shape [n, channels, rows, columns], and the window's size, step, padding and dilation.
type Pool = ([usize; 4], [[usize; 2]; 4]);

const POOLS: [Pool; 6] = [
    ([2, 16, 9, 11], [[3, 3], [2, 2], [1, 1], [1, 1]]),
    ([1, 8, 12, 6], [[2, 2], [2, 2], [0, 0], [1, 1]]),
    ([3, 24, 5, 8], [[3, 2], [1, 2], [1, 0], [2, 1]]),
    ([2, 5, 9, 7], [[3, 3], [2, 2], [1, 1], [1, 1]]),
    ([1, 32, 1, 17], [[1, 4], [1, 3], [0, 2], [1, 1]]),
    ([2, 40, 6, 6], [[2, 3], [3, 4], [0, 1], [1, 1]]),
];

/// Returns the results of max and average pooling of images that start at element `at`, and the input gradients for output
/// gradients with gaps between pixels.
fn pool_results(
    (shape, [size, step, padding, dilation]): Pool,
    at: usize,
    dtype: DType,
    device: Device,
) -> Vec<Vec<f64>> {
    let last = |[n, c, h, w]: [usize; 4], gap: usize, of: usize| {
        // Small whole numbers, so that maxima tie and sums are exact. Some elements are NaN or -infinity.
        let number = |i: usize| match (i * 7919 + i / 13) % 1009 {
            0 if of == 0 => f64::NAN,
            1 => f64::NEG_INFINITY,
            k => (k % 15) as f64 - 7.0,
        };
        let pixels = n * h * w * (c + gap);
        let numbers: Vec<f64> = (0..at + pixels).map(|i| number(i + of)).collect();
        let whole = upload(&numbers, &[numbers.len()], dtype, device).narrow(0, at, pixels).unwrap();
        let images = whole.reshape([n, h, w, c + gap]).unwrap().permute(&[0, 3, 1, 2]).unwrap();
        images.narrow(1, 0, c).unwrap()
    };
    let stride = Some(step);
    let greatest = MaxPoolOptions { stride, padding: padding.into(), dilation, ..Default::default() };
    let mean = AvgPoolOptions { stride, padding: padding.into(), ..Default::default() };
    let mut results = Vec::new();
    for of_means in [false, true] {
        let x = last(shape, 0, 0).requires_grad_(true).unwrap();
        let y = match of_means {
            true => x.avg_pool2d(size, mean).unwrap(),
            false => {
                let (y, places) = x.max_pool2d_with_indices(size, greatest).unwrap();
                results.push(places.to_vec::<i64>().unwrap().into_iter().map(|at| at as f64).collect());
                y
            }
        };
        let [n, c, h, w] = [0, 1, 2, 3].map(|d| y.shape().dims()[d]);
        // With no gap and with a gap of 8 elements, kernels can read 16 bytes of the gradient at a time; with 3 they cannot.
        results.push(values(&y.detach()));
        for gap in [0, 8, 3] {
            let grad = last([n, c, h, w], gap, 29 + gap);
            let options = GradOptions { grad_outputs: &[&grad], retain_graph: true, ..Default::default() };
            let (mut dx, launches) = count_launches(|| grad_with_options(&[&y], &[&x], options).unwrap());
            assert!(launches <= 1, "{launches} launches for the gradient of {shape:?} with a gap of {gap} on {device}");
            results.push(values(&dx.remove(0).unwrap()));
        }
    }
    results
}

#[test]
fn pooling_and_its_gradients_match_the_cpu() {
    for device in gpus_and_processors("channels_last::pooling_and_its_gradients_match_the_cpu") {
        for dtype in thinned_cases(&[DType::F32, DType::BF16, DType::F16, DType::F64], 1, device) {
            for (i, pool) in thinned_cases(&POOLS, 1, device).into_iter().enumerate() {
                let at = [0, 8, 3][i % 3];
                let want = pool_results(pool, at, DType::F64, Device::Cpu);
                for (got, want) in pool_results(pool, at, dtype, device).iter().zip(&want) {
                    assert_same(got, want, tolerance(dtype), &format!("{pool:?} at {at} of {dtype} on {device}"));
                }
            }
        }
    }
}

/// Work-items that have no row do not change the result, even if the mean is so large that its square overflows.
#[test]
fn idle_work_items_do_not_change_batch_norm() {
    for device in gpus("channels_last::idle_work_items_do_not_change_batch_norm") {
        let x =
            Tensor::full([1, 64, 4, 4], 2e19, device).unwrap().to_memory_format(MemoryFormat::ChannelsLast).unwrap();
        let y = x.batch_norm(BatchNormOptions { training: true, ..BatchNormOptions::default() }).unwrap();
        assert_same(&values(&y), &[0.0; 1024], 0.0, "equal elements");
    }
}

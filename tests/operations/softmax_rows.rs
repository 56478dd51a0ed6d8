//! Softmax, log-softmax, logsumexp and cross-entropy along any dim, compared with f64.

use claystone::{
    CrossEntropy, DType, Device, Error, LossReduction, Tensor, autograd::gradcheck, device::count_launches,
};

use crate::common::{each_device, values};

/// Returns numbers between -4 and 4.
fn logits(shape: &[usize], dtype: DType, device: Device) -> Tensor {
    let n: usize = shape.iter().product();
    let values: Vec<f64> = (0..n).map(|i| ((i * 7919 % 1009) as f64 / 1009.0 - 0.5) * 8.0).collect();
    Tensor::from_slice(&values, shape, Device::Cpu).unwrap().to_dtype(dtype).unwrap().to_device(device).unwrap()
}

/// Applies `f` in place to every row along d, and returns all elements.
fn by_row(t: &Tensor, d: usize, f: impl Fn(&mut [f64])) -> Vec<f64> {
    let mut all = values(t);
    let dims = t.shape().dims();
    let inner: usize = dims[d + 1..].iter().product();
    let n = dims[d];
    for start in (0..all.len()).filter(|i| (i / inner).is_multiple_of(n)) {
        let mut row: Vec<f64> = (0..n).map(|i| all[start + i * inner]).collect();
        f(&mut row);
        (0..n).for_each(|i| all[start + i * inner] = row[i]);
    }
    all
}

fn lse(row: &[f64]) -> f64 {
    let m = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let m = if m.is_infinite() { 0.0 } else { m };
    m + row.iter().map(|x| (x - m).exp()).sum::<f64>().ln()
}

fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F16 => 4e-3,
        DType::BF16 => 3e-2,
        DType::F32 => 3e-6,
        _ => 1e-12,
    }
}

#[track_caller]
fn close(got: &Tensor, want: &[f64], tolerance: f64) {
    let got_values = values(got);
    assert_eq!(got_values.len(), want.len());
    for (i, (g, w)) in got_values.iter().zip(want).enumerate() {
        let same = g == w || (g.is_nan() && w.is_nan()) || (g - w).abs() <= tolerance * w.abs().max(1.0);
        assert!(same, "element {i}: {g} instead of {w} ({} {})", got.dtype(), got.device());
    }
}

const FLOATS: [DType; 4] = [DType::F32, DType::F16, DType::BF16, DType::F64];

fn check(t: &Tensor, d: usize) {
    let eps = tolerance(t.dtype());
    let dim = d as isize - t.rank() as isize;
    let softmax = by_row(t, d, |row| {
        let l = lse(row);
        row.iter_mut().for_each(|x| *x = (*x - l).exp());
    });
    close(&t.softmax(dim).unwrap(), &softmax, eps);
    let log = by_row(t, d, |row| {
        let l = lse(row);
        row.iter_mut().for_each(|x| *x -= l);
    });
    close(&t.log_softmax(dim).unwrap(), &log, eps);
    let sums = t.logsumexp(dim, true).unwrap();
    let want = by_row(t, d, |row| {
        let l = lse(row);
        row.fill(l);
    });
    close(&sums.expand(t.shape()).unwrap(), &want, eps);
    assert_eq!(t.logsumexp(dim, false).unwrap().rank(), t.rank() - 1);
}

#[test]
fn softmax_along_any_dim_in_every_float_dtype() {
    each_device(|device| {
        for dtype in FLOATS {
            let t = logits(&[3, 17, 40], dtype, device);
            for d in 0..3 {
                check(&t, d);
                check(&t.transpose(0, 2).unwrap(), d);
                check(&t.narrow(2, 5, 21).unwrap().narrow(1, 2, 9).unwrap(), d);
            }
        }
        let row = logits(&[33], DType::F32, device);
        check(&row.expand([5, 33]).unwrap(), 0);
        check(&row.expand([5, 33]).unwrap(), 1);
    });
}

#[test]
fn softmax_of_sizes_around_block_edges() {
    each_device(|device| {
        for n in [1, 2, 15, 16, 17, 127, 128, 129, 255, 256, 257, 1025] {
            check(&logits(&[3, n], DType::F32, device), 1);
            check(&logits(&[n, 3], DType::F32, device), 0);
            check(&logits(&[n, 3], DType::F32, device), 1);
        }
        check(&logits(&[2, 40_000], DType::F32, device), 1);
        assert_eq!(Tensor::full((), 3.0, device).unwrap().softmax(0).unwrap().item::<f32>().unwrap(), 1.0);
        assert_eq!(Tensor::full((), 3.0, device).unwrap().logsumexp(-1, false).unwrap().item::<f32>().unwrap(), 3.0);
        let empty = Tensor::zeros([2, 0], device).unwrap();
        assert_eq!(empty.softmax(1).unwrap().numel(), 0);
        assert_eq!(empty.logsumexp(1, false).unwrap().to_vec::<f32>().unwrap(), [f32::NEG_INFINITY; 2]);
        assert_eq!(empty.logsumexp(0, false).unwrap().shape().dims(), [0]);
    });
}

#[test]
fn softmax_of_extreme_logits() {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    each_device(|device| {
        let of = |v: &[f32]| Tensor::from_slice(v, v.len(), device).unwrap();
        assert_eq!(of(&[1e30, 0.0]).softmax(0).unwrap().to_vec::<f32>().unwrap(), [1.0, 0.0]);
        assert_eq!(of(&[-inf, -1e30]).softmax(0).unwrap().to_vec::<f32>().unwrap(), [0.0, 1.0]);
        assert_eq!(of(&[-inf, 2.0]).log_softmax(0).unwrap().to_vec::<f32>().unwrap(), [-inf, 0.0]);
        assert_eq!(of(&[-inf, -inf]).logsumexp(0, false).unwrap().item::<f32>().unwrap(), -inf);
        assert_eq!(of(&[inf, 0.0]).logsumexp(0, false).unwrap().item::<f32>().unwrap(), inf);
        assert!(of(&[nan, 0.0]).logsumexp(0, false).unwrap().item::<f32>().unwrap().is_nan());
        assert!(of(&[nan, 0.0]).softmax(0).unwrap().to_vec::<f32>().unwrap().iter().all(|x| x.is_nan()));
        assert!(of(&[-inf, -inf]).softmax(0).unwrap().to_vec::<f32>().unwrap().iter().all(|x| x.is_nan()));
        let wide = of(&[800.0; 100]).logsumexp(0, false).unwrap().item::<f32>().unwrap();
        assert!((wide - (800.0 + 100f32.ln())).abs() < 1e-3);
    });
}

#[test]
fn softmax_has_gradients() {
    each_device(|device| {
        let x = logits(&[3, 5, 4], DType::F64, device);
        let w = logits(&[4, 5, 3], DType::F64, device).transpose(0, 2).unwrap();
        for d in 0..3 {
            gradcheck(|x| x[0].softmax(d)?.mul(&w)?.sum((), false), &[x.shallow_clone()], 1e-6).unwrap();
            gradcheck(|x| x[0].log_softmax(d)?.mul(&w)?.sum((), false), &[x.shallow_clone()], 1e-6).unwrap();
            for keepdim in [false, true] {
                let f = |x: &[Tensor]| x[0].logsumexp(d, keepdim)?.mul(&x[0].logsumexp(d, keepdim)?)?.sum((), false);
                gradcheck(f, &[x.shallow_clone()], 1e-6).unwrap();
            }
        }
    });
}

fn labels(n: usize, classes: usize, device: Device) -> Tensor {
    let values: Vec<i64> = (0..n).map(|i| if i % 7 == 3 { -100 } else { (i * 31 % classes) as i64 }).collect();
    Tensor::from_slice(&values, n, device).unwrap()
}

/// Returns the losses of the rows, and the gradient of their sum.
fn entropy(x: &Tensor, labels: &Tensor, ignore: i64) -> (Vec<f64>, Vec<f64>) {
    let classes = x.shape().dims()[1];
    let (x, labels) = (values(x), values(labels));
    let mut losses = Vec::new();
    let mut grad = Vec::new();
    for (row, &label) in x.chunks(classes).zip(&labels) {
        if label as i64 == ignore {
            losses.push(0.0);
            grad.extend(vec![0.0; classes]);
            continue;
        }
        let top = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row.iter().map(|x| (x - top).exp()).sum();
        losses.push(sum.ln() + top - row[label as usize]);
        let one = |j: usize| f64::from(u8::from(j == label as usize));
        grad.extend(row.iter().enumerate().map(|(j, x)| (x - top).exp() / sum - one(j)));
    }
    (losses, grad)
}

/// Compares cross-entropy losses and gradients with f64. Every seventh label is ignored.
fn check_entropy(x: &Tensor) {
    let (n, classes, eps) = (x.shape().dims()[0], x.shape().dims()[1], tolerance(x.dtype()));
    let x = x.detach().requires_grad_(true).unwrap();
    let labels = labels(n, classes, x.device());
    let (losses, grad) = entropy(&x, &labels, -100);
    let counted = (0..n).filter(|i| i % 7 != 3).count() as f64;
    let total: f64 = losses.iter().sum();

    let loss = x.cross_entropy(&labels).unwrap();
    assert_eq!((loss.dtype(), loss.rank()), (x.dtype(), 0));
    close(&loss, &[total / counted], eps);
    loss.backward().unwrap();
    close(&x.grad().unwrap(), &grad.iter().map(|g| g / counted).collect::<Vec<_>>(), eps);
    x.zero_grad();

    let with = |reduction| CrossEntropy { reduction, ..CrossEntropy::default() };
    let sum = x.cross_entropy_with(&labels, with(LossReduction::Sum)).unwrap();
    close(&sum, &[total], eps);
    sum.mul_scalar(3.0).unwrap().backward().unwrap();
    close(&x.grad().unwrap(), &grad.iter().map(|g| 3.0 * g).collect::<Vec<_>>(), eps * 3.0);
    for x in [x.detach(), x] {
        close(&x.cross_entropy_with(&labels, with(LossReduction::None)).unwrap(), &losses, eps);
    }
}

/// Returns the matrix with gaps between rows, and with gaps between columns.
fn strided(x: &Tensor) -> [Tensor; 2] {
    let (n, classes) = (x.shape().dims()[0], x.shape().dims()[1]);
    let wide = Tensor::zeros([n + 1, classes + 2], (x.dtype(), x.device())).unwrap();
    [wide.shallow_clone(), Tensor::zeros([classes + 2, n + 1], (x.dtype(), x.device())).unwrap().t().unwrap()].map(
        |whole| {
            let part = whole.narrow(0, 1, n).unwrap().narrow(1, 1, classes).unwrap();
            part.copy_(x).unwrap();
            part
        },
    )
}

#[test]
fn cross_entropy_and_its_gradient_match_f64() {
    each_device(|device| {
        for dtype in FLOATS {
            for (n, classes) in [(1, 1), (2, 10), (5, 16), (64, 10), (65, 33), (300, 100), (3, 1000), (1000, 7)] {
                let x = logits(&[n, classes], dtype, device);
                check_entropy(&x);
                strided(&x).iter().for_each(check_entropy);
            }
        }
    });
}

/// Numbers of rows, and row lengths (next constant), around the CPU's block sizes.
const ROW_COUNTS: [usize; 9] = [1, 15, 16, 17, 63, 64, 65, 127, 200];
const SHORT_ROW_LENGTHS: [usize; 14] = [1, 2, 7, 8, 10, 16, 17, 31, 32, 33, 63, 64, 65, 130];

#[test]
fn softmax_of_short_rows_in_blocks() {
    for (dtype, classes) in FLOATS.into_iter().flat_map(|dtype| SHORT_ROW_LENGTHS.map(|classes| (dtype, classes))) {
        for n in ROW_COUNTS {
            let x = logits(&[n, classes], dtype, Device::Cpu);
            check(&x, 1);
            check_entropy(&x);
            if n % 16 == 1 {
                strided(&x).iter().for_each(|x| {
                    check(x, 1);
                    check_entropy(x);
                });
            }
        }
    }
}

#[test]
fn gradients_of_short_rows_in_blocks() {
    for (n, classes) in ROW_COUNTS.into_iter().flat_map(|n| SHORT_ROW_LENGTHS.map(|classes| (n, classes))) {
        for dtype in [DType::F32, DType::F64] {
            let whole = logits(&[n, classes], dtype, Device::Cpu);
            let g = logits(&[classes, n], dtype, Device::Cpu).t().unwrap();
            let slopes = values(&g);
            for x in strided(&whole).into_iter().chain([whole]) {
                let x = x.detach().requires_grad_(true).unwrap();
                let (p, mut log) =
                    (values(&x.detach().to_dtype(DType::F64).unwrap().softmax(1).unwrap()), slopes.clone());
                let mut of = slopes.clone();
                for ((p, of), log) in p.chunks(classes).zip(of.chunks_mut(classes)).zip(log.chunks_mut(classes)) {
                    let both: f64 = p.iter().zip(&*of).map(|(p, g)| p * g).sum();
                    let sum: f64 = log.iter().sum();
                    of.iter_mut().zip(p).for_each(|(g, p)| *g = p * (*g - both));
                    log.iter_mut().zip(p).for_each(|(g, p)| *g -= p * sum);
                }
                let magnitude = slopes.chunks(classes).map(|row| row.iter().map(|g| g.abs()).sum()).fold(1.0, f64::max);
                let eps = tolerance(dtype) * magnitude;
                x.softmax(1).unwrap().backward_with(&g).unwrap();
                close(&x.grad().unwrap(), &of, eps);
                x.zero_grad();
                x.log_softmax(1).unwrap().backward_with(&g).unwrap();
                close(&x.grad().unwrap(), &log, eps);
            }
        }
    }
}

/// Returns logits in which, of every eleven rows, one contains an infinity, one only negative infinities, one a NaN, one a single
/// negative infinity, and one very large numbers.
fn extreme(n: usize, classes: usize, dtype: DType) -> Tensor {
    let mut all = values(&logits(&[n, classes], dtype, Device::Cpu));
    for (r, row) in all.chunks_mut(classes).enumerate() {
        match r % 11 {
            1 => row[r % classes] = f64::INFINITY,
            3 => row.fill(f64::NEG_INFINITY),
            5 => row[r % classes] = f64::NAN,
            7 => row[r % classes] = f64::NEG_INFINITY,
            9 => row.iter_mut().for_each(|x| *x = *x * 100.0 + 5000.0),
            _ => {}
        }
    }
    Tensor::from_slice(&all, [n, classes], Device::Cpu).unwrap().to_dtype(dtype).unwrap()
}

#[test]
fn extreme_logits_in_blocks() {
    for (n, classes) in ROW_COUNTS.into_iter().flat_map(|n| SHORT_ROW_LENGTHS.map(|classes| (n, classes))) {
        for dtype in FLOATS {
            let whole = extreme(n, classes, dtype);
            let labels = labels(n, classes, Device::Cpu);
            let options = CrossEntropy { reduction: LossReduction::None, ..CrossEntropy::default() };
            for x in strided(&whole).into_iter().chain([whole]) {
                let (losses, grad) = entropy(&x, &labels, -100);
                let x = x.detach().requires_grad_(true).unwrap();
                let got = x.cross_entropy_with(&labels, options).unwrap();
                close(&got, &losses, tolerance(dtype));
                got.backward_with(&got.ones_like().unwrap()).unwrap();
                close(&x.grad().unwrap(), &grad, tolerance(dtype));
                let x = x.detach();
                check_extreme(&x);
            }
        }
    }
}

/// Like [`check`], for rows whose maximum may be infinite or NaN.
fn check_extreme(x: &Tensor) {
    let eps = tolerance(x.dtype());
    let top = |row: &[f64]| row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let softmax = by_row(x, 1, |row| {
        let top = top(row);
        let sum: f64 = row.iter().map(|x| (x - top).exp()).sum();
        row.iter_mut().for_each(|x| *x = (*x - top).exp() / sum);
    });
    close(&x.softmax(1).unwrap(), &softmax, eps);
    let log = by_row(x, 1, |row| {
        let top = top(row);
        let sum: f64 = row.iter().map(|x| (x - top).exp()).sum();
        row.iter_mut().for_each(|x| *x = *x - top - sum.ln());
    });
    close(&x.log_softmax(1).unwrap(), &log, eps);
    let sums = by_row(x, 1, |row| {
        let l = lse(row);
        row.fill(l);
    });
    close(&x.logsumexp(1, true).unwrap().expand(x.shape()).unwrap(), &sums, eps);
}

#[test]
fn cross_entropy_of_a_row_is_independent_of_other_rows() {
    let options = CrossEntropy { reduction: LossReduction::None, ..CrossEntropy::default() };
    for classes in [3, 10, 64, 65, 300] {
        let (x, labels) = (logits(&[1000, classes], DType::F32, Device::Cpu), labels(1000, classes, Device::Cpu));
        let whole = values(&x.cross_entropy_with(&labels, options).unwrap());
        for (start, n) in [(0, 64), (1, 33), (63, 129), (17, 700)] {
            let (x, labels) = (x.narrow(0, start, n).unwrap(), labels.narrow(0, start, n).unwrap());
            assert_eq!(
                values(&x.cross_entropy_with(&labels, options).unwrap()),
                whole[start..start + n],
                "{classes} {start}"
            );
        }
    }
}

#[test]
fn cross_entropy_supports_weights_and_label_dtypes() {
    each_device(|device| {
        let x = logits(&[6, 5], DType::F64, device);
        let w = logits(&[6], DType::F64, device);
        for dtype in [DType::I64, DType::I32, DType::I8, DType::U8, DType::U32] {
            let labels = Tensor::from_slice(&[4i64, 0, 3, 3, 1, 2], 6, device).unwrap().to_dtype(dtype).unwrap();
            let none = CrossEntropy { reduction: LossReduction::None, ignore_index: 3, ..CrossEntropy::default() };
            let f = |x: &[Tensor]| x[0].cross_entropy_with(&labels, none)?.mul(&w)?.sum((), false);
            gradcheck(f, &[x.shallow_clone()], 1e-6).unwrap();
            gradcheck(|x| x[0].cross_entropy(&labels), &[x.shallow_clone()], 1e-6).unwrap();
        }
        let strided = Tensor::from_slice(&[0i64, 9, 1, 9, 2, 9], [3, 2], device).unwrap().narrow(1, 0, 1).unwrap();
        let strided = strided.squeeze(1).unwrap();
        let x = logits(&[3, 5], DType::F32, device);
        let plain = Tensor::from_slice(&[0i64, 1, 2], 3, device).unwrap();
        assert_eq!(values(&x.cross_entropy(&strided).unwrap()), values(&x.cross_entropy(&plain).unwrap()));
    });
}

#[test]
fn cross_entropy_with_all_labels_ignored() {
    each_device(|device| {
        let none = Tensor::from_slice(&[-100i64; 3], 3, device).unwrap();
        let x = logits(&[3, 4], DType::F32, device).requires_grad_(true).unwrap();
        let loss = x.cross_entropy(&none).unwrap();
        assert!(loss.item::<f32>().unwrap().is_nan());
        loss.backward().unwrap();
        assert_eq!(values(&x.grad().unwrap()), [0.0; 12]);
        let empty = Tensor::zeros([0, 4], device).unwrap();
        let labels = Tensor::zeros([0], (DType::I64, device)).unwrap();
        assert!(empty.cross_entropy(&labels).unwrap().item::<f32>().unwrap().is_nan());
    });
}

#[test]
fn cross_entropy_of_many_rows() {
    each_device(|device| {
        let n = 70_001;
        let x = logits(&[n, 3], DType::F32, device);
        let labels = labels(n, 3, device);
        let (losses, _) = entropy(&x, &labels, -100);
        let counted = (0..n).filter(|i| i % 7 != 3).count() as f64;
        close(&x.cross_entropy(&labels).unwrap(), &[losses.iter().sum::<f64>() / counted], 1e-5);
    });
}

#[test]
fn out_of_range_labels_are_errors_and_write_nothing() {
    each_device(|device| {
        let x = logits(&[3, 4], DType::F32, device).requires_grad_(true).unwrap();
        let before = values(&x);
        for bad in [4i64, -1, -101, i64::MAX, i64::MIN] {
            let labels = Tensor::from_slice(&[0, bad, 1], 3, device).unwrap();
            let error = x.cross_entropy(&labels).and_then(|loss| loss.item::<f32>()).unwrap_err();
            assert!(
                matches!(error, Error::IndexOutOfRange { op: "cross_entropy", index, size: 4 } if index == bad),
                "{error}"
            );
            assert_eq!(values(&x), before);
        }
    });
}

#[test]
fn cross_entropy_takes_few_launches() {
    each_device(|device| {
        let x = logits(&[64, 10], DType::F32, device).requires_grad_(true).unwrap();
        let labels = labels(64, 10, device);
        let (loss, forward) = count_launches(|| x.cross_entropy(&labels).unwrap());
        assert!(forward <= 2, "{forward} launches");
        assert_eq!(count_launches(|| loss.backward().unwrap()).1, 0, "the gradient was there");
        assert_eq!(count_launches(|| x.detach().softmax(1).unwrap()).1, 1);
        assert_eq!(count_launches(|| x.detach().logsumexp(0, false).unwrap()).1, 1);
    });
}

#[test]
fn invalid_calls_are_errors() {
    let x = logits(&[3, 4], DType::F32, Device::Cpu);
    let labels = Tensor::from_slice(&[0i64, 1, 2], 3, Device::Cpu).unwrap();
    assert!(matches!(x.softmax(2), Err(Error::DimOutOfRange { op: "softmax", .. })));
    assert!(matches!(labels.softmax(0), Err(Error::UnsupportedDType { .. })));
    assert!(matches!(x.cross_entropy(&labels.narrow(0, 0, 2).unwrap()), Err(Error::ShapeMismatch { .. })));
    assert!(x.cross_entropy(&Tensor::ones(3, Device::Cpu).unwrap()).is_err(), "neither labels nor probabilities");
    assert!(matches!(labels.cross_entropy(&labels), Err(Error::UnsupportedDType { .. })));
}

/// Shapes whose rows run along dim 1 of three dims: short rows are processed in blocks, longer rows whole, and the longest in
/// sections.
const INTERLEAVED_SHAPES: [[usize; 3]; 12] = [
    [1, 64, 64],
    [2, 17, 8],
    [3, 1, 129],
    [1, 2, 65],
    [2, 97, 63],
    [2, 65, 127],
    [1, 1031, 9],
    [2, 307, 129],
    [1, 5000, 8],
    [1, 3, 20_011],
    [2, 37, 2049],
    [0, 3, 64],
];

#[test]
fn softmax_of_interleaved_rows() {
    for (shape, dtype) in INTERLEAVED_SHAPES.into_iter().flat_map(|shape| FLOATS.map(|dtype| (shape, dtype))) {
        check(&logits(&shape, dtype, Device::Cpu), 1);
    }
    for [o, n, inner] in INTERLEAVED_SHAPES {
        let (within, turned) = (logits(&[o, n + 3, inner + 5], DType::F32, Device::Cpu), [inner, n, o]);
        check(&within.narrow(1, 2, n).unwrap().narrow(2, 4, inner).unwrap(), 1);
        check(&logits(&turned, DType::F32, Device::Cpu).transpose(0, 2).unwrap(), 1);
        check(&logits(&[n, inner], DType::F32, Device::Cpu).expand([3, n, inner]).unwrap(), 1);
    }
}

/// Interleaved rows have the same results and gradients as contiguous rows, including infinities and NaN.
#[test]
fn interleaved_rows_match_contiguous_rows() {
    for ([o, n, inner], dtype) in INTERLEAVED_SHAPES.into_iter().flat_map(|shape| FLOATS.map(|dtype| (shape, dtype))) {
        let rows = extreme(o * inner, n, dtype).reshape([o, inner, n]).unwrap();
        let x = rows.transpose(1, 2).unwrap().contiguous().unwrap();
        let eps = tolerance(dtype);
        let same = |got: &Tensor, want: &Tensor, eps: f64| close(&got.transpose(1, 2).unwrap(), &values(want), eps);
        same(&x.softmax(1).unwrap(), &rows.softmax(2).unwrap(), eps);
        same(&x.log_softmax(1).unwrap(), &rows.log_softmax(2).unwrap(), eps);
        same(&x.logsumexp(1, true).unwrap(), &rows.logsumexp(2, true).unwrap(), eps);
        let g = logits(&[o, inner, n], dtype, Device::Cpu);
        let gradient = |x: &Tensor, g: &Tensor, f: &dyn Fn(&Tensor) -> Tensor| {
            let x = x.detach().requires_grad_(true).unwrap();
            f(&x).backward_with(g).unwrap();
            x.grad().unwrap()
        };
        let across = g.transpose(1, 2).unwrap();
        let eps = eps * 8.0 * n as f64;
        let (got, want) =
            (gradient(&x, &across, &|x| x.softmax(1).unwrap()), gradient(&rows, &g, &|x| x.softmax(2).unwrap()));
        same(&got, &want, eps);
        let (got, want) = (
            gradient(&x, &across, &|x| x.log_softmax(1).unwrap()),
            gradient(&rows, &g, &|x| x.log_softmax(2).unwrap()),
        );
        same(&got, &want, eps);
    }
}

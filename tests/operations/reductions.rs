//! Reductions: each row of the reduction table is compared with the row's own reference, and other reductions with their
//! definitions.

use claystone::autograd::gradgradcheck;
use claystone::ops::{Argument, Dtypes, REDUCTIONS, ReductionRow, operations};
use claystone::{DType, Device, Error, Tensor};
use ndarray::{ArrayD, Axis, IxDyn};

use crate::common::{each_device, f64s};
use crate::harness::{Case, case};

/// For each result, applies `f` to the elements over `dims` in row-major order.
fn over(x: &ArrayD<f64>, dims: &[usize], keepdim: bool, f: impl Fn(&[f64]) -> f64) -> ArrayD<f64> {
    let kept: Vec<usize> = (0..x.ndim()).filter(|d| !dims.contains(d)).collect();
    let mut shape: Vec<usize> = kept.iter().map(|&d| x.shape()[d]).collect();
    let order: Vec<usize> = kept.iter().chain(dims).copied().collect();
    let x = x.view().permuted_axes(order);
    let n: usize = x.shape()[kept.len()..].iter().product();
    let all: Vec<f64> = x.iter().copied().collect();
    let outs: usize = shape.iter().product();
    let values = (0..outs).map(|o| f(&all[o * n..(o + 1) * n])).collect();
    if keepdim {
        dims.iter().for_each(|&d| shape.insert(d, 1));
    }
    ArrayD::from_shape_vec(IxDyn(&shape), values).unwrap()
}

/// The shape, the dims (`None` for all) and keepdim.
type Form = (&'static [usize], Option<&'static [usize]>, bool);

const FORMS: [Form; 3] = [(&[5, 7], Some(&[1]), false), (&[4, 3, 5], Some(&[0, 2]), true), (&[3, 6], None, false)];

fn dims_of((shape, dims, _): Form) -> (Argument, Vec<usize>) {
    match dims {
        Some(dims) => (Argument::from(dims), dims.to_vec()),
        None => (Argument::None, (0..shape.len()).collect()),
    }
}

fn of_row(row: &'static ReductionRow) -> Vec<Case> {
    // amax and amin are aliases of the rows max and min. Calls by these names are tested too.
    let alias = ["amax", "amin"].into_iter().find(|name| &name[1..] == row.name);
    [row.name].into_iter().chain(alias).flat_map(|name| named_cases(name, row)).collect()
}

fn named_cases(name: &'static str, row: &'static ReductionRow) -> Vec<Case> {
    // If the row allows a reduction of no elements, tests such a reduction; otherwise tests one without results.
    let empty: Form = (&[0, 3], Some(if row.allows_no_elements() { &[0] } else { &[1] }), false);
    let one = |form: Form| {
        let (argument, dims) = dims_of(form);
        let case = case(name);
        // Maxima and minima have no derivative at equal elements, so their elements are distinct.
        let case = match row.name.contains("max") || row.name.contains("min") {
            true => case.distinct(form.0),
            false => case.input_in(form.0, row.domain.0..row.domain.1),
        };
        case.arg(argument).arg(form.2).with_reference(move |x| vec![over(&x[0], &dims, form.2, row.reference)])
    };
    FORMS.into_iter().chain([empty]).map(one).collect()
}

fn mean(v: &[f64]) -> f64 {
    v.iter().sum::<f64>() / v.len() as f64
}

fn variance(v: &[f64], correction: usize) -> f64 {
    let mean = mean(v);
    v.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / v.len().saturating_sub(correction) as f64
}

fn place(v: &[f64], better: fn(f64, f64) -> bool) -> usize {
    (0..v.len()).fold(0, |best, i| if better(v[i], v[best]) { i } else { best })
}

pub fn cases() -> Vec<Case> {
    let mut cases: Vec<Case> = REDUCTIONS.iter().copied().flat_map(of_row).collect();
    for form @ (shape, _, keepdim) in FORMS.into_iter().chain([(&[0, 3][..], Some(&[0][..]), true)]) {
        let (argument, dims) = dims_of(form);
        let start = |name: &str| case(name).input(shape).arg(argument.clone());
        let over = |f: fn(&[f64]) -> f64| {
            let dims = dims.clone();
            move |x: &ArrayD<f64>| over(x, &dims, keepdim, f)
        };
        let (var, std, average) = (over(|v| variance(v, 1)), over(|v| variance(v, 0).sqrt()), over(mean));
        let (var_, std_, average_) = (var.clone(), std.clone(), average.clone());
        cases.push(start("nanmean").arg(keepdim).with_reference(move |x| vec![average_(&x[0])]));
        cases.push(start("var").arg(1).arg(keepdim).with_reference(move |x| vec![var_(&x[0])]));
        cases.push(start("std").arg(0).arg(keepdim).with_reference(move |x| vec![std_(&x[0])]));
        let average_ = average.clone();
        cases.push(start("var_mean").arg(1).arg(keepdim).with_reference(move |x| vec![var(&x[0]), average_(&x[0])]));
        cases.push(start("std_mean").arg(0).arg(keepdim).with_reference(move |x| vec![std(&x[0]), average(&x[0])]));
        let log = over(|v| {
            let top = v.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            if v.is_empty() { top } else { top + v.iter().map(|x| (x - top).exp()).sum::<f64>().ln() }
        });
        cases.push(start("logsumexp").arg(keepdim).with_reference(move |x| vec![log(&x[0])]));
    }
    for form @ (shape, _, keepdim) in FORMS.into_iter().chain([(&[0, 3][..], Some(&[1][..]), true)]) {
        let (argument, dims) = dims_of(form);
        cases.push(case("aminmax").distinct(shape).arg(argument).arg(keepdim).with_reference(move |x| {
            let of = |better: fn(f64, f64) -> bool| over(&x[0], &dims, keepdim, |v| v[place(v, better)]);
            vec![of(|a, b| a < b), of(|a, b| a > b)]
        }));
    }
    for (name, better) in [("max_dim", (|a, b| a > b) as fn(f64, f64) -> bool), ("min_dim", |a, b| a < b)] {
        for (shape, dim, keepdim) in [(&[5, 7][..], 1, false), (&[4, 3, 5], 1, true), (&[3, 0], 0, false)] {
            cases.push(case(name).distinct(shape).arg(dim).arg(keepdim).with_reference(move |x| {
                let of = |f: &dyn Fn(&[f64]) -> f64| over(&x[0], &[dim as usize], keepdim, f);
                vec![of(&|v| v[place(v, better)]), of(&|v| place(v, better) as f64)]
            }));
        }
    }
    cases
}

/// A table row alone provides a method (callable by name), a catalogue entry with dtypes, a line in the documentation, and a
/// gradient.
#[test]
fn reduction_rows_are_complete() {
    let page = include_str!("../../docs/operations.md");
    for row in REDUCTIONS {
        let entry = operations().iter().find(|op| op.name == row.name).unwrap();
        assert_eq!((entry.takes, entry.gives), (row.takes, row.gives));
        assert!(page.contains(&format!("| `{}(input, dim: dims?, keepdim: bool = false)` |", row.name)), "{} is not in the documentation", row.name);
        each_device(|device| {
            let x = Tensor::from_slice(&[0.5f32, 1.5, -2.0], 3, device).unwrap().requires_grad_(true).unwrap();
            let y = row.apply(&x, (), false).unwrap();
            let want = (row.reference)(&[0.5, 1.5, -2.0]);
            assert!((f64s(&y).sum() - want).abs() < 1e-6, "{}: {y} instead of {want}", row.name);
            assert_eq!(y.requires_grad(), entry.is_differentiable(), "{}", row.name);
            if entry.is_differentiable() {
                y.backward().unwrap();
                assert!(x.grad().unwrap().abs().unwrap().sum((), false).unwrap().item::<f32>().unwrap() > 0.0);
            }
            let whole = Tensor::ones(3, (DType::I32, device)).unwrap();
            assert_eq!(row.apply(&whole, (), false).is_ok(), row.takes == Dtypes::All, "{}", row.name);
        });
    }
}

#[test]
fn reductions_propagate_nan() {
    let nan = f64::NAN;
    each_device(|device| {
        for n in [4, 40, 300, 70_000] {
            let mut values = vec![0.25; n];
            values[1] = nan;
            values[n - 1] = nan;
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                let t = Tensor::from_slice(&values, n, device).unwrap().to_dtype(dtype).unwrap();
                let one = |t: Tensor| f64s(&t).sum();
                let sum = (n - 2) as f64 * 0.25;
                assert!((one(t.nansum((), false).unwrap()) - sum).abs() <= 4e-3 * sum || sum > 65504.0);
                assert_eq!(one(t.nanmean((), false).unwrap()), 0.25);
                assert!(one(t.norm((), false).unwrap()).is_nan());
                let columns = t.unsqueeze(1).unwrap().expand([n, 33]).unwrap().contiguous().unwrap();
                assert_eq!(f64s(&columns.nanmean(0, false).unwrap()), ArrayD::from_elem(IxDyn(&[33]), 0.25));
            }
        }
        let all = Tensor::full(3, nan, device).unwrap();
        assert_eq!(all.nansum((), false).unwrap().item::<f32>().unwrap(), 0.0);
        assert!(all.nanmean((), false).unwrap().item::<f32>().unwrap().is_nan());
        let large = Tensor::full(3, (1i64 << 60) + 1, (DType::I64, device)).unwrap();
        assert_eq!(large.nansum((), false).unwrap().item::<i64>().unwrap(), 3 * ((1 << 60) + 1));
    });
}

#[test]
fn gradients_of_ties_and_zeros() {
    each_device(|device| {
        let t = Tensor::from_slice(&[2f32, 1.0, 2.0, 2.0], 4, device).unwrap().requires_grad_(true).unwrap();
        t.amax((), false).unwrap().backward().unwrap();
        let third = 1.0 / 3.0;
        assert_eq!(t.grad().unwrap().to_vec::<f32>().unwrap(), [third, 0.0, third, third]);
        let zeros = Tensor::zeros(3, device).unwrap().requires_grad_(true).unwrap();
        zeros.norm((), false).unwrap().backward().unwrap();
        assert_eq!(zeros.grad().unwrap().to_vec::<f32>().unwrap(), [0.0; 3]);
        if !device.info().unwrap().fp64 {
            return;
        }
        let x = Tensor::from_slice(&[0.5, -1.5, 2.0, 0.7, -0.3, 1.1], [2, 3], device).unwrap();
        for name in ["sum", "mean", "nansum", "norm", "max"] {
            let row = REDUCTIONS.iter().find(|row| row.name == name).unwrap();
            let squares = |x: &[Tensor]| row.apply(&x[0], 1, false)?.square()?.sum((), false);
            gradgradcheck(squares, &[x.detach()], 1e-5).unwrap_or_else(|e| panic!("{name}: {e}"));
        }
    });
}

#[test]
fn logsumexp_over_several_dims() {
    each_device(|device| {
        let t = Tensor::from_slice(&[1000f32, 1000.0, -1000.0, 1000.0], [2, 2], device).unwrap();
        let got = t.logsumexp((), false).unwrap().item::<f32>().unwrap();
        assert!((got - 1000.0 - 3f32.ln()).abs() < 1e-3);
        assert_eq!(t.logsumexp([0, 1], true).unwrap().shape().dims(), [1, 1]);
        assert!(matches!(t.logsumexp([0, 0], false), Err(Error::Invalid { .. })));
        let same = t.logsumexp([], false).unwrap();
        assert!(f64s(&same) == f64s(&t) && !same.shares_storage(&t));
    });
    assert_eq!(over(&ArrayD::ones(vec![2, 3]), &[0], false, |v| v.len() as f64), ArrayD::from_elem(vec![3], 2.0));
    let x = ArrayD::from_shape_fn(vec![2, 3], |i| (i[0] * 3 + i[1]) as f64);
    assert_eq!(over(&x, &[1], false, mean), x.mean_axis(Axis(1)).unwrap());
}

#[test]
fn reductions_of_few_elements() {
    let check = |t: &Tensor, d: usize| {
        let (x, dim) = (f64s(t), d as isize);
        let what = |name: &str| format!("{name} of {:?} {:?} along {d} {} on {}", t.shape(), t.strides(), t.dtype(), t.device());
        let equal = |name: &str, got: Tensor, f: &dyn Fn(&[f64]) -> f64| {
            // The expected sums are rounded to the result's dtype.
            let want = Tensor::from_ndarray(over(&x, &[d], false, f), Device::Cpu).unwrap();
            let (want, got) = (f64s(&want.to_dtype(got.dtype()).unwrap()), f64s(&got));
            let same = got.iter().zip(&want).all(|(a, b)| a == b || (a.is_nan() && b.is_nan()));
            assert!(same && got.shape() == want.shape(), "{}", what(name));
        };
        let nan = |v: &[f64]| v.iter().any(|v| v.is_nan());
        equal("sum", t.sum(dim, false).unwrap(), &|v| v.iter().sum());
        equal("any", t.any(dim, false).unwrap(), &|v| f64::from(v.iter().any(|&v| v != 0.0)));
        equal("all", t.all(dim, false).unwrap(), &|v| f64::from(v.iter().all(|&v| v != 0.0)));
        equal("count_nonzero", t.count_nonzero(dim, false).unwrap(), &|v| v.iter().filter(|&&v| v != 0.0).count() as f64);
        equal("nansum", t.nansum(dim, false).unwrap(), &|v| v.iter().filter(|v| !v.is_nan()).sum());
        let greatest = |v: &[f64]| if nan(v) { f64::NAN } else { v.iter().copied().fold(f64::NEG_INFINITY, f64::max) };
        equal("amax", t.amax(dim, false).unwrap(), &greatest);
        let first = |v: &[f64]| v.iter().position(|v| v.is_nan());
        equal("argmax", t.argmax(dim, false).unwrap(), &|v| first(v).unwrap_or_else(|| place(v, |a, b| a > b)) as f64);
        equal("argmin", t.argmin(dim, false).unwrap(), &|v| first(v).unwrap_or_else(|| place(v, |a, b| a < b)) as f64);
    };
    let numbers = |shape: &[usize], dtype: DType, device| {
        let n: usize = shape.iter().product();
        let special = |i: usize| if dtype.is_float() && i % 41 == 7 { f64::NAN } else { (i * 7919 % 1009 % 5) as f64 };
        let values: Vec<f64> = (0..n).map(special).collect();
        Tensor::from_slice(&values, shape, device).unwrap().to_dtype(dtype).unwrap()
    };
    each_device(|device| {
        for dtype in DType::ALL {
            for n in [2, 3, 4, 5, 8, 16, 17] {
                check(&numbers(&[1025, n], dtype, device), 1);
                check(&numbers(&[259, n, 3], dtype, device), 1);
            }
            let t = numbers(&[300, 6, 4], dtype, device);
            for view in [t.narrow(1, 1, 3).unwrap(), t.permute(&[2, 0, 1]).unwrap(), t.flip(1).unwrap(), t.narrow(2, 1, 2).unwrap()] {
                (0..3).for_each(|d| check(&view, d));
            }
        }
        check(&numbers(&[40_000, 2], DType::F32, device), 1);
        check(&numbers(&[2, 3, 700, 2, 2], DType::F32, device), 3);
    });
}

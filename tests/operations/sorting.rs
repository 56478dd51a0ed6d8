//! Sorting, searching and counting, compared with std's sort and plain loops.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use claystone::{DType, Device, Error, Tensor, autograd::gradcheck};
use ndarray::{ArrayD, Axis, Dimension, IxDyn};

use crate::common::{each_device, f64s};
use crate::harness::{Case, case};

/// Returns, for every line, the element that `choose` selects and its index.
fn selected_elements(x: &ArrayD<f64>, d: usize, keepdim: bool, choose: impl Fn(&[f64]) -> usize) -> Vec<ArrayD<f64>> {
    let made = [along(x, d, |line| vec![line[choose(line)]]), along(x, d, |line| vec![choose(line) as f64])];
    made.into_iter().map(|made| shaped(made, d, keepdim)).collect()
}

/// Removes dim d, which has size 1, unless `keepdim` is set.
fn shaped(made: ArrayD<f64>, d: usize, keepdim: bool) -> ArrayD<f64> {
    let mut shape = made.shape().to_vec();
    if !keepdim {
        shape.remove(d);
    }
    ArrayD::from_shape_vec(shape, made.iter().copied().collect()).unwrap()
}

fn most_frequent(line: &[f64]) -> usize {
    let count = |v: f64| line.iter().filter(|&&w| w == v).count();
    let best = line.iter().copied().min_by(|&a, &b| count(b).cmp(&count(a)).then(order(a, b))).unwrap();
    line.iter().rposition(|&v| v == best).unwrap()
}

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    // Sorting has no derivative at equal elements, so elements differ here; tests below cover equal elements.
    for (shape, dim) in [(&[5, 7][..], 1), (&[5, 7], 0), (&[2, 3, 4], -2isize), (&[3, 0], 1)] {
        let d = if dim < 0 { shape.len() - dim.unsigned_abs() } else { dim as usize };
        for descending in [false, true] {
            let places = move |line: &[f64]| sorted(line, descending);
            let values = move |line: &[f64]| places(line).iter().map(|&i| line[i]).collect();
            let indices = move |line: &[f64]| places(line).iter().map(|&i| i as f64).collect();
            let both = move |x: &[ArrayD<f64>]| vec![along(&x[0], d, values), along(&x[0], d, indices)];
            cases.push(case("sort").distinct(shape).arg(dim).arg(descending).with_reference(both));
            let places = move |x: &[ArrayD<f64>]| vec![along(&x[0], d, indices)];
            cases.push(case("argsort").distinct(shape).arg(dim).arg(descending).with_reference(places));
            let k = shape[d].min(3);
            let first = move |line: Vec<f64>| line[..k].to_vec();
            let topk = move |x: &[ArrayD<f64>]| {
                vec![along(&x[0], d, |line| first(values(line))), along(&x[0], d, |line| first(indices(line)))]
            };
            cases.push(case("topk").distinct(shape).arg(k).arg(dim).arg(descending).with_reference(topk));
        }
    }
    for (shape, dim) in [(&[6, 2][..], 0), (&[0, 2], 0)] {
        let ascending = |line: &[f64]| sorted(line, false).iter().map(|&i| line[i]).collect();
        cases.push(case("msort").distinct(shape).with_reference(move |x| vec![along(&x[0], dim, ascending)]));
    }
    for (shape, d, keepdim) in [(&[5, 7][..], 1, false), (&[6, 4], 0, true), (&[0, 4], 1, false)] {
        let of = |name: &str| case(name).distinct(shape);
        let by = move |choose: fn(&[f64]) -> usize| move |x: &[ArrayD<f64>]| selected_elements(&x[0], d, keepdim, choose);
        cases.push(of("kthvalue").arg(2).arg(d).arg(keepdim).with_reference(by(|line| sorted(line, false)[1])));
        for name in ["median", "nanmedian"] {
            let middle = by(|line| sorted(line, false)[(line.len() - 1) / 2]);
            cases.push(of(name).arg(d).arg(keepdim).with_reference(middle));
        }
        cases.push(of("mode").arg(d).arg(keepdim).with_reference(by(most_frequent)));
        cases.push(case("mode").input(shape).integers().arg(d).arg(keepdim).with_reference(by(most_frequent)));
        for (name, q) in [("quantile", 0.0), ("quantile", 0.3), ("quantile", 1.0), ("nanquantile", 0.3)] {
            cases.push(of(name).arg(q).arg(d).arg(keepdim).with_reference(move |x| {
                let at = |line: &[f64]| {
                    let place = q * (line.len() - 1) as f64;
                    let value = |i: f64| line[sorted(line, false)[i as usize]];
                    vec![value(place.floor()) + place.fract() * (value(place.ceil()) - value(place.floor()))]
                };
                vec![shaped(along(&x[0], d, at), d, keepdim)]
            }));
        }
    }
    for (shape, among) in [(&[5, 7][..], &[1.0, -1.0, 0.0, 1.0][..]), (&[], &[2.0]), (&[3], &[]), (&[0, 2], &[1.0])] {
        for dtype in [DType::F32, DType::I64] {
            let among = ArrayD::from_shape_vec(vec![among.len()], among.to_vec()).expect("a vector");
            let whole = case("isin").input(shape).fixed(among, dtype);
            let found = |x: &[ArrayD<f64>]| vec![x[0].mapv(|v| f64::from(x[1].iter().any(|&w| w == v)))];
            cases.push(whole.with_reference(found));
        }
    }
    for dtype in [DType::F32, DType::I64, DType::F16] {
        for (n, values) in [(5, &[2, 3][..]), (0, &[3]), (4, &[0])] {
            let line = ArrayD::from_shape_fn(vec![n], |i| (i[0] / 2) as f64);
            let sought = ArrayD::from_shape_fn(values, |i| (i[0] * 2) as f64 - 1.0);
            for right in [false, true] {
                let below = move |line: &ArrayD<f64>, sought: &ArrayD<f64>| {
                    let passes = move |e: f64, v: f64| if right { e <= v } else { e < v };
                    vec![sought.mapv(|v| line.iter().filter(|&&e| passes(e, v)).count() as f64)]
                };
                let searchsorted = case("searchsorted").fixed(line.clone(), dtype).fixed(sought.clone(), dtype);
                cases.push(searchsorted.arg(right).with_reference(move |x| below(&x[0], &x[1])));
                let bucketize = case("bucketize").fixed(sought.clone(), dtype).fixed(line.clone(), dtype);
                cases.push(bucketize.arg(right).with_reference(move |x| below(&x[1], &x[0])));
            }
        }
    }
    cases.extend(of_counts());
    cases
}

/// Returns the distinct values in order, their counts, and for each element the index of its value.
fn distinct_elements(x: &ArrayD<f64>) -> [ArrayD<f64>; 3] {
    let mut values: Vec<f64> = x.iter().copied().collect();
    values.sort_by(|&a, &b| order(a, b));
    values.dedup();
    let counts = values.iter().map(|v| x.iter().filter(|&w| w == v).count() as f64).collect::<Vec<_>>();
    let inverse = x.mapv(|w| values.iter().position(|&v| v == w).unwrap() as f64);
    [
        ArrayD::from_shape_vec(vec![values.len()], values).unwrap(),
        ArrayD::from_shape_vec(vec![counts.len()], counts).unwrap(),
        inverse,
    ]
}

/// Returns the distinct slices along a dim in lexicographic order, for each slice the index of its value, and the counts.
fn distinct_slices(x: &ArrayD<f64>, dim: usize) -> Vec<ArrayD<f64>> {
    let slice = |i: usize| x.index_axis(Axis(dim), i).iter().copied().collect::<Vec<f64>>();
    let mut kept: Vec<usize> = (0..x.len_of(Axis(dim))).collect();
    kept.sort_by(|&a, &b| slice(a).partial_cmp(&slice(b)).unwrap());
    kept.dedup_by_key(|i| slice(*i));
    let inverse: Vec<f64> = (0..x.len_of(Axis(dim)))
        .map(|i| kept.iter().position(|&k| slice(k) == slice(i)).unwrap() as f64)
        .collect();
    let counts: Vec<f64> = (0..kept.len()).map(|k| inverse.iter().filter(|&&i| i == k as f64).count() as f64).collect();
    let vector = |v: Vec<f64>| ArrayD::from_shape_vec(vec![v.len()], v).unwrap();
    vec![x.select(Axis(dim), &kept), vector(inverse), vector(counts)]
}

fn not_zero(x: &ArrayD<f64>) -> ArrayD<f64> {
    let found: Vec<f64> = x
        .indexed_iter()
        .filter(|(_, v)| **v != 0.0)
        .flat_map(|(at, _)| (0..x.ndim()).map(move |d| at[d] as f64).collect::<Vec<_>>())
        .collect();
    ArrayD::from_shape_vec(vec![found.len() / x.ndim(), x.ndim()], found).unwrap()
}

fn of_counts() -> Vec<Case> {
    let mut cases = Vec::new();
    for (shape, dim) in [(&[7, 3][..], 0isize), (&[3, 2, 5], -1)] {
        let axis = if dim < 0 { shape.len() - 1 } else { dim as usize };
        cases.push(case("unique_all").input(shape).arg(dim).with_reference(move |x| distinct_slices(&x[0], axis)));
    }
    for shape in [&[4, 6][..], &[0, 3]] {
        cases.push(case("unique").input(shape).with_reference(|x| distinct_elements(&x[0])[..1].to_vec()));
        cases.push(case("unique_counts").input(shape).with_reference(|x| distinct_elements(&x[0])[..2].to_vec()));
        cases.push(case("unique_inverse").input(shape).with_reference(|x| {
            let [values, _, inverse] = distinct_elements(&x[0]);
            vec![values, inverse]
        }));
        cases.push(case("unique_all").input(shape).with_reference(|x| {
            let [values, counts, inverse] = distinct_elements(&x[0]);
            vec![values, inverse, counts]
        }));
        cases.push(case("unique_consecutive").input(shape).with_reference(|x| {
            let (mut values, mut counts): (Vec<f64>, Vec<f64>) = (vec![], vec![]);
            let inverse = ArrayD::from_shape_vec(
                x[0].shape(),
                x[0].iter()
                    .map(|&v| {
                        if values.last() != Some(&v) {
                            values.push(v);
                            counts.push(0.0);
                        }
                        *counts.last_mut().unwrap() += 1.0;
                        values.len() as f64 - 1.0
                    })
                    .collect(),
            )
            .unwrap();
            let vector = |v: Vec<f64>| ArrayD::from_shape_vec(vec![v.len()], v).unwrap();
            vec![vector(values), inverse, vector(counts)]
        }));
        for name in ["nonzero", "argwhere"] {
            cases.push(case(name).input(shape).integers().with_reference(|x| vec![not_zero(&x[0])]));
            cases.push(case(name).mask(shape).with_reference(|x| vec![not_zero(&x[0])]));
        }
        cases.push(case("masked_select").input(shape).mask(shape).with_reference(|x| {
            let picked: Vec<f64> = x[0].iter().zip(&x[1]).filter(|(_, m)| **m != 0.0).map(|(v, _)| *v).collect();
            vec![ArrayD::from_shape_vec(vec![picked.len()], picked).unwrap()]
        }));
        cases.push(case("histc").input(shape).arg(8).arg(-1.5).arg(1.5).with_reference(|x| {
            let mut counts = ArrayD::zeros(vec![8]);
            for v in x[0].iter().filter(|v| v.abs() <= 1.5) {
                counts[[((v + 1.5) / 3.0 * 8.0).floor().min(7.0) as usize]] += 1.0;
            }
            vec![counts]
        }));
    }
    for n in [13, 0] {
        cases.push(case("bincount").input_in(&[n], 0.0..6.0).arg(8).with_reference(|x| {
            let mut counts = ArrayD::zeros(vec![8]);
            x[0].iter().for_each(|&v| counts[[v as usize]] += 1.0);
            vec![counts]
        }));
    }
    cases
}

/// Compares as PyTorch does: NaN is greater than all numbers.
fn order(a: f64, b: f64) -> Ordering {
    a.partial_cmp(&b).unwrap_or_else(|| a.is_nan().cmp(&b.is_nan()))
}

/// Returns the indices that sort a line stably.
pub fn sorted(line: &[f64], descending: bool) -> Vec<usize> {
    let mut indices: Vec<usize> = (0..line.len()).collect();
    indices.sort_by(|&i, &j| if descending { order(line[j], line[i]) } else { order(line[i], line[j]) });
    indices
}

/// Applies `f` to every line along `d`. All results must have the same length.
pub fn along(x: &ArrayD<f64>, d: usize, f: impl Fn(&[f64]) -> Vec<f64>) -> ArrayD<f64> {
    let lines: Vec<Vec<f64>> = x.lanes(Axis(d)).into_iter().map(|line| f(&line.to_vec())).collect();
    let mut shape = x.shape().to_vec();
    shape[d] = lines.first().map_or(0, Vec::len);
    let mut out = ArrayD::zeros(shape);
    out.lanes_mut(Axis(d)).into_iter().zip(lines).for_each(|(mut to, line)| {
        to.iter_mut().zip(line).for_each(|(o, v)| *o = v);
    });
    out
}

/// Asserts that values and shapes are equal; NaN equals NaN.
#[track_caller]
pub fn equal(got: &Tensor, want: &ArrayD<f64>, what: &str) {
    let got = f64s(got);
    assert_eq!(got.shape(), want.shape(), "{what}");
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!(g == w || (g.is_nan() && w.is_nan()), "{what}, element {i}: {g} instead of {w}");
    }
}

#[track_caller]
pub fn check(t: &Tensor) {
    let x = f64s(t);
    for d in 0..t.rank() {
        for descending in [false, true] {
            let what = &format!("{:?} {:?} along {d} {} on {}", t.shape(), t.strides(), t.dtype(), t.device());
            let (values, indices) = t.sort(d as isize, descending).unwrap();
            let places = |line: &[f64]| sorted(line, descending);
            equal(&values, &along(&x, d, |line| places(line).iter().map(|&i| line[i]).collect()), what);
            equal(&indices, &along(&x, d, |line| places(line).iter().map(|&i| i as f64).collect()), what);
            assert_eq!((values.dtype(), indices.dtype()), (t.dtype(), DType::I64));
        }
    }
}

/// Returns integers with many repetitions.
pub fn numbers(shape: &[usize], dtype: DType, device: Device) -> Tensor {
    let n: usize = shape.iter().product();
    let signed = !matches!(dtype, DType::U8 | DType::U32 | DType::Bool);
    let values: Vec<i64> = (0..n as i64).map(|i| i * 7919 % 1009 % 101 - if signed { 50 } else { 0 }).collect();
    Tensor::from_slice(&values, shape, device).unwrap().to_dtype(dtype).unwrap()
}

#[test]
fn sorts_of_sizes_around_blocks() {
    each_device(|device| {
        for n in [1, 2, 3, 15, 16, 17, 255, 1023, 1024, 1025, 2049, 4095, 4096, 4097, 9001] {
            check(&numbers(&[n], DType::F32, device));
        }
        for n in [1, 2, 5, 33, 1025] {
            check(&numbers(&[7, n], DType::F32, device));
            check(&numbers(&[n, 3], DType::F32, device));
        }
        check(&numbers(&[9, 30, 5], DType::F32, device).permute(&[1, 2, 0]).unwrap());
        check(&numbers(&[7, 300], DType::I32, device).narrow(1, 3, 200).unwrap().flip(1).unwrap());
        check(&numbers(&[9], DType::I64, device).expand([40, 9]).unwrap());
    });
}

/// Lines with all numbers of i8, and with the least and greatest numbers of i16, for every way to sort and select.
#[test]
fn small_signed_integers_sort_over_their_whole_range() {
    each_device(|device| {
        for (dtype, lowest) in [(DType::I8, -128i64), (DType::I16, -32_768)] {
            for n in [2, 256, 9001] {
                let values: Vec<i64> = (0..n).map(|i| lowest + (i * 2_347 + 2 * n - 1) % (-2 * lowest)).collect();
                let ends = Tensor::from_slice(&[-1 - lowest, lowest], 2, device).unwrap();
                let t = Tensor::cat(&[&Tensor::from_slice(&values, n as usize, device).unwrap(), &ends], 0).unwrap();
                let t = t.to_dtype(dtype).unwrap();
                check(&t);
                let value = |t: Tensor| t.to_dtype(DType::I64).unwrap().item::<i64>().unwrap();
                for (largest, end) in [(true, -1 - lowest), (false, lowest)] {
                    assert_eq!(value(t.topk(1, 0, largest).unwrap().0), end, "{n} {dtype}");
                }
                assert_eq!(value(t.kthvalue(1, 0, false).unwrap().0), lowest, "{n} {dtype}");
                assert_eq!([value(t.min((), false).unwrap()), value(t.max((), false).unwrap())], [lowest, -1 - lowest]);
                let (line, _) = t.sort(0, false).unwrap();
                assert_eq!(value(line.searchsorted(&ends.to_dtype(dtype).unwrap(), false).unwrap().narrow(0, 1, 1).unwrap()), 0);
            }
        }
    });
}

#[test]
fn sorts_support_every_dtype_and_special_values() {
    let (nan, inf) = (f64::NAN, f64::INFINITY);
    each_device(|device| {
        for dtype in DType::ALL {
            check(&numbers(&[3, 40], dtype, device));
            if dtype.is_float() {
                let values = [0.0, nan, -0.0, inf, -inf, nan, 1.5, -1.5, 0.0, -0.0];
                check(&Tensor::from_slice(&values, 10, device).unwrap().to_dtype(dtype).unwrap());
            }
        }
        let ends = [i64::MAX, i64::MIN, 0, -1, i64::MIN + 1, i64::MAX - 1];
        let (values, _) = Tensor::from_slice(&ends, 6, device).unwrap().sort(0, false).unwrap();
        let mut want = ends;
        want.sort();
        assert_eq!(values.to_vec::<i64>().unwrap(), want);
        // Sorting keeps the sign of zeros.
        let zeros = Tensor::from_slice(&[0f32, -0.0], 2, device).unwrap().sort(0, false).unwrap().0;
        assert_eq!(
            zeros.to_vec::<f32>().unwrap().iter().map(|z| z.is_sign_negative()).collect::<Vec<_>>(),
            [false, true]
        );
    });
}

#[test]
fn order_statistics_handle_ties_and_nan() {
    let nan = f64::NAN;
    each_device(|device| {
        let values = [3.0, 1.0, 2.0, 1.0, 5.0, nan, 4.0, nan, 0.0, nan, nan, nan];
        let t = Tensor::from_slice(&values, [3, 4], device).unwrap().to_dtype(DType::F32).unwrap();
        let pair = |(v, i): (Tensor, Tensor)| (f64s(&v).into_iter().collect::<Vec<_>>(), i.to_vec::<i64>().unwrap());
        let same = |(values, indices): (Vec<f64>, Vec<i64>), want: &[f64], at: &[i64]| {
            let equal = values.iter().zip(want).all(|(a, b)| a == b || (a.is_nan() && b.is_nan()));
            assert!(equal && values.len() == want.len(), "{values:?} instead of {want:?}");
            assert_eq!(indices, at);
        };
        same(pair(t.topk(2, 1, true).unwrap()), &[3.0, 2.0, nan, nan, nan, nan], &[0, 2, 1, 3, 1, 2]);
        same(pair(t.topk(2, -1, false).unwrap()), &[1.0, 1.0, 4.0, 5.0, 0.0, nan], &[1, 3, 2, 0, 0, 1]);
        same(pair(t.kthvalue(2, 1, false).unwrap()), &[1.0, 5.0, nan], &[3, 0, 1]);
        same(pair(t.median(1, true).unwrap()), &[1.0, nan, nan], &[3, 1, 1]);
        same(pair(t.nanmedian(1, false).unwrap()), &[1.0, 4.0, 0.0], &[3, 2, 0]);
        same(pair(t.mode(1, false).unwrap()), &[1.0, 4.0, 0.0], &[3, 2, 0]);
        same(pair(t.max_dim(1, false).unwrap()), &[3.0, nan, nan], &[0, 1, 1]);
        same(pair(t.min_dim(1, false).unwrap()), &[1.0, nan, nan], &[1, 1, 1]);
        let quantile = f64s(&t.quantile(0.5, 1, false).unwrap());
        assert!(quantile[0] == 1.5 && quantile[1].is_nan() && quantile[2].is_nan());
        let quantile = f64s(&t.nanquantile(0.75, 1, true).unwrap());
        assert_eq!((quantile.shape(), quantile[[0, 0]], quantile[[1, 0]], quantile[[2, 0]]), (&[3, 1][..], 2.25, 4.75, 0.0));
        assert!(f64s(&t.narrow(1, 1, 1).unwrap().nanquantile(0.5, 1, false).unwrap())[1].is_nan());
        let scalar = Tensor::full((), 3.0, device).unwrap();
        assert_eq!(scalar.median(0, false).unwrap().0.item::<f32>().unwrap(), 3.0);
        assert_eq!(scalar.topk(1, 0, true).unwrap().1.item::<i64>().unwrap(), 0);
        assert_eq!(scalar.quantile(0.3, 0, true).unwrap().item::<f32>().unwrap(), 3.0);
        assert_eq!(scalar.nanquantile(0.3, -1, true).unwrap().item::<f32>().unwrap(), 3.0);
        let empty = Tensor::zeros([2, 0], device).unwrap();
        assert_eq!(empty.median(0, false).unwrap().0.shape().dims(), [0]);
        for error in [empty.median(1, false), empty.max_dim(1, false), t.kthvalue(5, 1, false), t.topk(5, 1, true)] {
            assert!(matches!(error, Err(Error::Invalid { .. })), "{error:?}");
        }
    });
}

#[test]
fn searchsorted_matches_a_linear_search() {
    each_device(|device| {
        for (n, dtype) in [(0, DType::F32), (1, DType::F64), (2, DType::F16), (7, DType::F32), (100, DType::BF16), (100, DType::F32)] {
            let line: Vec<f64> = (0..n).map(|i| f64::from(i / 3)).collect();
            let values: Vec<f64> = (-2..40).map(|i| f64::from(i) / 2.0).chain([f64::NAN, f64::INFINITY]).collect();
            let (x, v) = (
                Tensor::from_slice(&line, line.len(), device).unwrap().to_dtype(dtype).unwrap(),
                Tensor::from_slice(&values, [4, 11], device).unwrap().to_dtype(dtype).unwrap(),
            );
            for right in [false, true] {
                let below = |v: f64| {
                    let passes = |&&e: &&f64| v.is_nan() || if right { e <= v } else { e < v };
                    line.iter().filter(passes).count() as i64
                };
                let want: Vec<i64> = values.iter().map(|&v| below(v)).collect();
                assert_eq!(x.searchsorted(&v, right).unwrap().to_vec::<i64>().unwrap(), want);
                assert_eq!(v.bucketize(&x, right).unwrap().to_vec::<i64>().unwrap(), want);
                let columns = v.t().unwrap().bucketize(&x, right).unwrap();
                assert_eq!(columns.t().unwrap().to_vec::<i64>().unwrap(), want);
            }
            let found: Vec<bool> = values.iter().map(|v| line.contains(v)).collect();
            assert_eq!(v.isin(&x).unwrap().to_vec::<bool>().unwrap(), found);
        }
        // Every line has its own boundaries, and the boundaries are reversed in memory.
        let x = Tensor::from_slice(&[5i64, 3, 1, 6, 4, 2], [2, 3], device).unwrap().flip(1).unwrap();
        let v = Tensor::from_slice(&[4i64, 1, 4, 7], [2, 2], device).unwrap();
        assert_eq!(x.searchsorted(&v, false).unwrap().to_vec::<i64>().unwrap(), [2, 0, 1, 3]);
        assert!(matches!(
            x.searchsorted(&v.t().unwrap().narrow(0, 0, 1).unwrap(), false),
            Err(Error::ShapeMismatch { .. })
        ));
    });
}

#[test]
fn unique_matches_a_map() {
    each_device(|device| {
        for dtype in [DType::F32, DType::I64, DType::Bool] {
            let t = numbers(&[6, 50], dtype, device).t().unwrap();
            let mut counts = BTreeMap::new();
            f64s(&t).iter().for_each(|&v| *counts.entry(v as i64).or_insert(0i64) += 1);
            let want: Vec<f64> = counts.keys().map(|&k| k as f64).collect();
            let all = |t: &Tensor| f64s(t).into_iter().collect::<Vec<_>>();
            assert_eq!(all(&t.unique().unwrap()), want);
            let (values, many) = t.unique_counts().unwrap();
            assert_eq!((all(&values), many.to_vec::<i64>().unwrap()), (want, counts.into_values().collect()));
            let (values, inverse) = t.unique_inverse().unwrap();
            assert_eq!(inverse.shape(), t.shape());
            let again = values.index_select(0, &inverse.flatten(0, -1).unwrap()).unwrap();
            assert_eq!(all(&again), f64s(&t).iter().copied().collect::<Vec<_>>());
        }
        // There are only two distinct numbers, so that many slices are equal or partly equal.
        let two = |at: &[usize]| (at.iter().fold(1, |h, i| h * 5 + i * i) / 3 % 2) as f64;
        for (shape, dim) in [([40, 5, 1], 0), ([3, 2, 9], 2), ([2, 12, 1], 1), ([1, 6, 2], 0), ([0, 3, 2], 0)] {
            let x = ArrayD::from_shape_fn(IxDyn(&shape), |at| two(at.slice()));
            let reversed = Tensor::from_ndarray_view(&x.view().reversed_axes(), Device::Cpu).unwrap();
            for dtype in [DType::F32, DType::BF16, DType::U8, DType::Bool] {
                let t = reversed.to_dtype(dtype).unwrap().to_device(device).unwrap().permute(&[2, 1, 0]).unwrap();
                let (values, inverse, counts) = t.unique_all(dim as isize).unwrap();
                assert_eq!(values.dtype(), dtype);
                assert_eq!([f64s(&values), f64s(&inverse), f64s(&counts)].to_vec(), distinct_slices(&x, dim), "{shape:?}");
            }
        }
        let nans = Tensor::from_slice(&[f32::NAN, 1.0, f32::NAN], 3, device).unwrap();
        assert_eq!(nans.unique().unwrap().numel(), 3);
        let (values, inverse, counts) = nans.unique_all(None).unwrap();
        assert_eq!((values.numel(), inverse.to_vec::<i64>().unwrap()), (3, vec![1, 0, 2]));
        assert_eq!(counts.to_vec::<i64>().unwrap(), [1, 1, 1]);
        // Rows without elements are all equal, so there is one distinct row.
        let (values, inverse, counts) = Tensor::zeros([4, 0], device).unwrap().unique_all(0).unwrap();
        assert_eq!((values.shape().dims(), counts.to_vec::<i64>().unwrap()), (&[1, 0][..], vec![4]));
        assert_eq!(inverse.to_vec::<i64>().unwrap(), [0; 4]);
        assert!(matches!(nans.unique_all(1), Err(Error::DimOutOfRange { dim: 1, rank: 1, .. })));
        let empty = Tensor::zeros([0, 3], device).unwrap();
        let (values, inverse, counts) = empty.unique_consecutive().unwrap();
        assert_eq!((values.numel(), inverse.shape().dims(), counts.numel()), (0, &[0, 3][..], 0));
        assert_eq!(empty.unique().unwrap().numel(), 0);
        let t = Tensor::from_slice(&[2i64, 2, 1, 2, 2, 2], 6, device).unwrap();
        let (values, inverse, counts) = t.unique_consecutive().unwrap();
        assert_eq!(values.to_vec::<i64>().unwrap(), [2, 1, 2]);
        assert_eq!(inverse.to_vec::<i64>().unwrap(), [0, 0, 1, 2, 2, 2]);
        assert_eq!(counts.to_vec::<i64>().unwrap(), [2, 1, 3]);
    });
}

#[test]
fn nonzero_and_masked_select() {
    each_device(|device| {
        let t = Tensor::from_slice(&[0f32, f32::NAN, -0.0, 2.0, 0.0, -1.0], [2, 3], device).unwrap();
        let indices = t.nonzero().unwrap();
        assert_eq!((indices.shape().dims(), indices.to_vec::<i64>().unwrap()), (&[3, 2][..], vec![0, 1, 1, 0, 1, 2]));
        assert_eq!(t.t().unwrap().argwhere().unwrap().to_vec::<i64>().unwrap(), [0, 1, 1, 0, 2, 1]);
        let zeros = Tensor::zeros([2, 3], device).unwrap();
        assert_eq!(zeros.nonzero().unwrap().shape().dims(), [0, 2]);
        assert_eq!(Tensor::zeros([2, 0, 3], device).unwrap().nonzero().unwrap().shape().dims(), [0, 3]);
        assert_eq!(Tensor::ones((), device).unwrap().nonzero().unwrap().shape().dims(), [1, 0]);
        assert_eq!(Tensor::zeros((), device).unwrap().nonzero().unwrap().shape().dims(), [0, 0]);
        // The tensor and the mask are both broadcast.
        let row = Tensor::from_slice(&[true, false, true], 3, device).unwrap();
        let picked = Tensor::from_slice(&[1i64, 2], [2, 1], device).unwrap().masked_select(&row).unwrap();
        assert_eq!(picked.to_vec::<i64>().unwrap(), [1, 1, 2, 2]);
        assert_eq!(t.masked_select(&zeros).unwrap().shape().dims(), [0]);
        let many = numbers(&[300, 40], DType::I32, device);
        let want: Vec<i32> = many.t().unwrap().to_vec::<i32>().unwrap().into_iter().filter(|&v| v > 3).collect();
        let mask = many.t().unwrap().gt_scalar(3).unwrap();
        assert_eq!(many.t().unwrap().masked_select(&mask).unwrap().to_vec::<i32>().unwrap(), want);
    });
}

#[test]
fn bincount_and_histc() {
    each_device(|device| {
        let t = Tensor::from_slice(&[1i32, 4, 1, 0], 4, device).unwrap();
        assert_eq!(t.bincount(None, 0).unwrap().to_vec::<i64>().unwrap(), [1, 2, 0, 0, 1]);
        assert_eq!(t.bincount(None, 7).unwrap().to_vec::<i64>().unwrap(), [1, 2, 0, 0, 1, 0, 0]);
        let weights = Tensor::from_slice(&[0.5f32, 2.0, 0.25, 4.0], 4, device).unwrap();
        assert_eq!(t.bincount(Some(&weights), 0).unwrap().to_vec::<f32>().unwrap(), [4.0, 0.75, 0.0, 0.0, 2.0]);
        let empty = Tensor::zeros(0, (DType::I64, device)).unwrap();
        assert_eq!(empty.bincount(None, 2).unwrap().to_vec::<i64>().unwrap(), [0, 0]);
        assert_eq!(empty.bincount(None, 0).unwrap().numel(), 0);
        assert!(matches!(t.neg().unwrap().bincount(None, 0), Err(Error::Invalid { .. })));
        assert!(matches!(weights.bincount(None, 0), Err(Error::UnsupportedDType { .. })));
        let t = Tensor::from_slice(&[0f32, 1.0, 2.0, 1.0, f32::NAN, -3.0, 4.0, 4.5], [2, 4], device).unwrap();
        assert_eq!(t.histc(4, 0.0, 4.0).unwrap().to_vec::<f32>().unwrap(), [1.0, 2.0, 1.0, 1.0]);
        let t = Tensor::from_slice(&[1f32, 2.0, 5.0], 3, device).unwrap();
        assert_eq!(t.histc(2, 0.0, 0.0).unwrap().to_vec::<f32>().unwrap(), [2.0, 1.0]);
        assert_eq!(Tensor::zeros(0, device).unwrap().histc(3, 0.0, 0.0).unwrap().to_vec::<f32>().unwrap(), [0.0; 3]);
        assert!(matches!(t.histc(2, 3.0, 1.0), Err(Error::Invalid { .. })));
        let edges = Tensor::from_slice(&(0..41).map(|i| i as f32).collect::<Vec<_>>(), 41, device).unwrap();
        assert_eq!(edges.histc(41, 0.0, 41.0).unwrap().to_vec::<f32>().unwrap(), [1.0; 41], "on {device}");
    });
}

#[test]
fn sorts_and_selections_have_gradients() {
    each_device(|device| {
        if !device.info().unwrap().fp64 {
            return;
        }
        let values = [0.5, -1.5, 2.0, 0.7, -0.3, 1.1, 0.9, -2.0, 0.4, 1.3, -0.6, 0.8];
        let t = Tensor::from_slice(&values, [3, 4], device).unwrap();
        let weighted = |t: Tensor| {
            let weights = Tensor::from_slice(&values[..t.numel()], t.shape(), device)?;
            t.mul(&weights)?.sum((), false)
        };
        for dim in [0, 1] {
            gradcheck(|x| weighted(x[0].sort(dim, true)?.0), &[t.detach()], 1e-6).unwrap();
            gradcheck(|x| weighted(x[0].topk(2, dim, true)?.0), &[t.detach()], 1e-6).unwrap();
            gradcheck(|x| weighted(x[0].kthvalue(2, dim, true)?.0), &[t.detach()], 1e-6).unwrap();
            gradcheck(|x| weighted(x[0].median(dim, false)?.0), &[t.detach()], 1e-6).unwrap();
            gradcheck(|x| weighted(x[0].quantile(0.4, dim, false)?), &[t.detach()], 1e-6).unwrap();
            gradcheck(|x| weighted(x[0].max_dim(dim, false)?.0), &[t.detach()], 1e-6).unwrap();
        }
        let mask = t.gt_scalar(0.6).unwrap();
        gradcheck(|x| weighted(x[0].masked_select(&mask)?), &[t.detach()], 1e-6).unwrap();
    });
}

//! Operations that read and write through indices, compared with loops.

use claystone::DType;
use ndarray::{ArrayD, Axis, Dimension, IxDyn};

use crate::harness::{Case, case};

/// Returns the dim as a non-negative number.
fn axis(dim: isize, rank: usize) -> usize {
    dim.rem_euclid(rank as isize) as usize
}

fn indices(index: &ArrayD<f64>) -> Vec<usize> {
    index.iter().map(|&i| i as usize).collect()
}

/// Returns an index operand with these values.
fn fixed(values: &[i64], shape: &[usize]) -> ArrayD<f64> {
    ArrayD::from_shape_vec(IxDyn(shape), values.iter().map(|&i| i as f64).collect()).unwrap()
}

fn gathered(x: &ArrayD<f64>, d: usize, index: &ArrayD<f64>) -> ArrayD<f64> {
    ArrayD::from_shape_fn(index.raw_dim(), |mut p| {
        let i = index[&p];
        p[d] = i as usize;
        x[&p]
    })
}

/// Calls `f(element, source element)` for each position of the index, which has the rank of the source.
fn scattered(
    x: &ArrayD<f64>,
    d: usize,
    index: &ArrayD<f64>,
    source: &ArrayD<f64>,
    f: impl Fn(&mut f64, f64),
) -> ArrayD<f64> {
    let mut out = x.clone();
    for (mut p, &i) in index.indexed_iter() {
        let from = source[&p];
        p[d] = i as usize;
        f(&mut out[&p], from);
    }
    out
}

/// Expands a vector of indices along all dims of `like` except `d`.
fn expand_index(index: &ArrayD<f64>, d: usize, like: &ArrayD<f64>) -> ArrayD<f64> {
    ArrayD::from_shape_fn(like.raw_dim(), |p| index[p[d]])
}

fn filled(x: &ArrayD<f64>, value: f64) -> ArrayD<f64> {
    ArrayD::from_elem(x.raw_dim(), value)
}

fn set(to: &mut f64, from: f64) {
    *to = from;
}

fn add(to: &mut f64, from: f64) {
    *to += from;
}

/// Computes `scatter_reduce` and `index_reduce` as PyTorch does: combines source elements with the elements at their indices.
fn reduced(
    x: &ArrayD<f64>,
    d: usize,
    index: &ArrayD<f64>,
    source: &ArrayD<f64>,
    reduce: &str,
    include: bool,
) -> ArrayD<f64> {
    let neutral = match reduce {
        "prod" => 1.0,
        "amax" => f64::NEG_INFINITY,
        "amin" => f64::INFINITY,
        _ => 0.0,
    };
    let start = if include { x.clone() } else { scattered(x, d, index, &filled(source, neutral), set) };
    let mut out = scattered(&start, d, index, source, |to, from| match reduce {
        "prod" => *to *= from,
        "amax" => *to = to.max(from),
        "amin" => *to = to.min(from),
        _ => *to += from,
    });
    if reduce == "mean" {
        let count = scattered(&filled(x, f64::from(u8::from(include))), d, index, &filled(source, 1.0), add);
        out.zip_mut_with(&count, |sum, &count| *sum /= count.max(1.0));
    }
    out
}

/// Computes NumPy's indexing with several index arrays, such as `x[i, :, j]`. Returns the result's shape, and the position in x for
/// each element of the result.
fn named(shape: &[usize], dims: &[usize], indices: &[&ArrayD<f64>]) -> (Vec<usize>, Vec<Vec<usize>>) {
    let rank = indices.iter().map(|i| i.ndim()).max().unwrap();
    let size = |d: usize| {
        let sizes = indices.iter().filter_map(|i| (d + i.ndim()).checked_sub(rank).map(|k| i.shape()[k]));
        sizes.fold(1, |a, n| if n == 1 { a } else { n })
    };
    let places: Vec<usize> = (0..rank).map(size).collect();
    let neighbours = dims.windows(2).all(|d| d[1] == d[0] + 1);
    let first = if neighbours { dims[0] } else { 0 };
    let kept: Vec<usize> = (0..shape.len()).filter(|d| !dims.contains(d)).collect();
    let mut result: Vec<usize> = kept[..first].iter().map(|&d| shape[d]).collect();
    result.extend(&places);
    result.extend(kept[first..].iter().map(|&d| shape[d]));
    let positions = ndarray::indices(IxDyn(&result)).into_iter().map(|p| {
        let mut at = vec![0; shape.len()];
        for (k, &d) in kept.iter().enumerate() {
            at[d] = p[if k < first { k } else { k + rank }];
        }
        for (index, &d) in indices.iter().zip(dims) {
            let stretched = index.broadcast(IxDyn(&places)).unwrap();
            let i = stretched[&p.slice()[first..first + rank]];
            at[d] = (i as isize).rem_euclid(shape[d] as isize) as usize;
        }
        at
    });
    let positions = positions.collect();
    (result, positions)
}

fn read(x: &ArrayD<f64>, dims: &[usize], indices: &[&ArrayD<f64>]) -> ArrayD<f64> {
    let (shape, positions) = named(x.shape(), dims, indices);
    ArrayD::from_shape_vec(IxDyn(&shape), positions.iter().map(|p| x[&p[..]]).collect()).unwrap()
}

fn put(
    x: &ArrayD<f64>,
    dims: &[usize],
    indices: &[&ArrayD<f64>],
    values: &ArrayD<f64>,
    f: impl Fn(&mut f64, f64),
) -> ArrayD<f64> {
    let (shape, positions) = named(x.shape(), dims, indices);
    let values = values.broadcast(IxDyn(&shape)).unwrap();
    let mut out = x.clone();
    for (p, &v) in positions.iter().zip(&values) {
        f(&mut out[&p[..]], v);
    }
    out
}

/// Returns the elements as a vector, in row-major order.
fn flat(x: &ArrayD<f64>) -> ArrayD<f64> {
    ArrayD::from_shape_vec(IxDyn(&[x.len()]), x.iter().copied().collect()).unwrap()
}

fn selections() -> Vec<Case> {
    let mut cases = Vec::new();
    for (shape, dim, count) in
        [(&[4, 5][..], 1, 7), (&[4, 5], 0, 3), (&[3, 2, 65], -1, 4), (&[2, 0, 3], 2, 4), (&[3, 4], 0, 0)]
    {
        let d = axis(dim, shape.len());
        let size = shape[d];
        cases.push(
            (case("index_select").input(shape).arg(dim).index(&[count], size))
                .with_reference(move |x| vec![x[0].select(Axis(d), &indices(&x[1]))]),
        );
        let mut picked = shape.to_vec();
        picked[d] = count;
        cases.push(
            (case("gather").input(shape).arg(dim).index(&picked, size)).with_reference(move |x| vec![gathered(&x[0], d, &x[1])]),
        );
        cases.push(
            (case("take_along_dim").input(shape).arg(dim).index(&picked, size))
                .with_reference(move |x| vec![gathered(&x[0], d, &x[1])]),
        );
    }
    // Further cases: an index smaller than the tensor, a broadcast index, and flattened operands.
    cases.push(case("gather").input(&[5, 7]).arg(1).index(&[3, 4], 7).with_reference(|x| vec![gathered(&x[0], 1, &x[1])]));
    cases.push(case("take_along_dim").input(&[1, 6]).arg(1).index(&[3, 2], 6).with_reference(|x| {
        let wide = x[0].broadcast(IxDyn(&[3, 6])).unwrap().to_owned();
        vec![gathered(&wide, 1, &x[1])]
    }));
    cases.push(
        (case("take_along_dim").input(&[3, 4]).index(&[2, 5], 12))
            .with_reference(|x| vec![gathered(&flat(&x[0]), 0, &flat(&x[1]))]),
    );
    for (rows, index) in [(5, &[2, 3][..]), (5, &[]), (7, &[0, 2]), (1, &[4])] {
        let shape: Vec<usize> = index.iter().copied().chain([3]).collect();
        let rows_of = move |x: &[ArrayD<f64>]| {
            let rows = x[0].select(Axis(0), &indices(&x[1]));
            vec![rows.into_shape_with_order(IxDyn(&shape)).unwrap()]
        };
        cases.push(case("embedding").input(&[rows, 3]).index(index, rows).with_reference(rows_of.clone()));
        cases.push(case("embedding_with").input(&[rows, 3]).index(index, rows).with_reference(rows_of));
    }
    for shape in [&[4][..], &[2, 3], &[0, 2], &[]] {
        cases.push(case("one_hot").index(shape, 5).arg(5).with_reference(|x| {
            let shape: Vec<usize> = x[0].shape().iter().copied().chain([5]).collect();
            let classes = indices(&x[0]);
            vec![
                ArrayD::from_shape_vec(
                    IxDyn(&shape),
                    classes.iter().flat_map(|&c| (0..5).map(move |k| f64::from(u8::from(k == c)))).collect(),
                )
                .unwrap(),
            ]
        }));
    }
    cases
}

fn writes() -> Vec<Case> {
    let mut cases = Vec::new();
    // Indices are not repeated in operations in which the last write wins: as in PyTorch, overwritten sources get a gradient too,
    // which finite differences would contradict.
    let places = || fixed(&[2, 0, 4, 1, 3, 0, 0, 4, 2], &[3, 3]);
    let columns = || fixed(&[3, 0, 4], &[3]);
    let none = || fixed(&[], &[0]);
    let whole = |name: &str| case(name).input(&[3, 5]).arg(1).fixed(places(), DType::I64);
    cases.push(whole("scatter").input(&[3, 3]).with_reference(|x| vec![scattered(&x[0], 1, &x[1], &x[2], set)]));
    cases.push(whole("scatter").input(&[4, 3]).with_reference(|x| vec![scattered(&x[0], 1, &x[1], &x[2], set)]));
    cases.push((whole("scatter_value").arg(1)).with_reference(|x| vec![scattered(&x[0], 1, &x[1], &filled(&x[1], 1.0), set)]));
    let in_place = |name: &str| case(name).distinct(&[3, 5]).arg(1).fixed(places(), DType::I64);
    cases.push(in_place("scatter_").input(&[3, 3]).with_reference(|x| vec![scattered(&x[0], 1, &x[1], &x[2], set)]));
    cases.push(
        (in_place("scatter_value_").arg(1)).with_reference(|x| vec![scattered(&x[0], 1, &x[1], &filled(&x[1], 1.0), set)]),
    );
    cases.push(in_place("scatter_add_").input(&[3, 3]).with_reference(|x| vec![scattered(&x[0], 1, &x[1], &x[2], add)]));
    for (shape, dim, count) in [(&[4, 5][..], 1, 9), (&[7, 3], 0, 4), (&[2, 17, 3], -2, 64), (&[3, 4], 1, 0)] {
        let d = axis(dim, shape.len());
        let mut picked = shape.to_vec();
        picked[d] = count;
        let size = shape[d];
        cases.push(
            (case("scatter_add").input(shape).arg(dim).index(&picked, size).input(&picked))
                .with_reference(move |x| vec![scattered(&x[0], d, &x[1], &x[2], add)]),
        );
        cases.push(
            (case("index_add").input(shape).arg(dim).index(&[count], size).input(&picked))
                .with_reference(move |x| vec![scattered(&x[0], d, &expand_index(&x[1], d, &x[2]), &x[2], add)]),
        );
    }
    for (name, f) in [("index_copy", set as fn(&mut f64, f64)), ("index_copy_", set), ("index_add_", add)] {
        let target = |case: Case, shape| if name.ends_with('_') { case.distinct(shape) } else { case.input(shape) };
        let of = move |x: &[ArrayD<f64>]| vec![scattered(&x[0], 1, &expand_index(&x[1], 1, &x[2]), &x[2], f)];
        cases.push(target(case(name), &[2, 5]).arg(-1).fixed(columns(), DType::I64).input(&[2, 3]).with_reference(of));
        cases.push(target(case(name), &[2, 5]).arg(1).fixed(none(), DType::I64).input(&[2, 0]).with_reference(of));
    }
    for name in ["index_add_alpha", "index_add_alpha_"] {
        let target = |shape| if name.ends_with('_') { case(name).distinct(shape) } else { case(name).input(shape) };
        let of = |x: &[ArrayD<f64>]| vec![scattered(&x[0], 1, &expand_index(&x[1], 1, &x[2]), &x[2].mapv(|x| 2.0 * x), add)];
        cases.push(target(&[2, 5]).arg(-1).fixed(columns(), DType::I64).input(&[2, 3]).arg(2).with_reference(of));
        cases.push(target(&[2, 5]).arg(1).fixed(none(), DType::I64).input(&[2, 0]).arg(2.0).with_reference(of));
    }
    for name in ["index_fill", "index_fill_"] {
        let target = |shape| if name.ends_with('_') { case(name).distinct(shape) } else { case(name).input(shape) };
        let of = |x: &[ArrayD<f64>]| {
            let mut out = x[0].clone();
            for &i in &x[1] {
                let i = (i as isize).rem_euclid(out.shape()[1] as isize) as usize;
                out.index_axis_mut(Axis(1), i).fill(1.0);
            }
            vec![out]
        };
        let index = fixed(&[1, -1, 1, -5], &[4]);
        cases.push(target(&[3, 5]).arg(1).fixed(index, DType::I64).arg(1).with_reference(of));
        cases.push(target(&[3, 5]).arg(-1).fixed(none(), DType::I64).arg(1).with_reference(of));
        cases.push(target(&[0, 5]).arg(1).fixed(columns(), DType::I64).arg(1).with_reference(of));
    }
    // Empty sources and empty destinations.
    for name in ["scatter", "scatter_", "scatter_add_"] {
        let target = if name.ends_with('_') { case(name).distinct(&[3, 5]) } else { case(name).input(&[3, 5]) };
        cases.push(target.arg(0).fixed(fixed(&[], &[0, 5]), DType::I64).input(&[0, 5]).with_reference(|x| vec![x[0].clone()]));
    }
    for name in ["scatter_value", "scatter_value_"] {
        let target = if name.ends_with('_') { case(name).distinct(&[3, 5]) } else { case(name).input(&[3, 5]) };
        cases.push(target.arg(0).fixed(fixed(&[], &[3, 0]), DType::I64).arg(1).with_reference(|x| vec![x[0].clone()]));
    }
    cases
}

fn reductions() -> Vec<Case> {
    let mut cases = Vec::new();
    for reduce in ["sum", "prod", "mean", "amax", "amin"] {
        for include in [true, false] {
            let floats = move |case: Case| if reduce == "mean" { case.floats() } else { case };
            let of = move |x: &[ArrayD<f64>]| vec![reduced(&x[0], 1, &x[1], &x[2], reduce, include)];
            let whole = case("scatter_reduce").input(&[3, 5]).arg(1).index(&[2, 7], 5).input(&[3, 8]);
            cases.push(floats(whole.arg(reduce).arg(include).with_reference(of)));
            let whole = case("scatter_reduce_").distinct(&[3, 5]).arg(1).index(&[2, 7], 5).input(&[3, 8]);
            cases.push(floats(whole.arg(reduce).arg(include).with_reference(of)));
            let slices = case("index_reduce").input(&[3, 5]).arg(1).index(&[4], 5).input(&[3, 4]);
            cases.push(floats(
                slices
                    .arg(reduce)
                    .arg(include)
                    .with_reference(move |x| vec![reduced(&x[0], 1, &expand_index(&x[1], 1, &x[2]), &x[2], reduce, include)]),
            ));
        }
    }
    let none = |name: &str| {
        let target = if name.ends_with('_') { case(name).distinct(&[3, 5]) } else { case(name).input(&[3, 5]) };
        let shape: &[usize] = if name == "index_reduce" { &[0] } else { &[3, 0] };
        target.arg(1).index(shape, 5).input(&[3, 0]).arg("prod").arg(false).with_reference(|x| vec![x[0].clone()])
    };
    cases.extend(["scatter_reduce", "scatter_reduce_", "index_reduce"].map(none));
    cases
}

fn several() -> Vec<Case> {
    let mut cases = Vec::new();
    let (i, j) = (fixed(&[0, -1, 2], &[3]), fixed(&[1, -3, 0, 1, 2, 2], &[2, 3]));
    for (shape, dims, given) in [
        (&[4, 5][..], &[0, 1][..], vec![i.clone(), j.clone()]),
        (&[4, 5], &[1], vec![j.clone()]),
        (&[3, 4, 5], &[0, 2], vec![i.clone(), j.clone()]),
        (&[3, 4, 5, 2], &[1, 2], vec![j.clone(), fixed(&[4], &[1])]),
        (&[3, 4, 3], &[0, 1, 2], vec![i.clone(), fixed(&[3], &[]), j.clone()]),
        (&[0, 4], &[1], vec![j.clone()]),
        (&[5, 4], &[0, 1], vec![fixed(&[], &[0]), fixed(&[], &[0])]),
    ] {
        let with = |mut case: Case| {
            for index in &given {
                case = case.fixed(index.clone(), DType::I64);
            }
            case.arg(&dims.to_vec()[..])
        };
        cases.push(
            with(case("index").input(shape))
                .with_reference(move |x| vec![read(&x[0], dims, &x[1..].iter().collect::<Vec<_>>())]),
        );
        let (all, _) = named(shape, dims, &given.iter().collect::<Vec<_>>());
        // Values of the full shape, and values that are broadcast.
        for values in [&all[..], &all[all.len() - 1..], &[]] {
            for name in ["index_put", "index_put_"] {
                let target = if name.ends_with('_') { case(name).distinct(shape) } else { case(name).input(shape) };
                let of =
                    move |x: &[ArrayD<f64>]| vec![put(&x[0], dims, &x[2..].iter().collect::<Vec<_>>(), &x[1], add)];
                cases.push(with(target.input(values)).arg(true).with_reference(of));
            }
        }
    }
    // Indices are not repeated, for the reason given in `writes`.
    for name in ["index_put", "index_put_"] {
        let target = if name.ends_with('_') { case(name).distinct(&[4, 5, 2]) } else { case(name).input(&[4, 5, 2]) };
        let (i, j) = (fixed(&[0, -1, 2], &[3]), fixed(&[1, -3, 0], &[3]));
        let of = |x: &[ArrayD<f64>]| vec![put(&x[0], &[0, 1], &x[2..].iter().collect::<Vec<_>>(), &x[1], set)];
        let with = target.input(&[3, 1]).fixed(i, DType::I64).fixed(j, DType::I64);
        cases.push(with.arg(&[0, 1][..]).arg(false).with_reference(of));
    }
    for (shape, index) in [(&[3, 4][..], fixed(&[0, -1, 5, 5, 11, -12], &[2, 3])), (&[3, 4], fixed(&[], &[0]))] {
        cases.push((case("take").input(shape).fixed(index.clone(), DType::I64)).with_reference(|x| {
            let all = flat(&x[0]);
            vec![x[1].mapv(|i| all[(i as isize).rem_euclid(12) as usize])]
        }));
        for name in ["put", "put_"] {
            let target = if name.ends_with('_') { case(name).distinct(shape) } else { case(name).input(shape) };
            let with = target.fixed(index.clone(), DType::I64).input(index.shape()).arg(true);
            cases.push(with.with_reference(|x| {
                let sum = put(&flat(&x[0]), &[0], &[&flat(&x[1])], &flat(&x[2]), add);
                vec![sum.into_shape_with_order(x[0].raw_dim()).unwrap()]
            }));
        }
    }
    cases
}

/// Returns cases of bool masks, which work as in NumPy.
fn masks() -> Vec<Case> {
    let mut cases = Vec::new();
    let trues = |mask: &ArrayD<f64>| -> Vec<Vec<usize>> {
        mask.indexed_iter().filter(|(_, m)| **m != 0.0).map(|(p, _)| p.slice().to_vec()).collect()
    };
    for (shape, mask) in [(&[5, 3][..], &[5][..]), (&[4, 3], &[4, 3]), (&[3, 4, 2], &[3, 4]), (&[0, 3], &[0])] {
        let rank = mask.len();
        cases.push(case("index").input(shape).mask(mask).arg(&[0][..]).with_reference(move |x| {
            let rows = trues(&x[1]);
            let shape = [&[rows.len()], &x[0].shape()[rank..]].concat();
            vec![ArrayD::from_shape_fn(IxDyn(&shape), |p| x[0][&[&rows[p[0]], &p.slice()[1..]].concat()[..]])]
        }));
        for name in ["index_put", "index_put_"] {
            let target = if name.ends_with('_') { case(name).distinct(shape) } else { case(name).input(shape) };
            cases.push(target.input(&[]).mask(mask).arg(&[0][..]).arg(false).with_reference(move |x| {
                let (value, mut out) = (x[1].first().copied().unwrap(), x[0].clone());
                for (p, to) in out.indexed_iter_mut() {
                    if x[2][&p.slice()[..rank]] != 0.0 {
                        *to = value;
                    }
                }
                vec![out]
            }));
        }
    }
    for (shape, mask) in [(&[4, 5][..], &[4, 5][..]), (&[4, 5], &[5]), (&[3, 2], &[3, 1]), (&[0, 2], &[2])] {
        for name in ["masked_scatter", "masked_scatter_"] {
            let target = if name.ends_with('_') { case(name).distinct(shape) } else { case(name).input(shape) };
            cases.push(target.mask(mask).input(&[7, 3]).with_reference(|x| {
                let (mask, mut from) = (x[1].broadcast(x[0].raw_dim()).unwrap(), x[2].iter());
                let mut out = x[0].clone();
                out.zip_mut_with(&mask, |to, &m| {
                    if m != 0.0 {
                        *to = *from.next().unwrap();
                    }
                });
                vec![out]
            }));
        }
    }
    cases
}

pub fn cases() -> Vec<Case> {
    [selections(), writes(), reductions(), several(), masks()].into_iter().flatten().collect()
}

//! Products, contractions, norms and distances, compared with sums over all indices.

use std::collections::BTreeMap;

use claystone::device::count_launches;
use claystone::{DType, Device, Error, Tensor};
use ndarray::{ArrayD, Axis, IxDyn};

use crate::common::{each_device, f64s, reference};
use crate::harness::{Case, case};

fn shaped(x: ArrayD<f64>, shape: &[usize]) -> ArrayD<f64> {
    ArrayD::from_shape_vec(IxDyn(shape), x.iter().copied().collect()).unwrap()
}

fn scalar(x: f64) -> ArrayD<f64> {
    ArrayD::from_elem(IxDyn(&[]), x)
}

/// Returns the matrix product. Vectors are treated as in PyTorch.
fn matmul(a: &ArrayD<f64>, b: &ArrayD<f64>) -> ArrayD<f64> {
    let (row, column) = (a.ndim() == 1, b.ndim() == 1);
    let mut out = reference(
        &if row { a.clone().insert_axis(Axis(0)) } else { a.clone() },
        &if column { b.clone().insert_axis(Axis(1)) } else { b.clone() },
    );
    if column {
        let last = Axis(out.ndim() - 1);
        out = out.index_axis_move(last, 0);
    }
    if row {
        let rows = Axis(out.ndim() - usize::from(!column) - 1);
        out = out.index_axis_move(rows, 0);
    }
    out
}

/// Computes einsum without an ellipsis, by a loop over every value of every letter.
fn einsum(equation: &str, x: &[ArrayD<f64>]) -> ArrayD<f64> {
    let (inputs, output) = equation.split_once("->").unwrap();
    let inputs: Vec<Vec<char>> = inputs.split(',').map(|s| s.chars().collect()).collect();
    let output: Vec<char> = output.chars().collect();
    let mut sizes: BTreeMap<char, usize> = BTreeMap::new();
    for (letters, x) in inputs.iter().zip(x) {
        for (&c, &n) in letters.iter().zip(x.shape()) {
            let size = sizes.entry(c).or_insert(n);
            *size = if *size == 1 { n } else { *size };
        }
    }
    let letters: Vec<char> = sizes.keys().copied().collect();
    let shape: Vec<usize> = output.iter().map(|c| sizes[c]).collect();
    let mut out = ArrayD::zeros(IxDyn(&shape));
    for p in ndarray::indices(IxDyn(&sizes.values().copied().collect::<Vec<_>>())) {
        let at = |c: &char| p[letters.iter().position(|l| l == c).unwrap()];
        let factor = |(letters, x): (&Vec<char>, &ArrayD<f64>)| {
            let i: Vec<usize> = letters.iter().zip(x.shape()).map(|(c, &n)| if n == 1 { 0 } else { at(c) }).collect();
            x[&i[..]]
        };
        let product: f64 = inputs.iter().zip(x).map(factor).product();
        let to: Vec<usize> = output.iter().map(at).collect();
        out[&to[..]] += product;
    }
    out
}

fn products() -> Vec<Case> {
    let mut cases = Vec::new();
    for (a, b) in [
        (&[3, 4][..], &[4, 5][..]),
        (&[17, 33], &[33, 16]),
        (&[2, 3, 4], &[4, 5]),
        (&[3, 4], &[2, 4, 5]),
        (&[2, 1, 3, 4], &[5, 4, 2]),
        (&[4], &[4]),
        (&[4], &[4, 3]),
        (&[3, 4], &[4]),
        (&[4], &[2, 4, 3]),
        (&[2, 3, 4], &[4]),
        (&[3, 0], &[0, 2]),
        (&[0, 3], &[3, 2]),
        (&[0], &[0]),
        (&[2, 0, 3], &[3, 2]),
    ] {
        cases.push(case("matmul").input(a).input(b).with_reference(|x| vec![matmul(&x[0], &x[1])]));
    }
    for (name, a, b) in [
        ("mm", &[3, 4][..], &[4, 2][..]),
        ("mm", &[3, 0], &[0, 2]),
        ("bmm", &[2, 3, 4], &[2, 4, 3]),
        ("bmm", &[0, 3, 4], &[0, 4, 3]),
        ("bmm", &[2, 3, 0], &[2, 0, 3]),
        ("mv", &[3, 4], &[4]),
        ("mv", &[3, 0], &[0]),
        ("dot", &[7], &[7]),
        ("dot", &[0], &[0]),
        ("vdot", &[7], &[7]),
        ("vdot", &[0], &[0]),
    ] {
        cases.push(case(name).input(a).input(b).with_reference(|x| vec![matmul(&x[0], &x[1])]));
    }
    for (shape, out) in [(&[3, 4][..], 5), (&[2, 3, 4], 1), (&[4], 3), (&[0, 4], 2), (&[17, 33], 16)] {
        let features = shape[shape.len() - 1];
        let whole = case("linear").input(shape).input(&[out, features]);
        cases.push(whole.with_reference(|x| vec![matmul(&x[0], &x[1].t().to_owned())]));
        let whole = case("linear").input(shape).input(&[out, features]).input(&[out]);
        cases.push(whole.with_reference(|x| vec![matmul(&x[0], &x[1].t().to_owned()) + &x[2]]));
    }
    for (a, b) in [(3, 4), (0, 4), (1, 1)] {
        for name in ["outer", "ger"] {
            cases.push(case(name).input(&[a]).input(&[b]).with_reference(|x| vec![einsum("i,j->ij", x)]));
        }
    }
    type Right = fn(&[ArrayD<f64>]) -> ArrayD<f64>;
    /// An operation, the shapes of its two matrices or vectors, the shapes of the tensors to add to their product, and the function
    /// that computes the product.
    type Added<'a> = (&'a str, [&'a [usize]; 2], &'a [&'a [usize]], Right);
    let added: [Added; 11] = [
        ("addmm", [&[3, 4], &[4, 5]], &[&[3, 5], &[5], &[3, 1], &[]], |x| matmul(&x[1], &x[2])),
        ("addmm", [&[3, 0], &[0, 5]], &[&[3, 5]], |x| matmul(&x[1], &x[2])),
        ("addmv", [&[3, 4], &[4]], &[&[3], &[1]], |x| matmul(&x[1], &x[2])),
        ("addmv", [&[0, 4], &[4]], &[&[0]], |x| matmul(&x[1], &x[2])),
        ("addr", [&[3], &[4]], &[&[3, 4], &[4]], |x| einsum("i,j->ij", &x[1..])),
        ("addr", [&[3], &[0]], &[&[3, 0]], |x| einsum("i,j->ij", &x[1..])),
        ("baddbmm", [&[2, 3, 4], &[2, 4, 5]], &[&[2, 3, 5], &[3, 1]], |x| matmul(&x[1], &x[2])),
        ("baddbmm", [&[0, 3, 4], &[0, 4, 5]], &[&[0, 3, 5]], |x| matmul(&x[1], &x[2])),
        ("addbmm", [&[2, 3, 4], &[2, 4, 5]], &[&[3, 5], &[5]], |x| einsum("bij,bjk->ik", &x[1..])),
        ("addbmm", [&[0, 3, 4], &[0, 4, 5]], &[&[3, 5]], |x| einsum("bij,bjk->ik", &x[1..])),
        ("addbmm", [&[2, 3, 0], &[2, 0, 5]], &[&[3, 5]], |x| einsum("bij,bjk->ik", &x[1..])),
    ];
    for (name, [a, b], inputs, product) in added {
        for (input, beta, alpha) in inputs.iter().zip([(2, -1), (1, 1), (0, 3), (3, 2)]).map(|(i, (b, a))| (i, b, a)) {
            let of = move |x: &[ArrayD<f64>]| {
                let product = product(x) * f64::from(alpha);
                vec![&x[0].broadcast(product.raw_dim()).unwrap() * f64::from(beta) + product]
            };
            cases.push(case(name).input(input).input(a).input(b).arg(beta).arg(alpha).with_reference(of));
        }
    }
    let fractions = case("addmm").floats().input(&[2]).input(&[3, 4]).input(&[4, 2]).arg(0.5).arg(-1.25);
    cases.push(fractions.with_reference(|x| vec![&x[0] * 0.5 + matmul(&x[1], &x[2]) * -1.25]));
    cases
}

fn contractions() -> Vec<Case> {
    let mut cases = Vec::new();
    for (equation, spelled, shapes) in [
        ("ij->ji", "", &[&[3, 4][..]][..]),
        ("ij->", "", &[&[3, 4]]),
        ("ij->j", "", &[&[3, 4]]),
        ("ii->i", "", &[&[3, 3]]),
        ("ii", "ii->", &[&[3, 3]]),
        ("ba", "ba->ab", &[&[3, 4]]),
        ("iij->j", "", &[&[3, 3, 2]]),
        ("...ij->...ji", "abij->abji", &[&[2, 3, 4, 5]]),
        ("... ii -> ...", "abii->ab", &[&[2, 3, 4, 4]]),
        ("...i->i", "abi->i", &[&[2, 3, 4]]),
        ("ij,jk->ik", "", &[&[3, 4], &[4, 5]]),
        ("ij,jk", "ij,jk->ik", &[&[3, 4], &[4, 5]]),
        ("ij,kj->ki", "", &[&[3, 4], &[5, 4]]),
        ("i,i->", "", &[&[5], &[5]]),
        ("i,j->ij", "", &[&[3], &[4]]),
        ("ij,ij->ij", "", &[&[3, 4], &[3, 4]]),
        ("ij,ij->i", "", &[&[3, 4], &[3, 4]]),
        ("ij,jk->", "", &[&[3, 4], &[4, 5]]),
        ("bij,bjk->bik", "", &[&[2, 3, 4], &[2, 4, 5]]),
        ("bhld,bhsd->bhls", "", &[&[2, 3, 4, 2], &[2, 3, 5, 2]]),
        ("blhd,bshd->bhls", "", &[&[2, 4, 3, 2], &[2, 5, 3, 2]]),
        ("abcd,cbe->ade", "", &[&[2, 3, 4, 2], &[4, 3, 3]]),
        ("abc,cab->", "", &[&[2, 3, 4], &[4, 2, 3]]),
        ("iij,jk->ik", "", &[&[3, 3, 4], &[4, 2]]),
        ("ij,jk->ik", "", &[&[3, 1], &[4, 5]]),
        ("ij,j,jk,k->i", "", &[&[3, 4], &[4], &[4, 5], &[5]]),
        ("ab,bc,cd->ad", "", &[&[2, 3], &[3, 4], &[4, 2]]),
        ("i,i,i->", "", &[&[4], &[4], &[4]]),
        ("...ij,...jk->...ik", "abij,bjk->abik", &[&[2, 3, 2, 4], &[3, 4, 2]]),
        ("...i,ij", "abi,ij->abj", &[&[2, 3, 4], &[4, 5]]),
        ("Ab,bC", "Ab,bC->AC", &[&[3, 4], &[4, 2]]),
        ("ij,jk->ik", "", &[&[3, 0], &[0, 2]]),
        ("ij,jk->ik", "", &[&[0, 3], &[3, 2]]),
        ("ij->i", "", &[&[3, 0]]),
    ] {
        let mut whole = case("einsum");
        for shape in shapes {
            whole = whole.input(shape);
        }
        let spelled = if spelled.is_empty() { equation } else { spelled };
        // The tolerance is larger for several operands, because each intermediate contraction is rounded.
        let whole = if shapes.len() > 1 { whole.tolerance(4.0) } else { whole };
        cases.push(whole.arg(equation).with_reference(move |x| vec![einsum(spelled, x)]));
    }
    for (a, b, dims, equation) in [
        (&[2, 3, 4][..], &[4, 5][..], None, "abc,cd->abd"),
        (&[2, 3, 4], &[3, 4, 5], Some((&[1, 2][..], &[0, 1][..])), "abc,bcd->ad"),
        (&[2, 3, 4], &[4, 3, 5], Some((&[-1, 1], &[0, 1])), "abc,cbd->ad"),
        (&[2, 3], &[3, 2], Some((&[], &[])), "ab,cd->abcd"),
        (&[2, 0], &[0, 2], Some((&[1], &[0])), "ab,bc->ac"),
    ] {
        let whole = case("tensordot").input(a).input(b);
        let whole = match dims {
            None => whole.arg(1),
            Some((left, right)) => whole.arg(left).arg(right),
        };
        cases.push(whole.with_reference(move |x| vec![einsum(equation, x)]));
    }
    for (a, b, equation) in [
        (&[4][..], &[4][..], "i,i->"),
        (&[2, 3], &[4, 3], "ai,bi->ab"),
        (&[2, 3, 2], &[2], "abi,i->ab"),
        (&[], &[3], ",i->i"),
        (&[2, 0], &[3, 0], "ai,bi->ab"),
    ] {
        cases.push(case("inner").input(a).input(b).with_reference(move |x| vec![einsum(equation, x)]));
    }
    for shapes in [&[&[2, 3][..], &[3, 4], &[4, 2]][..], &[&[3], &[3, 4], &[4, 2]], &[&[5, 2], &[2, 7], &[7, 1], &[1]]]
    {
        let whole = shapes.iter().fold(case("multi_dot"), |case, shape| case.input(shape));
        // The tolerance is larger, because products of more factors have larger values.
        cases.push(whole.tolerance(4.0).with_reference(|x| vec![x[1..].iter().fold(x[0].clone(), |a, b| matmul(&a, b))]));
    }
    cases.push(case("multi_dot").input(&[2, 0]).input(&[0, 3]).with_reference(|x| vec![matmul(&x[0], &x[1])]));
    for (shape, n) in [(&[3, 3][..], 0), (&[3, 3], 1), (&[3, 3], 2), (&[2, 3, 3], 5), (&[0, 0], 3), (&[0, 2, 2], 0)] {
        // The tolerance is larger, because each squaring rounds and the values grow.
        let whole = case("matrix_power").input_in(shape, -0.7..0.7).arg(n).tolerance(4.0);
        let whole = if n == 0 { whole.no_gradient() } else { whole };
        let whole = if n > 2 { whole.floats() } else { whole };
        cases.push(whole.with_reference(move |x| {
            let d = x[0].ndim() - 1;
            let one = ArrayD::from_shape_fn(x[0].raw_dim(), |p| f64::from(u8::from(p[d] == p[d - 1])));
            vec![(0..n).fold(one, |power, _| reference(&power, &x[0]))]
        }));
    }
    for shape in [[3, 3], [2, 5], [5, 2], [0, 3]] {
        cases.push(case("trace").input(&shape).with_reference(|x| {
            let n = x[0].shape()[0].min(x[0].shape()[1]);
            vec![scalar((0..n).map(|i| x[0][[i, i]]).sum())]
        }));
    }
    for (a, b) in [(&[2, 3][..], &[3, 2][..]), (&[2], &[2, 3]), (&[2, 1, 3], &[2]), (&[], &[2, 2]), (&[0, 2], &[3, 2])]
    {
        cases.push(case("kron").input(a).input(b).with_reference(|x| {
            let rank = x[0].ndim().max(x[1].ndim());
            let padded = |x: &ArrayD<f64>| {
                let shape = [vec![1; rank - x.ndim()], x.shape().to_vec()].concat();
                shaped(x.clone(), &shape)
            };
            let (a, b) = (padded(&x[0]), padded(&x[1]));
            let shape: Vec<usize> = a.shape().iter().zip(b.shape()).map(|(m, n)| m * n).collect();
            vec![ArrayD::from_shape_fn(IxDyn(&shape), |p| {
                let part =
                    |f: fn(usize, usize) -> usize| -> Vec<usize> { (0..rank).map(|d| f(p[d], b.shape()[d])).collect() };
                a[&part(|i, n| i / n)[..]] * b[&part(|i, n| i % n)[..]]
            })]
        }));
    }
    for (a, b, dim) in
        [(&[2, 3][..], &[2, 3][..], -1), (&[3, 4], &[3, 4], 0), (&[1, 3], &[4, 3], 1), (&[0, 3], &[0, 3], 1)]
    {
        let d = if dim < 0 { 1 } else { dim as usize };
        cases.push(case("cross").input(a).input(b).arg(dim).with_reference(move |x| {
            let shape: Vec<usize> =
                x[0].shape().iter().zip(x[1].shape()).map(|(&m, &n)| if m == 1 { n } else { m }).collect();
            let (a, b) = (x[0].broadcast(IxDyn(&shape)).unwrap(), x[1].broadcast(IxDyn(&shape)).unwrap());
            vec![ArrayD::from_shape_fn(IxDyn(&shape), |p| {
                let at = |t: &ndarray::ArrayViewD<f64>, i: usize| {
                    let mut p = p.clone();
                    p[d] = (p[d] + i) % 3;
                    t[&p]
                };
                at(&a, 1) * at(&b, 2) - at(&a, 2) * at(&b, 1)
            })]
        }));
    }
    cases
}

/// Returns the norm of order `p` of a vector.
fn norm(x: impl Iterator<Item = f64>, p: f64) -> f64 {
    let x = x.map(f64::abs);
    match p {
        0.0 => x.filter(|&x| x != 0.0).count() as f64,
        f64::INFINITY => x.fold(0.0, f64::max),
        f64::NEG_INFINITY => x.fold(f64::INFINITY, f64::min),
        p => x.map(|x| x.powf(p)).sum::<f64>().powf(1.0 / p),
    }
}

fn norms() -> Vec<Case> {
    let mut cases = Vec::new();
    for p in [0.0, 1.0, 2.0, 3.0, 0.5, f64::INFINITY, f64::NEG_INFINITY] {
        // The tolerance is larger, because roots of sums of powers round more than once. The 0-norm counts elements, so its
        // gradient is zero and not checked.
        let whole = |shape: &[usize]| {
            let whole = case("vector_norm").input(shape).arg(p).tolerance(4.0);
            if p == 0.0 { whole.no_gradient() } else { whole }
        };
        cases.push(
            whole(&[3, 5])
                .arg(1)
                .arg(false)
                .with_reference(move |x| vec![x[0].map_axis(Axis(1), |row| norm(row.iter().copied(), p))]),
        );
        // With an expanded operand, several elements are the maximum or minimum. Finite differences then differ from the gradient,
        // which is not checked.
        let both = if p.is_infinite() { whole(&[3, 5]).no_gradient() } else { whole(&[3, 5]) };
        cases.push(both.arg(&[0, 1]).arg(true)
                .with_reference(move |x| vec![ArrayD::from_elem(IxDyn(&[1, 1]), norm(x[0].iter().copied(), p))]),
        );
        cases.push(whole(&[0, 3]).arg(1).arg(false).with_reference(|_| vec![ArrayD::zeros(IxDyn(&[0]))]));
        if p < 0.0 {
            continue;
        }
        let distances = move |x: &[ArrayD<f64>]| -> Vec<ArrayD<f64>> {
            let (a, b) = (&x[0], &x[1]);
            let (m, n) = (a.shape()[a.ndim() - 2], b.shape()[b.ndim() - 2]);
            let batch = if a.ndim() > b.ndim() { a.shape() } else { b.shape() };
            let shape = [&batch[..batch.len() - 2], &[m, n]].concat();
            vec![ArrayD::from_shape_fn(IxDyn(&shape), |at| {
                let row = |t: &ArrayD<f64>, i: usize| {
                    let mut t = t.view();
                    for d in 0..t.ndim() - 2 {
                        t.index_axis_inplace(Axis(0), at[d]);
                    }
                    t.index_axis_move(Axis(0), i).iter().copied().collect::<Vec<f64>>()
                };
                let (u, v) = (row(a, at[shape.len() - 2]), row(b, at[shape.len() - 1]));
                norm(u.into_iter().zip(v).map(|(u, v)| u - v), p)
            })]
        };
        let apart = |a: &[usize], b: &[usize]| {
            let whole = case("cdist").input_in(a, 2.0..4.0).input_in(b, -2.0..1.0).arg(p).tolerance(8.0);
            if p == 0.0 { whole.no_gradient() } else { whole }
        };
        cases.push(apart(&[3, 4], &[5, 4]).with_reference(distances));
        cases.push(apart(&[2, 3, 2], &[5, 2]).with_reference(distances));
        cases.push(apart(&[0, 4], &[5, 4]).with_reference(distances));
        cases.push(apart(&[3, 0], &[2, 0]).with_reference(distances));
        // With many points, distances use one matrix product, whose rounding error is relative to the squared norms.
        if p == 2.0 {
            cases.push(apart(&[30, 3], &[5, 3]).tolerance(20.0).with_reference(distances));
            cases.push(apart(&[2, 4, 3], &[27, 3]).tolerance(20.0).with_reference(distances));
        }
        let whole = |shape: &[usize]| {
            let whole = case("pairwise_distance").input_in(shape, 1.0..2.0).input_in(shape, -1.0..0.5);
            let whole = whole.arg(p).arg(0.125).arg(false).tolerance(4.0);
            if p == 0.0 { whole.no_gradient() } else { whole }
        };
        let of = move |x: &[ArrayD<f64>]| {
            let difference = &x[0] - &x[1] + 0.125;
            vec![difference.map_axis(Axis(x[0].ndim() - 1), |row| norm(row.iter().copied(), p))]
        };
        cases.push(whole(&[3, 4]).with_reference(of));
        let one = if p.is_infinite() { whole(&[4]).no_gradient() } else { whole(&[4]) };
        cases.push(one.with_reference(of));
        cases.push(whole(&[0, 4]).with_reference(of));
    }
    for (shape, dim) in [(&[3, 4][..], 1), (&[3, 4], 0), (&[2, 3, 4], -2), (&[0, 4], 1), (&[4, 0], 0)] {
        let d = if dim < 0 { shape.len() - 2 } else { dim as usize };
        cases.push(case("cosine_similarity").input(shape).input(shape).arg(dim).arg(1e-8).tolerance(4.0).with_reference(
            move |x| {
                let length = |x: &ArrayD<f64>| x.map_axis(Axis(d), |row| norm(row.iter().copied(), 2.0).max(1e-8));
                vec![(&x[0] * &x[1]).sum_axis(Axis(d)) / (length(&x[0]) * length(&x[1]))]
            },
        ));
    }
    cases
}

pub fn cases() -> Vec<Case> {
    [products(), contractions(), norms()].into_iter().flatten().collect()
}

#[test]
fn beta_of_zero_ignores_the_added_tensor() {
    each_device(|device| {
        let nan = Tensor::full(&[2], f64::NAN, device).unwrap();
        let (a, b) = (Tensor::ones(&[3, 4], device).unwrap(), Tensor::ones(&[4, 2], device).unwrap());
        assert!(f64s(&nan.addmm(&a, &b, 0, 0.5).unwrap()).iter().all(|&x| x == 2.0));
        let x = nan.shallow_clone().requires_grad_(true).unwrap();
        x.addmm(&a, &b, 0, 1).unwrap().sum((), false).unwrap().backward().unwrap();
        assert!(f64s(&x.grad().unwrap()).iter().all(|&g| g == 0.0));
    });
}

#[test]
fn zero_distances_have_zero_gradients() {
    each_device(|device| {
        for (points, p) in [(3, 2.0), (40, 2.0), (3, 3.0), (3, 1.0)] {
            let x = Tensor::ones(&[points, 2], (DType::F32, device)).unwrap().requires_grad_(true).unwrap();
            let d = x.cdist(&Tensor::ones(&[2, 2], device).unwrap(), p).unwrap();
            assert!(f64s(&d).iter().all(|&d| d == 0.0));
            d.sum((), false).unwrap().backward().unwrap();
            assert!(f64s(&x.grad().unwrap()).iter().all(|&g| g == 0.0), "{points} points, order {p}");
        }
    });
}

#[test]
fn integer_products_wrap_and_are_exact() {
    each_device(|device| {
        let x = Tensor::full(&[2, 2], 1i64 << 40, (DType::I64, device)).unwrap();
        assert_eq!(x.mm(&x).unwrap().to_vec::<i64>().unwrap(), [0; 4]);
        let big = Tensor::full(&[1, 1], (1i64 << 53) + 1, (DType::I64, device)).unwrap();
        let one = Tensor::ones(&[1, 1], (DType::I64, device)).unwrap();
        assert_eq!(Tensor::einsum("ij,jk", &[&big, &one]).unwrap().item::<i64>().unwrap(), (1 << 53) + 1);
    });
}

#[test]
fn contractions_of_strided_operands_take_one_product() {
    each_device(|device| {
        let ones = |shape: &[usize]| Tensor::ones(shape, device).unwrap();
        let (q, k, scores, w) = (ones(&[2, 5, 3, 4]), ones(&[2, 7, 3, 4]), ones(&[2, 3, 5, 7]), ones(&[3, 4, 6]));
        for (equation, operands, products) in [
            ("blhd,bshd->bhls", vec![&q, &k], 1),
            ("bhls,bshd->blhd", vec![&scores, &k], 1),
            ("blhd,hde->ble", vec![&q, &w], 1),
            ("ij,jk,kl->il", vec![&ones(&[2, 3]), &ones(&[3, 4]), &ones(&[4, 5])], 2),
        ] {
            let (_, launches) = count_launches(|| drop(Tensor::einsum(equation, &operands).unwrap()));
            assert_eq!(launches, products, "{equation} on {device}");
        }
    });
}

#[test]
fn mismatched_shapes_are_errors() {
    let (a, b) = (Tensor::zeros(&[2, 3], Device::Cpu).unwrap(), Tensor::zeros(&[4, 5], Device::Cpu).unwrap());
    let einsum = |equation: &str| Tensor::einsum(equation, &[&a, &b]);
    for wrong in
        ["ij,jk->ik", "ij->ij", "ij,kl->iz", "ij,kl->ii", "i,kl", "ij,k1", "...i...,kl", "ijk...,kl", "ij,kl,mn"]
    {
        assert!(matches!(einsum(wrong), Err(Error::Invalid { op: "einsum", .. })), "{wrong}");
    }
    assert!(matches!(a.mm(&b), Err(Error::ShapeMismatch { op: "mm", .. })));
    assert!(matches!(a.bmm(&b), Err(Error::ShapeMismatch { op: "bmm", .. })));
    assert!(matches!(a.tensordot(&b, 1), Err(Error::ShapeMismatch { op: "tensordot", .. })));
    assert!(matches!(a.tensordot(&b, 3), Err(Error::Invalid { op: "tensordot", .. })));
    assert!(matches!(a.tensordot(&b, ([0, 0], [1, 1])), Err(Error::Invalid { op: "tensordot", .. })));
    assert!(matches!(b.addmm(&a, &a.t().unwrap(), 1, 1), Err(Error::ShapeMismatch { op: "addmm", .. })));
    assert!(matches!(a.cross(&b, 1), Err(Error::ShapeMismatch { op: "cross", .. })));
    assert!(matches!(a.matrix_power(2), Err(Error::Invalid { op: "matrix_power", .. })));
    assert!(matches!(a.cdist(&b, 2.0), Err(Error::ShapeMismatch { op: "cdist", .. })));
    let whole = a.to_dtype(DType::I64).unwrap();
    assert!(matches!(whole.addmm(&whole, &whole.t().unwrap(), 0.5, 1), Err(Error::Invalid { op: "addmm", .. })));
}

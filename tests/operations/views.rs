//! Views, compared with index arithmetic.

use claystone::ops::Argument;
use ndarray::{ArrayD, Axis, IxDyn, Slice};

use crate::harness::{Case, case};

/// Returns an array whose elements are a function of their index.
pub fn built(shape: &[usize], f: impl Fn(&[usize]) -> f64) -> ArrayD<f64> {
    ArrayD::from_shape_fn(IxDyn(shape), |i| f(&(0..shape.len()).map(|d| i[d]).collect::<Vec<_>>()))
}

/// Returns the elements in the same order in another shape.
pub fn reshaped(x: &ArrayD<f64>, shape: &[usize]) -> ArrayD<f64> {
    ArrayD::from_shape_vec(IxDyn(shape), x.iter().copied().collect()).expect("as many elements")
}

fn sliced(x: &ArrayD<f64>, d: usize, start: usize, end: usize) -> ArrayD<f64> {
    x.slice_axis(Axis(d), Slice::from(start..end)).to_owned()
}

fn turned(x: &ArrayD<f64>, dims: &[usize]) -> ArrayD<f64> {
    let mut x = x.clone();
    dims.iter().for_each(|&d| x.invert_axis(Axis(d)));
    x
}

fn swapped(x: &ArrayD<f64>, a: usize, b: usize) -> ArrayD<f64> {
    let mut x = x.clone();
    x.swap_axes(a, b);
    x
}

/// Returns the windows along dim d as a new last dim.
fn windows(x: &ArrayD<f64>, d: usize, size: usize, step: usize) -> ArrayD<f64> {
    let mut shape = x.shape().to_vec();
    shape[d] = (shape[d] - size) / step + 1;
    shape.push(size);
    built(&shape, |i| {
        let (inner, outer) = i.split_last().expect("a window");
        let mut at = outer.to_vec();
        at[d] = at[d] * step + inner;
        x[&at[..]]
    })
}

/// Returns the diagonal of dims a and b with offset k.
fn diagonal(x: &ArrayD<f64>, k: isize, a: usize, b: usize) -> ArrayD<f64> {
    let (top, left) = (k.min(0).unsigned_abs(), k.max(0).unsigned_abs());
    let len = x.shape()[a].saturating_sub(top).min(x.shape()[b].saturating_sub(left));
    let rest = |d: &usize| *d != a && *d != b;
    let mut shape: Vec<usize> = (0..x.ndim()).filter(rest).map(|d| x.shape()[d]).collect();
    shape.push(len);
    built(&shape, |i| {
        let (&n, outer) = i.split_last().expect("a diagonal");
        let mut outer = outer.iter();
        let place = |d: usize| match d {
            d if d == a => n + top,
            d if d == b => n + left,
            _ => *outer.next().expect("another dimension"),
        };
        x[&(0..x.ndim()).map(place).collect::<Vec<_>>()[..]]
    })
}

fn pieces(x: &ArrayD<f64>, d: usize, sizes: &[usize]) -> Vec<ArrayD<f64>> {
    let mut end = 0;
    let piece = |&n: &usize| {
        end += n;
        sliced(x, d, end - n, end)
    };
    sizes.iter().map(piece).collect()
}

fn shapes() -> Vec<Case> {
    let mut cases = Vec::new();
    for name in ["reshape", "view"] {
        // `view` refuses incompatible strides. Adding a leading dim is compatible with all strides.
        cases.push(case(name).input(&[2, 3, 4]).arg(&[1, 2, 3, -1]).with_reference(|x| vec![reshaped(&x[0], &[1, 2, 3, 4])]));
        cases.push(case(name).input(&[0, 3]).arg(&[3, -1]).with_reference(|x| vec![reshaped(&x[0], &[3, 0])]));
    }
    cases.push(case("reshape").input(&[4, 6]).arg(&[-1, 8]).with_reference(|x| vec![reshaped(&x[0], &[3, 8])]));
    cases.push(case("reshape").input(&[1]).arg(&[0i32; 0]).with_reference(|x| vec![reshaped(&x[0], &[])]));
    cases.push(case("reshape_as").input(&[4, 6]).input(&[3, 8]).with_reference(|x| vec![reshaped(&x[0], &[3, 8])]));
    cases.push(case("reshape_as").input(&[4, 0]).input(&[0, 8]).with_reference(|x| vec![reshaped(&x[0], &[0, 8])]));
    for shape in [&[][..], &[5], &[3, 4], &[2, 0]] {
        cases.push(case("ravel").input(shape).with_reference(|x| vec![reshaped(&x[0], &[x[0].len()])]));
        cases.push(case("detach").input(shape).with_reference(|x| vec![x[0].clone()]));
        cases.push(case("atleast_1d").input(shape).with_reference(|x| match x[0].ndim() {
            0 => vec![reshaped(&x[0], &[1])],
            _ => vec![x[0].clone()],
        }));
        cases.push(case("atleast_2d").input(shape).with_reference(|x| match x[0].ndim() {
            0 | 1 => vec![reshaped(&x[0], &[1, x[0].len()])],
            _ => vec![x[0].clone()],
        }));
        cases.push(case("atleast_3d").input(shape).with_reference(|x| match x[0].shape() {
            [m, n] => vec![reshaped(&x[0], &[*m, *n, 1])],
            _ => vec![reshaped(&x[0], &[1, x[0].len(), 1])],
        }));
    }
    for shape in [[2, 3, 4], [2, 0, 4]] {
        let [a, b, c] = shape;
        cases.push(case("flatten").input(&shape).arg(0).arg(1).with_reference(move |x| vec![reshaped(&x[0], &[a * b, c])]));
        cases.push(
            case("unflatten").input(&shape).arg(2).arg(&[2, -1]).with_reference(move |x| vec![reshaped(&x[0], &[a, b, 2, 2])]),
        );
        cases.push(case("unsqueeze").input(&shape).arg(-1).with_reference(move |x| vec![reshaped(&x[0], &[a, b, c, 1])]));
        cases.push(
            case("unsqueeze").input(&shape).arg(&[-1, 0, 2]).with_reference(move |x| vec![reshaped(&x[0], &[1, a, 1, b, c, 1])]),
        );
    }
    for shape in [[2, 1, 3, 1], [2, 1, 0, 1]] {
        let [a, _, c, _] = shape;
        cases.push(case("squeeze").input(&shape).arg(1).with_reference(move |x| vec![reshaped(&x[0], &[a, c, 1])]));
        cases.push(case("squeeze").input(&shape).arg(0).with_reference(|x| vec![x[0].clone()]));
        cases.push(case("squeeze_dims").input(&shape).arg(&[-1, 0, 1]).with_reference(move |x| vec![reshaped(&x[0], &[a, c])]));
        cases.push(case("squeeze_all").input(&shape).with_reference(move |x| vec![reshaped(&x[0], &[a, c])]));
    }
    cases
}

fn orders() -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in [[2, 3, 4], [2, 0, 4]] {
        cases.push(case("transpose").input(&shape).arg(0).arg(-1).with_reference(|x| vec![swapped(&x[0], 0, 2)]));
        cases.push(case("mt").input(&shape).with_reference(|x| vec![swapped(&x[0], 1, 2)]));
        let rotated = |x: &[ArrayD<f64>]| vec![x[0].clone().permuted_axes(IxDyn(&[1, 2, 0]))];
        cases.push(case("permute").input(&shape).arg(&[1, -1, 0]).with_reference(rotated));
        cases.push(case("movedim").input(&shape).arg(0).arg(2).with_reference(rotated));
        cases.push(case("movedim").input(&shape).arg(&[2, 0]).arg(&[1, -1]).with_reference(rotated));
        cases.push(case("flip").input(&shape).arg(&[0, -1]).with_reference(|x| vec![turned(&x[0], &[0, 2])]));
        cases.push(case("flip").input(&shape).with_reference(|x| vec![turned(&x[0], &[0, 1, 2])]));
        cases.push(case("fliplr").input(&shape).with_reference(|x| vec![turned(&x[0], &[1])]));
        cases.push(case("flipud").input(&shape).with_reference(|x| vec![turned(&x[0], &[0])]));
        let rot90 = |k: i32| case("rot90").input(&shape).arg(k).arg(1).arg(2);
        cases.push(rot90(1).with_reference(|x| vec![swapped(&turned(&x[0], &[2]), 1, 2)]));
        cases.push(rot90(-2).with_reference(|x| vec![turned(&x[0], &[1, 2])]));
        cases.push(rot90(3).with_reference(|x| vec![swapped(&turned(&x[0], &[1]), 1, 2)]));
    }
    for shape in [[3, 5], [0, 4]] {
        cases.push(case("t").input(&shape).with_reference(|x| vec![swapped(&x[0], 0, 1)]));
    }
    cases
}

fn parts() -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in [[5, 7], [0, 7]] {
        let [rows, _] = shape;
        cases.push(case("narrow").input(&shape).arg(1).arg(2).arg(3).with_reference(|x| vec![sliced(&x[0], 1, 2, 5)]));
        let slice = |start: Option<i32>, end: Option<i32>, step: i32| {
            case("slice").input(&shape).arg(-1).arg(start).arg(end).arg(step)
        };
        cases.push(slice(Some(-3), None, 1).with_reference(|x| vec![sliced(&x[0], 1, 4, 7)]));
        let of = move |places: &'static [usize]| {
            move |x: &[ArrayD<f64>]| vec![built(&[rows, places.len()], |i| x[0][[i[0], places[i[1]]]])]
        };
        cases.push(slice(Some(1), Some(99), 3).with_reference(of(&[1, 4])));
        cases.push(slice(Some(5), Some(0), -2).with_reference(of(&[5, 3, 1])));
        cases.push(slice(Some(5), Some(2), 1).with_reference(of(&[])));
        let column = move |x: &[ArrayD<f64>]| vec![built(&[rows], |i| x[0][[i[0], 5]])];
        cases.push(case("select").input(&shape).arg(1).arg(-2).with_reference(column));
        cases.push(case("unbind").input(&shape).arg(1).with_reference(move |x| {
            (0..7).map(|c| built(&[rows], |i| x[0][[i[0], c]])).collect()
        }));
        cases.push(case("split").input(&shape).arg(3).arg(1).with_reference(|x| pieces(&x[0], 1, &[3, 3, 1])));
        let sizes = case("split_with_sizes").input(&shape).arg(&[2, 0, 5]).arg(1);
        cases.push(sizes.with_reference(|x| pieces(&x[0], 1, &[2, 0, 5])));
        cases.push(case("chunk").input(&shape).arg(3).arg(1).with_reference(|x| pieces(&x[0], 1, &[3, 3, 1])));
        cases.push(case("tensor_split").input(&shape).arg(3).arg(1).with_reference(|x| pieces(&x[0], 1, &[3, 2, 2])));
        let at = case("tensor_split_at").input(&shape).arg(&[2, -3, 99]).arg(1);
        cases.push(at.with_reference(|x| pieces(&x[0], 1, &[2, 2, 3, 0])));
        cases.push(case("diag").input(&shape).arg(2).with_reference(|x| vec![diagonal(&x[0], 2, 0, 1)]));
    }
    for shape in [[3, 4, 5], [3, 0, 5]] {
        let place = move |x: &[ArrayD<f64>]| vec![x[0].index_axis(Axis(0), 2).to_owned()];
        cases.push(case("i").input(&shape).arg(&[-1]).with_reference(place));
        let diagonals = |k: i32, a: i32, b: i32| case("diagonal").input(&shape).arg(k).arg(a).arg(b);
        cases.push(diagonals(0, 0, 1).with_reference(|x| vec![diagonal(&x[0], 0, 0, 1)]));
        cases.push(diagonals(2, 1, -1).with_reference(|x| vec![diagonal(&x[0], 2, 1, 2)]));
        cases.push(diagonals(-1, 2, 0).with_reference(|x| vec![diagonal(&x[0], 1, 0, 2)]));
        cases.push(diagonals(9, 0, 2).with_reference(|x| vec![diagonal(&x[0], 9, 0, 2)]));
        for (d, size, step) in [(2i32, 2usize, 1usize), (2, 3, 2), (0, 3, 5), (-1, 2, 3)] {
            let along = d.rem_euclid(3) as usize;
            let unfold = case("unfold").input(&shape).arg(d).arg(size).arg(step);
            cases.push(unfold.with_reference(move |x| vec![windows(&x[0], along, size, step)]));
        }
    }
    cases
}

fn repetitions() -> Vec<Case> {
    let mut cases = Vec::new();
    for shape in [[3, 1], [0, 1]] {
        let [n, _] = shape;
        let wide = move |x: &[ArrayD<f64>]| vec![built(&[2, n, 4], |i| x[0][[i[1], 0]])];
        cases.push(case("expand").input(&shape).arg(&[2, -1, 4]).with_reference(wide));
        let sizes: &[usize] = &[2, n, 4];
        cases.push(case("broadcast_to").input(&shape).arg(sizes).with_reference(wide));
        cases.push(case("expand_as").input(&shape).input(sizes).with_reference(wide));
    }
    // `as_strided` depends on the operand's layout unless it reads only the first element, so only that element is read here.
    let first = |shape: &'static [usize]| move |x: &[ArrayD<f64>]| vec![built(shape, |_| x[0][[0, 0]])];
    let strided = |shape: &[i32], strides: &[i32]| case("as_strided").input(&[1, 4]).arg(shape).arg(strides);
    cases.push(strided(&[3, 2], &[0, 0]).with_reference(first(&[3, 2])));
    cases.push(strided(&[1], &[7]).arg(Argument::None).with_reference(first(&[1])));
    cases.push(case("as_strided").input(&[0]).arg(&[2, 0]).arg(&[1, 1]).with_reference(|_| vec![built(&[2, 0], |_| 0.0)]));
    for n in [3, 0] {
        cases.push(case("meshgrid_xy").input(&[n]).input(&[2]).input(&[]).with_reference(move |x| {
            let shape = [2, n, 1];
            vec![built(&shape, |i| x[0][[i[1]]]), built(&shape, |i| x[1][[i[0]]]), built(&shape, |_| x[2][[]])]
        }));
        cases.push(case("meshgrid").input(&[n]).input(&[2]).input(&[]).with_reference(move |x| {
            let shape = [n, 2, 1];
            vec![built(&shape, |i| x[0][[i[0]]]), built(&shape, |i| x[1][[i[1]]]), built(&shape, |_| x[2][[]])]
        }));
    }
    cases
}

pub fn cases() -> Vec<Case> {
    [shapes(), orders(), parts(), repetitions()].into_iter().flatten().collect()
}

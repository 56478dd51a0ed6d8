use crate::backend::cpu::kernels::math;
use crate::backend::cpu::kernels::math::TwoStage;
use crate::backend::cpu::map::*;
use crate::backend::cpu::partition::MIN_TILES_PER_JOB;
use crate::device::cpu::streaming::STREAMING_MIN_BYTES;
use crate::{Device, Expr};

fn number(i: usize, seed: usize) -> f32 {
    (i * 7919 + seed) as f32 % 201.0 - 100.0
}

/// Returns a tensor of `number(i, seed)` for every index i, in memory that is not aligned to vectors.
fn tensor(n: usize, seed: usize) -> Tensor {
    let all: Vec<f32> = std::iter::once(f32::NAN).chain((0..n).map(|i| number(i, seed))).collect();
    Tensor::from_slice(&all, n + 1, Device::Cpu).unwrap().narrow(0, 1, n).unwrap()
}

fn assert_is(t: Tensor, want: impl Fn(usize) -> f32, what: &str) {
    let got = t.to_vec::<f32>().unwrap();
    if let Some(i) = (0..got.len()).find(|&i| got[i] != want(i)) {
        panic!("{what}: element {i} of {} is {}, not {}", got.len(), got[i], want(i));
    }
}

#[test]
fn broadcast_rows_columns_and_scalars() {
    for n in [
        1,
        2,
        63,
        64,
        65,
        1000,
        TILE,
        TILE + 1,
        REPEATED_TILE_LEN / 2,
        REPEATED_TILE_LEN / 2 + 1,
        REPEATED_TILE_LEN + 1,
    ] {
        let rows = 3 * MIN_TILES_PER_JOB * TILE / n + 2;
        let (x, row) = (tensor(rows * n, 1).reshape([rows, n]).unwrap(), tensor(n, 2));
        let (column, one) = (tensor(rows, 3).reshape([rows, 1]).unwrap(), tensor(1, 4));
        let (each, at) = (|i| number(i, 1), |i: usize| number(i % n, 2));
        assert_is(x.add(&row).unwrap(), |i| each(i) + at(i), "a row on the right");
        assert_is(row.sub(&x).unwrap(), |i| at(i) - each(i), "a row on the left");
        assert_is(x.sub(&column).unwrap(), |i| each(i) - number(i / n, 3), "a column");
        assert_is(x.sub(&one).unwrap(), |i| each(i) - number(0, 4), "a number");
        let inputs = [&x, &row, &column, &one];
        let sum = Tensor::map(&inputs, |x| (&x[0] + &x[1]) + (&x[2] + &x[3])).unwrap();
        assert_is(sum, |i| (each(i) + at(i)) + (number(i / n, 3) + number(0, 4)), "all of them");
        let layer = Tensor::map(&[&x, &row], |x| (&x[0] + &x[1]).max(0.0) * 2.0).unwrap();
        assert_is(layer, |i| (each(i) + at(i)).max(0.0) * 2.0, "a row and registers");
        let out = x.clone();
        Tensor::map_into(&[&out, &row], &[], &[&out], |x, _| vec![(&x[0] + &x[1]).max(0.0) - &x[0]]).unwrap();
        assert_is(out.shallow_clone(), |i| (each(i) + at(i)).max(0.0) - each(i), "in place");
        out.sub_(&row).unwrap();
        assert_is(out, |i| (each(i) + at(i)).max(0.0) - each(i) - at(i), "in place, one primitive");
        let (out, other) = (x.clone(), tensor(rows * n, 5).reshape([rows, n]).unwrap());
        let sums = other.clone();
        let step = |x: &[Expr], _: &[Expr]| vec![&x[0] - &x[1] * (&x[2] + &x[0]), &x[2] + &x[0] * &x[1]];
        Tensor::map_into(&[&out, &one, &sums], &[], &[&out, &sums], step).unwrap();
        let (y, by) = (|i| number(i, 5), number(0, 4));
        assert_is(out, |i| each(i) - by * (y(i) + each(i)), "in place, two results");
        assert_is(sums.shallow_clone(), |i| y(i) + each(i) * by, "in place, the other result");
        sums.add_(&x).unwrap();
        assert_is(sums, |i| y(i) + each(i) * by + each(i), "in place, one primitive of two operands");
    }
}

#[test]
fn results_larger_than_the_cache() {
    let n = STREAMING_MIN_BYTES / 4 + 1003;
    let (x, y) = (tensor(n, 1), tensor(n, 2));
    assert_is(x.add(&y).unwrap(), |i| number(i, 1) + number(i, 2), "a sum");
    assert_is(x.relu().unwrap(), |i| number(i, 1).max(0.0), "one operand and a constant");
    assert_is(x.abs().unwrap(), |i| number(i, 1).abs(), "not computed past the cache");
    assert_is(x.exp().unwrap(), |i| math::Exp::eval(number(i, 1)), "a function, which does not go there");
    let (rows, columns) = (n / 1000, 1000);
    let x = x.narrow(0, 0, rows * columns).unwrap().reshape([rows, columns]).unwrap();
    let row = y.narrow(0, 0, columns).unwrap();
    assert_is(x.mul(&row).unwrap(), |i| number(i, 1) * number(i % columns, 2), "rows");
}

#[test]
fn updates_in_place_larger_than_the_cache() {
    let (rows, columns) = (STREAMING_MIN_BYTES / 4 / 1000 + 3, 1000);
    let x = tensor(rows * columns, 1).reshape([rows, columns]).unwrap().clone();
    let (column, wide) = (tensor(rows, 3).reshape([rows, 1]).unwrap(), tensor(rows * (columns + 5), 4));
    let part = wide.reshape([rows, columns + 5]).unwrap().narrow(1, 2, columns).unwrap();
    let each = |i: usize| number(i, 1) - number(i / columns, 3);
    x.sub_(&column).unwrap();
    assert_is(x.shallow_clone(), each, "a column");
    x.maximum_(&part).unwrap();
    let at = |i: usize| number(i / columns * (columns + 5) + 2 + i % columns, 4);
    let each = |i: usize| each(i).max(at(i));
    assert_is(x.shallow_clone(), each, "an operand that is part of another");
    Tensor::map_into(&[&x, &column], &[], &[&x], |x, _| vec![&x[0] * 0.5 + &x[1]]).unwrap();
    assert_is(x.shallow_clone(), |i| each(i) * 0.5 + number(i / columns, 3), "a product and a sum");
}

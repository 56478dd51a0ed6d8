use crate::backend::cpu::interpreter::*;
use crate::ops::Expr;

/// Evaluates formulas tile by tile; each slice of `inputs` has the elements of one operand. Returns the results and whether an integer
/// was divided by zero.
fn run<C: Number>(exprs: &[Expr], inputs: &[&[C]], scalars: &[Scalar], seeds: &[Seed]) -> (Vec<Vec<C>>, bool) {
    let program = Program::new(exprs);
    let len = inputs.first().map_or(1000, |x| x.len());
    let mut outs = vec![vec![C::from_i32(77); len]; exprs.len()];
    let (mut scratch, mut fault) = (Scratch::new(), false);
    for first in (0..len).step_by(TILE) {
        let n = TILE.min(len - first);
        let tile_inputs: Vec<_> = inputs.iter().map(|x| TileIn::Slice(&x[first..])).collect();
        let tile = Tile { inputs: &tile_inputs, scalars, seeds, first: first as u64, len: n };
        let mut slices: Vec<&mut [C]> = outs.iter_mut().map(|o| &mut o[first..first + n]).collect();
        fault |= program.eval_tile(&tile, &mut scratch, &mut slices);
    }
    (outs, fault)
}

#[test]
fn several_results_scalars_and_uniform_parts() {
    let (a, b, s) = (Expr::input(0), Expr::input(1), Expr::scalar(0));
    let exprs = [&a * (1.0 - &s) + &b * &s, a.clone(), s.sqrt() + 1.0, (&a + &b).max(&a), a.clone()];
    for len in [0, 1, 5, TILE - 1, TILE, TILE + 1, 1607] {
        let x: Vec<f64> = (0..len).map(|i| i as f64).collect();
        let y: Vec<f64> = (0..len).map(|i| 100.0 - i as f64).collect();
        let (outs, _) = run(&exprs, &[&x, &y], &[Scalar::Float(0.25)], &[]);
        for i in 0..len {
            let (x, y) = (x[i], y[i]);
            let expected = [x * 0.75 + y * 0.25, x, 1.5, f64::max(x + y, x), x];
            assert_eq!([0, 1, 2, 3, 4].map(|j: usize| outs[j][i]), expected);
        }
    }
}

#[test]
fn broadcast_operands_take_every_form() {
    let (a, b, c) = (Expr::input(0), Expr::input(1), Expr::input(2));
    let program = Program::new(&[a.lt(&b).select(&c, &a - &b), &a * 2.0, b.sin()]);
    let columns = [[1.0, 5.0, 3.0, f64::NAN], [2.0; 4], [7.0, 8.0, 9.0, 10.0]];
    for mask in 0..8 {
        let input = |k: usize| match mask >> k & 1 {
            0 => TileIn::Slice(&columns[k][..]),
            _ => TileIn::Scalar(columns[k][1]),
        };
        let inputs = [input(0), input(1), input(2)];
        let tile = Tile { inputs: &inputs, scalars: &[], seeds: &[], first: 0, len: 4 };
        let (mut x, mut y, mut z) = ([0.0; 4], [0.0; 4], [0.0; 4]);
        program.eval_tile(&tile, &mut Scratch::new(), &mut [&mut x, &mut y, &mut z]);
        for i in 0..4 {
            let [a, b, c] = [0, 1, 2].map(|k| if mask >> k & 1 == 0 { columns[k][i] } else { columns[k][1] });
            let expected = if a < b { c } else { a - b };
            assert!(x[i] == expected || (x[i].is_nan() && expected.is_nan()), "{mask} {i}");
            assert!(y[i] == 2.0 * a || a.is_nan());
            assert_eq!(z[i], b.sin());
        }
    }
}

#[test]
fn nan_propagates_through_max_and_min() {
    let (a, b) = (Expr::input(0), Expr::input(1));
    let nan = f32::NAN;
    let (outs, _) = run::<f32>(
        &[a.max(&b), a.min(&b), a.relu(), a.clamp(0.0, 1.0)],
        &[&[nan, 1.0, nan, 2.0], &[1.0, nan, nan, 3.0]],
        &[],
        &[],
    );
    for out in &outs[..2] {
        assert!(out[..3].iter().all(|x| x.is_nan()));
    }
    assert_eq!((outs[0][3], outs[1][3]), (3.0, 2.0));
    assert!(outs[2][0].is_nan() && outs[3][2].is_nan());
}

#[test]
fn integers_wrap_and_report_division_by_zero() {
    let (a, b) = (Expr::input(0), Expr::input(1));
    let exprs = [&a / &b, &a % &b, a.remainder(&b), a.floor_divide(&b), &a * &b, a.pow(&b)];
    let xs = [7, -7, 7, -7, i64::MIN, 0, 5, -1, i64::MAX];
    let ys = [2, 2, -2, -2, -1, 3, -1, -3, 2];
    let (outs, fault) = run::<i64>(&exprs, &[&xs, &ys], &[], &[]);
    assert!(!fault);
    for i in 0..xs.len() {
        let (x, y) = (xs[i], ys[i]);
        assert_eq!(outs[0][i], x.wrapping_div(y));
        assert_eq!(outs[1][i], x.wrapping_rem(y));
        let r = i128::from(x) % i128::from(y);
        let python = if r != 0 && (r < 0) != (y < 0) { r + i128::from(y) } else { r };
        assert_eq!(i128::from(outs[2][i]), python);
        assert_eq!(outs[4][i], x.wrapping_mul(y));
    }
    assert_eq!(outs[3][..4], [3, -4, -4, 3]);
    assert_eq!(outs[5], [49, 49, 0, 0, 0, 0, 0, -1, 1]);

    let (outs, fault) = run::<i64>(&exprs[..2], &[&[1, 2, 3], &[1, 0, 2]], &[], &[]);
    assert!(fault);
    assert_eq!(outs, [[1, 0, 1], [0, 0, 1]]);
}

#[test]
fn random_leaves_depend_on_the_index_alone() {
    let seeds = [Seed { key: 1, stream: 2 }, Seed { key: 1, stream: 3 }];
    let exprs = [Expr::uniform(0), Expr::normal(1), Expr::bits(0)];
    let (f, _) = run::<f32>(&exprs, &[], &[], &seeds);
    let (d, _) = run::<f64>(&exprs, &[], &[], &seeds);
    let (l, _) = run::<i64>(&exprs[2..], &[], &[], &seeds);
    for i in 0..1000 {
        assert_eq!(f64::from(f[0][i]), d[0][i]);
        assert_eq!(f64::from(f[1][i]), d[1][i]);
        assert_eq!(d[2][i], l[0][i] as f64);
        assert_eq!(d[0][i], (l[0][i] >> 8) as f64 / 16_777_216.0);
        assert!((0.0..1.0).contains(&d[0][i]));
    }
    assert_ne!(f[0][..10], f[1][..10]);
}

#[test]
fn large_angles() {
    let x: Vec<f32> = (0..600).map(|i| if i % 7 == 0 { 1e30 + i as f32 * 1e28 } else { i as f32 }).collect();
    let (outs, _) = run::<f32>(&[Expr::input(0).sin(), Expr::input(0).cos()], &[&x], &[], &[]);
    for (i, &x) in x.iter().enumerate() {
        assert!((f64::from(outs[0][i]) - f64::from(x).sin()).abs() < 1e-6, "{x}");
        assert!((f64::from(outs[1][i]) - f64::from(x).cos()).abs() < 1e-6, "{x}");
    }
}

#[test]
fn results_may_overwrite_operands() {
    let (w, g, m) = (Expr::input(0), Expr::input(1), Expr::input(2));
    let momentum = &m * 0.5 + &g;
    let two = |w: Expr, m: Expr| [w, m];
    let programs = [
        // Formulas that overwrite either operand in place, with tensors and with numbers; that need a copy; that use an operand twice;
        // and that take several steps.
        two(&w - &momentum * 0.25, momentum.clone()),
        two(&g - &w, &g * &m),
        two(&w + 2.0, 3.0 - &m),
        two(w.max(&g), m.min(2.0)),
        two(&w / &g, m.exp()),
        two(&w * &w, &g / &m),
        two(w.lt(&g).select(&w, 1.0), w.lt(&g).select(&g, &m)),
        two((&w + &g) * (&w - &g), (&m - 1.0).abs()),
    ];
    for exprs in &programs {
        let program = Program::new(exprs);
        assert!(program.can_overwrite_input(2, 1), "{exprs:?}");
        for len in [1, 15, 16, 17, TILE - 1, TILE] {
            let column = |k: usize| -> Vec<f64> {
                (0..len).map(|i| if i == 7 { f64::NAN } else { (i * 37 + k * 11) as f64 % 19.0 + 1.0 }).collect()
            };
            let [x, y, z] = [0, 1, 2].map(column);
            let (expected, _) = run(exprs, &[&x, &y, &z], &[], &[]);
            let w_before = program.can_overwrite_input(0, 0);
            let (mut out0, mut out1) = (x.clone(), z);
            let inputs =
                [if w_before { TileIn::Output(0) } else { TileIn::Slice(&x) }, TileIn::Slice(&y), TileIn::Output(1)];
            let tile = Tile { inputs: &inputs, scalars: &[], seeds: &[], first: 0, len };
            let mut scratch = Scratch::new();
            program.eval_tile(&tile, &mut scratch, &mut [&mut out0, &mut out1]);
            for (got, expected) in [out0, out1].iter().zip(&expected) {
                let same = |(a, b): (&f64, &f64)| a == b || (a.is_nan() && b.is_nan());
                assert!(got.iter().zip(expected).all(same), "{exprs:?} {len}");
            }
        }
    }
    let late = Program::new(&[&w + &g, (&w * &g).exp()]);
    assert!(!late.can_overwrite_input(0, 0) && late.can_overwrite_input(0, 1));
}

#[test]
fn multiply_add_accepts_every_operand_form() {
    let (a, b, c) = (Expr::input(0), Expr::input(1), Expr::input(2));
    type Of = fn(f32, f32, f32) -> f32;
    let formulas: [(Expr, Of); 8] = [
        (&a * &b + &c, |a, b, c| a * b + c),
        (&c + &a * &b, |a, b, c| c + a * b),
        (&a * &b - &c, |a, b, c| a * b - c),
        (&c - &a * &b, |a, b, c| c - a * b),
        (0.5 * &a * &b + &c, |a, b, c| a * 0.5 * b + c),
        (&c * 0.3 - &a * &b, |a, b, c| c * 0.3 - a * b),
        (0.7 * &c - &a * (&b * 0.6), |a, b, c| c * 0.7 - b * 0.6 * a),
        (0.6 * &b * &a - &c * 0.7, |a, b, c| b * 0.6 * a - c * 0.7),
    ];
    for (expr, of) in formulas {
        let program = Program::new(&[expr]);
        assert_eq!((program.steps().list.len(), program.steps().registers), (1, 0));
        for len in [1, 7, 16, 33, TILE + 1] {
            let value = |k: usize, i: usize| match (i + 5 * k) % 11 {
                3 => f32::NAN,
                7 => f32::INFINITY,
                _ => (i * 7919 + k * 31) as f32 % 1.7 - 0.8,
            };
            let columns: [Vec<f32>; 3] = [0, 1, 2].map(|k| (0..len).map(|i| value(k, i)).collect());
            // In each form, every operand is a slice or a number, and at most one operand is the old contents of the result.
            for form in 0..32 {
                let (numbers, own) = (form % 8, form / 8);
                let one = |k: usize| numbers >> k & 1 == 1 && own != k + 1;
                let inputs: Vec<TileIn<f32>> = (0..3)
                    .map(|k| match (own == k + 1, one(k)) {
                        (true, _) => TileIn::Output(0),
                        (_, true) => TileIn::Scalar(columns[k][0]),
                        _ => TileIn::Slice(&columns[k]),
                    })
                    .collect();
                let mut out = if own > 0 { columns[own - 1].clone() } else { vec![1.0; len] };
                let tile = Tile { inputs: &inputs, scalars: &[], seeds: &[], first: 0, len };
                program.eval_tile(&tile, &mut Scratch::new(), &mut [&mut out]);
                for i in 0..len {
                    let [x, y, z] = [0, 1, 2].map(|k| columns[k][if one(k) { 0 } else { i }]);
                    let want = of(x, y, z);
                    assert!(out[i] == want || (out[i].is_nan() && want.is_nan()), "{form} {i} of {len}: {}", out[i]);
                }
            }
        }
    }
}

#[test]
fn stores_past_the_cache_of_any_length_and_alignment() {
    let x: Vec<f32> = (0..200).map(|i| if i % 41 == 7 { f32::NAN } else { i as f32 - 90.5 }).collect();
    let y: Vec<f32> = (0..200).map(|i| if i % 31 == 9 { f32::INFINITY } else { 70.0 - i as f32 }).collect();
    let same = |a: f32, b: f32| a == b || (a.is_nan() && b.is_nan());
    for start in 0..20 {
        for n in [0, 1, 15, 16, 17, 31, 33, 150] {
            for form in 0..9 {
                let (xs, ys) = (TileIn::Slice(&x[2..2 + n]), TileIn::Slice(&y[5..5 + n]));
                let (a, b) = match form {
                    0 => (xs, ys),
                    1 => (TileIn::Scalar(x[3]), ys),
                    2 => (xs, TileIn::Scalar(y[3])),
                    3 => (xs, TileIn::Rows(&y[..37], 30)),
                    4 => (xs, TileIn::Rows(&y[4..5], 0)),
                    5 => (xs, TileIn::Rows(&y[..16], 16)),
                    6 => (TileIn::Rows(&x[1..4], 1), ys),
                    7 => (xs, TileIn::Columns { column: &y[1..], step: 3, row: 7, at: 4 }),
                    _ => (TileIn::Columns { column: &x[..20], step: 1, row: 16, at: 0 }, ys),
                };
                let at = |t: &TileIn<f32>, i: usize| match t {
                    TileIn::Slice(s) => s[i],
                    TileIn::Scalar(x) => *x,
                    TileIn::Rows(row, at) => row[(at + i) % row.len()],
                    TileIn::Columns { column, step, row, at } => column[(at + i) / row * step],
                    TileIn::Output(_) => unreachable!("none of them"),
                };
                for (op, f) in [
                    (Binary::Add, Number::add as fn(f32, f32) -> f32),
                    (Binary::Sub, Number::sub),
                    (Binary::Mul, Number::mul),
                    (Binary::Max, Number::max),
                    (Binary::Min, Number::min),
                ] {
                    let mut out = vec![0.5f32; 200];
                    assert!(is_cheap(op));
                    let mut plain = vec![0.5f32; n];
                    binary(op, a, b, false, &mut plain);
                    assert!((0..n).all(|i| same(plain[i], f(at(&a, i), at(&b, i)))), "{op:?} {form} {n}");
                    assert_eq!(binary(op, a, b, form < 7, &mut out[start..start + n]), None); // columns are not streamed
                    assert!((0..n).all(|i| same(out[start + i], f(at(&a, i), at(&b, i)))), "{op:?} {form} {start} {n}");
                    assert!(out[..start].iter().chain(&out[start + n..]).all(|&x| x == 0.5));
                }
            }
        }
    }
    assert_eq!(binary(Binary::Add, TileIn::Scalar(2.0), TileIn::Scalar(3.0), true, &mut []), Some(5.0f64));
}

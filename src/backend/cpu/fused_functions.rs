//! Functions such as gelu that the CPU computes in one step, although their formulas have several primitives. Separate steps would read
//! and write all elements of a tile for each primitive.

use std::f64::consts::FRAC_1_SQRT_2;

use pulp::Arch;

use crate::backend::cpu::interpreter::{TileIn, apply_vector_function, run_loop};
use crate::backend::cpu::scalar::{Number, VectorFunction};
use crate::backend::cpu::steps::Action;
use crate::backend::cpu::vectorised::{Function, function};
use crate::expr::{Args, Binary, DagNode, GELU_CUBE, Leaf, Op, SQRT_2_OVER_PI, Unary};

/// A formula that is computed in one step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FusedFunction {
    Gelu,
    GeluTanh,
    Silu,
    /// [`Expr::clamp`](crate::ops::Expr::clamp) of the first operand between two numbers.
    Clamp,
}

/// Recognises a fused function, or a maximum, at node `i`; returns the action and its operands.
pub(crate) fn recognise(nodes: &[DagNode], i: usize) -> Option<(Action, Args<usize>)> {
    let of = |fused, args: &[usize]| Some((Action::Fused(fused), Args::from_slice(args)));
    match node_op(nodes, i) {
        Op::Binary(Binary::Mul) => {
            let (a, b) = (nodes[i].args[0], nodes[i].args[1]);
            let either = [(a, b), (b, a)];
            if let Some(x) = either.into_iter().find_map(|(half, rest)| match_gelu(nodes, half, rest)) {
                return of(FusedFunction::Gelu, &[x]);
            }
            if let Some(x) = either.into_iter().find_map(|(half, rest)| match_gelu_tanh(nodes, half, rest)) {
                return of(FusedFunction::GeluTanh, &[x]);
            }
            let (x, _) = either.into_iter().find(|&(x, y)| unary_operand(nodes, y, Unary::Sigmoid) == Some(x))?;
            of(FusedFunction::Silu, &[x])
        }
        Op::Select => {
            if let Some([x, low, high]) = match_clamp(nodes, i) {
                return of(FusedFunction::Clamp, &[x, low, high]);
            }
            // `select(x <= c, c, x)` is `max(x, c)`, for NaN and -0 too.
            let (condition, c, x) = (nodes[i].args[0], nodes[i].args[1], nodes[i].args[2]);
            let number = match node_op(nodes, c) {
                Op::Leaf(Leaf::Const(c)) => !c.is_nan(),
                other => matches!(other, Op::Leaf(Leaf::Number { .. })),
            };
            let max = (Action::Compute(Op::Binary(Binary::Max)), Args::from_slice(&[x, c]));
            (number && is_binary(nodes, condition, Binary::Le, [x, c])).then_some(max)
        }
        _ => None,
    }
}

fn node_op(nodes: &[DagNode], i: usize) -> Op {
    nodes[i].expr.op()
}

/// True if node `i` is this primitive with these operands.
fn is_binary(nodes: &[DagNode], i: usize, binary: Binary, args: [usize; 2]) -> bool {
    node_op(nodes, i) == Op::Binary(binary) && nodes[i].args[..] == args
}

/// Returns the operand if node `i` is this unary primitive.
fn unary_operand(nodes: &[DagNode], i: usize, unary: Unary) -> Option<usize> {
    (node_op(nodes, i) == Op::Unary(unary)).then(|| nodes[i].args[0])
}

/// Returns the other operand if node `i` is this commutative primitive with the constant `number`.
fn other_operand(nodes: &[DagNode], i: usize, binary: Binary, number: f64) -> Option<usize> {
    let [a, b] = nodes[i].args[..] else { return None };
    let is_number = |&(n, _): &(usize, usize)| matches!(node_op(nodes, n), Op::Leaf(Leaf::Const(c)) if c == number);
    let found = [(a, b), (b, a)].into_iter().find(is_number)?;
    (node_op(nodes, i) == Op::Binary(binary)).then_some(found.1)
}

/// Returns x if the two nodes are `x / 2` and `1 + erf(x / sqrt(2))`.
fn match_gelu(nodes: &[DagNode], half: usize, rest: usize) -> Option<usize> {
    let x = other_operand(nodes, half, Binary::Mul, 0.5)?;
    let erf = other_operand(nodes, rest, Binary::Add, 1.0)?;
    let of = other_operand(nodes, unary_operand(nodes, erf, Unary::Erf)?, Binary::Mul, FRAC_1_SQRT_2)?;
    (of == x).then_some(x)
}

/// Returns x if the two nodes are `x / 2` and `1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x² * x))`.
fn match_gelu_tanh(nodes: &[DagNode], half: usize, rest: usize) -> Option<usize> {
    let x = other_operand(nodes, half, Binary::Mul, 0.5)?;
    let tanh = other_operand(nodes, rest, Binary::Add, 1.0)?;
    let sum = other_operand(nodes, unary_operand(nodes, tanh, Unary::Tanh)?, Binary::Mul, SQRT_2_OVER_PI)?;
    let [_, cube] = nodes[sum].args[..] else { return None };
    let scaled = *nodes[cube].args.first()?;
    let square = other_operand(nodes, scaled, Binary::Mul, GELU_CUBE)?;
    let fits = is_binary(nodes, sum, Binary::Add, [x, cube]) && is_binary(nodes, cube, Binary::Mul, [scaled, x]);
    (fits && is_binary(nodes, square, Binary::Mul, [x, x])).then_some(x)
}

/// Returns x, low and high if node `i` is `raised > high ? high : raised` with `raised = x < low ? low : x`, and both bounds are numbers.
fn match_clamp(nodes: &[DagNode], i: usize) -> Option<[usize; 3]> {
    let select = |i: usize| match (node_op(nodes, i), &nodes[i].args[..]) {
        (Op::Select, &[condition, a, b]) => Some((condition, a, b)),
        _ => None,
    };
    let number =
        |i: usize| matches!(node_op(nodes, i), Op::Leaf(Leaf::Const(_) | Leaf::Scalar(_) | Leaf::Number { .. }));
    let (above, high, raised) = select(i)?;
    let (below, low, x) = select(raised)?;
    let fits = is_binary(nodes, above, Binary::Lt, [high, raised]) && is_binary(nodes, below, Binary::Lt, [x, low]);
    (fits && number(low) && number(high)).then_some([x, low, high])
}

/// Fills `dst`, or returns one value for all elements instead.
pub(crate) fn run_fused<'a, C: Number>(
    arch: Arch,
    fused: FusedFunction,
    operand: impl Fn(usize) -> TileIn<'a, C>,
    dst: &mut [C],
) -> Option<C> {
    match fused {
        FusedFunction::Gelu => apply_vector_function(arch, VectorFunction::Gelu, operand(0), dst),
        FusedFunction::GeluTanh => apply_vector_function(arch, VectorFunction::GeluTanh, operand(0), dst),
        FusedFunction::Silu => apply_vector_function(arch, VectorFunction::Silu, operand(0), dst),
        FusedFunction::Clamp => {
            function!(Clamp, (x, low, high): (C, C, C) => {
                let raised = if x < low { low } else { x };
                if high < raised { high } else { raised }
            });
            let (TileIn::Scalar(low), TileIn::Scalar(high)) = (operand(1), operand(2)) else {
                unreachable!("numbers alone are recognised")
            };
            match operand(0) {
                TileIn::Slice(x) => run_loop::<C, _, Clamp>(arch, dst, x.iter().map(|&x| (x, low, high))),
                TileIn::Scalar(x) => Some(Clamp::call((x, low, high))),
                _ => unreachable!("operands of a primitive of two"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::f64::consts::PI;

    use super::*;
    use crate::Scalar;
    use crate::backend::cpu::interpreter::{Scratch, Tile};
    use crate::expr::program::Program;
    use crate::ops::Expr;

    #[test]
    fn recognises_fused_functions() {
        let (x, y, s) = (Expr::input(0), Expr::input(1), Expr::scalar(0));
        let steps = |e: &Expr| Program::new(std::slice::from_ref(e)).steps().list.len();
        for e in [x.gelu(), x.gelu_tanh(), x.silu(), x.sigmoid() * &x, x.clamp(0.0, 1.0), x.clamp(&s, 6.0), x.relu()] {
            assert_eq!(steps(&e), 1, "{e:?}");
        }
        // Similar formulas that must not be fused.
        for e in [
            0.5 * &x * (1.0 + (&y * FRAC_1_SQRT_2).erf()),
            0.5 * &x * (1.0 + (&x * 0.7).erf()),
            0.5 * &x * (1.0 + (&x * 0.7).tanh()),
            &y * x.sigmoid(),
            x.clamp(&y, 1.0),
            x.hardtanh(0.0, 1.0),
            x.le(0.0).select(1.0, &x),
            x.lt(0.0).select(0.0, &x),
        ] {
            assert!(steps(&e) > 1, "{e:?}");
        }
        let both = Program::new(&[x.relu(), x.le(0.0)]);
        assert_eq!((both.steps().list.len(), both.steps().registers), (2, 0));
    }

    /// Computes one formula of one input. `form` makes the input a slice, a number, or the old contents of the result.
    fn compute<C: Number>(e: &Expr, x: &[C], scalars: &[Scalar], form: usize) -> Vec<C> {
        let mut out = x.to_vec();
        let inputs = [[TileIn::Slice(x), TileIn::Scalar(x[0]), TileIn::Output(0)][form]];
        let tile = Tile { inputs: &inputs, scalars, seeds: &[], first: 0, len: x.len() };
        Program::new(std::slice::from_ref(e)).eval_tile(&tile, &mut Scratch::new(), &mut [&mut out]);
        out
    }

    #[test]
    fn fused_clamp_equals_its_formula() {
        let special = [f64::NAN, -0.0, 0.0, 0.5, -0.5, 1.0, f64::INFINITY, f64::NEG_INFINITY, 0.25, 7.0];
        let x: Vec<f64> = (0..300).map(|i| special[i * 7 % 10] + (i / 10) as f64 * 0.01).collect();
        let (narrow, whole): (Vec<f32>, Vec<i64>) = x.iter().map(|&x| (x as f32, x as i64)).unzip();
        for bounds in [(-0.25, 0.5), (0.0, -0.0), (-0.0, 3.0), (1.0, -1.0), (f64::NAN, 0.5), (0.5, f64::NAN)] {
            let scalars = [Scalar::Float(bounds.0), Scalar::Float(bounds.1)];
            let e = Expr::input(0).clamp(Expr::scalar(0), Expr::scalar(1));
            macro_rules! check {
                ($x:expr, $t:ty) => {
                    for form in 0..3 {
                        let (low, high) = (bounds.0 as $t, bounds.1 as $t);
                        for (i, got) in compute(&e, &$x, &scalars, form).into_iter().enumerate() {
                            let x = $x[if form == 1 { 0 } else { i }];
                            let raised = if x < low { low } else { x };
                            let want = if high < raised { high } else { raised };
                            assert_eq!(got.to_ne_bytes(), want.to_ne_bytes(), "{x} {bounds:?} {form}");
                        }
                    }
                };
            }
            check!(x, f64);
            check!(narrow, f32);
            if !bounds.0.is_nan() && !bounds.1.is_nan() {
                check!(whole, i64);
            }
        }
    }

    #[test]
    fn fused_functions_equal_their_formulas() {
        let phi = |x: f64| 0.5 * (1.0 + libm::erf(x * FRAC_1_SQRT_2));
        let logistic = |x: f64| 1.0 / (1.0 + (-x).exp());
        let inner = |x: f64| (2.0 / PI).sqrt() * (x + 0.044715 * x * x * x);
        let by_tanh = |x: f64| 0.5 * (1.0 + inner(x).tanh());
        type Of<'a> = &'a dyn Fn(f64) -> f64;
        let x: Vec<f64> = (0..700).map(|i| (i * 37 % 700) as f64 * 0.02 - 7.0).collect();
        let narrow: Vec<f32> = x.iter().map(|&x| x as f32).collect();
        let input = Expr::input(0);
        for (e, of) in [(input.gelu(), &phi as Of), (input.gelu_tanh(), &by_tanh), (input.silu(), &logistic)] {
            for form in 0..3 {
                let (wide, single) = (compute(&e, &x, &[], form), compute(&e, &narrow, &[], form));
                for i in 0..x.len() {
                    let at = if form == 1 { 0 } else { i };
                    let (right, near) = (x[at] * of(x[at]), f64::from(narrow[at]));
                    assert!((wide[i] - right).abs() <= 1e-15 * x[at].abs(), "{e:?} of {}: {}", x[at], wide[i]);
                    let error = (f64::from(single[i]) - near * of(near)).abs();
                    assert!(error <= 2e-7 * near.abs(), "{e:?} of {near}: {}", single[i]);
                }
            }
        }
    }
}

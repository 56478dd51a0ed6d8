//! Formulas, evaluated one element at a time, in f64 or i64 depending on the compute type.

use ndarray::ArrayD;

use super::values::{apply_typed, converted, is_true, max, min, read_as, write};
use crate::backend::problem::map::{Formulas, Params, compute_type};
use crate::expr::philox::{Bits, Draw, Normal, Seed, Uniform};
use crate::expr::primitives::{gcd, shl, shr};
use crate::expr::{Binary, Expr, Leaf, Op, Unary};
use crate::{Compute, Result, Scalar};

/// Computes all results from the values that the inputs have before the launch, then writes the results in row-major order.
pub(super) fn map(formulas: &Formulas) -> Result<()> {
    let Formulas { inputs, params, program, outputs, .. } = *formulas;
    let (shape, compute) = (outputs[0].shape(), compute_type(program, inputs, outputs));
    let inputs = inputs.iter().map(|t| read_as(t, shape)).collect::<Result<Vec<ArrayD<Scalar>>>>()?;
    let inputs: Vec<Vec<Scalar>> = inputs.into_iter().map(|x| x.into_iter().collect()).collect();
    let results = program.exprs().iter().map(|expr| -> Vec<Scalar> {
        let at = |e: usize| inputs.iter().map(|x| x[e]).collect::<Vec<_>>();
        (0..shape.numel()).map(|e| value(expr, &at(e), params, e as u64, compute)).collect()
    });
    let results: Vec<Vec<Scalar>> = results.collect();
    outputs.iter().zip(results).try_for_each(|(out, result)| write(out, result))
}

/// Returns the value of a formula at element `e`.
pub(super) fn value(expr: &Expr, inputs: &[Scalar], params: Params, e: u64, compute: Compute) -> Scalar {
    let arg = |i: usize| value(&expr.args()[i], inputs, params, e, compute);
    match expr.op() {
        Op::Leaf(leaf) => {
            let value = match leaf {
                Leaf::Input(i) => inputs[i],
                Leaf::Scalar(i) | Leaf::Number { index: i, .. } => params.scalars[i],
                Leaf::Const(c) => c.into(),
                Leaf::Uniform(i) => drawn::<Uniform>(params.seeds[i], e),
                Leaf::Normal(i) => drawn::<Normal>(params.seeds[i], e),
                Leaf::Bits(i) => drawn::<Bits>(params.seeds[i], e),
            };
            converted(value, compute)
        }
        Op::Unary(op) => unary(op, arg(0)),
        Op::Binary(op) => binary(op, arg(0), arg(1)),
        Op::Select => {
            if is_true(arg(0)) {
                arg(1)
            } else {
                arg(2)
            }
        }
    }
}

/// Returns the random number of element `e`.
fn drawn<D: Draw<Number: Into<Scalar>>>(seed: Seed, e: u64) -> Scalar {
    let mut number = [Scalar::Int(0)];
    seed.fill::<D, _>(e, &mut number, Into::into);
    number[0]
}

fn unary(op: Unary, x: Scalar) -> Scalar {
    match (op, x) {
        (Unary::Neg, Scalar::Int(x)) => Scalar::Int(x.wrapping_neg()),
        (Unary::Abs, Scalar::Int(x)) => Scalar::Int(x.wrapping_abs()),
        (_, Scalar::Int(_)) => x, // rounding does not change integers
        (_, Scalar::Float(x)) => Scalar::Float(op.eval(x)),
    }
}

fn binary(op: Binary, a: Scalar, b: Scalar) -> Scalar {
    let ints: fn(i64, i64) -> i64 = match op {
        Binary::Max => return max(a, b),
        Binary::Min => return min(a, b),
        Binary::Add => i64::wrapping_add,
        Binary::Sub => i64::wrapping_sub,
        Binary::Mul => i64::wrapping_mul,
        // Division by zero gives 0. Backends also report an error, which the reference does not.
        Binary::Div => |a, b| if b == 0 { 0 } else { a.wrapping_div(b) },
        Binary::Rem => |a, b| if b == 0 { 0 } else { a.wrapping_rem(b) },
        Binary::Pow => power,
        Binary::Lt => |a, b| i64::from(a < b),
        Binary::Le => |a, b| i64::from(a <= b),
        Binary::Eq => |a, b| i64::from(a == b),
        Binary::And => |a, b| a & b,
        Binary::Or => |a, b| a | b,
        Binary::Xor => |a, b| a ^ b,
        Binary::Shl => shl,
        Binary::Shr => shr,
        Binary::Gcd => gcd,
        Binary::Copysign => |_, _| unreachable!("it needs floats"),
    };
    match (a, b) {
        (Scalar::Int(_), Scalar::Int(_)) => apply_typed(a, b, ints, |_, _| unreachable!("both are integers")),
        _ => Scalar::Float(op.eval(a.to_f64(), b.to_f64())),
    }
}

/// Returns the integer power, with wrapping. For a negative exponent, returns the truncated quotient.
fn power(base: i64, exponent: i64) -> i64 {
    match (base, u32::try_from(exponent)) {
        (_, Ok(exponent)) => base.wrapping_pow(exponent),
        (1, _) => 1,
        (-1, _) => {
            if exponent % 2 == 0 {
                1
            } else {
                -1
            }
        }
        _ => 0,
    }
}

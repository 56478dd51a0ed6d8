//! Launches on the CPU in f16 or bf16 that need no plan: one cheap binary primitive, which reads, converts, computes and writes in one
//! loop. Through tiles of f32, every element would be written and read again three times.

use smallvec::SmallVec;

use crate::backend::cpu::kernels::halves::{BinaryFunction, HalfOperand, map_bf16, map_f16};
use crate::backend::cpu::map;
use crate::backend::cpu::scalar::Number;
use crate::backend::cpu::steps::Action;
use crate::backend::cpu::steps::Value;
use crate::backend::problem::operand::OperandKind;
use crate::device::cpu::parallel;
use crate::expr::program::Program;
use crate::expr::{Binary, Op};
use crate::storage::{Storage, with_host};
use crate::{DType, Result, Scalar, Tensor};

/// Broadcast rows shorter than this are left to the tile interpreter, whose tiles cover many rows.
const MIN_ROW_LEN: usize = 64;

/// The elements of an operand, by its [`OperandKind`].
#[derive(Clone, Copy)]
enum IndexedOperand<'a> {
    Contiguous(&'a [u16]),
    RowBroadcast(&'a [u16]),
    Scalar(f32),
}

/// Runs the launch if its step is one cheap binary primitive, and returns whether it did. Operands have the result's dtype; `kinds` index them.
pub(crate) fn try_run(
    program: &Program,
    inputs: &[&Tensor],
    kinds: &[Option<OperandKind>],
    scalars: &[Scalar],
    out: &Tensor,
) -> Result<bool> {
    let [step] = &program.steps().list[..] else { return Ok(false) };
    let Action::Compute(Op::Binary(op)) = step.action else { return Ok(false) };
    let fits = |kind: &Option<OperandKind>| match *kind {
        Some(OperandKind::RowBroadcast(n)) => n >= MIN_ROW_LEN,
        Some(_) => true,
        None => false,
    };
    if !has_half_loop(op) || !kinds.iter().all(fits) || !kinds.contains(&Some(OperandKind::Contiguous)) {
        return Ok(false);
    }
    let reads: SmallVec<[&Storage; 2]> = inputs.iter().map(|t| &t.storage).collect();
    with_host(&reads, &[&out.storage], |reads, writes| {
        let operand = |value: Value| match value {
            Value::Input(k) => {
                let elements: &[u16] = &bytemuck::cast_slice(reads[k])[inputs[k].layout.offset..];
                match kinds[k] {
                    Some(OperandKind::RowBroadcast(n)) => IndexedOperand::RowBroadcast(&elements[..n]),
                    Some(OperandKind::Contiguous) => IndexedOperand::Contiguous(elements),
                    _ => IndexedOperand::Scalar(match out.dtype {
                        DType::F16 => half::f16::from_bits(elements[0]).to_f32(),
                        _ => half::bf16::from_bits(elements[0]).to_f32(),
                    }),
                }
            }
            Value::Scalar(k) => IndexedOperand::Scalar(f32::from_scalar(scalars[k])),
            Value::Const(c) => IndexedOperand::Scalar(f32::from_f64(c)),
            Value::Register(_) | Value::Output(_) => unreachable!("the one step reads operands"),
        };
        let (a, b) = (operand(step.args[0]), operand(step.args[1]));
        let (count, first) = (out.numel(), out.layout.offset);
        let to = &mut bytemuck::cast_slice_mut(writes[0])[first..first + count];
        let size = map::job_len(count);
        match count <= size {
            true => compute_range(op, out.dtype, a, b, 0, to),
            false => parallel::for_each_chunk(to, size, |i, to| compute_range(op, out.dtype, a, b, i * size, to)),
        }
    })?;
    Ok(true)
}

/// Computes `to.len()` elements from `first` on, split at the ends of broadcast rows.
fn compute_range(op: Binary, dtype: DType, a: IndexedOperand, b: IndexedOperand, mut first: usize, mut to: &mut [u16]) {
    while !to.is_empty() {
        let left = |operand| match operand {
            IndexedOperand::RowBroadcast(row) => row.len() - first % row.len(),
            _ => usize::MAX,
        };
        let n = to.len().min(left(a)).min(left(b));
        let side = |operand| match operand {
            IndexedOperand::Contiguous(s) => HalfOperand::Each(&s[first..first + n]),
            IndexedOperand::RowBroadcast(row) => HalfOperand::Each(&row[first % row.len()..][..n]),
            IndexedOperand::Scalar(x) => HalfOperand::One(x),
        };
        let (now, rest) = to.split_at_mut(n);
        compute(op, dtype, side(a), side(b), now);
        (first, to) = (first + n, rest);
    }
}

/// True for the primitives that are computed in one loop.
fn has_half_loop(op: Binary) -> bool {
    matches!(op, Binary::Add | Binary::Sub | Binary::Mul | Binary::Div | Binary::Max | Binary::Min)
}

fn compute(op: Binary, dtype: DType, a: HalfOperand, b: HalfOperand, to: &mut [u16]) {
    macro_rules! each {
        ($method:ident) => {{
            struct F;
            impl BinaryFunction for F {
                #[inline(always)]
                fn call(x: f32, y: f32) -> f32 {
                    Number::$method(x, y)
                }
            }
            match dtype {
                DType::F16 => map_f16::<F>(a, b, to),
                _ => map_bf16::<F>(a, b, to),
            }
        }};
    }
    match op {
        Binary::Add => each!(add),
        Binary::Sub => each!(sub),
        Binary::Mul => each!(mul),
        Binary::Div => each!(div),
        Binary::Max => each!(max),
        Binary::Min => each!(min),
        _ => unreachable!("the caller has asked `has_half_loop`"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Device, Expr};

    #[test]
    fn halves_are_computed_in_f32_and_rounded_once() {
        let number = |n: usize, seed: usize| -> Tensor {
            let value = |i: usize| match (i + seed) % 97 {
                3 => f32::NAN,
                5 => f32::INFINITY,
                _ => (i * 7919 + seed) as f32 % 201.0 * 0.37 - 30.0,
            };
            let values: Vec<f32> = (0..n + 1).map(value).collect();
            Tensor::from_slice(&values, n + 1, Device::Cpu).unwrap().narrow(0, 1, n).unwrap()
        };
        let (x, y, s) = (Expr::input(0), Expr::input(1), Expr::scalar(0));
        let of_two = [&x + &y, &x - &y, &x * &y, &x / &y, x.max(&y), x.min(&y)];
        let of_one = [&x * &s, &s - &x, x.relu(), &x / 3.0];
        for (rows, columns) in [(1, 1), (3, 5), (7, 64), (5, 1367), (40, 1000)] {
            let full = number(rows * columns, 1).reshape([rows, columns]).unwrap();
            let others = [
                number(rows * columns, 2).reshape([rows, columns]).unwrap(),
                number(columns, 3),
                number(1, 4),
                full.shallow_clone(),
            ];
            for dtype in [DType::F16, DType::BF16] {
                let cast = |t: &Tensor| t.to_dtype(dtype).unwrap();
                let half = cast(&full);
                let check = |e: &Expr, inputs: &[&Tensor], flat: bool| {
                    let scalars = [Scalar::Float(0.1)];
                    let out = half.zeros_like().unwrap();
                    let program = Program::shared(std::slice::from_ref(e));
                    let ran = crate::backend::cpu::flat::try_run("test", &program, inputs, &scalars, &[&out]).unwrap();
                    assert_eq!(ran, flat, "{e:?} {rows} {columns}");
                    let wide: Vec<Tensor> = inputs.iter().map(|t| t.to_dtype(DType::F32).unwrap()).collect();
                    let wide: Vec<&Tensor> = wide.iter().collect();
                    let right = full.zeros_like().unwrap();
                    let params = crate::backend::problem::map::Params::from_scalars(&scalars);
                    crate::ops::elementwise::apply_into("test", &wide, params, std::slice::from_ref(e), &[&right])
                        .unwrap();
                    let bits = |t: &Tensor| t.to_dtype(DType::F32).unwrap().to_vec::<f32>().unwrap();
                    let same = |(a, b): (&f32, &f32)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
                    assert!(!ran || bits(&out).iter().zip(&bits(&cast(&right))).all(same), "{e:?} {rows} {columns}");
                };
                for other in &others {
                    let flat = !(2..MIN_ROW_LEN).contains(&other.numel()) || other.numel() == full.numel();
                    let other = cast(other);
                    of_two.iter().for_each(|e| check(e, &[&half, &other], flat));
                    of_two.iter().for_each(|e| check(e, &[&other, &half], flat));
                }
                of_one.iter().for_each(|e| check(e, &[&half], true));
                check(&x.exp(), &[&half], false);
                check(&(&x * &y + 1.0), &[&half, &half], false);
            }
        }
    }
}

//! Matrix products on the CPU: the `gemm` crate for f32 and f64, plain loops for integers, then the epilogue in tiles.
//!
//! Halves are widened to f32 first, a pass that is small beside the product. The product is written where the first
//! result goes if that has the type it is summed in, and the epilogue changes it in place.

use std::borrow::Cow;

use bytemuck::Pod;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use super::elementwise::{self, Params};
use super::expr::Expr;
use super::gemm::{Gemm, Operand, Plan};
use crate::device::cpu::gemm::{Place, gemm};
use crate::device::{count_launch, cpu, cpu::parallel};
use crate::storage::with_host;
use crate::tensor::Layout;
use crate::{Compute, DType, Device, Result, Shape, Tensor};

pub(super) fn run(g: &Gemm, shape: &Shape, outs: &[Tensor]) -> Result<()> {
    let dtype = g.compute().dtype();
    let in_place = outs[0].dtype == dtype;
    let product = match in_place {
        true => outs[0].detach(),
        false => Tensor::empty_like_shape(shape, dtype, Device::Cpu)?,
    };
    let plan = Plan::new(&g.a.layout, &g.b.layout, shape, &[&product.layout]);
    with_host(&[&g.a.storage, &g.b.storage], &[&product.storage], |reads, writes| {
        let (a, b) = ((g.a, reads[0]), (g.b, reads[1]));
        let out = &mut *writes[0];
        let offset = product.layout.offset;
        match g.compute() {
            Compute::F32 => real::<f32>(&plan, &widen_f32(a), &widen_f32(b), bytemuck::cast_slice_mut(out), offset),
            Compute::F64 => real::<f64>(&plan, &widen_f64(a), &widen_f64(b), bytemuck::cast_slice_mut(out), offset),
            Compute::I64 => {
                integers(&plan, &widen_i64(a), &widen_i64(b), bytemuck::cast_slice_mut(out), offset);
                Ok(())
            }
        }
    })??;
    if in_place && *g.epilogue == [Expr::input(0)] {
        count_launch();
        return Ok(());
    }
    let inputs: Vec<&Tensor> = std::iter::once(&product).chain(g.extras.iter().copied()).collect();
    let outs: Vec<&Tensor> = outs.iter().collect();
    elementwise::apply_into(g.op, &inputs, Params { scalars: g.scalars, seeds: &[] }, g.epilogue, &outs)
}

/// Elements of a tensor in the type to compute in, and where its first one is. Strides are the tensor's own.
struct Wide<'a, T: Clone> {
    data: Cow<'a, [T]>,
    offset: usize,
}

/// Converts the stretch of memory that the tensor's elements lie in, or borrows it where nothing is to be converted.
fn widen<'a, S: Pod + Sync, T: Clone>(
    layout: &Layout,
    bytes: &'a [u8],
    convert: impl Fn(&'a [S]) -> Cow<'a, [T]>,
) -> Wide<'a, T> {
    match layout.bounds() {
        None => Wide { data: Cow::Borrowed(&[]), offset: 0 },
        Some((lo, hi)) => {
            let size = size_of::<S>();
            Wide { data: convert(bytemuck::cast_slice(&bytes[lo * size..(hi + 1) * size])), offset: layout.offset - lo }
        }
    }
}

fn each<S: Copy, T: Clone>(f: impl Fn(S) -> T) -> impl Fn(&[S]) -> Cow<'_, [T]> {
    move |s| Cow::Owned(s.iter().map(|&x| f(x)).collect())
}

fn widen_f32<'a>((t, bytes): (&Tensor, &'a [u8])) -> Wide<'a, f32> {
    fn halves<S: Pod + Sync>(s: &[S], convert: impl Fn(&[S], &mut [f32]) + Sync) -> Cow<'_, [f32]> {
        const PART: usize = 1 << 15;
        let mut wide = vec![0f32; s.len()];
        parallel::for_each_chunk(&mut wide, PART, |i, to| convert(&s[i * PART..][..to.len()], to));
        Cow::Owned(wide)
    }
    match t.dtype {
        DType::F32 => widen(&t.layout, bytes, Cow::Borrowed),
        DType::F16 => widen(&t.layout, bytes, |s: &[f16]| halves(s, |s, to| s.convert_to_f32_slice(to))),
        DType::BF16 => widen(&t.layout, bytes, |s: &[bf16]| halves(s, |s, to| s.convert_to_f32_slice(to))),
        // An integer beside a float.
        _ => {
            let Wide { data, offset } = widen_i64((t, bytes));
            Wide { data: data.iter().map(|&x| x as f32).collect(), offset }
        }
    }
}

fn widen_f64<'a>((t, bytes): (&Tensor, &'a [u8])) -> Wide<'a, f64> {
    if t.dtype == DType::F64 {
        return widen(&t.layout, bytes, Cow::Borrowed);
    }
    let Wide { data, offset } = widen_f32((t, bytes));
    Wide { data: data.iter().map(|&x| f64::from(x)).collect(), offset }
}

fn widen_i64<'a>((t, bytes): (&Tensor, &'a [u8])) -> Wide<'a, i64> {
    match t.dtype {
        DType::I32 => widen(&t.layout, bytes, each(|x: i32| i64::from(x))),
        DType::U32 => widen(&t.layout, bytes, each(|x: u32| i64::from(x))),
        DType::U8 => widen(&t.layout, bytes, each(|x: u8| i64::from(x))),
        DType::Bool => widen(&t.layout, bytes, each(|x: u8| i64::from(x != 0))),
        _ => widen(&t.layout, bytes, Cow::Borrowed),
    }
}

/// Calls `f` with the offsets of a, b and the result for each matrix of the batch.
fn each_matrix(plan: &Plan, first: [usize; 3], mut f: impl FnMut([usize; 3]) -> Result<()>) -> Result<()> {
    let operands: [&Operand; 3] = [&plan.a, &plan.b, &plan.others[0]];
    (0..plan.count()).try_for_each(|z| {
        let mut at = first.map(|offset| offset as isize);
        let mut rest = z;
        for (d, &size) in plan.batch.iter().enumerate().rev() {
            for (at, operand) in at.iter_mut().zip(operands) {
                *at += (rest % size) as isize * operand.batch[d];
            }
            rest /= size;
        }
        f(at.map(|at| at as usize))
    })
}

fn real<T: cpu::gemm::Real>(plan: &Plan, a: &Wide<T>, b: &Wide<T>, out: &mut [T], offset: usize) -> Result<()> {
    let place = |operand: &Operand, offset: usize| Place { offset, row: operand.row, col: operand.col };
    each_matrix(plan, [a.offset, b.offset, offset], |[at_a, at_b, at_out]| {
        gemm(
            (plan.m, plan.n, plan.k),
            (&mut *out, place(&plan.others[0], at_out)),
            (&a.data, place(&plan.a, at_a)),
            (&b.data, place(&plan.b, at_b)),
        )
    })
}

/// Rows of the result as sums of rows of b: integers wrap.
fn integers(plan: &Plan, a: &Wide<i64>, b: &Wide<i64>, out: &mut [i64], offset: usize) {
    let at = |first: usize, operand: &Operand, i: usize, j: usize| {
        (first as isize + i as isize * operand.row + j as isize * operand.col) as usize
    };
    let mut row = vec![0i64; plan.n];
    let _ = each_matrix(plan, [a.offset, b.offset, offset], |[at_a, at_b, at_out]| {
        for i in 0..plan.m {
            row.fill(0);
            for k in 0..plan.k {
                let x = a.data[at(at_a, &plan.a, i, k)];
                for (j, sum) in row.iter_mut().enumerate() {
                    *sum = sum.wrapping_add(x.wrapping_mul(b.data[at(at_b, &plan.b, k, j)]));
                }
            }
            for (j, &sum) in row.iter().enumerate() {
                out[at(at_out, &plan.others[0], i, j)] = sum;
            }
        }
        Ok(())
    });
}

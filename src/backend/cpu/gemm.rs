//! Matrix products on the CPU: `device::cpu::gemm` for floats, plain loops for integers, with the epilogue in tiles.
//!
//! Halves are multiplied and added in f32. An epilogue in f32, to which the rounding of halves belongs, is applied to blocks of
//! the product that are still in the cache (`gemm_epilogue`). Otherwise the product is written to the first result, if that has
//! the type it is summed in, and the epilogue changes it in place.

use std::borrow::Cow;

use bytemuck::Pod;
use half::{bf16, f16};

use crate::backend::cpu::gemm_epilogue::Epilogue;
use crate::backend::cpu::map;
use crate::backend::problem::gemm::{Gemm, GemmOperand, GemmPlan};
use crate::backend::problem::map::{Formulas, Params};
use crate::device::cpu::gemm::{Floats, Place, gemm, gemm_and_sums, gemm_f32};
use crate::expr::Expr;
use crate::storage::with_host;
use crate::tensor::Layout;
use crate::{Compute, DType, Result, Shape, Tensor};

/// Gives whether the sums have been made, too.
pub(crate) fn run(g: &Gemm, shape: &Shape, outs: &[Tensor]) -> Result<bool> {
    let dtype = g.compute().dtype();
    let in_place = outs[0].dtype == dtype;
    let nothing_follows = in_place && *g.epilogue == [Expr::input(0)];
    if dtype == DType::F32 && !nothing_follows && Epilogue::run(g, shape, outs)? {
        return Ok(false);
    }
    let product = match in_place {
        true => outs[0].detach(),
        false => Tensor::empty_like_shape(shape, dtype, g.a.device())?,
    };
    let plan = GemmPlan::new(&g.a.layout, &g.b.layout, shape, &[&product.layout]);
    // An optimiser's gradients are in one storage.
    let plain = |t: &Tensor| t.dtype == DType::F32 && t.is_contiguous();
    let sums = g.sums.filter(|t| nothing_follows && plan.count() == 1 && t.shares_storage(&product) && plain(t));
    let summed = with_host(&[&g.a.storage, &g.b.storage], &[&product.storage], |reads, writes| {
        let (a, b) = ((g.a, reads[0]), (g.b, reads[1]));
        let out = &mut *writes[0];
        let offset = product.layout.offset;
        match g.compute() {
            Compute::F32 => {
                let (mut made_a, mut made_b) = (Vec::new(), Vec::new());
                let (a, b) = (floats(a, &mut made_a), floats(b, &mut made_b));
                let (size, out) = ((plan.m, plan.n, plan.k), bytemuck::cast_slice_mut(out));
                let mut batches = plan.batches([a.offset, b.offset, offset]);
                if let Some(sums) = sums
                    && let Some(batches) = batches.next()
                {
                    return gemm_and_sums(size, out, (a.data, b.data), batches, sums.layout.offset);
                }
                gemm_f32(size, out, a.data, b.data, batches).map(|()| false)
            }
            Compute::F64 => {
                let (a, b, out) = (widen_f64(a), widen_f64(b), bytemuck::cast_slice_mut(out));
                plan.batches([a.offset, b.offset, offset]).try_for_each(|[at_a, at_b, at]| {
                    gemm((plan.m, plan.n, plan.k), (&mut *out, at), (&a.data[..], at_a), (&b.data[..], at_b))
                })?;
                Ok(false)
            }
            Compute::I64 => {
                integers(&plan, &widen_i64(a), &widen_i64(b), bytemuck::cast_slice_mut(out), offset);
                Ok(false)
            }
        }
    })??;
    if nothing_follows {
        return Ok(summed);
    }
    let inputs: Vec<&Tensor> = std::iter::once(&product).chain(g.extras.iter().copied()).collect();
    let outs: Vec<&Tensor> = outs.iter().collect();
    let params = Params::of(g.scalars);
    map::formulas(&Formulas { op: g.op, inputs: &inputs, params, exprs: g.epilogue, outputs: &outs })?;
    Ok(false)
}

/// Elements in memory, and where a tensor's first one is. Strides are the tensor's own.
pub(crate) struct Elements<T> {
    pub(crate) data: T,
    pub(crate) offset: usize,
}

/// The stretch of memory that the tensor's elements lie in, as `of` has it.
fn stretch<'a, S: Pod, T>(layout: &Layout, bytes: &'a [u8], of: impl FnOnce(&'a [S]) -> T) -> Elements<T> {
    match layout.bounds() {
        None => Elements { data: of(&[]), offset: 0 },
        Some((lo, hi)) => {
            let size = size_of::<S>();
            let data = of(bytemuck::cast_slice(&bytes[lo * size..(hi + 1) * size]));
            Elements { data, offset: layout.offset - lo }
        }
    }
}

fn each<S: Copy, T: Clone>(f: impl Fn(S) -> T) -> impl Fn(&[S]) -> Cow<'_, [T]> {
    move |s| Cow::Owned(s.iter().map(|&x| f(x)).collect())
}

/// What is multiplied in f32, converted into `made` where it is an integer beside a float.
pub(crate) fn floats<'a>((t, bytes): (&Tensor, &'a [u8]), made: &'a mut Vec<f32>) -> Elements<Floats<'a>> {
    match t.dtype {
        DType::F32 => stretch(&t.layout, bytes, Floats::F32),
        DType::F16 => stretch(&t.layout, bytes, Floats::F16),
        DType::BF16 => stretch(&t.layout, bytes, Floats::BF16),
        _ => {
            let Elements { data, offset } = widen_i64((t, bytes));
            made.extend(data.iter().map(|&x| x as f32));
            Elements { data: Floats::F32(made), offset }
        }
    }
}

fn widen_f64<'a>((t, bytes): (&Tensor, &'a [u8])) -> Elements<Cow<'a, [f64]>> {
    match t.dtype {
        DType::F64 => stretch(&t.layout, bytes, Cow::Borrowed),
        DType::F32 => stretch(&t.layout, bytes, each(|x: f32| f64::from(x))),
        DType::F16 => stretch(&t.layout, bytes, each(|x: f16| f64::from(x))),
        DType::BF16 => stretch(&t.layout, bytes, each(|x: bf16| f64::from(x))),
        _ => {
            let Elements { data, offset } = widen_i64((t, bytes));
            Elements { data: data.iter().map(|&x| x as f64).collect(), offset }
        }
    }
}

fn widen_i64<'a>((t, bytes): (&Tensor, &'a [u8])) -> Elements<Cow<'a, [i64]>> {
    match t.dtype {
        DType::I32 => stretch(&t.layout, bytes, each(|x: i32| i64::from(x))),
        DType::U32 => stretch(&t.layout, bytes, each(|x: u32| i64::from(x))),
        DType::U8 => stretch(&t.layout, bytes, each(|x: u8| i64::from(x))),
        DType::Bool => stretch(&t.layout, bytes, each(|x: u8| i64::from(x != 0))),
        _ => stretch(&t.layout, bytes, Cow::Borrowed),
    }
}

impl GemmPlan {
    /// Where a, b and the first result are for each matrix of the batch; their first elements are at `first`.
    pub(crate) fn batches(&self, first: [usize; 3]) -> impl Iterator<Item = [Place; 3]> {
        let operands: [&GemmOperand; 3] = [&self.a, &self.b, &self.others[0]];
        (0..self.count()).map(move |z| {
            let mut at = first.map(|offset| offset as isize);
            let mut rest = z;
            for (d, &size) in self.batch.iter().enumerate().rev() {
                for (at, operand) in at.iter_mut().zip(operands) {
                    *at += (rest % size) as isize * operand.batch[d];
                }
                rest /= size;
            }
            let place = |i: usize| Place { offset: at[i] as usize, row: operands[i].row, col: operands[i].col };
            [place(0), place(1), place(2)]
        })
    }
}

/// Rows of the result as sums of rows of b: integers wrap.
fn integers(
    plan: &GemmPlan,
    a: &Elements<Cow<'_, [i64]>>,
    b: &Elements<Cow<'_, [i64]>>,
    out: &mut [i64],
    offset: usize,
) {
    let at = |place: Place, i: usize, j: usize| {
        (place.offset as isize + i as isize * place.row + j as isize * place.col) as usize
    };
    let mut row = vec![0i64; plan.n];
    for [at_a, at_b, at_out] in plan.batches([a.offset, b.offset, offset]) {
        for i in 0..plan.m {
            row.fill(0);
            for k in 0..plan.k {
                let x = a.data[at(at_a, i, k)];
                for (j, sum) in row.iter_mut().enumerate() {
                    *sum = sum.wrapping_add(x.wrapping_mul(b.data[at(at_b, k, j)]));
                }
            }
            for (j, &sum) in row.iter().enumerate() {
                out[at(at_out, i, j)] = sum;
            }
        }
    }
}

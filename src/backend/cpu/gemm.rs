//! Matrix products on the CPU: the kernels of `kernels::gemm`, with the epilogue in tiles.
//!
//! f16 and bf16 are multiplied and added in f32. An f32 epilogue, which includes rounding to f16 or bf16, is applied to blocks of the
//! product while they are in the cache (`gemm_epilogue`). Any other epilogue updates the product in place after the product is written to
//! the first result, if that result has the accumulator's type, and the epilogue updates it in place.

use smallvec::SmallVec;

use crate::backend::cpu::gemm_epilogue::Epilogue;
use crate::backend::cpu::kernels::gemm::{Floats, MatrixLayout, gemm, gemm_f32, gemm_integers, gemm_with_row_sums};
use crate::backend::cpu::map;
use crate::backend::problem::gemm::{Gemm, GemmOperand, GemmPlan};
use crate::backend::problem::map::{Formulas, Params};
use crate::expr::Expr;
use crate::expr::program::Program;
use crate::storage::with_host;
use crate::{DType, Result, Shape, Tensor};

/// The maximum number of elements of a product that is stored in the accumulator's type before an epilogue converts it.
const MAX_WIDE_ELEMENTS: usize = 1 << 22;

/// Computes a product with its epilogue; returns whether the row sums were also computed.
pub(crate) fn multiply(g: &Gemm, shape: &Shape, outs: &[Tensor]) -> Result<bool> {
    let dtype = g.compute().dtype();
    let plain = *g.epilogue == [Expr::input(0)];
    // Truncating a 64-bit sum gives the same integer as a wrapping sum in the result's width.
    let in_place = outs[0].dtype == dtype || (plain && dtype == DType::I64 && outs[0].dtype == g.a.dtype);
    let nothing_follows = in_place && plain;
    if dtype == DType::F32 && !nothing_follows && Epilogue::try_run(g, shape, outs)? {
        return Ok(false);
    }
    if !in_place && shape.numel() > MAX_WIDE_ELEMENTS {
        return multiply_in_halves(g, shape, outs);
    }
    let product = match in_place {
        true => outs[0].detach(),
        false => Tensor::empty_with_shape(shape, dtype, g.a.device())?,
    };
    let plan = GemmPlan::new(&g.a.layout, &g.b.layout, shape, &[&product.layout]);
    // Fused row sums require that both results are in one storage, as the gradients of an optimiser's parameters are.
    let alike = |t: &Tensor| t.dtype == DType::F32 && t.is_contiguous();
    let sums = g.sums.filter(|t| nothing_follows && plan.count() == 1 && t.shares_storage(&product) && alike(t));
    let summed = with_host(&[&g.a.storage, &g.b.storage], &[&product.storage], |reads, writes| {
        let (a, b, out) = (reads[0], reads[1], &mut *writes[0]);
        let size = (plan.m, plan.n, plan.k);
        let mut batches = plan.batches([g.a.layout.offset, g.b.layout.offset, product.layout.offset]);
        macro_rules! integers {
            ($from:ty, $to:ty) => {{
                let (a, b) = (bytemuck::cast_slice::<u8, $from>(a), bytemuck::cast_slice(b));
                gemm_integers::<$from, $to>(size, bytemuck::cast_slice_mut(out), a, b, batches)?
            }};
        }
        match (g.a.dtype, product.dtype) {
            (DType::F64, _) => {
                let (a, b, out) = (bytemuck::cast_slice(a), bytemuck::cast_slice(b), bytemuck::cast_slice_mut(out));
                batches.try_for_each(|[at_a, at_b, at]| gemm::<f64>(size, (&mut *out, at), (a, at_a), (b, at_b)))?;
            }
            (DType::U8, DType::U8) => integers!(u8, u8),
            (DType::U8, _) => integers!(u8, i64),
            (DType::I32, DType::I32) => integers!(i32, i32),
            (DType::I32, _) => integers!(i32, i64),
            (DType::U32, DType::U32) => integers!(u32, u32),
            (DType::U32, _) => integers!(u32, i64),
            (DType::I64, _) => integers!(i64, i64),
            _ => {
                let (a, b) = (Floats::new(g.a.dtype, a), Floats::new(g.b.dtype, b));
                let out = bytemuck::cast_slice_mut(out);
                if let Some(sums) = sums
                    && let Some(batches) = batches.next()
                {
                    return gemm_with_row_sums(size, out, (a, b), batches, sums.layout.offset);
                }
                gemm_f32(size, out, a, b, batches)?;
            }
        }
        Ok(false)
    })??;
    if nothing_follows {
        return Ok(summed);
    }
    let inputs: Vec<&Tensor> = std::iter::once(&product).chain(g.extras.iter().copied()).collect();
    let outs: Vec<&Tensor> = outs.iter().collect();
    let params = Params::from_scalars(g.scalars);
    let program = &Program::shared(g.epilogue);
    map::run_formulas(&Formulas { op: g.op, inputs: &inputs, params, program, outputs: &outs })?;
    Ok(false)
}

/// Computes the two halves of a product, split along its longest dim, one after the other. This halves the temporary memory for the sums.
fn multiply_in_halves(g: &Gemm, shape: &Shape, outs: &[Tensor]) -> Result<bool> {
    let (rank, dims) = (shape.rank(), shape.dims());
    let Some(d) = (0..rank).max_by_key(|&d| dims[d]) else { return Ok(false) };
    let half = dims[d] / 2;
    for (start, len) in [(0, half), (half, dims[d] - half)] {
        // An operand can have fewer dims than the result, so dims are counted from the last.
        let part = |t: &Tensor| -> Result<Tensor> {
            let at = (t.rank() + d).checked_sub(rank).filter(|&at| t.shape().dims()[at] > 1);
            at.map_or_else(|| Ok(t.detach()), |at| t.layout.narrow(g.op, at, start, len).map(|l| t.with_layout(l)))
        };
        let a = if d + 1 == rank { g.a.detach() } else { part(g.a)? };
        let b = if d + 2 == rank { g.b.detach() } else { part(g.b)? };
        let extras = g.extras.iter().map(|t| part(t)).collect::<Result<SmallVec<[Tensor; 2]>>>()?;
        let outs = outs.iter().map(part).collect::<Result<SmallVec<[Tensor; 2]>>>()?;
        let extras: SmallVec<[&Tensor; 2]> = extras.iter().collect();
        multiply(&Gemm { a: &a, b: &b, extras: &extras, out: None, ..*g }, outs[0].shape(), &outs)?;
    }
    Ok(false)
}

impl GemmPlan {
    /// Returns the layouts of a, b and the first result for each matrix of the batch; `first` has the offsets of their first elements.
    pub(crate) fn batches(&self, first: [usize; 3]) -> impl Iterator<Item = [MatrixLayout; 3]> {
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
            let place = |i: usize| MatrixLayout { offset: at[i] as usize, row: operands[i].row, col: operands[i].col };
            [place(0), place(1), place(2)]
        })
    }
}

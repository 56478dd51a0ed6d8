//! Matrix products on the CPU: the kernels of `kernels::gemm`, with the epilogue in tiles.
//!
//! f16 and bf16 are multiplied and added in f32. An f32 epilogue, which includes rounding to f16 or bf16, is applied to a block of the
//! product while the block is in the cache of the core that computed it, and the product is never written to memory. Bias, bias with relu,
//! and the gradient of relu are applied in registers. Any other epilogue updates the product in place after the product is written to
//! the first result, if that result has the accumulator's type, and the epilogue updates it in place.

use std::sync::Arc;

use bytemuck::Pod;
use smallvec::SmallVec;

use crate::backend::cpu::convert::{load_tile, store_tile};
use crate::backend::cpu::interpreter::{Scratch, TILE, Tile, TileIn};
use crate::backend::cpu::kernels::gemm::{
    Floats, KernelEpilogue, MatrixLayout, gemm, gemm_f32, gemm_integers, gemm_into, gemm_with_epilogue,
    gemm_with_row_sums, supports_pieces,
};
use crate::backend::cpu::map;
use crate::backend::problem::gemm::{EPILOGUES, Gemm, GemmOperand, GemmPlan};
use crate::backend::problem::map::{Formulas, Params, compute_type};
use crate::backend::problem::operand::OperandKind;
use crate::expr::Expr;
use crate::expr::program::Program;
use crate::storage::{Storage, with_host};
use crate::{Compute, DType, Result, Scalar, Shape, Tensor};

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
    let product = if in_place { outs[0].detach() } else { Tensor::empty_with_shape(shape, dtype, g.a.device())? };
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
            (DType::I16, DType::I16) => integers!(i16, i16),
            (DType::I16, _) => integers!(i16, i64),
            (DType::I8, DType::I8) => integers!(i8, i8),
            (DType::I8, _) => integers!(i8, i64),
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

/// An epilogue that is applied to blocks of the product.
struct Epilogue<'a> {
    program: Arc<Program>,
    extras: SmallVec<[ExtraOperand<'a>; 2]>,
    scalars: &'a [Scalar],
    dtype: DType,
    /// True if there is no formula: the result is the product, only rounded to the result's dtype.
    plain: bool,
}

/// An extra operand of the epilogue, in the form that its [`OperandKind`] requires.
enum ExtraOperand<'a> {
    Contiguous(&'a [f32]),
    /// A broadcast row, repeated often enough to hold [`TILE`] elements from any start, and the length of the row.
    RowBroadcast(Vec<f32>, usize),
    Scalar(f32),
}

/// True for the dtypes that are computed in f32.
fn computes_in_f32(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F16 | DType::BF16)
}

impl Epilogue<'_> {
    /// Computes products of f32, f16 or bf16 with their epilogue and returns true if all results are contiguous and have one dtype, and
    /// each extra operand is indexed like the results, or is one row or one number. Only a row or a number may be f16 or bf16. A single
    /// result without extra operands may be a batch of contiguous matrices, or of any rows if there is no formula. Otherwise returns false.
    fn try_run(g: &Gemm, shape: &Shape, outs: &[Tensor]) -> Result<bool> {
        let dtype = outs[0].dtype;
        let mut kinds: SmallVec<[OperandKind; 2]> = SmallVec::new();
        for t in g.extras {
            let converted =
                |kind| t.dtype == DType::F32 || (computes_in_f32(t.dtype) && kind != OperandKind::Contiguous);
            match OperandKind::classify(t, &outs[0]) {
                OperandKind::Strided | OperandKind::ColumnBroadcast { .. } => return Ok(false),
                kind if converted(kind) && !outs.iter().any(|out| t.shares_storage(out)) => kinds.push(kind),
                _ => return Ok(false),
            }
        }
        let plan = GemmPlan::new(&g.a.layout, &g.b.layout, shape, &[&outs[0].layout]);
        let GemmOperand { row, col, ref batch } = plan.others[0];
        let matrices = g.extras.is_empty() && (row == plan.n as isize || (row > 0 && *g.epilogue == [Expr::input(0)]));
        let straight = supports_pieces((plan.m, plan.n, plan.k)) && col == 1 && batch.iter().all(|&step| step >= 0);
        let program = Program::shared(g.epilogue).into_owned();
        let operands: SmallVec<[&Tensor; 4]> = outs.iter().take(1).chain(g.extras.iter().copied()).collect();
        if !straight
            || !computes_in_f32(dtype)
            || !outs.iter().all(|t| t.dtype == dtype && (t.is_contiguous() || (outs.len() == 1 && matrices)))
            || program.seeds() > 0
            || compute_type(&program, &operands, &outs.iter().collect::<SmallVec<[&Tensor; 2]>>()) != Compute::F32
        {
            return Ok(false);
        }
        match dtype {
            DType::F32 => compute::<f32>(g, &plan, program, &kinds, outs)?,
            _ => compute::<u16>(g, &plan, program, &kinds, outs)?,
        }
        Ok(true)
    }

    /// Returns the epilogue that the kernels apply in registers if the formula is a bias, a bias with relu, or the gradient of relu; else
    /// `None`.
    fn finish(&self, formula: &[Expr], plan: &GemmPlan) -> Option<KernelEpilogue<&[f32]>> {
        use ExtraOperand::{Contiguous, RowBroadcast};
        let ([formula], [extra], DType::F32) = (formula, &self.extras[..], self.dtype) else { return None };
        match extra {
            RowBroadcast(row, n) if *n == plan.n && *formula == EPILOGUES.biased => {
                Some(KernelEpilogue::Add(&row[..*n]))
            }
            RowBroadcast(row, n) if *n == plan.n && *formula == EPILOGUES.relu[1] => {
                Some(KernelEpilogue::AddRelu(&row[..*n]))
            }
            Contiguous(x) if *formula == EPILOGUES.relu_grad => Some(KernelEpilogue::ReluGrad(&x[..plan.m * plan.n])),
            _ => None,
        }
    }

    /// Evaluates the epilogue for the elements of `product`, the first of which has index `first`.
    fn evaluate<T: Pod>(&self, first: usize, product: &[f32], outs: &mut [&mut [T]]) {
        let store = |values: &[f32], out: &mut [T]| {
            store_tile(self.dtype, values, bytemuck::cast_slice_mut(out), 0, 1);
        };
        if self.plain {
            return store(product, outs[0]);
        }
        let converts = self.dtype != DType::F32;
        let mut made: SmallVec<[Vec<f32>; 2]> =
            outs.iter().map(|_| if converts { vec![0.0; TILE] } else { Vec::new() }).collect();
        let mut scratch = Scratch::new();
        let mut inputs: SmallVec<[TileIn<f32>; 4]> = SmallVec::new();
        for (i, product) in product.chunks(TILE).enumerate() {
            let (first, len) = (first + i * TILE, product.len());
            // Inputs are pushed one by one, because `extend` would be a function call.
            inputs.clear();
            inputs.push(TileIn::Slice(product));
            for extra in &self.extras {
                inputs.push(match extra {
                    ExtraOperand::Contiguous(elements) => TileIn::Slice(&elements[first..][..len]),
                    ExtraOperand::RowBroadcast(repeated, row) => TileIn::Slice(&repeated[first % row..][..len]),
                    ExtraOperand::Scalar(x) => TileIn::Scalar(*x),
                });
            }
            let mut targets: SmallVec<[&mut [f32]; 2]> = SmallVec::new();
            for (out, made) in outs.iter_mut().zip(&mut made) {
                targets.push(match converts {
                    true => &mut made[..len],
                    false => &mut bytemuck::cast_slice_mut(out)[i * TILE..][..len],
                });
            }
            let tile = Tile { inputs: &inputs, scalars: self.scalars, seeds: &[], first: first as u64, len };
            self.program.eval_tile(&tile, &mut scratch, &mut targets);
            drop(targets);
            if converts {
                outs.iter_mut().zip(&made).for_each(|(out, made)| store(&made[..len], &mut out[i * TILE..][..len]));
            }
        }
    }
}

/// Computes the product and its epilogue, into results whose elements have the size of `T`.
fn compute<T: Pod + Send + Sync>(
    g: &Gemm,
    plan: &GemmPlan,
    program: Arc<Program>,
    kinds: &[OperandKind],
    outs: &[Tensor],
) -> Result<()> {
    let reads: SmallVec<[&Storage; 4]> = [g.a, g.b].iter().chain(g.extras).map(|t| &t.storage).collect();
    let writes: SmallVec<[&Storage; 2]> = outs.iter().map(|t| &t.storage).collect();
    with_host(&reads, &writes, |reads, writes| {
        let (a, b) = (Floats::new(g.a.dtype, reads[0]), Floats::new(g.b.dtype, reads[1]));
        let first = [g.a.layout.offset, g.b.layout.offset, 0];
        let extras = g.extras.iter().zip(kinds).zip(&reads[2..]);
        let epilogue = Epilogue {
            program,
            extras: extras.map(|((t, kind), bytes)| ExtraOperand::new(t, *kind, bytes)).collect(),
            scalars: g.scalars,
            dtype: outs[0].dtype,
            plain: *g.epilogue == [Expr::input(0)],
        };
        let layouts: SmallVec<[_; 1]> = plan.batches(first).collect();
        if let Some(finish) = epilogue.finish(g.epilogue, plan)
            && let ([t], [bytes]) = (outs, &mut *writes)
            && let ([[at_a, at_b, _]], true) = (&layouts[..], t.is_contiguous())
        {
            let out = &mut bytemuck::cast_slice_mut(bytes)[t.layout.offset..][..t.numel()];
            if gemm_with_epilogue((plan.m, plan.n, plan.k), out, (a, *at_a), (b, *at_b), finish)? {
                return Ok(());
            }
        }
        let results = outs.iter().zip(writes);
        let mut results: SmallVec<[&mut [T]; 2]> =
            results.map(|(t, bytes)| &mut bytemuck::cast_slice_mut::<u8, T>(bytes)[t.layout.offset..]).collect();
        gemm_into((plan.m, plan.n, plan.k), &mut results, (a, b), &layouts, |first, product, outs| {
            epilogue.evaluate(first, product, outs);
        })
    })?
}

impl<'a> ExtraOperand<'a> {
    fn new(t: &Tensor, kind: OperandKind, bytes: &'a [u8]) -> ExtraOperand<'a> {
        let converted = |n: usize| {
            let mut elements = vec![0f32; n];
            load_tile(t.dtype, bytes, t.layout.offset, 1, &mut elements);
            elements
        };
        match kind {
            OperandKind::Contiguous => ExtraOperand::Contiguous(&bytemuck::cast_slice(bytes)[t.layout.offset..]),
            OperandKind::RowBroadcast(row) => {
                ExtraOperand::RowBroadcast(converted(row).repeat(TILE.div_ceil(row) + 1), row)
            }
            OperandKind::Scalar => ExtraOperand::Scalar(converted(1)[0]),
            OperandKind::Strided | OperandKind::ColumnBroadcast { .. } => {
                unreachable!("it is left to the formulas' own launch")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::slice::from_ref;

    use super::*;
    use crate::Device;
    use crate::backend::problem::map::Params;
    use crate::ops::elementwise::apply;

    fn tensor(shape: [usize; 2], seed: usize) -> Tensor {
        let n: usize = shape.iter().product();
        // The tensor starts at element 1 of its storage, so that its memory is not aligned to vectors.
        let values: Vec<f32> = (0..n + 1).map(|i| ((i * 7919 + seed) % 1009) as f32 / 1009.0 - 0.5).collect();
        Tensor::from_slice(&values, n + 1, Device::Cpu).unwrap().narrow(0, 1, n).unwrap().reshape(shape).unwrap()
    }

    /// Compares the results with a product in f32 followed by the formula. `in_pieces` says whether the epilogue must have been applied
    /// to blocks of the product. All tensors have the dtype of `a`.
    fn check(a: &Tensor, b: &Tensor, extras: &[&Tensor], epilogue: &[Expr], in_pieces: bool) {
        let dtypes = vec![a.dtype; epilogue.len()];
        let g = Gemm {
            extras,
            scalars: &[Scalar::Float(0.25)],
            dtypes: &dtypes,
            ..Gemm::plain("test", a, b, epilogue, &a.dtype)
        };
        let product = Gemm::plain("test", a, b, &[Expr::input(0)], &DType::F32).compute_one().unwrap();
        let shape = product.shape();
        let nan = |_| Tensor::full(shape, f32::NAN, Device::Cpu).unwrap().to_dtype(a.dtype).unwrap();
        let outs: Vec<Tensor> = epilogue.iter().map(nan).collect();
        assert_eq!(Epilogue::try_run(&g, shape, &outs).unwrap(), in_pieces, "{a:?} {b:?}");
        let inputs: Vec<&Tensor> = std::iter::once(&product).chain(extras.iter().copied()).collect();
        let params = Params::from_scalars(&[Scalar::Float(0.25)]);
        let want = apply("test", &inputs, params, epilogue, &dtypes).unwrap();
        let got = g.compute_all().unwrap();
        let values = |t: &Tensor| t.to_dtype(DType::F32).unwrap().to_vec::<f32>().unwrap();
        for (i, want) in want.iter().enumerate() {
            let want = values(want);
            assert_eq!(values(&got[i]), want, "result {i} of {shape:?}");
            assert!(!in_pieces || values(&outs[i]) == want, "result {i} of {shape:?}, in pieces");
        }
    }

    /// Checks sizes around the tiles of the product, the tiles of the formula and the thread threshold, on one thread and on all threads.
    #[test]
    fn fused_epilogues_equal_separate_launches() {
        let x = |i| Expr::input(i);
        let sum = x(0) + x(1);
        let sizes =
            [(8, 8, 8), (9, 10, 300), (65, 33, 17), (1030, 10, 128), (600, 256, 300), (64, 1100, 513), (2600, 47, 300)];
        for (m, n, k) in sizes {
            let (a, b, bt) = (tensor([m, k], 1), tensor([k, n], 2), tensor([n, k], 3).t().unwrap());
            let (each, row, one) = (tensor([m, n], 4), tensor([1, n], 5), tensor([1, 1], 6));
            check(&a, &b, &[&row], &[sum.relu(), sum.clone()], true);
            check(&a, &bt, &[&row.reshape(n).unwrap()], from_ref(&sum), true);
            check(&a, &b, &[&each], &[x(0) * x(1).gt(0.0)], true);
            check(&a, &b, &[&row], &[sum.relu()], true);
            check(&a, &bt, &[&each], &[x(0) * x(1).relu().diff(1)], true);
            check(&a, &b, &[&one, &row, &each], &[x(0) * Expr::scalar(0) + (x(1) - x(2)) * x(3)], true);
            check(&a, &b, &[], &[x(0).sigmoid()], true);
            check(&a, &b, &[&tensor([m, 1], 7)], from_ref(&sum), false);
            check(&a, &b, &[&tensor([n, m], 8).t().unwrap()], from_ref(&sum), false);
        }
        for (count, m, n, k) in [(2, 9, 10, 8), (4, 65, 33, 17), (9, 30, 64, 300)] {
            let batch = |rows: usize, columns: usize, seed| {
                tensor([count * rows, columns], seed).reshape([count, rows, columns]).unwrap()
            };
            let (a, b, bt) = (batch(m, k, 1), batch(k, n, 2), batch(n, k, 3).transpose(1, 2).unwrap());
            check(&a, &b, &[&tensor([1, n], 5)], &[sum.relu(), sum.clone()], true);
            check(&a, &bt, &[&batch(m, n, 4)], from_ref(&sum), true);
            check(&tensor([m, k], 6), &b, &[&batch(m, n, 4)], from_ref(&sum), true);
        }
    }

    /// Epilogues in registers keep NaN, and the derivative of relu at 0 is 0, as in the formulas.
    #[test]
    fn special_values() {
        const VALUES: [f32; 7] = [0.0, f32::NAN, -0.0, f32::INFINITY, f32::NEG_INFINITY, 1e9, -1e9];
        let special = |n: usize| (0..n).map(|i| VALUES[i % 7]).collect::<Vec<f32>>();
        let x = |i| Expr::input(i);
        for (m, n, k) in [(9, 10, 17), (30, 64, 8), (13, 37, 600), (1030, 33, 2048)] {
            let (a, b) = (tensor([m, k], 1), tensor([k, n], 2));
            let product = a.matmul(&b).unwrap().to_vec::<f32>().unwrap();
            let (row, each) = (special(n), special(m * n));
            let run = |extra: &[f32], shape: [usize; 2], epilogue: &Expr| {
                let extra = Tensor::from_slice(extra, shape, Device::Cpu).unwrap();
                let g = Gemm { extras: &[&extra], ..Gemm::plain("test", &a, &b, from_ref(epilogue), &DType::F32) };
                g.compute_one().unwrap().to_vec::<f32>().unwrap()
            };
            let (added, relu) = (run(&row, [1, n], &(x(0) + x(1))), run(&row, [1, n], &(x(0) + x(1)).relu()));
            let slope = run(&each, [m, n], &(x(0) * x(1).relu().diff(1)));
            for i in 0..m * n {
                let same = |got: f32, want: f32| got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
                let sum = product[i] + row[i % n];
                assert!(same(added[i], sum), "{m} x {n} x {k}: {i}");
                assert!(same(relu[i], if sum <= 0.0 { 0.0 } else { sum }), "{m} x {n} x {k}, relu: {i}");
                let factor = if each[i] <= 0.0 { 0.0 } else { 1.0 };
                assert!(same(slope[i], product[i] * factor), "{m} x {n} x {k}, slope: {i}");
            }
        }
    }

    /// The epilogue rounds results to half precision, and reads half-precision extra operands as f32.
    #[test]
    fn halves() {
        let x = |i| Expr::input(i);
        let sum = x(0) + x(1);
        for dtype in [DType::F16, DType::BF16] {
            let half = |t: Tensor| t.to_dtype(dtype).unwrap();
            for (m, n, k) in [(8, 8, 8), (9, 10, 301), (65, 33, 17), (600, 256, 300), (64, 1100, 513)] {
                let (a, b) = (half(tensor([m, k], 1)), half(tensor([n, k], 3)).t().unwrap());
                let (each, row, one) = (tensor([m, n], 4), tensor([1, n], 5), tensor([1, 1], 6));
                check(&a, &b, &[], &[x(0)], true);
                check(&a, &b, &[&half(row.shallow_clone())], &[sum.relu(), sum.clone()], true);
                check(&a, &b, &[&half(one), &row, &each], &[x(0) * Expr::scalar(0) + (x(1) - x(2)) * x(3)], true);
                check(&a, &b, &[&half(each)], from_ref(&sum), false);
            }
        }
    }

    #[test]
    fn unsuitable_products_are_not_fused() {
        let sum = Expr::input(0) + Expr::input(1);
        for (m, n, k) in [(7, 9, 8), (8, 8, 2100)] {
            check(&tensor([m, k], 1), &tensor([k, n], 2), &[&tensor([1, n], 3)], from_ref(&sum), false);
        }
    }
}

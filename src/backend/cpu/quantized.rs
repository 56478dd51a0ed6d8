//! Elements of quantised weights and products with them on the CPU.

use smallvec::SmallVec;

use crate::backend::cpu::convert::{load_tile, store_tile};
use crate::backend::cpu::dispatch::vectorised;
use crate::backend::cpu::kernels::quantized::{self, Activations, Part};
use crate::backend::cpu::map;
use crate::backend::problem::map::{Formulas, Params};
use crate::backend::problem::quantized::{Dequantize, QuantizedGemm};
use crate::device::cpu::parallel;
use crate::dtype::quant::QuantFormat;
use crate::dtype::quant::blocks::{Unpack, decode, with_unpacker};
use crate::expr::Expr;
use crate::expr::program::Program;
use crate::storage::{Storage, with_host};
use crate::{DType, Error, Result, Tensor};

/// The number of elements in a job of the thread pool.
const JOB_ELEMENTS: usize = 1 << 14;

/// The maximum number of rows of activations for products with packed rows.
const MAX_ROWS: usize = 8;

/// Computes a product of few rows, and then the epilogue; returns false for more rows, and for activations that cannot be rounded.
pub(crate) fn multiply(g: &QuantizedGemm, outs: &[Tensor]) -> Result<bool> {
    let (m, k, n) = (g.x.shape().dims()[0], g.x.shape().dims()[1], outs[0].shape().dims()[1]);
    if m > MAX_ROWS {
        return Ok(false);
    }
    let in_place = outs[0].dtype == DType::F32 && outs[0].is_contiguous();
    let product =
        if in_place { outs[0].detach() } else { Tensor::empty_with_shape([m, n], DType::F32, outs[0].device())? };
    let weights = g.parts.iter().map(|part| &part.bytes.storage);
    let reads: SmallVec<[&Storage; 4]> = [&g.x.storage].into_iter().chain(weights).collect();
    let done = with_host(&reads, &[&product.storage], |reads, writes| {
        let mut x = vec![0f32; m * k];
        for (i, x) in x.chunks_exact_mut(k).enumerate() {
            let first = g.x.layout.offset as isize + i as isize * g.x.strides()[0];
            load_tile(g.x.dtype, reads[0], first as usize, g.x.strides()[1], x);
        }
        let Some(x) = Activations::new(m, &x) else { return false };
        let mut first = 0;
        let parts: SmallVec<[Part<QuantFormat>; 4]> = std::iter::zip(g.parts, &reads[1..])
            .map(|(part, bytes)| {
                let (row_bytes, start) = (part.row_bytes(), part.bytes.layout.offset);
                first += part.rows.len();
                let bytes = &bytes[start + part.rows.start * row_bytes..][..part.nbytes()];
                Part { format: part.format, row_bytes, bytes, first: first - part.rows.len() }
            })
            .collect();
        let out = &mut bytemuck::cast_slice_mut(writes[0])[product.layout.offset..][..m * n];
        quantized::multiply(&x, &parts, n, out);
        true
    })?;
    if !done {
        return Ok(false);
    }
    if !in_place || *g.epilogue != [Expr::input(0)] {
        let inputs: SmallVec<[&Tensor; 4]> = [&product].into_iter().chain(g.extras.iter().copied()).collect();
        let (outs, params) = (outs.iter().collect::<SmallVec<[&Tensor; 2]>>(), Params::from_scalars(g.scalars));
        let program = &Program::shared(g.epilogue);
        map::run_formulas(&Formulas { op: g.op, inputs: &inputs, params, program, outputs: &outs })?;
    }
    Ok(true)
}

/// Writes the elements of rows, converted from f32, to `out`.
pub(crate) fn dequantize(d: &Dequantize, out: &Tensor) -> Result<()> {
    let (weight, k, count) = (d.weight, d.weight.columns, out.shape().dims()[0]);
    let reads: SmallVec<[&Storage; 2]> = [&weight.bytes].into_iter().chain(d.index).map(|t| &t.storage).collect();
    with_host(&reads, &[&out.storage], |reads, writes| {
        let packed = &reads[0][weight.bytes.layout.offset..];
        let index = d.index.map(|index| {
            let mut rows = vec![0i64; count];
            load_tile(index.dtype, reads[1], index.layout.offset, 1, &mut rows);
            rows
        });
        let size = weight.rows.len();
        let is_out_of_range = |&&row: &&i64| !usize::try_from(row).is_ok_and(|row| row < size);
        if let Some(&index) = index.iter().flatten().find(is_out_of_range) {
            return Err(Error::IndexOutOfRange { op: d.op, index, size });
        }
        let element = out.dtype.size();
        let (out_row, row_bytes) = (k * element, weight.row_bytes());
        let out_bytes = &mut writes[0][out.layout.offset * element..][..count * out_row];
        let job = (JOB_ELEMENTS / k).max(1);
        parallel::for_each_chunk(out_bytes, job * out_row, |j, chunk| {
            let mut values = if out.dtype == DType::F32 { Vec::new() } else { vec![0f32; k] };
            for (i, out_bytes) in chunk.chunks_exact_mut(out_row).enumerate() {
                let row = index.as_ref().map_or(j * job + i, |index| index[j * job + i] as usize) + weight.rows.start;
                let blocks = &packed[row * row_bytes..][..row_bytes];
                let to = if values.is_empty() { bytemuck::cast_slice_mut(out_bytes) } else { &mut values[..] };
                with_unpacker!(weight.format, k, |unpacker| decode_row(unpacker, blocks, to));
                if !values.is_empty() {
                    store_tile(out.dtype, &values, out_bytes, 0, 1);
                }
            }
        });
        Ok(())
    })?
}

vectorised! {
    fn decode_row<'a, U: Unpack>(_simd: S, unpacker: U, blocks: &'a [u8], out: &'a mut [f32]) {
        decode(unpacker, blocks, out);
    }
}

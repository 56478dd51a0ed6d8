//! Elements of quantised weights and products with them on the CPU.

use smallvec::SmallVec;

use crate::backend::cpu::convert::{load_tile, store_tile};
use crate::backend::cpu::dispatch::vectorised;
use crate::backend::problem::quantized::{Dequantize, QuantizedGemm};
use crate::device::cpu::parallel;
use crate::dtype::quant::blocks::{Unpack, decode, with_unpacker};
use crate::storage::{Storage, with_host};
use crate::{DType, Error, Result, Tensor};

/// The number of elements in a job of the thread pool.
const JOB_ELEMENTS: usize = 1 << 14;

/// Declines every product.
pub(crate) fn multiply(_: &QuantizedGemm, _: &[Tensor]) -> Result<bool> {
    Ok(false)
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

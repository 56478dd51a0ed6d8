//! Elements of quantised weights on OpenCL devices.

use crate::backend::problem::quantized::Dequantize;
use crate::dtype::quant::blocks::{decode, with_unpacker};
use crate::{DType, Error, Result, Tensor};

/// Writes the elements of rows to `out`. The packed bytes are unpacked on the host.
pub(crate) fn dequantize(d: &Dequantize, out: &Tensor) -> Result<()> {
    let (weight, k, size) = (d.weight, d.weight.columns, d.weight.rows.len());
    let memory = weight.bytes.storage.read_vec::<u8>(0, weight.bytes.storage.nbytes())?;
    let rows = match d.index {
        Some(index) => index.to_dtype(DType::I64)?.to_vec::<i64>()?,
        None => (0..size as i64).collect(),
    };
    let (mut values, mut blocks) = (vec![0f32; out.numel()], vec![0; weight.row_bytes()]);
    for (&index, values) in rows.iter().zip(values.chunks_exact_mut(k)) {
        let row = usize::try_from(index).ok().filter(|row| *row < size);
        let row = row.ok_or(Error::IndexOutOfRange { op: d.op, index, size })?;
        weight.copy_blocks(true, &memory, weight.rows.start + row, &mut blocks);
        with_unpacker!(weight.format, k, |unpacker| decode(unpacker, &blocks, values));
    }
    out.copy_(&Tensor::from_vec(values, out.shape(), out.device())?).map(|_| ())
}

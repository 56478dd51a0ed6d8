//! Elements of quantised weights on OpenCL devices.

use crate::backend::problem::quantized::Dequantize;
use crate::dtype::quant::blocks::{decode, with_unpacker};
use crate::{DType, Error, Result, Tensor};

/// Writes the elements of rows to `out`. The packed bytes are unpacked on the host.
pub(crate) fn dequantize(d: &Dequantize, out: &Tensor) -> Result<()> {
    let (weight, k, size) = (d.weight, d.weight.columns, d.weight.rows.len());
    let blocks = weight.read_blocks(true)?;
    let rows = match d.index {
        Some(index) => index.to_dtype(DType::I64)?.to_vec::<i64>()?,
        None => (0..size as i64).collect(),
    };
    let mut values = vec![0f32; out.numel()];
    for (&index, values) in rows.iter().zip(values.chunks_exact_mut(k)) {
        let row = usize::try_from(index).ok().filter(|row| *row < size);
        let row = row.ok_or(Error::IndexOutOfRange { op: d.op, index, size })?;
        let row = &blocks[row * weight.row_bytes()..][..weight.row_bytes()];
        with_unpacker!(weight.format, k, |unpacker| decode(unpacker, row, values));
    }
    out.copy_(&Tensor::from_vec(values, out.shape(), out.device())?).map(|_| ())
}

//! Quantised weights by the definition of each format, element by element.

use half::f16;

use super::formula;
use super::values::{read, read_as, write};
use crate::backend::problem::map::Params;
use crate::backend::problem::quantized::{Dequantize, PackedRows, QuantizedGemm};
use crate::dtype::quant::{GroupOffset, QuantFormat};
use crate::{Compute, Result, Scalar, Tensor};

/// Returns element `e` of a block `b`.
fn element(format: QuantFormat, b: &[u8], e: usize) -> f32 {
    let half = |at: usize| f16::from_le_bytes([b[at], b[at + 1]]).to_f32();
    let nibble = |at: usize| if e % 32 < 16 { b[at + e % 32] & 15 } else { b[at + e % 32 - 16] >> 4 };
    let bit = |at: usize, i: usize| b[at + i / 8] >> (i % 8) & 1;
    let int = |q: u8| f32::from(q);
    let (s, t, l) = (e / 16, e / 32, e % 32);
    let pair = |at: usize| {
        let s = |i: usize| b[at + i];
        match t {
            ..4 => (int(s(t) & 63), int(s(t + 4) & 63)),
            _ => (int((s(t + 4) & 15) + (s(t - 4) >> 6) * 16), int((s(t + 4) >> 4) + (s(t) >> 6) * 16)),
        }
    };
    match format {
        QuantFormat::Q8_0 => f32::from(b[2 + e] as i8) * half(0),
        QuantFormat::Q4_0 => half(0) * (int(nibble(2)) - 8.0),
        QuantFormat::Q4_1 => half(0) * int(nibble(4)) + half(2),
        QuantFormat::Q5_0 => half(0) * (int(nibble(6)) + 16.0 * int(bit(2, e)) - 16.0),
        QuantFormat::Q5_1 => half(0) * (int(nibble(8)) + 16.0 * int(bit(4, e))) + half(2),
        QuantFormat::Q2K => {
            let q = b[16 + 32 * (e / 128) + l] >> (2 * (e % 128 / 32)) & 3;
            half(80) * int(b[s] & 15) * int(q) - half(82) * int(b[s] >> 4)
        }
        QuantFormat::Q3K => {
            let low = int(b[32 + 32 * (e / 128) + l] >> (2 * (e % 128 / 32)) & 3);
            let q = if b[l] >> (e / 32) & 1 == 1 { low } else { low - 4.0 };
            let low = if s < 8 { b[96 + s] & 15 } else { b[88 + s] >> 4 };
            let scale = int(low + (b[104 + s % 4] >> (2 * (s / 4)) & 3) * 16) - 32.0;
            half(108) * scale * q
        }
        QuantFormat::Q4K | QuantFormat::Q5K => {
            let (a, m) = pair(4);
            let high = format == QuantFormat::Q5K;
            let q = b[if high { 48 } else { 16 } + 32 * (e / 64) + l] >> (4 * (t % 2)) & 15;
            let q = if high { q + (b[16 + l] >> t & 1) * 16 } else { q };
            half(0) * a * int(q) - half(2) * m
        }
        QuantFormat::Q6K => {
            let low = b[64 * (e / 128) + e % 64] >> (4 * (e % 128 / 64)) & 15;
            let high = b[128 + 32 * (e / 128) + l] >> (2 * (e % 128 / 32)) & 3;
            half(208) * f32::from(b[192 + s] as i8) * (int(low + 16 * high) - 32.0)
        }
        QuantFormat::Grouped { bits, offset, .. } => {
            let at = if offset == GroupOffset::None { 2 } else { 4 };
            let q = if bits == 4 { nibble(at + t * 16) } else { b[at + e] };
            match offset {
                GroupOffset::None if bits == 4 => half(0) * (int(q) - 8.0),
                GroupOffset::None => half(0) * f32::from(q as i8),
                GroupOffset::Zero => half(0) * (int(q) - f32::from(u16::from_le_bytes([b[2], b[3]]))),
                GroupOffset::Min => half(0) * int(q) + half(2),
            }
        }
    }
}

/// Returns the elements of all rows of a part.
fn elements(weight: &PackedRows) -> Result<Vec<Vec<f32>>> {
    let (format, k) = (weight.format, weight.columns);
    let (len, bytes) = (format.block_len(k), format.block_bytes(k));
    let blocks = weight.read_blocks(false)?;
    let row = |row: &[u8]| (0..k).map(|e| element(format, &row[e / len * bytes..][..bytes], e % len)).collect();
    Ok(blocks.chunks_exact(weight.row_bytes()).map(row).collect())
}

pub(super) fn dequantize(d: &Dequantize, out: &Tensor) -> Result<()> {
    let rows = elements(d.weight)?;
    let index = match d.index {
        Some(index) => read(index)?.iter().map(|i| i.to_i64() as usize).collect(),
        None => (0..rows.len()).collect::<Vec<_>>(),
    };
    write(out, index.into_iter().flat_map(|i| rows[i].clone()))
}

pub(super) fn gemm(g: &QuantizedGemm, outs: &[Tensor]) -> Result<()> {
    let weight: Vec<Vec<f32>> = g.parts.iter().map(elements).collect::<Result<Vec<_>>>()?.concat();
    let (x, shape) = (read(g.x)?, outs[0].shape());
    let extras = g.extras.iter().map(|t| read_as(t, shape)).collect::<Result<Vec<_>>>()?;
    let mut results = vec![Vec::new(); outs.len()];
    for (i, x) in x.rows().into_iter().enumerate() {
        for (j, w) in weight.iter().enumerate() {
            let product: f64 = x.iter().zip(w).map(|(x, &w)| x.to_f64() * f64::from(w)).sum();
            let inputs: Vec<Scalar> = [product.into()].into_iter().chain(extras.iter().map(|t| t[[i, j]])).collect();
            for (result, epilogue) in results.iter_mut().zip(g.epilogue) {
                result.push(formula::value(epilogue, &inputs, Params::from_scalars(g.scalars), 0, Compute::F32));
            }
        }
    }
    outs.iter().zip(results).try_for_each(|(out, result)| write(out, result))
}

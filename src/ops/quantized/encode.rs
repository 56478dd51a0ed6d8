//! Makes quantised weights: from floats, by the rules of the package `gguf`, and from the layouts of GPTQ and AWQ.

use half::f16;

use super::QuantizedTensor;
use crate::device::cpu::parallel;
use crate::dtype::quant::{Group, GroupOffset, QuantFormat};
use crate::ops::dispatch::prelude::*;

/// How the elements of a block are rounded to integers.
#[derive(Debug, Clone, Copy)]
enum Rounding {
    /// `d = max|x| / 127`, and signed integers.
    Signed,
    /// `d` is the element of the greatest absolute value over `-n`, and integers are `x / d + n`.
    Centred(f32),
    /// `d = (max - min) / steps`, and integers are `(x - min) / d`.
    Min(f32),
    /// The same with a minimum of at most 0, which is a multiple of `d`.
    Zero(f32),
}

/// Returns the bits of an integer and the rounding of a format; `None` for formats that only files have.
fn encoding(format: QuantFormat) -> Option<(u32, Rounding)> {
    Some(match format {
        QuantFormat::Q8_0 => (8, Rounding::Signed),
        QuantFormat::Q4_0 => (4, Rounding::Centred(8.0)),
        QuantFormat::Q4_1 => (4, Rounding::Min(15.0)),
        QuantFormat::Q5_0 => (5, Rounding::Centred(16.0)),
        QuantFormat::Q5_1 => (5, Rounding::Min(31.0)),
        QuantFormat::Grouped { bits, offset, .. } => {
            let (bits, steps) = if bits == 4 { (4, 15.0) } else { (8, 255.0) };
            match offset {
                GroupOffset::None if bits == 4 => (4, Rounding::Centred(8.0)),
                GroupOffset::None => (8, Rounding::Signed),
                GroupOffset::Zero => (bits, Rounding::Zero(steps)),
                GroupOffset::Min => (bits, Rounding::Min(steps)),
            }
        }
        _ => return None,
    })
}

/// Quantises a block, with f32 arithmetic in the order of `gguf`. `q` is a buffer for the integers. Returns false if f16 cannot hold the
/// scale or the minimum.
fn encode_block((bits, rounding): (u32, Rounding), x: &[f32], q: &mut Vec<u8>, out: &mut [u8]) -> bool {
    let inverse = |d: f32| if d == 0.0 { 0.0 } else { 1.0 / d };
    let (min, max) = x.iter().fold((x[0], x[0]), |(min, max), &x| (x.min(min), x.max(max)));
    q.clear();
    let (d, second): (f32, Option<u16>) = match rounding {
        Rounding::Signed => {
            let d = min.abs().max(max.abs()) / 127.0;
            q.extend(x.iter().map(|x| (x * inverse(d)).round() as i8 as u8));
            (d, None)
        }
        Rounding::Centred(n) => {
            let greatest = x.iter().fold(x[0], |most, &x| if x.abs() > most.abs() { x } else { most });
            let d = greatest / -n;
            q.extend(x.iter().map(|x| (x * inverse(d) + (n + 0.5)).clamp(0.0, 2.0 * n - 1.0) as u8));
            (d, None)
        }
        Rounding::Min(steps) => {
            let d = (max - min) / steps;
            q.extend(x.iter().map(|x| ((x - min) * inverse(d) + 0.5).clamp(0.0, steps) as u8));
            (d, Some(f16::from_f32(min).to_bits()))
        }
        Rounding::Zero(steps) => {
            let d = (max.max(0.0) - min.min(0.0)) / steps;
            let zero = (-min.min(0.0) * inverse(d)).round();
            q.extend(x.iter().map(|x| ((x * inverse(d)).round() + zero).clamp(0.0, steps) as u8));
            (d, Some(zero as u16))
        }
    };
    write_block(bits, f16::from_f32(d), second, q, out);
    let is_min = matches!(rounding, Rounding::Min(_));
    f16::from_f32(d).is_finite() && second.is_none_or(|m| !is_min || f16::from_bits(m).is_finite())
}

/// Writes a block: the scale, the minimum or zero point, the fifth bits, and the low bits of 32 integers after another.
fn write_block(bits: u32, d: f16, second: Option<u16>, q: &[u8], out: &mut [u8]) {
    let (scale, mut rest) = out.split_at_mut(2);
    scale.copy_from_slice(&d.to_le_bytes());
    if let Some(second) = second {
        let (bytes, after) = rest.split_at_mut(2);
        bytes.copy_from_slice(&second.to_le_bytes());
        rest = after;
    }
    if bits == 5 {
        let high = q.iter().enumerate().fold(0u32, |high, (e, q)| high | u32::from(q >> 4) << e);
        let (fifth, low) = rest.split_at_mut(4);
        fifth.copy_from_slice(&high.to_le_bytes());
        rest = low;
    }
    match bits {
        8 => rest.copy_from_slice(q),
        _ => {
            for (q, out) in q.chunks_exact(32).zip(rest.chunks_exact_mut(16)) {
                let (low, high) = q.split_at(16);
                out.iter_mut().zip(low.iter().zip(high)).for_each(|(out, (low, high))| *out = low & 15 | high << 4);
            }
        }
    }
}

/// Returns the group of `len` elements in rows of `columns` elements.
fn group_of(op: &'static str, len: usize, columns: usize) -> Result<Group> {
    Ok(match len {
        32 => Group::N32,
        64 => Group::N64,
        128 => Group::N128,
        _ if len == columns => Group::Row,
        _ => invalid!(op, "groups of {len} elements: give 32, 64, 128 or the {columns} elements of a row"),
    })
}

/// Checks and copies the matrices of a file to the host: words, words of zero points, and f16 scales, with the sizes of each.
fn read_matrices(op: &'static str, words: [&Tensor; 2], scales: &Tensor) -> Result<([Vec<i32>; 2], Vec<f16>)> {
    let [qweight, qzeros] = words;
    same_device(op, &[qweight, qzeros, scales])?;
    for t in words {
        unsupported!(op if t.dtype != DType::I32, t.dtype, "i32 for packed integers");
    }
    unsupported!(op if !scales.dtype.is_float(), scales.dtype, "floats for scales");
    let all = [qweight, qzeros, scales];
    invalid!(op if all.iter().any(|t| t.rank() != 2), "the tensors are matrices, these have shapes {}, {} and {}",
        qweight.shape(), qzeros.shape(), scales.shape());
    Ok(([qweight.to_vec::<i32>()?, qzeros.to_vec::<i32>()?], scales.to_dtype(DType::F16)?.to_vec::<f16>()?))
}

/// Makes the weight of `n` rows of `k` elements from functions of row and column: `q` returns integers, and `group(row, g)` the scale and
/// the zero point of group `g`.
fn repack(
    device: Device,
    [n, k]: [usize; 2],
    (bits, group): (u8, Group),
    q: impl Fn(usize, usize) -> u8 + Sync,
    scale: impl Fn(usize, usize) -> (f16, u16) + Sync,
) -> Result<QuantizedTensor> {
    let format = QuantFormat::Grouped { bits, group, offset: GroupOffset::Zero };
    let ([_, row_bytes], len) = (super::packed_size("repack", &[n, k].into(), format)?, format.block_len(k));
    let mut bytes = vec![0; n * row_bytes];
    parallel::for_each_chunk(&mut bytes, row_bytes, |row, out| {
        for (g, out) in out.chunks_exact_mut(format.block_bytes(k)).enumerate() {
            let integers: Vec<u8> = (g * len..(g + 1) * len).map(|column| q(row, column)).collect();
            let (d, zero) = scale(row, g);
            write_block(bits.into(), d, Some(zero), &integers, out);
        }
    });
    QuantizedTensor::from_bytes(&bytes, [n, k], format, device)
}

impl QuantizedTensor {
    /// Quantises a tensor `[.., n, k]` of floats on the host, and stores the result on the tensor's device. Blocks of GGUF's formats get the
    /// same bytes as from the Python package `gguf`. An element differs by at most half a step of its block from its rounded value, and the
    /// scale of the block, in f16, by a relative `2^-11`; the greatest element of a block of `Q4_0`, `Q5_0` and groups of four bits without
    /// offset may differ by a whole step.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] for integers; [`Error::Invalid`] for the formats with blocks of 256 elements (read such weights from a
    /// file), for rows that are no multiple of the block, and for elements that are not finite or too large for an f16 scale.
    ///
    /// ```
    /// use claystone::quantized::{QuantFormat, QuantizedTensor};
    /// use claystone::{DType, Device, Tensor};
    /// let x = Tensor::randn([16, 64], Device::Cpu)?;
    /// let w = QuantizedTensor::quantize(&x, QuantFormat::Q8_0)?;
    /// assert_eq!(w.nbytes(), 16 * 2 * 34);
    /// assert!(w.dequantize(DType::F32)?.sub(&x)?.abs()?.max((), false)?.item::<f32>()? < 0.03);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn quantize(x: &Tensor, format: QuantFormat) -> Result<QuantizedTensor> {
        let _caller = Caller::enter();
        let op = "QuantizedTensor::quantize";
        x.dtype.check_float(op)?;
        let Some(encoding) = encoding(format) else {
            invalid!(op, "no rule for making {format} blocks: read them from a GGUF file");
        };
        let [rows, row_bytes] = super::packed_size(op, x.shape(), format)?;
        let values = x.detach().to_dtype(DType::F32)?.to_vec::<f32>()?;
        let (k, mut bytes) = (x.shape().dims()[x.rank() - 1], vec![0; rows * row_bytes]);
        let (len, block_bytes) = (format.block_len(k), format.block_bytes(k));
        let failed = std::sync::atomic::AtomicBool::new(values.iter().any(|x| !x.is_finite()));
        parallel::for_each_chunk(&mut bytes, row_bytes, |row, out| {
            let (x, mut q) = (values[row * k..][..k].chunks_exact(len), Vec::with_capacity(len));
            let mut blocks = x.zip(out.chunks_exact_mut(block_bytes));
            if !blocks.all(|(x, out)| encode_block(encoding, x, &mut q, out)) {
                failed.store(true, std::sync::atomic::Ordering::Relaxed);
            }
        });
        invalid!(op if failed.into_inner(), "elements are not finite, or too large for scales in f16");
        QuantizedTensor::from_bytes(&bytes, x.shape(), format, x.device()).with_op(op)
    }

    /// Repacks a weight `[n, k]` as GPTQ stores it: `qweight` i32 `[k / (32 / bits), n]`, with consecutive elements of `k` from the lowest
    /// bits on; `qzeros` i32 `[k / group, n / (32 / bits)]`, with zero points less one; `scales` `[k / group, n]`. There are 4 or 8 bits, as
    /// the sizes tell. Rows must not have been reordered (`g_idx` other than `i / group`: `desc_act` is false).
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] for other dtypes, [`Error::DeviceMismatch`], and [`Error::Invalid`] for sizes that do not match, and for
    /// groups other than 32, 64, 128 and `k`.
    #[track_caller]
    pub fn from_gptq(qweight: &Tensor, qzeros: &Tensor, scales: &Tensor, group: usize) -> Result<QuantizedTensor> {
        let _caller = Caller::enter();
        let op = "QuantizedTensor::from_gptq";
        let ([weights, zeros], factors) = read_matrices(op, [qweight, qzeros], scales)?;
        let (words, n, groups) = (qweight.shape().dims()[0], qweight.shape().dims()[1], scales.shape().dims()[0]);
        let k = groups.saturating_mul(group);
        let bits = [4, 8].into_iter().find(|bits| words.checked_mul(32 / bits) == Some(k));
        let Some(bits) =
            bits.filter(|bits| scales.shape().dims()[1] == n && qzeros.shape().dims() == [groups, n * bits / 32])
        else {
            invalid!(
                op,
                "shapes {}, {} and {} do not match for groups of {group}",
                qweight.shape(),
                qzeros.shape(),
                scales.shape()
            );
        };
        let (per_word, mask) = (32 / bits, (1 << bits) - 1);
        let field = |word: i32, i: usize| word >> (bits * i) & mask;
        let q = |row: usize, column: usize| field(weights[column / per_word * n + row], column % per_word) as u8;
        let scale = |row: usize, g: usize| {
            let zero = field(zeros[g * (n / per_word) + row / per_word], row % per_word);
            (factors[g * n + row], zero as u16 + 1)
        };
        repack(qweight.device(), [n, k], (bits as u8, group_of(op, group, k)?), q, scale).with_op(op)
    }

    /// Repacks a weight `[n, k]` of 4 bits as AWQ stores it: `qweight` i32 `[k, n / 8]`, with columns 0, 2, 4, 6, 1, 3, 5 and 7 of each 8
    /// from the lowest bits on; `qzeros` i32 `[k / group, n / 8]` in the same order; `scales` `[k / group, n]`. Fails as
    /// [`from_gptq`](Self::from_gptq) does.
    #[track_caller]
    pub fn from_awq(qweight: &Tensor, qzeros: &Tensor, scales: &Tensor, group: usize) -> Result<QuantizedTensor> {
        const NIBBLE: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7]; // the inverse of the order of columns
        let _caller = Caller::enter();
        let op = "QuantizedTensor::from_awq";
        let ([weights, zeros], factors) = read_matrices(op, [qweight, qzeros], scales)?;
        let (k, words, n) = (qweight.shape().dims()[0], qweight.shape().dims()[1], scales.shape().dims()[1]);
        let groups = scales.shape().dims()[0];
        let fits = groups.checked_mul(group) == Some(k) && words * 8 == n && qzeros.shape().dims() == [groups, words];
        invalid!(op if !fits,
            "shapes {}, {} and {} do not match for groups of {group}", qweight.shape(), qzeros.shape(), scales.shape());
        let field = |word: i32, column: usize| (word >> (4 * NIBBLE[column % 8]) & 15) as u8;
        let q = |row: usize, column: usize| field(weights[column * words + row / 8], row);
        let scale = |row: usize, g: usize| (factors[g * n + row], field(zeros[g * words + row / 8], row).into());
        repack(qweight.device(), [n, k], (4, group_of(op, group, k)?), q, scale).with_op(op)
    }
}

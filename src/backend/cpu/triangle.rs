//! `tril` and `triu` on the CPU: copies a part of each row and fills the rest of the row with zeros.

use crate::device::cpu::parallel;
use crate::device::cpu::streaming::{STREAMING_MIN_BYTES, Streaming};
use crate::storage::with_host;
use crate::{Result, Tensor};

/// The number of elements in a job of the thread pool.
const JOB_ELEMENTS: usize = 1 << 14;

/// Copies a batch of non-empty matrices `x`, with zeros where the column index minus the row index is in `from..to`.
pub(crate) fn tril_triu(x: &Tensor, from: isize, to: isize) -> Result<Tensor> {
    let x = x.detach().contiguous()?;
    let out = Tensor::empty_with_shape(x.shape(), x.dtype, x.device())?;
    let [.., rows, columns] = *x.shape().dims() else { unreachable!("two dimensions at least") };
    let size = x.dtype.size();
    with_host(&[&x.storage], &[&out.storage], |reads, writes| {
        let all = x.numel() * size;
        let (x, out) = (&reads[0][x.layout.offset * size..][..all], &mut writes[0][..all]);
        let job = JOB_ELEMENTS.div_ceil(columns);
        parallel::for_each_chunk(out, job * columns * size, |i, part| {
            let streaming = (all >= STREAMING_MIN_BYTES).then(Streaming::new);
            let x = &x[i * job * columns * size..][..part.len()];
            let lines = part.chunks_mut(columns * size).zip(x.chunks(columns * size));
            for (row, (out, x)) in (i * job..).zip(lines) {
                let place = |d: isize| d.saturating_add_unsigned(row % rows).clamp(0, columns as isize) as usize * size;
                let (from, to) = (place(from), place(to).max(place(from)));
                for kept in [0..from, to..out.len()] {
                    match &streaming {
                        Some(streaming) => streaming.copy(&mut out[kept.clone()], &x[kept]),
                        None => out[kept.clone()].copy_from_slice(&x[kept]),
                    }
                }
                out[from..to].fill(0);
            }
        });
    })?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, Device};

    #[test]
    fn every_diagonal_of_matrices_of_every_size() -> Result<()> {
        for (shape, dtype) in [
            ([3, 1, 1], DType::F64),
            ([2, 5, 3], DType::U8),
            ([2, 3, 5], DType::F16),
            ([7, 100, 70], DType::F32),
            ([2, 3000, 1100], DType::F32),
        ] {
            let [_, rows, columns] = shape;
            let numbers: Vec<f64> = (0..shape.iter().product()).map(|i| (i * 31 % 120 + 1) as f64).collect();
            let wide = Tensor::from_slice(&numbers, shape, Device::Cpu)?.to_dtype(dtype)?;
            let permuted = wide.transpose(1, 2)?.contiguous()?.transpose(1, 2)?;
            let (r, c) = (rows as isize, columns as isize);
            for (from, to) in
                [(1, isize::MAX), (isize::MIN, 0), (-r, c), (c, isize::MAX), (isize::MIN, 1 - r), (0, 2), (2, 0)]
            {
                for x in [&wide, &permuted] {
                    let got = tril_triu(x, from, to)?.to_dtype(DType::F64)?.to_vec::<f64>()?;
                    for (i, (got, x)) in got.iter().zip(&numbers).enumerate() {
                        let place = (i % columns) as isize - (i / columns % rows) as isize;
                        let right = if (from..to).contains(&place) { 0.0 } else { *x };
                        assert_eq!(*got, right, "{i} of {shape:?}, {from} {to}");
                    }
                }
            }
        }
        Ok(())
    }
}

//! The indices of nonzero elements on the CPU. The nonzero elements of each block of a mask are counted first; the counts give the
//! position of each block's indices in the result.

use crate::device::cpu::parallel;
use crate::storage::with_host;
use crate::{DType, Result, Tensor};

/// The number of mask elements in a job.
const BLOCK_LEN: usize = 1 << 14;
/// The number of indices that are collected before they are written.
const INDEX_BUFFER_LEN: usize = 256;

/// Returns the indices of true elements in a contiguous mask, in row-major order, as a tensor `[count, rank]`. The mask is not empty, and
/// its elements are indexed as in a tensor with sizes `dims`.
pub(crate) fn nonzero_indices(mask: &Tensor, dims: &[usize]) -> Result<Tensor> {
    let (numel, rank) = (mask.numel(), dims.len());
    let block = |i: usize| {
        let from = mask.layout.offset + i * BLOCK_LEN;
        from..from + BLOCK_LEN.min(numel - i * BLOCK_LEN)
    };
    let counts = with_host(&[&mask.storage], &[], |reads, _| {
        parallel::map(numel.div_ceil(BLOCK_LEN), 4, |i| count_true(&reads[0][block(i)]))
    })?;
    let count = mask.storage.simulated_count("nonzero", numel).unwrap_or_else(|| counts.iter().sum());
    let out = Tensor::empty_with_shape([count, rank], DType::I64, mask.device())?;
    if out.numel() > 0 {
        with_host(&[&mask.storage], &[&out.storage], |reads, writes| {
            let mut rest: &mut [i64] = &mut bytemuck::cast_slice_mut(&mut *writes[0])[..out.numel()];
            let mut work = Vec::with_capacity(counts.len());
            for count in counts {
                let (of_block, others) = rest.split_at_mut(count * rank);
                work.push(of_block);
                rest = others;
            }
            let one = |i: usize, to: &mut &mut [i64]| write_indices(&reads[0][block(i)], i * BLOCK_LEN, dims, to);
            match work.len() {
                1 => one(0, &mut work[0]),
                _ => parallel::for_each(&mut work, one),
            }
        })?;
    }
    Ok(out)
}

fn count_true(mask: &[u8]) -> usize {
    // At most 128 elements are counted at a time, so that the count fits in a byte.
    mask.chunks(128).map(|some| usize::from(some.iter().map(|&b| u8::from(b != 0)).sum::<u8>())).sum()
}

/// Writes the indices of true elements in `mask`, whose first element has flat index `first`, until `out` is full. If another thread
/// changed the mask after the count, the indices may be wrong, but no memory outside `out` is written.
fn write_indices(mask: &[u8], first: usize, dims: &[usize], mut out: &mut [i64]) {
    let Some((&inner, outer)) = dims.split_last() else { return };
    let (mut index, mut row) = (vec![0; outer.len()], first / inner);
    for (i, &size) in index.iter_mut().zip(outer).rev() {
        *i = (row % size) as i64;
        row /= size;
    }
    let (mut column, mut at, mut found) = (first % inner, 0, [0; INDEX_BUFFER_LEN]);
    while at < mask.len() {
        let len = INDEX_BUFFER_LEN.min(inner - column).min(mask.len() - at);
        let mut n = 0;
        for (i, &b) in mask[at..at + len].iter().enumerate() {
            found[n % INDEX_BUFFER_LEN] = (column + i) as i64;
            n += usize::from(b != 0);
        }
        let (rows, rest) = {
            let len = out.len().min(n * dims.len());
            std::mem::take(&mut out).split_at_mut(len)
        };
        out = rest;
        match index[..] {
            [] => rows.copy_from_slice(&found[..rows.len()]),
            [row] => rows.as_chunks_mut().0.iter_mut().zip(found).for_each(|(to, column)| *to = [row, column]),
            _ => rows.chunks_exact_mut(dims.len()).zip(found).for_each(|(to, column)| {
                to.iter_mut().zip(index.iter().copied().chain([column])).for_each(|(to, i)| *to = i);
            }),
        }
        (at, column) = (at + len, column + len);
        if column == inner {
            column = 0;
            for (i, &size) in index.iter_mut().zip(outer).rev() {
                *i += 1;
                if *i < size as i64 {
                    break;
                }
                *i = 0;
            }
        }
    }
    out.fill(0);
}

//! The indices of what is true in a mask, on the CPU: each block is counted, then its indices are written where they begin.

use crate::device::cpu::parallel;
use crate::storage::with_host;
use crate::{DType, Result, Tensor};

/// Elements of the mask that a thread goes through at a time.
const BLOCK: usize = 1 << 14;
/// Indices that are found before they are written.
const SOME: usize = 256;

/// For what is true in a contiguous mask its position in row-major order, taken as one of a tensor of sizes `dims`: a row of
/// indices each. The mask has elements.
pub(crate) fn indices(mask: &Tensor, dims: &[usize]) -> Result<Tensor> {
    let (numel, rank) = (mask.numel(), dims.len());
    let block = |i: usize| {
        let from = mask.layout.offset + i * BLOCK;
        from..from + BLOCK.min(numel - i * BLOCK)
    };
    let counts = with_host(&[&mask.storage], &[], |reads, _| {
        parallel::map(numel.div_ceil(BLOCK), 4, |i| count(&reads[0][block(i)]))
    })?;
    let out = Tensor::empty_like_shape([counts.iter().sum(), rank], DType::I64, mask.device())?;
    if out.numel() > 0 {
        with_host(&[&mask.storage], &[&out.storage], |reads, writes| {
            let mut rest: &mut [i64] = &mut bytemuck::cast_slice_mut(&mut *writes[0])[..out.numel()];
            let mut work = Vec::with_capacity(counts.len());
            for count in counts {
                let (of_block, others) = rest.split_at_mut(count * rank);
                work.push(of_block);
                rest = others;
            }
            let one = |i: usize, to: &mut &mut [i64]| fill(&reads[0][block(i)], i * BLOCK, dims, to);
            match work.len() {
                1 => one(0, &mut work[0]),
                _ => parallel::for_each(&mut work, one),
            }
        })?;
    }
    Ok(out)
}

fn count(mask: &[u8]) -> usize {
    // Few enough at a time to be counted in bytes.
    mask.chunks(128).map(|some| usize::from(some.iter().map(|&b| u8::from(b != 0)).sum::<u8>())).sum()
}

/// The indices of what is true in `mask`, whose first element is the `first` of all, until `out` is full: another thread may
/// have written to the mask since it was counted.
fn fill(mask: &[u8], first: usize, dims: &[usize], mut out: &mut [i64]) {
    let Some((&inner, outer)) = dims.split_last() else { return };
    let (mut index, mut row) = (vec![0; outer.len()], first / inner);
    for (i, &size) in index.iter_mut().zip(outer).rev() {
        *i = (row % size) as i64;
        row /= size;
    }
    let (mut column, mut at, mut found) = (first % inner, 0, [0; SOME]);
    while at < mask.len() {
        let len = SOME.min(inner - column).min(mask.len() - at);
        let mut n = 0;
        for (i, &b) in mask[at..at + len].iter().enumerate() {
            found[n % SOME] = (column + i) as i64;
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

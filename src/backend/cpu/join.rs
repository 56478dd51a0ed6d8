//! Concatenation on the CPU, in one pass over the result.

use bytemuck::Pod;
use smallvec::SmallVec;

use crate::backend::cpu::partition::step;
use crate::backend::problem::lines::row_step;
use crate::device::cpu::streaming::{LARGE, Streaming};
use crate::device::cpu::{copy, parallel};
use crate::storage::{Storage, with_host};
use crate::{Result, Tensor};

/// Fills `out`, new and contiguous, with the tensors one after another along dimension `d`; gives whether it could: their
/// elements have to lie in rows from there on.
pub(crate) fn join(out: &Tensor, tensors: &[&Tensor], d: usize) -> Result<bool> {
    let outer: usize = out.shape().dims()[..d].iter().product();
    let size = out.dtype.size();
    // Where all of them are one row each, plain copies are as good.
    if outer < 2 || out.numel() == 0 {
        return Ok(false);
    }
    let mut reads: SmallVec<[&Storage; 4]> = SmallVec::new();
    let mut steps: SmallVec<[(usize, isize, usize); 4]> = SmallVec::new();
    for t in tensors.iter().filter(|t| t.numel() > 0) {
        match row_step(t, d) {
            Some(step) if t.dtype == out.dtype => {
                reads.push(&t.storage);
                steps.push((t.layout.offset * size, step * size as isize, t.numel() / outer * size));
            }
            _ => return Ok(false),
        }
    }
    with_host(&reads, &[&out.storage], |reads, writes| {
        let rows: SmallVec<[JoinedRows; 4]> = reads
            .iter()
            .zip(&steps)
            .map(|(bytes, &(start, step, len))| JoinedRows { bytes, start, step, len })
            .collect();
        let start = out.layout.offset * size;
        fill(&rows, size, &mut writes[0][start..start + out.numel() * size]);
    })?;
    out.storage.filled();
    Ok(true)
}

/// A tensor's elements as rows of one length, evenly apart. In bytes.
struct JoinedRows<'a> {
    bytes: &'a [u8],
    start: usize,
    /// From the beginning of each row to that of the next.
    step: isize,
    /// Of a row.
    len: usize,
}

/// Rows of each side by side, again and again, until `to` is full.
fn fill(rows: &[JoinedRows], size: usize, to: &mut [u8]) {
    let all: usize = rows.iter().map(|r| r.len).sum();
    // Result rows at a time.
    let each = (step(to.len() / size) * size).div_ceil(all);
    if rows.iter().all(|r| r.len == size && r.step == size as isize) {
        match (rows.len(), size) {
            (2, 4) => return single::<u32, 2>(rows, each, to),
            (2, 8) => return single::<u64, 2>(rows, each, to),
            (2, 2) => return single::<u16, 2>(rows, each, to),
            (3, 4) => return single::<u32, 3>(rows, each, to),
            (4, 4) => return single::<u32, 4>(rows, each, to),
            _ => {}
        }
    }
    let large = to.len() >= LARGE && all >= ROW_WORTH_STREAMING;
    parallel::for_each_chunk(to, each * all, |i, part| {
        let streaming = large.then(Streaming::new);
        for (row, mut to) in part.chunks_mut(all).enumerate() {
            for rows in rows {
                let from = rows.start.wrapping_add_signed(rows.step * (i * each + row) as isize);
                let (now, rest) = to.split_at_mut(rows.len);
                let from = &rows.bytes[from..][..rows.len];
                match &streaming {
                    Some(streaming) => streaming.copy(now, from),
                    None => copy::copy(now, from),
                }
                to = rest;
            }
        }
    });
}

/// Bytes of a row from which on most of its lines are whole ones.
const ROW_WORTH_STREAMING: usize = 1 << 10;

/// [`fill`] of rows of one element, which follow one another.
fn single<T: Pod + Send + Sync, const N: usize>(rows: &[JoinedRows], each: usize, to: &mut [u8]) {
    let from: [&[T]; N] = std::array::from_fn(|k| bytemuck::cast_slice(&rows[k].bytes[rows[k].start..]));
    parallel::for_each_chunk(bytemuck::cast_slice_mut::<u8, T>(to), each * N, |i, part| {
        let (groups, _) = part.as_chunks_mut::<N>();
        let from = from.map(|from| &from[i * each..][..groups.len()]);
        for (j, group) in groups.iter_mut().enumerate() {
            *group = std::array::from_fn(|k| from[k][j]);
        }
    });
}

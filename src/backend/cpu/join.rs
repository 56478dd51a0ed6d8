//! Concatenation on the CPU, in one pass over the result.

use bytemuck::Pod;
use smallvec::SmallVec;

use crate::backend::cpu::partition::job_len;
use crate::backend::problem::lines::row_stride;
use crate::device::cpu::streaming::{STREAMING_MIN_BYTES, Streaming};
use crate::device::cpu::{copy, parallel};
use crate::storage::{Storage, with_host};
use crate::{Result, Tensor};

/// Concatenates the tensors along dim `d` into `out`, which is new and contiguous. Returns false unless every tensor has contiguous, evenly
/// spaced rows, where a row consists of dim `d` and the dims after it.
pub(crate) fn join(out: &Tensor, tensors: &[&Tensor], d: usize) -> Result<bool> {
    let outer: usize = out.shape().dims()[..d].iter().product();
    let size = out.dtype.size();
    // If every tensor is a single row, plain copies are as fast.
    if outer < 2 || out.numel() == 0 {
        return Ok(false);
    }
    let mut reads: SmallVec<[&Storage; 4]> = SmallVec::new();
    let mut steps: SmallVec<[(usize, isize, usize); 4]> = SmallVec::new();
    for t in tensors.iter().filter(|t| t.numel() > 0) {
        match row_stride(t, d) {
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
        fill_rows(&rows, size, &mut writes[0][start..start + out.numel() * size]);
    })?;
    out.storage.mark_filled();
    Ok(true)
}

/// The elements of a tensor as rows of equal length at a constant stride. Lengths and strides are in bytes.
struct JoinedRows<'a> {
    bytes: &'a [u8],
    start: usize,
    /// The stride from one row to the next.
    step: isize,
    /// The length of a row.
    len: usize,
}

/// Fills `to` with the first row of each tensor, then the second row of each, and so on.
fn fill_rows(rows: &[JoinedRows], size: usize, to: &mut [u8]) {
    let all: usize = rows.iter().map(|r| r.len).sum();
    // The number of result rows in a job.
    let each = (job_len(to.len() / size) * size).div_ceil(all);
    if rows.iter().all(|r| r.len == size && r.step == size as isize) {
        match (rows.len(), size) {
            (2, 4) => return interleave_elements::<u32, 2>(rows, each, to),
            (2, 8) => return interleave_elements::<u64, 2>(rows, each, to),
            (2, 2) => return interleave_elements::<u16, 2>(rows, each, to),
            (3, 4) => return interleave_elements::<u32, 3>(rows, each, to),
            (4, 4) => return interleave_elements::<u32, 4>(rows, each, to),
            _ => {}
        }
    }
    let large = to.len() >= STREAMING_MIN_BYTES && all >= MIN_STREAMED_ROW_BYTES;
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

/// The minimum number of bytes in rows that are stored with non-temporal stores, past the cache: such rows write most of their cache
/// lines whole.
const MIN_STREAMED_ROW_BYTES: usize = 1 << 10;

/// Fills `to` like [`fill_rows`], for contiguous rows of one element each.
fn interleave_elements<T: Pod + Send + Sync, const N: usize>(rows: &[JoinedRows], each: usize, to: &mut [u8]) {
    let from: [&[T]; N] = std::array::from_fn(|k| bytemuck::cast_slice(&rows[k].bytes[rows[k].start..]));
    parallel::for_each_chunk(bytemuck::cast_slice_mut::<u8, T>(to), each * N, |i, part| {
        let (groups, _) = part.as_chunks_mut::<N>();
        let from = from.map(|from| &from[i * each..][..groups.len()]);
        for (j, group) in groups.iter_mut().enumerate() {
            *group = std::array::from_fn(|k| from[k][j]);
        }
    });
}

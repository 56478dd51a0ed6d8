//! Partitions results among threads: slices of a contiguous result, otherwise ranges of rows.

use smallvec::SmallVec;

use crate::backend::cpu::interpreter::TILE;
use crate::backend::problem::map::Launch;
use crate::device::cpu::{parallel, threads};
use crate::layout::collapse::StridedDims;

/// Tiles a job of the pool computes, at least and at most: enough to hide what handing it over costs, and not so many
/// that threads wait for the last.
pub(crate) const TILES_A_JOB: usize = 16;
const MOST_TILES_A_JOB: usize = 64;
/// Jobs a thread has where they are neither the smallest nor the largest.
const JOBS: usize = 8;

/// Elements that a thread computes at a time.
pub(crate) fn step(count: usize) -> usize {
    (count / (JOBS * threads()) / TILE + 1).clamp(TILES_A_JOB, MOST_TILES_A_JOB) * TILE
}

/// Which part of each result a job is given.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Partition {
    /// Exactly its elements.
    Elements,
    /// The bytes from its first element to its last, with the gaps between its elements.
    Rows,
    /// The whole storage.
    Storage,
}

impl Partition {
    /// Where result `j` of a job that begins with element `first` has the element at `offsets` of the walk: this much on.
    pub(crate) fn base(self, launch: &Launch, j: usize, first: usize) -> isize {
        match self {
            Partition::Elements => 0,
            Partition::Rows => -launch.strided.offsets(first)[launch.inputs.len() + j],
            Partition::Storage => launch.outputs[j].layout.offset as isize,
        }
    }
}

/// Elements from the first of operand `k` to its last, if those of one index of the first dimension end before the next's begin.
fn extent(strided: &StridedDims, k: usize) -> Option<usize> {
    let (dims, strides) = (&strided.dims, &strided.strides[k]);
    if dims.is_empty() || strides.iter().any(|&s| s < 0) {
        return None;
    }
    let reach = |d: usize| (dims[d] - 1) * strides[d] as usize;
    let row = 1 + (1..dims.len()).map(reach).sum::<usize>();
    (row <= strides[0] as usize).then(|| row + reach(0))
}

/// Calls `job(first, count, what it has, results)` for elements that together are all, on as many threads as they are worth.
pub(crate) fn partition(
    launch: &Launch,
    writes: &mut [&mut [u8]],
    job: impl Fn(usize, usize, Partition, &mut [&mut [u8]]) + Sync,
) {
    let Launch { inputs, outputs, strided, .. } = launch;
    let count = outputs[0].numel();
    let step = step(count);
    let results = inputs.len()..inputs.len() + outputs.len();
    // What a job has: so many units of `unit` elements, which lie `pitch` apart; and how far it is from the first to the last.
    let mut cuts: SmallVec<[(usize, usize); 2]> = SmallVec::new();
    let (partition, unit) = if results.clone().all(|k| strided.is_contiguous(k)) {
        results.for_each(|_| cuts.push((1, count)));
        (Partition::Elements, 1)
    } else {
        let extents = results.map(|k| Some((strided.strides[k].first().copied()? as usize, extent(strided, k)?)));
        let Some(rows) = extents.collect::<Option<_>>().filter(|_| count > step) else {
            return job(0, count, Partition::Storage, writes);
        };
        cuts = rows;
        (Partition::Rows, strided.dims[1..].iter().product())
    };
    let units = step.div_ceil(unit);
    let mut parts: SmallVec<[&mut [u8]; 2]> = SmallVec::new();
    let mut sizes: SmallVec<[usize; 2]> = SmallVec::new();
    for ((t, bytes), (pitch, extent)) in outputs.iter().zip(writes.iter_mut()).zip(cuts) {
        let size = t.dtype.size();
        parts.push(&mut bytes[t.layout.offset * size..][..extent * size]);
        sizes.push(units * pitch * size);
    }
    parallel::for_each_chunks(&mut parts, &sizes, |i, outs| {
        let first = i * units * unit;
        job(first, (units * unit).min(count - first), partition, outs);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Shape;

    #[test]
    fn only_rows_that_lie_one_after_another_are_cut() {
        let of = |dims: &[usize], strides: &[isize]| extent(&StridedDims::new(&Shape::from(dims), [strides]), 0);
        assert_eq!(of(&[5], &[3]), Some(13));
        assert_eq!(of(&[4, 3], &[10, 1]), Some(33));
        assert_eq!(of(&[4, 3], &[3, 1]), Some(12));
        assert_eq!(of(&[4, 3], &[1, 4]), None, "columns lie between each other");
        assert_eq!(of(&[4, 3], &[-10, 1]), None);
        assert_eq!(of(&[4, 3], &[10, -1]), None);
        assert_eq!(of(&[4, 3], &[2, 1]), None, "rows overlap");
        assert_eq!(of(&[2, 3, 4], &[100, 20, 5]), Some(156));
        assert_eq!(of(&[1], &[1]), None, "one element has no dimension");
    }
}

//! Splits the results of a launch among threads: contiguous results into slices, other results into ranges of rows.

use smallvec::SmallVec;

use crate::backend::cpu::interpreter::TILE;
use crate::backend::problem::map::Launch;
use crate::device::cpu::{parallel, threads};
use crate::layout::collapse::StridedDims;

/// The minimum number of tiles in a job of the thread pool: enough to hide the cost of handing the job over.
pub(crate) const MIN_TILES_PER_JOB: usize = 16;
/// The maximum number of tiles in a job: few enough that threads do not wait long for the last job.
const MAX_TILES_PER_JOB: usize = 64;
/// The number of jobs for each thread, unless `MIN_TILES_PER_JOB` or `MAX_TILES_PER_JOB` requires another number.
const JOBS_PER_THREAD: usize = 8;

/// Returns the number of elements in each job of a launch with `count` elements.
pub(crate) fn job_len(count: usize) -> usize {
    (count / (JOBS_PER_THREAD * threads()) / TILE + 1).clamp(MIN_TILES_PER_JOB, MAX_TILES_PER_JOB) * TILE
}

/// The part of each result that a job receives.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Partition {
    /// A slice of exactly the job's elements.
    Elements,
    /// The bytes from the job's first element to its last element, including gaps between elements.
    Rows,
    /// The whole storage.
    Storage,
}

impl Partition {
    /// Returns the offset to add to the launch's offsets of result `j`, so that they index the part that a job starting at element
    /// `first` receives.
    pub(crate) fn base_offset(self, launch: &Launch, j: usize, first: usize) -> isize {
        match self {
            Partition::Elements => 0,
            Partition::Rows => -launch.strided.offsets(first)[launch.inputs.len() + j],
            Partition::Storage => launch.outputs[j].layout.offset as isize,
        }
    }
}

/// Returns the number of elements from the first to the last element of operand `k`, or `None` if the rows along its first dim
/// interleave.
fn extent(strided: &StridedDims, k: usize) -> Option<usize> {
    let (dims, strides) = (&strided.dims, &strided.strides[k]);
    if dims.is_empty() || strides.iter().any(|&s| s < 0) {
        return None;
    }
    let reach = |d: usize| (dims[d] - 1) * strides[d] as usize;
    let row = 1 + (1..dims.len()).map(reach).sum::<usize>();
    (row <= strides[0] as usize).then(|| row + reach(0))
}

/// Splits the launch into jobs and calls `job(first, count, partition, results)` for each, on several threads if there are enough elements.
pub(crate) fn partition(
    launch: &Launch,
    writes: &mut [&mut [u8]],
    job: impl Fn(usize, usize, Partition, &mut [&mut [u8]]) + Sync,
) {
    let Launch { inputs, outputs, strided, .. } = launch;
    let count = outputs[0].numel();
    let step = job_len(count);
    let results = inputs.len()..inputs.len() + outputs.len();
    // For each result, in elements: the stride between units, and the extent of all units together.
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
    fn only_rows_that_do_not_interleave_are_split() {
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

//! Transposed copies on the CPU, block by block: row by row, every element would cost a cache line.

use bytemuck::Pod;
use smallvec::SmallVec;

use crate::backend::problem::map::Launch;
use crate::device::cpu::parallel;
use crate::device::cpu::streaming::{LARGE, Streaming};
use crate::device::cpu::transpose::turn;
use crate::layout::collapse::StridedDims;
use crate::storage::with_host;
use crate::{Result, Shape, Tensor};

/// Elements along each side of a block: as many pages as the processor finds at once, and whole cache lines of each.
const BLOCK: usize = 64;

/// Copies that are smaller stay in the cache however they are walked.
const SMALL: usize = 1 << 12;

/// Steps, and numbers of them, from which on every element read along a row is from another line of the cache.
const FAR: usize = 8;

/// The operands and the walk of a launch whose transposed operands are copied first; None where it has none.
pub(crate) fn straightened(launch: &Launch) -> Result<Option<(SmallVec<[Tensor; 4]>, StridedDims)>> {
    let Launch { inputs, outputs, strided, program, .. } = launch;
    let transpose = |k: usize| {
        let is_read = program.exprs().iter().any(|e| e.uses_input(k)) && !program.is_identity();
        let alone = is_read && !outputs.iter().any(|out| out.shares_storage(&inputs[k]));
        Transpose::of(launch, k).filter(|t| alone && t.is_worth_it())
    };
    if (0..inputs.len()).all(|k| transpose(k).is_none()) {
        return Ok(None);
    }
    let shape = Shape::from(&strided.dims[..]);
    let mut straight: SmallVec<[Tensor; 4]> = inputs.iter().map(Tensor::shallow_clone).collect();
    let mut dense = strided.strides[0].clone();
    dense.iter_mut().zip(&strided.dims).rev().fold(1, |step, (stride, &size)| {
        *stride = step;
        step * size as isize
    });
    let mut strides: SmallVec<[&[isize]; 4]> = strided.strides.iter().map(|s| &s[..]).collect();
    for (k, t) in inputs.iter().enumerate() {
        let Some(transpose) = transpose(k) else { continue };
        let copy = Tensor::empty_like_shape(&shape, t.dtype, t.device())?;
        let bytes = copy.numel() * t.dtype.size();
        with_host(&[&t.storage], &[&copy.storage], |from, to| transpose.run(from[0], &mut to[0][..bytes]))?;
        (straight[k], strides[k]) = (copy, &dense);
    }
    let strided = StridedDims::new(&shape, strides.iter().copied());
    Ok(Some((straight, strided)))
}

/// A copy of unchanged elements whose closest neighbours in memory lie along another dimension than the last.
pub(crate) struct Transpose<'a> {
    strided: &'a StridedDims,
    /// Of the source.
    strides: &'a [isize],
    /// The dimension with the shortest steps through the source.
    near: usize,
    offset: usize,
    size: usize,
}

impl<'a> Transpose<'a> {
    /// A copy of the launch's `k`-th operand to where the walk has its elements one after another, if it is a transposed one.
    pub(crate) fn of(launch: &'a Launch, k: usize) -> Option<Transpose<'a>> {
        let (strided, input) = (&launch.strided, &launch.inputs[k]);
        let strides = &strided.strides[k][..];
        let &last = strides.last()?;
        if matches!(last, 0 | 1) || strided.dims.iter().product::<usize>() < SMALL {
            return None;
        }
        let steps = (0..strides.len()).filter(|&d| strides[d] != 0);
        let near = steps.min_by_key(|&d| (strides[d].unsigned_abs(), strides.len() - d))?;
        let transpose = Transpose { strided, strides, near, offset: input.layout.offset, size: input.dtype.size() };
        (near != strides.len() - 1).then_some(transpose)
    }

    /// Whether a formula had better read the copy: elements of a column are much farther apart than those of a row.
    fn is_worth_it(&self) -> bool {
        let (dims, strides) = (&self.strided.dims, self.strides);
        let far = strides.last().is_some_and(|s| s.unsigned_abs() >= FAR);
        far && dims[self.near] >= FAR && !strides.contains(&0)
    }

    /// Copies from the bytes of the source's storage to the bytes of the result alone.
    pub(crate) fn run(&self, from: &[u8], to: &mut [u8]) {
        match self.size {
            1 => self.copy::<u8, 16>(from, to),
            2 => self.copy::<u16, 8>(bytemuck::cast_slice(from), bytemuck::cast_slice_mut(to)),
            4 => self.copy::<u32, 4>(bytemuck::cast_slice(from), bytemuck::cast_slice_mut(to)),
            _ => self.copy::<u64, 2>(bytemuck::cast_slice(from), bytemuck::cast_slice_mut(to)),
        }
    }

    fn copy<T: Pod + Send + Sync, const N: usize>(&self, from: &[T], to: &mut [T]) {
        let (dims, strides) = (&self.strided.dims, self.strides);
        let (near, last) = (self.near, dims.len() - 1);
        // The result is `outer` pieces of `rows` rows; a row is `middle` runs of `columns`.
        let (rows, columns) = (dims[near], dims[last]);
        let row: usize = dims[near + 1..].iter().product();
        let at = |index: usize, range: std::ops::Range<usize>| {
            let mut rest = index;
            range.rev().fold(0, |sum, d| {
                let i = rest % dims[d];
                rest /= dims[d];
                sum + i as isize * strides[d]
            })
        };
        // Short rows are as many as have the elements of a block.
        let most = if row <= BLOCK { BLOCK * BLOCK / row } else { BLOCK };
        let mut jobs: Vec<(usize, usize, &mut [T])> = to
            .chunks_mut(rows * row)
            .enumerate()
            .flat_map(|(o, piece)| piece.chunks_mut(most * row).enumerate().map(move |(b, rows)| (o, b * most, rows)))
            .collect();
        let large = jobs.iter().map(|(.., part)| size_of_val(*part)).sum::<usize>() >= LARGE;
        // Columns `columns` of so many rows, the first of which begins at `start`, to rows `pitch` apart.
        let block = |start: isize, columns: std::ops::Range<usize>, height: usize, to: &mut [T], pitch: usize| {
            let first = |j: usize| start + (columns.start + j) as isize * strides[last];
            if strides[near] == 1 {
                return turn::<T, N>(|j| &from[first(j) as usize..][..height], (height, columns.len()), to, pitch);
            }
            for j in 0..columns.len() {
                (0..height).for_each(|i| to[i * pitch + j] = from[(first(j) + i as isize * strides[near]) as usize]);
            }
        };
        let copy = |outer: usize, first: usize, to: &mut [T]| {
            let streaming = large.then(Streaming::new);
            let height = to.len() / row;
            let start = self.offset as isize + at(outer, 0..near) + first as isize * strides[near];
            let starts = (0..row / columns).map(|middle| start + at(middle, near + 1..last));
            if row <= BLOCK && !large {
                return starts.enumerate().for_each(|(middle, start)| {
                    block(start, 0..columns, height, &mut to[middle * columns..], row);
                });
            }
            let mut made = [T::zeroed(); BLOCK * BLOCK];
            if let (Some(streaming), true) = (&streaming, row <= BLOCK) {
                starts.enumerate().for_each(|(middle, start)| {
                    block(start, 0..columns, height, &mut made[middle * columns..], row);
                });
                return streaming.copy(to, &made[..to.len()]);
            }
            let mut lines = large.then(|| [T::zeroed(); BLOCK * BLOCK]);
            for (middle, start) in starts.enumerate() {
                for left in (0..columns).step_by(BLOCK) {
                    let width = BLOCK.min(columns - left);
                    if let (true, Some(lines)) = (strides[near] == 1, &mut lines) {
                        // From memory a line is fetched faster as a whole than beside others.
                        for (j, line) in lines[..width * BLOCK].chunks_mut(BLOCK).enumerate() {
                            let first = start + (left + j) as isize * strides[last];
                            line[..height].copy_from_slice(&from[first as usize..][..height]);
                        }
                        turn::<T, N>(|j| &lines[j * BLOCK..], (height, width), &mut made, BLOCK);
                    } else {
                        block(start, left..left + width, height, &mut made, BLOCK);
                    }
                    for (to, made) in to.chunks_mut(row).zip(made.chunks(BLOCK)) {
                        let to = &mut to[middle * columns + left..][..width];
                        match &streaming {
                            Some(streaming) => streaming.copy(to, &made[..width]),
                            None => to.copy_from_slice(&made[..width]),
                        }
                    }
                }
            }
        };
        parallel::for_each(&mut jobs, |_, (outer, first, to)| copy(*outer, *first, to));
    }
}

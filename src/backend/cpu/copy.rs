//! Strided copies on the CPU. Rows that are contiguous in source and destination are copied as blocks of memory. Transposed copies are made in
//! square blocks: in a copy row by row, every element read would load another cache line.

use std::ops::Range;

use bytemuck::Pod;
use smallvec::SmallVec;

use crate::backend::cpu::kernels::transpose::transpose_lines;
use crate::backend::cpu::partition::{Partition, partition};
use crate::backend::problem::map::Launch;
use crate::device::cpu::streaming::{STREAMING_MIN_BYTES, Streaming};
use crate::device::cpu::{copy as device_copy, parallel};
use crate::layout::collapse::StridedDims;
use crate::storage::with_host;
use crate::{Result, Shape, Tensor};

/// The number of elements that are gathered in a buffer before non-temporal stores write the buffer past the cache.
const GATHER_BUFFER_LEN: usize = 1024;

/// The length below which rows are short: many short rows are copied at a time.
const SHORT_ROW_LEN: usize = 16;
/// The side of a block in elements: the pages of a block fit in the TLB, and whole cache lines of each page are read.
const BLOCK_SIDE: usize = 64;
/// The minimum number of elements of a copy in blocks. Smaller copies stay in the cache in any order.
const MIN_TRANSPOSED_ELEMENTS: usize = 1 << 12;
/// The minimum stride along a row, and the minimum number of rows, at which an operand is copied first: each element of a row is then in
/// another cache line.
const FAR_STRIDE: usize = 8;

/// True if the launch copies between tensors of the same dtype and different storages.
pub(crate) fn is_copy(launch: &Launch) -> bool {
    let ([input], [output]) = (launch.inputs, launch.outputs) else { return false };
    launch.program.is_identity() && input.dtype == output.dtype && !input.shares_storage(output)
}

/// Runs a launch that [`is_copy`], for elements of the size of `T`.
pub(crate) fn copy<T: Pod + Send + Sync>(launch: &Launch, from: &[u8], to: &mut [u8]) {
    let (strided, input) = (&launch.strided, &launch.inputs[0]);
    let from: &[T] = bytemuck::cast_slice(from);
    let last = |k: usize| strided.strides[k].last().copied().unwrap_or(1);
    let (step, to_step) = (last(0), last(1));
    let large = input.numel() * size_of::<T>() >= STREAMING_MIN_BYTES && to_step == 1;
    let rows = strided.split_short_rows(SHORT_ROW_LEN);
    partition(launch, &mut [to], |first, count, partition, outs| {
        let to: &mut [T] = bytemuck::cast_slice_mut(outs[0]);
        let base = partition.base_offset(launch, 0, first);
        let streaming = large.then(Streaming::new);
        if let (Partition::Elements, Some((n, outer))) = (partition, &rows) {
            let whole = first.next_multiple_of(*n)..(first + count) / n * n;
            if !whole.is_empty() {
                outer.for_each_run(whole.start / n, whole.len() / n, |at, offsets, len| {
                    let source = input.layout.offset.wrapping_add_signed(offsets[0]);
                    let to = &mut to[whole.start - first + at * n..][..len * n];
                    short_rows(from, source, outer.strides[0][outer.dims.len() - 1], step, to, *n);
                });
            }
            for p in (first..whole.start.min(first + count)).chain(whole.end.max(whole.start)..first + count) {
                to[p - first] = from[input.layout.offset.wrapping_add_signed(strided.offsets(p)[0])];
            }
            return;
        }
        strided.for_each_run(first, count, |at, offsets, len| {
            let source = input.layout.offset.wrapping_add_signed(offsets[0]);
            let target = if partition == Partition::Elements { at } else { (base + offsets[1]) as usize };
            if (step, to_step) != (1, 1) {
                return strided_row(from, (source, step), to, (target, to_step), len, streaming.as_ref());
            }
            let (from, to) = (&from[source..][..len], &mut to[target..][..len]);
            match &streaming {
                Some(streaming) => streaming.copy(to, from),
                None => device_copy::copy(bytemuck::cast_slice_mut(to), bytemuck::cast_slice(from)),
            }
        });
    });
}

/// Copies a row that is strided in the source or the destination, given its start and its stride in each.
fn strided_row<T: Pod>(
    from: &[T],
    (start, step): (usize, isize),
    to: &mut [T],
    (target, to_step): (usize, isize),
    len: usize,
    streaming: Option<&Streaming>,
) {
    if to_step != 1 {
        let (mut i, mut o) = (start, target);
        for _ in 0..len {
            to[o] = from[i];
            i = i.wrapping_add_signed(step); // wrapping, because the step after the last element may leave the slice
            o = o.wrapping_add_signed(to_step);
        }
        return;
    }
    let to = &mut to[target..][..len];
    match streaming {
        None => gather(from, start, step, to),
        Some(streaming) => {
            let mut gathered = [T::zeroed(); GATHER_BUFFER_LEN];
            for (i, to) in to.chunks_mut(GATHER_BUFFER_LEN).enumerate() {
                let part = &mut gathered[..to.len()];
                gather(from, start.wrapping_add_signed((i * GATHER_BUFFER_LEN) as isize * step), step, part);
                streaming.copy(to, part);
            }
        }
    }
}

/// Gathers rows of `n` elements into `to`. In `from`, the rows begin `row` elements apart, and the elements of a row are `step` apart.
fn short_rows<T: Pod>(from: &[T], start: usize, row: isize, step: isize, to: &mut [T], n: usize) {
    #[inline(always)]
    fn all<T: Pod>(from: &[T], start: usize, row: isize, step: isize, rows: impl Iterator<Item = impl AsMut<[T]>>) {
        let mut at = start;
        for mut to in rows {
            let mut i = at;
            for to in to.as_mut() {
                *to = from[i];
                i = i.wrapping_add_signed(step); // wrapping, because the step after the last element may leave the slice
            }
            at = at.wrapping_add_signed(row);
        }
    }
    match n {
        2 => all(from, start, row, step, to.as_chunks_mut::<2>().0.iter_mut()),
        3 => all(from, start, row, step, to.as_chunks_mut::<3>().0.iter_mut()),
        4 => all(from, start, row, step, to.as_chunks_mut::<4>().0.iter_mut()),
        8 => all(from, start, row, step, to.as_chunks_mut::<8>().0.iter_mut()),
        _ => all(from, start, row, step, to.chunks_exact_mut(n)),
    }
}

/// Gathers every `step`-th element of `from`, beginning at `start`.
fn gather<T: Pod>(from: &[T], start: usize, step: isize, to: &mut [T]) {
    let len = to.len();
    match step {
        0 => to.fill(from[start]),
        -1 => to.iter_mut().zip(from[start + 1 - len..=start].iter().rev()).for_each(|(to, x)| *to = *x),
        1.. => to.iter_mut().zip(from[start..].iter().step_by(step as usize)).for_each(|(to, x)| *to = *x),
        _ => (0..).zip(to).for_each(|(i, to)| *to = from[start.wrapping_add_signed(i * step)]),
    }
}

/// Copies the transposed operands of a launch into iteration order. Returns the new operands and iteration, or `None` if no operand is
/// transposed.
pub(crate) fn copy_transposed_operands(launch: &Launch) -> Result<Option<(SmallVec<[Tensor; 4]>, StridedDims)>> {
    let Launch { inputs, outputs, strided, program, .. } = launch;
    let transpose = |k: usize| {
        let is_read = program.exprs().iter().any(|e| e.uses_input(k)) && !program.is_identity();
        let can_copy = is_read && !outputs.iter().any(|out| out.shares_storage(&inputs[k]));
        // A formula is faster when it reads a copy if elements adjacent in a row are far apart, compared to elements adjacent in a column.
        let is_faster = |t: &Transpose| {
            let far = t.strides.last().is_some_and(|s| s.unsigned_abs() >= FAR_STRIDE);
            far && t.strided.dims[t.inner_dim] >= FAR_STRIDE && !t.strides.contains(&0)
        };
        Transpose::try_new(launch, k).filter(|t| can_copy && is_faster(t))
    };
    if (0..inputs.len()).all(|k| transpose(k).is_none()) {
        return Ok(None);
    }
    let shape = Shape::from(&strided.dims[..]);
    let mut straight: SmallVec<[Tensor; 4]> = inputs.iter().map(Tensor::shallow_clone).collect();
    let dense = shape.contiguous_strides();
    let mut strides: SmallVec<[&[isize]; 4]> = strided.strides.iter().map(|s| &s[..]).collect();
    for (k, t) in inputs.iter().enumerate() {
        let Some(transpose) = transpose(k) else { continue };
        let copy = Tensor::empty_with_shape(&shape, t.dtype, t.device())?;
        let bytes = copy.numel() * t.dtype.size();
        with_host(&[&t.storage], &[&copy.storage], |from, to| transpose.run(from[0], &mut to[0][..bytes]))?;
        (straight[k], strides[k]) = (copy, &dense);
    }
    let strided = StridedDims::new(&shape, strides.iter().copied());
    Ok(Some((straight, strided)))
}

/// A copy of elements without conversion, from a source whose smallest stride is along a dim other than the last.
pub(crate) struct Transpose<'a> {
    strided: &'a StridedDims,
    strides: &'a [isize],
    /// The dim with the smallest stride in the source.
    inner_dim: usize,
    /// The source's offset, in elements.
    offset: usize,
    /// The size of an element, in bytes.
    size: usize,
}

impl<'a> Transpose<'a> {
    /// Returns the transposed copy of the launch's operand `k` into iteration order, or `None` if the operand is not transposed.
    pub(crate) fn try_new(launch: &'a Launch, k: usize) -> Option<Transpose<'a>> {
        let (strided, input) = (&launch.strided, &launch.inputs[k]);
        let strides = &strided.strides[k][..];
        let &last = strides.last()?;
        if matches!(last, 0 | 1) || strided.dims.iter().product::<usize>() < MIN_TRANSPOSED_ELEMENTS {
            return None;
        }
        let steps = (0..strides.len()).filter(|&d| strides[d] != 0);
        let inner_dim = steps.min_by_key(|&d| (strides[d].unsigned_abs(), strides.len() - d))?;
        let transpose =
            Transpose { strided, strides, inner_dim, offset: input.layout.offset, size: input.dtype.size() };
        (inner_dim != strides.len() - 1).then_some(transpose)
    }

    /// Copies from the bytes of the source's storage to the bytes of the result.
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
        let (inner_dim, last) = (self.inner_dim, dims.len() - 1);
        // The result consists of `outer` pieces of `rows` rows; a row consists of `middle` runs of `columns` elements.
        let (rows, columns) = (dims[inner_dim], dims[last]);
        let row: usize = dims[inner_dim + 1..].iter().product();
        let at = |index: usize, range: Range<usize>| {
            let mut rest = index;
            range.rev().fold(0, |sum, d| {
                let i = rest % dims[d];
                rest /= dims[d];
                sum + i as isize * strides[d]
            })
        };
        // Short rows are grouped until they have as many elements as a block.
        let most = if row <= BLOCK_SIDE { BLOCK_SIDE * BLOCK_SIDE / row } else { BLOCK_SIDE };
        let mut jobs: Vec<(usize, usize, &mut [T])> = to
            .chunks_mut(rows * row)
            .enumerate()
            .flat_map(|(o, piece)| piece.chunks_mut(most * row).enumerate().map(move |(b, rows)| (o, b * most, rows)))
            .collect();
        let large = jobs.iter().map(|(.., part)| size_of_val(*part)).sum::<usize>() >= STREAMING_MIN_BYTES;
        // Transposes `height` rows of the given columns, the first of which begins at `start`, into rows that are `pitch` elements apart
        // in `to`.
        let block = |start: isize, columns: Range<usize>, height: usize, to: &mut [T], pitch: usize| {
            let first = |j: usize| start + (columns.start + j) as isize * strides[last];
            if strides[inner_dim] == 1 {
                let line = |j: usize| &from[first(j) as usize..][..height];
                return transpose_lines::<T, N>(line, (height, columns.len()), to, pitch);
            }
            for j in 0..columns.len() {
                (0..height)
                    .for_each(|i| to[i * pitch + j] = from[(first(j) + i as isize * strides[inner_dim]) as usize]);
            }
        };
        let copy = |outer: usize, first: usize, to: &mut [T]| {
            let streaming = large.then(Streaming::new);
            let height = to.len() / row;
            let start = self.offset as isize + at(outer, 0..inner_dim) + first as isize * strides[inner_dim];
            let starts = (0..row / columns).map(|middle| start + at(middle, inner_dim + 1..last));
            if row <= BLOCK_SIDE && !large {
                return starts.enumerate().for_each(|(middle, start)| {
                    block(start, 0..columns, height, &mut to[middle * columns..], row);
                });
            }
            let mut made = [T::zeroed(); BLOCK_SIDE * BLOCK_SIDE];
            if let (Some(streaming), true) = (&streaming, row <= BLOCK_SIDE) {
                starts.enumerate().for_each(|(middle, start)| {
                    block(start, 0..columns, height, &mut made[middle * columns..], row);
                });
                return streaming.copy(to, &made[..to.len()]);
            }
            let mut lines = large.then(|| [T::zeroed(); BLOCK_SIDE * BLOCK_SIDE]);
            for (middle, start) in starts.enumerate() {
                for left in (0..columns).step_by(BLOCK_SIDE) {
                    let width = BLOCK_SIDE.min(columns - left);
                    if let (true, Some(lines)) = (strides[inner_dim] == 1, &mut lines) {
                        // Reading one whole line of memory after another is faster than reading several lines in turn.
                        for (j, line) in lines[..width * BLOCK_SIDE].chunks_mut(BLOCK_SIDE).enumerate() {
                            let first = start + (left + j) as isize * strides[last];
                            line[..height].copy_from_slice(&from[first as usize..][..height]);
                        }
                        transpose_lines::<T, N>(|j| &lines[j * BLOCK_SIDE..], (height, width), &mut made, BLOCK_SIDE);
                    } else {
                        block(start, left..left + width, height, &mut made, BLOCK_SIDE);
                    }
                    for (to, made) in to.chunks_mut(row).zip(made.chunks(BLOCK_SIDE)) {
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

#[cfg(test)]
mod tests;

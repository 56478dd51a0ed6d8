//! Strided copies on the CPU. Rows that are contiguous in source and destination are copied as blocks of memory.

use bytemuck::Pod;

use crate::backend::cpu::dispatch::for_size;
use crate::backend::cpu::partition::{Partition, partition};
use crate::backend::problem::map::Launch;
use crate::device::cpu::copy as device_copy;
use crate::device::cpu::streaming::{STREAMING_MIN_BYTES, Streaming};

/// The number of elements that are gathered in a buffer before non-temporal stores write the buffer past the cache.
const GATHER_BUFFER_LEN: usize = 1024;

/// The length below which rows are short: many short rows are copied at a time.
const SHORT_ROW_LEN: usize = 16;

/// A row to copy that is strided in the source or the destination: the start and the stride in each.
struct StridedRow {
    from: usize,
    step: isize,
    to: usize,
    to_step: isize,
    len: usize,
}

/// True if the launch copies between tensors of the same dtype and different storages.
pub(crate) fn is_copy(launch: &Launch) -> bool {
    let ([input], [output]) = (launch.inputs, launch.outputs) else { return false };
    launch.program.is_identity() && input.dtype == output.dtype && !input.shares_storage(output)
}

pub(crate) fn run_copy(launch: &Launch, from: &[u8], to: &mut [u8]) {
    for_size!(launch.inputs[0].dtype.size(), T => copy::<T>(launch, from, to));
}

fn copy<T: Pod + Send + Sync>(launch: &Launch, from: &[u8], to: &mut [u8]) {
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
                let row = StridedRow { from: source, step, to: target, to_step, len };
                return row.copy(from, to, streaming.as_ref());
            }
            let (from, to) = (&from[source..][..len], &mut to[target..][..len]);
            match &streaming {
                Some(streaming) => streaming.copy(to, from),
                None => device_copy::copy(bytemuck::cast_slice_mut(to), bytemuck::cast_slice(from)),
            }
        });
    });
}

impl StridedRow {
    fn copy<T: Pod>(&self, from: &[T], to: &mut [T], streaming: Option<&Streaming>) {
        let StridedRow { from: start, step, to: target, to_step, len } = *self;
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

#[cfg(test)]
mod tests;

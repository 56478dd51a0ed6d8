//! Elementwise launches on the CPU: tiles of a program, spread over the thread pool.

use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::SmallVec;

use crate::backend::cpu::convert::{load_tile, store_tile};
use crate::backend::cpu::copy::{Transpose, copy_transposed_operands};
use crate::backend::cpu::dispatch::{for_compute, for_size};
use crate::backend::cpu::interpreter::{MAX_ALIGN_SKIP, Scratch, TILE, Tile, TileIn, aligned_range};
use crate::backend::cpu::partition::{Partition, partition};
use crate::backend::cpu::scalar::Number;
use crate::backend::cpu::{copy, fast_path};
use crate::backend::problem::map::{Formulas, Launch};
use crate::backend::problem::operand::OperandKind;
use crate::device::cpu::streaming::Streaming;
use crate::storage::{Storage, with_host};
use crate::{Error, Result, Tensor};

/// The number of elements that are computed into a buffer before non-temporal stores write them past the cache. The buffer stays in the
/// L1 cache.
const STREAM_BUFFER_LEN: usize = 4 * TILE;
/// The number of elements in a tile that covers several broadcast rows. The tiles of an operand and a result fit in the L1 cache.
const REPEATED_TILE_LEN: usize = 4 * TILE;
/// The tile length is divided by this number if operands that the launch overwrites have to be copied first.
const COPIED_TILE_DIVISOR: usize = 2;
/// The minimum length of a row that is a tile of its own, so that its operands are read in place.
const MIN_TILE_ROW_LEN: usize = 64;
/// Rows shorter than this, such as pairs of elements, are computed along another dim.
const SHORT_ROW_LEN: usize = 8;

/// The source of an input's elements.
enum InputSource {
    /// A storage, whose bytes are `reads[i]` for the field i.
    Storage(usize),
    /// The output with this index, which has the input's storage and layout because the launch is in place.
    Output(usize),
    /// The program does not read this input.
    Unused,
}

/// Computes formulas elementwise, by the fastest of the methods that apply.
pub(crate) fn run_formulas(formulas: &Formulas) -> Result<()> {
    if fast_path::try_run(formulas)? {
        return Ok(());
    }
    // A host storage is locked as a whole, for reading or for writing, so an input and a result in one storage count as overlapping even
    // if they are disjoint.
    formulas.checked(false, |launch, _| {
        // Random numbers depend on the index, so they keep the row-major order. Other launches follow the memory order of their first
        // result.
        let ordered = match launch.program.seeds() {
            0 => launch.strided.reordered_for(launch.inputs.len()).map(|strided| Launch { strided, ..*launch }),
            _ => None,
        };
        let launch = ordered.as_ref().unwrap_or(launch);
        match copy_transposed_operands(launch)? {
            Some((inputs, strided)) => run_in_order(&Launch { inputs: &inputs, strided, ..*launch }),
            None => run_in_order(launch),
        }
    })
}

/// Runs a launch whose dims are in their final order: as a copy if the program only copies, otherwise through the interpreter.
fn run_in_order(launch: &Launch) -> Result<()> {
    let mut reads: SmallVec<[&Storage; 4]> = SmallVec::new();
    let sources: SmallVec<[InputSource; 4]> = launch
        .inputs
        .iter()
        .enumerate()
        .map(|(k, t)| {
            if !launch.program.exprs().iter().any(|e| e.uses_input(k)) {
                return InputSource::Unused;
            }
            match launch.outputs.iter().position(|out| out.shares_storage(t)) {
                Some(j) => InputSource::Output(j),
                None => {
                    reads.push(&t.storage);
                    InputSource::Storage(reads.len() - 1)
                }
            }
        })
        .collect();
    let writes: SmallVec<[&Storage; 2]> = launch.outputs.iter().map(|t| &t.storage).collect();
    if copy::is_copy(launch) {
        let transpose = Transpose::try_new(launch, 0).filter(|_| launch.strided.is_contiguous(1));
        let (out, size) = (launch.outputs[0], launch.outputs[0].dtype.size());
        return with_host(&reads, &writes, |reads, writes| match transpose {
            Some(transpose) => {
                transpose.run(reads[0], &mut writes[0][out.layout.offset * size..][..out.numel() * size]);
            }
            None => for_size!(size, T => copy::copy::<T>(launch, reads[0], writes[0])),
        });
    }
    let longer = launch.strided.with_longer_rows(SHORT_ROW_LEN).filter(|_| launch.program.seeds() == 0);
    let longer = longer.map(|strided| Launch { strided, ..*launch });
    let launch = longer.as_ref().unwrap_or(launch);
    let divided_by_zero = with_host(
        &reads,
        &writes,
        |reads, writes| for_compute!(launch.compute, C => run_as::<C>(launch, &sources, reads, writes)),
    )?;
    if divided_by_zero { Err(Error::DivisionByZero { op: launch.op }) } else { Ok(()) }
}

/// Runs a launch in the compute type `C` on all threads; returns whether an integer was divided by zero.
fn run_as<C: Number>(launch: &Launch, sources: &[InputSource], reads: &[&[u8]], writes: &mut [&mut [u8]]) -> bool {
    let divided_by_zero = AtomicBool::new(false);
    partition(launch, writes, |first, count, partition, outs| {
        if (MapJob { launch, sources, reads, partition }).run::<C>(first, count, outs) {
            divided_by_zero.store(true, Ordering::Relaxed);
        }
    });
    divided_by_zero.into_inner()
}

/// The operands of a launch, which all threads share; each thread computes a part of the results.
struct MapJob<'a> {
    launch: &'a Launch<'a>,
    sources: &'a [InputSource],
    reads: &'a [&'a [u8]],
    partition: Partition,
}

impl MapJob<'_> {
    /// True if every operand can be read in place, in rows long enough to be tiles.
    fn reads_in_place(&self) -> bool {
        let strided = &self.launch.strided;
        let last = |k: usize| strided.strides[k].last().copied().unwrap_or(0);
        strided.dims.last().is_none_or(|&row| row >= MIN_TILE_ROW_LEN)
            && self.sources.iter().enumerate().all(|(k, source)| match source {
                InputSource::Unused => true,
                InputSource::Storage(_) => matches!(last(k), 0 | 1),
                InputSource::Output(_) => self.overwritten_output(k, source).is_none(),
            })
    }

    /// Returns the row length if several rows can form one tile: every operand is contiguous, one broadcast row, or a scalar.
    /// Returns 1 if no row is broadcast and the elements do not fit in one tile.
    fn repeated_row_len(&self) -> Option<usize> {
        if self.partition != Partition::Elements {
            return None;
        }
        let strided = &self.launch.strided;
        let row = match strided.dims[..] {
            [_] if self.launch.program.has_registers() || self.is_in_place() => 1,
            [_, row] => row,
            _ => return None,
        };
        let simple = |k: usize| OperandKind::classify_dims(strided, k) != OperandKind::Strided;
        (row <= self.repeated_tile_len() / 2 && (0..strided.strides.len()).all(simple)).then_some(row)
    }

    /// Returns the number of elements in a tile that covers several rows.
    fn repeated_tile_len(&self) -> usize {
        if self.launch.program.has_registers() { TILE } else { REPEATED_TILE_LEN }
    }

    /// Returns the index of the result that overwrites input `k`, if the input has to be copied first; else `None`.
    fn overwritten_output(&self, k: usize, source: &InputSource) -> Option<usize> {
        match *source {
            InputSource::Output(j) if !self.launch.program.can_overwrite_input(k, j) => Some(j),
            _ => None,
        }
    }

    fn is_in_place(&self) -> bool {
        self.sources.iter().any(|source| matches!(source, InputSource::Output(_)))
    }

    /// Computes elements like [`run`](MapJob::run), for operands and results of the compute type that need no buffers. Each row along the
    /// last dim is a tile.
    fn run_rows<C: Number>(&self, first: usize, count: usize, outs: &mut [&mut [u8]], streamed: bool) -> bool {
        let mut scratch = Scratch::new();
        scratch.streamed = streamed;
        let Launch { inputs, program, strided, scalars, seeds, .. } = self.launch;
        // For each operand: its elements, whether they differ along a row, and the offset of the first element.
        let operands: SmallVec<[(&[C], bool, usize); 4]> = inputs
            .iter()
            .enumerate()
            .map(|(k, t)| match self.sources[k] {
                InputSource::Storage(i) => {
                    let elements: &[C] = bytemuck::cast_slice(self.reads[i]);
                    (elements, strided.strides[k].last().is_some_and(|&step| step == 1), t.layout.offset)
                }
                _ => (&[][..], false, 0),
            })
            .collect();
        let mut outs: SmallVec<[&mut [C]; 2]> = outs.iter_mut().map(|out| bytemuck::cast_slice_mut(out)).collect();
        let mut divided_by_zero = false;
        if let Some(row) = self.repeated_row_len() {
            // Broadcast rows are repeated in a buffer, so that one tile covers several rows and the fixed cost of a tile is paid less
            // often.
            let copies =
                self.sources.iter().enumerate().any(|(k, source)| self.overwritten_output(k, source).is_some());
            let most = match (row, copies) {
                (1, true) => self.repeated_tile_len() / COPIED_TILE_DIVISOR,
                _ => self.repeated_tile_len() / row * row,
            };
            let (phase, longest) = (first % row, most.min(count));
            let repeated: SmallVec<[Vec<C>; 4]> = (0..inputs.len())
                .map(|k| match operands[k] {
                    (elements, true, offset) if !strided.is_contiguous(k) => {
                        elements[offset..offset + row].repeat(longest.div_ceil(row) + 1)
                    }
                    _ => Vec::new(),
                })
                .collect();
            // If an overwritten operand is read again after the write, it is read from a copy.
            let mut before: SmallVec<[Vec<C>; 2]> = outs.iter().map(|_| Vec::new()).collect();
            for at in (0..count).step_by(longest) {
                let (start, len) = (first + at, longest.min(count - at));
                for j in self.sources.iter().enumerate().filter_map(|(k, source)| self.overwritten_output(k, source)) {
                    before[j].clear();
                    before[j].extend_from_slice(&outs[j][at..at + len]);
                }
                let mut tile_inputs: SmallVec<[TileIn<C>; 4]> = SmallVec::new();
                for (k, (&(elements, differ, offset), repeated)) in operands.iter().zip(&repeated).enumerate() {
                    tile_inputs.push(match (elements, &repeated[..]) {
                        ([], _) => match self.sources[k] {
                            InputSource::Output(j) if before[j].is_empty() => TileIn::Output(j),
                            InputSource::Output(j) => TileIn::Slice(&before[j]),
                            _ => TileIn::Scalar(C::from_i32(0)),
                        },
                        (elements, _) if !differ => TileIn::Scalar(elements[offset]),
                        (elements, []) => TileIn::Slice(&elements[offset + start..][..len]),
                        (_, repeated) => TileIn::Slice(&repeated[phase..][..len]),
                    });
                }
                let tile = Tile { inputs: &tile_inputs, scalars, seeds, first: start as u64, len };
                let mut targets: SmallVec<[&mut [C]; 2]> = SmallVec::new();
                outs.iter_mut().for_each(|out| targets.push(&mut out[at..at + len]));
                divided_by_zero |= program.eval_tile(&tile, &mut scratch, &mut targets);
            }
            return divided_by_zero;
        }
        let bases = self.bases(first);
        strided.for_each_run(first, count, |at, offsets, len| {
            let mut tile_inputs: SmallVec<[TileIn<C>; 4]> = SmallVec::new();
            for ((&(elements, differ, offset), &more), source) in operands.iter().zip(offsets).zip(self.sources) {
                let from = offset.wrapping_add_signed(more);
                tile_inputs.push(match (elements, source) {
                    ([], &InputSource::Output(j)) => TileIn::Output(j),
                    ([], _) => TileIn::Scalar(C::from_i32(0)),
                    (elements, _) if differ => TileIn::Slice(&elements[from..from + len]),
                    (elements, _) => TileIn::Scalar(elements[from]),
                });
            }
            let tile = Tile { inputs: &tile_inputs, scalars, seeds, first: (first + at) as u64, len };
            let mut targets: SmallVec<[&mut [C]; 2]> = SmallVec::new();
            for (j, out) in outs.iter_mut().enumerate() {
                targets.push(&mut out[self.result_start(j, at, &bases, offsets)..][..len]);
            }
            divided_by_zero |= program.eval_tile(&tile, &mut scratch, &mut targets);
        });
        divided_by_zero
    }

    /// Returns [`Partition::base_offset`] for every result.
    fn bases(&self, first: usize) -> SmallVec<[isize; 2]> {
        (0..self.launch.outputs.len()).map(|j| self.partition.base_offset(self.launch, j, first)).collect()
    }

    /// Returns the index in result `j` of the job's element `at`, for which the iteration returns `offsets`.
    fn result_start(&self, j: usize, at: usize, bases: &[isize], offsets: &[isize]) -> usize {
        match self.partition {
            Partition::Elements => at,
            _ => (bases[j] + offsets[self.launch.inputs.len() + j]) as usize,
        }
    }

    /// Computes elements like [`run`](MapJob::run), for launches that only convert a dtype. Uses no buffer if the source or the result
    /// has the compute type.
    fn convert<C: Number>(&self, first: usize, count: usize, outs: &mut [&mut [u8]]) {
        let (strided, input, output) = (&self.launch.strided, &self.launch.inputs[0], self.launch.outputs[0]);
        let last = |k: usize| strided.strides[k].last().copied().unwrap_or(1);
        let (step, to_step) = (last(0), if self.partition == Partition::Elements { 1 } else { last(1) });
        let (bases, from) = (self.bases(first), self.reads[0]);
        let (mut tile, same) = ([C::from_i32(0); TILE], C::COMPUTE.dtype());
        strided.for_each_run(first, count, |at, offsets, len| {
            let source = input.layout.offset.wrapping_add_signed(offsets[0]);
            let (target, to) = (self.result_start(0, at, &bases, offsets), &mut *outs[0]);
            if input.dtype == same && step == 1 {
                let values = &bytemuck::cast_slice::<u8, C>(from)[source..][..len];
                return store_tile(output.dtype, values, to, target, to_step);
            }
            if output.dtype == same && to_step == 1 {
                let values = &mut bytemuck::cast_slice_mut::<u8, C>(to)[target..][..len];
                return load_tile(input.dtype, from, source, step, values);
            }
            for done in (0..len).step_by(TILE) {
                let tile = &mut tile[..TILE.min(len - done)];
                load_tile(input.dtype, from, source.wrapping_add_signed(done as isize * step), step, tile);
                store_tile(output.dtype, tile, to, target.wrapping_add_signed(done as isize * to_step), to_step);
            }
        });
    }

    /// Computes elements `first..first + count`; returns whether an integer was divided by zero.
    fn run<C: Number>(&self, first: usize, count: usize, outs: &mut [&mut [u8]]) -> bool {
        let Launch { inputs, outputs, program, strided, scalars, seeds, .. } = self.launch;
        let zero = C::from_f64(0.0);
        let mut scratch = Scratch::<C>::new();
        let step = |k: usize| strided.strides[k].last().copied().unwrap_or(0);
        let row = strided.dims.last().copied().unwrap_or(1).max(1);
        let elements = self.partition == Partition::Elements;
        // Results of the compute type need no buffer: they are written in place, or past the cache.
        let in_rows = |j: usize| row >= MIN_TILE_ROW_LEN && step(inputs.len() + j) == 1;
        let same = |j: usize| outputs[j].dtype == C::COMPUTE.dtype() && (elements || in_rows(j));
        let bytes = |t: &Tensor| t.numel() * t.dtype.size();
        let all = || inputs.iter().map(bytes).chain(outputs.iter().map(|t| bytes(t))).sum();
        // Overwritten operands are in the cache already, and the loops that store past the cache cannot overwrite operands.
        let fresh = !self.is_in_place();
        let streamed = |j: usize| fresh && elements && same(j) && program.should_bypass_cache(bytes(outputs[j]), all());
        let direct = |j: usize| same(j) && !streamed(j);
        if matches!(self.sources, [InputSource::Storage(_)])
            && outputs.len() == 1
            && !streamed(0)
            && program.is_identity()
        {
            self.convert::<C>(first, count, outs);
            return false;
        }
        let streaming = Streaming::new();
        // If there are neither registers nor conversions, a tile can have any length.
        let unconverted = inputs.iter().all(|t| t.dtype == C::COMPUTE.dtype());
        let plain = !program.has_registers() && unconverted;
        let past = program.can_bypass_cache() && (0..outputs.len()).all(streamed);
        let all_direct = (0..outputs.len()).all(direct);
        if (plain && (past || all_direct) && self.reads_in_place())
            || (unconverted && all_direct && self.repeated_row_len().is_some())
        {
            return self.run_rows::<C>(first, count, outs, past);
        }
        let longest = match plain {
            true if all_direct && elements => count,
            true if all_direct => row,
            true if (0..outputs.len()).all(streamed) => STREAM_BUFFER_LEN,
            _ => TILE,
        };
        let mut loaded: SmallVec<[Vec<C>; 4]> = inputs.iter().map(|_| Vec::new()).collect();
        let mut results: SmallVec<[Vec<C>; 2]> = (0..outputs.len())
            .map(|j| if direct(j) { Vec::new() } else { vec![zero; longest + MAX_ALIGN_SKIP] })
            .collect();
        let bases = self.bases(first);
        let mut divided_by_zero = false;
        let (mut start, end) = (first, first + count);
        while start < end {
            let left = row - start % row;
            let mut len = longest.min(end - start);
            if row >= MIN_TILE_ROW_LEN {
                len = len.min(left);
            }
            let offsets = strided.offsets(start);
            // True if the input is read in place: it has the compute type, and is contiguous or constant along the tile.
            let in_place =
                |k: usize, t: &Tensor| t.dtype == C::COMPUTE.dtype() && len <= left && matches!(step(k), 0 | 1);
            for (k, t) in inputs.iter().enumerate() {
                let bytes: &[u8] = match self.sources[k] {
                    InputSource::Unused => continue,
                    InputSource::Storage(_) if in_place(k, t) => continue,
                    InputSource::Storage(i) => self.reads[i],
                    InputSource::Output(j) => outs[j],
                };
                let buffer = &mut loaded[k];
                buffer.resize(longest + MAX_ALIGN_SKIP, zero);
                let held = aligned_range(buffer, len);
                let buffer = &mut buffer[held];
                if matches!(self.sources[k], InputSource::Output(_)) && elements {
                    load_tile(t.dtype, bytes, start - first, 1, buffer);
                    continue;
                }
                let offset = match self.sources[k] {
                    InputSource::Output(j) => bases[j],
                    _ => t.layout.offset as isize,
                };
                strided.for_each_run(start, len, |at, offsets, n| {
                    load_tile(t.dtype, bytes, (offset + offsets[k]) as usize, step(k), &mut buffer[at..at + n]);
                });
            }
            let tile_inputs: SmallVec<[TileIn<C>; 4]> = inputs
                .iter()
                .enumerate()
                .map(|(k, t)| match self.sources[k] {
                    InputSource::Unused => TileIn::Scalar(zero),
                    InputSource::Storage(i) if in_place(k, t) => {
                        let elements: &[C] = bytemuck::cast_slice(self.reads[i]);
                        let from = (t.layout.offset as isize + offsets[k]) as usize;
                        match step(k) {
                            1 => TileIn::Slice(&elements[from..][..len]),
                            _ => TileIn::Scalar(elements[from]),
                        }
                    }
                    _ => TileIn::Slice(&loaded[k][aligned_range(&loaded[k], len)]),
                })
                .collect();
            let tile = Tile { inputs: &tile_inputs, scalars, seeds, first: start as u64, len };
            {
                let mut targets: SmallVec<[&mut [C]; 2]> = SmallVec::new();
                for (j, (bytes, result)) in outs.iter_mut().zip(&mut results).enumerate() {
                    targets.push(match direct(j) {
                        true => {
                            let at = self.result_start(j, start - first, &bases, &offsets);
                            &mut bytemuck::cast_slice_mut::<u8, C>(bytes)[at..][..len]
                        }
                        false => {
                            let held = aligned_range(result, len);
                            &mut result[held]
                        }
                    });
                }
                divided_by_zero |= program.eval_tile(&tile, &mut scratch, &mut targets);
            }
            for (j, t) in outputs.iter().enumerate().filter(|(j, _)| !direct(*j)) {
                let (k, result) = (inputs.len() + j, &results[j][aligned_range(&results[j], len)]);
                if streamed(j) {
                    let out = &mut bytemuck::cast_slice_mut::<u8, C>(outs[j])[start - first..][..len];
                    streaming.copy(out, result);
                } else if elements {
                    store_tile(t.dtype, result, outs[j], start - first, 1);
                } else {
                    strided.for_each_run(start, len, |at, offsets, n| {
                        let to = (bases[j] + offsets[k]) as usize;
                        store_tile(t.dtype, &result[at..at + n], outs[j], to, step(k));
                    });
                }
            }
            start += len;
        }
        divided_by_zero
    }
}

#[cfg(test)]
mod tests;

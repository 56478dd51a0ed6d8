//! Elementwise launches on the CPU: tiles of the expression, spread over the worker pool.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::SmallVec;

use crate::backend::cpu::convert::{load_tile, store_tile};
use crate::backend::cpu::copy;
use crate::backend::cpu::interpreter::{LINE, Scratch, TILE, Tile, TileIn, aligned};
use crate::backend::cpu::partition::{Partition, partition};
use crate::backend::cpu::scalar::Number;
use crate::backend::cpu::transpose::{Transpose, straightened};
use crate::backend::cpu::{flat, masks};
use crate::backend::problem::map::{Formulas, Launch};
use crate::backend::problem::operand::OperandKind;
use crate::device::cpu::streaming::Streaming;
use crate::storage::{Storage, with_host};
use crate::{Compute, DType, Error, Result, Tensor};

pub(crate) use crate::backend::cpu::partition::step;

/// Elements computed before they are streamed to where they belong: they stay in the first-level cache until then.
const STREAMED: usize = 4 * TILE;
/// Elements of a row that is written out several times: with an operand and a result they stay in the first-level cache.
const REPEATED: usize = 4 * TILE;
/// So much shorter are tiles of which there are copies of what they were beside them.
const IN_PLACE: usize = 2;
/// From this length on, runs along the last dimension are tiles of their own, so that operands are read in place.
const WORTH_A_TILE: usize = 64;

/// Where an input's elements come from.
enum Source {
    /// The bytes of `reads[i]`.
    Storage(usize),
    /// The output it is updated in place of: same storage, same layout.
    Output(usize),
    /// Nobody reads it.
    Unused,
}

/// Formulas over tensors: by the shortest way that fits them.
pub(crate) fn formulas(formulas: &Formulas) -> Result<()> {
    let Formulas { op, inputs, params, program, outputs } = *formulas;
    if params.seeds.is_empty() && flat::run(op, program, inputs, params.scalars, outputs)? {
        return Ok(());
    }
    if outputs[0].dtype == DType::Bool && masks::run(program, inputs, outputs)? {
        return Ok(());
    }
    // A storage is locked either for reading or for writing: there even disjoint parts count as overlapping.
    formulas.checked(false, |launch, _| run(launch))
}

pub(crate) fn run(launch: &Launch) -> Result<()> {
    // As the result lies in memory. Random numbers depend on the order.
    let ordered = if launch.program.seeds() == 0 { launch.strided.in_order_of(launch.inputs.len()) } else { None };
    match ordered {
        Some(strided) => run_straightened(&Launch { strided, ..*launch }),
        None => run_straightened(launch),
    }
}

fn run_straightened(launch: &Launch) -> Result<()> {
    match straightened(launch)? {
        Some((inputs, strided)) => run_ordered(&Launch { inputs: &inputs, strided, ..*launch }),
        None => run_ordered(launch),
    }
}

/// A result that lies in one piece, in its storage.
fn bytes_of(t: &Tensor) -> Range<usize> {
    t.layout.offset * t.dtype.size()..(t.layout.offset + t.numel()) * t.dtype.size()
}

fn run_ordered(launch: &Launch) -> Result<()> {
    let mut reads: SmallVec<[&Storage; 4]> = SmallVec::new();
    let sources: SmallVec<[Source; 4]> = launch
        .inputs
        .iter()
        .enumerate()
        .map(|(k, t)| {
            if !launch.program.exprs().iter().any(|e| e.uses_input(k)) {
                return Source::Unused;
            }
            match launch.outputs.iter().position(|out| out.shares_storage(t)) {
                Some(j) => Source::Output(j),
                None => {
                    reads.push(&t.storage);
                    Source::Storage(reads.len() - 1)
                }
            }
        })
        .collect();
    let writes: SmallVec<[&Storage; 2]> = launch.outputs.iter().map(|t| &t.storage).collect();
    if copy::is_copy(launch) {
        let transpose = Transpose::of(launch, 0).filter(|_| launch.strided.is_contiguous(1));
        return with_host(&reads, &writes, |reads, writes| match transpose {
            Some(transpose) => transpose.run(reads[0], &mut writes[0][bytes_of(launch.outputs[0])]),
            None => copy::run(launch, reads[0], writes[0]),
        });
    }
    let divided_by_zero = with_host(&reads, &writes, |reads, writes| match launch.compute {
        Compute::F32 => run_as::<f32>(launch, &sources, reads, writes),
        Compute::F64 => run_as::<f64>(launch, &sources, reads, writes),
        Compute::I64 => run_as::<i64>(launch, &sources, reads, writes),
    })?;
    if divided_by_zero { Err(Error::DivisionByZero { op: launch.op }) } else { Ok(()) }
}

fn run_as<C: Number>(launch: &Launch, sources: &[Source], reads: &[&[u8]], writes: &mut [&mut [u8]]) -> bool {
    let divided_by_zero = AtomicBool::new(false);
    partition(launch, writes, |first, count, partition, outs| {
        if (MapJob { launch, sources, reads, partition }).run::<C>(first, count, outs) {
            divided_by_zero.store(true, Ordering::Relaxed);
        }
    });
    divided_by_zero.into_inner()
}

/// What every worker needs to compute its share.
struct MapJob<'a> {
    launch: &'a Launch<'a>,
    sources: &'a [Source],
    reads: &'a [&'a [u8]],
    partition: Partition,
}

impl MapJob<'_> {
    /// Whether every operand can be read where it lies, in runs that are worth it.
    fn reads_in_place(&self) -> bool {
        let strided = &self.launch.strided;
        let last = |k: usize| strided.strides[k].last().copied().unwrap_or(0);
        strided.dims.last().is_none_or(|&row| row >= WORTH_A_TILE)
            && self.sources.iter().enumerate().all(|(k, source)| match source {
                Source::Unused => true,
                Source::Storage(_) => matches!(last(k), 0 | 1),
                Source::Output(_) => self.copied(k, source).is_none(),
            })
    }

    /// The length of a row, where all rows of an operand are the same, or follow one another, or it is one element. 1 where
    /// none is of the first kind, and the whole cannot be one tile.
    fn repeats(&self) -> Option<usize> {
        if self.partition != Partition::Elements {
            return None;
        }
        let strided = &self.launch.strided;
        let row = match strided.dims[..] {
            [_] if self.launch.program.has_registers() || self.is_in_place() => 1,
            [_, row] => row,
            _ => return None,
        };
        let simple = |k: usize| OperandKind::of_dims(strided, k) != OperandKind::Strided;
        (row <= self.repeated() / 2 && (0..strided.strides.len()).all(simple)).then_some(row)
    }

    /// Elements of a tile of rows that are written out several times.
    fn repeated(&self) -> usize {
        if self.launch.program.has_registers() { TILE } else { REPEATED }
    }

    /// The result that the `k`-th input is, if it has to be copied before it is written.
    fn copied(&self, k: usize, source: &Source) -> Option<usize> {
        match *source {
            Source::Output(j) if !self.launch.program.reads_before(k, j) => Some(j),
            _ => None,
        }
    }

    fn is_in_place(&self) -> bool {
        self.sources.iter().any(|source| matches!(source, Source::Output(_)))
    }

    /// As [`run`](MapJob::run), where operands and results lie as they are computed: a run along the last dimension is a tile.
    fn rows<C: Number>(&self, first: usize, count: usize, outs: &mut [&mut [u8]], scratch: &mut Scratch<C>) -> bool {
        let Launch { inputs, program, strided, scalars, seeds, .. } = self.launch;
        // Elements, whether they differ along a run, and where the first is.
        let operands: SmallVec<[(&[C], bool, usize); 4]> = inputs
            .iter()
            .enumerate()
            .map(|(k, t)| match self.sources[k] {
                Source::Storage(i) => {
                    let elements: &[C] = bytemuck::cast_slice(self.reads[i]);
                    (elements, strided.strides[k].last().is_some_and(|&step| step == 1), t.layout.offset)
                }
                _ => (&[][..], false, 0),
            })
            .collect();
        let mut outs: SmallVec<[&mut [C]; 2]> = outs.iter_mut().map(|out| bytemuck::cast_slice_mut(out)).collect();
        let mut divided_by_zero = false;
        if let Some(row) = self.repeats() {
            // Rows that are the same for all are written out a few times: what a tile costs beside its arithmetic is
            // then that of several rows.
            let copies = self.sources.iter().enumerate().any(|(k, source)| self.copied(k, source).is_some());
            let most = match (row, copies) {
                (1, true) => self.repeated() / IN_PLACE,
                _ => self.repeated() / row * row,
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
            // What is changed in place is read from a copy where it is read after it was written.
            let mut before: SmallVec<[Vec<C>; 2]> = outs.iter().map(|_| Vec::new()).collect();
            for at in (0..count).step_by(longest) {
                let (start, len) = (first + at, longest.min(count - at));
                for j in self.sources.iter().enumerate().filter_map(|(k, source)| self.copied(k, source)) {
                    before[j].clear();
                    before[j].extend_from_slice(&outs[j][at..at + len]);
                }
                let mut tile_inputs: SmallVec<[TileIn<C>; 4]> = SmallVec::new();
                for (k, (&(elements, differ, offset), repeated)) in operands.iter().zip(&repeated).enumerate() {
                    tile_inputs.push(match (elements, &repeated[..]) {
                        ([], _) => match self.sources[k] {
                            Source::Output(j) if before[j].is_empty() => TileIn::Output(j),
                            Source::Output(j) => TileIn::Slice(&before[j]),
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
                divided_by_zero |= program.eval_tile(&tile, scratch, &mut targets);
            }
            return divided_by_zero;
        }
        let bases = self.bases(first);
        strided.runs(first, count, |at, offsets, len| {
            let mut tile_inputs: SmallVec<[TileIn<C>; 4]> = SmallVec::new();
            for ((&(elements, differ, offset), &more), source) in operands.iter().zip(offsets).zip(self.sources) {
                let from = offset.wrapping_add_signed(more);
                tile_inputs.push(match (elements, source) {
                    ([], &Source::Output(j)) => TileIn::Output(j),
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
            divided_by_zero |= program.eval_tile(&tile, scratch, &mut targets);
        });
        divided_by_zero
    }

    /// [`Partition::base`] of every result.
    fn bases(&self, first: usize) -> SmallVec<[isize; 2]> {
        (0..self.launch.outputs.len()).map(|j| self.partition.base(self.launch, j, first)).collect()
    }

    /// Where result `j` has the job's element `at`, which the walk has at `offsets`.
    fn result_start(&self, j: usize, at: usize, bases: &[isize], offsets: &[isize]) -> usize {
        match self.partition {
            Partition::Elements => at,
            _ => (bases[j] + offsets[self.launch.inputs.len() + j]) as usize,
        }
    }

    /// As [`run`](MapJob::run), of what is only converted: without a detour where one side is the type computed in.
    fn convert<C: Number>(&self, first: usize, count: usize, outs: &mut [&mut [u8]]) {
        let (strided, input, output) = (&self.launch.strided, &self.launch.inputs[0], self.launch.outputs[0]);
        let last = |k: usize| strided.strides[k].last().copied().unwrap_or(1);
        let (step, to_step) = (last(0), if self.partition == Partition::Elements { 1 } else { last(1) });
        let (bases, from) = (self.bases(first), self.reads[0]);
        let (mut tile, same) = ([C::from_i32(0); TILE], C::COMPUTE.dtype());
        strided.runs(first, count, |at, offsets, len| {
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

    /// Computes elements `first..first + count`; gives whether an integer was divided by zero.
    fn run<C: Number>(&self, first: usize, count: usize, outs: &mut [&mut [u8]]) -> bool {
        let Launch { inputs, outputs, program, strided, .. } = self.launch;
        let zero = C::from_f64(0.0);
        let mut scratch = Scratch::<C>::new();
        let step = |k: usize| strided.strides[k].last().copied().unwrap_or(0);
        let row = strided.dims.last().copied().unwrap_or(1).max(1);
        let elements = self.partition == Partition::Elements;
        // Results of the type computed in go straight to their place, or are streamed there.
        let in_rows = |j: usize| row >= WORTH_A_TILE && step(inputs.len() + j) == 1;
        let same = |j: usize| outputs[j].dtype == C::COMPUTE.dtype() && (elements || in_rows(j));
        let bytes = |t: &Tensor| t.numel() * t.dtype.size();
        let all = || inputs.iter().map(bytes).chain(outputs.iter().map(|t| bytes(t))).sum();
        // What is changed in place is in the cache by then, and streamed loops have no operand that is written.
        let fresh = !self.is_in_place();
        let streamed = |j: usize| fresh && elements && same(j) && program.goes_past_cache(bytes(outputs[j]), all());
        let direct = |j: usize| same(j) && !streamed(j);
        if matches!(self.sources, [Source::Storage(_)]) && outputs.len() == 1 && !streamed(0) && program.is_identity() {
            self.convert::<C>(first, count, outs);
            return false;
        }
        let streaming = Streaming::new();
        // Where nothing is kept in registers or converted, a tile may be as long as it likes.
        let unconverted = inputs.iter().all(|t| t.dtype == C::COMPUTE.dtype());
        let plain = !program.has_registers() && unconverted;
        let past = program.streams() && (0..outputs.len()).all(streamed);
        let all_direct = (0..outputs.len()).all(direct);
        if (plain && (past || all_direct) && self.reads_in_place())
            || (unconverted && all_direct && self.repeats().is_some())
        {
            scratch.streamed = past;
            return self.rows::<C>(first, count, outs, &mut scratch);
        }
        let longest = match plain {
            true if all_direct && elements => count,
            true if all_direct => row,
            true if (0..outputs.len()).all(streamed) => STREAMED,
            _ => TILE,
        };
        let mut loaded: SmallVec<[Vec<C>; 4]> = inputs.iter().map(|_| Vec::new()).collect();
        let mut results: SmallVec<[Vec<C>; 2]> =
            (0..outputs.len()).map(|j| if direct(j) { Vec::new() } else { vec![zero; longest + LINE] }).collect();
        let bases = self.bases(first);
        let mut divided_by_zero = false;
        let (mut start, end) = (first, first + count);
        while start < end {
            let left = row - start % row;
            let mut len = longest.min(end - start);
            if row >= WORTH_A_TILE {
                len = len.min(left);
            }
            let offsets = strided.offsets(start);
            // Read where they lie: elements of the type computed in, one after another or one for all.
            let in_place =
                |k: usize, t: &Tensor| t.dtype == C::COMPUTE.dtype() && len <= left && matches!(step(k), 0 | 1);
            for (k, t) in inputs.iter().enumerate() {
                let bytes: &[u8] = match self.sources[k] {
                    Source::Unused => continue,
                    Source::Storage(_) if in_place(k, t) => continue,
                    Source::Storage(i) => self.reads[i],
                    Source::Output(j) => outs[j],
                };
                let buffer = &mut loaded[k];
                buffer.resize(longest + LINE, zero);
                let held = aligned(buffer, len);
                let buffer = &mut buffer[held];
                if matches!(self.sources[k], Source::Output(_)) && elements {
                    load_tile(t.dtype, bytes, start - first, 1, buffer);
                    continue;
                }
                let offset = match self.sources[k] {
                    Source::Output(j) => bases[j],
                    _ => t.layout.offset as isize,
                };
                strided.runs(start, len, |at, offsets, n| {
                    load_tile(t.dtype, bytes, (offset + offsets[k]) as usize, step(k), &mut buffer[at..at + n]);
                });
            }
            let tile_inputs: SmallVec<[TileIn<C>; 4]> = inputs
                .iter()
                .enumerate()
                .map(|(k, t)| match self.sources[k] {
                    Source::Unused => TileIn::Scalar(zero),
                    Source::Storage(i) if in_place(k, t) => {
                        let elements: &[C] = bytemuck::cast_slice(self.reads[i]);
                        let from = (t.layout.offset as isize + offsets[k]) as usize;
                        match step(k) {
                            1 => TileIn::Slice(&elements[from..][..len]),
                            _ => TileIn::Scalar(elements[from]),
                        }
                    }
                    _ => TileIn::Slice(&loaded[k][aligned(&loaded[k], len)]),
                })
                .collect();
            let tile = Tile {
                inputs: &tile_inputs,
                scalars: self.launch.scalars,
                seeds: self.launch.seeds,
                first: start as u64,
                len,
            };
            {
                let mut targets: SmallVec<[&mut [C]; 2]> = SmallVec::new();
                for (j, (bytes, result)) in outs.iter_mut().zip(&mut results).enumerate() {
                    targets.push(match direct(j) {
                        true => {
                            let at = self.result_start(j, start - first, &bases, &offsets);
                            &mut bytemuck::cast_slice_mut::<u8, C>(bytes)[at..][..len]
                        }
                        false => {
                            let held = aligned(result, len);
                            &mut result[held]
                        }
                    });
                }
                divided_by_zero |= program.eval_tile(&tile, &mut scratch, &mut targets);
            }
            for (j, t) in outputs.iter().enumerate().filter(|(j, _)| !direct(*j)) {
                let (k, result) = (inputs.len() + j, &results[j][aligned(&results[j], len)]);
                if streamed(j) {
                    let out = &mut bytemuck::cast_slice_mut::<u8, C>(outs[j])[start - first..][..len];
                    streaming.copy(out, result);
                } else if elements {
                    store_tile(t.dtype, result, outs[j], start - first, 1);
                } else {
                    strided.runs(start, len, |at, offsets, n| {
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

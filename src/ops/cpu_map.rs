//! Elementwise launches on the CPU: tiles of the expression, spread over the worker pool.

use std::sync::atomic::{AtomicBool, Ordering};

use smallvec::SmallVec;

use super::convert::{load_tile, store_tile};
use super::cpu_transpose::Transpose;
use super::elementwise::Launch;
use super::lane::Lane;
use super::tiles::{Scratch, TILE, Tile, TileIn};
use crate::device::count_launch;
use crate::device::cpu::parallel;
use crate::device::cpu::streaming::{LARGE, Streaming};
use crate::storage::{Storage, with_host};
use crate::{Compute, Error, Result, Tensor};

/// Tiles a job of the pool computes: enough to hide what handing it over costs.
const TILES_A_JOB: usize = 16;
/// Elements computed before they are streamed to where they belong: they stay in the first-level cache until then.
const STREAMED: usize = 4 * TILE;
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

pub(super) fn run(launch: &Launch) -> Result<()> {
    count_launch();
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
    if let Some(transpose) = Transpose::of(launch) {
        let out = launch.outputs[0];
        let range = out.layout.offset * out.dtype.size()..(out.layout.offset + out.numel()) * out.dtype.size();
        return with_host(&reads, &writes, |reads, writes| transpose.run(reads[0], &mut writes[0][range]));
    }
    let divided_by_zero = with_host(&reads, &writes, |reads, writes| match launch.compute {
        Compute::F32 => run_as::<f32>(launch, &sources, reads, writes),
        Compute::F64 => run_as::<f64>(launch, &sources, reads, writes),
        Compute::I64 => run_as::<i64>(launch, &sources, reads, writes),
    })?;
    if divided_by_zero { Err(Error::DivisionByZero { op: launch.op }) } else { Ok(()) }
}

fn run_as<C: Lane>(launch: &Launch, sources: &[Source], reads: &[&[u8]], writes: &mut [&mut [u8]]) -> bool {
    let count = launch.outputs[0].numel();
    let first_output = launch.inputs.len();
    let contiguous = (0..launch.outputs.len()).all(|j| launch.walk.is_contiguous(first_output + j));
    if !contiguous {
        // Elements of a strided output cannot be dealt out as slices: one thread walks them all.
        return Job { launch, sources, reads, scatter: true }.run::<C>(0, count, writes);
    }
    let job = Job { launch, sources, reads, scatter: false };
    let mut parts: SmallVec<[&mut [u8]; 2]> = SmallVec::new();
    for (t, bytes) in launch.outputs.iter().zip(writes.iter_mut()) {
        let size = t.dtype.size();
        parts.push(&mut bytes[t.layout.offset * size..][..count * size]);
    }
    let step = TILES_A_JOB * TILE;
    if count <= step {
        return job.run::<C>(0, count, &mut parts);
    }
    let mut chunks: Vec<_> =
        parts.into_iter().zip(launch.outputs).map(|(bytes, t)| bytes.chunks_mut(step * t.dtype.size())).collect();
    let mut jobs: Vec<(usize, SmallVec<[&mut [u8]; 2]>)> =
        (0..count).step_by(step).map(|first| (first, chunks.iter_mut().filter_map(Iterator::next).collect())).collect();
    let divided_by_zero = AtomicBool::new(false);
    parallel::for_each(&mut jobs, |_, (first, outs)| {
        if job.run::<C>(*first, step.min(count - *first), outs) {
            divided_by_zero.store(true, Ordering::Relaxed);
        }
    });
    divided_by_zero.into_inner()
}

/// What every worker needs to compute its share.
struct Job<'a> {
    launch: &'a Launch<'a>,
    sources: &'a [Source],
    reads: &'a [&'a [u8]],
    /// Outputs are whole storages walked by their strides; otherwise slices of exactly the elements computed.
    scatter: bool,
}

impl Job<'_> {
    /// Computes elements `first..first + count`; gives whether an integer was divided by zero.
    fn run<C: Lane>(&self, first: usize, count: usize, outs: &mut [&mut [u8]]) -> bool {
        let Launch { inputs, outputs, program, walk, .. } = self.launch;
        let zero = C::from_f64(0.0);
        let mut scratch = Scratch::<C>::new();
        // Results of the type computed in go straight to their place, or are streamed there.
        let same = |j: usize| !self.scatter && outputs[j].dtype == C::COMPUTE.dtype();
        let streamed = |j: usize| same(j) && outputs[j].numel() * outputs[j].dtype.size() >= LARGE;
        let direct = |j: usize| same(j) && !streamed(j);
        let streaming = Streaming::new();
        // Where nothing is kept in registers or converted, a tile may be as long as it likes.
        let plain = !program.has_registers() && inputs.iter().all(|t| t.dtype == C::COMPUTE.dtype());
        let longest = match plain {
            true if (0..outputs.len()).all(direct) => count,
            true if (0..outputs.len()).all(streamed) => STREAMED,
            _ => TILE,
        };
        let mut loaded: SmallVec<[Vec<C>; 4]> = inputs.iter().map(|_| Vec::new()).collect();
        let mut results: SmallVec<[Vec<C>; 2]> =
            (0..outputs.len()).map(|j| if direct(j) { Vec::new() } else { vec![zero; longest] }).collect();
        let step = |k: usize| walk.strides[k].last().copied().unwrap_or(0);
        let row = walk.dims.last().copied().unwrap_or(1).max(1);
        let mut divided_by_zero = false;
        let (mut start, end) = (first, first + count);
        while start < end {
            let left = row - start % row;
            let mut len = longest.min(end - start);
            if row >= WORTH_A_TILE {
                len = len.min(left);
            }
            let offsets = walk.offsets(start);
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
                buffer.resize(longest, zero);
                if matches!(self.sources[k], Source::Output(_)) && !self.scatter {
                    load_tile(t.dtype, bytes, start - first, 1, &mut buffer[..len]);
                    continue;
                }
                let offset = t.layout.offset as isize;
                walk.runs(start, len, |at, offsets, n| {
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
                    _ => TileIn::Slice(&loaded[k][..len]),
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
                        true => &mut bytemuck::cast_slice_mut::<u8, C>(bytes)[start - first..][..len],
                        false => &mut result[..len],
                    });
                }
                divided_by_zero |= program.eval_tile(&tile, &mut scratch, &mut targets);
            }
            for (j, t) in outputs.iter().enumerate().filter(|(j, _)| !direct(*j)) {
                let k = inputs.len() + j;
                if streamed(j) {
                    let out = &mut bytemuck::cast_slice_mut::<u8, C>(outs[j])[start - first..][..len];
                    streaming.copy(out, &results[j][..len]);
                } else if self.scatter {
                    walk.runs(start, len, |at, offsets, n| {
                        let from = (t.layout.offset as isize + offsets[k]) as usize;
                        store_tile(t.dtype, &results[j][at..at + n], outs[j], from, step(k));
                    });
                } else {
                    store_tile(t.dtype, &results[j][..len], outs[j], start - first, 1);
                }
            }
            start += len;
        }
        divided_by_zero
    }
}

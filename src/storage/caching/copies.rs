//! Copying blocks to their new locations, so that no failure loses a block.
//!
//! Within a segment, a block's destination may overlap its own source or another block's. Copies are therefore grouped into waves. Within a wave no
//! copy writes bytes that another one reads, so a failed wave can be repeated. The next wave starts when the device has finished the previous one.

use std::sync::Arc;
use std::time::Duration;

use super::super::segment::Segment;
use super::CachingAllocator;
use super::moves::{CompactionPlan, Move};
use crate::device::StreamId;
use crate::{Device, Error, Result};

/// How often a call that may fail temporarily is tried, and how long to wait between tries.
pub(super) const MAX_TRIES: u32 = 8;
pub(super) const RETRY_AFTER: Duration = Duration::from_micros(if cfg!(test) { 10 } else { 10_000 });
/// Like [`MAX_TRIES`], for calls whose failure would leave blocks on the host or lose a block.
pub(super) const MAX_TRIES_BEFORE_LOSS: u32 = 100;
/// The most copies for one block that moves by less than its size. A block that needs more copies goes through the host.
const MAX_COPIES_PER_BLOCK: usize = 64;

/// The bytes `at..at + bytes` of the plan's block number `index`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Piece {
    index: usize,
    at: usize,
    bytes: usize,
}

/// One step of moving blocks down.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    /// Independent copies on the device.
    Wave(Vec<Piece>),
    /// One block, copied through the host.
    ThroughHost(usize),
}

/// A block whose bytes are only on the host.
pub(super) struct Stranded<'a> {
    pub(super) block: Move<'a>,
    pub(super) bytes: Box<[u8]>,
}

/// Plans the steps that move blocks down within a segment. `moves` gives (source offset, destination offset, size) in ascending order of offsets.
fn steps(moves: impl Iterator<Item = (usize, usize, usize)>) -> Vec<Step> {
    let (mut steps, mut wave, mut first_read) = (Vec::new(), Vec::new(), usize::MAX);
    let mut end_wave = |wave: &mut Vec<Piece>, then: Option<Step>| {
        let wave = std::mem::take(wave);
        steps.extend((!wave.is_empty()).then_some(Step::Wave(wave)).into_iter().chain(then));
    };
    for (index, (from, to, size)) in moves.enumerate() {
        match from - to {
            0 => {}
            down if size / down > MAX_COPIES_PER_BLOCK => end_wave(&mut wave, Some(Step::ThroughHost(index))),
            down => {
                for at in (0..size).step_by(down) {
                    let bytes = down.min(size - at);
                    if !wave.is_empty() && to + at + bytes > first_read {
                        end_wave(&mut wave, None);
                    }
                    if wave.is_empty() {
                        first_read = from + at;
                    }
                    wave.push(Piece { index, at, bytes });
                }
            }
        }
    }
    end_wave(&mut wave, None);
    steps
}

/// Adds to a driver error that no block was lost.
pub(super) fn add_compaction_detail(error: Error) -> Error {
    match error {
        Error::OpenCl { device, call, code, detail } => {
            let detail = format!("{detail}, during compaction: no block was lost");
            Error::OpenCl { device, call, code, detail }
        }
        other => other,
    }
}

impl CachingAllocator {
    /// Calls `f` until it succeeds, at most `tries` times, while its errors may be temporary.
    pub(super) fn retry<T>(&self, tries: u32, mut f: impl FnMut() -> Result<T>) -> Result<T> {
        let mut result = f();
        for _ in 1..tries {
            if !matches!(result, Err(Error::OpenCl { .. } | Error::OutOfMemory { .. })) {
                break;
            }
            std::thread::sleep(RETRY_AFTER);
            result = f();
        }
        result
    }

    /// Waits for all work, because work may have been enqueued until the blocks were locked.
    pub(super) fn wait_for_all(&self) -> Result<()> {
        self.retry(MAX_TRIES, || self.driver.synchronize())
    }

    /// Copies the blocks of a plan to a new, unused segment. After a failure the blocks are in their old locations.
    pub(super) fn copy_to_new_segment(&self, plan: &CompactionPlan<'_>, target: &Segment) -> Result<()> {
        self.wait_for_all()?;
        let whole = |(index, m): (usize, &Move<'_>)| Piece { index, at: 0, bytes: m.size };
        self.copy_wave(&plan.moves, &plan.moves.iter().enumerate().map(whole).collect::<Vec<_>>(), target)
    }

    /// Like [`copy_to_new_segment`](Self::copy_to_new_segment), but releases the pages of the old segments as they are copied.
    pub(super) fn relocate(&self, plan: &CompactionPlan<'_>, target: &Segment) -> Result<()> {
        let places = plan.moves.iter().map(|m| ((m.from.0.memory(), m.from.1), (target.memory(), m.to), m.size));
        let moves: Vec<_> = places.collect();
        // SAFETY: as in `copy_wave`. The old segments are released after the blocks have arrived.
        unsafe { self.driver.relocate(&moves) }
    }

    /// Copies the blocks of a plan down within their segment. After a failure, the plan's destinations are the blocks' actual locations. A block that
    /// is in neither its old nor its new location is removed from the plan and returned.
    pub(super) fn copy_down<'a>(
        &self,
        plan: &mut CompactionPlan<'a>,
        target: &Arc<Segment>,
    ) -> (Result<()>, Option<Stranded<'a>>) {
        let places = plan.moves.iter().map(|m| (m.from.1, m.to, m.size));
        let (steps, mut copied_bytes) = (steps(places), vec![0; plan.moves.len()]);
        let mut on_host = None;
        let copied = self.wait_for_all().and_then(|()| {
            steps.iter().try_for_each(|step| match step {
                Step::Wave(pieces) => {
                    self.copy_wave(&plan.moves, pieces, target)?;
                    pieces.iter().for_each(|piece| copied_bytes[piece.index] += piece.bytes);
                    Ok(())
                }
                Step::ThroughHost(index) => {
                    let m = &plan.moves[*index];
                    let bytes = self.read_to_host(MAX_TRIES, m, 0, target)?;
                    copied_bytes[*index] = m.size;
                    self.write_from_host(MAX_TRIES_BEFORE_LOSS, &bytes, target, m.to)
                        .inspect_err(|_| on_host = Some((*index, bytes)))
                }
            })
        });
        if copied.is_ok() {
            return (Ok(()), None);
        }
        // One block may have been copied partly over itself.
        let is_torn =
            |(_, (m, copied_bytes)): &(usize, (&Move<'_>, &usize))| **copied_bytes > 0 && **copied_bytes < m.size;
        let torn = plan
            .moves
            .iter()
            .zip(&copied_bytes)
            .enumerate()
            .find(is_torn)
            .map(|(index, (_, copied_bytes))| (index, *copied_bytes));
        if let Some((index, done)) = torn {
            let m = &plan.moves[index];
            match self.read_to_host(MAX_TRIES_BEFORE_LOSS, m, done, target) {
                Ok(bytes) if self.write_from_host(MAX_TRIES_BEFORE_LOSS, &bytes, target, m.to).is_err() => {
                    on_host = Some((index, bytes))
                }
                Ok(_) => copied_bytes[index] = m.size,
                // Marks the device lost before the blocks are unlocked, so that no thread reads the torn block.
                Err(error) => self.driver.give_up(&format!("a block was half moved, and could not be read: {error}")),
            }
        }
        for (m, copied_bytes) in plan.moves.iter_mut().zip(copied_bytes) {
            m.to = if copied_bytes == m.size { m.to } else { m.from.1 };
        }
        let stranded = on_host.map(|(index, bytes)| Stranded { block: plan.moves.remove(index), bytes });
        (copied.map_err(add_compaction_detail), stranded)
    }

    /// Copies pieces that do not overwrite each other's sources. Waits for the copies, because other streams may use the blocks next.
    fn copy_wave(&self, moves: &[Move<'_>], pieces: &[Piece], target: &Segment) -> Result<()> {
        let copy = |&Piece { index, at, bytes }: &Piece| {
            let m = &moves[index];
            let (from, to) = ((m.from.0.memory(), m.from.1 + at), (target.memory(), m.to + at));
            // SAFETY: the block is write-locked. The plan holds the destination: its bytes are free, or belong to
            // write-locked blocks that have moved on already.
            unsafe { self.driver.copy(StreamId::DEFAULT, from, to, bytes) }
        };
        self.retry(MAX_TRIES, || pieces.iter().try_for_each(copy).and_then(|()| self.driver.synchronize()))
    }

    /// Reads a block's bytes to the host. The first `done` bytes are already at the new location.
    pub(super) fn read_to_host(&self, tries: u32, m: &Move<'_>, done: usize, target: &Segment) -> Result<Box<[u8]>> {
        let bytes = if self.driver.has_contents() { m.size } else { 0 }; // a device without contents only counts the call
        let full = |()| Error::OutOfMemory {
            device: Device::Cpu,
            requested: m.size,
            detail: "the host has no room for a block that is being moved".into(),
        };
        let mut host = self.retry(tries, || bytemuck::allocation::try_zeroed_slice_box::<u8>(bytes).map_err(full))?;
        let (new, old) = host.split_at_mut(done.min(bytes));
        self.retry(tries, || {
            // SAFETY: the block is write-locked, here and below.
            unsafe { self.driver.read((m.from.0.memory(), m.from.1 + done), old) }?;
            match done {
                0 => Ok(()),
                // SAFETY: as above.
                _ => unsafe { self.driver.read((target.memory(), m.to), new) },
            }
        })?;
        Ok(host)
    }

    /// Writes host bytes to a location that no other block uses.
    pub(super) fn write_from_host(&self, tries: u32, bytes: &[u8], target: &Segment, at: usize) -> Result<()> {
        // SAFETY: the location is in a new segment or held by a plan, and its block is write-locked.
        self.retry(tries, || unsafe { self.driver.write(bytes, (target.memory(), at)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Executes the steps on an array, each wave backwards, because the order within a wave must not matter.
    fn moved(moves: &[(usize, usize, usize)], bytes: usize) -> Vec<usize> {
        let mut memory: Vec<usize> = (0..bytes).collect();
        for step in steps(moves.iter().copied()) {
            let pieces = match step {
                Step::Wave(pieces) => pieces,
                Step::ThroughHost(index) => vec![Piece { index, at: 0, bytes: moves[index].2 }],
            };
            let places = |p: &Piece| (moves[p.index].0 + p.at, moves[p.index].1 + p.at);
            for read in &pieces {
                let (from, _) = places(read);
                for write in pieces.iter().filter(|_| pieces.len() > 1) {
                    let (_, to) = places(write);
                    assert!(to + write.bytes <= from || from + read.bytes <= to, "{write:?} overwrites {read:?}");
                }
            }
            for piece in pieces.iter().rev() {
                let (from, to) = places(piece);
                memory.copy_within(from..from + piece.bytes, to);
            }
        }
        memory
    }

    #[test]
    fn no_wave_writes_to_what_it_reads() {
        let mut state = 7u64;
        let mut random = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        for _ in 0..500 {
            let (mut moves, mut from, mut to) = (Vec::new(), 0, 0);
            for _ in 0..random(12) + 1 {
                let size = random(150) + 1;
                from += [0, 0, 1, random(40)][random(4)];
                moves.push((from, to, size));
                (from, to) = (from + size, to + size);
            }
            let memory = moved(&moves, from);
            for (from, to, size) in moves {
                assert!((from..from + size).eq(memory[to..to + size].iter().copied()));
            }
        }
    }
}

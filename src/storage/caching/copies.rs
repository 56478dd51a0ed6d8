//! Copying blocks to their new places, so that no failure loses one.
//!
//! Within a segment a block's new place may overlap another block's old place, or its own. Copies are therefore done in waves:
//! no copy writes what another one of its wave reads, so a wave that fails can be repeated. The next wave starts when the
//! device has done this one.

use std::sync::Arc;
use std::time::Duration;

use super::super::segment::Segment;
use super::CachingAllocator;
use super::moves::{Move, Plan};
use crate::device::StreamId;
use crate::{Device, Error, Result};

/// How often a call is tried that may fail for a moment, and how long to wait in between.
pub(super) const TRIES: u32 = 8;
pub(super) const RETRY_AFTER: Duration = Duration::from_micros(if cfg!(test) { 10 } else { 10_000 });
/// As [`TRIES`], where the only other way is to keep blocks on the host, or to lose one.
pub(super) const RETRIES: u32 = 100;
/// Copies for one block that moves by less than its size; if there would be more it is copied through the host.
const PIECES: usize = 64;

/// Bytes `at..at + bytes` of a block of a plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Piece {
    index: usize,
    at: usize,
    bytes: usize,
}

/// What is done at a time when blocks move down.
#[derive(Debug, PartialEq, Eq)]
enum Step {
    /// Copies on the device.
    Wave(Vec<Piece>),
    /// One block, over the host.
    OverHost(usize),
}

/// A block whose bytes are on the host only.
pub(super) struct Stranded<'a> {
    pub(super) block: Move<'a>,
    pub(super) bytes: Box<[u8]>,
}

/// The steps of moves down within a segment, each from an offset to an offset with a size, in the order of offsets.
fn steps(moves: impl Iterator<Item = (usize, usize, usize)>) -> Vec<Step> {
    let (mut steps, mut wave, mut first_read) = (Vec::new(), Vec::new(), usize::MAX);
    let mut end_wave = |wave: &mut Vec<Piece>, then: Option<Step>| {
        let wave = std::mem::take(wave);
        steps.extend((!wave.is_empty()).then_some(Step::Wave(wave)).into_iter().chain(then));
    };
    for (index, (from, to, size)) in moves.enumerate() {
        match from - to {
            0 => {}
            down if size / down > PIECES => end_wave(&mut wave, Some(Step::OverHost(index))),
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

/// The error of a driver, which says that nothing was lost.
pub(super) fn while_moving(error: Error) -> Error {
    match error {
        Error::OpenCl { device, call, code, detail } => {
            let detail = format!("{detail}, while blocks were moved together: they are all still there");
            Error::OpenCl { device, call, code, detail }
        }
        other => other,
    }
}

impl CachingAllocator {
    /// Calls `f` until it succeeds, at most `tries` times, while its errors are of a kind that may pass.
    pub(super) fn persist<T>(&self, tries: u32, mut f: impl FnMut() -> Result<T>) -> Result<T> {
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

    /// Waits for all work. Some may have been enqueued until blocks were locked.
    pub(super) fn wait_for_all(&self) -> Result<()> {
        self.persist(TRIES, || self.driver.synchronize())
    }

    /// Copies the blocks of a plan to a segment that nobody uses yet: where that fails they are where they were.
    pub(super) fn copy_beside(&self, plan: &Plan<'_>, target: &Segment) -> Result<()> {
        self.wait_for_all()?;
        let whole = |(index, m): (usize, &Move<'_>)| Piece { index, at: 0, bytes: m.size };
        self.copy_wave(&plan.moves, &plan.moves.iter().enumerate().map(whole).collect::<Vec<_>>(), target)
    }

    /// As [`copy_beside`](Self::copy_beside), but the old segments give back their pages as these are copied.
    pub(super) fn relocate(&self, plan: &Plan<'_>, target: &Segment) -> Result<()> {
        let places = plan.moves.iter().map(|m| ((m.from.0.memory(), m.from.1), (target.memory(), m.to), m.size));
        let moves: Vec<_> = places.collect();
        // SAFETY: as in `copy_wave`; the old segments go when the blocks have arrived.
        unsafe { self.driver.relocate(&moves) }
    }

    /// Copies the blocks of a plan down within their segment. Where that fails the plan's places are those where the
    /// blocks are then; one that is neither here nor there is taken out of it.
    pub(super) fn copy_down<'a>(
        &self,
        plan: &mut Plan<'a>,
        target: &Arc<Segment>,
    ) -> (Result<()>, Option<Stranded<'a>>) {
        let places = plan.moves.iter().map(|m| (m.from.1, m.to, m.size));
        let (steps, mut there) = (steps(places), vec![0; plan.moves.len()]);
        let mut on_host = None;
        let copied = self.wait_for_all().and_then(|()| {
            steps.iter().try_for_each(|step| match step {
                Step::Wave(pieces) => {
                    self.copy_wave(&plan.moves, pieces, target)?;
                    pieces.iter().for_each(|piece| there[piece.index] += piece.bytes);
                    Ok(())
                }
                Step::OverHost(index) => {
                    let m = &plan.moves[*index];
                    let bytes = self.fetch(TRIES, m, 0, target)?;
                    there[*index] = m.size;
                    self.put(RETRIES, &bytes, target, m.to).inspect_err(|_| on_host = Some((*index, bytes)))
                }
            })
        });
        if copied.is_ok() {
            return (Ok(()), None);
        }
        // One block may have begun to move over itself.
        let is_torn = |(_, (m, there)): &(usize, (&Move<'_>, &usize))| **there > 0 && **there < m.size;
        let torn = plan.moves.iter().zip(&there).enumerate().find(is_torn).map(|(index, (_, there))| (index, *there));
        if let Some((index, done)) = torn {
            let m = &plan.moves[index];
            match self.fetch(RETRIES, m, done, target) {
                Ok(bytes) if self.put(RETRIES, &bytes, target, m.to).is_err() => on_host = Some((index, bytes)),
                Ok(_) => there[index] = m.size,
                // Before the blocks are unlocked: nobody reads them in between.
                Err(error) => self.driver.give_up(&format!("a block was half moved, and could not be read: {error}")),
            }
        }
        for (m, there) in plan.moves.iter_mut().zip(there) {
            m.to = if there == m.size { m.to } else { m.from.1 };
        }
        let stranded = on_host.map(|(index, bytes)| Stranded { block: plan.moves.remove(index), bytes });
        (copied.map_err(while_moving), stranded)
    }

    /// Copies pieces none of which writes to what another reads, and waits: other streams may use the blocks next.
    fn copy_wave(&self, moves: &[Move<'_>], pieces: &[Piece], target: &Segment) -> Result<()> {
        let copy = |&Piece { index, at, bytes }: &Piece| {
            let m = &moves[index];
            let (from, to) = ((m.from.0.memory(), m.from.1 + at), (target.memory(), m.to + at));
            // SAFETY: the block is locked for writing. Its new place is held by the plan: free, or of blocks that are
            // locked as well and have moved on.
            unsafe { self.driver.copy(StreamId::DEFAULT, from, to, bytes) }
        };
        self.persist(TRIES, || pieces.iter().try_for_each(copy).and_then(|()| self.driver.synchronize()))
    }

    /// A block's bytes on the host. The first `done` of them are at its new place already.
    pub(super) fn fetch(&self, tries: u32, m: &Move<'_>, done: usize, target: &Segment) -> Result<Box<[u8]>> {
        let bytes = if self.driver.has_contents() { m.size } else { 0 }; // else the call is only counted
        let full = |()| Error::OutOfMemory {
            device: Device::Cpu,
            requested: m.size,
            detail: "the host has no room for a block that is being moved".into(),
        };
        let mut host = self.persist(tries, || bytemuck::allocation::try_zeroed_slice_box::<u8>(bytes).map_err(full))?;
        let (new, old) = host.split_at_mut(done.min(bytes));
        self.persist(tries, || {
            // SAFETY: the block is locked for writing, here and below.
            unsafe { self.driver.read((m.from.0.memory(), m.from.1 + done), old) }?;
            match done {
                0 => Ok(()),
                // SAFETY: as above.
                _ => unsafe { self.driver.read((target.memory(), m.to), new) },
            }
        })?;
        Ok(host)
    }

    /// Writes bytes of the host to a place that no other block has.
    pub(super) fn put(&self, tries: u32, bytes: &[u8], target: &Segment, at: usize) -> Result<()> {
        // SAFETY: the place is a new segment, or held by a plan; the block that is to be there is locked for writing.
        self.persist(tries, || unsafe { self.driver.write(bytes, (target.memory(), at)) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Does the steps on an array, each wave backwards: the order within one must not matter.
    fn moved(moves: &[(usize, usize, usize)], bytes: usize) -> Vec<usize> {
        let mut memory: Vec<usize> = (0..bytes).collect();
        for step in steps(moves.iter().copied()) {
            let pieces = match step {
                Step::Wave(pieces) => pieces,
                Step::OverHost(index) => vec![Piece { index, at: 0, bytes: moves[index].2 }],
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

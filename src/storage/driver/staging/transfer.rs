//! A transfer in pieces that all threads of the team take in turn.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicUsize};

use super::Ring;
use crate::device::cpu::parallel;
use crate::device::lock;
use crate::{Error, Result};

/// How often a thread looks whether another is through before it lets others run.
const SPINS: u32 = 20_000;

/// A part of a transfer that goes through a slice at a time.
pub(super) struct Chunk {
    pub(super) range: Range<usize>,
    /// Pieces of it that are not copied yet.
    left: AtomicUsize,
    /// Whether the slice is there to be copied to or from.
    ready: AtomicBool,
    /// Whether the device's part was submitted.
    pub(super) begun: AtomicBool,
}

/// A transfer under way. All threads take pieces in order, and none sleeps before the end: who finds a slice in use waits
/// for the device, who copies the last piece of a chunk hands it on.
pub(super) struct Transfer<'a> {
    ring: &'a Ring,
    pub(super) chunks: Vec<Chunk>,
    /// The pieces: of which chunk, and which bytes.
    pieces: Vec<(usize, Range<usize>)>,
    failed: AtomicBool,
    error: Mutex<Option<Error>>,
}

impl<'a> Transfer<'a> {
    pub(super) fn new(ring: &'a Ring, total: usize) -> Transfer<'a> {
        let (mut chunks, mut pieces) = (Vec::new(), Vec::new());
        for range in chunks_of(total, ring.cut.slice) {
            let starts = range.clone().step_by(ring.cut.piece);
            let of_chunk = starts.map(|at| (chunks.len(), at..range.end.min(at + ring.cut.piece)));
            let before = pieces.len();
            pieces.extend(of_chunk);
            let left = AtomicUsize::new(pieces.len() - before);
            let [ready, begun] = [const { AtomicBool::new(false) }; 2];
            chunks.push(Chunk { range, left, ready, begun });
        }
        Transfer { ring, chunks, pieces, failed: AtomicBool::new(false), error: Mutex::new(None) }
    }

    /// Has the team's threads copy every piece. `acquire` gets the slice of a chunk, `copy` is given a piece's place in it and
    /// its bytes of the whole, `finish` comes after the last piece of a chunk; those two say whether to go on.
    pub(super) fn run(
        &self,
        acquire: impl Fn(usize) -> bool + Sync,
        copy: impl Fn(*mut u8, Range<usize>) + Sync,
        finish: impl Fn(usize) -> bool + Sync,
    ) -> Result<()> {
        parallel::for_each_in_order(self.pieces.len(), 1, |i| {
            let (at, piece) = &self.pieces[i];
            let chunk = &self.chunks[*at];
            // Pieces are begun in order: who waits for another thread's waits for one that is under way.
            let usable = if piece.start == chunk.range.start {
                let usable = acquire(*at);
                chunk.ready.store(usable, Release);
                usable
            } else {
                self.await_flag(&chunk.ready)
            };
            if !usable {
                return;
            }
            let place = self.ring.slices[*at % self.ring.slices.len()].start;
            copy(place.at(piece.start - chunk.range.start), piece.clone());
            if chunk.left.fetch_sub(1, AcqRel) == 1 {
                finish(*at);
            }
        });
        match lock(&self.error).take() {
            None => Ok(()),
            Some(error) => Err(error),
        }
    }

    pub(super) fn await_begun(&self, chunk: usize) -> bool {
        self.await_flag(&self.chunks[chunk].begun)
    }

    /// Waits for what another thread is about to do; false where the transfer has failed.
    fn await_flag(&self, flag: &AtomicBool) -> bool {
        let mut turns = 0u32;
        while !flag.load(Acquire) {
            if self.failed.load(Relaxed) {
                return false;
            }
            turns += 1;
            if turns < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        true
    }

    /// Keeps the first error. Whether there is none.
    pub(super) fn note(&self, result: Result<()>) -> bool {
        let Err(error) = result else { return true };
        lock(&self.error).get_or_insert(error);
        self.failed.store(true, Relaxed);
        false
    }
}

/// The chunks of a transfer: at most `slice` bytes, less at both ends, where the device waits for the first one, and the
/// host for the last.
pub(super) fn chunks_of(total: usize, slice: usize) -> Vec<Range<usize>> {
    let least = slice.div_ceil(4);
    let (mut ranges, mut at, mut next) = (Vec::new(), 0, least);
    while at < total {
        let left = total - at;
        let n = next.min((left / 2).max(least)).min(left);
        ranges.push(at..at + n);
        (at, next) = (at + n, (2 * next).min(slice));
    }
    ranges
}

/// Has `copy` copy `n` bytes.
///
/// # Safety
/// Both places have them, and nobody writes them meanwhile, nor reads those at `to`.
pub(super) unsafe fn bytes(from: *const u8, to: *mut u8, n: usize, copy: impl FnOnce(&mut [u8], &[u8])) {
    // SAFETY: the caller's promise.
    let (from, to) = unsafe { (std::slice::from_raw_parts(from, n), std::slice::from_raw_parts_mut(to, n)) };
    copy(to, from);
}

/// Where bytes begin that threads share out among themselves.
#[derive(Clone, Copy)]
pub(super) struct Start(pub(super) *mut u8);

// SAFETY: a place; who reads or writes there says why it may.
unsafe impl Send for Start {}
// SAFETY: as above.
unsafe impl Sync for Start {}

impl Start {
    pub(super) fn at(self, offset: usize) -> *mut u8 {
        self.0.wrapping_add(offset)
    }
}

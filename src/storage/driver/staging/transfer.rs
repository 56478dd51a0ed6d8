//! A transfer split into pieces that all threads of the team take in turn.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicUsize};

use super::Ring;
use crate::device::cpu::parallel;
use crate::device::lock;
use crate::{Error, Result};

/// Number of times a thread polls another thread's flag before it yields the processor.
const SPINS_BEFORE_YIELD: u32 = 20_000;

/// A part of a transfer that goes through one slice in one step.
pub(super) struct Chunk {
    pub(super) range: Range<usize>,
    /// The number of the chunk's pieces that are not copied yet.
    left: AtomicUsize,
    /// True if the chunk's slice is ready, so that pieces can be copied to or from it.
    ready: AtomicBool,
    /// True if the device's transfer of the chunk was submitted.
    pub(super) begun: AtomicBool,
}

/// A transfer in progress. All threads take pieces in order, and none sleeps before the end. A thread that needs a slice in use
/// waits for the device. The thread that copies the last piece of a chunk makes its slice available to the next transfer.
pub(super) struct Transfer<'a> {
    ring: &'a Ring,
    pub(super) chunks: Vec<Chunk>,
    /// For each piece, the index of its chunk and its byte range in the transfer.
    pieces: Vec<(usize, Range<usize>)>,
    failed: AtomicBool,
    error: Mutex<Option<Error>>,
}

impl<'a> Transfer<'a> {
    pub(super) fn new(ring: &'a Ring, total: usize) -> Transfer<'a> {
        let (mut chunks, mut pieces) = (Vec::new(), Vec::new());
        for range in chunks_of(total, ring.sizes.slice) {
            let starts = range.clone().step_by(ring.sizes.piece);
            let of_chunk = starts.map(|at| (chunks.len(), at..range.end.min(at + ring.sizes.piece)));
            let before = pieces.len();
            pieces.extend(of_chunk);
            let left = AtomicUsize::new(pieces.len() - before);
            let [ready, begun] = [const { AtomicBool::new(false) }; 2];
            chunks.push(Chunk { range, left, ready, begun });
        }
        Transfer { ring, chunks, pieces, failed: AtomicBool::new(false), error: Mutex::new(None) }
    }

    /// Copies every piece with the team's threads. `acquire` waits for the slice of a chunk, `copy` gets a piece's address in the slice and
    /// its range of the transfer, and `finish` runs after a chunk's last piece. `acquire` and `finish` return false to abort the transfer.
    pub(super) fn copy_pieces(
        &self,
        acquire: impl Fn(usize) -> bool + Sync,
        copy: impl Fn(*mut u8, Range<usize>) + Sync,
        finish: impl Fn(usize) -> bool + Sync,
    ) -> Result<()> {
        parallel::for_each_in_order(self.pieces.len(), 1, |i| {
            let (at, piece) = &self.pieces[i];
            let chunk = &self.chunks[*at];
            // Pieces are begun in order, so a thread waits only for a thread that is already working on an earlier piece.
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
        lock(&self.error).take().map_or(Ok(()), Err)
    }

    /// Waits until the device's transfer of the chunk was submitted.
    pub(super) fn await_begun(&self, chunk: usize) -> bool {
        self.await_flag(&self.chunks[chunk].begun)
    }

    /// Waits for a flag that another thread is about to set. Returns false if the transfer has failed.
    fn await_flag(&self, flag: &AtomicBool) -> bool {
        let mut turns = 0u32;
        while !flag.load(Acquire) {
            if self.failed.load(Relaxed) {
                return false;
            }
            turns += 1;
            if turns < SPINS_BEFORE_YIELD { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
        true
    }

    /// Keeps the first error. Returns true if `result` is not an error.
    pub(super) fn keep_error(&self, result: Result<()>) -> bool {
        let Err(error) = result else { return true };
        lock(&self.error).get_or_insert(error);
        self.failed.store(true, Relaxed);
        false
    }
}

/// Splits a transfer into chunks of at most `slice` bytes. The first and last chunks are smaller, because the host and the device
/// cannot both work during them.
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

/// Calls `copy` with the `n` bytes at `to` and the `n` bytes at `from`.
///
/// # Safety
/// Both addresses have `n` bytes. Until the call returns, no other code writes these bytes, or reads the bytes at `to`.
pub(super) unsafe fn copy_raw(from: *const u8, to: *mut u8, n: usize, copy: impl FnOnce(&mut [u8], &[u8])) {
    // SAFETY: the caller promises that both ranges are valid and that no other code writes them.
    let (from, to) = unsafe { (std::slice::from_raw_parts(from, n), std::slice::from_raw_parts_mut(to, n)) };
    copy(to, from);
}

/// The address of the first byte of a range that threads divide among themselves.
#[derive(Clone, Copy)]
pub(super) struct StartPtr(pub(super) *mut u8);

// SAFETY: the value is only an address. Code that reads or writes at the address has to justify the access.
unsafe impl Send for StartPtr {}
// SAFETY: the value is only an address, as for `Send`.
unsafe impl Sync for StartPtr {}

impl StartPtr {
    pub(super) fn at(self, offset: usize) -> *mut u8 {
        self.0.wrapping_add(offset)
    }
}

//! Copies and fills of any size. All threads of the team share large copies and fills.

use std::hint::black_box;
use std::mem::MaybeUninit;
use std::time::Instant;

use bytemuck::AnyBitPattern;

use super::huge_pages::advise_huge;
use super::streaming::{STREAMING_MIN_BYTES, Streaming};
use super::{copy as small, parallel};

/// The size of the pieces into which large copies and fills are split, in bytes.
const PIECE_BYTES: usize = 1 << 17;
/// The minimum size of copies and fills that are split over threads, in bytes.
const PARALLEL_MIN_BYTES: usize = 4 * PIECE_BYTES;

/// Copies between slices of equal length; large copies use all threads of the team.
pub(crate) fn copy(dst: &mut [u8], src: &[u8]) {
    if dst.len() < PARALLEL_MIN_BYTES {
        return small::copy(dst, src);
    }
    let large = dst.len() >= STREAMING_MIN_BYTES;
    let reverse = !large && parallel::alternate_direction();
    parallel::for_each_chunk_from(dst, PIECE_BYTES, reverse, |i, d| {
        let s = &src[i * PIECE_BYTES..][..d.len()];
        if large { Streaming::new().copy(d, s) } else { d.copy_from_slice(s) }
    });
}

/// Measures the rate of copies of large memory, in bytes per second; each byte counts twice, as read and as written.
pub(crate) fn copy_rate() -> f64 {
    const COPIES: u32 = 4;
    let (from, mut to) = (vec![1u8; 64 << 20], vec![1u8; 64 << 20]);
    let began = Instant::now();
    (0..COPIES).for_each(|_| copy(black_box(&mut to), black_box(&from)));
    2.0 * from.len() as f64 * f64::from(COPIES) / began.elapsed().as_secs_f64()
}

/// Copies a slice into a new vector without zeroing its memory first; large copies use all threads of the team.
pub(crate) fn to_vec<T: AnyBitPattern + Send + Sync>(src: &[T]) -> Vec<T> {
    if size_of_val(src) < PARALLEL_MIN_BYTES {
        return src.to_vec();
    }
    let mut out = Vec::with_capacity(src.len());
    let spare: &mut [MaybeUninit<T>] = &mut out.spare_capacity_mut()[..src.len()];
    advise_huge(spare);
    let piece = PIECE_BYTES / size_of::<T>().max(1);
    let large = size_of_val(src) >= STREAMING_MIN_BYTES;
    parallel::for_each_chunk(&mut out.spare_capacity_mut()[..src.len()], piece, |i, to| {
        let from = &src[i * piece..][..to.len()];
        match large {
            true => Streaming::new().copy_new(to, from),
            // SAFETY: both have `to.len()` elements of plain data, and do not overlap.
            false => unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_mut_ptr().cast::<T>(), to.len()) },
        }
    });
    // SAFETY: the pieces have initialised all elements.
    unsafe { out.set_len(src.len()) };
    out
}

/// Fills `dst` with repetitions of a pattern whose length divides [`PIECE_BYTES`].
pub(crate) fn fill(dst: &mut [u8], pattern: &[u8]) {
    if dst.len() < PARALLEL_MIN_BYTES {
        return fill_piece(dst, pattern);
    }
    parallel::for_each_chunk(dst, PIECE_BYTES, |_, d| fill_piece(d, pattern));
}

/// Fills a piece by copying the filled part to its end, again and again, at the speed of memcpy.
fn fill_piece(dst: &mut [u8], pattern: &[u8]) {
    if pattern.iter().all(|&b| b == pattern[0]) {
        return dst.fill(pattern[0]);
    }
    let mut done = pattern.len();
    dst[..done].copy_from_slice(pattern);
    while done < dst.len() {
        let more = done.min(dst.len() - done);
        dst.copy_within(..more, done);
        done += more;
    }
}

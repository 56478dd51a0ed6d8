//! Copies and fills of any size. All threads of the team share a large one.

use std::hint::black_box;
use std::mem::MaybeUninit;
use std::time::Instant;

use bytemuck::AnyBitPattern;

use super::huge_pages::advise_huge;
use super::streaming::{LARGE, Streaming};
use super::{copy as small, parallel};

/// Large copies and fills are shared out in pieces of this size, from [`PARALLEL`] bytes on.
const PIECE: usize = 1 << 17;
const PARALLEL: usize = 4 * PIECE;

/// Copies between slices of one length, large ones with all threads of the team.
pub(crate) fn copy(dst: &mut [u8], src: &[u8]) {
    if dst.len() < PARALLEL {
        return small::copy(dst, src);
    }
    let large = dst.len() >= LARGE;
    let reverse = !large && parallel::turn();
    parallel::for_each_chunk_from(dst, PIECE, reverse, |i, d| {
        let s = &src[i * PIECE..][..d.len()];
        if large { Streaming::new().copy(d, s) } else { d.copy_from_slice(s) }
    });
}

/// How many bytes a second are read and written as large memory is copied.
pub(crate) fn copy_rate() -> f64 {
    const COPIES: u32 = 4;
    let (from, mut to) = (vec![1u8; 64 << 20], vec![1u8; 64 << 20]);
    let began = Instant::now();
    (0..COPIES).for_each(|_| copy(black_box(&mut to), black_box(&from)));
    2.0 * from.len() as f64 * f64::from(COPIES) / began.elapsed().as_secs_f64()
}

/// The slice's elements in a vector, whose memory is not filled with zeros first; large ones with all threads of the team.
pub(crate) fn to_vec<T: AnyBitPattern + Send + Sync>(src: &[T]) -> Vec<T> {
    if size_of_val(src) < PARALLEL {
        return src.to_vec();
    }
    let mut out = Vec::with_capacity(src.len());
    let spare: &mut [MaybeUninit<T>] = &mut out.spare_capacity_mut()[..src.len()];
    advise_huge(spare);
    let piece = PIECE / size_of::<T>().max(1);
    let large = size_of_val(src) >= LARGE;
    parallel::for_each_chunk(&mut out.spare_capacity_mut()[..src.len()], piece, |i, to| {
        let from = &src[i * piece..][..to.len()];
        match large {
            true => Streaming::new().copy_new(to, from),
            // SAFETY: as many elements as there is room for, of plain data, in memory that is not the source's.
            false => unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_mut_ptr().cast::<T>(), to.len()) },
        }
    });
    // SAFETY: the pieces were all of it.
    unsafe { out.set_len(src.len()) };
    out
}

/// Repeats a pattern whose length divides [`PIECE`].
pub(crate) fn fill(dst: &mut [u8], pattern: &[u8]) {
    if dst.len() < PARALLEL {
        return fill_piece(dst, pattern);
    }
    parallel::for_each_chunk(dst, PIECE, |_, d| fill_piece(d, pattern));
}

/// Fills by doubling what is filled already, at the speed of memcpy.
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

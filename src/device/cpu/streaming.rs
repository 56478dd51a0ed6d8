//! Nontemporal stores, which bypass the cache, for results larger than the cache. An ordinary store would read each line before
//! overwriting it, which is a third to a half of all memory traffic.

use std::mem::MaybeUninit;

use bytemuck::Pod;

/// The minimum size of results that are streamed, in bytes: more than the last-level cache of most processors.
pub(crate) const STREAMING_MIN_BYTES: usize = 24 << 20;

/// True if a result of `result` bytes should bypass the caches, because they cannot hold the `all` bytes of result and operands.
pub(crate) fn should_stream(result: usize, all: usize) -> bool {
    result >= STREAMING_MIN_BYTES || (result >= STREAMING_MIN_BYTES / 2 && all >= 2 * STREAMING_MIN_BYTES)
}

/// The number of elements that [`Streaming::line`] stores: one cache line of f32, two of f64.
pub(crate) const LINE: usize = 16;

/// Streams copies. Other threads may read the results once this value has been dropped.
pub(crate) struct Streaming(());

impl Streaming {
    pub(crate) fn new() -> Streaming {
        Streaming(())
    }

    /// Copies `from` to `to`, which must have the same length, bypassing the cache if the processor can.
    #[inline]
    pub(crate) fn copy<T: Pod>(&self, to: &mut [T], from: &[T]) {
        assert_eq!(to.len(), from.len());
        // SAFETY: both have `size_of_val(from)` bytes, for which any bits are valid.
        unsafe { copy(to.as_mut_ptr().cast(), from.as_ptr().cast(), size_of_val(from)) };
    }

    /// Copies like [`copy`](Streaming::copy), to uninitialised memory.
    #[inline]
    pub(crate) fn copy_new<T: Copy>(&self, to: &mut [MaybeUninit<T>], from: &[T]) {
        assert_eq!(to.len(), from.len());
        // SAFETY: both have `size_of_val(from)` bytes, and those of `to` may be uninitialised before and after.
        unsafe { copy(to.as_mut_ptr().cast(), from.as_ptr().cast(), size_of_val(from)) };
    }

    /// Stores `from` in `to`, bypassing the cache if the processor can and `to` is aligned to 16 bytes.
    #[inline(always)]
    pub(crate) fn line<T: Pod>(&self, to: &mut [T; LINE], from: [T; LINE]) {
        #[cfg(target_arch = "x86_64")]
        if to.as_ptr().align_offset(16) == 0 {
            match size_of::<T>() {
                4 => return stream_vectors::<T, 4>(to, from),
                8 => return stream_vectors::<T, 8>(to, from),
                _ => {}
            }
        }
        *to = from;
    }
}

/// Stores `from` as N vectors; `to` must be aligned to a vector, and both must have the size of N vectors.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn stream_vectors<T: Pod, const N: usize>(to: &mut [T; LINE], from: [T; LINE]) {
    use std::arch::x86_64::{__m128, _mm_stream_ps};
    assert!(size_of::<[T; LINE]>() == size_of::<[__m128; N]>() && to.as_ptr().align_offset(16) == 0);
    // SAFETY: the sizes are equal, and every bit pattern is a vector.
    let from: [__m128; N] = unsafe { std::mem::transmute_copy(&from) };
    for (i, part) in from.into_iter().enumerate() {
        // SAFETY: `to` consists of N vectors, aligned to 16 bytes, of which this is the i-th. SSE is part of x86-64. The fence
        // that must come before other threads read is in Streaming's drop.
        unsafe { _mm_stream_ps(to.as_mut_ptr().cast::<f32>().add(4 * i), part) };
    }
}

/// Copies bytes, bypassing the cache for whole lines if the processor can.
///
/// # Safety
/// As [`std::ptr::copy_nonoverlapping`] of `bytes` bytes.
#[inline]
unsafe fn copy(to: *mut u8, from: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    use std::ptr::copy_nonoverlapping;
    const LINE: usize = 64;
    let head = if cfg!(target_arch = "x86_64") { to.align_offset(LINE).min(bytes) } else { bytes };
    let tail = (bytes - head) % LINE;
    // SAFETY: the caller's promise, for the bytes before the first line, for whole lines, which begin at multiples of 64, and
    // for the bytes after the lines. SSE2 is part of x86-64. The fence that must come before other threads read is in
    // Streaming's drop.
    unsafe {
        copy_nonoverlapping(from, to, head);
        #[cfg(target_arch = "x86_64")]
        for at in (head..bytes - tail).step_by(LINE) {
            let (to, from) = (to.add(at).cast::<__m128i>(), from.add(at).cast::<__m128i>());
            for i in 0..LINE / 16 {
                _mm_stream_si128(to.add(i), _mm_loadu_si128(from.add(i)));
            }
        }
        copy_nonoverlapping(from.add(bytes - tail), to.add(bytes - tail), tail);
    }
}

impl Drop for Streaming {
    fn drop(&mut self) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: SSE is part of x86-64; a fence accesses no memory.
        unsafe {
            std::arch::x86_64::_mm_sfence();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streamed_lines_at_any_alignment() {
        let streaming = Streaming::new();
        for start in 0..20 {
            let mut to = [0f32; 40];
            streaming.line((&mut to[start..start + LINE]).try_into().unwrap(), std::array::from_fn(|i| i as f32 + 1.0));
            assert!(
                (0..40)
                    .all(|i| to[i] == if (start..start + LINE).contains(&i) { (i - start) as f32 + 1.0 } else { 0.0 })
            );
            let mut to = [0i64; 40];
            streaming.line((&mut to[start..start + LINE]).try_into().unwrap(), std::array::from_fn(|i| i as i64 + 1));
            assert!(
                (0..40).all(|i| to[i] == if (start..start + LINE).contains(&i) { (i - start) as i64 + 1 } else { 0 })
            );
        }
    }

    #[test]
    fn streamed_copies_of_any_length_and_alignment() {
        let from: Vec<u8> = (0..400).map(|i| i as u8).collect();
        for start in 0..70 {
            for len in [0, 1, 15, 16, 63, 64, 65, 127, 128, 129, 300] {
                let mut to = vec![0u8; 400];
                Streaming::new().copy(&mut to[start..start + len], &from[7..7 + len]);
                assert_eq!(to[start..start + len], from[7..7 + len]);
                assert!(to[..start].iter().chain(&to[start + len..]).all(|&b| b == 0));
                let mut new = [const { MaybeUninit::new(0u8) }; 400];
                Streaming::new().copy_new(&mut new[start..start + len], &from[7..7 + len]);
                // SAFETY: initialised with zeros.
                assert!(new.iter().zip(&to).all(|(new, &to)| unsafe { new.assume_init() } == to));
            }
        }
    }
}

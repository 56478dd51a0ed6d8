//! Stores that go past the cache. A result larger than the cache will not be read from it again: written in the ordinary
//! way it costs one read of every line before the line is overwritten, a third to a half of all traffic.

use std::mem::MaybeUninit;

use bytemuck::Pod;

/// From so many bytes on, results are streamed: beyond the last-level cache of most processors.
pub(crate) const LARGE: usize = 24 << 20;

/// Whether a result of so many bytes had best be streamed where it and its operands are `all` bytes: together they do not fit
/// the last-level cache either.
pub(crate) fn is_worth_it(result: usize, all: usize) -> bool {
    result >= LARGE || (result >= LARGE / 2 && all >= 2 * LARGE)
}

/// Elements that [`Streaming::line`] stores: a line of the cache of f32, two of f64.
pub(crate) const LINE: usize = 16;

/// Streams what is copied through it; other threads may look at it once this is dropped.
pub(crate) struct Streaming(());

impl Streaming {
    pub(crate) fn new() -> Streaming {
        Streaming(())
    }

    /// `to.copy_from_slice(from)`, past the cache where the processor can.
    #[inline]
    pub(crate) fn copy<T: Pod>(&self, to: &mut [T], from: &[T]) {
        assert_eq!(to.len(), from.len());
        // SAFETY: both have so many bytes, of which any will do.
        unsafe { copy(to.as_mut_ptr().cast(), from.as_ptr().cast(), size_of_val(from)) };
    }

    /// As [`copy`](Streaming::copy), to memory in which nothing is yet.
    #[inline]
    pub(crate) fn copy_new<T: Copy>(&self, to: &mut [MaybeUninit<T>], from: &[T]) {
        assert_eq!(to.len(), from.len());
        // SAFETY: both have so many bytes, and those of `to` may be uninitialised before and after.
        unsafe { copy(to.as_mut_ptr().cast(), from.as_ptr().cast(), size_of_val(from)) };
    }

    /// `*to = from`, past the cache where the processor can and `to` begins where a vector does.
    #[inline(always)]
    pub(crate) fn line<T: Pod>(&self, to: &mut [T; LINE], from: [T; LINE]) {
        #[cfg(target_arch = "x86_64")]
        if to.as_ptr().align_offset(16) == 0 {
            match size_of::<T>() {
                4 => return parts::<T, 4>(to, from),
                8 => return parts::<T, 8>(to, from),
                _ => {}
            }
        }
        *to = from;
    }
}

/// Stores `from` as N vectors; `to` has to be aligned to them, and both to have their size.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn parts<T: Pod, const N: usize>(to: &mut [T; LINE], from: [T; LINE]) {
    use std::arch::x86_64::{__m128, _mm_stream_ps};
    assert!(size_of::<[T; LINE]>() == size_of::<[__m128; N]>() && to.as_ptr().align_offset(16) == 0);
    // SAFETY: of one size, and every bit pattern is a vector.
    let from: [__m128; N] = unsafe { std::mem::transmute_copy(&from) };
    for (i, part) in from.into_iter().enumerate() {
        // SAFETY: `to` is N vectors, aligned as they are, of which this is the i-th. SSE is part of x86-64. The fence
        // that must come before others look is in Streaming's drop.
        unsafe { _mm_stream_ps(to.as_mut_ptr().cast::<f32>().add(4 * i), part) };
    }
}

/// # Safety
/// As [`std::ptr::copy_nonoverlapping`] of so many bytes.
#[cfg(target_arch = "x86_64")]
#[inline]
unsafe fn copy(to: *mut u8, from: *const u8, bytes: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    use std::ptr::copy_nonoverlapping;
    const LINE: usize = 64;
    let head = to.align_offset(LINE).min(bytes);
    let tail = (bytes - head) % LINE;
    // SAFETY: the caller's, of the bytes before the first line, of whole lines, which begin at multiples of 64, and of those
    // after them. SSE2 is part of x86-64. The fence that must come before others look is in Streaming's drop.
    unsafe {
        copy_nonoverlapping(from, to, head);
        for at in (head..bytes - tail).step_by(LINE) {
            let (to, from) = (to.add(at).cast::<__m128i>(), from.add(at).cast::<__m128i>());
            for i in 0..LINE / 16 {
                _mm_stream_si128(to.add(i), _mm_loadu_si128(from.add(i)));
            }
        }
        copy_nonoverlapping(from.add(bytes - tail), to.add(bytes - tail), tail);
    }
}

/// # Safety
/// As [`std::ptr::copy_nonoverlapping`] of so many bytes.
#[cfg(not(target_arch = "x86_64"))]
#[inline]
unsafe fn copy(to: *mut u8, from: *const u8, bytes: usize) {
    // SAFETY: the caller's.
    unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
}

impl Drop for Streaming {
    fn drop(&mut self) {
        #[cfg(target_arch = "x86_64")]
        // SAFETY: SSE is part of x86-64; a fence touches nothing.
        unsafe {
            std::arch::x86_64::_mm_sfence();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_every_size_at_any_place() {
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
    fn any_length_at_any_place() {
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

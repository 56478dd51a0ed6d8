//! Stores that go past the cache. A result larger than the cache will not be read from it again: written in the ordinary
//! way it costs one read of every line before the line is overwritten, a third to a half of all traffic.

use bytemuck::Pod;

/// From so many bytes on, results are streamed: beyond the last-level cache of most processors.
pub(crate) const LARGE: usize = 24 << 20;

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
        copy(bytemuck::cast_slice_mut(to), bytemuck::cast_slice(from));
    }
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn copy(to: &mut [u8], from: &[u8]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    const LINE: usize = 64;
    let head = to.as_ptr().align_offset(LINE).min(to.len());
    let ((to_head, to), (from_head, from)) = (to.split_at_mut(head), from.split_at(head));
    to_head.copy_from_slice(from_head);
    let ((to, to_tail), (from, from_tail)) = (to.as_chunks_mut::<LINE>(), from.as_chunks::<LINE>());
    for (to, from) in to.iter_mut().zip(from) {
        let (to, from) = (to.as_mut_ptr().cast::<__m128i>(), from.as_ptr().cast::<__m128i>());
        for i in 0..4 {
            // SAFETY: both are 64 bytes, of which these are the i-th 16; `to` is aligned to 64. SSE2 is part of x86-64.
            // The fence that must come before others look is in Streaming's drop.
            unsafe { _mm_stream_si128(to.add(i), _mm_loadu_si128(from.add(i))) };
        }
    }
    to_tail.copy_from_slice(from_tail);
}

#[cfg(not(target_arch = "x86_64"))]
#[inline]
fn copy(to: &mut [u8], from: &[u8]) {
    to.copy_from_slice(from);
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
    fn any_length_at_any_place() {
        let from: Vec<u8> = (0..400).map(|i| i as u8).collect();
        for start in 0..70 {
            for len in [0, 1, 15, 16, 63, 64, 65, 127, 128, 129, 300] {
                let mut to = vec![0u8; 400];
                Streaming::new().copy(&mut to[start..start + len], &from[7..7 + len]);
                assert_eq!(to[start..start + len], from[7..7 + len]);
                assert!(to[..start].iter().chain(&to[start + len..]).all(|&b| b == 0));
            }
        }
    }
}

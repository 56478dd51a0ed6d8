//! Buffers that each thread keeps between operations, so that their pages stay mapped.

use std::cell::Cell;

use crate::device::cpu::huge_pages::advise_huge;

/// The number of f32 in a huge page.
pub(crate) const HUGE_PAGE_ELEMENTS: usize = 1 << 19;
/// The maximum number of elements that a thread keeps for a convolution.
pub(crate) const MAX_KEPT_ELEMENTS: usize = 1 << 24;

/// The contents for which each thread keeps a buffer.
#[derive(Clone, Copy)]
pub(crate) enum Content {
    /// The packed panels of a matrix product.
    Panels,
    /// A piece of a product that is passed to a callback.
    Piece,
    /// The partial sums of a convolution's weight gradient.
    Sums,
    /// The scratch memory of a job of a convolution or an attention.
    Scratch,
}

/// Calls `f` with this thread's buffer for `content`, and keeps the buffer unless it has more than `most` elements. A nested call for the
/// same content gets a new buffer.
pub(crate) fn with_buffer<R>(content: Content, most: usize, f: impl FnOnce(&mut Vec<f32>) -> R) -> R {
    thread_local!(static KEPT: [Cell<Vec<f32>>; 4] = const { [const { Cell::new(Vec::new()) }; 4] });
    KEPT.with(|kept| {
        let kept = &kept[content as usize];
        let mut buffer = kept.take();
        let made = f(&mut buffer);
        if buffer.len() <= most {
            kept.set(buffer);
        }
        made
    })
}

/// Returns the part of the buffer that begins at a multiple of `line` bytes. Replaces the buffer if that part has fewer than `room` elements.
pub(crate) fn aligned_room(buffer: &mut Vec<f32>, room: usize, line: usize) -> &mut [f32] {
    if buffer.len() < room + buffer.as_ptr().align_offset(line) {
        *buffer = Vec::with_capacity(room + line / size_of::<f32>());
        advise_huge(buffer.spare_capacity_mut());
        buffer.resize(room + buffer.as_ptr().align_offset(line), 0.0); // touches no page beyond the part
    }
    let first = buffer.as_ptr().align_offset(line);
    &mut buffer[first..]
}

/// Calls `f` with scratch slices of the lengths `rooms` for a job, each aligned to a cache line.
pub(crate) fn with_scratch<const N: usize>(rooms: [usize; N], f: impl FnOnce([&mut [f32]; N])) {
    const LINE: usize = 16;
    let need: usize = rooms.iter().map(|room| room.next_multiple_of(LINE)).sum();
    with_buffer(Content::Scratch, MAX_KEPT_ELEMENTS, |buffer| {
        let page = HUGE_PAGE_ELEMENTS * size_of::<f32>();
        let mut rest = aligned_room(buffer, need.next_multiple_of(HUGE_PAGE_ELEMENTS), page);
        f(rooms.map(|room| {
            let (part, behind) = std::mem::take(&mut rest).split_at_mut(room.next_multiple_of(LINE));
            rest = behind;
            &mut part[..room]
        }));
    });
}

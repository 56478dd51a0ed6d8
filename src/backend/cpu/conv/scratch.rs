//! Scratch memory for the jobs of a convolution.

use std::cell::Cell;

use crate::device::cpu::huge_pages::advise_huge;

thread_local! {
    /// The thread's scratch memory, kept between jobs so that its pages stay mapped, unless it has more than `MAX_KEPT_ELEMENTS`
    /// elements.
    static SCRATCH: Cell<(Vec<f32>, Vec<isize>)> = const { Cell::new((Vec::new(), Vec::new())) };
}

/// The maximum number of elements that a thread keeps.
pub(crate) const MAX_KEPT_ELEMENTS: usize = 1 << 24;

/// Calls `f` with scratch slices of the lengths `rooms`, each aligned to a cache line.
pub(crate) fn with_scratch<const N: usize>(rooms: [usize; N], f: impl FnOnce([&mut [f32]; N], &mut Vec<isize>)) {
    const LINE: usize = 16;
    /// The number of f32 elements in a huge page.
    const HUGE: usize = 1 << 19;
    SCRATCH.with(|kept| {
        let (mut buffer, mut table) = kept.take();
        let need: usize = rooms.iter().map(|room| room.next_multiple_of(LINE)).sum();
        let aligned = |buffer: &[f32]| buffer.as_ptr().align_offset(HUGE * size_of::<f32>());
        if buffer.len() < need.saturating_add(aligned(&buffer)) {
            buffer = Vec::with_capacity(need.next_multiple_of(HUGE) + HUGE);
            advise_huge(buffer.spare_capacity_mut());
            buffer.resize(need.next_multiple_of(HUGE) + aligned(&buffer), 0.0);
        }
        let first = aligned(&buffer);
        let mut rest = &mut buffer[first..];
        let parts = rooms.map(|room| {
            let (part, behind) = std::mem::take(&mut rest).split_at_mut(room.next_multiple_of(LINE));
            rest = behind;
            &mut part[..room]
        });
        f(parts, &mut table);
        if buffer.len() <= MAX_KEPT_ELEMENTS {
            kept.set((buffer, table));
        }
    });
}

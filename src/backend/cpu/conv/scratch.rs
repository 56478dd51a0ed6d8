//! What jobs work in.

use std::cell::Cell;

use crate::device::cpu::huge_pages::advise_huge;

thread_local! {
    /// What a job works in, kept so that its pages stay, unless it is far larger than jobs are meant to need.
    static SCRATCH: Cell<(Vec<f32>, Vec<isize>)> = const { Cell::new((Vec::new(), Vec::new())) };
}

/// Elements that a thread keeps.
pub(crate) const MOST: usize = 1 << 24;

/// Calls `f` with room for as many elements each, which begins where a line does.
pub(crate) fn with_scratch<const N: usize>(rooms: [usize; N], f: impl FnOnce([&mut [f32]; N], &mut Vec<isize>)) {
    const LINE: usize = 16;
    /// Elements of a huge page.
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
        if buffer.len() <= MOST {
            kept.set((buffer, table));
        }
    });
}

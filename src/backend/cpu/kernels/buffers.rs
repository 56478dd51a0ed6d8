//! Buffers that each thread keeps between operations, so that their pages stay mapped.

use std::cell::Cell;

/// The content of a kept buffer.
#[derive(Clone, Copy)]
pub(crate) enum Content {
    /// The panels of a product.
    Panels,
    /// A group of a product that is passed on.
    Piece,
    /// The sums of the parts of a gradient.
    Sums,
}

/// Calls `f` with this thread's buffer, and keeps the buffer unless it has more than `most` elements. Within `f`, the buffer for the same content
/// is a new one.
pub(crate) fn with_buffer<R>(content: Content, most: usize, f: impl FnOnce(&mut Vec<f32>) -> R) -> R {
    thread_local!(static KEPT: [Cell<Vec<f32>>; 3] = const { [const { Cell::new(Vec::new()) }; 3] });
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

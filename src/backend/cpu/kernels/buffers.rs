//! Buffers that each thread keeps between operations, so that their pages stay mapped.

use std::cell::Cell;

/// The contents for which each thread keeps a buffer.
#[derive(Clone, Copy)]
pub(crate) enum Content {
    /// The packed panels of a matrix product.
    Panels,
    /// A piece of a product that is passed to a callback.
    Piece,
    /// The partial sums of a convolution's weight gradient.
    Sums,
}

/// Calls `f` with this thread's buffer for `content`, and keeps the buffer unless it has more than `most` elements. A nested call for the
/// same content gets a new buffer.
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

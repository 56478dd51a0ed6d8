//! One slot an entry of the table, at an address that never changes.

use std::ptr::NonNull;

use super::super::block::Slot;

const CHUNK: usize = 256;

/// Slots by the number of their entry.
#[derive(Default)]
pub(super) struct Slots {
    chunks: Vec<NonNull<[Slot; CHUNK]>>,
}

// SAFETY: it owns its slots, which are atomics and locks.
unsafe impl Send for Slots {}

impl Slots {
    /// What the block of an entry was last handed out for, in bytes.
    pub(super) fn requested(&self, id: u32) -> usize {
        // SAFETY: slots live as long as `self`.
        self.chunks
            .get(id as usize / CHUNK)
            .map_or(0, |chunk| unsafe { chunk.as_ref() }[id as usize % CHUNK].requested())
    }

    /// The slot of an entry, made if it is not there.
    #[inline]
    pub(super) fn of(&mut self, id: u32) -> NonNull<Slot> {
        let (chunk, at) = (id as usize / CHUNK, id as usize % CHUNK);
        while self.chunks.len() <= chunk {
            let made = Box::new([const { Slot::vacant() }; CHUNK]);
            self.chunks.push(NonNull::from(Box::leak(made)));
        }
        // SAFETY: `at` is inside the chunk.
        unsafe { self.chunks[chunk].cast::<Slot>().add(at) }
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        for chunk in self.chunks.drain(..) {
            // SAFETY: leaked from a box above, and given back once.
            drop(unsafe { Box::from_raw(chunk.as_ptr()) });
        }
    }
}

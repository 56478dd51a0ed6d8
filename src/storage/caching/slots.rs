//! One slot per table entry, at an address that never changes.

use std::ptr::NonNull;

use super::super::block::Slot;

/// Number of slots per allocated chunk.
const SLOTS_PER_CHUNK: usize = 256;

#[derive(Default)]
pub(super) struct Slots {
    chunks: Vec<NonNull<[Slot; SLOTS_PER_CHUNK]>>,
}

// SAFETY: `Slots` owns its slots. They consist of atomics and locks, so threads may share them.
unsafe impl Send for Slots {}

impl Slots {
    /// Returns the requested size, in bytes, of the entry's last allocation.
    pub(super) fn requested(&self, id: u32) -> usize {
        // SAFETY: the slot is in a chunk, which lives as long as `self`.
        self.chunks
            .get(id as usize / SLOTS_PER_CHUNK)
            .map_or(0, |chunk| unsafe { chunk.as_ref() }[id as usize % SLOTS_PER_CHUNK].requested())
    }

    /// Returns the slot of an entry, allocating its chunk if needed.
    #[inline]
    pub(super) fn get_or_create(&mut self, id: u32) -> NonNull<Slot> {
        let (chunk, at) = (id as usize / SLOTS_PER_CHUNK, id as usize % SLOTS_PER_CHUNK);
        while self.chunks.len() <= chunk {
            let made = Box::new([const { Slot::vacant() }; SLOTS_PER_CHUNK]);
            self.chunks.push(NonNull::from(Box::leak(made)));
        }
        // SAFETY: `at` is inside the chunk.
        unsafe { self.chunks[chunk].cast::<Slot>().add(at) }
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        for chunk in self.chunks.drain(..) {
            // SAFETY: the pointer was leaked from a box in `get_or_create`, and is freed once.
            drop(unsafe { Box::from_raw(chunk.as_ptr()) });
        }
    }
}

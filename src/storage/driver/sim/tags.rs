//! Tags of whole blocks.

use super::Sim;
use crate::Result;
use crate::device::StreamId;
use crate::storage::block::Block;

impl Sim {
    /// Enqueues the work that gives a block's bytes this tag.
    ///
    /// # Errors
    /// What a launch reports: the block is not of this device, or the device is lazy, was not made to commit, and is full.
    pub fn write_tag(&self, stream: StreamId, block: &Block, tag: u32) -> Result<()> {
        let place = block.place();
        self.write_tag_at(stream, (place.segment().memory(), place.offset()), block.size(), tag)
    }

    /// Enqueues the work that checks that a block's bytes have this tag.
    ///
    /// # Errors
    /// As [`write_tag`](Sim::write_tag). What the check finds is in [`violations`](Sim::violations).
    pub fn check_tag(&self, stream: StreamId, block: &Block, tag: u32) -> Result<()> {
        let place = block.place();
        self.check_tag_at(stream, (place.segment().memory(), place.offset()), block.size(), tag)
    }
}

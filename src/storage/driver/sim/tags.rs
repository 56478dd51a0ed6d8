//! Tags of whole blocks.

use super::Sim;
use crate::Result;
use crate::device::StreamId;
use crate::storage::block::Block;

impl Sim {
    /// Enqueues work that writes this tag to a block's bytes.
    ///
    /// # Errors
    /// The error of the launch: the block is not of this device, or the device is lazy, the block was not committed,
    /// and the memory is full.
    pub fn write_tag(&self, stream: StreamId, block: &Block, tag: u32) -> Result<()> {
        let place = block.location();
        self.write_tag_at(stream, (place.segment().memory(), place.offset()), block.size(), tag)
    }

    /// Enqueues work that checks that a block's bytes have this tag.
    ///
    /// # Errors
    /// As for [`write_tag`](Sim::write_tag). Wrong tags are reported in [`violations`](Sim::violations).
    pub fn check_tag(&self, stream: StreamId, block: &Block, tag: u32) -> Result<()> {
        let place = block.location();
        self.check_tag_at(stream, (place.segment().memory(), place.offset()), block.size(), tag)
    }
}

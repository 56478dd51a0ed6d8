//! Tags of whole blocks.

use super::Sim;
use crate::Result;
use crate::device::StreamId;
use crate::storage::block::Block;

impl Sim {
    /// Enqueues work that writes this tag to a block's bytes.
    ///
    /// # Errors
    /// Errors of the launch: the block is not of this device, or a lazy device is too full to commit the block's memory now.
    pub fn write_tag(&self, stream: StreamId, block: &Block, tag: u32) -> Result<()> {
        let location = block.location();
        self.write_tag_at(stream, (location.segment().memory(), location.offset()), block.size(), tag)
    }

    /// Enqueues work that checks that a block's bytes have this tag.
    ///
    /// # Errors
    /// As for [`write_tag`](Sim::write_tag). Wrong tags are reported in [`violations`](Sim::violations).
    pub fn check_tag(&self, stream: StreamId, block: &Block, tag: u32) -> Result<()> {
        let location = block.location();
        self.check_tag_at(stream, (location.segment().memory(), location.offset()), block.size(), tag)
    }
}

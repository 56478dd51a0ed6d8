//! The ring of the latest records, and a second ring of the latest changes of memory.

use std::collections::VecDeque;
use std::sync::Arc;

use super::{Operation, Record};
use crate::Device;

/// A change in a device's memory use.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MemoryRecord {
    pub time: u64,
    pub device: Device,
    pub change: MemoryChange,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum MemoryChange {
    /// The growth of the allocated bytes, which may be negative.
    Allocated(i64),
    /// The number of reserved bytes after the change.
    Reserved(u64),
}

#[derive(Default)]
pub(crate) struct Ring {
    pub(crate) records: VecDeque<Record>,
    pub(crate) memory: VecDeque<MemoryRecord>,
    pub(super) capacity: usize,
    /// The number of older records that were dropped because the ring was full.
    pub(crate) dropped: u64,
    /// The start of the recording, in nanoseconds of the host's clock: records that began earlier are discarded.
    pub(super) began: u64,
    /// Numbers and names of the threads that recorded.
    pub(crate) threads: Vec<(u32, String)>,
    pub(crate) devices: Vec<MemoryBefore>,
    /// Operations by hash, which records of repeated steps share, because most of the cost of recording is touching new pages.
    pub(super) operations: Vec<Option<Arc<Operation>>>,
}

/// A device's memory use before the first change that the ring still has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MemoryBefore {
    pub device: Device,
    pub allocated: u64,
    pub reserved: u64,
    /// The number of segment changes when the allocator was last asked for the reserved bytes.
    pub(super) changes: u32,
}

const SHARED_OPERATIONS: usize = 1024;

impl Ring {
    /// Adds a record, unless it began before the recording.
    pub(super) fn push(&mut self, record: Record) {
        if record.host[0] < self.began {
            return;
        }
        if self.records.len() == self.capacity {
            self.records.pop_front();
            self.dropped += 1;
        }
        self.records.push_back(record);
    }

    /// Adds a change of memory; if the ring is full, the oldest change moves into [`MemoryBefore`].
    pub(super) fn push_memory(&mut self, record: MemoryRecord) {
        if self.memory.len() == self.capacity {
            self.forget_oldest_memory();
        }
        self.memory.push_back(record);
    }

    /// Removes the oldest change of memory and adds it to the device's [`MemoryBefore`].
    pub(super) fn forget_oldest_memory(&mut self) {
        if let Some(oldest) = self.memory.pop_front()
            && let Some(before) = self.devices.iter_mut().find(|before| before.device == oldest.device)
        {
            match oldest.change {
                MemoryChange::Allocated(bytes) => before.allocated = before.allocated.saturating_add_signed(bytes),
                MemoryChange::Reserved(bytes) => before.reserved = bytes,
            }
        }
    }

    /// Returns the growth of a device's allocated bytes over the changes that the ring still has.
    pub(super) fn growth(&self, device: Device) -> i64 {
        let changes = self.memory.iter().filter(|record| record.device == device).map(|record| record.change);
        changes.map(|change| if let MemoryChange::Allocated(bytes) = change { bytes } else { 0 }).sum()
    }

    /// Returns an equal operation that was shared earlier, unless its hash slot was overwritten; otherwise shares this operation.
    pub(super) fn share(&mut self, operation: Operation) -> Arc<Operation> {
        if self.operations.is_empty() {
            self.operations.resize(SHARED_OPERATIONS, None);
        }
        let slot = operation.hash() as usize % SHARED_OPERATIONS;
        match &mut self.operations[slot] {
            Some(known) if **known == operation => Arc::clone(known),
            place => Arc::clone(place.insert(Arc::new(operation))),
        }
    }
}

impl Operation {
    /// Returns a hash of the name and the shapes, which differ most between operations.
    fn hash(&self) -> u64 {
        let dims = self.shapes.iter().flatten().map(|&n| n as u64);
        let hash = dims.fold(self.name.as_ptr().addr() as u64, |hash, n| {
            (hash.rotate_left(5) ^ n).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        });
        hash >> 32
    }
}

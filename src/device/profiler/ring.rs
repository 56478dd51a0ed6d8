//! The latest of what was recorded, and as many changes of memory.

use std::collections::VecDeque;
use std::sync::Arc;

use super::{Operation, Record};
use crate::Device;

/// A change of how much memory of a device is in use.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MemoryRecord {
    pub time: u64,
    pub device: Device,
    pub change: MemoryChange,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum MemoryChange {
    /// So many bytes more are allocated, or fewer.
    Allocated(i64),
    /// So many bytes are reserved from now on.
    Reserved(u64),
}

/// The latest records, and as many about memory.
#[derive(Default)]
pub(super) struct Ring {
    pub(super) records: VecDeque<Record>,
    pub(super) memory: VecDeque<MemoryRecord>,
    pub(super) capacity: usize,
    pub(super) dropped: u64,
    /// What began earlier is not kept.
    pub(super) began: u64,
    pub(super) threads: Vec<(u32, String)>,
    pub(super) devices: Vec<MemoryBefore>,
    /// Operations by a hash, so that steps that repeat share theirs: pages of memory never touched before are most of what
    /// recording costs.
    pub(super) operations: Vec<Option<Arc<Operation>>>,
}

/// A device's memory before the first record about it that is kept.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MemoryBefore {
    pub device: Device,
    pub allocated: u64,
    pub reserved: u64,
    /// How often drivers had made or released segments when the allocator was last asked how much is reserved.
    pub(super) changes: u32,
}

/// How many operations a ring shares.
const SHARED_OPERATIONS: usize = 1024;

impl Ring {
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

    pub(super) fn push_memory(&mut self, record: MemoryRecord) {
        if self.memory.len() == self.capacity {
            self.forget_oldest_memory();
        }
        self.memory.push_back(record);
    }

    /// Makes the oldest change part of what was before.
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

    /// By how much the records say that a device's allocated bytes have grown.
    pub(super) fn growth(&self, device: Device) -> i64 {
        let changes = self.memory.iter().filter(|record| record.device == device).map(|record| record.change);
        changes.map(|change| if let MemoryChange::Allocated(bytes) = change { bytes } else { 0 }).sum()
    }

    /// The operation, which is the same allocation as an equal one before it, as long as no other has taken its place.
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
    /// Of what differs most: the name and the shapes.
    fn hash(&self) -> u64 {
        let dims = self.shapes.iter().flatten().map(|&n| n as u64);
        let hash = dims.fold(self.name.as_ptr().addr() as u64, |hash, n| {
            (hash.rotate_left(5) ^ n).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        });
        hash >> 32
    }
}

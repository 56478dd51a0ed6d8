//! Segments: pieces of memory that drivers made, at addresses of our own.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::driver::{Memory, MemoryKind};
use crate::device::lock;

/// One piece of device memory that a driver made, and that blocks are parts of.
#[derive(Debug)]
pub struct Segment {
    id: u64,
    address: u64,
    bytes: usize,
    memory: Memory,
    reserved: bool,
}

/// Segments begin at multiples of this in the space of [`Segment::address`].
const ADDRESS_STEP: u64 = 2 << 20;
static NEXT_ADDRESS: AtomicU64 = AtomicU64::new(1 << 32);
/// Addresses of reserved segments that are gone, with their spans: these are too long to be given once only.
static VACANT_SPANS: Mutex<Vec<(u64, u64)>> = Mutex::new(Vec::new());

fn next_id() -> u64 {
    static NEXT_ID: AtomicU64 = AtomicU64::new(0);
    NEXT_ID.fetch_add(1, Relaxed)
}

fn reserved_span(bytes: usize) -> u64 {
    (bytes as u64).next_multiple_of(ADDRESS_STEP) + 2 * ADDRESS_STEP
}

impl Segment {
    /// Takes over `memory`, which was made with `bytes` bytes.
    pub fn new(memory: Memory, bytes: usize) -> Segment {
        let span = (bytes as u64).next_multiple_of(ADDRESS_STEP).max(ADDRESS_STEP);
        let (id, address) = (next_id(), NEXT_ADDRESS.fetch_add(span, Relaxed));
        Segment { id, address, bytes, memory, reserved: false }
    }

    /// Takes over `memory` in which `bytes` bytes are reserved and none is committed: a segment that grows in place.
    pub(crate) fn reserved(memory: Memory, bytes: usize) -> Segment {
        let span = reserved_span(bytes);
        let mut vacant = lock(&VACANT_SPANS);
        let at = vacant.iter().position(|&(vacant, _)| vacant == span).map(|at| vacant.swap_remove(at).1);
        // A step on either side, so that viewers never take its pages and a neighbour's for one run.
        let address = at.unwrap_or_else(|| NEXT_ADDRESS.fetch_add(span, Relaxed) + ADDRESS_STEP);
        Segment { id: next_id(), address, bytes, memory, reserved: true }
    }

    /// Bytes of a device that are kept on the host.
    pub(super) fn spilled(bytes: Box<[u8]>) -> Segment {
        let size = bytes.len();
        Segment::new(Memory(MemoryKind::Spilled(bytes)), size)
    }

    /// Whether it grows in place: its bytes are reserved, and committed as far as blocks need them.
    pub fn is_reserved(&self) -> bool {
        self.reserved
    }

    /// Its number: unique in the process, growing with age.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Where snapshots show it: an address of our own making, as OpenCL buffers have none. Segments never overlap.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The driver's memory.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        if self.reserved {
            let span = reserved_span(self.bytes);
            lock(&VACANT_SPANS).push((span, self.address));
        }
    }
}

//! Segments: memory created by drivers, at addresses made up by this module.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::driver::{Memory, MemoryKind};
use crate::device::lock;

/// A range of device memory that a driver created, and that an allocator divides into blocks.
#[derive(Debug)]
pub struct Segment {
    id: u64,
    address: u64,
    bytes: usize,
    memory: Memory,
    reserved: bool,
}

/// Alignment of segments' addresses (see [`Segment::address`]), in bytes.
const ADDRESS_STEP: u64 = 2 << 20;
static NEXT_ADDRESS: AtomicU64 = AtomicU64::new(1 << 32);
/// The spans (in bytes) and the addresses of reserved segments that were dropped. New segments reuse them, because the spans are so
/// long that the addresses would run out.
static VACANT_SPANS: Mutex<Vec<(u64, u64)>> = Mutex::new(Vec::new());

fn next_id() -> u64 {
    static NEXT_ID: AtomicU64 = AtomicU64::new(0);
    NEXT_ID.fetch_add(1, Relaxed)
}

/// Returns the number of bytes of address space for a reserved segment: an address step before and after the segment.
fn reserved_span(bytes: usize) -> u64 {
    (bytes as u64).next_multiple_of(ADDRESS_STEP) + 2 * ADDRESS_STEP
}

impl Segment {
    /// Takes over `memory`, which was created with `bytes` bytes.
    pub fn new(memory: Memory, bytes: usize) -> Segment {
        let span = (bytes as u64).next_multiple_of(ADDRESS_STEP).max(ADDRESS_STEP);
        let (id, address) = (next_id(), NEXT_ADDRESS.fetch_add(span, Relaxed));
        Segment { id, address, bytes, memory, reserved: false }
    }

    /// Takes over `memory`, in which `bytes` bytes are reserved and none is committed: a segment that grows in place.
    pub(crate) fn reserved(memory: Memory, bytes: usize) -> Segment {
        let span = reserved_span(bytes);
        let mut vacant = lock(&VACANT_SPANS);
        let at = vacant.iter().position(|&(vacant, _)| vacant == span).map(|at| vacant.swap_remove(at).1);
        // An address step on either side keeps viewers from merging the segment's pages with the pages of its neighbours.
        let address = at.unwrap_or_else(|| NEXT_ADDRESS.fetch_add(span, Relaxed) + ADDRESS_STEP);
        Segment { id: next_id(), address, bytes, memory, reserved: true }
    }

    /// Makes a segment of a device's bytes that are spilled to the host.
    pub(super) fn spilled(bytes: Box<[u8]>) -> Segment {
        let size = bytes.len();
        Segment::new(Memory(MemoryKind::Spilled(bytes)), size)
    }

    /// True if the segment grows in place: its bytes are reserved, and committed as far as blocks need them.
    pub fn is_reserved(&self) -> bool {
        self.reserved
    }

    /// Returns the segment's number, unique in the process. Later segments have larger numbers.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Returns the address for snapshots. The address is artificial, because OpenCL buffers have no addresses. Segments never overlap.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the driver's memory.
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

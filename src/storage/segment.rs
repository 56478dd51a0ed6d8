//! Segments: memory created by drivers, at addresses made up by this module.

use std::sync::Mutex;

use super::driver::Memory;
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
/// The numbers and addresses of new segments.
static NUMBERING: Mutex<Numbering> = Mutex::new(Numbering { id: 0, address: 1 << 32, vacant: Vec::new() });

struct Numbering {
    id: u64,
    address: u64,
    /// The spans of reserved segments that were dropped, as sizes in bytes and addresses. New segments reuse them, because the spans are
    /// so long that the addresses would run out.
    vacant: Vec<(u64, u64)>,
}

impl Numbering {
    /// Returns the number of a new segment, and the address of `span` unused bytes, which a dropped segment may have had if `reuse`.
    fn next(&mut self, span: u64, reuse: bool) -> (u64, u64) {
        self.id += 1;
        if let Some(at) = self.vacant.iter().position(|&(vacant, _)| reuse && vacant == span) {
            return (self.id - 1, self.vacant.swap_remove(at).1);
        }
        self.address += span;
        (self.id - 1, self.address - span)
    }
}

/// Returns the number of bytes of address space for a reserved segment: an address step before and after the segment.
fn reserved_span(bytes: usize) -> u64 {
    (bytes as u64).next_multiple_of(ADDRESS_STEP) + 2 * ADDRESS_STEP
}

impl Segment {
    /// Takes over `memory`, which was created with `bytes` bytes.
    pub fn new(memory: Memory, bytes: usize) -> Segment {
        let span = (bytes as u64).next_multiple_of(ADDRESS_STEP).max(ADDRESS_STEP);
        let (id, address) = lock(&NUMBERING).next(span, false);
        Segment { id, address, bytes, memory, reserved: false }
    }

    /// Takes over `memory`, in which `bytes` bytes are reserved and none is committed: a segment that grows in place.
    pub(crate) fn reserved(memory: Memory, bytes: usize) -> Segment {
        let span = reserved_span(bytes);
        let (id, start) = lock(&NUMBERING).next(span, true);
        // An address step on either side keeps viewers from merging the segment's pages with the pages of its neighbours.
        Segment { id, address: start + ADDRESS_STEP, bytes, memory, reserved: true }
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
            lock(&NUMBERING).vacant.push((reserved_span(self.bytes), self.address - ADDRESS_STEP));
        }
    }
}

//! Memory mapped from the kernel: segments of at least a huge page, and address ranges that are reserved first and get memory later.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::RwLock;

use libc::{MADV_DONTNEED, MADV_HUGEPAGE, MAP_ANONYMOUS, MAP_NORESERVE, MAP_PRIVATE, PROT_NONE, PROT_READ, PROT_WRITE};

pub(super) use crate::device::cpu::huge_pages::{HUGE_PAGE_BYTES, page_bytes};
use crate::device::{read, write};

/// A range of the process's addresses. Memory is committed for parts of the range, and is zero until it is written.
#[derive(Debug)]
pub(super) struct Mapping {
    start: NonNull<u8>,
    /// The size in bytes, a multiple of the page size.
    bytes: usize,
    /// Whether to prefer memory of the requesting thread's NUMA node.
    numa_local: bool,
    /// The ranges of offsets whose memory is committed, and may be accessed.
    committed: RwLock<Ranges>,
}

impl Mapping {
    /// Maps `bytes` bytes of committed memory.
    pub(super) fn committed(bytes: usize, numa_local: bool) -> Option<Mapping> {
        let mapping = Mapping::map(bytes, PROT_READ | PROT_WRITE, 0, numa_local)?;
        mapping.advise(0, mapping.bytes);
        write(&mapping.committed).insert(0, mapping.bytes);
        Some(mapping)
    }

    /// Reserves addresses. The kernel neither allocates memory for them nor guarantees that it can.
    pub(super) fn reserved(bytes: usize, numa_local: bool) -> Option<Mapping> {
        Mapping::map(bytes, PROT_NONE, MAP_NORESERVE, numa_local)
    }

    fn map(bytes: usize, access: i32, flags: i32, numa_local: bool) -> Option<Mapping> {
        let bytes = bytes.checked_next_multiple_of(page_bytes())?;
        let flags = MAP_PRIVATE | MAP_ANONYMOUS | flags;
        // SAFETY: the kernel chooses an unused address for the new mapping, so no existing memory changes.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return None;
        }
        Some(Mapping { start: NonNull::new(start.cast())?, bytes, numa_local, committed: RwLock::default() })
    }

    pub(super) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Makes the pages of `from..to` usable. Returns false if the kernel has no memory for them or if the range is not inside the mapping.
    pub(super) fn extend(&self, from: usize, to: usize) -> bool {
        let (from, to) = (from / page_bytes() * page_bytes(), to.next_multiple_of(page_bytes()));
        if from >= to || to > self.bytes {
            return from == to;
        }
        let mut committed = write(&self.committed);
        if !self.protect(from, to, PROT_READ | PROT_WRITE) {
            return false;
        }
        self.advise(from, to);
        committed.insert(from, to);
        true
    }

    /// Releases the memory of the pages that are completely inside `from..to`. The pages are zero when committed again.
    pub(super) fn shrink(&self, from: usize, to: usize) {
        let (from, to) = (from.next_multiple_of(page_bytes()), to.min(self.bytes) / page_bytes() * page_bytes());
        if from >= to {
            return;
        }
        let mut committed = write(&self.committed);
        committed.remove(from, to);
        // SAFETY: the range consists of whole pages inside this mapping, which no code accesses any more.
        unsafe { libc::madvise(self.at(from), to - from, MADV_DONTNEED) };
        self.protect(from, to, PROT_NONE);
    }

    pub(super) fn is_committed(&self, from: usize, to: usize) -> bool {
        read(&self.committed).contains(from, to)
    }

    fn at(&self, offset: usize) -> *mut libc::c_void {
        self.start.as_ptr().wrapping_add(offset).cast()
    }

    fn protect(&self, from: usize, to: usize, access: i32) -> bool {
        // SAFETY: the range consists of whole pages inside this mapping. Pages that become inaccessible are in no block, as the
        // allocator promises.
        unsafe { libc::mprotect(self.at(from), to - from, access) == 0 }
    }

    /// Asks the kernel for huge pages and for memory of the local NUMA node. The kernel may ignore both requests.
    fn advise(&self, from: usize, to: usize) {
        if to - from >= HUGE_PAGE_BYTES {
            // SAFETY: the range consists of whole pages inside this mapping; the advice only affects which pages the kernel allocates.
            unsafe { libc::madvise(self.at(from), to - from, MADV_HUGEPAGE) };
        }
        if self.numa_local {
            self.prefer(current_numa_node(), from, to);
        }
    }

    /// Asks the kernel to take memory of NUMA node `node` for pages that have not been accessed yet. The kernel uses another node's
    /// memory if that node is full.
    fn prefer(&self, node: usize, from: usize, to: usize) -> bool {
        let mut nodes = [0u64; 16]; // one bit per node; the kernel supports up to 1,024 nodes
        let Some(word) = nodes.get_mut(node / 64) else { return false };
        *word = 1 << (node % 64);
        let (mode, bits) = (libc::MPOL_PREFERRED as usize, nodes.len() * 64 + 1); // the kernel reads one bit less than this argument
        // SAFETY: the range consists of whole pages inside this mapping, whose contents do not change. `nodes` has at least `bits` bits.
        unsafe { libc::syscall(libc::SYS_mbind, self.at(from), to - from, mode, nodes.as_ptr(), bits, 0usize) == 0 }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: unmaps exactly this mapping, and no pointer into it outlives its owner.
        unsafe { libc::munmap(self.at(0), self.bytes) };
    }
}

pub(super) fn several_nodes() -> bool {
    std::fs::read_to_string("/sys/devices/system/node/online").is_ok_and(|online| online.contains(['-', ',']))
}

/// Returns the NUMA node of the processor that runs this thread.
fn current_numa_node() -> usize {
    let mut node = 0u32;
    let nothing = std::ptr::null_mut::<u32>();
    // SAFETY: the call writes one u32 to `node`; the other two pointers may be null.
    unsafe { libc::syscall(libc::SYS_getcpu, nothing, &raw mut node, nothing) };
    node as usize
}

/// Ranges of bytes that neither overlap nor touch: a map from each range's start to its end.
#[derive(Debug, Default)]
pub(super) struct Ranges(BTreeMap<usize, usize>);

impl Ranges {
    fn insert(&mut self, mut from: usize, mut to: usize) {
        let touching = self.0.range(..=to).rev().take_while(|(_, end)| **end >= from);
        for (start, end) in touching.map(|(start, end)| (*start, *end)).collect::<Vec<_>>() {
            self.0.remove(&start);
            (from, to) = (from.min(start), to.max(end));
        }
        self.0.insert(from, to);
    }

    fn remove(&mut self, from: usize, to: usize) {
        let cut = self.0.range(..to).rev().take_while(|(_, end)| **end > from);
        for (start, end) in cut.map(|(start, end)| (*start, *end)).collect::<Vec<_>>() {
            self.0.remove(&start);
            let left = [(start, from), (to, end)];
            self.0.extend(left.into_iter().filter(|(start, end)| start < end));
        }
    }

    fn contains(&self, from: usize, to: usize) -> bool {
        from >= to || self.0.range(..=from).next_back().is_some_and(|(_, end)| *end >= to)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes get_mempolicy return the policy of an address.
    const MPOL_F_ADDR: usize = 1 << 1;

    #[test]
    fn ranges_agree_with_a_bitmap() {
        let (mut ranges, mut bits) = (Ranges::default(), [false; 32]);
        let mut state = 1u32;
        let mut random = |below: usize| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 16) as usize % below
        };
        for _ in 0..2000 {
            let from = random(31);
            let to = from + 1 + random(32 - from);
            let add = random(2) == 0;
            if add {
                ranges.insert(from, to)
            } else {
                ranges.remove(from, to)
            }
            bits[from..to].fill(add);
            for a in 0..32 {
                for b in a..=32 {
                    assert_eq!(ranges.contains(a, b), bits[a..b].iter().all(|bit| *bit), "{a}..{b} of {ranges:?}");
                }
            }
            let edges = bits.windows(2).filter(|w| !w[0] && w[1]).count() + usize::from(bits[0]);
            assert_eq!(ranges.0.len(), edges, "merged where they touch");
        }
    }

    #[test]
    fn a_numa_node_can_be_preferred() {
        let mapping = Mapping::committed(4 * page_bytes(), false).unwrap();
        if !mapping.prefer(current_numa_node(), page_bytes(), 3 * page_bytes()) {
            let error = std::io::Error::last_os_error();
            // Containers may forbid the call, and kernels may lack it; then memory comes from any node.
            assert!(matches!(error.raw_os_error(), Some(libc::EPERM | libc::ENOSYS)), "{error}");
            return;
        }
        let policy = |offset| {
            let (mut mode, none) = (-1i32, std::ptr::null_mut::<u64>());
            // SAFETY: the call asks for the policy of an address in this mapping, and writes only to `mode`.
            let done = unsafe {
                libc::syscall(libc::SYS_get_mempolicy, &raw mut mode, none, 0usize, mapping.at(offset), MPOL_F_ADDR)
            };
            assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
            mode
        };
        assert_eq!([0, 1, 2, 3].map(|i| policy(i * page_bytes())), {
            let (there, elsewhere) = (libc::MPOL_PREFERRED, libc::MPOL_DEFAULT);
            [elsewhere, there, there, elsewhere]
        });
        assert!(!mapping.prefer(1024, 0, page_bytes()), "no such node");
    }
}

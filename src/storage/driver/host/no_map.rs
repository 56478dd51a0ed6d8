//! The replacement for `map` on systems other than Linux, and under Miri: all memory comes from the global allocator.

use std::convert::Infallible;
use std::ptr::NonNull;

/// The smallest mapped segment, in bytes: larger than any segment.
pub(super) const HUGE_PAGE_BYTES: usize = usize::MAX;

/// A mapping. No value of this type exists.
#[derive(Debug)]
pub(super) struct Mapping(Infallible);

impl Mapping {
    pub(super) fn committed(_: usize, _: bool) -> Option<Mapping> {
        None
    }

    pub(super) fn reserved(_: usize, _: bool) -> Option<Mapping> {
        None
    }

    pub(super) fn start(&self) -> NonNull<u8> {
        match self.0 {}
    }

    pub(super) fn extend(&self, _: usize, _: usize) -> bool {
        match self.0 {}
    }

    pub(super) fn shrink(&self, _: usize, _: usize) {
        match self.0 {}
    }

    pub(super) fn is_committed(&self, _: usize, _: usize) -> bool {
        match self.0 {}
    }
}

pub(super) fn several_nodes() -> bool {
    false
}

pub(super) fn page_bytes() -> usize {
    0
}

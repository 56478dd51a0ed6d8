//! Where the kernel is not Linux, or there is none (Miri): no memory but the global allocator's.

use std::convert::Infallible;
use std::ptr::NonNull;

pub(super) const HUGE: usize = usize::MAX;

/// There are none.
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

pub(super) fn page() -> usize {
    0
}

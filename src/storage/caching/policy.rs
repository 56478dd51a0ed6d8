//! How large, how small, from where: the numbers behind every decision, and nothing else.

use super::super::config::{Config, SegmentSizes};

const MIB: usize = 1 << 20;
/// Requests up to this size are small.
const SMALL: usize = MIB;
/// PyTorch's segments: shared ones of these sizes, own ones in steps.
const SMALL_SEGMENT: usize = 2 * MIB;
const MIN_OWN_SEGMENT: usize = 10 * MIB;
const SEGMENT_STEP: usize = 2 * MIB;
/// A new segment is at least this part of what is reserved, up to the size of a large segment: a program makes few
/// segments, and never reserves much more than it needs.
const GROWTH: usize = 16;

/// Small and large requests live apart, so that short-lived small ones do not pin large segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::storage) enum Kind {
    Small,
    Large,
}

impl Kind {
    /// The kind of a rounded size.
    #[inline]
    pub(in crate::storage) fn of(size: usize) -> Kind {
        if size <= SMALL { Kind::Small } else { Kind::Large }
    }

    #[inline]
    pub(in crate::storage) fn other(self) -> Kind {
        match self {
            Kind::Small => Kind::Large,
            Kind::Large => Kind::Small,
        }
    }
}

/// The rules of one allocator: its configuration and its device's alignment.
#[derive(Debug, Clone)]
pub(super) struct Rules {
    pub(super) alignment: usize,
    pub(super) config: Config,
    /// Bytes the device has.
    pub(super) capacity: u64,
    /// Whether sizes are rounded to divisions of powers of two.
    divides: bool,
    /// Whether blocks are taken from both ends of a segment: not where one end moves.
    pub(super) both_ends: bool,
    /// The least remainder of a block that is worth keeping, small and large.
    min_remainder: [usize; 2],
}

impl Rules {
    pub(super) fn new(config: Config, alignment: usize, capacity: u64) -> Rules {
        let divides = config.roundup_power2_divisions.iter().any(|&divisions| divisions > 1);
        let both_ends = config.segments == SegmentSizes::Adaptive && !config.expandable_segments;
        let fine = config.segments == SegmentSizes::Adaptive || config.expandable_segments;
        let min_remainder = [alignment, if fine { alignment } else { SMALL + 1 }];
        Rules { alignment, config, capacity, divides, both_ends, min_remainder }
    }

    pub(super) fn is_adaptive(&self) -> bool {
        self.config.segments == SegmentSizes::Adaptive
    }

    /// Bytes a request takes; `None` where that overflows.
    #[inline(always)]
    pub(super) fn round_size(&self, bytes: usize) -> Option<usize> {
        if self.divides {
            return self.divide(bytes);
        }
        let mask = self.alignment - 1; // a power of two: divisions cost more than everything else here
        Some(bytes.max(1).checked_add(mask)? & !mask)
    }

    #[cold]
    #[inline(never)]
    fn divide(&self, bytes: usize) -> Option<usize> {
        self.config.round_size(bytes, self.alignment)
    }

    /// Whether a free block of `block` bytes may serve a request of `size`: blocks too large to be split are kept for
    /// requests that need them.
    #[inline(always)]
    pub(super) fn may_serve(&self, kind: Kind, block: usize, size: usize) -> bool {
        self.config.max_split_size == usize::MAX || self.may_serve_oversize(kind, block, size)
    }

    #[cold]
    fn may_serve_oversize(&self, kind: Kind, block: usize, size: usize) -> bool {
        let max = self.config.max_split_size;
        if block < max || kind == Kind::Small {
            return true;
        }
        // An oversize block serves only oversize requests, and not ones much smaller than itself.
        size >= max && block - size <= self.config.max_non_split_rounding
    }

    /// The least that remains of a block and is worth keeping as a block of its own.
    pub(super) fn min_remainder(&self, kind: Kind) -> usize {
        self.min_remainder[kind as usize]
    }

    /// Whether a larger block may be split for a request of `size`.
    #[inline(always)]
    pub(super) fn may_split_for(&self, size: usize) -> bool {
        size < self.config.max_split_size // what is as large as that is of the large kind
    }

    /// The size of a new segment for a rounded request, when `reserved` bytes are held already.
    pub(super) fn segment_size(&self, size: usize, reserved: u64) -> Option<usize> {
        let large = self.config.large_segment_size;
        if self.is_adaptive() {
            let share = usize::try_from(reserved).unwrap_or(usize::MAX) / GROWTH;
            let cap = if size <= SMALL { SMALL_SEGMENT } else { large };
            return Some(size.max(share.min(cap) & !(self.alignment - 1)));
        }
        if size <= SMALL {
            Some(SMALL_SEGMENT)
        } else if size < MIN_OWN_SEGMENT.max(large / 2) {
            Some(large)
        } else {
            size.checked_next_multiple_of(SEGMENT_STEP)
        }
    }

    /// By how much to extend a segment of `from` bytes that lacks `need`, when `reserved` bytes are held already: in
    /// PyTorch's steps, or as much as a new segment would have.
    pub(super) fn extension(&self, kind: Kind, from: usize, need: usize, reserved: u64) -> usize {
        if self.is_adaptive() {
            return self.segment_size(need, reserved).unwrap_or(need);
        }
        let step = if kind == Kind::Small { SMALL_SEGMENT } else { self.config.large_segment_size };
        (from + need).next_multiple_of(step) - from
    }
}

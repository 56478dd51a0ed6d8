//! Allocation policy: the sizes of requests and segments, and when blocks are split.

use super::super::config::{Config, SegmentSizes};

const MIB: usize = 1 << 20;
/// Requests up to this many bytes are small.
const SMALL_REQUEST_MAX_BYTES: usize = MIB;
/// PyTorch's segment sizes in bytes: fixed sizes for shared segments, multiples of a step for the larger, dedicated ones.
const SMALL_SEGMENT_BYTES: usize = 2 * MIB;
const MIN_DEDICATED_SEGMENT_BYTES: usize = 10 * MIB;
const SEGMENT_STEP_BYTES: usize = 2 * MIB;
/// A new segment has at least 1/16 of the reserved bytes, capped at the size of a small or large segment. A program
/// then creates few segments, and never reserves much more than it needs.
const GROWTH_DIVISOR: usize = 16;

/// The size kind of a request. Small and large requests use separate segments, so that small, short-lived blocks do not pin large segments.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(in crate::storage) enum SizeKind {
    Small,
    Large,
}

impl SizeKind {
    #[inline]
    pub(in crate::storage) fn of_size(size: usize) -> SizeKind {
        if size <= SMALL_REQUEST_MAX_BYTES { SizeKind::Small } else { SizeKind::Large }
    }

    #[inline]
    pub(in crate::storage) fn opposite(self) -> SizeKind {
        match self {
            SizeKind::Small => SizeKind::Large,
            SizeKind::Large => SizeKind::Small,
        }
    }
}

/// The policy of one allocator: its configuration and its device's alignment.
#[derive(Debug, Clone)]
pub(super) struct Rules {
    pub(super) alignment: usize,
    pub(super) config: Config,
    /// Device memory in bytes.
    pub(super) capacity: u64,
    /// True if sizes are rounded to divisions of powers of two.
    has_roundup_divisions: bool,
    /// True if blocks are taken from both ends of a segment. False if segments can grow at one end.
    pub(super) both_ends: bool,
    /// The smallest remainder, in bytes, that is split off as a block of its own, for small and large.
    min_remainder: [usize; 2],
}

impl Rules {
    pub(super) fn new(config: Config, alignment: usize, capacity: u64) -> Rules {
        let has_roundup_divisions = config.roundup_power2_divisions.iter().any(|&divisions| divisions > 1);
        let both_ends = config.segments == SegmentSizes::Adaptive && !config.expandable_segments;
        let keeps_small_remainders = config.segments == SegmentSizes::Adaptive || config.expandable_segments;
        let min_remainder = [alignment, if keeps_small_remainders { alignment } else { SMALL_REQUEST_MAX_BYTES + 1 }];
        Rules { alignment, config, capacity, has_roundup_divisions, both_ends, min_remainder }
    }

    /// True if segment sizes adapt to the requests so far.
    pub(super) fn is_adaptive(&self) -> bool {
        self.config.segments == SegmentSizes::Adaptive
    }

    /// Returns the bytes that a request occupies; `None` on overflow.
    #[inline(always)]
    pub(super) fn round_size(&self, bytes: usize) -> Option<usize> {
        if self.has_roundup_divisions {
            return self.round_to_division(bytes);
        }
        let mask = self.alignment - 1; // masks, because an integer division would dominate the cost
        Some(bytes.max(1).checked_add(mask)? & !mask)
    }

    #[cold]
    #[inline(never)]
    fn round_to_division(&self, bytes: usize) -> Option<usize> {
        self.config.round_size(bytes, self.alignment)
    }

    /// True if a free block of `block` bytes may serve a request of `size` bytes. Blocks too large to be split are kept for requests of similar size.
    #[inline(always)]
    pub(super) fn may_serve(&self, kind: SizeKind, block: usize, size: usize) -> bool {
        self.config.max_split_size == usize::MAX || self.may_serve_oversize(kind, block, size)
    }

    #[cold]
    fn may_serve_oversize(&self, kind: SizeKind, block: usize, size: usize) -> bool {
        let max = self.config.max_split_size;
        if block < max || kind == SizeKind::Small {
            return true;
        }
        // An oversize block serves only oversize requests that are not much smaller.
        size >= max && block - size <= self.config.max_non_split_rounding
    }

    pub(super) fn min_remainder(&self, kind: SizeKind) -> usize {
        self.min_remainder[kind as usize]
    }

    /// True if a larger block may be split for a request of `size` bytes.
    #[inline(always)]
    pub(super) fn may_split_for(&self, size: usize) -> bool {
        size < self.config.max_split_size // sizes above it are always of the large kind
    }

    /// Returns the size in bytes of a new segment for a rounded request, given the bytes already reserved.
    pub(super) fn segment_size(&self, size: usize, reserved: u64) -> Option<usize> {
        let large = self.config.large_segment_size;
        if self.is_adaptive() {
            let share = usize::try_from(reserved).unwrap_or(usize::MAX) / GROWTH_DIVISOR;
            let cap = if size <= SMALL_REQUEST_MAX_BYTES { SMALL_SEGMENT_BYTES } else { large };
            return Some(size.max(share.min(cap) & !(self.alignment - 1)));
        }
        if size <= SMALL_REQUEST_MAX_BYTES {
            Some(SMALL_SEGMENT_BYTES)
        } else if size < MIN_DEDICATED_SEGMENT_BYTES.max(large / 2) {
            Some(large)
        } else {
            size.checked_next_multiple_of(SEGMENT_STEP_BYTES)
        }
    }

    /// Returns how many bytes to add to a segment of `from` bytes that lacks `need` bytes, given the bytes already
    /// reserved. Uses PyTorch's steps, or the size that a new segment would have.
    pub(super) fn extension(&self, kind: SizeKind, from: usize, need: usize, reserved: u64) -> usize {
        if self.is_adaptive() {
            return self.segment_size(need, reserved).unwrap_or(need);
        }
        let step = if kind == SizeKind::Small { SMALL_SEGMENT_BYTES } else { self.config.large_segment_size };
        (from + need).next_multiple_of(step) - from
    }
}

//! Attention by blocks of queries.

/// What a device computes at once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Blocking {
    /// Bytes of all scores, up to which they are made in one go and kept for backward.
    pub(crate) whole: usize,
    /// Bytes of the scores of a block, about.
    pub(crate) block: usize,
    /// Queries of a block, at least: each block's products lay out all of its keys and values anew.
    pub(crate) queries: usize,
}

impl Blocking {
    /// Scores of at most this many bytes are always made in one go.
    pub(crate) const FEW: usize = 4 << 20;

    /// A 32nd of the device's memory, in bytes.
    pub(crate) fn share(memory: usize) -> usize {
        (memory / 32).max(Blocking::FEW)
    }
}

//! Scans: running reductions along a dim.

/// How a scan combines elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Scan {
    Sum,
    Prod,
    Max,
    Min,
    LogSumExp,
}

impl Scan {
    /// True if the scan also returns the index of the maximum or minimum.
    pub(crate) fn is_arg(self) -> bool {
        matches!(self, Scan::Max | Scan::Min)
    }
}

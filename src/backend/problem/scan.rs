//! Scans along a dim.

/// What elements are combined into.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Scan {
    Sum,
    Prod,
    Max,
    Min,
    LogSumExp,
}

impl Scan {
    /// Whether it also gives the index of the element it chose.
    pub(crate) fn is_arg(self) -> bool {
        matches!(self, Scan::Max | Scan::Min)
    }
}

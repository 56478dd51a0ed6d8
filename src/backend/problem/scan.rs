//! Scans: running reductions along a dim.

use crate::Tensor;

/// A scan along dim `d` of x. `indices` receives the index of each running maximum or minimum.
pub(crate) struct RunningReduction<'a> {
    pub(crate) scan: Scan,
    pub(crate) x: &'a Tensor,
    pub(crate) d: usize,
    pub(crate) values: &'a Tensor,
    pub(crate) indices: Option<&'a Tensor>,
}

/// The operation by which a scan combines elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Scan {
    Sum,
    Prod,
    Max,
    Min,
    LogSumExp,
}

impl Scan {
    /// True if the scan also returns the index of each running maximum or minimum.
    pub(crate) fn is_arg(self) -> bool {
        matches!(self, Scan::Max | Scan::Min)
    }
}

//! Matrix products on CPUs through OpenCL: the sizes of blocks that stay in registers and caches.

use crate::backend::problem::gemm::GemmPlan;
use crate::device::opencl::{ClDevice, SizeClass, TuningParameter};

/// The blocking of the CPU kernel: the rows and vectors in registers, and the depth and rows of a block in the caches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Panel {
    pub(crate) rows: usize,
    pub(crate) vectors: usize,
    pub(crate) depth: usize,
    pub(crate) block: usize,
}

impl Panel {
    /// Returns the block sizes tuned for this device and size class. `m` is the number of rows; products with one row use blocks of one row.
    pub(crate) fn tuned(device: &ClDevice, class: SizeClass, m: usize) -> Panel {
        let tuned = |knob| device.tuned_for(knob, class);
        let rows = if m == 1 { 1 } else { tuned(TuningParameter::PanelRows) };
        let (vectors, depth) = (tuned(TuningParameter::PanelVectors), tuned(TuningParameter::PanelDepth));
        Panel { rows, vectors, depth, block: (tuned(TuningParameter::PanelBlock) / rows).max(1) * rows }
    }

    /// Returns the number of rows that a work-item computes: the rows of a block, or fewer if compute units would otherwise be idle.
    pub(crate) fn height(self, plan: &GemmPlan, width: usize, units: usize) -> usize {
        let across = plan.n.div_ceil(self.vectors * width) * plan.count();
        let busy = (4 * units).div_ceil(across.max(1));
        let blocks = busy.clamp(plan.m.div_ceil(self.block), plan.m.div_ceil(self.rows));
        plan.m.div_ceil(blocks).next_multiple_of(self.rows)
    }
}

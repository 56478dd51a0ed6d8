//! Matrix products on OpenCL processors: the sizes of blocks in registers and caches.

use crate::backend::problem::gemm::GemmPlan;
use crate::device::opencl::{ClDevice, Knob, SizeClass};

/// Of the kernel for processors: rows and vectors in registers, and how deep and high what stays in the caches is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Panel {
    pub(crate) rows: usize,
    pub(crate) vectors: usize,
    pub(crate) depth: usize,
    pub(crate) block: usize,
}

impl Panel {
    /// As it is tuned for the device and products of this class. A single row needs no more registers.
    pub(crate) fn of(device: &ClDevice, class: SizeClass, m: usize) -> Panel {
        let tuned = |knob| device.tuned_for(knob, class);
        let rows = if m == 1 { 1 } else { tuned(Knob::PanelRows) };
        let (vectors, depth) = (tuned(Knob::PanelVectors), tuned(Knob::PanelDepth));
        Panel { rows, vectors, depth, block: (tuned(Knob::PanelBlock) / rows).max(1) * rows }
    }

    /// Rows of a work-item: as many as a block has, unless few panels leave compute units idle then.
    pub(crate) fn height(self, plan: &GemmPlan, width: usize, units: usize) -> usize {
        let across = plan.n.div_ceil(self.vectors * width) * plan.count();
        let busy = (4 * units).div_ceil(across.max(1));
        let blocks = busy.clamp(plan.m.div_ceil(self.block), plan.m.div_ceil(self.rows));
        plan.m.div_ceil(blocks).next_multiple_of(self.rows)
    }
}

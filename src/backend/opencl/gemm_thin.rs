//! Products with a matrix of few rows on GPUs, whose time is that of reading the other matrix.

use crate::Compute;
use crate::backend::opencl::gemm_mma::{InBuffer, Parts};
use crate::backend::opencl::geometry::{WIDEST, bits_type};
use crate::backend::problem::gemm::{GemmOperand, GemmPlan};

/// Included after `kernels/gemm.cl`.
pub(crate) const TEMPLATE: &str = include_str!("../../../kernels/gemm_thin.cl");

/// The most rows; for more, tensor cores or tiles are faster.
const ROWS: usize = 7;
/// The least and the greatest work-group size, and the greatest one where groups cannot share columns.
const MIN_THREADS: usize = 32;
const THREADS: usize = 256;
const MAX_THREADS: usize = 1024;
/// Work-items whose loads are coalesced.
const WARP: usize = 32;
/// Loads that a work-item has in flight, for which a further work-item is worthwhile.
const AT_ONCE: usize = 8;
/// Work-items that occupy a compute unit.
const BUSY: usize = 2048;
/// With fewer parts of k, adding up the partial results takes longer than the parts save.
const FEWEST_PARTS: usize = 4;

/// A kernel of `kernels/gemm_thin.cl`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Thin {
    rows: usize,
    /// Work-items along k, for each of the columns.
    lanes: usize,
    columns: usize,
    reads: Reads,
    /// The parts of k that different groups compute (split-K).
    pub(crate) parts: Parts,
}

/// How the matrices are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Reads {
    /// Whether the right matrix is contiguous along k.
    along_k: bool,
    /// Elements of the right matrix that are loaded at once, and the bytes of one.
    width: usize,
    size: usize,
    /// Whether the left matrix is loaded in vectors of the same width.
    both: bool,
}

impl Reads {
    fn of(plan: &GemmPlan, a: InBuffer, b: InBuffer, compute: Compute) -> Reads {
        let along_k = plan.b.row.abs() == 1 && (plan.b.col.abs() != 1 || plan.n == 1);
        let each = Thin::LOCAL_EACH / compute.dtype().size();
        let width = (WIDEST / b.dtype.size()).min(each);
        let whole = |t: &GemmOperand, first: usize, line: isize, lines: usize| {
            let steps = t.batch.iter().copied().chain((lines > 1).then_some(line)).map(isize::unsigned_abs);
            steps.chain([first]).all(|step| step.is_multiple_of(width))
        };
        let (length, (step, line), lines) = match along_k {
            true => (plan.k, (plan.b.row, plan.b.col), plan.n),
            false => (plan.n, (plan.b.col, plan.b.row), plan.k),
        };
        let wide = step == 1 && length.is_multiple_of(width) && whole(&plan.b, b.first, line, lines);
        let alike = along_k && wide && plan.a.col == 1 && a.dtype.size() == b.dtype.size();
        let both = alike && whole(&plan.a, a.first, plan.a.row, plan.m);
        Reads { along_k, width: if wide { width } else { 1 }, size: b.dtype.size(), both }
    }

    /// The extent of a load along k and along the columns.
    fn load(&self) -> (usize, usize) {
        if self.along_k { (self.width, 1) } else { (1, self.width) }
    }
}

impl Thin {
    /// The most bytes of local memory for each work-item.
    pub(crate) const LOCAL_EACH: usize = 32;

    /// The kernel for this problem on a device of `units` compute units, which `groups` groups of at most `most` work-items keep busy;
    /// none where the left matrix has too many rows. `has_fence` is called last, because that may build a kernel.
    pub(crate) fn choose(
        plan: &GemmPlan,
        [a, b]: [InBuffer; 2],
        compute: Compute,
        [units, groups, most]: [usize; 3],
        has_fence: impl FnOnce() -> bool,
    ) -> Option<Thin> {
        if plan.m > ROWS {
            return None;
        }
        let reads = Reads::of(plan, a, b, compute);
        let thin = Thin::spread(plan, reads, units, most.min(THREADS));
        let shared = Thin { parts: thin.shared(plan, groups), ..thin };
        Some(match shared.parts.count {
            1 => thin,
            _ if has_fence() => shared,
            _ => Thin::spread(plan, reads, units, most.min(MAX_THREADS)),
        })
    }

    /// A warp reads along the contiguous direction; further work-items along k are added until the device is occupied.
    fn spread(plan: &GemmPlan, reads: Reads, units: usize, most: usize) -> Thin {
        let (along, across) = reads.load();
        let (loads, columns) = (plan.k.div_ceil(along), plan.n.div_ceil(across));
        let warp = if reads.along_k { loads } else { columns }.next_power_of_two().min(WARP);
        let (mut lanes, most) = if reads.along_k { (warp, most) } else { (1, most / warp) };
        while 2 * lanes <= most && 2 * lanes * AT_ONCE <= loads && lanes * columns * plan.count() < units * BUSY {
            lanes *= 2;
        }
        let columns = (THREADS / lanes).max(if reads.along_k { 1 } else { warp }).min(columns.next_power_of_two());
        let lanes = lanes.max(MIN_THREADS / columns);
        Thin { rows: plan.m, lanes, columns, reads, parts: Parts { count: 1, depth: plan.k } }
    }

    /// The parts of k for so many groups. A part is a multiple of the loads that a group has in flight, at least twice these.
    fn shared(&self, plan: &GemmPlan, groups: usize) -> Parts {
        let tiles = plan.n.div_ceil(self.tile().1) * plan.count();
        let round = self.lanes * self.reads.load().0 * AT_ONCE;
        let wanted = if tiles <= Parts::TILES { groups / tiles } else { 1 };
        let depth = plan.k.div_ceil(wanted.max(1)).next_multiple_of(round).max(2 * round);
        match plan.k.div_ceil(depth) {
            count @ FEWEST_PARTS.. => Parts { count, depth },
            _ => self.parts,
        }
    }

    /// The rows and columns of the result that a work-group computes.
    pub(crate) fn tile(self) -> (usize, usize) {
        (self.rows, self.columns * self.reads.load().1)
    }

    pub(crate) fn threads(self) -> usize {
        self.lanes * self.columns
    }

    /// A number that identifies it among kernels for the same dtypes.
    pub(crate) fn key(self) -> usize {
        let Reads { along_k, width, both, .. } = self.reads;
        let loads = width << 2 | usize::from(both) << 1 | usize::from(along_k);
        (self.rows * 16 + self.lanes.ilog2() as usize) << 12 | (self.columns.ilog2() as usize) << 8 | loads
    }

    pub(crate) fn defines(self) -> String {
        let Thin { rows, lanes, columns, reads: Reads { along_k, width, size, both }, .. } = self;
        let bits = bits_type(width * size);
        let left = if both { format!("#define WIDE_A {bits}\n") } else { String::new() };
        format!(
            "#define MR {rows}\n#define LANES {lanes}\n#define WIDTH {columns}\n#define VEC {width}\n\
             #define WIDE_B {bits}\n#define B_ALONG_K {}\n{left}",
            along_k as u8
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Layout;
    use crate::{DType, Shape};

    fn chosen([m, n, k]: [usize; 3], transposed: bool, dtype: DType, fence: bool) -> Option<Thin> {
        let (a, out) = (Layout::contiguous([m, k].into()), Layout::contiguous([m, n].into()));
        let b = Layout::contiguous(Shape::from(if transposed { [n, k] } else { [k, n] }));
        let b = if transposed { b.transpose(0, 1) } else { b };
        let plan = GemmPlan::new(&a, &b, &out.shape, &[&out]);
        Thin::choose(&plan, [InBuffer { dtype, first: 0 }; 2], dtype.compute(), [132, 4 * 132, 1024], || fence)
    }

    #[test]
    fn work_items_occupy_the_device() {
        let sizes = [[1, 1, 1], [1, 10, 1 << 20], [7, 4096, 4096], [2, 1 << 20, 9], [3, 7, 0], [1, 8, 64], [1, 1, 999]];
        for (sizes, transposed) in sizes.into_iter().flat_map(|sizes| [(sizes, false), (sizes, true)]) {
            for (dtype, fence) in [DType::F32, DType::F16, DType::U8].map(|t| [(t, false), (t, true)]).concat() {
                let thin = chosen(sizes, transposed, dtype, fence).unwrap();
                let (threads, Parts { count, depth }) = (thin.threads(), thin.parts);
                assert!((MIN_THREADS..=MAX_THREADS).contains(&threads) && threads.is_power_of_two(), "{thin:?}");
                assert!(thin.rows == sizes[0], "{thin:?}");
                // Parts cover k, none is empty, and they begin at multiples of a load.
                let (k, along) = (sizes[2], thin.reads.load().0);
                assert!(count == 1 && depth == k || fence && (count - 1) * depth < k && k <= count * depth, "{thin:?}");
                assert!(count == 1 || depth.is_multiple_of(along), "{thin:?}");
            }
        }
        let spread = |sizes, transposed, dtype, fence| {
            let thin = chosen(sizes, transposed, dtype, fence).unwrap();
            (thin.lanes, thin.columns, thin.reads.width, thin.parts.count)
        };
        assert_eq!(spread([1, 4096, 8192], false, DType::F32, true), (8, 32, 4, 16));
        assert_eq!(spread([1, 4096, 8192], false, DType::F16, true), (8, 32, 8, 32));
        assert_eq!(spread([1, 4096, 8192], false, DType::F32, false), (32, 32, 4, 1));
        assert_eq!(spread([1, 1 << 20, 9], false, DType::F32, true), (1, 256, 4, 1));
        assert_eq!(spread([1, 16_384, 4096], true, DType::F32, true), (32, 8, 4, 1));
        assert_eq!(spread([1, 10, 1 << 20], true, DType::F32, true), (256, 1, 4, 43));
        assert_eq!(spread([1, 10, 1 << 20], true, DType::F32, false), (1024, 1, 4, 1));
        assert_eq!(chosen([8, 64, 64], false, DType::F32, true), None);
    }
}

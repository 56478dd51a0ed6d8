//! Products with a matrix of few rows on GPUs. Reading the other matrix takes most of the time.

use crate::backend::opencl::gemm_mma::{BufferMatrix, SplitK};
use crate::backend::opencl::prelude::*;

/// The template, which follows `kernels/gemm.cl`.
pub(crate) const TEMPLATE: &str = include_str!("../../../kernels/gemm_thin.cl");

/// The maximum number of rows. For products with more rows, tensor cores or tiles are faster.
const MAX_ROWS: usize = 7;
/// The minimum work-group size.
const MIN_THREADS: usize = 32;
/// The maximum work-group size if several work-groups can share the k of a column (split-K).
const SHARED_MAX_THREADS: usize = 256;
/// The maximum work-group size if work-groups cannot share the k of a column.
const MAX_THREADS: usize = 1024;
/// The number of adjacent work-items whose loads are coalesced.
const COALESCED_ITEMS: usize = 32;
/// The number of loads that a work-item has in flight. Work-items along k are added only while each work-item keeps this number of loads.
const LOADS_IN_FLIGHT: usize = 8;
/// The number of work-items that are needed to occupy a compute unit.
const ITEMS_PER_UNIT: usize = 2048;
/// The minimum number of parts of k. With fewer parts, adding up the partial results takes more time than the parts save.
const MIN_PARTS: usize = 4;

/// A kernel of `kernels/gemm_thin.cl`, which reads every element of the right matrix once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Thin {
    rows: usize,
    /// The number of work-items along k for each column.
    lanes: usize,
    columns: usize,
    reads: ThinReads,
    /// The parts of k, each computed by a different work-group (split-K).
    pub(crate) parts: AtLaunch<SplitK>,
}

/// How the matrices are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct ThinReads {
    /// Whether the right matrix is contiguous along k.
    along_k: bool,
    /// The number of elements of the right matrix that are loaded at once.
    width: usize,
    /// The size of an element of the right matrix, in bytes.
    size: usize,
    /// Whether the left matrix is loaded in vectors of `width` elements as well.
    both: bool,
}

impl ThinReads {
    fn choose(plan: &GemmPlan, a: BufferMatrix, b: BufferMatrix, compute: Compute) -> ThinReads {
        let along_k = plan.b.row.abs() == 1 && (plan.b.col.abs() != 1 || plan.n == 1);
        let each = Thin::LOCAL_BYTES_PER_ITEM / compute.dtype().size();
        let width = (MAX_VECTOR_BYTES / b.dtype.size()).min(each);
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
        ThinReads { along_k, width: if wide { width } else { 1 }, size: b.dtype.size(), both }
    }

    /// Returns the number of elements of one load: along k, and along the columns.
    fn load_extent(&self) -> (usize, usize) {
        if self.along_k { (self.width, 1) } else { (1, self.width) }
    }
}

impl Thin {
    /// The maximum number of bytes of local memory that a kernel needs for each work-item.
    pub(crate) const LOCAL_BYTES_PER_ITEM: usize = 32;

    /// Chooses the kernel for a device with `units` compute units, which `groups` work-groups keep busy. A work-group has at most `most` work-items.
    /// Returns None if the left matrix has too many rows. `has_fence` is called last, because it may build a kernel.
    pub(crate) fn choose(
        plan: &GemmPlan,
        [a, b]: [BufferMatrix; 2],
        compute: Compute,
        [units, groups, most]: [usize; 3],
        has_fence: impl FnOnce() -> bool,
    ) -> Option<Thin> {
        if plan.m > MAX_ROWS {
            return None;
        }
        let reads = ThinReads::choose(plan, a, b, compute);
        let thin = Thin::spread_lanes(plan, reads, units, most.min(SHARED_MAX_THREADS));
        let shared = Thin { parts: AtLaunch(thin.split_k(plan, groups)), ..thin };
        Some(match shared.parts.0.count {
            1 => thin,
            _ if has_fence() => shared,
            _ => Thin::spread_lanes(plan, reads, units, most.min(MAX_THREADS)),
        })
    }

    /// Distributes a warp along the contiguous direction, so that its loads are coalesced, and adds work-items along k until the device is occupied.
    fn spread_lanes(plan: &GemmPlan, reads: ThinReads, units: usize, most: usize) -> Thin {
        let (along, across) = reads.load_extent();
        let (loads, columns) = (plan.k.div_ceil(along), plan.n.div_ceil(across));
        let warp = if reads.along_k { loads } else { columns }.next_power_of_two().min(COALESCED_ITEMS);
        let (mut lanes, most) = if reads.along_k { (warp, most) } else { (1, most / warp) };
        while 2 * lanes <= most
            && 2 * lanes * LOADS_IN_FLIGHT <= loads
            && lanes * columns * plan.count() < units * ITEMS_PER_UNIT
        {
            lanes *= 2;
        }
        let columns =
            (SHARED_MAX_THREADS / lanes).max(if reads.along_k { 1 } else { warp }).min(columns.next_power_of_two());
        let lanes = lanes.max(MIN_THREADS / columns);
        Thin { rows: plan.m, lanes, columns, reads, parts: AtLaunch(SplitK { count: 1, depth: plan.k }) }
    }

    /// Splits k into parts for `groups` work-groups. A part is a multiple of the elements that a work-group has in flight, and at least twice that
    /// number.
    fn split_k(&self, plan: &GemmPlan, groups: usize) -> SplitK {
        let tiles = plan.n.div_ceil(self.tile().1) * plan.count();
        let round = self.lanes * self.reads.load_extent().0 * LOADS_IN_FLIGHT;
        let wanted = if tiles <= SplitK::MAX_TILES { groups / tiles } else { 1 };
        let depth = plan.k.div_ceil(wanted.max(1)).next_multiple_of(round).max(2 * round);
        match plan.k.div_ceil(depth) {
            count @ MIN_PARTS.. => SplitK { count, depth },
            _ => self.parts.0,
        }
    }

    /// Returns the rows and columns of the result that one work-group computes.
    pub(crate) fn tile(self) -> (usize, usize) {
        (self.rows, self.columns * self.reads.load_extent().1)
    }

    pub(crate) fn threads(self) -> usize {
        self.lanes * self.columns
    }

    pub(crate) fn defines(self) -> String {
        let Thin { rows, lanes, columns, reads: ThinReads { along_k, width, size, both }, .. } = self;
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

    fn choose_thin([m, n, k]: [usize; 3], transposed: bool, dtype: DType, fence: bool) -> Option<Thin> {
        let (a, out) = (Layout::contiguous([m, k].into()), Layout::contiguous([m, n].into()));
        let b = Layout::contiguous(Shape::from(if transposed { [n, k] } else { [k, n] }));
        let b = if transposed { b.transpose(0, 1) } else { b };
        let plan = GemmPlan::new(&a, &b, &out.shape, &[&out]);
        Thin::choose(&plan, [BufferMatrix { dtype, first: 0 }; 2], dtype.compute(), [132, 4 * 132, 1024], || fence)
    }

    #[test]
    fn thin_kernels_occupy_the_device_and_cover_k() {
        let sizes = [[1, 1, 1], [1, 10, 1 << 20], [7, 4096, 4096], [2, 1 << 20, 9], [3, 7, 0], [1, 8, 64], [1, 1, 999]];
        for (sizes, transposed) in sizes.into_iter().flat_map(|sizes| [(sizes, false), (sizes, true)]) {
            for (dtype, fence) in [DType::F32, DType::F16, DType::U8].map(|t| [(t, false), (t, true)]).concat() {
                let thin = choose_thin(sizes, transposed, dtype, fence).unwrap();
                let (threads, SplitK { count, depth }) = (thin.threads(), thin.parts.0);
                assert!((MIN_THREADS..=MAX_THREADS).contains(&threads) && threads.is_power_of_two(), "{thin:?}");
                assert!(thin.rows == sizes[0], "{thin:?}");
                // The parts together cover k, no part is empty, and each part begins at a multiple of a load.
                let (k, along) = (sizes[2], thin.reads.load_extent().0);
                assert!(count == 1 && depth == k || fence && (count - 1) * depth < k && k <= count * depth, "{thin:?}");
                assert!(count == 1 || depth.is_multiple_of(along), "{thin:?}");
            }
        }
        let spread = |sizes, transposed, dtype, fence| {
            let thin = choose_thin(sizes, transposed, dtype, fence).unwrap();
            (thin.lanes, thin.columns, thin.reads.width, thin.parts.0.count)
        };
        assert_eq!(spread([1, 4096, 8192], false, DType::F32, true), (8, 32, 4, 16));
        assert_eq!(spread([1, 4096, 8192], false, DType::F16, true), (8, 32, 8, 32));
        assert_eq!(spread([1, 4096, 8192], false, DType::F32, false), (32, 32, 4, 1));
        assert_eq!(spread([1, 1 << 20, 9], false, DType::F32, true), (1, 256, 4, 1));
        assert_eq!(spread([1, 16_384, 4096], true, DType::F32, true), (32, 8, 4, 1));
        assert_eq!(spread([1, 10, 1 << 20], true, DType::F32, true), (256, 1, 4, 43));
        assert_eq!(spread([1, 10, 1 << 20], true, DType::F32, false), (1024, 1, 4, 1));
        assert_eq!(choose_thin([8, 64, 64], false, DType::F32, true), None);
    }
}

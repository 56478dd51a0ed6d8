//! Scatter on GPUs: `kernels/scatter.cl`.

use smallvec::SmallVec;

use crate::backend::opencl::gather::{TEMPLATE, element, in_units, skip};
use crate::backend::opencl::geometry::{STRIDED_DIMS, WIDEST, bits_type, group_size, index_type, is_wide, words};
use crate::backend::opencl::kernels::{KernelKey, kernel};
use crate::backend::opencl::launch_plan::{KernelLaunch, LaunchPlan};
use crate::backend::problem::index::{Combine, Indexed};
use crate::backend::problem::lines::without;
use crate::device::opencl::{Arg, ClDevice, index_fault};
use crate::layout::collapse::StridedDims;
use crate::tensor::Layout;
use crate::{Result, Shape, Tensor};

const WRITES: &str = include_str!("../../../kernels/scatter.cl");

/// The fewest contiguous elements with one index that are written as rows.
const MIN_ROW: usize = 8;
/// The most destination rows of a group: the kernel's lists have 64 entries.
const SPAN: usize = 32;
/// In the kernel that writes element by element, the neighbouring columns of a group, and the indices that a work-item reads at a time.
const SIDE: usize = 4;
const PER: usize = 4;
/// The most entries of its table in local memory, by which it detects conflicting indices.
const TAGS: usize = 1 << 12;
/// The most parts of the destination, each held in the local memory of a group that reads all indices.
const MAX_HELD_PARTS: usize = 8;
/// The rounds of conflict resolution after which one work-item writes the remaining elements.
const ROUNDS: usize = 16;

struct ScatterJob<'a> {
    device: &'static ClDevice,
    g: &'a Indexed<'a>,
    combine: Combine,
    target: &'a Tensor,
    layout: &'a Layout,
    /// The columns: the sizes of all dims but the indexed one, and the strides of source, index and target along them.
    shape: Shape,
    strides: [SmallVec<[isize; 6]>; 3],
    /// The indices of a column, and the strides along it in the source and in the index.
    count: usize,
    steps: [isize; 2],
    group: usize,
}

/// The launch plan; none where there are more indices than the kernels can count, or many columns of few indices.
pub(crate) fn prepare(
    device: &'static ClDevice,
    g: &Indexed,
    combine: Combine,
    target: &Tensor,
    layout: &Layout,
    d: usize,
) -> Result<Option<LaunchPlan>> {
    let job = ScatterJob {
        device,
        g,
        combine,
        target,
        layout,
        shape: without(g.x_layout.shape.dims(), d),
        strides: [&g.x_layout, &g.index_layout, layout].map(|l| without(&l.strides, d)),
        count: g.x_layout.shape.dims()[d],
        steps: [g.x_layout.strides[d], g.index_layout.strides[d]],
        group: group_size(device),
    };
    // Kernels number indices in 26 bits of a word.
    if job.count >= 1 << 26 || is_wide([job.shape.numel()]) {
        return Ok(None);
    }
    let tiling = job.tiling();
    match job.rows(tiling.picoseconds(&job))? {
        Some(rows) => Ok(Some(rows)),
        // For many columns of few indices, the kernel with one work-item for each column is fast enough.
        None if job.count <= FEW && job.shape.numel() >= job.units() * BUSY => Ok(None),
        None => job.tiles(&tiling).map(Some),
    }
}

/// The most indices of a column that are few, and the columns that occupy a compute unit.
const FEW: usize = 8;
const BUSY: usize = 1024;

/// How groups divide a scatter whose elements have an index each.
struct Tiling {
    strided: StridedDims,
    /// Neighbouring columns of a group.
    side: usize,
    tiles: usize,
    /// The parts of the destination, and their size.
    parts: usize,
    span: usize,
    tags: usize,
    /// Whether a group keeps its part of the destination in local memory.
    held: bool,
}

impl Tiling {
    /// An estimate of the time: a block of indices takes 3 us, and a compute unit runs four groups at a time.
    fn picoseconds(&self, job: &ScatterJob) -> usize {
        let rounds = (self.tiles * self.parts).div_ceil(4 * job.units());
        rounds.saturating_mul((job.count * self.side).div_ceil(PER * job.group)).saturating_mul(3_000_000)
    }
}

impl ScatterJob<'_> {
    /// A launch of the kernel of this name over so many groups. `numbers` are the part of its key that stands for `defines`.
    fn kernel_launch(
        &self,
        entry: &'static str,
        numbers: &[usize],
        defines: &str,
        groups: usize,
    ) -> Result<KernelLaunch> {
        let (which, element) = element(self.combine, self.target.dtype);
        let params = [self.combine as u64, which, self.g.index.dtype as u64, self.group as u64];
        let params: SmallVec<[u64; 8]> = params.into_iter().chain(numbers.iter().map(|&n| n as u64)).collect();
        let kernel = kernel(self.device, KernelKey::new(entry, &params), entry, || {
            let (t, group) = (self.g.index.dtype, self.group);
            format!("{defines}{element}#define T {t}\n#define GROUP {group}\n{STRIDED_DIMS}{TEMPLATE}{WRITES}")
        })?;
        Ok(KernelLaunch::new(kernel, groups * self.group, self.group))
    }

    /// Adds the first arguments of both kernels, with the offsets of source and target in units of `unit` elements.
    fn tensors(&self, launch: &mut KernelLaunch, unit: usize) {
        launch.tensor_from(0, skip(&self.g.x_layout, self.g.x), unit);
        launch.tensor_from(1, skip(&self.g.index_layout, self.g.index), 1);
        launch.tensor_from(2, skip(self.layout, self.target), unit);
        launch.faults();
        launch.args([Arg::U32(index_fault(self.g.op))]);
    }

    fn units(&self) -> usize {
        self.device.info().compute_units.max(1)
    }

    /// The plan that writes contiguous elements with one index as rows; none where there are no such rows, or where reading all indices
    /// in every group takes more than so many picoseconds.
    fn rows(&self, most: usize) -> Result<Option<LaunchPlan>> {
        let (g, units) = (self.g, self.units());
        let mut strided = StridedDims::new(&self.shape, [&self.strides[0][..], &self.strides[2]]);
        let one = self.strides[1].iter().all(|&s| s == 0) && strided.strides.iter().all(|s| s.last() == Some(&1));
        if !one || strided.dims.last().is_some_and(|&n| n < MIN_ROW) {
            return Ok(None);
        }
        let starts = [self.steps[0], g.step, g.x_layout.offset as isize, self.layout.offset as isize];
        let size = self.target.dtype.size();
        let unit = in_units(&mut strided, &[0, 1], WIDEST / size, &starts);
        let (columns, rank) = (self.shape.numel() / unit, strided.dims.len().max(1));
        let lanes = columns.next_power_of_two().min(self.group);
        // The destination rows, and if these are few also the columns, are divided until all compute units have groups.
        let span = (g.size / (4 * units)).clamp(1, SPAN);
        let parts = g.size.div_ceil(span);
        let slabs = columns.div_ceil(lanes).min((2 * units).div_ceil(parts));
        // Each group reads all indices from the cache, in 2 ps each.
        if (parts * slabs).saturating_mul(2 * self.count) > most {
            return Ok(None);
        }
        let (unit_type, numbers) = (bits_type(size * unit), [rank, unit]);
        let defines = format!(
            "#define ROWS\n#define UNIT {unit_type}\n#define WIDTH {unit}\n#define NK {rank}\n#define IDX uint\n"
        );
        let mut launch = self.kernel_launch("scatter_rows", &numbers, &defines, parts * slabs)?;
        self.tensors(&mut launch, unit);
        launch.words(words(&strided));
        launch.args([columns, self.count, g.size].map(|n| Arg::U64(n as u64)));
        let per_unit = |s: isize| Arg::I64((s / unit as isize) as i64);
        launch.args([per_unit(self.steps[0]), Arg::I64(self.steps[1] as i64), per_unit(g.step)]);
        launch.args([span, slabs, lanes, g.wraps.into()].map(|n| Arg::U32(n as u32)));
        Ok(Some(LaunchPlan::one(self.device, launch)))
    }

    fn tiling(&self) -> Tiling {
        let (size, info) = (self.g.size, self.device.info());
        let strided = StridedDims::new(&self.shape, self.strides.iter().map(|s| &s[..]));
        // Where the source or the index is contiguous across columns, a group reads neighbouring columns together.
        let contiguous_across = |k: usize| strided.strides[k].last() == Some(&1) && self.steps[k] != 1;
        let side = if contiguous_across(0) || contiguous_across(1) { SIDE } else { 1 };
        let tiles = self.shape.numel().div_ceil(side);
        let capacity = info.local_memory.saturating_sub(2 * PER * self.group + 64) / (4 + self.target.dtype.size());
        let most = TAGS.min(1 << capacity.max(side).ilog2());
        // The destination is held in local memory where that takes few parts, and there are indices for much of it.
        let parts = (size * side).div_ceil(most);
        let held = parts <= MAX_HELD_PARTS && self.count * 4 >= size;
        let parts = if held { parts } else { (2 * self.units() / tiles).clamp(1, size) };
        let span = size.div_ceil(parts);
        let tags = if held { (span * side).next_power_of_two() } else { most };
        Tiling { strided, side, tiles, parts: size.div_ceil(span), span, tags, held }
    }

    /// The plan that writes element by element.
    fn tiles(&self, tiling: &Tiling) -> Result<LaunchPlan> {
        let (g, &Tiling { ref strided, side, tiles, parts, span, tags, held }) = (self.g, tiling);
        let (columns, rank) = (self.shape.numel(), strided.dims.len().max(1));
        let wide = is_wide([g.size, self.count + PER * self.group, tiles * parts]);
        let (idx, how) = (index_type(wide), if held { "#define HELD\n" } else { "" });
        let numbers = [rank, wide.into(), side, tags, held.into()];
        let defines = format!(
            "#define TILES\n{how}#define SIDE {side}\n#define TAGS {tags}\n#define PER {PER}\n#define ROUNDS {ROUNDS}\n\
             #define NK {rank}\n#define IDX {idx}\n"
        );
        let mut launch = self.kernel_launch("scatter_tiles", &numbers, &defines, tiles * parts)?;
        self.tensors(&mut launch, 1);
        launch.words(words(strided));
        launch.args([columns, self.count, g.size].map(|n| Arg::U64(n as u64)));
        launch.args([self.steps[0], self.steps[1], g.step].map(|s| Arg::I64(s as i64)));
        launch.args([Arg::U32(parts as u32), Arg::U64(span as u64), Arg::U32(g.wraps.into())]);
        Ok(LaunchPlan::one(self.device, launch))
    }
}

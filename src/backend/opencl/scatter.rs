//! Scatter on GPUs: `kernels/scatter.cl`.

use smallvec::SmallVec;

use crate::backend::opencl::gather::{TEMPLATE, combine_into_units, element_defines, relative_offset};
use crate::backend::opencl::geometry::{
    MAX_VECTOR_BYTES, STRIDED_DIMS, bits_type, default_group_size, dims_words, index_type, needs_64_bit,
};
use crate::backend::opencl::kernels::{KernelKey, get_or_build_kernel};
use crate::backend::opencl::launch_plan::{KernelLaunch, LaunchPlan};
use crate::backend::problem::index::{Indexed, Scatter};
use crate::backend::problem::lines::without_dim;
use crate::device::opencl::{Arg, ClDevice, index_fault};
use crate::layout::collapse::StridedDims;
use crate::{Result, Shape};

const WRITES: &str = include_str!("../../../kernels/scatter.cl");

/// The minimum number of contiguous elements with one index that are written as rows.
const MIN_ROW_LEN: usize = 8;
/// The maximum number of destination rows of a group. The kernel's lists have 64 entries.
const MAX_ROWS_PER_GROUP: usize = 32;
/// The number of adjacent columns of a group, in the kernel that writes element by element.
const COLUMNS_PER_GROUP: usize = 4;
/// The number of indices that a work-item reads at a time, in the kernel that writes element by element.
const READ_LEN: usize = 4;
/// The maximum number of entries of the table in local memory that detects conflicting indices.
const MAX_TABLE_ENTRIES: usize = 1 << 12;
/// The maximum number of destination parts that are held in local memory; the group of each part reads all indices.
const MAX_HELD_PARTS: usize = 8;
/// The number of rounds of conflict resolution, after which one work-item writes the remaining elements.
const CONFLICT_ROUNDS: usize = 16;

/// The operands and sizes of a scatter.
struct ScatterLaunch<'a> {
    device: &'static ClDevice,
    scatter: &'a Scatter<'a>,
    g: &'a Indexed<'a>,
    /// The sizes of all dims except the indexed dim.
    shape: Shape,
    /// The strides of source, index and target along the dims of `shape`.
    strides: [SmallVec<[isize; 6]>; 3],
    /// The number of indices of a column.
    count: usize,
    /// The strides along a column in the source and in the index.
    steps: [isize; 2],
    group: usize,
}

/// Makes the launch plan. Returns None if there are more indices than the kernels can count, or many columns of few indices.
pub(crate) fn prepare(device: &'static ClDevice, scatter: &Scatter) -> Result<Option<LaunchPlan>> {
    let &Scatter { moved: g, layout, d, .. } = scatter;
    let job = ScatterLaunch {
        device,
        scatter,
        g,
        shape: without_dim(g.x_layout.shape.dims(), d),
        strides: [&g.x_layout, &g.index_layout, layout].map(|l| without_dim(&l.strides, d)),
        count: g.x_layout.shape.dims()[d],
        steps: [g.x_layout.strides[d], g.index_layout.strides[d]],
        group: default_group_size(device),
    };
    // Kernels store the position of an index in its column in 26 bits of a word.
    if job.count >= 1 << 26 || needs_64_bit([job.shape.numel()]) {
        return Ok(None);
    }
    let tiling = job.tiling();
    match job.plan_rows(tiling.estimate_picoseconds(&job))? {
        Some(rows) => Ok(Some(rows)),
        // For many columns of few indices, the kernel with one work-item for each column is fast enough.
        None if job.count <= MAX_INDICES_PER_COLUMN && job.shape.numel() >= job.units() * COLUMNS_PER_UNIT => Ok(None),
        None => job.plan_tiles(&tiling).map(Some),
    }
}

/// The maximum number of indices of a column for which one work-item computes the column.
const MAX_INDICES_PER_COLUMN: usize = 8;
/// The number of columns that occupy a compute unit.
const COLUMNS_PER_UNIT: usize = 1024;

/// How groups divide a scatter in which each element has its own index.
struct Tiling {
    strided: StridedDims,
    /// The number of adjacent columns of a group.
    side: usize,
    tiles: usize,
    /// The number of parts of the destination, and the destination rows of a part.
    parts: usize,
    span: usize,
    tags: usize,
    /// Whether a group keeps its part of the destination in local memory.
    held: bool,
}

impl Tiling {
    /// Estimates the time in picoseconds: a block of indices takes 3 us, and a compute unit runs four groups at a time.
    fn estimate_picoseconds(&self, job: &ScatterLaunch) -> usize {
        let rounds = (self.tiles * self.parts).div_ceil(4 * job.units());
        rounds.saturating_mul((job.count * self.side).div_ceil(READ_LEN * job.group)).saturating_mul(3_000_000)
    }
}

impl ScatterLaunch<'_> {
    /// Makes a launch of kernel `entry` with `groups` groups. `numbers` is the part of the key that represents `defines`.
    fn kernel_launch(
        &self,
        entry: &'static str,
        numbers: &[usize],
        defines: &str,
        groups: usize,
    ) -> Result<KernelLaunch> {
        let (which, element) = element_defines(self.scatter.combine, self.scatter.target.dtype);
        let params = [self.scatter.combine as u64, which, self.g.index.dtype as u64, self.group as u64];
        let params: SmallVec<[u64; 8]> = params.into_iter().chain(numbers.iter().map(|&n| n as u64)).collect();
        let kernel = get_or_build_kernel(self.device, KernelKey::new(entry, &params), entry, || {
            let (t, group) = (self.g.index.dtype, self.group);
            format!("{defines}{element}#define T {t}\n#define GROUP {group}\n{STRIDED_DIMS}{TEMPLATE}{WRITES}")
        })?;
        Ok(KernelLaunch::new(kernel, groups * self.group, self.group))
    }

    /// Adds the first arguments of both kernels, with the offsets of source and target in units of `unit` elements.
    fn push_tensors(&self, launch: &mut KernelLaunch, unit: usize) {
        launch.push_tensor_at(0, relative_offset(&self.g.x_layout, self.g.x), unit);
        launch.push_tensor_at(1, relative_offset(&self.g.index_layout, self.g.index), 1);
        launch.push_tensor_at(2, relative_offset(self.scatter.layout, self.scatter.target), unit);
        launch.push_faults();
        launch.push_fixed([Arg::U32(index_fault(self.g.op))]);
    }

    fn units(&self) -> usize {
        self.device.info().compute_units.max(1)
    }

    /// Makes the plan that writes contiguous elements with one index as rows. Returns None if there are no such rows, or if
    /// reading all indices in every group takes more than `most` picoseconds.
    fn plan_rows(&self, most: usize) -> Result<Option<LaunchPlan>> {
        let (g, units) = (self.g, self.units());
        let mut strided = StridedDims::new(&self.shape, [&self.strides[0][..], &self.strides[2]]);
        let one = self.strides[1].iter().all(|&s| s == 0) && strided.strides.iter().all(|s| s.last() == Some(&1));
        if !one || strided.dims.last().is_some_and(|&n| n < MIN_ROW_LEN) {
            return Ok(None);
        }
        let starts = [self.steps[0], g.step, g.x_layout.offset as isize, self.scatter.layout.offset as isize];
        let size = self.scatter.target.dtype.size();
        let unit = combine_into_units(&mut strided, &[0, 1], MAX_VECTOR_BYTES / size, &starts);
        let (columns, rank) = (self.shape.numel() / unit, strided.dims.len().max(1));
        let lanes = columns.next_power_of_two().min(self.group);
        // The destination rows, and the columns if rows are few, are divided until all compute units have groups.
        let span = (g.size / (4 * units)).clamp(1, MAX_ROWS_PER_GROUP);
        let parts = g.size.div_ceil(span);
        let slabs = columns.div_ceil(lanes).min((2 * units).div_ceil(parts));
        // Each group reads all indices from the cache, which takes 2 ps for each index.
        if (parts * slabs).saturating_mul(2 * self.count) > most {
            return Ok(None);
        }
        let (unit_type, numbers) = (bits_type(size * unit), [rank, unit]);
        let defines = format!(
            "#define ROWS\n#define UNIT {unit_type}\n#define WIDTH {unit}\n#define NK {rank}\n#define IDX uint\n"
        );
        let mut launch = self.kernel_launch("scatter_rows", &numbers, &defines, parts * slabs)?;
        self.push_tensors(&mut launch, unit);
        launch.push_words(dims_words(&strided));
        launch.push_fixed([columns, self.count, g.size].map(|n| Arg::U64(n as u64)));
        let per_unit = |s: isize| Arg::I64((s / unit as isize) as i64);
        launch.push_fixed([per_unit(self.steps[0]), Arg::I64(self.steps[1] as i64), per_unit(g.step)]);
        launch.push_fixed([span, slabs, lanes, g.wraps.into()].map(|n| Arg::U32(n as u32)));
        Ok(Some(LaunchPlan::single(self.device, launch)))
    }

    fn tiling(&self) -> Tiling {
        let (size, info) = (self.g.size, self.device.info());
        let strided = StridedDims::new(&self.shape, self.strides.iter().map(|s| &s[..]));
        // If the source or the index is contiguous across columns, a group reads adjacent columns together.
        let contiguous_across = |k: usize| strided.strides[k].last() == Some(&1) && self.steps[k] != 1;
        let side = if contiguous_across(0) || contiguous_across(1) { COLUMNS_PER_GROUP } else { 1 };
        let tiles = self.shape.numel().div_ceil(side);
        let capacity =
            info.local_memory.saturating_sub(2 * READ_LEN * self.group + 64) / (4 + self.scatter.target.dtype.size());
        let most = MAX_TABLE_ENTRIES.min(1 << capacity.max(side).ilog2());
        // The destination is held in local memory if that takes few parts and there are indices for much of it.
        let parts = (size * side).div_ceil(most);
        let held = parts <= MAX_HELD_PARTS && self.count * 4 >= size;
        let parts = if held { parts } else { (2 * self.units() / tiles).clamp(1, size) };
        let span = size.div_ceil(parts);
        let tags = if held { (span * side).next_power_of_two() } else { most };
        Tiling { strided, side, tiles, parts: size.div_ceil(span), span, tags, held }
    }

    /// Makes the plan that writes element by element.
    fn plan_tiles(&self, tiling: &Tiling) -> Result<LaunchPlan> {
        let (g, &Tiling { ref strided, side, tiles, parts, span, tags, held }) = (self.g, tiling);
        let (columns, rank) = (self.shape.numel(), strided.dims.len().max(1));
        let wide = needs_64_bit([g.size, self.count + READ_LEN * self.group, tiles * parts]);
        let (idx, how) = (index_type(wide), if held { "#define HELD\n" } else { "" });
        let numbers = [rank, wide.into(), side, tags, held.into()];
        let defines = format!(
            "#define TILES\n{how}#define SIDE {side}\n#define TAGS {tags}\n#define PER {READ_LEN}\n#define ROUNDS {CONFLICT_ROUNDS}\n\
             #define NK {rank}\n#define IDX {idx}\n"
        );
        let mut launch = self.kernel_launch("scatter_tiles", &numbers, &defines, tiles * parts)?;
        self.push_tensors(&mut launch, 1);
        launch.push_words(dims_words(strided));
        launch.push_fixed([columns, self.count, g.size].map(|n| Arg::U64(n as u64)));
        launch.push_fixed([self.steps[0], self.steps[1], g.step].map(|s| Arg::I64(s as i64)));
        launch.push_fixed([Arg::U32(parts as u32), Arg::U64(span as u64), Arg::U32(g.wraps.into())]);
        Ok(LaunchPlan::single(self.device, launch))
    }
}

//! Scatter on GPUs: `kernels/scatter.cl`.

use crate::backend::opencl::gather::{TEMPLATE, combine_into_units, element_config, push_indexed, relative_offset};
use crate::backend::opencl::prelude::*;

const WRITES: &str = include_str!("../../../kernels/scatter.cl");

/// The minimum number of contiguous elements with the same index for which a scatter writes whole rows.
const MIN_ROW_LEN: usize = 8;
/// The maximum number of destination rows of a work-group. Its lists in the kernel have 64 entries.
const MAX_ROWS_PER_GROUP: usize = 32;
/// The number of adjacent columns of a work-group, in the kernel that writes element by element.
const COLUMNS_PER_GROUP: usize = 4;
/// The number of indices that a work-item reads at a time, in the kernel that writes element by element.
const READ_LEN: usize = 4;
/// The maximum number of entries of the table in local memory that detects equal indices.
const MAX_TABLE_ENTRIES: usize = 1 << 12;
/// The maximum number of parts of a destination that is kept in local memory. The work-group of each part reads all indices.
const MAX_HELD_PARTS: usize = 8;
/// The maximum number of rounds in which equal indices are resolved. After these rounds, one work-item writes the remaining elements.
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
    /// The number of indices of a column, which is the size of the indexed dim of the index.
    count: usize,
    /// The strides of the source and of the index along a column.
    steps: [isize; 2],
    group: usize,
}

/// Makes the launch plan. Returns None if there are more indices than the kernels can count, or if there are many columns of few indices each.
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
    // Kernels store the position of an index within its column in 26 bits of a word.
    if job.count >= 1 << 26 || needs_64_bit([job.shape.numel()]) {
        return Ok(None);
    }
    let tiling = job.tiling();
    match job.plan_rows(tiling.estimate_picoseconds(&job))? {
        Some(rows) => Ok(Some(rows)),
        // For many columns of few indices each, the kernel with one work-item per column is fast enough.
        None if job.count <= MAX_INDICES_PER_COLUMN && job.shape.numel() >= job.units() * COLUMNS_PER_UNIT => Ok(None),
        None => job.plan_tiles(&tiling).map(Some),
    }
}

/// The maximum number of indices of a column for which one work-item computes the whole column.
const MAX_INDICES_PER_COLUMN: usize = 8;
/// The number of columns that are needed to occupy a compute unit.
const COLUMNS_PER_UNIT: usize = 1024;

/// How a scatter in which each element has its own index is divided among work-groups.
struct Tiling {
    strided: StridedDims,
    /// The number of adjacent columns of a work-group.
    side: usize,
    tiles: usize,
    /// The number of parts of the destination, and the number of destination rows of a part (`span`).
    parts: usize,
    span: usize,
    tags: usize,
    /// Whether a work-group keeps its part of the destination in local memory.
    held: bool,
}

impl Tiling {
    /// Estimates the time in picoseconds: each block of indices takes 3 us, and a compute unit runs four work-groups at a time.
    fn estimate_picoseconds(&self, job: &ScatterLaunch) -> usize {
        let rounds = (self.tiles * self.parts).div_ceil(4 * job.units());
        rounds.saturating_mul((job.count * self.side).div_ceil(READ_LEN * job.group)).saturating_mul(3_000_000)
    }
}

impl ScatterLaunch<'_> {
    /// Makes a launch of the kernel `entry` with `groups` work-groups.
    fn kernel_launch(&self, entry: &'static str, form: impl KernelConfig, groups: usize) -> Result<KernelLaunch> {
        let element = element_config(self.scatter.combine, self.scatter.target.dtype);
        let config = kernel_config! {
            "" => form, "" => element, "T" => self.g.index.dtype, "GROUP" => self.group,
        };
        let kernel = config.kernel(self.device, entry, entry, &[STRIDED_DIMS, TEMPLATE, WRITES])?;
        Ok(KernelLaunch::new(kernel, groups * self.group, self.group))
    }

    /// Returns the offset of the scatter's view of the target, relative to the target's offset.
    fn to(&self) -> isize {
        relative_offset(self.scatter.layout, self.scatter.target)
    }

    fn units(&self) -> usize {
        self.device.info().compute_units.max(1)
    }

    /// Makes the plan that writes contiguous elements with the same index as rows. Returns None if there are no such rows, or if it
    /// takes more than `most` picoseconds because every work-group reads all indices.
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
        // The destination rows are divided until all compute units have work-groups. If there are few rows, columns are divided as well.
        let span = (g.size / (4 * units)).clamp(1, MAX_ROWS_PER_GROUP);
        let parts = g.size.div_ceil(span);
        let slabs = columns.div_ceil(lanes).min((2 * units).div_ceil(parts));
        // Each work-group reads all indices from the cache, which takes 2 ps per index.
        if (parts * slabs).saturating_mul(2 * self.count) > most {
            return Ok(None);
        }
        let form = kernel_config! {
            "" => "ROWS", "UNIT" => bits_type(size * unit), "WIDTH" => unit, "NK" => rank, "IDX" => index_type(false),
        };
        let mut launch = self.kernel_launch("scatter_rows", form, parts * slabs)?;
        push_indexed(&mut launch, g, self.to(), unit);
        launch.push_words(dims_words(&strided));
        let per_unit = |s: isize| s / unit as isize;
        let [x_step, index_step] = self.steps;
        launch.push_fixed(args![; columns, self.count, g.size, per_unit(x_step), index_step, per_unit(g.step)]);
        launch.push_fixed(args![; span as u32, slabs as u32, lanes as u32, g.wraps]);
        Ok(Some(LaunchPlan::single(self.device, launch)))
    }

    fn tiling(&self) -> Tiling {
        let (size, info) = (self.g.size, self.device.info());
        let strided = StridedDims::new(&self.shape, self.strides.iter().map(|s| &s[..]));
        // If the source or the index is contiguous across columns, a work-group reads adjacent columns together.
        let contiguous_across = |k: usize| strided.strides[k].last() == Some(&1) && self.steps[k] != 1;
        let side = if contiguous_across(0) || contiguous_across(1) { COLUMNS_PER_GROUP } else { 1 };
        let tiles = self.shape.numel().div_ceil(side);
        let capacity =
            info.local_memory.saturating_sub(2 * READ_LEN * self.group + 64) / (4 + self.scatter.target.dtype.size());
        let most = MAX_TABLE_ENTRIES.min(1 << capacity.max(side).ilog2());
        // The destination is kept in local memory if this takes few parts, and if there are indices for at least a quarter of the destination.
        let parts = (size * side).div_ceil(most);
        let held = parts <= MAX_HELD_PARTS && self.count * 4 >= size;
        let parts = if held { parts } else { (2 * self.units() / tiles).clamp(1, size) };
        let span = size.div_ceil(parts);
        let tags = if held { (span * side).next_power_of_two() } else { most };
        Tiling { strided, side, tiles, parts: size.div_ceil(span), span, tags, held }
    }

    /// Makes the plan that writes element by element, for a scatter in which each element has its own index.
    fn plan_tiles(&self, tiling: &Tiling) -> Result<LaunchPlan> {
        let (g, &Tiling { ref strided, side, tiles, parts, span, tags, held }) = (self.g, tiling);
        let (columns, rank) = (self.shape.numel(), strided.dims.len().max(1));
        let wide = needs_64_bit([g.size, self.count + READ_LEN * self.group, tiles * parts]);
        let form = kernel_config! {
            "" => "TILES", "HELD" => held, "SIDE" => side, "TAGS" => tags, "PER" => READ_LEN, "ROUNDS" => CONFLICT_ROUNDS,
            "NK" => rank, "IDX" => index_type(wide),
        };
        let mut launch = self.kernel_launch("scatter_tiles", form, tiles * parts)?;
        push_indexed(&mut launch, g, self.to(), 1);
        launch.push_words(dims_words(strided));
        launch.push_fixed(args![; columns, self.count, g.size, self.steps[0], self.steps[1], g.step]);
        launch.push_fixed(args![; parts as u32, span, g.wraps]);
        Ok(LaunchPlan::single(self.device, launch))
    }
}

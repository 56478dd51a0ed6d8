//! Writing through indices on GPUs: `kernels/scatter.cl`.

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

/// Neighbours of a row from which on a group takes whole rows.
const NARROW: usize = 8;
/// Destinations a group of whole rows has at most: the kernel's lists have room for 64.
const SPAN: usize = 32;
/// Of elements: columns side by side, indices a work-item at a time, most places in local memory, and most groups that
/// read the same indices for their parts of what local memory holds.
const SIDE: usize = 4;
const PER: usize = 4;
const TAGS: usize = 1 << 12;
const HELD: usize = 8;
/// Rounds after which one work-item takes all that meets in an element.
const ROUNDS: usize = 16;

/// One write.
struct ScatterJob<'a> {
    device: &'static ClDevice,
    g: &'a Indexed<'a>,
    combine: Combine,
    target: &'a Tensor,
    layout: &'a Layout,
    /// The columns: all dims but the one that is indexed, and the strides of source, index and target there.
    shape: Shape,
    strides: [SmallVec<[isize; 6]>; 3],
    /// Indices a column, and the steps from one to the next in the source and in the index.
    count: usize,
    steps: [isize; 2],
    group: usize,
}

/// The launch for it; none where counts are beyond what the kernels number, and where columns are many and short.
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
    // Kernels number the indices in 32 bits, with 6 of them for something else.
    if job.count >= 1 << 26 || is_wide([job.shape.numel()]) {
        return Ok(None);
    }
    let tiling = job.tiling();
    match job.rows(tiling.picoseconds(&job))? {
        Some(rows) => Ok(Some(rows)),
        // A work-item each does for columns of a few indices.
        None if job.count <= FEW && job.shape.numel() >= job.units() * BUSY => Ok(None),
        None => job.tiles(&tiling).map(Some),
    }
}

/// Indices of a column that are few, and columns that occupy a compute unit.
const FEW: usize = 8;
const BUSY: usize = 1024;

/// How groups share the columns of a job whose elements have an index each.
struct Tiling {
    strided: StridedDims,
    /// Neighbouring columns of a group.
    side: usize,
    tiles: usize,
    /// Ranges of destinations, and their size.
    parts: usize,
    span: usize,
    tags: usize,
    held: bool,
}

impl Tiling {
    /// A guess: blocks of indices take 3 us, one after the other, and a unit has four groups at a time.
    fn picoseconds(&self, job: &ScatterJob) -> usize {
        let rounds = (self.tiles * self.parts).div_ceil(4 * job.units());
        rounds.saturating_mul((job.count * self.side).div_ceil(PER * job.group)).saturating_mul(3_000_000)
    }
}

impl ScatterJob<'_> {
    /// A launch of the kernel of that name over so many groups. `numbers` tell it from others with other `defines`.
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

    /// The first arguments of both kernels; source and target begin at multiples of `unit` elements.
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

    /// Where one index serves neighbours in memory, and looking for the indices is no more work than so many picoseconds.
    fn rows(&self, most: usize) -> Result<Option<LaunchPlan>> {
        let (g, units) = (self.g, self.units());
        let mut strided = StridedDims::new(&self.shape, [&self.strides[0][..], &self.strides[2]]);
        let one = self.strides[1].iter().all(|&s| s == 0) && strided.strides.iter().all(|s| s.last() == Some(&1));
        if !one || strided.dims.last().is_some_and(|&n| n < NARROW) {
            return Ok(None);
        }
        let starts = [self.steps[0], g.step, g.x_layout.offset as isize, self.layout.offset as isize];
        let size = self.target.dtype.size();
        let unit = in_units(&mut strided, &[0, 1], WIDEST / size, &starts);
        let (columns, rank) = (self.shape.numel() / unit, strided.dims.len().max(1));
        let lanes = columns.next_power_of_two().min(self.group);
        // Groups for all units: of many destinations, else of some columns.
        let span = (g.size / (4 * units)).clamp(1, SPAN);
        let parts = g.size.div_ceil(span);
        let slabs = columns.div_ceil(lanes).min((2 * units).div_ceil(parts));
        // Each group reads all indices, from a cache: 2 ps an index.
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
        // Neighbours of the source or of the index, where these do not lie along the dim.
        let side_by_side = |k: usize| strided.strides[k].last() == Some(&1) && self.steps[k] != 1;
        let side = if side_by_side(0) || side_by_side(1) { SIDE } else { 1 };
        let tiles = self.shape.numel().div_ceil(side);
        let room = info.local_memory.saturating_sub(2 * PER * self.group + 64) / (4 + self.target.dtype.size());
        let most = TAGS.min(1 << room.max(side).ilog2());
        // What is written to is held in local memory where that is read by few groups, and most of it is written.
        let parts = (size * side).div_ceil(most);
        let held = parts <= HELD && self.count * 4 >= size;
        let parts = if held { parts } else { (2 * self.units() / tiles).clamp(1, size) };
        let span = size.div_ceil(parts);
        let tags = if held { (span * side).next_power_of_two() } else { most };
        Tiling { strided, side, tiles, parts: size.div_ceil(span), span, tags, held }
    }

    /// Where elements have an index each, or neighbours in memory one each.
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

//! Sorting on OpenCL: `kernels/sort.cl`. Blocks are sorted and then merged pairwise, with one launch for each round of merges. Long
//! lines are sorted by a radix sort with 8-bit digits, which on processors a work-item counts and moves for a tile.

use crate::backend::opencl::geometry::{
    LOCAL, STRIDED_DIMS, arguments, bits_type, declarable_local_memory, flag, group_of, group_size, index_type,
    is_wide, launch_free, words,
};
use crate::backend::opencl::kernels::{KernelKey, kernel};
use crate::backend::opencl::scan;
use crate::backend::problem::lines::Lines;
use crate::backend::problem::scan::Scan;
use crate::backend::problem::select::digits;
use crate::device::DeviceKind;
use crate::device::opencl::{Arg, ClDevice, Knob};
use crate::layout::collapse::StridedDims;
use crate::tensor::Layout;
use crate::{Compute, DType, Result, Tensor};

pub(crate) const KEYS: &str = include_str!("../../../kernels/key.cl");
const TEMPLATE: &str = include_str!("../../../kernels/sort.cl");

/// Elements that a work-item of a processor sorts. A power of four, so that after an even number of passes they are in the first buffer.
const SERIAL: usize = 1 << 12;
/// Elements that a group sorts in local memory by comparisons; with 64-bit keys and 32-bit indices they take 12 KiB.
const TILE: usize = 1 << 10;
/// The most tiles of a line that are merged: the radix sort is faster for longer lines.
const MAX_MERGED: usize = 4;

/// The kernel of a launch: sort blocks, merge two runs, or count and scatter the digits of a radix sort.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Blocks,
    Merge,
    Count,
    Scatter,
}

/// A buffer of keys, and one of the indices of their elements in the line.
struct Runs {
    keys: Tensor,
    at: Tensor,
}

#[derive(Clone, Copy)]
struct Step<'a> {
    stage: Stage,
    /// Whether it reads the input tensor.
    first: bool,
    /// Whether it writes the final results.
    last: bool,
    runs: Option<&'a [Runs; 2]>,
    counts: Option<&'a Tensor>,
    /// The length of the runs that are merged, or the lowest bit of the digit.
    number: usize,
}

struct SortLaunches<'a> {
    x: &'a Tensor,
    descending: bool,
    values: &'a Tensor,
    indices: &'a Tensor,
    /// The indices of the elements, where these are not their positions in the line.
    from: Option<&'a Tensor>,
    lines: &'a Lines,
    block: usize,
    tile: usize,
    /// Whether tiles are sorted by a radix sort.
    radix: bool,
    group: usize,
    /// The dtype of indices between launches.
    index_dtype: DType,
}

pub(crate) fn run(x: &Tensor, d: usize, descending: bool, values: &Tensor, indices: &Tensor) -> Result<()> {
    run_lines(x, &Lines::new(x, d), None, descending, values, indices)
}

/// Sorts lines of `x`, whose elements have the indices `from` if they are given. The results are `lines.inner` apart.
pub(crate) fn run_lines(
    x: &Tensor,
    lines: &Lines,
    from: Option<&Tensor>,
    descending: bool,
    values: &Tensor,
    indices: &Tensor,
) -> Result<()> {
    let device = x.cl_device()?;
    let n = lines.n;
    let cpu = device.info().kind == DeviceKind::Cpu;
    let index_dtype = if is_wide([n]) { DType::I64 } else { DType::U32 };
    let most = radix_tile(device, x.dtype).min(n.next_power_of_two());
    // A processor's work-items move whole tiles of long lines by their digits, a few for each unit.
    let radix = if cpu { n > MAX_MERGED * SERIAL } else { most > TILE };
    let tile = match (radix, cpu) {
        (true, true) => n.div_ceil(4 * device.info().compute_units).next_power_of_two().max(SERIAL),
        (true, false) => most,
        (false, true) => SERIAL,
        (false, false) => TILE * 4 / index_dtype.size(),
    };
    let block = if radix && cpu { tile } else { n.next_power_of_two().clamp(2, tile) };
    let group = group_size(device).min(tile / 2);
    let job = SortLaunches { x, descending, values, indices, from, lines, block, tile, radix, group, index_dtype };
    let whole = n <= block;
    let mut step = Step { stage: Stage::Blocks, first: true, last: whole, runs: None, counts: None, number: 0 };
    if whole && !cpu {
        return job.launch(device, step);
    }
    if radix && (cpu || n > MAX_MERGED * tile) {
        return job.radix_sort(device);
    }
    // On a processor sorting a block needs the buffers, even if the block is a whole line.
    let mut runs = job.runs()?;
    job.launch(device, Step { runs: Some(&runs), ..step })?;
    step.number = block;
    while step.number < n {
        runs.swap(0, 1);
        let last = 2 * step.number >= n;
        job.launch(device, Step { stage: Stage::Merge, first: false, last, runs: Some(&runs), ..step })?;
        step.number *= 2;
    }
    Ok(())
}

impl SortLaunches<'_> {
    fn runs(&self) -> Result<[Runs; 2]> {
        let key = if short(self.x.dtype) { DType::U32 } else { DType::I64 };
        let make = |dtype| Tensor::empty_like_shape(self.lines.count * self.lines.n, dtype, self.x.device());
        let one = || -> Result<Runs> { Ok(Runs { keys: make(key)?, at: make(self.index_dtype)? }) };
        Ok([one()?, one()?])
    }

    /// A least-significant-digit radix sort with 8-bit digits: histogram, prefix sum and scatter for each digit.
    fn radix_sort(&self, device: &'static ClDevice) -> Result<()> {
        let counted = [self.lines.count, 256 * self.lines.n.div_ceil(self.tile)];
        let empty = || Tensor::empty_like_shape(&counted[..], self.index_dtype, self.x.device());
        let (counts, sums) = (&empty()?, &empty()?);
        let [low, high] = digits(self.x.dtype);
        let (start, end) = (low / 8, high.div_ceil(8));
        let mut runs = if end - start > 1 { Some(self.runs()?) } else { None };
        for byte in start..end {
            let (first, last, number) = (byte == start, byte + 1 == end, 8 * byte);
            let step = Step { stage: Stage::Count, first, last, runs: runs.as_ref(), counts: Some(counts), number };
            self.launch(device, step)?;
            scan::run(Scan::Sum, counts, 1, sums, None)?;
            self.launch(device, Step { stage: Stage::Scatter, counts: Some(sums), ..step })?;
            runs.iter_mut().for_each(|runs| runs.swap(0, 1));
        }
        Ok(())
    }

    fn launch(&self, device: &'static ClDevice, step: Step<'_>) -> Result<()> {
        let (lines, stage) = (self.lines, step.stage);
        let blocks = lines.count * lines.n.div_ceil(self.block);
        let (global, local) = match (stage, device.info().kind) {
            (Stage::Merge, _) => (lines.count * lines.n, LOCAL),
            (_, DeviceKind::Cpu) => (blocks, if blocks >= 512 * device.info().compute_units { LOCAL } else { 1 }),
            _ => (blocks.div_ceil(self.tile / self.block) * self.group, self.group),
        };
        let wide = is_wide([lines.count * lines.n + self.tile + LOCAL, global]);
        let params = [
            self.x.dtype as u64,
            self.block as u64,
            self.index_dtype as u64,
            lines.rank() as u64,
            stage as u64,
            u64::from(wide)
                | u64::from(self.from.is_some()) << 1
                | u64::from(step.first) << 2
                | u64::from(step.last) << 3
                | u64::from(self.radix) << 4,
        ];
        let name = match stage {
            Stage::Merge => "sort_merge",
            Stage::Count => "sort_count",
            Stage::Blocks | Stage::Scatter if self.radix => "sort_tiles",
            Stage::Blocks | Stage::Scatter => "sort_blocks",
        };
        let kernel = kernel(device, KernelKey::new(name, &params), name, || self.source(step, wide))?;
        let words = words(&lines.strided);
        let (x, y, indices) = (self.x.device_view()?, self.values.device_view()?, self.indices.device_view()?);
        // `indices` is passed for the arguments that a launch does not use.
        let [from, to] = match step.runs {
            Some(runs) => runs.each_ref().map(|r| [&r.keys, &r.at]),
            None => [[self.indices; 2]; 2],
        };
        let runs = [from[0].device_view()?, from[1].device_view()?, to[0].device_view()?, to[1].device_view()?];
        let counts = step.counts.unwrap_or(self.indices).device_view()?;
        let from_indices = self.from.unwrap_or(self.indices).device_view()?;
        let [a, b, c, d] = &runs;
        let args = arguments(
            &[&x, &y, &indices, a, b, c, d, &counts, &from_indices],
            [
                Arg::Bytes(bytemuck::cast_slice(&words)),
                Arg::U64(lines.count as u64),
                Arg::U64(lines.n as u64),
                Arg::I64(lines.step as i64),
                Arg::U64(lines.inner as u64),
                Arg::U64(step.number as u64),
                Arg::U64(if self.descending { u64::MAX } else { 0 }),
            ],
        );
        match stage {
            Stage::Merge => launch_free(device, &kernel, &args, global),
            _ => device.launch(&kernel, &args, &[global], &[group_of(&kernel, local)]),
        }
    }

    fn source(&self, step: Step<'_>, wide: bool) -> String {
        let stage = ["BLOCKS", "MERGE", "COUNT", "SCATTER"][step.stage as usize];
        let bits = match step.stage {
            Stage::Blocks => digits(self.x.dtype).map(|bit| bit.to_string()),
            _ => ["(uint)run_".into(), "((uint)run_ + 8)".into()],
        };
        format!(
            "#define {stage}\n{}#define FROM_BIT {}\n#define TO_BIT {}\n{}#define INDEX_TYPE {}\n#define NK {}\n\
             #define IDX {}\n#define BLOCK {}\n#define TILE {}\n#define GROUP {}\n{}{}{STRIDED_DIMS}{KEYS}{TEMPLATE}",
            flag(self.radix, "RADIX"),
            bits[0],
            bits[1],
            keys_of(self.x.dtype),
            index_type(self.index_dtype == DType::I64),
            self.lines.rank(),
            index_type(wide),
            self.block,
            self.tile,
            self.group,
            flag(step.first, "FIRST"),
            flag(step.last, "FINAL") + &flag(self.from.is_some(), "FROM"),
        )
    }
}

/// The elements of the largest tile that a group can sort by radix in local memory.
fn radix_tile(device: &ClDevice, dtype: DType) -> usize {
    let (group, key) = (group_size(device), if short(dtype) { 4 } else { 8 });
    let capacity = declarable_local_memory(device);
    let fits = |tile: &usize| (tile * (key + 2) + 36 * group) * 33 / 32 + 256 * key.max(8) + 128 <= capacity;
    std::iter::successors(Some(group * device.tuned(Knob::SortItems)), |tile| Some(tile / 2))
        .find(|tile| *tile <= TILE || fits(tile))
        .unwrap_or(0)
}

/// Whether keys have 32 bits.
fn short(dtype: DType) -> bool {
    dtype.compute() == Compute::F32 || (dtype.compute() == Compute::I64 && dtype.size() <= 4)
}

/// The definitions that `kernels/key.cl` and the files after it need of an element type.
pub(crate) fn keys_of(dtype: DType) -> String {
    let compute = dtype.compute();
    let kind = if compute == Compute::I64 && short(dtype) { "I32".to_owned() } else { format!("{compute:?}") };
    format!(
        "#define A {dtype}\n#define V {}\n#define KEY_{kind}\n#define LOWEST {}\n",
        bits_type(dtype.size()),
        if dtype == DType::I32 { "0x80000000u" } else { "0" },
    )
}

/// Binary search of each value of `v` in its line of `x`. `lines` is the layout of the lines broadcast to the values' shape, and `step`
/// the stride along a line.
pub(crate) fn search(x: &Tensor, lines: &Layout, step: isize, v: &Tensor, right: bool, out: &Tensor) -> Result<()> {
    let device = out.cl_device()?;
    let strided = StridedDims::new(v.shape(), [&lines.strides[..], v.strides()]);
    let (rank, count) = (strided.dims.len().max(1), out.numel());
    let wide = is_wide([count + LOCAL]);
    let finds = out.dtype == DType::Bool;
    let params = [x.dtype as u64, rank as u64, u64::from(wide) | u64::from(right) << 1 | u64::from(finds) << 2];
    let kernel = kernel(device, KernelKey::new("search", &params), "search", || {
        let idx = index_type(wide);
        let flags = flag(right, "RIGHT") + &flag(finds, "FINDS");
        let a = x.dtype;
        format!("#define SEARCH\n#define A {a}\n#define NK {rank}\n#define IDX {idx}\n{flags}{STRIDED_DIMS}{TEMPLATE}")
    })?;
    let words = words(&strided);
    let n = x.shape().dims().last().copied().unwrap_or(1);
    // An empty tensor has no buffer and is not read, so that another one can stand in for it.
    let (x, v, y) = (if n == 0 { out } else { x }.device_view()?, v.device_view()?, out.device_view()?);
    let words = Arg::Bytes(bytemuck::cast_slice(&words));
    let others = [words, Arg::U64(count as u64), Arg::U64(n as u64), Arg::I64(step as i64)];
    let args = arguments(&[&x, &v, &y], others);
    launch_free(device, &kernel, &args, count)
}

//! Sorting on OpenCL: `kernels/sort.cl`. Blocks first, then launches that each make one run of two.

use crate::backend::opencl::geometry::{
    LOCAL, STRIDED_DIMS, arguments, bits_type, flag, group_of, group_size, index_type, is_wide, launch_free, words,
};
use crate::backend::opencl::kernels::{KernelKey, kernel};
use crate::backend::problem::lines::Lines;
use crate::device::DeviceKind;
use crate::device::opencl::{Arg, ClDevice};
use crate::layout::collapse::StridedDims;
use crate::tensor::Layout;
use crate::{Compute, DType, Result, Tensor};

const KEYS: &str = include_str!("../../../kernels/key.cl");
const TEMPLATE: &str = include_str!("../../../kernels/sort.cl");

/// Elements that a processor's work-item sorts by itself: a power of four, so that they end up where they began.
const SERIAL: usize = 1 << 12;
/// Elements that a group sorts in local memory by comparisons, where their indices have 32 bits: with keys of 64 bits 12 KiB.
const TILE: usize = 1 << 10;
/// Elements of a work-item, in registers, where a group sorts by digits.
const ITEMS: usize = 16;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Blocks,
    Merge,
}

/// Keys and the indices they came from.
struct Runs {
    keys: Tensor,
    at: Tensor,
}

struct SortLaunches<'a> {
    x: &'a Tensor,
    descending: bool,
    values: &'a Tensor,
    indices: &'a Tensor,
    lines: &'a Lines,
    block: usize,
    tile: usize,
    /// Whether blocks are sorted by their digits.
    radix: bool,
    group: usize,
    /// Type of indices.
    place: DType,
}

pub(crate) fn run(x: &Tensor, d: usize, descending: bool, values: &Tensor, indices: &Tensor) -> Result<()> {
    let device = x.cl_device()?;
    let lines = &Lines::new(x, d);
    let n = lines.n;
    let cpu = device.info().kind == DeviceKind::Cpu;
    let place = if is_wide([n]) { DType::I64 } else { DType::U32 };
    let most = radix_tile(device, x.dtype).min(n.next_power_of_two());
    let radix = !cpu && most > TILE;
    let tile = match radix {
        true => most,
        false if cpu => SERIAL,
        false => TILE * 4 / place.size(),
    };
    let block = n.next_power_of_two().clamp(2, tile);
    let group = group_size(device).min(tile / 2);
    let job = SortLaunches { x, descending, values, indices, lines, block, tile, radix, group, place };
    let runs = || -> Result<Runs> {
        let key = if short(x.dtype) { DType::U32 } else { DType::I64 };
        let count = lines.count * n;
        let make = |dtype| Tensor::empty_like_shape(count, dtype, x.device());
        Ok(Runs { keys: make(key)?, at: make(place)? })
    };
    if n <= block && !cpu {
        return job.launch(device, Stage::Blocks, true, None, 0);
    }
    let (mut from, mut to) = (runs()?, runs()?);
    job.launch(device, Stage::Blocks, n <= block, Some([&from, &to]), 0)?;
    let mut run = block;
    while run < n {
        job.launch(device, Stage::Merge, 2 * run >= n, Some([&from, &to]), run)?;
        std::mem::swap(&mut from, &mut to);
        run *= 2;
    }
    Ok(())
}

impl SortLaunches<'_> {
    /// `last`: it writes the results.
    fn launch(
        &self,
        device: &'static ClDevice,
        stage: Stage,
        last: bool,
        runs: Option<[&Runs; 2]>,
        run: usize,
    ) -> Result<()> {
        let lines = self.lines;
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
            self.place as u64,
            lines.rank() as u64,
            stage as u64,
            u64::from(wide) | u64::from(self.descending) << 1 | u64::from(last) << 2 | u64::from(self.radix) << 3,
        ];
        let name = if stage == Stage::Blocks { "sort_blocks" } else { "sort_merge" };
        let kernel = kernel(device, KernelKey::new(name, &params), name, || self.source(stage, last, wide))?;
        let words = words(&lines.strided);
        let (x, y, indices) = (self.x.device_view()?, self.values.device_view()?, self.indices.device_view()?);
        // Without runs nothing is read or written there.
        let [from, to] = match runs {
            Some(runs) => runs.map(|r| [&r.keys, &r.at]),
            None => [[self.indices; 2]; 2],
        };
        let runs = [from[0].device_view()?, from[1].device_view()?, to[0].device_view()?, to[1].device_view()?];
        let [a, b, c, d] = &runs;
        let args = arguments(
            &[&x, &y, &indices, a, b, c, d],
            [
                Arg::Bytes(bytemuck::cast_slice(&words)),
                Arg::U64(lines.count as u64),
                Arg::U64(lines.n as u64),
                Arg::I64(lines.step as i64),
                Arg::U64(lines.inner as u64),
                Arg::U64(run as u64),
            ],
        );
        match stage {
            Stage::Merge => launch_free(device, &kernel, &args, global),
            _ => device.launch(&kernel, &args, &[global], &[group_of(&kernel, local)]),
        }
    }

    fn source(&self, stage: Stage, last: bool, wide: bool) -> String {
        let [low, high] = digits(self.x.dtype);
        format!(
            "#define {}\n{}#define FROM_BIT {low}\n#define TO_BIT {high}\n{}#define PLACE {}\n#define NK {}\n#define IDX {}\n\
             #define BLOCK {}\n#define TILE {}\n#define GROUP {}\n{}{STRIDED_DIMS}{KEYS}{TEMPLATE}",
            if stage == Stage::Blocks { "BLOCKS" } else { "MERGE" },
            flag(self.radix, "RADIX"),
            keys_of(self.x.dtype, self.descending),
            if self.place == DType::U32 { "uint" } else { "ulong" },
            self.lines.rank(),
            index_type(wide),
            self.block,
            self.tile,
            self.group,
            flag(last, "FINAL"),
        )
    }
}

/// Elements of the largest block that a group can sort by digits: what it has room for in local memory.
fn radix_tile(device: &ClDevice, dtype: DType) -> usize {
    let (group, key) = (group_size(device), if short(dtype) { 4 } else { 8 });
    let fits = |tile: &usize| (tile * (key + 2) + 36 * group) * 33 / 32 + 128 <= device.info().local_memory;
    std::iter::successors(Some(group * ITEMS), |tile| Some(tile / 2))
        .find(|tile| *tile <= TILE || fits(tile))
        .unwrap_or(0)
}

/// The bits in which keys of a dtype differ, in fours. Of halves, which are widened, the lowest are all zeros or all ones as the sign says.
fn digits(dtype: DType) -> [usize; 2] {
    match dtype {
        DType::F16 => [12, 32],
        DType::BF16 => [16, 32],
        DType::Bool => [0, 4],
        DType::U8 => [0, 8],
        _ if short(dtype) => [0, 32],
        _ => [0, 64],
    }
}

/// Whether keys have 32 bits.
fn short(dtype: DType) -> bool {
    dtype.compute() == Compute::F32 || (dtype.compute() == Compute::I64 && dtype.size() <= 4)
}

/// What `kernels/key.cl` and those that come after it want to know of elements.
pub(crate) fn keys_of(dtype: DType, descending: bool) -> String {
    let compute = dtype.compute();
    let kind = if compute == Compute::I64 && short(dtype) { "I32".to_owned() } else { format!("{compute:?}") };
    format!(
        "#define A {dtype}\n#define V {}\n#define KEY_{kind}\n#define LOWEST {}\n{}",
        bits_type(dtype.size()),
        if dtype == DType::I32 { "0x80000000u" } else { "0" },
        if descending { "#define DESCENDING\n" } else { "" },
    )
}

/// Walks the lines of `x` (over the values' shape, with `step` along a line) and the values together.
pub(crate) fn search(x: &Tensor, lines: &Layout, step: isize, v: &Tensor, right: bool, out: &Tensor) -> Result<()> {
    let device = out.cl_device()?;
    let strided = StridedDims::new(v.shape(), [&lines.strides[..], v.strides()]);
    let (rank, count) = (strided.dims.len().max(1), out.numel());
    let wide = is_wide([count + LOCAL]);
    let params = [x.dtype as u64, rank as u64, u64::from(wide) | u64::from(right) << 1];
    let kernel = kernel(device, KernelKey::new("search", &params), "search", || {
        let idx = index_type(wide);
        let right = if right { "#define RIGHT\n" } else { "" };
        format!(
            "#define SEARCH\n#define A {}\n#define NK {rank}\n#define IDX {idx}\n{right}{STRIDED_DIMS}{TEMPLATE}",
            x.dtype
        )
    })?;
    let words = words(&strided);
    let n = x.shape().dims().last().copied().unwrap_or(1);
    // What has no elements has no memory, and is not read.
    let (x, v, y) = (if n == 0 { out } else { x }.device_view()?, v.device_view()?, out.device_view()?);
    let words = Arg::Bytes(bytemuck::cast_slice(&words));
    let others = [words, Arg::U64(count as u64), Arg::U64(n as u64), Arg::I64(step as i64)];
    let args = arguments(&[&x, &v, &y], others);
    launch_free(device, &kernel, &args, count)
}

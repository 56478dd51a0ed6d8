//! Sorting on OpenCL: `kernels/sort.cl`. Blocks are sorted and then merged pairwise, with one launch for each round of merges. Long lines
//! are sorted by a radix sort with 8-bit digits. On CPUs, each work-item counts and moves the digits of one tile.

use crate::backend::opencl::prelude::*;
use crate::backend::opencl::scan;

pub(crate) const KEYS: &str = include_str!("../../../kernels/key.cl");
const TEMPLATE: &str = include_str!("../../../kernels/sort.cl");

/// The number of elements that a CPU work-item sorts. It is a power of four, so that an even number of passes ends in the first buffer.
const CPU_BLOCK_LEN: usize = 1 << 12;
/// The number of elements that a work-group sorts in local memory by comparisons. With 64-bit keys and 32-bit indices, they take 12 KiB.
const COMPARISON_TILE_LEN: usize = 1 << 10;
/// The maximum number of tiles of a line that are merged. Longer lines are sorted faster by the radix sort.
const MAX_MERGED_TILES: usize = 4;

/// The kernel that a launch runs: sort blocks, merge two runs, or count and scatter the digits of a radix sort.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SortStage {
    Blocks,
    Merge,
    Count,
    Scatter,
}

/// A buffer of keys, and a buffer of the indices that the keys' elements have in the line.
struct SortBuffers {
    keys: Tensor,
    at: Tensor,
}

/// One launch of a sort.
#[derive(Clone, Copy)]
struct SortStep<'a> {
    stage: SortStage,
    /// Whether the launch reads the input tensor.
    first: bool,
    /// Whether the launch writes the final results.
    last: bool,
    runs: Option<&'a [SortBuffers; 2]>,
    counts: Option<&'a Tensor>,
    /// The length of the runs that are merged, or the lowest bit of the radix digit.
    number: usize,
}

/// The operands and sizes that the launches of a sort share.
struct SortLaunches<'a> {
    x: &'a Tensor,
    descending: bool,
    values: &'a Tensor,
    indices: &'a Tensor,
    /// The indices of the elements; `None` if an element's index is its position in the line.
    from: Option<&'a Tensor>,
    lines: &'a Lines,
    block: usize,
    tile: usize,
    /// Whether tiles are sorted by radix instead of by comparisons.
    radix: bool,
    group: usize,
    /// The dtype in which indices are stored between launches.
    index_dtype: DType,
}

pub(crate) fn sort(x: &Tensor, d: usize, descending: bool, values: &Tensor, indices: &Tensor) -> Result<()> {
    sort_lines(x, &Lines::new(x, d), None, descending, values, indices)
}

/// Sorts lines of `x`. `from` holds the indices of the elements; with `None`, an element's index is its position in the line. In the results,
/// adjacent elements of a line are `lines.inner` elements apart.
pub(crate) fn sort_lines(
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
    let index_dtype = if needs_64_bit([n]) { DType::I64 } else { DType::U32 };
    let most = radix_tile(device, x.dtype).min(n.next_power_of_two());
    // On a CPU, each work-item moves a whole tile of a long line by its digits. Each compute unit gets a few tiles.
    let radix = if cpu { n > MAX_MERGED_TILES * CPU_BLOCK_LEN } else { most > COMPARISON_TILE_LEN };
    let tile = match (radix, cpu) {
        (true, true) => n.div_ceil(4 * device.info().compute_units).next_power_of_two().max(CPU_BLOCK_LEN),
        (true, false) => most,
        (false, true) => CPU_BLOCK_LEN,
        (false, false) => COMPARISON_TILE_LEN * 4 / index_dtype.size(),
    };
    let block = if radix && cpu { tile } else { n.next_power_of_two().clamp(2, tile) };
    let group = default_group_size(device).min(tile / 2);
    let job = SortLaunches { x, descending, values, indices, from, lines, block, tile, radix, group, index_dtype };
    let whole = n <= block;
    let mut step = SortStep { stage: SortStage::Blocks, first: true, last: whole, runs: None, counts: None, number: 0 };
    if whole && !cpu {
        return job.launch(device, step);
    }
    if radix && (cpu || n > MAX_MERGED_TILES * tile) {
        return job.radix_sort(device);
    }
    // On a CPU, sorting a block needs the buffers even if the block is a whole line.
    let mut runs = job.make_buffers()?;
    job.launch(device, SortStep { runs: Some(&runs), ..step })?;
    step.number = block;
    while step.number < n {
        runs.swap(0, 1);
        let last = 2 * step.number >= n;
        job.launch(device, SortStep { stage: SortStage::Merge, first: false, last, runs: Some(&runs), ..step })?;
        step.number *= 2;
    }
    Ok(())
}

impl SortLaunches<'_> {
    fn make_buffers(&self) -> Result<[SortBuffers; 2]> {
        let key = if has_32_bit_keys(self.x.dtype) { DType::U32 } else { DType::I64 };
        let make = |dtype| Tensor::empty_with_shape(self.lines.count * self.lines.n, dtype, self.x.device());
        let one = || -> Result<SortBuffers> { Ok(SortBuffers { keys: make(key)?, at: make(self.index_dtype)? }) };
        Ok([one()?, one()?])
    }

    /// Sorts by a radix sort, least significant digit first, with 8-bit digits. Each digit takes a histogram, a prefix sum and a scatter.
    fn radix_sort(&self, device: &'static ClDevice) -> Result<()> {
        let counted = [self.lines.count, 256 * self.lines.n.div_ceil(self.tile)];
        let empty = || Tensor::empty_with_shape(&counted[..], self.index_dtype, self.x.device());
        let (counts, sums) = (&empty()?, &empty()?);
        let [low, high] = key_bits(self.x.dtype);
        let (start, end) = (low / 8, high.div_ceil(8));
        let mut runs = if end - start > 1 { Some(self.make_buffers()?) } else { None };
        for byte in start..end {
            let (first, last, number) = (byte == start, byte + 1 == end, 8 * byte);
            let step =
                SortStep { stage: SortStage::Count, first, last, runs: runs.as_ref(), counts: Some(counts), number };
            self.launch(device, step)?;
            scan::launch_scan(&RunningReduction { scan: Scan::Sum, x: counts, d: 1, values: sums, indices: None })?;
            self.launch(device, SortStep { stage: SortStage::Scatter, counts: Some(sums), ..step })?;
            runs.iter_mut().for_each(|runs| runs.swap(0, 1));
        }
        Ok(())
    }

    fn launch(&self, device: &'static ClDevice, step: SortStep<'_>) -> Result<()> {
        let (lines, stage) = (self.lines, step.stage);
        let blocks = lines.count * lines.n.div_ceil(self.block);
        let (global, local) = match (stage, device.info().kind) {
            (SortStage::Merge, _) => (lines.count * lines.n, DEFAULT_GROUP_SIZE),
            (_, DeviceKind::Cpu) => {
                (blocks, if blocks >= 512 * device.info().compute_units { DEFAULT_GROUP_SIZE } else { 1 })
            }
            _ => (blocks.div_ceil(self.tile / self.block) * self.group, self.group),
        };
        let wide = needs_64_bit([lines.count * lines.n + self.tile + DEFAULT_GROUP_SIZE, global]);
        let name = match stage {
            SortStage::Merge => "sort_merge",
            SortStage::Count => "sort_count",
            SortStage::Blocks | SortStage::Scatter if self.radix => "sort_tiles",
            SortStage::Blocks | SortStage::Scatter => "sort_blocks",
        };
        let config = kernel_config! {
            "" => ["BLOCKS", "MERGE", "COUNT", "SCATTER"][stage as usize], "RADIX" => self.radix,
            "" => DigitBits(if stage == SortStage::Blocks { Some(key_bits(self.x.dtype)) } else { None }),
            "" => KeyType(self.x.dtype), "INDEX_TYPE" => index_type(self.index_dtype == DType::I64),
            "NK" => lines.rank(), "IDX" => index_type(wide), "BLOCK" => self.block, "TILE" => self.tile,
            "GROUP" => self.group, "FIRST" => step.first, "FINAL" => step.last, "FROM" => self.from.is_some(),
        };
        let kernel = config.kernel(device, name, name, &[STRIDED_DIMS, KEYS, TEMPLATE])?;
        let words = dims_words(&lines.strided);
        let (x, y, indices) = (self.x.device_view()?, self.values.device_view()?, self.indices.device_view()?);
        // Arguments that a launch does not use get the tensor `indices`.
        let [from, to] = match step.runs {
            Some(runs) => runs.each_ref().map(|r| [&r.keys, &r.at]),
            None => [[self.indices; 2]; 2],
        };
        let runs = [from[0].device_view()?, from[1].device_view()?, to[0].device_view()?, to[1].device_view()?];
        let counts = step.counts.unwrap_or(self.indices).device_view()?;
        let from_indices = self.from.unwrap_or(self.indices).device_view()?;
        let [a, b, c, d] = &runs;
        let args = args![
            x, y, indices, a, b, c, d, counts, from_indices; &words[..], lines.count, lines.n, lines.step, lines.inner,
            step.number, if self.descending { u64::MAX } else { 0 }
        ];
        match stage {
            SortStage::Merge => launch_tuned(device, &kernel, &args, global),
            _ => device.launch(&kernel, &args, &[global], &[clamp_group_size(&kernel, local)]),
        }
    }
}

/// Returns the number of elements of the largest tile that a work-group can sort by radix in local memory.
fn radix_tile(device: &ClDevice, dtype: DType) -> usize {
    let (group, key) = (default_group_size(device), if has_32_bit_keys(dtype) { 4 } else { 8 });
    let capacity = declarable_local_memory(device);
    let fits = |tile: &usize| (tile * (key + 2) + 36 * group) * 33 / 32 + 256 * key.max(8) + 128 <= capacity;
    std::iter::successors(Some(group * device.tuned(TuningParameter::SortItems)), |tile| Some(tile / 2))
        .find(|tile| *tile <= COMPARISON_TILE_LEN || fits(tile))
        .unwrap_or(0)
}

/// True if the sort keys of a dtype have 32 bits, otherwise 64.
fn has_32_bit_keys(dtype: DType) -> bool {
    dtype.compute() == Compute::F32 || (dtype.compute() == Compute::I64 && dtype.size() <= 4)
}

/// The element type, as macros for `kernels/key.cl` and the templates after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct KeyType(pub(super) DType);

impl Define for KeyType {
    fn define(&self, _: &str, out: &mut String) {
        let (dtype, compute) = (self.0, self.0.compute());
        dtype.define("A", out);
        bits_type(dtype.size()).define("V", out);
        let is_narrow_integer = compute == Compute::I64 && has_32_bit_keys(dtype);
        let kind = if is_narrow_integer { "I32".to_owned() } else { format!("{compute:?}") };
        let lowest = match dtype {
            DType::I32 => "0x80000000u",
            DType::I16 => "0xffff8000u",
            DType::I8 => "0xffffff80u",
            _ => "0",
        };
        out.push_str(&format!("#define KEY_{kind}\n#define LOWEST {lowest}\n"));
    }
}

/// The bits of keys that a launch sorts by: from the first bit to before the second; with `None`, the byte that begins at the bit given as an argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct DigitBits(Option<[usize; 2]>);

impl Define for DigitBits {
    fn define(&self, _: &str, out: &mut String) {
        let [from, to] = match self.0 {
            Some(bits) => bits.map(|bit| bit.to_string()),
            None => ["(uint)run_".into(), "((uint)run_ + 8)".into()],
        };
        out.push_str(&format!("#define FROM_BIT {from}\n#define TO_BIT {to}\n"));
    }
}

/// Finds the insertion index of each value in its line by binary search.
pub(crate) fn searchsorted(search: &Search) -> Result<()> {
    let &Search { sorted: x, lines, step, values: v, right, out } = search;
    let device = out.cl_device()?;
    let strided = StridedDims::new(v.shape(), [&lines.strides[..], v.strides()]);
    let (rank, count) = (strided.dims.len().max(1), out.numel());
    let wide = needs_64_bit([count + DEFAULT_GROUP_SIZE]);
    let returns_found = out.dtype == DType::Bool;
    let config = kernel_config! {
        "A" => x.dtype, "NK" => rank, "IDX" => index_type(wide), "RIGHT" => right, "FINDS" => returns_found,
    };
    let kernel = config.kernel(device, "search", "search", &["#define SEARCH\n", STRIDED_DIMS, TEMPLATE])?;
    let words = dims_words(&strided);
    let n = x.shape().dims().last().copied().unwrap_or(1);
    // An empty `x` has no buffer and is never read, so the buffer of `out` is passed instead.
    let (x, v, y) = (if n == 0 { out } else { x }.device_view()?, v.device_view()?, out.device_view()?);
    let args = args![x, v, y; &words[..], count, n, step];
    launch_tuned(device, &kernel, &args, count)
}

//! Elements of quantised weights on OpenCL devices, and products with few rows: `kernels/quantized.cl`, `kernels/gemm_quantized.cl`.

use crate::backend::opencl::gemm::{ChosenKernel, GemmKernel, size_class, uses_cpu_kernels};
use crate::backend::opencl::gemm_mma::SplitK;
use crate::backend::opencl::prelude::*;
use crate::device::opencl::index_fault;
use crate::dtype::quant::{GroupOffset, QuantFormat};

const BLOCKS: &str = include_str!("../../../kernels/quantized.cl");
/// The template of products, which follows `kernels/gemm.cl`.
pub(crate) const TEMPLATE: &str = concat!(
    include_str!("../../../kernels/quantized.cl"),
    include_str!("../../../kernels/fold.cl"),
    include_str!("../../../kernels/gemm_quantized.cl")
);

/// The maximum number of rows of a product that reads the packed bytes. For more rows, dequantised strips are faster.
const MAX_ROWS: usize = 8;
/// The maximum number of columns of a work-item, for one row of the left matrix and for several. More columns read the left matrix less often.
const MAX_COLUMNS: [usize; 2] = [2, 4];
/// The maximum and minimum number of work-items that share a column. Adjacent work-items read adjacent chunks, and the four chunks of half a block of
/// `Q6K` are staged together.
const LANES: [usize; 2] = [32, 4];
/// The maximum work-group size.
const MAX_THREADS: usize = 256;
/// The maximum size in bytes of the staged rows of the left matrix, so that a compute unit has memory for several work-groups.
const MAX_STAGE_BYTES: usize = 20 << 10;
/// The size of a staged element in bytes, with its part of the padding.
const STAGED_BYTES: [usize; 2] = [9, 2]; // 4 * 36 / 32
/// The minimum number of parts of k, as for [`Thin`](crate::backend::opencl::gemm_thin::Thin).
const MIN_PARTS: usize = 4;

/// The blocks of a weight, as kernels are compiled for them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct BlockConfig {
    format: QuantFormat,
    /// The number of elements of a block.
    len: usize,
    /// Whether the weight begins at a multiple of 16 bytes.
    aligned: bool,
}

impl BlockConfig {
    fn new(weight: &PackedRows) -> BlockConfig {
        let aligned = weight.bytes.layout.offset.is_multiple_of(MAX_VECTOR_BYTES);
        BlockConfig { format: weight.format, len: weight.format.block_len(weight.columns), aligned }
    }

    /// Returns the number of elements in 16 bytes of the first field.
    fn chunk_len(self) -> usize {
        16 * self.len / self.format.planes(self.len)[0].bytes
    }
}

impl KernelConfig for BlockConfig {
    fn write_defines(&self, out: &mut String) {
        let (planes, chunk) = (self.format.planes(self.len), self.chunk_len());
        let (name, offset) = match self.format {
            QuantFormat::Grouped { bits, offset, .. } => (format!("G{bits}"), offset),
            format => (format.to_string().to_uppercase(), GroupOffset::None),
        };
        let offset = ["", "#define ZERO\n", "#define MIN\n"][offset as usize];
        let (len, per, runs, head) = (self.len, self.len / chunk, chunk / 16, planes[1].bytes);
        *out += &format!("#define FORMAT_{name}\n{offset}#define BLOCK {len}\n#define PER {per}\n");
        *out += &format!("#define RUNS {runs}\n#define HEAD {head}\n{}", define_if(!self.aligned, "UNALIGNED"));
        for (i, plane) in planes.iter().enumerate() {
            let (before, bytes) = (plane.before, plane.bytes);
            *out += &format!("#define FIELD{i}(b) (w + (ulong)n * {before} + (ulong)(b) * {bytes})\n");
        }
    }
}

/// Returns the number of blocks of a whole weight, or `None` if the numbers of its 16 elements do not fit in 32 bits.
fn count_blocks(weight: &PackedRows) -> Option<usize> {
    let sixteens = weight.total_rows().checked_mul(weight.columns)? / 16;
    u32::try_from(sixteens).is_ok().then(|| weight.total_rows() * weight.row_blocks())
}

/// Writes the elements of rows, converted from f32, to `out`.
pub(crate) fn dequantize(d: &Dequantize, out: &Tensor) -> Result<()> {
    let Dequantize { op, weight, index } = *d;
    let tensors: SmallVec<[&Tensor; 3]> = [&weight.bytes, out].into_iter().chain(index).collect();
    let blocks = BlockConfig::new(weight);
    let mut numbers = hashed_values(&blocks);
    numbers.extend([weight.columns, weight.rows.start, weight.rows.len()].map(|n| n as u64));
    numbers.push(static_id(op.as_ptr()));
    let key = Key { kind: OpKind::Dequantize, numbers: &numbers, exprs: &[], tensors: &tensors };
    let entry = launch_cache::launch_cached(&key, Params::default(), || {
        let device = out.cl_device()?;
        let Some(n) = count_blocks(weight) else {
            return Err(Error::invalid(op, "a weight of 2^36 elements or more"));
        };
        let chunks = weight.columns / blocks.chunk_len();
        let count = out.shape().dims()[0] * chunks;
        let wide = out.layout.offset.is_multiple_of(MAX_VECTOR_BYTES);
        let config = kernel_config! {
            "" => blocks, "A" => out.dtype, "IDX" => index_type(needs_64_bit([count])), "INDEX" => index.map(|t| t.dtype),
            "WIDE" => wide,
        };
        let source = ["#define DEQUANTIZE\n", STRIDED_DIMS, BLOCKS];
        let kernel = config.kernel(device, "dequantize", "dequantize", &source)?;
        let local = tuned_group_size(device, &kernel, count, DEFAULT_GROUP_SIZE);
        let mut launch = KernelLaunch::new(kernel, count, local);
        launch.push_tensor(0);
        launch.push_tensor(1);
        launch.push_fixed(args![; n as u32, chunks as u32, count, weight.rows.start]);
        if index.is_some() {
            launch.push_tensor(2);
            launch.push(Argument::Faults);
            launch.push_fixed(args![; index_fault(op), weight.rows.len()]);
        }
        let plan = LaunchPlan::single(device, launch);
        Ok(if index.is_some() { plan.with_index_check(2) } else { plan })
    });
    entry.map(drop)
}

/// Computes a product with few rows, in one launch for each part of the weight. Returns false for more rows.
pub(crate) fn multiply(g: &QuantizedGemm, outs: &[Tensor]) -> Result<bool> {
    let m = g.x.shape().dims()[0];
    if m > MAX_ROWS || g.parts.iter().any(|part| count_blocks(part).is_none()) {
        return Ok(false);
    }
    let copied;
    let x = if g.x.strides()[1] == 1 {
        g.x
    } else {
        copied = g.x.contiguous()?;
        &copied
    };
    let (shape, mut first) = (outs[0].shape(), 0);
    let others: SmallVec<[&Tensor; 4]> = outs.iter().chain(g.extras.iter().copied()).collect();
    for part in g.parts.iter().filter(|part| !part.rows.is_empty()) {
        let columns = |t: &&Tensor| -> Result<Tensor> {
            let all = t.layout.broadcast_to(shape);
            Ok(t.with_layout(all.narrow(g.op, 1, first, part.rows.len())?))
        };
        let others = others.iter().map(columns).collect::<Result<SmallVec<[Tensor; 4]>>>()?;
        let tensors: SmallVec<[&Tensor; 6]> = [x, &part.bytes].into_iter().chain(&others).collect();
        let cpu = uses_cpu_kernels(x.cl_device()?);
        let mut numbers = hashed_values(&BlockConfig::new(part));
        numbers.extend([outs.len() as u64, part.rows.start as u64, cpu.into()]);
        let key = Key { kind: OpKind::Quantized, numbers: &numbers, exprs: g.epilogue, tensors: &tensors };
        let prepare = || make_plan(g.epilogue, part, &tensors, outs.len());
        launch_cache::launch_cached(&key, Params::from_scalars(g.scalars), prepare)?;
        first += part.rows.len();
    }
    Ok(true)
}

/// Makes the launch plan of one part. `operands` are the left matrix, the weight's bytes, the results and the extras.
fn make_plan(epilogue: &[Expr], weight: &PackedRows, operands: &[&Tensor], outs: usize) -> Result<LaunchPlan> {
    let device = operands[0].cl_device()?;
    let (shape, blocks) = (operands[2].shape(), weight.total_rows() * weight.row_blocks());
    let right = Layout::contiguous([weight.columns, weight.rows.len()].into());
    let others: SmallVec<[&Layout; 4]> = operands[2..].iter().map(|t| &t.layout).collect();
    let mut plan = GemmPlan::new(&operands[0].layout, &right, shape, &others);
    // The kernel reads the weight's place in the fields of the right matrix's strides.
    (plan.b.row, plan.b.col) = (weight.rows.start as isize, blocks as isize);
    let variant = GemmKernel::Quantized(Packed::choose(&plan, BlockConfig::new(weight), device));
    ChosenKernel {
        plan,
        variant,
        order: [0, 1],
        operands,
        outs,
        epilogue,
        compute: Compute::F32,
        sums: None,
        has_sums_tensor: false,
        windows: &[],
    }
    .make_plan(device)
}

/// A kernel of `kernels/gemm_quantized.cl`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Packed {
    blocks: BlockConfig,
    rows: usize,
    /// The number of columns of a work-item.
    columns: usize,
    /// The number of work-items that share a column.
    lanes: usize,
    threads: usize,
    /// The number of elements of a row of the left matrix that are staged at once; 0 for the kernel for CPUs.
    stage: usize,
    /// The parts of k, each computed by a different work-group (split-K).
    pub(crate) parts: AtLaunch<SplitK>,
}

impl Packed {
    fn choose(plan: &GemmPlan, blocks: BlockConfig, device: &ClDevice) -> Packed {
        let (rows, parts) = (plan.m, AtLaunch(SplitK { count: 1, depth: plan.k }));
        if uses_cpu_kernels(device) {
            // Eight vectors of sums stay in registers.
            let columns = (8 / rows).clamp(1, MAX_COLUMNS[1]);
            return Packed { blocks, rows, columns, lanes: 1, threads: 1, stage: 0, parts };
        }
        let (units, [most, least], chunk) = (device.info().compute_units.max(1), LANES, blocks.chunk_len());
        let threads = max_group_size(device).min(MAX_THREADS);
        let stage =
            (declarable_local_memory(device) / 2).min(MAX_STAGE_BYTES) * STAGED_BYTES[1] / STAGED_BYTES[0] / rows;
        let mut lanes = most.min(threads);
        while lanes > least && (2 * lanes * chunk > plan.k || lanes * chunk > stage) {
            lanes /= 2;
        }
        let unit = lanes * chunk;
        let stage = (stage / unit).clamp(1, plan.k.div_ceil(unit)) * unit;
        let columns = MAX_COLUMNS[usize::from(rows > 1)];
        let mut packed = Packed { blocks, rows, columns, lanes, threads, stage, parts };
        while packed.columns > 1 && packed.tiles(plan) * 2 < units * 3 {
            packed.columns /= 2;
        }
        let size = size_class(plan, Compute::F32);
        let shared = packed.split_k(plan, units * device.tuned_for(TuningParameter::ThinGroups, size));
        if shared.count > 1 && device.has_fence() {
            packed.parts = AtLaunch(shared);
        }
        packed
    }

    fn tiles(&self, plan: &GemmPlan) -> usize {
        plan.n.div_ceil(self.tile().1)
    }

    /// Splits k into parts for `groups` work-groups. In a part, every lane has at least two chunks.
    fn split_k(&self, plan: &GemmPlan, groups: usize) -> SplitK {
        let (tiles, unit) = (self.tiles(plan), self.lanes * self.blocks.chunk_len());
        let wanted = if tiles <= SplitK::MAX_TILES { groups / tiles } else { 1 };
        let depth = plan.k.div_ceil(wanted.max(1)).next_multiple_of(unit).max(2 * unit);
        match plan.k.div_ceil(depth) {
            count @ MIN_PARTS.. => SplitK { count, depth },
            _ => self.parts.0,
        }
    }

    /// Returns the rows and columns of the result that one work-group computes.
    pub(crate) fn tile(self) -> (usize, usize) {
        (self.rows, self.threads / self.lanes * self.columns)
    }

    pub(crate) fn threads(self) -> usize {
        self.threads
    }

    pub(crate) fn defines(self) -> String {
        let Packed { blocks, rows, columns, lanes, threads, stage, .. } = self;
        let mut defines = format!("#define MR {rows}\n#define NR {columns}\n{}", define_if(stage == 0, "SERIAL"));
        defines += &format!("#define LANES {lanes}\n#define THREADS {threads}\n#define STAGE {stage}\n");
        blocks.write_defines(&mut defines);
        defines
    }
}

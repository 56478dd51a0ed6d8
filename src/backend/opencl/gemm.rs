//! Matrix products on OpenCL: chooses the kernel and its tile sizes for a device and a problem, and prepares the launch.

mod aligned;
mod source;
#[cfg(test)]
pub(crate) mod tests;

use crate::backend::opencl::gemm::source::GemmConfig;
use crate::backend::opencl::gemm_mma::{BufferMatrix, Mma, SplitK, WindowsOperand};
use crate::backend::opencl::gemm_panel::Panel;
use crate::backend::opencl::gemm_thin::Thin;
use crate::backend::opencl::image;
use crate::backend::opencl::launch_plan::DeferredWord;
use crate::backend::opencl::prelude::*;
use crate::backend::opencl::quantized::Packed;

/// The work-group size of the tiled kernel.
const TILED_GROUP_SIZE: usize = 256;
/// The number of contiguous results that a work-item of the tiled kernel stores at once.
const TILED_RESULTS_PER_STORE: usize = 4;

/// A kernel and its tile sizes. See `kernels/gemm.cl` for Tiled and Dot, [`Mma`], [`Panel`], [`Thin`] and [`Packed`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum GemmKernel {
    Tiled { m: usize, n: usize, k: usize, items: usize, a_along_k: bool, b_along_k: bool },
    Panel { panel: Panel, width: usize, unit: bool, height: AtLaunch<usize> },
    Dot { rows: usize, cols: usize, width: usize },
    Mma(Mma),
    Thin(Thin),
    Quantized(Packed),
}

impl GemmKernel {
    /// Returns the rows and columns of the result that one work-group computes; for Panel and Dot, that one work-item computes.
    fn tile(self) -> (usize, usize) {
        match self {
            GemmKernel::Tiled { m, n, .. } => (m, n),
            GemmKernel::Panel { panel, width, height, .. } => (height.0, panel.vectors * width),
            GemmKernel::Dot { rows, cols, .. } => (rows, cols),
            GemmKernel::Mma(mma) => mma.tile(),
            GemmKernel::Thin(thin) => thin.tile(),
            GemmKernel::Quantized(packed) => packed.tile(),
        }
    }

    fn group_size(self) -> usize {
        match self {
            GemmKernel::Tiled { .. } => TILED_GROUP_SIZE,
            GemmKernel::Mma(mma) => mma.threads(),
            GemmKernel::Thin(thin) => thin.threads(),
            GemmKernel::Quantized(packed) => packed.threads(),
            _ => 1,
        }
    }

    /// True if the kernel can also compute the sum of each row of the left matrix.
    fn can_sum_rows(self, plan: &GemmPlan) -> bool {
        plan.batch.is_empty()
            && match self {
                GemmKernel::Tiled { a_along_k, .. } => !a_along_k,
                GemmKernel::Mma(mma) => mma.can_sum_rows(),
                _ => false,
            }
    }

    /// Returns how k is divided into parts (split-K). One work-group computes one part.
    fn parts(self, plan: &GemmPlan, units: usize) -> SplitK {
        match self {
            GemmKernel::Mma(mma) => mma.parts(plan, units),
            GemmKernel::Thin(thin) => thin.parts.0,
            GemmKernel::Quantized(packed) => packed.parts.0,
            _ => SplitK { count: 1, depth: plan.k },
        }
    }

    fn defines(self) -> String {
        match self {
            GemmKernel::Tiled { m, n, k, items, a_along_k, b_along_k } => format!(
                "#define TILED\n#define TILE_M {m}\n#define TILE_N {n}\n#define TILE_K {k}\n#define MI {items}\n\
                 #define NI {items}\n#define A_ALONG_K {}\n#define B_ALONG_K {}\n",
                a_along_k as u8, b_along_k as u8
            ),
            GemmKernel::Panel { panel: Panel { rows, vectors, depth, block }, width, unit, .. } => format!(
                "#define PANEL\n#define MR {rows}\n#define NV {vectors}\n#define W {width}\n#define B_UNIT {}\n\
                 #define PANEL_DEPTH {depth}\n#define BLOCK {block}\n",
                unit as u8
            ),
            GemmKernel::Dot { rows, cols, width } => {
                format!("#define DOT\n#define MR {rows}\n#define NR {cols}\n#define W {width}\n")
            }
            GemmKernel::Mma(mma) => mma.defines(),
            GemmKernel::Thin(thin) => thin.defines(),
            GemmKernel::Quantized(packed) => packed.defines(),
        }
    }
}

/// Computes a product. Returns true if the row sums in `g.sums` were computed as well.
pub(crate) fn launch_product(g: &Gemm, shape: &Shape, outs: &[Tensor]) -> Result<bool> {
    if image::product(g, shape, outs)? {
        return Ok(false);
    }
    if let Some([a, b]) = aligned::aligned_copies(g, shape)? {
        return launch_without_copies(&Gemm { a: &a, b: &b, out: None, ..*g }, shape, outs);
    }
    launch_without_copies(g, shape, outs)
}

/// Computes a product like [`launch_product`], but always from the matrices in place, without aligned copies.
fn launch_without_copies(g: &Gemm, shape: &Shape, outs: &[Tensor]) -> Result<bool> {
    let mut tensors: SmallVec<[&Tensor; 6]> = SmallVec::from_slice(&[g.a, g.b]);
    outs.iter().chain(g.extras.iter().copied()).chain(g.sums).for_each(|t| tensors.push(t));
    let sums = g.sums.filter(|t| ![g.a, g.b].iter().any(|x| x.shares_storage(t)));
    let cpu = uses_cpu_kernels(outs[0].cl_device()?);
    let planes = precision::split_terms();
    let numbers = [outs.len() as u64, sums.is_some().into(), planes as u64, cpu.into()];
    let key = Key { kind: OpKind::Gemm, numbers: &numbers, exprs: g.epilogue, tensors: &tensors };
    let params = Params::from_scalars(g.scalars);
    let entry = launch_cache::launch_cached(&key, params, || make_plan(g, shape, outs, sums, planes))?;
    Ok(sums.is_some() && entry.plan.uses_tensor(tensors.len() - 1))
}

/// Makes the launch plan. The plan's tensors are the two matrices, the results, the extras, and last `g.sums`, if given. `sums` is `g.sums` if the
/// launch may write to that tensor, otherwise `None`. `planes` is the number of bf16 values into which an f32 is split.
fn make_plan(g: &Gemm, shape: &Shape, outs: &[Tensor], sums: Option<&Tensor>, planes: usize) -> Result<LaunchPlan> {
    let device = outs[0].cl_device()?;
    let operands: SmallVec<[&Tensor; 6]> = [g.a, g.b].into_iter().chain(outs).chain(g.extras.iter().copied()).collect();
    if !device.info().fp64 && operands.iter().any(|t| t.dtype == DType::F64) {
        let expected = "f32, f16 or bf16 on this device, which has no double precision";
        return Err(Error::UnsupportedDType { op: g.op, dtype: DType::F64, expected });
    }
    let others: SmallVec<[Layout; 4]> = operands[2..].iter().map(|t| t.layout.broadcast_to(shape)).collect();
    let others: SmallVec<[&Layout; 4]> = others.iter().collect();
    let plan = GemmPlan::new(&g.a.layout, &g.b.layout, shape, &others);
    let compute = g.compute();
    let matrices = [g.a, g.b].map(|t| BufferMatrix { dtype: t.dtype, first: t.layout.offset });
    let (plan, variant, flipped) = choose_kernel(plan, matrices, planes, compute, device);
    // The indices of the left and the right matrix in the list of tensors.
    let order = if flipped { [1, 0] } else { [0, 1] };
    let sums = sums.filter(|_| !flipped && variant.can_sum_rows(&plan));
    let has_sums_tensor = g.sums.is_some();
    let windows = &[];
    let (operands, outs) = (&operands, outs.len());
    ChosenKernel { plan, variant, order, operands, outs, epilogue: g.epilogue, compute, sums, has_sums_tensor, windows }
        .make_plan(device)
}

/// A product and the kernel that was chosen to compute it.
pub(crate) struct ChosenKernel<'a> {
    pub(crate) plan: GemmPlan,
    pub(crate) variant: GemmKernel,
    /// The indices of the left and the right matrix in `operands`; `[1, 0]` if the product was transposed.
    pub(crate) order: [usize; 2],
    /// The matrices, results and extras, which are the first tensors of the launch.
    pub(crate) operands: &'a [&'a Tensor],
    pub(crate) outs: usize,
    pub(crate) epilogue: &'a [Expr],
    pub(crate) compute: Compute,
    /// The tensor for row sums, or `None` if the kernel does not compute row sums.
    pub(crate) sums: Option<&'a Tensor>,
    /// Whether the launch's tensors include a tensor for row sums, even if the kernel does not write row sums.
    pub(crate) has_sums_tensor: bool,
    /// The geometry of the convolution windows if one of the matrices consists of windows, otherwise empty; see `kernels/windows_mma.cl`.
    pub(crate) windows: &'a [isize],
}

impl ChosenKernel<'_> {
    pub(crate) fn make_plan(self, device: &'static ClDevice) -> Result<LaunchPlan> {
        let ChosenKernel {
            plan,
            variant,
            order: [left, right],
            operands,
            outs,
            epilogue,
            compute,
            sums,
            has_sums_tensor,
            windows,
        } = self;
        let (a, b) = (operands[left], operands[right]);
        let parts = variant.parts(&plan, device.info().compute_units);
        let wide = results_per_store(variant, &plan, &operands[2..2 + outs]);
        let (rows, cols) = variant.tile();
        let tiles = plan.m.div_ceil(rows) * plan.n.div_ceil(cols) * plan.count();
        // Partial results have the dtype of the accumulator.
        let partial = (parts.count > 1).then(|| (tiles * parts.count * (rows * cols + rows), compute.dtype()));

        let program = Program::shared(epilogue);
        let config = GemmConfig {
            variant,
            compute,
            matrices: [a.dtype, b.dtype],
            others: operands[2..].iter().map(|t| t.dtype).collect(),
            batch: plan.batch.len(),
            outs,
            sums: sums.is_some(),
            parts: partial.is_some(),
            wide,
        };
        let key = KernelKey::new("gemm", &config, program.exprs());
        let kernel = get_or_build_kernel(device, key, "gemm", || config.source(&program))?;

        let mut launch = KernelLaunch::new(kernel, tiles * parts.count * variant.group_size(), variant.group_size());
        // An empty matrix has no buffer and is never read, so the result's buffer is passed instead.
        let [of_a, of_b] = [left, right].map(|k| launch.push_buffer(if operands[k].numel() == 0 { 2 } else { k }));
        let mut numbers = StructWords::default();
        numbers.extend([plan.m, plan.n, plan.k]);
        for (of, t) in [(of_a, &plan.a), (of_b, &plan.b)] {
            numbers.defer(DeferredWord::Offset(of));
            numbers.steps([t.row, t.col]);
        }
        numbers.extend(plan.batch.iter().copied());
        numbers.steps(plan.a.batch.iter().chain(&plan.b.batch).copied());
        for (i, operand) in plan.others.iter().enumerate() {
            numbers.defer(DeferredWord::Offset(2 + i));
            numbers.steps([operand.row, operand.col].into_iter().chain(operand.batch.iter().copied()));
        }
        let mut given = 2 + plan.others.len();
        if let Some(t) = sums {
            numbers.defer(DeferredWord::Offset(given));
            numbers.steps([t.strides()[0]]);
            given += 1;
        }
        if partial.is_some() {
            numbers.extend([parts.depth, parts.count]);
            numbers.defer(DeferredWord::Offset(given));
            numbers.defer(DeferredWord::FirstArrival);
        }
        if let GemmKernel::Panel { height, .. } = variant {
            numbers.extend([height.0]);
        }
        numbers.steps(windows.iter().copied());
        launch.push_words(numbers.words);
        launch.deferred = numbers.deferred;
        (2..operands.len()).for_each(|k| _ = launch.push_buffer(k));
        if sums.is_some() {
            launch.push_buffer(operands.len());
        }
        if partial.is_some() {
            launch.push_buffer(operands.len() + usize::from(has_sums_tensor));
            launch.push(Argument::Arrivals);
        }
        launch.push(Argument::Scalars(program.scalars(), compute));
        if program.can_fault(compute) {
            launch.push(Argument::Faults);
        }
        Ok(LaunchPlan::new(device, partial, [launch]))
    }
}

/// The 64-bit words of the struct of sizes and strides that the kernel takes.
#[derive(Default)]
struct StructWords {
    words: Vec<i64>,
    deferred: Vec<(usize, DeferredWord)>,
}

impl StructWords {
    fn extend(&mut self, numbers: impl IntoIterator<Item = usize>) {
        self.words.extend(numbers.into_iter().map(|n| n as i64));
    }

    fn steps(&mut self, steps: impl IntoIterator<Item = isize>) {
        self.words.extend(steps.into_iter().map(|s| s as i64));
    }

    fn defer(&mut self, word: DeferredWord) {
        self.deferred.push((self.words.len(), word));
        self.words.push(0);
    }
}

/// True if the device uses the kernels that were written for CPUs.
pub(crate) fn uses_cpu_kernels(device: &ClDevice) -> bool {
    let cpu = device.info().kind == DeviceKind::Cpu;
    #[cfg(test)]
    let cpu = cpu && !tests::PRETEND_GPU.get();
    cpu
}

/// Chooses the kernel for this device and problem. Returns the plan to compute, the kernel, and whether the plan was transposed.
fn choose_kernel(
    plan: GemmPlan,
    matrices: [BufferMatrix; 2],
    planes: usize,
    compute: Compute,
    device: &ClDevice,
) -> (GemmPlan, GemmKernel, bool) {
    let info = device.info();
    let big = info.max_work_group >= TILED_GROUP_SIZE && info.local_memory >= 24 << 10;
    if uses_cpu_kernels(device) || !big {
        return choose_cpu_kernel(plan, compute, device);
    }
    if let Some(thin) = choose_thin(&plan, matrices, compute, device) {
        return thin;
    }
    let (plan, flip) = transpose_for_coalesced_stores(plan);
    let [a, b] = if flip { [matrices[1], matrices[0]] } else { matrices };
    let columns = device.tuned_for(TuningParameter::MmaColumns, size_class(&plan, compute));
    let mma = Mma::choose(&plan, planes, a, b, (info.compute_units, columns), || device.tensor_cores());
    let variant = mma.map_or_else(|| choose_tiled(&plan, compute, device), GemmKernel::Mma);
    (plan, variant, flip)
}

/// Chooses the kernel for a product with few rows, or, by transposing the product, with few columns.
fn choose_thin(
    plan: &GemmPlan,
    [a, b]: [BufferMatrix; 2],
    compute: Compute,
    device: &ClDevice,
) -> Option<(GemmPlan, GemmKernel, bool)> {
    let info = device.info();
    let flip = plan.n < plan.m;
    let (plan, matrices) = if flip { (plan.clone().transposed(), [b, a]) } else { (plan.clone(), [a, b]) };
    let most = info.max_work_group.min(info.local_memory / Thin::LOCAL_BYTES_PER_ITEM);
    let units = info.compute_units.max(1);
    let groups = units * device.tuned_for(TuningParameter::ThinGroups, size_class(&plan, compute));
    let thin = Thin::choose(&plan, matrices, compute, [units, groups, most], || device.has_fence())?;
    Some((plan, GemmKernel::Thin(thin), flip))
}

/// Transposes the plan if only the columns of the result are contiguous, so that stores are coalesced. The bool is true if the plan was transposed.
fn transpose_for_coalesced_stores(plan: GemmPlan) -> (GemmPlan, bool) {
    let flip = plan.others[0].col.abs() != 1 && plan.others[0].row.abs() == 1;
    (if flip { plan.transposed() } else { plan }, flip)
}

/// Returns the size class of a product. Tuning parameters are measured once per size class.
pub(crate) fn size_class(plan: &GemmPlan, compute: Compute) -> SizeClass {
    SizeClass::from_sizes([plan.m, plan.n, plan.k, plan.count(), compute.dtype().size()])
}

/// Chooses the tiled kernel with the largest tiles for which every compute unit still gets at least one tile.
fn choose_tiled(plan: &GemmPlan, compute: Compute, device: &ClDevice) -> GemmKernel {
    let wide = compute != Compute::F32;
    let (units, largest) =
        (device.info().compute_units.max(1), device.tuned_for(TuningParameter::Tile, size_class(plan, compute)));
    let busy = |tile: usize| tile <= largest && plan.m.div_ceil(tile) * plan.n.div_ceil(tile) * plan.count() >= units;
    let (tile, k, items) = match () {
        _ if !wide && busy(128) => (128, 16, 8),
        _ if busy(64) => (64, if wide { 16 } else { 32 }, 4),
        _ => (32, if wide { 32 } else { 64 }, 4),
    };
    let a_along_k = plan.a.col.abs() == 1 || plan.a.row.abs() > plan.a.col.abs();
    let b_along_k = plan.b.col.abs() != 1 && plan.b.row.abs() == 1;
    GemmKernel::Tiled { m: tile, n: tile, k, items, a_along_k, b_along_k }
}

/// Chooses among the kernels for CPUs. Their vectors run along the contiguous direction.
fn choose_cpu_kernel(plan: GemmPlan, compute: Compute, device: &ClDevice) -> (GemmPlan, GemmKernel, bool) {
    let width = if compute == Compute::F32 { 16 } else { 8 };
    let class = size_class(&plan, compute);
    let has_full_vectors = |n: usize| n >= width * device.tuned_for(TuningParameter::PanelVectors, class);
    let panel = |plan: GemmPlan, flipped: bool, unit: bool| {
        let panel = Panel::tuned(device, class, plan.m);
        let height = AtLaunch(panel.height(&plan, width, device.info().compute_units));
        (plan, GemmKernel::Panel { panel, width, unit: unit && compute != Compute::I64, height }, flipped)
    };
    let (b_cols, a_rows) = (plan.b.col == 1, plan.a.row == 1);
    let along_k = (plan.a.col == 1 && plan.b.row == 1) || plan.k == 1;
    match () {
        _ if b_cols && has_full_vectors(plan.n) => panel(plan, false, true),
        _ if a_rows && has_full_vectors(plan.m) => panel(plan.transposed(), true, true),
        _ if along_k && compute != Compute::I64 => {
            let flip = plan.n == 1 && plan.m > 1;
            let plan = if flip { plan.transposed() } else { plan };
            let side = device.tuned_for(TuningParameter::DotSide, class);
            let rows = if plan.m == 1 { 1 } else { side };
            (plan, GemmKernel::Dot { rows, cols: side, width }, flip)
        }
        _ if plan.n < plan.m && !has_full_vectors(plan.n) => panel(plan.transposed(), true, a_rows),
        _ => panel(plan, false, b_cols),
    }
}

/// Returns the number of contiguous results that a GPU work-item stores at once: 16 bytes of results if aligned, else 4 results if aligned, else 1.
fn results_per_store(variant: GemmKernel, plan: &GemmPlan, outs: &[&Tensor]) -> usize {
    let most = match variant {
        // Adjacent columns of these results may be padding, and need not be contiguous.
        GemmKernel::Mma(mma)
            if matches!(mma.windows, Some(WindowsOperand::ColumnsApart | WindowsOperand::RowsApart)) =>
        {
            return 1;
        }
        GemmKernel::Mma(_) => 8,
        GemmKernel::Tiled { .. } => TILED_RESULTS_PER_STORE,
        _ => return 1,
    };
    let most = outs.iter().map(|t| 16 / t.dtype.size()).min().unwrap_or(1).min(most);
    let is_aligned = |wide: usize| {
        outs.iter().zip(&plan.others).all(|(t, at)| {
            let steps = at.batch.iter().copied().chain([at.row]).map(isize::unsigned_abs);
            at.col == 1 && steps.chain([t.layout.offset]).all(|step| step.is_multiple_of(wide))
        })
    };
    [most, 4].into_iter().find(|&wide| (4..=most).contains(&wide) && is_aligned(wide)).unwrap_or(1)
}

//! Matrix products on OpenCL: chooses the kernel and its tile sizes for the device and the problem, and prepares its launch.

mod aligned;
mod source;
#[cfg(test)]
pub(crate) mod tests;

use smallvec::SmallVec;

use crate::backend::opencl::gemm::source::{Extent, source};
use crate::backend::opencl::gemm_mma::{InBuffer, Mma, Parts, WindowsAs};
use crate::backend::opencl::gemm_panel::Panel;
use crate::backend::opencl::gemm_thin::Thin;
use crate::backend::opencl::kernels::{KernelKey, kernel};
use crate::backend::opencl::launch_cache::{Key, OpKind};
use crate::backend::opencl::launch_plan::{KernelLaunch, LaunchPlan, Word};
use crate::backend::opencl::{image, launch_cache};
use crate::backend::problem::gemm::{Gemm, GemmPlan};
use crate::backend::problem::map::Params;
use crate::backend::problem::precision;
use crate::device::DeviceKind;
use crate::device::opencl::{ClDevice, Knob, SizeClass};
use crate::expr::Expr;
use crate::expr::program::Program;
use crate::tensor::Layout;
use crate::{Compute, DType, Error, Result, Shape, Tensor};

/// The work-group size of the tiled kernel, and the contiguous results of a work-item.
const THREADS: usize = 256;
const NEIGHBOURS: usize = 4;

/// A kernel and its sizes: see `kernels/gemm.cl` and the files of [`Mma`], [`Panel`] and [`Thin`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Variant {
    Tiled { m: usize, n: usize, k: usize, items: usize, a_along_k: bool, b_along_k: bool },
    Panel { panel: Panel, width: usize, unit: bool, height: usize },
    Dot { rows: usize, cols: usize, width: usize },
    Mma(Mma),
    Thin(Thin),
}

impl Variant {
    /// The rows and columns of the result that a work-group computes, or a work-item of Panel and Dot.
    fn tile(self) -> (usize, usize) {
        match self {
            Variant::Tiled { m, n, .. } => (m, n),
            Variant::Panel { panel, width, height, .. } => (height, panel.vectors * width),
            Variant::Dot { rows, cols, .. } => (rows, cols),
            Variant::Mma(mma) => mma.tile(),
            Variant::Thin(thin) => thin.tile(),
        }
    }

    fn local(self) -> usize {
        match self {
            Variant::Tiled { .. } => THREADS,
            Variant::Mma(mma) => mma.threads(),
            Variant::Thin(thin) => thin.threads(),
            _ => 1,
        }
    }

    /// Whether it can also compute the sums of the left matrix's rows.
    fn sums_rows(self, plan: &GemmPlan) -> bool {
        plan.batch.is_empty()
            && match self {
                Variant::Tiled { a_along_k, .. } => !a_along_k,
                Variant::Mma(mma) => mma.sums_rows(),
                _ => false,
            }
    }

    /// Into how many parts k is divided, each of which a work-group computes (split-K).
    fn parts(self, plan: &GemmPlan, units: usize) -> Parts {
        match self {
            Variant::Mma(mma) => mma.parts(plan, units),
            Variant::Thin(thin) => thin.parts,
            _ => Parts { count: 1, depth: plan.k },
        }
    }

    /// A number that identifies it.
    fn key(self) -> u64 {
        let [kind, a, b, c, flags] = match self {
            Variant::Tiled { m, n, k, items, a_along_k, b_along_k } => {
                [1, m << 8 | n, k, items, (a_along_k as usize) << 1 | b_along_k as usize]
            }
            Variant::Panel { panel: Panel { rows, vectors, depth, block }, width, unit, .. } => {
                [2, (block << 8) | rows, (vectors << 8) | (depth / 32), width, unit as usize]
            }
            Variant::Dot { rows, cols, width } => [3, rows, cols, width, 0],
            Variant::Mma(mma) => [4, 0, 0, 0, mma.key()],
            Variant::Thin(thin) => [5, 0, 0, 0, thin.key()],
        };
        (kind << 56 | a << 32 | b << 20 | c << 8 | flags) as u64
    }

    fn defines(self) -> String {
        match self {
            Variant::Tiled { m, n, k, items, a_along_k, b_along_k } => format!(
                "#define TILED\n#define TILE_M {m}\n#define TILE_N {n}\n#define TILE_K {k}\n#define MI {items}\n\
                 #define NI {items}\n#define A_ALONG_K {}\n#define B_ALONG_K {}\n",
                a_along_k as u8, b_along_k as u8
            ),
            Variant::Panel { panel: Panel { rows, vectors, depth, block }, width, unit, .. } => format!(
                "#define PANEL\n#define MR {rows}\n#define NV {vectors}\n#define W {width}\n#define B_UNIT {}\n\
                 #define PANEL_DEPTH {depth}\n#define BLOCK {block}\n",
                unit as u8
            ),
            Variant::Dot { rows, cols, width } => {
                format!("#define DOT\n#define MR {rows}\n#define NR {cols}\n#define W {width}\n")
            }
            Variant::Mma(mma) => mma.defines(),
            Variant::Thin(thin) => thin.defines(),
        }
    }
}

/// Computes a product, and returns whether the sums of rows were computed as well.
pub(crate) fn run(g: &Gemm, shape: &Shape, outs: &[Tensor]) -> Result<bool> {
    if image::product(g, shape, outs)? {
        return Ok(false);
    }
    if let Some([a, b]) = aligned::copies(g, shape)? {
        return run_on(&Gemm { a: &a, b: &b, out: None, ..*g }, shape, outs);
    }
    run_on(g, shape, outs)
}

/// [`run`] without copies of matrices.
fn run_on(g: &Gemm, shape: &Shape, outs: &[Tensor]) -> Result<bool> {
    let mut tensors: SmallVec<[&Tensor; 6]> = SmallVec::from_slice(&[g.a, g.b]);
    outs.iter().chain(g.extras.iter().copied()).chain(g.sums).for_each(|t| tensors.push(t));
    let sums = g.sums.filter(|t| ![g.a, g.b].iter().any(|x| x.shares_storage(t)));
    let device = outs[0].device();
    let cpu = is_processor(outs[0].cl_device()?);
    let planes = precision::planes();
    let numbers = [outs.len() as u64, sums.is_some().into(), planes as u64, cpu.into()];
    let key = Key { of: OpKind::Gemm, device, numbers: &numbers, exprs: g.epilogue, tensors: &tensors };
    let params = Params::of(g.scalars);
    let entry = launch_cache::launch(&key, params, || prepare(g, shape, outs, sums, planes))?;
    Ok(sums.is_some() && entry.plan.uses(tensors.len() - 1))
}

/// The launch plan, whose tensors are the two matrices, the results, the extras, and last `g.sums`, if given. `sums` is that tensor
/// if the launch may write it, and `planes` how many bf16 an f32 is split into.
fn prepare(g: &Gemm, shape: &Shape, outs: &[Tensor], sums: Option<&Tensor>, planes: usize) -> Result<LaunchPlan> {
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
    let matrices = [g.a, g.b].map(|t| InBuffer { dtype: t.dtype, first: t.layout.offset });
    let (plan, variant, flipped) = choose(plan, matrices, planes, compute, device);
    // The indices of the left and the right matrix in the list of tensors.
    let order = if flipped { [1, 0] } else { [0, 1] };
    let sums = sums.filter(|_| !flipped && variant.sums_rows(&plan));
    let asked = g.sums.is_some();
    let windows = &[];
    let (operands, outs) = (&operands, outs.len());
    Chosen { plan, variant, order, operands, outs, epilogue: g.epilogue, compute, sums, asked, windows }.prepare(device)
}

/// A product and the kernel that computes it.
pub(crate) struct Chosen<'a> {
    pub(crate) plan: GemmPlan,
    pub(crate) variant: Variant,
    /// The indices of the left and the right matrix among the operands.
    pub(crate) order: [usize; 2],
    /// The matrices, the results and the extras, which are the first tensors of the launch.
    pub(crate) operands: &'a [&'a Tensor],
    pub(crate) outs: usize,
    pub(crate) epilogue: &'a [Expr],
    pub(crate) compute: Compute,
    /// The tensor for sums of rows, and whether the launch's tensors include one, even if it is not written.
    pub(crate) sums: Option<&'a Tensor>,
    pub(crate) asked: bool,
    /// The geometry of windows where a matrix consists of these: see `kernels/windows_mma.cl`.
    pub(crate) windows: &'a [isize],
}

impl Chosen<'_> {
    pub(crate) fn prepare(self, device: &'static ClDevice) -> Result<LaunchPlan> {
        let Chosen { plan, variant, order: [left, right], operands, outs, epilogue, compute, sums, asked, windows } =
            self;
        let (a, b) = (operands[left], operands[right]);
        let parts = variant.parts(&plan, device.info().compute_units);
        let wide = wide(variant, &plan, &operands[2..2 + outs]);
        let (rows, cols) = variant.tile();
        let tiles = plan.m.div_ceil(rows) * plan.n.div_ceil(cols) * plan.count();
        // Partial results have the accumulator's type.
        let partial = (parts.count > 1).then(|| (tiles * parts.count * (rows * cols + rows), compute.dtype()));

        let program = Program::of(epilogue);
        let flags = plan.batch.len() as u64
            | u64::from(sums.is_some()) << 8
            | u64::from(partial.is_some()) << 9
            | (wide as u64) << 10;
        let mut params: SmallVec<[u64; 8]> = SmallVec::from_slice(&[variant.key(), flags]);
        params.extend([a, b].into_iter().chain(operands[2..].iter().copied()).map(|t| t.dtype as u64));
        let key = KernelKey { template: "gemm", params, exprs: SmallVec::from(program.exprs()) };
        let kernel = kernel(device, key, "gemm", || {
            let types = operands[2..].iter().map(|t| t.dtype).collect::<SmallVec<[DType; 4]>>();
            let extent = Extent { batch: plan.batch.len(), outs, sums: sums.is_some(), parts: partial.is_some(), wide };
            source(&program, compute, variant, extent, [a.dtype, b.dtype], &types)
        })?;

        let mut launch = KernelLaunch::new(kernel, tiles * parts.count * variant.local(), variant.local());
        // An empty matrix has no buffer and is not read, so that the result's buffer can stand in for it.
        let [of_a, of_b] = [left, right].map(|k| launch.buffer(if operands[k].numel() == 0 { 2 } else { k }));
        let mut numbers = Numbers::default();
        numbers.extend([plan.m, plan.n, plan.k]);
        for (of, t) in [(of_a, &plan.a), (of_b, &plan.b)] {
            numbers.defer(Word::First(of));
            numbers.steps([t.row, t.col]);
        }
        numbers.extend(plan.batch.iter().copied());
        numbers.steps(plan.a.batch.iter().chain(&plan.b.batch).copied());
        for (i, operand) in plan.others.iter().enumerate() {
            numbers.defer(Word::First(2 + i));
            numbers.steps([operand.row, operand.col].into_iter().chain(operand.batch.iter().copied()));
        }
        let mut given = 2 + plan.others.len();
        if let Some(t) = sums {
            numbers.defer(Word::First(given));
            numbers.steps([t.strides()[0]]);
            given += 1;
        }
        if partial.is_some() {
            numbers.extend([parts.depth, parts.count]);
            numbers.defer(Word::First(given));
            numbers.defer(Word::FirstArrival);
        }
        if let Variant::Panel { height, .. } = variant {
            numbers.extend([height]);
        }
        numbers.steps(windows.iter().copied());
        launch.words(numbers.words);
        numbers.deferred.into_iter().for_each(|(at, word)| launch.defer(at, word));
        (2..operands.len()).for_each(|k| _ = launch.buffer(k));
        if sums.is_some() {
            launch.buffer(operands.len());
        }
        if partial.is_some() {
            launch.buffer(operands.len() + usize::from(asked));
            launch.arrivals();
        }
        launch.scalars(program.scalars(), compute);
        if program.can_fault(compute) {
            launch.faults();
        }
        Ok(LaunchPlan::new(device, partial, [launch]))
    }
}

/// The words of the kernels' struct.
#[derive(Default)]
struct Numbers {
    words: Vec<i64>,
    deferred: Vec<(usize, Word)>,
}

impl Numbers {
    fn extend(&mut self, numbers: impl IntoIterator<Item = usize>) {
        self.words.extend(numbers.into_iter().map(|n| n as i64));
    }

    fn steps(&mut self, steps: impl IntoIterator<Item = isize>) {
        self.words.extend(steps.into_iter().map(|s| s as i64));
    }

    fn defer(&mut self, word: Word) {
        self.deferred.push((self.words.len(), word));
        self.words.push(0);
    }
}

/// Whether the device uses the kernels for processors.
pub(crate) fn is_processor(device: &ClDevice) -> bool {
    let cpu = device.info().kind == DeviceKind::Cpu;
    #[cfg(test)]
    let cpu = cpu && !tests::PRETEND_GPU.get();
    cpu
}

/// The kernel for this device and problem, and the plan that it computes: (plan, kernel, whether the plan is transposed).
fn choose(
    plan: GemmPlan,
    matrices: [InBuffer; 2],
    planes: usize,
    compute: Compute,
    device: &ClDevice,
) -> (GemmPlan, Variant, bool) {
    let info = device.info();
    let big = info.max_work_group >= THREADS && info.local_memory >= 24 << 10;
    if is_processor(device) || !big {
        return vectors(plan, compute, device);
    }
    if let Some(thin) = thin(&plan, matrices, compute, device) {
        return thin;
    }
    let (plan, flip) = along_rows(plan);
    let [a, b] = if flip { [matrices[1], matrices[0]] } else { matrices };
    let columns = device.tuned_for(Knob::MmaColumns, class_of(&plan, compute));
    let mma = Mma::choose(&plan, planes, a, b, (info.compute_units, columns), || device.tensor_cores());
    let variant = mma.map_or_else(|| tiled(&plan, compute, device), Variant::Mma);
    (plan, variant, flip)
}

/// The kernel for few rows, or for few columns as the transposed product.
fn thin(
    plan: &GemmPlan,
    [a, b]: [InBuffer; 2],
    compute: Compute,
    device: &ClDevice,
) -> Option<(GemmPlan, Variant, bool)> {
    let info = device.info();
    let flip = plan.n < plan.m;
    let (plan, matrices) = if flip { (plan.clone().transposed(), [b, a]) } else { (plan.clone(), [a, b]) };
    let most = info.max_work_group.min(info.local_memory / Thin::LOCAL_EACH);
    let units = info.compute_units.max(1);
    let groups = units * device.tuned_for(Knob::ThinGroups, class_of(&plan, compute));
    let thin = Thin::choose(&plan, matrices, compute, [units, groups, most], || device.has_fence())?;
    Some((plan, Variant::Thin(thin), flip))
}

/// The plan, transposed if only the columns of the result are contiguous, so that stores are coalesced; and whether it is transposed.
fn along_rows(plan: GemmPlan) -> (GemmPlan, bool) {
    let flip = plan.others[0].col.abs() != 1 && plan.others[0].row.abs() == 1;
    (if flip { plan.transposed() } else { plan }, flip)
}

/// The size class under which tuning parameters for a product are measured.
fn class_of(plan: &GemmPlan, compute: Compute) -> SizeClass {
    SizeClass::of([plan.m, plan.n, plan.k, plan.count(), compute.dtype().size()])
}

/// The tiled kernel with the largest tiles of which there is one for every compute unit.
fn tiled(plan: &GemmPlan, compute: Compute, device: &ClDevice) -> Variant {
    let wide = compute != Compute::F32;
    let (units, largest) = (device.info().compute_units.max(1), device.tuned_for(Knob::Tile, class_of(plan, compute)));
    let busy = |tile: usize| tile <= largest && plan.m.div_ceil(tile) * plan.n.div_ceil(tile) * plan.count() >= units;
    let (tile, k, items) = match () {
        _ if !wide && busy(128) => (128, 16, 8),
        _ if busy(64) => (64, if wide { 16 } else { 32 }, 4),
        _ => (32, if wide { 32 } else { 64 }, 4),
    };
    let a_along_k = plan.a.col.abs() == 1 || plan.a.row.abs() > plan.a.col.abs();
    let b_along_k = plan.b.col.abs() != 1 && plan.b.row.abs() == 1;
    Variant::Tiled { m: tile, n: tile, k, items, a_along_k, b_along_k }
}

/// The kernels for processors, with vectors along the direction that is contiguous.
fn vectors(plan: GemmPlan, compute: Compute, device: &ClDevice) -> (GemmPlan, Variant, bool) {
    let width = if compute == Compute::F32 { 16 } else { 8 };
    let class = class_of(&plan, compute);
    let has_full_vectors = |n: usize| n >= width * device.tuned_for(Knob::PanelVectors, class);
    let panel = |plan: GemmPlan, flipped: bool, unit: bool| {
        let panel = Panel::of(device, class, plan.m);
        let height = panel.height(&plan, width, device.info().compute_units);
        (plan, Variant::Panel { panel, width, unit: unit && compute != Compute::I64, height }, flipped)
    };
    let (b_cols, a_rows) = (plan.b.col == 1, plan.a.row == 1);
    let along_k = (plan.a.col == 1 && plan.b.row == 1) || plan.k == 1;
    match () {
        _ if b_cols && has_full_vectors(plan.n) => panel(plan, false, true),
        _ if a_rows && has_full_vectors(plan.m) => panel(plan.transposed(), true, true),
        _ if along_k && compute != Compute::I64 => {
            let flip = plan.n == 1 && plan.m > 1;
            let plan = if flip { plan.transposed() } else { plan };
            let side = device.tuned_for(Knob::DotSide, class);
            let rows = if plan.m == 1 { 1 } else { side };
            (plan, Variant::Dot { rows, cols: side, width }, flip)
        }
        _ if plan.n < plan.m && !has_full_vectors(plan.n) => panel(plan.transposed(), true, a_rows),
        _ => panel(plan, false, b_cols),
    }
}

/// How many contiguous results a work-item of a GPU stores at once: 16 bytes of them if aligned, else 4 if these are, else 1.
fn wide(variant: Variant, plan: &GemmPlan, outs: &[&Tensor]) -> usize {
    let most = match variant {
        // Neighbouring columns of these are not always contiguous, or are padding.
        Variant::Mma(mma) if matches!(mma.windows, Some(WindowsAs::ColumnsApart | WindowsAs::RowsApart)) => return 1,
        Variant::Mma(_) => 8,
        Variant::Tiled { .. } => NEIGHBOURS,
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

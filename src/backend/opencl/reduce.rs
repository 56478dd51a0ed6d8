//! Reductions on OpenCL: the schedule of `kernels/reduce.cl`, and whether it takes one launch or two.

use smallvec::SmallVec;

use crate::backend::opencl::geometry::{
    LOCAL, STRIDED_DIMS, flag, free_group, group_of, group_size, index_type, is_wide, lanes, vector_defines,
    vector_width,
};
use crate::backend::opencl::kernels::{KernelKey, kernel};
use crate::backend::opencl::launch_cache::{self, Key, OpKind};
use crate::backend::opencl::launch_plan::{KernelLaunch, LaunchPlan};
use crate::backend::problem::map::Params;
use crate::backend::problem::reduction::{Axes, Combination, Element, Reduction, ReductionPlan, Rule};
use crate::device::DeviceKind;
use crate::device::opencl::{ARRIVALS, Arg, ClDevice};
use crate::expr::Expr;
use crate::expr::program::Program;
use crate::{Compute, DType, Result, Tensor};

const TEMPLATE: &str = include_str!("../../../kernels/reduce.cl");

/// What a launch reads and writes: elements, or in the stages of an argmax partial results.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    Whole,
    First,
    Second,
    /// Both stages: the last work-group of a result combines its slices.
    LastGroup,
}

/// One launch, or two where few results have many elements.
pub(crate) fn run(reduction: &Reduction) -> Result<()> {
    let Reduction { rule, x, mask, out, .. } = *reduction;
    let id = launch_cache::number_of::<u8>(std::ptr::without_provenance(reduction.id));
    let numbers: SmallVec<[u64; 8]> = std::iter::once(id).chain(mask.iter().map(|&reduced| reduced.into())).collect();
    let key = Key { of: OpKind::Reduce, device: x.device(), numbers: &numbers, exprs: &[], tensors: &[x, out] };
    launch_cache::launch(&key, Params::default(), || prepare(rule, x, &reduction.plan(), out)).map(drop)
}

/// Tensors of a launch are the elements, the results, and where there are partial results those.
pub(crate) fn prepare(rule: &Rule, t: &Tensor, plan: &ReductionPlan, out: &Tensor) -> Result<LaunchPlan> {
    let device = t.cl_device()?;
    let (acc, arg) = (rule.accumulator(t.dtype), rule.combination.is_arg());
    let schedule = Schedule::choose(device, plan, vector(device, arg, t.dtype, plan));
    // Where the first element is, of the tensor's own.
    let start = plan.start as isize - t.layout.offset as isize;
    if schedule.slices == 1 {
        let whole = Kind { rule, input: t.dtype, output: out.dtype, acc, stage: Stage::Whole };
        return Ok(LaunchPlan::one(device, whole.kernel_launch(device, (0, start), 1, plan, &schedule, plan.n)?));
    }
    // Partial results: of the accumulator's type, or 16 bytes with value and index.
    let count = plan.outs * schedule.slices;
    let partial = Some(if arg { (2 * count, DType::I64) } else { (count, acc.dtype()) });
    if schedule.meets(device) {
        let both = Kind { rule, input: t.dtype, output: out.dtype, acc, stage: Stage::LastGroup };
        return Ok(LaunchPlan::new(
            device,
            partial,
            [both.kernel_launch(device, (0, start), 1, plan, &schedule, plan.n)?],
        ));
    }
    let stage = if arg { Stage::First } else { Stage::Whole };
    let (first, second) = rule.stages();
    let first = Kind { rule: &first, input: t.dtype, output: acc.dtype(), acc, stage };
    let first = first.kernel_launch(device, (0, start), 2, plan, &schedule, plan.n)?;
    let rest = ReductionPlan {
        start: 0,
        kept: Axes::one(plan.outs, schedule.slices as isize),
        reduced: Axes::one(schedule.slices, 1),
        outs: plan.outs,
        n: schedule.slices,
    };
    let stage = if arg { Stage::Second } else { Stage::Whole };
    let second = Kind { rule: &second, input: acc.dtype(), output: out.dtype, acc, stage };
    // Pairs are 16 bytes.
    let width = if arg { 1 } else { vector(device, arg, acc.dtype(), &rest) };
    let schedule = Schedule { slices: 1, chunk: rest.n, ..Schedule::choose(device, &rest, width) };
    let second = second.kernel_launch(device, (2, 0), 1, &rest, &schedule, plan.n)?;
    Ok(LaunchPlan::new(device, partial, [first, second]))
}

/// Elements of a tensor of this dtype that a work-item takes at once: several where those of a result lie in a row, or where neighbouring
/// results have theirs side by side.
fn vector(device: &ClDevice, arg: bool, dtype: DType, plan: &ReductionPlan) -> usize {
    let by_column = plan.by_column();
    let rows = plan.reduced.rank() == 1 && plan.reduced.inner().1 == 1;
    if !(rows || by_column && plan.kept.inner().1 == 1) || (arg && by_column) {
        return 1;
    }
    let all = |axes: &Axes| axes.strides.iter().copied().collect::<SmallVec<[isize; 6]>>();
    let (kept, reduced) = (all(&plan.kept), all(&plan.reduced));
    let start = plan.start as isize;
    match by_column {
        true => {
            let steps = kept[..kept.len() - 1].iter().chain(&reduced).copied();
            vector_width(device, dtype, steps.chain([start, plan.kept.inner().0 as isize]))
        }
        false => vector_width(device, dtype, kept.into_iter().filter(|_| plan.outs > 1).chain([start])),
    }
}

/// How a launch is spread over the device.
struct Schedule {
    /// Elements that a work-item loads at once.
    width: usize,
    by_column: bool,
    /// Work-items that share a result (GPUs).
    lanes: usize,
    /// Partial results of a result, of `chunk` elements each.
    slices: usize,
    chunk: usize,
    global: usize,
    local: usize,
}

impl Schedule {
    fn choose(device: &ClDevice, plan: &ReductionPlan, width: usize) -> Schedule {
        let units = device.info().compute_units.max(1);
        let (outs, n) = (plan.outs, plan.n);
        if device.info().kind == DeviceKind::Cpu {
            // Sixteen columns a work-item, where they are neighbours; a result otherwise.
            let (columns, across) = plan.kept.inner();
            let by_column = plan.by_column() && across == 1 && columns >= 16;
            let items = if by_column { outs / columns * columns.div_ceil(16) } else { outs };
            let enough = if by_column { 4096 } else { 32768 };
            let wanted = if items >= 2 * units || n <= enough { 1 } else { (4 * units).div_ceil(items) };
            let (slices, chunk) = cut(n, wanted, enough / 4, 32);
            let global = items * slices;
            // Groups cost something when there are thousands; few items are better spread one by one.
            let local = if global >= 64 * 8 * units { LOCAL } else { 1 };
            return Schedule { width: 1, by_column, lanes: 1, slices, chunk, global, local };
        }
        let group = group_size(device);
        let by_column = plan.by_column();
        // Results a work-item has, and elements of each it takes at once.
        let (across, along) = if by_column { (width, 1) } else { (1, width) };
        let columns = plan.kept.inner().0 / across;
        let enough = |columns: usize| outs.div_ceil(columns * across) >= 2 * units;
        let lanes = match along {
            // Columns by the vector: 256 bytes of them together.
            1 if width > 1 => (group / columns.next_power_of_two().min(16)).min(n.next_power_of_two()),
            1 => lanes(group, by_column, n, columns, enough),
            // Sixteen loads a lane, as long as there are results enough to keep the device busy.
            _ => {
                let fair = n.div_ceil(16 * along).max((256 * units).div_ceil(outs)).next_power_of_two();
                fair.min(n.div_ceil(4 * along).next_power_of_two()).max(4).min(group)
            }
        };
        let groups = outs.div_ceil(group / lanes * across);
        let waves = if width > 1 { 4 } else { 8 };
        let wanted = if groups >= 2 * units || n <= 128 * lanes { 1 } else { (waves * units).div_ceil(groups) };
        let (slices, chunk) = cut(n, wanted, 16 * lanes, 4 * lanes * along);
        Schedule { width, by_column, lanes, slices, chunk, global: groups * slices * group, local: group }
    }

    /// Whether the work-groups of a result find out which of them is the last: where a compiler takes PTX, which has the
    /// fence for it, and counters are enough. The compiler is asked last, for the answer takes building a kernel.
    fn meets(&self, device: &ClDevice) -> bool {
        let groups = self.global / self.local / self.slices;
        device.info().kind != DeviceKind::Cpu && groups <= ARRIVALS && device.has_fence()
    }
}

/// n elements in at most `wanted` slices of at least `least`, multiples of `unit`: their number and length.
fn cut(n: usize, wanted: usize, least: usize, unit: usize) -> (usize, usize) {
    if wanted <= 1 {
        return (1, n);
    }
    let chunk = n.div_ceil(wanted.min(4096)).max(least).next_multiple_of(unit);
    (n.div_ceil(chunk), chunk)
}

/// What tells one reduction kernel from another, ranks aside.
struct Kind<'a> {
    rule: &'a Rule,
    input: DType,
    output: DType,
    acc: Compute,
    stage: Stage,
}

impl Kind<'_> {
    /// The launch that reads tensor `x` of the list, from so many elements after its first on, and writes tensor `y`; where slices
    /// meet, the next is theirs. `number`: how many elements a result is of.
    fn kernel_launch(
        &self,
        device: &'static ClDevice,
        (x, start): (usize, isize),
        y: usize,
        plan: &ReductionPlan,
        schedule: &Schedule,
        number: usize,
    ) -> Result<KernelLaunch> {
        let wide = is_wide([plan.n, plan.outs * schedule.slices * 16, schedule.global]);
        let group = group_size(device);
        let (truth, mapped, finish) = (
            self.rule.element == Element::Truth,
            matches!(self.rule.element, Element::Of(_)),
            self.rule.finish.is_some(),
        );
        let params = [
            self.rule.combination as u64,
            self.input as u64,
            self.output as u64,
            self.acc as u64,
            truth as u64 | (mapped as u64) << 1 | (wide as u64) << 2 | (finish as u64) << 3 | (self.stage as u64) << 4,
            plan.kept.rank() as u64,
            plan.reduced.rank() as u64,
            schedule.width as u64 | u64::from(schedule.by_column && schedule.width > 1) << 8,
        ];
        let element = if let Element::Of(e) = &self.rule.element { Some(e) } else { None };
        let exprs = element.into_iter().chain(&self.rule.finish).cloned().collect();
        let key = KernelKey { template: "reduce", params: SmallVec::from_slice(&params), exprs };
        let kernel = kernel(device, key, "reduce", || self.source(plan, schedule, wide, group))?;
        let number = match self.acc {
            Compute::I64 => Arg::I64(number as i64),
            Compute::F32 => Arg::F32(number as f32),
            Compute::F64 => Arg::F64(number as f64),
        };
        // Pairs are 16 bytes, two elements of the tensor that holds them.
        let elements = |pairs: bool| if pairs { 2 } else { 1 };
        let cpu = device.info().kind == DeviceKind::Cpu;
        let local = match cpu {
            true => free_group(device, &kernel, schedule.global, schedule.local),
            false => group_of(&kernel, schedule.local),
        };
        let mut launch = KernelLaunch::new(kernel, schedule.global, local);
        launch.tensor_from(x, start, elements(self.stage == Stage::Second));
        launch.tensor_from(y, 0, elements(self.stage == Stage::First));
        launch.words(plan.kept.words());
        launch.words(plan.reduced.words());
        launch.args([plan.outs, plan.n, schedule.chunk].map(|n| Arg::U64(n as u64)));
        launch.args([Arg::U32(schedule.slices as u32), number, Arg::U32(schedule.by_column.into())]);
        if !cpu {
            launch.args([Arg::U32(schedule.lanes as u32)]);
        }
        if self.stage == Stage::LastGroup {
            launch.tensor_from(y + 1, 0, elements(self.rule.combination.is_arg()));
            launch.arrivals();
            launch.first_arrival();
        }
        Ok(launch)
    }

    fn source(&self, plan: &ReductionPlan, schedule: &Schedule, wide: bool, group: usize) -> String {
        let integer = self.acc == Compute::I64;
        let op = match self.rule.combination {
            Combination::Add => "SUM",
            Combination::Mul => "PROD",
            Combination::Max | Combination::ArgMax => "MAX",
            Combination::Min | Combination::ArgMin => "MIN",
        };
        let mut text = format!(
            "#define A {}\n#define B {}\n#define ACC {}\n#define ACC_NAME {:?}\n#define FROM {}\n#define NK {}\n\
             #define NR {}\n#define IDX {}\n#define GROUP {group}\n#define OP_{op}\n#define LOWEST {}\n\
             #define HIGHEST {}\n#define STEP {step}\n#define STEP16 {step}16\n",
            self.input,
            self.output,
            self.acc.cl_name(),
            self.acc,
            self.input.compute().cl_name(),
            plan.kept.rank(),
            plan.reduced.rank(),
            index_type(wide),
            if integer { "LONG_MIN" } else { "-INFINITY" },
            if integer { "LONG_MAX" } else { "INFINITY" },
            step = if self.acc == Compute::F32 { "int" } else { "long" },
        );
        text += &vector_defines(self.input, schedule.width);
        text += &flag(schedule.by_column && schedule.width > 1, "COLUMNS");
        text += &flag(integer, "INTEGERS");
        text += &flag(self.rule.combination.is_arg(), "ARG");
        text += &flag(self.rule.element == Element::Truth, "NONZERO");
        text += &flag(self.stage == Stage::First, "PARTIAL");
        text += &flag(self.stage == Stage::Second, "PAIRS");
        text += &flag(self.stage == Stage::LastGroup, "LAST_GROUP_SUMS");
        if let Element::Of(element) = &self.rule.element {
            text += &(flag(true, "MAPPED") + &function(element, self.input.compute(), "element"));
        }
        if let Some(finish) = &self.rule.finish {
            text += &(flag(true, "FINISHED") + &function(finish, self.acc, "finish"));
        }
        text + STRIDED_DIMS + TEMPLATE
    }
}

/// The formula as a function of a value and a number, `NAME_of(v, n)`.
fn function(formula: &Expr, compute: Compute, name: &str) -> String {
    let program = Program::of(std::slice::from_ref(formula));
    let (c, scalar) = (compute.cl_name(), if program.scalars() > 0 { ", n" } else { "" });
    let made = program.emit(compute, name);
    format!("{made}{c} {name}_of({c} v, {c} n)\n{{\n    {c} o;\n    {name}(v{scalar}, &o);\n    return o;\n}}\n")
}

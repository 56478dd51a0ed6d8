//! Reductions on OpenCL, in one or two launches: `kernels/reduce.cl`.

use std::ops::RangeInclusive;

use crate::backend::opencl::prelude::*;
use crate::device::opencl::ARRIVAL_COUNTERS;

const TEMPLATE: &str = concat!(
    include_str!("../../../kernels/reduce.cl"),
    include_str!("../../../kernels/reduce_groups.cl"),
    include_str!("../../../kernels/reduce_processor.cl"),
);

/// The row lengths for which a CPU work-item reduces sixteen rows at once. A kernel is compiled for each length.
const SHORT_ROWS: RangeInclusive<usize> = 2..=4;
/// The minimum number of such short rows. For fewer rows, compiling the kernel would take longer than it saves.
const MIN_SHORT_ROWS: usize = 1 << 14;

/// The stage of a reduction. First and Second are the two launches of argmax, between which pairs of value and index are passed. Other
/// reductions use Whole for both launches.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ReduceStage {
    Whole,
    First,
    Second,
    /// Both stages in one launch: the last work-group to finish a result combines the slices of that result.
    LastGroup,
}

/// Reduces in one launch, or in two if few results have many elements each.
pub(crate) fn launch_reduction(reduction: &Reduction) -> Result<()> {
    let Reduction { rule, x, mask, out, number, .. } = *reduction;
    let id = static_id(reduction.rule);
    let first = [id, number.to_bits()];
    let numbers: SmallVec<[u64; 8]> = first.into_iter().chain(mask.iter().map(|&reduced| reduced.into())).collect();
    let key = Key { kind: OpKind::Reduce, numbers: &numbers, exprs: &[], tensors: &[x, out] };
    launch_cache::launch_cached(&key, Params::default(), || make_plan(rule, x, &reduction.plan(), out, number))
        .map(drop)
}

/// Makes the launch plan. The plan's tensors are the input, the results, and the partial results if the input is cut into slices.
fn make_plan(rule: &Rule, t: &Tensor, plan: &ReductionPlan, out: &Tensor, number: f64) -> Result<LaunchPlan> {
    let device = t.cl_device()?;
    let (acc, arg) = (rule.accumulator(t.dtype), rule.combination.is_arg());
    let schedule = ReduceSchedule::choose(device, plan, load_width(device, arg, t.dtype, plan), false);
    // The offset of the plan's first element, relative to the offset of the tensor.
    let start = plan.start as isize - t.layout.offset as isize;
    if schedule.slices == 1 {
        let whole = ReductionKernel { rule, input: t.dtype, output: out.dtype, acc, stage: ReduceStage::Whole };
        return Ok(LaunchPlan::single(device, whole.kernel_launch(device, (0, start), 1, plan, &schedule, number)?));
    }
    // Partial results have the dtype of the accumulator. A pair of value and index takes two I64 elements (16 bytes).
    let count = plan.outs * schedule.slices;
    let partial = Some(if arg { (2 * count, DType::I64) } else { (count, acc.dtype()) });
    if schedule.combines_in_last_group(device) {
        let both = ReductionKernel { rule, input: t.dtype, output: out.dtype, acc, stage: ReduceStage::LastGroup };
        let launch = both.kernel_launch(device, (0, start), 1, plan, &schedule, number)?;
        return Ok(LaunchPlan::new(device, partial, [launch]));
    }
    let stage = if arg { ReduceStage::First } else { ReduceStage::Whole };
    let (first, second) = rule.stages();
    let first = ReductionKernel { rule: &first, input: t.dtype, output: acc.dtype(), acc, stage };
    let first = first.kernel_launch(device, (0, start), 2, plan, &schedule, number)?;
    let rest = ReductionPlan {
        start: 0,
        kept: Axes::single(plan.outs, schedule.slices as isize),
        reduced: Axes::single(schedule.slices, 1),
        outs: plan.outs,
        n: schedule.slices,
    };
    let stage = if arg { ReduceStage::Second } else { ReduceStage::Whole };
    let second = ReductionKernel { rule: &second, input: acc.dtype(), output: out.dtype, acc, stage };
    // Pairs of value and index have 16 bytes each, which is already the widest load.
    let width = if arg { 1 } else { load_width(device, arg, acc.dtype(), &rest) };
    let schedule = ReduceSchedule { slices: 1, chunk: rest.n, ..ReduceSchedule::choose(device, &rest, width, arg) };
    let second = second.kernel_launch(device, (2, 0), 1, &rest, &schedule, number)?;
    Ok(LaunchPlan::new(device, partial, [first, second]))
}

/// Returns the number of elements that a work-item loads at once. This is above 1 if the elements of a result are contiguous, or the
/// first elements of adjacent results.
fn load_width(device: &ClDevice, arg: bool, dtype: DType, plan: &ReductionPlan) -> usize {
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

/// How a launch is distributed over the work-items of the device.
struct ReduceSchedule {
    /// The number of elements that a work-item loads at once.
    width: usize,
    /// The row length if each CPU work-item reduces sixteen short contiguous rows, otherwise 0.
    row: usize,
    by_column: bool,
    /// The number of work-items that share a result (GPUs only).
    lanes: usize,
    /// The number of slices into which the elements of a result are cut, and the length of a slice (`chunk`).
    slices: usize,
    chunk: usize,
    global: usize,
    local: usize,
}

impl ReduceSchedule {
    /// `reads_pairs` is true for a launch whose input is pairs of value and index.
    fn choose(device: &ClDevice, plan: &ReductionPlan, width: usize, reads_pairs: bool) -> ReduceSchedule {
        let units = device.info().compute_units.max(1);
        let (outs, n) = (plan.outs, plan.n);
        if device.info().kind == DeviceKind::Cpu {
            let (width, lanes) = (1, 1);
            let contiguous = plan.reduced.rank() == 1 && plan.reduced.inner().1 == 1 && plan.kept.rank() == 1;
            if contiguous
                && plan.kept.inner().1 == n as isize
                && SHORT_ROWS.contains(&n)
                && outs >= MIN_SHORT_ROWS
                && !reads_pairs
            {
                let (global, local) = (outs.div_ceil(16), DEFAULT_GROUP_SIZE);
                return ReduceSchedule { width, row: n, by_column: false, lanes, slices: 1, chunk: n, global, local };
            }
            // A work-item computes sixteen adjacent columns if columns are contiguous, otherwise one result.
            let (columns, across) = plan.kept.inner();
            let by_column = plan.by_column() && across == 1 && columns >= 16;
            let items = if by_column { outs / columns * columns.div_ceil(16) } else { outs };
            let enough = if by_column { 4096 } else { 32768 };
            let wanted = if items >= 2 * units || n <= enough { 1 } else { (4 * units).div_ceil(items) };
            let (slices, chunk) = cut_into_slices(n, wanted, enough / 4, 32);
            let global = items * slices;
            // A work-group takes extra time, so work-groups are large if there are many work-items. Few work-items are balanced best in groups of one.
            let local = if global >= 64 * 8 * units { DEFAULT_GROUP_SIZE } else { 1 };
            return ReduceSchedule { width, row: 0, by_column, lanes, slices, chunk, global, local };
        }
        let group = default_group_size(device);
        let by_column = plan.by_column();
        // The number of results of a work-item, and the number of elements of each result that it loads at once.
        let (across, along) = if by_column { (width, 1) } else { (1, width) };
        let columns = plan.kept.inner().0 / across;
        let enough = |columns: usize| outs.div_ceil(columns * across) >= 2 * units;
        let lanes = match along {
            // A work-group reads vectors of adjacent columns: up to 16 vectors of 16 bytes (256 contiguous bytes).
            1 if width > 1 => (group / columns.next_power_of_two().min(16)).min(n.next_power_of_two()),
            1 => lanes_per_row(group, by_column, n, columns, enough),
            // Each work-item makes sixteen loads, or fewer if there are too few results to keep the device busy.
            _ => {
                let fair = n.div_ceil(16 * along).max((256 * units).div_ceil(outs)).next_power_of_two();
                fair.min(n.div_ceil(4 * along).next_power_of_two()).max(4).min(group)
            }
        };
        let groups = outs.div_ceil(group / lanes * across);
        let waves = if width > 1 { 4 } else { 8 };
        let wanted = if groups >= 2 * units || n <= 128 * lanes { 1 } else { (waves * units).div_ceil(groups) };
        let (slices, chunk) = cut_into_slices(n, wanted, 16 * lanes, 4 * lanes * along);
        ReduceSchedule { width, row: 0, by_column, lanes, slices, chunk, global: groups * slices * group, local: group }
    }

    /// True if the last work-group of a result combines the slices of that result. This needs a counter for each result, and a memory fence,
    /// which only compilers that accept PTX provide. The test for the fence may build a kernel, so it comes last.
    fn combines_in_last_group(&self, device: &ClDevice) -> bool {
        let groups = self.global / self.local / self.slices;
        device.info().kind != DeviceKind::Cpu && groups <= ARRIVAL_COUNTERS && device.has_fence()
    }
}

/// A sum that is computed again with scaled elements if it overflows or underflows, and its accumulator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct RescaledSum(Rescaled, Compute);

impl Define for RescaledSum {
    fn define(&self, _: &str, out: &mut String) {
        let RescaledSum(rescaled, acc) = *self;
        let undone = if rescaled == Rescaled::Variance { "(v) / (factor) / (factor)" } else { "(v) / (factor)" };
        true.define("RESCALED", out);
        rescaled.squares().define("SQUARES", out);
        out.push_str(&safe_range_defines(acc));
        (rescaled == Rescaled::Norm).define("ROOT", out);
        out.push_str(&format!("#define UNDO(v, factor) ({undone})\n"));
    }
}

/// The properties for which a reduction kernel is compiled, besides the schedule and the ranks of the plan.
struct ReductionKernel<'a> {
    rule: &'a Rule,
    input: DType,
    output: DType,
    acc: Compute,
    stage: ReduceStage,
}

impl ReductionKernel<'_> {
    /// Makes the launch that reads tensor `x` of the list from offset `start` on, and writes tensor `y`. In stage LastGroup, tensor `y + 1`
    /// holds the partial results. `number` is [`Reduction::number`].
    fn kernel_launch(
        &self,
        device: &'static ClDevice,
        (x, start): (usize, isize),
        y: usize,
        plan: &ReductionPlan,
        schedule: &ReduceSchedule,
        number: f64,
    ) -> Result<KernelLaunch> {
        let wide = needs_64_bit([plan.n, plan.outs * schedule.slices * 16, schedule.global]);
        let group = default_group_size(device);
        let (input, output, acc, rule) = (self.input, self.output, self.acc, self.rule);
        let integers = acc == Compute::I64;
        let [low, high] = if integers { ["LONG_MIN", "LONG_MAX"] } else { ["-INFINITY", "INFINITY"] };
        let [step, step16] = if acc == Compute::F32 { ["int", "int16"] } else { ["long", "long16"] };
        let config = kernel_config! {
            "A" => input, "B" => output, "ACC" => acc, "FROM" => input.compute().cl_name(),
            "NK" => plan.kept.rank(), "NR" => plan.reduced.rank(), "IDX" => index_type(wide), "GROUP" => group,
            "" => ["OP_SUM", "OP_PROD", "OP_MAX", "OP_MIN", "OP_MAX", "OP_MIN"][rule.combination as usize],
            "" => Vectors(input, schedule.width), "COLUMNS" => schedule.by_column && schedule.width > 1,
            "LOWEST" => low, "HIGHEST" => high, "STEP" => step, "STEP16" => step16, "INTEGERS" => integers,
            "ROW" => (schedule.row > 0).then_some(schedule.row),
            "" => rule.rescaled.map(|rescaled| RescaledSum(rescaled, acc)), "ARG" => rule.combination.is_arg(),
            "NONZERO" => rule.element == Element::NonZero,
            "" => ["", "PARTIAL", "PAIRS", "LAST_GROUP_SUMS"][self.stage as usize],
        };
        let element = if let Element::Formula(e) = &rule.element { Some(e) } else { None };
        let exprs: SmallVec<[Expr; 2]> = element.into_iter().chain(&rule.finish).cloned().collect();
        let formulas = (element.is_some(), rule.finish.is_some());
        let key = KernelKey::new("reduce", &(config, formulas), &exprs);
        let kernel = get_or_build_kernel(device, key, "reduce", || {
            let mapped =
                element.map(|e| "#define MAPPED\n".to_owned() + &formula_function(e, input.compute(), "element"));
            let finish = rule.finish.as_ref();
            let finished = finish.map(|e| "#define FINISHED\n".to_owned() + &formula_function(e, acc, "finish"));
            config.source(&[&mapped.unwrap_or_default(), &finished.unwrap_or_default(), STRIDED_DIMS, TEMPLATE])
        })?;
        let number = scalar_arg(self.acc, Scalar::Float(number));
        // A pair of value and index takes two elements of an I64 tensor.
        let elements = |pairs: bool| if pairs { 2 } else { 1 };
        let cpu = device.info().kind == DeviceKind::Cpu;
        let local = match cpu {
            true => tuned_group_size(device, &kernel, schedule.global, schedule.local),
            false => clamp_group_size(&kernel, schedule.local),
        };
        let mut launch = KernelLaunch::new(kernel, schedule.global, local);
        launch.push_tensor_at(x, start, elements(self.stage == ReduceStage::Second));
        launch.push_tensor_at(y, 0, elements(self.stage == ReduceStage::First));
        launch.push_words(plan.kept.words());
        launch.push_words(plan.reduced.words());
        launch
            .push_fixed(args![; plan.outs, plan.n, schedule.chunk, schedule.slices as u32, number, schedule.by_column]);
        if !cpu {
            launch.push_fixed(args![; schedule.lanes as u32]);
        }
        if self.stage == ReduceStage::LastGroup {
            launch.push_tensor_at(y + 1, 0, elements(self.rule.combination.is_arg()));
            launch.push(Argument::Arrivals);
            launch.push(Argument::FirstArrival);
        }
        Ok(launch)
    }
}

/// Returns the formula as an OpenCL C function `{name}_of(v, n)`, where `v` is a value and `n` the number of elements.
fn formula_function(formula: &Expr, compute: Compute, name: &str) -> String {
    let program = Program::shared(std::slice::from_ref(formula));
    let (c, scalar) = (compute.cl_name(), if program.scalars() > 0 { ", n" } else { "" });
    let made = program.emit(compute, name);
    format!("{made}{c} {name}_of({c} v, {c} n)\n{{\n    {c} o;\n    {name}(v{scalar}, &o);\n    return o;\n}}\n")
}

//! Softmax, log-softmax, logsumexp and their gradients on OpenCL: `kernels/softmax.cl`.

use crate::backend::opencl::prelude::*;

pub(crate) const ROWS: &str = include_str!("../../../kernels/rows.cl");
pub(crate) const TEMPLATE: &str = include_str!("../../../kernels/softmax.cl");
const SLICES: &str = include_str!("../../../kernels/softmax_slices.cl");

/// Returns the configuration that all templates of rows need.
pub(super) fn row_config(dtype: DType, rank: usize, wide: bool, group: usize) -> impl KernelConfig {
    kernel_config! {
        "A" => dtype, "ACC" => dtype.compute(), "NK" => rank, "IDX" => index_type(wide), "GROUP" => group,
    }
}

/// The maximum number of registers in which a work-item keeps values of a row.
const MAX_REGISTERS_PER_ITEM: usize = 64;

/// The maximum number of work-items that share a row of f32. The macro FOLD can combine the values of at most this number.
const MAX_LANES: usize = 1024;
/// The maximum number of registers in which a work-group keeps values: half the registers of an NVIDIA compute unit.
const MAX_REGISTERS_PER_GROUP: usize = 32 << 10;

/// How rows are distributed over a GPU.
struct SoftmaxSchedule {
    by_column: bool,
    /// The number of elements that a work-item loads at once.
    width: usize,
    /// The number of work-items that share a row.
    lanes: usize,
    /// The number of work-items of a work-group.
    group: usize,
    /// The number of vectors of `width` elements that each work-item keeps in registers. It is 0 if rows are too long for registers
    /// and are cut into slices or read several times.
    kept: usize,
}

impl SoftmaxSchedule {
    fn choose(device: &ClDevice, kind: RowOp, tensors: [&Tensor; 3], rows: &SoftmaxRows) -> SoftmaxSchedule {
        let (count, n) = (rows.count(), rows.n);
        let (units, most) = (device.info().compute_units.max(1), default_group_size(device));
        let largest = max_group_size(device);
        // The elements of one column in adjacent rows are read together if they are closer in memory than adjacent elements of one row.
        let across = rows.strided.strides[0].last().copied().unwrap_or(0).unsigned_abs();
        let by_column = count > 1 && n > 1 && across != 0 && across < rows.steps[0].unsigned_abs();
        let columns = rows.strided.dims.last().copied().unwrap_or(1);
        // The operands that are accessed as vectors. The result of logsumexp, with one element per row, and masks are not.
        let spans = match kind {
            RowOp::LogSumExp => &[0usize][..],
            RowOp::MaskedSoftmax => &[0, 1],
            _ => &[0, 1, 2],
        };
        let in_rows = n > 1 && spans.iter().all(|&k| rows.steps[k] == 1);
        let starts = spans.iter().flat_map(|&k| {
            let steps = rows.strided.strides[k].iter().copied();
            steps.chain([tensors[k].layout.offset as isize, n as isize])
        });
        let width = if in_rows { vector_width(device, tensors[0].dtype, starts) } else { 1 };
        // The number of 32-bit registers for one element.
        let two = matches!(kind, RowOp::SoftmaxGrad | RowOp::LogSoftmaxGrad);
        let each = if two { 2 } else { 1 } * (tensors[0].dtype.compute().dtype().size() / 4);
        let lanes = match by_column {
            true => {
                lanes_per_row(most, true, n, columns, |columns_at_once| count.div_ceil(columns_at_once) >= 2 * units)
            }
            // Each work-item makes four loads: fewer loads do not saturate the memory, more loads need many registers. For long
            // rows, each work-item makes eight loads before the largest work-groups are used.
            false if width > 1 => {
                let most = (if n * each <= MAX_LANES * 16 { MAX_LANES / 2 } else { MAX_LANES }) / each;
                n.div_ceil(4 * width).next_power_of_two().max(4).min(most).min(largest)
            }
            false => n.div_ceil(16).next_power_of_two().max(32).min(n.next_power_of_two()).min(most),
        };
        let group = most.max(lanes);
        let kept = vectors_per_item(n, width * lanes);
        let registers = kept * width * each;
        let schedule = SoftmaxSchedule { by_column, width, lanes, group, kept };
        match registers <= MAX_REGISTERS_PER_ITEM && registers * lanes <= MAX_REGISTERS_PER_GROUP {
            true => schedule,
            false if by_column || kind == RowOp::MaskedSoftmax => schedule.for_repeated_reads(device),
            false => SoftmaxSchedule { kept: 0, ..schedule },
        }
    }

    /// Returns the schedule for rows that do not stay in registers but are read several times.
    fn for_repeated_reads(self, device: &ClDevice) -> SoftmaxSchedule {
        let group = default_group_size(device);
        SoftmaxSchedule { width: 1, lanes: self.lanes.min(group), group, kept: 0, ..self }
    }

    /// Returns the part of the configuration for rows that are kept in registers; None if rows are not kept.
    fn cached(&self) -> Option<impl KernelConfig + use<>> {
        let SoftmaxSchedule { kept, lanes, by_column, .. } = *self;
        (kept > 0).then_some(kernel_config! { "CACHED" => kept, "LANES" => lanes, "BY_COLUMN" => Bit(by_column) })
    }
}

/// Returns the macro that selects the operation in the templates.
fn operation_macro(kind: RowOp) -> &'static str {
    ["SOFTMAX", "SOFTMAX", "LOG_SOFTMAX", "LOGSUMEXP", "SOFTMAX_GRAD", "LOG_SOFTMAX_GRAD"][kind as usize]
}

/// Computes the operation in one launch, or in two if rows are too long for registers.
pub(crate) fn launch_softmax(softmax: &Softmax) -> Result<()> {
    let Softmax { kind, x, z, out, d, mask } = *softmax;
    let numbers = [kind as u64, d as u64, mask.kind as u64, mask.causal as u64, mask.first as u64];
    let tensors = [x, out, z];
    let key = Key { kind: OpKind::Row, numbers: &numbers, exprs: &[], tensors: &tensors };
    launch_cache::launch_cached(&key, Params::default(), || make_plan(kind, tensors, &softmax.rows())).map(drop)
}

/// Makes the launch plan for these tensors: the input, the result and the second operand.
pub(crate) fn make_plan(kind: RowOp, tensors: [&Tensor; 3], rows: &SoftmaxRows) -> Result<LaunchPlan> {
    let [x, _, z] = tensors;
    let device = x.cl_device()?;
    let (count, n, rank) = (rows.count(), rows.n, rows.strided.dims.len().max(1));
    let units = device.info().compute_units.max(1);
    let cpu = device.info().kind == DeviceKind::Cpu;
    let schedule = match cpu {
        true => SoftmaxSchedule { by_column: false, width: 1, lanes: 1, group: 1, kept: 0 },
        false => SoftmaxSchedule::choose(device, kind, tensors, rows),
    };
    if !cpu && schedule.kept == 0 && !schedule.by_column && kind != RowOp::MaskedSoftmax {
        return plan_slices(device, kind, tensors, rows, schedule.width);
    }
    let build = |schedule: &SoftmaxSchedule| {
        let (global, local) = match cpu {
            true => (count, if count >= 64 * 8 * units { DEFAULT_GROUP_SIZE } else { 1 }),
            false => (count.div_ceil(schedule.group / schedule.lanes) * schedule.group, schedule.group),
        };
        let wide = needs_64_bit([n, global]);
        let masked = kind == RowOp::MaskedSoftmax;
        let config = kernel_config! {
            "" => row_config(x.dtype, rank, wide, schedule.group), "" => schedule.cached(),
            "" => Vectors(x.dtype, schedule.width),
            "" => masked.then_some(kernel_config! { "MASK" => rows.mask.kind as usize, "Z" => z.dtype }),
            "" => operation_macro(kind),
        };
        let kernel = config.kernel(device, "row", "row", &[STRIDED_DIMS, ROWS, TEMPLATE])?;
        let local = if cpu { tuned_group_size(device, &kernel, global, local) } else { local };
        Ok::<_, Error>((kernel, global, local))
    };
    let made = build(&schedule)?;
    // If the compiler needs too many registers for work-groups of this size, rows are read several times instead.
    let (schedule, (kernel, global, local)) = if made.2 <= made.0.max_work_group() {
        (schedule, made)
    } else {
        let schedule = schedule.for_repeated_reads(device);
        let made = build(&schedule)?;
        (schedule, made)
    };
    let mut launch = KernelLaunch::new(kernel, global, local);
    (0..3).for_each(|k| launch.push_tensor(k));
    launch.push_words(dims_words(&rows.strided));
    let ([a, b, c], SoftmaxMask { causal, first, .. }) = (rows.steps, rows.mask);
    launch.push_fixed(args![; count, n, a, b, c, schedule.by_column, schedule.lanes as u32, causal, first]);
    Ok(LaunchPlan::single(device, launch))
}

/// Makes the launch plan for rows that are cut into slices of several blocks. One launch reduces each slice, the next launch writes the results.
fn plan_slices(
    device: &'static ClDevice,
    kind: RowOp,
    tensors: [&Tensor; 3],
    rows: &SoftmaxRows,
    width: usize,
) -> Result<LaunchPlan> {
    let (x, acc) = (tensors[0], tensors[0].dtype.compute().dtype());
    let (count, n, rank, group) = (rows.count(), rows.n, rows.strided.dims.len().max(1), default_group_size(device));
    let two = matches!(kind, RowOp::SoftmaxGrad | RowOp::LogSoftmaxGrad);
    let kept = (16 / width / if two { 2 } else { 1 } / (acc.size() / 4)).max(1);
    let block = group * kept * width;
    let (slices, chunk) = slice_rows(device, count, n, block);
    let launch = |is_first_launch: bool| {
        let groups = if kind == RowOp::LogSumExp && !is_first_launch { count } else { count * slices };
        let wide = needs_64_bit([n + block + chunk, groups * group]);
        let config = kernel_config! {
            "" => row_config(x.dtype, rank, wide, group), "LANES" => group, "CACHED" => kept,
            "" => Vectors(x.dtype, width), "SLICES" => is_first_launch, "" => operation_macro(kind),
        };
        let kernel = config.kernel(device, "softmax_slices", "row", &[STRIDED_DIMS, ROWS, ROW_BLOCKS, SLICES])?;
        let mut launch = KernelLaunch::new(kernel, groups * group, group);
        (0..3).for_each(|k| launch.push_tensor(k));
        launch.push_words(dims_words(&rows.strided));
        launch.push_fixed(args![; n]);
        launch.push_fixed(rows.steps.map(Arg::from));
        // An element of the scratch tensor is a pair of numbers.
        launch.push_tensor_at(3, 0, 2);
        launch.push_fixed(args![; slices as u32, chunk]);
        Ok::<_, Error>(launch)
    };
    Ok(LaunchPlan::new(device, Some((2 * count * slices, acc)), [launch(true)?, launch(false)?]))
}

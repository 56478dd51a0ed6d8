//! Normalisation on OpenCL: `kernels/norm.cl`.

use crate::backend::opencl::norm_channels;
use crate::backend::opencl::prelude::*;
use crate::device::opencl::FAST_DIVISION;

const TEMPLATE: &str =
    concat!(include_str!("../../../kernels/norm.cl"), include_str!("../../../kernels/norm_processor.cl"));

/// The template with the struct of norm arguments. It follows [`VECTOR_ACCESS`] and the macros that [`norm_operands`] returns.
pub(super) const ARGUMENTS: &str = include_str!("../../../kernels/norm_arguments.cl");

/// The maximum number of registers that a work-item fills with a row.
const MAX_REGISTERS_PER_ITEM: usize = 64;
/// The maximum number of registers that a work-group fills with rows.
const MAX_REGISTERS_PER_GROUP: usize = 32 << 10;
/// The maximum number of rows for which one GPU work-item adds up columns. A chain of more additions would round too often.
const MAX_ROWS_PER_ITEM: usize = 64;

pub(crate) fn launch_norm(rows: &Normalisation) -> Result<()> {
    let (tensors, numbers) = (rows.tensors(), [switch_bits(rows), rows.eps.to_bits()]);
    let key = Key { kind: OpKind::NormRows, numbers: &numbers, exprs: &[], tensors: &tensors };
    launch_cache::launch_cached(&key, Params::default(), || make_plan(rows)).map(drop)
}

/// Launches the cached plan of a forward pass over tensors of these layouts. If there is no cached plan, makes one from the `views`.
pub(crate) fn forward(norm: &NormForward) -> Result<()> {
    let NormForward { given, grouping, dims, views } = norm;
    let (view, number) = match **grouping {
        RowGrouping::Last(n) => (0, n),
        RowGrouping::Groups(groups) => (1, groups),
        RowGrouping::Batch => (2, 0),
    };
    let switches = dims.iter().fold(switch_bits(given), |bits, &on| bits << 1 | u64::from(on));
    let (tensors, numbers) = (given.tensors(), [view, number as u64, switches, given.eps.to_bits()]);
    let key = Key { kind: OpKind::Norm, numbers: &numbers, exprs: &[], tensors: &tensors };
    let slot = match launch_cache::find_plan(&key) {
        Ok(entry) => return entry.plan.launch(&tensors, Params::default()),
        Err(slot) => slot,
    };
    let views = views()?;
    let rows = given.with_views(&views);
    let (views, plan) = (rows.tensors(), make_plan(&rows)?);
    plan.launch(&views, Params::default())?;
    // If a view is a copy of an operand, the plan cannot be cached, because the next call would make another copy.
    if views.iter().zip(&tensors).all(|(view, t)| view.shares_storage(t)) {
        slot.insert_plan(&key, plan);
    }
    Ok(())
}

/// Returns the properties that a plan depends on besides dtypes and sizes, one bit each.
fn switch_bits(rows: &Normalisation) -> u64 {
    let given = [rows.z, rows.weight, rows.bias, rows.sums, rows.columns].map(|t| t.is_some());
    let numbers = [rows.variance.is_some(), rows.variance == Some(true), rows.rms];
    given.into_iter().chain(numbers).fold(0, |bits, on| bits << 1 | u64::from(on))
}

/// Returns the macros that tell the template [`ARGUMENTS`] which operands are present.
pub(super) fn norm_operands(rows: &Normalisation) -> impl KernelConfig + use<> {
    let [backward, weight, bias, weighted_rows] = [rows.z, rows.weight, rows.bias, rows.sums].map(|t| t.is_some());
    kernel_config! {
        "BACKWARD" => backward, "WEIGHT" => weight, "BIAS" => bias, "WEIGHTED_ROWS" => weighted_rows,
    }
}

/// Returns the definitions that depend on the precision of a dtype: the range of safe sums, and the fast division for halves.
pub(super) fn precision_defines(dtype: DType) -> String {
    let division = if matches!(dtype, DType::F16 | DType::BF16) { FAST_DIVISION } else { "" };
    safe_range_defines(dtype.compute()) + division
}

/// How rows are distributed over a GPU.
struct NormSchedule {
    /// The number of elements that a work-item loads at once.
    width: usize,
    /// Whether the elements of a vector have different weights, instead of one weight for the whole vector.
    each: bool,
    /// The number of work-items that share a row.
    lanes: usize,
    /// The number of work-items of a work-group.
    group: usize,
    /// The number of vectors of `width` elements that each work-item keeps in registers.
    kept: usize,
    /// The number of slices of a row, and the elements of a slice (`chunk`); `slices` is 0 if a whole row is kept in registers.
    slices: usize,
    chunk: usize,
}

impl NormSchedule {
    fn choose(device: &ClDevice, rows: &Normalisation) -> NormSchedule {
        let (width, each) = load_width(device, rows);
        let numbers = registers_per_element(rows.x, rows.z.is_some(), rows.columns.is_some());
        let whole = NormSchedule::keep_rows(device, rows.len(), width, numbers, rows.columns.is_some());
        NormSchedule { each, ..whole.unwrap_or_else(|| NormSchedule::slice_long_rows(device, rows, width, numbers)) }
    }

    /// Keeps whole rows in registers, with four loads for each work-item: fewer loads leave the memory idle, more loads need many
    /// registers. Returns None if rows are too long, unless `must` is true.
    fn keep_rows(device: &ClDevice, n: usize, width: usize, numbers: usize, must: bool) -> Option<NormSchedule> {
        let largest = 1 << device.info().max_work_group.clamp(1, 1024).ilog2();
        let most = default_group_size(device);
        let lanes = match width {
            1 => n.div_ceil(16.min(MAX_REGISTERS_PER_ITEM / numbers)).max(32).min(n),
            _ => n.div_ceil((4 * width).min(MAX_REGISTERS_PER_ITEM / numbers)).max(4),
        };
        let lanes = lanes.next_power_of_two().min(if n * numbers <= 1 << 14 { 512 } else { 1024 }).min(largest);
        let kept = vectors_per_item(n, width * lanes);
        let filled = kept * width * numbers;
        let schedule = NormSchedule { width, each: false, lanes, group: most.max(lanes), kept, slices: 0, chunk: 0 };
        (must || filled <= MAX_REGISTERS_PER_ITEM && filled * lanes <= MAX_REGISTERS_PER_GROUP).then_some(schedule)
    }

    /// Cuts rows into as many slices as one work-group can combine if each work-item loads one partial result.
    fn slice_long_rows(device: &ClDevice, rows: &Normalisation, width: usize, numbers: usize) -> NormSchedule {
        let (n, group) = (rows.len(), default_group_size(device));
        let kept = (MAX_REGISTERS_PER_ITEM / 2 / width / numbers).max(1);
        let block = group * kept * width;
        let chunk = block * n.div_ceil(block * group);
        NormSchedule { width, each: false, lanes: group, group, kept, slices: n.div_ceil(chunk), chunk }
    }

    /// Returns the part of the configuration that only the GPU template needs.
    fn spread(&self, rows: &Normalisation) -> impl KernelConfig + use<> {
        let NormSchedule { lanes, group, kept, each, .. } = *self;
        let (columns, variance, root) = (rows.columns.is_some(), rows.variance.is_some(), rows.variance == Some(true));
        kernel_config! {
            "LANES" => lanes, "GROUP" => group, "CACHED" => kept, "EACH" => each, "COLUMNS" => columns,
            "VARIANCE" => variance, "ROOT" => root,
        }
    }
}

/// Returns the number of 32-bit registers for one element of a row.
fn registers_per_element(x: &Tensor, backward: bool, columns: bool) -> usize {
    let numbers = if backward { 2 } else { 1 } * if columns { 2 } else { 1 };
    numbers * x.dtype.compute().dtype().size() / 4
}

/// Returns the number of elements that are loaded at once, and whether weights are loaded as vectors as well.
fn load_width(device: &ClDevice, rows: &Normalisation) -> (usize, bool) {
    let inner = rows.x.shape().dims()[3];
    let starts = |t: &Tensor| -> SmallVec<[isize; 4]> {
        let strides = t.strides()[..3].iter().zip(t.shape().dims()).filter(|(_, n)| **n > 1).map(|(s, _)| *s);
        strides.chain([t.layout.offset as isize]).collect()
    };
    let written = rows.variance.is_none().then_some(rows.y);
    let moved = [Some(rows.x), written, rows.z].into_iter().flatten();
    let factors = || [rows.weight, rows.bias].into_iter().flatten();
    let each = factors().next().is_some_and(|t| t.strides()[3] == 1);
    let alike = factors().all(|t| t.strides()[3] == isize::from(each));
    if !(alike && moved.clone().all(|t| t.strides()[3] == 1)) {
        return (1, false);
    }
    let all = moved.chain(factors().filter(|_| each)).flat_map(starts);
    let width = vector_width(device, rows.x.dtype, all.chain([inner as isize]));
    (width, each && width > 1)
}

/// Allocates the partial sums of the columns of `count` rows of `n` elements, see [`Normalisation::columns`]. The launch of the gradient
/// writes one partial sum per column and work-group. Returns None on CPUs, and for rows that do not fit in registers.
pub(crate) fn alloc_sums(x: &Tensor, count: usize, n: usize) -> Result<Option<Tensor>> {
    let device = x.cl_device()?;
    let width = vector_width(device, x.dtype, [n as isize].into_iter());
    if device.info().kind == DeviceKind::Cpu {
        return Ok(None);
    }
    let Some(schedule) = NormSchedule::keep_rows(device, n, width, registers_per_element(x, true, true), false) else {
        return Ok(None);
    };
    let slots = 2 * device.info().compute_units.max(1) * (schedule.group / schedule.lanes);
    let parts = count.div_ceil(count.div_ceil(slots).min(MAX_ROWS_PER_ITEM));
    Tensor::empty_with_shape([parts, 2, n], x.dtype.compute().dtype(), x.device()).map(Some)
}

/// Makes the launch plan. The plan's tensors are those that [`Normalisation::tensors`] returns.
pub(crate) fn make_plan(rows: &Normalisation) -> Result<LaunchPlan> {
    let device = rows.x.cl_device()?;
    if let Some(plan) = norm_channels::make_plan(rows)? {
        return Ok(plan);
    }
    if device.info().kind == DeviceKind::Cpu {
        return Ok(LaunchPlan::single(device, kernel_launch(device, rows, "", None, (rows.count(), 1))?));
    }
    let schedule = NormSchedule::choose(device, rows);
    if schedule.slices == 0 {
        let slots = rows.columns.map_or(rows.count(), |parts| parts.shape().dims()[0]);
        let global = slots.div_ceil(schedule.group / schedule.lanes) * schedule.group;
        let launch = kernel_launch(device, rows, "", Some(&schedule), (global, schedule.group))?;
        return Ok(LaunchPlan::single(device, launch));
    }
    let numbers = registers_per_element(rows.x, rows.z.is_some(), false);
    let schedule =
        NormSchedule { each: schedule.each, ..NormSchedule::slice_long_rows(device, rows, schedule.width, numbers) };
    let groups = rows.count() * schedule.slices;
    let applied = if rows.variance.is_some() { rows.count() } else { groups };
    let parts = kernel_launch(device, rows, "PARTS", Some(&schedule), (groups * schedule.group, schedule.group))?;
    let apply = kernel_launch(device, rows, "APPLY", Some(&schedule), (applied * schedule.group, schedule.group))?;
    let scratch = (2 * groups, rows.x.dtype.compute().dtype());
    Ok(LaunchPlan::new(device, Some(scratch), [parts, apply]))
}

/// Makes one launch. If rows are cut into slices, `part` is the macro of the launch's stage; otherwise `part` is empty.
fn kernel_launch(
    device: &'static ClDevice,
    rows: &Normalisation,
    part: &'static str,
    schedule: Option<&NormSchedule>,
    (global, local): (usize, usize),
) -> Result<KernelLaunch> {
    let tensors = rows.tensors();
    let (count, n) = (rows.count(), rows.len());
    // Kernels also compute positions past the end of a row, so the index type must hold these positions.
    let beyond = schedule.map_or(0, |schedule| schedule.lanes * schedule.kept * schedule.width);
    let (wide, flat) = (needs_64_bit([count + beyond, n + beyond, global]), rows.x.shape().dims()[2] == 1);
    let dtype = rows.x.dtype;
    let config = kernel_config! {
        "" => element_types(dtype, wide), "W" => rows.weight.or(rows.bias).unwrap_or(rows.x).dtype,
        "" => schedule.map(|schedule| schedule.spread(rows)),
        "" => Vectors(dtype, schedule.map_or(1, |schedule| schedule.width)), "" => norm_operands(rows),
        "RMS" => rows.rms, "FLAT" => flat, "" => part,
    };
    let precision = precision_defines(dtype);
    let parts = [&*precision, STRIDED_DIMS, VECTOR_ACCESS, ARGUMENTS, TEMPLATE];
    let kernel = config.kernel(device, "norm", "norm", &parts)?;
    let dims = rows.x.shape().dims();
    let sizes = [dims[1], dims[2], dims[3]].map(|d| d as i64);
    let strided = [Some(rows.x), Some(rows.y), rows.z, rows.weight, rows.bias];
    let strides = strided.iter().flat_map(|t| t.unwrap_or(rows.x).strides().iter().map(|&s| s as i64));
    let mut launch = KernelLaunch::new(kernel, global, local);
    let of_rows = tensors.len() - usize::from(rows.columns.is_some());
    if let Some(columns) = rows.columns {
        launch.push_tensor(of_rows);
        launch.push_fixed(args![; count.div_ceil(columns.shape().dims()[0]) as u32]);
    }
    (0..of_rows).for_each(|k| launch.push_tensor(k));
    launch.push_words(sizes.into_iter().chain(strides));
    launch.push_fixed([Arg::from(count), scalar_arg(dtype.compute(), Scalar::Float(rows.eps))]);
    if let Some(schedule) = schedule.filter(|_| !part.is_empty()) {
        // The scratch tensor follows all other tensors. Its elements are pairs of numbers.
        launch.push_tensor_at(tensors.len(), 0, 2);
        launch.push_fixed(args![; schedule.slices as u32, schedule.chunk]);
    }
    Ok(launch)
}

/// Computes the variance of rows. Returns false on CPUs, for which there is no variance kernel.
pub(crate) fn variance(problem: &Variance) -> Result<bool> {
    let &Variance { x, out, freedom, root } = problem;
    if x.cl_device()?.info().kind == DeviceKind::Cpu {
        return Ok(false);
    }
    let dims = x.shape().dims();
    let shape = [dims[0], dims[1], 1, 1].into();
    let y = out.with_layout(Layout { offset: out.layout.offset, ..Layout::contiguous(shape) });
    let (z, weight, bias, sums, columns) = Default::default();
    // The kernel does not write statistics, so `y` is passed as the statistics argument.
    let (statistics, eps, variance, rms) = (&y, freedom, Some(root), false);
    let rows = Normalisation { x, y: &y, z, weight, bias, statistics, sums, columns, eps, rms, variance };
    launch_norm(&rows)?;
    out.storage.bump_version();
    Ok(true)
}

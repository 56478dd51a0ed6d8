//! Normalisation on OpenCL: `kernels/norm.cl`.

use smallvec::SmallVec;

use crate::backend::opencl::geometry::{
    NEIGHBOURS, STRIDED_DIMS, group_size, groups_kept, is_wide, types, vector_defines, vector_width,
};
use crate::backend::opencl::kernels::{KernelKey, kernel};
use crate::backend::opencl::launch_cache;
use crate::backend::opencl::launch_cache::{Key, OpKind};
use crate::backend::opencl::launch_plan::{KernelLaunch, LaunchPlan};
use crate::backend::opencl::norm_channels;
use crate::backend::problem::map::Params;
use crate::backend::problem::norm::{Normalisation, Views};
use crate::backend::problem::reduction::SafeRange;
use crate::device::DeviceKind;
use crate::device::opencl::{Arg, ClDevice, FAST_DIVISION};
use crate::tensor::Layout;
use crate::{Compute, DType, Result, Tensor};

const TEMPLATE: &str =
    concat!(include_str!("../../../kernels/norm.cl"), include_str!("../../../kernels/norm_processor.cl"));

/// What is ahead of templates of norms, after [`NEIGHBOURS`]; made with the names that [`names`] gives.
pub(super) const ARGUMENTS: &str = include_str!("../../../kernels/norm_arguments.cl");

/// Registers that a work-item fills with a row, at most, and a group.
const KEPT: usize = 64;
const REGISTERS: usize = 32 << 10;
/// Rows that a work-item of GPUs adds the columns of, at most: more in one chain would round too often.
const ADDED: usize = 64;

pub(crate) fn run(rows: &Normalisation) -> Result<()> {
    let (tensors, numbers) = (rows.tensors(), [switches(rows), rows.eps.to_bits()]);
    let key = Key { of: OpKind::NormRows, device: rows.x.device(), numbers: &numbers, exprs: &[], tensors: &tensors };
    launch_cache::launch(&key, Params::default(), || prepare(rows)).map(drop)
}

/// Launches a forward as it was launched before for tensors like these, or else of their views.
pub(crate) fn forward(given: &Normalisation, numbers: &[u64; 4], views: &dyn Fn() -> Result<Views>) -> Result<()> {
    let tensors = given.tensors();
    let key = Key { of: OpKind::Norm, device: given.x.device(), numbers, exprs: &[], tensors: &tensors };
    let slot = match launch_cache::find(&key) {
        Ok(entry) => return entry.plan.launch(&tensors, Params::default()),
        Err(slot) => slot,
    };
    let views = views()?;
    let rows = given.of(&views);
    let (views, plan) = (rows.tensors(), prepare(&rows)?);
    plan.launch(&views, Params::default())?;
    // A copy of an operand has another storage at the next call.
    if views.iter().zip(&tensors).all(|(view, t)| view.shares_storage(t)) {
        slot.keep(&key, plan);
    }
    Ok(())
}

/// What a kernel is made with besides types and sizes, a bit each.
pub(super) fn switches(rows: &Normalisation) -> u64 {
    let given = [rows.z, rows.weight, rows.bias, rows.sums, rows.columns].map(|t| t.is_some());
    let numbers = [rows.variance.is_some(), rows.variance == Some(true), rows.rms];
    given.into_iter().chain(numbers).fold(0, |bits, on| bits << 1 | u64::from(on))
}

/// What [`ARGUMENTS`] asks by name whether it is there.
pub(super) fn names(rows: &Normalisation) -> impl Iterator<Item = &'static str> {
    let given = [rows.z, rows.weight, rows.bias, rows.sums].map(|t| t.is_some());
    let names = ["BACKWARD", "WEIGHT", "BIAS", "WEIGHTED_ROWS"];
    names.into_iter().zip(given).filter(|(_, on)| *on).map(|(name, _)| name)
}

/// How a GPU goes through the rows.
struct Schedule {
    /// Elements that a work-item loads at once.
    width: usize,
    /// Whether each of them has a weight of its own.
    each: bool,
    /// Work-items that share a row, and those of a group.
    lanes: usize,
    group: usize,
    /// Groups of `width` elements that each of them keeps.
    kept: usize,
    /// Slices of a row, of `chunk` elements each; none where a row is kept whole.
    slices: usize,
    chunk: usize,
}

impl Schedule {
    fn choose(device: &ClDevice, rows: &Normalisation) -> Schedule {
        let (width, each) = width(device, rows);
        let numbers = registers(rows.x, rows.z.is_some(), rows.columns.is_some());
        let whole = Schedule::whole(device, rows.len(), width, numbers, rows.columns.is_some());
        Schedule { each, ..whole.unwrap_or_else(|| Schedule::sliced(device, rows, width, numbers)) }
    }

    /// Four loads a lane: fewer leave the memory idle, more are many registers. None where rows are too long, unless it
    /// `must` be.
    fn whole(device: &ClDevice, n: usize, width: usize, numbers: usize, must: bool) -> Option<Schedule> {
        let largest = 1 << device.info().max_work_group.clamp(1, 1024).ilog2();
        let most = group_size(device);
        let lanes = match width {
            1 => n.div_ceil(16.min(KEPT / numbers)).max(32).min(n),
            _ => n.div_ceil((4 * width).min(KEPT / numbers)).max(4),
        };
        let lanes = lanes.next_power_of_two().min(if n * numbers <= 1 << 14 { 512 } else { 1024 }).min(largest);
        let kept = groups_kept(n, width * lanes);
        let filled = kept * width * numbers;
        let schedule = Schedule { width, each: false, lanes, group: most.max(lanes), kept, slices: 0, chunk: 0 };
        (must || filled <= KEPT && filled * lanes <= REGISTERS).then_some(schedule)
    }

    /// As many slices as one group combines with a load each.
    fn sliced(device: &ClDevice, rows: &Normalisation, width: usize, numbers: usize) -> Schedule {
        let (n, group) = (rows.len(), group_size(device));
        let kept = (KEPT / 2 / width / numbers).max(1);
        let block = group * kept * width;
        let chunk = block * n.div_ceil(block * group);
        Schedule { width, each: false, lanes: group, group, kept, slices: n.div_ceil(chunk), chunk }
    }

    fn defines(&self, rows: &Normalisation) -> String {
        let Schedule { lanes, group, kept, .. } = self;
        let each = if self.each { "#define EACH\n" } else { "" };
        let columns = if rows.columns.is_some() { "#define COLUMNS\n" } else { "" };
        let spread = format!("#define LANES {lanes}\n#define GROUP {group}\n#define CACHED {kept}\n{each}{columns}");
        let variance = match rows.variance {
            None => "",
            Some(false) => "#define VARIANCE\n",
            Some(true) => "#define VARIANCE\n#define ROOT\n",
        };
        spread + variance + &vector_defines(rows.x.dtype, self.width)
    }
}

/// Registers that an element of a row takes.
fn registers(x: &Tensor, backward: bool, columns: bool) -> usize {
    let numbers = if backward { 2 } else { 1 } * if columns { 2 } else { 1 };
    numbers * x.dtype.compute().dtype().size() / 4
}

/// How many elements are loaded at once, and whether weights are too.
fn width(device: &ClDevice, rows: &Normalisation) -> (usize, bool) {
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

/// Room for the sums of columns of `count` rows of `n`, as [`cpu::columns`](crate::backend::cpu::norm::columns), where a launch of the gradient adds
/// them up: a part of them for each of some rows.
pub(crate) fn columns(x: &Tensor, count: usize, n: usize) -> Result<Option<Tensor>> {
    let device = x.cl_device()?;
    let width = vector_width(device, x.dtype, [n as isize].into_iter());
    if device.info().kind == DeviceKind::Cpu {
        return Ok(None);
    }
    let Some(schedule) = Schedule::whole(device, n, width, registers(x, true, true), false) else { return Ok(None) };
    let slots = 2 * device.info().compute_units.max(1) * (schedule.group / schedule.lanes);
    let parts = count.div_ceil(count.div_ceil(slots).min(ADDED));
    Tensor::empty_like_shape([parts, 2, n], x.dtype.compute().dtype(), x.device()).map(Some)
}

/// Tensors of the launch are those of [`Normalisation::tensors`].
pub(crate) fn prepare(rows: &Normalisation) -> Result<LaunchPlan> {
    let device = rows.x.cl_device()?;
    if let Some(plan) = norm_channels::prepare(rows)? {
        return Ok(plan);
    }
    if device.info().kind == DeviceKind::Cpu {
        return Ok(LaunchPlan::one(device, kernel_launch(device, rows, "", None, (rows.count(), 1))?));
    }
    let schedule = Schedule::choose(device, rows);
    if schedule.slices == 0 {
        let slots = rows.columns.map_or(rows.count(), |parts| parts.shape().dims()[0]);
        let global = slots.div_ceil(schedule.group / schedule.lanes) * schedule.group;
        return Ok(LaunchPlan::one(
            device,
            kernel_launch(device, rows, "", Some(&schedule), (global, schedule.group))?,
        ));
    }
    let numbers = registers(rows.x, rows.z.is_some(), false);
    let schedule = Schedule { each: schedule.each, ..Schedule::sliced(device, rows, schedule.width, numbers) };
    let groups = rows.count() * schedule.slices;
    let applied = if rows.variance.is_some() { rows.count() } else { groups };
    let parts = kernel_launch(device, rows, "PARTS", Some(&schedule), (groups * schedule.group, schedule.group))?;
    let apply = kernel_launch(device, rows, "APPLY", Some(&schedule), (applied * schedule.group, schedule.group))?;
    let scratch = (2 * groups, rows.x.dtype.compute().dtype());
    Ok(LaunchPlan::new(device, Some(scratch), [parts, apply]))
}

/// One launch. `part`: what of it a launch of slices is.
fn kernel_launch(
    device: &'static ClDevice,
    rows: &Normalisation,
    part: &'static str,
    schedule: Option<&Schedule>,
    (global, local): (usize, usize),
) -> Result<KernelLaunch> {
    let tensors = rows.tensors();
    let (count, n) = (rows.count(), rows.len());
    // Positions past the end of a row are counted too.
    let beyond = schedule.map_or(0, |schedule| schedule.lanes * schedule.kept * schedule.width);
    let (wide, flat) = (is_wide([count + beyond, n + beyond, global]), rows.x.shape().dims()[2] == 1);
    let dtype = rows.x.dtype;
    let switched = [wide, flat].iter().fold(switches(rows), |bits, &on| bits << 1 | u64::from(on));
    let spread = schedule
        .map_or(0, |schedule| schedule.kept << 40 | schedule.group << 28 | schedule.lanes << 16 | schedule.width << 8);
    let spread =
        (spread | schedule.map_or(0, |schedule| usize::from(schedule.each)) << 1 | usize::from(part == "APPLY")) as u64;
    let spread = spread | u64::from(!part.is_empty()) << 2;
    let weights = rows.weight.or(rows.bias).unwrap_or(rows.x).dtype;
    let params = [dtype as u64 | (weights as u64) << 8, switched, spread];
    let kernel = kernel(device, KernelKey::new("norm", &params), "norm", || {
        let own = [("RMS", rows.rms), ("FLAT", flat), (part, !part.is_empty())];
        let on = names(rows).chain(own.into_iter().filter(|(_, on)| *on).map(|(name, _)| name));
        let defines: String = on.map(|name| format!("#define {name}\n")).collect();
        let spread = schedule.map_or_else(|| vector_defines(dtype, 1), |schedule| schedule.defines(rows));
        let types = types(dtype, wide) + &SafeRange::defines(dtype.compute()) + &format!("#define W {weights}\n");
        let division = if matches!(dtype, DType::F16 | DType::BF16) { FAST_DIVISION } else { "" };
        types + division + &spread + &defines + STRIDED_DIMS + NEIGHBOURS + ARGUMENTS + TEMPLATE
    })?;
    let dims = rows.x.shape().dims();
    let sizes = [dims[1], dims[2], dims[3]].map(|d| d as i64);
    let strided = [Some(rows.x), Some(rows.y), rows.z, rows.weight, rows.bias];
    let strides = strided.iter().flat_map(|t| t.unwrap_or(rows.x).strides().iter().map(|&s| s as i64));
    let mut launch = KernelLaunch::new(kernel, global, local);
    let of_rows = tensors.len() - usize::from(rows.columns.is_some());
    if let Some(columns) = rows.columns {
        launch.tensor(of_rows);
        launch.args([Arg::U32(count.div_ceil(columns.shape().dims()[0]) as u32)]);
    }
    (0..of_rows).for_each(|k| launch.tensor(k));
    launch.words(sizes.into_iter().chain(strides));
    let eps = match dtype.compute() {
        Compute::F64 => Arg::F64(rows.eps),
        _ => Arg::F32(rows.eps as f32),
    };
    launch.args([Arg::U64(count as u64), eps]);
    if let Some(schedule) = schedule.filter(|_| !part.is_empty()) {
        // Two numbers are an element of the scratch memory, which comes after all tensors.
        launch.tensor_from(tensors.len(), 0, 2);
        launch.args([Arg::U32(schedule.slices as u32), Arg::U64(schedule.chunk as u64)]);
    }
    Ok(launch)
}

/// The sums of squared deviations over `freedom`, or their roots, of the rows of x, four dims of which the last two are a row, into as many
/// elements that lie in a row. False where that is not for these kernels: on processors.
pub(crate) fn variance(x: &Tensor, out: &Tensor, freedom: f64, root: bool) -> Result<bool> {
    if x.cl_device()?.info().kind == DeviceKind::Cpu {
        return Ok(false);
    }
    let dims = x.shape().dims();
    let shape = [dims[0], dims[1], 1, 1].into();
    let y = out.with_layout(Layout { offset: out.layout.offset, ..Layout::contiguous(shape) });
    let (z, weight, bias, sums, columns) = Default::default();
    // The kernel writes no statistics.
    let (statistics, eps, variance, rms) = (&y, freedom, Some(root), false);
    let rows = Normalisation { x, y: &y, z, weight, bias, statistics, sums, columns, eps, rms, variance };
    run(&rows)?;
    out.storage.bump_version();
    Ok(true)
}

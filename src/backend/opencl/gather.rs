//! Gather, scatter, one-hot and linear indices on OpenCL: `kernels/gather.cl`.

use smallvec::SmallVec;

use crate::backend::opencl::geometry::{
    LOCAL, STRIDED_DIMS, WIDEST, arguments, bits_type, free_group, group_size, index_type, is_wide, launch_free, words,
};
use crate::backend::opencl::kernels::{KernelKey, kernel};
use crate::backend::opencl::launch_cache::{Key, OpKind};
use crate::backend::opencl::launch_plan::{KernelLaunch, LaunchPlan};
use crate::backend::opencl::{checked_indices, launch_cache, scatter as write};
use crate::backend::problem::index::{Combine, Indexed};
use crate::backend::problem::lines::without;
use crate::backend::problem::map::Params;
use crate::device::DeviceKind;
use crate::device::opencl::{Arg, ClDevice, index_fault};
use crate::layout::collapse::StridedDims;
use crate::tensor::{Dims, Layout};
use crate::{DType, Result, Shape, Tensor};

pub(crate) const TEMPLATE: &str = include_str!("../../../kernels/gather.cl");

/// The most index reads of a scatter: each part of the destination reads all indices, so this bounds the number of parts.
const MAX_READS: usize = 1 << 31;

/// Launches a plan from the cache or of `prepare`. Its tensors are the source, the index and the result.
fn launch(
    g: &Indexed,
    of: OpKind,
    out: &Tensor,
    others: &[u64],
    prepare: impl Fn(&'static ClDevice) -> Result<LaunchPlan>,
) -> Result<()> {
    let mut numbers: SmallVec<[u64; 24]> = SmallVec::new();
    numbers.extend([launch_cache::number_of(g.op.as_ptr()), g.size as u64, g.step as u64, g.wraps.into()]);
    numbers.extend([skip(&g.x_layout, g.x) as u64, skip(&g.index_layout, g.index) as u64]);
    numbers.extend_from_slice(others);
    // The layouts are not the tensors' own.
    numbers.extend(g.x_layout.shape.dims().iter().map(|&n| n as u64));
    numbers.extend(g.x_layout.strides.iter().chain(&g.index_layout.strides).map(|&s| s as u64));
    let tensors = [g.x, g.index, out];
    let key = Key { of, device: out.device(), numbers: &numbers, exprs: &[], tensors: &tensors };
    launch_cache::launch(&key, Params::default(), || Ok(prepare(out.cl_device()?)?.checking(1))).map(drop)
}

/// The offset of a layout relative to that of its tensor.
pub(crate) fn skip(layout: &Layout, t: &Tensor) -> isize {
    layout.offset as isize - t.layout.offset as isize
}

pub(crate) fn gather(g: &Indexed, out: &Tensor) -> Result<()> {
    launch(g, OpKind::Gather, out, &[], |device| {
        let mut strided = StridedDims::new(&g.x_layout.shape, [&g.x_layout.strides[..], &g.index_layout.strides[..]]);
        // Contiguous elements with the same index are moved as one unit.
        let gpu = device.info().kind != DeviceKind::Cpu;
        let one = strided.strides[1].last().is_some_and(|&s| s == 0);
        let most = if one { WIDEST / out.dtype.size() } else { 1 };
        let unit = in_units(&mut strided, &[0], most, &[g.step, g.x_layout.offset as isize]);
        let (rank, count, size) = (strided.dims.len().max(1), out.numel() / unit, out.dtype.size() * unit);
        let (wide, narrow) = (is_wide([count]), fits_32_bits(&strided, &[g.size as isize, g.step]));
        // Several loads at a time hide that one waits for another.
        let per = match gpu {
            true if unit > 1 => 2,
            true => 4,
            false => 1,
        };
        let params = [size as u64, g.index.dtype as u64, rank as u64, wide as u64, narrow as u64, per as u64];
        let kernel = kernel(device, KernelKey::new("gather", &params), "gather", || {
            let (v, t, idx) = (bits_type(size), g.index.dtype, index_type(wide));
            let offset_type = if narrow { "int" } else { "long" };
            format!(
                "#define GATHER\n#define V {v}\n#define T {t}\n#define NK {rank}\n#define IDX {idx}\n#define PER {per}\n\
                 #define NEAR {offset_type}\n{STRIDED_DIMS}{TEMPLATE}"
            )
        })?;
        let local = free_group(device, &kernel, count.div_ceil(per), if gpu { group_size(device) } else { LOCAL });
        let mut launch = KernelLaunch::new(kernel, count.div_ceil(per * local) * local, local);
        launch.tensor_from(0, skip(&g.x_layout, g.x), unit);
        launch.tensor_from(1, skip(&g.index_layout, g.index), 1);
        launch.tensor_from(2, 0, unit);
        launch.faults();
        launch.args([Arg::U32(index_fault(g.op))]);
        launch.words(words(&strided));
        launch.args([count, g.size].map(|n| Arg::U64(n as u64)));
        launch.args([Arg::I64((g.step / unit as isize) as i64), Arg::U32(g.wraps.into())]);
        Ok(LaunchPlan::one(device, launch))
    })
}

/// Whether all sizes and strides fit in 31 bits.
fn fits_32_bits(strided: &StridedDims, others: &[isize]) -> bool {
    let strides = strided.strides.iter().flatten().chain(others).map(|s| s.unsigned_abs());
    !is_wide(strides.chain(strided.dims.iter().copied()))
}

/// Combines contiguous elements into units of a power of two, at most `most`, and gives their number: the innermost size and the
/// strides are divided by it. All strides and `starts` must be multiples of the unit, and the innermost stride of `operands` 1.
pub(crate) fn in_units(strided: &mut StridedDims, operands: &[usize], most: usize, starts: &[isize]) -> usize {
    let Some(last) = strided.dims.len().checked_sub(1) else { return 1 };
    if operands.iter().any(|&k| strided.strides[k][last] != 1) {
        return 1;
    }
    let steps = operands.iter().flat_map(|&k| &strided.strides[k][..last]).chain(starts);
    let all = steps.fold(strided.dims[last] | most, |all, s| all | s.unsigned_abs());
    let unit = 1 << all.trailing_zeros();
    strided.dims[last] /= unit;
    for &k in operands {
        strided.strides[k][..last].iter_mut().for_each(|s| *s /= unit as isize);
    }
    unit
}

/// The part of a kernel's key and of its defines for the element type. Elements that are only moved are integers of their size.
pub(crate) fn element(combine: Combine, dtype: DType) -> (u64, String) {
    if combine == Combine::Set {
        return (dtype.size() as u64, format!("#define V {}\n", bits_type(dtype.size())));
    }
    let acc = dtype.compute();
    let (name, combine) = (acc.cl_name(), combine.cl_name(acc));
    let defines =
        format!("#define A {dtype}\n#define ACC {name}\n#define ACC_NAME {acc:?}\n#define COMBINE {combine}\n");
    (dtype as u64, defines)
}

pub(crate) fn scatter(g: &Indexed, combine: Combine, target: &Tensor, layout: &Layout, d: usize) -> Result<()> {
    let mut others: SmallVec<[u64; 8]> = SmallVec::from_slice(&[combine as u64, d as u64, skip(layout, target) as u64]);
    others.extend(layout.strides.iter().map(|&s| s as u64));
    launch(g, OpKind::Scatter, target, &others, |device| {
        if device.info().kind != DeviceKind::Cpu
            && let Some(plan) = write::prepare(device, g, combine, target, layout, d)?
        {
            return Ok(plan);
        }
        // A column is a position in all dims but the indexed one.
        let shape: Shape = without(g.x_layout.shape.dims(), d);
        let strides = [&g.x_layout, &g.index_layout, layout].map(|l| -> Dims<isize> { without(&l.strides, d) });
        let strided = StridedDims::new(&shape, strides.iter().map(|s| &s[..]));
        let (columns, count, rank) = (shape.numel(), g.x_layout.shape.dims()[d], strided.dims.len().max(1));
        let units = device.info().compute_units.max(1);
        // The destination is divided into parts until the device is busy, within the limit on index reads.
        let cpu = device.info().kind == DeviceKind::Cpu;
        let (block, wanted) = if cpu { (columns.clamp(1, 64), 2 * units) } else { (1, units * 1024) };
        let blocks = columns.div_ceil(block);
        let most = (MAX_READS / (columns * count).max(1)).clamp(1, g.size);
        let span = g.size.div_ceil((wanted / blocks).clamp(1, most));
        let parts = g.size.div_ceil(span);
        let wide = is_wide([columns, count, blocks * parts]);
        let (element, defines) = element(combine, target.dtype);
        let params = [combine as u64, element, g.index.dtype as u64, rank as u64, wide as u64];
        let kernel = kernel(device, KernelKey::new("scatter", &params), "scatter", || {
            let (t, idx) = (g.index.dtype, index_type(wide));
            format!(
                "#define SCATTER\n{defines}#define T {t}\n#define NK {rank}\n#define IDX {idx}\n{STRIDED_DIMS}{TEMPLATE}"
            )
        })?;
        let local = if cpu { 1 } else { free_group(device, &kernel, blocks * parts, LOCAL) };
        let mut launch = KernelLaunch::new(kernel, blocks * parts, local);
        launch.tensor_from(0, skip(&g.x_layout, g.x), 1);
        launch.tensor_from(1, skip(&g.index_layout, g.index), 1);
        launch.tensor_from(2, skip(layout, target), 1);
        launch.faults();
        launch.args([Arg::U32(index_fault(g.op))]);
        launch.words(words(&strided));
        launch.args([columns, count, g.size].map(|n| Arg::U64(n as u64)));
        launch.args([g.x_layout.strides[d], g.index_layout.strides[d], g.step].map(|s| Arg::I64(s as i64)));
        launch.args([Arg::U32(parts as u32), Arg::U64(span as u64), Arg::U32(block as u32), Arg::U32(g.wraps.into())]);
        Ok(LaunchPlan::one(device, launch))
    })
}

pub(crate) fn linear(
    op: &'static str,
    index: &Tensor,
    out: &Tensor,
    (size, step): (usize, isize),
    base: Option<i64>,
) -> Result<()> {
    let others = [Arg::I64(step as i64), Arg::U32(base.is_some().into()), Arg::I64(base.unwrap_or(0))];
    over_indices(op, "linear", index, out, size, others)
}

pub(crate) fn one_hot(op: &'static str, t: &Tensor, out: &Tensor, classes: usize) -> Result<()> {
    over_indices(op, "one_hot", t, out, classes, [])
}

/// Launches the kernel of this name, with a work-item for each element of `out`, on an index into a dim of this size.
fn over_indices(
    op: &'static str,
    name: &'static str,
    index: &Tensor,
    out: &Tensor,
    size: usize,
    others: impl IntoIterator<Item = Arg<'static>>,
) -> Result<()> {
    let device = out.cl_device()?;
    let strided = StridedDims::new(index.shape(), [index.strides()]);
    let (rank, count) = (strided.dims.len().max(1), out.numel());
    let wide = is_wide([count]);
    let params = [index.dtype as u64, rank as u64, wide as u64];
    let kernel = kernel(device, KernelKey::new(name, &params), name, || {
        let (define, t, idx) = (name.to_uppercase(), index.dtype, index_type(wide));
        format!("#define {define}\n#define T {t}\n#define NK {rank}\n#define IDX {idx}\n{STRIDED_DIMS}{TEMPLATE}")
    })?;
    let words = words(&strided);
    let numbers = [launch_cache::number_of(name.as_ptr()), size as u64];
    let check = checked_indices::number_of(words.iter().map(|&n| n as u64).chain(numbers));
    let unknown = checked_indices::unknown(device, index, check);
    let (from, y) = (index.device_view()?, out.device_view()?);
    let faults = if unknown.is_none() { device.no_faults() } else { device.faults() };
    let words = Arg::Bytes(bytemuck::cast_slice(&words));
    let first = [faults, Arg::U32(index_fault(op)), words, Arg::U64(count as u64), Arg::U64(size as u64)];
    let mut args = arguments(&[&from, &y], first);
    others.into_iter().for_each(|other| args.push(other));
    launch_free(device, &kernel, &args, count)?;
    if let Some(unknown) = unknown {
        checked_indices::launched(device, index, unknown);
    }
    Ok(())
}

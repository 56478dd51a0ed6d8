//! Gather, scatter, one-hot and linear indices on OpenCL: `kernels/gather.cl`.

use crate::backend::opencl::prelude::*;
use crate::backend::opencl::{checked_indices, scatter as write};
use crate::device::opencl::index_fault;

pub(crate) const TEMPLATE: &str = include_str!("../../../kernels/gather.cl");

/// The maximum number of index reads of a scatter. Each part of the destination reads all indices, so this limit also bounds the number of parts.
const MAX_INDEX_READS: usize = 1 << 31;

/// Launches the cached plan, or the plan that `prepare` makes. The plan's tensors are the source, the index and the result.
fn launch_indexed(
    g: &Indexed,
    kind: OpKind,
    out: &Tensor,
    others: &[u64],
    prepare: impl Fn(&'static ClDevice) -> Result<LaunchPlan>,
) -> Result<()> {
    let mut numbers: SmallVec<[u64; 24]> = SmallVec::new();
    numbers.extend([static_id(g.op.as_ptr()), g.size as u64, g.step as u64, g.wraps.into()]);
    numbers.extend([relative_offset(&g.x_layout, g.x) as u64, relative_offset(&g.index_layout, g.index) as u64]);
    numbers.extend_from_slice(others);
    // `g.x_layout` and `g.index_layout` may differ from the layouts of the tensors, so the launch-cache key includes both.
    numbers.extend(g.x_layout.shape.dims().iter().map(|&n| n as u64));
    numbers.extend(g.x_layout.strides.iter().chain(&g.index_layout.strides).map(|&s| s as u64));
    let tensors = [g.x, g.index, out];
    let key = Key { kind, numbers: &numbers, exprs: &[], tensors: &tensors };
    launch_cache::launch_cached(&key, Params::default(), || Ok(prepare(out.cl_device()?)?.with_index_check(1)))
        .map(drop)
}

/// Returns the offset of a layout relative to the offset of the tensor `t`, in elements.
pub(crate) fn relative_offset(layout: &Layout, t: &Tensor) -> isize {
    layout.offset as isize - t.layout.offset as isize
}

/// Adds the first arguments of gathers and scatters: the source, the index, and the result from element `to` on. The offsets of source and
/// result are in units of `unit` elements.
pub(super) fn push_indexed(launch: &mut KernelLaunch, g: &Indexed, to: isize, unit: usize) {
    launch.push_tensor_at(0, relative_offset(&g.x_layout, g.x), unit);
    launch.push_tensor_at(1, relative_offset(&g.index_layout, g.index), 1);
    launch.push_tensor_at(2, to, unit);
    launch.push(Argument::Faults);
    launch.push_fixed(args![; index_fault(g.op)]);
}

pub(crate) fn gather(g: &Indexed, out: &Tensor) -> Result<()> {
    launch_indexed(g, OpKind::Gather, out, &[], |device| {
        let mut strided = StridedDims::new(&g.x_layout.shape, [&g.x_layout.strides[..], &g.index_layout.strides[..]]);
        // Contiguous elements with the same index are moved as one unit.
        let gpu = device.info().kind != DeviceKind::Cpu;
        let one = strided.strides[1].last().is_some_and(|&s| s == 0);
        let most = if one { MAX_VECTOR_BYTES / out.dtype.size() } else { 1 };
        let unit = combine_into_units(&mut strided, &[0], most, &[g.step, g.x_layout.offset as isize]);
        let (rank, count, size) = (strided.dims.len().max(1), out.numel() / unit, out.dtype.size() * unit);
        let (wide, narrow) = (needs_64_bit([count]), fits_32_bits(&strided, &[g.size as isize, g.step]));
        // Each work-item issues several loads together, so that their latencies overlap.
        let per = match gpu {
            true if unit > 1 => 2,
            true => 4,
            false => 1,
        };
        let (unit_type, wide) = (bits_type(size), index_type(wide));
        let config = kernel_config! {
            "V" => unit_type, "T" => g.index.dtype, "NK" => rank, "IDX" => wide, "PER" => per,
            "NEAR" => offset_type(!narrow),
        };
        let kernel = config.kernel(device, "gather", "gather", &["#define GATHER\n", STRIDED_DIMS, TEMPLATE])?;
        let group = if gpu { default_group_size(device) } else { DEFAULT_GROUP_SIZE };
        let local = tuned_group_size(device, &kernel, count.div_ceil(per), group);
        let mut launch = KernelLaunch::new(kernel, count.div_ceil(per * local) * local, local);
        push_indexed(&mut launch, g, 0, unit);
        launch.push_words(dims_words(&strided));
        launch.push_fixed(args![; count, g.size, g.step / unit as isize, g.wraps]);
        Ok(LaunchPlan::single(device, launch))
    })
}

/// True if all sizes and strides fit in 31 bits.
fn fits_32_bits(strided: &StridedDims, others: &[isize]) -> bool {
    let strides = strided.strides.iter().flatten().chain(others).map(|s| s.unsigned_abs());
    !needs_64_bit(strides.chain(strided.dims.iter().copied()))
}

/// Divides the innermost size and the outer strides of `operands` by the returned unit, so that contiguous elements move together. The unit is a power
/// of two of at most `most` elements that divides all outer strides and `starts`. It is 1 unless the innermost stride of all `operands` is 1.
pub(crate) fn combine_into_units(
    strided: &mut StridedDims,
    operands: &[usize],
    most: usize,
    starts: &[isize],
) -> usize {
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

/// Returns the configuration for the elements of a scatter. Elements that are only moved are handled as integers of the same size.
pub(super) fn element_config(combine: Combine, dtype: DType) -> impl KernelConfig {
    let (moves, acc) = (combine == Combine::Set, dtype.compute());
    let function = CombineFunction(combine, acc);
    kernel_config! {
        "V" => moves.then(|| bits_type(dtype.size())),
        "" => (!moves).then_some(kernel_config! { "A" => dtype, "ACC" => acc, "COMBINE" => function }),
    }
}

/// The OpenCL C function or macro that combines two elements of the given compute type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct CombineFunction(Combine, Compute);

impl Define for CombineFunction {
    fn define(&self, name: &str, out: &mut String) {
        let CombineFunction(combine, acc) = *self;
        let (integers, c) = (acc == Compute::I64, acc.cl_name());
        let function = match combine {
            Combine::Add if integers => "add_long",
            Combine::Multiply if integers => "mul_long",
            Combine::Add => "PLUS",
            Combine::Multiply => "TIMES",
            Combine::Max => &format!("max_{c}"),
            Combine::Min => &format!("min_{c}"),
            Combine::Set => unreachable!("elements that are only moved are not computed with"),
        };
        out.push_str(&format!("#define {name} {function}\n"));
    }
}

pub(crate) fn scatter(scatter: &Scatter) -> Result<()> {
    let &Scatter { moved: g, combine, target, layout, d } = scatter;
    let mut others: SmallVec<[u64; 8]> =
        SmallVec::from_slice(&[combine as u64, d as u64, relative_offset(layout, target) as u64]);
    others.extend(layout.strides.iter().map(|&s| s as u64));
    launch_indexed(g, OpKind::Scatter, target, &others, |device| {
        if device.info().kind != DeviceKind::Cpu
            && let Some(plan) = write::prepare(device, scatter)?
        {
            return Ok(plan);
        }
        // A column is a position in all dims except the indexed dim.
        let shape: Shape = without_dim(g.x_layout.shape.dims(), d);
        let strides = [&g.x_layout, &g.index_layout, layout].map(|l| -> Dims<isize> { without_dim(&l.strides, d) });
        let strided = StridedDims::new(&shape, strides.iter().map(|s| &s[..]));
        let (columns, count, rank) = (shape.numel(), g.x_layout.shape.dims()[d], strided.dims.len().max(1));
        let units = device.info().compute_units.max(1);
        // The destination is divided into parts until the device is busy, within the limit on index reads.
        let cpu = device.info().kind == DeviceKind::Cpu;
        let (block, wanted) = if cpu { (columns.clamp(1, 64), 2 * units) } else { (1, units * 1024) };
        let blocks = columns.div_ceil(block);
        let most = (MAX_INDEX_READS / (columns * count).max(1)).clamp(1, g.size);
        let span = g.size.div_ceil((wanted / blocks).clamp(1, most));
        let parts = g.size.div_ceil(span);
        let wide = needs_64_bit([columns, count, blocks * parts]);
        let (element, index) = (element_config(combine, target.dtype), g.index.dtype);
        let config = kernel_config! { "" => element, "T" => index, "NK" => rank, "IDX" => index_type(wide) };
        let kernel = config.kernel(device, "scatter", "scatter", &["#define SCATTER\n", STRIDED_DIMS, TEMPLATE])?;
        let local = if cpu { 1 } else { tuned_group_size(device, &kernel, blocks * parts, DEFAULT_GROUP_SIZE) };
        let mut launch = KernelLaunch::new(kernel, blocks * parts, local);
        push_indexed(&mut launch, g, relative_offset(layout, target), 1);
        launch.push_words(dims_words(&strided));
        let [x_step, index_step] = [&g.x_layout, &g.index_layout].map(|layout| layout.strides[d]);
        launch.push_fixed(args![; columns, count, g.size, x_step, index_step, g.step]);
        launch.push_fixed(args![; parts as u32, span, block as u32, g.wraps]);
        Ok(LaunchPlan::single(device, launch))
    })
}

pub(crate) fn linear_index(term: &IndexTerm) -> Result<()> {
    let &IndexTerm { op, index, size, step, base, out } = term;
    launch_over_indices(op, ["linear", "LINEAR"], index, out, size, args![; step, base.is_some(), base.unwrap_or(0)])
}

pub(crate) fn one_hot(op: &'static str, x: &Tensor, out: &Tensor) -> Result<()> {
    launch_over_indices(op, ["one_hot", "ONE_HOT"], x, out, out.shape().dims()[x.rank()], [])
}

/// Launches the kernel `name`, which the macro `define` selects, with a work-item for each element of `out`. Indices are into a dim of `size`.
fn launch_over_indices(
    op: &'static str,
    [name, define]: [&'static str; 2],
    index: &Tensor,
    out: &Tensor,
    size: usize,
    others: impl IntoIterator<Item = Arg<'static>>,
) -> Result<()> {
    let device = out.cl_device()?;
    let strided = StridedDims::new(index.shape(), [index.strides()]);
    let (rank, count) = (strided.dims.len().max(1), out.numel());
    let wide = needs_64_bit([count]);
    let config = kernel_config! { "" => define, "T" => index.dtype, "NK" => rank, "IDX" => index_type(wide) };
    let kernel = config.kernel(device, name, name, &[STRIDED_DIMS, TEMPLATE])?;
    let words = dims_words(&strided);
    let numbers = [static_id(name.as_ptr()), size as u64];
    let check = checked_indices::hash_check(words.iter().map(|&n| n as u64).chain(numbers));
    let unknown = checked_indices::begin_check(device, index, check);
    let (from, y) = (index.device_view()?, out.device_view()?);
    let faults = if unknown.is_none() { device.no_faults() } else { device.faults() };
    let mut args: SmallVec<[Arg; 16]> =
        SmallVec::from_slice(&args![from, y; faults, index_fault(op), &words[..], count, size]);
    others.into_iter().for_each(|other| args.push(other));
    launch_tuned(device, &kernel, &args, count)?;
    if let Some(unknown) = unknown {
        checked_indices::note_launch(device, index, unknown);
    }
    Ok(())
}

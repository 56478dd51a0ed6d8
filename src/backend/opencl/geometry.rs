//! Work-group sizes, vector widths, index types and preprocessor definitions that kernels have in common.

use smallvec::SmallVec;

use crate::backend::opencl::kernels::BufferView;
use crate::device::DeviceKind;
use crate::device::opencl::{Arg, ClDevice, ClKernel};
use crate::layout::collapse::StridedDims;
use crate::{DType, Result, Tensor};

/// Strided dims, loads of 16 elements, and reductions over a work-group: included before most templates.
pub(crate) const STRIDED_DIMS: &str = include_str!("../../../kernels/strided_dims.cl");

/// Loads and stores of 16 bytes; included after [`types`] and [`vector_defines`].
pub(crate) const NEIGHBOURS: &str = include_str!("../../../kernels/neighbours.cl");

/// Rows that are read block by block into registers.
pub(crate) const ROW_BLOCKS: &str = include_str!("../../../kernels/row_blocks.cl");

/// The default work-group size of kernels whose work-items are independent.
pub(crate) const LOCAL: usize = 64;

/// A work-group size of at most `local` that the driver allows for this kernel; always that for which a kernel is compiled.
pub(crate) fn group_of(kernel: &ClKernel, local: usize) -> usize {
    local.min(kernel.max_work_group())
}

/// The work-group size of a kernel that works in groups of any size and checks its bounds. It is tuned for the device and may be
/// on trial; see [`launch_on_trial`](ClDevice::launch_on_trial).
pub(crate) fn free_group(device: &ClDevice, kernel: &ClKernel, items: usize, local: usize) -> usize {
    device.group_for(kernel, items, group_of(kernel, local))
}

/// Launches a kernel that works in groups of any size and checks its bounds.
pub(crate) fn launch_free(device: &ClDevice, kernel: &ClKernel, args: &[Arg<'_>], items: usize) -> Result<()> {
    let group = || Ok(free_group(device, kernel, items, LOCAL));
    device.launch_on_trial(group, |&local| device.launch(kernel, args, &[items], &[local])).map(drop)
}

/// The default work-group size of kernels that are compiled for one size.
pub(crate) fn group_size(device: &ClDevice) -> usize {
    largest_group(device).min(256)
}

/// The largest work-group size that is a power of two.
pub(crate) fn largest_group(device: &ClDevice) -> usize {
    1 << device.info().max_work_group.max(1).ilog2()
}

/// The most bytes of local memory that a kernel declares: some drivers report more than 48 KiB, but refuse kernels that declare it.
pub(crate) fn declarable_local_memory(device: &ClDevice) -> usize {
    device.info().local_memory.min(48 << 10)
}

/// Whether counts need 64-bit arithmetic in a kernel: 32-bit divisions are several times faster.
pub(crate) fn is_wide(counts: impl IntoIterator<Item = usize>) -> bool {
    counts.into_iter().any(|n| n >= 1 << 31)
}

/// The widest loads and stores of GPUs, in bytes.
pub(crate) const WIDEST: usize = 16;

/// The number of elements that a work-item of a GPU loads at once from contiguous rows that begin at the offsets `starts`: those of
/// 16 bytes, or one where `starts` are not aligned to that, and on processors.
pub(crate) fn vector_width(device: &ClDevice, dtype: DType, mut starts: impl Iterator<Item = isize>) -> usize {
    let width = WIDEST / dtype.size();
    let whole = device.info().kind != DeviceKind::Cpu && starts.all(|s| s.unsigned_abs().is_multiple_of(width));
    if whole { width } else { 1 }
}

/// The number of work-items of a group that share a row of n elements. With `by_column` a group reads neighbouring rows together: at
/// least 8 (a sector of memory), and more as long as `enough` says that there are enough groups.
pub(crate) fn lanes(group: usize, by_column: bool, n: usize, columns: usize, enough: impl Fn(usize) -> bool) -> usize {
    let most = n.next_power_of_two().min(group);
    if !by_column {
        return n.div_ceil(4).next_power_of_two().max(32).min(most);
    }
    let mut columns_at_once = columns.next_power_of_two().min(32);
    while columns_at_once > 8 && !enough(columns_at_once) {
        columns_at_once /= 2;
    }
    (group / columns_at_once).clamp(1, most)
}

/// The strides between a tensor's rows and its offset, for [`vector_width`].
pub(crate) fn row_starts(t: &Tensor) -> impl Iterator<Item = isize> {
    let steps = t.shape().dims().iter().zip(t.strides()).rev().skip(1);
    let steps = steps.map(|(&n, &step)| if n == 1 { 0 } else { step });
    steps.chain([t.layout.offset as isize])
}

/// Defines VEC and WIDE_T, the number of elements of a vector load and its type.
pub(crate) fn vector_defines(dtype: DType, width: usize) -> String {
    match width {
        1 => "#define VEC 1\n".into(),
        _ => format!("#define VEC {width}\n#define WIDE_T {}{width}\n", dtype.cl_storage()),
    }
}

/// The number of vectors that each work-item keeps of a row of n elements, of which all work-items together load `at_once`. It is
/// rounded up, so that few kernels are built.
pub(crate) fn groups_kept(n: usize, at_once: usize) -> usize {
    match n.div_ceil(at_once) {
        k @ ..=4 => k,
        k => k.next_power_of_two(),
    }
}

/// The number of slices of each of `rows` rows of n elements, and the elements of a slice, a multiple of `block`. There are as many
/// as give every compute unit four groups, but no more than a group has work-items, because one group combines them.
pub(crate) fn row_slices(device: &ClDevice, rows: usize, n: usize, block: usize) -> (usize, usize) {
    let wanted = n * rows / (block * 4 * device.info().compute_units.max(1));
    let chunk = block * wanted.max(n.div_ceil(block * group_size(device))).max(1);
    (n.div_ceil(chunk), chunk)
}

/// The type that a kernel computes indices in.
pub(crate) fn index_type(wide: bool) -> &'static str {
    if wide { "ulong" } else { "uint" }
}

/// An unsigned integer type of so many bytes, for elements that are only moved.
pub(crate) fn bits_type(size: usize) -> &'static str {
    ["uchar", "ushort", "uint", "ulong", "uint4"][size.ilog2() as usize]
}

/// Defines a macro without a value if `on`.
pub(crate) fn flag(on: bool, name: &str) -> String {
    if on { format!("#define {name}\n") } else { String::new() }
}

/// Defines the types that a kernel reads, accumulates and computes indices in.
pub(crate) fn types(dtype: DType, wide: bool) -> String {
    let (acc, idx) = (dtype.compute(), index_type(wide));
    format!("#define A {dtype}\n#define ACC {}\n#define ACC_NAME {acc:?}\n#define IDX {idx}\n", acc.cl_name())
}

/// The words of a kernel's struct of dims, at least one: sizes, then the strides of each operand.
pub(crate) fn words(dims: &StridedDims) -> SmallVec<[i64; 32]> {
    if dims.dims.is_empty() {
        return std::iter::once(1).chain(dims.strides.iter().map(|_| 0)).collect();
    }
    dims.dims.iter().map(|&d| d as i64).chain(dims.strides.iter().flatten().map(|&s| s as i64)).collect()
}

/// The kernel arguments of tensors, a buffer and an offset each, followed by others.
pub(crate) fn arguments<'a>(
    views: &[&'a BufferView],
    others: impl IntoIterator<Item = Arg<'a>>,
) -> SmallVec<[Arg<'a>; 24]> {
    let mut args = SmallVec::new();
    views.iter().for_each(|view| args.extend([view.buffer(), view.offset()]));
    others.into_iter().for_each(|other| args.push(other));
    args
}

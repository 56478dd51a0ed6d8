//! Work-group sizes, vector widths, index types and preprocessor definitions that several kernels use.

use smallvec::SmallVec;

use crate::backend::problem::reduction::SafeRange;
use crate::device::DeviceKind;
use crate::device::opencl::{Arg, ClDevice, ClKernel};
use crate::layout::collapse::StridedDims;
use crate::{Compute, DType, Result, Tensor};

/// The template for strided dims, loads of 16 elements, and reductions over a work-group. Most other templates need it.
pub(crate) const STRIDED_DIMS: &str =
    concat!(include_str!("../../../kernels/strided_dims.cl"), include_str!("../../../kernels/fold.cl"));

/// The template of 16-byte loads and stores. It follows the macros of element types and the macros of [`vector_defines`].
pub(crate) const VECTOR_ACCESS: &str = include_str!("../../../kernels/neighbours.cl");

/// The template that reads rows block by block into registers.
pub(crate) const ROW_BLOCKS: &str = include_str!("../../../kernels/row_blocks.cl");

/// The default work-group size of kernels whose work-items are independent.
pub(crate) const DEFAULT_GROUP_SIZE: usize = 64;

/// Returns a work-group size of at most `local` that the driver allows for this kernel. The size that a kernel was compiled for is always allowed.
pub(crate) fn clamp_group_size(kernel: &ClKernel, local: usize) -> usize {
    local.min(kernel.max_work_group())
}

/// Returns the work-group size for a kernel that accepts any size and checks bounds itself. The size is tuned for the device. A size
/// whose time is still being measured may be returned too; see [`launch_on_trial`](ClDevice::launch_on_trial).
pub(crate) fn tuned_group_size(device: &ClDevice, kernel: &ClKernel, items: usize, local: usize) -> usize {
    device.group_for(kernel, items, clamp_group_size(kernel, local))
}

/// Launches a kernel that accepts work-groups of any size and checks bounds itself.
pub(crate) fn launch_tuned(device: &ClDevice, kernel: &ClKernel, args: &[Arg<'_>], items: usize) -> Result<()> {
    let group = || Ok(tuned_group_size(device, kernel, items, DEFAULT_GROUP_SIZE));
    device.launch_on_trial(group, |&local| device.launch(kernel, args, &[items], &[local])).map(drop)
}

/// Returns the default work-group size for kernels that are compiled for a fixed size.
pub(crate) fn default_group_size(device: &ClDevice) -> usize {
    max_group_size(device).min(256)
}

/// Returns the largest power of two that the device allows as a work-group size.
pub(crate) fn max_group_size(device: &ClDevice) -> usize {
    1 << device.info().max_work_group.max(1).ilog2()
}

/// Returns the number of bytes of local memory that a kernel may declare: at most 48 KiB, because some drivers report more but refuse to build kernels
/// that declare more.
pub(crate) fn declarable_local_memory(device: &ClDevice) -> usize {
    device.info().local_memory.min(48 << 10)
}

/// True if a kernel needs 64-bit arithmetic for these counts. 32-bit divisions are several times faster.
pub(crate) fn needs_64_bit(counts: impl IntoIterator<Item = usize>) -> bool {
    counts.into_iter().any(|n| n >= 1 << 31)
}

/// The size in bytes of the widest loads and stores of a GPU.
pub(crate) const MAX_VECTOR_BYTES: usize = 16;

/// Returns the number of elements that a GPU work-item loads at once from contiguous rows that begin at the element offsets
/// `starts`: 16 bytes of elements if all `starts` are multiples of 16 bytes, otherwise 1. On CPUs always 1.
pub(crate) fn vector_width(device: &ClDevice, dtype: DType, mut starts: impl Iterator<Item = isize>) -> usize {
    let width = MAX_VECTOR_BYTES / dtype.size();
    let whole = device.info().kind != DeviceKind::Cpu && starts.all(|s| s.unsigned_abs().is_multiple_of(width));
    if whole { width } else { 1 }
}

/// Returns the number of work-items of a work-group that share a row of n elements. With `by_column`, a work-group reads the same column of adjacent
/// rows at once: of at least 8 rows (a memory sector), and of up to 32 if `enough` confirms that there are still enough work-groups.
pub(crate) fn lanes_per_row(
    group: usize,
    by_column: bool,
    n: usize,
    columns: usize,
    enough: impl Fn(usize) -> bool,
) -> usize {
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

/// Returns the strides between a tensor's rows and the tensor's offset, in elements, as input for [`vector_width`].
pub(crate) fn row_starts(t: &Tensor) -> impl Iterator<Item = isize> {
    let steps = t.shape().dims().iter().zip(t.strides()).rev().skip(1);
    let steps = steps.map(|(&n, &step)| if n == 1 { 0 } else { step });
    steps.chain([t.layout.offset as isize])
}

/// Returns definitions of VEC, the number of elements of a vector load, and WIDE_T, the type of that vector (only if VEC is above 1).
pub(crate) fn vector_defines(dtype: DType, width: usize) -> String {
    match width {
        1 => "#define VEC 1\n".into(),
        _ => format!("#define VEC {width}\n#define WIDE_T {}{width}\n", dtype.cl_storage()),
    }
}

/// Returns the number of vectors of a row of n elements that each work-item keeps in registers, if all work-items together load
/// `at_once` elements at once. Numbers above 4 are rounded up to powers of two, so that fewer kernels are built.
pub(crate) fn vectors_per_item(n: usize, at_once: usize) -> usize {
    match n.div_ceil(at_once) {
        k @ ..=4 => k,
        k => k.next_power_of_two(),
    }
}

/// Cuts n elements into at most `wanted` slices of at least `least` elements, a multiple of `unit`. Returns the number of slices and the slice length.
pub(crate) fn cut_into_slices(n: usize, wanted: usize, least: usize, unit: usize) -> (usize, usize) {
    if wanted <= 1 {
        return (1, n);
    }
    let chunk = n.div_ceil(wanted.min(1 << 12)).max(least).next_multiple_of(unit);
    (n.div_ceil(chunk), chunk)
}

/// Cuts `rows` rows of n elements into slices, about four for each compute unit. Returns the number of slices of a row, and the elements of a
/// slice, a multiple of `block`. A row has at most as many slices as a work-group has work-items, because one work-group combines the slices.
pub(crate) fn slice_rows(device: &ClDevice, rows: usize, n: usize, block: usize) -> (usize, usize) {
    let wanted = n * rows / (block * 4 * device.info().compute_units.max(1));
    let chunk = block * wanted.max(n.div_ceil(block * default_group_size(device))).max(1);
    (n.div_ceil(chunk), chunk)
}

/// Returns the OpenCL C type in which a kernel computes unsigned indices: 64 bits if `wide`.
pub(crate) fn index_type(wide: bool) -> &'static str {
    if wide { "ulong" } else { "uint" }
}

/// Returns the OpenCL C type in which a kernel computes signed offsets: 64 bits if `wide`.
pub(crate) fn offset_type(wide: bool) -> &'static str {
    if wide { "long" } else { "int" }
}

/// Returns an unsigned integer type of `size` bytes, for kernels that only move elements.
pub(crate) fn bits_type(size: usize) -> &'static str {
    ["uchar", "ushort", "uint", "ulong", "uint4"][size.ilog2() as usize]
}

/// Returns a definition of the macro `name`, without a value, if `on` is true; otherwise an empty string.
pub(crate) fn define_if(on: bool, name: &str) -> String {
    if on { format!("#define {name}\n") } else { String::new() }
}

/// Defines `LARGEST`, `LEAST`, `DOWN` and `UP`: the fields of the [`SafeRange`] of sums accumulated in `compute`.
pub(crate) fn safe_range_defines(compute: Compute) -> String {
    let SafeRange { max_sum, min_square_sum, scale_down, scale_up } = SafeRange::for_accumulator(compute);
    let suffix = if compute == Compute::F64 { "" } else { "f" };
    let each = [("LARGEST", max_sum), ("LEAST", min_square_sum), ("DOWN", scale_down), ("UP", scale_up)];
    each.map(|(name, value)| format!("#define {name} {value:e}{suffix}\n")).concat()
}

/// Returns the words of the struct of dims that kernels take: the sizes, then the strides of each operand. A scalar is passed as one dim.
pub(crate) fn dims_words(dims: &StridedDims) -> SmallVec<[i64; 32]> {
    if dims.dims.is_empty() {
        return std::iter::once(1).chain(dims.strides.iter().map(|_| 0)).collect();
    }
    dims.dims.iter().map(|&d| d as i64).chain(dims.strides.iter().flatten().map(|&s| s as i64)).collect()
}

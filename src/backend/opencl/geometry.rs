//! What kernels have in common: sizes of work-groups, widths of loads, types of indices, definitions ahead of a template.

use smallvec::SmallVec;

use crate::backend::opencl::kernels::BufferView;
use crate::device::DeviceKind;
use crate::device::opencl::{Arg, ClDevice, ClKernel};
use crate::layout::collapse::StridedDims;
use crate::{DType, Result, Tensor};

/// Strided dims, loads of 16 elements, and folds over a work-group: what comes ahead of most templates.
pub(crate) const STRIDED_DIMS: &str = include_str!("../../../kernels/strided_dims.cl");

/// Elements that travel 16 bytes at once; comes after [`types`] and [`vector_defines`].
pub(crate) const NEIGHBOURS: &str = include_str!("../../../kernels/neighbours.cl");

/// Rows that go through registers block by block.
pub(crate) const ROW_BLOCKS: &str = include_str!("../../../kernels/row_blocks.cl");

/// Work-items a group of a kernel whose work-items do not work together.
pub(crate) const LOCAL: usize = 64;

/// So many work-items, or as many as the driver allows a group of this kernel. A kernel whose work-items work together is
/// compiled for groups of one size, and has that.
pub(crate) fn group_of(kernel: &ClKernel, local: usize) -> usize {
    local.min(kernel.max_work_group())
}

/// Work-items a group of a kernel that runs in groups of any size and checks its bounds, over so many: what suits the
/// device, which may be on trial; see [`launch_on_trial`](ClDevice::launch_on_trial).
pub(crate) fn free_group(device: &ClDevice, kernel: &ClKernel, items: usize, local: usize) -> usize {
    device.group_for(kernel, items, group_of(kernel, local))
}

/// Launches a kernel of this kind.
pub(crate) fn launch_free(device: &ClDevice, kernel: &ClKernel, args: &[Arg<'_>], items: usize) -> Result<()> {
    let group = || Ok(free_group(device, kernel, items, LOCAL));
    device.launch_on_trial(group, |&local| device.launch(kernel, args, &[items], &[local])).map(drop)
}

/// Work-items a group of a kernel that is compiled for groups of this size, unless it has reasons for another.
pub(crate) fn group_size(device: &ClDevice) -> usize {
    let most = device.info().max_work_group.clamp(1, 256);
    1 << most.ilog2()
}

/// Bytes of local memory that a kernel may declare: some drivers have more than 48 KiB, but let a kernel declare no more.
pub(crate) fn declarable_local_memory(device: &ClDevice) -> usize {
    device.info().local_memory.min(48 << 10)
}

/// Counts that fit in 31 bits are computed in 32: their divisions are several times faster.
pub(crate) fn is_wide(counts: impl IntoIterator<Item = usize>) -> bool {
    counts.into_iter().any(|n| n >= 1 << 31)
}

/// The widest loads and stores of GPUs, in bytes.
pub(crate) const WIDEST: usize = 16;

/// How many elements GPUs load at once where an operand's elements lie in a row and `starts` are where rows begin: as
/// many as 16 bytes have, or one.
pub(crate) fn vector_width(device: &ClDevice, dtype: DType, mut starts: impl Iterator<Item = isize>) -> usize {
    let width = WIDEST / dtype.size();
    let whole = device.info().kind != DeviceKind::Cpu && starts.all(|s| s.unsigned_abs().is_multiple_of(width));
    if whole { width } else { 1 }
}

/// Work-items of a group of `group` that share a row of n elements. `by_column`: rows that are neighbours are read
/// together, at least 8 (a sector of memory), more while there are groups `enough`.
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

/// Elements of which the distances between rows of a tensor are multiples.
pub(crate) fn row_starts(t: &Tensor) -> impl Iterator<Item = isize> {
    let steps = t.shape().dims().iter().zip(t.strides()).rev().skip(1);
    let steps = steps.map(|(&n, &step)| if n == 1 { 0 } else { step });
    steps.chain([t.layout.offset as isize])
}

/// VEC and WIDE_T: see the kernels that use them.
pub(crate) fn vector_defines(dtype: DType, width: usize) -> String {
    match width {
        1 => "#define VEC 1\n".into(),
        _ => format!("#define VEC {width}\n#define WIDE_T {}{width}\n", dtype.cl_storage()),
    }
}

/// Groups of elements that each work-item keeps of a row of n, `columns_at_once` elements of all of them: kernels are built for few numbers.
pub(crate) fn groups_kept(n: usize, columns_at_once: usize) -> usize {
    match n.div_ceil(columns_at_once) {
        k @ ..=4 => k,
        k => k.next_power_of_two(),
    }
}

/// Slices of each of `rows` rows of n elements, and how many elements a slice has: of whole blocks, as many as give every compute unit four
/// groups, and no more than a group has work-items, whose loads combine them.
pub(crate) fn row_slices(device: &ClDevice, rows: usize, n: usize, block: usize) -> (usize, usize) {
    let wanted = n * rows / (block * 4 * device.info().compute_units.max(1));
    let chunk = block * wanted.max(n.div_ceil(block * group_size(device))).max(1);
    (n.div_ceil(chunk), chunk)
}

/// The type of indices.
pub(crate) fn index_type(wide: bool) -> &'static str {
    if wide { "ulong" } else { "uint" }
}

/// An unsigned type of so many bytes: elements that are only moved.
pub(crate) fn bits_type(size: usize) -> &'static str {
    ["uchar", "ushort", "uint", "ulong", "uint4"][size.ilog2() as usize]
}

/// A definition that a template only asks for.
pub(crate) fn flag(on: bool, name: &str) -> String {
    if on { format!("#define {name}\n") } else { String::new() }
}

/// The types that a kernel reads, computes in and counts with.
pub(crate) fn types(dtype: DType, wide: bool) -> String {
    let (acc, idx) = (dtype.compute(), index_type(wide));
    format!("#define A {dtype}\n#define ACC {}\n#define ACC_NAME {acc:?}\n#define IDX {idx}\n", acc.cl_name())
}

/// Dims as the kernels' structs have them, one at least: sizes, then the strides of each operand.
pub(crate) fn words(dims: &StridedDims) -> SmallVec<[i64; 32]> {
    if dims.dims.is_empty() {
        return std::iter::once(1).chain(dims.strides.iter().map(|_| 0)).collect();
    }
    dims.dims.iter().map(|&d| d as i64).chain(dims.strides.iter().flatten().map(|&s| s as i64)).collect()
}

/// The buffer and the offset of each tensor, and what follows them.
pub(crate) fn arguments<'a>(
    views: &[&'a BufferView],
    others: impl IntoIterator<Item = Arg<'a>>,
) -> SmallVec<[Arg<'a>; 24]> {
    let mut args = SmallVec::new();
    views.iter().for_each(|view| args.extend([view.buffer(), view.offset()]));
    others.into_iter().for_each(|other| args.push(other));
    args
}

//! Concatenation on OpenCL in one launch: `kernels/join.cl`.

use crate::backend::opencl::prelude::*;

const TEMPLATE: &str = include_str!("../../../kernels/join.cl");

/// The maximum number of tensors that one launch reads. On every device, a kernel can have this number of tensor arguments.
const MAX_INPUTS: usize = 24;
/// The maximum number of units of the result per input tensor. For larger results, one copy per tensor is faster. Measured on an H200.
const MAX_UNITS_PER_TENSOR: usize = 1 << 19;

/// A tensor as contiguous rows: the step from row to row, and the column of the result where the rows start, both in elements.
struct Rows {
    step: isize,
    start: usize,
}

/// Writes the concatenation along dim `d` to `out`, which is new and contiguous. Returns false, without writing, for large results, for
/// mixed dtypes, and if a tensor is not contiguous from dim `d` on.
pub(crate) fn join(out: &Tensor, tensors: &[&Tensor], d: usize) -> Result<bool> {
    let columns: usize = out.shape().dims()[d..].iter().product();
    let outer = out.numel() / columns.max(1);
    let tensors: SmallVec<[&Tensor; MAX_INPUTS]> = tensors.iter().copied().filter(|t| t.numel() > 0).collect();
    let size = out.dtype.size();
    if tensors.len() < 2 || tensors.iter().any(|t| t.dtype != out.dtype) {
        return Ok(false);
    }
    let mut start = 0;
    let rows = tensors.iter().map(|t| {
        start += t.numel() / outer;
        row_stride(t, d).map(|step| Rows { step, start: start - t.numel() / outer })
    });
    let Some(rows) = rows.collect::<Option<SmallVec<[Rows; MAX_INPUTS]>>>() else { return Ok(false) };
    // The unit is the largest number of bytes, at most 16, that divides all offsets and row lengths.
    let offsets = rows.iter().zip(&tensors).map(|(rows, t)| rows.step.unsigned_abs() | rows.start | t.layout.offset);
    let elements = offsets.fold(columns | out.layout.offset, |all, offset| all | offset);
    let unit = 1 << ((elements * size) | MAX_VECTOR_BYTES).trailing_zeros();
    if out.numel() * size / unit > tensors.len() * MAX_UNITS_PER_TENSOR {
        return Ok(false);
    }
    for (rows, tensors) in rows.chunks(MAX_INPUTS).zip(tensors.chunks(MAX_INPUTS)) {
        let numbers = [outer, columns, rows[0].start, unit].map(|n| n as u64);
        let list: SmallVec<[&Tensor; MAX_INPUTS]> = [out].into_iter().chain(tensors.iter().copied()).collect();
        let key = Key { kind: OpKind::Join, numbers: &numbers, exprs: &[], tensors: &list };
        let prepare = || make_plan(&list, rows, [outer, columns], unit);
        launch_cache::launch_cached(&key, Params::default(), prepare)?;
    }
    Ok(true)
}

/// Returns the plan that copies tensors to adjacent columns of the result, in units of `unit` bytes. `list` holds the result, then the
/// tensors. The first tensor's rows start at column `rows[0].start`.
fn make_plan(list: &[&Tensor], rows: &[Rows], [outer, columns]: [usize; 2], unit: usize) -> Result<LaunchPlan> {
    let (out, device) = (list[0], list[0].cl_device()?);
    let units = unit / out.dtype.size();
    let end = rows[rows.len() - 1].start + list[rows.len()].numel() / outer;
    let (first, width) = (rows[0].start, (end - rows[0].start) / units);
    // The number of inputs is rounded up to a power of two, so that few kernels are built. Inputs that are not used start behind the last column.
    let (count, wide) = (rows.len().next_power_of_two().min(MAX_INPUTS), needs_64_bit([out.numel()]));
    let inputs: String = (0..count).map(|k| format!(", __global const T *x{k}, ulong x{k}_at")).collect();
    let choose: String = (1..count).map(|k| format!("CHOOSE({k}) ")).collect();
    let lists = format!("#define INPUTS {inputs}\n#define CHOOSE_ALL {choose}\n");
    let config = kernel_config! { "T" => bits_type(unit), "IDX" => index_type(wide), "COUNT" => count };
    let kernel = config.kernel(device, "join", "join", &[&lists, TEMPLATE])?;
    let items = outer * width;
    let local = tuned_group_size(device, &kernel, items, DEFAULT_GROUP_SIZE);
    let mut launch = KernelLaunch::new(kernel, items, local);
    let in_units = |n: usize| (n / units) as i64;
    let steps = rows.iter().flat_map(|r| [in_units(r.start - first), (r.step / units as isize) as i64]);
    let beyond = std::iter::repeat_n([width as i64, 0], count - rows.len()).flatten();
    let words = [items as i64, width as i64, in_units(columns)].into_iter().chain(steps).chain(beyond);
    launch.push_words(words);
    launch.push_tensor_at(0, first as isize, units);
    (0..count).for_each(|k| launch.push_tensor_at(1 + if k < rows.len() { k } else { 0 }, 0, units));
    Ok(LaunchPlan::single(device, launch))
}

//! Concatenation on OpenCL in one launch: `kernels/join.cl`.

use smallvec::SmallVec;

use crate::backend::opencl::geometry::{LOCAL, WIDEST, bits_type, free_group, index_type, is_wide};
use crate::backend::opencl::kernels::{KernelKey, kernel};
use crate::backend::opencl::launch_cache::{self, Key, OpKind};
use crate::backend::opencl::launch_plan::{KernelLaunch, LaunchPlan};
use crate::backend::problem::lines::row_step;
use crate::backend::problem::map::Params;
use crate::{Result, Tensor};

const TEMPLATE: &str = include_str!("../../../kernels/join.cl");

/// The tensors that a launch reads: on every device a kernel can have that many arguments.
const AT_ONCE: usize = 24;
/// The most units of a result for each tensor; a copy of each tensor is faster for more. Measured on an H200.
const UNITS: usize = 1 << 19;

/// A tensor as contiguous rows: the step from one to the next, and the column of the result where they start. In elements.
struct Rows {
    step: isize,
    start: usize,
}

/// Writes the concatenation along dim `d` to `out`, which is new and contiguous. Declines large results, other dtypes, and tensors that are
/// not contiguous from `d` on.
pub(crate) fn join(out: &Tensor, tensors: &[&Tensor], d: usize) -> Result<bool> {
    let columns: usize = out.shape().dims()[d..].iter().product();
    let outer = out.numel() / columns.max(1);
    let tensors: SmallVec<[&Tensor; AT_ONCE]> = tensors.iter().copied().filter(|t| t.numel() > 0).collect();
    let size = out.dtype.size();
    if tensors.len() < 2 || tensors.iter().any(|t| t.dtype != out.dtype) {
        return Ok(false);
    }
    let mut start = 0;
    let rows = tensors.iter().map(|t| {
        start += t.numel() / outer;
        row_step(t, d).map(|step| Rows { step, start: start - t.numel() / outer })
    });
    let Some(rows) = rows.collect::<Option<SmallVec<[Rows; AT_ONCE]>>>() else { return Ok(false) };
    // The most bytes, up to 16, that all offsets are multiples of.
    let offsets = rows.iter().zip(&tensors).map(|(rows, t)| rows.step.unsigned_abs() | rows.start | t.layout.offset);
    let elements = offsets.fold(columns | out.layout.offset, |all, offset| all | offset);
    let unit = 1 << ((elements * size) | WIDEST).trailing_zeros();
    if out.numel() * size / unit > tensors.len() * UNITS {
        return Ok(false);
    }
    for (rows, tensors) in rows.chunks(AT_ONCE).zip(tensors.chunks(AT_ONCE)) {
        let numbers = [outer, columns, rows[0].start, unit].map(|n| n as u64);
        let list: SmallVec<[&Tensor; AT_ONCE]> = [out].into_iter().chain(tensors.iter().copied()).collect();
        let key = Key { of: OpKind::Join, device: out.device(), numbers: &numbers, exprs: &[], tensors: &list };
        let prepare = || prepare(&list, rows, [outer, columns], unit);
        launch_cache::launch(&key, Params::default(), prepare)?;
    }
    Ok(true)
}

/// The launch that copies the tensors after the first, the result, to its columns from the first row's start on, in units of `unit` bytes.
fn prepare(list: &[&Tensor], rows: &[Rows], [outer, columns]: [usize; 2], unit: usize) -> Result<LaunchPlan> {
    let (out, device) = (list[0], list[0].cl_device()?);
    let units = unit / out.dtype.size();
    let end = rows[rows.len() - 1].start + list[rows.len()].numel() / outer;
    let (first, width) = (rows[0].start, (end - rows[0].start) / units);
    // Kernels of 2, 4, 8 and more inputs serve fewer tensors: the inputs that are left over start behind the last column.
    let (count, wide) = (rows.len().next_power_of_two().min(AT_ONCE), is_wide([out.numel()]));
    let params = [unit, count, wide.into()].map(|n| n as u64);
    let kernel = kernel(device, KernelKey::new("join", &params), "join", || {
        let inputs: String = (0..count).map(|k| format!(", __global const T *x{k}, ulong x{k}_at")).collect();
        let choose: String = (1..count).map(|k| format!("CHOOSE({k}) ")).collect();
        let (t, idx) = (bits_type(unit), index_type(wide));
        format!(
            "#define T {t}\n#define IDX {idx}\n#define COUNT {count}\n#define INPUTS {inputs}\n#define CHOOSE_ALL {choose}\n{TEMPLATE}"
        )
    })?;
    let items = outer * width;
    let local = free_group(device, &kernel, items, LOCAL);
    let mut launch = KernelLaunch::new(kernel, items, local);
    let in_units = |n: usize| (n / units) as i64;
    let steps = rows.iter().flat_map(|r| [in_units(r.start - first), (r.step / units as isize) as i64]);
    let beyond = std::iter::repeat_n([width as i64, 0], count - rows.len()).flatten();
    let words = [items as i64, width as i64, in_units(columns)].into_iter().chain(steps).chain(beyond);
    launch.words(words);
    launch.tensor_from(0, first as isize, units);
    (0..count).for_each(|k| launch.tensor_from(1 + if k < rows.len() { k } else { 0 }, 0, units));
    Ok(LaunchPlan::one(device, launch))
}

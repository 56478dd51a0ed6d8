//! Top-k, k-th value and median on GPUs without sorting lines: `kernels/select.cl`.

use crate::backend::opencl::geometry::{STRIDED_DIMS, arguments, flag, group_size, index_type, is_wide, words};
use crate::backend::opencl::kernels::{KernelKey, kernel};
use crate::backend::problem::lines::Lines;
use crate::backend::problem::select::{Nth, Selected, with};
use crate::device::DeviceKind;
use crate::device::opencl::{Arg, ClDevice};
use crate::tensor::Dims;
use crate::{DType, Result, Tensor};

const KEYS: &str = include_str!("../../../kernels/key.cl");
const TEMPLATE: &str = include_str!("../../../kernels/select.cl");

/// Shorter lines are sorted, several by one work-group.
const SHORT: usize = 64;
/// Elements that a work-item keeps in registers at a time for the first k.
const PER: usize = 16;
/// The most elements of a work-item for one rank, if a line is read only once and kept in registers.
const RESIDENT: usize = 32;
/// Elements of longer lines that a work-item reads at a time for one rank.
const AHEAD: usize = 8;
/// The largest k; for larger ones lines are sorted.
const MOST: usize = 512;

/// The selection from each line.
enum Query {
    /// The first k in order, from up to `hold` candidates in local memory.
    First {
        k: usize,
        descending: bool,
        hold: usize,
    },
    Nth(Nth),
}

/// The first `k` elements of each line of `x` along d; `None` where sorting should be used.
pub(crate) fn first(x: &Tensor, d: usize, k: usize, descending: bool) -> Result<Option<Selected>> {
    let device = x.cl_device()?;
    let mut lines = Lines::new(x, d);
    if !serves(device, &lines) || k == 0 || k > MOST {
        return Ok(None);
    }
    let made = Selected::empty(x, with(x, d, k))?;
    // Sorting a hundred candidates takes no longer than sorting fewer.
    let query = Query::First { k, descending, hold: (4 * k).next_power_of_two().clamp(128, 2 * MOST) };
    let units = device.info().compute_units.max(1);
    let inner = lines.inner;
    // Where lines are few they are cut into slices: a launch selects the first k of each slice, and the next one selects from those.
    let mut of: Option<Selected> = None;
    loop {
        let x = of.as_ref().map_or(x, |of| of.values.as_ref().unwrap_or(x));
        let most = (lines.n / (4 * k)).min(lines.n / (PER * group_size(device)));
        let slices = if lines.count >= 4 * units { 1 } else { (8 * units).div_ceil(lines.count).min(most).max(1) };
        let from = of.as_ref().map(|of| &of.indices);
        if slices == 1 {
            launch(device, &query, x, from, &lines, inner, 1, &made)?;
            return Ok(Some(made));
        }
        let part = Selected::empty(x, Dims::from_slice(&[lines.count, slices * k]))?;
        launch(device, &query, x, from, &lines, 1, slices, &part)?;
        lines = Lines::new(&part.indices, 1);
        of = Some(part);
    }
}

/// The element of one rank in ascending order, of each line of `x` along d; `None` where sorting should be used.
pub(crate) fn nth(x: &Tensor, d: usize, nth: Nth) -> Result<Option<Selected>> {
    let device = x.cl_device()?;
    let lines = Lines::new(x, d);
    // One group reads a line several times, which few long lines make too slow.
    if !serves(device, &lines) || (lines.n > 1 << 16 && lines.count < 16) {
        return Ok(None);
    }
    let made = Selected::empty(x, with(x, d, 1))?;
    launch(device, &Query::Nth(nth), x, None, &lines, lines.inner, 1, &made)?;
    Ok(Some(made))
}

fn serves(device: &ClDevice, lines: &Lines) -> bool {
    device.info().kind != DeviceKind::Cpu && group_size(device) >= 64 && lines.n >= SHORT && lines.count > 0
}

/// Launches the selection. `from` has the indices of the elements of `x`, where these are not their positions in the line.
#[expect(clippy::too_many_arguments, reason = "the parts of a launch")]
fn launch(
    device: &'static ClDevice,
    query: &Query,
    x: &Tensor,
    from: Option<&Tensor>,
    lines: &Lines,
    inner: usize,
    slices: usize,
    to: &Selected,
) -> Result<()> {
    let n = lines.n;
    let share = n.div_ceil(slices);
    let group = share.div_ceil(4).next_power_of_two().clamp(32, group_size(device));
    let per = share.div_ceil(group).next_power_of_two();
    let index_dtype = if is_wide([n]) { DType::I64 } else { DType::U32 };
    let wide = is_wide([lines.count * n + group * RESIDENT, lines.count * slices * group]);
    let resident = matches!(query, Query::Nth(_)) && per <= RESIDENT;
    let (top, per, descending, cap, k, rule) = match *query {
        Query::First { k, descending, hold } => (true, per.min(PER), descending, hold.max(group), k, hold as u32),
        Query::Nth(nth) => {
            let (k, rule) = nth.rule();
            (false, if resident { per } else { AHEAD }, false, 0, k, rule)
        }
    };
    let params = [
        x.dtype as u64,
        index_dtype as u64,
        lines.rank() as u64,
        group as u64,
        per as u64,
        cap as u64,
        u64::from(wide)
            | u64::from(descending) << 1
            | u64::from(from.is_some()) << 2
            | u64::from(top) << 3
            | u64::from(resident) << 4,
    ];
    let kernel = kernel(device, KernelKey::new("choose", &params), "choose", || {
        format!(
            "{}#define INDEX_TYPE {}\n#define NK {}\n#define IDX {}\n#define GROUP {group}\n#define PER {per}\n#define CAP {cap}\n\
             {}{}{}{STRIDED_DIMS}{KEYS}{TEMPLATE}",
            crate::backend::opencl::sort::keys_of(x.dtype, descending),
            index_type(index_dtype == DType::I64),
            lines.rank(),
            index_type(wide),
            flag(top, "TOP"),
            flag(from.is_some(), "FROM"),
            flag(resident, "RESIDENT"),
        )
    })?;
    let words = words(&lines.strided);
    let values = to.values.as_ref().unwrap_or(&to.indices);
    let (x, y, indices) = (x.device_view()?, values.device_view()?, to.indices.device_view()?);
    let from = from.unwrap_or(&to.indices).device_view()?;
    let args = arguments(
        &[&x, &y, &indices, &from],
        [
            Arg::Bytes(bytemuck::cast_slice(&words)),
            Arg::U64(n as u64),
            Arg::I64(lines.step as i64),
            Arg::U64(inner as u64),
            Arg::U64(k as u64),
            Arg::U32(slices as u32),
            Arg::U32(rule),
        ],
    );
    device.launch(&kernel, &args, &[lines.count * slices * group], &[group])
}

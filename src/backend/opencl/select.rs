//! Top-k, k-th value and median without sorting lines: `kernels/select.cl` on GPUs, `kernels/select_serial.cl` on processors, and
//! for few long lines [`radix_select`].

use crate::backend::opencl::geometry::{
    LOCAL, STRIDED_DIMS, arguments, flag, group_of, group_size, index_type, is_wide, words,
};
use crate::backend::opencl::kernels::{KernelKey, kernel};
use crate::backend::opencl::{radix_select, sort};
use crate::backend::problem::lines::Lines;
use crate::backend::problem::select::{Nth, Selected, with};
use crate::device::DeviceKind;
use crate::device::opencl::{Arg, ClDevice};
use crate::tensor::Dims;
use crate::{DType, Result, Tensor};

const TEMPLATE: &str = include_str!("../../../kernels/select.cl");
const SERIAL: &str = include_str!("../../../kernels/select_serial.cl");

/// Shorter lines are sorted, several by one work-group.
const SHORT: usize = 64;
/// Elements that a work-item keeps in registers at a time for the first k.
const PER: usize = 16;
/// The most elements of a work-item for one rank, if a line is read only once and kept in registers.
const RESIDENT: usize = 32;
/// Elements of longer lines that a work-item reads at a time for one rank.
const AHEAD: usize = 8;
/// The largest k that is kept in local memory.
const MOST: usize = 512;
/// The largest k that a work-item of a processor keeps.
const SERIAL_MOST: usize = 32;
/// Shorter lines are sorted for a larger k, and so are lines of which more than a quarter is wanted.
const LONG: usize = 1 << 14;

/// The selection from each line.
enum Query<'a> {
    /// The first k in order, from up to `hold` candidates in local memory.
    First {
        k: usize,
        descending: bool,
        hold: usize,
    },
    Nth(Nth<'a>),
}

/// The first `k` elements of each line of `x` along d; `None` where sorting should be used.
pub(crate) fn first(x: &Tensor, d: usize, k: usize, descending: bool) -> Result<Option<Selected>> {
    let device = x.cl_device()?;
    let mut lines = Lines::new(x, d);
    let inner = lines.inner;
    let most = if is_serial(device) { SERIAL_MOST } else { MOST };
    if !serves(device, &lines) || k == 0 || (k > most && (lines.n < LONG || k > lines.n / 4)) {
        return Ok(None);
    }
    let made = Selected::empty(x, with(x, d, k))?;
    if k > most {
        let found = radix_select::first(x, &lines, k, descending)?;
        let (lines, values) = (Lines { inner, ..Lines::new(&found.indices, 1) }, found.values());
        sort::run_lines(values, &lines, Some(&found.indices), descending, made.values(), &made.indices)?;
        return Ok(Some(made));
    }
    // Sorting a hundred candidates takes no longer than sorting fewer.
    let query = Query::First { k, descending, hold: (4 * k).next_power_of_two().clamp(128, 2 * MOST) };
    let units = device.info().compute_units.max(1);
    // Where lines are few they are cut into slices: a launch selects the first k of each slice, and the next one selects from those.
    let mut of: Option<Selected> = None;
    loop {
        let x = of.as_ref().map_or(x, Selected::values);
        let least = if is_serial(device) { LONG } else { PER * group_size(device) };
        let most = (lines.n / (4 * k)).min(lines.n / least);
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
pub(crate) fn nth(x: &Tensor, d: usize, nth: Nth<'_>) -> Result<Option<Selected>> {
    let device = x.cl_device()?;
    let lines = Lines::new(x, d);
    if !serves(device, &lines) {
        return Ok(None);
    }
    let made = Selected::empty(x, with(x, d, 1))?;
    // One group reads a line several times, which few long lines make too slow.
    match is_serial(device) || (lines.n > 1 << 16 && lines.count < 16) {
        true => radix_select::nth(x, &lines, nth, &made)?,
        false => launch(device, &Query::Nth(nth), x, nth.ranks(), &lines, lines.inner, 1, &made)?,
    }
    Ok(Some(made))
}

fn is_serial(device: &ClDevice) -> bool {
    device.info().kind == DeviceKind::Cpu
}

fn serves(device: &ClDevice, lines: &Lines) -> bool {
    (is_serial(device) || group_size(device) >= 64) && lines.n >= SHORT && lines.count > 0
}

/// Launches the selection. `from` has the indices of the elements of `x`, where these are not their positions in the line, or ranks.
#[expect(clippy::too_many_arguments, reason = "the parts of a launch")]
fn launch(
    device: &'static ClDevice,
    query: &Query<'_>,
    x: &Tensor,
    from: Option<&Tensor>,
    lines: &Lines,
    inner: usize,
    slices: usize,
    to: &Selected,
) -> Result<()> {
    let n = lines.n;
    if let (Query::First { k, descending, .. }, true) = (query, is_serial(device)) {
        return launch_serial(device, *k, *descending, x, from, lines, inner, slices, to);
    }
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
        u64::from(wide) | u64::from(from.is_some() && top) << 2 | u64::from(top) << 3 | u64::from(resident) << 4,
    ];
    let kernel = kernel(device, KernelKey::new("choose", &params), "choose", || {
        format!(
            "{}#define INDEX_TYPE {}\n#define NK {}\n#define IDX {}\n#define GROUP {group}\n#define PER {per}\n#define CAP {cap}\n\
             {}{}{}{STRIDED_DIMS}{KEYS}{TEMPLATE}",
            sort::keys_of(x.dtype),
            index_type(index_dtype == DType::I64),
            lines.rank(),
            index_type(wide),
            flag(top, "TOP"),
            flag(from.is_some() && top, "FROM"),
            flag(resident, "RESIDENT"),
            KEYS = sort::KEYS,
        )
    })?;
    let words = words(&lines.strided);
    let (x, y, indices) = (x.device_view()?, to.values().device_view()?, to.indices.device_view()?);
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
            Arg::U64(if descending { u64::MAX } else { 0 }),
        ],
    );
    device.launch(&kernel, &args, &[lines.count * slices * group], &[group])
}

/// Launches the selection of the first `k` on a processor.
#[expect(clippy::too_many_arguments, reason = "the parts of a launch")]
fn launch_serial(
    device: &'static ClDevice,
    k: usize,
    descending: bool,
    x: &Tensor,
    from: Option<&Tensor>,
    lines: &Lines,
    inner: usize,
    slices: usize,
    to: &Selected,
) -> Result<()> {
    let cap = if k <= 8 { 8 } else { SERIAL_MOST };
    let index_dtype = if is_wide([lines.n]) { DType::I64 } else { DType::U32 };
    let wide = is_wide([lines.count * lines.n + LOCAL, lines.count * slices * k]);
    let flags = u64::from(wide) | u64::from(from.is_some()) << 1;
    let params = [x.dtype as u64, index_dtype as u64, lines.rank() as u64, cap as u64, flags];
    let kernel = kernel(device, KernelKey::new("choose_serial", &params), "choose", || {
        format!(
            "{}#define INDEX_TYPE {}\n#define NK {}\n#define IDX {}\n#define CAP {cap}\n{}{STRIDED_DIMS}{}{SERIAL}",
            sort::keys_of(x.dtype),
            index_type(index_dtype == DType::I64),
            lines.rank(),
            index_type(wide),
            flag(from.is_some(), "FROM"),
            sort::KEYS,
        )
    })?;
    let words = words(&lines.strided);
    let (x, y, indices) = (x.device_view()?, to.values().device_view()?, to.indices.device_view()?);
    let from = from.unwrap_or(&to.indices).device_view()?;
    let args = arguments(
        &[&x, &y, &indices, &from],
        [
            Arg::Bytes(bytemuck::cast_slice(&words)),
            Arg::U64(lines.count as u64),
            Arg::U64(lines.n as u64),
            Arg::I64(lines.step as i64),
            Arg::U64(inner as u64),
            Arg::U64(k as u64),
            Arg::U32(slices as u32),
            Arg::U64(if descending { u64::MAX } else { 0 }),
        ],
    );
    let items = lines.count * slices;
    let local = if items >= 512 * device.info().compute_units { LOCAL } else { 1 };
    device.launch(&kernel, &args, &[items], &[group_of(&kernel, local)])
}

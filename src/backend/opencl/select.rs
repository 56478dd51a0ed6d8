//! Top-k, k-th value and median without sorting whole lines: `kernels/select.cl` on GPUs, `kernels/select_serial.cl` on CPUs, and
//! [`radix_select`] for few long lines.

use crate::backend::opencl::prelude::*;
use crate::backend::opencl::{radix_select, sort};

const TEMPLATE: &str = include_str!("../../../kernels/select.cl");
const SERIAL_TEMPLATE: &str = include_str!("../../../kernels/select_serial.cl");

/// The minimum length of lines for a selection. Shorter lines are sorted, several by one work-group.
const MIN_SELECT_LEN: usize = 64;
/// The number of elements that a work-item of top-k keeps in registers at a time.
const TOPK_ELEMENTS_PER_ITEM: usize = 16;
/// The maximum number of elements per work-item for which the k-th value keeps a line in registers, so that it is read only once.
const MAX_RESIDENT_PER_ITEM: usize = 32;
/// The number of elements that a work-item of the k-th value reads at a time from a line too long for registers.
const READS_PER_ITEM: usize = 8;
/// The largest k whose candidates are kept in local memory.
const MAX_LOCAL_K: usize = 512;
/// The largest k whose candidates a CPU work-item keeps.
const MAX_CPU_K: usize = 32;
/// The minimum length of lines if k is larger than these limits. Shorter lines, and lines of which more than a quarter is selected, are sorted.
const MIN_LARGE_K_LEN: usize = 1 << 14;

/// The elements to select from each line.
enum Query<'a> {
    /// The first k elements, in order, selected from up to `hold` candidates in local memory.
    First { k: usize, descending: bool, hold: usize },
    /// The element of one rank, or of one rank per line.
    RankQuery(RankQuery<'a>),
}

/// Selects the first `k` elements of each line of `x` along dim d. Returns `None` if sorting is faster.
pub(crate) fn topk(x: &Tensor, d: usize, k: usize, descending: bool) -> Result<Option<Selected>> {
    let device = x.cl_device()?;
    let mut lines = Lines::new(x, d);
    let inner = lines.inner;
    let most = if is_serial(device) { MAX_CPU_K } else { MAX_LOCAL_K };
    if !is_suitable(device, &lines) || k == 0 || (k > most && (lines.n < MIN_LARGE_K_LEN || k > lines.n / 4)) {
        return Ok(None);
    }
    let made = Selected::allocate(x, dims_with(x, d, k))?;
    if k > most {
        let found = radix_select::topk(x, &lines, k, descending)?;
        let (lines, values) = (Lines { inner, ..Lines::new(&found.indices, 1) }, found.values());
        sort::sort_lines(values, &lines, Some(&found.indices), descending, made.values(), &made.indices)?;
        return Ok(Some(made));
    }
    // Sorting a hundred candidates takes no longer than sorting fewer, so `hold` is at least 128.
    let query = Query::First { k, descending, hold: (4 * k).next_power_of_two().clamp(128, 2 * MAX_LOCAL_K) };
    let units = device.info().compute_units.max(1);
    // Few lines are cut into slices: one launch selects the first k of each slice, and the next launch selects from all slices' results.
    let mut of: Option<Selected> = None;
    loop {
        let x = of.as_ref().map_or(x, Selected::values);
        let least =
            if is_serial(device) { MIN_LARGE_K_LEN } else { TOPK_ELEMENTS_PER_ITEM * default_group_size(device) };
        let most = (lines.n / (4 * k)).min(lines.n / least);
        let slices = if lines.count >= 4 * units { 1 } else { (8 * units).div_ceil(lines.count).min(most).max(1) };
        let from = of.as_ref().map(|of| &of.indices);
        if slices == 1 {
            launch(device, &query, x, from, &lines, inner, 1, &made)?;
            return Ok(Some(made));
        }
        let part = Selected::allocate(x, Dims::from_slice(&[lines.count, slices * k]))?;
        launch(device, &query, x, from, &lines, 1, slices, &part)?;
        lines = Lines::new(&part.indices, 1);
        of = Some(part);
    }
}

/// Selects the element of one rank, in ascending order, of each line of `x` along dim d. Returns `None` if sorting is faster.
pub(crate) fn kth(x: &Tensor, d: usize, nth: RankQuery<'_>) -> Result<Option<Selected>> {
    let device = x.cl_device()?;
    let lines = Lines::new(x, d);
    if !is_suitable(device, &lines) {
        return Ok(None);
    }
    let made = Selected::allocate(x, dims_with(x, d, 1))?;
    // One work-group reads a line several times, which is too slow for few long lines.
    match is_serial(device) || (lines.n > 1 << 16 && lines.count < 16) {
        true => radix_select::kth(x, &lines, nth, &made)?,
        false => launch(device, &Query::RankQuery(nth), x, nth.ranks(), &lines, lines.inner, 1, &made)?,
    }
    Ok(Some(made))
}

/// Returns the kernel arguments `k` (the rank, counted from 1) and `rule` (the code of the rank's kind).
pub(super) fn rank_arguments(rank: RankQuery) -> (usize, u32) {
    match rank {
        RankQuery::Rank(rank) => (rank + 1, 0),
        RankQuery::OrNan(rank) => (rank + 1, 1),
        RankQuery::NanMedian => (1, 2),
        RankQuery::Ranks(_) => (1, 3),
    }
}

fn is_serial(device: &ClDevice) -> bool {
    device.info().kind == DeviceKind::Cpu
}

fn is_suitable(device: &ClDevice, lines: &Lines) -> bool {
    (is_serial(device) || default_group_size(device) >= 64) && lines.n >= MIN_SELECT_LEN && lines.count > 0
}

/// Launches the selection. `from` holds the ranks; or, if `x` holds elements selected earlier, the indices of these elements in the line.
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
    let (n, words) = (lines.n, dims_words(&lines.strided));
    let lines_config = |wide: bool| {
        kernel_config! {
            "" => sort::KeyType(x.dtype), "INDEX_TYPE" => index_type(needs_64_bit([n])), "NK" => lines.rank(),
            "IDX" => index_type(wide),
        }
    };
    let views = || -> Result<_> {
        let from = from.unwrap_or(&to.indices);
        Ok((x.device_view()?, to.values().device_view()?, to.indices.device_view()?, from.device_view()?))
    };
    if let (Query::First { k, descending, .. }, true) = (query, is_serial(device)) {
        let cap = if *k <= 8 { 8 } else { MAX_CPU_K };
        let wide = needs_64_bit([lines.count * n + DEFAULT_GROUP_SIZE, lines.count * slices * k]);
        let config = kernel_config! { "" => lines_config(wide), "CAP" => cap, "FROM" => from.is_some() };
        let parts = [STRIDED_DIMS, sort::KEYS, SERIAL_TEMPLATE];
        let kernel = config.kernel(device, "choose_serial", "choose", &parts)?;
        let ((x, y, indices, from), flip) = (views()?, if *descending { u64::MAX } else { 0 });
        let args = args![
            x, y, indices, from; &words[..], lines.count, n, lines.step, inner, *k, slices as u32, flip
        ];
        let items = lines.count * slices;
        let local = if items >= 512 * device.info().compute_units { DEFAULT_GROUP_SIZE } else { 1 };
        return device.launch(&kernel, &args, &[items], &[clamp_group_size(&kernel, local)]);
    }
    let share = n.div_ceil(slices);
    let group = share.div_ceil(4).next_power_of_two().clamp(32, default_group_size(device));
    let per = share.div_ceil(group).next_power_of_two();
    let wide = needs_64_bit([lines.count * n + group * MAX_RESIDENT_PER_ITEM, lines.count * slices * group]);
    let resident = matches!(query, Query::RankQuery(_)) && per <= MAX_RESIDENT_PER_ITEM;
    let (top, per, descending, cap, k, rule) = match *query {
        Query::First { k, descending, hold } => {
            (true, per.min(TOPK_ELEMENTS_PER_ITEM), descending, hold.max(group), k, hold as u32)
        }
        Query::RankQuery(nth) => {
            let (k, rule) = rank_arguments(nth);
            (false, if resident { per } else { READS_PER_ITEM }, false, 0, k, rule)
        }
    };
    let config = kernel_config! {
        "" => lines_config(wide), "GROUP" => group, "PER" => per, "CAP" => cap, "DESCENDING" => Bit(descending),
        "TOP" => top, "FROM" => from.is_some() && top, "RESIDENT" => resident,
    };
    let kernel = config.kernel(device, "choose", "choose", &[STRIDED_DIMS, sort::KEYS, TEMPLATE])?;
    let (x, y, indices, from) = views()?;
    let args = args![x, y, indices, from; &words[..], n, lines.step, inner, k, slices as u32, rule];
    device.launch(&kernel, &args, &[lines.count * slices * group], &[group])
}

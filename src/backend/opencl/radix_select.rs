//! Selection from few long lines by a radix search: `kernels/radix_select.cl`. Every digit is a pass over the elements, which are
//! counted and not moved: temporaries are histograms of slices.

use crate::backend::opencl::geometry::{
    LOCAL, STRIDED_DIMS, arguments, flag, group_of, group_size, index_type, is_wide, words,
};
use crate::backend::opencl::kernels::{KernelKey, kernel};
use crate::backend::opencl::sort;
use crate::backend::problem::lines::Lines;
use crate::backend::problem::select::{Nth, Selected, digits};
use crate::device::DeviceKind;
use crate::device::opencl::{Arg, ClDevice};
use crate::{Compute, DType, Result, Tensor};

const TEMPLATE: &str = include_str!("../../../kernels/radix_select.cl");

/// The fewest elements of a slice.
const SLICE: usize = 1 << 12;
/// Slices for each compute unit: the last one to finish then has little left to do.
const SLICES_PER_UNIT: usize = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    Count,
    Narrow,
    Collect,
    /// All of them for one rank: lines of a processor's work-items.
    Whole,
}

/// A selection from lines: one rank of each, or with `top` the first `k`.
struct RadixSelect<'a> {
    device: &'static ClDevice,
    x: &'a Tensor,
    lines: &'a Lines,
    top: bool,
    k: usize,
    rule: u32,
    ranks: &'a Tensor,
    descending: bool,
    slices: usize,
    bits: usize,
    /// The histograms of slices, and the digits that were found.
    counts: &'a Tensor,
    state: &'a Tensor,
    to: &'a Selected,
}

/// The element of one rank of each line, in the order of lines.
pub(crate) fn nth(x: &Tensor, lines: &Lines, nth: Nth<'_>, to: &Selected) -> Result<()> {
    let (k, rule) = nth.rule();
    run(x, lines, false, k, rule, nth.ranks(), false, to)
}

/// The first `k` elements of each line, in the order of their indices: `[lines, k]`.
pub(crate) fn first(x: &Tensor, lines: &Lines, k: usize, descending: bool) -> Result<Selected> {
    let to = Selected::empty(x, crate::tensor::Dims::from_slice(&[lines.count, k]))?;
    run(x, lines, true, k, 0, None, descending, &to)?;
    Ok(to)
}

#[expect(clippy::too_many_arguments, reason = "the parts of a selection")]
fn run(
    x: &Tensor,
    lines: &Lines,
    top: bool,
    k: usize,
    rule: u32,
    ranks: Option<&Tensor>,
    descending: bool,
    to: &Selected,
) -> Result<()> {
    let device = x.cl_device()?;
    let cpu = device.info().kind == DeviceKind::Cpu;
    let bits = if cpu && lines.n >= SLICE { 11 } else { 8 };
    let units = device.info().compute_units.max(1);
    let whole = cpu && !top && lines.count >= SLICES_PER_UNIT * units;
    let slices = match whole {
        true => 1,
        false => (SLICES_PER_UNIT * units).div_ceil(lines.count).min(lines.n / SLICE).max(1),
    };
    let counted = if whole { 1 } else { lines.count * slices * ((1 << bits) + 1) };
    let counts = &Tensor::empty_like_shape(counted, DType::U32, x.device())?;
    let state = &Tensor::empty_like_shape(if whole { 1 } else { 4 * lines.count }, DType::I64, x.device())?;
    let ranks = ranks.unwrap_or(state);
    let select = RadixSelect { device, x, lines, top, k, rule, ranks, descending, slices, bits, counts, state, to };
    let [low, high] = digits(x.dtype);
    if whole {
        return select.launch(Stage::Whole, true, low, high);
    }
    let mut end = high;
    while end > low {
        let start = low.max(end.saturating_sub(bits));
        select.launch(Stage::Count, end == high, start, end)?;
        select.launch(Stage::Narrow, end == high, start, end)?;
        end = start;
    }
    if top {
        select.launch(Stage::Count, false, low, low)?;
    }
    select.launch(Stage::Collect, false, low, low)
}

impl RadixSelect<'_> {
    /// Launches a stage for bits `low` to `high` of the keys; `begins` for the first of them.
    fn launch(&self, stage: Stage, begins: bool, low: usize, high: usize) -> Result<()> {
        let (device, lines, cpu) = (self.device, self.lines, self.device.info().kind == DeviceKind::Cpu);
        let group = if cpu { 1 } else { group_size(device) };
        let wide = is_wide([lines.count * lines.n + group * 8, lines.count * self.slices * group]);
        let name = ["select_count", "select_narrow", "select_collect", "select_whole"][stage as usize];
        let top = self.top && stage == Stage::Collect;
        let flags = u64::from(wide) | u64::from(top) << 1;
        let params = [self.x.dtype as u64, lines.rank() as u64, self.bits as u64, group as u64, flags];
        let kernel = kernel(device, KernelKey::new(name, &params), name, || {
            format!(
                "{}#define NK {}\n#define IDX {}\n#define GROUP {group}\n#define BITS {bits}\n#define BINS {}\n#define {}\n{}{}\
                 {STRIDED_DIMS}{}{TEMPLATE}",
                sort::keys_of(self.x.dtype),
                lines.rank(),
                index_type(wide),
                1 << self.bits,
                ["COUNT", "NARROW", "COLLECT", "WHOLE"][stage as usize],
                flag(top, "TOP"),
                flag(self.x.dtype.compute() != Compute::I64, "FLOATS"),
                sort::KEYS,
                bits = self.bits,
            )
        })?;
        let (global, local) = match stage {
            Stage::Whole if lines.count >= 64 * 8 * device.info().compute_units => {
                (lines.count, group_of(&kernel, LOCAL))
            }
            Stage::Whole => (lines.count, 1),
            Stage::Narrow => (lines.count * group, group),
            _ => (lines.count * self.slices * group, group),
        };
        let words = words(&lines.strided);
        let (x, y, indices) = (self.x.device_view()?, self.to.values().device_view()?, self.to.indices.device_view()?);
        let (ranks, counts, state) = (self.ranks.device_view()?, self.counts.device_view()?, self.state.device_view()?);
        // Keys of bytes have no bits above their digits in descending order either.
        let flip = if self.descending { u64::MAX >> (64 - digits(self.x.dtype)[1]) } else { 0 };
        let args = arguments(
            &[&x, &y, &indices, &ranks, &counts, &state],
            [
                Arg::Bytes(bytemuck::cast_slice(&words)),
                Arg::U64(lines.count as u64),
                Arg::U64(lines.n as u64),
                Arg::I64(lines.step as i64),
                Arg::U64(self.k as u64),
                Arg::U32(self.slices as u32),
                Arg::U32(self.rule),
                Arg::U32(begins.into()),
                Arg::U32(low as u32),
                Arg::U32(high as u32),
                Arg::U64(flip),
            ],
        );
        device.launch(&kernel, &args, &[global], &[local])
    }
}

//! Selection from few long lines by radix search: `kernels/radix_select.cl`. For each digit, one pass counts elements without moving
//! them. The only temporaries are the digit histograms of slices and the state of the search.

use crate::backend::opencl::prelude::*;
use crate::backend::opencl::{select, sort};

const TEMPLATE: &str = include_str!("../../../kernels/radix_select.cl");

/// The minimum number of elements of a slice.
const MIN_SLICE_LEN: usize = 1 << 12;
/// The number of slices for each compute unit. With several slices, the last compute unit to finish has little left to do.
const SLICES_PER_UNIT: usize = 4;

/// The kernel that a launch runs: count digits, narrow the search to one digit, or collect the selected elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RadixStage {
    Count,
    Narrow,
    Collect,
    /// All stages in one launch that selects one rank. Each CPU work-item searches one line.
    Whole,
}

/// A selection from lines: the element of one rank of each line, or with `top` the first `k` elements.
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
    /// The digit histograms of slices (`counts`), and the digits found so far (`state`).
    counts: &'a Tensor,
    state: &'a Tensor,
    to: &'a Selected,
}

/// Selects the element of one rank from each line, and writes the elements to `to` in the order of lines.
pub(crate) fn kth(x: &Tensor, lines: &Lines, nth: RankQuery<'_>, to: &Selected) -> Result<()> {
    let (k, rule) = select::rank_arguments(nth);
    launch_select(x, lines, false, k, rule, nth.ranks(), false, to)
}

/// Selects the first `k` elements of each line, as `[lines, k]`. The elements of a line are ordered by index, not by value.
pub(crate) fn topk(x: &Tensor, lines: &Lines, k: usize, descending: bool) -> Result<Selected> {
    let to = Selected::allocate(x, crate::tensor::Dims::from_slice(&[lines.count, k]))?;
    launch_select(x, lines, true, k, 0, None, descending, &to)?;
    Ok(to)
}

#[expect(clippy::too_many_arguments, reason = "the parts of a selection")]
fn launch_select(
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
    let bits = if cpu && lines.n >= MIN_SLICE_LEN { 11 } else { 8 };
    let units = device.info().compute_units.max(1);
    let whole = cpu && !top && lines.count >= SLICES_PER_UNIT * units;
    let slices = match whole {
        true => 1,
        false => (SLICES_PER_UNIT * units).div_ceil(lines.count).min(lines.n / MIN_SLICE_LEN).max(1),
    };
    let counted = if whole { 1 } else { lines.count * slices * ((1 << bits) + 1) };
    let counts = &Tensor::empty_with_shape(counted, DType::U32, x.device())?;
    let state = &Tensor::empty_with_shape(if whole { 1 } else { 4 * lines.count }, DType::I64, x.device())?;
    let ranks = ranks.unwrap_or(state);
    let select = RadixSelect { device, x, lines, top, k, rule, ranks, descending, slices, bits, counts, state, to };
    let [low, high] = key_bits(x.dtype);
    if whole {
        return select.launch(RadixStage::Whole, true, low, high);
    }
    let mut end = high;
    while end > low {
        let start = low.max(end.saturating_sub(bits));
        select.launch(RadixStage::Count, end == high, start, end)?;
        select.launch(RadixStage::Narrow, end == high, start, end)?;
        end = start;
    }
    if top {
        select.launch(RadixStage::Count, false, low, low)?;
    }
    select.launch(RadixStage::Collect, false, low, low)
}

impl RadixSelect<'_> {
    /// Launches a stage for the bits `low` to `high` of the keys. `begins` is true for the first digit.
    fn launch(&self, stage: RadixStage, begins: bool, low: usize, high: usize) -> Result<()> {
        let (device, lines, cpu) = (self.device, self.lines, self.device.info().kind == DeviceKind::Cpu);
        let group = if cpu { 1 } else { default_group_size(device) };
        let wide = needs_64_bit([lines.count * lines.n + group * 8, lines.count * self.slices * group]);
        let name = ["select_count", "select_narrow", "select_collect", "select_whole"][stage as usize];
        let top = self.top && stage == RadixStage::Collect;
        let config = kernel_config! {
            "" => sort::KeyType(self.x.dtype), "NK" => lines.rank(), "IDX" => index_type(wide), "GROUP" => group,
            "BITS" => self.bits, "BINS" => 1usize << self.bits,
            "" => ["COUNT", "NARROW", "COLLECT", "WHOLE"][stage as usize], "TOP" => top,
            "FLOATS" => self.x.dtype.compute() != Compute::I64,
        };
        let kernel = config.kernel(device, name, name, &[STRIDED_DIMS, sort::KEYS, TEMPLATE])?;
        let (global, local) = match stage {
            RadixStage::Whole if lines.count >= 64 * 8 * device.info().compute_units => {
                (lines.count, clamp_group_size(&kernel, DEFAULT_GROUP_SIZE))
            }
            RadixStage::Whole => (lines.count, 1),
            RadixStage::Narrow => (lines.count * group, group),
            _ => (lines.count * self.slices * group, group),
        };
        let words = dims_words(&lines.strided);
        let (x, y, indices) = (self.x.device_view()?, self.to.values().device_view()?, self.to.indices.device_view()?);
        let (ranks, counts, state) = (self.ranks.device_view()?, self.counts.device_view()?, self.state.device_view()?);
        // Only the key bits of the dtype are flipped, because higher bits must stay zero.
        let flip = if self.descending { u64::MAX >> (64 - key_bits(self.x.dtype)[1]) } else { 0 };
        let args = args![
            x, y, indices, ranks, counts, state; &words[..], lines.count, lines.n, lines.step, self.k,
            self.slices as u32, self.rule, begins, low as u32, high as u32, flip
        ];
        device.launch(&kernel, &args, &[global], &[local])
    }
}

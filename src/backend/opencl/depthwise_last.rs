//! Depthwise convolutions of channels-last tensors on GPUs, without copies: `kernels/depthwise_last.cl`.

use crate::backend::opencl::prelude::*;

const TEMPLATE: &str = include_str!("../../../kernels/depthwise_last.cl");

/// The maximum number of work-items for adjacent channels.
const MAX_LANES: usize = 32;
/// The maximum number of bytes of local memory for the taps of a work-group's channels.
const MAX_TAP_BYTES: usize = 16 << 10;
/// The number of work-groups for each compute unit. More groups load the taps more often.
const GROUPS_PER_UNIT: usize = 8;

/// The result of a launch. `Flipped` computes the gradient of images as the convolution with reversed taps, for strides of 1; it may spread an
/// infinity or NaN of a tap to the borders.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum LastOutput {
    Windows,
    Images,
    Flipped,
    Weight,
}

/// How a launch is distributed over work-items. See the macros of the template.
struct LastSchedule {
    device: &'static ClDevice,
    width: usize,
    lanes: usize,
    slots: usize,
    columns: usize,
    blocks: usize,
    positions: usize,
    repeat: usize,
}

/// Returns the strides along images, rows and columns.
fn steps(t: &Tensor) -> [isize; 3] {
    let s = t.strides();
    [s[0], s[2], s[3]]
}

impl LastSchedule {
    /// Chooses a schedule for a tensor `to` of the sizes `[n, channels, rows, columns]`, over which work-items are distributed. Returns None unless all
    /// tensors are channels-last with aligned pixels.
    fn choose(
        w: &Windows,
        made: LastOutput,
        tensors: [&Tensor; 2],
        [n, channels, rows, row]: [usize; 4],
    ) -> Result<Option<LastSchedule>> {
        let (device, dtype) = (tensors[0].cl_device()?, tensors[0].dtype);
        let taps = w.kernel[0] * w.kernel[1];
        let starts = tensors.iter().flat_map(|t| steps(t).into_iter().chain([t.layout.offset as isize]));
        let width = vector_width(device, dtype, starts.chain([channels as isize]));
        let is_last = tensors.iter().all(|t| t.memory_format() == MemoryFormat::ChannelsLast);
        let lanes = (channels / width).min(MAX_LANES).min(MAX_TAP_BYTES / (4 * width * taps));
        let columns = if matches!(made, LastOutput::Weight) { 2 } else { 4 };
        let positions = n * rows * row.div_ceil(columns);
        let largest = tensors.iter().map(|t| t.numel()).chain([positions + max_group_size(device)]);
        if !is_last || dtype == DType::F64 || width == 1 || lanes == 0 || needs_64_bit(largest) {
            return Ok(None);
        }
        let each = if made == LastOutput::Weight { w.kernel[0] } else { 1 };
        let slots = (default_group_size(device) / lanes / each).max(1) * each;
        let blocks = (channels / width).div_ceil(lanes);
        let groups = (GROUPS_PER_UNIT * device.info().compute_units.max(1)).div_ceil(blocks);
        let repeat = positions.div_ceil(slots / each * groups).max(1);
        let fits = lanes * slots <= max_group_size(device);
        Ok(fits.then_some(LastSchedule { device, width, lanes, slots, columns, blocks, positions, repeat }))
    }

    fn kernel(&self, w: &Windows, made: LastOutput, dtype: DType) -> Result<Arc<ClKernel>> {
        let Windows { kernel: [kh, kw], stride: [sh, sw], dilation: [dh, dw], .. } = *w;
        let output = ["WINDOWS", "IMAGES", "WINDOWS", "WEIGHT"][made as usize];
        let config = kernel_config! {
            "" => output, "KH" => kh, "KW" => kw, "SH" => sh, "SW" => sw, "DH" => dh, "DW" => dw,
            "COLUMNS" => self.columns, "LANES" => self.lanes, "SLOTS" => self.slots, "FLIP" => made == LastOutput::Flipped,
            "" => Vectors(dtype, self.width), "" => element_types(dtype, false),
        };
        config.kernel(self.device, "depthwise_last", "depthwise_last", &[STRIDED_DIMS, VECTOR_ACCESS, TEMPLATE])
    }

    /// Returns the words of the struct that the kernels take.
    fn words(
        &self,
        sizes: [[usize; 2]; 3],
        channels: usize,
        strides: [[isize; 3]; 2],
        weight: &[isize],
    ) -> SmallVec<[i64; 24]> {
        let numbers = sizes.into_iter().flatten().chain([channels, self.positions, self.repeat]);
        let strides = strides.into_iter().flatten().chain([weight[0], weight[2], weight[3]]);
        numbers.map(|n| n as i64).chain(strides.map(|n| n as i64)).collect()
    }

    fn launch(&self, kernel: &ClKernel, args: &[Arg<'_>], parts: usize) -> Result<()> {
        let group = self.lanes * self.slots;
        self.device.launch(kernel, args, &[parts * self.blocks * group], &[group])
    }
}

/// Computes a convolution or the gradient of its images. Returns None if the tensors must be copied to row-major first.
pub(super) fn gather(
    w: &Windows,
    made: LastOutput,
    from: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> Result<Option<Tensor>> {
    let ([n, channels, ..], [outer, _, kh, kw]) = (sizes_4d(from), sizes_4d(weight));
    let (image, grid) = if made == LastOutput::Windows { (w.image, w.grid) } else { (w.grid, w.image) };
    let padding = match made {
        LastOutput::Flipped => [0, 1].map(|d| w.dilation[d] * ([kh, kw][d] - 1) - w.padding[d]),
        _ => w.padding,
    };
    let sizes = [n, channels, grid[0], grid[1]];
    if outer != channels {
        return Ok(None);
    }
    let layout = Layout::with_format(sizes.into(), MemoryFormat::ChannelsLast);
    let out = Tensor::empty_with_layout(layout, from.dtype, from.device())?;
    let Some(schedule) = LastSchedule::choose(w, made, [from, &out], sizes)? else { return Ok(None) };
    let kernel = schedule.kernel(w, made, from.dtype)?;
    let words = schedule.words([image, grid, padding], channels, [steps(from), steps(&out)], weight.strides());
    let (x, taps, y) = (from.device_view()?, weight.device_view()?, out.device_view()?);
    let bias_or_any = bias.unwrap_or(&out).device_view()?;
    let bias_step = bias.map_or(0, |bias| bias.strides()[0]);
    let args = args![x, taps, bias_or_any, y; &words[..], bias.is_some(), bias_step];
    schedule.launch(&kernel, &args, schedule.positions.div_ceil(schedule.slots * schedule.repeat))?;
    drop((y, bias_or_any));
    Ok(Some(mark_written(out)))
}

/// Returns partial sums of the weight's gradient, `[parts, channels, taps]`, or None if the tensors must be copied to row-major first.
pub(super) fn weight_sums(w: &Windows, x: &Tensor, y: &Tensor) -> Result<Option<Tensor>> {
    let ([n, channels, ..], [kh, kw]) = (sizes_4d(x), w.kernel);
    let sizes = [n, channels, w.grid[0], w.grid[1]];
    if sizes_4d(y) != sizes {
        return Ok(None);
    }
    let made = LastOutput::Weight;
    let Some(schedule) = LastSchedule::choose(w, made, [x, y], sizes)? else { return Ok(None) };
    let parts = schedule.positions.div_ceil(schedule.slots / kh * schedule.repeat);
    let sums = Tensor::empty_with_shape([parts, channels, kh * kw], DType::F32, x.device())?;
    let kernel = schedule.kernel(w, made, x.dtype)?;
    let words = schedule.words([w.image, w.grid, w.padding], channels, [steps(x), steps(y)], &[0; 4]);
    let (from_x, from_y, to) = (x.device_view()?, y.device_view()?, sums.device_view()?);
    schedule.launch(&kernel, &args![from_x, from_y, to; &words[..]], parts)?;
    drop(to);
    Ok(Some(sums))
}

//! Depthwise convolutions (with one input channel per group) without im2col: `kernels/depthwise.cl`.

use crate::backend::opencl::depthwise_last::{self, LastOutput};
use crate::backend::opencl::prelude::*;
use crate::backend::opencl::window;
use crate::backend::profiled::{describe, describe_convolution};
use crate::device::profiler::operation;

const TEMPLATE: &str = include_str!("../../../kernels/depthwise.cl");

/// The maximum number of elements of a row that a work-item reads for its outputs.
const MAX_LINE_ELEMENTS: usize = 32;
/// The maximum number of taps of a filter. For the weight gradient, a work-item keeps a sum for each tap in registers.
const MAX_TAPS: usize = 64;
/// The number of work-items that are needed to occupy a compute unit.
const ITEMS_PER_UNIT: usize = 2048;

/// A depthwise convolution.
pub(crate) struct Depthwise {
    windows: Windows,
    /// The number of channels of the image.
    inner: usize,
    /// The number of outputs of a row that a work-item computes when rows are not loaded as vectors.
    per_item: usize,
}

/// How a work-item accesses a row: the number of its outputs, the elements per load or store, and the elements that the first load skips.
#[derive(Debug, Clone, Copy)]
struct RowAccess {
    per_item: usize,
    at_once: usize,
    skip: usize,
}

/// The result that a launch computes. The names equal the macros of the template.
#[derive(Debug, Clone, Copy)]
enum DepthwiseOutput {
    Windows,
    Images,
    Weight { group: usize },
    Sum,
}

impl Depthwise {
    /// Returns None for groups of several channels, for filters too large for a work-item's registers, and for empty tensors.
    pub(crate) fn new(conv: &Conv2d) -> Option<Depthwise> {
        let &Conv2d { windows, x, weight, groups, .. } = conv;
        let [_, of_group, kh, kw] = sizes_4d(weight);
        let line = |per_item: usize| (per_item - 1) * windows.stride[1] + (kw - 1) * windows.dilation[1] + 1;
        if of_group != 1
            || groups == 1
            || kh * kw > MAX_TAPS
            || x.numel() * weight.numel() == 0
            || !window::fits_32_bits(&windows)
        {
            return None;
        }
        let wanted = x.cl_device().ok()?.tuned(TuningParameter::DepthwiseColumns);
        let per_item = [wanted, 1].into_iter().find(|&per_item| line(per_item) <= MAX_LINE_ELEMENTS)?;
        Some(Depthwise { windows, inner: groups, per_item })
    }

    /// Chooses how rows are accessed. f16 and bf16 are loaded in vectors of eight or four elements if the rows of all tensors are
    /// contiguous and aligned, and their lengths are multiples of the vector.
    fn choose_row_access(&self, device: &ClDevice, made: DepthwiseOutput, from: &[&Tensor]) -> RowAccess {
        let Windows { image, grid, kernel: [_, kw], stride: [_, sw], padding: [_, pad], dilation: [_, dw], .. } =
            self.windows;
        let of_images = matches!(made, DepthwiseOutput::Images);
        let fits = |&per_item: &usize| {
            let starts = from.iter().flat_map(|t| row_starts(t));
            let line = (per_item - 1) * sw + (kw - 1) * dw + 1;
            line <= MAX_LINE_ELEMENTS
                && (sw == 1 || !of_images)
                && image[1].is_multiple_of(per_item)
                && grid[1].is_multiple_of(per_item)
                && from.iter().all(|t| t.dtype.size() == 2 && t.strides()[3] == 1)
                && starts.map(isize::unsigned_abs).all(|start| start.is_multiple_of(per_item))
        };
        match [8, 4].into_iter().filter(|_| device.info().kind != DeviceKind::Cpu).find(fits) {
            Some(at_once) => {
                let before = if of_images { pad as isize - ((kw - 1) * dw) as isize } else { -(pad as isize) };
                RowAccess { per_item: at_once, at_once, skip: before.rem_euclid(at_once as isize) as usize }
            }
            None => RowAccess { per_item: self.per_item, at_once: 1, skip: 0 },
        }
    }

    fn kernel(
        &self,
        device: &'static ClDevice,
        made: DepthwiseOutput,
        row: RowAccess,
        t: &Tensor,
        wide: bool,
    ) -> Result<Arc<ClKernel>> {
        let Windows { kernel: [kh, kw], stride: [sh, sw], dilation: [dh, dw], .. } = self.windows;
        let (output, group) = match made {
            DepthwiseOutput::Windows => ("WINDOWS", 0),
            DepthwiseOutput::Images => ("IMAGES", 0),
            DepthwiseOutput::Weight { group } => ("WEIGHT", group),
            DepthwiseOutput::Sum => ("SUM", 0),
        };
        let RowAccess { per_item, at_once, skip } = row;
        let config = kernel_config! {
            "" => output, "GROUP" => group, "KH" => kh, "KW" => kw, "SH" => sh, "SW" => sw, "DH" => dh, "DW" => dw,
            "PER" => per_item, "SKIP" => (at_once > 1).then_some(skip), "" => Vectors(t.dtype, at_once),
            "" => element_types(t.dtype, wide),
        };
        config.kernel(device, output, "depthwise", &[STRIDED_DIMS, TEMPLATE])
    }

    /// Returns the words of the struct that the kernels take: sizes, and the strides of x, y and the weight.
    fn words(&self, channels: usize, x: &Tensor, y: &Tensor, weight: &Tensor) -> SmallVec<[i64; 20]> {
        let Windows { image, grid, padding, .. } = self.windows;
        let sizes = [image, grid, padding].into_iter().flatten().chain([channels, channels / self.inner]);
        let w = weight.strides();
        let strides = x.strides().iter().chain(y.strides()).chain([&w[0], &w[2], &w[3]]);
        sizes.map(|n| n as i64).chain(strides.map(|&n| n as i64)).collect()
    }

    /// Computes the convolution of images, or the transposed convolution of windows.
    fn gather(&self, made: DepthwiseOutput, from: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let ([n, ..], [outer, ..]) = (sizes_4d(from), sizes_4d(weight));
        let (channels, [rows, columns]) = match made {
            DepthwiseOutput::Windows => (outer, self.windows.grid),
            _ => (self.inner, self.windows.image),
        };
        let out = Tensor::empty_with_shape([n, channels, rows, columns], from.dtype, from.device())?;
        let device = out.cl_device()?;
        let row = self.choose_row_access(device, made, &[from]);
        let count = n * channels * rows * columns.div_ceil(row.per_item);
        let kernel = self.kernel(device, made, row, from, needs_64_bit([out.numel(), count]))?;
        let words = self.words(outer, from, from, weight);
        let (x, w, y) = (from.device_view()?, weight.device_view()?, out.device_view()?);
        let bias_or_any = bias.unwrap_or(&out).device_view()?;
        let bias_step = bias.map_or(0, |bias| bias.strides()[0]);
        let args = args![x, w, bias_or_any, y; &words[..], count, bias.is_some(), bias_step];
        launch_tuned(device, &kernel, &args, count)?;
        drop((y, bias_or_any));
        Ok(mark_written(out))
    }
}

impl Depthwise {
    /// Adds up partial sums `[parts, channels, taps]` of the weight's gradient.
    fn add_parts(&self, sums: &Tensor, slot: Option<Tensor>, x: &Tensor) -> Result<Tensor> {
        let (dims, Windows { kernel: [kh, kw], .. }) = (sums.shape().dims(), self.windows);
        let (parts, channels) = (dims[0], dims[1]);
        let out = match slot {
            Some(slot) => slot,
            None => Tensor::empty_with_shape([channels, 1, kh, kw], x.dtype, x.device())?,
        };
        let row = RowAccess { per_item: 1, at_once: 1, skip: 0 };
        let kernel = self.kernel(out.cl_device()?, DepthwiseOutput::Sum, row, &out, false)?;
        let (from, to) = (sums.device_view()?, out.device_view()?);
        launch_tuned(out.cl_device()?, &kernel, &args![from, to; out.numel(), parts], out.numel())?;
        drop((from, to));
        Ok(mark_written(out))
    }
}

fn is_channels_last(t: &Tensor) -> bool {
    t.memory_format() == MemoryFormat::ChannelsLast
}

/// Calls `f` with a contiguous copy of the channels-last tensor `t`, and returns the result of `f` as channels-last. Both copies go
/// through local memory and together take less time than strided loads along rows.
fn with_row_major(t: &Tensor, f: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    match is_channels_last(t) {
        true => f(&t.detach().contiguous()?)?.to_memory_format(MemoryFormat::ChannelsLast),
        false => f(t),
    }
}

impl Convolution for Depthwise {
    fn forward(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let _recorded = operation(|| describe_convolution("conv2d", &self.windows, x, weight));
        match depthwise_last::gather(&self.windows, LastOutput::Windows, x, weight, bias)? {
            Some(made) => Ok(made),
            None => with_row_major(x, |x| self.gather(DepthwiseOutput::Windows, x, weight, bias)),
        }
    }

    fn transposed(&self, y: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let _recorded = operation(|| describe_convolution("conv_transpose2d", &self.windows, y, weight));
        match depthwise_last::gather(&self.windows, LastOutput::Images, y, weight, bias)? {
            Some(made) => Ok(made),
            None => with_row_major(y, |y| self.gather(DepthwiseOutput::Images, y, weight, bias)),
        }
    }

    fn image_gradient(&self, y: &Tensor, weight: &Tensor) -> Result<Tensor> {
        let Windows { kernel, padding, stride, dilation, .. } = self.windows;
        let has_taps = |d: usize| padding[d] <= dilation[d] * (kernel[d] - 1);
        if stride == [1, 1] && has_taps(0) && has_taps(1) {
            let _recorded = operation(|| describe_convolution("conv2d image gradient", &self.windows, y, weight));
            if let Some(made) = depthwise_last::gather(&self.windows, LastOutput::Flipped, y, weight, None)? {
                return Ok(made);
            }
        }
        self.transposed(y, weight, None)
    }

    fn weight_gradient(&self, x: &Tensor, y: &Tensor, slot: Option<Tensor>) -> Result<Tensor> {
        let _recorded = operation(|| describe("conv2d weight gradient", [x, y]));
        if let Some(sums) = depthwise_last::weight_sums(&self.windows, x, y)? {
            return self.add_parts(&sums, slot, x);
        }
        if [x, y].into_iter().any(is_channels_last) {
            return self.weight_gradient(&x.detach().contiguous()?, &y.detach().contiguous()?, slot);
        }
        let ([n, ..], [_, channels, rows, columns]) = (sizes_4d(x), sizes_4d(y));
        let Windows { kernel: [kh, kw], .. } = self.windows;
        let device = x.cl_device()?;
        // On a CPU, a single work-item computes each partial sum of a channel.
        let group = if device.info().kind == DeviceKind::Cpu { 1 } else { default_group_size(device) };
        let row = self.choose_row_access(device, DepthwiseOutput::Weight { group }, &[x, y]);
        let count = n * rows * columns.div_ceil(row.per_item);
        let units = device.info().compute_units.max(1);
        let enough = if group == 1 { 8 * units } else { units * ITEMS_PER_UNIT / group };
        let parts = enough.div_ceil(channels).min(count.div_ceil(8 * group)).max(1);
        let each = count.div_ceil(parts);
        let dtype = x.dtype.compute().dtype();
        let sums = Tensor::empty_with_shape([parts, channels, kh * kw], dtype, x.device())?;
        let wide = needs_64_bit([count + each + group, channels * parts]);
        let words = self.words(channels, x, y, x); // the kernel does not read the strides of the weight
        let (from_x, from_y, to) = (x.device_view()?, y.device_view()?, sums.device_view()?);
        let args = args![from_x, from_y, to; &words[..], count, each];
        let kernel = self.kernel(device, DepthwiseOutput::Weight { group }, row, x, wide)?;
        device.launch(&kernel, &args, &[channels * parts * group], &[group])?;
        drop(to);
        self.add_parts(&sums, slot, x)
    }
}

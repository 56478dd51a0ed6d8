//! Depthwise convolutions, whose groups have one input channel each, without im2col: `kernels/depthwise.cl`.

use std::sync::Arc;

use smallvec::SmallVec;

use crate::backend::opencl::geometry::{
    STRIDED_DIMS, arguments, group_size, is_wide, launch_free, row_starts, types, vector_defines,
};
use crate::backend::opencl::kernels::{KernelKey, kernel};
use crate::backend::opencl::window;
use crate::backend::problem::conv::Convolution;
use crate::backend::problem::windows::{Windows, four};
use crate::backend::profiled::{describe, of_convolution};
use crate::backend::written;
use crate::device::DeviceKind;
use crate::device::opencl::{Arg, ClDevice, ClKernel, Knob};
use crate::device::profiler::operation;
use crate::{MemoryFormat, Result, Tensor};

const TEMPLATE: &str = include_str!("../../../kernels/depthwise.cl");

/// The most elements of a row that a work-item reads for its outputs.
const LINE: usize = 32;
/// The most taps of a filter: for the gradient of the weight a work-item has a sum for each.
const TAPS: usize = 64;
/// Work-items that occupy a compute unit.
const BUSY: usize = 2048;

pub(crate) struct Depthwise {
    windows: Windows,
    /// The channels of the image.
    inner: usize,
    /// The outputs of a row that a work-item computes, where they are not loaded as vectors.
    per: usize,
}

/// The outputs of a row that a work-item computes, the width of its loads and stores, and the elements that the first load skips.
#[derive(Debug, Clone, Copy)]
struct Row {
    per: usize,
    at_once: usize,
    skip: usize,
}

/// What a launch computes; the names are those of the template's macros.
#[derive(Debug, Clone, Copy)]
enum Made {
    Windows,
    Images,
    Weight { group: usize },
    Sum,
}

impl Depthwise {
    /// None for groups of several channels, for filters that are too large for a work-item's registers, and for empty tensors.
    pub(crate) fn new(windows: Windows, x: &Tensor, weight: &Tensor, groups: usize) -> Option<Depthwise> {
        let [_, of_group, kh, kw] = four(weight);
        let line = |per: usize| (per - 1) * windows.stride[1] + (kw - 1) * windows.dilation[1] + 1;
        if of_group != 1
            || groups == 1
            || kh * kw > TAPS
            || x.numel() * weight.numel() == 0
            || !window::fits_32_bits(&windows)
        {
            return None;
        }
        let wanted = x.cl_device().ok()?.tuned(Knob::DepthwiseColumns);
        let per = [wanted, 1].into_iter().find(|&per| line(per) <= LINE)?;
        Some(Depthwise { windows, inner: groups, per })
    }

    /// f16 and bf16 are loaded in vectors of eight or four where the rows of all tensors are contiguous, aligned and multiples of that.
    fn row(&self, device: &ClDevice, made: Made, from: &[&Tensor]) -> Row {
        let Windows { image, grid, kernel: [_, kw], stride: [_, sw], padding: [_, pad], dilation: [_, dw], .. } =
            self.windows;
        let of_images = matches!(made, Made::Images);
        let fits = |&per: &usize| {
            let starts = from.iter().flat_map(|t| row_starts(t));
            let line = (per - 1) * sw + (kw - 1) * dw + 1;
            line <= LINE
                && (sw == 1 || !of_images)
                && image[1].is_multiple_of(per)
                && grid[1].is_multiple_of(per)
                && from.iter().all(|t| t.dtype.size() == 2 && t.strides()[3] == 1)
                && starts.map(isize::unsigned_abs).all(|start| start.is_multiple_of(per))
        };
        match [8, 4].into_iter().filter(|_| device.info().kind != DeviceKind::Cpu).find(fits) {
            Some(at_once) => {
                let before = if of_images { pad as isize - ((kw - 1) * dw) as isize } else { -(pad as isize) };
                Row { per: at_once, at_once, skip: before.rem_euclid(at_once as isize) as usize }
            }
            None => Row { per: self.per, at_once: 1, skip: 0 },
        }
    }

    fn kernel(&self, device: &'static ClDevice, made: Made, row: Row, t: &Tensor, wide: bool) -> Result<Arc<ClKernel>> {
        let Windows { kernel: [kh, kw], stride: [sh, sw], dilation: [dh, dw], .. } = self.windows;
        let (name, group) = match made {
            Made::Windows => ("WINDOWS", 0),
            Made::Images => ("IMAGES", 0),
            Made::Weight { group } => ("WEIGHT", group),
            Made::Sum => ("SUM", 0),
        };
        let Row { per, at_once, skip } = row;
        let sizes = [kh, kw, sh, sw, dh, dw, per, at_once, skip, group].map(|n| n as u64);
        let params: SmallVec<[u64; 12]> = sizes.into_iter().chain([t.dtype as u64, wide.into()]).collect();
        kernel(device, KernelKey::new(name, &params), "depthwise", || {
            format!(
                "#define {name}\n#define GROUP {group}\n#define KH {kh}\n#define KW {kw}\n#define SH {sh}\n#define SW {sw}\n\
                 #define DH {dh}\n#define DW {dw}\n#define PER {per}\n{}{}{}{STRIDED_DIMS}{TEMPLATE}",
                if at_once > 1 { format!("#define SKIP {skip}\n") } else { String::new() },
                vector_defines(t.dtype, at_once),
                types(t.dtype, wide)
            )
        })
    }

    /// The words of the kernels' struct: sizes, and the strides of x, y and the weight.
    fn words(&self, channels: usize, x: &Tensor, y: &Tensor, weight: &Tensor) -> SmallVec<[i64; 20]> {
        let Windows { image, grid, padding, .. } = self.windows;
        let sizes = [image, grid, padding].into_iter().flatten().chain([channels, channels / self.inner]);
        let w = weight.strides();
        let strides = x.strides().iter().chain(y.strides()).chain([&w[0], &w[2], &w[3]]);
        sizes.map(|n| n as i64).chain(strides.map(|&n| n as i64)).collect()
    }

    fn launch_gather(
        &self,
        made: Made,
        from: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        out: &Tensor,
    ) -> Result<()> {
        let (device, [n, channels, rows, columns]) = (out.cl_device()?, four(out));
        let row = self.row(device, made, &[from]);
        let count = n * channels * rows * columns.div_ceil(row.per);
        let kernel = self.kernel(device, made, row, from, is_wide([out.numel(), count]))?;
        let words = self.words(four(weight)[0], from, from, weight);
        let (x, w, y) = (from.device_view()?, weight.device_view()?, out.device_view()?);
        let bias_or_any = bias.unwrap_or(out).device_view()?;
        let args = arguments(
            &[&x, &w, &bias_or_any, &y],
            [
                Arg::Bytes(bytemuck::cast_slice(&words)),
                Arg::U64(count as u64),
                Arg::U32(bias.is_some().into()),
                Arg::I64(bias.map_or(0, |bias| bias.strides()[0]) as i64),
            ],
        );
        launch_free(device, &kernel, &args, count)
    }

    /// Adds up the partial sums of the weight's gradient.
    fn launch_sum(&self, device: &'static ClDevice, sums: &Tensor, parts: usize, out: &Tensor) -> Result<()> {
        let (from, to) = (sums.device_view()?, out.device_view()?);
        let args = arguments(&[&from, &to], [Arg::U64(out.numel() as u64), Arg::U64(parts as u64)]);
        let kernel = self.kernel(device, Made::Sum, Row { per: 1, at_once: 1, skip: 0 }, out, false)?;
        launch_free(device, &kernel, &args, out.numel())
    }

    /// The convolution of images, or the transposed convolution of windows.
    fn gather(&self, made: Made, from: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let ([n, ..], [outer, ..]) = (four(from), four(weight));
        let (channels, [rows, columns]) = match made {
            Made::Windows => (outer, self.windows.grid),
            _ => (self.inner, self.windows.image),
        };
        let out = Tensor::empty_like_shape([n, channels, rows, columns], from.dtype, from.device())?;
        self.launch_gather(made, from, weight, bias, &out)?;
        Ok(written(out))
    }
}

fn is_channels_last(t: &Tensor) -> bool {
    t.memory_format() == MemoryFormat::ChannelsLast
}

/// Calls `f` with a contiguous copy of a channels-last tensor and gives its result as channels-last: two copies through local memory
/// take less time than strided loads along rows.
fn in_planes(t: &Tensor, f: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    match is_channels_last(t) {
        true => f(&t.detach().contiguous()?)?.to_memory_format(MemoryFormat::ChannelsLast),
        false => f(t),
    }
}

impl Convolution for Depthwise {
    fn windows(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let _recorded = operation(|| of_convolution("conv2d", &self.windows, x, weight));
        in_planes(x, |x| self.gather(Made::Windows, x, weight, bias))
    }

    fn images(&self, y: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let _recorded = operation(|| of_convolution("conv_transpose2d", &self.windows, y, weight));
        in_planes(y, |y| self.gather(Made::Images, y, weight, bias))
    }

    fn weight(&self, x: &Tensor, y: &Tensor, slot: Option<Tensor>) -> Result<Tensor> {
        let _recorded = operation(|| describe("conv2d weight gradient", [x, y]));
        if [x, y].into_iter().any(is_channels_last) {
            return self.weight(&x.detach().contiguous()?, &y.detach().contiguous()?, slot);
        }
        let ([n, ..], [_, channels, rows, columns]) = (four(x), four(y));
        let Windows { kernel: [kh, kw], .. } = self.windows;
        let device = x.cl_device()?;
        let out = match slot {
            Some(slot) => slot,
            None => Tensor::empty_like_shape([channels, 1, kh, kw], x.dtype, x.device())?,
        };
        // On a processor a single work-item computes a part of a channel's sums.
        let group = if device.info().kind == DeviceKind::Cpu { 1 } else { group_size(device) };
        let row = self.row(device, Made::Weight { group }, &[x, y]);
        let count = n * rows * columns.div_ceil(row.per);
        let units = device.info().compute_units.max(1);
        let enough = if group == 1 { 8 * units } else { units * BUSY / group };
        let parts = enough.div_ceil(channels).min(count.div_ceil(8 * group)).max(1);
        let each = count.div_ceil(parts);
        let dtype = x.dtype.compute().dtype();
        let sums = Tensor::empty_like_shape([parts, channels, kh * kw], dtype, x.device())?;
        let wide = is_wide([count + each + group, channels * parts]);
        let words = self.words(channels, x, y, &out);
        let words = Arg::Bytes(bytemuck::cast_slice(&words));
        let (from_x, from_y, to) = (x.device_view()?, y.device_view()?, sums.device_view()?);
        let args = arguments(&[&from_x, &from_y, &to], [words, Arg::U64(count as u64), Arg::U64(each as u64)]);
        let kernel = self.kernel(device, Made::Weight { group }, row, x, wide)?;
        device.launch(&kernel, &args, &[channels * parts * group], &[group])?;
        self.launch_sum(device, &sums, parts, &out)?;
        Ok(written(out))
    }
}

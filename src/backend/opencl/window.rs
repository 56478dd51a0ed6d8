//! Pooling, unfold (im2col) and fold (col2im) on OpenCL: `kernels/window.cl`.

use crate::backend::opencl::image;
use crate::backend::opencl::prelude::*;

const TEMPLATE: &str = include_str!("../../../kernels/window.cl");

/// The number of work-items that are needed to occupy a compute unit.
const ITEMS_PER_UNIT: usize = 2048;

/// True if kernels can compute all positions in images and in windows, and the products of these positions, with 32 bits.
pub(crate) fn fits_32_bits(w: &Windows) -> bool {
    let along = |d: usize| {
        let parts =
            [w.image[d], w.padding[d], w.padding_after[d], w.dilation[d] * w.kernel[d], w.grid[d] * w.stride[d]];
        let products = if w.adaptive { (w.grid[d] + 1) * (w.image[d] + 1) } else { 0 };
        parts.iter().sum::<usize>().max(products)
    };
    let positions = (w.image[0] * w.image[1]).max(w.grid[0] * w.grid[1]).max(w.kernel[0] * w.kernel[1]);
    positions.max(along(0)).max(along(1)) < 1 << 30
}

/// Returns the kernel that the macro `name` selects, for `count` work-items with `width` adjacent channels each. The kernel uses the
/// compute type and the memory format of `out`.
pub(crate) fn window_kernel(
    device: &'static ClDevice,
    name: &'static str,
    out: &Tensor,
    w: &Windows,
    (count, width): (usize, usize),
) -> Result<Arc<ClKernel>> {
    let (wide, narrow, channels_last) = (needs_64_bit([count]), fits_32_bits(w), !out.is_contiguous());
    let reads_adjacent = matches!(name, "MAX" | "UNMAX" | "MEAN" | "UNMEAN");
    let config = kernel_config! {
        "" => name, "" => element_types(out.dtype, wide), "ADAPTIVE" => w.adaptive, "LAST" => channels_last,
        "INT" => offset_type(!narrow), "" => reads_adjacent.then_some(Vectors(out.dtype, width)),
    };
    let access = if reads_adjacent { VECTOR_ACCESS } else { "" };
    config.kernel(device, name, "window", &[STRIDED_DIMS, access, TEMPLATE])
}

/// Returns the words of the struct that the kernels take. `strides` are the strides of the tensor that is read.
pub(super) fn words(w: &Windows, x: &Tensor, strides: &[isize]) -> SmallVec<[i64; 22]> {
    let pairs = [w.image, w.kernel, w.grid, w.stride, w.padding, w.padding_after, w.dilation];
    let numbers = pairs.iter().flatten().chain(&x.shape().dims()[..2]).map(|&n| n as i64);
    numbers.chain((0..6).map(|i| strides.get(i).copied().unwrap_or(0) as i64)).collect()
}

/// Returns the kernel argument for the divisor of average pooling.
pub(super) fn divisor_code(divisor: Divisor) -> i64 {
    match divisor {
        Divisor::Window => 0,
        Divisor::InsideImage => -1,
        Divisor::Number(n) => i64::try_from(n).unwrap_or(i64::MAX),
    }
}

pub(crate) fn unfold(im2col: &Im2col) -> Result<()> {
    let &Im2col { windows: w, x, out, inside } = im2col;
    let device = out.cl_device()?;
    let (count, size) = (out.numel() / (w.kernel[0] * w.kernel[1]), out.dtype.size());
    // If there are few windows, a work-item copies one row of a window, otherwise a whole window.
    let each = if count < device.info().compute_units * ITEMS_PER_UNIT { 1 } else { w.kernel[0] };
    let items = count * w.kernel[0].div_ceil(each);
    let wide = needs_64_bit([items]);
    let config = kernel_config! { "" => "UNFOLD", "V" => bits_type(size), "IDX" => index_type(wide) };
    let kernel = config.kernel(device, "UNFOLD", "window", &[STRIDED_DIMS, TEMPLATE])?;
    let words = words(w, x, x.strides());
    let (from, to) = (x.device_view()?, out.device_view()?);
    let args = args![from, to; &words[..], count, each as u32, inside];
    launch_tuned(device, &kernel, &args, items)
}

pub(crate) fn fold(w: &Windows, columns: &Tensor, out: &Tensor) -> Result<()> {
    let device = out.cl_device()?;
    let count = out.numel();
    let kernel = window_kernel(device, "FOLD_WINDOWS", out, w, (count, 1))?;
    let words = words(w, columns, columns.strides());
    let (from, to) = (columns.device_view()?, out.device_view()?);
    let args = args![from, to; &words[..], count];
    launch_tuned(device, &kernel, &args, count)
}

/// Returns the number of adjacent channels of a work-item: a vector's length on GPUs if channels are contiguous, otherwise 1.
fn channels_per_item(device: &ClDevice, task: PoolTask, x: &Tensor, index: &Tensor, out: &Tensor) -> usize {
    let [strides, channels] = [x.strides(), &[out.shape().dims()[1] as isize]];
    if out.is_contiguous() || strides[1] != 1 || !out.dtype.is_float() {
        return 1;
    }
    let offsets = [x, out].map(|t| t.layout.offset as isize);
    let starts = [strides[0], strides[2], strides[3]].into_iter().chain(offsets).chain(channels.iter().copied());
    // Indices are loaded in pairs, so their offset must be even.
    match matches!(task, PoolTask::Max | PoolTask::MaxBackward) && !index.layout.offset.is_multiple_of(2) {
        true => 1,
        false => vector_width(device, out.dtype, starts),
    }
}

pub(crate) fn pool(pooling: &Pooling) -> Result<()> {
    let &Pooling { windows: w, task, x, index, out } = pooling;
    if image::pool(pooling)? {
        return Ok(());
    }
    let device = out.cl_device()?;
    let width = channels_per_item(device, task, x, index, out);
    let count = out.numel() / width;
    let name = match task {
        PoolTask::Max => "MAX",
        PoolTask::MaxBackward => "UNMAX",
        PoolTask::Mean(_) => "MEAN",
        PoolTask::MeanBackward(_) => "UNMEAN",
    };
    let kernel = window_kernel(device, name, out, w, (count, width))?;
    let words = words(w, x, x.strides());
    let (from, to, indices) = (x.device_view()?, out.device_view()?, index.device_view()?);
    match task {
        PoolTask::Max | PoolTask::MaxBackward => {
            launch_tuned(device, &kernel, &args![from, to, indices; &words[..], count], count)
        }
        PoolTask::Mean(divisor) | PoolTask::MeanBackward(divisor) => {
            launch_tuned(device, &kernel, &args![from, to; &words[..], count, divisor_code(divisor)], count)
        }
    }
}

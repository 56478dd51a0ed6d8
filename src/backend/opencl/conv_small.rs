//! Small f32 convolutions of few channels on GPUs: `kernels/conv_small.cl`. One launch, where implicit GEMM takes three.

use crate::backend::opencl::gemm::uses_cpu_kernels;
use crate::backend::opencl::prelude::*;

const TEMPLATE: &str = include_str!("../../../kernels/conv_small.cl");

/// The maximum work-group size.
const MAX_THREADS: usize = 512;
/// The maximum number of elements of the weight and of the rows of an image in local memory.
const MAX_TAPS: usize = 4 << 10;
const MAX_TILE: usize = 8 << 10;
/// The maximum number of multiplications. Tensor cores take less time for more.
const MAX_PRODUCTS: usize = 32 << 20;

/// Computes the forward pass, channels-last if `last`. Returns None if other kernels are faster.
pub(super) fn forward(
    w: &Windows,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    last: bool,
) -> Result<Option<Tensor>> {
    let ([n, channels, ..], [outer, of_group, kh, kw]) = (sizes_4d(x), sizes_4d(weight));
    let (device, Windows { grid, stride: [sh, sw], dilation: [dh, dw], .. }) = (x.cl_device()?, *w);
    // Adjacent taps begin in different banks of local memory.
    let padded = outer.next_multiple_of(4) + if outer.next_multiple_of(4).is_multiple_of(8) { 4 } else { 0 };
    let (taps, wide) = (channels * kh * kw * padded, (grid[1] - 1) * sw + (kw - 1) * dw + 1);
    let tile = |rows: usize| channels * ((rows - 1) * sh + (kh - 1) * dh + 1) * wide;
    let products = (n * grid[0] * grid[1]).saturating_mul(weight.numel());
    let fits = x.dtype == DType::F32 && of_group == channels && taps <= MAX_TAPS && products <= MAX_PRODUCTS;
    if !fits || x.numel() == 0 || tile(1) > MAX_TILE || uses_cpu_kernels(device) {
        return Ok(None);
    }
    let format = if last { MemoryFormat::ChannelsLast } else { MemoryFormat::Contiguous };
    let layout = Layout::with_format([n, outer, grid[0], grid[1]].into(), format);
    let out = Tensor::empty_with_layout(layout, x.dtype, x.device())?;
    // At most one work-group for each compute unit at first, then as many rows as fit.
    let mut rows = (n * grid[0] / device.info().compute_units.max(1)).clamp(1, grid[0]);
    while tile(rows) > MAX_TILE {
        rows -= 1;
    }
    let threads = max_group_size(device).min(MAX_THREADS);
    let config = kernel_config! {
        "" => element_types(x.dtype, false), "KH" => kh, "KW" => kw, "SH" => sh, "SW" => sw, "DH" => dh, "DW" => dw,
        "T" => threads, "TILE" => tile(rows).next_power_of_two(), "TAPS" => taps.next_power_of_two(),
    };
    let kernel = config.kernel(device, "conv_small", "conv_small", &[TEMPLATE])?;
    let numbers = [w.image, grid, w.padding].into_iter().flatten().chain([channels, outer, rows, padded]);
    let strides = [x, weight, &out].into_iter().flat_map(|t| t.strides().iter().copied());
    let words: SmallVec<[i64; 24]> = numbers.map(|n| n as i64).chain(strides.map(|s| s as i64)).collect();
    let (from, by, to) = (x.device_view()?, weight.device_view()?, out.device_view()?);
    let bias_or_any = bias.unwrap_or(weight).device_view()?;
    let bias_step = bias.map_or(0, |bias| bias.strides()[0]);
    let args = args![from, by, bias_or_any, to; &words[..], bias.is_some(), bias_step];
    device.launch(&kernel, &args, &[n * grid[0].div_ceil(rows) * threads], &[threads])?;
    drop(to);
    Ok(Some(mark_written(out)))
}

//! Convolutions that read their input and filter as images.

use super::*;

/// The number of adjacent outputs of a row that a work-item computes: COLUMNS in the template.
const COLUMNS: usize = 4;

/// True if convolutions of this tensor should read images instead of buffers.
pub(crate) fn reads_images(x: &Tensor) -> bool {
    image_device(x, TuningParameter::ConvolutionImages).is_some()
}

/// Convolves `[n, c, h, w]` with a weight `[o, c / groups, kh, kw]`. Returns `None` if buffers should be read. Supports one group, and
/// depthwise convolutions with as many output as input channels. A batch whose image would be too high is divided.
pub(crate) fn convolution(conv: &Conv2d) -> Result<Option<Tensor>> {
    let &Conv2d { windows: ref w, x, weight, bias, groups, .. } = conv;
    let ([n, c, ..], [o, each, kh, kw]) = (sizes_4d(x), sizes_4d(weight));
    let depthwise = groups > 1 && groups == c && o == c && each == 1;
    if (groups > 1 && !depthwise) || x.numel() == 0 || weight.numel() == 0 || exact_format(x.dtype).is_none() {
        return Ok(None);
    }
    let Some(cl) = image_device(x, TuningParameter::ConvolutionImages) else { return Ok(None) };
    let strides = weight.strides();
    let taps_are_one_dim = kh == 1 || kw == 1 || strides[2] == strides[3] * kw as isize;
    let step = if kw == 1 { strides[2] } else { strides[3] };
    let filter = Tensor4 { dims: [1, o, kh * kw, each], strides: [0, strides[0], step, strides[1]] };
    let Some(most) = items_per_image(cl, x).filter(|_| taps_are_one_dim) else { return Ok(None) };
    let [rows, columns] = w.grid;
    let items = columns.div_ceil(COLUMNS) * rows * o.div_ceil(4);
    if !filter.fits(Blocks::Down, cl) || items * most >= 1 << 30 {
        return Ok(None);
    }
    let out = Tensor::empty_with_shape([n, o, rows, columns], x.dtype, x.device())?;
    let Some(filter) = none_if_out_of_memory(cached_image(cl, weight, &filter, Blocks::Down))? else { return Ok(None) };
    let kernel = image_kernel(cl, if depthwise { "DEPTHWISE" } else { "CONVOLUTION" }, x.dtype, false)?;
    for from in (0..n).step_by(most) {
        let count = most.min(n - from);
        let (x, out) = (slice(x, from, count)?, slice(&out, from, count)?);
        let Some(image) = none_if_out_of_memory(single_use_image(cl, &x))? else { return Ok(None) };
        let sizes = [count, c, o].into_iter();
        let pairs = [w.image, w.kernel, w.grid, w.stride, w.padding, w.dilation];
        let words: Vec<i32> = sizes.chain(pairs.into_iter().flatten()).map(|size| size as i32).collect();
        // The kernel needs a buffer argument for the bias even if there is no bias.
        let (bias_or_any, to) = (bias.unwrap_or(&out).device_view()?, out.device_view()?);
        let bias_step = bias.map_or(0, |bias| bias.strides()[0]);
        let args = args![
            ; image_arg(&image)?, image_arg(&filter)?, bias_or_any.buffer(), bias_or_any.offset(), bias.is_some(),
            bias_step, to.buffer(), to.offset(), &words[..]
        ];
        launch_tuned(cl, &kernel, &args, items * count)?;
    }
    Ok(Some(mark_written(out)))
}

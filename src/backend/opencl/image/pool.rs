//! Pooling that reads its input as an image.

use super::*;
use crate::backend::opencl::window::{divisor_code, window_kernel, words};

/// Computes [`pool`](crate::backend::Backend::pool) for maxima and means. Returns false if buffers should be read. A batch whose image
/// would be too high is divided.
pub(crate) fn pool(pooling: &Pooling) -> Result<bool> {
    let &Pooling { windows: w, task, x, index, out } = pooling;
    let (name, divisor) = match task {
        PoolTask::Max => ("MAX_OF_IMAGE", 0),
        PoolTask::Mean(divisor) => ("MEAN_OF_IMAGE", divisor_code(divisor)),
        PoolTask::MaxBackward | PoolTask::MeanBackward(_) => return Ok(false),
    };
    let cl = match image_device(x, TuningParameter::PoolingImages) {
        Some(cl) if exact_format(x.dtype).is_some() && x.dtype == out.dtype && out.is_contiguous() => cl,
        _ => return Ok(false),
    };
    let ([n, c, ..], Some(most)) = (sizes_4d(x), items_per_image(cl, x)) else { return Ok(false) };
    let [rows, columns] = w.grid;
    let items = rows * columns * c.div_ceil(4);
    if needs_64_bit([items * most]) {
        return Ok(false);
    }
    let kernel = window_kernel(cl, name, out, w, (items * most, 1))?;
    for from in (0..n).step_by(most) {
        let count = most.min(n - from);
        let (x, out) = (slice(x, from, count)?, slice(out, from, count)?);
        // Means have no indices, but the kernel needs a buffer for that argument.
        let index = if task == PoolTask::Max { slice(index, from, count)? } else { out.shallow_clone() };
        let Some(image) = none_if_out_of_memory(single_use_image(cl, &x))? else { return Ok(false) };
        let words = words(w, &x, &[]);
        let (to, indices) = (out.device_view()?, index.device_view()?);
        let args = args![
            ; image_arg(&image)?, to.buffer(), to.offset(), indices.buffer(), indices.offset(), &words[..],
            items * count, divisor
        ];
        launch_tuned(cl, &kernel, &args, items * count)?;
    }
    Ok(true)
}

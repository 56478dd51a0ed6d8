//! Pooling whose input is an image.

use super::{arg, batch, format, slice, transient, unless_full, wanted};
use crate::backend::opencl::geometry::{is_wide, launch_free};
use crate::backend::opencl::window::computing;
use crate::backend::problem::windows::{Task, Windows, four, words};
use crate::device::opencl::{Arg, Knob};
use crate::{Result, Tensor};

/// [`pool`](crate::backend::Backend::pool) for maxima and means; false where buffers are to be read. Batches are divided where images
/// would be too high.
pub(crate) fn pool(w: &Windows, task: Task, x: &Tensor, index: &Tensor, out: &Tensor) -> Result<bool> {
    let (name, divisor) = match task {
        Task::Max => ("MAX_OF_IMAGE", 0),
        Task::Mean(divisor) => ("MEAN_OF_IMAGE", divisor.code()),
        Task::MaxBackward | Task::MeanBackward(_) => return Ok(false),
    };
    let cl = match wanted(x, Knob::PoolingImages) {
        Some(cl) if format(x.dtype).is_some() && x.dtype == out.dtype && out.is_contiguous() => cl,
        _ => return Ok(false),
    };
    let ([n, c, ..], Some(most)) = (four(x), batch(cl, x)) else { return Ok(false) };
    let [rows, columns] = w.grid;
    let items = rows * columns * c.div_ceil(4);
    if is_wide([items * most]) {
        return Ok(false);
    }
    let kernel = computing(cl, name, out, w, (items * most, 1))?;
    for from in (0..n).step_by(most) {
        let count = most.min(n - from);
        let (x, out) = (slice(x, from, count)?, slice(out, from, count)?);
        // Means have no indices, but the kernel needs a buffer.
        let index = if task == Task::Max { slice(index, from, count)? } else { out.shallow_clone() };
        let Some(image) = unless_full(transient(cl, &x))? else { return Ok(false) };
        let words = words(w, &x, &[]);
        let (to, indices) = (out.device_view()?, index.device_view()?);
        let args = [
            arg(&image)?,
            to.buffer(),
            to.offset(),
            indices.buffer(),
            indices.offset(),
            Arg::Bytes(bytemuck::cast_slice(&words)),
            Arg::U64((items * count) as u64),
            Arg::I64(divisor),
        ];
        launch_free(cl, &kernel, &args, items * count)?;
    }
    Ok(true)
}

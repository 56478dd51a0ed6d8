//! Pooling of images.

use super::{Blocks, Tensor4, arg, format, limits, transient, unless_full, wanted};
use crate::backend::opencl::geometry::{LOCAL, group_of, is_wide};
use crate::backend::opencl::window::computing;
use crate::backend::problem::windows::{Task, Windows, four, words};
use crate::device::opencl::{Arg, Knob};
use crate::{Result, Tensor};

/// [`pool`](crate::backend::Backend::pool) for greatest elements and means; false where buffers are to be read. Batches beyond the
/// height of images are cut.
pub(crate) fn pool(w: &Windows, task: Task, x: &Tensor, index: &Tensor, out: &Tensor) -> Result<bool> {
    let (name, divisor) = match task {
        Task::Max => ("MAX_OF_IMAGE", 0),
        Task::Mean(divisor) => ("MEAN_OF_IMAGE", divisor.code()),
        Task::Unmax | Task::Unmean(_) => return Ok(false),
    };
    let cl = match wanted(x, Knob::PoolingImages) {
        Some(cl) if format(x.dtype).is_some() && x.dtype == out.dtype => cl,
        _ => return Ok(false),
    };
    let [n, c, h, width] = four(x);
    let most = limits(cl)[1].checked_div(h).unwrap_or(0).min(n);
    let Some(whole) = Tensor4::of(&x.layout).filter(|_| most > 0) else { return Ok(false) };
    let slice = Tensor4 { dims: [most, c, h, width], ..whole };
    let [rows, columns] = w.grid;
    let items = rows * columns * c.div_ceil(4);
    if !slice.fits(Blocks::Across, cl) || is_wide([items * most]) {
        return Ok(false);
    }
    let kernel = computing(cl, name, out.dtype, w, items * most)?;
    for from in (0..n).step_by(most) {
        let count = most.min(n - from);
        let part = |t: &Tensor| Ok(t.with_layout(t.layout.narrow("pool", 0, from, count)?));
        let (x, out) = (part(x)?, part(out)?);
        // Means have no indices; any buffer stands for them.
        let index = if task == Task::Max { part(index)? } else { out.shallow_clone() };
        let four = Tensor4 { dims: [count, c, h, width], ..whole };
        let Some(image) = unless_full(transient(cl, &x, &four))? else { return Ok(false) };
        let words = words(w, &x, &[]);
        let (to, place) = (out.device_view()?, index.device_view()?);
        let args = [
            arg(&image)?,
            to.buffer(),
            to.offset(),
            place.buffer(),
            place.offset(),
            Arg::Bytes(bytemuck::cast_slice(&words)),
            Arg::U64((items * count) as u64),
            Arg::I64(divisor),
        ];
        cl.launch(&kernel, &args, &[items * count], &[group_of(&kernel, LOCAL)])?;
    }
    Ok(true)
}

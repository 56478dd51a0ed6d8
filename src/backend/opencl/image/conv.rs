//! Convolutions whose input and filter are images.

use super::{Blocks, TEMPLATE, Tensor4, arg, batch, constant, format, slice, transient, unless_full, wanted};
use crate::backend::opencl::geometry::launch_free;
use crate::backend::opencl::kernels::{KernelKey, kernel};
use crate::backend::problem::windows::{Windows, four};
use crate::backend::written;
use crate::device::opencl::{Arg, ClDevice, Knob};
use crate::storage::Image;
use crate::{Result, Tensor};

/// Outputs of a row that a work-item computes: COLUMNS in the template.
const COLUMNS: usize = 4;

/// Whether convolutions of this tensor should read images.
pub(crate) fn convolves(x: &Tensor) -> bool {
    wanted(x, Knob::ConvolutionImages).is_some()
}

/// The convolution of `[n, c, h, w]` with a weight `[o, c / groups, kh, kw]`; `None` where buffers are to be read. It takes one group,
/// or depthwise convolutions with as many outputs as inputs. Batches are divided where images would be too high.
pub(crate) fn convolution(
    w: &Windows,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    groups: usize,
) -> Result<Option<Tensor>> {
    let ([n, c, ..], [o, each, kh, kw]) = (four(x), four(weight));
    let depthwise = groups > 1 && groups == c && o == c && each == 1;
    if (groups > 1 && !depthwise) || x.numel() == 0 || weight.numel() == 0 || format(x.dtype).is_none() {
        return Ok(None);
    }
    let Some(cl) = wanted(x, Knob::ConvolutionImages) else { return Ok(None) };
    let strides = weight.strides();
    let taps_are_one_dim = kh == 1 || kw == 1 || strides[2] == strides[3] * kw as isize;
    let step = if kw == 1 { strides[2] } else { strides[3] };
    let filter = Tensor4 { dims: [1, o, kh * kw, each], strides: [0, strides[0], step, strides[1]] };
    let Some(most) = batch(cl, x).filter(|_| taps_are_one_dim) else { return Ok(None) };
    let [rows, columns] = w.grid;
    let items = columns.div_ceil(COLUMNS) * rows * o.div_ceil(4);
    if !filter.fits(Blocks::Down, cl) || items * most >= 1 << 30 {
        return Ok(None);
    }
    let out = Tensor::empty_like_shape([n, o, rows, columns], x.dtype, x.device())?;
    let Some(filter) = unless_full(constant(cl, weight, &filter, Blocks::Down))? else { return Ok(None) };
    for from in (0..n).step_by(most) {
        let count = most.min(n - from);
        let (x, out) = (slice(x, from, count)?, slice(&out, from, count)?);
        let Some(image) = unless_full(transient(cl, &x))? else { return Ok(None) };
        let sizes = [count, c, o].into_iter();
        let pairs = [w.image, w.kernel, w.grid, w.stride, w.padding, w.dilation];
        let words: Vec<i32> = sizes.chain(pairs.into_iter().flatten()).map(|size| size as i32).collect();
        launch(cl, [&image, &filter], bias, &out, &words, depthwise, items * count)?;
    }
    Ok(Some(written(out)))
}

fn launch(
    cl: &'static ClDevice,
    [x, filter]: [&Image; 2],
    bias: Option<&Tensor>,
    out: &Tensor,
    words: &[i32],
    depthwise: bool,
    items: usize,
) -> Result<()> {
    let (name, dtype) = (if depthwise { "DEPTHWISE" } else { "CONVOLUTION" }, out.dtype);
    let kernel = kernel(cl, KernelKey::new(name, &[dtype as u64]), "image", || {
        format!("#define {name}\n#define A {dtype}\n{TEMPLATE}")
    })?;
    let bias_or_any = bias.unwrap_or(out).device_view()?; // the kernel needs a buffer, even if it does not read it
    let to = out.device_view()?;
    let args = [
        arg(x)?,
        arg(filter)?,
        bias_or_any.buffer(),
        bias_or_any.offset(),
        Arg::U32(bias.is_some().into()),
        Arg::I64(bias.map_or(0, |bias| bias.strides()[0]) as i64),
        to.buffer(),
        to.offset(),
        Arg::Bytes(bytemuck::cast_slice(words)),
    ];
    launch_free(cl, &kernel, &args, items)
}

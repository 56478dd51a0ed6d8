//! The interface between operations and devices.
//!
//! An operation checks its operands, allocates its results and describes the work as a problem (see [`problem`]). A [`Backend`] decides how to tile,
//! vectorise, cache and launch that problem. Apart from the modules of devices and storage, this is the only file that matches on the kind of a device.

/// Defines trait methods whose body is one function call.
macro_rules! methods {
    ($($name:ident($($arg:tt: $t:ty),*) -> $made:ty = $call:expr;)*) => { $(
        fn $name(&self, $($arg: $t),*) -> $made {
            $call
        }
    )* };
}

pub(crate) mod cpu;
pub(crate) mod opencl;
pub(crate) mod problem;
pub(crate) mod profiled;
#[cfg(test)]
mod reference;

use crate::backend::problem::*;
use crate::backend::profiled::{Profiled, describe};
use crate::device::profiler;
use crate::expr::program::Program;
use crate::storage::Image;
use crate::{DType, Device, Error, Result, Scalar, Shape, Tensor};

/// Computes problems on one kind of device. All tensors of a problem are on the same device, and the results are not empty. A method that returns
/// `Option` or `bool` may decline by returning `None` or false; the caller then computes the result with other methods.
pub(crate) trait Backend: Sync {
    /// Evaluates formulas elementwise over tensors of any strides, with broadcasting.
    fn map(&self, formulas: &Formulas) -> Result<()>;
    /// Fills the vector `out` with `start + i * step`. Returns false if the host must compute the elements instead.
    fn sequence(&self, values: Sequence, out: &Tensor) -> Result<bool>;
    /// Concatenates tensors along dim `d` of `out`. Returns false if separate copies of the tensors are as fast.
    fn join(&self, out: &Tensor, tensors: &[&Tensor], d: usize) -> Result<bool>;
    /// Copies a batch of matrices, with zeros where column - row is in `from..to` (`tril` and `triu`).
    fn tril_triu(&self, x: &Tensor, from: isize, to: isize) -> Result<Option<Tensor>>;

    /// Computes a matrix product with an epilogue; returns true if it also computed the row sums that [`Gemm::sums`] asks for.
    fn gemm(&self, product: &Gemm, outs: &[Tensor]) -> Result<bool>;
    fn reduce(&self, reduction: &Reduction) -> Result<()>;
    fn scan(&self, scan: &RunningReduction) -> Result<()>;

    fn sort(&self, sorting: &Sorting) -> Result<()>;
    fn searchsorted(&self, search: &Search) -> Result<()>;
    /// Returns None if a full sort is faster.
    fn topk(&self, first: TopK) -> Result<Option<Selected>>;
    /// Returns None if a full sort is faster.
    fn kth(&self, ranked: RankedElement) -> Result<Option<Selected>>;

    /// Copies the elements of the source that an index selects to `out`.
    fn gather(&self, g: &Indexed, out: &Tensor) -> Result<()>;
    /// Writes or combines elements at the positions of the target that an index selects.
    fn scatter(&self, scatter: &Scatter) -> Result<()>;
    fn linear_index(&self, term: &IndexTerm) -> Result<()>;
    /// Writes 1 at the class of each row and 0 elsewhere. The last dim of `out` has one element for each class. `op` is named in errors.
    fn one_hot(&self, op: &'static str, x: &Tensor, out: &Tensor) -> Result<()>;
    /// Returns the indices of the nonzero elements of x, for a tensor with the sizes `dims`. `mask` converts x to a contiguous bool tensor.
    fn nonzero(&self, x: &Tensor, mask: &dyn Fn() -> Result<Tensor>, dims: &[usize]) -> Result<Tensor>;
    /// Returns the elements of x where the mask, a tensor of the same shape, is true. Returns None to decline.
    fn masked_select(&self, x: &Tensor, mask: &Tensor) -> Result<Option<Tensor>>;

    /// Computes softmax, log-softmax, logsumexp or a gradient of these over the rows along one dim.
    fn softmax(&self, softmax: &Softmax) -> Result<()>;
    /// Returns the cross-entropy loss of logits and class labels, or partial losses that sum to it. Also writes the gradient of the logits if asked.
    fn cross_entropy(&self, entropy: &LabelEntropy) -> Result<Tensor>;
    /// Normalises rows in the forward pass, or computes the gradients in the backward pass.
    fn norm(&self, rows: &Normalisation) -> Result<()>;
    fn norm_forward(&self, norm: &NormForward) -> Result<()>;
    /// Allocates the partial sums of the gradients of weight and bias, for rows of n elements. None if the device does not compute these sums.
    fn alloc_column_sums(&self, x: &Tensor, rows: usize, n: usize) -> Result<Option<Tensor>>;
    /// Computes `(x - mean) * scale + shift`, with one mean, scale and shift per channel. Returns None to decline.
    fn normalise_channels(&self, x: &Tensor, numbers: Channels, eps: f64) -> Result<Option<Tensor>>;
    /// True if [`variance`](Self::variance) may be called on this device.
    fn has_variance(&self) -> bool;
    fn variance(&self, variance: &Variance) -> Result<bool>;

    /// Returns an algorithm for a convolution and its gradients without an im2col matrix, or None if im2col and a product are faster.
    fn convolution(&self, conv: &Conv2d) -> Option<Box<dyn Convolution>>;
    /// Computes the forward pass in one launch; None if im2col and a product are faster. The gradients still use im2col and products.
    fn forward_convolution(&self, conv: &Conv2d) -> Result<Option<Tensor>>;
    /// Copies a tensor to an image object. None if the device does not support images, or no image of this size and format.
    fn to_image(&self, x: &Tensor) -> Result<Option<Image>>;
    /// Copies the elements of an image object to a tensor.
    fn read_image(&self, image: &Image, out: &Tensor) -> Result<()>;
    fn im2col(&self, im2col: &Im2col) -> Result<()>;
    /// Col2im: adds each element of `columns` to the image element from which im2col would have copied it.
    fn col2im(&self, windows: &Windows, columns: &Tensor, out: &Tensor) -> Result<()>;
    fn pool(&self, pooling: &Pooling) -> Result<()>;
    fn interpolate(&self, problem: &Interpolate) -> Result<()>;

    /// True if [`attention`](Self::attention) and its gradients can be computed without storing the scores in memory.
    fn has_attention(&self, a: &FusedAttention) -> Result<bool>;
    /// Computes the result and the log-sum-exp of each row of scores (see [`AttentionBackward`]). Requires [`has_attention`](Self::has_attention).
    fn attention(&self, a: &FusedAttention, out: &Tensor, logsumexp: &Tensor) -> Result<()>;
    fn attention_backward(&self, a: &FusedAttention, of: &AttentionBackward) -> Result<()>;
    /// Returns the block sizes for the scores of attention. `memory` is the device's memory in bytes; `cheap` is true if blocks take no extra time.
    fn attention_blocking(&self, memory: usize, cheap: bool) -> Blocking;
}

/// Returns the backend of a device. While a profiler is on, the backend is wrapped in [`Profiled`].
#[inline(always)]
pub(crate) fn of_device(device: Device) -> &'static dyn Backend {
    match device {
        _ if profiler::is_on() => profiled_backend(device),
        Device::Cpu => &cpu::Cpu,
        Device::OpenCL(_) => &opencl::OpenCl,
    }
}

#[cold]
fn profiled_backend(device: Device) -> &'static dyn Backend {
    match device {
        Device::Cpu => &Profiled(&cpu::Cpu),
        Device::OpenCL(_) => &Profiled(&opencl::OpenCl),
    }
}

/// Calls `f` with the backend of the outputs' device, then increments the version counters of the outputs.
pub(crate) fn launch<'t, R>(
    outputs: impl IntoIterator<Item = &'t Tensor, IntoIter: Clone>,
    f: impl FnOnce(&dyn Backend) -> Result<R>,
) -> Result<R> {
    let outputs = outputs.into_iter();
    let launched = f(backend_of_outputs(outputs.clone()));
    // If a kernel detects a division by zero, or a launch fails partway, the outputs have already been written to.
    if matches!(launched, Ok(_) | Err(Error::DivisionByZero { .. } | Error::Partial { .. })) {
        outputs.for_each(|t| t.storage.bump_version());
    }
    launched
}

/// Like [`launch`], for new `outputs`. Autograd cannot have saved new tensors, so their version counters stay unchanged.
#[inline]
pub(crate) fn fill<'t, R>(
    outputs: impl IntoIterator<Item = &'t Tensor, IntoIter: Clone>,
    f: impl FnOnce(&dyn Backend) -> Result<R>,
) -> Result<R> {
    let outputs = outputs.into_iter();
    let filled = f(backend_of_outputs(outputs.clone()))?;
    outputs.for_each(|t| t.storage.mark_filled());
    Ok(filled)
}

/// Allocates a tensor and calls `f` to fill it. `f` is not called if the tensor is empty.
pub(crate) fn compute(
    shape: impl Into<Shape>,
    dtype: DType,
    device: Device,
    f: impl FnOnce(&dyn Backend, &Tensor) -> Result<()>,
) -> Result<Tensor> {
    let out = Tensor::empty_with_shape(shape, dtype, device)?;
    if out.numel() > 0 {
        fill([&out], |b| f(b, &out))?;
    }
    Ok(out)
}

/// Like [`fill`], for a backend method that allocates the outputs itself, or returns None to decline.
pub(crate) fn fill_or_decline(
    x: &Tensor,
    f: impl FnOnce(&dyn Backend) -> Result<Option<Selected>>,
) -> Result<Option<Selected>> {
    let chosen = f(of_device(x.device()))?;
    let outputs = chosen.iter().flat_map(|c| c.values.iter().chain([&c.indices]));
    outputs.for_each(|t| t.storage.mark_filled());
    Ok(chosen)
}

#[inline]
fn backend_of_outputs<'t>(mut outputs: impl Iterator<Item = &'t Tensor>) -> &'static dyn Backend {
    let device = outputs.next().expect("a launch has an output").device();
    debug_assert!(outputs.all(|t| t.device() == device), "the outputs of a launch are on one device");
    of_device(device)
}

/// Increments the version counter of a tensor that a kernel has just written, and returns the tensor.
pub(crate) fn mark_written(made: Tensor) -> Tensor {
    made.storage.bump_version();
    made
}

/// Returns a closure that computes one primitive into a new result, or None if the device has no fast path for it. All operands
/// must have the dtype, shape and strides of the result.
#[inline]
pub(crate) fn primitive_fast_path<'a>(
    op: &'static str,
    inputs: &'a [&'a Tensor],
    scalars: &'a [Scalar],
    program: &'a Program,
    dtype: DType,
) -> Option<impl FnOnce(&Tensor) -> Result<()> + 'a> {
    match inputs.first()?.device() {
        Device::Cpu => {
            let primitive = cpu::fast_path::SmallPrimitive::try_new(inputs, scalars, program, dtype)?;
            Some(move |out: &Tensor| {
                let _recorded = profiler::operation(|| describe(op, inputs.iter().copied().chain([out])));
                cpu::counted(primitive.fill(out))
            })
        }
        Device::OpenCL(_) => None,
    }
}

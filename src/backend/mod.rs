//! The interface between operations and devices.
//!
//! An operation checks its operands, allocates its results and describes the work as a problem (see [`problem`]). A [`Backend`] decides how to
//! tile, vectorise, cache and launch that problem. Apart from the modules of devices and storage, only this file matches on a device's kind.

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

use crate::backend::problem::{
    AttentionBackward, Blocking, Channels, Combine, Convolution, Formulas, FusedAttention, Gemm, Indexed, LabelEntropy,
    NormViews, Normalisation, PoolTask, RankQuery, Recorder, Reduction, Resize, Scan, Selected, Sequence, Softmax,
    Tuning, Windows,
};
use crate::backend::profiled::{Profiled, describe};
use crate::device::profiler;
use crate::expr::program::Program;
use crate::layout::Layout;
use crate::storage::Image;
use crate::{DType, Device, Error, Result, Scalar, Shape, Tensor};

/// Computes problems on one kind of device. All tensors of a problem are on the same device, and its results are not empty.
/// A method that returns `Option` or `bool` may decline; the caller then composes the result from other methods.
pub(crate) trait Backend: Sync {
    /// Evaluates formulas elementwise over tensors of any strides, with broadcasting.
    fn map(&self, formulas: &Formulas) -> Result<()>;
    /// Fills the vector `out` with `start + i * step`; returns false if the host has to compute the elements.
    fn sequence(&self, _values: Sequence, _out: &Tensor) -> Result<bool> {
        Ok(false)
    }
    /// Concatenates tensors along dim `d` of `out`; returns false if copying tensor by tensor is as fast.
    fn join(&self, _out: &Tensor, _tensors: &[&Tensor], _d: usize) -> Result<bool> {
        Ok(false)
    }
    /// Copies a batch of matrices, with zeros where column - row is in `from..to` (`tril` and `triu`).
    fn tril_triu(&self, _x: &Tensor, _from: isize, _to: isize) -> Result<Option<Tensor>> {
        Ok(None)
    }

    /// Computes a matrix product with an epilogue; returns true if it also computed the row sums that [`Gemm::sums`] asks for.
    fn gemm(&self, product: &Gemm, shape: &Shape, outs: &[Tensor]) -> Result<bool>;
    /// Reduces any dims.
    fn reduce(&self, reduction: &Reduction) -> Result<()>;
    /// Computes a running reduction along dim `d`; `indices` receives the indices of running maxima or minima.
    fn scan(&self, scan: Scan, x: &Tensor, d: usize, values: &Tensor, indices: Option<&Tensor>) -> Result<()>;

    /// Sorts stably along dim `d`; `indices` receives each element's index before the sort.
    fn sort(&self, x: &Tensor, d: usize, descending: bool, values: &Tensor, indices: &Tensor) -> Result<()>;
    /// Finds the insertion index of each value of `v` in lines sorted along their last dim, whose elements are `step` apart.
    /// If `out` is bool, stores whether the line contains the value instead.
    fn searchsorted(
        &self,
        x: &Tensor,
        lines: &Layout,
        step: isize,
        v: &Tensor,
        right: bool,
        out: &Tensor,
    ) -> Result<()>;
    /// Returns the first `k` elements along dim `d` in sorted order; None if a full sort is the better method.
    fn topk(&self, x: &Tensor, d: usize, k: usize, descending: bool) -> Result<Option<Selected>>;
    /// Returns the element of one rank from each line along dim `d`; None if a full sort is the better method.
    fn kth(&self, x: &Tensor, d: usize, nth: RankQuery<'_>) -> Result<Option<Selected>>;

    /// Reads elements through an index.
    fn gather(&self, g: &Indexed, out: &Tensor) -> Result<()>;
    /// Writes elements through an index into `target`, which is viewed with `layout` and indexed along dim `d`.
    fn scatter(&self, g: &Indexed, combine: Combine, target: &Tensor, layout: &Layout, d: usize) -> Result<()>;
    /// Adds `index * step` to the linear indices in `out`, for an axis `(size, step)`. With a `base`, overwrites them with `base + index * step`.
    fn linear_index(
        &self,
        op: &'static str,
        index: &Tensor,
        out: &Tensor,
        axis: (usize, isize),
        base: Option<i64>,
    ) -> Result<()>;
    /// Writes 1 at each row's class and 0 elsewhere.
    fn one_hot(&self, op: &'static str, x: &Tensor, out: &Tensor, classes: usize) -> Result<()>;
    /// Returns the indices of nonzero elements of x, in a tensor with the sizes `dims`. `mask` converts x to a contiguous bool tensor.
    fn nonzero(&self, x: &Tensor, mask: &dyn Fn() -> Result<Tensor>, dims: &[usize]) -> Result<Tensor>;
    /// Returns the elements of x at which the mask, a tensor of the same shape, is true.
    fn masked_select(&self, _x: &Tensor, _mask: &Tensor) -> Result<Option<Tensor>> {
        Ok(None)
    }

    /// Computes softmax, log-softmax, logsumexp or a gradient over rows along a dim.
    fn softmax(&self, softmax: &Softmax) -> Result<()>;
    /// Returns the cross-entropy loss of logits and class labels, or partial losses that sum to it, and writes the gradient of the logits if asked.
    fn cross_entropy(&self, entropy: &LabelEntropy) -> Result<Tensor>;
    /// Normalises rows, forward or backward.
    fn norm(&self, rows: &Normalisation) -> Result<()>;
    /// Like [`norm`](Self::norm), for tensors not yet viewed as rows. `numbers` is the launch-cache key; `views` builds the row views on demand.
    fn norm_forward(
        &self,
        given: &Normalisation,
        _numbers: &[u64; 4],
        views: &dyn Fn() -> Result<NormViews>,
    ) -> Result<()> {
        self.norm(&given.with_views(&views()?))
    }
    /// Allocates the partial sums of the weight's and bias's gradients, for rows of n elements; None if the device does not accumulate them.
    fn alloc_column_sums(&self, x: &Tensor, rows: usize, n: usize) -> Result<Option<Tensor>>;
    /// Computes `(x - mean) * scale + shift`, with one mean, scale and shift a channel.
    fn normalise_channels(&self, _x: &Tensor, _numbers: Channels, _eps: f64) -> Result<Option<Tensor>> {
        Ok(None)
    }
    /// True if [`variance`](Self::variance) may be called.
    fn has_variance(&self) -> bool {
        false
    }
    /// Computes the variance of each row of a 4-D tensor, or its square root; returns false if the caller has to compose it.
    fn variance(&self, _rows: &Tensor, _out: &Tensor, _freedom: f64, _root: bool) -> Result<bool> {
        Ok(false)
    }

    /// Returns a convolution, forward and gradients, that needs no im2col matrix; None if im2col and a product are faster.
    /// `single` is true if the im2col matrix is the image itself.
    fn convolution(
        &self,
        _windows: Windows,
        _x: &Tensor,
        _weight: &Tensor,
        _groups: usize,
        _single: bool,
    ) -> Option<Box<dyn Convolution>> {
        None
    }
    /// Computes the forward pass in one launch where that is faster than im2col and a product. The gradients still use products.
    fn forward_convolution(
        &self,
        _windows: &Windows,
        _x: &Tensor,
        _weight: &Tensor,
        _bias: Option<&Tensor>,
        _groups: usize,
    ) -> Result<Option<Tensor>> {
        Ok(None)
    }
    /// Copies a tensor into an image object; None if the device has no images, or none of this size and format.
    fn to_image(&self, _x: &Tensor) -> Result<Option<Image>> {
        Ok(None)
    }
    /// Fills a tensor from its image object.
    fn read_image(&self, image: &Image, _out: &Tensor) -> Result<()> {
        Err(Error::invalid("from_image", format!("{image:?} belongs to another device")))
    }
    /// Gathers the elements of each window into columns: im2col.
    fn im2col(&self, windows: &Windows, x: &Tensor, out: &Tensor, inside: bool) -> Result<()>;
    /// Adds the elements of columns to the image elements that they were gathered from: col2im.
    fn col2im(&self, windows: &Windows, columns: &Tensor, out: &Tensor) -> Result<()>;
    /// Computes pooling over windows, or its gradient.
    fn pool(&self, windows: &Windows, task: PoolTask, x: &Tensor, index: &Tensor, out: &Tensor) -> Result<()>;
    /// Resizes images; if `transposed`, applies the transposed linear map, which is the gradient.
    fn interpolate(&self, resize: &Resize, x: &Tensor, out: &Tensor, transposed: bool) -> Result<()>;
    /// True if [`attention`](Self::attention) and its gradients can be computed without storing the scores in memory.
    fn has_attention(&self, _a: &FusedAttention) -> Result<bool> {
        Ok(false)
    }
    /// Computes the result and the log-sum-exp of each row of scores (see [`AttentionBackward`]). Requires [`has_attention`](Self::has_attention).
    fn attention(&self, a: &FusedAttention, _out: &Tensor, _logsumexp: &Tensor) -> Result<()> {
        Err(Error::invalid("scaled_dot_product_attention", format!("{} has no fused attention kernel", a.q.device())))
    }
    /// Computes the gradients of queries, keys and values, each with the shape of its operand.
    fn attention_backward(&self, a: &FusedAttention, _of: &AttentionBackward, _results: [&Tensor; 3]) -> Result<()> {
        Err(Error::invalid("scaled_dot_product_attention", format!("{} has no fused attention kernel", a.q.device())))
    }
    /// Returns the block sizes for attention's scores; `cheap` is true if blocks also save work.
    fn attention_blocking(&self, memory: usize, cheap: bool) -> Blocking;

    /// Starts to record the commands that this thread submits to the device, instead of running them.
    fn record(&self, _device: Device) -> Result<Box<dyn Recorder>> {
        let reason = "the CPU runs work immediately and has no queue to record: call the closure directly";
        Err(Error::invalid("Graph::capture", reason))
    }
    /// Returns the tuning parameters of the device's kernels.
    fn tuning(&self, _device: Device) -> Result<Box<dyn Tuning>> {
        Err(Error::invalid("tune", "the CPU's loops have no parameters: name an OpenCL device"))
    }
}

/// Returns the backend of a device, wrapped in [`Profiled`] while a profiler is on.
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

/// Calls `f` with the backend of the outputs' device, and increments the outputs' version counters.
pub(crate) fn launch<'t, R>(
    outputs: impl IntoIterator<Item = &'t Tensor, IntoIter: Clone>,
    f: impl FnOnce(&dyn Backend) -> Result<R>,
) -> Result<R> {
    let outputs = outputs.into_iter();
    let launched = f(backend_of_outputs(outputs.clone()));
    // A kernel that detects a division by zero, and a launch that fails partway, have already written to the outputs.
    if matches!(launched, Ok(_) | Err(Error::DivisionByZero { .. } | Error::Partial { .. })) {
        outputs.for_each(|t| t.storage.bump_version());
    }
    launched
}

/// Like [`launch`], for new `outputs`: autograd cannot have saved them yet, so their version counters stay unchanged.
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

/// Allocates a tensor and calls `f` to fill it, unless it is empty.
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

/// Like [`fill`], for a backend method that allocates the outputs itself or declines.
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

/// Returns a closure that computes one primitive into a new result, if the device has a fast path for it.
/// Requires that all operands have the result's dtype, shape and strides.
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

//! How operations are computed.
//!
//! An operation checks its operands, makes its results and describes the work as a problem ([`problem`]). A [`Backend`]
//! decides how the problem is tiled, vectorised, cached and launched. This file is the only place that chooses by the kind
//! of a device.

/// Methods that call one function each.
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
    Normalisation, Nth, Recorder, Reduction, Resize, Scan, Selected, Sequence, Softmax, Task, Tuning, Views, Windows,
};
use crate::backend::profiled::{Profiled, describe};
use crate::device::profiler;
use crate::expr::program::Program;
use crate::layout::Layout;
use crate::storage::Image;
use crate::{DType, Device, Error, Result, Scalar, Shape, Tensor};

/// A way to compute on a kind of device. Tensors of a problem are on one device, and results have elements.
///
/// Methods that return `Option` or `bool` may decline: the operation is then composed of others.
pub(crate) trait Backend: Sync {
    /// Formulas over tensors, broadcast and strided.
    fn map(&self, formulas: &Formulas) -> Result<()>;
    /// `start + i * step` as element i of a vector; false where the host has to compute it.
    fn sequence(&self, _values: Sequence, _out: &Tensor) -> Result<bool> {
        Ok(false)
    }
    /// Tensors one after another along dim `d` of `out`; false where copies one by one are as good.
    fn join(&self, _out: &Tensor, _tensors: &[&Tensor], _d: usize) -> Result<bool> {
        Ok(false)
    }
    /// A copy of matrices with zeros where column - row is in `from..to`.
    fn zeroed(&self, _x: &Tensor, _from: isize, _to: isize) -> Result<Option<Tensor>> {
        Ok(None)
    }

    /// A matrix product with an epilogue; whether the sums of rows that it may ask for were made as well.
    fn gemm(&self, product: &Gemm, shape: &Shape, outs: &[Tensor]) -> Result<bool>;
    /// A reduction over any dims.
    fn reduce(&self, reduction: &Reduction) -> Result<()>;
    /// A running reduction along dim `d`, with the indices of extremes.
    fn scan(&self, scan: Scan, x: &Tensor, d: usize, values: &Tensor, indices: Option<&Tensor>) -> Result<()>;

    /// Stable sort along dim `d`, with the indices of the sorted elements.
    fn sort(&self, x: &Tensor, d: usize, descending: bool, values: &Tensor, indices: &Tensor) -> Result<()>;
    /// Where the values `v` would be inserted into lines sorted along their last dim, whose steps are `step`; in a bool `out`, whether
    /// they are in their lines.
    fn search(&self, x: &Tensor, lines: &Layout, step: isize, v: &Tensor, right: bool, out: &Tensor) -> Result<()>;
    /// The first `k` elements along dim `d` in sorted order; None where sorting is the way.
    fn first(&self, x: &Tensor, d: usize, k: usize, descending: bool) -> Result<Option<Selected>>;
    /// The element of one rank of each line along dim `d`; None where sorting is the way.
    fn nth(&self, x: &Tensor, d: usize, nth: Nth<'_>) -> Result<Option<Selected>>;

    /// Reads elements through an index.
    fn gather(&self, g: &Indexed, out: &Tensor) -> Result<()>;
    /// Writes elements through an index into `target`, which is read as `layout` says and indexed along dim `d`.
    fn scatter(&self, g: &Indexed, combine: Combine, target: &Tensor, layout: &Layout, d: usize) -> Result<()>;
    /// Adds `index * step` of an axis `(size, step)` to linear indices, or writes it with `base` added.
    fn linear_index(
        &self,
        op: &'static str,
        index: &Tensor,
        out: &Tensor,
        axis: (usize, isize),
        base: Option<i64>,
    ) -> Result<()>;
    /// Ones at the classes and zeros elsewhere.
    fn one_hot(&self, op: &'static str, x: &Tensor, out: &Tensor, classes: usize) -> Result<()>;
    /// The indices of elements that are not zero, as of a tensor of sizes `dims`. `mask` makes a contiguous bool tensor of x.
    fn nonzero(&self, x: &Tensor, mask: &dyn Fn() -> Result<Tensor>, dims: &[usize]) -> Result<Tensor>;
    /// The elements of x where the mask, of its shape, is true.
    fn masked_select(&self, _x: &Tensor, _mask: &Tensor) -> Result<Option<Tensor>> {
        Ok(None)
    }

    /// Softmax and its kin over rows along a dim.
    fn softmax(&self, softmax: &Softmax) -> Result<()>;
    /// The loss of logits and class labels, or parts of it that add up to it, and the gradient of the logits where wanted.
    fn cross_entropy(&self, entropy: &LabelEntropy) -> Result<Tensor>;
    /// Normalises rows, forward or backward.
    fn norm(&self, rows: &Normalisation) -> Result<()>;
    /// Forward of tensors as they are given, whose `views` are rows. Tensors like these and the same `numbers` make the same launch.
    fn norm_forward(
        &self,
        given: &Normalisation,
        _numbers: &[u64; 4],
        views: &dyn Fn() -> Result<Views>,
    ) -> Result<()> {
        self.norm(&given.of(&views()?))
    }
    /// Where the gradients of weight and bias of rows of n elements are added up in parts; None where they are not.
    fn norm_columns(&self, x: &Tensor, rows: usize, n: usize) -> Result<Option<Tensor>>;
    /// `(x - mean) * scale + shift` of each channel.
    fn normalise_channels(&self, _x: &Tensor, _numbers: Channels, _eps: f64) -> Result<Option<Tensor>> {
        Ok(None)
    }
    /// Whether variances of rows may be asked for: see [`variance`](Self::variance).
    fn has_variance(&self) -> bool {
        false
    }
    /// The variances of rows of four dims, or their roots; false where they have to be composed.
    fn variance(&self, _rows: &Tensor, _out: &Tensor, _freedom: f64, _root: bool) -> Result<bool> {
        Ok(false)
    }

    /// A convolution without columns, forward and each gradient; None where it is a product of columns.
    /// `single` says that images are their own columns.
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
    /// A convolution's forward pass in one launch where that is better than a product of columns, which its gradients are.
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
    /// A tensor as an image; None where the device has none, or none like that.
    fn to_image(&self, _x: &Tensor) -> Result<Option<Image>> {
        Ok(None)
    }
    /// Fills a tensor from its image.
    fn read_image(&self, image: &Image, _out: &Tensor) -> Result<()> {
        Err(Error::invalid("from_image", format!("{image:?} is of another device")))
    }
    /// The elements of each window: im2col.
    fn unfold(&self, windows: &Windows, x: &Tensor, out: &Tensor, inside: bool) -> Result<()>;
    /// Columns added up where they come from: col2im.
    fn fold(&self, windows: &Windows, columns: &Tensor, out: &Tensor) -> Result<()>;
    /// Pooling of windows and its gradients.
    fn pool(&self, windows: &Windows, task: Task, x: &Tensor, index: &Tensor, out: &Tensor) -> Result<()>;
    /// Images of other sizes, or the transpose of that.
    fn interpolate(&self, resize: &Resize, x: &Tensor, out: &Tensor, transposed: bool) -> Result<()>;
    /// Whether [`attention`](Self::attention) like this one, and its gradients, are computed without scores in memory.
    fn has_attention(&self, _a: &FusedAttention) -> Result<bool> {
        Ok(false)
    }
    /// The result, and the log-sum-exp of each row of scores: see [`AttentionBackward`]. For what [`has_attention`](Self::has_attention).
    fn attention(&self, a: &FusedAttention, _out: &Tensor, _logsumexp: &Tensor) -> Result<()> {
        Err(Error::invalid("scaled_dot_product_attention", format!("{} computes it of products", a.q.device())))
    }
    /// The gradients of queries, keys and values, each of the shape of its operand.
    fn attention_backward(&self, a: &FusedAttention, _of: &AttentionBackward, _results: [&Tensor; 3]) -> Result<()> {
        Err(Error::invalid("scaled_dot_product_attention", format!("{} computes it of products", a.q.device())))
    }
    /// How large the blocks of attention's scores are; `cheap` where blocks save work.
    fn blocking(&self, memory: usize, cheap: bool) -> Blocking;

    /// Has what this thread submits to the device recorded and not run, where there is a queue.
    fn record(&self, _device: Device) -> Result<Box<dyn Recorder>> {
        let reason = "the CPU does its work at once, there is no queue to record: call the closure itself";
        Err(Error::invalid("Graph::capture", reason))
    }
    /// The parameters of the device's kernels, where they have any.
    fn tuning(&self, _device: Device) -> Result<Box<dyn Tuning>> {
        Err(Error::invalid("tune", "the CPU's loops have no parameters: name an OpenCL device"))
    }
}

/// The backend of a device.
#[inline(always)]
pub(crate) fn of(device: Device) -> &'static dyn Backend {
    match device {
        _ if profiler::is_on() => profiled(device),
        Device::Cpu => &cpu::Cpu,
        Device::OpenCL(_) => &opencl::OpenCl,
    }
}

#[cold]
fn profiled(device: Device) -> &'static dyn Backend {
    match device {
        Device::Cpu => &Profiled(&cpu::Cpu),
        Device::OpenCL(_) => &Profiled(&opencl::OpenCl),
    }
}

/// Runs `f` with the backend of the device that `outputs` are on, and moves their version counters.
pub(crate) fn launch<'t, R>(
    outputs: impl IntoIterator<Item = &'t Tensor, IntoIter: Clone>,
    f: impl FnOnce(&dyn Backend) -> Result<R>,
) -> Result<R> {
    let outputs = outputs.into_iter();
    let launched = f(of_outputs(outputs.clone()));
    // A kernel that finds a division by zero has written all the same, and so has what failed after a part of it.
    if matches!(launched, Ok(_) | Err(Error::DivisionByZero { .. } | Error::Partial { .. })) {
        outputs.for_each(|t| t.storage.bump_version());
    }
    launched
}

/// [`launch`] for `outputs` that nobody has seen yet, whose version counters need not move.
#[inline]
pub(crate) fn fill<'t, R>(
    outputs: impl IntoIterator<Item = &'t Tensor, IntoIter: Clone>,
    f: impl FnOnce(&dyn Backend) -> Result<R>,
) -> Result<R> {
    let outputs = outputs.into_iter();
    let filled = f(of_outputs(outputs.clone()))?;
    outputs.for_each(|t| t.storage.filled());
    Ok(filled)
}

/// A new tensor that `f` fills. Nothing is launched where it has no elements.
pub(crate) fn compute(
    shape: impl Into<Shape>,
    dtype: DType,
    device: Device,
    f: impl FnOnce(&dyn Backend, &Tensor) -> Result<()>,
) -> Result<Tensor> {
    let out = Tensor::empty_like_shape(shape, dtype, device)?;
    if out.numel() > 0 {
        fill([&out], |b| f(b, &out))?;
    }
    Ok(out)
}

/// [`fill`] where the backend makes the outputs itself, or declines.
pub(crate) fn choose(x: &Tensor, f: impl FnOnce(&dyn Backend) -> Result<Option<Selected>>) -> Result<Option<Selected>> {
    let chosen = f(of(x.device()))?;
    let outputs = chosen.iter().flat_map(|c| c.values.iter().chain([&c.indices]));
    outputs.for_each(|t| t.storage.filled());
    Ok(chosen)
}

#[inline]
fn of_outputs<'t>(mut outputs: impl Iterator<Item = &'t Tensor>) -> &'static dyn Backend {
    let device = outputs.next().expect("a launch has an output").device();
    debug_assert!(outputs.all(|t| t.device() == device), "the outputs of a launch are on one device");
    of(device)
}

/// A tensor that a kernel has just written, its version counter moved.
pub(crate) fn written(made: Tensor) -> Tensor {
    made.storage.bump_version();
    made
}

/// How to fill a new result with a primitive of operands that have its dtype, shape and strides, where the device has a short way.
#[inline]
pub(crate) fn primitive<'a>(
    op: &'static str,
    inputs: &'a [&'a Tensor],
    scalars: &'a [Scalar],
    program: &'a Program,
    dtype: DType,
) -> Option<impl FnOnce(&Tensor) -> Result<()> + 'a> {
    match inputs.first()?.device() {
        Device::Cpu => {
            let primitive = cpu::flat::Primitive::of(inputs, scalars, program, dtype)?;
            Some(move |out: &Tensor| {
                let _recorded = profiler::operation(|| describe(op, inputs.iter().copied().chain([out])));
                cpu::counted(primitive.fill(out))
            })
        }
        Device::OpenCL(_) => None,
    }
}

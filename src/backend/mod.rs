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
use crate::backend::profiled::*;
use crate::device::profiler::{OperationSpan, operation};
use crate::expr::program::Program;
use crate::storage::Image;
use crate::{DType, Device, Error, Result, Scalar, Shape, Tensor};

/// Defines [`Backend`], and the same methods of [`Recorded`], which record the operation that follows `=` or `=>`. After `=>` the backend may
/// decline; a declined call is not recorded.
macro_rules! recorded_backend {
    ($($(#[$doc:meta])* fn $name:ident(&self $(, $arg:ident: $t:ty)*) -> $made:ty $(= $op:expr)? $(=> $may_decline:expr)?;)*) => {
        /// Computes problems on one kind of device. All tensors of a problem are on the same device, and the results are not empty. A method
        /// that returns `Option` or `bool` may decline by returning `None` or false; the caller then computes the result with other methods.
        pub(crate) trait Backend: Sync {
            $($(#[$doc])* fn $name(&self $(, $arg: $t)*) -> $made;)*
        }

        impl Recorded {
            $(#[inline]
            pub(crate) fn $name(self $(, $arg: $t)*) -> $made {
                recorded!(self.0.$name($($arg),*) $(, = $op)? $(, => $may_decline)?)
            })*
        }
    };
}

/// Evaluates a call of a backend, and records the operation that follows.
macro_rules! recorded {
    ($call:expr) => {
        $call
    };
    ($call:expr, = $operation:expr) => {{
        let _recorded = operation(|| $operation);
        $call
    }};
    ($call:expr, => $operation:expr) => {
        forget_if_declined(operation(|| $operation), $call)
    };
}

/// The backend of a device, as operations call it: while a profiler is on, calls are recorded.
#[derive(Clone, Copy)]
pub(crate) struct Recorded(&'static dyn Backend);

recorded_backend! {
    /// Evaluates formulas elementwise over tensors of any strides, with broadcasting.
    fn map(&self, formulas: &Formulas) -> Result<()> = describe(formulas.op, formulas.inputs.iter().chain(formulas.outputs).copied());
    /// Fills the vector `out` with `start + i * step`. Returns false if the host must compute the elements instead.
    fn sequence(&self, values: Sequence, out: &Tensor) -> Result<bool> => describe("arange", [out]);
    /// Concatenates tensors along dim `d` of `out`. Returns false if separate copies of the tensors are as fast.
    fn join(&self, out: &Tensor, tensors: &[&Tensor], d: usize) -> Result<bool> => describe("cat", tensors.iter().copied().chain([out]));
    /// Copies a batch of matrices, with zeros where column - row is in `from..to` (`tril` and `triu`).
    fn tril_triu(&self, x: &Tensor, from: isize, to: isize) -> Result<Option<Tensor>> => describe("tril", [x, x]);

    /// Computes a matrix product with an epilogue; returns true if it also computed the row sums that [`Gemm::sums`] asks for.
    fn gemm(&self, product: &Gemm, outs: &[Tensor]) -> Result<bool> = describe_gemm(product, outs);
    /// Computes a product with a quantised weight. Returns false if the weight is to be dequantised in strips instead, as for many rows.
    fn quantized_gemm(&self, product: &QuantizedGemm, outs: &[Tensor]) -> Result<bool> => describe_quantized_gemm(product, outs);
    /// Writes elements of a quantised weight to `out`, a contiguous matrix of f32, f16 or bf16.
    fn dequantize(&self, d: &Dequantize, out: &Tensor) -> Result<()> = describe_dequantize(d, out);
    fn reduce(&self, reduction: &Reduction) -> Result<()> = describe(reduction.op, [reduction.x, reduction.out]);
    fn scan(&self, s: &RunningReduction) -> Result<()> = describe_scan(s);

    fn sort(&self, s: &Sorting) -> Result<()> = describe("sort", [s.x, s.values, s.indices]);
    fn searchsorted(&self, s: &Search) -> Result<()> = describe("searchsorted", [s.sorted, s.values, s.out]);
    /// Returns None if a full sort is faster.
    fn topk(&self, first: TopK) -> Result<Option<Selected>> => describe("topk", [first.x]);
    /// Returns None if a full sort is faster.
    fn kth(&self, ranked: RankedElement) -> Result<Option<Selected>> => describe("kthvalue", [ranked.x]);

    /// Copies the elements of the source that an index selects to `out`.
    fn gather(&self, g: &Indexed, out: &Tensor) -> Result<()> = describe_gather(g, out);
    /// Writes or combines elements at the positions of the target that an index selects.
    fn scatter(&self, s: &Scatter) -> Result<()> = describe(s.moved.op, [s.moved.x, s.moved.index, s.target]);
    fn linear_index(&self, t: &IndexTerm) -> Result<()> = describe(t.op, [t.index, t.out]);
    /// Writes 1 at the class of each row and 0 elsewhere. The last dim of `out` has one element for each class. `op` is named in errors.
    fn one_hot(&self, op: &'static str, x: &Tensor, out: &Tensor) -> Result<()> = describe(op, [x, out]);
    /// Returns the indices of the nonzero elements of x, for a tensor with the sizes `dims`. `mask` converts x to a contiguous bool tensor.
    fn nonzero(&self, x: &Tensor, mask: &dyn Fn() -> Result<Tensor>, dims: &[usize]) -> Result<Tensor> = describe("nonzero", [x]);
    /// Returns the elements of x where the mask, a tensor of the same shape, is true. Returns None to decline.
    fn masked_select(&self, x: &Tensor, mask: &Tensor) -> Result<Option<Tensor>> => describe("masked_select", [x, mask]);

    /// Computes softmax, log-softmax, logsumexp or a gradient of these over the rows along one dim.
    fn softmax(&self, softmax: &Softmax) -> Result<()> = describe_softmax(softmax);
    /// Returns the cross-entropy loss of logits and class labels, or partial losses that sum to it. Also writes the gradient of the logits if asked.
    fn cross_entropy(&self, entropy: &LabelEntropy) -> Result<Tensor> =
        describe("cross_entropy", [entropy.logits, entropy.labels].into_iter().chain(entropy.grad));
    /// Normalises rows in the forward pass, or computes the gradients in the backward pass.
    fn norm(&self, rows: &Normalisation) -> Result<()> = describe_norm(rows);
    fn norm_forward(&self, norm: &NormForward) -> Result<()> = describe_norm(&norm.given);
    /// Allocates the partial sums of the gradients of weight and bias, for rows of n elements. None if the device does not compute these sums.
    fn alloc_column_sums(&self, x: &Tensor, rows: usize, n: usize) -> Result<Option<Tensor>>;
    /// Computes `(x - mean) * scale + shift`, with one mean, scale and shift per channel. Returns None to decline.
    fn normalise_channels(&self, x: &Tensor, numbers: Channels, eps: f64) -> Result<Option<Tensor>> => describe("batch_norm", [x, x]);
    /// True if [`variance`](Self::variance) may be called on this device.
    fn has_variance(&self) -> bool;
    fn variance(&self, v: &Variance) -> Result<bool> => describe(if v.root { "std" } else { "var" }, [v.x, v.out]);

    /// Returns an algorithm for a convolution and its gradients without an im2col matrix, or None if im2col and a product are faster.
    fn convolution(&self, conv: &Conv2d) -> Option<Box<dyn Convolution>>;
    /// Computes the forward pass in one launch; None if im2col and a product are faster. The gradients still use im2col and products.
    fn forward_convolution(&self, c: &Conv2d) -> Result<Option<Tensor>> => describe_convolution("conv2d", &c.windows, c.x, c.weight);
    /// Copies a tensor to an image object. None if the device does not support images, or no image of this size and format.
    fn to_image(&self, x: &Tensor) -> Result<Option<Image>> => describe("to_image", [x]);
    /// Copies the elements of an image object to a tensor.
    fn read_image(&self, image: &Image, out: &Tensor) -> Result<()> = describe("from_image", [out]);
    fn im2col(&self, i: &Im2col) -> Result<()> = describe("im2col", [i.x, i.out]);
    /// Col2im: adds each element of `columns` to the image element from which im2col would have copied it.
    fn col2im(&self, windows: &Windows, columns: &Tensor, out: &Tensor) -> Result<()> = describe("col2im", [columns, out]);
    fn pool(&self, p: &Pooling) -> Result<()> = describe(pool_name(p.task), [p.x, p.index, p.out]);
    fn interpolate(&self, i: &Interpolate) -> Result<()> =
        describe(if i.transposed { "interpolate backward" } else { "interpolate" }, [i.x, i.out]);

    /// True if [`attention`](Self::attention), and with `gradients` its backward pass too, can be computed without storing the scores in memory.
    fn has_attention(&self, a: &FusedAttention, gradients: bool) -> Result<bool>;
    /// Computes the result and the log-sum-exp of each row of scores (see [`AttentionBackward`]). Requires [`has_attention`](Self::has_attention).
    fn attention(&self, a: &FusedAttention, out: &Tensor, logsumexp: &Tensor) -> Result<()> =
        describe_attention("scaled_dot_product_attention", a, [out, logsumexp], 2);
    /// Computes the gradients. Requires [`has_attention`](Self::has_attention) with `gradients`.
    fn attention_backward(&self, a: &FusedAttention, of: &AttentionBackward) -> Result<()> =
        describe_attention("scaled_dot_product_attention backward", a, [of.out, of.grad].into_iter().chain(of.results), 5);
    /// Stores new keys and values in a cache, and computes attention over the cache.
    fn cached_attention(&self, a: &CachedAttention) -> Result<()> =
        describe(a.op, a.rows.into_iter().chain(a.cache.map(|rows| &rows.tensor)).chain(a.attend.into_iter().flatten()));
    /// Computes all time steps of one direction of a recurrent layer, forward or backward. Returns false if products step by step are faster.
    fn recurrence(&self, pass: &Recurrence) -> Result<bool> => describe_recurrence(pass);
    /// Returns the block sizes for the scores of attention. `memory` is the device's memory in bytes; `cheap` is true if blocks take no extra time.
    fn attention_blocking(&self, memory: usize, cheap: bool) -> Blocking;
}

/// The result of a backend method that may decline: false or `None` means declined.
trait MayDecline {
    fn is_declined(&self) -> bool;
}

impl MayDecline for bool {
    fn is_declined(&self) -> bool {
        !self
    }
}

impl<T> MayDecline for Option<T> {
    fn is_declined(&self) -> bool {
        self.is_none()
    }
}

/// Discards the record if the backend declined. Returns `made` unchanged.
#[inline]
fn forget_if_declined<R: MayDecline>(recorded: Option<OperationSpan>, made: Result<R>) -> Result<R> {
    if let Some(recorded) = recorded
        && made.as_ref().is_ok_and(R::is_declined)
    {
        recorded.forget();
    }
    made
}

/// Returns the backend of a device.
#[inline(always)]
pub(crate) fn of_device(device: Device) -> Recorded {
    Recorded(match device {
        Device::Cpu => &cpu::Cpu,
        Device::OpenCL(_) => &opencl::OpenCl,
    })
}

/// True if a device stores quantised weights as planes rather than as blocks: see [`PackedRows::bytes`].
pub(crate) fn stores_planes(device: Device) -> bool {
    matches!(device, Device::OpenCL(_))
}

/// Returns the number of rows of `row_bytes` bytes that a strip of a quantised weight has, if it is dequantised for a product. `packed` is the
/// size of the weight in bytes, so that small models need little more memory than their weights.
pub(crate) fn strip_rows(device: Device, row_bytes: usize, packed: usize) -> usize {
    match device {
        Device::Cpu => 256, // rows of a few thousand elements stay in the L2 cache
        Device::OpenCL(_) => (packed.min(16 << 20) / row_bytes.max(1)).max(256),
    }
}

/// Calls `f` with the backend of the outputs' device, then increments the version counters of the outputs.
pub(crate) fn launch<'t, R>(
    outputs: impl IntoIterator<Item = &'t Tensor, IntoIter: Clone>,
    f: impl FnOnce(Recorded) -> Result<R>,
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
    f: impl FnOnce(Recorded) -> Result<R>,
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
    f: impl FnOnce(Recorded, &Tensor) -> Result<()>,
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
    f: impl FnOnce(Recorded) -> Result<Option<Selected>>,
) -> Result<Option<Selected>> {
    let chosen = f(of_device(x.device()))?;
    let outputs = chosen.iter().flat_map(|c| c.values.iter().chain([&c.indices]));
    outputs.for_each(|t| t.storage.mark_filled());
    Ok(chosen)
}

#[inline]
fn backend_of_outputs<'t>(mut outputs: impl Iterator<Item = &'t Tensor>) -> Recorded {
    let device = outputs.next().expect("a launch has an output").device();
    debug_assert!(outputs.all(|t| t.device() == device), "the outputs of a launch are on one device");
    of_device(device)
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
                let _recorded = operation(|| describe(op, inputs.iter().copied().chain([out])));
                cpu::counted(primitive.fill(out))
            })
        }
        Device::OpenCL(_) => None,
    }
}

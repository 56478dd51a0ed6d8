//! A backend that records every operation for the profiler. While a profiler is on, [`of_device`](super::of_device) returns this backend.

use smallvec::SmallVec;

use crate::backend::Backend;
use crate::backend::problem::scan::Scan;
use crate::backend::problem::softmax::RowOp;
use crate::backend::problem::windows::PoolTask;
use crate::backend::problem::*;
use crate::device::profiler::{Operation, operation};
use crate::storage::Image;
use crate::{Device, Result, Tensor};

/// Records each operation, then calls the wrapped backend to compute it.
pub(crate) struct Profiled(pub(super) &'static dyn Backend);

/// Describes an operation over `tensors`, which include the results. The first tensor determines the device and the dtype.
pub(crate) fn describe<'t>(name: &'static str, tensors: impl IntoIterator<Item = &'t Tensor>) -> Operation {
    let mut described =
        Operation { name, device: Device::Cpu, shapes: SmallVec::new(), dtype: None, bytes: 0, flops: 0 };
    for t in tensors {
        if described.dtype.is_none() {
            (described.device, described.dtype) = (t.device(), Some(t.dtype));
        }
        described.shapes.push(SmallVec::from_slice(t.shape().dims()));
        // A dim with stride 0 repeats a single element, which is counted once.
        let dims = t.shape().dims().iter().zip(t.strides());
        let elements: usize = dims.map(|(&n, &stride)| if stride == 0 { n.min(1) } else { n }).product();
        described.bytes += (elements * t.dtype.size()) as u64;
    }
    described
}

/// Like [`describe`], with `flops` floating-point operations.
pub(crate) fn describe_flops<'t>(
    name: &'static str,
    tensors: impl IntoIterator<Item = &'t Tensor>,
    flops: usize,
) -> Operation {
    Operation { flops: flops as u64, ..describe(name, tensors) }
}

/// Describes a matrix product. The last dim of the left matrix is the number of terms of each sum.
fn describe_gemm(product: &Gemm, outs: &[Tensor]) -> Operation {
    let depth = product.a.shape().dims().last().copied().unwrap_or(0);
    let tensors = [product.a, product.b].into_iter().chain(product.extras.iter().copied()).chain(outs);
    describe_flops(product.op, tensors, 2 * outs[0].numel() * depth)
}

/// Describes attention that computes `products` matrix products, each over all scores.
fn describe_attention<'t>(
    name: &'static str,
    a: &FusedAttention<'t>,
    others: impl IntoIterator<Item = &'t Tensor>,
    products: usize,
) -> Operation {
    let [.., width, value_width] = a.sizes();
    let flops = products * a.scores().numel() * (width + value_width);
    describe_flops(name, [a.q, a.k, a.v].into_iter().chain(a.mask).chain(others), flops)
}

/// Describes a convolution, in which the whole weight is multiplied once for every window.
pub(crate) fn describe_convolution(name: &'static str, w: &Windows, x: &Tensor, weight: &Tensor) -> Operation {
    let windows: usize = w.grid.iter().product();
    let flops = 2 * x.shape().dims()[0] * windows * weight.numel();
    describe_flops(name, [x, weight], flops)
}

/// Describes a gather, which reads only the indexed elements of the source, not the whole source.
fn describe_gather(g: &Indexed, out: &Tensor) -> Operation {
    let bytes = describe(g.op, [out, g.index, out]).bytes;
    Operation { bytes, ..describe(g.op, [g.x, g.index, out]) }
}

fn describe_softmax(softmax: &Softmax) -> Operation {
    let name = match softmax.kind {
        RowOp::Softmax => "softmax",
        RowOp::MaskedSoftmax => "masked_softmax",
        RowOp::LogSoftmax => "log_softmax",
        RowOp::LogSumExp => "logsumexp",
        RowOp::SoftmaxGrad => "softmax backward",
        RowOp::LogSoftmaxGrad => "log_softmax backward",
    };
    let second = (!std::ptr::eq(softmax.x, softmax.z)).then_some(softmax.z);
    describe(name, [softmax.x].into_iter().chain(second).chain([softmax.out]))
}

fn scan_name(scan: Scan) -> &'static str {
    match scan {
        Scan::Sum => "cumsum",
        Scan::Prod => "cumprod",
        Scan::Max => "cummax",
        Scan::Min => "cummin",
        Scan::LogSumExp => "logcumsumexp",
    }
}

fn describe_norm(rows: &Normalisation) -> Operation {
    let forward = std::ptr::eq(rows.x, rows.y) || rows.z.is_none();
    let name = match (rows.rms, forward) {
        (true, true) => "rms_norm",
        (true, false) => "rms_norm backward",
        (false, true) => "layer_norm",
        (false, false) => "layer_norm backward",
    };
    describe(name, rows.tensors())
}

fn pool_name(task: PoolTask) -> &'static str {
    match task {
        PoolTask::Max => "max_pool2d",
        PoolTask::MaxBackward => "max_pool2d backward",
        PoolTask::Mean(_) => "avg_pool2d",
        PoolTask::MeanBackward(_) => "avg_pool2d backward",
    }
}

/// Defines methods that record the described operation, and then call the method of the same name of the wrapped backend.
macro_rules! recorded {
    ($($name:ident($($arg:ident: $t:ty),*) -> $made:ty = $operation:expr;)*) => { $(
        fn $name(&self, $($arg: $t),*) -> $made {
            let _recorded = operation(|| $operation);
            self.0.$name($($arg),*)
        }
    )* };
}

/// Like `recorded`, for methods that may decline. A call that declines is not recorded.
macro_rules! recorded_unless_declined {
    ($($name:ident($($arg:ident: $t:ty),*) -> $made:ty = $operation:expr;)*) => { $(
        fn $name(&self, $($arg: $t),*) -> $made {
            let recorded = operation(|| $operation);
            let made = self.0.$name($($arg),*);
            if made.as_ref().is_ok_and(MayDecline::is_declined) {
                if let Some(recorded) = recorded {
                    recorded.forget();
                }
            }
            made
        }
    )* };
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

/// Defines methods that only call the method of the same name of the wrapped backend.
macro_rules! forwarded {
    ($($name:ident($($arg:ident: $t:ty),*) -> $made:ty;)*) => { $(
        fn $name(&self, $($arg: $t),*) -> $made {
            self.0.$name($($arg),*)
        }
    )* };
}

impl Backend for Profiled {
    recorded! {
        map(formulas: &Formulas) -> Result<()> =
            describe(formulas.op, formulas.inputs.iter().chain(formulas.outputs).copied());
        gemm(product: &Gemm, outs: &[Tensor]) -> Result<bool> = describe_gemm(product, outs);
        reduce(reduction: &Reduction) -> Result<()> = describe(reduction.op, [reduction.x, reduction.out]);
        scan(s: &RunningReduction) -> Result<()> =
            describe(scan_name(s.scan), [s.x, s.values].into_iter().chain(s.indices));
        sort(s: &Sorting) -> Result<()> = describe("sort", [s.x, s.values, s.indices]);
        searchsorted(s: &Search) -> Result<()> = describe("searchsorted", [s.sorted, s.values, s.out]);
        gather(g: &Indexed, out: &Tensor) -> Result<()> = describe_gather(g, out);
        scatter(s: &Scatter) -> Result<()> = describe(s.moved.op, [s.moved.x, s.moved.index, s.target]);
        linear_index(t: &IndexTerm) -> Result<()> = describe(t.op, [t.index, t.out]);
        one_hot(op: &'static str, x: &Tensor, out: &Tensor) -> Result<()> = describe(op, [x, out]);
        nonzero(x: &Tensor, mask: &dyn Fn() -> Result<Tensor>, dims: &[usize]) -> Result<Tensor> =
            describe("nonzero", [x]);
        softmax(softmax: &Softmax) -> Result<()> = describe_softmax(softmax);
        cross_entropy(entropy: &LabelEntropy) -> Result<Tensor> =
            describe("cross_entropy", [entropy.logits, entropy.labels].into_iter().chain(entropy.grad));
        norm(rows: &Normalisation) -> Result<()> = describe_norm(rows);
        norm_forward(norm: &NormForward) -> Result<()> = describe_norm(&norm.given);
        read_image(image: &Image, out: &Tensor) -> Result<()> = describe("from_image", [out]);
        im2col(i: &Im2col) -> Result<()> = describe("im2col", [i.x, i.out]);
        col2im(windows: &Windows, columns: &Tensor, out: &Tensor) -> Result<()> = describe("col2im", [columns, out]);
        pool(p: &Pooling) -> Result<()> = describe(pool_name(p.task), [p.x, p.index, p.out]);
        attention(a: &FusedAttention, out: &Tensor, logsumexp: &Tensor) -> Result<()> =
            describe_attention("scaled_dot_product_attention", a, [out, logsumexp], 2);
        attention_backward(a: &FusedAttention, of: &AttentionBackward) -> Result<()> = describe_attention(
            "scaled_dot_product_attention backward", a, [of.out, of.grad].into_iter().chain(of.results), 5
        );
        interpolate(i: &Interpolate) -> Result<()> =
            describe(if i.transposed { "interpolate backward" } else { "interpolate" }, [i.x, i.out]);
    }

    recorded_unless_declined! {
        sequence(values: Sequence, out: &Tensor) -> Result<bool> = describe("arange", [out]);
        forward_convolution(c: &Conv2d) -> Result<Option<Tensor>> =
            describe_convolution("conv2d", &c.windows, c.x, c.weight);
        to_image(x: &Tensor) -> Result<Option<Image>> = describe("to_image", [x]);
        join(out: &Tensor, tensors: &[&Tensor], d: usize) -> Result<bool> =
            describe("cat", tensors.iter().copied().chain([out]));
        tril_triu(x: &Tensor, from: isize, to: isize) -> Result<Option<Tensor>> = describe("tril", [x, x]);
        topk(first: TopK) -> Result<Option<Selected>> = describe("topk", [first.x]);
        kth(ranked: RankedElement) -> Result<Option<Selected>> = describe("kthvalue", [ranked.x]);
        masked_select(x: &Tensor, mask: &Tensor) -> Result<Option<Tensor>> = describe("masked_select", [x, mask]);
        normalise_channels(x: &Tensor, numbers: Channels, eps: f64) -> Result<Option<Tensor>> =
            describe("batch_norm", [x, x]);
        variance(v: &Variance) -> Result<bool> = describe(if v.root { "std" } else { "var" }, [v.x, v.out]);
    }

    forwarded! {
        has_attention(a: &FusedAttention) -> Result<bool>;
        alloc_column_sums(x: &Tensor, rows: usize, n: usize) -> Result<Option<Tensor>>;
        has_variance() -> bool;
        convolution(conv: &Conv2d) -> Option<Box<dyn Convolution>>;
        attention_blocking(memory: usize, cheap: bool) -> Blocking;
    }
}

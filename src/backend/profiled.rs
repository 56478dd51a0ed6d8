//! Descriptions of operations for the profiler.

use smallvec::SmallVec;

use crate::backend::problem::windows::PoolTask;
use crate::backend::problem::*;
use crate::device::profiler::Operation;
use crate::{Device, Tensor};

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
pub(super) fn describe_gemm(product: &Gemm, outs: &[Tensor]) -> Operation {
    let depth = product.a.shape().dims().last().copied().unwrap_or(0);
    let tensors = [product.a, product.b].into_iter().chain(product.extras.iter().copied()).chain(outs);
    describe_flops(product.op, tensors, 2 * outs[0].numel() * depth)
}

/// Describes a product with a quantised weight, whose packed bytes are read once.
pub(super) fn describe_quantized_gemm(product: &QuantizedGemm, outs: &[Tensor]) -> Operation {
    let tensors = [product.x].into_iter().chain(product.extras.iter().copied()).chain(outs);
    let depth = product.x.shape().dims()[1];
    let mut described = describe_flops(product.op, tensors, 2 * outs[0].numel() * depth);
    described.bytes += product.parts.iter().map(|part| part.nbytes() as u64).sum::<u64>();
    described
}

pub(super) fn describe_dequantize(d: &Dequantize, out: &Tensor) -> Operation {
    let mut described = describe(d.op, [out].into_iter().chain(d.index));
    described.bytes += (out.shape().dims()[0] * d.weight.row_bytes()) as u64;
    described
}

/// Describes attention that computes `products` matrix products, each over all scores.
pub(super) fn describe_attention<'t>(
    name: &'static str,
    a: &FusedAttention<'t>,
    others: impl IntoIterator<Item = &'t Tensor>,
    products: usize,
) -> Operation {
    let [.., width, value_width] = a.sizes();
    let flops = products * a.scores().numel() * (width + value_width);
    describe_flops(name, [a.q, a.k, a.v].into_iter().chain(a.mask).chain(others), flops)
}

/// Describes all time steps of one direction of a recurrent layer. Each row is multiplied by the whole weight.
pub(super) fn describe_recurrence(pass: &Recurrence) -> Operation {
    let name = ["rnn_tanh", "rnn_relu", "lstm", "gru"][pass.cell as usize];
    describe_flops(name, pass.tensors(), 2 * pass.rows()[1] * pass.weight.numel())
}

/// Describes a convolution, in which the whole weight is multiplied once for every window.
pub(crate) fn describe_convolution(name: &'static str, w: &Windows, x: &Tensor, weight: &Tensor) -> Operation {
    let windows: usize = w.grid.iter().product();
    let flops = 2 * x.shape().dims()[0] * windows * weight.numel();
    describe_flops(name, [x, weight], flops)
}

/// Describes a gather, which reads only the indexed elements of the source, not the whole source.
pub(super) fn describe_gather(g: &Indexed, out: &Tensor) -> Operation {
    let bytes = describe(g.op, [out, g.index, out]).bytes;
    Operation { bytes, ..describe(g.op, [g.x, g.index, out]) }
}

pub(super) fn describe_scan(s: &RunningReduction) -> Operation {
    let name = ["cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"][s.scan as usize];
    describe(name, [s.x, s.values].into_iter().chain(s.indices))
}

pub(super) fn describe_softmax(softmax: &Softmax) -> Operation {
    let names = ["softmax", "masked_softmax", "log_softmax", "logsumexp", "softmax backward", "log_softmax backward"];
    let second = (!std::ptr::eq(softmax.x, softmax.z)).then_some(softmax.z);
    describe(names[softmax.kind as usize], [softmax.x].into_iter().chain(second).chain([softmax.out]))
}

pub(super) fn describe_norm(rows: &Normalisation) -> Operation {
    let forward = std::ptr::eq(rows.x, rows.y) || rows.z.is_none();
    let name = match (rows.rms, forward) {
        (true, true) => "rms_norm",
        (true, false) => "rms_norm backward",
        (false, true) => "layer_norm",
        (false, false) => "layer_norm backward",
    };
    describe(name, rows.tensors())
}

pub(super) fn pool_name(task: PoolTask) -> &'static str {
    match task {
        PoolTask::Max => "max_pool2d",
        PoolTask::MaxBackward => "max_pool2d backward",
        PoolTask::Mean(_) => "avg_pool2d",
        PoolTask::MeanBackward(_) => "avg_pool2d backward",
    }
}

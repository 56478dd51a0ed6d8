//! The definition of every problem: plain loops over indices and strides, in f64, or in i64 for integers.
//!
//! Compiled in tests only, for tensors on the CPU. Tensors are read value by value ([`values`]), and each result is rounded once, when it is
//! written. The reference never declines a problem. [`suite`] compares both backends with the reference.

mod attention;
mod cached;
mod formula;
mod images;
mod moves;
mod quantized;
mod recurrence;
mod reductions;
mod rows;
mod sorts;
mod suite;
mod values;

use super::*;

/// A backend that computes every problem by its definition.
struct Reference;

impl Backend for Reference {
    methods! {
        map(formulas: &Formulas) -> Result<()> = formula::map(formulas);
        sequence(values: Sequence, out: &Tensor) -> Result<bool> = moves::sequence(values, out).map(|()| true);
        join(out: &Tensor, tensors: &[&Tensor], d: usize) -> Result<bool> = moves::join(out, tensors, d).map(|()| true);
        tril_triu(x: &Tensor, from: isize, to: isize) -> Result<Option<Tensor>> = moves::tril_triu(x, from, to).map(Some);
        gemm(product: &Gemm, outs: &[Tensor]) -> Result<bool> = reductions::gemm(product, outs[0].shape(), outs);
        quantized_gemm(product: &QuantizedGemm, outs: &[Tensor]) -> Result<bool> = quantized::gemm(product, outs).map(|()| true);
        dequantize(d: &Dequantize, out: &Tensor) -> Result<()> = quantized::dequantize(d, out);
        reduce(reduction: &Reduction) -> Result<()> = reductions::reduce(reduction);
        scan(s: &RunningReduction) -> Result<()> = reductions::scan(s.scan, s.x, s.d, s.values, s.indices);
        sort(s: &Sorting) -> Result<()> = sorts::sort(s.x, s.d, s.descending, s.values, s.indices);
        searchsorted(search: &Search) -> Result<()> = sorts::searchsorted(search);
        topk(t: TopK) -> Result<Option<Selected>> = sorts::topk(t.x, t.d, t.k, t.descending).map(Some);
        kth(r: RankedElement) -> Result<Option<Selected>> = sorts::kth(r.x, r.d, r.rank).map(Some);
        gather(g: &Indexed, out: &Tensor) -> Result<()> = moves::gather(g, out);
        scatter(s: &Scatter) -> Result<()> = moves::scatter(s.moved, s.combine, s.target, s.layout);
        linear_index(t: &IndexTerm) -> Result<()> = moves::linear_index(t.op, t.index, t.out, (t.size, t.step), t.base);
        one_hot(op: &'static str, x: &Tensor, out: &Tensor) -> Result<()> =
            moves::one_hot(op, x, out, out.shape().dims()[x.rank()]);
        nonzero(x: &Tensor, _: &dyn Fn() -> Result<Tensor>, dims: &[usize]) -> Result<Tensor> = moves::nonzero(x, dims);
        masked_select(x: &Tensor, mask: &Tensor) -> Result<Option<Tensor>> = moves::masked_select(x, mask).map(Some);
        softmax(softmax: &Softmax) -> Result<()> = rows::softmax(softmax);
        cross_entropy(entropy: &LabelEntropy) -> Result<Tensor> = rows::cross_entropy(entropy);
        norm(rows: &Normalisation) -> Result<()> = rows::norm(rows);
        norm_forward(norm: &NormForward) -> Result<()> = rows::norm(&norm.given.with_views(&(norm.views)()?));
        alloc_column_sums(x: &Tensor, _: usize, n: usize) -> Result<Option<Tensor>> =
            Tensor::empty_with_shape([1, 2, n], x.dtype.compute().dtype(), Device::Cpu).map(Some);
        normalise_channels(x: &Tensor, numbers: Channels, eps: f64) -> Result<Option<Tensor>> =
            rows::normalise_channels(x, numbers, eps).map(Some);
        has_variance() -> bool = true;
        variance(v: &Variance) -> Result<bool> = rows::variance(v.x, v.out, v.freedom, v.root).map(|()| true);
        convolution(c: &Conv2d) -> Option<Box<dyn Convolution>> =
            Some(Box::new(images::Convolution { windows: c.windows, groups: c.groups }));
        forward_convolution(c: &Conv2d) -> Result<Option<Tensor>> =
            images::Convolution { windows: c.windows, groups: c.groups }.forward(c.x, c.weight, c.bias).map(Some);
        to_image(_: &Tensor) -> Result<Option<Image>> = Ok(None);
        read_image(_: &Image, _: &Tensor) -> Result<()> = unreachable!("the reference has no images");
        im2col(i: &Im2col) -> Result<()> = images::im2col(i.windows, i.x, i.out, i.inside);
        col2im(windows: &Windows, columns: &Tensor, out: &Tensor) -> Result<()> = images::col2im(windows, columns, out);
        pool(p: &Pooling) -> Result<()> = images::pool(p.windows, p.task, p.x, p.index, p.out);
        interpolate(i: &Interpolate) -> Result<()> = images::interpolate(i.resize, i.x, i.out, i.transposed);
        has_attention(_: &FusedAttention, _: bool) -> Result<bool> = Ok(true);
        attention(a: &FusedAttention, out: &Tensor, logsumexp: &Tensor) -> Result<()> =
            attention::forward(a, out, logsumexp);
        attention_backward(a: &FusedAttention, of: &AttentionBackward) -> Result<()> = attention::backward(a, of);
        cached_attention(a: &CachedAttention) -> Result<()> = cached::attend(a);
        recurrence(pass: &Recurrence) -> Result<bool> = recurrence::run(pass).map(|()| true);
        attention_blocking(memory: usize, _: bool) -> Blocking = Blocking { unblocked_bytes: memory, block_bytes: memory, min_queries: 1 };
    }
}

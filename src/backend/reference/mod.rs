//! The definition of every problem: plain loops over indices and strides, in f64, or in i64 for integers.
//!
//! Compiled in tests only, for tensors on the CPU. Tensors are read value by value ([`values`]), and results are rounded once, when they are
//! written. The reference declines no problem. [`suite`] compares both backends with the reference.

mod attention;
mod formula;
mod images;
mod moves;
mod reductions;
mod rows;
mod sorts;
mod suite;
mod values;

use super::*;

/// The reference backend.
struct Reference;

impl Backend for Reference {
    methods! {
        map(formulas: &Formulas) -> Result<()> = formula::map(formulas);
        sequence(values: Sequence, out: &Tensor) -> Result<bool> = moves::sequence(values, out).map(|()| true);
        join(out: &Tensor, tensors: &[&Tensor], d: usize) -> Result<bool> = moves::join(out, tensors, d).map(|()| true);
        tril_triu(x: &Tensor, from: isize, to: isize) -> Result<Option<Tensor>> = moves::tril_triu(x, from, to).map(Some);
        gemm(product: &Gemm, shape: &Shape, outs: &[Tensor]) -> Result<bool> = reductions::gemm(product, shape, outs);
        reduce(reduction: &Reduction) -> Result<()> = reductions::reduce(reduction);
        scan(scan: Scan, x: &Tensor, d: usize, values: &Tensor, indices: Option<&Tensor>) -> Result<()> =
            reductions::scan(scan, x, d, values, indices);
        sort(x: &Tensor, d: usize, descending: bool, values: &Tensor, indices: &Tensor) -> Result<()> =
            sorts::sort(x, d, descending, values, indices);
        searchsorted(x: &Tensor, lines: &Layout, step: isize, v: &Tensor, right: bool, out: &Tensor) -> Result<()> =
            sorts::searchsorted(x, lines, step, v, right, out);
        topk(x: &Tensor, d: usize, k: usize, descending: bool) -> Result<Option<Selected>> =
            sorts::topk(x, d, k, descending).map(Some);
        kth(x: &Tensor, d: usize, nth: RankQuery<'_>) -> Result<Option<Selected>> = sorts::kth(x, d, nth).map(Some);
        gather(g: &Indexed, out: &Tensor) -> Result<()> = moves::gather(g, out);
        scatter(g: &Indexed, combine: Combine, target: &Tensor, layout: &Layout, _: usize) -> Result<()> =
            moves::scatter(g, combine, target, layout);
        linear_index(
            op: &'static str, index: &Tensor, out: &Tensor, axis: (usize, isize), base: Option<i64>
        ) -> Result<()> =
            moves::linear_index(op, index, out, axis, base);
        one_hot(op: &'static str, x: &Tensor, out: &Tensor, classes: usize) -> Result<()> =
            moves::one_hot(op, x, out, classes);
        nonzero(x: &Tensor, _: &dyn Fn() -> Result<Tensor>, dims: &[usize]) -> Result<Tensor> = moves::nonzero(x, dims);
        masked_select(x: &Tensor, mask: &Tensor) -> Result<Option<Tensor>> = moves::masked_select(x, mask).map(Some);
        softmax(softmax: &Softmax) -> Result<()> = rows::softmax(softmax);
        cross_entropy(entropy: &LabelEntropy) -> Result<Tensor> = rows::cross_entropy(entropy);
        norm(rows: &Normalisation) -> Result<()> = rows::norm(rows);
        norm_forward(
            given: &Normalisation, _: &[u64; 4], views: &dyn Fn() -> Result<NormViews>
        ) -> Result<()> =
            rows::norm(&given.with_views(&views()?));
        alloc_column_sums(x: &Tensor, _: usize, n: usize) -> Result<Option<Tensor>> =
            Tensor::empty_with_shape([1, 2, n], x.dtype.compute().dtype(), Device::Cpu).map(Some);
        normalise_channels(x: &Tensor, numbers: Channels, eps: f64) -> Result<Option<Tensor>> =
            rows::normalise_channels(x, numbers, eps).map(Some);
        has_variance() -> bool = true;
        variance(rows: &Tensor, out: &Tensor, freedom: f64, root: bool) -> Result<bool> =
            rows::variance(rows, out, freedom, root).map(|()| true);
        convolution(
            windows: Windows, _: &Tensor, _: &Tensor, groups: usize, _: bool
        ) -> Option<Box<dyn Convolution>> =
            Some(Box::new(images::Convolution { windows, groups }));
        forward_convolution(
            windows: &Windows, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, groups: usize
        ) -> Result<Option<Tensor>> =
            images::Convolution { windows: *windows, groups }.forward(x, weight, bias).map(Some);
        im2col(windows: &Windows, x: &Tensor, out: &Tensor, inside: bool) -> Result<()> =
            images::im2col(windows, x, out, inside);
        col2im(windows: &Windows, columns: &Tensor, out: &Tensor) -> Result<()> = images::col2im(windows, columns, out);
        pool(windows: &Windows, task: PoolTask, x: &Tensor, index: &Tensor, out: &Tensor) -> Result<()> =
            images::pool(windows, task, x, index, out);
        interpolate(resize: &Resize, x: &Tensor, out: &Tensor, transposed: bool) -> Result<()> =
            images::interpolate(resize, x, out, transposed);
        has_attention(_: &FusedAttention) -> Result<bool> = Ok(true);
        attention(a: &FusedAttention, out: &Tensor, logsumexp: &Tensor) -> Result<()> =
            attention::forward(a, out, logsumexp);
        attention_backward(a: &FusedAttention, of: &AttentionBackward, results: [&Tensor; 3]) -> Result<()> =
            attention::backward(a, of, results);
        attention_blocking(memory: usize, _: bool) -> Blocking = Blocking { unblocked_bytes: memory, block_bytes: memory, min_queries: 1 };
    }
}

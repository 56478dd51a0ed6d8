//! The OpenCL backend: chooses, compiles and launches kernels for the problems of [`crate::backend::problem`].

pub(crate) mod attention;
mod attention_tile;
mod cached;
pub(crate) mod checked_indices;
mod conv_small;
pub(crate) mod cross_entropy;
mod depthwise;
mod depthwise_last;
pub(crate) mod gather;
pub(crate) mod gemm;
pub(crate) mod gemm_mma;
pub(crate) mod gemm_panel;
pub(crate) mod gemm_thin;
pub(crate) mod geometry;
pub(crate) mod image;
pub(crate) mod implicit_gemm;
pub(crate) mod interpolate;
pub(crate) mod join;
pub(crate) mod kernels;
pub(crate) mod launch_cache;
pub(crate) mod launch_plan;
pub(crate) mod map;
pub(crate) mod nonzero;
pub(crate) mod norm;
mod norm_channels;
mod prelude;
pub(crate) mod quantized;
mod radix_select;
mod recurrence;
pub(crate) mod reduce;
pub(crate) mod scan;
pub(crate) mod scatter;
pub(crate) mod select;
pub(crate) mod sequence;
pub(crate) mod softmax;
pub(crate) mod sort;
pub(crate) mod source;
pub(crate) mod triangle;
pub(crate) mod user_kernel;
pub(crate) mod window;

#[cfg(test)]
mod tests;

use crate::backend::Backend;
use crate::backend::problem::*;
use crate::storage::Image;
use crate::{Result, Tensor};

/// The backend of all OpenCL devices.
pub(crate) struct OpenCl;

impl Backend for OpenCl {
    methods! {
        map(formulas: &Formulas) -> Result<()> = map::launch_or_record(formulas);
        sequence(values: Sequence, out: &Tensor) -> Result<bool> = sequence::write_sequence(values, out);
        join(out: &Tensor, tensors: &[&Tensor], d: usize) -> Result<bool> = join::join(out, tensors, d);
        tril_triu(x: &Tensor, from: isize, to: isize) -> Result<Option<Tensor>> =
            triangle::tril_triu(x, from, to).map(mark_written).map(Some);
        gemm(product: &Gemm, outs: &[Tensor]) -> Result<bool> = gemm::launch_product(product, outs[0].shape(), outs);
        quantized_gemm(product: &QuantizedGemm, outs: &[Tensor]) -> Result<bool> = quantized::multiply(product, outs);
        dequantize(d: &Dequantize, out: &Tensor) -> Result<()> = quantized::dequantize(d, out);
        reduce(reduction: &Reduction) -> Result<()> = reduce::launch_reduction(reduction);
        scan(s: &RunningReduction) -> Result<()> = scan::launch_scan(s);
        sort(s: &Sorting) -> Result<()> = sort::sort(s.x, s.d, s.descending, s.values, s.indices);
        searchsorted(search: &Search) -> Result<()> = sort::searchsorted(search);
        topk(t: TopK) -> Result<Option<Selected>> =
            if t.x.numel() == 0 { Ok(None) } else { select::topk(t.x, t.d, t.k, t.descending) };
        kth(r: RankedElement) -> Result<Option<Selected>> =
            if r.x.numel() == 0 { Ok(None) } else { select::kth(r.x, r.d, r.rank) };
        gather(g: &Indexed, out: &Tensor) -> Result<()> = gather::gather(g, out);
        scatter(scatter: &Scatter) -> Result<()> = gather::scatter(scatter);
        linear_index(term: &IndexTerm) -> Result<()> = gather::linear_index(term);
        one_hot(op: &'static str, x: &Tensor, out: &Tensor) -> Result<()> = gather::one_hot(op, x, out);
        nonzero(x: &Tensor, _: &dyn Fn() -> Result<Tensor>, dims: &[usize]) -> Result<Tensor> =
            nonzero::nonzero_indices(x, dims).map(mark_written);
        masked_select(x: &Tensor, mask: &Tensor) -> Result<Option<Tensor>> =
            nonzero::masked_select(x, mask).map(mark_written).map(Some);
        softmax(softmax: &Softmax) -> Result<()> = softmax::launch_softmax(softmax);
        cross_entropy(entropy: &LabelEntropy) -> Result<Tensor> = cross_entropy::cross_entropy(entropy).map(mark_written);
        norm(rows: &Normalisation) -> Result<()> = norm::launch_norm(rows);
        norm_forward(norm: &NormForward) -> Result<()> = norm::forward(norm);
        alloc_column_sums(x: &Tensor, rows: usize, n: usize) -> Result<Option<Tensor>> = norm::alloc_sums(x, rows, n);
        normalise_channels(_: &Tensor, _: Channels, _: f64) -> Result<Option<Tensor>> = Ok(None);
        has_variance() -> bool = true;
        variance(variance: &Variance) -> Result<bool> = norm::variance(variance);
        convolution(conv: &Conv2d) -> Option<Box<dyn Convolution>> =
            if image::reads_images(conv.x) {
                None
            } else if let Some(made) = depthwise::Depthwise::new(conv) {
                Some(Box::new(made))
            } else {
                implicit_gemm::ImplicitGemm::new(conv).map(|made| Box::new(made) as _)
            };
        forward_convolution(conv: &Conv2d) -> Result<Option<Tensor>> =
            match image::convolution(conv)? {
                None => conv_small::forward(&conv.windows, conv.x, conv.weight, conv.bias, false),
                made => Ok(made),
            };
        to_image(x: &Tensor) -> Result<Option<Image>> = image::to_image(x);
        read_image(image: &Image, out: &Tensor) -> Result<()> = image::from_image(image, out);
        im2col(im2col: &Im2col) -> Result<()> = window::unfold(im2col);
        col2im(windows: &Windows, columns: &Tensor, out: &Tensor) -> Result<()> = window::fold(windows, columns, out);
        pool(pooling: &Pooling) -> Result<()> = window::pool(pooling);
        interpolate(problem: &Interpolate) -> Result<()> = interpolate::interpolate(problem);
        has_attention(a: &FusedAttention, _: bool) -> Result<bool> = attention::is_supported(a);
        attention(a: &FusedAttention, out: &Tensor, logsumexp: &Tensor) -> Result<()> =
            attention::forward(a, out, logsumexp);
        attention_backward(a: &FusedAttention, of: &AttentionBackward) -> Result<()> = attention::backward(a, of);
        cached_attention(a: &CachedAttention) -> Result<()> = cached::attend(a);
        recurrence(pass: &Recurrence) -> Result<bool> = recurrence::run(pass);
        attention_blocking(memory: usize, _: bool) -> Blocking = {
            let unblocked_bytes = Blocking::memory_fraction(memory);
            Blocking { unblocked_bytes, block_bytes: unblocked_bytes / 4, min_queries: 256 }
        };
    }
}

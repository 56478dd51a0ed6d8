//! The OpenCL backend: plans and launches kernels for the problems of [`crate::backend::problem`].

pub(crate) mod attention;
mod attention_tile;
pub(crate) mod checked_indices;
pub(crate) mod cross_entropy;
mod depthwise;
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
mod radix_select;
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
mod device_tests;

use crate::backend::Backend;
use crate::backend::mark_written;
use crate::backend::opencl::depthwise::Depthwise;
use crate::backend::opencl::implicit_gemm::ImplicitGemm;
use crate::backend::problem::conv::Convolution;
use crate::backend::problem::{
    AttentionBackward, Blocking, Combine, Formulas, FusedAttention, Gemm, Indexed, LabelEntropy, NormViews,
    Normalisation, PoolTask, RankQuery, Reduction, Resize, Scan, Selected, Sequence, Softmax, Windows,
};
use crate::layout::Layout;
use crate::storage::Image;
use crate::{Result, Shape, Tensor};

/// The backend of all OpenCL devices.
pub(crate) struct OpenCl;

impl Backend for OpenCl {
    methods! {
        map(formulas: &Formulas) -> Result<()> = map::launch_or_record(formulas);
        sequence(values: Sequence, out: &Tensor) -> Result<bool> = sequence::write_sequence(values, out);
        join(out: &Tensor, tensors: &[&Tensor], d: usize) -> Result<bool> = join::join(out, tensors, d);
        tril_triu(x: &Tensor, from: isize, to: isize) -> Result<Option<Tensor>> =
            triangle::tril_triu(x, from, to).map(mark_written).map(Some);
        gemm(product: &Gemm, shape: &Shape, outs: &[Tensor]) -> Result<bool> = gemm::launch_product(product, shape, outs);
        reduce(reduction: &Reduction) -> Result<()> = reduce::launch_reduction(reduction);
        scan(scan: Scan, x: &Tensor, d: usize, values: &Tensor, indices: Option<&Tensor>) -> Result<()> =
            scan::launch_scan(scan, x, d, values, indices);
        sort(x: &Tensor, d: usize, descending: bool, values: &Tensor, indices: &Tensor) -> Result<()> =
            sort::sort(x, d, descending, values, indices);
        searchsorted(x: &Tensor, lines: &Layout, step: isize, v: &Tensor, right: bool, out: &Tensor) -> Result<()> =
            sort::searchsorted(x, lines, step, v, right, out);
        topk(x: &Tensor, d: usize, k: usize, descending: bool) -> Result<Option<Selected>> =
            if x.numel() == 0 { Ok(None) } else { select::topk(x, d, k, descending) };
        kth(x: &Tensor, d: usize, nth: RankQuery<'_>) -> Result<Option<Selected>> =
            if x.numel() == 0 { Ok(None) } else { select::kth(x, d, nth) };
        gather(g: &Indexed, out: &Tensor) -> Result<()> = gather::gather(g, out);
        scatter(g: &Indexed, combine: Combine, target: &Tensor, layout: &Layout, d: usize) -> Result<()> =
            gather::scatter(g, combine, target, layout, d);
        linear_index(
            op: &'static str, index: &Tensor, out: &Tensor, axis: (usize, isize), base: Option<i64>
        ) -> Result<()> =
            gather::linear_index(op, index, out, axis, base);
        one_hot(op: &'static str, x: &Tensor, out: &Tensor, classes: usize) -> Result<()> =
            gather::one_hot(op, x, out, classes);
        nonzero(x: &Tensor, _: &dyn Fn() -> Result<Tensor>, dims: &[usize]) -> Result<Tensor> =
            nonzero::nonzero_indices(x, dims).map(mark_written);
        masked_select(x: &Tensor, mask: &Tensor) -> Result<Option<Tensor>> =
            nonzero::masked_select(x, mask).map(mark_written).map(Some);
        softmax(softmax: &Softmax) -> Result<()> = softmax::launch_softmax(softmax);
        cross_entropy(entropy: &LabelEntropy) -> Result<Tensor> = cross_entropy::cross_entropy(entropy).map(mark_written);
        norm(rows: &Normalisation) -> Result<()> = norm::launch_norm(rows);
        norm_forward(given: &Normalisation, numbers: &[u64; 4], views: &dyn Fn() -> Result<NormViews>) -> Result<()> =
            norm::forward(given, numbers, views);
        alloc_column_sums(x: &Tensor, rows: usize, n: usize) -> Result<Option<Tensor>> = norm::alloc_sums(x, rows, n);
        has_variance() -> bool = true;
        variance(rows: &Tensor, out: &Tensor, freedom: f64, root: bool) -> Result<bool> =
            norm::variance(rows, out, freedom, root);
        convolution(windows: Windows, x: &Tensor, weight: &Tensor, groups: usize, single: bool)
            -> Option<Box<dyn Convolution>> =
            match image::reads_images(x) {
                true => None,
                false => match Depthwise::new(windows, x, weight, groups) {
                    Some(made) => Some(Box::new(made)),
                    None => ImplicitGemm::new(windows, x, weight, groups, single).map(|made| Box::new(made) as _),
                },
            };
        forward_convolution(
            windows: &Windows, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, groups: usize
        ) -> Result<Option<Tensor>> =
            image::convolution(windows, x, weight, bias, groups);
        to_image(x: &Tensor) -> Result<Option<Image>> = image::to_image(x);
        read_image(image: &Image, out: &Tensor) -> Result<()> = image::from_image(image, out);
        im2col(windows: &Windows, x: &Tensor, out: &Tensor, inside: bool) -> Result<()> =
            window::unfold(windows, x, out, inside);
        col2im(windows: &Windows, columns: &Tensor, out: &Tensor) -> Result<()> = window::fold(windows, columns, out);
        pool(windows: &Windows, task: PoolTask, x: &Tensor, index: &Tensor, out: &Tensor) -> Result<()> =
            window::pool(windows, task, x, index, out);
        has_attention(a: &FusedAttention) -> Result<bool> = attention::is_supported(a);
        attention(a: &FusedAttention, out: &Tensor, logsumexp: &Tensor) -> Result<()> =
            attention::forward(a, out, logsumexp);
        attention_backward(a: &FusedAttention, of: &AttentionBackward, results: [&Tensor; 3]) -> Result<()> =
            attention::backward(a, of, results);
        interpolate(resize: &Resize, x: &Tensor, out: &Tensor, transposed: bool) -> Result<()> =
            interpolate::interpolate(resize, x, out, transposed);
    }

    fn attention_blocking(&self, memory: usize, _: bool) -> Blocking {
        let unblocked_bytes = Blocking::memory_fraction(memory);
        Blocking { unblocked_bytes, block_bytes: unblocked_bytes / 4, min_queries: 256 }
    }
}

//! The CPU backend: computes problems with vectorised loops on a thread pool.

pub(crate) mod accumulate;
#[cfg(target_arch = "x86_64")]
pub(crate) mod attention;
pub(crate) mod cached;
#[cfg(target_arch = "x86_64")] // uses product kernels, which exist on x86-64 only
pub(crate) mod conv;
pub(crate) mod convert;
pub(crate) mod copy;
pub(crate) mod depthwise;
pub(crate) mod dispatch;
pub(crate) mod fast_path;
pub(crate) mod gemm;
pub(crate) mod index;
pub(crate) mod interpolate;
pub(crate) mod interpreter;
pub(crate) mod join;
#[allow(unsafe_code)]
pub(crate) mod kernels;
pub(crate) mod lines;
pub(crate) mod map;
pub(crate) mod nonzero;
pub(crate) mod norm;
pub(crate) mod partition;
pub(crate) mod quantized;
#[cfg(target_arch = "x86_64")]
pub(crate) mod recurrence;
pub(crate) mod reduce;
pub(crate) mod scalar;
pub(crate) mod scan;
pub(crate) mod softmax;
pub(crate) mod sort;
pub(crate) mod steps;
pub(crate) mod triangle;
pub(crate) mod window;

use crate::backend::Backend;
use crate::backend::mark_written;
use crate::backend::problem::{
    AttentionBackward, Blocking, CachedAttention, Channels, Conv2d, Convolution, Dequantize, Formulas, FusedAttention,
    Gemm, Im2col, IndexTerm, Indexed, Interpolate, LabelEntropy, NormForward, Normalisation, Pooling, QuantizedGemm,
    RankedElement, Recurrence, Reduction, RunningReduction, Scatter, Search, Selected, Sequence, Softmax, Sorting,
    TopK, Variance, Windows,
};
use crate::backend::profiled::{describe, describe_flops};
use crate::device::count_launch;
use crate::device::cpu::threads;
use crate::device::profiler::{Operation, operation};
use crate::storage::Image;
use crate::{Error, Result, Tensor};

/// The CPU backend. These methods count launches for the statistics; the functions that they call do not.
pub(crate) struct Cpu;

/// Counts one launch, and returns `made` unchanged.
pub(crate) fn counted<R>(made: Result<R>) -> Result<R> {
    count_launch();
    made
}

/// Counts a launch if `made` is an error or `is_launch` returns true for its value; returns `made` unchanged.
fn counted_if<R>(made: Result<R>, is_launch: impl FnOnce(&R) -> bool) -> Result<R> {
    if made.as_ref().map_or(true, is_launch) { counted(made) } else { made }
}

impl Backend for Cpu {
    methods! {
        map(formulas: &Formulas) -> Result<()> =
            counted_if(map::run_formulas(formulas), |()| formulas.outputs[0].numel() > 0);
        sequence(_: Sequence, _: &Tensor) -> Result<bool> = Ok(false);
        join(out: &Tensor, tensors: &[&Tensor], d: usize) -> Result<bool> =
            counted_if(join::join(out, tensors, d), |joined| *joined);
        tril_triu(x: &Tensor, from: isize, to: isize) -> Result<Option<Tensor>> =
            counted(triangle::tril_triu(x, from, to).map(Some));
        gemm(product: &Gemm, outs: &[Tensor]) -> Result<bool> = counted(gemm::multiply(product, outs[0].shape(), outs));
        quantized_gemm(product: &QuantizedGemm, outs: &[Tensor]) -> Result<bool> =
            counted_if(quantized::multiply(product, outs), |done| *done);
        dequantize(d: &Dequantize, out: &Tensor) -> Result<()> = counted(quantized::dequantize(d, out));
        reduce(reduction: &Reduction) -> Result<()> = counted(reduce::run_reduction(reduction));
        scan(s: &RunningReduction) -> Result<()> = counted(scan::run_scan(s));
        sort(s: &Sorting) -> Result<()> = counted(sort::run_sort(s));
        searchsorted(s: &Search) -> Result<()> = counted(sort::searchsorted(s));
        topk(t: TopK) -> Result<Option<Selected>> =
            counted_if(sort::topk(&t), |first| first.indices.numel() > 0).map(Some);
        kth(r: RankedElement) -> Result<Option<Selected>> =
            counted_if(sort::kth(&r), |nth| nth.indices.numel() > 0).map(Some);
        gather(g: &Indexed, out: &Tensor) -> Result<()> = counted(index::gather(g, out));
        scatter(s: &Scatter) -> Result<()> = counted(index::scatter(s));
        linear_index(t: &IndexTerm) -> Result<()> = counted(index::linear_index(t));
        one_hot(op: &'static str, x: &Tensor, out: &Tensor) -> Result<()> =
            counted(index::one_hot(op, x, out, out.shape().dims()[x.rank()]));
        nonzero(_: &Tensor, mask: &dyn Fn() -> Result<Tensor>, dims: &[usize]) -> Result<Tensor> =
            counted(nonzero::nonzero_indices(&mask()?, dims)).map(mark_written);
        masked_select(_: &Tensor, _: &Tensor) -> Result<Option<Tensor>> = Ok(None);
        softmax(softmax: &Softmax) -> Result<()> = counted(softmax::run_softmax(softmax));
        cross_entropy(entropy: &LabelEntropy) -> Result<Tensor> = counted(softmax::cross_entropy(entropy));
        norm(rows: &Normalisation) -> Result<()> = counted(norm::normalise(rows));
        norm_forward(norm: &NormForward) -> Result<()> = counted(norm::normalise(&norm.given.with_views(&(norm.views)()?)));
        alloc_column_sums(x: &Tensor, rows: usize, n: usize) -> Result<Option<Tensor>> = norm::alloc_column_sums(x, rows, n).map(Some);
        normalise_channels(x: &Tensor, numbers: Channels, eps: f64) -> Result<Option<Tensor>> =
            counted_if(norm::normalise_batch(x, numbers, eps), Option::is_some);
        has_variance() -> bool = false;
        variance(_: &Variance) -> Result<bool> = Ok(false);
        forward_convolution(_: &Conv2d) -> Result<Option<Tensor>> = Ok(None);
        to_image(_: &Tensor) -> Result<Option<Image>> = Ok(None);
        read_image(image: &Image, _: &Tensor) -> Result<()> =
            Err(Error::invalid("from_image", format!("{image:?} belongs to another device")));
        im2col(i: &Im2col) -> Result<()> = counted(window::im2col(i));
        col2im(windows: &Windows, columns: &Tensor, out: &Tensor) -> Result<()> =
            counted(window::col2im(windows, columns, out));
        pool(p: &Pooling) -> Result<()> = counted(window::pool(p));
        interpolate(i: &Interpolate) -> Result<()> = counted(interpolate::resize_images(i));
        attention_backward(_: &FusedAttention, _: &AttentionBackward) -> Result<()> =
            unreachable!("`has_attention` is false for gradients");
        cached_attention(a: &CachedAttention) -> Result<()> = counted(cached::attend(a));
    }

    fn convolution(&self, conv: &Conv2d) -> Option<Box<dyn Convolution>> {
        let Conv2d { windows, x, weight, groups, single, .. } = *conv;
        let grid = windows.grid.iter().product();
        if let Some(depthwise) = depthwise::Depthwise::new(windows, x, weight, groups) {
            return Some(Box::new(Counted { grid, convolution: depthwise }));
        }
        #[cfg(target_arch = "x86_64")]
        if !single {
            let convolution = conv::Conv::new(windows, x, weight, groups)?;
            return Some(Box::new(Counted { grid, convolution }));
        }
        _ = single;
        None
    }

    fn has_attention(&self, _a: &FusedAttention, gradients: bool) -> Result<bool> {
        #[cfg(target_arch = "x86_64")]
        return Ok(!gradients && attention::is_supported(_a));
        #[cfg(not(target_arch = "x86_64"))]
        Ok(false)
    }

    fn attention(&self, _a: &FusedAttention, _out: &Tensor, _logsumexp: &Tensor) -> Result<()> {
        #[cfg(target_arch = "x86_64")]
        return counted(attention::attend(_a, _out, _logsumexp));
        #[cfg(not(target_arch = "x86_64"))]
        unreachable!("`has_attention` is false")
    }

    fn recurrence(&self, _pass: &Recurrence) -> Result<bool> {
        #[cfg(target_arch = "x86_64")]
        return counted_if(recurrence::run(_pass), |done| *done);
        #[cfg(not(target_arch = "x86_64"))]
        Ok(false)
    }

    fn attention_blocking(&self, memory: usize, cheap: bool) -> Blocking {
        let unblocked_bytes = if cheap { Blocking::MIN_UNBLOCKED_BYTES } else { Blocking::memory_fraction(memory) };
        Blocking { unblocked_bytes, block_bytes: Blocking::MIN_UNBLOCKED_BYTES.min(threads() << 19), min_queries: 128 }
    }
}

/// A convolution that counts and profiles its launches, and increments the versions of its results.
struct Counted<C> {
    convolution: C,
    /// The number of windows in an image.
    grid: usize,
}

impl<C> Counted<C> {
    fn operation(&self, name: &'static str, images: &Tensor, weight: &Tensor) -> Operation {
        let flops = 2 * images.shape().dims()[0] * self.grid * weight.numel();
        describe_flops(name, [images, weight], flops)
    }
}

impl<C: Convolution> Convolution for Counted<C> {
    fn forward(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let _recorded = operation(|| self.operation("conv2d", x, weight));
        counted(self.convolution.forward(x, weight, bias)).map(mark_written)
    }

    fn transposed(&self, y: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let _recorded = operation(|| self.operation("conv_transpose2d", y, weight));
        counted(self.convolution.transposed(y, weight, bias)).map(mark_written)
    }

    fn weight_gradient(&self, x: &Tensor, y: &Tensor, slot: Option<Tensor>) -> Result<Tensor> {
        let _recorded = operation(|| describe("conv2d weight gradient", [x, y]));
        counted(self.convolution.weight_gradient(x, y, slot)).map(mark_written)
    }
}

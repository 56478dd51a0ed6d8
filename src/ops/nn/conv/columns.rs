//! Convolutions as matrix products of columns (im2col).

use std::ops::Range;
use std::slice;

use crate::backend::problem::conv::{Convolution, max_column_block_bytes};
use crate::backend::problem::gemm::{EPILOGUES, Gemm};
use crate::backend::problem::windows::{Windows, sizes_4d};
use crate::ops::dispatch::prelude::*;
use crate::ops::linalg::matmul::matrix_transpose;
use crate::ops::nn::conv::ConvProblem;
use crate::ops::reduce;
use crate::tensor::view::reshape_detached;

/// The minimum number of windows of an image that gets its own product. Smaller images become columns of one product, whose result is
/// copied to reorder it.
const MIN_WINDOWS_OF_OWN_PRODUCT: usize = 1024;

/// Computes a convolution and its gradients as products of columns, one block of columns at a time. Not recorded for autograd.
pub(super) struct Im2colConvolution(pub(super) ConvProblem);

/// A block of windows: consecutive rows of windows of consecutive images.
struct Block {
    images: Range<usize>,
    rows: Range<usize>,
    windows: Windows,
    /// The part of the images that the windows cover.
    x: Tensor,
}

impl Block {
    /// Returns the columns of whole images, `[images, groups, C / groups * kernel, windows of an image]`.
    fn columns_by_image(&self, op: &'static str, groups: usize) -> Result<Tensor> {
        let columns = self.windows.im2col(op, &self.x, false)?;
        let dims = columns.shape().dims();
        let rows = dims[1..4].iter().product::<usize>() / groups;
        columns.reshape([dims[0], groups, rows, dims[4] * dims[5]])
    }

    /// Returns the columns of this block, `[groups, C / groups * kernel, windows]`.
    fn columns(&self, op: &'static str, groups: usize) -> Result<Tensor> {
        let count = self.images.len() * self.rows.len() * self.windows.grid[1];
        let columns = self.windows.im2col(op, &self.x, true)?;
        let rows = columns.shape().dims()[..3].iter().product::<usize>() / groups;
        columns.reshape([groups, rows, count])
    }

    /// Returns the elements of `y`, `[N, O, grid]`, for the windows of this block, as `[O, images, rows, columns]`.
    fn select_outputs(&self, y: &Tensor) -> Result<Tensor> {
        let images = y.narrow(0, self.images.start, self.images.len())?;
        images.narrow(2, self.rows.start, self.rows.len())?.transpose(0, 1)
    }
}

impl Im2colConvolution {
    /// Divides the windows of all images in `x` into blocks.
    fn blocks(&self, x: &Tensor) -> Result<Vec<Block>> {
        let windows = self.0.windows;
        let Windows { image, kernel, grid, stride, padding, padding_after, dilation, .. } = windows;
        let [n, c, ..] = sizes_4d(x);
        let row_bytes = (c * kernel[0] * kernel[1] * grid[1] * x.dtype.size()).max(1);
        let reach = dilation[0] * (kernel[0] - 1);
        // Images are not divided if some windows are entirely padding, because such windows have no rows of an image to read.
        let divisible = padding[0].max(padding_after[0]) <= reach;
        let most = max_column_block_bytes(x.device())?;
        let rows = if divisible { (most / row_bytes).clamp(1, grid[0]) } else { grid[0] };
        let images = if rows == grid[0] { (most / (row_bytes * rows)).max(1) } else { 1 };
        let mut blocks = Vec::new();
        for first in (0..n.max(1)).step_by(images) {
            for top in (0..grid[0]).step_by(rows) {
                let (count, rows) = (images.min(n - first), rows.min(grid[0] - top));
                // The first and the end row of the padded image that the block reads.
                let (start, end) = (top * stride[0], (top + rows - 1) * stride[0] + reach + 1);
                let from = start.saturating_sub(padding[0]);
                let to = end.saturating_sub(padding[0]).min(image[0]);
                let before = padding[0].saturating_sub(start);
                blocks.push(Block {
                    images: first..first + count,
                    rows: top..top + rows,
                    windows: Windows {
                        image: [to - from, image[1]],
                        grid: [rows, grid[1]],
                        padding: [before, padding[1]],
                        ..windows
                    },
                    x: x.narrow(0, first, count)?.narrow(2, from, to - from)?,
                });
            }
        }
        Ok(blocks)
    }
}

impl Convolution for Im2colConvolution {
    fn forward(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let ConvProblem { op, windows, groups, .. } = self.0;
        let (weight, bias) = (weight.detach(), bias.map(Tensor::detach));
        let (blocks, [n, ..], o) = (self.blocks(&x.detach())?, sizes_4d(x), weight.shape().dims()[0]);
        let [oh, ow] = windows.grid;
        let out = Tensor::empty_with_shape([n, o, oh, ow], x.dtype, x.device())?;
        for block in &blocks {
            let images = block.images.len();
            if block.rows.len() == oh && oh * ow >= MIN_WINDOWS_OF_OWN_PRODUCT {
                let part = out.narrow(0, block.images.start, images)?.reshape([images, groups, o / groups, oh * ow])?;
                let columns = block.columns_by_image(op, groups)?;
                let made = multiply_columns(op, &columns, &weight, bias.as_ref(), false, Some(part))?;
                debug_assert!(made.shares_storage(&out));
            } else {
                let columns = block.columns(op, groups)?.unsqueeze(0)?;
                let made = multiply_columns(op, &columns, &weight, bias.as_ref(), false, None)?;
                block.select_outputs(&out)?.copy_(&made.reshape([o, images, block.rows.len(), ow])?)?;
            }
        }
        Ok(out)
    }

    fn transposed(&self, y: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let ConvProblem { windows, groups, .. } = self.0;
        let (y, weight, bias) = (y.detach(), weight.detach(), bias.map(Tensor::detach));
        let by_product = |y: &Tensor, weight: &Tensor, bias: Option<&Tensor>| {
            ConvProblem { transposed: true, ..self.0 }.by_im2col(y, weight, bias)
        };
        let ([n, ..], [_, channels, kh, kw], [h, w]) = (sizes_4d(&y), sizes_4d(&weight), windows.image);
        let channel_bytes = (groups * kh * kw * windows.grid.iter().product::<usize>() * y.dtype.size()).max(1);
        let most = max_column_block_bytes(y.device())?;
        let each = (most / channel_bytes).clamp(1, channels.max(1));
        let images = if each == channels { (most / (channel_bytes * each)).max(1) } else { 1 };
        if images >= n && each >= channels {
            return by_product(&y, &weight, bias.as_ref());
        }
        let out = Tensor::empty_with_shape([n, groups, channels, h * w], y.dtype, y.device())?;
        for first in (0..n).step_by(images) {
            let count = images.min(n - first);
            let (y, out) = (y.narrow(0, first, count)?, out.narrow(0, first, count)?);
            for channel in (0..channels).step_by(each) {
                let each = each.min(channels - channel);
                let made = by_product(&y, &weight.narrow(1, channel, each)?, None)?;
                out.narrow(2, channel, each)?.copy_(&made.reshape([count, groups, each, h * w])?)?;
            }
        }
        let out = out.reshape([n, groups * channels, h, w])?;
        if let Some(bias) = bias {
            out.add_(&bias.reshape([groups * channels, 1, 1])?)?;
        }
        Ok(out)
    }

    fn weight_gradient(&self, x: &Tensor, y: &Tensor, mut slot: Option<Tensor>) -> Result<Tensor> {
        let ConvProblem { op, windows, groups, .. } = self.0;
        let ([_, c, ..], [_, o, ..], [kh, kw]) = (sizes_4d(x), sizes_4d(y), windows.kernel);
        let shape = Shape::from([groups, o / groups, c / groups * kh * kw]);
        let (blocks, y) = (self.blocks(&x.detach())?, y.detach());
        // The sums of all blocks are computed in f32, because half precision would round them after each block.
        let wide = if y.dtype.is_half() { DType::F32 } else { y.dtype };
        let mut sum: Option<Tensor> = None;
        for (i, block) in blocks.iter().enumerate() {
            let columns = matrix_transpose(&block.columns(op, groups)?);
            let grad = block.select_outputs(&y)?.reshape([groups, o / groups, columns.shape().dims()[1]])?;
            let is_last = i + 1 == blocks.len();
            let dtype = if is_last { y.dtype } else { wide };
            let slot = slot.take_if(|_| is_last);
            let out = slot.and_then(|s| Some(s.with_layout(s.layout.reshape(&shape)?)));
            let epilogue = if sum.is_some() { &EPILOGUES.biased } else { &EPILOGUES.product };
            let before = sum.as_ref();
            let gemm = Gemm::plain(op, &grad, &columns, slice::from_ref(epilogue), &dtype);
            sum = Some(Gemm { out, extras: before.as_slice(), ..gemm }.compute_one()?);
        }
        let made = sum.expect("there is a block");
        let shape = Shape::from([o, c / groups, kh, kw]);
        Ok(made.with_layout(Layout { offset: made.layout.offset, ..Layout::contiguous(shape) }))
    }
}

/// Multiplies each group's part of the weight by the group's columns, and adds the bias. The result is `[N, groups, rows, columns]`.
///
/// The bias is `[groups * rows]`. The weight, `[A, B, KH, KW]`, is read as `[groups, A / groups, B KH KW]`, or as the transpose of that
/// if `transposed`. The result is written to `out` if given.
pub(super) fn multiply_columns(
    op: &'static str,
    columns: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    transposed: bool,
    out: Option<Tensor>,
) -> Result<Tensor> {
    let groups = columns.shape().dims()[1];
    let [a, b, kh, kw] = sizes_4d(weight);
    let split = Shape::from([groups, a / groups, b * kh * kw]);
    let matrices = reshape_detached(weight, &split)?;
    let matrices = if transposed { matrix_transpose(&matrices) } else { matrices };
    let rows = matrices.shape().dims()[1];
    let bias_view = bias.map(|b| reshape_detached(b, &Shape::from([groups, rows, 1]))).transpose()?;
    let epilogue = if bias.is_some() { &EPILOGUES.biased } else { &EPILOGUES.product };
    let g = Gemm { out, ..Gemm::plain(op, &matrices, columns, slice::from_ref(epilogue), &columns.dtype) };
    let inputs: SmallVec<[&Tensor; 3]> = [columns, weight].into_iter().chain(bias).collect();
    let out = match autograd::is_tracked(&inputs) && autograd::is_gradients_only() {
        true => Tensor::empty_with_shape(
            [sizes_4d(columns)[0], groups, rows, sizes_4d(columns)[3]],
            columns.dtype,
            columns.device(),
        )?,
        false => Gemm { extras: &bias_view.iter().collect::<SmallVec<[&Tensor; 1]>>(), ..g }.compute_one()?,
    };
    if !autograd::is_tracked(&inputs) {
        return Ok(out);
    }
    let (saved_x, saved_w) = (weight.requires_grad().then(|| Saved::new(columns)), Saved::new(weight));
    let bias_shape = bias.map(|b| b.shape().clone());
    Ok(autograd::record_differentiable(op, out, &inputs, move |ctx| {
        let (grad, weight) = (ctx.grad()?, saved_w.get(op)?);
        let mut gradients: Gradients = SmallVec::new();
        gradients.push(
            ctx.needs_gradient(0).then(|| multiply_columns(op, &grad, weight, None, !transposed, None)).transpose()?,
        );
        gradients.push(None);
        if let Some(x) = saved_x.as_ref().filter(|_| ctx.needs_gradient(1)) {
            let (x, shape) = (x.get(op)?, weight.shape());
            gradients[1] = Some(match ctx.create_graph() {
                true => {
                    let (a, b) = (batch_as_columns(&grad)?, batch_as_columns(x)?);
                    let (a, b) = if transposed { (b, a) } else { (a, b) };
                    a.matmul(&b.transpose(-2, -1)?)?.reshape(shape)?
                }
                false => {
                    let slot = ctx.slot(1).and_then(|s| Some(s.with_layout(s.layout.reshape(&split)?)));
                    let (a, b) = (batch_as_columns(&grad.detach())?, batch_as_columns(&x.detach())?);
                    let (a, b) = if transposed { (b, a) } else { (a, b) };
                    let dtype = grad.dtype;
                    let b = matrix_transpose(&b);
                    let g = Gemm { out: slot, ..Gemm::plain(op, &a, &b, slice::from_ref(&EPILOGUES.product), &dtype) };
                    let made = g.compute_one()?;
                    made.with_layout(Layout { offset: made.layout.offset, ..Layout::contiguous(shape.clone()) })
                }
            });
        }
        if let Some(shape) = &bias_shape {
            gradients.push(match (ctx.needs_gradient(2), ctx.create_graph()) {
                (false, _) => None,
                (true, true) => Some(grad.sum([0, 3], false)?.reshape(shape)?),
                (true, false) => {
                    let slot = ctx.slot(2).and_then(|s| {
                        Some(s.with_layout(s.layout.reshape(&Shape::from([groups, grad.shape().dims()[2]]))?))
                    });
                    let sum = reduce::sum_into(op, &grad.detach(), [0, 3], false, slot)?;
                    Some(sum.with_layout(Layout { offset: sum.layout.offset, ..Layout::contiguous(shape.clone()) }))
                }
            });
        }
        Ok(gradients)
    }))
}

/// Views `[N, groups, rows, columns]` as `[groups, rows, N columns]`, so that a product also sums over the batch.
fn batch_as_columns(t: &Tensor) -> Result<Tensor> {
    let [n, groups, rows, columns] = sizes_4d(t);
    t.permute(&[1, 2, 0, 3])?.reshape([groups, rows, n * columns])
}

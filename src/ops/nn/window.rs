//! Windows over images, for convolution and pooling.
//!
//! This file has im2col and col2im, each of which is the gradient of the other, and the maximum and mean of windows. Each kernel takes
//! one launch without atomics, because each element of the result is written by one work-item. The public methods are in `conv` and
//! `pool`.
//!
//! Backends support only 2-D windows. A 1-D image is treated as an image with one row. A 3-D pool runs over the last two dims of each
//! slice first, and then over the depth with each H x W slice as one row. This is exact because the maximum and mean are separable.

use crate::MemoryFormat;
use crate::backend::problem::windows::{Divisor, Im2col, PoolTask, Pooling, Windows, sizes_4d};
use crate::ops::dispatch::prelude::*;
use crate::ops::nn::padding::Padding;

/// The maximum of kernel sizes, strides, paddings and dilations, so that their products cannot overflow.
const MAX_WINDOW_PARAMETER: usize = 1 << 30;

impl<const D: usize> Windows<D> {
    /// Creates windows of a fixed size over `image`.
    pub(crate) fn new(
        op: &'static str,
        image: [usize; D],
        kernel: [usize; D],
        [stride, padding, padding_after, dilation]: [[usize; D]; 4],
    ) -> Result<Windows<D>> {
        let mut grid = [0; D];
        for d in 0..D {
            let parameters = [kernel, stride, padding, padding_after, dilation];
            invalid!(op if parameters.iter().any(|numbers| numbers[d] >= MAX_WINDOW_PARAMETER),
                "kernel {kernel:?}, stride {stride:?}, padding {padding:?} and dilation {dilation:?} have to be below 2^30");
            invalid!(op if [kernel[d], stride[d], dilation[d]].contains(&0),
                "kernel {kernel:?}, stride {stride:?} and dilation {dilation:?} have to be above 0");
            let window = dilation[d].saturating_mul(kernel[d] - 1).saturating_add(1);
            let padded = image[d].saturating_add(padding[d]).saturating_add(padding_after[d]);
            invalid!(op if window > padded,
                "a window of {window} does not fit into an image of {} with its padding, {padded}", image[d]);
            grid[d] = (padded - window) / stride[d] + 1;
        }
        Ok(Windows { image, kernel, grid, stride, padding, padding_after, dilation, adaptive: false })
    }

    /// Creates `grid` windows that cover `image`, as adaptive pooling does.
    pub(crate) fn adaptive(image: [usize; D], grid: [usize; D]) -> Windows<D> {
        let (padding, one) = ([0; D], [1; D]);
        let (kernel, stride, dilation) = (one, one, one);
        Windows { image, kernel, grid, stride, padding, padding_after: padding, dilation, adaptive: true }
    }

    /// Returns the first and the end index of the image elements of window `o` along dim `d`. The window's elements are `dilation[d]`
    /// apart.
    pub(crate) fn input_range(&self, d: usize, o: usize) -> (usize, usize) {
        if self.adaptive {
            let (image, grid) = (self.image[d], self.grid[d]);
            return (o * image / grid, ((o + 1) * image).div_ceil(grid));
        }
        let (from, step) = (o * self.stride[d], self.dilation[d]);
        let end = from + step * (self.kernel[d] - 1) + 1;
        let skipped = self.padding[d].saturating_sub(from).div_ceil(step) * step;
        (from + skipped - self.padding[d], end.saturating_sub(self.padding[d]).min(self.image[d]))
    }

    /// Returns the windows along the last two dims. If there is only one dim, images have one row.
    pub(crate) fn last_two_dims(&self) -> Windows {
        self.select_dims(|numbers, other| match numbers[..] {
            [.., rows, columns] => [rows, columns],
            [columns] => [other, columns],
            [] => [other; 2],
        })
    }

    /// Returns the windows along the depth of a 3-D pool: each H x W plane of `plane` elements is treated as one row.
    pub(crate) fn depth_pass(&self, plane: usize) -> Windows {
        let along = self.select_dims(|numbers, other| [numbers[0], other]);
        Windows { image: [along.image[0], plane], grid: [along.grid[0], plane], ..along }
    }

    /// Returns the windows along the two dims that `pair` selects. The second argument of `pair` is the value for a dim that does not
    /// exist.
    fn select_dims(&self, pair: impl Fn([usize; D], usize) -> [usize; 2]) -> Windows {
        Windows {
            image: pair(self.image, 1),
            kernel: pair(self.kernel, 1),
            grid: pair(self.grid, 1),
            stride: pair(self.stride, 1),
            padding: pair(self.padding, 0),
            padding_after: pair(self.padding_after, 0),
            dilation: pair(self.dilation, 1),
            adaptive: self.adaptive,
        }
    }

    /// Returns the maximum of each window of x, which has the dims of [`as_images`]. Differentiable.
    pub(crate) fn max(self, op: &'static str, x: &Tensor) -> Result<Tensor> {
        Ok(if D < 3 { self.last_two_dims().max_of_planes(op, x)?.0 } else { self.max_of_slices(op, x)?.0 })
    }

    /// Returns the result of [`Windows::max`], and the index of each maximum within its image.
    pub(crate) fn max_with_indices(self, op: &'static str, x: &Tensor) -> Result<(Tensor, Tensor)> {
        if D < 3 {
            return self.last_two_dims().max_of_planes(op, x);
        }
        let (out, plane_indices, slice) = self.max_of_slices(op, x)?;
        let ([n, c, _, windows], shape) = (sizes_4d(&plane_indices), out.shape().clone());
        let columns = |t: &Tensor| t.reshape([n, c, t.numel() / (n * c).max(1)]);
        let plane_index = columns(&plane_indices)?.gather(2, &columns(&slice)?)?.reshape(&shape)?;
        let [h, w] = last_sizes(x);
        let before = slice.floor_divide_scalar(windows.max(1) as i64)?.mul_scalar((h * w) as i64)?;
        Ok((out, before.reshape(&shape)?.add(&plane_index)?))
    }

    /// Returns the maximum of each 3-D window and two index tensors. The first, `[N, C, D, windows]`, has the index of each maximum
    /// within its slice. The second, `[N, C, windows along the depth, windows]`, says which of the slices' maxima is the window's
    /// maximum. If several elements are equal, the first is the maximum.
    fn max_of_slices(self, op: &'static str, x: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
        let ([n, c, depth, h, w], [oh, ow]) = (last_sizes(x), self.last_two_dims().grid);
        let (rows, plane_indices) = self.last_two_dims().max_of_planes(op, &x.reshape([n, c * depth, h, w])?)?;
        let shape = [n, c, depth, oh * ow];
        let (out, slice) = self.depth_pass(oh * ow).max_of_planes(op, &rows.reshape(shape)?)?;
        Ok((out.reshape([n, c, self.grid[0], oh, ow])?, plane_indices.reshape(shape)?, slice))
    }

    /// Returns the mean of each window of x, which has the dims of [`as_images`]. Differentiable.
    pub(crate) fn mean(self, op: &'static str, x: &Tensor, divisor: Divisor) -> Result<Tensor> {
        if D < 3 {
            return self.last_two_dims().mean_of_planes(op, x, divisor);
        }
        let ([n, c, depth, h, w], [oh, ow]) = (last_sizes(x), self.last_two_dims().grid);
        let then = if let Divisor::Number(_) = divisor { Divisor::Number(1) } else { divisor };
        // In half precision, the mean of the slices' means would be rounded twice, so the means are computed in f32.
        let wide = if x.dtype.is_half() { x.to_dtype(DType::F32)? } else { x.shallow_clone() };
        let rows = self.last_two_dims().mean_of_planes(op, &wide.reshape([n, c * depth, h, w])?, divisor)?;
        let out = self.depth_pass(oh * ow).mean_of_planes(op, &rows.reshape([n, c, depth, oh * ow])?, then)?;
        out.reshape([n, c, self.grid[0], oh, ow])?.to_dtype(x.dtype)
    }

    /// Returns the first window and the end of the windows whose element `k` along dim `d` is inside the image.
    pub(crate) fn windows_inside(&self, d: usize, k: usize) -> (usize, usize) {
        let (tap, padding, stride) = (k * self.dilation[d], self.padding[d], self.stride[d]);
        let first = padding.saturating_sub(tap).div_ceil(stride);
        let last = (self.image[d] + padding).saturating_sub(tap).div_ceil(stride);
        (first.min(self.grid[d]), last.clamp(first.min(self.grid[d]), self.grid[d]))
    }
}

impl Windows {
    pub(crate) fn divisor(&self, o: [usize; 2], divisor: Divisor) -> usize {
        let size = |d: usize| {
            let (start, stop) = self.input_range(d, o[d]);
            let from = o[d] * self.stride[d];
            match divisor {
                Divisor::Window if !self.adaptive => {
                    (from + self.kernel[d]).min(self.image[d] + self.padding[d] + self.padding_after[d]) - from
                }
                _ => stop - start,
            }
        };
        if let Divisor::Number(n) = divisor { n } else { size(0) * size(1) }
    }

    /// Copies the elements of every window of x, `[N, C, image]`, to `[N, C, kernel, grid]`, or to `[C, kernel, N, grid]` for matrix
    /// products if `inside` is set. Elements in the padding are 0. Differentiable, one launch.
    pub(crate) fn im2col(self, op: &'static str, x: &Tensor, inside: bool) -> Result<Tensor> {
        let (n, c) = (x.shape().dims()[0], x.shape().dims()[1]);
        let ([kh, kw], [oh, ow]) = (self.kernel, self.grid);
        let shape = if inside { [c, kh, kw, n, oh, ow] } else { [n, c, kh, kw, oh, ow] };
        let out = backend::compute(shape, x.dtype, x.device(), |b, out| match x.numel() {
            // The image is empty, so every window is entirely padding.
            0 => out.zero_().map(drop),
            _ => b.im2col(&Im2col { windows: &self, x, out, inside }),
        })?;
        Ok(autograd::record_unary_differentiable(op, out, x, move |grad| match inside {
            true => self.col2im(op, &grad.permute(&[3, 0, 1, 2, 4, 5])?),
            false => self.col2im(op, &grad),
        }))
    }

    /// Adds each element of `columns`, `[N, C, kernel, grid]`, to the element of an image `[N, C, image]` from which im2col would read
    /// it. Differentiable, one launch.
    pub(crate) fn col2im(self, op: &'static str, columns: &Tensor) -> Result<Tensor> {
        let dims = columns.shape().dims();
        let shape = [dims[0], dims[1], self.image[0], self.image[1]];
        let out = backend::compute(shape, columns.dtype, columns.device(), |b, out| match columns.numel() {
            0 => out.zero_().map(drop),
            _ => b.col2im(&self, columns, out),
        })?;
        Ok(autograd::record_unary_differentiable(op, out, columns, move |grad| self.im2col(op, &grad, false)))
    }

    /// Computes the maximum of each window of planes `[N, C, image]`, and the index of each maximum.
    fn max_of_planes(self, op: &'static str, x: &Tensor) -> Result<(Tensor, Tensor)> {
        let format = x.memory_format();
        let index =
            Tensor::empty_with_layout(Layout::with_format(self.pooled_shape(x), format), DType::I64, x.device())?;
        let out = self.run_task(PoolTask::Max, x, &index, self.pooled_shape(x), format)?;
        if !autograd::is_tracked(&[x]) || !x.dtype.is_float() {
            return Ok((out, index));
        }
        let (saved, shape) = (Saved::new(&index), x.shape().clone());
        let out = autograd::record_unary_differentiable(op, out, x, move |grad| {
            let index = saved.get(op)?;
            if !autograd::is_tracked(&[&grad]) {
                return self.run_task(PoolTask::MaxBackward, &grad, index, shape.clone(), format);
            }
            let ([n, c, oh, ow], [h, w]) = (sizes_4d(&grad), self.image);
            let flat = |t: &Tensor| t.reshape([n, c, oh * ow]);
            Tensor::zeros([n, c, h * w], &grad)?.scatter_add(2, &flat(index)?, &flat(&grad)?)?.reshape(&shape)
        });
        Ok((out, index))
    }

    /// Computes the gradient of x from that of [`Windows::max`], and from the index of each maximum. Not recorded.
    pub(crate) fn max_backward(&self, grad: &Tensor, index: &Tensor, x: &Tensor) -> Result<Tensor> {
        let format = x.memory_format();
        self.run_task(PoolTask::MaxBackward, grad, &index.to_memory_format(format)?, x.shape().clone(), format)
    }

    /// Computes the mean of each window of planes `[N, C, image]`.
    fn mean_of_planes(self, op: &'static str, x: &Tensor, divisor: Divisor) -> Result<Tensor> {
        let (shape, format) = (x.shape().clone(), x.memory_format());
        let out = self.run_task(PoolTask::Mean(divisor), x, x, self.pooled_shape(x), format)?;
        let back = move |grad: Tensor| self.mean_backward(op, &grad, divisor, shape.clone(), format);
        Ok(autograd::record_unary_differentiable(op, out, x, back))
    }

    /// Computes the gradient of [`Windows::mean_of_planes`], which is differentiable itself.
    fn mean_backward(
        self,
        op: &'static str,
        grad: &Tensor,
        divisor: Divisor,
        shape: Shape,
        format: MemoryFormat,
    ) -> Result<Tensor> {
        let out = self.run_task(PoolTask::MeanBackward(divisor), grad, grad, shape, format)?;
        Ok(autograd::record_unary_differentiable(op, out, grad, move |grad| self.mean_of_planes(op, &grad, divisor)))
    }

    fn pooled_shape(&self, x: &Tensor) -> Shape {
        let dims = x.shape().dims();
        Shape::from([dims[0], dims[1], self.grid[0], self.grid[1]])
    }

    /// Runs a pooling task. The result has the dtype of x and the given shape and format. `index`, which has the same format, is used
    /// only by tasks with maxima.
    fn run_task(
        &self,
        task: PoolTask,
        x: &Tensor,
        index: &Tensor,
        shape: Shape,
        format: MemoryFormat,
    ) -> Result<Tensor> {
        let out = Tensor::empty_with_layout(Layout::with_format(shape, format), x.dtype, x.device())?;
        if out.numel() == 0 {
            return Ok(out);
        }
        let index_is_written = (task == PoolTask::Max).then_some(index);
        match x.numel() {
            // There are no windows, so the gradient is zero.
            0 => drop(out.zero_()?),
            _ => backend::launch([&out].into_iter().chain(index_is_written), |b| {
                b.pool(&Pooling { windows: self, task, x, index, out: &out })
            })?,
        }
        Ok(out)
    }
}

/// Views a weight `[A, B, kernel]` with one to three spatial dims as a weight with two. The slices of a 3-D kernel become part of dim B.
pub(crate) fn weight_as_2d<const D: usize>(weight: &Tensor) -> Result<Tensor> {
    match weight.shape().dims() {
        &[a, b, kd, kh, kw] => weight.reshape([a, b * kd, kh, kw]),
        _ if D == 1 => weight.unsqueeze(2),
        _ => Ok(weight.shallow_clone()),
    }
}

/// Views x, `[C, dims..]` or `[N, C, dims..]`, with a batch dim. 1-D images become images with one row: `[N, C, 1, L]`.
pub(crate) fn as_images(op: &'static str, x: &Tensor, directions: usize) -> Result<Tensor> {
    let batched = match x.rank().checked_sub(directions) {
        Some(1) => false,
        Some(2) => true,
        _ => {
            let dims = ["L", "H, W", "D, H, W"][directions - 1];
            fail!(op, "the input is [C, {dims}] or [N, C, {dims}], this one has shape {}", x.shape());
        }
    };
    let x = if directions == 1 { x.unsqueeze(-2)? } else { x.shallow_clone() };
    if batched { Ok(x) } else { x.unsqueeze(0) }
}

/// Undoes [`as_images`]: returns `out` with the batch and spatial dims that `x` had.
pub(crate) fn restore_rank(out: &Tensor, x: &Tensor, directions: usize) -> Result<Tensor> {
    let out = if directions == 1 { out.squeeze(-2)? } else { out.shallow_clone() };
    if x.rank() == directions + 2 { Ok(out) } else { out.squeeze(0) }
}

pub(crate) fn last_sizes<const D: usize>(t: &Tensor) -> [usize; D] {
    let dims = t.shape().dims();
    std::array::from_fn(|d| dims[dims.len() - D + d])
}

/// Copies the elements of each window of images to a column (PyTorch's `nn.functional.unfold`).
///
/// `[N, C, H, W]` gives `[N, C KH KW, windows]`, and `[C, H, W]` gives `[C KH KW, windows]`. Each option is a pair: a number for rows and a
/// number for columns. Elements in the padding are 0. Any dtype, one launch. Differentiable. Fails with [`Error::Invalid`] for a wrong
/// number of dims, windows larger than the padded image, or a stride or dilation of 0.
///
/// ```
/// use claystone::{Device, Tensor, nn::functional::{fold, unfold}};
/// let x = Tensor::arange(0, 9, 1, Device::Cpu)?.reshape([1, 3, 3])?;
/// let columns = unfold(&x, [2, 2], [1, 1], [0, 0], [1, 1])?;
/// assert_eq!(columns.i((.., 0))?.to_vec::<f32>()?, [0.0, 1.0, 3.0, 4.0]);
/// let overlaps = fold(&columns, [3, 3], [2, 2], [1, 1], [0, 0], [1, 1])?;
/// assert_eq!(overlaps.i((0, 1, 1))?.item::<f32>()?, 16.0); // four windows have the 4 in the middle
/// # Ok::<(), claystone::Error>(())
/// ```
#[track_caller]
pub fn unfold(
    x: &Tensor,
    kernel: [usize; 2],
    dilation: [usize; 2],
    padding: impl Into<Padding<2>>,
    stride: [usize; 2],
) -> Result<Tensor> {
    let padding = padding.into();
    return_replacement!(op = "unfold2d", [x], &kernel, &dilation, padding, &stride);
    let images = as_images(op, x, 2)?;
    let [n, c, ..] = sizes_4d(&images);
    let [before, padding_after] = padding.sides(op, kernel, stride, dilation)?;
    let windows = Windows::new(op, last_sizes(&images), kernel, [stride, before, padding_after, dilation])?;
    let columns = windows.im2col(op, &images, false)?;
    let rows = c * kernel[0] * kernel[1];
    let columns = columns.reshape([n, rows, windows.grid[0] * windows.grid[1]])?;
    if x.rank() == 4 { Ok(columns) } else { columns.squeeze(0) }
}

/// Adds each element of the columns, `[N, C KH KW, windows]` or `[C KH KW, windows]`, to the element of images of `output_size` from
/// which [`unfold`] would read it (PyTorch's `nn.functional.fold`). Floats, one launch. Differentiable. Fails as [`unfold`] does, and
/// with [`Error::Invalid`] for columns of a wrong shape.
#[track_caller]
pub fn fold(
    columns: &Tensor,
    output_size: [usize; 2],
    kernel: [usize; 2],
    dilation: [usize; 2],
    padding: impl Into<Padding<2>>,
    stride: [usize; 2],
) -> Result<Tensor> {
    let op = "fold";
    columns.dtype.check_float(op)?;
    let padding = padding.into();
    return_replacement!(op, [columns], &output_size, &kernel, &dilation, padding, &stride);
    let [before, padding_after] = padding.sides(op, kernel, stride, dilation)?;
    let windows = Windows::new(op, output_size, kernel, [stride, before, padding_after, dilation])?;
    let taps = kernel[0] * kernel[1];
    let (batch, rows, count) = match *columns.shape().dims() {
        [rows, count] => (1, rows, count),
        [n, rows, count] => (n, rows, count),
        _ => fail!(op, "columns are [N, C KH KW, windows], these have shape {}", columns.shape()),
    };
    let [oh, ow] = windows.grid;
    invalid!(op if rows % taps != 0 || count != oh.saturating_mul(ow),
        "columns of shape {} do not fit kernels of {taps} elements and {oh} x {ow} windows", columns.shape());
    let columns_6 = columns.reshape([batch, rows / taps, kernel[0], kernel[1], oh, ow])?;
    let images = windows.col2im(op, &columns_6)?;
    if columns.rank() == 3 { Ok(images) } else { images.squeeze(0) }
}

//! Pooling: the maximum or the mean of each window.

use crate::backend::problem::windows::{Divisor, Windows};
use crate::ops::dispatch::prelude::*;
use crate::ops::nn::padding::Padding;
use crate::ops::nn::window::{as_images, last_sizes, restore_rank};

options! {
    /// Options of [`Tensor::max_pool2d`] and the other maximum pools, with PyTorch's defaults.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct MaxPoolOptions<const D: usize> {
        /// The distance between adjacent windows, in elements; if `None`, the size of a window.
        pub stride: Option<[usize; D]> = None,
        /// The number of padding elements around the image, at most half a window on each side. They are never the maximum.
        pub padding: Padding<D> = Padding::Valid,
        /// The distance between adjacent elements of a window, in elements.
        pub dilation: [usize; D] = [1; D],
        /// Whether a window that starts inside the padded image can extend beyond the end of the padded image.
        pub ceil_mode: bool = false,
    }

    /// Options of [`Tensor::avg_pool2d`] and the other average pools, with PyTorch's defaults.
    #[derive(Debug, Clone, Copy, PartialEq, Eq)]
    pub struct AvgPoolOptions<const D: usize> {
        /// The distance between adjacent windows, in elements; if `None`, the size of a window.
        pub stride: Option<[usize; D]> = None,
        /// The number of zeros around the image, at most half a window on each side.
        pub padding: Padding<D> = Padding::Valid,
        /// Whether a window that starts inside the padded image can extend beyond the end of the padded image.
        pub ceil_mode: bool = false,
        /// Whether the mean includes the zeros of the padding.
        pub count_include_pad: bool = true,
        /// The divisor of the sums; if `None`, the number of elements of a window.
        pub divisor_override: Option<usize> = None,
    }
}

/// A way to divide images into windows, and the arguments of a call by name that describe it.
trait PoolWindows<const D: usize>: Copy {
    fn windows(self, op: &'static str, x: &Tensor) -> Result<Windows<D>>;
    fn arguments(self) -> Vec<Argument>;
}

/// Windows of a fixed size. With `ceil_mode`, the last window may extend beyond the padding but does not start there.
impl<const D: usize> PoolWindows<D> for ([usize; D], MaxPoolOptions<D>) {
    fn windows(self, op: &'static str, x: &Tensor) -> Result<Windows<D>> {
        let (kernel, MaxPoolOptions { stride, padding, dilation, ceil_mode }) = self;
        let (image, stride): ([usize; D], _) = (last_sizes(x), stride.unwrap_or(kernel));
        invalid!(op if x.shape().dims()[2..].contains(&0), "the images are empty, of shape {}", x.shape());
        let [padding, padding_after] = padding.sides(op, kernel, stride, dilation)?;
        let mut end = padding_after;
        for d in 0..D {
            let reach = dilation[d].saturating_mul(kernel[d].saturating_sub(1)).saturating_add(1);
            let most = padding[d].max(padding_after[d]);
            invalid!(op if most > reach / 2, "a padding of {most} is more than half a window of {reach}");
            end[d] = end[d].saturating_add(if ceil_mode { stride[d].saturating_sub(1) } else { 0 });
        }
        let mut windows =
            Windows { padding_after, ..Windows::new(op, image, kernel, [stride, padding, end, dilation])? };
        for d in 0..D {
            if ceil_mode && (windows.grid[d] - 1) * stride[d] >= image[d] + padding[d] {
                windows.grid[d] -= 1;
            }
            // Only a dilated window that begins in the padding can miss all elements of a small image.
            let outside = |o: &usize| {
                let (first, end) = windows.input_range(d, *o);
                first >= end
            };
            invalid!(op if let Some(o) = (0..windows.grid[d]).take_while(|o| o * stride[d] < padding[d]).find(outside),
                "window {o} along an image dim of {} is all padding: it has {} elements, {} apart", image[d], kernel[d], dilation[d]);
        }
        Ok(windows)
    }

    fn arguments(self) -> Vec<Argument> {
        let (kernel, MaxPoolOptions { stride, padding, dilation, ceil_mode }) = self;
        let stride = stride.as_ref().map_or(Argument::None, Argument::from);
        vec![(&kernel).into(), stride, padding.into(), (&dilation).into(), ceil_mode.into()]
    }
}

/// A fixed number of windows, for an adaptive pool.
impl<const D: usize> PoolWindows<D> for [usize; D] {
    fn windows(self, op: &'static str, x: &Tensor) -> Result<Windows<D>> {
        invalid!(op if x.shape().dims()[2..].contains(&0), "the images are empty, of shape {}", x.shape());
        Ok(Windows::adaptive(last_sizes(x), self))
    }

    fn arguments(self) -> Vec<Argument> {
        vec![(&self).into()]
    }
}

#[track_caller]
fn max_pool<const D: usize>(op: &'static str, original: &Tensor, pool: impl PoolWindows<D>) -> Result<Tensor> {
    unsupported!(op if original.dtype == DType::Bool, original.dtype, "numbers");
    return_replacement!(op, [original]; || pool.arguments());
    let x = as_images(op, original, D)?;
    restore_rank(&pool.windows(op, &x)?.max(op, &x)?, original, D)
}

#[track_caller]
fn max_pool_with_indices<const D: usize>(
    op: &'static str,
    original: &Tensor,
    pool: impl PoolWindows<D>,
) -> Result<(Tensor, Tensor)> {
    unsupported!(op if original.dtype == DType::Bool, original.dtype, "numbers");
    return_replacement!(op, [original]; || pool.arguments());
    let x = as_images(op, original, D)?;
    let (values, index) = pool.windows(op, &x)?.max_with_indices(op, &x)?;
    Ok((restore_rank(&values, original, D)?, restore_rank(&index, original, D)?))
}

#[track_caller]
fn avg_pool<const D: usize>(
    op: &'static str,
    original: &Tensor,
    kernel: [usize; D],
    options: AvgPoolOptions<D>,
) -> Result<Tensor> {
    original.dtype.check_float(op)?;
    let AvgPoolOptions { stride, padding, ceil_mode, count_include_pad, divisor_override } = options;
    let arguments = || {
        let stride = stride.as_ref().map_or(Argument::None, Argument::from);
        let switches = [ceil_mode.into(), count_include_pad.into(), divisor_override.into()];
        [(&kernel).into(), stride, padding.into()].into_iter().chain(switches).collect()
    };
    return_replacement!(op, [original]; arguments);
    let x = as_images(op, original, D)?;
    let divisor = match divisor_override {
        Some(0) => return Err(Error::invalid(op, "the divisor must not be 0")),
        Some(n) => Divisor::Number(n),
        None if count_include_pad => Divisor::Window,
        None => Divisor::InsideImage,
    };
    let windows = (kernel, MaxPoolOptions { stride, padding, dilation: [1; D], ceil_mode }).windows(op, &x)?;
    restore_rank(&windows.mean(op, &x, divisor)?, original, D)
}

#[track_caller]
fn adaptive_avg_pool<const D: usize>(op: &'static str, original: &Tensor, size: [usize; D]) -> Result<Tensor> {
    original.dtype.check_float(op)?;
    return_replacement!(op, [original], &size);
    let x = as_images(op, original, D)?;
    let windows = size.windows(op, &x)?;
    // For a single window, a reduction is used, because it divides the window among work-items, which a pool does not.
    let dims: Dims<isize> = (2..x.rank() as isize).collect();
    let out = if size == [1; D] { x.mean(&dims[..], true)? } else { windows.mean(op, &x, Divisor::InsideImage)? };
    restore_rank(&out, original, D)
}

/// Generates methods of `Tensor`, each of which calls one of the functions above.
macro_rules! pools {
    ($($(#[doc = $doc:literal])+ $name:ident($($arg:ident: $t:ty),+) -> $out:ty: $pool:ident($($value:expr),+);)*) => {
        impl Tensor { $(
            $(#[doc = $doc])+
            #[track_caller]
            pub fn $name(&self, $($arg: $t),+) -> Result<$out> {
                $pool(stringify!($name), self, $($value),+)
            }
        )* }
    };
}

pools! {
    /// The maximum of each window (PyTorch's `max_pool1d`): x is `[N, C, L]` or `[C, L]`. All dtypes except bool. Differentiable.
    /// Fails as [`Tensor::max_pool2d`] does.
    max_pool1d(kernel: usize, options: MaxPoolOptions<1>) -> Tensor: max_pool(([kernel], options));
    /// The maximum of each window (PyTorch's `max_pool2d`): x is `[N, C, H, W]` or `[C, H, W]`. A window with a NaN gives NaN. All dtypes
    /// except bool. One launch. Differentiable: the gradient goes to the first of equal elements. Fails with [`Error::Invalid`] for a wrong
    /// number of dims, images that are empty or smaller than a window, a padding of more than half a window, a dilated window that is
    /// entirely padding, or a stride of 0; [`Error::UnsupportedDType`] for bool.
    ///
    /// ```
    /// use claystone::{Device, MaxPoolOptions, Tensor};
    /// let x = Tensor::arange(0, 16, 1, Device::Cpu)?.reshape([1, 4, 4])?;
    /// let y = x.max_pool2d([2, 2], MaxPoolOptions::default())?;
    /// assert_eq!(y.to_vec::<f32>()?, [5.0, 7.0, 13.0, 15.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    max_pool2d(kernel: [usize; 2], options: MaxPoolOptions<2>) -> Tensor: max_pool((kernel, options));
    /// The maximum of each window (PyTorch's `max_pool3d`): x is `[N, C, D, H, W]` or `[C, D, H, W]`. All dtypes except bool. Two launches.
    /// Differentiable. Fails as [`Tensor::max_pool2d`] does.
    max_pool3d(kernel: [usize; 3], options: MaxPoolOptions<3>) -> Tensor: max_pool((kernel, options));
    /// Returns the result of [`Tensor::max_pool1d`], and the index of each maximum in its row, as i64 (PyTorch's `return_indices`). Fails
    /// as [`Tensor::max_pool2d`] does.
    max_pool1d_with_indices(kernel: usize, options: MaxPoolOptions<1>) -> (Tensor, Tensor): max_pool_with_indices(([kernel], options));
    /// Returns the result of [`Tensor::max_pool2d`], and the index of each maximum in its image, `row * W + column`, as i64 (PyTorch's
    /// `return_indices`).
    max_pool2d_with_indices(kernel: [usize; 2], options: MaxPoolOptions<2>) -> (Tensor, Tensor): max_pool_with_indices((kernel, options));
    /// Returns the result of [`Tensor::max_pool3d`], and the index of each maximum in its image, `(slice * H + row) * W + column`, as i64
    /// (PyTorch's `return_indices`). Fails as [`Tensor::max_pool2d`] does.
    ///
    /// ```
    /// use claystone::{Device, MaxPoolOptions, Tensor};
    /// let x = Tensor::arange(0, 16, 1, Device::Cpu)?.reshape([1, 2, 2, 4])?;
    /// let (y, at) = x.max_pool3d_with_indices([2, 2, 2], MaxPoolOptions::default())?;
    /// assert_eq!(y.to_vec::<f32>()?, [13.0, 15.0]);
    /// assert_eq!(at.to_vec::<i64>()?, [13, 15]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    max_pool3d_with_indices(kernel: [usize; 3], options: MaxPoolOptions<3>) -> (Tensor, Tensor): max_pool_with_indices((kernel, options));
    /// The mean of each window (PyTorch's `avg_pool1d`): x is `[N, C, L]` or `[C, L]`. Floats. Differentiable. Fails as
    /// [`Tensor::avg_pool2d`] does.
    avg_pool1d(kernel: usize, options: AvgPoolOptions<1>) -> Tensor: avg_pool([kernel], options);
    /// The mean of each window (PyTorch's `avg_pool2d`): x is `[N, C, H, W]` or `[C, H, W]`. Floats. One launch. Differentiable.
    /// Fails as [`Tensor::max_pool2d`] does.
    avg_pool2d(kernel: [usize; 2], options: AvgPoolOptions<2>) -> Tensor: avg_pool(kernel, options);
    /// The mean of each window (PyTorch's `avg_pool3d`): x is `[N, C, D, H, W]` or `[C, D, H, W]`. Floats. Two launches, four for half
    /// precision. Differentiable. Fails as [`Tensor::avg_pool2d`] does.
    ///
    /// ```
    /// use claystone::{AvgPoolOptions, Device, Tensor};
    /// let x = Tensor::arange(0, 8, 1, Device::Cpu)?.reshape([1, 2, 2, 2])?;
    /// assert_eq!(x.avg_pool3d([2, 2, 2], AvgPoolOptions::default())?.to_vec::<f32>()?, [3.5]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    avg_pool3d(kernel: [usize; 3], options: AvgPoolOptions<3>) -> Tensor: avg_pool(kernel, options);
    /// Divides each row into `size` parts and returns their means (PyTorch's `adaptive_avg_pool1d`): x is `[N, C, L]` or `[C, L]`.
    /// Floats. Differentiable. Fails as [`Tensor::adaptive_avg_pool2d`] does.
    adaptive_avg_pool1d(size: usize) -> Tensor: adaptive_avg_pool([size]);
    /// Divides each image into `size` rows and columns of parts and returns the mean of each part (PyTorch's `adaptive_avg_pool2d`): x is
    /// `[N, C, H, W]` or `[C, H, W]`. Parts overlap if the image cannot be divided evenly. `[1, 1]` is global average pooling. Floats.
    /// Differentiable. Fails with [`Error::Invalid`] for a wrong number of dims or empty images.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let x = Tensor::arange(0, 5, 1, Device::Cpu)?.reshape([1, 1, 5])?;
    /// assert_eq!(x.adaptive_avg_pool2d([1, 2])?.to_vec::<f32>()?, [1.0, 3.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    adaptive_avg_pool2d(size: [usize; 2]) -> Tensor: adaptive_avg_pool(size);
    /// Divides each image into `size` slices, rows and columns of parts and returns their means (PyTorch's `adaptive_avg_pool3d`): x is
    /// `[N, C, D, H, W]` or `[C, D, H, W]`. Floats. Differentiable. Fails as [`Tensor::adaptive_avg_pool2d`] does.
    adaptive_avg_pool3d(size: [usize; 3]) -> Tensor: adaptive_avg_pool(size);
    /// Divides each row into `size` parts and returns their maxima (PyTorch's `adaptive_max_pool1d`). All dtypes except bool. Differentiable.
    /// Fails as [`Tensor::adaptive_avg_pool2d`] does.
    adaptive_max_pool1d(size: usize) -> Tensor: max_pool([size]);
    /// Divides each image into `size` rows and columns of parts and returns their maxima (PyTorch's `adaptive_max_pool2d`). All dtypes except bool.
    /// Differentiable. Fails as [`Tensor::adaptive_avg_pool2d`] does.
    adaptive_max_pool2d(size: [usize; 2]) -> Tensor: max_pool(size);
    /// Divides each image into `size` slices, rows and columns of parts and returns their maxima (PyTorch's `adaptive_max_pool3d`).
    /// All dtypes except bool. Differentiable. Fails as [`Tensor::adaptive_avg_pool2d`] does.
    adaptive_max_pool3d(size: [usize; 3]) -> Tensor: max_pool(size);
    /// Returns the result of [`Tensor::adaptive_max_pool1d`], and the index of each maximum in its row, as i64 (PyTorch's
    /// `return_indices`). Fails as [`Tensor::adaptive_avg_pool2d`] does.
    adaptive_max_pool1d_with_indices(size: usize) -> (Tensor, Tensor): max_pool_with_indices([size]);
    /// Returns the result of [`Tensor::adaptive_max_pool2d`], and the index of each maximum in its image, `row * W + column`, as i64
    /// (PyTorch's `return_indices`). Fails as [`Tensor::adaptive_avg_pool2d`] does.
    adaptive_max_pool2d_with_indices(size: [usize; 2]) -> (Tensor, Tensor): max_pool_with_indices(size);
    /// Returns the result of [`Tensor::adaptive_max_pool3d`], and the index of each maximum in its image,
    /// `(slice * H + row) * W + column`, as i64 (PyTorch's `return_indices`). Fails as [`Tensor::adaptive_avg_pool2d`] does.
    adaptive_max_pool3d_with_indices(size: [usize; 3]) -> (Tensor, Tensor): max_pool_with_indices(size);
}

impl Tensor {
    /// Computes the gradient of x from that of [`Tensor::max_pool2d_with_indices`]'s maxima, which is this tensor, and from the indices
    /// (PyTorch's `max_pool2d_with_indices_backward`). Returns a tensor of x's shape. Floats, one launch. Not recorded for autograd: for callers
    /// that store the indices themselves. Fails with [`Error::ShapeMismatch`] if the gradient and the indices do not have the shape of the
    /// maxima, and as [`Tensor::max_pool2d`] does.
    ///
    /// ```
    /// use claystone::{Device, MaxPoolOptions, Tensor};
    /// let x = Tensor::arange(0, 16, 1, Device::Cpu)?.reshape([1, 4, 4])?;
    /// let (y, at) = x.max_pool2d_with_indices([4, 4], MaxPoolOptions::default())?;
    /// let grad = y.ones_like()?.max_pool2d_backward(&x, &at, [4, 4], MaxPoolOptions::default())?;
    /// assert_eq!(grad.to_vec::<f32>()?[14..], [0.0, 1.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn max_pool2d_backward(
        &self,
        x: &Tensor,
        indices: &Tensor,
        kernel: [usize; 2],
        options: MaxPoolOptions<2>,
    ) -> Result<Tensor> {
        let op = "max_pool2d_backward";
        x.dtype.check_float(op)?;
        same_dtype(op, &[x, self])?;
        same_device(op, &[x, self, indices])?;
        unsupported!(op if indices.dtype != DType::I64, indices.dtype, "indices of i64");
        return_replacement!(op, [self, x, indices]; || (kernel, options).arguments());
        let images = as_images(op, x, 2)?;
        let windows = (kernel, options).windows(op, &images)?;
        let (grad, at) = (as_images(op, self, 2)?, as_images(op, indices, 2)?);
        let maxima = [images.shape().dims()[..2].to_vec(), windows.grid.to_vec()].concat();
        for t in [&grad, &at] {
            mismatch!(op if t.shape().dims() != maxima, x, t, "the maxima have the shape {maxima:?}");
        }
        restore_rank(&no_grad(|| windows.max_backward(&grad, &at, &images))?, x, 2)
    }
}

impl<const D: usize> MaxPoolOptions<D> {
    fn from_args(a: &Args) -> Result<Self> {
        let (stride, padding, dilation) =
            (a.read_optional(1, Args::spatial_sizes)?, Padding::from_args(a, 2)?, a.spatial_sizes(3)?);
        Ok(MaxPoolOptions { stride, padding, dilation, ceil_mode: a.bool(4)? })
    }
}

impl<const D: usize> AvgPoolOptions<D> {
    fn from_args(a: &Args) -> Result<Self> {
        Ok(AvgPoolOptions {
            stride: a.read_optional(1, Args::spatial_sizes)?,
            padding: Padding::from_args(a, 2)?,
            ceil_mode: a.bool(3)?,
            count_include_pad: a.bool(4)?,
            divisor_override: a.read_optional(5, Args::size)?,
        })
    }
}

/// Reads argument `i` of a call by name as the size of a window or of a result with one dim.
fn read_size_1d(a: &Args, i: usize) -> Result<usize> {
    a.spatial_sizes(i).map(|[n]| n)
}

/// Reads argument `i` of a call by name as the sizes of a window or of a result with several dims.
fn read_sizes<const D: usize>(a: &Args, i: usize) -> Result<[usize; D]> {
    a.spatial_sizes(i)
}

/// Generates the catalogue entries of the pools.
macro_rules! pool_operations {
    ($($read:ident: $max:ident $indices:ident $avg:ident $adaptive_avg:ident $adaptive_max:ident $adaptive_indices:ident;)*) => {
        operations! {
            $($max(input: x, kernel_size: sizes, stride: sizes?, padding: padding = 0, dilation: sizes = 1, ceil_mode: bool = false)
                functional: NeuralNetwork, Numbers -> Same, differentiable
                => |a| a.tensor(0)?.$max($read(a, 0)?, MaxPoolOptions::from_args(a)?);)*
            $($indices(input: x, kernel_size: sizes, stride: sizes?, padding: padding = 0, dilation: sizes = 1, ceil_mode: bool = false)
                functional: NeuralNetwork, Numbers -> Same, differentiable
                => |a| a.tensor(0)?.$indices($read(a, 0)?, MaxPoolOptions::from_args(a)?);)*
            $($avg(input: x, kernel_size: sizes, stride: sizes?, padding: padding = 0,
                ceil_mode: bool = false, count_include_pad: bool = true, divisor_override: size?)
                functional: NeuralNetwork, Floats -> Same, differentiable
                => |a| a.tensor(0)?.$avg($read(a, 0)?, AvgPoolOptions::from_args(a)?);)*
            $($adaptive_avg(input: x, output_size: sizes @$read) functional: NeuralNetwork, Floats -> Same, differentiable;)*
            $($adaptive_max(input: x, output_size: sizes @$read) functional: NeuralNetwork, Numbers -> Same, differentiable;)*
            $($adaptive_indices(input: x, output_size: sizes @$read) functional: NeuralNetwork, Numbers -> Same, differentiable;)*
            max_pool2d_backward(grad: x, input: x, indices: x, kernel_size: sizes, stride: sizes?, padding: padding = 0, dilation: sizes = 1, ceil_mode: bool = false)
                "max_pool2d_with_indices_backward": NeuralNetwork, Floats -> Same
                => |a| a.tensor(0)?.max_pool2d_backward(a.tensor(1)?, a.tensor(2)?, read_sizes(a, 0)?, MaxPoolOptions::from_args(a)?);
        }
    };
}

pool_operations! {
    read_size_1d: max_pool1d max_pool1d_with_indices avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d adaptive_max_pool1d_with_indices;
    read_sizes: max_pool2d max_pool2d_with_indices avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d adaptive_max_pool2d_with_indices;
    read_sizes: max_pool3d max_pool3d_with_indices avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d adaptive_max_pool3d_with_indices;
}

//! Convolutions and transposed convolutions.
//!
//! OpenCL devices compute most convolutions, and their double backward pass, by im2col and one matrix product. The columns of all
//! windows, `[C, kernel, N, windows]`, are multiplied by the weight `[O, C kernel]`; groups are a batch dim, and the bias is part of the
//! epilogue. This takes two launches, and a third to reorder a batch; windows of a single element need no im2col and take only one
//! launch. A transposed convolution is a product followed by col2im. The gradients use the same two compositions. Columns are created in
//! blocks of bounded size and are not kept; the gradient of the weight creates the columns again.
//!
//! A 3-D convolution is reduced to 2-D: im2col along the depth turns the slices of a window into channels, for which the weight already
//! has the right order. A transposed convolution adds up the results for the slices of a window.
//!
//! A [`Convolution`] implemented by a backend needs one launch forward and one or two for each gradient, without columns in memory:
//! - x86-64 CPUs have an implementation, except for windows of a single element.
//! - OpenCL devices have an implementation for depthwise convolutions with windows of at most 64 elements.
//! - With tensor cores, OpenCL devices also have an implementation for most other windows. It takes one launch for channels-last images and
//!   weights, and copies tensors of another memory format first. The image is saved for the backward pass.
//!
//! OpenCL devices that use image objects (`image2d_t`) have a kernel for the forward pass only, and their gradients are products of
//! columns.

mod columns;
pub(crate) mod options;

use crate::backend::problem::conv::{Conv2d, Convolution};
use crate::backend::problem::windows::{Windows, sizes_4d};
use crate::ops::dispatch::prelude::*;
use crate::ops::nn::conv::columns::{Im2colConvolution, multiply_columns};
use crate::ops::nn::window::{as_images, last_sizes, restore_rank, weight_as_2d};
use crate::ops::reduce;

pub use crate::ops::nn::conv::options::{ConvOptions, ConvTransposeOptions};

/// Generates methods of `Tensor`, each of which calls one of the functions below.
macro_rules! convolutions {
    ($($(#[doc = $doc:literal])+ $name:ident($options:ty): $convolve:ident;)*) => {
        impl Tensor { $(
            $(#[doc = $doc])+
            #[track_caller]
            pub fn $name(&self, weight: &Tensor, bias: Option<&Tensor>, options: $options) -> Result<Tensor> {
                let _caller = Caller::enter();
                let (op, inputs): (_, Dims<&Tensor>) =
                    (stringify!($name), [self, weight].into_iter().chain(bias).collect());
                cast_first!(autocast_inputs(op, &inputs)?, |x| x[0].$name(&x[1], x.get(2), options));
                return_replacement!(op, inputs; || options.arguments());
                $convolve(op, &inputs, options)
            }
        )* }
    };
}

convolutions! {
    /// Convolves x `[N, C, L]` or `[C, L]` with `weight` `[O, C / groups, K]` and adds `bias` `[O]` (PyTorch's `conv1d`). The result is
    /// `[N, O, windows]`. Floats. Differentiable with respect to x, weight and bias. Fails as [`Tensor::conv2d`] does.
    conv1d(ConvOptions<1>): convolution;
    /// Convolves x `[N, C, H, W]` or `[C, H, W]` with `weight` `[O, C / groups, KH, KW]` and adds `bias` `[O]` (PyTorch's `conv2d`). The
    /// result is `[N, O, rows, columns]` of windows. Floats. Differentiable with respect to x, weight and bias; x and the weight are kept
    /// for the backward pass.
    ///
    /// One launch computes most convolutions on the CPU, most depthwise convolutions, and windows of a single element. Any other
    /// convolution takes two launches for each 16 MiB of columns, or three for a batch and on tensor cores.
    ///
    /// The result is contiguous, except that on tensor cores it is [`MemoryFormat::ChannelsLast`](crate::MemoryFormat::ChannelsLast) if x
    /// or the weight is channels-last, as in PyTorch. If both are channels-last, and their channels are a multiple of 16 bytes, there is
    /// one launch without copies. On tensor cores, if x has fewer than eight channels, an infinity or NaN in the gradient of the result may
    /// spread to the gradients of a few pixels around its window. Fails with [`Error::ShapeMismatch`] for channels that do not match;
    /// [`Error::Invalid`] for windows larger than the image, a stride of 0 and similar options.
    ///
    /// ```
    /// use claystone::{ConvOptions, Device, Padding, Tensor};
    /// let x = Tensor::arange(0, 9, 1, Device::Cpu)?.reshape([1, 3, 3])?;
    /// let w = Tensor::ones(&[1, 1, 2, 2], Device::Cpu)?;
    /// assert_eq!(x.conv2d(&w, None, ConvOptions::default())?.to_vec::<f32>()?, [8.0, 12.0, 20.0, 24.0]);
    /// let same = ConvOptions { padding: Padding::Same, ..ConvOptions::default() };
    /// assert_eq!(x.conv2d(&w, None, same)?.shape().dims(), [1, 3, 3]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    conv2d(ConvOptions<2>): convolution;
    /// Convolves x `[N, C, D, H, W]` or `[C, D, H, W]` with `weight` `[O, C / groups, KD, KH, KW]` and adds `bias` `[O]` (PyTorch's
    /// `conv3d`). The result is `[N, O, slices, rows, columns]` of windows, contiguous. Floats. Takes two more launches than
    /// [`Tensor::conv2d`]. Differentiable with respect to x, weight and bias. Fails as [`Tensor::conv2d`] does.
    ///
    /// ```
    /// use claystone::{ConvOptions, Device, Tensor};
    /// let x = Tensor::ones(&[1, 4, 4, 4], Device::Cpu)?;
    /// let w = Tensor::ones(&[2, 1, 3, 3, 3], Device::Cpu)?;
    /// let y = x.conv3d(&w, None, ConvOptions { stride: [1, 1, 2], ..ConvOptions::default() })?;
    /// assert_eq!(y.shape().dims(), [2, 2, 2, 1]);
    /// assert_eq!(y.to_vec::<f32>()?, [27.0; 8]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    conv3d(ConvOptions<3>): convolution;
    /// Transposed convolution, the gradient of [`Tensor::conv1d`] (PyTorch's `conv_transpose1d`): multiplies each element by the weight,
    /// and adds the products to the elements of its window. x is `[N, C, L]` or `[C, L]`, `weight` `[C, O / groups, K]` and `bias` `[O]`.
    /// Floats. Differentiable with respect to x, weight and bias. Fails as [`Tensor::conv2d`] does.
    conv_transpose1d(ConvTransposeOptions<1>): transposed_convolution;
    /// Transposed convolution, the gradient of [`Tensor::conv2d`] (PyTorch's `conv_transpose2d`): multiplies each element by the weight,
    /// and adds the products to the elements of its window. x is `[N, C, H, W]` or `[C, H, W]`, `weight` `[C, O / groups, KH, KW]` and
    /// `bias` `[O]`. Floats. Differentiable with respect to x, weight and bias.
    ///
    /// A dim of the result is `(size - 1) stride - padding on both sides + dilation (kernel - 1) + output_padding + 1`. Fails as
    /// [`Tensor::conv2d`] does.
    ///
    /// ```
    /// use claystone::{ConvTransposeOptions, Device, Tensor};
    /// let x = Tensor::ones(&[1, 2, 2], Device::Cpu)?;
    /// let w = Tensor::ones(&[1, 1, 2, 2], Device::Cpu)?;
    /// let doubled = ConvTransposeOptions { stride: [2, 2], ..ConvTransposeOptions::default() };
    /// assert_eq!(x.conv_transpose2d(&w, None, doubled)?.to_vec::<f32>()?, [1.0; 16]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    conv_transpose2d(ConvTransposeOptions<2>): transposed_convolution;
    /// Transposed convolution, the gradient of [`Tensor::conv3d`] (PyTorch's `conv_transpose3d`): multiplies each element by the weight,
    /// and adds the products to the elements of its window. x is `[N, C, D, H, W]` or `[C, D, H, W]`, `weight`
    /// `[C, O / groups, KD, KH, KW]` and `bias` `[O]`. The dims of the result are computed as for [`Tensor::conv_transpose2d`]. Floats.
    /// Differentiable with respect to x, weight and bias. Fails as [`Tensor::conv2d`] does.
    ///
    /// ```
    /// use claystone::{ConvTransposeOptions, Device, Tensor};
    /// let x = Tensor::ones(&[1, 1, 2, 2], Device::Cpu)?;
    /// let w = Tensor::ones(&[1, 3, 2, 2, 2], Device::Cpu)?;
    /// let y = x.conv_transpose3d(&w, None, ConvTransposeOptions { stride: [2, 2, 2], ..Default::default() })?;
    /// assert_eq!(y.shape().dims(), [3, 2, 4, 4]);
    /// assert_eq!(y.to_vec::<f32>()?, [1.0; 96]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    conv_transpose3d(ConvTransposeOptions<3>): transposed_convolution;
}

/// Checks dtypes and the shapes of weight and bias. Returns the number of channels of the result.
fn check<const D: usize>(op: &'static str, inputs: &[&Tensor], groups: usize, transposed: bool) -> Result<usize> {
    let (x, weight) = (inputs[0], inputs[1]);
    x.dtype.check_float(op)?;
    same_dtype(op, inputs)?;
    same_device(op, inputs)?;
    mismatch!(op if weight.rank() != D + 2 || ![D + 1, D + 2].contains(&x.rank()),
        x, weight, "the input is [C, dims..] or [N, C, dims..], and the weight has two dims before its kernel dims");
    let (channels, w) = (x.shape().dims()[x.rank() - D - 1], weight.shape().dims());
    // One of the weight's first two dims is the channels of a single group; the other is the channels of all groups.
    let (whole, wanted) = if transposed { (w[0], channels) } else { (w[0], w[1].saturating_mul(groups)) };
    invalid!(op if groups == 0 || whole % groups != 0,
        "{groups} groups do not divide the weight's {whole} channels evenly");
    mismatch!(op if transposed && whole != channels, x, weight, "the weight is [C, O / groups, ..]");
    mismatch!(op if !transposed && wanted != channels, x, weight, "the weight is [O, C / groups, ..]");
    let out = if transposed { w[1].saturating_mul(groups) } else { w[0] };
    if let Some(b) = inputs.get(2) {
        mismatch!(op if b.shape().dims() != [out], x, b, "the bias has one number for each channel of the result");
    }
    Ok(out)
}

fn convolution<const D: usize>(op: &'static str, inputs: &[&Tensor], options: ConvOptions<D>) -> Result<Tensor> {
    let ConvOptions { stride, padding, dilation, groups } = options;
    let (original, weight, bias) = (inputs[0], inputs[1], inputs.get(2).copied());
    check::<D>(op, inputs, groups, false)?;
    let (x, kernel) = (as_images(op, original, D)?, last_sizes(weight));
    let [before, behind] = padding.sides(op, kernel, stride, dilation)?;
    let windows = Windows::new(op, last_sizes(&x), kernel, [stride, before, behind, dilation])?;
    let problem = ConvProblem { op, windows: windows.last_two_dims(), groups, transposed: false };
    let weight = weight_as_2d::<D>(weight)?;
    let out = if D < 3 {
        problem.convolve(&x, &weight, bias)?
    } else {
        // The slices of a window become channels of an image, and the windows along the depth become more images.
        let ([n, c, depth, h, w], [oh, ow]) = (last_sizes(&x), problem.windows.grid);
        let slices = windows.depth_pass(h * w).im2col(op, &x.reshape([n, c, depth, h * w])?, true)?;
        let images = slices.reshape([c * kernel[0], n * windows.grid[0], h, w])?.transpose(0, 1)?;
        let out = problem.convolve(&images, &weight, bias)?;
        out.reshape([n, windows.grid[0], weight.shape().dims()[0], oh, ow])?.transpose(1, 2)?.contiguous()?
    };
    restore_rank(&out, original, D)
}

fn transposed_convolution<const D: usize>(
    op: &'static str,
    inputs: &[&Tensor],
    options: ConvTransposeOptions<D>,
) -> Result<Tensor> {
    let ConvTransposeOptions { stride, padding, output_padding, dilation, groups } = options;
    let (original, weight, bias) = (inputs[0], inputs[1], inputs.get(2).copied());
    let channels = check::<D>(op, inputs, groups, true)?;
    let (x, kernel) = (as_images(op, original, D)?, last_sizes(weight));
    let (grid, mut image): ([usize; D], _) = (last_sizes(&x), [0; D]);
    let [before, behind] = padding.sides(op, kernel, stride, dilation)?;
    for d in 0..D {
        let added = output_padding[d];
        invalid!(op if added > 0 && added >= stride[d].max(dilation[d]),
            "output_padding must be less than the stride or the dilation");
        let (rest, taps) = (grid[d].saturating_sub(1), usize::saturating_sub(kernel[d], 1));
        let reach = (rest.saturating_mul(stride[d]).saturating_add(dilation[d].saturating_mul(taps)))
            .saturating_add(added.saturating_add(1));
        let taken = before[d].saturating_add(behind[d]);
        invalid!(op if taken >= reach, "a padding of {taken} in total removes all {reach} elements");
        image[d] = reach - taken;
    }
    invalid!(op if grid.contains(&0), "the images are empty, of shape {}", original.shape());
    // No window covers the elements that `output_padding` adds.
    let windows = Windows { grid, ..Windows::new(op, image, kernel, [stride, before, behind, dilation])? };
    let problem = ConvProblem { op, windows: windows.last_two_dims(), groups, transposed: true };
    let weight = weight_as_2d::<D>(weight)?;
    let out = if D < 3 {
        problem.transposed(&x, &weight, bias)?
    } else {
        // Each slice to which an element is added is a channel of the 2-D images. Overlapping slices are added up.
        let ([n, c, depth, h, w], [ih, iw]) = (last_sizes(&x), problem.windows.image);
        let images = x.transpose(1, 2)?.reshape([n * depth, c, h, w])?;
        let slices = problem.transposed(&images, &weight, None)?;
        let slices = slices.reshape([n, depth, channels, kernel[0], 1, ih * iw])?.permute(&[0, 2, 3, 4, 1, 5])?;
        let out = windows.depth_pass(ih * iw).col2im(op, &slices)?.reshape([n, channels, image[0], ih, iw])?;
        bias.map_or(Ok(out.shallow_clone()), |bias| out.add(&bias.reshape([channels, 1, 1, 1])?))?
    };
    restore_rank(&out, original, D)
}

/// The images, the weight and the bias of a convolution.
type Operands<'a> = (&'a Tensor, &'a Tensor, Option<&'a Tensor>);

/// The parameters of a convolution or transposed convolution, without its tensors.
#[derive(Clone, Copy)]
struct ConvProblem {
    op: &'static str,
    windows: Windows,
    groups: usize,
    transposed: bool,
}

impl ConvProblem {
    /// Convolves images `[N, C, H, W]` with a weight `[O, C / groups, KH, KW]`.
    fn convolve(self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let ConvProblem { op, windows, groups, .. } = self;
        let ([n, c, h, w], Windows { image, kernel, grid, padding, .. }) = (sizes_4d(x), windows);
        let single = [kernel, grid] == [[1, 1], image] && padding == [0; 2];
        let backend = backend::of_device(x.device());
        if let Some(direct) = self.backend_convolution(x, weight, single) {
            self.compute_with(direct, (x, weight, bias))
        } else if let Some(out) = backend.forward_convolution(&self.conv2d(x, weight, bias, false))? {
            Ok(self.record(out, Box::new(Im2colConvolution(self)), (x, weight, bias)))
        } else if single {
            let columns = x.reshape([n, groups, c / groups, h * w])?;
            multiply_columns(op, &columns, weight, bias, false, None)?.reshape([n, weight.shape().dims()[0], h, w])
        } else {
            self.compute_with(Box::new(Im2colConvolution(self)), (x, weight, bias))
        }
    }

    /// Computes the transposed convolution of images `[N, C, H, W]` with a weight `[C, O / groups, KH, KW]`.
    fn transposed(self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let direct = self.backend_convolution(x, weight, false).unwrap_or_else(|| Box::new(Im2colConvolution(self)));
        self.compute_with(direct, (x, weight, bias))
    }

    /// Computes the convolution by recorded matrix products and im2col or col2im. The gradients can be differentiated again, and all
    /// columns are kept.
    fn by_im2col(self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let ConvProblem { op, windows, groups, transposed } = self;
        let ([n, c, h, w], [a, b, kh, kw]) = (sizes_4d(x), sizes_4d(weight));
        if transposed {
            let columns = multiply_columns(op, &x.reshape([n, groups, c / groups, h * w])?, weight, None, true, None)?;
            let images = windows.col2im(op, &columns.reshape([n, b * groups, kh, kw, h, w])?)?;
            return match bias {
                Some(bias) => images.add(&bias.reshape([b * groups, 1, 1])?),
                None => Ok(images),
            };
        }
        let [oh, ow] = windows.grid;
        let columns = windows.im2col(op, x, true)?.reshape([1, groups, c / groups * kh * kw, n * oh * ow])?;
        let out = multiply_columns(op, &columns, weight, bias, false, None)?;
        out.reshape([a, n, oh, ow])?.transpose(0, 1)?.contiguous()
    }

    fn conv2d<'t>(self, x: &'t Tensor, weight: &'t Tensor, bias: Option<&'t Tensor>, single: bool) -> Conv2d<'t> {
        Conv2d { windows: self.windows, x, weight, bias, groups: self.groups, single }
    }

    /// Returns the backend's implementation of the convolution if it is faster than products, else `None`. `single` says that each image
    /// equals its im2col columns.
    fn backend_convolution(self, x: &Tensor, weight: &Tensor, single: bool) -> Option<Box<dyn Convolution>> {
        backend::of_device(x.device()).convolution(&self.conv2d(x, weight, None, single))
    }

    /// Computes and records the convolution with `direct`, the backend's implementation, which also computes the gradients.
    fn compute_with(self, direct: Box<dyn Convolution>, operands: Operands) -> Result<Tensor> {
        let (x, weight, bias) = operands;
        let out = match self.transposed {
            _ if autograd::is_gradients_only() => self.allocate_unread(x, weight)?,
            false => direct.forward(x, weight, bias)?,
            true if direct.has_transposed(bias.is_some()) => direct.transposed(x, weight, bias)?,
            true => Im2colConvolution(self).transposed(x, weight, bias)?,
        };
        Ok(self.record(out, direct, operands))
    }

    /// Allocates a result that is never read, because only gradients are wanted.
    fn allocate_unread(self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        let ([n, ..], [a, b, ..], Windows { image, grid, .. }) = (sizes_4d(x), sizes_4d(weight), self.windows);
        let (channels, [h, w]) = if self.transposed { (b * self.groups, image) } else { (a, grid) };
        Tensor::empty_with_shape([n, channels, h, w], x.dtype, x.device())
    }

    /// Records `out`, with gradients that `direct` computes.
    fn record(self, out: Tensor, direct: Box<dyn Convolution>, (x, weight, bias): Operands) -> Tensor {
        let ConvProblem { op, transposed, .. } = self;
        let inputs: SmallVec<[&Tensor; 3]> = [x, weight].into_iter().chain(bias).collect();
        if !autograd::is_tracked(&inputs) {
            return out;
        }
        let (saved_x, saved_w) = (weight.requires_grad().then(|| Saved::new(x)), Saved::new(weight));
        let (shape, bias_shape) = (x.shape().clone(), bias.map(|b| b.shape().clone()));
        autograd::record_differentiable(op, out, &inputs, move |ctx| {
            let weight = saved_w.get(op)?;
            let x = saved_x.as_ref().map(|x| x.get(op)).transpose()?;
            if ctx.create_graph() {
                // The gradients that are needed do not depend on the values of tensors that were not saved, so zeros replace those
                // tensors.
                let zeros = |shape: &Shape, i| Ok(ctx.with_input_node(i, Tensor::zeros(shape, weight)?));
                let x = x.map_or_else(|| zeros(&shape, 0), |x| Ok(x.shallow_clone()))?;
                let bias = bias_shape.as_ref().map(|shape| zeros(shape, 2)).transpose()?;
                return ctx.differentiate_through(&self.by_im2col(&x, weight, bias.as_ref())?);
            }
            let grad = ctx.grad()?.detach();
            let mut gradients = Gradients::new();
            gradients.push(match (ctx.needs_gradient(0), transposed) {
                (false, _) => None,
                (true, true) => Some(direct.forward(&grad, weight, None)?),
                (true, false) if direct.has_image_gradient() => Some(direct.image_gradient(&grad, weight)?),
                (true, false) => Some(Im2colConvolution(self).transposed(&grad, weight, None)?),
            });
            gradients.push(None);
            if let Some(x) = x.filter(|_| ctx.needs_gradient(1)) {
                let usable = |s: &Tensor| direct.accepts(s) && s.dtype == grad.dtype;
                let slot = ctx.slot(1).filter(|s| usable(s) && ![x, &grad].iter().any(|t| t.shares_storage(s)));
                let (images, outputs) = if transposed { (&grad, x) } else { (x, &grad) };
                gradients[1] = Some(direct.weight_gradient(images, outputs, slot)?);
            }
            if bias_shape.is_some() {
                let slot = if ctx.needs_gradient(2) { ctx.slot(2) } else { None };
                let sum = || reduce::sum_into(op, &grad, [0, 2, 3], false, slot);
                gradients.push(ctx.needs_gradient(2).then(sum).transpose()?);
            }
            Ok(gradients)
        })
    }
}

//! Convolutions.
//!
//! On OpenCL devices, and for double backward, most convolutions are im2col and one matrix product. The columns of all windows,
//! `[C, kernel, N, windows]`, are multiplied by the weight `[O, C kernel]`; groups are a batch, and the bias is the epilogue. That is
//! two launches, a third to reorder a batch, and one for windows of a single element, which need no im2col. A transposed convolution
//! is a product and col2im. The gradients are the same two compositions. Columns are made in blocks of bounded size and not kept: the
//! gradient of the weight makes them again.
//!
//! Three dims are two: the slices of a window become channels by im2col along the depth, for which the weight has its right order
//! already, and a transposed convolution adds them up again.
//!
//! On the CPU, and on OpenCL devices where each channel of the image is a group and the window has at most 64 elements, a
//! [`Convolution`] does all of it in one launch, and each gradient in one or two, without columns in memory. Where there are tensor cores
//! it does so for most other windows, in one launch where images and weight are channels-last: otherwise copies of them that are come before.
//! It saves the image for backward. So does the forward pass of OpenCL devices where it reads images; its gradients are products of columns.

mod columns;
pub(crate) mod options;

use smallvec::SmallVec;

use crate::autograd::{Gradients, Saved};
use crate::backend::problem::conv::Convolution;
use crate::backend::problem::windows::{Windows, four};
use crate::ops::dispatch::prelude::*;
use crate::ops::nn::conv::columns::{ByColumns, product};
use crate::ops::nn::window::{as_2d, as_images, five, last, restore_rank};
use crate::ops::reduce;
use crate::tensor::Dims;
use crate::{Result, Shape, Tensor, autograd};

use crate::backend;
pub use crate::ops::nn::conv::options::{ConvOptions, ConvTransposeOptions};

impl Tensor {
    /// Each window's products with the weight, summed (PyTorch's `conv1d`): x `[N, C, L]` or `[C, L]`, `weight`
    /// `[O, C / groups, K]`, `bias` `[O]`, the result `[N, O, windows]`. Floats. Differentiable in all three.
    ///
    /// # Errors
    /// As [`Tensor::conv2d`].
    #[track_caller]
    pub fn conv1d(&self, weight: &Tensor, bias: Option<&Tensor>, options: ConvOptions<1>) -> Result<Tensor> {
        convolution("conv1d", self, weight, bias, options)
    }

    /// Each window's products with the weight, summed (PyTorch's `conv2d`): x `[N, C, H, W]` or `[C, H, W]`, `weight`
    /// `[O, C / groups, KH, KW]`, `bias` `[O]`, the result `[N, O, rows, columns]` of windows. Floats. One launch for most
    /// cases on the CPU, for most windows where each channel is a group, and for windows of a single element; otherwise two launches, or
    /// three for a batch and on tensor cores, for each 16 MiB of columns. Differentiable in all three; then x and the weight are kept.
    ///
    /// The result is contiguous, but on tensor cores [`MemoryFormat::ChannelsLast`](crate::MemoryFormat::ChannelsLast) if x or the weight is, as
    /// PyTorch has it. If both are, and their channels fill whole pieces of 16 bytes, that is one launch, without copies.
    /// An infinity or NaN in the result's gradient may reach the gradients of a few pixels around its window there, where x has fewer than eight
    /// channels.
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
    ///
    /// # Errors
    /// [`Error::ShapeMismatch`] for channels that do not fit; [`Error::Invalid`] for windows larger than the image, a stride of
    /// 0 and the like; [`Error::UnsupportedDType`], [`Error::DTypeMismatch`], [`Error::DeviceMismatch`].
    #[track_caller]
    pub fn conv2d(&self, weight: &Tensor, bias: Option<&Tensor>, options: ConvOptions<2>) -> Result<Tensor> {
        convolution("conv2d", self, weight, bias, options)
    }

    /// Each window's products with the weight, summed (PyTorch's `conv3d`): x `[N, C, D, H, W]` or `[C, D, H, W]`, `weight`
    /// `[O, C / groups, KD, KH, KW]`, `bias` `[O]`, the result `[N, O, slices, rows, columns]` of windows, contiguous. Floats.
    /// [`Tensor::conv2d`] and two launches more. Differentiable in all three.
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
    ///
    /// # Errors
    /// As [`Tensor::conv2d`].
    #[track_caller]
    pub fn conv3d(&self, weight: &Tensor, bias: Option<&Tensor>, options: ConvOptions<3>) -> Result<Tensor> {
        convolution("conv3d", self, weight, bias, options)
    }

    /// Each element times the weight, added up where the windows of [`Tensor::conv1d`] would have read them (PyTorch's
    /// `conv_transpose1d`): x `[N, C, L]` or `[C, L]`, `weight` `[C, O / groups, K]`, `bias` `[O]`. Floats. Differentiable in
    /// all three.
    ///
    /// # Errors
    /// As [`Tensor::conv2d`].
    #[track_caller]
    pub fn conv_transpose1d(
        &self,
        weight: &Tensor,
        bias: Option<&Tensor>,
        options: ConvTransposeOptions<1>,
    ) -> Result<Tensor> {
        transposed("conv_transpose1d", self, weight, bias, options)
    }

    /// Each element times the weight, added up where the windows of [`Tensor::conv2d`] would have read them (PyTorch's
    /// `conv_transpose2d`): x `[N, C, H, W]` or `[C, H, W]`, `weight` `[C, O / groups, KH, KW]`, `bias` `[O]`; a dim of the
    /// result is `(size - 1) stride - padding on both sides + dilation (kernel - 1) + output_padding + 1`. Floats. Differentiable in all
    /// three.
    ///
    /// ```
    /// use claystone::{ConvTransposeOptions, Device, Tensor};
    /// let x = Tensor::ones(&[1, 2, 2], Device::Cpu)?;
    /// let w = Tensor::ones(&[1, 1, 2, 2], Device::Cpu)?;
    /// let doubled = ConvTransposeOptions { stride: [2, 2], ..ConvTransposeOptions::default() };
    /// assert_eq!(x.conv_transpose2d(&w, None, doubled)?.to_vec::<f32>()?, [1.0; 16]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Tensor::conv2d`].
    #[track_caller]
    pub fn conv_transpose2d(
        &self,
        weight: &Tensor,
        bias: Option<&Tensor>,
        options: ConvTransposeOptions<2>,
    ) -> Result<Tensor> {
        transposed("conv_transpose2d", self, weight, bias, options)
    }

    /// Each element times the weight, added up where the windows of [`Tensor::conv3d`] would have read them (PyTorch's
    /// `conv_transpose3d`): x `[N, C, D, H, W]` or `[C, D, H, W]`, `weight` `[C, O / groups, KD, KH, KW]`, `bias` `[O]`; the
    /// result's dims are as those of [`Tensor::conv_transpose2d`]. Floats. Differentiable in all three.
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
    ///
    /// # Errors
    /// As [`Tensor::conv2d`].
    #[track_caller]
    pub fn conv_transpose3d(
        &self,
        weight: &Tensor,
        bias: Option<&Tensor>,
        options: ConvTransposeOptions<3>,
    ) -> Result<Tensor> {
        transposed("conv_transpose3d", self, weight, bias, options)
    }
}

/// Checks dtypes and the shapes of weight and bias; gives the channels of the result.
fn check<const D: usize>(
    op: &'static str,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    groups: usize,
    transposed: bool,
) -> Result<usize> {
    x.dtype.check_float(op)?;
    let inputs: SmallVec<[&Tensor; 3]> = [x, weight].into_iter().chain(bias).collect();
    same_dtype(op, &inputs)?;
    crate::ops::same_device(op, &inputs)?;
    mismatch!(op if weight.rank() != D + 2 || ![D + 1, D + 2].contains(&x.rank()),
        x, weight, "the input has channels and perhaps a batch before, the weight two dims");
    let (channels, w) = (x.shape().dims()[x.rank() - D - 1], weight.shape().dims());
    // One of the weight's first two dims counts the channels of a group, the other those of all groups.
    let (whole, wanted) = if transposed { (w[0], channels) } else { (w[0], w[1].saturating_mul(groups)) };
    invalid!(op if groups == 0 || whole % groups != 0,
        "{groups} groups do not divide the weight's {whole} channels evenly");
    mismatch!(op if transposed && whole != channels, x, weight, "the weight is [C, O / groups, ..]");
    mismatch!(op if !transposed && wanted != channels, x, weight, "the weight is [O, C / groups, ..]");
    let out = if transposed { w[1].saturating_mul(groups) } else { w[0] };
    if let Some(b) = bias {
        mismatch!(op if b.shape().dims() != [out], x, b, "the bias has one number for each channel of the result");
    }
    Ok(out)
}

#[track_caller]
fn convolution<const D: usize>(
    op: &'static str,
    given: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    options: ConvOptions<D>,
) -> Result<Tensor> {
    let _caller = Caller::enter();
    let inputs: Dims<&Tensor> = [given, weight].into_iter().chain(bias).collect();
    cast_first!(lowered(op, &inputs)?, |x| convolution(op, &x[0], &x[1], x.get(2), options));
    let ConvOptions { stride, padding, dilation, groups } = options;
    let arguments = || vec![(&stride).into(), padding.into(), (&dilation).into(), groups.into()];
    replaced!(op, inputs; arguments);
    check::<D>(op, given, weight, bias, groups, false)?;
    let (x, kernel) = (as_images(op, given, D)?, last(weight));
    let [before, behind] = padding.sides(op, kernel, stride, dilation)?;
    let windows = Windows::new(op, last(&x), kernel, [stride, before, behind, dilation])?;
    let problem = ConvProblem { op, windows: windows.plane(), groups, transposed: false };
    let weight = as_2d::<D>(weight)?;
    let out = if D < 3 {
        problem.convolve(&x, &weight, bias)?
    } else {
        // The slices of a window are channels of an image, the windows along the depth are more images.
        let ([n, c, depth, h, w], [oh, ow]) = (five(&x), problem.windows.grid);
        let slices = windows.slices(h * w).im2col(op, &x.reshape([n, c, depth, h * w])?, true)?;
        let images = slices.reshape([c * kernel[0], n * windows.grid[0], h, w])?.transpose(0, 1)?;
        let out = problem.convolve(&images, &weight, bias)?;
        out.reshape([n, windows.grid[0], weight.shape().dims()[0], oh, ow])?.transpose(1, 2)?.contiguous()?
    };
    restore_rank(&out, given, D)
}

#[track_caller]
fn transposed<const D: usize>(
    op: &'static str,
    given: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    options: ConvTransposeOptions<D>,
) -> Result<Tensor> {
    let _caller = Caller::enter();
    let inputs: Dims<&Tensor> = [given, weight].into_iter().chain(bias).collect();
    cast_first!(lowered(op, &inputs)?, |x| transposed(op, &x[0], &x[1], x.get(2), options));
    let ConvTransposeOptions { stride, padding, output_padding, dilation, groups } = options;
    let arguments =
        || vec![(&stride).into(), padding.into(), (&output_padding).into(), groups.into(), (&dilation).into()];
    replaced!(op, inputs; arguments);
    let channels = check::<D>(op, given, weight, bias, groups, true)?;
    let (x, kernel) = (as_images(op, given, D)?, last(weight));
    let (grid, mut image): ([usize; D], _) = (last(&x), [0; D]);
    let [before, behind] = padding.sides(op, kernel, stride, dilation)?;
    for d in 0..D {
        let added = output_padding[d];
        invalid!(op if added > 0 && added >= stride[d].max(dilation[d]),
            "output_padding has to be below the stride or the dilation");
        let (rest, taps) = (grid[d].saturating_sub(1), usize::saturating_sub(kernel[d], 1));
        let reach = (rest.saturating_mul(stride[d]).saturating_add(dilation[d].saturating_mul(taps)))
            .saturating_add(added.saturating_add(1));
        let taken = before[d].saturating_add(behind[d]);
        image[d] = reach.checked_sub(taken).filter(|&size| size > 0).ok_or_else(|| {
            Error::invalid(op, format!("a padding of {taken} on both sides leaves nothing of {reach} elements"))
        })?;
    }
    invalid!(op if grid.contains(&0), "the images are empty, of shape {}", given.shape());
    // No window reaches the elements that `output_padding` adds.
    let windows = Windows { grid, ..Windows::new(op, image, kernel, [stride, before, behind, dilation])? };
    let problem = ConvProblem { op, windows: windows.plane(), groups, transposed: true };
    let weight = as_2d::<D>(weight)?;
    let out = if D < 3 {
        problem.transposed(&x, &weight, bias)?
    } else {
        // The slices that an element is added to are channels of an image, and are added up where they overlap.
        let ([n, c, depth, h, w], [ih, iw]) = (five(&x), problem.windows.image);
        let images = x.transpose(1, 2)?.reshape([n * depth, c, h, w])?;
        let slices = problem.transposed(&images, &weight, None)?;
        let slices = slices.reshape([n, depth, channels, kernel[0], 1, ih * iw])?.permute(&[0, 2, 3, 4, 1, 5])?;
        let out = windows.slices(ih * iw).col2im(op, &slices)?.reshape([n, channels, image[0], ih, iw])?;
        bias.map_or(Ok(out.shallow_clone()), |bias| out.add(&bias.reshape([channels, 1, 1, 1])?))?
    };
    restore_rank(&out, given, D)
}

/// What a convolution, or a transposed one, has beside its tensors.
#[derive(Clone, Copy)]
struct ConvProblem {
    op: &'static str,
    windows: Windows,
    groups: usize,
    transposed: bool,
}

impl ConvProblem {
    /// The convolution of images `[N, C, H, W]` with a weight `[O, C / groups, KH, KW]`.
    fn convolve(self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let ConvProblem { op, windows, groups, .. } = self;
        let ([n, c, h, w], Windows { image, kernel, grid, padding, .. }) = (four(x), windows);
        let single = [kernel, grid] == [[1, 1], image] && padding == [0; 2];
        if let Some(direct) = self.direct(x, weight, single) {
            self.by(direct, x, weight, bias)
        } else if let Some(out) = self.forward(x, weight, bias)? {
            Ok(self.recorded(out, Box::new(ByColumns(self)), x, weight, bias))
        } else if single {
            let columns = x.reshape([n, groups, c / groups, h * w])?;
            product(op, &columns, weight, bias, false)?.reshape([n, weight.shape().dims()[0], h, w])
        } else {
            self.by(Box::new(ByColumns(self)), x, weight, bias)
        }
    }

    /// The transposed convolution of images `[N, C, H, W]` with a weight `[C, O / groups, KH, KW]`.
    fn transposed(self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let direct = self.direct(x, weight, false).unwrap_or_else(|| Box::new(ByColumns(self)));
        self.by(direct, x, weight, bias)
    }

    /// As products and columns, all of them recorded: gradients have gradients, and all columns are kept.
    fn by_im2col(self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let ConvProblem { op, windows, groups, transposed } = self;
        let ([n, c, h, w], [a, b, kh, kw]) = (four(x), four(weight));
        if transposed {
            let columns = product(op, &x.reshape([n, groups, c / groups, h * w])?, weight, None, true)?;
            let images = windows.col2im(op, &columns.reshape([n, b * groups, kh, kw, h, w])?)?;
            return match bias {
                Some(bias) => images.add(&bias.reshape([b * groups, 1, 1])?),
                None => Ok(images),
            };
        }
        let [oh, ow] = windows.grid;
        let columns = windows.im2col(op, x, true)?.reshape([1, groups, c / groups * kh * kw, n * oh * ow])?;
        let out = product(op, &columns, weight, bias, false)?;
        out.reshape([a, n, oh, ow])?.transpose(0, 1)?.contiguous()
    }

    /// The backend's convolution, where it has one that is better than products alone if images are their own columns.
    fn direct(self, x: &Tensor, weight: &Tensor, single: bool) -> Option<Box<dyn Convolution>> {
        backend::of(x.device()).convolution(self.windows, x, weight, self.groups, single)
    }

    /// The convolution, and its gradients, by `direct`.
    fn by(self, direct: Box<dyn Convolution>, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let out = match self.transposed {
            _ if autograd::is_gradients_only() => self.uncomputed(x, weight)?,
            true => self.images(&*direct, x, weight, bias)?,
            false => direct.windows(x, weight, bias)?,
        };
        Ok(self.recorded(out, direct, x, weight, bias))
    }

    /// The transposed convolution of windows, not recorded.
    fn images(self, direct: &dyn Convolution, y: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        match direct.makes_images(bias.is_some()) {
            true => direct.images(y, weight, bias),
            false => ByColumns(self).images(&y.detach(), weight, bias.map(Tensor::detach).as_ref()),
        }
    }

    /// Memory in the place of a result that nobody reads.
    fn uncomputed(self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        let ([n, ..], [a, b, ..], Windows { image, grid, .. }) = (four(x), four(weight), self.windows);
        let (channels, [h, w]) = if self.transposed { (b * self.groups, image) } else { (a, grid) };
        Tensor::empty_like_shape([n, channels, h, w], x.dtype, x.device())
    }

    /// The backend's forward pass alone, where it has one.
    fn forward(self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Option<Tensor>> {
        backend::of(x.device()).forward_convolution(&self.windows, x, weight, bias, self.groups)
    }

    /// A result with its gradients, which `direct` makes.
    fn recorded(
        self,
        out: Tensor,
        direct: Box<dyn Convolution>,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
    ) -> Tensor {
        let ConvProblem { op, transposed, .. } = self;
        let inputs: SmallVec<[&Tensor; 3]> = [x, weight].into_iter().chain(bias).collect();
        if !autograd::is_tracked(&inputs) {
            return out;
        }
        let (saved_x, saved_w) = (weight.requires_grad().then(|| Saved::new(x)), Saved::new(weight));
        let (shape, bias_shape) = (x.shape().clone(), bias.map(|b| b.shape().clone()));
        autograd::record_twice(op, out, &inputs, move |ctx| {
            let weight = saved_w.get(op)?;
            let x = saved_x.as_ref().map(|x| x.get(op)).transpose()?;
            if ctx.create_graph() {
                // No gradient that is needed depends on the values of tensors that were not saved.
                let zeros = |shape: &Shape, i| Ok(ctx.input(i, Tensor::zeros(shape, weight)?));
                let x = x.map_or_else(|| zeros(&shape, 0), |x| Ok(x.shallow_clone()))?;
                let bias = bias_shape.as_ref().map(|shape| zeros(shape, 2)).transpose()?;
                return ctx.through(&self.by_im2col(&x, weight, bias.as_ref())?);
            }
            let grad = ctx.grad()?.detach();
            let mut gradients = Gradients::new();
            gradients.push(match (ctx.needs(0), transposed) {
                (false, _) => None,
                (true, true) => Some(direct.windows(&grad, weight, None)?),
                (true, false) if direct.makes_image_gradient() => Some(direct.image_gradient(&grad, weight)?),
                (true, false) => Some(ByColumns(self).images(&grad, weight, None)?),
            });
            gradients.push(None);
            if let Some(x) = x.filter(|_| ctx.needs(1)) {
                let usable = |s: &Tensor| direct.fills(s) && s.dtype == grad.dtype;
                let slot = ctx.slot(1).filter(|s| usable(s) && ![x, &grad].iter().any(|t| t.shares_storage(s)));
                gradients[1] =
                    Some(if transposed { direct.weight(&grad, x, slot)? } else { direct.weight(x, &grad, slot)? });
            }
            if bias_shape.is_some() {
                let slot = if ctx.needs(2) { ctx.slot(2) } else { None };
                let sum = || reduce::sum_into(op, &grad, [0, 2, 3], false, slot);
                gradients.push(ctx.needs(2).then(sum).transpose()?);
            }
            Ok(gradients)
        })
    }
}

//! Kernels that read images instead of buffers, `kernels/image.cl`: where the memory mode asks for them and the operands fit.
//! What does not fit declines, and buffers are read.

mod conv;
mod map;
mod pool;
mod product;

pub(crate) use conv::{convolution, convolves};
pub(crate) use map::elementwise;
pub(crate) use pool::pool;
pub(crate) use product::product;

use std::sync::Arc;

use crate::backend::opencl::geometry::{LOCAL, flag, group_of, launch_free};
use crate::backend::opencl::kernels::{KernelKey, kernel};
use crate::backend::problem::windows::four;
use crate::device::capture;
use crate::device::opencl::{Arg, ClDevice, ClKernel, Knob};
use crate::layout::Layout;
use crate::storage::driver::opencl::OpenCl;
use crate::storage::{Image, ImageDesc, ImageFormat, ImageKey, MemoryMode, StorageType, memory_mode};
use crate::{DType, Error, Result, Tensor};

const TEMPLATE: &str = include_str!("../../../kernels/image.cl");

/// The open device of a tensor whose operations are to read images, in mode auto where this parameter says so. Not while a graph is
/// captured: its replays would need the images.
fn wanted(x: &Tensor, knob: Knob) -> Option<&'static ClDevice> {
    // Every launch asks: what nearly always says no comes first.
    let mode = memory_mode();
    if mode == MemoryMode::Buffer {
        return None;
    }
    let cl = x.cl_device().ok().filter(|cl| mode == MemoryMode::Image || cl.tuned(knob) == 1)?;
    (cl.image_limits().is_some() && !capture::is_capturing(x.device())).then_some(cl)
}

/// The format that keeps the elements of a dtype exactly; others have none.
fn format(dtype: DType) -> Option<ImageFormat> {
    match dtype {
        DType::F32 | DType::BF16 => Some(ImageFormat::F32),
        DType::F16 => Some(ImageFormat::F16),
        _ => None,
    }
}

/// Which way the channels' blocks of four follow each other in an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Blocks {
    /// Side by side: a tensor `[n, c, h, w]`.
    Across,
    /// One below the other: a filter `[1, o, taps, c]`.
    Down,
}

/// A tensor of four dims as images have it: sizes and strides of batch, channels, rows and columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tensor4 {
    pub(crate) dims: [usize; 4],
    pub(crate) strides: [isize; 4],
}

impl Tensor4 {
    /// Of up to four dims: those of fewer are channels, batch and channels, or the last three.
    pub(crate) fn of(layout: &Layout) -> Option<Tensor4> {
        let (dims, strides) = (layout.shape.dims(), &layout.strides);
        let axes: &[usize] = match dims.len() {
            0 => &[],
            1 => &[1],
            2 => &[0, 1],
            3 => &[1, 2, 3],
            4 => &[0, 1, 2, 3],
            _ => return None,
        };
        let mut four = Tensor4 { dims: [1; 4], strides: [0; 4] };
        for (i, &axis) in axes.iter().enumerate() {
            (four.dims[axis], four.strides[axis]) = (dims[i], strides[i]);
        }
        Some(four)
    }

    /// Width and height of its image, in pixels.
    fn size(&self, blocks: Blocks) -> [usize; 2] {
        let [n, c, h, w] = self.dims;
        match blocks {
            Blocks::Across => [c.div_ceil(4) * w, n * h],
            Blocks::Down => [w, c.div_ceil(4) * h],
        }
    }

    /// Whether the image is within the limits, and kernels can count its pixels.
    fn fits(&self, blocks: Blocks, cl: &ClDevice) -> bool {
        let [width, height] = self.size(blocks);
        let [most_width, most_height] = limits(cl);
        let within = width > 0 && height > 0 && width <= most_width && height <= most_height;
        let most = if cl.info().largest_buffer == 0 { u64::MAX } else { cl.info().largest_buffer };
        within && width * height < 1 << 30 && (16 * width * height) as u64 <= most
    }

    /// As the kernels' struct.
    fn words(&self) -> [i64; 6] {
        let [n, c, h, w] = self.dims.map(|d| d as i64);
        let [a, b, d, e] = self.strides.map(|s| s as i64);
        [n | c << 32, h | w << 32, a, b, d, e]
    }
}

/// The greatest width and height of images.
fn limits(cl: &ClDevice) -> [usize; 2] {
    #[cfg(test)]
    if let Some(limits) = tests::LIMITS.get() {
        return limits;
    }
    cl.image_limits().unwrap_or_default()
}

/// The conversion kernel of this name for elements of `dtype`.
fn conversion(cl: &'static ClDevice, name: &'static str, dtype: DType, filter: bool) -> Result<Arc<ClKernel>> {
    kernel(cl, KernelKey::new(name, &[dtype as u64, filter.into()]), "image", || {
        format!("#define {name}\n#define A {dtype}\n{}{TEMPLATE}", flag(filter, "FILTER"))
    })
}

/// Where there is no memory for images there may be some for buffers, or enough without images.
fn unless_full<T>(made: Result<T>) -> Result<Option<T>> {
    match made {
        Err(Error::OutOfMemory { .. }) => Ok(None),
        made => made.map(Some),
    }
}

/// What kernels are given of an image.
fn arg(image: &Image) -> Result<Arg<'_>> {
    let block = image.storage().allocation().block();
    let of_no_pool = || Error::invalid("image", format!("{image:?} has no memory"));
    block.and_then(OpenCl::image).map(Arg::Image).ok_or_else(of_no_pool)
}

/// An image of a tensor's elements, made by one launch that counts as none of the user's.
fn make(cl: &'static ClDevice, x: &Tensor, t: &Tensor4, blocks: Blocks, kind: StorageType) -> Result<Image> {
    let format = format(x.dtype).expect("asked before");
    let [width, height] = t.size(blocks);
    let image = Image::new(x.device(), ImageDesc { width, height, format }, kind)?;
    let kernel = conversion(cl, "TO_IMAGE", x.dtype, blocks == Blocks::Down)?;
    let (words, from) = (t.words(), x.device_view()?);
    let args = [from.buffer(), from.offset(), arg(&image)?, Arg::Bytes(bytemuck::cast_slice(&words))];
    cl.launch_uncounted(&kernel, &args, &[width * height], &[group_of(&kernel, LOCAL)])?;
    Ok(image)
}

/// The image of a tensor that is likely to be constant: kept with its storage until that changes.
fn constant(cl: &'static ClDevice, x: &Tensor, t: &Tensor4, blocks: Blocks) -> Result<Image> {
    let stream = cl.current_stream().index() as i64; // another stream would have to wait for the conversion
    let read = [x.layout.offset as i64, x.dtype as i64, blocks as i64, stream];
    let key: ImageKey = read.into_iter().chain(t.words()).collect();
    x.storage.derived_image(key, || make(cl, x, t, blocks, StorageType::Static))
}

/// An image of a tensor that fits, for a use of this moment.
fn transient(cl: &'static ClDevice, x: &Tensor) -> Result<Image> {
    let four = Tensor4::of(&x.layout).expect("it was asked whether it fits");
    make(cl, x, &four, Blocks::Across, StorageType::Dynamic)
}

/// How many of a batch `[n, c, h, w]` an image has room for; `None` where that is not even one.
fn batch(cl: &ClDevice, x: &Tensor) -> Option<usize> {
    let [n, c, h, w] = four(x);
    let most = limits(cl)[1].checked_div(h)?.min(n);
    let slice = Tensor4 { dims: [most, c, h, w], strides: [0; 4] };
    slice.fits(Blocks::Across, cl).then_some(most)
}

/// So many of a batch from one on.
fn slice(t: &Tensor, from: usize, count: usize) -> Result<Tensor> {
    Ok(t.with_layout(t.layout.narrow("image", 0, from, count)?))
}

/// The image of a tensor, in NC4HW4: see [`Tensor::to_image`](crate::Tensor::to_image). `None` where it has none.
pub(crate) fn to_image(x: &Tensor) -> Result<Option<Image>> {
    let cl = x.cl_device()?;
    let four = Tensor4::of(&x.layout).filter(|four| format(x.dtype).is_some() && four.fits(Blocks::Across, cl));
    four.map(|_| transient(cl, x)).transpose()
}

/// Fills a tensor from its image.
pub(crate) fn from_image(image: &Image, out: &Tensor) -> Result<()> {
    capture::refuse(out.device(), "from_image", "a replay would not keep the image: convert it outside")?;
    let cl = out.cl_device()?;
    let four = Tensor4::of(&out.layout).expect("an image is of a tensor of at most four dims");
    let kernel = conversion(cl, "FROM_IMAGE", out.dtype, false)?;
    let [width, height] = four.size(Blocks::Across);
    let (words, to) = (four.words(), out.device_view()?);
    let args = [arg(image)?, to.buffer(), to.offset(), Arg::Bytes(bytemuck::cast_slice(&words))];
    launch_free(cl, &kernel, &args, width * height)
}

#[cfg(test)]
mod tests;

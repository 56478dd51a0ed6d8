//! Kernels that read images instead of buffers: `kernels/image.cl`. They run if the memory mode asks for images and the operands fit in
//! images. Otherwise these functions return `None` or false, and the operation reads buffers.

mod conv;
mod map;
mod pool;
mod product;

pub(crate) use conv::{convolution, reads_images};
pub(crate) use map::elementwise;
pub(crate) use pool::pool;
pub(crate) use product::product;

use crate::backend::opencl::prelude::*;
use crate::device::capture;
use crate::storage::driver::opencl::OpenCl;
use crate::storage::{Image, ImageDesc, ImageFormat, ImageKey, MemoryMode, StorageType, memory_mode};

const TEMPLATE: &str = include_str!("../../../kernels/image.cl");

/// Returns the device of `x` if operations on `x` should read images. In mode auto, the tuning parameter `knob` decides. Returns None
/// while a graph is captured, because its replays would need the images.
fn image_device(x: &Tensor, knob: TuningParameter) -> Option<&'static ClDevice> {
    // Every launch calls this function, so the cheapest condition comes first.
    let mode = memory_mode();
    if mode == MemoryMode::Buffer {
        return None;
    }
    let cl = x.cl_device().ok().filter(|cl| mode == MemoryMode::Image || cl.tuned(knob) == 1)?;
    (cl.image_limits().is_some() && !capture::is_capturing(x.device())).then_some(cl)
}

/// Returns the image format that stores elements of a dtype exactly, or `None` if there is no such format.
fn exact_format(dtype: DType) -> Option<ImageFormat> {
    match dtype {
        DType::F32 | DType::BF16 => Some(ImageFormat::F32),
        DType::F16 => Some(ImageFormat::F16),
        _ => None,
    }
}

/// The direction in which an image stores its blocks of four channels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Blocks {
    /// From left to right: for a tensor `[n, c, h, w]`.
    Across,
    /// From top to bottom: for a filter `[1, o, taps, c]`.
    Down,
}

/// The sizes and strides of a tensor that is stored as an image: batch, channels, rows and columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tensor4 {
    pub(crate) dims: [usize; 4],
    pub(crate) strides: [isize; 4],
}

impl Tensor4 {
    /// Converts a layout of up to four dims: `[channels]`, `[batch, channels]`, `[channels, rows, columns]` or all four.
    pub(crate) fn new(layout: &Layout) -> Option<Tensor4> {
        let (dims, strides) = (layout.shape.dims(), &layout.strides);
        let axes: [&[usize]; 5] = [&[], &[1], &[0, 1], &[1, 2, 3], &[0, 1, 2, 3]];
        let axes = axes.get(dims.len())?;
        let mut four = Tensor4 { dims: [1; 4], strides: [0; 4] };
        for (i, &axis) in axes.iter().enumerate() {
            (four.dims[axis], four.strides[axis]) = (dims[i], strides[i]);
        }
        Some(four)
    }

    /// Returns the width and height of the image in pixels.
    fn size(&self, blocks: Blocks) -> [usize; 2] {
        let [n, c, h, w] = self.dims;
        match blocks {
            Blocks::Across => [c.div_ceil(4) * w, n * h],
            Blocks::Down => [w, c.div_ceil(4) * h],
        }
    }

    /// True if the image is within the device's limits and its pixels can be indexed with 32 bits.
    fn fits(&self, blocks: Blocks, cl: &ClDevice) -> bool {
        let [width, height] = self.size(blocks);
        let [most_width, most_height] = limits(cl);
        let within = width > 0 && height > 0 && width <= most_width && height <= most_height;
        let most = if cl.info().largest_buffer == 0 { u64::MAX } else { cl.info().largest_buffer };
        within && width * height < 1 << 30 && (16 * width * height) as u64 <= most
    }

    /// Returns the words of the struct that the kernels take.
    fn words(&self) -> [i64; 6] {
        let [n, c, h, w] = self.dims.map(|d| d as i64);
        let [a, b, d, e] = self.strides.map(|s| s as i64);
        [n | c << 32, h | w << 32, a, b, d, e]
    }
}

/// Returns the maximum width and height of images on this device, in pixels.
fn limits(cl: &ClDevice) -> [usize; 2] {
    #[cfg(test)]
    if let Some(limits) = tests::IMAGE_LIMITS.get() {
        return limits;
    }
    cl.image_limits().unwrap_or_default()
}

/// Returns the kernel `name`, one of those without a formula, for elements of `dtype`.
fn image_kernel(cl: &'static ClDevice, name: &'static str, dtype: DType, filter: bool) -> Result<Arc<ClKernel>> {
    kernel_config! { "" => name, "A" => dtype, "FILTER" => filter }.kernel(cl, name, "image", &[TEMPLATE])
}

/// Returns `Ok(None)` if memory for images ran out, because the operation can still read buffers.
fn none_if_out_of_memory<T>(made: Result<T>) -> Result<Option<T>> {
    match made {
        Err(Error::OutOfMemory { .. }) => Ok(None),
        made => made.map(Some),
    }
}

fn image_arg(image: &Image) -> Result<Arg<'_>> {
    let block = image.storage().allocation().block();
    let of_no_pool = || Error::invalid("image", format!("{image:?} has no memory"));
    block.and_then(OpenCl::image_of_block).map(Arg::Image).ok_or_else(of_no_pool)
}

/// Makes an image of a tensor's elements. The launch does not count in the launch statistics.
fn make_image(cl: &'static ClDevice, x: &Tensor, t: &Tensor4, blocks: Blocks, kind: StorageType) -> Result<Image> {
    let format = exact_format(x.dtype).expect("the caller has checked it");
    let [width, height] = t.size(blocks);
    let image = Image::new(x.device(), ImageDesc { width, height, format }, kind)?;
    let kernel = image_kernel(cl, "TO_IMAGE", x.dtype, blocks == Blocks::Down)?;
    let (words, from) = (t.words(), x.device_view()?);
    let args = args![from; image_arg(&image)?, &words[..]];
    cl.launch_uncounted(&kernel, &args, &[width * height], &[clamp_group_size(&kernel, DEFAULT_GROUP_SIZE)])?;
    Ok(image)
}

/// Returns the image of a tensor that is probably constant, such as a weight. The image is cached with the tensor's storage until the storage changes.
fn cached_image(cl: &'static ClDevice, x: &Tensor, t: &Tensor4, blocks: Blocks) -> Result<Image> {
    let stream = cl.current_stream().index() as i64; // another stream would have to wait for the conversion
    let read = [x.layout.offset as i64, x.dtype as i64, blocks as i64, stream];
    let key: ImageKey = read.into_iter().chain(t.words()).collect();
    x.storage.derived_image(key, || make_image(cl, x, t, blocks, StorageType::Static))
}

/// Makes an image of a tensor for a single use. The caller has checked that the tensor fits in an image.
fn single_use_image(cl: &'static ClDevice, x: &Tensor) -> Result<Image> {
    let four = Tensor4::new(&x.layout).expect("the caller has checked it");
    make_image(cl, x, &four, Blocks::Across, StorageType::Dynamic)
}

/// Returns the number of items of a batch `[n, c, h, w]` that fit in one image, or `None` if not even one item fits.
fn items_per_image(cl: &ClDevice, x: &Tensor) -> Option<usize> {
    let [n, c, h, w] = sizes_4d(x);
    let most = limits(cl)[1].checked_div(h)?.min(n);
    let slice = Tensor4 { dims: [most, c, h, w], strides: [0; 4] };
    slice.fits(Blocks::Across, cl).then_some(most)
}

/// Returns a view of `count` items of a batch, from item `from` on.
fn slice(t: &Tensor, from: usize, count: usize) -> Result<Tensor> {
    Ok(t.with_layout(t.layout.narrow("image", 0, from, count)?))
}

/// Returns the image of a tensor in NC4HW4 (blocks of four channels), or `None` if the tensor fits in no image; see
/// [`Tensor::to_image`](crate::Tensor::to_image).
pub(crate) fn to_image(x: &Tensor) -> Result<Option<Image>> {
    let cl = x.cl_device()?;
    let four = Tensor4::new(&x.layout).filter(|four| exact_format(x.dtype).is_some() && four.fits(Blocks::Across, cl));
    four.map(|_| single_use_image(cl, x)).transpose()
}

/// Copies the elements of an image to the tensor `out`.
pub(crate) fn from_image(image: &Image, out: &Tensor) -> Result<()> {
    let reason = "a graph does not keep the image for its replays: convert it outside the capture";
    capture::refuse_while_capturing(out.device(), "from_image", reason)?;
    let cl = out.cl_device()?;
    let four = Tensor4::new(&out.layout).expect("an image is of a tensor of at most four dims");
    let kernel = image_kernel(cl, "FROM_IMAGE", out.dtype, false)?;
    let [width, height] = four.size(Blocks::Across);
    let (words, to) = (four.words(), out.device_view()?);
    let args = args![; image_arg(image)?, to.buffer(), to.offset(), &words[..]];
    launch_tuned(cl, &kernel, &args, width * height)
}

#[cfg(test)]
mod tests;

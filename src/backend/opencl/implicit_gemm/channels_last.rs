//! Channels-last images and weights, as the products read them. Other layouts are copied (`kernels/channels_last.cl`).

use crate::backend::opencl::implicit_gemm::{PIECE_BYTES, Phase, Steps};
use crate::backend::opencl::prelude::*;

const TEMPLATE: &str = include_str!("../../../../kernels/channels_last.cl");

/// The work-group size of the copy kernel.
const COPY_GROUP_SIZE: usize = 256;
/// The number of channels in a tile of the copy.
const TILE_CHANNELS: usize = 64;
/// The number of pixels in a tile of the copy, for large and for small images.
const TILE_PIXELS: [usize; 2] = [64, 16];

/// The size in bytes of the longest slice along k. If the channels of a tap are a multiple of this size, every slice is inside one tap.
const MAX_SLICE_BYTES: usize = 128;

/// The maximum number of bytes of images. Kernels compute byte offsets in images with 31 bits.
pub(super) const MAX_IMAGE_BYTES: usize = 1 << 31;

/// A strided view `[N, groups, channels, rows, columns]` of a tensor: `skip` is the offset from the tensor's first element, in elements.
#[derive(Clone, Copy)]
pub(super) struct Strided {
    skip: isize,
    dims: [usize; 5],
    strides: [isize; 5],
}

/// Images with contiguous channels. The channels of each group are padded to a multiple of 16 bytes.
pub(super) struct ChannelsLast {
    pub(super) tensor: Tensor,
    /// The number of elements of a tap: the channels of a group, or the padded row of the kernel if whole rows are taps ([`WholeRows`]).
    pub(super) channels: usize,
    /// The number of elements of a tap that are multiplied. For the other elements the kernel reads zeros.
    pub(super) inside: usize,
    /// The number of rows and columns of an image.
    pub(super) size: [usize; 2],
    /// The distance from one pixel to the next, in elements.
    pub(super) pixel: usize,
}

/// Taps that are whole rows of the convolution kernel, for images of few channels. A row of a window is contiguous, so the whole row is padded to a
/// multiple of 16 bytes, instead of each pixel. Pixels are padded only until windows, which are a stride apart, begin at multiples of 16 bytes.
#[derive(Clone, Copy)]
pub(super) struct WholeRows {
    /// The number of elements of a pixel, including padding.
    pub(super) pixel: usize,
    /// The number of elements of a kernel row, including padding.
    pub(super) row: usize,
}

impl WholeRows {
    /// Returns None if taps of whole rows would not make k smaller.
    pub(super) fn new(w: &Windows, channels: usize, size: usize) -> Option<WholeRows> {
        let piece = PIECE_BYTES / size;
        let pixel = channels.next_power_of_two().max(piece >> w.stride[1].trailing_zeros().min(piece.ilog2()));
        let row = (w.kernel[1] * pixel).next_multiple_of(piece);
        (pixel < piece && w.kernel[1] > 1 && w.dilation[1] == 1).then_some(WholeRows { pixel, row })
    }

    /// Copies images with their padding. In the copy, each group of `stride` adjacent pixels counts as one pixel, and windows have one column of taps.
    pub(super) fn images(self, t: &Tensor, steps: Steps) -> Result<(ChannelsLast, Steps)> {
        let WholeRows { pixel, row } = self;
        let [rows, _] = steps.read_extent();
        let stride = steps.stride[1];
        let across = steps.grid[1] - 1 + row.div_ceil(pixel * stride);
        let tensor = padded(t, Strided::images(t, 1), steps.padding, [rows, across * stride], pixel)?;
        let inside = steps.kernel[1] * pixel;
        let one = |[rows, _]: [usize; 2]| [rows, 1];
        let images = ChannelsLast { tensor, channels: row, inside, size: [rows, across], pixel: pixel * stride };
        let [kernel, stride, dilation] = [steps.kernel, steps.stride, steps.dilation].map(one);
        Ok((images, Steps { kernel, stride, dilation, padding: [0, 0], ..steps }))
    }

    pub(super) fn matrix(self, weight: &Tensor) -> Result<Matrix> {
        let WholeRows { pixel, row } = self;
        Ok(Matrix { channels: row, ..copied_matrix(weight, Strided::weight(weight, 1), row / pixel, pixel)? })
    }
}

impl ChannelsLast {
    pub(super) fn shallow_clone(&self) -> ChannelsLast {
        ChannelsLast { tensor: self.tensor.shallow_clone(), ..*self }
    }
}

/// The weight as a matrix for each group. Rows are output channels, and columns are the elements of windows, tap by tap.
pub(super) struct Matrix {
    pub(super) tensor: Tensor,
    /// The number of channels of a tap, including padding.
    pub(super) channels: usize,
    /// The strides of channels, rows, groups, and of the rows and columns of taps. Either the rows or the channels of all taps are contiguous.
    pub(super) channel: isize,
    pub(super) row: isize,
    pub(super) group: isize,
    pub(super) taps: [isize; 2],
}

impl Strided {
    /// Returns the view for images `[N, groups * channels, rows, columns]`.
    pub(super) fn images(t: &Tensor, groups: usize) -> Strided {
        let ([n, c, rows, columns], s) = (sizes_4d(t), t.strides());
        let each = c / groups;
        let strides = [s[0], s[1] * each as isize, s[1], s[2], s[3]];
        Strided { skip: 0, dims: [n, groups, each, rows, columns], strides }
    }

    /// Returns a view of only the pixels that strided windows of a single tap read. None if products can read the images without a copy.
    pub(super) fn subsampled(mut self, t: &Tensor, w: &Windows) -> Option<Strided> {
        if self.pixel_stride(t).is_some() {
            return None;
        }
        for d in 0..2 {
            self.strides[3 + d] *= w.stride[d] as isize;
            self.dims[3 + d] = w.grid[d];
        }
        Some(self)
    }

    /// Returns the view for a weight `[groups * rows, channels, kernel]`, in which each row is treated as an image.
    pub(super) fn weight(t: &Tensor, groups: usize) -> Strided {
        let ([outer, c, kh, kw], s) = (sizes_4d(t), t.strides());
        let rows = outer / groups;
        Strided { skip: 0, dims: [rows, groups, c, kh, kw], strides: [s[0], s[0] * rows as isize, s[1], s[2], s[3]] }
    }

    /// Returns the weight for the image gradient of a phase: rows and channels exchanged, and the phase's taps in reverse order.
    pub(super) fn reversed(self, phases: [Phase; 2]) -> Strided {
        let Strided { dims: [rows, groups, c, ..], strides: [row, group, channel, ..], mut skip } = self;
        let mut strides = [channel, group, row, 0, 0];
        for (d, phase) in phases.into_iter().enumerate() {
            skip += self.strides[3 + d] * (phase.tap + (phase.taps - 1) * phase.apart) as isize;
            strides[3 + d] = -self.strides[3 + d] * phase.apart as isize;
        }
        Strided { skip, dims: [c, groups, rows, phases[0].taps, phases[1].taps], strides }
    }

    /// Returns the stride between pixels if products can read the images in place, in pieces of 16 bytes; otherwise None.
    fn pixel_stride(&self, t: &Tensor) -> Option<usize> {
        let Strided { dims: [n, groups, each, rows, columns], strides: [image, group, channel, row, column], .. } =
            *self;
        // The stride of a dim of size 1 is arbitrary, so such dims are ignored.
        let steps = [(columns, column), (rows, row), (n, image)];
        let pixel = steps.iter().find(|(count, _)| *count > 1).map_or((groups * each) as isize, |(_, step)| *step);
        let follows = |across: usize, (count, step): (usize, isize)| count == 1 || step == pixel * across as isize;
        let pixels = n * rows * columns;
        let bytes = usize::try_from(pixel).ok()?.checked_mul(pixels * t.dtype.size())?;
        let usable = channel == 1
            && each.is_multiple_of(PIECE_BYTES / t.dtype.size())
            && (groups == 1 || group == each as isize)
            && self.is_piece_aligned(t, &[(pixels, pixel)])
            && [1, columns, rows * columns].into_iter().zip(steps).all(|(across, step)| follows(across, step));
        (usable && bytes < MAX_IMAGE_BYTES).then_some(pixel as usize)
    }

    /// True if the first element and all strides of dims larger than 1 are aligned to 16 bytes. `steps` lists the size and the stride of each dim.
    fn is_piece_aligned(&self, t: &Tensor, steps: &[(usize, isize)]) -> bool {
        let piece = PIECE_BYTES / t.dtype.size();
        t.layout.offset.wrapping_add_signed(self.skip).is_multiple_of(piece)
            && steps.iter().all(|&(count, step)| count == 1 || step.unsigned_abs().is_multiple_of(piece))
    }

    /// Returns the strides of a weight that products can read in place: of channels, of rows and groups, and of taps. None if a copy is needed.
    fn matrix_strides(&self, t: &Tensor, by_rows: bool) -> Option<(isize, [isize; 2], [isize; 2])> {
        let Strided { dims: [rows, groups, each, kh, kw], strides: [row, group, channel, down, right], .. } = *self;
        let bytes = each * t.dtype.size();
        let in_order = (kw == 1 || right == each as isize) && (kh == 1 || down == (kw * each) as isize);
        let strides = Some((channel, [row, group], [down, right]));
        if channel == 1
            && bytes.is_multiple_of(PIECE_BYTES)
            && in_order
            && self.is_piece_aligned(t, &[(rows, row), (groups, group)])
        {
            return strides;
        }
        let steps = [(groups, group), (each, channel), (kh, down), (kw, right)];
        let usable = by_rows
            && row == 1
            && channel > 1
            && bytes.is_multiple_of(MAX_SLICE_BYTES)
            && self.is_piece_aligned(t, &steps);
        strides.filter(|_| usable)
    }
}

/// True if images `[N, C, H, W]` are channels-last.
pub(super) fn is_channels_last(t: &Tensor) -> bool {
    t.layout.format() == MemoryFormat::ChannelsLast
}

/// Allocates a result `[N, C, H, W]`, row-major or channels-last (`last`), zeroed or uninitialised, with the dtype and device of `t`.
pub(super) fn empty_result(dims: [usize; 4], last: bool, zeros: bool, t: &Tensor) -> Result<Tensor> {
    let format = if last { MemoryFormat::ChannelsLast } else { MemoryFormat::Contiguous };
    let layout = Layout::with_format(dims.into(), format);
    match zeros {
        true => Ok(Tensor::zeros(dims, t)?.with_layout(layout)),
        false => Tensor::empty_with_layout(layout, t.dtype, t.device()),
    }
}

/// Returns images as `[N, size, groups, channels]`, with `before` rows and columns of zeros in front. Negative numbers crop the images.
pub(super) fn channels_last(t: &Tensor, view: Strided, before: [isize; 2], size: [usize; 2]) -> Result<ChannelsLast> {
    let [_, groups, each, rows, columns] = view.dims;
    let without_copy = view.pixel_stride(t).filter(|_| before == [0, 0] && size == [rows, columns]);
    if let Some(pixel) = without_copy {
        return Ok(ChannelsLast { tensor: t.shallow_clone(), channels: each, inside: each, size, pixel });
    }
    let channels = each.next_multiple_of(PIECE_BYTES / t.dtype.size());
    let tensor = padded(t, view, before, size, channels)?;
    Ok(ChannelsLast { tensor, channels, inside: channels, size, pixel: groups * channels })
}

/// Copies images to the layout that [`channels_last`] returns, with `channels` channels for each group, including padding.
pub(super) fn padded(
    t: &Tensor,
    view: Strided,
    before: [isize; 2],
    size: [usize; 2],
    channels: usize,
) -> Result<Tensor> {
    let [n, groups, ..] = view.dims;
    let pixel = groups * channels;
    let tensor = Tensor::empty_with_shape([n, size[0], size[1], pixel], t.dtype, t.device())?;
    launch_copy(t, view, (before, size, channels), &tensor, [size[0] * size[1] * pixel, channels, pixel])?;
    Ok(tensor)
}

/// Returns a strided weight as a matrix, without a copy if products can read the weight in place. With `rows`, rows may be contiguous instead of
/// channels.
pub(super) fn matrix(weight: &Tensor, view: Strided, rows: bool) -> Result<Matrix> {
    let [.., each, _, kw] = view.dims;
    if let Some((channel, [row, group], taps)) = view.matrix_strides(weight, rows) {
        let offset = weight.layout.offset.wrapping_add_signed(view.skip);
        let tensor = weight.with_layout(Layout { offset, ..weight.layout.clone() });
        return Ok(Matrix { tensor, channels: each, channel, row, group, taps });
    }
    copied_matrix(weight, view, kw, each.next_multiple_of(PIECE_BYTES / weight.dtype.size()))
}

/// Copies a strided weight to a matrix in which taps have `columns` columns, and each tap has `channels` channels, including padding.
fn copied_matrix(weight: &Tensor, view: Strided, columns: usize, channels: usize) -> Result<Matrix> {
    let [count, groups, _, kh, _] = view.dims;
    let row = kh * columns * channels;
    let tensor = Tensor::empty_with_shape([groups, count, row], weight.dtype, weight.device())?;
    launch_copy(weight, view, ([0, 0], [kh, columns], channels), &tensor, [row, count * row, channels])?;
    let [row, group] = [row, count * row].map(|step| step as isize);
    Ok(Matrix { tensor, channels, channel: 1, row, group, taps: [0, 0] })
}

/// Launches `kernels/channels_last.cl`, which pads each group to `padded` channels. `to` holds the copy's strides of images, groups and pixels.
fn launch_copy(
    t: &Tensor,
    view: Strided,
    (before, size, padded): ([isize; 2], [usize; 2], usize),
    out: &Tensor,
    to: [usize; 3],
) -> Result<()> {
    let (device, bytes) = (t.cl_device()?, t.dtype.size());
    let [n, groups, each, rows, columns] = view.dims;
    let piece = PIECE_BYTES / bytes;
    let (pixels, contiguous) = (size[0] * size[1], view.strides[2] == 1 && each > 1);
    let channels = padded.next_power_of_two().min(TILE_CHANNELS);
    // If a piece holds all channels of a pixel, each work-item copies one piece. Otherwise each work-item reads at least one element.
    let tile = match channels <= piece {
        true => COPY_GROUP_SIZE * piece / channels,
        false if pixels < TILE_PIXELS[0] => TILE_PIXELS[1].max(COPY_GROUP_SIZE / channels),
        false => TILE_PIXELS[0].max(COPY_GROUP_SIZE / channels),
    };
    let config = kernel_config! {
        "V" => bits_type(bytes), "EACH" => piece, "CHANNELS" => channels, "TILE" => tile, "CONTIGUOUS" => contiguous,
    };
    let kernel = config.kernel(device, "channels_last", "channels_last", &[TEMPLATE])?;
    let numbers = [size[0] as isize, size[1] as isize, before[0], before[1]].into_iter();
    let numbers = numbers.chain([rows, columns, groups, each, padded, 0].map(|n| n as isize)).map(|n| n as i32);
    let mut words: SmallVec<[i32; 32]> = numbers.collect();
    let strides = view.strides.into_iter().chain(to.map(|n| n as isize)).map(|n| n as i64);
    words.extend(strides.flat_map(bytemuck::cast::<i64, [i32; 2]>));
    let (from, into) = (t.device_view()?, out.device_view()?);
    let first = from.first_element().wrapping_add_signed(view.skip) as u64;
    let args = args![; from.buffer(), first, into.buffer(), into.offset(), &words[..]];
    let items = pixels.div_ceil(tile) * padded.div_ceil(channels) * groups * n;
    device.launch(&kernel, &args, &[items * COPY_GROUP_SIZE], &[COPY_GROUP_SIZE])
}

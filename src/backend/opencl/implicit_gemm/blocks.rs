//! The image gradient for few channels. Images are cut into blocks of pixels, and the elements of a block are the output channels
//! of a convolution over the output's gradient. The weight holds zeros for taps that a pixel does not have, so an infinity or NaN
//! in that gradient can reach all pixels of a block.

use crate::backend::opencl::implicit_gemm::channels_last::{Matrix, Strided, padded};
use crate::backend::opencl::implicit_gemm::{PIECE_BYTES, Steps};
use crate::backend::opencl::prelude::*;
use crate::tensor::view::reshape_detached;

/// The maximum number of elements of a block, which is the number of columns of the narrowest tile.
const MAX_BLOCK_ELEMENTS: usize = 64;

/// The maximum number of channels of an image that is cut into blocks.
const MAX_CHANNELS: usize = 7;

/// Blocks of pixels: their sides in pixels (multiples of the windows' strides), the first window that reads from the first block, and
/// the number of windows that read from a block.
#[derive(Clone, Copy)]
pub(super) struct Blocks {
    sides: [usize; 2],
    first: [isize; 2],
    taps: [usize; 2],
    grid: [usize; 2],
    stride: [usize; 2],
    padding: [usize; 2],
}

impl Blocks {
    /// Returns None if images have too many channels, blocks would be empty, or taps are dilated.
    pub(super) fn new(w: &Windows, channels: usize) -> Option<Blocks> {
        let &Windows { image, kernel, stride, padding, .. } = w;
        let most = (MAX_BLOCK_ELEMENTS / channels / stride[0] / stride[1]).isqrt();
        if channels > MAX_CHANNELS || most == 0 || w.dilation != [1, 1] {
            return None;
        }
        let sides = stride.map(|step| step * most);
        let first = [0, 1].map(|d| -(kernel[d] as isize - 1 - padding[d] as isize).div_euclid(stride[d] as isize));
        let last = [0, 1].map(|d| ((sides[d] - 1 + padding[d]) / stride[d]) as isize);
        let taps = [0, 1].map(|d| (last[d] - first[d] + 1) as usize);
        let grid = [0, 1].map(|d| image[d].div_ceil(sides[d]));
        Some(Blocks { sides, first, taps, grid, stride, padding })
    }

    /// Returns the sizes of the product for `n` images: rows, columns and depth.
    pub(super) fn sizes(&self, n: usize, inner: usize, outer: usize) -> [usize; 3] {
        let [windows, elements, taps] = [self.grid, self.sides, self.taps].map(|[a, b]| a * b);
        [n * windows, elements * inner, taps * outer]
    }

    pub(super) fn steps(&self) -> Steps {
        let Blocks { sides, first, taps, grid, .. } = *self;
        let stride = [0, 1].map(|d| sides[d] / self.stride[d]);
        Steps { kernel: taps, grid, stride, dilation: [1, 1], padding: first.map(|p| -p) }
    }

    /// Returns the weight as a matrix with a row for each element of a block. The matrix is a view of a copy with zeros around the taps: the
    /// taps of the next pixel begin one element later, and the taps of the next window begin one stride earlier.
    pub(super) fn matrix(&self, weight: &Tensor) -> Result<Matrix> {
        let Blocks { sides, first, taps, stride, padding, .. } = *self;
        let [outer, inner, ..] = sizes_4d(weight);
        let channels = outer.next_multiple_of(PIECE_BYTES / weight.dtype.size());
        // The first row and column of taps with which the last window reads the first pixel.
        let lowest = [0, 1].map(|d| padding[d] as isize - stride[d] as isize * (first[d] + taps[d] as isize - 1));
        let back = [0, 1].map(|d| stride[d] * (taps[d] - 1));
        let size = [0, 1].map(|d| sides[d] + back[d]);
        let weight = weight.detach().transpose(0, 1)?;
        let around = padded(&weight, Strided::images(&weight, 1), lowest.map(|tap| -tap), size, channels)?;
        let [row, column] = [(size[1] * channels) as isize, channels as isize];
        let layout = Layout {
            shape: Shape::from([sides[0], sides[1], inner, taps[0], taps[1], channels]),
            strides: [row, column, row * size[0] as isize, -row * stride[0] as isize, -column * stride[1] as isize, 1]
                .into_iter()
                .collect(),
            offset: around.layout.offset + (back[0] * size[1] + back[1]) * channels,
        };
        let tensor = around.with_layout(layout).contiguous()?;
        let row = (taps[0] * taps[1] * channels) as isize;
        Ok(Matrix { tensor, channels, channel: 1, row, group: 0, taps: [0, 0] })
    }

    /// Assembles images from `blocks`, a channels-last tensor `[N, elements, grid]` in which each pixel holds one block.
    pub(super) fn images(&self, blocks: &Tensor, image: [usize; 2], last: bool) -> Result<Tensor> {
        let Blocks { sides: [down, right], grid: [rows, columns], .. } = *self;
        let [n, elements, ..] = sizes_4d(blocks);
        let inner = elements / (down * right);
        let parts = blocks.permute(&[0, 2, 3, 1])?.reshape([n, rows, columns, down, right, inner])?;
        let pixels = if last { parts.permute(&[0, 1, 3, 2, 4, 5])? } else { parts.permute(&[0, 5, 1, 3, 2, 4])? };
        let size = [rows * down, columns * right];
        let whole = match last {
            true => reshape_detached(&pixels, &Shape::from([n, size[0], size[1], inner]))?.permute(&[0, 3, 1, 2])?,
            false => reshape_detached(&pixels, &Shape::from([n, inner, size[0], size[1]]))?,
        };
        let format = if last { MemoryFormat::ChannelsLast } else { MemoryFormat::Contiguous };
        whole.narrow(2, 0, image[0])?.narrow(3, 0, image[1])?.to_memory_format(format)
    }
}

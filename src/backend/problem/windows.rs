//! Sliding windows over images: their geometry, and pooling.

use smallvec::SmallVec;

use crate::Tensor;
use crate::tensor::Dims;

/// The geometry of sliding windows over D dims. Backends take two dims, rows and columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Windows<const D: usize = 2> {
    /// The size of the image; `kernel` is the size of a window, and `grid` the number of windows, which is the output's size.
    pub(crate) image: [usize; D],
    pub(crate) kernel: [usize; D],
    pub(crate) grid: [usize; D],
    /// The step between windows; `padding` is the padding before the image, and `padding_after` the padding after it.
    pub(crate) stride: [usize; D],
    pub(crate) padding: [usize; D],
    pub(crate) padding_after: [usize; D],
    pub(crate) dilation: [usize; D],
    /// Whether the image is divided evenly among the windows (PyTorch's adaptive pooling). Only `image` and `grid` are then used.
    pub(crate) adaptive: bool,
}

/// The divisor of average pooling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Divisor {
    /// The number of elements of the window, padding included.
    Window,
    /// The number of elements of the window inside the image.
    InsideImage,
    Number(usize),
}

impl Divisor {
    /// The divisor's encoding as a kernel argument.
    pub(crate) fn code(self) -> i64 {
        match self {
            Divisor::Window => 0,
            Divisor::InsideImage => -1,
            Divisor::Number(n) => i64::try_from(n).unwrap_or(i64::MAX),
        }
    }
}

/// Maximum or average pooling, or its gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PoolTask {
    Max,
    MaxBackward,
    Mean(Divisor),
    MeanBackward(Divisor),
}

/// The sizes of a 4-D tensor.
pub(crate) fn sizes_4d(t: &Tensor) -> [usize; 4] {
    let dims = t.shape().dims();
    [dims[0], dims[1], dims[2], dims[3]]
}

/// Encodes the geometry as in the kernels' struct; `strides` belong to the tensor that is read.
pub(crate) fn words(w: &Windows, x: &Tensor, strides: &[isize]) -> SmallVec<[i64; 22]> {
    let pairs = [w.image, w.kernel, w.grid, w.stride, w.padding, w.padding_after, w.dilation];
    let dims: Dims = x.shape().dims()[..2].iter().copied().collect();
    let numbers = pairs.iter().flatten().chain(&dims).map(|&n| n as i64);
    numbers.chain((0..6).map(|i| strides.get(i).copied().unwrap_or(0) as i64)).collect()
}

//! Sliding windows over images: their geometry, and pooling.

use smallvec::SmallVec;

use crate::Tensor;
use crate::tensor::Dims;

/// The geometry of sliding windows over D dims; backends take two, rows and columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Windows<const D: usize = 2> {
    /// The sizes of the image, of a window, and of the output, which has an element for each window.
    pub(crate) image: [usize; D],
    pub(crate) kernel: [usize; D],
    pub(crate) grid: [usize; D],
    /// The padding is that before the image and, in `behind`, that after it.
    pub(crate) stride: [usize; D],
    pub(crate) padding: [usize; D],
    pub(crate) behind: [usize; D],
    pub(crate) dilation: [usize; D],
    /// Whether the image is divided among the windows (PyTorch's adaptive pooling): only `image` and `grid` are used.
    pub(crate) adaptive: bool,
}

/// The divisor of average pooling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Divisor {
    /// The number of elements of the window, including those in the padding.
    Window,
    /// The number of elements of the window inside the image.
    Inside,
    Number(usize),
}

impl Divisor {
    /// The divisor as an argument of the kernels.
    pub(crate) fn code(self) -> i64 {
        match self {
            Divisor::Window => 0,
            Divisor::Inside => -1,
            Divisor::Number(n) => i64::try_from(n).unwrap_or(i64::MAX),
        }
    }
}

/// Maximum or average pooling, or its backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Task {
    Max,
    MaxBackward,
    Mean(Divisor),
    MeanBackward(Divisor),
}

/// The sizes of a tensor of four dims.
pub(crate) fn four(t: &Tensor) -> [usize; 4] {
    let dims = t.shape().dims();
    [dims[0], dims[1], dims[2], dims[3]]
}

/// The words of the kernels' struct; `strides` are those of the tensor that is read.
pub(crate) fn words(w: &Windows, x: &Tensor, strides: &[isize]) -> SmallVec<[i64; 22]> {
    let pairs = [w.image, w.kernel, w.grid, w.stride, w.padding, w.behind, w.dilation];
    let dims: Dims = x.shape().dims()[..2].iter().copied().collect();
    let numbers = pairs.iter().flatten().chain(&dims).map(|&n| n as i64);
    numbers.chain((0..6).map(|i| strides.get(i).copied().unwrap_or(0) as i64)).collect()
}

//! Windows over images: where they lie and what is done with them.

use smallvec::SmallVec;

use crate::Tensor;
use crate::tensor::Dims;

/// Where windows lie; backends have those over the last two dims, rows and columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Windows<const D: usize = 2> {
    /// Elements of the image, taps of a window, windows.
    pub(crate) image: [usize; D],
    pub(crate) kernel: [usize; D],
    pub(crate) grid: [usize; D],
    /// Elements from one window to the next, of the padding before the image and behind it, from one tap to the next.
    pub(crate) stride: [usize; D],
    pub(crate) padding: [usize; D],
    pub(crate) behind: [usize; D],
    pub(crate) dilation: [usize; D],
    /// Windows divide the image among themselves: only `image` and `grid` count.
    pub(crate) adaptive: bool,
}

/// What a mean is divided by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Divisor {
    /// The elements of the window, with those in the padding.
    Window,
    /// The elements of the image in the window.
    Inside,
    Number(usize),
}

impl Divisor {
    /// As the kernels have it.
    pub(crate) fn code(self) -> i64 {
        match self {
            Divisor::Window => 0,
            Divisor::Inside => -1,
            Divisor::Number(n) => i64::try_from(n).unwrap_or(i64::MAX),
        }
    }
}

/// What is done with windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Task {
    Max,
    Unmax,
    Mean(Divisor),
    Unmean(Divisor),
}

/// The sizes of four dims.
pub(crate) fn four(t: &Tensor) -> [usize; 4] {
    let dims = t.shape().dims();
    [dims[0], dims[1], dims[2], dims[3]]
}

/// The numbers of a launch as the kernels' struct has them; `strides` are those of what is read.
pub(crate) fn words(w: &Windows, x: &Tensor, strides: &[isize]) -> SmallVec<[i64; 22]> {
    let pairs = [w.image, w.kernel, w.grid, w.stride, w.padding, w.behind, w.dilation];
    let dims: Dims = x.shape().dims()[..2].iter().copied().collect();
    let numbers = pairs.iter().flatten().chain(&dims).map(|&n| n as i64);
    numbers.chain((0..6).map(|i| strides.get(i).copied().unwrap_or(0) as i64)).collect()
}

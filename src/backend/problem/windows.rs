//! Sliding windows over images: geometry and pooling.

use crate::Tensor;

/// The geometry of sliding windows over D dims. Backends support D = 2: rows and columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Windows<const D: usize = 2> {
    /// The size of the image; `kernel` is the size of a window, and `grid` the number of windows along each dim, which is the output size.
    pub(crate) image: [usize; D],
    pub(crate) kernel: [usize; D],
    pub(crate) grid: [usize; D],
    /// The step from window to window; `padding` is the padding before the image, and `padding_after` the padding after the image.
    pub(crate) stride: [usize; D],
    pub(crate) padding: [usize; D],
    pub(crate) padding_after: [usize; D],
    pub(crate) dilation: [usize; D],
    /// Whether the image is divided evenly among the windows (PyTorch's adaptive pooling). If so, only `image` and `grid` are used.
    pub(crate) adaptive: bool,
}

/// The divisor of average pooling.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Divisor {
    /// The number of elements of the window, including padding.
    Window,
    /// The number of elements of the window that are inside the image.
    InsideImage,
    Number(usize),
}

/// Maximum or average pooling, or its gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PoolTask {
    Max,
    MaxBackward,
    Mean(Divisor),
    MeanBackward(Divisor),
}

/// Pooling of x. Only max pooling uses `index`: the forward pass writes the index of each maximum, and the backward pass reads it.
pub(crate) struct Pooling<'a> {
    pub(crate) windows: &'a Windows,
    pub(crate) task: PoolTask,
    pub(crate) x: &'a Tensor,
    pub(crate) index: &'a Tensor,
    pub(crate) out: &'a Tensor,
}

/// Im2col: copies the elements of each window of x to a column of `out`.
pub(crate) struct Im2col<'a> {
    pub(crate) windows: &'a Windows,
    pub(crate) x: &'a Tensor,
    pub(crate) out: &'a Tensor,
    /// Whether the batch is an inner dim of `out`, `[C, kernel, N, grid]`, instead of the first dim, `[N, C, kernel, grid]`.
    pub(crate) inside: bool,
}

/// The sizes of a 4-D tensor.
pub(crate) fn sizes_4d(t: &Tensor) -> [usize; 4] {
    let dims = t.shape().dims();
    [dims[0], dims[1], dims[2], dims[3]]
}

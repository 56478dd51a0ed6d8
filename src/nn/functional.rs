//! Operations whose names in PyTorch's `torch.nn.functional` mean something else for a tensor itself.

use crate::{Result, Tensor, ops};

/// The elements of each window of images as a column (PyTorch's `nn.functional.unfold`): `[N, C, H, W]` gives
/// `[N, C KH KW, windows]`, without N neither has it. Pairs are rows and columns; taps in the padding are 0. Any dtype, one
/// launch. Differentiable.
///
/// ```
/// use claystone::{Device, Tensor, nn::functional::{fold, unfold}};
/// let x = Tensor::arange(0, 9, 1, Device::Cpu)?.reshape([1, 3, 3])?;
/// let columns = unfold(&x, [2, 2], [1, 1], [0, 0], [1, 1])?;
/// assert_eq!(columns.i((.., 0))?.to_vec::<f32>()?, [0.0, 1.0, 3.0, 4.0]);
/// let overlaps = fold(&columns, [3, 3], [2, 2], [1, 1], [0, 0], [1, 1])?;
/// assert_eq!(overlaps.i((0, 1, 1))?.item::<f32>()?, 16.0); // four windows have the 4 in the middle
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// # Errors
/// [`crate::Error::Invalid`] for another rank, windows larger than the padded image, or a stride or dilation of 0.
pub fn unfold(
    x: &Tensor,
    kernel: [usize; 2],
    dilation: [usize; 2],
    padding: [usize; 2],
    stride: [usize; 2],
) -> Result<Tensor> {
    ops::unfold(x, kernel, dilation, padding, stride)
}

/// Columns, `[N, C KH KW, windows]` or without N, added up in images of `output_size` where [`unfold`] would have taken them
/// from (PyTorch's `nn.functional.fold`). Floats, one launch. Differentiable.
///
/// # Errors
/// As [`unfold`]; [`crate::Error::Invalid`] for columns that do not fit; [`crate::Error::UnsupportedDType`] for integers.
pub fn fold(
    columns: &Tensor,
    output_size: [usize; 2],
    kernel: [usize; 2],
    dilation: [usize; 2],
    padding: [usize; 2],
    stride: [usize; 2],
) -> Result<Tensor> {
    ops::fold(columns, output_size, kernel, dilation, padding, stride)
}

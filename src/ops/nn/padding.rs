//! Padding of convolutions, transposed convolutions and pools.

use std::array;

use crate::layout::shape::impl_from;
use crate::ops::dispatch::arguments::ParameterKind;
use crate::ops::dispatch::prelude::*;

/// The padding around an image.
///
/// Convolutions pad with zeros, and maximum pools with a value that is never the maximum. For a transposed convolution, the padding is
/// removed from the result.
///
/// A single number applies to both sides of all dims; an array of one number per dim applies each number to both sides of its dim; an
/// array of one pair per dim gives the number of elements before and after the image. By name ([`ops::call`](crate::ops::call)), a
/// padding is one integer, one or two integers for each dim, `"valid"` or `"same"`.
///
/// ```
/// use claystone::{ConvOptions, Device, Padding, Tensor};
/// let (x, w) = (Tensor::ones(&[1, 1, 4, 4], Device::Cpu)?, Tensor::ones(&[1, 1, 3, 3], Device::Cpu)?);
/// for (padding, rows, columns) in [
///     (1.into(), 4, 4),
///     ([1, 2].into(), 4, 6),
///     ([(1, 2), (0, 1)].into(), 5, 3),
///     (Padding::Same, 4, 4),
/// ] {
///     let y = x.conv2d(&w, None, ConvOptions { padding, ..ConvOptions::default() })?;
///     assert_eq!(y.shape().dims(), [1, 1, rows, columns]);
/// }
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Padding<const D: usize> {
    /// No padding: all windows are inside the image (PyTorch's `'valid'`).
    Valid,
    /// The padding that makes the result as large as the image, for strides of 1 (PyTorch's `'same'`). If the padding of a dim is odd,
    /// the end gets one element more than the start.
    Same,
    /// The number of elements before and after each dim.
    Explicit([(usize, usize); D]),
}

impl<const D: usize> Padding<D> {
    /// Returns the number of elements before and after each dim.
    pub(crate) fn sides(
        self,
        op: &'static str,
        kernel: [usize; D],
        stride: [usize; D],
        dilation: [usize; D],
    ) -> Result<[[usize; D]; 2]> {
        Ok(match self {
            Padding::Valid => [[0; D]; 2],
            Padding::Explicit(sides) => [sides.map(|(before, _)| before), sides.map(|(_, behind)| behind)],
            Padding::Same if stride != [1; D] => fail!(op, "the padding 'same' is for strides of 1, not {stride:?}"),
            Padding::Same => {
                let total = |d: usize| dilation[d].saturating_mul(kernel[d].saturating_sub(1));
                [array::from_fn(|d| total(d) / 2), array::from_fn(|d| total(d).div_ceil(2))]
            }
        })
    }

    /// Reads the padding from argument `i` of a call by name.
    pub(crate) fn from_args(a: &Args, i: usize) -> Result<Self> {
        match a.text(i) {
            Ok("valid") => return Ok(Padding::Valid),
            Ok("same") => return Ok(Padding::Same),
            _ => {}
        }
        let numbers = a.sizes(i).unwrap_or_default();
        let side = |at: usize| numbers[at];
        match numbers.len() {
            n if n == D => Ok(array::from_fn(side).into()),
            n if n == 2 * D => Ok(array::from_fn(|d| (side(2 * d), side(2 * d + 1))).into()),
            1 => Ok(side(0).into()),
            _ => a.argument_error(i, ParameterKind::Padding.description()),
        }
    }
}

impl_from! { Padding<D>:
    [const D: usize] usize, n => [n; D].into();
    [const D: usize] [usize; D], n => Padding::Explicit(n.map(|n| (n, n)));
    [const D: usize] [(usize, usize); D], sides => Padding::Explicit(sides);
}

impl From<(usize, usize)> for Padding<1> {
    fn from(sides: (usize, usize)) -> Padding<1> {
        Padding::Explicit([sides])
    }
}

impl<const D: usize> From<Padding<D>> for Argument {
    fn from(padding: Padding<D>) -> Argument {
        match padding {
            Padding::Valid => "valid".into(),
            Padding::Same => "same".into(),
            Padding::Explicit(sides) if sides.iter().all(|(before, behind)| before == behind) => {
                (&sides.map(|(before, _)| before)).into()
            }
            Padding::Explicit(sides) => {
                sides.iter().flat_map(|&(before, behind)| [before, behind]).collect::<Vec<_>>()[..].into()
            }
        }
    }
}

//! Memory formats of images: row-major or channels last.

use std::fmt;
use std::str::FromStr;

use crate::error::Excerpt;
use crate::layout::Layout;
use crate::layout::shape::{Dims, Shape};
use crate::{Error, Result};

/// The order of a tensor's elements in memory (PyTorch's `memory_format`). The memory format affects strides, never shapes or indices.
///
/// ```
/// use claystone::{Device, MemoryFormat, Tensor};
/// let x = Tensor::zeros([2, 3, 4, 5], Device::Cpu)?.to_memory_format(MemoryFormat::ChannelsLast)?;
/// assert_eq!((x.shape().dims(), x.strides()), (&[2, 3, 4, 5][..], &[60, 1, 15, 3][..]));
/// assert_eq!(x.relu()?.memory_format(), MemoryFormat::ChannelsLast);
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum MemoryFormat {
    /// Row-major: the last dim is innermost.
    #[default]
    Contiguous,
    /// Images `[N, C, H, W]` with the channels innermost: `[N, H, W, C]` in memory.
    ChannelsLast,
    /// Volumes `[N, C, D, H, W]` with the channels innermost: `[N, D, H, W, C]` in memory.
    ChannelsLast3d,
}

impl MemoryFormat {
    /// Returns the channels-last format for tensors of this rank, or `None` if there is none.
    pub(crate) fn channels_last(rank: usize) -> Option<MemoryFormat> {
        match rank {
            4 => Some(MemoryFormat::ChannelsLast),
            5 => Some(MemoryFormat::ChannelsLast3d),
            _ => None,
        }
    }

    /// Returns an error unless tensors of this shape can have the format.
    pub(crate) fn check(self, op: &'static str, shape: &Shape) -> Result<()> {
        let rank = match self {
            MemoryFormat::Contiguous => return Ok(()),
            MemoryFormat::ChannelsLast => 4,
            MemoryFormat::ChannelsLast3d => 5,
        };
        invalid!(op if shape.rank() != rank, "{self} needs {rank} dims, but the shape {shape} has {}", shape.rank());
        Ok(())
    }
}

impl fmt::Display for MemoryFormat {
    /// Prints the name that PyTorch uses: `contiguous_format`, `channels_last` or `channels_last_3d`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            MemoryFormat::Contiguous => "contiguous_format",
            MemoryFormat::ChannelsLast => "channels_last",
            MemoryFormat::ChannelsLast3d => "channels_last_3d",
        })
    }
}

impl FromStr for MemoryFormat {
    type Err = Error;

    /// Parses the name that `Display` prints.
    fn from_str(name: &str) -> Result<MemoryFormat> {
        let all = [MemoryFormat::Contiguous, MemoryFormat::ChannelsLast, MemoryFormat::ChannelsLast3d];
        all.into_iter().find(|format| format.to_string() == name).ok_or_else(|| {
            let reason = format!("'{}' is not contiguous_format, channels_last or channels_last_3d", Excerpt(name));
            Error::invalid("memory_format", reason)
        })
    }
}

/// Returns the dims in channels-last order, outermost first, for a rank that has a channels-last format.
fn channels_last_order(rank: usize) -> impl DoubleEndedIterator<Item = usize> {
    [0].into_iter().chain(2..rank).chain([1])
}

impl Layout {
    /// Lays out `shape` in `format` from the start of a storage, or in row-major order if the shape cannot have the format.
    pub(crate) fn with_format(shape: Shape, format: MemoryFormat) -> Layout {
        let rank = shape.rank();
        if format == MemoryFormat::Contiguous || MemoryFormat::channels_last(rank) != Some(format) {
            return Layout::contiguous(shape);
        }
        let mut strides = shape.contiguous_strides();
        let mut step = 1usize;
        for d in channels_last_order(rank).rev() {
            strides[d] = step as isize;
            step = step.saturating_mul(shape.dims()[d].max(1));
        }
        Layout { shape, strides, offset: 0 }
    }

    /// True if the elements are adjacent in memory, starting at `offset`, in the order of `format`. The order of dims of size 1 does not
    /// matter, so a layout may have several formats.
    pub(crate) fn has_format(&self, format: MemoryFormat) -> bool {
        if format == MemoryFormat::Contiguous {
            return self.is_contiguous();
        }
        let rank = self.shape.rank();
        MemoryFormat::channels_last(rank) == Some(format) && {
            let mut step = 1isize;
            self.numel() == 0
                || channels_last_order(rank).rev().filter(|&d| self.shape.dims()[d] != 1).all(|d| {
                    let fits = self.strides[d] == step;
                    // The product stops growing after a mismatch, because in an expanded view it could overflow.
                    step *= if fits { self.shape.dims()[d] as isize } else { 1 };
                    fits
                })
        }
    }

    /// Returns the format for results of operations on a tensor with this layout (PyTorch's `suggest_memory_format`): channels last if
    /// the strides increase from the channels to the images, with or without gaps, otherwise row-major.
    pub(crate) fn format(&self) -> MemoryFormat {
        let Some(format) = MemoryFormat::channels_last(self.shape.rank()) else { return MemoryFormat::Contiguous };
        if self.is_contiguous() {
            return MemoryFormat::Contiguous;
        }
        // The number of elements spanned by the dims visited so far.
        let mut span = 1;
        let grows = channels_last_order(self.shape.rank()).rev().filter(|&d| self.shape.dims()[d] != 1).all(|d| {
            let grows = self.strides[d] >= span;
            span = if grows { self.strides[d].saturating_mul(self.shape.dims()[d] as isize) } else { span };
            grows
        });
        if grows { format } else { MemoryFormat::Contiguous }
    }

    /// True if the elements are adjacent in memory, in the order of the layout's format.
    pub(crate) fn is_dense(&self) -> bool {
        self.has_format(self.format())
    }

    /// Broadcasts to `rank` dims and moves the channels to the last dim. A layout of that rank that is channels-last becomes row-major.
    pub(crate) fn with_channels_last(&self, rank: usize) -> Layout {
        let mut layout = self.clone();
        while layout.shape.rank() < rank {
            layout = layout.insert(0);
        }
        let order: Dims = channels_last_order(rank).collect();
        layout.permute(&order)
    }
}

/// Returns the layout of an elementwise result of this shape: the format of the first operand that has this shape (as PyTorch's
/// `TensorIterator`), or row-major if no operand has it.
pub(crate) fn result_layout<'a>(shape: Shape, operands: impl IntoIterator<Item = &'a Layout>) -> Layout {
    let format = match MemoryFormat::channels_last(shape.rank()) {
        Some(_) => operands.into_iter().find(|t| t.shape == shape).map(Layout::format),
        None => None,
    };
    Layout::with_format(shape, format.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_have_their_strides() {
        let images = Layout::with_format([2, 3, 4, 5].into(), MemoryFormat::ChannelsLast);
        assert_eq!(images.strides[..], [60, 1, 15, 3]);
        assert!(images.has_format(MemoryFormat::ChannelsLast) && !images.is_contiguous() && images.is_dense());
        let volumes = Layout::with_format([2, 3, 4, 5, 6].into(), MemoryFormat::ChannelsLast3d);
        assert_eq!(volumes.strides[..], [360, 1, 90, 18, 3]);
        assert_eq!(volumes.format(), MemoryFormat::ChannelsLast3d);
        assert_eq!(Layout::with_format([2, 3, 4].into(), MemoryFormat::ChannelsLast).strides[..], [12, 4, 1]);
    }

    #[test]
    fn dims_of_size_one_fit_both_formats() {
        for shape in [[2, 1, 4, 5], [2, 3, 1, 1], [1, 1, 1, 1], [0, 3, 4, 5]] {
            let layout = Layout::contiguous(shape.into());
            assert!(layout.has_format(MemoryFormat::ChannelsLast) && layout.is_contiguous());
            assert_eq!(layout.format(), MemoryFormat::Contiguous);
        }
    }

    #[test]
    fn results_take_the_format_of_the_first_operand_with_their_shape() {
        let shape = || Shape::from([2, 3, 4, 5]);
        let last = Layout::with_format(shape(), MemoryFormat::ChannelsLast);
        let rows = Layout::contiguous(shape());
        let row = Layout::contiguous([1, 3, 1, 1].into());
        let part = Layout::with_format([2, 6, 4, 5].into(), MemoryFormat::ChannelsLast).narrow("t", 1, 0, 3).unwrap();
        let of = |operands: &[&Layout]| result_layout(shape(), operands.iter().copied()).format();
        assert_eq!(of(&[&row, &last, &rows]), MemoryFormat::ChannelsLast);
        assert_eq!(of(&[&part, &last]), MemoryFormat::ChannelsLast);
        assert_eq!(of(&[&rows, &last]), MemoryFormat::Contiguous);
        assert_eq!(of(&[&part]), MemoryFormat::ChannelsLast);
        assert_eq!(of(&[&row.broadcast_to(&shape())]), MemoryFormat::Contiguous);
        assert!(!part.is_dense() && last.is_dense());
        assert_eq!(last.with_channels_last(4), Layout::contiguous([2, 4, 5, 3].into()));
        assert_eq!(Layout::contiguous([5].into()).with_channels_last(4).strides[2], 1);
    }
}

//! Where a tensor's elements lie in its storage: shape, strides and an offset, all in elements. Pure arithmetic.

use super::shape::{Dims, Shape};

/// Shape, strides and offset in elements. Strides may be zero (broadcast) or negative (flip).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) shape: Shape,
    pub(crate) strides: Dims<isize>,
    pub(crate) offset: usize,
}

impl Layout {
    /// Row-major from the start of the storage.
    pub(crate) fn contiguous(shape: Shape) -> Layout {
        let strides = shape.contiguous_strides();
        Layout { shape, strides, offset: 0 }
    }

    pub(crate) fn numel(&self) -> usize {
        self.shape.numel()
    }

    /// Whether the elements lie one after another in row-major order (from `offset` on).
    pub(crate) fn is_contiguous(&self) -> bool {
        let mut step = 1isize;
        for (&d, &s) in self.shape.dims().iter().zip(&self.strides).rev() {
            if d != 1 {
                if d != 0 && s != step {
                    return self.numel() == 0;
                }
                step *= d as isize;
            }
        }
        true
    }

    /// The same elements stretched to `shape`, which must be what [`Shape::broadcast`] gave.
    pub(crate) fn broadcast_to(&self, shape: &Shape) -> Layout {
        let missing = shape.rank() - self.shape.rank();
        let strides = (0..shape.rank())
            .map(|i| match i.checked_sub(missing) {
                Some(j) if self.shape.dims()[j] == shape.dims()[i] => self.strides[j],
                _ => 0,
            })
            .collect();
        Layout { shape: shape.clone(), strides, offset: self.offset }
    }

    /// The first and last element touched, both included; None for an empty layout.
    pub(crate) fn bounds(&self) -> Option<(usize, usize)> {
        if self.numel() == 0 {
            return None;
        }
        let (mut lo, mut hi) = (self.offset as isize, self.offset as isize);
        for (&d, &s) in self.shape.dims().iter().zip(&self.strides) {
            let reach = (d as isize - 1) * s;
            if reach < 0 { lo += reach } else { hi += reach }
        }
        Some((lo as usize, hi as usize))
    }

    /// Whether two positions may share an element (broadcast dims, or strides that fold onto each other).
    /// Exact for every layout that views of a contiguous tensor can make, conservative otherwise.
    pub(crate) fn may_alias_itself(&self) -> bool {
        let mut dims: Dims<(usize, usize)> = self
            .shape
            .dims()
            .iter()
            .zip(&self.strides)
            .filter(|(d, _)| **d > 1)
            .map(|(&d, &s)| (s.unsigned_abs(), d))
            .collect();
        dims.sort_unstable();
        let mut reach = 0usize;
        for &(s, d) in &dims {
            if s <= reach {
                return true;
            }
            reach += s * (d - 1);
        }
        false
    }
}

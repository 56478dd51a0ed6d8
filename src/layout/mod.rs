//! Layouts: the shape, strides and offset, in elements, that map a tensor's indices to its storage. This module only computes with
//! numbers, without devices.

pub(crate) mod collapse;
pub(crate) mod dims;
pub(crate) mod memory_format;
pub(crate) mod shape;

#[cfg(test)]
mod tests;

use crate::layout::shape::{Dims, Shape};
use crate::{Error, Result};

/// Shape, strides and offset in elements. Strides may be zero (broadcast) or negative (flip).
#[derive(Debug, Eq)]
pub(crate) struct Layout {
    pub(crate) shape: Shape,
    pub(crate) strides: Dims<isize>,
    pub(crate) offset: usize,
}

impl PartialEq for Layout {
    #[inline]
    fn eq(&self, other: &Layout) -> bool {
        self.offset == other.offset && self.same_layout(other, 1)
    }
}

impl Clone for Layout {
    #[inline]
    fn clone(&self) -> Layout {
        Layout { shape: self.shape.clone(), strides: shape::copy_dims(&self.strides), offset: self.offset }
    }
}

impl Layout {
    /// Returns the row-major layout that begins at the start of the storage.
    #[inline(always)]
    pub(crate) fn contiguous(shape: Shape) -> Layout {
        let strides = shape.contiguous_strides();
        Layout { shape, strides, offset: 0 }
    }

    pub(crate) fn numel(&self) -> usize {
        self.shape.numel()
    }

    /// True if shape and strides are equal, and the offsets are equal modulo `aligned`. Sizes and strides are compared one by one, which
    /// is faster than `memcmp` for such short lists; every launch makes several of these comparisons.
    #[inline]
    pub(crate) fn same_layout(&self, other: &Layout, aligned: usize) -> bool {
        fn equal<T: PartialEq>(a: &[T], b: &[T]) -> bool {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a == b)
        }
        self.offset % aligned == other.offset % aligned
            && equal(self.shape.dims(), other.shape.dims())
            && equal(&self.strides, &other.strides)
    }

    /// True if the elements are adjacent in memory, in row-major order, starting at `offset`.
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

    /// Broadcasts to `shape`, which must be a result of [`Shape::broadcast`] with this shape.
    pub(crate) fn broadcast_to(&self, shape: &Shape) -> Layout {
        if self.shape == *shape {
            return self.clone();
        }
        let missing = shape.rank() - self.shape.rank();
        let strides = (0..shape.rank())
            .map(|i| match i.checked_sub(missing) {
                Some(j) if self.shape.dims()[j] == shape.dims()[i] => self.strides[j],
                _ => 0,
            })
            .collect();
        Layout { shape: shape.clone(), strides, offset: self.offset }
    }

    /// Returns the lowest and the highest storage index of an element, both inclusive; `None` for an empty layout.
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

    /// True if two indices may refer to the same element, because a dim is broadcast or strides overlap. Exact for every view of a
    /// contiguous tensor; for other layouts, may also be true if no two indices do.
    pub(crate) fn may_alias_itself(&self) -> bool {
        if self.shape.numel() == 0 {
            return false;
        }
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

/// Views of the same storage.
impl Layout {
    /// Returns the size and stride of each dimension.
    fn axes(&self) -> Dims<(usize, isize)> {
        self.shape.dims().iter().copied().zip(self.strides.iter().copied()).collect()
    }

    fn from_axes(axes: impl IntoIterator<Item = (usize, isize)>, offset: usize) -> Layout {
        let (mut dims, mut strides) = (Dims::new(), Dims::new());
        // This is a loop, because `unzip` makes a function call for each element.
        for (size, stride) in axes {
            dims.push(size);
            strides.push(stride);
        }
        Layout { shape: dims.into(), strides, offset }
    }

    pub(crate) fn transpose(&self, a: usize, b: usize) -> Layout {
        let mut transposed = self.clone();
        transposed.shape.swap(a, b);
        transposed.strides.swap(a, b);
        transposed
    }

    /// Permutes the dimensions: dimension `dims[i]` becomes dimension `i`. `dims` must be a permutation.
    pub(crate) fn permute(&self, dims: &[usize]) -> Layout {
        let axes = self.axes();
        Layout::from_axes(dims.iter().map(|&d| axes[d]), self.offset)
    }

    /// Inserts a dimension of size 1 before `dim`.
    pub(crate) fn insert(&self, dim: usize) -> Layout {
        let mut axes = self.axes();
        let stride = axes.get(dim).map_or(1, |&(d, s)| (d.max(1) as isize).saturating_mul(s));
        axes.insert(dim, (1, stride));
        Layout::from_axes(axes, self.offset)
    }

    /// Removes dimension `dim` by selecting its first index.
    pub(crate) fn remove(&self, dim: usize) -> Layout {
        let mut axes = self.axes();
        axes.remove(dim);
        Layout::from_axes(axes, self.offset)
    }

    /// Selects the indices `start`, `start + step`, ... of dimension `dim`: `len` indices, all in range.
    fn slice_dim(&self, dim: usize, start: usize, step: isize, len: usize) -> Layout {
        let mut axes = self.axes();
        let stride = axes[dim].1;
        axes[dim] = (len, if len > 1 { stride.saturating_mul(step) } else { stride });
        // An empty view keeps the offset: there is no element to point to, and the storage may be empty.
        let skip = if len == 0 || self.numel() == 0 { 0 } else { start as isize * stride };
        Layout::from_axes(axes, self.offset.wrapping_add_signed(skip))
    }

    /// Selects the indices `start..start + len` of dimension `dim`.
    pub(crate) fn narrow(&self, op: &'static str, dim: usize, start: usize, len: usize) -> Result<Layout> {
        let size = self.shape.dims()[dim];
        invalid!(op if start.checked_add(len).is_none_or(|end| end > size),
            "{len} elements from index {start} on do not fit in dimension {dim} of size {size}");
        Ok(self.slice_dim(dim, start, 1, len))
    }

    /// Selects index `index` of dimension `dim`, counted from the end if negative, and removes the dimension.
    pub(crate) fn select(&self, op: &'static str, dim: usize, index: isize) -> Result<Layout> {
        let size = self.shape.dims()[dim];
        let i = if index < 0 { index + size as isize } else { index };
        if i < 0 || i as usize >= size {
            return Err(Error::IndexOutOfRange { op, index: index as i64, size });
        }
        Ok(self.slice_dim(dim, i as usize, 1, 1).remove(dim))
    }

    /// Returns Python's `[start:end:step]` along dimension `dim`. Negative ends count from the end, and both ends are clamped.
    pub(crate) fn slice(
        &self,
        op: &'static str,
        dim: usize,
        (start, end): (Option<isize>, Option<isize>),
        step: isize,
    ) -> Result<Layout> {
        invalid!(op if step == 0, "the step must not be 0");
        let size = self.shape.dims()[dim] as isize;
        let (lo, hi) = if step > 0 { (0, size) } else { (-1, size - 1) };
        let position = |i: isize| (if i < 0 { i.saturating_add(size) } else { i }).clamp(lo, hi);
        let (first, last) = if step > 0 { (lo, hi) } else { (hi, lo) };
        let (start, end) = (start.map_or(first, position), end.map_or(last, position));
        let span = if step > 0 { end - start } else { start - end };
        let len = (span.max(0) as usize).div_ceil(step.unsigned_abs());
        Ok(self.slice_dim(dim, start.max(0) as usize, step, len))
    }

    pub(crate) fn flip(&self, dim: usize) -> Layout {
        let size = self.shape.dims()[dim];
        self.slice_dim(dim, size.saturating_sub(1), -1, size)
    }

    /// Returns the elements whose index in dimension `b` minus the index in dimension `a` is `shift`, as a new last dimension. Dimensions
    /// `a` and `b` are removed.
    pub(crate) fn diagonal(&self, shift: isize, a: usize, b: usize) -> Layout {
        let mut axes = self.axes();
        let ((rows, down), (columns, right)) = (axes[a], axes[b]);
        let (top, left) = (shift.min(0).unsigned_abs(), shift.max(0).unsigned_abs());
        let len = rows.saturating_sub(top).min(columns.saturating_sub(left));
        let skip = if len == 0 || self.numel() == 0 { 0 } else { top as isize * down + left as isize * right };
        axes.remove(a.max(b));
        axes.remove(a.min(b));
        axes.push((len, down.saturating_add(right)));
        Layout::from_axes(axes, self.offset.wrapping_add_signed(skip))
    }

    /// Views windows of `size` elements, `step` elements apart along dimension `dim`; the elements of a window form a new last dimension.
    /// Dimension `dim` has at least `size` elements.
    pub(crate) fn unfold(&self, dim: usize, size: usize, step: usize) -> Layout {
        let mut axes = self.axes();
        let (len, stride) = axes[dim];
        axes[dim] = ((len - size) / step + 1, stride.saturating_mul(isize::try_from(step).unwrap_or(isize::MAX)));
        axes.push((size, stride));
        Layout::from_axes(axes, self.offset)
    }

    /// Views the elements, in the same order, in the shape `shape`, which has the same `numel`. Returns `None` if no strides can express
    /// that.
    pub(crate) fn reshape(&self, shape: &Shape) -> Option<Layout> {
        if self.numel() == 0 {
            return Some(Layout { offset: self.offset, ..Layout::contiguous(shape.clone()) });
        }
        // Groups of adjacent dimensions that have a common stride when merged, outermost first.
        let mut runs: Dims<(usize, isize)> = Dims::new();
        for (d, s) in self.axes().into_iter().filter(|(d, _)| *d != 1) {
            match runs.last_mut() {
                Some(run) if run.1 == d as isize * s => *run = (run.0 * d, s),
                _ => runs.push((d, s)),
            }
        }
        // The new dimensions are split off the groups, innermost first. No new dimension can span two groups.
        let (mut left, mut step) = runs.pop().unwrap_or((1, 1));
        let mut axes: Dims<(usize, isize)> = Dims::new();
        for &d in shape.dims().iter().rev() {
            if left == 1
                && d != 1
                && let Some(run) = runs.pop()
            {
                (left, step) = run;
            }
            if left % d != 0 {
                return None;
            }
            axes.push((d, step));
            (left, step) = (left / d, step * d as isize);
        }
        Some(Layout::from_axes(axes.into_iter().rev(), self.offset))
    }

    /// Selects the first and last `n` indices of every dimension larger than `2 * n`, as two dimensions `[2, n]` in place of the
    /// dimension. This one view holds all elements that a printed summary shows.
    pub(crate) fn edges(&self, n: usize) -> Layout {
        let split = |(d, s): (usize, isize)| {
            let (outer, inner) = if d > 2 * n { ((2, (d - n) as isize * s), (n, s)) } else { ((1, 0), (d, s)) };
            [outer, inner]
        };
        Layout::from_axes(self.axes().into_iter().flat_map(split), self.offset)
    }
}

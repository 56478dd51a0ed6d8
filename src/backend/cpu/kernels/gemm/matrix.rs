//! The operands of a product, and the conditions under which kernels read them in place.

use half::{bf16, f16};

use super::kernel::Kernels;

/// Maximum number of rows of the result for which contiguous rows of the right matrix are read in place: packing costs more than it
/// gains.
const IN_PLACE_MAX_ROWS: usize = 256;
/// The maximum number of elements of a right matrix that is read in place for any number of rows: the matrix stays in the L2 cache.
const IN_PLACE_MAX_ELEMENTS: usize = 1 << 16;
/// The row stride, in elements, at and above which the right matrix is packed.
const IN_PLACE_MAX_STRIDE: usize = 4096;
/// Row strides that are multiples of this number of elements are packed as well, because the rows would evict each other from the caches.
const CACHE_ALIASING_STRIDE: usize = 1024;

#[derive(Clone, Copy)]
pub(super) enum ElementPtr {
    F32(*const f32),
    F16(*const f16),
    BF16(*const bf16),
    /// Elements of bf16, multiplied in pairs that are adjacent along k. The second field is the number of elements along k.
    Pairs(*const bf16, usize),
}

/// An operand: element (i, j) is at `start + i * row + j * col`.
#[derive(Clone, Copy)]
pub(super) struct Matrix<T> {
    pub(super) start: T,
    pub(super) row: isize,
    pub(super) col: isize,
}

impl<T> Matrix<T> {
    pub(super) fn transposed(self) -> Matrix<T> {
        Matrix { row: self.col, col: self.row, ..self }
    }
}

impl Matrix<ElementPtr> {
    /// Returns the first element and the row stride in bytes if kernels read rows of this left matrix in place, else `None`.
    pub(super) fn left_in_place(self) -> Option<(*const f32, isize)> {
        let rows = |element: usize| self.row * element as isize;
        match self.start {
            ElementPtr::F32(start) if self.col == 1 => Some((start, rows(size_of::<f32>()))),
            ElementPtr::Pairs(start, k) if self.col == 1 && k % 2 == 0 => Some((start.cast(), rows(size_of::<bf16>()))),
            _ => None,
        }
    }

    /// Returns the first element and the row stride in bytes if kernels read this right matrix of an `m` x `n` result in place, else
    /// `None`.
    pub(super) fn right_in_place(
        self,
        kernels: &Kernels,
        (m, n, k): (usize, usize, usize),
    ) -> Option<(*const f32, isize)> {
        let stride = self.row.unsigned_abs();
        let near = stride < IN_PLACE_MAX_STRIDE && !stride.is_multiple_of(CACHE_ALIASING_STRIDE);
        let is_small = (m <= IN_PLACE_MAX_ROWS || n * k <= IN_PLACE_MAX_ELEMENTS) && n.is_multiple_of(kernels.lanes);
        match self.start {
            ElementPtr::F32(start) if self.col == 1 && near && is_small => {
                Some((start, self.row * size_of::<f32>() as isize))
            }
            _ => None,
        }
    }

    pub(super) fn in_pairs(self, k: usize) -> Matrix<ElementPtr> {
        match self.start {
            ElementPtr::BF16(start) => Matrix { start: ElementPtr::Pairs(start, k), ..self },
            _ => self,
        }
    }
}

//! The matrices of a product, and whether kernels read them where they lie.

use half::{bf16, f16};

use super::kernel::Kernels;

/// Rows of the right matrix that lie in one piece are read in place for up to so many rows of the result, because to lay them out
/// costs more than these gain, and where it has at most so many elements: then it stays in the second-level cache.
const FEW: usize = 256;
const SMALL: usize = 1 << 16;
/// Not where rows are as far apart as this, or so many elements or a multiple: they displace one another in the caches.
const FAR: usize = 4096;
const SAME_PLACE: usize = 1024;

/// The first element of an operand.
#[derive(Clone, Copy)]
pub(super) enum Start {
    F32(*const f32),
    F16(*const f16),
    BF16(*const bf16),
    /// Two steps of k at a time, of so many of k.
    Pairs(*const bf16, usize),
}

/// An operand: element (i, j) at `start + i * row + j * col`.
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

impl Matrix<Start> {
    /// The first element, and how many bytes rows are apart, where kernels read rows as they are.
    pub(super) fn in_place(self) -> Option<(*const f32, isize)> {
        let rows = |element: usize| self.row * element as isize;
        match self.start {
            Start::F32(start) if self.col == 1 => Some((start, rows(size_of::<f32>()))),
            Start::Pairs(start, k) if self.col == 1 && k % 2 == 0 => Some((start.cast(), rows(size_of::<bf16>()))),
            _ => None,
        }
    }

    /// The first element, and how many bytes rows are apart, where this is the right matrix of an `m` x `n` result and kernels
    /// read it as it is.
    pub(super) fn right_in_place(
        self,
        kernels: &Kernels,
        (m, n, k): (usize, usize, usize),
    ) -> Option<(*const f32, isize)> {
        let stride = self.row.unsigned_abs();
        let near = stride < FAR && !stride.is_multiple_of(SAME_PLACE);
        let worth_it = (m <= FEW || n * k <= SMALL) && n.is_multiple_of(kernels.lanes);
        match self.start {
            Start::F32(start) if self.col == 1 && near && worth_it => {
                Some((start, self.row * size_of::<f32>() as isize))
            }
            _ => None,
        }
    }

    /// The same in pairs of steps.
    pub(super) fn in_pairs(self, k: usize) -> Matrix<Start> {
        match self.start {
            Start::BF16(start) => Matrix { start: Start::Pairs(start, k), ..self },
            _ => self,
        }
    }
}

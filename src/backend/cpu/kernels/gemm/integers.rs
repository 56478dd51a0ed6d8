//! Products of integers on the host, for any strides. Sums wrap, so they need only as many bits as the result. Operands are widened
//! tile by tile, so the size of the temporary memory does not depend on the operands.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};

use super::{MatrixLayout, check_layouts, for_each_piece, partition};
use crate::Result;
use crate::backend::cpu::dispatch::vectorised;
use crate::device::cpu::parallel::SharedPtr;

/// Maximum number of rows or columns of the result for which an operand is read in place, because packing would cost more.
const IN_PLACE_MAX_ROWS: usize = 7;
/// The number of steps of k that are packed at a time: the packed part stays in the L2 cache.
const PACKED_STEPS: usize = 256;
/// The number of columns of the right matrix that are packed at a time.
const PACKED_COLUMNS: usize = 256;
/// The number of steps of k that a dot product computes at a time.
const DOT_STEPS: usize = 4096;
/// The minimum number of steps of k for which a dot product is faster than packing.
const DOT_MIN_STEPS: usize = 32;

/// The type in which products are added.
pub(crate) trait Sum: Pod + Send + Sync + Widen<Self> {
    /// Returns `self + x * y`, wrapping.
    fn add_product(self, x: Self, y: Self) -> Self;
    fn plus(self, other: Self) -> Self;
}

/// An integer type that is converted to `T` by `as`.
pub(crate) trait Widen<T>: Pod + Send + Sync {
    fn widen(self) -> T;
}

/// The element type of a result. Its sums are computed in `Sum`, which has at least the bits of the result.
pub(crate) trait Integer: Pod + Send + Sync + Widen<Self::Sum> {
    type Sum: Sum;
    /// Converts a sum by dropping its high bits.
    fn from_sum(sum: Self::Sum) -> Self;
}

macro_rules! sums {
    ($($sum:ty: $($from:ty)*;)*) => { $(
        impl Sum for $sum {
            #[inline(always)]
            fn add_product(self, x: $sum, y: $sum) -> $sum {
                self.wrapping_add(x.wrapping_mul(y))
            }
            fn plus(self, other: $sum) -> $sum {
                self.wrapping_add(other)
            }
        }
        $(impl Widen<$sum> for $from {
            #[inline(always)]
            fn widen(self) -> $sum {
                self as $sum
            }
        })*
    )* };
}
sums! {
    u32: i8 i16 u8 i32 u32;
    i64: i8 i16 u8 i32 u32 i64;
}

macro_rules! results {
    ($($t:ty: $sum:ty;)*) => { $(
        impl Integer for $t {
            type Sum = $sum;
            #[inline(always)]
            fn from_sum(sum: $sum) -> $t {
                sum as $t
            }
        }
    )* };
}
results! { i8: u32; i16: u32; u8: u32; i32: u32; u32: u32; i64: i64; }

vectorised! {
    /// Adds four rows to `to`, each multiplied by its factor.
    fn add_rows<'a, E: Widen<T>, T: Sum>(_simd: S, to: &'a mut [T], factors: [T; 4], rows: [&'a [E]; 4]) {
        let n = to.len();
        let [a, b, c, d] = rows.map(|row| &row[..n]);
        for (j, sum) in to.iter_mut().enumerate() {
            let two = sum.add_product(factors[0], a[j].widen()).add_product(factors[1], b[j].widen());
            *sum = two.add_product(factors[2], c[j].widen()).add_product(factors[3], d[j].widen());
        }
    }
}

vectorised! {
    fn dot<'a, E: Widen<T>, T: Sum>(_simd: S, x: &'a [E], y: &'a [T]) -> T {
        x.iter().zip(y).fold(T::zeroed(), |sum, (x, y)| sum.add_product(x.widen(), *y))
    }
}

/// Computes `out = a b`, wrapping, for `m` x `k` and `k` x `n` matrices: one product for each entry of `layouts`, which has the layouts
/// of a, b and the result.
///
/// # Errors
/// Returns the errors of [`gemm`](super::gemm).
pub(crate) fn gemm_integers<E: Widen<D::Sum>, D: Integer>(
    (m, n, k): (usize, usize, usize),
    out: &mut [D],
    a: &[E],
    b: &[E],
    layouts: impl Iterator<Item = [MatrixLayout; 3]>,
) -> Result<()> {
    for [layout_a, layout_b, layout] in layouts {
        check_layouts((m, n, k), (out.len(), layout), (a.len(), layout_a), (b.len(), layout_b))?;
        let to = SharedPtr(out.as_mut_ptr());
        let product = |(m, n), a, b, layout| {
            for_each_piece((m, n), partition((m, n, k), m, |_| n), |rows, columns| {
                // SAFETY: the result is in its slice (`check_layouts`, above), which is borrowed exclusively during the call. The
                // result's elements are distinct, and no two pieces share an element.
                unsafe { multiply_piece((rows, columns), k, (&to, layout), a, b) };
            });
        };
        match n <= IN_PLACE_MAX_ROWS && n < m {
            true => product((n, m), (b, layout_b.transposed()), (a, layout_a.transposed()), layout.transposed()),
            false => product((m, n), (a, layout_a), (b, layout_b), layout),
        }
    }
    Ok(())
}

/// Fills `to` with widened elements of `from`, which start at index `start` and are `stride` apart.
fn load<E: Widen<T>, T>(from: &[E], start: usize, stride: isize, to: &mut [T]) {
    if to.is_empty() {
        return;
    }
    if stride == 1 {
        to.iter_mut().zip(&from[start..]).for_each(|(to, x)| *to = x.widen());
    } else {
        let at = |i: usize| start.wrapping_add_signed(i as isize * stride);
        to.iter_mut().enumerate().for_each(|(i, to)| *to = from[at(i)].widen());
    }
}

/// Computes the elements of the result in the given rows and columns.
///
/// # Safety
/// The elements belong to the result, and no other thread accesses them.
unsafe fn multiply_piece<E: Widen<D::Sum>, D: Integer>(
    (rows, columns): (Range<usize>, Range<usize>),
    k: usize,
    (out, layout): (&SharedPtr<D>, MatrixLayout),
    (a, layout_a): (&[E], MatrixLayout),
    (b, layout_b): (&[E], MatrixLayout),
) {
    let few = rows.len() <= IN_PLACE_MAX_ROWS;
    let element = |i: usize, j: usize| out.0.wrapping_add(layout.index_of(i, j));
    if few && layout_b.row == 1 && k >= DOT_MIN_STEPS {
        let mut left = vec![D::Sum::zeroed(); rows.len() * k.min(DOT_STEPS)];
        for first in (0..k).step_by(DOT_STEPS) {
            let depth = DOT_STEPS.min(k - first);
            let left = left[..rows.len() * depth].chunks_exact_mut(depth);
            for (row, i) in left.zip(rows.clone()) {
                load(a, layout_a.index_of(i, first), layout_a.col, row);
                for j in columns.clone() {
                    let x = &b[layout_b.index_of(first, j)..][..depth];
                    let sum = dot(x, &*row);
                    // SAFETY: the caller guarantees the requirements of this function.
                    unsafe {
                        let before = if first > 0 { element(i, j).read().widen() } else { D::Sum::zeroed() };
                        element(i, j).write(D::from_sum(before.plus(sum)));
                    }
                }
            }
        }
        return;
    }
    let in_place = few && layout_b.col == 1;
    let width = PACKED_COLUMNS.min(columns.len());
    let mut right = vec![D::Sum::zeroed(); if in_place { 0 } else { k.min(PACKED_STEPS) * width }];
    let (mut left, mut sums) = (vec![D::Sum::zeroed(); k.min(PACKED_STEPS)], vec![D::Sum::zeroed(); width]);
    for start in columns.clone().step_by(PACKED_COLUMNS) {
        let sums = &mut sums[..PACKED_COLUMNS.min(columns.end - start)];
        let width = sums.len();
        for first in (0..k.max(1)).step_by(PACKED_STEPS) {
            let depth = PACKED_STEPS.min(k - first);
            if !in_place {
                pack_widened((b, layout_b), (first, start), (depth, width), &mut right);
            }
            for i in rows.clone() {
                let left = &mut left[..depth];
                load(a, layout_a.index_of(i, first), layout_a.col, left);
                // SAFETY: the caller guarantees the requirements of this function.
                unsafe {
                    sums.iter_mut().enumerate().for_each(|(j, sum)| {
                        *sum = if first > 0 { element(i, start + j).read().widen() } else { D::Sum::zeroed() };
                    });
                }
                for (step, factors) in left.chunks(4).enumerate() {
                    let (mut four, last) = ([D::Sum::zeroed(); 4], factors.len() - 1);
                    four[..=last].copy_from_slice(factors);
                    let steps = [0, 1, 2, 3].map(|s: usize| 4 * step + s.min(last));
                    if in_place {
                        let rows = steps.map(|s| &b[layout_b.index_of(first + s, start)..][..width]);
                        add_rows(&mut *sums, four, rows);
                    } else {
                        let rows = steps.map(|s| &right[s * width..][..width]);
                        add_rows(&mut *sums, four, rows);
                    }
                }
                for (j, sum) in sums.iter().enumerate() {
                    // SAFETY: the caller guarantees the requirements of this function.
                    unsafe { element(i, start + j).write(D::from_sum(*sum)) };
                }
            }
        }
    }
}

/// Packs a block of `size` (rows, columns) whose first element is `first`, row by row and widened.
fn pack_widened<E: Widen<T>, T>(b: (&[E], MatrixLayout), first: (usize, usize), size: (usize, usize), to: &mut [T]) {
    let ((b, layout), (top, left), (depth, width)) = (b, first, size);
    if layout.row.unsigned_abs() < layout.col.unsigned_abs() {
        for j in 0..width {
            for p in 0..depth {
                to[p * width + j] = b[layout.index_of(top + p, left + j)].widen();
            }
        }
    } else {
        let rows = to[..depth * width].chunks_exact_mut(width);
        rows.enumerate().for_each(|(p, row)| load(b, layout.index_of(top + p, left), layout.col, row));
    }
}

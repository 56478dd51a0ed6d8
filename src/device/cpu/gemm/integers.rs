//! Products of integers on the host, of any strides. Sums wrap, so they have only as many bits as the result needs. Operands are
//! widened tile by tile: scratch memory depends neither on their sizes nor on their strides.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use pulp::{Arch, Simd, WithSimd};

use super::{Place, Start, check, cut, each_piece};
use crate::Result;

/// Rows or columns of the result up to which an operand is read in place, because laying it out would not pay.
const FEW: usize = 7;
/// Steps of k, and columns of the right matrix, that are laid out at a time: they stay in the second-level cache.
const DEPTH: usize = 256;
const WIDTH: usize = 256;
/// Steps of k of a dot product at a time, and the fewest for which one is faster than laying out.
const DOT: usize = 4096;
const SHORTEST_DOT: usize = 32;

/// The type in which products are added.
pub(crate) trait Sum: Pod + Send + Sync + Widen<Self> {
    fn add_product(self, x: Self, y: Self) -> Self;
    fn plus(self, other: Self) -> Self;
}

/// An integer that is converted to `T` by `as`.
pub(crate) trait Widen<T>: Pod + Send + Sync {
    fn widen(self) -> T;
}

/// An element of a result, and the type that holds all bits of it which sums need.
pub(crate) trait Integer: Pod + Send + Sync + Widen<Self::Sum> {
    type Sum: Sum;
    fn of(sum: Self::Sum) -> Self;
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
    u32: u8 i32 u32;
    i64: u8 i32 u32 i64;
}

macro_rules! results {
    ($($t:ty: $sum:ty;)*) => { $(
        impl Integer for $t {
            type Sum = $sum;
            #[inline(always)]
            fn of(sum: $sum) -> $t {
                sum as $t
            }
        }
    )* };
}
results! { u8: u32; i32: u32; u32: u32; i64: i64; }

/// Adds four rows, each times its factor.
struct AddRows<'a, E, T> {
    to: &'a mut [T],
    factors: [T; 4],
    rows: [&'a [E]; 4],
}

impl<E: Widen<T>, T: Sum> WithSimd for AddRows<'_, E, T> {
    type Output = ();

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) {
        let AddRows { to, factors, rows } = self;
        let n = to.len();
        let [a, b, c, d] = rows.map(|row| &row[..n]);
        for (j, sum) in to.iter_mut().enumerate() {
            let two = sum.add_product(factors[0], a[j].widen()).add_product(factors[1], b[j].widen());
            *sum = two.add_product(factors[2], c[j].widen()).add_product(factors[3], d[j].widen());
        }
    }
}

struct Dot<'a, E, T> {
    x: &'a [E],
    y: &'a [T],
}

impl<E: Widen<T>, T: Sum> WithSimd for Dot<'_, E, T> {
    type Output = T;

    #[inline(always)]
    fn with_simd<S: Simd>(self, _: S) -> T {
        self.x.iter().zip(self.y).fold(T::zeroed(), |sum, (x, y)| sum.add_product(x.widen(), *y))
    }
}

/// `out = a b`, wrapping, for `m` x `k` and `k` x `n` matrices, one product after another: their a, b and results are at `places`.
///
/// # Errors
/// As [`gemm`](super::gemm).
pub(crate) fn gemm_integers<E: Widen<D::Sum>, D: Integer>(
    (m, n, k): (usize, usize, usize),
    out: &mut [D],
    a: &[E],
    b: &[E],
    places: impl Iterator<Item = [Place; 3]>,
) -> Result<()> {
    for [place_a, place_b, place] in places {
        check((m, n, k), (out.len(), place), (a.len(), place_a), (b.len(), place_b))?;
        let to = Start(out.as_mut_ptr());
        let product = |(m, n), a, b, place| {
            each_piece((m, n), cut((m, n, k), m, |_| n), |rows, columns| {
                // SAFETY: the result lies in its slice (`check`, above), which is borrowed exclusively through the call. Its
                // elements are distinct, and pieces have none in common.
                unsafe { piece((rows, columns), k, (&to, place), a, b) };
            });
        };
        match n <= FEW && n < m {
            true => product((n, m), (b, place_b.transposed()), (a, place_a.transposed()), place.transposed()),
            false => product((m, n), (a, place_a), (b, place_b), place),
        }
    }
    Ok(())
}

/// Widens as many elements as `to` has, `stride` apart.
fn load<E: Widen<T>, T>(from: &[E], start: usize, stride: isize, to: &mut [T]) {
    if to.is_empty() {
        return;
    }
    if stride == 1 {
        to.iter_mut().zip(&from[start..]).for_each(|(to, x)| *to = x.widen());
    } else {
        to.iter_mut()
            .enumerate()
            .for_each(|(i, to)| *to = from[start.wrapping_add_signed(i as isize * stride)].widen());
    }
}

/// Computes the elements of some rows and columns.
///
/// # Safety
/// These elements belong to the result, and no other thread uses them.
unsafe fn piece<E: Widen<D::Sum>, D: Integer>(
    (rows, columns): (Range<usize>, Range<usize>),
    k: usize,
    (out, place): (&Start<D>, Place),
    (a, place_a): (&[E], Place),
    (b, place_b): (&[E], Place),
) {
    let few = rows.len() <= FEW;
    let element = |i: usize, j: usize| out.0.wrapping_add(place.at(i, j));
    if few && place_b.row == 1 && k >= SHORTEST_DOT {
        let mut left = vec![D::Sum::zeroed(); rows.len() * k.min(DOT)];
        for first in (0..k).step_by(DOT) {
            let depth = DOT.min(k - first);
            let left = left[..rows.len() * depth].chunks_exact_mut(depth);
            for (row, i) in left.zip(rows.clone()) {
                load(a, place_a.at(i, first), place_a.col, row);
                for j in columns.clone() {
                    let x = &b[place_b.at(first, j)..][..depth];
                    let sum = Arch::new().dispatch(Dot { x, y: &*row });
                    // SAFETY: the caller's promise.
                    unsafe {
                        let before = if first > 0 { element(i, j).read().widen() } else { D::Sum::zeroed() };
                        element(i, j).write(D::of(before.plus(sum)));
                    }
                }
            }
        }
        return;
    }
    let in_place = few && place_b.col == 1;
    let width = WIDTH.min(columns.len());
    let mut right = vec![D::Sum::zeroed(); if in_place { 0 } else { k.min(DEPTH) * width }];
    let (mut left, mut sums) = (vec![D::Sum::zeroed(); k.min(DEPTH)], vec![D::Sum::zeroed(); width]);
    for start in columns.clone().step_by(WIDTH) {
        let sums = &mut sums[..WIDTH.min(columns.end - start)];
        let width = sums.len();
        for first in (0..k.max(1)).step_by(DEPTH) {
            let depth = DEPTH.min(k - first);
            if !in_place {
                lay_out(b, place_b, (first, start), (depth, width), &mut right);
            }
            for i in rows.clone() {
                let left = &mut left[..depth];
                load(a, place_a.at(i, first), place_a.col, left);
                // SAFETY: the caller's promise.
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
                        let rows = steps.map(|s| &b[place_b.at(first + s, start)..][..width]);
                        Arch::new().dispatch(AddRows { to: &mut *sums, factors: four, rows });
                    } else {
                        let rows = steps.map(|s| &right[s * width..][..width]);
                        Arch::new().dispatch(AddRows { to: &mut *sums, factors: four, rows });
                    }
                }
                for (j, sum) in sums.iter().enumerate() {
                    // SAFETY: the caller's promise.
                    unsafe { element(i, start + j).write(D::of(*sum)) };
                }
            }
        }
    }
}

/// Writes `size` elements from `first` on, row by row and widened.
fn lay_out<E: Widen<T>, T: Copy>(b: &[E], place: Place, first: (usize, usize), size: (usize, usize), to: &mut [T]) {
    let ((top, left), (depth, width)) = (first, size);
    if place.row.unsigned_abs() < place.col.unsigned_abs() {
        for j in 0..width {
            for p in 0..depth {
                to[p * width + j] = b[place.at(top + p, left + j)].widen();
            }
        }
    } else {
        let rows = to[..depth * width].chunks_exact_mut(width);
        rows.enumerate().for_each(|(p, row)| load(b, place.at(top + p, left), place.col, row));
    }
}

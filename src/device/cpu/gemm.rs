//! Matrix products on the host: a safe door to the `gemm` crate, which takes any strides and picks SIMD at run time.

use gemm::Parallelism;

use super::parallel;
use crate::{Error, Result};

/// Below this many multiplications one thread is done before others have woken up.
const ALONE: usize = 80 * 80 * 80;

/// Rows or columns that the kernels take at a time, or a divisor: pieces are as long as a multiple of it.
const STEP: usize = 8;

/// Where the elements of a matrix lie in a slice: element (i, j) at `offset + i * row + j * col`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place {
    pub(crate) offset: usize,
    pub(crate) row: isize,
    pub(crate) col: isize,
}

impl Place {
    /// Whether every element of a `rows` x `cols` matrix, neither of them 0, lies within `len`.
    fn fits(self, rows: usize, cols: usize, len: usize) -> bool {
        let reach = |n: usize, stride: isize| isize::try_from(n - 1).ok()?.checked_mul(stride);
        let bounds = || {
            let (r, c) = (reach(rows, self.row)?, reach(cols, self.col)?);
            let first = isize::try_from(self.offset).ok()?;
            let lo = first.checked_add(r.min(0))?.checked_add(c.min(0))?;
            let hi = first.checked_add(r.max(0))?.checked_add(c.max(0))?;
            Some(lo >= 0 && usize::try_from(hi).ok()? < len)
        };
        bounds().unwrap_or(false)
    }

    /// Whether no two elements are the same.
    fn is_injective(self, rows: usize, cols: usize) -> bool {
        let (r, c) = (self.row.unsigned_abs(), self.col.unsigned_abs());
        let steps_over = |long: usize, short: usize, n: usize| short > 0 && long > short.saturating_mul(n - 1);
        match (rows, cols) {
            (1, 1) => true,
            (1, _) => c > 0,
            (_, 1) => r > 0,
            _ => steps_over(r, c, cols) || steps_over(c, r, rows),
        }
    }
}

/// The two types the crate multiplies in.
pub(crate) trait Real: bytemuck::Pod + Send + Sync {
    const ZERO: Self;
    const ONE: Self;
}
impl Real for f32 {
    const ZERO: f32 = 0.0;
    const ONE: f32 = 1.0;
}
impl Real for f64 {
    const ZERO: f64 = 0.0;
    const ONE: f64 = 1.0;
}

/// How a result is cut into pieces, one a thread: along its rows and along its columns, so that they read the least.
fn cut(m: usize, n: usize, k: usize) -> (usize, usize) {
    let threads = super::threads();
    if m.saturating_mul(n).saturating_mul(k) <= ALONE {
        return (1, 1);
    }
    // Each piece reads its rows of `a` and its columns of `b`.
    let read = |rows: usize| rows * n + threads / rows * m;
    let rows = (1..=threads).filter(|rows| threads.is_multiple_of(*rows)).min_by_key(|&rows| read(rows)).unwrap_or(1);
    (rows, threads / rows)
}

/// Where piece `i` of `pieces` of `n` rows or columns starts; the end of the last is `n`.
fn start(n: usize, pieces: usize, i: usize) -> usize {
    (n.div_ceil(STEP) * i / pieces * STEP).min(n)
}

/// The first element of a matrix in memory that threads share.
struct Start<T>(*mut T);

// SAFETY: the threads of a product read the inputs and write pieces of the result that have no element in common.
unsafe impl<T: Send + Sync> Sync for Start<T> {}

/// `out = a b` for an `m` x `k` and a `k` x `n` matrix, on several threads if the work is worth it.
///
/// # Errors
/// [`Error::Invalid`] where a matrix reaches out of its slice or elements of `out` coincide: a bug of the caller.
pub(crate) fn gemm<T: Real>(
    (m, n, k): (usize, usize, usize),
    out: (&mut [T], Place),
    a: (&[T], Place),
    b: (&[T], Place),
) -> Result<()> {
    if m == 0 || n == 0 {
        return Ok(());
    }
    let inputs_fit = k == 0 || (a.1.fits(m, k, a.0.len()) && b.1.fits(k, n, b.0.len()));
    if !inputs_fit || !out.1.fits(m, n, out.0.len()) || !out.1.is_injective(m, n) {
        return Err(Error::invalid(
            "gemm",
            format!("{m} x {k} x {n} does not lie in its memory: {:?}", (out.1, a.1, b.1)),
        ));
    }
    if k == 0 {
        for i in 0..m {
            for j in 0..n {
                let at = out.1.offset as isize + i as isize * out.1.row + j as isize * out.1.col;
                out.0[at as usize] = T::ZERO;
            }
        }
        return Ok(());
    }
    let (rows, columns) = cut(m, n, k);
    let to = Start(out.0.as_mut_ptr());
    parallel::for_each_index(rows * columns, |piece| {
        let to = &to;
        let (i, j) = (piece / columns, piece % columns);
        let (top, bottom) = (start(m, rows, i), start(m, rows, i + 1));
        let (left, right) = (start(n, columns, j), start(n, columns, j + 1));
        if top == bottom || left == right {
            return;
        }
        let at = |place: Place, row: usize, col: usize| {
            place.offset as isize + row as isize * place.row + col as isize * place.col
        };
        // SAFETY: all three matrices lie in their slices (`fits`, above), which are initialised and live through the
        // call, and so does a piece of them, which is not empty: its first element is one of theirs. `out` is borrowed
        // exclusively, so it overlaps neither input, and its elements are distinct, so pieces without a common element
        // are in different memory. `T` is f32 or f64, which the crate supports; `read_dst` is false, so alpha is unused.
        unsafe {
            gemm::gemm(
                bottom - top,
                right - left,
                k,
                to.0.offset(at(out.1, top, left)),
                out.1.col,
                out.1.row,
                false,
                a.0.as_ptr().offset(at(a.1, top, 0)),
                a.1.col,
                a.1.row,
                b.0.as_ptr().offset(at(b.1, 0, left)),
                b.1.col,
                b.1.row,
                T::ZERO,
                T::ONE,
                false,
                false,
                false,
                Parallelism::None,
            );
        }
    });
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn place(offset: usize, row: isize, col: isize) -> Place {
        Place { offset, row, col }
    }

    #[test]
    fn matrices_that_do_not_lie_in_their_memory_are_refused() {
        let (a, b) = ([1f32; 6], [1f32; 6]);
        let mut out = [0f32; 4];
        let mut try_with = |o, pa, pb| gemm((2, 2, 3), (&mut out, o), (&a, pa), (&b, pb));
        let (o, pa, pb) = (place(0, 2, 1), place(0, 3, 1), place(0, 2, 1));
        assert!(try_with(o, pa, pb).is_ok());
        assert!(try_with(o, place(1, 3, 1), pb).is_err(), "one past the end");
        assert!(try_with(o, place(2, 3, -1), pb).is_ok(), "flipped");
        assert!(try_with(o, place(1, 3, -1), pb).is_err(), "one before the start");
        assert!(try_with(o, pa, place(0, isize::MAX, 1)).is_err(), "overflow");
        assert!(try_with(place(0, 1, 1), pa, pb).is_err(), "elements that coincide");
        assert!(try_with(place(0, 0, 1), pa, pb).is_err(), "a broadcast result");
        assert!(try_with(place(0, 1, 2), pa, pb).is_ok(), "transposed");
    }

    #[test]
    fn pieces_cover_the_result() {
        for n in [1, 7, 8, 9, 100, 1024] {
            for pieces in 1..9 {
                assert_eq!((start(n, pieces, 0), start(n, pieces, pieces)), (0, n));
                assert!((0..pieces).all(|i| start(n, pieces, i) <= start(n, pieces, i + 1)));
            }
        }
    }

    #[test]
    fn an_empty_sum_is_zero() {
        let mut out = [7f64; 6];
        gemm((2, 2, 0), (&mut out, place(0, 3, 1)), (&[], place(0, 0, 1)), (&[], place(0, 2, 1))).unwrap();
        assert_eq!(out, [0.0, 0.0, 7.0, 0.0, 0.0, 7.0]);
    }
}

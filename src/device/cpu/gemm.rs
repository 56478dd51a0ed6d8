//! Matrix products on the host: a safe door to the `gemm` crate, which takes any strides and picks SIMD at run time.

use gemm::Parallelism;

use crate::{Error, Result};

/// Below this many multiplications one thread is done before others have woken up.
const ALONE: usize = 48 * 48 * 48;

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

/// `out = a b` for an `m` x `k` and a `k` x `n` matrix. Uses the pool it is called in, if the work is worth it.
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
    let parallel = m.saturating_mul(n).saturating_mul(k) > ALONE && super::threads() > 1;
    let parallelism = if parallel { Parallelism::Rayon(super::threads()) } else { Parallelism::None };
    // SAFETY: all three matrices lie in their slices (`fits`, above), which are initialised and live through the call;
    // `out` is borrowed exclusively, so it overlaps neither input, and its elements are distinct, so threads that
    // write different elements write different memory. `T` is f32 or f64, which the crate supports; `read_dst` is
    // false, so alpha is unused.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.0.as_mut_ptr().add(out.1.offset),
            out.1.col,
            out.1.row,
            false,
            a.0.as_ptr().add(a.1.offset),
            a.1.col,
            a.1.row,
            b.0.as_ptr().add(b.1.offset),
            b.1.col,
            b.1.row,
            T::ZERO,
            T::ONE,
            false,
            false,
            false,
            parallelism,
        );
    }
    Ok(())
}

/// Whether a product of this size is worth handing to the pool.
pub(crate) fn is_large(m: usize, n: usize, k: usize) -> bool {
    m.saturating_mul(n).saturating_mul(k) > ALONE
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
    fn an_empty_sum_is_zero() {
        let mut out = [7f64; 6];
        gemm((2, 2, 0), (&mut out, place(0, 3, 1)), (&[], place(0, 0, 1)), (&[], place(0, 2, 1))).unwrap();
        assert_eq!(out, [0.0, 0.0, 7.0, 0.0, 0.0, 7.0]);
    }
}

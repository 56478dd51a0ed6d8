//! Matrix products on the host, of any strides: [`gemm_f32`] of f32 and halves in kernels of our own, which take halves as
//! they are and spread the work evenly, where the processor has vectors for them, and others for products of few rows;
//! [`gemm`], a safe door to the crate of that name, for everything else.
//!
//! Sums are f32. Of two matrices of bf16, a processor with AVX512-BF16 or AMX adds pairs of products, in an instruction that takes and
//! makes zeros for numbers below the smallest normal one, 1.2e-38, and rounds to nearest even.

use std::ops::Range;

use ::gemm::Parallelism;
#[cfg(target_arch = "x86_64")]
use smallvec::SmallVec;

#[cfg_attr(not(target_arch = "x86_64"), path = "gemm/no_alone.rs")]
pub(crate) mod alone;
#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod blocks;
#[cfg(target_arch = "x86_64")]
mod few;
mod floats;
mod integers;
#[cfg(target_arch = "x86_64")]
mod kernel;
#[cfg(target_arch = "x86_64")]
mod matrix;
#[cfg(target_arch = "x86_64")]
mod pack;
#[cfg(target_arch = "x86_64")]
mod panels;
#[cfg(test)]
mod tests;

use super::parallel;
use crate::{Error, Result};
pub(crate) use floats::Floats;
pub(crate) use integers::gemm_integers;
#[cfg(target_arch = "x86_64")]
use kernel::Kernels;

/// Up to this many multiplications one thread is done before others have woken up.
const ALONE: usize = 80 * 80 * 80;

/// Whether one thread should do it.
fn alone((m, n, k): (usize, usize, usize)) -> bool {
    m.saturating_mul(n).saturating_mul(k) <= ALONE
}

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
    /// The index of element `(i, j)`.
    fn at(self, i: usize, j: usize) -> usize {
        self.offset.wrapping_add_signed(i as isize * self.row + j as isize * self.col)
    }

    fn transposed(self) -> Place {
        Place { row: self.col, col: self.row, ..self }
    }

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

/// How a result is cut into pieces, one a thread: along its rows and along its columns, so that they read the least. Each reads its
/// rows of `a` and its columns of `b`; all of them cost as much as `a` and `b(rows)` elements a step.
fn cut(size: (usize, usize, usize), a: usize, b: impl Fn(usize) -> usize) -> (usize, usize) {
    if alone(size) { (1, 1) } else { cut_for(super::threads(), (size.0, size.1), a, b) }
}

fn cut_for(threads: usize, (m, n): (usize, usize), a: usize, b: impl Fn(usize) -> usize) -> (usize, usize) {
    let read = |rows: usize| rows * b(rows) + threads / rows * a;
    let (down, across) = (|rows: usize| m / rows >= 2 * STEP, |columns: usize| n / columns >= 4 * STEP);
    let high = |rows: usize| rows == 1 || down(rows);
    let wide = |rows: usize| rows == threads || across(threads / rows);
    let possible = (1..=threads).filter(|rows| threads.is_multiple_of(*rows) && high(*rows));
    // Of a small product that many threads share, pieces may be less wide than a tile.
    let tiles = possible.clone().filter(|&rows| wide(rows)).min_by_key(|&rows| read(rows));
    let rows = tiles.or_else(|| possible.min_by_key(|&rows| read(rows))).unwrap_or(1);
    (rows, threads / rows)
}

/// Where piece `i` of `pieces` of `n` rows or columns starts; the end of the last is `n`.
fn start(n: usize, pieces: usize, i: usize) -> usize {
    (n.div_ceil(STEP) * i / pieces * STEP).min(n)
}

/// Calls `piece` with the rows and columns of each of `rows` times `columns` pieces of an `m` x `n` result, one a thread.
fn each_piece(
    (m, n): (usize, usize),
    (rows, columns): (usize, usize),
    piece: impl Fn(Range<usize>, Range<usize>) + Sync,
) {
    parallel::for_each_index(rows * columns, |i| {
        let (i, j) = (i / columns, i % columns);
        let down = start(m, rows, i)..start(m, rows, i + 1);
        let across = start(n, columns, j)..start(n, columns, j + 1);
        if !down.is_empty() && !across.is_empty() {
            piece(down, across);
        }
    });
}

/// The first element of a matrix in memory that threads share.
struct Start<T>(*mut T);

// SAFETY: the threads of a product read the inputs and write pieces of the result that have no element in common.
unsafe impl<T: Send + Sync> Sync for Start<T> {}

/// The kernels for products of this size and these types, where there are any for this processor; [`few`] has others for a row or a
/// few.
#[cfg(target_arch = "x86_64")]
fn kernels((m, n, k): (usize, usize, usize), a: Floats, b: Floats) -> Option<&'static Kernels> {
    const LEAST: usize = 8;
    let of_pairs = match (a, b) {
        (Floats::BF16(_), Floats::BF16(_)) => Kernels::of_pairs(k),
        _ => None,
    };
    of_pairs.or_else(|| Kernels::get(false)).filter(|_| m.min(n).min(k) >= LEAST)
}

/// As [`gemm`], for one product after another: their a, b and results are at `places`.
pub(crate) fn gemm_f32(
    size: (usize, usize, usize),
    out: &mut [f32],
    a: Floats,
    b: Floats,
    places: impl Iterator<Item = [Place; 3]>,
) -> Result<()> {
    let mut places = places.peekable();
    #[cfg(target_arch = "x86_64")]
    let mut rows = Vec::new();
    #[cfg(target_arch = "x86_64")]
    while let Some([place_a, place_b, place]) = places.peek().copied()
        && let Some(transposed) = few::fits(size, place_a, place_b)
    {
        check(size, (out.len(), place), (a.len(), place_a), (b.len(), place_b))?;
        let start = out.as_mut_ptr().wrapping_add(place.offset);
        let to = matrix::Matrix { start, row: place.row, col: place.col };
        // SAFETY: as below.
        unsafe { few::product(size, transposed, to, a.matrix(place_a), b.matrix(place_b), &mut rows) };
        places.next();
    }
    if places.peek().is_none() {
        return Ok(());
    }
    #[cfg(target_arch = "x86_64")]
    if let Some(kernels) = kernels(size, a, b) {
        for [place_a, place_b, place] in places {
            check(size, (out.len(), place), (a.len(), place_a), (b.len(), place_b))?;
            let start = out.as_mut_ptr().wrapping_add(place.offset); // others may lie before it
            let to = matrix::Matrix { start, row: place.row, col: place.col };
            let to = blocks::Out::Memory(to, Finish::Nothing);
            // SAFETY: none of the sizes is 0. All three matrices lie in their slices (`check`), which are initialised and live
            // through the call. `out` is borrowed exclusively, so it overlaps neither input, and its elements are distinct.
            unsafe { blocks::product(kernels, size, to, a.matrix(place_a), b.matrix(place_b), None) };
        }
        return Ok(());
    }
    places
        .into_iter()
        .try_for_each(|[place_a, place_b, place]| floats::in_tiles(size, (out, place), (a, place_a), (b, place_b)))
}

/// As [`gemm_f32`] of one product, and the sums of the rows of `a` in the same go, to elements of `out` from `sums` on. Gives
/// whether these were made, too: where the result is contiguous, `a` is laid out for the kernels, and the sums lie beside the result.
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
pub(crate) fn gemm_and_sums(
    size: (usize, usize, usize),
    out: &mut [f32],
    (a, b): (Floats, Floats),
    places: [Place; 3],
    sums: usize,
) -> Result<bool> {
    #[cfg(target_arch = "x86_64")]
    if let Some(kernels) = kernels(size, a, b) {
        let ([place_a, place_b, place], (m, n, _)) = (places, size);
        check(size, (out.len(), place), (a.len(), place_a), (b.len(), place_b))?;
        let beside = sums + m <= place.offset || place.offset + m * n <= sums;
        if (place.row, place.col) == (n as isize, 1) && beside && sums + m <= out.len() {
            let start = out.as_mut_ptr();
            // SAFETY: as in `gemm_f32`; the sums lie in `out`, and none of them is an element of the result.
            return Ok(unsafe {
                let to = matrix::Matrix { start: start.add(place.offset), row: place.row, col: 1 };
                let (a, b) = (a.matrix(place_a), b.matrix(place_b));
                blocks::product(kernels, size, blocks::Out::Memory(to, Finish::Nothing), a, b, Some(start.add(sums)))
            });
        }
    }
    gemm_f32(size, out, a, b, std::iter::once(places))?;
    Ok(false)
}

/// What is made of the elements of a product, `m` x `n`, before they are written.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Finish<S> {
    /// Nothing else.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    Nothing,
    /// The element of its column of these, `n` of them, is added.
    Add(S),
    /// That, and what is at most 0 then is 0.
    AddRelu(S),
    /// It is multiplied by 0 where its own element of these, `m * n` of them, is at most 0, otherwise by 1.
    ReluGrad(S),
}

impl<S> Finish<S> {
    #[cfg(target_arch = "x86_64")]
    fn map<T>(self, row: impl FnOnce(S) -> T, elements: impl FnOnce(S) -> T) -> Finish<T> {
        match self {
            Finish::Nothing => Finish::Nothing,
            Finish::Add(x) => Finish::Add(row(x)),
            Finish::AddRelu(x) => Finish::AddRelu(row(x)),
            Finish::ReluGrad(x) => Finish::ReluGrad(elements(x)),
        }
    }
}

/// As [`gemm_f32`] of one product, contiguous, that is finished in the kernels' registers: it is written once, and what that
/// takes is hidden behind the next sums. Gives whether there are kernels for it.
///
/// # Errors
/// As [`gemm`]; where what it is finished with is of another size.
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
pub(crate) fn gemm_finished(
    size: (usize, usize, usize),
    out: &mut [f32],
    (a, place_a): (Floats, Place),
    (b, place_b): (Floats, Place),
    finish: Finish<&[f32]>,
) -> Result<bool> {
    #[cfg(target_arch = "x86_64")]
    if let Some(kernels) = kernels(size, a, b) {
        let (m, n, _) = size;
        check(size, (out.len(), Place { offset: 0, row: n as isize, col: 1 }), (a.len(), place_a), (b.len(), place_b))?;
        let fits = match finish {
            Finish::Nothing => true,
            Finish::Add(row) | Finish::AddRelu(row) => row.len() == n,
            Finish::ReluGrad(x) => x.len() == m * n,
        };
        if !fits {
            return Err(Error::invalid("gemm", "what the product is finished with has another size"));
        }
        let to = matrix::Matrix { start: out.as_mut_ptr(), row: n as isize, col: 1 };
        let to = blocks::Out::Memory(to, finish.map(<[f32]>::as_ptr, <[f32]>::as_ptr));
        // SAFETY: as in `gemm_f32`; what is read to finish it is as large as the kernels take it to be, and borrowed.
        unsafe { blocks::product(kernels, size, to, a.matrix(place_a), b.matrix(place_b), None) };
        return Ok(true);
    }
    Ok(false)
}

/// Whether [`gemm_into`] does products of this size: where there are kernels for them, and not too many steps.
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
pub(crate) fn in_pieces(size: (usize, usize, usize)) -> bool {
    #[cfg(target_arch = "x86_64")]
    return size.2 <= blocks::DEEP && kernels(size, Floats::F32(&[]), Floats::F32(&[])).is_some();
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// A product of f32 or halves of which `each` makes the results, every one `m` x `n` and contiguous: it is called with the
/// number of an element, the product's elements from it on, as many as lie in the cache, and the same ones of each
/// result, to be written.
///
/// # Errors
/// As [`gemm`]; where it does not [come in pieces](in_pieces).
#[cfg(target_arch = "x86_64")]
pub(crate) fn gemm_into<T: Send + Sync>(
    size: (usize, usize, usize),
    outs: &mut [&mut [T]],
    (a, place_a): (Floats, Place),
    (b, place_b): (Floats, Place),
    each: impl Fn(usize, &[f32], &mut [&mut [T]]) + Sync,
) -> Result<()> {
    let n = size.1;
    let Some(kernels) = kernels(size, a, b).filter(|_| in_pieces(size)) else {
        return Err(Error::invalid("gemm", "the product does not come in pieces"));
    };
    let contiguous = Place { offset: 0, row: n as isize, col: 1 };
    for out in outs.iter() {
        check(size, (out.len(), contiguous), (a.len(), place_a), (b.len(), place_b))?;
    }
    let starts: SmallVec<[Start<T>; 2]> = outs.iter_mut().map(|out| Start(out.as_mut_ptr())).collect();
    let pass_on = |first: usize, product: &[f32]| {
        // SAFETY: the elements are of the results, which are borrowed exclusively through the call; every element is
        // handed over once, so that nobody else has these.
        let outs = starts.iter().map(|s| unsafe { std::slice::from_raw_parts_mut(s.0.add(first), product.len()) });
        each(first, product, &mut outs.collect::<SmallVec<[&mut [T]; 2]>>());
    };
    let hand_over = |rows: Range<usize>, columns: Range<usize>, product: &[f32]| {
        let first = rows.start * n + columns.start;
        match columns.len() == n {
            true => pass_on(first, product),
            false => product.chunks(columns.len()).enumerate().for_each(|(i, row)| pass_on(first + i * n, row)),
        }
    };
    let to = blocks::Out::Pieces(&hand_over);
    // SAFETY: none of the sizes is 0. Both matrices lie in their slices (`check`), which are initialised and live through
    // the call.
    unsafe { blocks::product(kernels, size, to, a.matrix(place_a), b.matrix(place_b), None) };
    Ok(())
}

#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn gemm_into<T>(
    _: (usize, usize, usize),
    _: &mut [&mut [T]],
    _: (Floats, Place),
    _: (Floats, Place),
    _: impl Fn(usize, &[f32], &mut [&mut [T]]) + Sync,
) -> Result<()> {
    Err(Error::invalid("gemm", "there are no kernels for it"))
}

/// That the matrices lie in their memory, and no two elements of the result are one.
fn check((m, n, k): (usize, usize, usize), out: (usize, Place), a: (usize, Place), b: (usize, Place)) -> Result<()> {
    let inputs_fit = k == 0 || (a.1.fits(m, k, a.0) && b.1.fits(k, n, b.0));
    if inputs_fit && out.1.fits(m, n, out.0) && out.1.is_injective(m, n) {
        return Ok(());
    }
    Err(Error::invalid("gemm", format!("{m} x {k} x {n} does not lie in its memory: {:?}", (out.1, a.1, b.1))))
}

/// `out = a b` for an `m` x `k` and a `k` x `n` matrix, on several threads if the work is worth it.
///
/// # Errors
/// [`Error::Invalid`] where a matrix reaches out of its slice or elements of `out` coincide: a bug of the caller.
pub(crate) fn gemm<T: Real>(
    size: (usize, usize, usize),
    out: (&mut [T], Place),
    a: (&[T], Place),
    b: (&[T], Place),
) -> Result<()> {
    gemm_onto(size, out, a, b, false)
}

/// [`gemm`], added to `out` where `add`.
fn gemm_onto<T: Real>(
    (m, n, k): (usize, usize, usize),
    out: (&mut [T], Place),
    a: (&[T], Place),
    b: (&[T], Place),
    add: bool,
) -> Result<()> {
    if m == 0 || n == 0 {
        return Ok(());
    }
    check((m, n, k), (out.0.len(), out.1), (a.0.len(), a.1), (b.0.len(), b.1))?;
    if k == 0 {
        (0..m * n).for_each(|i| out.0[out.1.at(i / n, i % n)] = T::ZERO);
        return Ok(());
    }
    let to = Start(out.0.as_mut_ptr());
    each_piece((m, n), cut((m, n, k), m, |_| n), |down, across| {
        let to = &to;
        let (top, left) = (down.start, across.start);
        // SAFETY: all three matrices lie in their slices (`check`, above), which are initialised and live through the
        // call, and so does a piece of them, which is not empty: its first element is one of theirs. `out` is borrowed
        // exclusively, so it overlaps neither input, and its elements are distinct, so pieces without a common element
        // are in different memory. `T` is f32 or f64, which the crate supports.
        unsafe {
            ::gemm::gemm(
                down.len(),
                across.len(),
                k,
                to.0.add(out.1.at(top, left)),
                out.1.col,
                out.1.row,
                add,
                a.0.as_ptr().add(a.1.at(top, 0)),
                a.1.col,
                a.1.row,
                b.0.as_ptr().add(b.1.at(0, left)),
                b.1.col,
                b.1.row,
                if add { T::ONE } else { T::ZERO },
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

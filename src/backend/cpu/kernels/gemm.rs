//! Matrix products on the host, for any strides. There are three implementations:
//!
//! - [`gemm_f32`] multiplies f32 and halves (f16 and bf16) by kernels of this crate, on processors with suitable vectors. The
//!   kernels read halves without a widened copy, and split the work evenly over threads.
//! - Products with few rows or columns have kernels of their own.
//! - [`gemm`] is a safe interface to the crates gemm-f32 and gemm-f64, for all other products.
//!
//! Sums are computed in f32. For two bf16 matrices, a processor with AVX512-BF16 or AMX adds two products per instruction and lane. These
//! instructions treat inputs and results below the smallest normal number, 1.2e-38, as zeros, and round to nearest even.

use std::ops::Range;

use gemm_common::Parallelism;
#[cfg(target_arch = "x86_64")]
use smallvec::SmallVec;

/// Defines inlined `unsafe` methods of a trait; the caller of a method guarantees its safety.
#[cfg(target_arch = "x86_64")]
macro_rules! unsafe_methods {
    ($($method:ident($($args:tt)*) -> $out:ty = $made:expr;)*) => { $(
        #[inline(always)]
        unsafe fn $method($($args)*) -> $out {
            // SAFETY: the caller guarantees the requirements of this function.
            unsafe { $made }
        }
    )* };
}

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod blocks;
mod epilogue;
#[cfg(target_arch = "x86_64")]
mod few;
mod floats;
mod integers;
#[cfg(target_arch = "x86_64")]
mod kernel;
#[cfg(target_arch = "x86_64")]
mod pack;
#[cfg(target_arch = "x86_64")]
pub(crate) mod serial;
#[cfg(test)]
mod tests;

use crate::device::cpu::parallel::{self, SharedPtr};
use crate::device::cpu::threads;
use crate::{Error, Result};
pub(crate) use epilogue::KernelEpilogue;
pub(crate) use floats::Floats;
pub(crate) use integers::gemm_integers;
#[cfg(target_arch = "x86_64")]
use kernel::Kernels;

/// The maximum number of multiplications of a product that one thread computes alone: other threads would take longer to wake up.
const SERIAL_MAX_PRODUCTS: usize = 80 * 80 * 80;

/// True if one thread should compute the product.
fn is_serial((m, n, k): (usize, usize, usize)) -> bool {
    m.saturating_mul(n).saturating_mul(k) <= SERIAL_MAX_PRODUCTS
}

/// Pieces start at multiples of this number of rows or columns, so that few tiles and vectors are incomplete.
const PIECE_STEP: usize = 8;

/// The layout of a matrix in a slice: element (i, j) is at `offset + i * row + j * col`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MatrixLayout {
    pub(crate) offset: usize,
    pub(crate) row: isize,
    pub(crate) col: isize,
}

impl MatrixLayout {
    fn index_of(self, i: usize, j: usize) -> usize {
        self.offset.wrapping_add_signed(i as isize * self.row + j as isize * self.col)
    }

    fn transposed(self) -> MatrixLayout {
        MatrixLayout { row: self.col, col: self.row, ..self }
    }

    /// Returns the layout that begins with the last of `rows` rows.
    fn with_rows_reversed(self, rows: usize) -> MatrixLayout {
        MatrixLayout { offset: self.index_of(rows - 1, 0), row: -self.row, ..self }
    }

    /// Returns the layout that begins with the last of `columns` columns.
    fn with_columns_reversed(self, columns: usize) -> MatrixLayout {
        self.transposed().with_rows_reversed(columns).transposed()
    }

    /// True if every element of a `rows` x `cols` matrix is within `len`; neither size may be 0.
    fn is_within(self, rows: usize, cols: usize, len: usize) -> bool {
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

/// The arguments of [`Real::product`]: the sizes m, n and k; the result, its column stride, its row stride, and whether the product is
/// added to its elements; the left and the right matrix, each with its strides; the factors of the old result and of the product; three
/// flags for complex numbers.
#[rustfmt::skip]
type Product<T> = unsafe fn(
    usize, usize, usize, *mut T, isize, isize, bool, *const T, isize, isize, *const T, isize, isize, T, T, bool, bool, bool, Parallelism,
);

/// An element type for which this crate calls the crates gemm-f32 or gemm-f64.
pub(crate) trait Real: bytemuck::Pod + Send + Sync {
    const ZERO: Self;
    const ONE: Self;
    /// Returns the product function of gemm-f32 or gemm-f64 for this processor.
    fn product() -> Product<Self>;
}
impl Real for f32 {
    const ZERO: f32 = 0.0;
    const ONE: f32 = 1.0;
    fn product() -> Product<f32> {
        gemm_f32::gemm::f32::get_gemm_fn()
    }
}
impl Real for f64 {
    const ZERO: f64 = 0.0;
    const ONE: f64 = 1.0;
    fn product() -> Product<f64> {
        gemm_f64::gemm::f64::get_gemm_fn()
    }
}

/// Returns the grid of pieces (rows, columns), one piece per thread, that minimises reads of the operands. Per step of k, each column of
/// the grid reads `a` elements of the left matrix, and each row of the grid reads `b(rows)` elements of the right matrix, where `rows` is
/// the number of rows of the grid.
fn partition(size: (usize, usize, usize), a: usize, b: impl Fn(usize) -> usize) -> (usize, usize) {
    if is_serial(size) { (1, 1) } else { partition_for(threads(), (size.0, size.1), a, b) }
}

/// Returns the grid of [`partition`] for the given number of threads.
fn partition_for(threads: usize, (m, n): (usize, usize), a: usize, b: impl Fn(usize) -> usize) -> (usize, usize) {
    let read = |rows: usize| rows * b(rows) + threads / rows * a;
    let (down, across) = (|rows: usize| m / rows >= 2 * PIECE_STEP, |columns: usize| n / columns >= 4 * PIECE_STEP);
    let high = |rows: usize| rows == 1 || down(rows);
    let wide = |rows: usize| rows == threads || across(threads / rows);
    let possible = (1..=threads).filter(|rows| threads.is_multiple_of(*rows) && high(*rows));
    // If many threads compute a small product, pieces may have to be narrower than a tile.
    let tiles = possible.clone().filter(|&rows| wide(rows)).min_by_key(|&rows| read(rows));
    let rows = tiles.or_else(|| possible.min_by_key(|&rows| read(rows))).unwrap_or(1);
    (rows, threads / rows)
}

/// Returns the start of piece `i` if `n` rows or columns are divided into `pieces` pieces. For `i == pieces`, returns `n`.
fn piece_start(n: usize, pieces: usize, i: usize) -> usize {
    (n.div_ceil(PIECE_STEP) * i / pieces * PIECE_STEP).min(n)
}

/// Divides an `m` x `n` result into `rows` times `columns` pieces, and calls `piece` with the row range and column range of each, one
/// piece per thread.
fn for_each_piece(
    (m, n): (usize, usize),
    (rows, columns): (usize, usize),
    piece: impl Fn(Range<usize>, Range<usize>) + Sync,
) {
    parallel::for_each_index(rows * columns, |i| {
        let (i, j) = (i / columns, i % columns);
        let down = piece_start(m, rows, i)..piece_start(m, rows, i + 1);
        let across = piece_start(n, columns, j)..piece_start(n, columns, j + 1);
        if !down.is_empty() && !across.is_empty() {
            piece(down, across);
        }
    });
}

/// Returns the kernels for products of this size and these types, or `None`. Products with few rows have other kernels, in [`few`].
#[cfg(target_arch = "x86_64")]
fn select_kernels((m, n, k): (usize, usize, usize), a: Floats, b: Floats) -> Option<&'static Kernels> {
    const MIN_SIZE: usize = 8;
    let for_pairs = match (a, b) {
        (Floats::BF16(_), Floats::BF16(_)) => Kernels::for_pairs(k),
        _ => None,
    };
    for_pairs.or_else(|| Kernels::get(false)).filter(|_| m.min(n).min(k) >= MIN_SIZE)
}

/// Computes a product with kernels of this crate, and applies an epilogue, which requires columns that are one element apart. If the
/// result is contiguous, the kernels pack `a`, and the sums do not overlap the result, also writes the sums of a's rows to `out` at index
/// `sums`, and returns true.
///
/// # Errors
/// Returns the errors of [`gemm`], and an error for an epilogue operand of another size.
#[cfg(target_arch = "x86_64")]
fn multiply_with(
    kernels: &'static Kernels,
    (m, n, k): (usize, usize, usize),
    (out, layout): (&mut [f32], MatrixLayout),
    [(a, layout_a), (b, layout_b)]: [(Floats, MatrixLayout); 2],
    finish: KernelEpilogue<&[f32]>,
    sums: Option<usize>,
) -> Result<bool> {
    check_layouts((m, n, k), (out.len(), layout), (a.len(), layout_a), (b.len(), layout_b))?;
    let fits = match finish {
        KernelEpilogue::Nothing => true,
        KernelEpilogue::Add(row) | KernelEpilogue::AddRelu(row) => layout.col == 1 && row.len() == n,
        KernelEpilogue::ReluGrad(x) => (layout.row, layout.col) == (n as isize, 1) && x.len() == m * n,
    };
    if !fits {
        return Err(Error::invalid("gemm", "the epilogue's operand has the wrong size"));
    }
    let is_apart = |sums: usize| sums + m <= layout.offset || layout.offset + m * n <= sums;
    let contiguous = (layout.row, layout.col) == (n as isize, 1);
    let start = out.as_mut_ptr();
    let sums =
        sums.filter(|&sums| contiguous && is_apart(sums) && sums + m <= out.len()).map(|at| start.wrapping_add(at));
    // With negative strides, other elements come before the first element.
    let to = pack::Matrix { start: start.wrapping_add(layout.offset), row: layout.row, col: layout.col };
    let to = blocks::Destination::Memory(to, finish.map(<[f32]>::as_ptr, <[f32]>::as_ptr));
    // SAFETY: none of the sizes is 0. All three matrices are in their slices (`check_layouts`), which are initialised and stay valid
    // during the call. `out` is borrowed exclusively, so it overlaps neither input, and its elements are distinct; the sums are in `out`,
    // and none of them is an element of the result. The epilogue's operand is borrowed and has the size that the kernels read.
    Ok(unsafe { blocks::product(kernels, (m, n, k), to, a.matrix(layout_a), b.matrix(layout_b), sums, false) })
}

/// Calls `product` for the index of each entry of `layouts`, which are checked. If there are enough products, each thread computes whole
/// products alone (the second argument is true): the threads then neither share panels nor wait for each other between products.
#[cfg(target_arch = "x86_64")]
fn for_each_product(
    (m, n, k): (usize, usize, usize),
    layouts: &[[MatrixLayout; 3]],
    product: impl Fn(usize, bool) + Sync,
) {
    let (count, threads) = (layouts.len(), threads());
    let is_even = count.is_multiple_of(threads) || count >= 4 * threads; // no thread waits long for the last product
    let small = m.saturating_mul(n).saturating_mul(k) <= blocks::OWN_PANELS_MAX_PRODUCTS;
    match count > 1 && is_even && small && are_disjoint((m, n), layouts) {
        true => parallel::for_each_index(count, |z| product(z, true)),
        false => (0..count).for_each(|z| product(z, false)),
    }
}

/// True if no two of the `m` x `n` results share an element. May be false for results that are not stored row by row.
#[cfg(target_arch = "x86_64")]
fn are_disjoint((m, n): (usize, usize), layouts: &[[MatrixLayout; 3]]) -> bool {
    let MatrixLayout { row, col, .. } = layouts[0][2];
    let (Ok(row), 1) = (usize::try_from(row), col) else { return false };
    let first = layouts.iter().map(|l| l[2].offset).min().unwrap_or(0);
    // The first column and the first row of each result in a matrix whose rows are `row` elements long.
    let corner = |l: &[MatrixLayout; 3]| ((l[2].offset - first) % row, (l[2].offset - first) / row);
    let mut corners: SmallVec<[(usize, usize); 32]> = layouts.iter().map(corner).collect();
    corners.sort_unstable();
    row >= n
        && layouts.iter().all(|l| (l[2].row, l[2].col) == (row as isize, 1))
        && corners.iter().all(|&(column, _)| column + n <= row)
        && corners.windows(2).all(|c| c[0].0 + n <= c[1].0 || (c[0].0 == c[1].0 && c[0].1 + m <= c[1].1))
}

/// Computes one product for each entry of `layouts`, which has the layouts of a, b and the result. Returns the errors of [`gemm`].
pub(crate) fn gemm_f32(
    size: (usize, usize, usize),
    out: &mut [f32],
    a: Floats,
    b: Floats,
    layouts: impl Iterator<Item = [MatrixLayout; 3]>,
) -> Result<()> {
    let mut layouts = layouts.peekable();
    #[cfg(target_arch = "x86_64")]
    let mut rows = Vec::new();
    #[cfg(target_arch = "x86_64")]
    while let Some([layout_a, layout_b, layout]) = layouts.peek().copied()
        && let Some(transposed) = few::should_transpose(size, layout_a, layout_b)
    {
        check_layouts(size, (out.len(), layout), (a.len(), layout_a), (b.len(), layout_b))?;
        let start = out.as_mut_ptr().wrapping_add(layout.offset);
        let to = pack::Matrix { start, row: layout.row, col: layout.col };
        // SAFETY: as in `multiply_with`.
        unsafe { few::product(size, transposed, to, a.matrix(layout_a), b.matrix(layout_b), &mut rows) };
        layouts.next();
    }
    if layouts.peek().is_none() {
        return Ok(());
    }
    #[cfg(target_arch = "x86_64")]
    if let Some(kernels) = select_kernels(size, a, b) {
        let (layouts, start) = (layouts.collect::<SmallVec<[_; 1]>>(), SharedPtr(out.as_mut_ptr()));
        for [layout_a, layout_b, layout] in &layouts {
            check_layouts(size, (out.len(), *layout), (a.len(), *layout_a), (b.len(), *layout_b))?;
        }
        for_each_product(size, &layouts, |z, alone| {
            let ([layout_a, layout_b, layout], start) = (layouts[z], &start);
            let to = pack::Matrix { start: start.0.wrapping_add(layout.offset), row: layout.row, col: layout.col };
            let to = blocks::Destination::Memory(to, KernelEpilogue::Nothing);
            // SAFETY: as in `multiply_with`; products that are computed at the same time have disjoint results.
            unsafe { blocks::product(kernels, size, to, a.matrix(layout_a), b.matrix(layout_b), None, alone) };
        });
        return Ok(());
    }
    layouts.into_iter().try_for_each(|[layout_a, layout_b, layout]| {
        floats::gemm_widened(size, (out, layout), (a, layout_a), (b, layout_b))
    })
}

/// Computes one product like [`gemm_f32`], and in the same pass the sums of the rows of `a`, which are written to `out` at index `sums`.
/// Computes no sums and returns false unless the result is contiguous, the kernels pack `a`, and the sums do not overlap the result.
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
pub(crate) fn gemm_with_row_sums(
    size: (usize, usize, usize),
    out: &mut [f32],
    (a, b): (Floats, Floats),
    layouts: [MatrixLayout; 3],
    sums: usize,
) -> Result<bool> {
    #[cfg(target_arch = "x86_64")]
    if let Some(kernels) = select_kernels(size, a, b) {
        let ([layout_a, layout_b, layout], finish) = (layouts, KernelEpilogue::Nothing);
        return multiply_with(kernels, size, (out, layout), [(a, layout_a), (b, layout_b)], finish, Some(sums));
    }
    gemm_f32(size, out, a, b, std::iter::once(layouts))?;
    Ok(false)
}

/// Computes one contiguous product like [`gemm_f32`], and applies an epilogue in registers, so that the result is written once. Returns
/// false, without writing anything, if there are no kernels for the product.
///
/// # Errors
/// Returns the errors of [`gemm`], and an error for an epilogue operand of another size.
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
pub(crate) fn gemm_with_epilogue(
    size: (usize, usize, usize),
    out: &mut [f32],
    (a, layout_a): (Floats, MatrixLayout),
    (b, layout_b): (Floats, MatrixLayout),
    finish: KernelEpilogue<&[f32]>,
) -> Result<bool> {
    #[cfg(target_arch = "x86_64")]
    if let Some(kernels) = select_kernels(size, a, b) {
        let contiguous = MatrixLayout { offset: 0, row: size.1 as isize, col: 1 };
        multiply_with(kernels, size, (out, contiguous), [(a, layout_a), (b, layout_b)], finish, None)?;
        return Ok(true);
    }
    Ok(false)
}

/// True if [`gemm_into`] can compute products of this size: the processor has kernels, and `k` is at most the packed depth.
#[cfg_attr(not(target_arch = "x86_64"), allow(unused_variables))]
pub(crate) fn supports_pieces(size: (usize, usize, usize)) -> bool {
    #[cfg(target_arch = "x86_64")]
    return size.2 <= blocks::MAX_PACKED_STEPS && select_kernels(size, Floats::F32(&[]), Floats::F32(&[])).is_some();
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Computes a product of f32 or halves for each entry of `layouts`, which has the layouts of a, b and the results, whose columns are one
/// element apart. Passes the elements to `each`, which writes one or several results: `each(first, product, outs)` gets elements of the
/// products, still in the cache, of which the first has index `first` over all products, and the corresponding elements of each result.
///
/// # Errors
/// Returns the errors of [`gemm`], and an error for sizes for which [`supports_pieces`] is false.
#[cfg(target_arch = "x86_64")]
pub(crate) fn gemm_into<T: Send + Sync>(
    size: (usize, usize, usize),
    outs: &mut [&mut [T]],
    (a, b): (Floats, Floats),
    layouts: &[[MatrixLayout; 3]],
    each: impl Fn(usize, &[f32], &mut [&mut [T]]) + Sync,
) -> Result<()> {
    let (m, n) = (size.0, size.1);
    let Some(kernels) = select_kernels(size, a, b).filter(|_| supports_pieces(size)) else {
        return Err(Error::invalid("gemm", "products of this size cannot be computed in pieces"));
    };
    for (out, [layout_a, layout_b, layout]) in outs.iter().flat_map(|out| layouts.iter().map(move |l| (out, l))) {
        let layout = MatrixLayout { col: 1, ..*layout };
        check_layouts(size, (out.len(), layout), (a.len(), *layout_a), (b.len(), *layout_b))?;
    }
    let starts: SmallVec<[SharedPtr<T>; 2]> = outs.iter_mut().map(|out| SharedPtr(out.as_mut_ptr())).collect();
    for_each_product(size, layouts, |z, alone| {
        let [layout_a, layout_b, layout] = layouts[z];
        let pass_on = |i: usize, j: usize, product: &[f32]| {
            let at = MatrixLayout { col: 1, ..layout }.index_of(i, j);
            // SAFETY: the elements belong to the results, which are borrowed exclusively during the call; every element is passed to
            // `each` once, so no other thread accesses it.
            let outs = starts.iter().map(|s| unsafe { std::slice::from_raw_parts_mut(s.0.add(at), product.len()) });
            each((z * m + i) * n + j, product, &mut outs.collect::<SmallVec<[&mut [T]; 2]>>());
        };
        let contiguous = layout.row == n as isize;
        let hand_over = |rows: Range<usize>, columns: Range<usize>, product: &[f32]| match contiguous {
            true if columns.len() == n => pass_on(rows.start, 0, product),
            _ => rows.zip(product.chunks(columns.len())).for_each(|(i, row)| pass_on(i, columns.start, row)),
        };
        let to = blocks::Destination::Pieces(&hand_over);
        // SAFETY: none of the sizes is 0. Both matrices are in their slices (`check_layouts`), which are initialised and stay valid
        // during the call.
        unsafe { blocks::product(kernels, size, to, a.matrix(layout_a), b.matrix(layout_b), None, alone) };
    });
    Ok(())
}

/// Returns no result: other processors have no kernels, so [`supports_pieces`] is always false.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn gemm_into<T>(
    _: (usize, usize, usize),
    _: &mut [&mut [T]],
    _: (Floats, Floats),
    _: &[[MatrixLayout; 3]],
    _: impl Fn(usize, &[f32], &mut [&mut [T]]) + Sync,
) -> Result<()> {
    Err(Error::invalid("gemm", "there are no kernels for it"))
}

/// Checks that the matrices are within their slices, and that the elements of the result are distinct.
fn check_layouts(
    (m, n, k): (usize, usize, usize),
    out: (usize, MatrixLayout),
    a: (usize, MatrixLayout),
    b: (usize, MatrixLayout),
) -> Result<()> {
    let inputs_fit = k == 0 || (a.1.is_within(m, k, a.0) && b.1.is_within(k, n, b.0));
    if inputs_fit && out.1.is_within(m, n, out.0) && out.1.is_injective(m, n) {
        return Ok(());
    }
    Err(Error::invalid(
        "gemm",
        format!("a matrix of {m} x {k} x {n} exceeds its slice, or its elements coincide: {:?}", (out.1, a.1, b.1)),
    ))
}

/// Computes `out = a b` for an `m` x `k` and a `k` x `n` matrix, with several threads if the product is large enough.
///
/// # Errors
/// [`Error::Invalid`] if a matrix exceeds its slice or two elements of `out` have the same address, which is a bug of the caller.
pub(crate) fn gemm<T: Real>(
    size: (usize, usize, usize),
    out: (&mut [T], MatrixLayout),
    a: (&[T], MatrixLayout),
    b: (&[T], MatrixLayout),
) -> Result<()> {
    gemm_accumulate(size, out, a, b, false)
}

/// Computes the product like [`gemm`]; with `add`, adds the product to `out` instead of overwriting `out`.
fn gemm_accumulate<T: Real>(
    (m, n, k): (usize, usize, usize),
    out: (&mut [T], MatrixLayout),
    a: (&[T], MatrixLayout),
    b: (&[T], MatrixLayout),
    add: bool,
) -> Result<()> {
    if m == 0 || n == 0 {
        return Ok(());
    }
    check_layouts((m, n, k), (out.0.len(), out.1), (a.0.len(), a.1), (b.0.len(), b.1))?;
    if k == 0 {
        (0..m * n).for_each(|i| out.0[out.1.index_of(i / n, i % n)] = T::ZERO);
        return Ok(());
    }
    let to = SharedPtr(out.0.as_mut_ptr());
    for_each_piece((m, n), partition((m, n, k), m, |_| n), |down, across| {
        let to = &to;
        let mut size = (down.len(), across.len());
        let mut out = MatrixLayout { offset: out.1.index_of(down.start, across.start), ..out.1 };
        let mut left = (a.0, MatrixLayout { offset: a.1.index_of(down.start, 0), ..a.1 });
        let mut right = (b.0, MatrixLayout { offset: b.1.index_of(0, across.start), ..b.1 });
        // The gemm crates are faster if the result's row stride is its smaller stride, and require that both of its strides are positive.
        if out.col.abs() < out.row.abs() {
            size = (size.1, size.0);
            out = out.transposed();
            (left, right) = ((right.0, right.1.transposed()), (left.0, left.1.transposed()));
        }
        let (m, n) = size;
        if out.row < 0 {
            (out, left.1) = (out.with_rows_reversed(m), left.1.with_rows_reversed(m));
        }
        if out.col < 0 {
            (out, right.1) = (out.with_columns_reversed(n), right.1.with_columns_reversed(n));
        }
        if left.1.col < 0 {
            (left.1, right.1) = (left.1.with_columns_reversed(k), right.1.with_rows_reversed(k));
        }
        // SAFETY: all three matrices are in their slices (`check_layouts`, above), which are initialised and stay valid during the call.
        // Each piece is a non-empty part of the matrices, so its first element is in its slice, also after rows or columns were reversed.
        // `out` is borrowed exclusively, so it overlaps neither input, and its elements are distinct, so pieces without a common element
        // are in different memory.
        unsafe {
            T::product()(
                m,
                n,
                k,
                to.0.add(out.offset),
                out.col,
                out.row,
                add,
                left.0.as_ptr().add(left.1.offset),
                left.1.col,
                left.1.row,
                right.0.as_ptr().add(right.1.offset),
                right.1.col,
                right.1.row,
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

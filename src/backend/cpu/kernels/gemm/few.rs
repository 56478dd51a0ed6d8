//! Products in which one matrix has few rows. Such a product takes as long as reading the other matrix, so the other matrix is read only
//! once, without a packed copy, and halves are widened in registers.

use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use half::{bf16, f16};

use super::kernel::{V8, V16, Vector};
use super::pack::{ElementPtr, Matrix, PanelElement};
use super::{MatrixLayout, for_each_piece, is_serial};
use crate::device::cpu::threads;

/// The maximum number of rows: with more rows, packing panels is faster.
pub(super) const MAX_ROWS: usize = 7;
/// The number of sums that stay in the L1 cache while rows of the right matrix are read. A second buffer of this size holds the totals of blocks.
const CACHED_SUMS: usize = 4096;
/// The number of rows of the right matrix whose multiples are summed first, so that the error of a sum does not grow with all rows.
const ROWS_PER_BLOCK: usize = 128;
/// The number of vectors of a dot product that are summed first.
const VECTORS_PER_BLOCK: usize = 64;
/// The number of rows of the right matrix that one pass adds. More rows per pass mean fewer loads and stores of the sums.
const ROWS_PER_PASS: usize = 8;

/// A vector of f32 that is loaded from elements of another type.
///
/// # Safety
/// The requirements of [`Vector`], with [`LANES`](Vector::LANES) elements at the pointer.
trait Widen<T>: Vector {
    unsafe fn widen(at: *const T) -> Self;
}

macro_rules! widen {
    ($($vector:ident of $type:ty: $at:ident => $widened:expr;)*) => { $(
        impl Widen<$type> for $vector {
            unsafe_methods! { widen($at: *const $type) -> Self = $widened; }
        }
    )* };
}

widen! {
    V8 of f32: at => V8::load(at);
    V8 of f16: at => V8(f16::lanes(at, 1));
    V8 of bf16: at => V8(bf16::lanes(at, 1));
    V16 of f32: at => V16::load(at);
    V16 of f16: at => V16(_mm512_cvtph_ps(_mm256_loadu_si256(at.cast())));
    V16 of bf16: at => V16(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast())))));
}

/// The operands and the result. The left matrix has `M` contiguous rows of `k` elements, `row` elements apart; the right matrix has `k`
/// rows.
struct Operands<T> {
    k: usize,
    a: *const f32,
    row: isize,
    b: Matrix<*const T>,
    out: Matrix<*mut f32>,
}

impl<T> Operands<T> {
    /// Returns the address of element `p` of row `i` of the left matrix.
    ///
    /// # Safety
    /// The element exists.
    #[inline(always)]
    unsafe fn left(&self, i: usize, p: usize) -> *const f32 {
        // SAFETY: the caller guarantees the requirements of this function.
        unsafe { self.a.offset(i as isize * self.row).add(p) }
    }

    /// Writes an element of the result.
    ///
    /// # Safety
    /// The element exists, and no other code accesses it.
    #[inline(always)]
    unsafe fn write(&self, i: usize, j: usize, sum: f32) {
        // SAFETY: the caller guarantees the requirements of this function.
        unsafe { *self.out.start.offset(i as isize * self.out.row + j as isize * self.out.col) = sum }
    }
}

// SAFETY: threads read the operands, and write disjoint elements of the result.
unsafe impl<T> Sync for Operands<T> {}

/// A kernel that computes the given columns of the result.
type ColumnsKernel<T> = unsafe fn(&Operands<T>, Range<usize>);

/// Returns whether to transpose the product, or `None` if this module has no kernel for it. A product has kernels if `a` has few rows or
/// `b` has few columns (then the product is transposed), and the other matrix has contiguous rows or columns.
pub(super) fn should_transpose((m, n, k): (usize, usize, usize), a: MatrixLayout, b: MatrixLayout) -> Option<bool> {
    let vectors =
        is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
    let contiguous = |x: MatrixLayout| vectors && m.min(n).min(k) > 0 && (x.col == 1 || x.row == 1);
    match (m <= MAX_ROWS && contiguous(b), n <= MAX_ROWS && contiguous(a)) {
        (false, false) => None,
        (few_rows, few_columns) => Some(few_columns && (!few_rows || n < m)),
    }
}

/// Computes `out = a b` for an `m` x `k` and a `k` x `n` matrix that [`should_transpose`] accepts. `rows` is a buffer for the widened
/// rows of `a`, which the products of a batch reuse. Contiguous f32 rows are used without a copy.
///
/// # Safety
/// All elements are in memory that stays valid during the call. No code writes to the operands, no other code accesses the result, and
/// the result's elements are distinct.
pub(super) unsafe fn product(
    (m, n, k): (usize, usize, usize),
    transposed: bool,
    out: Matrix<*mut f32>,
    a: Matrix<ElementPtr>,
    b: Matrix<ElementPtr>,
    rows: &mut Vec<f32>,
) {
    let ((m, n), out, a, b) = match transposed {
        true => ((n, m), out.transposed(), b.transposed(), a.transposed()),
        false => ((m, n), out, a, b),
    };
    // SAFETY: the caller guarantees the requirements of this function.
    unsafe {
        let (a, row) = match a.start {
            ElementPtr::F32(start) if a.col == 1 => (start, a.row),
            _ => (widened((m, k), a, rows), k as isize),
        };
        macro_rules! compute_with {
            ($start:ident) => {{
                let operands = Operands { k, a, row, b: Matrix { start: $start, row: b.row, col: b.col }, out };
                compute((m, n), &operands);
            }};
        }
        match b.start {
            ElementPtr::F32(start) => compute_with!(start),
            ElementPtr::F16(start) => compute_with!(start),
            ElementPtr::BF16(start) | ElementPtr::Pairs(start, _) => compute_with!(start),
        }
    }
}

/// Widens the elements of `a` into `rows`, row by row.
///
/// # Safety
/// The elements are readable.
unsafe fn widened((m, k): (usize, usize), a: Matrix<ElementPtr>, rows: &mut Vec<f32>) -> *const f32 {
    rows.clear();
    rows.reserve(m * k);
    for i in 0..m as isize {
        let at = |p: usize| i * a.row + p as isize * a.col;
        macro_rules! widen_with {
            ($start:ident) => {
                // SAFETY: the caller guarantees the requirements of this function.
                rows.extend((0..k).map(|p| unsafe { f32::from(*$start.offset(at(p))) }))
            };
        }
        match a.start {
            ElementPtr::F32(start) => widen_with!(start),
            ElementPtr::F16(start) => widen_with!(start),
            ElementPtr::BF16(start) | ElementPtr::Pairs(start, _) => widen_with!(start),
        }
    }
    rows.as_ptr()
}

/// Computes a product with the matching kernel, on several threads if it is large enough.
///
/// # Safety
/// The requirements of [`product`]; the processor has AVX2, FMA and F16C.
unsafe fn compute<T: Copy + Into<f32>>((m, n): (usize, usize), operands: &Operands<T>)
where
    V8: Widen<T>,
    V16: Widen<T>,
{
    macro_rules! kernel_table {
        ($($m:literal)*) => {
            // A right matrix with contiguous columns needs dot products.
            match (m, operands.b.col != 1, crate::device::cpu::has_avx512()) {
                $(($m, true, true) => dots_16::<T, $m>,
                ($m, true, false) => dots_8::<T, $m>,
                ($m, false, true) => rows_16::<T, $m>,
                ($m, false, false) => rows_8::<T, $m>,)*
                _ => unreachable!("at most MAX_ROWS rows"),
            }
        };
    }
    let kernel: ColumnsKernel<T> = kernel_table!(1 2 3 4 5 6 7);
    let pieces = if is_serial((m, n, operands.k)) { 1 } else { threads() };
    for_each_piece((m, n), (1, pieces), |_, columns| {
        // SAFETY: the right matrix and the result have these columns, and each column is written by one thread.
        unsafe { kernel(operands, columns) };
    });
}

macro_rules! kernels {
    ($feature:literal, $vector:ident: $dots:ident $rows:ident) => {
        /// # Safety
        /// The requirements of [`dots`].
        #[target_feature(enable = $feature)]
        unsafe fn $dots<T: Copy + Into<f32>, const M: usize>(x: &Operands<T>, columns: Range<usize>)
        where
            $vector: Widen<T>,
        {
            // SAFETY: the caller guarantees the requirements of this function.
            unsafe { dots::<$vector, T, M>(x, columns) }
        }

        /// # Safety
        /// The requirements of [`rows`].
        #[target_feature(enable = $feature)]
        unsafe fn $rows<T: Copy + Into<f32>, const M: usize>(x: &Operands<T>, columns: Range<usize>)
        where
            $vector: Widen<T>,
        {
            // SAFETY: the caller guarantees the requirements of this function.
            unsafe { rows::<$vector, T, M>(x, columns) }
        }
    };
}

kernels!("avx2,fma,f16c", V8: dots_8 rows_8);
kernels!("avx512f", V16: dots_16 rows_16);

/// Computes dot products, for a right matrix with contiguous columns, four columns at a time.
///
/// # Safety
/// The columns belong to the right matrix, whose elements are readable, as are `M` rows of the left matrix. No other code accesses
/// the result's columns. The processor has the vector's instructions.
#[inline(always)]
unsafe fn dots<V: Widen<T>, T: Copy + Into<f32>, const M: usize>(x: &Operands<T>, columns: Range<usize>) {
    let mut j = columns.start;
    while j < columns.end {
        // SAFETY: the caller guarantees the requirements of this function.
        unsafe {
            j += match columns.end - j {
                0..4 => dot_columns::<V, T, M, 1>(x, j),
                _ => dot_columns::<V, T, M, 4>(x, j),
            };
        }
    }
}

/// Computes the `N` columns that begin with column `j`; returns `N`.
///
/// # Safety
/// The requirements of [`dots`].
#[inline(always)]
unsafe fn dot_columns<V: Widen<T>, T: Copy + Into<f32>, const M: usize, const N: usize>(
    x: &Operands<T>,
    j: usize,
) -> usize {
    let whole = x.k / V::LANES * V::LANES;
    // SAFETY: the caller guarantees the requirements of this function.
    unsafe {
        let column = |c: usize| x.b.start.offset((j + c) as isize * x.b.col);
        let mut totals = [[V::zero(); M]; N];
        for start in (0..whole).step_by(VECTORS_PER_BLOCK * V::LANES) {
            let mut sums = [[V::zero(); M]; N];
            for p in (start..whole.min(start + VECTORS_PER_BLOCK * V::LANES)).step_by(V::LANES) {
                let rows: [V; M] = std::array::from_fn(|i| V::load(x.left(i, p)));
                for (c, sums) in sums.iter_mut().enumerate() {
                    let y = V::widen(column(c).add(p));
                    for (sum, row) in sums.iter_mut().zip(rows) {
                        *sum = sum.add_product(row, y);
                    }
                }
            }
            for (total, sum) in totals.as_flattened_mut().iter_mut().zip(sums.as_flattened()) {
                *total = total.add(*sum);
            }
        }
        for (c, sums) in totals.into_iter().enumerate() {
            for (i, sum) in sums.into_iter().enumerate() {
                let mut lanes = [0f32; 16];
                sum.store(lanes.as_mut_ptr());
                let rest = (whole..x.k).map(|p| *x.left(i, p) * (*column(c).add(p)).into());
                x.write(i, j + c, lanes.iter().sum::<f32>() + rest.sum::<f32>());
            }
        }
    }
    N
}

/// Computes each row of the result as a sum of multiples of the right matrix's rows, which are contiguous, a range of columns at a time.
///
/// # Safety
/// The requirements of [`dots`].
#[inline(always)]
unsafe fn rows<V: Widen<T>, T: Copy + Into<f32>, const M: usize>(x: &Operands<T>, columns: Range<usize>) {
    let stretch = CACHED_SUMS / M / V::LANES * V::LANES;
    // The buffers stay uninitialised, because a small product needs only few of their elements.
    let mut buffers = [[const { MaybeUninit::<f32>::uninit() }; CACHED_SUMS]; 2];
    for first in columns.clone().step_by(stretch) {
        let n = stretch.min(columns.end - first);
        let [sums, totals] = buffers.each_mut().map(|buffer| {
            let sums = &mut buffer[..M * n];
            sums.fill(MaybeUninit::new(0.0));
            // SAFETY: these elements have been initialised.
            unsafe { &mut *(&raw mut *sums as *mut [f32]) }
        });
        for start in (0..x.k).step_by(ROWS_PER_BLOCK) {
            let end = x.k.min(start + ROWS_PER_BLOCK);
            let whole = start + (end - start) / ROWS_PER_PASS * ROWS_PER_PASS;
            // SAFETY: the sums have been initialised; the caller guarantees the remaining requirements.
            unsafe {
                (start..whole)
                    .step_by(ROWS_PER_PASS)
                    .for_each(|p| add_rows::<V, T, M, ROWS_PER_PASS>(x, p, (first, n), sums.as_mut_ptr()));
                (whole..end).for_each(|p| add_rows::<V, T, M, 1>(x, p, (first, n), sums.as_mut_ptr()));
            }
            totals.iter_mut().zip(&mut *sums).for_each(|(total, sum)| *total += std::mem::take(sum));
        }
        for (i, totals) in totals.chunks_exact(n).enumerate() {
            // SAFETY: the caller guarantees the requirements of this function.
            totals.iter().enumerate().for_each(|(j, total)| unsafe { x.write(i, first + j, *total) });
        }
    }
}

/// Adds multiples of `S` rows of the right matrix, starting at row `p`, to the sums, in the `n` columns starting at `first`. `sums` has
/// `n` elements for each row of the left matrix.
///
/// # Safety
/// The requirements of [`dots`]; the sums are initialised, and no other code accesses them.
#[inline(always)]
unsafe fn add_rows<V: Widen<T>, T: Copy + Into<f32>, const M: usize, const S: usize>(
    x: &Operands<T>,
    p: usize,
    (first, n): (usize, usize),
    sums: *mut f32,
) {
    let whole = n / V::LANES * V::LANES;
    // SAFETY: the caller guarantees the requirements of this function.
    unsafe {
        let row = |s: usize| x.b.start.offset((p + s) as isize * x.b.row).add(first);
        for j in (0..whole).step_by(V::LANES) {
            let rows: [V; S] = std::array::from_fn(|s| V::widen(row(s).add(j)));
            for i in 0..M {
                let at = sums.add(i * n + j);
                let mut sum = V::load(at);
                for (s, row) in rows.into_iter().enumerate() {
                    sum = sum.add_product(V::splat(x.left(i, p + s)), row);
                }
                sum.store(at);
            }
        }
        for j in whole..n {
            for (i, s) in (0..M).flat_map(|i| (0..S).map(move |s| (i, s))) {
                *sums.add(i * n + j) += *x.left(i, p + s) * (*row(s).add(j)).into();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Both vector lengths give the same results. Without this test, a processor with AVX-512 never runs the kernels with shorter
    /// vectors.
    #[test]
    fn both_vector_lengths_agree() {
        let features = crate::device::cpu::vector_features();
        if !["avx2", "fma", "f16c", "avx512f"].iter().all(|name| features.contains(name)) {
            return;
        }
        fn check<T: Copy + Into<f32>>(convert: fn(f32) -> T)
        where
            V8: Widen<T>,
            V16: Widen<T>,
        {
            let (n, k) = (1403, 75);
            let number = |i: usize| ((i * 7919) % 1009) as f32 / 1009.0 - 0.5;
            let a: Vec<f32> = (0..3 * k).map(number).collect();
            let b: Vec<T> = (0..n * k).map(|i| convert(number(i + 5))).collect();
            let run = |kernel: ColumnsKernel<T>, row: isize, col: isize| {
                let mut out = vec![f32::NAN; 3 * n];
                let to = Matrix { start: out.as_mut_ptr(), row: n as isize, col: 1 };
                let b = Matrix { start: b.as_ptr(), row, col };
                let operands = Operands { k, a: a.as_ptr(), row: k as isize, b, out: to };
                // SAFETY: the matrices are in the vectors, and the processor has the instructions.
                unsafe { kernel(&operands, 0..n) };
                out
            };
            for (short, long) in [
                (run(dots_8::<T, 3>, 1, k as isize), run(dots_16::<T, 3>, 1, k as isize)),
                (run(rows_8::<T, 3>, n as isize, 1), run(rows_16::<T, 3>, n as isize, 1)),
            ] {
                assert!(short.iter().zip(&long).all(|(x, y)| (x - y).abs() <= 1e-5), "{short:?}");
            }
        }
        check::<f32>(|x| x);
        check(f16::from_f32);
        check(bf16::from_f32);
    }
}

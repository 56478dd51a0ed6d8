//! Products of which one matrix has few rows: the other one is read once, without a copy and in its own type, and widened in
//! registers, because such a product takes as long as that does.

use std::arch::x86_64::*;
use std::mem::MaybeUninit;
use std::ops::Range;

use half::{bf16, f16};

use super::super::threads;
use super::kernel::{V8, V16, Vector};
use super::matrix::{Matrix, Start};
use super::pack::Source;
use super::{Place, alone, each_piece};

/// Rows at most: with more, laying out panels pays.
pub(super) const FEW: usize = 7;
/// Sums that are kept in the first-level cache while rows of the right matrix pass by.
const SUMS: usize = 4096;
/// Rows of it that are added at a time, because each time the sums are loaded and stored.
const STEPS: usize = 8;

/// A vector of f32 made of elements of another type.
///
/// # Safety
/// Of its method: as [`Vector`], of as many elements at the pointer.
trait Widen<T>: Vector {
    unsafe fn widen(at: *const T) -> Self;
}

macro_rules! widen {
    ($($vector:ident of $type:ty: $at:ident => $widened:expr;)*) => {
        $(impl Widen<$type> for $vector {
            #[inline(always)]
            unsafe fn widen($at: *const $type) -> Self {
                // SAFETY: the caller's promise.
                unsafe { $widened }
            }
        })*
    };
}

widen! {
    V8 of f32: at => V8::load(at);
    V8 of f16: at => V8(f16::lanes(at, 1));
    V8 of bf16: at => V8(bf16::lanes(at, 1));
    V16 of f32: at => V16::load(at);
    V16 of f16: at => V16(_mm512_cvtph_ps(_mm256_loadu_si256(at.cast())));
    V16 of bf16: at => V16(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast())))));
}

/// The right matrix, `k` rows, the left one, `M` rows of `k` elements one after another, which are `row` elements apart, and the result.
struct Operands<T> {
    k: usize,
    a: *const f32,
    row: isize,
    b: Matrix<*const T>,
    out: Matrix<*mut f32>,
}

impl<T> Operands<T> {
    /// Element `p` of row `i` of the left matrix.
    ///
    /// # Safety
    /// It is one.
    #[inline(always)]
    unsafe fn left(&self, i: usize, p: usize) -> *const f32 {
        // SAFETY: the caller's promise.
        unsafe { self.a.offset(i as isize * self.row).add(p) }
    }

    /// Writes an element of the result.
    ///
    /// # Safety
    /// It is one, and nobody else uses it.
    #[inline(always)]
    unsafe fn write(&self, i: usize, j: usize, sum: f32) {
        // SAFETY: the caller's promise.
        unsafe { *self.out.start.offset(i as isize * self.out.row + j as isize * self.out.col) = sum }
    }
}

// SAFETY: threads read what is there, and write elements of their own.
unsafe impl<T> Sync for Operands<T> {}

/// Computes some columns of the result.
type Columns<T> = unsafe fn(&Operands<T>, Range<usize>);

/// Whether there are kernels for a product: where its result has few rows, or columns, then it is to be transposed, and the rows or the
/// columns of the other matrix are contiguous.
pub(super) fn fits((m, n, k): (usize, usize, usize), a: Place, b: Place) -> Option<Transposed> {
    let vectors =
        is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
    let contiguous = |x: Place| vectors && m.min(n).min(k) > 0 && (x.col == 1 || x.row == 1);
    match (m <= FEW && contiguous(b), n <= FEW && contiguous(a)) {
        (false, false) => None,
        (few_rows, few_columns) => Some(Transposed(few_columns && (!few_rows || n < m))),
    }
}

/// Whether a product is transposed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Transposed(bool);

/// `out = a b` for an `m` x `k` and a `k` x `n` matrix, as it [fits]. `rows` is memory for the rows of `a`, which are widened there
/// where they are not in f32 and contiguous: a batch of small products has it once.
///
/// # Safety
/// The elements of all three are in memory that lives through the call. Nobody writes to those of the operands, nobody else uses those
/// of the result, and no two of these are one.
pub(super) unsafe fn product(
    (m, n, k): (usize, usize, usize),
    Transposed(transposed): Transposed,
    out: Matrix<*mut f32>,
    a: Matrix<Start>,
    b: Matrix<Start>,
    rows: &mut Vec<f32>,
) {
    let ((m, n), out, a, b) = match transposed {
        true => ((n, m), out.transposed(), b.transposed(), a.transposed()),
        false => ((m, n), out, a, b),
    };
    // SAFETY: the caller's promise.
    unsafe {
        let (a, row) = match a.start {
            Start::F32(start) if a.col == 1 => (start, a.row),
            _ => (widened((m, k), a, rows), k as isize),
        };
        macro_rules! of {
            ($start:ident) => {{
                let operands = Operands { k, a, row, b: Matrix { start: $start, row: b.row, col: b.col }, out };
                compute((m, n), &operands);
            }};
        }
        match b.start {
            Start::F32(start) => of!(start),
            Start::F16(start) => of!(start),
            Start::BF16(start) | Start::Pairs(start, _) => of!(start),
        }
    }
}

/// Its elements, row by row, in `rows`.
///
/// # Safety
/// They are there to be read.
unsafe fn widened((m, k): (usize, usize), a: Matrix<Start>, rows: &mut Vec<f32>) -> *const f32 {
    rows.clear();
    rows.reserve(m * k);
    for i in 0..m as isize {
        let at = |p: usize| i * a.row + p as isize * a.col;
        // SAFETY: the caller's promise.
        unsafe {
            match a.start {
                Start::F32(start) => rows.extend((0..k).map(|p| *start.offset(at(p)))),
                Start::F16(start) => rows.extend((0..k).map(|p| (*start.offset(at(p))).to_f32())),
                Start::BF16(start) | Start::Pairs(start, _) => {
                    rows.extend((0..k).map(|p| (*start.offset(at(p))).to_f32()));
                }
            }
        }
    }
    rows.as_ptr()
}

/// # Safety
/// As [`product`]; the processor has AVX2, FMA and F16C.
unsafe fn compute<T: Copy + Into<f32>>((m, n): (usize, usize), operands: &Operands<T>)
where
    V8: Widen<T>,
    V16: Widen<T>,
{
    let kernel = kernel::<T>(m, operands.b.col != 1);
    let pieces = if alone((m, n, operands.k)) { 1 } else { threads() };
    each_piece((m, n), (1, pieces), |_, columns| {
        // SAFETY: the columns are the right matrix's and the result's, where each is written by one thread.
        unsafe { kernel(operands, columns) };
    });
}

/// For rows of so many, and a right matrix whose columns are contiguous, or its rows.
fn kernel<T: Copy + Into<f32>>(m: usize, by_columns: bool) -> Columns<T>
where
    V8: Widen<T>,
    V16: Widen<T>,
{
    macro_rules! of {
        ($($m:literal)*) => {
            match (m, by_columns, crate::device::cpu::has_avx512()) {
                $(($m, true, true) => dots_16::<T, $m>,
                ($m, true, false) => dots_8::<T, $m>,
                ($m, false, true) => rows_16::<T, $m>,
                ($m, false, false) => rows_8::<T, $m>,)*
                _ => unreachable!("at most FEW rows"),
            }
        };
    }
    of!(1 2 3 4 5 6 7)
}

macro_rules! kernels {
    ($feature:literal, $vector:ident: $dots:ident $rows:ident) => {
        /// # Safety
        /// As [`dots`].
        #[target_feature(enable = $feature)]
        unsafe fn $dots<T: Copy + Into<f32>, const M: usize>(x: &Operands<T>, columns: Range<usize>)
        where
            $vector: Widen<T>,
        {
            // SAFETY: the caller's promise.
            unsafe { dots::<$vector, T, M>(x, columns) }
        }

        /// # Safety
        /// As [`rows`].
        #[target_feature(enable = $feature)]
        unsafe fn $rows<T: Copy + Into<f32>, const M: usize>(x: &Operands<T>, columns: Range<usize>)
        where
            $vector: Widen<T>,
        {
            // SAFETY: the caller's promise.
            unsafe { rows::<$vector, T, M>(x, columns) }
        }
    };
}

kernels!("avx2,fma,f16c", V8: dots_8 rows_8);
kernels!("avx512f", V16: dots_16 rows_16);

/// A right matrix whose columns are contiguous: dot products, of four columns at a time.
///
/// # Safety
/// The columns are the right matrix's, whose elements are there to be read like those of `M` rows of the left one, and nobody else uses
/// the result's. The processor has the vector's instructions.
#[inline(always)]
unsafe fn dots<V: Widen<T>, T: Copy + Into<f32>, const M: usize>(x: &Operands<T>, columns: Range<usize>) {
    let mut j = columns.start;
    while j < columns.end {
        // SAFETY: the caller's promise.
        unsafe {
            j += match columns.end - j {
                0..4 => some_dots::<V, T, M, 1>(x, j),
                _ => some_dots::<V, T, M, 4>(x, j),
            };
        }
    }
}

/// `N` columns from `j` on; gives how many they are.
///
/// # Safety
/// As [`dots`].
#[inline(always)]
unsafe fn some_dots<V: Widen<T>, T: Copy + Into<f32>, const M: usize, const N: usize>(
    x: &Operands<T>,
    j: usize,
) -> usize {
    let whole = x.k / V::LANES * V::LANES;
    // SAFETY: the caller's promise.
    unsafe {
        let column = |c: usize| x.b.start.offset((j + c) as isize * x.b.col);
        let mut sums = [[V::zero(); M]; N];
        for p in (0..whole).step_by(V::LANES) {
            let rows: [V; M] = std::array::from_fn(|i| V::load(x.left(i, p)));
            for (c, sums) in sums.iter_mut().enumerate() {
                let y = V::widen(column(c).add(p));
                for (sum, row) in sums.iter_mut().zip(rows) {
                    *sum = sum.add_product(row, y);
                }
            }
        }
        for (c, sums) in sums.into_iter().enumerate() {
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

/// A right matrix whose rows are contiguous: their multiples are added up, a stretch of columns at a time.
///
/// # Safety
/// As [`dots`].
#[inline(always)]
unsafe fn rows<V: Widen<T>, T: Copy + Into<f32>, const M: usize>(x: &Operands<T>, columns: Range<usize>) {
    let stretch = SUMS / M / V::LANES * V::LANES;
    // Not zeros: a small product needs few of them.
    let mut sums = [const { MaybeUninit::<f32>::uninit() }; SUMS];
    for first in columns.clone().step_by(stretch) {
        let n = stretch.min(columns.end - first);
        let sums = &mut sums[..M * n];
        sums.fill(MaybeUninit::new(0.0));
        // SAFETY: they were written; for the rest the caller's promise.
        unsafe {
            let sums = &mut *(&raw mut *sums as *mut [f32]);
            let whole = x.k / STEPS * STEPS;
            (0..whole).step_by(STEPS).for_each(|p| some_rows::<V, T, M, STEPS>(x, p, (first, n), sums.as_mut_ptr()));
            (whole..x.k).for_each(|p| some_rows::<V, T, M, 1>(x, p, (first, n), sums.as_mut_ptr()));
            for (i, sums) in sums.chunks_exact(n).enumerate() {
                sums.iter().enumerate().for_each(|(j, sum)| x.write(i, first + j, *sum));
            }
        }
    }
}

/// Adds `S` rows from `p` on, `n` columns from `first` on, to `n` sums for each row of the left matrix.
///
/// # Safety
/// As [`dots`]; the sums are there, and nobody else uses them.
#[inline(always)]
unsafe fn some_rows<V: Widen<T>, T: Copy + Into<f32>, const M: usize, const S: usize>(
    x: &Operands<T>,
    p: usize,
    (first, n): (usize, usize),
    sums: *mut f32,
) {
    let whole = n / V::LANES * V::LANES;
    // SAFETY: the caller's promise.
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

    /// What a processor with long vectors would not use.
    #[test]
    fn vectors_of_either_length() {
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
            let run = |kernel: Columns<T>, row: isize, col: isize| {
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

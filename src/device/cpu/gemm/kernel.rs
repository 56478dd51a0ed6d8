//! The inner loop of f32 and bf16 products: a tile of the result, kept in vector registers while the sums are made.
//!
//! A tile is [`Kernels::rows`] rows and two vectors of columns, as much as the registers hold beside the operands, so that
//! the multipliers never wait for loads. What is left over at the edges has kernels with fewer rows or one vector.
//!
//! Where the processor multiplies pairs of bf16, twice as many a cycle as f32, a panel of these has a pair of neighbours along k
//! where others have an f32, and all else is the same.

use std::arch::x86_64::*;
use std::mem::transmute;
use std::sync::OnceLock;

use super::{Finish, amx};

/// A tile's operands and where it goes.
pub(super) struct Tile {
    /// Steps: how many products, or pairs of them, every sum has; so many times, of the left and the right matrix `a_jump` and `b_jump`
    /// bytes behind the last step of the time before.
    pub(super) k: usize,
    pub(super) times: usize,
    pub(super) a_jump: isize,
    pub(super) b_jump: isize,
    /// A panel: an element of each row, step after step. Or, [direct](Kernels::tile), rows `a_row` bytes apart in memory.
    pub(super) a: *const f32,
    pub(super) a_row: isize,
    /// The vectors of a step, and how many bytes further those of the next are: a panel, or in place.
    pub(super) b: *const f32,
    pub(super) b_step: isize,
    /// Where the first element goes, and how far rows and columns are apart there.
    pub(super) out: *mut f32,
    pub(super) row: isize,
    pub(super) col: isize,
    /// Columns that the result has, at most those of the vectors.
    pub(super) columns: usize,
    /// Whether the sums are added to what the result holds.
    pub(super) accumulate: bool,
    /// Of the tile's first row or element.
    pub(super) finish: Finish<*const f32>,
}

/// `y`, or 0 where `x` is at most 0.
fn where_above(y: f32, x: f32) -> f32 {
    if x <= 0.0 { 0.0 } else { y }
}

/// Computes a tile.
///
/// # Safety
/// The panels, of the kernel's rows and vectors, and what there is of a tile's size to finish it with are in memory that nobody writes
/// to; the rows and columns of the result are in memory that nobody else uses, one apart in a row unless nothing finishes it. The processor has the kernel's instructions.
pub(super) type Function = unsafe fn(&Tile);

/// The kernels for one kind of processor.
pub(super) struct Kernels {
    /// Most rows of a tile.
    pub(super) rows: usize,
    /// Elements of a vector.
    pub(super) lanes: usize,
    /// Whether a step is a pair of bf16.
    pub(super) pairs: bool,
    /// A number of steps that all tiles have a multiple of; with more than one, panels of the left matrix have row after row.
    pub(super) step: usize,
    tiles: &'static [[[Function; 2]; 2]],
}

impl Kernels {
    /// The faster ones for bf16 of as many steps, where they are of pairs.
    pub(super) fn of_pairs(k: usize) -> Option<&'static Kernels> {
        Kernels::amx(k).or_else(|| Kernels::get(true).filter(|_| !amx::is_available()))
    }

    /// Those of AMX, for `k` steps of bf16, where the processor has it.
    pub(super) fn amx(k: usize) -> Option<&'static Kernels> {
        (k > 0 && k.is_multiple_of(2 * amx::STEP) && amx::is_available()).then_some(&AMX)
    }

    /// Those of f32 and of pairs for this processor, where it has any. Where it has AMX its pairs are slower than f32.
    pub(super) fn get(pairs: bool) -> Option<&'static Kernels> {
        static KERNELS: OnceLock<[Option<&'static Kernels>; 2]> = OnceLock::new();
        let kernels = KERNELS.get_or_init(|| {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c");
            let avx512 = avx2 && crate::device::cpu::has_avx512();
            let fma = avx2 && is_x86_feature_detected!("fma");
            let single = if avx512 { Some(&AVX512) } else { fma.then_some(&AVX2) };
            [single, (avx512 && is_x86_feature_detected!("avx512bf16")).then_some(&PAIRS)]
        });
        kernels[usize::from(pairs)]
    }

    /// The kernel of tiles of `rows` rows and `vectors` vectors, 1 or 2; `direct` where rows of a are read in place.
    pub(super) fn tile(&self, rows: usize, vectors: usize, direct: bool) -> Function {
        self.tiles[rows - 1][usize::from(direct)][vectors - 1]
    }
}

/// A vector register's worth of f32, or of pairs of bf16 where it is loaded for [`add_product`](Vector::add_product).
///
/// # Safety
/// Of all methods: the processor has the instructions, and there are [`LANES`](Vector::LANES) elements at the pointer, one
/// for `splat`.
pub(super) trait Vector: Copy {
    const LANES: usize;
    unsafe fn zero() -> Self;
    unsafe fn load(at: *const f32) -> Self;
    unsafe fn splat(at: *const f32) -> Self;
    unsafe fn store(self, at: *mut f32);
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    /// Itself, or 0 where `x` is at most 0.
    unsafe fn where_above(self, x: Self) -> Self;
    /// `self + x * y`; of pairs, plus both products.
    unsafe fn add_product(self, x: Self, y: Self) -> Self;
}

macro_rules! vector {
    ($name:ident($type:ty), $lanes:literal: $zero:ident $load:ident $set1:ident $store:ident $add:ident $mul:ident $where_above:ident $add_product:ident) => {
        #[derive(Clone, Copy)]
        pub(super) struct $name(pub(super) $type);

        impl Vector for $name {
            const LANES: usize = $lanes;
            #[inline(always)]
            unsafe fn zero() -> Self {
                // SAFETY: the caller's promise.
                $name(unsafe { $zero() })
            }
            #[inline(always)]
            unsafe fn load(at: *const f32) -> Self {
                // SAFETY: the caller's promise.
                $name(unsafe { $load(at) })
            }
            #[inline(always)]
            unsafe fn splat(at: *const f32) -> Self {
                // SAFETY: the caller's promise. Pairs that are read in place may lie anywhere.
                $name(unsafe { $set1(at.read_unaligned()) })
            }
            #[inline(always)]
            unsafe fn store(self, at: *mut f32) {
                // SAFETY: the caller's promise.
                unsafe { $store(at, self.0) }
            }
            #[inline(always)]
            unsafe fn add(self, other: Self) -> Self {
                // SAFETY: the caller's promise.
                $name(unsafe { $add(self.0, other.0) })
            }
            #[inline(always)]
            unsafe fn mul(self, other: Self) -> Self {
                // SAFETY: the caller's promise.
                $name(unsafe { $mul(self.0, other.0) })
            }
            #[inline(always)]
            unsafe fn where_above(self, x: Self) -> Self {
                // SAFETY: the caller's promise.
                $name(unsafe { $where_above(self.0, x.0) })
            }
            #[inline(always)]
            unsafe fn add_product(self, x: Self, y: Self) -> Self {
                // SAFETY: the caller's promise.
                $name(unsafe { $add_product(x.0, y.0, self.0) })
            }
        }
    };
}

/// # Safety
/// The processor has AVX512-BF16.
#[inline(always)]
unsafe fn add_pairs(x: __m512, y: __m512, sum: __m512) -> __m512 {
    // SAFETY: the caller's promise; both types are 64 bytes, whatever is in them.
    unsafe { _mm512_dpbf16_ps(sum, transmute::<__m512, __m512bh>(x), transmute::<__m512, __m512bh>(y)) }
}

/// # Safety
/// The processor has AVX.
#[inline(always)]
unsafe fn above_8(y: __m256, x: __m256) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe { _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LE_OQ>(x, _mm256_setzero_ps()), y) }
}

/// # Safety
/// The processor has AVX-512.
#[inline(always)]
unsafe fn above_16(y: __m512, x: __m512) -> __m512 {
    // SAFETY: the caller's promise.
    unsafe { _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NLE_UQ>(x, _mm512_setzero_ps()), y) }
}

vector!(V8(__m256), 8: _mm256_setzero_ps _mm256_loadu_ps _mm256_set1_ps _mm256_storeu_ps _mm256_add_ps _mm256_mul_ps above_8 _mm256_fmadd_ps);
vector!(V16(__m512), 16: _mm512_setzero_ps _mm512_loadu_ps _mm512_set1_ps _mm512_storeu_ps _mm512_add_ps _mm512_mul_ps above_16 _mm512_fmadd_ps);
vector!(V16Pairs(__m512), 16: _mm512_setzero_ps _mm512_loadu_ps _mm512_set1_ps _mm512_storeu_ps _mm512_add_ps _mm512_mul_ps above_16 add_pairs);

/// The widest tile's columns.
const WIDEST: usize = 32;

/// Steps of the right matrix that are fetched ahead where the left one is laid out: rows that are read in place are pages apart, which
/// the processor does not foresee. Beside rows of the left one in place it gained nothing.
const AHEAD: isize = 32;

/// Steps after which a tile's sums are added to its totals. One f32 sum of all steps has an error that grows with the root of their number;
/// at 128 steps the error is at most that of PyTorch's products, and the additions are 1 of 128.
const SUM_STEPS: usize = 128;

/// `R` rows and `N` vectors. Only ever inlined into functions that are compiled for V.
///
/// # Safety
/// As [`Function`].
#[inline(always)]
unsafe fn tile<V: Vector, const R: usize, const N: usize, const DIRECT: bool>(t: &Tile) {
    const ELEMENT: isize = size_of::<f32>() as isize;
    let (row, step) = if DIRECT { (t.a_row, 1) } else { (ELEMENT, R) };
    // SAFETY: the caller's promise covers every element that is read and written below.
    unsafe {
        let (mut sums, mut totals, mut steps) = ([[V::zero(); N]; R], None, 0);
        let (mut a, mut b, ahead) = (t.a, t.b, AHEAD * t.b_step);
        for _ in 0..t.times {
            let mut left = t.k;
            while left > 0 {
                if steps == SUM_STEPS {
                    totals = Some(add_sums(totals, sums));
                    (sums, steps) = ([[V::zero(); N]; R], 0);
                }
                let most = left.min(SUM_STEPS - steps);
                for _ in 0..most {
                    let mut columns = [V::zero(); N];
                    for (j, column) in columns.iter_mut().enumerate() {
                        *column = V::load(b.add(j * V::LANES));
                        if !DIRECT {
                            _mm_prefetch::<_MM_HINT_T0>(
                                b.wrapping_byte_offset(ahead).wrapping_add(j * V::LANES).cast(),
                            );
                        }
                    }
                    for (i, sums) in sums.iter_mut().enumerate() {
                        let x = V::splat(a.byte_offset(i as isize * row));
                        for (sum, &y) in sums.iter_mut().zip(&columns) {
                            *sum = sum.add_product(x, y);
                        }
                    }
                    a = a.add(step);
                    b = b.wrapping_byte_offset(t.b_step); // after the last one it is nowhere
                }
                (left, steps) = (left - most, steps + most);
            }
            a = a.wrapping_byte_offset(t.a_jump);
            b = b.wrapping_byte_offset(t.b_jump);
        }
        let sums = add_sums(totals, sums);
        for (i, sums) in sums.into_iter().enumerate() {
            write(t, i, sums);
        }
    }
}

/// Returns a tile's totals with its sums since the last addition.
///
/// # Safety
/// The processor has the instructions of V.
#[inline(always)]
unsafe fn add_sums<V: Vector, const R: usize, const N: usize>(
    totals: Option<[[V; N]; R]>,
    mut sums: [[V; N]; R],
) -> [[V; N]; R] {
    let Some(totals) = totals else { return sums };
    for (sums, totals) in sums.iter_mut().zip(&totals) {
        for (sum, total) in sums.iter_mut().zip(totals) {
            // SAFETY: the caller's promise.
            *sum = unsafe { total.add(*sum) };
        }
    }
    sums
}

/// Writes the sums of row `i` of a tile, finished.
///
/// # Safety
/// As [`Function`].
#[inline(always)]
pub(super) unsafe fn write<V: Vector, const N: usize>(t: &Tile, i: usize, sums: [V; N]) {
    // SAFETY: the caller's promise covers every element that is read and written below; the buffer has `WIDEST` elements,
    // no fewer than N vectors.
    unsafe {
        let out = t.out.offset(i as isize * t.row);
        if t.col == 1 && t.columns == N * V::LANES {
            for (j, sum) in sums.into_iter().enumerate() {
                let out = out.add(j * V::LANES);
                let sum = if t.accumulate { sum.add(V::load(out)) } else { sum };
                let sum = match t.finish {
                    Finish::Nothing => sum,
                    Finish::Add(row) => sum.add(V::load(row.add(j * V::LANES))),
                    Finish::AddRelu(row) => {
                        let sum = sum.add(V::load(row.add(j * V::LANES)));
                        sum.where_above(sum)
                    }
                    Finish::ReluGrad(x) => {
                        let x = V::load(x.offset(i as isize * t.row).add(j * V::LANES));
                        sum.mul(V::splat(&1.0).where_above(x))
                    }
                };
                sum.store(out);
            }
            return;
        }
        let mut buffer = [0f32; WIDEST];
        for (j, sum) in sums.into_iter().enumerate() {
            sum.store(buffer.as_mut_ptr().add(j * V::LANES));
        }
        for (j, sum) in buffer[..t.columns].iter().enumerate() {
            let out = out.offset(j as isize * t.col);
            let sum = if t.accumulate { *out + sum } else { *sum };
            *out = match t.finish {
                Finish::Nothing => sum,
                Finish::Add(row) => sum + *row.add(j),
                Finish::AddRelu(row) => {
                    let sum = sum + *row.add(j);
                    where_above(sum, sum)
                }
                Finish::ReluGrad(x) => sum * where_above(1.0, *x.offset(i as isize * t.row).add(j)),
            };
        }
    }
}

macro_rules! kernels {
    ($name:ident, $feature:literal, $type:ty, $pairs:literal: $($rows:literal)*) => {
        static $name: Kernels = {
            /// # Safety
            /// As [`Function`].
            #[target_feature(enable = $feature)]
            unsafe fn of<const R: usize, const N: usize, const DIRECT: bool>(t: &Tile) {
                // SAFETY: the caller's promise.
                unsafe { tile::<$type, R, N, DIRECT>(t) }
            }
            Kernels {
                rows: [$($rows),*].len(),
                lanes: <$type>::LANES,
                pairs: $pairs,
                step: 1,
                tiles: &[$([[of::<$rows, 1, false>, of::<$rows, 2, false>], [of::<$rows, 1, true>, of::<$rows, 2, true>]]),*],
            }
        };
    };
}

// 12 of 16 registers, and 24 of 32, are sums.
kernels!(AVX2, "avx2,fma", V8, false: 1 2 3 4 5 6);
kernels!(AVX512, "avx512f", V16, false: 1 2 3 4 5 6 7 8 9 10 11 12);
kernels!(PAIRS, "avx512f,avx512bf16", V16Pairs, true: 1 2 3 4 5 6 7 8 9 10 11 12);

macro_rules! amx_kernels {
    ($($rows:literal)*) => {
        static AMX: Kernels = Kernels {
            rows: [$($rows),*].len(),
            lanes: V16::LANES,
            pairs: true,
            step: amx::STEP,
            tiles: &[$([[amx::tile::<$rows, 1>, amx::tile::<$rows, 2>], [amx::tile::<$rows, 1>, amx::tile::<$rows, 2>]]),*],
        };
    };
}

amx_kernels!(1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32);

//! The inner loop of f32 and bf16 products: a tile of the result, whose sums stay in vector registers.
//!
//! A tile is [`Kernels::rows`] rows and two vectors of columns, as many sums as the registers hold beside the operands, so that the
//! multipliers never wait for loads. Tiles at the edges have kernels with fewer rows or one vector.
//!
//! Some processors multiply pairs of bf16, twice as many products per cycle as with f32. For those kernels, each element of a panel is a
//! pair of bf16 elements that are adjacent along k; otherwise the panels have the same layout as for f32.

use std::arch::x86_64::*;
use std::mem::transmute;
use std::sync::OnceLock;

use super::amx;
use super::epilogue::KernelEpilogue;

/// The operands and the destination of a tile.
pub(super) struct Tile {
    /// The number of steps in a repetition: each adds a product, or a pair of products, to every sum.
    pub(super) k: usize,
    /// The number of repetitions of `k` steps.
    pub(super) times: usize,
    /// The distance from the end of a repetition's steps to the next repetition in the left matrix, in bytes.
    pub(super) a_jump: isize,
    /// The distance from the end of a repetition's steps to the next repetition in the right matrix, in bytes.
    pub(super) b_jump: isize,
    /// The left operand: a panel, stored step by step with one element of each row. For [direct](Kernels::tile) kernels: rows `a_row`
    /// bytes apart.
    pub(super) a: *const f32,
    /// The stride between rows in bytes, for direct kernels.
    pub(super) a_row: isize,
    /// The right operand: the vectors of the first step, in a panel or in place.
    pub(super) b: *const f32,
    /// The stride between steps of the right operand in bytes.
    pub(super) b_step: isize,
    /// The first element of the tile in the result.
    pub(super) out: *mut f32,
    /// The stride between rows of the result, in elements.
    pub(super) row: isize,
    /// The stride between columns of the result, in elements.
    pub(super) col: isize,
    /// The number of columns to write, at most the number of lanes of the tile's vectors.
    pub(super) columns: usize,
    /// True if the sums are added to the result's elements.
    pub(super) accumulate: bool,
    /// The epilogue, with its operand at the tile's first column or element.
    pub(super) finish: KernelEpilogue<*const f32>,
}

/// Returns `y`, or 0 if `x` is at most 0.
fn keep_where_positive(y: f32, x: f32) -> f32 {
    if x <= 0.0 { 0.0 } else { y }
}

/// A kernel that computes a tile.
///
/// # Safety
/// The panels, for the kernel's rows and vectors, and the epilogue's operand, for the tile's size, are in memory to which no code
/// writes. The tile's elements of the result are in memory that no other code accesses; with an epilogue, columns are one element
/// apart. The processor has the kernel's instructions.
pub(super) type TileKernel = unsafe fn(&Tile);

/// The kernels for one kind of processor.
pub(super) struct Kernels {
    /// The maximum number of rows of a tile.
    pub(super) rows: usize,
    /// The number of elements of a vector.
    pub(super) lanes: usize,
    /// True if a step is a pair of bf16.
    pub(super) pairs: bool,
    /// The number of steps of a tile is a multiple of this. If it is above 1, panels of the left matrix are stored row by row instead of
    /// step by step.
    pub(super) step: usize,
    /// The kernels, indexed by rows - 1, by panel (0) or direct rows (1), and by vectors - 1.
    tiles: &'static [[[TileKernel; 2]; 2]],
}

/// The kernels that this processor has: of f32, and of pairs of bf16 without and with AMX.
struct AvailableKernels {
    single: Option<&'static Kernels>,
    pair: Option<&'static Kernels>,
    /// Whether there are kernels with AMX. Asked when a product needs them, because the operating system has to permit AMX.
    amx: OnceLock<bool>,
}

impl Kernels {
    /// Returns kernels of pairs for products with `k` elements along k, if they are faster than the f32 kernels, else `None`.
    pub(super) fn for_pairs(k: usize) -> Option<&'static Kernels> {
        Kernels::amx(k).or_else(|| Kernels::get(true).filter(|_| !Kernels::has_amx()))
    }

    /// Returns the AMX kernels for products of bf16 with `k` elements along k, if the processor has AMX and `k` is a suitable multiple.
    pub(super) fn amx(k: usize) -> Option<&'static Kernels> {
        (k > 0 && k.is_multiple_of(2 * amx::PAIRS_PER_ROW) && Kernels::has_amx()).then_some(AMX)
    }

    /// Returns the kernels for this processor, of bf16 pairs if `pairs` and otherwise of f32, or `None`. With AMX, the kernels of pairs
    /// returned here are slower than f32.
    pub(super) fn get(pairs: bool) -> Option<&'static Kernels> {
        let available = Kernels::available();
        if pairs { available.pair } else { available.single }
    }

    fn has_amx() -> bool {
        *Kernels::available().amx.get_or_init(amx::is_available)
    }

    fn available() -> &'static AvailableKernels {
        static AVAILABLE: OnceLock<AvailableKernels> = OnceLock::new();
        AVAILABLE.get_or_init(|| {
            let avx2 = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("f16c");
            let avx512 = avx2 && crate::device::cpu::has_avx512();
            let fma = avx2 && is_x86_feature_detected!("fma");
            AvailableKernels {
                single: if avx512 { Some(AVX512) } else { fma.then_some(AVX2) },
                pair: (avx512 && is_x86_feature_detected!("avx512bf16")).then_some(PAIRS),
                amx: OnceLock::new(),
            }
        })
    }

    /// Returns the kernel for tiles of `rows` rows and `vectors` (1 or 2) vectors. `direct` kernels read rows of the left matrix in
    /// place.
    pub(super) fn tile(&self, rows: usize, vectors: usize, direct: bool) -> TileKernel {
        self.tiles[rows - 1][usize::from(direct)][vectors - 1]
    }
}

/// A vector register of f32, or of pairs of bf16 as operands of [`add_product`](Vector::add_product).
///
/// # Safety
/// For all methods: the processor has the instructions, and there are [`LANES`](Vector::LANES) elements at the pointer, or one
/// element for `splat`.
pub(super) trait Vector: Copy {
    const LANES: usize;
    unsafe fn zero() -> Self;
    unsafe fn load(at: *const f32) -> Self;
    /// Loads one element into all lanes.
    unsafe fn splat(at: *const f32) -> Self;
    unsafe fn store(self, at: *mut f32);
    unsafe fn add(self, other: Self) -> Self;
    unsafe fn mul(self, other: Self) -> Self;
    /// Returns `self`, or 0 in the lanes where `x` is at most 0.
    unsafe fn keep_where_positive(self, x: Self) -> Self;
    /// Returns `self + x * y`; for pairs, returns `self` plus the products of both elements of the pair.
    unsafe fn add_product(self, x: Self, y: Self) -> Self;
}

macro_rules! vector {
    ($name:ident($type:ty), $lanes:literal: $zero:ident $load:ident $set1:ident $store:ident $add:ident $mul:ident;
     |$a:ident, $b:ident| $keep_where_positive:expr, |$x:ident, $y:ident, $sum:ident| $add_product:expr) => {
        #[derive(Clone, Copy)]
        pub(super) struct $name(pub(super) $type);

        impl Vector for $name {
            const LANES: usize = $lanes;
            unsafe_methods! {
                zero() -> Self = $name($zero());
                load(at: *const f32) -> Self = $name($load(at));
                // Pairs that are read in place need not be aligned.
                splat(at: *const f32) -> Self = $name($set1(at.read_unaligned()));
                store(self, at: *mut f32) -> () = $store(at, self.0);
                add(self, other: Self) -> Self = $name($add(self.0, other.0));
                mul(self, other: Self) -> Self = $name($mul(self.0, other.0));
                keep_where_positive(self, x: Self) -> Self = {
                    let ($a, $b) = (self.0, x.0);
                    $name($keep_where_positive)
                };
                add_product(self, x: Self, y: Self) -> Self = {
                    let ($x, $y, $sum) = (x.0, y.0, self.0);
                    $name($add_product)
                };
            }
        }
    };
}

vector!(V8(__m256), 8: _mm256_setzero_ps _mm256_loadu_ps _mm256_set1_ps _mm256_storeu_ps _mm256_add_ps _mm256_mul_ps;
    |y, x| _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LE_OQ>(x, _mm256_setzero_ps()), y), |x, y, sum| _mm256_fmadd_ps(x, y, sum));
vector!(V16(__m512), 16: _mm512_setzero_ps _mm512_loadu_ps _mm512_set1_ps _mm512_storeu_ps _mm512_add_ps _mm512_mul_ps;
    |y, x| _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NLE_UQ>(x, _mm512_setzero_ps()), y), |x, y, sum| _mm512_fmadd_ps(x, y, sum));
// Pairs have another type of the same 64 bytes, for which any bits are valid.
vector!(V16Pairs(__m512), 16: _mm512_setzero_ps _mm512_loadu_ps _mm512_set1_ps _mm512_storeu_ps _mm512_add_ps _mm512_mul_ps;
    |y, x| _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NLE_UQ>(x, _mm512_setzero_ps()), y),
    |x, y, sum| _mm512_dpbf16_ps(sum, transmute::<__m512, __m512bh>(x), transmute::<__m512, __m512bh>(y)));

/// The number of columns of the widest tile.
const MAX_TILE_COLUMNS: usize = 32;

/// The prefetch distance in the right matrix, in steps, if the left matrix is packed into panels. Rows of the right matrix that are read
/// in place are pages apart, which the hardware does not prefetch. If rows of the left matrix are read in place as well, prefetching was
/// not faster.
const PREFETCH_STEPS: isize = 32;

/// The number of steps after which the sums of a tile are added to its totals. The error of one long f32 sum grows with the square root
/// of its number of steps. At 128 steps it is at most the error of PyTorch's products.
const SUM_STEPS: usize = 128;

/// Computes a tile of `R` rows and `N` vectors. Must be inlined into functions compiled for V's instructions.
///
/// # Safety
/// The requirements of [`TileKernel`].
#[inline(always)]
unsafe fn compute_tile<V: Vector, const R: usize, const N: usize, const DIRECT: bool>(t: &Tile) {
    const ELEMENT: isize = size_of::<f32>() as isize;
    let (row, step) = if DIRECT { (t.a_row, 1) } else { (ELEMENT, R) };
    // SAFETY: the caller's promise covers every element that is read and written below.
    unsafe {
        let (mut sums, mut totals, mut steps) = ([[V::zero(); N]; R], None, 0);
        let (mut a, mut b, ahead) = (t.a, t.b, PREFETCH_STEPS * t.b_step);
        for _ in 0..t.times {
            let mut left = t.k;
            while left > 0 {
                if steps == SUM_STEPS {
                    add_totals(&mut sums, &totals);
                    totals = Some(sums);
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
                    b = b.wrapping_byte_offset(t.b_step); // outside the matrix after the last step
                }
                (left, steps) = (left - most, steps + most);
            }
            a = a.wrapping_byte_offset(t.a_jump);
            b = b.wrapping_byte_offset(t.b_jump);
        }
        add_totals(&mut sums, &totals);
        let plain = !t.accumulate && matches!(t.finish, KernelEpilogue::Nothing);
        if plain && t.col == 1 && t.columns == N * V::LANES {
            // Unlike `write_row`, stores the sums directly from registers.
            for (i, sums) in sums.iter().enumerate() {
                for (j, sum) in sums.iter().enumerate() {
                    sum.store(t.out.offset(i as isize * t.row).add(j * V::LANES));
                }
            }
            return;
        }
        for (i, sums) in sums.into_iter().enumerate() {
            write_row(t, i, sums);
        }
    }
}

/// Adds the totals of a tile, if there are any, to the sums since the last addition. Changes the sums in place, so that they stay in
/// registers until they are written.
///
/// # Safety
/// The processor has the instructions of V.
#[inline(always)]
unsafe fn add_totals<V: Vector, const R: usize, const N: usize>(sums: &mut [[V; N]; R], totals: &Option<[[V; N]; R]>) {
    let Some(totals) = totals else { return };
    for (sums, totals) in sums.iter_mut().zip(totals) {
        for (sum, &total) in sums.iter_mut().zip(totals) {
            // SAFETY: the caller guarantees the requirements of this function.
            *sum = unsafe { total.add(*sum) };
        }
    }
}

/// Applies the epilogue to the sums of row `i` of a tile, and writes them.
///
/// # Safety
/// The requirements of [`TileKernel`].
#[inline(always)]
pub(super) unsafe fn write_row<V: Vector, const N: usize>(t: &Tile, i: usize, sums: [V; N]) {
    // SAFETY: the caller's promise covers every element that is read and written below; the buffer has `MAX_TILE_COLUMNS` elements,
    // at least N vectors.
    unsafe {
        let out = t.out.offset(i as isize * t.row);
        if t.col == 1 && t.columns == N * V::LANES {
            for (j, sum) in sums.into_iter().enumerate() {
                let out = out.add(j * V::LANES);
                let sum = if t.accumulate { sum.add(V::load(out)) } else { sum };
                let sum = match t.finish {
                    KernelEpilogue::Nothing => sum,
                    KernelEpilogue::Add(row) => sum.add(V::load(row.add(j * V::LANES))),
                    KernelEpilogue::AddRelu(row) => {
                        let sum = sum.add(V::load(row.add(j * V::LANES)));
                        sum.keep_where_positive(sum)
                    }
                    KernelEpilogue::ReluGrad(x) => {
                        let x = V::load(x.offset(i as isize * t.row).add(j * V::LANES));
                        sum.mul(V::splat(&1.0).keep_where_positive(x))
                    }
                };
                sum.store(out);
            }
            return;
        }
        let mut buffer = [0f32; MAX_TILE_COLUMNS];
        for (j, sum) in sums.into_iter().enumerate() {
            sum.store(buffer.as_mut_ptr().add(j * V::LANES));
        }
        for (j, sum) in buffer[..t.columns].iter().enumerate() {
            let out = out.offset(j as isize * t.col);
            let sum = if t.accumulate { *out + sum } else { *sum };
            *out = match t.finish {
                KernelEpilogue::Nothing => sum,
                KernelEpilogue::Add(row) => sum + *row.add(j),
                KernelEpilogue::AddRelu(row) => {
                    let sum = sum + *row.add(j);
                    keep_where_positive(sum, sum)
                }
                KernelEpilogue::ReluGrad(x) => sum * keep_where_positive(1.0, *x.offset(i as isize * t.row).add(j)),
            };
        }
    }
}

macro_rules! kernels {
    ($name:ident, $feature:literal, $type:ty, $pairs:literal: $($rows:literal)*) => {
        const $name: &Kernels = {
            /// # Safety
            /// The requirements of [`TileKernel`].
            #[target_feature(enable = $feature)]
            unsafe fn kernel<const R: usize, const N: usize, const DIRECT: bool>(t: &Tile) {
                // SAFETY: the caller guarantees the requirements of this function.
                unsafe { compute_tile::<$type, R, N, DIRECT>(t) }
            }
            &Kernels {
                rows: [$($rows),*].len(),
                lanes: <$type>::LANES,
                pairs: $pairs,
                step: 1,
                tiles: &[$([[kernel::<$rows, 1, false>, kernel::<$rows, 2, false>], [kernel::<$rows, 1, true>, kernel::<$rows, 2, true>]]),*],
            }
        };
    };
}

// With R rows, the sums use 2 R registers: at most 12 of 16 (AVX2), and 24 of 32 (AVX-512).
kernels!(AVX2, "avx2,fma", V8, false: 1 2 3 4 5 6);
kernels!(AVX512, "avx512f", V16, false: 1 2 3 4 5 6 7 8 9 10 11 12);
kernels!(PAIRS, "avx512f,avx512bf16", V16Pairs, true: 1 2 3 4 5 6 7 8 9 10 11 12);

macro_rules! amx_kernels {
    ($($rows:literal)*) => {
        const AMX: &Kernels = &Kernels {
            rows: [$($rows),*].len(),
            lanes: V16::LANES,
            pairs: true,
            step: amx::PAIRS_PER_ROW,
            tiles: &[$([[amx::compute_tile::<$rows, 1>, amx::compute_tile::<$rows, 2>], [amx::compute_tile::<$rows, 1>, amx::compute_tile::<$rows, 2>]]),*],
        };
    };
}

amx_kernels!(1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31 32);

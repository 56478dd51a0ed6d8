//! Products of quantised weights and few rows of activations, which read each packed byte once.
//!
//! Activations are rounded to 16 bits in blocks of 32, so that 32 products are one multiplication of integers, whose sums are exact. The sum of
//! a block is scaled in f32, by the step of the activations and the scale of the weights. The instructions that also add to earlier sums
//! (VNNI) would save nothing, because every block of 32 has its own scale.

#[cfg(target_arch = "x86_64")]
mod lanes;

use std::ops::Range;

use crate::backend::cpu::dispatch::vectorised;
use crate::device::cpu::parallel::{SharedPtr, for_each_index};
use crate::dtype::quant::blocks::{Lanes, Unpack, with_unpacker};

/// The number of elements of a block of activations.
const BLOCK: usize = 32;

/// The number of weight rows that a thread multiplies by at a time.
const PIECE_ROWS: usize = 32;

/// The distance of a prefetched cache line from the block that is unpacked, in bytes. The prefetchers of
/// processors do not recognise two interleaved streams of short rows.
const PREFETCH_DISTANCE: usize = 1024;

/// Rows of activations, as blocks of 32 integers of 16 bits with a step.
pub(crate) struct Activations {
    rows: usize,
    /// The number of blocks of a row.
    blocks: usize,
    /// The integers. If there are several rows, rows of zeros follow up to a multiple of four rows.
    q: Vec<[i16; BLOCK]>,
    /// The step of each block, and the sum of its activations.
    factors: Vec<[f32; 2]>,
    /// The sums of the first and the last 16 activations of each block.
    sums: Vec<[f32; 2]>,
}

impl Activations {
    /// Rounds `rows` rows of a multiple of 32 activations. Returns `None` if an activation is not finite, or if a block has only elements so
    /// small (below 1e-34) that their step has no inverse.
    pub(crate) fn new(rows: usize, x: &[f32]) -> Option<Activations> {
        let (x, rest) = x.as_chunks::<BLOCK>();
        assert!(rest.is_empty() && rows > 0);
        let blocks = x.len() / rows;
        let padded = if rows > 1 { rows.next_multiple_of(4) * blocks } else { blocks };
        let (q, factors, sums) = (vec![[0; BLOCK]; padded], vec![[0.0; 2]; padded], vec![[0.0; 2]; padded]);
        let mut made = Activations { rows, blocks, q, factors, sums };
        round_blocks(x, &mut made).then_some(made)
    }
}

vectorised! {
    /// Rounds blocks of activations; returns false as described at [`Activations::new`].
    fn round_blocks<'a>(_simd: S, x: &'a [[f32; BLOCK]], to: &'a mut Activations) -> bool {
        let mut finite = true;
        for (x, ((q, factors), sums)) in x.iter().zip(to.q.iter_mut().zip(&mut to.factors).zip(&mut to.sums)) {
            // As integers, the absolute values of NaN are greater than infinity.
            let max = f32::from_bits(x.iter().fold(0, |max, x| x.abs().to_bits().max(max)));
            let inverse = if max == 0.0 { 0.0 } else { 32767.0 / max };
            finite &= max.is_finite() && inverse.is_finite();
            // Adding 1.5 * 2^23 rounds to the nearest integer, which is then in the low bits.
            q.iter_mut().zip(x).for_each(|(q, x)| *q = (x * inverse + 12_582_912.0).to_bits() as i16);
            let pairs: [f32; 16] = std::array::from_fn(|i| x[i / 8 * 16 + i % 8] + x[i / 8 * 16 + i % 8 + 8]);
            *sums = [pairs[..8].iter().sum(), pairs[8..].iter().sum()];
            *factors = [max / 32767.0, sums[0] + sums[1]];
        }
        finite
    }
}

/// Packed rows of a weight, which are the right operand of columns of the result from column `first` on.
pub(crate) struct Part<'a, F> {
    pub(crate) format: F,
    pub(crate) row_bytes: usize,
    pub(crate) bytes: &'a [u8],
    pub(crate) first: usize,
}

/// Computes `out = x wᵀ` for the rows of all parts. `out` is a contiguous matrix with `n` columns.
///
/// # Panics
/// If the sizes do not match.
#[allow(clippy::undocumented_unsafe_blocks, reason = "the lint does not see the comment in the macro's argument")]
pub(crate) fn multiply(x: &Activations, parts: &[Part<crate::dtype::quant::QuantFormat>], n: usize, out: &mut [f32]) {
    assert_eq!(out.len(), x.rows * n);
    let mut pieces = Vec::new();
    for part in parts {
        let rows = part.bytes.len() / part.row_bytes;
        assert!(
            part.first + rows <= n && part.format.row_bytes(x.blocks * BLOCK).is_ok_and(|len| len == part.row_bytes)
        );
        pieces.extend((0..rows).step_by(PIECE_ROWS).map(|first| (part, first..rows.min(first + PIECE_ROWS))));
    }
    let out = SharedPtr(out.as_mut_ptr());
    for_each_index(pieces.len(), |i| {
        let (part, rows) = &pieces[i];
        with_unpacker!(part.format, x.blocks * BLOCK, |format| {
            let part = Part { format, row_bytes: part.row_bytes, bytes: part.bytes, first: part.first };
            // SAFETY: the assertions above guarantee that each row has the blocks of `x.blocks * 32` elements, and that the columns are
            // in `out`. Each column belongs to one piece.
            unsafe { multiply_rows(x, &part, rows.clone(), &out, n) };
        });
    });
}

/// Computes the columns of `rows` with the longest vectors of the processor.
///
/// # Safety
/// The part has `rows`, and each of them the blocks of `x.blocks * 32` elements. `out` has `x.rows` rows of `n` columns, and no other code
/// accesses the columns of `rows`.
unsafe fn multiply_rows<U: Unpack>(
    x: &Activations,
    part: &Part<U>,
    rows: Range<usize>,
    out: &SharedPtr<f32>,
    n: usize,
) {
    #[cfg(target_arch = "x86_64")]
    {
        if crate::device::cpu::has_avx512() && is_x86_feature_detected!("avx512bw") {
            // SAFETY: the caller guarantees the requirements, and the processor has the instructions.
            return unsafe { lanes::multiply_512(x, part, rows, out, n) };
        }
        if is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c") {
            // SAFETY: as above.
            return unsafe { lanes::multiply_256(x, part, rows, out, n) };
        }
    }
    // SAFETY: the caller guarantees the requirements.
    unsafe { multiply_in::<[i16; BLOCK], U>(x, part, rows, out, n) };
}

/// Products of 32 integers, added up in f32.
trait Dot: Lanes {
    /// Sums that [`total`](Dot::total) adds up.
    type Sums: Copy;
    fn zero() -> Self::Sums;
    /// Adds the products with the integers of `x`, times `scale[0]` for the first 16 and `scale[1]` for the last 16. Both are equal unless
    /// `halves`.
    fn add_products(self, x: &[i16; BLOCK], scale: [f32; 2], halves: bool, sums: Self::Sums) -> Self::Sums;
    fn total(sums: Self::Sums) -> f32;
    /// Two sums of products with offsets.
    type Offsets: Copy;
    fn no_offsets() -> Self::Offsets;
    /// Returns the first of the products `a[i] * b[i]`, and adds both to the sums.
    fn add_offsets(a: [f32; 2], b: &[f32; 2], sums: Self::Offsets) -> (f32, Self::Offsets);
    fn offsets(sums: Self::Offsets) -> [f32; 2];
}

impl Dot for [i16; BLOCK] {
    type Sums = f32;

    #[inline(always)]
    fn zero() -> f32 {
        0.0
    }

    #[inline(always)]
    fn add_products(self, x: &[i16; BLOCK], scale: [f32; 2], _halves: bool, sums: f32) -> f32 {
        let product = |e: usize| i32::from(self[e]).wrapping_mul(x[e].into());
        let sum = |from: usize| (from..from + 16).map(product).fold(0, i32::wrapping_add) as f32;
        sums + scale[0] * sum(0) + scale[1] * sum(16)
    }

    #[inline(always)]
    fn total(sums: f32) -> f32 {
        sums
    }

    type Offsets = [f32; 2];

    #[inline(always)]
    fn no_offsets() -> [f32; 2] {
        [0.0; 2]
    }

    #[inline(always)]
    fn add_offsets(a: [f32; 2], b: &[f32; 2], sums: [f32; 2]) -> (f32, [f32; 2]) {
        let products = [a[0] * b[0], a[1] * b[1]];
        (products[0], [sums[0] + products[0], sums[1] + products[1]])
    }

    #[inline(always)]
    fn offsets(sums: [f32; 2]) -> [f32; 2] {
        sums
    }
}

/// Begins to load the cache line of an address, which may be any.
#[inline(always)]
fn prefetch(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every processor of this kind has the instruction, which never fails.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(address.cast());
    }
}

/// Computes the columns of `rows` for all activations: four rows of activations, or one, and two rows of the weight at a time.
///
/// # Safety
/// The requirements of [`multiply_rows`]; the processor has the instructions of `V`.
#[inline(always)]
unsafe fn multiply_in<V: Dot, U: Unpack>(
    x: &Activations,
    part: &Part<U>,
    rows: Range<usize>,
    out: &SharedPtr<f32>,
    n: usize,
) {
    for first in (0..x.rows).step_by(4) {
        let mut row = rows.start;
        while row < rows.end {
            // SAFETY: the caller guarantees the requirements. The integers have a multiple of four rows if there are several rows.
            row += unsafe {
                match (x.rows - first, rows.end - row) {
                    (1, 1) => multiply_block::<V, U, 1, 1>(x, first, part, row, out, n),
                    (1, _) => multiply_block::<V, U, 1, 2>(x, first, part, row, out, n),
                    (_, 1) => multiply_block::<V, U, 4, 1>(x, first, part, row, out, n),
                    (_, _) => multiply_block::<V, U, 4, 2>(x, first, part, row, out, n),
                }
            };
        }
    }
}

/// Multiplies `M` rows of activations from row `first` on by `R` rows of the weight from row `row` on; returns `R`.
///
/// # Safety
/// The requirements of [`multiply_in`]; `x` has the rows, with or without those of zeros.
#[inline(always)]
unsafe fn multiply_block<V: Dot, U: Unpack, const M: usize, const R: usize>(
    x: &Activations,
    first: usize,
    part: &Part<U>,
    row: usize,
    out: &SharedPtr<f32>,
    n: usize,
) -> usize {
    let (unpacker, mut sums, mut offsets) = (part.format, [[V::zero(); M]; R], [[V::no_offsets(); M]; R]);
    let (bytes, sub_blocks) = (unpacker.block_bytes(), unpacker.sub_blocks());
    // SAFETY: the caller guarantees that the blocks, the activations and the elements of the result exist.
    unsafe {
        for i in 0..x.blocks / sub_blocks {
            for t in 0..sub_blocks {
                for r in 0..R {
                    let block = part.bytes.as_ptr().add((row + r) * part.row_bytes + i * bytes);
                    prefetch(block.wrapping_add(PREFETCH_DISTANCE));
                    let (q, scales) = unpacker.unpack::<V>(std::slice::from_raw_parts(block, bytes), t);
                    for m in 0..M {
                        let at = (first + m) * x.blocks + i * sub_blocks + t;
                        let factors = x.factors.get_unchecked(at);
                        let mut scale = scales.scale;
                        if U::HAS_OFFSET && !U::HAS_HALVES {
                            let both = [scale[0], scales.offset[0]]; // times the step and the sum of the activations
                            (scale[0], offsets[r][m]) = V::add_offsets(both, factors, offsets[r][m]);
                            scale[1] = scale[0];
                        } else {
                            scale = scale.map(|scale| scale * factors[0]);
                            if U::HAS_OFFSET {
                                (_, offsets[r][m]) =
                                    V::add_offsets(scales.offset, x.sums.get_unchecked(at), offsets[r][m]);
                            }
                        }
                        sums[r][m] = q.add_products(x.q.get_unchecked(at), scale, U::HAS_HALVES, sums[r][m]);
                    }
                }
            }
        }
        for (m, r) in (0..M.min(x.rows - first)).flat_map(|m| (0..R).map(move |r| (m, r))) {
            let [first_offsets, last_offsets] = V::offsets(offsets[r][m]);
            let offsets = match (U::HAS_OFFSET, U::HAS_HALVES) {
                (false, _) => 0.0,
                (true, false) => last_offsets, // the first sum is of steps times scales
                (true, true) => first_offsets + last_offsets,
            };
            *out.0.add((first + m) * n + part.first + row + r) = V::total(sums[r][m]) + offsets;
        }
    }
    R
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::quant::QuantFormat;

    /// A kernel with given vectors.
    type Kernel<U> = unsafe fn(&Activations, &Part<U>, Range<usize>, &SharedPtr<f32>, usize);

    /// All kernels give the same results, in all formats. Without this test, a processor runs only the kernels with its longest vectors.
    #[test]
    #[allow(clippy::undocumented_unsafe_blocks, reason = "as in `multiply`")]
    fn all_vector_lengths_agree() {
        let features = crate::device::cpu::vector_features();
        let has = |names: &[&str]| names.iter().all(|name| features.contains(name));
        for name in [
            "q8_0",
            "q4_0",
            "q4_1",
            "q5_0",
            "q5_1",
            "q2_k",
            "q3_k",
            "q4_k",
            "q5_k",
            "q6_k",
            "g4_64",
            "g4_32_zero",
            "g8_row_min",
        ] {
            let format: QuantFormat = name.parse().unwrap();
            let (k, n) = (512, 5);
            let row_bytes = format.row_bytes(k).unwrap();
            let mut bytes: Vec<u8> = (0..n * row_bytes).map(|i| (i * 7919 % 1009) as u8).collect();
            for block in bytes.chunks_exact_mut(format.block_bytes(k)) {
                for plane in format.planes(k).iter().filter(|plane| plane.bytes <= 4) {
                    block[plane.at..][..plane.bytes].chunks_exact_mut(2).for_each(|half| half[1] = 0x2c);
                    if name.ends_with("zero") {
                        block[plane.at..][3] = 0; // the zero point is an integer, not an f16
                    }
                }
            }
            for rows in [1, 2, 4, 7, 8] {
                let x: Vec<f32> = (0..rows * k).map(|i| ((i * 37) % 1013) as f32 / 1013.0 - 0.4).collect();
                let x = Activations::new(rows, &x).unwrap();
                with_unpacker!(format, k, |unpacker| {
                    let run = |kernel: Kernel<_>| {
                        let part = Part { format: unpacker, row_bytes, bytes: &bytes, first: 1 };
                        let mut out = vec![f32::NAN; rows * (n + 1)];
                        // SAFETY: the sizes match, and the processor has the instructions.
                        unsafe { kernel(&x, &part, 0..n, &SharedPtr(out.as_mut_ptr()), n + 1) };
                        out
                    };
                    let mut kernels: Vec<Kernel<_>> = vec![multiply_in::<[i16; BLOCK], _>];
                    #[cfg(target_arch = "x86_64")]
                    {
                        kernels.extend(has(&["avx2", "fma", "f16c"]).then_some(lanes::multiply_256::<_> as Kernel<_>));
                        kernels.extend(has(&["avx512f", "avx512bw"]).then_some(lanes::multiply_512::<_> as Kernel<_>));
                    }
                    let results: Vec<Vec<f32>> = kernels.into_iter().map(run).collect();
                    let most = results[0].iter().filter(|x| !x.is_nan()).fold(0f32, |most, x| most.max(x.abs()));
                    for other in &results[1..] {
                        for (a, b) in results[0].iter().zip(other) {
                            assert!((a - b).abs() <= 1e-5 * most || a.is_nan() && b.is_nan(), "{name}: {a} {b} {most}");
                        }
                    }
                });
            }
        }
        assert!(Activations::new(1, &[f32::NAN; 32]).is_none() && Activations::new(1, &[f32::INFINITY; 32]).is_none());
    }
}

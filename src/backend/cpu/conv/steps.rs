//! The operands of one multiplication step of the kernels: an f32, or two bf16 packed in 32 bits, from neighbouring channels or
//! neighbouring windows.

use bytemuck::Pod;

use crate::Tensor;
use crate::backend::cpu::convert::load_tile;
use crate::backend::cpu::kernels::gemm::serial::LeftMatrix;
use crate::backend::cpu::vectorised::vectorised;
use crate::device::cpu::parallel;

/// The element type of slabs in the weight gradient, where neighbouring windows form a step: f32, or the bits of bf16.
pub(crate) trait StepElement: Pod {
    /// The number of elements in a step.
    const ELEMENTS_PER_STEP: usize;
    /// Returns a step that has this element; for a pair, the second element is zero.
    fn step(self) -> f32;
    /// Views `data` as rows of a left matrix; rows are `stride` elements apart.
    fn rows(data: &[Self], stride: usize) -> LeftMatrix<'_>;
    /// Fills `to` with elements of a tensor, beginning at element `start` and `stride` elements apart.
    fn load(from: (&Tensor, &[u8]), start: usize, stride: isize, to: &mut [Self]);
}

impl StepElement for f32 {
    const ELEMENTS_PER_STEP: usize = 1;

    fn step(self) -> f32 {
        self
    }

    fn rows(data: &[f32], stride: usize) -> LeftMatrix<'_> {
        LeftMatrix::Rows { data, stride }
    }

    fn load((x, bytes): (&Tensor, &[u8]), start: usize, stride: isize, to: &mut [f32]) {
        load_tile(x.dtype, bytes, start, stride, to);
    }
}

impl StepElement for u16 {
    const ELEMENTS_PER_STEP: usize = 2;

    fn step(self) -> f32 {
        pair(self, 0)
    }

    fn rows(data: &[u16], stride: usize) -> LeftMatrix<'_> {
        LeftMatrix::Halves { data, stride }
    }

    fn load((_, bytes): (&Tensor, &[u8]), start: usize, stride: isize, to: &mut [u16]) {
        let from: &[u16] = bytemuck::cast_slice(bytes);
        to.iter_mut().enumerate().for_each(|(i, to)| *to = from[start.wrapping_add_signed(i as isize * stride)]);
    }
}

/// The number of elements that a job of [`pair_rows`] writes.
const PAIR_JOB_LEN: usize = 1 << 12;

/// Loads pairs: the first elements begin at `start`, the second elements at `next`, both `stride` apart. The second elements are 0 if
/// `next` is `None`.
pub(crate) fn load_pairs(from: &[u16], start: usize, next: Option<usize>, stride: isize, to: &mut [f32]) {
    let n = to.len();
    match (stride, next) {
        (1, Some(next)) => interleave(&from[start..][..n], &from[next..][..n], to),
        (1, None) => pair_with_zeros(&from[start..][..n], to),
        _ => {
            for (i, to) in to.iter_mut().enumerate() {
                let at = |start: usize| from[start.wrapping_add_signed(i as isize * stride)];
                *to = pair(at(start), next.map_or(0, at));
            }
        }
    }
}

#[inline(always)]
fn pair(first: u16, second: u16) -> f32 {
    f32::from_bits(u32::from(first) | u32::from(second) << 16)
}

vectorised! {
    fn interleave<'a>(_simd: S, first: &'a [u16], second: &'a [u16], to: &'a mut [f32]) {
        to.iter_mut().zip(first).zip(second).for_each(|((to, &first), &second)| *to = pair(first, second));
    }
}

vectorised! {
    fn pair_with_zeros<'a>(_simd: S, first: &'a [u16], to: &'a mut [f32]) {
        to.iter_mut().zip(first).for_each(|(to, &first)| *to = pair(first, 0));
    }
}

vectorised! {
    /// Interleaves elements into pairs like [`interleave`], for bf16 that were widened to f32.
    fn interleave_wide<'a>(_simd: S, first: &'a [f32], second: &'a [f32], to: &'a mut [f32]) {
        to.iter_mut().zip(first).zip(second).for_each(|((to, first), second)| {
            *to = f32::from_bits(first.to_bits() >> 16 | second.to_bits());
        });
    }
}

/// Combines each two neighbouring rows into a row of pairs, in groups of `count` rows of `length` bf16 that were widened to f32. In a
/// group with an odd number of rows, the last row is paired with zeros.
pub(crate) fn pair_rows(from: &[f32], (count, length): (usize, usize)) -> Vec<f32> {
    let (zeros, pairs) = (vec![0.0; length], count.div_ceil(2));
    let mut to = vec![0.0; from.len() / (count * length) * pairs * length];
    let rows = PAIR_JOB_LEN.div_ceil(length);
    parallel::for_each_chunk(&mut to, rows * length, |part, to| {
        for (i, to) in to.chunks_exact_mut(length).enumerate() {
            let (group, row) = ((part * rows + i) / pairs, (part * rows + i) % pairs * 2);
            let of = |row: usize| &from[(group * count + row) * length..][..length];
            interleave_wide(of(row), if row + 1 < count { of(row + 1) } else { &zeros }, to);
        }
    });
    to
}

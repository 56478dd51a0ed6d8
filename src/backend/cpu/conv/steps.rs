//! What kernels multiply in a step: an f32, or a pair of bf16 in as many bits, which are neighbouring channels or windows.

use bytemuck::Pod;

use crate::Tensor;
use crate::backend::cpu::convert::load_tile;
use crate::backend::cpu::vectorised::vectorised;
use crate::device::cpu::gemm::alone::Left;
use crate::device::cpu::parallel;

/// Of rows whose steps are neighbouring windows: f32, or the bits of bf16.
pub(crate) trait Element: Pod {
    const OF_STEP: usize;
    /// A step with nothing else in it.
    fn step(self) -> f32;
    fn rows(data: &[Self], stride: usize) -> Left<'_>;
    /// Elements of a tensor from `start` on, each next one `stride` elements on.
    fn load(from: (&Tensor, &[u8]), start: usize, stride: isize, to: &mut [Self]);
}

impl Element for f32 {
    const OF_STEP: usize = 1;

    fn step(self) -> f32 {
        self
    }

    fn rows(data: &[f32], stride: usize) -> Left<'_> {
        Left::Rows { data, stride }
    }

    fn load((x, bytes): (&Tensor, &[u8]), start: usize, stride: isize, to: &mut [f32]) {
        load_tile(x.dtype, bytes, start, stride, to);
    }
}

impl Element for u16 {
    const OF_STEP: usize = 2;

    fn step(self) -> f32 {
        pair(self, 0)
    }

    fn rows(data: &[u16], stride: usize) -> Left<'_> {
        Left::Halves { data, stride }
    }

    fn load((_, bytes): (&Tensor, &[u8]), start: usize, stride: isize, to: &mut [u16]) {
        let from: &[u16] = bytemuck::cast_slice(bytes);
        to.iter_mut().enumerate().for_each(|(i, to)| *to = from[start.wrapping_add_signed(i as isize * stride)]);
    }
}

/// Elements of a weight that are paired at a time.
const PART: usize = 1 << 12;

/// Pairs of the elements from `start` and from `next` on, each next one `stride` elements on; zeros in place of the latter where there
/// are none.
pub(crate) fn load_pairs(from: &[u16], start: usize, next: Option<usize>, stride: isize, to: &mut [f32]) {
    let n = to.len();
    match (stride, next) {
        (1, Some(next)) => interleave(&from[start..][..n], &from[next..][..n], to),
        (1, None) => beside_zeros(&from[start..][..n], to),
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
    fn beside_zeros<'a>(_simd: S, first: &'a [u16], to: &'a mut [f32]) {
        to.iter_mut().zip(first).for_each(|(to, &first)| *to = pair(first, 0));
    }
}

vectorised! {
    /// As [`interleave`], of bf16 that were widened.
    fn interleave_wide<'a>(_simd: S, first: &'a [f32], second: &'a [f32], to: &'a mut [f32]) {
        to.iter_mut().zip(first).zip(second).for_each(|((to, first), second)| {
            *to = f32::from_bits(first.to_bits() >> 16 | second.to_bits());
        });
    }
}

/// Pairs of neighbours of `count` rows of `length` bf16 that were widened, zeros beside the last of an odd number; as often as
/// there are so many rows.
pub(crate) fn paired(from: &[f32], (count, length): (usize, usize)) -> Vec<f32> {
    let (zeros, pairs) = (vec![0.0; length], count.div_ceil(2));
    let mut to = vec![0.0; from.len() / (count * length) * pairs * length];
    let rows = PART.div_ceil(length);
    parallel::for_each_chunk(&mut to, rows * length, |part, to| {
        for (i, to) in to.chunks_exact_mut(length).enumerate() {
            let (group, row) = ((part * rows + i) / pairs, (part * rows + i) % pairs * 2);
            let of = |row: usize| &from[(group * count + row) * length..][..length];
            interleave_wide(of(row), if row + 1 < count { of(row + 1) } else { &zeros }, to);
        }
    });
    to
}

//! Transposition by vectors: square blocks whose side is the number of elements in a vector.

use bytemuck::Pod;

/// Transposes `width` lines of `height` elements: writes element `i` of line `j` to `to[i * pitch + j]`. `N` elements of type T occupy 16
/// bytes.
#[inline]
pub(crate) fn transpose_lines<'a, T: Pod, const N: usize>(
    line: impl Fn(usize) -> &'a [T],
    (height, width): (usize, usize),
    to: &mut [T],
    pitch: usize,
) {
    let (rows, columns) = (height - height % N, width - width % N);
    for j in (0..columns).step_by(N) {
        let lines: [&[T]; N] = std::array::from_fn(|k| &line(j + k)[..height]);
        for i in (0..rows).step_by(N) {
            transpose_square(lines.map(|line| &line[i..]), &mut to[i * pitch + j..], pitch);
        }
        for i in rows..height {
            lines.iter().enumerate().for_each(|(k, line)| to[i * pitch + j + k] = line[i]);
        }
    }
    for j in columns..width {
        line(j)[..height].iter().enumerate().for_each(|(i, x)| to[i * pitch + j] = *x);
    }
}

/// Transposes the first `N` elements of `N` lines: writes element `i` of line `j` to `to[i * pitch + j]`.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn transpose_square<T: Pod, const N: usize>(lines: [&[T]; N], to: &mut [T], pitch: usize) {
    use std::arch::x86_64::{
        __m128i, _mm_unpackhi_epi8, _mm_unpackhi_epi16, _mm_unpackhi_epi32, _mm_unpackhi_epi64, _mm_unpacklo_epi8,
        _mm_unpacklo_epi16, _mm_unpacklo_epi32, _mm_unpacklo_epi64,
    };
    // SAFETY: SSE2 is part of x86-64, and these instructions access no memory.
    let between = |a: __m128i, b: __m128i| unsafe {
        match N {
            16 => (_mm_unpacklo_epi8(a, b), _mm_unpackhi_epi8(a, b)),
            8 => (_mm_unpacklo_epi16(a, b), _mm_unpackhi_epi16(a, b)),
            4 => (_mm_unpacklo_epi32(a, b), _mm_unpackhi_epi32(a, b)),
            _ => (_mm_unpacklo_epi64(a, b), _mm_unpackhi_epi64(a, b)),
        }
    };
    let mut rows: [__m128i; N] = lines.map(|line| bytemuck::pod_read_unaligned(bytemuck::cast_slice(&line[..N])));
    // Each round interleaves the first half of the rows with the second half. This rotates the bits of the elements' indices by one, so
    // `log2(N)` rounds swap row and column.
    for _ in 0..N.ilog2() {
        let before = rows;
        for k in 0..N / 2 {
            (rows[2 * k], rows[2 * k + 1]) = between(before[k], before[k + N / 2]);
        }
    }
    for (i, row) in rows.iter().enumerate() {
        to[i * pitch..][..N].copy_from_slice(bytemuck::cast_slice(std::slice::from_ref(row)));
    }
}

/// Transposes the first `N` elements of `N` lines: writes element `i` of line `j` to `to[i * pitch + j]`.
#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn transpose_square<T: Pod, const N: usize>(lines: [&[T]; N], to: &mut [T], pitch: usize) {
    for (j, line) in lines.iter().enumerate() {
        line[..N].iter().enumerate().for_each(|(i, x)| to[i * pitch + j] = *x);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked<T: Pod + PartialEq + std::fmt::Debug, const N: usize>(of: impl Fn(usize) -> T) {
        for (height, width) in
            [(1, 1), (N, N), (N - 1, N), (N, N + 1), (3 * N + 1, 2 * N + 1), (5, 40), (40, 5), (64, 64)]
        {
            let (from, pitch) = ((0..height * width).map(&of).collect::<Vec<T>>(), width + 3);
            let mut to = vec![of(1000); height * pitch];
            transpose_lines::<T, N>(|j| &from[j * height..], (height, width), &mut to, pitch);
            for (at, got) in to.iter().enumerate() {
                let (i, j) = (at / pitch, at % pitch);
                let right = if j < width { from[j * height + i] } else { of(1000) };
                assert_eq!(*got, right, "{i} {j} of {height} x {width}");
            }
        }
    }

    #[test]
    fn transposes_of_every_size() {
        checked::<u8, 16>(|i| (i % 251) as u8);
        checked::<u16, 8>(|i| i as u16 * 7);
        checked::<u32, 4>(|i| i as u32 * 70_001);
        checked::<u64, 2>(|i| i as u64 * 70_001_000_001);
    }
}

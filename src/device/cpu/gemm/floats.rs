//! Elements that are multiplied in f32, and how halves are widened where no kernel takes them as they are.

use std::borrow::Cow;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

#[cfg(target_arch = "x86_64")]
use super::matrix::{Matrix, Start};
use super::{Place, check, gemm_onto, parallel};
use crate::Result;

/// Elements that are multiplied and added in f32.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Floats<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    BF16(&'a [bf16]),
}

impl<'a> Floats<'a> {
    pub(super) fn len(self) -> usize {
        match self {
            Floats::F32(s) => s.len(),
            Floats::F16(s) => s.len(),
            Floats::BF16(s) => s.len(),
        }
    }

    pub(crate) fn widened(self) -> Cow<'a, [f32]> {
        const PART: usize = 1 << 15;
        fn wide<S: Sync>(s: &[S], convert: impl Fn(&[S], &mut [f32]) + Sync) -> Cow<'static, [f32]> {
            let mut wide = vec![0f32; s.len()];
            parallel::for_each_chunk(&mut wide, PART, |i, to| convert(&s[i * PART..][..to.len()], to));
            Cow::Owned(wide)
        }
        match self {
            Floats::F32(s) => Cow::Borrowed(s),
            Floats::F16(s) => wide(s, |s, to| s.convert_to_f32_slice(to)),
            Floats::BF16(s) => wide(s, |s, to| s.convert_to_f32_slice(to)),
        }
    }

    /// Elements from `first` on as f32: those in memory where they are that, otherwise widened into `made`.
    fn tile<'b>(
        self,
        place: Place,
        first: (usize, usize),
        (rows, columns): (usize, usize),
        made: &'b mut Vec<f32>,
    ) -> (&'b [f32], Place)
    where
        'a: 'b,
    {
        fn load<S: Copy + Sync>(
            s: &[S],
            place: Place,
            width: usize,
            to: &mut [f32],
            widen: impl Fn(&[S], &mut [f32]) + Sync,
        ) {
            // Rows that follow one another are one.
            let whole = (place.row, place.col) == (width as isize, 1);
            let (width, row) = if whole { (1 << 15, 1 << 15) } else { (width, place.row) };
            let rows = (1usize << 15).div_ceil(width);
            parallel::for_each_chunk(to, rows * width, |chunk, to| {
                for (i, to) in to.chunks_mut(width).enumerate() {
                    let start = Place { row, ..place }.at(chunk * rows + i, 0);
                    match place.col {
                        1 => widen(&s[start..][..to.len()], to),
                        col => to.iter_mut().enumerate().for_each(|(j, to)| {
                            widen(&[s[start.wrapping_add_signed(j as isize * col)]], std::slice::from_mut(to));
                        }),
                    }
                }
            });
        }
        let place = Place { offset: place.at(first.0, first.1), ..place };
        if let Floats::F32(s) = self {
            return (s, place);
        }
        // Along the shorter steps.
        let transposed = place.row.unsigned_abs() < place.col.unsigned_abs();
        let (from, width) = if transposed { (place.transposed(), rows) } else { (place, columns) };
        made.resize(rows * columns, 0.0);
        match self {
            Floats::F32(_) => {}
            Floats::F16(s) => load(s, from, width, made, |s, to| s.convert_to_f32_slice(to)),
            Floats::BF16(s) => load(s, from, width, made, |s, to| s.convert_to_f32_slice(to)),
        }
        let made_place = Place { offset: 0, row: width as isize, col: 1 };
        (made, if transposed { made_place.transposed() } else { made_place })
    }

    #[cfg(target_arch = "x86_64")]
    pub(super) fn matrix(self, place: Place) -> Matrix<Start> {
        // Offsets from the whole slice's start: with negative strides, elements come before the first one.
        let start = match self {
            Floats::F32(s) => Start::F32(s.as_ptr().wrapping_add(place.offset)),
            Floats::F16(s) => Start::F16(s.as_ptr().wrapping_add(place.offset)),
            Floats::BF16(s) => Start::BF16(s.as_ptr().wrapping_add(place.offset)),
        };
        Matrix { start, row: place.row, col: place.col }
    }
}

/// [`gemm`] of operands that are widened a tile at a time where they are halves.
pub(super) fn in_tiles(
    (m, n, k): (usize, usize, usize),
    (out, place): (&mut [f32], Place),
    (a, place_a): (Floats, Place),
    (b, place_b): (Floats, Place),
) -> Result<()> {
    /// Elements of a tile.
    const TILE: usize = 1 << 18;
    check((m, n, k), (out.len(), place), (a.len(), place_a), (b.len(), place_b))?;
    if k == 0 {
        return gemm_onto((m, n, k), (out, place), (&[], place_a), (&[], place_b), false);
    }
    let (mut tile_a, mut tile_b) = (Vec::new(), Vec::new());
    let depth = k.min(TILE);
    let [height, width] = [(a, m), (b, n)].map(|(x, n)| match x {
        Floats::F32(_) => n.max(1),
        _ => n.clamp(1, TILE / depth),
    });
    let is_wide = matches!((a, b), (Floats::F32(_), Floats::F32(_)));
    for left in (0..n).step_by(width) {
        for first in (0..k).step_by(if is_wide { k } else { depth }) {
            let (width, depth) = (width.min(n - left), if is_wide { k } else { depth.min(k - first) });
            let (b, place_b) = b.tile(place_b, (first, left), (depth, width), &mut tile_b);
            for top in (0..m).step_by(height) {
                let height = height.min(m - top);
                let (a, place_a) = a.tile(place_a, (top, first), (height, depth), &mut tile_a);
                let place = Place { offset: place.at(top, left), ..place };
                gemm_onto((height, width, depth), (&mut *out, place), (a, place_a), (b, place_b), first > 0)?;
            }
        }
    }
    Ok(())
}

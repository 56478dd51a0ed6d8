//! Operands that are multiplied in f32. Halves (f16 and bf16) that no kernel reads directly are widened here.

use std::borrow::Cow;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

#[cfg(target_arch = "x86_64")]
use super::pack::{ElementPtr, Matrix};
use super::{MatrixLayout, check_layouts, gemm_accumulate, parallel};
use crate::{DType, Result};

/// An operand whose products are computed and added in f32.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Floats<'a> {
    F32(&'a [f32]),
    F16(&'a [f16]),
    BF16(&'a [bf16]),
}

impl<'a> Floats<'a> {
    /// Views bytes as elements of a dtype that is multiplied in f32.
    pub(crate) fn new(dtype: DType, bytes: &'a [u8]) -> Floats<'a> {
        match dtype {
            DType::F32 => Floats::F32(bytemuck::cast_slice(bytes)),
            DType::F16 => Floats::F16(bytemuck::cast_slice(bytes)),
            _ => Floats::BF16(bytemuck::cast_slice(bytes)),
        }
    }

    pub(super) fn len(self) -> usize {
        match self {
            Floats::F32(s) => s.len(),
            Floats::F16(s) => s.len(),
            Floats::BF16(s) => s.len(),
        }
    }

    /// Returns all elements as f32, converted by several threads if necessary.
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

    /// Returns a `rows` x `columns` tile starting at element `first` as f32: in place if the operand is f32, otherwise widened into
    /// `made`.
    fn tile<'b>(
        self,
        layout: MatrixLayout,
        first: (usize, usize),
        (rows, columns): (usize, usize),
        made: &'b mut Vec<f32>,
    ) -> (&'b [f32], MatrixLayout)
    where
        'a: 'b,
    {
        fn load<S: Copy + Sync>(
            s: &[S],
            layout: MatrixLayout,
            width: usize,
            to: &mut [f32],
            widen: impl Fn(&[S], &mut [f32]) + Sync,
        ) {
            // Contiguous rows are treated as one row.
            let whole = (layout.row, layout.col) == (width as isize, 1);
            let (width, row) = if whole { (1 << 15, 1 << 15) } else { (width, layout.row) };
            let rows = (1usize << 15).div_ceil(width);
            parallel::for_each_chunk(to, rows * width, |chunk, to| {
                for (i, to) in to.chunks_mut(width).enumerate() {
                    let start = MatrixLayout { row, ..layout }.index_of(chunk * rows + i, 0);
                    match layout.col {
                        1 => widen(&s[start..][..to.len()], to),
                        col => to.iter_mut().enumerate().for_each(|(j, to)| {
                            widen(&[s[start.wrapping_add_signed(j as isize * col)]], std::slice::from_mut(to));
                        }),
                    }
                }
            });
        }
        let layout = MatrixLayout { offset: layout.index_of(first.0, first.1), ..layout };
        if let Floats::F32(s) = self {
            return (s, layout);
        }
        // Elements are widened along the smaller stride, so `made` may hold the tile transposed.
        let transposed = layout.row.unsigned_abs() < layout.col.unsigned_abs();
        let (from, width) = if transposed { (layout.transposed(), rows) } else { (layout, columns) };
        made.resize(rows * columns, 0.0);
        match self {
            Floats::F32(_) => {}
            Floats::F16(s) => load(s, from, width, made, |s, to| s.convert_to_f32_slice(to)),
            Floats::BF16(s) => load(s, from, width, made, |s, to| s.convert_to_f32_slice(to)),
        }
        let made_layout = MatrixLayout { offset: 0, row: width as isize, col: 1 };
        (made, if transposed { made_layout.transposed() } else { made_layout })
    }

    #[cfg(target_arch = "x86_64")]
    pub(super) fn matrix(self, layout: MatrixLayout) -> Matrix<ElementPtr> {
        // Offsets are from the start of the whole slice, because with negative strides elements come before the first element.
        let start = match self {
            Floats::F32(s) => ElementPtr::F32(s.as_ptr().wrapping_add(layout.offset)),
            Floats::F16(s) => ElementPtr::F16(s.as_ptr().wrapping_add(layout.offset)),
            Floats::BF16(s) => ElementPtr::BF16(s.as_ptr().wrapping_add(layout.offset)),
        };
        Matrix { start, row: layout.row, col: layout.col }
    }
}

/// Computes a product with [`gemm`](super::gemm), widening halves a tile at a time.
pub(super) fn gemm_widened(
    (m, n, k): (usize, usize, usize),
    (out, layout): (&mut [f32], MatrixLayout),
    (a, layout_a): (Floats, MatrixLayout),
    (b, layout_b): (Floats, MatrixLayout),
) -> Result<()> {
    const TILE: usize = 1 << 18;
    check_layouts((m, n, k), (out.len(), layout), (a.len(), layout_a), (b.len(), layout_b))?;
    if k == 0 {
        return gemm_accumulate((m, n, k), (out, layout), (&[], layout_a), (&[], layout_b), false);
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
            let (b, layout_b) = b.tile(layout_b, (first, left), (depth, width), &mut tile_b);
            for top in (0..m).step_by(height) {
                let height = height.min(m - top);
                let (a, layout_a) = a.tile(layout_a, (top, first), (height, depth), &mut tile_a);
                let layout = MatrixLayout { offset: layout.index_of(top, left), ..layout };
                gemm_accumulate((height, width, depth), (&mut *out, layout), (a, layout_a), (b, layout_b), first > 0)?;
            }
        }
    }
    Ok(())
}

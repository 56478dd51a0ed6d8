//! Products on the thread that asks for one, of matrices that lie ready for the kernels: for operations that share out work of
//! which a product is a part.

use std::ops::Range;

use half::{bf16, f16};

use super::blocks::even;
use super::kernel::{Kernels, Tile};
use super::pack::{Copies, From, Half, Pairs, SLACK, pack};
use super::{Floats, amx};
use crate::device::cpu::blocks::Block;
use crate::device::cpu::gemm::Finish;

/// Kernels for this processor: of f32, or of pairs of bf16. A step of the latter is a pair, in the bits of an f32.
#[derive(Clone, Copy)]
pub(crate) struct Alone {
    kernels: &'static Kernels,
    /// Of the steps that are too few for AMX.
    rest: &'static Kernels,
}

/// The left matrix of a product.
#[derive(Clone, Copy)]
pub(crate) enum Left<'a> {
    /// [`Alone::rows`] at a time, fewer in the last panel, as [`Alone::panel`] says.
    Panels(&'a [f32]),
    /// Row `i` from element `i * stride` on.
    Rows { data: &'a [f32], stride: usize },
    /// The same, of bf16, whose pairs are neighbours.
    Halves { data: &'a [u16], stride: usize },
}

/// The right matrix: step `i` of `k`, the `t`th time, from element `t * jump + i * stride` on, up to whole vectors.
#[derive(Clone, Copy)]
pub(crate) struct Right<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) stride: usize,
    pub(crate) times: usize,
    pub(crate) jump: usize,
}

impl Alone {
    /// Those for products of f32.
    pub(crate) fn get() -> Option<Alone> {
        Kernels::get(false).map(|kernels| Alone { kernels, rest: kernels })
    }

    /// Those for products of two matrices of bf16, of `k` elements or more, where pairs are the faster way.
    pub(crate) fn of_pairs(k: usize) -> Option<Alone> {
        const AMX: usize = 2 * amx::STEP;
        Some(Alone { kernels: Kernels::of_pairs(k / AMX * AMX)?, rest: Kernels::get(true)? })
    }

    /// Elements of a step.
    pub(crate) fn of_step(self) -> usize {
        if self.kernels.pairs { 2 } else { 1 }
    }

    /// Steps that are best done at a time, of up to `most`.
    pub(crate) fn whole_steps(self, most: usize) -> usize {
        if most < self.kernels.step { most } else { most / self.kernels.step * self.kernels.step }
    }

    /// How far rows, and steps, of a left matrix's panel are apart: of `rows` rows and `steps` steps.
    pub(crate) fn panel(self, rows: usize, steps: usize) -> [usize; 2] {
        if self.kernels.step > 1 { [steps, 1] } else { [1, rows] }
    }

    /// Rows of a panel of an `m` row matrix.
    pub(crate) fn rows(self, m: usize) -> usize {
        even(m, self.kernels.rows, 1)
    }

    /// Columns of a tile: a right matrix in panels has so many in each.
    pub(crate) fn columns(self) -> usize {
        2 * self.kernels.lanes
    }

    /// The elements that a row of `n` takes, up to whole vectors.
    pub(crate) fn whole(self, n: usize) -> usize {
        n.next_multiple_of(self.kernels.lanes)
    }

    /// What [`Alone::lay_out`] writes to, for `count` elements of each of `n` columns.
    pub(crate) fn room(self, n: usize, count: usize) -> usize {
        self.whole(n) * count.div_ceil(self.of_step()) + SLACK
    }

    /// `out = left right` of `m` rows, `n` columns and `k` steps, as often as the right matrix says, or that added to it.
    ///
    /// # Panics
    /// Where a matrix reaches out of its slice.
    pub(crate) fn multiply(
        self,
        (m, n, k): (usize, usize, usize),
        left: Left,
        right: Right,
        out: &mut Block<f32>,
        add: bool,
    ) {
        let (rows, columns, times) = (self.rows(m), self.columns(), right.times);
        assert!(m > 0 && n > 0 && k > 0 && times > 0, "an empty product");
        assert!((times - 1) * right.jump + (k - 1) * right.stride + self.whole(n) <= right.data.len());
        assert!(n <= out.width() && m <= out.rows());
        let (a, a_row) = match left {
            Left::Panels(data) => {
                assert!(m * k * times <= data.len());
                (data.as_ptr(), (self.kernels.step > 1).then_some(k * times * size_of::<f32>()))
            }
            Left::Rows { data, stride } => {
                assert!(times == 1 && (m - 1) * stride + k <= data.len());
                (data.as_ptr(), Some(stride * size_of::<f32>()))
            }
            Left::Halves { data, stride } => {
                assert!(self.kernels.pairs && times == 1 && (m - 1) * stride + 2 * k <= data.len());
                (data.as_ptr().cast(), Some(stride * size_of::<u16>()))
            }
        };
        let (out, stride) = out.start();
        let whole = k / self.kernels.step * self.kernels.step;
        let bytes = |elements: usize| (elements * size_of::<f32>()) as isize;
        // `steps` steps from `first` on, of some times.
        let tile =
            |kernels: &Kernels, [i, high, j, wide]: [usize; 4], times: Range<usize>, first: usize, steps: usize| {
                let kernel = kernels.tile(high, wide.div_ceil(kernels.lanes), a_row.is_some());
                // SAFETY: the tile's rows and columns are below m and n, whose matrices lie in their slices, up to whole
                // vectors of the right one, or in the block, which is borrowed exclusively. The processor has the kernels' instructions.
                unsafe {
                    kernel(&Tile {
                        k: steps,
                        times: times.len(),
                        a_jump: if a_row.is_some() { bytes(k - steps) } else { 0 },
                        b_jump: bytes(right.jump) - bytes(steps * right.stride),
                        a: a.byte_add(i * a_row.unwrap_or(k * right.times * size_of::<f32>()))
                            .add(times.start * k + first),
                        a_row: a_row.unwrap_or(0) as isize,
                        b: right.data.as_ptr().add(times.start * right.jump + first * right.stride + j),
                        b_step: bytes(right.stride),
                        out: out.add(i * stride + j),
                        row: stride as isize,
                        col: 1,
                        columns: wide,
                        accumulate: add || first > 0 || times.start > 0,
                        finish: Finish::Nothing,
                    });
                }
            };
        // The columns of a tile stay in the first-level cache, panels pass by.
        for j in (0..n).step_by(columns) {
            let wide = columns.min(n - j);
            for i in (0..m).step_by(rows) {
                let high = rows.min(m - i);
                if whole > 0 {
                    tile(self.kernels, [i, high, j, wide], 0..times, 0, whole);
                }
                for time in 0..if whole < k { times } else { 0 } {
                    for row in (i..i + high).step_by(self.rest.rows) {
                        let high = self.rest.rows.min(i + high - row);
                        tile(self.rest, [row, high, j, wide], time..time + 1, whole, k - whole);
                    }
                }
            }
        }
    }

    /// Lays out columns of a right matrix: `n` of them, column `j` the `count` elements from `first + j * stride` on, those up to
    /// whole vectors 0, and so the second one of the last pair of an odd number.
    ///
    /// # Panics
    /// Where they reach out of their slice, or `to` is smaller than [`Alone::room`] says.
    pub(crate) fn lay_out(
        self,
        from: Floats,
        (first, stride): (usize, usize),
        (n, count): (usize, usize),
        to: &mut [f32],
    ) {
        assert!(n > 0 && count > 0 && first + (n - 1) * stride + count <= from.len());
        assert!(self.room(n, count) <= to.len());
        let width = self.whole(n);
        macro_rules! pack {
            ($T:ty, $data:expr, $steps:expr, $done:expr) => {{
                let from = From { start: $data[first + 2 * $done..].as_ptr(), across: stride as isize, along: 1 };
                let copies = Copies { panels: 1, stride: 0, steps: $steps };
                // SAFETY: the columns are in their slice, and `to` has room, both as asserted; the width is a multiple of 8.
                // Processors with kernels have AVX2 and F16C.
                unsafe { pack::<$T>(from, to[$done * width..].as_mut_ptr(), copies, n, width) }
            }};
        }
        match from {
            Floats::F32(data) => pack!(f32, data, count, 0),
            Floats::F16(data) => pack!(f16, data, count, 0),
            Floats::BF16(data) if self.kernels.pairs => {
                pack!(Pairs, data, count / 2, 0);
                if count % 2 > 0 {
                    pack!(Half, data, 1, count / 2);
                }
            }
            Floats::BF16(data) => pack!(bf16, data, count, 0),
        }
    }
}

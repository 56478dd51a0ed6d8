//! Products on the thread that asks for one, of matrices that lie ready for the kernels: for operations that share out work of
//! which a product is a part.

use half::{bf16, f16};

use super::Floats;
use super::blocks::even;
use super::kernel::{Kernels, Tile};
use super::pack::{Copies, From, SLACK, pack};
use crate::device::cpu::blocks::Block;
use crate::device::cpu::gemm::Finish;

/// The kernels of f32 for this processor.
#[derive(Clone, Copy)]
pub(crate) struct Alone(&'static Kernels);

/// The left matrix of a product.
#[derive(Clone, Copy)]
pub(crate) enum Left<'a> {
    /// [`Alone::rows`] at a time, fewer in the last panel: an element of each row, step after step.
    Panels(&'a [f32]),
    /// Row `i` from element `i * stride` on.
    Rows { data: &'a [f32], stride: usize },
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
    pub(crate) fn get() -> Option<Alone> {
        Kernels::get(false).map(Alone)
    }

    /// Rows of a panel of an `m` row matrix.
    pub(crate) fn rows(self, m: usize) -> usize {
        even(m, self.0.rows, 1)
    }

    /// Columns of a tile: a right matrix in panels has so many in each.
    pub(crate) fn columns(self) -> usize {
        2 * self.0.lanes
    }

    /// The elements that a row of `n` takes, up to whole vectors.
    pub(crate) fn whole(self, n: usize) -> usize {
        n.next_multiple_of(self.0.lanes)
    }

    /// What [`Alone::lay_out`] writes to, for `steps` steps of `n` columns.
    pub(crate) fn room(self, n: usize, steps: usize) -> usize {
        self.whole(n) * steps + SLACK
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
                (data, None)
            }
            Left::Rows { data, stride } => {
                assert!(times == 1 && (m - 1) * stride + k <= data.len());
                (data, Some(stride))
            }
        };
        let (out, stride) = out.start();
        // The columns of a tile stay in the first-level cache, panels pass by.
        for j in (0..n).step_by(columns) {
            let left = columns.min(n - j);
            for i in (0..m).step_by(rows) {
                let high = rows.min(m - i);
                let kernel = self.0.tile(high, left.div_ceil(self.0.lanes), a_row.is_some());
                // SAFETY: the tile's rows and columns are below m and n, whose matrices lie in their slices, up to whole
                // vectors of the right one, or in the block, which is borrowed exclusively. The processor has the kernels' instructions.
                unsafe {
                    kernel(&Tile {
                        k,
                        times,
                        b_jump: (right.jump as isize - (k * right.stride) as isize) * size_of::<f32>() as isize,
                        a: a.as_ptr().add(i * a_row.unwrap_or(k * times)),
                        a_row: (a_row.unwrap_or(0) * size_of::<f32>()) as isize,
                        b: right.data.as_ptr().add(j),
                        b_step: (right.stride * size_of::<f32>()) as isize,
                        out: out.add(i * stride + j),
                        row: stride as isize,
                        col: 1,
                        columns: left,
                        accumulate: add,
                        finish: Finish::Nothing,
                    });
                }
            }
        }
    }

    /// Lays out columns of a right matrix: `n` of them, column `j` of step `i` from element `first + j * stride + i` on, those up to
    /// whole vectors 0.
    ///
    /// # Panics
    /// Where they reach out of their slice, or `to` is smaller than [`Alone::room`] says.
    pub(crate) fn lay_out(
        self,
        from: Floats,
        (first, stride): (usize, usize),
        (n, steps): (usize, usize),
        to: &mut [f32],
    ) {
        assert!(n > 0 && steps > 0 && first + (n - 1) * stride + steps <= from.len());
        assert!(self.room(n, steps) <= to.len());
        let (copies, width) = (Copies { panels: 1, stride: 0, steps }, self.whole(n));
        macro_rules! pack {
            ($T:ty, $data:expr) => {{
                let from = From { start: $data[first..].as_ptr(), across: stride as isize, along: 1 };
                // SAFETY: the columns are in their slice, and `to` has room, both as asserted; the width is a multiple of 8.
                // Processors with kernels have AVX2 and F16C.
                unsafe { pack::<$T>(from, to.as_mut_ptr(), copies, n, width) }
            }};
        }
        match from {
            Floats::F32(data) => pack!(f32, data),
            Floats::F16(data) => pack!(f16, data),
            Floats::BF16(data) => pack!(bf16, data),
        }
    }
}

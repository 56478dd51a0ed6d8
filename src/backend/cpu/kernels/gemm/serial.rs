//! Single-threaded products of matrices that are already laid out for the kernels. Operations that split their own work over threads
//! compute their products with these functions.

use std::ops::Range;

use half::{bf16, f16};

use super::blocks::even_len;
use super::epilogue::KernelEpilogue;
use super::kernel::{Kernels, Tile};
use super::pack::{LastPair, PANEL_SLACK, Pairs, PanelShape, PanelSource, pack};
use super::{Floats, amx};
use crate::device::cpu::blocks::Block;

/// The kernels for this processor, either for f32 or for pairs of bf16. For bf16, a step is a pair of elements along k, in the bits of
/// one f32.
#[derive(Clone, Copy)]
pub(crate) struct SerialGemm {
    kernels: &'static Kernels,
    /// The kernels for the last steps, if these are too few for AMX.
    rest: &'static Kernels,
}

/// The left matrix of a product.
#[derive(Clone, Copy)]
pub(crate) enum LeftMatrix<'a> {
    /// Panels of [`SerialGemm::panel_rows`] rows (the last may have fewer), with the layout of [`SerialGemm::panel_strides`].
    Panels(&'a [f32]),
    /// Rows: row `i` starts at element `i * stride`.
    Rows { data: &'a [f32], stride: usize },
    /// Rows of bf16: row `i` starts at element `i * stride`, and pairs are adjacent elements.
    Halves { data: &'a [u16], stride: usize },
}

/// The right matrix: the row of step `i` (of `k`) in repetition `t` starts at element `t * jump + i * stride`, and is readable up to a
/// whole number of vectors.
#[derive(Clone, Copy)]
pub(crate) struct RightMatrix<'a> {
    pub(crate) data: &'a [f32],
    pub(crate) stride: usize,
    pub(crate) times: usize,
    pub(crate) jump: usize,
}

impl SerialGemm {
    /// Returns the kernels for products of f32, or `None` if there are none for this processor.
    pub(crate) fn for_f32() -> Option<SerialGemm> {
        Kernels::get(false).map(|kernels| SerialGemm { kernels, rest: kernels })
    }

    /// Returns the kernels for products of two bf16 matrices of at least `k` steps, if kernels of pairs are faster than f32 on this
    /// processor.
    pub(crate) fn for_pairs(k: usize) -> Option<SerialGemm> {
        const AMX: usize = 2 * amx::PAIRS_PER_ROW;
        Some(SerialGemm { kernels: Kernels::for_pairs(k / AMX * AMX)?, rest: Kernels::get(true)? })
    }

    pub(crate) fn elements_per_step(self) -> usize {
        if self.kernels.pairs { 2 } else { 1 }
    }

    /// Returns the best number of steps to compute at a time, at most `most`.
    pub(crate) fn round_steps(self, most: usize) -> usize {
        if most < self.kernels.step { most } else { most / self.kernels.step * self.kernels.step }
    }

    /// Returns the strides of rows and of steps, in elements, in a panel of `rows` rows and `steps` steps of the left matrix.
    pub(crate) fn panel_strides(self, rows: usize, steps: usize) -> [usize; 2] {
        if self.kernels.step > 1 { [steps, 1] } else { [1, rows] }
    }

    /// Returns the number of rows of a panel for a matrix of `m` rows.
    pub(crate) fn panel_rows(self, m: usize) -> usize {
        even_len(m, self.kernels.rows, 1)
    }

    /// Returns the number of columns of a tile, which is also the number of columns of a panel of the right matrix.
    pub(crate) fn tile_columns(self) -> usize {
        2 * self.kernels.lanes
    }

    /// Returns `n` rounded up to a whole number of vectors: the number of elements reserved for a row of `n` elements.
    pub(crate) fn padded_width(self, n: usize) -> usize {
        n.next_multiple_of(self.kernels.lanes)
    }

    /// Returns the number of elements that [`SerialGemm::pack_columns`] writes for `count` elements of each of `n` columns.
    pub(crate) fn packed_len(self, n: usize, count: usize) -> usize {
        self.padded_width(n) * count.div_ceil(self.elements_per_step()) + PANEL_SLACK
    }

    /// Computes `out = left right` of `m` rows, `n` columns and `k` steps, summed over the right matrix's repetitions. With `add`, the
    /// product is added to `out`.
    ///
    /// # Panics
    /// Panics if a matrix exceeds its slice.
    pub(crate) fn multiply(
        self,
        (m, n, k): (usize, usize, usize),
        left: LeftMatrix,
        right: RightMatrix,
        out: &mut Block<f32>,
        add: bool,
    ) {
        let (rows, columns, times) = (self.panel_rows(m), self.tile_columns(), right.times);
        assert!(m > 0 && n > 0 && k > 0 && times > 0, "an empty product");
        assert!((times - 1) * right.jump + (k - 1) * right.stride + self.padded_width(n) <= right.data.len());
        assert!(n <= out.width() && m <= out.rows());
        let (a, a_row) = match left {
            LeftMatrix::Panels(data) => {
                assert!(m * k * times <= data.len());
                (data.as_ptr(), (self.kernels.step > 1).then_some(k * times * size_of::<f32>()))
            }
            LeftMatrix::Rows { data, stride } => {
                assert!(times == 1 && (m - 1) * stride + k <= data.len());
                (data.as_ptr(), Some(stride * size_of::<f32>()))
            }
            LeftMatrix::Halves { data, stride } => {
                assert!(self.kernels.pairs && times == 1 && (m - 1) * stride + 2 * k <= data.len());
                (data.as_ptr().cast(), Some(stride * size_of::<u16>()))
            }
        };
        let (out, stride) = out.start();
        let whole = k / self.kernels.step * self.kernels.step;
        let bytes = |elements: usize| (elements * size_of::<f32>()) as isize;
        // Computes a tile: sums `steps` steps, beginning with step `first`, over a range of repetitions.
        let tile =
            |kernels: &Kernels, [i, high, j, wide]: [usize; 4], times: Range<usize>, first: usize, steps: usize| {
                let kernel = kernels.tile(high, wide.div_ceil(kernels.lanes), a_row.is_some());
                // SAFETY: the tile's rows and columns are below m and n, whose matrices are in their slices, up to whole vectors
                // of the right matrix, or in the block, which is borrowed exclusively. The processor has the kernels' instructions.
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
                        finish: KernelEpilogue::Nothing,
                    });
                }
            };
        // The columns of a tile stay in the L1 cache while all rows are multiplied with them.
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

    /// Packs `n` columns of a right matrix. Column `j` consists of `count` elements, which start at element `first + j * stride`. The
    /// padding columns up to a whole number of vectors are zeros, and so is the second element of the last pair if `count` is odd.
    ///
    /// # Panics
    /// Panics if the columns exceed their slice, or `to` is smaller than [`SerialGemm::packed_len`].
    pub(crate) fn pack_columns(
        self,
        from: Floats,
        (first, stride): (usize, usize),
        (n, count): (usize, usize),
        to: &mut [f32],
    ) {
        assert!(n > 0 && count > 0 && first + (n - 1) * stride + count <= from.len());
        assert!(self.packed_len(n, count) <= to.len());
        let width = self.padded_width(n);
        macro_rules! pack {
            ($T:ty, $data:expr, $steps:expr, $done:expr) => {{
                let from = PanelSource { start: $data[first + 2 * $done..].as_ptr(), across: stride as isize, along: 1 };
                let shape = PanelShape { panels: 1, stride: 0, steps: $steps, lanes: n, width };
                // SAFETY: the assertions above check that the columns are in their slice and that `to` has room; the width is a multiple
                // of 8. Processors with kernels have AVX2 and F16C.
                unsafe { pack::<$T>(from, to[$done * width..].as_mut_ptr(), shape) }
            }};
        }
        match from {
            Floats::F32(data) => pack!(f32, data, count, 0),
            Floats::F16(data) => pack!(f16, data, count, 0),
            Floats::BF16(data) if self.kernels.pairs => {
                pack!(Pairs, data, count / 2, 0);
                if count % 2 > 0 {
                    pack!(LastPair, data, 1, count / 2);
                }
            }
            Floats::BF16(data) => pack!(bf16, data, count, 0),
        }
    }
}

//! Softmax of short rows, a block of rows at a time, transposed. A column holds one element of every row in the block, so that vectors
//! are full however short the rows are, and folding all rows of the block takes one vector operation per column.

use crate::DType;
use crate::backend::cpu::convert::{load_tile, store_tile};
use crate::backend::cpu::scalar::Number;
use crate::backend::cpu::vectorised::vectorised;
use crate::backend::problem::softmax::RowOp;

/// The number of rows in a block.
pub(crate) const BLOCK_ROWS: usize = 64;
/// Rows longer than this are not transposed: a block of them would no longer fit in the L1 cache.
const MAX_ROW_LEN: usize = 64;

/// True if `rows` rows of `n` elements are computed faster in blocks. A block with few rows takes as long as a full block.
pub(crate) fn is_faster(rows: usize, n: usize) -> bool {
    n <= MAX_ROW_LEN && rows >= usize::max(8, n / 2)
}

/// Returns the number of rows of `n` elements that fill whole blocks and together have about `elements` elements.
pub(crate) fn whole_blocks(elements: usize, n: usize) -> usize {
    elements.div_ceil(n).next_multiple_of(BLOCK_ROWS)
}

/// The elements of one column: one element of each row in a block.
pub(crate) type Column<C> = [C; BLOCK_ROWS];

/// The location of a block of rows: its first element, the stride between rows and the stride along a row.
#[derive(Clone, Copy)]
pub(crate) struct RowsLayout {
    pub(crate) start: usize,
    pub(crate) row: isize,
    pub(crate) element: isize,
}

impl RowsLayout {
    fn offset_of(self, row: usize, column: usize) -> usize {
        self.start.wrapping_add_signed(row as isize * self.row + column as isize * self.element)
    }
}

/// Reads a block of `rows` rows and transposes it into columns.
pub(crate) fn load<C: Number>(dtype: DType, bytes: &[u8], from: RowsLayout, columns: &mut [Column<C>], rows: usize) {
    let n = columns.len();
    if from.element == 1 && from.row == n as isize && dtype == C::COMPUTE.dtype() {
        let elements: &[C] = &bytemuck::cast_slice(bytes)[from.start..][..n * rows];
        for (j, column) in columns.iter_mut().enumerate() {
            column.iter_mut().zip(elements.chunks_exact(n)).for_each(|(x, row)| *x = row[j]);
        }
        return;
    }
    for (j, column) in columns.iter_mut().enumerate() {
        load_tile(dtype, bytes, from.offset_of(0, j), from.row, &mut column[..rows]);
    }
}

/// Writes a block of `rows` rows from columns.
pub(crate) fn store<C: Number>(dtype: DType, columns: &[Column<C>], bytes: &mut [u8], to: RowsLayout, rows: usize) {
    // Contiguous writes are preferred to contiguous reads, because strided stores cost more than strided loads.
    if to.element == 1 && columns.len() >= 8 && dtype == C::COMPUTE.dtype() {
        let elements: &mut [C] = bytemuck::cast_slice_mut(bytes);
        for lane in 0..rows.min(BLOCK_ROWS) {
            let row = &mut elements[to.offset_of(lane, 0)..][..columns.len()];
            columns.iter().zip(row).for_each(|(column, x)| *x = column[lane]);
        }
        return;
    }
    for (j, column) in columns.iter().enumerate() {
        store_tile(dtype, &column[..rows], bytes, to.offset_of(0, j), to.row);
    }
}

/// Folds each row to one element. The rounding error of a sum of n elements is at most that of n / 4 + 5 roundings.
#[inline(always)]
fn fold<C: Number>(columns: &[Column<C>], from: C, join: impl Fn(C, C) -> C) -> Column<C> {
    let mut all = [from; BLOCK_ROWS];
    let (fours, rest) = columns.as_chunks::<4>();
    for [a, b, c, d] in fours {
        for i in 0..BLOCK_ROWS {
            all[i] = join(all[i], join(join(a[i], b[i]), join(c[i], d[i])));
        }
    }
    for column in rest {
        zip_with(&mut all, column, &join);
    }
    all
}

/// Applies `f` to each element, in a loop because `array::map` is not vectorised.
#[inline(always)]
fn map_column<C: Number>(mut column: Column<C>, f: impl Fn(C) -> C) -> Column<C> {
    column.iter_mut().for_each(|x| *x = f(*x));
    column
}

#[inline(always)]
fn zip_with<C: Number>(column: &mut Column<C>, other: &Column<C>, f: impl Fn(C, C) -> C) {
    for i in 0..BLOCK_ROWS {
        column[i] = f(column[i], other[i]);
    }
}

#[inline(always)]
fn zip_all_with<C: Number>(columns: &mut [Column<C>], other: &Column<C>, f: impl Fn(C, C) -> C) {
    columns.iter_mut().for_each(|column| zip_with(column, other, &f));
}

#[inline(always)]
fn max_of_rows<C: Number>(columns: &[Column<C>]) -> Column<C> {
    fold(columns, C::from_f64(f64::NEG_INFINITY), C::max)
}

vectorised! {
    /// Computes the [`RowOp`] for a block and writes the result to its columns; a result with one element per row goes to the first
    /// column. `others` is the second operand, or scratch memory if there is none.
    pub(crate) fn compute_block<'a, C: Number>(
        _simd: S, kind: RowOp, columns: &'a mut [Column<C>], others: &'a mut [Column<C>]
    ) {
        let (zero, one) = (C::from_i32(0), C::from_i32(1));
        let add = |columns: &[Column<C>]| fold(columns, zero, C::add);
        match kind {
            RowOp::Softmax => {
                let top = max_of_rows(columns);
                zip_all_with(columns, &top, C::sub);
                C::exp_in_place(columns.as_flattened_mut(), |x| x);
                let scale = map_column(add(columns), |s| one.div(s));
                zip_all_with(columns, &scale, C::mul);
            }
            RowOp::LogSoftmax | RowOp::LogSumExp => {
                let mut top = max_of_rows(columns);
                if kind == RowOp::LogSumExp {
                    // An infinite maximum is replaced by 0, because subtracting infinity from an infinite element would give NaN.
                    top = map_column(top, |m| if m.abs() == C::from_f64(f64::INFINITY) { zero } else { m });
                }
                zip_all_with(columns, &top, C::sub);
                C::exp_each(others.as_flattened_mut(), columns.as_flattened(), |x| x);
                let log = map_column(add(others), C::log);
                match kind {
                    RowOp::LogSumExp => {
                        zip_with(&mut top, &log, C::add);
                        columns[0] = top;
                    }
                    _ => zip_all_with(columns, &log, C::sub),
                }
            }
            RowOp::SoftmaxGrad => {
                let mut sum = [zero; BLOCK_ROWS];
                for (y, g) in columns.iter().zip(&*others) {
                    for i in 0..BLOCK_ROWS {
                        sum[i] = sum[i].add(y[i].mul(g[i]));
                    }
                }
                for (y, g) in columns.iter_mut().zip(&*others) {
                    for i in 0..BLOCK_ROWS {
                        y[i] = g[i].sub(sum[i]).mul(y[i]);
                    }
                }
            }
            RowOp::LogSoftmaxGrad => {
                let sum = add(others);
                C::exp_in_place(columns.as_flattened_mut(), |x| x);
                for (y, g) in columns.iter_mut().zip(&*others) {
                    for i in 0..BLOCK_ROWS {
                        y[i] = g[i].sub(y[i].mul(sum[i]));
                    }
                }
            }
            RowOp::MaskedSoftmax => unreachable!("its rows see parts of their elements"),
        }
    }
}

vectorised! {
    /// Computes the losses of a block of logits, 0 for ignored rows. With a `scale`, the columns are overwritten with the gradients of
    /// the logits, times `scale`.
    pub(crate) fn entropy_of_block<'a, C: Number, F: Fn(i64) -> bool>(
        _simd: S, columns: &'a mut [Column<C>], targets: &'a [i64], counts: F, losses: &'a mut [C], scale: Option<C>
    ) {
        let (zero, none) = (C::from_i32(0), C::from_i32(-1));
        let mut labels = [none; BLOCK_ROWS];
        for (label, &target) in labels.iter_mut().zip(targets) {
            *label = if counts(target) { C::from_i32(target as i32) } else { none };
        }
        let top = max_of_rows(columns);
        zip_all_with(columns, &top, C::sub);
        let mut label_logits = [zero; BLOCK_ROWS];
        for (j, column) in columns.iter().enumerate() {
            let j = C::from_i32(j as i32);
            for i in 0..BLOCK_ROWS {
                label_logits[i] = label_logits[i].add(if labels[i] == j { column[i] } else { zero });
            }
        }
        C::exp_in_place(columns.as_flattened_mut(), |x| x);
        let sum = fold(columns, zero, C::add);
        let mut loss = [zero; BLOCK_ROWS];
        for i in 0..BLOCK_ROWS {
            let x = sum[i].log().sub(label_logits[i]);
            loss[i] = if labels[i] == none { zero } else { x };
        }
        losses.copy_from_slice(&loss[..targets.len()]);
        let Some(scale) = scale else { return };
        let factors = map_column(sum, |s| scale.div(s));
        for (j, column) in columns.iter_mut().enumerate() {
            let j = C::from_i32(j as i32);
            for i in 0..BLOCK_ROWS {
                let gradient = column[i].mul(factors[i]).sub(if labels[i] == j { scale } else { zero });
                // The gradient is selected, not multiplied by 0, because the gradient of an ignored row may be infinite or NaN.
                column[i] = if labels[i] == none { zero } else { gradient };
            }
        }
    }
}

//! Softmax and related row operations on the CPU. Rows are computed one at a time in the compute type, except:
//!
//! - Short rows are computed a block of rows at a time, transposed. A column holds one element of every row in the block, so that vectors
//!   are full however short the rows are, and folding all rows of the block takes one vector operation per column.
//! - Along a dim other than the last, neighbouring rows are interleaved in memory: element i of all of them forms a contiguous line. First,
//!   pieces (several lines each) are folded to maxima and sums; then the result's lines are computed in memory order. All threads therefore
//!   have work even for few rows. The division into pieces does not depend on the number of threads.

use std::ops::Range;

use pulp::Simd;
use smallvec::SmallVec;

use crate::backend::cpu::accumulate::{Add, Max, fold, fold_map, fold_simd};
use crate::backend::cpu::convert::{load_tile, read_or_convert, store_tile};
use crate::backend::cpu::dispatch::{for_float, vectorised};
use crate::backend::cpu::scalar::Number;
use crate::backend::problem::cross_entropy::{CrossEntropy, LabelEntropy, LossReduction};
use crate::backend::problem::softmax::{MaskKind, RowOp, Softmax, SoftmaxRows};
use crate::device::cpu::parallel;
use crate::storage::with_host;
use crate::{DType, Error, Result, Tensor};

/// The number of elements in a job of the thread pool: enough to hide the cost of handing the job over.
const TASK_ELEMENTS: usize = 1 << 13;
/// The number of elements of short rows in a job, if the rows are divided into several jobs.
const BLOCKED_TASK_ELEMENTS: usize = 1 << 11;
/// The number of elements of longer rows in a job of a loss.
const LOSS_TASK_ELEMENTS: usize = 1 << 12;
/// The number of exponentials computed before they are added up.
const EXP_TILE: usize = 256;
/// The number of rows whose losses are summed first. The number is fixed, so that the total is the same for any number of threads.
const LOSS_SUM_ROWS: usize = 64;
/// The number of rows in a block.
const BLOCK_ROWS: usize = 64;
/// Rows longer than this are not transposed: a block of them would no longer fit in the L1 cache.
const MAX_SHORT_ROW_LEN: usize = 64;
/// The minimum number of neighbouring rows to compute strided rows side by side.
const MIN_STRIDED_ROWS: usize = 8;
/// The number of elements in a piece, which stays in the L2 cache while it is read twice.
const PIECE_ELEMENTS: usize = 1 << 15;
/// The maximum number of elements in a line of a piece.
const MAX_LINE_LEN: usize = 2048;
/// The maximum number of lines in a piece. It bounds the error of a sum of n elements to n / 4 + n / MAX_LINES + 5 roundings.
const MAX_LINES: usize = 1024;
/// The number of elements computed at a time, in whole lines.
const TILE_ELEMENTS: usize = 2048;

/// Computes the [`RowOp`] for every row.
pub(crate) fn run_softmax(softmax: &Softmax) -> Result<()> {
    let (rows, &Softmax { kind, x, z, out, d, .. }) = (&softmax.rows(), softmax);
    let inner = out.shape().dims()[d + 1..].iter().product();
    with_host(&[&x.storage, &z.storage], &[&out.storage], |reads, writes| {
        let job = SoftmaxJob { kind, x, z, bytes: [reads[0], reads[1]], out, rows, inner };
        let start = out.layout.offset * out.dtype.size();
        let to = &mut writes[0][start..][..out.numel() * out.dtype.size()];
        for_float!(x.dtype.compute(), C => job.run::<C>(to));
    })
}

/// A row operation, and the bytes of its operands' storages.
struct SoftmaxJob<'a> {
    kind: RowOp,
    x: &'a Tensor,
    z: &'a Tensor,
    bytes: [&'a [u8]; 2],
    out: &'a Tensor,
    rows: &'a SoftmaxRows,
    /// The product of the sizes after the row's dim, which is the number of rows that are interleaved in a slice of the output.
    inner: usize,
}

impl SoftmaxJob<'_> {
    /// Runs the operation. The output is partitioned into slices that hold whole rows.
    fn run<C: Number>(&self, out: &mut [u8]) {
        let slice = (self.inner * self.result_len()).max(1);
        let (n, count) = (self.rows.n, self.rows.count());
        // True if rows are evenly spaced: either all rows, or the rows that are interleaved in one slice of the result.
        let even = self.kind != RowOp::MaskedSoftmax
            && match self.inner {
                1 => self.rows.strided.dims.len() <= 1,
                inner => self.rows.strided.dims.last().is_some_and(|&last| last % inner == 0),
            };
        let whole = self.inner * n <= PIECE_ELEMENTS;
        let short = even
            && if self.inner == 1 {
                is_faster_in_blocks(count, n)
            } else {
                whole && is_faster_in_blocks(self.inner, n)
            };
        if even && !short && self.inner >= MIN_STRIDED_ROWS {
            return self.strided_rows::<C>(out);
        }
        let outer_per_task = match short {
            true if self.inner == 1 && count * n <= TASK_ELEMENTS => count,
            true if self.inner == 1 => whole_blocks(BLOCKED_TASK_ELEMENTS, n),
            _ => TASK_ELEMENTS.div_ceil(self.inner * n).max(1),
        };
        let size = self.out.dtype.size();
        parallel::for_each_chunk(out, slice * outer_per_task * size, |i, part| match short {
            true => self.compute_in_blocks::<C>(i * outer_per_task * self.inner, part),
            false => self.row_by_row::<C>(i * outer_per_task * self.inner, part),
        });
    }

    /// Computes rows one by one, beginning with row `first`, whose result is at the start of `out`.
    fn row_by_row<C: Number>(&self, first: usize, out: &mut [u8]) {
        let (n, inner, rows) = (self.rows.n, self.inner, self.rows);
        let zero = C::from_i32(0);
        let mask = rows.mask.kind;
        let has_second_operand = self.is_gradient() || mask != MaskKind::None;
        let (mut one, mut other) = (Vec::new(), Vec::new());
        let mut compute = |i: usize, row: &mut [C]| {
            let at = rows.strided.offsets(first + i);
            let from = self.read_row(self.x, 0, at[0], &mut one);
            let other = if has_second_operand { self.read_row(self.z, 2, at[2], &mut other) } else { &[] };
            let from = &from[..rows.mask.visible_len(first + i, n)];
            compute_row(self.kind, from, row, other, mask)
        };
        let length = self.result_len();
        if inner == 1 && self.out.dtype == C::COMPUTE.dtype() {
            let out: &mut [C] = bytemuck::cast_slice_mut(out);
            out.chunks_mut(length).enumerate().for_each(|(i, row)| _ = compute(i, row));
            return;
        }
        let mut row = vec![zero; length];
        let count = out.len() / self.out.dtype.size() / length;
        for i in 0..count {
            let len = compute(i, &mut row);
            let to = i / inner * inner * length + i % inner;
            store_tile(self.out.dtype, &row[..len], out, to as _, inner as isize);
        }
    }

    /// Computes rows like [`row_by_row`](Self::row_by_row), but in transposed blocks of short rows.
    fn compute_in_blocks<C: Number>(&self, first: usize, out: &mut [u8]) {
        let (n, rows) = (self.rows.n, self.rows);
        let length = self.result_len();
        let mut buffer = vec![C::from_i32(0); 2 * n * BLOCK_ROWS];
        let (columns, others) = buffer.as_chunks_mut().0.split_at_mut(n);
        let layout = |t: &Tensor, k: usize, first: usize| {
            let row = rows.strided.strides[k].last().copied().unwrap_or(0);
            let start = (t.layout.offset as isize + rows.strided.offsets(first)[k]) as usize;
            RowsLayout { start, row, element: rows.steps[k] }
        };
        let size = self.out.dtype.size();
        // The number of rows that are interleaved in one slice of the result, or that are contiguous.
        let contiguous_rows = if self.inner == 1 { out.len() / size / length } else { self.inner };
        for (i, out) in out.chunks_mut(contiguous_rows * length * size).enumerate() {
            for lane in (0..contiguous_rows).step_by(BLOCK_ROWS) {
                let (first, count) = (first + i * contiguous_rows + lane, BLOCK_ROWS.min(contiguous_rows - lane));
                load_block(self.x.dtype, self.bytes[0], layout(self.x, 0, first), columns, count);
                if self.is_gradient() {
                    load_block(self.z.dtype, self.bytes[1], layout(self.z, 2, first), others, count);
                }
                compute_block(self.kind, &mut *columns, &mut *others);
                let to = match self.inner {
                    1 => RowsLayout { start: lane * length, row: length as isize, element: 1 },
                    inner => RowsLayout { start: lane, row: 1, element: inner as isize },
                };
                store_block(self.out.dtype, &columns[..length], out, to, count);
            }
        }
    }

    /// Returns the row of operand `k` at offset `at`: in place if possible, otherwise converted into `buffer`.
    fn read_row<'b, C: Number>(&'b self, t: &Tensor, k: usize, at: isize, buffer: &'b mut Vec<C>) -> &'b [C] {
        let start = (t.layout.offset as isize + at) as usize;
        read_or_convert((t.dtype, self.bytes[k.min(1)]), start, self.rows.steps[k], self.rows.n, buffer)
    }
}

vectorised! {
    /// Computes the operation on one row, in place in `row`; returns the number of elements of the result.
    fn compute_row<'a, C: Number>(simd: S, kind: RowOp, from: &'a [C], row: &'a mut [C], other: &'a [C], mask: MaskKind) -> usize {
        match kind {
            RowOp::Softmax => {
                let m = fold_simd::<Max, C, S>(simd, from);
                C::exp_each(row, from, |x| x.sub(m));
                let s = C::from_i32(1).div(fold_simd::<Add, C, S>(simd, row));
                row.iter_mut().for_each(|x| *x = x.mul(s));
                row.len()
            }
            RowOp::MaskedSoftmax => {
                let (seen, hidden) = row.split_at_mut(from.len());
                let low = C::from_f64(f64::NEG_INFINITY);
                seen.copy_from_slice(from);
                match mask {
                    MaskKind::None => {}
                    MaskKind::Keep => {
                        seen.iter_mut().zip(other).for_each(|(x, k)| *x = if k.is_true() { *x } else { low });
                    }
                    MaskKind::Add => seen.iter_mut().zip(other).for_each(|(x, a)| *x = x.add(*a)),
                }
                let m = fold_simd::<Max, C, S>(simd, seen);
                let m = if m == low { C::from_i32(0) } else { m };
                C::exp_in_place(seen, |x| x.sub(m));
                let s = fold_simd::<Add, C, S>(simd, seen);
                let scale = if s == C::from_i32(0) { s } else { C::from_i32(1).div(s) };
                seen.iter_mut().for_each(|x| *x = x.mul(scale));
                hidden.fill(C::from_i32(0));
                row.len()
            }
            RowOp::LogSoftmax => {
                let (m, s) = exp_sum(simd, from, false);
                let log_s = s.log();
                row.iter_mut().zip(from).for_each(|(y, x)| *y = x.sub(m).sub(log_s));
                row.len()
            }
            RowOp::LogSumExp => {
                let (m, s) = exp_sum(simd, from, true);
                row[0] = m.add(s.log());
                1
            }
            RowOp::SoftmaxGrad => {
                let s = fold_map::<Add, C, S>(simd, from, other, |y, g| y.mul(g));
                row.iter_mut().zip(from.iter().zip(other)).for_each(|(dx, (y, g))| *dx = g.sub(s).mul(*y));
                row.len()
            }
            RowOp::LogSoftmaxGrad => {
                let s = fold_simd::<Add, C, S>(simd, other);
                row.iter_mut().zip(from.iter().zip(other)).for_each(|(dx, (y, g))| *dx = g.sub(y.exp().mul(s)));
                row.len()
            }
        }
    }
}

/// Returns the maximum of the row and the sum of `exp(x - maximum)`. If `finite`, an infinite maximum is replaced by 0.
#[inline(always)]
fn exp_sum<C: Number, S: Simd>(simd: S, row: &[C], finite: bool) -> (C, C) {
    let m = fold_simd::<Max, C, S>(simd, row);
    let m = if finite && m.to_f64().is_infinite() { C::from_i32(0) } else { m };
    let (mut part, mut sum) = ([C::from_i32(0); EXP_TILE], C::from_i32(0));
    for row in row.chunks(EXP_TILE) {
        let part = &mut part[..row.len()];
        C::exp_each(part, row, |x| x.sub(m));
        sum = sum.add(fold_simd::<Add, C, S>(simd, part));
    }
    (m, sum)
}

vectorised! {
    /// Computes the losses of rows of logits, 0 for ignored rows. With a `scale`, the rows are overwritten with the gradients of the
    /// logits, times `scale`.
    fn entropy_of_rows<'a, C: Number, F: Fn(i64) -> bool>(
        simd: S, rows: &'a mut [C], targets: &'a [i64], is_used: F, losses: &'a mut [C], scale: Option<C>
    ) {
        let classes = rows.len() / targets.len();
        let zero = C::from_i32(0);
        for ((row, &target), loss) in rows.chunks_mut(classes).zip(targets).zip(&mut *losses) {
            let top = fold_simd::<Max, C, S>(simd, row);
            row.iter_mut().for_each(|x| *x = x.sub(top));
            *loss = if is_used(target) { row[target as usize] } else { zero };
        }
        C::exp_in_place(rows, |x| x);
        let mut sums = [zero; BLOCK_ROWS];
        for (row, sum) in rows.chunks(classes).zip(&mut sums) {
            *sum = fold_simd::<Add, C, S>(simd, row);
        }
        for ((loss, sum), &target) in losses.iter_mut().zip(&sums).zip(targets) {
            let x = sum.log().sub(*loss);
            *loss = if is_used(target) { x } else { zero };
        }
        let Some(scale) = scale else { return };
        for ((row, &target), sum) in rows.chunks_mut(classes).zip(targets).zip(&sums) {
            if is_used(target) {
                let factor = scale.div(*sum);
                row.iter_mut().for_each(|x| *x = x.mul(factor));
                row[target as usize] = row[target as usize].sub(scale);
            } else {
                row.fill(zero);
            }
        }
    }
}

vectorised! {
    /// Counts the targets that are not ignored. The returned bool is true if all counted targets are valid classes.
    fn count_targets<'a, F: Fn(i64) -> bool>(_simd: S, targets: &'a [i64], is_used: F, classes: usize) -> (i64, bool) {
        targets.iter().fold((0, true), |(count, all_valid), &t| {
            let used = is_used(t);
            (count + i64::from(used), all_valid & (!used | ((t as u64) < classes as u64)))
        })
    }
}

pub(crate) fn cross_entropy(entropy: &LabelEntropy) -> Result<Tensor> {
    let LabelEntropy { logits: x, labels, options, dtype, grad, .. } = *entropy;
    let shape = if options.reduction == LossReduction::None { labels.shape().clone() } else { ().into() };
    let out = Tensor::empty_with_shape(shape, dtype, x.device())?;
    let writes: Vec<_> = std::iter::once(&out).chain(grad).map(|t| &t.storage).collect();
    with_host(&[&x.storage, &labels.storage], &writes, |reads, writes| {
        let mut loaded = Vec::new();
        let (stride, start) = (labels.strides()[0], labels.layout.offset);
        let targets = read_or_convert((labels.dtype, reads[1]), start, stride, labels.numel(), &mut loaded);
        let (loss, grad) = writes.split_first_mut().expect("the loss at least");
        let grad = grad.first_mut().map(|g| &mut **g);
        for_float!(x.dtype.compute(), C => compute_losses::<C>(x, reads[0], targets, options, (dtype, loss), grad))
    })??;
    Ok(out)
}

/// Computes the losses of all rows, the gradients if requested, and the reduced loss.
fn compute_losses<C: Number>(
    x: &Tensor,
    bytes: &[u8],
    targets: &[i64],
    options: CrossEntropy,
    (dtype, out): (DType, &mut [u8]),
    grad: Option<&mut [u8]>,
) -> Result<()> {
    let classes = x.shape().dims()[1];
    let is_used = |t: i64| t != options.ignore_index;
    let (count, all_valid) = count_targets(targets, is_used, classes);
    if !all_valid && let Some(&index) = targets.iter().find(|t| is_used(**t) && !(0..classes as i64).contains(*t)) {
        return Err(Error::IndexOutOfRange { op: "cross_entropy", index, size: classes });
    }
    let count = C::from_i64(if options.reduction == LossReduction::Mean { count } else { 1 });
    let (zero, steps, size) = (C::from_i32(0), x.strides(), x.dtype.size());
    let scale = grad.is_some().then(|| C::from_i32(1).div(count));
    let rows = (LOSS_TASK_ELEMENTS / classes.max(1)).clamp(1, BLOCK_ROWS);
    let short = is_faster_in_blocks(targets.len(), classes);
    let mut losses = vec![zero; targets.len()];
    // Computes the losses of rows, beginning with row `first`, and the gradients if `grad` is given.
    let part = |first: usize, losses: &mut [C], mut grad: Option<&mut [u8]>| {
        let mut buffer = vec![zero; if short { BLOCK_ROWS } else { rows.min(losses.len()) } * classes];
        for (b, losses) in losses.chunks_mut(rows).enumerate() {
            let (n, first) = (losses.len(), first + b * rows);
            let targets = &targets[first..][..n];
            let start = (x.layout.offset as isize + first as isize * steps[0]) as usize;
            if short {
                let columns = buffer.as_chunks_mut().0;
                load_block(x.dtype, bytes, RowsLayout { start, row: steps[0], element: steps[1] }, columns, n);
                entropy_of_block(columns, targets, is_used, losses, scale);
            } else {
                for (i, row) in buffer.chunks_mut(classes).take(n).enumerate() {
                    load_tile(x.dtype, bytes, start.wrapping_add_signed(i as isize * steps[0]), steps[1], row);
                }
                let rows = &mut buffer[..n * classes];
                entropy_of_rows(rows, targets, is_used, losses, scale);
            }
            let Some(grad) = &mut grad else { continue };
            let start = b * rows * classes;
            match short {
                true => {
                    let to = RowsLayout { start, row: classes as isize, element: 1 };
                    store_block(x.dtype, buffer.as_chunks().0, grad, to, n);
                }
                false => store_tile(x.dtype, &buffer[..n * classes], grad, start, 1),
            }
        }
    };
    if targets.len() * classes <= TASK_ELEMENTS {
        part(0, &mut losses, grad);
    } else {
        let mut data: SmallVec<[&mut [u8]; 2]> = SmallVec::new();
        data.push(bytemuck::cast_slice_mut(&mut losses));
        data.extend(grad.map(|grad| &mut grad[..targets.len() * classes * size]));
        let piece = if short { whole_blocks(BLOCKED_TASK_ELEMENTS, classes) } else { rows };
        let sizes = &[piece * size_of::<C>(), piece * classes * size][..data.len()];
        parallel::for_each_chunks(&mut data, sizes, |i, chunks| {
            let (losses, grad) = chunks.split_first_mut().expect("the losses at least");
            part(i * piece, bytemuck::cast_slice_mut(losses), grad.first_mut().map(|grad| &mut **grad));
        });
    }
    if options.reduction == LossReduction::None {
        store_tile(dtype, &losses, out, 0 as _, 1);
        return Ok(());
    }
    let blocks: SmallVec<[C; 16]> = losses.chunks(LOSS_SUM_ROWS).map(fold::<Add, C>).collect();
    let total = fold::<Add, C>(&blocks);
    store_tile(dtype, &[total.div(count)], out, 0 as _, 1);
    Ok(())
}

/// True if `rows` rows of `n` elements are computed faster in blocks. A block with few rows takes as long as a full block.
fn is_faster_in_blocks(rows: usize, n: usize) -> bool {
    n <= MAX_SHORT_ROW_LEN && rows >= usize::max(8, n / 2)
}

/// Returns the number of rows of `n` elements that fill whole blocks and together have about `elements` elements.
fn whole_blocks(elements: usize, n: usize) -> usize {
    elements.div_ceil(n).next_multiple_of(BLOCK_ROWS)
}

/// The elements of one column: one element of each row in a block.
type Column<C> = [C; BLOCK_ROWS];

/// The location of a block of rows: its first element, the stride between rows and the stride along a row.
#[derive(Clone, Copy)]
struct RowsLayout {
    start: usize,
    row: isize,
    element: isize,
}

impl RowsLayout {
    fn offset_of(self, row: usize, column: usize) -> usize {
        self.start.wrapping_add_signed(row as isize * self.row + column as isize * self.element)
    }
}

/// Reads a block of `rows` rows and transposes it into columns.
fn load_block<C: Number>(dtype: DType, bytes: &[u8], from: RowsLayout, columns: &mut [Column<C>], rows: usize) {
    let n = columns.len();
    if from.element == 1 && from.row == n as isize {
        let mut converted = Vec::new();
        let elements: &[C] = read_or_convert((dtype, bytes), from.start, 1, n * rows, &mut converted);
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
fn store_block<C: Number>(dtype: DType, columns: &[Column<C>], bytes: &mut [u8], to: RowsLayout, rows: usize) {
    // Contiguous writes are preferred to contiguous reads, because strided stores cost more than strided loads.
    if to.element == 1 && columns.len() >= 8 {
        let mut converted = [C::from_i32(0); MAX_SHORT_ROW_LEN];
        for lane in 0..rows.min(BLOCK_ROWS) {
            let at = to.offset_of(lane, 0);
            let fill = |row: &mut [C]| columns.iter().zip(row).for_each(|(column, x)| *x = column[lane]);
            if dtype == C::COMPUTE.dtype() {
                fill(&mut bytemuck::cast_slice_mut(bytes)[at..][..columns.len()]);
            } else {
                fill(&mut converted[..columns.len()]);
                store_tile(dtype, &converted[..columns.len()], bytes, at, 1);
            }
        }
        return;
    }
    for (j, column) in columns.iter().enumerate() {
        store_tile(dtype, &column[..rows], bytes, to.offset_of(0, j), to.row);
    }
}

/// Folds each row to one element. The rounding error of a sum of n elements is at most that of n / 4 + 5 roundings.
#[inline(always)]
fn fold_columns<C: Number>(columns: &[Column<C>], from: C, join: impl Fn(C, C) -> C) -> Column<C> {
    let mut all = [from; BLOCK_ROWS];
    fold_lines(columns.as_flattened(), &mut all, join);
    all
}

/// Applies `f` to each element, in a loop because `array::map` is not vectorised.
#[inline(always)]
fn map_column<C: Number>(mut column: Column<C>, f: impl Fn(C) -> C) -> Column<C> {
    column.iter_mut().for_each(|x| *x = f(*x));
    column
}

#[inline(always)]
fn max_of_rows<C: Number>(columns: &[Column<C>]) -> Column<C> {
    fold_columns(columns, C::from_f64(f64::NEG_INFINITY), C::max)
}

vectorised! {
    /// Computes the [`RowOp`] for a block and writes the result to its columns; a result with one element per row goes to the first
    /// column. `others` is the second operand, or scratch memory if there is none.
    fn compute_block<'a, C: Number>(
        _simd: S, kind: RowOp, columns: &'a mut [Column<C>], others: &'a mut [Column<C>]
    ) {
        let (zero, one) = (C::from_i32(0), C::from_i32(1));
        let add = |columns: &[Column<C>]| fold_columns(columns, zero, C::add);
        match kind {
            RowOp::Softmax => {
                let top = max_of_rows(columns);
                each_line(columns.as_flattened_mut(), &top, C::sub);
                C::exp_in_place(columns.as_flattened_mut(), |x| x);
                let scale = map_column(add(columns), |s| one.div(s));
                each_line(columns.as_flattened_mut(), &scale, C::mul);
            }
            RowOp::LogSoftmax | RowOp::LogSumExp => {
                let mut top = max_of_rows(columns);
                if kind == RowOp::LogSumExp {
                    // An infinite maximum is replaced by 0, because subtracting infinity from an infinite element would give NaN.
                    top = map_column(top, |m| if m.abs() == C::from_f64(f64::INFINITY) { zero } else { m });
                }
                each_line(columns.as_flattened_mut(), &top, C::sub);
                C::exp_each(others.as_flattened_mut(), columns.as_flattened(), |x| x);
                let log = map_column(add(others), C::log);
                match kind {
                    RowOp::LogSumExp => {
                        each(&mut top, &log, C::add);
                        columns[0] = top;
                    }
                    _ => each_line(columns.as_flattened_mut(), &log, C::sub),
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
    fn entropy_of_block<'a, C: Number, F: Fn(i64) -> bool>(
        _simd: S, columns: &'a mut [Column<C>], targets: &'a [i64], counts: F, losses: &'a mut [C], scale: Option<C>
    ) {
        let (zero, none) = (C::from_i32(0), C::from_i32(-1));
        let mut labels = [none; BLOCK_ROWS];
        for (label, &target) in labels.iter_mut().zip(targets) {
            *label = if counts(target) { C::from_i32(target as i32) } else { none };
        }
        let top = max_of_rows(columns);
        each_line(columns.as_flattened_mut(), &top, C::sub);
        let mut label_logits = [zero; BLOCK_ROWS];
        for (j, column) in columns.iter().enumerate() {
            let j = C::from_i32(j as i32);
            for i in 0..BLOCK_ROWS {
                label_logits[i] = label_logits[i].add(if labels[i] == j { column[i] } else { zero });
            }
        }
        C::exp_in_place(columns.as_flattened_mut(), |x| x);
        let sum = fold_columns(columns, zero, C::add);
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

impl SoftmaxJob<'_> {
    /// Computes all rows. Interleaved rows occupy one slice of `n * inner` elements, and are evenly spaced in it.
    fn strided_rows<C: Number>(&self, out: &mut [u8]) {
        let (n, inner, size) = (self.rows.n, self.inner, self.out.dtype.size());
        let folded = self.kind == RowOp::LogSumExp;
        let (length, zero) = (if folded { 1 } else { n }, C::from_i32(0));
        if n * inner <= PIECE_ELEMENTS {
            let per_job = (PIECE_ELEMENTS / 4).div_ceil(n * inner);
            return parallel::for_each_chunk(out, per_job * length * inner * size, |i, out| {
                let (mut tiles, mut row_statistics) = (new_tiles(inner), vec![zero; 2 * inner]);
                let (top, sum) = row_statistics.split_at_mut(inner);
                for (o, out) in out.chunks_mut(length * inner * size).enumerate() {
                    let first = (i * per_job + o) * inner;
                    if self.keeps_exponentials::<C>() {
                        let exponentials = bytemuck::cast_slice_mut(out);
                        self.fold_piece(first, 0..n, [&mut *top, &mut *sum], [&mut *exponentials, &mut []]);
                        merge_pieces(self.kind, top, sum, &[], inner);
                        scale_lines(exponentials, top, top, sum);
                        continue;
                    }
                    self.fold_piece(first, 0..n, [&mut *top, &mut *sum], tiles.each_mut().map(|tile| &mut tile[..]));
                    merge_pieces(self.kind, top, sum, &[], inner);
                    match folded {
                        true => store_tile(self.out.dtype, top, out, 0, 1),
                        false => self.store_results([first, 0], [&*top, &*sum], &mut tiles, out),
                    }
                }
            });
        }
        let width = inner.min(MAX_LINE_LEN);
        let lines = (PIECE_ELEMENTS / width).clamp(1, MAX_LINES);
        let (across, along) = (inner.div_ceil(width), n.div_ceil(lines));
        let slices = out.len() / size / length / inner;
        let mut pieces = vec![zero; slices * across * along * 2 * width];
        // Exponentials are kept in the result, if the elements of a piece are contiguous there.
        let kept = across == 1 && self.keeps_exponentials::<C>();
        let exponentials: &mut [C] = if kept { bytemuck::cast_slice_mut(&mut *out) } else { &mut [] };
        let results = exponentials.chunks_mut(n * inner).flat_map(|slice| slice.chunks_mut(lines * inner));
        let results = results.chain(std::iter::repeat_with(|| &mut [][..]));
        // Pieces are ordered by slice, then by position within the lines, then by range of lines.
        let mut jobs: Vec<(&mut [C], &mut [C])> = pieces.chunks_mut(2 * width).zip(results).collect();
        parallel::for_each(&mut jobs, |i, (piece, exponentials)| {
            let (line, column, slice) = (i % along * lines, i / along % across * width, i / along / across);
            let (top, sum) = piece.split_at_mut(width);
            let width = width.min(inner - column);
            let statistics = [&mut top[..width], &mut sum[..width]];
            let (lines, first, mut tiles) = (line..n.min(line + lines), slice * inner + column, new_tiles(width));
            let tiles = tiles.each_mut().map(|tile| &mut tile[..]);
            let [xs, zs] = tiles;
            self.fold_piece(first, lines, statistics, [if kept { exponentials } else { xs }, zs]);
        });
        let mut row_statistics = vec![zero; slices * across * 2 * width];
        parallel::for_each_chunk(&mut row_statistics, 2 * width, |i, row_statistics| {
            let (top, sum) = row_statistics.split_at_mut(width);
            let pieces = &pieces[i * along * 2 * width..][..along * 2 * width];
            merge_pieces(self.kind, top, sum, pieces, width);
        });
        if kept {
            let results = exponentials.chunks_mut(n * inner).flat_map(|slice| slice.chunks_mut(lines * inner));
            let mut jobs: Vec<(&[C], &mut [C])> = pieces.chunks(2 * width).zip(results).collect();
            return parallel::for_each(&mut jobs, |i, (piece, exponentials)| {
                let (top, sum) = row_statistics[i / along * 2 * width..][..2 * width].split_at(width);
                scale_lines(exponentials, &piece[..width], top, sum);
            });
        }
        let statistics_of = |slice: usize, column: usize| {
            let row_statistics = &row_statistics[(slice * across + column / width) * 2 * width..][..2 * width];
            let (top, sum) = row_statistics.split_at(width);
            let width = width.min(inner - column);
            [&top[..width], &sum[..width]]
        };
        // Whole lines of the result, which are contiguous within a slice.
        let per_job = (PIECE_ELEMENTS / 4).div_ceil(inner);
        parallel::for_each_chunk(out, per_job * inner * size, |i, out| {
            let mut tiles = new_tiles(width);
            let (mut at, mut rest) = (i * per_job, out);
            while !rest.is_empty() {
                let (slice, line) = (at / length, at % length);
                let count = (length - line).min(rest.len() / size / inner);
                let (now, later) = rest.split_at_mut(count * inner * size);
                (at, rest) = (at + count, later);
                for column in (0..inner).step_by(width) {
                    let (statistics, first) = (statistics_of(slice, column), slice * inner + column);
                    match folded {
                        true => store_tile(self.out.dtype, statistics[0], now, column, 1),
                        false if across == 1 => self.store_results([first, line], statistics, &mut tiles, now),
                        false => now.chunks_mut(inner * size).enumerate().for_each(|(j, now)| {
                            let now = &mut now[column * size..][..statistics[0].len() * size];
                            self.store_results([first, line + j], statistics, &mut tiles, now);
                        }),
                    }
                }
            }
        });
    }

    /// Returns the number of elements of a row's result.
    fn result_len(&self) -> usize {
        if self.kind == RowOp::LogSumExp { 1 } else { self.rows.n }
    }

    fn is_gradient(&self) -> bool {
        matches!(self.kind, RowOp::SoftmaxGrad | RowOp::LogSoftmaxGrad)
    }

    /// Loads lines of operand `k`, starting at line `line`, for `width` rows starting at row `first`.
    fn load<C: Number>(&self, k: usize, first: usize, line: usize, width: usize, to: &mut [C]) {
        let (t, bytes) = if k == 0 { (self.x, self.bytes[0]) } else { (self.z, self.bytes[1]) };
        let (strided, step) = (&self.rows.strided, self.rows.steps[k]);
        let row = strided.strides[k].last().copied().unwrap_or(0);
        let mut start = t.layout.offset as isize + strided.offsets(first)[k] + line as isize * step;
        if row == 1 && step == width as isize {
            return load_tile(t.dtype, bytes, start as usize, 1, to);
        }
        for to in to.chunks_mut(width) {
            load_tile(t.dtype, bytes, start as usize, row, to);
            start += step;
        }
    }

    /// True if the exponentials that are added up are stored in the result, and scaled there.
    fn keeps_exponentials<C: Number>(&self) -> bool {
        self.kind == RowOp::Softmax && self.out.dtype == C::COMPUTE.dtype()
    }

    /// Computes the maximum and the sum of each row over some lines, for the rows starting at row `first`. If all lines fit in the first
    /// buffer, they are read once. Of softmax, the buffer then holds the exponentials.
    fn fold_piece<C: Number>(
        &self,
        first: usize,
        lines: Range<usize>,
        statistics: [&mut [C]; 2],
        buffers: [&mut [C]; 2],
    ) {
        let ([top, sum], [xs, zs]) = (statistics, buffers);
        let (width, kind) = (top.len(), self.kind);
        let at_a_time = (TILE_ELEMENTS / width).max(1);
        top.fill(C::from_f64(f64::NEG_INFINITY));
        sum.fill(C::from_i32(0));
        let once = lines.len() * width <= xs.len();
        let range = |line: usize| {
            let at = if once { (line - lines.start) * width } else { 0 };
            at..at + width * at_a_time.min(lines.end - line)
        };
        if !self.is_gradient() {
            for line in lines.clone().step_by(at_a_time) {
                let x = &mut xs[range(line)];
                self.load(0, first, line, width, x);
                max_lines(x, top);
            }
        }
        for line in lines.clone().step_by(at_a_time) {
            let x = &mut xs[range(line)];
            if kind != RowOp::LogSoftmaxGrad && (self.is_gradient() || !once) {
                self.load(0, first, line, width, x);
            }
            let z = &mut zs[..if self.is_gradient() { x.len() } else { 0 }];
            self.load(2, first, line, width, z);
            add_lines(kind, x, z, top, sum);
        }
    }

    /// Computes the result's lines starting at line `line`, for rows starting at row `first`. The lines of these rows are contiguous in
    /// `out`.
    fn store_results<C: Number>(
        &self,
        [first, line]: [usize; 2],
        [top, sum]: [&[C]; 2],
        [xs, zs]: &mut Tiles<C>,
        out: &mut [u8],
    ) {
        let (width, size, kind) = (top.len(), self.out.dtype.size(), self.kind);
        let at_a_time = (TILE_ELEMENTS / width).max(1);
        for (i, out) in out.chunks_mut(at_a_time * width * size).enumerate() {
            let (line, elements) = (line + i * at_a_time, out.len() / size);
            let z = &mut zs[..if self.is_gradient() { elements } else { 0 }];
            self.load(2, first, line, width, z);
            if self.out.dtype == C::COMPUTE.dtype() {
                let x: &mut [C] = bytemuck::cast_slice_mut(out);
                self.load(0, first, line, width, x);
                compute_lines(kind, x, z, top, sum);
            } else {
                let x = &mut xs[..elements];
                self.load(0, first, line, width, x);
                compute_lines(kind, &mut *x, z, top, sum);
                store_tile(self.out.dtype, x, out, 0, 1);
            }
        }
    }
}

/// Buffers for lines of both operands.
type Tiles<C> = [Vec<C>; 2];

/// Returns buffers for lines of `width` elements.
fn new_tiles<C: Number>(width: usize) -> Tiles<C> {
    [0; 2].map(|_| vec![C::from_i32(0); TILE_ELEMENTS.max(width)])
}

#[inline(always)]
fn each<C: Number>(to: &mut [C], from: &[C], f: impl Fn(C, C) -> C) {
    to.iter_mut().zip(from).for_each(|(a, b)| *a = f(*a, *b));
}

/// Replaces each element by `f(element, column)`, where `column` is the element of `columns` in the same column.
#[inline(always)]
fn each_line<C: Number>(lines: &mut [C], columns: &[C], f: impl Fn(C, C) -> C) {
    lines.chunks_exact_mut(columns.len()).for_each(|line| each(line, columns, &f));
}

/// Folds lines into `all`, four lines at a time: sums have fewer rounding steps, and `all` is read a fourth as often.
#[inline(always)]
fn fold_lines<C: Number>(lines: &[C], all: &mut [C], join: impl Fn(C, C) -> C) {
    let width = all.len();
    let fours = lines.chunks_exact(4 * width);
    let rest = fours.remainder();
    for four in fours {
        let ((a, b), (c, d)) = (four[..2 * width].split_at(width), four[2 * width..].split_at(width));
        for (all, ((a, b), (c, d))) in all.iter_mut().zip(a.iter().zip(b).zip(c.iter().zip(d))) {
            *all = join(*all, join(join(*a, *b), join(*c, *d)));
        }
    }
    rest.chunks_exact(width).for_each(|line| each(all, line, &join));
}

vectorised! {
    fn max_lines<'a, C: Number>(_simd: S, x: &'a [C], top: &'a mut [C]) {
        fold_lines(x, top, C::max);
    }
}

vectorised! {
    /// Adds the terms of the lines `x` to the rows' sums. The lines are overwritten.
    fn add_lines<'a, C: Number>(_simd: S, kind: RowOp, x: &'a mut [C], z: &'a mut [C], top: &'a [C], sum: &'a mut [C]) {
        match kind {
            RowOp::SoftmaxGrad => {
                each(z, x, C::mul);
                fold_lines(z, sum, C::add);
            }
            RowOp::LogSoftmaxGrad => fold_lines(z, sum, C::add),
            _ => {
                // If all elements of a row are -inf, the row's sum is 0.
                let (low, zero) = (C::from_f64(f64::NEG_INFINITY), C::from_i32(0));
                each_line(x, top, |x, top| x.sub(if top == low { zero } else { top }));
                C::exp_in_place(x, |x| x);
                fold_lines(x, sum, C::add);
            }
        }
    }
}

vectorised! {
    /// Combines the maxima and sums of all pieces of each row; without pieces, uses the values already in `top` and `sum`. For logsumexp,
    /// the result replaces `top`.
    fn merge_pieces<'a, C: Number>(_simd: S, kind: RowOp, top: &'a mut [C], sum: &'a mut [C], pieces: &'a [C], width: usize) {
        let forward = !matches!(kind, RowOp::SoftmaxGrad | RowOp::LogSoftmaxGrad);
        let pieces = || pieces.chunks_exact(2 * width).map(|piece| piece.split_at(width));
        let mut factors = vec![C::from_i32(0); if forward { width } else { 0 }];
        if let Some((first, _)) = pieces().next() {
            top.copy_from_slice(first);
            sum.fill(C::from_i32(0));
        }
        pieces().skip(1).for_each(|(other, _)| each(top, other, C::max));
        for (other, part) in pieces() {
            match forward {
                true => {
                    factors.copy_from_slice(other);
                    each(&mut factors, top, C::sub);
                    C::exp_in_place(&mut factors, |x| x);
                    each(&mut factors, part, C::mul);
                    each(sum, &factors, C::add);
                }
                false => each(sum, part, C::add),
            }
        }
        match kind {
            RowOp::Softmax => sum.iter_mut().for_each(|s| *s = C::from_i32(1).div(*s)),
            RowOp::LogSoftmax => sum.iter_mut().for_each(|s| *s = s.log()),
            RowOp::LogSumExp => {
                let infinity = C::from_f64(f64::INFINITY);
                each(top, sum, |top, s| if top.abs() == infinity { top } else { top.add(s.log()) });
            }
            _ => {}
        }
    }
}

vectorised! {
    /// Scales exponentials of differences from `near`, the maxima of some lines, to softmax, given the maxima of all lines and the
    /// reciprocals of their sums.
    fn scale_lines<'a, C: Number>(_simd: S, x: &'a mut [C], near: &'a [C], top: &'a [C], sum: &'a [C]) {
        let mut factors = near.to_vec();
        each(&mut factors, top, C::sub);
        C::exp_in_place(&mut factors, |x| x);
        each(&mut factors, sum, C::mul);
        each_line(x, &factors, C::mul);
    }
}

vectorised! {
    /// Computes the [`RowOp`] for lines, given the maxima and sums of their rows.
    fn compute_lines<'a, C: Number>(_simd: S, kind: RowOp, x: &'a mut [C], z: &'a [C], top: &'a [C], sum: &'a [C]) {
        match kind {
            RowOp::Softmax => {
                each_line(x, top, C::sub);
                C::exp_in_place(x, |x| x);
                each_line(x, sum, C::mul);
            }
            RowOp::LogSoftmax => {
                each_line(x, top, C::sub);
                each_line(x, sum, C::sub);
            }
            RowOp::SoftmaxGrad => {
                for (x, z) in x.chunks_exact_mut(sum.len()).zip(z.chunks_exact(sum.len())) {
                    for (y, (g, s)) in x.iter_mut().zip(z.iter().zip(sum)) {
                        *y = g.sub(*s).mul(*y);
                    }
                }
            }
            RowOp::LogSoftmaxGrad => {
                C::exp_in_place(x, |x| x);
                each_line(x, sum, C::mul);
                each(x, z, |y, g| g.sub(y));
            }
            RowOp::LogSumExp | RowOp::MaskedSoftmax => {
                unreachable!("one is its statistics, the other along the last dim")
            }
        }
    }
}

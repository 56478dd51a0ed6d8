//! Softmax and related row operations on the CPU. Rows are computed one at a time in the compute type; short rows are computed in
//! transposed blocks ([`short_rows`]), and rows along a dim other than the last side by side ([`strided_rows`]).

use pulp::Simd;
use smallvec::SmallVec;

use crate::backend::cpu::accumulate::{Add, Max, fold, fold_map, fold_simd};
use crate::backend::cpu::convert::{load_tile, read_or_convert, store_tile};
use crate::backend::cpu::dispatch::for_float;
use crate::backend::cpu::scalar::Number;
use crate::backend::cpu::short_rows::{BLOCK_ROWS, RowsLayout, compute_block, entropy_of_block};
use crate::backend::cpu::vectorised::vectorised;
use crate::backend::cpu::{short_rows, strided_rows};
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

/// Computes the [`RowOp`] for every row.
pub(crate) fn run_softmax(softmax: &Softmax) -> Result<()> {
    let (rows, &Softmax { kind, x, z, out, d, .. }) = (&softmax.rows(), softmax);
    with_host(&[&x.storage, &z.storage], &[&out.storage], |reads, writes| {
        let job = SoftmaxJob {
            kind,
            x,
            z,
            bytes: [reads[0], reads[1]],
            out,
            rows,
            inner: out.shape().dims()[d + 1..].iter().product(),
        };
        let start = out.layout.offset * out.dtype.size();
        let to = &mut writes[0][start..][..out.numel() * out.dtype.size()];
        for_float!(x.dtype.compute(), C => job.run::<C>(to));
    })
}

/// A row operation, and the bytes of its operands' storages.
pub(crate) struct SoftmaxJob<'a> {
    pub(crate) kind: RowOp,
    pub(crate) x: &'a Tensor,
    pub(crate) z: &'a Tensor,
    pub(crate) bytes: [&'a [u8]; 2],
    pub(crate) out: &'a Tensor,
    pub(crate) rows: &'a SoftmaxRows,
    /// The product of the sizes after the row's dim, which is the number of rows that are interleaved in a slice of the output.
    pub(crate) inner: usize,
}

impl SoftmaxJob<'_> {
    /// Runs the operation. The output is partitioned into slices that hold whole rows.
    fn run<C: Number>(&self, out: &mut [u8]) {
        let length = if self.kind == RowOp::LogSumExp { 1 } else { self.rows.n };
        let slice = (self.inner * length).max(1);
        let (n, count) = (self.rows.n, self.rows.count());
        // True if rows are evenly spaced: either all rows, or the rows that are interleaved in one slice of the result.
        let even = self.kind != RowOp::MaskedSoftmax
            && match self.inner {
                1 => self.rows.strided.dims.len() <= 1,
                inner => self.rows.strided.dims.last().is_some_and(|&last| last % inner == 0),
            };
        let whole = self.inner * n <= strided_rows::PIECE_ELEMENTS;
        let short = even
            && if self.inner == 1 {
                short_rows::is_faster(count, n)
            } else {
                whole && short_rows::is_faster(self.inner, n)
            };
        if even && !short && self.inner >= strided_rows::MIN_ROWS {
            return self.strided_rows::<C>(out);
        }
        let outer_per_task = match short {
            true if self.inner == 1 && count * n <= TASK_ELEMENTS => count,
            true if self.inner == 1 => short_rows::whole_blocks(BLOCKED_TASK_ELEMENTS, n),
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
        let has_second_operand =
            matches!(self.kind, RowOp::SoftmaxGrad | RowOp::LogSoftmaxGrad) || mask != MaskKind::None;
        let (mut one, mut other) = (Vec::new(), Vec::new());
        let mut compute = |i: usize, row: &mut [C]| {
            let at = rows.strided.offsets(first + i);
            let from = self.read_row(self.x, 0, at[0], &mut one);
            let other = if has_second_operand { self.read_row(self.z, 2, at[2], &mut other) } else { &[] };
            let from = &from[..rows.mask.visible_len(first + i, n)];
            compute_row(self.kind, from, row, other, mask)
        };
        let length = if self.kind == RowOp::LogSumExp { 1 } else { n };
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
        let length = if self.kind == RowOp::LogSumExp { 1 } else { n };
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
                short_rows::load(self.x.dtype, self.bytes[0], layout(self.x, 0, first), columns, count);
                if matches!(self.kind, RowOp::SoftmaxGrad | RowOp::LogSoftmaxGrad) {
                    short_rows::load(self.z.dtype, self.bytes[1], layout(self.z, 2, first), others, count);
                }
                compute_block(self.kind, &mut *columns, &mut *others);
                let to = match self.inner {
                    1 => RowsLayout { start: lane * length, row: length as isize, element: 1 },
                    inner => RowsLayout { start: lane, row: 1, element: inner as isize },
                };
                short_rows::store(self.out.dtype, &columns[..length], out, to, count);
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
    let short = short_rows::is_faster(targets.len(), classes);
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
                short_rows::load(x.dtype, bytes, RowsLayout { start, row: steps[0], element: steps[1] }, columns, n);
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
                    short_rows::store(x.dtype, buffer.as_chunks().0, grad, to, n);
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
        let piece = if short { short_rows::whole_blocks(BLOCKED_TASK_ELEMENTS, classes) } else { rows };
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

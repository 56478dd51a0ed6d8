//! Softmax of rows along a dim other than the last. Neighbouring rows are interleaved in memory: element i of all of them forms a
//! contiguous line. First, pieces (several lines each) are folded to maxima and sums; then the result's lines are computed in memory
//! order. All threads therefore have work even for few rows. The division into pieces does not depend on the number of threads.

use crate::backend::cpu::convert::{load_tile, store_tile};
use crate::backend::cpu::scalar::Number;
use crate::backend::cpu::softmax::SoftmaxJob;
use crate::backend::cpu::vectorised::vectorised;
use crate::backend::problem::softmax::RowOp;
use crate::device::cpu::parallel;

/// The minimum number of neighbouring rows for this method.
pub(crate) const MIN_ROWS: usize = 8;
/// The number of elements in a piece, which stays in the L2 cache while it is read twice.
pub(crate) const PIECE_ELEMENTS: usize = 1 << 15;
/// The maximum number of elements in a line of a piece.
const MAX_LINE_LEN: usize = 2048;
/// The maximum number of lines in a piece. It bounds the error of a sum of n elements to n / 4 + n / MAX_LINES + 5 roundings.
const MAX_LINES: usize = 1024;
/// The number of elements computed at a time, in whole lines.
const TILE_ELEMENTS: usize = 2048;

impl SoftmaxJob<'_> {
    /// Computes all rows. Interleaved rows occupy one slice of `n * inner` elements, and are evenly spaced in it.
    pub(crate) fn strided_rows<C: Number>(&self, out: &mut [u8]) {
        let (n, inner, size) = (self.rows.n, self.inner, self.out.dtype.size());
        let folded = self.kind == RowOp::LogSumExp;
        let (length, zero) = (if folded { 1 } else { n }, C::from_i32(0));
        if n * inner <= PIECE_ELEMENTS {
            let per_job = (PIECE_ELEMENTS / 4).div_ceil(n * inner);
            return parallel::for_each_chunk(out, per_job * length * inner * size, |i, out| {
                let (mut tiles, mut row_statistics) = (Tiles::new(inner), vec![zero; 2 * inner]);
                let (top, sum) = row_statistics.split_at_mut(inner);
                for (o, out) in out.chunks_mut(length * inner * size).enumerate() {
                    let first = (i * per_job + o) * inner;
                    self.fold_piece(first, 0..n, &mut tiles, top, sum);
                    merge_pieces(self.kind, top, sum, &[], inner);
                    match folded {
                        true => store_tile(self.out.dtype, top, out, 0, 1),
                        false => self.store_results(first, 0, &mut tiles, top, sum, out),
                    }
                }
            });
        }
        let width = inner.min(MAX_LINE_LEN);
        let lines = (PIECE_ELEMENTS / width).clamp(1, MAX_LINES);
        let (across, along) = (inner.div_ceil(width), n.div_ceil(lines));
        let slices = out.len() / size / length / inner;
        let mut pieces = vec![zero; slices * across * along * 2 * width];
        // Pieces are ordered by slice, then by range of lines, then by position within the lines.
        parallel::for_each_chunk(&mut pieces, 2 * width, |i, piece| {
            let (line, column, slice) = (i % along * lines, i / along % across * width, i / along / across);
            let (top, sum) = piece.split_at_mut(width);
            let width = width.min(inner - column);
            let end = n.min(line + lines);
            let first = slice * inner + column;
            self.fold_piece(first, line..end, &mut Tiles::new(width), &mut top[..width], &mut sum[..width]);
        });
        let mut row_statistics = vec![zero; slices * across * 2 * width];
        parallel::for_each_chunk(&mut row_statistics, 2 * width, |i, row_statistics| {
            let (top, sum) = row_statistics.split_at_mut(width);
            let pieces = &pieces[i * along * 2 * width..][..along * 2 * width];
            merge_pieces(self.kind, top, sum, pieces, width);
        });
        let statistics_of = |slice: usize, column: usize| {
            let row_statistics = &row_statistics[(slice * across + column / width) * 2 * width..][..2 * width];
            let (top, sum) = row_statistics.split_at(width);
            let width = width.min(inner - column);
            (&top[..width], &sum[..width])
        };
        // Whole lines of the result, which are contiguous within a slice.
        let per_job = (PIECE_ELEMENTS / 4).div_ceil(inner);
        parallel::for_each_chunk(out, per_job * inner * size, |i, out| {
            let mut tiles = Tiles::new(width);
            let (mut at, mut rest) = (i * per_job, out);
            while !rest.is_empty() {
                let (slice, line) = (at / length, at % length);
                let count = (length - line).min(rest.len() / size / inner);
                let (now, later) = rest.split_at_mut(count * inner * size);
                (at, rest) = (at + count, later);
                for column in (0..inner).step_by(width) {
                    let (top, sum) = statistics_of(slice, column);
                    match folded {
                        true => store_tile(self.out.dtype, top, now, column, 1),
                        false if across == 1 => self.store_results(slice * inner, line, &mut tiles, top, sum, now),
                        false => now.chunks_mut(inner * size).enumerate().for_each(|(j, now)| {
                            let now = &mut now[column * size..][..top.len() * size];
                            self.store_results(slice * inner + column, line + j, &mut tiles, top, sum, now);
                        }),
                    }
                }
            }
        });
    }

    fn has_second_operand(&self) -> bool {
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

    /// Computes the maximum and the sum of each row over some lines, for the rows starting at row `first`.
    fn fold_piece<C: Number>(
        &self,
        first: usize,
        lines: std::ops::Range<usize>,
        tiles: &mut Tiles<C>,
        top: &mut [C],
        sum: &mut [C],
    ) {
        let (width, kind) = (top.len(), self.kind);
        let at_a_time = (TILE_ELEMENTS / width).max(1);
        top.fill(C::from_f64(f64::NEG_INFINITY));
        sum.fill(C::from_i32(0));
        // Lines that fit in one tile are read once.
        let once = lines.len() <= at_a_time;
        if !self.has_second_operand() {
            for line in lines.clone().step_by(at_a_time) {
                let x = &mut tiles.x[..width * at_a_time.min(lines.end - line)];
                self.load(0, first, line, width, x);
                max_lines(x, top);
            }
        }
        for line in lines.clone().step_by(at_a_time) {
            let x = &mut tiles.x[..width * at_a_time.min(lines.end - line)];
            if kind != RowOp::LogSoftmaxGrad && (self.has_second_operand() || !once) {
                self.load(0, first, line, width, x);
            }
            let z = &mut tiles.z[..if self.has_second_operand() { x.len() } else { 0 }];
            self.load(2, first, line, width, z);
            add_lines(kind, x, z, top, sum);
        }
    }

    /// Computes the result's lines starting at line `line`, for rows starting at row `first`. The lines of these rows are contiguous in
    /// `out`.
    fn store_results<C: Number>(
        &self,
        first: usize,
        line: usize,
        tiles: &mut Tiles<C>,
        top: &[C],
        sum: &[C],
        out: &mut [u8],
    ) {
        let (width, size, kind) = (top.len(), self.out.dtype.size(), self.kind);
        let at_a_time = (TILE_ELEMENTS / width).max(1);
        for (i, out) in out.chunks_mut(at_a_time * width * size).enumerate() {
            let (line, elements) = (line + i * at_a_time, out.len() / size);
            let z = &mut tiles.z[..if self.has_second_operand() { elements } else { 0 }];
            self.load(2, first, line, width, z);
            if self.out.dtype == C::COMPUTE.dtype() {
                let x: &mut [C] = bytemuck::cast_slice_mut(out);
                self.load(0, first, line, width, x);
                compute_lines(kind, x, z, top, sum);
            } else {
                let x = &mut tiles.x[..elements];
                self.load(0, first, line, width, x);
                compute_lines(kind, &mut *x, z, top, sum);
                store_tile(self.out.dtype, x, out, 0, 1);
            }
        }
    }
}

/// Buffers for lines of both operands.
struct Tiles<C> {
    x: Vec<C>,
    z: Vec<C>,
}

impl<C: Number> Tiles<C> {
    fn new(width: usize) -> Tiles<C> {
        let len = TILE_ELEMENTS.max(width);
        Tiles { x: vec![C::from_i32(0); len], z: vec![C::from_i32(0); len] }
    }
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

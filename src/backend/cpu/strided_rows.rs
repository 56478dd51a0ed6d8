//! Softmax of rows along another dim than the last: neighbouring rows are contiguous, so that element i of each makes a line of
//! memory. Pieces of some lines are folded first, then the lines of the result are computed in memory order, so that all threads
//! have work however few rows there are. Pieces do not depend on the number of threads.

use crate::backend::cpu::convert::{load_tile, store_tile};
use crate::backend::cpu::scalar::Number;
use crate::backend::cpu::softmax::SoftmaxJob;
use crate::backend::cpu::vectorised::vectorised;
use crate::backend::problem::softmax::RowOp;
use crate::device::cpu::parallel;

/// Rows side by side that are worth it.
pub(crate) const NARROW: usize = 8;
/// Elements of a piece, which stays in the second-level cache between its two readings.
pub(crate) const PIECE: usize = 1 << 15;
/// The most elements of a line and the most lines that a piece has: a sum of n is off by at most n / 4 + n / LINES + 5 roundings.
const WIDTH: usize = 2048;
const LINES: usize = 1024;
/// Elements that are computed at a time, of whole lines.
const TILE: usize = 2048;

impl SoftmaxJob<'_> {
    /// The results of all rows, which are equally far apart where they share a stretch.
    pub(crate) fn strided_rows<C: Number>(&self, out: &mut [u8]) {
        let (n, inner, size) = (self.rows.n, self.inner, self.out.dtype.size());
        let folded = self.kind == RowOp::LogSumExp;
        let (length, zero) = (if folded { 1 } else { n }, C::from_i32(0));
        if n * inner <= PIECE {
            let per_job = (PIECE / 4).div_ceil(n * inner);
            return parallel::for_each_chunk(out, per_job * length * inner * size, |i, out| {
                let (mut tiles, mut facts) = (Tiles::new(inner), vec![zero; 2 * inner]);
                let (top, sum) = facts.split_at_mut(inner);
                for (o, out) in out.chunks_mut(length * inner * size).enumerate() {
                    let first = (i * per_job + o) * inner;
                    self.fold(first, 0..n, &mut tiles, top, sum);
                    join(self.kind, top, sum, &[], inner);
                    match folded {
                        true => store_tile(self.out.dtype, top, out, 0, 1),
                        false => self.results(first, 0, &mut tiles, top, sum, out),
                    }
                }
            });
        }
        let width = inner.min(WIDTH);
        let lines = (PIECE / width).clamp(1, LINES);
        let (across, along) = (inner.div_ceil(width), n.div_ceil(lines));
        let slices = out.len() / size / length / inner;
        let mut pieces = vec![zero; slices * across * along * 2 * width];
        // In the order of slices, stretches of lines, and pieces of those.
        parallel::for_each_chunk(&mut pieces, 2 * width, |i, piece| {
            let (line, column, slice) = (i % along * lines, i / along % across * width, i / along / across);
            let (top, sum) = piece.split_at_mut(width);
            let width = width.min(inner - column);
            let end = n.min(line + lines);
            let first = slice * inner + column;
            self.fold(first, line..end, &mut Tiles::new(width), &mut top[..width], &mut sum[..width]);
        });
        let mut facts = vec![zero; slices * across * 2 * width];
        parallel::for_each_chunk(&mut facts, 2 * width, |i, facts| {
            let (top, sum) = facts.split_at_mut(width);
            let pieces = &pieces[i * along * 2 * width..][..along * 2 * width];
            join(self.kind, top, sum, pieces, width);
        });
        let facts_of = |slice: usize, column: usize| {
            let facts = &facts[(slice * across + column / width) * 2 * width..][..2 * width];
            let (top, sum) = facts.split_at(width);
            let width = width.min(inner - column);
            (&top[..width], &sum[..width])
        };
        // Whole lines of the result, which lie one after another in all of its stretches.
        let per_job = (PIECE / 4).div_ceil(inner);
        parallel::for_each_chunk(out, per_job * inner * size, |i, out| {
            let mut tiles = Tiles::new(width);
            let (mut at, mut rest) = (i * per_job, out);
            while !rest.is_empty() {
                let (slice, line) = (at / length, at % length);
                let count = (length - line).min(rest.len() / size / inner);
                let (now, later) = rest.split_at_mut(count * inner * size);
                (at, rest) = (at + count, later);
                for column in (0..inner).step_by(width) {
                    let (top, sum) = facts_of(slice, column);
                    match folded {
                        true => store_tile(self.out.dtype, top, now, column, 1),
                        false if across == 1 => self.results(slice * inner, line, &mut tiles, top, sum, now),
                        false => now.chunks_mut(inner * size).enumerate().for_each(|(j, now)| {
                            let now = &mut now[column * size..][..top.len() * size];
                            self.results(slice * inner + column, line + j, &mut tiles, top, sum, now);
                        }),
                    }
                }
            }
        });
    }

    /// Whether there is a second operand.
    fn two(&self) -> bool {
        matches!(self.kind, RowOp::SoftmaxGrad | RowOp::LogSoftmaxGrad)
    }

    /// Lines from `line` on of `width` rows from `first` on.
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

    /// The greatest elements and the sums of some lines of rows from `first` on.
    fn fold<C: Number>(
        &self,
        first: usize,
        lines: std::ops::Range<usize>,
        tiles: &mut Tiles<C>,
        top: &mut [C],
        sum: &mut [C],
    ) {
        let (width, kind) = (top.len(), self.kind);
        let at_a_time = (TILE / width).max(1);
        top.fill(C::from_f64(f64::NEG_INFINITY));
        sum.fill(C::from_i32(0));
        // What fits is read once.
        let once = lines.len() <= at_a_time;
        if !self.two() {
            for line in lines.clone().step_by(at_a_time) {
                let x = &mut tiles.x[..width * at_a_time.min(lines.end - line)];
                self.load(0, first, line, width, x);
                greatest(x, top);
            }
        }
        for line in lines.clone().step_by(at_a_time) {
            let x = &mut tiles.x[..width * at_a_time.min(lines.end - line)];
            if kind != RowOp::LogSoftmaxGrad && (self.two() || !once) {
                self.load(0, first, line, width, x);
            }
            let z = &mut tiles.z[..if self.two() { x.len() } else { 0 }];
            self.load(2, first, line, width, z);
            add_up(kind, x, z, top, sum);
        }
    }

    /// Lines from `line` on of the results of rows from `first` on, which lie one after another.
    fn results<C: Number>(
        &self,
        first: usize,
        line: usize,
        tiles: &mut Tiles<C>,
        top: &[C],
        sum: &[C],
        out: &mut [u8],
    ) {
        let (width, size, kind) = (top.len(), self.out.dtype.size(), self.kind);
        let at_a_time = (TILE / width).max(1);
        for (i, out) in out.chunks_mut(at_a_time * width * size).enumerate() {
            let (line, elements) = (line + i * at_a_time, out.len() / size);
            let z = &mut tiles.z[..if self.two() { elements } else { 0 }];
            self.load(2, first, line, width, z);
            if self.out.dtype == C::COMPUTE.dtype() {
                let x: &mut [C] = bytemuck::cast_slice_mut(out);
                self.load(0, first, line, width, x);
                results(kind, x, z, top, sum);
            } else {
                let x = &mut tiles.x[..elements];
                self.load(0, first, line, width, x);
                results(kind, &mut *x, z, top, sum);
                store_tile(self.out.dtype, x, out, 0, 1);
            }
        }
    }
}

/// Where lines of both operands are put.
struct Tiles<C> {
    x: Vec<C>,
    z: Vec<C>,
}

impl<C: Number> Tiles<C> {
    fn new(width: usize) -> Tiles<C> {
        let len = TILE.max(width);
        Tiles { x: vec![C::from_i32(0); len], z: vec![C::from_i32(0); len] }
    }
}

#[inline(always)]
fn each<C: Number>(to: &mut [C], from: &[C], f: impl Fn(C, C) -> C) {
    to.iter_mut().zip(from).for_each(|(a, b)| *a = f(*a, *b));
}

/// `f` of each element and that of its column.
#[inline(always)]
fn each_line<C: Number>(lines: &mut [C], columns: &[C], f: impl Fn(C, C) -> C) {
    lines.chunks_exact_mut(columns.len()).for_each(|line| each(line, columns, &f));
}

/// Lines folded into `all`, four at a time: fewer roundings of sums, and `all` is read a fourth as often.
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
    fn greatest<'a, C: Number>(_simd: S, x: &'a [C], top: &'a mut [C]) {
        fold_lines(x, top, C::max);
    }
}

vectorised! {
    /// What is summed up of lines; they are lost.
    fn add_up<'a, C: Number>(_simd: S, kind: RowOp, x: &'a mut [C], z: &'a mut [C], top: &'a [C], sum: &'a mut [C]) {
        match kind {
            RowOp::SoftmaxGrad => {
                each(z, x, C::mul);
                fold_lines(z, sum, C::add);
            }
            RowOp::LogSoftmaxGrad => fold_lines(z, sum, C::add),
            _ => {
                // Of nothing but -inf the sum is 0.
                let (low, zero) = (C::from_f64(f64::NEG_INFINITY), C::from_i32(0));
                each_line(x, top, |x, top| x.sub(if top == low { zero } else { top }));
                C::exp_in_place(x, |x| x);
                fold_lines(x, sum, C::add);
            }
        }
    }
}

vectorised! {
    /// What rows need of their pieces, each with its greatest elements and sums; without any, of those that are there. Log-sums take
    /// the place of the greatest.
    fn join<'a, C: Number>(_simd: S, kind: RowOp, top: &'a mut [C], sum: &'a mut [C], pieces: &'a [C], width: usize) {
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
    /// What [`RowOp`] makes of lines.
    fn results<'a, C: Number>(_simd: S, kind: RowOp, x: &'a mut [C], z: &'a [C], top: &'a [C], sum: &'a [C]) {
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

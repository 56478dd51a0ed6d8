//! Scans on the CPU, accumulated in f64 or i64. Each step along a line waits for the previous step, so several lines of a cumulative sum or
//! product are computed at a time; lines along a dim other than the last are computed side by side in vectors. If the order of the
//! operations cannot change the result, a long line is split into pieces, whose totals are computed first.

use std::ops::Range;

use crate::backend::cpu::accumulate::{Add, CombineOp, Mul, combine_all, fold};
use crate::backend::cpu::convert::{load_tile, store_tile};
use crate::backend::cpu::lines::for_each_line;
use crate::backend::cpu::scalar::{Number, is_nan};
use crate::backend::problem::lines::Lines;
use crate::backend::problem::scan::{RunningReduction, Scan};
use crate::device::cpu::parallel;
use crate::storage::with_host;
use crate::{Compute, DType, Result, Tensor};

/// The number of elements in a job of the thread pool.
const JOB_ELEMENTS: usize = 1 << 13;
/// The number of elements in a piece of a long line.
const PIECE_LEN: usize = 1 << 15;
/// The minimum number of neighbouring lines that are computed side by side.
const MIN_LINES: usize = 8;
/// Maximum length of a line that is computed alone: the processor overlaps several such lines by itself.
const SHORT_LINE_LEN: usize = 64;
/// The number of contiguous lines that are computed at a time.
const LINES_AT_ONCE: usize = 4;
/// The number of elements of each line that are loaded at a time.
const TILE_LEN: usize = 512;

pub(crate) fn run_scan(s: &RunningReduction) -> Result<()> {
    match s.x.dtype.compute() {
        Compute::I64 => run_as::<i64>(s),
        _ => run_as::<f64>(s),
    }
}

fn run_as<C: Number>(s: &RunningReduction) -> Result<()> {
    let &RunningReduction { scan, x, d, values, indices } = s;
    let chosen = |reaches: fn(C, C) -> bool| {
        for_each_line::<C>(x, d, values, indices, |line, values, indices| {
            let (mut best, mut at) = (line[0], 0);
            for (i, (&element, (value, index))) in line.iter().zip(values.iter_mut().zip(indices)).enumerate() {
                if is_nan(element) || (!is_nan(best) && reaches(element, best)) {
                    (best, at) = (element, i as i64);
                }
                (*value, *index) = (best, at);
            }
        })
    };
    match scan {
        Scan::Sum => run_lines::<Add, C>(x, d, values, x.dtype != DType::F64),
        Scan::Prod => run_lines::<Mul, C>(x, d, values, C::COMPUTE == Compute::I64),
        Scan::LogSumExp => for_each_line::<C>(x, d, values, indices, |line, values, _| {
            let mut so_far = C::from_f64(f64::NEG_INFINITY);
            for (value, &element) in values.iter_mut().zip(line) {
                so_far = log_add_exp(so_far, element);
                *value = so_far;
            }
        }),
        Scan::Max => chosen(|a, b| a >= b),
        Scan::Min => chosen(|a, b| a <= b),
    }
}

/// Returns `log(exp(a) + exp(b))`.
fn log_add_exp<C: Number>(a: C, b: C) -> C {
    let greater = a.max(b);
    if greater.to_f64().is_infinite() { greater } else { greater.add(a.sub(b).abs().neg().exp().log1p()) }
}

/// Computes the running sum or product of every line. `splits` allows splitting lines into pieces. Splitting could change the result if
/// sums are no wider than the elements, or if products overflow.
fn run_lines<K: CombineOp, C: Number>(x: &Tensor, d: usize, values: &Tensor, splits: bool) -> Result<()> {
    let lines = Lines::new(x, d);
    let even = lines.strided.dims.last().is_none_or(|last| last % lines.inner == 0);
    let short = lines.inner == 1 && lines.n <= SHORT_LINE_LEN;
    if !even || short || (2..MIN_LINES).contains(&lines.inner) {
        return for_each_line::<C>(x, d, values, None, |line, values, _| {
            // The line is not copied first, because for a short line the copy would take as long as the sums.
            let mut total = K::identity();
            for (value, x) in values.iter_mut().zip(line) {
                total = K::combine(total, *x);
                *value = total;
            }
        });
    }
    let len = values.numel() * values.dtype.size();
    with_host(&[&x.storage], &[&values.storage], |reads, writes| {
        let job = ScanJob { x, bytes: reads[0], dtype: values.dtype, lines: &lines };
        job.run::<K, C>(&mut writes[0][..len], splits);
    })
}

struct ScanJob<'a> {
    x: &'a Tensor,
    bytes: &'a [u8],
    dtype: DType,
    lines: &'a Lines,
}

impl ScanJob<'_> {
    fn run<K: CombineOp, C: Number>(&self, out: &mut [u8], splits: bool) {
        let (n, inner, size) = (self.lines.n, self.lines.inner, self.dtype.size());
        let stretch = n * inner;
        if !splits || stretch <= PIECE_LEN {
            let side = if inner == 1 { LINES_AT_ONCE } else { 1 };
            let per_job = JOB_ELEMENTS.div_ceil(stretch).next_multiple_of(side);
            return parallel::for_each_chunk(out, per_job * stretch * size, |i, out| {
                for (j, out) in out.chunks_mut(side * stretch * size).enumerate() {
                    let first = (i * per_job + j * side) * inner;
                    match inner {
                        1 => self.scan_rows::<K, C>(first, out),
                        _ => self.scan_side_by_side::<K, C>(first, 0..n, &mut vec![K::identity(); inner], Some(out)),
                    }
                }
            });
        }
        let lines = (PIECE_LEN / inner).max(1);
        let along = n.div_ceil(lines);
        // For each piece, the total of all elements before the piece.
        let mut before = vec![K::identity::<C>(); out.len() / size / stretch * along * inner];
        parallel::for_each_chunk(&mut before, inner, |i, total| {
            let line = i % along * lines;
            let (first, lines) = (i / along * inner, line..n.min(line + lines));
            match inner {
                1 => total[0] = self.reduce_piece::<K, C>(first, lines),
                _ => self.scan_side_by_side::<K, C>(first, lines, total, None),
            }
        });
        for pieces in before.chunks_mut(along * inner) {
            let mut so_far = vec![K::identity::<C>(); inner];
            for piece in pieces.chunks_mut(inner) {
                for (now, piece) in so_far.iter_mut().zip(piece) {
                    let total = std::mem::replace(piece, *now);
                    *now = K::combine(*now, total);
                }
            }
        }
        let stretches = out.chunks_mut(stretch * size);
        let mut work: Vec<_> = stretches.flat_map(|out| out.chunks_mut(lines * inner * size)).collect();
        parallel::for_each(&mut work, |i, out| {
            let line = i % along * lines;
            let (first, lines) = (i / along * inner, line..n.min(line + lines));
            let before = &before[i * inner..][..inner];
            match inner {
                1 => self.scan_piece::<K, C>(first, lines, before[0], out),
                _ => self.scan_side_by_side::<K, C>(first, lines, &mut before.to_vec(), Some(out)),
            }
        });
    }

    /// Loads elements of line `line`, beginning at index `from`, to fill `to`.
    fn load<C: Number>(&self, line: usize, from: usize, to: &mut [C]) {
        let start =
            self.x.layout.offset as isize + self.lines.strided.offsets(line)[0] + from as isize * self.lines.step;
        load_tile(self.x.dtype, self.bytes, start as usize, self.lines.step, to);
    }

    /// Scans some elements of neighbouring lines, beginning at line `first`, one element of each line at a time. `so_far` holds the
    /// running total of each line.
    fn scan_side_by_side<K: CombineOp, C: Number>(
        &self,
        first: usize,
        elements: Range<usize>,
        so_far: &mut [C],
        mut out: Option<&mut [u8]>,
    ) {
        let (lines, width) = (self.lines, so_far.len());
        let next = lines.strided.strides[0].last().copied().unwrap_or(0);
        let mut start = self.x.layout.offset as isize + lines.strided.offsets(first)[0];
        start += elements.start as isize * lines.step;
        let mut now = vec![K::identity::<C>(); width];
        for i in 0..elements.len() {
            load_tile(self.x.dtype, self.bytes, start as usize, next, &mut now);
            start += lines.step;
            combine_all::<K, C>(so_far, &now);
            if let Some(out) = &mut out {
                store_tile(self.dtype, so_far, out, i * width, 1);
            }
        }
    }

    /// Scans whole lines, beginning at line `first`. `out` has room for at most [`LINES_AT_ONCE`] lines.
    fn scan_rows<K: CombineOp, C: Number>(&self, first: usize, out: &mut [u8]) {
        let n = self.lines.n;
        let count = out.len() / self.dtype.size() / n;
        let (mut tile, mut so_far) =
            ([K::identity::<C>(); LINES_AT_ONCE * TILE_LEN], [K::identity::<C>(); LINES_AT_ONCE]);
        for from in (0..n).step_by(TILE_LEN) {
            let len = TILE_LEN.min(n - from);
            let tile = &mut tile[..count * len];
            tile.chunks_exact_mut(len).enumerate().for_each(|(i, tile)| self.load(first + i, from, tile));
            scan_lines::<K, C>(tile, len, &mut so_far);
            for (i, tile) in tile.chunks_exact(len).enumerate() {
                store_tile(self.dtype, tile, out, i * n + from, 1);
            }
        }
    }

    /// Returns the total of some elements of a line.
    fn reduce_piece<K: CombineOp, C: Number>(&self, line: usize, elements: Range<usize>) -> C {
        let mut tile = [K::identity::<C>(); LINES_AT_ONCE * TILE_LEN];
        elements.clone().step_by(tile.len()).fold(K::identity(), |total, from| {
            let tile = &mut tile[..(LINES_AT_ONCE * TILE_LEN).min(elements.end - from)];
            self.load(line, from, tile);
            K::combine(total, fold::<K, C>(tile))
        })
    }

    /// Scans some elements of a line; `before` is the total of the preceding elements. The four quarters of a tile are scanned as
    /// separate lines; then the total of everything before a quarter is added to the quarter.
    fn scan_piece<K: CombineOp, C: Number>(&self, line: usize, elements: Range<usize>, mut before: C, out: &mut [u8]) {
        let mut tile = [K::identity::<C>(); LINES_AT_ONCE * TILE_LEN];
        for from in elements.clone().step_by(tile.len()) {
            let tile = &mut tile[..(LINES_AT_ONCE * TILE_LEN).min(elements.end - from)];
            self.load(line, from, tile);
            let len = tile.len() / LINES_AT_ONCE;
            let (quarters, rest) = tile.split_at_mut(LINES_AT_ONCE * len);
            scan_lines::<K, C>(quarters, len, &mut [K::identity(); LINES_AT_ONCE]);
            for quarter in quarters.chunks_exact_mut(len.max(1)) {
                quarter.iter_mut().for_each(|x| *x = K::combine(before, *x));
                before = quarter[len - 1];
            }
            scan_line::<K, C>(rest, &mut before);
            store_tile(self.dtype, tile, out, from - elements.start, 1);
        }
    }
}

/// Scans a line, continuing from the total `so_far`.
#[inline(always)]
fn scan_line<K: CombineOp, C: Number>(line: &mut [C], so_far: &mut C) {
    for x in line {
        *so_far = K::combine(*so_far, *x);
        *x = *so_far;
    }
}

/// Scans at most [`LINES_AT_ONCE`] lines of `len` elements at the same time, each continuing from its total in `so_far`.
fn scan_lines<K: CombineOp, C: Number>(lines: &mut [C], len: usize, so_far: &mut [C; LINES_AT_ONCE]) {
    if len == 0 || lines.len() < LINES_AT_ONCE * len {
        return lines
            .chunks_exact_mut(len.max(1))
            .zip(so_far)
            .for_each(|(line, so_far)| scan_line::<K, C>(line, so_far));
    }
    let (front, back) = lines.split_at_mut(2 * len);
    let ((a, b), (c, d)) = (front.split_at_mut(len), back.split_at_mut(len));
    let mut now = *so_far;
    for ((a, b), (c, d)) in a.iter_mut().zip(b).zip(c.iter_mut().zip(d)) {
        now = [K::combine(now[0], *a), K::combine(now[1], *b), K::combine(now[2], *c), K::combine(now[3], *d)];
        [*a, *b, *c, *d] = now;
    }
    *so_far = now;
}

//! Cumulative sums and products on the CPU: several lines at a time, because each step along a line waits for the one before.
//! Lines along another dim than the last are taken side by side. Long lines are cut in pieces, whose totals are computed first,
//! where the order of additions does not show in the result.

use crate::backend::cpu::accumulate::{Combine, combine_all, fold};
use crate::backend::cpu::convert::{load_tile, store_tile};
use crate::backend::cpu::lines::each;
use crate::backend::cpu::scalar::Number;
use crate::backend::problem::lines::Lines;
use crate::device::cpu::parallel;
use crate::storage::with_host;
use crate::{DType, Result, Tensor};

/// Elements a job of the pool has.
const JOB: usize = 1 << 13;
/// Elements of a piece.
const PIECE: usize = 1 << 15;
/// Lines side by side that are worth it.
const NARROW: usize = 8;
/// Lines that are so short are done one by one, of which processors do several at a time by themselves.
const SHORT: usize = 64;
/// Lines one after another that are done at a time, and elements of each.
const SIDE: usize = 4;
const TILE: usize = 512;

/// `splits`: whether lines may be cut, which shows where sums are not wider than their elements or products overflow.
pub(crate) fn run<K: Combine, C: Number>(x: &Tensor, d: usize, values: &Tensor, splits: bool) -> Result<()> {
    let lines = Lines::new(x, d);
    let even = lines.strided.dims.last().is_none_or(|last| last % lines.inner == 0);
    let short = lines.inner == 1 && lines.n <= SHORT;
    if !even || short || (2..NARROW).contains(&lines.inner) {
        return each::<C>(x, d, values, None, |line, values, _| {
            values.copy_from_slice(line);
            one::<K, C>(values, &mut K::neutral());
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
    fn run<K: Combine, C: Number>(&self, out: &mut [u8], splits: bool) {
        let (n, inner, size) = (self.lines.n, self.lines.inner, self.dtype.size());
        let stretch = n * inner;
        if !splits || stretch <= PIECE {
            let side = if inner == 1 { SIDE } else { 1 };
            let per_job = JOB.div_ceil(stretch).next_multiple_of(side);
            return parallel::for_each_chunk(out, per_job * stretch * size, |i, out| {
                for (j, out) in out.chunks_mut(side * stretch * size).enumerate() {
                    let first = (i * per_job + j * side) * inner;
                    match inner {
                        1 => self.rows::<K, C>(first, out),
                        _ => self.strided_rows::<K, C>(first, 0..n, &mut vec![K::neutral::<C>(); inner], Some(out)),
                    }
                }
            });
        }
        let lines = (PIECE / inner).max(1);
        let along = n.div_ceil(lines);
        // What has come together before each piece.
        let mut before = vec![K::neutral::<C>(); out.len() / size / stretch * along * inner];
        parallel::for_each_chunk(&mut before, inner, |i, total| {
            let line = i % along * lines;
            let (first, lines) = (i / along * inner, line..n.min(line + lines));
            match inner {
                1 => total[0] = self.total::<K, C>(first, lines),
                _ => self.strided_rows::<K, C>(first, lines, total, None),
            }
        });
        for pieces in before.chunks_mut(along * inner) {
            let mut so_far = vec![K::neutral::<C>(); inner];
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
                1 => self.piece::<K, C>(first, lines, before[0], out),
                _ => self.strided_rows::<K, C>(first, lines, &mut before.to_vec(), Some(out)),
            }
        });
    }

    fn load<C: Number>(&self, line: usize, from: usize, to: &mut [C]) {
        let start =
            self.x.layout.offset as isize + self.lines.strided.offsets(line)[0] + from as isize * self.lines.step;
        load_tile(self.x.dtype, self.bytes, start as usize, self.lines.step, to);
    }

    /// Some elements of neighbouring lines from `first` on, an element of each after the other, from what has come together of each
    /// line on.
    fn strided_rows<K: Combine, C: Number>(
        &self,
        first: usize,
        elements: std::ops::Range<usize>,
        so_far: &mut [C],
        mut out: Option<&mut [u8]>,
    ) {
        let (lines, width) = (self.lines, so_far.len());
        let next = lines.strided.strides[0].last().copied().unwrap_or(0);
        let mut start = self.x.layout.offset as isize + lines.strided.offsets(first)[0];
        start += elements.start as isize * lines.step;
        let mut now = vec![K::neutral::<C>(); width];
        for i in 0..elements.len() {
            load_tile(self.x.dtype, self.bytes, start as usize, next, &mut now);
            start += lines.step;
            combine_all::<K, C>(so_far, &now);
            if let Some(out) = &mut out {
                store_tile(self.dtype, so_far, out, i * width, 1);
            }
        }
    }

    /// Lines from `first` on, as many as `out` has, at most [`SIDE`].
    fn rows<K: Combine, C: Number>(&self, first: usize, out: &mut [u8]) {
        let n = self.lines.n;
        let count = out.len() / self.dtype.size() / n;
        let (mut tile, mut so_far) = ([K::neutral::<C>(); SIDE * TILE], [K::neutral::<C>(); SIDE]);
        for from in (0..n).step_by(TILE) {
            let len = TILE.min(n - from);
            let tile = &mut tile[..count * len];
            tile.chunks_exact_mut(len).enumerate().for_each(|(i, tile)| self.load(first + i, from, tile));
            several::<K, C>(tile, len, &mut so_far);
            for (i, tile) in tile.chunks_exact(len).enumerate() {
                store_tile(self.dtype, tile, out, i * n + from, 1);
            }
        }
    }

    /// What some elements of a line come to.
    fn total<K: Combine, C: Number>(&self, line: usize, elements: std::ops::Range<usize>) -> C {
        let mut tile = [K::neutral::<C>(); SIDE * TILE];
        elements.clone().step_by(tile.len()).fold(K::neutral(), |total, from| {
            let tile = &mut tile[..(SIDE * TILE).min(elements.end - from)];
            self.load(line, from, tile);
            K::combine(total, fold::<K, C>(tile))
        })
    }

    /// Some elements of a line, behind what has come together `before`: quarters of a tile like lines, then what is before each.
    fn piece<K: Combine, C: Number>(
        &self,
        line: usize,
        elements: std::ops::Range<usize>,
        mut before: C,
        out: &mut [u8],
    ) {
        let mut tile = [K::neutral::<C>(); SIDE * TILE];
        for from in elements.clone().step_by(tile.len()) {
            let tile = &mut tile[..(SIDE * TILE).min(elements.end - from)];
            self.load(line, from, tile);
            let len = tile.len() / SIDE;
            let (quarters, rest) = tile.split_at_mut(SIDE * len);
            several::<K, C>(quarters, len, &mut [K::neutral(); SIDE]);
            for quarter in quarters.chunks_exact_mut(len.max(1)) {
                quarter.iter_mut().for_each(|x| *x = K::combine(before, *x));
                before = quarter[len - 1];
            }
            one::<K, C>(rest, &mut before);
            store_tile(self.dtype, tile, out, from - elements.start, 1);
        }
    }
}

/// A line, from what has come together so far on.
#[inline(always)]
fn one<K: Combine, C: Number>(line: &mut [C], so_far: &mut C) {
    for x in line {
        *so_far = K::combine(*so_far, *x);
        *x = *so_far;
    }
}

/// Lines of `len` elements, at most [`SIDE`], each with what has come together of it.
fn several<K: Combine, C: Number>(lines: &mut [C], len: usize, so_far: &mut [C; SIDE]) {
    if len == 0 || lines.len() < SIDE * len {
        return lines.chunks_exact_mut(len.max(1)).zip(so_far).for_each(|(line, so_far)| one::<K, C>(line, so_far));
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

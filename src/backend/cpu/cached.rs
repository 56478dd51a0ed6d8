//! Attention over a cache of keys and values.
//!
//! The queries of all heads that share a head of keys are the rows of one matrix, ordered by position, so that keys are read once for all rows. The keys
//! of few rows are divided into parts, one for each task; many rows are divided into chunks. Sums over parts are merged in the order of the keys, so that
//! results do not depend on the number of threads.

use std::ops::Range;

use half::f16;

use crate::backend::cpu::accumulate::{Max, fold_simd};
use crate::backend::cpu::convert::{load_tile, read_or_convert, store_tile};
use crate::backend::cpu::dispatch::vectorised;
use crate::backend::cpu::kernels::math::exp_and_sum;
use crate::backend::problem::cached::{CacheRows, CacheType, CachedAttention};
use crate::device::cpu::parallel;
use crate::storage::with_host;
use crate::{Error, Result, Tensor};

/// The number of keys whose weights are computed before their values are read.
const PART_KEYS: usize = 128;
/// The number of keys or values that are widened at a time, so that they stay in the L1 cache.
const BLOCK_KEYS: usize = 32;
/// The maximum number of rows of a task.
const CHUNK_ROWS: usize = 64;

pub(crate) fn attend(a: &CachedAttention) -> Result<()> {
    for (rows, cache) in a.rows.into_iter().zip(a.cache) {
        let reads = [&rows.storage, &a.position.storage];
        with_host(&reads, &[&cache.tensor.storage], |reads, writes| store(a, rows, cache, reads, writes[0]))??;
    }
    let Some([q, out]) = a.attend else { return Ok(()) };
    let reads = [&q.storage, &a.cache[0].tensor.storage, &a.cache[1].tensor.storage, &a.position.storage];
    with_host(&reads, &[&out.storage], |bytes, writes| {
        let rows = a.len() * a.group();
        Job { a, q, bytes, sizes: a.cache[0].sizes(), rows, chunk: rows.min(CHUNK_ROWS) }.run(out, writes[0]);
    })
}

/// Stores new keys or values. If a row is outside the cache, returns an error and stores nothing.
fn store(a: &CachedAttention, rows: &Tensor, cache: &CacheRows, reads: &[&[u8]], to: &mut [u8]) -> Result<()> {
    let ([batch, heads, capacity, width], steps, length) = (cache.sizes(), rows.strides(), a.len());
    let ends = (0..batch).map(|b| start(a, reads[1], b)).flat_map(|at| [at, at.saturating_add(length as i64 - 1)]);
    if let Some(index) = ends.into_iter().find(|at| !(0..capacity as i64).contains(at)) {
        return Err(Error::IndexOutOfRange { op: a.op, index, size: capacity });
    }
    let mut row = vec![0f32; width];
    for i in 0..batch * heads * length {
        let (head, i) = (i / length, i % length);
        let from = offset(rows, [head / heads, head % heads, i]);
        load_tile(rows.dtype, reads[0], from, steps[3], &mut row);
        let at = head * capacity + start(a, reads[1], head / heads) as usize + i;
        let at = cache.tensor.layout.offset + at * cache.kind.row_len(width);
        match cache.kind {
            CacheType::Q8_0 => quantise(&row, &mut to[at..]),
            kind => store_tile(kind.dtype(), &row, to, at, 1),
        }
    }
    Ok(())
}

/// Returns the position of the first new row of sequence b.
fn start(a: &CachedAttention, positions: &[u8], b: usize) -> i64 {
    let at = a.position.layout.offset.wrapping_add_signed(b as isize * a.position_step());
    bytemuck::cast_slice::<u8, i64>(positions)[at]
}

/// Returns the offset of the row with the index `at`.
fn offset(t: &Tensor, at: [usize; 3]) -> usize {
    let steps = at.iter().zip(t.strides());
    t.layout.offset.wrapping_add_signed(steps.map(|(&i, &step)| i as isize * step).sum())
}

/// Writes a row in blocks of [`CacheType::Q8_0`].
fn quantise(row: &[f32], to: &mut [u8]) {
    for (x, to) in row.chunks_exact(CacheType::BLOCK.0).zip(to.chunks_exact_mut(CacheType::BLOCK.1)) {
        let d = x.iter().fold(0f32, |top, x| top.max(x.abs())) / 127.0;
        let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
        to[..2].copy_from_slice(&f16::from_f32(d).to_le_bytes());
        // Rounds to nearest, ties away from zero.
        let round = |y: f32| (y + 0.5f32.copysign(y)) as i8 as u8;
        to[2..].iter_mut().zip(x).for_each(|(to, x)| *to = round(x * inverse));
    }
}

/// Attention of queries, the bytes of queries, keys, values and positions, and the cache's sizes.
struct Job<'a> {
    a: &'a CachedAttention<'a>,
    q: &'a Tensor,
    bytes: &'a [&'a [u8]],
    sizes: [usize; 4],
    /// The number of rows for each head of keys.
    rows: usize,
    /// The number of rows of a task.
    chunk: usize,
}

impl Job<'_> {
    /// Returns the number of parts of the keys of sequence b.
    fn parts(&self, b: usize) -> usize {
        (start(self.a, self.bytes[3], b) as usize + self.a.len()).div_ceil(PART_KEYS)
    }

    fn run(&self, out: &Tensor, bytes: &mut [u8]) {
        let (&Job { sizes: [batch, heads, _, width], rows, chunk, .. }, chunks) =
            (self, self.rows.div_ceil(self.chunk));
        let splits = if chunks == 1 { (0..batch).map(|b| self.parts(b)).max().unwrap_or(1).max(1) } else { 1 };
        // For each row: sums of values, the greatest score, and the sum of weights.
        let task_len = chunk * (width + 2);
        let mut partial = vec![0f32; batch * heads * chunks * splits * task_len];
        parallel::for_each_chunk(&mut partial, task_len, |task, sums| {
            let (unit, split) = (task / splits, task % splits);
            let all = self.parts(unit / chunks / heads);
            let parts = if splits == 1 { 0..all } else { split..all.min(split + 1) };
            self.attend_rows(unit / chunks, unit % chunks * chunk, parts, sums);
        });
        for (unit, partial) in partial.chunks_exact_mut(splits * task_len).enumerate() {
            let (sums, others) = partial.split_at_mut(task_len);
            others.chunks_exact(task_len).for_each(|other| merge(sums, other, width));
            for (r, sums) in (unit % chunks * chunk..rows).zip(sums.chunks_exact_mut(width + 2)) {
                let total = if sums[width + 1] == 0.0 { 1.0 } else { sums[width + 1] };
                sums[..width].iter_mut().for_each(|x| *x /= total);
                store_tile(out.dtype, &sums[..width], bytes, self.row_offset(out, unit / chunks, r), 1);
            }
        }
    }

    /// Returns the offset in queries or results of row r of a head of keys.
    fn row_offset(&self, t: &Tensor, head: usize, r: usize) -> usize {
        let (group, heads) = (self.a.group(), self.sizes[1]);
        offset(t, [head / heads, head % heads * group + r % group, r / group])
    }

    /// Computes the sums of a chunk of rows over parts of the keys.
    fn attend_rows(&self, head: usize, first_row: usize, parts: Range<usize>, sums: &mut [f32]) {
        let &Job { a, q, bytes, sizes: [_, heads, capacity, width], rows, chunk } = self;
        let (start, count) = (start(a, bytes[3], head / heads), chunk.min(rows - first_row));
        let mut queries = vec![0f32; count * width];
        for (r, row) in queries.chunks_exact_mut(width).enumerate() {
            load_tile(q.dtype, bytes[0], self.row_offset(q, head, first_row + r), q.strides()[3], row);
            row.iter_mut().for_each(|x| *x *= a.scale as f32);
        }
        let (mut weights, mut part_sums) = (vec![0f32; count * PART_KEYS], vec![0f32; count * (width + 2)]);
        let mut buffer = Vec::new();
        sums.chunks_exact_mut(width + 2).for_each(|row| row[width] = f32::NEG_INFINITY);
        for first in parts.map(|part| part * PART_KEYS) {
            let seen = |r: usize| {
                let keys = start + ((first_row + r) / a.group()) as i64 + 1 - first as i64;
                keys.clamp(0, PART_KEYS as i64) as usize
            };
            let seen: Vec<usize> = (0..count).map(seen).collect();
            let most = seen[count - 1];
            let blocks = (0..most).step_by(BLOCK_KEYS).map(|block| (block, BLOCK_KEYS.min(most - block)));
            for (block, n) in blocks.clone() {
                let keys = widen_rows(a.cache[0], bytes[1], head * capacity + first + block, n, &mut buffer);
                dot_products(width, &queries, keys, block, &mut weights);
            }
            let row_sums = part_sums.chunks_exact_mut(width + 2);
            for ((weights, sums), &seen) in weights.chunks_exact_mut(PART_KEYS).zip(row_sums).zip(&seen) {
                sums[..width].fill(0.0);
                sums[width..].copy_from_slice(&exponentials(&mut weights[..seen], f32::NEG_INFINITY));
            }
            for (block, n) in blocks {
                let values = widen_rows(a.cache[1], bytes[2], head * capacity + first + block, n, &mut buffer);
                add_values(width, &weights, block, &seen, values, &mut part_sums);
            }
            merge(sums, &part_sums, width);
        }
    }
}

/// Returns `n` rows of the cache as f32, in place if they are stored as f32.
fn widen_rows<'b>(cache: &CacheRows, bytes: &'b [u8], at: usize, n: usize, buffer: &'b mut Vec<f32>) -> &'b [f32] {
    let width = cache.sizes()[3];
    let len = cache.kind.row_len(width);
    let from = cache.tensor.layout.offset + at * len;
    if cache.kind != CacheType::Q8_0 {
        return read_or_convert((cache.kind.dtype(), bytes), from, 1, n * width, buffer);
    }
    buffer.resize(n * width, 0.0);
    dequantise(&bytes[from..][..n * len], buffer);
    buffer
}

/// Adds partial sums over later keys to the sums of the same rows.
fn merge(sums: &mut [f32], part: &[f32], width: usize) {
    for (sums, part) in sums.chunks_exact_mut(width + 2).zip(part.chunks_exact(width + 2)) {
        let top = sums[width].max(part[width]);
        let [old, new] = [sums[width], part[width]].map(|x| if x == top { 1.0 } else { (x - top).exp() });
        sums.iter_mut().zip(part).for_each(|(sum, x)| *sum = *sum * old + x * new);
        sums[width] = top;
    }
}

vectorised! {
    fn dequantise<'a>(_simd: S, blocks: &'a [u8], to: &'a mut [f32]) {
        for (block, to) in blocks.chunks_exact(CacheType::BLOCK.1).zip(to.chunks_exact_mut(CacheType::BLOCK.0)) {
            let d = f16::from_le_bytes([block[0], block[1]]).to_f32();
            for (to, &q) in to.iter_mut().zip(&block[2..]) {
                *to = f32::from(q as i8) * d;
            }
        }
    }
}

vectorised! {
    /// Computes the scores of each row of `queries` for a block of keys.
    fn dot_products<'a>(simd: S, width: usize, queries: &'a [f32], keys: &'a [f32], block: usize, scores: &'a mut [f32]) {
        for (query, scores) in queries.chunks_exact(width).zip(scores.chunks_exact_mut(PART_KEYS)) {
            let (query, query_rest) = S::as_simd_f32s(query);
            for (key, score) in keys.chunks_exact(width).zip(&mut scores[block..]) {
                let (key, rest) = S::as_simd_f32s(key);
                let mut sum = simd.splat_f32s(0.0);
                for (q, k) in query.iter().zip(key) {
                    sum = simd.mul_add_e_f32s(*q, *k, sum);
                }
                *score = simd.reduce_sum_f32s(sum);
                for (q, k) in query_rest.iter().zip(rest) {
                    *score += q * k;
                }
            }
        }
    }
}

vectorised! {
    /// Replaces the scores of a row by weights, `exp(score - greatest)`. Returns `greatest`, the greatest of the scores and `least`, and the
    /// sum of the weights, which is NaN if a score is NaN.
    pub(crate) fn exponentials<'a>(simd: S, scores: &'a mut [f32], least: f32) -> [f32; 2] {
        let top = fold_simd::<Max, f32, S>(simd, scores).max(least);
        let base = if top == f32::NEG_INFINITY { 0.0 } else { top };
        [top, exp_and_sum(simd, scores, base)]
    }
}

vectorised! {
    /// Adds a block of values, times their weights, to the sums of each row. Row r attends to the first `seen[r]` keys of the part.
    fn add_values<'a>(
        simd: S, width: usize, weights: &'a [f32], block: usize, seen: &'a [usize], values: &'a [f32], sums: &'a mut [f32]
    ) {
        for (key, value) in values.chunks_exact(width).enumerate() {
            let (value, value_rest) = S::as_simd_f32s(value);
            // Rows in the inner loop, so that an addition does not have to wait for the addition of the key before.
            let rows = weights.chunks_exact(PART_KEYS).zip(sums.chunks_exact_mut(width + 2)).zip(seen);
            for ((weights, sums), &seen) in rows {
                if block + key < seen {
                    let (weight, (sums, rest)) = (weights[block + key], S::as_mut_simd_f32s(&mut sums[..width]));
                    let weights = simd.splat_f32s(weight);
                    for (sum, x) in sums.iter_mut().zip(value) {
                        *sum = simd.mul_add_e_f32s(weights, *x, *sum);
                    }
                    for (sum, x) in rest.iter_mut().zip(value_rest) {
                        *sum += weight * x;
                    }
                }
            }
        }
    }
}

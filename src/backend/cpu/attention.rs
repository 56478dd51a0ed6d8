//! Attention without gradients, whose scores stay in the cache of a core.
//!
//! A task computes the results of a chunk of queries of one head. It packs a block of keys and values, multiplies one block of queries after
//! another with them, and continues with the next block of keys. Each query has its greatest score so far, the sum of its weights and the
//! weighted sum of values. A greater score scales both sums (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax").

use std::ops::Range;
use std::sync::Mutex;

use bytemuck::cast_slice_mut;
use smallvec::SmallVec;

use crate::backend::cpu::cached::exponentials;
use crate::backend::cpu::convert::{load_tile, store_tile};
use crate::backend::cpu::kernels::buffers::with_scratch;
use crate::backend::cpu::kernels::gemm::Floats;
use crate::backend::cpu::kernels::gemm::serial::{LeftMatrix, RightMatrix, SerialGemm};
use crate::backend::problem::attention::FusedAttention;
use crate::device::cpu::blocks::{Block, BlockPartition, for_each_block};
use crate::device::cpu::threads;
use crate::layout::collapse::StridedDims;
use crate::layout::shape::Shape;
use crate::storage::with_host;
use crate::{Compute, DType, Result, Tensor};

/// The number of keys that are packed at a time. With up to 192 elements in a row, keys, values and the scores of a block of queries fit in
/// an L2 cache of 512 KiB.
const BLOCK_KEYS: usize = 256;
/// The number of queries that are multiplied with packed keys at a time.
const BLOCK_QUERIES: usize = 128;
/// The maximum number of queries of a task. The keys are packed again for each task.
const MAX_TASK_QUERIES: usize = 2048;
/// The number of tasks for each thread, unless [`BLOCK_QUERIES`] or [`MAX_TASK_QUERIES`] requires another number: threads then finish together.
const TASKS_PER_THREAD: usize = 8;
/// The minimum number of queries. For fewer, packing would take longer than the products.
const MIN_QUERIES: usize = 16;

/// True for attention in f32 without dropout, of at least [`MIN_QUERIES`] queries, with keys of adjacent elements in ascending rows, if the
/// processor has product kernels for f32 and none for pairs of the operands' dtype, which would be faster.
pub(crate) fn is_supported(a: &FusedAttention) -> bool {
    let ([_, queries, _, width, _], dtype) = (a.sizes(), a.q.dtype);
    let has_pairs = || dtype == DType::BF16 && SerialGemm::for_pairs(width).is_some();
    let steps = &a.k.strides()[a.k.rank() - 2..];
    dtype.compute() == Compute::F32
        && a.dropout.is_none()
        && queries >= MIN_QUERIES
        && steps[0] >= 0
        && (steps[1] == 1 || width == 1)
        && SerialGemm::for_f32().is_some()
        && !has_pairs()
}

/// Computes the result and the log-sum-exp of each row of scores. The heads of `out` may be an inner dim of its memory, otherwise it is contiguous.
/// Requires [`is_supported`].
pub(crate) fn attend(a: &FusedAttention, out: &Tensor, logsumexp: &Tensor) -> Result<()> {
    let Some(gemm) = SerialGemm::for_f32() else { unreachable!("`is_supported` is true") };
    let [_, queries, _, _, value_width] = a.sizes();
    let units = Shape::from(&a.q.shape().dims()[..a.q.rank() - 2]);
    let operands: SmallVec<[&Tensor; 4]> = [a.q, a.k, a.v].into_iter().chain(a.mask).collect();
    let broadcast = |t: &&Tensor| {
        let last = &t.shape().dims()[units.rank()..];
        t.layout.broadcast_to(&units.dims().iter().chain(last).copied().collect()).strides
    };
    let strides: SmallVec<[_; 4]> = operands.iter().map(broadcast).collect();
    let units_strides = strides.iter().map(|all| &all[..units.rank()]);
    let per_task = (units.numel() * queries).div_ceil(TASKS_PER_THREAD * threads());
    let height = per_task.clamp(BLOCK_QUERIES, MAX_TASK_QUERIES).next_multiple_of(BLOCK_QUERIES);
    let size = out.dtype.size();
    let width = value_width * size;
    // The rows of the result's memory hold all heads of a query if the heads are an inner dim, otherwise one head.
    let pitch = out.strides()[units.rank()] as usize * size;
    let cut = BlockPartition { columns: pitch, pitch, band: queries, height, width };
    let storages: SmallVec<[_; 4]> = operands.iter().map(|t| &t.storage).collect();
    with_host(&storages, &[&out.storage, &logsumexp.storage], |bytes, writes| {
        let job = Job { a, gemm, units: StridedDims::new(&units, units_strides), operands: &operands, bytes };
        let [out_bytes, logsumexp_bytes] = writes else { unreachable!("two storages") };
        let rows = cast_slice_mut::<u8, f32>(logsumexp_bytes);
        let logsumexp = Mutex::new(&mut rows[logsumexp.layout.offset..][..logsumexp.numel()]);
        let out_bytes = &mut out_bytes[out.layout.offset * size..][..out.numel() * size];
        for_each_block(out_bytes, cut, false, |[batch, chunk, head], block| {
            let (unit, first, count) = (batch * (pitch / width) + head, chunk * height, block.rows());
            let made = job.run_task(unit, first, out.dtype, block);
            let mut logsumexp = logsumexp.lock().unwrap_or_else(|error| error.into_inner());
            logsumexp[unit * queries + first..][..count].copy_from_slice(&made);
        });
    })
}

/// An attention, and the bytes of its operands.
struct Job<'a> {
    a: &'a FusedAttention<'a>,
    gemm: SerialGemm,
    /// The batch dims and the heads.
    units: StridedDims,
    /// Queries, keys, values and the mask.
    operands: &'a [&'a Tensor],
    bytes: &'a [&'a [u8]],
}

impl Job<'_> {
    /// Computes the results of the queries from `first` on, one for each row of `out`, and returns their log-sum-exps.
    fn run_task(&self, unit: usize, first: usize, dtype: DType, mut out: Block<u8>) -> Vec<f32> {
        let ([_, _, keys, width, value_width], rows) = (self.a.sizes(), out.rows());
        let task = Task { job: self, offsets: self.units.offsets(unit), first };
        let panels = |n: usize| n.div_ceil(self.gemm.tile_columns());
        let rooms = [
            rows * width,
            panels(BLOCK_KEYS) * task.panel_len(),
            panels(value_width) * task.value_panel_len(),
            BLOCK_QUERIES * BLOCK_KEYS,
            value_width.max(BLOCK_KEYS),
            rows * value_width,
            rows,
            rows,
        ];
        let mut logsumexp = vec![0.0; rows];
        with_scratch(rooms, |[queries, packed_keys, values, scores, row, sums, tops, totals]| {
            for (i, query) in queries.chunks_exact_mut(width).enumerate() {
                task.load(0, [first + i, 0], query);
                query.iter_mut().for_each(|x| *x *= self.a.scale as f32);
            }
            sums.fill(0.0);
            tops.fill(f32::NEG_INFINITY);
            totals.fill(0.0);
            let end = if self.a.causal { keys.min(first + rows) } else { keys };
            for start in (0..end).step_by(BLOCK_KEYS) {
                let packed = start..end.min(start + BLOCK_KEYS);
                task.pack_keys(&packed, packed_keys);
                task.pack_values(&packed, values, row);
                for top in (0..rows).step_by(BLOCK_QUERIES) {
                    let count = BLOCK_QUERIES.min(rows - top);
                    let n = task.seen(top + count - 1, &packed);
                    if n > 0 {
                        task.multiply_keys(&queries[top * width..], packed_keys, scores, [count, n, packed.len()]);
                        let sums = &mut sums[top * value_width..][..count * value_width];
                        let state = [&mut *sums, &mut tops[top..][..count], &mut totals[top..][..count]];
                        task.weigh(top, &packed, n, scores, row, state);
                        task.add_values(scores, values, sums, [count, n]);
                    }
                }
            }
            for (i, sums) in sums.chunks_exact_mut(value_width).enumerate() {
                let inverse = if totals[i] == 0.0 { 0.0 } else { 1.0 / totals[i] };
                sums.iter_mut().for_each(|x| *x *= inverse);
                store_tile(dtype, sums, out.row(i), 0, 1);
                logsumexp[i] = tops[i] + totals[i].ln();
            }
        });
        logsumexp
    }
}

/// The part of a job for a chunk of the queries of one head.
struct Task<'a> {
    job: &'a Job<'a>,
    /// The offset of the head in each operand.
    offsets: SmallVec<[isize; 8]>,
    /// The first query.
    first: usize,
}

impl Task<'_> {
    /// Returns the number of elements of a panel of packed keys.
    fn panel_len(&self) -> usize {
        self.job.gemm.packed_len(self.job.gemm.tile_columns(), self.job.a.sizes()[3])
    }

    /// Returns the number of elements of a panel of packed values, which has one row for each key.
    fn value_panel_len(&self) -> usize {
        BLOCK_KEYS * self.job.gemm.tile_columns()
    }

    /// Converts elements of operand `k` to f32: a part of a row, beginning with the element at `at`.
    fn load(&self, k: usize, at: [usize; 2], to: &mut [f32]) {
        let (t, steps) = (self.job.operands[k], last_strides(self.job.operands[k]));
        let start = self.offsets[k] + at[0] as isize * steps[0] + at[1] as isize * steps[1];
        load_tile(t.dtype, self.job.bytes[k], t.layout.offset.wrapping_add_signed(start), steps[1], to);
    }

    /// Returns the number of the packed keys to which the task's query `i` attends.
    fn seen(&self, i: usize, packed: &Range<usize>) -> usize {
        let n = packed.len();
        if self.job.a.causal { n.min((self.first + i + 1).saturating_sub(packed.start)) } else { n }
    }

    /// Packs keys into panels of a tile's columns.
    fn pack_keys(&self, keys: &Range<usize>, to: &mut [f32]) {
        let (&Job { a, gemm, bytes, .. }, width) = (self.job, self.job.a.sizes()[3]);
        let (columns, step) = (gemm.tile_columns(), last_strides(a.k)[0] as usize);
        let first = a.k.layout.offset.wrapping_add_signed(self.offsets[1]);
        for (key, panel) in keys.clone().step_by(columns).zip(to.chunks_exact_mut(self.panel_len())) {
            let size = (columns.min(keys.end - key), width);
            gemm.pack_columns(Floats::new(a.k.dtype, bytes[1]), (first + key * step, step), size, panel);
        }
    }

    /// Packs values into panels of a tile's columns. `row` is scratch memory.
    fn pack_values(&self, keys: &Range<usize>, to: &mut [f32], row: &mut [f32]) {
        let (columns, row) = (self.job.gemm.tile_columns(), &mut row[..self.job.a.sizes()[4]]);
        for (i, key) in keys.clone().enumerate() {
            self.load(2, [key, 0], row);
            let parts = row.chunks(columns).zip(to.chunks_exact_mut(self.value_panel_len()));
            parts.for_each(|(part, to)| to[i * columns..][..part.len()].copy_from_slice(part));
        }
    }

    /// Computes the scores of `count` queries and the first `n` of `packed` keys; a row has [`BLOCK_KEYS`] elements.
    fn multiply_keys(&self, queries: &[f32], keys: &[f32], scores: &mut [f32], [count, n, packed]: [usize; 3]) {
        let (gemm, width) = (self.job.gemm, self.job.a.sizes()[3]);
        let columns = gemm.tile_columns();
        for (j, panel) in (0..n).step_by(columns).zip(keys.chunks_exact(self.panel_len())) {
            let (left, wide) = (LeftMatrix::Rows { data: queries, stride: width }, columns.min(n - j));
            let stride = gemm.padded_width(columns.min(packed - j));
            let right = RightMatrix { data: panel, stride, times: 1, jump: 0 };
            let mut to = Block::new(&mut scores[j..], count, wide, BLOCK_KEYS);
            gemm.multiply((count, wide, width), left, right, &mut to, false);
        }
    }

    /// Replaces the scores of the first `n` packed keys by weights, for the queries from the task's query `top` on. Updates the greatest
    /// scores and the totals of weights, and scales the sums of values where the greatest score has changed. `row` is scratch memory.
    fn weigh(
        &self,
        top: usize,
        packed: &Range<usize>,
        n: usize,
        scores: &mut [f32],
        row: &mut [f32],
        [sums, tops, totals]: [&mut [f32]; 3],
    ) {
        let value_width = self.job.a.sizes()[4];
        let rows = scores.chunks_exact_mut(BLOCK_KEYS).zip(sums.chunks_exact_mut(value_width)).enumerate();
        for ((i, (scores, sums)), (top_score, total)) in rows.zip(tops.iter_mut().zip(totals)) {
            let seen = self.seen(top + i, packed).min(n);
            if let Some(mask) = self.job.a.mask {
                self.load(3, [self.first + top + i, packed.start], &mut row[..seen]);
                add_mask(mask.dtype, &mut scores[..seen], row);
            }
            let [greatest, sum] = exponentials(&mut scores[..seen], *top_score);
            scores[seen..n].fill(0.0);
            if greatest != *top_score {
                let factor = (*top_score - greatest).exp();
                *total *= factor;
                sums.iter_mut().for_each(|x| *x *= factor);
            }
            (*top_score, *total) = (greatest, *total + sum);
        }
    }

    /// Adds the values of `n` keys, times their weights, to the sums of `count` queries.
    fn add_values(&self, weights: &[f32], values: &[f32], sums: &mut [f32], [count, n]: [usize; 2]) {
        let (gemm, value_width) = (self.job.gemm, self.job.a.sizes()[4]);
        let columns = gemm.tile_columns();
        for (j, panel) in (0..value_width).step_by(columns).zip(values.chunks_exact(self.value_panel_len())) {
            let (left, wide) = (LeftMatrix::Rows { data: weights, stride: BLOCK_KEYS }, columns.min(value_width - j));
            let right = RightMatrix { data: panel, stride: columns, times: 1, jump: 0 };
            let mut to = Block::new(&mut sums[j..], count, wide, value_width);
            gemm.multiply((count, wide, n), left, right, &mut to, true);
        }
    }
}

/// Returns the strides of the last two dims.
fn last_strides(t: &Tensor) -> [isize; 2] {
    let steps = t.strides();
    [steps[steps.len() - 2], steps[steps.len() - 1]]
}

/// Adds a row of a float mask to scores, or hides the scores where a bool mask is false.
fn add_mask(dtype: DType, scores: &mut [f32], mask: &[f32]) {
    let pairs = scores.iter_mut().zip(mask);
    match dtype {
        DType::Bool => pairs.for_each(|(x, &kept)| *x = if kept == 0.0 { f32::NEG_INFINITY } else { *x }),
        _ => pairs.for_each(|(x, mask)| *x += mask),
    }
}

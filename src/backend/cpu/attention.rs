//! Attention without gradients, whose scores stay in the cache of a core.
//!
//! A task computes the results of a chunk of queries of one head. It packs a block of keys and values, multiplies one block of queries after
//! another with them, and continues with the next block of keys. Each query has its greatest score so far, the sum of its weights and the
//! weighted sum of values. A greater score scales both sums (Milakov and Gimelshein 2018, "Online normalizer calculation for softmax").

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
        let (&Job { a, gemm, .. }, [_, _, keys, width, value_width], rows) = (self, self.a.sizes(), out.rows());
        let (offsets, columns) = (self.units.offsets(unit), gemm.tile_columns());
        let load = |k: usize, at: [usize; 2], to: &mut [f32]| {
            let (t, from) = (self.operands[k], &last_strides(self.operands[k]));
            let start = offsets[k] + at[0] as isize * from[0] + at[1] as isize * from[1];
            load_tile(t.dtype, self.bytes[k], t.layout.offset.wrapping_add_signed(start), from[1], to);
        };
        let keys_start = self.operands[1].layout.offset.wrapping_add_signed(offsets[1]);
        let keys_step = last_strides(self.operands[1])[0] as usize;
        let (panel, value_panel) = (gemm.packed_len(columns, width), BLOCK_KEYS * columns);
        let rooms = [
            rows * width,
            BLOCK_KEYS.div_ceil(columns) * panel,
            value_width.div_ceil(columns) * value_panel,
            BLOCK_QUERIES * BLOCK_KEYS,
            rows * value_width,
            value_width.max(BLOCK_KEYS),
            rows,
            rows,
        ];
        let mut logsumexp = vec![0.0; rows];
        with_scratch(rooms, |[queries, packed_keys, packed_values, scores, sums, row, tops, totals]| {
            for (i, query) in queries.chunks_exact_mut(width).enumerate() {
                load(0, [first + i, 0], query);
                query.iter_mut().for_each(|x| *x *= a.scale as f32);
            }
            sums.fill(0.0);
            tops.fill(f32::NEG_INFINITY);
            totals.fill(0.0);
            let end = if a.causal { keys.min(first + rows) } else { keys };
            for start in (0..end).step_by(BLOCK_KEYS) {
                let n = BLOCK_KEYS.min(end - start);
                for (j, panel) in (0..n).step_by(columns).zip(packed_keys.chunks_exact_mut(panel)) {
                    let at = (keys_start + (start + j) * keys_step, keys_step);
                    let from = Floats::new(a.k.dtype, self.bytes[1]);
                    gemm.pack_columns(from, at, (columns.min(n - j), width), panel);
                }
                for key in 0..n {
                    load(2, [start + key, 0], &mut row[..value_width]);
                    let parts = row[..value_width].chunks(columns).zip(packed_values.chunks_exact_mut(value_panel));
                    parts.for_each(|(part, to)| to[key * columns..][..part.len()].copy_from_slice(part));
                }
                for top in (0..rows).step_by(BLOCK_QUERIES) {
                    let count = BLOCK_QUERIES.min(rows - top);
                    let seen = |i: usize| if a.causal { n.min((first + top + i + 1).saturating_sub(start)) } else { n };
                    let (packed, n) = (n, seen(count - 1));
                    if n == 0 {
                        continue;
                    }
                    for (j, panel) in (0..n).step_by(columns).zip(packed_keys.chunks_exact(panel)) {
                        let (left, wide) = (&queries[top * width..], columns.min(n - j));
                        let left = LeftMatrix::Rows { data: left, stride: width };
                        let stride = gemm.padded_width(columns.min(packed - j));
                        let right = RightMatrix { data: panel, stride, times: 1, jump: 0 };
                        let mut to = Block::new(&mut scores[j..], count, wide, BLOCK_KEYS);
                        gemm.multiply((count, wide, width), left, right, &mut to, false);
                    }
                    for (i, scores) in scores.chunks_exact_mut(BLOCK_KEYS).enumerate().take(count) {
                        let (seen, at) = (seen(i).min(n), top + i);
                        if let Some(mask) = a.mask {
                            load(3, [first + at, start], &mut row[..seen]);
                            add_mask(mask.dtype, &mut scores[..seen], row);
                        }
                        let [greatest, sum] = exponentials(&mut scores[..seen], tops[at]);
                        scores[seen..n].fill(0.0);
                        if greatest != tops[at] {
                            let factor = (tops[at] - greatest).exp();
                            totals[at] *= factor;
                            sums[at * value_width..][..value_width].iter_mut().for_each(|x| *x *= factor);
                        }
                        (tops[at], totals[at]) = (greatest, totals[at] + sum);
                    }
                    for (j, panel) in (0..value_width).step_by(columns).zip(packed_values.chunks_exact(value_panel)) {
                        let wide = columns.min(value_width - j);
                        let left = LeftMatrix::Rows { data: scores, stride: BLOCK_KEYS };
                        let right = RightMatrix { data: panel, stride: columns, times: 1, jump: 0 };
                        let mut to = Block::new(&mut sums[top * value_width + j..], count, wide, value_width);
                        gemm.multiply((count, wide, n), left, right, &mut to, true);
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

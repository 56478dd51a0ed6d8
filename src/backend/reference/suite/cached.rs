//! Tests of attention over a cache.

use super::{Random, Side, Suite, View};
use crate::backend::opencl::gemm::tests::PRETEND_GPU;
use crate::backend::problem::cached::{CacheRows, CacheType, CachedAttention};
use crate::{DType, Result, Tensor};

/// The sizes batch, heads of keys, query heads per head of keys, capacity and width; then the number of rows before the new rows, and of new rows.
type Sizes = ([usize; 5], usize, usize);

/// Stores rows, then stores new rows and attends. Compares the result and both caches. With `each`, the sequences have different positions.
fn compare_case(suite: &mut Suite, kind: CacheType, dtype: DType, view: View, sizes: Sizes, each: bool) -> Result<()> {
    let ([batch, heads, group, capacity, width], before, new) = sizes;
    // The ratio of such a number to the largest of a block is hardly ever halfway between two steps of Q8_0.
    let number = |r: &mut Random| r.next_below(100_003) as f64 / 25_001.0 - 2.0;
    let mut made = |heads: usize, n: usize| suite.tensor(view, &[batch, heads, n, width], dtype, number);
    let [old, rows] = [[made(heads, before)?, made(heads, before)?], [made(heads, new)?, made(heads, new)?]];
    let q = made(heads * group, new)?;
    let first: Vec<i64> = (0..if each { batch } else { 1 }).map(|b| before as i64 - b as i64).collect();
    suite.compare(format!("{kind:?}, {view:?}, {sizes:?}, {first:?}"), dtype, capacity, |side: &Side| {
        let cache = || CacheRows::new([batch, heads, capacity, width], kind, side.device);
        let (cache, q) = ([cache()?, cache()?], side.upload(&q)?);
        let out = side.alloc_output([batch, new, heads * group, width], dtype)?.permute(&[0, 2, 1, 3])?;
        let run = |rows: &[Tensor; 2], first: &[i64], attend: Option<[&Tensor; 2]>| {
            let rows = [side.upload(&rows[0])?, side.upload(&rows[1])?];
            let position = Tensor::from_slice(first, first.len(), side.device)?;
            let (rows, cache) = (rows.each_ref(), cache.each_ref());
            side.backend.cached_attention(&CachedAttention {
                op: "cached_attention",
                rows,
                cache,
                position: &position,
                attend,
                scale: 0.25,
            })
        };
        if before > 0 {
            run(&old, &[0], None)?;
        }
        run(&rows, &first, Some([&q, &out]))?;
        let [keys, values] = cache.map(|rows| rows.tensor);
        Ok(Some(vec![out, keys, values]))
    })
}

pub(super) fn cached_attention(suite: &mut Suite) -> Result<()> {
    use CacheType::{BF16, F16, F32, Q8_0};
    let plain = View::Plain;
    for pretend in [false, true] {
        PRETEND_GPU.set(pretend);
        // A step of decoding with a group of heads, and a part of the keys that no row attends to.
        compare_case(suite, F16, DType::F32, View::Odd, ([2, 2, 3, 300, 64], 257, 1), true)?;
        // More rows than a work-group computes at once.
        compare_case(suite, Q8_0, DType::F32, plain, ([1, 2, 2, 40, 32], 7, 9), false)?;
        suite.runs_on_opencl = !pretend;
    }
    for (kind, dtype) in [(F32, DType::F32), (BF16, DType::BF16), (F32, DType::F16)] {
        compare_case(suite, kind, dtype, View::Gapped, ([2, 1, 3, 70, 40], 31, 2), true)?;
        suite.runs_on_opencl = false;
    }
    for kind in [F32, F16, BF16, Q8_0] {
        for sizes in [([1, 1, 1, 1, 32], 0, 1), ([2, 1, 8, 140, 96], 127, 2), ([1, 3, 1, 280, 64], 129, 70)] {
            compare_case(suite, kind, DType::F32, plain, sizes, false)?;
        }
    }
    PRETEND_GPU.set(false);
    suite.runs_on_opencl = true;
    Ok(())
}

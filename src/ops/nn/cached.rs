//! Attention over a cache of keys and values.

use crate::backend::problem::cached::{CacheRows, CachedAttention};
use crate::ops::dispatch::prelude::*;

/// Stores new keys and values `[batch, heads, L, width]` in a cache of keys and values: row i at row `position + i`. `position` is an i64
/// tensor `[1]` or `[batch]` on the device, so that the launch can be captured in a [`Graph`](crate::Graph) and replayed at other positions.
///
/// Fails with [`Error::IndexOutOfRange`] for rows outside the cache (an OpenCL device reports this error at the next wait), and with
/// [`Error::ShapeMismatch`], [`Error::DTypeMismatch`] or [`Error::UnsupportedDType`] for new rows that do not fit the cache, or are not f32, f16
/// or bf16.
#[track_caller]
pub fn cache_store(rows: [&Tensor; 2], cache: [&CacheRows; 2], position: &Tensor) -> Result<()> {
    launch(CachedAttention { op: "cache_store", rows, cache, position, attend: None, scale: 1.0 })
}

/// Stores new keys and values like [`cache_store`], then computes attention of the queries `[batch, query heads, L, width]` over the cache:
/// query i attends to the rows 0 to `position + i`. Returns `[batch, query heads, L, width]`, stored as `[batch, L, query heads, width]`. If
/// the cache has fewer heads, adjacent query heads share a head of keys. `scale` is the factor of the scores; if `None`, `1 / sqrt(width)`.
///
/// Decoding takes one launch, with sums in f32, and reads each key once for up to 8 query heads. Gradients are not recorded. Fails as
/// [`cache_store`] does.
///
/// ```
/// use claystone::ops::{CacheRows, CacheType, cached_attention};
/// use claystone::{Device, Tensor};
/// let cache = || CacheRows::new([1, 1, 16, 2], CacheType::F16, Device::Cpu);
/// let (keys, values) = (cache()?, cache()?);
/// let position = Tensor::from_slice(&[0i64], 1, Device::Cpu)?;
/// for (step, mean) in [(1.0, 1.0), (3.0, 2.0)] {
///     let x = Tensor::full([1, 1, 1, 2], step, Device::Cpu)?;
///     let y = cached_attention(&x.zeros_like()?, [&x, &x], [&keys, &values], &position, None)?;
///     assert_eq!(y.to_vec::<f32>()?, [mean; 2]); // all keys have the same weight
///     position.add_scalar_(1)?;
/// }
/// # Ok::<(), claystone::Error>(())
/// ```
#[track_caller]
pub fn cached_attention(
    q: &Tensor,
    rows: [&Tensor; 2],
    cache: [&CacheRows; 2],
    position: &Tensor,
    scale: Option<f64>,
) -> Result<Tensor> {
    let op = "cached_attention";
    let ([batch, heads, _, width], key) = (cache[0].sizes(), rows[0]);
    same_dtype(op, &[q, key])?;
    same_device(op, &[q, key])?;
    let fits = |dims: &[usize]| {
        matches!(dims, &[b, all, length, w] if [b, w] == [batch, width] && all > 0 && all.is_multiple_of(heads.max(1))
            && key.shape().dims().get(2) == Some(&length))
    };
    mismatch!(op if !fits(q.shape().dims()), q, key, "queries are [batch, n heads, L, width] for keys [batch, heads, L, width]");
    let &[_, all, length, _] = q.shape().dims() else { unreachable!("checked above") };
    let out = Tensor::empty_with_shape([batch, length, all, width], q.dtype, q.device())?.transpose(1, 2)?;
    let scale = scale.unwrap_or_else(|| 1.0 / (width as f64).sqrt());
    launch(CachedAttention { op, rows, cache, position, attend: Some([q, &out]), scale })?;
    Ok(out)
}

/// Checks the operands, and launches the problem if it is not empty.
fn launch(a: CachedAttention) -> Result<()> {
    let CachedAttention { op, rows: [k, v], cache: [keys, values], position, .. } = a;
    let [batch, heads, _, width] = keys.sizes();
    same_dtype(op, &[k, v])?;
    same_device(op, &[k, v, keys.tensor(), values.tensor(), position])?;
    unsupported!(op if !matches!(k.dtype, DType::F32 | DType::F16 | DType::BF16), k.dtype, "f32, f16 or bf16");
    unsupported!(op if position.dtype != DType::I64, position.dtype, "i64 positions");
    mismatch!(op if (keys.sizes(), keys.kind()) != (values.sizes(), values.kind()), keys.tensor(), values.tensor(),
        "the caches of keys and values have the same sizes and type");
    let fits = |dims: &[usize]| matches!(dims, &[b, h, _, w] if [b, h, w] == [batch, heads, width]);
    mismatch!(op if !fits(k.shape().dims()), k, keys.tensor(), "new rows are [batch, heads, L, width] of the cache");
    mismatch!(op if k.shape() != v.shape(), k, v, "new keys and values have the same shape");
    invalid!(op if position.rank() != 1 || ![1, batch].contains(&position.numel()),
        "positions of shape {} are not [1] or [{batch}]", position.shape());
    if k.numel() == 0 {
        return Ok(());
    }
    backend::launch([keys.tensor(), values.tensor()], |b| match a.attend {
        Some([_, out]) => backend::fill([out], |b| b.cached_attention(&a)),
        None => b.cached_attention(&a),
    })
}

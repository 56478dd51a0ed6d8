//! Mixed precision: matrix products in half precision; sums and exponentials in f32.
//!
//! Public methods first call [`lowered`] or [`widened`]. Where these return tensors, the method starts again with them. Casts are
//! recorded like any others, so gradients arrive in the dtype of the original tensor.

use smallvec::SmallVec;

use crate::autograd::cast_once;
use crate::{DType, Error, Result, Tensor, autocast_dtype};

/// The inputs of a product in the scope's dtype; None where they are in it, or there is no scope, or one is no float up to
/// f32.
#[inline] // what gives tensors is moved even where it gives none
pub(crate) fn lowered(op: &'static str, inputs: &[&Tensor]) -> Result<Option<SmallVec<[Tensor; 3]>>> {
    match autocast_dtype() {
        None => Ok(None),
        Some(dtype) => lower(op, inputs, dtype),
    }
}

fn lower(op: &'static str, inputs: &[&Tensor], dtype: DType) -> Result<Option<SmallVec<[Tensor; 3]>>> {
    let halves_or_f32 = |t: &&Tensor| matches!(t.dtype, DType::F32 | DType::F16 | DType::BF16);
    if !matches!(dtype, DType::BF16 | DType::F16 | DType::F32) {
        return Err(Error::UnsupportedDType { op, dtype, expected: "bf16 or f16 as the dtype of autocast" });
    }
    if inputs.iter().all(|t| t.dtype == dtype) || !inputs.iter().all(halves_or_f32) {
        return Ok(None);
    }
    inputs.iter().map(|t| cast_once(t, dtype)).collect::<Result<_>>().map(Some)
}

/// The elementwise operations that PyTorch's autocast computes in f32.
#[rustfmt::skip]
const WIDE: &[&str] = &[
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "pow", "pow_scalar", "rdiv_scalar",
    "reciprocal", "rpow_scalar", "rsqrt", "sinh", "softplus", "softplus_beta", "tan",
];

/// [`widened`] for the elementwise operation of this name.
pub(crate) fn widened_row(row: &str, inputs: &[&Tensor]) -> Result<Option<SmallVec<[Tensor; 3]>>> {
    if WIDE.contains(&row) { widened(inputs) } else { Ok(None) }
}

/// Halves among the inputs as f32; None where there are none, or there is no scope.
#[inline]
pub(crate) fn widened(inputs: &[&Tensor]) -> Result<Option<SmallVec<[Tensor; 3]>>> {
    match autocast_dtype() {
        None => Ok(None),
        Some(_) => widen(inputs),
    }
}

/// Halves among the inputs as f32; None where there are none.
pub(crate) fn widen(inputs: &[&Tensor]) -> Result<Option<SmallVec<[Tensor; 3]>>> {
    let half = |t: &Tensor| matches!(t.dtype, DType::F16 | DType::BF16);
    if !inputs.iter().any(|t| half(t)) {
        return Ok(None);
    }
    let wide = |t: &&Tensor| if half(t) { t.to_dtype(DType::F32) } else { Ok(t.shallow_clone()) };
    inputs.iter().map(wide).collect::<Result<_>>().map(Some)
}

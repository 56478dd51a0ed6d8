//! Mixed precision: autocast computes matrix products in half precision, and sums and exponentials in f32.
//!
//! Public methods first call [`autocast_inputs`] or [`autocast_to_f32`]. If these functions return cast tensors, the method calls itself
//! with the cast tensors. The casts are recorded, so each gradient arrives in the dtype of the original tensor.

use smallvec::SmallVec;

use crate::autograd::cast_once;
use crate::{DType, Error, Result, Tensor, autocast_dtype};

/// Casts the inputs of a matrix product to the autocast dtype.
///
/// Returns `None` outside an autocast scope, if all inputs already have that dtype, or if an input is neither f32, f16 nor bf16.
#[inline] // without inlining, the result's memory is moved even for `None`
pub(crate) fn autocast_inputs(op: &'static str, inputs: &[&Tensor]) -> Result<Option<SmallVec<[Tensor; 3]>>> {
    match autocast_dtype() {
        None => Ok(None),
        Some(dtype) => cast_to_autocast_dtype(op, inputs, dtype),
    }
}

fn cast_to_autocast_dtype(op: &'static str, inputs: &[&Tensor], dtype: DType) -> Result<Option<SmallVec<[Tensor; 3]>>> {
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
const F32_OPERATIONS: &[&str] = &[
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "pow", "pow_scalar", "rdiv_scalar",
    "reciprocal", "rpow_scalar", "rsqrt", "sinh", "softplus", "softplus_beta", "tan",
];

/// Calls [`autocast_to_f32`] if autocast computes the elementwise operation named `row` in f32.
pub(crate) fn autocast_row_to_f32(row: &str, inputs: &[&Tensor]) -> Result<Option<SmallVec<[Tensor; 3]>>> {
    if F32_OPERATIONS.contains(&row) { autocast_to_f32(inputs) } else { Ok(None) }
}

/// Casts f16 and bf16 inputs to f32. Returns `None` outside an autocast scope and if there are no such inputs.
#[inline]
pub(crate) fn autocast_to_f32(inputs: &[&Tensor]) -> Result<Option<SmallVec<[Tensor; 3]>>> {
    match autocast_dtype() {
        None => Ok(None),
        Some(_) => halves_to_f32(inputs),
    }
}

/// Casts f16 and bf16 inputs to f32. Returns `None` if there are no such inputs.
pub(crate) fn halves_to_f32(inputs: &[&Tensor]) -> Result<Option<SmallVec<[Tensor; 3]>>> {
    let half = |t: &Tensor| matches!(t.dtype, DType::F16 | DType::BF16);
    if !inputs.iter().any(|t| half(t)) {
        return Ok(None);
    }
    let wide = |t: &&Tensor| if half(t) { t.to_dtype(DType::F32) } else { Ok(t.shallow_clone()) };
    inputs.iter().map(wide).collect::<Result<_>>().map(Some)
}

//! Rounding of f64 numbers to dtypes, and the tolerances of results.

use claystone::DType;
use half::{bf16, f16};

/// Returns the tolerance of a result: absolute below 1, relative above. Integers must be exact.
pub fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-11,
        DType::F32 => 1e-5,
        DType::F16 => 3e-3,
        DType::BF16 => 2.5e-2,
        _ => 0.0,
    }
}

/// Returns `x` rounded to `dtype`.
pub fn rounded(x: f64, dtype: DType) -> f64 {
    match dtype {
        DType::F64 => x,
        DType::F32 => f64::from(x as f32),
        DType::F16 => f16::from_f32(x as f32).to_f64(),
        DType::BF16 => bf16::from_f32(x as f32).to_f64(),
        DType::Bool => f64::from(x > 0.0),
        DType::I64 | DType::I32 => x.round(),
        DType::U8 | DType::I8 | DType::I16 => rounded_result(x.round(), dtype),
        _ => x.round().abs(),
    }
}

/// Returns the result as `dtype` stores it: integers wrap around.
pub fn rounded_result(x: f64, dtype: DType) -> f64 {
    match dtype {
        DType::U8 => x.rem_euclid(256.0),
        DType::I8 => (x + 128.0).rem_euclid(256.0) - 128.0,
        DType::I16 => (x + 32_768.0).rem_euclid(65_536.0) - 32_768.0,
        DType::U32 => x.rem_euclid(4_294_967_296.0),
        _ => x,
    }
}

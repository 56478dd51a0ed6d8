//! The range of each dtype: one rule for every operation that takes a number from the caller.

use half::{bf16, f16};

use crate::{DType, Error, Result, Scalar};

impl DType {
    /// Returns the least and the greatest number of an integer dtype; `None` for floats and bool.
    const fn integers(self) -> Option<(i128, i128)> {
        match self {
            DType::I64 => Some((i64::MIN as i128, i64::MAX as i128)),
            DType::I32 => Some((i32::MIN as i128, i32::MAX as i128)),
            DType::I16 => Some((i16::MIN as i128, i16::MAX as i128)),
            DType::I8 => Some((i8::MIN as i128, i8::MAX as i128)),
            DType::U32 => Some((0, u32::MAX as i128)),
            DType::U8 => Some((0, u8::MAX as i128)),
            _ => None,
        }
    }

    /// Returns the greatest finite number of a float dtype.
    pub(crate) fn greatest(self) -> f64 {
        match self {
            DType::F16 => f16::MAX.to_f64(),
            DType::BF16 => bf16::MAX.to_f64(),
            DType::F32 => f64::from(f32::MAX),
            _ => f64::MAX,
        }
    }

    /// Returns the smallest positive number that every device computes with. Some devices flush subnormals of f32 to 0.
    pub(crate) fn smallest(self) -> f64 {
        match self {
            DType::F16 => f16::MIN_POSITIVE_SUBNORMAL.to_f64(),
            DType::F64 => f64::MIN_POSITIVE,
            _ => f64::from(f32::MIN_POSITIVE),
        }
    }

    /// Rounds `x` to the nearest number of a float dtype.
    pub(crate) fn rounded(self, x: f64) -> f64 {
        match self {
            DType::F16 => f16::from_f32(x as f32).to_f64(),
            DType::BF16 => bf16::from_f32(x as f32).to_f64(),
            DType::F32 => f64::from(x as f32),
            _ => x,
        }
    }

    /// Returns the greatest number of a float dtype that is at most `x`, or less than `x` if `open`.
    pub(crate) fn at_most(self, x: f64, open: bool) -> f64 {
        let (nearest, smallest) = (self.rounded(x), self.smallest());
        match self {
            _ if nearest < x || (nearest == x && !open) => nearest,
            _ if nearest.abs() < smallest || nearest == smallest => [-smallest, 0.0][usize::from(nearest > 0.0)],
            DType::F16 => {
                let bits = f16::from_f64(nearest).to_bits();
                f16::from_bits(if nearest > 0.0 { bits - 1 } else { bits + 1 }).to_f64()
            }
            DType::BF16 => {
                let bits = bf16::from_f64(nearest).to_bits();
                bf16::from_bits(if nearest > 0.0 { bits - 1 } else { bits + 1 }).to_f64()
            }
            DType::F32 => f64::from((nearest as f32).next_down()),
            _ => nearest.next_down(),
        }
    }

    /// Returns the least number of a float dtype that is at least `x`.
    pub(crate) fn at_least(self, x: f64) -> f64 {
        -self.at_most(-x, false)
    }
}

impl Scalar {
    /// Returns the number that `dtype` holds after storing this number. Follows PyTorch except for fractions: unsigned dtypes wrap integers
    /// from `-MAX` to -1, and bool is true for all numbers except 0. Floats round, and keep NaN and infinities. Fails with
    /// [`Error::Invalid`] for a fraction into integers or bool, and for any other number out of the dtype's range. A finite number that
    /// rounds to infinity is out of range.
    #[inline]
    pub(crate) fn stored(self, op: &'static str, dtype: DType) -> Result<Scalar> {
        let x = self.to_f64();
        if dtype.is_float() {
            let overflows = x.is_finite() && dtype.rounded(x).is_infinite();
            return if overflows { Err(self.out_of_range(op, dtype)) } else { Ok(self) };
        }
        invalid!(op if x.is_finite() && x.fract() != 0.0,
            "{x} is not an integer, but the tensor is {dtype}: convert it with .to_dtype()");
        let Some((lowest, greatest)) = dtype.integers() else { return Ok(Scalar::from(x != 0.0)) };
        let whole = match self {
            Scalar::Int(i) => i128::from(i),
            Scalar::Float(x) if x.is_nan() => i128::MAX,
            Scalar::Float(x) => x as i128,
        };
        let wraps = lowest == 0 && matches!(self, Scalar::Int(_)) && (-greatest..0).contains(&whole);
        match () {
            () if wraps => Ok(Scalar::Int((whole + greatest + 1) as i64)),
            () if (lowest..=greatest).contains(&whole) => Ok(Scalar::Int(whole as i64)),
            () => Err(self.out_of_range(op, dtype)),
        }
    }

    /// Returns an error if [`Scalar::stored`] fails, or if an integer would wrap. For the bounds of ranges.
    pub(crate) fn check_within(self, op: &'static str, dtype: DType) -> Result<()> {
        let stored = self.stored(op, dtype)?;
        let wrapped = dtype.integers().is_some() && stored.to_i64() != self.to_i64();
        if wrapped { Err(self.out_of_range(op, dtype)) } else { Ok(()) }
    }

    /// Returns an error for a factor that integer arithmetic would change: a fraction, or a number out of the dtype's range.
    pub(crate) fn check_factor(self, op: &'static str, dtype: DType) -> Result<()> {
        if dtype.is_float() { Ok(()) } else { self.stored(op, dtype).map(drop) }
    }

    #[cold]
    fn out_of_range(self, op: &'static str, dtype: DType) -> Error {
        let number = match self {
            Scalar::Float(x) => format!("{x:?}"),
            Scalar::Int(i) => i.to_string(),
        };
        let range = match dtype.integers() {
            Some((lowest, greatest)) => format!("{lowest} to {greatest}"),
            None => format!("{:?} to {:?}", -dtype.greatest(), dtype.greatest()),
        };
        Error::invalid(op, format!("{number} is out of the range of {dtype}, {range}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The results must agree with each float dtype's own rounding from f64.
    #[test]
    fn the_nearest_numbers_below_and_above() {
        for dtype in [DType::F32, DType::F16, DType::BF16, DType::F64] {
            for x in [0.0, 1.0, 0.1, -0.1, 2.0, 3.0, -4.0, 255.9, 1e-3, -1e4, dtype.smallest(), -dtype.smallest()] {
                let (below, least) = (dtype.at_most(x, true), dtype.at_least(x));
                assert!(below < x && x <= least, "{x} of {dtype}: {below} {least}");
                assert_eq!([below, least].map(|x| dtype.rounded(x)), [below, least], "{x} of {dtype}");
                // No number of the dtype is strictly between them, except x itself.
                let middle = dtype.rounded(0.5 * (below + least));
                let flushed = middle.abs() < dtype.smallest();
                assert!(flushed || [below, least, x].contains(&middle), "{x} of {dtype}: {middle}");
                assert_eq!(dtype.at_most(least, false), least);
            }
        }
    }
}

//! Type promotion: PyTorch's rules where dtypes alone decide, and the default dtype.
//!
//! There are three categories: bool, integer and float. Only operands of the highest category decide the result's dtype.
//! `ops::dispatch::promote` adds the rules for scalars and tensors without dims.

use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::Relaxed;

use super::DType;
use crate::Result;

/// The default dtype, as an index of `DType::ALL`.
static DEFAULT: AtomicU8 = AtomicU8::new(0);

/// Sets the default dtype for the whole process (PyTorch's `set_default_dtype`): the dtype of new tensors, and of float results of
/// operations on integers. It is f32 at first. Fails with [`Error::UnsupportedDType`](crate::Error::UnsupportedDType) for integers and
/// bool.
pub fn set_default_dtype(dtype: DType) -> Result<()> {
    dtype.check_float("set_default_dtype")?;
    let index = DType::ALL.iter().position(|&d| d == dtype).unwrap_or(0);
    DEFAULT.store(index as u8, Relaxed);
    Ok(())
}

/// Returns the dtype that [`set_default_dtype`] set last, initially f32 (PyTorch's `get_default_dtype`).
pub fn get_default_dtype() -> DType {
    DType::ALL[usize::from(DEFAULT.load(Relaxed))]
}

/// The three categories of dtypes, in ascending order of precedence.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Category {
    Bool,
    Integer,
    Float,
}

pub(crate) fn category(dtype: DType) -> Category {
    match dtype {
        DType::Bool => Category::Bool,
        d if d.is_float() => Category::Float,
        _ => Category::Integer,
    }
}

/// Returns the smallest dtype that both dtypes convert to without leaving the higher category (PyTorch's `promote_types`).
///
/// ```
/// use claystone::{DType, promote_types};
/// assert_eq!(promote_types(DType::F16, DType::BF16), DType::F32);
/// assert_eq!(promote_types(DType::I64, DType::F16), DType::F16);
/// assert_eq!(promote_types(DType::I32, DType::U32), DType::I64);
/// ```
pub fn promote_types(a: DType, b: DType) -> DType {
    use DType::*;
    if a == b {
        return a;
    }
    if category(a) != category(b) {
        return if category(a) > category(b) { a } else { b };
    }
    match (a, b) {
        (F64, _) | (_, F64) => F64,
        _ if a.is_float() => F32,
        (U8, I8) | (I8, U8) => I16,
        (I8 | I16, U32) | (U32, I8 | I16) => I64,
        (U8 | I8, other) | (other, U8 | I8) | (I16, other) | (other, I16) => other,
        _ => I64,
    }
}

/// True if a result of dtype `from` may be stored in a tensor of dtype `to` (PyTorch's `can_cast`). Floats may not be stored in integers,
/// nor numbers in bools.
///
/// ```
/// use claystone::{DType, can_cast};
/// assert!(can_cast(DType::F64, DType::F16) && !can_cast(DType::F16, DType::I64) && !can_cast(DType::U8, DType::Bool));
/// ```
pub fn can_cast(from: DType, to: DType) -> bool {
    category(from) <= category(to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_promote_as_in_pytorch() {
        use DType::*;
        let integers = [U8, I8, I16, U32, I32, I64];
        let promoted = [
            [U8, I16, I16, U32, I32, I64],
            [I16, I8, I16, I64, I32, I64],
            [I16, I16, I16, I64, I32, I64],
            [U32, I64, I64, U32, I64, I64],
            [I32, I32, I32, I64, I32, I64],
            [I64; 6],
        ];
        assert_eq!(integers.map(|a| integers.map(|b| promote_types(a, b))), promoted);
    }

    #[test]
    fn promotion_is_symmetric_associative_and_has_bool_as_its_least() {
        for a in DType::ALL {
            assert_eq!(promote_types(a, a), a);
            assert_eq!(promote_types(DType::Bool, a), a);
            for b in DType::ALL {
                let both = promote_types(a, b);
                assert_eq!(both, promote_types(b, a), "{a} {b}");
                assert_eq!(promote_types(both, b), both, "{a} {b}");
                assert!(can_cast(a, both) && can_cast(b, both));
            }
        }
    }
}

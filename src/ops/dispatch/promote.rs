//! Which dtype operands of several meet in: PyTorch's rules of promotion.
//!
//! There are three categories: bool, integers, floats. The highest that an operand is of decides; within it, what has
//! dimensions decides over 0-d tensors, and these over numbers: `f16 tensor * 2.5` stays f16. Kernels convert operands as
//! they load them, so promotion costs nothing.

use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::Relaxed;

use crate::{DType, Error, Result, Scalar, Tensor};

/// An index of `DType::ALL`.
static DEFAULT: AtomicU8 = AtomicU8::new(0);

/// Sets the dtype of new tensors where none is given, and of the results of operations on integers that are floats
/// (PyTorch's `set_default_dtype`), for the whole process. It is f32 at first.
///
/// # Errors
/// [`Error::UnsupportedDType`] for integers and bool.
pub fn set_default_dtype(dtype: DType) -> Result<()> {
    dtype.check_float("set_default_dtype")?;
    let index = DType::ALL.iter().position(|&d| d == dtype).unwrap_or(0);
    DEFAULT.store(index as u8, Relaxed);
    Ok(())
}

/// What [`set_default_dtype`] set last (PyTorch's `get_default_dtype`).
pub fn get_default_dtype() -> DType {
    DType::ALL[usize::from(DEFAULT.load(Relaxed))]
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Category {
    Bool,
    Integer,
    Float,
}

fn category(dtype: DType) -> Category {
    match dtype {
        DType::Bool => Category::Bool,
        d if d.is_float() => Category::Float,
        _ => Category::Integer,
    }
}

/// The smallest dtype that both convert to without leaving a category (PyTorch's `promote_types`).
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
        (U8, other) | (other, U8) => other,
        _ if a.is_float() => F32,
        _ => I64,
    }
}

/// Whether a result of dtype `from` may be stored in a tensor of dtype `to` (PyTorch's `can_cast`): not floats in integers,
/// nor numbers in bools.
///
/// ```
/// use claystone::{DType, can_cast};
/// assert!(can_cast(DType::F64, DType::F16) && !can_cast(DType::F16, DType::I64) && !can_cast(DType::U8, DType::Bool));
/// ```
pub fn can_cast(from: DType, to: DType) -> bool {
    category(from) <= category(to)
}

/// The dtype that tensors and numbers meet in (PyTorch's `result_type`).
///
/// ```
/// use claystone::{DType, Device, Tensor, result_type};
/// let half = Tensor::ones(3, (DType::F16, Device::Cpu))?;
/// let scalar = Tensor::ones((), (DType::F64, Device::Cpu))?;
/// let whole = Tensor::ones(3, (DType::I64, Device::Cpu))?;
/// assert_eq!(result_type(&[&half, &scalar, &whole], &[2.5.into()]), Some(DType::F16));
/// assert_eq!(result_type(&[&whole], &[2.5.into()]), Some(DType::F32));
/// # Ok::<(), claystone::Error>(())
/// ```
pub fn result_type(tensors: &[&Tensor], scalars: &[Scalar]) -> Option<DType> {
    common(tensors.iter().map(|t| (t.dtype, t.rank() == 0)), scalars)
}

/// [`result_type`] of operands by their dtypes and whether they have no dimension.
pub(crate) fn common(operands: impl Iterator<Item = (DType, bool)>, scalars: &[Scalar]) -> Option<DType> {
    let (mut all, mut zero): (Option<DType>, Option<DType>) = (None, None);
    for (dtype, is_scalar) in operands {
        let slot = if is_scalar { &mut zero } else { &mut all };
        *slot = Some(slot.map_or(dtype, |d| promote_types(d, dtype)));
    }
    let number = |s: &Scalar| match s {
        Scalar::Float(_) => get_default_dtype(),
        Scalar::Int(_) => DType::I64,
    };
    let lower = [zero, scalars.iter().map(number).reduce(promote_types)];
    lower.into_iter().flatten().fold(all, |higher, lower| match higher {
        Some(higher) if category(higher) >= category(lower) => Some(higher),
        _ => Some(lower),
    })
}

/// An error where a result of this dtype does not go into `target` in place.
pub(crate) fn check_in_place(op: &'static str, result: DType, target: &Tensor) -> Result<()> {
    if can_cast(result, target.dtype) {
        return Ok(());
    }
    let reason = format!(
        "the result is {result} and the tensor changed in place {}: use the operation without the '_'",
        target.dtype
    );
    Err(Error::invalid(op, reason))
}

#[cfg(test)]
mod tests {
    use super::*;

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

    #[test]
    fn what_has_dimensions_decides_within_a_category() {
        use DType::*;
        let of = |operands: &[(DType, bool)], scalars: &[Scalar]| common(operands.iter().copied(), scalars).unwrap();
        assert_eq!(of(&[(F16, false), (F64, true)], &[]), F16);
        assert_eq!(of(&[(F16, false), (F64, false)], &[]), F64);
        assert_eq!(of(&[(I32, false), (F64, true)], &[2.into()]), F64);
        assert_eq!(of(&[(U8, false), (I64, true)], &[300.into()]), U8);
        assert_eq!(of(&[(Bool, false)], &[1.into()]), I64);
        assert_eq!(of(&[(Bool, false)], &[0.5.into()]), F32);
        assert_eq!(of(&[(BF16, true)], &[0.5.into()]), BF16);
        assert_eq!(of(&[(U8, true), (I32, true)], &[]), I32);
        assert_eq!(common(std::iter::empty(), &[]), None);
    }
}

//! PyTorch's rules of dtype promotion.
//!
//! There are three categories: bool, integers and floats. The highest category of any operand determines the category of the
//! result. Within a category, tensors with dims take precedence over 0-d tensors, and 0-d tensors over numbers:
//! `f16 tensor * 2.5` stays f16. Kernels convert operands as they load them, so promotion needs no extra launch.

use crate::dtype::category;
use crate::{DType, Error, Result, Scalar, Tensor, can_cast, get_default_dtype, promote_types};

/// Returns the common dtype of tensors and scalars after promotion (PyTorch's `result_type`), or `None` if there are no operands.
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
    promoted_dtype(tensors.iter().map(|t| (t.dtype, t.rank() == 0)), scalars)
}

/// Returns the common dtype like [`result_type`]. Each operand is given by its dtype and whether it is 0-d.
pub(crate) fn promoted_dtype(operands: impl Iterator<Item = (DType, bool)>, scalars: &[Scalar]) -> Option<DType> {
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

/// Returns an error if a result of this dtype cannot be stored in `target`.
pub(crate) fn check_in_place_dtype(op: &'static str, result: DType, target: &Tensor) -> Result<()> {
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
    fn tensors_with_dims_take_precedence_within_a_category() {
        use DType::*;
        let of =
            |operands: &[(DType, bool)], scalars: &[Scalar]| promoted_dtype(operands.iter().copied(), scalars).unwrap();
        assert_eq!(of(&[(F16, false), (F64, true)], &[]), F16);
        assert_eq!(of(&[(F16, false), (F64, false)], &[]), F64);
        assert_eq!(of(&[(I32, false), (F64, true)], &[2.into()]), F64);
        assert_eq!(of(&[(U8, false), (I64, true)], &[300.into()]), U8);
        assert_eq!(of(&[(Bool, false)], &[1.into()]), I64);
        assert_eq!(of(&[(Bool, false)], &[0.5.into()]), F32);
        assert_eq!(of(&[(BF16, true)], &[0.5.into()]), BF16);
        assert_eq!(of(&[(U8, true), (I32, true)], &[]), I32);
        assert_eq!(promoted_dtype(std::iter::empty(), &[]), None);
    }
}

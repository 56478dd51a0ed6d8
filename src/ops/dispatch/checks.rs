//! Checks of an operation's operands, and the errors of those that do not go together.

use crate::{DType, Device, Error, Result, Tensor};

/// The one device of all inputs.
pub(crate) fn same_device(op: &'static str, inputs: &[&Tensor]) -> Result<Device> {
    let device = inputs[0].device();
    match inputs.iter().find(|t| t.device() != device) {
        Some(t) => Err(Error::DeviceMismatch { op, lhs: device, rhs: t.device() }),
        None => Ok(device),
    }
}

/// The one dtype of all inputs.
pub(crate) fn same_dtype(op: &'static str, inputs: &[&Tensor]) -> Result<DType> {
    let dtype = inputs[0].dtype;
    match inputs.iter().find(|t| t.dtype != dtype) {
        Some(t) => Err(Error::DTypeMismatch { op, lhs: dtype, rhs: t.dtype }),
        None => Ok(dtype),
    }
}

/// Tensors whose shapes do not go together.
pub(crate) fn shape_mismatch(op: &'static str, a: &Tensor, b: &Tensor, hint: &'static str) -> Error {
    Error::ShapeMismatch { op, lhs: a.shape().clone(), rhs: b.shape().clone(), hint }
}

/// `invalid!(op if condition, "message {}", ..)` returns [`Error::Invalid`] where the condition holds.
macro_rules! invalid {
    ($op:tt if let $pattern:pat = $value:expr, $($message:tt)+) => {
        if let $pattern = $value {
            return Err($crate::Error::invalid($op, format!($($message)+)));
        }
    };
    ($op:tt if $condition:expr, $($message:tt)+) => {
        if $condition {
            return Err($crate::Error::invalid($op, format!($($message)+)));
        }
    };
}

/// `mismatch!(op if condition, a, b, hint)` returns [`Error::ShapeMismatch`] of two tensors where the condition holds.
macro_rules! mismatch {
    ($op:tt if $condition:expr, $a:expr, $b:expr, $hint:expr) => {
        if $condition {
            return Err($crate::ops::dispatch::checks::shape_mismatch($op, $a, $b, $hint));
        }
    };
}

/// `unsupported!(op if condition, dtype, expected)` returns [`Error::UnsupportedDType`] where the condition holds.
macro_rules! unsupported {
    ($op:tt if $condition:expr, $dtype:expr, $expected:expr) => {
        if $condition {
            return Err($crate::Error::UnsupportedDType { op: $op, dtype: $dtype, expected: $expected });
        }
    };
}

/// An error in the name of the operation that the user called, where that is made of others.
pub(crate) trait NamedError {
    fn named(self, op: &'static str) -> Self;
}

impl<T> NamedError for Result<T> {
    #[inline]
    fn named(self, op: &'static str) -> Result<T> {
        self.map_err(|e| e.of(op))
    }
}

/// `cast_first!(lowered(op, &[a, b])?, |x| x[0].method(&x[1]))` at the beginning of a method: where autocast gives the inputs in
/// another dtype, the method starts again with them.
macro_rules! cast_first {
    ($cast:expr, $again:expr) => {
        if let Some(cast) = $cast {
            return $crate::ops::dispatch::checks::again(&cast, $again);
        }
    };
}

/// Calls `method`, which [`cast_first`] needs a type of.
pub(crate) fn again<R>(cast: &[Tensor], method: impl FnOnce(&[Tensor]) -> Result<R>) -> Result<R> {
    method(cast)
}

pub(crate) use {cast_first, invalid, mismatch, unsupported};

//! Checks of an operation's operands, and the errors for invalid operands.

use crate::{DType, Device, Error, Result, Tensor};

/// Returns the device of the inputs, or an error if they are on different devices.
pub fn same_device(op: &'static str, inputs: &[&Tensor]) -> Result<Device> {
    let device = inputs[0].device();
    match inputs.iter().find(|t| t.device() != device) {
        Some(t) => Err(Error::DeviceMismatch { op, lhs: device, rhs: t.device() }),
        None => Ok(device),
    }
}

/// Returns the dtype of the inputs, or an error if their dtypes differ.
pub fn same_dtype(op: &'static str, inputs: &[&Tensor]) -> Result<DType> {
    let dtype = inputs[0].dtype;
    match inputs.iter().find(|t| t.dtype != dtype) {
        Some(t) => Err(Error::DTypeMismatch { op, lhs: dtype, rhs: t.dtype }),
        None => Ok(dtype),
    }
}

pub(crate) fn shape_mismatch(op: &'static str, a: &Tensor, b: &Tensor, hint: &'static str) -> Error {
    Error::ShapeMismatch { op, lhs: a.shape().clone(), rhs: b.shape().clone(), hint }
}

/// `mismatch!(op if condition, a, b, hint)` returns [`Error::ShapeMismatch`] of tensors `a` and `b` if the condition holds.
macro_rules! mismatch {
    ($op:tt if $condition:expr, $a:expr, $b:expr, $hint:expr) => {
        if $condition {
            return Err($crate::ops::dispatch::checks::shape_mismatch($op, $a, $b, $hint));
        }
    };
}

/// `unsupported!(op if condition, dtype, expected)` returns [`Error::UnsupportedDType`] if the condition holds.
macro_rules! unsupported {
    ($op:tt if $condition:expr, $dtype:expr, $expected:expr) => {
        if $condition {
            return Err($crate::Error::UnsupportedDType { op: $op, dtype: $dtype, expected: $expected });
        }
    };
}

/// `fail!(op, message, ..)` returns [`Error::Invalid`] with a formatted message.
macro_rules! fail {
    ($op:expr, $($message:tt)+) => {
        return Err($crate::Error::invalid($op, format!($($message)+)))
    };
}

/// Changes the operation named in an error: an error of an inner operation names the operation that the user called.
pub(crate) trait WithOp {
    fn with_op(self, op: &'static str) -> Self;
}

impl<T> WithOp for Result<T> {
    #[inline]
    fn with_op(self, op: &'static str) -> Result<T> {
        self.map_err(|e| e.with_op(op))
    }
}

/// `cast_first!(autocast_inputs(op, &[a, b])?, |x| x[0].method(&x[1]))` at the beginning of a method applies autocast.
/// If autocast casts the inputs, the method is called again with the cast tensors and its result returned.
macro_rules! cast_first {
    ($cast:expr, $again:expr) => {
        if let Some(cast) = $cast {
            return $crate::ops::dispatch::checks::call_with_cast(&cast, $again);
        }
    };
}

/// Calls `method` with the tensors `cast`. Passing the closure of [`cast_first`] to a function lets the compiler infer its parameter
/// type.
pub(crate) fn call_with_cast<R>(cast: &[Tensor], method: impl FnOnce(&[Tensor]) -> Result<R>) -> Result<R> {
    method(cast)
}

pub(crate) use {cast_first, fail, mismatch, unsupported};

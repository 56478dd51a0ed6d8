//! The operators `+ - * /`, `+= -= *= /=` and unary `-`. Where a method returns an error, the operator panics with the error's message.
//!
//! Only f64 and i64 numbers are accepted, so that the type of a literal is unambiguous: `(1.0 - &x).exp()` would not compile
//! if f32 were accepted, too. The methods (`mul_scalar`, ...) take every type of number.
//!
//! A left operand passed by value is consumed: the result reuses its memory if no other handle shares the storage.

use std::ops::{Add, AddAssign, Div, DivAssign, Mul, MulAssign, Neg, Sub, SubAssign};

use crate::layout::shape::impl_from;
use crate::storage::Caller;
use crate::{Result, Tensor};

#[track_caller]
fn unwrap_or_panic<T>(result: Result<T>) -> T {
    match result {
        Ok(value) => value,
        Err(e) => panic!("{e}"), // not in a closure, so that the panic reports the caller's line
    }
}

/// The left operand of an operator.
enum LeftOperand<'a> {
    Borrowed(&'a Tensor),
    Owned(Tensor),
}

impl_from! { LeftOperand<'a>:
    ['a] &'a Tensor, t => LeftOperand::Borrowed(t);
    ['a] Tensor, t => LeftOperand::Owned(t);
}

/// Computes the result for `left` and an optional `right`: with `in_place` if `left` is the only handle on its storage, otherwise with
/// `out_of_place`.
#[track_caller]
fn compute_maybe_in_place(
    left: LeftOperand,
    right: Option<&Tensor>,
    out_of_place: impl FnOnce(&Tensor) -> Result<Tensor>,
    in_place: impl FnOnce(&Tensor) -> Result<()>,
) -> Tensor {
    let _caller = Caller::enter();
    let t = match left {
        LeftOperand::Borrowed(t) => return unwrap_or_panic(out_of_place(t)),
        LeftOperand::Owned(t) => t,
    };
    let fits = |right: &Tensor| {
        let broadcast = || t.shape().broadcast("", right.shape()).is_ok_and(|shape| shape == *t.shape());
        !right.requires_grad() && right.dtype == t.dtype && (right.shape() == t.shape() || broadcast())
    };
    // In place, the result keeps the dtype of the left operand, which the result of the method has only for floats.
    let owned = t.storage.is_unique() && !t.requires_grad() && t.dtype.is_float();
    let free = owned && t.layout.is_dense() && right.is_none_or(fits);
    if free { unwrap_or_panic(in_place(&t).map(|()| t)) } else { unwrap_or_panic(out_of_place(&t)) }
}

/// Implements an operator and its assignment form by calling the named methods. The right operand is a tensor or a number; the left
/// operand may also be a number.
macro_rules! impl_operators {
    ($($op:ident $method:ident $method_:ident, $scalar:ident $scalar_:ident $reversed:ident, $assign:ident $assign_method:ident;)*) => { $(
        impl_operators!(@tensors $op $method $method_: &Tensor, &Tensor; &Tensor, Tensor; Tensor, &Tensor; Tensor, Tensor);
        impl_operators!(@number $op $method $scalar $scalar_ $reversed: &Tensor, f64; &Tensor, i64; Tensor, f64; Tensor, i64);
        impl_operators!(@assign $assign $assign_method $method_: other, &Tensor, other; other, Tensor, &other);
        impl_operators!(@assign $assign $assign_method $scalar_: number, f64, number; number, i64, number);
    )* };
    (@tensors $op:ident $method:ident $method_:ident: $($left:ty, $right:ty);*) => { $(
        /// Applies the operator element by element, with broadcasting. Panics where the corresponding method returns an error, with that
        /// error's message.
        impl $op<$right> for $left {
            type Output = Tensor;

            #[track_caller]
            fn $method(self, other: $right) -> Tensor {
                let other: &Tensor = &other;
                compute_maybe_in_place(self.into(), Some(other), |t| Tensor::$method(t, other), |t| t.$method_(other).map(|_| ()))
            }
        }
    )* };
    (@number $op:ident $method:ident $scalar:ident $scalar_:ident $reversed:ident: $($tensor:ty, $number:ty);*) => { $(
        /// Applies the operator to each element and a number. Panics with the error's message if the method returns an error.
        impl $op<$number> for $tensor {
            type Output = Tensor;

            #[track_caller]
            fn $method(self, number: $number) -> Tensor {
                compute_maybe_in_place(self.into(), None, |t| t.$scalar(number), |t| t.$scalar_(number).map(|_| ()))
            }
        }

        /// Applies the operator to a number and each element. Panics with the error's message if the method returns an error.
        impl $op<$tensor> for $number {
            type Output = Tensor;

            #[track_caller]
            fn $method(self, tensor: $tensor) -> Tensor {
                unwrap_or_panic(tensor.$reversed(self))
            }
        }
    )* };
    (@assign $op:ident $method:ident $method_:ident: $($x:ident, $right:ty, $value:expr);*) => { $(
        /// Applies the operator in place. Panics with the error's message if the method returns an error.
        impl $op<$right> for Tensor {
            #[track_caller]
            fn $method(&mut self, $x: $right) {
                unwrap_or_panic(self.$method_($value).map(|_| ()))
            }
        }
    )* };
}

impl_operators! {
    Add add add_, add_scalar add_scalar_ add_scalar, AddAssign add_assign;
    Sub sub sub_, sub_scalar sub_scalar_ rsub_scalar, SubAssign sub_assign;
    Mul mul mul_, mul_scalar mul_scalar_ mul_scalar, MulAssign mul_assign;
    Div div div_, div_scalar div_scalar_ rdiv_scalar, DivAssign div_assign;
}

impl Neg for &Tensor {
    type Output = Tensor;

    #[track_caller]
    fn neg(self) -> Tensor {
        unwrap_or_panic(Tensor::neg(self))
    }
}

impl Neg for Tensor {
    type Output = Tensor;

    #[track_caller]
    fn neg(self) -> Tensor {
        compute_maybe_in_place(self.into(), None, Tensor::neg, |t| t.neg_().map(|_| ()))
    }
}

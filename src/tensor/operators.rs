//! `+ - * /`, `+= -= *= /=` and `-` for tensors and numbers. They panic where the methods give an error, with the same message.
//!
//! The numbers are f64 and i64 and no others, so that a literal's type is known: `(1.0 - &x).exp()` would not compile if f32
//! would do as well. The methods (`mul_scalar`, ...) take every type of number.
//!
//! A left operand given by value is consumed: the result is computed in its memory where no other handle shares that.

use std::ops::{Add, AddAssign, Div, DivAssign, Mul, MulAssign, Neg, Sub, SubAssign};

use crate::storage::Caller;
use crate::{Result, Tensor};

#[track_caller]
fn expect<T>(result: Result<T>) -> T {
    match result {
        Ok(value) => value,
        Err(e) => panic!("{e}"), // here and not in a closure, so that the caller's line is named
    }
}

/// The left operand.
enum Left<'a> {
    Borrowed(&'a Tensor),
    Owned(Tensor),
}

impl<'a> From<&'a Tensor> for Left<'a> {
    fn from(t: &'a Tensor) -> Left<'a> {
        Left::Borrowed(t)
    }
}

impl From<Tensor> for Left<'_> {
    fn from(t: Tensor) -> Self {
        Left::Owned(t)
    }
}

/// The result for `left` and, where there is one, `right`: computed `in_place` where the left one is owned and no other handle
/// sees its memory.
#[track_caller]
fn computed(
    left: Left,
    right: Option<&Tensor>,
    out_of_place: impl FnOnce(&Tensor) -> Result<Tensor>,
    in_place: impl FnOnce(&Tensor) -> Result<()>,
) -> Tensor {
    let _caller = Caller::enter();
    let t = match left {
        Left::Borrowed(t) => return expect(out_of_place(t)),
        Left::Owned(t) => t,
    };
    let fits = |right: &Tensor| {
        let broadcast = || t.shape().broadcast("", right.shape()).is_ok_and(|shape| shape == *t.shape());
        !right.requires_grad() && right.dtype == t.dtype && (right.shape() == t.shape() || broadcast())
    };
    // What is done to floats gives floats of the same dtype.
    let owned = t.storage.is_unique() && !t.requires_grad() && t.dtype.is_float();
    let free = owned && t.layout.is_dense() && right.is_none_or(fits);
    if free { expect(in_place(&t).map(|()| t)) } else { expect(out_of_place(&t)) }
}

/// One operator between tensors and with a number on the right, by the methods of those names.
macro_rules! binary {
    ($($op:ident $method:ident $method_:ident $scalar:ident $scalar_:ident $assign:ident $assign_method:ident;)*) => { $(
        binary!(@assign $assign $assign_method $method_: &Tensor, Tensor);
        binary!(@assign_number $assign $assign_method $scalar_: f64, i64);
        binary!(@tensors $op $method $method_: &Tensor, &Tensor; &Tensor, Tensor; Tensor, &Tensor; Tensor, Tensor);
        binary!(@numbers $op $method $scalar $scalar_: f64 i64);
    )* };
    (@tensors $op:ident $method:ident $method_:ident: $($left:ty, $right:ty);*) => { $(
        /// Element by element, broadcast.
        ///
        /// # Panics
        /// Where the method of this name gives an error, with its message.
        impl $op<$right> for $left {
            type Output = Tensor;

            #[track_caller]
            fn $method(self, other: $right) -> Tensor {
                let other: &Tensor = &other;
                computed(self.into(), Some(other), |t| Tensor::$method(t, other), |t| t.$method_(other).map(|_| ()))
            }
        }
    )* };
    (@assign $op:ident $method:ident $method_:ident: $($right:ty),*) => { $(
        /// In place.
        ///
        /// # Panics
        /// Where the method in place gives an error, with its message.
        impl $op<$right> for Tensor {
            #[track_caller]
            fn $method(&mut self, other: $right) {
                let other: &Tensor = &other;
                expect(self.$method_(other).map(|_| ()))
            }
        }
    )* };
    (@assign_number $op:ident $method:ident $scalar_:ident: $($number:ty),*) => { $(
        /// In place.
        ///
        /// # Panics
        /// Where the method in place gives an error, with its message.
        impl $op<$number> for Tensor {
            #[track_caller]
            fn $method(&mut self, number: $number) {
                expect(self.$scalar_(number).map(|_| ()))
            }
        }
    )* };
    (@numbers $op:ident $method:ident $scalar:ident $scalar_:ident: $($number:ty)*) => { $(
        binary!(@number $op $method $scalar $scalar_ $number: &Tensor, Tensor);
    )* };
    (@number $op:ident $method:ident $scalar:ident $scalar_:ident $number:ty: $($tensor:ty),*) => { $(
        /// Each element and a number.
        ///
        /// # Panics
        /// Where the method gives an error, with its message.
        impl $op<$number> for $tensor {
            type Output = Tensor;

            #[track_caller]
            fn $method(self, number: $number) -> Tensor {
                computed(self.into(), None, |t| t.$scalar(number), |t| t.$scalar_(number).map(|_| ()))
            }
        }
    )* };
}

/// One operator with a number on the left.
macro_rules! reversed {
    ($($op:ident $method:ident $scalar:ident;)*) => { $(
        reversed!(@numbers $op $method $scalar: f64 i64);
    )* };
    (@numbers $op:ident $method:ident $scalar:ident: $($number:ty)*) => { $(
        reversed!(@number $op $method $scalar $number: &Tensor, Tensor);
    )* };
    (@number $op:ident $method:ident $scalar:ident $number:ty: $($tensor:ty),*) => { $(
        /// A number and each element.
        ///
        /// # Panics
        /// Where the method gives an error, with its message.
        impl $op<$tensor> for $number {
            type Output = Tensor;

            #[track_caller]
            fn $method(self, tensor: $tensor) -> Tensor {
                expect(tensor.$scalar(self))
            }
        }
    )* };
}

binary! {
    Add add add_ add_scalar add_scalar_ AddAssign add_assign;
    Sub sub sub_ sub_scalar sub_scalar_ SubAssign sub_assign;
    Mul mul mul_ mul_scalar mul_scalar_ MulAssign mul_assign;
    Div div div_ div_scalar div_scalar_ DivAssign div_assign;
}

reversed! {
    Add add add_scalar;
    Sub sub rsub_scalar;
    Mul mul mul_scalar;
    Div div rdiv_scalar;
}

impl Neg for &Tensor {
    type Output = Tensor;

    #[track_caller]
    fn neg(self) -> Tensor {
        expect(Tensor::neg(self))
    }
}

impl Neg for Tensor {
    type Output = Tensor;

    #[track_caller]
    fn neg(self) -> Tensor {
        computed(self.into(), None, Tensor::neg, |t| t.neg_().map(|_| ()))
    }
}

//! `+ - * /` and `-` for tensors and numbers. They panic where the methods give an error, with the same message.
//!
//! The numbers are f64 and i64 and no others, so that a literal's type is known: `(1.0 - &x).exp()` would not compile if f32
//! would do as well. The methods (`mul_scalar`, ...) take every type of number.

use std::ops::{Add, Div, Mul, Neg, Sub};

use crate::{Result, Tensor};

#[track_caller]
fn expect(result: Result<Tensor>) -> Tensor {
    result.unwrap_or_else(|e| panic!("{e}"))
}

/// One operator between tensors and with a number on the right, by the methods of those names.
macro_rules! binary {
    ($($op:ident $method:ident $scalar:ident;)*) => { $(
        binary!(@tensors $op $method: &Tensor, &Tensor; &Tensor, Tensor; Tensor, &Tensor; Tensor, Tensor);
        binary!(@numbers $op $method $scalar: f64 i64);
    )* };
    (@tensors $op:ident $method:ident: $($left:ty, $right:ty);*) => { $(
        /// Element by element, broadcast.
        ///
        /// # Panics
        /// Where the method of this name gives an error, with its message.
        impl $op<$right> for $left {
            type Output = Tensor;

            #[track_caller]
            fn $method(self, other: $right) -> Tensor {
                let (this, other): (&Tensor, &Tensor) = (&self, &other);
                expect(Tensor::$method(this, other))
            }
        }
    )* };
    (@numbers $op:ident $method:ident $scalar:ident: $($number:ty)*) => { $(
        binary!(@number $op $method $scalar $number: &Tensor, Tensor);
    )* };
    (@number $op:ident $method:ident $scalar:ident $number:ty: $($tensor:ty),*) => { $(
        /// Each element and a number.
        ///
        /// # Panics
        /// Where the method gives an error, with its message.
        impl $op<$number> for $tensor {
            type Output = Tensor;

            #[track_caller]
            fn $method(self, number: $number) -> Tensor {
                expect(self.$scalar(number))
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
    Add add add_scalar;
    Sub sub sub_scalar;
    Mul mul mul_scalar;
    Div div div_scalar;
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
        -&self
    }
}

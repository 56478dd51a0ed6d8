//! Elementwise operations that are made of rows of the table, and PyTorch's other names of some rows.

use crate::ops::dispatch::prelude::*;
use crate::ops::formula;
use crate::{DType, Expr, Result, Shape, Tensor};

/// What a method says of all elements, as the catalogue's operations give it: a tensor.
fn scalar_bool(x: &Tensor, says: bool) -> Result<Tensor> {
    Tensor::full((), i64::from(says), (DType::Bool, x.device()))
}

operations! {
    equal(input: x, other: x): Reduction, All -> Bool => |a| scalar_bool(a.x(0)?, a.x(0)?.equal(a.x(1)?)?);
    allclose(input: x, other: x, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = false): Reduction, All -> Bool
        => |a| scalar_bool(a.x(0)?, a.x(0)?.allclose(a.x(1)?, a.float(0)?, a.float(1)?, a.bool(2)?)?);
    bitwise_not / bitwise_not_ (input: x): Elementwise, Integers -> Same;
    round_decimals(input: x, decimals: int) "round": Elementwise, Floats -> Same
        => |a| a.x(0)?.round_decimals(a.int(0)? as i32);
    positive(input: x): View, Numbers -> Same, differentiable;
    prelu(input: x, weight: x): Elementwise, Floats -> Same, differentiable;
    glu(input: x, dim: int = -1) functional: NeuralNetwork, Floats -> Same, differentiable;
}

impl Tensor {
    /// The bits turned round: `-1 - x` of integers, the negation of bools (PyTorch's `bitwise_not`).
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] for floats.
    #[track_caller]
    pub fn bitwise_not(&self) -> Result<Tensor> {
        replaced!(op = "bitwise_not", [self]);
        match self.dtype() {
            DType::Bool => self.logical_not(),
            _ => self.bitwise_xor_scalar(-1).named(op),
        }
    }

    /// [`Tensor::bitwise_not`] in place.
    ///
    /// # Errors
    /// As [`Tensor::bitwise_not`], and as every operation in place.
    pub fn bitwise_not_(&self) -> Result<&Tensor> {
        match self.dtype() {
            DType::Bool => self.logical_not_(),
            _ => self.bitwise_xor_scalar_(-1).named("bitwise_not_"),
        }
    }

    /// x above 0, `weight * x` below, with one weight or, for `[N, C, ..]`, one for each of the C channels (PyTorch's `prelu`).
    /// Floats of one dtype; one launch. Differentiable in both.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let x = Tensor::full(&[1, 2, 2], -4.0, Device::Cpu)?;
    /// let weight = Tensor::from_slice(&[0.5f32, 0.25], 2, Device::Cpu)?;
    /// assert_eq!(x.prelu(&weight)?.to_vec::<f32>()?, [-2.0, -2.0, -1.0, -1.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::ShapeMismatch`] for a weight that is neither one number nor `[C]`; [`Error::UnsupportedDType`],
    /// [`Error::DTypeMismatch`], [`Error::DeviceMismatch`], [`Error::OutOfMemory`].
    #[track_caller]
    pub fn prelu(&self, weight: &Tensor) -> Result<Tensor> {
        let _caller = Caller::enter();
        let op = "prelu";
        cast_first!(lowered(op, &[self, weight])?, |x| x[0].prelu(&x[1]));
        self.dtype().check_float(op)?;
        replaced!(op, [self, weight]);
        same_device(op, &[self, weight])?;
        same_dtype(op, &[self, weight])?;
        let channels = self.shape().dims().get(1).copied().unwrap_or(1);
        mismatch!(op if weight.rank() > 1 || (weight.numel() != 1 && weight.numel() != channels),
            self, weight, "the weight is one number or has one for each channel, which is dim 1");
        let along_channels: Shape = (0..self.rank()).map(|d| if d == 1 { weight.numel() } else { 1 }).collect();
        let (weight, leaky) = (weight.reshape(&along_channels)?, Expr::input(0).leaky_relu(Expr::input(1)));
        formula(op, &[self, &weight], self.dtype(), &leaky, |i| leaky.diff(i))
    }

    /// The first half along `dim` times the logistic function of the second (PyTorch's `glu`). Differentiable.
    ///
    /// # Errors
    /// An odd size; [`Error::DimOutOfRange`].
    #[track_caller]
    pub fn glu(&self, dim: isize) -> Result<Tensor> {
        replaced!(op = "glu", [self], dim);
        let size = self.shape().dims()[self.shape().dim(op, dim)?];
        invalid!(op if !size.is_multiple_of(2), "dimension {dim} of size {size} has no two halves");
        let (x, gate) = (self.narrow(dim, 0, size / 2)?, self.narrow(dim, size / 2, size / 2)?);
        Tensor::map(&[&x, &gate], |e| &e[0] * e[1].sigmoid()).named(op)
    }

    /// Rounded to this many decimals, ties to even; a negative number rounds to tens, hundreds and so on (PyTorch's `round`
    /// with `decimals`). Its gradient is 0.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] for integers; [`Error::OutOfMemory`].
    #[track_caller]
    pub fn round_decimals(&self, decimals: i32) -> Result<Tensor> {
        replaced!("round_decimals", [self], decimals);
        let power = 10f64.powi(decimals.saturating_abs());
        // In one formula: a product stored in between would be rounded twice.
        let round = |x: &Expr| match decimals {
            1.. => (x * power).round() / power,
            _ => (x / power).round() * power,
        };
        Tensor::map(&[self], |e| round(&e[0])).named("round_decimals")
    }

    /// Whether shapes and all elements are equal (PyTorch's `equal`). Waits for the device.
    ///
    /// # Errors
    /// [`Error::DeviceMismatch`].
    #[track_caller]
    pub fn equal(&self, other: &Tensor) -> Result<bool> {
        replaced!(op = "equal", [self, other]);
        let differ = |t: Tensor| t.any((), false)?.item::<bool>();
        Ok(self.shape() == other.shape() && !differ(self.detach().ne(other)?).named(op)?)
    }

    /// Whether all elements are close, as [`Tensor::isclose`] says (PyTorch's `allclose`, whose `rtol` is 1e-5 and `atol`
    /// 1e-8 where nothing is said). Waits for the device.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::full(3, 1.0, Device::Cpu)?;
    /// assert!(a.allclose(&a.add_scalar(1e-7)?, 1e-5, 1e-8, false)?);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Tensor::isclose`].
    #[track_caller]
    pub fn allclose(&self, other: &Tensor, rtol: f64, atol: f64, equal_nan: bool) -> Result<bool> {
        replaced!(op = "allclose", [self, other], rtol, atol, equal_nan);
        self.isclose(other, rtol, atol, equal_nan).named(op)?.all((), false)?.item::<bool>()
    }

    /// The tensor itself (PyTorch's `positive`).
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] for bool.
    pub fn positive(&self) -> Result<Tensor> {
        unsupported!("positive" if self.dtype() == DType::Bool, DType::Bool, "integers or floats");
        Ok(self.shallow_clone())
    }
}

macro_rules! aliases {
    ($($alias:ident $(($other:ident))? => $name:ident;)*) => {
        /// Other names: each is the method it says.
        impl Tensor { $(
            #[doc = concat!("[`", stringify!($name), "`](Self::", stringify!($name), ") by PyTorch's other name.")]
            ///
            /// # Errors
            /// Those of that method.
            #[track_caller]
            pub fn $alias(&self $(, $other: &Tensor)?) -> Result<Tensor> {
                self.$name($($other)?)
            }
        )* }

        /// Each of these names and that of its row.
        pub(crate) static ALIASES: &[(&str, &str)] = &[$((stringify!($alias), stringify!($name))),*];
    };
}

aliases! {
    absolute => abs;
    arccos => acos;
    arccosh => acosh;
    arcsin => asin;
    arcsinh => asinh;
    arctan => atan;
    arctan2(other) => atan2;
    arctanh => atanh;
    divide(other) => div;
    fix => trunc;
    greater(other) => gt;
    greater_equal(other) => ge;
    less(other) => lt;
    less_equal(other) => le;
    multiply(other) => mul;
    negative => neg;
    not_equal(other) => ne;
    sgn => sign;
    subtract(other) => sub;
    true_divide(other) => div;
}

//! Elementwise operations that are made of rows of the table, and PyTorch's other names of some rows.

use crate::ops::dispatch::autocast::lowered;
use crate::ops::dispatch::operation::{Dtypes, Gives, Kind, Operation};
use crate::ops::dispatch::registry::{replaced, replacement};
use crate::ops::{formula, same_device, same_dtype};
use crate::{DType, Error, Expr, Result, Shape, Tensor};

/// What a method says of all elements, as the catalogue's operations give it: a tensor.
fn verdict(x: &Tensor, says: bool) -> Result<Tensor> {
    Tensor::full((), i64::from(says), (DType::Bool, x.device()))
}

pub(crate) static OPERATIONS: &[Operation] = &[
    Operation::new("equal", "equal", Kind::Reduction, Dtypes::All, Gives::Bool, (2, 0), |a| {
        verdict(a.x(0)?, a.x(0)?.equal(a.x(1)?)?)
    }),
    Operation::new("allclose", "allclose", Kind::Reduction, Dtypes::All, Gives::Bool, (2, 3), |a| {
        verdict(a.x(0)?, a.x(0)?.allclose(a.x(1)?, a.float(0)?, a.float(1)?, a.bool(2)?)?)
    }),
    Operation::new("bitwise_not", "bitwise_not", Kind::Elementwise, Dtypes::Integers, Gives::Same, (1, 0), |a| {
        a.x(0)?.bitwise_not()
    }),
    Operation::new("bitwise_not_", "bitwise_not_", Kind::InPlace, Dtypes::Integers, Gives::Same, (1, 0), |a| {
        a.x(0)?.bitwise_not_().map(Tensor::shallow_clone)
    }),
    Operation::new("round_decimals", "round", Kind::Elementwise, Dtypes::Floats, Gives::Same, (1, 1), |a| {
        a.x(0)?.round_decimals(a.int(0)? as i32)
    }),
    Operation::new("positive", "positive", Kind::View, Dtypes::Numbers, Gives::Same, (1, 0), |a| a.x(0)?.positive())
        .differentiable(),
    Operation::new("prelu", "prelu", Kind::Elementwise, Dtypes::Floats, Gives::Same, (2, 0), |a| {
        a.x(0)?.prelu(a.x(1)?)
    })
    .differentiable(),
    Operation::new("glu", "nn.functional.glu", Kind::NeuralNetwork, Dtypes::Floats, Gives::Same, (1, 1), |a| {
        a.x(0)?.glu(a.int(0)?)
    })
    .differentiable(),
];

impl Tensor {
    /// The bits turned round: `-1 - x` of integers, the negation of bools (PyTorch's `bitwise_not`).
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] for floats.
    pub fn bitwise_not(&self) -> Result<Tensor> {
        replaced!("bitwise_not", [self]);
        match self.dtype() {
            DType::Bool => self.logical_not(),
            _ => self.bitwise_xor_scalar(-1).map_err(|e| e.of("bitwise_not")),
        }
    }

    /// [`Tensor::bitwise_not`] in place.
    ///
    /// # Errors
    /// As [`Tensor::bitwise_not`], and as every operation in place.
    pub fn bitwise_not_(&self) -> Result<&Tensor> {
        match self.dtype() {
            DType::Bool => self.logical_not_(),
            _ => self.bitwise_xor_scalar_(-1).map_err(|e| e.of("bitwise_not_")),
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
    pub fn prelu(&self, weight: &Tensor) -> Result<Tensor> {
        let op = "prelu";
        if let Some(low) = lowered(op, &[self, weight])? {
            return low[0].prelu(&low[1]);
        }
        self.dtype().check_float(op)?;
        replaced!(op, [self, weight]);
        same_device(op, &[self, weight])?;
        same_dtype(op, &[self, weight])?;
        let channels = self.shape().dims().get(1).copied().unwrap_or(1);
        if weight.rank() > 1 || (weight.numel() != 1 && weight.numel() != channels) {
            let hint = "the weight is one number or has one for each channel, which is dim 1";
            return Err(Error::ShapeMismatch { op, lhs: self.shape().clone(), rhs: weight.shape().clone(), hint });
        }
        let spread: Shape = (0..self.rank()).map(|d| if d == 1 { weight.numel() } else { 1 }).collect();
        let (weight, slope) = (weight.reshape(&spread)?, Expr::input(0).leaky_relu(Expr::input(1)));
        formula(op, &[self, &weight], self.dtype(), &slope, |i| slope.diff(i))
    }

    /// The first half along `dim` times the logistic function of the second (PyTorch's `glu`). Differentiable.
    ///
    /// # Errors
    /// An odd size; [`Error::DimOutOfRange`].
    pub fn glu(&self, dim: isize) -> Result<Tensor> {
        let op = "glu";
        replaced!(op, [self], dim);
        let size = self.shape().dims()[self.shape().dim(op, dim)?];
        if !size.is_multiple_of(2) {
            return Err(Error::invalid(op, format!("dimension {dim} of size {size} has no two halves")));
        }
        let (x, gate) = (self.narrow(dim, 0, size / 2)?, self.narrow(dim, size / 2, size / 2)?);
        Tensor::map(&[&x, &gate], |e| &e[0] * e[1].sigmoid()).map_err(|e| e.of(op))
    }

    /// Rounded to this many decimals, ties to even; a negative number rounds to tens, hundreds and so on (PyTorch's `round`
    /// with `decimals`). Its gradient is 0.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] for integers; [`Error::OutOfMemory`].
    pub fn round_decimals(&self, decimals: i32) -> Result<Tensor> {
        replaced!("round_decimals", [self], decimals);
        let power = 10f64.powi(decimals.saturating_abs());
        // In one formula: a product stored in between would be rounded twice.
        let round = |x: &Expr| match decimals {
            1.. => (x * power).round() / power,
            _ => (x / power).round() * power,
        };
        Tensor::map(&[self], |e| round(&e[0])).map_err(|e| e.of("round_decimals"))
    }

    /// Whether shapes and all elements are equal (PyTorch's `equal`). Waits for the device.
    ///
    /// # Errors
    /// [`Error::DeviceMismatch`].
    pub fn equal(&self, other: &Tensor) -> Result<bool> {
        if let Some(out) = replacement("equal", &[self, other], Vec::new)? {
            return out[0].item::<bool>();
        }
        let differ = |t: Tensor| t.to_dtype(DType::I64)?.sum((), false)?.item::<i64>();
        Ok(self.shape() == other.shape() && differ(self.detach().ne(other)?).map_err(|e| e.of("equal"))? == 0)
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
    pub fn allclose(&self, other: &Tensor, rtol: f64, atol: f64, equal_nan: bool) -> Result<bool> {
        let arguments = || vec![rtol.into(), atol.into(), equal_nan.into()];
        if let Some(out) = replacement("allclose", &[self, other], arguments)? {
            return out[0].item::<bool>();
        }
        let far = self.isclose(other, rtol, atol, equal_nan).and_then(|close| close.logical_not());
        Ok(far.map_err(|e| e.of("allclose"))?.to_dtype(DType::I64)?.sum((), false)?.item::<i64>()? == 0)
    }

    /// The tensor itself (PyTorch's `positive`).
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] for bool.
    pub fn positive(&self) -> Result<Tensor> {
        match self.dtype() {
            dtype @ DType::Bool => {
                Err(Error::UnsupportedDType { op: "positive", dtype, expected: "integers or floats" })
            }
            _ => Ok(self.shallow_clone()),
        }
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

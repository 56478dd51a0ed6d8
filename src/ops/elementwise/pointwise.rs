//! Elementwise operations that are composed of table rows, and aliases that PyTorch has for some operations.

use crate::ReduceDims;
use crate::ops::dispatch::prelude::*;

/// Wraps the bool `says`, the result of a method, in a tensor, because the catalogue's operations return tensors.
fn bool_tensor(x: &Tensor, says: bool) -> Result<Tensor> {
    Tensor::full((), i64::from(says), (DType::Bool, x.device()))
}

operations! {
    /// True if both tensors have the same shape and all elements are equal (PyTorch's `equal`). Waits for the device.
    equal(input: x, other: x):
        Reduction, All -> Bool = |op, self, other| -> bool {
        let differ = |t: Tensor| t.any((), false)?.item::<bool>();
        Ok(self.shape() == other.shape() && !differ(self.detach().ne(other)?).with_op(op)?)
    } => |a| bool_tensor(a.tensor(0)?, a.tensor(0)?.equal(a.tensor(1)?)?);
    /// True if [`Tensor::isclose`] is true for all elements (PyTorch's `allclose`, with defaults of 1e-5 for `rtol` and 1e-8 for `atol`).
    /// Waits for the device. Fails as [`Tensor::isclose`] does.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::full(3, 1.0, Device::Cpu)?;
    /// assert!(a.allclose(&a.add_scalar(1e-7)?, 1e-5, 1e-8, false)?);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    allclose(input: x, other: x, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = false):
        Reduction, All -> Bool = |op, self, other, rtol, atol, equal_nan| -> bool {
        self.isclose(other, rtol, atol, equal_nan).with_op(op)?.all((), false)?.item::<bool>()
    } => |a| bool_tensor(a.tensor(0)?, a.tensor(0)?.allclose(a.tensor(1)?, a.float(0)?, a.float(1)?, a.bool(2)?)?);
    /// Inverts the bits: `-1 - x` for integers, the logical negation for bools (PyTorch's `bitwise_not`). Fails with
    /// [`Error::UnsupportedDType`] for floats.
    bitwise_not / bitwise_not_ (input: x): Elementwise, Integers -> Same = |op, self| {
        match self.dtype() {
            DType::Bool => self.logical_not(),
            _ => self.bitwise_xor_scalar(-1).with_op(op),
        }
    };
    round_decimals(input: x, decimals: int) "round": Elementwise, Floats -> Same
        => |a| a.tensor(0)?.round_decimals(a.int(0)? as i32);
    positive(input: x): View, Numbers -> Same, differentiable;
    /// Returns `x` for positive elements and `weight * x` for all other elements (PyTorch's `prelu`).
    ///
    /// The weight is one number or, for `[N, C, ..]`, one number for each of the C channels. Floats of one dtype; one launch.
    /// Differentiable with respect to x and the weight. Fails with [`Error::ShapeMismatch`] for a weight that is neither one number nor
    /// `[C]`.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let x = Tensor::full(&[1, 2, 2], -4.0, Device::Cpu)?;
    /// let weight = Tensor::from_slice(&[0.5f32, 0.25], 2, Device::Cpu)?;
    /// assert_eq!(x.prelu(&weight)?.to_vec::<f32>()?, [-2.0, -2.0, -1.0, -1.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    prelu(input: x, weight: x): Elementwise, Floats -> Same, differentiable = manual |op, self, weight| {
        cast_first!(autocast_inputs(op, &[self, weight])?, |x| x[0].prelu(&x[1]));
        self.dtype().check_float(op)?;
        return_replacement!(op, [self, weight]);
        same_device(op, &[self, weight])?;
        same_dtype(op, &[self, weight])?;
        let channels = self.shape().dims().get(1).copied().unwrap_or(1);
        mismatch!(op if weight.rank() > 1 || (weight.numel() != 1 && weight.numel() != channels),
            self, weight, "the weight is one number or has one for each channel, which is dim 1");
        let along_channels: Shape = (0..self.rank()).map(|d| if d == 1 { weight.numel() } else { 1 }).collect();
        let (weight, leaky) = (weight.reshape(&along_channels)?, Expr::input(0).leaky_relu(Expr::input(1)));
        apply_formula(op, &[self, &weight], self.dtype(), &leaky, |i| leaky.diff(i))
    };
    /// Multiplies the first half of the elements along `dim` by the sigmoid of the second half (PyTorch's `glu`). Differentiable. Fails
    /// if the size of `dim` is odd.
    glu(input: x, dim: int = -1) functional: NeuralNetwork, Floats -> Same, differentiable = |op, self, dim| {
        let size = self.shape().dims()[self.shape().dim(op, dim)?];
        invalid!(op if !size.is_multiple_of(2), "dimension {dim} has size {size}, it must be even");
        let (x, gate) = (self.narrow(dim, 0, size / 2)?, self.narrow(dim, size / 2, size / 2)?);
        Tensor::map(&[&x, &gate], |e| &e[0] * e[1].sigmoid()).with_op(op)
    };
}

impl Tensor {
    /// The in-place form of [`Tensor::bitwise_not`].
    pub fn bitwise_not_(&self) -> Result<&Tensor> {
        match self.dtype() {
            DType::Bool => self.logical_not_(),
            _ => self.bitwise_xor_scalar_(-1).with_op("bitwise_not_"),
        }
    }

    /// Rounds to `decimals` decimal places, ties to even. A negative number rounds to tens, hundreds and so on (PyTorch's `round`
    /// with `decimals`). The gradient is 0. Floats.
    #[track_caller]
    pub fn round_decimals(&self, decimals: i32) -> Result<Tensor> {
        return_replacement!("round_decimals", [self], decimals);
        let power = 10f64.powi(decimals.saturating_abs());
        // The result is computed by one formula, because a stored intermediate product would be rounded twice.
        let round = |x: &Expr| match decimals {
            1.. => (x * power).round() / power,
            _ => (x / power).round() * power,
        };
        Tensor::map(&[self], |e| round(&e[0])).with_op("round_decimals")
    }

    /// Returns the tensor itself (PyTorch's `positive`). Fails with [`Error::UnsupportedDType`] for bool.
    pub fn positive(&self) -> Result<Tensor> {
        unsupported!("positive" if self.dtype() == DType::Bool, DType::Bool, "integers or floats");
        Ok(self.shallow_clone())
    }
}

macro_rules! aliases {
    ($($alias:ident $(($($arg:ident: $t:ty),+))? => $name:ident;)*) => {
        impl Tensor { $(
            #[doc = concat!("Same as [`", stringify!($name), "`](Self::", stringify!($name), "), by PyTorch's other name.")]
            #[track_caller]
            pub fn $alias(&self $($(, $arg: $t)+)?) -> Result<Tensor> {
                self.$name($($($arg),+)?)
            }
        )* }

        /// Pairs of an alias and the name of the operation that the alias calls.
        pub(crate) static ALIASES: &[(&str, &str)] = &[$((stringify!($alias), stringify!($name))),*];
    };
}

aliases! {
    absolute => abs;
    amax(dims: impl Into<ReduceDims>, keepdim: bool) => max;
    amin(dims: impl Into<ReduceDims>, keepdim: bool) => min;
    arccos => acos;
    arccosh => acosh;
    arcsin => asin;
    arcsinh => asinh;
    arctan => atan;
    arctan2(other: &Tensor) => atan2;
    arctanh => atanh;
    argwhere => nonzero;
    divide(other: &Tensor) => div;
    fix => trunc;
    ger(other: &Tensor) => outer;
    greater(other: &Tensor) => gt;
    greater_equal(other: &Tensor) => ge;
    less(other: &Tensor) => lt;
    less_equal(other: &Tensor) => le;
    multiply(other: &Tensor) => mul;
    negative => neg;
    not_equal(other: &Tensor) => ne;
    sgn => sign;
    subtract(other: &Tensor) => sub;
    true_divide(other: &Tensor) => div;
}

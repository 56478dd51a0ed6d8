//! Activation layers: elementwise formulas that other layers can fuse, activations with parameters, and activations along a dimension.

use super::Module;
use super::pool::tuple_layers;
use crate::storage::Caller;
use crate::tensor::TensorOptions;
use crate::{Result, Tensor, ops::Expr};

/// An elementwise activation. Layers such as [`Linear`](super::Linear) can apply it in the same launch as their own result. Used as
/// a layer of its own, an activation takes one launch (PyTorch's `nn.ReLU`, `nn.LeakyReLU` and so on).
///
/// ```
/// use claystone::{Device, Tensor, nn::{Activation, Module}};
/// let x = Tensor::from_slice(&[-2f32, 3.0], 2, Device::Cpu)?;
/// assert_eq!(Activation::LeakyRelu(0.01).forward(&x)?.to_vec::<f32>()?, [-0.02, 3.0]);
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Activation {
    /// `max(x, 0)`.
    Relu,
    /// `x` if it is positive, otherwise `slope * x`. The field is the slope (PyTorch's default is 0.01).
    LeakyRelu(f64),
    /// `x` if it is positive, otherwise `alpha * (exp(x) - 1)`. The field is `alpha` (PyTorch's default is 1).
    Elu(f64),
    /// `log(1 + exp(x))`.
    Softplus,
    /// The exact Gaussian error linear unit, `x` times the normal distribution function of `x`.
    Gelu,
    /// [`Activation::Gelu`] with the tanh approximation (PyTorch's `nn.GELU("tanh")`, used by GPT-2).
    GeluTanh,
    /// `x * sigmoid(x)`.
    Silu,
    /// `1 / (1 + exp(-x))`.
    Sigmoid,
    /// The hyperbolic tangent.
    Tanh,
}

impl Activation {
    /// Returns the formula of the activation applied to `x`. The tensor method with the activation's name computes the same formula.
    pub fn expr(self, x: &Expr) -> Expr {
        match self {
            Activation::Relu => x.relu(),
            Activation::LeakyRelu(slope) => x.leaky_relu(slope),
            Activation::Elu(alpha) => x.elu(alpha),
            Activation::Softplus => x.softplus(),
            Activation::Gelu => x.gelu(),
            Activation::GeluTanh => x.gelu_tanh(),
            Activation::Silu => x.silu(),
            Activation::Sigmoid => x.sigmoid(),
            Activation::Tanh => x.tanh(),
        }
    }

    /// Returns the gain: weights whose standard deviation is scaled by this factor keep the standard deviation of activations constant
    /// from layer to layer (PyTorch's `nn.init.calculate_gain`). It is 1 for activations that PyTorch does not list.
    ///
    /// ```
    /// use claystone::nn::Activation;
    /// assert_eq!(Activation::Relu.gain(), 2f64.sqrt());
    /// assert_eq!(Activation::Tanh.gain(), 5.0 / 3.0);
    /// ```
    pub fn gain(self) -> f64 {
        match self {
            Activation::Relu => 2f64.sqrt(),
            Activation::LeakyRelu(slope) => (2.0 / (1.0 + slope * slope)).sqrt(),
            Activation::Tanh => 5.0 / 3.0,
            _ => 1.0,
        }
    }
}

impl Module for Activation {
    crate::parts!(; self);

    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Tensor::map(&[x], |e| self.expr(&e[0]))
    }
}

/// Applies [`Tensor::prelu`] with trained slopes: one slope, or one for each channel of `[N, C, ..]` (PyTorch's `nn.PReLU`).
///
/// ```
/// use claystone::{Device, Tensor, nn::{Module, PRelu}};
/// let x = Tensor::full(&[2, 3, 4], -8.0, Device::Cpu)?;
/// assert_eq!(PRelu::new(3, 0.25, Device::Cpu)?.forward(&x)?.to_vec::<f32>()?, [-2.0; 24]);
/// # Ok::<(), claystone::Error>(())
/// ```
pub struct PRelu {
    weight: Tensor,
}

impl PRelu {
    /// Creates a layer with `num_parameters` slopes (1, or the number of channels). All start as `init`. PyTorch's defaults are 1 and 0.25.
    #[track_caller]
    pub fn new(num_parameters: usize, init: f64, options: impl Into<TensorOptions>) -> Result<PRelu> {
        let _caller = Caller::enter();
        Ok(PRelu { weight: Tensor::full(&[num_parameters], init, options)?.requires_grad_(true)? })
    }

    /// Returns the slopes, `[num_parameters]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }
}

impl Module for PRelu {
    crate::parts!(weight);

    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.prelu(&self.weight)
    }
}

/// Returns its input unchanged (PyTorch's `nn.Identity`). The result has the same storage and takes no launch.
#[derive(Debug, Clone, Copy, Default)]
pub struct Identity;

impl Module for Identity {
    crate::parts!();

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(x.shallow_clone())
    }
}

tuple_layers! {
    "The dimension; negative values count from the end.";
    /// Applies [`Tensor::softmax`] along a dimension (PyTorch's `nn.Softmax`).
    ///
    /// ```
    /// use claystone::{Device, Tensor, nn::{Linear, Module, Sequential, Softmax}};
    /// let net = Sequential::new().push(Linear::new(4, 8, Device::Cpu)?).push(Softmax(-1));
    /// assert!((net.forward(&Tensor::zeros(4, Device::Cpu)?)?.sum((), false)?.item::<f32>()? - 1.0).abs() < 1e-6);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    Softmax(isize) softmax;
    /// Applies [`Tensor::log_softmax`] along a dimension (PyTorch's `nn.LogSoftmax`).
    LogSoftmax(isize) log_softmax;
    /// Applies [`Tensor::softmin`] along a dimension (PyTorch's `nn.Softmin`).
    Softmin(isize) softmin;
}

//! Sequences of layers, functions as layers, checkpointed layers, and dropout.

use std::sync::Arc;

use super::{Mode, Module};
use crate::storage::Caller;
use crate::{Result, Tensor};

/// Layers applied one after another (PyTorch's `nn.Sequential`).
///
/// ```
/// use claystone::{Device, Tensor, nn::{Activation, Linear, Module, Sequential}};
/// let net = Sequential::new()
///     .push(Linear::new(4, 8, Device::Cpu)?.with_activation(Activation::Relu))
///     .push(Linear::new(8, 2, Device::Cpu)?);
/// assert_eq!(net.forward(&Tensor::zeros(&[5, 4], Device::Cpu)?)?.shape().dims(), [5, 2]);
/// assert_eq!(net.parameter_count(), 4 * 8 + 8 + 8 * 2 + 2);
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Default)]
pub struct Sequential {
    layers: Vec<Box<dyn Module>>,
}

impl Sequential {
    /// Creates a sequence without layers, which returns its input.
    pub fn new() -> Sequential {
        Sequential::default()
    }

    /// Appends a layer.
    pub fn push(mut self, layer: impl Module) -> Sequential {
        self.layers.push(Box::new(layer));
        self
    }
}

impl Module for Sequential {
    crate::parts!(layers as "");

    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let _caller = Caller::enter();
        self.layers.iter().try_fold(x.shallow_clone(), |x, layer| layer.forward(&x))
    }
}

/// A layer that keeps only its input for backward, which runs the layer's forward pass again ([`Module::forward_checkpointed`]).
/// Parameters have the same names as in the layer inside.
///
/// ```
/// use claystone::{Device, Tensor, nn::{Activation, Checkpoint, Linear, Module, Sequential}};
/// let block = Sequential::new().push(Linear::new(4, 64, Device::Cpu)?).push(Activation::Gelu).push(Linear::new(64, 4, Device::Cpu)?);
/// let net = Sequential::new().push(Checkpoint::new(block)).push(Linear::new(4, 2, Device::Cpu)?);
/// net.forward(&Tensor::ones(&[5, 4], Device::Cpu)?)?.sum((), false)?.backward()?;
/// assert!(net.parameters().iter().all(|p| p.grad().is_some()));
/// assert_eq!(net.named_parameters("")[0].0, "0.0.weight");
/// # Ok::<(), claystone::Error>(())
/// ```
pub struct Checkpoint<M> {
    layer: M,
}

impl<M: Module> Checkpoint<M> {
    /// Wraps a layer or a network, whose intermediate tensors are then recomputed in backward.
    pub fn new(layer: M) -> Checkpoint<M> {
        Checkpoint { layer }
    }
}

impl<M: Module> Module for Checkpoint<M> {
    crate::parts!(layer as "");

    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.layer.forward_checkpointed(x)
    }
}

/// A layer made from a function by [`func`].
pub struct Func<F> {
    f: Arc<F>,
}

/// Wraps a function without parameters as a layer.
///
/// ```
/// use claystone::{Device, Tensor, nn::{Linear, Module, Sequential, func}};
/// let net = Sequential::new().push(Linear::new(4, 8, Device::Cpu)?).push(func(|x| x.leaky_relu(0.1)?.softmax(-1)));
/// assert_eq!(net.forward(&Tensor::zeros(&[5, 4], Device::Cpu)?)?.shape().dims(), [5, 8]);
/// # Ok::<(), claystone::Error>(())
/// ```
pub fn func<F: Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static>(f: F) -> Func<F> {
    Func { f: Arc::new(f) }
}

impl<F: Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static> Module for Func<F> {
    crate::parts!(; f);

    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let _caller = Caller::enter();
        (self.f)(x)
    }
}

macro_rules! dropout_layers {
    ($($(#[$doc:meta])* $name:ident $method:ident;)*) => { $(
        $(#[$doc])*
        pub struct $name {
            p: f64,
            mode: Mode,
        }

        impl $name {
            /// Creates a dropout layer with probability `p`, in training mode. Fails with [`crate::Error::Invalid`] if
            /// `p` is not in `0.0..=1.0`.
            pub fn new(p: f64) -> Result<$name> {
                let op = concat!(stringify!($name), "::new");
                invalid!(op if !(0.0..=1.0).contains(&p), "the probability {p} is not in 0.0..=1.0");
                Ok($name { p, mode: Mode::default() })
            }
        }

        impl Module for $name {
            crate::parts!(mode);

            #[track_caller]
            fn forward(&self, x: &Tensor) -> Result<Tensor> {
                if self.mode.is_training() { x.$method(self.p) } else { Ok(x.shallow_clone()) }
            }
        }
    )* };
}

dropout_layers! {
    /// Zeroes elements with probability `p` in training, and does nothing in evaluation (PyTorch's `nn.Dropout`).
    ///
    /// ```
    /// use claystone::{Device, Tensor, nn::{Dropout, Module, Sequential}};
    /// let dropout = Dropout::new(0.5)?;
    /// let x = Tensor::ones(&[100], Device::Cpu)?;
    /// assert!(dropout.forward(&x)?.to_vec::<f32>()?.iter().all(|&v| v == 0.0 || v == 2.0));
    /// let net = Sequential::new().push(dropout);
    /// net.set_training(false);
    /// assert!(net.forward(&x)?.shares_storage(&x));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    Dropout dropout;
    /// Zeroes whole channels of `[N, C, ..]` with probability `p` in training, and does nothing in evaluation (PyTorch's
    /// `nn.Dropout1d`, `nn.Dropout2d` and `nn.Dropout3d`).
    Dropout2d dropout2d;
}

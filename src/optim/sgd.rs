//! Stochastic gradient descent.

use super::Optimizer;
use super::flat::{Flat, check};
use crate::{Result, Tensor, no_grad};

/// Hyperparameters of [`Sgd`], with PyTorch's defaults except that `lr` is 0.01.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SgdConfig {
    /// Learning rate.
    pub lr: f64,
    /// Factor of the velocity kept from step to step, in `0.0..1.0`; 0 for none.
    pub momentum: f64,
    /// L2 penalty, added to the gradient.
    pub weight_decay: f64,
    /// Nesterov's look-ahead; needs momentum.
    pub nesterov: bool,
}

impl Default for SgdConfig {
    fn default() -> SgdConfig {
        SgdConfig { lr: 0.01, momentum: 0.0, weight_decay: 0.0, nesterov: false }
    }
}

/// Stochastic gradient descent with momentum, weight decay and Nesterov's look-ahead (PyTorch's `torch.optim.SGD`).
///
/// ```
/// use claystone::{Device, Tensor, optim::{Optimizer, Sgd, SgdConfig}};
/// let mut w = Tensor::ones(&[2], Device::Cpu)?.requires_grad_(true)?;
/// let mut sgd = Sgd::new(vec![&mut w], SgdConfig { lr: 0.5, ..Default::default() })?;
/// w.mul(&w)?.sum((), false)?.backward()?; // the gradient is 2w
/// sgd.step()?;
/// assert_eq!(w.to_vec::<f32>()?, [0.0, 0.0]);
/// # Ok::<(), claystone::Error>(())
/// ```
pub struct Sgd {
    flat: Flat,
    velocity: Option<Tensor>,
    config: SgdConfig,
}

impl Sgd {
    /// Takes over `parameters`: leaves that require a gradient, of one float dtype, on one device. They become views of
    /// one buffer and keep their values; gradients collected before are dropped.
    ///
    /// # Errors
    /// [`crate::Error::Autograd`] for a parameter that is no such leaf, [`crate::Error::Invalid`] for none at all or a
    /// hyperparameter out of range, mismatching dtypes or devices, and [`crate::Error::OutOfMemory`].
    pub fn new(parameters: Vec<&mut Tensor>, config: SgdConfig) -> Result<Sgd> {
        let op = "Sgd::new";
        check(op, "lr", config.lr, 0.0..f64::INFINITY)?;
        check(op, "momentum", config.momentum, 0.0..1.0)?;
        check(op, "weight_decay", config.weight_decay, 0.0..f64::INFINITY)?;
        if config.nesterov && config.momentum == 0.0 {
            return Err(crate::Error::invalid(op, "nesterov needs a momentum above 0"));
        }
        let flat = Flat::new(op, parameters)?;
        let velocity = if config.momentum > 0.0 { Some(flat.state()?) } else { None };
        Ok(Sgd { flat, velocity, config })
    }
}

impl Optimizer for Sgd {
    fn step(&mut self) -> Result<()> {
        let SgdConfig { lr, momentum, weight_decay, nesterov } = self.config;
        no_grad(|| {
            for run in self.flat.runs(|_, _| true)? {
                let velocity = self.velocity.as_ref().map(|v| v.narrow(0, run.start, run.len)).transpose()?;
                let inputs: Vec<&Tensor> = [&run.weights, &run.grads].into_iter().chain(&velocity).collect();
                let outputs: Vec<&Tensor> = [&run.weights].into_iter().chain(&velocity).chain(&run.rounded).collect();
                let scalars = [lr.into(), weight_decay.into(), momentum.into()];
                Tensor::map_into(&inputs, &scalars, &outputs, |x, s| {
                    let (w, lr, decay, momentum) = (&x[0], &s[0], &s[1], &s[2]);
                    let grad = &x[1] + decay * w;
                    let (direction, velocity) = match x.get(2) {
                        None => (grad, None),
                        Some(v) => {
                            let v = momentum * v + &grad;
                            (if nesterov { grad + momentum * &v } else { v.clone() }, Some(v))
                        }
                    };
                    let w = w - lr * direction;
                    std::iter::once(w.clone()).chain(velocity).chain(run.rounded.iter().map(|_| w.clone())).collect()
                })?;
            }
            Ok(())
        })
        .inspect(|()| self.flat.updated())
    }

    fn zero_grad(&self) {
        self.flat.zero_grad();
    }

    fn learning_rate(&self) -> f64 {
        self.config.lr
    }

    fn set_learning_rate(&mut self, lr: f64) {
        self.config.lr = lr;
    }
}

//! Adam with decoupled weight decay.

use super::Optimizer;
use super::flat::{Flat, check};
use crate::{Error, Graph, Result, Tensor, no_grad};

/// Hyperparameters of [`AdamW`], with PyTorch's defaults.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamWConfig {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the running mean of the gradient, in `0.0..1.0`.
    pub beta1: f64,
    /// Decay of the running mean of its square, in `0.0..1.0`.
    pub beta2: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// Decoupled weight decay: each step shrinks weights by `lr * weight_decay`.
    pub weight_decay: f64,
}

impl Default for AdamWConfig {
    fn default() -> AdamWConfig {
        AdamWConfig { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: 0.01 }
    }
}

/// Adam with decoupled weight decay (Loshchilov and Hutter, "Decoupled Weight Decay Regularization"; PyTorch's
/// `torch.optim.AdamW`).
///
/// ```
/// use claystone::{Device, Tensor, optim::{AdamW, AdamWConfig, Optimizer}};
/// let mut w = Tensor::full(&[3], 5.0, Device::Cpu)?.requires_grad_(true)?;
/// let mut adamw = AdamW::new(vec![&mut w], AdamWConfig { lr: 0.1, ..Default::default() })?;
/// for _ in 0..200 {
///     adamw.zero_grad();
///     w.mul(&w)?.sum((), false)?.backward()?;
///     adamw.step()?;
/// }
/// assert!(w.to_vec::<f32>()?.iter().all(|x| x.abs() < 0.1));
/// # Ok::<(), claystone::Error>(())
/// ```
pub struct AdamW {
    flat: Flat,
    mean: Tensor,
    variance: Tensor,
    config: AdamWConfig,
    /// How often each parameter was updated.
    steps: Vec<i32>,
}

impl AdamW {
    /// Takes over `parameters`, as [`super::Sgd::new`] does.
    ///
    /// # Errors
    /// As [`super::Sgd::new`].
    pub fn new(parameters: Vec<&mut Tensor>, config: AdamWConfig) -> Result<AdamW> {
        let op = "AdamW::new";
        check(op, "lr", config.lr, 0.0..f64::INFINITY)?;
        check(op, "beta1", config.beta1, 0.0..1.0)?;
        check(op, "beta2", config.beta2, 0.0..1.0)?;
        check(op, "eps", config.eps, 0.0..f64::INFINITY)?;
        check(op, "weight_decay", config.weight_decay, 0.0..f64::INFINITY)?;
        let flat = Flat::new(op, parameters)?;
        let (mean, variance) = (flat.state()?, flat.state()?);
        let steps = vec![0; flat.count()];
        Ok(AdamW { flat, mean, variance, config, steps })
    }
}

impl Optimizer for AdamW {
    fn step(&mut self) -> Result<()> {
        if Graph::is_capturing(self.flat.device()) {
            let reason = "its numbers change from step to step, and a graph's do not: capture the rest, or use Sgd";
            return Err(Error::invalid("AdamW::step", reason));
        }
        let AdamWConfig { lr, beta1, beta2, eps, weight_decay } = self.config;
        no_grad(|| {
            for run in self.flat.runs(|a, b| self.steps[a] == self.steps[b])? {
                let steps = self.steps[run.parameters.start].saturating_add(1);
                // The means start at zero; these undo the bias of that.
                let correct1 = 1.0 / (1.0 - beta1.powi(steps));
                let correct2 = 1.0 / (1.0 - beta2.powi(steps));
                let decay = 1.0 - lr * weight_decay;
                let scalars = [beta1, 1.0 - beta1, beta2, 1.0 - beta2, lr * correct1, correct2, eps, decay];
                let scalars = scalars.map(Into::into);
                let m = self.mean.narrow(0, run.start, run.len)?;
                let v = self.variance.narrow(0, run.start, run.len)?;
                let outputs: Vec<&Tensor> = [&run.weights, &m, &v].into_iter().chain(&run.rounded).collect();
                Tensor::map_into(&[&run.weights, &run.grads, &m, &v], &scalars, &outputs, |x, s| {
                    let (w, g) = (&x[0], &x[1]);
                    let m = &s[0] * &x[2] + &s[1] * g;
                    let v = &s[2] * &x[3] + &s[3] * (g * g);
                    let w = w * &s[7] - &s[4] * &m / ((&v * &s[5]).sqrt() + &s[6]);
                    [w.clone(), m, v].into_iter().chain(run.rounded.iter().map(|_| w.clone())).collect()
                })?;
                self.steps[run.parameters].fill(steps);
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

//! Stochastic gradient descent.

use super::rule::{DECAY_RANGE, NON_NEGATIVE, add_weight_decay, optimizer};
use crate::{Expr, Result};

optimizer! {
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
    Sgd;
    /// Hyperparameters of [`Sgd`], with PyTorch's defaults except that `lr` is 0.01.
    SgdConfig {
        /// The learning rate.
        lr: f64 = 0.01, NON_NEGATIVE;
        /// Momentum factor, in `0.0..1.0`; 0 disables momentum.
        momentum: f64 = 0.0, DECAY_RANGE;
        /// The fraction of the gradient that is left out of the momentum buffer, from the second step on.
        dampening: f64 = 0.0;
        /// The factor of the L2 penalty `weight_decay * w`, which is added to the gradient.
        weight_decay: f64 = 0.0, NON_NEGATIVE;
        /// Whether to use Nesterov momentum. Requires momentum above 0 and dampening 0.
        nesterov: bool = false;
        => check_nesterov
    }

    fn state(&self) -> Vec<(&'static str, f64)> {
        if self.momentum > 0.0 { vec![("momentum_buffer", 0.0)] } else { vec![] }
    }

    fn numbers_to(&self, step: i32, to: &mut Vec<f64>) {
        // In the first step the momentum buffer becomes the whole gradient, without dampening.
        let damped = if step == 1 { 1.0 } else { 1.0 - self.dampening };
        to.extend([self.lr, self.weight_decay, self.momentum, damped]);
    }

    fn update(&self, w: &Expr, g: &Expr, state: &[Expr], s: &[Expr]) -> (Expr, Vec<Expr>) {
        let grad = add_weight_decay(g, w, self.weight_decay, &s[1]);
        let Some(v) = state.first() else { return (w - &s[0] * grad, vec![]) };
        let damped = if self.dampening == 0.0 { grad.clone() } else { &s[3] * &grad };
        let v = &s[2] * v + damped;
        let direction = if self.nesterov { grad + &s[2] * &v } else { v.clone() };
        (w - &s[0] * direction, vec![v])
    }
}

fn check_nesterov(sgd: &SgdConfig) -> Result<()> {
    invalid!("Sgd" if sgd.nesterov && (sgd.momentum == 0.0 || sgd.dampening != 0.0),
        "nesterov needs a momentum above 0 and no dampening");
    Ok(())
}

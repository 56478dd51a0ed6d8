//! Stochastic gradient descent.

use super::flat::check;
use super::fused::{Fused, Rule, decayed, numbers_of};
use crate::{Error, Expr, Result};

/// Hyperparameters of [`Sgd`], with PyTorch's defaults except that `lr` is 0.01.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SgdConfig {
    /// Learning rate.
    pub lr: f64,
    /// Factor of the velocity kept from step to step, in `0.0..1.0`; 0 for none.
    pub momentum: f64,
    /// The part of the gradient that does not reach the velocity, from the second step on.
    pub dampening: f64,
    /// L2 penalty, added to the gradient.
    pub weight_decay: f64,
    /// Nesterov's look-ahead; needs momentum and no dampening.
    pub nesterov: bool,
}

impl Default for SgdConfig {
    fn default() -> SgdConfig {
        SgdConfig { lr: 0.01, momentum: 0.0, dampening: 0.0, weight_decay: 0.0, nesterov: false }
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
pub type Sgd = Fused<SgdConfig>;

impl Rule for SgdConfig {
    const NAME: &'static str = "Sgd";

    fn check(&self) -> Result<()> {
        check(Self::NAME, "lr", self.lr, 0.0..f64::INFINITY)?;
        check(Self::NAME, "momentum", self.momentum, 0.0..1.0)?;
        check(Self::NAME, "weight_decay", self.weight_decay, 0.0..f64::INFINITY)?;
        if self.nesterov && (self.momentum == 0.0 || self.dampening != 0.0) {
            return Err(Error::invalid(Self::NAME, "nesterov needs a momentum above 0 and no dampening"));
        }
        Ok(())
    }

    fn state(&self) -> Vec<(&'static str, f64)> {
        if self.momentum > 0.0 { vec![("momentum_buffer", 0.0)] } else { vec![] }
    }

    fn numbers(&self, step: i32) -> Vec<f64> {
        numbers_of(self, step)
    }

    fn numbers_to(&self, step: i32, to: &mut Vec<f64>) {
        // The velocity starts as the whole first gradient.
        let taken = if step == 1 { 1.0 } else { 1.0 - self.dampening };
        to.extend([self.lr, self.weight_decay, self.momentum, taken]);
    }

    fn update(&self, w: &Expr, g: &Expr, state: &[Expr], s: &[Expr]) -> (Expr, Vec<Expr>) {
        let grad = decayed(g, w, self.weight_decay, &s[1]);
        let Some(v) = state.first() else { return (w - &s[0] * grad, vec![]) };
        let taken = if self.dampening == 0.0 { grad.clone() } else { &s[3] * &grad };
        let v = &s[2] * v + taken;
        let direction = if self.nesterov { grad + &s[2] * &v } else { v.clone() };
        (w - &s[0] * direction, vec![v])
    }

    fn learning_rate(&self) -> f64 {
        self.lr
    }

    fn set_learning_rate(&mut self, lr: f64) {
        self.lr = lr;
    }
}

//! Lion: steps of one size, in the direction of a momentum's sign.

use super::flat::check;
use super::fused::{Fused, Rule, numbers_of};
use crate::{Expr, Result};

/// Hyperparameters of [`Lion`], with its authors' defaults.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LionConfig {
    /// Learning rate.
    pub lr: f64,
    /// How much of the running mean goes into the direction of a step, in `0.0..1.0`.
    pub beta1: f64,
    /// Decay of the running mean, in `0.0..1.0`.
    pub beta2: f64,
    /// Decoupled weight decay: each step shrinks weights by `lr * weight_decay`.
    pub weight_decay: f64,
}

impl Default for LionConfig {
    fn default() -> LionConfig {
        LionConfig { lr: 1e-4, beta1: 0.9, beta2: 0.99, weight_decay: 0.0 }
    }
}

/// Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms").
pub type Lion = Fused<LionConfig>;

impl Rule for LionConfig {
    const NAME: &'static str = "Lion";

    fn check(&self) -> Result<()> {
        check(Self::NAME, "lr", self.lr, 0.0..f64::INFINITY)?;
        check(Self::NAME, "beta1", self.beta1, 0.0..1.0)?;
        check(Self::NAME, "beta2", self.beta2, 0.0..1.0)?;
        check(Self::NAME, "weight_decay", self.weight_decay, 0.0..f64::INFINITY)
    }

    fn state(&self) -> Vec<(&'static str, f64)> {
        vec![("exp_avg", 0.0)]
    }

    fn numbers(&self, step: i32) -> Vec<f64> {
        numbers_of(self, step)
    }

    fn numbers_to(&self, _step: i32, to: &mut Vec<f64>) {
        let decay = 1.0 - self.lr * self.weight_decay;
        to.extend([self.lr, self.beta1, 1.0 - self.beta1, self.beta2, 1.0 - self.beta2, decay]);
    }

    fn update(&self, w: &Expr, g: &Expr, state: &[Expr], s: &[Expr]) -> (Expr, Vec<Expr>) {
        let direction = (&s[1] * &state[0] + &s[2] * g).sign();
        (w * &s[5] - &s[0] * direction, vec![&s[3] * &state[0] + &s[4] * g])
    }

    fn learning_rate(&self) -> f64 {
        self.lr
    }

    fn set_learning_rate(&mut self, lr: f64) {
        self.lr = lr;
    }
}

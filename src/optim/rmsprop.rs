//! Optimisers that divide by the root of what squares have come to.

use super::flat::check;
use super::fused::{Fused, Rule, decayed, numbers_of};
use crate::{Expr, Result};

/// Hyperparameters of [`RmsProp`], with PyTorch's defaults.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RmsPropConfig {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the running mean of the gradient's square, in `0.0..1.0`.
    pub alpha: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// L2 penalty, added to the gradient.
    pub weight_decay: f64,
    /// Factor of the velocity kept from step to step, in `0.0..1.0`; 0 for none.
    pub momentum: f64,
    /// Whether to divide by the standard deviation of the gradient instead of its root mean square.
    pub centered: bool,
}

impl Default for RmsPropConfig {
    fn default() -> RmsPropConfig {
        RmsPropConfig { lr: 0.01, alpha: 0.99, eps: 1e-8, weight_decay: 0.0, momentum: 0.0, centered: false }
    }
}

/// RMSprop (Hinton's lecture; PyTorch's `torch.optim.RMSprop`).
pub type RmsProp = Fused<RmsPropConfig>;

impl Rule for RmsPropConfig {
    const NAME: &'static str = "RmsProp";

    fn check(&self) -> Result<()> {
        check(Self::NAME, "lr", self.lr, 0.0..f64::INFINITY)?;
        check(Self::NAME, "alpha", self.alpha, 0.0..1.0)?;
        check(Self::NAME, "eps", self.eps, 0.0..f64::INFINITY)?;
        check(Self::NAME, "weight_decay", self.weight_decay, 0.0..f64::INFINITY)?;
        check(Self::NAME, "momentum", self.momentum, 0.0..1.0)
    }

    fn state(&self) -> Vec<(&'static str, f64)> {
        let mut state = vec![("square_avg", 0.0)];
        state.extend(self.centered.then_some(("grad_avg", 0.0)));
        state.extend((self.momentum > 0.0).then_some(("momentum_buffer", 0.0)));
        state
    }

    fn numbers(&self, step: i32) -> Vec<f64> {
        numbers_of(self, step)
    }

    fn numbers_to(&self, _step: i32, to: &mut Vec<f64>) {
        to.extend([self.lr, self.alpha, 1.0 - self.alpha, self.eps, self.weight_decay, self.momentum]);
    }

    fn update(&self, w: &Expr, g: &Expr, state: &[Expr], s: &[Expr]) -> (Expr, Vec<Expr>) {
        let g = decayed(g, w, self.weight_decay, &s[4]);
        let squares = &s[1] * &state[0] + &s[2] * (&g * &g);
        let mean = self.centered.then(|| &s[1] * &state[1] + &s[2] * &g);
        let spread = mean.as_ref().map_or_else(|| squares.clone(), |m| &squares - m * m);
        let step = &g / (spread.sqrt() + &s[3]);
        let velocity = state.last().filter(|_| self.momentum > 0.0).map(|v| &s[5] * v + &step);
        let w = w - &s[0] * velocity.as_ref().unwrap_or(&step);
        (w, [squares].into_iter().chain(mean).chain(velocity).collect())
    }

    fn learning_rate(&self) -> f64 {
        self.lr
    }

    fn set_learning_rate(&mut self, lr: f64) {
        self.lr = lr;
    }
}

/// Hyperparameters of [`Adagrad`], with PyTorch's defaults.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdagradConfig {
    /// Learning rate.
    pub lr: f64,
    /// How fast the learning rate falls: step t uses `lr / (1 + (t - 1) * lr_decay)`.
    pub lr_decay: f64,
    /// L2 penalty, added to the gradient.
    pub weight_decay: f64,
    /// What the sums of squares start from.
    pub initial_accumulator_value: f64,
    /// Added to the denominator.
    pub eps: f64,
}

impl Default for AdagradConfig {
    fn default() -> AdagradConfig {
        AdagradConfig { lr: 0.01, lr_decay: 0.0, weight_decay: 0.0, initial_accumulator_value: 0.0, eps: 1e-10 }
    }
}

/// Adagrad (Duchi et al., "Adaptive Subgradient Methods"; PyTorch's `torch.optim.Adagrad`).
pub type Adagrad = Fused<AdagradConfig>;

impl Rule for AdagradConfig {
    const NAME: &'static str = "Adagrad";

    fn check(&self) -> Result<()> {
        check(Self::NAME, "lr", self.lr, 0.0..f64::INFINITY)?;
        check(Self::NAME, "lr_decay", self.lr_decay, 0.0..f64::INFINITY)?;
        check(Self::NAME, "weight_decay", self.weight_decay, 0.0..f64::INFINITY)?;
        let start = self.initial_accumulator_value;
        check(Self::NAME, "initial_accumulator_value", start, 0.0..f64::INFINITY)?;
        check(Self::NAME, "eps", self.eps, 0.0..f64::INFINITY)
    }

    fn state(&self) -> Vec<(&'static str, f64)> {
        vec![("sum", self.initial_accumulator_value)]
    }

    fn numbers(&self, step: i32) -> Vec<f64> {
        numbers_of(self, step)
    }

    fn numbers_to(&self, step: i32, to: &mut Vec<f64>) {
        let lr = self.lr / (1.0 + f64::from(step - 1) * self.lr_decay);
        to.extend([lr, self.eps, self.weight_decay]);
    }

    fn update(&self, w: &Expr, g: &Expr, state: &[Expr], s: &[Expr]) -> (Expr, Vec<Expr>) {
        let g = decayed(g, w, self.weight_decay, &s[2]);
        let sum = &state[0] + &g * &g;
        (w - &s[0] * &g / (sum.sqrt() + &s[1]), vec![sum])
    }

    fn learning_rate(&self) -> f64 {
        self.lr
    }

    fn set_learning_rate(&mut self, lr: f64) {
        self.lr = lr;
    }
}

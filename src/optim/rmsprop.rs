//! RMSprop and Adagrad, which divide the gradient by the root of the accumulated squares of gradients.

use super::rule::{DECAY_RANGE, NON_NEGATIVE, add_weight_decay, optimizer};
use crate::Expr;

optimizer! {
    /// RMSprop (Hinton's lecture; PyTorch's `torch.optim.RMSprop`).
    RmsProp;
    /// Hyperparameters of [`RmsProp`], with PyTorch's defaults.
    RmsPropConfig {
        /// The learning rate.
        lr: f64 = 0.01, NON_NEGATIVE;
        /// Decay of the running mean of the squared gradient, in `0.0..1.0`.
        alpha: f64 = 0.99, DECAY_RANGE;
        /// A small number added to the denominator, so that no division by zero occurs.
        eps: f64 = 1e-8, NON_NEGATIVE;
        /// The factor of the L2 penalty `weight_decay * w`, which is added to the gradient.
        weight_decay: f64 = 0.0, NON_NEGATIVE;
        /// Momentum factor, in `0.0..1.0`; 0 disables momentum.
        momentum: f64 = 0.0, DECAY_RANGE;
        /// Whether to divide by the standard deviation of the gradient instead of its root mean square.
        centered: bool = false;
    }

    fn state(&self) -> Vec<(&'static str, f64)> {
        let mut state = vec![("square_avg", 0.0)];
        state.extend(self.centered.then_some(("grad_avg", 0.0)));
        state.extend((self.momentum > 0.0).then_some(("momentum_buffer", 0.0)));
        state
    }

    fn numbers_to(&self, _step: i32, to: &mut Vec<f64>) {
        to.extend([self.lr, self.alpha, 1.0 - self.alpha, self.eps, self.weight_decay, self.momentum]);
    }

    fn update(&self, w: &Expr, g: &Expr, state: &[Expr], s: &[Expr]) -> (Expr, Vec<Expr>) {
        let g = add_weight_decay(g, w, self.weight_decay, &s[4]);
        let squares = &s[1] * &state[0] + &s[2] * (&g * &g);
        let mean = self.centered.then(|| &s[1] * &state[1] + &s[2] * &g);
        let variance = mean.as_ref().map_or_else(|| squares.clone(), |m| &squares - m * m);
        let step = &g / (variance.sqrt() + &s[3]);
        let velocity = state.last().filter(|_| self.momentum > 0.0).map(|v| &s[5] * v + &step);
        let w = w - &s[0] * velocity.as_ref().unwrap_or(&step);
        (w, [squares].into_iter().chain(mean).chain(velocity).collect())
    }
}

optimizer! {
    /// Adagrad (Duchi et al., "Adaptive Subgradient Methods"; PyTorch's `torch.optim.Adagrad`).
    Adagrad;
    /// Hyperparameters of [`Adagrad`], with PyTorch's defaults.
    AdagradConfig {
        /// The learning rate.
        lr: f64 = 0.01, NON_NEGATIVE;
        /// Decay of the learning rate: step t uses `lr / (1 + (t - 1) * lr_decay)`.
        lr_decay: f64 = 0.0, NON_NEGATIVE;
        /// The factor of the L2 penalty `weight_decay * w`, which is added to the gradient.
        weight_decay: f64 = 0.0, NON_NEGATIVE;
        /// The initial value of the accumulated squares of gradients.
        initial_accumulator_value: f64 = 0.0, NON_NEGATIVE;
        /// A small number added to the denominator, so that no division by zero occurs.
        eps: f64 = 1e-10, NON_NEGATIVE;
    }

    fn state(&self) -> Vec<(&'static str, f64)> {
        vec![("sum", self.initial_accumulator_value)]
    }

    fn numbers_to(&self, step: i32, to: &mut Vec<f64>) {
        let lr = self.lr / (1.0 + f64::from(step - 1) * self.lr_decay);
        to.extend([lr, self.eps, self.weight_decay]);
    }

    fn update(&self, w: &Expr, g: &Expr, state: &[Expr], s: &[Expr]) -> (Expr, Vec<Expr>) {
        let g = add_weight_decay(g, w, self.weight_decay, &s[2]);
        let sum = &state[0] + &g * &g;
        (w - &s[0] * &g / (sum.sqrt() + &s[1]), vec![sum])
    }
}

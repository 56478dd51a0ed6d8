//! Optimisers that divide by the root of what squares have come to.

use super::rule::{DECAY, NOT_NEGATIVE, decayed, optimizer};
use crate::Expr;

optimizer! {
    /// RMSprop (Hinton's lecture; PyTorch's `torch.optim.RMSprop`).
    RmsProp;
    /// Hyperparameters of [`RmsProp`], with PyTorch's defaults.
    RmsPropConfig {
        /// Learning rate.
        lr: f64 = 0.01, NOT_NEGATIVE;
        /// Decay of the running mean of the gradient's square, in `0.0..1.0`.
        alpha: f64 = 0.99, DECAY;
        /// Added to the denominator.
        eps: f64 = 1e-8, NOT_NEGATIVE;
        /// L2 penalty, added to the gradient.
        weight_decay: f64 = 0.0, NOT_NEGATIVE;
        /// Factor of the velocity kept from step to step, in `0.0..1.0`; 0 for none.
        momentum: f64 = 0.0, DECAY;
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
        let g = decayed(g, w, self.weight_decay, &s[4]);
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
        /// Learning rate.
        lr: f64 = 0.01, NOT_NEGATIVE;
        /// How fast the learning rate falls: step t uses `lr / (1 + (t - 1) * lr_decay)`.
        lr_decay: f64 = 0.0, NOT_NEGATIVE;
        /// L2 penalty, added to the gradient.
        weight_decay: f64 = 0.0, NOT_NEGATIVE;
        /// What the sums of squares start from.
        initial_accumulator_value: f64 = 0.0, NOT_NEGATIVE;
        /// Added to the denominator.
        eps: f64 = 1e-10, NOT_NEGATIVE;
    }

    fn state(&self) -> Vec<(&'static str, f64)> {
        vec![("sum", self.initial_accumulator_value)]
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
}

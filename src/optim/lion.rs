//! Lion, whose steps all have the same size, in the direction of the sign of a momentum.

use super::rule::{DECAY_RANGE, NON_NEGATIVE, optimizer};
use crate::Expr;

optimizer! {
    /// Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms").
    Lion;
    /// Hyperparameters of [`Lion`], with its authors' defaults.
    LionConfig {
        /// The learning rate.
        lr: f64 = 1e-4, NON_NEGATIVE;
        /// The weight of the running mean (against the current gradient) in the direction of a step, in `0.0..1.0`.
        beta1: f64 = 0.9, DECAY_RANGE;
        /// Decay of the running mean, in `0.0..1.0`.
        beta2: f64 = 0.99, DECAY_RANGE;
        /// Decoupled weight decay: each step shrinks weights by `lr * weight_decay`.
        weight_decay: f64 = 0.0, NON_NEGATIVE;
    }

    fn state(&self) -> Vec<(&'static str, f64)> {
        vec![("exp_avg", 0.0)]
    }

    fn numbers_to(&self, _step: i32, to: &mut Vec<f64>) {
        let decay = 1.0 - self.lr * self.weight_decay;
        to.extend([self.lr, self.beta1, 1.0 - self.beta1, self.beta2, 1.0 - self.beta2, decay]);
    }

    fn update(&self, w: &Expr, g: &Expr, state: &[Expr], s: &[Expr]) -> (Expr, Vec<Expr>) {
        let direction = (&s[1] * &state[0] + &s[2] * g).sign();
        (w * &s[5] - &s[0] * direction, vec![&s[3] * &state[0] + &s[4] * g])
    }
}

//! Adam and AdamW. Adam's weight decay is an L2 penalty; AdamW's is decoupled.

use super::rule::{DECAY_RANGE, NON_NEGATIVE, add_weight_decay, optimizer};
use crate::Expr;

macro_rules! adam {
    ($(#[$doc:meta])* $name:ident; $(#[$config_doc:meta])* $config:ident, $decay:literal, $decoupled:literal,
     $(#[$decay_doc:meta])*) => {
        optimizer! {
            $(#[$doc])* $name;
            $(#[$config_doc])*
            $config {
                /// The learning rate.
                lr: f64 = 1e-3, NON_NEGATIVE;
                /// Decay of the running mean of the gradient, in `0.0..1.0`.
                beta1: f64 = 0.9, DECAY_RANGE;
                /// Decay of the running mean of the squared gradient, in `0.0..1.0`.
                beta2: f64 = 0.999, DECAY_RANGE;
                /// A small number added to the denominator, so that no division by zero occurs.
                eps: f64 = 1e-8, NON_NEGATIVE;
                $(#[$decay_doc])*
                weight_decay: f64 = $decay, NON_NEGATIVE;
                /// Whether to divide by the largest running mean of squares so far (Reddi et al., "On the Convergence of Adam and Beyond").
                amsgrad: bool = false;
            }

            fn state(&self) -> Vec<(&'static str, f64)> {
                let all = [("exp_avg", 0.0), ("exp_avg_sq", 0.0), ("max_exp_avg_sq", 0.0)];
                all[..if self.amsgrad { 3 } else { 2 }].to_vec()
            }

            fn numbers_to(&self, step: i32, to: &mut Vec<f64>) {
                // Bias correction: the running means start at zero and would be too small in the first steps.
                let correct1 = 1.0 / (1.0 - self.beta1.powi(step));
                let correct2 = 1.0 / (1.0 - self.beta2.powi(step));
                let decay = if $decoupled { 1.0 - self.lr * self.weight_decay } else { self.weight_decay };
                let (beta1, beta2) = (self.beta1, self.beta2);
                to.extend([beta1, 1.0 - beta1, beta2, 1.0 - beta2, self.lr * correct1, correct2, self.eps, decay]);
            }

            fn update(&self, w: &Expr, g: &Expr, state: &[Expr], s: &[Expr]) -> (Expr, Vec<Expr>) {
                let (w, g) = match $decoupled {
                    true => (w * &s[7], g.clone()),
                    false => (w.clone(), add_weight_decay(g, w, self.weight_decay, &s[7])),
                };
                let m = &s[0] * &state[0] + &s[1] * &g;
                let v = &s[2] * &state[1] + &s[3] * (&g * &g);
                let greatest = self.amsgrad.then(|| state[2].max(&v));
                let w = w - &s[4] * &m / ((greatest.as_ref().unwrap_or(&v) * &s[5]).sqrt() + &s[6]);
                (w, [m, v].into_iter().chain(greatest).collect())
            }
        }
    };
}

adam! {
    /// Adam (Kingma and Ba, "Adam: A Method for Stochastic Optimization"; PyTorch's `torch.optim.Adam`). Its weight decay is
    /// an L2 penalty; [`AdamW`] is usually the better choice.
    Adam;
    /// Hyperparameters of [`Adam`], with PyTorch's defaults.
    AdamConfig, 0.0, false,
    /// The factor of the L2 penalty `weight_decay * w`, which is added to the gradient.
}

adam! {
    /// Adam with decoupled weight decay (Loshchilov and Hutter, "Decoupled Weight Decay Regularization"; PyTorch's `torch.optim.AdamW`).
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
    AdamW;
    /// Hyperparameters of [`AdamW`], with PyTorch's defaults.
    AdamWConfig, 0.01, true,
    /// Decoupled weight decay: each step shrinks weights by `lr * weight_decay`.
}

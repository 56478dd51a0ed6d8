//! Adam, with the weight decay in the gradient or beside it.

use super::flat::check;
use super::fused::{Fused, Rule, decayed, numbers_of};
use crate::{Expr, Result};

macro_rules! adam {
    ($(#[$doc:meta])* $optimizer:ident, $(#[$config_doc:meta])* $config:ident, $name:literal, $decay:literal,
     $decoupled:literal, $(#[$decay_doc:meta])*) => {
        $(#[$config_doc])*
        #[derive(Debug, Clone, Copy, PartialEq)]
        pub struct $config {
            /// Learning rate.
            pub lr: f64,
            /// Decay of the running mean of the gradient, in `0.0..1.0`.
            pub beta1: f64,
            /// Decay of the running mean of its square, in `0.0..1.0`.
            pub beta2: f64,
            /// Added to the denominator.
            pub eps: f64,
            $(#[$decay_doc])*
            pub weight_decay: f64,
            /// Whether to divide by the greatest running mean so far (Reddi et al., "On the Convergence of Adam and Beyond").
            pub amsgrad: bool,
        }

        impl Default for $config {
            fn default() -> $config {
                $config { lr: 1e-3, beta1: 0.9, beta2: 0.999, eps: 1e-8, weight_decay: $decay, amsgrad: false }
            }
        }

        $(#[$doc])*
        pub type $optimizer = Fused<$config>;

        impl $config {
            fn moments(&self) -> Moments {
                let $config { lr, beta1, beta2, eps, weight_decay, amsgrad } = *self;
                Moments { lr, beta1, beta2, eps, weight_decay, amsgrad, decoupled: $decoupled }
            }
        }

        impl Rule for $config {
            const NAME: &'static str = $name;

            fn check(&self) -> Result<()> {
                check($name, "lr", self.lr, 0.0..f64::INFINITY)?;
                check($name, "beta1", self.beta1, 0.0..1.0)?;
                check($name, "beta2", self.beta2, 0.0..1.0)?;
                check($name, "eps", self.eps, 0.0..f64::INFINITY)?;
                check($name, "weight_decay", self.weight_decay, 0.0..f64::INFINITY)
            }

            fn state(&self) -> Vec<(&'static str, f64)> {
                let all = [("exp_avg", 0.0), ("exp_avg_sq", 0.0), ("max_exp_avg_sq", 0.0)];
                all[..if self.amsgrad { 3 } else { 2 }].to_vec()
            }

            fn numbers(&self, step: i32) -> Vec<f64> {
                numbers_of(self, step)
            }

            fn numbers_to(&self, step: i32, to: &mut Vec<f64>) {
                to.extend(self.moments().numbers(step));
            }

            fn update(&self, w: &Expr, g: &Expr, state: &[Expr], s: &[Expr]) -> (Expr, Vec<Expr>) {
                self.moments().update(w, g, state, s)
            }

            fn learning_rate(&self) -> f64 {
                self.lr
            }

            fn set_learning_rate(&mut self, lr: f64) {
                self.lr = lr;
            }
        }
    };
}

adam! {
    /// Adam (Kingma and Ba, "Adam: A Method for Stochastic Optimization"; PyTorch's `torch.optim.Adam`). Its weight decay is
    /// an L2 penalty; [`AdamW`] is usually the better choice.
    Adam,
    /// Hyperparameters of [`Adam`], with PyTorch's defaults.
    AdamConfig, "Adam", 0.0, false,
    /// L2 penalty, added to the gradient.
}

adam! {
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
    AdamW,
    /// Hyperparameters of [`AdamW`], with PyTorch's defaults.
    AdamWConfig, "AdamW", 0.01, true,
    /// Decoupled weight decay: each step shrinks weights by `lr * weight_decay`.
}

/// What the two have in common.
struct Moments {
    lr: f64,
    beta1: f64,
    beta2: f64,
    eps: f64,
    weight_decay: f64,
    amsgrad: bool,
    decoupled: bool,
}

impl Moments {
    fn numbers(&self, step: i32) -> [f64; 8] {
        // The means start at zero; these undo the bias of that.
        let correct1 = 1.0 / (1.0 - self.beta1.powi(step));
        let correct2 = 1.0 / (1.0 - self.beta2.powi(step));
        let decay = if self.decoupled { 1.0 - self.lr * self.weight_decay } else { self.weight_decay };
        let (beta1, beta2) = (self.beta1, self.beta2);
        [beta1, 1.0 - beta1, beta2, 1.0 - beta2, self.lr * correct1, correct2, self.eps, decay]
    }

    fn update(&self, w: &Expr, g: &Expr, state: &[Expr], s: &[Expr]) -> (Expr, Vec<Expr>) {
        let decay = &s[7];
        let (w, g) = match self.decoupled {
            true => (w * decay, g.clone()),
            false => (w.clone(), decayed(g, w, self.weight_decay, decay)),
        };
        let m = &s[0] * &state[0] + &s[1] * &g;
        let v = &s[2] * &state[1] + &s[3] * (&g * &g);
        let greatest = self.amsgrad.then(|| state[2].max(&v));
        let w = w - &s[4] * &m / ((greatest.as_ref().unwrap_or(&v) * &s[5]).sqrt() + &s[6]);
        (w, [m, v].into_iter().chain(greatest).collect())
    }
}

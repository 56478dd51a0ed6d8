//! The rules of the optimisers: SGD, Adam and AdamW, Lion, RMSprop and Adagrad.

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
                let correct2 = (1.0 / (1.0 - self.beta2.powi(step))).sqrt();
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
                let v = &s[2] * &state[1] + &s[3] * &g * &g;
                let greatest = self.amsgrad.then(|| state[2].max(&v));
                let w = w - &s[4] * (&m / (greatest.as_ref().unwrap_or(&v).sqrt() * &s[5] + &s[6]));
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

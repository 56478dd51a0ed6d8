//! What tells one optimiser from another: its hyperparameters and one formula.

use std::ops::Range;

use crate::{Error, Expr, Result};

/// What tells one optimiser from another. The value holds the hyperparameters; it is what [`Fused::new`](super::Fused::new) is given.
///
/// ```
/// use claystone::optim::{Fused, Optimizer, Rule};
/// use claystone::{Device, Expr, Result, Tensor};
///
/// /// Gradient descent that looks at signs only.
/// #[derive(Clone)]
/// struct SignSgd {
///     lr: f64,
/// }
///
/// impl Rule for SignSgd {
///     const NAME: &'static str = "SignSgd";
///     fn numbers(&self, _step: i32) -> Vec<f64> {
///         vec![self.lr]
///     }
///     fn update(&self, w: &Expr, g: &Expr, _state: &[Expr], s: &[Expr]) -> (Expr, Vec<Expr>) {
///         (w - &s[0] * g.sign(), vec![])
///     }
///     fn learning_rate(&self) -> f64 {
///         self.lr
///     }
///     fn set_learning_rate(&mut self, lr: f64) {
///         self.lr = lr;
///     }
/// }
///
/// let mut w = Tensor::full(&[2], 3.0, Device::Cpu)?.requires_grad_(true)?;
/// let mut optimizer = Fused::new(vec![&mut w], SignSgd { lr: 0.5 })?;
/// w.mul(&w)?.sum((), false)?.backward()?;
/// optimizer.step()?;
/// assert_eq!(w.to_vec::<f32>()?, [2.5, 2.5]);
/// # Ok::<(), claystone::Error>(())
/// ```
pub trait Rule: Clone + Send + 'static {
    /// The optimiser's name, for messages.
    const NAME: &'static str;

    /// Whether the hyperparameters make sense; they do unless it says otherwise.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the one that does not.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// What is kept for each element of a parameter: PyTorch's name and the value before the first step.
    fn state(&self) -> Vec<(&'static str, f64)> {
        Vec::new()
    }

    /// The numbers of a parameter's `step`-th update (the first is 1), which the formula reads as scalars.
    fn numbers(&self, step: i32) -> Vec<f64>;

    /// Adds what [`Rule::numbers`] gives to `to`, which is what a step asks for: done in place it costs no memory.
    fn numbers_to(&self, step: i32, to: &mut Vec<f64>) {
        to.extend(self.numbers(step));
    }

    /// The new weight and the new state, from the weight, its gradient, the state and the numbers. Which formula it is may
    /// depend on the hyperparameters, except for the learning rate: steps ask once and go on with it. Their values belong
    /// among the numbers: every other formula is another kernel.
    fn update(&self, weight: &Expr, grad: &Expr, state: &[Expr], numbers: &[Expr]) -> (Expr, Vec<Expr>);

    /// The learning rate.
    fn learning_rate(&self) -> f64;

    /// Changes the learning rate.
    fn set_learning_rate(&mut self, lr: f64);
}

/// What [`Rule::numbers`] is of a rule that adds them to others.
pub(super) fn numbers_of(rule: &impl Rule, step: i32) -> Vec<f64> {
    let mut numbers = Vec::new();
    rule.numbers_to(step, &mut numbers);
    numbers
}

/// The gradient with the weight `decay`, which is also the number `by`. None at all where that is 0, as in PyTorch: a weight that is
/// infinite is no reason for a NaN then.
pub(super) fn decayed(g: &Expr, w: &Expr, decay: f64, by: &Expr) -> Expr {
    if decay == 0.0 { g.clone() } else { g + by * w }
}

/// Checks that a hyperparameter lies in `range`, by the name users gave it.
pub(super) fn check(op: &'static str, name: &str, value: f64, range: Range<f64>) -> Result<()> {
    if range.contains(&value) {
        return Ok(());
    }
    Err(Error::invalid(op, format!("{name} is {value}, it must be at least {} and below {}", range.start, range.end)))
}

/// The range of a hyperparameter that may be 0 or anything above.
pub(super) const NOT_NEGATIVE: Range<f64> = 0.0..f64::INFINITY;
/// The range of the decay of a running mean.
pub(super) const DECAY: Range<f64> = 0.0..1.0;

/// An optimiser: the struct of its hyperparameters with their defaults and ranges, and the rule, of which `state`,
/// `numbers_to` and `update` are given. A function after `=>` checks what ranges do not say.
macro_rules! optimizer {
    (
        $(#[$doc:meta])* $name:ident; $(#[$config_doc:meta])*
        $config:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty = $default:expr $(, $range:expr)?;)* $(=> $also:ident)? }
        $($rule:tt)*
    ) => {
        $(#[$config_doc])*
        #[derive(Debug, Clone, Copy, PartialEq)]
        pub struct $config {
            $($(#[$field_doc])* pub $field: $type,)*
        }

        impl Default for $config {
            fn default() -> $config {
                $config { $($field: $default,)* }
            }
        }

        $(#[$doc])*
        pub type $name = $crate::optim::Fused<$config>;

        impl $crate::optim::Rule for $config {
            const NAME: &'static str = stringify!($name);

            fn check(&self) -> $crate::Result<()> {
                $($($crate::optim::rule::check(Self::NAME, stringify!($field), self.$field, $range)?;)?)*
                $($also(self)?;)?
                Ok(())
            }

            fn numbers(&self, step: i32) -> Vec<f64> {
                $crate::optim::rule::numbers_of(self, step)
            }

            fn learning_rate(&self) -> f64 {
                self.lr
            }

            fn set_learning_rate(&mut self, lr: f64) {
                self.lr = lr;
            }

            $($rule)*
        }
    };
}
pub(super) use optimizer;

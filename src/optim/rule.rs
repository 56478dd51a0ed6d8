//! The trait that defines an optimiser: its hyperparameters, its state and one formula.

use std::ops::Range;

use crate::{Error, Expr, Result};

/// The definition of an optimiser. A value holds the hyperparameters; pass it to [`Fused::new`](super::Fused::new).
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
    /// The optimiser's name, for error messages.
    const NAME: &'static str;

    /// Checks the hyperparameters. By default, accepts all values.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the name of the invalid hyperparameter.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Returns the optimiser's state tensors: the name (PyTorch's) and the initial value of each. Each has the shape of the parameter.
    fn state(&self) -> Vec<(&'static str, f64)> {
        Vec::new()
    }

    /// Returns the numbers for a parameter's update number `step` (the first is 1). The formula reads them as scalars.
    fn numbers(&self, step: i32) -> Vec<f64>;

    /// Appends [`Rule::numbers`] to `to`. A step calls this method; implement it without the intermediate vector to avoid an allocation.
    fn numbers_to(&self, step: i32, to: &mut Vec<f64>) {
        to.extend(self.numbers(step));
    }

    /// Returns expressions for the new weight and the new state, given the weight, its gradient, the state and the numbers. They are built
    /// once and reused, so a changed learning rate must not change them. Other hyperparameters may change the expressions, but pass
    /// their values as numbers: each different expression compiles another kernel.
    fn update(&self, weight: &Expr, grad: &Expr, state: &[Expr], numbers: &[Expr]) -> (Expr, Vec<Expr>);

    /// Returns the learning rate.
    fn learning_rate(&self) -> f64;

    /// Sets the learning rate.
    fn set_learning_rate(&mut self, lr: f64);
}

/// Implements [`Rule::numbers`] for a rule that implements [`Rule::numbers_to`].
pub(super) fn collect_numbers(rule: &impl Rule, step: i32) -> Vec<f64> {
    let mut numbers = Vec::new();
    rule.numbers_to(step, &mut numbers);
    numbers
}

/// Returns `g + by * w`, or `g` if `decay` (the value of `by`) is 0, so that an infinite weight does not make the gradient NaN.
pub(super) fn add_weight_decay(g: &Expr, w: &Expr, decay: f64, by: &Expr) -> Expr {
    if decay == 0.0 { g.clone() } else { g + by * w }
}

/// Returns an error unless `value` is in `range`. `name` is the public name of the hyperparameter.
pub(super) fn check_range(op: &'static str, name: &str, value: f64, range: Range<f64>) -> Result<()> {
    if range.contains(&value) {
        return Ok(());
    }
    Err(Error::invalid(op, format!("{name} is {value}, it must be at least {} and below {}", range.start, range.end)))
}

/// The range of hyperparameters that must not be negative.
pub(super) const NON_NEGATIVE: Range<f64> = 0.0..f64::INFINITY;
/// The range of decay rates of running means.
pub(super) const DECAY_RANGE: Range<f64> = 0.0..1.0;

/// Defines an optimiser: the struct of its hyperparameters with defaults and ranges, and its [`Rule`] with the given `state`,
/// `numbers_to` and `update`. The function named after `=>` checks conditions that ranges cannot express.
macro_rules! optimizer {
    (
        $(#[$doc:meta])* $name:ident; $(#[$config_doc:meta])*
        $config:ident { $($(#[$field_doc:meta])* $field:ident: $type:ty = $default:expr $(, $range:expr)?;)* $(=> $extra_check:ident)? }
        $($rule:tt)*
    ) => {
        options! {
            $(#[$config_doc])*
            #[derive(Debug, Clone, Copy, PartialEq)]
            pub struct $config {
                $($(#[$field_doc])* pub $field: $type = $default,)*
            }
        }

        $(#[$doc])*
        pub type $name = $crate::optim::Fused<$config>;

        impl $crate::optim::Rule for $config {
            const NAME: &'static str = stringify!($name);

            fn check(&self) -> $crate::Result<()> {
                $($($crate::optim::rule::check_range(Self::NAME, stringify!($field), self.$field, $range)?;)?)*
                $($extra_check(self)?;)?
                Ok(())
            }

            fn numbers(&self, step: i32) -> Vec<f64> {
                $crate::optim::rule::collect_numbers(self, step)
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

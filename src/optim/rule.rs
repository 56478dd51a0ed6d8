//! The interface of all optimisers, and the trait that defines an optimiser by hyperparameters, state and one formula.

use std::ops::Range;

use super::clip::all_finite;
use crate::io::StateDict;
use crate::{Expr, Result, Tensor};

/// The interface of all optimisers.
pub trait Optimizer {
    /// Updates every parameter that has a gradient, in place and without allocations. Makes one launch per group if all have gradients.
    ///
    /// # Errors
    /// Device failures, after which no parameter is changed, except for [`Error::Partial`](crate::Error::Partial): then some groups, or
    /// some runs of adjacent parameters, are updated completely and the others not at all.
    #[track_caller]
    fn step(&mut self) -> Result<()> {
        self.step_scaled(1.0)
    }

    /// Does the same as [`Optimizer::step`], with gradients multiplied by `factor` in the precision of the step. [`GradScaler`](super::GradScaler) calls it.
    /// Fails as [`Optimizer::step`] does.
    fn step_scaled(&mut self, factor: f64) -> Result<()>;

    /// Clears the gradients without a launch. Call it before each backward pass, unless gradients are to be accumulated.
    fn zero_grad(&self);

    /// Returns the parameters of all groups.
    fn parameters(&self) -> Vec<&Tensor>;

    /// Returns the learning rate of each group.
    fn learning_rates(&self) -> Vec<f64>;

    /// Sets the learning rate of each group, in the order of the groups. Does not recompile kernels. Fails with [`crate::Error::Invalid`]
    /// if the number of rates differs from the number of groups.
    fn set_learning_rates(&mut self, rates: &[f64]) -> Result<()>;

    /// Returns the state needed to resume training. For parameter 3 it has `state.3.step`, the tensors of the rule such as
    /// `state.3.exp_avg`, and for half precision the f32 master weights `state.3.master`; for group 0 it has `param_groups.0.lr`. Large
    /// tensors are views of the optimiser's memory: save or clone them before the next step.
    fn state_dict(&self) -> Result<StateDict>;

    /// Restores a state from [`Optimizer::state_dict`]. Load the model's parameters first. All names and shapes are checked before any
    /// change. Fails with [`crate::Error::Invalid`] for a missing or unknown name, and for a tensor with another shape than expected, and
    /// with [`crate::Error::Partial`] if the device fails after some of the state was copied.
    fn load_state_dict(&mut self, state: &StateDict) -> Result<()>;

    /// True if all gradients are finite; [`GradScaler`](super::GradScaler) calls it before a step. Waits for the device.
    fn gradients_are_finite(&self) -> Result<bool> {
        all_finite(self.parameters())
    }

    /// Returns the learning rate of the first group.
    fn learning_rate(&self) -> f64 {
        self.learning_rates()[0]
    }

    /// Sets the learning rate of all groups.
    fn set_learning_rate(&mut self, lr: f64) {
        let rates = vec![lr; self.learning_rates().len()];
        self.set_learning_rates(&rates).expect("one for each group");
    }
}

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

    /// Checks the hyperparameters. By default, accepts all values. Fails with [`crate::Error::Invalid`], which names the invalid
    /// hyperparameter.
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

/// Returns `g + by * w`, or `g` if `decay` (the value of `by`) is 0, so that an infinite weight does not make the gradient NaN.
pub(super) fn add_weight_decay(g: &Expr, w: &Expr, decay: f64, by: &Expr) -> Expr {
    if decay == 0.0 { g.clone() } else { g + by * w }
}

/// Returns an error unless `value` is in `range`. `name` is the public name of the hyperparameter.
pub(super) fn check_range(op: &'static str, name: &str, value: f64, range: Range<f64>) -> Result<()> {
    invalid!(op if !range.contains(&value),
        "{name} is {value}, it must be at least {} and below {}", range.start, range.end);
    Ok(())
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
                let mut numbers = Vec::new();
                self.numbers_to(step, &mut numbers);
                numbers
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

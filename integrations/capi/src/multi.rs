//! One call for many tensors: elementwise operations, and steps of optimisers.

use std::ffi::c_char;

use claystone::optim::{AdagradConfig, AdamConfig, AdamWConfig, FusedAdamState, FusedStep, SgdConfig};
use claystone::optim::{fused_adagrad_, fused_adam_, fused_adamw_, fused_sgd_, unscale_};
use claystone::{Scalar, Tensor, no_grad, ops};

use crate::pointers::{array, borrow, text};
use crate::status::{ClaystoneStatus, Fault, guard};
use crate::tensor::ClaystoneTensor;

/// A list of tensors.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ClaystoneTensors {
    /// Handles, none of them null.
    pub tensors: *const *const ClaystoneTensor,
    /// How many.
    pub count: usize,
}

/// The tensors of a list.
///
/// # Safety
/// Pointers are null, or good as the crate's documentation says.
pub(crate) unsafe fn list<'a>(list: &ClaystoneTensors, what: &str) -> Result<Vec<&'a Tensor>, Fault> {
    // SAFETY: the caller's promise.
    let handles = unsafe { array(list.tensors, list.count, what)? };
    // SAFETY: as above.
    handles.iter().map(|&t| Ok(&unsafe { borrow(t, what)? }.0)).collect()
}

/// Runs an elementwise operation on many tensors: `lists` has its operands, `list_count` of them, each of as many tensors as `out`, which
/// is written, or of one for all; `numbers` has its other arguments. Tensors of one shape share launches. `out` may be the first list.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_foreach(
    name: *const c_char,
    lists: *const ClaystoneTensors,
    list_count: usize,
    numbers: *const f64,
    number_count: usize,
    out: ClaystoneTensors,
) -> ClaystoneStatus {
    guard("claystone_foreach", || {
        // SAFETY: a text, arrays of so many entries, and handles that live, says the caller.
        let (name, lists, numbers, out) = unsafe {
            let given = array(lists, list_count, "lists")?.iter();
            let lists = given.map(|one| list(one, "a list")).collect::<Result<Vec<_>, Fault>>()?;
            (text(name, "name")?, lists, array(numbers, number_count, "numbers")?, list(&out, "out")?)
        };
        let lists: Vec<&[&Tensor]> = lists.iter().map(Vec::as_slice).collect();
        let numbers: Vec<Scalar> = numbers.iter().map(|&x| Scalar::Float(x)).collect();
        Ok(no_grad(|| ops::foreach_into(name, &lists, &numbers, &out))?)
    })
}

/// What a step of an optimiser is made of, whichever it is.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ClaystoneStep {
    /// What is updated.
    pub parameters: ClaystoneTensors,
    /// As many gradients.
    pub gradients: ClaystoneTensors,
    /// The learning rate, of one element, on the device; null where that of the hyperparameters is the one.
    pub lr: *const ClaystoneTensor,
    /// What gradients are divided by first, in place, of one element; or null.
    pub grad_scale: *const ClaystoneTensor,
    /// One element: where it is 1 nothing is changed. Or null.
    pub found_inf: *const ClaystoneTensor,
    /// Whether to go up the gradient instead of down.
    pub maximize: bool,
}

/// Runs a step of the tensors that this is of.
///
/// # Safety
/// Pointers are null, or good as the crate's documentation says.
unsafe fn with_step(
    step: *const ClaystoneStep,
    run: impl FnOnce(&FusedStep) -> claystone::Result<()>,
) -> Result<(), Fault> {
    // SAFETY: the caller's promise.
    let (step, parameters, gradients, [lr, grad_scale, found_inf]) = unsafe {
        let step = borrow(step, "step")?;
        let one = |t: *const ClaystoneTensor| t.as_ref().map(|t| &t.0);
        let (parameters, gradients) = (list(&step.parameters, "a parameter")?, list(&step.gradients, "a gradient")?);
        (step, parameters, gradients, [step.lr, step.grad_scale, step.found_inf].map(one))
    };
    let maximize = step.maximize;
    run(&FusedStep { parameters: &parameters, gradients: &gradients, lr, grad_scale, found_inf, maximize })?;
    Ok(())
}

/// Hyperparameters of Adam and AdamW.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ClaystoneAdam {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the running mean of the gradient.
    pub beta1: f64,
    /// Decay of the running mean of its square.
    pub beta2: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// Weight decay: of AdamW beside the gradient, otherwise in it.
    pub weight_decay: f64,
    /// Whether to divide by the greatest running mean so far.
    pub amsgrad: bool,
    /// Whether it is AdamW.
    pub decoupled: bool,
}

/// The state of Adam and AdamW: as many tensors as parameters in each list.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ClaystoneAdamState {
    /// Running means of the gradients.
    pub exp_avgs: ClaystoneTensors,
    /// Running means of their squares.
    pub exp_avg_sqs: ClaystoneTensors,
    /// The greatest of these so far; read with `amsgrad` only.
    pub max_exp_avg_sqs: ClaystoneTensors,
    /// Tensors of one element: the how-manieth step this is, from 1 on.
    pub steps: ClaystoneTensors,
}

/// One step of Adam or AdamW. PyTorch's `torch._fused_adam_` and `torch._fused_adamw_`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_fused_adam(
    step: *const ClaystoneStep,
    state: *const ClaystoneAdamState,
    adam: *const ClaystoneAdam,
) -> ClaystoneStatus {
    guard("claystone_fused_adam", || {
        // SAFETY: structs that are good for reading, and handles that live, says the caller.
        let (adam, [exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps]) = unsafe {
            let (state, adam) = (borrow(state, "state")?, borrow(adam, "adam")?);
            let greatest = if adam.amsgrad { list(&state.max_exp_avg_sqs, "a greatest mean")? } else { Vec::new() };
            let means = (list(&state.exp_avgs, "a mean")?, list(&state.exp_avg_sqs, "a mean of squares")?);
            (adam, [means.0, means.1, greatest, list(&state.steps, "a step")?])
        };
        let state = FusedAdamState {
            exp_avgs: &exp_avgs,
            exp_avg_sqs: &exp_avg_sqs,
            max_exp_avg_sqs: &max_exp_avg_sqs,
            steps: &steps,
        };
        let ClaystoneAdam { lr, beta1, beta2, eps, weight_decay, amsgrad, decoupled } = *adam;
        // SAFETY: the caller's promise.
        unsafe {
            with_step(step, |step| match decoupled {
                true => fused_adamw_(step, &state, &AdamWConfig { lr, beta1, beta2, eps, weight_decay, amsgrad }),
                false => fused_adam_(step, &state, &AdamConfig { lr, beta1, beta2, eps, weight_decay, amsgrad }),
            })
        }
    })
}

/// Hyperparameters of stochastic gradient descent.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ClaystoneSgd {
    /// Learning rate.
    pub lr: f64,
    /// Factor of the velocity kept from step to step; 0 for none.
    pub momentum: f64,
    /// The part of the gradient that does not reach the velocity, from the second step on.
    pub dampening: f64,
    /// L2 penalty, added to the gradient.
    pub weight_decay: f64,
    /// Nesterov's look-ahead.
    pub nesterov: bool,
    /// Whether it is the first step: what the momentum buffers hold is not read.
    pub first: bool,
}

/// One step of stochastic gradient descent. `momentum_buffers` has as many tensors as there are parameters, or none without a
/// momentum. PyTorch's `torch._fused_sgd_`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_fused_sgd(
    step: *const ClaystoneStep,
    momentum_buffers: ClaystoneTensors,
    sgd: *const ClaystoneSgd,
) -> ClaystoneStatus {
    guard("claystone_fused_sgd", || {
        // SAFETY: structs that are good for reading, and handles that live, says the caller.
        let (buffers, sgd) = unsafe { (list(&momentum_buffers, "a momentum buffer")?, borrow(sgd, "sgd")?) };
        let ClaystoneSgd { lr, momentum, dampening, weight_decay, nesterov, first } = *sgd;
        let config = SgdConfig { lr, momentum, dampening, weight_decay, nesterov };
        // SAFETY: the caller's promise.
        unsafe { with_step(step, |step| fused_sgd_(step, &buffers, first, &config)) }
    })
}

/// Hyperparameters of Adagrad.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ClaystoneAdagrad {
    /// Learning rate.
    pub lr: f64,
    /// How fast the learning rate falls: step t uses `lr / (1 + (t - 1) * lr_decay)`.
    pub lr_decay: f64,
    /// L2 penalty, added to the gradient.
    pub weight_decay: f64,
    /// Added to the denominator.
    pub eps: f64,
}

/// One step of Adagrad. `state_sums` are the sums of squared gradients, `steps` tensors of one element: the how-manieth step this
/// is, from 1 on. PyTorch's `torch._fused_adagrad_`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_fused_adagrad(
    step: *const ClaystoneStep,
    state_sums: ClaystoneTensors,
    steps: ClaystoneTensors,
    adagrad: *const ClaystoneAdagrad,
) -> ClaystoneStatus {
    guard("claystone_fused_adagrad", || {
        // SAFETY: a struct that is good for reading, and handles that live, says the caller.
        let (sums, steps, adagrad) =
            unsafe { (list(&state_sums, "a sum")?, list(&steps, "a step")?, borrow(adagrad, "adagrad")?) };
        let ClaystoneAdagrad { lr, lr_decay, weight_decay, eps } = *adagrad;
        let config = AdagradConfig { lr, lr_decay, weight_decay, eps, ..Default::default() };
        // SAFETY: the caller's promise.
        unsafe { with_step(step, |step| fused_adagrad_(step, &sums, &steps, &config)) }
    })
}

/// Multiplies gradients by `inv_scale` in place, and sets `found_inf` to 1 where one of them is infinite or NaN; both are of one
/// element. PyTorch's `torch._amp_foreach_non_finite_check_and_unscale_`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_unscale(
    gradients: ClaystoneTensors,
    found_inf: *const ClaystoneTensor,
    inv_scale: *const ClaystoneTensor,
) -> ClaystoneStatus {
    guard("claystone_unscale", || {
        // SAFETY: handles that live, says the caller.
        let (gradients, found_inf, inv_scale) = unsafe {
            let gradients = list(&gradients, "a gradient")?;
            (gradients, borrow(found_inf, "found_inf")?, borrow(inv_scale, "inv_scale")?)
        };
        Ok(unscale_(&gradients, &found_inf.0, &inv_scale.0)?)
    })
}

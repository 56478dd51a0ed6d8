//! Operations on lists of tensors: elementwise operations and optimizer steps.

use std::ffi::c_char;

use claystone::optim::{AdagradConfig, AdamConfig, AdamWConfig, SgdConfig};
use claystone::{Scalar, Tensor, no_grad, ops};

use crate::pointers::{array, borrow, text};
use crate::status::{ClaystoneStatus, Fault, guard};
use crate::steps::{FusedAdamState, FusedStep, fused_adagrad_, fused_adam_, fused_adamw_, fused_sgd_, unscale_};
use crate::tensor::ClaystoneTensor;

/// A list of tensors.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ClaystoneTensors {
    /// Handles, none of them null.
    pub tensors: *const *const ClaystoneTensor,
    /// The number of tensors.
    pub count: usize,
}

/// Borrows the tensors of a list.
///
/// # Safety
/// Pointers are null or valid as the crate's documentation requires.
pub(crate) unsafe fn borrow_tensors<'a>(list: &ClaystoneTensors, what: &str) -> Result<Vec<&'a Tensor>, Fault> {
    // SAFETY: the caller upholds this function's contract.
    let handles = unsafe { array(list.tensors, list.count, what)? };
    // SAFETY: the caller promises that the entries are null or live handles.
    handles.iter().map(|&t| Ok(&unsafe { borrow(t, what)? }.0)).collect()
}

/// Runs an elementwise operation on many tensors. `lists` has `list_count` operands, each with as many tensors as `out`, which receives
/// the results, or with one tensor that applies to all; `numbers` has the scalar arguments. Tensors of one shape share launches. `out`
/// may be the first list.
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
        // SAFETY: the caller promises a string, arrays of the given lengths, and live handles.
        let (name, lists, numbers, out) = unsafe {
            let given = array(lists, list_count, "lists")?.iter();
            let lists = given.map(|one| borrow_tensors(one, "a list")).collect::<Result<Vec<_>, Fault>>()?;
            (text(name, "name")?, lists, array(numbers, number_count, "numbers")?, borrow_tensors(&out, "out")?)
        };
        let lists: Vec<&[&Tensor]> = lists.iter().map(Vec::as_slice).collect();
        let numbers: Vec<Scalar> = numbers.iter().map(|&x| Scalar::Float(x)).collect();
        Ok(no_grad(|| ops::foreach_into(name, &lists, &numbers, &out))?)
    })
}

/// The tensors that every optimizer step takes.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ClaystoneStep {
    /// The parameters to update.
    pub parameters: ClaystoneTensors,
    /// The gradients, one for each parameter.
    pub gradients: ClaystoneTensors,
    /// The learning rate as a one-element tensor on the device; null to use the hyperparameters' learning rate.
    pub lr: *const ClaystoneTensor,
    /// A one-element tensor by which the gradients are first divided in place; or null.
    pub grad_scale: *const ClaystoneTensor,
    /// A one-element tensor; if it is 1, the step changes nothing. Or null.
    pub found_inf: *const ClaystoneTensor,
    /// True to ascend the gradient instead of descending it.
    pub maximize: bool,
}

/// Converts the tensors of a step and passes them to `run`.
///
/// # Safety
/// Pointers are null or valid as the crate's documentation requires.
unsafe fn with_step(
    step: *const ClaystoneStep,
    run: impl FnOnce(&FusedStep) -> claystone::Result<()>,
) -> Result<(), Fault> {
    // SAFETY: the caller upholds this function's contract.
    let (step, parameters, gradients, [lr, grad_scale, found_inf]) = unsafe {
        let step = borrow(step, "step")?;
        let one = |t: *const ClaystoneTensor| t.as_ref().map(|t| &t.0);
        let (parameters, gradients) =
            (borrow_tensors(&step.parameters, "a parameter")?, borrow_tensors(&step.gradients, "a gradient")?);
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
    /// Decay of the running mean of the squared gradient.
    pub beta2: f64,
    /// Added to the denominator.
    pub eps: f64,
    /// Weight decay: applied to the parameters by AdamW, added to the gradient by Adam.
    pub weight_decay: f64,
    /// Whether to divide by the maximum of the running means so far.
    pub amsgrad: bool,
    /// True for AdamW, false for Adam.
    pub decoupled: bool,
}

/// The state of Adam and AdamW: each list has a tensor for each parameter.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ClaystoneAdamState {
    /// Running means of the gradients.
    pub exp_avgs: ClaystoneTensors,
    /// Running means of the squared gradients.
    pub exp_avg_sqs: ClaystoneTensors,
    /// Maxima of `exp_avg_sqs` so far; read with `amsgrad` only.
    pub max_exp_avg_sqs: ClaystoneTensors,
    /// One-element tensors with the number of this step, counted from 1.
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
        // SAFETY: the caller promises structs that are valid for reading, and live handles.
        let (adam, [exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps]) = unsafe {
            let (state, adam) = (borrow(state, "state")?, borrow(adam, "adam")?);
            let greatest =
                if adam.amsgrad { borrow_tensors(&state.max_exp_avg_sqs, "a greatest mean")? } else { Vec::new() };
            let means =
                (borrow_tensors(&state.exp_avgs, "a mean")?, borrow_tensors(&state.exp_avg_sqs, "a mean of squares")?);
            (adam, [means.0, means.1, greatest, borrow_tensors(&state.steps, "a step")?])
        };
        let state = FusedAdamState {
            exp_avgs: &exp_avgs,
            exp_avg_sqs: &exp_avg_sqs,
            max_exp_avg_sqs: &max_exp_avg_sqs,
            steps: &steps,
        };
        let ClaystoneAdam { lr, beta1, beta2, eps, weight_decay, amsgrad, decoupled } = *adam;
        // SAFETY: the caller upholds this function's contract.
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
    /// Factor of the velocity from the previous step; 0 for no momentum.
    pub momentum: f64,
    /// The fraction of the gradient that is not added to the velocity, from the second step on.
    pub dampening: f64,
    /// L2 penalty, added to the gradient.
    pub weight_decay: f64,
    /// Whether to use Nesterov momentum.
    pub nesterov: bool,
    /// True in the first step: the contents of the momentum buffers are then not read.
    pub first: bool,
}

/// One step of stochastic gradient descent. `momentum_buffers` has a tensor for each parameter, or is empty without momentum.
/// PyTorch's `torch._fused_sgd_`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_fused_sgd(
    step: *const ClaystoneStep,
    momentum_buffers: ClaystoneTensors,
    sgd: *const ClaystoneSgd,
) -> ClaystoneStatus {
    guard("claystone_fused_sgd", || {
        // SAFETY: the caller promises structs that are valid for reading, and live handles.
        let (buffers, sgd) = unsafe { (borrow_tensors(&momentum_buffers, "a momentum buffer")?, borrow(sgd, "sgd")?) };
        let ClaystoneSgd { lr, momentum, dampening, weight_decay, nesterov, first } = *sgd;
        let config = SgdConfig { lr, momentum, dampening, weight_decay, nesterov };
        // SAFETY: the caller upholds this function's contract.
        unsafe { with_step(step, |step| fused_sgd_(step, &buffers, first, &config)) }
    })
}

/// Hyperparameters of Adagrad.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ClaystoneAdagrad {
    /// Learning rate.
    pub lr: f64,
    /// Decay of the learning rate: step t uses `lr / (1 + (t - 1) * lr_decay)`.
    pub lr_decay: f64,
    /// L2 penalty, added to the gradient.
    pub weight_decay: f64,
    /// Added to the denominator.
    pub eps: f64,
}

/// One step of Adagrad. `state_sums` are the sums of squared gradients, `steps` one-element tensors with the number of this step,
/// counted from 1. PyTorch's `torch._fused_adagrad_`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_fused_adagrad(
    step: *const ClaystoneStep,
    state_sums: ClaystoneTensors,
    steps: ClaystoneTensors,
    adagrad: *const ClaystoneAdagrad,
) -> ClaystoneStatus {
    guard("claystone_fused_adagrad", || {
        // SAFETY: the caller promises a struct that is valid for reading, and live handles.
        let (sums, steps, adagrad) = unsafe {
            (borrow_tensors(&state_sums, "a sum")?, borrow_tensors(&steps, "a step")?, borrow(adagrad, "adagrad")?)
        };
        let ClaystoneAdagrad { lr, lr_decay, weight_decay, eps } = *adagrad;
        let config = AdagradConfig { lr, lr_decay, weight_decay, eps, ..Default::default() };
        // SAFETY: the caller upholds this function's contract.
        unsafe { with_step(step, |step| fused_adagrad_(step, &sums, &steps, &config)) }
    })
}

/// Multiplies gradients by `inv_scale` in place and sets `found_inf` to 1 if an element is infinite or NaN; `inv_scale` and `found_inf`
/// have one element. PyTorch's `torch._amp_foreach_non_finite_check_and_unscale_`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn claystone_unscale(
    gradients: ClaystoneTensors,
    found_inf: *const ClaystoneTensor,
    inv_scale: *const ClaystoneTensor,
) -> ClaystoneStatus {
    guard("claystone_unscale", || {
        // SAFETY: the caller promises live handles.
        let (gradients, found_inf, inv_scale) = unsafe {
            let gradients = borrow_tensors(&gradients, "a gradient")?;
            (gradients, borrow(found_inf, "found_inf")?, borrow(inv_scale, "inv_scale")?)
        };
        Ok(unscale_(&gradients, &found_inf.0, &inv_scale.0)?)
    })
}

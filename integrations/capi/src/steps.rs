//! Single optimizer steps on the caller's tensors: the caller owns the optimizer state and counts the steps on the device, as with
//! `fused=True` in PyTorch. No step waits for the device. [`multi`](crate::multi) has the C functions.

use claystone::ops::{TensorSet, foreach_into, map_each};
use claystone::optim::{AdagradConfig, AdamConfig, AdamWConfig, Rule, SgdConfig};
use claystone::{DType, Error, Expr, Result, Scalar, Tensor, no_grad};

/// The arguments that steps of all optimisers have in common.
#[derive(Debug, Clone, Copy, Default)]
pub struct FusedStep<'a> {
    /// The parameters, which are updated in place.
    pub parameters: &'a [&'a Tensor],
    /// The gradients, one for each parameter.
    pub gradients: &'a [&'a Tensor],
    /// The learning rate as a one-element tensor on the device; `None` for the config's learning rate.
    pub lr: Option<&'a Tensor>,
    /// A one-element tensor by which the gradients are first divided in place: the factor of a loss scaler.
    pub grad_scale: Option<&'a Tensor>,
    /// A one-element tensor that is 1 if gradients overflowed; the step then changes nothing.
    pub found_inf: Option<&'a Tensor>,
    /// Whether to ascend the gradient instead of descending it.
    pub maximize: bool,
}

/// The state of [`fused_adam_`] and [`fused_adamw_`]: each list has one tensor for each parameter.
#[derive(Debug, Clone, Copy, Default)]
pub struct FusedAdamState<'a> {
    /// Running means of the gradients.
    pub exp_avgs: &'a [&'a Tensor],
    /// Running means of the squared gradients.
    pub exp_avg_sqs: &'a [&'a Tensor],
    /// The largest running means of squares so far; only read with `amsgrad`.
    pub max_exp_avg_sqs: &'a [&'a Tensor],
    /// Tensors of one element with the number of this step, beginning with 1.
    pub steps: &'a [&'a Tensor],
}

/// Computes one step of Adam (PyTorch's `torch._fused_adam_`). Parameters of one shape share launches.
///
/// ```
/// use claystone::optim::AdamConfig;
/// use claystone_capi::steps::{FusedAdamState, FusedStep, fused_adam_};
/// use claystone::{Device, Tensor};
/// let new = |value: f64| Tensor::full(2, value, Device::Cpu);
/// let (w, g, m, v, step) = (new(1.0)?, new(0.5)?, new(0.0)?, new(0.0)?, Tensor::ones((), Device::Cpu)?);
/// let tensors = FusedStep { parameters: &[&w], gradients: &[&g], ..Default::default() };
/// let state = FusedAdamState { exp_avgs: &[&m], exp_avg_sqs: &[&v], steps: &[&step], ..Default::default() };
/// fused_adam_(&tensors, &state, &AdamConfig { lr: 0.1, ..Default::default() })?;
/// assert!((w.to_vec::<f32>()?[0] - 0.9).abs() < 1e-6);
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`] for lists of different lengths; the errors of [`map_each`].
#[track_caller]
pub fn fused_adam_(step: &FusedStep, state: &FusedAdamState, config: &AdamConfig) -> Result<()> {
    adam(step, state, config, [config.beta1, config.beta2, config.weight_decay], config.amsgrad, false)
}

/// Computes one step of AdamW (PyTorch's `torch._fused_adamw_`). Parameters of one shape share launches.
///
/// # Errors
/// The errors of [`fused_adam_`].
#[track_caller]
pub fn fused_adamw_(step: &FusedStep, state: &FusedAdamState, config: &AdamWConfig) -> Result<()> {
    adam(step, state, config, [config.beta1, config.beta2, config.weight_decay], config.amsgrad, true)
}

/// Index of the step size among the scalars of the Adam formula.
const STEP_SIZE_INDEX: usize = 4;
/// Index of the bias correction of the root of the squared gradients among these scalars.
const CORRECTION_INDEX: usize = 5;
/// Index of the weight decay among these scalars.
const DECAY_INDEX: usize = 7;

/// Computes one step of Adam, or with `decoupled` of AdamW, which applies the weight decay to the parameters directly.
fn adam(
    step: &FusedStep,
    state: &FusedAdamState,
    rule: &impl Rule,
    [beta1, beta2, weight_decay]: [f64; 3],
    amsgrad: bool,
    decoupled: bool,
) -> Result<()> {
    let lists = [state.exp_avgs, state.exp_avg_sqs, state.max_exp_avg_sqs];
    let logs = [beta1.ln(), beta2.ln()];
    let numbers = step_numbers("fused_adam_", step, state.steps, rule.learning_rate(), &logs, |count, lr, s| {
        // 1 - beta^step, computed without the cancellation of a subtraction.
        let [bias1, bias2] = [0, 1].map(|i| -(count * &s[i]).expm1());
        [lr / bias1, bias2.sqrt().recip()]
    })?;
    let lr = step.lr;
    let held = &lists[..if amsgrad { 3 } else { 2 }];
    let run = RuleStep { step, state: held, numbers: &[&numbers[0], &numbers[1]], zero_state: false };
    run.launch(rule, |all, own| {
        all[STEP_SIZE_INDEX] = own[0].clone();
        all[CORRECTION_INDEX] = own[1].clone();
        if let (Some(_), true) = (lr, decoupled) {
            all[DECAY_INDEX] = 1.0 - own.last().expect("the learning rate is the last") * weight_decay;
        }
    })
}

/// Evaluates `formula` on the device, once for each parameter, with its step count, the learning rate and the scalars `others`.
fn step_numbers<const N: usize>(
    op: &'static str,
    step: &FusedStep,
    steps: &[&Tensor],
    lr: f64,
    others: &[f64],
    formula: impl Fn(&Expr, &Expr, &[Expr]) -> [Expr; N],
) -> Result<Vec<Vec<Tensor>>> {
    let wide = step.parameters.iter().any(|p| p.dtype() == DType::F64);
    let dtype = if wide { DType::F64 } else { DType::F32 };
    let new = |_| steps.iter().map(|t| Tensor::empty((), (dtype, t.device()))).collect::<Result<Vec<_>>>();
    let numbers = (0..N).map(new).collect::<Result<Vec<_>>>()?;
    let counts = steps.iter().map(|t| t.to_dtype(dtype)?.reshape(())).collect::<Result<Vec<_>>>()?;
    let set = |(i, count)| TensorSet {
        inputs: [count].into_iter().collect(),
        outputs: numbers.iter().map(|of_each| &of_each[i]).collect(),
    };
    let sets: Vec<TensorSet> = counts.iter().enumerate().map(set).collect();
    let scalars: Vec<Scalar> = [lr].iter().chain(others).map(|&number| Scalar::Float(number)).collect();
    no_grad(|| {
        let lr = step.lr.map(|lr| lr.reshape(())).transpose()?;
        map_each(op, &sets, &lr.iter().collect::<Vec<_>>(), &scalars, |x, s| {
            formula(&x[0], x.get(1).unwrap_or(&s[0]), &s[1..]).into()
        })
    })?;
    drop(sets);
    Ok(numbers)
}

/// Computes one step of Adagrad (PyTorch's `torch._fused_adagrad_`). `state_sums` are sums of squared gradients; `steps` are
/// tensors of one element with the number of this step, beginning with 1. The config's `initial_accumulator_value` is not read.
///
/// ```
/// use claystone::optim::AdagradConfig;
/// use claystone_capi::steps::{FusedStep, fused_adagrad_};
/// use claystone::{Device, Tensor};
/// let (w, g, sum) = (Tensor::ones(2, Device::Cpu)?, Tensor::ones(2, Device::Cpu)?, Tensor::zeros(2, Device::Cpu)?);
/// let tensors = FusedStep { parameters: &[&w], gradients: &[&g], ..Default::default() };
/// fused_adagrad_(&tensors, &[&sum], &[&Tensor::ones((), Device::Cpu)?], &AdagradConfig { lr: 0.25, ..Default::default() })?;
/// assert_eq!(w.to_vec::<f32>()?, [0.75; 2]);
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// # Errors
/// The errors of [`fused_adam_`].
#[track_caller]
pub fn fused_adagrad_(
    step: &FusedStep,
    state_sums: &[&Tensor],
    steps: &[&Tensor],
    config: &AdagradConfig,
) -> Result<()> {
    let sizes = step_numbers("fused_adagrad_", step, steps, config.lr, &[config.lr_decay], |count, lr, s| {
        [lr / (1.0 + (count - 1.0) * &s[0])]
    })?;
    let run = RuleStep { step, state: &[state_sums], numbers: &[&sizes[0]], zero_state: false };
    run.launch(config, |all, own| all[0] = own[0].clone()) // index 0 is the learning rate
}

/// Computes one step of stochastic gradient descent (PyTorch's `torch._fused_sgd_`). `momentum_buffers` has one tensor for each
/// parameter, or is empty without momentum. If `first`, the values of the buffers are ignored.
///
/// ```
/// use claystone::optim::SgdConfig;
/// use claystone_capi::steps::{FusedStep, fused_sgd_};
/// use claystone::{Device, Tensor};
/// let (w, g) = (Tensor::ones(2, Device::Cpu)?, Tensor::ones(2, Device::Cpu)?);
/// let tensors = FusedStep { parameters: &[&w], gradients: &[&g], ..Default::default() };
/// fused_sgd_(&tensors, &[], true, &SgdConfig { lr: 0.25, ..Default::default() })?;
/// assert_eq!(w.to_vec::<f32>()?, [0.75; 2]);
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// # Errors
/// The errors of [`fused_adam_`].
#[track_caller]
pub fn fused_sgd_(step: &FusedStep, momentum_buffers: &[&Tensor], first: bool, config: &SgdConfig) -> Result<()> {
    let lists = [momentum_buffers];
    let state = if config.momentum == 0.0 { &[] } else { &lists[..] };
    let lr = step.lr;
    RuleStep { step, state, numbers: &[], zero_state: first }.launch_at(
        config,
        if first { 1 } else { 2 },
        |all, own| {
            if lr.is_some() {
                all[0] = own.last().expect("the learning rate is the last").clone();
            }
        },
    )
}

/// One optimizer step over lists of tensors.
struct RuleStep<'a> {
    step: &'a FusedStep<'a>,
    state: &'a [&'a [&'a Tensor]],
    /// Scalars of the formula that differ between parameters: each list has a one-element tensor for each parameter.
    numbers: &'a [&'a [Tensor]],
    /// Whether to use zeros instead of the state's values.
    zero_state: bool,
}

impl RuleStep<'_> {
    fn launch<R: Rule>(&self, rule: &R, numbers: impl Fn(&mut [Expr], &[Expr])) -> Result<()> {
        self.launch_at(rule, 1, numbers)
    }

    /// Launches the rule's formula with the hyperparameters of optimizer step `at`. `override_numbers(scalars, inputs)` replaces
    /// scalars by tensor inputs: the parameter's entries of `self.numbers`, then the learning rate if it is a tensor.
    fn launch_at<R: Rule>(&self, rule: &R, at: i32, override_numbers: impl Fn(&mut [Expr], &[Expr])) -> Result<()> {
        let FusedStep { parameters, gradients, lr, grad_scale, found_inf, maximize } = *self.step;
        let count = parameters.len();
        let lengths = [gradients.len()].into_iter().chain(self.state.iter().map(|list| list.len()));
        if lengths.chain(self.numbers.iter().map(|list| list.len())).any(|length| length != count) {
            return Err(Error::invalid(
                R::NAME,
                format!("each list must have {count} tensors, one for each parameter"),
            ));
        }
        let written = |i: usize| {
            let scaled = grad_scale.map(|_| gradients[i]);
            [parameters[i]].into_iter().chain(self.state.iter().map(move |list| list[i])).chain(scaled)
        };
        let set = |i: usize| TensorSet {
            inputs: [parameters[i], gradients[i]]
                .into_iter()
                .chain(self.state.iter().map(|list| list[i]))
                .chain(self.numbers.iter().map(|list| &list[i]))
                .collect(),
            outputs: written(i).collect(),
        };
        let sets: Vec<TensorSet> = (0..count).map(set).collect();
        let common = [lr, grad_scale, found_inf].into_iter().flatten().map(|one| one.reshape(()));
        let common = common.collect::<Result<Vec<Tensor>>>()?;
        let common: Vec<&Tensor> = common.iter().collect();
        let scalars: Vec<Scalar> = rule.numbers(at).into_iter().map(Scalar::Float).collect();
        let (held, numbers) = (self.state.len(), self.numbers.len());
        no_grad(|| {
            map_each(R::NAME, &sets, &common, &scalars, |x, s| {
                let (own, common) = x.split_at(2 + held + numbers);
                let (own, of_parameter) = own.split_at(2 + held);
                let mut common = common.iter();
                let mut next = |given: Option<&Tensor>| given.and_then(|_| common.next());
                let (lr, scale, overflow) = (next(lr), next(grad_scale), next(found_inf));
                let mut all = s.to_vec();
                override_numbers(&mut all, &of_parameter.iter().chain(lr).cloned().collect::<Vec<_>>());
                let gradient = scale.map_or(own[1].clone(), |scale| &own[1] / scale);
                let downhill = if maximize { -&gradient } else { gradient.clone() };
                let zeros = vec![Expr::constant(0.0); held];
                let state = if self.zero_state { &zeros[..] } else { &own[2..] };
                let (weight, state) = rule.update(&own[0], &downhill, state, &all);
                let new = [weight].into_iter().chain(state).chain(scale.map(|_| gradient));
                let old = [&own[0]].into_iter().chain(&own[2..]).chain(scale.map(|_| &own[1]));
                let kept = |(new, old): (Expr, &Expr)| match overflow {
                    Some(overflow) => overflow.eq(1.0).select(old, new),
                    None => new,
                };
                new.zip(old).map(kept).collect()
            })
        })
    }
}

/// The maximum number of norms (one-element tensors) that one launch of [`unscale_`] reads.
const NORMS_PER_LAUNCH: usize = 24;

/// Multiplies gradients by `inv_scale` in place, and sets `found_inf` to 1 if a gradient is infinite or NaN. `inv_scale` and
/// `found_inf` are tensors of one element (PyTorch's `torch._amp_foreach_non_finite_check_and_unscale_`).
///
/// ```
/// use claystone::{Device, Tensor};
/// use claystone_capi::steps::unscale_;
/// let (g, found) = (Tensor::full(2, 8, Device::Cpu)?.to_dtype(claystone::DType::F32)?, Tensor::zeros((), Device::Cpu)?);
/// unscale_(&[&g], &found, &Tensor::full((), 0.25, Device::Cpu)?)?;
/// assert_eq!((g.to_vec::<f32>()?[0], found.item::<f32>()?), (2.0, 0.0));
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// # Errors
/// The errors of [`map_each`].
#[track_caller]
pub fn unscale_(gradients: &[&Tensor], found_inf: &Tensor, inv_scale: &Tensor) -> Result<()> {
    if gradients.is_empty() {
        return Ok(());
    }
    no_grad(|| {
        let wide = gradients.iter().any(|g| g.dtype() == DType::F64);
        let dtype = if wide { DType::F64 } else { DType::F32 };
        let non_empty = gradients.iter().filter(|g| g.numel() > 0);
        let greatest = non_empty.map(|g| g.vector_norm(f64::INFINITY, (), false)?.to_dtype(dtype));
        // One launch reads several norms directly; stacking the norms into one tensor would copy each norm.
        for some in greatest.collect::<Result<Vec<_>>>()?.chunks(NORMS_PER_LAUNCH) {
            let inputs: Vec<&Tensor> = std::iter::once(found_inf).chain(some).collect();
            Tensor::map_into(&inputs, &[], &[found_inf], |x, _| {
                let finite = x[1..].iter().map(Expr::is_finite).reduce(|a, b| a * b).expect("chunks are not empty");
                vec![finite.select(&x[0], 1.0)]
            })?;
        }
        foreach_into("mul", &[gradients, &[&inv_scale.reshape(())?]], &[], gradients)
    })
}

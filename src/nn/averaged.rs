//! Averages of a module's weights over training steps.

use super::{Buffer, Module, Role};
use crate::internal::for_each_part;
use crate::storage::Caller;
use crate::{DType, Device, Result, Scalar, Tensor, no_grad};

/// A module whose parameters are averages of another module's parameters over time (PyTorch's
/// `torch.optim.swa_utils.AveragedModel`). Call [`AveragedModel::update_parameters`] after each optimiser step, and evaluate the average.
/// The state dict has PyTorch's names, `n_averaged` and `module.fc.weight`, so [`crate::io::save_checkpoint`] can save it.
///
/// ```
/// use claystone::nn::{AveragedModel, Linear, Module};
/// use claystone::{Device, Tensor};
/// let net = Linear::new(3, 2, Device::Cpu)?;
/// let ema = AveragedModel::ema(Linear::new(3, 2, Device::Cpu)?, 0.9)?; // its own weights do not matter
/// for weight in [1.0, 2.0] {
///     net.weight().detach().fill_(weight)?; // a step of the optimiser
///     ema.update_parameters(&net)?;
/// }
/// assert!((ema.module().weight().mean((), false)?.item::<f32>()? - 1.1).abs() < 1e-6);
/// let names: Vec<String> = ema.state_dict().names().map(String::from).collect();
/// assert_eq!(names, ["n_averaged", "module.weight", "module.bias"]);
/// # Ok::<(), claystone::Error>(())
/// ```
pub struct AveragedModel<M> {
    n_averaged: Buffer,
    module: M,
    /// The decay of an exponential moving average. `None` if the average is the mean of the weights at all updates.
    decay: Option<f64>,
}

impl<M: Module> AveragedModel<M> {
    /// Creates an exponential moving average: each update computes `decay * average + (1 - decay) * parameter` (PyTorch's
    /// `get_ema_multi_avg_fn(decay)`, default 0.999). `module` has the architecture of the trained module and will hold the average. It may
    /// be on another device. If the trained module is in half precision, make `module` f32, or small changes are lost. Fails with
    /// [`crate::Error::Invalid`] for a decay outside `0.0..=1.0`.
    #[track_caller]
    pub fn ema(module: M, decay: f64) -> Result<AveragedModel<M>> {
        invalid!("AveragedModel::ema" if !(0.0..=1.0).contains(&decay), "the decay {decay} is not in 0.0..=1.0");
        AveragedModel::new(module, Some(decay))
    }

    /// Creates an average that is the mean of the weights at all updates: stochastic weight averaging (Izmailov et al., "Averaging Weights
    /// Leads to Wider Optima and Better Generalization"). `module` has the architecture of the trained module, as in [`AveragedModel::ema`].
    #[track_caller]
    pub fn swa(module: M) -> Result<AveragedModel<M>> {
        AveragedModel::new(module, None)
    }

    #[track_caller]
    fn new(module: M, decay: Option<f64>) -> Result<AveragedModel<M>> {
        let _caller = Caller::enter();
        let device = module.parameters().first().map_or_else(Device::default, |p| p.device());
        Ok(AveragedModel { n_averaged: Buffer(Tensor::zeros((), (DType::I64, device))?), module, decay })
    }

    /// Returns the module with the averaged weights.
    pub fn module(&self) -> &M {
        &self.module
    }

    /// Updates the average with the parameters of `model`, and copies the buffers of `model`. The first update copies the parameters.
    /// Updating a parameter takes one launch. The host does not wait for the device. Fails with [`crate::Error::Invalid`] for a tensor that
    /// only one of the modules has, or whose shape differs, and with [`crate::Error::Partial`] if the device fails after some tensors were
    /// updated.
    pub fn update_parameters(&self, model: &M) -> Result<()> {
        let op = "AveragedModel::update_parameters";
        let (own, others) = (named_tensors(&self.module), named_tensors(model));
        let describe = |t: Option<&NamedTensor>| match t {
            Some((name, _, t)) => format!("{name} of shape {}", t.shape()),
            None => "no more tensors".to_string(),
        };
        for i in 0..own.len().max(others.len()) {
            let (average, model) = (describe(own.get(i)), describe(others.get(i)));
            invalid!(op if average != model,
                "the average has {average} where the model has {model}: give both the same architecture");
        }
        no_grad(|| {
            for_each_part(op, own.iter().zip(&others), |((_, role, average), (.., other))| {
                let other = other.detach().to_device(average.device())?;
                match role {
                    Role::Parameter => self.update_average(average, &other),
                    Role::Buffer => average.copy_(&other.to_dtype(average.dtype())?).map(|_| ()),
                }
            })?;
            self.n_averaged.0.add_scalar_(1).map(|_| ())
        })
    }

    /// Updates one parameter. The update count is in device memory, so the kernel's formula itself detects the first update.
    fn update_average(&self, average: &Tensor, other: &Tensor) -> Result<()> {
        let n = self.n_averaged.0.to_device(average.device())?;
        let weight: &[Scalar] = &[Scalar::Float(1.0 - self.decay.unwrap_or(0.0))];
        Tensor::map_into(&[average, other, &n], &weight[..self.decay.iter().len()], &[average], |x, s| {
            let weight = s.first().cloned().unwrap_or_else(|| 1.0 / (&x[2] + 1.0));
            vec![x[2].lt(0.5).select(x[1].clone(), x[0].lerp(&x[1], weight))]
        })
    }
}

/// A tensor of a module, with its name and role.
type NamedTensor<'a> = (String, Role, &'a Tensor);

fn named_tensors<M: Module>(module: &M) -> Vec<NamedTensor<'_>> {
    let mut all = Vec::new();
    module.visit("", &mut |name, role, t| all.push((name, role, t)));
    all
}

impl<M: Module> Module for AveragedModel<M> {
    crate::parts!(n_averaged, module);

    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.module.forward(x)
    }
}

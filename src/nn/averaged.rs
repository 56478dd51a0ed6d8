//! A module whose weights are averages of another's.

use super::{Buffer, Module, Role};
use crate::storage::Caller;
use crate::{DType, Device, Error, Result, Scalar, Tensor, for_each_part, no_grad};

/// A module whose parameters are averages of those that another has had (PyTorch's `torch.optim.swa_utils.AveragedModel`): call
/// [`AveragedModel::update_parameters`] after each step of the optimiser, and evaluate the average. Its state dict has PyTorch's
/// names, `n_averaged` and `module.fc.weight`, so that it is a part of [`crate::io::save_checkpoint`].
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
    /// Of an exponential moving average; all weights count alike without it.
    decay: Option<f64>,
}

impl<M: Module> AveragedModel<M> {
    /// An exponential moving average: each update is `decay * average + (1 - decay) * parameter` (PyTorch's
    /// `get_ema_multi_avg_fn(decay)`, whose default is 0.999). `module` is made like the one that is trained and becomes the
    /// average; it may be on another device, and in f32 where the other is in half precision, whose small changes would be lost.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a decay that is not in `0.0..=1.0`; [`Error::OutOfMemory`].
    #[track_caller]
    pub fn ema(module: M, decay: f64) -> Result<AveragedModel<M>> {
        if !(0.0..=1.0).contains(&decay) {
            return Err(Error::invalid("AveragedModel::ema", format!("the decay {decay} is not in 0.0..=1.0")));
        }
        AveragedModel::new(module, Some(decay))
    }

    /// The mean of the weights at all updates: stochastic weight averaging (Izmailov et al., "Averaging Weights Leads to Wider
    /// Optima and Better Generalization"). `module` is as for [`AveragedModel::ema`].
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
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

    /// The average.
    pub fn module(&self) -> &M {
        &self.module
    }

    /// Takes the parameters of `model` into the average, and copies its buffers. The first ones are copied. A launch for each
    /// parameter, no wait.
    ///
    /// # Errors
    /// [`Error::Invalid`] with the name of a tensor that only one of the two has, or in another shape;
    /// [`Error::Partial`] where the device fails after some were updated.
    pub fn update_parameters(&self, model: &M) -> Result<()> {
        let op = "AveragedModel::update_parameters";
        let (own, others) = (tensors(&self.module), tensors(model));
        let describe = |t: Option<&Named>| match t {
            Some((name, _, t)) => format!("{name} of shape {}", t.shape()),
            None => "no more tensors".to_string(),
        };
        for i in 0..own.len().max(others.len()) {
            let (average, model) = (describe(own.get(i)), describe(others.get(i)));
            if average != model {
                let reason = format!("the average has {average} where the model has {model}: make both alike");
                return Err(Error::invalid(op, reason));
            }
        }
        no_grad(|| {
            for_each_part(op, own.iter().zip(&others), |((_, role, average), (.., other))| {
                let other = other.detach().to_device(average.device())?;
                match role {
                    Role::Parameter => self.average(average, &other),
                    Role::Buffer => average.copy_(&other.to_dtype(average.dtype())?).map(|_| ()),
                }
            })?;
            self.n_averaged.0.add_scalar_(1).map(|_| ())
        })
    }

    /// The number of updates stays on the device, and so the formula tells the first one.
    fn average(&self, average: &Tensor, other: &Tensor) -> Result<()> {
        let n = self.n_averaged.0.to_device(average.device())?;
        let weight: &[Scalar] = &[Scalar::Float(1.0 - self.decay.unwrap_or(0.0))];
        Tensor::map_into(&[average, other, &n], &weight[..self.decay.iter().len()], &[average], |x, s| {
            let weight = s.first().cloned().unwrap_or_else(|| 1.0 / (&x[2] + 1.0));
            vec![x[2].lt(0.5).select(x[1].clone(), x[0].lerp(&x[1], weight))]
        })
    }
}

type Named<'a> = (String, Role, &'a Tensor);

fn tensors<M: Module>(module: &M) -> Vec<Named<'_>> {
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

//! Normalisation layers.

use std::sync::{Arc, Mutex};

use super::{Buffer, Mode, Module};
use crate::internal::{in_steps, lock};
use crate::storage::Caller;
use crate::tensor::TensorOptions;
use crate::{BatchNormOptions, DType, Result, Tensor, no_grad};

fn ones(n: &[usize], options: TensorOptions) -> Result<Tensor> {
    Tensor::ones(n, options)?.requires_grad_(true)
}

fn zeros(n: &[usize], options: TensorOptions) -> Result<Tensor> {
    Tensor::zeros(n, options)?.requires_grad_(true)
}

/// Applies [`Tensor::batch_norm`] with a weight, a bias and running statistics for each channel of `[N, C, ..]` (PyTorch's
/// `nn.BatchNorm1d`, `nn.BatchNorm2d` and `nn.BatchNorm3d`).
///
/// ```
/// use claystone::{Device, Tensor, nn::{BatchNorm2d, Module}};
/// let norm = BatchNorm2d::new(3, Device::Cpu)?;
/// let x = Tensor::randn(&[8, 3, 4, 4], Device::Cpu)?.add_scalar(5)?;
/// assert!(norm.forward(&x)?.mean((), false)?.item::<f32>()?.abs() < 1e-5);
/// norm.eval(); // the running mean has come a tenth of the way
/// assert!(norm.forward(&x)?.mean((), false)?.item::<f32>()? > 4.0);
/// # Ok::<(), claystone::Error>(())
/// ```
pub struct BatchNorm {
    weight: Tensor,
    bias: Tensor,
    running_mean: Buffer,
    running_var: Buffer,
    num_batches_tracked: Buffer,
    mode: Mode,
    momentum: f64,
    eps: f64,
    /// A function that replaces [`Tensor::batch_norm`] in training. `None` by default.
    training_forward: Arc<Mutex<Option<Arc<BatchNormFn>>>>,
}

/// A function that replaces [`Tensor::batch_norm`] in training.
pub(crate) type BatchNormFn = dyn Fn(&Tensor, BatchNormOptions) -> Result<Tensor> + Send + Sync;

/// [`BatchNorm`] under PyTorch's name for `[N, C]` and `[N, C, L]`.
pub type BatchNorm1d = BatchNorm;
/// [`BatchNorm`] under PyTorch's name for `[N, C, H, W]`.
pub type BatchNorm2d = BatchNorm;
/// [`BatchNorm`] under PyTorch's name for `[N, C, D, H, W]`.
pub type BatchNorm3d = BatchNorm;

impl BatchNorm {
    /// Creates a layer for `channels` channels, with a momentum of 0.1 and an `eps` of 1e-5.
    #[track_caller]
    pub fn new(channels: usize, options: impl Into<TensorOptions>) -> Result<BatchNorm> {
        let _caller = Caller::enter();
        let options = options.into();
        Ok(BatchNorm {
            weight: ones(&[channels], options)?,
            bias: zeros(&[channels], options)?,
            running_mean: Buffer(Tensor::zeros(channels, options)?),
            running_var: Buffer(Tensor::ones(channels, options)?),
            num_batches_tracked: Buffer(Tensor::zeros((), (DType::I64, options.device))?),
            mode: Mode::default(),
            momentum: 0.1,
            eps: 1e-5,
            training_forward: Arc::default(),
        })
    }

    /// Replaces [`Tensor::batch_norm`] in training by `f`, for example by a function that reduces the statistics over all ranks.
    pub(crate) fn set_training_forward(&self, f: Arc<BatchNormFn>) {
        *lock(&self.training_forward) = Some(f);
    }

    /// Returns the weight, `[channels]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Returns the bias, `[channels]`.
    pub fn bias(&self) -> &Tensor {
        &self.bias
    }

    /// Returns the running mean, `[channels]`.
    pub fn running_mean(&self) -> &Tensor {
        &self.running_mean.0
    }

    /// Returns the running variance, `[channels]`.
    pub fn running_var(&self) -> &Tensor {
        &self.running_var.0
    }

    /// Sets the momentum, the weight of a batch's statistics in the update of the running statistics.
    pub fn with_momentum(self, momentum: f64) -> BatchNorm {
        BatchNorm { momentum, ..self }
    }

    /// Sets the number that is added to the variance.
    pub fn with_eps(self, eps: f64) -> BatchNorm {
        BatchNorm { eps, ..self }
    }
}

impl Module for BatchNorm {
    crate::parts!(weight, bias, running_mean, running_var, num_batches_tracked, mode; training_forward);

    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let _caller = Caller::enter();
        let training = self.mode.is_training();
        let (mean, var) = (&self.running_mean.0, &self.running_var.0);
        let version = || mean.storage().version() + var.storage().version();
        let options = BatchNormOptions {
            running_mean: Some(mean),
            running_var: Some(var),
            weight: Some(&self.weight),
            bias: Some(&self.bias),
            training,
            momentum: self.momentum,
            eps: self.eps,
        };
        let training_forward = lock(&self.training_forward).clone();
        in_steps("BatchNorm::forward", version, || {
            let out = match training_forward.filter(|_| training) {
                Some(f) => f(x, options)?,
                None => x.batch_norm(options)?,
            };
            if training {
                self.num_batches_tracked.0.add_scalar_(1)?;
            }
            Ok(out)
        })
    }
}

/// Applies [`Tensor::instance_norm`] to `[N, C, ..]` (PyTorch's `nn.InstanceNorm1d`, `nn.InstanceNorm2d` and `nn.InstanceNorm3d`).
/// By default it has no parameters and no running statistics.
///
/// ```
/// use claystone::{Device, Tensor, nn::{InstanceNorm2d, Module}};
/// let norm = InstanceNorm2d::new(3, Device::Cpu).with_affine()?;
/// let y = norm.forward(&Tensor::randn(&[8, 3, 4, 4], Device::Cpu)?)?;
/// assert!(y.mean([2, 3], false)?.abs()?.amax((), false)?.item::<f32>()? < 1e-5);
/// assert_eq!(norm.parameters().len(), 2);
/// # Ok::<(), claystone::Error>(())
/// ```
pub struct InstanceNorm {
    weight: Option<Tensor>,
    bias: Option<Tensor>,
    running_mean: Option<Buffer>,
    running_var: Option<Buffer>,
    /// A buffer that is saved for compatibility with PyTorch. PyTorch does not update it either.
    num_batches_tracked: Option<Buffer>,
    mode: Mode,
    channels: usize,
    options: TensorOptions,
    momentum: f64,
    eps: f64,
}

/// [`InstanceNorm`] under PyTorch's name for `[N, C, L]`.
pub type InstanceNorm1d = InstanceNorm;
/// [`InstanceNorm`] under PyTorch's name for `[N, C, H, W]`.
pub type InstanceNorm2d = InstanceNorm;
/// [`InstanceNorm`] under PyTorch's name for `[N, C, D, H, W]`.
pub type InstanceNorm3d = InstanceNorm;

impl InstanceNorm {
    /// Creates a layer for `channels` channels, with a momentum of 0.1 and an `eps` of 1e-5.
    pub fn new(channels: usize, options: impl Into<TensorOptions>) -> InstanceNorm {
        InstanceNorm {
            weight: None,
            bias: None,
            running_mean: None,
            running_var: None,
            num_batches_tracked: None,
            mode: Mode::default(),
            channels,
            options: options.into(),
            momentum: 0.1,
            eps: 1e-5,
        }
    }

    /// Adds a trained weight and bias for each channel (PyTorch's `affine`).
    #[track_caller]
    pub fn with_affine(self) -> Result<InstanceNorm> {
        let _caller = Caller::enter();
        let (weight, bias) = (ones(&[self.channels], self.options)?, zeros(&[self.channels], self.options)?);
        Ok(InstanceNorm { weight: Some(weight), bias: Some(bias), ..self })
    }

    /// Adds running statistics (PyTorch's `track_running_stats`). Training updates them with the statistics averaged over the batch, and
    /// evaluation normalises with them.
    #[track_caller]
    pub fn with_running_stats(self) -> Result<InstanceNorm> {
        let _caller = Caller::enter();
        Ok(InstanceNorm {
            running_mean: Some(Buffer(Tensor::zeros(self.channels, self.options)?)),
            running_var: Some(Buffer(Tensor::ones(self.channels, self.options)?)),
            num_batches_tracked: Some(Buffer(Tensor::zeros((), (DType::I64, self.options.device))?)),
            ..self
        })
    }

    /// Returns the weight, `[channels]`. `None` without [`with_affine`](InstanceNorm::with_affine).
    pub fn weight(&self) -> Option<&Tensor> {
        self.weight.as_ref()
    }

    /// Returns the bias, `[channels]`. `None` without [`with_affine`](InstanceNorm::with_affine).
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// Sets the momentum, the weight of a batch's statistics in the update of the running statistics.
    pub fn with_momentum(self, momentum: f64) -> InstanceNorm {
        InstanceNorm { momentum, ..self }
    }

    /// Sets the number that is added to the variance.
    pub fn with_eps(self, eps: f64) -> InstanceNorm {
        InstanceNorm { eps, ..self }
    }
}

impl Module for InstanceNorm {
    crate::parts!(weight, bias, running_mean, running_var, num_batches_tracked, mode);

    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let _caller = Caller::enter();
        let (weight, bias) = (self.weight.as_ref(), self.bias.as_ref());
        let (Some(Buffer(mean)), Some(Buffer(var))) = (&self.running_mean, &self.running_var) else {
            return x.instance_norm(weight, bias, self.eps);
        };
        if !self.mode.is_training() {
            let (running_mean, running_var, eps) = (Some(mean), Some(var), self.eps);
            let options = BatchNormOptions { running_mean, running_var, weight, bias, eps, ..Default::default() };
            return x.batch_norm(options);
        }
        let version = || mean.storage().version() + var.storage().version();
        in_steps("InstanceNorm::forward", version, || {
            let out = x.instance_norm(weight, bias, self.eps)?;
            no_grad(|| {
                let spatial: Vec<isize> = (2..x.rank() as isize).collect();
                let (of_var, of_mean) = x.var_mean(spatial.as_slice(), 1, false)?;
                mean.lerp_(&of_mean.mean(0, false)?.to_dtype(mean.dtype())?, self.momentum)?;
                var.lerp_(&of_var.mean(0, false)?.to_dtype(var.dtype())?, self.momentum)
            })?;
            Ok(out)
        })
    }
}

/// Applies [`Tensor::layer_norm`] with a weight and a bias of the normalised shape (PyTorch's `nn.LayerNorm`).
pub struct LayerNorm {
    weight: Tensor,
    bias: Option<Tensor>,
    shape: Vec<usize>,
    eps: f64,
}

impl LayerNorm {
    /// Creates a layer that normalises over the last dims. `shape` has their sizes. The `eps` is 1e-5.
    #[track_caller]
    pub fn new(shape: &[usize], options: impl Into<TensorOptions>) -> Result<LayerNorm> {
        let _caller = Caller::enter();
        let options = options.into();
        let (weight, bias) = (ones(shape, options)?, Some(zeros(shape, options)?));
        Ok(LayerNorm { weight, bias, shape: shape.to_vec(), eps: 1e-5 })
    }

    /// Returns the weight. It has the normalised shape.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Returns the bias, which has the normalised shape; `None` without a bias.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// Removes the bias.
    pub fn without_bias(self) -> LayerNorm {
        LayerNorm { bias: None, ..self }
    }

    /// Sets the number that is added to the variance.
    pub fn with_eps(self, eps: f64) -> LayerNorm {
        LayerNorm { eps, ..self }
    }
}

impl Module for LayerNorm {
    crate::parts!(weight, bias; shape);

    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.layer_norm(&self.shape, Some(&self.weight), self.bias.as_ref(), self.eps)
    }
}

/// Applies [`Tensor::group_norm`] with a weight and a bias for each channel (PyTorch's `nn.GroupNorm`).
pub struct GroupNorm {
    weight: Tensor,
    bias: Tensor,
    groups: usize,
    eps: f64,
}

impl GroupNorm {
    /// Creates a layer for `channels` channels in `groups` groups, with an `eps` of 1e-5.
    #[track_caller]
    pub fn new(groups: usize, channels: usize, options: impl Into<TensorOptions>) -> Result<GroupNorm> {
        let _caller = Caller::enter();
        let options = options.into();
        Ok(GroupNorm { weight: ones(&[channels], options)?, bias: zeros(&[channels], options)?, groups, eps: 1e-5 })
    }

    /// Returns the weight, `[channels]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Returns the bias, `[channels]`.
    pub fn bias(&self) -> &Tensor {
        &self.bias
    }

    /// Sets the number that is added to the variance.
    pub fn with_eps(self, eps: f64) -> GroupNorm {
        GroupNorm { eps, ..self }
    }
}

impl Module for GroupNorm {
    crate::parts!(weight, bias);

    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.group_norm(self.groups, Some(&self.weight), Some(&self.bias), self.eps)
    }
}

/// Applies [`Tensor::rms_norm`] with a weight of the normalised shape (PyTorch's `nn.RMSNorm`).
pub struct RmsNorm {
    weight: Tensor,
    shape: Vec<usize>,
    eps: Option<f64>,
}

impl RmsNorm {
    /// Creates a layer that normalises over the last dims. `shape` has their sizes. The `eps` is the machine epsilon of the dtype.
    #[track_caller]
    pub fn new(shape: &[usize], options: impl Into<TensorOptions>) -> Result<RmsNorm> {
        let _caller = Caller::enter();
        Ok(RmsNorm { weight: ones(shape, options.into())?, shape: shape.to_vec(), eps: None })
    }

    /// Returns the weight. It has the normalised shape.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Sets the number that is added to the mean square.
    pub fn with_eps(self, eps: f64) -> RmsNorm {
        RmsNorm { eps: Some(eps), ..self }
    }
}

impl Module for RmsNorm {
    crate::parts!(weight; shape);

    #[track_caller]
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        x.rms_norm(&self.shape, Some(&self.weight), self.eps)
    }
}

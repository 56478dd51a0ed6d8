//! Batch normalisation with the statistics of all ranks' batches.

use std::sync::{Arc, OnceLock};

use super::{Group, ReduceOp};
use crate::autograd::{CustomOp, OpContext};
use crate::nn::{BatchNorm, Module, Role};
use crate::tensor::TensorOptions;
use crate::{BatchNormOptions, DType, Device, Expr, Result, Scalar, Shape, Tensor};

/// A [`BatchNorm`] that in training uses the mean and variance of the batches of all ranks together (PyTorch's
/// `torch.nn.SyncBatchNorm`), for `[N, C, ..]`. Ranks may have batches of different sizes. Parameters have the same names as in
/// [`BatchNorm`], so both can load the same checkpoints. Evaluation is the same as in [`BatchNorm`].
///
/// Forward and backward exchange a few numbers per channel, so all ranks must run the same layers in order. No gradients of gradients.
///
/// ```
/// use claystone::distributed::{Group, SyncBatchNorm};
/// use claystone::nn::Module;
/// use claystone::{Device, Tensor};
/// std::thread::scope(|scope| {
///     for group in Group::threads(&[Device::Cpu, Device::Cpu])? {
///         scope.spawn(move || -> claystone::Result<()> {
///             let norm = SyncBatchNorm::new(3, group.device(), &group)?;
///             let x = Tensor::full([4, 3], group.rank() as f32, group.device())?; // 0 here, 1 there: the mean is 0.5
///             let sign = if group.rank() == 0 { -1.0 } else { 1.0 };
///             assert!((norm.forward(&x)?.mean((), false)?.item::<f32>()? - sign).abs() < 1e-4);
///             Ok(())
///         });
///     }
///     Ok::<(), claystone::Error>(())
/// })?;
/// # Ok::<(), claystone::Error>(())
/// ```
pub struct SyncBatchNorm(BatchNorm);

impl SyncBatchNorm {
    /// Creates a layer for `channels` channels, with a momentum of 0.1 and an `eps` of 1e-5. Fails as [`BatchNorm::new`] does.
    pub fn new(channels: usize, options: impl Into<TensorOptions>, group: &Group) -> Result<SyncBatchNorm> {
        let norm = BatchNorm::new(channels, options)?;
        SyncBatchNorm::convert_sync_batchnorm(&norm, group);
        Ok(SyncBatchNorm(norm))
    }

    /// Sets the momentum, the weight of a batch's statistics in the update of the running statistics.
    pub fn with_momentum(self, momentum: f64) -> SyncBatchNorm {
        SyncBatchNorm(self.0.with_momentum(momentum))
    }

    /// Sets the number that is added to the variance.
    pub fn with_eps(self, eps: f64) -> SyncBatchNorm {
        SyncBatchNorm(self.0.with_eps(eps))
    }

    /// Makes every [`BatchNorm`] of a module use the statistics of all ranks. Returns the number of converted layers. Converts
    /// the layers that [`Module::named_modules`] lists, and the module itself. Call it before or after
    /// [`DataParallel`](super::DataParallel) wraps the module.
    ///
    /// ```
    /// use claystone::distributed::{Group, SyncBatchNorm};
    /// use claystone::nn::{BatchNorm2d, Linear, Sequential};
    /// use claystone::Device;
    /// # let group = &Group::threads(&[Device::Cpu])?[0];
    /// let net = Sequential::new().push(BatchNorm2d::new(3, Device::Cpu)?).push(Linear::new(4, 4, Device::Cpu)?);
    /// assert_eq!(SyncBatchNorm::convert_sync_batchnorm(&net, group), 1);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn convert_sync_batchnorm(module: &dyn Module, group: &Group) -> usize {
        let group = group.clone();
        let normalise = Arc::new(move |x: &Tensor, options: BatchNormOptions| batch_norm(&group, x, options));
        let inside = module.named_modules("").into_iter().filter_map(|(_, m)| as_batch_norm(m));
        let found: Vec<&BatchNorm> = as_batch_norm(module).into_iter().chain(inside).collect();
        found.iter().for_each(|norm| norm.set_training_forward(normalise.clone()));
        found.len()
    }
}

/// Returns the batch norm if `module` is one: directly, in a box, or already converted.
fn as_batch_norm(module: &dyn Module) -> Option<&BatchNorm> {
    let any = module.as_any();
    let boxed = || any.downcast_ref::<Box<BatchNorm>>().map(|norm| &**norm);
    let boxed_sync = || any.downcast_ref::<Box<SyncBatchNorm>>().map(|norm| &norm.0);
    let converted = || any.downcast_ref::<SyncBatchNorm>().map(|norm| &norm.0).or_else(boxed_sync);
    let inside = || any.downcast_ref::<Box<dyn Module>>().and_then(|module| as_batch_norm(&**module));
    any.downcast_ref().or_else(boxed).or_else(converted).or_else(inside)
}

impl Module for SyncBatchNorm {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.0.forward(x)
    }

    fn visit<'a>(&'a self, prefix: &str, visitor: &mut dyn FnMut(String, Role, &'a Tensor)) {
        self.0.visit(prefix, visitor);
    }

    fn visit_mut<'a>(&'a mut self, prefix: &str, visitor: &mut dyn FnMut(String, Role, &'a mut Tensor)) {
        self.0.visit_mut(prefix, visitor);
    }

    fn set_training(&self, training: bool) {
        self.0.set_training(training);
    }

    fn shallow_clone(&self) -> SyncBatchNorm {
        SyncBatchNorm(self.0.shallow_clone())
    }
}

const OP: &str = "SyncBatchNorm";

/// Computes [`Tensor::batch_norm`] in training mode, with the statistics of all ranks.
fn batch_norm(group: &Group, x: &Tensor, options: BatchNormOptions) -> Result<Tensor> {
    let BatchNormOptions { running_mean, running_var, weight, bias, momentum, eps, .. } = options;
    let (Some(weight), Some(bias)) = (weight, bias) else { invalid!(OP, "it needs a weight and a bias") };
    x.dtype().check_float(OP)?;
    invalid!(OP if x.shape().dims().get(1) != Some(&weight.numel()),
        "shape {} is not [N, {}, ..]: the number of channels differs", x.shape(), weight.numel());
    let running = [running_mean, running_var].map(|t| t.map(Tensor::shallow_clone));
    let (group, elements) = (group.clone(), OnceLock::new());
    Tensor::apply_op(Normalise { group, running, momentum, eps, elements }, &[x, weight, bias])
}

/// The custom operation for one forward pass and its backward pass.
struct Normalise {
    group: Group,
    running: [Option<Tensor>; 2],
    momentum: f64,
    eps: f64,
    /// The number of elements per channel, over all ranks.
    elements: OnceLock<f64>,
}

/// Copies rows, which have one number per channel, to the host as f64. All ranks then compute the same statistics from them.
fn to_host(rows: &[&Tensor]) -> Result<Vec<f64>> {
    Tensor::stack(rows, 0)?.to_device(Device::HOST)?.to_dtype(DType::F64)?.to_vec()
}

/// Copies rows, which have one number per channel, to the device of `x`, in the compute dtype of `x`.
fn from_host(rows: &[Vec<f64>], x: &Tensor) -> Result<Vec<Tensor>> {
    let all = Tensor::from_slice(&rows.concat(), [rows.len(), rows[0].len()], Device::HOST)?;
    let all = all.to_dtype(compute_dtype(x))?.to_device(x.device())?;
    (0..rows.len()).map(|row| all.select(0, row as isize)).collect()
}

/// Returns the dtype to compute in: f32 for f16 and bf16, otherwise the dtype of `x`.
fn compute_dtype(x: &Tensor) -> DType {
    if x.dtype().size() < 4 { DType::F32 } else { x.dtype() }
}

/// Returns the dims over which statistics are computed: all dims except the channel dim.
fn reduced_dims(x: &Tensor) -> Vec<isize> {
    (0..x.rank() as isize).filter(|&d| d != 1).collect()
}

impl Normalise {
    /// Computes the mean and variance over the elements of all ranks, from the statistics of each rank.
    fn statistics(&self, x: &Tensor) -> Result<[Vec<f64>; 2]> {
        let channels = x.shape().dims()[1];
        let n = x.numel() / channels.max(1);
        let mut own = match n {
            0 => vec![0.0; 2 * channels],
            _ => {
                let (var, mean) = x.to_dtype(compute_dtype(x))?.var_mean(reduced_dims(x), 0, false)?;
                to_host(&[&mean, &var])?
            }
        };
        own.push(n as f64);
        let all = self.group.all_gather(&Tensor::from_slice(&own, own.len(), Device::HOST)?)?.to_vec::<f64>()?;
        let ranks = || all.chunks(own.len());
        let total: f64 = ranks().map(|rank| rank[2 * channels]).sum();
        invalid!(OP if total == 1.0, "all ranks together have one element per channel, which has no variance");
        let _ = self.elements.set(total);
        let mean_over = |f: &dyn Fn(&[f64]) -> f64| -> f64 {
            ranks().map(|rank| rank[2 * channels] * f(rank)).sum::<f64>() / total.max(1.0)
        };
        let means: Vec<f64> = (0..channels).map(|c| mean_over(&|rank| rank[c])).collect();
        let var = |c: usize| mean_over(&|rank| rank[channels + c] + (rank[c] - means[c]).powi(2));
        let vars = (0..channels).map(var).collect();
        Ok([means, vars])
    }

    fn elements(&self) -> f64 {
        *self.elements.get().expect("forward has run")
    }
}

impl CustomOp for Normalise {
    fn name(&self) -> &'static str {
        OP
    }

    fn forward(&self, ctx: &mut OpContext, inputs: &[&Tensor]) -> Result<Tensor> {
        let [x, weight, bias] = inputs[..] else { unreachable!("three inputs") };
        let [mean, var] = self.statistics(x)?;
        let n = self.elements();
        let unbiased = var.iter().map(|v| v * n / (n - 1.0)).collect();
        let rows = from_host(&[mean, var, unbiased], x)?;
        let out = x.batch_norm(BatchNormOptions {
            running_mean: Some(&rows[0]),
            running_var: Some(&rows[1]),
            weight: Some(weight),
            bias: Some(bias),
            eps: self.eps,
            ..Default::default()
        })?;
        for (running, row) in self.running.iter().zip([&rows[0], &rows[2]]).filter(|_| n > 0.0) {
            let Some(running) = running else { continue };
            let momentum = [Scalar::Float(self.momentum)];
            Tensor::map_into(&[running, row], &momentum, &[running], |x, s| vec![x[0].lerp(&x[1], s[0].clone())])?;
        }
        ctx.save_for_backward(&[x, weight, &rows[0], &rows[1]]);
        Ok(out)
    }

    /// For y = (x - mean) / std * weight + bias and the gradient g of y, the gradient of x is
    /// weight / std * (g - sum(g) / n - (x - mean) / var * sum(g * (x - mean)) / n). Sums are over the n elements of a channel on all ranks.
    fn backward(&self, ctx: &OpContext, grad: &Tensor) -> Result<Vec<Option<Tensor>>> {
        let saved = ctx.saved_tensors()?;
        let [x, weight, mean, var] = &saved[..] else { unreachable!("four tensors were kept") };
        let dtype = compute_dtype(x);
        let (wide, grad) = (x.to_dtype(dtype)?, grad.to_dtype(dtype)?);
        let shape: Shape = (0..x.rank()).map(|d| if d == 1 { weight.numel() } else { 1 }).collect();
        let column = |t: &Tensor| t.reshape(&shape);
        let mean = column(mean)?;
        let product = Tensor::map(&[&grad, &wide, &mean], |e| &e[0] * (&e[1] - &e[2]))?;
        let (sums, products) = (grad.sum(reduced_dims(x), false)?, product.sum(reduced_dims(x), false)?);
        let scale = var.add_scalar(self.eps)?.rsqrt()?;
        let grad_weight =
            ctx.needs_input_grad(1).then(|| products.mul(&scale)?.to_dtype(weight.dtype())).transpose()?;
        let grad_bias = ctx.needs_input_grad(2).then(|| sums.to_dtype(weight.dtype())).transpose()?;
        if !ctx.needs_input_grad(0) {
            return Ok(vec![None, grad_weight, grad_bias]);
        }
        let own = to_host(&[&sums, &products])?;
        let all = Tensor::from_slice(&own, own.len(), Device::HOST)?;
        self.group.all_reduce(&all, ReduceOp::Sum)?;
        let means: Vec<f64> = all.to_vec::<f64>()?.iter().map(|sum| sum / self.elements().max(1.0)).collect();
        let (mean_grad, mean_product) = means.split_at(weight.numel());
        let rows = from_host(&[mean_grad.to_vec(), mean_product.to_vec()], x)?;
        let (weight, scale) = (column(&weight.to_dtype(dtype)?)?, column(&scale)?);
        let inputs = [&grad, &wide, &mean, &scale, &weight, &column(&rows[0])?, &column(&rows[1])?];
        let grad_x = Tensor::map(&inputs, |e: &[Expr]| {
            &e[4] * &e[3] * (&e[0] - &e[5] - (&e[1] - &e[2]) * (&e[3] * &e[3]) * &e[6])
        })?;
        Ok(vec![Some(grad_x.to_dtype(x.dtype())?), grad_weight, grad_bias])
    }
}

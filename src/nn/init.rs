//! In-place initialisation of parameters (PyTorch's `torch.nn.init`). Autograd does not record it.

use crate::internal::in_steps;
use crate::tensor::TensorOptions;
use crate::{Error, Result, Scalar, Tensor, no_grad};

/// Whether the inputs or the outputs of a weight `[outputs, inputs, ..]` determine the scale of its elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Fan {
    /// The number of inputs of an output element (PyTorch's `fan_in`). It preserves the variance of values in the forward pass.
    #[default]
    In,
    /// The number of outputs that an input element contributes to (`fan_out`). It preserves the variance of gradients in the backward pass.
    Out,
}

fn fan_in_and_out(op: &'static str, t: &Tensor) -> Result<(f64, f64)> {
    match t.shape().dims() {
        [outputs, inputs, kernel @ ..] => {
            let taps = kernel.iter().product::<usize>() as f64;
            Ok((*inputs as f64 * taps, *outputs as f64 * taps))
        }
        _ => Err(Error::invalid(op, format!("a weight has at least two dims, not shape {}", t.shape()))),
    }
}

/// Sets all elements to `value` (`constant_`). Fails as [`Tensor::fill_`] does.
pub fn constant_(t: &Tensor, value: impl Into<Scalar>) -> Result<()> {
    no_grad(|| t.fill_(value).map(|_| ()))
}

/// Fills the tensor from the uniform distribution on `low..high` (`uniform_`). Fails as [`Tensor::uniform_`] does.
pub fn uniform_(t: &Tensor, low: f64, high: f64) -> Result<()> {
    no_grad(|| t.uniform_(low, high).map(drop))
}

/// Fills the tensor from the normal distribution with this mean and standard deviation (`normal_`). Fails as [`uniform_`] does.
pub fn normal_(t: &Tensor, mean: f64, std: f64) -> Result<()> {
    let (random, numbers) = (Tensor::randn(t.shape(), t)?, [std, mean].map(Scalar::Float));
    no_grad(|| Tensor::map_into(&[&random], &numbers, &[t], |x, s| vec![&x[0] * &s[0] + &s[1]]))
}

/// Fills the tensor from this normal distribution, and draws elements outside `low..=high` again (`trunc_normal_`). Fails as [`uniform_`]
/// does, with [`Error::Invalid`] if less than a thousandth of the distribution is within the bounds, and with [`Error::Partial`] if the
/// device fails after the first draw.
pub fn trunc_normal_(t: &Tensor, mean: f64, std: f64, low: f64, high: f64) -> Result<()> {
    let op = "trunc_normal_";
    let cdf = |x: f64| 0.5 * libm::erfc(-(x - mean) / (std * std::f64::consts::SQRT_2));
    let probability_inside = cdf(high) - cdf(low);
    invalid!(op if probability_inside.is_nan() || probability_inside < 1e-3,
        "{low}..={high} contains almost none of this distribution");
    // The number of rounds after which only about 1 element in 1e12 is still outside. Such elements are clamped.
    let rounds = ((1e-12f64).ln() / (1.0 - probability_inside).max(1e-12).ln()).ceil() as usize;
    let numbers = [mean, std, low, high].map(Scalar::Float);
    let draws = || {
        normal_(t, mean, std)?;
        for _ in 0..rounds {
            let random = Tensor::randn(t.shape(), t)?;
            Tensor::map_into(&[t, &random], &numbers, &[t], |x, s| {
                let out = x[0].lt(&s[2]).max(x[0].gt(&s[3]));
                vec![out.select(&x[1] * &s[1] + &s[0], &x[0])]
            })?;
        }
        t.clamp_(low, high).map(|_| ())
    };
    no_grad(|| in_steps(op, || t.storage().version(), draws))
}

/// Fills the tensor from a uniform distribution. Its variance keeps the variance of activations constant through a leaky ReLU of slope `a`
/// (a ReLU if `a` is 0; He et al.; `kaiming_uniform_`). Fails as [`uniform_`] does, and with [`Error::Invalid`] for fewer than two dims.
pub fn kaiming_uniform_(t: &Tensor, a: f64, fan: Fan) -> Result<()> {
    let bound = 3f64.sqrt() * kaiming_std("kaiming_uniform_", t, a, fan)?;
    uniform_(t, -bound, bound)
}

/// Does the same as [`kaiming_uniform_`], with a normal distribution of the same variance (`kaiming_normal_`). Fails as
/// [`kaiming_uniform_`] does.
pub fn kaiming_normal_(t: &Tensor, a: f64, fan: Fan) -> Result<()> {
    normal_(t, 0.0, kaiming_std("kaiming_normal_", t, a, fan)?)
}

fn kaiming_std(op: &'static str, t: &Tensor, a: f64, fan: Fan) -> Result<f64> {
    let (inputs, outputs) = fan_in_and_out(op, t)?;
    let n = if fan == Fan::In { inputs } else { outputs };
    Ok((2.0 / (1.0 + a * a)).sqrt() / n.max(1.0).sqrt())
}

/// Fills the tensor from the uniform distribution of variance `gain² * 2 / (fan_in + fan_out)` (Glorot and Bengio; `xavier_uniform_`).
/// Fails as [`kaiming_uniform_`] does.
pub fn xavier_uniform_(t: &Tensor, gain: f64) -> Result<()> {
    let (inputs, outputs) = fan_in_and_out("xavier_uniform_", t)?;
    let bound = gain * (6.0 / (inputs + outputs).max(1.0)).sqrt();
    uniform_(t, -bound, bound)
}

/// Does the same as [`xavier_uniform_`], with a normal distribution of the same variance (`xavier_normal_`). Fails as [`kaiming_uniform_`]
/// does.
pub fn xavier_normal_(t: &Tensor, gain: f64) -> Result<()> {
    let (inputs, outputs) = fan_in_and_out("xavier_normal_", t)?;
    normal_(t, 0.0, gain * (2.0 / (inputs + outputs).max(1.0)).sqrt())
}

/// Fills the tensor with `gain` times a uniformly distributed random matrix whose rows are orthonormal (whose columns are, if there are
/// fewer columns). All dims after the first are joined to columns (Saxe et al., 2013; `orthogonal_`). Computed on the host in f64. Fails as
/// [`kaiming_uniform_`] does.
///
/// ```
/// use claystone::{Device, Tensor, nn::init};
/// let t = Tensor::zeros([3, 2, 4], Device::Cpu)?;
/// init::orthogonal_(&t, 1.0)?;
/// let rows = t.flatten(1, 2)?;
/// let off = rows.matmul(&rows.t()?)?.sub(&Tensor::eye(3, Device::Cpu)?)?;
/// assert!(off.abs()?.amax((), false)?.item::<f32>()? < 1e-6);
/// # Ok::<(), claystone::Error>(())
/// ```
pub fn orthogonal_(t: &Tensor, gain: f64) -> Result<()> {
    let op = "orthogonal_";
    fan_in_and_out(op, t)?;
    let outputs = t.shape().dims()[0];
    let inputs = t.numel().checked_div(outputs).unwrap_or(0);
    let (count, length) = (outputs.min(inputs), outputs.max(inputs));
    let random = no_grad(|| Tensor::randn([count, length], t.device()))?;
    if random.is_uninit() {
        return no_grad(|| t.copy_(&random.reshape(t.shape())?).map(|_| ()));
    }
    let random = random.to_vec::<f32>()?;
    let mut vectors: Vec<Vec<f64>> =
        random.chunks(length.max(1)).map(|v| v.iter().map(|&x| x.into()).collect()).collect();
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    for i in 0..vectors.len() {
        let (before, after) = vectors.split_at_mut(i);
        let v = &mut after[0];
        // Gram-Schmidt runs twice: after one run, nearly dependent vectors are less orthogonal than rounding errors allow.
        for u in before.iter().chain(before.iter()) {
            let along = dot(u, v);
            v.iter_mut().zip(u).for_each(|(v, u)| *v -= along * u);
        }
        let norm = dot(v, v).sqrt();
        v.iter_mut().for_each(|v| *v /= norm);
    }
    let values = vectors.into_iter().flatten().map(|v| (gain * v) as f32).collect();
    no_grad(|| {
        let matrix = Tensor::from_vec(values, [count, length], t.device())?;
        let matrix = if outputs == count { matrix } else { matrix.t()? };
        t.copy_(&matrix.reshape(t.shape())?).map(|_| ())
    })
}

/// Creates a parameter with the default initialisation of layers: a uniform distribution on ±1/√fan.
pub(super) fn default_parameter(shape: &[usize], fan: usize, options: TensorOptions) -> Result<Tensor> {
    let bound = 1.0 / (fan.max(1) as f64).sqrt();
    let t = Tensor::rand(shape, options)?;
    Tensor::map_into(&[&t], &[bound.into()], &[&t], |x, s| vec![(&x[0] * 2.0 - 1.0) * &s[0]])?;
    t.requires_grad_(true)
}

//! Normalisation: rows brought to mean 0 and variance 1, or to a mean square of 1, with a factor and a shift.
//!
//! Layer, group, instance and batch norm are one operation on different rows. Each is a view of four dims, `[rows, inner rows,
//! outer, inner]`: a row is the last two, so that a channel of a whole batch is a row too and nothing is copied. Forward is
//! one launch; backward is one as well, and where a weight is not the same for a whole row a few more for its gradient.

use smallvec::SmallVec;

use super::arguments::Args;
use super::autocast::widened;
use super::catalogue::{Dtypes, Gives, Kind, Operation};
use super::conv::reshaped;
use super::elementwise::{Params, apply};
use super::expr::Expr;
use super::registry::{replaced, replacement};
use super::{reduce, same_device, same_dtype};
use crate::autograd::{self, Gradients, Saved};
use crate::tensor::{Dims, Layout};
use crate::{Device, Error, Result, Scalar, Shape, Tensor, no_grad};

mod cpu;
mod opencl;

/// What of [`Tensor::batch_norm`] is optional, with PyTorch's defaults.
#[derive(Debug, Clone, Copy)]
pub struct BatchNormOptions<'a> {
    /// The mean of each channel, used where not training, else moved towards the batch's.
    pub running_mean: Option<&'a Tensor>,
    /// The variance of each channel, likewise.
    pub running_var: Option<&'a Tensor>,
    /// A factor for each channel.
    pub weight: Option<&'a Tensor>,
    /// A shift for each channel.
    pub bias: Option<&'a Tensor>,
    /// Whether to use the batch's own mean and variance.
    pub training: bool,
    /// How far the running ones move towards the batch's.
    pub momentum: f64,
    /// Added to the variance.
    pub eps: f64,
}

impl Default for BatchNormOptions<'_> {
    fn default() -> Self {
        let (running_mean, running_var, weight, bias) = (None, None, None, None);
        BatchNormOptions { running_mean, running_var, weight, bias, training: false, momentum: 0.1, eps: 1e-5 }
    }
}

/// Tensors as four dims, of which the last two are normalised over.
struct Norm<'a> {
    op: &'static str,
    /// The four dims, and where each of a tensor of x's shape is in them: the strides of the view.
    view: &'a dyn Fn(&Tensor) -> Result<Tensor>,
    weight: Option<&'a Tensor>,
    bias: Option<&'a Tensor>,
    /// The strides' dims that a weight or bias has; the others repeat it.
    dims: [bool; 4],
    eps: f64,
    rms: bool,
}

/// One normalisation, checked: what a kernel reads and writes, all of four dims.
struct Rows<'a> {
    x: &'a Tensor,
    y: &'a Tensor,
    /// The forward's input, in backward.
    z: Option<&'a Tensor>,
    weight: Option<&'a Tensor>,
    bias: Option<&'a Tensor>,
    /// Of each row, in the compute type, contiguous.
    mean: &'a Tensor,
    var: &'a Tensor,
    /// In backward with one weight a row: `[2, rows]`.
    sums: Option<&'a Tensor>,
    eps: f64,
    rms: bool,
}

impl Rows<'_> {
    fn count(&self) -> usize {
        self.x.shape().dims()[..2].iter().product()
    }

    fn len(&self) -> usize {
        self.x.shape().dims()[2..].iter().product()
    }

    fn run(&self) -> Result<()> {
        match self.x.device() {
            Device::Cpu => cpu::run(self)?,
            Device::OpenCL(_) => opencl::run(self)?,
        }
        // Backward reads mean and variance.
        let statistics = [self.mean, self.var].into_iter().filter(|_| self.z.is_none());
        [self.y].into_iter().chain(self.sums).chain(statistics).for_each(|t| t.storage.bump_version());
        Ok(())
    }
}

/// `t` as four dims: of the view where `dims` says so, else repeated.
fn spread(t: &Tensor, shape: &Shape, dims: [bool; 4]) -> Result<Tensor> {
    let own: Shape = shape.dims().iter().zip(dims).map(|(&n, own)| if own { n } else { 1 }).collect();
    let t = reshaped(t, &own)?;
    Ok(t.with_layout(t.layout.broadcast_to(shape)))
}

impl Norm<'_> {
    /// The normalised x, and mean and variance of each row.
    fn forward(&self, x: &Tensor) -> Result<(Tensor, Tensor, Tensor)> {
        let out = Tensor::empty_like_shape(x.shape(), x.dtype, x.device())?;
        let (from, to) = ((self.view)(&x.detach())?, (self.view)(&out)?);
        let [r1, r2] = [from.shape().dims()[0], from.shape().dims()[1]];
        let made = || Tensor::empty_like_shape([r1, r2, 1, 1], x.dtype.compute().dtype(), x.device());
        let (mean, var) = (made()?, made()?);
        if out.numel() == 0 {
            mean.fill_(f64::NAN)?;
            var.fill_(f64::NAN)?;
            return Ok((out, mean, var));
        }
        let own = |t: Option<&Tensor>| t.map(|t| spread(t, from.shape(), self.dims)).transpose();
        let (weight, bias) = (own(self.weight)?, own(self.bias)?);
        let (weight, bias) = (weight.as_ref(), bias.as_ref());
        let (mean_of, var_of) = (&mean, &var);
        let (eps, rms) = (self.eps, self.rms);
        Rows { x: &from, y: &to, z: None, weight, bias, mean: mean_of, var: var_of, sums: None, eps, rms }.run()?;
        Ok((out, mean, var))
    }

    /// The gradients of x, weight and bias.
    fn backward(
        &self,
        x: &Tensor,
        grad: &Tensor,
        mean: &Tensor,
        var: &Tensor,
        needs: [bool; 3],
    ) -> Result<[Option<Tensor>; 3]> {
        let op = self.op;
        if x.numel() == 0 {
            let zeros = |t: Option<&Tensor>| t.map(|t| Tensor::zeros(t.shape(), t)).transpose();
            return Ok([zeros(Some(x))?, zeros(self.weight)?, zeros(self.bias)?]);
        }
        let out = Tensor::empty_like_shape(x.shape(), x.dtype, x.device())?;
        let (g, z, to) = ((self.view)(&grad.detach())?, (self.view)(&x.detach())?, (self.view)(&out)?);
        let shape = g.shape().clone();
        let weight = self.weight.map(|t| spread(t, &shape, self.dims)).transpose()?;
        // One weight for a whole row has the sums that the row itself needs.
        let by_row = !self.dims[2] && !self.dims[3];
        let (r1, r2) = (shape.dims()[0], shape.dims()[1]);
        let sums = match by_row {
            true => Some(Tensor::empty_like_shape([2, r1, r2, 1, 1], mean.dtype, x.device())?),
            false => None,
        };
        let (eps, rms, bias) = (self.eps, self.rms, None);
        Rows { x: &g, y: &to, z: Some(&z), weight: weight.as_ref(), bias, mean, var, sums: sums.as_ref(), eps, rms }
            .run()?;
        let mut gradients = [Some(out), None, None];
        for (i, t) in [(1, self.weight), (2, self.bias)] {
            let Some(t) = t.filter(|_| needs[i]) else { continue };
            let whole = match (&sums, i) {
                (Some(sums), _) => sums.with_layout(sums.layout.select(op, 0, if i == 1 { 1 } else { 0 })?),
                (None, 1) => {
                    let (x, params) = (Expr::input, Params { scalars: &[Scalar::Float(eps)], seeds: &[] });
                    let product = [x(0) * (x(1) - x(2)) * (x(3) + Expr::scalar(0)).rsqrt()];
                    apply(op, &[&g, &z, mean, var], params, &product, &[g.dtype])?.remove(0)
                }
                _ => g.detach(),
            };
            let others: Dims<isize> = (0..4).filter(|&d| !self.dims[d as usize]).collect();
            let sum = match whole.shape().dims().iter().zip(self.dims).any(|(&n, own)| !own && n > 1) {
                true => reduce::sum_into(op, &whole, &others[..], true, None)?,
                false => whole,
            };
            let sum = if sum.dtype == t.dtype { sum } else { sum.cast(t.dtype)? };
            gradients[i] = Some(reshaped(&sum, t.shape())?);
        }
        Ok(gradients)
    }
}

/// What tells one norm from another, for backward: owned.
#[derive(Clone)]
enum View {
    /// The last dims: `[rows, 1, 1, n]`.
    Last(usize),
    /// Groups of channels: `[N, groups, C / groups, rest]`.
    Groups(usize),
    /// Channels of the batch: `[1, C, N, rest]`.
    Batch,
}

impl View {
    /// `t` as four dims; a copy only where its strides cannot express that.
    fn of(&self, t: &Tensor) -> Result<Tensor> {
        let dims = t.shape().dims();
        let rest = |from: usize| dims[from..].iter().product::<usize>();
        let shape = match *self {
            View::Last(n) => [t.numel() / n.max(1), 1, 1, n],
            View::Groups(groups) => [dims[0], groups, dims[1] / groups, rest(2)],
            View::Batch => [dims[0], dims[1], rest(2), 1],
        };
        let t = reshaped(t, &Shape::from(shape))?;
        match self {
            View::Batch => Ok(t.with_layout(t.layout.permute(&[3, 1, 0, 2]))),
            _ => Ok(t),
        }
    }

    /// The dims that a weight has.
    fn weighted(&self) -> [bool; 4] {
        match self {
            View::Last(_) => [false, false, false, true],
            View::Groups(1) => [false, false, true, false],
            View::Groups(_) => [false, true, true, false],
            View::Batch => [false, true, false, false],
        }
    }
}

/// A norm, recorded; gives mean and variance too.
fn normalised(
    op: &'static str,
    x: &Tensor,
    view: View,
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
    eps: f64,
    rms: bool,
) -> Result<(Tensor, Tensor, Tensor)> {
    // As many groups as channels: each has one, and its weight is the row's.
    let dims = match view {
        View::Groups(groups) if x.shape().dims()[1] == groups => [false, true, false, false],
        _ => view.weighted(),
    };
    let look = |t: &Tensor| view.of(t);
    let (out, mean, var) = Norm { op, view: &look, weight, bias, dims, eps, rms }.forward(x)?;
    let inputs: SmallVec<[&Tensor; 3]> = [x].into_iter().chain(weight).chain(bias).collect();
    if !autograd::is_tracked(&inputs) {
        return Ok((out, mean, var));
    }
    let saved = [Some(x), weight, bias].map(|t| t.map(Saved::new));
    let statistics = [&mean, &var].map(Saved::new);
    let view = view.clone();
    let out = autograd::record(op, out, &inputs, move |ctx| {
        let get = |s: &Option<Saved>| s.as_ref().map(|s| s.get(op).map(Tensor::detach)).transpose();
        let (x, weight, bias) = (get(&saved[0])?.expect("the input"), get(&saved[1])?, get(&saved[2])?);
        let given = [true, weight.is_some(), bias.is_some()];
        let place = |i: usize| given[..i].iter().filter(|g| **g).count();
        let needs = [0, 1, 2].map(|i| given[i] && ctx.needs(place(i)));
        let look = |t: &Tensor| view.of(t);
        let norm = Norm { op, view: &look, weight: weight.as_ref(), bias: bias.as_ref(), dims, eps, rms };
        let (mean, var) = (statistics[0].get(op)?, statistics[1].get(op)?);
        let gradients = norm.backward(&x, &ctx.grad()?, mean, var, needs)?;
        let wanted = gradients.into_iter().zip(given).zip(needs);
        Ok(wanted.filter(|((_, given), _)| *given).map(|((g, _), needed)| g.filter(|_| needed)).collect::<Gradients>())
    });
    Ok((out, mean, var))
}

/// x, and what there is of weight and bias.
fn given<'a>(x: &'a Tensor, weight: Option<&'a Tensor>, bias: Option<&'a Tensor>) -> Dims<&'a Tensor> {
    [x].into_iter().chain(weight).chain(bias).collect()
}

/// Weight and bias among tensors made of those of [`given`].
fn rest<'a>(
    all: &'a [Tensor],
    weight: Option<&Tensor>,
    bias: Option<&Tensor>,
) -> (Option<&'a Tensor>, Option<&'a Tensor>) {
    let mut others = all[1..].iter();
    (weight.and_then(|_| others.next()), bias.and_then(|_| others.next()))
}

/// Asks the registry, by which a bias comes after a weight only.
macro_rules! replace {
    ($op:expr, $inputs:expr, $weight:expr, $bias:expr $(, $argument:expr)*) => {
        if $weight.is_some() || $bias.is_none() {
            if let Some(mut out) = replacement($op, &$inputs, || vec![$($argument.into()),*])? {
                return Ok(out.swap_remove(0));
            }
        }
    };
}

/// Weight and bias of one number for each channel.
fn check_channels(op: &'static str, x: &Tensor, given: &[Option<&Tensor>]) -> Result<()> {
    x.dtype.check_float(op)?;
    if x.rank() < 2 {
        return Err(Error::invalid(op, format!("the input is [N, C, ..], this one has shape {}", x.shape())));
    }
    for t in given.iter().flatten() {
        same_device(op, &[x, t])?;
        if t.shape().dims() != [x.shape().dims()[1]] {
            let hint = "there is one number for each channel";
            return Err(Error::ShapeMismatch { op, lhs: x.shape().clone(), rhs: t.shape().clone(), hint });
        }
    }
    Ok(())
}

fn check_last(op: &'static str, x: &Tensor, shape: &[usize], given: &[Option<&Tensor>]) -> Result<()> {
    x.dtype.check_float(op)?;
    let mismatch = |rhs: Shape, hint| Error::ShapeMismatch { op, lhs: x.shape().clone(), rhs, hint };
    if shape.is_empty() || !x.shape().dims().ends_with(shape) {
        return Err(mismatch(shape.into(), "the normalised shape is that of the input's last dims"));
    }
    for t in given.iter().flatten() {
        same_device(op, &[x, t])?;
        same_dtype(op, &[x, t])?;
        if t.shape().dims() != shape {
            return Err(mismatch(t.shape().clone(), "weight and bias have the normalised shape"));
        }
    }
    Ok(())
}

impl Tensor {
    /// `(x - mean) / sqrt(var + eps) * weight + bias` over the last dims, which have the normalised shape, as weight and bias
    /// do (PyTorch's `layer_norm`, whose default eps is 1e-5). Floats, computed in f32 at least. One launch. Differentiable in
    /// all three.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let x = Tensor::from_slice(&[1f32, 3.0, 5.0, 9.0], [2, 2], Device::Cpu)?;
    /// let y = x.layer_norm(&[2], None, None, 0.0)?;
    /// assert_eq!(y.to_vec::<f32>()?, [-1.0, 1.0, -1.0, 1.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::ShapeMismatch`], [`Error::UnsupportedDType`], [`Error::DTypeMismatch`], [`Error::DeviceMismatch`].
    pub fn layer_norm(
        &self,
        normalized_shape: &[usize],
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
    ) -> Result<Tensor> {
        let op = "layer_norm";
        let inputs = given(self, weight, bias);
        if let Some(wide) = widened(&inputs)? {
            let (weight, bias) = rest(&wide, weight, bias);
            return wide[0].layer_norm(normalized_shape, weight, bias, eps);
        }
        replace!(op, inputs, weight, bias, normalized_shape, eps);
        check_last(op, self, normalized_shape, &[weight, bias])?;
        let n = normalized_shape.iter().product();
        Ok(normalised(op, self, View::Last(n), weight, bias, eps, false)?.0)
    }

    /// `x / sqrt(mean(x²) + eps) * weight` over the last dims, which have the normalised shape, as the weight does (PyTorch's
    /// `rms_norm`); without an eps it is that of the dtype. Floats, computed in f32 at least. One launch. Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::layer_norm`].
    pub fn rms_norm(&self, normalized_shape: &[usize], weight: Option<&Tensor>, eps: Option<f64>) -> Result<Tensor> {
        let op = "rms_norm";
        let inputs = given(self, weight, None);
        if let Some(wide) = widened(&inputs)? {
            return wide[0].rms_norm(normalized_shape, rest(&wide, weight, None).0, eps);
        }
        replace!(op, inputs, weight, None::<&Tensor>, normalized_shape, eps);
        check_last(op, self, normalized_shape, &[weight])?;
        let n = normalized_shape.iter().product();
        let least = match self.dtype {
            crate::DType::F64 => f64::EPSILON,
            crate::DType::F16 => 2f64.powi(-10),
            crate::DType::BF16 => 2f64.powi(-7),
            _ => f32::EPSILON.into(),
        };
        Ok(normalised(op, self, View::Last(n), weight, None, eps.unwrap_or(least), true)?.0)
    }

    /// [`Tensor::layer_norm`] of each group of the channels of `[N, C, ..]`, with a weight and a bias for each channel
    /// (PyTorch's `group_norm`, whose default eps is 1e-5). One launch. Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::layer_norm`]; [`Error::Invalid`] where the groups do not divide the channels.
    pub fn group_norm(
        &self,
        groups: usize,
        weight: Option<&Tensor>,
        bias: Option<&Tensor>,
        eps: f64,
    ) -> Result<Tensor> {
        let op = "group_norm";
        let inputs = given(self, weight, bias);
        if let Some(wide) = widened(&inputs)? {
            let (weight, bias) = rest(&wide, weight, bias);
            return wide[0].group_norm(groups, weight, bias, eps);
        }
        replace!(op, inputs, weight, bias, groups, eps);
        check_channels(op, self, &[weight, bias])?;
        same_dtype(op, &inputs)?;
        let channels = self.shape().dims()[1];
        if groups == 0 || channels % groups != 0 {
            let reason = format!("{groups} groups do not divide {channels} channels evenly");
            return Err(Error::invalid(op, reason));
        }
        Ok(normalised(op, self, View::Groups(groups), weight, bias, eps, false)?.0)
    }

    /// [`Tensor::layer_norm`] of each channel of each of `[N, C, ..]`, with a weight and a bias for each channel (PyTorch's
    /// `instance_norm`, whose default eps is 1e-5). One launch. Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::layer_norm`].
    pub fn instance_norm(&self, weight: Option<&Tensor>, bias: Option<&Tensor>, eps: f64) -> Result<Tensor> {
        let op = "instance_norm";
        let inputs = given(self, weight, bias);
        replace!(op, inputs, weight, bias, eps);
        check_channels(op, self, &[weight, bias])?;
        if self.shape().dims()[1] == 0 {
            return Tensor::zeros(self.shape(), self);
        }
        self.group_norm(self.shape().dims()[1], weight, bias, eps).map_err(|e| e.of(op))
    }

    /// Each channel of `[N, C, ..]` less its mean, over its standard deviation (PyTorch's `batch_norm`): in training over the
    /// batch, one launch and one more for the running statistics, which move towards the batch's mean and unbiased variance;
    /// otherwise by the running statistics. Floats, computed in f32 at least. Differentiable in x, weight and bias.
    ///
    /// ```
    /// use claystone::{BatchNormOptions, Device, Tensor};
    /// let x = Tensor::from_slice(&[1f32, 10.0, 3.0, 30.0], [2, 2], Device::Cpu)?;
    /// let y = x.batch_norm(BatchNormOptions { training: true, eps: 0.0, ..Default::default() })?;
    /// assert_eq!(y.to_vec::<f32>()?, [-1.0, -1.0, 1.0, 1.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Tensor::layer_norm`]; [`Error::Invalid`] without running statistics where not training, and in training for
    /// channels of one element.
    pub fn batch_norm(&self, options: BatchNormOptions) -> Result<Tensor> {
        let op = "batch_norm";
        if let Some(wide) = widened(&[self])? {
            return wide[0].batch_norm(options);
        }
        let BatchNormOptions { running_mean, running_var, weight, bias, training, momentum, eps } = options;
        let inputs = given(self, weight, bias);
        if let Some(wide) = widened(&inputs)? {
            let (weight, bias) = rest(&wide, weight, bias);
            return wide[0].batch_norm(BatchNormOptions { weight, bias, ..options });
        }
        match (training, running_mean, running_var) {
            (true, None, None) => replace!(op, inputs, weight, bias, true, momentum, eps),
            (false, Some(mean), Some(var)) => {
                let inputs: Dims<&Tensor> = [self, mean, var].into_iter().chain(weight).chain(bias).collect();
                replace!(op, inputs, weight, bias, false, momentum, eps);
            }
            // What changes its arguments is nobody else's.
            _ => {}
        }
        check_channels(op, self, &[weight, bias, running_mean, running_var])?;
        same_dtype(op, &inputs)?;
        let channels = self.shape().dims()[1];
        let n: usize = self.shape().dims().iter().enumerate().filter(|(d, _)| *d != 1).map(|(_, &n)| n).product();
        if training {
            if n == 1 {
                let reason = format!("shape {} has one element a channel, which has no variance", self.shape());
                return Err(Error::invalid(op, reason));
            }
            let (out, mean, var) = normalised(op, self, View::Batch, weight, bias, eps, false)?;
            let unbiased = n as f64 / (n as f64 - 1.0);
            let scalars = [Scalar::Float(momentum), Scalar::Float(1.0 - momentum), Scalar::Float(momentum * unbiased)];
            let line = |t: &Tensor| t.with_layout(Layout::contiguous(Shape::from(channels)));
            let (mean, var) = (line(&mean), line(&var));
            if n > 0 {
                let update = || match (running_mean, running_var) {
                    (Some(m), Some(v)) => Tensor::map_into(&[m, v, &mean, &var], &scalars, &[m, v], |x, s| {
                        vec![&s[1] * &x[0] + &s[0] * &x[2], &s[1] * &x[1] + &s[2] * &x[3]]
                    }),
                    (Some(m), None) => {
                        Tensor::map_into(&[m, &mean], &scalars, &[m], |x, s| vec![&s[1] * &x[0] + &s[0] * &x[1]])
                    }
                    (None, Some(v)) => {
                        Tensor::map_into(&[v, &var], &scalars, &[v], |x, s| vec![&s[1] * &x[0] + &s[2] * &x[1]])
                    }
                    (None, None) => Ok(()),
                };
                no_grad(update).map_err(|e| e.of(op))?;
            }
            return Ok(out);
        }
        let (Some(mean), Some(var)) = (running_mean, running_var) else {
            return Err(Error::invalid(op, "where it is not training it needs the running mean and variance"));
        };
        let shape: Shape = (0..self.rank()).map(|d| if d == 1 { channels } else { 1 }).collect();
        let column = |t: &Tensor| t.reshape(&shape);
        let all: SmallVec<[Tensor; 4]> =
            [mean, var].into_iter().chain(weight).chain(bias).map(column).collect::<Result<_>>()?;
        let inputs: SmallVec<[&Tensor; 5]> = std::iter::once(self).chain(&all).collect();
        let normal = (Expr::input(0) - Expr::input(1)) * (Expr::input(2) + eps).rsqrt();
        let scaled = if weight.is_some() { normal * Expr::input(3) } else { normal };
        let shifted = if bias.is_some() { scaled + Expr::input(all.len()) } else { scaled };
        super::formula(op, &inputs, self.dtype, &shifted, |i| shifted.diff(i))
    }

    /// `x / max(|x|, eps)` with the p-norm along `dim` (PyTorch's `normalize`, whose defaults are 2, 1 and 1e-12). Floats.
    /// Differentiable.
    ///
    /// # Errors
    /// [`Error::DimOutOfRange`], [`Error::UnsupportedDType`]; [`Error::Invalid`] for a p that is not above 0.
    pub fn normalize(&self, p: f64, dim: isize, eps: f64) -> Result<Tensor> {
        let op = "normalize";
        self.dtype.check_float(op)?;
        replaced!(op, [self], p, dim, eps);
        if p.is_nan() || p <= 0.0 {
            return Err(Error::invalid(op, format!("p is {p}, it must be above 0")));
        }
        let normal = || {
            let norm = self.vector_norm(p, dim, true)?;
            Tensor::map(&[self, &norm], |e| &e[0] / e[1].lt(eps).select(eps, &e[1]))
        };
        normal().map_err(|e| e.of(op))
    }
}

const fn norm(name: &'static str, torch: &'static str, call: fn(&Args) -> Result<Tensor>) -> Operation {
    Operation::new(name, torch, Kind::NeuralNetwork, Dtypes::Floats, Gives::Same, call).differentiable()
}

/// Tensor i where it was given.
fn maybe<'a>(a: &Args<'a>, i: usize) -> Option<&'a Tensor> {
    a.xs().get(i).copied()
}

pub(super) static OPERATIONS: &[Operation] = &[
    norm("layer_norm", "nn.functional.layer_norm", |a| {
        a.x(0)?.layer_norm(&a.sizes(0)?, maybe(a, 1), maybe(a, 2), a.float(1)?)
    }),
    norm("rms_norm", "nn.functional.rms_norm", |a| {
        a.x(0)?.rms_norm(&a.sizes(0)?, maybe(a, 1), if a.given(1) { Some(a.float(1)?) } else { None })
    }),
    norm("group_norm", "nn.functional.group_norm", |a| {
        a.x(0)?.group_norm(a.size(0)?, maybe(a, 1), maybe(a, 2), a.float(1)?)
    }),
    norm("instance_norm", "nn.functional.instance_norm", |a| {
        a.x(0)?.instance_norm(maybe(a, 1), maybe(a, 2), a.float(0)?)
    }),
    norm("batch_norm", "nn.functional.batch_norm", |a| {
        let training = a.bool(0)?;
        let first = if training { 1 } else { 3 };
        let of = |i: usize| if training { None } else { maybe(a, i) };
        let (running_mean, running_var) = (of(1), of(2));
        let (weight, bias) = (maybe(a, first), maybe(a, first + 1));
        let (momentum, eps) = (a.float(1)?, a.float(2)?);
        a.x(0)?.batch_norm(BatchNormOptions { running_mean, running_var, weight, bias, training, momentum, eps })
    }),
    norm("normalize", "nn.functional.normalize", |a| a.x(0)?.normalize(a.float(0)?, a.int(1)?, a.float(2)?)),
];

//! Layer, group, instance, batch and RMS norm.
//!
//! All norms are the same operation on different rows. Each norm views its input as `[rows, inner rows, outer, inner]`, where the last
//! two dims form one row, so that a channel of a whole batch is also a row, without a copy. Forward and backward take one launch each, or
//! two if a GPU splits long rows. The gradient of a weight that varies within a row takes more launches.

pub(crate) mod methods;

use crate::backend::problem::norm::{NormForward, Normalisation, RowGrouping, broadcast_view, unbind};
use crate::ops::dispatch::prelude::*;
use crate::ops::elementwise::apply_one;
use crate::ops::reduce;
use crate::tensor::view::reshape_detached;

/// Optional tensors and parameters of [`Tensor::batch_norm`], with PyTorch's defaults.
#[derive(Debug, Clone, Copy)]
pub struct BatchNormOptions<'a> {
    /// The running mean of each channel, used in evaluation and updated in training.
    pub running_mean: Option<&'a Tensor>,
    /// The running variance of each channel, used in evaluation and updated in training.
    pub running_var: Option<&'a Tensor>,
    /// A factor for each channel.
    pub weight: Option<&'a Tensor>,
    /// A shift for each channel.
    pub bias: Option<&'a Tensor>,
    /// Whether to normalise by the mean and variance of the batch instead of the running statistics.
    pub training: bool,
    /// The fraction by which the running statistics move towards the statistics of the batch.
    pub momentum: f64,
    /// A number that is added to the variance before the square root.
    pub eps: f64,
}

impl Default for BatchNormOptions<'_> {
    fn default() -> Self {
        let (running_mean, running_var, weight, bias) = (None, None, None, None);
        BatchNormOptions { running_mean, running_var, weight, bias, training: false, momentum: 0.1, eps: 1e-5 }
    }
}

/// A norm over the last two dims of a 4-D view of the input.
pub(crate) struct Norm<'a> {
    pub(crate) op: &'static str,
    pub(crate) view: &'a RowGrouping,
    pub(crate) weight: Option<&'a Tensor>,
    pub(crate) bias: Option<&'a Tensor>,
    /// For each of the four dims, whether weight and bias vary along it; they are broadcast along the other dims.
    pub(crate) dims: [bool; 4],
    pub(crate) eps: f64,
    pub(crate) rms: bool,
}

impl<'a> Normalisation<'a> {
    /// Returns the tensors that the launch writes.
    fn outputs(&self) -> impl Iterator<Item = &'a Tensor> + Clone + use<'a> {
        let statistics = self.z.is_none().then_some(self.statistics); // the backward pass only reads the statistics
        [self.y].into_iter().chain(self.sums).chain(statistics)
    }
}

impl Norm<'_> {
    /// Writes the normalised x to `out`, and the [`Normalisation::statistics`].
    pub(crate) fn forward(&self, x: &Tensor, out: &Tensor, statistics: &Tensor) -> Result<()> {
        if out.numel() == 0 {
            return statistics.fill_(f64::NAN).map(|_| ());
        }
        let Norm { weight, bias, eps, rms, .. } = *self;
        let (z, sums, columns, variance) = Default::default();
        let given = Normalisation { x, y: out, z, weight, bias, statistics, sums, columns, eps, rms, variance };
        // The views are built only if the launch is not cached.
        let views = || {
            let (from, to) = (self.view.as_rows(&x.detach())?, self.view.as_rows(out)?);
            let own = |t: Option<&Tensor>| t.map(|t| broadcast_view(t, from.shape(), self.dims)).transpose();
            let (weight, bias) = (own(weight)?, own(bias)?);
            Ok((from, to, weight, bias))
        };
        let norm = NormForward { given, grouping: self.view, dims: self.dims, views: &views };
        backend::launch(norm.given.outputs(), |b| b.norm_forward(&norm))
    }

    pub(crate) fn backward(
        &self,
        x: &Tensor,
        grad: &Tensor,
        statistics: &Tensor,
        needs: [bool; 3],
    ) -> Result<[Option<Tensor>; 3]> {
        let op = self.op;
        if x.numel() == 0 {
            let zeros = |t: Option<&Tensor>| t.map(|t| Tensor::zeros(t.shape(), t)).transpose();
            return Ok([zeros(Some(x))?, zeros(self.weight)?, zeros(self.bias)?]);
        }
        let out = self.view.allocate_result(x)?;
        let (g, rows, to) =
            (self.view.as_rows(&grad.detach())?, self.view.as_rows(&x.detach())?, self.view.as_rows(&out)?);
        let shape = g.shape().clone();
        let weight = self.weight.map(|t| broadcast_view(t, &shape, self.dims)).transpose()?;
        // For a weight that is constant within a row, the gradient needs the same sums as the gradient of x.
        let by_row = !self.dims[2] && !self.dims[3];
        let (r1, r2) = (shape.dims()[0], shape.dims()[1]);
        let sums = match by_row {
            true => Some(Tensor::empty_with_shape([2, r1, r2, 1, 1], statistics.dtype, x.device())?),
            false => None,
        };
        let Norm { eps, rms, .. } = *self;
        let (z, weight, sums) = (Some(&rows), weight.as_ref(), sums.as_ref());
        let columns = match self.view {
            RowGrouping::Last(n) if needs[1] || needs[2] => {
                backend::of_device(x.device()).alloc_column_sums(x, x.numel() / n, *n)?
            }
            _ => None,
        };
        let columns = columns.as_ref();
        let (bias, variance) = (None, None);
        let gradient = Normalisation { x: &g, y: &to, z, weight, bias, statistics, sums, columns, eps, rms, variance };
        backend::launch(gradient.outputs(), |b| b.norm(&gradient))?;
        let columns = columns.map(|parts| reduce::sum_into(op, parts, &[0isize][..], false, None)).transpose()?;
        let mut gradients = [Some(out), None, None];
        for (i, t) in [(1, self.weight), (2, self.bias)] {
            let Some(t) = t.filter(|_| needs[i]) else { continue };
            if let Some(columns) = &columns {
                let [sum, product] = unbind(op, columns)?;
                let gradient = if i == 1 { product } else { sum }.to_dtype(t.dtype)?;
                gradients[i] = Some(reshape_detached(&gradient, t.shape())?);
                continue;
            }
            let whole = match (sums, i) {
                (Some(sums), _) => {
                    let [sum, product] = unbind(op, sums)?;
                    if i == 1 { product } else { sum }
                }
                (None, 1) => {
                    let product = Expr::input(0) * (Expr::input(1) - Expr::input(2)) * Expr::input(3);
                    let [mean, scale] = unbind(op, statistics)?;
                    // The products are computed at least in f32, because halves would be rounded before they are added up.
                    apply_one(op, &[&g, &rows, &mean, &scale], Params::default(), &product, statistics.dtype)?
                }
                _ => g.detach(),
            };
            let others: Dims<isize> = (0..4).filter(|&d| !self.dims[d as usize]).collect();
            let sum = match whole.shape().dims().iter().zip(self.dims).any(|(&n, own)| !own && n > 1) {
                true => reduce::sum_into(op, &whole, &others[..], true, None)?,
                false => whole,
            };
            let sum = if sum.dtype == t.dtype { sum } else { sum.cast(t.dtype)? };
            gradients[i] = Some(reshape_detached(&sum, t.shape())?);
        }
        Ok(gradients)
    }

    /// Computes the norm of x with recorded operations, for double backward.
    fn recorded(&self, x: &Tensor) -> Result<Tensor> {
        let &Norm { view, weight, bias, dims, eps, rms, .. } = self;
        let is_batch = matches!(view, RowGrouping::Batch);
        let rows = x.to_dtype(x.dtype.compute().dtype())?.reshape(view.shape(x))?;
        let rows = if is_batch { rows.permute(&[3, 1, 0, 2])? } else { rows };
        let own: Shape = rows.shape().dims().iter().zip(dims).map(|(&n, own)| if own { n } else { 1 }).collect();
        let centred = if rms { rows } else { rows.sub(&rows.mean([2, 3], true)?)? };
        let scale = centred.square()?.mean([2, 3], true)?.add_scalar(eps)?.rsqrt()?;
        let scaled = weight.map_or(Ok(scale.shallow_clone()), |w| w.reshape(&own)?.mul(&scale))?;
        let out = centred.mul(&scaled)?;
        let out = bias.map_or(Ok(out.shallow_clone()), |b| out.add(&b.reshape(&own)?))?;
        let out = if is_batch { out.permute(&[2, 1, 3, 0])? } else { out };
        out.reshape(x.shape())?.to_dtype(x.dtype)
    }
}

impl RowGrouping {
    /// Returns the sizes of the four dims, before the dims of a batch norm are permuted.
    fn shape(&self, t: &Tensor) -> [usize; 4] {
        let dims = t.shape().dims();
        let rest = |from: usize| dims[from..].iter().product::<usize>();
        match *self {
            RowGrouping::Last(n) => [t.numel() / n.max(1), 1, 1, n],
            RowGrouping::Groups(groups) => [dims[0], groups, dims[1] / groups, rest(2)],
            RowGrouping::Batch => [dims[0], dims[1], rest(2), 1],
        }
    }

    /// Allocates the result for x: batch norm keeps the memory format, and all other norms are row-major.
    pub(crate) fn allocate_result(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            RowGrouping::Batch => x.empty_like(),
            RowGrouping::Last(_) | RowGrouping::Groups(_) => Tensor::empty_with_shape(x.shape(), x.dtype, x.device()),
        }
    }

    /// Returns the shape of the [`Normalisation::statistics`] of x.
    pub(crate) fn statistics_shape(&self, x: &Tensor) -> [usize; 5] {
        let [first, second, ..] = self.shape(x);
        [3, if let RowGrouping::Batch = self { 1 } else { first }, second, 1, 1]
    }

    pub(crate) fn allocate_statistics(&self, x: &Tensor) -> Result<Tensor> {
        Tensor::empty_with_shape(self.statistics_shape(x), x.dtype.compute().dtype(), x.device())
    }

    /// Returns the dims like [`RowGrouping::weight_dims`], for the norm of x: if each group has one channel, the weight of a channel
    /// covers a whole row.
    pub(crate) fn weight_dims_for(&self, x: &Tensor) -> [bool; 4] {
        match *self {
            RowGrouping::Groups(groups) if x.shape().dims()[1] == groups => [false, true, false, false],
            _ => self.weight_dims(),
        }
    }

    /// Returns `t` with four dims: a view, or a copy if the strides of `t` cannot express the view.
    pub(crate) fn as_rows(&self, t: &Tensor) -> Result<Tensor> {
        let t = reshape_detached(t, &Shape::from(self.shape(t)))?;
        match self {
            RowGrouping::Batch => Ok(t.with_layout(t.layout.permute(&[3, 1, 0, 2]))),
            _ => Ok(t),
        }
    }

    /// Returns, for each of the four dims, whether a weight varies along it.
    pub(crate) fn weight_dims(&self) -> [bool; 4] {
        match self {
            RowGrouping::Last(_) => [false, false, false, true],
            RowGrouping::Groups(1) => [false, false, true, false],
            RowGrouping::Groups(_) => [false, true, true, false],
            RowGrouping::Batch => [false, true, false, false],
        }
    }
}

/// Computes and records a norm. Returns the result and the [`Normalisation::statistics`].
fn normalise(
    op: &'static str,
    x: &Tensor,
    view: RowGrouping,
    [weight, bias]: [Option<&Tensor>; 2],
    eps: f64,
    rms: bool,
) -> Result<(Tensor, Tensor)> {
    let (statistics, dims, out) = (view.allocate_statistics(x)?, view.weight_dims_for(x), view.allocate_result(x)?);
    Norm { op, view: &view, weight, bias, dims, eps, rms }.forward(x, &out, &statistics)?;
    let inputs: SmallVec<[&Tensor; 3]> = [x].into_iter().chain(weight).chain(bias).collect();
    if !autograd::is_tracked(&inputs) {
        return Ok((out, statistics));
    }
    let saved = [Some(x), weight, bias].map(|t| t.map(Saved::new));
    let kept = Saved::new(&statistics);
    autograd::note_recipe(&out, &inputs, || {
        let (given, rows) = ([weight.is_some(), bias.is_some()], view.clone());
        move |t: &[&Tensor]| {
            let (statistics, out) = (rows.allocate_statistics(t[0])?, rows.allocate_result(t[0])?);
            let mut others = t[1..].iter().copied();
            let [weight, bias] = given.map(|given| if given { others.next() } else { None });
            Norm { op, view: &rows, weight, bias, dims, eps, rms }.forward(t[0], &out, &statistics)?;
            Ok(out)
        }
    });
    let out = autograd::record_differentiable(op, out, &inputs, move |ctx| {
        let twice = ctx.create_graph();
        let unpack = |s: &Saved| if twice { s.unpack(op) } else { s.get(op).map(Tensor::detach) };
        let get = |s: &Option<Saved>| s.as_ref().map(unpack).transpose();
        let (x, weight, bias) = (get(&saved[0])?.expect("the input"), get(&saved[1])?, get(&saved[2])?);
        let norm = Norm { op, view: &view, weight: weight.as_ref(), bias: bias.as_ref(), dims, eps, rms };
        if twice {
            return ctx.differentiate_through(&norm.recorded(&x)?);
        }
        let given = [true, weight.is_some(), bias.is_some()];
        let place = |i: usize| given[..i].iter().filter(|g| **g).count();
        let needs = [0, 1, 2].map(|i| given[i] && ctx.needs_gradient(place(i)));
        let gradients = norm.backward(&x, &ctx.grad()?, kept.get(op)?, needs)?;
        let wanted = gradients.into_iter().zip(given).zip(needs);
        Ok(wanted.filter(|((_, given), _)| *given).map(|((g, _), needed)| g.filter(|_| needed)).collect::<Gradients>())
    });
    Ok((out, statistics))
}

//! Random numbers of further distributions: in-place methods, and distributions whose parameters are tensors.

use crate::device::capture::is_capturing;
use crate::expr::philox::Seed;
use crate::ops::dispatch::prelude::*;
use crate::ops::elementwise;
use crate::ops::random::{next_seed, uniform};

operations! {
    rand(size: sizes, options): Random, Floats -> Same;
    randn(size: sizes, options): Random, Floats -> Same;
    randint(low: int = 0, high: int, size: sizes, options): Random, Numbers -> Same
        => |a| Tensor::randint(a.int(0)? as i64, a.int(1)? as i64, a.sizes(2)?, a.tensor_options(3)?);
    randperm(n: size, device: device): Random, All -> I64;
    /// Returns [`Tensor::rand`] with this tensor's shape, dtype and device.
    rand_like(input: x): Random, Floats -> Same = |op, self| {
        Tensor::rand(self.shape(), self).with_op(op)
    };
    /// Returns [`Tensor::randn`] with this tensor's shape, dtype and device.
    randn_like(input: x): Random, Floats -> Same = |op, self| {
        Tensor::randn(self.shape(), self).with_op(op)
    };
    randint_like(input: x, low: int = 0, high: int): Random, Numbers -> Same
        => |a| a.tensor(0)?.randint_like(a.int(0)? as i64, a.int(1)? as i64);
    /// Returns a tensor in which each element is 1 with the probability that this tensor's element gives, otherwise 0, in this tensor's
    /// dtype (PyTorch's `bernoulli`). Floats. Not differentiable.
    bernoulli(input: x): Random, Floats -> Same = |op, self| {
        self.dtype.check_float(op)?;
        Tensor::random_from(op, &[self], &[], Expr::uniform(0).lt(Expr::input(0)), self.dtype)
    };
    normal(mean: x, std: x): Random, Floats -> Same;
    multinomial(input: x, num_samples: size, replacement: bool = false): Random, Floats -> I64;
    /// Sets each element to zero with probability `p`, and multiplies all other elements by `1 / (1 - p)` (PyTorch's `dropout` in
    /// training). One launch forward, one backward; no mask is stored. Differentiable. Floats. Fails with [`Error::Invalid`] unless `p`
    /// is in `0.0..=1.0`.
    dropout(input: x, p: float = 0.5): Random, Floats -> Same, differentiable = |op, self, p| {
        invalid!(op if !(0.0..=1.0).contains(&p), "the probability {p} is not in 0.0..=1.0");
        self.dtype.check_float(op)?;
        let expr = Expr::uniform(0).lt(Expr::scalar(0)).select(0.0, Expr::input(0) * Expr::scalar(1));
        let scale = if p < 1.0 { 1.0 / (1.0 - p) } else { 0.0 };
        let scalars = [Scalar::Float(p), Scalar::Float(scale)];
        let drawn = next_seed(self.device())?;
        elementwise::apply_tracked(op, &[self], drawn.params(&scalars), &expr, self.dtype, &|i| expr.diff(i))
    };
    /// Applies dropout to whole channels of `[N, C, ..]`: either all elements of a channel are set to zero, or none (PyTorch's
    /// `dropout1d`, `dropout2d` and `dropout3d`). See [`Tensor::dropout`]. Differentiable. Fails as [`Tensor::dropout`] does, and with
    /// [`Error::Invalid`] for fewer than two dims.
    dropout2d(input: x, p: float = 0.5) functional: Random, Floats -> Same, differentiable = |op, self, p| {
        self.dtype.check_float(op)?;
        invalid!(op if self.rank() < 2, "the input is [N, C, ..], this one has shape {}", self.shape());
        let channels: Shape = self.shape().dims().iter().enumerate().map(|(d, &n)| if d < 2 { n } else { 1 }).collect();
        Tensor::ones(channels, self)?.dropout(p).and_then(|kept| self.mul(&kept)).with_op(op)
    };
    uniform_(input: x, from: float = 0, to: float = 1): InPlace, Floats -> Same;
    normal_(input: x, mean: float = 0, std: float = 1): InPlace, Floats -> Same;
    exponential_(input: x, lambd: float = 1): InPlace, Floats -> Same;
    bernoulli_(input: x, p: float = 0.5): InPlace, All -> Same;
}

impl Tensor {
    /// Fills this tensor with the values of a formula that reads the given scalars and the next seed.
    fn fill_with_random_(&self, op: &'static str, scalars: &[Scalar], expr: Expr) -> Result<&Tensor> {
        let change = autograd::begin_in_place(op, self, &[])?;
        if self.skips_writes() {
            return Ok(self);
        }
        let drawn = next_seed(self.device())?;
        elementwise::apply_into(op, &[], drawn.params(scalars), &[expr], &[self])?;
        change.into_iter().for_each(autograd::InPlace::finish_overwrite);
        Ok(self)
    }

    /// Computes a formula that reads the given tensors and the next seed. Not differentiable.
    fn random_from(
        op: &'static str,
        inputs: &[&Tensor],
        scalars: &[Scalar],
        expr: Expr,
        dtype: DType,
    ) -> Result<Tensor> {
        let drawn = next_seed(inputs[0].device())?;
        Ok(elementwise::apply(op, inputs, drawn.params(scalars), &[expr], &[dtype])?.remove(0))
    }

    /// Fills this tensor with uniform random numbers in `from..to`; no dtype rounds a number to `to` (PyTorch's `uniform_`, with defaults
    /// of 0 and 1). One launch.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let weights = Tensor::empty([3, 3], Device::Cpu)?;
    /// weights.uniform_(-0.5, 0.5)?;
    /// assert!(weights.to_vec::<f32>()?.iter().all(|w| w.abs() <= 0.5));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::UnsupportedDType`] for integers and bool, [`Error::Invalid`] if `to` is below `from`, or if a limit or the
    /// difference of the limits is not finite in the dtype, and the errors of [`Tensor::fill_`].
    pub fn uniform_(&self, from: f64, to: f64) -> Result<&Tensor> {
        let op = "uniform_";
        self.dtype.check_float(op)?;
        invalid!(op if !(from <= to && (to - from).is_finite()), "{from}..{to} is not a range of finite numbers");
        let dtype = self.dtype;
        [from, to].into_iter().try_for_each(|end| Scalar::Float(end).check_within(op, dtype))?;
        Scalar::Float(to - from).check_within(op, dtype.compute().dtype())?;
        // Rounding may produce `to`, so results are clamped to the dtype's smallest and greatest numbers in the range.
        let (least, greatest) = (dtype.at_least(from), dtype.at_most(to, from < to));
        let (least, greatest) =
            if least <= greatest { (least, greatest) } else { (dtype.rounded(from), dtype.rounded(from)) };
        let expr = Expr::scalar(0) + Expr::scalar(1) * uniform(dtype);
        let expr = expr.max(Expr::scalar(2)).min(Expr::scalar(3));
        self.fill_with_random_(op, &[from, to - from, least, greatest].map(Scalar::Float), expr)
    }

    /// Fills this tensor with normal random numbers of the given mean and standard deviation (PyTorch's `normal_`, with defaults of 0 and
    /// 1). One launch.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] for integers and bool; [`Error::Invalid`] for a negative deviation; the errors of [`Tensor::fill_`].
    pub fn normal_(&self, mean: f64, std: f64) -> Result<&Tensor> {
        let op = "normal_";
        self.dtype.check_float(op)?;
        invalid!(op if std < 0.0, "the standard deviation is {std}, it must not be negative");
        self.fill_with_random_(op, &[mean.into(), std.into()], Expr::scalar(0) + Expr::scalar(1) * Expr::normal(0))
    }

    /// Fills this tensor with exponentially distributed random numbers of the given rate, all above 0 (PyTorch's `exponential_`). One
    /// launch.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] for integers and bool; [`Error::Invalid`] for a rate that is not positive; the errors of
    /// [`Tensor::fill_`].
    pub fn exponential_(&self, rate: f64) -> Result<&Tensor> {
        let op = "exponential_";
        self.dtype.check_float(op)?;
        invalid!(op if rate.is_nan() || rate <= 0.0, "the rate {rate} is not positive");
        let least = if rate.is_finite() { self.dtype.smallest() } else { 0.0 };
        let expr = ((-Expr::uniform(0)).log1p() * Expr::scalar(0)).max(Expr::scalar(1));
        self.fill_with_random_(op, &[(-1.0 / rate).into(), least.into()], expr)
    }

    /// Sets each element to 1 with probability `p`, otherwise to 0, in any dtype (PyTorch's `bernoulli_`). One launch. Fails as
    /// [`Tensor::fill_`] does, and with [`Error::Invalid`] unless `p` is in `0.0..=1.0`.
    pub fn bernoulli_(&self, p: f64) -> Result<&Tensor> {
        let op = "bernoulli_";
        invalid!(op if !(0.0..=1.0).contains(&p), "the probability {p} is not in 0.0..=1.0");
        self.fill_with_random_(op, &[p.into()], Expr::uniform(0).lt(Expr::scalar(0)))
    }

    /// Returns normal random numbers, each with its own mean and standard deviation, which are broadcast (PyTorch's `normal`). Floats.
    /// Not differentiable.
    #[track_caller]
    pub fn normal(mean: &Tensor, std: &Tensor) -> Result<Tensor> {
        let _caller = Caller::enter();
        let op = "normal";
        mean.dtype.check_float(op)?;
        same_device(op, &[mean, std])?;
        let dtype = same_dtype(op, &[mean, std])?;
        Tensor::random_from(op, &[mean, std], &[], Expr::input(0) + Expr::input(1) * Expr::normal(0), dtype)
    }

    /// Returns [`Tensor::randint`] with this tensor's shape, dtype and device.
    #[track_caller]
    pub fn randint_like(&self, low: i64, high: i64) -> Result<Tensor> {
        Tensor::randint(low, high, self.shape(), self).with_op("randint_like")
    }

    /// Draws `samples` indices of the last dim, with probabilities proportional to this tensor's elements, as i64 (PyTorch's
    /// `multinomial`).
    ///
    /// A vector of weights gives a vector of indices, and a matrix gives one row of indices for each of its rows. Without replacement, no
    /// index occurs twice in a row. Waits for the device, to check the weights. A captured graph does not check the weights, and its
    /// replays return meaningless indices for invalid weights. Fails with [`Error::UnsupportedDType`] for integers and bool;
    /// [`Error::Invalid`] for a scalar, three or more dims, no weights, a weight that is negative or not finite, a row without a positive
    /// weight, and, without replacement, a row with fewer positive weights than samples.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let weights = Tensor::from_slice(&[0f32, 3.0, 0.0, 1.0], 4, Device::Cpu)?;
    /// let drawn = weights.multinomial(10, true)?.to_vec::<i64>()?;
    /// assert!(drawn.iter().all(|i| [1, 3].contains(i)));
    /// assert!(weights.sub_scalar(1)?.multinomial(10, true).is_err());
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn multinomial(&self, samples: usize, replacement: bool) -> Result<Tensor> {
        let _caller = Caller::enter();
        let op = "multinomial";
        self.dtype.check_float(op)?;
        let [rows @ .., n] = self.shape().dims() else {
            return Err(Error::invalid(op, "the weights are a vector or a matrix, not a scalar"));
        };
        let n = *n;
        invalid!(op if rows.len() > 1 || n == 0 || (samples > n && !replacement),
            "{samples} indices cannot be drawn from weights of shape {}", self.shape());
        let weights = self.detach();
        let (least, greatest) = weights.aminmax(-1, true).with_op(op)?;
        let checked = !is_capturing(self.device());
        if checked {
            for (low, high) in to_host_f64(&least)?.into_iter().zip(to_host_f64(&greatest)?) {
                if weights.storage.is_simulated() {
                    continue; // the weights have no values
                }
                let valid = low >= 0.0 && high.is_finite();
                invalid!(op if !valid, "weights from {low:?} to {high:?}: they have to be finite and not negative");
                invalid!(op if high == 0.0, "all weights are 0");
            }
        }
        let drawn = next_seed(self.device())?;
        let seeds = [drawn.seed, Seed { key: drawn.seed.key.wrapping_add(SECOND_SEED_KEY_OFFSET), ..drawn.seed }];
        let params = Params { seeds: &seeds, ..drawn.params(&[]) };
        if replacement {
            let scaled_weights = cumulative_weights(&weights, &greatest, n).with_op(op)?;
            let totals = scaled_weights.narrow(-1, n - 1, 1)?;
            let totals = totals.expand(rows.iter().copied().chain([samples]).collect::<crate::Shape>())?;
            let points =
                elementwise::apply(op, &[&totals], params, &[uniform_integer_below(&Expr::input(0))], &[DType::I64])?;
            let indices = scaled_weights.searchsorted(&points[0], true).with_op(op)?;
            indices.clamp_max_(n as i64 - 1)?;
            return Ok(indices);
        }
        // If every index arrives at an exponentially distributed time with its weight as the rate, the order of arrival is a sample without
        // replacement. The second uniform number refines the first, so that the earliest times, close to 0, have as many digits as later
        // times.
        let wide = self.dtype.compute().dtype();
        let time = -(-(Expr::uniform(0) + Expr::uniform(1) * 2f64.powi(-24))).log1p();
        let rate = Expr::input(0) / Expr::input(1);
        let time = Expr::input(0).gt(0.0).select((time / rate).min(wide.greatest()), f64::INFINITY);
        let arrivals = elementwise::apply(op, &[&weights, &greatest], params, &[time], &[wide])?.remove(0);
        let (times, indices) = match 8 * samples < n {
            true => arrivals.topk(samples, -1, false).with_op(op)?,
            false => arrivals.sort(-1, false).with_op(op)?,
        };
        if checked && samples > 0 {
            let last = to_host_f64(&times.narrow(-1, samples - 1, 1)?)?;
            invalid!(op if last.contains(&f64::INFINITY), "a row has fewer than {samples} weights above 0");
        }
        indices.narrow(-1, 0, samples)?.contiguous()
    }
}

/// The number added to a seed's key to get a second seed, for operations that draw two numbers for each element.
const SECOND_SEED_KEY_OFFSET: u64 = 0x9E37_79B9_7F4A_7C15;

fn to_host_f64(x: &Tensor) -> Result<Vec<f64>> {
    x.to_device(Device::HOST)?.to_dtype(DType::F64)?.to_vec()
}

/// Returns cumulative sums of the weights, scaled to integers with a total of about 2^61. Integer sums are exact in any order, and need
/// no f64.
fn cumulative_weights(weights: &Tensor, greatest: &Tensor, n: usize) -> Result<Tensor> {
    /// The maximum number of weights for which one scale factor leaves enough digits for a small weight.
    const SHORT_LEN: usize = 1 << 18;
    let (op, total) = ("multinomial", 2f64.powi(61));
    let scalars = [Scalar::Float(total / n.next_power_of_two() as f64)];
    let scaled_weight = Expr::input(0) / Expr::input(1) * Expr::scalar(0);
    let whole = |inputs: &[&Tensor], scaled_weight: Expr| -> Result<Tensor> {
        Ok(elementwise::apply(op, inputs, Params::from_scalars(&scalars), &[scaled_weight.round()], &[DType::I64])?
            .remove(0))
    };
    let scaled_weights = whole(&[weights, greatest], scaled_weight.clone())?;
    if n <= SHORT_LEN {
        return scaled_weights.cumsum(-1);
    }
    let scale = Expr::constant(total) / Expr::input(0).max(1.0);
    let sum = scaled_weights.sum(-1, true)?;
    let scale = elementwise::apply(op, &[&sum], Params::default(), &[scale], &[DType::I64])?.remove(0);
    whole(&[weights, greatest, &scale], scaled_weight * Expr::input(2))?.cumsum(-1)
}

/// Returns a uniform random integer in `0..total`, for a total below 2^62: the upper half of the product of `total` and 62 random bits.
fn uniform_integer_below(total: &Expr) -> Expr {
    let high = |x: &Expr| x.shift_right(31.0);
    let low = |x: &Expr| x - high(x) * 2f64.powi(31);
    let (a, b) = (Expr::bits(0).shift_right(1.0), Expr::bits(1).shift_right(1.0));
    let (upper, lower) = (high(total), low(total));
    &a * &upper + high(&(a * &lower + &b * upper + high(&(b * lower))))
}

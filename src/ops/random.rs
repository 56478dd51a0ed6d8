//! Random tensors from a counter (Philox4x32-10): the same bits on every device.
//!
//! Every random operation takes the next stream of one process-wide generator; element `e` of its result is a function
//! of (seed, stream, e) alone. Nothing is stored: backward of a dropout computes its mask again.

use std::sync::{Mutex, PoisonError};

use super::draws::draw;
use super::elementwise::{self, Params};
use super::expr::Expr;
use super::philox::{Bits, Seed};
use crate::tensor::TensorOptions;
use crate::{DType, Device, Error, Graph, Result, Scalar, Shape, Tensor};

static GENERATOR: Mutex<Seed> = Mutex::new(Seed { key: 0, stream: 0 });

/// Starts the process-wide random generator anew (PyTorch's `manual_seed`). The same calls after the same seed give the
/// same numbers on every device. Without it the seed is 0.
///
/// ```
/// use claystone::{Device, Tensor, manual_seed};
/// manual_seed(7);
/// let a = Tensor::rand(&[4], Device::Cpu)?.to_vec::<f32>()?;
/// manual_seed(7);
/// assert_eq!(a, Tensor::rand(&[4], Device::Cpu)?.to_vec::<f32>()?);
/// # Ok::<(), claystone::Error>(())
/// ```
pub fn manual_seed(seed: u64) {
    *GENERATOR.lock().unwrap_or_else(PoisonError::into_inner) = Seed { key: seed, stream: 0 };
}

/// The seed of the next random operation, which is of this device.
fn next_seed(op: &'static str, device: Device) -> Result<Seed> {
    if Graph::is_capturing(device) {
        let reason = "not while a graph is captured: the generator is the host's, replays would draw the same again";
        return Err(Error::invalid(op, reason));
    }
    Ok(draw(|| {
        let mut generator = GENERATOR.lock().unwrap_or_else(PoisonError::into_inner);
        let seed = *generator;
        generator.stream = generator.stream.wrapping_add(1);
        seed
    }))
}

fn generate(op: &'static str, shape: Shape, options: TensorOptions, scalars: &[Scalar], expr: Expr) -> Result<Tensor> {
    let seed = next_seed(op, options.device)?;
    let out = Tensor::empty_like_shape(shape, options.dtype, options.device)?;
    elementwise::apply_into(op, &[], Params { scalars, seeds: &[seed] }, &[expr], &[&out])?;
    Ok(out)
}

impl Tensor {
    /// Uniform in [0, 1), never 1 in any dtype (PyTorch's `rand`). One launch.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] for integers and bool; [`Error::OutOfMemory`].
    pub fn rand(shape: impl Into<Shape>, options: impl Into<TensorOptions>) -> Result<Tensor> {
        let options = options.into();
        options.dtype.check_float("rand")?;
        // Halves keep as many bits as they have: rounding could give 1.
        let uniform = Expr::uniform(0);
        let expr = match options.dtype {
            DType::F16 => (uniform * 2048.0).floor() * (1.0 / 2048.0),
            DType::BF16 => (uniform * 256.0).floor() * (1.0 / 256.0),
            _ => uniform,
        };
        generate("rand", shape.into(), options, &[], expr)
    }

    /// Normal with mean 0 and variance 1, by Box and Muller's transform (PyTorch's `randn`). One launch.
    ///
    /// # Errors
    /// As [`Tensor::rand`].
    pub fn randn(shape: impl Into<Shape>, options: impl Into<TensorOptions>) -> Result<Tensor> {
        let options = options.into();
        options.dtype.check_float("randn")?;
        generate("randn", shape.into(), options, &[], Expr::normal(0))
    }

    /// Whole numbers uniform in `low..high`, of any dtype that is not bool (PyTorch's `randint`). One launch.
    ///
    /// ```
    /// use claystone::{DType, Device, Tensor};
    /// let dice = Tensor::randint(1, 7, &[100], (DType::I64, Device::Cpu))?.to_vec::<i64>()?;
    /// assert!(dice.iter().all(|d| (1..7).contains(d)));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] for an empty range or one of more than 2^31 numbers.
    pub fn randint(low: i64, high: i64, shape: impl Into<Shape>, options: impl Into<TensorOptions>) -> Result<Tensor> {
        let (op, options) = ("randint", options.into());
        if options.dtype == DType::Bool {
            return Err(Error::UnsupportedDType { op, dtype: DType::Bool, expected: "integers or floats" });
        }
        let range = high.checked_sub(low).filter(|r| (1..=1i64 << 31).contains(r));
        let Some(range) = range else {
            let reason = format!("{low}..{high} must hold between 1 and 2^31 numbers");
            return Err(Error::invalid(op, reason));
        };
        let scalars = [Scalar::Int(low), Scalar::Int(range)];
        let expr = Expr::bits(0) * Expr::scalar(1) / 4294967296.0 + Expr::scalar(0);
        generate(op, shape.into(), options, &scalars, expr)
    }

    /// The numbers `0..n` in random order, i64 (PyTorch's `randperm`). Shuffled on the host, then brought over.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub fn randperm(n: usize, device: Device) -> Result<Tensor> {
        const BLOCK: usize = 512;
        let out = Tensor::empty_like_shape(n, DType::I64, device)?; // fails where n is too large
        let mut order: Vec<i64> = Vec::new();
        order.try_reserve_exact(n).map_err(|_| Error::OutOfMemory {
            device: Device::Cpu,
            requested: out.storage.nbytes(),
            detail: "randperm shuffles on the host".into(),
        })?;
        order.extend(0..n as i64);
        let (seed, mut words) = (next_seed("randperm", device)?, [0i64; 2 * BLOCK]);
        for first in (0..n).step_by(BLOCK).rev() {
            seed.fill::<Bits, _>(2 * first as u64, &mut words, i64::from);
            for i in (first.max(1)..n.min(first + BLOCK)).rev() {
                let (high, low) = (words[2 * (i - first)] as u64, words[2 * (i - first) + 1] as u64);
                order.swap(i, ((u128::from(high << 32 | low) * (i as u128 + 1)) >> 64) as usize);
            }
        }
        out.storage.write(0, bytemuck::cast_slice(&order))?;
        Ok(out)
    }

    /// Sets elements to zero with probability `p` and scales the others by `1 / (1 - p)` (PyTorch's `dropout` in
    /// training). One launch forward, one backward; no mask is stored. Differentiable.
    ///
    /// # Errors
    /// [`Error::Invalid`] where `p` is not in `0.0..1.0`; [`Error::UnsupportedDType`] for integers.
    pub fn dropout(&self, p: f64) -> Result<Tensor> {
        let op = "dropout";
        if !(0.0..1.0).contains(&p) {
            return Err(Error::invalid(op, format!("the probability {p} is not in 0.0..1.0")));
        }
        self.dtype.check_float(op)?;
        let expr = Expr::uniform(0).lt(Expr::scalar(0)).select(0.0, Expr::input(0) * Expr::scalar(1));
        let scalars = [Scalar::Float(p), Scalar::Float(1.0 / (1.0 - p))];
        let params = Params { scalars: &scalars, seeds: &[next_seed(op, self.device())?] };
        elementwise::apply_tracked(op, &[self], params, &expr, self.dtype, &|i| expr.diff(i))
    }
}

//! Random tensors from a counter-based generator (Philox4x32-10), with the same bits on every device.
//!
//! Every random operation takes the next stream of a generator, by default the generator of the process. Element `e` of the result
//! depends only on (seed, stream, e). Therefore dropout stores no mask: the backward pass computes the mask again.

mod captured;
pub(crate) mod distributions;

use std::cell::RefCell;
use std::sync::{Arc, LazyLock, Mutex};

use super::elementwise;
use crate::autograd::{RandomSource, draw_seed};
use crate::device::capture::{self, is_capturing};
use crate::expr::philox::{Bits, Seed};
use crate::ops::dispatch::prelude::*;
use crate::sync;
use crate::tensor::TensorOptions;

/// A source of seeds for random operations (PyTorch's `Generator`): a seed and the number of draws made from it.
///
/// One generator serves all devices, and the same draws give the same numbers on every device. A clone is another handle on the same
/// generator.
///
/// ```
/// use claystone::{Device, Generator, Tensor, with_generator};
/// let generator = Generator::new(7);
/// let draw = || with_generator(&generator, || Tensor::rand(4, Device::Cpu))?.to_vec::<f32>();
/// let (first, second) = (draw()?, draw()?);
/// generator.manual_seed(7);
/// assert!(first == draw()? && second == draw()? && first != second);
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Generator(Arc<Mutex<Seed>>);

/// The generator of the process.
static GENERATOR: LazyLock<Generator> = LazyLock::new(|| Generator::new(0));

thread_local! {
    /// The generators of the enclosing calls of [`with_generator`] on this thread.
    static GENERATORS: RefCell<Vec<Generator>> = const { RefCell::new(Vec::new()) };
}

impl Generator {
    /// Creates a generator with the given seed.
    pub fn new(seed: u64) -> Generator {
        Generator(Arc::new(Mutex::new(Seed { key: seed, stream: 0 })))
    }

    /// Restarts the generator with a seed.
    pub fn manual_seed(&self, seed: u64) {
        self.set_state(Seed { key: seed, stream: 0 });
    }

    /// Returns the seed and the number of draws made since seeding (PyTorch's `get_state`).
    pub fn state(&self) -> Seed {
        *sync::lock(&self.0)
    }

    /// Sets the seed and the number of draws to a previous [`state`](Generator::state), so that draws continue from that state.
    pub fn set_state(&self, state: Seed) {
        *sync::lock(&self.0) = state;
    }

    /// Returns the generator that random operations of this thread draw from: the generator of the innermost [`with_generator`], or else
    /// the generator of the process.
    pub fn current() -> Generator {
        GENERATORS.with_borrow(|all| all.last().cloned()).unwrap_or_else(|| GENERATOR.clone())
    }

    /// Advances the generator by `draws` draws, and returns the seed of the first of these draws.
    fn take(&self, draws: u64) -> Seed {
        let mut state = sync::lock(&self.0);
        let seed = *state;
        state.stream = state.stream.wrapping_add(draws);
        seed
    }
}

/// Runs `f`. Until `f` returns, all random operations of this thread draw from `generator` instead of the generator of the process
/// (PyTorch's `generator=`). See [`Generator`].
pub fn with_generator<R>(generator: &Generator, f: impl FnOnce() -> R) -> R {
    struct Restore;
    impl Drop for Restore {
        fn drop(&mut self) {
            GENERATORS.with_borrow_mut(|all| all.pop());
        }
    }
    GENERATORS.with_borrow_mut(|all| all.push(generator.clone()));
    let _restore = Restore;
    f()
}

/// Restarts the process-wide random generator with a seed (PyTorch's `manual_seed`). After the same seed, the same calls give the same
/// numbers on every device. The initial seed is 0.
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
    GENERATOR.manual_seed(seed);
}

/// Draws the seed of the next random operation, which runs on `device`.
pub(crate) fn next_seed(device: Device) -> Result<RandomSource> {
    let generator = Generator::current();
    if !is_capturing(device) {
        return Ok(draw_seed(|| RandomSource { seed: generator.take(1), base: None }));
    }
    let mut made = Ok(());
    let drawn = draw_seed(|| {
        captured::next_draw(&generator, device).unwrap_or_else(|e| {
            made = Err(e);
            RandomSource { seed: Seed::default(), base: None }
        })
    });
    made.map(|()| drawn)
}

impl RandomSource {
    /// Returns the parameters of a formula that reads the given scalars and this seed.
    pub(crate) fn params<'a>(&'a self, scalars: &'a [Scalar]) -> Params<'a> {
        Params { scalars, seeds: std::slice::from_ref(&self.seed), base: self.base.as_deref() }
    }
}

fn new_random(
    op: &'static str,
    shape: Shape,
    options: TensorOptions,
    scalars: &[Scalar],
    expr: Expr,
) -> Result<Tensor> {
    let out = Tensor::empty_or_uninit(Layout::contiguous(shape), options.dtype, options.device)?;
    if out.is_uninit() {
        return Ok(out); // an empty result draws no seed
    }
    let drawn = next_seed(options.device)?;
    elementwise::apply_into(op, &[], drawn.params(scalars), &[expr], &[&out])?;
    Ok(out)
}

/// Returns the formula of uniform numbers in [0, 1) for a result of this dtype. For f16 and bf16, numbers are truncated to the dtype's
/// bits, because rounding could give 1.
pub(crate) fn uniform(dtype: DType) -> Expr {
    let uniform = Expr::uniform(0);
    match dtype {
        DType::F16 => (uniform * 2048.0).floor() * (1.0 / 2048.0),
        DType::BF16 => (uniform * 256.0).floor() * (1.0 / 256.0),
        _ => uniform,
    }
}

impl Tensor {
    /// Returns uniform random numbers in [0, 1); no dtype rounds a number to 1 (PyTorch's `rand`). One launch. Floats.
    #[track_caller]
    pub fn rand(shape: impl Into<Shape>, options: impl Into<TensorOptions>) -> Result<Tensor> {
        let _caller = Caller::enter();
        let options = options.into();
        options.dtype.check_float("rand")?;
        new_random("rand", shape.into(), options, &[], uniform(options.dtype))
    }

    /// Returns normal random numbers with mean 0 and variance 1, by the Box-Muller transform (PyTorch's `randn`). One launch.
    #[track_caller]
    pub fn randn(shape: impl Into<Shape>, options: impl Into<TensorOptions>) -> Result<Tensor> {
        let _caller = Caller::enter();
        let options = options.into();
        options.dtype.check_float("randn")?;
        new_random("randn", shape.into(), options, &[], Expr::normal(0))
    }

    /// Returns uniform random integers in `low..high`, of any dtype except bool (PyTorch's `randint`). One launch. Fails with
    /// [`Error::Invalid`] for an empty range, a range of more than 2^31 numbers, and a range outside that of the dtype.
    ///
    /// ```
    /// use claystone::{DType, Device, Tensor};
    /// let dice = Tensor::randint(1, 7, &[100], (DType::I64, Device::Cpu))?.to_vec::<i64>()?;
    /// assert!(dice.iter().all(|d| (1..7).contains(d)));
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn randint(low: i64, high: i64, shape: impl Into<Shape>, options: impl Into<TensorOptions>) -> Result<Tensor> {
        let _caller = Caller::enter();
        let (op, options) = ("randint", options.into());
        unsupported!(op if options.dtype == DType::Bool, DType::Bool, "integers or floats");
        let range = high.checked_sub(low).filter(|r| (1..=1i64 << 31).contains(r));
        let Some(range) = range else {
            fail!(op, "{low}..{high} must hold between 1 and 2^31 numbers");
        };
        let (dtype, last) = (options.dtype, high - 1);
        [low, last].into_iter().try_for_each(|end| Scalar::Int(end).check_within(op, dtype))?;
        let expr = Expr::bits(0) * Expr::scalar(1) / 4294967296.0 + Expr::scalar(0);
        if !dtype.is_float() || [low, last].iter().all(|&end| dtype.rounded(end as f64) == end as f64) {
            return new_random(op, shape.into(), options, &[low.into(), range.into()], expr);
        }
        // Large numbers are rounded when they are stored as floats, so results are clamped to the dtype's smallest and greatest numbers
        // in the range.
        let (first, last) = (dtype.at_least(low as f64), dtype.at_most(last as f64, false));
        invalid!(op if first > last, "{low}..{high} holds no number of {dtype}");
        let scalars = [low, range, first as i64, last as i64].map(Scalar::Int);
        new_random(op, shape.into(), options, &scalars, expr.clamp(Expr::scalar(2), Expr::scalar(3)))
    }

    /// Returns the numbers `0..n` in random order, as i64 (PyTorch's `randperm`). The numbers are shuffled on the host and then copied to
    /// the device.
    #[track_caller]
    pub fn randperm(n: usize, device: Device) -> Result<Tensor> {
        let _caller = Caller::enter();
        const BLOCK_LEN: usize = 512;
        capture::refuse_while_capturing(
            device,
            "randperm",
            "the host shuffles: every replay would copy the same order",
        )?;
        let out = Tensor::empty_with_shape(n, DType::I64, device)?; // fails if n is too large
        let mut order: Vec<i64> = Vec::new();
        order.try_reserve_exact(n).map_err(|_| Error::OutOfMemory {
            device: Device::HOST,
            requested: out.storage.nbytes(),
            detail: "randperm shuffles on the host".into(),
        })?;
        order.extend(0..n as i64);
        let (seed, mut words) = (next_seed(device)?.seed, [0i64; 2 * BLOCK_LEN]);
        for first in (0..n).step_by(BLOCK_LEN).rev() {
            seed.fill::<Bits, _>(2 * first as u64, &mut words, i64::from);
            for i in (first.max(1)..n.min(first + BLOCK_LEN)).rev() {
                let (high, low) = (words[2 * (i - first)] as u64, words[2 * (i - first) + 1] as u64);
                order.swap(i, ((u128::from(high << 32 | low) * (i as u128 + 1)) >> 64) as usize);
            }
        }
        out.storage.write(0, bytemuck::cast_slice(&order))?;
        Ok(out)
    }
}

//! The autograd state of a thread: modes such as recording and mixed precision, and data of the scopes that are open.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::expr::philox::Seed;
use crate::sync::OnDrop;
use crate::{DType, Result, Tensor};

/// The modes of a thread.
#[derive(Clone, Copy)]
pub(super) struct Modes {
    /// Whether operations on tracked tensors are recorded.
    grad_enabled: bool,
    /// Whether backward checks gradients for NaN ([`detect_anomaly`]).
    anomaly: bool,
    /// Whether nodes are recorded without their backward closures.
    dependencies_only: bool,
    /// Whether operations may leave a result uncomputed if gradients do not depend on it.
    gradients_only: bool,
    /// Whether hooks pack the tensors that operations save, or a budget watches them.
    pub(super) saved_hooks: bool,
    /// The dtype of the innermost [`autocast`] scope.
    autocast_dtype: Option<DType>,
    /// The number of nested [`autocast`] scopes.
    autocast_depth: u32,
}

/// The data of a thread's open scopes. Modes are separate, because every operation reads them, and plain cells are faster to reach.
#[derive(Default)]
pub(super) struct Scopes {
    /// Parameters already cast, kept until the outermost [`autocast`] scope ends.
    cast_parameters: RefCell<HashMap<CastKey, Tensor>>,
    /// Callbacks to run at the end of the backward pass in progress; None if none is in progress.
    pub(super) callbacks: RefCell<Option<Vec<Callback>>>,
    /// The seeds drawn so far: one list for each active call of [`record_draws`].
    draws: RefCell<Vec<Vec<RandomSource>>>,
    /// The seeds that [`replay_draws`] has not returned yet.
    replayed: RefCell<Option<VecDeque<RandomSource>>>,
}

/// A function that [`queue_callback`](super::queue_callback) runs at the end of a backward pass.
pub(super) type Callback = Box<dyn FnOnce() -> Result<()>>;

#[derive(PartialEq, Eq, Hash)]
struct CastKey {
    node: u64,
    /// The storage's version. An in-place change, such as an optimiser's step, raises it, so the parameter is cast again.
    version: u64,
    dtype: DType,
    /// Whether the cast was recorded. An unrecorded cast passes no gradient to the parameter, so it is not reused where recording is on.
    recorded: bool,
}

/// The seed of a random operation.
#[derive(Clone)]
pub(crate) struct RandomSource {
    pub(crate) seed: Seed,
    /// For an operation captured in a graph: a number in device memory that every replay adds to the seed.
    pub(crate) base: Option<Arc<Tensor>>,
}

thread_local! {
    static MODES: Cell<Modes> = const {
        Cell::new(Modes {
            grad_enabled: true,
            anomaly: false,
            dependencies_only: false,
            gradients_only: false,
            saved_hooks: false,
            autocast_dtype: None,
            autocast_depth: 0,
        })
    };
    pub(super) static SCOPES: Scopes = Scopes::default();
}

/// Applies `change` to the modes of this thread. Returns the value that `change` returned.
#[inline]
fn change_modes<R>(change: impl FnOnce(&mut Modes) -> R) -> R {
    let mut modes = MODES.get();
    let result = change(&mut modes);
    MODES.set(modes);
    result
}

/// True if this thread records operations on tracked tensors.
pub fn is_grad_enabled() -> bool {
    MODES.get().grad_enabled
}

/// Runs `f` without recording operations on this thread (PyTorch's `torch.no_grad`). Inside `f`, leaves may be changed in place.
///
/// ```
/// use claystone::{Device, Tensor, no_grad};
/// let w = Tensor::ones(&[2], Device::Cpu)?.requires_grad_(true)?;
/// assert!(w.exp()?.requires_grad());
/// assert!(!no_grad(|| w.exp())?.requires_grad());
/// # Ok::<(), claystone::Error>(())
/// ```
pub fn no_grad<R>(f: impl FnOnce() -> R) -> R {
    with_flag(|modes| &mut modes.grad_enabled, false, f)
}

/// Runs `f` with recording on, even inside [`no_grad`] (PyTorch's `torch.enable_grad`).
pub fn enable_grad<R>(f: impl FnOnce() -> R) -> R {
    with_flag(|modes| &mut modes.grad_enabled, true, f)
}

/// Does the same as [`no_grad`], under the name of PyTorch's stricter form (`torch.inference_mode`). Tensors made inside
/// are ordinary tensors, because claystone's tensors do not have the overhead that PyTorch's mode avoids.
pub fn inference_mode<R>(f: impl FnOnce() -> R) -> R {
    no_grad(f)
}

/// Switches recording on this thread on or off, and returns the previous setting (PyTorch's `torch.set_grad_enabled`).
/// Prefer [`no_grad`] and [`enable_grad`], which restore the setting when they return.
pub fn set_grad_enabled(enabled: bool) -> bool {
    change_modes(|modes| std::mem::replace(&mut modes.grad_enabled, enabled))
}

/// Runs `f`; every backward pass on this thread then checks the gradients of each operation for NaN. The error names the
/// first operation that returned NaN (PyTorch's `torch.autograd.detect_anomaly`). The check waits for the device after
/// every operation, so use it only to locate errors.
///
/// ```
/// use claystone::{Device, Tensor, autograd::detect_anomaly};
/// let x = Tensor::zeros(2, Device::Cpu)?.requires_grad_(true)?;
/// let loss = x.sqrt()?.mul(&x)?.sum((), false)?; // 0 * infinity, backwards
/// let error = detect_anomaly(|| loss.backward()).unwrap_err();
/// assert!(error.to_string().starts_with("sqrt: ") && error.to_string().contains("NaN"));
/// # Ok::<(), claystone::Error>(())
/// ```
pub fn detect_anomaly<R>(f: impl FnOnce() -> R) -> R {
    with_flag(|modes| &mut modes.anomaly, true, f)
}

pub(super) fn anomaly() -> bool {
    MODES.get().anomaly
}

/// Runs `f`. Recorded nodes keep their inputs, but not the closures that compute gradients.
pub(super) fn dependencies_only<R>(f: impl FnOnce() -> R) -> R {
    with_flag(|modes| &mut modes.dependencies_only, true, f)
}

pub(super) fn is_dependencies_only() -> bool {
    MODES.get().dependencies_only
}

/// Runs `f`, whose caller needs only gradients. Operations inside may leave a result uncomputed if gradients do not depend on it.
pub(crate) fn gradients_only<R>(f: impl FnOnce() -> R) -> R {
    with_flag(|modes| &mut modes.gradients_only, true, f)
}

/// True inside [`gradients_only`]: a result that gradients do not depend on may be left uncomputed, with arbitrary elements.
pub(crate) fn is_gradients_only() -> bool {
    MODES.get().gradients_only
}

/// True if hooks pack, or a budget watches, the tensors that recorded operations save.
#[inline]
pub(super) fn packs_saved_tensors() -> bool {
    let modes = MODES.get();
    modes.saved_hooks && modes.grad_enabled && !modes.dependencies_only
}

/// Runs `f` with a flag of this thread set, and restores the flag even if `f` panics.
#[inline]
pub(super) fn with_flag<R>(flag: impl Fn(&mut Modes) -> &mut bool, value: bool, f: impl FnOnce() -> R) -> R {
    let before = change_modes(|modes| std::mem::replace(flag(modes), value));
    let _restore = OnDrop(|| change_modes(|modes| *flag(modes) = before));
    f()
}

/// Runs `f` in mixed precision (PyTorch's `torch.autocast`).
///
/// Matrix products, linear layers, convolutions, attention, einsum and `prelu` convert their inputs to `dtype` (BF16 or
/// F16) and return that dtype. Softmax, losses, norms, distances, sums, products, `cumsum`, `cumprod`, powers,
/// exponentials and logarithms convert half-precision inputs to f32 and return f32. Other operations keep the dtype of
/// their inputs. f64 is never converted.
///
/// Within a scope, each parameter is cast only once, however often it is used. A `dtype` of `None` disables autocast
/// inside `f`. Backward always runs without autocast, in the dtypes that forward used.
///
/// ```
/// use claystone::{DType, Device, Tensor, autocast};
/// let (x, w) = (Tensor::ones(&[2, 3], Device::Cpu)?, Tensor::ones(&[4, 3], Device::Cpu)?.requires_grad_(true)?);
/// autocast(DType::BF16, || {
///     let y = x.linear(&w, None)?;
///     assert_eq!((y.dtype(), y.softmax(-1)?.dtype()), (DType::BF16, DType::F32));
///     assert_eq!(autocast(None, || x.linear(&w, None))?.dtype(), DType::F32);
///     y.sum((), false)?.backward()
/// })?;
/// assert_eq!(w.grad().unwrap().dtype(), DType::F32);
/// # Ok::<(), claystone::Error>(())
/// ```
pub fn autocast<R>(dtype: impl Into<Option<DType>>, f: impl FnOnce() -> R) -> R {
    let before = change_modes(|modes| {
        modes.autocast_depth += 1;
        std::mem::replace(&mut modes.autocast_dtype, dtype.into())
    });
    let _restore = OnDrop(|| {
        let depth = change_modes(|modes| {
            modes.autocast_dtype = before;
            modes.autocast_depth -= 1;
            modes.autocast_depth
        });
        if depth == 0 {
            // The map is taken before its tensors are dropped: dropping a tensor may run code that borrows the map.
            drop(SCOPES.with(|scopes| scopes.cast_parameters.take()));
        }
    });
    f()
}

/// Returns the dtype of this thread's [`autocast`] scope (PyTorch's `torch.get_autocast_dtype`); None outside any scope.
#[inline]
pub fn autocast_dtype() -> Option<DType> {
    MODES.get().autocast_dtype
}

/// Returns `t` in `dtype`. Within a scope, a parameter is cast only once; later calls return the first cast.
pub(crate) fn cast_once(t: &Tensor, dtype: DType) -> Result<Tensor> {
    let Some(node) = t.leaf_id().filter(|_| t.dtype != dtype) else { return t.to_dtype(dtype) };
    let key = CastKey { node, version: t.storage.version(), dtype, recorded: is_grad_enabled() };
    if let Some(known) = SCOPES.with(|s| s.cast_parameters.borrow().get(&key).map(Tensor::shallow_clone)) {
        return Ok(known);
    }
    let made = t.to_dtype(dtype)?;
    SCOPES.with(|s| s.cast_parameters.borrow_mut().insert(key, made.shallow_clone()));
    Ok(made)
}

/// Returns the seed of this thread's next random operation: the next replayed seed, or else `fresh()`.
pub(crate) fn draw_seed(fresh: impl FnOnce() -> RandomSource) -> RandomSource {
    let again = SCOPES.with(|s| s.replayed.borrow_mut().as_mut().and_then(VecDeque::pop_front));
    let seed = again.unwrap_or_else(fresh);
    SCOPES.with(|s| s.draws.borrow_mut().iter_mut().for_each(|list| list.push(seed.clone())));
    seed
}

/// Runs `f`. Returns its result and the seeds drawn inside.
pub(super) fn record_draws<R>(f: impl FnOnce() -> R) -> (R, Vec<RandomSource>) {
    let depth = SCOPES.with(|s| {
        s.draws.borrow_mut().push(Vec::new());
        s.draws.borrow().len() - 1
    });
    let _remove = OnDrop(|| SCOPES.with(|s| s.draws.borrow_mut().truncate(depth)));
    let result = f();
    (result, SCOPES.with(|s| std::mem::take(&mut s.draws.borrow_mut()[depth])))
}

/// Runs `f`. Random operations inside draw `seeds` again, in order, even if other threads draw in between.
pub(crate) fn replay_draws<R>(seeds: &[RandomSource], f: impl FnOnce() -> R) -> R {
    let queue = Some(seeds.iter().cloned().collect());
    let mut before = SCOPES.with(|s| s.replayed.replace(queue));
    let _restore = OnDrop(|| SCOPES.with(|s| *s.replayed.borrow_mut() = before.take()));
    f()
}

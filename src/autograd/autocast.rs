//! A thread's mixed-precision scope. `ops::dispatch::autocast` says what operations do in it.

use std::cell::RefCell;
use std::collections::HashMap;

use super::is_grad_enabled;
use super::modes::{change_modes, modes};
use crate::{DType, Result, Tensor};

thread_local! {
    /// Parameters already cast, kept until the outermost scope ends.
    static CAST_PARAMETERS: RefCell<HashMap<CastKey, Tensor>> = RefCell::new(HashMap::new());
}

#[derive(PartialEq, Eq, Hash)]
struct CastKey {
    node: u64,
    /// The storage's version: after an optimiser's step the parameter is cast again.
    version: u64,
    dtype: DType,
    /// Whether the cast was recorded. A cast that was not passes no gradient on.
    recorded: bool,
}

/// Runs `f` in mixed precision (PyTorch's `torch.autocast`).
///
/// Matrix products, linear layers, convolutions, attention, einsum and `prelu` convert their inputs to `dtype`, BF16 or
/// F16, and return it. Softmax, losses, norms, distances, sums and products (cumulative ones too), powers, exponentials
/// and logarithms convert half-precision inputs to f32, and return f32. Other operations keep the dtype of their
/// inputs, and f64 is never converted.
///
/// A parameter is cast once a scope, however often it is used. `None` disables autocast inside `f`. Backward always
/// runs without autocast, in the dtypes of forward.
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
    struct Restore(Option<DType>);
    impl Drop for Restore {
        fn drop(&mut self) {
            let depth = change_modes(|modes| {
                modes.autocast_dtype = self.0;
                modes.autocast_depth -= 1;
                modes.autocast_depth
            });
            if depth == 0 {
                // Taken out first: dropping a tensor may run code that uses the map.
                drop(CAST_PARAMETERS.take());
            }
        }
    }
    let before = change_modes(|modes| {
        modes.autocast_depth += 1;
        std::mem::replace(&mut modes.autocast_dtype, dtype.into())
    });
    let _restore = Restore(before);
    f()
}

/// Returns the dtype of this thread's [`autocast`] scope (PyTorch's `torch.get_autocast_dtype`); None outside any scope.
#[inline]
pub fn autocast_dtype() -> Option<DType> {
    modes().autocast_dtype
}

/// Returns the tensor in `dtype`. A parameter is cast only once a scope.
pub(crate) fn cast_once(t: &Tensor, dtype: DType) -> Result<Tensor> {
    let Some(node) = t.leaf_id().filter(|_| t.dtype != dtype) else { return t.to_dtype(dtype) };
    let key = CastKey { node, version: t.storage.version(), dtype, recorded: is_grad_enabled() };
    if let Some(known) = CAST_PARAMETERS.with_borrow(|weights| weights.get(&key).map(Tensor::shallow_clone)) {
        return Ok(known);
    }
    let made = t.to_dtype(dtype)?;
    CAST_PARAMETERS.with_borrow_mut(|weights| weights.insert(key, made.shallow_clone()));
    Ok(made)
}

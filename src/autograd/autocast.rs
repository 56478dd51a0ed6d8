//! The mixed-precision mode of a thread. `ops::dispatch::autocast` defines the dtype that each operation uses in this mode.

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
    /// The storage's version. An in-place change, such as an optimiser's step, raises it, so the parameter is cast again.
    version: u64,
    dtype: DType,
    /// Whether the cast was recorded. An unrecorded cast passes no gradient to the parameter, so it is not reused where recording is on.
    recorded: bool,
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
    struct Restore(Option<DType>);
    impl Drop for Restore {
        fn drop(&mut self) {
            let depth = change_modes(|modes| {
                modes.autocast_dtype = self.0;
                modes.autocast_depth -= 1;
                modes.autocast_depth
            });
            if depth == 0 {
                // The map is taken before its tensors are dropped: dropping a tensor may run code that borrows the map.
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

/// Returns `t` in `dtype`. Within a scope, a parameter is cast only once; later calls return the first cast.
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

//! The scope of mixed precision that a thread is in. What operations do in it is in `ops::dispatch::autocast`.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;

use super::is_grad_enabled;
use crate::{DType, Result, Tensor};

thread_local! {
    static ACTIVE: Cell<Option<DType>> = const { Cell::new(None) };
    /// Parameters cast already, by their place in the graph; kept while there is any scope.
    static WEIGHTS: RefCell<HashMap<Weight, Tensor>> = RefCell::new(HashMap::new());
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

#[derive(PartialEq, Eq, Hash)]
struct Weight {
    node: u64,
    /// Of its storage: an optimiser's step makes another weight of it.
    version: u64,
    dtype: DType,
    /// A cast made without recording passes no gradient on.
    recorded: bool,
}

/// Runs `f` in mixed precision (PyTorch's `torch.autocast`): matrix products, linear layers, convolutions, attention, einsum
/// and `prelu` take their inputs in `dtype`, BF16 or F16, and give it; softmax, losses, norms, distances, sums and products
/// (cumulative ones too), powers, exponentials and logarithms take halves in f32, and give that. Everything else keeps the
/// dtype of its inputs. A parameter is cast once a scope, however often it
/// is used. f64 stays as it is. `None` switches it off inside; backward runs without, in the dtypes of forward.
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
            ACTIVE.set(self.0);
            DEPTH.set(DEPTH.get() - 1);
            if DEPTH.get() == 0 {
                // Taken out first: dropping a tensor may run anything.
                drop(WEIGHTS.take());
            }
        }
    }
    DEPTH.set(DEPTH.get() + 1);
    let _restore = Restore(ACTIVE.replace(dtype.into()));
    f()
}

/// What [`autocast`] this thread is in (PyTorch's `torch.get_autocast_dtype`, None where that is not enabled).
#[inline]
pub fn autocast_dtype() -> Option<DType> {
    ACTIVE.get()
}

/// The tensor in `dtype`; of a parameter the same one each time in a scope.
pub(crate) fn cast_once(t: &Tensor, dtype: DType) -> Result<Tensor> {
    let Some(node) = t.leaf_id().filter(|_| t.dtype != dtype) else { return t.to_dtype(dtype) };
    let key = Weight { node, version: t.storage.version(), dtype, recorded: is_grad_enabled() };
    if let Some(known) = WEIGHTS.with_borrow(|weights| weights.get(&key).map(Tensor::shallow_clone)) {
        return Ok(known);
    }
    let made = t.to_dtype(dtype)?;
    WEIGHTS.with_borrow_mut(|weights| weights.insert(key, made.shallow_clone()));
    Ok(made)
}

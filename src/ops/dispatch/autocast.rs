//! Mixed precision: products in half, what sums and what exponentiates in f32, without a word in the model.
//!
//! Public methods ask one of two questions before anything else, [`lowered`] and [`widened`], and where these give tensors
//! start again with them. Casts are recorded like any others, so gradients arrive in the dtype of what was cast.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;

use smallvec::SmallVec;

use crate::{DType, Error, Result, Tensor, is_grad_enabled};

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
pub fn autocast_dtype() -> Option<DType> {
    ACTIVE.get()
}

/// The inputs of a product in the scope's dtype; None where they are in it, or there is no scope, or one is no float up to
/// f32.
#[inline] // what gives tensors is moved even where it gives none
pub(crate) fn lowered(op: &'static str, inputs: &[&Tensor]) -> Result<Option<SmallVec<[Tensor; 3]>>> {
    match ACTIVE.get() {
        None => Ok(None),
        Some(dtype) => lower(op, inputs, dtype),
    }
}

fn lower(op: &'static str, inputs: &[&Tensor], dtype: DType) -> Result<Option<SmallVec<[Tensor; 3]>>> {
    let halves_or_f32 = |t: &&Tensor| matches!(t.dtype, DType::F32 | DType::F16 | DType::BF16);
    if !matches!(dtype, DType::BF16 | DType::F16 | DType::F32) {
        return Err(Error::UnsupportedDType { op, dtype, expected: "bf16 or f16 as the dtype of autocast" });
    }
    if inputs.iter().all(|t| t.dtype == dtype) || !inputs.iter().all(halves_or_f32) {
        return Ok(None);
    }
    inputs.iter().map(|t| cast(t, dtype)).collect::<Result<_>>().map(Some)
}

/// The elementwise operations that PyTorch's autocast takes in f32.
const WIDE: &[&str] = &[
    "acos",
    "asin",
    "cosh",
    "erfinv",
    "exp",
    "expm1",
    "log",
    "log10",
    "log1p",
    "log2",
    "pow",
    "pow_scalar",
    "rdiv_scalar",
    "reciprocal",
    "rpow_scalar",
    "rsqrt",
    "sinh",
    "softplus",
    "softplus_beta",
    "tan",
];

/// [`widened`] for the elementwise operation of this name.
pub(crate) fn widened_row(row: &str, inputs: &[&Tensor]) -> Result<Option<SmallVec<[Tensor; 3]>>> {
    if WIDE.contains(&row) { widened(inputs) } else { Ok(None) }
}

/// Halves among the inputs as f32; None where there are none, or there is no scope.
#[inline]
pub(crate) fn widened(inputs: &[&Tensor]) -> Result<Option<SmallVec<[Tensor; 3]>>> {
    match ACTIVE.get() {
        None => Ok(None),
        Some(_) => widen(inputs),
    }
}

fn widen(inputs: &[&Tensor]) -> Result<Option<SmallVec<[Tensor; 3]>>> {
    let half = |t: &Tensor| matches!(t.dtype, DType::F16 | DType::BF16);
    if !inputs.iter().any(|t| half(t)) {
        return Ok(None);
    }
    let wide = |t: &&Tensor| if half(t) { t.to_dtype(DType::F32) } else { Ok(t.shallow_clone()) };
    inputs.iter().map(wide).collect::<Result<_>>().map(Some)
}

/// The tensor in `dtype`; of a parameter the same one each time.
fn cast(t: &Tensor, dtype: DType) -> Result<Tensor> {
    let Some(node) = t.leaf_number().filter(|_| t.dtype != dtype) else { return t.to_dtype(dtype) };
    let key = Weight { node, version: t.storage.version(), dtype, recorded: is_grad_enabled() };
    if let Some(known) = WEIGHTS.with_borrow(|weights| weights.get(&key).map(Tensor::shallow_clone)) {
        return Ok(known);
    }
    let made = t.to_dtype(dtype)?;
    WEIGHTS.with_borrow_mut(|weights| weights.insert(key, made.shallow_clone()));
    Ok(made)
}

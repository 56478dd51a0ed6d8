//! The precision of f32 matrix products: [`set_float32_matmul_precision`].

use std::cell::Cell;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use crate::error::Excerpt;
use crate::sync::OnDrop;
use crate::{Error, Result};

const PRECISION_NAMES: [&str; 3] = ["highest", "high", "medium"];

/// The precision for all threads, as an index into `PRECISION_NAMES`.
static PRECISION: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// The precision that [`with_matmul_precision`] set on this thread. Takes precedence over `PRECISION`.
    static SCOPED_PRECISION: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Sets the precision of f32 matrix products on devices with tensor cores, for all threads, from the next operation on
/// (PyTorch's `set_float32_matmul_precision`):
///
/// - `"highest"`, the default: the precision of f32. Each f32 is split into a sum of three bf16 for the tensor cores. The split is
///   exact for values above 2⁻¹⁰²; smaller values may lose bits below 2⁻¹³³.
/// - `"high"`: each f32 is split into a sum of two bf16 (16 bits), for about half the work.
/// - `"medium"`: the first 11 bits of each f32 are multiplied (TF32), for a sixth of the work. PyTorch computes convolutions in TF32 on
///   CUDA unless `torch.backends.cudnn.allow_tf32` is false. A NaN whose first 10 bits of payload are zeros counts as an infinity.
///
/// On devices without tensor cores, for small matrices, and for every other dtype, all three settings give the same results.
///
/// ```
/// claystone::set_float32_matmul_precision("high")?;
/// assert_eq!(claystone::get_float32_matmul_precision(), "high");
/// claystone::set_float32_matmul_precision("highest")?;
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`] for any other name.
pub fn set_float32_matmul_precision(precision: &str) -> Result<()> {
    let index = PRECISION_NAMES.iter().position(|&name| name == precision).ok_or_else(|| {
        let reason = format!("'{}' is not a precision: use highest, high or medium", Excerpt(precision));
        Error::invalid("set_float32_matmul_precision", reason)
    })?;
    PRECISION.store(index, Relaxed);
    Ok(())
}

/// Returns the current precision: the precision of the enclosing [`with_precision`](crate::with_precision) on this thread, otherwise the last
/// precision passed to [`set_float32_matmul_precision`] (PyTorch's `get_float32_matmul_precision`).
pub fn get_float32_matmul_precision() -> &'static str {
    PRECISION_NAMES[current_index()]
}

#[inline]
fn current_index() -> usize {
    SCOPED_PRECISION.get().unwrap_or_else(|| PRECISION.load(Relaxed))
}

/// Returns the number of bf16 terms into which each f32 is split. 1 means that f32 is not split but multiplied as TF32.
pub(crate) fn split_terms() -> usize {
    3 - current_index()
}

/// Runs `f` with the precision `"highest"` on this thread, or with `"high"` if `highest` is false.
pub(crate) fn with_matmul_precision<R>(highest: bool, f: impl FnOnce() -> R) -> R {
    let before = SCOPED_PRECISION.replace(Some(usize::from(!highest)));
    let _restore = OnDrop(|| SCOPED_PRECISION.set(before));
    f()
}

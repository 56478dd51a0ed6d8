//! The precision of f32 matrix products: [`set_float32_matmul_precision`].

use std::cell::Cell;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use crate::error::Excerpt;
use crate::{Error, Result};

const NAMES: [&str; 3] = ["highest", "high", "medium"];

/// An index of `NAMES`.
static PRECISION: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// The precision of [`with_matmul_precision`] on this thread, which takes precedence.
    static SCOPE: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Sets the precision of f32 matrix products on devices with tensor cores (PyTorch's `set_float32_matmul_precision`), for the
/// process, from the next operation on:
///
/// - `"highest"`, the default: the precision of f32. Tensor cores compute with each f32 split into a sum of three bf16, which is
///   exact for values above 2⁻¹⁰²; of smaller ones, bits below 2⁻¹³³ may be lost.
/// - `"high"`: each f32 is split into a sum of two bf16 (16 bits), for about half the work.
/// - `"medium"`: of each f32 the first 11 bits are multiplied (TF32), for a sixth of the work. PyTorch computes convolutions like this on
///   CUDA unless `torch.backends.cudnn.allow_tf32` is false. A NaN whose first 10 bits of payload are zeros counts as an infinity.
///
/// Without tensor cores, for small matrices, and for every other dtype all three are the same.
///
/// ```
/// claystone::set_float32_matmul_precision("high")?;
/// assert_eq!(claystone::get_float32_matmul_precision(), "high");
/// claystone::set_float32_matmul_precision("highest")?;
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// # Errors
/// [`Error::Invalid`] for any other word.
pub fn set_float32_matmul_precision(precision: &str) -> Result<()> {
    let index = NAMES.iter().position(|&name| name == precision).ok_or_else(|| {
        let reason = format!("'{}' is no precision: write highest, high or medium", Excerpt(precision));
        Error::invalid("set_float32_matmul_precision", reason)
    })?;
    PRECISION.store(index, Relaxed);
    Ok(())
}

/// The precision that [`set_float32_matmul_precision`] set last (PyTorch's `get_float32_matmul_precision`), or that of the
/// [`with_precision`](crate::with_precision) that this thread is in.
pub fn get_float32_matmul_precision() -> &'static str {
    NAMES[current()]
}

#[inline]
fn current() -> usize {
    SCOPE.get().unwrap_or_else(|| PRECISION.load(Relaxed))
}

/// The number of bf16 that an f32 is split into; with 1 it is not split, and multiplied as TF32.
pub(crate) fn planes() -> usize {
    3 - current()
}

/// Runs `f` with the precision `"highest"` or `"high"` on this thread.
pub(crate) fn with_matmul_precision<R>(highest: bool, f: impl FnOnce() -> R) -> R {
    struct Restore(Option<usize>);
    impl Drop for Restore {
        fn drop(&mut self) {
            SCOPE.set(self.0);
        }
    }
    let _restore = Restore(SCOPE.replace(Some(usize::from(!highest))));
    f()
}

//! How exact matrix products of f32 are: [`set_float32_matmul_precision`].

use std::cell::Cell;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;

use crate::error::Excerpt;
use crate::{Error, Result};

const NAMES: [&str; 3] = ["highest", "high", "medium"];

/// An index of `NAMES`.
static PRECISION: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// What a thread has in its place for a while.
    static SCOPE: Cell<Option<usize>> = const { Cell::new(None) };
}

/// How exact matrix products of f32 are on devices with tensor cores (PyTorch's `set_float32_matmul_precision`), for the
/// whole process, from the next operation on:
///
/// - `"highest"`, the default: errors as in f32. Tensor cores are used with each f32 as the sum of three bf16, which is
///   exact above 2⁻¹⁰²; below, digits under 2⁻¹³³ may be lost.
/// - `"high"` and `"medium"`: each f32 as the sum of two bf16 (16 bits), for about half the work.
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

/// What [`set_float32_matmul_precision`] set last (PyTorch's `get_float32_matmul_precision`), or the
/// [`with_precision`](crate::with_precision) that this thread is in.
pub fn get_float32_matmul_precision() -> &'static str {
    NAMES[current()]
}

#[inline]
fn current() -> usize {
    SCOPE.get().unwrap_or_else(|| PRECISION.load(Relaxed))
}

/// How many bf16 stand for an f32.
pub(crate) fn planes() -> usize {
    if current() == 0 { 3 } else { 2 }
}

/// Runs `f` with products of f32 on this thread as `"highest"` or else as `"high"` has them.
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

//! A thread's modes for operations on tracked tensors: whether to record them, and whether to check gradients for NaN.

use std::cell::Cell;

thread_local! {
    /// Whether operations on tracked tensors are recorded.
    static GRAD_ENABLED: Cell<bool> = const { Cell::new(true) };
    /// Whether backward checks gradients for NaN.
    static ANOMALY: Cell<bool> = const { Cell::new(false) };
    /// Whether nodes are recorded without closures.
    static DEPENDENCIES_ONLY: Cell<bool> = const { Cell::new(false) };
    /// Whether results that gradients do not depend on may be left uncomputed.
    static GRADIENTS_ONLY: Cell<bool> = const { Cell::new(false) };
}

/// True if this thread records operations on tracked tensors.
pub fn is_grad_enabled() -> bool {
    GRAD_ENABLED.get()
}

/// Runs `f` without recording operations on this thread (PyTorch's `torch.no_grad`). Inside, tracked leaves may be changed in place.
///
/// ```
/// use claystone::{Device, Tensor, no_grad};
/// let w = Tensor::ones(&[2], Device::Cpu)?.requires_grad_(true)?;
/// assert!(w.exp()?.requires_grad());
/// assert!(!no_grad(|| w.exp())?.requires_grad());
/// # Ok::<(), claystone::Error>(())
/// ```
pub fn no_grad<R>(f: impl FnOnce() -> R) -> R {
    with_flag(&GRAD_ENABLED, false, f)
}

/// Runs `f` with recording on, even inside [`no_grad`] (PyTorch's `torch.enable_grad`).
pub fn enable_grad<R>(f: impl FnOnce() -> R) -> R {
    with_flag(&GRAD_ENABLED, true, f)
}

/// The same as [`no_grad`], under the name of PyTorch's stricter form (`torch.inference_mode`). Tensors made inside are
/// ordinary tensors, because claystone's tensors do not have the overhead that PyTorch's mode avoids.
pub fn inference_mode<R>(f: impl FnOnce() -> R) -> R {
    no_grad(f)
}

/// Switches recording on this thread on or off, and returns the previous setting (PyTorch's `torch.set_grad_enabled`).
/// Prefer [`no_grad`] and [`enable_grad`], which restore the setting.
pub fn set_grad_enabled(enabled: bool) -> bool {
    GRAD_ENABLED.replace(enabled)
}

/// Runs `f` with a check for NaN in the gradients of each operation of every backward pass on this thread. The error
/// names the first operation that returned NaN (PyTorch's `torch.autograd.detect_anomaly`). The check waits for the
/// device after every operation, so use it only to find errors.
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
    with_flag(&ANOMALY, true, f)
}

pub(super) fn anomaly() -> bool {
    ANOMALY.get()
}

/// Runs `f` recording only the dependencies between nodes, without the closures that differentiate them.
pub(super) fn dependencies_only<R>(f: impl FnOnce() -> R) -> R {
    with_flag(&DEPENDENCIES_ONLY, true, f)
}

pub(super) fn is_dependencies_only() -> bool {
    DEPENDENCIES_ONLY.get()
}

/// Runs `f`, which calls an operation only for its gradients; a result that the gradients do not depend on need not be computed.
pub(crate) fn gradients_only<R>(f: impl FnOnce() -> R) -> R {
    with_flag(&GRADIENTS_ONLY, true, f)
}

/// True if results that gradients do not depend on may have arbitrary elements.
pub(crate) fn is_gradients_only() -> bool {
    GRADIENTS_ONLY.get()
}

/// Runs `f` with a flag of this thread set, and restores the flag even if `f` panics.
fn with_flag<R>(flag: &'static std::thread::LocalKey<Cell<bool>>, value: bool, f: impl FnOnce() -> R) -> R {
    struct Restore(&'static std::thread::LocalKey<Cell<bool>>, bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            self.0.set(self.1);
        }
    }
    let _restore = Restore(flag, flag.replace(value));
    f()
}

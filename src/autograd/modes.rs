//! What this thread does with operations on tracked tensors: record them or not, look for NaN or not.

use std::cell::Cell;

thread_local! {
    static GRAD_ENABLED: Cell<bool> = const { Cell::new(true) };
    static ANOMALY: Cell<bool> = const { Cell::new(false) };
    static DEPENDENCIES_ONLY: Cell<bool> = const { Cell::new(false) };
    static GRADIENTS_ONLY: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread records operations on tracked tensors.
pub fn is_grad_enabled() -> bool {
    GRAD_ENABLED.get()
}

/// Runs `f` without recording anything in this thread (PyTorch's `torch.no_grad`). In-place changes of tracked leaves are
/// allowed inside, which is what an optimiser's step does.
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

/// Runs `f` recording, inside a [`no_grad`] too (PyTorch's `torch.enable_grad`).
pub fn enable_grad<R>(f: impl FnOnce() -> R) -> R {
    with_flag(&GRAD_ENABLED, true, f)
}

/// [`no_grad`] by the name that PyTorch gives its stricter form (`torch.inference_mode`). Tensors made inside are ordinary
/// ones here: what they would save, claystone spends on no tensor.
pub fn inference_mode<R>(f: impl FnOnce() -> R) -> R {
    no_grad(f)
}

/// Switches recording in this thread on or off until further notice and gives what it was (PyTorch's
/// `torch.set_grad_enabled`). [`no_grad`] and [`enable_grad`] put it back by themselves.
pub fn set_grad_enabled(enabled: bool) -> bool {
    GRAD_ENABLED.replace(enabled)
}

/// Runs `f` with every backward of this thread looking for NaN in the gradients of each operation, and naming the first
/// that gave one (PyTorch's `torch.autograd.detect_anomaly`). Waits for the device after every operation: for finding
/// errors only.
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

/// Whether gradients are looked at for NaN.
pub(super) fn anomaly() -> bool {
    ANOMALY.get()
}

/// Runs `f` recording which nodes depend on which, without the closures that differentiate them.
pub(super) fn dependencies_only<R>(f: impl FnOnce() -> R) -> R {
    with_flag(&DEPENDENCIES_ONLY, true, f)
}

/// Whether nodes are recorded without closures.
pub(super) fn is_dependencies_only() -> bool {
    DEPENDENCIES_ONLY.get()
}

/// Runs `f`, which calls one operation for its gradients: where these do not depend on the result, it is not computed.
pub(crate) fn gradients_only<R>(f: impl FnOnce() -> R) -> R {
    with_flag(&GRADIENTS_ONLY, true, f)
}

/// Whether results that gradients do not depend on may be of any elements.
pub(crate) fn is_gradients_only() -> bool {
    GRADIENTS_ONLY.get()
}

/// Runs `f` with a flag of this thread set, and puts it back however `f` ends.
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

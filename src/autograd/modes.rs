//! The autograd modes of a thread: whether operations on tracked tensors are recorded, whether gradients are checked for NaN, and the
//! dtype of mixed precision.

use std::cell::Cell;

use crate::DType;

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
    /// The dtype of the innermost [`autocast`](super::autocast) scope.
    pub(super) autocast_dtype: Option<DType>,
    /// The number of nested [`autocast`](super::autocast) scopes.
    pub(super) autocast_depth: u32,
}

thread_local! {
    static MODES: Cell<Modes> = const {
        Cell::new(Modes {
            grad_enabled: true,
            anomaly: false,
            dependencies_only: false,
            gradients_only: false,
            autocast_dtype: None,
            autocast_depth: 0,
        })
    };
}

/// Returns the modes of this thread.
#[inline]
pub(super) fn modes() -> Modes {
    MODES.get()
}

/// Applies `change` to the modes of this thread. Returns the value that `change` returned.
#[inline]
pub(super) fn change_modes<R>(change: impl FnOnce(&mut Modes) -> R) -> R {
    let mut modes = MODES.get();
    let result = change(&mut modes);
    MODES.set(modes);
    result
}

/// True if this thread records operations on tracked tensors.
pub fn is_grad_enabled() -> bool {
    modes().grad_enabled
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
    modes().anomaly
}

/// Runs `f`. Recorded nodes keep their inputs, but not the closures that compute gradients.
pub(super) fn dependencies_only<R>(f: impl FnOnce() -> R) -> R {
    with_flag(|modes| &mut modes.dependencies_only, true, f)
}

pub(super) fn is_dependencies_only() -> bool {
    modes().dependencies_only
}

/// Runs `f`, whose caller needs only gradients. Operations inside may leave a result uncomputed if gradients do not depend on it.
pub(crate) fn gradients_only<R>(f: impl FnOnce() -> R) -> R {
    with_flag(|modes| &mut modes.gradients_only, true, f)
}

/// True inside [`gradients_only`]: a result that gradients do not depend on may be left uncomputed, with arbitrary elements.
pub(crate) fn is_gradients_only() -> bool {
    modes().gradients_only
}

/// Runs `f` with a flag of this thread set, and restores the flag even if `f` panics.
#[inline]
fn with_flag<R>(flag: impl Fn(&mut Modes) -> &mut bool, value: bool, f: impl FnOnce() -> R) -> R {
    struct Restore<F: Fn(&mut Modes) -> &mut bool>(F, bool);
    impl<F: Fn(&mut Modes) -> &mut bool> Drop for Restore<F> {
        fn drop(&mut self) {
            change_modes(|modes| *(self.0)(modes) = self.1);
        }
    }
    let before = change_modes(|modes| std::mem::replace(flag(modes), value));
    let _restore = Restore(flag, before);
    f()
}

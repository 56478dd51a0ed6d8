//! Hooks that store tensors elsewhere while they are saved for backward.

use std::any::Any;
use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use super::budget::watch;
use super::modes::{no_grad, packs_saved_tensors, with_flag};
use super::node::{Packed, Saved, SavedHook};
use super::record::is_tracked;
use crate::storage::Storage;
use crate::sync::OnDrop;
use crate::{Device, Error, Result, Tensor};

impl Saved {
    /// Saves a tensor for an operation that is recorded.
    pub(crate) fn new(tensor: &Tensor) -> Saved {
        let mut saved = Saved::without_hooks(tensor);
        if packs_saved_tensors() {
            saved.pack();
        }
        saved
    }

    /// Saves a tensor for an operation that is recorded if an input is tracked. Otherwise the result is dropped, and hooks are not called.
    pub(crate) fn for_inputs(inputs: &[&Tensor], tensor: &Tensor) -> Saved {
        if is_tracked(inputs) { Saved::new(tensor) } else { Saved::without_hooks(tensor) }
    }

    /// Packs the tensor if hooks are on. [`get`](Saved::get) returns the error if a hook fails. Without hooks, a recording of uses or a
    /// budget watches the tensor.
    #[cold]
    pub(crate) fn pack(&mut self) {
        if !packs_saved_tensors() {
            return;
        }
        let Some(Ok(pack)) = SCOPES.with_borrow(|scopes| scopes.last().cloned()) else { return watch(self) };
        let version = self.tensor.storage.version();
        let mut packed = without_hooks(|| pack(self.tensor.detach()));
        if self.tensor.storage.version() != version {
            packed = Err(Error::autograd("saved_tensors_hooks", "the pack hook changed its tensor in place"));
        }
        let packed = packed.unwrap_or_else(|error| Some(Packed::new(move || Err(error.clone()))));
        if let Some(packed) = packed {
            self.replace(SavedHook::Packed(Box::new(packed)));
        }
    }

    /// Replaces the tensor by a tensor like it with a storage of no bytes. `hook` makes the tensor again.
    pub(super) fn replace(&mut self, hook: SavedHook) {
        let Ok(storage) = Storage::alloc(self.tensor.device(), 0) else { return };
        *self = Saved::of(Tensor { storage, ..self.tensor.shallow_clone() }, 0, None, Some(Arc::new(hook)));
    }
}

/// The hook that packs tensors, or returns None to keep a tensor as it is; or the reason why hooks are disabled.
type HookScope = std::result::Result<Rc<dyn Fn(Tensor) -> Result<Option<Packed>>>, String>;

thread_local! {
    /// The scopes that are open on this thread. All of them have hooks, or all of them disable hooks.
    static SCOPES: RefCell<Vec<HookScope>> = const { RefCell::new(Vec::new()) };
}

fn without_hooks<R>(f: impl FnOnce() -> R) -> R {
    with_flag(|modes| &mut modes.saved_hooks, false, || no_grad(f))
}

/// Runs `f` in a scope of hooks. Fails if hooks are disabled outside a scope that has them, or the other way round.
fn with_scope<R>(op: &'static str, scope: HookScope, f: impl FnOnce() -> Result<R>) -> Result<R> {
    let is_on = scope.is_ok();
    match (SCOPES.with_borrow(|scopes| scopes.last().cloned()), &scope) {
        (Some(Err(reason)), Ok(_)) => return Err(Error::autograd(op, reason)),
        (Some(Ok(_)), Err(reason)) => return Err(Error::autograd(op, reason.as_str())),
        _ => SCOPES.with_borrow_mut(|scopes| scopes.push(scope)),
    }
    let _pop = OnDrop(|| drop(SCOPES.with_borrow_mut(Vec::pop)));
    with_flag(|modes| &mut modes.saved_hooks, is_on, f)
}

/// Runs `f`. Where operations inside save a tensor for backward, they keep the value that `pack` returns, from which `unpack` makes the
/// tensor when backward needs it (PyTorch's `torch.autograd.graph.saved_tensors_hooks`). The hooks of the innermost scope are used.
///
/// Both hooks run without recording and without hooks. `pack` gets a detached handle. `unpack` returns a tensor of the same shape, dtype
/// and device, which a pass that keeps the graph keeps too, and which may not be changed in place until the graph is dropped. In-place
/// changes of packed tensors are not detected. The packed value must not hold the given tensor, except as `P` itself: a result that holds
/// itself is never freed. Fails as `f` does, and with [`Error::Autograd`] inside [`disable_saved_tensors_hooks`]. Backward returns the
/// errors of both hooks.
///
/// ```
/// use claystone::{DType, Device, Tensor, autograd::saved_tensors_hooks};
/// let x = Tensor::ones(3, Device::Cpu)?.requires_grad_(true)?;
/// let y = saved_tensors_hooks(|t| t.to_dtype(DType::BF16), |t| t.to_dtype(DType::F32), || x.mul(&x))?;
/// y.sum((), false)?.backward()?;
/// # Ok::<(), claystone::Error>(())
/// ```
pub fn saved_tensors_hooks<P: Any + Send + Sync, R>(
    pack: impl Fn(Tensor) -> Result<P> + 'static,
    unpack: impl Fn(&P) -> Result<Tensor> + Send + Sync + 'static,
    f: impl FnOnce() -> Result<R>,
) -> Result<R> {
    let unpack = Arc::new(move |value: &P| without_hooks(|| unpack(value)));
    let pack = move |tensor: Tensor| {
        let (value, unpack) = (pack(tensor)?, unpack.clone());
        // A tensor becomes a saved handle, because it may be the tensor that was saved.
        Ok(Some(match (&value as &dyn Any).downcast_ref().map(Saved::without_hooks) {
            None => Packed::new(move || unpack(&value)),
            Some(value) => {
                Packed::new(move || unpack((&value.tensor as &dyn Any).downcast_ref().expect("P is Tensor")))
            }
        }))
    };
    with_scope("saved_tensors_hooks", Ok(Rc::new(pack)), f)
}

/// Runs `f`. Tensors that operations inside save for backward wait in host memory (PyTorch's `torch.autograd.graph.save_on_cpu`). From
/// [pinned](Tensor::pin_memory) memory, backward enqueues the copies back. Tensors on the CPU device stay as they are. Fails as
/// [`saved_tensors_hooks`] does.
///
/// ```
/// use claystone::{Device, Tensor, autograd::save_on_cpu};
/// let x = Tensor::ones(3, Device::best())?.requires_grad_(true)?;
/// save_on_cpu(true, || x.mul(&x)?.sum((), false))?.backward()?;
/// # Ok::<(), claystone::Error>(())
/// ```
pub fn save_on_cpu<R>(pin_memory: bool, f: impl FnOnce() -> Result<R>) -> Result<R> {
    let pack = move |tensor: Tensor| {
        let device = tensor.device();
        if device.is_host() {
            return Ok(None);
        }
        let host = if pin_memory { tensor.pin_memory(device)? } else { tensor.to_device(Device::HOST)? };
        let unpack = move || {
            let made = Tensor::empty_with_layout(host.layout.clone(), host.dtype, device)?;
            made.copy_non_blocking_(&host).map(Tensor::shallow_clone)
        };
        Ok(Some(Packed::new(move || without_hooks(&unpack))))
    };
    with_scope("save_on_cpu", Ok(Rc::new(pack)), f)
}

/// Runs `f`, inside which [`saved_tensors_hooks`] and [`save_on_cpu`] fail with `reason` (PyTorch's
/// `torch.autograd.graph.disable_saved_tensors_hooks`). Fails with [`Error::Autograd`] and `reason` if hooks are on already.
///
/// ```
/// use claystone::autograd::{disable_saved_tensors_hooks, save_on_cpu};
/// assert!(disable_saved_tensors_hooks("not supported", || save_on_cpu(false, || Ok(()))).is_err());
/// ```
pub fn disable_saved_tensors_hooks<R>(reason: &str, f: impl FnOnce() -> Result<R>) -> Result<R> {
    with_scope("disable_saved_tensors_hooks", Err(reason.into()), f)
}

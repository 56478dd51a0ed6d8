//! Access to gradients during backward: hooks, and gradients retained for tensors that are not leaves.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use super::node::{Node, State, take_seq};
use crate::device::lock;
use crate::{Error, Result, Tensor};

/// A hook that gets the gradient of a leaf after the gradient was accumulated.
pub(super) type PostAccumulateHook = Arc<dyn Fn(&Tensor) -> Result<()> + Send + Sync>;

/// A hook that may replace a gradient: see [`Tensor::register_hook`].
type Hook = Arc<dyn Fn(&Tensor) -> Result<Option<Tensor>> + Send + Sync>;

/// The hooks of a node, and its retained gradient.
#[derive(Default)]
pub(super) struct Hooks {
    hooks: Mutex<Vec<(u64, Hook)>>,
    retained: Mutex<Retained>,
}

/// The gradient that [`Tensor::retain_grad`] keeps for the result of an operation.
#[derive(Default)]
pub(super) enum Retained {
    /// [`Tensor::retain_grad`] was not called.
    #[default]
    No,
    Yes(Option<Tensor>),
}

impl Hooks {
    /// Calls the hooks in the order of registration. Returns the gradient that replaces `grad`, if any hook returned one.
    pub(super) fn call(&self, op: &'static str, grad: &Tensor) -> Result<Option<Tensor>> {
        // The hooks run without the lock on the list of hooks, because a hook may remove itself.
        let hooks: Vec<Hook> = lock(&self.hooks).iter().map(|(_, hook)| hook.clone()).collect();
        let mut replaced: Option<Tensor> = None;
        for hook in hooks {
            let Some(new) = hook(replaced.as_ref().unwrap_or(grad))? else { continue };
            no_gradient!(op if !new.is_like(grad),
                "a hook gave a gradient of shape {}, in place of one of shape {}", new.describe(), grad.describe());
            replaced = Some(new);
        }
        if let Retained::Yes(kept) = &mut *lock(&self.retained) {
            let grad = replaced.as_ref().unwrap_or(grad);
            *kept = Some(match kept.take() {
                Some(before) => before.add(grad)?,
                None => grad.shallow_clone(),
            });
        }
        Ok(replaced)
    }

    pub(super) fn move_retained_gradient(old: &Node, new: &Node) {
        let Some(hooks) = old.hooks() else { return };
        let kept = std::mem::take(&mut *hooks.retained());
        if let Retained::Yes(_) = kept {
            *new.hooks_or_new().retained() = kept;
        }
    }

    pub(super) fn retained(&self) -> MutexGuard<'_, Retained> {
        lock(&self.retained)
    }
}

/// A handle with which to remove a hook (see [`Tensor::register_hook`]). Dropping the handle does not remove the hook.
#[derive(Debug)]
pub struct HookHandle {
    node: Weak<Node>,
    id: u64,
}

impl HookHandle {
    /// Removes the hook, so that it is not called again.
    pub fn remove(self) {
        if let Some(node) = self.node.upgrade() {
            lock(&node.hooks_or_new().hooks).retain(|(id, _)| *id != self.id);
            if let State::Leaf(leaf) = &mut *node.state() {
                leaf.post_accumulate_hooks.retain(|(id, _)| *id != self.id);
            }
        }
    }
}

/// Whether a post-accumulate hook was ever registered in this process. If not, backward need not search the graph for leaves with hooks.
pub(super) static HAS_POST_ACCUMULATE_HOOKS: AtomicBool = AtomicBool::new(false);

impl Tensor {
    /// Calls `hook` with the gradient of this tensor in every backward pass that reaches it (PyTorch's
    /// `register_hook`). The gradient is the sum of all contributions. The hook runs before a leaf accumulates the
    /// gradient or an operation passes it on. If the hook returns a tensor, the tensor replaces the gradient. Several
    /// hooks are called in the order of registration. The hook should not change the gradient in place. Fails with
    /// [`Error::Autograd`] if the tensor requires no gradient.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let x = Tensor::ones(2, Device::Cpu)?.requires_grad_(true)?;
    /// let y = x.mul_scalar(3)?;
    /// let clipped = y.register_hook(|grad| grad.clamp(-1.0, 1.0).map(Some))?;
    /// y.mul_scalar(10)?.sum((), false)?.backward()?;
    /// assert_eq!(x.grad().unwrap().to_vec::<f32>()?, [3.0, 3.0]);
    /// clipped.remove();
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn register_hook(
        &self,
        hook: impl Fn(&Tensor) -> Result<Option<Tensor>> + Send + Sync + 'static,
    ) -> Result<HookHandle> {
        let node = self.tracked_node("register_hook")?;
        let id = take_seq();
        lock(&node.hooks_or_new().hooks).push((id, Arc::new(hook)));
        Ok(HookHandle { node: Arc::downgrade(&node), id })
    }

    /// Calls `hook` with the gradient of this leaf each time a backward pass has added to it (PyTorch's
    /// `register_post_accumulate_grad_hook`). The hook runs as soon as the gradient is complete, while backward may
    /// still have other operations to differentiate. The hook may change the gradient in place, or use it and drop it.
    /// Fails with [`Error::Autograd`] if the tensor is not a leaf that requires a gradient.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let w = Tensor::ones(2, Device::Cpu)?.requires_grad_(true)?;
    /// let halved = w.register_post_accumulate_grad_hook(|grad| grad.mul_scalar_(0.5).map(drop))?;
    /// w.mul_scalar(3)?.sum((), false)?.backward()?;
    /// assert_eq!(w.grad().unwrap().to_vec::<f32>()?, [1.5, 1.5]);
    /// halved.remove();
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn register_post_accumulate_grad_hook(
        &self,
        hook: impl Fn(&Tensor) -> Result<()> + Send + Sync + 'static,
    ) -> Result<HookHandle> {
        let (op, id) = ("register_post_accumulate_grad_hook", take_seq());
        self.with_leaf_state(op, |leaf| leaf.post_accumulate_hooks.push((id, Arc::new(hook))))?;
        HAS_POST_ACCUMULATE_HOOKS.store(true, Ordering::Relaxed);
        Ok(HookHandle { node: Arc::downgrade(&self.tracked_node(op)?), id })
    }

    /// Keeps the gradient of this tensor in [`Tensor::grad`], as for a leaf (PyTorch's `retain_grad`). Fails with
    /// [`Error::Autograd`] if the tensor requires no gradient.
    pub fn retain_grad(&self) -> Result<()> {
        let node = self.tracked_node("retain_grad")?;
        if !node.is_leaf() {
            let mut retained = node.hooks_or_new().retained();
            if let Retained::No = *retained {
                *retained = Retained::Yes(None);
            }
        }
        Ok(())
    }

    /// True if [`Tensor::retain_grad`] was called on this result of an operation (PyTorch's `retains_grad`).
    pub fn retains_grad(&self) -> bool {
        let node = self.node();
        let hooks = node.as_ref().and_then(|node| node.hooks());
        hooks.is_some_and(|hooks| matches!(*hooks.retained(), Retained::Yes(_)))
    }

    /// Returns the tensor's node, or an error if it requires no gradient.
    fn tracked_node(&self, op: &'static str) -> Result<Arc<Node>> {
        let reason =
            "the tensor requires no gradient: call requires_grad_(true) on it, or on a tensor it is computed from";
        self.node().ok_or_else(|| Error::autograd(op, reason))
    }
}

//! Looking at gradients on their way: hooks, and gradients kept of tensors that are no leaves.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use super::node::{Node, State};
use crate::device::lock;
use crate::{Error, Result, Tensor};

/// What is called with the gradient that a leaf has collected.
pub(super) type Collected = Arc<dyn Fn(&Tensor) -> Result<()> + Send + Sync>;

type Hook = Arc<dyn Fn(&Tensor) -> Result<Option<Tensor>> + Send + Sync>;

/// The hooks of a node, and its retained gradient.
#[derive(Default)]
pub(super) struct Hooks {
    hooks: Mutex<Vec<(u64, Hook)>>,
    retained: Mutex<Retained>,
}

/// The gradient kept of an operation's result.
#[derive(Default)]
pub(super) enum Retained {
    /// Nobody asked for it.
    #[default]
    No,
    Yes(Option<Tensor>),
}

impl Hooks {
    /// Calls the hooks in order. Gives the gradient that they replaced `grad` by, if any did.
    pub(super) fn run(&self, op: &'static str, grad: &Tensor) -> Result<Option<Tensor>> {
        // Hooks run outside the lock: one may remove itself.
        let hooks: Vec<Hook> = lock(&self.hooks).iter().map(|(_, hook)| hook.clone()).collect();
        let mut replaced: Option<Tensor> = None;
        for hook in hooks {
            let Some(new) = hook(replaced.as_ref().unwrap_or(grad))? else { continue };
            if !new.is_like(grad) {
                let (new, old) = (new.described(), grad.described());
                let reason = format!("a hook gave a gradient of shape {new}, in place of one of shape {old}");
                return Err(Error::Autograd { op, reason });
            }
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

    /// Goes on keeping the gradient of a tensor that another node is of from now on.
    pub(super) fn retain_instead(old: &Node, new: &Node) {
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

/// Takes a hook away again: see [`Tensor::register_hook`]. Dropping it leaves the hook where it is.
#[derive(Debug)]
pub struct HookHandle {
    node: Weak<Node>,
    id: u64,
}

impl HookHandle {
    /// The hook is not called any more.
    pub fn remove(self) {
        if let Some(node) = self.node.upgrade() {
            lock(&node.hooks_or_new().hooks).retain(|(id, _)| *id != self.id);
            if let State::Leaf(leaf) = &mut *node.state() {
                leaf.collected.retain(|(id, _)| *id != self.id);
            }
        }
    }
}

/// Whether somebody has asked to be told of collected gradients in this process: otherwise no graph is searched for such leaves.
static LEAVES_ARE_WAITED_FOR: AtomicBool = AtomicBool::new(false);

pub(super) fn are_leaves_waited_for() -> bool {
    LEAVES_ARE_WAITED_FOR.load(Ordering::Relaxed)
}

fn next_id() -> u64 {
    static ID: AtomicU64 = AtomicU64::new(0);
    ID.fetch_add(1, Ordering::Relaxed)
}

impl Tensor {
    /// Calls `hook` with the gradient of this tensor in every backward that reaches it, all contributions summed, before a
    /// leaf collects it or an operation passes it on. What the hook gives, if anything, takes its place (PyTorch's
    /// `register_hook`). Several hooks are called in the order they came. The hook should not change the gradient in place.
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
    ///
    /// # Errors
    /// [`Error::Autograd`] where the tensor requires no gradient.
    pub fn register_hook(
        &self,
        hook: impl Fn(&Tensor) -> Result<Option<Tensor>> + Send + Sync + 'static,
    ) -> Result<HookHandle> {
        let node = self.tracked("register_hook")?;
        let id = next_id();
        lock(&node.hooks_or_new().hooks).push((id, Arc::new(hook)));
        Ok(HookHandle { node: Arc::downgrade(&node), id })
    }

    /// Calls `hook` with the gradient of this leaf, each time a backward has added to it (PyTorch's
    /// `register_post_accumulate_grad_hook`): as soon as it is complete, while older operations are still to come. It may change the gradient in place, or use it and forget it.
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
    ///
    /// # Errors
    /// [`Error::Autograd`] where this is no leaf that requires a gradient.
    pub fn register_post_accumulate_grad_hook(
        &self,
        hook: impl Fn(&Tensor) -> Result<()> + Send + Sync + 'static,
    ) -> Result<HookHandle> {
        let (op, id) = ("register_post_accumulate_grad_hook", next_id());
        self.with_leaf(op, |leaf| leaf.collected.push((id, Arc::new(hook))))?;
        LEAVES_ARE_WAITED_FOR.store(true, Ordering::Relaxed);
        Ok(HookHandle { node: Arc::downgrade(&self.tracked(op)?), id })
    }

    /// Keeps the gradient of this tensor in [`Tensor::grad`], which leaves do anyway (PyTorch's `retain_grad`).
    ///
    /// # Errors
    /// [`Error::Autograd`] where the tensor requires no gradient.
    pub fn retain_grad(&self) -> Result<()> {
        let node = self.tracked("retain_grad")?;
        if !node.is_leaf() {
            let mut retained = node.hooks_or_new().retained();
            if let Retained::No = *retained {
                *retained = Retained::Yes(None);
            }
        }
        Ok(())
    }

    /// Whether [`Tensor::retain_grad`] was called on this result of an operation (PyTorch's `retains_grad`).
    pub fn retains_grad(&self) -> bool {
        let node = self.node();
        let hooks = node.as_ref().and_then(|node| node.hooks());
        hooks.is_some_and(|hooks| matches!(*hooks.retained(), Retained::Yes(_)))
    }

    fn tracked(&self, op: &'static str) -> Result<Arc<Node>> {
        let reason = "the tensor requires no gradient: call requires_grad_(true) on it, or on what it is made from";
        self.node().ok_or_else(|| Error::Autograd { op, reason: reason.into() })
    }
}

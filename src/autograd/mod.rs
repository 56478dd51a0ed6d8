//! Reverse-mode automatic differentiation, on a graph that is owned by the tensors.
//!
//! [`Tensor::requires_grad_`] gives a tensor a leaf node. Every operation on a tracked tensor returns a tensor with a
//! node. The node holds the inputs' nodes and a closure that computes the inputs' gradients from the result's gradient.
//! There is no tape: dropping the tensors drops the graph.
//!
//! [`Tensor::backward`] visits the nodes from the newest to the oldest with a heap, so long chains need no recursion.
//! It consumes each closure after running it, which frees the tensors that the closure saved, and adds the gradients of
//! leaves to [`Tensor::grad`]. [`grad()`] returns the gradients to the caller instead. [`BackwardOptions`] can keep the
//! graph for another backward pass, or record the backward pass itself for gradients of gradients.
//!
//! Operations save tensors as `Saved`, which remembers the storage's version. If a saved tensor is changed in place
//! before backward, backward returns an error instead of a wrong gradient. In-place operations on tensors and on views
//! are recorded too. A leaf that requires a gradient can be changed in place only inside [`no_grad`].
//!
//! `node` defines the graph, and `record` adds operations to it. `in_place` and `history` record in-place operations.
//! `backward` is the engine; `context` is the interface between the engine and closures. The other modules are features
//! for users.

mod backward;
mod budget;
mod check;
mod checkpoint;
mod context;
mod custom;
mod grad;
mod history;
mod hooks;
mod in_place;
mod leaf;
mod modes;
mod node;
mod recompute;
mod record;
mod saved;

use smallvec::SmallVec;

use crate::storage::Role;
use crate::{Result, Tensor};
use hooks::Retained;
use node::State;

pub use backward::queue_callback;
pub use budget::{Budget, StepUses, memory_budget};
pub use check::{gradcheck, gradgradcheck};
pub use checkpoint::{checkpoint, checkpoint_sequential};
pub(crate) use context::Context;
pub use custom::{CustomOp, OpContext};
pub use grad::{BackwardOptions, GradOptions, grad, grad_with_options};
pub use hooks::HookHandle;
pub(crate) use in_place::{InPlace, begin_in_place, check_unrecorded};
pub(crate) use modes::{RandomSource, cast_once, draw_seed, gradients_only, is_gradients_only, replay_draws};
pub use modes::{
    autocast, autocast_dtype, detect_anomaly, enable_grad, inference_mode, is_grad_enabled, no_grad, set_grad_enabled,
};
pub(crate) use node::{DetachedGroup, Factor, Gradients, Node, Saved};
pub(crate) use recompute::{note_recipe, note_recipes};
pub(crate) use record::{
    is_tracked, record, record_differentiable, record_unary_differentiable, record_view, record_with_factor,
};
pub use saved::{disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks};

impl Tensor {
    /// Makes this tensor a leaf that accumulates its gradient (`true`), or removes it from the graph (`false`). The result has the same
    /// storage. Fails with [`crate::Error::UnsupportedDType`] for integers and bool, and with [`crate::Error::Autograd`] for the result of
    /// a tracked operation.
    pub fn requires_grad_(self, requires_grad: bool) -> Result<Tensor> {
        let op = "requires_grad_";
        match self.node() {
            Some(node) if !node.is_leaf() => {
                no_gradient!(
                    op,
                    "only a leaf can be changed, and this tensor is an operation's result: detach() it first"
                )
            }
            Some(_) if requires_grad => return Ok(self),
            None if requires_grad && self.leaf_id().is_some() => {
                self.set_requires_grad(true)?;
                return Ok(self);
            }
            None if requires_grad => self.dtype.check_float(op)?,
            _ => {}
        }
        if requires_grad {
            self.storage.set_role(Role::Parameter);
        }
        let leaf = || Node::new("leaf", SmallVec::new(), State::Leaf(Box::default()));
        Ok(Tensor { made_by: requires_grad.then(leaf), ..self })
    }

    /// Removes this handle from the graph (PyTorch's `detach_`). [`Tensor::detach`] returns a new handle instead.
    pub fn detach_(&mut self) -> &mut Tensor {
        *self = self.detach();
        self
    }

    /// True if backward computes a gradient of this tensor: it is a leaf that requires one, or depends on such a leaf.
    #[inline]
    pub fn requires_grad(&self) -> bool {
        self.made_by.as_ref().is_some_and(|node| !node.is_frozen())
            || self.storage.has_attachment() && self.node().is_some()
    }

    /// True if this tensor is not the result of a tracked operation. [`Tensor::backward`] stores gradients in leaves only.
    pub fn is_leaf(&self) -> bool {
        self.node().is_none_or(|n| n.is_leaf())
    }

    /// Returns the gradient accumulated so far, with this tensor's shape and dtype. `None` before the first
    /// [`Tensor::backward`], after [`Tensor::zero_grad`], and for tensors that are not leaves (unless
    /// [`Tensor::retain_grad`] was called).
    ///
    /// The returned handle shares the gradient's storage. The next backward pass may write to it; `clone()` it to keep the values.
    pub fn grad(&self) -> Option<Tensor> {
        let node = self.node_or_frozen()?;
        if let State::Leaf(leaf) = &*node.state() {
            return match &leaf.successor {
                Some(new) => new.grad(),
                None => leaf.grad.as_ref().map(Tensor::shallow_clone),
            };
        }
        match &*node.hooks()?.retained() {
            Retained::Yes(grad) => grad.as_ref().map(Tensor::shallow_clone),
            Retained::No => None,
        }
    }

    /// Drops the gradient. The next backward pass stores its gradient without an addition (PyTorch's `zero_grad(set_to_none=True)`).
    pub fn zero_grad(&self) {
        let Some(node) = self.node_or_frozen() else { return };
        if let State::Leaf(leaf) = &mut *node.state() {
            leaf.grad = None;
            leaf.lent = false; // a backward pass that failed may have left the flag set
            if let Some(new) = &leaf.successor {
                new.zero_grad();
            }
        } else if let Some(hooks) = node.hooks()
            && let Retained::Yes(grad) = &mut *hooks.retained()
        {
            *grad = None;
        }
    }
}

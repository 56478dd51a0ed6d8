//! Reverse-mode differentiation: the graph belongs to the tensors.
//!
//! A tensor that [`Tensor::requires_grad_`] owns a leaf node; every operation on a tracked tensor gives a tensor with a
//! node that holds its inputs' nodes and one closure, which turns the gradient of the result into gradients of the inputs.
//! There is no tape: drop the tensors and the graph is gone. [`Tensor::backward`] visits the nodes from the youngest to the
//! oldest with a heap (no recursion, however long the chain), consumes each closure as it goes, so that what it saved is
//! freed at once, and leaves the sums in the leaves' [`Tensor::grad`]; [`grad()`] gives them to the caller instead.
//! [`BackwardOptions`] keep the graph for another backward, or record the backward pass itself, for gradients of gradients.
//!
//! An operation saves tensors as `Saved`, which remembers the storage's version: an in-place change between forward and
//! backward is an error, never a wrong gradient. Operations in place are recorded too, whether they change a tensor or a view of
//! one; a leaf that requires a gradient is changed in [`no_grad`] only.
//!
//! One file a subject: `node` is the graph, `record` how operations enter it, `in_place` and `history` how those in place do,
//! `backward` the engine, `context` what a closure sees of it. The others are what users do with it.

mod autocast;
mod backward;
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
mod record;
pub(crate) mod rng_replay;

use smallvec::SmallVec;

use crate::{Error, Result, Tensor};
use hooks::Retained;
use node::State;

pub(crate) use autocast::cast_once;
pub use autocast::{autocast, autocast_dtype};
pub use backward::queue_callback;
pub use check::{gradcheck, gradgradcheck};
pub use checkpoint::{checkpoint, checkpoint_sequential};
pub(crate) use context::Context;
pub use custom::{CustomOp, OpContext};
pub use grad::{BackwardOptions, GradOptions, grad, grad_with_options};
pub(crate) use history::Group;
pub use hooks::HookHandle;
pub(crate) use in_place::{InPlace, check_unrecorded, in_place};
pub use modes::{detect_anomaly, enable_grad, inference_mode, is_grad_enabled, no_grad, set_grad_enabled};
pub(crate) use modes::{gradients_only, is_gradients_only};
pub(crate) use node::{Factor, Node};
pub(crate) use record::{Saved, is_tracked, record, record_twice, record_unary_twice, record_view, record_with_factor};

/// The gradients of an operation's inputs, in order; None where none flows or none was wanted.
pub(crate) type Gradients = SmallVec<[Option<Tensor>; 3]>;

impl Tensor {
    /// This tensor as a leaf whose gradient is collected (`true`), or outside the graph (`false`). Shares the storage.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] for integers and bool; [`Error::Autograd`] for the result of a tracked operation.
    pub fn requires_grad_(self, requires_grad: bool) -> Result<Tensor> {
        let op = "requires_grad_";
        match self.node() {
            Some(node) if !node.is_leaf() => {
                let reason = "only a leaf can be changed, and this tensor is an operation's result: detach() it first";
                return Err(Error::Autograd { op, reason: reason.into() });
            }
            Some(_) if requires_grad => return Ok(self),
            None if requires_grad && self.leaf_id().is_some() => {
                self.set_requires_grad(true)?;
                return Ok(self);
            }
            None if requires_grad => self.dtype.check_float(op)?,
            _ => {}
        }
        let leaf = || Node::new("leaf", SmallVec::new(), State::Leaf(Box::default()));
        Ok(Tensor { made_by: requires_grad.then(leaf), ..self })
    }

    /// Takes this handle out of the graph (PyTorch's `detach_`); [`Tensor::detach`] makes another.
    pub fn detach_(&mut self) -> &mut Tensor {
        *self = self.detach();
        self
    }

    /// Whether gradients flow to or through this tensor.
    #[inline]
    pub fn requires_grad(&self) -> bool {
        self.made_by.as_ref().is_some_and(|node| !node.is_frozen())
            || self.storage.has_attachment() && self.node().is_some()
    }

    /// Whether no tracked operation made this tensor: [`Tensor::backward`] leaves gradients in leaves only.
    pub fn is_leaf(&self) -> bool {
        self.node().is_none_or(|n| n.is_leaf())
    }

    /// The gradient collected so far, of this tensor's shape and dtype; None before the first [`Tensor::backward`], for
    /// tensors that are no leaf (unless [`Tensor::retain_grad`]), and after [`Tensor::zero_grad`]. The handle shares its storage: the next backward may
    /// write there, so keep a `clone()`.
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

    /// Forgets the gradient; the next backward moves a new one in (PyTorch's `zero_grad(set_to_none=True)`).
    pub fn zero_grad(&self) {
        let Some(node) = self.node_or_frozen() else { return };
        if let State::Leaf(leaf) = &mut *node.state() {
            leaf.grad = None;
            leaf.lent = false; // where a backward failed
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

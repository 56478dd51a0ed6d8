//! The nodes of the autograd graph, their state, and the tensors that they save.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use smallvec::SmallVec;

use super::Context;
use super::hooks::{Hooks, PostAccumulateHook};
use crate::device::capture::is_capturing;
use crate::sync::lock;
use crate::tensor::Layout;
use crate::{Expr, Result, Tensor};

/// The gradients of an operation's inputs, in order. `None` for an input that has no gradient, or whose gradient is not needed.
pub(crate) type Gradients = SmallVec<[Option<Tensor>; 3]>;

/// The nodes of an operation's inputs, in order. None for inputs that need no gradient.
pub(super) type Inputs = SmallVec<[Option<Arc<Node>>; 3]>;

/// Computes the gradients of an operation's inputs from the gradient of its result.
pub(super) type BackwardFn = dyn Fn(&mut Context) -> Result<Gradients> + Send + Sync;

/// A node of the graph: a leaf that accumulates a gradient, or the result of an operation.
pub(crate) struct Node {
    /// The node's number. Newer nodes have higher numbers, so an operation's number is higher than those of its inputs.
    pub(super) seq: u64,
    pub(crate) op: &'static str,
    pub(super) inputs: Inputs,
    /// The number of operations that have this node as an input.
    uses: AtomicU32,
    /// Whether this leaf is frozen: it accumulates no gradient, and its tensors are outside the graph until the leaf is unfrozen.
    pub(super) frozen: AtomicBool,
    state: Mutex<State>,
    /// Hooks on the gradient of this node. Most nodes have none.
    hooks: OnceLock<Box<Hooks>>,
    /// For the node of a view, the layout of the input, which has the same storage.
    view_of: Option<Box<Layout>>,
    /// For a tensor changed in place, its id and the number of the in-place change that made this node.
    pub(super) changed: OnceLock<(u64, u32)>,
}

/// The kind of a node: a leaf, an operation, or an operation that backward has consumed.
pub(super) enum State {
    /// Boxed to keep the enum small, because most nodes are operations.
    Leaf(Box<Leaf>),
    Operation(Operation),
    Consumed,
}

/// The backward function of an operation.
#[derive(Clone)]
pub(super) struct Operation {
    pub(super) backward: Arc<BackwardFn>,
    pub(super) factor: Option<Arc<Factor>>,
    /// Whether the closure uses only recorded operations if [`Context::create_graph`] is true.
    pub(super) is_differentiable: bool,
}

/// A factor by which a result's gradient is multiplied before its node is differentiated. An operation can do so in the launch that
/// computes the gradient.
pub(crate) struct Factor {
    /// The product as an expression: input 0 is the gradient, and input 1 is `tensor`.
    pub(crate) product: Expr,
    /// The factor's tensor, of the result's shape.
    pub(crate) tensor: Saved,
}

#[derive(Default)]
pub(super) struct Leaf {
    pub(super) grad: Option<Tensor>,
    /// The memory where an optimiser expects the gradient: a view of its flat gradient buffer.
    pub(super) slot: Option<Tensor>,
    /// Whether a backward pass may be writing to the slot. A pass on another thread must not use the slot then.
    pub(super) lent: bool,
    /// Hooks to call after a gradient was accumulated.
    pub(super) post_accumulate_hooks: Vec<(u64, PostAccumulateHook)>,
    /// The leaf that replaced this one when its module was converted, and that accumulates the gradient instead.
    pub(super) successor: Option<Tensor>,
}

/// The number of the next node or hook.
static SEQ: AtomicU64 = AtomicU64::new(0);

/// Returns a number higher than those of all nodes made so far.
pub(super) fn next_seq() -> u64 {
    SEQ.load(Ordering::Relaxed)
}

/// Returns a new number for a node or hook.
pub(super) fn take_seq() -> u64 {
    SEQ.fetch_add(1, Ordering::Relaxed)
}

impl Node {
    pub(super) fn new(op: &'static str, inputs: Inputs, state: State) -> Arc<Node> {
        Node::view(op, inputs, state, None)
    }

    /// Makes the node of a view. Its only input has the layout `view_of`.
    pub(super) fn view(op: &'static str, inputs: Inputs, state: State, view_of: Option<Box<Layout>>) -> Arc<Node> {
        inputs.iter().flatten().for_each(|node| _ = node.uses.fetch_add(1, Ordering::Relaxed));
        let seq = take_seq();
        let (uses, state, hooks, changed) = (AtomicU32::new(0), Mutex::new(state), OnceLock::new(), OnceLock::new());
        Arc::new(Node { seq, op, inputs, uses, frozen: AtomicBool::new(false), state, hooks, view_of, changed })
    }

    #[inline]
    pub(super) fn is_frozen(&self) -> bool {
        self.frozen.load(Ordering::Relaxed)
    }

    /// Returns the node and layout of the base tensor, through all levels of views. If this is no view, returns the node itself and `layout`.
    pub(super) fn base<'a>(self: &'a Arc<Node>, layout: &'a Layout) -> (&'a Arc<Node>, &'a Layout) {
        let (mut node, mut layout) = (self, layout);
        while let (Some(of), Some(Some(input))) = (&node.view_of, node.inputs.first()) {
            (node, layout) = (input, of);
        }
        (node, layout)
    }

    /// Returns the id that the tensor keeps through all in-place changes, and the number of the in-place change that made this node.
    pub(super) fn change_id(&self) -> (u64, u32) {
        self.changed.get().copied().unwrap_or((self.seq, 0))
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub(super) fn is_leaf(&self) -> bool {
        matches!(*self.state(), State::Leaf(_))
    }

    pub(super) fn hooks(&self) -> Option<&Hooks> {
        self.hooks.get().map(|hooks| &**hooks)
    }

    pub(super) fn hooks_or_new(&self) -> &Hooks {
        self.hooks.get_or_init(Box::default)
    }

    /// Returns the factor of this node's gradient. None if other operations than the caller add to the gradient, or if the node has hooks.
    pub(super) fn factor(&self) -> Option<Arc<Factor>> {
        match &*self.state() {
            State::Operation(operation) if self.uses.load(Ordering::Relaxed) == 1 && self.hooks().is_none() => {
                operation.factor.clone()
            }
            _ => None,
        }
    }
}

impl Drop for Node {
    /// Drops the inputs in a loop: the default drop would recurse once per node and overflow the stack.
    fn drop(&mut self) {
        let mut orphans: Vec<Arc<Node>> = Vec::new();
        let dismantle = |node: &mut Node, orphans: &mut Vec<Arc<Node>>| {
            // The closure is dropped first: its saved tensors hold the same input nodes, and `inputs` still keeps these nodes alive.
            let state = node.state.get_mut().unwrap_or_else(PoisonError::into_inner);
            drop(std::mem::replace(state, State::Consumed));
            orphans.extend(node.inputs.drain(..).flatten());
        };
        dismantle(self, &mut orphans);
        while let Some(node) = orphans.pop() {
            if let Some(mut node) = Arc::into_inner(node) {
                dismantle(&mut node, &mut orphans);
            }
        }
    }
}

/// Identifies an untracked tensor and its views: an in-place change adds all of them to the graph together. Detaching makes a new group.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct DetachedGroup(pub(super) u32);

/// A tensor saved for backward, with the version its storage had when it was saved.
///
/// The saved tensor keeps its node, which a backward pass that creates a graph needs. So save inputs themselves, not detached views of
/// them. An operation's own result has no node yet when it is saved; [`Context::unpack_result`] adds the node. A saved tensor does not
/// keep its storage's record of in-place changes alive: that record may hold the saved tensor, and the two would never be freed.
pub(crate) struct Saved {
    /// The saved tensor. If it is packed or dropped, a tensor like it with a storage of no bytes.
    pub(super) tensor: Tensor,
    version: u64,
    /// The storage's replay count. None if saved during a graph capture: backward after a replay uses the values that the replay wrote.
    replays: Option<u64>,
    pub(super) hook: Option<Arc<SavedHook>>,
}

/// Code that runs when backward needs a saved tensor.
pub(super) enum SavedHook {
    Packed(Box<Packed>),
    Watched(Arc<dyn WatchSaved>),
    /// The tensor is dropped; unpacking computes it again.
    Dropped(Box<Packed>, Arc<dyn WatchSaved>),
}

/// The observer of a saved storage.
pub(super) trait WatchSaved: Send + Sync {
    /// Handles an event: backward is about to use the storage.
    fn note_use(&self);
}

impl Saved {
    pub(crate) fn without_hooks(tensor: &Tensor) -> Saved {
        let replays = (!is_capturing(tensor.device())).then(|| tensor.storage.replays());
        Saved::of(Tensor { made_by: tensor.node(), ..tensor.detach() }, tensor.storage.version(), replays, None)
    }

    pub(super) fn another_handle(&self) -> Saved {
        Saved::of(self.tensor.shallow_clone(), self.version, self.replays, self.hook.clone())
    }

    pub(super) fn of(tensor: Tensor, version: u64, replays: Option<u64>, hook: Option<Arc<SavedHook>>) -> Saved {
        tensor.storage.add_saved_handle();
        Saved { tensor, version, replays, hook }
    }

    /// True if `tensor` views the same elements of the same storage as the saved tensor.
    pub(super) fn is_same_tensor(&self, tensor: &Tensor) -> bool {
        self.tensor.shares_storage(tensor) && self.tensor.layout == tensor.layout
    }

    /// Returns another handle on the saved tensor. Fails as [`get`](Saved::get) does.
    pub(crate) fn unpack(&self, op: &'static str) -> Result<Tensor> {
        self.get(op).map(Tensor::shallow_clone)
    }

    /// Returns the saved tensor. Fails if its storage was changed in place after saving, and returns the errors of hooks.
    pub(crate) fn get(&self, op: &'static str) -> Result<&Tensor> {
        match self.hook.as_deref() {
            Some(SavedHook::Packed(packed)) => return packed.get(op, &self.tensor),
            Some(SavedHook::Watched(watched)) => watched.note_use(),
            Some(SavedHook::Dropped(packed, watched)) => {
                watched.note_use();
                return packed.get(op, &self.tensor);
            }
            None => {}
        }
        let storage = &self.tensor.storage;
        let is_replayed = || self.replays.is_some_and(|replays| replays != storage.replays());
        no_gradient!(op if storage.version() != self.version || is_replayed(),
            "a tensor of shape {} that its gradient needs was changed in place after the forward pass: change a clone() \
             instead", self.tensor.shape());
        Ok(&self.tensor)
    }
}

impl Drop for Saved {
    fn drop(&mut self) {
        self.tensor.storage.remove_saved_handle();
    }
}

/// A packed value or a recipe, inside the closure that unpacks it.
pub(super) struct Packed {
    unpack: Box<dyn Fn() -> Result<Tensor> + Send + Sync>,
    /// The unpacked tensor, and the version of its storage.
    unpacked: OnceLock<(Saved, u64)>,
}

impl Packed {
    pub(super) fn new(unpack: impl Fn() -> Result<Tensor> + Send + Sync + 'static) -> Packed {
        Packed { unpack: Box::new(unpack), unpacked: OnceLock::new() }
    }

    /// Returns the unpacked tensor with the node of `saved`, which it replaces.
    #[cold]
    fn get(&self, op: &'static str, saved: &Tensor) -> Result<&Tensor> {
        if let Some((known, version)) = self.unpacked.get() {
            no_gradient!(op if known.tensor.storage.version() != *version,
                "the tensor that the unpack hook gave was changed in place");
            return Ok(&known.tensor);
        }
        let mut made = (self.unpack)()?.detach();
        no_gradient!(op if !made.is_like(saved),
            "the unpack hook gave a tensor of shape {}, in place of one of shape {}", made.describe(), saved.describe());
        if made.strides() != saved.strides() {
            made = made.to_memory_format(saved.memory_format())?.detach();
        }
        made.made_by = saved.made_by.clone();
        let version = made.storage.version();
        Ok(&self.unpacked.get_or_init(|| (Saved::of(made, 0, None, None), version)).0.tensor)
    }
}

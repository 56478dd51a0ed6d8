//! The nodes of the graph, and their state.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use smallvec::SmallVec;

use super::hooks::{Hooks, PostAccumulateHook};
use super::{Context, Gradients, Saved};
use crate::sync::lock;
use crate::tensor::Layout;
use crate::{Expr, Result, Tensor};

/// The nodes of an operation's inputs, in order. None for inputs that need no gradient.
pub(super) type Inputs = SmallVec<[Option<Arc<Node>>; 3]>;

/// Computes the gradients of an operation's inputs.
pub(super) type BackwardFn = dyn Fn(&mut Context) -> Result<Gradients> + Send + Sync;

/// A node of the graph: a leaf that accumulates a gradient, or the result of an operation.
pub(crate) struct Node {
    /// The node's number. Later nodes have higher numbers, so an operation's number is above those of its inputs.
    pub(super) seq: u64,
    pub(super) op: &'static str,
    pub(super) inputs: Inputs,
    /// The number of operations that have this node as an input.
    uses: AtomicU32,
    /// Whether this leaf accumulates no gradient. Its tensors are outside the graph until it is trained again.
    frozen: AtomicBool,
    state: Mutex<State>,
    /// Hooks on the gradient that arrives here; most nodes have none.
    hooks: OnceLock<Box<Hooks>>,
    /// For a view, the layout of its input, which has the same storage.
    view_of: Option<Box<Layout>>,
    /// For a tensor changed in place, the id of the tensor, and the number of the change of its storage.
    changed: OnceLock<(u64, u32)>,
}

/// The role of a node, and whether it was consumed.
pub(super) enum State {
    /// Boxed, because most nodes are operations.
    Leaf(Box<Leaf>),
    Operation(Operation),
    Consumed,
}

/// How to compute the gradients of an operation's inputs.
#[derive(Clone)]
pub(super) struct Operation {
    pub(super) backward: Arc<BackwardFn>,
    pub(super) factor: Option<Arc<Factor>>,
    /// Whether the closure is made of recorded operations if [`Context::create_graph`].
    pub(super) is_differentiable: bool,
}

/// A factor that a result's gradient is multiplied by first. The operation that computes the gradient may multiply in the same launch.
pub(crate) struct Factor {
    /// The product, as an expression of the gradient (input 0) and the tensor (input 1).
    pub(crate) product: Expr,
    /// The factor's tensor, of the result's shape.
    pub(crate) tensor: Saved,
}

#[derive(Default)]
pub(super) struct Leaf {
    pub(super) grad: Option<Tensor>,
    /// The memory in which an optimiser wants the gradient: a view of its flat gradient buffer.
    pub(super) slot: Option<Tensor>,
    /// Whether a backward pass may be writing to the slot; a pass on another thread then does not use the slot.
    pub(super) lent: bool,
    /// Hooks to call after a gradient was accumulated.
    pub(super) post_accumulate_hooks: Vec<(u64, PostAccumulateHook)>,
    /// The leaf that replaced this one when its module was converted, and accumulates the gradient instead.
    pub(super) successor: Option<Tensor>,
}

/// The number of the next node or hook.
static SEQ: AtomicU64 = AtomicU64::new(0);

/// Returns a bound that is above the numbers of all nodes made so far.
pub(super) fn next_seq() -> u64 {
    SEQ.load(Ordering::Relaxed)
}

/// Returns a number that no node and no hook has.
pub(super) fn take_seq() -> u64 {
    SEQ.fetch_add(1, Ordering::Relaxed)
}

impl Node {
    pub(super) fn new(op: &'static str, inputs: Inputs, state: State) -> Arc<Node> {
        Node::view(op, inputs, state, None)
    }

    /// Makes the node of a view; its only input has the layout `view_of`.
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

    pub(super) fn set_frozen(&self, frozen: bool) {
        self.frozen.store(frozen, Ordering::Relaxed);
    }

    /// Returns the node and the layout of the base tensor, followed through all views; the node itself and its `layout` if this is no view.
    pub(super) fn base<'a>(self: &'a Arc<Node>, layout: &'a Layout) -> (&'a Arc<Node>, &'a Layout) {
        let (mut node, mut layout) = (self, layout);
        while let (Some(of), Some(Some(input))) = (&node.view_of, node.inputs.first()) {
            (node, layout) = (input, of);
        }
        (node, layout)
    }

    /// Returns the id that the tensor keeps through all in-place changes, and the number of the storage's change that made this node.
    pub(super) fn change_id(&self) -> (u64, u32) {
        self.changed.get().copied().unwrap_or((self.seq, 0))
    }

    pub(super) fn set_change_id(&self, id: u64, change: u32) {
        self.changed.set((id, change)).expect("a new node is of one change");
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    pub(crate) fn op(&self) -> &'static str {
        self.op
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

    /// Returns the factor of the gradient. None if other operations than the caller contribute to the gradient, or if there are hooks.
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
    /// Drops the chain of inputs in a loop, because the default would recurse once per node.
    fn drop(&mut self) {
        let mut orphans: Vec<Arc<Node>> = Vec::new();
        let dismantle = |node: &mut Node, orphans: &mut Vec<Arc<Node>>| {
            // The closure is dropped first: its saved tensors hold inputs too, which `inputs` still keeps alive.
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

//! The graph's nodes, and what keeps them.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use smallvec::SmallVec;

use super::hooks::{Collected, Hooks};
use super::{Context, Gradients, Saved};
use crate::tensor::Layout;
use crate::{Expr, Result, Tensor};

/// Nodes of an operation's inputs, in order; None for those that no gradient is wanted of.
pub(super) type Inputs = SmallVec<[Option<Arc<Node>>; 3]>;

type BackwardFn = dyn Fn(&mut Context) -> Result<Gradients> + Send + Sync;

/// A place in the graph: a leaf that collects a gradient, or an operation's result.
pub(crate) struct Node {
    /// Grows with every node: an operation's number is above its inputs'.
    pub(super) seq: u64,
    pub(super) op: &'static str,
    pub(super) inputs: Inputs,
    /// How often it was an operation's input.
    uses: AtomicU32,
    /// Whether it is a leaf that collects no gradient: its tensors are outside the graph until it is trained again.
    frozen: AtomicBool,
    state: Mutex<State>,
    /// What is called with the gradient that arrives here; most nodes have none.
    hooks: OnceLock<Box<Hooks>>,
    /// Of a view: the layout of its input, in the same storage.
    view_of: Option<Box<Layout>>,
    /// Of a tensor that was changed in place: which one, and by which change of its storage.
    changed: OnceLock<(u64, u32)>,
}

pub(super) enum State {
    /// Boxed, because most nodes are operations.
    Leaf(Box<Leaf>),
    Operation(Operation),
    Consumed,
}

/// How an operation's gradient becomes its inputs'.
#[derive(Clone)]
pub(super) struct Operation {
    pub(super) backward: Arc<BackwardFn>,
    pub(super) factor: Option<Arc<Factor>>,
    /// Whether the closure, too, is made of recorded operations, wherever [`Context::create_graph`] says so.
    pub(super) twice: bool,
}

/// What the gradient of a result is multiplied by before anything else happens to it. Whoever computes that gradient may
/// do this in the same launch.
pub(crate) struct Factor {
    /// Of the gradient, input 0, and the tensor, input 1.
    pub(crate) product: Expr,
    /// Of the result's shape.
    pub(crate) tensor: Saved,
}

/// What a leaf collects.
#[derive(Default)]
pub(super) struct Leaf {
    pub(super) grad: Option<Tensor>,
    /// Where an optimiser wants the gradient written: a view of its flat gradient buffer.
    pub(super) slot: Option<Tensor>,
    /// Whether a backward may be writing to the slot, which that of another thread does not use then.
    pub(super) lent: bool,
    /// What is called when a gradient has been collected.
    pub(super) collected: Vec<(u64, Collected)>,
    /// The leaf that took this one's place when its module was converted: the gradient is collected there.
    pub(super) successor: Option<Tensor>,
}

static SEQ: AtomicU64 = AtomicU64::new(0);

/// The number of the next node, or one below it.
pub(super) fn next_seq() -> u64 {
    SEQ.load(Ordering::Relaxed)
}

impl Node {
    pub(super) fn new(op: &'static str, inputs: Inputs, state: State) -> Arc<Node> {
        Node::view(op, inputs, state, None)
    }

    /// A node of a view of its only input, which has the layout `view_of`.
    pub(super) fn view(op: &'static str, inputs: Inputs, state: State, view_of: Option<Box<Layout>>) -> Arc<Node> {
        inputs.iter().flatten().for_each(|node| _ = node.uses.fetch_add(1, Ordering::Relaxed));
        let seq = SEQ.fetch_add(1, Ordering::Relaxed);
        let (uses, state, hooks, changed) = (AtomicU32::new(0), Mutex::new(state), OnceLock::new(), OnceLock::new());
        Arc::new(Node { seq, op, inputs, uses, frozen: AtomicBool::new(false), state, hooks, view_of, changed })
    }

    #[inline]
    pub(super) fn is_frozen(&self) -> bool {
        self.frozen.load(Ordering::Relaxed)
    }

    /// Freezes a leaf, or trains it again.
    pub(super) fn set_frozen(&self, frozen: bool) {
        self.frozen.store(frozen, Ordering::Relaxed);
    }

    /// The node of the tensor that this is a view of, through all views between, and that tensor's layout; itself and
    /// `layout`, its own, where it is no view.
    pub(super) fn base<'a>(self: &'a Arc<Node>, layout: &'a Layout) -> (&'a Arc<Node>, &'a Layout) {
        let (mut node, mut layout) = (self, layout);
        while let (Some(of), Some(Some(input))) = (&node.view_of, node.inputs.first()) {
            (node, layout) = (input, of);
        }
        (node, layout)
    }

    /// A number that the tensor keeps through all changes in place, and the last change of its storage that made its node.
    pub(super) fn change(&self) -> (u64, u32) {
        self.changed.get().copied().unwrap_or((self.seq, 0))
    }

    /// Says that this new node is of tensor `id`, after this change.
    pub(super) fn set_change(&self, id: u64, change: u32) {
        self.changed.set((id, change)).expect("a new node is of one change");
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The operation whose result this is.
    pub(crate) fn op(&self) -> &'static str {
        self.op
    }

    pub(super) fn is_leaf(&self) -> bool {
        matches!(*self.state(), State::Leaf(_))
    }

    /// The hooks, if there are any.
    pub(super) fn hooks(&self) -> Option<&Hooks> {
        self.hooks.get().map(|hooks| &**hooks)
    }

    /// The hooks of this node, made where there are none yet.
    pub(super) fn hooks_or_new(&self) -> &Hooks {
        self.hooks.get_or_init(Box::default)
    }

    /// What its gradient will be multiplied by, where all of the gradient comes from the one operation that asks and
    /// there are no hooks.
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
    /// Takes the chain of inputs apart in a loop: the default would recurse once a node.
    fn drop(&mut self) {
        let mut orphans: Vec<Arc<Node>> = Vec::new();
        let dismantle = |node: &mut Node, orphans: &mut Vec<Arc<Node>>| {
            // What a closure saved holds inputs too: it goes first, while `inputs` still hold them.
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

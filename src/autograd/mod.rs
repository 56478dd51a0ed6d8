//! Reverse-mode differentiation: the graph belongs to the tensors.
//!
//! A tensor that [`Tensor::requires_grad_`] owns a leaf node; every operation on a tracked tensor gives a tensor with a
//! node that holds its inputs' nodes and one closure, which turns the gradient of the result into gradients of the inputs.
//! There is no tape: drop the tensors and the graph is gone. [`Tensor::backward`] walks the nodes from the youngest to the
//! oldest with a heap (no recursion, however long the chain), consumes each closure as it goes, so that what it saved is
//! freed at once, and leaves the sums in the leaves' [`Tensor::grad`].
//!
//! An operation saves tensors as `Saved`, which remembers the storage's version: an in-place change between forward and
//! backward is an error, never a wrong gradient.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use smallvec::SmallVec;

use crate::{Error, Expr, Result, Tensor};

mod backward;
mod check;

pub(crate) use backward::Context;
pub use check::gradcheck;

/// The gradients of an operation's inputs, in order; None where none flows or none was wanted.
pub(crate) type Gradients = SmallVec<[Option<Tensor>; 3]>;

type BackwardFn = Box<dyn FnOnce(&mut Context) -> Result<Gradients> + Send>;

/// A place in the graph: a leaf that collects a gradient, or an operation's result.
pub(crate) struct Node {
    /// Grows with every node: an operation's number is above its inputs'.
    seq: u64,
    op: &'static str,
    inputs: SmallVec<[Option<Arc<Node>>; 3]>,
    /// How often it was an operation's input.
    uses: AtomicU32,
    state: Mutex<State>,
}

enum State {
    /// Boxed, because most nodes are operations.
    Leaf(Box<Leaf>),
    Operation(BackwardFn, Option<Arc<Factor>>),
    Consumed,
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
struct Leaf {
    grad: Option<Tensor>,
    /// Where an optimiser wants the gradient written: a view of its flat gradient buffer.
    slot: Option<Tensor>,
    /// Whether a backward may be writing to the slot: that of another thread then keeps away.
    lent: bool,
}

impl Node {
    fn new(op: &'static str, inputs: SmallVec<[Option<Arc<Node>>; 3]>, state: State) -> Arc<Node> {
        static SEQ: AtomicU64 = AtomicU64::new(0);
        inputs.iter().flatten().for_each(|node| _ = node.uses.fetch_add(1, Ordering::Relaxed));
        let seq = SEQ.fetch_add(1, Ordering::Relaxed);
        Arc::new(Node { seq, op, inputs, uses: AtomicU32::new(0), state: Mutex::new(state) })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The operation whose result this is.
    pub(crate) fn op(&self) -> &'static str {
        self.op
    }

    fn is_leaf(&self) -> bool {
        matches!(*self.state(), State::Leaf(_))
    }

    /// What its gradient will be multiplied by, where all of the gradient comes from the one operation that asks.
    fn factor(&self) -> Option<Arc<Factor>> {
        match &*self.state() {
            State::Operation(_, factor) if self.uses.load(Ordering::Relaxed) == 1 => factor.clone(),
            _ => None,
        }
    }
}

impl Drop for Node {
    /// Takes the chain of inputs apart in a loop: the default would recurse once a node.
    fn drop(&mut self) {
        let mut orphans: Vec<Arc<Node>> = self.inputs.drain(..).flatten().collect();
        while let Some(node) = orphans.pop() {
            if let Some(mut node) = Arc::into_inner(node) {
                orphans.extend(node.inputs.drain(..).flatten());
            }
        }
    }
}

thread_local! {
    static GRAD_ENABLED: Cell<bool> = const { Cell::new(true) };
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
    struct Restore(bool);
    impl Drop for Restore {
        fn drop(&mut self) {
            GRAD_ENABLED.set(self.0);
        }
    }
    let _restore = Restore(GRAD_ENABLED.replace(false));
    f()
}

/// Whether an operation on these inputs is to be recorded.
pub(crate) fn is_tracked(inputs: &[&Tensor]) -> bool {
    is_grad_enabled() && inputs.iter().any(|t| t.node.is_some())
}

/// `out` with a node: `backward` gets the gradient of `out` and gives the inputs' gradients, in the order of `inputs`.
/// Call it only where [`is_tracked`]; what the closure keeps should be [`Saved`] tensors.
pub(crate) fn record(
    op: &'static str,
    out: Tensor,
    inputs: &[&Tensor],
    backward: impl FnOnce(&mut Context) -> Result<Gradients> + Send + 'static,
) -> Tensor {
    record_with_factor(op, out, inputs, None, backward)
}

/// [`record`] for an operation that first multiplies its gradient by something, unless [`Context::factor`] says that it
/// has been.
pub(crate) fn record_with_factor(
    op: &'static str,
    out: Tensor,
    inputs: &[&Tensor],
    factor: Option<Factor>,
    backward: impl FnOnce(&mut Context) -> Result<Gradients> + Send + 'static,
) -> Tensor {
    let inputs = inputs.iter().map(|t| t.node.clone()).collect();
    let state = State::Operation(Box::new(backward), factor.map(Arc::new));
    Tensor { node: Some(Node::new(op, inputs, state)), ..out }
}

/// [`record`] for an operation of one input, where it is tracked: `backward` maps gradient to gradient.
pub(crate) fn record_unary(
    op: &'static str,
    out: Tensor,
    input: &Tensor,
    backward: impl FnOnce(Tensor) -> Result<Tensor> + Send + 'static,
) -> Tensor {
    if !is_tracked(&[input]) {
        return out;
    }
    record(op, out, &[input], move |ctx| Ok(SmallVec::from_iter([Some(backward(ctx.grad()?)?)])))
}

/// Refuses an in-place change of `target` that the graph would not see.
pub(crate) fn check_in_place(op: &'static str, target: &Tensor, sources: &[&Tensor]) -> Result<()> {
    if !is_grad_enabled() {
        return Ok(());
    }
    let reason = if target.node.is_some() {
        "the tensor changed in place is part of a graph: use the operation without the final '_', or wrap it in no_grad"
    } else if sources.iter().any(|t| t.node.is_some()) {
        "a source is part of a graph, which an in-place change cannot extend: detach() it, or use the operation without the final '_'"
    } else {
        return Ok(());
    };
    Err(Error::Autograd { op, reason: reason.into() })
}

/// A tensor kept for backward, with the version its storage had.
pub(crate) struct Saved {
    tensor: Tensor,
    version: u64,
}

impl Saved {
    pub(crate) fn new(tensor: &Tensor) -> Saved {
        Saved { tensor: tensor.detach(), version: tensor.storage.version() }
    }

    /// The tensor, unless its storage was changed in place since.
    pub(crate) fn unpack(self, op: &'static str) -> Result<Tensor> {
        self.get(op).map(Tensor::detach)
    }

    /// [`unpack`](Self::unpack) of what others hold as well.
    pub(crate) fn get(&self, op: &'static str) -> Result<&Tensor> {
        if self.tensor.storage.version() == self.version {
            return Ok(&self.tensor);
        }
        let reason = format!(
            "a tensor of shape {} that its gradient needs was changed in place after the forward pass: change a clone() instead",
            self.tensor.shape()
        );
        Err(Error::Autograd { op, reason })
    }
}

impl Tensor {
    /// This tensor as a leaf whose gradient is collected (`true`), or outside the graph (`false`). Shares the storage.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] for integers and bool; [`Error::Autograd`] for the result of a tracked operation.
    pub fn requires_grad_(self, requires_grad: bool) -> Result<Tensor> {
        let op = "requires_grad_";
        match &self.node {
            Some(node) if !node.is_leaf() => {
                let reason = "only a leaf can be changed, and this tensor is an operation's result: detach() it first";
                return Err(Error::Autograd { op, reason: reason.into() });
            }
            Some(_) if requires_grad => return Ok(self),
            None if requires_grad => self.dtype.check_float(op)?,
            _ => {}
        }
        let leaf = || Node::new("leaf", SmallVec::new(), State::Leaf(Box::default()));
        Ok(Tensor { node: requires_grad.then(leaf), ..self })
    }

    /// Whether gradients flow to or through this tensor.
    pub fn requires_grad(&self) -> bool {
        self.node.is_some()
    }

    /// Whether no tracked operation made this tensor: [`Tensor::backward`] leaves gradients in leaves only.
    pub fn is_leaf(&self) -> bool {
        self.node.as_ref().is_none_or(|n| n.is_leaf())
    }

    /// The gradient collected so far, of this tensor's shape and dtype; None before the first [`Tensor::backward`], for
    /// tensors that are no leaf, and after [`Tensor::zero_grad`]. The handle shares its storage: the next backward may
    /// write there, so keep a `clone()`.
    pub fn grad(&self) -> Option<Tensor> {
        match &*self.node.as_ref()?.state() {
            State::Leaf(leaf) => leaf.grad.as_ref().map(Tensor::shallow_clone),
            _ => None,
        }
    }

    /// Forgets the gradient; the next backward moves a new one in (PyTorch's `zero_grad(set_to_none=True)`).
    pub fn zero_grad(&self) {
        if let Some(node) = &self.node
            && let State::Leaf(leaf) = &mut *node.state()
        {
            leaf.grad = None;
            leaf.lent = false; // where a backward failed
        }
    }

    /// Where backward is to write this leaf's gradient: a view of an optimiser's flat buffer, of the leaf's shape.
    pub(crate) fn set_grad_slot(&self, view: Tensor) {
        if let Some(node) = &self.node
            && let State::Leaf(leaf) = &mut *node.state()
        {
            leaf.slot = Some(view);
        }
    }

    /// Whether the collected gradient lies in the slot.
    pub(crate) fn grad_in_slot(&self) -> bool {
        let Some(node) = &self.node else { return false };
        let State::Leaf(leaf) = &*node.state() else { return false };
        match (&leaf.grad, &leaf.slot) {
            (Some(grad), Some(slot)) => grad.shares_storage(slot) && grad.layout == slot.layout,
            _ => false,
        }
    }
}

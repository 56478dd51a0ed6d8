//! How operations put themselves into the graph.

use std::sync::Arc;

use smallvec::SmallVec;

use super::modes::is_dependencies_only;
use super::node::{Factor, Inputs, Node, Operation, State};
use super::{Context, Gradients, Group, is_grad_enabled};
use crate::device::capture::is_capturing;
use crate::tensor::Layout;
use crate::{Error, Result, Tensor};

/// What gives the gradients of an operation's inputs from that of its result.
pub(crate) trait Backward: Fn(&mut Context) -> Result<Gradients> + Send + Sync + 'static {}

impl<F: Fn(&mut Context) -> Result<Gradients> + Send + Sync + 'static> Backward for F {}

/// Whether an operation on these inputs is to be recorded.
#[inline]
pub(crate) fn is_tracked(inputs: &[&Tensor]) -> bool {
    is_grad_enabled() && inputs.iter().any(|t| t.requires_grad())
}

/// `out` with a node: `backward` gets the gradient of `out` and gives the inputs' gradients, in the order of `inputs`.
/// Call it only where [`is_tracked`]; what the closure keeps should be [`Saved`] tensors.
///
/// The closure may launch what it likes, so its own result has no gradient: a backward that creates a graph stops here
/// with an error. [`record_twice`] is for closures that can be recorded.
pub(crate) fn record(op: &'static str, out: Tensor, inputs: &[&Tensor], backward: impl Backward) -> Tensor {
    with_operation(op, out, inputs, Operation { backward: Arc::new(backward), factor: None, twice: false })
}

/// [`record`] for a closure that is made of recorded operations itself, at least where [`Context::create_graph`]:
/// methods of tensors, on the gradient and on what [`Saved::get`] and [`Context::result`] give.
pub(crate) fn record_twice(op: &'static str, out: Tensor, inputs: &[&Tensor], backward: impl Backward) -> Tensor {
    with_operation(op, out, inputs, Operation { backward: Arc::new(backward), factor: None, twice: true })
}

/// [`record_twice`] for an operation that first multiplies its gradient by something, unless [`Context::factor`] says
/// that it has been.
pub(crate) fn record_with_factor(
    op: &'static str,
    out: Tensor,
    inputs: &[&Tensor],
    factor: Option<Factor>,
    backward: impl Backward,
) -> Tensor {
    with_operation(
        op,
        out,
        inputs,
        Operation { backward: Arc::new(backward), factor: factor.map(Arc::new), twice: true },
    )
}

/// [`record_twice`] for an operation of one input, where it is tracked: `backward` maps gradient to gradient, as the opposite
/// of a view does.
pub(crate) fn record_unary_twice(
    op: &'static str,
    out: Tensor,
    input: &Tensor,
    backward: impl Fn(Tensor) -> Result<Tensor> + Send + Sync + 'static,
) -> Tensor {
    if !is_tracked(&[input]) {
        return out;
    }
    record_twice(op, out, &[input], move |ctx| Ok(SmallVec::from_iter([Some(backward(ctx.grad()?)?)])))
}

/// A node, of an operation whose closure can be recorded, with these inputs.
pub(super) fn node_of(op: &'static str, inputs: Inputs, backward: impl Backward) -> Arc<Node> {
    let operation = Operation { backward: Arc::new(backward), factor: None, twice: true };
    Node::new(op, inputs, state(operation))
}

/// [`record_twice`] for what depends on these nodes.
pub(super) fn record_of_nodes(op: &'static str, out: Tensor, nodes: Vec<Arc<Node>>, backward: impl Backward) -> Tensor {
    Tensor { made_by: Some(node_of(op, nodes.into_iter().map(Some).collect(), backward)), ..out }
}

fn with_operation(op: &'static str, out: Tensor, inputs: &[&Tensor], operation: Operation) -> Tensor {
    with_node(op, out, inputs.iter().map(|t| t.node()).collect(), operation)
}

fn with_node(op: &'static str, out: Tensor, inputs: Inputs, operation: Operation) -> Tensor {
    Tensor { made_by: Some(Node::new(op, inputs, state(operation))), ..out }
}

fn state(operation: Operation) -> State {
    if is_dependencies_only() { State::Consumed } else { State::Operation(operation) }
}

/// The view `layout` of a tensor, recorded where that is tracked: `backward` brings a gradient back to the tensor's shape.
pub(crate) fn record_view(
    op: &'static str,
    layout: Layout,
    input: &Tensor,
    backward: impl Fn(Tensor) -> Result<Tensor> + Send + Sync + 'static,
) -> Tensor {
    let out = input.with_layout(layout);
    if !input.requires_grad() {
        return out;
    }
    if !is_grad_enabled() {
        return Tensor { group: Group::UNRECORDED_VIEW, ..out };
    }
    let made_by = input.node().map(|node| view_node(op, node, input.layout.clone(), backward));
    Tensor { made_by, ..out }
}

/// The node of a view of what has this node and the layout `of`.
pub(super) fn view_node(
    op: &'static str,
    node: Arc<Node>,
    of: Layout,
    backward: impl Fn(Tensor) -> Result<Tensor> + Send + Sync + 'static,
) -> Arc<Node> {
    let backward = Arc::new(move |ctx: &mut Context| Ok(SmallVec::from_iter([Some(backward(ctx.grad()?)?)])));
    let operation = Operation { backward, factor: None, twice: true };
    Node::view(op, SmallVec::from_iter([Some(node)]), state(operation), Some(Box::new(of)))
}

/// A tensor kept for backward, with the version its storage had. It keeps its place in the graph, so that a backward
/// which creates a graph finds it there: save inputs themselves, not detached views of them. An operation's own result
/// has no place yet when it is saved; [`Context::result`] gives it one. It does not keep what is recorded of changes of its
/// storage: that may hold it.
pub(crate) struct Saved {
    tensor: Tensor,
    version: u64,
    /// None for what a capture saved: a backward pass after a replay needs what the replay has written.
    replays: Option<u64>,
}

impl Saved {
    pub(crate) fn new(tensor: &Tensor) -> Saved {
        let replays = (!is_capturing(tensor.device())).then(|| tensor.storage.replays());
        Saved::of(Tensor { made_by: tensor.node(), ..tensor.detach() }, tensor.storage.version(), replays)
    }

    /// The same, kept by somebody else.
    pub(super) fn share(&self) -> Saved {
        Saved::of(self.tensor.shallow_clone(), self.version, self.replays)
    }

    fn of(tensor: Tensor, version: u64, replays: Option<u64>) -> Saved {
        tensor.storage.save();
        Saved { tensor, version, replays }
    }

    /// Whether it is this tensor: the same elements of the same storage.
    pub(super) fn is(&self, tensor: &Tensor) -> bool {
        self.tensor.shares_storage(tensor) && self.tensor.layout == tensor.layout
    }

    /// Another handle on the tensor, unless its storage was changed in place since.
    pub(crate) fn unpack(&self, op: &'static str) -> Result<Tensor> {
        self.get(op).map(Tensor::shallow_clone)
    }

    /// The tensor, unless its storage was changed in place since.
    pub(crate) fn get(&self, op: &'static str) -> Result<&Tensor> {
        let storage = &self.tensor.storage;
        if storage.version() == self.version && self.replays.is_none_or(|replays| replays == storage.replays()) {
            return Ok(&self.tensor);
        }
        let reason = format!(
            "a tensor of shape {} that its gradient needs was changed in place after the forward pass: change a clone() instead",
            self.tensor.shape()
        );
        Err(Error::Autograd { op, reason })
    }
}

impl Drop for Saved {
    fn drop(&mut self) {
        self.tensor.storage.unsave();
    }
}

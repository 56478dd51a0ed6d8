//! Functions that add operations to the graph.

use std::sync::Arc;

use smallvec::SmallVec;

use super::modes::is_dependencies_only;
use super::node::{BackwardFn, Factor, Inputs, Node, Operation, State};
use super::{Context, DetachedGroup, Gradients, is_grad_enabled};
use crate::device::capture::is_capturing;
use crate::tensor::Layout;
use crate::{Error, Result, Tensor};

/// A closure that computes the gradients of an operation's inputs from the gradient of its result.
pub(crate) trait Backward: Fn(&mut Context) -> Result<Gradients> + Send + Sync + 'static {}

impl<F: Fn(&mut Context) -> Result<Gradients> + Send + Sync + 'static> Backward for F {}

/// True if an operation on these inputs must be recorded.
#[inline]
pub(crate) fn is_tracked(inputs: &[&Tensor]) -> bool {
    is_grad_enabled() && inputs.iter().any(|t| t.requires_grad())
}

/// Returns `out` with a new node. `backward` gets the gradient of `out` and returns the gradients of the inputs, in the
/// order of `inputs`. Call this function only if [`is_tracked`] is true. The closure should keep tensors as [`Saved`].
/// The closure may launch any kernels, so its result cannot be differentiated: a backward pass that creates a graph
/// fails here. Use [`record_differentiable`] for closures whose operations can be recorded.
pub(crate) fn record(op: &'static str, out: Tensor, inputs: &[&Tensor], backward: impl Backward) -> Tensor {
    with_operation(op, out, inputs, Arc::new(backward), None, false)
}

/// Like [`record`], for a closure that uses only recorded operations if [`Context::create_graph`] is true. Recorded
/// operations are methods of the gradient and of tensors that [`Saved::get`] and [`Context::unpack_result`] return.
pub(crate) fn record_differentiable(
    op: &'static str,
    out: Tensor,
    inputs: &[&Tensor],
    backward: impl Backward,
) -> Tensor {
    with_operation(op, out, inputs, Arc::new(backward), None, true)
}

/// Like [`record_differentiable`], for an operation whose gradient is first multiplied by `factor`. The closure does not multiply if
/// [`Context::take_factor`] returns `None`.
pub(crate) fn record_with_factor(
    op: &'static str,
    out: Tensor,
    inputs: &[&Tensor],
    factor: Option<Factor>,
    backward: impl Backward,
) -> Tensor {
    with_operation(op, out, inputs, Arc::new(backward), factor, true)
}

/// Like [`record_differentiable`], for an operation with one input. Records only if the input is tracked. `backward` maps the gradient
/// of the result to the gradient of the input.
pub(crate) fn record_unary_differentiable(
    op: &'static str,
    out: Tensor,
    input: &Tensor,
    backward: impl Fn(Tensor) -> Result<Tensor> + Send + Sync + 'static,
) -> Tensor {
    if !is_tracked(&[input]) {
        return out;
    }
    record_differentiable(op, out, &[input], move |ctx| Ok(SmallVec::from_iter([Some(backward(ctx.grad()?)?)])))
}

pub(super) fn operation_node(op: &'static str, inputs: Inputs, backward: impl Backward) -> Arc<Node> {
    let operation = Operation { backward: Arc::new(backward), factor: None, is_differentiable: true };
    Node::new(op, inputs, state(operation))
}

/// Like [`record_differentiable`], with the nodes of the inputs in place of the inputs.
pub(super) fn record_with_input_nodes(
    op: &'static str,
    out: Tensor,
    nodes: Vec<Arc<Node>>,
    backward: impl Backward,
) -> Tensor {
    Tensor { made_by: Some(operation_node(op, nodes.into_iter().map(Some).collect(), backward)), ..out }
}

fn with_operation(
    op: &'static str,
    out: Tensor,
    inputs: &[&Tensor],
    backward: Arc<BackwardFn>,
    factor: Option<Factor>,
    is_differentiable: bool,
) -> Tensor {
    let operation = Operation { backward, factor: factor.map(Arc::new), is_differentiable };
    let inputs = inputs.iter().map(|t| t.node()).collect();
    Tensor { made_by: Some(Node::new(op, inputs, state(operation))), ..out }
}

/// Returns the state of a new operation node. Inside [`dependencies_only`](super::modes::dependencies_only) it has no closure.
fn state(operation: Operation) -> State {
    if is_dependencies_only() { State::Consumed } else { State::Operation(operation) }
}

/// Returns a view of a tensor; records it if the tensor is tracked. `backward` maps the gradient of the view to the tensor's shape.
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
        return Tensor { group: DetachedGroup::UNRECORDED_VIEW, ..out };
    }
    let made_by = input.node().map(|node| view_node(op, node, input.layout.clone(), backward));
    Tensor { made_by, ..out }
}

/// Makes the node of a view. The viewed tensor has the given node and the layout `of`.
pub(super) fn view_node(
    op: &'static str,
    node: Arc<Node>,
    of: Layout,
    backward: impl Fn(Tensor) -> Result<Tensor> + Send + Sync + 'static,
) -> Arc<Node> {
    let backward = Arc::new(move |ctx: &mut Context| Ok(SmallVec::from_iter([Some(backward(ctx.grad()?)?)])));
    let operation = Operation { backward, factor: None, is_differentiable: true };
    Node::view(op, SmallVec::from_iter([Some(node)]), state(operation), Some(Box::new(of)))
}

/// A tensor saved for backward, with the version its storage had when it was saved.
///
/// The saved tensor keeps its node, which a backward pass that creates a graph needs. So save inputs themselves, not detached views of
/// them. An operation's own result has no node yet when it is saved; [`Context::unpack_result`] adds the node. A saved tensor does not
/// keep its storage's record of in-place changes alive: that record may hold the saved tensor, and the two would never be freed.
pub(crate) struct Saved {
    tensor: Tensor,
    version: u64,
    /// The storage's replay count. None if saved during a graph capture: backward after a replay uses the values that the replay wrote.
    replays: Option<u64>,
}

impl Saved {
    pub(crate) fn new(tensor: &Tensor) -> Saved {
        let replays = (!is_capturing(tensor.device())).then(|| tensor.storage.replays());
        Saved::of(Tensor { made_by: tensor.node(), ..tensor.detach() }, tensor.storage.version(), replays)
    }

    pub(super) fn another_handle(&self) -> Saved {
        Saved::of(self.tensor.shallow_clone(), self.version, self.replays)
    }

    fn of(tensor: Tensor, version: u64, replays: Option<u64>) -> Saved {
        tensor.storage.add_saved_handle();
        Saved { tensor, version, replays }
    }

    /// True if `tensor` views the same elements of the same storage as the saved tensor.
    pub(super) fn is_same_tensor(&self, tensor: &Tensor) -> bool {
        self.tensor.shares_storage(tensor) && self.tensor.layout == tensor.layout
    }

    /// Returns another handle on the saved tensor. Fails if its storage was changed in place after saving.
    pub(crate) fn unpack(&self, op: &'static str) -> Result<Tensor> {
        self.get(op).map(Tensor::shallow_clone)
    }

    /// Returns the saved tensor. Fails if its storage was changed in place after saving.
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
        self.tensor.storage.remove_saved_handle();
    }
}

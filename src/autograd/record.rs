//! Functions that add operations to the graph.

use std::sync::Arc;

use smallvec::SmallVec;

use super::modes::is_dependencies_only;
use super::node::{BackwardFn, DetachedGroup, Factor, Gradients, Inputs, Node, Operation, State};
use super::{Context, is_grad_enabled};
use crate::tensor::Layout;
use crate::{Result, Tensor};

/// A closure that computes the gradients of an operation's inputs from the gradient of its result.
pub(crate) trait Backward: Fn(&mut Context) -> Result<Gradients> + Send + Sync + 'static {}

impl<F: Fn(&mut Context) -> Result<Gradients> + Send + Sync + 'static> Backward for F {}

/// True if an operation on these inputs must be recorded.
#[inline]
pub(crate) fn is_tracked(inputs: &[&Tensor]) -> bool {
    is_grad_enabled() && inputs.iter().any(|t| t.requires_grad())
}

/// Returns `out` with a new node. `backward` gets the gradient of `out` and returns the gradients of the inputs, in the
/// order of `inputs`. Call this function only if [`is_tracked`] is true. The closure should keep tensors as [`Saved`](super::Saved).
/// The closure may launch any kernels, so its result cannot be differentiated: a backward pass that creates a graph
/// fails here. Use [`record_differentiable`] for closures whose operations can be recorded.
pub(crate) fn record(op: &'static str, out: Tensor, inputs: &[&Tensor], backward: impl Backward) -> Tensor {
    with_operation(op, out, inputs, Arc::new(backward), None, false)
}

/// Like [`record`], for a closure that uses only recorded operations if [`Context::create_graph`] is true. Recorded
/// operations are methods of the gradient and of tensors that [`Saved::get`](super::Saved::get) and [`Context::unpack_result`] return.
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

//! Gradient checkpointing: recomputes a function in backward instead of keeping its intermediate tensors in memory.

use std::sync::Arc;

use super::Saved;
use super::modes::{
    autocast, autocast_dtype, dependencies_only, enable_grad, is_grad_enabled, record_draws, replay_draws,
};
use super::node::{Node, next_seq};
use super::record::record_with_input_nodes;
use crate::{Result, Tensor};

/// Computes `f(inputs)` without keeping the tensors that its operations would save for backward (PyTorch's
/// `torch.utils.checkpoint.checkpoint`). In backward, `f` runs again with the same random numbers and is then
/// differentiated. Until backward only the inputs stay in memory, not the intermediate results; in return, `f` runs
/// twice.
///
/// Gradients also flow to tensors that `f` captures, such as a layer's parameters. Do not change captured tensors or
/// inputs in place between the two runs. Such a change of an input is an error; of a captured tensor, it is not
/// detected. [`Module::forward_checkpointed`](crate::nn::Module::forward_checkpointed) checkpoints a module. Both runs
/// return the errors of `f`. Backward also fails if `f` then returns a different shape, dtype or device.
///
/// ```
/// use claystone::{Device, Tensor, autograd::checkpoint};
/// let x = Tensor::ones(3, Device::Cpu)?.requires_grad_(true)?;
/// let w = Tensor::full(3, 2.0, Device::Cpu)?.requires_grad_(true)?;
/// let weight = w.shallow_clone();
/// let y = checkpoint(move |x| x[0].mul(&weight)?.exp()?.dropout(0.5), &[&x])?;
/// y.sum((), false)?.backward()?;
/// assert!(x.grad().is_some() && w.grad().is_some());
/// # Ok::<(), claystone::Error>(())
/// ```
pub fn checkpoint(
    f: impl Fn(&[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
    inputs: &[&Tensor],
) -> Result<Tensor> {
    let op = "checkpoint";
    let given: Vec<Tensor> = inputs.iter().map(|t| t.shallow_clone()).collect();
    if !is_grad_enabled() {
        return f(&given);
    }
    // Nodes are recorded without closures: only the earlier nodes that the result depends on are needed here.
    let first = next_seq();
    let (out, seeds) = record_draws(|| dependencies_only(|| f(&given)));
    let out = out?;
    let Some(root) = out.node() else { return Ok(out) };
    let outside = input_nodes_before(&root, first);
    if outside.iter().any(|node| node.seq == root.seq) {
        return Ok(out); // `f` returned an input
    }
    // A view of an input is copied: as a view it would get a second node, in addition to the input's node.
    let out = if given.iter().any(|t| t.shares_storage(&out)) { out.deep_copy(false)? } else { out.detach() };
    let precision = autocast_dtype();
    let saved: Vec<Saved> = given.iter().map(Saved::new).collect();
    Ok(record_with_input_nodes(op, out, outside, move |ctx| {
        let given = saved.iter().map(|s| s.unpack(op)).collect::<Result<Vec<_>>>()?;
        let again = autocast(precision, || replay_draws(&seeds, || enable_grad(|| f(&given))))?;
        ctx.differentiate_through(&again)
    }))
}

/// Applies functions one after another, each as a [`checkpoint`] (PyTorch's `checkpoint_sequential`). Keeps the tensors
/// between the functions, but no tensors inside them. Fails as [`checkpoint`] does.
pub fn checkpoint_sequential<F>(functions: impl IntoIterator<Item = F>, input: &Tensor) -> Result<Tensor>
where
    F: Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
{
    functions.into_iter().try_fold(input.shallow_clone(), |x, f| checkpoint(move |x| f(&x[0]), &[&x]))
}

/// Returns the first node older than `first` on each path from `root` to older nodes, without duplicates.
fn input_nodes_before(root: &Arc<Node>, first: u64) -> Vec<Arc<Node>> {
    let mut seen = std::collections::HashSet::new();
    let (mut open, mut outside) = (vec![root], Vec::new());
    while let Some(node) = open.pop() {
        if !seen.insert(node.seq) {
            continue;
        }
        if node.seq < first { outside.push(node.clone()) } else { open.extend(node.inputs.iter().flatten()) }
    }
    outside.sort_unstable_by_key(|node| node.seq);
    outside
}

//! Checkpoints: memory for time.

use std::sync::Arc;

use super::modes::{dependencies_only, enable_grad, is_grad_enabled};
use super::node::{Node, next_seq};
use super::record::record_of_nodes;
use super::{Saved, autocast, autocast_dtype};
use crate::autograd::rng_replay::{recorded, replayed};
use crate::{Result, Tensor};

/// `f(inputs)` without keeping what its operations save for backward: `f` runs once more in backward, with the same random
/// numbers, and is differentiated then (PyTorch's `torch.utils.checkpoint.checkpoint`). Memory of the size of the inputs
/// instead of all that `f` computes, for its time once more.
///
/// Gradients also flow to tensors that `f` holds itself: a layer's parameters. Between the two runs neither these nor the
/// inputs may be changed in place; for the inputs that is checked. A module checkpoints itself by
/// [`Module::forward_checkpointed`](crate::nn::Module::forward_checkpointed).
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
///
/// # Errors
/// Those of `f`, here and in backward, and there where `f` gives a tensor of another shape, dtype or device.
pub fn checkpoint(
    f: impl Fn(&[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
    inputs: &[&Tensor],
) -> Result<Tensor> {
    let op = "checkpoint";
    let given: Vec<Tensor> = inputs.iter().map(|t| t.shallow_clone()).collect();
    if !is_grad_enabled() {
        return f(&given);
    }
    // Nodes without closures tell what the result depends on: everything that was there before.
    let first = next_seq();
    let (out, seeds) = recorded(|| dependencies_only(|| f(&given)));
    let out = out?;
    let Some(root) = out.node() else { return Ok(out) };
    let outside = outside(&root, first);
    if outside.iter().any(|node| node.seq == root.seq) {
        return Ok(out); // nothing was computed: it is an input itself
    }
    // A view of an input would have a place in the graph beside that of the input.
    let out = if given.iter().any(|t| t.shares_storage(&out)) { out.copied(false)? } else { out.detach() };
    let precision = autocast_dtype();
    let saved: Vec<Saved> = given.iter().map(Saved::new).collect();
    Ok(record_of_nodes(op, out, outside, move |ctx| {
        let given = saved.iter().map(|s| s.unpack(op)).collect::<Result<Vec<_>>>()?;
        let again = autocast(precision, || replayed(&seeds, || enable_grad(|| f(&given))))?;
        ctx.through(&again)
    }))
}

/// [`checkpoint`] of one function after another, each on the result of the one before (PyTorch's
/// `checkpoint_sequential`): of `n` layers, what lies between them is kept, and what is inside is not.
///
/// # Errors
/// As [`checkpoint`].
pub fn checkpoint_sequential<F>(functions: impl IntoIterator<Item = F>, input: &Tensor) -> Result<Tensor>
where
    F: Fn(&Tensor) -> Result<Tensor> + Send + Sync + 'static,
{
    functions.into_iter().try_fold(input.shallow_clone(), |x, f| checkpoint(move |x| f(&x[0]), &[&x]))
}

/// The nodes older than `first` that `root` depends on, the youngest of each path, each once.
fn outside(root: &Arc<Node>, first: u64) -> Vec<Arc<Node>> {
    let mut seen = std::collections::HashSet::new();
    let (mut open, mut outside) = (vec![root], Vec::new());
    while let Some(node) = open.pop() {
        if !seen.insert(node.seq) {
            continue;
        }
        match node.seq < first {
            true => outside.push(node.clone()),
            false => open.extend(node.inputs.iter().flatten()),
        }
    }
    outside.sort_unstable_by_key(|node| node.seq);
    outside
}

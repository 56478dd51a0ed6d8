//! The engine of the backward pass. It visits the nodes of the graph from the newest to the oldest, with a heap.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use smallvec::SmallVec;

use super::context::{Context, Engine, Gradient, PendingGradients, address};
use super::hooks::HAS_POST_ACCUMULATE_HOOKS;
use super::modes::{self, SCOPES};
use super::node::{Gradients, Leaf, Node, Operation, State};
use super::{autocast, enable_grad, no_grad};
use crate::device::profiler::{self, RecordKind};
use crate::storage::{MemoryMode, Role, with_memory_mode};
use crate::sync::OnDrop;
use crate::{Result, Tensor};

/// Runs `f` once, at the end of the backward pass in progress on this thread (PyTorch's `Variable._execution_engine.queue_callback`). Call
/// this function from a hook. An error of `f` becomes the error of the pass. If the pass fails, `f` is not called. Fails with
/// [`crate::Error::Autograd`] if no backward pass is in progress on this thread.
///
/// ```
/// use claystone::{Device, Tensor, autograd};
/// use std::sync::{Arc, atomic::{AtomicBool, Ordering::Relaxed}};
/// let (w, over) = (Tensor::ones(2, Device::Cpu)?.requires_grad_(true)?, Arc::new(AtomicBool::new(false)));
/// let flag = over.clone();
/// w.register_post_accumulate_grad_hook(move |_grad| {
///     let flag = flag.clone();
///     autograd::queue_callback(move || Ok(flag.store(true, Relaxed)))
/// })?;
/// w.sum((), false)?.backward()?;
/// assert!(over.load(Relaxed));
/// assert!(autograd::queue_callback(|| Ok(())).is_err(), "no backward is under way");
/// # Ok::<(), claystone::Error>(())
/// ```
pub fn queue_callback(f: impl FnOnce() -> Result<()> + 'static) -> Result<()> {
    SCOPES.with(|scopes| match &mut *scopes.callbacks.borrow_mut() {
        Some(callbacks) => {
            callbacks.push(Box::new(f));
            Ok(())
        }
        None => no_gradient!("queue_callback", "no backward pass is in progress on this thread: call it from a hook"),
    })
}

/// A heap entry; the heap returns the largest first. The first field is the node's number (newer nodes have higher numbers), or the maximum
/// for a leaf whose gradient is complete. The second field is the node's number, reversed: among complete leaves, the oldest comes first.
type QueuedNode = (u64, Reverse<u64>);

/// Counts the gradients that each leaf with post-accumulate hooks will receive from operations reachable from the roots. Leaves are older
/// than these operations and would be visited last. With the count, a leaf is visited as soon as its gradient is complete.
fn count_expected_gradients<'a>(roots: impl Iterator<Item = &'a Arc<Node>>) -> HashMap<u64, usize> {
    let mut leaves = HashMap::new();
    if !HAS_POST_ACCUMULATE_HOOKS.load(Relaxed) {
        return leaves;
    }
    let mut nodes: Vec<&Arc<Node>> = roots.collect();
    let mut seen: HashSet<u64> = nodes.iter().map(|node| node.seq).collect();
    while let Some(node) = nodes.pop() {
        for input in node.inputs.iter().flatten() {
            match &*input.state() {
                State::Leaf(leaf) if !leaf.post_accumulate_hooks.is_empty() => {
                    *leaves.entry(input.seq).or_insert(0) += 1
                }
                State::Leaf(_) => {}
                _ if seen.insert(input.seq) => nodes.push(input),
                _ => {}
            }
        }
    }
    leaves
}

impl Engine {
    /// Runs the pass from `seeds`. Returns the gradients of the wanted nodes. The key is the node's number.
    pub(super) fn run_pass(&self, seeds: Vec<(Arc<Node>, Gradient)>) -> Result<HashMap<u64, Tensor>> {
        let traverse = || match self.create_graph {
            true => enable_grad(|| self.traverse(seeds)),
            false => no_grad(|| self.traverse(seeds)),
        };
        // Autocast is off, so that backward uses forward's dtypes. Operands are read as buffers: each is read once, so images would not pay off.
        let run = || with_memory_mode(MemoryMode::Buffer, || autocast(None, traverse));
        // Callbacks run at the end of the outermost pass. They are dropped if the pass fails.
        let is_outermost = SCOPES.with(|scopes| scopes.callbacks.borrow().is_none());
        let ended = match is_outermost {
            false => run(),
            true => {
                SCOPES.with(|scopes| scopes.callbacks.replace(Some(Vec::new())));
                let take_callbacks = || SCOPES.with(|scopes| scopes.callbacks.take());
                let _clear = OnDrop(|| drop(take_callbacks()));
                run().and_then(|returned| {
                    let callbacks = take_callbacks().unwrap_or_default();
                    no_grad(|| callbacks.into_iter().try_for_each(|callback| callback())).map(|()| returned)
                })
            }
        };
        ended.map_err(|e| if self.has_accumulated.get() { e.into_partial("backward") } else { e })
    }

    fn traverse(&self, seeds: Vec<(Arc<Node>, Gradient)>) -> Result<HashMap<u64, Tensor>> {
        let mut returned = HashMap::new();
        let mut gradients = PendingGradients::new();
        let mut heap: BinaryHeap<QueuedNode> = BinaryHeap::new();
        let mut expected_gradients = match self.wanted {
            None => count_expected_gradients(seeds.iter().map(|(root, _)| root)),
            Some(_) => HashMap::new(),
        };
        // `lend_slot` lends no gradient slot whose memory a seed gradient uses. These are addresses, because handles would make the
        // seeds look shared, and adding to a shared gradient copies it.
        let seed_addresses: SmallVec<[usize; 1]> =
            seeds.iter().filter_map(|(_, gradient)| gradient.address()).collect();
        for (root, gradient) in seeds {
            let gradient = match gradients.remove(&root.seq) {
                Some((_, first)) => first.add(gradient.tensor()?)?,
                None => gradient,
            };
            heap.push((root.seq, Reverse(root.seq)));
            gradients.insert(root.seq, (root, gradient));
        }
        while let Some((_, Reverse(seq))) = heap.pop() {
            let Some((node, mut grad)) = gradients.remove(&seq) else { continue };
            let is_returned = self.returns_gradient_of(&node);
            if let Some(hooks) = node.hooks().filter(|_| !(self.is_nested && is_returned))
                && let Some(replaced) = hooks.call(node.op, &grad.tensor()?)?
            {
                grad = self.detach_unless_recording(replaced).into();
            }
            if is_returned {
                returned.insert(node.seq, grad.tensor()?);
            }
            let Some(operation) = self.take_operation(&node, &mut grad)? else { continue };
            let slots: Gradients =
                (0..node.inputs.len()).map(|i| self.lend_slot(&node, i, &gradients, &seed_addresses)).collect();
            let offered: Gradients = slots.iter().map(|s| s.as_ref().map(Tensor::shallow_clone)).collect();
            let factor = operation.factor.filter(|_| !grad.multiplied());
            let multiplied = SmallVec::from_elem(false, node.inputs.len());
            let mut context =
                Context { engine: self, node: &node, grad, gradients: &gradients, slots, factor, multiplied };
            let recorded = profiler::span(RecordKind::Backward, node.op, None, 0, 0);
            let results = (operation.backward)(&mut context)?;
            drop(recorded);
            let multiplied = std::mem::take(&mut context.multiplied);
            // The context is dropped before gradients are added: its handles would make gradients look shared, and adding would copy them.
            drop(context);
            drop(operation.backward);
            debug_assert_eq!(results.len(), node.inputs.len(), "{}: one gradient an input", node.op);
            for (((input, result), offered), multiplied) in node.inputs.iter().zip(results).zip(offered).zip(multiplied)
            {
                let Some(input) = input.as_ref().filter(|input| self.leads_to_wanted(input)) else { continue };
                let is_slot = |s: &Tensor| result.as_ref().is_some_and(|r| s.shares_storage(r) && s.layout == r.layout);
                let mut in_slot = offered.as_ref().is_some_and(is_slot);
                if result.is_none()
                    && offered.is_some()
                    && !self.is_nested
                    && let State::Leaf(leaf) = &mut *input.state()
                {
                    leaf.lent = false;
                }
                let Some(result) = result else { continue };
                let mut result = self.detach_unless_recording(result);
                let op = node.op;
                no_gradient!(op if modes::anomaly() && result.ne(&result)?.any((), false)?.item::<bool>()?,
                    "its backward gave NaN, in a gradient of shape {}", result.shape());
                // The gradient is copied into the leaf's slot now. Leaves are visited last, so until then both copies would be in memory.
                if let Some(slot) = offered.filter(|_| !in_slot && !gradients.contains_key(&input.seq)) {
                    slot.copy_(&result)?;
                    (result, in_slot) = (slot, true);
                }
                let sum = match gradients.remove(&input.seq) {
                    Some((node, first)) => (node, first.add(result)?),
                    None => {
                        heap.push((input.seq, Reverse(input.seq)));
                        (input.clone(), Gradient::Tensor { tensor: result, in_slot, multiplied })
                    }
                };
                gradients.insert(input.seq, sum);
            }
            if expected_gradients.is_empty() {
                continue;
            }
            for input in node.inputs.iter().flatten() {
                let Some(missing) = expected_gradients.get_mut(&input.seq) else { continue };
                *missing -= 1;
                if *missing == 0 {
                    heap.push((u64::MAX, Reverse(input.seq)));
                }
            }
        }
        Ok(returned)
    }

    /// Takes a gradient that a closure returned out of the graph, unless this pass records a graph (`create_graph`).
    fn detach_unless_recording(&self, grad: Tensor) -> Tensor {
        if self.create_graph { grad } else { grad.into_detached() }
    }

    /// Returns the operation to differentiate at `node`. If `node` is a leaf, accumulates `grad` and returns None.
    fn take_operation(&self, node: &Node, grad: &mut Gradient) -> Result<Option<Operation>> {
        let mut state = node.state();
        if let State::Leaf(leaf) = &mut *state {
            if self.wanted.is_none() {
                let in_slot = grad.in_slot();
                let total = accumulate(leaf, grad)?;
                total.storage.set_role(Role::Gradient);
                leaf.grad = Some(total);
                leaf.lent &= !in_slot;
                self.has_accumulated.set(true);
                if !leaf.post_accumulate_hooks.is_empty() {
                    let (hooks, grad) =
                        (leaf.post_accumulate_hooks.clone(), leaf.grad.as_ref().map(Tensor::shallow_clone));
                    drop(state); // a hook may access the leaf
                    hooks.iter().try_for_each(|(_, hook)| grad.iter().try_for_each(|grad| hook(grad)))?;
                }
            }
            return Ok(None);
        }
        if self.is_nested && self.returns_gradient_of(node) {
            return Ok(None);
        }
        if self.wanted.is_some() && !node.inputs.iter().flatten().any(|input| self.leads_to_wanted(input)) {
            return Ok(None);
        }
        let op = node.op;
        let operation = match (&*state, self.retain_graph) {
            (State::Operation(operation), true) => operation.clone(),
            _ => match std::mem::replace(&mut *state, State::Consumed) {
                State::Operation(operation) => operation,
                _ => no_gradient!(
                    op,
                    "its graph was consumed by an earlier backward: run the forward pass again, or keep it with \
                     retain_graph"
                ),
            },
        };
        no_gradient!(op if self.create_graph && !operation.is_differentiable,
            "its gradient is computed by kernels that have no gradient of their own, so create_graph stops here: write this \
             operation as a composition of others, or do without create_graph");
        Ok(Some(operation))
    }

    /// Lends the gradient slot of input `i`. Returns None if the input is not a leaf, has a gradient already, or its slot is already lent.
    fn lend_slot(
        &self,
        node: &Node,
        i: usize,
        gradients: &PendingGradients,
        seed_addresses: &[usize],
    ) -> Option<Tensor> {
        let input = node.inputs[i].as_ref()?;
        let taken = gradients.contains_key(&input.seq) || node.inputs[..i].iter().flatten().any(|n| n.seq == input.seq);
        if self.is_nested && !taken {
            return self.lent_slots.borrow_mut().remove(&input.seq);
        }
        if self.create_graph || self.wanted.is_some() || input.hooks().is_some() {
            return None;
        }
        match &mut *input.state() {
            State::Leaf(leaf) if !taken && !leaf.lent && leaf.grad.is_none() => {
                let slot = leaf.slot.as_ref().filter(|slot| !seed_addresses.contains(&address(slot)));
                leaf.lent = slot.is_some();
                slot.map(Tensor::shallow_clone)
            }
            _ => None,
        }
    }
}

/// Returns the leaf's gradient plus `grad`. The result is in the leaf's gradient slot if the leaf has one.
fn accumulate(leaf: &Leaf, grad: &mut Gradient) -> Result<Tensor> {
    let in_slot = grad.in_slot();
    let tensor = grad.tensor()?;
    // `grad` is replaced, so that `tensor` is the only handle if no other code uses the gradient.
    *grad = Gradient::ones(&tensor);
    match (&leaf.grad, leaf.slot.as_ref().filter(|_| in_slot || !leaf.lent)) {
        (Some(total), _) if total.requires_grad() || tensor.requires_grad() => total.add(&tensor),
        (Some(total), _) => {
            total.add_(&tensor)?;
            Ok(total.shallow_clone())
        }
        (None, _) if tensor.requires_grad() => Ok(tensor),
        (None, Some(slot)) if !in_slot => {
            slot.copy_(&tensor)?;
            Ok(slot.shallow_clone())
        }
        // The leaf gets a copy if other code uses the gradient: an expanded view, or the tensor that the caller passed.
        (None, None) if !tensor.storage.is_unique() || !tensor.layout.is_dense() => tensor.deep_copy(false),
        (None, _) => Ok(tensor),
    }
}

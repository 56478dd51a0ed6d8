//! The engine of the backward pass: a heap of nodes ordered by age.

use std::cell::{Cell, RefCell};
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::sync::Arc;

use smallvec::SmallVec;

use super::context::{Context, Gradient, address};
use super::grad::Wanted;
use super::node::{Leaf, Node, Operation, State};
use super::{Gradients, autocast, enable_grad, hooks, modes, no_grad};
use crate::device::profiler::{self, Kind};
use crate::storage::{MemoryMode, with_memory_mode};
use crate::{Error, Result, Tensor};

thread_local! {
    /// What is to be done when the backward pass under way on this thread has ended; None where none is.
    static CALLBACKS: RefCell<Option<Vec<Callback>>> = const { RefCell::new(None) };
}

type Callback = Box<dyn FnOnce() -> Result<()>>;

/// A backward pass under way, or one inside of another.
struct Callbacks {
    is_outermost: bool,
}

impl Callbacks {
    fn begin() -> Callbacks {
        CALLBACKS.with_borrow_mut(|callbacks| {
            let is_outermost = callbacks.is_none();
            callbacks.get_or_insert_default();
            Callbacks { is_outermost }
        })
    }

    /// Calls what was queued. Nothing of a pass that failed is called.
    fn run(self) -> Result<()> {
        let queued = match self.is_outermost {
            true => CALLBACKS.with_borrow_mut(Option::take).unwrap_or_default(),
            false => Vec::new(),
        };
        no_grad(|| queued.into_iter().try_for_each(|callback| callback()))
    }
}

impl Drop for Callbacks {
    fn drop(&mut self) {
        if self.is_outermost {
            CALLBACKS.take();
        }
    }
}

/// Has `f` called once when the backward pass ends that is under way on this thread: hooks call this (PyTorch's
/// `Variable._execution_engine.queue_callback`). Its error is that of the pass. If the pass fails it is not called.
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
///
/// # Errors
/// [`Error::Autograd`] where no backward pass is under way on this thread.
pub fn queue_callback(f: impl FnOnce() -> Result<()> + 'static) -> Result<()> {
    let reason = "no backward pass is under way on this thread: call it in a hook";
    CALLBACKS.with_borrow_mut(|callbacks| match callbacks {
        Some(callbacks) => {
            callbacks.push(Box::new(f));
            Ok(())
        }
        None => Err(Error::Autograd { op: "queue_callback", reason: reason.into() }),
    })
}

/// A node waiting in the heap, the greatest number first: its own, which is the order of age, or more for a leaf whose gradient
/// is complete.
struct Pending {
    order: u64,
    node: Arc<Node>,
}

impl Pending {
    fn by_age(node: Arc<Node>) -> Pending {
        Pending { order: node.seq, node }
    }
}

impl PartialEq for Pending {
    fn eq(&self, other: &Pending) -> bool {
        self.order == other.order
    }
}

impl Eq for Pending {}

impl PartialOrd for Pending {
    fn partial_cmp(&self, other: &Pending) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Pending {
    fn cmp(&self, other: &Pending) -> std::cmp::Ordering {
        self.order.cmp(&other.order)
    }
}

/// Of each leaf that somebody waits for, how many gradients it is to have from the operations that the roots are made of. Leaves
/// are older than these and would be last: so many later it is known that the gradient is complete.
fn leaves_waited_for<'a>(roots: impl Iterator<Item = &'a Arc<Node>>) -> HashMap<u64, usize> {
    let mut leaves = HashMap::new();
    if !hooks::are_leaves_waited_for() {
        return leaves;
    }
    let mut nodes: Vec<&Arc<Node>> = roots.collect();
    let mut seen: HashSet<u64> = nodes.iter().map(|node| node.seq).collect();
    while let Some(node) = nodes.pop() {
        for input in node.inputs.iter().flatten() {
            match &*input.state() {
                State::Leaf(leaf) if !leaf.collected.is_empty() => *leaves.entry(input.seq).or_insert(0) += 1,
                State::Leaf(_) => {}
                _ if seen.insert(input.seq) => nodes.push(input),
                _ => {}
            }
        }
    }
    leaves
}

/// One traversal of the graph, from the youngest node to the oldest.
#[derive(Default)]
pub(super) struct Engine {
    /// Whether the closures are kept for another traversal.
    pub(super) retain_graph: bool,
    /// Whether what the closures do is recorded.
    pub(super) create_graph: bool,
    /// The nodes whose gradients are returned, instead of accumulated in leaves.
    pub(super) wanted: Option<Wanted>,
    /// Whether it is part of another backward pass, which goes on from the gradients that this one returns, and calls their
    /// hooks.
    pub(super) inner: bool,
    /// The slots of wanted leaves that the pass around has lent to the operation whose backward this is, by node.
    pub(super) lent: RefCell<HashMap<u64, Tensor>>,
    /// Whether a leaf has collected a gradient: a failure after that leaves some leaves with theirs and others without.
    pub(super) collected: Cell<bool>,
}

impl Engine {
    /// Whether a gradient is wanted of this node, or of one beyond it.
    pub(super) fn leads_to_wanted(&self, node: &Node) -> bool {
        self.wanted.as_ref().is_none_or(|wanted| wanted.leads_to_wanted(node.seq))
    }

    /// Whether the gradient of this node is returned.
    pub(super) fn captures(&self, node: &Node) -> bool {
        self.wanted.as_ref().is_some_and(|wanted| wanted.captures(node.seq))
    }

    /// Runs from `seeds`. Gives the gradients of the nodes wanted, by number.
    pub(super) fn run(&self, seeds: Vec<(Arc<Node>, Gradient)>) -> Result<HashMap<u64, Tensor>> {
        let traverse = || match self.create_graph {
            true => enable_grad(|| self.traverse(seeds)),
            false => no_grad(|| self.traverse(seeds)),
        };
        // In the dtypes of forward, wherever backward is called. What it reads is read once, and no image is worth while.
        let outermost = Callbacks::begin();
        let captured = with_memory_mode(MemoryMode::Buffer, || autocast(None, traverse));
        let ended = captured.and_then(|captured| outermost.run().map(|()| captured));
        ended.map_err(|e| if self.collected.get() { e.in_part("backward") } else { e })
    }

    fn traverse(&self, seeds: Vec<(Arc<Node>, Gradient)>) -> Result<HashMap<u64, Tensor>> {
        let mut captured = HashMap::new();
        let mut gradients: HashMap<u64, Gradient> = HashMap::new();
        let mut heap = BinaryHeap::new();
        let mut waited_for = match self.wanted {
            None => leaves_waited_for(seeds.iter().map(|(root, _)| root)),
            Some(_) => HashMap::new(),
        };
        // No slot is lent in whose memory one of these gradients is. Handles on them would make them look shared.
        let given: SmallVec<[usize; 1]> = seeds.iter().filter_map(|(_, gradient)| gradient.address()).collect();
        for (root, gradient) in seeds {
            let gradient = match gradients.remove(&root.seq) {
                Some(first) => first.add(gradient.tensor()?)?,
                None => gradient,
            };
            gradients.insert(root.seq, gradient);
            heap.push(Pending::by_age(root));
        }
        while let Some(Pending { node, .. }) = heap.pop() {
            let Some(mut grad) = gradients.remove(&node.seq) else { continue };
            let captured_here = self.captures(&node);
            if let Some(hooks) = node.hooks().filter(|_| !(self.inner && captured_here))
                && let Some(replaced) = hooks.run(node.op, &grad.tensor()?)?
            {
                grad = self.untracked(replaced).into();
            }
            if captured_here {
                captured.insert(node.seq, grad.tensor()?);
            }
            let Some(operation) = self.operation(&node, &mut grad)? else { continue };
            let slots: Gradients =
                (0..node.inputs.len()).map(|i| self.free_slot(&node, i, &gradients, &given)).collect();
            let offered: Gradients = slots.iter().map(|s| s.as_ref().map(Tensor::shallow_clone)).collect();
            let factor = operation.factor.filter(|_| !grad.multiplied());
            let multiplied = SmallVec::from_elem(false, node.inputs.len());
            let mut context =
                Context { engine: self, node: &node, grad, gradients: &gradients, slots, factor, multiplied };
            let recorded = profiler::span(Kind::Backward, node.op, None, 0, 0);
            let results = (operation.backward)(&mut context)?;
            drop(recorded);
            let multiplied = std::mem::take(&mut context.multiplied);
            // They go before the results are added up: their handles on gradients would make these look shared.
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
                    && !self.inner
                    && let State::Leaf(leaf) = &mut *input.state()
                {
                    leaf.lent = false;
                }
                let Some(result) = result else { continue };
                let mut result = self.untracked(result);
                if modes::anomaly() && result.ne(&result)?.any((), false)?.item::<bool>()? {
                    let reason = format!("its backward gave NaN, in a gradient of shape {}", result.shape());
                    return Err(Error::Autograd { op: node.op, reason });
                }
                // Leaves are visited last: until then the gradients of all would be in memory twice.
                if let Some(slot) = offered.filter(|_| !in_slot && !gradients.contains_key(&input.seq)) {
                    slot.copy_(&result)?;
                    (result, in_slot) = (slot, true);
                }
                let sum = match gradients.remove(&input.seq) {
                    Some(first) => first.add(result)?,
                    None => {
                        heap.push(Pending::by_age(input.clone()));
                        Gradient::Tensor { tensor: result, in_slot, multiplied }
                    }
                };
                gradients.insert(input.seq, sum);
            }
            if waited_for.is_empty() {
                continue;
            }
            for input in node.inputs.iter().flatten() {
                let Some(missing) = waited_for.get_mut(&input.seq) else { continue };
                *missing -= 1;
                if *missing == 0 {
                    heap.push(Pending { order: u64::MAX, node: input.clone() });
                }
            }
        }
        Ok(captured)
    }

    /// A gradient as it may leave a closure: in no graph, unless one is created.
    fn untracked(&self, grad: Tensor) -> Tensor {
        if self.create_graph { grad } else { grad.into_detached() }
    }

    /// What to do with the gradient of a node that is an operation's result; None where the pass ends here. A leaf
    /// collects it.
    fn operation(&self, node: &Node, grad: &mut Gradient) -> Result<Option<Operation>> {
        let mut state = node.state();
        if let State::Leaf(leaf) = &mut *state {
            if self.wanted.is_none() {
                let in_slot = grad.in_slot();
                leaf.grad = Some(accumulate(leaf, grad)?);
                leaf.lent &= !in_slot;
                self.collected.set(true);
                if !leaf.collected.is_empty() {
                    let (hooks, grad) = (leaf.collected.clone(), leaf.grad.as_ref().map(Tensor::shallow_clone));
                    drop(state); // a hook may look at the leaf
                    hooks.iter().try_for_each(|(_, hook)| grad.iter().try_for_each(|grad| hook(grad)))?;
                }
            }
            return Ok(None);
        }
        if self.inner && self.captures(node) {
            return Ok(None);
        }
        if self.wanted.is_some() && !node.inputs.iter().flatten().any(|input| self.leads_to_wanted(input)) {
            return Ok(None);
        }
        let operation = match (&*state, self.retain_graph) {
            (State::Operation(operation), true) => operation.clone(),
            _ => match std::mem::replace(&mut *state, State::Consumed) {
                State::Operation(operation) => operation,
                _ => {
                    let reason = "its graph was consumed by an earlier backward: run the forward pass again, or keep it with retain_graph";
                    return Err(Error::Autograd { op: node.op, reason: reason.into() });
                }
            },
        };
        if self.create_graph && !operation.twice {
            let reason = "its gradient is computed by kernels that have no gradient of their own, so create_graph stops here: write this operation as a composition of others, or do without create_graph";
            return Err(Error::Autograd { op: node.op, reason: reason.into() });
        }
        Ok(Some(operation))
    }

    /// Lends the slot of input `i` if it is a leaf that has one, holds no gradient yet and was offered to nobody else.
    fn free_slot(&self, node: &Node, i: usize, gradients: &HashMap<u64, Gradient>, given: &[usize]) -> Option<Tensor> {
        let input = node.inputs[i].as_ref()?;
        let taken = gradients.contains_key(&input.seq) || node.inputs[..i].iter().flatten().any(|n| n.seq == input.seq);
        if self.inner && !taken {
            return self.lent.borrow_mut().remove(&input.seq);
        }
        if self.create_graph || self.wanted.is_some() || input.hooks().is_some() {
            return None;
        }
        match &mut *input.state() {
            State::Leaf(leaf) if !taken && !leaf.lent && leaf.grad.is_none() => {
                let slot = leaf.slot.as_ref().filter(|slot| !given.contains(&address(slot)));
                leaf.lent = slot.is_some();
                slot.map(Tensor::shallow_clone)
            }
            _ => None,
        }
    }
}

/// A leaf's gradient with `grad` added: in its slot if it has one.
fn accumulate(leaf: &Leaf, grad: &mut Gradient) -> Result<Tensor> {
    let in_slot = grad.in_slot();
    let tensor = grad.tensor()?;
    // The only handle on a gradient that is nobody else's.
    *grad = Gradient::one(&tensor);
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
        // A gradient that others can see (an expanded view, the caller's own tensor) becomes the leaf's own.
        (None, None) if !tensor.storage.is_unique() || !tensor.layout.is_dense() => tensor.copied(false),
        (None, _) => Ok(tensor),
    }
}

//! The state of a backward pass, and the part of it that an operation's backward closure uses.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use smallvec::SmallVec;

use super::node::{Factor, Gradients, Node, Saved};
use crate::{DType, Device, Result, Shape, Tensor};

/// One traversal of the graph, from the newest node to the oldest.
#[derive(Default)]
pub(super) struct Engine {
    /// Whether to keep the backward closures for another backward pass.
    pub(super) retain_graph: bool,
    /// Whether to record the operations that the backward closures run.
    pub(super) create_graph: bool,
    /// The nodes whose gradients are returned. If None, leaves accumulate their gradients in `Tensor::grad` instead.
    pub(super) wanted: Option<WantedNodes>,
    /// Whether this pass runs inside another backward pass. The outer pass continues from the returned gradients, and it calls their hooks.
    pub(super) is_nested: bool,
    /// Gradient slots of wanted leaves, by node number. The outer pass has lent them to the operation whose backward runs this pass.
    pub(super) lent_slots: RefCell<HashMap<u64, Tensor>>,
    /// Whether a leaf has accumulated a gradient. If the pass fails after that, some leaves have new gradients and others do not.
    pub(super) has_accumulated: Cell<bool>,
}

impl Engine {
    /// True if a gradient is wanted for this node, or for a node that this node depends on.
    pub(super) fn leads_to_wanted(&self, node: &Node) -> bool {
        self.wanted.as_ref().is_none_or(|wanted| wanted.dependents.contains(&node.seq))
    }

    pub(super) fn returns_gradient_of(&self, node: &Node) -> bool {
        self.wanted.as_ref().is_some_and(|wanted| wanted.nodes.contains(&node.seq))
    }
}

/// The gradients accumulated so far for nodes that are not visited yet. The key is the node's number.
pub(super) type PendingGradients = HashMap<u64, (Arc<Node>, Gradient)>;

/// The nodes whose gradients a backward pass returns.
pub(super) struct WantedNodes {
    nodes: HashSet<u64>,
    /// The numbers of `nodes`, and of all nodes that depend on one of them.
    dependents: HashSet<u64>,
}

impl WantedNodes {
    /// Selects `nodes`. Searches the graph below `roots` for the nodes that depend on them.
    pub(super) fn new<'a>(
        roots: impl Iterator<Item = &'a Arc<Node>>,
        nodes: impl Iterator<Item = &'a Arc<Node>>,
    ) -> WantedNodes {
        let nodes: HashSet<u64> = nodes.map(|node| node.seq).collect();
        let oldest = nodes.iter().copied().min().unwrap_or(u64::MAX);
        let mut below: BTreeMap<u64, &Arc<Node>> = BTreeMap::new();
        let mut open: Vec<&Arc<Node>> = roots.collect();
        while let Some(node) = open.pop() {
            if node.seq >= oldest && below.insert(node.seq, node).is_none() {
                open.extend(node.inputs.iter().flatten());
            }
        }
        // Nodes are visited from the oldest to the newest: an operation is newer than its inputs.
        let mut dependents = HashSet::new();
        for (seq, node) in below {
            let through = || node.inputs.iter().flatten().any(|input| dependents.contains(&input.seq));
            if nodes.contains(&seq) || through() {
                dependents.insert(seq);
            }
        }
        WantedNodes { nodes, dependents }
    }
}

/// The argument of an operation's backward closure.
pub(crate) struct Context<'a> {
    pub(super) engine: &'a Engine,
    /// The node of the operation's result.
    pub(super) node: &'a Arc<Node>,
    /// The gradient of the node's result.
    pub(super) grad: Gradient,
    pub(super) gradients: &'a PendingGradients,
    /// Gradient slots of those inputs that are leaves (see [`Context::slot`]).
    pub(super) slots: Gradients,
    /// A factor by which the result's gradient still has to be multiplied. `None` if there is no factor, or if it is already applied.
    pub(super) factor: Option<Arc<Factor>>,
    /// For each input: whether the closure has taken the input's factor ([`Context::take_input_factor`]), and so multiplies by it.
    pub(super) multiplied: SmallVec<[bool; 3]>,
}

impl Context<'_> {
    /// Returns the gradient of the operation's result, in the result's shape and dtype.
    pub(crate) fn grad(&self) -> Result<Tensor> {
        self.grad.tensor()
    }

    /// Returns the gradient, or None if it is the implicit 1 that `backward()` starts from. The caller can then skip a multiplication.
    pub(crate) fn grad_unless_one(&self) -> Option<Tensor> {
        match &self.grad {
            Gradient::One { .. } => None,
            Gradient::Tensor { tensor, .. } => Some(tensor.shallow_clone()),
        }
    }

    /// True if the operations of the closure are recorded. The closure may then use recorded operations only; slots and input factors are
    /// not available. Always false for closures that were not recorded with [`record_differentiable`](super::record_differentiable).
    pub(crate) fn create_graph(&self) -> bool {
        self.engine.create_graph
    }

    /// Returns the operation's own result, with its node. The result was saved before it had a node.
    pub(crate) fn unpack_result(&self, saved: &Saved) -> Result<Tensor> {
        let node = self.create_graph().then(|| self.node.clone());
        Ok(Tensor { made_by: node, ..saved.unpack(self.node.op)? })
    }

    /// Returns `values` as a tensor with the node of input `i`.
    pub(crate) fn with_input_node(&self, i: usize, values: Tensor) -> Tensor {
        Tensor { made_by: self.node.inputs[i].clone(), ..values }
    }

    /// Computes the inputs' gradients by differentiating `again`: the operation's result, recomputed from the inputs by operations that
    /// support gradients of gradients. Closures whose kernels have no gradient call this method if [`Context::create_graph`] is true.
    pub(crate) fn differentiate_through(&mut self, again: &Tensor) -> Result<Gradients> {
        let inputs = &self.node.inputs;
        let mut gradients: Gradients = inputs.iter().map(|_| None).collect();
        let Some(root) = again.node() else { return Ok(gradients) };
        let grad = self.grad()?;
        let op = self.node.op;
        no_gradient!(op if !again.is_like(&grad),
            "it returned {} in forward, but {} when computed again in backward", grad.describe(), again.describe());
        let needed =
            inputs.iter().enumerate().filter(|(i, _)| self.needs_gradient(*i)).filter_map(|(_, node)| node.as_ref());
        let wanted = WantedNodes::new(std::iter::once(&root), needed);
        let create_graph = self.create_graph();
        let slots = inputs.iter().zip(&mut self.slots);
        let lent = slots.filter_map(|(node, slot)| Some((node.as_ref()?.seq, slot.take()?))).collect();
        let engine = Engine {
            retain_graph: create_graph,
            create_graph,
            wanted: Some(wanted),
            is_nested: true,
            lent_slots: RefCell::new(lent),
            ..Default::default()
        };
        let mut found = engine.run_pass(vec![(root, grad.into())])?;
        // If an operation has the same tensor as two inputs, the first of them gets the whole gradient.
        for (gradient, node) in gradients.iter_mut().zip(inputs) {
            *gradient = node.as_ref().and_then(|node| found.remove(&node.seq));
        }
        Ok(gradients)
    }

    pub(crate) fn num_inputs(&self) -> usize {
        self.node.inputs.len()
    }

    pub(crate) fn needs_gradient(&self, i: usize) -> bool {
        self.node.inputs[i].as_ref().is_some_and(|input| self.engine.leads_to_wanted(input))
    }

    /// Takes the factor that was recorded with the operation. None if the gradient is already multiplied by it. The caller must multiply by it.
    pub(crate) fn take_factor(&mut self) -> Option<Arc<Factor>> {
        self.factor.take()
    }

    /// Returns the factor of input `i`, by which the pass would multiply the input's gradient next. The caller must multiply by it instead.
    pub(crate) fn take_input_factor(&mut self, i: usize) -> Option<Arc<Factor>> {
        let input = self.node.inputs[i].as_ref()?;
        if self.create_graph() || self.engine.returns_gradient_of(input) || self.gradients.contains_key(&input.seq) {
            return None;
        }
        let factor = input.factor();
        self.multiplied[i] = factor.is_some();
        factor
    }

    /// Returns a view of an optimiser's flat gradient buffer in which the caller may compute the gradient of input `i`. None if there is none.
    pub(crate) fn slot(&mut self, i: usize) -> Option<Tensor> {
        self.slots[i].take()
    }
}

pub(super) fn address(t: &Tensor) -> usize {
    std::ptr::from_ref(t.storage.allocation()).addr()
}

/// A gradient that is passed to a node.
pub(super) enum Gradient {
    /// A gradient of ones, which `backward()` starts from. Its tensor is created only when it is needed.
    One { shape: Shape, dtype: DType, device: Device },
    /// `in_slot`: the tensor is in the leaf's gradient slot, which no other code reads yet, so it may be changed in place.
    /// `multiplied`: the tensor is already multiplied by the receiving node's factor; then no other gradient is added to it.
    Tensor { tensor: Tensor, in_slot: bool, multiplied: bool },
}

impl From<Tensor> for Gradient {
    fn from(tensor: Tensor) -> Gradient {
        Gradient::Tensor { tensor, in_slot: false, multiplied: false }
    }
}

impl Gradient {
    pub(super) fn ones(of: &Tensor) -> Gradient {
        Gradient::One { shape: of.shape().clone(), dtype: of.dtype, device: of.device() }
    }

    pub(super) fn tensor(&self) -> Result<Tensor> {
        match self {
            Gradient::One { shape, dtype, device } => Tensor::ones(shape, (*dtype, *device)),
            Gradient::Tensor { tensor, .. } => Ok(tensor.shallow_clone()),
        }
    }

    pub(super) fn address(&self) -> Option<usize> {
        match self {
            Gradient::One { .. } => None,
            Gradient::Tensor { tensor, .. } => Some(address(tensor)),
        }
    }

    pub(super) fn in_slot(&self) -> bool {
        matches!(self, Gradient::Tensor { in_slot: true, .. })
    }

    pub(super) fn multiplied(&self) -> bool {
        matches!(self, Gradient::Tensor { multiplied: true, .. })
    }

    /// Adds two gradients. Adds in place if one of them has no other handle and is in no graph.
    pub(super) fn add(self, other: Tensor) -> Result<Gradient> {
        let owned = |t: &Tensor| !t.requires_grad() && t.storage.is_unique() && t.layout.is_dense();
        let untracked = !other.requires_grad();
        let (tensor, in_slot) = match self {
            Gradient::Tensor { tensor, in_slot, multiplied } => {
                debug_assert!(!multiplied, "only the node's single user takes its factor");
                (tensor, in_slot)
            }
            one => (one.tensor()?, false),
        };
        if in_slot || (owned(&tensor) && untracked) {
            tensor.add_(&other)?;
            return Ok(Gradient::Tensor { tensor, in_slot, multiplied: false });
        }
        if owned(&other) && !tensor.requires_grad() {
            other.add_(&tensor)?;
            return Ok(other.into());
        }
        Ok(tensor.add(&other)?.into())
    }
}

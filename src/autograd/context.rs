//! What an operation's closure sees of the backward pass.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use smallvec::SmallVec;

use super::backward::Engine;
use super::grad::Wanted;
use super::node::{Factor, Node};
use super::{Gradients, Saved};
use crate::{DType, Device, Error, Result, Shape, Tensor};

/// What an operation's backward is given.
pub(crate) struct Context<'a> {
    pub(super) engine: &'a Engine,
    /// Whose gradient it is.
    pub(super) node: &'a Arc<Node>,
    pub(super) grad: Gradient,
    /// Those that have arrived elsewhere so far.
    pub(super) gradients: &'a HashMap<u64, Gradient>,
    pub(super) slots: Gradients,
    pub(super) factor: Option<Arc<Factor>>,
    /// Whether the gradient of an input was multiplied by its factor.
    pub(super) multiplied: SmallVec<[bool; 3]>,
}

impl Context<'_> {
    /// The gradient of the operation's result, of its shape and dtype.
    pub(crate) fn grad(&self) -> Result<Tensor> {
        self.grad.tensor()
    }

    /// The gradient, or None where it is the implicit 1 that `backward()` starts from: a factor to leave out.
    pub(crate) fn grad_unless_one(&self) -> Option<Tensor> {
        match &self.grad {
            Gradient::One { .. } => None,
            Gradient::Tensor { tensor, .. } => Some(tensor.shallow_clone()),
        }
    }

    /// Whether what the closure does is recorded: then it keeps to recorded operations, and there are no slots and no
    /// factors of inputs. Only closures that said they can ([`record_twice`](super::record_twice)) see this.
    pub(crate) fn create_graph(&self) -> bool {
        self.engine.create_graph
    }

    /// The operation's own result, saved before it had a node, in its place in the graph.
    pub(crate) fn result(&self, saved: &Saved) -> Result<Tensor> {
        let node = self.create_graph().then(|| self.node.clone());
        Ok(Tensor { made_by: node, ..saved.unpack(self.node.op)? })
    }

    /// Values with the place in the graph of input `i`.
    pub(crate) fn input(&self, i: usize, values: Tensor) -> Tensor {
        Tensor { made_by: self.node.inputs[i].clone(), ..values }
    }

    /// The gradients of the inputs through `again`: the result computed once more from them, by operations whose gradients
    /// have gradients. It is what a closure of other kernels does where [`Context::create_graph`].
    pub(crate) fn through(&mut self, again: &Tensor) -> Result<Gradients> {
        let inputs = &self.node.inputs;
        let mut gradients: Gradients = inputs.iter().map(|_| None).collect();
        let Some(root) = again.node() else { return Ok(gradients) };
        let grad = self.grad()?;
        if !again.is_like(&grad) {
            let (first, again) = (grad.described(), again.described());
            let reason = format!("it gave {first} and, computed again in backward, {again}");
            return Err(Error::Autograd { op: self.node.op, reason });
        }
        let needed = inputs.iter().enumerate().filter(|(i, _)| self.needs(*i)).filter_map(|(_, node)| node.as_ref());
        let wanted = Wanted::new(std::iter::once(&root), needed);
        let create_graph = self.create_graph();
        let slots = inputs.iter().zip(&mut self.slots);
        let lent = slots.filter_map(|(node, slot)| Some((node.as_ref()?.seq, slot.take()?))).collect();
        let engine = Engine {
            retain_graph: create_graph,
            create_graph,
            wanted: Some(wanted),
            inner: true,
            lent: RefCell::new(lent),
            ..Default::default()
        };
        let mut found = engine.run(vec![(root, grad.into())])?;
        // Of an input that is given twice the first has the gradient of both.
        for (gradient, node) in gradients.iter_mut().zip(inputs) {
            *gradient = node.as_ref().and_then(|node| found.remove(&node.seq));
        }
        Ok(gradients)
    }

    /// How many inputs the operation has.
    pub(crate) fn inputs(&self) -> usize {
        self.node.inputs.len()
    }

    /// Whether the gradient of input `i` is wanted.
    pub(crate) fn needs(&self, i: usize) -> bool {
        self.node.inputs[i].as_ref().is_some_and(|input| self.engine.leads_to_wanted(input))
    }

    /// What the operation was recorded with, if the gradient is still to be multiplied by it.
    pub(crate) fn factor(&mut self) -> Option<Arc<Factor>> {
        self.factor.take()
    }

    /// What the gradient of input `i` is multiplied by next. Whoever asks has to do it, where there is something.
    pub(crate) fn factor_of(&mut self, i: usize) -> Option<Arc<Factor>> {
        let input = self.node.inputs[i].as_ref()?;
        if self.create_graph() || self.engine.captures(input) || self.gradients.contains_key(&input.seq) {
            return None;
        }
        let factor = input.factor();
        self.multiplied[i] = factor.is_some();
        factor
    }

    /// Where the gradient of input `i` had best be written (an optimiser's flat buffer); optional to obey.
    pub(crate) fn slot(&mut self, i: usize) -> Option<Tensor> {
        self.slots[i].take()
    }
}

/// The address of a tensor's allocation.
pub(super) fn address(t: &Tensor) -> usize {
    std::ptr::from_ref(t.storage.allocation()).addr()
}

/// A gradient on its way to a node.
pub(super) enum Gradient {
    /// Ones: what `backward()` starts from. Nothing is launched until somebody asks for the tensor.
    One { shape: Shape, dtype: DType, device: Device },
    /// `in_slot`: lies in the leaf's slot, which nobody else reads yet, so it may be added to in place.
    /// `multiplied`: by the factor of the node it goes to; there is no other gradient to add then.
    Tensor { tensor: Tensor, in_slot: bool, multiplied: bool },
}

impl From<Tensor> for Gradient {
    fn from(tensor: Tensor) -> Gradient {
        Gradient::Tensor { tensor, in_slot: false, multiplied: false }
    }
}

impl Gradient {
    /// Ones for this tensor.
    pub(super) fn one(of: &Tensor) -> Gradient {
        Gradient::One { shape: of.shape().clone(), dtype: of.dtype, device: of.device() }
    }

    pub(super) fn tensor(&self) -> Result<Tensor> {
        match self {
            Gradient::One { shape, dtype, device } => Tensor::ones(shape, (*dtype, *device)),
            Gradient::Tensor { tensor, .. } => Ok(tensor.shallow_clone()),
        }
    }

    /// The address of its allocation, where it has memory.
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

    /// The sum of both; in place where one of them is nobody else's and part of no graph.
    pub(super) fn add(self, other: Tensor) -> Result<Gradient> {
        let owned = |t: &Tensor| !t.requires_grad() && t.storage.is_unique() && t.layout.is_dense();
        let untracked = !other.requires_grad();
        let (tensor, in_slot) = match self {
            Gradient::Tensor { tensor, in_slot, multiplied } => {
                debug_assert!(!multiplied, "a factor is told to the only user");
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

//! The backward walk: a heap of nodes ordered by age.

use std::collections::{BinaryHeap, HashMap};
use std::sync::Arc;

use smallvec::SmallVec;

use super::{Factor, Leaf, Node, State, no_grad};
use crate::{DType, Device, Error, Result, Shape, Tensor};

/// What an operation's backward is given.
pub(crate) struct Context<'a> {
    grad: Gradient,
    inputs: &'a [Option<Arc<Node>>],
    slots: SmallVec<[Option<Tensor>; 3]>,
    factor: Option<Arc<Factor>>,
    /// Whether the gradient of an input was multiplied by its factor.
    multiplied: SmallVec<[bool; 3]>,
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

    /// Whether the gradient of input `i` is wanted.
    pub(crate) fn needs(&self, i: usize) -> bool {
        self.inputs[i].is_some()
    }

    /// What the operation was recorded with, if the gradient is still to be multiplied by it.
    pub(crate) fn factor(&mut self) -> Option<Arc<Factor>> {
        self.factor.take()
    }

    /// What the gradient of input `i` is multiplied by next. Whoever asks has to do it, where there is something.
    pub(crate) fn factor_of(&mut self, i: usize) -> Option<Arc<Factor>> {
        let factor = self.inputs[i].as_ref()?.factor();
        self.multiplied[i] = factor.is_some();
        factor
    }

    /// Where the gradient of input `i` had best be written (an optimiser's flat buffer); optional to obey.
    pub(crate) fn slot(&mut self, i: usize) -> Option<Tensor> {
        self.slots[i].take()
    }
}

/// A gradient on its way to a node.
enum Gradient {
    /// Ones: what `backward()` starts from. Nothing is launched until somebody asks for the tensor.
    One { shape: Shape, dtype: DType, device: Device },
    /// `in_slot`: lies in the leaf's slot, which nobody else reads yet, so it may be added to in place.
    /// `multiplied`: by the factor of the node it goes to; there is no other gradient to add then.
    Tensor { tensor: Tensor, in_slot: bool, multiplied: bool },
}

impl Gradient {
    fn tensor(&self) -> Result<Tensor> {
        match self {
            Gradient::One { shape, dtype, device } => Tensor::ones(shape, (*dtype, *device)),
            Gradient::Tensor { tensor, .. } => Ok(tensor.shallow_clone()),
        }
    }

    /// The sum of both; in place where one of them is nobody else's.
    fn add(self, other: Tensor) -> Result<Gradient> {
        let owned = |t: &Tensor| t.storage.is_unique() && t.is_contiguous();
        let (tensor, in_slot) = match self {
            Gradient::Tensor { tensor, in_slot, multiplied } => {
                debug_assert!(!multiplied, "a factor is told to the only user");
                (tensor, in_slot)
            }
            one => (one.tensor()?, false),
        };
        if in_slot || owned(&tensor) {
            tensor.add_(&other)?;
            return Ok(Gradient::Tensor { tensor, in_slot, multiplied: false });
        }
        let tensor = if owned(&other) {
            other.add_(&tensor)?;
            other
        } else {
            tensor.add(&other)?
        };
        Ok(Gradient::Tensor { tensor, in_slot: false, multiplied: false })
    }
}

/// A node waiting in the heap, ordered by age.
struct Pending(Arc<Node>);

impl PartialEq for Pending {
    fn eq(&self, other: &Pending) -> bool {
        self.0.seq == other.0.seq
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
        self.0.seq.cmp(&other.0.seq)
    }
}

impl Tensor {
    /// Computes the gradient of this one-element tensor with respect to every leaf it was made from and adds it to
    /// their [`Tensor::grad`]. The graph is consumed: a second call is an error.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let x = Tensor::from_slice(&[1f32, 2.0, 3.0], 3, Device::Cpu)?.requires_grad_(true)?;
    /// x.mul(&x)?.sum((), false)?.backward()?;
    /// assert_eq!(x.grad().unwrap().to_vec::<f32>()?, [2.0, 4.0, 6.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Autograd`] where nothing requires a gradient, the graph was already consumed, or a saved tensor was
    /// changed in place; [`Error::Invalid`] for more than one element (see [`Tensor::backward_with`]).
    pub fn backward(&self) -> Result<()> {
        if self.numel() != 1 {
            let reason = format!(
                "only a tensor of one element has a gradient of 1 to start from, this one has shape {}: reduce it with sum() or mean(), or use backward_with()",
                self.shape()
            );
            return Err(Error::invalid("backward", reason));
        }
        self.run_backward(Gradient::One { shape: self.shape().clone(), dtype: self.dtype, device: self.device() })
    }

    /// [`Tensor::backward`] from any shape, given the gradient of the final value with respect to this tensor
    /// (PyTorch's `backward(gradient)`): same shape, dtype and device.
    ///
    /// # Errors
    /// As [`Tensor::backward`], and where `gradient` does not match.
    pub fn backward_with(&self, gradient: &Tensor) -> Result<()> {
        let op = "backward_with";
        if gradient.shape() != self.shape() {
            let hint = "the gradient has the shape of the tensor";
            return Err(Error::ShapeMismatch { op, lhs: self.shape().clone(), rhs: gradient.shape().clone(), hint });
        }
        if gradient.dtype != self.dtype {
            return Err(Error::DTypeMismatch { op, lhs: self.dtype, rhs: gradient.dtype });
        }
        if gradient.device() != self.device() {
            return Err(Error::DeviceMismatch { op, lhs: self.device(), rhs: gradient.device() });
        }
        self.run_backward(Gradient::Tensor { tensor: gradient.detach(), in_slot: false, multiplied: false })
    }

    fn run_backward(&self, gradient: Gradient) -> Result<()> {
        let Some(root) = &self.node else {
            let reason = "no tensor it was made from requires a gradient: call requires_grad_(true) on the leaves";
            return Err(Error::Autograd { op: "backward", reason: reason.into() });
        };
        no_grad(|| walk(root.clone(), gradient))
    }
}

fn walk(root: Arc<Node>, gradient: Gradient) -> Result<()> {
    let mut gradients = HashMap::from([(root.seq, gradient)]);
    let mut heap = BinaryHeap::from([Pending(root)]);
    while let Some(Pending(node)) = heap.pop() {
        let Some(grad) = gradients.remove(&node.seq) else { continue };
        let (backward, factor) = match &mut *node.state() {
            State::Leaf(leaf) => {
                let in_slot = matches!(grad, Gradient::Tensor { in_slot: true, .. });
                leaf.grad = Some(settle(leaf, grad)?);
                leaf.lent &= !in_slot;
                continue;
            }
            state => match std::mem::replace(state, State::Consumed) {
                State::Operation(backward, factor) => (backward, factor),
                _ => {
                    let reason = "its graph was consumed by an earlier backward: run the forward pass again";
                    return Err(Error::Autograd { op: node.op, reason: reason.into() });
                }
            },
        };
        let slots: SmallVec<[Option<Tensor>; 3]> =
            (0..node.inputs.len()).map(|i| free_slot(&node.inputs, i, &gradients)).collect();
        let offered: SmallVec<[Option<Tensor>; 3]> =
            slots.iter().map(|s| s.as_ref().map(Tensor::shallow_clone)).collect();
        let factor = factor.filter(|_| !matches!(grad, Gradient::Tensor { multiplied: true, .. }));
        let multiplied = SmallVec::from_elem(false, node.inputs.len());
        // The context goes before the results are added up: its handle on the gradient would make it look shared.
        let mut context = Context { grad, inputs: &node.inputs, slots, factor, multiplied };
        let results = backward(&mut context)?;
        let multiplied = context.multiplied.clone();
        drop(context);
        debug_assert_eq!(results.len(), node.inputs.len(), "{}: one gradient an input", node.op);
        for (((input, result), offered), multiplied) in node.inputs.iter().zip(results).zip(offered).zip(multiplied) {
            let Some(input) = input else { continue };
            let is_slot = |s: &Tensor| result.as_ref().is_some_and(|r| s.shares_storage(r) && s.layout == r.layout);
            let in_slot = offered.as_ref().is_some_and(is_slot);
            if offered.is_some()
                && !in_slot
                && let State::Leaf(leaf) = &mut *input.state()
            {
                leaf.lent = false;
            }
            let Some(result) = result else { continue };
            let sum = match gradients.remove(&input.seq) {
                Some(first) => first.add(result)?,
                None => {
                    heap.push(Pending(input.clone()));
                    Gradient::Tensor { tensor: result, in_slot, multiplied }
                }
            };
            gradients.insert(input.seq, sum);
        }
    }
    Ok(())
}

/// Lends the slot of input `i` if it is a leaf that has one, holds no gradient yet and was offered to nobody else.
fn free_slot(inputs: &[Option<Arc<Node>>], i: usize, gradients: &HashMap<u64, Gradient>) -> Option<Tensor> {
    let node = inputs[i].as_ref()?;
    let taken = gradients.contains_key(&node.seq) || inputs[..i].iter().flatten().any(|n| n.seq == node.seq);
    match &mut *node.state() {
        State::Leaf(leaf) if !taken && !leaf.lent && leaf.grad.is_none() => {
            leaf.lent = leaf.slot.is_some();
            leaf.slot.as_ref().map(Tensor::shallow_clone)
        }
        _ => None,
    }
}

/// What a leaf holds after `grad` has arrived: in its slot if it has one.
fn settle(leaf: &Leaf, grad: Gradient) -> Result<Tensor> {
    let in_slot = matches!(grad, Gradient::Tensor { in_slot: true, .. });
    let grad = match grad {
        Gradient::Tensor { tensor, .. } => tensor,
        one => one.tensor()?,
    };
    match (&leaf.grad, leaf.slot.as_ref().filter(|_| in_slot || !leaf.lent)) {
        (Some(total), _) => {
            total.add_(&grad)?;
            Ok(total.shallow_clone())
        }
        (None, Some(slot)) if !in_slot => {
            slot.copy_(&grad)?;
            Ok(slot.shallow_clone())
        }
        // A gradient that others can see (an expanded view, the caller's own tensor) becomes the leaf's own.
        (None, None) if !grad.storage.is_unique() || !grad.is_contiguous() => grad.copied(false),
        (None, _) => Ok(grad),
    }
}

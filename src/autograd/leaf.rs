//! Values, gradients and replacements of leaves, for optimisers and conversions of modules.

use std::sync::atomic::Ordering::Relaxed;

use smallvec::SmallVec;

use super::node::{Leaf, Node, State};
use crate::{Error, Result, Tensor};

/// Methods for optimisers and containers of layers.
impl Tensor {
    /// Returns a number that identifies this leaf: the same for all its handles, different for other leaves (like Python's
    /// `id` of a parameter). Layers with tied weights hold the same leaf. None for tensors outside the graph and for results
    /// of operations.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let w = Tensor::ones(2, Device::Cpu)?.requires_grad_(true)?;
    /// assert_eq!(w.leaf_id(), w.shallow_clone().leaf_id());
    /// assert!(w.leaf_id().is_some() && w.exp()?.leaf_id().is_none());
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn leaf_id(&self) -> Option<u64> {
        self.node_or_frozen().filter(|node| node.is_leaf()).map(|node| node.seq)
    }

    /// Freezes this leaf (`false`) or makes it trainable again (`true`), for all its handles (PyTorch's
    /// `p.requires_grad = flag`). A frozen leaf is outside the graph. It keeps its gradient and its position in
    /// optimisers, which skip frozen leaves. Fails with [`Error::Autograd`] if the tensor never was a leaf that
    /// requires a gradient: call [`Tensor::requires_grad_`] first.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let w = Tensor::ones(2, Device::Cpu)?.requires_grad_(true)?;
    /// let handle = w.shallow_clone();
    /// w.set_requires_grad(false)?;
    /// assert!(!handle.requires_grad() && !handle.exp()?.requires_grad());
    /// handle.set_requires_grad(true)?;
    /// assert!(w.requires_grad() && w.leaf_id() == handle.leaf_id());
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn set_requires_grad(&self, requires_grad: bool) -> Result<()> {
        self.with_leaf_state("set_requires_grad", |_| ())?;
        let node = self.node_or_frozen().expect("a leaf has a node");
        node.frozen.store(!requires_grad, Relaxed);
        Ok(())
    }

    /// Returns a handle on this leaf whose values are in `data`, of the same shape, dtype and device (PyTorch's
    /// `parameter.data = data`). Optimisers use it to put parameters into one buffer. Other handles still refer to the
    /// old memory, so replace them by the returned handle. Fails with [`Error::Autograd`] if the tensor is not a leaf,
    /// and with [`Error::ShapeMismatch`], [`Error::DTypeMismatch`] or [`Error::DeviceMismatch`] if `data` does not
    /// match it.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let w = Tensor::ones(2, Device::Cpu)?.requires_grad_(true)?;
    /// let flat = Tensor::zeros(10, Device::Cpu)?;
    /// let moved = w.with_data(flat.narrow(0, 4, 2)?)?;
    /// moved.sum((), false)?.backward()?;
    /// assert!(moved.shares_storage(&flat) && w.grad().is_some());
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn with_data(&self, data: Tensor) -> Result<Tensor> {
        let op = "with_data";
        self.with_leaf_state(op, |_| ())?;
        self.check_like(op, &data, "a leaf keeps its shape")?;
        Ok(Tensor { made_by: self.node_or_frozen(), ..data })
    }

    /// Makes backward write this leaf's gradient into `view`, which [`Tensor::grad`] then returns (PyTorch's
    /// `gradient_as_bucket_view`). `view` must be contiguous and have the leaf's shape, dtype and device. It may be
    /// part of a buffer that holds many gradients. Fails as [`Tensor::with_data`] does, and with [`Error::Invalid`] if
    /// `view` is not contiguous.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let w = Tensor::ones(2, Device::Cpu)?.requires_grad_(true)?;
    /// let gradients = Tensor::zeros(10, Device::Cpu)?;
    /// w.set_grad_slot(gradients.narrow(0, 4, 2)?)?;
    /// w.mul_scalar(3)?.sum((), false)?.backward()?;
    /// assert_eq!(gradients.to_vec::<f32>()?, [0.0, 0.0, 0.0, 0.0, 3.0, 3.0, 0.0, 0.0, 0.0, 0.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn set_grad_slot(&self, view: Tensor) -> Result<()> {
        let op = "set_grad_slot";
        self.check_slot(op, &view)?;
        self.with_leaf_state(op, |leaf| leaf.slot = Some(view.detach()))
    }

    /// Makes `grad` this leaf's gradient, for gradients computed by other means than backward (PyTorch's
    /// `parameter.grad = grad`). The leaf shares the storage of `grad`. Fails as [`Tensor::with_data`] does.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let w = Tensor::ones(2, Device::Cpu)?.requires_grad_(true)?;
    /// w.set_grad(Tensor::full(2, 3, Device::Cpu)?)?;
    /// assert_eq!(w.grad().unwrap().to_vec::<f32>()?, [3.0, 3.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn set_grad(&self, grad: Tensor) -> Result<()> {
        if let Some(new) = self.successor() {
            return new.set_grad(grad);
        }
        let op = "set_grad";
        self.check_like(op, &grad, "a gradient has the shape of its leaf")?;
        self.with_leaf_state(op, |leaf| leaf.grad = Some(grad.detach()))
    }

    /// Returns the view that [`Tensor::set_grad_slot`] set for this leaf's gradient, or None. For optimisers.
    pub fn grad_slot(&self) -> Option<Tensor> {
        match &*self.node_or_frozen()?.state() {
            State::Leaf(leaf) => leaf.slot.as_ref().map(Tensor::shallow_clone),
            _ => None,
        }
    }

    /// Returns the leaf that replaced this one when its module was converted
    /// ([`Module::to_dtype`](crate::nn::Module::to_dtype), [`Tensor::succeeded_by`]). An optimiser of this leaf
    /// continues with the successor. None if the leaf was not replaced.
    pub fn successor(&self) -> Option<Tensor> {
        let node = self.node_or_frozen()?;
        let State::Leaf(leaf) = &*node.state() else { return None };
        let next = leaf.successor.as_ref()?;
        next.successor().or_else(|| Some(next.shallow_clone()))
    }

    /// Makes a new leaf over `data`, of the same shape, that replaces this leaf. From now on [`Tensor::grad`] of this
    /// leaf returns the gradient of the new leaf, and [`Tensor::successor`] the new leaf. `grad` is the new leaf's
    /// initial gradient and `slot` its gradient slot ([`Tensor::set_grad_slot`]); both have the shape, dtype and device
    /// of `data`. Fails as [`Tensor::set_grad_slot`] does, and with [`Error::UnsupportedDType`] if `data` has integers.
    ///
    /// ```
    /// use claystone::{DType, Device, Tensor};
    /// let w = Tensor::ones(2, Device::Cpu)?.requires_grad_(true)?;
    /// let half = w.succeeded_by(w.detach().to_dtype(DType::F16)?, None, None)?;
    /// half.sum((), false)?.backward()?;
    /// assert_eq!(w.grad().unwrap().dtype(), DType::F16);
    /// assert_eq!(w.successor().unwrap().leaf_id(), half.leaf_id());
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn succeeded_by(&self, data: Tensor, grad: Option<Tensor>, slot: Option<Tensor>) -> Result<Tensor> {
        let op = "succeeded_by";
        data.dtype.check_float(op)?;
        if data.shape() != self.shape() {
            let hint = "a leaf keeps its shape";
            return Err(Error::ShapeMismatch { op, lhs: self.shape().clone(), rhs: data.shape().clone(), hint });
        }
        grad.iter().try_for_each(|grad| data.check_like(op, grad, "a gradient has the shape of its leaf"))?;
        slot.iter().try_for_each(|slot| data.check_slot(op, slot))?;
        let state = State::Leaf(Box::new(Leaf { grad, slot, ..Leaf::default() }));
        let new = Tensor { made_by: Some(Node::new("leaf", SmallVec::new(), state)), ..data };
        let successor = Some(new.shallow_clone());
        let old = self.with_leaf_state(op, |leaf| std::mem::replace(leaf, Leaf { successor, ..Leaf::default() }))?;
        new.with_leaf_state(op, |leaf| leaf.post_accumulate_hooks = old.post_accumulate_hooks)?;
        new.set_requires_grad(self.requires_grad())?;
        Ok(new)
    }

    pub(super) fn with_leaf_state<R>(&self, op: &'static str, f: impl FnOnce(&mut Leaf) -> R) -> Result<R> {
        if let Some(node) = self.node_or_frozen()
            && let State::Leaf(leaf) = &mut *node.state()
        {
            return Ok(f(leaf));
        }
        no_gradient!(
            op,
            "the tensor is not a leaf that requires a gradient: call requires_grad_(true) on a tensor outside the graph"
        )
    }

    /// Returns an error unless gradients of this tensor can be written to `view`.
    fn check_slot(&self, op: &'static str, view: &Tensor) -> Result<()> {
        invalid!(op if !view.layout.is_dense(), "a gradient slot must be contiguous in memory, and this view is not");
        self.check_like(op, view, "a gradient has the shape of its leaf")
    }

    /// True if both tensors have the same shape, dtype and device.
    pub(super) fn is_like(&self, other: &Tensor) -> bool {
        (self.shape(), self.dtype, self.device()) == (other.shape(), other.dtype, other.device())
    }

    pub(super) fn describe(&self) -> String {
        format!("{}, {} on {}", self.shape(), self.dtype, self.device())
    }

    /// Returns an error unless `given` has the shape, dtype and device of this tensor.
    pub(super) fn check_like(&self, op: &'static str, given: &Tensor, hint: &'static str) -> Result<()> {
        if given.shape() != self.shape() {
            return Err(Error::ShapeMismatch { op, lhs: self.shape().clone(), rhs: given.shape().clone(), hint });
        }
        if given.dtype != self.dtype {
            return Err(Error::DTypeMismatch { op, lhs: self.dtype, rhs: given.dtype });
        }
        if given.device() != self.device() {
            return Err(Error::DeviceMismatch { op, lhs: self.device(), rhs: given.device() });
        }
        Ok(())
    }
}

//! Recording of operations that change tensors in place.
//!
//! The node of an in-place operation is recorded like the node of the same operation out of place. If the changed tensor
//! is a view, its base tensor gets a new node too. The base's node combines the new elements of the view with the other
//! elements of the base (PyTorch's `CopySlices`).

use std::cmp::Reverse;
use std::sync::Arc;

use smallvec::SmallVec;

use super::hooks::Hooks;
use super::node::Node;
use super::record::operation_node;
use super::{Context, DetachedGroup, Gradients, history, is_grad_enabled, record_differentiable};
use crate::layout::shape::Dims;
use crate::tensor::{Layout, Shape};
use crate::{Result, Tensor};

/// An in-place operation that is being recorded.
pub(crate) struct InPlace<'t> {
    op: &'static str,
    target: &'t Tensor,
    /// The target's node before the change.
    before: Option<Arc<Node>>,
    /// The node of the target's base tensor (the tensor that the target is a view of, or the target itself). None if the target is untracked.
    base: Option<Arc<Node>>,
    /// The layout of the base tensor. Without a base, the layout of all elements of the storage.
    layout: Layout,
    /// The dims of `layout`, sorted by stride from the largest to the smallest.
    dims_by_stride: Dims<usize>,
}

/// Starts recording an operation that changes `target` in place and reads `sources`. Call it before the elements change. Returns None if
/// none of the tensors is tracked or recording is off. As in PyTorch, fails with [`crate::Error::Autograd`] for a leaf that requires a
/// gradient, a view of such a leaf, and a view made inside `no_grad`.
#[inline]
pub(crate) fn begin_in_place<'t>(
    op: &'static str,
    target: &'t Tensor,
    sources: &[&Tensor],
) -> Result<Option<InPlace<'t>>> {
    let tracked = || target.requires_grad() || sources.iter().any(|t| t.requires_grad());
    if !is_grad_enabled() || !tracked() || !target.dtype.is_float() {
        return Ok(None);
    }
    InPlace::new(op, target).map(Some)
}

/// Returns an error if the operation cannot be recorded and changes or reads a tracked tensor.
pub(crate) fn check_unrecorded(op: &'static str, target: &Tensor, sources: &[&Tensor]) -> Result<()> {
    no_gradient!(op if is_grad_enabled() && (target.requires_grad() || sources.iter().any(|t| t.requires_grad())),
        "a tensor is part of a graph, but this operation cannot record an in-place change: wrap it in no_grad, or use an \
         operation that can");
    Ok(())
}

impl<'t> InPlace<'t> {
    fn new(op: &'static str, target: &'t Tensor) -> Result<InPlace<'t>> {
        let before = target.node();
        no_gradient!(op if before.is_none() && target.group == DetachedGroup::UNRECORDED_VIEW,
            "the tensor is a view that was made inside no_grad, so a change could not be recorded for its base tensor: make the \
             view outside no_grad, or change it inside");
        let (base, layout) = match &before {
            Some(node) => {
                let (base, layout) = node.base(&target.layout);
                (Some(base.clone()), layout.clone())
            }
            None => (None, Layout::contiguous(Shape::from(target.storage.nbytes() / target.dtype.size()))),
        };
        if let (Some(base), Some(before)) = (&base, &before)
            && base.is_leaf()
        {
            let view_of = if base.seq == before.seq { "" } else { "view of a " };
            no_gradient!(
                op,
                "a {view_of}leaf that requires a gradient is changed in place: wrap it in no_grad, as optimisers do, \
                or change a {view_of}clone()"
            );
        }
        let inside = match (target.layout.bounds(), layout.bounds()) {
            (Some((low, high)), Some((first, last))) => first <= low && high <= last,
            _ => true,
        };
        let Some(dims_by_stride) = order_in_memory(&layout).filter(|_| inside) else {
            no_gradient!(
                op,
                "the tensor is a view of an operation's result whose elements are not contiguous in any order of dims, \
                so the change cannot be recorded: change a clone()"
            );
        };
        Ok(InPlace { op, target, before, base, layout, dims_by_stride })
    }

    /// Copies the target's current elements to new memory. The copy has the target's node.
    pub(crate) fn copy(&self) -> Result<Tensor> {
        Ok(Tensor { made_by: self.before.clone(), ..self.target.deep_copy(false)? })
    }

    /// Records the change. `record` gets the changed elements and returns them with the operation's node, which becomes the target's node.
    pub(crate) fn finish(self, record: impl FnOnce(Tensor) -> Tensor) {
        let node = record(self.target.detach()).made_by.expect("the operation is recorded");
        let target = self.target;
        // A view that permutes all elements of its base can replace the base, so the base needs no node of its own.
        let whole = target.numel() == self.layout.numel() && order_in_memory(&target.layout).is_some();
        match whole {
            true => history::record_change(target, self.base.as_ref(), node, target.layout.clone()),
            false => history::record_change(target, self.base.as_ref(), self.base_node(node), self.layout.clone()),
        }
        for (node, layout) in [(self.base, self.layout), (self.before, target.layout.clone())] {
            let Some(old) = node.filter(|node| node.hooks().is_some()) else { continue };
            let handle = Tensor { made_by: Some(old.clone()), ..target.with_layout(layout) };
            handle.node().iter().for_each(|new| Hooks::move_retained_gradient(&old, new));
        }
    }

    /// Records that the target was overwritten by values that depend neither on an input nor on the target's old elements.
    pub(crate) fn finish_overwrite(self) {
        let op = self.op;
        self.finish(|out| record_differentiable(op, out, &[], |_| Ok(Gradients::new())));
    }

    /// Returns the new node of the base. `node` is the node of the target, which is a view of the base.
    fn base_node(&self, node: Arc<Node>) -> Arc<Node> {
        let &InPlace { op, target, ref base, ref layout, ref dims_by_stride, .. } = self;
        let part = Layout { offset: target.layout.offset - layout.offset, ..target.layout.clone() };
        let mut back: Dims<isize> = SmallVec::from_elem(0, dims_by_stride.len());
        dims_by_stride.iter().enumerate().for_each(|(i, &d)| back[d] = i as isize);
        let dims_by_stride: Dims<isize> = dims_by_stride.iter().map(|&d| d as isize).collect();
        let pick = move |whole: &Layout| Ok(Layout { offset: whole.offset + part.offset, ..part.clone() });
        let nodes = [base.clone(), Some(node)].into_iter().collect();
        operation_node(self.op, nodes, move |ctx: &mut Context| {
            let grad = ctx.grad()?.permute(&dims_by_stride)?.contiguous()?;
            let rest = ctx.needs_gradient(0).then(|| {
                let zero = Tensor::zeros((), &grad)?;
                grad.assigned_copy(op, &zero, true, pick.clone())?.permute(&back)
            });
            let part = ctx.needs_gradient(1).then(|| grad.select_view(op, pick.clone()));
            Ok([rest.transpose()?, part.transpose()?].into_iter().collect())
        })
    }
}

/// Returns the order of dims in which the layout's elements are contiguous; None if there is no such order.
fn order_in_memory(layout: &Layout) -> Option<Dims<usize>> {
    let mut dims_by_stride: Dims<usize> = (0..layout.shape.rank()).collect();
    dims_by_stride.sort_by_key(|&d| Reverse(layout.strides[d]));
    layout.permute(&dims_by_stride).is_contiguous().then_some(dims_by_stride)
}

//! Recorded operations that change tensors in place.
//!
//! The operation's own node is recorded as that of one out of place would be. Where a view was changed, the tensor that it is a
//! view of gets a node as well, of "the view's elements, and what the rest was before" (PyTorch's `CopySlices`).

use std::cmp::Reverse;
use std::sync::Arc;

use smallvec::SmallVec;

use super::hooks::Hooks;
use super::node::Node;
use super::record::node_of;
use super::{Context, Gradients, Group, history, is_grad_enabled, record_twice};
use crate::layout::shape::Dims;
use crate::tensor::{Layout, Shape};
use crate::{Error, Result, Tensor};

/// An operation in place that is being recorded.
pub(crate) struct InPlace<'t> {
    op: &'static str,
    target: &'t Tensor,
    before: Option<Arc<Node>>,
    /// The node of the tensor that the target is a view of, if it has any, and its layout.
    base: Option<Arc<Node>>,
    layout: Layout,
    /// The order of its dims in memory.
    order: Dims<usize>,
}

/// What an operation that changes `target` in place, reading `sources`, has to record; None where nothing is tracked, or
/// nothing is recorded. To be asked before the elements change.
///
/// # Errors
/// Where PyTorch has them: a leaf that requires a gradient, or a view of one, and a view that was made inside `no_grad`.
#[inline]
pub(crate) fn in_place<'t>(op: &'static str, target: &'t Tensor, sources: &[&Tensor]) -> Result<Option<InPlace<'t>>> {
    let tracked = || target.requires_grad() || sources.iter().any(|t| t.requires_grad());
    if !is_grad_enabled() || !tracked() || !target.dtype.is_float() {
        return Ok(None);
    }
    InPlace::new(op, target).map(Some)
}

/// An error where an operation in place that cannot be recorded changes or reads what is tracked.
pub(crate) fn check_unrecorded(op: &'static str, target: &Tensor, sources: &[&Tensor]) -> Result<()> {
    if !is_grad_enabled() || !target.requires_grad() && !sources.iter().any(|t| t.requires_grad()) {
        return Ok(());
    }
    let reason = "a tensor is part of a graph, and what this operation computes in place is not recorded: \
                  wrap it in no_grad, or use an operation that is";
    Err(Error::Autograd { op, reason: reason.into() })
}

impl<'t> InPlace<'t> {
    fn new(op: &'static str, target: &'t Tensor) -> Result<InPlace<'t>> {
        let refused = |reason: &str| Err(Error::Autograd { op, reason: reason.into() });
        let before = target.node();
        let (base, layout) = match &before {
            Some(node) => {
                let (base, layout) = node.base(&target.layout);
                (Some(base.clone()), layout.clone())
            }
            None if target.group == Group::UNRECORDED_VIEW => {
                return refused(
                    "the tensor is a view that was made inside no_grad, and the change could not be recorded for what it is a view of: make the view outside no_grad, or change it inside",
                );
            }
            None => (None, Layout::contiguous(Shape::from(target.storage.nbytes() / target.dtype.size()))),
        };
        if base.as_ref().is_some_and(|base| base.is_leaf()) {
            return match base.as_ref().map(|base| base.seq) == before.as_ref().map(|before| before.seq) {
                true => refused(
                    "a leaf that requires a gradient is changed in place: wrap it in no_grad, as optimisers do, or change a clone()",
                ),
                false => refused(
                    "a view of a leaf that requires a gradient is changed in place: wrap it in no_grad, as optimisers do, or change a view of a clone()",
                ),
            };
        }
        let inside = match (target.layout.bounds(), layout.bounds()) {
            (Some((low, high)), Some((first, last))) => first <= low && high <= last,
            _ => true,
        };
        let Some(order) = order_in_memory(&layout).filter(|_| inside) else {
            return refused(
                "the tensor is a view of an operation's result whose elements do not lie together, so that the change cannot be recorded: change a clone()",
            );
        };
        Ok(InPlace { op, target, before, base, layout, order })
    }

    /// The target's elements as they are, on new memory, with their place in the graph.
    pub(crate) fn copy(&self) -> Result<Tensor> {
        Ok(Tensor { made_by: self.before.clone(), ..self.target.copied(false)? })
    }

    /// Records that the target, whose elements have changed, is from now on what `record` makes of it: the result of the
    /// operation, with a node of its own.
    pub(crate) fn finish(self, record: impl FnOnce(Tensor) -> Tensor) {
        let node = record(self.target.detach()).made_by.expect("the operation is recorded");
        let target = self.target;
        // A permutation of all elements is as good a base as the base is.
        let whole = target.numel() == self.layout.numel() && order_in_memory(&target.layout).is_some();
        match whole {
            true => history::change(target, self.base.as_ref(), node, target.layout.clone()),
            false => history::change(target, self.base.as_ref(), self.in_base(node), self.layout.clone()),
        }
        for (node, layout) in [(self.base, self.layout), (self.before, target.layout.clone())] {
            let Some(old) = node.filter(|node| node.hooks().is_some()) else { continue };
            let handle = Tensor { made_by: Some(old.clone()), ..target.with_layout(layout) };
            handle.node().iter().for_each(|new| Hooks::retain_instead(&old, new));
        }
    }

    /// Records that the target was overwritten, without regard to what it was, by what depends on no input.
    pub(crate) fn overwritten(self) {
        let op = self.op;
        self.finish(|out| record_twice(op, out, &[], |_| Ok(Gradients::new())));
    }

    /// The node of the base, the target being a part of it that has `node`.
    fn in_base(&self, node: Arc<Node>) -> Arc<Node> {
        let &InPlace { op, target, ref base, ref layout, ref order, .. } = self;
        let part = Layout { offset: target.layout.offset - layout.offset, ..target.layout.clone() };
        let mut back: Dims<isize> = SmallVec::from_elem(0, order.len());
        order.iter().enumerate().for_each(|(i, &d)| back[d] = i as isize);
        let order: Dims<isize> = order.iter().map(|&d| d as isize).collect();
        let pick = move |whole: &Layout| Ok(Layout { offset: whole.offset + part.offset, ..part.clone() });
        let nodes = [base.clone(), Some(node)].into_iter().collect();
        node_of(self.op, nodes, move |ctx: &mut Context| {
            let grad = ctx.grad()?.permute(&order)?.contiguous()?;
            let rest = ctx.needs(0).then(|| {
                let zero = Tensor::zeros((), &grad)?;
                grad.assigned_copy(op, &zero, true, pick.clone())?.permute(&back)
            });
            let part = ctx.needs(1).then(|| grad.picked(op, pick.clone()));
            Ok([rest.transpose()?, part.transpose()?].into_iter().collect())
        })
    }
}

/// The dims of a layout in the order in which its elements lie one after another, if they do in any.
fn order_in_memory(layout: &Layout) -> Option<Dims<usize>> {
    let mut order: Dims<usize> = (0..layout.shape.rank()).collect();
    order.sort_by_key(|&d| Reverse(layout.strides[d]));
    layout.permute(&order).is_contiguous().then_some(order)
}

//! The nodes of tensors whose storage was changed in place by recorded operations.
//!
//! A handle keeps the node it was created with. A recorded in-place change gives new nodes to the tensor and all its views, but their
//! handles are not known here. So the storage keeps the new node of the changed tensor. An older handle derives its new node from that
//! node, as the node of a view, when the new node is needed. Storages without in-place changes need no lookup.

use std::sync::{Arc, Mutex};

use super::modes::is_dependencies_only;
use super::node::{DetachedGroup, Node};
use super::record::view_node;
use crate::device::lock;
use crate::storage::Storage;
use crate::tensor::{Layout, window};
use crate::{DType, Tensor};

impl DetachedGroup {
    /// Marks views of tracked tensors that were made without recording. A change through such a view is an error, as it cannot be recorded.
    pub(crate) const UNRECORDED_VIEW: DetachedGroup = DetachedGroup(u32::MAX);

    /// Returns the group of handles that are detached now. The group stays the same until the next recorded change of this storage.
    #[inline]
    pub(crate) fn detached(storage: &Storage) -> DetachedGroup {
        DetachedGroup(1 + if storage.has_attachment() { last_change(storage) } else { 0 })
    }
}

#[cold]
fn last_change(storage: &Storage) -> u32 {
    storage.attachment::<History>().map_or(0, |history| lock(&history.0).changes)
}

/// The tensors of one storage that recorded operations have changed in place.
#[derive(Default)]
pub(super) struct History(Mutex<StorageChanges>);

/// The data of [`History`], behind its lock.
#[derive(Default)]
struct StorageChanges {
    changes: u32,
    tensors: Vec<ChangedTensor>,
}

struct ChangedTensor {
    /// The tensor's group, if the tensor was outside the graph before the change.
    group: Option<(DetachedGroup, DType)>,
    /// The tensor's id; with `change`, the number of its last change, this is [`Node::change_id`].
    id: u64,
    change: u32,
    node: Arc<Node>,
    /// The layout of the changed tensor, to which `node` belongs.
    layout: Layout,
    /// The nodes of views that were made before the change, by layout.
    views: Vec<(Layout, Arc<Node>)>,
}

impl ChangedTensor {
    /// Returns the node of a view with this layout; creates the node on first use.
    fn node_of_view(&mut self, layout: &Layout) -> Arc<Node> {
        if self.layout == *layout {
            return self.node.clone();
        }
        if let Some((_, node)) = self.views.iter().find(|(known, _)| known == layout) {
            return node.clone();
        }
        let back = window::strided_gradient_fn(self.layout.clone(), layout.clone());
        let node = view_node("as_strided", self.node.clone(), self.layout.clone(), back);
        if !is_dependencies_only() {
            self.views.push((layout.clone(), node.clone()));
        }
        node
    }
}

/// Records a change of `target`. Its base tensor (itself if it is no view), which had the node `base`, now has `node` and `layout`.
pub(super) fn record_change(target: &Tensor, base: Option<&Arc<Node>>, node: Arc<Node>, layout: Layout) {
    let history = target.storage.attachment_or_default::<History>();
    let mut changed = lock(&history.0);
    changed.changes += 1;
    let change = changed.changes;
    let (id, group) = match base {
        Some(base) => (base.change_id().0, None),
        None => (node.seq, Some((target.group, target.dtype))),
    };
    node.changed.set((id, change)).expect("a new node is of one change");
    let new = |group| ChangedTensor { group, id, change, node, layout, views: Vec::new() };
    let old = match changed.tensors.iter_mut().find(|t| t.id == id) {
        Some(known) => Some(std::mem::replace(known, new(known.group))),
        None => {
            changed.tensors.push(new(group));
            None
        }
    };
    drop(changed);
    drop(old); // after the lock is released: nodes hold tensors
}

impl Tensor {
    /// Returns the node that receives this tensor's gradient.
    #[inline]
    pub(crate) fn node(&self) -> Option<Arc<Node>> {
        match self.storage.has_attachment() {
            true => current_node(self),
            false => self.made_by.as_ref().filter(|node| !node.is_frozen()).cloned(),
        }
    }

    /// Returns the node that receives this tensor's gradient; for a frozen tensor, its leaf.
    pub(super) fn node_or_frozen(&self) -> Option<Arc<Node>> {
        self.made_by.as_ref().filter(|node| node.is_frozen()).cloned().or_else(|| self.node())
    }

    #[inline]
    pub(super) fn into_detached(self) -> Tensor {
        match self.requires_grad() {
            true => Tensor { made_by: None, group: DetachedGroup::detached(&self.storage), ..self },
            false => self,
        }
    }
}

/// Looks up the node of a tensor whose storage may have been changed in place.
#[cold]
fn current_node(t: &Tensor) -> Option<Arc<Node>> {
    let made_by = t.made_by.clone().filter(|node| !node.is_frozen());
    let Some(history) = t.storage.attachment::<History>() else { return made_by };
    let mut changed = lock(&history.0);
    let tensor = match &made_by {
        Some(node) => {
            let (id, change) = node.base(&t.layout).0.change_id();
            changed.tensors.iter_mut().find(|t| t.id == id && t.change != change)
        }
        None => changed.tensors.iter_mut().find(|known| known.group == Some((t.group, t.dtype))),
    };
    match tensor {
        Some(tensor) => Some(tensor.node_of_view(&t.layout)),
        None => made_by,
    }
}

//! Which node a tensor has, where recorded operations changed tensors of its storage in place.
//!
//! A handle holds the node it was made by. A recorded change in place gives the tensor, and all its views, other nodes, and
//! handles on them may be anywhere: so the node of the changed tensor is kept with the storage, and a handle that was made before
//! takes its own from there, as a view of it, whenever it is asked. A storage that was never changed so has nothing to ask.

use std::sync::{Arc, Mutex};

use super::modes::is_dependencies_only;
use super::node::Node;
use super::record::view_node;
use crate::device::lock;
use crate::storage::Storage;
use crate::tensor::{Layout, window};
use crate::{DType, Tensor};

/// Handles on a storage that become part of a graph together, when one of them is changed in place: a tensor outside the graph
/// and its views. What is detached is another tensor.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Group(u32);

impl Group {
    /// Views of tracked tensors that were made without recording: a change of one cannot be recorded.
    pub(crate) const UNRECORDED_VIEW: Group = Group(u32::MAX);

    /// What is detached from tensors of this storage, until the next recorded change.
    #[inline]
    pub(crate) fn detached(storage: &Storage) -> Group {
        Group(1 + if storage.has_attachment() { last_change(storage) } else { 0 })
    }
}

#[cold]
fn last_change(storage: &Storage) -> u32 {
    storage.attachment::<History>().map_or(0, |history| lock(&history.0).changes)
}

/// The tensors of a storage that were changed in place by recorded operations.
#[derive(Default)]
pub(super) struct History(Mutex<Changed>);

#[derive(Default)]
struct Changed {
    /// How many changes there were.
    changes: u32,
    tensors: Vec<ChangedTensor>,
}

struct ChangedTensor {
    /// It was outside the graph before.
    group: Option<(Group, DType)>,
    /// As [`Node::change`] has both.
    id: u64,
    change: u32,
    node: Arc<Node>,
    /// The layout of what has this node.
    layout: Layout,
    /// Nodes of handles that are older than the change, by layout.
    views: Vec<(Layout, Arc<Node>)>,
}

impl ChangedTensor {
    /// The node of a handle of this layout.
    fn view(&mut self, layout: &Layout) -> Arc<Node> {
        if self.layout == *layout {
            return self.node.clone();
        }
        if let Some((_, node)) = self.views.iter().find(|(known, _)| known == layout) {
            return node.clone();
        }
        let back = window::strided_back(self.layout.clone(), layout.clone());
        let node = view_node("as_strided", self.node.clone(), self.layout.clone(), back);
        if !is_dependencies_only() {
            self.views.push((layout.clone(), node.clone()));
        }
        node
    }
}

/// Records that `target` was changed: from now on the tensor that it is a view of, which had the node `base`, if any, has
/// `node`, with this layout.
pub(super) fn change(target: &Tensor, base: Option<&Arc<Node>>, node: Arc<Node>, layout: Layout) {
    let history = target.storage.attachment_or_default::<History>();
    let mut changed = lock(&history.0);
    changed.changes += 1;
    let change = changed.changes;
    let (id, group) = match base {
        Some(base) => (base.change().0, None),
        None => (node.seq, Some((target.group, target.dtype))),
    };
    node.set_change(id, change);
    let new = |group| ChangedTensor { group, id, change, node, layout, views: Vec::new() };
    let old = match changed.tensors.iter_mut().find(|t| t.id == id) {
        Some(known) => Some(std::mem::replace(known, new(known.group))),
        None => {
            changed.tensors.push(new(group));
            None
        }
    };
    drop(changed);
    drop(old); // not under the lock: nodes hold tensors
}

impl Tensor {
    /// The node whose gradient is this tensor's.
    #[inline]
    pub(crate) fn node(&self) -> Option<Arc<Node>> {
        match self.storage.has_attachment() {
            true => current(self),
            false => self.made_by.as_ref().filter(|node| !node.is_frozen()).cloned(),
        }
    }

    /// [`Tensor::node`], and the leaf of a frozen tensor.
    pub(super) fn node_or_frozen(&self) -> Option<Arc<Node>> {
        self.made_by.as_ref().filter(|node| node.is_frozen()).cloned().or_else(|| self.node())
    }

    /// This handle, outside the graph.
    #[inline]
    pub(super) fn into_detached(self) -> Tensor {
        match self.requires_grad() {
            true => Tensor { made_by: None, group: Group::detached(&self.storage), ..self },
            false => self,
        }
    }
}

#[cold]
fn current(t: &Tensor) -> Option<Arc<Node>> {
    let made_by = t.made_by.clone().filter(|node| !node.is_frozen());
    let Some(history) = t.storage.attachment::<History>() else { return made_by };
    let mut changed = lock(&history.0);
    let tensor = match &made_by {
        Some(node) => {
            let (id, change) = node.base(&t.layout).0.change();
            changed.tensors.iter_mut().find(|t| t.id == id && t.change != change)
        }
        None => changed.tensors.iter_mut().find(|known| known.group == Some((t.group, t.dtype))),
    };
    match tensor {
        Some(tensor) => Some(tensor.view(&t.layout)),
        None => made_by,
    }
}

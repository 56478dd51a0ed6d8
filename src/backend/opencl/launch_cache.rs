//! A thread's cache of launch plans: a launch of the same operation over operands of the same layouts is looked up instead of
//! planned again.
//!
//! The [`Key`] has everything that a plan depends on, including the dtypes and layouts of tensors, but of their offsets only the
//! alignment. The cache keeps no tensor alive.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use smallvec::SmallVec;

use crate::backend::opencl::launch_plan::LaunchPlan;
use crate::backend::problem::map::Params;
use crate::device::opencl::times_tuned;
use crate::expr::Expr;
use crate::tensor::Layout;
use crate::{DType, Device, Result, Tensor};

/// The cache is set-associative, like a processor's, with the least recently used entry of a set evicted: the entries of a thread are
/// found without a lock, and faster than in an [`Lru`](crate::device::lru::Lru).
const SETS: usize = 128;
const WAYS: usize = 4;

/// Offsets of tensors are compared modulo this many elements, which are at least the 16 bytes of the widest load.
const ALIGNED: usize = 16;

/// The kind of operation that an entry was prepared for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OpKind {
    Map,
    Reduce,
    Row,
    CrossEntropy,
    Norm,
    /// A norm over rows as four dims, which need not be views of the operands.
    NormRows,
    Gather,
    Scatter,
    Gemm,
    ImplicitGemm,
    Attention,
    AttentionBackward,
    Join,
}

/// A number for a static: its distance from another one, so that hashes are the same in every run.
pub(crate) fn number_of<T>(of: *const T) -> u64 {
    static OTHER: u8 = 0;
    of.addr().wrapping_sub((&raw const OTHER).addr()) as u64
}

/// Everything that a plan depends on, except for tuning parameters: a change of these clears the caches of all threads.
pub(crate) struct Key<'a> {
    pub(crate) of: OpKind,
    pub(crate) device: Device,
    pub(crate) numbers: &'a [u64],
    pub(crate) exprs: &'a [Expr],
    pub(crate) tensors: &'a [&'a Tensor],
}

/// A launch plan with its key.
pub(crate) struct Entry {
    of: OpKind,
    device: Device,
    numbers: SmallVec<[u64; 8]>,
    exprs: SmallVec<[Expr; 2]>,
    tensors: SmallVec<[(DType, Layout); 4]>,
    pub(crate) plan: LaunchPlan,
}

impl Entry {
    fn new(key: &Key, plan: LaunchPlan) -> Entry {
        let tensors = key.tensors.iter().map(|t| (t.dtype, t.layout.clone())).collect();
        let (numbers, exprs) = (SmallVec::from_slice(key.numbers), key.exprs.iter().cloned().collect());
        Entry { of: key.of, device: key.device, numbers, exprs, tensors, plan }
    }
}

/// The slot of the cache for an entry that was not found.
#[derive(Clone, Copy)]
pub(crate) struct Slot {
    hash: u64,
    tuned: u64,
}

struct Table {
    /// The version of the tuning parameters that the entries were prepared with.
    tuned: u64,
    /// The number of entries that were ever inserted.
    kept: usize,
    slots: Vec<Way>,
}

/// A place in a set.
#[derive(Default)]
struct Way {
    hash: u64,
    /// [`Table::kept`] when the entry was last used.
    used: Cell<usize>,
    entry: Option<Rc<Entry>>,
}

thread_local! {
    static TABLE: RefCell<Table> = const { RefCell::new(Table { tuned: 0, kept: 0, slots: Vec::new() }) };
}

impl Key<'_> {
    fn hash(&self) -> u64 {
        let mix = |hash: u64, x: u64| (hash.rotate_left(9) ^ x).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let hash = self.numbers.iter().fold(mix(self.of as u64, self.device.number()), |hash, &x| mix(hash, x));
        let hash = self.exprs.iter().fold(hash, |hash, e| hash.rotate_left(7) ^ e.hash_value());
        self.tensors.iter().fold(hash, |hash, t| {
            let sizes = t.shape().dims().iter().zip(t.strides());
            sizes.fold(hash ^ t.dtype as u64, |hash, (&n, &s)| mix(hash, n as u64 ^ (s as u64) << 32))
        })
    }

    fn is(&self, entry: &Entry) -> bool {
        let alike = |(t, (dtype, layout)): (&&Tensor, &(DType, Layout))| {
            t.dtype == *dtype && t.device() == self.device && t.layout.lies_like(layout, ALIGNED)
        };
        (self.of, self.device) == (entry.of, entry.device)
            && self.numbers.len() == entry.numbers.len()
            && self.numbers.iter().zip(&entry.numbers).all(|(a, b)| a == b)
            && self.exprs == &entry.exprs[..]
            && self.tensors.len() == entry.tensors.len()
            && self.tensors.iter().zip(&entry.tensors).all(alike)
    }
}

/// The cached plan for a key, or the slot to insert it in.
pub(crate) fn find(key: &Key) -> std::result::Result<Rc<Entry>, Slot> {
    let slot = Slot { hash: key.hash(), tuned: times_tuned() };
    let found = TABLE.try_with(|table| {
        let table = table.try_borrow().ok().filter(|table| table.tuned == slot.tuned)?;
        let set = table.slots.get(slot.set()..slot.set() + WAYS)?;
        let hit = |way: &Way| {
            let entry = way.entry.as_ref().filter(|entry| way.hash == slot.hash && key.is(entry))?;
            way.used.set(table.kept);
            Some(Rc::clone(entry))
        };
        set.iter().find_map(hit)
    });
    found.ok().flatten().ok_or(slot)
}

impl Slot {
    fn set(self) -> usize {
        (self.hash >> 40) as usize % SETS * WAYS
    }

    /// Inserts a plan, in place of another one where the set is full.
    pub(crate) fn keep(self, key: &Key, plan: LaunchPlan) -> Rc<Entry> {
        let entry = Rc::new(Entry::new(key, plan));
        let _ = TABLE.try_with(|table| {
            let Ok(mut table) = table.try_borrow_mut() else { return };
            if table.tuned != self.tuned || table.slots.is_empty() {
                table.tuned = self.tuned;
                table.slots.clear();
                table.slots.resize_with(SETS * WAYS, Default::default);
            }
            table.kept += 1;
            let used = Cell::new(table.kept);
            let set = &mut table.slots[self.set()..self.set() + WAYS];
            if let Some(way) = set.iter_mut().min_by_key(|way| (way.entry.is_some(), way.used.get())) {
                *way = Way { hash: self.hash, used, entry: Some(Rc::clone(&entry)) };
            }
        });
        entry
    }
}

/// Launches the cached plan for a key, or else the one that `prepare` makes, which is then cached.
pub(crate) fn launch(key: &Key, params: Params, prepare: impl Fn() -> Result<LaunchPlan>) -> Result<Rc<Entry>> {
    let entry = match find(key) {
        Ok(entry) => entry,
        Err(slot) => {
            let device = key.tensors[0].cl_device()?;
            let (plan, may_keep) =
                device.launch_on_trial(prepare, |plan: &LaunchPlan| plan.launch(key.tensors, params))?;
            return Ok(if may_keep { slot.keep(key, plan) } else { Rc::new(Entry::new(key, plan)) });
        }
    };
    entry.plan.launch(key.tensors, params)?;
    Ok(entry)
}

#[cfg(test)]
mod tests;

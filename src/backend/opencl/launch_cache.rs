//! A per-thread cache of launch plans. Repeating an operation on operands with the same layouts reuses its plan.
//!
//! The [`Key`] holds everything that a plan depends on, such as the tensors' dtypes, shapes, strides and offset alignments. The cache keeps no
//! tensor alive.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use smallvec::SmallVec;

use crate::backend::opencl::launch_plan::LaunchPlan;
use crate::backend::problem::map::Params;
use crate::device::opencl::times_tuned;
use crate::expr::Expr;
use crate::tensor::Layout;
use crate::{DType, Device, Result, Tensor};

/// The number of sets. The cache is set-associative, as in a processor: in a full set, the least recently used entry is replaced. A
/// lookup takes no lock and is faster than a lookup in an [`Lru`](crate::device::lru::Lru).
const SETS: usize = 128;
/// The number of entries in a set.
const WAYS: usize = 4;

/// Offsets are compared modulo this number of elements, which has at least the 16 bytes of the widest load.
const OFFSET_ALIGNMENT_ELEMENTS: usize = 16;

/// The kind of operation that a plan computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OpKind {
    Map,
    Reduce,
    Row,
    CrossEntropy,
    Norm,
    /// A norm whose rows are passed as four dims, which need not be views of the operands.
    NormRows,
    Gather,
    Scatter,
    Gemm,
    ImplicitGemm,
    Attention,
    AttentionBackward,
    CachedAttention,
    Recurrence,
    Join,
    Dequantize,
    Quantized,
}

/// Everything that a plan depends on, except tuning parameters: when a tuning parameter changes, the caches of all threads are cleared.
pub(crate) struct Key<'a> {
    pub(crate) kind: OpKind,
    pub(crate) numbers: &'a [u64],
    pub(crate) exprs: &'a [Expr],
    pub(crate) tensors: &'a [&'a Tensor],
}

/// A launch plan, and an owned copy of its key.
pub(crate) struct CachedPlan {
    kind: OpKind,
    device: Device,
    numbers: SmallVec<[u64; 8]>,
    exprs: SmallVec<[Expr; 2]>,
    tensors: SmallVec<[(DType, Layout); 4]>,
    pub(crate) plan: LaunchPlan,
}

impl CachedPlan {
    fn new(key: &Key, plan: LaunchPlan) -> CachedPlan {
        let tensors = key.tensors.iter().map(|t| (t.dtype, t.layout.clone())).collect();
        let (numbers, exprs) = (SmallVec::from_slice(key.numbers), key.exprs.iter().cloned().collect());
        CachedPlan { kind: key.kind, device: key.device(), numbers, exprs, tensors, plan }
    }
}

/// The place in the cache for a plan that a lookup did not find.
#[derive(Clone, Copy)]
pub(crate) struct VacantSlot {
    hash: u64,
    tuning_version: u64,
}

struct PlanCache {
    /// The version of the tuning parameters with which the cached plans were made.
    tuning_version: u64,
    /// The number of plans inserted so far. It is the clock for [`CacheWay::last_used`].
    insertions: usize,
    slots: Vec<CacheWay>,
}

/// One entry of a set.
#[derive(Default)]
struct CacheWay {
    hash: u64,
    /// The value of [`PlanCache::insertions`] when the entry was last used.
    last_used: Cell<usize>,
    entry: Option<Rc<CachedPlan>>,
}

thread_local! {
    static PLAN_CACHE: RefCell<PlanCache> = const { RefCell::new(PlanCache { tuning_version: 0, insertions: 0, slots: Vec::new() }) };
}

impl Key<'_> {
    /// Returns the device of the tensors, which is the same for all.
    fn device(&self) -> Device {
        self.tensors[0].device()
    }

    fn hash(&self) -> u64 {
        let mix = |hash: u64, x: u64| (hash.rotate_left(9) ^ x).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let hash = self.numbers.iter().fold(mix(self.kind as u64, self.device().number()), |hash, &x| mix(hash, x));
        let hash = self.exprs.iter().fold(hash, |hash, e| hash.rotate_left(7) ^ e.hash_value());
        self.tensors.iter().fold(hash, |hash, t| {
            let sizes = t.shape().dims().iter().zip(t.strides());
            sizes.fold(hash ^ t.dtype as u64, |hash, (&n, &s)| mix(hash, n as u64 ^ (s as u64) << 32))
        })
    }

    fn matches(&self, entry: &CachedPlan) -> bool {
        let alike = |(t, (dtype, layout)): (&&Tensor, &(DType, Layout))| {
            t.dtype == *dtype && t.device() == entry.device && t.layout.same_layout(layout, OFFSET_ALIGNMENT_ELEMENTS)
        };
        self.kind == entry.kind
            && self.numbers.len() == entry.numbers.len()
            && self.numbers.iter().zip(&entry.numbers).all(|(a, b)| a == b)
            && self.exprs == &entry.exprs[..]
            && self.tensors.len() == entry.tensors.len()
            && self.tensors.iter().zip(&entry.tensors).all(alike)
    }
}

/// Returns the cached plan of `key`, or the vacant slot for a new plan.
pub(crate) fn find_plan(key: &Key) -> std::result::Result<Rc<CachedPlan>, VacantSlot> {
    let slot = VacantSlot { hash: key.hash(), tuning_version: times_tuned() };
    let found = PLAN_CACHE.try_with(|table| {
        let table = table.try_borrow().ok().filter(|table| table.tuning_version == slot.tuning_version)?;
        let set = table.slots.get(slot.set_start()..slot.set_start() + WAYS)?;
        let hit = |way: &CacheWay| {
            let entry = way.entry.as_ref().filter(|entry| way.hash == slot.hash && key.matches(entry))?;
            way.last_used.set(table.insertions);
            Some(Rc::clone(entry))
        };
        set.iter().find_map(hit)
    });
    found.ok().flatten().ok_or(slot)
}

impl VacantSlot {
    fn set_start(self) -> usize {
        (self.hash >> 40) as usize % SETS * WAYS
    }

    /// Inserts a plan. Replaces the least recently used plan if the set is full.
    pub(crate) fn insert_plan(self, key: &Key, plan: LaunchPlan) -> Rc<CachedPlan> {
        let entry = Rc::new(CachedPlan::new(key, plan));
        let _ = PLAN_CACHE.try_with(|table| {
            let Ok(mut table) = table.try_borrow_mut() else { return };
            if table.tuning_version != self.tuning_version || table.slots.is_empty() {
                table.tuning_version = self.tuning_version;
                table.slots.clear();
                table.slots.resize_with(SETS * WAYS, Default::default);
            }
            table.insertions += 1;
            let last_used = Cell::new(table.insertions);
            let set = &mut table.slots[self.set_start()..self.set_start() + WAYS];
            if let Some(way) = set.iter_mut().min_by_key(|way| (way.entry.is_some(), way.last_used.get())) {
                *way = CacheWay { hash: self.hash, last_used, entry: Some(Rc::clone(&entry)) };
            }
        });
        entry
    }
}

/// Launches the cached plan of `key`. If there is none, makes a plan with `prepare`, launches the plan and caches it.
pub(crate) fn launch_cached(
    key: &Key,
    params: Params,
    prepare: impl Fn() -> Result<LaunchPlan>,
) -> Result<Rc<CachedPlan>> {
    let entry = match find_plan(key) {
        Ok(entry) => entry,
        Err(slot) => {
            let device = key.tensors[0].cl_device()?;
            let (plan, may_keep) =
                device.launch_on_trial(prepare, |plan: &LaunchPlan| plan.launch(key.tensors, params))?;
            return Ok(if may_keep { slot.insert_plan(key, plan) } else { Rc::new(CachedPlan::new(key, plan)) });
        }
    };
    entry.plan.launch(key.tensors, params)?;
    Ok(entry)
}

#[cfg(test)]
mod tests;

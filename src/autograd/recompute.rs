//! Recipes: how to compute a tensor again that backward needs, so that a budget can drop the tensor after the forward pass.
//!
//! While a step is recorded or runs in a budget, elementwise formulas, conversions of dtype, norms and linear layers note a recipe with
//! each result's storage. A recipe reads parameters, saved tensors, and results of a few other recipes. Recipes launch the kernels of the
//! forward pass in the same layouts and dtypes, so the elements are the same to the bit.

use std::sync::{Arc, Mutex, Weak};

use smallvec::SmallVec;

use super::budget::{Watched, find_watched, is_parameter};
use super::modes::{is_gradients_only, no_grad, packs_saved_tensors};
use super::node::Saved;
use crate::device::capture::is_capturing;
use crate::storage::{MemoryMode, memory_mode, with_memory_mode};
use crate::sync::lock;
use crate::tensor::Layout;
use crate::{DType, Result, Tensor};

/// Maximum number of operations in a row whose results a recipe computes.
const MAX_OPERATIONS: usize = 4;

/// Number of floating-point operations of a product that take as long as reading a byte.
const FLOPS_PER_BYTE: u64 = 128;

/// The results of a launch.
pub(crate) type Results = SmallVec<[Tensor; 2]>;

type Compute = dyn Fn(&[&Tensor]) -> Result<Results> + Send + Sync;

/// How to compute a tensor again.
pub(super) struct Recipe {
    launch: Arc<Launch>,
    /// The index of the tensor among the results of the launch.
    pub(super) index: usize,
    layout: Layout,
    /// The version of the tensor's storage. After an in-place change the recipe is out of date.
    version: u64,
    operations: usize,
    /// The bytes that the operations read and write.
    pub(super) traffic: u64,
    /// An upper bound on the bytes of intermediate results.
    pub(super) temporary: u64,
}

/// The last operation of a recipe.
struct Launch {
    compute: Box<Compute>,
    sources: SmallVec<[Source; 3]>,
    memory_mode: MemoryMode,
    /// The dropped storages of the results.
    dropped: Mutex<SmallVec<[Weak<Watched>; 2]>>,
}

/// An operand of a recipe.
enum Source {
    Parameter(Saved),
    Saved(Weak<Watched>, Layout, DType),
    Computed(Arc<Recipe>, Layout, DType),
}

/// Notes that `compute(inputs)` gave `out`, a new tensor, if a step is recorded or runs in a budget. `compute` must launch the same kernels
/// again, unrecorded.
#[inline]
pub(crate) fn note_recipe<F>(out: &Tensor, inputs: &[&Tensor], compute: impl FnOnce() -> F)
where
    F: Fn(&[&Tensor]) -> Result<Tensor> + Send + Sync + 'static,
{
    note_recipes(&[out], inputs, 0, || {
        let compute = compute();
        move |inputs: &[&Tensor]| compute(inputs).map(|out| SmallVec::from_iter([out]))
    });
}

/// Like [`note_recipe`], for a launch with several results that takes `flops` floating-point operations.
#[inline]
pub(crate) fn note_recipes<F>(outs: &[&Tensor], inputs: &[&Tensor], flops: usize, compute: impl FnOnce() -> F)
where
    F: Fn(&[&Tensor]) -> Result<Results> + Send + Sync + 'static,
{
    if packs_saved_tensors() && !is_gradients_only() {
        note(outs, inputs, flops, Box::new(compute()));
    }
}

#[cold]
fn note(outs: &[&Tensor], inputs: &[&Tensor], flops: usize, compute: Box<Compute>) {
    let sources: Option<SmallVec<[Source; 3]>> = inputs.iter().map(|t| Source::of(t)).collect();
    let Some(sources) = sources.filter(|_| !is_capturing(outs[0].device())) else { return };
    let bytes = |t: &Tensor| (t.numel() * t.dtype.size()) as u64;
    let (mut operations, mut temporary) = (1, 0);
    let mut traffic = outs.iter().chain(inputs).map(|t| bytes(t)).sum::<u64>() + flops as u64 / FLOPS_PER_BYTE;
    for (source, input) in sources.iter().zip(inputs) {
        let Source::Computed(recipe, ..) = source else { continue };
        operations = operations.max(1 + recipe.operations);
        (traffic, temporary) = (traffic + recipe.traffic, temporary + recipe.temporary + bytes(input));
    }
    if operations > MAX_OPERATIONS {
        return;
    }
    let dropped = Mutex::new(SmallVec::from_elem(Weak::new(), outs.len()));
    let launch = Arc::new(Launch { compute, sources, memory_mode: memory_mode(), dropped });
    for (index, out) in outs.iter().enumerate() {
        let (launch, layout, version) = (Arc::clone(&launch), out.layout.clone(), out.storage.version());
        let temporary = temporary + outs.iter().map(|t| bytes(t)).sum::<u64>() - bytes(out);
        out.storage.set_recipe(Arc::new(Recipe { launch, index, layout, version, operations, traffic, temporary }));
    }
}

impl Source {
    /// Returns the operand `t`. None if backward does not keep `t`, and `t` has no recipe.
    fn of(t: &Tensor) -> Option<Source> {
        if is_parameter(t) {
            return Some(Source::Parameter(Saved::without_hooks(t)));
        }
        let (layout, dtype) = (t.layout.clone(), t.dtype);
        match find_watched(t) {
            Some(watched) => Some(Source::Saved(Arc::downgrade(&watched), layout, dtype)),
            None => Some(Source::Computed(Recipe::of(t)?, layout, dtype)),
        }
    }

    fn get(&self) -> Result<Tensor> {
        let (storage, layout, dtype) = match self {
            Source::Parameter(saved) => return saved.unpack("memory_budget"),
            Source::Saved(watched, layout, dtype) => {
                let Some(watched) = watched.upgrade() else {
                    no_gradient!("memory_budget", "a saved tensor is gone that a dropped tensor is computed from");
                };
                (watched.tensor()?.storage, layout, dtype)
            }
            Source::Computed(recipe, layout, dtype) => (recipe.run()?.swap_remove(recipe.index).storage, layout, dtype),
        };
        Ok(Tensor::new(storage, layout.clone(), *dtype))
    }
}

impl Recipe {
    /// Returns the recipe of the elements that `t` has now.
    pub(super) fn of(t: &Tensor) -> Option<Arc<Recipe>> {
        t.storage.recipe::<Recipe>().filter(|recipe| recipe.version == t.storage.version())
    }

    /// Adds the saved tensors that the recipe reads to `all`. Returns None if one of them is gone.
    pub(super) fn reads(&self, all: &mut Vec<Arc<Watched>>) -> Option<()> {
        self.launch.sources.iter().try_for_each(|source| match source {
            Source::Parameter(_) => Some(()),
            Source::Saved(watched, ..) => watched.upgrade().map(|watched| all.push(watched)),
            Source::Computed(recipe, ..) => recipe.reads(all),
        })
    }

    /// Sets the storage to fill in when another result of the launch is computed.
    pub(super) fn set_dropped(&self, watched: &Arc<Watched>) {
        lock(&self.launch.dropped)[self.index] = Arc::downgrade(watched);
    }

    /// Returns the dropped storages of the launch's results.
    pub(super) fn dropped(&self) -> SmallVec<[Weak<Watched>; 2]> {
        lock(&self.launch.dropped).clone()
    }

    /// Computes the results of the launch. Fails if an operand was changed in place after the forward pass.
    pub(super) fn run(&self) -> Result<Results> {
        let Launch { compute, sources, memory_mode, .. } = &*self.launch;
        let inputs = sources.iter().map(Source::get).collect::<Result<SmallVec<[Tensor; 3]>>>()?;
        let inputs: SmallVec<[&Tensor; 3]> = inputs.iter().collect();
        let made = no_grad(|| with_memory_mode(*memory_mode, || compute(&inputs)))?;
        no_gradient!("memory_budget" if made[self.index].layout != self.layout,
            "a dropped tensor was computed again in another layout");
        Ok(made)
    }
}

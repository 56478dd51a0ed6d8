//! Flat buffers that hold all parameters of an optimiser, all gradients, and the optimiser's state.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use smallvec::SmallVec;

use crate::internal::{same_device, same_dtype};
use crate::storage::{Role, Storage};
use crate::{DType, Device, Graph, MemoryFormat, Result, Shape, Tensor, no_grad};

/// The parameters of a group and their gradients. The parameters are moved into one flat buffer and the gradients into a second.
/// A parameter is not moved if its storage has other handles (another optimiser, a state dict, a tied layer), so that they see the updates.
pub(super) struct FlatParameters {
    dtype: DType,
    pub(super) device: Device,
    parameters: Vec<Parameter>,
    /// f32 master copies of half-precision parameters. Steps update the master, because small updates would be lost in half precision.
    pub(super) master: Option<Tensor>,
    /// The distinct storages of the parameters, if there is a master. Their versions tell whether the master is stale.
    buffers: SmallVec<[Storage; 1]>,
    /// The [`FlatParameters::version`] of the parameters at which `master` was up to date.
    version: AtomicU64,
}

/// A parameter and its position in the flat buffers.
struct Parameter {
    leaf: Tensor,
    /// The tensor into which backward writes the gradient.
    slot: Tensor,
    /// The parameter's range in the flat buffers of the optimiser's state.
    elements: Range<usize>,
    /// Whether this parameter directly follows the previous one in memory, and so does its gradient.
    is_adjacent: bool,
}

impl Parameter {
    /// True if the parameter and its gradient are dense in the same memory format. Its state then has this memory format too.
    fn is_flat(&self) -> bool {
        let format = self.leaf.memory_format();
        self.leaf.is_contiguous_in(format) && self.slot.is_contiguous_in(format)
    }

    /// Returns the memory format of the parameter's range in flat state buffers.
    fn format(&self) -> MemoryFormat {
        if self.is_flat() { self.leaf.memory_format() } else { MemoryFormat::Contiguous }
    }
}

/// Consecutive parameters that one launch updates.
#[derive(Clone, PartialEq)]
pub(super) struct Run {
    pub(super) parameters: Range<usize>,
    /// The parameters' range in the flat buffers of the optimiser's state.
    elements: Range<usize>,
}

/// The tensors that a launch reads and writes, besides the optimiser's state.
pub(super) struct StepTensors {
    /// The weights to update: the f32 master for half-precision parameters.
    pub(super) weights: Tensor,
    pub(super) grads: Tensor,
    /// The half-precision parameters, which get the rounded weights.
    pub(super) rounded: Option<Tensor>,
}

/// A flat buffer from which parts are taken one after another, from the beginning.
struct FlatBuffer {
    buffer: Tensor,
    used: usize,
}

impl FlatBuffer {
    /// Creates a buffer that is large enough for the parameters for whose index `wanted` is true.
    fn new(
        parameters: &[&mut Tensor],
        wanted: impl Fn(usize) -> bool,
        dtype: DType,
        device: Device,
    ) -> Result<FlatBuffer> {
        let sizes = parameters.iter().enumerate().filter(|(i, _)| wanted(*i)).map(|(_, p)| p.numel());
        Ok(FlatBuffer { buffer: Tensor::zeros(sizes.fold(0, usize::saturating_add), (dtype, device))?, used: 0 })
    }

    /// Takes the next part of the buffer, with the shape and memory format of `like`.
    fn take(&mut self, like: &Tensor) -> Result<Tensor> {
        let part = self.buffer.narrow(0, self.used, like.numel())?;
        self.used += like.numel();
        view_in_format(&part, like.shape(), like.memory_format())
    }
}

/// Returns a view of a one-dimensional tensor with this shape and memory format.
fn view_in_format(flat: &Tensor, shape: &Shape, format: MemoryFormat) -> Result<Tensor> {
    if format == MemoryFormat::Contiguous {
        return flat.view(shape);
    }
    let (dims, last) = (shape.dims(), shape.rank() as isize - 1);
    let in_memory: Shape = [dims[0]].iter().chain(&dims[2..]).chain([&dims[1]]).copied().collect();
    let order: SmallVec<[isize; 5]> = [0, last].into_iter().chain(1..last).collect();
    flat.view(in_memory)?.permute(&order)
}

/// Returns a one-dimensional view of `n` elements of `t`'s storage, from element `offset` of the storage on.
fn flat_view(t: &Tensor, offset: usize, n: usize) -> Result<Tensor> {
    t.detach().as_strided(n, &[1], offset)
}

/// True if the elements are adjacent in memory in some memory format.
pub(super) fn is_dense(t: &Tensor) -> bool {
    t.is_contiguous_in(t.memory_format())
}

/// True if both tensors are dense and `next` begins directly after the end of `t` in memory.
fn are_adjacent(t: &Tensor, next: &Tensor) -> bool {
    is_dense(t)
        && is_dense(next)
        && t.shares_storage(next)
        && t.dtype() == next.dtype()
        && t.offset() + t.numel() == next.offset()
}

/// Returns views that cover all tensors. Adjacent dense tensors of one storage for which `is_flat` is true are joined to one flat view.
pub(crate) fn join_adjacent_views(
    tensors: impl IntoIterator<Item = Tensor>,
    is_flat: impl Fn(&Tensor) -> bool,
) -> Result<Vec<Tensor>> {
    let mut views: Vec<Tensor> = Vec::new();
    for t in tensors.into_iter().filter(|t| t.numel() > 0) {
        if !is_flat(&t) {
            views.push(t);
            continue;
        }
        match views.last_mut() {
            Some(view) if are_adjacent(view, &t) => *view = flat_view(view, view.offset(), view.numel() + t.numel())?,
            _ => views.push(flat_view(&t, t.offset(), t.numel())?),
        }
    }
    Ok(views)
}

/// Replaces each leaf that was replaced by a conversion of its module ([`Tensor::successor`]) by the new leaf.
pub(super) fn follow_conversions(parameters: &mut [&mut Tensor]) {
    parameters.iter_mut().for_each(|p| p.successor().into_iter().for_each(|new| **p = new));
}

/// True if two tensors of the same shape view the same elements of the same storage.
pub(crate) fn is_same_view(a: &Tensor, b: &Tensor) -> bool {
    a.shares_storage(b) && a.offset() == b.offset() && a.strides() == b.strides()
}

impl FlatParameters {
    /// Moves `parameters` into flat buffers. They are leaves that require a gradient, all of the same float dtype and on the same device.
    pub(super) fn new(op: &'static str, mut parameters: Vec<&mut Tensor>) -> Result<FlatParameters> {
        follow_conversions(&mut parameters);
        let Some(first) = parameters.first() else { invalid!(op, "there are no parameters") };
        let (dtype, device) = (first.dtype(), first.device());
        for p in &parameters {
            no_gradient!(op if p.leaf_id().is_none(),
                "a parameter of shape {} is not a leaf that requires a gradient", p.shape());
            same_dtype(op, &[&**first, &**p])?;
            same_device(op, &[&**first, &**p])?;
        }
        for (i, p) in parameters.iter().enumerate().filter(|(_, p)| p.numel() > 0) {
            let is_given = |q: &&mut Tensor| q.numel() > 0 && q.shares_storage(p) && q.offset() == p.offset();
            invalid!(op if parameters[..i].iter().any(is_given),
                "a parameter of shape {} is given twice: give a tied parameter once", p.shape());
        }
        let slots: Vec<Option<Tensor>> = parameters.iter().map(|p| p.grad_slot()).collect();
        let moves =
            |i: usize| slots[i].is_none() && (parameters[i].numel() == 0 || parameters[i].storage().is_unique());
        let moves: Vec<bool> = (0..parameters.len()).map(moves).collect();
        let mut values = FlatBuffer::new(&parameters, |i| moves[i], dtype, device)?;
        let mut grads = FlatBuffer::new(&parameters, |i| slots[i].is_none(), dtype, device)?;
        values.buffer.storage().set_role(Role::Parameter);
        grads.buffer.storage().set_role(Role::Gradient);
        // All operations that can fail come first, so that after an error the model still has its old parameters.
        let mut made: Vec<Parameter> = Vec::with_capacity(parameters.len());
        for ((p, slot), &moves) in parameters.iter().zip(slots).zip(&moves) {
            let leaf = match moves {
                true => {
                    let view = values.take(p)?;
                    no_grad(|| view.copy_(p))?;
                    p.with_data(view)?
                }
                false => p.shallow_clone(),
            };
            let slot = slot.map_or_else(|| grads.take(p), Ok)?;
            let before = made.last();
            let start = before.map_or(0, |before| before.elements.end);
            let adjacent = |b: &Parameter| are_adjacent(&b.leaf, &leaf) && are_adjacent(&b.slot, &slot) && b.is_flat();
            let is_adjacent = before.is_some_and(adjacent);
            let mut own = Parameter { leaf, slot, elements: start..start + p.numel(), is_adjacent };
            own.is_adjacent &= own.is_flat();
            made.push(own);
        }
        let mut flat = FlatParameters {
            dtype,
            device,
            parameters: made,
            master: None,
            buffers: SmallVec::new(),
            version: AtomicU64::new(0),
        };
        if dtype.size() < 4 {
            for p in &flat.parameters {
                if !flat.buffers.iter().any(|buffer| buffer.ptr_eq(p.leaf.storage())) {
                    flat.buffers.push(p.leaf.storage().clone());
                }
            }
            let master = flat.master.insert(Tensor::empty(flat.numel(), (DType::F32, device))?);
            master.storage().set_role(Role::OptimizerState);
            flat.refresh_master()?;
            flat.note_update();
        }
        for ((p, made), moved) in parameters.into_iter().zip(&flat.parameters).zip(moves) {
            made.leaf.set_grad_slot(made.slot.shallow_clone())?;
            if moved {
                *p = made.leaf.shallow_clone();
            }
        }
        Ok(flat)
    }

    pub(super) fn count(&self) -> usize {
        self.parameters.len()
    }

    pub(super) fn parameters(&self) -> impl Iterator<Item = &Tensor> {
        self.parameters.iter().map(|p| &p.leaf)
    }

    fn numel(&self) -> usize {
        self.parameters.last().map_or(0, |p| p.elements.end)
    }

    /// Creates a flat buffer for one state of the optimiser, with all elements equal to `start`.
    pub(super) fn state(&self, start: f64) -> Result<Tensor> {
        let state = Tensor::full(self.numel(), start, (self.state_dtype(), self.device))?;
        state.storage().set_role(Role::OptimizerState);
        Ok(state)
    }

    /// Returns the dtype of the state and of a step's computations: f32 for half-precision parameters.
    pub(super) fn state_dtype(&self) -> DType {
        self.master.as_ref().map_or(self.dtype, Tensor::dtype)
    }

    /// Returns the part of a flat state buffer that belongs to parameter `i`, as a view with the parameter's shape.
    pub(super) fn parameter_state(&self, flat: &Tensor, i: usize) -> Result<Tensor> {
        let parameter @ Parameter { leaf, elements, .. } = &self.parameters[i];
        view_in_format(&flat.detach().narrow(0, elements.start, elements.len())?, leaf.shape(), parameter.format())
    }

    /// Converts a flat state buffer of `other` (the parameters before a module conversion) to the dtype, device and formats of `self`.
    pub(super) fn convert_state(&self, other: &FlatParameters, state: &Tensor) -> Result<Tensor> {
        let converted = state.to(self.state_dtype(), self.device)?;
        let format = |p: &Parameter| p.format();
        if self.parameters.iter().map(format).eq(other.parameters.iter().map(format)) {
            return Ok(converted);
        }
        let made = converted.empty_like()?;
        for i in 0..self.count() {
            self.parameter_state(&made, i)?.copy_(&other.parameter_state(&converted, i)?)?;
        }
        Ok(made)
    }

    /// Returns a number that every in-place change of a parameter raises.
    fn version(&self) -> u64 {
        self.buffers.iter().map(Storage::version).sum()
    }

    fn is_stale(&self) -> bool {
        self.version() != self.version.load(Relaxed)
    }

    /// Copies the parameters to the master if they were changed since the last step.
    pub(super) fn refresh(&self) -> Result<()> {
        if self.is_stale() {
            self.refresh_master()?;
            self.note_update();
        }
        Ok(())
    }

    /// Copies the parameters to the master.
    fn refresh_master(&self) -> Result<()> {
        let Some(master) = &self.master else { return Ok(()) };
        for run in self.parameters.chunk_by(|_, next| next.is_adjacent) {
            let first = &run[0];
            let elements = first.elements.start..run.last().map_or(0, |p| p.elements.end);
            let of = |t: &Tensor, offset| flat_view(t, offset, elements.len());
            let source = if first.is_flat() {
                of(&first.leaf, first.leaf.offset())?
            } else {
                first.leaf.detach().contiguous()?.flatten(0, -1)?
            };
            of(master, elements.start)?.copy_(&source.to_dtype(DType::F32)?)?;
        }
        Ok(())
    }

    /// Copies master weights from `other` (the parameters before a module conversion) wherever they round to the current parameters.
    pub(super) fn adopt_master(&self, other: &FlatParameters) -> Result<()> {
        let (Some(own), Some(others)) = (&self.master, &other.master) else { return Ok(()) };
        let others = self.convert_state(other, others)?;
        let is_same = others.to_dtype(self.dtype)?.to_dtype(own.dtype())?.eq(own)?;
        own.copy_(&is_same.where_cond(&others, own)?).map(drop)
    }

    /// Splits the parameters that have a gradient into runs that one launch can update, as long as possible: a single run if all parameters
    /// have gradients. `same_step(i - 1, i)` is true if both parameters need the same numbers. Returns `None` if the module was converted.
    pub(super) fn runs(&self, same_step: impl Fn(usize, usize) -> bool) -> Result<Option<SmallVec<[Run; 1]>>> {
        let mut runs: SmallVec<[Run; 1]> = SmallVec::new();
        for (i, p) in self.parameters.iter().enumerate() {
            match p.leaf.grad().filter(|_| p.leaf.requires_grad()) {
                Some(grad) if is_same_view(&grad, &p.slot) => {}
                _ if p.leaf.successor().is_some() => return Ok(None),
                Some(grad) => _ = p.slot.copy_(&grad)?,
                None => continue,
            }
            match runs.last_mut() {
                Some(run) if run.parameters.end == i && p.is_adjacent && same_step(i - 1, i) => {
                    run.parameters.end = i + 1;
                    run.elements.end = p.elements.end;
                }
                _ => runs.push(Run { parameters: i..i + 1, elements: p.elements.clone() }),
            }
        }
        Ok(Some(runs))
    }

    /// Returns the run's elements of `t`, of which the first is at `offset`: as a flat view, or in the parameter's shape if it is not flat.
    fn slice(&self, run: &Run, t: &Tensor, offset: usize) -> Result<Tensor> {
        let first = &self.parameters[run.parameters.start];
        let flat = flat_view(t, offset, run.elements.len())?;
        if first.is_flat() { Ok(flat) } else { flat.view(first.leaf.shape()) }
    }

    /// Returns the part of a flat state buffer that belongs to a run.
    pub(super) fn state_slice(&self, run: &Run, state: &Tensor) -> Result<Tensor> {
        self.slice(run, state, run.elements.start)
    }

    /// Returns the tensors that a run's launch reads and writes, besides the optimiser's state.
    pub(super) fn step_tensors(&self, run: &Run) -> Result<StepTensors> {
        let first @ Parameter { leaf, slot, .. } = &self.parameters[run.parameters.start];
        let (weights, grads) = match first.is_flat() {
            true => (self.slice(run, leaf, leaf.offset())?, self.slice(run, slot, slot.offset())?),
            false => (leaf.detach(), slot.detach()),
        };
        Ok(match &self.master {
            Some(master) => StepTensors { weights: self.state_slice(run, master)?, grads, rounded: Some(weights) },
            None => StepTensors { weights, grads, rounded: None },
        })
    }

    /// Marks the master as up to date with the parameters, after a step.
    pub(super) fn note_update(&self) {
        self.version.store(self.version(), Relaxed);
    }
}

/// A step that a graph has captured. Parameters count as changed from the capture on, although no command has run yet.
pub(super) struct CapturedStep {
    pub(super) flat: Arc<FlatParameters>,
    /// The version to restore if the capture fails.
    before: u64,
    was_stale: bool,
}

impl CapturedStep {
    /// Notes the current version. Call this function before the commands to capture are enqueued.
    pub(super) fn new(flat: &Arc<FlatParameters>) -> CapturedStep {
        let (before, was_stale) = (flat.version.load(Relaxed), flat.is_stale());
        CapturedStep { flat: Arc::clone(flat), before, was_stale }
    }

    /// Marks the master as up to date once the commands are captured, unless it was stale before the capture.
    pub(super) fn captured(&self) {
        if !self.was_stale {
            self.flat.note_update();
        }
    }
}

impl Drop for CapturedStep {
    /// Restores the version if the capture is still active: a step dropped during its capture has failed.
    fn drop(&mut self) {
        if Graph::is_capturing(self.flat.device) {
            self.flat.version.store(self.before, Relaxed);
        }
    }
}

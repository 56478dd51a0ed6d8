//! Optimisers whose state is sharded among the ranks (ZeRO, stage 1: Rajbhandari et al., "ZeRO: Memory Optimizations Toward
//! Training Trillion Parameter Models").
//!
//! The parameters of a bucket of [`DataParallel`] are views of one buffer, and their gradients are views of another. Each rank owns
//! an equal part of both buffers. `reduce_scatter` gives each rank the mean of its part of the gradients, the rank's optimiser updates
//! its part of the parameters, and `all_gather` sends the new parameters to all ranks. Together this sends as many bytes as `all_reduce`.

use std::sync::Arc;

use super::checkpoint::ShardRange;
use super::data_parallel::Reducer;
use super::{DataParallel, Group, ReduceOp, Work};
use crate::io::{StateDict, Stateful};
use crate::nn::Module;
use crate::optim::{Optimizer, clip_grads_with_norm_, get_total_norm, is_same_view};
use crate::{DType, Device, Error, Result, Shape, Tensor, no_grad};

const OP: &str = "ZeroRedundancyOptimizer";

/// An optimiser whose state is sharded among the ranks (ZeRO, stage 1; PyTorch's `ZeroRedundancyOptimizer`). Each rank updates
/// `1 / group.size()` of the parameters' elements and stores the state of these elements, including f32 master weights of f16 and bf16.
/// Updates and bytes sent are the same as with an unsharded optimiser on every rank. Sending overlaps backward.
///
/// Any elementwise optimiser can be sharded. It gets this rank's parts of the parameters: tensors with as many dims as the
/// parameter and shape `[1, .., 1, n]`, where `n` may be 0.
///
/// ```
/// use claystone::distributed::{DataParallel, Group, ZeroRedundancyOptimizer};
/// use claystone::nn::{Linear, Module};
/// use claystone::optim::{AdamW, AdamWConfig, Optimizer};
/// use claystone::{Device, Tensor};
/// std::thread::scope(|scope| {
///     for group in Group::threads(&[Device::Cpu, Device::Cpu])? {
///         scope.spawn(move || -> claystone::Result<()> {
///             let mut model = DataParallel::new(Linear::new(3, 1, group.device())?, &group, Default::default())?;
///             let mut adamw = ZeroRedundancyOptimizer::new(&mut model, |parameters| {
///                 AdamW::grouped(parameters, |_name, p| {
///                     AdamWConfig { weight_decay: if p.rank() < 2 { 0.0 } else { 0.01 }, ..Default::default() }
///                 })
///             })?;
///             let x = Tensor::randn([4, 3], group.device())?; // a share of the batch
///             adamw.zero_grad();
///             model.forward(&x)?.square()?.mean((), false)?.backward()?;
///             adamw.clip_grad_norm_(1.0, 2.0)?;
///             adamw.step()
///         });
///     }
///     Ok::<(), claystone::Error>(())
/// })?;
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// After a synchronised backward, [`Tensor::grad`] of the model's parameters is `None`, because each rank has only its part of the
/// gradients. [`clip_grad_norm_`](Self::clip_grad_norm_) clips by the norm of all ranks' parts. [`GradScaler`](crate::optim::GradScaler)
/// and schedules work as with other optimisers. Inside [`DataParallel::no_sync`] each rank accumulates full gradients, until the
/// next backward outside `no_sync`.
///
/// The state dict has this rank's part only. [`save_checkpoint`](super::save_checkpoint) saves all parts as one unsharded state,
/// [`save_sharded_checkpoint`](super::save_sharded_checkpoint) saves each rank's part in a file of its own, and
/// [`load_checkpoint`](super::load_checkpoint) reads both, on any number of ranks.
pub struct ZeroRedundancyOptimizer<O> {
    inner: O,
    shards: Arc<Shards>,
    /// For each parameter of `inner`, the range of elements that it has of a parameter of the model.
    pieces: Vec<ShardRange>,
    /// For each bucket, the [`Shard::version`] at which the parameters were last copied to this rank's part.
    versions: Vec<u64>,
}

/// The shards of all buckets of a model.
pub(super) struct Shards {
    group: Group,
    buckets: Vec<Shard>,
}

/// The parameters of one bucket, and this rank's part of them.
struct Shard {
    /// The indices of the bucket's parameters in the model, in ascending order.
    indices: Vec<usize>,
    parameters: Vec<Tensor>,
    /// The values and gradients of all parameters of the bucket.
    values: FlatViews,
    gradients: FlatViews,
    /// This rank's part of the values. It has its own storage: `all_gather` writes to the storage of `values`, which would count as a change
    /// of the weights, and the f32 master weights would be replaced by rounded weights.
    own_values: Tensor,
    own_gradients: Tensor,
    /// For each parameter, this rank's elements as a leaf: its values are in `own_values`, and its gradient is in `own_gradients`.
    leaves: Vec<Tensor>,
    slots: Vec<Tensor>,
    pieces: Vec<ShardRange>,
}

/// A flat buffer, and one view of it for each parameter, in order.
struct FlatViews {
    buffer: Tensor,
    views: Vec<Tensor>,
}

impl FlatViews {
    fn new(parameters: &[&Tensor], elements: usize) -> Result<FlatViews> {
        let buffer = Tensor::zeros(elements, (parameters[0].dtype(), parameters[0].device()))?;
        let mut start = 0;
        let view = |p: &&Tensor| {
            start += p.numel();
            buffer.narrow(0, start - p.numel(), p.numel())?.view(p.shape())
        };
        let views = parameters.iter().map(view).collect::<Result<_>>()?;
        Ok(FlatViews { buffer, views })
    }
}

impl Shard {
    /// Copies the values of the parameters. Only [`move_into_buffer`](Self::move_into_buffer) changes the parameters themselves.
    fn new(group: &Group, indices: Vec<usize>, parameters: &[&Tensor]) -> Result<Shard> {
        let elements: usize = parameters.iter().map(|p| p.numel()).sum();
        let share = elements.div_ceil(group.size());
        let values = FlatViews::new(parameters, share * group.size())?;
        let gradients = FlatViews::new(parameters, share * group.size())?;
        values.views.iter().zip(parameters).try_for_each(|(view, p)| view.copy_(p).map(|_| ()))?;
        let own = group.rank() * share;
        let own_values = values.buffer.narrow(0, own, share)?.try_clone()?;
        let own_gradients = Tensor::zeros(share, &own_values)?;
        let (mut leaves, mut slots, mut pieces, mut start) = (Vec::new(), Vec::new(), Vec::new(), 0);
        for p in parameters {
            // The range is clamped to this rank's part. It is empty if the part has no element of the parameter.
            let at = |element: usize| (start + element).clamp(own, own + share);
            let (from, to) = (at(0), at(p.numel()));
            let shape: Shape = (1..p.rank()).map(|_| 1).chain([to - from]).collect();
            let part = |flat: &Tensor| flat.detach().narrow(0, from - own, to - from)?.view(&shape);
            let leaf = part(&own_values)?.requires_grad_(true)?;
            let slot = part(&own_gradients)?;
            leaf.set_grad_slot(slot.shallow_clone())?;
            leaves.push(leaf);
            slots.push(slot);
            let elements = if from == to { 0..0 } else { from - start..to - start };
            pieces.push(ShardRange { elements, shape: p.shape().dims().to_vec() });
            start += p.numel();
        }
        let parameters = Vec::new();
        Ok(Shard { indices, parameters, values, gradients, own_values, own_gradients, leaves, slots, pieces })
    }

    /// Moves parameters into the buffer. A parameter that shares its storage with other tensors is not moved, so that they see every step.
    fn move_into_buffer(&mut self, parameters: Vec<&mut Tensor>) -> Result<()> {
        for ((p, view), slot) in parameters.into_iter().zip(&self.values.views).zip(&self.gradients.views) {
            if p.storage().is_unique() {
                *p = p.with_data(view.shallow_clone())?;
            }
            if p.grad_slot().is_none() {
                p.set_grad_slot(slot.shallow_clone())?;
            }
            self.parameters.push(p.shallow_clone());
        }
        Ok(())
    }

    /// Returns the parameters that were not moved, each with its view of the buffer.
    fn unmoved_parameters(&self) -> impl Iterator<Item = (&Tensor, &Tensor)> {
        self.parameters.iter().zip(&self.values.views).filter(|(p, view)| !is_same_view(p, view))
    }

    /// Returns a number that every in-place change of a parameter raises.
    fn version(&self) -> u64 {
        self.parameters.iter().map(|p| p.storage().version()).sum()
    }

    /// Copies the parameters' values to this rank's part.
    fn refresh(&self, rank: usize) -> Result<()> {
        self.unmoved_parameters().try_for_each(|(p, view)| view.copy_(p).map(|_| ()))?;
        let share = self.own_values.numel();
        self.own_values.copy_(&self.values.buffer.narrow(0, rank * share, share)?).map(|_| ())
    }
}

impl Shards {
    /// Starts to reduce the gradients of a bucket, given in the bucket's order. The result is the mean of this rank's part.
    pub fn send(&self, bucket: usize, gradients: &[Tensor], dtype: Option<DType>) -> Result<Work<Tensor>> {
        let all = &self.buckets[bucket].gradients;
        for (view, grad) in all.views.iter().zip(gradients.iter().rev()).filter(|(v, g)| !is_same_view(v, g)) {
            view.copy_(grad)?;
        }
        let to_send = dtype.map_or(Ok(all.buffer.shallow_clone()), |dtype| all.buffer.to_dtype(dtype))?;
        self.group.reduce_scatter_async(&to_send, ReduceOp::Mean)
    }

    /// Adds `mean`, this rank's part of a bucket, to the gradients accumulated so far. Parameters that no rank reached get no gradient.
    pub fn receive(&self, bucket: usize, mean: &Tensor, reached: &[bool]) -> Result<()> {
        let Shard { indices, parameters, own_gradients, leaves, slots, .. } = &self.buckets[bucket];
        match leaves.iter().all(|leaf| leaf.grad().is_none()) {
            true => own_gradients.copy_(mean)?,
            false => {
                let mut without = leaves.iter().zip(slots).filter(|(leaf, _)| leaf.grad().is_none());
                without.try_for_each(|(_, slot)| slot.fill_(0).map(|_| ()))?;
                own_gradients.add_(&mean.to_dtype(own_gradients.dtype())?)?
            }
        };
        for ((leaf, slot), _) in leaves.iter().zip(slots).zip(indices).filter(|(_, i)| reached[**i]) {
            leaf.set_grad(slot.shallow_clone())?;
        }
        parameters.iter().for_each(Tensor::zero_grad);
        Ok(())
    }
}

impl<O: Optimizer> ZeroRedundancyOptimizer<O> {
    /// Creates an optimiser for all parameters of a model that require a gradient. `make` gets this rank's parts of the parameters, with
    /// names, and returns an optimiser, for example `AdamW::grouped(parameters, |_, _| config)`. Must be called on all ranks. Fails with
    /// [`Error::Invalid`] for a model that was converted after [`DataParallel::new`] or already has a `ZeroRedundancyOptimizer`, with
    /// [`Error::OutOfMemory`], and with the errors of `make`.
    #[track_caller]
    pub fn new<M: Module>(
        model: &mut DataParallel<M>,
        make: impl FnOnce(Vec<(String, &mut Tensor)>) -> Result<O>,
    ) -> Result<ZeroRedundancyOptimizer<O>> {
        let DataParallel { module, reducer } = model;
        let Reducer { group, parameters: known, buckets, .. } = &**reducer;
        invalid!(OP if reducer.shards().is_some(),
            "the model already has such an optimiser: drop it first, or use one for all parameters");
        let named = module.named_parameters_mut("").into_iter().filter(|(_, p)| p.requires_grad());
        let (names, mut parameters): (Vec<String>, Vec<Option<&mut Tensor>>) =
            named.map(|(name, p)| (name, Some(p))).unzip();
        let ids = parameters.iter().flatten().map(|p| p.leaf_id());
        invalid!(OP if !ids.eq(known.iter().map(|(_, p)| p.leaf_id())),
            "the model's parameters have changed since DataParallel was made: convert the model before");
        // All operations that can fail come first, so that after an error the model still has its old parameters.
        let shard = |bucket: &Vec<usize>| {
            let indices: Vec<usize> = bucket.iter().rev().copied().collect();
            let of_bucket: Vec<&Tensor> = indices.iter().filter_map(|&i| parameters[i].as_deref()).collect();
            Shard::new(group, indices, &of_bucket)
        };
        let mut shards = no_grad(|| buckets.iter().map(shard).collect::<Result<Vec<_>>>())?;
        // Iterates in the order of the model's parameters: the first bucket has the last parameters, so buckets are reversed.
        let ascending = || shards.iter().rev();
        let mut leaves: Vec<Tensor> = ascending().flat_map(|s| &s.leaves).map(Tensor::shallow_clone).collect();
        let inner = make(names.into_iter().zip(&mut leaves).collect())?;
        let all: Vec<(&Tensor, &ShardRange)> = ascending().flat_map(|s| s.leaves.iter().zip(&s.pieces)).collect();
        let piece = |p: &&Tensor| {
            let own = all.iter().find(|(leaf, _)| leaf.leaf_id() == p.leaf_id() && is_same_view(leaf, p));
            let reason = "the optimiser has moved the parameters it was given, or has other parameters";
            own.map(|(_, piece)| (*piece).clone()).ok_or_else(|| Error::invalid(OP, reason))
        };
        let pieces = inner.parameters().iter().map(piece).collect::<Result<_>>()?;
        for shard in &mut shards {
            let of_bucket = shard.indices.iter().filter_map(|&i| parameters[i].take()).collect();
            shard.move_into_buffer(of_bucket)?;
        }
        let versions = shards.iter().map(Shard::version).collect();
        let shards = Arc::new(Shards { group: group.clone(), buckets: shards });
        reducer.set_shards(&shards);
        Ok(ZeroRedundancyOptimizer { inner, shards, pieces, versions })
    }

    /// Returns the optimiser that updates this rank's part.
    pub fn inner(&self) -> &O {
        &self.inner
    }

    /// Scales gradients so that their total norm over the parts of all ranks is at most `max_norm`, like
    /// [`optim::clip_grad_norm_`](crate::optim::clip_grad_norm_). Returns the norm before scaling as a scalar. Must be called on all ranks.
    /// Fails as [`optim::clip_grad_norm_`](crate::optim::clip_grad_norm_) and collectives do.
    pub fn clip_grad_norm_(&self, max_norm: f64, norm_type: f64) -> Result<Tensor> {
        let parts = self.inner.parameters();
        let own = get_total_norm(parts.iter().filter_map(|p| p.grad()), norm_type)?;
        let on_host = own.to_device(Device::HOST)?.to_dtype(DType::F64)?;
        let total = get_total_norm([self.shards.group.all_gather(&on_host)?], norm_type)?;
        let device = parts.first().map_or(self.shards.group.device(), |p| p.device());
        let total = total.to_dtype(own.dtype())?.to_device(device)?;
        clip_grads_with_norm_(parts, max_norm, &total)?;
        Ok(total)
    }

    /// Copies parameters to this rank's part if they were changed since the last step.
    fn refresh(&mut self) -> Result<()> {
        for (shard, version) in self.shards.buckets.iter().zip(&mut self.versions) {
            invalid!(OP if shard.parameters.iter().any(|p| p.successor().is_some()),
                "the model was converted: make DataParallel and this optimiser again from the converted model");
            if shard.version() != *version {
                shard.refresh(self.shards.group.rank())?;
                *version = shard.version();
            }
        }
        Ok(())
    }

    /// Returns the range of elements to which an entry of the inner optimiser's state belongs. `None` for other entries, such as `step`.
    fn piece(&self, name: &str, entry: &Tensor) -> Option<&ShardRange> {
        let i: usize = name.strip_prefix("state.")?.split('.').next()?.parse().ok()?;
        let shape = self.inner.parameters().get(i)?.shape().clone();
        self.pieces.get(i).filter(|_| *entry.shape() == shape)
    }
}

impl<O: Optimizer> Optimizer for ZeroRedundancyOptimizer<O> {
    /// Updates the parameters. Must be called on all ranks.
    #[track_caller]
    fn step_scaled(&mut self, factor: f64) -> Result<()> {
        no_grad(|| {
            self.refresh()?;
            self.inner.step_scaled(factor)?;
            let gather = |s: &Shard| self.shards.group.all_gather_into_async(&s.own_values, &s.values.buffer);
            let work = self.shards.buckets.iter().map(gather).collect::<Result<Vec<_>>>()?;
            for ((shard, version), work) in self.shards.buckets.iter().zip(&mut self.versions).zip(work) {
                work.wait()?;
                shard.unmoved_parameters().try_for_each(|(p, view)| p.copy_(view).map(|_| ()))?;
                *version = shard.version();
            }
            Ok(())
        })
    }

    fn zero_grad(&self) {
        self.inner.zero_grad();
        self.shards.buckets.iter().flat_map(|s| &s.parameters).for_each(Tensor::zero_grad);
    }

    /// Returns this rank's parts of the model's parameters.
    fn parameters(&self) -> Vec<&Tensor> {
        self.inner.parameters()
    }

    fn learning_rates(&self) -> Vec<f64> {
        self.inner.learning_rates()
    }

    fn set_learning_rates(&mut self, rates: &[f64]) -> Result<()> {
        self.inner.set_learning_rates(rates)
    }

    /// True if the gradients of all ranks are finite. Must be called on all ranks.
    fn gradients_are_finite(&self) -> Result<bool> {
        let own = u8::from(self.inner.gradients_are_finite()?);
        let all = Tensor::from_slice(&[own], 1, Device::HOST)?;
        self.shards.group.all_reduce(&all, ReduceOp::Min)?;
        Ok(all.item::<u8>()? == 1)
    }

    /// Returns this rank's part of the state: `state.3.exp_avg[0..5 of 4x3]` has the first 5 elements of an unsharded `state.3.exp_avg`.
    fn state_dict(&self) -> Result<StateDict> {
        let mut state = StateDict::new();
        for (name, entry) in self.inner.state_dict()? {
            match self.piece(&name, &entry) {
                Some(piece) if self.shards.group.size() == 1 => state.insert(name, entry.view(piece.shape.as_slice())?),
                Some(piece) if piece.elements.is_empty() => {}
                Some(piece) => state.insert(piece.name(&name), entry.view(entry.numel())?),
                None => state.insert(name, entry),
            }
        }
        Ok(state)
    }

    /// Loads this rank's part, either from the state of an unsharded optimiser or from a state that has exactly this part.
    fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        let mut own = StateDict::new();
        for (name, entry) in self.inner.state_dict()? {
            let loaded = match self.piece(&name, &entry) {
                Some(piece) => piece.slice_from(state, &name)?.map(|part| part.view(entry.shape())).transpose()?,
                None => state.get(&name).map(Tensor::shallow_clone),
            };
            let reason = || format!("the state lacks {name} of this optimiser, or has another rank's part of it");
            own.insert(name.clone(), loaded.ok_or_else(|| Error::invalid(OP, reason()))?);
        }
        invalid!(OP if let Some(name) = state.names().find(|name| own.get(ShardRange::tensor(name)).is_none()),
            "the state has {name}, which this optimiser lacks: make the same optimiser");
        // The refresh comes first: after the load, it would replace the loaded master weights by rounded weights.
        no_grad(|| self.refresh())?;
        self.inner.load_state_dict(&own)
    }
}

impl<O: Optimizer> Stateful for ZeroRedundancyOptimizer<O> {
    fn state_dict(&self) -> Result<StateDict> {
        Optimizer::state_dict(self)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        Optimizer::load_state_dict(self, state)
    }
}

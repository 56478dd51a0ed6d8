//! Data parallel training: every rank has a copy of the model and trains on a part of the batch.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use super::zero::Shards;
use super::{Group, ReduceOp, Work};
use crate::internal::lock;
use crate::nn::{Forward, Module, Role};
use crate::optim::join_adjacent_views;
use crate::sync::OnDrop;
use crate::{DType, Device, Result, Tensor, autograd, is_grad_enabled};

options! {
    /// Options of [`DataParallel`].
    #[derive(Debug, Clone)]
    pub struct DataParallelOptions {
        /// The maximum size of a bucket in bytes. 25 MiB by default, as in PyTorch. The gradients of a bucket are reduced in one
        /// collective, as soon as backward has computed all of them.
        pub bucket_bytes: usize = 25 << 20,
        /// Whether a backward pass may leave out some (not all) parameters of a rank. Gradients are then reduced only after
        /// backward, with one more small collective. If false, leaving out a parameter is an error that names the parameter.
        pub find_unused_parameters: bool = false,
        /// Whether each forward pass that records gradients first broadcasts rank 0's buffers, such as running statistics.
        pub broadcast_buffers: bool = true,
        /// The dtype in which gradients are sent. bf16 halves the bytes of f32 (PyTorch's `bf16_compress_hook`). `None`: their own dtype.
        pub gradient_dtype: Option<DType> = None,
    }
}

/// A module that is replicated on every rank and trained on that rank's part of the batch (PyTorch's `DistributedDataParallel`).
/// Backward leaves the mean of all ranks' gradients in [`Tensor::grad`], so that the optimisers of all ranks take the same steps.
///
/// [`new`](Self::new) broadcasts the parameters and buffers of rank 0. Gradients are reduced in buckets while backward runs; the last
/// layers' gradients come first. Parameters keep the names of the module, so both load the same checkpoints. With a
/// [`ZeroRedundancyOptimizer`](super::ZeroRedundancyOptimizer) each rank gets only its part of the mean gradients.
///
/// ```
/// use claystone::distributed::{DataParallel, Group};
/// use claystone::nn::{Linear, Module};
/// use claystone::optim::{Optimizer, Sgd, SgdConfig};
/// use claystone::{Device, Tensor};
/// let groups = Group::threads(&[Device::Cpu, Device::Cpu])?;
/// std::thread::scope(|scope| {
///     let ranks: Vec<_> = groups.into_iter().map(|group| scope.spawn(move || -> claystone::Result<f32> {
///         let mut model = DataParallel::new(Linear::new(3, 1, group.device())?, &group, Default::default())?;
///         let mut sgd = Sgd::new(model.parameters_mut(), SgdConfig::default())?;
///         let x = Tensor::full([4, 3], group.rank() as f32, group.device())?; // a share of the batch
///         model.forward(&x)?.mean((), false)?.backward()?;
///         sgd.step()?;
///         model.module().weight().sum((), false)?.item()
///     })).collect();
///     let sums: Vec<f32> = ranks.into_iter().map(|rank| rank.join().unwrap().unwrap()).collect();
///     assert_eq!(sums[0], sums[1]);
/// });
/// # Ok::<(), claystone::Error>(())
/// ```
pub struct DataParallel<M> {
    pub(super) module: M,
    pub(super) reducer: Arc<Reducer>,
}

impl<M: Module> DataParallel<M> {
    /// Wraps a module. It must have the same structure on every rank, and all ranks must call this function. Fails with
    /// [`crate::Error::Invalid`] if no parameter requires a gradient, and as [`Group::broadcast`] does.
    pub fn new(module: M, group: &Group, options: DataParallelOptions) -> Result<DataParallel<M>> {
        let op = "DataParallel::new";
        let mut tensors = Vec::new();
        module.visit("", &mut |_, _, t| tensors.push(t.detach()));
        broadcast(group, &tensors, options.bucket_bytes)?;
        let parameters = module.named_parameters("").into_iter().filter(|(_, p)| p.requires_grad());
        let parameters: Vec<(String, Tensor)> =
            parameters.map(|(name, p)| Ok((name, placeholder_leaf(p)?))).collect::<Result<_>>()?;
        invalid!(op if parameters.is_empty(),
            "the module has no parameters that require a gradient: use it without DataParallel");
        let reducer = Arc::new(Reducer::new(group.clone(), options, parameters));
        for (i, (_, parameter)) in reducer.parameters.iter().enumerate() {
            let reducer = Arc::downgrade(&reducer);
            parameter.register_post_accumulate_grad_hook(move |grad| match Weak::upgrade(&reducer) {
                Some(reducer) => reducer.gradient_ready(i, grad),
                None => Ok(()),
            })?;
        }
        Ok(DataParallel { module, reducer })
    }

    /// Returns the wrapped module.
    pub fn module(&self) -> &M {
        &self.module
    }

    /// Returns the module without the wrapper. Its gradients are no longer reduced.
    pub fn into_module(self) -> M {
        self.module
    }

    /// Runs `f`. Backward passes inside accumulate gradients on this rank without reducing them. Use it for all backward passes before a
    /// step except the last (PyTorch's `no_sync`).
    pub fn no_sync<R>(&self, f: impl FnOnce() -> R) -> R {
        let before = self.reducer.syncs.swap(false, Relaxed);
        let _restore = OnDrop(|| self.reducer.syncs.store(before, Relaxed));
        f()
    }

    /// Broadcasts the buffers of rank 0. Called before a forward pass that records gradients.
    fn broadcast_buffers(&self) -> Result<()> {
        let Reducer { options, syncs, group, .. } = &*self.reducer;
        if !options.broadcast_buffers || !is_grad_enabled() || !syncs.load(Relaxed) {
            return Ok(());
        }
        let mut buffers = Vec::new();
        self.module.visit("", &mut |_, role, t| buffers.extend((role == Role::Buffer).then(|| t.detach())));
        broadcast(group, &buffers, options.bucket_bytes)
    }
}

impl<M: Module> Module for DataParallel<M> {
    crate::parts!(module as ""; reducer);

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.broadcast_buffers()?;
        self.module.forward(x)
    }
}

impl<Inputs, M: Forward<Inputs>> Forward<Inputs> for DataParallel<M> {
    type Output = M::Output;

    fn call(&self, inputs: Inputs) -> Result<M::Output> {
        self.broadcast_buffers()?;
        self.module.call(inputs)
    }
}

fn broadcast(group: &Group, tensors: &[Tensor], bucket_bytes: usize) -> Result<()> {
    let tensors: Vec<&Tensor> = tensors.iter().collect();
    let send = |bucket: Vec<usize>| {
        let together: Vec<&Tensor> = bucket.into_iter().map(|i| tensors[i]).collect();
        group.broadcast_coalesced_async(&together, 0)
    };
    let work = buckets(&tensors, bucket_bytes).into_iter().map(send).collect::<Result<Vec<_>>>()?;
    work.into_iter().try_for_each(Work::wait)
}

/// Divides tensors, from last to first, into buckets of one dtype and device. A bucket has at most `most` bytes, or a single tensor.
fn buckets(tensors: &[&Tensor], most: usize) -> Vec<Vec<usize>> {
    let mut buckets: Vec<Vec<usize>> = Vec::new();
    let mut bytes = 0; // the size of the last bucket
    for (i, t) in tensors.iter().enumerate().rev() {
        let size = t.numel() * t.dtype().size();
        let alike = |&j: &usize| (tensors[j].dtype(), tensors[j].device()) == (t.dtype(), t.device());
        match buckets.last_mut().filter(|bucket| bucket.iter().all(alike) && bytes + size <= most) {
            Some(bucket) => {
                bucket.push(i);
                bytes += size;
            }
            None => {
                buckets.push(vec![i]);
                bytes = size;
            }
        }
    }
    buckets
}

/// Returns a handle on a leaf that does not share the leaf's storage: an optimiser moves only parameters whose storage is not shared.
fn placeholder_leaf(p: &Tensor) -> Result<Tensor> {
    p.with_data(Tensor::zeros(1, (p.dtype(), p.device()))?.expand(p.shape())?)
}

/// Reduces gradients over the ranks while backward computes other gradients (PyTorch's `Reducer`).
pub(super) struct Reducer {
    pub group: Group,
    options: DataParallelOptions,
    /// The names of the parameters, and handles on their leaves that do [not share storage](placeholder_leaf).
    pub parameters: Vec<(String, Tensor)>,
    /// The indices of each bucket's parameters. Every rank reduces the buckets in this order: the last parameters come first.
    pub buckets: Vec<Vec<usize>>,
    /// Whether backward reduces gradients. False inside [`DataParallel::no_sync`].
    syncs: AtomicBool,
    pass: Mutex<BackwardPass>,
    /// The shards of the model's [`ZeroRedundancyOptimizer`](super::ZeroRedundancyOptimizer), if there is one.
    shards: Mutex<Weak<Shards>>,
}

/// The state of one backward pass.
#[derive(Default)]
struct BackwardPass {
    /// The gradients computed so far, by parameter.
    gradients: Vec<Option<Tensor>>,
    /// The collectives of the buckets that were sent so far, in order.
    sent: Vec<BucketWork>,
}

/// Clears the [`BackwardPass`] when a backward pass ends or fails, so that the next pass starts empty.
struct PassGuard(Arc<Reducer>);

impl Drop for PassGuard {
    fn drop(&mut self) {
        *self.0.pass() = BackwardPass::default();
    }
}

/// The collective that reduces a bucket of gradients.
enum BucketWork {
    /// All-reduce of the mean. `converted` has each gradient with its copy in the dtype in which gradients are sent.
    AllReduce { work: Work, converted: Vec<(Tensor, Tensor)> },
    /// Reduce-scatter of the mean, of which this rank gets its part.
    ReduceScatter(Work<Tensor>),
}

impl Reducer {
    fn new(group: Group, options: DataParallelOptions, parameters: Vec<(String, Tensor)>) -> Reducer {
        let tensors: Vec<&Tensor> = parameters.iter().map(|(_, p)| p).collect();
        let buckets = buckets(&tensors, options.bucket_bytes);
        let syncs = AtomicBool::new(true);
        Reducer { group, options, parameters, buckets, syncs, pass: Mutex::default(), shards: Mutex::default() }
    }

    fn pass(&self) -> MutexGuard<'_, BackwardPass> {
        lock(&self.pass)
    }

    /// Called by the hook of parameter `i` when its gradient is complete. Sends all buckets that are complete.
    fn gradient_ready(self: Arc<Self>, i: usize, grad: &Tensor) -> Result<()> {
        if !self.syncs.load(Relaxed) {
            return Ok(());
        }
        let begins = {
            let gradients = &mut self.pass().gradients;
            let begins = gradients.is_empty();
            gradients.resize_with(self.parameters.len(), || None);
            begins
        };
        if begins {
            let guard = PassGuard(Arc::clone(&self));
            autograd::queue_callback(move || guard.0.finish_pass())?;
        }
        let mut pass = self.pass();
        pass.gradients[i] = Some(grad.detach());
        match self.options.find_unused_parameters {
            // Buckets are sent at the end. A rank without some gradient would send them after the module's own collectives, unlike other ranks.
            true => Ok(()),
            false => self.send_complete(&mut pass),
        }
    }

    /// Makes later passes give each rank only its shard of the mean gradients.
    pub fn set_shards(&self, shards: &Arc<Shards>) {
        *lock(&self.shards) = Arc::downgrade(shards);
    }

    pub fn shards(&self) -> Option<Arc<Shards>> {
        lock(&self.shards).upgrade()
    }

    /// Sends the next buckets in order, up to the first incomplete one, so that all ranks send buckets in the same order.
    fn send_complete(&self, pass: &mut BackwardPass) -> Result<()> {
        while let Some(bucket) = self.buckets.get(pass.sent.len()) {
            let gradients: Option<Vec<Tensor>> =
                bucket.iter().map(|&i| Some(pass.gradients[i].as_ref()?.shallow_clone())).collect();
            let Some(gradients) = gradients else { break };
            let sent = self.send(pass.sent.len(), gradients)?;
            pass.sent.push(sent);
        }
        Ok(())
    }

    /// Converts a bucket's gradients to the gradient dtype of the options, and starts their all-reduce or reduce-scatter.
    fn send(&self, bucket: usize, gradients: Vec<Tensor>) -> Result<BucketWork> {
        let dtype = self.options.gradient_dtype.filter(|&dtype| dtype != gradients[0].dtype());
        if let Some(shards) = self.shards() {
            return Ok(BucketWork::ReduceScatter(shards.send(bucket, &gradients, dtype)?));
        }
        // Adjacent gradients in an optimiser's buffer are sent as one tensor if contiguous. Other memory formats may differ between ranks.
        let joined = join_adjacent_views(gradients.iter().rev().map(Tensor::shallow_clone), Tensor::is_contiguous)?;
        let gradients = if joined.is_empty() { gradients } else { joined }; // empty if no gradient has elements
        let to_send = match dtype {
            Some(dtype) => gradients.iter().map(|grad| grad.to_dtype(dtype)).collect::<Result<Vec<_>>>()?,
            None => gradients.iter().map(Tensor::shallow_clone).collect(),
        };
        let work = self.group.all_reduce_coalesced_async(&to_send.iter().collect::<Vec<_>>(), ReduceOp::Mean)?;
        let converted = if dtype.is_some() { gradients.into_iter().zip(to_send).collect() } else { Vec::new() };
        Ok(BucketWork::AllReduce { work, converted })
    }

    /// Ends the pass on this rank: sends the remaining buckets and waits for all collectives.
    fn finish_pass(&self) -> Result<()> {
        let mut pass = std::mem::take(&mut *self.pass());
        let missing: Vec<usize> = (0..self.parameters.len()).filter(|&i| pass.gradients[i].is_none()).collect();
        let names = || missing.iter().map(|&i| &*self.parameters[i].0).collect::<Vec<&str>>().join(", ");
        no_gradient!("DataParallel" if !missing.is_empty() && !self.options.find_unused_parameters,
            "backward has not reached {}, so the other ranks would wait for their gradients: set find_unused_parameters, or use \
             every parameter in the loss", names());
        let mut unreached = Vec::new();
        for i in missing {
            let parameter = &self.parameters[i].1;
            // If an earlier backward pass in `no_sync` has computed a gradient of this parameter, that gradient is reduced.
            pass.gradients[i] = Some(match parameter.grad() {
                Some(grad) => grad.detach(),
                None => {
                    unreached.push(i);
                    Tensor::zeros_like(parameter)?.detach()
                }
            });
        }
        self.send_complete(&mut pass)?;
        let reached = match self.options.find_unused_parameters {
            true => self.reached_by_any(&unreached)?,
            false => vec![true; self.parameters.len()],
        };
        for (bucket, sent) in pass.sent.into_iter().enumerate() {
            match sent {
                BucketWork::AllReduce { work, converted } => {
                    work.wait()?;
                    converted.iter().try_for_each(|(grad, reduced)| grad.copy_(reduced).map(|_| ()))?;
                }
                BucketWork::ReduceScatter(work) => {
                    let mean = work.wait()?;
                    // The optimiser may have been dropped after the bucket was sent; then nothing is stored.
                    self.shards().map_or(Ok(()), |shards| shards.receive(bucket, &mean, &reached))?;
                }
            }
        }
        if self.shards().is_some() {
            return Ok(());
        }
        // A parameter that only other ranks reached gets the mean gradient here too. A parameter that no rank reached gets no gradient.
        unreached.into_iter().filter(|&i| reached[i]).try_for_each(|i| {
            let gradient = pass.gradients[i].as_ref().expect("zeros, summed with the others'");
            self.parameters[i].1.set_grad(gradient.shallow_clone())
        })
    }

    /// Returns, for each parameter, whether any rank has its gradient. `unreached` are the parameters without a gradient on this rank.
    fn reached_by_any(&self, unreached: &[usize]) -> Result<Vec<bool>> {
        let reached: Vec<u8> = (0..self.parameters.len()).map(|i| u8::from(!unreached.contains(&i))).collect();
        let reached = Tensor::from_slice(&reached, reached.len(), Device::HOST)?;
        self.group.all_reduce(&reached, ReduceOp::Max)?;
        Ok(reached.to_vec::<u8>()?.into_iter().map(|any| any == 1).collect())
    }
}

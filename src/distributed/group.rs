//! Groups of ranks and their collectives.

use std::sync::Arc;
use std::time::Duration;

use super::collective::{self, Member, Membership};
use super::engine::{Engine, Work};
use super::reduce::ReduceOp;
use super::threads::Threads;
use super::transport::{Position, Transport, is_debug};
#[cfg(feature = "mpi")]
use crate::device::cpu::threads;
use crate::internal::{same_device, same_dtype};
use crate::{DType, Device, Result, Shape, Stream, Tensor, with_stream};

/// Ranks that make the same calls in the same order (PyTorch's `ProcessGroup`). Ranks are either the processes of a job under `mpirun`
/// ([`Group::world`], feature `mpi`), or threads of one process, one for each device ([`Group::threads`]).
///
/// ```
/// use claystone::distributed::{Group, ReduceOp};
/// use claystone::{Device, Tensor};
/// let groups = Group::threads(&[Device::Cpu, Device::Cpu])?;
/// std::thread::scope(|scope| {
///     for group in groups {
///         scope.spawn(move || {
///             let x = Tensor::full([2, 2], group.rank() as f32 + 1.0, group.device()).unwrap();
///             group.all_reduce(&x, ReduceOp::Sum).unwrap();
///             assert_eq!(x.to_vec::<f32>().unwrap(), [3.0; 4]);
///         });
///     }
/// });
/// # Ok::<(), claystone::Error>(())
/// ```
///
/// Tensors stay on their devices, but messages go through host memory. Each rank has one thread that runs collectives in the order of
/// the calls, including the calls of groups [split](Self::split) from this group. So all ranks must make the calls of all their groups
/// in the same order. Each collective has an asynchronous form that returns [`Work`]; do not write to its tensors before
/// [`Work::wait`]. Reductions give the same bits on every rank, and in every run with the same number of ranks.
///
/// If a rank fails, the calls of the other ranks fail with [`crate::Error::Rank`], which names the failed rank. After an error all groups of
/// the job are unusable. Mismatched calls are detected by different message sizes, or by a timeout: a rank may be at most
/// `CLAYSTONE_DISTRIBUTED_TIMEOUT` seconds late (600 by default). With `CLAYSTONE_DISTRIBUTED_DEBUG=1` the ranks compare every collective
/// except `send` and `recv` before it runs; the error names the rank and its call. Under `mpirun` a rank then also handles SIGTERM: if
/// the job is ended, it prints the rank that it was waiting for.
#[derive(Clone)]
pub struct Group {
    engine: Arc<Engine>,
    member: Arc<Membership>,
}

/// Defines collectives. Each has a blocking form, and an asynchronous form with the given body.
macro_rules! collectives {
    ($($(#[$doc:meta])* $name:ident, $async_form:ident($this:ident $(, $argument:ident: $type:ty)*) -> $result:ty $body:block)*) => { $(
        $(#[$doc])*
        pub fn $name(&$this $(, $argument: $type)*) -> Result<$result> {
            $this.$async_form($($argument),*)?.wait()
        }

        #[doc = concat!("The asynchronous form of [`", stringify!($name), "`](Self::", stringify!($name), "). It fails with the errors")]
        /// that concern its arguments.
        pub fn $async_form(&$this $(, $argument: $type)*) -> Result<Work<$result>> $body
    )* };
}

impl Group {
    /// Creates a group whose ranks are threads of this process, one for each device. Use each returned group on its own thread. Fails with
    /// [`crate::Error::Invalid`] if `devices` is empty, and with [`crate::Error::NoDevice`].
    pub fn threads(devices: &[Device]) -> Result<Vec<Group>> {
        let op = "Group::threads";
        invalid!(op if devices.is_empty(), "there are no devices: give one for each rank");
        let ends = Threads::new(devices.len(), timeout_from_env(op)?);
        ends.into_iter()
            .zip(devices)
            .map(|(end, &device)| {
                let other_end = end.clone();
                let engine = Engine::start(op, move || Ok(end), move |why| other_end.clone().leave(why))?;
                Group::for_job(engine, device)
            })
            .collect()
    }

    /// Creates the group of all ranks of the job under `mpirun` or another MPI launcher. Without a launcher the group has one rank. The
    /// device of local rank `i` is OpenCL device `i` modulo the number of devices (see `CLAYSTONE_DEVICES`), or the CPU if there is none.
    ///
    /// This function initialises MPI, which is finalised when the process exits. If a rank fails or is killed, the whole job ends with a
    /// message on standard error, because MPI cannot cancel pending messages. Only ranks in threads get an [`crate::Error`] instead. Fails
    /// with [`crate::Error::Invalid`] if another library has initialised MPI, or if MPI was already finalised.
    #[cfg(feature = "mpi")]
    pub fn world() -> Result<Group> {
        let op = "Group::world";
        let engine = super::mpi::engine(op, timeout_from_env(op)?)?;
        let devices: Vec<Device> = Device::all().into_iter().filter(|d| d.has_queues()).collect();
        let device = devices.get(engine.position.local_rank % devices.len().max(1)).copied().unwrap_or_default();
        if engine.position.size > 1 && device.has_queues() && threads() == 1 {
            tracing::warn!(
                "a rank with {device} has one core, so backward and communication take turns: use mpirun --bind-to none"
            );
        }
        Group::for_job(engine, device)
    }

    fn for_job(engine: Arc<Engine>, device: Device) -> Result<Group> {
        let Position { rank, size, .. } = engine.position;
        let member = Membership::new(rank, (0..size).collect(), 0, device, is_debug())?;
        Ok(Group { engine, member: Arc::new(member) })
    }

    /// Returns this rank's number in the group, from 0.
    pub fn rank(&self) -> usize {
        self.member.rank
    }

    /// Returns the number of ranks.
    pub fn size(&self) -> usize {
        self.member.ranks.len()
    }

    /// Returns the device of this rank.
    pub fn device(&self) -> Device {
        self.member.device
    }

    /// Splits the ranks into one group for each color (MPI's `MPI_Comm_split`, PyTorch's `new_group`). The ranks of a new group are ordered
    /// by key, then by old rank. Returns `None` on a rank without a color. Must be called on all ranks. Fails as
    /// [`all_gather`](Self::all_gather) does.
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Group>> {
        let member = Arc::clone(&self.member);
        let job = move |transport: &mut dyn Transport| {
            member.call(transport, "split", Some("split".into()), |m| collective::split(m, color, key))
        };
        let Some((ranks, context)) = self.engine.submit("split", job).wait()? else { return Ok(None) };
        let rank = ranks.iter().position(|&rank| rank == self.engine.position.rank).expect("this rank gave the color");
        let member = Membership::new(rank, ranks, context, self.device(), self.member.debug)?;
        Ok(Some(Group { engine: Arc::clone(&self.engine), member: Arc::new(member) }))
    }

    /// Waits until every rank has made this call (PyTorch's `barrier`). Fails as [`all_gather`](Self::all_gather) does.
    pub fn barrier(&self) -> Result<()> {
        let nothing = Tensor::zeros(1, Device::HOST)?;
        self.all_reduce_async(&nothing, ReduceOp::Sum)?.wait()
    }

    collectives! {
        /// Copies the root's tensor to all other ranks (PyTorch's `broadcast`). Any dtype and strides; shape and dtype equal on all ranks.
        /// Fails with [`crate::Error::Invalid`] if `root` is not a rank, with [`crate::Error::Rank`] if another rank fails or does not make
        /// the call, and if a transfer fails.
        broadcast, broadcast_async(self, tensor: &Tensor, root: usize) -> () {
            self.submit_broadcast(&[tensor], tensor.shape(), root)
        }

        /// Replaces every rank's tensor by the reduction over all ranks, such as the sum (PyTorch's `all_reduce`). Any dtype and strides.
        /// Shape and dtype must be equal on all ranks. Fails with [`crate::Error::UnsupportedDType`] for the mean of integers and the sum of
        /// bools, and otherwise as [`broadcast`](Self::broadcast) does.
        all_reduce, all_reduce_async(self, tensor: &Tensor, reduce: ReduceOp) -> () {
            self.submit_all_reduce(&[tensor], tensor.shape(), reduce)
        }

        /// Does the same as [`all_reduce`](Self::all_reduce) for several tensors of one dtype and device, in one collective. Use it for the
        /// many small gradients of a network (PyTorch's `all_reduce_coalesced`). Fails as [`all_reduce`](Self::all_reduce) does, with
        /// [`crate::Error::Invalid`] if there are no tensors, and with [`crate::Error::DTypeMismatch`] or [`crate::Error::DeviceMismatch`]
        /// if dtypes or devices differ.
        all_reduce_coalesced, all_reduce_coalesced_async(self, tensors: &[&Tensor], reduce: ReduceOp) -> () {
            self.submit_all_reduce(tensors, &flat_shape(tensors), reduce)
        }

        /// Stacks the tensors of all ranks in a new first dimension and returns the result, `[size, ...]` (PyTorch's `all_gather`). Fails
        /// with [`crate::Error::Rank`] if another rank fails or does not make the call, with [`crate::Error::OutOfMemory`], and if a
        /// transfer fails.
        all_gather, all_gather_async(self, tensor: &Tensor) -> Tensor {
            let shape: Vec<usize> = [self.size()].iter().chain(tensor.shape().dims()).copied().collect();
            self.submit_to_new("all_gather", tensor, shape.into(), "", collective::all_gather)
        }

        /// Reduces the tensors of all ranks, and returns this rank's part of the result (PyTorch's `reduce_scatter_tensor`). The first
        /// dimension is divided among the ranks, so its size must be a multiple of the group's size. Fails with [`crate::Error::Invalid`]
        /// if the size is not such a multiple, and otherwise as [`all_reduce`](Self::all_reduce) does.
        reduce_scatter, reduce_scatter_async(self, tensor: &Tensor, reduce: ReduceOp) -> Tensor {
            let (op, dtype) = ("reduce_scatter", tensor.dtype());
            reduce.check(op, dtype)?;
            let part = self.rows_per_rank(op, tensor)?;
            let mut shape = tensor.shape().dims().to_vec();
            shape[0] = part;
            let f =
                move |m: &mut Member, from: &Tensor, to: &Tensor| collective::reduce_scatter(m, from, to, dtype, reduce);
            self.submit_to_new(op, tensor, shape.into(), &format!("{reduce:?}"), f)
        }

        /// Divides the first dimension into one part for each rank and sends part i to rank i (PyTorch's `all_to_all_single`). Returns the
        /// received parts, concatenated in the order of the ranks. Fails with [`crate::Error::Invalid`] if the first dimension is not a
        /// multiple of the group's size, and otherwise as [`all_gather`](Self::all_gather) does.
        all_to_all, all_to_all_async(self, tensor: &Tensor) -> Tensor {
            self.rows_per_rank("all_to_all", tensor)?;
            self.submit_to_new("all_to_all", tensor, tensor.shape().clone(), "", collective::all_to_all)
        }

        /// Sends a tensor to another rank (PyTorch's `send`), which [receives](Self::recv) into a tensor of the same shape and dtype. Two
        /// ranks that both send to each other first may deadlock: let one of them receive first, or call [`all_to_all`](Self::all_to_all).
        /// Fails with [`crate::Error::Invalid`] if `to` is this rank or not a rank, and otherwise as [`broadcast`](Self::broadcast) does.
        send, send_async(self, tensor: &Tensor, to: usize) -> () {
            self.check_other("send", to)?;
            let source = tensor.detach().contiguous()?;
            self.submit("send", None, &[source], move |m, bytes| collective::send(m, bytes, to))
        }

        /// Receives into `tensor` a tensor that another rank [sends](Self::send) (PyTorch's `recv`). Fails as [`send`](Self::send) does.
        recv, recv_async(self, tensor: &Tensor, from: usize) -> () {
            self.check_other("recv", from)?;
            self.submit_in_place("recv", None, &[tensor], move |m, bytes| collective::recv(m, bytes, from))
        }
    }

    /// Broadcasts several tensors of one dtype and device in one collective (PyTorch's `_broadcast_coalesced`).
    pub(super) fn broadcast_coalesced_async(&self, tensors: &[&Tensor], root: usize) -> Result<Work> {
        self.submit_broadcast(tensors, &flat_shape(tensors), root)
    }

    fn submit_broadcast(&self, tensors: &[&Tensor], shape: &Shape, root: usize) -> Result<Work> {
        self.check_rank("broadcast", root)?;
        let call = describe_call("broadcast", tensors[0].dtype(), shape, &format!("root {root}"));
        self.submit_in_place("broadcast", Some(call), tensors, move |m, bytes| collective::broadcast(m, bytes, root))
    }

    fn submit_all_reduce(&self, tensors: &[&Tensor], shape: &Shape, reduce: ReduceOp) -> Result<Work> {
        let op = "all_reduce";
        let Some(first) = tensors.first() else { invalid!(op, "there are no tensors") };
        let dtype = first.dtype();
        reduce.check(op, dtype)?;
        for t in tensors {
            same_dtype(op, &[first, t])?;
            same_device(op, &[first, t])?;
        }
        let call = describe_call(op, dtype, shape, &format!("{reduce:?}"));
        self.submit_in_place(op, Some(call), tensors, move |m, bytes| collective::all_reduce(m, bytes, dtype, reduce))
    }

    /// Concatenates the tensors of all ranks and writes the result to `into`, which must be contiguous (PyTorch's `all_gather_into_tensor`).
    pub(super) fn all_gather_into_async(&self, tensor: &Tensor, into: &Tensor) -> Result<Work> {
        let (source, into) = (tensor.detach().contiguous()?, as_byte_tensor(into)?);
        let call = describe_call("all_gather", tensor.dtype(), tensor.shape(), "");
        self.submit("all_gather", Some(call), &[source], move |m, bytes| collective::all_gather(m, &bytes[0], &into))
    }

    /// Returns the size of the first dimension divided by the number of ranks.
    fn rows_per_rank(&self, op: &'static str, tensor: &Tensor) -> Result<usize> {
        match tensor.shape().dims().first() {
            Some(rows) if rows % self.size() == 0 => Ok(rows / self.size()),
            _ => invalid!(
                op,
                "the first dimension of shape {} cannot be divided into {} equal parts: pad it to a multiple of \
                 the group's size",
                tensor.shape(),
                self.size()
            ),
        }
    }

    fn check_rank(&self, op: &'static str, rank: usize) -> Result<()> {
        invalid!(op if rank >= self.size(), "there is no rank {rank}: the group has {}", self.size());
        Ok(())
    }

    fn check_other(&self, op: &'static str, rank: usize) -> Result<()> {
        invalid!(op if rank == self.rank(), "{rank} is this rank itself: use copy_");
        self.check_rank(op, rank)
    }

    /// Submits a collective that writes to its tensors; strided tensors are written through a copy. The debug mode compares `call` between
    /// the ranks.
    fn submit_in_place(
        &self,
        op: &'static str,
        call: Option<String>,
        tensors: &[&Tensor],
        f: impl FnOnce(&mut Member, &[Tensor]) -> Result<()> + Send + 'static,
    ) -> Result<Work> {
        no_gradient!(op if crate::is_grad_enabled() && tensors.iter().any(|t| t.requires_grad()),
            "the tensor requires a gradient: detach() it, or call it in no_grad");
        invalid!(op if let Some(t) = tensors.iter().find(|t| t.layout.may_alias_itself()),
            "elements of a tensor with strides {:?} share memory: pass a clone()", t.strides());
        if self.size() == 1 {
            return Ok(Work::done(op, ()));
        }
        let targets: Vec<Tensor> = tensors.iter().map(|t| t.detach()).collect();
        let (dense, own) = self.dense(&targets)?;
        self.submit(op, call, &dense, move |m, bytes| {
            let mut copied = targets.iter().zip(&own).filter(|(target, own)| !target.shares_storage(own));
            let done = f(m, bytes).and_then(|()| copied.try_for_each(|(target, own)| target.copy_(own).map(|_| ())));
            // The host waits before the targets are dropped, because another tensor may then get their memory.
            Stream::current(targets[0].device())?.synchronize().and(done)
        })
    }

    /// Returns contiguous tensors with the targets' elements, and views of these tensors in the targets' shapes. On an OpenCL device,
    /// several targets are concatenated to one tensor: the launch takes less time than separate transfers.
    fn dense(&self, targets: &[Tensor]) -> Result<(Vec<Tensor>, Vec<Tensor>)> {
        if targets.len() == 1 || !targets[0].device().has_queues() {
            let dense = targets.iter().map(Tensor::contiguous).collect::<Result<Vec<_>>>()?;
            let own = dense.iter().map(Tensor::shallow_clone).collect();
            return Ok((dense, own));
        }
        let rows = targets.iter().map(|t| t.reshape(t.numel())).collect::<Result<Vec<_>>>()?;
        let joined = Tensor::cat(&rows, 0)?;
        let sizes: Vec<usize> = targets.iter().map(Tensor::numel).collect();
        let own = joined.split_with_sizes(&sizes, 0)?.into_iter().zip(targets);
        let own = own.map(|(part, target)| part.reshape(target.shape())).collect::<Result<Vec<_>>>()?;
        Ok((vec![joined], own))
    }

    /// Submits a collective that returns a new tensor on the device of its argument.
    fn submit_to_new(
        &self,
        op: &'static str,
        tensor: &Tensor,
        shape: Shape,
        detail: &str,
        f: impl FnOnce(&mut Member, &Tensor, &Tensor) -> Result<()> + Send + 'static,
    ) -> Result<Work<Tensor>> {
        let source = tensor.detach().contiguous()?;
        let result = Tensor::empty(shape, (tensor.dtype(), tensor.device()))?;
        self.submit(op, Some(describe_call(op, tensor.dtype(), tensor.shape(), detail)), &[source], move |m, bytes| {
            f(m, &bytes[0], &as_byte_tensor(&result)?)?;
            Ok(result)
        })
    }

    /// Runs `f` on the rank's thread, with the bytes of contiguous tensors of one device. Commands that the calling thread has enqueued
    /// on the device run first. All copies are complete when the returned work is done.
    fn submit<R: Send + 'static>(
        &self,
        op: &'static str,
        call: Option<String>,
        tensors: &[Tensor],
        f: impl FnOnce(&mut Member, &[Tensor]) -> Result<R> + Send + 'static,
    ) -> Result<Work<R>> {
        let bytes = tensors.iter().map(as_byte_tensor).collect::<Result<Vec<_>>>()?;
        let device = tensors[0].device();
        let submitted = Stream::current(device)?.record_event()?;
        let member = Arc::clone(&self.member);
        let job = move |transport: &mut dyn Transport| {
            let stream = if device == member.device { member.stream.clone() } else { Stream::current(device)? };
            with_stream(&stream, || {
                stream.wait_event(&submitted)?;
                let result = member.call(transport, op, call, |m| f(m, &bytes))?;
                stream.synchronize()?;
                Ok(result)
            })
        };
        Ok(self.engine.submit(op, job))
    }
}

/// A handle that is dropped while its thread panics makes the rank leave the job, so that other ranks do not wait for it.
impl Drop for Group {
    fn drop(&mut self) {
        if std::thread::panicking() {
            (self.engine.leave)("panicked");
        }
    }
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} of {} on {}", self.rank(), self.size(), self.device())
    }
}

/// Returns the elements of a contiguous tensor as one dimension of bytes.
fn as_byte_tensor(tensor: &Tensor) -> Result<Tensor> {
    tensor.detach().reshape(tensor.numel())?.view_dtype(DType::U8)
}

fn describe_call(op: &str, dtype: DType, shape: &Shape, detail: &str) -> String {
    format!("{op} of {dtype} {shape} {detail}").trim_end().into()
}

/// Returns the shape with which coalesced calls are compared: all elements in one dimension, because ranks may divide them differently.
fn flat_shape(tensors: &[&Tensor]) -> Shape {
    tensors.iter().map(|t| t.numel()).sum::<usize>().into()
}

/// Returns how long a rank waits for other ranks: the environment's value, or 10 minutes.
fn timeout_from_env(op: &'static str) -> Result<Duration> {
    let key = "CLAYSTONE_DISTRIBUTED_TIMEOUT";
    let Ok(text) = std::env::var(key) else { return Ok(Duration::from_secs(600)) };
    match text.parse::<u32>() {
        Ok(seconds @ 1..) => Ok(Duration::from_secs(seconds.into())),
        _ => invalid!(op, "{key} is {text:?}: it takes a number of seconds"),
    }
}

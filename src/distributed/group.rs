//! Groups of ranks and their collectives.

use std::sync::Arc;
use std::time::Duration;

use super::collective::{self, Member, Membership};
use super::engine::{Engine, Work};
use super::reduce::ReduceOp;
use super::threads::Threads;
use super::transport::Transport;
#[cfg(feature = "mpi")]
use crate::device::cpu::threads;
use crate::{DType, Device, Error, Result, Shape, Stream, Tensor, with_stream};

/// Ranks that make the same calls in the same order (PyTorch's `ProcessGroup`). Ranks are the processes of a job under `mpirun`
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
/// Tensors stay on their devices; messages go through host memory. Each rank has one thread that runs collectives one after
/// another in the order of the calls, including those of groups [split](Self::split) from this one, so ranks must make the calls
/// of all their groups in the same order. Each collective has an asynchronous form that returns [`Work`]: its tensors must not be
/// written to before [`Work::wait`]. Reductions give the same bits on every rank, and in every run with as many ranks.
///
/// Where a rank fails, the others' calls fail with [`Error::Rank`], which names it; after an error the groups of a job cannot be
/// used any more. Mismatched calls are noticed by the sizes of the messages, or after `CLAYSTONE_DISTRIBUTED_TIMEOUT` seconds
/// (600), which is also how late a rank may be. With `CLAYSTONE_DISTRIBUTED_DEBUG=1` the ranks compare every collective, except
/// `send` and `recv`, before it runs, and the error says which rank calls what.
#[derive(Clone)]
pub struct Group {
    engine: Arc<Engine>,
    member: Arc<Membership>,
}

impl Group {
    /// A group of ranks in this process, one for each device: use each on a thread of its own.
    ///
    /// # Errors
    /// [`Error::Invalid`] without devices, [`Error::NoDevice`].
    pub fn threads(devices: &[Device]) -> Result<Vec<Group>> {
        let op = "Group::threads";
        if devices.is_empty() {
            return Err(Error::invalid(op, "there are no devices: give one for each rank"));
        }
        let ends = Threads::new(devices.len(), timeout(op)?);
        ends.into_iter()
            .zip(devices)
            .map(|(end, &device)| {
                let other_end = end.clone();
                let engine = Engine::start(op, move || Ok(end), move |why| other_end.clone().leave(why))?;
                Group::of_job(engine, device)
            })
            .collect()
    }

    /// All ranks of the job under `mpirun` or another MPI launcher; a group of one without a launcher. A rank with local rank `i`
    /// on its machine has OpenCL device `i` modulo their number (see `CLAYSTONE_DEVICES`), or the CPU where there are none.
    ///
    /// This initialises MPI, which is finalised when the process exits. A rank that fails or is killed ends the job with a message
    /// on standard error, instead of the [`Error`] that ranks in threads get, because pending MPI messages cannot be cancelled.
    ///
    /// # Errors
    /// [`Error::Invalid`] where another library has initialised MPI, or MPI was finalised.
    #[cfg(feature = "mpi")]
    pub fn world() -> Result<Group> {
        let op = "Group::world";
        let engine = super::mpi::engine(op, timeout(op)?)?;
        let local = super::mpi::local_rank();
        let devices: Vec<Device> = Device::all().into_iter().filter(|d| *d != Device::Cpu).collect();
        let device = devices.get(local % devices.len().max(1)).copied().unwrap_or(Device::Cpu);
        if engine.size > 1 && !device.is_cpu() && threads() == 1 {
            tracing::warn!(
                "a rank with {device} has one core, so that backward and what it sends take turns: mpirun --bind-to none"
            );
        }
        Group::of_job(engine, device)
    }

    fn of_job(engine: Arc<Engine>, device: Device) -> Result<Group> {
        let (rank, ranks) = (engine.rank, (0..engine.size).collect());
        let member = Membership::new(rank, ranks, 0, device, is_on("CLAYSTONE_DISTRIBUTED_DEBUG"))?;
        Ok(Group { engine, member: Arc::new(member) })
    }

    /// This rank's number in the group, from 0.
    pub fn rank(&self) -> usize {
        self.member.rank
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.member.ranks.len()
    }

    /// The device of this rank.
    pub fn device(&self) -> Device {
        self.member.device
    }

    /// Splits the ranks into one group for each color, ranked by key and then by old rank (MPI's `MPI_Comm_split`, PyTorch's
    /// `new_group`). None for a rank without a color. All ranks call it.
    ///
    /// # Errors
    /// Those of collectives.
    pub fn split(&self, color: Option<u32>, key: i64) -> Result<Option<Group>> {
        let member = Arc::clone(&self.member);
        let job = move |transport: &mut dyn Transport| {
            member.call(transport, "split", Some("split".into()), |m| collective::split(m, color, key))
        };
        let Some((ranks, context)) = self.engine.submit("split", job).wait()? else { return Ok(None) };
        let rank = ranks.iter().position(|&rank| rank == self.engine.rank).expect("this rank gave the color");
        let member = Membership::new(rank, ranks, context, self.device(), self.member.debug)?;
        Ok(Some(Group { engine: Arc::clone(&self.engine), member: Arc::new(member) }))
    }

    /// Returns when every rank has called it (PyTorch's `barrier`).
    ///
    /// # Errors
    /// Those of collectives.
    pub fn barrier(&self) -> Result<()> {
        let nothing = Tensor::zeros(1, Device::Cpu)?;
        self.all_reduce_async(&nothing, ReduceOp::Sum)?.wait()
    }

    /// Copies the root's tensor to every rank's (PyTorch's `broadcast`). Any dtype and strides; the same shape and dtype on all
    /// ranks.
    ///
    /// # Errors
    /// [`Error::Invalid`] for a root that is no rank; [`Error::Rank`] where another rank fails or does not make the call; those
    /// of transfers.
    pub fn broadcast(&self, tensor: &Tensor, root: usize) -> Result<()> {
        self.broadcast_async(tensor, root)?.wait()
    }

    /// The asynchronous form of [`broadcast`](Self::broadcast).
    ///
    /// # Errors
    /// Those of [`broadcast`](Self::broadcast) that concern its arguments.
    pub fn broadcast_async(&self, tensor: &Tensor, root: usize) -> Result<Work> {
        self.broadcast_of(&[tensor], tensor.shape(), root)
    }

    /// [`broadcast`](Self::broadcast) of several tensors of one dtype and device in one collective (PyTorch's
    /// `_broadcast_coalesced`).
    pub(super) fn broadcast_coalesced_async(&self, tensors: &[&Tensor], root: usize) -> Result<Work> {
        self.broadcast_of(tensors, &elements(tensors), root)
    }

    fn broadcast_of(&self, tensors: &[&Tensor], shape: &Shape, root: usize) -> Result<Work> {
        self.check_rank("broadcast", root)?;
        self.in_place("broadcast", tensors, shape, &format!("root {root}"), move |m, bytes| {
            collective::broadcast(m, bytes, root)
        })
    }

    /// Replaces every rank's tensor by the sum (or another [`ReduceOp`]) over all ranks (PyTorch's `all_reduce`). Any dtype and
    /// strides; the same shape and dtype on all ranks.
    ///
    /// # Errors
    /// [`Error::UnsupportedDType`] for the mean of integers and the sum of bools; [`Error::Rank`] where another rank fails or
    /// does not make the call; those of transfers.
    pub fn all_reduce(&self, tensor: &Tensor, reduce: ReduceOp) -> Result<()> {
        self.all_reduce_async(tensor, reduce)?.wait()
    }

    /// The asynchronous form of [`all_reduce`](Self::all_reduce).
    ///
    /// # Errors
    /// Those of [`all_reduce`](Self::all_reduce) that concern its arguments.
    pub fn all_reduce_async(&self, tensor: &Tensor, reduce: ReduceOp) -> Result<Work> {
        self.all_reduce_of(&[tensor], tensor.shape(), reduce)
    }

    /// [`all_reduce`](Self::all_reduce) of several tensors of one dtype and device in one collective, such as the many small
    /// gradients of a network (PyTorch's `all_reduce_coalesced`).
    ///
    /// # Errors
    /// [`Error::Invalid`] without tensors; [`Error::DTypeMismatch`], [`Error::DeviceMismatch`]; those of
    /// [`all_reduce`](Self::all_reduce).
    pub fn all_reduce_coalesced(&self, tensors: &[&Tensor], reduce: ReduceOp) -> Result<()> {
        self.all_reduce_coalesced_async(tensors, reduce)?.wait()
    }

    /// The asynchronous form of [`all_reduce_coalesced`](Self::all_reduce_coalesced).
    ///
    /// # Errors
    /// Those of [`all_reduce_coalesced`](Self::all_reduce_coalesced) that concern its arguments.
    pub fn all_reduce_coalesced_async(&self, tensors: &[&Tensor], reduce: ReduceOp) -> Result<Work> {
        self.all_reduce_of(tensors, &elements(tensors), reduce)
    }

    fn all_reduce_of(&self, tensors: &[&Tensor], shape: &Shape, reduce: ReduceOp) -> Result<Work> {
        let op = "all_reduce";
        let Some(first) = tensors.first() else { return Err(Error::invalid(op, "there are no tensors")) };
        let dtype = first.dtype();
        reduce.check(op, dtype)?;
        for t in tensors {
            if t.dtype() != dtype {
                return Err(Error::DTypeMismatch { op, lhs: dtype, rhs: t.dtype() });
            }
            if t.device() != first.device() {
                return Err(Error::DeviceMismatch { op, lhs: first.device(), rhs: t.device() });
            }
        }
        self.in_place(op, tensors, shape, &format!("{reduce:?}"), move |m, bytes| {
            collective::all_reduce(m, bytes, dtype, reduce)
        })
    }

    /// The tensors of all ranks, stacked in a new first dimension: `[size, ...]` (PyTorch's `all_gather`).
    ///
    /// # Errors
    /// [`Error::Rank`] where another rank fails or does not make the call; [`Error::OutOfMemory`]; those of transfers.
    pub fn all_gather(&self, tensor: &Tensor) -> Result<Tensor> {
        self.all_gather_async(tensor)?.wait()
    }

    /// The asynchronous form of [`all_gather`](Self::all_gather).
    ///
    /// # Errors
    /// Those of [`all_gather`](Self::all_gather) that concern its arguments.
    pub fn all_gather_async(&self, tensor: &Tensor) -> Result<Work<Tensor>> {
        let shape: Vec<usize> = [self.size()].iter().chain(tensor.shape().dims()).copied().collect();
        self.to_new("all_gather", tensor, shape.into(), "", collective::all_gather)
    }

    /// Concatenates the tensors of all ranks in `into`, which is contiguous (PyTorch's `all_gather_into_tensor`).
    pub(super) fn all_gather_into_async(&self, tensor: &Tensor, into: &Tensor) -> Result<Work> {
        let (source, into) = (tensor.detach().contiguous()?, bytes_of(into)?);
        let call = describe("all_gather", tensor.dtype(), tensor.shape(), "");
        self.submit("all_gather", Some(call), &[source], move |m, bytes| collective::all_gather(m, &bytes[0], &into))
    }

    /// Reduces the tensors of all ranks and gives this rank its part of the first dimension, whose size is a multiple of the
    /// group's (PyTorch's `reduce_scatter_tensor`).
    ///
    /// # Errors
    /// [`Error::Invalid`] where the first dimension is no such multiple; those of [`all_reduce`](Self::all_reduce).
    pub fn reduce_scatter(&self, tensor: &Tensor, reduce: ReduceOp) -> Result<Tensor> {
        self.reduce_scatter_async(tensor, reduce)?.wait()
    }

    /// The asynchronous form of [`reduce_scatter`](Self::reduce_scatter).
    ///
    /// # Errors
    /// Those of [`reduce_scatter`](Self::reduce_scatter) that concern its arguments.
    pub fn reduce_scatter_async(&self, tensor: &Tensor, reduce: ReduceOp) -> Result<Work<Tensor>> {
        let (op, dtype) = ("reduce_scatter", tensor.dtype());
        reduce.check(op, dtype)?;
        let part = self.rows_per_rank(op, tensor)?;
        let mut shape = tensor.shape().dims().to_vec();
        shape[0] = part;
        let f =
            move |m: &mut Member, from: &Tensor, to: &Tensor| collective::reduce_scatter(m, from, to, dtype, reduce);
        self.to_new(op, tensor, shape.into(), &format!("{reduce:?}"), f)
    }

    /// Sends part i of the first dimension to rank i, and concatenates the parts received in the order of the ranks (PyTorch's
    /// `all_to_all_single`).
    ///
    /// # Errors
    /// [`Error::Invalid`] where the first dimension is no multiple of the group's size; [`Error::Rank`] where another rank fails
    /// or does not make the call; [`Error::OutOfMemory`]; those of transfers.
    pub fn all_to_all(&self, tensor: &Tensor) -> Result<Tensor> {
        self.all_to_all_async(tensor)?.wait()
    }

    /// The asynchronous form of [`all_to_all`](Self::all_to_all).
    ///
    /// # Errors
    /// Those of [`all_to_all`](Self::all_to_all) that concern its arguments.
    pub fn all_to_all_async(&self, tensor: &Tensor) -> Result<Work<Tensor>> {
        self.rows_per_rank("all_to_all", tensor)?;
        self.to_new("all_to_all", tensor, tensor.shape().clone(), "", collective::all_to_all)
    }

    /// Sends a tensor to another rank, which [receives](Self::recv) it into one of the same shape and dtype (PyTorch's `send`).
    /// Two ranks that both send to each other first may deadlock: let one receive first, or call
    /// [`all_to_all`](Self::all_to_all).
    ///
    /// # Errors
    /// [`Error::Invalid`] for this rank itself and for a number that is no rank; [`Error::Rank`]; those of transfers.
    pub fn send(&self, tensor: &Tensor, to: usize) -> Result<()> {
        self.send_async(tensor, to)?.wait()
    }

    /// The asynchronous form of [`send`](Self::send).
    ///
    /// # Errors
    /// Those of [`send`](Self::send) that concern its arguments.
    pub fn send_async(&self, tensor: &Tensor, to: usize) -> Result<Work> {
        self.check_other("send", to)?;
        let source = tensor.detach().contiguous()?;
        self.submit("send", None, &[source], move |m, bytes| collective::send(m, &bytes[0], to))
    }

    /// Receives a tensor that another rank [sends](Self::send) (PyTorch's `recv`).
    ///
    /// # Errors
    /// Those of [`send`](Self::send).
    pub fn recv(&self, tensor: &Tensor, from: usize) -> Result<()> {
        self.recv_async(tensor, from)?.wait()
    }

    /// The asynchronous form of [`recv`](Self::recv).
    ///
    /// # Errors
    /// Those of [`recv`](Self::recv) that concern its arguments.
    pub fn recv_async(&self, tensor: &Tensor, from: usize) -> Result<Work> {
        self.check_other("recv", from)?;
        self.in_place_unchecked("recv", None, &[tensor], move |m, bytes| collective::recv(m, &bytes[0], from))
    }

    /// The first dimension's size divided by the number of ranks.
    fn rows_per_rank(&self, op: &'static str, tensor: &Tensor) -> Result<usize> {
        match tensor.shape().dims().first() {
            Some(rows) if rows % self.size() == 0 => Ok(rows / self.size()),
            _ => {
                let reason =
                    format!("the first dimension of shape {} has no {} equal parts", tensor.shape(), self.size());
                Err(Error::invalid(op, reason + ": pad it to a multiple of the group's size"))
            }
        }
    }

    fn check_rank(&self, op: &'static str, rank: usize) -> Result<()> {
        match rank < self.size() {
            true => Ok(()),
            false => Err(Error::invalid(op, format!("there is no rank {rank}: the group has {}", self.size()))),
        }
    }

    fn check_other(&self, op: &'static str, rank: usize) -> Result<()> {
        match rank == self.rank() {
            true => Err(Error::invalid(op, format!("{rank} is this rank itself: use copy_"))),
            false => self.check_rank(op, rank),
        }
    }

    /// Submits a collective that writes to its tensors; `detail` is what the debug mode compares besides op, dtype and shape.
    fn in_place(
        &self,
        op: &'static str,
        tensors: &[&Tensor],
        shape: &Shape,
        detail: &str,
        f: impl FnOnce(&mut Member, &[Tensor]) -> Result<()> + Send + 'static,
    ) -> Result<Work> {
        let call = describe(op, tensors[0].dtype(), shape, detail);
        self.in_place_unchecked(op, Some(call), tensors, f)
    }

    /// [`in_place`](Self::in_place) without a description to compare. Tensors that are not contiguous are written through a copy.
    fn in_place_unchecked(
        &self,
        op: &'static str,
        call: Option<String>,
        tensors: &[&Tensor],
        f: impl FnOnce(&mut Member, &[Tensor]) -> Result<()> + Send + 'static,
    ) -> Result<Work> {
        if crate::is_grad_enabled() && tensors.iter().any(|t| t.requires_grad()) {
            let reason = "the tensor requires a gradient: detach() it, or call it in no_grad".into();
            return Err(Error::Autograd { op, reason });
        }
        if let Some(t) = tensors.iter().find(|t| t.layout.may_alias_itself()) {
            let reason = format!("several elements of a tensor of strides {:?} are one: give a clone()", t.strides());
            return Err(Error::invalid(op, reason));
        }
        if self.size() == 1 {
            return Ok(Work::done(op, ()));
        }
        let targets: Vec<Tensor> = tensors.iter().map(|t| t.detach()).collect();
        let (dense, own) = self.dense(&targets)?;
        self.submit(op, call, &dense, move |m, bytes| {
            let mut copied = targets.iter().zip(&own).filter(|(target, own)| !target.shares_storage(own));
            let done = f(m, bytes).and_then(|()| copied.try_for_each(|(target, own)| target.copy_(own).map(|_| ())));
            // Before the targets are dropped: their memory may belong to another tensor afterwards.
            Stream::current(targets[0].device())?.synchronize().and(done)
        })
    }

    /// Contiguous tensors with the targets' elements, and a view of them in the shape of each target. On an OpenCL device several
    /// targets are concatenated first, because a transfer each would take longer than that launch.
    fn dense(&self, targets: &[Tensor]) -> Result<(Vec<Tensor>, Vec<Tensor>)> {
        if targets.len() == 1 || targets[0].device().is_cpu() {
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

    /// Submits a collective that returns a new tensor on the tensor's device.
    fn to_new(
        &self,
        op: &'static str,
        tensor: &Tensor,
        shape: Shape,
        detail: &str,
        f: impl FnOnce(&mut Member, &Tensor, &Tensor) -> Result<()> + Send + 'static,
    ) -> Result<Work<Tensor>> {
        let source = tensor.detach().contiguous()?;
        let result = Tensor::empty(shape, (tensor.dtype(), tensor.device()))?;
        self.submit(op, Some(describe(op, tensor.dtype(), tensor.shape(), detail)), &[source], move |m, bytes| {
            f(m, &bytes[0], &bytes_of(&result)?)?;
            Ok(result)
        })
    }

    /// Runs `f` on the rank's thread with the bytes of contiguous tensors of one device, after the commands that this thread has
    /// enqueued there. All copies have completed when the work is done.
    fn submit<R: Send + 'static>(
        &self,
        op: &'static str,
        call: Option<String>,
        tensors: &[Tensor],
        f: impl FnOnce(&mut Member, &[Tensor]) -> Result<R> + Send + 'static,
    ) -> Result<Work<R>> {
        let bytes = tensors.iter().map(bytes_of).collect::<Result<Vec<_>>>()?;
        let device = tensors[0].device();
        let submitted = Stream::current(device)?.record_event()?;
        let member = Arc::clone(&self.member);
        let job = move |transport: &mut dyn Transport| {
            let stream = match device == member.device {
                true => member.stream.clone(),
                false => Stream::current(device)?,
            };
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

/// A handle that is dropped while its thread panics makes the rank leave the job, so that the others do not wait for it.
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

/// The elements of a contiguous tensor as one dimension of bytes.
fn bytes_of(tensor: &Tensor) -> Result<Tensor> {
    tensor.detach().reshape(tensor.numel())?.view_dtype(DType::U8)
}

fn describe(op: &str, dtype: DType, shape: &Shape, detail: &str) -> String {
    format!("{op} of {dtype} {shape} {detail}").trim_end().into()
}

fn is_on(key: &str) -> bool {
    std::env::var(key).is_ok_and(|v| !matches!(&*v, "" | "0" | "off"))
}

/// The shape by which coalesced calls are compared: that of all elements in one dimension, since ranks may cut them differently.
fn elements(tensors: &[&Tensor]) -> Shape {
    tensors.iter().map(|t| t.numel()).sum::<usize>().into()
}

/// How long a rank waits for the others, by default 10 minutes.
fn timeout(op: &'static str) -> Result<Duration> {
    let key = "CLAYSTONE_DISTRIBUTED_TIMEOUT";
    let Ok(text) = std::env::var(key) else { return Ok(Duration::from_secs(600)) };
    match text.parse::<u32>() {
        Ok(seconds @ 1..) => Ok(Duration::from_secs(seconds.into())),
        _ => Err(Error::invalid(op, format!("{key} is {text:?}: it takes a number of seconds"))),
    }
}

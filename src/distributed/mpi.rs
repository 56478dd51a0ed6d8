//! Ranks that are processes under `mpirun`. MPI is called on one thread only, that of the rank's [`Engine`]. Ranks of one machine
//! exchange messages through shared memory, on several threads where they have them.

use std::collections::HashMap;
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use ::mpi::Threading;
use ::mpi::collective::SystemOperation;
use ::mpi::environment::Universe;
use ::mpi::request::{LocalScope, Request, scope};
use ::mpi::topology::SimpleCommunicator;
use ::mpi::traits::{Communicator, CommunicatorCollectives, Destination, Equivalence, Root, Source};

use super::engine::Engine;
use super::lanes::RunningLane;
use super::plan::{Lane, Plan};
use super::rings::{Progress, Rings};
use super::threads::{SAME_CALLS, did_not_come};
use super::transport::{Call, Fault, Lanes, Transport, default_slice_bytes};
use crate::device::cpu::{parallel, threads};
use crate::device::profiler::at_exit;
use crate::storage::SharedMemory;
use crate::{Error, Result};

/// Set to 0 on all ranks, it makes those of one machine exchange messages through MPI as well.
const SHARED_MEMORY: &str = "CLAYSTONE_DISTRIBUTED_SHARED_MEMORY";

/// The tag of the message that a rank leaves the job; other messages have their context plus 1.
const LEAVES: i32 = 0;

/// How long all threads of a rank poll before only the engine's thread does, which then checks for ranks that have left.
const SPIN_TIME: Duration = Duration::from_micros(200);

/// How long the engine's thread polls before it sleeps between polls. With one core it sleeps after [`SPIN_TIME`]: others need it.
const POLL_TIME: Duration = Duration::from_millis(2);

/// How long it sleeps between polls.
const SLEEP: Duration = Duration::from_micros(50);

/// The most lanes, and so threads of a rank that exchange messages: the ranks of a machine with several GPUs share its cores.
const MAX_LANES: usize = 8;

/// A poisoned lock is used like any other: only a lane can panic under one, and that ends the engine.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Requests to end the rank, from `mpirun` or another thread.
#[derive(Clone, Default)]
struct Shutdown {
    /// Set by SIGTERM, which `mpirun` sends to all ranks after one has died.
    terminated: Arc<AtomicBool>,
    /// Why this rank is to leave the job.
    reason: Arc<Mutex<Option<String>>>,
}

impl Shutdown {
    fn reason(&self) -> Option<String> {
        locked(&self.reason).clone()
    }
}

/// The engine of the process. It lives until the process exits, because MPI cannot be initialised a second time.
static ENGINE: Mutex<Option<Arc<Engine>>> = Mutex::new(None);

pub(super) fn engine(op: &'static str, timeout: Duration) -> Result<Arc<Engine>> {
    let mut engine = locked(&ENGINE);
    if let Some(engine) = &*engine {
        return Ok(Arc::clone(engine));
    }
    let shutdown = Shutdown::default();
    let of_transport = shutdown.clone();
    let made = Engine::start(
        op,
        move || Mpi::start(op, of_transport, timeout),
        move |why| {
            locked(&shutdown.reason).get_or_insert_with(|| why.into());
        },
    )?;
    at_exit(end);
    Ok(Arc::clone(engine.insert(made)))
}

/// Ends the engine when the process exits; calls of groups that still exist fail from then on.
extern "C" fn end() {
    if let Some(engine) = locked(&ENGINE).take() {
        engine.end();
    }
}

/// The rank of this process among those of its machine.
static LOCAL_RANK: OnceLock<usize> = OnceLock::new();

pub(super) fn local_rank() -> usize {
    LOCAL_RANK.get().copied().unwrap_or_default()
}

/// The ranks of this machine.
struct Node {
    rings: Rings,
    /// The local rank of each of them.
    local_ranks: HashMap<usize, usize>,
}

struct Mpi {
    world: Rc<SimpleCommunicator>,
    rank: usize,
    size: usize,
    slice: usize,
    next_context: u32,
    timeout: Duration,
    shutdown: Shutdown,
    /// Ranks that have left, and why.
    left: HashMap<usize, String>,
    node: Option<Rc<Node>>,
    /// Finalises MPI when dropped, after the communicator.
    _universe: Universe,
}

impl Mpi {
    fn start(op: &'static str, shutdown: Shutdown, timeout: Duration) -> Result<Mpi> {
        let started = ::mpi::initialize_with_threading(Threading::Funneled);
        let Some((universe, _)) = started else {
            return Err(Error::invalid(op, "MPI has been started in this process by someone else, or has ended"));
        };
        let world = Rc::new(universe.world());
        let (rank, size) = (world.rank() as usize, world.size() as usize);
        if size > 1 {
            // `mpirun` ends a job with SIGTERM: the collective that is waiting then says for which rank.
            signal_hook::flag::register(signal_hook::consts::SIGTERM, Arc::clone(&shutdown.terminated))
                .map_err(|e| Error::invalid(op, format!("SIGTERM cannot be watched: {e}")))?;
        }
        let node = node(&world).map(Rc::new);
        let mut slice = 0;
        world.all_reduce_into(&default_slice_bytes(), &mut slice, SystemOperation::min());
        Ok(Mpi {
            rank,
            size,
            slice,
            next_context: 1,
            timeout,
            shutdown,
            left: HashMap::new(),
            node,
            world,
            _universe: universe,
        })
    }

    /// A fault if one of these ranks has left the job, or the timeout has passed.
    fn fault(&mut self, waiting_for: &[usize], since: Instant) -> Option<Fault> {
        while let Some(message) = self.world.any_process().immediate_probe_with_tag(LEAVES) {
            let mut text = vec![0u8; message.count(u8::equivalent_datatype()) as usize];
            let from = message.source_rank();
            self.world.process_at_rank(from).receive_into_with_tag(&mut text[..], LEAVES);
            let why = String::from_utf8_lossy(&text).into_owned();
            self.left.entry(from as usize).or_insert(why); // the first reason is the cause of later ones
        }
        if let Some((&rank, why)) = self.left.iter().find(|(rank, _)| waiting_for.contains(rank)) {
            return Some(Fault { rank, reason: why.clone() });
        }
        let rank = waiting_for[0];
        (since.elapsed() > self.timeout).then(|| Fault { rank, reason: did_not_come(self.timeout) })
    }

    /// Yields or sleeps between two polls, and checks now and then for ranks that have left. `moved` says whether the last poll
    /// made progress, `pending` gives the ranks with incomplete messages.
    fn wait(&mut self, call: Call, waiting: &mut Waiting, moved: bool, pending: impl Fn() -> Vec<usize>) {
        // A rank that left may have sent messages before, which arrive first: the fault counts once nothing more arrives.
        if let Some(Fault { rank, reason }) = waiting.fault.take().filter(|f| !moved && pending().contains(&f.rank)) {
            self.end(&format!("{}: rank {rank} {reason}", call.op));
        }
        if moved {
            waiting.last_progress = Instant::now();
        }
        match waiting.last_progress.elapsed() < if threads() == 1 { SPIN_TIME } else { POLL_TIME } {
            true => std::thread::yield_now(),
            false => std::thread::sleep(SLEEP),
        }
        if waiting.last_check.elapsed() < SPIN_TIME {
            return;
        }
        waiting.last_check = Instant::now();
        let ranks = pending();
        if ranks.is_empty() {
            return; // all lanes are at the start of a phase
        }
        if let Some(reason) = self.shutdown.reason() {
            self.end(&format!("{reason} while {} was under way", call.op));
        }
        if self.shutdown.terminated.load(Relaxed) {
            self.end(&format!("the job was ended while {} waited for rank {}", call.op, ranks[0]));
        }
        waiting.fault = self.fault(&ranks, waiting.since);
    }

    /// Exits the process, because MPI may still write to buffers of pending messages; `mpirun` then ends the other ranks. It exits
    /// without `MPI_Abort`, which may hang where several ranks call it, and without exit handlers, which may wait.
    fn end(&self, sentence: &str) -> ! {
        eprintln!("claystone: rank {} of {}: {sentence}", self.rank, self.size);
        signal_hook::low_level::exit(if self.shutdown.terminated.load(Relaxed) { 143 } else { 1 })
    }
}

/// Makes the rings between the ranks of this machine, unless they cannot share memory. All ranks call it.
fn node(world: &SimpleCommunicator) -> Option<Node> {
    let machine = world.split_shared(world.rank());
    let (ranks, rank) = (machine.size() as usize, machine.rank() as usize);
    let _ = LOCAL_RANK.set(rank); // cannot fail: MPI is initialised once
    let mut local_ranks = vec![0i32; ranks];
    machine.all_gather_into(&world.rank(), &mut local_ranks[..]);
    if std::env::var(SHARED_MEMORY).is_ok_and(|value| value == "0") {
        return None;
    }
    let mut most = 0;
    machine.all_reduce_into(&threads().min(MAX_LANES), &mut most, SystemOperation::min());
    let (lanes, words) = Rings::lanes(ranks, most)?; // the same on all of them
    let first = machine.process_at_rank(0);
    let created = (rank == 0).then(|| SharedMemory::create(words).ok()).flatten();
    // A path in /dev/shm is shorter than this.
    let mut path = [0u8; 256];
    if let Some(name) = created.as_ref().and_then(|(_, file)| file.path().to_str()).filter(|name| name.len() < 256) {
        path[..name.len()].copy_from_slice(name.as_bytes());
    }
    first.broadcast_into(&mut path[..]);
    let name = String::from_utf8_lossy(&path);
    let (own, file) = created.unzip();
    let memory = own.or_else(|| SharedMemory::open(Path::new(name.trim_end_matches('\0')), words).ok());
    // Rings are used by all ranks of the machine or by none.
    let mut all = 0i32;
    machine.all_reduce_into(&i32::from(memory.is_some()), &mut all, SystemOperation::min());
    drop(file);
    if all == 0 && rank == 0 {
        tracing::warn!(
            "the ranks of this machine share no memory, /dev/shm is full or missing: MPI carries their messages"
        );
    }
    let local_ranks = local_ranks.into_iter().enumerate().map(|(number, rank)| (rank as usize, number)).collect();
    let memory = memory.filter(|_| all == 1)?;
    Some(Node { rings: Rings::new(memory, ranks, rank, lanes), local_ranks })
}

/// A message that is not complete.
enum Pending<'a, 'r, 's> {
    /// A request, with the expected number of bytes if it receives.
    Mpi(Request<'s, [u8], &'r LocalScope<'s>>, Option<usize>),
    Sending(&'a Rings, usize, &'a [u8], Progress),
    Receiving(&'a Rings, usize, &'a mut [u8], Progress),
}

impl Pending<'_, '_, '_> {
    /// Continues the message: whether there was progress, and the message unless it is complete.
    fn step(self, context: u32) -> Result<(bool, Option<Self>), String> {
        match self {
            Pending::Mpi(request, expected) => match request.test() {
                Err(request) => Ok((false, Some(Pending::Mpi(request, expected)))),
                Ok(status) => {
                    let got = status.count(u8::equivalent_datatype()) as usize;
                    match expected.filter(|&expected| expected != got) {
                        Some(expected) => Err(format!("sends {got} bytes where {expected} are expected")),
                        None => Ok((true, None)),
                    }
                }
            },
            Pending::Sending(rings, to, bytes, mut progress) => {
                let moved = rings.send(to, 0, context, bytes, &mut progress);
                let left = (!progress.is_complete(bytes.len())).then_some(Pending::Sending(rings, to, bytes, progress));
                Ok((moved, left))
            }
            Pending::Receiving(rings, from, into, mut progress) => {
                let moved = rings.receive(from, 0, context, into, &mut progress)?;
                let is_complete = progress.is_complete(into.len());
                Ok((moved, (!is_complete).then_some(Pending::Receiving(rings, from, into, progress))))
            }
        }
    }
}

/// The state of a wait for other ranks.
struct Waiting {
    since: Instant,
    /// The time of the last progress, and of the last check for ranks that have left.
    last_progress: Instant,
    last_check: Instant,
    fault: Option<Fault>,
}

impl Waiting {
    fn begin() -> Waiting {
        let since = Instant::now();
        Waiting { since, last_progress: since, last_check: since, fault: None }
    }

    /// Whether there was progress within the last [`SPIN_TIME`].
    fn is_recent(&self) -> bool {
        self.last_progress.elapsed() < SPIN_TIME
    }
}

impl Transport for Mpi {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn slice_bytes(&self) -> usize {
        self.slice
    }

    fn next_context(&mut self) -> &mut u32 {
        &mut self.next_context
    }

    fn exchange(
        &mut self,
        call: Call,
        sends: &[(usize, &[u8])],
        receives: &mut [(usize, &mut [u8])],
    ) -> Result<(), Fault> {
        let tag = call.context as i32 + 1;
        let (world, near) = (Rc::clone(&self.world), self.node.clone());
        let near = |rank: &usize| near.as_deref().and_then(|near| Some((&near.rings, *near.local_ranks.get(rank)?)));
        scope(|scope| {
            let mut pending: Vec<(usize, Pending)> = Vec::with_capacity(sends.len() + receives.len());
            for (from, into) in receives.iter_mut() {
                let receive = match near(from) {
                    Some((rings, number)) => Pending::Receiving(rings, number, into, Progress::default()),
                    None => {
                        let from = world.process_at_rank(*from as i32);
                        let expected = Some(into.len());
                        Pending::Mpi(from.immediate_receive_into_with_tag(scope, &mut **into, tag), expected)
                    }
                };
                pending.push((*from, receive));
            }
            for (to, bytes) in sends {
                let send = match near(to) {
                    Some((rings, number)) => Pending::Sending(rings, number, bytes, Progress::default()),
                    None => {
                        let to = world.process_at_rank(*to as i32);
                        Pending::Mpi(to.immediate_send_with_tag(scope, *bytes, tag), None)
                    }
                };
                pending.push((*to, send));
            }
            let mut waiting = Waiting::begin();
            loop {
                let mut moved = false;
                let mut left = Vec::with_capacity(pending.len());
                for (rank, one) in pending {
                    match one.step(call.context) {
                        Ok((any, rest)) => {
                            moved |= any;
                            left.extend(rest.map(|rest| (rank, rest)));
                        }
                        Err(what) => self.end(&format!("{}: rank {rank} {what}: {SAME_CALLS}", call.op)),
                    }
                }
                pending = left;
                if pending.is_empty() {
                    break;
                }
                self.wait(call, &mut waiting, moved, || pending.iter().map(|(rank, _)| *rank).collect());
            }
        });
        Ok(())
    }

    fn lanes(&mut self, ranks: &[usize]) -> Option<&mut dyn Lanes> {
        let near = self.node.as_ref()?;
        ranks.iter().all(|rank| near.local_ranks.contains_key(rank)).then_some(self)
    }

    fn leave(&mut self, why: &str) {
        let why = self.shutdown.reason().unwrap_or_else(|| why.into());
        for other in (0..self.size).filter(|&other| other != self.rank) {
            self.world.process_at_rank(other as i32).send_with_tag(why.as_bytes(), LEAVES);
        }
    }
}

impl Lanes for Mpi {
    fn count(&self) -> usize {
        self.node.as_ref().map_or(1, |near| near.rings.lanes)
    }

    /// Lanes run on this thread and those of the pool. A lane without progress returns after [`SPIN_TIME`], so that this thread can
    /// check for ranks that have left.
    fn exchange(&mut self, call: Call, plan: &Plan, lanes: Vec<Lane>) -> Result<(), Fault> {
        let Some(near) = self.node.clone() else { return Ok(()) };
        let Node { rings, local_ranks } = &*near;
        let plan = &plan.with_ranks(|rank| local_ranks[&rank]);
        let rank_of = |number: usize| local_ranks.iter().find(|(_, n)| **n == number).map_or(number, |(rank, _)| *rank);
        let mut lanes: Vec<Mutex<RunningLane>> =
            lanes.into_iter().enumerate().map(|(i, lane)| Mutex::new(RunningLane::new(lane, i))).collect();
        let mut waiting = Waiting::begin();
        loop {
            if waiting.is_recent() || waiting.fault.is_some() {
                parallel::for_each_in_order(lanes.len(), 1, |i| {
                    locked(&lanes[i]).run(rings, call.context, plan, SPIN_TIME);
                });
            } else {
                // While other ranks are late, only this thread polls, so that the pool's threads are free for other work.
                lanes.iter().any(|lane| locked(lane).step(rings, call.context, plan));
            }
            let mut moved = false;
            lanes.retain_mut(|lane| {
                let mut lane = locked(lane);
                moved |= std::mem::take(&mut lane.moved);
                if let Some((number, what)) = &lane.mismatch {
                    self.end(&format!("{}: rank {} {what}: {SAME_CALLS}", call.op, rank_of(*number)));
                }
                !lane.is_done(plan)
            });
            if lanes.is_empty() {
                return Ok(());
            }
            let pending = || lanes.iter().flat_map(|lane| locked(lane).waits_for(plan)).map(rank_of).collect();
            self.wait(call, &mut waiting, moved, pending);
        }
    }
}

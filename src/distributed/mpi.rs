//! Ranks that are processes under `mpirun`. Only the thread of the rank's [`Engine`] calls MPI. Ranks on one machine
//! exchange messages through shared memory. A rank with several threads uses all of them for that.

use std::collections::HashMap;
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
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
use super::threads::{SAME_CALLS_ADVICE, timeout_reason};
use super::transport::{Call, Fault, Lanes, Position, Transport, default_slice_bytes, is_debug};
use crate::device::cpu::{parallel, threads};
use crate::device::profiler::at_exit;
use crate::internal::lock;
use crate::storage::SharedMemory;
use crate::{Error, Result};

/// If this variable is 0 on all ranks, ranks on one machine also exchange messages through MPI.
const SHARED_MEMORY_KEY: &str = "CLAYSTONE_DISTRIBUTED_SHARED_MEMORY";

/// The tag of messages that say that a rank leaves the job. Other messages have their group's context plus 1 as tag.
const LEAVE_TAG: i32 = 0;

/// How long all threads of a rank poll. After that only the engine's thread polls; it also checks for ranks that have left the job.
const SPIN_TIME: Duration = Duration::from_micros(200);

/// How long the engine's thread polls before it sleeps between polls. Equal to [`SPIN_TIME`] if other threads need the only core.
const POLL_TIME: Duration = Duration::from_millis(2);

/// The duration of the sleep between two polls.
const SLEEP_TIME: Duration = Duration::from_micros(50);

/// The maximum number of lanes. A rank exchanges messages with one thread per lane, and the ranks of a machine share its cores.
const MAX_LANES: usize = 8;

/// Requests to end this rank, made by `mpirun` or by another thread.
#[derive(Clone, Default)]
struct Shutdown {
    /// Set by SIGTERM in the debug mode. `mpirun` sends SIGTERM to all ranks after one rank has died.
    terminated: Arc<AtomicBool>,
    /// The reason why this rank has to leave the job. `None` while it need not.
    reason: Arc<Mutex<Option<String>>>,
}

impl Shutdown {
    fn reason(&self) -> Option<String> {
        lock(&self.reason).clone()
    }
}

/// The engine of the process. It lives until the process exits, because MPI cannot be initialised a second time.
static ENGINE: Mutex<Option<Arc<Engine>>> = Mutex::new(None);

/// Returns the engine of the process. The first call initialises MPI and starts the engine.
pub(super) fn engine(op: &'static str, timeout: Duration) -> Result<Arc<Engine>> {
    let mut engine = lock(&ENGINE);
    if let Some(engine) = &*engine {
        return Ok(Arc::clone(engine));
    }
    let shutdown = Shutdown::default();
    let transport_shutdown = shutdown.clone();
    let made = Engine::start(
        op,
        move || Mpi::start(op, transport_shutdown, timeout),
        move |why| {
            lock(&shutdown.reason).get_or_insert_with(|| why.into());
        },
    )?;
    at_exit(end);
    Ok(Arc::clone(engine.insert(made)))
}

/// Ends the engine when the process exits. From then on, calls of groups that still exist fail.
extern "C" fn end() {
    if let Some(engine) = lock(&ENGINE).take() {
        engine.end();
    }
}

/// The ranks of the job on this machine, and the ring buffers between them.
struct LocalNode {
    rings: Rings,
    /// Maps ranks of the job to local ranks.
    local_ranks: HashMap<usize, usize>,
}

/// The transport of a process under `mpirun`.
struct Mpi {
    world: Rc<SimpleCommunicator>,
    position: Position,
    timeout: Duration,
    shutdown: Shutdown,
    /// The ranks that have left the job, with their reasons.
    left: HashMap<usize, String>,
    node: Option<Rc<LocalNode>>,
    /// Finalises MPI when it is dropped. Declared last, so it is dropped after the communicator.
    _universe: Universe,
}

impl Mpi {
    fn start(op: &'static str, shutdown: Shutdown, timeout: Duration) -> Result<Mpi> {
        let started = ::mpi::initialize_with_threading(Threading::Funneled);
        let Some((universe, _)) = started else {
            return Err(Error::invalid(op, "MPI was initialised by another library in this process, or was finalised"));
        };
        let world = Rc::new(universe.world());
        let (rank, size) = (world.rank() as usize, world.size() as usize);
        if size > 1 && is_debug() {
            // `mpirun` ends a job with SIGTERM. A waiting collective then reports the rank that it was waiting for.
            signal_hook::flag::register(signal_hook::consts::SIGTERM, Arc::clone(&shutdown.terminated))
                .map_err(|e| Error::invalid(op, format!("SIGTERM cannot be watched: {e}")))?;
        }
        let machine = world.split_shared(world.rank());
        let node = connect_machine(&world, &machine).map(Rc::new);
        let local_rank = machine.rank() as usize;
        let mut position = Position { rank, size, local_rank, slice_bytes: 0, next_context: 1 };
        world.all_reduce_into(&default_slice_bytes(), &mut position.slice_bytes, SystemOperation::min());
        Ok(Mpi { position, timeout, shutdown, left: HashMap::new(), node, world, _universe: universe })
    }

    /// Returns a fault if one of these ranks has left the job, or if the timeout has passed.
    fn check_fault(&mut self, waiting_for: &[usize], since: Instant) -> Option<Fault> {
        while let Some(message) = self.world.any_process().immediate_probe_with_tag(LEAVE_TAG) {
            let mut text = vec![0u8; message.count(u8::equivalent_datatype()) as usize];
            let from = message.source_rank();
            self.world.process_at_rank(from).receive_into_with_tag(&mut text[..], LEAVE_TAG);
            let why = String::from_utf8_lossy(&text).into_owned();
            self.left.entry(from as usize).or_insert(why); // later reasons follow from the first
        }
        if let Some((&rank, why)) = self.left.iter().find(|(rank, _)| waiting_for.contains(rank)) {
            return Some(Fault { rank, reason: why.clone() });
        }
        let rank = waiting_for[0];
        (since.elapsed() > self.timeout).then(|| Fault { rank, reason: timeout_reason(self.timeout) })
    }

    /// Yields or sleeps after a poll. `moved`: the poll made progress. Regularly checks whether one of the `pending` ranks has left the job.
    fn wait(&mut self, call: Call, waiting: &mut Waiting, moved: bool, pending: impl Fn() -> Vec<usize>) {
        // Messages that a rank sent before it left still arrive. So the fault counts only once a poll makes no progress.
        if let Some(Fault { rank, reason }) = waiting.fault.take().filter(|f| !moved && pending().contains(&f.rank)) {
            self.exit_process(&format!("{}: rank {rank} {reason}", call.op));
        }
        if moved {
            waiting.last_progress = Instant::now();
        }
        match waiting.last_progress.elapsed() < if threads() == 1 { SPIN_TIME } else { POLL_TIME } {
            true => std::thread::yield_now(),
            false => std::thread::sleep(SLEEP_TIME),
        }
        if waiting.last_check.elapsed() < SPIN_TIME {
            return;
        }
        waiting.last_check = Instant::now();
        let ranks = pending();
        if ranks.is_empty() {
            return; // all lanes are at the start of a phase, with no pending messages
        }
        if let Some(reason) = self.shutdown.reason() {
            self.exit_process(&format!("{reason} while {} was under way", call.op));
        }
        if self.shutdown.terminated.load(Relaxed) {
            self.exit_process(&format!("the job was ended while {} waited for rank {}", call.op, ranks[0]));
        }
        waiting.fault = self.check_fault(&ranks, waiting.since);
    }

    /// Exits the process without exit handlers; `mpirun` then ends the other ranks. MPI may still write to buffers of pending messages, so
    /// this function must not return. `MPI_Abort` may hang if several ranks call it, and exit handlers may wait.
    fn exit_process(&self, sentence: &str) -> ! {
        eprintln!("claystone: rank {} of {}: {sentence}", self.position.rank, self.position.size);
        signal_hook::low_level::exit(if self.shutdown.terminated.load(Relaxed) { 143 } else { 1 })
    }
}

/// Creates the rings between the ranks of this machine. `None` if they cannot share memory. Must be called on all ranks of the machine.
fn connect_machine(world: &SimpleCommunicator, machine: &SimpleCommunicator) -> Option<LocalNode> {
    let (ranks, rank) = (machine.size() as usize, machine.rank() as usize);
    let mut local_ranks = vec![0i32; ranks];
    machine.all_gather_into(&world.rank(), &mut local_ranks[..]);
    if std::env::var(SHARED_MEMORY_KEY).is_ok_and(|value| value == "0") {
        return None;
    }
    let mut most = 0;
    machine.all_reduce_into(&threads().min(MAX_LANES), &mut most, SystemOperation::min());
    let (lanes, words) = Rings::lanes(ranks, most)?; // the same result on all ranks of the machine
    let first = machine.process_at_rank(0);
    let created = (rank == 0).then(|| SharedMemory::create(words).ok()).flatten();
    // A path in /dev/shm is always shorter than this array.
    let mut path = [0u8; 256];
    if let Some(name) = created.as_ref().and_then(|(_, file)| file.path().to_str()).filter(|name| name.len() < 256) {
        path[..name.len()].copy_from_slice(name.as_bytes());
    }
    first.broadcast_into(&mut path[..]);
    let name = String::from_utf8_lossy(&path);
    let (own, file) = created.unzip();
    let memory = own.or_else(|| SharedMemory::open(Path::new(name.trim_end_matches('\0')), words).ok());
    // Rings are used only if all ranks of the machine have mapped the memory.
    let mut all = 0i32;
    machine.all_reduce_into(&i32::from(memory.is_some()), &mut all, SystemOperation::min());
    drop(file);
    if all == 0 && rank == 0 {
        tracing::warn!(
            "the ranks of this machine cannot share memory, because /dev/shm is full or missing: MPI carries their messages"
        );
    }
    let local_ranks = local_ranks.into_iter().enumerate().map(|(number, rank)| (rank as usize, number)).collect();
    let memory = memory.filter(|_| all == 1)?;
    Some(LocalNode { rings: Rings::new(memory, ranks, rank, lanes), local_ranks })
}

/// A message that is not complete yet.
enum Pending<'a, 'r, 's> {
    /// An MPI request. A receive also has the expected number of bytes.
    Mpi(Request<'s, [u8], &'r LocalScope<'s>>, Option<usize>),
    Sending(&'a Rings, usize, &'a [u8], Progress),
    Receiving(&'a Rings, usize, &'a mut [u8], Progress),
}

impl Pending<'_, '_, '_> {
    /// Continues the message. Returns whether there was progress, and the message itself if it is still incomplete.
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

/// The state of waiting for other ranks.
struct Waiting {
    since: Instant,
    /// The time of the last progress, and of the last check for ranks that have left the job.
    last_progress: Instant,
    last_check: Instant,
    fault: Option<Fault>,
}

impl Waiting {
    fn begin() -> Waiting {
        let since = Instant::now();
        Waiting { since, last_progress: since, last_check: since, fault: None }
    }
}

impl Transport for Mpi {
    fn position(&mut self) -> &mut Position {
        &mut self.position
    }

    fn exchange(
        &mut self,
        call: Call,
        sends: &[(usize, &[u8])],
        receives: &mut [(usize, &mut [u8])],
    ) -> Result<(), Fault> {
        let tag = call.context as i32 + 1;
        let (world, local_node) = (Rc::clone(&self.world), self.node.clone());
        let local_node = |rank: &usize| {
            local_node.as_deref().and_then(|local_node| Some((&local_node.rings, *local_node.local_ranks.get(rank)?)))
        };
        scope(|scope| {
            let mut pending: Vec<(usize, Pending)> = Vec::with_capacity(sends.len() + receives.len());
            for (from, into) in receives.iter_mut() {
                let receive = match local_node(from) {
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
                let send = match local_node(to) {
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
                        Err(what) => {
                            self.exit_process(&format!("{}: rank {rank} {what}: {SAME_CALLS_ADVICE}", call.op))
                        }
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
        let local_node = self.node.as_ref()?;
        ranks.iter().all(|rank| local_node.local_ranks.contains_key(rank)).then_some(self)
    }

    fn leave(&mut self, why: &str) {
        let why = self.shutdown.reason().unwrap_or_else(|| why.into());
        for other in (0..self.position.size).filter(|&other| other != self.position.rank) {
            self.world.process_at_rank(other as i32).send_with_tag(why.as_bytes(), LEAVE_TAG);
        }
    }
}

impl Lanes for Mpi {
    fn count(&self) -> usize {
        self.node.as_ref().map_or(1, |local_node| local_node.rings.lanes)
    }

    /// Runs lanes on the thread pool. A lane without progress returns after [`SPIN_TIME`], so that this thread can check for ranks that left.
    fn exchange(&mut self, call: Call, plan: &Plan, lanes: Vec<Lane>) -> Result<(), Fault> {
        let Some(local_node) = self.node.clone() else { return Ok(()) };
        let LocalNode { rings, local_ranks } = &*local_node;
        let plan = &plan.map_ranks(|rank| local_ranks[&rank]);
        let rank_of = |number: usize| local_ranks.iter().find(|(_, n)| **n == number).map_or(number, |(rank, _)| *rank);
        let mut lanes: Vec<Mutex<RunningLane>> =
            lanes.into_iter().enumerate().map(|(i, lane)| Mutex::new(RunningLane::new(lane, i))).collect();
        let mut waiting = Waiting::begin();
        loop {
            if waiting.last_progress.elapsed() < SPIN_TIME || waiting.fault.is_some() {
                parallel::for_each_in_order(lanes.len(), 1, |i| {
                    lock(&lanes[i]).run(rings, call.context, plan, SPIN_TIME);
                });
            } else {
                // While other ranks are late, only this thread polls, so the pool's threads are free for other work.
                lanes.iter().any(|lane| lock(lane).step(rings, call.context, plan));
            }
            let mut moved = false;
            lanes.retain_mut(|lane| {
                let mut lane = lock(lane);
                moved |= std::mem::take(&mut lane.moved);
                if let Some((number, what)) = &lane.mismatch {
                    self.exit_process(&format!("{}: rank {} {what}: {SAME_CALLS_ADVICE}", call.op, rank_of(*number)));
                }
                !lane.is_done(plan)
            });
            if lanes.is_empty() {
                return Ok(());
            }
            let pending = || lanes.iter().flat_map(|lane| lock(lane).waits_for(plan)).map(rank_of).collect();
            self.wait(call, &mut waiting, moved, pending);
        }
    }
}

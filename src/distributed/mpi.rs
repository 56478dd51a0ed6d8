//! Ranks that are processes of a job under `mpirun`. MPI is used on one thread only, the rank's [`Engine`]. Ranks of one machine
//! send each other messages through memory that they share, on several threads where they have as many.

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
use super::lanes::Running;
use super::plan::{Lane, Plan};
use super::rings::{Progress, Rings};
use super::threads::{SAME_CALLS, did_not_come};
use super::transport::{Call, Fault, Lanes, Transport, suitable_slice};
use crate::device::cpu::{parallel, threads};
use crate::device::profiler::at_exit;
use crate::storage::SharedMemory;
use crate::{Error, Result};

/// Set to 0, for all ranks, it has those of one machine send each other messages through MPI too.
const SHARED_MEMORY: &str = "CLAYSTONE_DISTRIBUTED_SHARED_MEMORY";

/// The tag of the message that a rank leaves; groups' contexts come after it.
const LEAVES: i32 = 0;

/// How long all threads of a rank poll, before only one polls and looks for ranks that have left.
const PATIENCE: Duration = Duration::from_micros(200);

/// How long that thread polls before it sleeps between polls, where a rank has several cores: on one core the other ranks need it.
const LONG_PATIENCE: Duration = Duration::from_millis(2);

/// Threads of a rank that exchange with others at a time, at most: few enough that every rank of a machine with several GPUs has them.
const LANES: usize = 8;

/// How long it sleeps at a time.
const NAP: Duration = Duration::from_micros(50);

/// What a panicking thread leaves is whole: nothing under the locks panics but a lane, which ends the engine.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Set when the rank is to end, by itself or by `mpirun`.
#[derive(Clone, Default)]
struct Ends {
    /// SIGTERM has come, with which `mpirun` ends the ranks of a job that one has died of.
    terminated: Arc<AtomicBool>,
    /// Why this rank gives up.
    gives_up: Arc<Mutex<Option<String>>>,
}

impl Ends {
    fn reason(&self) -> Option<String> {
        locked(&self.gives_up).clone()
    }
}

/// The one engine of the process, until its end: MPI ends with it, and does not begin again.
static ENGINE: Mutex<Option<Arc<Engine>>> = Mutex::new(None);

pub(super) fn engine(op: &'static str, timeout: Duration) -> Result<Arc<Engine>> {
    let mut engine = locked(&ENGINE);
    if let Some(engine) = &*engine {
        return Ok(Arc::clone(engine));
    }
    let ends = Ends::default();
    let of_transport = ends.clone();
    let made = Engine::start(
        op,
        move || Mpi::start(op, of_transport, timeout),
        move |why| {
            locked(&ends.gives_up).get_or_insert_with(|| why.into());
        },
    )?;
    at_exit(end);
    Ok(Arc::clone(engine.insert(made)))
}

/// Groups that a thread still has, or a static, are of no use any more.
extern "C" fn end() {
    if let Some(engine) = locked(&ENGINE).take() {
        engine.end();
    }
}

/// The number of this process among those of its machine.
static LOCAL_RANK: OnceLock<usize> = OnceLock::new();

pub(super) fn local_rank() -> usize {
    LOCAL_RANK.get().copied().unwrap_or_default()
}

/// The rings between the ranks of this machine.
struct Near {
    rings: Rings,
    /// The number on the machine of each of its ranks.
    numbers: HashMap<usize, usize>,
}

struct Mpi {
    world: Rc<SimpleCommunicator>,
    rank: usize,
    size: usize,
    slice: usize,
    next_context: u32,
    timeout: Duration,
    ends: Ends,
    /// Ranks that have left, and why.
    left: HashMap<usize, String>,
    near: Option<Rc<Near>>,
    /// Ends MPI when dropped, after the communicator.
    _universe: Universe,
}

impl Mpi {
    fn start(op: &'static str, ends: Ends, timeout: Duration) -> Result<Mpi> {
        let started = ::mpi::initialize_with_threading(Threading::Funneled);
        let Some((universe, _)) = started else {
            return Err(Error::invalid(op, "MPI has been started in this process by someone else, or has ended"));
        };
        let world = Rc::new(universe.world());
        let (rank, size) = (world.rank() as usize, world.size() as usize);
        if size > 1 {
            // With which `mpirun` ends a job: the next collective says what it waited for.
            signal_hook::flag::register(signal_hook::consts::SIGTERM, Arc::clone(&ends.terminated))
                .map_err(|e| Error::invalid(op, format!("SIGTERM cannot be watched: {e}")))?;
        }
        let near = near(&world).map(Rc::new);
        let mut slice = 0;
        world.all_reduce_into(&suitable_slice(), &mut slice, SystemOperation::min());
        Ok(Mpi {
            rank,
            size,
            slice,
            next_context: 1,
            timeout,
            ends,
            left: HashMap::new(),
            near,
            world,
            _universe: universe,
        })
    }

    /// Why nothing comes of waiting for these ranks.
    fn fault(&mut self, waiting_for: &[usize], since: Instant) -> Option<Fault> {
        while let Some(message) = self.world.any_process().immediate_probe_with_tag(LEAVES) {
            let mut text = vec![0u8; message.count(u8::equivalent_datatype()) as usize];
            let from = message.source_rank();
            self.world.process_at_rank(from).receive_into_with_tag(&mut text[..], LEAVES);
            let why = String::from_utf8_lossy(&text).into_owned();
            self.left.entry(from as usize).or_insert(why); // the first says most
        }
        if let Some((&rank, why)) = self.left.iter().find(|(rank, _)| waiting_for.contains(rank)) {
            return Some(Fault { rank, reason: why.clone() });
        }
        let rank = waiting_for[0];
        (since.elapsed() > self.timeout).then(|| Fault { rank, reason: did_not_come(self.timeout) })
    }

    /// Waits a moment for ranks, and looks now and then whether that makes sense. `moved` says whether anything has come since the
    /// last time, `pending` what ranks it still waits for.
    fn wait(&mut self, call: Call, waiting: &mut Waiting, moved: bool, pending: impl Fn() -> Vec<usize>) {
        // What a rank sent before it left has been read once nothing moves any more.
        if let Some(Fault { rank, reason }) = waiting.fault.take().filter(|f| !moved && pending().contains(&f.rank)) {
            self.end(&format!("{}: rank {rank} {reason}", call.op));
        }
        if moved {
            waiting.came = Instant::now();
        }
        match waiting.came.elapsed() < if threads() == 1 { PATIENCE } else { LONG_PATIENCE } {
            true => std::thread::yield_now(),
            false => std::thread::sleep(NAP),
        }
        if waiting.looked.elapsed() < PATIENCE {
            return;
        }
        waiting.looked = Instant::now();
        let ranks = pending();
        if ranks.is_empty() {
            return; // a lane has just come to its next phase
        }
        if let Some(reason) = self.ends.reason() {
            self.end(&format!("{reason} while {} was under way", call.op));
        }
        if self.ends.terminated.load(Relaxed) {
            self.end(&format!("the job was ended while {} waited for rank {}", call.op, ranks[0]));
        }
        waiting.fault = self.fault(&ranks, waiting.since);
    }

    /// Ends the process, for buffers that others may still write to cannot be taken back, and so the job: `mpirun` ends the other
    /// ranks. At once, without `MPI_Abort`, which of several ranks at a time may hang, and without what an exit waits for.
    fn end(&self, sentence: &str) -> ! {
        eprintln!("claystone: rank {} of {}: {sentence}", self.rank, self.size);
        signal_hook::low_level::exit(if self.ends.terminated.load(Relaxed) { 143 } else { 1 })
    }
}

/// The rings between the ranks of this machine. All ranks call it.
fn near(world: &SimpleCommunicator) -> Option<Near> {
    let machine = world.split_shared(world.rank());
    let (ranks, rank) = (machine.size() as usize, machine.rank() as usize);
    let _ = LOCAL_RANK.set(rank); // MPI starts once
    let mut numbers = vec![0i32; ranks];
    machine.all_gather_into(&world.rank(), &mut numbers[..]);
    if std::env::var(SHARED_MEMORY).is_ok_and(|value| value == "0") {
        return None;
    }
    let mut most = 0;
    machine.all_reduce_into(&threads().min(LANES), &mut most, SystemOperation::min());
    let (lanes, words) = Rings::lanes(ranks, most)?; // alike on all of them
    let first = machine.process_at_rank(0);
    let created = (rank == 0).then(|| SharedMemory::create(words).ok()).flatten();
    // A path of this machine: none is so long.
    let mut path = [0u8; 256];
    if let Some(name) = created.as_ref().and_then(|(_, file)| file.path().to_str()).filter(|name| name.len() < 256) {
        path[..name.len()].copy_from_slice(name.as_bytes());
    }
    first.broadcast_into(&mut path[..]);
    let name = String::from_utf8_lossy(&path);
    let (own, file) = created.unzip();
    let memory = own.or_else(|| SharedMemory::open(Path::new(name.trim_end_matches('\0')), words).ok());
    // All have them or none.
    let mut all = 0i32;
    machine.all_reduce_into(&i32::from(memory.is_some()), &mut all, SystemOperation::min());
    drop(file);
    if all == 0 && rank == 0 {
        tracing::warn!(
            "the ranks of this machine share no memory, /dev/shm is full or missing: MPI carries their messages"
        );
    }
    let numbers = numbers.into_iter().enumerate().map(|(number, rank)| (rank as usize, number)).collect();
    let memory = memory.filter(|_| all == 1)?;
    Some(Near { rings: Rings::new(memory, ranks, rank, lanes), numbers })
}

/// What a rank sends or receives, as far as it has come.
enum Pending<'a, 'r, 's> {
    /// With the bytes that are expected, of one that is received.
    Mpi(Request<'s, [u8], &'r LocalScope<'s>>, Option<usize>),
    Sending(&'a Rings, usize, &'a [u8], Progress),
    Receiving(&'a Rings, usize, &'a mut [u8], Progress),
}

impl Pending<'_, '_, '_> {
    /// Goes on with it: whether anything was done, and what is left to do.
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
                let left = (!progress.is_whole(bytes.len())).then_some(Pending::Sending(rings, to, bytes, progress));
                Ok((moved, left))
            }
            Pending::Receiving(rings, from, into, mut progress) => {
                let moved = rings.receive(from, 0, context, into, &mut progress)?;
                let is_whole = progress.is_whole(into.len());
                Ok((moved, (!is_whole).then_some(Pending::Receiving(rings, from, into, progress))))
            }
        }
    }
}

/// Waiting for other ranks.
struct Waiting {
    since: Instant,
    /// When something has come last, and when this rank has looked last for ranks that have left.
    came: Instant,
    looked: Instant,
    fault: Option<Fault>,
}

impl Waiting {
    fn begin() -> Waiting {
        let since = Instant::now();
        Waiting { since, came: since, looked: since, fault: None }
    }

    /// Whether something has come just now.
    fn is_fresh(&self) -> bool {
        self.came.elapsed() < PATIENCE
    }
}

impl Transport for Mpi {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn slice(&self) -> usize {
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
        let (world, near) = (Rc::clone(&self.world), self.near.clone());
        let near = |rank: &usize| near.as_deref().and_then(|near| Some((&near.rings, *near.numbers.get(rank)?)));
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
        let near = self.near.as_ref()?;
        ranks.iter().all(|rank| near.numbers.contains_key(rank)).then_some(self)
    }

    fn leave(&mut self, why: &str) {
        let why = self.ends.reason().unwrap_or_else(|| why.into());
        for other in (0..self.size).filter(|&other| other != self.rank) {
            self.world.process_at_rank(other as i32).send_with_tag(why.as_bytes(), LEAVES);
        }
    }
}

impl Lanes for Mpi {
    fn count(&self) -> usize {
        self.near.as_ref().map_or(1, |near| near.rings.lanes)
    }

    /// Lanes are pieces of work of this thread and those that help it. None waits for long: what is stuck comes back here, where ranks
    /// that have left are looked for.
    fn exchange(&mut self, call: Call, plan: &Plan, lanes: Vec<Lane>) -> Result<(), Fault> {
        let Some(near) = self.near.clone() else { return Ok(()) };
        let Near { rings, numbers } = &*near;
        let plan = &plan.between(|rank| numbers[&rank]);
        let rank_of = |number: usize| numbers.iter().find(|(_, n)| **n == number).map_or(number, |(rank, _)| *rank);
        let mut lanes: Vec<Mutex<Running>> =
            lanes.into_iter().enumerate().map(|(i, lane)| Mutex::new(Running::new(lane, i))).collect();
        let mut waiting = Waiting::begin();
        loop {
            if waiting.is_fresh() || waiting.fault.is_some() {
                parallel::for_each_in_order(lanes.len(), 1, |i| {
                    locked(&lanes[i]).go_on(rings, call.context, plan, PATIENCE);
                });
            } else {
                // The other threads have better things to do until the ranks have come.
                lanes.iter().any(|lane| locked(lane).step(rings, call.context, plan));
            }
            let mut moved = false;
            lanes.retain_mut(|lane| {
                let mut lane = locked(lane);
                moved |= std::mem::take(&mut lane.moved);
                if let Some((number, what)) = &lane.wrong {
                    self.end(&format!("{}: rank {} {what}: {SAME_CALLS}", call.op, rank_of(*number)));
                }
                !lane.is_through(plan)
            });
            if lanes.is_empty() {
                return Ok(());
            }
            let pending = || lanes.iter().flat_map(|lane| locked(lane).waits_for(plan)).map(rank_of).collect();
            self.wait(call, &mut waiting, moved, pending);
        }
    }
}

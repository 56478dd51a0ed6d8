//! The same under `mpirun`: this program starts itself again as processes that are ranks.

use std::process::{Command, Output};
use std::sync::OnceLock;

use claystone::Tensor;
use claystone::distributed::{DataParallel, DataParallelOptions, Group, ReduceOp};
use claystone::nn::{Linear, Module};

/// Set in such processes.
const RANKS: &str = "CLAYSTONE_TEST_RANKS";

/// The ranks of the job, in a process that is one. As long as the process: it ends with [`the_end`].
pub fn world() -> Option<&'static Group> {
    static WORLD: OnceLock<Group> = OnceLock::new();
    std::env::var_os(RANKS)?;
    Some(WORLD.get_or_init(|| Group::world().unwrap()))
}

/// Runs tests of this program on so many ranks.
fn mpirun(ranks: usize, arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    Command::new("mpirun")
        .args(["--allow-run-as-root", "--oversubscribe", "--timeout", "300", "-n", &ranks.to_string()])
        // Seconds from SIGTERM to SIGKILL, for a rank to say its sentence on a machine with much else to do.
        .args(["--mca", "odls_base_sigkill_timeout", "3"])
        .arg(std::env::current_exe().unwrap())
        .args(["--test-threads", "1", "--nocapture"])
        .args(arguments)
        .env(RANKS, "1")
        .envs(environment.iter().copied())
        .output()
        .expect("mpirun: install openmpi-bin")
}

#[test]
fn collectives_between_processes() {
    if world().is_some() {
        return;
    }
    // With several threads a rank has several lanes.
    let lanes = [("RAYON_NUM_THREADS", "4"), ("CLAYSTONE_DEVICES", "none"), ("CLAYSTONE_DISTRIBUTED_DEBUG", "1")];
    on_all_ranks(5, &["collectives::"], &lanes, 9);
    on_all_ranks(5, &["collectives::"], &[("CLAYSTONE_DISTRIBUTED_SHARED_MEMORY", "0")], 9);
}

#[test]
fn processes_train_as_one() {
    if world().is_some() {
        return;
    }
    // Debugging compares all calls, and finds none that differs.
    let debug = [("CLAYSTONE_DISTRIBUTED_DEBUG", "1")];
    on_all_ranks(4, &["training::", "sync_batch_norm::", "--skip", "are_named"], &debug, 13);
}

#[test]
fn processes_divide_optimisers_and_save_together() {
    if world().is_some() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let environment =
        [("CLAYSTONE_DISTRIBUTED_DEBUG", "1"), (crate::checkpoint::FOLDER, folder.path().to_str().unwrap())];
    on_all_ranks(4, &["zero::", "checkpoint::a_job", "checkpoint::whole"], &environment, 18);
}

/// Every rank passes so many tests.
fn on_all_ranks(ranks: usize, arguments: &[&str], environment: &[(&str, &str)], tests: usize) {
    let output = mpirun(ranks, arguments, environment);
    assert!(output.status.success(), "{output:?}");
    // The status says that all passed. This line is written at once, those of results in parts that the ranks' mix.
    let (text, running) = (String::from_utf8_lossy(&output.stdout), format!("running {tests} tests\n"));
    assert_eq!(text.matches(&running).count(), ranks, "{text}");
}

/// What rank 1 does instead of its fifth call, in the processes that the test below starts.
const FAULT: &str = "CLAYSTONE_TEST_FAULT";

#[test]
fn rank_1_fails() {
    let (Some(world), Ok(fault)) = (world(), std::env::var(FAULT)) else { return };
    let group = world.clone(); // dropped while it panics
    let x = Tensor::ones(100_000, group.device()).unwrap();
    for call in 0..10 {
        match (&*fault, group.rank(), call) {
            ("panic", 1, 5) => panic!("as the test wants"),
            ("leave", 1, 5) => return,
            ("other", 1, 5) => group.broadcast(&x, 0).unwrap(),
            _ => group.all_reduce(&x, ReduceOp::Mean).unwrap(),
        }
    }
}

#[test]
fn a_job_ends_with_a_sentence_when_a_rank_fails() {
    if world().is_some() {
        return;
    }
    let debug = [("CLAYSTONE_DISTRIBUTED_DEBUG", "1"), ("CLAYSTONE_DEVICES", "none")];
    for (fault, sentences) in [
        ("panic", &["all_reduce", "rank 1", "panicked"][..]),
        ("leave", &["all_reduce", "rank 1", "has left the group"]),
        ("other", &["broadcast of f32 [100000] root 0", "all_reduce of f32 [100000] Mean"]),
    ] {
        let environment = [debug[0], debug[1], (FAULT, fault)];
        let output = mpirun(3, &["--exact", "mpi::rank_1_fails"], &environment[usize::from(fault != "other")..]);
        ends_with(fault, sentences, &output);
    }
}

fn ends_with(fault: &str, sentences: &[&str], output: &Output) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{fault}: {output:?}");
    assert!(sentences.iter().all(|part| text.contains(part)), "{fault}: {text}");
    assert!(!text.contains("exceeded"), "{fault}: mpirun had to end the job: {text}");
}

/// What the other ranks wait in when rank 1 is killed before it, and how they call it.
type Call = (&'static str, fn(&Group, &Tensor) -> claystone::Result<()>);

const CALLS: [Call; 10] = [
    ("all_reduce", |group, x| group.all_reduce(x, ReduceOp::Sum)),
    ("broadcast", |group, x| group.broadcast(x, 1)),
    ("all_gather", |group, x| group.all_gather(x).map(drop)),
    ("reduce_scatter", |group, x| group.reduce_scatter(x, ReduceOp::Max).map(drop)),
    ("all_to_all", |group, x| group.all_to_all(x).map(drop)),
    ("split", |group, _| group.split(Some(0), 0).map(drop)),
    ("recv", |group, x| group.recv(x, 1)),
    ("send", |group, x| group.send(x, 1)),
    // The barrier is an all_reduce of nothing.
    ("all_reduce", |group, _| group.barrier()),
    ("all_reduce", |group, x| {
        let net = Linear::new(100, 100, group.device())?;
        let net = DataParallel::new(net, group, DataParallelOptions::default())?;
        let loss = net.forward(&x.narrow(0, 0, 300)?.reshape([3, 100])?)?.sum((), false)?;
        // Only now, so that the others are in backward.
        killed_if_1(group);
        loss.backward()
    }),
];

fn killed_if_1(group: &Group) {
    if group.rank() == 1 {
        let own = std::process::id().to_string();
        Command::new("kill").args(["-9", &own]).status().unwrap();
    }
}

#[test]
fn rank_1_is_killed() {
    let (Some(group), Ok(call)) = (world(), std::env::var(FAULT)) else { return };
    let call: usize = call.parse().unwrap();
    let x = Tensor::ones(3_000_000, group.device()).unwrap();
    for _ in 0..3 {
        group.all_reduce(&x, ReduceOp::Mean).unwrap();
    }
    if call < CALLS.len() - 1 {
        killed_if_1(group);
    }
    CALLS[call].1(group, &x).unwrap();
}

#[test]
fn a_job_ends_with_a_sentence_wherever_a_rank_is_killed() {
    if world().is_some() {
        return;
    }
    for (call, (op, _)) in CALLS.iter().enumerate() {
        let call = call.to_string();
        let environment = [(FAULT, &*call), ("CLAYSTONE_DEVICES", "none"), ("RAYON_NUM_THREADS", "3")];
        let output = mpirun(3, &["--exact", "mpi::rank_1_is_killed"], &environment);
        ends_with(&call, &[&format!("{op} waited for rank 1")], &output);
    }
}

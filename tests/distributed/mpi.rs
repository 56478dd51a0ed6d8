//! Runs the same tests under `mpirun`: this program starts itself as several processes, one per rank.

use std::process::{Command, Output};
use std::sync::OnceLock;

use claystone::Tensor;
use claystone::distributed::{DataParallel, DataParallelOptions, Group, ReduceOp};
use claystone::nn::{Linear, Module};

/// The environment variable that is set in processes started by `mpirun`.
const RANKS_VARIABLE: &str = "CLAYSTONE_TEST_RANKS";

/// Returns the group of all ranks in a process started by `mpirun`, else `None`. The group lives until the process ends with [`the_end`].
pub fn world() -> Option<&'static Group> {
    static WORLD: OnceLock<Group> = OnceLock::new();
    std::env::var_os(RANKS_VARIABLE)?;
    Some(WORLD.get_or_init(|| Group::world().unwrap()))
}

/// Runs the tests of this program on a number of ranks under `mpirun`.
fn mpirun(ranks: usize, arguments: &[&str], environment: &[(&str, &str)]) -> Output {
    Command::new("mpirun")
        .args(["--allow-run-as-root", "--oversubscribe", "--timeout", "300", "-n", &ranks.to_string()])
        // The seconds between SIGTERM and SIGKILL, so that a rank on a busy machine has time to print its error.
        .args(["--mca", "odls_base_sigkill_timeout", "3"])
        .arg(std::env::current_exe().unwrap())
        .args(["--test-threads", "1", "--nocapture"])
        .args(arguments)
        .env(RANKS_VARIABLE, "1")
        .envs(environment.iter().copied())
        .output()
        .expect("mpirun: install openmpi-bin")
}

#[test]
fn collectives_work_between_processes() {
    if world().is_some() {
        return;
    }
    // With several threads, each rank exchanges messages on several lanes.
    let lanes = [("RAYON_NUM_THREADS", "4"), ("CLAYSTONE_DEVICES", "none"), ("CLAYSTONE_DISTRIBUTED_DEBUG", "1")];
    on_all_ranks(5, &["collectives::"], &lanes, 9);
    on_all_ranks(5, &["collectives::"], &[("CLAYSTONE_DISTRIBUTED_SHARED_MEMORY", "0")], 9);
}

#[test]
fn processes_train_like_one() {
    if world().is_some() {
        return;
    }
    // The debug mode compares all calls between the ranks. It must not report a difference.
    let debug = [("CLAYSTONE_DISTRIBUTED_DEBUG", "1")];
    on_all_ranks(4, &["training::", "sync_batch_norm::", "--skip", "are_named"], &debug, 13);
}

#[test]
fn processes_shard_optimizers_and_save_together() {
    if world().is_some() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let environment =
        [("CLAYSTONE_DISTRIBUTED_DEBUG", "1"), (crate::checkpoint::FOLDER, folder.path().to_str().unwrap())];
    on_all_ranks(4, &["zero::", "checkpoint::jobs", "checkpoint::whole"], &environment, 18);
}

/// Checks that every rank runs and passes the given number of tests.
fn on_all_ranks(ranks: usize, arguments: &[&str], environment: &[(&str, &str)], tests: usize) {
    let output = mpirun(ranks, arguments, environment);
    assert!(output.status.success(), "{output:?}");
    // The exit status shows that all tests passed. This line is printed in a single write, but result lines of several ranks may mix.
    let (text, running) = (String::from_utf8_lossy(&output.stdout), format!("running {tests} tests\n"));
    assert_eq!(text.matches(&running).count(), ranks, "{text}");
}

/// The environment variable with the fault of rank 1 in child processes: how its fifth call fails, or the call during which it dies.
const FAULT_VARIABLE: &str = "CLAYSTONE_TEST_FAULT";

#[test]
fn rank_1_fails() {
    let (Some(world), Ok(fault)) = (world(), std::env::var(FAULT_VARIABLE)) else { return };
    let group = world.clone(); // this clone is dropped while the thread panics
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
fn jobs_end_with_a_clear_error_if_a_rank_fails() {
    if world().is_some() {
        return;
    }
    let debug = [("CLAYSTONE_DISTRIBUTED_DEBUG", "1"), ("CLAYSTONE_DEVICES", "none")];
    for (fault, sentences) in [
        ("panic", &["all_reduce", "rank 1", "panicked"][..]),
        ("leave", &["all_reduce", "rank 1", "has left the group"]),
        ("other", &["broadcast of f32 [100000] root 0", "all_reduce of f32 [100000] Mean"]),
    ] {
        let environment = [debug[0], debug[1], (FAULT_VARIABLE, fault)];
        let output = mpirun(3, &["--exact", "mpi::rank_1_fails"], &environment[usize::from(fault != "other")..]);
        assert_stderr_contains(fault, sentences, &output);
    }
}

fn assert_stderr_contains(fault: &str, sentences: &[&str], output: &Output) {
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{fault}: {output:?}");
    assert!(sentences.iter().all(|part| text.contains(part)), "{fault}: {text}");
    assert!(!text.contains("exceeded"), "{fault}: mpirun had to end the job: {text}");
}

/// The operation's name in errors, and a collective in which the other ranks wait for rank 1, which was killed.
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
    // A barrier is an all_reduce of an empty tensor, so the error names all_reduce.
    ("all_reduce", |group, _| group.barrier()),
    ("all_reduce", |group, x| {
        let net = Linear::new(100, 100, group.device())?;
        let net = DataParallel::new(net, group, DataParallelOptions::default())?;
        let loss = net.forward(&x.narrow(0, 0, 300)?.reshape([3, 100])?)?.sum((), false)?;
        // Rank 1 dies here, while the other ranks are in backward.
        kill_rank_1(group);
        loss.backward()
    }),
];

fn kill_rank_1(group: &Group) {
    if group.rank() == 1 {
        let own = std::process::id().to_string();
        Command::new("kill").args(["-9", &own]).status().unwrap();
    }
}

#[test]
fn rank_1_is_killed() {
    let (Some(group), Ok(call)) = (world(), std::env::var(FAULT_VARIABLE)) else { return };
    let call: usize = call.parse().unwrap();
    let x = Tensor::ones(3_000_000, group.device()).unwrap();
    for _ in 0..3 {
        group.all_reduce(&x, ReduceOp::Mean).unwrap();
    }
    if call < CALLS.len() - 1 {
        kill_rank_1(group);
    }
    CALLS[call].1(group, &x).unwrap();
}

#[test]
fn jobs_end_with_a_clear_error_if_a_rank_is_killed() {
    if world().is_some() {
        return;
    }
    for (call, (op, _)) in CALLS.iter().enumerate() {
        let call = call.to_string();
        // In the debug mode, a rank that `mpirun` ends prints the call that it was waiting in.
        let debug = ("CLAYSTONE_DISTRIBUTED_DEBUG", "1");
        let environment = [(FAULT_VARIABLE, &*call), ("CLAYSTONE_DEVICES", "none"), ("RAYON_NUM_THREADS", "3"), debug];
        let output = mpirun(3, &["--exact", "mpi::rank_1_is_killed"], &environment);
        assert_stderr_contains(&call, &[&format!("{op} waited for rank 1")], &output);
    }
}

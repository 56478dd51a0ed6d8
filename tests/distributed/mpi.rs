//! The same under `mpirun`: this program starts itself again as processes that are ranks.

use std::process::{Command, Output};
use std::sync::OnceLock;

use claystone::Tensor;
use claystone::distributed::{Group, ReduceOp};

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
    on_all_ranks(5, &["collectives::"], &[("CLAYSTONE_DEVICES", "none"), ("CLAYSTONE_DISTRIBUTED_DEBUG", "1")], 9);
    on_all_ranks(5, &["collectives::"], &[], 9);
}

#[test]
fn processes_train_as_one() {
    if world().is_some() {
        return;
    }
    on_all_ranks(4, &["training::", "--skip", "are_named"], &[], 7);
}

/// Every rank passes so many tests.
fn on_all_ranks(ranks: usize, arguments: &[&str], environment: &[(&str, &str)], tests: usize) {
    let output = mpirun(ranks, arguments, environment);
    assert!(output.status.success(), "{output:?}");
    let (text, passed) = (String::from_utf8_lossy(&output.stdout), format!("test result: ok. {tests} passed"));
    assert_eq!(text.matches(&passed).count(), ranks, "{text}");
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
            ("kill", 1, 5) => {
                let own = std::process::id().to_string();
                Command::new("kill").args(["-9", &own]).status().unwrap();
            }
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
        ("kill", &["all_reduce waited for rank 1"]),
        ("leave", &["all_reduce", "rank 1", "has left the group"]),
        ("other", &["broadcast of f32 [100000] root 0", "all_reduce of f32 [100000] Mean"]),
    ] {
        let environment = [debug[0], debug[1], (FAULT, fault)];
        let output = mpirun(3, &["--exact", "mpi::rank_1_fails"], &environment[usize::from(fault != "other")..]);
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{fault}: {output:?}");
        assert!(sentences.iter().all(|part| text.contains(part)), "{fault}: {text}");
        assert!(!text.contains("exceeded"), "{fault}: mpirun had to end the job: {text}");
    }
}

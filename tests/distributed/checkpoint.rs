use std::ops::Range;
use std::path::{Path, PathBuf};

use claystone::distributed::{
    self, DataParallel, Group, ZeroRedundancyOptimizer, load_checkpoint, save_checkpoint, save_sharded_checkpoint,
};
use claystone::io::Stateful;
use claystone::nn::Module;
use claystone::optim::{AdamW, AdamWConfig, Optimizer, Scheduler, StepLr};
use claystone::{DType, Device, Error, Result, Tensor};

use crate::collectives::on_ranks;
use crate::training::{Net, losses_alone, losses_together, small_buckets};

/// A folder for one test. Processes started by `mpirun` use the same folder.
struct Folder {
    path: PathBuf,
    _temporary: Option<tempfile::TempDir>,
}

/// The environment variable with the parent folder, for processes started by `mpirun`.
pub const FOLDER: &str = "CLAYSTONE_TEST_FOLDER";

impl Folder {
    fn new(test: &str) -> Folder {
        match std::env::var_os(FOLDER) {
            Some(path) => {
                let path = Path::new(&path).join(test);
                std::fs::create_dir_all(&path).unwrap();
                Folder { path, _temporary: None }
            }
            None => {
                let temporary = tempfile::tempdir().unwrap();
                Folder { path: temporary.path().to_owned(), _temporary: Some(temporary) }
            }
        }
    }
}

fn adamw() -> AdamWConfig {
    AdamWConfig { lr: 0.02, ..Default::default() }
}

fn schedule() -> StepLr {
    StepLr { step_size: 1, gamma: 0.5 }
}

/// How the ranks of a job save their state.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Saved {
    /// Rank 0 saves, and every rank has an unsharded optimizer.
    Whole,
    /// Rank 0 gathers and saves an optimizer that is sharded over the ranks.
    Gathered,
    /// Every rank saves its shard of the optimizer.
    Sharded,
}

/// Returns the losses of a job's steps on some ranks. The job loads the checkpoint unless it starts at step 0, and saves one at its end.
fn run_job(ranks: usize, path: &Path, saved: Saved, steps: Range<usize>) -> Vec<f64> {
    let mut all = on_ranks(ranks, |group| {
        let net = Net::new(1 + group.rank() as u64, DType::F32, group.device())?;
        let mut net = DataParallel::new(net, group, small_buckets())?;
        match saved {
            Saved::Whole => {
                let optimizer = AdamW::new(net.parameters_mut(), adamw())?;
                resume_and_save(group, path, saved, steps.clone(), net, optimizer)
            }
            _ => {
                let make = |named: Vec<(String, &mut Tensor)>| AdamW::grouped(named, |_, _| adamw());
                let optimizer = ZeroRedundancyOptimizer::new(&mut net, make)?;
                resume_and_save(group, path, saved, steps.clone(), net, optimizer)
            }
        }
    });
    // Every rank has the mean of all ranks' losses. A process outside the group has no result.
    all.pop().map(|(_, losses)| losses).unwrap_or_default()
}

fn resume_and_save<O: Optimizer + Stateful>(
    group: &Group,
    path: &Path,
    saved: Saved,
    steps: Range<usize>,
    mut net: DataParallel<Net>,
    mut optimizer: O,
) -> Result<Vec<f64>> {
    let mut scheduler = Scheduler::new(&mut optimizer, schedule())?;
    let mut step = 0;
    if steps.start > 0 {
        load_checkpoint(
            path,
            &mut [
                ("model", &mut net),
                ("optimizer", &mut optimizer),
                ("scheduler", &mut scheduler),
                ("step", &mut step),
            ],
        )?;
    }
    assert_eq!(step, steps.start);
    let losses = losses_together(group, steps.clone(), DType::F32, &net, &mut optimizer)?;
    scheduler.step(&mut optimizer)?;
    let parts: &[(&str, &dyn Stateful)] =
        &[("model", &net), ("optimizer", &optimizer), ("scheduler", &scheduler), ("step", &steps.end)];
    match saved {
        Saved::Sharded => save_sharded_checkpoint(path, group, parts)?,
        _ => save_checkpoint(path, group, parts)?,
    }
    Ok(losses)
}

#[test]
fn jobs_resume_with_another_number_of_ranks() {
    // The reference is one process without interruption. It halves the learning rate every ten steps.
    let mut net = Net::new(1, DType::F32, Device::Cpu).unwrap();
    let mut optimizer = AdamW::new(net.parameters_mut(), adamw()).unwrap();
    let mut want = Vec::new();
    let mut scheduler = Scheduler::new(&mut optimizer, schedule()).unwrap();
    for leg in 0..4 {
        let steps = 10 * leg..10 * leg + 10;
        want.extend(losses_alone(steps, DType::F32, &net, &mut optimizer).unwrap());
        scheduler.step(&mut optimizer).unwrap();
    }
    let legs = [[1, 2, 4, 1], [4, 2, 1, 4]];
    for (i, saved) in [Saved::Whole, Saved::Gathered, Saved::Sharded].into_iter().enumerate() {
        for ranks in legs {
            let folder = Folder::new(&format!("legs-{i}-{}", ranks[0]));
            let path = folder.path.join(if saved == Saved::Sharded { "run" } else { "run.safetensors" });
            for (leg, ranks) in ranks.into_iter().enumerate() {
                let losses = run_job(ranks, &path, saved, 10 * leg..10 * leg + 10);
                for (step, (got, want)) in losses.iter().zip(&want[10 * leg..]).enumerate() {
                    assert!((got - want).abs() <= 1e-4, "{saved:?}, leg {leg} on {ranks}, {step}: {got}, {want}");
                }
            }
        }
    }
}

/// Unsharded and sharded optimizers can load each other's checkpoints, whichever way they were saved.
#[test]
fn whole_and_sharded_optimizers_share_checkpoints() {
    let legs = [(2, Saved::Whole), (4, Saved::Gathered), (1, Saved::Whole), (2, Saved::Gathered)];
    let folder = Folder::new("alike");
    let path = folder.path.join("run.safetensors");
    let got: Vec<f64> = legs
        .iter()
        .enumerate()
        .flat_map(|(leg, &(ranks, saved))| run_job(ranks, &path, saved, 5 * leg..5 * leg + 5))
        .collect();
    let folder = Folder::new("alike-alone");
    let path = folder.path.join("run.safetensors");
    let want: Vec<f64> = (0..4).flat_map(|leg| run_job(1, &path, Saved::Whole, 5 * leg..5 * leg + 5)).collect();
    if got.len() == want.len() {
        assert!(got.iter().zip(&want).all(|(got, want)| (got - want).abs() <= 1e-4), "{got:?}, {want:?}");
    }
}

/// Returns the sorted names of the files in a folder.
fn files(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[test]
fn folders_contain_the_last_complete_checkpoint() {
    let folder = Folder::new("last");
    let path = folder.path.join("run");
    run_job(2, &path, Saved::Sharded, 0..2);
    assert_eq!(files(&path), ["1-rank-0-of-2.safetensors", "1-rank-1-of-2.safetensors", "index.safetensors"]);
    // A folder with the name of rank 1's file makes this save fail on rank 1.
    std::fs::create_dir(path.join("2-rank-1-of-2.safetensors")).unwrap();
    let groups = Group::threads(&[Device::Cpu; 2]).unwrap();
    let save = |group: Group| save_sharded_checkpoint(&path, &group, &[("step", &7usize)]).unwrap_err().to_string();
    let message: Vec<String> = std::thread::scope(|scope| {
        let save = &save;
        let ranks: Vec<_> = groups.into_iter().map(|group| scope.spawn(move || save(group))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert!(message[0].contains("rank 1 failed"), "{message:?}");
    assert!(message[1].contains("2-rank-1-of-2.safetensors"), "{message:?}");
    std::fs::remove_dir(path.join("2-rank-1-of-2.safetensors")).unwrap();
    let mut step = 0usize;
    load_checkpoint(&path, &mut [("step", &mut step)]).unwrap();
    assert_eq!(step, 2);
    // The next save removes the old checkpoint and the files of the failed save, but does not touch the user's file.
    std::fs::write(path.join("predictions-rank-0.safetensors"), "mine").unwrap();
    run_job(1, &path, Saved::Sharded, 2..4);
    let want = ["2-rank-0-of-1.safetensors", "index.safetensors", "predictions-rank-0.safetensors"];
    assert_eq!(files(&path), want);
}

#[test]
fn missing_parts_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run");
    std::fs::create_dir(&path).unwrap();
    let load = |path: &Path| load_checkpoint(path, &mut [("step", &mut 0usize)]).unwrap_err().to_string();
    assert!(load(&path).contains("no checkpoint was completed there"), "{}", load(&path));
    let group = &Group::threads(&[Device::Cpu]).unwrap()[0];
    save_sharded_checkpoint(&path, group, &[("epoch", &3usize)]).unwrap();
    assert!(load(&path).contains("there is no part step"), "{}", load(&path));
    // The file has one part of a tensor, and the other parts are missing: loading must fail.
    let piece = [("step[0..2 of 3]".to_string(), Tensor::zeros(2, Device::Cpu).unwrap())].into_iter().collect();
    claystone::io::save(path.join("1-rank-0-of-1.safetensors"), &piece).unwrap();
    assert!(load(&path).contains("some parts of step are missing"), "{}", load(&path));
    std::fs::remove_file(path.join("1-rank-0-of-1.safetensors")).unwrap();
    assert!(load(&path).contains("1-rank-0-of-1.safetensors"), "{}", load(&path));
    let unwritable = folder.path().join("none").join("run.safetensors");
    let saved = distributed::save_checkpoint(unwritable, group, &[("epoch", &3usize)]);
    assert!(matches!(saved, Err(Error::Invalid { .. })));
}

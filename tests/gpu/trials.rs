//! Tuning of kernels by size during normal calls: calls try several kernels and keep the fastest. Tests run in child processes with
//! their own cache folders.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

use claystone::tune::{self, Level};
use claystone::{Device, Interpolation, Result, Tensor, device::count_launches};

use crate::common;

/// Environment variable that tells a child process its role.
const ROLE_VARIABLE: &str = "CLAYSTONE_TEST_CHOICES";
/// Environment variable with the path of the file that a child process exports or imports.
const FILE_VARIABLE: &str = "CLAYSTONE_TEST_CHOICES_FILE";

/// Runs a test of this file in a child process with the given role, cache folder, tuning level and file. Returns the tuning choices
/// that the child prints.
#[track_caller]
fn run_child(test: &str, role: &str, folder: &Path, level: &str, imported: &Path) -> BTreeSet<String> {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args([&format!("trials::{test}"), "--exact", "--nocapture"])
        .env(ROLE_VARIABLE, role)
        .env(FILE_VARIABLE, imported);
    let output = command.env("CLAYSTONE_CACHE_DIR", folder).env("CLAYSTONE_TUNING", level).output().unwrap();
    let text = [&output.stdout[..], &output.stderr].map(String::from_utf8_lossy).concat();
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
    text.lines().filter_map(|line| line.strip_prefix("chosen: ")).map(str::to_owned).collect()
}

fn is_role(role: &str) -> bool {
    std::env::var(ROLE_VARIABLE).is_ok_and(|is| is == role)
}

fn first_opencl_device() -> Option<Device> {
    common::devices().into_iter().find(|&device| device != Device::Cpu)
}

/// Returns the results of operations with tuned kernels, including in-place operations. Sizes are around the sizes of work-groups
/// and tiles.
fn results(n: usize, device: Device) -> Result<Vec<Tensor>> {
    let number = |shape: &[usize], below: usize| {
        let values = (0..shape.iter().product()).map(|i: usize| (i % below) as f32).collect::<Vec<f32>>();
        Tensor::from_vec(values, shape, device)
    };
    let (x, wide, image) = (number(&[n], 13)?, number(&[n, 17], 7)?, number(&[1, 1, n, 16], 11)?);
    let indices = x.to_dtype(claystone::DType::I64)?;
    let some = indices.narrow(0, 0, 13)?;
    let (sum, added) = (x.add(&x)?, Tensor::zeros([16, n], device)?);
    sum.add_(&x)?;
    added.index_add_(0, &some, &number(&[13, n], 5)?)?;
    Ok(vec![
        sum,
        added,
        x.narrow(0, 1, n - 1)?.mul_scalar(2.0)?,
        wide.t()?.contiguous()?,
        wide.sum(0, false)?,
        wide.sum(1, false)?,
        wide.softmax(1)?,
        wide.index_select(1, &some)?,
        wide.sort(1, false)?.0,
        image.max_pool2d([2, 2], Default::default())?,
        image.interpolate(&[2 * n, 8], Interpolation::Nearest)?,
        wide.matmul(&wide.t()?)?,
        wide.t()?.matmul(&wide)?,
        indices.one_hot(13)?,
        Tensor::arange(0, n as i64, 1, device)?,
    ])
}

/// While kernels are tried, results equal the CPU's, and calls take as many launches as without trials.
#[test]
fn trials_give_the_cpus_results() {
    let Some(device) = first_opencl_device() else { return };
    if !is_role("trials") {
        let folder = tempfile::tempdir().unwrap();
        run_child("trials_give_the_cpus_results", "trials", folder.path(), "none", Path::new(""));
        return;
    }
    let mut made = 0;
    for n in [63, 64, 65] {
        let right = results(n, Device::Cpu).unwrap();
        let (_, usual) = count_launches(|| results(n, device).unwrap());
        tune::set_level(device, Level::Normal).unwrap();
        let (mut rounds, mut begun) = (0, 1);
        while begun + tune::on_trial(device).unwrap() > 0 {
            begun = tune::on_trial(device).unwrap();
            let (got, launches) = count_launches(|| results(n, device).unwrap());
            assert_eq!(launches, usual);
            for (i, (got, right)) in got.iter().zip(&right).enumerate() {
                let got = got.to_device(Device::Cpu).unwrap();
                assert!(got.allclose(right, 1e-6, 0.0, false).unwrap(), "{i} of {n} on {device}: {got} for {right}");
            }
            rounds += 1;
            assert!(rounds < 5000, "{} trials do not end", tune::on_trial(device).unwrap());
        }
        // Repeating the same sizes does not start new trials.
        let chosen = tune::choices(device).unwrap();
        assert!(chosen.len() >= made && chosen.len() > 10, "{chosen:?}");
        results(n, device).unwrap();
        assert_eq!((tune::choices(device).unwrap(), tune::on_trial(device).unwrap()), (chosen.clone(), 0));
        made = chosen.len();
        tune::set_level(device, Level::None).unwrap();
    }
}

/// Other processes use the choices that one process saved. At level none, no kernel is tried and nothing is written.
#[test]
fn choices_are_used_by_other_processes() {
    let Some(device) = first_opencl_device() else { return };
    let print = || {
        let chosen = tune::choices(device).unwrap();
        chosen.iter().for_each(|choice| println!("chosen: {choice:?}"));
        chosen.len()
    };
    let add = || {
        let x = Tensor::ones([1000, 2], device).unwrap();
        assert_eq!(x.add(&x).unwrap().narrow(1, 1, 1).unwrap().exp().unwrap().sum((), false).unwrap().numel(), 1);
    };
    match std::env::var(ROLE_VARIABLE).unwrap_or_default().as_str() {
        "chooses" => {
            assert_eq!(tune::level(device).unwrap(), Level::Fast);
            (0..500).for_each(|_| add());
            assert_eq!(tune::on_trial(device).unwrap(), 0);
            assert!(print() > 0);
            device.export_cache(std::env::var(FILE_VARIABLE).unwrap()).unwrap();
        }
        "uses" => {
            assert_eq!(tune::level(device).unwrap(), Level::None);
            add();
            assert_eq!(tune::on_trial(device).unwrap(), 0);
            print();
        }
        "imports" => {
            assert_eq!(tune::choices(device).unwrap(), []);
            device.import_cache(std::env::var(FILE_VARIABLE).unwrap()).unwrap();
            assert!(print() > 0);
            tune::forget(device).unwrap();
            assert_eq!(tune::choices(device).unwrap(), []);
        }
        _ => {
            let this = "choices_are_used_by_other_processes";
            let [folder, other] = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
            let file = other.path().join("file");
            let chosen = run_child(this, "chooses", folder.path(), "fast", &file);
            for level in ["none", "", "a lot"] {
                assert_eq!(run_child(this, "uses", folder.path(), level, &file), chosen);
            }
            assert_eq!(run_child(this, "uses", other.path(), "none", &file), BTreeSet::new());
            assert_eq!(run_child(this, "imports", Path::new("off"), "", &file), chosen);
        }
    }
}

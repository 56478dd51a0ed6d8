//! Compares the cost of collectives with MPI's own collectives: `cargo bench --features mpi --bench distributed [-- all_reduce | overlap]`.
//!
//! This program starts itself under `mpirun` as two ranks with one core each. Jobs of the two libraries alternate. Prints medians.

use std::error::Error;
use std::process::Command;
use std::time::Instant;

use claystone::distributed::{DataParallel, DataParallelOptions, Group, ReduceOp};
use claystone::nn::{Activation, Linear, Module, Sequential};
use claystone::{Device, Tensor};
use mpi::collective::SystemOperation;
use mpi::traits::{Communicator, CommunicatorCollectives};

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// The number of jobs for each library.
const JOBS: usize = 5;

/// The number of measurements in a job.
const TIMES: usize = 15;

/// The sizes of the summed f32 buffers, in bytes.
const SIZES: [usize; 5] = [4 << 10, 256 << 10, 4 << 20, 25 << 20, 64 << 20];

fn main() -> Outcome {
    let args: Vec<String> = std::env::args().skip(1).filter(|a| a != "--bench").collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["rank", "mpi"] => run_mpi_rank(),
        ["rank", device] => run_claystone_rank(device.parse()?),
        ["rank", "overlap", device] => run_overlap_rank(device.parse()?),
        ["all_reduce"] => all_reduce(),
        ["overlap"] => overlap(),
        [] => all_reduce().and_then(|()| overlap()),
        _ => Err("the arguments are all_reduce, overlap, or none for both".into()),
    }
}

/// Runs this program on two ranks. Returns the numbers that rank 0 prints.
fn job(arguments: &[&str]) -> Outcome<Vec<f64>> {
    let mut mpirun = Command::new("mpirun");
    mpirun.args(["--allow-run-as-root", "--oversubscribe", "--bind-to", "core", "-n", "2"]);
    mpirun.arg(std::env::current_exe()?).arg("rank").args(arguments);
    let output = mpirun.env("RAYON_NUM_THREADS", "1").env("POCL_MAX_PTHREAD_COUNT", "1").output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into());
    }
    let text = String::from_utf8(output.stdout)?;
    text.split_whitespace().map(|word| Ok(word.parse()?)).collect()
}

/// Returns the devices to measure: the CPU, and the first OpenCL device if there is one.
fn devices() -> impl Iterator<Item = Device> {
    [Device::Cpu, Device::OpenCL(0)].into_iter().filter(Device::is_available)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Times `f`, after two calls that are not measured.
fn time(mut f: impl FnMut() -> Outcome) -> Outcome<f64> {
    let mut times = Vec::new();
    for i in 0..TIMES + 2 {
        let begun = Instant::now();
        f()?;
        if i >= 2 {
            times.push(begun.elapsed().as_secs_f64() * 1e3);
        }
    }
    Ok(median(times))
}

fn all_reduce() -> Outcome {
    let names: Vec<String> = devices().map(|device| device.to_string()).collect();
    let mut peers: Vec<(&str, Vec<Vec<f64>>)> = vec![("mpi", Vec::new())];
    peers.extend(names.iter().map(|name| (&**name, Vec::new())));
    for _ in 0..JOBS {
        for (name, times) in &mut peers {
            times.push(job(&[name])?);
        }
    }
    println!("all_reduce of f32 over two ranks, ms (median of {JOBS} jobs), and MPI_Allreduce's time over ours");
    print!("{:>12} {:>12}", "bytes", "MPI");
    names.iter().for_each(|name| print!(" {name:>12} {:>6}", "ratio"));
    println!();
    for (i, bytes) in SIZES.iter().enumerate() {
        let of = |times: &[Vec<f64>]| median(times.iter().map(|job| job[i]).collect());
        let mpi = of(&peers[0].1);
        print!("{bytes:>12} {mpi:>12.3}");
        peers[1..].iter().for_each(|(_, times)| print!(" {:>12.3} {:>6.2}", of(times), mpi / of(times)));
        println!();
    }
    Ok(())
}

/// Times `MPI_Allreduce` on host memory.
fn run_mpi_rank() -> Outcome {
    let universe = mpi::initialize().ok_or("MPI has been started already")?;
    let world = universe.world();
    for bytes in SIZES {
        let (from, mut to) = (vec![1f32; bytes / 4], vec![0f32; bytes / 4]);
        let ms = time(|| {
            world.barrier();
            world.all_reduce_into(&from[..], &mut to[..], SystemOperation::sum());
            Ok(())
        })?;
        assert!(to.iter().all(|&sum| sum == 2.0));
        if world.rank() == 0 {
            println!("{ms}");
        }
    }
    Ok(())
}

fn run_claystone_rank(device: Device) -> Outcome {
    let group = Group::world()?;
    for bytes in SIZES {
        let x = Tensor::ones(bytes / 4, device)?;
        device.synchronize()?;
        let ms = time(|| Ok(group.all_reduce(&x, ReduceOp::Mean)?))?;
        assert!(x.sub_scalar(1.0)?.abs()?.max((), false)?.item::<f32>()? == 0.0);
        if group.rank() == 0 {
            println!("{ms}");
        }
    }
    Ok(())
}

fn overlap() -> Outcome {
    println!("backward of ten layers of 1000 x 1000 whose gradients are reduced over two ranks, over one without");
    for device in devices() {
        let jobs = (0..JOBS).map(|_| job(&["overlap", &device.to_string()])).collect::<Outcome<Vec<_>>>()?;
        for (i, batch) in BATCHES.iter().enumerate() {
            let of = |k: usize| median(jobs.iter().map(|job| job[2 * i + k]).collect());
            let ratio = median(jobs.iter().map(|job| job[2 * i + 1] / job[2 * i]).collect());
            println!("{device:>10}  batch {batch:4}  {:8.1} ms, {:8.1} with, ratio {ratio:.2}", of(0), of(1));
        }
    }
    Ok(())
}

const BATCHES: [usize; 3] = [64, 256, 1024];

fn run_overlap_rank(device: Device) -> Outcome {
    let group = Group::world()?;
    let mut net = Sequential::new();
    for _ in 0..10 {
        net = net.push(Linear::new(1000, 1000, device)?.with_activation(Activation::Relu));
    }
    let net = DataParallel::new(net, &group, DataParallelOptions::default())?;
    for batch in BATCHES {
        let x = Tensor::randn([batch, 1000], device)?;
        let backward = || -> Outcome<f64> {
            net.zero_grad();
            let loss = net.forward(&x)?.mean((), false)?;
            device.synchronize()?;
            let begun = Instant::now();
            loss.backward()?;
            device.synchronize()?;
            Ok(begun.elapsed().as_secs_f64() * 1e3)
        };
        let (mut alone, mut reduced) = (Vec::new(), Vec::new());
        for _ in 0..TIMES {
            group.barrier()?;
            alone.push(net.no_sync(backward)?);
            group.barrier()?;
            reduced.push(backward()?);
        }
        if group.rank() == 0 {
            println!("{} {}", median(alone), median(reduced));
        }
    }
    Ok(())
}

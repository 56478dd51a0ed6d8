//! Measures the cost of a process's first use of a device: `startup [--device D]`.
//!
//! The program repeatedly starts itself as two small processes, and prints medians in milliseconds. The first process opens the device, adds
//! two tensors and reads the sum, with a warm program cache. The second process makes only the necessary driver calls: the context, a queue,
//! buffers, the same programs from the same cache, a write and a read. The difference is claystone's own cost.
//!
//! `startup --blob [--device D]` compares the first training step of two kinds of processes; the kinds alternate. The first kind starts with
//! warm caches of claystone and PoCL. The second kind starts with both caches empty, and imports a file of `export_cache`.
//!
//! `startup --cold [--device D]` prints the times of the first training steps of a variational autoencoder, three times: in a
//! process whose caches are both empty, and in a second process that uses the caches of the first.

use std::env;
use std::error::Error;
use std::path::Path;
use std::process::Command;
use std::ptr;
use std::time::Instant;

use claystone::nn::{Linear, Module};
use claystone::optim::{Adam, AdamConfig, Optimizer};
use claystone::{ConvOptions, Device, LossReduction, Tensor};
use opencl3::types::{cl_device_id, cl_int};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// The number of processes of each kind that are started.
const RUNS: usize = 9;
const N: usize = 1024;
/// The number of bytes before the binary in a file of the program cache: a name and a checksum.
const HEADER: usize = 16 + 32;

fn milliseconds(from: Instant) -> f64 {
    from.elapsed().as_secs_f64() * 1e3
}

/// Runs the first operation of a process. Prints when the device was known, when its memory was allocated, and when the sum was read.
fn first_operation(device: Device) -> Outcome<()> {
    let from = Instant::now();
    device.info()?;
    let known = milliseconds(from);
    let x = Tensor::from_slice(&vec![1f32; N], [N], device)?;
    let there = milliseconds(from);
    let sum: Vec<f32> = x.add(&x)?.to_vec()?;
    let done = milliseconds(from);
    if sum != [2.0; N] {
        return Err("a wrong sum".into());
    }
    println!("{known} {there} {done}");
    Ok(())
}

/// Imports a cache if requested, runs a training step of a small convolutional network, and exports the cache if requested. Prints the
/// milliseconds of the import, and the milliseconds until the step was done.
fn step(device: Device, import: Option<&String>, export: Option<&String>) -> Outcome<()> {
    let from = Instant::now();
    if let Some(file) = import {
        device.import_cache(file)?;
    }
    let imported = milliseconds(from);
    let leaf = |shape: &[usize]| Tensor::randn(shape, device)?.mul_scalar(0.1)?.requires_grad_(true);
    let (kernels, hidden, last) = (leaf(&[8, 1, 3, 3])?, leaf(&[64, 8 * 7 * 7])?, leaf(&[10, 64])?);
    let x = Tensor::randn(&[32, 1, 14, 14], device)?;
    let labels = Tensor::arange(0, 32, 1, (claystone::DType::I64, device))?.remainder_scalar(10)?;
    let options = ConvOptions { padding: 1.into(), ..ConvOptions::default() };
    let y = x.conv2d(&kernels, None, options)?.relu()?.max_pool2d([2, 2], Default::default())?;
    let y = y.reshape([32, 8 * 7 * 7])?.linear(&hidden, None)?.gelu()?.linear(&last, None)?;
    let loss = y.cross_entropy(&labels)?;
    loss.backward()?;
    let loss = loss.item::<f32>()?;
    let done = milliseconds(from);
    if let Some(file) = export {
        device.export_cache(file)?;
    }
    if !loss.is_finite() {
        return Err("the loss is not finite".into());
    }
    println!("{imported} {done}");
    Ok(())
}

/// Runs three training steps of the variational autoencoder of PyTorch's examples, on random pictures. Prints the milliseconds until the
/// model was built and until the end of each step.
fn vae(device: Device) -> Outcome<()> {
    let from = Instant::now();
    let mut net = Vae {
        hidden: Linear::new(784, 400, device)?,
        mean: Linear::new(400, 20, device)?,
        log_var: Linear::new(400, 20, device)?,
        decoder: Linear::new(20, 400, device)?,
        pixels: Linear::new(400, 784, device)?,
    };
    let mut optimiser = Adam::new(net.parameters_mut(), AdamConfig::default())?;
    let x = Tensor::rand([128, 784], device)?;
    device.synchronize()?;
    let mut times = vec![milliseconds(from)];
    for _ in 0..3 {
        let loss = net.loss(&x)?;
        optimiser.zero_grad();
        loss.backward()?;
        optimiser.step()?;
        if !loss.item::<f32>()?.is_finite() {
            return Err("the loss is not finite".into());
        }
        device.synchronize()?;
        times.push(milliseconds(from));
    }
    println!("{}", times.iter().map(f64::to_string).collect::<Vec<_>>().join(" "));
    Ok(())
}

struct Vae {
    hidden: Linear,
    mean: Linear,
    log_var: Linear,
    decoder: Linear,
    pixels: Linear,
}

impl Module for Vae {
    claystone::parts!(hidden, mean, log_var, decoder, pixels);
}

impl Vae {
    fn loss(&self, x: &Tensor) -> claystone::Result<Tensor> {
        let hidden = self.hidden.forward(x)?.relu()?;
        let (mean, log_var) = (self.mean.forward(&hidden)?, self.log_var.forward(&hidden)?);
        let deviation = log_var.mul_scalar(0.5)?.exp()?;
        let z = mean.add(&deviation.mul(&Tensor::randn_like(&deviation)?)?)?;
        let seen = self.pixels.forward(&self.decoder.forward(&z)?.relu()?)?.sigmoid()?;
        let likelihood = seen.binary_cross_entropy(x, None, LossReduction::Sum)?;
        let divergence = log_var.add_scalar(1.0)?.sub(&mean.square()?)?.sub(&log_var.exp()?)?;
        likelihood.add(&divergence.sum((), false)?.mul_scalar(-0.5)?)
    }
}

/// Runs this program with options and cache folders. Returns the milliseconds that the child prints, and the milliseconds of the whole child.
fn run_process<const N: usize>(device: Device, caches: &Path, options: &[&str]) -> Outcome<([f64; N], f64)> {
    let from = Instant::now();
    let mut child = Command::new(env::current_exe()?);
    child.args(["--device", &device.to_string()]).args(options);
    // PoCL creates its own cache folder, but not the parent folders.
    let [ours, pocl] = ["claystone", "pocl"].map(|name| caches.join(name));
    std::fs::create_dir_all(&pocl)?;
    let out = child.env("CLAYSTONE_CACHE_DIR", ours).env("POCL_CACHE_DIR", pocl).output()?;
    let whole = milliseconds(from);
    let printed: Vec<f64> = String::from_utf8(out.stdout)?.split_whitespace().filter_map(|v| v.parse().ok()).collect();
    match <[f64; N]>::try_from(printed) {
        Ok(printed) if out.status.success() => Ok((printed, whole)),
        _ => Err(String::from_utf8_lossy(&out.stderr).into_owned().into()),
    }
}

/// Runs [`step`] in a new process.
fn run_step_process(device: Device, caches: &Path, options: &[&str]) -> Outcome<[f64; 3]> {
    let ([imported, done], whole) = run_process(device, caches, &[&["--step"], options].concat())?;
    Ok([imported, done, whole])
}

fn print_cold_times(device: Device) -> Outcome<()> {
    println!("{}: ms until the model, steps 1, 2 and 3 are done, and of the process", device.info()?.name);
    let folder = tempfile::tempdir()?;
    for run in 0..3 {
        let caches = folder.path().join(run.to_string());
        for which in ["cold", "warm"] {
            let (times, whole) = run_process::<4>(device, &caches, &["--vae"])?;
            println!("{which} {times:9.1?} {whole:9.1}");
        }
    }
    Ok(())
}

fn compare_blob(device: Device) -> Outcome<()> {
    let folder = tempfile::tempdir()?;
    let (warm, file) = (folder.path().join("warm"), folder.path().join("blob"));
    let file = file.to_str().ok_or("a path that is no text")?;
    let cold = run_step_process(device, &warm, &[])?;
    // The second process loads the programs compiled by the first. The export then also contains what the driver caches when it launches them.
    run_step_process(device, &warm, &["--export", file])?;
    println!("{}: {} KiB", device.info()?.name, std::fs::metadata(file)?.len() >> 10);
    let [mut with_warm, mut with_blob] = [Vec::new(), Vec::new()];
    for run in 0..RUNS + 2 {
        with_warm.push(run_step_process(device, &warm, &[])?);
        with_blob.push(run_step_process(device, &folder.path().join(format!("empty{run}")), &["--import", file])?);
    }
    let median = |rows: &[[f64; 3]], column: usize| {
        let mut times: Vec<f64> = rows.iter().map(|row| row[column]).collect();
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    };
    println!("{:32} {:>9} {:>9} {:>9} {:>9}", "ms since the start of the program", "cold", "warm", "blob", "ratio");
    for (i, what) in ["the file is imported", "the step is done", "the process, from outside"].into_iter().enumerate() {
        let (warm, blob) = (median(&with_warm, i), median(&with_blob, i));
        println!("{what:32} {:9.2} {warm:9.2} {blob:9.2} {:9.3}", cold[i], blob / warm);
    }
    Ok(())
}

fn driver_error(what: &'static str) -> impl Fn(cl_int) -> String {
    move |code| format!("{what}: {code}")
}

/// Makes only the necessary driver calls, without claystone. `name` is the device's name.
fn driver_calls(name: &str, cache: &Path) -> Outcome<()> {
    use opencl3::device::{CL_DEVICE_NAME, CL_DEVICE_TYPE_ALL};
    let from = Instant::now();
    cl3::load_library().as_ref().map_err(|e| e.to_string())?;
    let mut chosen: Option<cl_device_id> = None;
    for platform in cl3::platform::get_platform_ids().map_err(|e| e.to_string())? {
        for id in cl3::device::get_device_ids(platform, CL_DEVICE_TYPE_ALL).unwrap_or_default() {
            let found = cl3::device::get_device_info(id, CL_DEVICE_NAME).map_err(|e| e.to_string())?.to_string();
            if chosen.is_none() && found.trim_matches(char::from(0)).trim() == name {
                chosen = Some(id);
            }
        }
    }
    let id = chosen.ok_or("no such device")?;
    let known = milliseconds(from);
    let context =
        cl3::context::create_context(&[id], ptr::null(), None, ptr::null_mut()).map_err(driver_error("context"))?;
    // SAFETY: plain calls with live objects; every pointer is to memory of the size that is passed beside it.
    unsafe {
        let queue = cl3::command_queue::create_command_queue(context, id, 0).map_err(driver_error("queue"))?;
        let buffer =
            cl3::memory::create_buffer(context, 1, 2 * N * 4, ptr::null_mut()).map_err(driver_error("buffer"))?;
        let mut values = vec![1f32; N];
        let at = values.as_mut_ptr().cast();
        cl3::command_queue::enqueue_write_buffer(queue, buffer, 1, 0, N * 4, at, 0, ptr::null())
            .map_err(driver_error("write"))?;
        let there = milliseconds(from);
        for file in std::fs::read_dir(cache)? {
            let bytes = std::fs::read(file?.path())?;
            if let Some(binary) = bytes.get(HEADER..) {
                let program = cl3::program::create_program_with_binary(context, &[id], &[binary]);
                let program = program.map_err(driver_error("program"))?;
                cl3::program::build_program(program, &[id], c"", None, ptr::null_mut())
                    .map_err(driver_error("build"))?;
            }
        }
        cl3::command_queue::enqueue_read_buffer(queue, buffer, 1, 0, N * 4, at, 0, ptr::null())
            .map_err(driver_error("read"))?;
        cl3::command_queue::finish(queue).map_err(driver_error("finish"))?;
        println!("{known} {there} {}", milliseconds(from));
    }
    Ok(())
}

/// Returns the medians of the numbers that a child process prints over [`RUNS`] runs, and the median of the process's total time.
fn medians(args: &[&str], cache: &Path) -> Outcome<[f64; 4]> {
    let mut rows: Vec<[f64; 4]> = Vec::new();
    for _ in 0..RUNS {
        let from = Instant::now();
        let out = Command::new(env::current_exe()?).args(args).env("CLAYSTONE_CACHE_DIR", cache).output()?;
        let whole = milliseconds(from);
        let text = String::from_utf8(out.stdout)?;
        let printed: Vec<f64> = text.split_whitespace().filter_map(|v| v.parse().ok()).collect();
        match printed[..] {
            [known, there, done] if out.status.success() => rows.push([known, there, done, whole]),
            _ => return Err(format!("{args:?}: {}", String::from_utf8_lossy(&out.stderr)).into()),
        }
    }
    Ok(std::array::from_fn(|i| {
        let mut column: Vec<f64> = rows.iter().map(|row| row[i]).collect();
        column.sort_by(f64::total_cmp);
        column[column.len() / 2]
    }))
}

fn main() -> Outcome<()> {
    let args: Vec<String> = env::args().collect();
    let value = |name: &str| args.iter().position(|a| a == name).and_then(|i| args.get(i + 1));
    let device: Device = value("--device").map_or(Ok(Device::best()), |d| d.parse())?;
    if args.iter().any(|a| a == "--ours") {
        return first_operation(device);
    }
    if args.iter().any(|a| a == "--step") {
        return step(device, value("--import"), value("--export"));
    }
    if args.iter().any(|a| a == "--vae") {
        return vae(device);
    }
    if args.iter().any(|a| a == "--cold") {
        return print_cold_times(device);
    }
    if args.iter().any(|a| a == "--blob") {
        return compare_blob(device);
    }
    if let Some(name) = value("--driver") {
        return driver_calls(name, env::var_os("CLAYSTONE_CACHE_DIR").ok_or("no cache")?.as_ref());
    }
    let cache = tempfile::tempdir()?;
    let (name, shown) = (device.info()?.name, device.to_string());
    let from = Instant::now();
    let mut first = Command::new(env::current_exe()?);
    let cold = first.args(["--ours", "--device", &shown]).env("CLAYSTONE_CACHE_DIR", cache.path()).output()?;
    println!(
        "{name}: {} programs built in the first process, of {:.1} ms",
        cache.path().read_dir()?.count(),
        milliseconds(from)
    );
    if !cold.status.success() {
        return Err(String::from_utf8_lossy(&cold.stderr).into());
    }
    let ours = medians(&["--ours", "--device", &shown], cache.path())?;
    let driver = match device {
        Device::Cpu => [0.0; 4],
        _ => medians(&["--driver", &name], cache.path())?,
    };
    println!("{:32} {:>9} {:>9} {:>9}", "ms since the start of the program", "all", "driver's", "ours");
    for (i, what) in ["the device is known", "a tensor is on it", "its sum is read", "the process, from outside"]
        .into_iter()
        .enumerate()
    {
        println!("{what:32} {:9.2} {:9.2} {:9.2}", ours[i], driver[i], ours[i] - driver[i]);
    }
    Ok(())
}

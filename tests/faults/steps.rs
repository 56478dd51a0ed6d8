//! The workload of the sweep: short programs with known results that together make every kind of driver call.

mod memory;
mod updates;

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use claystone::nn::{Activation, Linear, Module, Sequential};
use claystone::optim::{AdamW, AdamWConfig, Optimizer, Sgd, SgdConfig};
use claystone::storage::plan::Plan;
use claystone::{DType, Device, Error, Graph, Kernel, Result, Stream, Tensor, manual_seed, with_stream};

/// The results of a step. They are compared with the results without faults.
pub type Values = Vec<Vec<f32>>;

/// A tensor that exists beyond a failure, and the values that it may have afterwards.
pub struct Kept {
    pub tensor: Tensor,
    pub either: Vec<Vec<f32>>,
}

/// The state of a running step.
pub struct Run {
    pub device: Device,
    pub kept: Vec<Kept>,
}

impl Run {
    /// Creates a tensor from `values`. It must keep these values until `change` changes it.
    fn keep(&mut self, values: Vec<f32>) -> Result<Tensor> {
        let tensor = Tensor::from_slice(&values, [values.len()], self.device)?;
        self.kept.push(Kept { tensor: tensor.shallow_clone(), either: vec![values] });
        Ok(tensor)
    }

    /// Creates a tensor of `n` different numbers. It must keep these values until `change` changes it.
    fn ramp(&mut self, n: usize) -> Result<Tensor> {
        self.keep(ramp(n))
    }

    /// Changes kept tensor `i` in place. After an error the tensor must be unchanged, unless the error says that it may have been changed
    /// in part.
    fn change(&mut self, i: usize, f: impl Fn(f32) -> f32, change: impl FnOnce(&Tensor) -> Result<()>) -> Result<()> {
        let kept = &mut self.kept[i];
        let after: Vec<f32> = kept.either[0].iter().map(|&x| f(x)).collect();
        let result = change(&kept.tensor);
        match &result {
            Ok(()) => kept.either = vec![after],
            Err(error) if is_partial_error(error) => drop(self.kept.remove(i)), // removed from the check, because its values are unknown
            Err(_) => {}
        }
        result
    }

    /// Calls `f`, which changes these tensors in place. After an error each tensor must be unchanged, unless the error says otherwise.
    fn change_all<T>(&mut self, tensors: &[Tensor], f: impl FnOnce() -> Result<T>) -> Result<T> {
        let before = tensors.iter().map(Tensor::to_vec).collect::<Result<Values>>()?;
        f().inspect_err(|error| {
            if !is_partial_error(error) {
                let kept = tensors.iter().zip(before);
                self.kept.extend(kept.map(|(t, v)| Kept { tensor: t.shallow_clone(), either: vec![v] }));
            }
        })
    }
}

/// True if the error says that the operation may have been executed completely or in part.
pub fn is_partial_error(error: &Error) -> bool {
    matches!(error, Error::Partial { .. })
}

fn ramp(n: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 37 + 11) % 101) as f32 / 8.0 - 6.0).collect()
}

/// One program of the workload.
pub struct Step {
    pub name: &'static str,
    /// The allocator's settings.
    pub conf: &'static str,
    /// The value of `CLAYSTONE_CACHE_DIR`, which sets the program cache.
    pub cache: Option<&'static str>,
    /// Whether injections begin at the first driver call of the process. Each injection then needs its own process.
    pub first: bool,
    pub run: fn(&mut Run) -> Result<Values>,
}

/// Creates a step that runs once in its process before the injections, with the default program cache.
const fn step(name: &'static str, conf: &'static str, run: fn(&mut Run) -> Result<Values>) -> Step {
    Step { name, conf, cache: None, first: false, run }
}

/// A number of f32 elements that take more than 4 MiB.
const LARGE_ELEMENTS: usize = 1_050_000;
const DEFAULT_CONFIG: &str = "decay_ms:0";
/// Allocator settings with a small memory limit, so that blocks must be compacted.
const LIMITED_CONFIG: &str = "decay_ms:0,memory_limit_mb:8";

pub const STEPS: &[Step] = &[
    Step { first: true, ..step("start", DEFAULT_CONFIG, start) },
    Step { first: true, cache: Some("off"), ..step("start without a cache", DEFAULT_CONFIG, start) },
    step("create", DEFAULT_CONFIG, create),
    step("views", DEFAULT_CONFIG, views),
    step("clone", DEFAULT_CONFIG, clone),
    step("launches", DEFAULT_CONFIG, launches),
    step("reductions", DEFAULT_CONFIG, reductions),
    step("in place", DEFAULT_CONFIG, in_place),
    step("scatter_reduce", DEFAULT_CONFIG, updates::scatter_reduce),
    step("indexing", DEFAULT_CONFIG, indexing),
    step("bad index", DEFAULT_CONFIG, bad_index),
    step("compile", DEFAULT_CONFIG, compile),
    step("transfers", DEFAULT_CONFIG, transfers),
    step("large transfers", DEFAULT_CONFIG, large_transfers),
    step("pinned", DEFAULT_CONFIG, pinned),
    step("streams", DEFAULT_CONFIG, streams),
    step("events", DEFAULT_CONFIG, events),
    step("times", DEFAULT_CONFIG, times),
    step("record_stream", DEFAULT_CONFIG, record_stream),
    step("backward", DEFAULT_CONFIG, backward),
    step("accumulation", DEFAULT_CONFIG, updates::accumulation),
    step("running statistics", DEFAULT_CONFIG, updates::running_statistics),
    step("optimisers", DEFAULT_CONFIG, optimisers),
    step("graphs", DEFAULT_CONFIG, graphs),
    step("plans", DEFAULT_CONFIG, plans),
    step("compaction", LIMITED_CONFIG, compaction),
    step("compaction for room", LIMITED_CONFIG, compaction_for_room),
    step("out of memory", LIMITED_CONFIG, memory::out_of_memory),
    step("snapshots", DEFAULT_CONFIG, memory::snapshots),
    step("empty_cache", DEFAULT_CONFIG, memory::empty_cache),
];

/// Discovers devices, opens a device, and compiles the first programs.
fn start(run: &mut Run) -> Result<Values> {
    let known = [3.0f32, 1.0, 2.0];
    let t = run.keep(known.to_vec())?;
    let (more, sum) = (t.add_scalar(1)?.to_vec::<f32>()?, t.sum((), false)?.item::<f32>()?);
    if more != known.map(|x| x + 1.0) || sum != 6.0 {
        return Err(wrong_value_error(format!("{known:?} and 1 are {more:?}, and their sum is {sum}")));
    }
    Ok(vec![more, vec![sum]])
}

fn create(run: &mut Run) -> Result<Values> {
    let d = run.device;
    manual_seed(5);
    [
        Tensor::zeros([7], d)?,
        Tensor::full([300], 2.5, d)?,
        Tensor::arange(0, 20, 1, (DType::F32, d))?,
        Tensor::eye(4, d)?,
        Tensor::rand([33], d)?,
        Tensor::ones([5], (DType::F16, d))?.to_dtype(DType::F32)?,
        run.ramp(100)?,
    ]
    .iter()
    .map(|t| t.to_vec())
    .collect()
}

fn views(run: &mut Run) -> Result<Values> {
    let t = run.ramp(240)?.reshape([12, 20])?;
    let views = [t.t()?, t.narrow(1, 3, 7)?, t.slice(0, 1, None, 3)?, t.select(1, 2)?.unsqueeze(1)?.expand([12, 5])?];
    let mut values: Values = views.iter().map(|v| v.to_vec()).collect::<Result<_>>()?;
    values.push(views[0].contiguous()?.to_vec()?);
    values.push(views[0].reshape([240])?.to_vec()?);
    Ok(values)
}

fn clone(run: &mut Run) -> Result<Values> {
    let t = run.ramp(5000)?;
    let (whole, part) = (t.try_clone()?, t.narrow(0, 100, 200)?.try_clone()?);
    whole.fill_(1.0)?;
    Ok(vec![whole.to_vec()?, part.to_vec()?, t.to_vec()?])
}

fn launches(run: &mut Run) -> Result<Values> {
    let (a, b) = (run.ramp(256)?.reshape([16, 16])?, run.ramp(16)?);
    let sum = a.add(&b)?.mul_scalar(2)?;
    let wide = sum.tanh()?.exp()?;
    let product = wide.matmul(&a)?;
    Ok(vec![sum.to_vec()?, product.softmax(1)?.to_vec()?, wide.to_vec()?])
}

fn reductions(run: &mut Run) -> Result<Values> {
    let t = run.ramp(3000)?.reshape([60, 50])?;
    let total = t.sum((), false)?.item::<f32>()?;
    let (rows, mean, largest) = (t.sum(1, false)?, t.mean(0, true)?, t.amax(1, false)?);
    let all = t.flatten(0, -1)?.sum((), false)?;
    Ok(vec![vec![total], rows.to_vec()?, mean.to_vec()?, largest.to_vec()?, t.cumsum(0)?.to_vec()?, all.to_vec()?])
}

fn in_place(run: &mut Run) -> Result<Values> {
    run.ramp(1000)?;
    run.ramp(50_000)?;
    for i in 0..2 {
        let first = run.kept.len() - 2 + i;
        run.change(first, |x| x + 1.0, |t| t.add_scalar_(1).map(drop))?;
        run.change(first, |x| x * 2.0, |t| t.mul_scalar_(2).map(drop))?;
        run.change(first, |_| 3.0, |t| t.fill_(3.0).map(drop))?;
        let n = run.kept[first].tensor.numel();
        let other = Tensor::full([n], 4.0, run.device)?;
        run.change(first, |_| 4.0, |t| t.copy_(&other).map(drop))?;
        run.change(first, |x| x + 4.0, |t| t.add_(&other).map(drop))?;
    }
    run.kept.iter().rev().take(2).map(|k| k.tensor.to_vec()).collect()
}

fn indexing(run: &mut Run) -> Result<Values> {
    let t = run.ramp(200)?.reshape([20, 10])?;
    let index = Tensor::from_slice(&[3i64, 17, 0, 3], [4], run.device)?;
    let rows = t.index_select(0, &index)?;
    let positive = t.gt_scalar(0)?.nonzero()?.to_dtype(DType::F32)?;
    let (sorted, _) = t.flatten(0, -1)?.sort(0, false)?;
    let joined = Tensor::cat(&[&rows, &t], 0)?;
    Ok(vec![rows.to_vec()?, positive.to_vec()?, sorted.to_vec()?, joined.to_vec()?])
}

/// An index out of range must be reported to a reader of the result or at the next wait, and nowhere else.
fn bad_index(run: &mut Run) -> Result<Values> {
    let t = run.ramp(20)?;
    let index = |i: i64| Tensor::from_slice(&[1i64, i], [2], run.device);
    let (bad, good) = (index(99)?, index(7)?);
    match t.index_select(0, &bad) {
        Err(error) => is_about_index(error)?,
        Ok(poisoned) => match poisoned.to_vec::<f32>() {
            Ok(values) => return Err(wrong_value_error(format!("index 99 of 20 gave {values:?}"))),
            Err(first) => {
                let index_result = is_about_index(first);
                if index_result.is_err() {
                    // The read failed. Either the fault was not reported yet and this second read reports it, or the result still cannot be read.
                    match poisoned.to_vec::<f32>() {
                        Ok(values) => {
                            return Err(wrong_value_error(format!(
                                "a second read after index 99 of 20 gave {values:?}"
                            )));
                        }
                        Err(second) => _ = is_about_index(second),
                    }
                }
                index_result?;
            }
        },
    }
    Ok(vec![t.index_select(0, &good)?.to_vec()?])
}

/// Returns Ok if the error reports the bad index, otherwise the error.
fn is_about_index(error: Error) -> Result<()> {
    match error {
        Error::IndexOutOfRange { index: 99, .. } => Ok(()),
        error => Err(error),
    }
}

/// Returns the error of a step that read a wrong value; see [`is_wrong`].
fn wrong_value_error(what: String) -> Error {
    Error::Invalid { op: "faults", reason: format!("WRONG: {what}") }
}

/// True if a step returned this error because it read a wrong value.
pub fn is_wrong(error: &Error) -> bool {
    matches!(error, Error::Invalid { op: "faults", .. })
}

/// Compiles a kernel whose source is new each time.
fn compile(run: &mut Run) -> Result<Values> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let (t, number) = (run.ramp(10)?, NEXT.fetch_add(1, Relaxed));
    let source = format!(
        "__kernel void twice(__global const float *x, __global float *y) {{
            size_t i = get_global_id(0); // {} {number}
            y[i] = 2 * x[i];
        }}",
        std::process::id()
    );
    let (kernel, out) = (Kernel::from_source("twice", source, "")?, Tensor::zeros([10], run.device)?);
    let call = kernel.call().arg(&t).out(&out).global(&[10]);
    // SAFETY: there are ten work-items, and each uses one element of both tensors.
    unsafe { call.launch()? };
    Ok(vec![out.to_vec()?])
}

fn transfers(run: &mut Run) -> Result<Values> {
    let (small, large) = (run.ramp(10)?, run.ramp(700_000)?);
    let strided = large.reshape([700, 1000])?.t()?.narrow(0, 5, 10)?.to_device(Device::Cpu)?;
    let back = large.to_device(Device::Cpu)?.to_device(run.device)?;
    let into = Tensor::zeros([10], Device::Cpu)?;
    into.copy_(&small)?;
    let host = large.narrow(0, 7, 1000)?.to_host::<f32>()?;
    Ok(vec![large.to_vec()?, strided.to_vec()?, back.to_vec()?, into.to_vec()?, host.to_vec()])
}

/// Transfers elements so large that a CPU device maps the buffers.
fn large_transfers(run: &mut Run) -> Result<Values> {
    let large = run.keep(vec![3.0; LARGE_ELEMENTS])?;
    let copy = large.try_clone()?;
    run.kept.push(Kept { tensor: copy.shallow_clone(), either: vec![vec![3.0; LARGE_ELEMENTS]] });
    let twice = copy.mul_scalar(2)?;
    let host = Tensor::full([LARGE_ELEMENTS], 5.0, Device::Cpu)?;
    let first = run.kept.len() - 2;
    run.change(first, |_| 5.0, |t| t.copy_(&host).map(drop))?;
    Ok(vec![large.to_vec()?, twice.to_vec()?])
}

fn pinned(run: &mut Run) -> Result<Values> {
    let values = ramp(300_000);
    let host = Tensor::from_slice(&values, [300_000], Device::Cpu)?;
    let pinned = host.pin_memory(run.device)?;
    let there = pinned.to_device(run.device)?;
    run.kept.push(Kept { tensor: there.shallow_clone(), either: vec![values] });
    let back = Tensor::zeros([300_000], Device::Cpu)?.pin_memory(run.device)?;
    back.copy_(&there.mul_scalar(2)?)?;
    Ok(vec![there.to_vec()?, back.to_vec()?])
}

fn streams(run: &mut Run) -> Result<Values> {
    let d = run.device;
    let (a, b, main) = (Stream::new(d)?, Stream::new(d)?, Stream::current(d)?);
    let x = run.ramp(1000)?;
    a.wait_stream(&main)?;
    let doubled = with_stream(&a, || x.mul_scalar(2))?;
    b.wait_stream(&a)?;
    let less = with_stream(&b, || doubled.add_scalar(-1))?;
    a.wait_stream(&b)?;
    let values = with_stream(&a, || less.add(&x)?.to_vec())?;
    main.wait_stream(&b)?;
    d.synchronize()?;
    Ok(vec![values, less.to_vec()?])
}

fn events(run: &mut Run) -> Result<Values> {
    let (stream, x) = (Stream::new(run.device)?, run.ramp(1000)?);
    let made = Stream::current(run.device)?.record_event()?;
    stream.wait_event(&made)?;
    let y = with_stream(&stream, || x.add_scalar(1)?.exp())?;
    let done = stream.record_event()?;
    done.is_done()?;
    stream.is_idle()?;
    done.synchronize()?;
    if !done.is_done()? {
        return Err(wrong_value_error("an event that was waited for is not done".into()));
    }
    stream.synchronize()?;
    Ok(vec![y.to_vec()?])
}

/// Records timed events, which need a separate queue with profiling.
fn times(run: &mut Run) -> Result<Values> {
    let (stream, x) = (Stream::new(run.device)?, run.ramp(1000)?);
    stream.wait_stream(&Stream::current(run.device)?)?;
    let start = stream.record_timed_event()?;
    let y = with_stream(&stream, || x.add_scalar(1)?.exp())?;
    let end = stream.record_timed_event()?;
    if start.elapsed_time(&end)? < 0.0 {
        return Err(wrong_value_error("time ran backwards".into()));
    }
    stream.synchronize()?;
    Ok(vec![y.to_vec()?])
}

/// A block that is in use on another stream must not be reused.
fn record_stream(run: &mut Run) -> Result<Values> {
    let (side, main) = (Stream::new(run.device)?, Stream::current(run.device)?);
    let x = run.ramp(200_000)?;
    let mut values = Vec::new();
    for i in 0..3 {
        let temporary = x.mul_scalar(2)?;
        side.wait_stream(&main)?;
        let sum = with_stream(&side, || {
            temporary.record_stream(&side)?;
            temporary.add_scalar(i)?.add(&temporary)
        })?;
        drop(temporary);
        let next = Tensor::full([200_000], 7.0, run.device)?; // may get the block of `temporary` only after the other stream has read it
        values.push(with_stream(&side, || sum.to_vec())?);
        values.push(next.to_vec()?);
    }
    side.synchronize()?;
    Ok(values)
}

/// Returns a small network with the same weights each time, its inputs and its labels.
fn network(run: &mut Run) -> Result<(Sequential, Tensor, Tensor)> {
    let d = run.device;
    manual_seed(3);
    let net =
        Sequential::new().push(Linear::new(12, 16, d)?.with_activation(Activation::Relu)).push(Linear::new(16, 5, d)?);
    let x = run.ramp(96)?.reshape([8, 12])?;
    let y = Tensor::from_slice(&[0i64, 1, 2, 3, 4, 0, 1, 2], [8], d)?;
    Ok((net, x, y))
}

fn backward(run: &mut Run) -> Result<Values> {
    let (net, x, y) = network(run)?;
    let loss = net.forward(&x)?.cross_entropy(&y)?;
    loss.backward()?;
    let mut values = vec![loss.to_vec()?];
    for parameter in net.parameters() {
        let gradient = parameter.grad().ok_or_else(|| wrong_value_error("backward gave Ok and no gradient".into()))?;
        values.push(gradient.to_vec()?);
    }
    Ok(values)
}

fn optimisers(run: &mut Run) -> Result<Values> {
    let mut values = Values::new();
    for adamw in [false, true] {
        let (mut net, x, y) = network(run)?;
        let mut optimizer: Box<dyn Optimizer> = match adamw {
            true => Box::new(AdamW::new(net.parameters_mut(), AdamWConfig::default())?),
            false => {
                Box::new(Sgd::new(net.parameters_mut(), SgdConfig { lr: 0.1, momentum: 0.9, ..Default::default() })?)
            }
        };
        for _ in 0..2 {
            optimizer.zero_grad();
            let loss = net.forward(&x)?.cross_entropy(&y)?;
            loss.backward()?;
            optimizer.step()?;
            values.push(loss.to_vec()?);
        }
        for parameter in net.parameters() {
            values.push(parameter.to_vec()?);
        }
    }
    Ok(values)
}

/// A failed replay must either do nothing, or say in its error that it may have happened in part.
fn graphs(run: &mut Run) -> Result<Values> {
    let (x, total) = (run.ramp(500)?, Tensor::zeros([500], run.device)?);
    let (graph, y) = Graph::capture(run.device, || {
        let y = x.mul_scalar(2)?.add_scalar(1)?;
        total.add_(&y)?;
        total.slice_assign_(0..10, 0)?;
        y.mul(&y)
    })?;
    let mut values = Values::new();
    let mut known = total.to_vec::<f32>()?;
    for _ in 0..3 {
        if let Err(error) = graph.replay() {
            if !is_partial_error(&error) {
                run.kept.push(Kept { tensor: total, either: vec![known] });
            }
            return Err(error);
        }
        known = total.to_vec()?;
        values.push(known.clone());
    }
    values.push(y.to_vec()?);
    Ok(values)
}

fn plans(run: &mut Run) -> Result<Values> {
    let x = run.ramp(5000)?;
    let step = || -> Result<Vec<f32>> {
        let y = x.mul_scalar(2)?;
        let z = y.add(&x)?.exp()?;
        drop(y);
        z.add_scalar(1)?.narrow(0, 0, 100)?.to_vec()
    };
    let (first, mut plan) = Plan::record(run.device, step)?;
    let mut values = vec![first?];
    for _ in 0..2 {
        values.push(plan.run(step)?);
    }
    Ok(values)
}

/// Allocates `blocks` blocks, keeps every second block and frees the others.
fn keep_every_second_block(run: &mut Run, blocks: usize, elements: usize) -> Result<()> {
    let mut gaps = Vec::new();
    for i in 0..blocks {
        match i % 2 {
            0 => run.keep((0..elements).map(|j| (i * elements + j) as f32).collect()).map(drop)?,
            _ => gaps.push(Tensor::empty([elements], run.device)?),
        }
    }
    Ok(())
}

fn compaction(run: &mut Run) -> Result<Values> {
    keep_every_second_block(run, 12, 50_000)?;
    run.device.compact()?;
    run.kept.iter().map(|k| k.tensor.to_vec()).collect()
}

fn compaction_for_room(run: &mut Run) -> Result<Values> {
    keep_every_second_block(run, 14, 140_000)?; // takes 7.5 of 8 MiB and frees every second block
    let large = Tensor::full([900_000], 1.0, run.device)?; // larger than every gap
    let mut values = vec![large.to_vec()?];
    for k in &run.kept {
        values.push(k.tensor.to_vec()?);
    }
    Ok(values)
}
